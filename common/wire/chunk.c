#include "wire/chunk.h"

#include "base/check.h"

/* Offsets of the fields; the last one and its size must end at CHUNK_HEADER_BYTES. */
enum chunk_offset {
    OFFSET_MAGIC = 0,
    OFFSET_VERSION = 2,
    OFFSET_KIND = 3,
    OFFSET_SLOT = 4,
    OFFSET_GENERATION = 8,
    OFFSET_KEY = 12,
    OFFSET_TOKEN_FIRST = 20,
    OFFSET_TOKEN_COUNT = 24,
    OFFSET_COMPONENT = 28,
    OFFSET_FLAGS = 30,
    OFFSET_BYTES = 32,
    OFFSET_RESERVED = 36,
    OFFSET_SUM = CHUNK_SUM_OFFSET,
};
_Static_assert(OFFSET_SUM + sizeof(uint64_t) == CHUNK_HEADER_BYTES, "the header is 48 bytes");

static void put(uint8_t *to, uint64_t value, uint32_t len) {
    for (uint32_t i = 0; i < len; i++) {
        to[i] = (uint8_t)(value >> (8 * i));
    }
}

static uint64_t take(const uint8_t *from, uint32_t len) {
    uint64_t value = 0;
    for (uint32_t i = 0; i < len; i++) {
        value |= (uint64_t)from[i] << (8 * i);
    }
    return value;
}

void chunk_encode(const struct chunk_header *header, uint8_t *bytes) {
    CHECK(header != NULL);
    put(bytes + OFFSET_MAGIC, CHUNK_MAGIC, 2);
    put(bytes + OFFSET_VERSION, CHUNK_VERSION, 1);
    put(bytes + OFFSET_KIND, CHUNK_KIND_KV, 1);
    put(bytes + OFFSET_SLOT, header->slot & UINT32_MAX, 4);
    put(bytes + OFFSET_GENERATION, header->slot >> 32, 4);
    put(bytes + OFFSET_KEY, header->key, 8);
    put(bytes + OFFSET_TOKEN_FIRST, header->token_first, 4);
    put(bytes + OFFSET_TOKEN_COUNT, header->token_count, 4);
    put(bytes + OFFSET_COMPONENT, header->component_first, 2);
    put(bytes + OFFSET_FLAGS, header->component_count, 2);
    put(bytes + OFFSET_BYTES, header->bytes, 4);
    put(bytes + OFFSET_RESERVED, 0, 4);
    put(bytes + OFFSET_SUM, header->sum, 8);
}

void chunk_set_sum(uint8_t *bytes, uint64_t sum) {
    put(bytes + OFFSET_SUM, sum, 8);
}

enum status chunk_decode(const uint8_t *bytes, size_t len, struct chunk_header *header_out) {
    if (len != CHUNK_HEADER_BYTES || take(bytes + OFFSET_MAGIC, 2) != CHUNK_MAGIC) {
        return STATUS_CORRUPT;
    }
    if (bytes[OFFSET_VERSION] != CHUNK_VERSION || bytes[OFFSET_KIND] != CHUNK_KIND_KV) {
        return STATUS_UNSUPPORTED;
    }
    struct chunk_header header = {
        .slot = take(bytes + OFFSET_SLOT, 4) | take(bytes + OFFSET_GENERATION, 4) << 32,
        .key = take(bytes + OFFSET_KEY, 8),
        .token_first = (uint32_t)take(bytes + OFFSET_TOKEN_FIRST, 4),
        .token_count = (uint32_t)take(bytes + OFFSET_TOKEN_COUNT, 4),
        .component_first = (uint16_t)take(bytes + OFFSET_COMPONENT, 2),
        .component_count = (uint16_t)take(bytes + OFFSET_FLAGS, 2),
        .bytes = (uint32_t)take(bytes + OFFSET_BYTES, 4),
        .sum = take(bytes + OFFSET_SUM, 8),
    };
    if (take(bytes + OFFSET_RESERVED, 4) != 0 || header.token_count == 0 ||
        header.component_count == 0 || header.bytes == 0 || header.bytes > CHUNK_BYTES_MAX) {
        return STATUS_INVALID;
    }
    *header_out = header;
    return STATUS_OK;
}
