/* Bytes from a peer process: what decodes must encode again, to what decodes to the same. */
#include "fuzz/fuzz.h"
#include "wire/session.h"

static float plain(float value) {
    return value == 0.0f ? 0.0f : value; /* proto3 does not send -0.0 */
}

static void same_array(const void *a, const void *b, uint32_t count, size_t each) {
    CHECK(count == 0 || memcmp(a, b, count * each) == 0);
}

/* Compares what the pointers lead to, and takes the pointers out of the structs. */
static void take_pointers(struct message *a, struct message *b) {
    switch (a->kind) {
    case MESSAGE_AUDIT:
    case MESSAGE_UNKNOWN:
        CHECK_OP(a->u.audit.count, ==, b->u.audit.count);
        same_array(a->u.audit.ids, b->u.audit.ids, a->u.audit.count, sizeof(uint64_t));
        a->u.audit.ids = b->u.audit.ids = NULL;
        break;
    case MESSAGE_ADMIT:
        CHECK_OP(a->u.admit.token_count, ==, b->u.admit.token_count);
        same_array(a->u.admit.tokens, b->u.admit.tokens, a->u.admit.token_count, sizeof(uint32_t));
        a->u.admit.tokens = b->u.admit.tokens = NULL;
        break;
    case MESSAGE_PREFILL:
        CHECK_OP(a->u.prefill.token_count, ==, b->u.prefill.token_count);
        same_array(a->u.prefill.tokens, b->u.prefill.tokens, a->u.prefill.token_count,
                   sizeof(uint32_t));
        a->u.prefill.tokens = b->u.prefill.tokens = NULL;
        break;
    case MESSAGE_ACCEPT:
        CHECK_OP(a->u.accept.address_len, ==, b->u.accept.address_len);
        same_array(a->u.accept.address, b->u.accept.address, a->u.accept.address_len, 1);
        a->u.accept.address = b->u.accept.address = NULL;
        break;
    case MESSAGE_TOKENS:
        CHECK_OP(a->u.tokens.count, ==, b->u.tokens.count);
        same_array(a->u.tokens.attempts, b->u.tokens.attempts, a->u.tokens.count, sizeof(uint64_t));
        same_array(a->u.tokens.tokens, b->u.tokens.tokens, a->u.tokens.count, sizeof(uint32_t));
        CHECK((a->u.tokens.top_counts == NULL) == (b->u.tokens.top_counts == NULL));
        CHECK_OP(a->u.tokens.top_count, ==, b->u.tokens.top_count);
        if (a->u.tokens.top_counts != NULL) {
            same_array(a->u.tokens.logprobs, b->u.tokens.logprobs, a->u.tokens.count, 4);
            same_array(a->u.tokens.top_counts, b->u.tokens.top_counts, a->u.tokens.count, 4);
            same_array(a->u.tokens.top_tokens, b->u.tokens.top_tokens, a->u.tokens.top_count, 4);
            same_array(a->u.tokens.top_logprobs, b->u.tokens.top_logprobs, a->u.tokens.top_count,
                       4);
        }
        memset(&a->u.tokens, 0, sizeof a->u.tokens);
        memset(&b->u.tokens, 0, sizeof b->u.tokens);
        break;
    case MESSAGE_CACHED:
        same_array(a->u.cached.removed, b->u.cached.removed, a->u.cached.removed_count,
                   sizeof(uint64_t));
        same_array(a->u.cached.stored, b->u.cached.stored, a->u.cached.stored_count,
                   sizeof(uint64_t));
        a->u.cached.removed = b->u.cached.removed = NULL;
        a->u.cached.stored = b->u.cached.stored = NULL;
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
}

static void plain_numbers(struct message *message) {
    if (message->kind == MESSAGE_ADMIT) {
        struct sampling *sampling = &message->u.admit.sampling;
        sampling->temperature = plain(sampling->temperature);
        sampling->min_p = plain(sampling->min_p);
        sampling->frequency_penalty = plain(sampling->frequency_penalty);
        sampling->presence_penalty = plain(sampling->presence_penalty);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    static struct wire_arena first, second;
    static struct wire_buffer buffer;
    struct message message;
    if (wire_session_decode((struct bytes){data, len}, &first, &message) == STATUS_OK) {
        CHECK_OP(wire_session_encode(&message, &buffer), ==, STATUS_OK);
        uint8_t *copy = input_copy(wire_buffer_bytes(&buffer));
        struct message again;
        CHECK_OP(wire_session_decode((struct bytes){copy, buffer.len}, &second, &again), ==,
                 STATUS_OK);
        free(copy); /* the input is not kept */
        CHECK_OP(message.kind, ==, again.kind);
        take_pointers(&message, &again);
        plain_numbers(&message);
        plain_numbers(&again);
        CHECK(memcmp(&message, &again, sizeof message) == 0);
    }
    wire_arena_reset(&first);
    wire_arena_reset(&second);
    return 0;
}
