#include "engine/sampler.h"

#include "base/check.h"
#include "base/prng.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct candidate {
    double weight; /* e^((logit - largest) / temperature) */
    float logit;
    uint32_t token;
};

uint64_t sampler_scratch_bytes(uint32_t vocab_count) {
    return (uint64_t)vocab_count * (sizeof(struct candidate) + sizeof(float) + sizeof(uint32_t));
}

#define LANES 16u  /* what a compiler takes at once, and more */
#define BLOCK 256u /* exponentials at once */

/* The largest of `count` logits that are not NaN, or -INFINITY. */
static float largest_of(const float *logits, uint32_t count) {
    float largest = -INFINITY;
    float lanes[LANES];
    for (uint32_t j = 0; j < LANES; j++) {
        lanes[j] = -INFINITY;
    }
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (uint32_t j = 0; j < LANES; j++) {
            lanes[j] = logits[i + j] > lanes[j] ? logits[i + j] : lanes[j];
        }
    }
    for (; i < count; i++) {
        largest = logits[i] > largest ? logits[i] : largest;
    }
    for (uint32_t j = 0; j < LANES; j++) {
        largest = lanes[j] > largest ? lanes[j] : largest;
    }
    return largest;
}

static bool are_finite(const float *logits, uint32_t count) {
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < count; i++) {
        wrong |= !(fabsf(logits[i]) <= FLT_MAX);
    }
    return count > 0 && wrong == 0;
}

/* log of the sum of e^(logit - largest): four chains, then one fixed order. */
static double log_sum(const struct sampler_input *input, float largest) {
    double sum[4] = {0};
    double parts[BLOCK];
    for (uint32_t first = 0; first < input->vocab_count; first += BLOCK) {
        uint32_t rest = input->vocab_count - first;
        uint32_t count = rest < BLOCK ? rest : BLOCK;
        input->kernels->exps(parts, input->logits + first, count, largest, 1.0f);
        for (uint32_t i = count; i % 4 != 0; i++) {
            parts[i] = 0.0;
        }
        for (uint32_t i = 0; i < count; i += 4) {
            for (uint32_t j = 0; j < 4; j++) {
                sum[j] += parts[i + j];
            }
        }
    }
    return log((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

static void penalties_apply(const struct sampler_input *input, uint32_t *seen) {
    const struct sampling *sampling = input->sampling;
    memset(seen, 0, input->vocab_count * sizeof(*seen));
    for (uint32_t i = 0; i < input->position; i++) {
        uint32_t token = input->history[i];
        if (token < input->vocab_count) { /* bit 0: seen at all; above: times generated */
            seen[token] = (seen[token] | 1u) + (i >= input->output_first ? 2u : 0u);
        }
    }
    for (uint32_t token = 0; token < input->vocab_count; token++) {
        if (seen[token] == 0) {
            continue;
        }
        float logit = input->logits[token];
        logit = logit > 0.0f ? logit / sampling->repetition_penalty
                             : logit * sampling->repetition_penalty;
        uint32_t times = seen[token] >> 1;
        if (times > 0) {
            logit -= sampling->frequency_penalty * (float)times;
            logit -= sampling->presence_penalty;
        }
        input->logits[token] = logit;
    }
}

static void tokens_remove(const struct sampler_input *input, const uint32_t *tokens,
                          uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        if (tokens[i] < input->vocab_count) {
            input->logits[tokens[i]] = -INFINITY;
        }
    }
}

/* Returns the logits as the model gave them: where they are if nothing changes them, else in
 * `copy`. */
static const float *logits_adjust(const struct sampler_input *input, float *copy, uint32_t *seen) {
    const struct sampling *sampling = input->sampling;
    bool has_penalties = input->history != NULL && sampling_needs_history(sampling);
    bool is_too_short = input->position - input->output_first < sampling->min_tokens;
    if (!has_penalties && sampling->bias_count == 0 && !is_too_short) {
        return input->logits;
    }
    memcpy(copy, input->logits, input->vocab_count * sizeof(*copy));
    if (has_penalties) {
        penalties_apply(input, seen);
    }
    for (uint32_t i = 0; i < sampling->bias_count; i++) {
        if (sampling->biases[i].token < input->vocab_count) {
            input->logits[sampling->biases[i].token] += sampling->biases[i].bias;
        }
    }
    if (is_too_short) {
        tokens_remove(input, sampling->stop_tokens, sampling->stop_token_count);
        if (!sampling->ignore_eos) {
            tokens_remove(input, input->eos_tokens, input->eos_count);
        }
    }
    return copy;
}

/* The lowest id of the largest logit, or vocab_count if all were removed. */
static uint32_t greedy(const float *logits, uint32_t count, float largest) {
    if (!(largest > -INFINITY)) {
        return count;
    }
    uint32_t first = 0;
    for (; first + LANES <= count; first += LANES) {
        uint32_t is_here = 0;
        for (uint32_t j = 0; j < LANES; j++) {
            is_here |= logits[first + j] == largest;
        }
        if (is_here != 0) {
            break;
        }
    }
    while (logits[first] != largest) {
        first++;
    }
    return first;
}

/* Larger logit first, then lower id: a total order, so that every sort gives the same result. */
static bool comes_before(const struct candidate *a, const struct candidate *b) {
    return a->logit != b->logit ? a->logit > b->logit : a->token < b->token;
}
static int candidate_order(const void *left, const void *right) {
    const struct candidate *a = left;
    const struct candidate *b = right;
    return comes_before(a, b) ? -1 : comes_before(b, a);
}

/* Moves the element at `at` down a heap whose root comes last. */
static void heap_sink(struct candidate *heap, uint32_t count, uint32_t at) {
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= count) {
            return;
        }
        if (child + 1 < count && comes_before(&heap[child], &heap[child + 1])) {
            child++;
        }
        if (!comes_before(&heap[at], &heap[child])) {
            return;
        }
        struct candidate swap = heap[at];
        heap[at] = heap[child];
        heap[child] = swap;
        at = child;
    }
}

/* Keeps the first `keep` in order of comes_before (in heap order), by a heap over the rest. */
static uint32_t top_k_keep(struct candidate *candidates, uint32_t count, uint32_t keep) {
    if (keep >= count) {
        return count;
    }
    for (uint32_t i = keep / 2; i-- > 0;) {
        heap_sink(candidates, keep, i);
    }
    for (uint32_t i = keep; i < count; i++) {
        if (comes_before(&candidates[i], &candidates[0])) {
            candidates[0] = candidates[i];
            heap_sink(candidates, keep, 0);
        }
    }
    return keep;
}

static double weights_sum(const struct candidate *candidates, uint32_t count) {
    double total = 0;
    for (uint32_t i = 0; i < count; i++) {
        total += candidates[i].weight;
    }
    return total;
}

/* Applies top-k, top-p and min-p; the survivors are sorted if any of them is on. */
static uint32_t filter(const struct sampling *sampling, struct candidate *candidates,
                       uint32_t count) {
    bool has_top_k = sampling->top_k > 0 && (uint32_t)sampling->top_k < count;
    bool has_top_p = sampling->top_p < 1.0f;
    bool has_min_p = sampling->min_p > 0.0f;
    if (!has_top_k && !has_top_p && !has_min_p) {
        return count;
    }
    if (has_top_k) {
        count = top_k_keep(candidates, count, (uint32_t)sampling->top_k);
        qsort(candidates, count, sizeof(*candidates), candidate_order);
    }
    double total = weights_sum(candidates, count);
    if (!has_top_k) {
        /* Before the sort drop what neither cut can keep. All tokens lighter than their share of
         * the tail 1 - top_p weigh less than that tail together, so none is in the nucleus. */
        double light = has_top_p ? (1.0 - (double)sampling->top_p) * total / count : 0.0;
        light = light > (double)sampling->min_p ? light : (double)sampling->min_p;
        light = light < 1.0 ? light : 1.0; /* the largest has weight 1 and always stays */
        uint32_t kept = 0;
        for (uint32_t i = 0; i < count; i++) {
            if (candidates[i].weight >= light) {
                candidates[kept++] = candidates[i];
            }
        }
        count = kept;
        qsort(candidates, count, sizeof(*candidates), candidate_order);
    }
    double sum = 0;
    uint32_t kept = 0;
    while (kept < count) {
        bool is_enough = has_top_p && sum >= (double)sampling->top_p * total;
        bool is_light = candidates[kept].weight < (double)sampling->min_p;
        if (kept > 0 && (is_enough || is_light)) {
            break;
        }
        sum += candidates[kept].weight;
        kept++;
    }
    return kept;
}

static uint32_t draw(const struct sampler_input *input, struct candidate *candidates,
                     float largest) {
    const struct sampling *sampling = input->sampling;
    uint32_t count = 0;
    double weights[BLOCK];
    for (uint32_t first = 0; first < input->vocab_count; first += BLOCK) {
        uint32_t rest = input->vocab_count - first;
        uint32_t some = rest < BLOCK ? rest : BLOCK;
        input->kernels->exps(weights, input->logits + first, some, largest, sampling->temperature);
        for (uint32_t i = 0; i < some; i++) {
            float logit = input->logits[first + i];
            if (logit > -INFINITY) { /* not removed, not NaN */
                candidates[count++] =
                    (struct candidate){.weight = weights[i], .logit = logit, .token = first + i};
            }
        }
    }
    count = filter(sampling, candidates, count);
    double share = (double)(prng_at(sampling->seed, input->position) >> 11) * 0x1p-53;
    double target = share * weights_sum(candidates, count);
    double sum = 0;
    uint32_t last = 0;
    for (uint32_t i = 0; i < count; i++) {
        sum += candidates[i].weight;
        if (sum > target) {
            return candidates[i].token;
        }
        last = candidates[i].weight > 0 ? i : last; /* rounding may leave the last one short */
    }
    return candidates[last].token;
}

/* Logits so far apart that a float cannot say it are as far apart as one can say. */
static float logprob_of(float logit, double normalizer) {
    double logprob = (double)logit - normalizer;
    return logprob < -(double)FLT_MAX ? -FLT_MAX : (float)logprob;
}

/* The first `wanted` by logit; ids come in ascending order, so that a tie stays behind. */
static void tops_find(const float *logits, uint32_t count, uint32_t wanted, double normalizer,
                      struct sampler_choice *choice) {
    float best[LOGPROBS_TOP_MAX];
    uint32_t found = 0;
    wanted = wanted < count ? wanted : count;
    for (uint32_t i = 0; i < count && wanted > 0; i++) {
        if (found == wanted && logits[i] <= best[found - 1]) {
            continue;
        }
        uint32_t at = found < wanted ? found++ : found - 1;
        while (at > 0 && logits[i] > best[at - 1]) {
            best[at] = best[at - 1];
            choice->top_tokens[at] = choice->top_tokens[at - 1];
            at--;
        }
        best[at] = logits[i];
        choice->top_tokens[at] = i;
    }
    for (uint32_t i = 0; i < found; i++) {
        choice->top_logprobs[i] = logprob_of(best[i], normalizer);
    }
    choice->top_count = found;
}

struct sampler_choice sampler_choose(const struct sampler_input *input) {
    struct sampler_choice choice = {0};
    uint32_t count = input->vocab_count;
    struct candidate *candidates = input->scratch;
    float *copy = (float *)(void *)(candidates + count);
    uint32_t *seen = (uint32_t *)(void *)(copy + count);
    CHECK_OP(input->position, >=, input->output_first);
    if (!are_finite(input->logits, count)) {
        return choice;
    }
    float largest = largest_of(input->logits, count);
    bool is_told = input->sampling->logprobs > 0;
    double normalizer = is_told ? (double)largest + log_sum(input, largest) : 0.0;
    const float *untouched = logits_adjust(input, copy, seen);
    if (untouched != input->logits) {
        largest = largest_of(input->logits, count);
    }
    uint32_t token = greedy(input->logits, count, largest);
    if (token == count || !isfinite(input->logits[token])) {
        return choice;
    }
    if (input->sampling->temperature > 0.0f) {
        token = draw(input, candidates, input->logits[token]);
    }
    choice.token = token;
    choice.logprob = is_told ? logprob_of(untouched[token], normalizer) : 0.0f;
    if (input->sampling->logprobs > 1) {
        CHECK_OP(input->sampling->logprobs, <=, 1 + LOGPROBS_TOP_MAX);
        tops_find(untouched, count, input->sampling->logprobs - 1, normalizer, &choice);
    }
    choice.is_valid = true;
    return choice;
}
