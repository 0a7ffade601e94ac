/* Sampling of the public API: what the client wrote, completed and checked. Pure. */
#include "wire/public.h"

#include <math.h>
#include <stddef.h>

/* One number and what is accepted for it. */
struct range {
    const char *name;
    const char *accepted;
    float low;
    float high;
    bool is_low_excluded;
};

static const struct range RANGE_TEMPERATURE = {"temperature", "a number from 0 (greedy) to 100",
                                               0.0f, PUBLIC_TEMPERATURE_MAX, false};
static const struct range RANGE_TOP_P = {"top_p", "a number above 0, at most 1 (1 = off)", 0.0f,
                                         1.0f, true};
static const struct range RANGE_MIN_P = {"min_p", "a number from 0 (off) to 1", 0.0f, 1.0f, false};
static const struct range RANGE_FREQUENCY = {"frequency_penalty", "a number from -2 to 2", -2.0f,
                                             2.0f, false};
static const struct range RANGE_PRESENCE = {"presence_penalty", "a number from -2 to 2", -2.0f,
                                            2.0f, false};
static const struct range RANGE_REPETITION = {
    "repetition_penalty", "a number above 0, at most 100 (1 = off)", 0.0f, 100.0f, true};

static bool range_holds(const struct range *range, float value) {
    return isfinite(value) && value <= range->high &&
           (range->is_low_excluded ? value > range->low : value >= range->low);
}

/* The request's value, else the model's, else `off`. */
static MUST_USE enum status number_resolve(const struct range *range, bool is_set, float value,
                                           bool has_default, float model_value, float off,
                                           float *out, struct writer *error) {
    if (is_set) {
        if (!range_holds(range, value)) {
            writer_printf(error, "%s is %g: it must be %s", range->name, (double)value,
                          range->accepted);
            return STATUS_INVALID;
        }
        *out = value;
    } else if (has_default) {
        if (!range_holds(range, model_value)) {
            writer_printf(
                error,
                "%s is %g in the model's generation_config.json: it must be %s; set it in "
                "the request until the model's file is corrected",
                range->name, (double)model_value, range->accepted);
            return STATUS_INVALID;
        }
        *out = model_value;
    } else {
        *out = off;
    }
    return STATUS_OK;
}

static MUST_USE enum status top_k_resolve(const struct public_sampling *sampling,
                                          const struct generation_defaults *defaults, int32_t *out,
                                          struct writer *error) {
    bool is_ours = !sampling->has_top_k && defaults->has_top_k;
    int32_t value = sampling->has_top_k ? sampling->top_k : is_ours ? defaults->top_k : -1;
    if (value < -1) {
        writer_printf(error, "top_k is %d%s: it must be a positive number, or -1 or 0 (off)",
                      (int)value, is_ours ? " in the model's generation_config.json" : "");
        return STATUS_INVALID;
    }
    *out = value == 0 ? -1 : value;
    return STATUS_OK;
}

static MUST_USE enum status stops_check(const struct public_sampling *sampling,
                                        struct writer *error) {
    if (sampling->stop_count > PUBLIC_STOPS_MAX) {
        writer_printf(error, "stop has %u strings: at most %u are accepted",
                      (unsigned)sampling->stop_count, PUBLIC_STOPS_MAX);
        return STATUS_INVALID;
    }
    size_t total = 0;
    for (uint32_t i = 0; i < sampling->stop_count; i++) {
        if (sampling->stops[i].len == 0) {
            writer_printf(error, "stop[%u] is empty: remove it, or give the text to stop at",
                          (unsigned)i);
            return STATUS_INVALID;
        }
        if (!utf8_is_valid(sampling->stops[i].data, sampling->stops[i].len)) {
            writer_printf(error, "stop[%u] is not valid UTF-8", (unsigned)i);
            return STATUS_INVALID;
        }
        total += sampling->stops[i].len;
    }
    if (total > PUBLIC_STOP_BYTES_MAX) {
        writer_printf(error, "stop has %zu bytes in all: at most %u are accepted", total,
                      PUBLIC_STOP_BYTES_MAX);
        return STATUS_INVALID;
    }
    return STATUS_OK;
}

static MUST_USE enum status stop_tokens_resolve(const struct public_sampling *sampling,
                                                uint32_t vocab, struct sampling *out,
                                                struct writer *error) {
    if (sampling->stop_token_count > SAMPLING_STOP_TOKENS_MAX) {
        writer_printf(error, "stop_token_ids has %u ids: at most %u are accepted",
                      (unsigned)sampling->stop_token_count, SAMPLING_STOP_TOKENS_MAX);
        return STATUS_INVALID;
    }
    for (uint32_t i = 0; i < sampling->stop_token_count; i++) {
        uint32_t token = sampling->stop_tokens[i];
        if (vocab > 0 && token >= vocab) {
            writer_printf(error,
                          "stop_token_ids[%u] is %u: it must be below %u, the model's vocabulary "
                          "size",
                          (unsigned)i, (unsigned)token, (unsigned)vocab);
            return STATUS_INVALID;
        }
        out->stop_tokens[out->stop_token_count++] = token;
    }
    return STATUS_OK;
}

/* The entry of a token, a new one at the end if there is none: keys of a map count once. */
static uint32_t bias_slot(struct sampling *out, uint32_t token) {
    for (uint32_t i = 0; i < out->bias_count; i++) {
        if (out->biases[i].token == token) {
            return i;
        }
    }
    return out->bias_count++;
}

static MUST_USE enum status biases_resolve(const struct public_sampling *sampling, uint32_t vocab,
                                           struct sampling *out, struct writer *error) {
    if (sampling->bias_count > SAMPLING_BIAS_MAX) {
        writer_printf(error, "logit_bias has %u entries: at most %u are accepted",
                      (unsigned)sampling->bias_count, SAMPLING_BIAS_MAX);
        return STATUS_INVALID;
    }
    for (uint32_t i = 0; i < sampling->bias_count; i++) {
        uint32_t token = sampling->biases[i].token;
        float bias = sampling->biases[i].bias;
        if (vocab > 0 && token >= vocab) {
            writer_printf(error,
                          "logit_bias names token %u: it must be below %u, the model's vocabulary "
                          "size",
                          (unsigned)token, (unsigned)vocab);
            return STATUS_INVALID;
        }
        if (!isfinite(bias) || bias < -100.0f || bias > 100.0f) {
            writer_printf(error,
                          "logit_bias of token %u is %g: it must be a number from -100 to 100",
                          (unsigned)token, (double)bias);
            return STATUS_INVALID;
        }
        uint32_t slot = bias_slot(out, token);
        out->biases[slot].token = token;
        out->biases[slot].bias = bias;
    }
    return STATUS_OK;
}

static MUST_USE enum status numbers_resolve(const struct public_sampling *from,
                                            const struct generation_defaults *model,
                                            struct sampling *out, struct writer *error) {
    enum status status =
        number_resolve(&RANGE_TEMPERATURE, from->has_temperature, from->temperature,
                       model->has_temperature, model->temperature, 1.0f, &out->temperature, error);
    if (status == STATUS_OK) {
        status = number_resolve(&RANGE_TOP_P, from->has_top_p, from->top_p, model->has_top_p,
                                model->top_p, 1.0f, &out->top_p, error);
    }
    if (status == STATUS_OK) {
        status = top_k_resolve(from, model, &out->top_k, error);
    }
    if (status == STATUS_OK) {
        status = number_resolve(&RANGE_MIN_P, from->has_min_p, from->min_p, model->has_min_p,
                                model->min_p, 0.0f, &out->min_p, error);
    }
    if (status == STATUS_OK) {
        status = number_resolve(&RANGE_FREQUENCY, true, from->frequency_penalty, false, 0.0f, 0.0f,
                                &out->frequency_penalty, error);
    }
    if (status == STATUS_OK) {
        status = number_resolve(&RANGE_PRESENCE, true, from->presence_penalty, false, 0.0f, 0.0f,
                                &out->presence_penalty, error);
    }
    if (status == STATUS_OK) {
        status = number_resolve(&RANGE_REPETITION, from->has_repetition_penalty,
                                from->repetition_penalty, model->has_repetition_penalty,
                                model->repetition_penalty, 1.0f, &out->repetition_penalty, error);
    }
    return status;
}

enum status public_sampling_resolve(const struct public_sampling *sampling,
                                    const struct generation_defaults *defaults, uint64_t drawn_seed,
                                    uint32_t max_tokens, struct sampling *out,
                                    struct writer *error) {
    if (sampling->has_logprobs && sampling->logprobs > LOGPROBS_TOP_MAX) {
        writer_printf(error,
                      "logprobs is %u: it must be at most %u, the alternatives of each token",
                      (unsigned)sampling->logprobs, LOGPROBS_TOP_MAX);
        return STATUS_INVALID;
    }
    if (max_tokens > 0 && sampling->min_tokens > max_tokens) {
        writer_printf(error, "min_tokens is %u: it must be at most max_tokens, which is %u",
                      (unsigned)sampling->min_tokens, (unsigned)max_tokens);
        return STATUS_INVALID;
    }
    struct sampling resolved = {.seed = sampling->has_seed ? sampling->seed : drawn_seed,
                                .min_tokens = sampling->min_tokens,
                                .ignore_eos = sampling->ignore_eos,
                                .logprobs = sampling->has_logprobs ? 1 + sampling->logprobs : 0};
    enum status status = numbers_resolve(sampling, defaults, &resolved, error);
    if (status == STATUS_OK) {
        status = stops_check(sampling, error);
    }
    if (status == STATUS_OK) {
        status = stop_tokens_resolve(sampling, defaults->vocab, &resolved, error);
    }
    if (status == STATUS_OK) {
        status = biases_resolve(sampling, defaults->vocab, &resolved, error);
    }
    if (status == STATUS_OK) {
        *out = resolved;
    }
    return status;
}
