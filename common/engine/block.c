#include "engine/block.h"

#include "base/check.h"

#include <stdlib.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)

void block_take(struct arena *arena) {
    size_t align = arena->len >= HUGE_PAGE ? HUGE_PAGE : 64;
    size_t bytes = (arena->len + align) / align * align; /* never none */
    void *memory = aligned_alloc(align, bytes);
    CHECK(memory != NULL);
    if (align == HUGE_PAGE) {
        (void)madvise(memory, bytes, MADV_HUGEPAGE); /* only speed depends on it */
    }
    arena_init(arena, memory, bytes);
}

void block_free(struct arena *arena) {
    free(arena->data);
    arena_init(arena, NULL, 0);
}
