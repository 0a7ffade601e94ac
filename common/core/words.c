#include "core/words.h"

void words_init(struct words *words, uint32_t capacity, struct arena *arena) {
    uint32_t units = (capacity + WORDS_UNIT - 1) / WORDS_UNIT;
    void *memory = arena_take(arena, buddy_bytes(units));
    words->taken = 0;
    words->drops_next_free = false;
    words->data = arena_take(arena, (uint64_t)units * WORDS_UNIT * sizeof(uint32_t));
    if (memory != 0) {
        buddy_init(&words->buddy, units, memory);
    }
}

enum status words_take(struct words *words, uint32_t count, uint32_t *first_out) {
    enum status status =
        buddy_take(&words->buddy, (count + WORDS_UNIT - 1) / WORDS_UNIT, first_out);
    words->taken += status == STATUS_OK ? 1 : 0;
    return status;
}

void words_free(struct words *words, uint32_t first) {
    if (first == WORDS_NONE) {
        return;
    }
    if (words->drops_next_free) {
        words->drops_next_free = false;
        return;
    }
    buddy_free(&words->buddy, first);
    words->taken--;
}
