/* What every unit test of this room includes: cmocka needs these headers first. */
#ifndef UNIT_BASE_UNIT_H
#define UNIT_BASE_UNIT_H

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* Runs `statement` in a child process and asserts that it aborts: how a CHECK is tested. */
#define assert_aborts(statement)                                                                   \
    do {                                                                                           \
        (void)fflush(NULL);                                                                        \
        pid_t child_ = fork();                                                                     \
        assert_true(child_ >= 0);                                                                  \
        if (child_ == 0) {                                                                         \
            (void)signal(SIGABRT, SIG_DFL);                                                        \
            (void)!freopen("/dev/null", "w", stderr);                                              \
            statement;                                                                             \
            _exit(0);                                                                              \
        }                                                                                          \
        int status_ = 0;                                                                           \
        assert_int_equal(waitpid(child_, &status_, 0), child_);                                    \
        assert_true(WIFSIGNALED(status_) && WTERMSIG(status_) == SIGABRT);                         \
    } while (0)

/* Zeroed heap memory of exactly this size, so that the address sanitizer sees every overrun. */
static inline void *exact(size_t size) {
    void *memory = calloc(1, size > 0 ? size : 1);
    assert_non_null(memory);
    return memory;
}

#endif
