/* Which tokens of one component are there: a few separate ranges, in order, in fixed memory.
 *
 * Senders go through a sequence in order and a link keeps order, so one range per component is the
 * rule; a sender that leaves more gaps than COVERAGE_RANGES_MAX is refused instead of remembered.
 * Pure. */
#ifndef KVLINK_COVERAGE_H
#define KVLINK_COVERAGE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#define COVERAGE_RANGES_MAX 4u

struct coverage_range {
    uint32_t first;
    uint32_t end; /* > first */
};
struct coverage {
    uint32_t count;
    struct coverage_range ranges[COVERAGE_RANGES_MAX]; /* ascending, never touching */
};

/* Finds the first missing range that begins in [*from, end) and cuts it at end; *from becomes the
 * token after it. False if nothing is missing. Start with *from = first. */
bool coverage_next_gap(const struct coverage *coverage, uint32_t *from, uint32_t end,
                       struct coverage_range *gap_out);
/* Tokens of [first, end) that are missing. */
uint32_t coverage_missing(const struct coverage *coverage, uint32_t first, uint32_t end);
/* Adds [first, end), first < end. STATUS_BUSY (nothing changed) if that would need one range too
 * many. */
MUST_USE enum status coverage_add(struct coverage *coverage, uint32_t first, uint32_t end);

#endif
