/* The other routers of the cluster: followed in etcd, told of aborts by label.
 *
 * Advice and best effort: a router that is not told learns nothing, and the client's own calls end
 * their requests anyway. A forwarded call says so and is not forwarded again. */
#include "services/router/router.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "etcd/etcd.h"
#include "runtime/clock.h"
#include "runtime/log.h"

#define FORWARD_MS 2000
#define CLOSE_MS   3000
#define KEY_MAX    128u

/* ---- following ------------------------------------------------------------------------------ */

static uint64_t key_incarnation(struct bytes key) {
    char text[17];
    if (key.len < 16) {
        return 0;
    }
    memcpy(text, key.data + key.len - 16, 16);
    text[16] = '\0';
    char *end = NULL;
    uint64_t value = strtoull(text, &end, 16);
    return *end == '\0' ? value : 0;
}

static void peer_remove_locked(struct peers *peers, uint64_t incarnation) {
    for (uint32_t i = 0; i < peers->count; i++) {
        if (peers->items[i].incarnation == incarnation) {
            peers->items[i] = peers->items[--peers->count];
            return;
        }
    }
}

static void on_event(void *ctx, const struct etcd_event *event) {
    struct router *router = ctx;
    struct peers *peers = &router->peers;
    uint64_t incarnation = key_incarnation(event->kv.key);
    if (incarnation == 0 || incarnation == shell_incarnation(router->shell).v) {
        return;
    }
    struct router_record record;
    struct wire_arena arena = {0};
    bool is_there = !event->is_delete &&
                    router_record_decode(event->kv.value, &arena, &record) == STATUS_OK &&
                    record.grpc[0] != '\0';
    wire_arena_fini(&arena);
    pthread_mutex_lock(&peers->lock);
    peer_remove_locked(peers, incarnation);
    if (is_there && peers->count < PEERS_MAX) {
        peers->items[peers->count].incarnation = incarnation;
        text_copy(peers->items[peers->count].address, ADDRESS_MAX, record.grpc);
        peers->count++;
    }
    atomic_store(&peers->known, peers->count);
    pthread_mutex_unlock(&peers->lock);
}

static void on_synced(void *ctx, int64_t revision) {
    (void)ctx;
    (void)revision;
}

static void on_watch_closed(void *ctx) {
    (void)ctx;
}

static const struct etcd_watch_handlers watch_handlers = {
    .on_event = on_event, .on_synced = on_synced, .on_closed = on_watch_closed};

static void on_etcd_closed(void *ctx) {
    struct peers *peers = ctx;
    pthread_mutex_lock(&peers->lock);
    peers->is_closed = true;
    pthread_cond_signal(&peers->changed);
    pthread_mutex_unlock(&peers->lock);
}

enum status peers_start(struct router *router) {
    struct peers *peers = &router->peers;
    pthread_condattr_t attributes;
    CHECK(pthread_condattr_init(&attributes) == 0);
    CHECK(pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_cond_init(&peers->changed, &attributes) == 0);
    pthread_condattr_destroy(&attributes);
    CHECK(pthread_mutex_init(&peers->lock, NULL) == 0);
    struct etcd_error error = {.text = ""};
    enum status status =
        etcd_create(router->rpc, &(struct etcd_config){.endpoints = router->settings->shell.etcd},
                    &peers->etcd, &error);
    if (status != STATUS_OK) {
        LOG_ERROR("the other routers cannot be followed", LOG_TEXT("why", error.text));
        peers->etcd = NULL;
        return STATUS_INTERNAL;
    }
    char key[KEY_MAX];
    struct writer writer;
    writer_init(&writer, key, sizeof key);
    writer_printf(&writer, "/baton/%s/routers/", router->settings->shell.cluster);
    CHECK(!writer.is_full);
    struct etcd_watch *watch = NULL; /* ends with its client */
    struct etcd_watch_config config = {.key = {(const uint8_t *)key, writer.len},
                                       .is_prefix = true};
    status = etcd_watch_open(peers->etcd, &config, &watch_handlers, router, &watch);
    if (status != STATUS_OK) {
        LOG_ERROR("the other routers cannot be followed", LOG_STATUS("status", status));
    }
    return status;
}

enum status peers_stop(struct router *router) {
    struct peers *peers = &router->peers;
    if (peers->etcd == NULL) {
        return STATUS_OK;
    }
    etcd_close(peers->etcd, on_etcd_closed, peers);
    struct timespec until = clock_to_timespec(instant_add(clock_now(), span_ms(CLOSE_MS)));
    int error = 0;
    pthread_mutex_lock(&peers->lock);
    while (!peers->is_closed && error != ETIMEDOUT) {
        error = pthread_cond_timedwait(&peers->changed, &peers->lock, &until);
    }
    bool is_closed = peers->is_closed;
    pthread_mutex_unlock(&peers->lock);
    if (!is_closed) {
        LOG_ERROR("following the other routers did not end in time");
        return STATUS_TIMEOUT;
    }
    etcd_destroy(peers->etcd);
    peers->etcd = NULL;
    return STATUS_OK;
}

/* ---- telling -------------------------------------------------------------------------------- */

struct forward {
    struct rpc_channel *channel;
    char address[ADDRESS_MAX];
};

static void forward_free(struct forward *forward) {
    rpc_channel_close(forward->channel);
    free(forward);
}

static void forward_closed(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome) {
    struct forward *forward = ctx;
    (void)call;
    if (outcome->code != RPC_CODE_OK) {
        LOG_WARN("another router was not told of an abort", LOG_TEXT("address", forward->address),
                 LOG_TEXT("code", rpc_code_name(outcome->code)), LOG_TEXT("why", outcome->message));
    }
    forward_free(forward);
}

static const struct rpc_handlers forward_handlers = {.on_closed = forward_closed};

static void forward_one(struct router *router, const char *address, struct bytes payload) {
    struct forward *forward = calloc(1, sizeof *forward);
    CHECK(forward != NULL);
    text_copy(forward->address, sizeof forward->address, address);
    struct rpc_error error = {.text = ""};
    enum status status =
        rpc_channel_open(router->rpc, address, NULL, NULL, &forward->channel, &error);
    if (status == STATUS_OK) {
        struct rpc_pair header = {FORWARDED_HEADER, "1"};
        struct rpc_call_config config = {.method = INFERENCE_ABORT,
                                         .kind = RPC_KIND_UNARY,
                                         .deadline = instant_add(clock_now(), span_ms(FORWARD_MS)),
                                         .headers = &header,
                                         .headers_len = 1,
                                         .payload = payload,
                                         .handlers = &forward_handlers,
                                         .ctx = forward};
        struct rpc_call_id call;
        status = rpc_call_start(forward->channel, &config, &call);
    }
    if (status != STATUS_OK) {
        LOG_WARN("another router was not told of an abort", LOG_TEXT("address", address),
                 LOG_STATUS("status", status), LOG_TEXT("why", error.text));
        forward_free(forward);
    }
}

void peers_forward(struct router *router, struct bytes payload) {
    struct peers *peers = &router->peers;
    char addresses[PEERS_MAX][ADDRESS_MAX];
    pthread_mutex_lock(&peers->lock);
    uint32_t count = peers->count;
    for (uint32_t i = 0; i < count; i++) {
        text_copy(addresses[i], ADDRESS_MAX, peers->items[i].address);
    }
    pthread_mutex_unlock(&peers->lock);
    for (uint32_t i = 0; i < count; i++) {
        forward_one(router, addresses[i], payload);
    }
}
