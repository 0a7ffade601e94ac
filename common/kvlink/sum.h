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

/* payload: its XXH3-64. header: the CHUNK_HEADER_BYTES encoded bytes. */
static inline uint64_t chunk_sum(uint64_t payload, const uint8_t *header) {
    return payload ^ XXH3_64bits(header, CHUNK_SUM_OFFSET);
}

#endif
