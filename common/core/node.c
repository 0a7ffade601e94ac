#include "core/node.h"

#include <string.h>

#include "base/check.h"

const uint32_t histogram_bounds_us[HISTOGRAM_BUCKETS] = {
    100, 500, 1000, 5000, 10000, 50000, 100000, 500000, 1000000, 2000000, 7000000, 30000000};

void histogram_add(struct histogram *histogram, struct span value) {
    int64_t us = value.ns / 1000;
    uint32_t at = 0;
    while (at < HISTOGRAM_BUCKETS && us > (int64_t)histogram_bounds_us[at]) {
        at++;
    }
    histogram->bucket[at]++;
    histogram->sum_us += us > 0 ? (uint64_t)us : 0;
}

struct core_timers timers_default(void) {
    return (struct core_timers){
        .beat = span_ms(1000),
        .lease = span_ms(6000),
        .handshake = span_ms(3000),
        .audit = span_ms(5000),
        .admit = span_ms(2000),
        .open = span_ms(3000),
        .stall = span_ms(5000),
        .leave = span_ms(35000),
        .request = span_ms(300000),
        .place = span_ms(5000),
        .busy = span_ms(50),
        .backlog = span_ms(2000),
        .suspect = span_ms(10000),
        .forget = span_ms(30000),
        .reconnect_first = span_ms(100),
        .reconnect_max = span_ms(2000),
        .step = span_ms(100),
        .hop = span_ms(100),
    };
}

const char *timers_check(const struct core_timers *timers) {
    const struct {
        int64_t small, large;
        const char *sentence;
    } rules[] = {
        {2 * timers->beat.ns, timers->lease.ns,
         "the lease must be at least twice the beat, or one late beat ends a healthy session"},
        {timers->admit.ns, timers->lease.ns,
         "T_admit must not exceed the lease: a dead decode worker is noticed by the lease anyway"},
        {timers->admit.ns, timers->open.ns,
         "T_open must be at least T_admit, or slots die before the router can place a prefill"},
        {timers->stall.ns, timers->leave.ns, "T_leave must be at least T_stall"},
        {timers->step.ns, timers->stall.ns, "T_stall must be longer than a planned step"},
        {timers->reconnect_first.ns, timers->reconnect_max.ns,
         "the first reconnect delay must not exceed the longest"},
        {1, timers->beat.ns, "the beat must be positive"},
        {1, timers->busy.ns, "the busy delay must be positive"},
    };
    for (uint32_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        if (rules[i].small > rules[i].large) {
            return rules[i].sentence;
        }
    }
    return NULL;
}

void node_init(struct node *node, const struct node_config *config, struct arena *arena) {
    CHECK(config->sessions_max > 0);
    struct session *sessions =
        arena_take(arena, (uint64_t)config->sessions_max * sizeof(struct session));
    void *slots = arena_take(arena, map_bytes(config->sessions_max));
    struct terminal *terminals =
        arena_take(arena, (uint64_t)TERMINALS_KEPT * sizeof(struct terminal));
    if (sessions == NULL) {
        return;
    }
    memset(node, 0, sizeof *node);
    node->config = *config;
    node->sessions = sessions;
    node->terminals = terminals;
    node->next_stream = 2;
    map_init(&node->by_stream, config->sessions_max, slots);
}

void node_observe(struct node *node, struct instant now) {
    if (!node->is_started) {
        node->is_started = true;
        node->now = now;
        node->real = now;
        node->stats.progress_at = now;
        return;
    }
    int64_t advance = now.ns - node->real.ns;
    CHECK_OP(advance, >=, 0);
    if (advance > span_ms(OBSERVED_STEP_MS).ns) {
        node->stats.pauses++;
        advance = span_ms(OBSERVED_STEP_MS).ns;
    }
    node->now.ns += advance;
    node->real = now;
}

static struct session *node_by_stream(struct node *node, struct stream_id stream) {
    uint32_t cursor = 0;
    uint32_t at = map_next(&node->by_stream, stream.v, &cursor);
    return at == UINT32_MAX ? NULL : &node->sessions[at];
}

static struct session *node_take(struct node *node, struct stream_id stream) {
    for (uint32_t i = 0; i < node->config.sessions_max; i++) {
        struct session *session = &node->sessions[i];
        if (session->phase == SESSION_FREE) {
            memset(session, 0, sizeof *session);
            session->phase = SESSION_GREETING;
            session->stream = stream;
            session->since = node->now;
            session->heard = node->now;
            session->beat_due = instant_add(node->now, node->config.timers.beat);
            session->audit_due = instant_add(node->now, node->config.timers.audit);
            list_init(&session->entries);
            map_add(&node->by_stream, stream.v, i);
            return session;
        }
    }
    return NULL;
}

void node_note(struct effects *out, enum note_kind kind, enum role role, enum cause cause,
               uint64_t id, uint64_t number, const char *label) {
    struct effect *effect = effects_add(out, EFFECT_NOTE);
    effect->u.note.kind = kind;
    effect->u.note.role = role;
    effect->u.note.cause = cause;
    effect->u.note.id = id;
    effect->u.note.number = number;
    text_copy(effect->u.note.label, LABEL_MAX, label);
}

/* Sends whatever the phase: Hello goes out before the session is live. */
static struct message *node_send_now(struct session *session, enum message_kind kind,
                                     struct effects *out) {
    struct effect *effect = effects_add(out, EFFECT_STREAM_SEND);
    effect->stream = session->stream;
    effect->u.message.kind = kind;
    return &effect->u.message;
}

struct message *node_send(struct node *node, struct session *session, enum message_kind kind,
                          struct effects *out) {
    if (session == NULL || session->phase != SESSION_LIVE) {
        memset(&node->scratch, 0, sizeof node->scratch);
        return &node->scratch;
    }
    return node_send_now(session, kind, out);
}

static void node_hello(struct node *node, struct session *session, struct effects *out) {
    if (session->is_hello_sent) {
        return;
    }
    session->is_hello_sent = true;
    struct message *message = node_send_now(session, MESSAGE_HELLO, out);
    message->u.hello.incarnation = node->config.incarnation;
    message->u.hello.session = ++node->next_session;
    message->u.hello.layout = node->config.layout;
    message->u.hello.protocol = PROTOCOL_OLDEST;
    message->u.hello.newest = PROTOCOL_VERSION;
    message->u.hello.role = node->config.role;
    message->u.hello.is_draining = node->is_draining;
    memcpy(message->u.hello.id, node->config.id, LABEL_MAX);
    memcpy(message->u.hello.numerics, node->config.numerics, MESSAGE_NUMERICS_MAX);
}

struct session *node_open(struct node *node, enum role role, struct incarnation incarnation,
                          const char *address, struct effects *out) {
    struct stream_id stream = {node->next_stream};
    struct session *session = node_take(node, stream);
    if (session == NULL) {
        return NULL;
    }
    node->next_stream += 2;
    session->is_ours = true;
    session->role = role;
    session->incarnation = incarnation;
    struct effect *effect = effects_add(out, EFFECT_STREAM_OPEN);
    effect->stream = stream;
    text_copy(effect->u.open.address, ADDRESS_MAX, address);
    node_hello(node, session, out);
    return session;
}

struct session *node_find(struct node *node, enum role role, struct incarnation incarnation) {
    for (uint32_t i = 0; i < node->config.sessions_max; i++) {
        struct session *session = &node->sessions[i];
        if ((session->phase == SESSION_LIVE || session->phase == SESSION_GREETING) &&
            session->role == role && session->incarnation.v == incarnation.v) {
            return session;
        }
    }
    return NULL;
}

void node_end(struct node *node, struct session *session, enum cause cause, struct effects *out) {
    if (session->phase == SESSION_ENDED || session->phase == SESSION_FREE) {
        return;
    }
    if (session->phase == SESSION_LIVE) {
        node->sessions_live--;
    }
    bool was_live = session->phase == SESSION_LIVE;
    session->phase = SESSION_ENDED;
    session->cause = cause;
    node->sessions_ended++;
    node->stats.session_ends[cause]++;
    if (!session->is_stream_ended) {
        struct effect *effect = effects_add(out, EFFECT_STREAM_CLOSE);
        effect->stream = session->stream;
        effect->u.close.cause = cause;
    }
    if (was_live) {
        node_note(out, NOTE_SESSION_ENDED, session->role, cause, session->incarnation.v,
                  session->entries.count, session->id);
    }
}

bool node_release(struct node *node, struct session *session) {
    if (session->phase != SESSION_ENDED || session->entries.count > 0 ||
        !session->is_stream_ended || (session->is_link_used && !session->is_link_closed)) {
        return false;
    }
    CHECK(map_remove(&node->by_stream, session->stream.v, node_session_index(node, session)));
    session->phase = SESSION_FREE;
    node->sessions_ended--;
    return true;
}

/* Which peers may open a session to whom. */
static bool node_accepts(const struct node *node, enum role peer) {
    switch (node->config.role) {
    case ROLE_DECODE: return peer == ROLE_ROUTER || peer == ROLE_PREFILL;
    case ROLE_PREFILL: return peer == ROLE_ROUTER;
    case ROLE_ROUTER:
    case ROLE_NONE: return false;
    }
    return false;
}

static bool node_refuse(struct node *node, struct session *session, enum cause cause,
                        const struct message *hello, struct effects *out) {
    node->stats.sessions_refused++;
    node_note(out, NOTE_SESSION_REFUSED, hello->u.hello.role, cause, hello->u.hello.incarnation.v,
              0, hello->u.hello.id);
    node_end(node, session, cause, out);
    return false;
}

/* The peer's Hello. True if the session is live afterwards. */
static bool node_greet(struct node *node, struct session *session, const struct message *message,
                       struct effects *out) {
    enum role role = message->u.hello.role;
    struct incarnation incarnation = message->u.hello.incarnation;
    if (session->phase != SESSION_GREETING) {
        node_end(node, session, CAUSE_SESSION_ERROR, out);
        return false;
    }
    uint32_t newest = message->u.hello.newest > message->u.hello.protocol
                          ? message->u.hello.newest
                          : message->u.hello.protocol;
    if (message->u.hello.protocol > PROTOCOL_VERSION || newest < PROTOCOL_OLDEST ||
        incarnation.v == 0) {
        return node_refuse(node, session, CAUSE_MISMATCH, message, out);
    }
    session->is_other_life = session->is_ours && incarnation.v != session->incarnation.v;
    if (session->is_other_life ||
        (session->is_ours ? role != session->role : !node_accepts(node, role))) {
        return node_refuse(node, session, CAUSE_MISMATCH, message, out);
    }
    bool is_pair = (role == ROLE_PREFILL && node->config.role == ROLE_DECODE) ||
                   (role == ROLE_DECODE && node->config.role == ROLE_PREFILL);
    if (is_pair && !layout_digest_equal(message->u.hello.layout, node->config.layout)) {
        return node_refuse(node, session, CAUSE_MISMATCH, message, out);
    }
    for (uint32_t i = 0; i < node->config.sessions_max; i++) {
        struct session *other = &node->sessions[i];
        if (other == session || other->phase != SESSION_LIVE || other->role != role ||
            other->incarnation.v != incarnation.v) {
            continue;
        }
        if (other->number > message->u.hello.session) {
            return node_refuse(node, session, CAUSE_SESSION_REPLACED, message, out);
        }
        node_end(node, other, CAUSE_SESSION_REPLACED, out);
    }
    session->role = role;
    session->incarnation = incarnation;
    session->number = message->u.hello.session;
    session->protocol = newest < PROTOCOL_VERSION ? newest : PROTOCOL_VERSION;
    session->layout = message->u.hello.layout;
    session->is_peer_draining = message->u.hello.is_draining;
    memcpy(session->id, message->u.hello.id, LABEL_MAX);
    memcpy(session->numerics, message->u.hello.numerics, MESSAGE_NUMERICS_MAX);
    node_hello(node, session, out);
    session->phase = SESSION_LIVE;
    node->sessions_live++;
    node_note(out, NOTE_SESSION_UP, role, CAUSE_NONE, incarnation.v, session->number, session->id);
    return true;
}

static struct session *node_mail(struct node *node, struct session *session,
                                 const struct message *message, struct effects *out) {
    session->heard = node->now;
    if (message->kind == MESSAGE_HELLO) {
        return node_greet(node, session, message, out) ? session : NULL;
    }
    if (session->phase != SESSION_LIVE) {
        node_end(node, session, CAUSE_SESSION_ERROR, out);
        return NULL;
    }
    if (message->kind == MESSAGE_BEAT) {
        session->peer_progress = message->u.beat.progress;
        session->peer_entries = message->u.beat.entries;
        session->peer_pages_free = message->u.beat.pages_free;
        session->peer_backlog_ms = message->u.beat.backlog_ms;
        session->peer_backlog_tokens = message->u.beat.backlog_tokens;
        session->is_peer_draining = message->u.beat.is_draining;
    }
    return session;
}

struct session *node_event(struct node *node, const struct event *event, struct effects *out) {
    struct session *session = node_by_stream(node, event->stream);
    if (event->kind == EVENT_STREAM_ACCEPTED) {
        CHECK(session == NULL && (event->stream.v & 1) == 1);
        session = node_take(node, event->stream);
        if (session == NULL) {
            /* No room to remember it: the shell closes it and its end will be unknown here. */
            struct effect *effect = effects_add(out, EFFECT_STREAM_CLOSE);
            effect->stream = event->stream;
            effect->u.close.cause = CAUSE_BUSY;
            node->stats.sessions_refused++;
        }
        return NULL;
    }
    if (session == NULL) {
        node->stats.stale_mail++;
        return NULL;
    }
    if (event->kind == EVENT_STREAM_ENDED) {
        session->is_stream_ended = true;
        node_end(node, session, event->u.stream_end.cause, out);
        return NULL;
    }
    if (session->phase == SESSION_ENDED) {
        node->stats.stale_mail++;
        return NULL;
    }
    if (event->kind == EVENT_STREAM_BAD) {
        node_end(node, session, CAUSE_SESSION_ERROR, out);
        return NULL;
    }
    CHECK_OP(event->kind, ==, EVENT_STREAM_MAIL);
    return node_mail(node, session, event->u.mail.message, out);
}

void node_tick(struct node *node, struct effects *out) {
    const struct core_timers *timers = &node->config.timers;
    for (uint32_t i = 0; i < node->config.sessions_max && effects_room(out) > 64; i++) {
        struct session *session = &node->sessions[i];
        if (session->phase == SESSION_GREETING &&
            instant_reached(node->now, instant_add(session->since, timers->handshake))) {
            node_end(node, session, CAUSE_SESSION_SILENT, out);
        } else if (session->phase == SESSION_LIVE &&
                   instant_reached(node->now, instant_add(session->heard, timers->lease))) {
            node_end(node, session, CAUSE_SESSION_SILENT, out);
        } else if (session->phase == SESSION_LIVE &&
                   instant_reached(node->now, session->beat_due)) {
            session->beat_due = instant_add(node->now, timers->beat);
            struct message *message = node_send(node, session, MESSAGE_BEAT, out);
            message->u.beat.progress = node->stats.progress;
            message->u.beat.entries = node->ledger.live;
            message->u.beat.pages_free = node->beat_pages_free;
            message->u.beat.backlog_ms = node->beat_backlog_ms;
            message->u.beat.backlog_tokens = node->beat_backlog_tokens;
            message->u.beat.is_draining = node->is_draining;
        }
    }
}

void node_drain(struct node *node, struct span grace, struct effects *out) {
    struct instant deadline = instant_add(node->now, grace);
    node->drain_deadline =
        node->is_draining ? instant_min(node->drain_deadline, deadline) : deadline;
    if (!node->is_draining) {
        node->is_draining = true;
        node_note(out, NOTE_DRAINING, node->config.role, CAUSE_DRAINING, 0, node->ledger.live, "");
        for (uint32_t i = 0; i < node->config.sessions_max; i++) {
            node->sessions[i].beat_due = node->now; /* routers stop placing at once */
        }
        node_tick(node, out);
    }
}

void node_exit_when_idle(struct node *node, struct effects *out) {
    if (node->is_draining && node->ledger.live == 0 && !node->is_exit_sent &&
        effects_room(out) > 2) {
        node->is_exit_sent = true;
        node_note(out, NOTE_DRAINED, node->config.role, CAUSE_DRAINING, 0, 0, "");
        effects_add(out, EFFECT_EXIT);
    }
}

void node_view_peer(const struct node *node, struct entry_view *view, uint32_t which,
                    uint32_t session, const char *label) {
    text_copy(view->peers[which], LABEL_MAX, label);
    view->sessions[which] = node->sessions[session].stream.v;
    view->peer_silence_ms[which] =
        span_to_ms(instant_since(node->now, node->sessions[session].heard));
}

void ledger_create(struct node *node, uint32_t state) {
    node->ledger.created++;
    node->ledger.live++;
    node->ledger.in_state[state]++;
}

void ledger_move(struct node *node, uint32_t from, uint32_t to) {
    CHECK_OP(node->ledger.in_state[from], >, 0);
    node->ledger.in_state[from]--;
    node->ledger.in_state[to]++;
}

void ledger_end(struct node *node, uint32_t state, const struct terminal *terminal,
                struct span decided_to_freed) {
    struct ledger *ledger = &node->ledger;
    CHECK_OP(ledger->in_state[state], >, 0);
    CHECK(terminal->outcome != OUTCOME_NONE && terminal->outcome < 4);
    ledger->in_state[state]--;
    ledger->live--;
    ledger->terminals[terminal->outcome]++;
    ledger->terminal_causes[terminal->cause]++;
    if (terminal->outcome != OUTCOME_OK) {
        histogram_add(&ledger->abort_to_freed, decided_to_freed);
    }
    histogram_add(&ledger->lifetime, terminal->age);
    struct terminal *kept = &node->terminals[node->terminals_total % TERMINALS_KEPT];
    *kept = *terminal;
    kept->freeing = decided_to_freed;
    node->terminals_total++;
    node_progressed(node);
}

int64_t ledger_imbalance(const struct ledger *ledger) {
    uint64_t ended = 0;
    for (uint32_t i = 0; i < 4; i++) {
        ended += ledger->terminals[i];
    }
    return (int64_t)(ledger->created - ended) - (int64_t)ledger->live;
}
