#include "wire/session.h"

#include <math.h>
#include <string.h>

#include "baton/v1/peer.pb-c.h"
#include "core/blocks.h"
#include "wire/pack.h"

#define SLACK_BYTES (64u * 1024u)

_Static_assert((int)MESSAGE_HELLO == (int)BATON__PEER__V1__ENVELOPE__MESSAGE_HELLO &&
                   (int)MESSAGE_REJECTED == (int)BATON__PEER__V1__ENVELOPE__MESSAGE_REJECTED &&
                   (int)MESSAGE_PREFILL_END ==
                       (int)BATON__PEER__V1__ENVELOPE__MESSAGE_PREFILL_END &&
                   (int)MESSAGE_TOKENS == (int)BATON__PEER__V1__ENVELOPE__MESSAGE_TOKENS &&
                   (int)MESSAGE_COMMITTED == (int)BATON__PEER__V1__ENVELOPE__MESSAGE_COMMITTED &&
                   (int)MESSAGE_CACHED == (int)BATON__PEER__V1__ENVELOPE__MESSAGE_CACHED,
               "kinds are the field numbers of Envelope");
_Static_assert(CAUSE_DEADLINE == 6 && CAUSE_STALL == 9 && CAUSE_BAD_CHUNK == 17 &&
                   CAUSE_SESSION_SILENT == 24 && CAUSE_SHUTDOWN == 32,
               "numbers of causes travel: append new ones");
_Static_assert(OUTCOME_FAILED == 3 && FINISH_ERROR == 4 && ROLE_DECODE == 3,
               "numbers of outcomes, finishes and roles travel: append new ones");

/* --- what is a message: the same facts for what we say and what we believe --- */

static bool is_text(const char *text, size_t cap) {
    return memchr(text, '\0', cap) != NULL;
}

static bool is_in(float value, float low, float high) {
    return isfinite(value) && value >= low && value <= high;
}

static bool sampling_is_valid(const struct sampling *sampling) {
    if (!isfinite(sampling->temperature) || sampling->temperature < 0.0f ||
        !is_in(sampling->top_p, 0.0f, 1.0f) || sampling->top_p == 0.0f ||
        !is_in(sampling->min_p, 0.0f, 1.0f) || sampling->top_k < -1 || sampling->top_k == 0 ||
        !is_in(sampling->frequency_penalty, -2.0f, 2.0f) ||
        !is_in(sampling->presence_penalty, -2.0f, 2.0f) ||
        !isfinite(sampling->repetition_penalty) || sampling->repetition_penalty <= 0.0f ||
        sampling->stop_token_count > SAMPLING_STOP_TOKENS_MAX ||
        sampling->bias_count > SAMPLING_BIAS_MAX || sampling->logprobs > 1 + LOGPROBS_TOP_MAX) {
        return false;
    }
    for (uint32_t i = 0; i < sampling->bias_count; i++) {
        if (!is_in(sampling->biases[i].bias, -100.0f, 100.0f)) {
            return false;
        }
    }
    return true;
}

static bool ids_are_valid(const uint64_t *ids, uint32_t count) {
    if (count > MESSAGE_IDS_MAX || (count > 0 && ids == NULL)) {
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (ids[i] == 0) {
            return false;
        }
    }
    return true;
}

static bool blocks_are_valid(const uint64_t *blocks, uint32_t count) {
    return count <= MESSAGE_BLOCKS_MAX && ids_are_valid(blocks, count);
}

/* Natural logs of probabilities. */
static bool logprobs_are_valid(const float *logprobs, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        if (!isfinite(logprobs[i]) || logprobs[i] > 0.0f) {
            return false;
        }
    }
    return true;
}

static bool tokens_are_valid(const struct message *message) {
    uint32_t count = message->u.tokens.count;
    if (!ids_are_valid(message->u.tokens.attempts, count) ||
        (count > 0 && message->u.tokens.tokens == NULL)) {
        return false;
    }
    const uint32_t *top_counts = message->u.tokens.top_counts;
    if (top_counts == NULL) {
        return message->u.tokens.logprobs == NULL && message->u.tokens.top_count == 0;
    }
    uint64_t total = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (top_counts[i] > 1 + LOGPROBS_TOP_MAX) {
            return false;
        }
        total += top_counts[i] > 0 ? top_counts[i] - 1 : 0;
    }
    return total == message->u.tokens.top_count && message->u.tokens.logprobs != NULL &&
           (total == 0 ||
            (message->u.tokens.top_tokens != NULL && message->u.tokens.top_logprobs != NULL)) &&
           logprobs_are_valid(message->u.tokens.logprobs, count) &&
           logprobs_are_valid(message->u.tokens.top_logprobs, (uint32_t)total);
}

static bool cause_is_valid(enum cause cause) {
    return (unsigned)cause < CAUSE_COUNT;
}

static bool outcome_is_valid(enum outcome outcome) {
    return outcome > OUTCOME_NONE && outcome <= OUTCOME_FAILED;
}

static bool message_is_valid(const struct message *message) {
    switch (message->kind) {
    case MESSAGE_HELLO:
        return message->u.hello.incarnation.v != 0 && message->u.hello.role > ROLE_NONE &&
               message->u.hello.role <= ROLE_DECODE && is_text(message->u.hello.id, LABEL_MAX) &&
               is_text(message->u.hello.numerics, MESSAGE_NUMERICS_MAX);
    case MESSAGE_BEAT: return true;
    case MESSAGE_AUDIT:
    case MESSAGE_UNKNOWN: return ids_are_valid(message->u.audit.ids, message->u.audit.count);
    case MESSAGE_ADMIT:
        return message->u.admit.attempt.v != 0 && message->u.admit.token_count > 0 &&
               message->u.admit.tokens != NULL && message->u.admit.output_first > 0 &&
               message->u.admit.output_first <= message->u.admit.token_count &&
               message->u.admit.max_new > 0 && sampling_is_valid(&message->u.admit.sampling) &&
               is_text(message->u.admit.label, LABEL_MAX);
    case MESSAGE_ADMITTED:
        return message->u.admitted.attempt.v != 0 &&
               (message->u.admitted.slot.v != 0 || message->u.admitted.is_local);
    case MESSAGE_REJECTED:
    case MESSAGE_BUSY:
        return message->u.rejected.attempt.v != 0 && cause_is_valid(message->u.rejected.cause);
    case MESSAGE_PREFILL:
        return message->u.prefill.attempt.v != 0 && message->u.prefill.tokens != NULL &&
               message->u.prefill.from < message->u.prefill.token_count &&
               message->u.prefill.slot.v != 0 && message->u.prefill.decode.v != 0 &&
               is_text(message->u.prefill.address, ADDRESS_MAX) &&
               message->u.prefill.address[0] != '\0' &&
               is_text(message->u.prefill.label, LABEL_MAX);
    case MESSAGE_QUEUED: return message->u.queued.attempt.v != 0;
    case MESSAGE_PREFILL_END:
        return message->u.prefill_end.attempt.v != 0 &&
               outcome_is_valid(message->u.prefill_end.outcome) &&
               cause_is_valid(message->u.prefill_end.cause);
    case MESSAGE_OPEN:
        return message->u.open.slot.v != 0 && message->u.open.from <= message->u.open.end;
    case MESSAGE_ACCEPT:
        return message->u.accept.slot.v != 0 && message->u.accept.address != NULL &&
               message->u.accept.address_len > 0 &&
               message->u.accept.address_len <= WORKER_ADDRESS_MAX;
    case MESSAGE_REFUSE:
    case MESSAGE_ABORT_SLOT:
        return message->u.refuse.slot.v != 0 && cause_is_valid(message->u.refuse.cause);
    case MESSAGE_FIN: return message->u.fin.slot.v != 0;
    case MESSAGE_COMMIT: return message->u.commit.slot.v != 0;
    case MESSAGE_TOKENS: return tokens_are_valid(message);
    case MESSAGE_END:
        return message->u.end.attempt.v != 0 && outcome_is_valid(message->u.end.outcome) &&
               cause_is_valid(message->u.end.cause) && message->u.end.finish >= FINISH_NONE &&
               message->u.end.finish <= FINISH_ERROR;
    case MESSAGE_ABORT:
        return message->u.abort.attempt.v != 0 && cause_is_valid(message->u.abort.cause);
    case MESSAGE_COMMITTED: return message->u.committed.attempt.v != 0;
    case MESSAGE_CACHED:
        return blocks_are_valid(message->u.cached.removed, message->u.cached.removed_count) &&
               blocks_are_valid(message->u.cached.stored, message->u.cached.stored_count);
    }
    return false;
}

/* --- encode --- */

static ProtobufCBinaryData text_data(const char *text) {
    return (ProtobufCBinaryData){strlen(text), wire_borrow(text)};
}

#define SALT_BYTES 16u

/* None is no bytes. */
static ProtobufCBinaryData salt_data(struct siphash128 salt, uint8_t bytes[SALT_BYTES]) {
    for (uint32_t i = 0; i < 8; i++) {
        bytes[i] = (uint8_t)(salt.low >> (8 * i));
        bytes[8 + i] = (uint8_t)(salt.high >> (8 * i));
    }
    return (ProtobufCBinaryData){salt_is_set(salt) ? SALT_BYTES : 0, bytes};
}

struct sampling_pb {
    Baton__Peer__V1__Sampling message;
    uint32_t bias_tokens[SAMPLING_BIAS_MAX];
    float biases[SAMPLING_BIAS_MAX];
};

static void sampling_fill(const struct sampling *from, struct sampling_pb *to) {
    baton__peer__v1__sampling__init(&to->message);
    to->message.seed = from->seed;
    to->message.temperature = from->temperature;
    to->message.top_p = from->top_p;
    to->message.min_p = from->min_p;
    to->message.top_k = from->top_k;
    to->message.frequency_penalty = from->frequency_penalty;
    to->message.presence_penalty = from->presence_penalty;
    to->message.repetition_penalty = from->repetition_penalty;
    to->message.min_tokens = from->min_tokens;
    to->message.n_stop_tokens = from->stop_token_count;
    to->message.stop_tokens = wire_borrow(from->stop_tokens);
    for (uint32_t i = 0; i < from->bias_count; i++) {
        to->bias_tokens[i] = from->biases[i].token;
        to->biases[i] = from->biases[i].bias;
    }
    to->message.n_bias_tokens = from->bias_count;
    to->message.bias_tokens = to->bias_tokens;
    to->message.n_biases = from->bias_count;
    to->message.biases = to->biases;
    to->message.ignore_eos = from->ignore_eos;
    to->message.logprobs = from->logprobs;
}

static enum status encode_hello(const struct message *message, Baton__Peer__V1__Envelope *envelope,
                                struct wire_buffer *out) {
    Baton__Peer__V1__Hello hello = BATON__PEER__V1__HELLO__INIT;
    hello.incarnation = message->u.hello.incarnation.v;
    hello.session = message->u.hello.session;
    hello.layout_high = message->u.hello.layout.high;
    hello.layout_low = message->u.hello.layout.low;
    hello.protocol = message->u.hello.protocol;
    hello.newest = message->u.hello.newest;
    hello.role = message->u.hello.role;
    hello.id = text_data(message->u.hello.id);
    hello.numerics = text_data(message->u.hello.numerics);
    hello.is_draining = message->u.hello.is_draining;
    envelope->hello = &hello;
    return wire_pack(&envelope->base, out);
}

static enum status encode_beat(const struct message *message, Baton__Peer__V1__Envelope *envelope,
                               struct wire_buffer *out) {
    Baton__Peer__V1__Beat beat = BATON__PEER__V1__BEAT__INIT;
    beat.progress = message->u.beat.progress;
    beat.entries = message->u.beat.entries;
    beat.pages_free = message->u.beat.pages_free;
    beat.backlog_ms = message->u.beat.backlog_ms;
    beat.backlog_tokens = message->u.beat.backlog_tokens;
    beat.is_draining = message->u.beat.is_draining;
    envelope->beat = &beat;
    return wire_pack(&envelope->base, out);
}

/* audit and unknown: members of one union, so either name will do */
static enum status encode_ids(const struct message *message, Baton__Peer__V1__Envelope *envelope,
                              struct wire_buffer *out) {
    Baton__Peer__V1__Ids ids = BATON__PEER__V1__IDS__INIT;
    ids.n_ids = message->u.audit.count;
    ids.ids = wire_borrow(message->u.audit.ids);
    envelope->audit = &ids;
    return wire_pack(&envelope->base, out);
}

static enum status encode_admit(const struct message *message, Baton__Peer__V1__Envelope *envelope,
                                struct wire_buffer *out) {
    struct sampling_pb sampling;
    sampling_fill(&message->u.admit.sampling, &sampling);
    Baton__Peer__V1__Admit admit = BATON__PEER__V1__ADMIT__INIT;
    admit.attempt = message->u.admit.attempt.v;
    admit.n_tokens = message->u.admit.token_count;
    admit.tokens = wire_borrow(message->u.admit.tokens);
    admit.output_first = message->u.admit.output_first;
    admit.max_new = message->u.admit.max_new;
    admit.deadline_ms = message->u.admit.deadline_ms;
    admit.sampling = &sampling.message;
    admit.local_max = message->u.admit.local_max;
    admit.label = text_data(message->u.admit.label);
    uint8_t salt[SALT_BYTES];
    admit.salt = salt_data(message->u.admit.salt, salt);
    envelope->admit = &admit;
    return wire_pack(&envelope->base, out);
}

static enum status encode_admitted(const struct message *message,
                                   Baton__Peer__V1__Envelope *envelope, struct wire_buffer *out) {
    Baton__Peer__V1__Admitted admitted = BATON__PEER__V1__ADMITTED__INIT;
    admitted.attempt = message->u.admitted.attempt.v;
    admitted.slot = message->u.admitted.slot.v;
    admitted.key = message->u.admitted.key;
    admitted.cached = message->u.admitted.cached;
    admitted.is_local = message->u.admitted.is_local;
    envelope->admitted = &admitted;
    return wire_pack(&envelope->base, out);
}

static enum status encode_refusal(const struct message *message,
                                  Baton__Peer__V1__Envelope *envelope, struct wire_buffer *out) {
    Baton__Peer__V1__Refusal refusal = BATON__PEER__V1__REFUSAL__INIT;
    refusal.attempt = message->u.rejected.attempt.v;
    refusal.cause = message->u.rejected.cause;
    refusal.retry_after_ms = message->u.rejected.retry_after_ms;
    envelope->rejected = &refusal;
    return wire_pack(&envelope->base, out);
}

static enum status encode_prefill(const struct message *message,
                                  Baton__Peer__V1__Envelope *envelope, struct wire_buffer *out) {
    Baton__Peer__V1__Prefill prefill = BATON__PEER__V1__PREFILL__INIT;
    prefill.attempt = message->u.prefill.attempt.v;
    prefill.n_tokens = message->u.prefill.token_count;
    prefill.tokens = wire_borrow(message->u.prefill.tokens);
    prefill.from = message->u.prefill.from;
    prefill.slot = message->u.prefill.slot.v;
    prefill.key = message->u.prefill.key;
    prefill.decode = message->u.prefill.decode.v;
    prefill.address = text_data(message->u.prefill.address);
    prefill.deadline_ms = message->u.prefill.deadline_ms;
    prefill.label = text_data(message->u.prefill.label);
    uint8_t salt[SALT_BYTES];
    prefill.salt = salt_data(message->u.prefill.salt, salt);
    envelope->prefill = &prefill;
    return wire_pack(&envelope->base, out);
}

static enum status encode_queued(const struct message *message, Baton__Peer__V1__Envelope *envelope,
                                 struct wire_buffer *out) {
    Baton__Peer__V1__Queued queued = BATON__PEER__V1__QUEUED__INIT;
    queued.attempt = message->u.queued.attempt.v;
    queued.backlog_ms = message->u.queued.backlog_ms;
    envelope->queued = &queued;
    return wire_pack(&envelope->base, out);
}

static enum status encode_prefill_end(const struct message *message,
                                      Baton__Peer__V1__Envelope *envelope,
                                      struct wire_buffer *out) {
    Baton__Peer__V1__PrefillEnd end = BATON__PEER__V1__PREFILL_END__INIT;
    end.attempt = message->u.prefill_end.attempt.v;
    end.outcome = message->u.prefill_end.outcome;
    end.cause = message->u.prefill_end.cause;
    end.bytes = message->u.prefill_end.bytes;
    end.cached = message->u.prefill_end.cached;
    end.exposed_us = message->u.prefill_end.exposed_us;
    envelope->prefill_end = &end;
    return wire_pack(&envelope->base, out);
}

static enum status encode_open(const struct message *message, Baton__Peer__V1__Envelope *envelope,
                               struct wire_buffer *out) {
    Baton__Peer__V1__Open open = BATON__PEER__V1__OPEN__INIT;
    open.slot = message->u.open.slot.v;
    open.key = message->u.open.key;
    open.from = message->u.open.from;
    open.end = message->u.open.end;
    open.bytes = message->u.open.bytes;
    envelope->open = &open;
    return wire_pack(&envelope->base, out);
}

static enum status encode_accept(const struct message *message, Baton__Peer__V1__Envelope *envelope,
                                 struct wire_buffer *out) {
    Baton__Peer__V1__Accept accept = BATON__PEER__V1__ACCEPT__INIT;
    accept.slot = message->u.accept.slot.v;
    accept.address.len = message->u.accept.address_len;
    accept.address.data = wire_borrow(message->u.accept.address);
    envelope->accept = &accept;
    return wire_pack(&envelope->base, out);
}

static enum status encode_slot_cause(const struct message *message,
                                     Baton__Peer__V1__Envelope *envelope, struct wire_buffer *out) {
    Baton__Peer__V1__SlotCause slot_cause = BATON__PEER__V1__SLOT_CAUSE__INIT;
    slot_cause.slot = message->u.refuse.slot.v;
    slot_cause.cause = message->u.refuse.cause;
    envelope->refuse = &slot_cause;
    return wire_pack(&envelope->base, out);
}

static enum status encode_fin(const struct message *message, Baton__Peer__V1__Envelope *envelope,
                              struct wire_buffer *out) {
    Baton__Peer__V1__Fin fin = BATON__PEER__V1__FIN__INIT;
    fin.slot = message->u.fin.slot.v;
    fin.bytes = message->u.fin.bytes;
    fin.cached = message->u.fin.cached;
    envelope->fin = &fin;
    return wire_pack(&envelope->base, out);
}

static enum status encode_commit(const struct message *message, Baton__Peer__V1__Envelope *envelope,
                                 struct wire_buffer *out) {
    Baton__Peer__V1__Commit commit = BATON__PEER__V1__COMMIT__INIT;
    commit.slot = message->u.commit.slot.v;
    envelope->commit = &commit;
    return wire_pack(&envelope->base, out);
}

static enum status encode_tokens(const struct message *message, Baton__Peer__V1__Envelope *envelope,
                                 struct wire_buffer *out) {
    Baton__Peer__V1__Tokens tokens = BATON__PEER__V1__TOKENS__INIT;
    tokens.n_attempts = message->u.tokens.count;
    tokens.attempts = wire_borrow(message->u.tokens.attempts);
    tokens.n_tokens = message->u.tokens.count;
    tokens.tokens = wire_borrow(message->u.tokens.tokens);
    if (message->u.tokens.top_counts != NULL) {
        tokens.n_logprobs = message->u.tokens.count;
        tokens.logprobs = wire_borrow(message->u.tokens.logprobs);
        tokens.n_top_counts = message->u.tokens.count;
        tokens.top_counts = wire_borrow(message->u.tokens.top_counts);
        tokens.n_top_tokens = message->u.tokens.top_count;
        tokens.top_tokens = wire_borrow(message->u.tokens.top_tokens);
        tokens.n_top_logprobs = message->u.tokens.top_count;
        tokens.top_logprobs = wire_borrow(message->u.tokens.top_logprobs);
    }
    envelope->tokens = &tokens;
    return wire_pack(&envelope->base, out);
}

static enum status encode_end(const struct message *message, Baton__Peer__V1__Envelope *envelope,
                              struct wire_buffer *out) {
    Baton__Peer__V1__Usage usage = BATON__PEER__V1__USAGE__INIT;
    usage.prompt_tokens = message->u.end.usage.prompt_tokens;
    usage.cached_tokens = message->u.end.usage.cached_tokens;
    usage.completion_tokens = message->u.end.usage.completion_tokens;
    Baton__Peer__V1__End end = BATON__PEER__V1__END__INIT;
    end.attempt = message->u.end.attempt.v;
    end.outcome = message->u.end.outcome;
    end.cause = message->u.end.cause;
    end.finish = message->u.end.finish;
    end.kv_bytes = message->u.end.kv_bytes;
    end.usage = &usage;
    envelope->end = &end;
    return wire_pack(&envelope->base, out);
}

static enum status encode_abort(const struct message *message, Baton__Peer__V1__Envelope *envelope,
                                struct wire_buffer *out) {
    Baton__Peer__V1__Abort abort = BATON__PEER__V1__ABORT__INIT;
    abort.attempt = message->u.abort.attempt.v;
    abort.cause = message->u.abort.cause;
    abort.is_unless_committed = message->u.abort.is_unless_committed;
    envelope->abort = &abort;
    return wire_pack(&envelope->base, out);
}

static enum status encode_committed(const struct message *message,
                                    Baton__Peer__V1__Envelope *envelope, struct wire_buffer *out) {
    Baton__Peer__V1__Committed committed = BATON__PEER__V1__COMMITTED__INIT;
    committed.attempt = message->u.committed.attempt.v;
    envelope->committed = &committed;
    return wire_pack(&envelope->base, out);
}

static enum status encode_cached(const struct message *message, Baton__Peer__V1__Envelope *envelope,
                                 struct wire_buffer *out) {
    Baton__Peer__V1__Cached cached = BATON__PEER__V1__CACHED__INIT;
    cached.is_reset = message->u.cached.is_reset;
    cached.n_removed = message->u.cached.removed_count;
    cached.removed = wire_borrow(message->u.cached.removed);
    cached.n_stored = message->u.cached.stored_count;
    cached.stored = wire_borrow(message->u.cached.stored);
    envelope->cached = &cached;
    return wire_pack(&envelope->base, out);
}

enum status wire_session_encode(const struct message *message, struct wire_buffer *out) {
    out->len = 0;
    if (!message_is_valid(message)) {
        return STATUS_INVALID;
    }
    Baton__Peer__V1__Envelope envelope = BATON__PEER__V1__ENVELOPE__INIT;
    envelope.message_case = (Baton__Peer__V1__Envelope__MessageCase)message->kind;
    switch (message->kind) {
    case MESSAGE_HELLO: return encode_hello(message, &envelope, out);
    case MESSAGE_BEAT: return encode_beat(message, &envelope, out);
    case MESSAGE_AUDIT:
    case MESSAGE_UNKNOWN: return encode_ids(message, &envelope, out);
    case MESSAGE_ADMIT: return encode_admit(message, &envelope, out);
    case MESSAGE_ADMITTED: return encode_admitted(message, &envelope, out);
    case MESSAGE_REJECTED:
    case MESSAGE_BUSY: return encode_refusal(message, &envelope, out);
    case MESSAGE_PREFILL: return encode_prefill(message, &envelope, out);
    case MESSAGE_QUEUED: return encode_queued(message, &envelope, out);
    case MESSAGE_PREFILL_END: return encode_prefill_end(message, &envelope, out);
    case MESSAGE_OPEN: return encode_open(message, &envelope, out);
    case MESSAGE_ACCEPT: return encode_accept(message, &envelope, out);
    case MESSAGE_REFUSE:
    case MESSAGE_ABORT_SLOT: return encode_slot_cause(message, &envelope, out);
    case MESSAGE_FIN: return encode_fin(message, &envelope, out);
    case MESSAGE_COMMIT: return encode_commit(message, &envelope, out);
    case MESSAGE_TOKENS: return encode_tokens(message, &envelope, out);
    case MESSAGE_END: return encode_end(message, &envelope, out);
    case MESSAGE_ABORT: return encode_abort(message, &envelope, out);
    case MESSAGE_COMMITTED: return encode_committed(message, &envelope, out);
    case MESSAGE_CACHED: return encode_cached(message, &envelope, out);
    }
    return STATUS_INVALID;
}

/* --- decode: copies; false for what does not fit. message_is_valid follows. --- */

static bool text_take(ProtobufCBinaryData from, char *to, size_t cap) {
    if (from.len >= cap || (from.len > 0 && memchr(from.data, '\0', from.len) != NULL)) {
        return false;
    }
    if (from.len > 0) {
        memcpy(to, from.data, from.len);
    }
    to[from.len] = '\0';
    return true;
}

/* Enums stay in range of int before they become one. */
static bool number_take(uint32_t from, uint32_t end, unsigned *to) {
    *to = from;
    return from < end;
}

static bool cause_take(uint32_t from, enum cause *to) {
    unsigned value = 0;
    bool is_known = number_take(from, CAUSE_COUNT, &value);
    *to = is_known ? (enum cause)value : CAUSE_NONE;
    return is_known;
}

static bool outcome_take(uint32_t from, enum outcome *to) {
    unsigned value = 0;
    bool is_known = number_take(from, OUTCOME_FAILED + 1, &value);
    *to = is_known ? (enum outcome)value : OUTCOME_NONE;
    return is_known;
}

static bool count_take(size_t from, uint32_t *to) {
    *to = (uint32_t)from;
    return from <= WIRE_MESSAGE_MAX; /* a message of that size cannot hold more */
}

static bool decode_hello(const Baton__Peer__V1__Hello *hello, struct message *out) {
    unsigned role = 0;
    if (!number_take(hello->role, ROLE_DECODE + 1, &role)) {
        return false;
    }
    out->u.hello.incarnation.v = hello->incarnation;
    out->u.hello.session = hello->session;
    out->u.hello.layout.high = hello->layout_high;
    out->u.hello.layout.low = hello->layout_low;
    out->u.hello.protocol = hello->protocol;
    out->u.hello.newest = hello->newest;
    out->u.hello.role = (enum role)role;
    out->u.hello.is_draining = hello->is_draining;
    return text_take(hello->id, out->u.hello.id, LABEL_MAX) &&
           text_take(hello->numerics, out->u.hello.numerics, MESSAGE_NUMERICS_MAX);
}

static bool decode_beat(const Baton__Peer__V1__Beat *beat, struct message *out) {
    out->u.beat.progress = beat->progress;
    out->u.beat.entries = beat->entries;
    out->u.beat.pages_free = beat->pages_free;
    out->u.beat.backlog_ms = beat->backlog_ms;
    out->u.beat.backlog_tokens = beat->backlog_tokens;
    out->u.beat.is_draining = beat->is_draining;
    return true;
}

static bool decode_ids(const Baton__Peer__V1__Ids *ids, struct message *out) {
    out->u.audit.ids = ids->ids;
    return count_take(ids->n_ids, &out->u.audit.count);
}

static bool salt_take(ProtobufCBinaryData from, struct siphash128 *to) {
    if (from.len != 0 && from.len != SALT_BYTES) {
        return false;
    }
    for (uint32_t i = 0; from.len > 0 && i < 8; i++) {
        to->low |= (uint64_t)from.data[i] << (8 * i);
        to->high |= (uint64_t)from.data[8 + i] << (8 * i);
    }
    return true;
}

static bool sampling_take(const Baton__Peer__V1__Sampling *from, struct sampling *to) {
    if (from == NULL || from->n_stop_tokens > SAMPLING_STOP_TOKENS_MAX ||
        from->n_bias_tokens > SAMPLING_BIAS_MAX || from->n_biases != from->n_bias_tokens) {
        return false;
    }
    to->seed = from->seed;
    to->temperature = from->temperature;
    to->top_p = from->top_p;
    to->min_p = from->min_p;
    to->top_k = from->top_k;
    to->frequency_penalty = from->frequency_penalty;
    to->presence_penalty = from->presence_penalty;
    to->repetition_penalty = from->repetition_penalty;
    to->min_tokens = from->min_tokens;
    to->ignore_eos = from->ignore_eos;
    to->logprobs = from->logprobs;
    to->stop_token_count = (uint32_t)from->n_stop_tokens;
    for (size_t i = 0; i < from->n_stop_tokens; i++) {
        to->stop_tokens[i] = from->stop_tokens[i];
    }
    to->bias_count = (uint32_t)from->n_biases;
    for (size_t i = 0; i < from->n_biases; i++) {
        to->biases[i].token = from->bias_tokens[i];
        to->biases[i].bias = from->biases[i];
    }
    return true;
}

static bool decode_admit(const Baton__Peer__V1__Admit *admit, struct message *out) {
    out->u.admit.attempt.v = admit->attempt;
    out->u.admit.tokens = admit->tokens;
    out->u.admit.output_first = admit->output_first;
    out->u.admit.max_new = admit->max_new;
    out->u.admit.deadline_ms = admit->deadline_ms;
    out->u.admit.local_max = admit->local_max;
    return count_take(admit->n_tokens, &out->u.admit.token_count) &&
           sampling_take(admit->sampling, &out->u.admit.sampling) &&
           text_take(admit->label, out->u.admit.label, LABEL_MAX) &&
           salt_take(admit->salt, &out->u.admit.salt);
}

static bool decode_admitted(const Baton__Peer__V1__Admitted *admitted, struct message *out) {
    out->u.admitted.attempt.v = admitted->attempt;
    out->u.admitted.slot.v = admitted->slot;
    out->u.admitted.key = admitted->key;
    out->u.admitted.cached = admitted->cached;
    out->u.admitted.is_local = admitted->is_local;
    return true;
}

static bool decode_refusal(const Baton__Peer__V1__Refusal *refusal, struct message *out) {
    out->u.rejected.attempt.v = refusal->attempt;
    out->u.rejected.retry_after_ms = refusal->retry_after_ms;
    return cause_take(refusal->cause, &out->u.rejected.cause);
}

static bool decode_prefill(const Baton__Peer__V1__Prefill *prefill, struct message *out) {
    out->u.prefill.attempt.v = prefill->attempt;
    out->u.prefill.tokens = prefill->tokens;
    out->u.prefill.from = prefill->from;
    out->u.prefill.slot.v = prefill->slot;
    out->u.prefill.key = prefill->key;
    out->u.prefill.decode.v = prefill->decode;
    out->u.prefill.deadline_ms = prefill->deadline_ms;
    return count_take(prefill->n_tokens, &out->u.prefill.token_count) &&
           text_take(prefill->address, out->u.prefill.address, ADDRESS_MAX) &&
           text_take(prefill->label, out->u.prefill.label, LABEL_MAX) &&
           salt_take(prefill->salt, &out->u.prefill.salt);
}

static bool decode_prefill_end(const Baton__Peer__V1__PrefillEnd *end, struct message *out) {
    out->u.prefill_end.attempt.v = end->attempt;
    out->u.prefill_end.bytes = end->bytes;
    out->u.prefill_end.cached = end->cached;
    out->u.prefill_end.exposed_us = end->exposed_us;
    return outcome_take(end->outcome, &out->u.prefill_end.outcome) &&
           cause_take(end->cause, &out->u.prefill_end.cause);
}

static bool decode_open(const Baton__Peer__V1__Open *open, struct message *out) {
    out->u.open.slot.v = open->slot;
    out->u.open.key = open->key;
    out->u.open.from = open->from;
    out->u.open.end = open->end;
    out->u.open.bytes = open->bytes;
    return true;
}

static bool decode_accept(const Baton__Peer__V1__Accept *accept, struct message *out) {
    out->u.accept.slot.v = accept->slot;
    out->u.accept.address = accept->address.data;
    return count_take(accept->address.len, &out->u.accept.address_len);
}

static bool decode_slot_cause(const Baton__Peer__V1__SlotCause *from, struct message *out) {
    out->u.refuse.slot.v = from->slot;
    return cause_take(from->cause, &out->u.refuse.cause);
}

static bool decode_tokens(const Baton__Peer__V1__Tokens *tokens, struct message *out) {
    out->u.tokens.attempts = tokens->attempts;
    out->u.tokens.tokens = tokens->tokens;
    if (tokens->n_top_counts > 0) {
        out->u.tokens.logprobs = tokens->logprobs;
        out->u.tokens.top_counts = tokens->top_counts;
        out->u.tokens.top_tokens = tokens->top_tokens;
        out->u.tokens.top_logprobs = tokens->top_logprobs;
    }
    bool has_all = tokens->n_logprobs == tokens->n_top_counts &&
                   tokens->n_top_logprobs == tokens->n_top_tokens &&
                   (tokens->n_top_counts == 0 || tokens->n_top_counts == tokens->n_attempts);
    return has_all && tokens->n_tokens == tokens->n_attempts &&
           count_take(tokens->n_top_tokens, &out->u.tokens.top_count) &&
           count_take(tokens->n_attempts, &out->u.tokens.count);
}

static bool decode_end(const Baton__Peer__V1__End *end, struct message *out) {
    unsigned finish = 0;
    if (!number_take(end->finish, FINISH_ERROR + 1, &finish)) {
        return false;
    }
    out->u.end.attempt.v = end->attempt;
    out->u.end.finish = (enum finish)finish;
    out->u.end.kv_bytes = end->kv_bytes;
    if (end->usage != NULL) {
        out->u.end.usage.prompt_tokens = end->usage->prompt_tokens;
        out->u.end.usage.cached_tokens = end->usage->cached_tokens;
        out->u.end.usage.completion_tokens = end->usage->completion_tokens;
    }
    return outcome_take(end->outcome, &out->u.end.outcome) &&
           cause_take(end->cause, &out->u.end.cause);
}

static bool decode_abort(const Baton__Peer__V1__Abort *abort, struct message *out) {
    out->u.abort.attempt.v = abort->attempt;
    out->u.abort.is_unless_committed = abort->is_unless_committed;
    return cause_take(abort->cause, &out->u.abort.cause);
}

static bool decode_cached(const Baton__Peer__V1__Cached *cached, struct message *out) {
    out->u.cached.is_reset = cached->is_reset;
    out->u.cached.removed = cached->removed;
    out->u.cached.stored = cached->stored;
    return count_take(cached->n_removed, &out->u.cached.removed_count) &&
           count_take(cached->n_stored, &out->u.cached.stored_count);
}

static bool decode_envelope(const Baton__Peer__V1__Envelope *envelope, struct message *out) {
    switch (out->kind) {
    case MESSAGE_HELLO: return decode_hello(envelope->hello, out);
    case MESSAGE_BEAT: return decode_beat(envelope->beat, out);
    case MESSAGE_AUDIT: return decode_ids(envelope->audit, out);
    case MESSAGE_UNKNOWN: return decode_ids(envelope->unknown, out);
    case MESSAGE_ADMIT: return decode_admit(envelope->admit, out);
    case MESSAGE_ADMITTED: return decode_admitted(envelope->admitted, out);
    case MESSAGE_REJECTED: return decode_refusal(envelope->rejected, out);
    case MESSAGE_BUSY: return decode_refusal(envelope->busy, out);
    case MESSAGE_PREFILL: return decode_prefill(envelope->prefill, out);
    case MESSAGE_QUEUED:
        out->u.queued.attempt.v = envelope->queued->attempt;
        out->u.queued.backlog_ms = envelope->queued->backlog_ms;
        return true;
    case MESSAGE_PREFILL_END: return decode_prefill_end(envelope->prefill_end, out);
    case MESSAGE_OPEN: return decode_open(envelope->open, out);
    case MESSAGE_ACCEPT: return decode_accept(envelope->accept, out);
    case MESSAGE_REFUSE: return decode_slot_cause(envelope->refuse, out);
    case MESSAGE_ABORT_SLOT: return decode_slot_cause(envelope->abort_slot, out);
    case MESSAGE_FIN:
        out->u.fin.slot.v = envelope->fin->slot;
        out->u.fin.bytes = envelope->fin->bytes;
        out->u.fin.cached = envelope->fin->cached;
        return true;
    case MESSAGE_COMMIT: out->u.commit.slot.v = envelope->commit->slot; return true;
    case MESSAGE_TOKENS: return decode_tokens(envelope->tokens, out);
    case MESSAGE_END: return decode_end(envelope->end, out);
    case MESSAGE_ABORT: return decode_abort(envelope->abort, out);
    case MESSAGE_COMMITTED: out->u.committed.attempt.v = envelope->committed->attempt; return true;
    case MESSAGE_CACHED: return decode_cached(envelope->cached, out);
    }
    return false;
}

enum status wire_session_decode(struct bytes bytes, struct wire_arena *arena, struct message *out) {
    if (bytes.len > WIRE_MESSAGE_MAX) {
        return STATUS_RANGE;
    }
    const ProtobufCMessage *unpacked =
        wire_unpack(&baton__peer__v1__envelope__descriptor, bytes, arena, SLACK_BYTES);
    if (unpacked == NULL) {
        return STATUS_CORRUPT;
    }
    const Baton__Peer__V1__Envelope *envelope = (const void *)unpacked;
    if (envelope->message_case == BATON__PEER__V1__ENVELOPE__MESSAGE__NOT_SET) {
        return unpacked->n_unknown_fields > 0 ? STATUS_UNSUPPORTED : STATUS_CORRUPT;
    }
    struct message message; /* all of its union: an initialiser promises only the first member */
    memset(&message, 0, sizeof message);
    message.kind = (enum message_kind)envelope->message_case;
    if (!decode_envelope(envelope, &message) || !message_is_valid(&message)) {
        return STATUS_CORRUPT;
    }
    *out = message;
    return STATUS_OK;
}
