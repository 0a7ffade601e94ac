#include "bench/kvlink/bench.h"

#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/layout.h"
#include "kvlink/kvlink.h"

#define BENCH_SLOT ((1ull << 32) | 0)
#define BENCH_KEY  0x5eed5eed5eed5eedull
/* 64 MiB at least: the main thread naps for a millisecond when it has used them up. */
#define BENCH_OPS 1024u
#define SUM_BYTES (16u * 1024u) /* summed at once: fits the first cache */

static struct kv_layout layout;
static _Atomic uint64_t received; /* bytes, by the last callback */
static _Atomic bool is_covered;
static _Atomic bool is_bad;
static double first_at; /* written by the link thread before is_covered */
static double first_cpu;
static double last_at;
static double last_cpu;
static _Atomic uint32_t ended;
static _Atomic bool is_closed;

static void on_progress(void *context, uint64_t slot, uint64_t bytes) {
    (void)context;
    (void)slot;
    if (first_at == 0) {
        first_at = bench_now();
        first_cpu = bench_cpu();
        received = bytes;
    }
}
static void on_covered(void *context, uint64_t slot, uint64_t bytes) {
    (void)context;
    (void)slot;
    last_at = bench_now();
    last_cpu = bench_cpu();
    received = bytes - received;
    is_covered = true;
}
static void on_bad(void *context, uint64_t slot, enum kvlink_bad reason) {
    (void)context;
    (void)slot;
    (void)reason;
    is_bad = true;
}
static void on_disarmed(void *context, uint64_t slot) {
    (void)context;
    (void)slot;
}
static void on_sent(void *context, uint64_t op, enum status status) {
    (void)context;
    (void)op;
    if (status != STATUS_OK) {
        bench_fail("a send failed");
    }
    ended++;
}
static void on_peer_failed(void *context, uint64_t peer, enum status status) {
    (void)context;
    (void)peer;
    (void)status;
    bench_fail("the peer failed");
}
static void on_closed(void *context, uint64_t peer) {
    (void)context;
    (void)peer;
    is_closed = true;
}

/* What the engine does after it wrote a row. Its cost is not the link's, and is told apart: the
 * second time around a row is as hot as the engine's. */
static uint64_t *sum_pool(const struct bench *bench, struct bench_result *result) {
    uint64_t *sums = malloc(kvlink_sum_count(&layout, bench->page_count) * sizeof(*sums));
    if (sums == NULL) {
        bench_fail("no memory for the sums");
    }
    uint32_t most = SUM_BYTES / BENCH_ROW_BYTES;
    for (uint32_t page = 0; page < bench->page_count; page++) {
        for (uint32_t c = 0; c < BENCH_COMPONENTS; c++) {
            for (uint32_t at = 0; at < bench->page_tokens; at += most) {
                uint32_t rows = bench->page_tokens - at < most ? bench->page_tokens - at : most;
                kvlink_sum_rows(&layout, bench->pool, sums, page, c, at, rows);
                double from = bench_now();
                for (uint32_t row = 0; row < rows; row++) {
                    kvlink_sum_rows(&layout, bench->pool, sums, page, c, at + row, 1);
                }
                result->sum_seconds += bench_now() - from;
                result->sum_bytes += (uint64_t)rows * BENCH_ROW_BYTES;
            }
        }
    }
    return sums;
}

static struct kvlink *open_link(struct bench *bench, bool is_sender, struct bench_result *result) {
    layout.component_count = BENCH_COMPONENTS;
    layout.page_tokens = bench->page_tokens;
    for (uint32_t c = 0; c < BENCH_COMPONENTS; c++) {
        layout.components[c] = (struct kv_component){.name = "k",
                                                     .layer = (uint16_t)(c / 2),
                                                     .tokens_per_row = 1,
                                                     .row_bytes = BENCH_ROW_BYTES,
                                                     .dtype = KV_DTYPE_BF16,
                                                     .lifetime = KV_LIFETIME_PAGE};
        text_copy(layout.components[c].name, sizeof(layout.components[c].name),
                  c % 2 == 0 ? "k" : "v");
    }
    if (layout_complete(&layout) != STATUS_OK || layout.page_bytes != bench->page_bytes) {
        bench_fail("the layout is not as the bench wants it");
    }
    struct kvlink_config config = {
        .sums = is_sender ? sum_pool(bench, result) : NULL,
        .layout = &layout,
        .kv = bench->pool,
        .page_count = bench->page_count,
        .transport = bench->is_tcp ? KVLINK_TRANSPORT_TCP : KVLINK_TRANSPORT_SHM,
        .device = "lo",
        .slots_max = is_sender ? 0 : 1,
        .slot_tokens_max = bench->tokens,
        .peers_max = is_sender ? 1 : 0,
        .ops_max = BENCH_OPS,
        .op_tokens_max = bench->tokens,
        .window_bytes = bench->window_bytes,
        .callbacks = {on_progress, on_covered, on_bad, on_disarmed, on_sent, on_peer_failed,
                      on_closed},
    };
    char text[256] = "";
    struct writer why;
    writer_init(&why, text, sizeof(text) - 1);
    struct kvlink *link = NULL;
    if (kvlink_create(&config, &why, &link) != STATUS_OK) {
        bench_fail(text);
    }
    return link;
}

static void nap(void) {
    (void)poll(NULL, 0, 1); /* the main thread only looks on */
}

void link_receive(struct bench *bench, struct bench_result *result) {
    struct kvlink *link = open_link(bench, false, result);
    struct kvlink_arm arm = {.slot = BENCH_SLOT,
                             .key = BENCH_KEY,
                             .token_end = bench->tokens,
                             .page_count = bench->pages_used,
                             .pages = bench->pages};
    if (kvlink_arm(link, &arm) != STATUS_OK) {
        bench_fail("the slot is not armed");
    }
    struct bytes address = kvlink_address(link);
    bench_put(bench, &address.len, sizeof(address.len));
    bench_put(bench, address.data, address.len);
    while (!is_covered && !is_bad) {
        nap();
    }
    if (is_bad) {
        bench_fail("the slot became bad");
    }
    result->seconds = last_at - first_at;
    result->cpu_seconds = last_cpu - first_cpu;
    result->bytes = received;
    char done = 1;
    bench_put(bench, &done, 1);
    bench_get(bench, &done, 1); /* the sender has closed: no failure for it to see */
    if (kvlink_stop(link, span_ms(5000)) != STATUS_OK) {
        bench_fail("the receiver does not stop");
    }
    kvlink_destroy(link);
}

void link_send(struct bench *bench, struct bench_result *result) {
    struct kvlink *link = open_link(bench, true, result);
    size_t len;
    uint8_t bytes[KVLINK_ADDRESS_MAX];
    bench_get(bench, &len, sizeof(len));
    bench_get(bench, bytes, len);
    double cpu = bench_cpu();
    if (kvlink_connect(link, 1, (struct bytes){bytes, len}) != STATUS_OK) {
        bench_fail("no connection");
    }
    uint32_t step = bench->op_bytes / BENCH_ROW_BYTES;
    uint32_t ops = 0;
    for (uint32_t token = 0; token < bench->tokens; token += step) {
        for (uint32_t c = 0; c < BENCH_COMPONENTS; c++) {
            struct kvlink_send send = {.op = ++ops,
                                       .peer = 1,
                                       .slot = BENCH_SLOT,
                                       .key = BENCH_KEY,
                                       .component_first = c,
                                       .component_count = 1,
                                       .token_first = token,
                                       .token_count = step,
                                       .page_count = bench->pages_used,
                                       .pages = bench->pages};
            enum status status;
            while ((status = kvlink_send(link, &send)) == STATUS_BUSY) {
                nap();
            }
            if (status != STATUS_OK) {
                bench_fail("an op is refused");
            }
        }
    }
    while (ended < ops) {
        nap();
    }
    result->cpu_seconds = bench_cpu() - cpu;
    char done;
    bench_get(bench, &done, 1);
    if (kvlink_stop(link, span_ms(5000)) != STATUS_OK || !is_closed) {
        bench_fail("the sender does not stop");
    }
    bench_put(bench, &done, 1);
    kvlink_destroy(link);
}
