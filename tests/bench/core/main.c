/* What the reaper's sweep costs each core, at 100, 1,000 and 10,000 live entries: the 50 ms tick
 * looks at every one. Beside it the full check of the ledger, which only tests run. Then what it
 * costs a router to place a long prompt. See README.md. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "core/decode.h"
#include "core/prefill.h"
#include "core/router.h"

#define PROMPT   16u
#define NEW      8u
#define TICKS_S  (1000 / TICK_MS)
#define SWEEP_NS 50000000ll /* of our own time for one figure */

static const struct layout_digest digest = {.low = 1};

struct bed {
    enum role role;
    void *core;
    void *memory;
    uint32_t live;
    int64_t now;
    struct effects out;
    uint32_t prompt[PROMPT];
};

static int64_t cpu_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (int64_t)now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* Time hardly moves: nothing falls due while we measure. */
static void bed_step(struct bed *bed, const struct event *event) {
    struct instant now = {bed->now += 10};
    if (bed->role == ROLE_DECODE) {
        decode_core_step(bed->core, event, now, &bed->out);
    } else if (bed->role == ROLE_PREFILL) {
        prefill_core_step(bed->core, event, now, &bed->out);
    } else {
        router_core_step(bed->core, event, now, &bed->out);
    }
}

static void bed_mail(struct bed *bed, uint64_t stream, const struct message *message) {
    struct event mail = {.kind = EVENT_STREAM_MAIL, .stream = {stream}};
    mail.u.mail.message = message;
    bed_step(bed, &mail);
}

static void bed_hello(struct bed *bed, uint64_t stream, enum role role, uint64_t incarnation) {
    struct message hello = {.kind = MESSAGE_HELLO};
    hello.u.hello.incarnation.v = incarnation;
    hello.u.hello.session = 1;
    hello.u.hello.layout = digest;
    hello.u.hello.protocol = PROTOCOL_VERSION;
    hello.u.hello.role = role;
    bed_mail(bed, stream, &hello);
}

static void bed_accept_router(struct bed *bed) {
    struct event accepted = {.kind = EVENT_STREAM_ACCEPTED, .stream = {1}};
    bed_step(bed, &accepted);
    bed_hello(bed, 1, ROLE_ROUTER, 9);
}

static struct node_config bed_node(enum role role) {
    return (struct node_config){.role = role,
                                .incarnation = {5},
                                .layout = digest,
                                .sessions_max = 64,
                                .timers = timers_default()};
}

static void bed_memory(struct bed *bed, uint64_t bytes, uint64_t core) {
    bed->memory = aligned_alloc(64, (bytes + 63) & ~63ull);
    bed->core = calloc(1, core);
    CHECK(bed->memory != NULL && bed->core != NULL);
}

/* Reserved slots that wait for their Open. */
static void bed_decode(struct bed *bed) {
    struct decode_config config = {.node = bed_node(ROLE_DECODE),
                                   .entries_max = bed->live,
                                   .page_count = 2 * bed->live,
                                   .page_tokens = 16,
                                   .token_bytes = 64,
                                   .context = 1024,
                                   .vocab = 1000,
                                   .rows_max = 256,
                                   .step_tokens_max = 512,
                                   .shared_min = 64,
                                   .changes_max = 16384,
                                   .secret = {1, 2},
                                   .address_len = 8};
    bed_memory(bed, decode_bytes(&config), sizeof(struct decode_core));
    decode_init(bed->core, &config, bed->memory);
    bed_accept_router(bed);
    for (uint32_t i = 0; i < bed->live; i++) {
        struct message admit = {.kind = MESSAGE_ADMIT};
        admit.u.admit.attempt.v = 1 + i;
        admit.u.admit.tokens = bed->prompt;
        admit.u.admit.token_count = PROMPT;
        admit.u.admit.output_first = PROMPT;
        admit.u.admit.max_new = NEW;
        admit.u.admit.deadline_ms = 300000;
        bed_mail(bed, 1, &admit);
    }
    CHECK_OP(((struct decode_core *)bed->core)->node.ledger.in_state[DECODE_RESERVED], ==,
             bed->live);
}

/* Queued prompts whose Open waits for its Accept. */
static void bed_prefill(struct bed *bed, struct kv_layout *layout) {
    layout->page_tokens = 16;
    layout->component_count = 1;
    layout->components[0] = (struct kv_component){.name = "kv",
                                                  .tokens_per_row = 1,
                                                  .row_bytes = 64,
                                                  .dtype = KV_DTYPE_F32,
                                                  .lifetime = KV_LIFETIME_PAGE};
    CHECK(layout_complete(layout) == STATUS_OK);
    struct prefill_config config = {.node = bed_node(ROLE_PREFILL),
                                    .layout = layout,
                                    .entries_max = bed->live,
                                    .page_count = 2 * bed->live,
                                    .context = 1024,
                                    .vocab = 1000,
                                    .rows_max = 256,
                                    .step_tokens_max = 512,
                                    .sends_high = 64,
                                    .batch_bytes = 65536,
                                    .shared_min = 64,
                                    .changes_max = 16384,
                                    .secret = {1, 2}};
    bed_memory(bed, prefill_bytes(&config), sizeof(struct prefill_core));
    prefill_init(bed->core, &config, bed->memory);
    bed_accept_router(bed);
    for (uint32_t i = 0; i < bed->live; i++) {
        struct message prefill = {.kind = MESSAGE_PREFILL};
        prefill.u.prefill.attempt.v = 1 + i;
        prefill.u.prefill.tokens = bed->prompt;
        prefill.u.prefill.token_count = PROMPT;
        prefill.u.prefill.slot.v = 1 + i;
        prefill.u.prefill.decode.v = 7;
        prefill.u.prefill.deadline_ms = 300000;
        bed_mail(bed, 1, &prefill);
        if (i == 0) {
            bed_hello(bed, 2, ROLE_DECODE, 7);
        }
    }
    CHECK_OP(((struct prefill_core *)bed->core)->node.ledger.in_state[PREFILL_QUEUED], ==,
             bed->live);
}

/* Says to a request what its shells would: its tokens, then that D has admitted it. */
static void bed_request(struct bed *bed, uint32_t i) {
    struct event open = {.kind = EVENT_CLIENT_OPEN};
    open.u.client_open.call.v = 1 + i;
    open.u.client_open.model = "m";
    open.u.client_open.request_label = "";
    open.u.client_open.session_label = "";
    bed_step(bed, &open);
    CHECK(bed->out.count > 0 && bed->out.items[bed->out.count - 1].kind == EFFECT_TOKENIZE);
    struct sampling sampling = {.top_k = -1, .top_p = 1.0f, .repetition_penalty = 1.0f};
    struct event tokenized = {.kind = EVENT_TOKENIZED};
    tokenized.u.tokenized.request = bed->out.items[bed->out.count - 1].u.tokenize.request;
    tokenized.u.tokenized.detail = "";
    tokenized.u.tokenized.tokens = bed->prompt;
    tokenized.u.tokenized.token_count = PROMPT;
    tokenized.u.tokenized.max_tokens = NEW;
    tokenized.u.tokenized.sampling = &sampling;
    bed_step(bed, &tokenized);
    const struct effect *last = &bed->out.items[bed->out.count - 1];
    CHECK(bed->out.count > 0 && last->kind == EFFECT_STREAM_SEND &&
          last->u.message.kind == MESSAGE_ADMIT);
    struct message admitted = {.kind = MESSAGE_ADMITTED};
    admitted.u.admitted.attempt = last->u.message.u.admit.attempt;
    admitted.u.admitted.slot.v = 1 + i;
    admitted.u.admitted.is_local = true;
    bed_mail(bed, 2, &admitted);
}

/* Requests that stream. */
static void bed_router(struct bed *bed) {
    struct router_config config = {.node = bed_node(ROLE_ROUTER),
                                   .requests_max = bed->live,
                                   .workers_max = 32,
                                   .words_max = bed->live * 128,
                                   .disaggregate_above = 1000,
                                   .blocks_max = 524288,
                                   .secret = {1, 2}};
    bed_memory(bed, router_bytes(&config), sizeof(struct router_core));
    router_init(bed->core, &config, bed->memory);
    struct worker_info info = {.incarnation = {7},
                               .role = ROLE_DECODE,
                               .layout = digest,
                               .vocab = 1000,
                               .context = 1024,
                               .kv_tokens = 64 * bed->live,
                               .page_tokens = 16,
                               .model = "m",
                               .address = "d:1"};
    struct event seen = {.kind = EVENT_WORKER_SEEN};
    seen.u.worker_seen.info = &info;
    bed_step(bed, &seen);
    bed_hello(bed, 2, ROLE_DECODE, 7);
    for (uint32_t i = 0; i < bed->live; i++) {
        bed_request(bed, i);
    }
    CHECK_OP(((struct router_core *)bed->core)->node.ledger.in_state[REQUEST_STREAMING], ==,
             bed->live);
}

static void bed_verify(const struct bed *bed) {
    if (bed->role == ROLE_DECODE) {
        decode_verify(bed->core);
    } else if (bed->role == ROLE_PREFILL) {
        prefill_verify(bed->core);
    } else {
        router_verify(bed->core);
    }
}

static void bed_tick(struct bed *bed) {
    struct event tick = {.kind = EVENT_TICK};
    bed_step(bed, &tick);
}

/* Microseconds of one call, the best of five rounds: what is left is the work itself. */
static double bed_cost_us(struct bed *bed, bool is_verify) {
    double best = 1e18;
    for (uint32_t round = 0; round < 5; round++) {
        uint64_t calls = 0;
        int64_t start = cpu_ns();
        int64_t spent = 0;
        while (spent < SWEEP_NS / 5) {
            for (uint32_t i = 0; i < 16; i++, calls++) {
                if (is_verify) {
                    bed_verify(bed);
                } else {
                    bed_tick(bed);
                }
            }
            spent = cpu_ns() - start;
        }
        double us = (double)spent / 1e3 / (double)calls;
        best = us < best ? us : best;
    }
    return best;
}

static void measure(enum role role, uint32_t live) {
    struct bed *bed = calloc(1, sizeof *bed);
    struct kv_layout *layout = calloc(1, sizeof *layout);
    CHECK(bed != NULL && layout != NULL);
    bed->role = role;
    bed->live = live;
    bed->now = 1000000000;
    for (uint32_t i = 0; i < PROMPT; i++) {
        bed->prompt[i] = 3 + i;
    }
    if (role == ROLE_DECODE) {
        bed_decode(bed);
    } else if (role == ROLE_PREFILL) {
        bed_prefill(bed, layout);
    } else {
        bed_router(bed);
    }
    double sweep = bed_cost_us(bed, false);
    double verify = bed_cost_us(bed, true);
    printf("%-8s %7u %11.2f %14.4f %15.2f\n", role_name(role), live, sweep,
           sweep * TICKS_S / 1e6 * 100, verify);
    free(bed->core);
    free(bed->memory);
    free(layout);
    free(bed);
}

/* --- placement --- */

#define LONG_PROMPT 4096u
#define PLACE_PAGE  16u

/* A worker that has the whole of the prompt cached. */
static void place_worker(struct bed *bed, uint32_t at, const uint64_t *blocks, uint32_t count) {
    struct worker_info info = {.incarnation = {100 + at},
                               .role = ROLE_DECODE,
                               .layout = digest,
                               .vocab = 1000,
                               .context = 8192,
                               .kv_tokens = 1u << 20,
                               .page_tokens = PLACE_PAGE,
                               .model = "m"};
    (void)snprintf(info.address, ADDRESS_MAX, "d:%u", at);
    struct event seen = {.kind = EVENT_WORKER_SEEN};
    seen.u.worker_seen.info = &info;
    bed_step(bed, &seen);
    bed_hello(bed, 2 + 2 * at, ROLE_DECODE, 100 + at);
    struct message cached = {.kind = MESSAGE_CACHED};
    cached.u.cached.stored = blocks;
    cached.u.cached.stored_count = count;
    bed_mail(bed, 2 + 2 * at, &cached);
}

/* One request from its tokens to its Admit, and its end; the nanoseconds of the first. */
static int64_t place_once(struct bed *bed, const uint32_t *tokens, uint64_t call) {
    struct event open = {.kind = EVENT_CLIENT_OPEN};
    open.u.client_open.call.v = call;
    open.u.client_open.model = "m";
    open.u.client_open.request_label = "";
    open.u.client_open.session_label = "";
    bed_step(bed, &open);
    uint64_t request = bed->out.items[bed->out.count - 1].u.tokenize.request;
    struct sampling sampling = {.top_k = -1, .top_p = 1.0f, .repetition_penalty = 1.0f};
    struct event tokenized = {.kind = EVENT_TOKENIZED};
    tokenized.u.tokenized.request = request;
    tokenized.u.tokenized.detail = "";
    tokenized.u.tokenized.tokens = tokens;
    tokenized.u.tokenized.token_count = LONG_PROMPT;
    tokenized.u.tokenized.max_tokens = NEW;
    tokenized.u.tokenized.sampling = &sampling;
    int64_t start = cpu_ns();
    bed_step(bed, &tokenized);
    int64_t took = cpu_ns() - start;
    struct message rejected = {.kind = MESSAGE_REJECTED}; /* ends it without a word to D */
    rejected.u.rejected.attempt = bed->out.items[bed->out.count - 1].u.message.u.admit.attempt;
    rejected.u.rejected.cause = CAUSE_TOO_LARGE;
    const struct router_core *core = bed->core;
    bed_mail(bed, core->requests[pool_index(request)].decode_stream.v, &rejected);
    struct event answered = {.kind = EVENT_ANSWERED};
    answered.u.answered.request = request;
    bed_step(bed, &answered);
    return took;
}

static double place_cost_us(uint32_t workers, uint32_t blocks_max) {
    static uint32_t tokens[LONG_PROMPT];
    static uint64_t blocks[LONG_PROMPT / PLACE_PAGE];
    uint32_t count = LONG_PROMPT / PLACE_PAGE;
    uint64_t block = 0;
    for (uint32_t i = 0; i < LONG_PROMPT; i++) {
        tokens[i] = 3 + i % 500;
    }
    for (uint32_t i = 0; i < count; i++) {
        block = block_next(block_key(digest), block, tokens + (uint64_t)i * PLACE_PAGE, PLACE_PAGE);
        blocks[i] = block;
    }
    struct bed *bed = calloc(1, sizeof *bed);
    CHECK(bed != NULL);
    bed->role = ROLE_ROUTER;
    bed->now = 1000000000;
    struct router_config config = {.node = bed_node(ROLE_ROUTER),
                                   .requests_max = 64,
                                   .workers_max = 32,
                                   .words_max = 64 * 8192,
                                   .disaggregate_above = 100000,
                                   .blocks_max = blocks_max,
                                   .secret = {1, 2}};
    bed_memory(bed, router_bytes(&config), sizeof(struct router_core));
    router_init(bed->core, &config, bed->memory);
    for (uint32_t i = 0; i < workers; i++) {
        place_worker(bed, i, blocks, count);
    }
    int64_t best = INT64_MAX;
    for (uint32_t i = 0; i < 2000; i++) {
        int64_t took = place_once(bed, tokens, 1 + i);
        best = took < best ? took : best;
    }
    free(bed->core);
    free(bed->memory);
    free(bed);
    return (double)best / 1e3;
}

static void measure_placement(void) {
    printf("\na prompt of %u tokens in pages of %u, from its tokens to its Admit, us\n",
           LONG_PROMPT, PLACE_PAGE);
    printf("%8s %14s %14s\n", "workers", "by load only", "all hold it");
    for (uint32_t workers = 1; workers <= 16; workers *= 4) {
        printf("%8u %14.1f %14.1f\n", workers, place_cost_us(workers, 0),
               place_cost_us(workers, 524288));
    }
}

int main(void) {
    static const enum role roles[] = {ROLE_ROUTER, ROLE_PREFILL, ROLE_DECODE};
    printf("%-8s %7s %11s %14s %15s\n", "core", "live", "sweep, us", "% of a core",
           "full check, us");
    for (uint32_t i = 0; i < sizeof roles / sizeof roles[0]; i++) {
        for (uint32_t live = 100; live <= 10000; live *= 10) {
            measure(roles[i], live);
        }
    }
    measure_placement();
    return 0;
}
