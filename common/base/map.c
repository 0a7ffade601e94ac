#include "base/map.h"

#include "base/check.h"
#include "base/prng.h"

#define MAP_EMPTY UINT32_MAX

static uint32_t map_size(uint32_t limit) {
    uint32_t size = 8;
    while (size < limit * 2) {
        size *= 2;
    }
    return size;
}

uint64_t map_bytes(uint32_t limit) {
    CHECK(limit > 0 && limit < (1u << 30));
    return (uint64_t)map_size(limit) * sizeof(struct map_slot);
}

void map_init(struct map *map, uint32_t limit, void *memory) {
    uint32_t size = map_size(limit);
    *map = (struct map){.slots = memory, .mask = size - 1, .limit = limit};
    for (uint32_t i = 0; i < size; i++) {
        map->slots[i] = (struct map_slot){0, MAP_EMPTY};
    }
}

void map_add(struct map *map, uint64_t hash, uint32_t value) {
    CHECK_OP(value, !=, MAP_EMPTY);
    CHECK_OP(map->count, <, map->limit);
    uint32_t at = (uint32_t)mix64(hash) & map->mask;
    while (map->slots[at].value != MAP_EMPTY) {
        at = (at + 1) & map->mask;
    }
    map->slots[at] = (struct map_slot){hash, value};
    map->count++;
}

bool map_remove(struct map *map, uint64_t hash, uint32_t value) {
    uint32_t at = (uint32_t)mix64(hash) & map->mask;
    while (map->slots[at].value != MAP_EMPTY &&
           !(map->slots[at].hash == hash && map->slots[at].value == value)) {
        at = (at + 1) & map->mask;
    }
    if (map->slots[at].value == MAP_EMPTY) {
        return false;
    }
    /* Backward shift: move later members of the run into the hole while that brings them no further
     * from home, so lookups never need tombstones. */
    uint32_t hole = at;
    for (uint32_t next = (at + 1) & map->mask; map->slots[next].value != MAP_EMPTY;
         next = (next + 1) & map->mask) {
        uint32_t home = (uint32_t)mix64(map->slots[next].hash) & map->mask;
        if (((next - home) & map->mask) >= ((next - hole) & map->mask)) {
            map->slots[hole] = map->slots[next];
            hole = next;
        }
    }
    map->slots[hole].value = MAP_EMPTY;
    map->count--;
    return true;
}

uint32_t map_next(const struct map *map, uint64_t hash, uint32_t *cursor) {
    uint32_t home = (uint32_t)mix64(hash) & map->mask;
    while (*cursor <= map->mask) {
        const struct map_slot *slot = &map->slots[(home + *cursor) & map->mask];
        (*cursor)++;
        if (slot->value == MAP_EMPTY) {
            return MAP_EMPTY;
        }
        if (slot->hash == hash) {
            return slot->value;
        }
    }
    return MAP_EMPTY;
}
