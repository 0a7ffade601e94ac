/* What every unit test of this room includes: cmocka needs these headers first. */
#ifndef UNIT_RUNTIME_UNIT_H
#define UNIT_RUNTIME_UNIT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define assert_contains(text, part)                                                                \
    do {                                                                                           \
        if (strstr((text), (part)) == NULL) {                                                      \
            fail_msg("\"%s\" is not in:\n%s", (part), (text));                                     \
        }                                                                                          \
    } while (0)
#define assert_lacks(text, part)                                                                   \
    do {                                                                                           \
        if (strstr((text), (part)) != NULL) {                                                      \
            fail_msg("\"%s\" must not be in:\n%s", (part), (text));                                \
        }                                                                                          \
    } while (0)

#endif
