/* A fixed table of slots with generations: the ids that cross the seam.
 *
 * An id is (generation << 32 | index); a freed slot's next id has a higher generation, so a stale
 * id is recognised for ever (32 bits of reuse per slot; generation 0 is never issued, so id 0 is
 * "none"). The payload lives in the caller's parallel array. Not thread-safe. */
#ifndef BASE_POOL_H
#define BASE_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

struct pool {
    uint32_t *generation; /* odd = live */
    uint32_t *next_free;
    uint32_t capacity;
    uint32_t live;
    uint32_t free_head;
    uint32_t free_tail;
};

/* Bytes that pool_init needs for `capacity` slots. */
uint64_t pool_bytes(uint32_t capacity);
/* memory: pool_bytes(capacity) bytes, 4-aligned, the caller's until it stops using the pool. */
void pool_init(struct pool *pool, uint32_t capacity, void *memory);
/* Takes the slot that has been free longest. STATUS_BUSY when all are live. */
MUST_USE enum status pool_take(struct pool *pool, uint64_t *id_out);
/* Frees a live id. CHECKs that it is live. */
void pool_free(struct pool *pool, uint64_t id);
/* True and the index if the id is live now; false for 0, stale or forged ids. */
bool pool_find(const struct pool *pool, uint64_t id, uint32_t *index_out);
/* The live id at an index, or 0. */
uint64_t pool_id_at(const struct pool *pool, uint32_t index);
/* The first live index at or after `from`; UINT32_MAX: there is none. Reads four bytes a slot: a
 * sweep of a large, almost empty table need not touch what its slots hold. */
uint32_t pool_next(const struct pool *pool, uint32_t from);

static inline uint32_t pool_index(uint64_t id) {
    return (uint32_t)id;
}

#endif
