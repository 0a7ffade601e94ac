/* The engine shell: executes numbered step plans over a pool of KV pages, and decides nothing.
 *
 * Owns the pool, one step thread ("engine", beats at every layer, watchdog limit 30 s) and
 * threads - 1 helpers that sleep between steps. One plan is outstanding at most; it ends in exactly
 * one on_step. A row's tokens and KV are bit-identical whatever shares the step, however the
 * sequence was cut into steps, and for every thread count. Plans are checked: one that names a
 * token, position or page out of range ends with STATUS_RANGE and touches nothing.
 * engine_submit comes from one thread (control); callbacks run on the step thread (on_row: on any
 * of the engine's) and must not block; the pool may be read and written by others only at pages
 * that no outstanding plan names.
 */
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"
#include "base/time.h"
#include "core/layout.h"
#include "core/plan.h"
#include "engine/model.h"

struct engine;

/* Layer `layer` of step `step` is complete: its KV of all rows is in the pool. */
typedef void (*engine_on_layer)(void *context, uint64_t step, uint32_t layer);
/* One row of a component was written into the pool. Called on the thread that wrote it, right
 * after, while it is in that thread's cache: by several threads at once, before on_layer of its
 * layer, never twice at once for one row. For sums, and nothing that takes longer. */
typedef void (*engine_on_row)(void *context, uint32_t page, uint32_t component,
                              uint32_t token_in_page);
/* The step ended. results: one per plan row, in order, borrowed until return; on a failed step
 * (status not STATUS_OK) every result has is_valid false. elapsed: from the step's start to its
 * end, test_step_delay included. */
typedef void (*engine_on_step)(void *context, uint64_t step, enum status status,
                               const struct step_result *results, uint32_t count,
                               struct span elapsed);

struct engine_config {
    const struct model *model;      /* borrowed until engine_destroy */
    const struct kv_layout *layout; /* of that model; copied */
    uint32_t page_count;            /* pages are [0, page_count); >= 1 */
    uint32_t threads;               /* >= 1, <= ENGINE_THREADS_MAX */
    uint32_t rows_max;              /* rows of one plan */
    uint32_t tokens_max;            /* tokens of one plan; >= rows_max */
    engine_on_row on_row;           /* may be NULL */
    engine_on_layer on_layer;       /* called only for plans that want layers; may be NULL */
    engine_on_step on_step;
    void *context;
    uint64_t alone_below;        /* steps of fewer multiply-adds are one thread's; 0: 8 million */
    struct span beat_limit;      /* silence that the watchdog tolerates; 0: 30 s */
    struct span test_step_delay; /* tests only: each step sleeps this long before it computes */
};

#define ENGINE_THREADS_MAX 64u

/* Allocates everything and starts the threads.
 * STATUS_INVALID or STATUS_RANGE: the configuration contradicts itself or the model;
 * STATUS_BUSY: pool or activations do not fit the memory, or the model's accelerator cannot compute
 * it. error receives one sentence. */
MUST_USE enum status engine_create(const struct engine_config *config, struct writer *error,
                                   struct engine **engine_out);
/* Lets an outstanding step end (its on_step is still called), then stops the threads. NULL is
 * accepted. Afterwards the pool is gone: whoever reads or writes it must have stopped. */
void engine_destroy(struct engine *engine);

/* Copies the plan and returns at once. CHECKs that no plan is outstanding (on_step of the previous
 * one has been entered) and that its counts are within rows_max, tokens_max and rows_max whole
 * contexts of pages. A row that names a token, position or page out of range ends the step with
 * STATUS_RANGE; one that lacks sampling or history it needs, with STATUS_INVALID. */
void engine_submit(struct engine *engine, const struct step_plan *plan);

/* The step with this number may end after the layer that it is at, with STATUS_CANCELLED, no tokens
 * and KV rows that are not whole; it may also be over, or end as if nothing had been said. The
 * thread of engine_submit. */
void engine_abandon(struct engine *engine, uint64_t number);

/* The pool: page_count * layout->page_bytes bytes, 4096-aligned; page p, component c, row r is at
 * layout_row_offset(layout, p, c, r). Zero at start. */
unsigned char *engine_kv_base(struct engine *engine);
uint64_t engine_kv_bytes(const struct engine *engine);
const struct kv_layout *engine_kv_layout(const struct engine *engine);

/* Others write these pages of the pool, from now until a plan names them: with an accelerator, the
 * first step that names one reads it anew. The submitting thread only. */
void engine_pages_written(struct engine *engine, const uint32_t *pages, uint32_t count);

/* Fills a free page with NaN in every dtype, so that a read after free shows in the tokens. For
 * debug and test builds; the page must not be named by an outstanding plan. The submitting
 * thread only. */
void engine_poison_page(struct engine *engine, uint32_t page);

#endif
