/* Abort and ListModels: small calls that the control thread answers. */
#include "services/router/router.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "runtime/log.h"

struct small_call {
    struct router *router;
    struct rpc_call_id call;
    struct public_abort_request abort;
};

static struct small_call *small_create(struct router *router, struct rpc_call_id call) {
    struct small_call *small = calloc(1, sizeof *small);
    CHECK(small != NULL);
    small->router = router;
    small->call = call;
    return small;
}

static void small_reply(const struct small_call *small, enum status status,
                        struct wire_buffer *out) {
    if (status == STATUS_OK) {
        rpc_call_send(small->router->rpc, small->call, out->data, out->len);
        rpc_call_finish(small->router->rpc, small->call, RPC_CODE_OK, NULL, NULL, 0);
    } else {
        rpc_call_finish(small->router->rpc, small->call, RPC_CODE_INTERNAL,
                        "the reply cannot be encoded", NULL, 0);
    }
    wire_buffer_fini(out);
}

static void small_leaving(const struct small_call *small) {
    rpc_call_finish(small->router->rpc, small->call, RPC_CODE_UNAVAILABLE, ROUTER_SHUTTING_DOWN,
                    NULL, 0);
}

static void small_refuse(struct router *router, struct rpc_call_id call, enum status status,
                         char *sentence, size_t len) {
    sentence[len] = '\0';
    rpc_call_finish(router->rpc, call, rpc_code_from_status(status), sentence, NULL, 0);
}

static void on_closed(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome) {
    (void)ctx;
    (void)call;
    (void)outcome; /* nothing hangs on the call: a late reply is ignored */
}

/* ---- Abort ---------------------------------------------------------------------------------- */

static void abort_done(struct shell_mail *mail, bool was_stepped) {
    struct small_call *small = mail->after_ctx;
    if (was_stepped) {
        uint64_t aborted = small->router->core->stats.aborted_last;
        struct wire_buffer out = {0};
        enum status status = public_abort_reply_encode((uint32_t)aborted, &out);
        LOG_INFO("abort by label", LOG_TEXT("label", small->abort.label),
                 LOG_BOOL("session", small->abort.is_session), LOG_U64("requests", aborted));
        small_reply(small, status, &out);
    } else {
        small_leaving(small);
    }
    free(small);
}

static void abort_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    struct router *router = ctx;
    struct wire_arena arena = {0};
    struct public_abort_request request;
    char sentence[PUBLIC_ERROR_MAX];
    struct writer error;
    writer_init(&error, sentence, sizeof sentence - 1);
    enum status status = public_abort_request_decode(incoming->payload, &arena, &request, &error);
    wire_arena_fini(&arena);
    if (status != STATUS_OK) {
        small_refuse(router, call, status, sentence, error.len);
        return;
    }
    struct bytes forwarded;
    if (!rpc_headers_get(incoming->headers, FORWARDED_HEADER, &forwarded)) {
        peers_forward(router, incoming->payload);
    }
    struct small_call *small = small_create(router, call);
    small->abort = request;
    struct shell_mail *mail = shell_mail_take(router->shell, EVENT_CLIENT_ABORT);
    mail->event.u.client_abort.label = small->abort.label;
    mail->event.u.client_abort.is_session = request.is_session;
    mail->after = abort_done;
    mail->after_ctx = small;
    shell_post(router->shell, mail);
}

const struct rpc_handlers abort_handlers = {.on_open = abort_open, .on_closed = on_closed};

/* ---- ListModels ----------------------------------------------------------------------------- */

static bool is_ready(const struct router_core *core, const struct worker *worker) {
    return router_worker_is_live(core, worker) && !worker->info.is_draining &&
           !core->node.sessions[worker->session].is_peer_draining;
}

/* By name, so that the order does not depend on who came first. */
static int model_compare(const void *a, const void *b) {
    return strcmp(((const struct public_model *)a)->name, ((const struct public_model *)b)->name);
}

static uint32_t collect_models(const struct router_core *core, struct public_model *models) {
    uint32_t count = 0;
    uint32_t cursor = 0;
    const struct worker *worker = NULL;
    while ((worker = router_worker(core, &cursor)) != NULL) {
        struct public_model *model = NULL;
        for (uint32_t i = 0; i < count && model == NULL; i++) {
            model = strcmp(models[i].name, worker->info.model) == 0 ? &models[i] : NULL;
        }
        if (model == NULL) {
            model = &models[count++];
            text_copy(model->name, LABEL_MAX, worker->info.model);
            model->vocab = worker->info.vocab;
        }
        bool is_decode = worker->info.role == ROLE_DECODE;
        if (is_decode && worker->info.context > model->context_tokens) {
            model->context_tokens = worker->info.context;
        }
        if (is_ready(core, worker)) {
            model->decode_ready += is_decode ? 1 : 0;
            model->prefill_ready += is_decode ? 0 : 1;
        }
    }
    qsort(models, count, sizeof *models, model_compare);
    return count;
}

static void list_done(struct shell_mail *mail, bool was_stepped) {
    struct small_call *small = mail->after_ctx;
    if (was_stepped) {
        const struct router_core *core = small->router->core;
        struct public_model *models = calloc(core->config.workers_max, sizeof *models);
        CHECK(models != NULL);
        uint32_t count = collect_models(core, models);
        struct wire_buffer out = {0};
        enum status status = public_list_models_reply_encode(models, count, &out);
        small_reply(small, status, &out);
        free(models);
    } else {
        small_leaving(small);
    }
    free(small);
}

static void list_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    struct router *router = ctx;
    struct wire_arena arena = {0};
    char sentence[PUBLIC_ERROR_MAX];
    struct writer error;
    writer_init(&error, sentence, sizeof sentence - 1);
    enum status status = public_list_models_request_decode(incoming->payload, &arena, &error);
    wire_arena_fini(&arena);
    if (status != STATUS_OK) {
        small_refuse(router, call, status, sentence, error.len);
        return;
    }
    struct shell_mail *mail = shell_mail_take(router->shell, 0);
    mail->after = list_done;
    mail->after_ctx = small_create(router, call);
    shell_post(router->shell, mail);
}

const struct rpc_handlers list_models_handlers = {.on_open = list_open, .on_closed = on_closed};
