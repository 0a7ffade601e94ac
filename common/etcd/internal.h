/* Room-private: what etcd.c (life, endpoints, clock), call.c, lease.c and watch.c share.
 *
 * All of it belongs to the rpc thread, except what is atomic and what a user's thread fills in
 * before it posts. Objects are freed only in etcd_tick, so a walk over a list is never surprised.
 * Time is CLOCK_MONOTONIC, looked at each 50 ms by a thread that does nothing else: rpc has no
 * timers, and nothing here needs a finer one. */
#ifndef ETCD_INTERNAL_H
#define ETCD_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/prng.h"
#include "base/status.h"
#include "base/time.h"
#include "etcd/etcd.h"
#include "rpc/rpc.h"
#include "runtime/mail.h"
#include "runtime/thread.h"

#define ETCD_TICK_MS         50
#define ETCD_BACKOFF_MS      50   /* the first; doubles */
#define ETCD_BACKOFF_MOST_MS 2000 /* the last */
#define ETCD_STABLE_MS       2000 /* a stream that lived this long clears its owner's back-off */

struct endpoint {
    char address[128]; /* "host:port" */
    struct rpc_channel *channel;
    struct instant ready_at; /* not before, unless nothing else is left */
    uint32_t failures;       /* in a row */
};

struct call;
struct member { /* of an intrusive list with a head: the outer struct begins with it */
    struct member *prev;
    struct member *next;
};

struct etcd {
    struct rpc *rpc;
    struct etcd_config config; /* defaults filled in; texts are not kept */
    struct endpoint endpoints[ETCD_ENDPOINTS_MAX];
    uint32_t endpoints_len;
    uint32_t current;
    struct prng prng;
    struct member calls;
    struct member leases;
    struct member watches;
    atomic_uint calls_live; /* the users' */
    atomic_uint objects;    /* everything alive: calls, leases, watches */
    atomic_bool is_closing;
    bool is_ended; /* closing, and nothing is left */
    bool is_closed;
    void (*on_closed)(void *ctx);
    void *on_closed_ctx;
    struct mail close_mail;
    struct mail tick_mail;
    atomic_bool is_tick_posted;
    struct thread clock;
};

/* Zeroed; aborts without memory. */
void *etcd_alloc(size_t len);
void member_link(struct member *head, struct member *member);
void member_unlink(struct member *member);

/* Counts one object in. STATUS_CANCELLED, and nothing counted, when the client closes. */
MUST_USE enum status etcd_enter(struct etcd *etcd);
void etcd_leave(struct etcd *etcd);

/* The endpoint to use now; false, and when to look again, if all are backing off. */
bool endpoint_pick(struct etcd *etcd, struct instant now, uint32_t *index_out,
                   struct instant *ready_at_out);
void endpoint_failed(struct etcd *etcd, uint32_t index, struct instant now);
void endpoint_worked(struct etcd *etcd, uint32_t index);
/* 50 ms * 2^(failures - 1), at most config.backoff_max, jittered down to its half. */
struct span etcd_backoff(struct etcd *etcd, uint32_t failures);

/* What a call's end means. Writes a sentence; true if the endpoint is to blame, false if etcd
 * answered. waited: how long the attempt was allowed to take. */
bool outcome_explain(const struct etcd *etcd, uint32_t endpoint, const struct rpc_outcome *outcome,
                     struct span waited, enum status *status_out, struct etcd_error *error_out);
/* "etcd at ADDRESS did not answer within 2 s". */
void explain_silence(const struct etcd *etcd, uint32_t endpoint, struct span waited,
                     struct etcd_error *error_out);
void etcd_error_set(struct etcd_error *error, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* "2 s", "500 ms" */
void span_text(char *text, size_t cap, struct span span);

/* range_end of all keys that begin with key. to: key.len + 1 bytes; returns its length. */
size_t prefix_end(struct bytes key, uint8_t *to);

/* ---- call.c ---- */

/* Calls of the client's own: not counted against calls_max, started on the rpc thread, and
 * cancellable. The handle is valid until `done` returns. */
struct call *call_range(struct etcd *etcd, const struct etcd_range *range, etcd_done done,
                        void *ctx);
struct call *call_grant(struct etcd *etcd, int64_t ttl_s, etcd_done done, void *ctx);
/* Repeated until `within`: revoking twice does no harm. */
struct call *call_revoke(struct etcd *etcd, int64_t lease, struct span within, etcd_done done,
                         void *ctx);
/* `done` follows soon, with STATUS_CANCELLED unless it was over already. */
void call_cancel(struct call *call);
void calls_tick(struct etcd *etcd, struct instant now);
void calls_close(struct etcd *etcd);

/* ---- lease.c, watch.c ---- */

void leases_tick(struct etcd *etcd, struct instant now);
void leases_close(struct etcd *etcd);
void watches_tick(struct etcd *etcd, struct instant now);
void watches_close(struct etcd *etcd);

#endif
