/* The two memories of wire: a growing buffer to encode into, an arena to decode into.
 *
 * Both are plain values owned by the caller, zero-initialised, used by one thread at a time and
 * meant to be reused: in steady state neither allocates. An arena holds what one decode produced
 * and bounds it: hostile bytes cost at most WIRE_ARENA_MAX, whatever sizes they claim. */
#ifndef WIRE_MEMORY_H
#define WIRE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"

#define WIRE_MESSAGE_MAX (16u * 1024u * 1024u) /* bytes of one encoded message, both ways */
#define WIRE_ARENA_MAX   (64u * 1024u * 1024u) /* bytes one decode may allocate */

struct wire_buffer {
    uint8_t *data; /* [len]; owned; from malloc */
    size_t len;
    size_t cap;
};

struct wire_block;

struct wire_arena {
    struct wire_block *blocks; /* newest first */
    size_t used;               /* bytes handed out since the last reset */
    size_t limit;              /* bytes the running decode may have handed out */
};

/* Frees the memory and zeroes the struct; usable again. */
void wire_buffer_fini(struct wire_buffer *buffer);
/* What the last encoder wrote; borrowed until the next use of the buffer. */
static inline struct bytes wire_buffer_bytes(const struct wire_buffer *buffer) {
    return (struct bytes){buffer->data, buffer->len};
}

/* Forgets everything decoded into the arena: all pointers of those structs are dead. Keeps one
 * small block for the next decode. */
void wire_arena_reset(struct wire_arena *arena);
/* Frees everything and zeroes the struct; usable again. */
void wire_arena_fini(struct wire_arena *arena);

#endif
