/* Discovery over etcd: a process publishes one record of itself; a router follows all workers.
 *
 * Decides nothing: it delivers facts as they come. A LOST means "etcd no longer has the key"; what
 * that is worth is the core's business. Functions may be called from any thread unless they say
 * otherwise; handlers run on the rpc thread and must not block. Keys: /baton/CLUSTER/workers/INC
 * and /baton/CLUSTER/routers/INC with the incarnation as 16 hexadecimal digits, so a restarted
 * process is a new key, and clusters with different names do not see each other. The key hangs on a
 * lease; whenever the lease is lost, or etcd comes back, the record is put again under the same
 * incarnation, for ever, until registry_shutdown. */
#ifndef REGISTRY_REGISTRY_H
#define REGISTRY_REGISTRY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "base/time.h"
#include "core/ids.h"
#include "wire/registry.h"

struct rpc;
struct registry;

struct registry_config {
    const char *endpoints;      /* "http://a:2379,b:2379"; copied */
    const char *cluster;        /* 1 to 63 of [A-Za-z0-9._-]; copied */
    struct span lease;          /* 0: 10 s; whole seconds */
    struct span keepalive;      /* 0: 3 s; at most a third of the lease is used */
    uint32_t etcd_keepalive_ms; /* of the connection; 0: etcd.h's default (tests) */
};

struct registry_error {
    char text[256];
};

/* Contacts nobody yet. rpc must outlive the registry. STATUS_INVALID with a sentence in error_out
 * (NULL-able) for a malformed endpoint or cluster name. */
MUST_USE enum status registry_create(struct rpc *rpc, const struct registry_config *config,
                                     struct registry **out, struct registry_error *error_out);

/* ---- own record ------------------------------------------------------------------------- */

enum registry_state {
    REGISTRY_IDLE,       /* nothing to publish */
    REGISTRY_WAITING,    /* etcd has not answered yet since start */
    REGISTRY_REGISTERED, /* a record is in etcd, as far as is known; a change of it may be on its
                            way */
    REGISTRY_LOST,       /* was registered; being put again. Not a reason to be unready */
    REGISTRY_GONE,       /* deregistered: by registry_deregister or registry_shutdown */
};

/* Publishes the record (copied), or replaces the one published: same incarnation and kind always,
 * or STATUS_INVALID. Returns at once; waits for etcd for ever, saying so in the log each 5 s and in
 * registry_describe. STATUS_CANCELLED after registry_deregister or registry_shutdown;
 * STATUS_INVALID also if the record cannot be encoded (wire/registry.h). */
MUST_USE enum status registry_register_worker(struct registry *registry,
                                              const struct worker_record *record);
MUST_USE enum status registry_register_router(struct registry *registry,
                                              const struct router_record *record);
/* Takes the record out by revoking its lease; `done` is called once, on the rpc thread: STATUS_OK,
 * or STATUS_TIMEOUT if etcd did not confirm it `within` (the lease then runs out by itself).
 * STATUS_EXISTS, and no call: it was asked before, or registry_shutdown does it. */
MUST_USE enum status registry_deregister(struct registry *registry, struct span within,
                                         void (*done)(void *ctx, enum status status), void *ctx);
enum registry_state registry_state(struct registry *registry);
const char *registry_state_name(enum registry_state state);
/* For /readyz and people: "registered as /baton/demo/workers/00..ff", "waiting for etcd at
 * http://a:2379 (12 s): etcd at a:2379 did not answer within 2 s". Always terminated. Never blocks
 * on the network. */
void registry_describe(struct registry *registry, char *text, size_t cap);

/* ---- the fleet, for routers ------------------------------------------------------------- */

struct registry_fleet_handlers {
    /* A worker's record is new or changed. Borrowed until return. A record that is back after
     * LOST is SEEN again, also with the same content. */
    void (*on_seen)(void *ctx, const struct worker_record *record);
    void (*on_lost)(void *ctx, struct incarnation incarnation);
    /* All that etcd has was delivered (again after each listing). NULL-able. */
    void (*on_synced)(void *ctx);
};
/* Follows /baton/CLUSTER/workers/ until shutdown, over any outage of etcd. handlers: borrowed for
 * the registry's life. STATUS_EXISTS at the second call; STATUS_CANCELLED after shutdown began. */
MUST_USE enum status registry_watch(struct registry *registry,
                                    const struct registry_fleet_handlers *handlers, void *ctx);

struct registry_counters {
    uint64_t registrations; /* puts that etcd confirmed */
    uint64_t leases_lost;
    uint64_t seen; /* delivered */
    uint64_t lost; /* delivered */
    uint64_t
        malformed;    /* records or keys that could not be read; logged once each, not delivered */
    uint64_t workers; /* in the view now */
    uint64_t breaks;  /* of the fleet's watch */
    bool is_synced;   /* the fleet was delivered whole at least once */
};
void registry_counters(struct registry *registry, struct registry_counters *out);

/* ---- end -------------------------------------------------------------------------------- */

/* Blocks up to `within`: deregisters (if it is registered), ends the watch and the etcd client; no
 * handler runs after it returned STATUS_OK. STATUS_TIMEOUT: something did not end in time; logged;
 * call it again or leave the process. Not on the rpc thread; before rpc_shutdown. */
MUST_USE enum status registry_shutdown(struct registry *registry, struct span within);
/* Frees. CHECKs that registry_shutdown succeeded. NULL is fine. */
void registry_destroy(struct registry *registry);

#endif
