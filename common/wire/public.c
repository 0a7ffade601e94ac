#include "wire/public.h"

#include <string.h>

#include "baton/v1/inference.pb-c.h"
#include "wire/pack.h"

/* Beyond four times the input: enough for every valid request whatever way it is encoded, and for
 * naming what is wrong in most of the others. */
#define SLACK_BYTES (1024u * 1024u)

enum field_number {
    FIELD_REQUEST_MODEL = 1,
    FIELD_REQUEST_PROMPT = 2,
    FIELD_REQUEST_SAMPLING = 5,
    FIELD_REQUEST_REQUEST_ID = 6,
    FIELD_REQUEST_SESSION_ID = 7,
    FIELD_REQUEST_CACHE_SALT = 9,
    FIELD_SAMPLING_STOP = 9,
    FIELD_REPLY_TEXT = 2,
    FIELD_ABORT_REQUEST_ID = 1,
    FIELD_ABORT_SESSION_ID = 2,
    FIELD_TOKENIZE_MODEL = 1,
    FIELD_TOKENIZE_TEXT = 2,
};

/* --- requests, as the router reads them --- */

static MUST_USE enum status request_unpack(const ProtobufCMessageDescriptor *descriptor,
                                           struct bytes bytes, struct wire_arena *arena,
                                           struct writer *error, const void **out) {
    if (bytes.len > WIRE_MESSAGE_MAX) {
        writer_printf(error, "the message has %zu bytes: at most %u are accepted", bytes.len,
                      WIRE_MESSAGE_MAX);
        return STATUS_INVALID;
    }
    const ProtobufCMessage *message = wire_unpack(descriptor, bytes, arena, SLACK_BYTES);
    if (message == NULL) {
        writer_printf(error,
                      "the message is not a valid %s: use stubs generated from "
                      "baton/v1/inference.proto",
                      descriptor->name);
        return STATUS_INVALID;
    }
    *out = message;
    return STATUS_OK;
}

/* Only called for text that is not valid: the first byte that cannot be right. */
static size_t utf8_first_bad(const uint8_t *data, size_t len) {
    size_t at = 0;
    while (at < len) {
        size_t width = data[at] < 0x80 ? 1 : data[at] < 0xe0 ? 2 : data[at] < 0xf0 ? 3 : 4;
        if (width > len - at || !utf8_is_valid(data + at, width)) {
            break;
        }
        at += width;
    }
    return at;
}

static MUST_USE enum status text_check(const char *name, struct bytes text, struct writer *error) {
    if (utf8_is_valid(text.data, text.len)) {
        return STATUS_OK;
    }
    writer_printf(error, "%s is not valid UTF-8: the byte at offset %zu does not fit", name,
                  utf8_first_bad(text.data, text.len));
    return STATUS_INVALID;
}

/* A label or model name into its fixed array. */
static MUST_USE enum status label_take(const char *name, const char *from, size_t len, char *to,
                                       struct writer *error) {
    if (len >= LABEL_MAX) {
        writer_printf(error, "%s has %zu bytes: at most %u are accepted", name, len, LABEL_MAX - 1);
        return STATUS_INVALID;
    }
    if (len > 0 && memchr(from, '\0', len) != NULL) {
        writer_printf(error, "%s contains a NUL character: remove it", name);
        return STATUS_INVALID;
    }
    struct bytes bytes = {(const uint8_t *)from, len};
    enum status status = text_check(name, bytes, error);
    if (status == STATUS_OK) {
        memset(to, 0, LABEL_MAX);
        if (len > 0) {
            memcpy(to, from, len);
        }
    }
    return status;
}

static MUST_USE enum status model_take(const char *from, size_t len, char *to,
                                       struct writer *error) {
    if (len == 0) {
        writer_text(error, "model is empty: set it to a name that ListModels returns");
        return STATUS_INVALID;
    }
    return label_take("model", from, len, to, error);
}

static MUST_USE enum status no_memory(struct writer *error) {
    writer_text(error, "the message needs more memory than one request may use: shorten its lists");
    return STATUS_INVALID;
}

/* Lengths of the stop strings from the raw bytes: Sampling may come in several pieces, which are
 * merged in order. */
static MUST_USE enum status stops_take(const Baton__V1__Sampling *from, struct bytes raw,
                                       struct wire_arena *arena, struct public_sampling *to,
                                       struct writer *error) {
    struct bytes *stops = wire_arena_alloc(arena, from->n_stop * sizeof *stops);
    if (stops == NULL) {
        return no_memory(error);
    }
    size_t count = 0;
    struct wire_field field;
    while (wire_scan(&raw, &field)) {
        if (field.number != FIELD_REQUEST_SAMPLING || field.type != WIRE_TYPE_LENGTH) {
            continue;
        }
        struct bytes inner = field.payload;
        while (wire_scan(&inner, &field)) {
            if (field.number == FIELD_SAMPLING_STOP && field.type == WIRE_TYPE_LENGTH &&
                count < from->n_stop) {
                stops[count] =
                    (struct bytes){(const uint8_t *)from->stop[count], field.payload.len};
                count++;
            }
        }
    }
    if (count != from->n_stop) {
        writer_text(error, "stop is malformed: use stubs generated from baton/v1/inference.proto");
        return STATUS_INVALID;
    }
    to->stop_count = (uint32_t)count;
    to->stops = stops;
    return STATUS_OK;
}

static MUST_USE enum status sampling_take(const Baton__V1__Sampling *from, struct bytes raw,
                                          struct wire_arena *arena, struct public_sampling *to,
                                          struct writer *error) {
    to->has_temperature =
        from->set_temperature_case == BATON__V1__SAMPLING__SET_TEMPERATURE_TEMPERATURE;
    to->has_top_p = from->set_top_p_case == BATON__V1__SAMPLING__SET_TOP_P_TOP_P;
    to->has_top_k = from->set_top_k_case == BATON__V1__SAMPLING__SET_TOP_K_TOP_K;
    to->has_min_p = from->set_min_p_case == BATON__V1__SAMPLING__SET_MIN_P_MIN_P;
    to->has_repetition_penalty = from->set_repetition_penalty_case ==
                                 BATON__V1__SAMPLING__SET_REPETITION_PENALTY_REPETITION_PENALTY;
    to->has_seed = from->set_seed_case == BATON__V1__SAMPLING__SET_SEED_SEED;
    to->has_logprobs = from->set_logprobs_case == BATON__V1__SAMPLING__SET_LOGPROBS_LOGPROBS;
    to->temperature = from->temperature;
    to->top_p = from->top_p;
    to->top_k = from->top_k;
    to->min_p = from->min_p;
    to->repetition_penalty = from->repetition_penalty;
    to->seed = from->seed;
    to->logprobs = from->logprobs;
    to->frequency_penalty = from->frequency_penalty;
    to->presence_penalty = from->presence_penalty;
    to->ignore_eos = from->ignore_eos;
    to->min_tokens = from->min_tokens;
    to->stop_token_count = (uint32_t)from->n_stop_token_ids;
    to->stop_tokens = from->stop_token_ids;
    struct public_bias *biases = wire_arena_alloc(arena, from->n_logit_bias * sizeof *biases);
    if (biases == NULL) {
        return no_memory(error);
    }
    for (size_t i = 0; i < from->n_logit_bias; i++) {
        biases[i] = (struct public_bias){from->logit_bias[i]->key, from->logit_bias[i]->value};
    }
    to->bias_count = (uint32_t)from->n_logit_bias;
    to->biases = biases;
    return stops_take(from, raw, arena, to, error);
}

static MUST_USE enum status input_take(const Baton__V1__GenerateRequest *from, struct bytes raw,
                                       struct public_generate_request *to, struct writer *error) {
    if (from->input_case == BATON__V1__GENERATE_REQUEST__INPUT_TOKEN_IDS) {
        to->is_tokens = true;
        to->token_count = (uint32_t)from->token_ids->n_ids;
        to->tokens = from->token_ids->ids;
        if (to->token_count == 0) {
            writer_text(error, "token_ids is empty: give at least one token");
            return STATUS_INVALID;
        }
        return STATUS_OK;
    }
    if (from->input_case == BATON__V1__GENERATE_REQUEST__INPUT_PROMPT) {
        to->prompt.data = (const uint8_t *)from->prompt;
        to->prompt.len = wire_scan_length(raw, FIELD_REQUEST_PROMPT);
        if (to->prompt.len == 0) {
            writer_text(error, "prompt is empty: give at least one character, or token_ids");
            return STATUS_INVALID;
        }
        return text_check("prompt", to->prompt, error);
    }
    writer_text(error, "there is no input: set prompt or token_ids");
    return STATUS_INVALID;
}

enum status public_generate_request_decode(struct bytes bytes, struct wire_arena *arena,
                                           struct public_generate_request *out,
                                           struct writer *error) {
    const void *unpacked = NULL;
    enum status status =
        request_unpack(&baton__v1__generate_request__descriptor, bytes, arena, error, &unpacked);
    if (status != STATUS_OK) {
        return status;
    }
    const Baton__V1__GenerateRequest *from = unpacked;
    struct public_generate_request request = {
        .has_max_tokens = from->max_tokens > 0, .max_tokens = from->max_tokens, .choices = from->n};
    status =
        model_take(from->model, wire_scan_length(bytes, FIELD_REQUEST_MODEL), request.model, error);
    if (status == STATUS_OK) {
        status = label_take("request_id", from->request_id,
                            wire_scan_length(bytes, FIELD_REQUEST_REQUEST_ID),
                            request.request_label, error);
    }
    if (status == STATUS_OK) {
        status = label_take("session_id", from->session_id,
                            wire_scan_length(bytes, FIELD_REQUEST_SESSION_ID),
                            request.session_label, error);
    }
    if (status == STATUS_OK) {
        status = label_take("cache_salt", from->cache_salt,
                            wire_scan_length(bytes, FIELD_REQUEST_CACHE_SALT), request.cache_salt,
                            error);
    }
    if (status == STATUS_OK) {
        status = input_take(from, bytes, &request, error);
    }
    if (status == STATUS_OK && from->sampling != NULL) {
        status = sampling_take(from->sampling, bytes, arena, &request.sampling, error);
    }
    if (status == STATUS_OK) {
        *out = request;
    }
    return status;
}

enum status public_abort_request_decode(struct bytes bytes, struct wire_arena *arena,
                                        struct public_abort_request *out, struct writer *error) {
    const void *unpacked = NULL;
    enum status status =
        request_unpack(&baton__v1__abort_request__descriptor, bytes, arena, error, &unpacked);
    if (status != STATUS_OK) {
        return status;
    }
    const Baton__V1__AbortRequest *from = unpacked;
    bool is_session = from->target_case == BATON__V1__ABORT_REQUEST__TARGET_SESSION_ID;
    if (!is_session && from->target_case != BATON__V1__ABORT_REQUEST__TARGET_REQUEST_ID) {
        writer_text(error, "nothing is named: set request_id or session_id");
        return STATUS_INVALID;
    }
    const char *name = is_session ? "session_id" : "request_id";
    size_t len =
        wire_scan_length(bytes, is_session ? FIELD_ABORT_SESSION_ID : FIELD_ABORT_REQUEST_ID);
    if (len == 0) {
        writer_printf(error, "%s is empty: give the label that the requests were started with",
                      name);
        return STATUS_INVALID;
    }
    struct public_abort_request request = {.is_session = is_session};
    status = label_take(name, is_session ? from->session_id : from->request_id, len, request.label,
                        error);
    if (status == STATUS_OK) {
        *out = request;
    }
    return status;
}

enum status public_tokenize_request_decode(struct bytes bytes, struct wire_arena *arena,
                                           struct public_tokenize_request *out,
                                           struct writer *error) {
    const void *unpacked = NULL;
    enum status status =
        request_unpack(&baton__v1__tokenize_request__descriptor, bytes, arena, error, &unpacked);
    if (status != STATUS_OK) {
        return status;
    }
    const Baton__V1__TokenizeRequest *from = unpacked;
    struct public_tokenize_request request = {
        .add_special = from->add_special,
        .text = {(const uint8_t *)from->text, wire_scan_length(bytes, FIELD_TOKENIZE_TEXT)}};
    status = model_take(from->model, wire_scan_length(bytes, FIELD_TOKENIZE_MODEL), request.model,
                        error);
    if (status == STATUS_OK) {
        status = text_check("text", request.text, error);
    }
    if (status == STATUS_OK) {
        *out = request;
    }
    return status;
}

enum status public_list_models_request_decode(struct bytes bytes, struct wire_arena *arena,
                                              struct writer *error) {
    const void *unpacked = NULL;
    return request_unpack(&baton__v1__list_models_request__descriptor, bytes, arena, error,
                          &unpacked);
}

/* --- replies, as the router writes them --- */

/* Points the message at the reply's logprobs; what it needs beside them is taken from the arena. */
static bool logprobs_fill(const struct public_generate_reply *reply, struct wire_arena *scratch,
                          Baton__V1__GenerateReply *to) {
    size_t count = reply->token_count;
    wire_arena_allow(scratch, WIRE_ARENA_MAX);
    Baton__V1__TokenLogprobs **pointers = wire_arena_alloc(scratch, count * sizeof *pointers);
    Baton__V1__TokenLogprobs *items = wire_arena_alloc(scratch, count * sizeof *items);
    if (pointers == NULL || items == NULL) {
        return false;
    }
    size_t top = 0;
    for (size_t i = 0; i < count; i++) {
        baton__v1__token_logprobs__init(&items[i]);
        items[i].logprob = reply->logprobs.logprobs[i];
        items[i].n_top_token_ids = reply->logprobs.top_counts[i];
        items[i].n_top_logprobs = reply->logprobs.top_counts[i];
        if (reply->logprobs.top_counts[i] > 0) {
            items[i].top_token_ids = wire_borrow(reply->logprobs.top_tokens + top);
            items[i].top_logprobs = wire_borrow(reply->logprobs.top_logprobs + top);
            top += reply->logprobs.top_counts[i];
        }
        pointers[i] = &items[i];
    }
    to->n_logprobs = count;
    to->logprobs = pointers;
    return true;
}

enum status public_generate_reply_encode(const struct public_generate_reply *reply,
                                         struct wire_buffer *out) {
    struct wire_arena scratch = {0};
    Baton__V1__Usage usage = BATON__V1__USAGE__INIT;
    Baton__V1__Trace trace = BATON__V1__TRACE__INIT;
    Baton__V1__GenerateReply message = BATON__V1__GENERATE_REPLY__INIT;
    message.n_token_ids = reply->token_count;
    message.token_ids = wire_borrow(reply->tokens);
    message.finish_reason = wire_borrow(finish_name(reply->finish));
    message.index = reply->index;
    message.request_id = wire_borrow(reply->request != NULL ? reply->request : "");
    if (reply->has_usage) {
        usage.prompt_tokens = reply->usage.prompt_tokens;
        usage.cached_tokens = reply->usage.cached_tokens;
        usage.completion_tokens = reply->usage.completion_tokens;
        usage.seed = reply->seed;
        message.usage = &usage;
    }
    if (reply->has_trace) {
        trace.prefill_worker = wire_borrow(reply->trace.prefill_worker);
        trace.decode_worker = wire_borrow(reply->trace.decode_worker);
        trace.kv_bytes = reply->trace.kv_bytes;
        trace.attempts = reply->trace.attempts;
        trace.queue_ms = reply->trace.queue_ms;
        trace.ttft_ms = reply->trace.ttft_ms;
        trace.total_ms = reply->trace.total_ms;
        if (reply->trace.has_kv_exposed) {
            trace.set_kv_exposed_case = BATON__V1__TRACE__SET_KV_EXPOSED_KV_EXPOSED_MS;
            trace.kv_exposed_ms = reply->trace.kv_exposed_ms;
        }
        message.trace = &trace;
    }
    out->len = 0;
    bool is_filled = reply->logprobs.logprobs == NULL || logprobs_fill(reply, &scratch, &message);
    enum status status = is_filled ? wire_pack(&message.base, out) : STATUS_RANGE;
    wire_arena_fini(&scratch);
    if (status == STATUS_OK && reply->text.len > 0) {
        status = wire_append(out, FIELD_REPLY_TEXT, reply->text);
    }
    return status;
}

enum status public_abort_reply_encode(uint32_t aborted, struct wire_buffer *out) {
    Baton__V1__AbortReply message = BATON__V1__ABORT_REPLY__INIT;
    message.aborted = aborted;
    return wire_pack(&message.base, out);
}

enum status public_tokenize_reply_encode(const struct public_tokenize_reply *reply,
                                         struct wire_buffer *out) {
    Baton__V1__TokenizeReply message = BATON__V1__TOKENIZE_REPLY__INIT;
    message.n_token_ids = reply->token_count;
    message.token_ids = wire_borrow(reply->tokens);
    message.context_tokens = reply->context_tokens;
    return wire_pack(&message.base, out);
}

enum status public_list_models_reply_encode(const struct public_model *models, uint32_t count,
                                            struct wire_buffer *out) {
    out->len = 0;
    struct wire_arena scratch = {0};
    wire_arena_allow(&scratch, WIRE_ARENA_MAX);
    Baton__V1__Model **pointers = wire_arena_alloc(&scratch, (size_t)count * sizeof *pointers);
    Baton__V1__Model *items = wire_arena_alloc(&scratch, (size_t)count * sizeof *items);
    enum status status = STATUS_RANGE;
    if (pointers != NULL && items != NULL) {
        for (uint32_t i = 0; i < count; i++) {
            baton__v1__model__init(&items[i]);
            items[i].name = wire_borrow(models[i].name);
            items[i].context_tokens = models[i].context_tokens;
            items[i].vocab = models[i].vocab;
            items[i].prefill_workers_ready = models[i].prefill_ready;
            items[i].decode_workers_ready = models[i].decode_ready;
            pointers[i] = &items[i];
        }
        Baton__V1__ListModelsReply message = BATON__V1__LIST_MODELS_REPLY__INIT;
        message.n_models = count;
        message.models = pointers;
        status = wire_pack(&message.base, out);
    }
    wire_arena_fini(&scratch);
    return status;
}
