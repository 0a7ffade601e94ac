/* Names of full KV pages that travel: what a router must know to send a prompt where its prefix is.
 *
 * A block is a page's worth of tokens with everything before it and the tenant's salt, as a chained
 * 64-bit hash under a key that all parties of one model share. Two blocks of one name only
 * misroute a request: a worker compares the tokens themselves (core/pages.h). A block set is a
 * router's view of all its workers: which blocks each says it holds. Fixed capacity: past it the
 * set forgets one block for each new one, which may cost a hit and nothing else. */
#ifndef CORE_BLOCKS_H
#define CORE_BLOCKS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/siphash.h"
#include "core/layout.h"

/* What a tenant's salt becomes; zero for NULL and for the empty text (LABEL_MAX bytes at most). The
 * same at every router: nobody can make another's without knowing it. */
struct siphash128 salt_of(const char *text);
static inline bool salt_is_set(struct siphash128 salt) {
    return (salt.low | salt.high) != 0;
}

struct siphash_key block_key(struct layout_digest layout);
/* The name of nothing yet: where a chain begins. */
static inline uint64_t block_first(struct siphash128 salt) {
    return salt.low;
}
/* The name of the `count` tokens that follow `before`; never 0. */
uint64_t block_next(struct siphash_key key, uint64_t before, const uint32_t *tokens,
                    uint32_t count);

struct block_slot {
    uint64_t block; /* 0 = free */
    uint32_t view;
    uint32_t holder; /* whoever owns the view, for whoever counts its blocks */
};

struct block_set {
    struct block_slot *slots;
    uint32_t mask;
    uint32_t count;
    uint32_t limit; /* 0: nothing is ever held */
    uint32_t hand;  /* where the next one is forgotten, or swept */
    uint64_t forgotten_total;
};

/* limit < 2^26. */
void block_set_init(struct block_set *set, uint32_t limit, struct arena *arena);
/* True if it was not there. A full set first forgets a block; *lost_out is its slot as it was
 * (block 0: none was forgotten). */
bool block_set_add(struct block_set *set, uint64_t block, uint32_t view, uint32_t holder,
                   struct block_slot *lost_out);
/* True if it was there. */
bool block_set_remove(struct block_set *set, uint64_t block, uint32_t view);
bool block_set_has(const struct block_set *set, uint64_t block, uint32_t view);
/* Looks at `steps` slots, on from where it stopped, and frees those of views that `is_live` does
 * not know any more. */
void block_set_sweep(struct block_set *set, uint32_t steps,
                     bool (*is_live)(const void *context, const struct block_slot *slot),
                     const void *context);

#endif
