#include "runtime/random.h"

#include <errno.h>
#include <sys/random.h>

#include "base/check.h"

void random_bytes(void *to, size_t len) {
    unsigned char *at = to;
    while (len > 0) {
        ssize_t got = getrandom(at, len, 0);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        CHECK_OP(got, >, 0);
        at += got;
        len -= (size_t)got;
    }
}

uint64_t random_u64(void) {
    uint64_t value = 0;
    while (value == 0) {
        random_bytes(&value, sizeof value);
    }
    return value;
}
