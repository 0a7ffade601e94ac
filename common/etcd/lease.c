/* A kept lease: granted once, kept over any number of streams, lost once, closed once.
 *
 * What a lease is worth is counted from when the last keep-alive that was answered had been sent:
 * etcd extended it later than that, so the client gives it up before etcd does, not after. */
#include <stdlib.h>

#include "base/check.h"
#include "etcd/etcd.h"
#include "etcd/internal.h"
#include "etcd/proto/etcdserverpb.pb-c.h"
#include "runtime/clock.h"

#define TTL_MOST_S 9000000000 /* etcd's own bound (lessor.go, maxLeaseTTL); in ns it still fits */

enum lease_state {
    LEASE_GRANTING,
    LEASE_KEPT,
    LEASE_LOST,
    LEASE_ENDING,   /* closing: stream and calls end */
    LEASE_REVOKING, /* closing: the revoke runs */
    LEASE_ENDED,    /* nothing runs; freed by the next tick */
};

struct etcd_lease {
    struct member member; /* first: etcd->leases */
    struct mail open_mail;
    struct mail close_mail;
    atomic_bool is_close_posted;
    bool is_close_run;
    struct etcd *etcd;
    struct etcd_lease_config config;
    const struct etcd_lease_handlers *handlers;
    void *ctx;
    bool close_revokes; /* these two: written before close_mail is posted */
    struct span close_within;

    enum lease_state state;
    bool is_revoked;
    struct call *call; /* grant or revoke in flight */
    struct instant asked_at;
    int64_t id;
    int64_t ttl_s;
    struct span every;
    struct instant expires_at;

    bool has_stream;
    bool is_stream_cancelled;
    struct rpc_call_id stream;
    uint32_t endpoint;
    struct instant sent_at;
    bool is_waiting; /* for the answer to what was sent at sent_at */
    struct instant next_at;
    struct etcd_error last_error;
};

/* ttl_s > 0 is etcd's word: any number. */
static struct span ttl_span(int64_t ttl_s) {
    return span_ms((ttl_s < TTL_MOST_S ? ttl_s : TTL_MOST_S) * 1000);
}

static void lease_stream_cancel(struct etcd_lease *lease) {
    if (lease->has_stream && !lease->is_stream_cancelled) {
        lease->is_stream_cancelled = true;
        rpc_call_cancel(lease->etcd->rpc, lease->stream);
    }
}

static void lease_lose(struct etcd_lease *lease, const char *message) {
    lease->state = LEASE_LOST;
    lease_stream_cancel(lease);
    lease->handlers->on_lost(lease->ctx, message);
}

/* ---- stream ---------------------------------------------------------------------------------- */

static void lease_send(struct etcd_lease *lease, struct instant now) {
    Etcdserverpb__LeaseKeepAliveRequest request = ETCDSERVERPB__LEASE_KEEP_ALIVE_REQUEST__INIT;
    uint8_t packed[16]; /* one field: tag and at most 10 bytes */
    request.id = lease->id;
    size_t len = etcdserverpb__lease_keep_alive_request__get_packed_size(&request);
    CHECK_OP(len, <=, sizeof(packed));
    (void)etcdserverpb__lease_keep_alive_request__pack(&request, packed);
    lease->sent_at = now;
    lease->is_waiting = true;
    lease->next_at = instant_add(now, lease->every);
    rpc_call_send(lease->etcd->rpc, lease->stream, packed, len);
}

static void lease_on_message(void *ctx, struct rpc_call_id id, const uint8_t *data, size_t len) {
    struct etcd_lease *lease = ctx;
    (void)id;
    if (lease->state != LEASE_KEPT || lease->is_stream_cancelled) {
        return;
    }
    Etcdserverpb__LeaseKeepAliveResponse *answer =
        etcdserverpb__lease_keep_alive_response__unpack(NULL, len, data);
    if (answer == NULL) {
        etcd_error_set(&lease->last_error, "etcd at %s sent a keep-alive that cannot be read",
                       lease->etcd->endpoints[lease->endpoint].address);
        lease_stream_cancel(lease);
        return;
    }
    int64_t answered_id = answer->id;
    int64_t ttl_s = answer->ttl;
    etcdserverpb__lease_keep_alive_response__free_unpacked(answer, NULL);
    if (answered_id != lease->id) {
        return;
    }
    endpoint_worked(lease->etcd, lease->endpoint);
    if (ttl_s <= 0) {
        struct etcd_error error;
        etcd_error_set(&error, "etcd at %s no longer has the lease: it ran out or was revoked",
                       lease->etcd->endpoints[lease->endpoint].address);
        lease_lose(lease, error.text);
        return;
    }
    lease->is_waiting = false;
    lease->last_error.text[0] = 0;
    lease->expires_at = instant_add(lease->sent_at, ttl_span(ttl_s));
}

static void lease_on_stream_closed(void *ctx, struct rpc_call_id id,
                                   const struct rpc_outcome *outcome) {
    struct etcd_lease *lease = ctx;
    struct etcd *etcd = lease->etcd;
    struct instant now = clock_now();
    (void)id;
    lease->has_stream = false;
    if (lease->state != LEASE_KEPT) {
        return; /* the tick goes on */
    }
    if (!lease->is_stream_cancelled) { /* otherwise last_error says why we did it */
        enum status status = STATUS_OK;
        (void)outcome_explain(etcd, lease->endpoint, outcome, instant_since(now, lease->sent_at),
                              &status, &lease->last_error);
    }
    /* Whatever it was, the next stream tries elsewhere; with one endpoint it waits a little. */
    endpoint_failed(etcd, lease->endpoint, now);
    lease->next_at = now;
}

static const struct rpc_handlers lease_stream_handlers = {
    .on_message = lease_on_message,
    .on_closed = lease_on_stream_closed,
};

static void lease_stream_open(struct etcd_lease *lease, struct instant now) {
    struct etcd *etcd = lease->etcd;
    struct instant ready_at = now;
    if (!endpoint_pick(etcd, now, &lease->endpoint, &ready_at)) {
        lease->next_at = ready_at;
        return;
    }
    static const struct rpc_pair headers[] = {{.key = "hasleader", .value = "true"}};
    const struct rpc_call_config config = {
        .method = "/etcdserverpb.Lease/LeaseKeepAlive",
        .kind = RPC_KIND_BIDI,
        .deadline = INSTANT_NEVER, /* each keep-alive has its own, see lease_step */
        .headers = headers,
        .headers_len = 1,
        .handlers = &lease_stream_handlers,
        .ctx = lease,
    };
    enum status status =
        rpc_call_start(etcd->endpoints[lease->endpoint].channel, &config, &lease->stream);
    if (status != STATUS_OK) {
        etcd_error_set(&lease->last_error, "the rpc layer takes no call: %s", status_name(status));
        lease->next_at = instant_add(now, span_ms(ETCD_BACKOFF_MS));
        return;
    }
    lease->has_stream = true;
    lease->is_stream_cancelled = false;
    lease_send(lease, now);
}

/* ---- grant and revoke ------------------------------------------------------------------------ */

static void lease_on_grant(void *ctx, const struct etcd_reply *reply) {
    struct etcd_lease *lease = ctx;
    lease->call = NULL;
    if (lease->state != LEASE_GRANTING) {
        return; /* closing: what was granted just now runs out by itself */
    }
    if (reply->status != STATUS_OK) {
        lease_lose(lease, reply->message);
        return;
    }
    if (reply->lease == 0 || reply->ttl_s <= 0) {
        lease_lose(lease, "etcd granted a lease without an id or a time to live");
        return;
    }
    lease->state = LEASE_KEPT;
    lease->id = reply->lease;
    lease->ttl_s = reply->ttl_s;
    struct span most = {ttl_span(reply->ttl_s).ns / 3};
    lease->every = lease->config.keepalive;
    if (lease->every.ns <= 0 || lease->every.ns > most.ns) {
        lease->every = most;
    }
    lease->expires_at = instant_add(lease->asked_at, ttl_span(reply->ttl_s));
    lease->next_at = clock_now();
    lease->handlers->on_granted(lease->ctx, lease->id, lease->ttl_s);
}

static void lease_on_revoke(void *ctx, const struct etcd_reply *reply) {
    struct etcd_lease *lease = ctx;
    lease->call = NULL;
    lease->state = LEASE_ENDED;
    lease->is_revoked = reply->status == STATUS_OK || reply->status == STATUS_NOT_FOUND;
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void lease_keep(struct etcd_lease *lease, struct instant now) {
    struct etcd *etcd = lease->etcd;
    if (instant_reached(now, lease->expires_at)) {
        struct etcd_error error;
        char span[32];
        span_text(span, sizeof(span), ttl_span(lease->ttl_s));
        etcd_error_set(&error, "the lease was not confirmed for %s%s%.150s", span,
                       lease->last_error.text[0] != 0 ? ": " : "", lease->last_error.text);
        lease_lose(lease, error.text);
        return;
    }
    if (!lease->has_stream) {
        if (instant_reached(now, lease->next_at)) {
            lease_stream_open(lease, now);
        }
        return;
    }
    if (lease->is_stream_cancelled) {
        return; /* on_closed is on its way */
    }
    if (lease->is_waiting) {
        struct span waited = etcd->config.attempt_timeout;
        if (instant_reached(now, instant_add(lease->sent_at, waited))) {
            explain_silence(etcd, lease->endpoint, waited, &lease->last_error);
            lease_stream_cancel(lease);
        }
    } else if (instant_reached(now, lease->next_at)) {
        lease_send(lease, now);
    }
}

static void lease_end(struct etcd_lease *lease) {
    bool may_hold = lease->state == LEASE_KEPT;
    lease->state = LEASE_ENDING;
    if (!may_hold || !lease->close_revokes) {
        lease->id = 0;
    }
    lease_stream_cancel(lease);
    if (lease->call != NULL) {
        call_cancel(lease->call);
    }
}

static void lease_step(struct etcd_lease *lease, struct instant now) {
    switch (lease->state) {
    case LEASE_GRANTING:
    case LEASE_LOST: break;
    case LEASE_KEPT: lease_keep(lease, now); break;
    case LEASE_ENDING:
        if (lease->has_stream || lease->call != NULL) {
            break;
        }
        if (lease->id != 0 && !atomic_load(&lease->etcd->is_closing)) {
            lease->state = LEASE_REVOKING;
            struct span within = lease->close_within;
            if (within.ns <= 0) {
                within = lease->etcd->config.call_timeout;
            }
            lease->call = call_revoke(lease->etcd, lease->id, within, lease_on_revoke, lease);
            break;
        }
        lease->state = LEASE_ENDED;
        break;
    case LEASE_REVOKING: /* call.c gives up at its deadline */
    case LEASE_ENDED: break;
    }
}

void leases_tick(struct etcd *etcd, struct instant now) {
    struct member *next = NULL;
    for (struct member *at = etcd->leases.next; at != &etcd->leases; at = next) {
        struct etcd_lease *lease = (struct etcd_lease *)(void *)at;
        next = at->next;
        lease_step(lease, now);
        bool is_mail_out = atomic_load(&lease->is_close_posted) && !lease->is_close_run;
        if (lease->state == LEASE_ENDED && !is_mail_out) {
            member_unlink(&lease->member);
            lease->handlers->on_closed(lease->ctx, lease->is_revoked);
            free(lease);
            etcd_leave(etcd);
        }
    }
}

void leases_close(struct etcd *etcd) {
    for (struct member *at = etcd->leases.next; at != &etcd->leases; at = at->next) {
        struct etcd_lease *lease = (struct etcd_lease *)(void *)at;
        lease->close_revokes = false;
        if (lease->state == LEASE_REVOKING) {
            call_cancel(lease->call);
        } else if (lease->state != LEASE_ENDED) {
            lease_end(lease);
        }
    }
}

/* ---- from any thread ------------------------------------------------------------------------- */

static void lease_open_run(struct mail *mail, void *ctx) {
    (void)ctx;
    struct etcd_lease *lease =
        (struct etcd_lease *)(void *)((unsigned char *)mail -
                                      offsetof(struct etcd_lease, open_mail));
    struct etcd *etcd = lease->etcd;
    member_link(&etcd->leases, &lease->member);
    if (atomic_load(&etcd->is_closing)) {
        lease->state = LEASE_ENDED;
        return;
    }
    lease->state = LEASE_GRANTING;
    lease->asked_at = clock_now();
    lease->call = call_grant(etcd, lease->config.ttl_s, lease_on_grant, lease);
}

enum status etcd_lease_open(struct etcd *etcd, const struct etcd_lease_config *config,
                            const struct etcd_lease_handlers *handlers, void *ctx,
                            struct etcd_lease **out) {
    CHECK(handlers->on_granted != NULL && handlers->on_lost != NULL);
    CHECK(handlers->on_closed != NULL);
    if (config->ttl_s <= 0) {
        return STATUS_INVALID;
    }
    enum status status = etcd_enter(etcd);
    if (status != STATUS_OK) {
        return status;
    }
    struct etcd_lease *lease = etcd_alloc(sizeof(*lease));
    lease->etcd = etcd;
    lease->config = *config;
    lease->handlers = handlers;
    lease->ctx = ctx;
    lease->open_mail.run = lease_open_run;
    *out = lease;
    if (!rpc_post(etcd->rpc, &lease->open_mail)) {
        *out = NULL;
        free(lease);
        etcd_leave(etcd);
        return STATUS_CANCELLED;
    }
    return STATUS_OK;
}

static void lease_close_run(struct mail *mail, void *ctx) {
    (void)ctx;
    struct etcd_lease *lease =
        (struct etcd_lease *)(void *)((unsigned char *)mail -
                                      offsetof(struct etcd_lease, close_mail));
    lease->is_close_run = true;
    switch (lease->state) {
    case LEASE_GRANTING:
    case LEASE_KEPT:
    case LEASE_LOST: lease_end(lease); break;
    case LEASE_ENDING: /* etcd_close was first */
    case LEASE_REVOKING:
    case LEASE_ENDED: break;
    }
}

void etcd_lease_close(struct etcd_lease *lease, bool revoke, struct span within) {
    if (atomic_exchange(&lease->is_close_posted, true)) {
        return;
    }
    lease->close_revokes = revoke;
    lease->close_within = within;
    lease->close_mail.run = lease_close_run;
    bool is_posted = rpc_post(lease->etcd->rpc, &lease->close_mail);
    CHECK(is_posted); /* rpc_shutdown comes after etcd_close has ended */
}
