/* What a router shows beside what every program shows. */
#include "services/router/router.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "runtime/buffer.h"
#include "runtime/clock.h"
#include "runtime/metrics.h"

#define QUERY_MS         500
#define WORKERS_TEXT_MAX (16u * 1024u * 1024u)

static struct metric *add(struct router *router, enum metric_kind kind, const char *name,
                          const char *help, const char *label, const char *const *values,
                          uint32_t count) {
    return metrics_add(
        shell_metrics(router->shell),
        &(struct metric_config){
            .kind = kind, .name = name, .help = help, .labels = {{label, values, count}}});
}

void report_init(struct router *router) {
    struct report *report = &router->report;
    const char *causes[CAUSE_COUNT];
    for (uint32_t i = 0; i < CAUSE_COUNT; i++) {
        causes[i] = cause_name((enum cause)i);
    }
    report->tokens = add(router, METRIC_COUNTER, "baton_tokens_total",
                         "Tokens of requests, as the router saw them.", "kind",
                         (const char *const[]){"prompt", "cached", "generated"}, 3);
    report->retries =
        metrics_add(shell_metrics(router->shell),
                    &(struct metric_config){.kind = METRIC_COUNTER,
                                            .name = "baton_retries_total",
                                            .help = "Attempts that were replaced by another one.",
                                            .labels = {{"cause", causes, CAUSE_COUNT}},
                                            .hides_zero = true});
    report->resumes = add(router, METRIC_COUNTER, "baton_resumes_total",
                          "Streams that had tokens when their worker was lost.", "outcome",
                          (const char *const[]){"ok", "failed", "other_numerics"}, 3);
    report->placements = add(router, METRIC_COUNTER, "baton_placements_total",
                             "Attempts that a decode worker admitted: it prefills alone, or with a "
                             "prefill worker.",
                             "legs", (const char *const[]){"one", "two"}, 2);
    report->mixed_pairs = add(router, METRIC_COUNTER, "baton_pairs_other_numerics_total",
                              "Attempts whose prefill worker computes otherwise than its decode "
                              "worker (another processor or device): tokens may differ from those "
                              "of other pairs.",
                              NULL, NULL, 0);
    report->refusals = add(router, METRIC_COUNTER, "baton_worker_busy_total",
                           "Times a worker had no room for an attempt.", "peer_role",
                           (const char *const[]){"decode", "prefill"}, 2);
    report->workers = metrics_add(
        shell_metrics(router->shell),
        &(struct metric_config){
            .kind = METRIC_GAUGE,
            .name = "baton_workers",
            .help = "Workers this router knows.",
            .labels = {
                {"peer_role", (const char *const[]){"decode", "prefill"}, 2},
                {"state", (const char *const[]){"known", "listed", "live", "draining"}, 4}}});
    report->clients = add(router, METRIC_GAUGE, "baton_client_calls",
                          "Generate and Tokenize calls.", NULL, NULL, 0);
    report->tokenizers =
        add(router, METRIC_GAUGE, "baton_tokenizers", "Tokenizers loaded.", NULL, NULL, 0);
    report->fetches = add(router, METRIC_COUNTER, "baton_tokenizer_fetches_total",
                          "Tokenizers fetched from workers.", "outcome",
                          (const char *const[]){"ok", "failed"}, 2);
    report->blocks = add(router, METRIC_GAUGE, "baton_prefix_blocks_known",
                         "Cached pages of workers that this router knows of.", "peer_role",
                         (const char *const[]){"decode", "prefill"}, 2);
    report->blocks_forgotten =
        add(router, METRIC_COUNTER, "baton_prefix_blocks_forgotten_total",
            "Cached pages that were forgotten for others (--prefix-blocks).", NULL, NULL, 0);
    report->block_messages =
        add(router, METRIC_COUNTER, "baton_prefix_messages_total",
            "Messages of workers about their prefix indexes: changes, and beginnings of a whole "
            "one.",
            "what", (const char *const[]){"all", "whole"}, 2);
    struct router_stats *stats = &router->core->stats;
    shell_histogram(router->shell, "baton_queue_seconds",
                    "From accept until a decode worker admitted the request.", &stats->queue);
    shell_histogram(router->shell, "baton_time_to_first_token_seconds",
                    "From accept until the first token.", &stats->ttft);
    shell_histogram(router->shell, "baton_inter_token_latency_seconds",
                    "Between two tokens of one request.", &stats->itl);
}

static bool worker_drains(const struct router_core *core, const struct worker *worker) {
    return worker->info.is_draining || (router_worker_is_live(core, worker) &&
                                        core->node.sessions[worker->session].is_peer_draining);
}

static void refresh_workers(struct router *router) {
    const struct router_core *core = router->core;
    uint32_t counts[2][4] = {{0}};
    uint32_t blocks[2] = {0, 0};
    uint32_t cursor = 0;
    const struct worker *worker = NULL;
    while ((worker = router_worker(core, &cursor)) != NULL) {
        uint32_t *count = counts[worker->info.role == ROLE_DECODE ? 0 : 1];
        count[0]++;
        count[1] += worker->is_listed ? 1 : 0;
        count[2] += router_worker_is_live(core, worker) ? 1 : 0;
        count[3] += worker_drains(core, worker) ? 1 : 0;
        blocks[worker->info.role == ROLE_DECODE ? 0 : 1] += worker->blocks;
    }
    metric_set(router->report.blocks, 0, blocks[0]);
    metric_set(router->report.blocks, 1, blocks[1]);
    for (uint32_t role = 0; role < 2; role++) {
        for (uint32_t state = 0; state < 4; state++) {
            metric_set(router->report.workers,
                       metric_series(router->report.workers, role, state, 0), counts[role][state]);
        }
    }
}

void report_refresh(void *ctx) {
    struct router *router = ctx;
    struct report *report = &router->report;
    const struct router_stats *stats = &router->core->stats;
    metric_count_to(report->tokens, 0, stats->prompt_tokens);
    metric_count_to(report->tokens, 1, stats->cached_tokens);
    metric_count_to(report->tokens, 2, stats->tokens);
    for (uint32_t i = 0; i < CAUSE_COUNT; i++) {
        metric_count_to(report->retries, i, stats->retries[i]);
    }
    metric_count_to(report->resumes, 0, stats->resumes_ok);
    metric_count_to(report->resumes, 1, stats->resumes_failed);
    metric_count_to(report->resumes, 2, stats->resumes_other_numerics);
    metric_count_to(report->placements, 0, stats->one_leg);
    metric_count_to(report->placements, 1, stats->two_legs);
    metric_count_to(report->mixed_pairs, 0, stats->pairs_other_numerics);
    metric_count_to(report->refusals, 0, stats->rejected_busy);
    metric_count_to(report->refusals, 1, stats->prefill_busy);
    metric_count_to(report->blocks_forgotten, 0, router->core->blocks.forgotten_total);
    metric_count_to(report->block_messages, 0, stats->block_messages);
    metric_count_to(report->block_messages, 1, stats->block_resets);
    refresh_workers(router);
    pthread_mutex_lock(&router->clients.lock);
    uint32_t clients = router->clients.count;
    pthread_mutex_unlock(&router->clients.lock);
    metric_set(report->clients, 0, clients);
    metric_set(report->tokenizers, 0, models_ready_count(router));
    metric_count_to(report->fetches, 0, atomic_load(&router->models.fetched));
    metric_count_to(report->fetches, 1, atomic_load(&router->models.fetch_failures));
    canary_refresh(router);
}

void report_reasons(void *ctx, struct buffer *lines) {
    struct router *router = ctx;
    if (!router_has_pair(router->core, "")) {
        buffer_text(lines, "no decode worker reachable\n");
    } else if (models_ready_count(router) == 0) {
        buffer_text(lines, "no tokenizer fetched from a worker yet\n");
    }
}

/* ---- /debug/workers ------------------------------------------------------------------------- */

struct workers_query {
    struct router *router;
    struct buffer json; /* written on the control thread, read after shell_query said so */
    _Atomic uint32_t references;
};

static void describe_worker(struct buffer *json, const struct router_core *core,
                            const struct worker *worker) {
    const struct worker_info *info = &worker->info;
    bool is_live = router_worker_is_live(core, worker);
    bool is_busy = !instant_reached(core->node.now, worker->busy_until);
    buffer_text(json, "{\"id\":");
    buffer_json(json, info->id, strlen(info->id));
    buffer_printf(json, ",\"role\":\"%s\",\"incarnation\":\"%016llx\",\"address\":",
                  role_name(info->role), (unsigned long long)info->incarnation.v);
    buffer_json(json, info->address, strlen(info->address));
    buffer_text(json, ",\"model\":");
    buffer_json(json, info->model, strlen(info->model));
    buffer_text(json, ",\"numerics\":");
    buffer_json(json, info->numerics, strlen(info->numerics));
    buffer_printf(json,
                  ",\"context\":%u,\"kv_tokens\":%u,\"listed\":%s,\"session_live\":%s,"
                  "\"draining\":%s,\"busy\":%s,\"attempts\":%u,\"admitting\":%u,"
                  "\"tokens_reserved\":%llu,\"tokens_due\":%llu,\"blocks_cached\":%u",
                  (unsigned)info->context, (unsigned)info->kv_tokens,
                  worker->is_listed ? "true" : "false", is_live ? "true" : "false",
                  worker_drains(core, worker) ? "true" : "false", is_busy ? "true" : "false",
                  (unsigned)worker->attempts, (unsigned)worker->admitting,
                  (unsigned long long)worker->tokens_reserved,
                  (unsigned long long)worker->tokens_due, (unsigned)worker->blocks);
    if (is_live) {
        const struct session *session = &core->node.sessions[worker->session];
        buffer_printf(json,
                      ",\"entries\":%u,\"pages_free\":%u,\"backlog_ms\":%u,\"silence_ms\":%lld",
                      (unsigned)session->peer_entries, (unsigned)session->peer_pages_free,
                      (unsigned)session->peer_backlog_ms,
                      (long long)span_to_ms(instant_since(core->node.now, session->heard)));
    }
    buffer_text(json, "}");
}

static void workers_fn(void *ctx) {
    struct workers_query *query = ctx;
    const struct router_core *core = query->router->core;
    uint32_t cursor = 0;
    bool is_first = true;
    const struct worker *worker = NULL;
    buffer_text(&query->json, "{\"workers\":[");
    while ((worker = router_worker(core, &cursor)) != NULL) {
        buffer_text(&query->json, is_first ? "\n" : ",\n");
        is_first = false;
        describe_worker(&query->json, core, worker);
    }
    buffer_text(&query->json, "]}\n");
}

static void workers_done(void *ctx) {
    struct workers_query *query = ctx;
    if (atomic_fetch_sub(&query->references, 1) == 1) {
        buffer_fini(&query->json);
        free(query);
    }
}

void report_get_workers(void *ctx, const struct admin_request *request, struct admin_reply *reply) {
    struct router *router = ctx;
    (void)request;
    if (atomic_load(&router->is_started) == 0) {
        reply->status = 503;
        buffer_text(&reply->body, "starting\n");
        return;
    }
    struct workers_query *query = calloc(1, sizeof *query);
    CHECK(query != NULL);
    query->router = router;
    atomic_store(&query->references, 2);
    buffer_init(&query->json, WORKERS_TEXT_MAX);
    struct instant deadline = instant_add(clock_now(), span_ms(QUERY_MS));
    if (shell_query(router->shell, workers_fn, workers_done, query, deadline)) {
        reply->content_type = "application/json";
        buffer_put(&reply->body, query->json.data, query->json.len);
    } else {
        reply->status = 503;
        buffer_text(&reply->body, "the control thread did not answer in time\n");
    }
    workers_done(query);
}
