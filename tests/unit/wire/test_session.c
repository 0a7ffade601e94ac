#include "wire/session.h"

#include <math.h>

#include "baton/v1/peer.pb-c.h"
#include "unit/wire/support.h"
#include "wire/pack.h"

#define TOKENS_MAX 5000u

/* A random message with the memory it points into. */
struct sample {
    struct message message;
    uint32_t tokens[TOKENS_MAX];
    uint64_t ids[MESSAGE_IDS_MAX];
    uint8_t address[WORKER_ADDRESS_MAX];
};

static struct sample sample;
static struct wire_buffer buffer;
static struct wire_arena arena;

static uint32_t random_count(struct prng *prng, uint32_t least, uint32_t most) {
    uint32_t small = most - least < 20 ? most - least : 20;
    return least + prng_below(prng, (prng_below(prng, 8) == 0 ? most - least : small) + 1);
}

static enum cause random_cause(struct prng *prng) {
    return (enum cause)prng_below(prng, CAUSE_COUNT);
}

static enum outcome random_outcome(struct prng *prng) {
    return (enum outcome)(1 + prng_below(prng, OUTCOME_FAILED));
}

static void fill_tokens(struct prng *prng, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        sample.tokens[i] = random_u32(prng);
    }
}

/* Some tokens whose requests want alternatives, some that want none, some that want nothing. */
static void fill_logprobs(struct prng *prng, struct message *message) {
    static float logprobs[TOKENS_MAX];
    static uint32_t top_counts[TOKENS_MAX];
    static uint32_t top_tokens[TOKENS_MAX * LOGPROBS_TOP_MAX];
    static float top_logprobs[TOKENS_MAX * LOGPROBS_TOP_MAX];
    uint32_t total = 0;
    for (uint32_t i = 0; i < message->u.tokens.count; i++) {
        logprobs[i] = random_float(prng, -100.0f, 0.0f);
        top_counts[i] = prng_below(prng, 2 + LOGPROBS_TOP_MAX);
        total += top_counts[i] > 0 ? top_counts[i] - 1 : 0;
    }
    for (uint32_t i = 0; i < total; i++) {
        top_tokens[i] = random_u32(prng);
        top_logprobs[i] = random_float(prng, -100.0f, 0.0f);
    }
    message->u.tokens.logprobs = logprobs;
    message->u.tokens.top_counts = top_counts;
    message->u.tokens.top_count = total;
    message->u.tokens.top_tokens = top_tokens;
    message->u.tokens.top_logprobs = top_logprobs;
}

static void fill_ids(struct prng *prng, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        sample.ids[i] = random_id(prng);
    }
}

static void fill_sampling(struct prng *prng, struct sampling *sampling) {
    sampling->seed = random_u64(prng);
    sampling->temperature = random_float(prng, 0.0f, 2.0f);
    sampling->top_p = random_float(prng, 0.001f, 1.0f);
    sampling->min_p = random_float(prng, 0.0f, 1.0f);
    sampling->top_k = random_bool(prng) ? -1 : 1 + (int32_t)prng_below(prng, 1000);
    sampling->frequency_penalty = random_float(prng, -2.0f, 2.0f);
    sampling->presence_penalty = random_float(prng, -2.0f, 2.0f);
    sampling->repetition_penalty = random_float(prng, 0.5f, 2.0f);
    sampling->min_tokens = random_u32(prng);
    sampling->ignore_eos = random_bool(prng);
    sampling->logprobs = prng_below(prng, 2 + LOGPROBS_TOP_MAX);
    sampling->stop_token_count = prng_below(prng, SAMPLING_STOP_TOKENS_MAX + 1);
    for (uint32_t i = 0; i < sampling->stop_token_count; i++) {
        sampling->stop_tokens[i] = random_u32(prng);
    }
    sampling->bias_count = prng_below(prng, SAMPLING_BIAS_MAX + 1);
    for (uint32_t i = 0; i < sampling->bias_count; i++) {
        sampling->biases[i].token = random_u32(prng);
        sampling->biases[i].bias = random_float(prng, -100.0f, 100.0f);
    }
}

/* Or none. */
static struct siphash128 random_salt(struct prng *prng) {
    bool is_set = random_bool(prng);
    return (struct siphash128){is_set ? random_id(prng) : 0, is_set ? random_u64(prng) : 0};
}

static void fill_admit(struct prng *prng, struct message *message) {
    message->u.admit.attempt.v = random_id(prng);
    message->u.admit.token_count = random_count(prng, 1, TOKENS_MAX);
    message->u.admit.tokens = sample.tokens;
    fill_tokens(prng, message->u.admit.token_count);
    message->u.admit.output_first = 1 + prng_below(prng, message->u.admit.token_count);
    message->u.admit.max_new = 1 + prng_below(prng, 100000);
    message->u.admit.deadline_ms = random_u32(prng);
    message->u.admit.local_max = random_u32(prng);
    fill_sampling(prng, &message->u.admit.sampling);
    random_text(prng, message->u.admit.label, LABEL_MAX, 0);
    message->u.admit.salt = random_salt(prng);
}

static void fill_prefill(struct prng *prng, struct message *message) {
    message->u.prefill.attempt.v = random_id(prng);
    message->u.prefill.token_count = random_count(prng, 1, TOKENS_MAX);
    message->u.prefill.tokens = sample.tokens;
    fill_tokens(prng, message->u.prefill.token_count);
    message->u.prefill.from = prng_below(prng, message->u.prefill.token_count);
    message->u.prefill.slot.v = random_id(prng);
    message->u.prefill.key = random_u64(prng);
    message->u.prefill.decode.v = random_id(prng);
    random_text(prng, message->u.prefill.address, ADDRESS_MAX, 1);
    message->u.prefill.deadline_ms = random_u32(prng);
    random_text(prng, message->u.prefill.label, LABEL_MAX, 0);
    message->u.prefill.salt = random_salt(prng);
}

static void fill_hello(struct prng *prng, struct message *message) {
    message->u.hello.incarnation.v = random_id(prng);
    message->u.hello.session = random_u64(prng);
    message->u.hello.layout.high = random_u64(prng);
    message->u.hello.layout.low = random_u64(prng);
    message->u.hello.protocol = random_u32(prng);
    message->u.hello.newest = random_u32(prng);
    message->u.hello.role = (enum role)(1 + prng_below(prng, ROLE_DECODE));
    message->u.hello.is_draining = random_bool(prng);
    random_text(prng, message->u.hello.id, LABEL_MAX, 0);
    random_text(prng, message->u.hello.numerics, MESSAGE_NUMERICS_MAX, 0);
}

static struct message *sample_fill(struct prng *prng, enum message_kind kind) {
    struct message *message = &sample.message;
    memset(message, 0, sizeof *message);
    message->kind = kind;
    switch (kind) {
    case MESSAGE_HELLO: fill_hello(prng, message); break;
    case MESSAGE_BEAT:
        message->u.beat.progress = random_u64(prng);
        message->u.beat.entries = random_u32(prng);
        message->u.beat.pages_free = random_u32(prng);
        message->u.beat.backlog_ms = random_u32(prng);
        message->u.beat.backlog_tokens = random_u32(prng);
        message->u.beat.is_draining = random_bool(prng);
        break;
    case MESSAGE_AUDIT:
    case MESSAGE_UNKNOWN:
        message->u.audit.count = random_count(prng, 0, MESSAGE_IDS_MAX);
        message->u.audit.ids = sample.ids;
        fill_ids(prng, message->u.audit.count);
        break;
    case MESSAGE_ADMIT: fill_admit(prng, message); break;
    case MESSAGE_ADMITTED:
        message->u.admitted.attempt.v = random_id(prng);
        message->u.admitted.slot.v = random_id(prng);
        message->u.admitted.key = random_u64(prng);
        message->u.admitted.cached = random_u32(prng);
        message->u.admitted.is_local = random_bool(prng);
        break;
    case MESSAGE_REJECTED:
    case MESSAGE_BUSY:
        message->u.rejected.attempt.v = random_id(prng);
        message->u.rejected.cause = random_cause(prng);
        message->u.rejected.retry_after_ms = random_u32(prng);
        break;
    case MESSAGE_PREFILL: fill_prefill(prng, message); break;
    case MESSAGE_QUEUED:
        message->u.queued.attempt.v = random_id(prng);
        message->u.queued.backlog_ms = random_u32(prng);
        break;
    case MESSAGE_PREFILL_END:
        message->u.prefill_end.attempt.v = random_id(prng);
        message->u.prefill_end.outcome = random_outcome(prng);
        message->u.prefill_end.cause = random_cause(prng);
        message->u.prefill_end.bytes = random_u64(prng);
        message->u.prefill_end.cached = random_u32(prng);
        message->u.prefill_end.exposed_us = random_u64(prng);
        break;
    case MESSAGE_OPEN:
        message->u.open.slot.v = random_id(prng);
        message->u.open.key = random_u64(prng);
        message->u.open.end = random_u32(prng);
        message->u.open.from = message->u.open.end / 2;
        message->u.open.bytes = random_u64(prng);
        break;
    case MESSAGE_ACCEPT:
        message->u.accept.slot.v = random_id(prng);
        message->u.accept.address_len = random_count(prng, 1, WORKER_ADDRESS_MAX);
        message->u.accept.address = sample.address;
        for (uint32_t i = 0; i < message->u.accept.address_len; i++) {
            sample.address[i] = (uint8_t)prng_next(prng);
        }
        break;
    case MESSAGE_REFUSE:
    case MESSAGE_ABORT_SLOT:
        message->u.refuse.slot.v = random_id(prng);
        message->u.refuse.cause = random_cause(prng);
        break;
    case MESSAGE_FIN:
        message->u.fin.slot.v = random_id(prng);
        message->u.fin.bytes = random_u64(prng);
        message->u.fin.cached = random_u32(prng);
        break;
    case MESSAGE_COMMIT: message->u.commit.slot.v = random_id(prng); break;
    case MESSAGE_TOKENS:
        message->u.tokens.count = random_count(prng, 0, TOKENS_MAX);
        message->u.tokens.attempts = sample.ids;
        message->u.tokens.tokens = sample.tokens;
        fill_ids(prng, message->u.tokens.count);
        fill_tokens(prng, message->u.tokens.count);
        if (prng_below(prng, 2) == 0 && message->u.tokens.count > 0) {
            fill_logprobs(prng, message);
        }
        break;
    case MESSAGE_END:
        message->u.end.attempt.v = random_id(prng);
        message->u.end.outcome = random_outcome(prng);
        message->u.end.cause = random_cause(prng);
        message->u.end.finish = (enum finish)prng_below(prng, FINISH_ERROR + 1);
        message->u.end.usage.prompt_tokens = random_u32(prng);
        message->u.end.usage.cached_tokens = random_u32(prng);
        message->u.end.usage.completion_tokens = random_u32(prng);
        message->u.end.kv_bytes = random_u64(prng);
        break;
    case MESSAGE_ABORT:
        message->u.abort.attempt.v = random_id(prng);
        message->u.abort.cause = random_cause(prng);
        message->u.abort.is_unless_committed = random_bool(prng);
        break;
    case MESSAGE_COMMITTED: message->u.committed.attempt.v = random_id(prng); break;
    case MESSAGE_CACHED:
        message->u.cached.is_reset = random_bool(prng);
        message->u.cached.removed_count = random_count(prng, 0, MESSAGE_BLOCKS_MAX);
        message->u.cached.stored_count = random_count(prng, 0, MESSAGE_BLOCKS_MAX);
        fill_ids(prng, message->u.cached.removed_count + message->u.cached.stored_count);
        message->u.cached.removed = sample.ids;
        message->u.cached.stored = sample.ids + message->u.cached.removed_count;
        break;
    }
    return message;
}

/* Compares arrays by content, then everything else bit by bit. */
static void assert_same(const struct message *left, const struct message *right) {
    struct message a = *left;
    struct message b = *right;
    assert_int_equal(a.kind, b.kind);
    switch (a.kind) {
    case MESSAGE_AUDIT:
    case MESSAGE_UNKNOWN:
        assert_int_equal(a.u.audit.count, b.u.audit.count);
        if (a.u.audit.count > 0) {
            assert_memory_equal(a.u.audit.ids, b.u.audit.ids,
                                a.u.audit.count * sizeof *a.u.audit.ids);
        }
        a.u.audit.ids = b.u.audit.ids = NULL;
        break;
    case MESSAGE_ADMIT:
        assert_int_equal(a.u.admit.token_count, b.u.admit.token_count);
        assert_memory_equal(a.u.admit.tokens, b.u.admit.tokens,
                            a.u.admit.token_count * sizeof *a.u.admit.tokens);
        a.u.admit.tokens = b.u.admit.tokens = NULL;
        break;
    case MESSAGE_PREFILL:
        assert_int_equal(a.u.prefill.token_count, b.u.prefill.token_count);
        assert_memory_equal(a.u.prefill.tokens, b.u.prefill.tokens,
                            a.u.prefill.token_count * sizeof *a.u.prefill.tokens);
        a.u.prefill.tokens = b.u.prefill.tokens = NULL;
        break;
    case MESSAGE_ACCEPT:
        assert_int_equal(a.u.accept.address_len, b.u.accept.address_len);
        assert_memory_equal(a.u.accept.address, b.u.accept.address, a.u.accept.address_len);
        a.u.accept.address = b.u.accept.address = NULL;
        break;
    case MESSAGE_TOKENS:
        assert_int_equal(a.u.tokens.count, b.u.tokens.count);
        if (a.u.tokens.count > 0) {
            assert_memory_equal(a.u.tokens.attempts, b.u.tokens.attempts,
                                a.u.tokens.count * sizeof *a.u.tokens.attempts);
            assert_memory_equal(a.u.tokens.tokens, b.u.tokens.tokens,
                                a.u.tokens.count * sizeof *a.u.tokens.tokens);
        }
        assert_int_equal(a.u.tokens.logprobs == NULL, b.u.tokens.logprobs == NULL);
        assert_int_equal(a.u.tokens.top_counts == NULL, b.u.tokens.top_counts == NULL);
        if (a.u.tokens.top_counts != NULL) {
            size_t bytes = a.u.tokens.count * sizeof(uint32_t);
            assert_memory_equal(a.u.tokens.logprobs, b.u.tokens.logprobs, bytes);
            assert_memory_equal(a.u.tokens.top_counts, b.u.tokens.top_counts, bytes);
        }
        assert_int_equal(a.u.tokens.top_count, b.u.tokens.top_count);
        if (a.u.tokens.top_count > 0) {
            size_t bytes = a.u.tokens.top_count * sizeof(uint32_t);
            assert_memory_equal(a.u.tokens.top_tokens, b.u.tokens.top_tokens, bytes);
            assert_memory_equal(a.u.tokens.top_logprobs, b.u.tokens.top_logprobs, bytes);
        }
        memset(&a.u.tokens, 0, sizeof a.u.tokens);
        memset(&b.u.tokens, 0, sizeof b.u.tokens);
        break;
    case MESSAGE_CACHED:
        assert_int_equal(a.u.cached.removed_count, b.u.cached.removed_count);
        assert_int_equal(a.u.cached.stored_count, b.u.cached.stored_count);
        if (a.u.cached.removed_count > 0) {
            assert_memory_equal(a.u.cached.removed, b.u.cached.removed,
                                a.u.cached.removed_count * sizeof *a.u.cached.removed);
        }
        if (a.u.cached.stored_count > 0) {
            assert_memory_equal(a.u.cached.stored, b.u.cached.stored,
                                a.u.cached.stored_count * sizeof *a.u.cached.stored);
        }
        a.u.cached.removed = b.u.cached.removed = NULL;
        a.u.cached.stored = b.u.cached.stored = NULL;
        break;
    case MESSAGE_HELLO:
    case MESSAGE_BEAT:
    case MESSAGE_ADMITTED:
    case MESSAGE_REJECTED:
    case MESSAGE_QUEUED:
    case MESSAGE_BUSY:
    case MESSAGE_PREFILL_END:
    case MESSAGE_OPEN:
    case MESSAGE_REFUSE:
    case MESSAGE_FIN:
    case MESSAGE_COMMIT:
    case MESSAGE_END:
    case MESSAGE_ABORT:
    case MESSAGE_ABORT_SLOT:
    case MESSAGE_COMMITTED: break;
    }
    assert_memory_equal(&a, &b, sizeof a);
}

static int fini(void **state) {
    (void)state;
    wire_buffer_fini(&buffer);
    wire_arena_fini(&arena);
    return 0;
}

static enum status decode(const uint8_t *data, size_t len, struct message *out) {
    wire_arena_reset(&arena);
    return wire_session_decode((struct bytes){data, len}, &arena, out);
}

/* Decodes from exactly sized memory. What decodes must be something that we could have said. */
static enum status decode_hostile(const uint8_t *data, size_t len) {
    uint8_t *copy = bytes_copy(data, len);
    static struct message out;
    struct wire_buffer again = {0};
    enum status status = decode(copy, len, &out);
    free(copy);
    if (status == STATUS_OK) {
        assert_int_equal(wire_session_encode(&out, &again), STATUS_OK);
    } else {
        assert_true(status == STATUS_CORRUPT || status == STATUS_UNSUPPORTED);
    }
    wire_buffer_fini(&again);
    return status;
}

/* A field added to core/message.h must be added to peer.proto, session.c and sample_fill, and then
 * here: without this nobody would notice that it does not travel. */
static void test_no_message_has_grown_a_field_that_does_not_travel(void **state) {
    (void)state;
    const struct message *m = &sample.message;
    assert_int_equal(sizeof m->u.hello, 144);
    assert_int_equal(sizeof m->u.beat, 32);
    assert_int_equal(sizeof m->u.audit, 16);
    assert_int_equal(sizeof m->u.admit.sampling, 632);
    assert_int_equal(sizeof m->u.admit, 760);
    assert_int_equal(sizeof m->u.admitted, 32);
    assert_int_equal(sizeof m->u.rejected, 16);
    assert_int_equal(sizeof m->u.prefill, 272);
    assert_int_equal(sizeof m->u.queued, 16);
    assert_int_equal(sizeof m->u.prefill_end, 40);
    assert_int_equal(sizeof m->u.open, 32);
    assert_int_equal(sizeof m->u.accept, 24);
    assert_int_equal(sizeof m->u.refuse, 16);
    assert_int_equal(sizeof m->u.fin, 24);
    assert_int_equal(sizeof m->u.commit, 8);
    assert_int_equal(sizeof m->u.tokens, 64);
    assert_int_equal(sizeof m->u.end, 40);
    assert_int_equal(sizeof m->u.abort, 16);
    assert_int_equal(sizeof m->u.committed, 8);
    assert_int_equal(sizeof m->u.cached, 32);
}

static void test_every_kind_comes_back_as_it_was(void **state) {
    (void)state;
    struct prng prng = {1};
    static struct message out;
    for (int round = 0; round < 300; round++) {
        for (enum message_kind kind = MESSAGE_HELLO; kind <= MESSAGE_CACHED; kind++) {
            const struct message *message = sample_fill(&prng, kind);
            assert_int_equal(wire_session_encode(message, &buffer), STATUS_OK);
            memset(&out, 0xee, sizeof out);
            assert_int_equal(decode(buffer.data, buffer.len, &out), STATUS_OK);
            assert_same(message, &out);
        }
    }
}

static void test_every_truncation_is_refused_or_still_a_message(void **state) {
    (void)state;
    struct prng prng = {2};
    size_t refused = 0;
    for (int round = 0; round < 3; round++) {
        for (enum message_kind kind = MESSAGE_HELLO; kind <= MESSAGE_CACHED; kind++) {
            assert_int_equal(wire_session_encode(sample_fill(&prng, kind), &buffer), STATUS_OK);
            size_t most = buffer.len < 2000 ? buffer.len : 2000;
            for (size_t len = 0; len < most; len++) {
                refused += decode_hostile(buffer.data, len) != STATUS_OK;
            }
        }
    }
    assert_true(refused > 1000); /* the envelope's length is there, so nearly all */
}

static void test_bent_bytes_are_refused_or_still_a_message(void **state) {
    (void)state;
    struct prng prng = {3};
    static uint8_t bent[1024 * 1024];
    size_t accepted = 0;
    size_t refused = 0;
    for (int round = 0; round < 300; round++) {
        for (enum message_kind kind = MESSAGE_HELLO; kind <= MESSAGE_CACHED; kind++) {
            assert_int_equal(wire_session_encode(sample_fill(&prng, kind), &buffer), STATUS_OK);
            for (int i = 0; i < 4; i++) {
                memcpy(bent, buffer.data, buffer.len);
                size_t len = bytes_bend(&prng, bent, buffer.len);
                enum status status = decode_hostile(bent, len);
                accepted += status == STATUS_OK;
                refused += status != STATUS_OK;
            }
        }
    }
    assert_true(accepted > 1000 && refused > 1000); /* both paths were really walked */
}

static void test_random_bytes_are_refused_or_a_message(void **state) {
    (void)state;
    struct prng prng = {4};
    uint8_t bytes[64];
    for (int round = 0; round < 20000; round++) {
        size_t len = prng_below(&prng, sizeof bytes + 1);
        for (size_t i = 0; i < len; i++) {
            bytes[i] = (uint8_t)prng_next(&prng);
        }
        (void)decode_hostile(bytes, len); /* its own checks are the test */
    }
}

static void test_a_decode_without_memory_fails_cleanly_at_every_allocation(void **state) {
    (void)state;
    struct prng prng = {5};
    for (enum message_kind kind = MESSAGE_HELLO; kind <= MESSAGE_CACHED; kind++) {
        assert_int_equal(wire_session_encode(sample_fill(&prng, kind), &buffer), STATUS_OK);
        size_t allowed = 0;
        const struct ProtobufCMessage *message = NULL;
        while (message == NULL) {
            wire_arena_reset(&arena);
            size_t slack = allowed - 4 * buffer.len; /* wraps: `allowed` bytes in all */
            message = wire_unpack(&baton__peer__v1__envelope__descriptor,
                                  wire_buffer_bytes(&buffer), &arena, slack);
            assert_true(arena.used <= allowed);
            allowed += 16;
        }
        assert_true(allowed > 16);
    }
}

/* --- hostile sizes --- */

static void test_a_claimed_length_without_its_bytes_costs_nothing(void **state) {
    (void)state;
    /* Envelope.audit with a packed array that claims 1 GiB */
    const uint8_t bytes[] = {0x1a, 0x07, 0x0a, 0x80, 0x80, 0x80, 0x80, 0x04, 0x00};
    static struct message out;
    assert_int_equal(decode(bytes, sizeof bytes, &out), STATUS_CORRUPT);
    assert_true(arena.used < 4096);
}

static void test_millions_of_tiny_fields_cannot_take_more_than_the_cap(void **state) {
    (void)state;
    size_t len = WIRE_MESSAGE_MAX;
    uint8_t *bytes = malloc(len);
    assert_non_null(bytes);
    static struct message out;
    for (size_t i = 0; i + 1 < len; i += 2) { /* Envelope.commit, empty, again and again */
        bytes[i] = 0x82;
        bytes[i + 1] = 0x01;
    }
    assert_int_equal(decode(bytes, len, &out), STATUS_CORRUPT);
    for (size_t i = 0; i + 1 < len; i += 2) { /* unknown field 31, varint */
        bytes[i] = 0xf8;
        bytes[i + 1] = 0x01;
    }
    assert_int_equal(decode(bytes, len, &out), STATUS_CORRUPT);
    for (size_t i = 0; i + 1 < len; i += 2) { /* Envelope.hello, empty: merged each time */
        bytes[i] = 0x0a;
        bytes[i + 1] = 0x00;
    }
    assert_int_equal(decode(bytes, len, &out), STATUS_CORRUPT);
    assert_true(arena.used <= WIRE_ARENA_MAX);
    free(bytes);
}

static void test_more_than_the_largest_message_is_out_of_range_both_ways(void **state) {
    (void)state;
    static struct message out;
    size_t len = WIRE_MESSAGE_MAX + 1;
    uint8_t *bytes = calloc(1, len);
    assert_non_null(bytes);
    assert_int_equal(decode(bytes, len, &out), STATUS_RANGE);
    struct prng prng = {6};
    struct message *message = sample_fill(&prng, MESSAGE_ADMIT);
    uint32_t count = WIRE_MESSAGE_MAX / 4; /* four bytes each, and the rest on top */
    message->u.admit.tokens = (const uint32_t *)(const void *)bytes;
    message->u.admit.token_count = count;
    message->u.admit.output_first = count;
    assert_int_equal(wire_session_encode(message, &buffer), STATUS_RANGE);
    assert_int_equal(buffer.len, 0);
    message->u.admit.token_count = count - 4096;
    message->u.admit.output_first = 1;
    assert_int_equal(wire_session_encode(message, &buffer), STATUS_OK);
    assert_int_equal(decode(buffer.data, buffer.len, &out), STATUS_OK);
    assert_int_equal(out.u.admit.token_count, count - 4096);
    free(bytes);
    wire_buffer_fini(&buffer);
}

/* --- bounds: what we refuse to say --- */

static void assert_unsayable(struct message *message) {
    assert_int_equal(wire_session_encode(message, &buffer), STATUS_INVALID);
    assert_int_equal(buffer.len, 0);
}

static void test_messages_past_their_bounds_are_not_encoded(void **state) {
    (void)state;
    struct prng prng = {7};
    struct message *m = sample_fill(&prng, MESSAGE_HELLO);
    m->kind = (enum message_kind)0;
    assert_unsayable(m);
    m->kind = (enum message_kind)23;
    assert_unsayable(m);
    m = sample_fill(&prng, MESSAGE_HELLO);
    m->u.hello.incarnation.v = 0;
    assert_unsayable(m);
    m = sample_fill(&prng, MESSAGE_HELLO);
    memset(m->u.hello.id, 'x', LABEL_MAX);
    assert_unsayable(m);
    m = sample_fill(&prng, MESSAGE_HELLO);
    m->u.hello.role = ROLE_NONE;
    assert_unsayable(m);
    m = sample_fill(&prng, MESSAGE_AUDIT);
    m->u.audit.count = MESSAGE_IDS_MAX + 1;
    assert_unsayable(m);
    m = sample_fill(&prng, MESSAGE_ADMIT);
    m->u.admit.token_count = 0;
    assert_unsayable(m);
    m = sample_fill(&prng, MESSAGE_ADMIT);
    m->u.admit.output_first = m->u.admit.token_count + 1;
    assert_unsayable(m);
    m = sample_fill(&prng, MESSAGE_ADMIT);
    m->u.admit.max_new = 0;
    assert_unsayable(m);
    m = sample_fill(&prng, MESSAGE_PREFILL);
    m->u.prefill.from = m->u.prefill.token_count;
    assert_unsayable(m);
    m = sample_fill(&prng, MESSAGE_PREFILL);
    m->u.prefill.address[0] = '\0';
    assert_unsayable(m);
    m = sample_fill(&prng, MESSAGE_ACCEPT);
    m->u.accept.address_len = WORKER_ADDRESS_MAX + 1;
    assert_unsayable(m);
    m = sample_fill(&prng, MESSAGE_OPEN);
    m->u.open.from = m->u.open.end + 1;
    if (m->u.open.end != UINT32_MAX) {
        assert_unsayable(m);
    }
    m = sample_fill(&prng, MESSAGE_END);
    m->u.end.outcome = OUTCOME_NONE;
    assert_unsayable(m);
    m = sample_fill(&prng, MESSAGE_REFUSE);
    m->u.refuse.cause = CAUSE_COUNT;
    assert_unsayable(m);
    m = sample_fill(&prng, MESSAGE_ADMITTED);
    m->u.admitted.slot.v = 0;
    m->u.admitted.is_local = false;
    assert_unsayable(m);
    m->u.admitted.is_local = true;
    assert_int_equal(wire_session_encode(m, &buffer), STATUS_OK);
}

/* --- bounds: what we refuse to believe, said by other means than our encoder --- */

static void assert_unbelievable(Baton__Peer__V1__Envelope *envelope, enum status expected) {
    size_t len = baton__peer__v1__envelope__get_packed_size(envelope);
    uint8_t *bytes = malloc(len + 1);
    assert_non_null(bytes);
    baton__peer__v1__envelope__pack(envelope, bytes);
    static struct message out;
    assert_int_equal(decode(bytes, len, &out), expected);
    free(bytes);
}

static void test_hellos_past_their_bounds_are_corrupt(void **state) {
    (void)state;
    static uint8_t text[LABEL_MAX] = {0};
    memset(text, 'x', sizeof text);
    Baton__Peer__V1__Hello hello = BATON__PEER__V1__HELLO__INIT;
    Baton__Peer__V1__Envelope envelope = BATON__PEER__V1__ENVELOPE__INIT;
    envelope.message_case = BATON__PEER__V1__ENVELOPE__MESSAGE_HELLO;
    envelope.hello = &hello;
    hello.role = ROLE_DECODE;
    assert_unbelievable(&envelope, STATUS_CORRUPT); /* incarnation 0 */
    hello.incarnation = 5;
    assert_unbelievable(&envelope, STATUS_OK);
    hello.role = ROLE_DECODE + 1;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    hello.role = 0x80000002;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    hello.role = ROLE_DECODE;
    hello.id = (ProtobufCBinaryData){LABEL_MAX - 1, text};
    assert_unbelievable(&envelope, STATUS_OK);
    hello.id.len = LABEL_MAX;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    hello.id.len = 10;
    text[5] = '\0';
    assert_unbelievable(&envelope, STATUS_CORRUPT); /* a NUL inside */
    hello.id.len = 5;
    hello.numerics = (ProtobufCBinaryData){MESSAGE_NUMERICS_MAX, text + 6};
    assert_unbelievable(&envelope, STATUS_CORRUPT);
}

static void test_counts_past_their_bounds_are_corrupt(void **state) {
    (void)state;
    static uint64_t ids[MESSAGE_IDS_MAX + 1];
    static uint32_t tokens[MESSAGE_IDS_MAX + 1];
    for (size_t i = 0; i <= MESSAGE_IDS_MAX; i++) {
        ids[i] = i + 1;
    }
    Baton__Peer__V1__Ids audit = BATON__PEER__V1__IDS__INIT;
    Baton__Peer__V1__Envelope envelope = BATON__PEER__V1__ENVELOPE__INIT;
    envelope.message_case = BATON__PEER__V1__ENVELOPE__MESSAGE_AUDIT;
    envelope.audit = &audit;
    audit.ids = ids;
    audit.n_ids = MESSAGE_IDS_MAX;
    assert_unbelievable(&envelope, STATUS_OK);
    audit.n_ids = MESSAGE_IDS_MAX + 1;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    Baton__Peer__V1__Tokens pairs = BATON__PEER__V1__TOKENS__INIT;
    envelope.message_case = BATON__PEER__V1__ENVELOPE__MESSAGE_TOKENS;
    envelope.tokens = &pairs;
    pairs.attempts = ids;
    pairs.tokens = tokens;
    pairs.n_attempts = 7;
    pairs.n_tokens = 6;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    pairs.n_tokens = 7;
    assert_unbelievable(&envelope, STATUS_OK);
    ids[3] = 0;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    ids[3] = 4;
    pairs.n_tokens = pairs.n_attempts = MESSAGE_IDS_MAX + 1;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    Baton__Peer__V1__Cached cached = BATON__PEER__V1__CACHED__INIT;
    envelope.message_case = BATON__PEER__V1__ENVELOPE__MESSAGE_CACHED;
    envelope.cached = &cached;
    assert_unbelievable(&envelope, STATUS_OK); /* a reset without words */
    cached.removed = cached.stored = ids;
    cached.n_removed = cached.n_stored = MESSAGE_BLOCKS_MAX;
    assert_unbelievable(&envelope, STATUS_OK);
    cached.n_removed++;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    cached.n_removed = 0;
    cached.n_stored++;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    cached.n_stored = 4;
    ids[3] = 0; /* no block has this name */
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    static uint8_t address[WORKER_ADDRESS_MAX + 1];
    Baton__Peer__V1__Accept accept = BATON__PEER__V1__ACCEPT__INIT;
    envelope.message_case = BATON__PEER__V1__ENVELOPE__MESSAGE_ACCEPT;
    envelope.accept = &accept;
    accept.slot = 1;
    assert_unbelievable(&envelope, STATUS_CORRUPT); /* no address */
    accept.address = (ProtobufCBinaryData){WORKER_ADDRESS_MAX, address};
    assert_unbelievable(&envelope, STATUS_OK);
    accept.address.len++;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
}

static void test_logprobs_that_do_not_match_their_tokens_are_corrupt(void **state) {
    (void)state;
    uint64_t ids[3] = {1, 2, 3};
    uint32_t tokens[3] = {7, 8, 9};
    float logprobs[3] = {-1.5f, 0.0f, -2.0f};
    uint32_t counts[3] = {3, 0, 1}; /* two alternatives, not wanted, none */
    uint32_t tops[2] = {5, 6};
    float top_logprobs[2] = {-0.25f, -3.0f};
    Baton__Peer__V1__Tokens fit = BATON__PEER__V1__TOKENS__INIT;
    fit.n_attempts = fit.n_tokens = fit.n_logprobs = fit.n_top_counts = 3;
    fit.n_top_tokens = fit.n_top_logprobs = 2;
    fit.attempts = ids;
    fit.tokens = tokens;
    fit.logprobs = logprobs;
    fit.top_counts = counts;
    fit.top_tokens = tops;
    fit.top_logprobs = top_logprobs;
    Baton__Peer__V1__Tokens pairs = fit;
    Baton__Peer__V1__Envelope envelope = BATON__PEER__V1__ENVELOPE__INIT;
    envelope.message_case = BATON__PEER__V1__ENVELOPE__MESSAGE_TOKENS;
    envelope.tokens = &pairs;
    assert_unbelievable(&envelope, STATUS_OK);
    pairs.n_logprobs = 2;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    pairs.n_logprobs = 0;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    pairs = fit;
    pairs.n_top_counts = 0;
    assert_unbelievable(&envelope, STATUS_CORRUPT); /* logprobs of nobody */
    pairs.n_logprobs = 0;
    assert_unbelievable(&envelope, STATUS_CORRUPT); /* alternatives of nobody */
    pairs.n_top_tokens = pairs.n_top_logprobs = 0;
    assert_unbelievable(&envelope, STATUS_OK); /* nobody asked */
    pairs = fit;
    pairs.n_top_counts = pairs.n_logprobs = 2;
    assert_unbelievable(&envelope, STATUS_CORRUPT); /* of two tokens of three */
    pairs = fit;
    pairs.n_top_tokens = 1;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    pairs.n_top_logprobs = 1;
    assert_unbelievable(&envelope, STATUS_CORRUPT); /* fewer than the counts say */
    pairs = fit;
    counts[2] = 2;
    assert_unbelievable(&envelope, STATUS_CORRUPT); /* more than there are */
    counts[2] = UINT32_MAX;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    counts[2] = 1;
    float wrong[] = {0.5f, NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        logprobs[1] = wrong[i];
        assert_unbelievable(&envelope, STATUS_CORRUPT);
        logprobs[1] = 0.0f;
        top_logprobs[1] = wrong[i];
        assert_unbelievable(&envelope, STATUS_CORRUPT);
        top_logprobs[1] = -3.0f;
    }
    assert_unbelievable(&envelope, STATUS_OK);
    static uint32_t many[2 + LOGPROBS_TOP_MAX];
    static float many_logprobs[2 + LOGPROBS_TOP_MAX];
    pairs.n_attempts = pairs.n_tokens = pairs.n_logprobs = pairs.n_top_counts = 1;
    pairs.top_tokens = many;
    pairs.top_logprobs = many_logprobs;
    counts[0] = 1 + LOGPROBS_TOP_MAX;
    pairs.n_top_tokens = pairs.n_top_logprobs = LOGPROBS_TOP_MAX;
    assert_unbelievable(&envelope, STATUS_OK);
    counts[0]++;
    pairs.n_top_tokens = ++pairs.n_top_logprobs;
    assert_unbelievable(&envelope, STATUS_CORRUPT); /* more than anybody may ask for */
}

static void test_enums_past_their_range_are_corrupt(void **state) {
    (void)state;
    Baton__Peer__V1__End end = BATON__PEER__V1__END__INIT;
    Baton__Peer__V1__Envelope envelope = BATON__PEER__V1__ENVELOPE__INIT;
    envelope.message_case = BATON__PEER__V1__ENVELOPE__MESSAGE_END;
    envelope.end = &end;
    end.attempt = 9;
    end.outcome = OUTCOME_OK;
    assert_unbelievable(&envelope, STATUS_OK); /* without usage: zeros */
    end.cause = CAUSE_COUNT;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    end.cause = UINT32_MAX;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    end.cause = CAUSE_DONE;
    end.outcome = OUTCOME_FAILED + 1;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    end.outcome = OUTCOME_NONE;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    end.outcome = OUTCOME_OK;
    end.finish = FINISH_ERROR + 1;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
    end.finish = FINISH_STOP;
    end.attempt = 0;
    assert_unbelievable(&envelope, STATUS_CORRUPT);
}

struct sampling_case {
    const char *what;
    size_t offset; /* of a float in the generated struct */
    float value;
    enum status expected;
};

static void test_sampling_past_its_range_is_corrupt(void **state) {
    (void)state;
#define AT(field) offsetof(Baton__Peer__V1__Sampling, field)
    const struct sampling_case cases[] = {
        {"greedy", AT(temperature), 0.0f, STATUS_OK},
        {"temperature", AT(temperature), -0.5f, STATUS_CORRUPT},
        {"temperature", AT(temperature), NAN, STATUS_CORRUPT},
        {"temperature", AT(temperature), INFINITY, STATUS_CORRUPT},
        {"top_p", AT(top_p), 0.0f, STATUS_CORRUPT},
        {"top_p", AT(top_p), 1.5f, STATUS_CORRUPT},
        {"top_p", AT(top_p), NAN, STATUS_CORRUPT},
        {"min_p", AT(min_p), -0.1f, STATUS_CORRUPT},
        {"min_p", AT(min_p), NAN, STATUS_CORRUPT},
        {"frequency", AT(frequency_penalty), 2.5f, STATUS_CORRUPT},
        {"frequency", AT(frequency_penalty), -2.0f, STATUS_OK},
        {"presence", AT(presence_penalty), NAN, STATUS_CORRUPT},
        {"repetition", AT(repetition_penalty), 0.0f, STATUS_CORRUPT},
        {"repetition", AT(repetition_penalty), NAN, STATUS_CORRUPT},
    };
#undef AT
    uint32_t tokens[] = {1, 2, 3};
    uint32_t many[SAMPLING_BIAS_MAX + 1] = {0};
    float biases[SAMPLING_BIAS_MAX + 1] = {0};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Baton__Peer__V1__Sampling sampling = BATON__PEER__V1__SAMPLING__INIT;
        sampling.top_p = 1.0f;
        sampling.top_k = -1;
        sampling.repetition_penalty = 1.0f;
        memcpy((char *)&sampling + cases[i].offset, &cases[i].value, sizeof(float));
        Baton__Peer__V1__Admit admit = BATON__PEER__V1__ADMIT__INIT;
        admit.attempt = 1;
        admit.tokens = tokens;
        admit.n_tokens = 3;
        admit.output_first = 3;
        admit.max_new = 1;
        admit.sampling = &sampling;
        Baton__Peer__V1__Envelope envelope = BATON__PEER__V1__ENVELOPE__INIT;
        envelope.message_case = BATON__PEER__V1__ENVELOPE__MESSAGE_ADMIT;
        envelope.admit = &admit;
        assert_unbelievable(&envelope, cases[i].expected);
        if (cases[i].expected != STATUS_OK) {
            continue;
        }
        sampling.top_k = 0;
        assert_unbelievable(&envelope, STATUS_CORRUPT);
        sampling.top_k = -2;
        assert_unbelievable(&envelope, STATUS_CORRUPT);
        sampling.top_k = 1;
        sampling.stop_tokens = many;
        sampling.n_stop_tokens = SAMPLING_STOP_TOKENS_MAX;
        assert_unbelievable(&envelope, STATUS_OK);
        sampling.n_stop_tokens++;
        assert_unbelievable(&envelope, STATUS_CORRUPT);
        sampling.n_stop_tokens = 0;
        sampling.bias_tokens = many;
        sampling.biases = biases;
        sampling.n_bias_tokens = sampling.n_biases = SAMPLING_BIAS_MAX;
        assert_unbelievable(&envelope, STATUS_OK);
        biases[7] = NAN;
        assert_unbelievable(&envelope, STATUS_CORRUPT);
        biases[7] = 0.0f;
        sampling.n_biases--;
        assert_unbelievable(&envelope, STATUS_CORRUPT);
        sampling.n_bias_tokens = sampling.n_biases = SAMPLING_BIAS_MAX + 1;
        assert_unbelievable(&envelope, STATUS_CORRUPT);
        admit.sampling = NULL;
        assert_unbelievable(&envelope, STATUS_CORRUPT);
    }
}

static void test_a_salt_is_sixteen_bytes_or_none(void **state) {
    (void)state;
    struct prng prng = {11};
    uint8_t salt[17] = {1};
    uint32_t tokens[] = {1, 2};
    for (size_t len = 0; len <= 17; len++) {
        Baton__Peer__V1__Prefill prefill = BATON__PEER__V1__PREFILL__INIT;
        prefill.attempt = prefill.slot = prefill.decode = random_id(&prng);
        prefill.tokens = tokens;
        prefill.n_tokens = 2;
        prefill.address = (ProtobufCBinaryData){1, salt};
        prefill.salt = (ProtobufCBinaryData){len, salt};
        Baton__Peer__V1__Envelope envelope = BATON__PEER__V1__ENVELOPE__INIT;
        envelope.message_case = BATON__PEER__V1__ENVELOPE__MESSAGE_PREFILL;
        envelope.prefill = &prefill;
        assert_unbelievable(&envelope, len == 0 || len == 16 ? STATUS_OK : STATUS_CORRUPT);
    }
}

static void test_an_unknown_kind_is_unsupported_and_an_empty_envelope_corrupt(void **state) {
    (void)state;
    static struct message out;
    const uint8_t newer[] = {0xba, 0x01, 0x02, 0x08, 0x01}; /* field 23, a message */
    assert_int_equal(decode(newer, sizeof newer, &out), STATUS_UNSUPPORTED);
    assert_int_equal(decode(NULL, 0, &out), STATUS_CORRUPT);
}

static void test_unknown_fields_of_a_known_kind_are_ignored(void **state) {
    (void)state;
    static struct message out;
    const uint8_t newer[] = {
        0x82, 0x01, 0x0c,                       /* Envelope.commit, 12 bytes */
        0x09, 1,    2,    3,   4,   5, 6, 7, 8, /* slot */
        0xf8, 0x07, 0x2a,                       /* field 127 = 42 */
        0xfa, 0x07, 0x02, 'h', 'i',             /* field 127 of Envelope */
    };
    assert_int_equal(decode(newer, sizeof newer, &out), STATUS_OK);
    assert_int_equal(out.kind, MESSAGE_COMMIT);
    assert_true(out.u.commit.slot.v == 0x0807060504030201u);
}

static void test_steady_state_allocates_nothing(void **state) {
    (void)state;
    struct prng prng = {8};
    static struct message out;
    const struct message *message = sample_fill(&prng, MESSAGE_TOKENS);
    assert_int_equal(wire_session_encode(message, &buffer), STATUS_OK);
    assert_int_equal(decode(buffer.data, buffer.len, &out), STATUS_OK);
    const void *data = buffer.data;
    const void *block = arena.blocks;
    for (int i = 0; i < 100; i++) {
        assert_int_equal(wire_session_encode(message, &buffer), STATUS_OK);
        assert_int_equal(decode(buffer.data, buffer.len, &out), STATUS_OK);
        assert_ptr_equal(buffer.data, data);
        assert_ptr_equal(arena.blocks, block);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_message_has_grown_a_field_that_does_not_travel),
        cmocka_unit_test(test_every_kind_comes_back_as_it_was),
        cmocka_unit_test(test_every_truncation_is_refused_or_still_a_message),
        cmocka_unit_test(test_bent_bytes_are_refused_or_still_a_message),
        cmocka_unit_test(test_random_bytes_are_refused_or_a_message),
        cmocka_unit_test(test_a_decode_without_memory_fails_cleanly_at_every_allocation),
        cmocka_unit_test(test_a_claimed_length_without_its_bytes_costs_nothing),
        cmocka_unit_test(test_millions_of_tiny_fields_cannot_take_more_than_the_cap),
        cmocka_unit_test(test_more_than_the_largest_message_is_out_of_range_both_ways),
        cmocka_unit_test(test_messages_past_their_bounds_are_not_encoded),
        cmocka_unit_test(test_hellos_past_their_bounds_are_corrupt),
        cmocka_unit_test(test_counts_past_their_bounds_are_corrupt),
        cmocka_unit_test(test_logprobs_that_do_not_match_their_tokens_are_corrupt),
        cmocka_unit_test(test_enums_past_their_range_are_corrupt),
        cmocka_unit_test(test_sampling_past_its_range_is_corrupt),
        cmocka_unit_test(test_a_salt_is_sixteen_bytes_or_none),
        cmocka_unit_test(test_an_unknown_kind_is_unsupported_and_an_empty_envelope_corrupt),
        cmocka_unit_test(test_unknown_fields_of_a_known_kind_are_ignored),
        cmocka_unit_test(test_steady_state_allocates_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, fini);
}
