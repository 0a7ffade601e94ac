/* What the tests of the etcd client share: a client with its rpc, calls that wait for their one
 * callback, and a tape that records a watch and notices every lost, doubled or disordered event. */
#ifndef ETCD_BED_H
#define ETCD_BED_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "etcd/etcd.h"

struct rpc;

#define BED_WAIT_S 30 /* for anything; a test that needs it has failed */

struct bed {
    struct rpc *rpc;
    struct etcd *etcd;
};

/* Short times: attempts 1 s, calls 5 s, back-off at most 200 ms, keep-alive 1 s + 1 s. */
void bed_open(struct bed *bed, const char *endpoints);
void bed_open_with(struct bed *bed, const struct etcd_config *config);
/* Closes in order and fails the test if anything does not end. */
void bed_close(struct bed *bed);
/* The client only. */
void bed_close_etcd(struct bed *bed);

struct bed_kv {
    char key[128];
    char value[128]; /* cut */
    size_t value_len;
    int64_t create_revision;
    int64_t mod_revision;
    int64_t version;
    int64_t lease;
};
struct bed_reply {
    enum status status;
    char message[256];
    struct etcd_header header;
    int64_t count;
    bool has_more;
    bool is_compacted;
    int64_t deleted;
    bool succeeded;
    int64_t lease;
    int64_t ttl_s;
    int64_t granted_s;
    size_t kvs_len;
    struct bed_kv *kvs; /* of the range, or of the first RANGE of a txn; bed_reply_fini */
    size_t results_len;
};
void bed_reply_fini(struct bed_reply *reply);

/* Waits for one callback. */
struct bed_wait {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    unsigned calls;
    struct bed_reply reply;
};
void bed_wait_init(struct bed_wait *wait);
void bed_wait_fini(struct bed_wait *wait);
void bed_done(void *ctx, const struct etcd_reply *reply);
/* Takes the reply; fails the test if `done` was not called exactly once. */
struct bed_reply bed_wait_take(struct bed_wait *wait);

struct bed_reply bed_put(struct bed *bed, const char *key, const char *value, int64_t lease);
struct bed_reply bed_delete(struct bed *bed, const char *key, bool is_prefix);
struct bed_reply bed_range(struct bed *bed, const char *key, bool is_prefix, int64_t limit,
                           int64_t revision);
struct bed_reply bed_txn(struct bed *bed, const struct etcd_txn *txn);
struct bed_reply bed_compact(struct bed *bed, int64_t revision);
struct bed_reply bed_grant(struct bed *bed, int64_t ttl_s);
struct bed_reply bed_revoke(struct bed *bed, int64_t lease);
struct bed_reply bed_ttl(struct bed *bed, int64_t lease);
/* Repeats a put until etcd took it. */
void bed_put_surely(struct bed *bed, const char *key, const char *value);

/* ---- tape ---- */

#define TAPE_KEYS_MAX 20000u

struct tape_key {
    bool is_there;
    int64_t version;
    int64_t mod_revision;
    char value[24]; /* cut */
};
/* Keys end in five digits, which number them. */
struct tape {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct tape_key *keys; /* [TAPE_KEYS_MAX] */
    uint64_t there;
    uint64_t events;
    uint64_t listed;
    uint64_t value_bytes;
    int64_t last_revision;
    unsigned synced;
    unsigned following;
    unsigned broken;
    unsigned resets;
    unsigned closed;
    char problem[256]; /* "" = none: the first lost, doubled or disordered event */
    char last_broken[256];
    struct etcd_watch *watch;
};
/* revision: 0 = list first. */
void tape_open(struct tape *tape, struct bed *bed, const char *prefix, int64_t revision);
void tape_close(struct tape *tape);
/* Frees; the watch must have closed (tape_close or etcd_close). */
void tape_fini(struct tape *tape);
void tape_wait_synced(struct tape *tape, unsigned times);
void tape_wait_following(struct tape *tape, unsigned times);
void tape_wait_broken(struct tape *tape, unsigned times);
void tape_wait_revision(struct tape *tape, int64_t revision);
/* Until the key (its number) has this value; NULL: is absent. */
void tape_wait_value(struct tape *tape, unsigned key, const char *value);
/* Fails the test if anything was lost, doubled or out of order, or if the map is not what a range
 * says. */
void tape_check(struct tape *tape, struct bed *bed, const char *prefix);

unsigned open_descriptors(void);

#endif
