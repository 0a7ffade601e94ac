/* Private to wire: protobuf-c with bounded memory, and the little that it cannot do.
 *
 * protobuf-c hands strings over as NUL-terminated text and so loses what follows a NUL, which is an
 * ordinary character in a prompt or an answer. wire_append writes such fields, wire_scan_length
 * reads their true length from the bytes; protobuf-c's copy behind the pointer is complete. */
#ifndef WIRE_PACK_H
#define WIRE_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"
#include "wire/memory.h"

struct ProtobufCMessage;
struct ProtobufCMessageDescriptor;

#define WIRE_TYPE_LENGTH 2u

struct wire_field {
    uint32_t number;
    uint32_t type;
    struct bytes payload; /* of a length-delimited field: without its length */
};

/* protobuf-c's structs know no const; packing only reads. */
static inline void *wire_borrow(const void *memory) {
    return (void *)(uintptr_t)memory;
}

/* 16-aligned, uninitialised; NULL past what was allowed. */
void *wire_arena_alloc(struct wire_arena *arena, size_t len);
/* Allows `more` bytes beyond what is used, WIRE_ARENA_MAX in all. */
void wire_arena_allow(struct wire_arena *arena, size_t more);

/* Unpacks into the arena, allowing four times the input and `slack` bytes. NULL: malformed, larger
 * than WIRE_MESSAGE_MAX, or it wanted more memory than that. */
struct ProtobufCMessage *wire_unpack(const struct ProtobufCMessageDescriptor *descriptor,
                                     struct bytes bytes, struct wire_arena *arena, size_t slack);
/* Replaces the buffer's contents; on failure it is empty. STATUS_RANGE, STATUS_BUSY. */
MUST_USE enum status wire_pack(const struct ProtobufCMessage *message, struct wire_buffer *out);
/* Appends one length-delimited field; on failure the buffer is empty. */
MUST_USE enum status wire_append(struct wire_buffer *out, uint32_t field, struct bytes payload);

/* Takes the next field off the front. False at the end and at malformed bytes. */
bool wire_scan(struct bytes *rest, struct wire_field *out);
/* Length of the last occurrence of a length-delimited field; 0 if there is none. */
size_t wire_scan_length(struct bytes message, uint32_t field);

#endif
