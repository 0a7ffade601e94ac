#include "registry/registry.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "etcd/etcd.h"
#include "registry/fleet.h"
#include "rpc/rpc.h"
#include "runtime/clock.h"
#include "runtime/log.h"
#include "runtime/mail.h"

#define PULSE_MS       1000 /* of the complaints and of the look at our own key */
#define COMPLAINT_MS   5000 /* "waiting for etcd" is logged this often */
#define RETRY_FIRST_MS 100  /* after a registration that failed; doubles */
#define RETRY_MOST_MS  2000
#define REVOKE_MIN_MS  200
#define MISMATCHES_MAX 3u /* of our key's revision, before a pause */

enum what { /* is published */
            WHAT_NOTHING,
            WHAT_WORKER,
            WHAT_ROUTER,
};

struct registry {
    struct rpc *rpc;
    struct etcd *etcd;
    char endpoints[512];
    char prefix[128]; /* "/baton/CLUSTER/" */
    int64_t lease_s;
    struct span keepalive;

    pthread_mutex_t lock; /* guards from here to the next blank line */
    pthread_cond_t ended;
    enum what what;
    struct incarnation incarnation;
    struct wire_buffer record;
    uint64_t version; /* of record; grows with each registry_register_* */
    bool is_deregister_asked;
    bool is_stop_asked;
    bool is_watch_asked;
    struct instant give_up_at; /* of the revoke */
    void (*deregister_done)(void *ctx, enum status status);
    void *deregister_ctx;
    enum registry_state state;
    struct instant state_since;
    char problem[320]; /* the last one */
    uint64_t registrations;
    uint64_t leases_lost;
    bool is_ended;

    atomic_bool is_kicked;
    struct mail kick;

    /* The rpc thread's. */
    char key[192];
    struct etcd_lease *lease;
    bool is_lease_closing;
    int64_t lease_id; /* 0: not granted */
    bool is_putting;
    uint64_t putting_version;
    uint64_t put_version;   /* what etcd has under lease_id; 0: nothing */
    int64_t known_revision; /* of our key, so that a late put of ours cannot undo a newer one */
    bool is_checking;
    bool is_retry_waiting;
    bool is_pulsing;
    uint32_t failures;
    uint32_t mismatches; /* in a row */
    struct instant complained_at;
    struct instant checked_at;
    bool is_revoked;
    bool was_published;
    bool is_deregistered; /* done: nothing of ours is kept alive */
    bool is_closing_etcd;
    struct fleet *fleet;
};

static void registry_step(struct registry *registry);

static void error_set(struct registry_error *error, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void error_set(struct registry_error *error, const char *format, ...) {
    if (error == NULL) {
        return;
    }
    va_list args;
    va_start(args, format);
    (void)vsnprintf(error->text, sizeof(error->text), format, args); /* cut: still a sentence */
    va_end(args);
}

const char *registry_state_name(enum registry_state state) {
    switch (state) {
    case REGISTRY_IDLE: return "idle";
    case REGISTRY_WAITING: return "waiting";
    case REGISTRY_REGISTERED: return "registered";
    case REGISTRY_LOST: return "lost";
    case REGISTRY_GONE: return "gone";
    }
    return "unknown";
}

/* Logs changes as old -> new. problem: NULL keeps the last one. */
static void state_set(struct registry *registry, enum registry_state state, const char *problem) {
    pthread_mutex_lock(&registry->lock);
    enum registry_state before = registry->state;
    if (before != state) {
        registry->state = state;
        registry->state_since = clock_now();
    }
    if (problem != NULL) {
        text_copy(registry->problem, sizeof(registry->problem), problem);
    }
    pthread_mutex_unlock(&registry->lock);
    if (before == state) {
        return;
    }
    char change[64];
    (void)snprintf(change, sizeof(change), "%s -> %s", registry_state_name(before),
                   registry_state_name(state));
    if (state == REGISTRY_LOST) {
        LOG_WARN("registration lost, putting it again", LOG_TEXT("state", change),
                 LOG_TEXT("key", registry->key), LOG_TEXT("cause", problem));
    } else {
        LOG_INFO("registration", LOG_TEXT("state", change), LOG_TEXT("key", registry->key));
    }
}

/* ---- kicks: from any thread to the rpc thread ------------------------------------------------ */

static void registry_on_kick(struct mail *mail, void *ctx) {
    (void)ctx;
    struct registry *registry =
        (struct registry *)(void *)((unsigned char *)mail - offsetof(struct registry, kick));
    atomic_store(&registry->is_kicked, false);
    registry_step(registry);
}

static void registry_kick(struct registry *registry) {
    if (!atomic_exchange(&registry->is_kicked, true)) {
        registry->kick.run = registry_on_kick;
        bool is_posted = rpc_post(registry->rpc, &registry->kick);
        CHECK(is_posted); /* rpc_shutdown comes after registry_shutdown */
    }
}

/* ---- own record ------------------------------------------------------------------------------ */

static void on_retry(void *ctx, const struct etcd_reply *reply) {
    struct registry *registry = ctx;
    registry->is_retry_waiting = false;
    if (reply->status == STATUS_OK) {
        registry_step(registry);
    }
}

/* Remembers why, and tries again after a pause. */
static void registration_failed(struct registry *registry, const char *message) {
    if (registry->is_deregistered) {
        return; /* the late answer to a put */
    }
    if (registry->lease_id != 0 && registry->put_version != 0) {
        LOG_WARN("record in etcd not changed yet", LOG_TEXT("key", registry->key),
                 LOG_TEXT("because", message)); /* the old one is held */
    } else {
        state_set(registry, registry->was_published ? REGISTRY_LOST : REGISTRY_WAITING, message);
    }
    int64_t pause_ms = (int64_t)RETRY_FIRST_MS << (registry->failures < 5 ? registry->failures : 5);
    if (pause_ms > RETRY_MOST_MS) {
        pause_ms = RETRY_MOST_MS;
    }
    registry->failures++;
    if (!registry->is_retry_waiting &&
        etcd_wait(registry->etcd, span_ms(pause_ms), on_retry, registry) == STATUS_OK) {
        registry->is_retry_waiting = true;
    }
}

static void lease_drop(struct registry *registry, bool revoke, struct span within) {
    if (registry->lease != NULL && !registry->is_lease_closing) {
        registry->is_lease_closing = true;
        registry->lease_id = 0;
        etcd_lease_close(registry->lease, revoke, within);
    }
}

static void on_granted(void *ctx, int64_t lease, int64_t ttl_s) {
    struct registry *registry = ctx;
    (void)ttl_s;
    if (!registry->is_lease_closing) {
        registry->lease_id = lease;
        registry->put_version = 0;
        registry_step(registry);
    }
}

static void on_lost(void *ctx, const char *message) {
    struct registry *registry = ctx;
    if (registry->is_lease_closing) {
        return;
    }
    if (registry->lease_id != 0) {
        pthread_mutex_lock(&registry->lock);
        registry->leases_lost++;
        pthread_mutex_unlock(&registry->lock);
    }
    lease_drop(registry, false, span_ms(0));
    registration_failed(registry, message);
}

static void on_lease_closed(void *ctx, bool is_revoked) {
    struct registry *registry = ctx;
    registry->lease = NULL;
    registry->is_lease_closing = false;
    registry->is_revoked = is_revoked;
    registry_step(registry);
}

static const struct etcd_lease_handlers lease_handlers = {
    .on_granted = on_granted, .on_lost = on_lost, .on_closed = on_lease_closed};

static void on_put(void *ctx, const struct etcd_reply *reply) {
    struct registry *registry = ctx;
    registry->is_putting = false;
    if (reply->status == STATUS_CANCELLED) {
        return; /* the end; etcd's on_closed goes on */
    }
    if (reply->status != STATUS_OK) {
        if (reply->status == STATUS_NOT_FOUND) { /* the lease, between two keep-alives */
            lease_drop(registry, false, span_ms(0));
        }
        registration_failed(registry, reply->message);
        return;
    }
    if (!reply->succeeded) { /* our key is at another revision than we thought: an unanswered put */
        int64_t revision = 0;
        if (reply->results_len == 1 && reply->results[0].kvs_len == 1) {
            revision = reply->results[0].kvs[0].mod_revision;
        }
        registry->known_revision = revision;
        if (++registry->mismatches > MISMATCHES_MAX) {
            registration_failed(registry, "somebody else keeps changing this key");
        } else {
            registry_step(registry);
        }
        return;
    }
    registry->mismatches = 0;
    registry->known_revision = reply->header.revision;
    registry->put_version = registry->putting_version;
    registry->was_published = true;
    registry->failures = 0;
    registry->checked_at = clock_now();
    pthread_mutex_lock(&registry->lock);
    registry->registrations++;
    pthread_mutex_unlock(&registry->lock);
    if (!registry->is_lease_closing && registry->lease_id != 0) {
        state_set(registry, REGISTRY_REGISTERED, NULL);
    }
    registry_step(registry);
}

/* Puts the record if the key is at the revision we know; otherwise asks at which it is. */
static void record_put(struct registry *registry) {
    struct bytes key = etcd_text(registry->key);
    const struct etcd_compare compare = {.key = key,
                                         .target = ETCD_COMPARE_MOD_REVISION,
                                         .is = ETCD_COMPARE_EQUAL,
                                         .number = registry->known_revision};
    const struct etcd_op read = {.kind = ETCD_OP_RANGE, .key = key};
    pthread_mutex_lock(&registry->lock);
    const struct etcd_op put = {.kind = ETCD_OP_PUT,
                                .key = key,
                                .value = wire_buffer_bytes(&registry->record),
                                .lease = registry->lease_id};
    const struct etcd_txn txn = {.compares = &compare,
                                 .compares_len = 1,
                                 .then_ops = &put,
                                 .then_len = 1,
                                 .else_ops = &read,
                                 .else_len = 1};
    registry->putting_version = registry->version;
    enum status status = etcd_txn(registry->etcd, &txn, on_put, registry);
    pthread_mutex_unlock(&registry->lock);
    if (status == STATUS_OK) {
        registry->is_putting = true;
    } else {
        registration_failed(registry, "too many calls to etcd are alive");
    }
}

static void on_check(void *ctx, const struct etcd_reply *reply) {
    struct registry *registry = ctx;
    registry->is_checking = false;
    if (reply->status != STATUS_OK || registry->lease_id == 0 || registry->is_putting) {
        return; /* the lease notices etcd's silence; this only notices a lost key */
    }
    bool is_ours = reply->kvs_len == 1 && reply->kvs[0].lease == registry->lease_id &&
                   reply->kvs[0].mod_revision == registry->known_revision;
    if (!is_ours) {
        LOG_WARN("own record is gone from etcd or was changed: putting it again",
                 LOG_TEXT("key", registry->key));
        registry->put_version = 0;
        registry->known_revision = reply->kvs_len == 1 ? reply->kvs[0].mod_revision : 0;
        registry_step(registry);
    }
}

static void on_pulse(void *ctx, const struct etcd_reply *reply) {
    struct registry *registry = ctx;
    registry->is_pulsing = false;
    if (reply->status != STATUS_OK) {
        return;
    }
    struct instant now = clock_now();
    pthread_mutex_lock(&registry->lock);
    enum registry_state state = registry->state;
    pthread_mutex_unlock(&registry->lock);
    if ((state == REGISTRY_WAITING || state == REGISTRY_LOST) &&
        instant_reached(now, instant_add(registry->complained_at, span_ms(COMPLAINT_MS)))) {
        registry->complained_at = now;
        char text[640];
        registry_describe(registry, text, sizeof(text));
        LOG_WARN("not registered yet", LOG_TEXT("because", text));
    }
    bool is_due =
        instant_reached(now, instant_add(registry->checked_at, span_ms(registry->lease_s * 1000)));
    if (state == REGISTRY_REGISTERED && is_due && !registry->is_checking) {
        registry->checked_at = now;
        const struct etcd_range range = {.key = etcd_text(registry->key)};
        registry->is_checking = etcd_range(registry->etcd, &range, on_check, registry) == STATUS_OK;
    }
    registry_step(registry); /* also picks up a retry whose timer found no room */
}

static void pulse_start(struct registry *registry) {
    if (!registry->is_pulsing &&
        etcd_wait(registry->etcd, span_ms(PULSE_MS), on_pulse, registry) == STATUS_OK) {
        registry->is_pulsing = true;
    }
}

static void record_step(struct registry *registry, enum what what, struct incarnation incarnation,
                        uint64_t version) {
    if (registry->key[0] == 0) {
        (void)snprintf(registry->key, sizeof(registry->key), "%s%s/%016llx", registry->prefix,
                       what == WHAT_ROUTER ? "routers" : "workers",
                       (unsigned long long)incarnation.v);
        registry->complained_at = clock_now();
        state_set(registry, REGISTRY_WAITING, "it has not answered yet");
    }
    pulse_start(registry);
    if (registry->is_retry_waiting || registry->is_putting || registry->is_lease_closing) {
        return;
    }
    if (registry->lease == NULL) {
        const struct etcd_lease_config config = {.ttl_s = registry->lease_s,
                                                 .keepalive = registry->keepalive};
        if (etcd_lease_open(registry->etcd, &config, &lease_handlers, registry, &registry->lease) !=
            STATUS_OK) {
            registry->lease = NULL;
        }
    } else if (registry->lease_id != 0 && registry->put_version != version) {
        record_put(registry);
    }
}

/* ---- the end --------------------------------------------------------------------------------- */

static void deregister_tell(struct registry *registry) {
    pthread_mutex_lock(&registry->lock);
    void (*done)(void *, enum status) = registry->deregister_done;
    void *ctx = registry->deregister_ctx;
    registry->deregister_done = NULL;
    pthread_mutex_unlock(&registry->lock);
    if (done != NULL) {
        bool is_gone = !registry->was_published || registry->is_revoked;
        done(ctx, is_gone ? STATUS_OK : STATUS_TIMEOUT);
    }
}

static void deregister_step(struct registry *registry, struct instant give_up_at) {
    if (registry->is_deregistered) {
        return;
    }
    if (registry->lease != NULL) {
        struct span within = instant_since(give_up_at, clock_now());
        if (within.ns < span_ms(REVOKE_MIN_MS).ns) {
            within = span_ms(REVOKE_MIN_MS);
        }
        lease_drop(registry, true, within);
        return; /* on_lease_closed comes back here */
    }
    registry->is_deregistered = true;
    if (registry->key[0] != 0) {
        state_set(registry, REGISTRY_GONE, NULL);
    }
    deregister_tell(registry);
}

static void on_etcd_closed(void *ctx) {
    struct registry *registry = ctx;
    pthread_mutex_lock(&registry->lock);
    registry->is_ended = true;
    pthread_cond_broadcast(&registry->ended);
    pthread_mutex_unlock(&registry->lock);
}

static void registry_step(struct registry *registry) {
    pthread_mutex_lock(&registry->lock);
    enum what what = registry->what;
    struct incarnation incarnation = registry->incarnation;
    uint64_t version = registry->version;
    bool is_stop_asked = registry->is_stop_asked;
    bool is_deregister_asked = registry->is_deregister_asked;
    bool is_watch_asked = registry->is_watch_asked;
    struct instant give_up_at = registry->give_up_at;
    pthread_mutex_unlock(&registry->lock);
    if (is_watch_asked && !is_stop_asked) {
        fleet_start(registry->fleet, registry->etcd);
    }
    if (is_deregister_asked || is_stop_asked) {
        deregister_step(registry, give_up_at);
    } else if (what != WHAT_NOTHING) {
        record_step(registry, what, incarnation, version);
    }
    if (is_stop_asked && registry->is_deregistered && !registry->is_closing_etcd) {
        registry->is_closing_etcd = true;
        etcd_close(registry->etcd, on_etcd_closed, registry); /* ends the fleet's watch as well */
    }
}

/* ---- from any thread ------------------------------------------------------------------------- */

static bool cluster_is_valid(const char *cluster) {
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    size_t len = cluster == NULL ? 0 : strlen(cluster);
    return len >= 1 && len <= 63 && strspn(cluster, allowed) == len;
}

enum status registry_create(struct rpc *rpc, const struct registry_config *config,
                            struct registry **out, struct registry_error *error_out) {
    CHECK(rpc != NULL && config != NULL && out != NULL);
    if (!cluster_is_valid(config->cluster)) {
        error_set(error_out,
                  "cluster name '%.80s' is not 1 to 63 of the characters A-Z a-z 0-9 . _ -",
                  config->cluster == NULL ? "" : config->cluster);
        return STATUS_INVALID;
    }
    struct registry *registry = calloc(1, sizeof(*registry));
    CHECK(registry != NULL);
    registry->rpc = rpc;
    registry->lease_s = config->lease.ns > 0 ? (config->lease.ns + 999999999) / 1000000000 : 10;
    registry->keepalive = config->keepalive.ns > 0 ? config->keepalive : span_ms(3000);
    text_copy(registry->endpoints, sizeof(registry->endpoints),
              config->endpoints == NULL ? "" : config->endpoints);
    (void)snprintf(registry->prefix, sizeof(registry->prefix), "/baton/%s/", config->cluster);
    const struct etcd_config etcd_config = {.endpoints = config->endpoints,
                                            .keepalive_ms = config->etcd_keepalive_ms};
    struct etcd_error error = {.text = ""};
    enum status status = etcd_create(rpc, &etcd_config, &registry->etcd, &error);
    if (status != STATUS_OK) {
        error_set(error_out, "%s", error.text);
        free(registry);
        return status;
    }
    pthread_condattr_t attributes;
    CHECK(pthread_condattr_init(&attributes) == 0);
    CHECK(pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_cond_init(&registry->ended, &attributes) == 0);
    (void)pthread_condattr_destroy(&attributes); /* cannot fail */
    CHECK(pthread_mutex_init(&registry->lock, NULL) == 0);
    registry->state_since = clock_now();
    registry->fleet = fleet_create(registry->prefix);
    *out = registry;
    return STATUS_OK;
}

/* Takes the buffer. */
static enum status registry_publish(struct registry *registry, enum what what,
                                    struct incarnation incarnation, struct wire_buffer *record) {
    pthread_mutex_lock(&registry->lock);
    enum status status = STATUS_OK;
    if (registry->is_deregister_asked || registry->is_stop_asked) {
        status = STATUS_CANCELLED;
    } else if (registry->what != WHAT_NOTHING &&
               (registry->what != what || registry->incarnation.v != incarnation.v)) {
        status = STATUS_INVALID;
    } else {
        struct wire_buffer old = registry->record;
        registry->record = *record;
        *record = old;
        registry->what = what;
        registry->incarnation = incarnation;
        registry->version++;
    }
    pthread_mutex_unlock(&registry->lock);
    wire_buffer_fini(record);
    if (status == STATUS_OK) {
        registry_kick(registry);
    }
    return status;
}

enum status registry_register_worker(struct registry *registry,
                                     const struct worker_record *record) {
    struct wire_buffer buffer = {.data = NULL};
    enum status status = worker_record_encode(record, &buffer);
    if (status != STATUS_OK) {
        wire_buffer_fini(&buffer);
        return status;
    }
    return registry_publish(registry, WHAT_WORKER, record->info.incarnation, &buffer);
}

enum status registry_register_router(struct registry *registry,
                                     const struct router_record *record) {
    struct wire_buffer buffer = {.data = NULL};
    enum status status = router_record_encode(record, &buffer);
    if (status != STATUS_OK) {
        wire_buffer_fini(&buffer);
        return status;
    }
    return registry_publish(registry, WHAT_ROUTER, record->incarnation, &buffer);
}

enum status registry_deregister(struct registry *registry, struct span within,
                                void (*done)(void *ctx, enum status status), void *ctx) {
    pthread_mutex_lock(&registry->lock);
    bool is_first = !registry->is_deregister_asked && !registry->is_stop_asked;
    if (is_first) {
        registry->is_deregister_asked = true;
        registry->give_up_at = instant_add(clock_now(), within);
        registry->deregister_done = done;
        registry->deregister_ctx = ctx;
    }
    pthread_mutex_unlock(&registry->lock);
    if (is_first) {
        registry_kick(registry);
    }
    return is_first ? STATUS_OK : STATUS_EXISTS;
}

enum registry_state registry_state(struct registry *registry) {
    pthread_mutex_lock(&registry->lock);
    enum registry_state state = registry->state;
    pthread_mutex_unlock(&registry->lock);
    return state;
}

void registry_describe(struct registry *registry, char *text, size_t cap) {
    if (cap == 0) {
        return;
    }
    text[0] = 0;
    pthread_mutex_lock(&registry->lock);
    long long age_s = span_to_ms(instant_since(clock_now(), registry->state_since)) / 1000;
    switch (registry->state) {
    case REGISTRY_IDLE: (void)snprintf(text, cap, "not registered yet"); break;
    case REGISTRY_WAITING:
        if (age_s < 1) { /* every start passes here */
            (void)snprintf(text, cap, "registering with etcd at %s", registry->endpoints);
        } else {
            (void)snprintf(text, cap, "waiting for etcd at %s (%lld s): %s", registry->endpoints,
                           age_s, registry->problem);
        }
        break;
    case REGISTRY_REGISTERED:
        (void)snprintf(text, cap, "registered as %s%s/%016llx", registry->prefix,
                       registry->what == WHAT_ROUTER ? "routers" : "workers",
                       (unsigned long long)registry->incarnation.v);
        break;
    case REGISTRY_LOST:
        (void)snprintf(text, cap, "registration lost %lld s ago, being put again at %s: %s", age_s,
                       registry->endpoints, registry->problem);
        break;
    case REGISTRY_GONE: (void)snprintf(text, cap, "deregistered"); break;
    }
    pthread_mutex_unlock(&registry->lock);
}

enum status registry_watch(struct registry *registry,
                           const struct registry_fleet_handlers *handlers, void *ctx) {
    CHECK(handlers->on_seen != NULL && handlers->on_lost != NULL);
    pthread_mutex_lock(&registry->lock);
    enum status status = STATUS_OK;
    if (registry->is_stop_asked) {
        status = STATUS_CANCELLED;
    } else if (registry->is_watch_asked) {
        status = STATUS_EXISTS;
    } else {
        registry->is_watch_asked = true;
        fleet_set_handlers(registry->fleet, handlers, ctx);
    }
    pthread_mutex_unlock(&registry->lock);
    if (status == STATUS_OK) {
        registry_kick(registry);
    }
    return status;
}

void registry_counters(struct registry *registry, struct registry_counters *out) {
    *out = (struct registry_counters){.registrations = 0};
    fleet_counters(registry->fleet, out);
    pthread_mutex_lock(&registry->lock);
    out->registrations = registry->registrations;
    out->leases_lost = registry->leases_lost;
    pthread_mutex_unlock(&registry->lock);
}

enum status registry_shutdown(struct registry *registry, struct span within) {
    CHECK(!rpc_on_thread(registry->rpc));
    struct instant until = instant_add(clock_now(), within);
    pthread_mutex_lock(&registry->lock);
    bool is_first = !registry->is_stop_asked;
    if (is_first) {
        registry->is_stop_asked = true;
        if (!registry->is_deregister_asked) {
            /* A quarter is left for what comes after the revoke. */
            registry->give_up_at = instant_add(clock_now(), (struct span){within.ns / 4 * 3});
        }
    }
    pthread_mutex_unlock(&registry->lock);
    if (is_first) {
        registry_kick(registry);
    }
    const struct timespec at = clock_to_timespec(until);
    pthread_mutex_lock(&registry->lock);
    while (!registry->is_ended &&
           pthread_cond_timedwait(&registry->ended, &registry->lock, &at) == 0) {
    }
    bool is_ended = registry->is_ended;
    pthread_mutex_unlock(&registry->lock);
    if (!is_ended) {
        LOG_ERROR("registry did not end in time", LOG_SPAN("within", within));
        return STATUS_TIMEOUT;
    }
    return STATUS_OK;
}

void registry_destroy(struct registry *registry) {
    if (registry == NULL) {
        return;
    }
    pthread_mutex_lock(&registry->lock);
    bool is_ended = registry->is_ended;
    pthread_mutex_unlock(&registry->lock);
    CHECK(is_ended);
    etcd_destroy(registry->etcd);
    fleet_destroy(registry->fleet);
    wire_buffer_fini(&registry->record);
    (void)pthread_cond_destroy(&registry->ended); /* nobody waits any more */
    (void)pthread_mutex_destroy(&registry->lock);
    free(registry);
}
