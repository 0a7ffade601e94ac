/* How the next token is chosen: plain numbers, checked once at the front door, carried to decode.
 *
 * Sampling is keyed by (seed, position): the same request gives the same tokens on any worker, in
 * any batch, before and after a fail-over. Fixed size: what does not fit is refused by name. */
#ifndef CORE_SAMPLING_H
#define CORE_SAMPLING_H

#include <stdbool.h>
#include <stdint.h>

#include "base/prng.h"

#define SAMPLING_STOP_TOKENS_MAX 16u
#define SAMPLING_BIAS_MAX        64u
#define LOGPROBS_TOP_MAX         20u

struct sampling {
    uint64_t seed;
    float temperature;        /* 0 = greedy */
    float top_p;              /* (0, 1]; 1 = off */
    float min_p;              /* [0, 1]; 0 = off */
    int32_t top_k;            /* -1 = off */
    float frequency_penalty;  /* [-2, 2], over generated tokens */
    float presence_penalty;   /* [-2, 2], over generated tokens */
    float repetition_penalty; /* > 0, over prompt and generated tokens; 1 = off */
    uint32_t min_tokens; /* no stop or end-of-sequence token before this many generated tokens */
    uint32_t stop_token_count;
    uint32_t stop_tokens[SAMPLING_STOP_TOKENS_MAX];
    uint32_t bias_count;
    struct {
        uint32_t token;
        float bias; /* [-100, 100], added to the logit */
    } biases[SAMPLING_BIAS_MAX];
    bool ignore_eos;
    uint32_t logprobs; /* 0 = none wanted; else 1 + the alternatives of each token */
};

/* The seed of choice `index` of a request with this seed: choice 0 is the request alone. Public
 * (inference.proto, GenerateRequest.n): never to be changed. */
static inline uint64_t sampling_choice_seed(uint64_t seed, uint32_t index) {
    return index == 0 ? seed : mix64(seed + index * 0x9e3779b97f4a7c15ull);
}

static inline bool sampling_needs_history(const struct sampling *sampling) {
    return sampling->frequency_penalty != 0.0f || sampling->presence_penalty != 0.0f ||
           sampling->repetition_penalty != 1.0f;
}

#endif
