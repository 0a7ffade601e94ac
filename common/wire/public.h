/* Public messages: baton.v1 (proto/baton/v1/inference.proto) <-> plain structs.
 *
 * The router decodes requests and encodes replies; our C clients do the reverse. Refusals are
 * sentences for the caller of the API: which field, its value, what is accepted. The text is put
 * into `error` (borrowed, appended; never NULL) whenever a function with that parameter fails.
 * Strings are lengths and bytes, NUL is an ordinary character in prompts and texts. Decoded
 * pointers lead into the arena and live until wire_arena_reset; input is not kept. Any thread. */
#ifndef WIRE_PUBLIC_H
#define WIRE_PUBLIC_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"
#include "core/event.h"
#include "core/ids.h"
#include "core/message.h"
#include "core/sampling.h"
#include "wire/memory.h"

#define PUBLIC_STOPS_MAX       16u
#define PUBLIC_STOP_BYTES_MAX  1024u /* all stop strings of one request together */
#define PUBLIC_TEMPERATURE_MAX 100.0f
#define PUBLIC_ERROR_MAX       512u /* bytes that hold every sentence of this room */

struct public_bias {
    uint32_t token;
    float bias;
};

/* Sampling as the client wrote it: unset is not zero. Also what the HTTP API fills in. */
struct public_sampling {
    bool has_temperature;
    bool has_top_p;
    bool has_top_k;
    bool has_min_p;
    bool has_repetition_penalty;
    bool has_seed;
    bool has_logprobs;
    bool ignore_eos;
    float temperature;
    float top_p;
    int32_t top_k;
    float min_p;
    float frequency_penalty;
    float presence_penalty;
    float repetition_penalty;
    uint32_t min_tokens;
    uint32_t logprobs;
    uint64_t seed;
    uint32_t stop_count;
    const struct bytes *stops; /* [stop_count] UTF-8 */
    uint32_t stop_token_count;
    const uint32_t *stop_tokens;
    uint32_t bias_count;
    const struct public_bias *biases;
};

/* What a model's generation_config.json sets; has_* false = it says nothing. */
struct generation_defaults {
    bool has_temperature; /* do_sample: false is temperature 0 */
    bool has_top_p;
    bool has_top_k;
    bool has_min_p;
    bool has_repetition_penalty;
    float temperature;
    float top_p;
    int32_t top_k;
    float min_p;
    float repetition_penalty;
    uint32_t vocab; /* token ids must be below; 0 = not known here, not checked */
};

struct public_generate_request {
    char model[LABEL_MAX];
    char request_label[LABEL_MAX]; /* request_id; "" = none */
    char session_label[LABEL_MAX]; /* session_id; "" = none */
    char cache_salt[LABEL_MAX];    /* "" = none */
    bool is_tokens;                /* the input is token ids, else a prompt */
    struct bytes prompt;           /* UTF-8 */
    uint32_t token_count;
    const uint32_t *tokens;
    bool has_max_tokens;
    uint32_t max_tokens; /* 0 when unset */
    uint32_t choices;    /* n; 0 = 1 */
    struct public_sampling sampling;
};

/* Where and how a request ran: diagnostics of the last reply. */
struct public_trace {
    char prefill_worker[LABEL_MAX]; /* "" = the decode worker prefilled it itself */
    char decode_worker[LABEL_MAX];
    uint64_t kv_bytes; /* moved between them for this request */
    uint32_t attempts; /* 1 = no fail-over */
    float queue_ms;    /* until it was placed on a pair */
    float ttft_ms;     /* until the first token, as the router saw it */
    float total_ms;
    bool has_kv_exposed;
    float kv_exposed_ms; /* KV time that computing the prompt did not hide */
};

/* Of the tokens of one reply, in parallel. */
struct public_logprobs {
    const float *logprobs;      /* [token_count]; NULL = none were asked for */
    const uint32_t *top_counts; /* [token_count]: alternatives of each token */
    const uint32_t *top_tokens; /* of all tokens, one token's after the other */
    const float *top_logprobs;
};

struct public_generate_reply {
    uint32_t token_count;
    const uint32_t *tokens; /* new since the last reply */
    struct public_logprobs logprobs;
    struct bytes text;  /* new since the last reply, UTF-8 */
    enum finish finish; /* FINISH_NONE except in the last reply */
    uint32_t index;     /* of the choice */
    bool has_usage;
    struct usage usage;
    uint64_t seed;       /* the one used; sent with usage */
    const char *request; /* the client's label, NUL-terminated; NULL or "" = none */
    bool has_trace;
    struct public_trace trace;
};

struct public_abort_request {
    char label[LABEL_MAX]; /* never "" */
    bool is_session;       /* session_id, else request_id */
};

struct public_tokenize_request {
    char model[LABEL_MAX];
    struct bytes text; /* UTF-8 */
    bool add_special;
};

struct public_tokenize_reply {
    uint32_t token_count;
    const uint32_t *tokens;
    uint32_t context_tokens;
};

struct public_model {
    char name[LABEL_MAX];
    uint32_t context_tokens; /* prompt and answer together */
    uint32_t vocab;
    uint32_t prefill_ready; /* workers that take requests now */
    uint32_t decode_ready;
};

/* Checks what the client asked for and completes it: the request's value, else the model's, else
 * off (temperature and repetition_penalty 1). drawn_seed is used when none is set; max_tokens 0 =
 * not set. Duplicate logit_bias keys: the last wins, as in every map.
 * Returns STATUS_INVALID with one sentence; out is then untouched.
 * PURE: the same arguments give the same result. */
MUST_USE enum status public_sampling_resolve(const struct public_sampling *sampling,
                                             const struct generation_defaults *defaults,
                                             uint64_t drawn_seed, uint32_t max_tokens,
                                             struct sampling *out, struct writer *error);

/* Requests. A malformed message, a missing model or input, a label past LABEL_MAX - 1 bytes, bytes
 * that are not UTF-8 (the sentence says at which byte), more than WIRE_MESSAGE_MAX: all are
 * STATUS_INVALID. Sampling is only decoded here, and checked by public_sampling_resolve. */
MUST_USE enum status public_generate_request_decode(struct bytes bytes, struct wire_arena *arena,
                                                    struct public_generate_request *out,
                                                    struct writer *error);
MUST_USE enum status public_abort_request_decode(struct bytes bytes, struct wire_arena *arena,
                                                 struct public_abort_request *out,
                                                 struct writer *error);
MUST_USE enum status public_tokenize_request_decode(struct bytes bytes, struct wire_arena *arena,
                                                    struct public_tokenize_request *out,
                                                    struct writer *error);
/* The request has no fields yet: only malformed bytes fail. */
MUST_USE enum status public_list_models_request_decode(struct bytes bytes, struct wire_arena *arena,
                                                       struct writer *error);

/* Replies. Each replaces the buffer's contents.
 * Return STATUS_RANGE past WIRE_MESSAGE_MAX, STATUS_BUSY without memory. */
MUST_USE enum status public_generate_reply_encode(const struct public_generate_reply *reply,
                                                  struct wire_buffer *out);
MUST_USE enum status public_abort_reply_encode(uint32_t aborted, struct wire_buffer *out);
MUST_USE enum status public_tokenize_reply_encode(const struct public_tokenize_reply *reply,
                                                  struct wire_buffer *out);
MUST_USE enum status public_list_models_reply_encode(const struct public_model *models,
                                                     uint32_t count, struct wire_buffer *out);

/* The client's side, for our own C programs (bench, tests). Encoders check nothing: a test may
 * wish to send nonsense. Decoders return STATUS_CORRUPT for what no router of ours sends. */
MUST_USE enum status public_generate_request_encode(const struct public_generate_request *request,
                                                    struct wire_buffer *out);
MUST_USE enum status public_generate_reply_decode(struct bytes bytes, struct wire_arena *arena,
                                                  struct public_generate_reply *out);
MUST_USE enum status public_abort_request_encode(const struct public_abort_request *request,
                                                 struct wire_buffer *out);
MUST_USE enum status public_abort_reply_decode(struct bytes bytes, struct wire_arena *arena,
                                               uint32_t *aborted_out);
MUST_USE enum status public_tokenize_request_encode(const struct public_tokenize_request *request,
                                                    struct wire_buffer *out);
MUST_USE enum status public_tokenize_reply_decode(struct bytes bytes, struct wire_arena *arena,
                                                  struct public_tokenize_reply *out);
MUST_USE enum status public_list_models_request_encode(struct wire_buffer *out);
MUST_USE enum status public_list_models_reply_decode(struct bytes bytes, struct wire_arena *arena,
                                                     const struct public_model **models_out,
                                                     uint32_t *count_out);

#endif
