/* Streams: FIFO queues between two processes that break, stall and are noticed late at each end. */
#include <stdlib.h>
#include <string.h>

#include "sim/state.h"

static struct connection *sim_connection(struct world *world, uint32_t process, uint64_t stream,
                                         uint32_t *side_out) {
    for (uint32_t i = world->connection_count; i-- > 0;) {
        struct connection *c = &world->connections[i];
        for (uint32_t side = 0; side < 2; side++) {
            if (c->process[side] == process && c->stream[side] == stream &&
                c->generation[side] == world->processes[process].generation) {
                *side_out = side;
                return c;
            }
        }
    }
    return NULL;
}

/* Until when nothing passes from one process to another. */
int64_t sim_cut_until(const struct world *world, uint32_t from, uint32_t to) {
    return world->cut_until[from][to];
}

void sim_end_side(struct world *world, struct connection *c, uint32_t side, int64_t at) {
    if (c->is_ended[side] || c->is_deaf[side]) {
        return;
    }
    c->is_ended[side] = true;
    at = at > c->last[side] ? at : c->last[side];
    c->last[side] = at;
    struct sim_event *event = sim_schedule(world, SIM_CORE, at, c->process[side]);
    event->generation = c->generation[side];
    event->event.kind = EVENT_STREAM_ENDED;
    event->event.stream.v = c->stream[side];
    event->event.u.stream_end.cause = CAUSE_SESSION_ENDED;
    event->connection = (int32_t)(c - world->connections);
    event->side = side;
}

void sim_break(struct world *world, struct connection *c) {
    if (c->is_broken) {
        return;
    }
    c->is_broken = true; /* everything in flight is lost */
    for (uint32_t side = 0; side < 2; side++) {
        int64_t lag = sim_time(world, NOBODY, (int64_t)world->knobs.notice_lag_ms * MS / 2);
        sim_end_side(world, c, side, world->now + lag);
    }
}

void sim_stream_open(struct world *world, uint32_t process, const struct effect *effect) {
    uint32_t target = 0;
    CHECK(memcmp(effect->u.open.address, "host:", 5) == 0);
    for (const char *at = effect->u.open.address + 5; *at != '\0'; at++) {
        target = target * 10 + (uint32_t)(*at - '0');
    }
    if (world->connection_count == world->connection_capacity) {
        world->connection_capacity = world->connection_capacity * 2 + 64;
        world->connections =
            realloc(world->connections, world->connection_capacity * sizeof *world->connections);
        CHECK(world->connections != NULL);
    }
    struct connection *c = &world->connections[world->connection_count++];
    *c = (struct connection){
        .process = {process, target},
        .generation = {world->processes[process].generation, world->processes[target].generation},
        .stream = {effect->stream.v, 0}};
    int64_t at = world->now + sim_time(world, process, world->knobs.delay_ns);
    int64_t cut = sim_cut_until(world, process, target);
    at = at > cut ? at : cut;
    if (!world->processes[target].is_alive || sim_strikes(world, FAULT_REFUSED)) {
        c->is_broken = true;
        c->is_ended[1] = true;
        sim_end_side(world, c, 0, at);
        return;
    }
    world->next_odd += 2;
    c->stream[1] = world->next_odd;
    c->last[1] = at;
    struct sim_event *event = sim_schedule(world, SIM_CORE, at, target);
    event->event.kind = EVENT_STREAM_ACCEPTED;
    event->event.stream.v = c->stream[1];
    event->connection = (int32_t)(c - world->connections);
    event->side = 1;
}

/* Deep copy: the core's memory is only borrowed until its next step. */
/* Copies the arrays of logprobs that a message of tokens points to, and points it at the copy. */
static void *sim_copy_logprobs(struct message *copy) {
    uint32_t count = copy->u.tokens.count;
    uint32_t tops = copy->u.tokens.top_count;
    float *logprobs = malloc(2ull * (count + tops) * sizeof *logprobs + 1);
    CHECK(logprobs != NULL);
    uint32_t *top_counts = (uint32_t *)(void *)(logprobs + count);
    uint32_t *top_tokens = top_counts + count;
    float *top_logprobs = (float *)(void *)(top_tokens + tops);
    memcpy(logprobs, copy->u.tokens.logprobs, count * sizeof *logprobs);
    memcpy(top_counts, copy->u.tokens.top_counts, count * sizeof *top_counts);
    memcpy(top_tokens, copy->u.tokens.top_tokens, tops * sizeof *top_tokens);
    memcpy(top_logprobs, copy->u.tokens.top_logprobs, tops * sizeof *top_logprobs);
    copy->u.tokens.logprobs = logprobs;
    copy->u.tokens.top_counts = top_counts;
    copy->u.tokens.top_tokens = top_tokens;
    copy->u.tokens.top_logprobs = top_logprobs;
    return logprobs;
}

static void sim_copy_message(struct sim_event *event, const struct message *message, bool is_old) {
    struct message *copy = sim_copy(message, sizeof *message);
    event->message = copy;
    switch (message->kind) {
    case MESSAGE_AUDIT:
    case MESSAGE_UNKNOWN:
        event->owned = sim_copy(message->u.audit.ids, message->u.audit.count * sizeof(uint64_t));
        copy->u.audit.ids = event->owned;
        break;
    case MESSAGE_ADMIT:
        event->owned =
            sim_copy(message->u.admit.tokens, message->u.admit.token_count * sizeof(uint32_t));
        copy->u.admit.tokens = event->owned;
        break;
    case MESSAGE_PREFILL:
        event->owned =
            sim_copy(message->u.prefill.tokens, message->u.prefill.token_count * sizeof(uint32_t));
        copy->u.prefill.tokens = event->owned;
        break;
    case MESSAGE_ACCEPT:
        event->owned = sim_copy(message->u.accept.address, message->u.accept.address_len);
        copy->u.accept.address = event->owned;
        break;
    case MESSAGE_TOKENS: {
        uint32_t count = message->u.tokens.count;
        uint64_t *both = malloc(count * (sizeof(uint64_t) + sizeof(uint32_t)) + 1);
        CHECK(both != NULL);
        memcpy(both, message->u.tokens.attempts, count * sizeof(uint64_t));
        memcpy(both + count, message->u.tokens.tokens, count * sizeof(uint32_t));
        event->owned = both;
        copy->u.tokens.attempts = both;
        copy->u.tokens.tokens = (const uint32_t *)(const void *)(both + count);
        if (message->u.tokens.top_counts != NULL) {
            event->logprobs = sim_copy_logprobs(copy);
        }
        break;
    }
    case MESSAGE_CACHED: {
        uint32_t removed = message->u.cached.removed_count;
        uint32_t stored = message->u.cached.stored_count;
        uint64_t *both = malloc((removed + stored + 1) * sizeof *both);
        CHECK(both != NULL);
        memcpy(both, message->u.cached.removed, removed * sizeof *both);
        memcpy(both + removed, message->u.cached.stored, stored * sizeof *both);
        event->owned = both;
        copy->u.cached.removed = both;
        copy->u.cached.stored = both + removed;
        break;
    }
    case MESSAGE_HELLO:
        if (is_old) { /* fields that the oldest does not write, or does not read */
            copy->u.hello.newest = 0;
        }
        break;
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
    event->event.u.mail.message = copy;
}

void sim_stream_send(struct world *world, uint32_t process, const struct effect *effect) {
    uint32_t side = 0;
    struct connection *c = sim_connection(world, process, effect->stream.v, &side);
    if (effect->u.message.kind == MESSAGE_TOKENS) {
        world->result.tokens_messages++;
    }
    if (c == NULL || c->is_broken || c->is_ended[side]) {
        return;
    }
    uint32_t other = 1 - side;
    if (sim_strikes(world, FAULT_SEND_LOST)) {
        sim_break(world, c);
        return;
    }
    if (sim_strikes(world, FAULT_SEND_DEAF)) {
        c->is_deaf[other] = true;
    }
    if (c->is_deaf[other]) {
        return;
    }
    int64_t at = world->now + sim_time(world, process, world->knobs.delay_ns);
    int64_t cut = sim_cut_until(world, process, c->process[other]);
    if (sim_strikes(world, FAULT_SEND_LATE)) {
        at += sim_time(world, process, 2 * SECOND);
    }
    at = at > c->stalled_until ? at : c->stalled_until;
    at = at > cut ? at : cut;
    at = at > c->last[other] ? at : c->last[other];
    c->last[other] = at;
    struct sim_event *event = sim_schedule(world, SIM_CORE, at, c->process[other]);
    event->generation = c->generation[other];
    event->event.stream.v = c->stream[other];
    event->connection = (int32_t)(c - world->connections);
    event->side = other;
    event->is_last = sim_strikes(world, FAULT_SEND_LAST);
    if (sim_strikes(world, FAULT_SEND_BAD)) {
        event->event.kind = EVENT_STREAM_BAD;
        return;
    }
    event->event.kind = EVENT_STREAM_MAIL;
    bool is_old =
        ((world->knobs.old >> c->process[0] | world->knobs.old >> c->process[1]) & 1) != 0;
    SIM_CHECK(world, !is_old || effect->u.message.kind != MESSAGE_CACHED,
              "a kind of message was sent to a peer that does not know it");
    SIM_CHECK(
        world,
        !is_old ||
            (effect->u.message.kind == MESSAGE_ADMIT &&
             !salt_is_set(effect->u.message.u.admit.salt)) ||
            (effect->u.message.kind == MESSAGE_PREFILL &&
             !salt_is_set(effect->u.message.u.prefill.salt)) ||
            (effect->u.message.kind != MESSAGE_ADMIT && effect->u.message.kind != MESSAGE_PREFILL),
        "a salted request was sent to a worker that does not keep salts apart");
    sim_copy_message(event, &effect->u.message, is_old);
}

void sim_stream_close(struct world *world, uint32_t process, const struct effect *effect) {
    uint32_t side = 0;
    struct connection *c = sim_connection(world, process, effect->stream.v, &side);
    if (c == NULL) {
        return;
    }
    /* What we closed ends for us, whatever the network does. */
    c->is_deaf[side] = false;
    sim_end_side(world, c, side, world->now + sim_time(world, process, MS));
    if (sim_coin(world, process)) {
        c->is_broken = true; /* a reset: what is in flight to the peer is lost too */
    }
    int64_t at = world->now + sim_time(world, process, world->knobs.delay_ns);
    int64_t cut = sim_cut_until(world, process, c->process[1 - side]);
    sim_end_side(world, c, 1 - side, at > cut ? at : cut);
}
