/* The client's side of the public API: for our own C programs. */
#include "wire/public.h"

#include <string.h>

#include "baton/v1/inference.pb-c.h"
#include "wire/pack.h"

#define SLACK_BYTES (1024u * 1024u)

enum field_number {
    FIELD_REQUEST_PROMPT = 2,
    FIELD_REPLY_TEXT = 2,
    FIELD_REPLY_REQUEST_ID = 5,
    FIELD_TOKENIZE_TEXT = 2,
};

/* Stop strings and biases need memory of their own: pointers to NUL-terminated copies. */
static MUST_USE bool sampling_fill(const struct public_sampling *from, struct wire_arena *scratch,
                                   Baton__V1__Sampling *to) {
    to->frequency_penalty = from->frequency_penalty;
    to->presence_penalty = from->presence_penalty;
    to->ignore_eos = from->ignore_eos;
    to->min_tokens = from->min_tokens;
    to->n_stop_token_ids = from->stop_token_count;
    to->stop_token_ids = wire_borrow(from->stop_tokens);
    if (from->has_temperature) {
        to->set_temperature_case = BATON__V1__SAMPLING__SET_TEMPERATURE_TEMPERATURE;
        to->temperature = from->temperature;
    }
    if (from->has_top_p) {
        to->set_top_p_case = BATON__V1__SAMPLING__SET_TOP_P_TOP_P;
        to->top_p = from->top_p;
    }
    if (from->has_top_k) {
        to->set_top_k_case = BATON__V1__SAMPLING__SET_TOP_K_TOP_K;
        to->top_k = from->top_k;
    }
    if (from->has_min_p) {
        to->set_min_p_case = BATON__V1__SAMPLING__SET_MIN_P_MIN_P;
        to->min_p = from->min_p;
    }
    if (from->has_repetition_penalty) {
        to->set_repetition_penalty_case =
            BATON__V1__SAMPLING__SET_REPETITION_PENALTY_REPETITION_PENALTY;
        to->repetition_penalty = from->repetition_penalty;
    }
    if (from->has_seed) {
        to->set_seed_case = BATON__V1__SAMPLING__SET_SEED_SEED;
        to->seed = from->seed;
    }
    if (from->has_logprobs) {
        to->set_logprobs_case = BATON__V1__SAMPLING__SET_LOGPROBS_LOGPROBS;
        to->logprobs = from->logprobs;
    }
    to->n_stop = from->stop_count;
    to->stop = wire_arena_alloc(scratch, from->stop_count * sizeof *to->stop);
    to->n_logit_bias = from->bias_count;
    to->logit_bias = wire_arena_alloc(scratch, from->bias_count * sizeof *to->logit_bias);
    if (to->stop == NULL || to->logit_bias == NULL) {
        return false;
    }
    for (uint32_t i = 0; i < from->stop_count; i++) {
        to->stop[i] = wire_arena_alloc(scratch, from->stops[i].len + 1);
        if (to->stop[i] == NULL) {
            return false;
        }
        if (from->stops[i].len > 0) {
            memcpy(to->stop[i], from->stops[i].data, from->stops[i].len);
        }
        to->stop[i][from->stops[i].len] = '\0';
    }
    for (uint32_t i = 0; i < from->bias_count; i++) {
        to->logit_bias[i] = wire_arena_alloc(scratch, sizeof **to->logit_bias);
        if (to->logit_bias[i] == NULL) {
            return false;
        }
        baton__v1__sampling__logit_bias_entry__init(to->logit_bias[i]);
        to->logit_bias[i]->key = from->biases[i].token;
        to->logit_bias[i]->value = from->biases[i].bias;
    }
    return true;
}

enum status public_generate_request_encode(const struct public_generate_request *request,
                                           struct wire_buffer *out) {
    out->len = 0;
    struct wire_arena scratch = {0};
    wire_arena_allow(&scratch, WIRE_ARENA_MAX);
    Baton__V1__Sampling sampling = BATON__V1__SAMPLING__INIT;
    Baton__V1__TokenIds ids = BATON__V1__TOKEN_IDS__INIT;
    Baton__V1__GenerateRequest message = BATON__V1__GENERATE_REQUEST__INIT;
    message.model = wire_borrow(request->model);
    message.request_id = wire_borrow(request->request_label);
    message.session_id = wire_borrow(request->session_label);
    message.cache_salt = wire_borrow(request->cache_salt);
    message.max_tokens = request->has_max_tokens ? request->max_tokens : 0;
    message.sampling = &sampling;
    message.n = request->choices;
    if (request->is_tokens) {
        ids.n_ids = request->token_count;
        ids.ids = wire_borrow(request->tokens);
        message.input_case = BATON__V1__GENERATE_REQUEST__INPUT_TOKEN_IDS;
        message.token_ids = &ids;
    }
    enum status status = sampling_fill(&request->sampling, &scratch, &sampling)
                             ? wire_pack(&message.base, out)
                             : STATUS_RANGE;
    if (status == STATUS_OK && !request->is_tokens) {
        status = wire_append(out, FIELD_REQUEST_PROMPT, request->prompt);
    }
    wire_arena_fini(&scratch);
    return status;
}

static bool label_take(const char *from, char *to) {
    size_t len = strlen(from);
    if (len >= LABEL_MAX) {
        return false;
    }
    memcpy(to, from, len + 1);
    return true;
}

static bool finish_take(const char *name, enum finish *out) {
    for (enum finish finish = FINISH_NONE; finish <= FINISH_ERROR; finish++) {
        if (strcmp(name, finish_name(finish)) == 0) {
            *out = finish;
            return true;
        }
    }
    return false;
}

static bool trace_take(const Baton__V1__Trace *from, struct public_trace *to) {
    to->kv_bytes = from->kv_bytes;
    to->attempts = from->attempts;
    to->queue_ms = from->queue_ms;
    to->ttft_ms = from->ttft_ms;
    to->total_ms = from->total_ms;
    to->has_kv_exposed =
        from->set_kv_exposed_case == BATON__V1__TRACE__SET_KV_EXPOSED_KV_EXPOSED_MS;
    to->kv_exposed_ms = to->has_kv_exposed ? from->kv_exposed_ms : 0;
    return label_take(from->prefill_worker, to->prefill_worker) &&
           label_take(from->decode_worker, to->decode_worker);
}

/* Parallel arrays of a reply's logprobs, in the arena. */
static enum status logprobs_take(const Baton__V1__GenerateReply *from, struct wire_arena *arena,
                                 struct public_logprobs *to) {
    if (from->n_logprobs == 0) {
        return STATUS_OK;
    }
    size_t total = 0;
    for (size_t i = 0; i < from->n_logprobs; i++) {
        total += from->logprobs[i]->n_top_token_ids;
        if (from->logprobs[i]->n_top_token_ids != from->logprobs[i]->n_top_logprobs) {
            return STATUS_CORRUPT;
        }
    }
    if (from->n_logprobs != from->n_token_ids) {
        return STATUS_CORRUPT;
    }
    wire_arena_allow(arena, WIRE_ARENA_MAX);
    float *logprobs = wire_arena_alloc(arena, from->n_logprobs * sizeof *logprobs);
    uint32_t *top_counts = wire_arena_alloc(arena, from->n_logprobs * sizeof *top_counts);
    uint32_t *top_tokens = wire_arena_alloc(arena, total * sizeof *top_tokens);
    float *top_logprobs = wire_arena_alloc(arena, total * sizeof *top_logprobs);
    if (logprobs == NULL || top_counts == NULL || top_tokens == NULL || top_logprobs == NULL) {
        return STATUS_CORRUPT;
    }
    size_t top = 0;
    for (size_t i = 0; i < from->n_logprobs; i++) {
        const Baton__V1__TokenLogprobs *item = from->logprobs[i];
        logprobs[i] = item->logprob;
        top_counts[i] = (uint32_t)item->n_top_token_ids;
        for (size_t k = 0; k < item->n_top_token_ids; k++, top++) {
            top_tokens[top] = item->top_token_ids[k];
            top_logprobs[top] = item->top_logprobs[k];
        }
    }
    *to = (struct public_logprobs){logprobs, top_counts, top_tokens, top_logprobs};
    return STATUS_OK;
}

enum status public_generate_reply_decode(struct bytes bytes, struct wire_arena *arena,
                                         struct public_generate_reply *out) {
    const void *unpacked =
        wire_unpack(&baton__v1__generate_reply__descriptor, bytes, arena, SLACK_BYTES);
    if (unpacked == NULL) {
        return STATUS_CORRUPT;
    }
    const Baton__V1__GenerateReply *from = unpacked;
    struct public_generate_reply reply = {
        .token_count = (uint32_t)from->n_token_ids,
        .tokens = from->token_ids,
        .text = {(const uint8_t *)from->text, wire_scan_length(bytes, FIELD_REPLY_TEXT)},
        .index = from->index,
        .request = from->request_id,
    };
    if (!finish_take(from->finish_reason, &reply.finish) ||
        !utf8_is_valid(reply.text.data, reply.text.len)) {
        return STATUS_CORRUPT;
    }
    if (logprobs_take(from, arena, &reply.logprobs) != STATUS_OK) {
        return STATUS_CORRUPT;
    }
    if (from->usage != NULL) {
        reply.has_usage = true;
        reply.usage.prompt_tokens = from->usage->prompt_tokens;
        reply.usage.cached_tokens = from->usage->cached_tokens;
        reply.usage.completion_tokens = from->usage->completion_tokens;
        reply.seed = from->usage->seed;
    }
    if (from->trace != NULL) {
        reply.has_trace = true;
        if (!trace_take(from->trace, &reply.trace)) {
            return STATUS_CORRUPT;
        }
    }
    *out = reply;
    return STATUS_OK;
}

enum status public_abort_request_encode(const struct public_abort_request *request,
                                        struct wire_buffer *out) {
    Baton__V1__AbortRequest message = BATON__V1__ABORT_REQUEST__INIT;
    if (request->is_session) {
        message.target_case = BATON__V1__ABORT_REQUEST__TARGET_SESSION_ID;
        message.session_id = wire_borrow(request->label);
    } else {
        message.target_case = BATON__V1__ABORT_REQUEST__TARGET_REQUEST_ID;
        message.request_id = wire_borrow(request->label);
    }
    return wire_pack(&message.base, out);
}

enum status public_abort_reply_decode(struct bytes bytes, struct wire_arena *arena,
                                      uint32_t *aborted_out) {
    const void *unpacked =
        wire_unpack(&baton__v1__abort_reply__descriptor, bytes, arena, SLACK_BYTES);
    if (unpacked == NULL) {
        return STATUS_CORRUPT;
    }
    const Baton__V1__AbortReply *from = unpacked;
    *aborted_out = from->aborted;
    return STATUS_OK;
}

enum status public_tokenize_request_encode(const struct public_tokenize_request *request,
                                           struct wire_buffer *out) {
    Baton__V1__TokenizeRequest message = BATON__V1__TOKENIZE_REQUEST__INIT;
    message.model = wire_borrow(request->model);
    message.add_special = request->add_special;
    enum status status = wire_pack(&message.base, out);
    return status == STATUS_OK ? wire_append(out, FIELD_TOKENIZE_TEXT, request->text) : status;
}

enum status public_tokenize_reply_decode(struct bytes bytes, struct wire_arena *arena,
                                         struct public_tokenize_reply *out) {
    const void *unpacked =
        wire_unpack(&baton__v1__tokenize_reply__descriptor, bytes, arena, SLACK_BYTES);
    if (unpacked == NULL) {
        return STATUS_CORRUPT;
    }
    const Baton__V1__TokenizeReply *from = unpacked;
    *out = (struct public_tokenize_reply){.token_count = (uint32_t)from->n_token_ids,
                                          .tokens = from->token_ids,
                                          .context_tokens = from->context_tokens};
    return STATUS_OK;
}

enum status public_list_models_request_encode(struct wire_buffer *out) {
    Baton__V1__ListModelsRequest message = BATON__V1__LIST_MODELS_REQUEST__INIT;
    return wire_pack(&message.base, out);
}

enum status public_list_models_reply_decode(struct bytes bytes, struct wire_arena *arena,
                                            const struct public_model **models_out,
                                            uint32_t *count_out) {
    const void *unpacked =
        wire_unpack(&baton__v1__list_models_reply__descriptor, bytes, arena, SLACK_BYTES);
    if (unpacked == NULL) {
        return STATUS_CORRUPT;
    }
    const Baton__V1__ListModelsReply *from = unpacked;
    wire_arena_allow(arena, WIRE_ARENA_MAX);
    struct public_model *models = wire_arena_alloc(arena, from->n_models * sizeof *models);
    if (models == NULL) {
        return STATUS_CORRUPT;
    }
    for (size_t i = 0; i < from->n_models; i++) {
        models[i] = (struct public_model){
            .context_tokens = from->models[i]->context_tokens,
            .vocab = from->models[i]->vocab,
            .prefill_ready = from->models[i]->prefill_workers_ready,
            .decode_ready = from->models[i]->decode_workers_ready,
        };
        if (!label_take(from->models[i]->name, models[i].name)) {
            return STATUS_CORRUPT;
        }
    }
    *models_out = models;
    *count_out = (uint32_t)from->n_models;
    return STATUS_OK;
}
