#include "core/router.h"

#include <string.h>

#include "base/bytes.h"
#include "base/check.h"
#include "core/router_fleet.h"

#define DECODE_LINKS(core)  &(core)->requests[0].decode_link, (uint32_t)sizeof(struct request)
#define PREFILL_LINKS(core) &(core)->requests[0].prefill_link, (uint32_t)sizeof(struct request)
#define PARKED_LINKS(core)  &(core)->requests[0].parked_link, (uint32_t)sizeof(struct request)
#define LANE_LINKS(core)    &(core)->lanes[0].link, (uint32_t)sizeof(struct router_lane)

/* One request's turn appends at most: two Aborts for each choice of its call and its end, Admit or
 * Prefill. */
#define EFFECTS_PER_REQUEST (3u * ROUTER_CHOICES_MAX + 4u)
/* A loop over requests goes on while so much is left for it and for the rest of the turn. */
#define EFFECTS_LEFT       (4u * EFFECTS_PER_REQUEST)
#define RETRY_TENTHS_FIRST 200u /* twenty retries in hand at start */
#define RETRY_TENTHS_MAX   1000u
#define WEIGHT_ANSWER_MAX  512u /* tokens of an answer in the load of its decode worker */

const char *request_state_name(uint32_t state) {
    switch ((enum request_state)state) {
    case REQUEST_NONE: return "none";
    case REQUEST_TOKENIZING: return "tokenizing";
    case REQUEST_PLACING: return "placing";
    case REQUEST_ADMITTING: return "admitting";
    case REQUEST_PREFILLING: return "prefilling";
    case REQUEST_ASKING: return "asking";
    case REQUEST_STREAMING: return "streaming";
    case REQUEST_ANSWERING: return "answering";
    case REQUEST_WAITING: return "waiting";
    case REQUEST_GATHERING: return "gathering";
    }
    return "unknown";
}

static void router_layout(struct router_core *core, const struct router_config *config,
                          struct arena *arena) {
    node_init(&core->node, &config->node, arena);
    void *ids = arena_take(arena, pool_bytes(config->requests_max));
    core->requests = arena_take(arena, (uint64_t)config->requests_max * sizeof *core->requests);
    void *calls = arena_take(arena, map_bytes(config->requests_max));
    core->lanes = arena_take(arena, (uint64_t)config->requests_max * sizeof *core->lanes);
    core->label_hashes = arena_take(arena, (uint64_t)config->requests_max * 2 * sizeof(uint64_t));
    words_init(&core->words, config->words_max, arena);
    core->workers = arena_take(arena, (uint64_t)config->workers_max * sizeof *core->workers);
    block_set_init(&core->blocks, config->blocks_max, arena);
    for (uint32_t i = 0; i < ROUTER_CHAINS; i++) {
        core->chains[i].blocks = arena_take(arena, ROUTER_CHAIN_MAX * sizeof(uint64_t));
    }
    core->out_ids = arena_take(arena, (uint64_t)MESSAGE_IDS_MAX * sizeof(uint64_t));
    if (ids == NULL) {
        return;
    }
    pool_init(&core->ids, config->requests_max, ids);
    map_init(&core->by_call, config->requests_max, calls);
    list_init(&core->parked.lanes);
    list_init(&core->lanes_free);
    for (uint32_t i = 0; i < config->requests_max; i++) {
        list_init(&core->lanes[i].requests);
        list_push_back(&core->lanes_free, LANE_LINKS(core), i);
    }
    core->retry_tenths = RETRY_TENTHS_FIRST;
    core->config = *config;
}

uint64_t router_bytes(const struct router_config *config) {
    struct router_core scratch;
    struct arena arena;
    arena_init(&arena, NULL, 0);
    router_layout(&scratch, config, &arena);
    return arena.len;
}

void router_init(struct router_core *core, const struct router_config *config, void *memory) {
    CHECK(config->requests_max > 0 && config->requests_max < (1u << 24));
    CHECK(config->workers_max > 0 && config->node.sessions_max >= config->workers_max);
    memset(core, 0, sizeof *core);
    struct arena arena;
    arena_init(&arena, memory, router_bytes(config));
    router_layout(core, config, &arena);
}

/* --- requests ------------------------------------------------------------------------------------
 */

static uint32_t request_index(const struct router_core *core, const struct request *request) {
    return (uint32_t)(request - core->requests);
}

static uint32_t *request_tokens(const struct router_core *core, const struct request *request) {
    return words_at(&core->words, request->words);
}

static struct request *request_by_id(struct router_core *core, uint64_t id) {
    uint32_t index = 0;
    return pool_find(&core->ids, id, &index) ? &core->requests[index] : NULL;
}

static struct request *request_by_call(struct router_core *core, struct call_id call) {
    uint32_t cursor = 0;
    uint32_t at = 0;
    while ((at = map_next(&core->by_call, call.v, &cursor)) != UINT32_MAX) {
        if (core->requests[at].call.v == call.v) {
            return &core->requests[at];
        }
    }
    return NULL;
}

/* An attempt's id: its request's generation and index with the attempt's number between them. */
static struct attempt_id request_attempt(const struct request *request) {
    uint64_t generation = request->id >> 32 & 0xffffff;
    return (struct attempt_id){generation << 40 |
                               (uint64_t)(request->attempt_number & 0xffff) << 24 |
                               (request->id & 0xffffff)};
}

/* The request whose current attempt this is; NULL for superseded and forged ones. */
static struct request *request_by_attempt(struct router_core *core, struct attempt_id attempt) {
    uint32_t index = (uint32_t)(attempt.v & 0xffffff);
    if (index >= core->config.requests_max) {
        return NULL;
    }
    struct request *request = &core->requests[index];
    return request->state != REQUEST_NONE && request->attempt.v == attempt.v ? request : NULL;
}

static bool request_has_decode(const struct request *request, const struct session *session) {
    return request->decode != ROUTER_NONE && request->decode_stream.v == session->stream.v;
}

static bool request_has_prefill(const struct request *request, const struct session *session) {
    return request->prefill != ROUTER_NONE && request->prefill_stream.v == session->stream.v;
}

static uint32_t request_emitted(const struct request *request) {
    return request->token_count - request->prompt_count;
}

/* Choice 0 of the same call: the request itself, where there is only one. */
static struct request *request_leader(struct router_core *core, const struct request *request) {
    return &core->requests[request->leader];
}

/* Choice `choice` of the call; NULL if it has ended. */
static struct request *call_choice(struct router_core *core, struct request *leader,
                                   uint32_t choice) {
    if (choice == 0) {
        return leader->state == REQUEST_GATHERING ? NULL : leader;
    }
    uint32_t at = choice < leader->choices ? leader->others[choice] : ROUTER_NONE;
    return at == ROUTER_NONE ? NULL : &core->requests[at];
}

static bool request_is_canary(const struct request *request) {
    return request->canary != CANARY_NONE;
}

static void request_move(struct router_core *core, struct request *request,
                         enum request_state state, struct instant state_deadline) {
    ledger_move(&core->node, request->state, state);
    request->state = state;
    request->state_since = core->node.now;
    request->state_deadline = state_deadline;
    node_progressed(&core->node);
}

static void request_settle(struct router_core *core, struct request *request) {
    if (request->state != REQUEST_ANSWERING || request->is_answering || request->is_tokenizing) {
        return;
    }
    CHECK(request->decode == ROUTER_NONE && request->prefill == ROUTER_NONE &&
          !request->parked_link.is_linked);
    core->words_held -= request->words != WORDS_NONE ? 1 : 0;
    words_free(&core->words, request->words);
    bool is_call = request->choice == 0;
    CHECK(!is_call || map_remove(&core->by_call, request->call.v, request_index(core, request)));
    struct terminal terminal = {.id = request->id,
                                .attempt = request->attempt.v,
                                .at = core->node.now,
                                .age = instant_since(core->node.now, request->since),
                                .state = request->decided_in,
                                .outcome = (uint8_t)request->outcome,
                                .cause = (uint8_t)request->cause};
    text_copy(terminal.label, sizeof terminal.label, request->label);
    ledger_end(&core->node, request->state, &terminal,
               instant_since(core->node.now, request->decided));
    pool_free(&core->ids, request->id);
    memset(request, 0, sizeof *request);
}

/* The lane of this model: the one that is in use, else a fresh one. */
static uint32_t router_lane_of(struct router_core *core, uint64_t model_hash) {
    uint32_t at = core->parked.lanes.head;
    while (at != LIST_NONE && core->lanes[at].model_hash != model_hash) {
        at = core->lanes[at].link.next;
    }
    if (at == LIST_NONE) {
        at = core->lanes_free.head;
        CHECK_OP(at, !=, LIST_NONE);
        list_remove(&core->lanes_free, LANE_LINKS(core), at);
        list_push_back(&core->parked.lanes, LANE_LINKS(core), at);
        core->lanes[at].model_hash = model_hash;
    }
    return at;
}

static void request_park(struct router_core *core, struct request *request, bool is_first) {
    request->lane = router_lane_of(core, request->model_hash);
    struct list *lane = &core->lanes[request->lane].requests;
    if (is_first) {
        list_push_front(lane, PARKED_LINKS(core), request_index(core, request));
    } else {
        list_push_back(lane, PARKED_LINKS(core), request_index(core, request));
    }
    core->parked.count++;
    core->is_placing_due = true;
}

static void request_unpark(struct router_core *core, struct request *request) {
    if (!request->parked_link.is_linked) {
        return;
    }
    struct list *lane = &core->lanes[request->lane].requests;
    list_remove(lane, PARKED_LINKS(core), request_index(core, request));
    core->parked.count--;
    if (lane->count == 0) {
        list_remove(&core->parked.lanes, LANE_LINKS(core), request->lane);
        list_push_back(&core->lanes_free, LANE_LINKS(core), request->lane);
    }
}

/* --- legs
 * ------------------------------------------------------------------------------------------- */

/* D's answer to Admit is no longer awaited. */
static void leg_answered(struct router_core *core, struct request *request) {
    if (request->is_admit_open) {
        request->is_admit_open = false;
        core->workers[request->decode].admitting--;
    }
}

/* Tokens that it counts for in its decode worker's load: few answers become as long as they may,
 * and what each is allowed says little about what it will be. */
static uint64_t request_weight(const struct request *request) {
    uint32_t answer =
        request->max_tokens < WEIGHT_ANSWER_MAX ? request->max_tokens : WEIGHT_ANSWER_MAX;
    return (uint64_t)request->prompt_count + answer;
}

static void leg_end_decode(struct router_core *core, struct request *request) {
    struct worker *worker = &core->workers[request->decode];
    list_remove(&core->node.sessions[worker->session].entries, DECODE_LINKS(core),
                request_index(core, request));
    worker->attempts--;
    leg_answered(core, request);
    worker->tokens_reserved -= request_weight(request);
    worker->tokens_due -= request->due_decode;
    request->decode = ROUTER_NONE;
    core->is_placing_due = core->parked.count > 0 || core->is_placing_due;
}

static void leg_end_prefill(struct router_core *core, struct request *request) {
    struct worker *worker = &core->workers[request->prefill];
    list_remove(&core->node.sessions[worker->session].entries, PREFILL_LINKS(core),
                request_index(core, request));
    worker->attempts--;
    worker->tokens_reserved -= request->attempt_tokens;
    worker->tokens_due -= request->due_prefill;
    request->prefill = ROUTER_NONE;
    core->is_placing_due = core->parked.count > 0 || core->is_placing_due;
}

/* What is left for D to do: `prompt` tokens, and the rest of the answer. */
static void leg_expect(struct router_core *core, struct request *request, uint32_t prompt) {
    struct worker *worker = &core->workers[request->decode];
    uint32_t answer = request->max_tokens - request_emitted(request);
    uint32_t due = prompt + (answer < WEIGHT_ANSWER_MAX ? answer : WEIGHT_ANSWER_MAX);
    worker->tokens_due += due;
    worker->tokens_due -= request->due_decode;
    request->due_decode = due;
}

static void leg_abort(struct router_core *core, struct request *request, uint32_t worker_index,
                      enum cause cause, bool is_unless_committed, struct effects *out) {
    struct worker *worker = &core->workers[worker_index];
    struct session *session = &core->node.sessions[worker->session];
    struct message *abort = node_send(&core->node, session, MESSAGE_ABORT, out);
    abort->u.abort.attempt = request->attempt;
    abort->u.abort.cause = cause;
    abort->u.abort.is_unless_committed = is_unless_committed;
}

/* Fate sharing: whatever legs are left are told and let go; what is not told ends with its session.
 */
static void legs_drop(struct router_core *core, struct request *request, enum cause cause,
                      struct effects *out) {
    if (request->decode != ROUTER_NONE) {
        leg_abort(core, request, request->decode, cause, false, out);
        leg_end_decode(core, request);
    }
    if (request->prefill != ROUTER_NONE) {
        leg_abort(core, request, request->prefill, cause, false, out);
        leg_end_prefill(core, request);
    }
}

/* --- the one terminal
 * ------------------------------------------------------------------------------- */

struct router_ending {
    enum outcome outcome;
    enum cause cause;
    enum status status;
    enum finish finish;
    uint32_t retry_after_ms;
    uint32_t completion_tokens;
    const char *detail;
};

/* The outcome of one choice: its legs are let go, and it waits for nothing any more. */
static void request_decide(struct router_core *core, struct request *request,
                           const struct router_ending *ending, struct effects *out) {
    legs_drop(core, request, ending->cause, out);
    request_unpark(core, request);
    request->outcome = ending->outcome;
    request->cause = ending->cause;
    request->decided_in = (uint8_t)request->state;
    request->decided = core->node.now;
}

/* A choice but the first has ended: nothing is left of it. */
static void choice_leave(struct router_core *core, struct request *leader, struct request *request,
                         const struct router_ending *ending, uint32_t tokens, struct effects *out) {
    leader->others[request->choice] = ROUTER_NONE;
    leader->undone--;
    leader->ended_tokens += tokens;
    leader->ended_bytes += request->kv_bytes;
    if (request->attempt_number > leader->ended_attempts) {
        leader->ended_attempts = request->attempt_number;
    }
    request_decide(core, request, ending, out);
    request_move(core, request, REQUEST_ANSWERING, INSTANT_NEVER);
    request_settle(core, request);
}

static void choice_tell(const struct request *leader, uint32_t choice, enum finish finish,
                        struct effects *out) {
    struct effect *effect = effects_add(out, EFFECT_CHOICE);
    effect->u.choice.request = leader->id;
    effect->u.choice.call = leader->call;
    effect->u.choice.index = choice;
    effect->u.choice.finish = finish;
}

/* The choices that waited for choice 0 are placed like any other, where its prompt is now. */
static void choices_place(struct router_core *core, struct request *leader) {
    uint64_t prefer =
        leader->decode != ROUTER_NONE ? core->workers[leader->decode].info.incarnation.v : 0;
    /* They came with it, before all that wait now: to the front, the first choice first. */
    for (uint32_t choice = leader->choices; choice-- > 1;) {
        struct request *request = call_choice(core, leader, choice);
        if (request != NULL && request->state == REQUEST_WAITING) {
            request->prefer = prefer;
            request_move(core, request, REQUEST_PLACING,
                         instant_add(core->node.now, core->node.config.timers.place));
            request_park(core, request, true);
        }
    }
}

/* One choice is complete while others are not. */
static void choice_end(struct router_core *core, struct request *request,
                       const struct router_ending *ending, struct effects *out) {
    struct request *leader = request_leader(core, request);
    choice_tell(leader, request->choice, ending->finish, out);
    if (request != leader) {
        choice_leave(core, leader, request, ending, ending->completion_tokens, out);
        return;
    }
    legs_drop(core, request, ending->cause, out);
    request_unpark(core, request); /* a stop string may be found after its worker has failed */
    leader->undone--;
    leader->ended_tokens += ending->completion_tokens;
    request_move(core, leader, REQUEST_GATHERING, INSTANT_NEVER);
    choices_place(core, leader);
}

/* Ends what is left of a call but choice 0's own request: each choice is told but the last, whose
 * end the answer is. Returns which that was. */
static uint32_t choices_end(struct router_core *core, struct request *leader,
                            const struct router_ending *ending, struct effects *out) {
    uint32_t last = 0;
    for (uint32_t choice = 1; choice < leader->choices; choice++) {
        last = call_choice(core, leader, choice) != NULL ? choice : last;
    }
    bool is_told = ending->cause != CAUSE_CLIENT_GONE;
    for (uint32_t choice = 0; choice <= last; choice++) {
        struct request *request = call_choice(core, leader, choice);
        if (request == NULL) {
            continue;
        }
        if (choice < last && is_told) {
            choice_tell(leader, choice, ending->finish, out);
        }
        bool is_ok = ending->outcome == OUTCOME_OK;
        uint32_t tokens = is_ok ? ending->completion_tokens : request_emitted(request);
        if (request == leader) {
            leader->ended_tokens += tokens;
            leader->undone--;
        } else {
            choice_leave(core, leader, request, ending, tokens, out);
        }
    }
    CHECK_OP(leader->undone, ==, 0);
    return last;
}

static void request_answer(struct router_core *core, struct request *request,
                           const struct router_ending *ending, struct effects *out) {
    struct request *leader = request_leader(core, request);
    if (request->state == REQUEST_ANSWERING) {
        return;
    }
    if (ending->outcome == OUTCOME_OK && leader->undone > 1) {
        choice_end(core, request, ending, out);
        return;
    }
    if (ending->detail != leader->detail) {
        text_copy(leader->detail, ROUTER_DETAIL_MAX, ending->detail);
    }
    uint32_t last = choices_end(core, leader, ending, out);
    core->stats.answers_ok += ending->outcome == OUTCOME_OK && !request_is_canary(leader) ? 1 : 0;
    request_decide(core, leader, ending, out);
    struct effect *effect = effects_add(out, EFFECT_ANSWER);
    effect->u.answer.request = leader->id;
    effect->u.answer.call = leader->call;
    effect->u.answer.index = last;
    effect->u.answer.outcome = ending->outcome;
    effect->u.answer.cause = ending->cause;
    effect->u.answer.status = ending->status;
    effect->u.answer.finish = ending->finish;
    effect->u.answer.usage.prompt_tokens = leader->prompt_count;
    effect->u.answer.usage.cached_tokens = leader->cached_first;
    effect->u.answer.usage.completion_tokens = leader->ended_tokens;
    effect->u.answer.seed = leader->sampling.seed;
    effect->u.answer.retry_after_ms = ending->retry_after_ms;
    effect->u.answer.detail = leader->detail;
    effect->u.answer.is_client_gone = ending->cause == CAUSE_CLIENT_GONE;
    effect->u.answer.decode_label = leader->decode_label;
    effect->u.answer.prefill_label = leader->prefill_label;
    effect->u.answer.kv_bytes = leader->kv_bytes + leader->ended_bytes;
    effect->u.answer.kv_exposed_us = leader->kv_exposed_us;
    effect->u.answer.attempts = leader->attempt_number > leader->ended_attempts
                                    ? leader->attempt_number
                                    : leader->ended_attempts;
    if (leader->first_placed.ns != 0) {
        effect->u.answer.queued = instant_since(leader->first_placed, leader->since);
    }
    if (leader->first_token.ns != 0) {
        effect->u.answer.ttft = instant_since(leader->first_token, leader->since);
    }
    effect->u.answer.total = instant_since(core->node.now, leader->since);
    leader->is_answering = true;
    request_move(core, leader, REQUEST_ANSWERING,
                 instant_add(core->node.now, core->node.config.timers.leave));
    leader->deadline = leader->state_deadline;
}

static void request_fail(struct router_core *core, struct request *request, enum cause cause,
                         enum status status, const char *detail, uint32_t retry_after_ms,
                         struct effects *out) {
    struct router_ending ending = {.outcome = OUTCOME_FAILED,
                                   .cause = cause,
                                   .status = status,
                                   .finish = FINISH_ERROR,
                                   .retry_after_ms = retry_after_ms,
                                   .completion_tokens = request_emitted(request),
                                   .detail = detail};
    request_answer(core, request, &ending, out);
}

static void request_done(struct router_core *core, struct request *request, enum cause cause,
                         enum finish finish, uint32_t completion, struct effects *out) {
    struct router_ending ending = {.outcome = OUTCOME_OK,
                                   .cause = cause,
                                   .status = STATUS_OK,
                                   .finish = finish,
                                   .completion_tokens = completion,
                                   .detail = ""};
    request_answer(core, request, &ending, out);
}

static void request_gone(struct router_core *core, struct request *request, enum cause cause,
                         struct effects *out) {
    bool is_abort = cause == CAUSE_CLIENT_ABORT;
    struct router_ending ending = {.outcome = OUTCOME_ABORTED,
                                   .cause = cause,
                                   .status = is_abort ? STATUS_OK : STATUS_CANCELLED,
                                   .finish = FINISH_ABORT,
                                   .completion_tokens = request_emitted(request),
                                   .detail = is_abort ? "aborted on request" : "the client left"};
    request_answer(core, request, &ending, out);
}

static void request_late(struct router_core *core, struct request *request, struct effects *out) {
    request_fail(core, request, CAUSE_DEADLINE, STATUS_TIMEOUT,
                 request->state == REQUEST_PLACING
                     ? "the deadline passed while the request waited for a worker with room: give "
                       "it more time or add workers"
                     : "the deadline passed before the answer was complete: give it more time or "
                       "ask for fewer tokens",
                 0, out);
}

/* --- attempts
 * ---------------------------------------------------------------------------------------- */

/* Whether the emitted tokens are the whole answer already: then a lost End costs nothing. */
static enum finish request_complete(const struct router_core *core, const struct request *request) {
    uint32_t emitted = request_emitted(request);
    if (emitted == 0) {
        return FINISH_NONE;
    }
    uint32_t last = request_tokens(core, request)[request->token_count - 1];
    for (uint32_t i = 0; i < request->eos_count && !request->sampling.ignore_eos; i++) {
        if (last == request->eos[i]) {
            return FINISH_STOP;
        }
    }
    for (uint32_t i = 0; i < request->sampling.stop_token_count; i++) {
        if (last == request->sampling.stop_tokens[i]) {
            return FINISH_STOP;
        }
    }
    return emitted >= request->max_tokens ? FINISH_LENGTH : FINISH_NONE;
}

/* A canary never waits for room: that is for those who are asked for something. */
static void request_give_up(struct router_core *core, struct request *request,
                            struct effects *out) {
    request_fail(core, request, CAUSE_BUSY, STATUS_BUSY, "a canary waits for nobody's room", 0,
                 out);
}

/* Back to PLACING with the next attempt number: nothing of the old attempt is accepted from here
 * on. */
static void request_replace(struct router_core *core, struct request *request,
                            struct effects *out) {
    legs_drop(core, request, CAUSE_SUPERSEDED, out);
    request->attempt_number++;
    request->attempt = request_attempt(request);
    request->is_prefill_queued = false;
    request->prefer = 0;
    if (request_is_canary(request) && core->parked.count > 0) {
        request_give_up(core, request, out);
        return;
    }
    request_move(core, request, REQUEST_PLACING,
                 instant_add(core->node.now, core->node.config.timers.place));
    request_park(core, request, true);
}

/* A leg was lost for `cause`: another attempt, or an honest error. */
static void request_retry(struct router_core *core, struct request *request, enum cause cause,
                          struct effects *out) {
    enum finish complete = request_complete(core, request);
    if (complete != FINISH_NONE) {
        request_done(core, request, CAUSE_DONE, complete, request_emitted(request), out);
        return;
    }
    if (request_is_canary(request)) {
        request_fail(core, request, cause, STATUS_UNAVAILABLE, "a canary is not tried again", 0,
                     out);
        return;
    }
    if (request->failures >= ROUTER_RETRIES || core->retry_tenths < 10) {
        struct writer writer;
        writer_init(&writer, request->detail, ROUTER_DETAIL_MAX - 1);
        writer_printf(&writer, "%s after %u attempts; the last one ended with: %s%s. %s",
                      core->retry_tenths < 10 ? "the router's retry budget is used up"
                                              : "no worker could finish the request",
                      request->failures + 1, cause_name(cause),
                      cause == CAUSE_STEP_FAILED
                          ? " (the engine failed, or what the model computes is not finite)"
                          : "",
                      cause == CAUSE_STEP_FAILED ? "The worker's log says which"
                                                 : "Try again later");
        request->detail[writer.len] = '\0';
        core->stats.resumes_failed += request_emitted(request) > 0 ? 1 : 0;
        request_fail(core, request, CAUSE_RETRIES, STATUS_UNAVAILABLE, request->detail, 1000, out);
        return;
    }
    request->failures++;
    core->retry_tenths -= 10;
    core->stats.retries[cause]++;
    request_replace(core, request, out);
}

static void request_ask(struct router_core *core, struct request *request, enum cause cause,
                        struct effects *out) {
    leg_abort(core, request, request->decode, cause, true, out);
    request_move(core, request, REQUEST_ASKING,
                 instant_add(core->node.now, core->node.config.timers.admit));
}

static void request_admit(struct router_core *core, struct request *request,
                          const struct fleet_choice *chosen, uint32_t local_max,
                          struct effects *out) {
    uint32_t decode = chosen->worker;
    struct worker *worker = &core->workers[decode];
    struct session *session = &core->node.sessions[worker->session];
    request_unpark(core, request);
    if (request->first_placed.ns == 0) {
        request->first_placed = core->node.now;
        if (!request_is_canary(request) && request->choice == 0) {
            histogram_add(&core->stats.queue, instant_since(core->node.now, request->since));
        }
    }
    core->stats.resumes_other_numerics += fleet_has_numerics(worker, request) ? 0 : 1;
    request->decode = decode;
    request->decode_stream = session->stream;
    request->attempt_tokens = request->token_count;
    worker->attempts++;
    worker->last_given[fleet_turn_kind(request)] = ++core->given;
    worker->admitting++;
    request->is_admit_open = true;
    worker->tokens_reserved += request_weight(request);
    request->due_decode = 0;
    leg_expect(core, request, request->token_count - chosen->cached);
    list_push_back(&session->entries, DECODE_LINKS(core), request_index(core, request));
    text_copy(request->decode_label, LABEL_MAX, worker->info.id);
    request->prefill_label[0] = '\0';
    request->kv_exposed_us = 0;
    struct message *admit = node_send(&core->node, session, MESSAGE_ADMIT, out);
    admit->u.admit.attempt = request->attempt;
    admit->u.admit.tokens = request_tokens(core, request);
    admit->u.admit.token_count = request->token_count;
    admit->u.admit.output_first = request->prompt_count;
    admit->u.admit.max_new = request->max_tokens - request_emitted(request);
    struct span left = instant_since(request->deadline, core->node.now);
    left.ns -= core->node.config.timers.hop.ns;
    admit->u.admit.deadline_ms = left.ns > 0 ? (uint32_t)span_to_ms(left) : 0;
    admit->u.admit.sampling = request->sampling;
    admit->u.admit.local_max = local_max;
    admit->u.admit.salt = request->salt;
    text_copy(admit->u.admit.label, LABEL_MAX, request->label);
    core->stats.admits += request_is_canary(request) ? 0 : 1;
    request_move(core, request, REQUEST_ADMITTING,
                 instant_add(core->node.now, core->node.config.timers.admit));
}

/* Tries to place one request; false if it must wait for room. */
static bool request_place(struct router_core *core, struct request *request, struct effects *out) {
    struct fleet_choice decode = {.worker = ROUTER_NONE};
    enum fleet_answer answer = fleet_choose_decode(core, request, &decode);
    if (answer != FLEET_CHOSEN) {
        if (answer == FLEET_BUSY) {
            request->state_deadline = INSTANT_NEVER; /* there are workers: wait for room */
        } else if (instant_is_never(request->state_deadline)) {
            request->state_deadline = instant_add(core->node.now, core->node.config.timers.place);
        }
        return false;
    }
    const struct worker *worker = &core->workers[decode.worker];
    if (request->prefer != 0 && request->prefer == worker->info.incarnation.v) {
        /* It has every whole page of the prompt; the rest is not worth another worker's turn. */
        uint32_t above = core->config.disaggregate_above;
        uint32_t page = worker->info.page_tokens;
        request_admit(core, request, &decode, above > page ? above : page, out);
        return true;
    }
    struct fleet_choice prefill = {.worker = ROUTER_NONE};
    uint32_t local_max = request->canary == CANARY_ONE_LEG    ? UINT32_MAX
                         : request->canary == CANARY_TWO_LEGS ? 0
                                                              : core->config.disaggregate_above;
    if (request->token_count - 1 > local_max) {
        enum fleet_answer second = fleet_choose_prefill(core, request, decode.worker, &prefill);
        if (second == FLEET_BUSY) {
            return false; /* reserve nothing at D that nobody could fill now */
        }
        if (second == FLEET_NONE) {
            local_max = UINT32_MAX; /* no prefill worker at all: D serves alone */
        }
    }
    request_admit(core, request, &decode, local_max, out);
    return true;
}

/* Places the requests of one model until one must wait. False when the turn holds no more. */
static bool router_place_lane(struct router_core *core, const struct router_lane *lane,
                              struct effects *out) {
    while (lane->requests.head != LIST_NONE) {
        struct request *request = &core->requests[lane->requests.head];
        if (effects_room(out) < EFFECTS_LEFT) {
            return false;
        }
        if (request_place(core, request, out)) {
            continue;
        }
        if (!request_is_canary(request)) {
            return true;
        }
        request_give_up(core, request, out);
    }
    return true;
}

/* Places parked requests, first come first served within a model. What it costs does not depend on
 * how many wait: of each model only the first that must wait is looked at. */
static void router_place(struct router_core *core, struct effects *out) {
    if (!core->is_placing_due) {
        return;
    }
    core->is_placing_due = false;
    uint32_t left = core->parked.lanes.count;
    while (left-- > 0) {
        uint32_t at = core->parked.lanes.head;
        if (!router_place_lane(core, &core->lanes[at], out)) {
            core->is_placing_due = true; /* the rest in the next turn */
            return;
        }
        if (core->lanes[at].requests.count > 0) {
            list_remove(&core->parked.lanes, LANE_LINKS(core), at);
            list_push_back(&core->parked.lanes, LANE_LINKS(core), at);
        }
    }
}

/* Sends Prefill to a prefill worker for the slot that D has reserved. */
static void request_prefill(struct router_core *core, struct request *request,
                            struct effects *out) {
    struct fleet_choice chosen = {.worker = ROUTER_NONE};
    const struct worker *decode = &core->workers[request->decode];
    if (fleet_choose_prefill(core, request, request->decode, &chosen) != FLEET_CHOSEN) {
        request_replace(core, request, out); /* frees D's pages; waits for a prefill worker */
        return;
    }
    struct worker *worker = &core->workers[chosen.worker];
    struct session *session = &core->node.sessions[worker->session];
    request->prefill = chosen.worker;
    core->stats.pairs_other_numerics += fleet_pair_has_numerics(worker, decode) ? 0 : 1;
    request->prefill_stream = session->stream;
    request->is_prefill_queued = false;
    worker->attempts++;
    worker->last_given[fleet_turn_kind(request)] = ++core->given;
    worker->tokens_reserved += request->attempt_tokens;
    request->due_prefill = request->attempt_tokens - chosen.cached;
    worker->tokens_due += request->due_prefill;
    list_push_back(&session->entries, PREFILL_LINKS(core), request_index(core, request));
    text_copy(request->prefill_label, LABEL_MAX, worker->info.id);
    struct message *message = node_send(&core->node, session, MESSAGE_PREFILL, out);
    message->u.prefill.attempt = request->attempt;
    message->u.prefill.tokens = request_tokens(core, request);
    message->u.prefill.token_count = request->attempt_tokens;
    message->u.prefill.from = request->cached;
    message->u.prefill.slot = request->slot;
    message->u.prefill.key = request->key;
    message->u.prefill.decode = decode->info.incarnation;
    message->u.prefill.salt = request->salt;
    text_copy(message->u.prefill.address, ADDRESS_MAX, decode->info.address);
    text_copy(message->u.prefill.label, LABEL_MAX, request->label);
    struct span left = instant_since(request->deadline, core->node.now);
    left.ns -= core->node.config.timers.hop.ns;
    message->u.prefill.deadline_ms = left.ns > 0 ? (uint32_t)span_to_ms(left) : 0;
    if (request->state != REQUEST_PREFILLING) {
        request_move(core, request, REQUEST_PREFILLING, INSTANT_NEVER);
    }
}

/* --- mail from D
 * --------------------------------------------------------------------------------------- */

/* So much of the first admitted attempt's prompt needed no computing: D says what it had when it
 * admits, P how far its own cache went when it is done. */
static void request_found(struct router_core *core, struct request *request, uint32_t cached) {
    if (request->attempt.v != request->cached_attempt.v || cached <= request->cached_first ||
        cached >= request->prompt_count) {
        return;
    }
    bool is_counted = request->choice == 0 && !request_is_canary(request); /* a prompt once */
    core->stats.cached_tokens += is_counted ? cached - request->cached_first : 0;
    request->cached_first = cached;
}

static void router_admitted(struct router_core *core, struct session *session,
                            const struct message *message, struct effects *out) {
    struct request *request = request_by_attempt(core, message->u.admitted.attempt);
    if (request == NULL || !request_has_decode(request, session)) {
        core->node.stats.stale_events++; /* superseded: its Abort is on the way */
        return;
    }
    uint32_t cached = message->u.admitted.cached;
    if (request->state != REQUEST_ADMITTING || message->u.admitted.slot.v == 0 ||
        cached >= request->attempt_tokens) {
        node_end(&core->node, session, CAUSE_SESSION_ERROR, out);
        return;
    }
    struct worker *worker = &core->workers[request->decode];
    leg_answered(core, request);
    worker->admit_window = worker->admit_window < ROUTER_ADMIT_WINDOW / 2 ? worker->admit_window * 2
                                                                          : ROUTER_ADMIT_WINDOW;
    core->is_placing_due = core->parked.count > 0 || core->is_placing_due;
    request->slot = message->u.admitted.slot;
    request->key = message->u.admitted.key;
    request->cached = cached;
    if (request->cached_attempt.v == 0) {
        request->cached_attempt = request->attempt;
        request_found(core, request, cached);
    }
    leg_expect(core, request, message->u.admitted.is_local ? request->attempt_tokens - cached : 1);
    if (message->u.admitted.is_local) {
        core->stats.one_leg += request_is_canary(request) ? 0 : 1;
        request_move(core, request, REQUEST_STREAMING, INSTANT_NEVER);
    } else {
        core->stats.two_legs += request_is_canary(request) ? 0 : 1;
        request_prefill(core, request, out);
    }
}

static void router_rejected(struct router_core *core, struct session *session,
                            const struct message *message, struct effects *out) {
    struct request *request = request_by_attempt(core, message->u.rejected.attempt);
    if (request == NULL || !request_has_decode(request, session)) {
        core->node.stats.stale_events++;
        return;
    }
    if (request->state != REQUEST_ADMITTING) {
        node_end(&core->node, session, CAUSE_SESSION_ERROR, out);
        return;
    }
    struct worker *worker = &core->workers[request->decode];
    enum cause cause = message->u.rejected.cause;
    leg_end_decode(core, request); /* D holds nothing: no Abort */
    if (cause == CAUSE_TOO_LARGE || cause == CAUSE_INVALID) {
        request_fail(core, request, cause, STATUS_INVALID,
                     cause == CAUSE_TOO_LARGE
                         ? "prompt and max_tokens together exceed the decode worker's context or "
                           "KV capacity: shorten one of them"
                         : "the decode worker refused the token ids or lengths as invalid",
                     0, out);
        return;
    }
    core->stats.rejected_busy += request_is_canary(request) ? 0 : 1;
    struct span wait = span_ms(message->u.rejected.retry_after_ms);
    if (wait.ns < core->node.config.timers.busy.ns) {
        wait = core->node.config.timers.busy;
    }
    if (cause == CAUSE_DRAINING) {
        worker->info.is_draining = true;
    }
    worker->busy_until = instant_add(core->node.now, wait);
    worker->admit_window = 1;            /* one probe at a time until it admits again */
    request_replace(core, request, out); /* not a failure: no worker has tried it */
}

/* What clients' dashboards show of one more token. */
static void request_count_token(struct router_core *core, const struct request *request) {
    if (request_is_canary(request)) {
        return;
    }
    core->stats.tokens++;
    if (request->first_token.ns == 0 && request->choice == 0) {
        histogram_add(&core->stats.ttft, instant_since(core->node.now, request->since));
    } else if (request->first_token.ns != 0) {
        histogram_add(&core->stats.itl, instant_since(core->node.now, request->last_token));
    }
}

/* One token of a message, with what came beside it. */
struct router_token {
    uint32_t token;
    float logprob;
    uint32_t top_count; /* as in the message: 0 = no logprobs, else 1 + alternatives */
    const uint32_t *top_tokens;
    const float *top_logprobs;
};

static void deliver_logprobs(struct effect *effect, const struct router_token *token) {
    uint32_t count = token->top_count - 1;
    CHECK_OP(count, <=, LOGPROBS_TOP_MAX);
    effect->u.deliver.has_logprobs = true;
    effect->u.deliver.logprob = token->logprob;
    effect->u.deliver.top_count = count;
    if (count > 0) {
        memcpy(effect->u.deliver.top_tokens, token->top_tokens, count * sizeof(uint32_t));
        memcpy(effect->u.deliver.top_logprobs, token->top_logprobs, count * sizeof(float));
    }
}

static void request_token(struct router_core *core, struct request *request,
                          const struct router_token *token, struct effects *out) {
    uint32_t wanted = request->sampling.logprobs;
    if (wanted > 0 && (token->top_count == 0 || token->top_count > wanted)) {
        request_retry(core, request, CAUSE_MISMATCH, out); /* a worker that knows no logprobs */
        return;
    }
    if (request->state != REQUEST_STREAMING) {
        request_move(core, request, REQUEST_STREAMING, INSTANT_NEVER);
    }
    request_count_token(core, request);
    if (request->first_token.ns == 0) {
        request->first_token = core->node.now;
        if (request->choice == 0) {
            choices_place(core, request);
        }
    }
    if (request->token_count == request->attempt_tokens) {
        leg_expect(core, request, 0); /* D has the prompt behind it */
    }
    if (request->failures > 0 && request->token_count == request->attempt_tokens &&
        request_emitted(request) > 0) {
        core->stats.resumes_ok++;
    }
    request->last_token = core->node.now;
    if (request->numerics[0] == '\0') {
        text_copy(request->numerics, MESSAGE_NUMERICS_MAX,
                  core->workers[request->decode].info.numerics);
    }
    uint32_t *tokens = request_tokens(core, request);
    tokens[request->token_count++] = token->token;
    node_progressed(&core->node);
    struct effect *effect = effects_add(out, EFFECT_DELIVER);
    effect->u.deliver.request = request_leader(core, request)->id;
    effect->u.deliver.call = request->call;
    effect->u.deliver.index = request->choice;
    effect->u.deliver.tokens = &tokens[request->token_count - 1];
    effect->u.deliver.token_count = 1;
    if (wanted > 0) {
        deliver_logprobs(effect, token);
    }
}

static void router_tokens(struct router_core *core, struct session *session,
                          const struct message *message, struct effects *out) {
    uint32_t top = 0;
    for (uint32_t i = 0; i < message->u.tokens.count; i++) {
        struct attempt_id attempt = {message->u.tokens.attempts[i]};
        struct router_token token = {.token = message->u.tokens.tokens[i]};
        if (message->u.tokens.top_counts != NULL) {
            token.logprob = message->u.tokens.logprobs[i];
            token.top_count = message->u.tokens.top_counts[i];
            if (token.top_count > 1) { /* else there may be no arrays at all */
                token.top_tokens = message->u.tokens.top_tokens + top;
                token.top_logprobs = message->u.tokens.top_logprobs + top;
                top += token.top_count - 1;
            }
        }
        struct request *request = request_by_attempt(core, attempt);
        if (request == NULL || !request_has_decode(request, session)) {
            core->node.stats.stale_events++; /* I15: a superseded attempt's output */
            continue;
        }
        bool is_allowed = request->state == REQUEST_PREFILLING ||
                          request->state == REQUEST_ASKING || request->state == REQUEST_STREAMING;
        if (!is_allowed || request_emitted(request) >= request->max_tokens ||
            effects_room(out) < 64) {
            node_end(&core->node, session, CAUSE_SESSION_ERROR, out);
            return;
        }
        request_token(core, request, &token, out);
    }
}

/* Why a hand-off fails when its two workers cannot talk. */
static bool cause_is_of_pair(enum cause cause) {
    return cause == CAUSE_SESSION_ENDED || cause == CAUSE_SESSION_SILENT ||
           cause == CAUSE_SEND_FAILED || cause == CAUSE_STALL || cause == CAUSE_T_OPEN ||
           cause == CAUSE_BAD_CHUNK;
}

static void request_suspect(struct router_core *core, const struct request *request) {
    if (request->prefill != ROUTER_NONE && request->decode != ROUTER_NONE) {
        fleet_suspect(core, request->prefill, request->decode);
    }
}

static void router_end(struct router_core *core, struct session *session,
                       const struct message *message, struct effects *out) {
    struct request *request = request_by_attempt(core, message->u.end.attempt);
    if (request == NULL || !request_has_decode(request, session)) {
        core->node.stats.stale_events++;
        return;
    }
    if (cause_is_of_pair(message->u.end.cause)) {
        request_suspect(core, request); /* D may be the first to say so */
    }
    leg_end_decode(core, request); /* D has let go: no Abort */
    /* An answer that is complete has a reason to end; whatever else a worker calls that is a
     * failure of its own. */
    enum finish finish = message->u.end.finish;
    bool is_ok =
        message->u.end.outcome == OUTCOME_OK && (finish == FINISH_STOP || finish == FINISH_LENGTH);
    if (is_ok) {
        /* A short answer is over before P has heard of the Commit and told us. */
        request->kv_bytes = message->u.end.kv_bytes;
        request_found(core, request, message->u.end.usage.cached_tokens);
    }
    if (is_ok && request->state != REQUEST_ADMITTING) {
        request_done(core, request, CAUSE_DONE, finish, request_emitted(request), out);
    } else if (message->u.end.cause == CAUSE_DEADLINE) {
        request_late(core, request, out);
    } else if (message->u.end.cause == CAUSE_SHUTDOWN) {
        /* An orderly leave is nobody's failure: it costs neither attempts nor budget. */
        enum finish complete = request_complete(core, request);
        if (complete != FINISH_NONE) {
            request_done(core, request, CAUSE_DONE, complete, request_emitted(request), out);
        } else {
            core->stats.retries[CAUSE_SHUTDOWN] += request_is_canary(request) ? 0 : 1;
            request_replace(core, request, out);
        }
    } else {
        request_retry(core, request, message->u.end.cause, out);
    }
}

static void router_committed(struct router_core *core, struct session *session,
                             const struct message *message) {
    struct request *request = request_by_attempt(core, message->u.committed.attempt);
    if (request != NULL && request_has_decode(request, session) &&
        request->state == REQUEST_ASKING) {
        request_move(core, request, REQUEST_STREAMING, INSTANT_NEVER);
    }
}

/* --- mail from P
 * ---------------------------------------------------------------------------------------- */

/* The prefill leg is over without success: D alone knows whether that matters. */
static void request_prefill_lost(struct router_core *core, struct request *request,
                                 enum cause cause, struct effects *out) {
    if (cause_is_of_pair(cause)) {
        request_suspect(core, request);
    }
    leg_end_prefill(core, request);
    if (request->state == REQUEST_PREFILLING) {
        request_ask(core, request, cause, out);
    }
}

static void router_prefill_mail(struct router_core *core, struct session *session,
                                const struct message *message, struct effects *out) {
    struct attempt_id attempt = message->kind == MESSAGE_QUEUED ? message->u.queued.attempt
                                : message->kind == MESSAGE_BUSY ? message->u.rejected.attempt
                                                                : message->u.prefill_end.attempt;
    struct request *request = request_by_attempt(core, attempt);
    if (request == NULL || !request_has_prefill(request, session)) {
        core->node.stats.stale_events++;
        return;
    }
    if (message->kind == MESSAGE_QUEUED) {
        request->is_prefill_queued = true;
    } else if (message->kind == MESSAGE_BUSY) {
        core->stats.prefill_busy += request_is_canary(request) ? 0 : 1;
        struct worker *worker = &core->workers[request->prefill];
        struct span wait = span_ms(message->u.rejected.retry_after_ms);
        wait = wait.ns < core->node.config.timers.busy.ns ? core->node.config.timers.busy : wait;
        if (message->u.rejected.cause == CAUSE_DRAINING) {
            worker->info.is_draining = true;
        } else if (message->u.rejected.cause != CAUSE_BUSY) {
            wait = core->node.config.timers.suspect; /* it will not take this one: others first */
        }
        worker->busy_until = instant_add(core->node.now, wait);
        leg_end_prefill(core, request);
        if (request->state == REQUEST_PREFILLING) {
            request_prefill(core, request, out); /* the same slot: it was never opened */
        }
    } else if (message->u.prefill_end.outcome == OUTCOME_OK) {
        request->kv_bytes = message->u.prefill_end.bytes;
        request->kv_exposed_us = message->u.prefill_end.exposed_us;
        request_found(core, request, message->u.prefill_end.cached);
        leg_end_prefill(core, request);
    } else {
        request_prefill_lost(core, request, message->u.prefill_end.cause, out);
    }
}

/* --- audits
 * ------------------------------------------------------------------------------------------------
 */

/* The request whose leg on this session is this attempt, or NULL. */
static struct request *router_held(struct router_core *core, const struct session *session,
                                   uint64_t id) {
    struct request *request = request_by_attempt(core, (struct attempt_id){id});
    if (request == NULL) {
        return NULL;
    }
    bool is_held = session->role == ROLE_DECODE ? request_has_decode(request, session)
                                                : request_has_prefill(request, session);
    return is_held ? request : NULL;
}

static void router_audited(struct router_core *core, struct session *session,
                           const struct message *audit, struct effects *out) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < audit->u.audit.count && count < MESSAGE_IDS_MAX; i++) {
        if (router_held(core, session, audit->u.audit.ids[i]) == NULL) {
            core->out_ids[count++] = audit->u.audit.ids[i];
        }
    }
    if (count > 0) {
        struct message *unknown = node_send(&core->node, session, MESSAGE_UNKNOWN, out);
        unknown->u.audit.count = count;
        unknown->u.audit.ids = core->out_ids;
        core->out_ids_used = count;
    }
}

static void router_unknown(struct router_core *core, struct session *session,
                           const struct message *unknown, struct effects *out) {
    for (uint32_t i = 0; i < unknown->u.audit.count && effects_room(out) > EFFECTS_LEFT; i++) {
        struct request *request = router_held(core, session, unknown->u.audit.ids[i]);
        if (request == NULL) {
            continue;
        }
        core->node.stats.audit_mismatch++;
        node_note(out, NOTE_AUDIT_MISMATCH, session->role, CAUSE_AUDIT, request->id,
                  request->attempt.v, request->label);
        if (session->role == ROLE_PREFILL) {
            request_prefill_lost(core, request, CAUSE_AUDIT, out);
        } else {
            leg_end_decode(core, request);
            request_retry(core, request, CAUSE_AUDIT, out);
        }
    }
}

static void router_send_audits(struct router_core *core, struct effects *out) {
    for (uint32_t i = 0; i < core->node.config.sessions_max && effects_room(out) > 64; i++) {
        struct session *session = &core->node.sessions[i];
        if (!node_audit_is_due(&core->node, session, core->out_ids_used)) {
            continue;
        }
        bool is_decode = session->role == ROLE_DECODE;
        uint64_t *ids = core->out_ids + core->out_ids_used;
        uint32_t count = 0;
        uint32_t at = session->entries.head;
        while (at != LIST_NONE && core->out_ids_used + count < MESSAGE_IDS_MAX) {
            const struct request *request = &core->requests[at];
            /* Only what the peer has mentioned on this session: Admitted, or Queued. */
            bool is_mentioned =
                is_decode ? request->state != REQUEST_ADMITTING : request->is_prefill_queued;
            if (is_mentioned) {
                ids[count++] = request->attempt.v;
            }
            at = is_decode ? request->decode_link.next : request->prefill_link.next;
        }
        core->out_ids_used += count;
        if (count > 0) {
            struct message *audit = node_send(&core->node, session, MESSAGE_AUDIT, out);
            audit->u.audit.count = count;
            audit->u.audit.ids = ids;
        }
    }
}

/* --- clients
 * -------------------------------------------------------------------------------------------------
 */

/* Starts tokenizing if some worker's model is known; false: wait for discovery. */
static bool request_tokenize(struct router_core *core, struct request *request,
                             struct effects *out) {
    if (fleet_is_empty(core)) {
        return false;
    }
    if (!fleet_model(core, request->model).is_known) {
        struct writer writer;
        writer_init(&writer, request->detail, ROUTER_DETAIL_MAX - 1);
        writer_printf(&writer, "%s \"%.*s\"%s; served here: ",
                      request->model[0] == '\0' ? "model is empty" : "unknown model", 63,
                      request->model, request->model[0] == '\0' ? ": name one" : "");
        struct writer names;
        writer_init(&names, request->detail + writer.len, ROUTER_DETAIL_MAX - 1 - writer.len);
        fleet_model_names(core, &names);
        request->detail[writer.len + names.len] = '\0';
        bool is_empty = request->model[0] == '\0';
        request_fail(core, request, CAUSE_NO_MODEL, is_empty ? STATUS_INVALID : STATUS_NOT_FOUND,
                     request->detail, 0, out);
        return true;
    }
    request->is_tokenizing = true;
    request->state_deadline = INSTANT_NEVER;
    struct effect *effect = effects_add(out, EFFECT_TOKENIZE);
    effect->u.tokenize.request = request->id;
    effect->u.tokenize.call = request->call;
    return true;
}

/* No entry was or will be made: the answer is an effect of its own, with request 0. */
static void router_refuse(struct call_id call, enum cause cause, enum status status,
                          const char *detail, struct effects *out) {
    struct effect *effect = effects_add(out, EFFECT_ANSWER);
    effect->u.answer.call = call;
    effect->u.answer.outcome = OUTCOME_FAILED;
    effect->u.answer.cause = cause;
    effect->u.answer.status = status;
    effect->u.answer.finish = FINISH_ERROR;
    effect->u.answer.retry_after_ms = 1000;
    effect->u.answer.detail = detail;
    effect->u.answer.decode_label = "";
    effect->u.answer.prefill_label = "";
}

/* 0 for no label. */
static uint64_t router_label_hash(const struct router_core *core, const char *label) {
    return label[0] == '\0' ? 0 : fleet_model_hash(core, label) | 1;
}

static void router_client_open(struct router_core *core, const struct event *event,
                               struct effects *out) {
    uint64_t id = 0;
    if (core->node.is_draining) {
        router_refuse(event->u.client_open.call, CAUSE_DRAINING, STATUS_UNAVAILABLE,
                      "this router is draining: use another one", out);
        return;
    }
    /* The last eighth of the table is for clients. */
    bool is_canary = event->u.client_open.canary != CANARY_NONE;
    uint32_t most = core->config.requests_max - core->config.requests_max / 8;
    if ((is_canary && core->ids.live >= most) || pool_take(&core->ids, &id) != STATUS_OK) {
        router_refuse(event->u.client_open.call, CAUSE_BUSY, STATUS_BUSY,
                      "the router holds as many requests as it may (--max-requests): try again "
                      "later",
                      out);
        return;
    }
    struct request *request = &core->requests[pool_index(id)];
    *request = (struct request){.id = id,
                                .state = REQUEST_TOKENIZING,
                                .call = event->u.client_open.call,
                                .attempt_number = 1,
                                .decode = ROUTER_NONE,
                                .prefill = ROUTER_NONE,
                                .words = WORDS_NONE,
                                .leader = pool_index(id),
                                .choices = 1,
                                .undone = 1,
                                .since = core->node.now,
                                .state_since = core->node.now};
    request->attempt = request_attempt(request);
    request->canary = event->u.client_open.canary;
    text_copy(request->model, LABEL_MAX, event->u.client_open.model);
    text_copy(request->label, LABEL_MAX, event->u.client_open.request_label);
    text_copy(request->session_label, LABEL_MAX, event->u.client_open.session_label);
    uint64_t *hashes = &core->label_hashes[2 * (uint64_t)request_index(core, request)];
    hashes[0] = router_label_hash(core, request->label);
    hashes[1] = router_label_hash(core, request->session_label);
    request->model_hash = fleet_model_hash(core, request->model);
    request->salt = salt_of(event->u.client_open.cache_salt);
    struct span left = event->u.client_open.deadline;
    if (left.ns <= 0 || left.ns > core->node.config.timers.request.ns) {
        left = core->node.config.timers.request;
    }
    request->deadline = instant_add(core->node.now, left);
    request->state_deadline = instant_add(core->node.now, core->node.config.timers.place);
    ledger_create(&core->node, REQUEST_TOKENIZING);
    map_add(&core->by_call, request->call.v, pool_index(id));
    bool is_paying = core->retry_tenths < RETRY_TENTHS_MAX && !request_is_canary(request);
    core->retry_tenths += is_paying ? 1 : 0;
    (void)request_tokenize(core, request, out); /* false: waits for a worker to be discovered */
}

/* Tokens of prompt and answer that the largest decode worker of a model holds; 0: none is known. */
static uint32_t model_limit(const struct fleet_model *model) {
    return model->context < model->kv_tokens ? model->context : model->kv_tokens;
}

/* A sentence in request->detail when the tokenized request cannot be served as asked, else NULL. */
static const char *request_invalid(struct router_core *core, struct request *request,
                                   const struct event *event) {
    struct fleet_model model = fleet_model(core, request->model);
    uint64_t total = (uint64_t)event->u.tokenized.token_count + event->u.tokenized.max_tokens;
    struct writer writer;
    writer_init(&writer, request->detail, ROUTER_DETAIL_MAX - 1);
    if (event->u.tokenized.token_count == 0) {
        return "the prompt is empty: give at least one token";
    }
    if (event->u.tokenized.choices > ROUTER_CHOICES_MAX) {
        writer_printf(&writer, "n is %u: at most %u answers to one prompt can be asked for",
                      event->u.tokenized.choices, ROUTER_CHOICES_MAX);
        request->detail[writer.len] = '\0';
        return request->detail;
    }
    for (uint32_t i = 0; i < event->u.tokenized.token_count; i++) {
        if (event->u.tokenized.tokens[i] >= model.vocab && model.is_known) {
            writer_printf(&writer,
                          "token id %u at position %u is outside the vocabulary: ids "
                          "are below %u",
                          event->u.tokenized.tokens[i], i, model.vocab);
            request->detail[writer.len] = '\0';
            return request->detail;
        }
    }
    uint32_t limit = model_limit(&model);
    /* A worker with less than a context of KV calls that its context. */
    const char *of = limit < model.kv_tokens ? "the model's context"
                                             : "the KV capacity of the largest decode worker";
    if (model.context > 0 && event->u.tokenized.token_count >= limit) {
        writer_printf(&writer,
                      "the prompt (%u tokens) leaves no room for an answer in %s of %u tokens: "
                      "shorten it",
                      event->u.tokenized.token_count, of, limit);
        request->detail[writer.len] = '\0';
        return request->detail;
    }
    if (model.context > 0 && total > limit) {
        writer_printf(&writer,
                      "prompt (%u tokens) and max_tokens (%u) together exceed %s of %u "
                      "tokens: shorten one of them",
                      event->u.tokenized.token_count, event->u.tokenized.max_tokens, of, limit);
        request->detail[writer.len] = '\0';
        return request->detail;
    }
    uint32_t choices = event->u.tokenized.choices;
    uint64_t together =
        event->u.tokenized.token_count + (uint64_t)choices * event->u.tokenized.max_tokens;
    if (choices > 1 && model.kv_tokens > 0 && together > model.kv_tokens) {
        writer_printf(&writer,
                      "prompt (%u tokens) and n (%u) x max_tokens (%u) are %llu tokens: more than "
                      "the %u that the largest decode worker holds; ask for fewer or shorter ones",
                      event->u.tokenized.token_count, choices, event->u.tokenized.max_tokens,
                      (unsigned long long)together, model.kv_tokens);
        request->detail[writer.len] = '\0';
        return request->detail;
    }
    return NULL;
}

/* Words of one request: its tokens, and beside them what is held of its logprobs while the client
 * does not read: the log, the count, and two words for each alternative. */
static uint64_t request_words(const struct event *event, uint32_t max_tokens) {
    uint32_t logprobs = event->u.tokenized.sampling->logprobs;
    uint64_t beside = logprobs == 0 ? 0 : 2 * (uint64_t)logprobs;
    return event->u.tokenized.token_count + max_tokens * (1 + beside);
}

/* What choice 0 of a call is told by the tokenizer. */
static void request_take(struct router_core *core, struct request *request,
                         const struct event *event, uint32_t max_tokens) {
    uint32_t count = event->u.tokenized.token_count;
    core->words_held++;
    memcpy(request_tokens(core, request), event->u.tokenized.tokens, count * sizeof(uint32_t));
    request->prompt_count = count;
    request->token_count = count;
    request->max_tokens = max_tokens;
    request->sampling = *event->u.tokenized.sampling;
    request->eos_count =
        event->u.tokenized.eos_count < EOS_MAX ? event->u.tokenized.eos_count : EOS_MAX;
    memcpy(request->eos, event->u.tokenized.eos, request->eos_count * sizeof(uint32_t));
}

/* Another choice of the call: all of choice 0 but its place in the tables and its seed. */
static void choice_create(struct router_core *core, struct request *leader, uint32_t choice,
                          uint32_t words) {
    uint64_t id = 0;
    CHECK(pool_take(&core->ids, &id) == STATUS_OK);
    struct request *request = &core->requests[pool_index(id)];
    *request = *leader;
    request->id = id;
    request->state = REQUEST_WAITING;
    request->state_since = core->node.now;
    request->state_deadline = INSTANT_NEVER; /* that of the call bounds it */
    request->attempt = request_attempt(request);
    request->choice = choice;
    request->words = words;
    request->sampling.seed = sampling_choice_seed(leader->sampling.seed, choice);
    core->words_held++;
    memcpy(request_tokens(core, request), request_tokens(core, leader),
           leader->token_count * sizeof(uint32_t));
    memset(&core->label_hashes[2 * (uint64_t)pool_index(id)], 0, 2 * sizeof(uint64_t));
    ledger_create(&core->node, REQUEST_WAITING);
    leader->others[choice] = pool_index(id);
    leader->undone++;
}

/* Makes the call's choices, or none of them: then a sentence why. */
static const char *router_choices_take(struct router_core *core, const struct event *event,
                                       struct request *request, uint32_t max_tokens) {
    uint32_t choices = event->u.tokenized.choices > 1 ? event->u.tokenized.choices : 1;
    uint32_t words[ROUTER_CHOICES_MAX];
    uint64_t each = request_words(event, max_tokens);
    uint32_t taken = 0;
    if (core->config.requests_max - core->ids.live < choices - 1) {
        return "the router holds as many requests as it may (--max-requests), and each of the n "
               "answers is one: try again later, or ask for fewer";
    }
    while (taken < choices && each <= UINT32_MAX &&
           words_take(&core->words, (uint32_t)each, &words[taken]) == STATUS_OK) {
        taken++;
    }
    if (taken < choices) {
        while (taken > 0) {
            words_free(&core->words, words[--taken]);
        }
        return "the router's token store is full: try again later";
    }
    request->words = words[0];
    request_take(core, request, event, max_tokens);
    for (uint32_t choice = 1; choice < choices; choice++) {
        choice_create(core, request, choice, words[choice]);
    }
    request->choices = choices;
    return NULL;
}

static void router_tokenized(struct router_core *core, const struct event *event,
                             struct effects *out) {
    struct request *request = request_by_id(core, event->u.tokenized.request);
    if (request == NULL || !request->is_tokenizing) {
        core->node.stats.stale_events++;
        return;
    }
    request->is_tokenizing = false;
    if (request->state == REQUEST_ANSWERING) {
        request_settle(core, request);
        return;
    }
    if (event->u.tokenized.status != STATUS_OK) {
        enum status status = event->u.tokenized.status;
        bool is_ours = status == STATUS_UNAVAILABLE || status == STATUS_TIMEOUT;
        request_fail(core, request, is_ours ? CAUSE_NO_WORKER : CAUSE_INVALID, status,
                     event->u.tokenized.detail, is_ours ? 1000 : 0, out);
        return;
    }
    const char *invalid = request_invalid(core, request, event);
    if (invalid != NULL) {
        request_fail(core, request, CAUSE_INVALID, STATUS_INVALID, invalid, 0, out);
        return;
    }
    uint32_t count = event->u.tokenized.token_count;
    uint32_t max_tokens = event->u.tokenized.max_tokens;
    if (max_tokens == 0) { /* as many as fit */
        struct fleet_model model = fleet_model(core, request->model);
        if (model_limit(&model) == 0) {
            request_fail(core, request, CAUSE_NO_WORKER, STATUS_UNAVAILABLE,
                         "no decode worker serves this model now, so that max_tokens, which is "
                         "unset, cannot be known",
                         1000, out);
            return;
        }
        max_tokens = model_limit(&model) - count;
    }
    const char *full = router_choices_take(core, event, request, max_tokens);
    if (full != NULL) {
        request_fail(core, request, CAUSE_BUSY, STATUS_BUSY, full, 1000, out);
        return;
    }
    core->stats.prompt_tokens += request_is_canary(request) ? 0 : count;
    if (request_is_canary(request) && core->parked.count > 0) {
        request_give_up(core, request, out);
        return;
    }
    request_move(core, request, REQUEST_PLACING,
                 instant_add(core->node.now, core->node.config.timers.place));
    request_park(core, request, false);
}

/* An Abort looks at one word of each live request: thousands of Aborts must not cost thousands of
 * labels each. */
static void router_client_abort(struct router_core *core, const struct event *event,
                                struct effects *out) {
    uint32_t which = event->u.client_abort.is_session ? 1 : 0;
    char given[LABEL_MAX] = {0};
    text_copy(given, LABEL_MAX, event->u.client_abort.label);
    uint64_t hash = router_label_hash(core, given);
    core->stats.aborted_last = 0;
    if (hash == 0) {
        return;
    }
    for (uint32_t i = pool_next(&core->ids, 0); i != UINT32_MAX; i = pool_next(&core->ids, i + 1)) {
        if (core->label_hashes[2 * (uint64_t)i + which] != hash) {
            continue;
        }
        struct request *request = &core->requests[i];
        if (request->state == REQUEST_ANSWERING || request_is_canary(request)) {
            continue; /* labels are clients': a canary is not theirs to abort */
        }
        char stored[LABEL_MAX] = {0};
        text_copy(stored, LABEL_MAX, which == 1 ? request->session_label : request->label);
        if (memcmp(stored, given, LABEL_MAX) != 0) {
            continue;
        }
        core->stats.aborted_last++;
        if (effects_room(out) > EFFECTS_LEFT) {
            request_gone(core, request, CAUSE_CLIENT_ABORT, out);
        } else {
            request->is_abort_wished = true; /* more than one turn holds: the reaper ends it */
        }
    }
}

static void router_stop_found(struct router_core *core, const struct event *event,
                              struct effects *out) {
    struct request *leader = request_by_id(core, event->u.stop_found.request);
    struct request *request =
        leader != NULL ? call_choice(core, leader, event->u.stop_found.index) : NULL;
    if (request == NULL || request->state == REQUEST_ANSWERING) {
        core->node.stats.stale_events++;
        return;
    }
    request_done(core, request, CAUSE_STOP, FINISH_STOP, event->u.stop_found.completion_tokens,
                 out);
}

/* --- time and ends
 * ---------------------------------------------------------------------------------------------- */

static void request_decode_lost(struct router_core *core, struct request *request, enum cause cause,
                                struct effects *out) {
    leg_end_decode(core, request);
    request_retry(core, request, cause, out);
}

static void router_sweep_sessions(struct router_core *core, struct effects *out) {
    if (core->node.sessions_ended == 0) {
        return;
    }
    for (uint32_t i = 0; i < core->node.config.sessions_max; i++) {
        struct session *session = &core->node.sessions[i];
        if (session->phase != SESSION_ENDED) {
            continue;
        }
        while (session->entries.head != LIST_NONE && effects_room(out) > EFFECTS_LEFT) {
            struct request *request = &core->requests[session->entries.head];
            if (session->role == ROLE_DECODE) {
                request_decode_lost(core, request, session->cause, out);
            } else {
                request_prefill_lost(core, request, session->cause, out);
            }
        }
        if (session->entries.count == 0) {
            fleet_session_over(core, session);
            (void)node_release(&core->node, session); /* false: its stream's end is still to come */
        }
    }
}

static void request_reap(struct router_core *core, struct request *request, struct effects *out) {
    struct node *node = &core->node;
    if (request->state == REQUEST_ANSWERING || request->state == REQUEST_NONE) {
        return;
    }
    if (request_is_canary(request) && node->is_draining) {
        request_fail(core, request, CAUSE_SHUTDOWN, STATUS_UNAVAILABLE, "this router is draining",
                     0, out);
        return;
    }
    if (request->is_abort_wished) {
        request_gone(core, request, CAUSE_CLIENT_ABORT, out);
        return;
    }
    if (instant_reached(node->now, request->deadline)) {
        node->ledger.reaped[request->state]++;
        request_late(core, request, out);
        return;
    }
    if (!instant_reached(node->now, request->state_deadline)) {
        return;
    }
    struct fleet_choice unused = {.worker = ROUTER_NONE};
    if (request->state == REQUEST_PLACING &&
        fleet_choose_decode(core, request, &unused) != FLEET_NONE) {
        /* There are workers, only no room: the request's own deadline bounds that wait. */
        request->state_deadline = instant_add(node->now, node->config.timers.place);
        return;
    }
    node->ledger.reaped[request->state]++;
    if (request->state == REQUEST_ADMITTING || request->state == REQUEST_ASKING) {
        core->workers[request->decode].busy_until =
            instant_add(node->now, node->config.timers.admit);
        request_retry(core, request, CAUSE_T_ADMIT, out); /* aborts what may be there */
    } else {
        request_fail(core, request, CAUSE_NO_WORKER, STATUS_UNAVAILABLE,
                     "no decode worker serves this model now: start one, or try again later", 1000,
                     out);
    }
}

static void router_tick(struct router_core *core, struct effects *out) {
    struct node *node = &core->node;
    node->stats.overrun_ns = 0;
    for (uint32_t i = pool_next(&core->ids, 0); i != UINT32_MAX; i = pool_next(&core->ids, i + 1)) {
        struct request *request = &core->requests[i];
        if (effects_room(out) > EFFECTS_LEFT) {
            if (node_is_grace_over(node)) {
                request_fail(core, request, CAUSE_SHUTDOWN, STATUS_UNAVAILABLE,
                             "this router is shutting down: use another one", 1000, out);
            }
            request_reap(core, request, out);
        }
        if (request->state == REQUEST_NONE) {
            continue; /* a choice that ended with its call */
        }
        int64_t over = node->now.ns - request->deadline.ns;
        if (over > node->stats.overrun_ns) {
            node->stats.overrun_ns = over;
        }
    }
    fleet_tick(core, out);
    node_tick(node, out);
    router_send_audits(core, out);
}

/* Requests that came before any worker was known; in turns of bounded size. */
static void router_wake_tokenizing(struct router_core *core, struct effects *out) {
    if (!core->is_waking_due) {
        return;
    }
    core->is_waking_due = false;
    for (uint32_t i = 0;
         i < core->config.requests_max && core->node.ledger.in_state[REQUEST_TOKENIZING] > 0; i++) {
        struct request *request = &core->requests[i];
        if (request->state != REQUEST_TOKENIZING || request->is_tokenizing) {
            continue;
        }
        if (effects_room(out) < EFFECTS_LEFT) {
            core->is_waking_due = true; /* the rest in the next turn */
            return;
        }
        (void)request_tokenize(core, request, out);
    }
}

static void router_mail(struct router_core *core, struct session *session,
                        const struct message *message, struct effects *out) {
    bool is_decode = session->role == ROLE_DECODE;
    struct worker *worker = NULL;
    switch (message->kind) {
    case MESSAGE_HELLO:
        worker = fleet_of_session(core, session);
        if (worker != NULL) {
            worker->reconnect_after = core->node.config.timers.reconnect_first;
            fleet_view_begin(core, worker);
        }
        core->is_placing_due = true;
        return;
    case MESSAGE_BEAT:
        core->is_placing_due = core->parked.count > 0 || core->is_placing_due; /* it speaks */
        return;
    case MESSAGE_AUDIT: router_audited(core, session, message, out); return;
    case MESSAGE_UNKNOWN: router_unknown(core, session, message, out); return;
    case MESSAGE_CACHED:
        worker = fleet_of_session(core, session);
        if (worker != NULL) {
            fleet_cached(core, worker, message);
        }
        return;
    case MESSAGE_ADMITTED:
    case MESSAGE_REJECTED:
    case MESSAGE_TOKENS:
    case MESSAGE_END:
    case MESSAGE_COMMITTED:
        if (!is_decode) {
            break;
        }
        if (message->kind == MESSAGE_ADMITTED) {
            router_admitted(core, session, message, out);
        } else if (message->kind == MESSAGE_REJECTED) {
            router_rejected(core, session, message, out);
        } else if (message->kind == MESSAGE_TOKENS) {
            router_tokens(core, session, message, out);
        } else if (message->kind == MESSAGE_END) {
            router_end(core, session, message, out);
        } else {
            router_committed(core, session, message);
        }
        return;
    case MESSAGE_QUEUED:
    case MESSAGE_BUSY:
    case MESSAGE_PREFILL_END:
        if (is_decode) {
            break;
        }
        router_prefill_mail(core, session, message, out);
        return;
    case MESSAGE_ADMIT:
    case MESSAGE_PREFILL:
    case MESSAGE_OPEN:
    case MESSAGE_ACCEPT:
    case MESSAGE_REFUSE:
    case MESSAGE_FIN:
    case MESSAGE_COMMIT:
    case MESSAGE_ABORT:
    case MESSAGE_ABORT_SLOT: break;
    }
    node_end(&core->node, session, CAUSE_SESSION_ERROR, out);
}

static void router_dispatch(struct router_core *core, const struct event *event,
                            struct effects *out) {
    struct session *session = NULL;
    struct request *request = NULL;
    switch (event->kind) {
    case EVENT_TICK: router_tick(core, out); break;
    case EVENT_DRAIN: node_drain(&core->node, event->u.drain.grace, out); break;
    case EVENT_STREAM_ACCEPTED:
    case EVENT_STREAM_MAIL:
    case EVENT_STREAM_BAD:
    case EVENT_STREAM_ENDED:
        session = node_event(&core->node, event, out);
        if (session != NULL) {
            router_mail(core, session, event->u.mail.message, out);
        }
        break;
    case EVENT_CLIENT_OPEN: router_client_open(core, event, out); break;
    case EVENT_TOKENIZED: router_tokenized(core, event, out); break;
    case EVENT_CLIENT_GONE:
        request = request_by_call(core, event->u.client_gone.call);
        if (request == NULL) {
            core->node.stats.stale_events++;
        } else if (event->u.client_gone.cause == CAUSE_DEADLINE) {
            request_late(core, request, out);
        } else {
            request_gone(core, request, CAUSE_CLIENT_GONE, out);
        }
        break;
    case EVENT_CLIENT_ABORT: router_client_abort(core, event, out); break;
    case EVENT_STOP_FOUND: router_stop_found(core, event, out); break;
    case EVENT_ANSWERED:
        request = request_by_id(core, event->u.answered.request);
        if (request != NULL) {
            CHECK(request->is_answering);
            request->is_answering = false;
            request_settle(core, request);
        }
        break;
    case EVENT_WORKER_SEEN:
        fleet_seen(core, event->u.worker_seen.info, out);
        core->is_waking_due = true;
        break;
    case EVENT_WORKER_LOST: fleet_lost(core, event->u.worker_lost.incarnation, out); break;
    case EVENT_LAYER_DONE:
    case EVENT_STEP_DONE:
    case EVENT_LINK_PROGRESS:
    case EVENT_LINK_COVERED:
    case EVENT_LINK_BAD:
    case EVENT_LINK_DISARMED:
    case EVENT_LINK_SENT:
    case EVENT_LINK_FAILED:
    case EVENT_LINK_CLOSED: core->node.stats.stale_events++; break; /* not this role's */
    }
}

void router_core_step(struct router_core *core, const struct event *event, struct instant now,
                      struct effects *out) {
    out->count = 0;
    core->out_ids_used = 0;
    node_observe(&core->node, now);
    router_dispatch(core, event, out);
    router_sweep_sessions(core, out);
    router_wake_tokenizing(core, out);
    router_place(core, out);
    node_exit_when_idle(&core->node, out);
}

struct instant router_core_deadline(const struct router_core *core) {
    bool is_soon = core->node.sessions_ended > 0 || core->is_placing_due || core->is_waking_due;
    return instant_add(core->node.real, span_ms(is_soon ? 1 : TICK_MS));
}

/* --- for people and tests
 * --------------------------------------------------------------------------------------- */

static const char *request_waits_for(const struct request *request) {
    switch (request->state) {
    case REQUEST_NONE: return "";
    case REQUEST_TOKENIZING:
        return request->is_tokenizing ? "the tokenizer" : "a worker to be discovered";
    case REQUEST_PLACING: return "a worker with room";
    case REQUEST_ADMITTING: return "the decode worker's answer to Admit";
    case REQUEST_PREFILLING:
        return request->prefill == ROUTER_NONE ? "the decode worker's first token"
                                               : "the prefill worker";
    case REQUEST_ASKING: return "the decode worker's word whether it has committed";
    case REQUEST_STREAMING: return "the decode worker's tokens";
    case REQUEST_ANSWERING:
        return request->is_tokenizing ? "the tokenizer to end" : "the client to take its answer";
    case REQUEST_WAITING: return "the first token of its call's choice 0";
    case REQUEST_GATHERING: return "the other choices of its call";
    }
    return "";
}

static const char *request_next_deadline(const struct request *request) {
    if (request->state == REQUEST_ANSWERING) {
        return "the client does not take its answer (--timer-leave)";
    }
    if (request->state_deadline.ns >= request->deadline.ns) {
        return "the request's deadline";
    }
    switch (request->state) {
    case REQUEST_PLACING: return "no worker was found (--timer-place)";
    case REQUEST_ADMITTING:
    case REQUEST_ASKING: return "no answer from the decode worker (--timer-admit)";
    case REQUEST_NONE:
    case REQUEST_TOKENIZING:
    case REQUEST_PREFILLING:
    case REQUEST_STREAMING:
    case REQUEST_ANSWERING:
    case REQUEST_WAITING:
    case REQUEST_GATHERING: break;
    }
    return "the bound of this state";
}

bool router_view(const struct router_core *core, uint32_t *cursor, struct entry_view *view_out) {
    while (*cursor < core->config.requests_max) {
        const struct request *request = &core->requests[(*cursor)++];
        if (request->state == REQUEST_NONE) {
            continue;
        }
        struct instant next = instant_min(request->deadline, request->state_deadline);
        *view_out = (struct entry_view){
            .id = request->id,
            .attempt = request->attempt.v,
            .state = request_state_name(request->state),
            .age_ms = span_to_ms(instant_since(core->node.now, request->since)),
            .state_age_ms = span_to_ms(instant_since(core->node.now, request->state_since)),
            .deadline_left_ms = span_to_ms(instant_since(next, core->node.now)),
            .deadline = request_next_deadline(request),
            .operations = (request->is_tokenizing ? 1u : 0u) + (request->is_answering ? 1u : 0u),
            .tokens = request->token_count,
            .generated = request_emitted(request),
            .bytes = request->kv_bytes,
            .cached = request->cached,
            .waits_for = request_waits_for(request)};
        text_copy(view_out->label, LABEL_MAX, request->label);
        const uint32_t legs[2] = {request->decode, request->prefill};
        for (uint32_t i = 0; i < 2; i++) {
            if (legs[i] != ROUTER_NONE) {
                const struct worker *worker = &core->workers[legs[i]];
                node_view_peer(&core->node, view_out, i, worker->session, worker->info.id);
            }
        }
        return true;
    }
    return false;
}

/* A call and its choices know each other, and who of them has not ended. */
static void request_verify_call(const struct router_core *core, const struct request *request) {
    CHECK_OP(request->leader, <, core->config.requests_max);
    const struct request *leader = &core->requests[request->leader];
    CHECK(leader->choice == 0 && leader->call.v == request->call.v);
    if (request != leader) {
        CHECK(leader->state != REQUEST_NONE && leader->state != REQUEST_ANSWERING);
        CHECK(request->choice > 0 && request->choice < leader->choices);
        CHECK_OP(leader->others[request->choice], ==, request_index(core, request));
        CHECK(request->state != REQUEST_WAITING || leader->first_token.ns == 0);
        return;
    }
    bool is_open = request->state != REQUEST_GATHERING && request->state != REQUEST_ANSWERING;
    uint32_t undone = is_open ? 1 : 0;
    for (uint32_t choice = 1; choice < request->choices; choice++) {
        undone += request->others[choice] != ROUTER_NONE ? 1 : 0;
    }
    CHECK_OP(request->undone, ==, undone);
    CHECK(request->state != REQUEST_GATHERING || undone > 0);
}

void router_verify(const struct router_core *core) {
    uint32_t live = 0;
    uint32_t parked = 0;
    uint32_t attempts = 0;
    uint32_t admitting = 0;
    uint64_t expected = 0;
    for (uint32_t i = 0; i < core->config.requests_max; i++) {
        const struct request *request = &core->requests[i];
        if (request->state == REQUEST_NONE) {
            CHECK(pool_id_at(&core->ids, i) == 0);
            continue;
        }
        bool is_answering = request->state == REQUEST_ANSWERING;
        bool is_placing = request->state == REQUEST_PLACING;
        bool is_early = is_placing || request->state == REQUEST_TOKENIZING ||
                        request->state == REQUEST_WAITING || request->state == REQUEST_GATHERING;
        live++;
        request_verify_call(core, request);
        admitting += request->is_admit_open ? 1 : 0;
        CHECK(request->is_admit_open == (request->state == REQUEST_ADMITTING));
        parked += request->parked_link.is_linked ? 1 : 0;
        expected += request->decode != ROUTER_NONE ? request->due_decode : 0;
        expected += request->prefill != ROUTER_NONE ? request->due_prefill : 0;
        attempts +=
            (request->decode != ROUTER_NONE ? 1 : 0) + (request->prefill != ROUTER_NONE ? 1 : 0);
        CHECK(pool_id_at(&core->ids, i) == request->id);
        CHECK(!instant_is_never(request->deadline));
        CHECK(is_answering == (request->outcome != OUTCOME_NONE));
        CHECK(request->parked_link.is_linked == is_placing);
        CHECK((request->decode != ROUTER_NONE) == request->decode_link.is_linked);
        CHECK((request->prefill != ROUTER_NONE) == request->prefill_link.is_linked);
        CHECK((request->decode == ROUTER_NONE) == (is_early || is_answering));
        CHECK(request->prefill == ROUTER_NONE || request->state == REQUEST_PREFILLING ||
              request->state == REQUEST_STREAMING || request->state == REQUEST_ASKING);
        CHECK(!is_answering || request->is_answering || request->is_tokenizing);
    }
    uint32_t counted = 0;
    uint32_t asked = 0;
    uint64_t due = 0;
    uint64_t blocks = 0;
    for (uint32_t i = 0; i < core->config.workers_max; i++) {
        due += core->workers[i].is_used ? core->workers[i].tokens_due : 0;
        blocks += core->workers[i].is_used ? core->workers[i].blocks : 0;
        counted += core->workers[i].is_used ? core->workers[i].attempts : 0;
        asked += core->workers[i].is_used ? core->workers[i].admitting : 0;
    }
    CHECK_OP(live, ==, core->node.ledger.live);
    uint32_t in_lanes = 0;
    for (uint32_t i = 0; i < core->config.requests_max; i++) {
        in_lanes += core->lanes[i].requests.count;
    }
    CHECK_OP(parked, ==, core->parked.count);
    CHECK_OP(parked, ==, in_lanes);
    CHECK_OP(core->parked.lanes.count + core->lanes_free.count, ==, core->config.requests_max);
    CHECK_OP(attempts, ==, counted);
    CHECK_OP(admitting, ==, asked);
    CHECK_OP(expected, ==, due);
    CHECK_OP(blocks, <=, core->blocks.count);
    CHECK_OP(ledger_imbalance(&core->node.ledger), ==, 0);
    CHECK_OP(core->words.taken, ==, core->words_held);
}
