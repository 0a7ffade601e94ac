/* Word buffers: contiguous ranges of uint32_t (tokens, page tables) from one fixed store.
 *
 * Full is STATUS_BUSY, never growth. Ranges are rounded up to 16 words and a power of two. */
#ifndef CORE_WORDS_H
#define CORE_WORDS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/buddy.h"

#define WORDS_UNIT 16u
#define WORDS_NONE UINT32_MAX

struct words {
    uint32_t *data;
    struct buddy buddy;
    uint32_t taken;       /* ranges out now: the owner's ledger must agree */
    bool drops_next_free; /* for tests of that ledger: one range is forgotten */
};

/* capacity in words, rounded up to WORDS_UNIT. Memory from the arena (which may be counting). */
void words_init(struct words *words, uint32_t capacity, struct arena *arena);
/* Takes `count` > 0 words; *first_out names the range for words_at and words_free. */
MUST_USE enum status words_take(struct words *words, uint32_t count, uint32_t *first_out);
/* WORDS_NONE is accepted and ignored. */
void words_free(struct words *words, uint32_t first);

static inline uint32_t *words_at(const struct words *words, uint32_t first) {
    return words->data + (uint64_t)first * WORDS_UNIT;
}

#endif
