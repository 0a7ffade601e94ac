#include "base/pool.h"

#include "base/check.h"

#define POOL_NONE UINT32_MAX

uint64_t pool_bytes(uint32_t capacity) {
    return (uint64_t)capacity * 2 * sizeof(uint32_t);
}

void pool_init(struct pool *pool, uint32_t capacity, void *memory) {
    CHECK(capacity > 0 && capacity < POOL_NONE);
    uint32_t *words = memory;
    *pool = (struct pool){.generation = words,
                          .next_free = words + capacity,
                          .capacity = capacity,
                          .free_head = 0,
                          .free_tail = capacity - 1};
    for (uint32_t i = 0; i < capacity; i++) {
        pool->generation[i] = 0;
        pool->next_free[i] = i + 1 < capacity ? i + 1 : POOL_NONE;
    }
}

enum status pool_take(struct pool *pool, uint64_t *id_out) {
    uint32_t index = pool->free_head;
    if (index == POOL_NONE) {
        return STATUS_BUSY;
    }
    pool->free_head = pool->next_free[index];
    if (pool->free_head == POOL_NONE) {
        pool->free_tail = POOL_NONE;
    }
    pool->generation[index]++;
    pool->live++;
    *id_out = (uint64_t)pool->generation[index] << 32 | index;
    return STATUS_OK;
}

bool pool_find(const struct pool *pool, uint64_t id, uint32_t *index_out) {
    uint32_t index = (uint32_t)id;
    uint32_t generation = (uint32_t)(id >> 32);
    if (index >= pool->capacity || (generation & 1) == 0 || pool->generation[index] != generation) {
        return false;
    }
    *index_out = index;
    return true;
}

void pool_free(struct pool *pool, uint64_t id) {
    uint32_t index = 0;
    CHECK(pool_find(pool, id, &index));
    pool->generation[index]++;
    pool->next_free[index] = POOL_NONE;
    if (pool->free_tail == POOL_NONE) {
        pool->free_head = index;
    } else {
        pool->next_free[pool->free_tail] = index;
    }
    pool->free_tail = index;
    CHECK(pool->live > 0);
    pool->live--;
}

uint64_t pool_id_at(const struct pool *pool, uint32_t index) {
    CHECK_OP(index, <, pool->capacity);
    uint32_t generation = pool->generation[index];
    return (generation & 1) != 0 ? (uint64_t)generation << 32 | index : 0;
}

uint32_t pool_next(const struct pool *pool, uint32_t from) {
    for (uint32_t i = from; i < pool->capacity; i++) {
        if ((pool->generation[i] & 1) != 0) {
            return i;
        }
    }
    return UINT32_MAX;
}
