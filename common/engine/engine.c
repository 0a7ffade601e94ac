#include "engine/engine.h"

#include "base/check.h"
#include "engine/block.h"
#include "engine/fail.h"
#include "engine/forward.h"
#include "engine/model_weights.h"
#include "engine/sampler.h"
#include "engine/team.h"
#include "runtime/clock.h"
#include "runtime/log.h"
#include "runtime/thread.h"

#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Multiply-adds of a step that one core does alone: about half a millisecond of work. A tiny
 * model's steps are cut into some forty loops, and waking a helper for each costs more than it
 * brings. */
#define ALONE_BELOW    8000000u
#define BEAT_LIMIT_MS  30000
#define IDLE_WAIT_MS   100
#define TURN_EXPECT_US 60
#define STOP_WAIT_MS   300000 /* ten times the longest silence that the watchdog tolerates */

struct engine {
    struct engine_config config;
    struct kv_layout layout;
    struct arena kv_memory;
    unsigned char *kv; /* in it */
    uint64_t kv_bytes;
    struct team *team;
    struct forward *forward;
    struct thread thread;
    /* The plan's copy: the control thread's until it is submitted, then the step thread's. */
    struct step_plan plan;
    enum status plan_status;
    struct plan_row *rows;      /* [rows_max] */
    struct sampling *samplings; /* [rows_max] */
    uint32_t *tokens;           /* [tokens_max] */
    uint32_t *pages;            /* [pages_max] */
    uint32_t *histories;        /* [rows_max, context_tokens]; touched only where used */
    uint64_t pages_max;
    uint32_t *stale; /* [page_count]: of the plan's pages, those that others wrote */
    uint32_t stale_count;
    bool *is_stale; /* [page_count]; the control thread's; NULL without an accelerator */
    /* The step thread's own. */
    struct step_result *results; /* [rows_max] */
    uint32_t *sampled_row;       /* [rows_max]: which row the n-th sampled one is */
    uint32_t sampled_count;
    unsigned char *scratch; /* [threads, scratch_bytes] */
    uint64_t scratch_bytes;
    pthread_mutex_t turn_lock; /* guards the three below */
    pthread_cond_t turn;
    _Atomic bool is_submitted;  /* waits for the step thread, which also looks without the lock */
    _Atomic uint64_t abandoned; /* number of a step */
    bool is_outstanding;        /* until its on_step is entered */
    bool is_stopping;
};

/* ---- the control thread's side ---- */

/* Every index of a row against its bound, before anything is copied or computed. */
static enum status row_check(const struct engine *engine, const struct step_plan *plan,
                             const struct plan_row *row) {
    const struct model_info *info = &engine->config.model->info;
    uint64_t end = (uint64_t)row->position + row->token_count;
    if (row->token_count == 0 || end > info->context_tokens ||
        (uint64_t)row->token_first + row->token_count > plan->token_count ||
        (uint64_t)row->page_first + row->page_count > plan->page_count ||
        (uint64_t)row->page_count * engine->layout.page_tokens < end) {
        return STATUS_RANGE;
    }
    for (uint32_t i = 0; i < row->token_count; i++) {
        if (plan->tokens[row->token_first + i] >= info->vocab_count) {
            return STATUS_RANGE;
        }
    }
    for (uint32_t i = 0; i < row->page_count; i++) {
        if (plan->pages[row->page_first + i] >= engine->config.page_count) {
            return STATUS_RANGE;
        }
    }
    if (!row->is_sampled) {
        return STATUS_OK;
    }
    if (row->output_first > end) {
        return STATUS_RANGE;
    }
    if (row->sampling == NULL || (row->history == NULL && sampling_needs_history(row->sampling))) {
        return STATUS_INVALID;
    }
    return row->sampling->stop_token_count > SAMPLING_STOP_TOKENS_MAX ||
                   row->sampling->bias_count > SAMPLING_BIAS_MAX
               ? STATUS_RANGE
               : STATUS_OK;
}

static enum status plan_check(const struct engine *engine, const struct step_plan *plan) {
    uint64_t tokens = 0;
    enum status status = STATUS_OK;
    for (uint32_t i = 0; status == STATUS_OK && i < plan->row_count; i++) {
        status = row_check(engine, plan, &plan->rows[i]);
        tokens += plan->rows[i].token_count;
    }
    return status == STATUS_OK && tokens > engine->config.tokens_max ? STATUS_RANGE : status;
}

static void plan_copy(struct engine *engine, const struct step_plan *plan) {
    uint32_t context = engine->config.model->info.context_tokens;
    for (uint32_t i = 0; i < plan->row_count; i++) {
        struct plan_row *row = &engine->rows[i];
        *row = plan->rows[i];
        if (!row->is_sampled) {
            row->sampling = NULL;
            row->history = NULL;
            continue;
        }
        engine->samplings[i] = *row->sampling;
        row->sampling = &engine->samplings[i];
        if (row->history != NULL) {
            uint32_t *history = engine->histories + (size_t)i * context;
            memcpy(history, row->history,
                   ((size_t)row->position + row->token_count) * sizeof(*history));
            row->history = history;
        }
    }
    if (plan->token_count > 0) {
        memcpy(engine->tokens, plan->tokens, plan->token_count * sizeof(*engine->tokens));
    }
    if (plan->page_count > 0) {
        memcpy(engine->pages, plan->pages, plan->page_count * sizeof(*engine->pages));
    }
}

void engine_pages_written(struct engine *engine, const uint32_t *pages, uint32_t count) {
    for (uint32_t i = 0; engine->is_stale != NULL && i < count; i++) {
        CHECK_OP(pages[i], <, engine->config.page_count);
        engine->is_stale[pages[i]] = true;
    }
}

void engine_abandon(struct engine *engine, uint64_t number) {
    atomic_store_explicit(&engine->abandoned, number, memory_order_relaxed);
}

/* Which of the plan's pages the accelerator has to read anew. */
static void stale_collect(struct engine *engine, const struct step_plan *plan) {
    engine->stale_count = 0;
    for (uint32_t i = 0; engine->is_stale != NULL && i < plan->page_count; i++) {
        uint32_t page = plan->pages[i];
        if (engine->is_stale[page]) {
            engine->is_stale[page] = false;
            engine->stale[engine->stale_count++] = page;
        }
    }
}

void engine_submit(struct engine *engine, const struct step_plan *plan) {
    CHECK_OP(plan->row_count, <=, engine->config.rows_max);
    CHECK_OP(plan->token_count, <=, engine->config.tokens_max);
    CHECK_OP(plan->page_count, <=, engine->pages_max);
    CHECK(pthread_mutex_lock(&engine->turn_lock) == 0);
    CHECK(!engine->is_outstanding);
    CHECK(!engine->is_stopping);
    engine->is_outstanding = true;
    CHECK(pthread_mutex_unlock(&engine->turn_lock) == 0);
    engine->plan_status = plan_check(engine, plan);
    engine->plan = *plan;
    if (engine->plan_status == STATUS_OK) {
        plan_copy(engine, plan);
        stale_collect(engine, plan);
    } else { /* only the entries' names are needed, for the results */
        for (uint32_t i = 0; i < plan->row_count; i++) {
            engine->rows[i] = (struct plan_row){.entry = plan->rows[i].entry};
        }
    }
    engine->plan.rows = engine->rows;
    engine->plan.tokens = engine->tokens;
    engine->plan.pages = engine->pages;
    CHECK(pthread_mutex_lock(&engine->turn_lock) == 0);
    engine->is_submitted = true;
    CHECK(pthread_cond_signal(&engine->turn) == 0);
    CHECK(pthread_mutex_unlock(&engine->turn_lock) == 0);
}

/* ---- the step thread's side ---- */

static bool layer_done(void *context, uint32_t layer) {
    struct engine *engine = context;
    thread_beat(&engine->thread.beat);
    if (engine->plan.wants_layers && engine->config.on_layer != NULL) {
        engine->config.on_layer(engine->config.context, engine->plan.number, layer);
    }
    return atomic_load_explicit(&engine->abandoned, memory_order_relaxed) != engine->plan.number;
}

static void sample_part(void *context, uint32_t part, uint32_t worker) {
    struct engine *engine = context;
    const struct model_info *info = &engine->config.model->info;
    const struct plan_row *row = &engine->rows[engine->sampled_row[part]];
    struct sampler_input input = {.kernels = engine->config.model->kernels,
                                  .logits = forward_logits(engine->forward, part),
                                  .vocab_count = info->vocab_count,
                                  .sampling = row->sampling,
                                  .position = row->position + row->token_count,
                                  .output_first = row->output_first,
                                  .history = row->history,
                                  .eos_tokens = info->eos_tokens,
                                  .eos_count = info->eos_count,
                                  .scratch = engine->scratch + worker * engine->scratch_bytes};
    struct sampler_choice choice = sampler_choose(&input);
    struct step_result *result = &engine->results[engine->sampled_row[part]];
    result->token = choice.token;
    result->logprob = choice.logprob;
    result->is_valid = choice.is_valid;
    result->top_count = choice.top_count;
    memcpy(result->top_tokens, choice.top_tokens, choice.top_count * sizeof(uint32_t));
    memcpy(result->top_logprobs, choice.top_logprobs, choice.top_count * sizeof(float));
    if (!choice.is_valid) {
        LOG_ERROR("logits are not finite: the model overflows, or its memory is damaged",
                  LOG_U64("step", engine->plan.number), LOG_U64("position", input.position));
    }
}

/* Sleeps in slices, so that the watchdog sees a slow engine and not a dead one. */
static void delay_run(struct engine *engine) {
    struct instant end = instant_add(clock_now(), engine->config.test_step_delay);
    while (!instant_reached(clock_now(), end)) {
        thread_beat(&engine->thread.beat);
        struct instant slice = instant_add(clock_now(), span_ms(IDLE_WAIT_MS));
        struct timespec until = clock_to_timespec(instant_min(slice, end));
        (void)clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL); /* the loop looks */
    }
}

static void step_run(struct engine *engine) {
    const struct step_plan *plan = &engine->plan;
    for (uint32_t i = 0; i < plan->row_count; i++) {
        engine->results[i] = (struct step_result){.entry = engine->rows[i].entry};
    }
    if (engine->plan_status != STATUS_OK) {
        return;
    }
    engine->sampled_count = 0;
    for (uint32_t i = 0; i < plan->row_count; i++) {
        if (engine->rows[i].is_sampled) {
            engine->sampled_row[engine->sampled_count++] = i;
        }
    }
    struct forward_input input = {.rows = plan->rows,
                                  .row_count = plan->row_count,
                                  .tokens = plan->tokens,
                                  .pages = plan->pages,
                                  .stale = engine->stale,
                                  .stale_count = engine->stale_count};
    bool is_whole = forward_run(engine->forward, &input, layer_done, engine);
    thread_beat(&engine->thread.beat);
    if (forward_failure(engine->forward) != NULL) {
        engine->plan_status = STATUS_IO;
        return;
    }
    if (!is_whole) {
        engine->plan_status = STATUS_CANCELLED;
        return;
    }
    team_run(engine->team, engine->sampled_count, sample_part, engine);
}

/* After a step the next plan mostly is some ten microseconds away, as much as it takes to sleep and
 * to be woken. Whoever wants the core meanwhile, the thread that makes the plan perhaps, gets it.
 */
static void turn_expect(const struct engine *engine) {
    struct instant enough = instant_add(clock_now(), span_us(TURN_EXPECT_US));
    while (!atomic_load_explicit(&engine->is_submitted, memory_order_relaxed) &&
           !instant_reached(clock_now(), enough)) {
        (void)sched_yield();
    }
}

/* False: nothing to do for now. */
static bool turn_wait(struct engine *engine, bool *is_stopping_out) {
    struct timespec until = clock_to_timespec(instant_add(clock_now(), span_ms(IDLE_WAIT_MS)));
    CHECK(pthread_mutex_lock(&engine->turn_lock) == 0);
    if (!engine->is_submitted && !engine->is_stopping) {
        (void)pthread_cond_timedwait(&engine->turn, &engine->turn_lock, &until); /* or a beat */
    }
    bool is_submitted = engine->is_submitted;
    engine->is_submitted = false;
    *is_stopping_out = engine->is_stopping && !engine->is_outstanding;
    CHECK(pthread_mutex_unlock(&engine->turn_lock) == 0);
    return is_submitted;
}

static void engine_run(struct thread *self, void *arg) {
    struct engine *engine = arg;
    bool is_stopping = false;
    while (!is_stopping) {
        thread_beat(&self->beat);
        if (!turn_wait(engine, &is_stopping)) {
            continue;
        }
        struct instant start = clock_now();
        if (engine->config.test_step_delay.ns > 0) {
            delay_run(engine);
        }
        step_run(engine);
        struct span elapsed = instant_since(clock_now(), start);
        thread_beat(&self->beat);
        /* The next plan may be submitted, from another thread, while on_step still reads results.
         */
        uint64_t number = engine->plan.number;
        uint32_t count = engine->plan.row_count;
        enum status status = engine->plan_status;
        CHECK(pthread_mutex_lock(&engine->turn_lock) == 0);
        engine->is_outstanding = false;
        CHECK(pthread_mutex_unlock(&engine->turn_lock) == 0);
        engine->config.on_step(engine->config.context, number, status, engine->results, count,
                               elapsed);
        if (forward_failure(engine->forward) != NULL) {
            /* No later step can succeed. A thread that ends unasked ends the process, at once. */
            LOG_ERROR("the device is lost", LOG_TEXT("why", forward_failure(engine->forward)));
            return;
        }
        turn_expect(engine);
    }
}

/* ---- life ---- */

static enum status config_check(const struct engine_config *config, struct writer *error) {
    if (config->page_count == 0 || config->threads == 0 || config->threads > ENGINE_THREADS_MAX ||
        config->rows_max == 0 || config->tokens_max < config->rows_max) {
        return fail(
            error, STATUS_RANGE,
            "the engine needs pages, 1 to %u threads, rows, and at least as many tokens per "
            "step as rows: %u pages, %u threads, %u rows, %u tokens were asked",
            ENGINE_THREADS_MAX, config->page_count, config->threads, config->rows_max,
            config->tokens_max);
    }
    if (config->on_step == NULL) {
        return fail(error, STATUS_INVALID, "the engine needs an on_step");
    }
    struct kv_layout *own = malloc(sizeof(*own));
    CHECK(own != NULL);
    enum status status = model_layout(config->model, config->layout->page_tokens, own);
    if (status != STATUS_OK || !layout_digest_equal(own->digest, config->layout->digest) ||
        own->page_bytes != config->layout->page_bytes) {
        status = fail(error, STATUS_INVALID, "the KV layout is not this model's");
    }
    free(own);
    return status;
}

static void *array_take(uint64_t count, uint64_t size) {
    void *memory = calloc(count, size);
    CHECK(memory != NULL);
    return memory;
}

static void buffers_take(struct engine *engine) {
    const struct engine_config *config = &engine->config;
    const struct model_info *info = &config->model->info;
    uint64_t page_tokens = engine->layout.page_tokens;
    engine->pages_max = config->rows_max * ((info->context_tokens + page_tokens - 1) / page_tokens);
    engine->rows = array_take(config->rows_max, sizeof(*engine->rows));
    engine->samplings = array_take(config->rows_max, sizeof(*engine->samplings));
    engine->tokens = array_take(config->tokens_max, sizeof(*engine->tokens));
    engine->pages = array_take(engine->pages_max, sizeof(*engine->pages));
    engine->histories =
        array_take((uint64_t)config->rows_max * info->context_tokens, sizeof(uint32_t));
    if (config->model->accelerator != NULL) {
        engine->stale = array_take(config->page_count, sizeof(*engine->stale));
        engine->is_stale = array_take(config->page_count, sizeof(*engine->is_stale));
    }
    engine->results = array_take(config->rows_max, sizeof(*engine->results));
    engine->sampled_row = array_take(config->rows_max, sizeof(*engine->sampled_row));
    engine->scratch_bytes = (sampler_scratch_bytes(info->vocab_count) + 63) / 64 * 64;
    engine->scratch = array_take(config->threads, engine->scratch_bytes);
}

static enum status kv_take(struct engine *engine, struct writer *error) {
    char what[96];
    engine->kv_bytes = (uint64_t)engine->config.page_count * engine->layout.page_bytes;
    (void)snprintf(what, sizeof(what), "the KV pool (%u pages of %u tokens)",
                   engine->config.page_count, engine->layout.page_tokens);
    (void)arena_take_unset(&engine->kv_memory, engine->kv_bytes);
    enum status status =
        block_take(&engine->kv_memory, what,
                   "ask for fewer KV tokens, or give the process more memory", error);
    if (status == STATUS_OK) {
        engine->kv = arena_take_unset(&engine->kv_memory, engine->kv_bytes);
    }
    return status;
}

static void turn_init(struct engine *engine) {
    pthread_condattr_t attributes;
    CHECK(pthread_condattr_init(&attributes) == 0);
    CHECK(pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_cond_init(&engine->turn, &attributes) == 0);
    CHECK(pthread_condattr_destroy(&attributes) == 0);
    CHECK(pthread_mutex_init(&engine->turn_lock, NULL) == 0);
}

enum status engine_create(const struct engine_config *config, struct writer *error,
                          struct engine **engine_out) {
    enum status status = config_check(config, error);
    if (status != STATUS_OK) {
        return status;
    }
    struct engine *engine = array_take(1, sizeof(*engine));
    engine->config = *config;
    engine->layout = *config->layout;
    engine->config.layout = &engine->layout;
    turn_init(engine);
    status = kv_take(engine, error);
    if (status == STATUS_OK) {
        buffers_take(engine);
        status = team_create(config->threads, &engine->team);
        if (status != STATUS_OK) {
            (void)fail(error, status, "the system has no room for %u threads", config->threads);
        }
    }
    if (status == STATUS_OK) {
        engine->forward = forward_create(&(struct forward_config){
            .model = config->model,
            .layout = &engine->layout,
            .kv = engine->kv,
            .page_count = config->page_count,
            .team = engine->team,
            .rows_max = config->rows_max,
            .tokens_max = config->tokens_max,
            .on_row = config->on_row,
            .on_row_context = config->context,
            .alone_below = config->alone_below != 0 ? config->alone_below : ALONE_BELOW,
            .error = error});
        status = engine->forward != NULL ? STATUS_OK : STATUS_BUSY;
    }
    if (status == STATUS_OK) {
        struct thread_config thread = {
            .name = "engine",
            .fn = engine_run,
            .arg = engine,
            .beat_limit = config->beat_limit.ns > 0 ? config->beat_limit : span_ms(BEAT_LIMIT_MS)};
        status = thread_start(&engine->thread, &thread);
        if (status != STATUS_OK) {
            (void)fail(error, status, "the system has no thread left for the engine");
        }
    }
    if (status != STATUS_OK) {
        engine_destroy(engine);
        return status;
    }
    *engine_out = engine;
    return STATUS_OK;
}

void engine_destroy(struct engine *engine) {
    if (engine == NULL) {
        return;
    }
    thread_expect_end(&engine->thread);
    CHECK(pthread_mutex_lock(&engine->turn_lock) == 0);
    engine->is_stopping = true;
    CHECK(pthread_cond_signal(&engine->turn) == 0);
    CHECK(pthread_mutex_unlock(&engine->turn_lock) == 0);
    struct instant deadline = instant_add(clock_now(), span_ms(STOP_WAIT_MS));
    CHECK(thread_join(&engine->thread, deadline) == STATUS_OK);
    forward_destroy(engine->forward);
    team_destroy(engine->team);
    block_free(&engine->kv_memory);
    free(engine->rows);
    free(engine->samplings);
    free(engine->tokens);
    free(engine->pages);
    free(engine->stale);
    free(engine->is_stale);
    free(engine->histories);
    free(engine->results);
    free(engine->sampled_row);
    free(engine->scratch);
    CHECK(pthread_cond_destroy(&engine->turn) == 0);
    CHECK(pthread_mutex_destroy(&engine->turn_lock) == 0);
    free(engine);
}

unsigned char *engine_kv_base(struct engine *engine) {
    return engine->kv;
}
uint64_t engine_kv_bytes(const struct engine *engine) {
    return engine->kv_bytes;
}
const struct kv_layout *engine_kv_layout(const struct engine *engine) {
    return &engine->layout;
}

void engine_poison_page(struct engine *engine, uint32_t page) {
    CHECK_OP(page, <, engine->config.page_count);
    /* All bits set is a NaN in F32, F16 and BF16. */
    memset(engine->kv + (uint64_t)page * engine->layout.page_bytes, 0xff,
           engine->layout.page_bytes);
    engine_pages_written(engine, &page, 1);
}
