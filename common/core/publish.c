#include "core/publish.h"

#include "base/check.h"

_Static_assert(PUBLISH_CREDIT <= MESSAGE_BLOCKS_MAX, "one message can hold a whole credit");

void publisher_init(struct publisher *publisher, uint32_t sessions_max, struct arena *arena) {
    struct publish_reader *readers = arena_take(arena, (uint64_t)sessions_max * sizeof *readers);
    uint64_t *stored = arena_take(arena, (uint64_t)PUBLISH_OUT * sizeof *stored);
    uint64_t *removed = arena_take(arena, (uint64_t)PUBLISH_OUT * sizeof *removed);
    *publisher = (struct publisher){.readers = readers, .stored = stored, .removed = removed};
}

static bool publish_is_wanted(const struct session *session) {
    return session->phase == SESSION_LIVE && session->role == ROLE_ROUTER &&
           session->protocol >= PROTOCOL_CACHED;
}

/* From here on everything is told again. */
static void reader_rewind(struct publisher *publisher, struct publish_reader *reader,
                          const struct pages *pages) {
    reader->cursor = pages->changes_total;
    reader->walk = 0;
    reader->is_reset_due = true;
    publisher->walks++;
}

static void message_store(struct message *message, uint64_t *stored, uint64_t block) {
    stored[message->u.cached.stored_count++] = block;
}

/* What has changed since the cursor. Ends early where a block leaves that this message says has
 * come: a receiver takes what left before what came. */
static uint32_t reader_take_changes(struct publish_reader *reader, const struct pages *pages,
                                    uint32_t most, uint64_t *stored, uint64_t *removed,
                                    struct message *message) {
    uint64_t first = reader->cursor;
    uint32_t count = 0;
    while (reader->cursor < pages->changes_total && count < most) {
        const struct page_change *change = &pages->changes[reader->cursor & pages->changes_mask];
        if (change->stored_at > first) {
            break;
        }
        if (change->stored_at == 0) {
            message_store(message, stored, change->block);
        } else {
            removed[message->u.cached.removed_count++] = change->block;
        }
        reader->cursor++;
        count++;
    }
    return count;
}

static uint32_t reader_take_walk(struct publish_reader *reader, const struct pages *pages,
                                 uint32_t most, uint64_t *stored, struct message *message) {
    uint32_t count = 0;
    while (reader->walk < pages->capacity && reader->scan > 0 && count < most) {
        const struct page *page = &pages->table[reader->walk++];
        reader->scan--;
        if (page->is_indexed) {
            message_store(message, stored, page->block);
            count++;
        }
    }
    return count;
}

/* One message; false if there was nothing to say, or no room to say it. */
static bool reader_tell(struct publisher *publisher, struct node *node, struct session *session,
                        struct publish_reader *reader, const struct pages *pages,
                        struct effects *out) {
    uint32_t used = publisher->stored_used > publisher->removed_used ? publisher->stored_used
                                                                     : publisher->removed_used;
    uint32_t most = PUBLISH_OUT - used < reader->credit ? PUBLISH_OUT - used : reader->credit;
    if (most == 0 || effects_room(out) < 64) {
        return false;
    }
    if (pages->changes_total - reader->cursor > (uint64_t)pages->changes_mask + 1) {
        publisher->changes_dropped += pages->changes_total - reader->cursor;
        reader_rewind(publisher, reader, pages);
    }
    uint64_t *stored = publisher->stored + publisher->stored_used;
    uint64_t *removed = publisher->removed + publisher->removed_used;
    struct message told = {.kind = MESSAGE_CACHED};
    uint32_t count = reader_take_changes(reader, pages, most, stored, removed, &told);
    if (reader->cursor == pages->changes_total) {
        count += reader_take_walk(reader, pages, most - count, stored, &told);
    }
    bool is_recall = reader->is_reset_due && reader->is_told;
    if (count == 0 && !is_recall) {
        return false; /* an index that was empty all the time needs no words */
    }
    told.u.cached.is_reset = reader->is_reset_due;
    told.u.cached.stored = stored;
    told.u.cached.removed = removed;
    node_send(node, session, MESSAGE_CACHED, out)->u.cached = told.u.cached;
    reader->is_reset_due = false;
    reader->is_told = true;
    reader->credit -= count;
    publisher->stored_used += told.u.cached.stored_count;
    publisher->removed_used += told.u.cached.removed_count;
    publisher->blocks_sent += count;
    return true;
}

/* True if this session knows all there is to know. */
static bool publish_to(struct publisher *publisher, struct node *node, uint32_t at,
                       const struct pages *pages, struct effects *out) {
    struct session *session = &node->sessions[at];
    struct publish_reader *reader = &publisher->readers[at];
    if (!publish_is_wanted(session)) {
        return true;
    }
    if (reader->stream.v != session->stream.v) {
        *reader = (struct publish_reader){
            .stream = session->stream, .credit = PUBLISH_CREDIT, .scan = PUBLISH_SCAN};
        reader_rewind(publisher, reader, pages);
    }
    for (uint32_t i = 0; i < PUBLISH_MESSAGES; i++) {
        if (!reader_tell(publisher, node, session, reader, pages, out)) {
            break;
        }
    }
    return reader->cursor == pages->changes_total && reader->walk == pages->capacity;
}

void publisher_step(struct publisher *publisher, struct node *node, const struct pages *pages,
                    bool is_tick, struct effects *out) {
    publisher->stored_used = 0;
    publisher->removed_used = 0;
    uint32_t count = node->config.sessions_max;
    if (is_tick && instant_reached(
                       node->now, instant_add(publisher->credited, span_ms(PUBLISH_INTERVAL_MS)))) {
        publisher->credited = node->now;
        for (uint32_t i = 0; i < count; i++) {
            publisher->readers[i].credit = PUBLISH_CREDIT;
            publisher->readers[i].scan = PUBLISH_SCAN;
        }
    } else if (publisher->told == pages->changes_total) {
        return;
    }
    bool is_all = true;
    for (uint32_t i = 0; i < count; i++) {
        is_all = publish_to(publisher, node, (publisher->next + i) % count, pages, out) && is_all;
    }
    publisher->next = (publisher->next + 1) % count;
    publisher->told = is_all ? pages->changes_total : UINT64_MAX;
}
