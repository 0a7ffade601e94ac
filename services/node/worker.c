#include "services/node/worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "core/budget.h"
#include "core/pages.h"
#include "core/publish.h"
#include "core/words.h"
#include "engine/accelerator.h"
#include "engine/engine.h"
#include "kernels/kernels.h"
#include "kvlink/kvlink.h"
#include "rpc/rpc.h"
#include "runtime/clock.h"
#include "runtime/log.h"
#include "runtime/metrics.h"
#include "runtime/random.h"
#include "runtime/signals.h"
#include "services/node/files.h"
#include "services/node/internal.h"
#include "text/tokenizer.h"

#define KV_TOKENS_AUTO 65536u
#define KV_BYTES_AUTO  (1ull << 30)
#define LINK_STOP_MS   3000

static const char *const weights_choices[] = {
    [MODEL_WEIGHTS_FILE] = "file", [MODEL_WEIGHTS_INT8] = "int8", NULL};
static const char *const device_choices[] = {[WORKER_DEVICE_CPU] = "cpu",
                                             [WORKER_DEVICE_CUDA] = "cuda",
                                             [WORKER_DEVICE_AUTO] = "auto",
                                             NULL};
static const char *const kernels_choices[] = {"auto", KERNELS_NAMES, NULL};
static const char *const link_choices[] = {[KVLINK_TRANSPORT_TCP] = "tcp",
                                           [KVLINK_TRANSPORT_SHM] = "shm",
                                           [KVLINK_TRANSPORT_AUTO] = "auto",
                                           NULL};

/* clang-format off */
const struct config_entry worker_config_entries[] = {
    {.flag = "model", .type = CONFIG_TEXT, .unit = "DIR", .is_required = true,
     .help = "model directory: config.json, *.safetensors, tokenizer.json, generation_config.json",
     .offset = offsetof(struct worker_settings, model)},
    {.flag = "weights", .type = CONFIG_CHOICE, .value = "file", .choices = weights_choices,
     .help = "file: as the model has them; int8: rounded to 8 bits while loading, half the memory and reading of bf16 at a "
             "small loss; workers of one model must agree",
     .offset = offsetof(struct worker_settings, weights)},
    {.flag = "kernels", .type = CONFIG_CHOICE, .value = "auto", .choices = kernels_choices,
     .help = "instructions that the CPU computes with; auto: the best that this machine has. Their results may differ in last bits, "
             "so where the machines of a pool differ, a class that all have gives the same tokens on each",
     .offset = offsetof(struct worker_settings, kernels)},
    {.flag = "device", .type = CONFIG_CHOICE, .value = "cpu", .choices = device_choices,
     .help = "where the engine computes; auto: cuda where there is a usable device, else cpu (they give tokens of different last bits, "
             "so a pool should not mix them)",
     .offset = offsetof(struct worker_settings, device)},
    {.flag = "device-index", .type = CONFIG_U32, .unit = "N", .value = "0", .most = 1023,
     .help = "which of the machine's devices",
     .offset = offsetof(struct worker_settings, device_index)},
    {.flag = "device-library", .type = CONFIG_TEXT, .unit = "FILE", .least = 1, .most = 4095,
     .help = "the shared object of the device; unset: libbaton_cuda.so beside the program, in ../lib/baton, or where the system looks",
     .offset = offsetof(struct worker_settings, device_library)},
    {.flag = "served-model-name", .type = CONFIG_TEXT, .unit = "NAME", .least = 1, .most = LABEL_MAX - 1,
     .help = "what clients call the model; unset: the directory's own name",
     .offset = offsetof(struct worker_settings, served_name)},
    {.flag = "grpc", .type = CONFIG_ADDRESS, .value = "0.0.0.0:0",
     .help = "sessions, model files, health (gRPC); port 0: any free one",
     .offset = offsetof(struct worker_settings, grpc)},
    {.flag = "kv", .type = CONFIG_U32, .unit = "PORT", .value = "0", .most = 65535,
     .help = "the one TCP port of the KV link; 0: any free one",
     .offset = offsetof(struct worker_settings, kv_port)},
    {.flag = "kv-device", .type = CONFIG_TEXT, .unit = "NAME", .least = 1, .most = 15,
     .help = "network interface of the KV link; unset: the one of the listen address",
     .offset = offsetof(struct worker_settings, kv_device)},
    {.flag = "link", .type = CONFIG_CHOICE, .value = "tcp", .choices = link_choices,
     .help = "transport of the KV link; auto: shared memory within a host, TCP between hosts; with shared "
             "memory a prefill worker that is killed may block the others until the decode worker restarts",
     .offset = offsetof(struct worker_settings, link)},
    {.flag = "kv-tokens", .type = CONFIG_U64, .unit = "tokens", .value = "0", .most = 1ull << 31,
     .help = "KV capacity, whose memory is had at start; 0: 65536, or what fits 1 GiB if that is less",
     .offset = offsetof(struct worker_settings, kv_tokens)},
    {.flag = "page-tokens", .type = CONFIG_U32, .unit = "tokens", .value = "16", .least = 1,
     .most = LAYOUT_PAGE_TOKENS_MAX, .help = "tokens of one KV page",
     .offset = offsetof(struct worker_settings, page_tokens)},
    {.flag = "max-running", .type = CONFIG_U32, .unit = "requests", .value = "128", .least = 1, .most = STEP_ROWS_MAX,
     .help = "requests in one engine step",
     .offset = offsetof(struct worker_settings, rows_max)},
    {.flag = "max-entries", .type = CONFIG_U32, .unit = "requests", .value = "4096", .least = 1, .most = 1u << 20,
     .help = "requests held at once; more are told to come back",
     .offset = offsetof(struct worker_settings, entries_max)},
    {.flag = "max-sessions", .type = CONFIG_U32, .unit = "sessions", .value = "256", .least = 2, .most = 8192,
     .help = "sessions with routers and workers at once",
     .offset = offsetof(struct worker_settings, sessions_max)},
    {.flag = "threads", .type = CONFIG_U32, .value = "0", .most = ENGINE_THREADS_MAX,
     .help = "threads of the engine; 0: one for each processor",
     .offset = offsetof(struct worker_settings, threads)},
    {.flag = "step-tokens", .type = CONFIG_U32, .unit = "tokens", .value = "512", .least = 1, .most = 65536,
     .help = "most tokens of one engine step; at least max-running is used",
     .offset = offsetof(struct worker_settings, step_tokens)},
    {.flag = "engine-limit", .type = CONFIG_DURATION, .value = "30s", .least = 1000, .most = 3600000,
     .help = "an engine that shows no sign of life for so long (it beats by layer) ends the process",
     .offset = offsetof(struct worker_settings, engine_limit)},
    {.flag = "stuck-after", .type = CONFIG_DURATION, .value = "10s", .most = 3600000,
     .help = "not ready once requests wait so long for the engine and no step begins; 0: never",
     .offset = offsetof(struct worker_settings, stuck_after)},
    {.flag = "test-step-delay", .type = CONFIG_DURATION, .value = "0", .most = 25000,
     .help = "for tests: every engine step sleeps so long before it computes",
     .offset = offsetof(struct worker_settings, test_step_delay)},
    SHELL_CONFIG_ENTRIES(struct worker_settings, shell, "0.0.0.0:0"),
    {.flag = "reserve-tokens", .type = CONFIG_U32, .unit = "tokens", .value = "512", .most = 1u << 30,
     .help = "a request is admitted where this leaves pages for so many more tokens of every live one, or for the rest of "
             "its answer; 0: wherever its prompt fits; the context and more: nothing is ever retracted",
     .offset = offsetof(struct worker_settings, reserve_tokens)},
};
/* clang-format on */
const uint32_t worker_config_count = sizeof worker_config_entries / sizeof worker_config_entries[0];

/* ---- engine and link events ----------------------------------------------------------------- */

/* The writer of a row takes its sum: the link need not read the row for it, and what becomes of the
 * row between here and the decode worker is noticed there. */
static void on_row(void *context, uint32_t page, uint32_t component, uint32_t token_in_page) {
    struct worker *worker = context;
    kvlink_sum_rows(&worker->layout, engine_kv_base(worker->engine), worker->kv_sums, page,
                    component, token_in_page, 1);
}

static void on_layer(void *context, uint64_t step, uint32_t layer) {
    struct worker *worker = context;
    struct shell_mail *mail = shell_mail_take(worker->shell, EVENT_LAYER_DONE);
    mail->event.u.layer_done.number = step;
    mail->event.u.layer_done.layer = layer;
    shell_post(worker->shell, mail);
}

static void on_step(void *context, uint64_t step, enum status status,
                    const struct step_result *results, uint32_t count, struct span elapsed) {
    struct worker *worker = context;
    struct instant ended = clock_now();
    struct shell_mail *mail = shell_mail_take(worker->shell, EVENT_STEP_DONE);
    struct step_result *copy = shell_mail_payload(mail, (count + 1) * sizeof *copy);
    if (count > 0) {
        memcpy(copy, results, count * sizeof *copy);
    }
    if (status != STATUS_OK && status != STATUS_CANCELLED) { /* the last: as we asked */
        LOG_ERROR("an engine step failed", LOG_U64("step", step), LOG_STATUS("status", status));
    }
    mail->event.u.step_done.number = step;
    mail->event.u.step_done.status = status;
    mail->event.u.step_done.results = copy;
    mail->event.u.step_done.count = count;
    mail->event.u.step_done.elapsed = elapsed;
    mail->event.u.step_done.ended = ended;
    shell_post(worker->shell, mail);
}

static void post_slot(struct worker *worker, enum event_kind kind, uint64_t slot, uint64_t bytes,
                      enum cause cause) {
    struct shell_mail *mail = shell_mail_take(worker->shell, kind);
    mail->event.u.link.slot.v = slot;
    mail->event.u.link.bytes = bytes;
    mail->event.u.link.cause = cause;
    shell_post(worker->shell, mail);
}

static void on_progress(void *context, uint64_t slot, uint64_t bytes) {
    post_slot(context, EVENT_LINK_PROGRESS, slot, bytes, CAUSE_NONE);
}

static void on_covered(void *context, uint64_t slot, uint64_t bytes) {
    post_slot(context, EVENT_LINK_COVERED, slot, bytes, CAUSE_NONE);
}

static const char *bad_name(enum kvlink_bad reason) {
    switch (reason) {
    case KVLINK_BAD_CHECKSUM: return "checksum";
    case KVLINK_BAD_RANGE: return "range";
    case KVLINK_BAD_LAYOUT: return "layout";
    case KVLINK_BAD_GAPS: return "gaps";
    }
    return "unknown";
}

static void on_bad(void *context, uint64_t slot, enum kvlink_bad reason) {
    LOG_WARN("a KV chunk failed its checks", LOG_HEX("slot", slot),
             LOG_TEXT("why", bad_name(reason)));
    post_slot(context, EVENT_LINK_BAD, slot, 0, CAUSE_BAD_CHUNK);
}

static void on_disarmed(void *context, uint64_t slot) {
    post_slot(context, EVENT_LINK_DISARMED, slot, 0, CAUSE_NONE);
}

static void on_sent(void *context, uint64_t op, enum status status) {
    struct worker *worker = context;
    struct shell_mail *mail = shell_mail_take(worker->shell, EVENT_LINK_SENT);
    mail->event.u.sent.op = op;
    mail->event.u.sent.status = status;
    shell_post(worker->shell, mail);
}

static void post_peer(struct worker *worker, enum event_kind kind, uint64_t peer) {
    struct shell_mail *mail = shell_mail_take(worker->shell, kind);
    mail->event.u.peer.peer = peer;
    shell_post(worker->shell, mail);
}

static void on_peer_failed(void *context, uint64_t peer, enum status status) {
    LOG_WARN("KV link to a decode worker failed", LOG_U64("peer", peer),
             LOG_STATUS("status", status));
    post_peer(context, EVENT_LINK_FAILED, peer);
}

static void on_peer_closed(void *context, uint64_t peer) {
    post_peer(context, EVENT_LINK_CLOSED, peer);
}

/* ---- effects -------------------------------------------------------------------------------- */

void worker_step(struct worker *worker, const struct effect *effect) {
    engine_submit(worker->engine, effect->u.plan);
}

void worker_step_abandon(struct worker *worker, const struct effect *effect) {
    engine_abandon(worker->engine, effect->u.abandon.number);
}

void worker_arm(struct worker *worker, const struct effect *effect) {
    struct kvlink_arm arm = {.slot = effect->u.arm.slot.v,
                             .key = effect->u.arm.key,
                             .token_first = effect->u.arm.token_first,
                             .token_end = effect->u.arm.token_end,
                             .page_count = effect->u.arm.page_count,
                             .pages = effect->u.arm.pages};
    uint32_t first = arm.token_first / worker->layout.page_tokens;
    if (first < arm.page_count) {
        engine_pages_written(worker->engine, arm.pages + first, arm.page_count - first);
    }
    enum status status = kvlink_arm(worker->link, &arm);
    if (status != STATUS_OK) {
        LOG_ERROR("a slot could not be armed", LOG_HEX("slot", arm.slot),
                  LOG_STATUS("status", status));
        post_slot(worker, EVENT_LINK_BAD, arm.slot, 0, CAUSE_BAD_CHUNK);
    }
}

void worker_disarm(struct worker *worker, const struct effect *effect) {
    uint64_t slot = effect->u.disarm.slot.v;
    if (kvlink_disarm(worker->link, slot) != STATUS_OK) {
        post_slot(worker, EVENT_LINK_DISARMED, slot, 0, CAUSE_NONE); /* it was never armed */
    }
}

void worker_connect(struct worker *worker, const struct effect *effect) {
    uint64_t peer = effect->u.connect.peer;
    enum status status =
        kvlink_connect(worker->link, peer,
                       (struct bytes){effect->u.connect.address, effect->u.connect.address_len});
    if (status != STATUS_OK) {
        LOG_WARN("no KV link to a decode worker", LOG_U64("peer", peer),
                 LOG_STATUS("status", status));
        post_peer(worker, EVENT_LINK_FAILED, peer);
    }
}

void worker_send(struct worker *worker, const struct effect *effect) {
    struct kvlink_send send = {.op = effect->u.send.op,
                               .peer = effect->u.send.peer,
                               .slot = effect->u.send.slot.v,
                               .key = effect->u.send.key,
                               .component_first = effect->u.send.component_first,
                               .component_count = effect->u.send.component_count,
                               .token_first = effect->u.send.token_first,
                               .token_count = effect->u.send.token_count,
                               .page_count = effect->u.send.page_count,
                               .pages = effect->u.send.pages};
    enum status status = kvlink_send(worker->link, &send);
    if (status != STATUS_OK) {
        LOG_DEBUG("a KV send was refused", LOG_U64("peer", send.peer),
                  LOG_STATUS("status", status));
        on_sent(worker, send.op, status);
    }
}

void worker_link_close(struct worker *worker, const struct effect *effect) {
    uint64_t peer = effect->u.link_close.peer;
    if (kvlink_close(worker->link, peer) != STATUS_OK) {
        post_peer(worker, EVENT_LINK_CLOSED, peer); /* it was never connected */
    }
}

/* ---- metrics -------------------------------------------------------------------------------- */

struct worker_metrics {
    struct metric *pages;
    struct metric *steps;
    struct metric *steps_abandoned;
    struct metric *budget_tokens;
    struct metric *token_seconds;
    struct metric *cache_queries;
    struct metric *cache_hits;
    struct metric *cache_events;
    struct metric *cache_walks;
    struct metric *evictions;
    struct metric *link_ops;
    struct metric *dropped;
    struct metric *checksum;
    struct metric *checksum_failures;
    struct metric *bytes;
    struct metric *chunks;
    struct metric *peers_failed;
    struct metric *usage_sglang;
    struct metric *usage_vllm;
};

static struct metric *add(struct worker *worker, enum metric_kind kind, const char *name,
                          const char *help) {
    return metrics_add(shell_metrics(worker->shell),
                       &(struct metric_config){.kind = kind, .name = name, .help = help});
}

static struct metric *add_labelled(struct worker *worker, enum metric_kind kind, const char *name,
                                   const char *help, const char *label, const char *const *values,
                                   uint32_t count) {
    return metrics_add(
        shell_metrics(worker->shell),
        &(struct metric_config){
            .kind = kind, .name = name, .help = help, .labels = {{label, values, count}}});
}

static void add_metrics(struct worker *worker) {
    struct worker_metrics *m = calloc(1, sizeof *m);
    CHECK(m != NULL);
    worker->metrics = m;
    m->pages = add_labelled(worker, METRIC_GAUGE, "baton_pages", "KV pages.", "state",
                            (const char *const[]){"free", "cached", "owned"}, 3);
    m->steps = add(worker, METRIC_COUNTER, "baton_steps_total", "Engine steps planned.");
    m->steps_abandoned = add(worker, METRIC_COUNTER, "baton_steps_abandoned_total",
                             "Steps told to end early, since nobody was left who wanted them.");
    m->budget_tokens = add(worker, METRIC_GAUGE, "baton_step_budget_tokens",
                           "Tokens that one engine step may compute now.");
    m->token_seconds = add(worker, METRIC_GAUGE, "baton_step_token_seconds",
                           "Smoothed time that one token of a step takes.");
    m->cache_queries = add(worker, METRIC_COUNTER, "baton_prefix_cache_query_tokens_total",
                           "Prompt tokens that were looked up in the prefix cache.");
    m->cache_hits = add(worker, METRIC_COUNTER, "baton_prefix_cache_hit_tokens_total",
                        "Prompt tokens whose KV was in the prefix cache.");
    m->cache_events = add_labelled(
        worker, METRIC_COUNTER, "baton_prefix_events_total",
        "Changes of the prefix index: blocks told to routers, and changes that a router was too "
        "slow for (it is told the whole index instead).",
        "what", (const char *const[]){"sent", "dropped"}, 2);
    m->cache_walks = add(worker, METRIC_COUNTER, "baton_prefix_walks_total",
                         "Times the whole prefix index was told to a router.");
    m->evictions = add(worker, METRIC_COUNTER, "baton_prefix_cache_evictions_total",
                       "Cached pages that were given to somebody else.");
    m->link_ops =
        add_labelled(worker, METRIC_GAUGE, "baton_link_operations", "What the KV link holds now.",
                     "kind", (const char *const[]){"armed", "peers", "sends", "requests"}, 4);
    m->dropped = add_labelled(
        worker, METRIC_COUNTER, "baton_chunks_dropped_total", "KV chunks dropped on arrival.",
        "why", (const char *const[]){"header", "unknown", "key", "covered", "bad_slot"}, 5);
    m->checksum = add_labelled(worker, METRIC_COUNTER, "baton_slots_bad_total",
                               "Slots that a chunk made unusable.", "why",
                               (const char *const[]){"checksum", "range", "layout", "gaps"}, 4);
    m->checksum_failures = add(worker, METRIC_COUNTER, "baton_checksum_failures_total",
                               "KV chunks whose bytes differed from their checksum.");
    m->bytes = add_labelled(worker, METRIC_COUNTER, "baton_transfer_bytes_total", "KV bytes moved.",
                            "direction", (const char *const[]){"received", "sent"}, 2);
    m->chunks = add_labelled(worker, METRIC_COUNTER, "baton_chunks_total", "KV chunks moved.",
                             "direction", (const char *const[]){"received", "sent"}, 2);
    m->peers_failed =
        add(worker, METRIC_COUNTER, "baton_link_peers_failed_total", "KV links that failed.");
    m->usage_sglang =
        metrics_add(shell_metrics(worker->shell),
                    &(struct metric_config){.kind = METRIC_GAUGE,
                                            .name = "sglang:token_usage",
                                            .help = "Share of KV pages that requests hold.",
                                            .group = "sglang"});
    m->usage_vllm =
        metrics_add(shell_metrics(worker->shell),
                    &(struct metric_config){.kind = METRIC_GAUGE,
                                            .name = "vllm:kv_cache_usage_perc",
                                            .help = "Share of KV pages that requests hold, 0 to 1.",
                                            .group = "vllm"});
}

void worker_refresh(struct worker *worker) {
    struct worker_metrics *m = worker->metrics;
    const struct pages *pages = worker->pages;
    metric_set(m->pages, 0, pages->free.count);
    metric_set(m->pages, 1, pages->cached.count);
    metric_set(m->pages, 2, pages->owned);
    metric_count_to(m->cache_queries, 0, pages->query_tokens_total);
    metric_count_to(m->cache_hits, 0, pages->hit_tokens_total);
    metric_count_to(m->cache_events, 0, worker->publisher->blocks_sent);
    metric_count_to(m->cache_events, 1, worker->publisher->changes_dropped);
    metric_count_to(m->cache_walks, 0, worker->publisher->walks);
    metric_count_to(m->evictions, 0, pages->evictions_total);
    double usage = (double)pages->owned / (double)pages->capacity;
    metric_set(m->usage_sglang, 0, usage);
    metric_set(m->usage_vllm, 0, usage);
    metric_count_to(m->steps, 0, *worker->steps);
    metric_count_to(m->steps_abandoned, 0, *worker->steps_abandoned);
    metric_set(m->budget_tokens, 0, worker->budget->tokens);
    metric_set(m->token_seconds, 0, (double)worker->budget->ns_per_token / 1e9);
    struct kvlink_counters link;
    kvlink_read_counters(worker->link, &link);
    metric_set(m->link_ops, 0, (double)link.slots_armed);
    metric_set(m->link_ops, 1, (double)link.peers_open);
    metric_set(m->link_ops, 2, (double)link.ops_outstanding);
    metric_set(m->link_ops, 3, (double)link.requests_outstanding);
    const uint64_t dropped[] = {link.dropped_header, link.dropped_unknown, link.dropped_key,
                                link.dropped_covered, link.dropped_bad_slot};
    for (uint32_t i = 0; i < 5; i++) {
        metric_count_to(m->dropped, i, dropped[i]);
    }
    const uint64_t bad[] = {link.bad_checksum, link.bad_range, link.bad_layout, link.bad_gaps};
    for (uint32_t i = 0; i < 4; i++) {
        metric_count_to(m->checksum, i, bad[i]);
    }
    metric_count_to(m->checksum_failures, 0, link.bad_checksum);
    metric_count_to(m->bytes, 0, link.bytes_accepted);
    metric_count_to(m->bytes, 1, link.bytes_sent);
    metric_count_to(m->chunks, 0, link.chunks_received);
    metric_count_to(m->chunks, 1, link.chunks_sent);
    metric_count_to(m->peers_failed, 0, link.peers_failed);
}

void worker_balance(const struct worker *worker, struct shell_balance *balance) {
    const struct pages *pages = worker->pages;
    balance->pages = (int64_t)pages->capacity - (int64_t)pages->free.count -
                     (int64_t)pages->cached.count - (int64_t)pages->owned;
    balance->words = (int64_t)worker->words->taken - (int64_t)worker->ledger->live;
}

void worker_leak(struct worker *worker) {
    worker->pages->drops_next_free = true;
}

void worker_tick(struct worker *worker, struct instant now) {
    /* Where transfers hold all pages, those that run wait for them and not for the engine. */
    bool is_starved = worker->is_starved != NULL && *worker->is_starved;
    bool is_waiting = *worker->is_stepping ||
                      (worker->ledger->in_state[worker->working_state] > 0 && !is_starved);
    if (!is_waiting || worker->steps_seen != *worker->steps) {
        worker->steps_seen = *worker->steps;
        worker->steps_seen_at = now;
    }
    worker->ticked_at = now;
}

void worker_progress(const struct worker *worker, struct buffer *lines) {
    struct span bound = worker->config.settings->stuck_after;
    struct span still = instant_since(worker->ticked_at, worker->steps_seen_at);
    if (bound.ns > 0 && still.ns > bound.ns) {
        buffer_printf(lines, "engine: %s for %.1f s; %u requests need it\n",
                      *worker->is_stepping ? "a step has lasted" : "no step has begun",
                      span_to_seconds(still), worker->ledger->in_state[worker->working_state]);
    }
}

void worker_describe(struct worker *worker, struct buffer *json) {
    const struct pages *pages = worker->pages;
    struct kvlink_counters link;
    kvlink_read_counters(worker->link, &link);
    buffer_text(json, ",\"model\":");
    buffer_json(json, worker->served_name, strlen(worker->served_name));
    buffer_printf(json,
                  ",\"kv\":{\"pages\":%u,\"free\":%u,\"cached\":%u,\"owned\":%u,"
                  "\"page_tokens\":%u,\"page_bytes\":%u},\"link\":{\"port\":%u,\"device\":",
                  pages->capacity, pages->free.count, pages->cached.count, pages->owned,
                  pages->page_tokens, worker->layout.page_bytes,
                  (unsigned)kvlink_port(worker->link));
    const char *device = kvlink_device(worker->link);
    buffer_json(json, device, strlen(device));
    buffer_printf(json,
                  ",\"armed\":%llu,\"peers\":%llu,\"sends\":%llu,\"requests\":%llu,"
                  "\"bytes_received\":%llu,\"bytes_sent\":%llu}",
                  (unsigned long long)link.slots_armed, (unsigned long long)link.peers_open,
                  (unsigned long long)link.ops_outstanding,
                  (unsigned long long)link.requests_outstanding,
                  (unsigned long long)link.bytes_accepted, (unsigned long long)link.bytes_sent);
}

/* ---- life ----------------------------------------------------------------------------------- */

/* A writer's text, terminated. */
struct sentence {
    char text[512];
    struct writer writer;
};

static void sentence_init(struct sentence *sentence) {
    writer_init(&sentence->writer, sentence->text, sizeof sentence->text - 1);
}

static const char *sentence_text(struct sentence *sentence) {
    sentence->text[sentence->writer.len] = '\0';
    return sentence->text;
}

/* What a failure at start may be for main: the settings' own status is kept for shell_create. */
static enum status start_status(enum status status) {
    return status == STATUS_RANGE ? STATUS_INVALID : status;
}

static void choose_name(struct worker *worker) {
    const struct worker_settings *settings = worker->config.settings;
    text_copy(worker->served_name, sizeof worker->served_name,
              settings->served_name != NULL ? settings->served_name : worker->info->name);
}

static enum status choose_kernels(struct worker *worker) {
    uint32_t choice = worker->config.settings->kernels;
    worker->kernels = kernels_select(choice == 0 ? NULL : kernels_choices[choice]);
    if (worker->kernels == NULL) {
        LOG_ERROR("--kernels asks for instructions that this processor has not, or that the system "
                  "does not let this process use",
                  LOG_TEXT("value", kernels_choices[choice]),
                  LOG_TEXT("best", kernels_select(NULL)->name));
        return STATUS_UNSUPPORTED;
    }
    return STATUS_OK;
}

static enum status open_device(struct worker *worker) {
    const struct worker_settings *settings = worker->config.settings;
    if (settings->device == WORKER_DEVICE_CPU) {
        return STATUS_OK;
    }
    struct sentence why;
    sentence_init(&why);
    enum status status = accelerator_open(settings->device_library, settings->device_index,
                                          &why.writer, &worker->accelerator);
    if (status == STATUS_OK) {
        const struct device_info *info = &worker->accelerator->info;
        LOG_INFO("computing on a device", LOG_TEXT("device", info->name),
                 LOG_TEXT("numerics", info->numerics), LOG_U64("memory", info->memory_bytes),
                 LOG_U64("free", info->free_bytes));
        return STATUS_OK;
    }
    if (settings->device == WORKER_DEVICE_AUTO) {
        LOG_INFO("computing on the CPU: --device auto found no device",
                 LOG_TEXT("why", sentence_text(&why)));
        return STATUS_OK;
    }
    LOG_ERROR("--device cuda cannot be had; without a GPU use --device cpu",
              LOG_TEXT("why", sentence_text(&why)));
    return start_status(status);
}

static enum status load_model(struct worker *worker) {
    const struct worker_settings *settings = worker->config.settings;
    shell_phase(worker->shell, "loading the model");
    LOG_INFO("loading the model", LOG_TEXT("directory", settings->model));
    enum status status = files_open(settings->model, &worker->files);
    if (status != STATUS_OK) {
        return status;
    }
    struct sentence why;
    sentence_init(&why);
    /* Workers do not tokenize. A file that routers cannot read must not pass for a model that is
     * served: it is tried here, where whoever starts the worker reads why. */
    struct tokenizer *tokenizer = NULL;
    status = tokenizer_create(files_tokenizer(worker->files), &tokenizer, &why.writer);
    uint32_t tokenizer_ids = status == STATUS_OK ? tokenizer_vocab_size(tokenizer) : 0;
    tokenizer_destroy(tokenizer);
    if (status != STATUS_OK) {
        LOG_ERROR("tokenizer.json of --model cannot be used: routers need it to read prompts",
                  LOG_TEXT("directory", settings->model), LOG_TEXT("why", sentence_text(&why)));
        return start_status(status);
    }
    status = choose_kernels(worker);
    if (status == STATUS_OK) {
        status = open_device(worker);
    }
    if (status != STATUS_OK) {
        return status;
    }
    sentence_init(&why);
    status = model_create_on(settings->model, worker->kernels, worker->accelerator,
                             settings->weights, &why.writer, &worker->model);
    if (status != STATUS_OK) {
        LOG_ERROR("--model cannot be served", LOG_TEXT("directory", settings->model),
                  LOG_TEXT("why", sentence_text(&why)));
        return start_status(status);
    }
    worker->info = model_info(worker->model);
    if (tokenizer_ids > worker->info->vocab_count) {
        LOG_WARN("tokenizer.json has token ids beyond the model's vocabulary: texts that need them "
                 "are refused",
                 LOG_U64("highest_id", tokenizer_ids - 1),
                 LOG_U64("vocabulary", worker->info->vocab_count));
    }
    worker->tokenizer_digest = files_tokenizer_digest(worker->files);
    choose_name(worker);
    if (worker->info->eos_count > EOS_MAX) {
        LOG_ERROR("--model has too many end-of-sequence tokens",
                  LOG_U64("count", worker->info->eos_count), LOG_U64("most", EOS_MAX));
        return STATUS_UNSUPPORTED;
    }
    status = model_layout(worker->model, settings->page_tokens, &worker->layout);
    if (status != STATUS_OK) {
        LOG_ERROR("--page-tokens does not fit the model", LOG_U64("value", settings->page_tokens),
                  LOG_STATUS("status", status));
        return start_status(status);
    }
    return STATUS_OK;
}

static enum status size_kv(struct worker *worker) {
    const struct worker_settings *settings = worker->config.settings;
    uint64_t tokens = settings->kv_tokens;
    if (tokens == 0) {
        uint64_t fit = KV_BYTES_AUTO / worker->layout.token_bytes;
        tokens = fit < KV_TOKENS_AUTO ? fit : KV_TOKENS_AUTO;
    }
    uint64_t pages = (tokens + settings->page_tokens - 1) / settings->page_tokens;
    if (pages < 2) {
        LOG_ERROR("--kv-tokens is less than two pages", LOG_U64("value", tokens),
                  LOG_U64("page_tokens", settings->page_tokens));
        return STATUS_INVALID;
    }
    worker->page_count = (uint32_t)pages;
    uint64_t capacity = pages * settings->page_tokens;
    worker->context =
        capacity < worker->info->context_tokens ? (uint32_t)capacity : worker->info->context_tokens;
    return STATUS_OK;
}

static uint32_t thread_count(const struct worker_settings *settings) {
    if (settings->threads > 0) {
        return settings->threads;
    }
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    return processors < 1                    ? 1
           : processors > ENGINE_THREADS_MAX ? ENGINE_THREADS_MAX
                                             : (uint32_t)processors;
}

static enum status start_engine(struct worker *worker) {
    const struct worker_settings *settings = worker->config.settings;
    bool is_prefill = worker->config.role == ROLE_PREFILL;
    if (is_prefill) {
        uint64_t count = kvlink_sum_count(&worker->layout, worker->page_count);
        worker->kv_sums = calloc(count, sizeof(*worker->kv_sums));
        if (worker->kv_sums == NULL) {
            LOG_ERROR("no memory for the sums of the KV pool's rows; see --kv-tokens",
                      LOG_U64("bytes", count * sizeof(*worker->kv_sums)));
            return STATUS_BUSY;
        }
    }
    struct engine_config config = {
        .model = worker->model,
        .layout = &worker->layout,
        .page_count = worker->page_count,
        .threads = thread_count(settings),
        .rows_max = settings->rows_max,
        .tokens_max =
            settings->step_tokens > settings->rows_max ? settings->step_tokens : settings->rows_max,
        .on_row = is_prefill ? on_row : NULL,
        .on_layer = on_layer,
        .on_step = on_step,
        .context = worker,
        .beat_limit = settings->engine_limit,
        .test_step_delay = settings->test_step_delay,
    };
    struct sentence why;
    sentence_init(&why);
    enum status status = engine_create(&config, &why.writer, &worker->engine);
    if (status != STATUS_OK) {
        LOG_ERROR("the engine cannot be started; see --kv-tokens, --threads, --max-running",
                  LOG_TEXT("why", sentence_text(&why)));
        return start_status(status);
    }
    return STATUS_OK;
}

static enum status start_link(struct worker *worker) {
    const struct worker_settings *settings = worker->config.settings;
    bool is_decode = worker->config.role == ROLE_DECODE;
    char host[CONFIG_HOST_CAP];
    advertise_choose(NULL, settings->grpc.host, host, sizeof host);
    uint32_t layers = worker->layout.layer_count + 1;
    struct kvlink_config config = {
        .layout = &worker->layout,
        .kv = engine_kv_base(worker->engine),
        .page_count = worker->page_count,
        .sums = worker->kv_sums,
        .transport = (enum kvlink_transport)settings->link,
        .port = (uint16_t)settings->kv_port,
        .device = settings->kv_device,
        .host = host,
        .slots_max = is_decode ? settings->entries_max : 0,
        .slot_tokens_max = is_decode ? worker->context : 0,
        .peers_max = is_decode ? 0 : settings->sessions_max,
        /* Past sends_high no step starts; until then one turn of cached prompts, and one step. */
        .ops_max = is_decode
                       ? 0
                       : worker->config.sends_high + EFFECTS_MAX + 2 * settings->rows_max * layers,
        .op_tokens_max = is_decode ? 0 : worker->context,
        .callbacks = {.on_progress = on_progress,
                      .on_covered = on_covered,
                      .on_bad = on_bad,
                      .on_disarmed = on_disarmed,
                      .on_sent = on_sent,
                      .on_peer_failed = on_peer_failed,
                      .on_closed = on_peer_closed},
        .context = worker,
    };
    struct sentence why;
    sentence_init(&why);
    enum status status = kvlink_create(&config, &why.writer, &worker->link);
    if (status != STATUS_OK) {
        LOG_ERROR("the KV link cannot be opened; see --kv, --kv-device, --link",
                  LOG_U64("kv", settings->kv_port), LOG_TEXT("why", sentence_text(&why)));
        return start_status(status);
    }
    return STATUS_OK;
}

static enum status start_server(struct worker *worker) {
    enum status status =
        shell_serve(worker->shell, "--grpc", &worker->config.settings->grpc, &worker->server);
    if (status == STATUS_OK) {
        status = files_serve(worker->files, worker->shell, worker->server);
        CHECK(status == STATUS_OK);
        /* Bound now, so that an occupied port is found before anything is announced. */
        status =
            shell_listen(worker->shell, "--grpc", &worker->config.settings->grpc, worker->server);
    }
    return status;
}

/* Reverse order of start; what posts mail ends after the control thread, before the mail. Returns
 * false if something hangs. */
static bool destroy(struct worker *worker) {
    if (shell_stop(worker->shell) == STATUS_TIMEOUT) {
        return false;
    }
    if (worker->link != NULL) {
        if (kvlink_stop(worker->link, span_ms(LINK_STOP_MS)) != STATUS_OK) {
            LOG_ERROR("the KV link did not end in time");
            return false;
        }
        kvlink_abandon(worker->link);
    }
    engine_destroy(worker->engine);
    free(worker->kv_sums);
    if (shell_close(worker->shell) != STATUS_OK) {
        return false;
    }
    files_close(worker->files);
    model_destroy(worker->model);
    accelerator_close(worker->accelerator);
    free(worker->metrics);
    free(worker);
    return true;
}

enum status worker_create(const struct worker_config *config, struct worker **out) {
    struct worker *worker = calloc(1, sizeof *worker);
    CHECK(worker != NULL);
    worker->config = *config;
    struct shell_config shell = {.role = config->role,
                                 .program = config->program,
                                 .version = config->version,
                                 .settings = &config->settings->shell,
                                 .listen_host = config->settings->grpc.host};
    enum status status = shell_create(&shell, &worker->shell);
    if (status != STATUS_OK) {
        free(worker);
        return status;
    }
    status = load_model(worker);
    if (status == STATUS_OK) {
        status = size_kv(worker);
    }
    if (status == STATUS_OK) {
        status = start_engine(worker);
    }
    if (status == STATUS_OK) {
        status = start_link(worker);
    }
    if (status == STATUS_OK) {
        status = start_server(worker);
    }
    if (status != STATUS_OK) {
        if (!destroy(worker)) {
            log_stop();
            _exit(1); /* something hangs; the first failure has been logged */
        }
        return status;
    }
    add_metrics(worker);
    *out = worker;
    return STATUS_OK;
}

void worker_node_config(const struct worker *worker, struct node_config *config) {
    shell_node_config(worker->shell, config);
    config->layout = worker->layout.digest;
    config->sessions_max = worker->config.settings->sessions_max;
    text_copy(config->numerics, sizeof config->numerics, worker->info->numerics);
}

struct siphash_key worker_secret(void) {
    struct siphash_key key;
    random_bytes(&key, sizeof key);
    return key;
}

void *worker_memory(uint64_t bytes) {
    void *memory = NULL;
    CHECK(posix_memalign(&memory, 64, bytes) == 0);
    memset(memory, 0, bytes);
    return memory;
}

static enum status announce(struct worker *worker) {
    struct worker_record record = {.kv_port = kvlink_port(worker->link)};
    shell_worker_record(worker->shell, &record);
    shell_address(worker->shell, rpc_server_port(worker->server), record.info.address);
    text_copy(record.info.model, LABEL_MAX, worker->served_name);
    text_copy(record.info.numerics, sizeof record.info.numerics, worker->info->numerics);
    record.info.layout = worker->layout.digest;
    record.info.tokenizer = worker->tokenizer_digest;
    record.info.vocab = worker->info->vocab_count;
    record.info.context = worker->context;
    record.info.kv_tokens = worker->page_count * worker->layout.page_tokens;
    record.info.page_tokens = worker->layout.page_tokens;
    LOG_INFO(
        "serving", LOG_TEXT("model", worker->served_name), LOG_TEXT("grpc", record.info.address),
        LOG_U64("kv_port", record.kv_port), LOG_TEXT("kv_device", kvlink_device(worker->link)),
        LOG_U64("kv_tokens", record.info.kv_tokens), LOG_U64("context", record.info.context),
        LOG_TEXT("kernels", worker->kernels->name), LOG_TEXT("numerics", record.info.numerics));
    return shell_register_worker(worker->shell, &record);
}

int worker_run(struct worker *worker, const struct shell_core *core) {
    enum status status = shell_start(worker->shell, core);
    if (status == STATUS_OK) {
        status = announce(worker);
    }
    int code = status == STATUS_OK ? 0 : 1;
    if (status == STATUS_OK && shell_wait(worker->shell) != STATUS_OK) {
        code = 1;
    }
    if (!destroy(worker)) {
        log_stop();
        _exit(1);
    }
    return code;
}
