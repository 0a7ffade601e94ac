/* The 48-byte header of a KV chunk: what travels in the header of each UCX active message.
 *
 * Little-endian, fixed offsets, no padding: magic u16, version u8, kind u8, slot u32, generation
 * u32, key u64, first_token u32, tokens u32, component u16, flags u16, bytes u32, reserved u32,
 * xxh3 u64. The payload is, for each of `component_count` consecutive components, the rows of
 * tokens [token_first, token_first + token_count), one after the other. Page sizes and numbers
 * never travel: they are each worker's own. xxh3 is, since version 2, the XXH3-64 of the rows'
 * XXH3-64 (8 bytes each, in the payload's order) and the header's first 40 bytes; version 1 took it
 * of the payload's bytes. Pure; the sum is computed by the link. */
#ifndef WIRE_CHUNK_H
#define WIRE_CHUNK_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define CHUNK_HEADER_BYTES 48u
#define CHUNK_SUM_OFFSET   40u /* the sum covers the header bytes before it, and the payload */
#define CHUNK_BYTES_MAX    (256u * 1024u)
#define CHUNK_MAGIC        0x4b42u /* "BK" */
#define CHUNK_VERSION      2u

enum chunk_kind {
    CHUNK_KIND_KV = 1,
};

struct chunk_header {
    uint64_t slot; /* index in the low 32 bits, generation in the high */
    uint64_t key;
    uint32_t token_first;
    uint32_t token_count;
    uint16_t component_first;
    uint16_t component_count; /* the header's flags field */
    uint32_t bytes;           /* of the payload */
    uint64_t sum;
};

/* bytes: CHUNK_HEADER_BYTES bytes of the caller's. */
void chunk_encode(const struct chunk_header *header, uint8_t *bytes);
/* Replaces the sum in an encoded header. */
void chunk_set_sum(uint8_t *bytes, uint64_t sum);
/* Returns STATUS_CORRUPT if len is not CHUNK_HEADER_BYTES or the magic is wrong, STATUS_UNSUPPORTED
 * for another version or kind, STATUS_INVALID if reserved bytes are set, a count is zero or the
 * payload is empty or larger than CHUNK_BYTES_MAX. bytes may be NULL when len is 0. */
MUST_USE enum status chunk_decode(const uint8_t *bytes, size_t len,
                                  struct chunk_header *header_out);

#endif
