/* The chunk's sum: XXH3-64 of the payload, combined with XXH3-64 of the header before the sum.
 *
 * The header is in it because a flipped bit in token_first would otherwise put right bytes in a
 * wrong place. Uses the library's run-time choice of vector code where it has one. Include in the
 * room's .c files only. */
#ifndef KVLINK_SUM_H
#define KVLINK_SUM_H

#include <stddef.h>
#include <stdint.h>

#include "wire/chunk.h"

#define XXH_STATIC_LINKING_ONLY /* the state by value */
#include <xxhash.h>
#if defined(__x86_64__)
#include <xxh_x86dispatch.h> /* renames XXH3_64bits_update and XXH3_64bits to dispatched ones */
#endif

/* Payload is fed in pieces of this size between the copies, so that it comes from memory once. */
#define SUM_BLOCK_BYTES 16384u

struct sum {
    XXH3_state_t state;
};

static inline void sum_init(struct sum *sum) {
    (void)XXH3_64bits_reset(&sum->state); /* fails on NULL only */
}
static inline void sum_update(struct sum *sum, const void *data, size_t len) {
    (void)XXH3_64bits_update(&sum->state, data, len); /* fails on NULL only */
}
/* header: the CHUNK_HEADER_BYTES encoded bytes. */
static inline uint64_t sum_final(const struct sum *sum, const uint8_t *header) {
    return XXH3_64bits_digest(&sum->state) ^ XXH3_64bits(header, CHUNK_SUM_OFFSET);
}

#endif
