#include "runtime/clock.h"

#include <stdio.h>

#include "base/check.h"

#define NS_PER_SECOND 1000000000

struct instant clock_now(void) {
    struct timespec now;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    return (struct instant){(int64_t)now.tv_sec * NS_PER_SECOND + now.tv_nsec};
}

int64_t clock_wall_ms(void) {
    struct timespec now;
    CHECK(clock_gettime(CLOCK_REALTIME, &now) == 0);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void clock_wall_text(char *text) {
    int64_t ms = clock_wall_ms();
    time_t seconds = (time_t)(ms / 1000);
    struct tm tm;
    CHECK(gmtime_r(&seconds, &tm) != NULL);
    size_t len = strftime(text, CLOCK_WALL_TEXT, "%Y-%m-%dT%H:%M:%S", &tm);
    (void)snprintf(text + len, CLOCK_WALL_TEXT - len, ".%03uZ", (unsigned)(ms % 1000));
}

struct timespec clock_to_timespec(struct instant at) {
    if (at.ns < 0) {
        at.ns = 0;
    }
    return (struct timespec){.tv_sec = at.ns / NS_PER_SECOND, .tv_nsec = at.ns % NS_PER_SECOND};
}

void clock_observer_init(struct clock_observer *observer) {
    struct instant now = clock_now();
    *observer = (struct clock_observer){.real = now, .observed = now};
}

struct instant clock_observe(struct clock_observer *observer) {
    return clock_observe_at(observer, clock_now());
}

struct instant clock_observe_at(struct clock_observer *observer, struct instant real) {
    int64_t advance = real.ns - observer->real.ns;
    if (advance <= 0) {
        return observer->observed;
    }
    int64_t most = span_ms(CLOCK_TICK_MAX_MS).ns;
    if (advance > most) {
        observer->pauses++;
        observer->lost.ns += advance - most;
        advance = most;
    }
    observer->real = real;
    observer->observed.ns += advance;
    return observer->observed;
}

struct instant clock_real_deadline(const struct clock_observer *observer, struct instant observed) {
    return instant_add(observed, instant_since(observer->real, observer->observed));
}
