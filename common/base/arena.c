#include "base/arena.h"

#include <string.h>

#include "base/check.h"

void arena_init(struct arena *arena, void *memory, size_t cap) {
    *arena = (struct arena){memory, cap, 0};
}

void *arena_take(struct arena *arena, size_t len) {
    size_t rounded = (len + 63) & ~(size_t)63;
    if (arena->data == NULL) {
        arena->len += rounded;
        return NULL;
    }
    CHECK(rounded <= arena->cap - arena->len);
    void *at = arena->data + arena->len;
    arena->len += rounded;
    memset(at, 0, len);
    return at;
}
