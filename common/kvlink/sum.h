/* The chunk's sum: XXH3-64 of the row sums of its payload, in the order of the rows (8 bytes each,
 * little-endian), and then of the header before the sum.
 *
 * A row's sum is the XXH3-64 of its bytes: whoever writes a row takes it while the row is in its
 * cache, and the sender needs to read no byte of the payload. Every row sum is well mixed, so what
 * a chunk's sum misses (a change, a swap or a shift of rows) it misses as XXH3 does: one in 2^64.
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

struct chunk_sum {
    XXH3_state_t state;
};

/* The library's functions fail on NULL only. */
static inline void chunk_sum_begin(struct chunk_sum *sum) {
    (void)XXH3_64bits_reset(&sum->state);
}

static inline void chunk_sum_rows(struct chunk_sum *sum, const uint64_t *row_sums, size_t rows) {
    (void)XXH3_64bits_update(&sum->state, row_sums, rows * sizeof(*row_sums));
}

/* header: the CHUNK_HEADER_BYTES encoded bytes. */
static inline uint64_t chunk_sum_end(struct chunk_sum *sum, const uint8_t *header) {
    (void)XXH3_64bits_update(&sum->state, header, CHUNK_SUM_OFFSET);
    return XXH3_64bits_digest(&sum->state);
}

#endif
