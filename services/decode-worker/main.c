/* The decode worker: wiring of the decode core to engine, link and shell. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "core/decode.h"
#include "kvlink/kvlink.h"
#include "runtime/config.h"
#include "runtime/metrics.h"
#include "runtime/signals.h"
#include "services/node/worker.h"

struct decode_worker {
    struct worker *worker;
    struct decode_core core;
    struct metric *tokens;
    struct metric *commits;
    struct metric *retractions;
    struct metric *operations;
    struct metric *sglang[4];
    struct metric *vllm[2];
    struct metric *preemptions;
};

static void step(void *core, const struct event *event, struct instant now, struct effects *out) {
    decode_core_step(core, event, now, out);
}

static struct instant deadline(const void *core) {
    return decode_core_deadline(core);
}

static bool view(const void *core, uint32_t *cursor, struct entry_view *view_out) {
    return decode_view(core, cursor, view_out);
}

static void verify(const void *core) {
    decode_verify(core);
}

static void effect(void *ctx, const struct effect *effect) {
    struct decode_worker *self = ctx;
    switch (effect->kind) {
    case EFFECT_STEP: worker_step(self->worker, effect); break;
    case EFFECT_STEP_ABANDON: worker_step_abandon(self->worker, effect); break;
    case EFFECT_LINK_ARM: worker_arm(self->worker, effect); break;
    case EFFECT_LINK_DISARM: worker_disarm(self->worker, effect); break;
    case EFFECT_STREAM_OPEN:
    case EFFECT_STREAM_SEND:
    case EFFECT_STREAM_CLOSE:
    case EFFECT_TOKENIZE:
    case EFFECT_DELIVER:
    case EFFECT_CHOICE:
    case EFFECT_ANSWER:
    case EFFECT_LINK_CONNECT:
    case EFFECT_LINK_SEND:
    case EFFECT_LINK_CLOSE:
    case EFFECT_NOTE:
    case EFFECT_EXIT: CHECK(!"an effect that no decode core has"); break;
    }
}

static void add_metrics(struct decode_worker *self) {
    struct metrics *metrics = shell_metrics(self->worker->shell);
    self->tokens = metrics_add(
        metrics,
        &(struct metric_config){
            .kind = METRIC_COUNTER,
            .name = "baton_tokens_total",
            .help = "Tokens computed: generated, prompt tokens prefilled here, or computed "
                    "again after a retraction.",
            .labels = {
                {"kind", (const char *const[]){"generated", "prefilled", "recomputed"}, 3}}});
    self->retractions = metrics_add(
        metrics,
        &(struct metric_config){.kind = METRIC_COUNTER,
                                .name = "baton_retractions_total",
                                .help = "Running requests that gave their pages to older "
                                        "ones; each goes on later, with the same tokens."});
    self->commits = metrics_add(
        metrics, &(struct metric_config){.kind = METRIC_COUNTER,
                                         .name = "baton_commits_total",
                                         .help = "Hand-offs whose every byte was verified."});
    self->operations = metrics_add(
        metrics,
        &(struct metric_config){.kind = METRIC_GAUGE,
                                .name = "baton_own_operations",
                                .help = "Own operations that hold pages now.",
                                .labels = {{"kind", (const char *const[]){"step", "armed"}, 2}}});
    static const char *const names[] = {"sglang:num_decode_prealloc_queue_reqs",
                                        "sglang:num_decode_transfer_queue_reqs",
                                        "sglang:num_running_reqs", "sglang:num_retracted_reqs"};
    for (uint32_t i = 0; i < 4; i++) {
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
    self->preemptions =
        metrics_add(metrics, &(struct metric_config){.kind = METRIC_COUNTER,
                                                     .name = "vllm:num_preemptions_total",
                                                     .help = "Retractions, under vLLM's name.",
                                                     .group = "vllm"});
    shell_histogram(self->worker->shell, "baton_transfer_seconds",
                    "From Accept until every KV byte is verified.", &self->core.transfer);
}

static void refresh(void *ctx) {
    struct decode_worker *self = ctx;
    const struct decode_core *core = &self->core;
    worker_refresh(self->worker);
    metric_count_to(self->tokens, 0, core->tokens_generated);
    metric_count_to(self->tokens, 1, core->tokens_prefilled);
    metric_count_to(self->tokens, 2, core->tokens_recomputed);
    metric_count_to(self->retractions, 0, core->retractions);
    metric_count_to(self->preemptions, 0, core->retractions);
    metric_count_to(self->commits, 0, core->commits);
    uint32_t in_step = 0;
    uint32_t armed = 0;
    for (uint32_t i = 0; i < core->config.entries_max; i++) {
        const struct decode_entry *entry = &core->entries[i];
        in_step += entry->id != 0 && entry->is_in_step ? 1 : 0;
        armed += entry->id != 0 && entry->is_armed ? 1 : 0;
    }
    metric_set(self->operations, 0, in_step);
    metric_set(self->operations, 1, armed);
    const uint32_t *in_state = core->node.ledger.in_state;
    metric_set(self->sglang[0], 0, in_state[DECODE_RESERVED]);
    metric_set(self->sglang[1], 0, in_state[DECODE_RECEIVING]);
    metric_set(self->sglang[2], 0, in_state[DECODE_RUNNING]);
    metric_set(self->sglang[3], 0, in_state[DECODE_RETRACTED]);
    metric_set(self->vllm[0], 0, in_state[DECODE_RUNNING]);
    metric_set(self->vllm[1], 0,
               in_state[DECODE_RESERVED] + in_state[DECODE_RECEIVING] + in_state[DECODE_RETRACTED]);
}

static void describe(void *ctx, struct buffer *json) {
    struct decode_worker *self = ctx;
    worker_describe(self->worker, json);
}

static void balance(void *ctx, struct shell_balance *balance) {
    struct decode_worker *self = ctx;
    worker_balance(self->worker, balance);
}

static void leak(void *ctx) {
    struct decode_worker *self = ctx;
    worker_leak(self->worker);
}

static void tick(void *ctx, struct instant now) {
    struct decode_worker *self = ctx;
    worker_tick(self->worker, now);
}

static void progress(void *ctx, struct buffer *lines) {
    struct decode_worker *self = ctx;
    worker_progress(self->worker, lines);
}

static void core_config(const struct worker *worker, struct decode_config *config) {
    const struct worker_settings *settings = worker->config.settings;
    worker_node_config(worker, &config->node);
    config->entries_max = settings->entries_max;
    config->page_count = worker->page_count;
    config->page_tokens = worker->layout.page_tokens;
    config->token_bytes = worker->layout.token_bytes;
    config->context = worker->context;
    config->reserve_tokens = settings->reserve_tokens;
    config->vocab = worker->info->vocab_count;
    config->rows_max = settings->rows_max;
    config->step_tokens_max =
        settings->step_tokens > settings->rows_max ? settings->step_tokens : settings->rows_max;
    config->eos_count = worker->info->eos_count;
    memcpy(config->eos, worker->info->eos_tokens, config->eos_count * sizeof config->eos[0]);
    config->shared_min = WORKER_SHARED_MIN;
    config->changes_max = WORKER_CHANGES_MAX;
    config->secret = worker_secret();
    struct bytes address = kvlink_address(worker->link);
    CHECK_OP(address.len, <=, WORKER_ADDRESS_MAX);
    config->address_len = (uint32_t)address.len;
    memcpy(config->address, address.data, address.len);
}

int main(int argc, char **argv) {
    signals_block();
    static struct worker_settings settings;
    const struct config_program program = {
        .name = "decode-worker",
        .version = BATON_VERSION,
        .summary = "Receives KV into its pages and generates tokens with continuous batching.",
        .entries = worker_config_entries,
        .count = worker_config_count};
    int code = config_start(&program, argc, argv, &settings);
    if (code >= 0) {
        return code;
    }
    struct decode_worker *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    const struct worker_config worker_config = {.role = ROLE_DECODE,
                                                .program = program.name,
                                                .version = program.version,
                                                .settings = &settings};
    enum status status = worker_create(&worker_config, &self->worker);
    if (status != STATUS_OK) {
        free(self);
        return shell_exit_code(status);
    }
    static struct decode_config config;
    core_config(self->worker, &config);
    void *memory = worker_memory(decode_bytes(&config));
    decode_init(&self->core, &config, memory);
    self->worker->pages = &self->core.pages;
    self->worker->publisher = &self->core.publisher;
    self->worker->budget = &self->core.budget;
    self->worker->steps = &self->core.steps;
    self->worker->steps_abandoned = &self->core.steps_abandoned;
    self->worker->is_stepping = &self->core.is_stepping;
    self->worker->is_starved = &self->core.is_starved;
    self->worker->words = &self->core.words;
    self->worker->ledger = &self->core.node.ledger;
    self->worker->working_state = DECODE_RUNNING;
    add_metrics(self);
    const struct shell_core core = {.core = &self->core,
                                    .node = &self->core.node,
                                    .step = step,
                                    .deadline = deadline,
                                    .view = view,
                                    .state_name = decode_state_name,
                                    .state_count = DECODE_LEAVING,
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
