#include "base/arena.h"

#include <string.h>

#include "base/check.h"

#if ARENA_GAP_BYTES > 0
/* The sanitizer's own, and part of its interface. */
void __asan_poison_memory_region(const volatile void *at, size_t len);
void __asan_unpoison_memory_region(const volatile void *at, size_t len);
#endif

void arena_init(struct arena *arena, void *memory, size_t cap) {
    *arena = (struct arena){memory, cap, 0};
}

void *arena_take_unset(struct arena *arena, size_t len) {
    size_t rounded = ((len + 63) & ~(size_t)63) + (len == 0 ? 0 : ARENA_GAP);
    if (arena->data == NULL) {
        arena->len += rounded;
        return NULL;
    }
    CHECK(rounded <= arena->cap - arena->len);
    unsigned char *at = arena->data + arena->len;
    arena->len += rounded;
#if ARENA_GAP_BYTES > 0
    __asan_unpoison_memory_region(at, len);
    __asan_poison_memory_region(at + len, rounded - len);
#endif
    return at;
}

void *arena_take(struct arena *arena, size_t len) {
    void *at = arena_take_unset(arena, len);
    if (at != NULL) {
        memset(at, 0, len);
    }
    return at;
}

void *arena_reset(struct arena *arena) {
#if ARENA_GAP_BYTES > 0
    __asan_unpoison_memory_region(arena->data, arena->len);
#endif
    arena->len = 0;
    return arena->data;
}
