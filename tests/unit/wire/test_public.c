#include "wire/public.h"

#include "baton/v1/inference.pb-c.h"
#include "unit/wire/support.h"
#include "wire/descriptors.h"

static struct wire_buffer buffer;
static struct wire_arena arena;
static char sentence[PUBLIC_ERROR_MAX];
static struct public_generate_request request;
static uint32_t tokens[2000];
static uint32_t stop_tokens[20];
static struct bytes stops[20];
static struct public_bias biases[70];
static char text[4000];
static const char *const pieces[] = {"a",  "Zürich ", "\xe2\x82\xac", "\xf0\x9f\x8e\xbc",
                                     "\n", "the "};

static int fini(void **state) {
    (void)state;
    wire_buffer_fini(&buffer);
    wire_arena_fini(&arena);
    return 0;
}

static enum status read_request(struct bytes bytes, struct public_generate_request *out) {
    struct writer writer;
    writer_init(&writer, sentence, sizeof sentence - 1);
    wire_arena_reset(&arena);
    enum status status = public_generate_request_decode(bytes, &arena, out, &writer);
    assert_false(writer.is_full);
    sentence[writer.len] = '\0';
    assert_int_equal(status == STATUS_OK, writer.len == 0);
    return status;
}

static struct bytes random_utf8(struct prng *prng, size_t most) {
    size_t len = 0;
    size_t wanted = 1 + prng_below(prng, (uint32_t)most - 16);
    while (len < wanted) {
        if (prng_below(prng, 20) == 0) {
            text[len++] = '\0'; /* an ordinary character */
            continue;
        }
        const char *piece = pieces[prng_below(prng, sizeof pieces / sizeof pieces[0])];
        memcpy(text + len, piece, strlen(piece));
        len += strlen(piece);
    }
    return (struct bytes){(const uint8_t *)text, len};
}

static void random_sampling(struct prng *prng, struct public_sampling *sampling) {
    sampling->has_temperature = random_bool(prng);
    sampling->has_top_p = random_bool(prng);
    sampling->has_top_k = random_bool(prng);
    sampling->has_min_p = random_bool(prng);
    sampling->has_repetition_penalty = random_bool(prng);
    sampling->has_seed = random_bool(prng);
    sampling->has_logprobs = random_bool(prng);
    sampling->ignore_eos = random_bool(prng);
    sampling->temperature = sampling->has_temperature ? random_float(prng, -1.0f, 1.0f) : 0.0f;
    sampling->top_p = sampling->has_top_p ? random_float(prng, -1.0f, 1.0f) : 0.0f;
    sampling->top_k = sampling->has_top_k ? (int32_t)random_u32(prng) : 0;
    sampling->min_p = sampling->has_min_p ? random_float(prng, -1.0f, 1.0f) : 0.0f;
    sampling->repetition_penalty =
        sampling->has_repetition_penalty ? random_float(prng, 0.0f, 3.0f) : 0.0f;
    sampling->frequency_penalty = random_float(prng, -2.0f, 2.0f);
    sampling->presence_penalty = random_float(prng, -2.0f, 2.0f);
    sampling->seed = sampling->has_seed ? random_u64(prng) : 0;
    sampling->logprobs = sampling->has_logprobs ? random_u32(prng) : 0;
    sampling->min_tokens = random_u32(prng);
    sampling->stop_count = prng_below(prng, 20);
    sampling->stops = stops;
    for (uint32_t i = 0; i < sampling->stop_count; i++) {
        const char *piece = pieces[prng_below(prng, sizeof pieces / sizeof pieces[0])];
        stops[i] = (struct bytes){(const uint8_t *)piece, strlen(piece)};
    }
    sampling->stop_token_count = prng_below(prng, 20);
    sampling->stop_tokens = stop_tokens;
    for (uint32_t i = 0; i < sampling->stop_token_count; i++) {
        stop_tokens[i] = random_u32(prng);
    }
    sampling->bias_count = prng_below(prng, 70);
    sampling->biases = biases;
    for (uint32_t i = 0; i < sampling->bias_count; i++) {
        biases[i] = (struct public_bias){random_u32(prng), random_float(prng, -100.0f, 100.0f)};
    }
}

static void random_request(struct prng *prng) {
    memset(&request, 0, sizeof request);
    random_ascii(prng, request.model, LABEL_MAX, 1);
    random_ascii(prng, request.request_label, LABEL_MAX, 0);
    random_ascii(prng, request.session_label, LABEL_MAX, 0);
    random_ascii(prng, request.cache_salt, LABEL_MAX, 0);
    request.max_tokens = random_u32(prng);
    request.has_max_tokens = request.max_tokens > 0;
    request.choices = random_bool(prng) ? random_u32(prng) : 0;
    request.is_tokens = random_bool(prng);
    if (request.is_tokens) {
        request.token_count = 1 + prng_below(prng, 2000);
        request.tokens = tokens;
        for (uint32_t i = 0; i < request.token_count; i++) {
            tokens[i] = random_u32(prng);
        }
    } else {
        request.prompt = random_utf8(prng, sizeof text);
    }
    random_sampling(prng, &request.sampling);
}

static void assert_same_bytes(struct bytes left, struct bytes right) {
    assert_int_equal(left.len, right.len);
    if (left.len > 0) {
        assert_memory_equal(left.data, right.data, left.len);
    }
}

static void assert_same_sampling(const struct public_sampling *left,
                                 const struct public_sampling *right) {
    for (uint32_t i = 0; i < left->stop_count && left->stop_count == right->stop_count; i++) {
        assert_same_bytes(left->stops[i], right->stops[i]);
    }
    for (uint32_t i = 0; i < left->bias_count && left->bias_count == right->bias_count; i++) {
        assert_int_equal(left->biases[i].token, right->biases[i].token);
        assert_true(left->biases[i].bias == right->biases[i].bias);
    }
    if (left->stop_token_count > 0 && left->stop_token_count == right->stop_token_count) {
        assert_memory_equal(left->stop_tokens, right->stop_tokens,
                            left->stop_token_count * sizeof(uint32_t));
    }
    struct public_sampling a = *left;
    struct public_sampling b = *right;
    a.stops = b.stops = NULL;
    a.biases = b.biases = NULL;
    a.stop_tokens = b.stop_tokens = NULL;
    assert_memory_equal(&a, &b, sizeof a);
}

static void test_requests_come_back_as_they_were(void **state) {
    (void)state;
    struct prng prng = {1};
    for (int round = 0; round < 3000; round++) {
        random_request(&prng);
        assert_int_equal(public_generate_request_encode(&request, &buffer), STATUS_OK);
        struct public_generate_request out;
        assert_int_equal(read_request(wire_buffer_bytes(&buffer), &out), STATUS_OK);
        assert_string_equal(out.model, request.model);
        assert_string_equal(out.request_label, request.request_label);
        assert_string_equal(out.session_label, request.session_label);
        assert_string_equal(out.cache_salt, request.cache_salt);
        assert_int_equal(out.has_max_tokens, request.has_max_tokens);
        assert_int_equal(out.max_tokens, request.max_tokens);
        assert_int_equal(out.choices, request.choices);
        assert_int_equal(out.is_tokens, request.is_tokens);
        assert_same_bytes(out.prompt, request.prompt);
        assert_int_equal(out.token_count, request.token_count);
        if (out.token_count > 0) {
            assert_memory_equal(out.tokens, tokens, out.token_count * sizeof *tokens);
        }
        assert_same_sampling(&out.sampling, &request.sampling);
    }
}

static void read_hostile(const uint8_t *data, size_t len) {
    uint8_t *copy = bytes_copy(data, len);
    struct public_generate_request out;
    enum status status = read_request((struct bytes){copy, len}, &out);
    free(copy);
    if (status == STATUS_OK) { /* every byte that it points to is there */
        assert_true(utf8_is_valid(out.prompt.data, out.prompt.len));
        struct sampling sampling;
        const struct generation_defaults defaults = {0};
        struct writer writer;
        writer_init(&writer, sentence, sizeof sentence);
        status = public_sampling_resolve(&out.sampling, &defaults, 1, out.max_tokens, &sampling,
                                         &writer);
        assert_false(writer.is_full);
        struct wire_buffer again = {0};
        assert_int_equal(public_generate_request_encode(&out, &again), STATUS_OK);
        wire_buffer_fini(&again);
    } else {
        assert_int_equal(status, STATUS_INVALID);
    }
}

static void test_cut_and_bent_requests_are_refused_or_requests(void **state) {
    (void)state;
    struct prng prng = {2};
    static uint8_t bent[100000];
    for (int round = 0; round < 1500; round++) {
        random_request(&prng);
        assert_int_equal(public_generate_request_encode(&request, &buffer), STATUS_OK);
        for (int i = 0; i < 8; i++) {
            read_hostile(buffer.data, prng_below(&prng, (uint32_t)buffer.len));
            memcpy(bent, buffer.data, buffer.len);
            read_hostile(bent, bytes_bend(&prng, bent, buffer.len));
        }
    }
}

static void plain_request(void) {
    memset(&request, 0, sizeof request);
    memcpy(request.model, "m", 2);
    request.prompt = (struct bytes){(const uint8_t *)"hi", 2};
}

static void assert_refused(const char *says) {
    struct public_generate_request out;
    assert_int_equal(public_generate_request_encode(&request, &buffer), STATUS_OK);
    assert_int_equal(read_request(wire_buffer_bytes(&buffer), &out), STATUS_INVALID);
    assert_string_equal(sentence, says);
}

static void test_a_prompt_that_is_not_utf8_names_the_byte(void **state) {
    (void)state;
    const struct {
        const char *text;
        size_t len;
        const char *says;
    } cases[] = {
        {"\xff", 1, "prompt is not valid UTF-8: the byte at offset 0 does not fit"},
        {"ab\xc3", 3, "prompt is not valid UTF-8: the byte at offset 2 does not fit"},
        {"\xe2\x82\xac\xe2\x82", 5, "prompt is not valid UTF-8: the byte at offset 3 does not fit"},
        {"a\0\xed\xa0\x80", 5, "prompt is not valid UTF-8: the byte at offset 2 does not fit"},
        {"\xf0\x9f\x8e\xbc\x80", 5, "prompt is not valid UTF-8: the byte at offset 4 does not fit"},
        {"\xc0\x80", 2, "prompt is not valid UTF-8: the byte at offset 0 does not fit"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        plain_request();
        request.prompt = (struct bytes){(const uint8_t *)cases[i].text, cases[i].len};
        assert_refused(cases[i].says);
    }
}

static void test_requests_that_lack_something_say_what(void **state) {
    (void)state;
    plain_request();
    request.model[0] = '\0';
    assert_refused("model is empty: set it to a name that ListModels returns");
    plain_request();
    request.prompt.len = 0;
    assert_refused("prompt is empty: give at least one character, or token_ids");
    plain_request();
    request.is_tokens = true;
    assert_refused("token_ids is empty: give at least one token");
    Baton__V1__GenerateRequest raw = BATON__V1__GENERATE_REQUEST__INIT;
    static char model[] = "m";
    raw.model = model;
    uint8_t bytes[256];
    size_t len = baton__v1__generate_request__pack(&raw, bytes);
    struct public_generate_request out;
    assert_int_equal(read_request((struct bytes){bytes, len}, &out), STATUS_INVALID);
    assert_string_equal(sentence, "there is no input: set prompt or token_ids");
}

static void test_labels_are_bounded_and_without_nul(void **state) {
    (void)state;
    Baton__V1__GenerateRequest raw = BATON__V1__GENERATE_REQUEST__INIT;
    static char label[80];
    memset(label, 'l', sizeof label - 1);
    static char model[] = "m";
    raw.model = model;
    raw.request_id = label;
    raw.input_case = BATON__V1__GENERATE_REQUEST__INPUT_PROMPT;
    raw.prompt = model;
    uint8_t bytes[256];
    struct public_generate_request out;
    label[LABEL_MAX] = '\0';
    size_t len = baton__v1__generate_request__pack(&raw, bytes);
    assert_int_equal(read_request((struct bytes){bytes, len}, &out), STATUS_INVALID);
    assert_string_equal(sentence, "request_id has 64 bytes: at most 63 are accepted");
    label[LABEL_MAX - 1] = '\0';
    len = baton__v1__generate_request__pack(&raw, bytes);
    assert_int_equal(read_request((struct bytes){bytes, len}, &out), STATUS_OK);
    assert_string_equal(out.request_label, label);
    const uint8_t with_nul[] = {0x0a, 1, 'm', 0x12, 1, 'p', 0x3a, 3, 'a', 0, 'b'};
    assert_int_equal(read_request((struct bytes){with_nul, sizeof with_nul}, &out), STATUS_INVALID);
    assert_string_equal(sentence, "session_id contains a NUL character: remove it");
}

static void test_fields_in_pieces_are_merged_as_protobuf_says(void **state) {
    (void)state;
    /* two prompts (the last counts) and two samplings (stop lists are joined, NUL included) */
    const uint8_t bytes[] = {
        0x0a, 1,  'm',                                            /* model */
        0x12, 3,  'o',  'l',  'd',                                /* prompt */
        0x2a, 29,                                                 /* sampling */
        0x0d, 0,  0,    0,    0,    0x15, 0,    0,    0x80, 0x3f, /* temperature, top_p */
        0x18, 5,  0x25, 0,    0,    0,    0,                      /* top_k, min_p */
        0x3d, 0,  0,    0x80, 0x3f, 0x40, 9,    0x68, 0,   /* repetition_penalty, seed, logprobs */
        0x4a, 1,  'x',                                     /* stop */
        0x2a, 7,  0x4a, 2,    'a',  0,    0x4a, 1,    'z', /* sampling: stop, stop */
        0x12, 4,  'n',  0,    'e',  'w',                   /* prompt */
    };
    struct public_generate_request out;
    assert_int_equal(read_request((struct bytes){bytes, sizeof bytes}, &out), STATUS_OK);
    assert_int_equal(out.prompt.len, 4);
    assert_memory_equal(out.prompt.data, "n\0ew", 4);
    assert_true(out.sampling.has_seed && out.sampling.seed == 9 && out.sampling.top_k == 5);
    assert_int_equal(out.sampling.stop_count, 3);
    assert_int_equal(out.sampling.stops[0].len, 1);
    assert_int_equal(out.sampling.stops[1].len, 2);
    assert_memory_equal(out.sampling.stops[1].data, "a", 2);
    assert_memory_equal(out.sampling.stops[2].data, "z", 1);
}

/* protobuf-c 1.4.1 cannot merge two pieces of a message while a oneof of it is unset in both; no
 * ordinary writer sends pieces. It must be a refusal, not half a request. */
static void test_pieces_that_protobuf_c_cannot_merge_are_refused(void **state) {
    (void)state;
    const uint8_t bytes[] = {0x0a, 1, 'm', 0x12, 1, 'p',  0x2a, 3,
                             0x4a, 1, 'x', 0x2a, 3, 0x4a, 1,    'y'};
    struct public_generate_request out;
    assert_int_equal(read_request((struct bytes){bytes, sizeof bytes}, &out), STATUS_INVALID);
    assert_non_null(strstr(sentence, "not a valid baton.v1.GenerateRequest"));
}

static void test_bytes_that_are_no_request_say_which_message_was_meant(void **state) {
    (void)state;
    const uint8_t bytes[] = {0x0a, 0x7f, 'm'};
    struct public_generate_request out;
    assert_int_equal(read_request((struct bytes){bytes, sizeof bytes}, &out), STATUS_INVALID);
    assert_non_null(strstr(sentence, "not a valid baton.v1.GenerateRequest"));
    size_t len = WIRE_MESSAGE_MAX + 1;
    uint8_t *large = calloc(1, len);
    assert_non_null(large);
    assert_int_equal(read_request((struct bytes){large, len}, &out), STATUS_INVALID);
    assert_non_null(strstr(sentence, "16777217 bytes: at most 16777216"));
    free(large);
}

static void test_tokens_written_one_by_one_are_accepted(void **state) {
    (void)state;
    static uint8_t bytes[40016];
    static const uint32_t count = 10000;
    size_t at = 0;
    bytes[at++] = 0x0a;
    bytes[at++] = 1;
    bytes[at++] = 'm';
    bytes[at++] = 0x1a;
    bytes[at++] = 0x80 | (3 * count & 0x7f); /* 30000 bytes of TokenIds */
    bytes[at++] = 0x80 | (3 * count >> 7 & 0x7f);
    bytes[at++] = (uint8_t)(3 * count >> 14);
    for (uint32_t i = 0; i < count; i++) { /* as a proto2 writer does: field 1, not packed */
        bytes[at++] = 0x08;
        bytes[at++] = 0x80 | (i & 0x7f);
        bytes[at++] = (uint8_t)(i >> 7 & 0x7f);
    }
    struct public_generate_request out;
    assert_int_equal(read_request((struct bytes){bytes, at}, &out), STATUS_OK);
    assert_int_equal(out.token_count, count);
    assert_int_equal(out.tokens[9999], 9999);
}

static void random_logprobs(struct prng *prng, struct public_generate_reply *reply) {
    static float logprobs[200];
    static uint32_t top_counts[200];
    static uint32_t top_tokens[200 * LOGPROBS_TOP_MAX];
    static float top_logprobs[200 * LOGPROBS_TOP_MAX];
    uint32_t total = 0;
    for (uint32_t i = 0; i < reply->token_count; i++) {
        logprobs[i] = random_float(prng, -100.0f, 0.0f);
        top_counts[i] = prng_below(prng, 1 + LOGPROBS_TOP_MAX);
        for (uint32_t k = 0; k < top_counts[i]; k++, total++) {
            top_tokens[total] = random_u32(prng);
            top_logprobs[total] = random_float(prng, -100.0f, 0.0f);
        }
    }
    reply->logprobs = (struct public_logprobs){logprobs, top_counts, top_tokens, top_logprobs};
}

static void assert_same_logprobs(const struct public_generate_reply *a,
                                 const struct public_generate_reply *b) {
    assert_int_equal(a->logprobs.logprobs == NULL, b->logprobs.logprobs == NULL);
    uint32_t total = 0;
    for (uint32_t i = 0; b->logprobs.logprobs != NULL && i < b->token_count; i++) {
        assert_true(a->logprobs.logprobs[i] == b->logprobs.logprobs[i]);
        assert_int_equal(a->logprobs.top_counts[i], b->logprobs.top_counts[i]);
        for (uint32_t k = 0; k < b->logprobs.top_counts[i]; k++, total++) {
            assert_int_equal(a->logprobs.top_tokens[total], b->logprobs.top_tokens[total]);
            assert_true(a->logprobs.top_logprobs[total] == b->logprobs.top_logprobs[total]);
        }
    }
}

static void test_replies_come_back_as_they_were(void **state) {
    (void)state;
    struct prng prng = {3};
    for (int round = 0; round < 3000; round++) {
        struct public_generate_reply reply;
        memset(&reply, 0, sizeof reply);
        char label[LABEL_MAX];
        random_ascii(&prng, label, sizeof label, 0);
        reply.token_count = prng_below(&prng, 200);
        reply.tokens = tokens;
        for (uint32_t i = 0; i < reply.token_count; i++) {
            tokens[i] = random_u32(&prng);
        }
        if (random_bool(&prng) && reply.token_count > 0) {
            random_logprobs(&prng, &reply);
        }
        reply.text = random_utf8(&prng, sizeof text);
        reply.finish = (enum finish)prng_below(&prng, FINISH_ERROR + 1);
        reply.request = label;
        reply.index = prng_below(&prng, 16);
        reply.has_usage = random_bool(&prng);
        if (reply.has_usage) {
            reply.usage = (struct usage){random_u32(&prng), random_u32(&prng), random_u32(&prng)};
            reply.seed = random_u64(&prng);
        }
        reply.has_trace = random_bool(&prng);
        if (reply.has_trace) {
            random_ascii(&prng, reply.trace.prefill_worker, LABEL_MAX, 0);
            random_ascii(&prng, reply.trace.decode_worker, LABEL_MAX, 0);
            reply.trace.kv_bytes = random_u64(&prng);
            reply.trace.attempts = random_u32(&prng);
            reply.trace.queue_ms = random_float(&prng, 0.0f, 1000.0f);
            reply.trace.ttft_ms = random_float(&prng, 0.0f, 1000.0f);
            reply.trace.total_ms = random_float(&prng, 0.0f, 1000.0f);
            reply.trace.has_kv_exposed = random_bool(&prng);
            if (reply.trace.has_kv_exposed) {
                reply.trace.kv_exposed_ms = random_float(&prng, 0.0f, 10.0f);
            }
        }
        assert_int_equal(public_generate_reply_encode(&reply, &buffer), STATUS_OK);
        struct public_generate_reply out;
        wire_arena_reset(&arena);
        assert_int_equal(public_generate_reply_decode(wire_buffer_bytes(&buffer), &arena, &out),
                         STATUS_OK);
        assert_int_equal(out.token_count, reply.token_count);
        if (out.token_count > 0) {
            assert_memory_equal(out.tokens, tokens, out.token_count * sizeof *tokens);
        }
        assert_same_logprobs(&out, &reply);
        assert_same_bytes(out.text, reply.text);
        assert_string_equal(out.request, label);
        assert_int_equal(out.finish, reply.finish);
        assert_int_equal(out.index, reply.index);
        assert_int_equal(out.has_usage, reply.has_usage);
        assert_memory_equal(&out.usage, &reply.usage, sizeof out.usage);
        assert_true(out.seed == reply.seed);
        assert_int_equal(out.has_trace, reply.has_trace);
        assert_string_equal(out.trace.prefill_worker, reply.trace.prefill_worker);
        assert_string_equal(out.trace.decode_worker, reply.trace.decode_worker);
        assert_true(out.trace.kv_bytes == reply.trace.kv_bytes &&
                    out.trace.attempts == reply.trace.attempts &&
                    out.trace.queue_ms == reply.trace.queue_ms &&
                    out.trace.ttft_ms == reply.trace.ttft_ms &&
                    out.trace.total_ms == reply.trace.total_ms &&
                    out.trace.has_kv_exposed == reply.trace.has_kv_exposed &&
                    out.trace.kv_exposed_ms == reply.trace.kv_exposed_ms);
        static uint8_t bent[100000];
        assert_in_range(buffer.len, 0, sizeof bent / 2);
        memcpy(bent, buffer.data, buffer.len);
        size_t len = bytes_bend(&prng, bent, buffer.len);
        uint8_t *copy = bytes_copy(bent, len);
        wire_arena_reset(&arena);
        enum status status = public_generate_reply_decode((struct bytes){copy, len}, &arena, &out);
        assert_true(status == STATUS_OK || status == STATUS_CORRUPT);
        free(copy);
    }
}

static enum status read_abort(struct bytes bytes, struct public_abort_request *out) {
    struct writer writer;
    writer_init(&writer, sentence, sizeof sentence - 1);
    wire_arena_reset(&arena);
    enum status status = public_abort_request_decode(bytes, &arena, out, &writer);
    sentence[writer.len] = '\0';
    return status;
}

static void test_abort_names_exactly_one_label(void **state) {
    (void)state;
    struct public_abort_request out;
    const struct public_abort_request by_session = {.label = "agent-7", .is_session = true};
    assert_int_equal(public_abort_request_encode(&by_session, &buffer), STATUS_OK);
    assert_int_equal(read_abort(wire_buffer_bytes(&buffer), &out), STATUS_OK);
    assert_true(out.is_session);
    assert_string_equal(out.label, "agent-7");
    const struct public_abort_request by_request = {.label = "r1"};
    assert_int_equal(public_abort_request_encode(&by_request, &buffer), STATUS_OK);
    assert_int_equal(read_abort(wire_buffer_bytes(&buffer), &out), STATUS_OK);
    assert_false(out.is_session);
    assert_string_equal(out.label, "r1");
    const struct public_abort_request empty = {.is_session = true};
    assert_int_equal(public_abort_request_encode(&empty, &buffer), STATUS_OK);
    assert_int_equal(read_abort(wire_buffer_bytes(&buffer), &out), STATUS_INVALID);
    assert_non_null(strstr(sentence, "session_id is empty"));
    assert_int_equal(read_abort((struct bytes){NULL, 0}, &out), STATUS_INVALID);
    assert_string_equal(sentence, "nothing is named: set request_id or session_id");
    uint32_t aborted = 0;
    assert_int_equal(public_abort_reply_encode(80, &buffer), STATUS_OK);
    assert_int_equal(public_abort_reply_decode(wire_buffer_bytes(&buffer), &arena, &aborted),
                     STATUS_OK);
    assert_int_equal(aborted, 80);
}

static void test_tokenize_carries_any_text_and_refuses_what_is_none(void **state) {
    (void)state;
    struct writer writer;
    writer_init(&writer, sentence, sizeof sentence - 1);
    struct public_tokenize_request in = {
        .model = "m", .text = {(const uint8_t *)"a\0b", 3}, .add_special = true};
    struct public_tokenize_request out;
    assert_int_equal(public_tokenize_request_encode(&in, &buffer), STATUS_OK);
    wire_arena_reset(&arena);
    assert_int_equal(
        public_tokenize_request_decode(wire_buffer_bytes(&buffer), &arena, &out, &writer),
        STATUS_OK);
    assert_same_bytes(out.text, in.text);
    assert_true(out.add_special);
    in.text = (struct bytes){(const uint8_t *)"a\x80", 2};
    assert_int_equal(public_tokenize_request_encode(&in, &buffer), STATUS_OK);
    assert_int_equal(
        public_tokenize_request_decode(wire_buffer_bytes(&buffer), &arena, &out, &writer),
        STATUS_INVALID);
    sentence[writer.len] = '\0';
    assert_string_equal(sentence, "text is not valid UTF-8: the byte at offset 1 does not fit");
    const uint32_t ids[] = {1, 70000, UINT32_MAX};
    const struct public_tokenize_reply reply = {3, ids, 4096};
    struct public_tokenize_reply back;
    assert_int_equal(public_tokenize_reply_encode(&reply, &buffer), STATUS_OK);
    wire_arena_reset(&arena);
    assert_int_equal(public_tokenize_reply_decode(wire_buffer_bytes(&buffer), &arena, &back),
                     STATUS_OK);
    assert_int_equal(back.token_count, 3);
    assert_memory_equal(back.tokens, ids, sizeof ids);
    assert_int_equal(back.context_tokens, 4096);
}

static void test_models_are_listed(void **state) {
    (void)state;
    const struct public_model models[] = {{"tiny", 2048, 1000, 1, 2},
                                          {"large", 131072, 128256, 0, 0}};
    struct writer writer;
    writer_init(&writer, sentence, sizeof sentence);
    assert_int_equal(public_list_models_request_encode(&buffer), STATUS_OK);
    assert_int_equal(public_list_models_request_decode(wire_buffer_bytes(&buffer), &arena, &writer),
                     STATUS_OK);
    const struct public_model *out = NULL;
    uint32_t count = 9;
    assert_int_equal(public_list_models_reply_encode(models, 2, &buffer), STATUS_OK);
    wire_arena_reset(&arena);
    assert_int_equal(
        public_list_models_reply_decode(wire_buffer_bytes(&buffer), &arena, &out, &count),
        STATUS_OK);
    assert_int_equal(count, 2);
    assert_memory_equal(out, models, sizeof models);
    assert_int_equal(public_list_models_reply_encode(NULL, 0, &buffer), STATUS_OK);
    assert_int_equal(
        public_list_models_reply_decode(wire_buffer_bytes(&buffer), &arena, &out, &count),
        STATUS_OK);
    assert_int_equal(count, 0);
}

static bool holds(struct bytes bytes, const char *word) {
    size_t len = strlen(word);
    for (size_t i = 0; i + len <= bytes.len; i++) {
        if (memcmp(bytes.data + i, word, len) == 0) {
            return true;
        }
    }
    return false;
}

static void test_the_embedded_descriptors_are_those_of_the_public_api(void **state) {
    (void)state;
    struct bytes set = wire_inference_descriptors();
    assert_true(set.len > 500);
    assert_int_equal(set.data[0], 0x0a); /* FileDescriptorSet.file */
    assert_true(holds(set, "baton/v1/inference.proto"));
    assert_true(holds(set, "Inference"));
    assert_true(holds(set, "GenerateReply"));
    assert_false(holds(set, "incarnation")); /* nothing of the sessions */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_requests_come_back_as_they_were),
        cmocka_unit_test(test_cut_and_bent_requests_are_refused_or_requests),
        cmocka_unit_test(test_a_prompt_that_is_not_utf8_names_the_byte),
        cmocka_unit_test(test_requests_that_lack_something_say_what),
        cmocka_unit_test(test_labels_are_bounded_and_without_nul),
        cmocka_unit_test(test_fields_in_pieces_are_merged_as_protobuf_says),
        cmocka_unit_test(test_pieces_that_protobuf_c_cannot_merge_are_refused),
        cmocka_unit_test(test_bytes_that_are_no_request_say_which_message_was_meant),
        cmocka_unit_test(test_tokens_written_one_by_one_are_accepted),
        cmocka_unit_test(test_replies_come_back_as_they_were),
        cmocka_unit_test(test_abort_names_exactly_one_label),
        cmocka_unit_test(test_tokenize_carries_any_text_and_refuses_what_is_none),
        cmocka_unit_test(test_models_are_listed),
        cmocka_unit_test(test_the_embedded_descriptors_are_those_of_the_public_api),
    };
    return cmocka_run_group_tests(tests, NULL, fini);
}
