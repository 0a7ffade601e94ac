/* Arena: one block of memory handed out front to back and given back all at once.
 *
 * Cores are built from one: everything is sized at start, nothing is allocated afterwards. */
#ifndef BASE_ARENA_H
#define BASE_ARENA_H

#include <stddef.h>
#include <stdint.h>

/* Under the address sanitizer every block has a gap behind it that nobody may touch. */
#if defined(__SANITIZE_ADDRESS__)
#define ARENA_GAP_BYTES 64
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ARENA_GAP_BYTES 64
#endif
#endif
#ifndef ARENA_GAP_BYTES
#define ARENA_GAP_BYTES 0
#endif
#define ARENA_GAP ((size_t)ARENA_GAP_BYTES)

struct arena {
    unsigned char *data;
    size_t cap;
    size_t len;
};

/* memory: borrowed for the arena's life, 64-aligned. A NULL memory counts only (to learn the size).
 */
void arena_init(struct arena *arena, void *memory, size_t cap);
/* Returns `len` zeroed bytes, 64-aligned; CHECKs that they fit. NULL while counting. */
void *arena_take(struct arena *arena, size_t len);
/* The same without writing to the bytes: for large buffers that are written before they are read,
 * whose pages the system then gives when they are first touched. */
void *arena_take_unset(struct arena *arena, size_t len);
/* Takes everything back and returns the memory, which its owner may give to somebody else. */
void *arena_reset(struct arena *arena);

#endif
