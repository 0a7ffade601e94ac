#include "kvlink/coverage.h"

#include <string.h>

#include "base/check.h"

bool coverage_next_gap(const struct coverage *coverage, uint32_t *from, uint32_t end,
                       struct coverage_range *gap_out) {
    uint32_t at = *from;
    for (uint32_t i = 0; i < coverage->count && at < end; i++) {
        const struct coverage_range *range = &coverage->ranges[i];
        if (at < range->first) {
            gap_out->first = at;
            gap_out->end = range->first < end ? range->first : end;
            *from = gap_out->end;
            return true;
        }
        if (at < range->end) {
            at = range->end;
        }
    }
    if (at >= end) {
        *from = end;
        return false;
    }
    *gap_out = (struct coverage_range){at, end};
    *from = end;
    return true;
}

uint32_t coverage_missing(const struct coverage *coverage, uint32_t first, uint32_t end) {
    uint32_t missing = 0;
    struct coverage_range gap;
    while (coverage_next_gap(coverage, &first, end, &gap)) {
        missing += gap.end - gap.first;
    }
    return missing;
}

enum status coverage_add(struct coverage *coverage, uint32_t first, uint32_t end) {
    CHECK_OP(first, <, end);
    /* [low, high): the ranges that touch or overlap the new one and melt into it */
    uint32_t low = 0;
    while (low < coverage->count && coverage->ranges[low].end < first) {
        low++;
    }
    uint32_t high = low;
    while (high < coverage->count && coverage->ranges[high].first <= end) {
        first = coverage->ranges[high].first < first ? coverage->ranges[high].first : first;
        end = coverage->ranges[high].end > end ? coverage->ranges[high].end : end;
        high++;
    }
    uint32_t count = coverage->count - (high - low) + 1;
    if (count > COVERAGE_RANGES_MAX) {
        return STATUS_BUSY;
    }
    memmove(&coverage->ranges[low + 1], &coverage->ranges[high],
            (coverage->count - high) * sizeof(coverage->ranges[0]));
    coverage->ranges[low] = (struct coverage_range){first, end};
    coverage->count = count;
    return STATUS_OK;
}
