/* The forward pass of one step: tokens in, KV into the pool, logits of the sampled rows out.
 *
 * Takes checked input only. Every activation is f32. Called on the step thread; shares its loops
 * with the team. */
#ifndef ENGINE_FORWARD_H
#define ENGINE_FORWARD_H

#include <stdbool.h>
#include <stdint.h>

#include "core/layout.h"
#include "core/plan.h"
#include "engine/model.h"

struct forward;
struct team;
struct writer;

/* As engine_on_row. */
typedef void (*forward_on_row)(void *context, uint32_t page, uint32_t component,
                               uint32_t token_in_page);

/* Borrows everything until forward_destroy. */
struct forward_config {
    const struct model *model;
    const struct kv_layout *layout;
    unsigned char *kv;
    uint32_t page_count; /* of kv; only with an accelerator */
    struct team *team;
    uint32_t rows_max;
    uint32_t tokens_max;
    forward_on_row on_row; /* may be NULL */
    void *on_row_context;
    uint64_t alone_below; /* as in engine_config */
    struct writer *error; /* only with an accelerator: one sentence */
};

struct forward_input {
    const struct plan_row *rows; /* token_first and page_first index the two below */
    uint32_t row_count;
    const uint32_t *tokens;
    const uint32_t *pages;
    const uint32_t *stale; /* pages of kv that others wrote; only with an accelerator */
    uint32_t stale_count;
};

/* `layer` is complete in the pool for all rows; called on the step thread. False: the rest need not
 * be computed. */
typedef bool (*forward_on_layer)(void *context, uint32_t layer);
static inline bool forward_tell(forward_on_layer on_layer, void *context, uint32_t layer) {
    return on_layer == NULL || on_layer(context, layer);
}

/* A model on an accelerator runs there: forward_device.h. NULL if that has no room, or cannot. */
struct forward *forward_create(const struct forward_config *config);
/* Accepts NULL. */
void forward_destroy(struct forward *forward);
/* Runs all layers, then the head for the last token of each sampled row. on_layer: may be NULL.
 * False: that ended it before its end, and nothing of it counts. */
bool forward_run(struct forward *forward, const struct forward_input *input,
                 forward_on_layer on_layer, void *context);
/* Logits of the n-th sampled row of the last run, [vocab_count]; may be changed in place. */
float *forward_logits(struct forward *forward, uint32_t n);
/* NULL; or the sentence, once an accelerator was lost: that run and all later ones are void. */
const char *forward_failure(const struct forward *forward);

#endif
