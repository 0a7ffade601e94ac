/* Clocks: the monotonic clock, wall time for people, and the observed clock of whoever judges.
 *
 * A process that was stopped or swapped out must read its mail before it calls anybody silent. An
 * observer therefore lets time advance by at most CLOCK_TICK_MAX_MS per call: a pause of an hour
 * is one tick long. Observed time only ever lags the monotonic clock; deadlines that are judged
 * with an observer must be made from the same observer. Call it at least each CLOCK_TICK_MAX_MS,
 * otherwise the waiting itself looks like a pause. An observer belongs to one thread. */
#ifndef RUNTIME_CLOCK_H
#define RUNTIME_CLOCK_H

#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "base/time.h"

#define CLOCK_TICK_MAX_MS 200
#define CLOCK_WALL_TEXT   25 /* "2026-01-01T00:00:00.123Z" and its NUL */

struct clock_observer {
    struct instant real;     /* CLOCK_MONOTONIC at the last call */
    struct instant observed; /* what the last call returned */
    struct span lost;        /* all time that was not counted */
    uint64_t pauses;         /* calls that found more than CLOCK_TICK_MAX_MS gone */
};

/* CLOCK_MONOTONIC. Any thread. */
struct instant clock_now(void);
/* CLOCK_REALTIME in milliseconds since 1970, for printing and registry display only. */
int64_t clock_wall_ms(void);
/* Writes the wall time as UTC text. text: CLOCK_WALL_TEXT bytes. */
void clock_wall_text(char *text);
/* The same point as a CLOCK_MONOTONIC timespec; INSTANT_NEVER and negative instants are clamped. */
struct timespec clock_to_timespec(struct instant at);

void clock_observer_init(struct clock_observer *observer);
/* Reads the clock and returns observed time. */
struct instant clock_observe(struct clock_observer *observer);
/* The same with the clock's value given (tests, or one reading for several observers). A clock that
 * goes backwards counts as standing still. */
struct instant clock_observe_at(struct clock_observer *observer, struct instant real);
/* When an observed deadline falls due on the monotonic clock if no pause comes in between: what to
 * sleep until. INSTANT_NEVER stays. */
struct instant clock_real_deadline(const struct clock_observer *observer, struct instant observed);

#endif
