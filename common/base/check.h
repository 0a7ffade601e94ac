/* CHECK: facts that only a bug can break. Always on, in every build; prints both operands and
 * aborts.
 *
 * The one function behind it (check_failed) is replaceable so that the simulator can add its seed.
 */
#ifndef BASE_CHECK_H
#define BASE_CHECK_H

#include <stdint.h>

typedef void (*check_hook)(const char *file, int line, const char *what);

/* Prints "file:line: check failed: what (left, right)", calls the hook, aborts. Never returns. */
_Noreturn void check_failed(const char *file, int line, const char *what, long long left,
                            long long right);

/* Sets a function that runs just before abort (NULL: none). Not thread-safe; call at start. */
void check_set_hook(check_hook hook);

#define CHECK(fact)                                                                                \
    do {                                                                                           \
        if (__builtin_expect(!(fact), 0)) {                                                        \
            check_failed(__FILE__, __LINE__, #fact, 0, 0);                                         \
        }                                                                                          \
    } while (0)

/* CHECK of an integer relation that prints both operands. */
#define CHECK_OP(left, op, right)                                                                  \
    do {                                                                                           \
        if (__builtin_expect(!((left)op(right)), 0)) {                                             \
            check_failed(__FILE__, __LINE__, #left " " #op " " #right, (long long)(left),          \
                         (long long)(right));                                                      \
        }                                                                                          \
    } while (0)

#endif
