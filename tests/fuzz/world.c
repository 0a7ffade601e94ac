#include "fuzz/world.h"

#include "core/node.h"

#define MS 1000000ll

void world_init(struct world *world, const uint8_t *data, size_t len) {
    memset(world, 0, offsetof(struct world, effects));
    world->effects.count = 0;
    world->input = input_of(data, len);
    world->now.ns = 1000 * MS;
    world->next_odd = 1;
}

void world_fini(struct world *world) {
    wire_arena_fini(&world->arena);
    wire_buffer_fini(&world->buffer);
}

void *world_memory(size_t bytes) {
    static void *memory;
    static size_t cap;
    if (bytes > cap) {
        free(memory);
        cap = (bytes + 63) & ~(size_t)63;
        memory = aligned_alloc(64, cap);
        CHECK(memory != NULL);
    }
    return memory;
}

void world_remember(struct world_ids *ids, uint64_t value) {
    ids->values[ids->count++ % WORLD_IDS] = value;
}

uint64_t world_draw(struct world *world, const struct world_ids *ids) {
    uint8_t at = input_u8(&world->input);
    uint32_t known = ids->count < WORLD_IDS ? ids->count : WORLD_IDS;
    if (known > 0 && at < 224) {
        return ids->values[(ids->count - 1 - at % known) % WORLD_IDS];
    }
    return 1 + at % 8;
}

const uint32_t *world_draw_tokens(struct world *world, uint32_t count) {
    static uint32_t tokens[4 * WORLD_CONTEXT];
    CHECK_OP(count, <=, 4 * WORLD_CONTEXT);
    uint8_t pattern = input_u8(&world->input);
    for (uint32_t i = 0; i < count; i++) { /* few families: prefixes are shared */
        tokens[i] = pattern < 250 ? (pattern & 3) + (i * (pattern >> 6)) % 4
                                  : input_u8(&world->input) % (WORLD_VOCAB + 1);
    }
    return tokens;
}

void world_draw_sampling(struct world *world, struct sampling *sampling) {
    uint8_t flags = input_u8(&world->input);
    *sampling = (struct sampling){
        .seed = flags, .temperature = 1.0f, .top_p = 1.0f, .top_k = -1, .repetition_penalty = 1.0f};
    sampling->ignore_eos = (flags & 1) != 0;
    sampling->frequency_penalty = (flags & 2) != 0 ? 0.5f : 0.0f;
    sampling->min_tokens = (flags & 4) != 0 ? 2 : 0;
    sampling->logprobs = (flags & 64) != 0 ? 1 + flags % (1 + LOGPROBS_TOP_MAX) : 0;
    if ((flags & 8) != 0) {
        sampling->stop_token_count = 2;
        sampling->stop_tokens[0] = input_u8(&world->input) % WORLD_VOCAB;
        sampling->stop_tokens[1] = input_u8(&world->input);
    }
}

/* --- streams ---------------------------------------------------------------------------------- */

struct world_stream *world_stream(struct world *world, uint64_t id) {
    for (uint32_t i = 0; i < world->stream_count; i++) {
        if (world->streams[i].id == id) {
            return &world->streams[i];
        }
    }
    return NULL;
}

static struct world_stream *stream_add(struct world *world, uint64_t id) {
    CHECK(world_stream(world, id) == NULL);
    uint32_t at = 0;
    while (at < world->stream_count && !world->streams[at].is_ended) {
        at++; /* numbers are never used again, places in this table are */
    }
    if (at == WORLD_STREAMS_MAX) {
        return NULL;
    }
    if (at == world->stream_count) {
        world->stream_count++;
    }
    world->streams[at] = (struct world_stream){.id = id};
    return &world->streams[at];
}

struct world_stream *world_accept(struct world *world) {
    struct world_stream *stream = stream_add(world, world->next_odd);
    if (stream != NULL) {
        world->next_odd += 2;
        struct event event = {.kind = EVENT_STREAM_ACCEPTED, .stream = {stream->id}};
        world_turn(world, &event);
    }
    return stream;
}

static void stream_end(struct world *world, struct world_stream *stream) {
    if (stream->is_ended) {
        return;
    }
    stream->is_ended = true;
    struct event event = {.kind = EVENT_STREAM_ENDED, .stream = {stream->id}};
    event.u.stream_end.cause = CAUSE_SESSION_ENDED;
    world_turn(world, &event);
}

void world_mail(struct world *world, struct world_stream *stream, const struct message *message) {
    if (stream->is_ended) {
        return;
    }
    struct event event = {.kind = EVENT_STREAM_BAD, .stream = {stream->id}};
    event.u.stream_end.cause = CAUSE_SESSION_ERROR;
    struct message decoded;
    if (wire_session_encode(message, &world->buffer) == STATUS_OK) {
        CHECK_OP(wire_session_decode(wire_buffer_bytes(&world->buffer), &world->arena, &decoded),
                 ==, STATUS_OK);
        event.kind = EVENT_STREAM_MAIL;
        event.u.mail.message = &decoded;
    }
    world_turn(world, &event);
    wire_arena_fini(&world->arena); /* freed, not reset: whoever kept a pointer is seen by ASan */
}

void world_hello(struct world *world, struct world_stream *stream, enum role role,
                 uint64_t incarnation, struct layout_digest layout) {
    struct message message = {.kind = MESSAGE_HELLO};
    message.u.hello.incarnation.v = incarnation;
    message.u.hello.session = input_u8(&world->input) % 4;
    message.u.hello.protocol = PROTOCOL_VERSION;
    message.u.hello.role = role;
    message.u.hello.layout = layout;
    text_copy(message.u.hello.id, LABEL_MAX, "peer");
    world_mail(world, stream, &message);
}

/* --- messages --------------------------------------------------------------------------------- */

static void draw_ids(struct world *world, struct message *message) {
    static uint64_t ids[2 * WORLD_IDS];
    message->u.audit.count = input_below(&world->input, 2 * WORLD_IDS);
    bool is_slots = (input_u8(&world->input) & 1) != 0;
    for (uint32_t i = 0; i < message->u.audit.count; i++) {
        ids[i] = world_draw(world, is_slots ? &world->slots : &world->attempts);
    }
    message->u.audit.ids = ids;
}

static void draw_tokens_message(struct world *world, struct message *message) {
    static uint64_t attempts[64];
    static uint32_t tokens[64];
    message->u.tokens.count = input_below(&world->input, 64);
    for (uint32_t i = 0; i < message->u.tokens.count; i++) {
        attempts[i] = world_draw(world, &world->attempts);
        tokens[i] = input_u8(&world->input) % WORLD_VOCAB;
    }
    message->u.tokens.attempts = attempts;
    message->u.tokens.tokens = tokens;
    static const float logprobs[64 * LOGPROBS_TOP_MAX];
    static uint32_t top_counts[64];
    static const uint32_t top_tokens[64 * LOGPROBS_TOP_MAX];
    uint8_t most = input_u8(&world->input);
    if (most >= 128) { /* somebody asked for logprobs */
        for (uint32_t i = 0; i < message->u.tokens.count; i++) {
            top_counts[i] = (most + i) % (2 + LOGPROBS_TOP_MAX);
            message->u.tokens.top_count += top_counts[i] > 0 ? top_counts[i] - 1 : 0;
        }
        message->u.tokens.logprobs = logprobs;
        message->u.tokens.top_counts = top_counts;
        message->u.tokens.top_tokens = top_tokens;
        message->u.tokens.top_logprobs = logprobs;
    }
}

/* Few names, so that they come and go again. */
static void draw_blocks(struct world *world, struct message *message) {
    static uint64_t blocks[2][32];
    uint32_t counts[2];
    for (uint32_t list = 0; list < 2; list++) {
        counts[list] = input_below(&world->input, 32);
        for (uint32_t i = 0; i < counts[list]; i++) {
            blocks[list][i] = 1 + input_u8(&world->input);
        }
    }
    message->u.cached.is_reset = input_u8(&world->input) > 224;
    message->u.cached.removed_count = counts[0];
    message->u.cached.stored_count = counts[1];
    message->u.cached.removed = blocks[0];
    message->u.cached.stored = blocks[1];
}

static void draw_slot(struct world *world, struct slot_id *slot, uint64_t *key) {
    uint64_t unused = 0;
    slot->v = world_draw(world, &world->slots);
    *(key != NULL ? key : &unused) = world_draw(world, &world->keys);
}

static enum cause draw_cause(struct world *world) {
    return (enum cause)input_below(&world->input, CAUSE_COUNT);
}

static enum outcome draw_outcome(struct world *world) {
    return (enum outcome)(1 + input_below(&world->input, 3));
}

static void draw_message(struct world *world, struct message *message) {
    struct input *input = &world->input;
    static const uint8_t address[4] = {1, 2, 3, 4};
    switch (message->kind) {
    case MESSAGE_HELLO:
        message->u.hello.incarnation.v = 1 + input_below(input, 4);
        message->u.hello.session = input_below(input, 8);
        message->u.hello.layout.low = input_below(input, 4);
        message->u.hello.protocol = PROTOCOL_VERSION + (input_u8(input) == 255 ? 1 : 0);
        message->u.hello.role = (enum role)(1 + input_below(input, 3));
        message->u.hello.is_draining = input_u8(input) > 250;
        break;
    case MESSAGE_BEAT:
        message->u.beat.progress = input_u8(input);
        message->u.beat.backlog_ms = input_u16(input);
        message->u.beat.is_draining = input_u8(input) > 250;
        break;
    case MESSAGE_AUDIT:
    case MESSAGE_UNKNOWN: draw_ids(world, message); break;
    case MESSAGE_ADMIT:
        message->u.admit.attempt.v = world_draw(world, &world->attempts) + input_below(input, 4);
        message->u.admit.token_count = input_below(input, 2 * WORLD_CONTEXT);
        message->u.admit.tokens = world_draw_tokens(world, message->u.admit.token_count);
        message->u.admit.output_first = 1 + input_below(input, 1 + message->u.admit.token_count);
        message->u.admit.max_new = 1 + input_below(input, WORLD_CONTEXT);
        message->u.admit.deadline_ms = input_u16(input);
        world_draw_sampling(world, &message->u.admit.sampling);
        message->u.admit.local_max = input_below(input, WORLD_CONTEXT);
        text_copy(message->u.admit.label, LABEL_MAX, "label");
        world_remember(&world->attempts, message->u.admit.attempt.v);
        break;
    case MESSAGE_ADMITTED:
        message->u.admitted.attempt.v = world_draw(world, &world->attempts);
        draw_slot(world, &message->u.admitted.slot, &message->u.admitted.key);
        message->u.admitted.cached = input_below(input, WORLD_CONTEXT);
        message->u.admitted.is_local = (input_u8(input) & 1) != 0;
        break;
    case MESSAGE_REJECTED:
    case MESSAGE_BUSY:
        message->u.rejected.attempt.v = world_draw(world, &world->attempts);
        message->u.rejected.cause = draw_cause(world);
        message->u.rejected.retry_after_ms = input_u8(input) == 255 ? UINT32_MAX : input_u8(input);
        break;
    case MESSAGE_PREFILL:
        message->u.prefill.attempt.v = world_draw(world, &world->attempts) + input_below(input, 4);
        message->u.prefill.token_count = input_below(input, 2 * WORLD_CONTEXT);
        message->u.prefill.tokens = world_draw_tokens(world, message->u.prefill.token_count);
        message->u.prefill.from = input_below(input, 1 + message->u.prefill.token_count);
        message->u.prefill.slot.v = world_draw(world, &world->slots) + input_below(input, 4);
        message->u.prefill.key = input_u8(input);
        message->u.prefill.decode.v = 1 + input_below(input, 4);
        text_copy(message->u.prefill.address, ADDRESS_MAX, "decode:1");
        message->u.prefill.deadline_ms = input_u16(input);
        world_remember(&world->attempts, message->u.prefill.attempt.v);
        world_remember(&world->slots, message->u.prefill.slot.v);
        world_remember(&world->keys, message->u.prefill.key);
        break;
    case MESSAGE_QUEUED:
        message->u.queued.attempt.v = world_draw(world, &world->attempts);
        message->u.queued.backlog_ms = input_u16(input);
        break;
    case MESSAGE_PREFILL_END:
        message->u.prefill_end.attempt.v = world_draw(world, &world->attempts);
        message->u.prefill_end.outcome = draw_outcome(world);
        message->u.prefill_end.cause = draw_cause(world);
        message->u.prefill_end.bytes = input_u8(input);
        message->u.prefill_end.exposed_us = message->u.prefill_end.bytes << 4;
        break;
    case MESSAGE_OPEN:
        draw_slot(world, &message->u.open.slot, &message->u.open.key);
        message->u.open.from = input_below(input, WORLD_CONTEXT);
        message->u.open.end = message->u.open.from + input_below(input, WORLD_CONTEXT);
        message->u.open.bytes = input_u16(input);
        break;
    case MESSAGE_ACCEPT:
        draw_slot(world, &message->u.accept.slot, NULL);
        message->u.accept.address = address;
        message->u.accept.address_len = sizeof address;
        break;
    case MESSAGE_REFUSE:
    case MESSAGE_ABORT_SLOT:
        draw_slot(world, &message->u.refuse.slot, NULL);
        message->u.refuse.cause = draw_cause(world);
        break;
    case MESSAGE_FIN:
        draw_slot(world, &message->u.fin.slot, NULL);
        message->u.fin.bytes = input_u16(input);
        break;
    case MESSAGE_COMMIT: draw_slot(world, &message->u.commit.slot, NULL); break;
    case MESSAGE_TOKENS: draw_tokens_message(world, message); break;
    case MESSAGE_END:
        message->u.end.attempt.v = world_draw(world, &world->attempts);
        message->u.end.outcome = draw_outcome(world);
        message->u.end.cause = draw_cause(world);
        message->u.end.finish = (enum finish)input_below(input, 5);
        break;
    case MESSAGE_ABORT:
        message->u.abort.attempt.v = world_draw(world, &world->attempts);
        message->u.abort.cause = draw_cause(world);
        message->u.abort.is_unless_committed = (input_u8(input) & 1) != 0;
        break;
    case MESSAGE_COMMITTED:
        message->u.committed.attempt.v = world_draw(world, &world->attempts);
        break;
    case MESSAGE_CACHED: draw_blocks(world, message); break;
    }
}

/* --- turns ------------------------------------------------------------------------------------ */

static void hear(struct world *world, const struct effect *effect) {
    struct world_stream *stream = world_stream(world, effect->stream.v);
    const struct message *message = &effect->u.message;
    CHECK(stream != NULL && !stream->is_ended && !stream->is_closed);
    CHECK_OP(wire_session_encode(message, &world->buffer), ==, STATUS_OK);
    if (message->kind == MESSAGE_ADMITTED) {
        world_remember(&world->slots, message->u.admitted.slot.v);
        world_remember(&world->keys, message->u.admitted.key);
    } else if (message->kind == MESSAGE_ADMIT) {
        world_remember(&world->attempts, message->u.admit.attempt.v);
    }
}

void world_turn(struct world *world, const struct event *event) {
    world->step(world, event);
    for (uint32_t i = 0; i < world->effects.count; i++) {
        const struct effect *effect = &world->effects.items[i];
        struct world_stream *stream = NULL;
        switch (effect->kind) {
        case EFFECT_STREAM_OPEN:
            CHECK((effect->stream.v & 1) == 0 && effect->stream.v != 0);
            CHECK(memchr(effect->u.open.address, '\0', ADDRESS_MAX) != NULL);
            CHECK(stream_add(world, effect->stream.v) != NULL);
            break;
        case EFFECT_STREAM_SEND: hear(world, effect); break;
        case EFFECT_STREAM_CLOSE:
            stream = world_stream(world, effect->stream.v);
            CHECK(stream != NULL);
            stream->is_closed = true;
            break;
        case EFFECT_NOTE: CHECK(memchr(effect->u.note.label, '\0', LABEL_MAX) != NULL); break;
        case EFFECT_EXIT:
            CHECK(!world->is_exit_seen && world->live(world) == 0);
            world->is_exit_seen = true;
            break;
        case EFFECT_TOKENIZE:
        case EFFECT_DELIVER:
        case EFFECT_CHOICE:
        case EFFECT_ANSWER:
        case EFFECT_STEP:
        case EFFECT_STEP_ABANDON:
        case EFFECT_LINK_ARM:
        case EFFECT_LINK_DISARM:
        case EFFECT_LINK_CONNECT:
        case EFFECT_LINK_SEND:
        case EFFECT_LINK_CLOSE: world->effect(world, effect); break;
        }
    }
}

void world_pass(struct world *world, uint32_t ticks, uint32_t tick_ms) {
    struct event tick = {.kind = EVENT_TICK};
    for (uint32_t i = 0; i < ticks; i++) {
        world->now.ns += tick_ms * MS;
        world_turn(world, &tick);
    }
}

static void beats(struct world *world) {
    for (uint32_t i = 0; i < world->stream_count; i++) {
        struct message beat = {.kind = MESSAGE_BEAT};
        if (!world->streams[i].is_closed) {
            world_mail(world, &world->streams[i], &beat);
        }
    }
}

void world_anything(struct world *world) {
    struct input *input = &world->input;
    uint8_t what = input_u8(input);
    struct world_stream *stream =
        world->stream_count > 0 ? &world->streams[input_below(input, world->stream_count)] : NULL;
    struct event event = {0};
    if (what < 16) {
        world_pass(world, 1, what % 4 == 0 ? 0 : 50);
    } else if (what < 24) {
        world_pass(world, 1 + input_below(input, 64), 200);
    } else if (what < 40) { /* time passes and everybody is heard */
        for (uint32_t left = 1 + input_below(input, 16); left > 0; left--) {
            beats(world);
            world_pass(world, 4, 200);
        }
    } else if (what < 44) {
        event.kind = EVENT_DRAIN;
        event.u.drain.grace = span_ms(input_u16(input));
        world_turn(world, &event);
    } else if (what < 48) {
        event.kind = (enum event_kind)(EVENT_CLIENT_OPEN + input_below(input, 18));
        static const struct worker_info nobody = {0};
        if (event.kind == EVENT_WORKER_SEEN) {
            event.u.worker_seen.info = &nobody;
        }
        /* Ids of nothing: a shell may be late with anything but the end of an operation. */
        if (event.kind == EVENT_CLIENT_GONE || event.kind == EVENT_WORKER_SEEN ||
            event.kind == EVENT_LAYER_DONE || event.kind == EVENT_LINK_PROGRESS ||
            event.kind == EVENT_STOP_FOUND || event.kind == EVENT_LINK_FAILED) {
            world_turn(world, &event);
        }
    } else if (stream == NULL) {
        return;
    } else if (what < 52) {
        stream_end(world, stream);
    } else if (what < 54 && !stream->is_ended) {
        event.kind = EVENT_STREAM_BAD;
        event.stream.v = stream->id;
        event.u.stream_end.cause = CAUSE_SESSION_ERROR;
        world_turn(world, &event);
    } else {
        uint8_t kind = input_u8(input);
        struct message message = {.kind = kind < 224 ? world->kinds[kind % world->kind_count]
                                                     : (enum message_kind)(1 + kind % 21)};
        draw_message(world, &message);
        if (input_u8(input) % 4 != 3) {
            world->honest(world, stream, &message);
        }
        world_mail(world, stream, &message);
    }
}

void world_end(struct world *world, uint32_t ticks) {
    for (uint32_t turn = 0; turn < ticks; turn++) {
        for (uint32_t i = 0; i < world->stream_count; i++) {
            stream_end(world, &world->streams[i]);
        }
        if (turn > 8 && world->live(world) == 0) {
            return;
        }
        world_pass(world, 1, 200);
    }
    CHECK_OP(world->live(world), ==, 0);
}
