/* Buddy allocator of contiguous ranges in units, over [0, units): deterministic, O(log n), no
 * growth.
 *
 * Used for token buffers: the caller owns the memory that the units stand for. Ranges are rounded
 * up to powers of two. Not thread-safe. */
#ifndef BASE_BUDDY_H
#define BASE_BUDDY_H

#include <stdint.h>

#include "base/status.h"

#define BUDDY_ORDERS 32

struct buddy {
    uint8_t
        *order; /* per unit: order + 1 of the free block that starts here, 0 = not a free start */
    uint8_t *taken; /* per unit: order + 1 of the taken block that starts here, 0 = none */
    uint32_t *prev; /* free list links, by unit */
    uint32_t *next;
    uint32_t head[BUDDY_ORDERS];
    uint32_t units;
    uint32_t units_free;
};

uint64_t buddy_bytes(uint32_t units);
/* memory: buddy_bytes(units) bytes, 4-aligned. */
void buddy_init(struct buddy *buddy, uint32_t units, void *memory);
/* Takes at least `units` > 0 contiguous units. STATUS_BUSY if no block is large enough. */
MUST_USE enum status buddy_take(struct buddy *buddy, uint32_t units, uint32_t *first_out);
/* Frees a range by its first unit. CHECKs that it was taken. */
void buddy_free(struct buddy *buddy, uint32_t first);

#endif
