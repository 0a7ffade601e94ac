/* A program of events against the router core: clients, tokenizer, discovery and both kinds of
 * worker. */
#include "core/router.h"
#include "fuzz/world.h"

#define CALLS_MAX 128u

struct call {
    uint64_t id; /* 0 = free */
    uint64_t request;
    uint64_t tokenize; /* outstanding; 0 = none */
    uint64_t answer;   /* outstanding; 0 = none */
    bool is_answered;
    uint32_t delivered; /* by all choices */
    uint32_t max_tokens;
    uint32_t choices;
    uint32_t ended; /* bit i: choice i was told its end */
};

struct bed {
    struct world world; /* first */
    struct router_core core;
    struct call calls[CALLS_MAX]; /* from here on zeroed for each run */
    uint64_t next_call;
};

static const struct layout_digest digest = {1, 2};
static const enum message_kind kinds[] = {MESSAGE_ADMITTED,  MESSAGE_REJECTED, MESSAGE_TOKENS,
                                          MESSAGE_END,       MESSAGE_QUEUED,   MESSAGE_PREFILL_END,
                                          MESSAGE_BUSY,      MESSAGE_AUDIT,    MESSAGE_HELLO,
                                          MESSAGE_COMMITTED, MESSAGE_UNKNOWN,  MESSAGE_CACHED};
static const char *const models[] = {"m", "m", "m", "n", ""};
static const char *const labels[] = {"", "a", "b", "agent"};

static struct bed *bed_of(struct world *world) {
    return (struct bed *)(void *)world;
}

static void bed_step(struct world *world, const struct event *event) {
    struct bed *bed = bed_of(world);
    router_core_step(&bed->core, event, world->now, &world->effects);
    router_verify(&bed->core);
    struct entry_view view;
    for (uint32_t cursor = 0;
         event->kind == EVENT_TICK && router_view(&bed->core, &cursor, &view);) {
        CHECK(view.state != NULL && view.waits_for != NULL);
    }
}

static uint32_t bed_live(const struct world *world) {
    return ((const struct bed *)(const void *)world)->core.node.ledger.live;
}

static struct call *bed_call(struct bed *bed, uint64_t id) {
    for (uint32_t i = 0; i < CALLS_MAX; i++) {
        if (bed->calls[i].id == id) {
            return &bed->calls[i];
        }
    }
    return NULL;
}

static void bed_effect(struct world *world, const struct effect *effect) {
    struct bed *bed = bed_of(world);
    struct call *call = NULL;
    if (effect->kind == EFFECT_TOKENIZE) {
        call = bed_call(bed, effect->u.tokenize.call.v);
        CHECK(call != NULL && call->tokenize == 0 && !call->is_answered);
        call->tokenize = effect->u.tokenize.request;
        call->request = effect->u.tokenize.request;
    } else if (effect->kind == EFFECT_DELIVER) {
        call = bed_call(bed, effect->u.deliver.call.v);
        CHECK(call != NULL && !call->is_answered && effect->u.deliver.token_count > 0);
        call->delivered += effect->u.deliver.token_count;
        uint32_t index = effect->u.deliver.index;
        CHECK(index < call->choices && (call->ended >> index & 1) == 0);
        CHECK(call->delivered <= (uint64_t)call->choices * call->max_tokens);
    } else if (effect->kind == EFFECT_CHOICE) {
        call = bed_call(bed, effect->u.choice.call.v);
        uint32_t index = effect->u.choice.index;
        CHECK(call != NULL && !call->is_answered && index < call->choices);
        CHECK((call->ended >> index & 1) == 0);
        call->ended |= 1u << index;
    } else {
        CHECK_OP(effect->kind, ==, EFFECT_ANSWER);
        call = bed_call(bed, effect->u.answer.call.v);
        CHECK(call != NULL && !call->is_answered);
        CHECK(effect->u.answer.detail != NULL && effect->u.answer.outcome != OUTCOME_NONE);
        CHECK(strlen(effect->u.answer.detail) < ROUTER_DETAIL_MAX);
        CHECK(effect->u.answer.decode_label != NULL && effect->u.answer.prefill_label != NULL);
        CHECK((effect->u.answer.outcome == OUTCOME_FAILED) ==
              (effect->u.answer.finish == FINISH_ERROR));
        CHECK(effect->u.answer.index < (call->choices > 0 ? call->choices : 1));
        CHECK((call->ended >> effect->u.answer.index & 1) == 0);
        call->is_answered = true;
        call->answer = effect->u.answer.request;
    }
}

/* What a worker would say about a request that is really placed on it. */
static void bed_honest(struct world *world, struct world_stream *stream, struct message *message) {
    struct bed *bed = bed_of(world);
    const struct session *session = NULL;
    for (uint32_t i = 0; i < bed->core.node.config.sessions_max; i++) {
        const struct session *at = &bed->core.node.sessions[i];
        session = at->phase != SESSION_FREE && at->stream.v == stream->id ? at : session;
    }
    if (session == NULL) {
        return;
    }
    if (message->kind == MESSAGE_HELLO) {
        message->u.hello.role = session->role;
        message->u.hello.incarnation = session->incarnation;
        message->u.hello.layout = digest;
        return;
    }
    const struct request *placed = NULL;
    uint32_t skip = input_u8(&world->input) % 4;
    for (uint32_t i = 0; i < bed->core.config.requests_max; i++) {
        const struct request *request = &bed->core.requests[i];
        bool is_here = (request->decode != ROUTER_NONE && request->decode_stream.v == stream->id) ||
                       (request->prefill != ROUTER_NONE && request->prefill_stream.v == stream->id);
        if (request->state != REQUEST_NONE && is_here && (placed == NULL || skip > 0)) {
            skip -= placed != NULL ? 1 : 0;
            placed = request;
        }
    }
    if (placed == NULL) {
        return;
    }
    static uint64_t attempts[3];
    attempts[0] = attempts[1] = attempts[2] = placed->attempt.v;
    switch (message->kind) {
    case MESSAGE_ADMITTED:
        message->u.admitted.attempt = placed->attempt;
        message->u.admitted.cached %= placed->attempt_tokens;
        break;
    case MESSAGE_REJECTED:
    case MESSAGE_BUSY: message->u.rejected.attempt = placed->attempt; break;
    case MESSAGE_QUEUED: message->u.queued.attempt = placed->attempt; break;
    case MESSAGE_PREFILL_END: message->u.prefill_end.attempt = placed->attempt; break;
    case MESSAGE_END: message->u.end.attempt = placed->attempt; break;
    case MESSAGE_COMMITTED: message->u.committed.attempt = placed->attempt; break;
    case MESSAGE_TOKENS:
        message->u.tokens.count = message->u.tokens.count % 3 + 1;
        message->u.tokens.attempts = attempts;
        break;
    case MESSAGE_HELLO:
    case MESSAGE_BEAT:
    case MESSAGE_AUDIT:
    case MESSAGE_UNKNOWN:
    case MESSAGE_ADMIT:
    case MESSAGE_PREFILL:
    case MESSAGE_OPEN:
    case MESSAGE_ACCEPT:
    case MESSAGE_REFUSE:
    case MESSAGE_FIN:
    case MESSAGE_COMMIT:
    case MESSAGE_ABORT:
    case MESSAGE_ABORT_SLOT:
    case MESSAGE_CACHED: break;
    }
}

/* Whoever serves some request says what an honest worker would say next. */
static void bed_serve(struct bed *bed) {
    struct world *world = &bed->world;
    struct input *input = &world->input;
    const struct request *request =
        &bed->core.requests[input_below(input, bed->core.config.requests_max)];
    uint8_t how = input_u8(input);
    if (request->state == REQUEST_NONE || request->decode == ROUTER_NONE) {
        return;
    }
    struct world_stream *decode = world_stream(world, request->decode_stream.v);
    struct world_stream *prefill =
        request->prefill != ROUTER_NONE ? world_stream(world, request->prefill_stream.v) : NULL;
    uint32_t token = how % WORLD_VOCAB;
    uint64_t attempt = request->attempt.v;
    struct message message = {.kind = MESSAGE_TOKENS};
    message.u.tokens.count = 1;
    message.u.tokens.attempts = &attempt;
    message.u.tokens.tokens = &token;
    static const float logprob[LOGPROBS_TOP_MAX];
    static const uint32_t tops[LOGPROBS_TOP_MAX];
    if (request->sampling.logprobs > 0) {
        message.u.tokens.logprobs = logprob;
        message.u.tokens.top_counts = &request->sampling.logprobs;
        message.u.tokens.top_count = request->sampling.logprobs - 1;
        message.u.tokens.top_tokens = tops;
        message.u.tokens.top_logprobs = logprob;
    }
    if (request->state == REQUEST_ADMITTING) {
        message = (struct message){.kind = MESSAGE_ADMITTED};
        message.u.admitted.attempt.v = attempt;
        message.u.admitted.slot.v = 1 + how;
        message.u.admitted.is_local = how % 4 == 0;
    } else if (request->state == REQUEST_ASKING && how < 128) {
        message = (struct message){.kind = MESSAGE_COMMITTED};
        message.u.committed.attempt.v = attempt;
    } else if (prefill != NULL && how < 64) {
        message = (struct message){.kind = how < 16 ? MESSAGE_QUEUED : MESSAGE_PREFILL_END};
        if (message.kind == MESSAGE_QUEUED) {
            message.u.queued.attempt.v = attempt;
        } else {
            message.u.prefill_end.attempt.v = attempt;
            message.u.prefill_end.outcome = how < 48 ? OUTCOME_OK : OUTCOME_FAILED;
            message.u.prefill_end.cause = how < 48 ? CAUSE_DONE : CAUSE_SEND_FAILED;
        }
        decode = prefill;
    } else if (how >= 208) {
        message = (struct message){.kind = MESSAGE_END};
        message.u.end.attempt.v = attempt;
        message.u.end.outcome = how < 240 ? OUTCOME_OK : OUTCOME_FAILED;
        message.u.end.cause = how < 240 ? CAUSE_DONE : CAUSE_SHUTDOWN;
        message.u.end.finish = how < 240 ? FINISH_STOP : FINISH_ERROR;
    }
    if (decode != NULL) {
        world_mail(world, decode, &message);
    }
}

static void bed_open(struct bed *bed) {
    struct input *input = &bed->world.input;
    struct call *call = NULL;
    for (uint32_t i = 0; i < CALLS_MAX; i++) {
        struct call *at = &bed->calls[i];
        if (at->id == 0 || (at->is_answered && at->answer == 0 && at->tokenize == 0)) {
            call = at;
        }
    }
    if (call == NULL) {
        return;
    }
    *call = (struct call){.id = ++bed->next_call};
    struct event event = {.kind = EVENT_CLIENT_OPEN};
    event.u.client_open.call.v = call->id;
    event.u.client_open.deadline = span_ms(input_u8(input) * 64);
    event.u.client_open.model = models[input_below(input, 5)];
    event.u.client_open.request_label = labels[input_below(input, 4)];
    event.u.client_open.session_label = labels[input_below(input, 4)];
    world_turn(&bed->world, &event);
}

static void bed_tokenized(struct bed *bed, struct call *call, bool is_failing) {
    struct world *world = &bed->world;
    struct input *input = &world->input;
    static const uint32_t eos[2] = {3, 5};
    struct sampling sampling;
    struct event event = {.kind = EVENT_TOKENIZED};
    event.u.tokenized.request = call->tokenize;
    event.u.tokenized.detail = "a sentence";
    call->tokenize = 0;
    if (is_failing) {
        event.u.tokenized.status = input_u8(input) < 128 ? STATUS_INVALID : STATUS_UNAVAILABLE;
    } else {
        event.u.tokenized.token_count = input_below(input, WORLD_CONTEXT);
        event.u.tokenized.tokens = world_draw_tokens(world, event.u.tokenized.token_count);
        event.u.tokenized.max_tokens = input_below(input, 12);
        world_draw_sampling(world, &sampling);
        event.u.tokenized.sampling = &sampling;
        event.u.tokenized.eos = eos;
        event.u.tokenized.eos_count = 2;
        call->max_tokens = event.u.tokenized.max_tokens > 0 ? event.u.tokenized.max_tokens
                                                            : UINT32_MAX; /* what fits */
        uint8_t choices = input_u8(input);
        event.u.tokenized.choices = choices < 160 ? choices % 2 : choices % 20;
        call->choices = event.u.tokenized.choices > 1 ? event.u.tokenized.choices : 1;
    }
    world_turn(world, &event);
}

static void bed_answered(struct bed *bed, struct call *call) {
    struct event event = {.kind = EVENT_ANSWERED};
    event.u.answered.request = call->answer;
    call->answer = 0;
    world_turn(&bed->world, &event);
}

static void bed_client(struct bed *bed) {
    struct world *world = &bed->world;
    struct input *input = &world->input;
    uint8_t what = input_u8(input);
    uint32_t skip = input_u8(input) % 8;
    struct call *call = &bed->calls[CALLS_MAX - 1];
    for (uint32_t i = CALLS_MAX; i-- > 0;) { /* new ones are put at the end */
        bool is_open =
            bed->calls[i].id != 0 &&
            (!bed->calls[i].is_answered || bed->calls[i].answer + bed->calls[i].tokenize != 0);
        if (is_open && skip-- == 0) {
            call = &bed->calls[i];
            break;
        }
    }
    struct event event = {0};
    if (call->tokenize != 0 && what < 150) {
        bed_tokenized(bed, call, what < 8);
    } else if (call->answer != 0 && what < 200) {
        bed_answered(bed, call);
    } else if (what < 220) {
        event.kind = EVENT_CLIENT_GONE;
        event.u.client_gone.call.v = call->id;
        event.u.client_gone.cause = what % 4 == 0 ? CAUSE_DEADLINE : CAUSE_CLIENT_GONE;
        world_turn(world, &event);
    } else if (what < 230) {
        event.kind = EVENT_CLIENT_ABORT;
        event.u.client_abort.label = labels[input_below(input, 4)];
        event.u.client_abort.is_session = what % 2 == 0;
        world_turn(world, &event);
    } else if (call->request != 0 && call->delivered > 0) {
        event.kind = EVENT_STOP_FOUND;
        event.u.stop_found.request = call->request;
        event.u.stop_found.index = what % 3;
        event.u.stop_found.completion_tokens = call->delivered;
        world_turn(world, &event);
    }
}

static void bed_worker(struct bed *bed) {
    struct input *input = &bed->world.input;
    uint8_t what = input_u8(input);
    uint64_t incarnation = 1 + what % 4;
    struct event event = {.kind = EVENT_WORKER_LOST};
    if (what >= 224) {
        event.u.worker_lost.incarnation.v = incarnation;
        world_turn(&bed->world, &event);
        return;
    }
    struct worker_info info = {.incarnation = {incarnation},
                               .role = what % 2 == 0 ? ROLE_DECODE : ROLE_PREFILL,
                               .layout = digest,
                               .vocab = WORLD_VOCAB,
                               .context = WORLD_CONTEXT,
                               .kv_tokens = 2 * WORLD_CONTEXT,
                               .page_tokens = 4,
                               .is_draining = what >= 216};
    text_copy(info.id, LABEL_MAX, "worker");
    text_copy(info.address, ADDRESS_MAX, "worker:1");
    text_copy(info.model, LABEL_MAX, what < 200 ? "m" : models[input_below(input, 5)]);
    if (what >= 208) { /* advice may be wrong in any way */
        info.role = (enum role)input_below(input, 4);
        info.context = input_below(input, 64);
        info.kv_tokens = input_below(input, 64);
        info.layout.low = input_below(input, 3);
        info.vocab = input_below(input, 32);
        text_copy(info.numerics, MESSAGE_NUMERICS_MAX, labels[input_below(input, 4)]);
    }
    event.kind = EVENT_WORKER_SEEN;
    event.u.worker_seen.info = &info;
    world_turn(&bed->world, &event);
}

static void bed_hello(struct bed *bed) {
    struct world *world = &bed->world;
    for (uint32_t i = 0; i < bed->core.node.config.sessions_max; i++) {
        const struct session *session = &bed->core.node.sessions[i];
        struct world_stream *stream = world_stream(world, session->stream.v);
        if (session->phase == SESSION_GREETING && stream != NULL) {
            world_hello(world, stream, session->role, session->incarnation.v, digest);
            return;
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    static struct bed only; /* too large to be allocated for each run */
    struct bed *bed = &only;
    struct world *world = &bed->world;
    world_init(world, data, len);
    memset(&bed->calls, 0, sizeof *bed - offsetof(struct bed, calls));
    world->step = bed_step;
    world->effect = bed_effect;
    world->honest = bed_honest;
    world->live = bed_live;
    world->kinds = kinds;
    world->kind_count = sizeof kinds / sizeof kinds[0];
    struct router_config config = {.node = {.role = ROLE_ROUTER,
                                            .incarnation = {77},
                                            .id = "router",
                                            .sessions_max = 8,
                                            .timers = timers_default()},
                                   .requests_max = 1 + input_below(&world->input, 8),
                                   .workers_max = 1 + input_below(&world->input, 8),
                                   .blocks_max = 256,
                                   .words_max = 512,
                                   .disaggregate_above = input_below(&world->input, 16),
                                   .secret = {1, 2}};
    router_init(&bed->core, &config, world_memory(router_bytes(&config)));
    while (world->input.len > 0) {
        uint8_t what = input_u8(&world->input);
        if (what < 24) {
            bed_open(bed);
        } else if (what < 64) {
            bed_client(bed);
        } else if (what < 80) {
            bed_worker(bed);
        } else if (what < 96) {
            bed_hello(bed);
        } else if (what < 136) {
            bed_serve(bed);
        } else {
            world_anything(world);
        }
    }
    /* The tokenizer and the calls end; nobody answers any more; every deadline passes. */
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < CALLS_MAX; i++) {
            if (bed->calls[i].tokenize != 0) {
                bed_tokenized(bed, &bed->calls[i], false);
            }
            if (bed->calls[i].answer != 0) {
                bed_answered(bed, &bed->calls[i]);
            }
        }
        for (uint32_t tick = 0; round < 2 && tick < 1600; tick++) {
            bool is_waiting = false;
            for (uint32_t i = 0; i < CALLS_MAX; i++) {
                is_waiting = is_waiting || (bed->calls[i].id != 0 && !bed->calls[i].is_answered);
            }
            if (!is_waiting) {
                break;
            }
            world_pass(world, 1, 200);
            for (uint32_t i = 0; i < world->stream_count; i++) {
                struct event ended = {.kind = EVENT_STREAM_ENDED, .stream = {world->streams[i].id}};
                ended.u.stream_end.cause = CAUSE_SESSION_ENDED;
                if (!world->streams[i].is_ended) {
                    world->streams[i].is_ended = true;
                    world_turn(world, &ended);
                }
            }
        }
    }
    for (uint32_t i = 0; i < CALLS_MAX; i++) { /* exactly one terminal each */
        CHECK(bed->calls[i].id == 0 || bed->calls[i].is_answered);
    }
    world_end(world, 32);
    world_fini(world);
    return 0;
}
