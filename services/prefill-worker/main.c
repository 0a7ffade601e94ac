/* The prefill worker: wiring of the prefill core to engine, link and shell. */
#include <stdlib.h>

#include "base/check.h"
#include "core/prefill.h"
#include "runtime/config.h"
#include "runtime/metrics.h"
#include "runtime/signals.h"
#include "services/node/worker.h"

#define SENDS_HIGH  512u          /* no new step while more KV sends are outstanding */
#define BATCH_BYTES (64u * 1024u) /* layers travel together up to this size */

struct prefill_worker {
    struct worker *worker;
    struct prefill_core core;
    struct metric *tokens;
    struct metric *backlog;
    struct metric *operations;
    struct metric *sglang[3];
    struct metric *vllm[2];
};

static void step(void *core, const struct event *event, struct instant now, struct effects *out) {
    prefill_core_step(core, event, now, out);
}

static struct instant deadline(const void *core) {
    return prefill_core_deadline(core);
}

static bool view(const void *core, uint32_t *cursor, struct entry_view *view_out) {
    return prefill_view(core, cursor, view_out);
}

static void verify(const void *core) {
    prefill_verify(core);
}

static void effect(void *ctx, const struct effect *effect) {
    struct prefill_worker *self = ctx;
    switch (effect->kind) {
    case EFFECT_STEP: worker_step(self->worker, effect); break;
    case EFFECT_STEP_ABANDON: worker_step_abandon(self->worker, effect); break;
    case EFFECT_LINK_CONNECT: worker_connect(self->worker, effect); break;
    case EFFECT_LINK_SEND: worker_send(self->worker, effect); break;
    case EFFECT_LINK_CLOSE: worker_link_close(self->worker, effect); break;
    case EFFECT_STREAM_OPEN:
    case EFFECT_STREAM_SEND:
    case EFFECT_STREAM_CLOSE:
    case EFFECT_TOKENIZE:
    case EFFECT_DELIVER:
    case EFFECT_CHOICE:
    case EFFECT_ANSWER:
    case EFFECT_LINK_ARM:
    case EFFECT_LINK_DISARM:
    case EFFECT_NOTE:
    case EFFECT_EXIT: CHECK(!"an effect that no prefill core has"); break;
    }
}

static void add_metrics(struct prefill_worker *self) {
    struct metrics *metrics = shell_metrics(self->worker->shell);
    self->tokens = metrics_add(
        metrics, &(struct metric_config){
                     .kind = METRIC_COUNTER,
                     .name = "baton_tokens_total",
                     .help = "Prompt tokens: computed, or found in the prefix cache.",
                     .labels = {{"kind", (const char *const[]){"computed", "cached"}, 2}}});
    self->backlog =
        metrics_add(metrics, &(struct metric_config){.kind = METRIC_GAUGE,
                                                     .name = "baton_backlog_seconds",
                                                     .help = "Queued work at the measured speed."});
    self->operations = metrics_add(
        metrics,
        &(struct metric_config){.kind = METRIC_GAUGE,
                                .name = "baton_own_operations",
                                .help = "Own operations that hold pages now.",
                                .labels = {{"kind", (const char *const[]){"step", "send"}, 2}}});
    static const char *const names[] = {"sglang:num_prefill_bootstrap_queue_reqs",
                                        "sglang:num_prefill_inflight_queue_reqs",
                                        "sglang:num_queue_reqs"};
    for (uint32_t i = 0; i < 3; i++) {
        self->sglang[i] = metrics_add(
            metrics, &(struct metric_config){.kind = METRIC_GAUGE,
                                             .name = names[i],
                                             .help = "Entries in this state, under SGLang's name.",
                                             .group = "sglang"});
    }
    static const char *const vllm[] = {"vllm:num_requests_running", "vllm:num_requests_waiting"};
    for (uint32_t i = 0; i < 2; i++) {
        self->vllm[i] = metrics_add(
            metrics, &(struct metric_config){.kind = METRIC_GAUGE,
                                             .name = vllm[i],
                                             .help = "Entries in this state, under vLLM's name.",
                                             .group = "vllm"});
    }
    shell_histogram(self->worker->shell, "baton_transfer_exposed_seconds",
                    "KV time of a request that computing did not hide: steps held back by "
                    "sends, and from the end of computing to Commit.",
                    &self->core.exposed);
}

static void refresh(void *ctx) {
    struct prefill_worker *self = ctx;
    const struct prefill_core *core = &self->core;
    worker_refresh(self->worker);
    metric_count_to(self->tokens, 0, core->tokens_computed);
    metric_count_to(self->tokens, 1, core->tokens_cached);
    metric_set(self->backlog, 0,
               (double)budget_backlog_ms(&core->budget, core->backlog_tokens) / 1e3);
    uint32_t in_step = 0;
    for (uint32_t i = 0; i < core->config.entries_max; i++) {
        const struct prefill_entry *entry = &core->entries[i];
        in_step += entry->id != 0 && entry->is_in_step ? 1 : 0;
    }
    metric_set(self->operations, 0, in_step);
    metric_set(self->operations, 1, core->sends);
    const uint32_t *in_state = core->node.ledger.in_state;
    metric_set(self->sglang[0], 0, in_state[PREFILL_QUEUED] + in_state[PREFILL_COMPUTING]);
    metric_set(self->sglang[1], 0, in_state[PREFILL_SENT]);
    metric_set(self->sglang[2], 0, in_state[PREFILL_QUEUED]);
    metric_set(self->vllm[0], 0, in_state[PREFILL_COMPUTING]);
    metric_set(self->vllm[1], 0, in_state[PREFILL_QUEUED]);
}

static void describe(void *ctx, struct buffer *json) {
    struct prefill_worker *self = ctx;
    worker_describe(self->worker, json);
}

static void balance(void *ctx, struct shell_balance *balance) {
    struct prefill_worker *self = ctx;
    worker_balance(self->worker, balance);
}

static void leak(void *ctx) {
    struct prefill_worker *self = ctx;
    worker_leak(self->worker);
}

static void tick(void *ctx, struct instant now) {
    struct prefill_worker *self = ctx;
    worker_tick(self->worker, now);
}

static void progress(void *ctx, struct buffer *lines) {
    struct prefill_worker *self = ctx;
    worker_progress(self->worker, lines);
}

static void core_config(const struct worker *worker, struct prefill_config *config) {
    const struct worker_settings *settings = worker->config.settings;
    worker_node_config(worker, &config->node);
    config->entries_max = settings->entries_max;
    config->page_count = worker->page_count;
    config->layout = &worker->layout;
    config->context = worker->context;
    config->vocab = worker->info->vocab_count;
    config->rows_max = settings->rows_max;
    config->step_tokens_max =
        settings->step_tokens > settings->rows_max ? settings->step_tokens : settings->rows_max;
    config->sends_high = SENDS_HIGH;
    config->batch_bytes = BATCH_BYTES;
    config->shared_min = WORKER_SHARED_MIN;
    config->changes_max = WORKER_CHANGES_MAX;
    config->secret = worker_secret();
}

int main(int argc, char **argv) {
    signals_block();
    static struct worker_settings settings;
    const struct config_program program = {
        .name = "prefill-worker",
        .version = BATON_VERSION,
        .summary = "Computes the KV of prompts, layer by layer, and streams it to decode workers.",
        .entries = worker_config_entries,
        .count = worker_config_count - WORKER_CONFIG_DECODE};
    int code = config_start(&program, argc, argv, &settings);
    if (code >= 0) {
        return code;
    }
    struct prefill_worker *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    const struct worker_config worker_config = {.role = ROLE_PREFILL,
                                                .program = program.name,
                                                .version = program.version,
                                                .settings = &settings,
                                                .sends_high = SENDS_HIGH};
    enum status status = worker_create(&worker_config, &self->worker);
    if (status != STATUS_OK) {
        free(self);
        return shell_exit_code(status);
    }
    static struct prefill_config config;
    core_config(self->worker, &config);
    void *memory = worker_memory(prefill_bytes(&config));
    prefill_init(&self->core, &config, memory);
    self->worker->pages = &self->core.pages;
    self->worker->publisher = &self->core.publisher;
    self->worker->budget = &self->core.budget;
    self->worker->steps = &self->core.steps;
    self->worker->steps_abandoned = &self->core.steps_abandoned;
    self->worker->is_stepping = &self->core.is_stepping;
    self->worker->words = &self->core.words;
    self->worker->ledger = &self->core.node.ledger;
    self->worker->working_state = PREFILL_COMPUTING;
    add_metrics(self);
    const struct shell_core core = {.core = &self->core,
                                    .node = &self->core.node,
                                    .step = step,
                                    .deadline = deadline,
                                    .view = view,
                                    .state_name = prefill_state_name,
                                    .state_count = PREFILL_LEAVING,
                                    .verify = verify,
                                    .ctx = self,
                                    .effect = effect,
                                    .refresh = refresh,
                                    .describe = describe,
                                    .tick = tick,
                                    .progress = progress,
                                    .balance = balance,
                                    .leak = leak};
    code = worker_run(self->worker, &core);
    free(memory);
    free(self);
    return code;
}
