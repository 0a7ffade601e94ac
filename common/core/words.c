#include "core/words.h"

void words_init(struct words *words, uint32_t capacity, struct arena *arena) {
    uint32_t units = (capacity + WORDS_UNIT - 1) / WORDS_UNIT;
    void *memory = arena_take(arena, buddy_bytes(units));
    words->data = arena_take(arena, (uint64_t)units * WORDS_UNIT * sizeof(uint32_t));
    if (memory != 0) {
        buddy_init(&words->buddy, units, memory);
    }
}

enum status words_take(struct words *words, uint32_t count, uint32_t *first_out) {
    return buddy_take(&words->buddy, (count + WORDS_UNIT - 1) / WORDS_UNIT, first_out);
}

void words_free(struct words *words, uint32_t first) {
    if (first != WORDS_NONE) {
        buddy_free(&words->buddy, first);
    }
}
