/* The numbered step plan: what the engine computes next, decided by the core and by nobody else.
 *
 * One plan is outstanding per engine. Several ranks given the same plan can never disagree: they
 * take no decision of their own. Pointers are the core's memory, borrowed until the next core step:
 * the engine copies what it needs at submission. */
#ifndef CORE_PLAN_H
#define CORE_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "core/sampling.h"

/* Sequences in one step at most: what one step's results can bring must fit into one turn's
 * effects. */
#define STEP_ROWS_MAX 256u

/* One sequence's share of a step: compute tokens [position, position + token_count), write their
 * KV. */
struct plan_row {
    uint64_t entry;       /* slot id; echoed in the result */
    uint32_t position;    /* absolute position of the first token */
    uint32_t token_count; /* >= 1 */
    uint32_t token_first; /* index into plan.tokens */
    uint32_t
        page_first; /* index into plan.pages: the pages of positions [0, position + token_count) */
    uint32_t page_count;
    bool is_sampled;       /* choose a token from the logits of the last token; it gets position +
                              token_count */
    uint32_t output_first; /* absolute position of the first generated token: its index from here is
                              min_tokens' count */
    const struct sampling *sampling; /* NULL unless is_sampled */
    const uint32_t
        *history; /* all tokens [0, position + token_count); NULL unless penalties need it */
};

struct step_plan {
    uint64_t number; /* 1, 2, 3, ... per process */
    uint32_t row_count;
    uint32_t token_count;
    uint32_t page_count;
    const struct plan_row *rows;
    const uint32_t *tokens;
    const uint32_t *pages;
    bool wants_layers; /* report each layer as soon as its KV is complete in all rows (prefill) */
};

struct step_result {
    uint64_t entry;
    uint32_t token; /* valid if the row was sampled and is_valid */
    bool is_valid;  /* false: logits were not finite, or nothing was to be sampled */
    float logprob;  /* natural log of the chosen token's probability before penalties; finite; 0
                     * unless sampling.logprobs asks for it */
    /* The most likely tokens before penalties, the likeliest first, ties by id: as many as
     * sampling.logprobs wants and the vocabulary has. */
    uint32_t top_count;
    uint32_t top_tokens[LOGPROBS_TOP_MAX];
    float top_logprobs[LOGPROBS_TOP_MAX];
};

#endif
