#include "core/router_fleet.h"

#include <string.h>

#include "base/check.h"
#include "base/prng.h"

#define FLAPS_DOUBTED 2u
#define FLAPS_MAX     4u

uint64_t fleet_model_hash(const struct router_core *core, const char *model) {
    char name[LABEL_MAX] = {0};
    text_copy(name, LABEL_MAX, model);
    return siphash128(core->config.secret, name, sizeof name).low;
}

static bool texts_equal(const char *a, const char *b, uint32_t max) {
    for (uint32_t i = 0; i < max; i++) {
        if (a[i] != b[i]) {
            return false;
        }
        if (a[i] == '\0') {
            return true;
        }
    }
    return true;
}

static bool text_equal(const char *a, const char *b) {
    return texts_equal(a, b, LABEL_MAX);
}

static struct worker *fleet_by_incarnation(struct router_core *core,
                                           struct incarnation incarnation) {
    for (uint32_t i = 0; i < core->config.workers_max; i++) {
        struct worker *worker = &core->workers[i];
        if (worker->is_used && worker->info.incarnation.v == incarnation.v) {
            return worker;
        }
    }
    return NULL;
}

static uint32_t fleet_index(const struct router_core *core, const struct worker *worker) {
    return (uint32_t)(worker - core->workers);
}

/* Whether another life answers at this worker's address. One process has one session with us: a
 * greeting for the dead one would end that of the living. */
static bool fleet_is_succeeded(const struct router_core *core, const struct worker *worker) {
    for (uint32_t i = 0; i < core->config.workers_max; i++) {
        const struct worker *other = &core->workers[i];
        if (other != worker && other->is_used && router_worker_is_live(core, other) &&
            texts_equal(other->info.address, worker->info.address, ADDRESS_MAX)) {
            return true;
        }
    }
    return false;
}

static void fleet_connect(struct router_core *core, struct worker *worker, struct effects *out) {
    if (worker->session != ROUTER_NONE || effects_room(out) < 64 ||
        fleet_is_succeeded(core, worker)) {
        return;
    }
    struct session *session = node_open(&core->node, worker->info.role, worker->info.incarnation,
                                        worker->info.address, out);
    if (session == NULL) {
        return; /* table full of ended sessions: tried again at the next tick */
    }
    text_copy(session->id, LABEL_MAX, worker->info.id);
    worker->session = node_session_index(&core->node, session);
    worker->stream = session->stream;
}

void fleet_seen(struct router_core *core, const struct worker_info *info, struct effects *out) {
    if (info->incarnation.v == 0 || (info->role != ROLE_DECODE && info->role != ROLE_PREFILL)) {
        core->node.stats.stale_events++;
        return;
    }
    struct worker *worker = fleet_by_incarnation(core, info->incarnation);
    if (worker != NULL && worker->info.role != info->role) {
        /* A process keeps its role for life; its session and the legs on it are of that one. */
        core->node.stats.stale_events++;
        return;
    }
    for (uint32_t i = 0; worker == NULL && i < core->config.workers_max; i++) {
        if (!core->workers[i].is_used) {
            worker = &core->workers[i];
            memset(worker, 0, sizeof *worker);
            worker->is_used = true;
            worker->session = ROUTER_NONE;
            worker->admit_window = ROUTER_ADMIT_WINDOW;
            worker->reconnect_after = core->node.config.timers.reconnect_first;
            node_note(out, NOTE_WORKER_SEEN, info->role, CAUSE_NONE, info->incarnation.v,
                      fleet_index(core, worker), info->id);
        }
    }
    if (worker == NULL) {
        core->node.stats.stale_events++; /* more workers than the table holds */
        return;
    }
    worker->info = *info;
    worker->is_listed = true;
    fleet_connect(core, worker, out);
    core->is_placing_due = true;
}

static void fleet_forget(struct router_core *core, struct worker *worker, struct effects *out) {
    node_note(out, NOTE_WORKER_LOST, worker->info.role, CAUSE_NONE, worker->info.incarnation.v,
              fleet_index(core, worker), worker->info.id);
    CHECK_OP(worker->session, ==, ROUTER_NONE);
    CHECK_OP(worker->attempts, ==, 0);
    worker->is_used = false;
    core->is_placing_due = true;
}

void fleet_lost(struct router_core *core, struct incarnation incarnation, struct effects *out) {
    struct worker *worker = fleet_by_incarnation(core, incarnation);
    if (worker == NULL) {
        return;
    }
    worker->is_listed = false;
    worker->gone_since = core->node.now;
    if (worker->session == ROUTER_NONE && worker->attempts == 0) {
        fleet_forget(core, worker, out);
    }
}

struct worker *fleet_of_session(struct router_core *core, const struct session *session) {
    uint32_t index = node_session_index(&core->node, session);
    for (uint32_t i = 0; i < core->config.workers_max; i++) {
        struct worker *worker = &core->workers[i];
        if (worker->is_used && worker->session == index && worker->stream.v == session->stream.v) {
            return worker;
        }
    }
    return NULL;
}

/* A link that carries a few thousand bytes, dies and is back at once would be chosen again and
 * again, since it looks idle. From its second early end on, its worker is doubted for a quarter of
 * the time that a pair is suspected, then for half, then for all of it. */
static void fleet_doubt(struct router_core *core, struct worker *worker,
                        const struct session *session) {
    struct instant trusted =
        worker->doubted_until.ns > session->since.ns ? worker->doubted_until : session->since;
    if (instant_reached(core->node.now, instant_add(trusted, core->node.config.timers.lease))) {
        worker->flaps = 0;
    } else if (worker->flaps < FLAPS_MAX) {
        worker->flaps++;
    }
    if (worker->flaps >= FLAPS_DOUBTED) {
        struct span doubt = {core->node.config.timers.suspect.ns >> (FLAPS_MAX - worker->flaps)};
        worker->is_doubted = true;
        worker->doubted_until = instant_add(core->node.now, doubt);
    }
}

/* --- what workers have cached
 * ------------------------------------------------------------------------------------- */

void fleet_view_begin(struct router_core *core, struct worker *worker) {
    worker->view = ++core->views;
    worker->blocks = 0;
}

static bool fleet_view_is_live(const void *context, const struct block_slot *slot) {
    const struct router_core *core = context;
    return core->workers[slot->holder].view == slot->view;
}

void fleet_cached(struct router_core *core, struct worker *worker, const struct message *message) {
    core->stats.block_messages++;
    if (message->u.cached.is_reset) {
        core->stats.block_resets++;
        fleet_view_begin(core, worker);
    }
    for (uint32_t i = 0; i < message->u.cached.removed_count; i++) {
        bool was_there =
            block_set_remove(&core->blocks, message->u.cached.removed[i], worker->view);
        worker->blocks -= was_there ? 1 : 0;
    }
    for (uint32_t i = 0; i < message->u.cached.stored_count; i++) {
        struct block_slot lost;
        bool is_new = block_set_add(&core->blocks, message->u.cached.stored[i], worker->view,
                                    fleet_index(core, worker), &lost);
        worker->blocks += is_new ? 1 : 0;
        if (lost.block != 0 && fleet_view_is_live(core, &lost)) {
            core->workers[lost.holder].blocks--;
        }
    }
}

void fleet_session_over(struct router_core *core, struct session *session) {
    struct worker *worker = fleet_of_session(core, session);
    if (worker == NULL) {
        return;
    }
    const struct core_timers *timers = &core->node.config.timers;
    worker->session = ROUTER_NONE;
    worker->view = 0; /* what it had cached went with the session, as far as we know */
    worker->blocks = 0;
    if (session->number != 0) { /* it was live: an attempt in vain is no sign of life */
        worker->gone_since = core->node.now;
        fleet_doubt(core, worker, session);
    }
    if (session->is_other_life) {
        /* Its own address says that it is gone: that is better than discovery's word. */
        worker->is_listed = false;
        worker->gone_since.ns = core->node.now.ns - timers->forget.ns;
    }
    worker->reconnect_at = instant_add(core->node.now, worker->reconnect_after);
    worker->reconnect_after.ns *= 2;
    if (worker->reconnect_after.ns > timers->reconnect_max.ns) {
        worker->reconnect_after = timers->reconnect_max;
    }
    core->is_placing_due = true;
}

void fleet_tick(struct router_core *core, struct effects *out) {
    uint32_t blocks = 0;
    for (uint32_t i = 0; i < core->config.workers_max; i++) {
        struct worker *worker = &core->workers[i];
        if (!worker->is_used) {
            continue;
        }
        blocks += worker->blocks;
        if (worker->busy_until.ns != 0 && instant_reached(core->node.now, worker->busy_until)) {
            worker->busy_until.ns = 0;
            core->is_placing_due = true;
        }
        if (worker->is_doubted && instant_reached(core->node.now, worker->doubted_until)) {
            worker->is_doubted = false;
            core->is_placing_due = true;
        }
        if (worker->session != ROUTER_NONE) {
            continue;
        }
        if (!worker->is_listed && worker->attempts == 0 &&
            instant_reached(core->node.now,
                            instant_add(worker->gone_since, core->node.config.timers.forget))) {
            fleet_forget(core, worker, out);
        } else if (instant_reached(core->node.now, worker->reconnect_at)) {
            fleet_connect(core, worker, out);
        }
    }
    if (core->blocks.count > blocks) { /* some are of sessions that are over */
        block_set_sweep(&core->blocks, ROUTER_SWEEP, fleet_view_is_live, core);
    }
}

/* --- choice
 * ---------------------------------------------------------------------------------------- */

/* salted: only where salts are kept apart. */
static bool fleet_keeps(const struct router_core *core, const struct worker *worker,
                        const struct request *request) {
    return !salt_is_set(request->salt) ||
           core->node.sessions[worker->session].protocol >= PROTOCOL_CACHED;
}

static bool fleet_is_eligible(const struct router_core *core, const struct worker *worker,
                              enum role role, const char *model) {
    if (!worker->is_used || worker->info.role != role || !router_worker_is_live(core, worker) ||
        !text_equal(worker->info.model, model)) {
        return false;
    }
    const struct session *session = &core->node.sessions[worker->session];
    return !worker->info.is_draining && !session->is_peer_draining;
}

/* Two beats and a half without a word: whatever is asked of it now would wait for its lease to end.
 */
static bool fleet_is_silent(const struct router_core *core, const struct worker *worker) {
    struct span patience = {5 * core->node.config.timers.beat.ns / 2};
    return instant_reached(core->node.now,
                           instant_add(core->node.sessions[worker->session].heard, patience));
}

/* Whether its sessions die young, and somebody else could take what it takes: then it is better to
 * wait for that one. Alone it is used as it is. */
static bool fleet_is_doubted(const struct router_core *core, const struct worker *worker) {
    bool is_other = false;
    for (uint32_t i = 0; i < core->config.workers_max && worker->is_doubted && !is_other; i++) {
        const struct worker *other = &core->workers[i];
        is_other = !other->is_doubted &&
                   fleet_is_eligible(core, other, worker->info.role, worker->info.model) &&
                   layout_digest_equal(other->info.layout, worker->info.layout) &&
                   other->info.context >= worker->info.context && !fleet_is_silent(core, other);
    }
    return is_other;
}

static bool fleet_is_busy(const struct router_core *core, const struct worker *worker) {
    return worker->admitting >= worker->admit_window || fleet_is_silent(core, worker) ||
           (worker->busy_until.ns != 0 && !instant_reached(core->node.now, worker->busy_until)) ||
           fleet_is_doubted(core, worker);
}

/* The prompt's blocks as this worker would name them; computed once, however often it is asked. */
static const struct router_chain *
fleet_chain(struct router_core *core, const struct request *request, const struct worker *worker) {
    uint32_t page_tokens = worker->info.page_tokens;
    for (uint32_t i = 0; i < ROUTER_CHAINS; i++) {
        const struct router_chain *chain = &core->chains[i];
        if (chain->request == request->id && chain->token_count == request->token_count &&
            chain->page_tokens == page_tokens &&
            layout_digest_equal(chain->layout, worker->info.layout)) {
            return chain;
        }
    }
    struct router_chain *chain = &core->chains[core->chain_next++ % ROUTER_CHAINS];
    const uint32_t *tokens = words_at(&core->words, request->words);
    uint32_t count = (request->token_count - 1) / page_tokens; /* the last token is never cached */
    chain->request = request->id;
    chain->token_count = request->token_count;
    chain->page_tokens = page_tokens;
    chain->layout = worker->info.layout;
    chain->count = count < ROUTER_CHAIN_MAX ? count : ROUTER_CHAIN_MAX;
    struct siphash_key key = block_key(worker->info.layout);
    uint64_t block = block_first(request->salt);
    for (uint32_t i = 0; i < chain->count; i++) {
        block = block_next(key, block, tokens + (uint64_t)i * page_tokens, page_tokens);
        chain->blocks[i] = block;
    }
    return chain;
}

/* Tokens of the prompt that this worker says to have. A canary goes everywhere in turn, so it looks
 * for nothing. */
static uint32_t fleet_hit(struct router_core *core, const struct request *request,
                          const struct worker *worker) {
    if (worker->blocks == 0 || worker->info.page_tokens == 0 || request->canary != CANARY_NONE) {
        return 0;
    }
    const struct router_chain *chain = fleet_chain(core, request, worker);
    uint32_t count = 0;
    while (count < chain->count &&
           block_set_has(&core->blocks, chain->blocks[count], worker->view)) {
        count++;
    }
    return count * worker->info.page_tokens;
}

bool fleet_pair_has_numerics(const struct worker *prefill, const struct worker *decode) {
    return text_equal(prefill->info.numerics, decode->info.numerics);
}

bool fleet_has_numerics(const struct worker *worker, const struct request *request) {
    return request->numerics[0] == '\0' || text_equal(worker->info.numerics, request->numerics);
}

/* Equals take turns: without that, a quiet cluster would use one worker of a pool for ever, and a
 * worker that came back would not be seen to work until there is load. */
static bool fleet_is_better(const struct router_core *core, const struct request *request,
                            uint64_t score, uint32_t worker, uint64_t best_score, uint32_t best) {
    if (score != best_score || score == UINT64_MAX) {
        return score < best_score;
    }
    uint32_t kind = fleet_turn_kind(request);
    return core->workers[worker].last_given[kind] < core->workers[best].last_given[kind];
}

static bool fleet_is_suspect(const struct router_core *core, const struct worker *prefill,
                             const struct worker *decode) {
    for (uint32_t i = 0; i < ROUTER_SUSPECTS; i++) {
        const struct router_suspect *suspect = &core->suspects[i];
        if (suspect->prefill.v == prefill->info.incarnation.v &&
            suspect->decode.v == decode->info.incarnation.v &&
            !instant_reached(core->node.now, suspect->until)) {
            return true;
        }
    }
    return false;
}

/* Whether no prefill worker is known to reach this decode worker, but one is known not to. */
static bool fleet_is_shunned(const struct router_core *core, const struct request *request,
                             const struct worker *decode) {
    bool is_shunned = false;
    for (uint32_t i = 0; i < ROUTER_SUSPECTS && !is_shunned; i++) {
        is_shunned = core->suspects[i].decode.v == decode->info.incarnation.v &&
                     !instant_reached(core->node.now, core->suspects[i].until);
    }
    for (uint32_t i = 0; i < core->config.workers_max && is_shunned; i++) {
        const struct worker *worker = &core->workers[i];
        is_shunned = !fleet_is_eligible(core, worker, ROLE_PREFILL, request->model) ||
                     !layout_digest_equal(worker->info.layout, decode->info.layout) ||
                     fleet_is_silent(core, worker) || fleet_is_suspect(core, worker, decode);
    }
    return is_shunned;
}

/* Below all that suspicions add to a score. */
#define FLEET_COST_MAX (1ull << 40)

/* Cost of a placement, in tokens: those of this prompt that the worker would have to compute, and
 * those that it still has to compute and to generate for others. So a cached prefix is worth what
 * it saves, and no more: once those who share it have given its holder that much more to do than
 * another worker has, the next one goes to the other, which then holds it too. */
static uint64_t fleet_score(uint64_t uncached, uint64_t due, uint32_t attempts) {
    uint64_t cost = uncached + due < FLEET_COST_MAX ? uncached + due : FLEET_COST_MAX;
    return (cost << 16) + (attempts < UINT16_MAX ? attempts : UINT16_MAX);
}

enum fleet_answer fleet_choose_decode(struct router_core *core, const struct request *request,
                                      struct fleet_choice *chosen_out) {
    uint64_t total = (uint64_t)request->prompt_count + request->max_tokens;
    uint64_t best_score = UINT64_MAX;
    uint32_t largest = 1;
    bool is_any = false;
    for (uint32_t i = 0; i < core->config.workers_max; i++) {
        const struct worker *worker = &core->workers[i];
        if (worker->is_used && worker->info.role == ROLE_DECODE &&
            worker->info.kv_tokens > largest) {
            largest = worker->info.kv_tokens;
        }
    }
    for (uint32_t i = 0; i < core->config.workers_max; i++) {
        const struct worker *worker = &core->workers[i];
        if (!fleet_is_eligible(core, worker, ROLE_DECODE, request->model) ||
            total > worker->info.context || !fleet_keeps(core, worker, request)) {
            continue;
        }
        is_any = true;
        if (fleet_is_busy(core, worker)) {
            continue;
        }
        bool is_preferred = request->prefer != 0 && request->prefer == worker->info.incarnation.v;
        uint32_t cached = fleet_hit(core, request, worker);
        /* Who has half the room is taken to be half as fast. */
        uint32_t room = worker->info.kv_tokens > 0 ? worker->info.kv_tokens : 1;
        uint64_t due = worker->tokens_due * largest / room;
        if (is_preferred) { /* another choice of its call has the whole prompt there */
            cached = request->token_count - 1;
            due = 0;
        }
        uint64_t score = fleet_score(request->token_count - cached, due, worker->attempts);
        if (!fleet_has_numerics(worker, request)) {
            score += UINT64_MAX / 2; /* the same tokens only where the same arithmetic is done */
        }
        if (fleet_is_shunned(core, request, worker)) {
            score += UINT64_MAX / 4; /* it looks idle because nothing arrives there */
        }
        if (fleet_is_better(core, request, score, i, best_score, chosen_out->worker)) {
            best_score = score;
            *chosen_out = (struct fleet_choice){.worker = i, .cached = cached};
        }
    }
    if (best_score != UINT64_MAX) {
        return FLEET_CHOSEN;
    }
    return is_any ? FLEET_BUSY : FLEET_NONE;
}

void fleet_suspect(struct router_core *core, uint32_t prefill, uint32_t decode) {
    core->suspects[core->suspect_next++ % ROUTER_SUSPECTS] = (struct router_suspect){
        .prefill = core->workers[prefill].info.incarnation,
        .decode = core->workers[decode].info.incarnation,
        .until = instant_add(core->node.now, core->node.config.timers.suspect)};
}

enum fleet_answer fleet_choose_prefill(struct router_core *core, const struct request *request,
                                       uint32_t decode, struct fleet_choice *chosen_out) {
    const struct worker *target = &core->workers[decode];
    uint64_t best_score = UINT64_MAX;
    bool is_any = false;
    bool is_trusted = false; /* there is one that could talk to D, once it has room */
    for (uint32_t i = 0; i < core->config.workers_max; i++) {
        const struct worker *worker = &core->workers[i];
        if (!fleet_is_eligible(core, worker, ROLE_PREFILL, request->model) ||
            !layout_digest_equal(worker->info.layout, target->info.layout) ||
            worker->info.kv_tokens < request->token_count || !fleet_keeps(core, worker, request)) {
            continue;
        }
        bool is_suspect = fleet_is_suspect(core, worker, target);
        is_any = true;
        is_trusted = is_trusted || (!is_suspect && !fleet_is_silent(core, worker));
        if (fleet_is_busy(core, worker)) {
            continue;
        }
        /* Our own part is known exactly, all routers' only from its last beat. */
        uint64_t due = core->node.sessions[worker->session].peer_backlog_tokens;
        due = due > worker->tokens_due ? due : worker->tokens_due;
        uint32_t cached = fleet_hit(core, request, worker);
        uint64_t score = fleet_score(request->token_count - cached, due, 0);
        if (!fleet_pair_has_numerics(worker, target)) {
            score += UINT64_MAX / 4; /* KV of other arithmetic: other tokens than D alone gives */
        }
        if (is_suspect) {
            score += UINT64_MAX / 2; /* a probe, when there is no other */
        }
        if (fleet_is_better(core, request, score, i, best_score, chosen_out->worker)) {
            best_score = score;
            *chosen_out = (struct fleet_choice){.worker = i, .cached = cached};
        }
    }
    /* A pair that fails at once always has room: nobody is sent there because others are busy. */
    if (best_score != UINT64_MAX && (best_score < UINT64_MAX / 2 || !is_trusted)) {
        return FLEET_CHOSEN;
    }
    return is_any ? FLEET_BUSY : FLEET_NONE;
}

/* --- models
 * ------------------------------------------------------------------------------------------ */

struct fleet_model fleet_model(const struct router_core *core, const char *model) {
    struct fleet_model out = {0};
    for (uint32_t i = 0; i < core->config.workers_max; i++) {
        const struct worker *worker = &core->workers[i];
        if (!worker->is_used || !text_equal(worker->info.model, model)) {
            continue;
        }
        out.is_known = true;
        out.vocab = worker->info.vocab;
        if (worker->info.role == ROLE_DECODE) {
            out.context = worker->info.context > out.context ? worker->info.context : out.context;
            out.kv_tokens =
                worker->info.kv_tokens > out.kv_tokens ? worker->info.kv_tokens : out.kv_tokens;
        }
    }
    return out;
}

bool fleet_is_empty(const struct router_core *core) {
    for (uint32_t i = 0; i < core->config.workers_max; i++) {
        if (core->workers[i].is_used) {
            return false;
        }
    }
    return true;
}

void fleet_model_names(const struct router_core *core, struct writer *writer) {
    for (uint32_t i = 0; i < core->config.workers_max; i++) {
        const struct worker *worker = &core->workers[i];
        bool is_first = worker->is_used;
        for (uint32_t j = 0; j < i && is_first; j++) {
            is_first = !(core->workers[j].is_used &&
                         text_equal(core->workers[j].info.model, worker->info.model));
        }
        if (is_first) {
            writer_printf(writer, "%s%s", writer->len > 0 ? ", " : "", worker->info.model);
        }
    }
}

/* A worker that may be given requests now, if it has room. */
static bool fleet_is_usable(const struct router_core *core, const struct worker *worker) {
    return worker->is_used &&
           fleet_is_eligible(core, worker, worker->info.role, worker->info.model);
}

void router_canary_facts(const struct router_core *core, uint64_t turn, struct canary_facts *facts,
                         char model_out[LABEL_MAX]) {
    *facts = (struct canary_facts){.is_draining = core->node.is_draining,
                                   .user_progress = core->stats.tokens + core->stats.answers_ok};
    for (uint32_t i = 0; i < core->config.workers_max; i++) {
        const struct worker *worker = &core->workers[i];
        if (fleet_is_usable(core, worker)) {
            facts->decodes += worker->info.role == ROLE_DECODE ? 1 : 0;
            facts->prefills += worker->info.role == ROLE_PREFILL ? 1 : 0;
            facts->fleet_progress += core->node.sessions[worker->session].peer_progress;
        }
    }
    model_out[0] = '\0';
    uint64_t left = facts->decodes > 0 ? turn % facts->decodes : 0;
    for (uint32_t i = 0; i < core->config.workers_max && model_out[0] == '\0'; i++) {
        const struct worker *worker = &core->workers[i];
        if (worker->info.role != ROLE_DECODE || !fleet_is_usable(core, worker)) {
            continue;
        }
        if (left == 0) {
            text_copy(model_out, LABEL_MAX, worker->info.model);
        }
        left--;
    }
    for (uint32_t i = 0; i < core->config.workers_max; i++) {
        const struct worker *worker = &core->workers[i];
        facts->has_prefill = facts->has_prefill ||
                             (worker->info.role == ROLE_PREFILL && fleet_is_usable(core, worker) &&
                              text_equal(worker->info.model, model_out));
    }
}

bool router_has_pair(const struct router_core *core, const char *model) {
    for (uint32_t i = 0; i < core->config.workers_max; i++) {
        const struct worker *worker = &core->workers[i];
        if (worker->is_used && worker->info.role == ROLE_DECODE &&
            router_worker_is_live(core, worker) &&
            (model[0] == '\0' || text_equal(worker->info.model, model))) {
            return true; /* D alone can serve: it prefills what no prefill worker takes */
        }
    }
    return false;
}

const struct worker *router_worker(const struct router_core *core, uint32_t *cursor) {
    while (*cursor < core->config.workers_max) {
        const struct worker *worker = &core->workers[(*cursor)++];
        if (worker->is_used) {
            return worker;
        }
    }
    return NULL;
}
