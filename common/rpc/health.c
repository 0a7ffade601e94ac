#include "rpc/health.h"

#include "base/bytes.h"
#include "base/check.h"
#include "rpc/proto/health.pb-c.h"
#include "rpc/rpc.h"
#include "runtime/mail.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {
    NAMES_MAX = 32,
    NAME_CAP = 128,
    WATCHERS_MAX = 256,
    REPLY_CAP = 16 /* one tag, one small enum */
};

struct watcher {
    struct rpc_call_id call; /* 0 = free */
    char service[NAME_CAP];
    int last; /* what it was told; -1 = nothing yet */
};

struct rpc_health {
    struct rpc *rpc;
    struct mail mail;                      /* "something was set" */
    struct watcher watchers[WATCHERS_MAX]; /* rpc thread */

    pthread_mutex_t lock; /* guards what is below; a leaf */
    bool is_mailed;
    uint32_t names_len;
    struct {
        char service[NAME_CAP];
        bool is_serving;
    } names[NAMES_MAX];
};

/* SERVICE_UNKNOWN if the name was never set. */
static Grpc__Health__V1__HealthCheckResponse__ServingStatus state_of(struct rpc_health *health,
                                                                     const char *service) {
    Grpc__Health__V1__HealthCheckResponse__ServingStatus state =
        GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN;
    pthread_mutex_lock(&health->lock);
    for (uint32_t i = 0; i < health->names_len; i++) {
        if (strcmp(health->names[i].service, service) == 0) {
            state = health->names[i].is_serving
                        ? GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
                        : GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING;
        }
    }
    pthread_mutex_unlock(&health->lock);
    return state;
}

static void reply(struct rpc_health *health, struct rpc_call_id call,
                  Grpc__Health__V1__HealthCheckResponse__ServingStatus state) {
    Grpc__Health__V1__HealthCheckResponse message = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    message.status = state;
    uint8_t bytes[REPLY_CAP];
    CHECK_OP(grpc__health__v1__health_check_response__get_packed_size(&message), <=, sizeof bytes);
    rpc_call_send(health->rpc, call, bytes,
                  grpc__health__v1__health_check_response__pack(&message, bytes));
}

/* False if the request does not parse; the call is then finished. service: NAME_CAP bytes. */
static bool request_parse(struct rpc_health *health, struct rpc_call_id call, struct bytes payload,
                          char *service) {
    Grpc__Health__V1__HealthCheckRequest *request =
        grpc__health__v1__health_check_request__unpack(NULL, payload.len, payload.data);
    if (request == NULL) {
        rpc_call_finish(health->rpc, call, RPC_CODE_INVALID_ARGUMENT,
                        "the request is not a grpc.health.v1.HealthCheckRequest", NULL, 0);
        return false;
    }
    bool is_short = strlen(request->service) < NAME_CAP;
    text_copy(service, NAME_CAP, request->service);
    grpc__health__v1__health_check_request__free_unpacked(request, NULL);
    if (!is_short) {
        rpc_call_finish(health->rpc, call, RPC_CODE_INVALID_ARGUMENT,
                        "the service name is longer than 127 bytes", NULL, 0);
    }
    return is_short;
}

static void check_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    struct rpc_health *health = ctx;
    char service[NAME_CAP];
    if (!request_parse(health, call, incoming->payload, service)) {
        return;
    }
    Grpc__Health__V1__HealthCheckResponse__ServingStatus state = state_of(health, service);
    if (state == GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN) {
        rpc_call_finish(health->rpc, call, RPC_CODE_NOT_FOUND,
                        "no service of this name reports its health here", NULL, 0);
        return;
    }
    reply(health, call, state);
    rpc_call_finish(health->rpc, call, RPC_CODE_OK, NULL, NULL, 0);
}

static void check_closed(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome) {
    (void)ctx, (void)call, (void)outcome; /* nothing is kept for a Check */
}

static void watch_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    struct rpc_health *health = ctx;
    struct watcher *watcher = NULL;
    for (uint32_t i = 0; i < WATCHERS_MAX && watcher == NULL; i++) {
        watcher = health->watchers[i].call.v == 0 ? &health->watchers[i] : NULL;
    }
    char service[NAME_CAP];
    if (!request_parse(health, call, incoming->payload, service)) {
        return;
    }
    if (watcher == NULL) {
        rpc_call_finish(health->rpc, call, RPC_CODE_RESOURCE_EXHAUSTED,
                        "256 watchers are connected already; use Check, or try again later", NULL,
                        0);
        return;
    }
    watcher->call = call;
    memcpy(watcher->service, service, NAME_CAP);
    watcher->last = (int)state_of(health, service);
    reply(health, call, (Grpc__Health__V1__HealthCheckResponse__ServingStatus)watcher->last);
}

static void watch_closed(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome) {
    (void)outcome;
    struct rpc_health *health = ctx;
    for (uint32_t i = 0; i < WATCHERS_MAX; i++) {
        if (health->watchers[i].call.v == call.v) {
            health->watchers[i].call.v = 0;
        }
    }
}

static void changed_run(struct mail *mail, void *ctx) {
    (void)ctx;
    struct rpc_health *health =
        (struct rpc_health *)(void *)((char *)mail - offsetof(struct rpc_health, mail));
    pthread_mutex_lock(&health->lock);
    health->is_mailed = false;
    pthread_mutex_unlock(&health->lock);
    for (uint32_t i = 0; i < WATCHERS_MAX; i++) {
        struct watcher *watcher = &health->watchers[i];
        if (watcher->call.v == 0) {
            continue;
        }
        int now = (int)state_of(health, watcher->service);
        if (now != watcher->last) {
            watcher->last = now;
            reply(health, watcher->call, (Grpc__Health__V1__HealthCheckResponse__ServingStatus)now);
        }
    }
}

static const struct rpc_handlers check_handlers = {.on_open = check_open,
                                                   .on_closed = check_closed};
static const struct rpc_handlers watch_handlers = {.on_open = watch_open,
                                                   .on_closed = watch_closed};

enum status rpc_health_create(struct rpc *rpc, struct rpc_server *server, struct rpc_health **out) {
    struct rpc_health *health = calloc(1, sizeof *health);
    CHECK(health != NULL);
    health->rpc = rpc;
    health->mail.run = changed_run;
    health->names_len = 1; /* "", not serving */
    CHECK(pthread_mutex_init(&health->lock, NULL) == 0);
    struct rpc_method check = {.path = "/grpc.health.v1.Health/Check",
                               .kind = RPC_KIND_UNARY,
                               .handlers = &check_handlers,
                               .ctx = health};
    struct rpc_method watch = {.path = "/grpc.health.v1.Health/Watch",
                               .kind = RPC_KIND_SERVER_STREAM,
                               .handlers = &watch_handlers,
                               .ctx = health};
    enum status status = rpc_server_method(server, &check);
    if (status == STATUS_OK) {
        status = rpc_server_method(server, &watch);
    }
    if (status != STATUS_OK) {
        rpc_health_destroy(health);
        return status;
    }
    *out = health;
    return STATUS_OK;
}

void rpc_health_set(struct rpc_health *health, const char *service, bool is_serving) {
    CHECK_OP(strlen(service), <, NAME_CAP);
    pthread_mutex_lock(&health->lock);
    uint32_t i = 0;
    while (i < health->names_len && strcmp(health->names[i].service, service) != 0) {
        i++;
    }
    if (i == health->names_len) {
        CHECK_OP(i, <, NAMES_MAX);
        text_copy(health->names[i].service, NAME_CAP, service);
        health->names_len++;
    }
    health->names[i].is_serving = is_serving;
    bool is_mailed = health->is_mailed;
    health->is_mailed = true;
    pthread_mutex_unlock(&health->lock);
    if (!is_mailed) {
        (void)!rpc_post(health->rpc, &health->mail); /* refused: shut down, nobody watches */
    }
}

void rpc_health_destroy(struct rpc_health *health) {
    if (health == NULL) {
        return;
    }
    (void)pthread_mutex_destroy(&health->lock); /* nobody holds it */
    free(health);
}
