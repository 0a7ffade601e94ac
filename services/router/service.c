/* From a shell to a serving router, and back. */
#include "services/router/router.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "registry/registry.h"
#include "rpc/health.h"
#include "rpc/reflection.h"
#include "runtime/log.h"
#include "runtime/random.h"
#include "wire/descriptors.h"

/* ---- the core ------------------------------------------------------------------------------- */

static void step(void *core, const struct event *event, struct instant now, struct effects *out) {
    router_core_step(core, event, now, out);
}

static struct instant deadline(const void *core) {
    return router_core_deadline(core);
}

static bool view(const void *core, uint32_t *cursor, struct entry_view *view_out) {
    return router_view(core, cursor, view_out);
}

static void verify(const void *core) {
    router_verify(core);
}

/* A token buffer that no request holds. */
static void balance(void *ctx, struct shell_balance *balance) {
    const struct router *router = ctx;
    balance->words = (int64_t)router->core->words.taken - (int64_t)router->core->words_held;
}

static void leak(void *ctx) {
    struct router *router = ctx;
    router->core->words.drops_next_free = true;
}

static void effect(void *ctx, const struct effect *effect) {
    if (canary_effect(ctx, effect)) {
        return;
    }
    switch (effect->kind) {
    case EFFECT_TOKENIZE:
    case EFFECT_DELIVER:
    case EFFECT_CHOICE:
    case EFFECT_ANSWER: client_effect(ctx, effect); break;
    case EFFECT_STREAM_OPEN:
    case EFFECT_STREAM_SEND:
    case EFFECT_STREAM_CLOSE:
    case EFFECT_STEP:
    case EFFECT_STEP_ABANDON:
    case EFFECT_LINK_ARM:
    case EFFECT_LINK_DISARM:
    case EFFECT_LINK_CONNECT:
    case EFFECT_LINK_SEND:
    case EFFECT_LINK_CLOSE:
    case EFFECT_NOTE:
    case EFFECT_EXIT: CHECK(!"an effect that no router core has"); break;
    }
}

static void core_create(struct router *router) {
    const struct router_settings *settings = router->settings;
    struct router_config config = {.requests_max = settings->requests_max,
                                   .workers_max = settings->workers_max,
                                   .words_max = settings->words_max,
                                   .disaggregate_above = settings->disaggregate_above,
                                   .blocks_max = settings->blocks_max};
    shell_node_config(router->shell, &config.node);
    config.node.sessions_max = 2 * settings->workers_max; /* some have ended, some are new */
    random_bytes(&config.secret, sizeof config.secret);
    size_t bytes = (router_bytes(&config) + 63) / 64 * 64;
    router->core_memory = aligned_alloc(64, bytes);
    router->core = calloc(1, sizeof *router->core);
    CHECK(router->core_memory != NULL && router->core != NULL);
    router_init(router->core, &config, router->core_memory);
}

/* ---- discovery, rpc thread ------------------------------------------------------------------ */

static void on_seen(void *ctx, const struct worker_record *record) {
    struct router *router = ctx;
    models_seen(router, &record->info);
    struct shell_mail *mail = shell_mail_take(router->shell, EVENT_WORKER_SEEN);
    struct worker_info *info = shell_mail_payload(mail, sizeof *info);
    *info = record->info;
    mail->event.u.worker_seen.info = info;
    shell_post(router->shell, mail);
}

static void on_lost(void *ctx, struct incarnation incarnation) {
    struct router *router = ctx;
    models_lost(router, incarnation);
    struct shell_mail *mail = shell_mail_take(router->shell, EVENT_WORKER_LOST);
    mail->event.u.worker_lost.incarnation = incarnation;
    shell_post(router->shell, mail);
}

static const struct registry_fleet_handlers fleet_handlers = {.on_seen = on_seen,
                                                              .on_lost = on_lost};

/* ---- the public server ---------------------------------------------------------------------- */

static enum status server_create(struct router *router) {
    const struct config_address *listen = &router->settings->grpc;
    char text[CONFIG_HOST_CAP + 16];
    bool is_v6 = strchr(listen->host, ':') != NULL;
    (void)snprintf(text, sizeof text, is_v6 ? "[%s]:%u" : "%s:%u", listen->host,
                   (unsigned)listen->port); /* fits */
    struct rpc_server_options options = {.lookahead_bytes = ROUTER_GRPC_LOOKAHEAD,
                                         .queue_bytes_max = ROUTER_REPLY_MAX};
    struct rpc_error error = {.text = ""};
    enum status status =
        rpc_server_create(router->rpc, text, NULL, &options, &router->server, &error);
    if (status != STATUS_OK) {
        LOG_ERROR("the public server cannot be made", LOG_TEXT("flag", "--grpc"),
                  LOG_TEXT("value", text), LOG_TEXT("why", error.text));
        return STATUS_INVALID;
    }
    uint32_t stall_ms = (uint32_t)span_to_ms(router->settings->client_stall);
    const struct rpc_method methods[] = {
        {"/baton.v1.Inference/Generate", RPC_KIND_SERVER_STREAM, &generate_handlers, router, 0,
         stall_ms},
        {INFERENCE_ABORT, RPC_KIND_UNARY, &abort_handlers, router, 0, 0},
        {"/baton.v1.Inference/Tokenize", RPC_KIND_UNARY, &tokenize_handlers, router, 0, stall_ms},
        {"/baton.v1.Inference/ListModels", RPC_KIND_UNARY, &list_models_handlers, router, 0, 0}};
    for (uint32_t i = 0; i < sizeof methods / sizeof methods[0]; i++) {
        status = rpc_server_method(router->server, &methods[i]);
        CHECK(status == STATUS_OK);
    }
    status = rpc_health_create(router->rpc, router->server, &router->health);
    CHECK(status == STATUS_OK);
    status = rpc_reflection_create(router->rpc, router->server, &router->reflection);
    CHECK(status == STATUS_OK);
    struct bytes set = wire_inference_descriptors();
    status = rpc_reflection_add(router->reflection, set.data, set.len);
    CHECK(status == STATUS_OK);
    rpc_health_set(router->health, INFERENCE_SERVICE, false);
    return STATUS_OK;
}

static enum status publish(struct router *router) {
    struct router_record record = {.pid = 0};
    shell_router_record(router->shell, &record);
    shell_address(router->shell, rpc_server_port(router->server), record.grpc);
    LOG_INFO("serving", LOG_TEXT("grpc", record.grpc), LOG_TEXT("admin", record.admin));
    return shell_register_router(router->shell, &record);
}

/* ---- life ----------------------------------------------------------------------------------- */

enum status router_start(struct router *router) {
    router->rpc = shell_rpc(router->shell);
    clients_init(&router->clients);
    models_init(router);
    core_create(router);
    report_init(router);
    canary_start(router);
    struct shell_core core = {.core = router->core,
                              .node = &router->core->node,
                              .step = step,
                              .deadline = deadline,
                              .view = view,
                              .state_name = request_state_name,
                              .state_count = REQUEST_GATHERING,
                              .verify = verify,
                              .ctx = router,
                              .effect = effect,
                              .refresh = report_refresh,
                              .tick = canary_tick,
                              .reasons = report_reasons,
                              .progress = canary_progress,
                              .balance = balance,
                              .leak = leak};
    enum status status = text_start(router);
    if (status == STATUS_OK) {
        status = server_create(router);
    }
    if (status == STATUS_OK) {
        status = shell_start(router->shell, &core);
    }
    if (status != STATUS_OK) {
        return status;
    }
    atomic_store(&router->is_started, 1);
    status = shell_listen(router->shell, "--grpc", &router->settings->grpc, router->server);
    if (status == STATUS_OK) {
        shell_health(router->shell, router->health, INFERENCE_SERVICE);
        status = registry_watch(shell_registry(router->shell), &fleet_handlers, router);
    }
    if (status == STATUS_OK) {
        status = peers_start(router);
    }
    if (status == STATUS_OK) {
        status = publish(router);
    }
    return status;
}

enum status router_stop(struct router *router) {
    enum status first = shell_stop(router->shell);
    if (first != STATUS_OK) {
        return STATUS_TIMEOUT;
    }
    enum status status = peers_stop(router);
    if (status == STATUS_OK) {
        status = text_stop(router);
    }
    if (status == STATUS_OK) {
        status = shell_close(router->shell); /* handlers of ours run until it returns */
    }
    if (status != STATUS_OK) {
        return STATUS_TIMEOUT;
    }
    rpc_reflection_destroy(router->reflection);
    rpc_health_destroy(router->health);
    text_fini(router);
    clients_fini(&router->clients);
    models_fini(router);
    free(router->core);
    free(router->core_memory);
    return STATUS_OK;
}
