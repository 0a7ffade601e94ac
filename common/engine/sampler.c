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

/* n = round(x / ln 2), then a Taylor polynomial of degree 13 on |r| <= ln 2 / 2 (its first missing
 * term is below 2^-58), then 2^n by the exponent bits. */
double sampler_exp(double x) {
    if (x != x) {
        return x;
    }
    if (x < -708.0) {
        return 0.0;
    }
    if (x > 709.0) {
        return (double)INFINITY;
    }
    const double shift = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to a whole number */
    double n = (x * 1.4426950408889634 + shift) - shift;
    double r = x - n * 0.693147180369123816490; /* ln 2 in two parts; n * the first is exact */
    r -= n * 1.90821492927058770002e-10;
    static const double inverse_factorial[] = {
        1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
        1.0 / 5040,       1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      1.0 / 2};
    double p = inverse_factorial[0];
    for (size_t i = 1; i < sizeof(inverse_factorial) / sizeof(inverse_factorial[0]); i++) {
        p = p * r + inverse_factorial[i];
    }
    p = 1.0 + (r + r * r * p);
    uint64_t bits = (uint64_t)((int64_t)n + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof(power));
    return p * power;
}

/* Largest logit; false if any is not finite. */
static bool logits_scan(const float *logits, uint32_t count, float *largest_out) {
    float largest = -INFINITY;
    bool is_finite = count > 0;
    for (uint32_t i = 0; i < count; i++) {
        is_finite &= isfinite(logits[i]) != 0;
        largest = logits[i] > largest ? logits[i] : largest;
    }
    *largest_out = largest;
    return is_finite;
}

/* log of the sum of e^(logit - largest): four chains, then one fixed order. */
static double log_sum(const float *logits, uint32_t count, float largest) {
    double sum[4] = {0};
    for (uint32_t i = 0; i < count; i++) {
        sum[i % 4] += sampler_exp((double)logits[i] - (double)largest);
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

static void logits_adjust(const struct sampler_input *input, uint32_t *seen) {
    const struct sampling *sampling = input->sampling;
    if (input->history != NULL && sampling_needs_history(sampling)) {
        penalties_apply(input, seen);
    }
    for (uint32_t i = 0; i < sampling->bias_count; i++) {
        if (sampling->biases[i].token < input->vocab_count) {
            input->logits[sampling->biases[i].token] += sampling->biases[i].bias;
        }
    }
    if (input->position - input->output_first < sampling->min_tokens) {
        tokens_remove(input, sampling->stop_tokens, sampling->stop_token_count);
        if (!sampling->ignore_eos) {
            tokens_remove(input, input->eos_tokens, input->eos_count);
        }
    }
}

/* The largest logit's lowest id, or vocab_count if all were removed. */
static uint32_t greedy(const float *logits, uint32_t count) {
    uint32_t best = count;
    float largest = -INFINITY;
    for (uint32_t i = 0; i < count; i++) {
        if (logits[i] > largest) {
            largest = logits[i];
            best = i;
        }
    }
    return best;
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
    for (uint32_t i = 0; i < input->vocab_count; i++) {
        float logit = input->logits[i];
        if (logit > -INFINITY) { /* not removed, not NaN */
            double distance = ((double)logit - (double)largest) / (double)sampling->temperature;
            candidates[count++] =
                (struct candidate){.weight = sampler_exp(distance), .logit = logit, .token = i};
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
    float *untouched = (float *)(void *)(candidates + count);
    uint32_t *seen = (uint32_t *)(void *)(untouched + count);
    float largest = 0;
    CHECK_OP(input->position, >=, input->output_first);
    if (!logits_scan(input->logits, count, &largest)) {
        return choice;
    }
    double normalizer = (double)largest + log_sum(input->logits, count, largest);
    memcpy(untouched, input->logits, count * sizeof(float));
    logits_adjust(input, seen);
    uint32_t token = greedy(input->logits, count);
    if (token == count || !isfinite(input->logits[token])) {
        return choice;
    }
    if (input->sampling->temperature > 0.0f) {
        token = draw(input, candidates, input->logits[token]);
    }
    choice.token = token;
    choice.logprob = logprob_of(untouched[token], normalizer);
    if (input->sampling->logprobs > 1) {
        CHECK_OP(input->sampling->logprobs, <=, 1 + LOGPROBS_TOP_MAX);
        tops_find(untouched, count, input->sampling->logprobs - 1, normalizer, &choice);
    }
    choice.is_valid = true;
    return choice;
}
