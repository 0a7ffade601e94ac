/* The sampler: one token from one row of logits; pure, deterministic, no allocation.
 *
 * Order: repetition, frequency and presence penalties; bias; min_tokens (stop and end tokens
 * removed); temperature 0 takes the largest (lowest id wins a tie); else temperature, top-k, top-p
 * (over what top-k kept), min-p (against the largest), then one draw by prng_at(seed, position).
 * Sums are doubles in a fixed order and the exponential is the kernels', so the same logits give
 * the same token on every machine. Called on the step thread. */
#ifndef ENGINE_SAMPLER_H
#define ENGINE_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

#include "core/sampling.h"
#include "kernels/kernels.h"

struct sampler_input {
    const struct kernels *kernels; /* whose exponential is taken: all have the same bits */
    float *logits;                 /* [vocab_count]; changed in place */
    uint32_t vocab_count;
    const struct sampling *sampling;
    uint32_t position;       /* absolute position the chosen token will have */
    uint32_t output_first;   /* absolute position of the first generated token */
    const uint32_t *history; /* tokens [0, position); NULL unless sampling_needs_history */
    const uint32_t *eos_tokens;
    uint32_t eos_count;
    void *scratch; /* sampler_scratch_bytes(vocab_count) bytes, 16-aligned */
};

struct sampler_choice {
    uint32_t token;
    float logprob; /* natural log of the token's probability under the untouched logits; finite; 0
                    * unless sampling.logprobs asks for it */
    bool is_valid; /* false: a logit was NaN or infinite, or nothing was left to choose */
    /* The most likely tokens under the untouched logits, the likeliest first, ties by id: as many
     * as sampling.logprobs wants, at most vocab_count. */
    uint32_t top_count;
    uint32_t top_tokens[LOGPROBS_TOP_MAX];
    float top_logprobs[LOGPROBS_TOP_MAX];
};

uint64_t sampler_scratch_bytes(uint32_t vocab_count);
/* Tokens in sampling, history and eos_tokens that are >= vocab_count are ignored. */
struct sampler_choice sampler_choose(const struct sampler_input *input);

#endif
