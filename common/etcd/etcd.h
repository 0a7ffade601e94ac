/* libetcd-c: the etcd v3 client in C: keys, transactions, leases that are kept, watches that
 * resume.
 *
 * Asynchronous over rpc/rpc.h. Every function may be called from any thread unless it says
 * otherwise; every callback runs on the rpc thread, never inside the call that caused it, and may
 * call everything except etcd_destroy. Each accepted call ends with exactly one callback and never
 * waits longer than its deadline. Several endpoints serve as one: whichever does not answer is left
 * for the next, with a back-off that never exceeds 2 s. Calls that only read are repeated until
 * their deadline; calls that write are sent once, because a lost answer does not say whether they
 * happened: STATUS_UNAVAILABLE and STATUS_TIMEOUT then mean "maybe". Errors are sentences. */
#ifndef ETCD_ETCD_H
#define ETCD_ETCD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"
#include "base/time.h"

struct rpc;
struct etcd;       /* one client: endpoints, calls, leases, watches */
struct etcd_lease; /* a lease that the client keeps alive */
struct etcd_watch; /* a key or prefix that the client follows */

#define ETCD_ENDPOINTS_MAX 16u

/* ---- life ------------------------------------------------------------------------------- */

struct etcd_config {
    const char *endpoints;         /* "http://a:2379,b:2379": 1 to ETCD_ENDPOINTS_MAX; copied */
    struct span call_timeout;      /* of a whole call (of a range: of each page); 0: 5 s */
    struct span attempt_timeout;   /* until an endpoint that is silent is left; 0: 2 s */
    struct span backoff_max;       /* 0: 2 s, which is also the most */
    uint32_t keepalive_ms;         /* of the connection; 0: 6000 (etcd refuses less than 5000
                                      unless it runs with --grpc-keepalive-min-time) */
    uint32_t keepalive_timeout_ms; /* 0: 3000 */
    uint32_t calls_max;            /* calls alive at once; 0: 1024; more: STATUS_BUSY */
    uint32_t page_keys;            /* keys per message of a range; 0: 1000 */
    size_t range_bytes_max;        /* keys and values of one range in memory; 0: 64 MiB */
    uint32_t watch_keys_max;       /* keys under one watched prefix; 0: 1,000,000 */
};

struct etcd_error {
    char text[256];
};

/* Nothing is contacted yet. rpc: must outlive the client. STATUS_INVALID with a sentence in
 * error_out (NULL-able) for a malformed endpoint. STATUS_INTERNAL: no thread for the clock. */
MUST_USE enum status etcd_create(struct rpc *rpc, const struct etcd_config *config,
                                 struct etcd **out, struct etcd_error *error_out);
/* Ends all calls (STATUS_CANCELLED), watches and leases (not revoked), each with its callback, and
 * then calls on_closed, once, last. Before rpc_shutdown. CHECKs that it is the first. */
void etcd_close(struct etcd *etcd, void (*on_closed)(void *ctx), void *ctx);
/* Frees. CHECKs that on_closed was called. Joins the clock thread: not on the rpc thread. NULL is
 * fine. */
void etcd_destroy(struct etcd *etcd);

/* ---- calls ------------------------------------------------------------------------------ */

struct etcd_header {
    uint64_t cluster_id;
    uint64_t member_id;
    int64_t
        revision; /* of the store when it answered. No identity: a restored snapshot repeats them */
    uint64_t raft_term;
};

struct etcd_kv {
    struct bytes key;
    struct bytes value;
    int64_t create_revision;
    int64_t mod_revision;
    int64_t version;
    int64_t lease; /* 0 = none */
};

/* What one operation of a transaction did; kind as in struct etcd_op. */
struct etcd_op_result {
    enum etcd_op_kind {
        ETCD_OP_RANGE,
        ETCD_OP_PUT,
        ETCD_OP_DELETE,
    } kind;
    const struct etcd_kv *kvs; /* RANGE */
    size_t kvs_len;
    int64_t count;   /* RANGE: keys in the range, also those past the limit */
    int64_t deleted; /* DELETE */
};

/* The end of a call. All borrowed until the callback returns; members that do not belong to the
 * call, or to a failure, are zero. */
struct etcd_reply {
    enum status status;
    const char *message; /* "" or a sentence: "etcd at 127.0.0.1:2379 did not answer within 2 s" */
    struct etcd_header header;
    const struct etcd_kv *kvs; /* range: ascending by key */
    size_t kvs_len;
    int64_t count;     /* range: keys in it at that revision, also those past the limit */
    bool has_more;     /* range: the limit cut it */
    bool is_compacted; /* range at a revision that etcd no longer has (STATUS_RANGE) */
    int64_t deleted;   /* delete: how many */
    bool succeeded;    /* txn: all compares held */
    const struct etcd_op_result *results; /* txn: of the branch that ran */
    size_t results_len;
    int64_t lease;     /* grant, time_to_live */
    int64_t ttl_s;     /* grant: what etcd made of it; time_to_live: what is left, -1 = gone */
    int64_t granted_s; /* time_to_live */
};

typedef void (*etcd_done)(void *ctx, const struct etcd_reply *reply);

/* All calls below: arguments are copied; `done` is called exactly once if STATUS_OK is returned and
 * never otherwise. STATUS_BUSY: calls_max reached. STATUS_CANCELLED: the client or its rpc closes.
 * STATUS_INVALID: an empty key, a negative number, an unknown kind. */

struct etcd_range {
    struct bytes key;
    bool is_prefix; /* all keys that begin with `key`; an empty key then means all keys */
    bool is_keys_only;
    bool is_serializable; /* may be stale: answered by whichever member, also without a leader */
    int64_t revision;     /* 0: now. All pages are read at one revision */
    int64_t limit;        /* keys; 0: no limit. STATUS_RANGE past range_bytes_max */
};
MUST_USE enum status etcd_range(struct etcd *etcd, const struct etcd_range *range, etcd_done done,
                                void *ctx);
/* lease: 0 = none. */
MUST_USE enum status etcd_put(struct etcd *etcd, struct bytes key, struct bytes value,
                              int64_t lease, etcd_done done, void *ctx);
MUST_USE enum status etcd_delete(struct etcd *etcd, struct bytes key, bool is_prefix,
                                 etcd_done done, void *ctx);

struct etcd_compare {
    struct bytes key;
    enum etcd_compare_target {
        ETCD_COMPARE_VERSION,
        ETCD_COMPARE_CREATE_REVISION, /* 0 = the key does not exist */
        ETCD_COMPARE_MOD_REVISION,
        ETCD_COMPARE_VALUE,
    } target;
    enum etcd_compare_is {
        ETCD_COMPARE_EQUAL,
        ETCD_COMPARE_GREATER,
        ETCD_COMPARE_LESS,
        ETCD_COMPARE_NOT_EQUAL,
    } is;
    int64_t number;     /* all targets but VALUE */
    struct bytes value; /* VALUE */
};
struct etcd_op {
    enum etcd_op_kind kind;
    struct bytes key;
    bool is_prefix;     /* RANGE, DELETE */
    struct bytes value; /* PUT */
    int64_t lease;      /* PUT */
    int64_t limit;      /* RANGE */
};
struct etcd_txn {
    const struct etcd_compare *compares; /* all must hold */
    size_t compares_len;
    const struct etcd_op *then_ops;
    size_t then_len;
    const struct etcd_op *else_ops;
    size_t else_len;
};
MUST_USE enum status etcd_txn(struct etcd *etcd, const struct etcd_txn *txn, etcd_done done,
                              void *ctx);
/* Forgets the history before `revision`. */
MUST_USE enum status etcd_compact(struct etcd *etcd, int64_t revision, etcd_done done, void *ctx);

MUST_USE enum status etcd_lease_grant(struct etcd *etcd, int64_t ttl_s, etcd_done done, void *ctx);
MUST_USE enum status etcd_lease_revoke(struct etcd *etcd, int64_t lease, etcd_done done, void *ctx);
MUST_USE enum status etcd_lease_time_to_live(struct etcd *etcd, int64_t lease, etcd_done done,
                                             void *ctx);

/* A clock for the client's user: `done` with STATUS_OK after `after`, in steps of 50 ms. */
MUST_USE enum status etcd_wait(struct etcd *etcd, struct span after, etcd_done done, void *ctx);

/* ---- kept leases ------------------------------------------------------------------------ */

/* Order: on_granted, then on_lost, each at most once; or on_lost alone if it was never granted;
 * on_closed last, exactly once, only after etcd_lease_close or etcd_close. */
struct etcd_lease_handlers {
    void (*on_granted)(void *ctx, int64_t lease, int64_t ttl_s);
    /* The lease is gone (etcd said so) or must be taken as gone: not confirmed for its whole time,
     * counted from when the last confirmed keep-alive was sent. Nothing is retried after this. */
    void (*on_lost)(void *ctx, const char *message);
    /* The handle is no longer valid. is_revoked: etcd said that the lease is gone; otherwise it
     * runs out by itself. */
    void (*on_closed)(void *ctx, bool is_revoked);
};
struct etcd_lease_config {
    int64_t ttl_s;         /* > 0 */
    struct span keepalive; /* 0: a third of what etcd granted, which is also the most */
};
/* Grants a lease, once, and keeps it alive over any broken stream for as long as it lives. Errors
 * as for calls. */
MUST_USE enum status etcd_lease_open(struct etcd *etcd, const struct etcd_lease_config *config,
                                     const struct etcd_lease_handlers *handlers, void *ctx,
                                     struct etcd_lease **out);
/* Stops keeping it alive; revokes it if asked and if it is still held (one attempt after another
 * until `within`; 0: the call timeout); then on_closed. Only the first close counts; not after
 * on_closed. */
void etcd_lease_close(struct etcd_lease *lease, bool revoke, struct span within);

/* ---- watches ---------------------------------------------------------------------------- */

struct etcd_event {
    bool is_delete;
    bool is_listed;    /* from a listing: of a DELETE only the key is known */
    struct etcd_kv kv; /* DELETE: key and mod_revision (listed: the listing's revision) */
};

/* The consumer that applies all events to an empty map has, at each on_synced, exactly what etcd
 * had at that revision. mod_revision never decreases, and grows with each event that is not of the
 * same transaction or listing, as long as etcd keeps its history (on_reset says when it did not).
 */
struct etcd_watch_handlers {
    void (*on_event)(void *ctx, const struct etcd_event *event); /* borrowed until return */
    /* A listing was delivered to its end. */
    void (*on_synced)(void *ctx, int64_t revision);
    /* The stream is up (again): what happens from here on arrives as it happens. NULL-able. */
    void (*on_following)(void *ctx);
    /* The stream broke, or could not be made; it is being tried again, for ever. NULL-able. */
    void (*on_broken)(void *ctx, const char *message);
    /* etcd lost history that was seen (another cluster, an older snapshot): what follows is the
     * difference to the new one; revisions start again. NULL-able. */
    void (*on_reset)(void *ctx, const char *message);
    void (*on_closed)(void *ctx); /* the handle is no longer valid */
};
struct etcd_watch_config {
    struct bytes key;
    bool is_prefix;
    int64_t revision; /* > 0: events from this revision on, no listing first, as long as etcd has
                         them (compacted: listed); 0: list, then follow */
};
struct etcd_watch_counters {
    uint64_t events;
    uint64_t listings; /* completed */
    uint64_t breaks;
    uint64_t resets;
    uint64_t dropped; /* events that were behind what was delivered already: must be 0 */
    uint64_t keys;    /* alive now */
};
/* Errors as for calls. */
MUST_USE enum status etcd_watch_open(struct etcd *etcd, const struct etcd_watch_config *config,
                                     const struct etcd_watch_handlers *handlers, void *ctx,
                                     struct etcd_watch **out);
/* on_closed follows, and no other handler starts before it (one may be running on the rpc thread).
 * Only the first close counts; not after on_closed. */
void etcd_watch_close(struct etcd_watch *watch);
void etcd_watch_counters(struct etcd_watch *watch, struct etcd_watch_counters *out);

/* ---- helpers ---------------------------------------------------------------------------- */

static inline struct bytes etcd_text(const char *text) {
    return (struct bytes){(const uint8_t *)text, __builtin_strlen(text)};
}

#endif
