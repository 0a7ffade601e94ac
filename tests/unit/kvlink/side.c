#include "unit/kvlink/side.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/pool.h"
#include "base/prng.h"
#include "runtime/clock.h"

/* Read by LeakSanitizer. UCX 1.13 now and then keeps 100 bytes of a shared-memory endpoint whose
 * peer died; a leak of ours has no frame in its library. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) {
    return "leak:libuct.so\n";
}

/* ---- callbacks ---- */

static struct side_slot *begin(struct side *side, uint64_t slot) {
    pthread_mutex_lock(&side->lock);
    struct side_slot *events = &side->slots[pool_index(slot)];
    events->id = slot;
    return events;
}

static void finish(struct side *side) {
    pthread_cond_broadcast(&side->changed);
    pthread_mutex_unlock(&side->lock);
}

static void on_progress(void *context, uint64_t slot, uint64_t bytes) {
    struct side_slot *events = begin(context, slot);
    events->progress++;
    events->bytes = bytes;
    finish(context);
}
static void on_covered(void *context, uint64_t slot, uint64_t bytes) {
    struct side_slot *events = begin(context, slot);
    events->covered++;
    events->bytes = bytes;
    finish(context);
}
static void on_bad(void *context, uint64_t slot, enum kvlink_bad reason) {
    struct side_slot *events = begin(context, slot);
    events->bad++;
    events->reason = reason;
    finish(context);
}
static void on_disarmed(void *context, uint64_t slot) {
    begin(context, slot)->disarmed++;
    finish(context);
}
static void on_sent(void *context, uint64_t op, enum status status) {
    struct side *side = context;
    (void)op;
    pthread_mutex_lock(&side->lock);
    side->ops_ended++;
    side->ops_by_status[status]++;
    finish(side);
}
static void on_peer_failed(void *context, uint64_t peer, enum status status) {
    struct side *side = context;
    (void)peer;
    (void)status;
    pthread_mutex_lock(&side->lock);
    side->peers_failed++;
    finish(side);
}
static void on_closed(void *context, uint64_t peer) {
    struct side *side = context;
    (void)peer;
    pthread_mutex_lock(&side->lock);
    side->peers_closed++;
    finish(side);
}

/* ---- a side ---- */

void side_open(struct side *side, const struct side_options *options) {
    memset(side, 0, sizeof(*side));
    side->options = *options;
    side->layout.component_count = options->component_count;
    side->layout.page_tokens = options->page_tokens;
    for (uint32_t c = 0; c < options->component_count; c++) {
        if (options->components != NULL) {
            side->layout.components[c] = options->components[c];
            continue;
        }
        side->layout.components[c] = (struct kv_component){.layer = (uint16_t)(c / 2),
                                                           .tokens_per_row = 1,
                                                           .row_bytes = options->rows[c],
                                                           .dtype = KV_DTYPE_F32,
                                                           .lifetime = KV_LIFETIME_PAGE};
        text_copy(side->layout.components[c].name, sizeof(side->layout.components[c].name),
                  c % 2 == 0 ? "k" : "v");
    }
    assert_int_equal(layout_complete(&side->layout), STATUS_OK);
    side->kv_bytes = (size_t)options->page_count * side->layout.page_bytes;
    side->kv = aligned_alloc(64, (side->kv_bytes + 63) / 64 * 64);
    assert_non_null(side->kv);
    side->sums = calloc(kvlink_sum_count(&side->layout, options->page_count), sizeof(uint64_t));
    assert_non_null(side->sums);
    side_paint(side, SIDE_CANARY);
    side->pages = calloc(options->page_count, sizeof(uint32_t));
    assert_non_null(side->pages);
    struct prng prng = {options->page_tokens};
    for (uint32_t i = 0; i < options->page_count; i++) {
        uint32_t at = prng_below(&prng, i + 1);
        side->pages[i] = side->pages[at];
        side->pages[at] = i;
    }
    pthread_mutex_init(&side->lock, NULL);
    pthread_cond_init(&side->changed, NULL);
    struct kvlink_config config = {
        .layout = &side->layout,
        .kv = side->kv,
        .page_count = options->page_count,
        .sums = side->sums,
        .transport = options->transport,
        .port = options->port,
        .host = "127.0.0.1",
        .slots_max = SIDE_SLOTS_MAX,
        .slot_tokens_max = options->token_max,
        .peers_max = SIDE_PEERS_MAX,
        .ops_max = SIDE_OPS_MAX,
        .op_tokens_max = options->token_max,
        .window_bytes = options->window_bytes,
        .callbacks = {on_progress, on_covered, on_bad, on_disarmed, on_sent, on_peer_failed,
                      on_closed},
        .context = side,
    };
    char text[256];
    struct writer why;
    writer_init(&why, text, sizeof(text) - 1);
    enum status status = kvlink_create(&config, &why, &side->link);
    text[why.len] = '\0';
    if (status != STATUS_OK) {
        fail_msg("no link: %s", text);
    }
}

void side_close(struct side *side) {
    assert_int_equal(kvlink_stop(side->link, span_ms(SIDE_WAIT_MS)), STATUS_OK);
    struct kvlink_counters counters = side_counters(side);
    assert_int_equal(counters.requests_outstanding, 0);
    assert_int_equal(counters.slots_armed, 0);
    assert_int_equal(counters.peers_open, 0);
    assert_int_equal(counters.ops_outstanding, 0);
    assert_int_equal(side->ops_ended, side->ops_started);
    kvlink_destroy(side->link);
    pthread_cond_destroy(&side->changed);
    pthread_mutex_destroy(&side->lock);
    free(side->pages);
    free(side->sums);
    free(side->kv);
}

unsigned char side_byte(uint64_t seed, uint32_t component, uint32_t token, uint32_t at) {
    uint64_t word = mix64(seed ^ ((uint64_t)component << 48) ^ ((uint64_t)token << 16) ^ (at / 8));
    return (unsigned char)(word >> (8 * (at % 8)));
}

static unsigned char *row_of(const struct side *side, uint32_t component, uint32_t token) {
    uint32_t page_tokens = side->layout.page_tokens;
    return side->kv + layout_row_offset(&side->layout, side->pages[token / page_tokens], component,
                                        token % page_tokens);
}

void side_fill(struct side *side, uint64_t seed, uint32_t c, uint32_t c_end, uint32_t first,
               uint32_t end) {
    for (; c < c_end; c++) {
        for (uint32_t token = first; token < end; token++) {
            unsigned char *row = row_of(side, c, token);
            for (uint32_t at = 0; at < side->layout.components[c].row_bytes; at++) {
                row[at] = side_byte(seed, c, token, at);
            }
            uint32_t page_tokens = side->layout.page_tokens;
            kvlink_sum_rows(&side->layout, side->kv, side->sums, side->pages[token / page_tokens],
                            c, token % page_tokens, 1);
        }
    }
}

bool side_holds(const struct side *side, uint64_t seed, uint32_t c, uint32_t c_end, uint32_t first,
                uint32_t end) {
    for (; c < c_end; c++) {
        for (uint32_t token = first; token < end; token++) {
            const unsigned char *row = row_of(side, c, token);
            for (uint32_t at = 0; at < side->layout.components[c].row_bytes; at++) {
                if (row[at] != side_byte(seed, c, token, at)) {
                    return false;
                }
            }
        }
    }
    return true;
}

bool side_is_untouched(const struct side *side, uint32_t c, uint32_t c_end, uint32_t first,
                       uint32_t end) {
    for (; c < c_end; c++) {
        for (uint32_t token = first; token < end; token++) {
            const unsigned char *row = row_of(side, c, token);
            for (uint32_t at = 0; at < side->layout.components[c].row_bytes; at++) {
                if (row[at] != SIDE_CANARY) {
                    return false;
                }
            }
        }
    }
    return true;
}

void side_paint(struct side *side, unsigned char byte) {
    memset(side->kv, byte, side->kv_bytes);
    for (uint32_t page = 0; page < side->options.page_count; page++) {
        for (uint32_t c = 0; c < side->layout.component_count; c++) {
            kvlink_sum_rows(&side->layout, side->kv, side->sums, page, c, 0,
                            side->layout.page_tokens);
        }
    }
}

bool side_is_painted(const struct side *side, unsigned char byte) {
    for (size_t i = 0; i < side->kv_bytes; i++) {
        if (side->kv[i] != byte) {
            return false;
        }
    }
    return true;
}

/* ---- actions ---- */

void side_arm(struct side *side, uint64_t slot, uint64_t key, uint32_t first, uint32_t end) {
    pthread_mutex_lock(&side->lock);
    side->slots[pool_index(slot)] = (struct side_slot){0};
    pthread_mutex_unlock(&side->lock);
    struct kvlink_arm arm = {.slot = slot,
                             .key = key,
                             .token_first = first,
                             .token_end = end,
                             .page_count = side->options.page_count,
                             .pages = side->pages};
    assert_int_equal(kvlink_arm(side->link, &arm), STATUS_OK);
}

static bool is_disarmed(struct side *side, uint64_t slot) {
    return side->slots[pool_index(slot)].disarmed > 0;
}

void side_disarm(struct side *side, uint64_t slot) {
    assert_int_equal(kvlink_disarm(side->link, slot), STATUS_OK);
    assert_true(side_wait(side, is_disarmed, slot));
    assert_int_equal(side->slots[pool_index(slot)].disarmed, 1);
    assert_true(side->slots[pool_index(slot)].id == slot);
}

enum status side_send(struct side *side, uint64_t peer, uint64_t slot, uint64_t key, uint32_t c,
                      uint32_t c_count, uint32_t first, uint32_t count) {
    pthread_mutex_lock(&side->lock);
    uint64_t op = ++side->ops_started;
    pthread_mutex_unlock(&side->lock);
    struct kvlink_send send = {.op = op,
                               .peer = peer,
                               .slot = slot,
                               .key = key,
                               .component_first = c,
                               .component_count = c_count,
                               .token_first = first,
                               .token_count = count,
                               .page_count = side->options.page_count,
                               .pages = side->pages};
    enum status status = kvlink_send(side->link, &send);
    if (status != STATUS_OK) {
        pthread_mutex_lock(&side->lock);
        side->ops_started--;
        pthread_mutex_unlock(&side->lock);
    }
    return status;
}

bool side_wait(struct side *side, side_condition condition, uint64_t arg) {
    struct instant deadline = instant_add(clock_now(), span_ms(SIDE_WAIT_MS));
    pthread_mutex_lock(&side->lock);
    bool holds;
    while (!(holds = condition(side, arg)) && !instant_reached(clock_now(), deadline)) {
        struct timespec at;
        clock_gettime(CLOCK_REALTIME, &at);
        at.tv_nsec += 2000000;
        if (at.tv_nsec >= 1000000000) {
            at.tv_sec++;
            at.tv_nsec -= 1000000000;
        }
        pthread_cond_timedwait(&side->changed, &side->lock, &at);
    }
    pthread_mutex_unlock(&side->lock);
    if (!holds) { /* says why the assertion that follows fails */
        struct kvlink_counters now = side_counters(side);
        print_message(
            "received %llu accepted %llu dropped %llu %llu %llu %llu %llu bad %llu "
            "sent %llu requests %llu ops %llu\n",
            (unsigned long long)now.chunks_received, (unsigned long long)now.chunks_accepted,
            (unsigned long long)now.dropped_header, (unsigned long long)now.dropped_unknown,
            (unsigned long long)now.dropped_key, (unsigned long long)now.dropped_covered,
            (unsigned long long)now.dropped_bad_slot,
            (unsigned long long)(now.bad_checksum + now.bad_gaps + now.bad_layout + now.bad_range),
            (unsigned long long)now.chunks_sent, (unsigned long long)now.requests_outstanding,
            (unsigned long long)now.ops_outstanding);
    }
    return holds;
}

bool side_covered(struct side *side, uint64_t slot) {
    return side->slots[pool_index(slot)].covered > 0;
}
bool side_bad(struct side *side, uint64_t slot) {
    return side->slots[pool_index(slot)].bad > 0;
}
bool side_progressed(struct side *side, uint64_t slot) {
    const struct side_slot *events = &side->slots[pool_index(slot)];
    return events->progress + events->covered > 0;
}
bool side_ops_ended(struct side *side, uint64_t unused) {
    (void)unused;
    return side->ops_ended == side->ops_started;
}
bool side_closed_peers(struct side *side, uint64_t count) {
    return side->peers_closed >= count;
}
bool side_failed_peers(struct side *side, uint64_t count) {
    return side->peers_failed >= count;
}

struct kvlink_counters side_counters(struct side *side) {
    struct kvlink_counters counters;
    kvlink_read_counters(side->link, &counters);
    return counters;
}
