#include "runtime/signals.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>

#include "base/check.h"
#include "runtime/clock.h"

static void signals_waited_for(sigset_t *set) {
    CHECK(sigemptyset(set) == 0);
    CHECK(sigaddset(set, SIGTERM) == 0);
    CHECK(sigaddset(set, SIGINT) == 0);
    CHECK(sigaddset(set, SIGHUP) == 0);
}

void signals_block(void) {
    sigset_t set;
    signals_waited_for(&set);
    CHECK(pthread_sigmask(SIG_BLOCK, &set, NULL) == 0);
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    CHECK(sigaction(SIGPIPE, &ignore, NULL) == 0);
}

int signals_wait(struct instant deadline) {
    sigset_t set;
    signals_waited_for(&set);
    for (;;) {
        struct instant now = clock_now();
        struct instant left = {deadline.ns > now.ns ? deadline.ns - now.ns : 0};
        struct timespec timeout = clock_to_timespec(left);
        int number = sigtimedwait(&set, NULL, &timeout);
        if (number > 0) {
            return number;
        }
        CHECK(errno == EAGAIN || errno == EINTR);
        if (errno == EAGAIN) {
            return 0;
        }
    }
}
