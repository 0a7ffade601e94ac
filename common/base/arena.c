#include "base/arena.h"

#include <string.h>

#include "base/check.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__clang__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, len)   ((void)(at), (void)(len))
#define ASAN_UNPOISON_MEMORY_REGION(at, len) ((void)(at), (void)(len))
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
    ASAN_UNPOISON_MEMORY_REGION(at, len);
    ASAN_POISON_MEMORY_REGION(at + len, rounded - len);
    return at;
}

void *arena_take(struct arena *arena, size_t len) {
    void *at = arena_take_unset(arena, len);
    if (at != NULL) {
        memset(at, 0, len);
    }
    return at;
}
