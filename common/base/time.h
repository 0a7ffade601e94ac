/* Monotonic time as two structs that cannot be mixed up: a point (instant) and a length (span).
 *
 * Nanoseconds. Instants are CLOCK_MONOTONIC in programs and virtual in the simulator; wall time
 * never appears in either. INSTANT_NEVER sorts after everything and absorbs additions. */
#ifndef BASE_TIME_H
#define BASE_TIME_H

#include <stdbool.h>
#include <stdint.h>

struct instant {
    int64_t ns;
};
struct span {
    int64_t ns;
};

#define INSTANT_NEVER ((struct instant){INT64_MAX})

static inline struct span span_ms(int64_t ms) {
    return (struct span){ms * 1000000};
}
static inline struct span span_us(int64_t us) {
    return (struct span){us * 1000};
}
static inline int64_t span_to_ms(struct span span) {
    return span.ns / 1000000;
}
static inline double span_to_seconds(struct span span) {
    return (double)span.ns / 1e9;
}
static inline bool instant_is_never(struct instant at) {
    return at.ns == INT64_MAX;
}
static inline struct instant instant_add(struct instant at, struct span by) {
    if (at.ns == INT64_MAX || (by.ns > 0 && at.ns > INT64_MAX - by.ns)) {
        return INSTANT_NEVER;
    }
    return (struct instant){at.ns + by.ns};
}
static inline struct span instant_since(struct instant later, struct instant earlier) {
    return (struct span){later.ns - earlier.ns};
}
static inline bool instant_reached(struct instant now, struct instant at) {
    return now.ns >= at.ns;
}
static inline struct instant instant_min(struct instant a, struct instant b) {
    return a.ns <= b.ns ? a : b;
}

#endif
