#include "kvlink/link.h"

#include <string.h>

#include "base/check.h"
#include "kvlink/copysum.h"
#include "kvlink/sum.h"
#include "runtime/log.h"

#define ROWS_PER_TAKE 128u /* sums on the stack */

static void slot_mark(struct kvlink *link, struct slot *slot) {
    if (!slot->is_dirty) {
        slot->is_dirty = true;
        link->dirty_slots[link->dirty_count++] = pool_index(slot->id);
    }
}

static void slot_spoil(struct kvlink *link, struct slot *slot, enum kvlink_bad bad) {
    slot->bad = bad;
    slot_mark(link, slot);
    switch (bad) {
    case KVLINK_BAD_CHECKSUM: link_count(&link->counts.bad_checksum, 1); break;
    case KVLINK_BAD_RANGE: link_count(&link->counts.bad_range, 1); break;
    case KVLINK_BAD_LAYOUT: link_count(&link->counts.bad_layout, 1); break;
    case KVLINK_BAD_GAPS: link_count(&link->counts.bad_gaps, 1); break;
    }
}

/* Payload bytes that the layout gives for the header, or 0 if it names a component that is not
 * there. */
static uint64_t expected_bytes(const struct kvlink *link, const struct chunk_header *header) {
    uint32_t end = (uint32_t)header->component_first + header->component_count;
    if (end > link->layout->component_count) {
        return 0;
    }
    uint64_t rows = 0;
    for (uint32_t c = header->component_first; c < end; c++) {
        rows += link->layout->components[c].row_bytes;
    }
    return rows * header->token_count; /* < 2^10 * 2^32 * 2^20 */
}

struct payload {
    const uint8_t *at; /* not taken yet */
    struct chunk_sum sum;
    enum copysum_cpu cpu;
};

/* Takes rows off the payload's front, to `to` or (NULL) nowhere. */
static void take_rows(struct payload *payload, uint8_t *to, size_t row_bytes, size_t rows) {
    uint64_t sums[ROWS_PER_TAKE];
    while (rows > 0) {
        size_t count = rows < ROWS_PER_TAKE ? rows : ROWS_PER_TAKE;
        copysum_rows(payload->cpu, to, payload->at, row_bytes, count, sums);
        chunk_sum_rows(&payload->sum, sums, count);
        payload->at += count * row_bytes;
        to = to != NULL ? to + count * row_bytes : NULL;
        rows -= count;
    }
}

/* The rows of tokens [first, end) of a component, into the slot's pages. */
static void copy_rows(const struct kvlink *link, const struct slot *slot, struct payload *payload,
                      uint32_t component, uint32_t first, uint32_t end) {
    const struct kv_layout *layout = link->layout;
    while (first < end) {
        uint32_t in_page = first % layout->page_tokens;
        uint32_t run = layout->page_tokens - in_page;
        run = run < end - first ? run : end - first;
        uint8_t *to = link->kv + layout_row_offset(layout, slot->pages[first / layout->page_tokens],
                                                   component, in_page);
        take_rows(payload, to, layout->components[component].row_bytes, run);
        first += run;
    }
}

static void slot_take_chunk(struct kvlink *link, struct slot *slot,
                            const struct chunk_header *header, const uint8_t *header_bytes,
                            const void *data) {
    const struct kv_layout *layout = link->layout;
    if (expected_bytes(link, header) != header->bytes) {
        slot_spoil(link, slot, KVLINK_BAD_LAYOUT);
        return;
    }
    uint64_t token_end = (uint64_t)header->token_first + header->token_count;
    if (header->token_first < slot->token_first || token_end > slot->token_end) {
        slot_spoil(link, slot, KVLINK_BAD_RANGE);
        return;
    }
    uint32_t first = header->token_first;
    uint32_t end = (uint32_t)token_end;
    uint32_t component_end = (uint32_t)header->component_first + header->component_count;
    uint64_t fresh = 0;
    for (uint32_t c = header->component_first; c < component_end; c++) {
        struct coverage after = slot->coverage[c];
        fresh += (uint64_t)coverage_missing(&after, first, end) * layout->components[c].row_bytes;
        if (coverage_add(&after, first, end) != STATUS_OK) {
            slot_spoil(link, slot, KVLINK_BAD_GAPS);
            return;
        }
    }
    if (fresh == 0) {
        link_count(&link->counts.dropped_covered, 1);
        return;
    }
    struct payload payload = {.at = data, .cpu = link->cpu};
    chunk_sum_begin(&payload.sum);
    for (uint32_t c = header->component_first; c < component_end; c++) {
        size_t row_bytes = layout->components[c].row_bytes;
        uint32_t taken = first;
        uint32_t from = first;
        struct coverage_range gap;
        while (coverage_next_gap(&slot->coverage[c], &from, end, &gap)) {
            take_rows(&payload, NULL, row_bytes, gap.first - taken); /* covered before */
            copy_rows(link, slot, &payload, c, gap.first, gap.end);
            taken = gap.end;
        }
        take_rows(&payload, NULL, row_bytes, end - taken);
    }
    copysum_flush();
    if (chunk_sum_end(&payload.sum, header_bytes) != header->sum) {
        slot_spoil(link, slot, KVLINK_BAD_CHECKSUM);
        return;
    }
    for (uint32_t c = header->component_first; c < component_end; c++) {
        enum status added = coverage_add(&slot->coverage[c], first, end);
        CHECK_OP(added, ==, STATUS_OK); /* it fitted above */
    }
    slot->bytes_covered += fresh;
    CHECK_OP(slot->bytes_covered, <=, slot->bytes_total);
    slot_mark(link, slot);
    link_count(&link->counts.chunks_accepted, 1);
    link_count(&link->counts.bytes_accepted, fresh);
}

ucs_status_t link_on_chunk(void *arg, const void *header, size_t header_len, void *data, size_t len,
                           const ucp_am_recv_param_t *param) {
    struct kvlink *link = arg;
    link_count(&link->counts.chunks_received, 1);
    struct chunk_header chunk;
    /* A rendezvous descriptor carries no bytes: returning OK releases it unread. */
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 ||
        chunk_decode(header, header_len, &chunk) != STATUS_OK || chunk.bytes != len) {
        link_count(&link->counts.dropped_header, 1);
        return UCS_OK;
    }
    uint32_t index = pool_index(chunk.slot);
    if (index >= link->config.slots_max) {
        link_count(&link->counts.dropped_unknown, 1);
        return UCS_OK;
    }
    struct slot *slot = &link->slots[index];
    /* acquire: pairs with the release in kvlink_arm */
    if (atomic_load_explicit(&slot->state, memory_order_acquire) != SLOT_ARMED ||
        slot->id != chunk.slot) {
        link_count(&link->counts.dropped_unknown, 1);
    } else if (slot->key != chunk.key) {
        link_count(&link->counts.dropped_key, 1);
    } else if (slot->bad != 0) {
        link_count(&link->counts.dropped_bad_slot, 1);
    } else {
        slot_take_chunk(link, slot, &chunk, header, data);
    }
    return UCS_OK;
}

void link_tell_slots(struct kvlink *link) {
    const struct kvlink_callbacks *callbacks = &link->config.callbacks;
    void *context = link->config.context;
    uint32_t count = link->dirty_count;
    link->dirty_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct slot *slot = &link->slots[link->dirty_slots[i]];
        slot->is_dirty = false;
        if (slot->is_reported ||
            atomic_load_explicit(&slot->state, memory_order_relaxed) != SLOT_ARMED) {
            continue; /* told already, or nobody asks any more */
        }
        if (slot->bad != 0) {
            slot->is_reported = true;
            callbacks->on_bad(context, slot->id, slot->bad);
        } else if (slot->bytes_covered == slot->bytes_total) {
            slot->is_reported = true;
            callbacks->on_covered(context, slot->id, slot->bytes_covered);
        } else {
            callbacks->on_progress(context, slot->id, slot->bytes_covered);
        }
    }
}

static void slot_release(struct kvlink *link, struct slot *slot) {
    uint64_t id = slot->id;
    link_uncount(&link->counts.slots_armed, 1);
    /* release: the caller that arms the index next sees all that was written here */
    atomic_store_explicit(&slot->state, SLOT_FREE, memory_order_release);
    link->config.callbacks.on_disarmed(link->config.context, id);
}

/* Mail runs between two progress calls, so no copy is under way: from here on the handler does not
 * find the slot. */
static void run_disarm(struct mail *mail, void *arg) {
    slot_release(arg, (struct slot *)(void *)mail);
}

void link_disarm_all(struct kvlink *link) {
    for (uint32_t i = 0; i < link->config.slots_max; i++) {
        uint32_t armed = SLOT_ARMED;
        if (atomic_compare_exchange_strong(&link->slots[i].state, &armed, SLOT_DISARMING)) {
            slot_release(link, &link->slots[i]);
        }
    }
}

bool link_slots_are_free(const struct kvlink *link) {
    for (uint32_t i = 0; i < link->config.slots_max; i++) {
        if (atomic_load_explicit(&link->slots[i].state, memory_order_acquire) != SLOT_FREE) {
            return false;
        }
    }
    return true;
}

enum status kvlink_arm(struct kvlink *link, const struct kvlink_arm *arm) {
    const struct kv_layout *layout = link->layout;
    if (atomic_load(&link->is_stopping)) {
        return STATUS_CANCELLED;
    }
    uint32_t index = pool_index(arm->slot);
    if (arm->slot == 0 || index >= link->config.slots_max || arm->token_first >= arm->token_end ||
        arm->token_end > link->config.slot_tokens_max) {
        return STATUS_RANGE;
    }
    uint32_t pages = (arm->token_end - 1) / layout->page_tokens + 1;
    if (arm->page_count < pages) {
        return STATUS_RANGE;
    }
    for (uint32_t i = 0; i < pages; i++) {
        if (arm->pages[i] >= link->config.page_count) {
            return STATUS_RANGE;
        }
    }
    struct slot *slot = &link->slots[index];
    /* acquire: pairs with the release in slot_release */
    if (atomic_load_explicit(&slot->state, memory_order_acquire) != SLOT_FREE) {
        return STATUS_EXISTS;
    }
    slot->id = arm->slot;
    slot->key = arm->key;
    slot->token_first = arm->token_first;
    slot->token_end = arm->token_end;
    slot->bytes_total =
        layout_range_bytes(layout, 0, layout->component_count, arm->token_end - arm->token_first);
    slot->bytes_covered = 0;
    memcpy(slot->pages, arm->pages, pages * sizeof(slot->pages[0]));
    for (uint32_t c = 0; c < layout->component_count; c++) {
        slot->coverage[c].count = 0;
    }
    slot->bad = 0;
    slot->is_reported = false;
    link_count(&link->counts.slots_armed, 1);
    atomic_store_explicit(&slot->state, SLOT_ARMED, memory_order_release);
    return STATUS_OK;
}

enum status kvlink_disarm(struct kvlink *link, uint64_t id) {
    uint32_t index = pool_index(id);
    if (id == 0 || index >= link->config.slots_max) {
        return STATUS_NOT_FOUND;
    }
    struct slot *slot = &link->slots[index];
    uint32_t armed = SLOT_ARMED;
    if (atomic_load_explicit(&slot->state, memory_order_acquire) != SLOT_ARMED || slot->id != id ||
        !atomic_compare_exchange_strong(&slot->state, &armed, SLOT_DISARMING)) {
        return STATUS_NOT_FOUND;
    }
    slot->mail.run = run_disarm;
    bool posted = mailbox_post(&link->mailbox, &slot->mail);
    CHECK(posted); /* the box closes only after all slots are free */
    return STATUS_OK;
}
