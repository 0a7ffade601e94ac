/* Room-private: the keys that a watch believes to exist, with enough to see whether one changed.
 *
 * A hash table that grows; entries are heap blocks with the key's bytes behind them. One thread. */
#ifndef ETCD_KEYS_H
#define ETCD_KEYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "etcd/etcd.h"

struct watch_key {
    uint64_t hash;
    uint64_t value_hash;
    int64_t create_revision;
    int64_t mod_revision;
    int64_t lease;
    uint32_t mark; /* of the listing that saw it last */
    uint32_t len;
    uint8_t data[];
};

struct watch_keys {
    struct watch_key **slots;
    uint32_t mask; /* slots - 1; 0: no slots yet */
    uint32_t count;
};

void keys_fini(struct watch_keys *keys);
/* NULL if absent. */
struct watch_key *keys_find(const struct watch_keys *keys, struct bytes key);
/* Adds or overwrites; true if what was known differs from kv (or nothing was). */
bool keys_put(struct watch_keys *keys, const struct etcd_kv *kv, uint32_t mark);
/* False if absent. */
bool keys_remove(struct watch_keys *keys, struct bytes key);
/* Takes all entries whose mark differs out, as an array; the caller frees them and the array. */
struct watch_key **keys_take_unmarked(struct watch_keys *keys, uint32_t mark, uint32_t *count_out);

#endif
