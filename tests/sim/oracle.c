/* What must hold after every step, beside what the cores verify of themselves. */
#include <string.h>

#include "sim/state.h"

uint32_t sim_shadow_count(const struct world *world, enum role role) {
    return role == ROLE_ROUTER ? world->knobs.requests_max : world->knobs.entries_max;
}

void sim_verify(struct process *p) {
    if (p->role == ROLE_ROUTER) {
        router_verify(p->core);
    } else if (p->role == ROLE_DECODE) {
        decode_verify(p->core);
    } else {
        prefill_verify(p->core);
    }
}

/* --- bounds, in each process's own observed time -----------------------------------------------
 */

static void sim_decode_bounds(struct world *world, const struct decode_core *core, int64_t now) {
    const struct core_timers *timers = &core->node.config.timers;
    for (uint32_t i = 0; i < core->config.entries_max; i++) {
        const struct decode_entry *entry = &core->entries[i];
        SIM_CHECK(world,
                  entry->state != DECODE_RESERVED || now <= entry->state_since.ns + timers->open.ns,
                  "I3: a reserved slot outlived T_open");
        SIM_CHECK(world,
                  entry->state != DECODE_RECEIVING || !entry->is_fin_seen ||
                      now <= entry->moved.ns + timers->stall.ns,
                  "I3: a stalled transfer outlived T_stall");
    }
}

static void sim_router_bounds(struct world *world, const struct router_core *core, int64_t now) {
    const struct core_timers *timers = &core->node.config.timers;
    for (uint32_t i = 0; i < core->config.requests_max; i++) {
        const struct request *request = &core->requests[i];
        SIM_CHECK(world,
                  (request->state != REQUEST_ADMITTING && request->state != REQUEST_ASKING) ||
                      now <= request->state_since.ns + timers->admit.ns,
                  "I3: an unanswered Admit or question outlived T_admit");
    }
}

static void sim_prefill_bounds(struct world *world, const struct prefill_core *core, int64_t now) {
    const struct core_timers *timers = &core->node.config.timers;
    for (uint32_t i = 0; i < core->config.entries_max; i++) {
        const struct prefill_entry *entry = &core->entries[i];
        const struct session *peer = &core->node.sessions[entry->peer];
        bool is_open = peer->stream.v == entry->peer_stream.v && peer->phase == SESSION_LIVE;
        SIM_CHECK(world,
                  entry->sends == 0 || !is_open ||
                      now <= entry->moved.ns + timers->stall.ns + SECOND,
                  "I3: a session with a stalled send outlived T_stall");
    }
}

/* The bounds of protocol.md section 5; a second for the tick that acts on them. */
static void sim_bounds(struct world *world, struct process *p) {
    const struct node *node = sim_node_of(p);
    int64_t now = node->now.ns - SECOND;
    for (uint32_t i = 0; i < node->config.sessions_max; i++) {
        const struct session *session = &node->sessions[i];
        SIM_CHECK(world,
                  session->phase != SESSION_LIVE ||
                      now <= session->heard.ns + node->config.timers.lease.ns,
                  "I16: a silent session outlived its lease");
    }
    if (p->role == ROLE_DECODE) {
        sim_decode_bounds(world, p->core, now);
    } else if (p->role == ROLE_ROUTER) {
        sim_router_bounds(world, p->core, now);
    } else {
        sim_prefill_bounds(world, p->core, now);
    }
}

/* --- entries against what they were a step ago -------------------------------------------------
 */

/* What the oracle looks at, whatever the role. */
struct sight {
    uint64_t id, attempt, router;
    uint32_t state, outcome, cause;
    uint32_t sessions[2]; /* indices; UINT32_MAX: none */
    uint64_t streams[2];
    bool is_decided;
};

static struct sight sim_sight(struct process *p, uint32_t at) {
    struct sight sight = {.sessions = {UINT32_MAX, UINT32_MAX}};
    if (p->role == ROLE_DECODE) {
        const struct decode_entry *entry = &((struct decode_core *)p->core)->entries[at];
        sight.id = entry->id;
        sight.attempt = entry->attempt.v;
        sight.router = entry->router_incarnation.v;
        sight.state = entry->state;
        sight.outcome = entry->outcome;
        sight.cause = entry->cause;
        sight.sessions[0] = entry->router;
        sight.streams[0] = entry->router_stream.v;
        sight.sessions[1] = entry->peer_stream.v != 0 ? entry->peer : UINT32_MAX;
        sight.streams[1] = entry->peer_stream.v;
        sight.is_decided = entry->state == DECODE_LEAVING;
    } else if (p->role == ROLE_PREFILL) {
        const struct prefill_entry *entry = &((struct prefill_core *)p->core)->entries[at];
        sight.id = entry->id;
        sight.attempt = entry->attempt.v;
        sight.router = entry->router_incarnation.v;
        sight.state = entry->state;
        sight.outcome = entry->outcome;
        sight.cause = entry->cause;
        sight.sessions[0] = entry->router;
        sight.streams[0] = entry->router_stream.v;
        sight.sessions[1] = entry->peer;
        sight.streams[1] = entry->peer_stream.v;
        sight.is_decided = entry->state == PREFILL_LEAVING;
    } else {
        const struct request *request = &((struct router_core *)p->core)->requests[at];
        sight.id = request->id;
        sight.attempt = request->attempt.v;
        sight.state = request->state;
        sight.outcome = request->outcome;
        sight.cause = request->cause;
        sight.is_decided = request->state == REQUEST_ANSWERING;
    }
    return sight;
}

static bool sim_may_follow(enum role role, uint32_t from, uint32_t to) {
    if (from == to) {
        return true;
    }
    if (role == ROLE_DECODE) {
        return to == DECODE_LEAVING || (from == DECODE_RESERVED && to == DECODE_RECEIVING) ||
               (from == DECODE_RECEIVING && to == DECODE_RUNNING) ||
               (from == DECODE_RUNNING && to == DECODE_RETRACTED) ||
               (from == DECODE_RETRACTED && to == DECODE_RUNNING);
    }
    if (role == ROLE_PREFILL) {
        return to > from; /* QUEUED, COMPUTING, SENT, LEAVING; a whole prefix hit skips one */
    }
    if (from == REQUEST_GATHERING) {
        return to == REQUEST_ANSWERING;
    }
    if (from == REQUEST_WAITING) {
        return to == REQUEST_PLACING || to == REQUEST_ADMITTING;
    }
    return to == REQUEST_ANSWERING || (to != REQUEST_TOKENIZING && to != REQUEST_NONE);
}

/* I14, I15: an entry that its router no longer wants ends within the lease, and one more where the
 * news was merely late. */
static bool sim_is_wanted(const struct world *world, enum role role, const struct sight *sight) {
    for (uint32_t i = 0; i < world->process_count; i++) {
        const struct process *p = &world->processes[i];
        if (p->role != ROLE_ROUTER || !p->is_alive || p->incarnation.v != sight->router) {
            continue;
        }
        const struct router_core *core = p->core;
        uint32_t at = (uint32_t)(sight->attempt & 0xffffff);
        if (at >= core->config.requests_max) {
            return false;
        }
        const struct request *request = &core->requests[at];
        return request->attempt.v == sight->attempt && request->state != REQUEST_NONE &&
               request->state != REQUEST_ANSWERING &&
               (role == ROLE_DECODE ? request->decode : request->prefill) != ROUTER_NONE;
    }
    return false;
}

static void sim_orphan(struct world *world, struct process *p, struct shadow *shadow,
                       const struct sight *sight) {
    const struct node *node = sim_node_of(p);
    if (sight->is_decided || sim_is_wanted(world, p->role, sight)) {
        shadow->orphan_since = 0;
    } else if (shadow->orphan_since == 0) {
        shadow->orphan_since = node->now.ns;
    } else {
        SIM_CHECK(world,
                  node->now.ns <
                      shadow->orphan_since + 2 * node->config.timers.lease.ns + 2 * SECOND,
                  "I14: an entry outlived the request that it was for");
    }
}

/* I19: a session's end is the end of that session's entries, and of no others. */
static void sim_containment(struct world *world, struct process *p, const struct sight *sight) {
    const struct node *node = sim_node_of(p);
    if (sight->cause != CAUSE_SESSION_ENDED && sight->cause != CAUSE_SESSION_SILENT &&
        sight->cause != CAUSE_SESSION_REPLACED && sight->cause != CAUSE_SESSION_ERROR) {
        return;
    }
    for (uint32_t i = 0; i < 2; i++) {
        if (sight->sessions[i] != UINT32_MAX) {
            const struct session *session = &node->sessions[sight->sessions[i]];
            if (session->stream.v != sight->streams[i] || session->phase == SESSION_ENDED ||
                session->phase == SESSION_FREE) {
                return;
            }
        }
    }
    sim_fail(world, "I19: an entry ended with a session that has not ended");
}

/* I12: what D has computed or committed is what the tokens say, every row of it. */
static void sim_check_rows(struct world *world, struct process *p, uint32_t at) {
    const struct decode_core *core = p->core;
    const struct decode_entry *entry = &core->entries[at];
    const uint32_t *tokens = words_at(&core->words, entry->words);
    const uint32_t *pages = tokens + entry->total_max;
    uint64_t h = 0;
    for (uint32_t i = 0; i < entry->computed; i++) {
        h = sim_advance(h, tokens[i]);
        for (uint32_t c = 0; c < SIM_COMPONENTS; c++) {
            SIM_CHECK(world, *sim_kv(world, p, pages, c, i) == sim_row(h, c),
                      "I12: a request runs on KV that is not whole");
        }
    }
}

/* Whoever gives its pages away gives them to somebody older, who runs on: so the oldest ends, and
 * then the next. */
static void sim_check_retracted(struct world *world, const struct decode_core *core, uint32_t at) {
    bool is_older = false;
    for (uint32_t i = 0; i < core->config.entries_max; i++) {
        const struct decode_entry *other = &core->entries[i];
        is_older =
            is_older || (other->state == DECODE_RUNNING && other->order < core->entries[at].order);
    }
    SIM_CHECK(world, is_older, "the oldest request that ran was retracted: it may starve");
}

/* Of these pages the first `cached` were found, the others are the entry's own to write. */
static void sim_check_salt(struct world *world, struct process *p, struct siphash128 salt,
                           const uint32_t *pages, uint32_t cached, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        SIM_CHECK(world, i >= cached || p->salts[pages[i]] == salt.low,
                  "a cached page was given to another tenant");
        p->salts[pages[i]] = salt.low;
    }
}

static void sim_check_salts(struct world *world, struct process *p, uint32_t at) {
    const struct shadow *shadow = &p->shadows[at];
    if (p->role == ROLE_DECODE) {
        const struct decode_core *core = p->core;
        const struct decode_entry *entry = &core->entries[at];
        bool is_new = entry->id != shadow->id;
        bool is_back = shadow->state == DECODE_RETRACTED && entry->state == DECODE_RUNNING;
        uint32_t found = is_new ? entry->cached : is_back ? entry->computed : 0;
        sim_check_salt(world, p, entry->salt,
                       words_at(&core->words, entry->words) + entry->total_max,
                       found / core->config.page_tokens, entry->page_count);
    } else {
        const struct prefill_core *core = p->core;
        const struct prefill_entry *entry = &core->entries[at];
        sim_check_salt(world, p, entry->salt, words_at(&core->words, entry->words) + entry->end,
                       entry->cached / core->config.layout->page_tokens, entry->page_count);
    }
}

static void sim_entry(struct world *world, struct process *p, uint32_t at, bool is_abort) {
    struct shadow *shadow = &p->shadows[at];
    struct sight sight = sim_sight(p, at);
    if (sight.id == 0) {
        shadow->state = 0;
        return;
    }
    bool is_new = sight.id != shadow->id;
    SIM_CHECK(world, !is_new || sight.id > shadow->id, "I6: an id was used again");
    if (!is_new) {
        SIM_CHECK(world, shadow->state != 0, "I2: an entry came back");
        SIM_CHECK(world, sim_may_follow(p->role, shadow->state, sight.state),
                  "section 4: a state was followed by one that may not follow it");
        SIM_CHECK(world,
                  shadow->outcome == OUTCOME_NONE ||
                      (shadow->outcome == sight.outcome && shadow->cause == sight.cause),
                  "I2: an outcome changed after it was decided");
        SIM_CHECK(world, p->role != ROLE_ROUTER || sight.attempt >= shadow->attempt,
                  "I15: a request went back to an earlier attempt");
    }
    if (p->role == ROLE_DECODE && sight.state == DECODE_RUNNING &&
        (is_new || shadow->state == DECODE_RECEIVING || shadow->state == DECODE_RETRACTED)) {
        sim_check_rows(world, p, at);
    }
    if (p->role == ROLE_DECODE && sight.state == DECODE_RETRACTED &&
        shadow->state != DECODE_RETRACTED) {
        sim_check_retracted(world, p->core, at);
    }
    if (p->role != ROLE_ROUTER) {
        sim_check_salts(world, p, at);
        if (is_new) {
            shadow->orphan_since = 0;
        }
        if (sight.is_decided && !is_abort && (is_new || shadow->outcome == OUTCOME_NONE)) {
            sim_containment(world, p, &sight);
        }
        sim_orphan(world, p, shadow, &sight);
    }
    shadow->id = sight.id;
    shadow->attempt = sight.attempt;
    shadow->stream = sight.streams[0];
    shadow->state = sight.state;
    shadow->outcome = sight.outcome;
    shadow->cause = sight.cause;
}

/* --- the step itself ---------------------------------------------------------------------------
 */

static bool sim_is_mail(const struct event *event, enum message_kind kind) {
    return event->kind == EVENT_STREAM_MAIL && event->u.mail.message->kind == kind;
}

/* What R may never do: end a decode on a prefill worker's word. */
static void sim_check_abort(struct world *world, const struct event *event) {
    if (!sim_is_mail(event, MESSAGE_ABORT) || event->u.mail.message->u.abort.is_unless_committed) {
        return;
    }
    enum cause cause = event->u.mail.message->u.abort.cause;
    SIM_CHECK(world,
              cause != CAUSE_SEND_FAILED && cause != CAUSE_STALL && cause != CAUSE_PEER_REFUSED &&
                  cause != CAUSE_STEP_FAILED && cause != CAUSE_SESSION_ENDED &&
                  cause != CAUSE_SESSION_SILENT,
              "a decode was aborted on its prefill worker's failure without asking D");
}

/* I8: whatever the state, an Abort that was read has ended what it names; but a question does not
 * end what is committed. */
static void sim_check_aborted(struct world *world, struct process *p, const struct event *event) {
    if (!sim_is_mail(event, MESSAGE_ABORT)) {
        return;
    }
    uint64_t attempt = event->u.mail.message->u.abort.attempt.v;
    bool is_question = event->u.mail.message->u.abort.is_unless_committed;
    for (uint32_t i = 0; i < sim_shadow_count(world, p->role); i++) {
        struct sight sight = sim_sight(p, i);
        const struct shadow *before = &p->shadows[i];
        bool is_committed =
            p->role == ROLE_DECODE && is_question &&
            (before->state == DECODE_RUNNING || before->state == DECODE_RETRACTED) &&
            before->attempt == attempt && before->stream == event->stream.v;
        bool is_left = sight.id != 0 && sight.attempt == attempt &&
                       sight.streams[0] == event->stream.v && !sight.is_decided;
        SIM_CHECK(world, !is_committed || is_left,
                  "a decode that was committed was ended by a question");
        SIM_CHECK(world, !is_left || is_committed,
                  "I8: an entry lives on after its Abort was read");
    }
}

/* I7: a live session's peer is the life that it was opened to. */
static void sim_check_incarnations(struct world *world, struct process *p,
                                   const struct event *event) {
    if (!sim_is_mail(event, MESSAGE_HELLO)) {
        return;
    }
    const struct node *node = sim_node_of(p);
    for (uint32_t i = 0; i < node->config.sessions_max; i++) {
        const struct session *session = &node->sessions[i];
        if (session->phase == SESSION_LIVE && session->stream.v == event->stream.v) {
            SIM_CHECK(world, session->incarnation.v == event->u.mail.message->u.hello.incarnation.v,
                      "I7: a session is live with another life than the one that greeted");
        }
        for (uint32_t j = 0; j < i && session->phase == SESSION_LIVE; j++) {
            const struct session *other = &node->sessions[j];
            SIM_CHECK(world,
                      other->phase != SESSION_LIVE || other->role != session->role ||
                          other->incarnation.v != session->incarnation.v,
                      "I7: two sessions with one life of a peer");
        }
    }
}

/* I17: news from discovery ends nothing. */
static void sim_check_discovery(struct world *world, const struct process *p,
                                const struct event *event) {
    if (event->kind != EVENT_WORKER_LOST || p->sessions_ended > 0) {
        return;
    }
    for (uint32_t i = 0; i < world->effects.count; i++) {
        enum effect_kind kind = world->effects.items[i].kind;
        SIM_CHECK(world, kind != EFFECT_ANSWER && kind != EFFECT_STREAM_CLOSE,
                  "I17: a deletion in etcd ended something");
    }
}

/* I5: only admission creates, one entry a step; and a prompt the other choices of its call. */
static void sim_check_created(struct world *world, struct process *p, const struct event *event) {
    const struct node *node = sim_node_of(p);
    bool may_create = p->role == ROLE_ROUTER   ? event->kind == EVENT_CLIENT_OPEN
                      : p->role == ROLE_DECODE ? sim_is_mail(event, MESSAGE_ADMIT)
                                               : sim_is_mail(event, MESSAGE_PREFILL);
    uint32_t most = may_create ? 1 : 0;
    if (p->role == ROLE_ROUTER && event->kind == EVENT_TOKENIZED) {
        most = event->u.tokenized.choices > 1 ? event->u.tokenized.choices - 1 : 0;
    }
    SIM_CHECK(world, node->ledger.created <= p->created + most,
              "I5: something other than admission created an entry");
    SIM_CHECK(world, node->ledger.created == p->created || p->retracted == 0,
              "a request was admitted past others that wait for the pages that they gave up");
    p->retracted = p->role == ROLE_DECODE ? node->ledger.in_state[DECODE_RETRACTED] : 0;
    p->created = node->ledger.created;
}

void sim_after(struct world *world, uint32_t process, const struct event *event) {
    struct process *p = &world->processes[process];
    const struct node *node = sim_node_of(p);
    if (p->role == ROLE_DECODE) {
        sim_check_abort(world, event);
    }
    if (p->role != ROLE_ROUTER) {
        sim_check_aborted(world, p, event);
    }
    sim_check_created(world, p, event);
    sim_check_discovery(world, p, event);
    p->sessions_ended = node->sessions_ended;
    sim_check_incarnations(world, p, event);
    uint32_t count = sim_shadow_count(world, p->role);
    for (uint32_t i = 0; i < count; i++) {
        sim_entry(world, p, i, sim_is_mail(event, MESSAGE_ABORT));
    }
    if (event->kind == EVENT_TICK) {
        sim_bounds(world, p);
    }
    SIM_CHECK(world, node->stats.audit_mismatch == 0, "an audit found a mismatch: a lost end");
    SIM_CHECK(world, node->stats.overrun_ns < 1500 * MS, "I3: an entry outlived its deadline");
}

/* --- what routers believe of prefix indexes ----------------------------------------------------
 */

static struct process *sim_life(struct world *world, struct incarnation incarnation) {
    for (uint32_t i = 0; i < world->process_count; i++) {
        struct process *p = &world->processes[i];
        if (p->is_alive && p->incarnation.v == incarnation.v) {
            return p;
        }
    }
    return NULL;
}

static bool sim_view_agrees(struct world *world, const struct router_core *core,
                            const struct worker *worker) {
    struct process *p = sim_life(world, worker->info.incarnation);
    if (p == NULL) {
        return false; /* its session is still to end */
    }
    const struct pages *pages = p->role == ROLE_DECODE ? &((struct decode_core *)p->core)->pages
                                                       : &((struct prefill_core *)p->core)->pages;
    uint32_t known = 0;
    for (uint32_t i = 0; i < pages->capacity; i++) {
        const struct page *page = &pages->table[i];
        known +=
            page->is_indexed && block_set_has(&core->blocks, page->block, worker->view) ? 1 : 0;
    }
    /* Nothing that is not there; and all that is, unless it was too much to remember. */
    bool is_small = core->blocks.limit == 0 || core->blocks.forgotten_total > 0;
    return worker->blocks == known && (is_small || known == pages->index.count);
}

bool sim_views_agree(struct world *world) {
    for (uint32_t i = 0; i < world->process_count; i++) {
        const struct process *p = &world->processes[i];
        if (p->role != ROLE_ROUTER || !p->is_alive) {
            continue;
        }
        const struct router_core *core = p->core;
        uint32_t cursor = 0;
        const struct worker *worker = NULL;
        while ((worker = router_worker(core, &cursor)) != NULL) {
            if (router_worker_is_live(core, worker) &&
                core->node.sessions[worker->session].protocol >= PROTOCOL_CACHED &&
                !sim_view_agrees(world, core, worker)) {
                return false;
            }
        }
    }
    return true;
}
