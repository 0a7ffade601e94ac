#include "base/buddy.h"

#include "base/check.h"

#define BUDDY_NONE UINT32_MAX

uint64_t buddy_bytes(uint32_t units) {
    return (uint64_t)units * (2 * sizeof(uint32_t) + 2);
}

static void buddy_insert(struct buddy *buddy, uint32_t first, uint32_t order) {
    buddy->order[first] = (uint8_t)(order + 1);
    buddy->prev[first] = BUDDY_NONE;
    buddy->next[first] = buddy->head[order];
    if (buddy->head[order] != BUDDY_NONE) {
        buddy->prev[buddy->head[order]] = first;
    }
    buddy->head[order] = first;
}

static void buddy_detach(struct buddy *buddy, uint32_t first, uint32_t order) {
    if (buddy->prev[first] == BUDDY_NONE) {
        buddy->head[order] = buddy->next[first];
    } else {
        buddy->next[buddy->prev[first]] = buddy->next[first];
    }
    if (buddy->next[first] != BUDDY_NONE) {
        buddy->prev[buddy->next[first]] = buddy->prev[first];
    }
    buddy->order[first] = 0;
}

void buddy_init(struct buddy *buddy, uint32_t units, void *memory) {
    CHECK(units > 0 && units < (1u << 31));
    uint32_t *words = memory;
    *buddy = (struct buddy){.prev = words, .next = words + units, .units = units};
    buddy->order = (uint8_t *)(words + (uint64_t)units * 2);
    buddy->taken = buddy->order + units;
    for (uint32_t i = 0; i < BUDDY_ORDERS; i++) {
        buddy->head[i] = BUDDY_NONE;
    }
    for (uint32_t i = 0; i < units; i++) {
        buddy->order[i] = 0;
        buddy->taken[i] = 0;
    }
    uint32_t first = 0;
    while (first < units) {
        uint32_t order = 0;
        while (order + 1 < BUDDY_ORDERS && (first & ((2u << order) - 1)) == 0 &&
               (uint64_t)first + (2ull << order) <= units) {
            order++;
        }
        buddy_insert(buddy, first, order);
        first += 1u << order;
    }
    buddy->units_free = units;
}

enum status buddy_take(struct buddy *buddy, uint32_t units, uint32_t *first_out) {
    CHECK(units > 0);
    uint32_t want = 0;
    while (want < BUDDY_ORDERS - 1 && (1ull << want) < units) {
        want++;
    }
    uint32_t order = want;
    while (order < BUDDY_ORDERS && buddy->head[order] == BUDDY_NONE) {
        order++;
    }
    if (order == BUDDY_ORDERS || (1ull << want) < units) {
        return STATUS_BUSY;
    }
    uint32_t first = buddy->head[order];
    buddy_detach(buddy, first, order);
    while (order > want) {
        order--;
        buddy_insert(buddy, first + (1u << order), order);
    }
    buddy->taken[first] = (uint8_t)(want + 1);
    buddy->units_free -= 1u << want;
    *first_out = first;
    return STATUS_OK;
}

void buddy_free(struct buddy *buddy, uint32_t first) {
    CHECK_OP(first, <, buddy->units);
    CHECK(buddy->taken[first] != 0);
    uint32_t order = buddy->taken[first] - 1u;
    buddy->taken[first] = 0;
    buddy->units_free += 1u << order;
    for (;;) {
        uint32_t other = first ^ (1u << order);
        if (order + 1 >= BUDDY_ORDERS || (uint64_t)other + (1ull << order) > buddy->units ||
            buddy->order[other] != order + 1) {
            break;
        }
        buddy_detach(buddy, other, order);
        first = first < other ? first : other;
        order++;
    }
    buddy_insert(buddy, first, order);
}
