/* A watch: a listing, then a stream from the revision after it; over again when the stream breaks.
 *
 * `last` is the revision up to which everything was delivered. A broken stream is resumed at
 * last + 1. When etcd has compacted that away, or answers with less history than was seen (another
 * cluster, an older snapshot, a lower term), the prefix is listed again and the difference to the
 * known keys is delivered: whatever happened, the consumer's map ends up as etcd's.
 * A member that merely lags looks the same at first: a linearizable read decides. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "etcd/etcd.h"
#include "etcd/internal.h"
#include "etcd/keys.h"
#include "etcd/proto/etcdserverpb.pb-c.h"
#include "runtime/clock.h"

#define FRAGMENTS_MAX 1024u /* of one answer; etcd cuts at about 1.5 MiB */

enum watch_state {
    WATCH_IDLE,      /* waits until next_at, then lists or opens */
    WATCH_LISTING,   /* a range runs */
    WATCH_OPENING,   /* the stream waits for `created` until answer_by */
    WATCH_CHECKING,  /* the stream is made, but its member knows less than was seen: a read decides
                      */
    WATCH_FOLLOWING, /* the connection's keep-alive watches over the silence */
    WATCH_BREAKING,  /* the stream was cancelled; its end is on the way */
    WATCH_ENDED,     /* freed by the next tick */
};

struct etcd_watch {
    struct member member; /* first: etcd->watches */
    struct mail open_mail;
    struct mail close_mail;
    atomic_bool is_close_posted;
    bool is_close_run;
    bool is_closing;
    struct etcd *etcd;
    const struct etcd_watch_handlers *handlers;
    void *ctx;
    struct bytes key; /* a copy */
    bool is_prefix;

    enum watch_state state;
    struct call *listing;
    struct call *check;
    bool has_stream;
    struct rpc_call_id stream;
    uint32_t endpoint;
    bool needs_list;
    uint32_t failures;
    struct instant next_at;
    struct instant answer_by;
    struct instant following_since;

    int64_t last;
    int64_t seen;        /* the highest revision that etcd named; >= last once there is one */
    uint64_t cluster_id; /* 0: not known yet */
    uint64_t raft_term;
    uint32_t mark;
    struct watch_keys keys;
    Etcdserverpb__WatchResponse **fragments;
    uint32_t fragments_len;

    _Atomic uint64_t events;
    _Atomic uint64_t listings;
    _Atomic uint64_t breaks;
    _Atomic uint64_t resets;
    _Atomic uint64_t dropped;
    _Atomic uint64_t keys_count;
};

/* Relaxed: figures, nothing hangs on them. */
static void count(_Atomic uint64_t *counter) {
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

static bool watch_is_muted(const struct etcd_watch *watch) {
    return watch->is_closing || atomic_load(&watch->is_close_posted);
}

static void fragments_drop(struct etcd_watch *watch) {
    for (uint32_t i = 0; i < watch->fragments_len; i++) {
        etcdserverpb__watch_response__free_unpacked(watch->fragments[i], NULL);
    }
    watch->fragments_len = 0;
}

static void watch_deliver(struct etcd_watch *watch, const struct etcd_event *event) {
    if (!watch_is_muted(watch)) {
        count(&watch->events);
        watch->handlers->on_event(watch->ctx, event);
    }
}

/* Ends what runs and tries again: at once the first time, then with growing pauses. */
static void watch_break(struct etcd_watch *watch, const char *message) {
    struct instant now = clock_now();
    fragments_drop(watch);
    if (watch->check != NULL) {
        call_cancel(watch->check);
    }
    if (watch->state == WATCH_FOLLOWING &&
        instant_reached(now, instant_add(watch->following_since, span_ms(ETCD_STABLE_MS)))) {
        watch->failures = 0;
    }
    watch->next_at = now;
    if (watch->failures > 0) {
        watch->next_at = instant_add(now, etcd_backoff(watch->etcd, watch->failures));
    }
    watch->failures++;
    if (watch->has_stream) {
        watch->state = WATCH_BREAKING;
        rpc_call_cancel(watch->etcd->rpc, watch->stream);
    } else {
        watch->state = WATCH_IDLE;
    }
    count(&watch->breaks);
    if (!watch_is_muted(watch) && watch->handlers->on_broken != NULL) {
        watch->handlers->on_broken(watch->ctx, message);
    }
}

/* ---- listing --------------------------------------------------------------------------------- */

static int by_mod_revision(const void *left, const void *right) {
    const struct etcd_kv *const *a = left;
    const struct etcd_kv *const *b = right;
    return ((*a)->mod_revision > (*b)->mod_revision) - ((*a)->mod_revision < (*b)->mod_revision);
}

static void listing_deliver(struct etcd_watch *watch, const struct etcd_reply *reply) {
    watch->mark++;
    const struct etcd_kv **changed = etcd_alloc(reply->kvs_len * sizeof(const struct etcd_kv *));
    size_t changed_len = 0;
    for (size_t i = 0; i < reply->kvs_len; i++) {
        if (keys_put(&watch->keys, &reply->kvs[i], watch->mark)) {
            changed[changed_len++] = &reply->kvs[i];
        }
    }
    qsort(changed, changed_len, sizeof(const struct etcd_kv *), by_mod_revision);
    uint32_t gone_len = 0;
    struct watch_key **gone = keys_take_unmarked(&watch->keys, watch->mark, &gone_len);
    atomic_store_explicit(&watch->keys_count, watch->keys.count, memory_order_relaxed);
    for (size_t i = 0; i < changed_len; i++) {
        struct etcd_event event = {.is_listed = true, .kv = *changed[i]};
        watch_deliver(watch, &event);
    }
    for (uint32_t i = 0; i < gone_len; i++) {
        struct etcd_event event = {.is_delete = true, .is_listed = true};
        event.kv.key = (struct bytes){gone[i]->data, gone[i]->len};
        event.kv.mod_revision = reply->header.revision;
        watch_deliver(watch, &event);
        free(gone[i]);
    }
    free(gone);
    free(changed);
}

/* What etcd has is not a continuation of what was seen. */
static void watch_check_history(struct etcd_watch *watch, const struct etcd_header *header) {
    char message[256];
    if (watch->cluster_id != 0 && header->cluster_id != watch->cluster_id) {
        (void)snprintf(
            message, sizeof(message), "etcd is another cluster now (%016llx, was %016llx)",
            (unsigned long long)header->cluster_id, (unsigned long long)watch->cluster_id);
    } else if (header->revision < watch->seen) {
        (void)snprintf(message, sizeof(message),
                       "etcd went back from revision %lld to %lld: a snapshot was restored",
                       (long long)watch->seen, (long long)header->revision);
    } else {
        return;
    }
    count(&watch->resets);
    if (!watch_is_muted(watch) && watch->handlers->on_reset != NULL) {
        watch->handlers->on_reset(watch->ctx, message);
    }
}

static void watch_on_listing(void *ctx, const struct etcd_reply *reply) {
    struct etcd_watch *watch = ctx;
    watch->listing = NULL;
    if (watch->is_closing) {
        watch->state = WATCH_IDLE; /* the tick ends it */
        return;
    }
    if (reply->status != STATUS_OK) {
        watch_break(watch, reply->message);
        return;
    }
    if (reply->kvs_len > watch->etcd->config.watch_keys_max) {
        struct etcd_error error;
        etcd_error_set(&error, "the watched prefix has %zu keys, more than watch_keys_max (%u)",
                       reply->kvs_len, watch->etcd->config.watch_keys_max);
        watch_break(watch, error.text);
        return;
    }
    watch_check_history(watch, &reply->header);
    listing_deliver(watch, reply);
    watch->last = reply->header.revision;
    watch->seen = reply->header.revision;
    watch->cluster_id = reply->header.cluster_id;
    watch->raft_term = reply->header.raft_term;
    watch->needs_list = false;
    watch->state = WATCH_IDLE;
    watch->next_at = clock_now();
    count(&watch->listings);
    if (!watch_is_muted(watch)) {
        watch->handlers->on_synced(watch->ctx, watch->last);
    }
}

/* ---- stream ---------------------------------------------------------------------------------- */

static void watch_saw(struct etcd_watch *watch, int64_t revision) {
    if (revision > watch->seen) {
        watch->seen = revision;
    }
}

static void fragments_deliver(struct etcd_watch *watch);

static void watch_follow(struct etcd_watch *watch) {
    watch->state = WATCH_FOLLOWING;
    watch->following_since = clock_now();
    endpoint_worked(watch->etcd, watch->endpoint);
    if (!watch_is_muted(watch) && watch->handlers->on_following != NULL) {
        watch->handlers->on_following(watch->ctx);
    }
    if (watch->fragments_len > 0 && !watch->fragments[watch->fragments_len - 1]->fragment) {
        fragments_deliver(watch); /* what came while the check ran */
    }
}

/* The end of a linearizable read that was made after the stream: had its member been set back after
 * that, the stream would have broken. */
static void watch_on_check(void *ctx, const struct etcd_reply *reply) {
    struct etcd_watch *watch = ctx;
    watch->check = NULL;
    if (watch->is_closing || watch->state != WATCH_CHECKING) {
        return;
    }
    if (reply->status != STATUS_OK) {
        watch_break(watch, reply->message);
    } else if (reply->header.cluster_id != watch->cluster_id ||
               reply->header.revision < watch->seen || reply->header.raft_term < watch->raft_term) {
        struct etcd_error error;
        watch->needs_list = true;
        etcd_error_set(&error, "etcd knows less than was seen (revision %lld, seen %lld): listing",
                       (long long)reply->header.revision, (long long)watch->seen);
        watch_break(watch, error.text);
        watch->next_at = clock_now();
    } else {
        watch->raft_term = reply->header.raft_term;
        watch_follow(watch); /* the member merely lags */
    }
}

static void watch_on_created(struct etcd_watch *watch, const Etcdserverpb__WatchResponse *answer) {
    const Etcdserverpb__ResponseHeader *header = answer->header;
    if (watch->state != WATCH_OPENING) {
        watch_break(watch, "etcd made a watch twice");
    } else if (watch->cluster_id != 0 && header->cluster_id != watch->cluster_id) {
        watch->needs_list = true;
        watch_break(watch, "etcd is another cluster than the one that was seen: listing");
    } else if (header->revision < watch->seen || header->raft_term < watch->raft_term) {
        const struct etcd_range range = {
            .key = watch->key, .is_prefix = watch->is_prefix, .is_keys_only = true, .limit = 1};
        watch->state = WATCH_CHECKING;
        watch->check = call_range(watch->etcd, &range, watch_on_check, watch);
    } else {
        watch->cluster_id = header->cluster_id;
        watch->raft_term = header->raft_term;
        watch_saw(watch, header->revision);
        watch_follow(watch);
    }
}

static void watch_on_canceled(struct etcd_watch *watch, const Etcdserverpb__WatchResponse *answer) {
    struct etcd_error error;
    const char *address = watch->etcd->endpoints[watch->endpoint].address;
    if (answer->compact_revision > 0) {
        watch->needs_list = true;
        etcd_error_set(&error, "etcd at %s compacted revision %lld before it was read: listing",
                       address, (long long)(watch->last + 1));
    } else {
        etcd_error_set(&error, "etcd at %s ended the watch: %.160s", address,
                       answer->cancel_reason);
        endpoint_failed(watch->etcd, watch->endpoint, clock_now()); /* "no leader": try another */
    }
    watch_break(watch, error.text);
    if (answer->compact_revision > 0) {
        watch->next_at = clock_now(); /* etcd is well: no reason to wait */
    }
}

/* False: a key too many; the rest must not be delivered. */
static bool watch_apply(struct etcd_watch *watch, const Mvccpb__Event *from, int64_t last) {
    if (from->kv == NULL || from->kv->mod_revision <= last) {
        count(&watch->dropped);
        return true;
    }
    struct etcd_event event = {.is_delete = from->type == MVCCPB__EVENT__EVENT_TYPE__DELETE};
    event.kv = (struct etcd_kv){.key = {from->kv->key.data, from->kv->key.len},
                                .value = {from->kv->value.data, from->kv->value.len},
                                .create_revision = from->kv->create_revision,
                                .mod_revision = from->kv->mod_revision,
                                .version = from->kv->version,
                                .lease = from->kv->lease};
    if (event.is_delete) {
        (void)keys_remove(&watch->keys,
                          event.kv.key); /* may be unknown to a watch without listing */
    } else if (watch->keys.count >= watch->etcd->config.watch_keys_max &&
               keys_find(&watch->keys, event.kv.key) == NULL) {
        return false;
    } else {
        (void)keys_put(&watch->keys, &event.kv, watch->mark);
    }
    watch_deliver(watch, &event);
    return true;
}

static void fragments_deliver(struct etcd_watch *watch) {
    int64_t before = watch->last;
    bool is_whole = true;
    for (uint32_t i = 0; i < watch->fragments_len && is_whole; i++) {
        const Etcdserverpb__WatchResponse *answer = watch->fragments[i];
        watch_saw(watch, answer->header->revision);
        for (size_t j = 0; j < answer->n_events && is_whole; j++) {
            is_whole = watch_apply(watch, answer->events[j], before);
            if (is_whole && answer->events[j]->kv != NULL &&
                answer->events[j]->kv->mod_revision > watch->last) {
                watch->last = answer->events[j]->kv->mod_revision;
            }
        }
    }
    atomic_store_explicit(&watch->keys_count, watch->keys.count, memory_order_relaxed);
    fragments_drop(watch);
    if (!is_whole) {
        watch->needs_list = true;
        watch_break(watch, "the watched prefix has more keys than watch_keys_max");
    }
}

/* Takes the answer. */
static void watch_on_answer(struct etcd_watch *watch, Etcdserverpb__WatchResponse *answer) {
    if (answer->header == NULL) {
        watch_break(watch, "etcd sent a watch answer without a header");
    } else if (answer->created && !answer->canceled) {
        watch_on_created(watch, answer);
    } else if (answer->canceled) {
        watch_on_canceled(watch, answer);
    } else if (watch->state == WATCH_OPENING) {
        watch_break(watch, "etcd sent watch events before it made the watch");
    } else if (answer->n_events > 0 || answer->fragment) {
        if (watch->fragments_len == FRAGMENTS_MAX) {
            watch_break(watch, "etcd sent a watch answer in more fragments than are accepted");
        } else {
            bool has_more = answer->fragment;
            watch->fragments[watch->fragments_len++] = answer;
            if (!has_more && watch->state == WATCH_FOLLOWING) {
                fragments_deliver(watch);
            }
            return;
        }
    } else if (answer->watch_id >= 0 && watch->fragments_len == 0 &&
               watch->state == WATCH_FOLLOWING) {
        /* Progress: etcd has nothing for us up to here. It only sends this unasked to a watch that
         * is in step; the answer to a progress *request* (watch_id -1) may overtake events in
         * etcd 3.4 and is therefore never asked for. */
        if (answer->header->revision < watch->last) {
            watch->needs_list = true;
            watch_break(watch, "etcd's revision went back under a running watch: listing");
        } else {
            watch->last = answer->header->revision;
            watch_saw(watch, watch->last);
        }
    }
    etcdserverpb__watch_response__free_unpacked(answer, NULL);
}

static void watch_on_message(void *ctx, struct rpc_call_id id, const uint8_t *data, size_t len) {
    struct etcd_watch *watch = ctx;
    (void)id;
    if (watch->is_closing || (watch->state != WATCH_OPENING && watch->state != WATCH_CHECKING &&
                              watch->state != WATCH_FOLLOWING)) {
        return;
    }
    Etcdserverpb__WatchResponse *answer = etcdserverpb__watch_response__unpack(NULL, len, data);
    if (answer == NULL) {
        watch_break(watch, "etcd sent a watch answer that cannot be read");
        return;
    }
    watch_on_answer(watch, answer);
}

static void watch_on_stream_closed(void *ctx, struct rpc_call_id id,
                                   const struct rpc_outcome *outcome) {
    struct etcd_watch *watch = ctx;
    struct etcd *etcd = watch->etcd;
    (void)id;
    watch->has_stream = false;
    if (watch->state == WATCH_BREAKING || watch->is_closing) {
        watch->state = WATCH_IDLE;
        return;
    }
    struct etcd_error error;
    enum status status = STATUS_OK;
    (void)outcome_explain(etcd, watch->endpoint, outcome, etcd->config.attempt_timeout, &status,
                          &error);
    endpoint_failed(etcd, watch->endpoint, clock_now());
    watch_break(watch, error.text);
}

static const struct rpc_handlers watch_stream_handlers = {
    .on_message = watch_on_message,
    .on_closed = watch_on_stream_closed,
};

static void watch_send_create(struct etcd_watch *watch) {
    uint8_t zero = 0;
    uint8_t *end = etcd_alloc(watch->key.len + 1);
    Etcdserverpb__WatchCreateRequest create = ETCDSERVERPB__WATCH_CREATE_REQUEST__INIT;
    create.key.data = watch->key.len == 0 ? &zero : (uint8_t *)(uintptr_t)watch->key.data;
    create.key.len = watch->key.len == 0 ? 1 : watch->key.len;
    if (watch->is_prefix) {
        create.range_end.len = prefix_end(watch->key, end);
        create.range_end.data = end;
    }
    create.start_revision = watch->last + 1;
    create.progress_notify = true;
    create.fragment = true;
    Etcdserverpb__WatchRequest request = ETCDSERVERPB__WATCH_REQUEST__INIT;
    request.request_union_case = ETCDSERVERPB__WATCH_REQUEST__REQUEST_UNION_CREATE_REQUEST;
    request.create_request = &create;
    size_t len = etcdserverpb__watch_request__get_packed_size(&request);
    uint8_t *packed = etcd_alloc(len);
    (void)etcdserverpb__watch_request__pack(&request, packed);
    rpc_call_send(watch->etcd->rpc, watch->stream, packed, len);
    free(packed);
    free(end);
}

static void watch_stream_open(struct etcd_watch *watch, struct instant now) {
    struct etcd *etcd = watch->etcd;
    struct instant ready_at = now;
    if (!endpoint_pick(etcd, now, &watch->endpoint, &ready_at)) {
        watch->next_at = ready_at;
        return;
    }
    /* Without a leader the member ends the stream, instead of keeping it silent. */
    static const struct rpc_pair headers[] = {{.key = "hasleader", .value = "true"}};
    const struct rpc_call_config config = {
        .method = "/etcdserverpb.Watch/Watch",
        .kind = RPC_KIND_BIDI,
        .deadline = INSTANT_NEVER, /* `created` has one; then the connection's keep-alive watches */
        .headers = headers,
        .headers_len = 1,
        .handlers = &watch_stream_handlers,
        .ctx = watch,
    };
    enum status status =
        rpc_call_start(etcd->endpoints[watch->endpoint].channel, &config, &watch->stream);
    if (status != STATUS_OK) {
        watch_break(watch, "the rpc layer takes no call: too many are alive, or it shuts down");
        return;
    }
    watch->has_stream = true;
    watch->state = WATCH_OPENING;
    watch->answer_by = instant_add(now, etcd->config.attempt_timeout);
    watch_send_create(watch);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void watch_end(struct etcd_watch *watch) {
    watch->is_closing = true;
    if (watch->listing != NULL) {
        call_cancel(watch->listing);
    }
    if (watch->check != NULL) {
        call_cancel(watch->check);
    }
    if (watch->has_stream && watch->state != WATCH_BREAKING) {
        watch->state = WATCH_BREAKING;
        rpc_call_cancel(watch->etcd->rpc, watch->stream);
    }
}

static void watch_step(struct etcd_watch *watch, struct instant now) {
    switch (watch->state) {
    case WATCH_IDLE:
        if (watch->check != NULL) {
            break; /* cancelled; its end is on the way */
        }
        if (watch->is_closing) {
            watch->state = WATCH_ENDED;
        } else if (!instant_reached(now, watch->next_at)) {
            break;
        } else if (watch->needs_list) {
            watch->state = WATCH_LISTING;
            const struct etcd_range range = {.key = watch->key, .is_prefix = watch->is_prefix};
            watch->listing = call_range(watch->etcd, &range, watch_on_listing, watch);
        } else {
            watch_stream_open(watch, now);
        }
        break;
    case WATCH_OPENING:
        if (instant_reached(now, watch->answer_by)) {
            struct etcd_error error;
            explain_silence(watch->etcd, watch->endpoint, watch->etcd->config.attempt_timeout,
                            &error);
            endpoint_failed(watch->etcd, watch->endpoint, now);
            watch_break(watch, error.text);
        }
        break;
    case WATCH_LISTING: /* call.c has the deadline */
    case WATCH_CHECKING:
    case WATCH_FOLLOWING:
    case WATCH_BREAKING:
    case WATCH_ENDED: break;
    }
}

static void watch_free(struct etcd_watch *watch) {
    fragments_drop(watch);
    free(watch->fragments);
    keys_fini(&watch->keys);
    free((uint8_t *)(uintptr_t)watch->key.data);
    free(watch);
}

void watches_tick(struct etcd *etcd, struct instant now) {
    struct member *next = NULL;
    for (struct member *at = etcd->watches.next; at != &etcd->watches; at = next) {
        struct etcd_watch *watch = (struct etcd_watch *)(void *)at;
        next = at->next;
        watch_step(watch, now);
        bool is_mail_out = atomic_load(&watch->is_close_posted) && !watch->is_close_run;
        if (watch->state == WATCH_ENDED && !is_mail_out) {
            member_unlink(&watch->member);
            watch->handlers->on_closed(watch->ctx);
            watch_free(watch);
            etcd_leave(etcd);
        }
    }
}

void watches_close(struct etcd *etcd) {
    for (struct member *at = etcd->watches.next; at != &etcd->watches; at = at->next) {
        watch_end((struct etcd_watch *)(void *)at);
    }
}

/* ---- from any thread ------------------------------------------------------------------------- */

static void watch_open_run(struct mail *mail, void *ctx) {
    (void)ctx;
    struct etcd_watch *watch =
        (struct etcd_watch *)(void *)((unsigned char *)mail -
                                      offsetof(struct etcd_watch, open_mail));
    member_link(&watch->etcd->watches, &watch->member);
    watch->state = WATCH_IDLE;
    watch->is_closing = atomic_load(&watch->etcd->is_closing);
    watch->next_at = clock_now();
    watch_step(watch, watch->next_at);
}

enum status etcd_watch_open(struct etcd *etcd, const struct etcd_watch_config *config,
                            const struct etcd_watch_handlers *handlers, void *ctx,
                            struct etcd_watch **out) {
    CHECK(handlers->on_event != NULL && handlers->on_synced != NULL);
    CHECK(handlers->on_closed != NULL);
    if ((config->key.len == 0 && !config->is_prefix) || config->revision < 0) {
        return STATUS_INVALID;
    }
    enum status status = etcd_enter(etcd);
    if (status != STATUS_OK) {
        return status;
    }
    struct etcd_watch *watch = etcd_alloc(sizeof(*watch));
    uint8_t *key = etcd_alloc(config->key.len);
    if (config->key.len > 0) {
        memcpy(key, config->key.data, config->key.len);
    }
    watch->etcd = etcd;
    watch->handlers = handlers;
    watch->ctx = ctx;
    watch->key = (struct bytes){key, config->key.len};
    watch->is_prefix = config->is_prefix;
    watch->needs_list = config->revision == 0;
    watch->last = config->revision == 0 ? 0 : config->revision - 1;
    watch->fragments = etcd_alloc(FRAGMENTS_MAX * sizeof(Etcdserverpb__WatchResponse *));
    watch->open_mail.run = watch_open_run;
    *out = watch;
    if (!rpc_post(etcd->rpc, &watch->open_mail)) {
        *out = NULL;
        watch_free(watch);
        etcd_leave(etcd);
        return STATUS_CANCELLED;
    }
    return STATUS_OK;
}

static void watch_close_run(struct mail *mail, void *ctx) {
    (void)ctx;
    struct etcd_watch *watch =
        (struct etcd_watch *)(void *)((unsigned char *)mail -
                                      offsetof(struct etcd_watch, close_mail));
    watch->is_close_run = true;
    if (!watch->is_closing) {
        watch_end(watch);
    }
}

void etcd_watch_close(struct etcd_watch *watch) {
    if (atomic_exchange(&watch->is_close_posted, true)) {
        return;
    }
    watch->close_mail.run = watch_close_run;
    bool is_posted = rpc_post(watch->etcd->rpc, &watch->close_mail);
    CHECK(is_posted); /* rpc_shutdown comes after etcd_close has ended */
}

void etcd_watch_counters(struct etcd_watch *watch, struct etcd_watch_counters *out) {
    out->events = atomic_load_explicit(&watch->events, memory_order_relaxed);
    out->listings = atomic_load_explicit(&watch->listings, memory_order_relaxed);
    out->breaks = atomic_load_explicit(&watch->breaks, memory_order_relaxed);
    out->resets = atomic_load_explicit(&watch->resets, memory_order_relaxed);
    out->dropped = atomic_load_explicit(&watch->dropped, memory_order_relaxed);
    out->keys = atomic_load_explicit(&watch->keys_count, memory_order_relaxed);
}
