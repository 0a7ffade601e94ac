#include "core/prefill.h"

#include <string.h>

#include "base/check.h"
#include "base/prng.h"

#define ROUTER_LINKS(core) &(core)->entries[0].router_link, (uint32_t)sizeof(struct prefill_entry)
#define PEER_LINKS(core)   &(core)->entries[0].peer_link, (uint32_t)sizeof(struct prefill_entry)
#define QUEUE_LINKS(core)  &(core)->entries[0].queue_link, (uint32_t)sizeof(struct prefill_entry)

/* One entry's end appends at most PrefillEnd and AbortSlot. */
#define EFFECTS_PER_END 3u

const char *prefill_state_name(uint32_t state) {
    switch ((enum prefill_state)state) {
    case PREFILL_NONE: return "none";
    case PREFILL_QUEUED: return "queued";
    case PREFILL_COMPUTING: return "computing";
    case PREFILL_SENT: return "sent";
    case PREFILL_LEAVING: return "leaving";
    }
    return "unknown";
}

static void prefill_layout(struct prefill_core *core, const struct prefill_config *config,
                           struct arena *arena) {
    uint32_t page_tokens = config->layout->page_tokens;
    uint64_t row_pages = (uint64_t)config->rows_max * (config->context / page_tokens + 2);
    /* Queued prompts hold tokens but no pages, so the store is sized by entries of full context,
     * within reason: past it a prompt is Busy. */
    uint64_t words = (uint64_t)config->page_count * page_tokens * 4 +
                     (uint64_t)config->entries_max * WORDS_UNIT * 2 + 2ull * config->context;
    node_init(&core->node, &config->node, arena);
    void *ids = arena_take(arena, pool_bytes(config->entries_max));
    core->entries = arena_take(arena, (uint64_t)config->entries_max * sizeof *core->entries);
    void *attempts = arena_take(arena, map_bytes(config->entries_max));
    void *slots = arena_take(arena, map_bytes(config->entries_max));
    words_init(&core->words, words > (1u << 30) ? 1u << 30 : (uint32_t)words, arena);
    pages_init(&core->pages,
               &(struct pages_config){.capacity = config->page_count,
                                      .page_tokens = page_tokens,
                                      .changes_max = config->changes_max,
                                      .secret = config->secret,
                                      .model = config->node.layout},
               arena);
    publisher_init(&core->publisher, config->node.sessions_max, arena);
    core->rows = arena_take(arena, (uint64_t)config->rows_max * sizeof *core->rows);
    core->row_tokens = arena_take(arena, (uint64_t)config->step_tokens_max * sizeof(uint32_t));
    core->row_pages = arena_take(arena, row_pages * sizeof(uint32_t));
    core->out_ids = arena_take(arena, (uint64_t)MESSAGE_IDS_MAX * sizeof(uint64_t));
    if (ids == NULL) {
        return;
    }
    core->row_pages_cap = (uint32_t)row_pages;
    pool_init(&core->ids, config->entries_max, ids);
    map_init(&core->by_attempt, config->entries_max, attempts);
    map_init(&core->by_slot, config->entries_max, slots);
    list_init(&core->queue);
    list_init(&core->ready);
    list_init(&core->active);
    budget_init(&core->budget, config->step_tokens_max);
    core->config = *config;
}

uint64_t prefill_bytes(const struct prefill_config *config) {
    struct prefill_core scratch;
    struct arena arena;
    arena_init(&arena, NULL, 0);
    prefill_layout(&scratch, config, &arena);
    return arena.len;
}

void prefill_init(struct prefill_core *core, const struct prefill_config *config, void *memory) {
    CHECK(config->rows_max > 0 && config->rows_max <= STEP_ROWS_MAX);
    CHECK(config->step_tokens_max > 0 && config->page_count > 0);
    CHECK(config->entries_max > 0 && config->sends_high > 0 && config->shared_min > 0);
    memset(core, 0, sizeof *core);
    struct arena arena;
    arena_init(&arena, memory, prefill_bytes(config));
    prefill_layout(core, config, &arena);
}

/* --- entries -------------------------------------------------------------------------------------
 */

static uint32_t prefill_index(const struct prefill_core *core, const struct prefill_entry *entry) {
    return (uint32_t)(entry - core->entries);
}

static uint32_t *prefill_tokens(const struct prefill_core *core,
                                const struct prefill_entry *entry) {
    return words_at(&core->words, entry->words);
}

static uint32_t *prefill_pages(const struct prefill_core *core, const struct prefill_entry *entry) {
    return words_at(&core->words, entry->words) + entry->end;
}

static uint32_t prefill_operations(const struct prefill_entry *entry) {
    return entry->sends + (entry->is_in_step ? 1u : 0u);
}

static uint64_t prefill_hash(struct stream_id stream, uint64_t id) {
    return mix64(stream.v) ^ id;
}

static struct prefill_entry *prefill_by_id(struct prefill_core *core, uint64_t id) {
    uint32_t index = 0;
    return pool_find(&core->ids, id, &index) ? &core->entries[index] : NULL;
}

static struct prefill_entry *prefill_by_attempt(struct prefill_core *core,
                                                const struct session *session,
                                                struct attempt_id attempt) {
    uint32_t cursor = 0;
    for (;;) {
        uint32_t at =
            map_next(&core->by_attempt, prefill_hash(session->stream, attempt.v), &cursor);
        if (at == UINT32_MAX) {
            return NULL;
        }
        struct prefill_entry *entry = &core->entries[at];
        if (entry->attempt.v == attempt.v && entry->router_stream.v == session->stream.v) {
            return entry;
        }
    }
}

static struct prefill_entry *prefill_by_slot(struct prefill_core *core,
                                             const struct session *session, struct slot_id slot) {
    uint32_t cursor = 0;
    for (;;) {
        uint32_t at = map_next(&core->by_slot, prefill_hash(session->stream, slot.v), &cursor);
        if (at == UINT32_MAX) {
            return NULL;
        }
        struct prefill_entry *entry = &core->entries[at];
        if (entry->slot.v == slot.v && entry->peer_stream.v == session->stream.v) {
            return entry;
        }
    }
}

static void prefill_move(struct prefill_core *core, struct prefill_entry *entry,
                         enum prefill_state state) {
    ledger_move(&core->node, entry->state, state);
    entry->state = state;
    entry->state_since = core->node.now;
    node_progressed(&core->node);
}

/* Memory returns: only when decided and quiet. */
static void prefill_settle(struct prefill_core *core, struct prefill_entry *entry) {
    if (entry->state != PREFILL_LEAVING || prefill_operations(entry) > 0) {
        return;
    }
    uint32_t at = prefill_index(core, entry);
    pages_release(&core->pages, prefill_pages(core, entry), entry->page_count);
    words_free(&core->words, entry->words);
    CHECK(map_remove(&core->by_attempt, prefill_hash(entry->router_stream, entry->attempt.v), at));
    CHECK(map_remove(&core->by_slot, prefill_hash(entry->peer_stream, entry->slot.v), at));
    struct terminal terminal = {.id = entry->id,
                                .attempt = entry->attempt.v,
                                .router = entry->router_incarnation.v,
                                .at = core->node.now,
                                .age = instant_since(core->node.now, entry->since),
                                .state = entry->decided_in,
                                .outcome = (uint8_t)entry->outcome,
                                .cause = (uint8_t)entry->cause,
                                .exposed = entry->exposed};
    text_copy(terminal.label, sizeof terminal.label, entry->label);
    ledger_end(&core->node, entry->state, &terminal, instant_since(core->node.now, entry->decided));
    pool_free(&core->ids, entry->id);
    memset(entry, 0, sizeof *entry);
}

/* The list that an entry's queue_link is in, while it is in one. */
static struct list *prefill_list(struct prefill_core *core, const struct prefill_entry *entry) {
    if (entry->state != PREFILL_QUEUED) {
        return &core->active;
    }
    return entry->is_accepted ? &core->ready : &core->queue;
}

/* Decides an entry's outcome, once: tells R, tells D unless D said it or knows, starts to leave. */
static void prefill_decide(struct prefill_core *core, struct prefill_entry *entry,
                           enum outcome outcome, enum cause cause, struct effects *out) {
    if (entry->state == PREFILL_LEAVING) {
        return;
    }
    uint32_t at = prefill_index(core, entry);
    entry->outcome = outcome;
    entry->cause = cause;
    entry->decided_in = (uint8_t)entry->state;
    entry->decided = core->node.now;
    struct session *router = &core->node.sessions[entry->router];
    struct session *peer = &core->node.sessions[entry->peer];
    struct message *end = node_send(&core->node, router, MESSAGE_PREFILL_END, out);
    end->u.prefill_end.attempt = entry->attempt;
    end->u.prefill_end.outcome = outcome;
    end->u.prefill_end.cause = cause;
    end->u.prefill_end.bytes = entry->bytes_handed;
    if (outcome == OUTCOME_OK) {
        end->u.prefill_end.exposed_us = (uint64_t)(entry->exposed.ns + 999) / 1000;
    }
    end->u.prefill_end.cached = entry->cached;
    if (outcome != OUTCOME_OK && cause != CAUSE_PEER_REFUSED && entry->is_open_sent) {
        struct message *abort = node_send(&core->node, peer, MESSAGE_ABORT_SLOT, out);
        abort->u.refuse.slot = entry->slot;
        abort->u.refuse.cause = cause;
    }
    if (entry->state == PREFILL_QUEUED || entry->state == PREFILL_COMPUTING) {
        core->backlog_tokens -= entry->end - entry->computed;
    }
    if (!entry->is_open_sent) {
        core->opens_pending--;
    }
    list_remove(&router->entries, ROUTER_LINKS(core), at);
    list_remove(&peer->entries, PEER_LINKS(core), at);
    list_remove(prefill_list(core, entry), QUEUE_LINKS(core), at);
    prefill_move(core, entry, PREFILL_LEAVING);
    entry->deadline = instant_add(core->node.now, core->node.config.timers.leave);
    prefill_settle(core, entry);
}

/* --- admission
 * ------------------------------------------------------------------------------------ */

static void prefill_busy(struct prefill_core *core, struct session *session,
                         struct attempt_id attempt, enum cause cause, struct effects *out) {
    struct message *busy = node_send(&core->node, session, MESSAGE_BUSY, out);
    busy->u.rejected.attempt = attempt;
    busy->u.rejected.cause = cause;
    /* When the queue will be back within its seconds, as each earlier try costs D a reservation;
     * but not much later than soon, since that is an estimate and work may leave the queue
     * unfinished. */
    int64_t least = span_to_ms(core->node.config.timers.busy);
    int64_t over = (int64_t)budget_backlog_ms(&core->budget, core->backlog_tokens) -
                   span_to_ms(core->node.config.timers.backlog);
    over = over > 5 * least ? 5 * least : over;
    busy->u.rejected.retry_after_ms = (uint32_t)(over > least ? over : least);
}

static enum cause prefill_admissible(const struct prefill_core *core,
                                     const struct message *message) {
    uint32_t count = message->u.prefill.token_count;
    if (count < 2 || message->u.prefill.from >= count - 1 || message->u.prefill.slot.v == 0) {
        return CAUSE_INVALID;
    }
    if (count > core->config.context ||
        pages_for(&core->pages, count - 1) > core->config.page_count) {
        return CAUSE_TOO_LARGE;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (message->u.prefill.tokens[i] >= core->config.vocab) {
            return CAUSE_INVALID;
        }
    }
    if (core->node.is_draining) {
        return CAUSE_DRAINING;
    }
    int64_t backlog_ms = budget_backlog_ms(&core->budget, core->backlog_tokens);
    if (core->backlog_tokens > 0 && backlog_ms > span_to_ms(core->node.config.timers.backlog)) {
        return CAUSE_BUSY;
    }
    return CAUSE_NONE;
}

static void prefill_send_open(struct prefill_core *core, struct prefill_entry *entry,
                              struct effects *out) {
    struct session *peer = &core->node.sessions[entry->peer];
    if (entry->is_open_sent || !session_is_live(peer)) {
        return;
    }
    entry->is_open_sent = true;
    core->opens_pending--;
    struct message *open = node_send(&core->node, peer, MESSAGE_OPEN, out);
    open->u.open.slot = entry->slot;
    open->u.open.key = entry->key;
    open->u.open.from = entry->from;
    open->u.open.end = entry->end;
    open->u.open.bytes = (uint64_t)(entry->end - entry->from) * core->config.layout->token_bytes;
}

static struct session *prefill_peer(struct prefill_core *core, const struct message *message,
                                    struct effects *out) {
    struct session *peer = node_find(&core->node, ROLE_DECODE, message->u.prefill.decode);
    return peer != NULL ? peer
                        : node_open(&core->node, ROLE_DECODE, message->u.prefill.decode,
                                    message->u.prefill.address, out);
}

static void prefill_admit(struct prefill_core *core, struct session *session,
                          const struct message *message, struct effects *out) {
    struct attempt_id attempt = message->u.prefill.attempt;
    if (attempt.v == 0 || prefill_by_attempt(core, session, attempt) != NULL) {
        node_end(&core->node, session, CAUSE_SESSION_ERROR, out);
        return;
    }
    enum cause refused = prefill_admissible(core, message);
    uint32_t end = message->u.prefill.token_count - 1;
    uint32_t words = WORDS_NONE;
    uint64_t id = 0;
    struct session *peer = NULL;
    if (refused == CAUSE_NONE &&
        words_take(&core->words, end + pages_for(&core->pages, end), &words) != STATUS_OK) {
        refused = CAUSE_BUSY;
    }
    if (refused == CAUSE_NONE && (peer = prefill_peer(core, message, out)) == NULL) {
        refused = CAUSE_BUSY;
    }
    if (refused == CAUSE_NONE && prefill_by_slot(core, peer, message->u.prefill.slot) != NULL) {
        refused = CAUSE_INVALID; /* one slot, one hand-off */
    }
    if (refused == CAUSE_NONE && pool_take(&core->ids, &id) != STATUS_OK) {
        refused = CAUSE_BUSY;
    }
    if (refused != CAUSE_NONE) {
        words_free(&core->words, words);
        prefill_busy(core, session, attempt, refused, out);
        return;
    }
    uint32_t at = pool_index(id);
    struct prefill_entry *entry = &core->entries[at];
    *entry = (struct prefill_entry){
        .id = id,
        .state = PREFILL_QUEUED,
        .attempt = attempt,
        .slot = message->u.prefill.slot,
        .key = message->u.prefill.key,
        .router = node_session_index(&core->node, session),
        .peer = node_session_index(&core->node, peer),
        .router_stream = session->stream,
        .router_incarnation = session->incarnation,
        .peer_stream = peer->stream,
        .words = words,
        .end = end,
        .from = message->u.prefill.from,
        .salt = message->u.prefill.salt,
        .since = core->node.now,
        .state_since = core->node.now,
        .moved = core->node.now,
        .deadline = instant_add(core->node.now, span_ms(message->u.prefill.deadline_ms))};
    text_copy(entry->label, LABEL_MAX, message->u.prefill.label);
    memcpy(prefill_tokens(core, entry), message->u.prefill.tokens, end * sizeof(uint32_t));
    ledger_create(&core->node, PREFILL_QUEUED);
    map_add(&core->by_attempt, prefill_hash(session->stream, attempt.v), at);
    map_add(&core->by_slot, prefill_hash(peer->stream, entry->slot.v), at);
    list_push_back(&session->entries, ROUTER_LINKS(core), at);
    list_push_back(&peer->entries, PEER_LINKS(core), at);
    list_push_back(&core->queue, QUEUE_LINKS(core), at);
    struct message *queued = node_send(&core->node, session, MESSAGE_QUEUED, out);
    queued->u.queued.attempt = attempt;
    queued->u.queued.backlog_ms = budget_backlog_ms(&core->budget, core->backlog_tokens);
    core->backlog_tokens += end;
    core->opens_pending++;
    prefill_send_open(core, entry, out);
}

/* Opens that waited for the session to D to come up; in turns of bounded size. */
static void prefill_send_opens(struct prefill_core *core, struct effects *out) {
    core->is_opening_due = false;
    uint32_t at = core->queue.head;
    while (at != LIST_NONE && core->opens_pending > 0) {
        if (effects_room(out) < 64) {
            core->is_opening_due = true; /* the rest in the next turn */
            return;
        }
        struct prefill_entry *entry = &core->entries[at];
        at = entry->queue_link.next;
        prefill_send_open(core, entry, out);
    }
}

/* --- mail from D
 * ---------------------------------------------------------------------------------- */

static void prefill_accept(struct prefill_core *core, struct session *session,
                           const struct message *accept, struct effects *out) {
    struct prefill_entry *entry = prefill_by_slot(core, session, accept->u.accept.slot);
    if (entry == NULL || entry->state == PREFILL_LEAVING) {
        return;
    }
    if (entry->state != PREFILL_QUEUED || entry->is_accepted || !entry->is_open_sent ||
        accept->u.accept.address_len == 0 || accept->u.accept.address_len > WORKER_ADDRESS_MAX) {
        node_end(&core->node, session, CAUSE_SESSION_ERROR, out);
        return;
    }
    list_remove(&core->queue, QUEUE_LINKS(core), prefill_index(core, entry));
    entry->is_accepted = true;
    list_push_back(&core->ready, QUEUE_LINKS(core), prefill_index(core, entry));
    if (session->link_peer == 0) {
        session->link_peer = ++core->node.next_link_peer;
        session->is_link_used = true;
        memcpy(core->address, accept->u.accept.address, accept->u.accept.address_len);
        struct effect *connect = effects_add(out, EFFECT_LINK_CONNECT);
        connect->u.connect.peer = session->link_peer;
        connect->u.connect.address = core->address;
        connect->u.connect.address_len = accept->u.accept.address_len;
    }
}

static void prefill_commit(struct prefill_core *core, struct session *session,
                           const struct message *commit, struct effects *out) {
    struct prefill_entry *entry = prefill_by_slot(core, session, commit->u.commit.slot);
    if (entry == NULL || entry->state == PREFILL_LEAVING) {
        return;
    }
    if (entry->state != PREFILL_SENT) {
        node_end(&core->node, session, CAUSE_SESSION_ERROR, out);
        return;
    }
    struct span after = instant_since(core->node.real, entry->computed_at);
    entry->exposed.ns += after.ns > 1 ? after.ns : 1; /* told as 0 it would pass for unknown */
    histogram_add(&core->exposed, entry->exposed);
    prefill_decide(core, entry, OUTCOME_OK, CAUSE_DONE, out);
}

static void prefill_decode_mail(struct prefill_core *core, struct session *session,
                                const struct message *message, struct effects *out) {
    if (message->kind == MESSAGE_ACCEPT) {
        prefill_accept(core, session, message, out);
    } else if (message->kind == MESSAGE_COMMIT) {
        prefill_commit(core, session, message, out);
    } else if (message->kind == MESSAGE_REFUSE) {
        struct prefill_entry *entry = prefill_by_slot(core, session, message->u.refuse.slot);
        if (entry != NULL) {
            prefill_decide(core, entry, OUTCOME_FAILED, CAUSE_PEER_REFUSED, out);
        }
    } else {
        node_end(&core->node, session, CAUSE_SESSION_ERROR, out);
    }
}

static void prefill_router_mail(struct prefill_core *core, struct session *session,
                                const struct message *message, struct effects *out) {
    if (message->kind == MESSAGE_PREFILL) {
        prefill_admit(core, session, message, out);
    } else if (message->kind == MESSAGE_ABORT) {
        struct prefill_entry *entry = prefill_by_attempt(core, session, message->u.abort.attempt);
        if (entry != NULL) {
            prefill_decide(core, entry, OUTCOME_ABORTED, message->u.abort.cause, out);
        }
    } else {
        node_end(&core->node, session, CAUSE_SESSION_ERROR, out);
    }
}

/* --- audits
 * ------------------------------------------------------------------------------------------ */

static struct prefill_entry *prefill_named(struct prefill_core *core, const struct session *session,
                                           uint64_t id) {
    return session->role == ROLE_ROUTER ? prefill_by_attempt(core, session, (struct attempt_id){id})
                                        : prefill_by_slot(core, session, (struct slot_id){id});
}

static void prefill_audited(struct prefill_core *core, struct session *session,
                            const struct message *audit, struct effects *out) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < audit->u.audit.count && count < MESSAGE_IDS_MAX; i++) {
        struct prefill_entry *entry = prefill_named(core, session, audit->u.audit.ids[i]);
        if (entry == NULL || entry->state == PREFILL_LEAVING) {
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

static void prefill_unknown(struct prefill_core *core, struct session *session,
                            const struct message *unknown, struct effects *out) {
    for (uint32_t i = 0; i < unknown->u.audit.count && effects_room(out) > 8 * EFFECTS_PER_END;
         i++) {
        struct prefill_entry *entry = prefill_named(core, session, unknown->u.audit.ids[i]);
        if (entry == NULL || entry->state == PREFILL_LEAVING) {
            continue;
        }
        core->node.stats.audit_mismatch++;
        node_note(out, NOTE_AUDIT_MISMATCH, session->role, CAUSE_AUDIT, entry->id, entry->attempt.v,
                  entry->label);
        prefill_decide(core, entry, OUTCOME_FAILED, CAUSE_AUDIT, out);
    }
}

/* To R: every attempt it mentioned. To D: only slots that D has mentioned, by Accept: listing
 * others would kill healthy requests that D has not met yet (checked in the session model). */
static void prefill_send_audits(struct prefill_core *core, struct effects *out) {
    for (uint32_t i = 0; i < core->node.config.sessions_max && effects_room(out) > 64; i++) {
        struct session *session = &core->node.sessions[i];
        if (!node_audit_is_due(&core->node, session, core->out_ids_used)) {
            continue;
        }
        bool is_router = session->role == ROLE_ROUTER;
        uint64_t *ids = core->out_ids + core->out_ids_used;
        uint32_t count = 0;
        uint32_t at = session->entries.head;
        while (at != LIST_NONE && core->out_ids_used + count < MESSAGE_IDS_MAX) {
            const struct prefill_entry *entry = &core->entries[at];
            if (is_router || entry->is_accepted) {
                ids[count++] = is_router ? entry->attempt.v : entry->slot.v;
            }
            at = is_router ? entry->router_link.next : entry->peer_link.next;
        }
        core->out_ids_used += count;
        if (count > 0) {
            struct message *audit = node_send(&core->node, session, MESSAGE_AUDIT, out);
            audit->u.audit.count = count;
            audit->u.audit.ids = ids;
        }
    }
}

/* --- sends and steps
 * ------------------------------------------------------------------------------------ */

/* Hands tokens [first, end) of components [component, component + count) to the link. */
static void prefill_send(struct prefill_core *core, struct prefill_entry *entry, uint32_t component,
                         uint32_t count, uint32_t first, uint32_t end, struct effects *out) {
    if (first < entry->from) {
        first = entry->from;
    }
    if (first >= end || count == 0) {
        return;
    }
    struct effect *send = effects_add(out, EFFECT_LINK_SEND);
    send->u.send.op = entry->id;
    send->u.send.peer = core->node.sessions[entry->peer].link_peer;
    send->u.send.slot = entry->slot;
    send->u.send.key = entry->key;
    send->u.send.component_first = component;
    send->u.send.component_count = count;
    send->u.send.token_first = first;
    send->u.send.token_count = end - first;
    send->u.send.pages = prefill_pages(core, entry);
    send->u.send.page_count = entry->page_count;
    if (entry->sends == 0) {
        entry->moved = core->node.now;
    }
    entry->sends++;
    core->sends++;
    uint64_t bytes = layout_range_bytes(core->config.layout, component, count, end - first);
    entry->bytes_handed += bytes;
    core->bytes_sent += bytes;
}

/* Everything is computed, since computed_at, and handed over: announce the total and wait for D's
 * word. */
static void prefill_finish(struct prefill_core *core, struct prefill_entry *entry,
                           struct instant computed_at, struct effects *out) {
    entry->computed_at = computed_at;
    entry->exposed.ns = core->held.ns - entry->held_before.ns;
    struct session *peer = &core->node.sessions[entry->peer];
    struct message *fin = node_send(&core->node, peer, MESSAGE_FIN, out);
    fin->u.fin.slot = entry->slot;
    fin->u.fin.bytes = entry->bytes_handed;
    fin->u.fin.cached = entry->cached;
    list_remove(&core->active, QUEUE_LINKS(core), prefill_index(core, entry));
    prefill_move(core, entry, PREFILL_SENT);
}

static void prefill_layer_done(struct prefill_core *core, const struct event *event,
                               struct effects *out) {
    const struct kv_layout *layout = core->config.layout;
    uint32_t layer = event->u.layer_done.layer;
    if (!core->is_stepping || event->u.layer_done.number != core->plan.number ||
        layer >= layout->layer_count) {
        core->node.stats.stale_events++;
        return;
    }
    node_progressed(&core->node);
    uint32_t end = layout->layer_first[layer + 1];
    bool is_last = layer + 1 == layout->layer_count;
    for (uint32_t i = 0; i < core->plan.row_count; i++) {
        const struct plan_row *row = &core->rows[i];
        struct prefill_entry *entry = prefill_by_id(core, row->entry);
        if (entry == NULL || entry->state != PREFILL_COMPUTING || end <= entry->component_next) {
            continue;
        }
        uint32_t count = end - entry->component_next;
        uint64_t bytes = layout_range_bytes(layout, entry->component_next, count, row->token_count);
        if (is_last || bytes >= core->config.batch_bytes) {
            prefill_send(core, entry, entry->component_next, count, row->position,
                         row->position + row->token_count, out);
            entry->component_next = end;
        }
    }
}

static void prefill_step_row(struct prefill_core *core, struct prefill_entry *entry,
                             const struct plan_row *row, struct instant ended,
                             struct effects *out) {
    /* Layers whose notice did not come go now: a lost notice costs overlap, nothing else. */
    prefill_send(core, entry, entry->component_next,
                 core->config.layout->component_count - entry->component_next, row->position,
                 row->position + row->token_count, out);
    uint32_t full = entry->computed / core->config.layout->page_tokens;
    entry->computed += row->token_count;
    core->backlog_tokens -= row->token_count;
    core->tokens_computed += row->token_count;
    pages_index(&core->pages, entry->salt, prefill_tokens(core, entry), prefill_pages(core, entry),
                full, entry->computed / core->config.layout->page_tokens);
    if (entry->computed == entry->end) {
        prefill_finish(core, entry, ended, out);
    }
}

static void prefill_step_done(struct prefill_core *core, const struct event *event,
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
    for (uint32_t i = 0; i < core->plan.row_count; i++) {
        struct prefill_entry *entry = prefill_by_id(core, core->rows[i].entry);
        CHECK(entry != NULL && entry->is_in_step);
        entry->is_in_step = false;
        if (entry->state == PREFILL_LEAVING) {
            prefill_settle(core, entry);
            continue;
        }
        CHECK(event->u.step_done.status != STATUS_CANCELLED);
        if (!is_ok) {
            prefill_decide(core, entry, OUTCOME_FAILED, CAUSE_STEP_FAILED, out);
        } else {
            prefill_step_row(core, entry, &core->rows[i], event->u.step_done.ended, out);
        }
    }
}

/* Takes pages and starts computing; false if the pool is full now. */
static bool prefill_start(struct prefill_core *core, struct prefill_entry *entry,
                          struct effects *out) {
    uint32_t page_tokens = core->config.layout->page_tokens;
    uint32_t *table = prefill_pages(core, entry);
    uint32_t total = pages_for(&core->pages, entry->end);
    uint32_t matched = pages_match(&core->pages, entry->salt, prefill_tokens(core, entry),
                                   entry->end / page_tokens, table);
    if (pages_take(&core->pages, total - matched, table + matched) != STATUS_OK) {
        pages_release(&core->pages, table, matched);
        return false;
    }
    uint32_t at = prefill_index(core, entry);
    entry->page_count = total;
    entry->cached = matched * page_tokens;
    entry->computed = entry->cached;
    pages_count(&core->pages, entry->end, entry->cached);
    core->backlog_tokens -= entry->computed;
    core->tokens_cached += entry->computed;
    list_remove(&core->ready, QUEUE_LINKS(core), at);
    list_push_back(&core->active, QUEUE_LINKS(core), at);
    entry->held_before = core->held;
    prefill_move(core, entry, PREFILL_COMPUTING);
    prefill_send(core, entry, 0, core->config.layout->component_count, 0, entry->computed, out);
    if (entry->computed == entry->end) {
        prefill_finish(core, entry, core->node.real, out);
    }
    return true;
}

static void prefill_plan_row(struct prefill_core *core, struct prefill_entry *entry,
                             uint32_t room) {
    struct step_plan *plan = &core->plan;
    struct plan_row *row = &core->rows[plan->row_count++];
    uint32_t left = entry->end - entry->computed;
    uint32_t count = left < room ? left : room;
    *row = (struct plan_row){.entry = entry->id,
                             .position = entry->computed,
                             .token_count = count,
                             .token_first = plan->token_count,
                             .page_first = plan->page_count,
                             .page_count = pages_for(&core->pages, entry->computed + count),
                             .output_first = entry->end + 1};
    memcpy(core->row_tokens + plan->token_count, prefill_tokens(core, entry) + entry->computed,
           count * sizeof(uint32_t));
    CHECK_OP(plan->page_count + row->page_count, <=, core->row_pages_cap);
    memcpy(core->row_pages + plan->page_count, prefill_pages(core, entry),
           row->page_count * sizeof(uint32_t));
    plan->token_count += count;
    plan->page_count += row->page_count;
    entry->is_in_step = true;
    entry->component_next = 0;
}

/* Others may have computed since what it was going to: that is taken from the index and goes to D
 * as it is. Only at the end of a page, since what lies in a page that is begun may be on its way.
 */
static void prefill_match_more(struct prefill_core *core, struct prefill_entry *entry,
                               struct effects *out) {
    uint32_t page_tokens = core->config.layout->page_tokens;
    if (entry->computed % page_tokens != 0) {
        return;
    }
    uint32_t before = entry->computed;
    uint32_t pages = pages_match_more(&core->pages, entry->salt, prefill_tokens(core, entry),
                                      before / page_tokens, entry->end / page_tokens,
                                      prefill_pages(core, entry));
    entry->computed = pages * page_tokens;
    uint32_t found = entry->computed - before;
    entry->cached += found;
    pages_count(&core->pages, 0, found);
    core->backlog_tokens -= found;
    core->tokens_cached += found;
    prefill_send(core, entry, 0, core->config.layout->component_count, before, entry->computed,
                 out);
}

/* Whether a row of this step computes what it would compute, so that the next one finds it. Asked
 * once at each place: whoever is waited for may end without a result. */
static bool prefill_yields(struct prefill_core *core, struct prefill_entry *entry) {
    if (entry->yielded == entry->computed + 1) {
        return false;
    }
    struct pages_run mine = {entry->salt, prefill_tokens(core, entry), entry->end};
    for (uint32_t i = 0; i < core->plan.row_count; i++) {
        const struct plan_row *row = &core->rows[i];
        struct prefill_entry *other = prefill_by_id(core, row->entry);
        CHECK(other != NULL);
        struct pages_run theirs = {other->salt, prefill_tokens(core, other),
                                   row->position + row->token_count};
        if (pages_are_common(&core->pages, mine, theirs, entry->computed,
                             core->config.shared_min)) {
            entry->yielded = entry->computed + 1;
            return true;
        }
    }
    return false;
}

/* Starts prompts that D has accepted, in that order; a full pool makes the first of them wait, and
 * all behind it: whoever holds pages ends alone, so the wait is bounded and nobody is overtaken for
 * ever. Those that D has not accepted are not looked at. */
static void prefill_start_queued(struct prefill_core *core, struct effects *out) {
    while (core->ready.head != LIST_NONE && core->active.count < core->config.rows_max &&
           effects_room(out) > 64) {
        if (!prefill_start(core, &core->entries[core->ready.head], out)) {
            break;
        }
    }
}

/* Whether outstanding sends keep the next step back, and for how long they have done so. */
static bool prefill_is_held(struct prefill_core *core) {
    bool is_held = core->sends > core->config.sends_high;
    if (core->held_since.ns != 0 && !is_held) {
        core->held.ns += instant_since(core->node.real, core->held_since).ns;
        core->held_since.ns = 0;
    } else if (core->held_since.ns == 0 && is_held) {
        core->held_since = core->node.real;
    }
    return is_held;
}

/* Once nobody is left who wants what is being computed, their pages need not wait for all of it. */
static void prefill_abandon(struct prefill_core *core, struct effects *out) {
    if (!core->is_stepping || core->is_abandoned || effects_room(out) < 1) {
        return;
    }
    for (uint32_t i = 0; i < core->plan.row_count; i++) {
        const struct prefill_entry *entry = prefill_by_id(core, core->rows[i].entry);
        CHECK(entry != NULL);
        if (entry->state != PREFILL_LEAVING) {
            return;
        }
    }
    core->is_abandoned = true;
    core->steps_abandoned++;
    effects_add(out, EFFECT_STEP_ABANDON)->u.abandon.number = core->plan.number;
}

static void prefill_plan(struct prefill_core *core, struct effects *out) {
    if (core->is_stepping || prefill_is_held(core) || effects_room(out) < 128) {
        return;
    }
    prefill_start_queued(core, out);
    if (core->active.count == 0) {
        return;
    }
    core->plan = (struct step_plan){.number = core->plan.number + 1,
                                    .rows = core->rows,
                                    .tokens = core->row_tokens,
                                    .pages = core->row_pages,
                                    .wants_layers = true};
    uint32_t at = core->active.head;
    while (at != LIST_NONE && core->plan.row_count < core->config.rows_max &&
           core->plan.token_count < core->budget.tokens && effects_room(out) > 64) {
        struct prefill_entry *entry = &core->entries[at];
        at = entry->queue_link.next;
        prefill_match_more(core, entry, out);
        if (entry->computed == entry->end) {
            prefill_finish(core, entry, core->node.real, out);
        } else if (!prefill_yields(core, entry)) {
            prefill_plan_row(core, entry, core->budget.tokens - core->plan.token_count);
        }
    }
    if (core->plan.row_count == 0) { /* nothing is left to compute */
        core->plan.number--;
        return;
    }
    core->is_stepping = true;
    core->is_abandoned = false;
    core->steps++;
    effects_add(out, EFFECT_STEP)->u.plan = &core->plan;
}

/* --- time and ends
 * -------------------------------------------------------------------------------------- */

static struct session *prefill_link_session(struct prefill_core *core, uint64_t peer) {
    for (uint32_t i = 0; i < core->node.config.sessions_max; i++) {
        struct session *session = &core->node.sessions[i];
        if (session->phase != SESSION_FREE && session->link_peer == peer) {
            return session;
        }
    }
    return NULL;
}

static void prefill_link_event(struct prefill_core *core, const struct event *event,
                               struct effects *out) {
    if (event->kind == EVENT_LINK_SENT) {
        struct prefill_entry *entry = prefill_by_id(core, event->u.sent.op);
        CHECK(entry != NULL && entry->sends > 0 && core->sends > 0);
        entry->sends--;
        core->sends--;
        entry->moved = core->node.now;
        if (event->u.sent.status != STATUS_OK) {
            prefill_decide(core, entry, OUTCOME_FAILED, CAUSE_SEND_FAILED, out);
        } else {
            node_progressed(&core->node);
        }
        prefill_settle(core, entry);
        return;
    }
    struct session *session = prefill_link_session(core, event->u.peer.peer);
    if (session == NULL) {
        core->node.stats.stale_events++;
    } else if (event->kind == EVENT_LINK_FAILED) {
        node_end(&core->node, session, CAUSE_SEND_FAILED, out);
    } else {
        CHECK(session->is_link_closing && !session->is_link_closed);
        session->is_link_closed = true;
    }
}

static void prefill_sweep_sessions(struct prefill_core *core, struct effects *out) {
    if (core->node.sessions_ended == 0) {
        return;
    }
    for (uint32_t i = 0; i < core->node.config.sessions_max; i++) {
        struct session *session = &core->node.sessions[i];
        if (session->phase != SESSION_ENDED) {
            continue;
        }
        while (session->entries.head != LIST_NONE && effects_room(out) > 8 * EFFECTS_PER_END) {
            struct prefill_entry *entry = &core->entries[session->entries.head];
            enum outcome outcome = session->role == ROLE_ROUTER ? OUTCOME_ABORTED : OUTCOME_FAILED;
            prefill_decide(core, entry, outcome, session->cause, out);
        }
        if (session->is_link_used && !session->is_link_closing && effects_room(out) > 1) {
            session->is_link_closing = true;
            effects_add(out, EFFECT_LINK_CLOSE)->u.link_close.peer = session->link_peer;
        }
        (void)node_release(&core->node,
                           session); /* false: its stream or endpoint still has to end */
    }
}

static void prefill_reap(struct prefill_core *core, struct prefill_entry *entry,
                         struct effects *out) {
    struct node *node = &core->node;
    if (entry->sends > 0 &&
        instant_reached(node->now, instant_add(entry->moved, node->config.timers.stall))) {
        struct session *peer = &node->sessions[entry->peer];
        if (peer->stream.v == entry->peer_stream.v) {
            node_end(node, peer, CAUSE_STALL, out); /* its endpoint closes, which ends the sends */
        }
    }
    if (entry->state != PREFILL_LEAVING && instant_reached(node->now, entry->deadline)) {
        node->ledger.reaped[entry->state]++;
        prefill_decide(core, entry, OUTCOME_FAILED, CAUSE_DEADLINE, out);
    }
}

static void prefill_tick(struct prefill_core *core, struct effects *out) {
    struct node *node = &core->node;
    node->stats.overrun_ns = 0;
    for (uint32_t i = pool_next(&core->ids, 0); i != UINT32_MAX; i = pool_next(&core->ids, i + 1)) {
        struct prefill_entry *entry = &core->entries[i];
        if (effects_room(out) > 8 * EFFECTS_PER_END) {
            if (node_is_grace_over(node)) {
                prefill_decide(core, entry, OUTCOME_FAILED, CAUSE_SHUTDOWN, out);
            }
            if (entry->state != PREFILL_NONE) {
                prefill_reap(core, entry, out);
            }
        }
        int64_t over = node->now.ns - entry->deadline.ns;
        if (entry->state != PREFILL_NONE && over > node->stats.overrun_ns) {
            node->stats.overrun_ns = over;
        }
    }
    node->beat_pages_free = pages_available(&core->pages);
    node->beat_backlog_ms = budget_backlog_ms(&core->budget, core->backlog_tokens);
    node->beat_backlog_tokens =
        core->backlog_tokens < UINT32_MAX ? (uint32_t)core->backlog_tokens : UINT32_MAX;
    node_tick(node, out);
    prefill_send_audits(core, out);
}

static void prefill_mail(struct prefill_core *core, struct session *session,
                         const struct message *message, struct effects *out) {
    if (message->kind == MESSAGE_HELLO || message->kind == MESSAGE_BEAT) {
        core->is_opening_due = core->is_opening_due || message->kind == MESSAGE_HELLO;
        return;
    }
    if (message->kind == MESSAGE_AUDIT) {
        prefill_audited(core, session, message, out);
    } else if (message->kind == MESSAGE_UNKNOWN) {
        prefill_unknown(core, session, message, out);
    } else if (session->role == ROLE_ROUTER) {
        prefill_router_mail(core, session, message, out);
    } else {
        prefill_decode_mail(core, session, message, out);
    }
}

void prefill_core_step(struct prefill_core *core, const struct event *event, struct instant now,
                       struct effects *out) {
    struct session *session = NULL;
    out->count = 0;
    core->out_ids_used = 0;
    node_observe(&core->node, now);
    switch (event->kind) {
    case EVENT_TICK: prefill_tick(core, out); break;
    case EVENT_DRAIN: node_drain(&core->node, event->u.drain.grace, out); break;
    case EVENT_STREAM_ACCEPTED:
    case EVENT_STREAM_MAIL:
    case EVENT_STREAM_BAD:
    case EVENT_STREAM_ENDED:
        session = node_event(&core->node, event, out);
        if (session != NULL) {
            prefill_mail(core, session, event->u.mail.message, out);
        }
        break;
    case EVENT_LAYER_DONE: prefill_layer_done(core, event, out); break;
    case EVENT_STEP_DONE: prefill_step_done(core, event, out); break;
    case EVENT_LINK_SENT:
    case EVENT_LINK_FAILED:
    case EVENT_LINK_CLOSED: prefill_link_event(core, event, out); break;
    case EVENT_CLIENT_OPEN:
    case EVENT_TOKENIZED:
    case EVENT_CLIENT_GONE:
    case EVENT_CLIENT_ABORT:
    case EVENT_STOP_FOUND:
    case EVENT_ANSWERED:
    case EVENT_WORKER_SEEN:
    case EVENT_WORKER_LOST:
    case EVENT_LINK_PROGRESS:
    case EVENT_LINK_COVERED:
    case EVENT_LINK_BAD:
    case EVENT_LINK_DISARMED: core->node.stats.stale_events++; break; /* not this role's */
    }
    if (core->is_opening_due) {
        prefill_send_opens(core, out);
    }
    prefill_sweep_sessions(core, out);
    prefill_abandon(core, out);
    prefill_plan(core, out);
    publisher_step(&core->publisher, &core->node, &core->pages, event->kind == EVENT_TICK, out);
    node_exit_when_idle(&core->node, out);
}

struct instant prefill_core_deadline(const struct prefill_core *core) {
    bool is_soon = core->node.sessions_ended > 0 || core->is_opening_due;
    return instant_add(core->node.real, span_ms(is_soon ? 1 : TICK_MS));
}

/* --- for people and tests
 * ---------------------------------------------------------------------------------- */

static const char *prefill_waits_for(const struct prefill_core *core,
                                     const struct prefill_entry *entry) {
    switch (entry->state) {
    case PREFILL_NONE: return "";
    case PREFILL_QUEUED:
        if (!entry->is_open_sent) {
            return "the session to the decode worker";
        }
        return entry->is_accepted ? "its turn to compute" : "the decode worker's Accept";
    case PREFILL_COMPUTING:
        if (entry->is_in_step) {
            return "its engine step";
        }
        return core->sends > core->config.sends_high ? "KV sends to end" : "its turn in a step";
    case PREFILL_SENT:
        return entry->sends > 0 ? "its KV sends to end" : "the decode worker's Commit";
    case PREFILL_LEAVING:
        return entry->is_in_step ? "its engine step to end" : "its KV sends to end";
    }
    return "";
}

static const char *prefill_next_deadline(const struct prefill_core *core,
                                         const struct prefill_entry *entry,
                                         struct instant *next_out) {
    *next_out = entry->deadline;
    if (entry->sends > 0) {
        struct instant stall = instant_add(entry->moved, core->node.config.timers.stall);
        if (stall.ns < next_out->ns) {
            *next_out = stall;
            return "T_stall: no KV send ended";
        }
    }
    return entry->state == PREFILL_LEAVING ? "the bound of its own operations"
                                           : "the request's deadline";
}

bool prefill_view(const struct prefill_core *core, uint32_t *cursor, struct entry_view *view_out) {
    while (*cursor < core->config.entries_max) {
        const struct prefill_entry *entry = &core->entries[(*cursor)++];
        if (entry->state == PREFILL_NONE) {
            continue;
        }
        struct instant next = INSTANT_NEVER;
        const char *deadline = prefill_next_deadline(core, entry, &next);
        *view_out = (struct entry_view){
            .id = entry->id,
            .attempt = entry->attempt.v,
            .state = prefill_state_name(entry->state),
            .age_ms = span_to_ms(instant_since(core->node.now, entry->since)),
            .state_age_ms = span_to_ms(instant_since(core->node.now, entry->state_since)),
            .deadline_left_ms = span_to_ms(instant_since(next, core->node.now)),
            .deadline = deadline,
            .router = entry->router_incarnation.v,
            .operations = prefill_operations(entry),
            .tokens = entry->end + 1,
            .pages = entry->page_count,
            .bytes = entry->bytes_handed,
            .cached = entry->from,
            .waits_for = prefill_waits_for(core, entry)};
        text_copy(view_out->label, LABEL_MAX, entry->label);
        const uint32_t index[2] = {entry->router, entry->peer};
        const bool is_linked[2] = {entry->router_link.is_linked, entry->peer_link.is_linked};
        for (uint32_t i = 0; i < 2; i++) {
            if (is_linked[i]) {
                node_view_peer(&core->node, view_out, i, index[i],
                               core->node.sessions[index[i]].id);
            }
        }
        return true;
    }
    return false;
}

void prefill_verify(const struct prefill_core *core) {
    uint32_t live = 0;
    uint32_t sends = 0;
    uint32_t in_step = 0;
    uint32_t pending = 0;
    uint64_t references = 0;
    uint64_t backlog = 0;
    for (uint32_t i = 0; i < core->config.entries_max; i++) {
        const struct prefill_entry *entry = &core->entries[i];
        if (entry->state == PREFILL_NONE) {
            CHECK(pool_id_at(&core->ids, i) == 0);
            continue;
        }
        bool is_leaving = entry->state == PREFILL_LEAVING;
        live++;
        sends += entry->sends;
        in_step += entry->is_in_step ? 1 : 0;
        references += entry->page_count;
        pending += !is_leaving && !entry->is_open_sent ? 1 : 0;
        backlog += entry->state == PREFILL_QUEUED || entry->state == PREFILL_COMPUTING
                       ? entry->end - entry->computed
                       : 0;
        CHECK(pool_id_at(&core->ids, i) == entry->id);
        CHECK(!instant_is_never(entry->deadline));
        CHECK(is_leaving == (entry->outcome != OUTCOME_NONE));
        CHECK(is_leaving != entry->router_link.is_linked);
        CHECK(is_leaving != entry->peer_link.is_linked);
        CHECK(entry->queue_link.is_linked ==
              (entry->state == PREFILL_QUEUED || entry->state == PREFILL_COMPUTING));
        CHECK(!is_leaving || prefill_operations(entry) > 0);
        CHECK(entry->state != PREFILL_QUEUED ||
              (prefill_operations(entry) == 0 && entry->page_count == 0));
        CHECK(!entry->is_in_step || entry->state != PREFILL_SENT);
        CHECK(entry->state != PREFILL_SENT ||
              (entry->computed_at.ns <= core->node.real.ns && entry->exposed.ns >= 0));
        CHECK_OP(entry->computed, <=, entry->end);
    }
    uint64_t held = 0;
    for (uint32_t i = 0; i < core->config.page_count; i++) {
        held += core->pages.table[i].references;
    }
    CHECK_OP(held, ==, references);
    CHECK_OP(live, ==, core->node.ledger.live);
    CHECK_OP(sends, ==, core->sends);
    CHECK_OP(pending, ==, core->opens_pending);
    CHECK_OP(backlog, ==, core->backlog_tokens);
    CHECK_OP(core->is_stepping ? core->plan.row_count : 0, ==, in_step);
    CHECK(!core->is_stepping || core->held_since.ns == 0);
    CHECK_OP(ledger_imbalance(&core->node.ledger), ==, 0);
    CHECK_OP(core->words.taken, ==, core->node.ledger.live);
    pages_verify(&core->pages);
}
