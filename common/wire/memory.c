#include "wire/memory.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <protobuf-c/protobuf-c.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(memory, len)   ((void)(memory), (void)(len))
#define ASAN_UNPOISON_MEMORY_REGION(memory, len) ((void)(memory), (void)(len))
#endif

#include "base/check.h"
#include "wire/pack.h"

#define BLOCK_BYTES (64u * 1024u)

struct wire_block {
    struct wire_block *next;
    size_t cap;
    size_t len;
    size_t padding; /* keeps data 16-aligned */
    unsigned char data[];
};
_Static_assert(offsetof(struct wire_block, data) % 16 == 0, "blocks are 16-aligned");

void wire_buffer_fini(struct wire_buffer *buffer) {
    free(buffer->data);
    *buffer = (struct wire_buffer){0};
}

/* Under the address sanitizer an arena is as strict as malloc: what was not handed out is poisoned.
 */
static void block_free(struct wire_block *block) {
    ASAN_UNPOISON_MEMORY_REGION(block->data, block->cap);
    free(block);
}

void wire_arena_reset(struct wire_arena *arena) {
    struct wire_block *kept = NULL;
    struct wire_block *block = arena->blocks;
    while (block != NULL) {
        struct wire_block *next = block->next;
        if (kept == NULL && block->cap == BLOCK_BYTES) {
            kept = block;
            kept->next = NULL;
            kept->len = 0;
            ASAN_POISON_MEMORY_REGION(kept->data, kept->cap);
        } else {
            block_free(block);
        }
        block = next;
    }
    *arena = (struct wire_arena){.blocks = kept};
}

void wire_arena_fini(struct wire_arena *arena) {
    wire_arena_reset(arena);
    if (arena->blocks != NULL) {
        block_free(arena->blocks);
    }
    *arena = (struct wire_arena){0};
}

void *wire_arena_alloc(struct wire_arena *arena, size_t len) {
    if (len > WIRE_ARENA_MAX) {
        return NULL;
    }
    size_t asked = len;
    len = len == 0 ? 16 : (len + 15) & ~(size_t)15;
    if (arena->used + len > arena->limit) {
        return NULL;
    }
    struct wire_block *block = arena->blocks;
    if (block == NULL || block->cap - block->len < len) {
        size_t cap = len > BLOCK_BYTES ? len : BLOCK_BYTES;
        block = malloc(sizeof *block + cap);
        if (block == NULL) {
            return NULL;
        }
        block->cap = cap;
        block->len = 0;
        block->next = arena->blocks;
        arena->blocks = block;
        ASAN_POISON_MEMORY_REGION(block->data, cap);
    }
    void *memory = block->data + block->len;
    block->len += len;
    arena->used += len;
    ASAN_UNPOISON_MEMORY_REGION(memory, asked);
    return memory;
}

void wire_arena_allow(struct wire_arena *arena, size_t more) {
    size_t left = WIRE_ARENA_MAX - arena->used;
    arena->limit = arena->used + (more < left ? more : left);
}

static void *allocator_take(void *data, size_t len) {
    return wire_arena_alloc(data, len);
}

/* Everything is given back at once by wire_arena_reset. */
static void allocator_give(void *data, void *memory) {
    (void)data;
    (void)memory;
}

struct ProtobufCMessage *wire_unpack(const struct ProtobufCMessageDescriptor *descriptor,
                                     struct bytes bytes, struct wire_arena *arena, size_t slack) {
    if (bytes.len > WIRE_MESSAGE_MAX) {
        return NULL;
    }
    wire_arena_allow(arena, slack + 4 * bytes.len);
    ProtobufCAllocator allocator = {
        .alloc = allocator_take, .free = allocator_give, .allocator_data = arena};
    static const uint8_t nothing[1] = {0}; /* protobuf-c does arithmetic on the pointer */
    return protobuf_c_message_unpack(descriptor, &allocator, bytes.len,
                                     bytes.data != NULL ? bytes.data : nothing);
}

static MUST_USE enum status buffer_reserve(struct wire_buffer *buffer, size_t cap) {
    if (cap > WIRE_MESSAGE_MAX) {
        return STATUS_RANGE;
    }
    if (cap <= buffer->cap && buffer->data != NULL) {
        return STATUS_OK;
    }
    size_t grown = buffer->cap < 256 ? 256 : buffer->cap * 2;
    grown = grown < cap ? cap : grown;
    uint8_t *data = realloc(buffer->data, grown);
    if (data == NULL) {
        return STATUS_BUSY;
    }
    buffer->data = data;
    buffer->cap = grown;
    return STATUS_OK;
}

enum status wire_pack(const struct ProtobufCMessage *message, struct wire_buffer *out) {
    out->len = 0;
    size_t len = protobuf_c_message_get_packed_size(message);
    enum status status = buffer_reserve(out, len);
    if (status != STATUS_OK) {
        return status;
    }
    out->len = protobuf_c_message_pack(message, out->data);
    CHECK_OP(out->len, ==, len);
    return STATUS_OK;
}

static size_t varint_put(uint8_t *to, uint64_t value) {
    size_t len = 0;
    while (value >= 0x80) {
        to[len++] = (uint8_t)(value | 0x80);
        value >>= 7;
    }
    to[len++] = (uint8_t)value;
    return len;
}

enum status wire_append(struct wire_buffer *out, uint32_t field, struct bytes payload) {
    uint8_t head[20];
    size_t head_len = varint_put(head, (uint64_t)field << 3 | WIRE_TYPE_LENGTH);
    head_len += varint_put(head + head_len, payload.len);
    size_t total = payload.len > WIRE_MESSAGE_MAX ? SIZE_MAX : out->len + head_len + payload.len;
    enum status status = buffer_reserve(out, total);
    if (status != STATUS_OK) {
        out->len = 0;
        return status;
    }
    memcpy(out->data + out->len, head, head_len);
    out->len += head_len;
    if (payload.len > 0) {
        memcpy(out->data + out->len, payload.data, payload.len);
        out->len += payload.len;
    }
    return STATUS_OK;
}

static bool varint_take(struct bytes *rest, uint64_t *out) {
    uint64_t value = 0;
    for (size_t i = 0; i < rest->len && i < 10; i++) {
        value |= (uint64_t)(rest->data[i] & 0x7f) << (7 * i);
        if ((rest->data[i] & 0x80) == 0) {
            rest->data += i + 1;
            rest->len -= i + 1;
            *out = value;
            return true;
        }
    }
    return false;
}

bool wire_scan(struct bytes *rest, struct wire_field *out) {
    uint64_t tag = 0;
    uint64_t len = 0;
    if (!varint_take(rest, &tag)) {
        return false;
    }
    struct bytes payload = *rest;
    switch (tag & 7) {
    case 0:
        if (!varint_take(rest, &len)) {
            return false;
        }
        payload.len -= rest->len;
        *out = (struct wire_field){(uint32_t)(tag >> 3), 0, payload};
        return true;
    case 1: len = 8; break;
    case 5: len = 4; break;
    case WIRE_TYPE_LENGTH:
        if (!varint_take(rest, &len)) {
            return false;
        }
        payload = *rest;
        break;
    default: return false;
    }
    if (len > rest->len) {
        return false;
    }
    payload.len = (size_t)len;
    rest->data += len;
    rest->len -= (size_t)len;
    *out = (struct wire_field){(uint32_t)(tag >> 3), (uint32_t)(tag & 7), payload};
    return true;
}

size_t wire_scan_length(struct bytes message, uint32_t field) {
    struct wire_field found;
    size_t len = 0;
    while (wire_scan(&message, &found)) {
        if (found.number == field && found.type == WIRE_TYPE_LENGTH) {
            len = found.payload.len;
        }
    }
    return len;
}
