#include "unit/engine/driver.h"

#include "base/bytes.h"
#include "base/prng.h"
#include "kernels/kernels.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

/* The log-probability is asked for: a wrong bit of any logit moves it. */
const struct sampling driver_greedy = {.temperature = 0,
                                       .top_p = 1,
                                       .top_k = -1,
                                       .repetition_penalty = 1,
                                       .logprobs = 1,
                                       .ignore_eos = true};

const char *const driver_backends[DRIVER_BACKENDS] = {KERNELS_NAMES};

struct model *driver_model_on(const char *path, const struct kernels *kernels,
                              struct accelerator *accelerator, enum model_weights weights) {
    char directory[512];
    char text[512];
    struct writer error;
    struct model *model = NULL;
    writer_init(&error, text, sizeof(text));
    (void)snprintf(directory, sizeof(directory), "%s/tests/data/%s", BATON_SOURCE_DIR, path);
    if (model_create_on(directory, kernels, accelerator, weights, &error, &model) != STATUS_OK) {
        fail_msg("%.*s", (int)error.len, text);
    }
    return model;
}

struct model *driver_model_with(const char *path, const struct kernels *kernels,
                                enum model_weights weights) {
    return driver_model_on(path, kernels, NULL, weights);
}

struct model *driver_model_as(const char *path, const char *backend, enum model_weights weights) {
    const struct kernels *kernels = kernels_select(backend);
    return kernels != NULL ? driver_model_with(path, kernels, weights) : NULL;
}

struct model *driver_model(const char *path, const char *backend) {
    return driver_model_as(path, backend, MODEL_WEIGHTS_FILE);
}

static void on_layer(void *context, uint64_t step, uint32_t layer) {
    struct driver *driver = context;
    assert_int_equal(pthread_mutex_lock(&driver->lock), 0);
    if (step == driver->number && driver->layer_count < DRIVER_LAYERS) {
        driver->layers[driver->layer_count++] = layer;
    }
    assert_int_equal(pthread_mutex_unlock(&driver->lock), 0);
}

static void on_step(void *context, uint64_t step, enum status status,
                    const struct step_result *results, uint32_t count, struct span elapsed) {
    struct driver *driver = context;
    assert_int_equal(pthread_mutex_lock(&driver->lock), 0);
    driver->ends++;
    driver->ended_number = step;
    driver->status = status;
    driver->result_count = count;
    memcpy(driver->results, results, count * sizeof(*results));
    driver->elapsed = elapsed;
    assert_int_equal(pthread_cond_signal(&driver->changed), 0);
    assert_int_equal(pthread_mutex_unlock(&driver->lock), 0);
}

void driver_open(struct driver *driver, const struct driver_config *config) {
    memset(driver, 0, sizeof(*driver));
    driver->model = config->model;
    driver->layout = calloc(1, sizeof(*driver->layout));
    assert_non_null(driver->layout);
    assert_int_equal(model_layout(config->model, config->page_tokens, driver->layout), STATUS_OK);
    assert_int_equal(pthread_mutex_init(&driver->lock, NULL), 0);
    assert_int_equal(pthread_cond_init(&driver->changed, NULL), 0);
    char text[512];
    struct writer error;
    writer_init(&error, text, sizeof(text));
    struct engine_config engine = {
        .model = config->model,
        .layout = driver->layout,
        .page_count = config->page_count,
        .threads = config->threads,
        .rows_max = config->tokens_max < DRIVER_ROWS ? config->tokens_max : DRIVER_ROWS,
        .tokens_max = config->tokens_max,
        .on_row = config->on_row,
        .on_layer = on_layer,
        .on_step = on_step,
        .context = driver,
        .alone_below = config->alone_below != 0 ? config->alone_below : 1,
        .test_step_delay = config->delay};
    if (engine_create(&engine, &error, &driver->engine) != STATUS_OK) {
        fail_msg("%.*s", (int)error.len, text);
    }
    for (uint32_t page = 0; page < config->page_count; page++) {
        engine_poison_page(driver->engine, page);
    }
}

void driver_close(struct driver *driver) {
    engine_destroy(driver->engine);
    assert_int_equal(pthread_cond_destroy(&driver->changed), 0);
    assert_int_equal(pthread_mutex_destroy(&driver->lock), 0);
    free(driver->layout);
}

void driver_step(struct driver *driver, struct step_plan *plan) {
    struct timespec deadline;
    assert_int_equal(clock_gettime(CLOCK_REALTIME, &deadline), 0);
    deadline.tv_sec += 100;
    assert_int_equal(pthread_mutex_lock(&driver->lock), 0);
    plan->number = ++driver->number;
    driver->ends = 0;
    driver->layer_count = 0;
    assert_int_equal(pthread_mutex_unlock(&driver->lock), 0);
    engine_submit(driver->engine, plan);
    assert_int_equal(pthread_mutex_lock(&driver->lock), 0);
    while (driver->ends == 0) {
        assert_int_equal(pthread_cond_timedwait(&driver->changed, &driver->lock, &deadline), 0);
    }
    assert_int_equal(driver->ends, 1);
    assert_int_equal(driver->ended_number, plan->number);
    assert_int_equal(driver->result_count, plan->row_count);
    for (uint32_t i = 0; i < plan->row_count; i++) {
        assert_int_equal(driver->results[i].entry, plan->rows[i].entry);
    }
    assert_int_equal(pthread_mutex_unlock(&driver->lock), 0);
}

void sequence_init(struct sequence *sequence, const uint32_t *prompt, uint32_t count,
                   const uint32_t *pages, uint32_t page_count) {
    memset(sequence, 0, sizeof(*sequence));
    memcpy(sequence->tokens, prompt, count * sizeof(*prompt));
    if (page_count > 0) {
        memcpy(sequence->pages, pages, page_count * sizeof(*pages));
    }
    sequence->token_count = count;
    sequence->prompt_count = count;
    sequence->page_count = page_count;
    sequence->sampling = driver_greedy;
}

void batch_clear(struct batch *batch) {
    batch->row_count = 0;
    batch->token_count = 0;
    batch->page_count = 0;
}

void batch_add(struct batch *batch, struct sequence *sequence, uint32_t count) {
    bool is_sampled = sequence->computed + count == sequence->token_count;
    uint32_t row = batch->row_count++;
    batch->sequences[row] = sequence;
    batch->rows[row] = (struct plan_row){.entry = 1000 + row,
                                         .position = sequence->computed,
                                         .token_count = count,
                                         .token_first = batch->token_count,
                                         .page_first = batch->page_count,
                                         .page_count = sequence->page_count,
                                         .is_sampled = is_sampled,
                                         .output_first = sequence->prompt_count,
                                         .sampling = is_sampled ? &sequence->sampling : NULL,
                                         .history = sequence->tokens};
    memcpy(batch->tokens + batch->token_count, sequence->tokens + sequence->computed,
           count * sizeof(uint32_t));
    batch->token_count += count;
    memcpy(batch->pages + batch->page_count, sequence->pages,
           sequence->page_count * sizeof(uint32_t));
    batch->page_count += sequence->page_count;
}

static uint64_t tops_digest(const struct step_result *result) {
    uint64_t digest = result->top_count;
    for (uint32_t i = 0; i < result->top_count; i++) {
        uint32_t bits = 0;
        memcpy(&bits, &result->top_logprobs[i], sizeof bits);
        digest = mix64(digest ^ ((uint64_t)result->top_tokens[i] << 32 | bits));
    }
    return digest;
}

struct step_plan batch_plan(const struct batch *batch) {
    return (struct step_plan){.row_count = batch->row_count,
                              .token_count = batch->token_count,
                              .page_count = batch->page_count,
                              .rows = batch->rows,
                              .tokens = batch->tokens,
                              .pages = batch->pages};
}

void batch_run(struct driver *driver, struct batch *batch) {
    struct step_plan plan = batch_plan(batch);
    driver_step(driver, &plan);
    assert_int_equal(driver->status, STATUS_OK);
    for (uint32_t i = 0; i < batch->row_count; i++) {
        struct sequence *sequence = batch->sequences[i];
        sequence->computed += batch->rows[i].token_count;
        assert_int_equal(driver->results[i].is_valid, batch->rows[i].is_sampled);
        if (batch->rows[i].is_sampled) {
            sequence->tokens[sequence->token_count++] = driver->results[i].token;
            sequence->logprob = driver->results[i].logprob;
            sequence->tops = tops_digest(&driver->results[i]);
        }
    }
}
