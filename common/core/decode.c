#include "core/decode.h"

#include <string.h>

#include "base/check.h"
#include "base/prng.h"

#define ROUTER_LINKS(core) &(core)->entries[0].router_link, (uint32_t)sizeof(struct decode_entry)
#define PEER_LINKS(core)   &(core)->entries[0].peer_link, (uint32_t)sizeof(struct decode_entry)
#define RUN_LINKS(core)    &(core)->entries[0].run_link, (uint32_t)sizeof(struct decode_entry)
#define ORDER_LINKS(core)  &(core)->entries[0].order_link, (uint32_t)sizeof(struct decode_entry)

/* Words kept for each token of KV capacity, at most: requests ask for far more tokens than they
 * come to need, so their buffers are many times what the pages hold. 256 bytes a token beside the
 * KV's thousands. */
#define WORDS_PER_TOKEN 64u

/* One entry's end appends at most: End, Refuse, Disarm. */
#define EFFECTS_PER_END 4u

const char *decode_state_name(uint32_t state) {
    switch ((enum decode_state)state) {
    case DECODE_NONE: return "none";
    case DECODE_RESERVED: return "reserved";
    case DECODE_RECEIVING: return "receiving";
    case DECODE_RUNNING: return "running";
    case DECODE_RETRACTED: return "retracted";
    case DECODE_LEAVING: return "leaving";
    }
    return "unknown";
}

/* Room for the tokens and page tables of all entries, however much each asks for; where that were
 * more than WORDS_PER_TOKEN allows, the words are one more thing that can be full at Admit. */
static uint32_t decode_words(const struct decode_config *config) {
    uint64_t capacity = (uint64_t)config->page_count * config->page_tokens;
    uint64_t tokens = config->context < capacity ? config->context : capacity;
    uint64_t each = WORDS_UNIT;
    while (each < tokens + tokens / config->page_tokens + 1) {
        each *= 2;
    }
    uint64_t all = each * config->entries_max;
    uint64_t most = capacity * WORDS_PER_TOKEN + (uint64_t)config->entries_max * WORDS_UNIT * 2;
    all = all < most ? all : most;
    return all > 1u << 30 ? 1u << 30 : (uint32_t)all;
}

static void decode_layout(struct decode_core *core, const struct decode_config *config,
                          struct arena *arena) {
    uint32_t pages_row_max = (config->context + config->page_tokens - 1) / config->page_tokens + 1;
    uint64_t row_pages = (uint64_t)config->rows_max * pages_row_max;
    node_init(&core->node, &config->node, arena);
    void *slots = arena_take(arena, pool_bytes(config->entries_max));
    core->entries = arena_take(arena, (uint64_t)config->entries_max * sizeof *core->entries);
    void *attempts = arena_take(arena, map_bytes(config->entries_max));
    words_init(&core->words, decode_words(config), arena);
    pages_init(&core->pages,
               &(struct pages_config){.capacity = config->page_count,
                                      .page_tokens = config->page_tokens,
                                      .changes_max = config->changes_max,
                                      .secret = config->secret,
                                      .model = config->node.layout},
               arena);
    publisher_init(&core->publisher, config->node.sessions_max, arena);
    core->rows = arena_take(arena, (uint64_t)config->rows_max * sizeof *core->rows);
    core->row_tokens = arena_take(arena, (uint64_t)config->step_tokens_max * sizeof(uint32_t));
    core->row_pages = arena_take(arena, row_pages * sizeof(uint32_t));
    core->out_attempts = arena_take(arena, (uint64_t)config->rows_max * sizeof(uint64_t));
    core->out_tokens = arena_take(arena, (uint64_t)config->rows_max * sizeof(uint32_t));
    uint64_t tops = (uint64_t)config->rows_max * LOGPROBS_TOP_MAX;
    core->out_logprobs = arena_take(arena, (uint64_t)config->rows_max * sizeof(float));
    core->out_top_counts = arena_take(arena, (uint64_t)config->rows_max * sizeof(uint32_t));
    core->out_top_tokens = arena_take(arena, tops * sizeof(uint32_t));
    core->out_top_logprobs = arena_take(arena, tops * sizeof(float));
    core->results = arena_take(arena, (uint64_t)config->rows_max * sizeof *core->results);
    core->finish = arena_take(arena, config->rows_max);
    core->ids = arena_take(arena, (uint64_t)MESSAGE_IDS_MAX * sizeof(uint64_t));
    if (slots == NULL) {
        return;
    }
    core->row_pages_cap = (uint32_t)row_pages;
    pool_init(&core->slots, config->entries_max, slots);
    map_init(&core->by_attempt, config->entries_max, attempts);
    list_init(&core->run);
    list_init(&core->fill);
    list_init(&core->active);
    list_init(&core->retracted);
    budget_init(&core->budget, config->step_tokens_max);
    core->config = *config;
}

uint64_t decode_bytes(const struct decode_config *config) {
    struct decode_core scratch;
    struct arena arena;
    arena_init(&arena, NULL, 0);
    decode_layout(&scratch, config, &arena);
    return arena.len;
}

void decode_init(struct decode_core *core, const struct decode_config *config, void *memory) {
    CHECK(config->rows_max > 0 && config->rows_max <= STEP_ROWS_MAX);
    CHECK(config->step_tokens_max >= config->rows_max && config->shared_min > 0);
    CHECK(config->entries_max > 0 && config->page_count > 0 && config->page_tokens > 0);
    memset(core, 0, sizeof *core);
    struct arena arena;
    arena_init(&arena, memory, decode_bytes(config));
    decode_layout(core, config, &arena);
}

/* --- entries -------------------------------------------------------------------------------------
 */

static uint32_t decode_index(const struct decode_core *core, const struct decode_entry *entry) {
    return (uint32_t)(entry - core->entries);
}

static uint32_t *decode_tokens(const struct decode_core *core, const struct decode_entry *entry) {
    return words_at(&core->words, entry->words);
}

static uint32_t *decode_pages(const struct decode_core *core, const struct decode_entry *entry) {
    return words_at(&core->words, entry->words) + entry->total_max;
}

static uint32_t decode_operations(const struct decode_entry *entry) {
    return (entry->is_armed ? 1u : 0u) + (entry->is_in_step ? 1u : 0u);
}

static uint64_t decode_attempt_hash(struct stream_id stream, struct attempt_id attempt) {
    return mix64(stream.v) ^ attempt.v;
}

static struct decode_entry *decode_by_slot(struct decode_core *core, struct slot_id slot) {
    uint32_t index = 0;
    return pool_find(&core->slots, slot.v, &index) ? &core->entries[index] : NULL;
}

static struct decode_entry *decode_by_attempt(struct decode_core *core,
                                              const struct session *session,
                                              struct attempt_id attempt) {
    uint32_t cursor = 0;
    for (;;) {
        uint32_t at =
            map_next(&core->by_attempt, decode_attempt_hash(session->stream, attempt), &cursor);
        if (at == UINT32_MAX) {
            return NULL;
        }
        struct decode_entry *entry = &core->entries[at];
        if (entry->attempt.v == attempt.v && entry->router_stream.v == session->stream.v) {
            return entry;
        }
    }
}

/* Whether its hand-off is over: it runs, or waits to run again. */
static bool decode_is_committed(const struct decode_entry *entry) {
    return entry->state == DECODE_RUNNING || entry->state == DECODE_RETRACTED;
}

/* Pages that it may take before its next reserve_tokens tokens, or the rest of its answer, have
 * their KV. The last token of an answer needs none. */
static uint32_t decode_growth(const struct decode_core *core, const struct decode_entry *entry,
                              uint32_t held) {
    uint64_t ahead = (uint64_t)entry->token_count + core->config.reserve_tokens;
    uint32_t most = entry->total_max - 1;
    uint32_t pages = pages_for(&core->pages, ahead < most ? (uint32_t)ahead : most);
    return pages > held ? pages - held : 0;
}

/* Its share of what admission keeps free, after its state, pages or tokens have changed. */
static void decode_account(struct decode_core *core, struct decode_entry *entry) {
    bool may_grow = entry->state == DECODE_RESERVED || entry->state == DECODE_RECEIVING ||
                    entry->state == DECODE_RUNNING;
    uint32_t growth = may_grow ? decode_growth(core, entry, entry->page_count) : 0;
    core->growth += growth;
    core->growth -= entry->growth;
    entry->growth = growth;
}

static void decode_move(struct decode_core *core, struct decode_entry *entry,
                        enum decode_state state, struct instant deadline) {
    ledger_move(&core->node, entry->state, state);
    entry->state = state;
    entry->state_since = core->node.now;
    entry->state_deadline = deadline;
    decode_account(core, entry);
    node_progressed(&core->node);
}

/* Into a list that is in order of admission. Most arrive as the youngest. */
static void decode_enlist(struct decode_core *core, struct list *list, struct decode_entry *entry) {
    uint32_t after = list->tail;
    while (after != LIST_NONE && core->entries[after].order > entry->order) {
        after = core->entries[after].order_link.prev;
    }
    list_insert(list, ORDER_LINKS(core), decode_index(core, entry), after);
}

/* Memory returns: only when decided and quiet. */
static void decode_settle(struct decode_core *core, struct decode_entry *entry) {
    if (entry->state != DECODE_LEAVING || decode_operations(entry) > 0) {
        return;
    }
    CHECK(!entry->router_link.is_linked && !entry->peer_link.is_linked &&
          !entry->run_link.is_linked && !entry->order_link.is_linked && entry->growth == 0);
    pages_release(&core->pages, decode_pages(core, entry), entry->page_count);
    words_free(&core->words, entry->words);
    CHECK(map_remove(&core->by_attempt, decode_attempt_hash(entry->router_stream, entry->attempt),
                     decode_index(core, entry)));
    struct terminal terminal = {.id = entry->id,
                                .attempt = entry->attempt.v,
                                .router = entry->router_incarnation.v,
                                .at = core->node.now,
                                .age = instant_since(core->node.now, entry->since),
                                .state = entry->decided_in,
                                .outcome = (uint8_t)entry->outcome,
                                .cause = (uint8_t)entry->cause};
    text_copy(terminal.label, sizeof terminal.label, entry->label);
    ledger_end(&core->node, entry->state, &terminal, instant_since(core->node.now, entry->decided));
    pool_free(&core->slots, entry->id);
    memset(entry, 0, sizeof *entry);
}

static void decode_unlink(struct decode_core *core, struct decode_entry *entry) {
    uint32_t at = decode_index(core, entry);
    if (entry->router_link.is_linked) {
        list_remove(&core->node.sessions[entry->router].entries, ROUTER_LINKS(core), at);
    }
    if (entry->peer_link.is_linked) {
        list_remove(&core->node.sessions[entry->peer].entries, PEER_LINKS(core), at);
    }
    list_remove(entry->is_filling ? &core->fill : &core->run, RUN_LINKS(core), at);
    list_remove(entry->state == DECODE_RETRACTED ? &core->retracted : &core->active,
                ORDER_LINKS(core), at);
    core->resume_room = INT64_MIN; /* the next in the queue may need less */
}

static void decode_disarm(struct decode_entry *entry, struct effects *out) {
    if (entry->is_armed && !entry->is_disarming) {
        entry->is_disarming = true;
        effects_add(out, EFFECT_LINK_DISARM)->u.disarm.slot.v = entry->id;
    }
}

/* Decides an entry's outcome, once: tells R, tells a P that is still sending, starts to leave. */
static void decode_decide(struct decode_core *core, struct decode_entry *entry,
                          enum outcome outcome, enum cause cause, enum finish finish,
                          struct effects *out) {
    if (entry->state == DECODE_LEAVING) {
        return;
    }
    entry->outcome = outcome;
    entry->cause = cause;
    entry->decided_in = (uint8_t)entry->state;
    entry->decided = core->node.now;
    struct session *router = &core->node.sessions[entry->router];
    struct message *end = node_send(&core->node, router, MESSAGE_END, out);
    end->u.end.attempt = entry->attempt;
    end->u.end.outcome = outcome;
    end->u.end.cause = cause;
    end->u.end.finish = finish;
    end->u.end.usage.prompt_tokens = entry->prompt_count;
    /* What neither of the two computed: P begins where its own cache ends. */
    end->u.end.usage.cached_tokens =
        entry->cached_peer > entry->cached ? entry->cached_peer : entry->cached;
    end->u.end.usage.completion_tokens = entry->token_count - entry->prompt_count;
    end->u.end.kv_bytes = entry->received;
    if (entry->state == DECODE_RECEIVING && cause != CAUSE_PEER_ABORT) {
        struct session *peer = &core->node.sessions[entry->peer];
        struct message *refuse = node_send(&core->node, peer, MESSAGE_REFUSE, out);
        refuse->u.refuse.slot.v = entry->id;
        refuse->u.refuse.cause = cause;
    }
    if (entry->state == DECODE_RUNNING && cause != CAUSE_STEP_FAILED) {
        /* Whatever is computed stays useful, however the request ended: every row of it is whole.
         * But rows that led to logits which are no numbers may be none themselves. */
        pages_index(&core->pages, entry->salt, decode_tokens(core, entry),
                    decode_pages(core, entry), 0, entry->computed / core->config.page_tokens);
    }
    decode_disarm(entry, out);
    decode_unlink(core, entry);
    decode_move(core, entry, DECODE_LEAVING,
                instant_add(core->node.now, core->node.config.timers.leave));
    entry->deadline = entry->state_deadline;
    decode_settle(core, entry);
}

/* --- admission
 * ------------------------------------------------------------------------------------ */

static void decode_reject(struct decode_core *core, struct session *session,
                          struct attempt_id attempt, enum cause cause, struct effects *out) {
    struct message *message = node_send(&core->node, session, MESSAGE_REJECTED, out);
    message->u.rejected.attempt = attempt;
    message->u.rejected.cause = cause;
    message->u.rejected.retry_after_ms =
        cause == CAUSE_BUSY ? (uint32_t)span_to_ms(core->node.config.timers.busy) : 0;
}

/* Why this Admit can never be served here, or CAUSE_NONE. */
static enum cause decode_admissible(const struct decode_core *core, const struct message *admit) {
    uint64_t total = (uint64_t)admit->u.admit.token_count + admit->u.admit.max_new;
    if (admit->u.admit.token_count == 0 || admit->u.admit.max_new == 0 ||
        admit->u.admit.output_first > admit->u.admit.token_count) {
        return CAUSE_INVALID;
    }
    if (total > core->config.context ||
        pages_for(&core->pages, (uint32_t)total) > core->config.page_count) {
        return CAUSE_TOO_LARGE;
    }
    for (uint32_t i = 0; i < admit->u.admit.token_count; i++) {
        if (admit->u.admit.tokens[i] >= core->config.vocab) {
            return CAUSE_INVALID;
        }
    }
    if (core->node.is_draining) {
        return CAUSE_DRAINING;
    }
    /* Those that were retracted come first: else new ones would take the room that they wait for,
     * and would be retracted in their turn. */
    return core->retracted.count > 0 ? CAUSE_BUSY : CAUSE_NONE;
}

/* Takes pages for the tokens that it has, cached ones first, or nothing. is_pressing: also where
 * that leaves the others less than their growth. */
static enum status decode_take_pages(struct decode_core *core, struct decode_entry *entry,
                                     bool is_pressing) {
    uint32_t *table = decode_pages(core, entry);
    uint32_t count = pages_for(&core->pages, entry->token_count);
    /* The last token is always computed here, so it is never taken from the cache. */
    uint32_t matched = pages_match(&core->pages, entry->salt, decode_tokens(core, entry),
                                   (entry->token_count - 1) / core->config.page_tokens, table);
    uint64_t wanted = count - matched;
    if (!is_pressing) {
        wanted += core->growth + decode_growth(core, entry, count);
    }
    if (wanted > pages_available(&core->pages) ||
        pages_take(&core->pages, count - matched, table + matched) != STATUS_OK) {
        pages_release(&core->pages, table, matched);
        return STATUS_BUSY;
    }
    entry->page_count = count;
    entry->computed = matched * core->config.page_tokens;
    return STATUS_OK;
}

/* Takes room for the tokens of the whole request and pages for its prompt, or nothing. */
static enum status decode_reserve(struct decode_core *core, struct decode_entry *entry,
                                  const struct message *admit) {
    uint32_t total_pages = pages_for(&core->pages, entry->total_max);
    enum status status = words_take(&core->words, entry->total_max + total_pages, &entry->words);
    if (status != STATUS_OK) {
        return status;
    }
    memcpy(decode_tokens(core, entry), admit->u.admit.tokens,
           entry->token_count * sizeof(uint32_t));
    status = decode_take_pages(core, entry, false);
    if (status != STATUS_OK) {
        words_free(&core->words, entry->words);
        return status;
    }
    entry->cached = entry->computed;
    pages_count(&core->pages, entry->token_count, entry->cached);
    return STATUS_OK;
}

static void decode_start_running(struct decode_core *core, struct decode_entry *entry) {
    entry->is_filling = entry->token_count - entry->computed > 1;
    list_push_back(entry->is_filling ? &core->fill : &core->run, RUN_LINKS(core),
                   decode_index(core, entry));
    decode_enlist(core, &core->active, entry);
}

static void decode_admit(struct decode_core *core, struct session *session,
                         const struct message *admit, struct effects *out) {
    struct attempt_id attempt = admit->u.admit.attempt;
    if (attempt.v == 0 || decode_by_attempt(core, session, attempt) != NULL) {
        node_end(&core->node, session, CAUSE_SESSION_ERROR, out);
        return;
    }
    enum cause refused = decode_admissible(core, admit);
    uint64_t id = 0;
    if (refused == CAUSE_NONE && pool_take(&core->slots, &id) != STATUS_OK) {
        refused = CAUSE_BUSY;
    }
    if (refused != CAUSE_NONE) {
        decode_reject(core, session, attempt, refused, out);
        return;
    }
    struct decode_entry *entry = &core->entries[pool_index(id)];
    *entry = (struct decode_entry){.id = id,
                                   .attempt = attempt,
                                   .order = core->admissions,
                                   .router = node_session_index(&core->node, session),
                                   .router_stream = session->stream,
                                   .router_incarnation = session->incarnation,
                                   .words = WORDS_NONE,
                                   .token_count = admit->u.admit.token_count,
                                   .prompt_count = admit->u.admit.token_count,
                                   .output_first = admit->u.admit.output_first,
                                   .max_new = admit->u.admit.max_new,
                                   .total_max = admit->u.admit.token_count + admit->u.admit.max_new,
                                   .sampling = admit->u.admit.sampling,
                                   .salt = admit->u.admit.salt,
                                   .since = core->node.now,
                                   .state_since = core->node.now,
                                   .moved = core->node.now};
    if (decode_reserve(core, entry, admit) != STATUS_OK) {
        pool_free(&core->slots, id);
        memset(entry, 0, sizeof *entry);
        decode_reject(core, session, attempt, CAUSE_BUSY, out);
        return;
    }
    struct siphash128 key =
        siphash128(core->config.secret, &core->admissions, sizeof core->admissions);
    core->admissions++;
    entry->key = key.low;
    text_copy(entry->label, LABEL_MAX, admit->u.admit.label);
    entry->deadline = instant_add(core->node.now, span_ms(admit->u.admit.deadline_ms));
    uint32_t uncached = entry->token_count - 1 - entry->cached;
    bool is_local = uncached <= admit->u.admit.local_max;
    entry->state = is_local ? DECODE_RUNNING : DECODE_RESERVED;
    entry->state_deadline =
        is_local ? entry->deadline : instant_add(core->node.now, core->node.config.timers.open);
    decode_account(core, entry);
    ledger_create(&core->node, entry->state);
    map_add(&core->by_attempt, decode_attempt_hash(session->stream, attempt), pool_index(id));
    list_push_back(&session->entries, ROUTER_LINKS(core), pool_index(id));
    if (is_local) {
        decode_start_running(core, entry);
    }
    struct message *admitted = node_send(&core->node, session, MESSAGE_ADMITTED, out);
    admitted->u.admitted.attempt = attempt;
    admitted->u.admitted.slot.v = id;
    admitted->u.admitted.key = entry->key;
    admitted->u.admitted.cached = entry->cached;
    admitted->u.admitted.is_local = is_local;
}

/* --- the hand-off
 * ----------------------------------------------------------------------------------- */

static void decode_refuse(struct decode_core *core, struct session *session, struct slot_id slot,
                          enum cause cause, struct effects *out) {
    struct message *message = node_send(&core->node, session, MESSAGE_REFUSE, out);
    message->u.refuse.slot = slot;
    message->u.refuse.cause = cause;
}

static void decode_open(struct decode_core *core, struct session *session,
                        const struct message *open, struct effects *out) {
    struct decode_entry *entry = decode_by_slot(core, open->u.open.slot);
    if (entry == NULL || entry->state != DECODE_RESERVED) {
        decode_refuse(core, session, open->u.open.slot, CAUSE_UNKNOWN_SLOT, out);
        return;
    }
    if (entry->key != open->u.open.key) {
        /* Whoever guesses slots must not be able to end them: the entry stays as it is. */
        decode_refuse(core, session, open->u.open.slot, CAUSE_BAD_KEY, out);
        return;
    }
    uint32_t end = entry->prompt_count - 1;
    uint64_t bytes = (uint64_t)(end - entry->cached) * core->config.token_bytes;
    if (open->u.open.from != entry->cached || open->u.open.end != end ||
        open->u.open.bytes != bytes) {
        decode_refuse(core, session, open->u.open.slot, CAUSE_SHORT, out);
        return;
    }
    entry->peer = node_session_index(&core->node, session);
    entry->peer_stream = session->stream;
    entry->announced = bytes;
    list_push_back(&session->entries, PEER_LINKS(core), decode_index(core, entry));
    entry->is_armed = true;
    entry->moved = core->node.now;
    struct effect *arm = effects_add(out, EFFECT_LINK_ARM);
    arm->u.arm.slot.v = entry->id;
    arm->u.arm.key = entry->key;
    arm->u.arm.token_first = entry->cached;
    arm->u.arm.token_end = end;
    arm->u.arm.pages = decode_pages(core, entry);
    arm->u.arm.page_count = entry->page_count;
    struct message *accept = node_send(&core->node, session, MESSAGE_ACCEPT, out);
    accept->u.accept.slot.v = entry->id;
    accept->u.accept.address = core->config.address;
    accept->u.accept.address_len = core->config.address_len;
    decode_move(core, entry, DECODE_RECEIVING, entry->deadline);
}

/* Commit needs coverage (I12) and the announced total; checked on every arrival of either. */
static void decode_try_commit(struct decode_core *core, struct decode_entry *entry,
                              struct effects *out) {
    if (!entry->is_covered || !entry->is_fin_seen) {
        return;
    }
    entry->computed = entry->prompt_count - 1;
    pages_index(&core->pages, entry->salt, decode_tokens(core, entry), decode_pages(core, entry), 0,
                entry->computed / core->config.page_tokens);
    struct session *peer = &core->node.sessions[entry->peer];
    node_send(&core->node, peer, MESSAGE_COMMIT, out)->u.commit.slot.v = entry->id;
    list_remove(&peer->entries, PEER_LINKS(core), decode_index(core, entry));
    decode_disarm(entry, out);
    core->commits++;
    histogram_add(&core->transfer, instant_since(core->node.now, entry->state_since));
    decode_move(core, entry, DECODE_RUNNING, entry->deadline);
    decode_start_running(core, entry);
}

static void decode_fin(struct decode_core *core, struct session *session, const struct message *fin,
                       struct effects *out) {
    struct decode_entry *entry = decode_by_slot(core, fin->u.fin.slot);
    if (entry == NULL || entry->peer_stream.v != session->stream.v ||
        (entry->state != DECODE_RECEIVING && !decode_is_committed(entry))) {
        decode_refuse(core, session, fin->u.fin.slot, CAUSE_UNKNOWN_SLOT, out);
        return;
    }
    if (decode_is_committed(entry)) {
        node_send(&core->node, session, MESSAGE_COMMIT, out)->u.commit.slot.v = entry->id;
        return;
    }
    if (fin->u.fin.bytes != entry->announced) {
        decode_decide(core, entry, OUTCOME_FAILED, CAUSE_SHORT, FINISH_ERROR, out);
        return;
    }
    entry->is_fin_seen = true;
    entry->cached_peer = fin->u.fin.cached < entry->prompt_count ? fin->u.fin.cached : 0;
    entry->moved = core->node.now; /* T_stall runs from the announcement */
    decode_try_commit(core, entry, out);
}

static void decode_abort(struct decode_core *core, struct session *session,
                         const struct message *abort, struct effects *out) {
    struct decode_entry *entry = decode_by_attempt(core, session, abort->u.abort.attempt);
    if (abort->u.abort.is_unless_committed && entry != NULL && decode_is_committed(entry)) {
        node_send(&core->node, session, MESSAGE_COMMITTED, out)->u.committed.attempt =
            abort->u.abort.attempt;
        return;
    }
    if (entry == NULL || entry->state == DECODE_LEAVING) {
        if (abort->u.abort.is_unless_committed) {
            struct message *end = node_send(&core->node, session, MESSAGE_END, out);
            end->u.end.attempt = abort->u.abort.attempt;
            end->u.end.outcome = OUTCOME_ABORTED;
            end->u.end.cause = abort->u.abort.cause;
            end->u.end.finish = FINISH_ABORT;
        }
        return;
    }
    decode_decide(core, entry, OUTCOME_ABORTED, abort->u.abort.cause, FINISH_ABORT, out);
}

static void decode_abort_slot(struct decode_core *core, struct session *session,
                              const struct message *message, struct effects *out) {
    struct decode_entry *entry = decode_by_slot(core, message->u.refuse.slot);
    if (entry != NULL && entry->state == DECODE_RECEIVING &&
        entry->peer_stream.v == session->stream.v) {
        decode_decide(core, entry, OUTCOME_FAILED, CAUSE_PEER_ABORT, FINISH_ERROR, out);
    }
}

/* --- audits
 * ------------------------------------------------------------------------------------------ */

/* Whether we hold what a peer says it holds with us. */
static bool decode_holds(struct decode_core *core, const struct session *session, uint64_t id) {
    if (session->role == ROLE_ROUTER) {
        struct decode_entry *entry = decode_by_attempt(core, session, (struct attempt_id){id});
        return entry != NULL && entry->state != DECODE_LEAVING;
    }
    struct decode_entry *entry = decode_by_slot(core, (struct slot_id){id});
    return entry != NULL && entry->peer_stream.v == session->stream.v &&
           (entry->state == DECODE_RECEIVING || decode_is_committed(entry));
}

static void decode_audited(struct decode_core *core, struct session *session,
                           const struct message *audit, struct effects *out) {
    uint32_t count = 0;
    uint64_t *ids = core->ids;
    for (uint32_t i = 0; i < audit->u.audit.count && count < MESSAGE_IDS_MAX; i++) {
        if (!decode_holds(core, session, audit->u.audit.ids[i])) {
            ids[count++] = audit->u.audit.ids[i];
        }
    }
    if (count > 0) {
        struct message *unknown = node_send(&core->node, session, MESSAGE_UNKNOWN, out);
        unknown->u.audit.count = count;
        unknown->u.audit.ids = ids;
        core->ids_used = count;
    }
}

static void decode_unknown(struct decode_core *core, struct session *session,
                           const struct message *unknown, struct effects *out) {
    for (uint32_t i = 0; i < unknown->u.audit.count && effects_room(out) > 8 * EFFECTS_PER_END;
         i++) {
        uint64_t id = unknown->u.audit.ids[i];
        struct decode_entry *entry = session->role == ROLE_ROUTER
                                         ? decode_by_attempt(core, session, (struct attempt_id){id})
                                         : decode_by_slot(core, (struct slot_id){id});
        if (entry == NULL || entry->state == DECODE_LEAVING ||
            (session->role == ROLE_PREFILL &&
             (entry->state != DECODE_RECEIVING || entry->peer_stream.v != session->stream.v))) {
            continue;
        }
        core->node.stats.audit_mismatch++;
        node_note(out, NOTE_AUDIT_MISMATCH, session->role, CAUSE_AUDIT, entry->id, entry->attempt.v,
                  entry->label);
        decode_decide(core, entry, OUTCOME_FAILED, CAUSE_AUDIT, FINISH_ERROR, out);
    }
}

static void decode_send_audits(struct decode_core *core, struct effects *out) {
    for (uint32_t i = 0; i < core->node.config.sessions_max && effects_room(out) > 64; i++) {
        struct session *session = &core->node.sessions[i];
        if (!node_audit_is_due(&core->node, session, core->ids_used)) {
            continue;
        }
        bool is_router = session->role == ROLE_ROUTER;
        uint64_t *ids = core->ids + core->ids_used;
        uint32_t count = 0;
        uint32_t at = session->entries.head;
        while (at != LIST_NONE && core->ids_used + count < MESSAGE_IDS_MAX) {
            struct decode_entry *entry = &core->entries[at];
            ids[count++] = is_router ? entry->attempt.v : entry->id;
            at = is_router ? entry->router_link.next : entry->peer_link.next;
        }
        core->ids_used += count;
        if (count > 0) {
            struct message *audit = node_send(&core->node, session, MESSAGE_AUDIT, out);
            audit->u.audit.count = count;
            audit->u.audit.ids = ids;
        }
    }
}

/* --- growth and retraction
 * ----------------------------------------------------------------------------- */

/* Gives all its pages away and waits. The whole ones go into the prefix index first: if nobody
 * needs them meanwhile, they are found there when it comes back. */
static void decode_retract(struct decode_core *core, struct decode_entry *entry,
                           struct effects *out) {
    CHECK(entry->state == DECODE_RUNNING && decode_operations(entry) == 0);
    uint32_t at = decode_index(core, entry);
    pages_index(&core->pages, entry->salt, decode_tokens(core, entry), decode_pages(core, entry), 0,
                entry->computed / core->config.page_tokens);
    pages_release(&core->pages, decode_pages(core, entry), entry->page_count);
    list_remove(entry->is_filling ? &core->fill : &core->run, RUN_LINKS(core), at);
    list_remove(&core->active, ORDER_LINKS(core), at);
    if (effects_room(out) > 8 * EFFECTS_PER_END) {
        node_note(out, NOTE_RETRACTED, ROLE_DECODE, CAUSE_BUSY, entry->id, entry->computed,
                  entry->label);
    }
    entry->page_count = 0;
    entry->computed_most =
        entry->computed > entry->computed_most ? entry->computed : entry->computed_most;
    entry->computed = 0;
    entry->is_filling = false;
    core->retractions++;
    decode_move(core, entry, DECODE_RETRACTED, entry->deadline);
    decode_enlist(core, &core->retracted, entry);
    core->resume_room = INT64_MIN;
}

/* Lets those that were retracted run again, oldest first, each as soon as an Admit of its size
 * would be granted, and in any case when nothing runs. */
static void decode_resume(struct decode_core *core, struct effects *out) {
    while (core->retracted.count > 0) {
        uint32_t at = core->retracted.head;
        struct decode_entry *entry = &core->entries[at];
        bool is_idle = core->active.count == 0;
        int64_t room = (int64_t)pages_available(&core->pages) - (int64_t)core->growth;
        if (is_idle == core->was_resume_idle && room <= core->resume_room) {
            return; /* looked at before: its prefix need not be hashed again */
        }
        if (decode_take_pages(core, entry, is_idle) != STATUS_OK) {
            core->resume_room = room;
            core->was_resume_idle = is_idle;
            return;
        }
        core->resume_room = INT64_MIN;
        list_remove(&core->retracted, ORDER_LINKS(core), at);
        decode_move(core, entry, DECODE_RUNNING, entry->deadline);
        decode_start_running(core, entry);
        if (effects_room(out) > 8 * EFFECTS_PER_END) {
            node_note(out, NOTE_RESUMED, ROLE_DECODE, CAUSE_NONE, entry->id,
                      entry->token_count - entry->computed, entry->label);
        }
    }
}

/* The youngest that can give its pages away now. Never the oldest one that runs: it gets every page
 * that it needs and ends, and then the next one is the oldest. */
static struct decode_entry *decode_victim(struct decode_core *core) {
    for (uint32_t at = core->active.tail; at != core->active.head;
         at = core->entries[at].order_link.prev) {
        if (decode_operations(&core->entries[at]) == 0) {
            return &core->entries[at];
        }
    }
    return NULL;
}

static bool decode_lacks_page(const struct decode_core *core, const struct decode_entry *entry) {
    return pages_for(&core->pages, entry->token_count) > entry->page_count;
}

/* How many of those that the next step may take lack a page. Prompts never do. */
static uint32_t decode_lacking(const struct decode_core *core) {
    uint32_t lacking = 0;
    uint32_t at = core->run.head;
    for (uint32_t i = 0; i < core->config.rows_max && at != LIST_NONE; i++) {
        lacking += decode_lacks_page(core, &core->entries[at]) ? 1 : 0;
        at = core->entries[at].run_link.next;
    }
    return lacking;
}

static void decode_grow_one(struct decode_core *core, struct decode_entry *entry) {
    if (decode_lacks_page(core, entry) &&
        pages_take(&core->pages, 1, decode_pages(core, entry) + entry->page_count) == STATUS_OK) {
        entry->page_count++;
        decode_account(core, entry);
    }
}

/* A page for each that needs one; where there are too few, the youngest give theirs up. What gets
 * none (transfers hold them) is left out of this step. No step is running. */
static void decode_grow(struct decode_core *core, struct effects *out) {
    while (decode_lacking(core) > pages_available(&core->pages)) {
        struct decode_entry *victim = decode_victim(core);
        if (victim == NULL) {
            break;
        }
        decode_retract(core, victim, out);
    }
    if (core->active.count > 0) {
        decode_grow_one(core, &core->entries[core->active.head]);
    }
    uint32_t at = core->run.head;
    for (uint32_t i = 0; i < core->config.rows_max && at != LIST_NONE; i++) {
        decode_grow_one(core, &core->entries[at]);
        at = core->entries[at].run_link.next;
    }
}

/* --- steps
 * --------------------------------------------------------------------------------------------- */

static void decode_plan_row(struct decode_core *core, struct decode_entry *entry, uint32_t tokens) {
    struct step_plan *plan = &core->plan;
    struct plan_row *row = &core->rows[plan->row_count++];
    uint32_t end = entry->computed + tokens;
    *row = (struct plan_row){.entry = entry->id,
                             .position = entry->computed,
                             .token_count = tokens,
                             .token_first = plan->token_count,
                             .page_first = plan->page_count,
                             .page_count = pages_for(&core->pages, end),
                             .is_sampled = end == entry->token_count,
                             .output_first = entry->output_first};
    const uint32_t *all = decode_tokens(core, entry);
    memcpy(core->row_tokens + plan->token_count, all + entry->computed, tokens * sizeof *all);
    CHECK_OP(plan->page_count + row->page_count, <=, core->row_pages_cap);
    memcpy(core->row_pages + plan->page_count, decode_pages(core, entry),
           row->page_count * sizeof *all);
    plan->token_count += tokens;
    plan->page_count += row->page_count;
    if (row->is_sampled) {
        row->sampling = &entry->sampling;
        row->history = sampling_needs_history(&entry->sampling) ? all : NULL;
    }
    entry->is_in_step = true;
}

/* Others may have computed since what it was going to: that is taken from the index. */
static void decode_match_more(struct decode_core *core, struct decode_entry *entry) {
    uint32_t page_tokens = core->config.page_tokens;
    uint32_t first = entry->computed / page_tokens;
    uint32_t pages =
        pages_match_more(&core->pages, entry->salt, decode_tokens(core, entry), first,
                         (entry->token_count - 1) / page_tokens, decode_pages(core, entry));
    if (pages == first) {
        return;
    }
    uint32_t known =
        entry->computed > entry->computed_most ? entry->computed : entry->computed_most;
    entry->computed = pages * page_tokens;
    uint32_t end = entry->computed < entry->prompt_count ? entry->computed : entry->prompt_count;
    if (end > known) {
        entry->cached += end - known;
        pages_count(&core->pages, 0, end - known);
    }
}

/* Whether a row of this step computes what it would compute, so that the next one finds it. Asked
 * once at each place: whoever is waited for may end without a result. */
static bool decode_yields(struct decode_core *core, struct decode_entry *entry) {
    if (entry->yielded == entry->computed + 1) {
        return false;
    }
    struct pages_run mine = {entry->salt, decode_tokens(core, entry), entry->token_count - 1};
    for (uint32_t i = 0; i < core->plan.row_count; i++) {
        const struct plan_row *row = &core->rows[i];
        struct decode_entry *other = decode_by_slot(core, (struct slot_id){row->entry});
        CHECK(other != NULL);
        uint32_t end = row->position + row->token_count;
        end = end < other->prompt_count ? end : other->prompt_count; /* what will be indexed */
        struct pages_run theirs = {other->salt, decode_tokens(core, other), end};
        if (pages_are_common(&core->pages, mine, theirs, entry->computed,
                             core->config.shared_min)) {
            entry->yielded = entry->computed + 1;
            return true;
        }
    }
    return false;
}

/* Takes rows from the head of a list, which go to its tail: nobody waits for ever. */
static void decode_plan_list(struct decode_core *core, struct list *list, uint32_t tokens_max) {
    uint32_t left = list->count;
    while (left-- > 0 && core->plan.row_count < core->config.rows_max &&
           core->plan.token_count < tokens_max) {
        struct decode_entry *entry = &core->entries[list->head];
        uint32_t room = tokens_max - core->plan.token_count;
        if (entry->is_in_step) {
            return; /* all behind it were looked at */
        }
        if (entry->is_filling) {
            decode_match_more(core, entry);
        }
        uint32_t pending = entry->token_count - entry->computed;
        CHECK(pending > 0);
        if (!decode_lacks_page(core, entry) && !(entry->is_filling && decode_yields(core, entry))) {
            decode_plan_row(core, entry, pending < room ? pending : room);
        }
        uint32_t at = list->head;
        list_remove(list, RUN_LINKS(core), at);
        list_push_back(list, RUN_LINKS(core), at);
    }
}

/* Once nobody is left who wants what is being computed, their pages need not wait for all of it. */
static void decode_abandon(struct decode_core *core, struct effects *out) {
    if (!core->is_stepping || core->is_abandoned || effects_room(out) < 1) {
        return;
    }
    for (uint32_t i = 0; i < core->plan.row_count; i++) {
        const struct decode_entry *entry =
            decode_by_slot(core, (struct slot_id){core->rows[i].entry});
        CHECK(entry != NULL);
        if (entry->state != DECODE_LEAVING) {
            return;
        }
    }
    core->is_abandoned = true;
    core->steps_abandoned++;
    effects_add(out, EFFECT_STEP_ABANDON)->u.abandon.number = core->plan.number;
}

static void decode_plan(struct decode_core *core, struct effects *out) {
    if (core->is_stepping || effects_room(out) < 1) {
        return;
    }
    decode_resume(core, out);
    decode_grow(core, out);
    core->is_starved = false;
    if (core->run.count + core->fill.count == 0) {
        return;
    }
    uint64_t number = core->plan.number + 1;
    core->plan = (struct step_plan){
        .number = number, .rows = core->rows, .tokens = core->row_tokens, .pages = core->row_pages};
    /* Running sequences first; prompts get what they leave, but never less than a quarter of the
     * tokens and of the rows: with more running than fit into a step they would wait for ever. */
    uint32_t budget = core->budget.tokens;
    uint32_t reserved = core->fill.count > 0 ? (budget + 3) / 4 : 0;
    uint32_t rows_kept = core->config.rows_max > 1 ? (core->config.rows_max + 3) / 4 : 0;
    rows_kept = core->fill.count < rows_kept ? core->fill.count : rows_kept;
    core->config.rows_max -= rows_kept;
    decode_plan_list(core, &core->run, budget - reserved > 0 ? budget - reserved : 1);
    core->config.rows_max += rows_kept;
    decode_plan_list(core, &core->fill, budget);
    decode_plan_list(core, &core->run, budget); /* what the prompts have left */
    core->is_starved = core->plan.row_count == 0;
    if (core->is_starved) {
        core->plan.number--;
        return;
    }
    core->is_stepping = true;
    core->is_abandoned = false;
    core->steps++;
    effects_add(out, EFFECT_STEP)->u.plan = &core->plan;
}

/* Whether this token ends the answer; `generated` counts it. */
static enum finish decode_finish(const struct decode_core *core, const struct decode_entry *entry,
                                 uint32_t token) {
    for (uint32_t i = 0; i < core->config.eos_count && !entry->sampling.ignore_eos; i++) {
        if (token == core->config.eos[i]) {
            return FINISH_STOP;
        }
    }
    for (uint32_t i = 0; i < entry->sampling.stop_token_count; i++) {
        if (token == entry->sampling.stop_tokens[i]) {
            return FINISH_STOP;
        }
    }
    return entry->token_count >= entry->total_max ? FINISH_LENGTH : FINISH_NONE;
}

static void decode_fill_done(struct decode_core *core, struct decode_entry *entry) {
    list_remove(&core->fill, RUN_LINKS(core), decode_index(core, entry));
    entry->is_filling = false;
    list_push_back(&core->run, RUN_LINKS(core), decode_index(core, entry));
}

/* One row's share of a finished step. Returns the finish reason that its token brought. */
static enum finish decode_apply(struct decode_core *core, struct decode_entry *entry,
                                const struct plan_row *row, const struct step_result *result,
                                struct effects *out) {
    bool is_prompt = entry->computed < entry->prompt_count;
    uint32_t full = entry->computed / core->config.page_tokens;
    uint32_t end = row->position + row->token_count;
    uint32_t seen = entry->computed_most < row->position ? row->position
                    : entry->computed_most < end         ? entry->computed_most
                                                         : end;
    core->tokens_recomputed += seen - row->position;
    if (seen < entry->prompt_count) {
        core->tokens_prefilled += (end < entry->prompt_count ? end : entry->prompt_count) - seen;
    }
    entry->computed += row->token_count;
    bool is_wrong = row->is_sampled &&
                    (result == NULL || !result->is_valid || result->token >= core->config.vocab);
    if (is_prompt && !is_wrong) { /* whoever shares this prompt need not wait for its answer */
        pages_index(&core->pages, entry->salt, decode_tokens(core, entry),
                    decode_pages(core, entry), full, entry->computed / core->config.page_tokens);
    }
    if (!row->is_sampled) {
        if (entry->is_filling && entry->token_count - entry->computed == 1) {
            decode_fill_done(core, entry);
        }
        return FINISH_NONE;
    }
    if (is_wrong) {
        decode_decide(core, entry, OUTCOME_FAILED, CAUSE_STEP_FAILED, FINISH_ERROR, out);
        return FINISH_NONE;
    }
    if (entry->is_filling) {
        decode_fill_done(core, entry);
    }
    decode_tokens(core, entry)[entry->token_count++] = result->token;
    decode_account(core, entry);
    core->tokens_generated++;
    return decode_finish(core, entry, result->token);
}

/* Notes the logprobs of the token `at` of a step, where its request wants them. */
static void decode_note_logprobs(struct decode_core *core, const struct decode_entry *entry,
                                 const struct step_result *result, uint32_t at,
                                 uint32_t *tops_used) {
    bool is_wanted = entry->sampling.logprobs > 0;
    uint32_t count = is_wanted ? result->top_count : 0;
    CHECK_OP(count, <=, LOGPROBS_TOP_MAX);
    core->out_logprobs[at] = is_wanted ? result->logprob : 0.0f;
    core->out_top_counts[at] = is_wanted ? 1 + count : 0;
    memcpy(core->out_top_tokens + *tops_used, result->top_tokens, count * sizeof(uint32_t));
    memcpy(core->out_top_logprobs + *tops_used, result->top_logprobs, count * sizeof(float));
    *tops_used += count;
}

/* What of a step has been put into messages: tokens, and alternatives of tokens. */
struct decode_told {
    uint32_t tokens;
    uint32_t tops;
};

/* The tokens of one router's requests in one message, then the ends that they brought. */
static void decode_tell(struct decode_core *core, uint32_t session_index, const uint8_t *finish,
                        const struct step_result *const *results, struct decode_told *told,
                        struct effects *out) {
    struct session *session = &core->node.sessions[session_index];
    struct decode_told first = *told;
    bool has_logprobs = false;
    for (uint32_t i = 0; i < core->plan.row_count; i++) {
        struct decode_entry *entry = decode_by_slot(core, (struct slot_id){core->rows[i].entry});
        if (results[i] != NULL && entry != NULL && entry->state == DECODE_RUNNING &&
            entry->router == session_index) {
            core->out_attempts[told->tokens] = entry->attempt.v;
            core->out_tokens[told->tokens] = results[i]->token;
            decode_note_logprobs(core, entry, results[i], told->tokens, &told->tops);
            has_logprobs = has_logprobs || entry->sampling.logprobs > 0;
            told->tokens++;
        }
    }
    if (told->tokens > first.tokens) {
        struct message *tokens = node_send(&core->node, session, MESSAGE_TOKENS, out);
        tokens->u.tokens.count = told->tokens - first.tokens;
        tokens->u.tokens.attempts = core->out_attempts + first.tokens;
        tokens->u.tokens.tokens = core->out_tokens + first.tokens;
        if (has_logprobs) {
            tokens->u.tokens.logprobs = core->out_logprobs + first.tokens;
            tokens->u.tokens.top_counts = core->out_top_counts + first.tokens;
            tokens->u.tokens.top_count = told->tops - first.tops;
            tokens->u.tokens.top_tokens = core->out_top_tokens + first.tops;
            tokens->u.tokens.top_logprobs = core->out_top_logprobs + first.tops;
        }
    }
    for (uint32_t i = 0; i < core->plan.row_count; i++) {
        struct decode_entry *entry = decode_by_slot(core, (struct slot_id){core->rows[i].entry});
        if (finish[i] != FINISH_NONE && entry != NULL && entry->state == DECODE_RUNNING &&
            entry->router == session_index) {
            decode_decide(core, entry, OUTCOME_OK, CAUSE_DONE, (enum finish)finish[i], out);
        }
    }
}

static void decode_step_done(struct decode_core *core, const struct event *event,
                             struct effects *out) {
    if (!core->is_stepping || event->u.step_done.number != core->plan.number) {
        core->node.stats.stale_events++;
        return;
    }
    core->is_stepping = false;
    node_progressed(&core->node);
    bool is_ok = event->u.step_done.status == STATUS_OK;
    if (is_ok) {
        budget_learn(&core->budget, core->plan.token_count, event->u.step_done.elapsed,
                     core->node.config.timers.step);
    }
    const struct step_result **results = core->results;
    uint8_t *finish = core->finish;
    uint32_t next = 0;
    for (uint32_t i = 0; i < core->plan.row_count; i++) {
        const struct plan_row *row = &core->rows[i];
        results[i] = NULL;
        finish[i] = FINISH_NONE;
        const struct step_result *result = NULL;
        if (next < event->u.step_done.count &&
            event->u.step_done.results[next].entry == row->entry) {
            result = &event->u.step_done.results[next++];
        }
        struct decode_entry *entry = decode_by_slot(core, (struct slot_id){row->entry});
        CHECK(entry != NULL && entry->is_in_step);
        entry->is_in_step = false;
        if (entry->state == DECODE_LEAVING) {
            decode_settle(core, entry);
            continue;
        }
        CHECK_OP(entry->state, ==, DECODE_RUNNING);
        CHECK(event->u.step_done.status != STATUS_CANCELLED);
        if (!is_ok) {
            decode_decide(core, entry, OUTCOME_FAILED, CAUSE_STEP_FAILED, FINISH_ERROR, out);
            continue;
        }
        finish[i] = (uint8_t)decode_apply(core, entry, row, result, out);
        results[i] = row->is_sampled ? result : NULL;
    }
    struct decode_told told = {0};
    for (uint32_t i = 0; i < core->node.config.sessions_max; i++) {
        if (core->node.sessions[i].role == ROLE_ROUTER &&
            session_is_live(&core->node.sessions[i])) {
            decode_tell(core, i, finish, results, &told, out);
        }
    }
    /* A finished row whose router is gone is left to the end of that router's session. */
}

/* --- time and ends
 * -------------------------------------------------------------------------------------- */

/* Ends the entries of sessions that are over, in bounded turns. */
static void decode_sweep_sessions(struct decode_core *core, struct effects *out) {
    if (core->node.sessions_ended == 0) {
        return;
    }
    for (uint32_t i = 0; i < core->node.config.sessions_max; i++) {
        struct session *session = &core->node.sessions[i];
        if (session->phase != SESSION_ENDED) {
            continue;
        }
        while (session->entries.head != LIST_NONE && effects_room(out) > 8 * EFFECTS_PER_END) {
            struct decode_entry *entry = &core->entries[session->entries.head];
            enum outcome outcome = session->role == ROLE_ROUTER ? OUTCOME_ABORTED : OUTCOME_FAILED;
            decode_decide(core, entry, outcome, session->cause, FINISH_ERROR, out);
        }
        (void)node_release(&core->node,
                           session); /* false: its stream's last event is still to come */
    }
}

static void decode_reap(struct decode_core *core, struct decode_entry *entry, struct effects *out) {
    struct node *node = &core->node;
    enum cause cause = CAUSE_NONE;
    if (instant_reached(node->now, entry->deadline)) {
        cause = CAUSE_DEADLINE;
    } else if (entry->state == DECODE_RESERVED &&
               instant_reached(node->now, entry->state_deadline)) {
        cause = CAUSE_T_OPEN;
    } else if (entry->state == DECODE_RECEIVING && entry->is_fin_seen &&
               instant_reached(node->now, instant_add(entry->moved, node->config.timers.stall))) {
        cause = CAUSE_STALL;
    }
    if (cause != CAUSE_NONE) {
        node->ledger.reaped[entry->state]++;
        decode_decide(core, entry, OUTCOME_FAILED, cause, FINISH_ERROR, out);
    }
}

static void decode_tick(struct decode_core *core, struct effects *out) {
    struct node *node = &core->node;
    node->stats.overrun_ns = 0;
    for (uint32_t i = pool_next(&core->slots, 0); i != UINT32_MAX;
         i = pool_next(&core->slots, i + 1)) {
        struct decode_entry *entry = &core->entries[i];
        if (node_is_grace_over(node) && entry->state != DECODE_LEAVING &&
            effects_room(out) > 8 * EFFECTS_PER_END) {
            decode_decide(core, entry, OUTCOME_FAILED, CAUSE_SHUTDOWN, FINISH_ERROR, out);
        } else if (entry->state != DECODE_LEAVING && effects_room(out) > 8 * EFFECTS_PER_END) {
            decode_reap(core, entry, out);
        }
        int64_t over = node->now.ns - entry->deadline.ns;
        if (entry->state != DECODE_NONE && over > node->stats.overrun_ns) {
            node->stats.overrun_ns = over;
        }
    }
    node->beat_pages_free = pages_available(&core->pages);
    node_tick(node, out);
    decode_send_audits(core, out);
}

static void decode_link_event(struct decode_core *core, const struct event *event,
                              struct effects *out) {
    struct decode_entry *entry = decode_by_slot(core, event->u.link.slot);
    if (entry == NULL || !entry->is_armed) {
        core->node.stats.stale_events++;
        return;
    }
    if (event->kind == EVENT_LINK_DISARMED) {
        entry->is_armed = false;
        decode_settle(core, entry);
        return;
    }
    if (entry->state != DECODE_RECEIVING) {
        core->node.stats.stale_events++;
        return;
    }
    if (event->kind == EVENT_LINK_BAD) {
        decode_decide(core, entry, OUTCOME_FAILED, CAUSE_BAD_CHUNK, FINISH_ERROR, out);
        return;
    }
    if (event->u.link.bytes > entry->received) {
        core->bytes_received += event->u.link.bytes - entry->received;
        entry->received = event->u.link.bytes;
        entry->moved = core->node.now;
        node_progressed(&core->node);
    }
    if (event->kind == EVENT_LINK_COVERED) {
        entry->is_covered = true;
        decode_try_commit(core, entry, out);
    }
}

static void decode_router_mail(struct decode_core *core, struct session *session,
                               const struct message *message, struct effects *out) {
    if (message->kind == MESSAGE_ADMIT) {
        decode_admit(core, session, message, out);
    } else if (message->kind == MESSAGE_ABORT) {
        decode_abort(core, session, message, out);
    } else {
        node_end(&core->node, session, CAUSE_SESSION_ERROR, out);
    }
}

static void decode_prefill_mail(struct decode_core *core, struct session *session,
                                const struct message *message, struct effects *out) {
    if (message->kind == MESSAGE_OPEN) {
        decode_open(core, session, message, out);
    } else if (message->kind == MESSAGE_FIN) {
        decode_fin(core, session, message, out);
    } else if (message->kind == MESSAGE_ABORT_SLOT) {
        decode_abort_slot(core, session, message, out);
    } else {
        node_end(&core->node, session, CAUSE_SESSION_ERROR, out);
    }
}

static void decode_mail(struct decode_core *core, struct session *session,
                        const struct message *message, struct effects *out) {
    if (message->kind == MESSAGE_HELLO || message->kind == MESSAGE_BEAT) {
        return;
    }
    if (message->kind == MESSAGE_AUDIT) {
        decode_audited(core, session, message, out);
    } else if (message->kind == MESSAGE_UNKNOWN) {
        decode_unknown(core, session, message, out);
    } else if (session->role == ROLE_ROUTER) {
        decode_router_mail(core, session, message, out);
    } else {
        decode_prefill_mail(core, session, message, out);
    }
}

void decode_core_step(struct decode_core *core, const struct event *event, struct instant now,
                      struct effects *out) {
    struct session *session = NULL;
    out->count = 0;
    core->ids_used = 0;
    node_observe(&core->node, now);
    switch (event->kind) {
    case EVENT_TICK: decode_tick(core, out); break;
    case EVENT_DRAIN: node_drain(&core->node, event->u.drain.grace, out); break;
    case EVENT_STREAM_ACCEPTED:
    case EVENT_STREAM_MAIL:
    case EVENT_STREAM_BAD:
    case EVENT_STREAM_ENDED:
        session = node_event(&core->node, event, out);
        if (session != NULL) {
            decode_mail(core, session, event->u.mail.message, out);
        }
        break;
    case EVENT_STEP_DONE: decode_step_done(core, event, out); break;
    case EVENT_LAYER_DONE: break; /* decode plans ask for no layers; a late one says nothing */
    case EVENT_LINK_PROGRESS:
    case EVENT_LINK_COVERED:
    case EVENT_LINK_BAD:
    case EVENT_LINK_DISARMED: decode_link_event(core, event, out); break;
    case EVENT_CLIENT_OPEN:
    case EVENT_TOKENIZED:
    case EVENT_CLIENT_GONE:
    case EVENT_CLIENT_ABORT:
    case EVENT_STOP_FOUND:
    case EVENT_ANSWERED:
    case EVENT_WORKER_SEEN:
    case EVENT_WORKER_LOST:
    case EVENT_LINK_SENT:
    case EVENT_LINK_FAILED:
    case EVENT_LINK_CLOSED: core->node.stats.stale_events++; break; /* not this role's */
    }
    decode_sweep_sessions(core, out);
    decode_abandon(core, out);
    decode_plan(core, out);
    publisher_step(&core->publisher, &core->node, &core->pages, event->kind == EVENT_TICK, out);
    node_exit_when_idle(&core->node, out);
}

struct instant decode_core_deadline(const struct decode_core *core) {
    return instant_add(core->node.real, span_ms(core->node.sessions_ended > 0 ? 1 : TICK_MS));
}

/* --- for people and tests
 * ---------------------------------------------------------------------------------- */

static void decode_view_session(const struct decode_core *core, struct entry_view *view,
                                uint32_t which, bool is_linked, uint32_t index) {
    if (is_linked) {
        node_view_peer(&core->node, view, which, index, core->node.sessions[index].id);
    }
}

static const char *decode_waits_for(const struct decode_core *core,
                                    const struct decode_entry *entry) {
    switch (entry->state) {
    case DECODE_NONE: return "";
    case DECODE_RESERVED: return "the prefill worker's Open";
    case DECODE_RECEIVING:
        return entry->is_fin_seen ? "the rest of the KV bytes" : "KV from the prefill worker";
    case DECODE_RUNNING:
        return entry->is_in_step                ? "its engine step"
               : decode_lacks_page(core, entry) ? "a free KV page"
                                                : "its turn in a step";
    case DECODE_RETRACTED: return "room for its KV pages, which it gave up to older requests";
    case DECODE_LEAVING:
        return entry->is_in_step ? "its engine step to end" : "the link to disarm its slot";
    }
    return "";
}

static const char *decode_next_deadline(const struct decode_core *core,
                                        const struct decode_entry *entry,
                                        struct instant *next_out) {
    *next_out = instant_min(entry->deadline, entry->state_deadline);
    if (entry->state == DECODE_LEAVING) {
        return "the bound of its own operations";
    }
    if (entry->state == DECODE_RESERVED && entry->state_deadline.ns < entry->deadline.ns) {
        return "T_open: no Open arrived";
    }
    if (entry->state == DECODE_RECEIVING && entry->is_fin_seen) {
        struct instant stall = instant_add(entry->moved, core->node.config.timers.stall);
        if (stall.ns < next_out->ns) {
            *next_out = stall;
            return "T_stall: no KV bytes arrived";
        }
    }
    return "the request's deadline";
}

bool decode_view(const struct decode_core *core, uint32_t *cursor, struct entry_view *view_out) {
    while (*cursor < core->config.entries_max) {
        const struct decode_entry *entry = &core->entries[(*cursor)++];
        if (entry->state == DECODE_NONE) {
            continue;
        }
        struct instant next = INSTANT_NEVER;
        const char *deadline = decode_next_deadline(core, entry, &next);
        *view_out = (struct entry_view){
            .id = entry->id,
            .attempt = entry->attempt.v,
            .state = decode_state_name(entry->state),
            .age_ms = span_to_ms(instant_since(core->node.now, entry->since)),
            .state_age_ms = span_to_ms(instant_since(core->node.now, entry->state_since)),
            .deadline_left_ms = span_to_ms(instant_since(next, core->node.now)),
            .deadline = deadline,
            .router = entry->router_incarnation.v,
            .operations = decode_operations(entry),
            .tokens = entry->token_count,
            .generated = entry->token_count - entry->prompt_count,
            .pages = entry->page_count,
            .bytes = entry->received,
            .cached = entry->cached,
            .waits_for = decode_waits_for(core, entry)};
        text_copy(view_out->label, LABEL_MAX, entry->label);
        decode_view_session(core, view_out, 0, entry->router_link.is_linked, entry->router);
        decode_view_session(core, view_out, 1, entry->peer_link.is_linked, entry->peer);
        return true;
    }
    return false;
}

/* A list in order of admission, whose entries are all in one state. */
static void decode_verify_order(const struct decode_core *core, const struct list *list,
                                enum decode_state state) {
    uint32_t count = 0;
    for (uint32_t at = list->head; at != LIST_NONE; at = core->entries[at].order_link.next) {
        uint32_t next = core->entries[at].order_link.next;
        CHECK_OP(core->entries[at].state, ==, state);
        CHECK(next == LIST_NONE || core->entries[at].order < core->entries[next].order);
        count++;
    }
    CHECK_OP(count, ==, list->count);
    CHECK_OP(count, ==, core->node.ledger.in_state[state]);
}

void decode_verify(const struct decode_core *core) {
    uint32_t live = 0;
    uint64_t growth = 0;
    uint64_t references = 0;
    uint32_t in_step = 0;
    for (uint32_t i = 0; i < core->config.entries_max; i++) {
        const struct decode_entry *entry = &core->entries[i];
        if (entry->state == DECODE_NONE) {
            CHECK(pool_id_at(&core->slots, i) == 0);
            continue;
        }
        live++;
        references += entry->page_count;
        in_step += entry->is_in_step ? 1 : 0;
        CHECK(pool_id_at(&core->slots, i) == entry->id);
        CHECK(!instant_is_never(entry->deadline) && !instant_is_never(entry->state_deadline));
        CHECK((entry->state == DECODE_LEAVING) == (entry->outcome != OUTCOME_NONE));
        CHECK((entry->state == DECODE_LEAVING) != entry->router_link.is_linked);
        CHECK((entry->state == DECODE_RECEIVING) == entry->peer_link.is_linked);
        CHECK((entry->state == DECODE_RUNNING) == entry->run_link.is_linked);
        CHECK(decode_is_committed(entry) == entry->order_link.is_linked);
        CHECK(entry->state != DECODE_RETRACTED ||
              (decode_operations(entry) == 0 && entry->page_count == 0 && entry->computed == 0));
        growth += entry->growth;
        CHECK_OP(entry->growth, ==,
                 entry->state == DECODE_RETRACTED || entry->state == DECODE_LEAVING
                     ? 0
                     : decode_growth(core, entry, entry->page_count));
        CHECK_OP(entry->page_count, <=, pages_for(&core->pages, entry->total_max));
        CHECK_OP(entry->computed, <=, entry->page_count * core->config.page_tokens);
        CHECK(entry->state != DECODE_RECEIVING || entry->is_armed);
        CHECK(entry->state != DECODE_RESERVED || decode_operations(entry) == 0);
        CHECK(entry->state != DECODE_LEAVING || decode_operations(entry) > 0);
        CHECK_OP(entry->computed, <=, entry->token_count);
        CHECK_OP(entry->token_count, <=, entry->total_max);
    }
    uint64_t held = 0;
    for (uint32_t i = 0; i < core->config.page_count; i++) {
        held += core->pages.table[i].references;
    }
    CHECK_OP(held, ==, references);
    CHECK_OP(growth, ==, core->growth);
    decode_verify_order(core, &core->active, DECODE_RUNNING);
    decode_verify_order(core, &core->retracted, DECODE_RETRACTED);
    /* Whoever waits for pages waits for somebody who has them. */
    CHECK(core->retracted.count == 0 || live > core->retracted.count);
    CHECK_OP(live, ==, core->node.ledger.live);
    CHECK_OP(ledger_imbalance(&core->node.ledger), ==, 0);
    CHECK_OP(core->words.taken, ==, core->node.ledger.live);
    CHECK_OP(core->is_stepping ? core->plan.row_count : 0, ==, in_step);
    pages_verify(&core->pages);
}
