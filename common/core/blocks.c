#include "core/blocks.h"

#include <string.h>

#include "base/check.h"
#include "base/prng.h"
#include "core/ids.h"

struct siphash128 salt_of(const char *text) {
    static const struct siphash_key key = {0x7461622073616c74ull, 0x6e6f746f6e206f66ull};
    char padded[LABEL_MAX] = {0};
    uint32_t len = 0;
    while (text != NULL && len < LABEL_MAX - 1 && text[len] != '\0') {
        padded[len] = text[len];
        len++;
    }
    if (len == 0) {
        return (struct siphash128){0, 0};
    }
    struct siphash128 salt = siphash128(key, padded, len);
    salt.low |= salt_is_set(salt) ? 0 : 1;
    return salt;
}

struct siphash_key block_key(struct layout_digest layout) {
    return (struct siphash_key){layout.high ^ 0x626c6f636b206b65ull,
                                layout.low ^ 0x79206f6620616c6cull};
}

uint64_t block_next(struct siphash_key key, uint64_t before, const uint32_t *tokens,
                    uint32_t count) {
    /* As in pages: the chain is folded into the key, the tokens are hashed where they lie. */
    struct siphash_key chained = {key.k0 ^ before, key.k1 + before};
    uint64_t block = siphash128(chained, tokens, (size_t)count * sizeof *tokens).low;
    return block != 0 ? block : 1;
}

void block_set_init(struct block_set *set, uint32_t limit, struct arena *arena) {
    CHECK_OP(limit, <, 1u << 26);
    uint32_t size = 8;
    while (size < limit * 2) {
        size *= 2;
    }
    struct block_slot *slots = arena_take(arena, (uint64_t)size * sizeof *slots);
    *set = (struct block_set){.slots = slots, .mask = size - 1, .limit = limit};
}

static uint32_t block_home(const struct block_set *set, uint64_t block, uint32_t view) {
    return (uint32_t)mix64(block ^ (uint64_t)view << 32) & set->mask;
}

/* The slot of this block, or the free one where the search ended. */
static uint32_t block_find(const struct block_set *set, uint64_t block, uint32_t view) {
    uint32_t at = block_home(set, block, view);
    while (set->slots[at].block != 0 &&
           !(set->slots[at].block == block && set->slots[at].view == view)) {
        at = (at + 1) & set->mask;
    }
    return at;
}

/* Later members of the run move into the hole while that brings them no further from home. */
static void block_free(struct block_set *set, uint32_t hole) {
    for (uint32_t next = (hole + 1) & set->mask; set->slots[next].block != 0;
         next = (next + 1) & set->mask) {
        uint32_t home = block_home(set, set->slots[next].block, set->slots[next].view);
        if (((next - home) & set->mask) >= ((next - hole) & set->mask)) {
            set->slots[hole] = set->slots[next];
            hole = next;
        }
    }
    set->slots[hole] = (struct block_slot){0};
    set->count--;
}

bool block_set_add(struct block_set *set, uint64_t block, uint32_t view, uint32_t holder,
                   struct block_slot *lost_out) {
    *lost_out = (struct block_slot){0};
    if (block == 0 || set->limit == 0 || block_set_has(set, block, view)) {
        return false;
    }
    if (set->count == set->limit) {
        while (set->slots[set->hand].block == 0) {
            set->hand = (set->hand + 1) & set->mask;
        }
        *lost_out = set->slots[set->hand];
        block_free(set, set->hand);
        set->hand = (set->hand + 1) & set->mask;
        set->forgotten_total++;
    }
    set->slots[block_find(set, block, view)] = (struct block_slot){block, view, holder};
    set->count++;
    return true;
}

bool block_set_remove(struct block_set *set, uint64_t block, uint32_t view) {
    uint32_t at = block_find(set, block, view);
    if (block == 0 || set->slots[at].block == 0) {
        return false;
    }
    block_free(set, at);
    return true;
}

bool block_set_has(const struct block_set *set, uint64_t block, uint32_t view) {
    return block != 0 && set->slots[block_find(set, block, view)].block != 0;
}

void block_set_sweep(struct block_set *set, uint32_t steps,
                     bool (*is_live)(const void *context, const struct block_slot *slot),
                     const void *context) {
    for (uint32_t i = 0; i < steps && i <= set->mask && set->count > 0; i++) {
        const struct block_slot *slot = &set->slots[set->hand];
        if (slot->block != 0 && !is_live(context, slot)) {
            block_free(set, set->hand); /* what moves in is looked at next */
        } else {
            set->hand = (set->hand + 1) & set->mask;
        }
    }
}
