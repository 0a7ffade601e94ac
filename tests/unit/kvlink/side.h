/* One end of a link under test: a page pool with known contents, the link, and what it called back.
 *
 * Every byte of KV is a function of (seed, component, token, place in the row), so any byte can be
 * checked at either end whatever the page size. Bytes that nobody wrote are SIDE_CANARY. */
#ifndef UNIT_KVLINK_SIDE_H
#define UNIT_KVLINK_SIDE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/layout.h"
#include "kvlink/kvlink.h"

#define SIDE_CANARY    0xa5
#define SIDE_SLOTS_MAX 8u
#define SIDE_OPS_MAX   64u
#define SIDE_PEERS_MAX 4u
#define SIDE_WAIT_MS   10000

struct side_options {
    enum kvlink_transport transport;
    uint32_t page_tokens;
    uint32_t page_count;
    uint32_t token_max;
    const uint32_t *rows; /* row bytes per component; two components make a layer */
    const struct kv_component *components; /* instead of rows, whole; or NULL */
    uint32_t component_count;
    uint16_t port;
    uint32_t window_bytes;
};

struct side_slot {
    uint64_t id; /* of the last event */
    uint64_t bytes;
    uint32_t progress;
    uint32_t covered;
    uint32_t bad;
    uint32_t disarmed;
    enum kvlink_bad reason;
};

struct side {
    struct side_options options;
    struct kv_layout layout;
    unsigned char *kv;
    size_t kv_bytes;
    uint64_t *sums;  /* of the rows as side_fill and side_paint left them */
    uint32_t *pages; /* of one sequence, scattered */
    struct kvlink *link;
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t changed;
    struct side_slot slots[SIDE_SLOTS_MAX];
    uint64_t ops_started;
    uint64_t ops_ended;
    uint64_t ops_by_status[16];
    uint32_t peers_failed;
    uint32_t peers_closed;
};

/* Pages are all canary, the link runs; asserts. */
void side_open(struct side *side, const struct side_options *options);
/* Stops, checks that nothing is left (requests, slots, peers, ops), destroys. */
void side_close(struct side *side);

/* The byte of KV at a place. */
unsigned char side_byte(uint64_t seed, uint32_t component, uint32_t token, uint32_t at);
/* Writes tokens [first, end) of components [c, c_end) as `seed` says. */
void side_fill(struct side *side, uint64_t seed, uint32_t c, uint32_t c_end, uint32_t first,
               uint32_t end);
/* True if these rows are as `seed` says. */
bool side_holds(const struct side *side, uint64_t seed, uint32_t c, uint32_t c_end, uint32_t first,
                uint32_t end);
/* True if these rows are canary. */
bool side_is_untouched(const struct side *side, uint32_t c, uint32_t c_end, uint32_t first,
                       uint32_t end);
/* Fills the whole pool with a byte; true if it still is. */
void side_paint(struct side *side, unsigned char byte);
bool side_is_painted(const struct side *side, unsigned char byte);

void side_arm(struct side *side, uint64_t slot, uint64_t key, uint32_t first, uint32_t end);
/* Disarms and waits for the event. */
void side_disarm(struct side *side, uint64_t slot);
enum status side_send(struct side *side, uint64_t peer, uint64_t slot, uint64_t key, uint32_t c,
                      uint32_t c_count, uint32_t first, uint32_t count);

typedef bool (*side_condition)(struct side *side, uint64_t arg);
/* Waits until the condition holds (checked under the lock, at each event and each 2 ms). */
bool side_wait(struct side *side, side_condition condition, uint64_t arg);
bool side_covered(struct side *side, uint64_t slot);
bool side_bad(struct side *side, uint64_t slot);
/* Some bytes are verified, or all. */
bool side_progressed(struct side *side, uint64_t slot);
bool side_ops_ended(struct side *side, uint64_t unused);
bool side_closed_peers(struct side *side, uint64_t count);
bool side_failed_peers(struct side *side, uint64_t count);
struct kvlink_counters side_counters(struct side *side);

#endif
