#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>

static check_hook installed_hook;

void check_set_hook(check_hook hook) {
    installed_hook = hook;
}

_Noreturn void check_failed(const char *file, int line, const char *what, long long left,
                            long long right) {
    (void)fprintf(stderr, "%s:%d: check failed: %s (%lld, %lld)\n", file, line, what, left, right);
    (void)fflush(stderr);
    if (installed_hook != 0) {
        installed_hook(file, line, what);
    }
    abort();
}
