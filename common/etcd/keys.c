#include "etcd/keys.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/prng.h"
#include "etcd/internal.h"

static uint64_t bytes_hash(struct bytes bytes) {
    uint64_t hash = 0xcbf29ce484222325ull; /* FNV-1a, finished by a mix: keys share long prefixes */
    for (size_t i = 0; i < bytes.len; i++) {
        hash = (hash ^ bytes.data[i]) * 0x100000001b3ull;
    }
    return mix64(hash ^ bytes.len);
}

void keys_fini(struct watch_keys *keys) {
    for (uint32_t i = 0; keys->slots != NULL && i <= keys->mask; i++) {
        free(keys->slots[i]);
    }
    free(keys->slots);
    *keys = (struct watch_keys){.slots = NULL};
}

/* The slot of the key, or the empty one where it belongs. */
static uint32_t slot_of(const struct watch_keys *keys, uint64_t hash, struct bytes key) {
    uint32_t slot = (uint32_t)hash & keys->mask;
    while (true) {
        const struct watch_key *at = keys->slots[slot];
        if (at == NULL || (at->hash == hash && at->len == key.len &&
                           (key.len == 0 || memcmp(at->data, key.data, key.len) == 0))) {
            return slot;
        }
        slot = (slot + 1) & keys->mask;
    }
}

struct watch_key *keys_find(const struct watch_keys *keys, struct bytes key) {
    return keys->slots == NULL ? NULL : keys->slots[slot_of(keys, bytes_hash(key), key)];
}

static void keys_grow(struct watch_keys *keys) {
    uint32_t old = keys->slots == NULL ? 0 : keys->mask + 1;
    if (keys->count + 1 <= old / 2) {
        return;
    }
    struct watch_key **slots = keys->slots;
    keys->mask = (old == 0 ? 64 : old * 2) - 1;
    keys->slots = etcd_alloc(((size_t)keys->mask + 1) * sizeof(*slots));
    for (uint32_t i = 0; i < old; i++) {
        if (slots[i] != NULL) {
            uint32_t slot = (uint32_t)slots[i]->hash & keys->mask;
            while (keys->slots[slot] != NULL) {
                slot = (slot + 1) & keys->mask;
            }
            keys->slots[slot] = slots[i];
        }
    }
    free(slots);
}

bool keys_put(struct watch_keys *keys, const struct etcd_kv *kv, uint32_t mark) {
    keys_grow(keys);
    uint64_t hash = bytes_hash(kv->key);
    uint64_t value_hash = bytes_hash(kv->value);
    uint32_t slot = slot_of(keys, hash, kv->key);
    struct watch_key *key = keys->slots[slot];
    bool is_same = key != NULL && key->value_hash == value_hash && key->lease == kv->lease &&
                   key->create_revision == kv->create_revision &&
                   key->mod_revision == kv->mod_revision;
    if (key == NULL) {
        CHECK_OP(kv->key.len, <, UINT32_MAX);
        key = etcd_alloc(sizeof(*key) + kv->key.len);
        key->hash = hash;
        key->len = (uint32_t)kv->key.len;
        if (kv->key.len > 0) { /* an empty key comes without data */
            memcpy(key->data, kv->key.data, kv->key.len);
        }
        keys->slots[slot] = key;
        keys->count++;
    }
    key->value_hash = value_hash;
    key->create_revision = kv->create_revision;
    key->mod_revision = kv->mod_revision;
    key->lease = kv->lease;
    key->mark = mark;
    return !is_same;
}

/* Empties a slot and shifts back what was pushed past it. */
static void slot_clear(struct watch_keys *keys, uint32_t slot) {
    uint32_t hole = slot;
    uint32_t at = slot;
    while (true) {
        at = (at + 1) & keys->mask;
        struct watch_key *key = keys->slots[at];
        if (key == NULL) {
            break;
        }
        uint32_t home = (uint32_t)key->hash & keys->mask;
        if (((at - home) & keys->mask) >= ((at - hole) & keys->mask)) {
            keys->slots[hole] = key;
            hole = at;
        }
    }
    keys->slots[hole] = NULL;
    keys->count--;
}

bool keys_remove(struct watch_keys *keys, struct bytes key) {
    if (keys->slots == NULL) {
        return false;
    }
    uint32_t slot = slot_of(keys, bytes_hash(key), key);
    if (keys->slots[slot] == NULL) {
        return false;
    }
    free(keys->slots[slot]);
    slot_clear(keys, slot);
    return true;
}

struct watch_key **keys_take_unmarked(struct watch_keys *keys, uint32_t mark, uint32_t *count_out) {
    struct watch_key **taken = etcd_alloc((size_t)keys->count * sizeof(struct watch_key *));
    uint32_t count = 0;
    for (uint32_t i = 0; keys->slots != NULL && i <= keys->mask; i++) {
        if (keys->slots[i] != NULL && keys->slots[i]->mark != mark) {
            taken[count++] = keys->slots[i];
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        struct bytes key = {taken[i]->data, taken[i]->len};
        slot_clear(keys, slot_of(keys, taken[i]->hash, key));
    }
    *count_out = count;
    return taken;
}
