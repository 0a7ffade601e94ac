/* A synchronous driver of an engine, for tests: submit a plan, wait for its one end.
 *
 * Records what the callbacks said. One thread uses it; failures are cmocka failures. */
#ifndef TESTS_ENGINE_DRIVER_H
#define TESTS_ENGINE_DRIVER_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/engine.h"

struct kernels;

#define DRIVER_ROWS   160u
#define DRIVER_LAYERS 64u

struct driver {
    const struct model *model;
    struct kv_layout *layout;
    struct engine *engine;
    uint64_t number;
    pthread_mutex_t lock; /* guards what the callbacks write */
    pthread_cond_t changed;
    uint32_t ends; /* on_step calls of the last plan: must be 1 */
    uint64_t ended_number;
    enum status status;
    uint32_t result_count;
    struct step_result results[DRIVER_ROWS];
    struct span elapsed;
    uint32_t layer_count;
    uint32_t layers[DRIVER_LAYERS];
};

struct driver_config {
    const struct model *model;
    uint32_t page_tokens;
    uint32_t page_count;
    uint32_t threads;
    uint32_t tokens_max;
    engine_on_row on_row; /* or NULL; its context is the driver */
    uint64_t alone_below; /* 0: helpers work, however small the step */
    struct span delay;
};

/* Every backend there is; a CPU may lack some. */
#define DRIVER_BACKENDS 5u
extern const char *const driver_backends[DRIVER_BACKENDS];

/* A model from the source tree's data, opened with a backend ("c", "avx2"); NULL if the CPU lacks
 * it. */
struct model *driver_model(const char *path_in_tests_data, const char *backend);
struct model *driver_model_as(const char *path_in_tests_data, const char *backend,
                              enum model_weights weights);
/* With its matrices on an accelerator, which lives as long as the model. */
struct accelerator;
struct model *driver_model_on(const char *path_in_tests_data, const struct kernels *kernels,
                              struct accelerator *accelerator, enum model_weights weights);
/* With a table of the test's own, which lives as long as the model. */
struct model *driver_model_with(const char *path_in_tests_data, const struct kernels *kernels,
                                enum model_weights weights);

void driver_open(struct driver *driver, const struct driver_config *config);
void driver_close(struct driver *driver);
/* Numbers the plan, submits it and waits for its end; fails unless there is exactly one. */
void driver_step(struct driver *driver, struct step_plan *plan);

/* One sequence with its pages, computed piece by piece. */
struct sequence {
    uint32_t tokens[1024];
    uint32_t token_count; /* known tokens */
    uint32_t computed;    /* of which have KV */
    uint32_t prompt_count;
    uint32_t pages[1024];
    uint32_t page_count;
    struct sampling sampling;
    float logprob; /* of the last sampled token */
    uint64_t tops; /* digest of its alternatives */
};

extern const struct sampling driver_greedy;

void sequence_init(struct sequence *sequence, const uint32_t *prompt, uint32_t count,
                   const uint32_t *pages, uint32_t page_count);
/* Fills row i of a plan under construction with the next `count` tokens of the sequence. A row that
 * reaches the last known token is sampled. */
struct batch {
    struct plan_row rows[DRIVER_ROWS];
    struct sequence *sequences[DRIVER_ROWS];
    uint32_t row_count;
    uint32_t tokens[8192];
    uint32_t token_count;
    uint32_t pages[65536];
    uint32_t page_count;
};
void batch_clear(struct batch *batch);
void batch_add(struct batch *batch, struct sequence *sequence, uint32_t count);
/* Borrows the batch. */
struct step_plan batch_plan(const struct batch *batch);
/* Runs the batch; sampled rows get their token appended. All must be valid. */
void batch_run(struct driver *driver, struct batch *batch);

#endif
