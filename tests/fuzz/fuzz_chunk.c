/* The header of a KV chunk: what decodes is, byte for byte, what encoding gives. */
#include "fuzz/fuzz.h"
#include "wire/chunk.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    struct chunk_header header;
    if (chunk_decode(data, len, &header) == STATUS_OK) {
        uint8_t bytes[CHUNK_HEADER_BYTES];
        chunk_encode(&header, bytes);
        CHECK_OP(len, ==, CHUNK_HEADER_BYTES);
        CHECK(memcmp(bytes, data, CHUNK_HEADER_BYTES) == 0);
        CHECK(header.bytes > 0 && header.bytes <= CHUNK_BYTES_MAX);
        CHECK(header.token_count > 0 && header.component_count > 0);
    }
    return 0;
}
