/* Open-addressing hash table from a 64-bit hash to a table index; the caller compares keys.
 *
 * Fixed capacity chosen at init; several entries may share a hash. Deletion shifts back, so there
 * are no tombstones and probe lengths never grow with age. Not thread-safe. */
#ifndef BASE_MAP_H
#define BASE_MAP_H

#include <stdbool.h>
#include <stdint.h>

struct map_slot {
    uint64_t hash;
    uint32_t value; /* UINT32_MAX = empty */
};
struct map {
    struct map_slot *slots;
    uint32_t mask;
    uint32_t count;
    uint32_t limit;
};

/* Bytes for a map that holds up to `limit` entries at load <= 1/2. */
uint64_t map_bytes(uint32_t limit);
void map_init(struct map *map, uint32_t limit, void *memory);
/* Adds (hash, value); value < UINT32_MAX. CHECKs that the limit is kept. */
void map_add(struct map *map, uint64_t hash, uint32_t value);
/* Removes exactly (hash, value); false if absent. */
bool map_remove(struct map *map, uint64_t hash, uint32_t value);
/* Walks all values under a hash: start with *cursor = 0; returns UINT32_MAX at the end. */
uint32_t map_next(const struct map *map, uint64_t hash, uint32_t *cursor);

#endif
