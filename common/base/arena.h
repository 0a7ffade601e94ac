/* Arena: one block of memory handed out front to back and given back all at once.
 *
 * Cores are built from one: everything is sized at start, nothing is allocated afterwards. */
#ifndef BASE_ARENA_H
#define BASE_ARENA_H

#include <stddef.h>
#include <stdint.h>

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

#endif
