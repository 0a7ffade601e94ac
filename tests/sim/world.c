#include "sim/world.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "sim/queue.h"

#define ROW_BYTES  4u
#define MS         1000000ll
#define SECOND     1000000000ll
#define ARMS_MAX   4096u
#define ADDRESS_OF 8u /* bytes of a simulated worker address: process, generation */

enum sim_kind {
    SIM_CORE, /* one event for a core */
    SIM_TICK,
    SIM_LAYER, /* the engine finished a layer */
    SIM_STEP,  /* the engine finished a step */
    SIM_READ,  /* the sender's link reads source pages */
    SIM_DATA,  /* a chunk reaches the receiver's link */
    SIM_DISARM,
    SIM_CLIENT, /* a client arrives */
    SIM_LEAVE,
    SIM_FAULT_BREAK,
    SIM_FAULT_STALL,
    SIM_FAULT_CRASH,
    SIM_FAULT_PAUSE,
    SIM_FAULT_ETCD,
    SIM_FAULT_DRAIN,
    SIM_RESTART,
    SIM_LEASE, /* etcd notices that a process has gone */
    SIM_RELIST,
    SIM_RESUME, /* a stopped process runs again and reads what has piled up, in order */
};

struct sim_event {
    enum sim_kind kind;
    uint32_t process;
    uint32_t generation;
    int32_t connection; /* >= 0: mail or end of this connection's side */
    uint32_t side;
    struct event event;
    struct message message;
    void *owned; /* what the message or event points to */
    struct worker_info info;
    struct sampling sampling;
    struct step_result results[64];
    uint64_t number; /* step, op, arm slot or client */
    uint32_t layer;
    /* SIM_READ, SIM_DATA */
    uint64_t slot, key, peer;
    uint32_t component_first, component_count, token_first, token_count;
    uint64_t *values; /* [component][token] */
    uint32_t *pages;
    bool is_bad;
};

struct connection {
    uint32_t process[2];
    uint32_t generation[2];
    uint64_t stream[2];
    bool is_ended[2]; /* STREAM_ENDED delivered or on its way */
    bool is_broken;
    int64_t last[2]; /* delivery times towards side 0 and 1: FIFO */
    int64_t stalled_until;
};

struct arm {
    uint64_t slot, key;
    uint32_t first, end;
    uint32_t *pages;
    uint8_t *covered; /* [component][token] */
    uint64_t bytes;
    bool is_bad;
};

struct link_peer {
    uint64_t peer;
    uint32_t process, generation;
    bool is_closed;
};

struct link_op {
    uint64_t op, peer;
    bool is_open;
};

struct process {
    enum role role;
    bool is_alive;
    uint32_t generation;
    struct incarnation incarnation;
    int64_t paused_until;
    struct sim_event **held; /* what arrived while it was stopped */
    uint32_t held_count, held_capacity;
    int64_t next_tick;
    int64_t box_last; /* events of its own shells keep their order */
    void *core;
    void *memory;
    uint64_t *kv; /* [page][component][row] */
    uint32_t page_count;
    struct step_plan plan; /* deep copy of the running step */
    bool is_stepping;
    bool is_step_failing;
    struct arm *arms; /* by slot index */
    struct link_peer peers[256];
    uint32_t peer_count;
    struct link_op *ops;
    uint32_t op_count, op_capacity;
    bool is_leaving; /* drained: gone after this turn */
};

struct client {
    bool is_used, is_answered, is_lost, is_left, is_stopping, is_abortable;
    uint32_t router, generation;
    uint32_t prompt_count, max_tokens, delivered;
    uint32_t prompt[SIM_PROMPT_MAX];
    uint64_t seed;
    uint64_t h, attention; /* reference state after all known tokens */
    uint32_t stop_at;      /* 0 = no stop string */
    uint32_t last_token;
    bool is_tokenizing_failed;
};

struct world {
    struct prng prng;
    struct knobs knobs;
    struct queue queue;
    int64_t now;
    int64_t faults_until;
    bool is_settling;
    FILE *trace;
    struct process processes[SIM_PROCESSES];
    uint32_t process_count;
    struct connection *connections;
    uint32_t connection_count, connection_capacity;
    uint64_t next_odd;
    struct client *clients;
    uint32_t client_count, clients_open;
    struct kv_layout layout;
    struct effects effects;
    struct sim_result result;
    const char *violation;
    uint64_t next_incarnation;
};

static jmp_buf sim_escape;
static struct world *sim_current;

static void sim_fail(struct world *world, const char *sentence) {
    if (world->violation == NULL) {
        world->violation = sentence;
    }
    longjmp(sim_escape, 1);
}

#define SIM_CHECK(world, fact, sentence)                                                           \
    do {                                                                                           \
        if (!(fact)) {                                                                             \
            sim_fail((world), (sentence));                                                         \
        }                                                                                          \
    } while (0)

#define TRACE(world, ...)                                                                          \
    do {                                                                                           \
        if ((world)->trace != NULL) {                                                              \
            fprintf((world)->trace, "%10.4f  ", (double)(world)->now / 1e9);                       \
            fprintf((world)->trace, __VA_ARGS__);                                                  \
            fputc('\n', (world)->trace);                                                           \
        }                                                                                          \
    } while (0)

/* --- chance --------------------------------------------------------------------------------------
 */

static uint32_t sim_below(struct world *world, uint32_t bound) {
    return bound == 0 ? 0 : prng_below(&world->prng, bound);
}

static bool sim_chance(struct world *world, uint32_t thousandths) {
    return sim_below(world, 1000) < thousandths;
}

/* Around `mean`, now and then ten times as long. */
static int64_t sim_time(struct world *world, int64_t mean) {
    int64_t base = (int64_t)(((uint64_t)mean * (1 + sim_below(world, 2000))) / 1000);
    return sim_chance(world, 10) && base < SECOND ? base * 10 : base;
}

static uint64_t sim_row(uint64_t h, uint32_t component) {
    return h + component * 0x9e3779b97f4a7c15ull;
}

static uint64_t sim_advance(uint64_t h, uint32_t token) {
    return mix64(h ^ ((uint64_t)token + 1) * 0xd1342543de82ef95ull);
}

static uint64_t sim_attend(uint64_t row) {
    return mix64(row);
}

static uint32_t sim_sample(uint64_t attention, uint64_t seed, uint32_t position) {
    return (uint32_t)(mix64(attention ^ prng_at(seed, position)) % SIM_VOCAB);
}

struct knobs sim_knobs(uint64_t seed) {
    struct world draw = {.prng = {mix64(seed ^ 0x5eed)}};
    struct world *world = &draw;
    struct knobs knobs = {.routers = 1 + sim_below(world, 2),
                          .prefills = 1 + sim_below(world, 3),
                          .decodes = 1 + sim_below(world, 3),
                          .page_tokens = 4u << sim_below(world, 3),
                          .entries_max = 2 + sim_below(world, 30),
                          .rows_max = 1 + sim_below(world, 8),
                          .sends_high = 1 + sim_below(world, 16),
                          .clients = 20 + sim_below(world, 60),
                          .prompt_max = 8 + sim_below(world, SIM_PROMPT_MAX - 8),
                          .new_max = 1 + sim_below(world, SIM_NEW_MAX),
                          .alphabet = sim_chance(world, 300) ? 2 : SIM_VOCAB - 2,
                          .arrival_ns = (1 + sim_below(world, 400)) * MS,
                          .delay_ns = (1 + sim_below(world, 40)) * MS / 10,
                          .step_ns = (1 + sim_below(world, 200)) * MS / 10,
                          .notice_lag_ms = 1 + sim_below(world, 4000)};
    uint32_t one_request =
        (knobs.prompt_max + knobs.new_max + knobs.page_tokens - 1) / knobs.page_tokens;
    knobs.decode_pages = one_request + sim_below(world, 6 * one_request);
    knobs.prefill_pages = one_request + sim_below(world, 4 * one_request);
    knobs.step_tokens_max = knobs.rows_max + sim_below(world, 64);
    knobs.disaggregate_above = sim_chance(world, 700) ? 0 : sim_below(world, 60);
    if (sim_chance(world, 100)) {
        knobs.is_quiet = true;
        return knobs;
    }
    if (sim_chance(world, 100)) {
        knobs.prefills = 0;
    }
    knobs.leave = sim_chance(world, 500) ? sim_below(world, 600) : 0;
    knobs.abort_label = sim_chance(world, 300) ? sim_below(world, 300) : 0;
    knobs.short_deadline = sim_chance(world, 300) ? sim_below(world, 300) : 0;
    knobs.stop_string = sim_chance(world, 300) ? sim_below(world, 300) : 0;
    knobs.tokenize_fails = sim_chance(world, 200) ? sim_below(world, 100) : 0;
    knobs.break_every_ns =
        sim_chance(world, 500) ? (int64_t)(200 + sim_below(world, 8000)) * MS : 0;
    knobs.stall_every_ns =
        sim_chance(world, 300) ? (int64_t)(500 + sim_below(world, 9000)) * MS : 0;
    knobs.crash_every_ns =
        sim_chance(world, 400) ? (int64_t)(500 + sim_below(world, 9000)) * MS : 0;
    knobs.pause_every_ns =
        sim_chance(world, 400) ? (int64_t)(500 + sim_below(world, 9000)) * MS : 0;
    knobs.etcd_every_ns =
        sim_chance(world, 300) ? (int64_t)(1000 + sim_below(world, 9000)) * MS : 0;
    knobs.drain_every_ns =
        sim_chance(world, 300) ? (int64_t)(1000 + sim_below(world, 9000)) * MS : 0;
    knobs.chunk_lost = sim_chance(world, 300) ? sim_below(world, 100) : 0;
    knobs.chunk_bad = sim_chance(world, 200) ? sim_below(world, 100) : 0;
    knobs.chunk_twice = sim_chance(world, 300) ? sim_below(world, 300) : 0;
    knobs.send_fails = sim_chance(world, 200) ? sim_below(world, 60) : 0;
    knobs.step_fails = sim_chance(world, 200) ? sim_below(world, 40) : 0;
    knobs.layer_lost = sim_chance(world, 200) ? sim_below(world, 300) : 0;
    return knobs;
}

/* --- processes -----------------------------------------------------------------------------------
 */

static struct sim_event *sim_schedule(struct world *world, enum sim_kind kind, int64_t at,
                                      uint32_t process) {
    struct sim_event *event = calloc(1, sizeof *event);
    CHECK(event != NULL);
    event->kind = kind;
    event->process = process;
    event->generation = process < SIM_PROCESSES ? world->processes[process].generation : 0;
    event->connection = -1;
    queue_push(&world->queue, at, event);
    return event;
}

/* An event from the process's own shells, in order. */
static struct sim_event *sim_post(struct world *world, uint32_t process, enum event_kind kind,
                                  int64_t at) {
    struct process *p = &world->processes[process];
    p->box_last = at > p->box_last ? at : p->box_last;
    struct sim_event *event = sim_schedule(world, SIM_CORE, p->box_last, process);
    event->event.kind = kind;
    return event;
}

static void sim_free(struct sim_event *event) {
    free(event->owned);
    free(event->values);
    free(event->pages);
    free(event);
}

static void sim_address(char *text, uint32_t process) {
    struct writer writer;
    writer_init(&writer, text, ADDRESS_MAX - 1);
    writer_printf(&writer, "host:%u", process);
    text[writer.len] = '\0';
}

static struct node_config sim_node(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    struct node_config config = {.role = p->role,
                                 .incarnation = p->incarnation,
                                 .layout = world->layout.digest,
                                 .sessions_max = 64,
                                 .timers = timers_default()};
    struct writer writer;
    writer_init(&writer, config.id, LABEL_MAX - 1);
    writer_printf(&writer, "%s-%u", role_name(p->role), process);
    return config;
}

static void sim_start_decode(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    struct decode_config config = {.node = sim_node(world, process),
                                   .entries_max = world->knobs.entries_max,
                                   .page_count = world->knobs.decode_pages,
                                   .page_tokens = world->knobs.page_tokens,
                                   .token_bytes = world->layout.token_bytes,
                                   .context = SIM_PROMPT_MAX + SIM_NEW_MAX,
                                   .vocab = SIM_VOCAB,
                                   .rows_max = world->knobs.rows_max,
                                   .step_tokens_max = world->knobs.step_tokens_max,
                                   .eos_count = 1,
                                   .eos = {SIM_EOS},
                                   .secret = {prng_next(&world->prng), prng_next(&world->prng)},
                                   .address_len = ADDRESS_OF};
    memcpy(config.address, &process, 4);
    memcpy(config.address + 4, &p->generation, 4);
    p->memory = aligned_alloc(64, (decode_bytes(&config) + 63) & ~63ull);
    p->core = calloc(1, sizeof(struct decode_core));
    CHECK(p->memory != NULL && p->core != NULL);
    decode_init(p->core, &config, p->memory);
    p->page_count = config.page_count;
    p->arms = calloc(config.entries_max, sizeof *p->arms);
}

static void sim_start_prefill(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    struct prefill_config config = {.node = sim_node(world, process),
                                    .layout = &world->layout,
                                    .entries_max = world->knobs.entries_max,
                                    .page_count = world->knobs.prefill_pages,
                                    .context = SIM_PROMPT_MAX + SIM_NEW_MAX,
                                    .vocab = SIM_VOCAB,
                                    .rows_max = world->knobs.rows_max,
                                    .step_tokens_max = world->knobs.step_tokens_max,
                                    .sends_high = world->knobs.sends_high,
                                    .batch_bytes = 64,
                                    .secret = {prng_next(&world->prng), prng_next(&world->prng)}};
    p->memory = aligned_alloc(64, (prefill_bytes(&config) + 63) & ~63ull);
    p->core = calloc(1, sizeof(struct prefill_core));
    CHECK(p->memory != NULL && p->core != NULL);
    prefill_init(p->core, &config, p->memory);
    p->page_count = config.page_count;
}

static void sim_start_router(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    struct router_config config = {.node = sim_node(world, process),
                                   .requests_max = 128,
                                   .workers_max = 32,
                                   .words_max = 128 * 256,
                                   .disaggregate_above = world->knobs.disaggregate_above,
                                   .secret = {prng_next(&world->prng), prng_next(&world->prng)}};
    p->memory = aligned_alloc(64, (router_bytes(&config) + 63) & ~63ull);
    p->core = calloc(1, sizeof(struct router_core));
    CHECK(p->memory != NULL && p->core != NULL);
    router_init(p->core, &config, p->memory);
}

static struct worker_info sim_info(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    struct worker_info info = {.incarnation = p->incarnation,
                               .role = p->role,
                               .layout = world->layout.digest,
                               .vocab = SIM_VOCAB,
                               .context = SIM_PROMPT_MAX + SIM_NEW_MAX,
                               .kv_tokens = p->page_count * world->knobs.page_tokens,
                               .page_tokens = world->knobs.page_tokens,
                               .model = "m"};
    memcpy(info.id, sim_node(world, process).id, LABEL_MAX);
    sim_address(info.address, process);
    return info;
}

static void sim_list(struct world *world, uint32_t process, uint32_t router, bool is_seen) {
    int64_t at = world->now + sim_time(world, 20 * MS);
    struct sim_event *event =
        sim_post(world, router, is_seen ? EVENT_WORKER_SEEN : EVENT_WORKER_LOST, at);
    event->info = sim_info(world, process);
    if (is_seen) {
        event->event.u.worker_seen.info = &event->info;
    } else {
        event->event.u.worker_lost.incarnation = event->info.incarnation;
    }
}

static void sim_announce(struct world *world, uint32_t process, bool is_seen) {
    for (uint32_t i = 0; i < world->process_count; i++) {
        if (world->processes[i].role == ROLE_ROUTER && world->processes[i].is_alive) {
            sim_list(world, process, i, is_seen);
        }
    }
}

static void sim_start(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    p->is_alive = true;
    p->is_leaving = false;
    p->generation++;
    p->incarnation.v = ++world->next_incarnation;
    p->paused_until = 0;
    p->next_tick = world->now;
    p->box_last = world->now;
    p->is_stepping = false;
    p->peer_count = 0;
    p->op_count = 0;
    TRACE(world, "start %s-%u incarnation %llu", role_name(p->role), process,
          (unsigned long long)p->incarnation.v);
    if (p->role == ROLE_ROUTER) {
        sim_start_router(world, process);
        for (uint32_t i = 0; i < world->process_count; i++) {
            if (world->processes[i].role != ROLE_ROUTER && world->processes[i].is_alive) {
                sim_list(world, i, process, true);
            }
        }
    } else {
        if (p->role == ROLE_DECODE) {
            sim_start_decode(world, process);
        } else {
            sim_start_prefill(world, process);
        }
        uint64_t rows = (uint64_t)p->page_count * SIM_COMPONENTS * world->knobs.page_tokens;
        p->kv = calloc(rows, sizeof *p->kv);
        CHECK(p->kv != NULL);
        sim_announce(world, process, true);
    }
    (void)sim_schedule(world, SIM_TICK, world->now, process);
}

static void sim_drop_plan(struct process *p) {
    free((void *)(uintptr_t)p->plan.rows);
    free((void *)(uintptr_t)p->plan.tokens);
    free((void *)(uintptr_t)p->plan.pages);
    memset(&p->plan, 0, sizeof p->plan);
}

static void sim_stop(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    if (p->arms != NULL) {
        for (uint32_t i = 0; i < world->knobs.entries_max; i++) {
            free(p->arms[i].pages);
            free(p->arms[i].covered);
        }
    }
    free(p->arms);
    free(p->core);
    free(p->memory);
    free(p->kv);
    free(p->ops);
    for (uint32_t i = 0; i < p->held_count; i++) {
        sim_free(p->held[i]);
    }
    free(p->held);
    p->held = NULL;
    p->held_count = 0;
    p->held_capacity = 0;
    sim_drop_plan(p);
    p->arms = NULL;
    p->core = NULL;
    p->memory = NULL;
    p->kv = NULL;
    p->ops = NULL;
    p->op_capacity = 0;
    p->op_count = 0;
    p->is_alive = false;
}

/* --- streams
 * --------------------------------------------------------------------------------------- */

static struct connection *sim_connection(struct world *world, uint32_t process, uint64_t stream,
                                         uint32_t *side_out) {
    for (uint32_t i = world->connection_count; i-- > 0;) {
        struct connection *c = &world->connections[i];
        for (uint32_t side = 0; side < 2; side++) {
            if (c->process[side] == process && c->stream[side] == stream &&
                c->generation[side] == world->processes[process].generation) {
                *side_out = side;
                return c;
            }
        }
    }
    return NULL;
}

/* The end of a stream as one side will hear of it, once, behind whatever is on its way there. */
static void sim_end_side(struct world *world, struct connection *c, uint32_t side, int64_t at) {
    if (c->is_ended[side]) {
        return;
    }
    c->is_ended[side] = true;
    at = at > c->last[side] ? at : c->last[side];
    c->last[side] = at;
    struct sim_event *event = sim_schedule(world, SIM_CORE, at, c->process[side]);
    event->generation = c->generation[side];
    event->event.kind = EVENT_STREAM_ENDED;
    event->event.stream.v = c->stream[side];
    event->event.u.stream_end.cause = CAUSE_SESSION_ENDED;
    event->connection = (int32_t)(c - world->connections);
    event->side = side;
}

static void sim_break(struct world *world, struct connection *c) {
    if (c->is_broken) {
        return;
    }
    c->is_broken = true; /* everything in flight is lost */
    for (uint32_t side = 0; side < 2; side++) {
        int64_t lag = sim_time(world, (int64_t)world->knobs.notice_lag_ms * MS / 2);
        sim_end_side(world, c, side, world->now + lag);
    }
}

static void sim_stream_open(struct world *world, uint32_t process, const struct effect *effect) {
    uint32_t target = 0;
    CHECK(memcmp(effect->u.open.address, "host:", 5) == 0);
    for (const char *at = effect->u.open.address + 5; *at != '\0'; at++) {
        target = target * 10 + (uint32_t)(*at - '0');
    }
    if (world->connection_count == world->connection_capacity) {
        world->connection_capacity = world->connection_capacity * 2 + 64;
        world->connections =
            realloc(world->connections, world->connection_capacity * sizeof *world->connections);
        CHECK(world->connections != NULL);
    }
    struct connection *c = &world->connections[world->connection_count++];
    *c = (struct connection){
        .process = {process, target},
        .generation = {world->processes[process].generation, world->processes[target].generation},
        .stream = {effect->stream.v, 0}};
    int64_t at = world->now + sim_time(world, world->knobs.delay_ns);
    if (!world->processes[target].is_alive) {
        c->is_broken = true;
        c->is_ended[1] = true;
        sim_end_side(world, c, 0, at);
        return;
    }
    world->next_odd += 2;
    c->stream[1] = world->next_odd;
    c->last[1] = at;
    struct sim_event *event = sim_schedule(world, SIM_CORE, at, target);
    event->event.kind = EVENT_STREAM_ACCEPTED;
    event->event.stream.v = c->stream[1];
    event->connection = (int32_t)(c - world->connections);
    event->side = 1;
}

static void *sim_copy(const void *from, uint64_t bytes) {
    void *to = malloc(bytes > 0 ? bytes : 1);
    CHECK(to != NULL);
    memcpy(to, from, bytes);
    return to;
}

/* Deep copy: the core's memory is only borrowed until its next step. */
static void sim_copy_message(struct sim_event *event, const struct message *message) {
    event->message = *message;
    struct message *copy = &event->message;
    switch (message->kind) {
    case MESSAGE_AUDIT:
    case MESSAGE_UNKNOWN:
        event->owned = sim_copy(message->u.audit.ids, message->u.audit.count * sizeof(uint64_t));
        copy->u.audit.ids = event->owned;
        break;
    case MESSAGE_ADMIT:
        event->owned =
            sim_copy(message->u.admit.tokens, message->u.admit.token_count * sizeof(uint32_t));
        copy->u.admit.tokens = event->owned;
        break;
    case MESSAGE_PREFILL:
        event->owned =
            sim_copy(message->u.prefill.tokens, message->u.prefill.token_count * sizeof(uint32_t));
        copy->u.prefill.tokens = event->owned;
        break;
    case MESSAGE_ACCEPT:
        event->owned = sim_copy(message->u.accept.address, message->u.accept.address_len);
        copy->u.accept.address = event->owned;
        break;
    case MESSAGE_TOKENS: {
        uint32_t count = message->u.tokens.count;
        uint64_t *both = malloc(count * (sizeof(uint64_t) + sizeof(uint32_t)) + 1);
        CHECK(both != NULL);
        memcpy(both, message->u.tokens.attempts, count * sizeof(uint64_t));
        memcpy(both + count, message->u.tokens.tokens, count * sizeof(uint32_t));
        event->owned = both;
        copy->u.tokens.attempts = both;
        copy->u.tokens.tokens = (const uint32_t *)(const void *)(both + count);
        break;
    }
    case MESSAGE_HELLO:
    case MESSAGE_BEAT:
    case MESSAGE_ADMITTED:
    case MESSAGE_REJECTED:
    case MESSAGE_QUEUED:
    case MESSAGE_BUSY:
    case MESSAGE_PREFILL_END:
    case MESSAGE_OPEN:
    case MESSAGE_REFUSE:
    case MESSAGE_FIN:
    case MESSAGE_COMMIT:
    case MESSAGE_END:
    case MESSAGE_ABORT:
    case MESSAGE_ABORT_SLOT:
    case MESSAGE_COMMITTED: break;
    }
    event->event.u.mail.message = copy;
}

static void sim_stream_send(struct world *world, uint32_t process, const struct effect *effect) {
    uint32_t side = 0;
    struct connection *c = sim_connection(world, process, effect->stream.v, &side);
    if (c == NULL || c->is_broken || c->is_ended[side]) {
        return;
    }
    uint32_t other = 1 - side;
    int64_t at = world->now + sim_time(world, world->knobs.delay_ns);
    at = at > c->stalled_until ? at : c->stalled_until;
    at = at > c->last[other] ? at : c->last[other];
    c->last[other] = at;
    struct sim_event *event = sim_schedule(world, SIM_CORE, at, c->process[other]);
    event->generation = c->generation[other];
    event->event.kind = EVENT_STREAM_MAIL;
    event->event.stream.v = c->stream[other];
    event->connection = (int32_t)(c - world->connections);
    event->side = other;
    sim_copy_message(event, &effect->u.message);
}

static void sim_stream_close(struct world *world, uint32_t process, const struct effect *effect) {
    uint32_t side = 0;
    struct connection *c = sim_connection(world, process, effect->stream.v, &side);
    if (c == NULL) {
        return;
    }
    sim_end_side(world, c, side, world->now + sim_time(world, MS));
    if (sim_chance(world, 500)) {
        c->is_broken = true; /* a reset: what is in flight to the peer is lost too */
    }
    sim_end_side(world, c, 1 - side, world->now + sim_time(world, world->knobs.delay_ns));
}

/* --- engine
 * ---------------------------------------------------------------------------------------- */

static uint64_t *sim_kv(struct world *world, struct process *p, const uint32_t *pages,
                        uint32_t component, uint32_t position) {
    uint32_t page = pages[position / world->knobs.page_tokens];
    CHECK(page < p->page_count);
    return &p->kv[((uint64_t)page * SIM_COMPONENTS + component) * world->knobs.page_tokens +
                  position % world->knobs.page_tokens];
}

static void sim_step(struct world *world, uint32_t process, const struct step_plan *plan) {
    struct process *p = &world->processes[process];
    SIM_CHECK(world, !p->is_stepping, "two engine steps outstanding");
    p->is_stepping = true;
    p->is_step_failing = sim_chance(world, world->knobs.step_fails) && !world->is_settling;
    p->plan = *plan;
    struct plan_row *rows = sim_copy(plan->rows, plan->row_count * sizeof *rows);
    p->plan.rows = rows;
    p->plan.tokens = sim_copy(plan->tokens, plan->token_count * sizeof(uint32_t));
    p->plan.pages = sim_copy(plan->pages, plan->page_count * sizeof(uint32_t));
    int64_t length = sim_time(world, world->knobs.step_ns);
    for (uint32_t layer = 0; layer < SIM_LAYERS; layer++) {
        struct sim_event *event = sim_schedule(
            world, SIM_LAYER, world->now + length * (layer + 1) / (SIM_LAYERS + 1), process);
        event->layer = layer;
        event->number = plan->number;
    }
    struct sim_event *done = sim_schedule(world, SIM_STEP, world->now + length, process);
    done->number = plan->number;
    done->event.u.step_done.elapsed.ns = length;
    /* Seeds of the rows, while the core's memory is ours to read. */
    uint64_t *seeds = malloc((plan->row_count + 1) * sizeof *seeds);
    CHECK(seeds != NULL);
    for (uint32_t i = 0; i < plan->row_count; i++) {
        seeds[i] = plan->rows[i].sampling != NULL ? plan->rows[i].sampling->seed : 0;
    }
    done->owned = seeds;
    world->result.steps++;
}

/* One layer of every row: KV from the tokens and the KV before them. */
static void sim_layer(struct world *world, struct sim_event *event) {
    struct process *p = &world->processes[event->process];
    CHECK(p->is_stepping && p->plan.number == event->number);
    if (p->is_step_failing) {
        return;
    }
    uint32_t each = SIM_COMPONENTS / SIM_LAYERS;
    for (uint32_t i = 0; i < p->plan.row_count; i++) {
        const struct plan_row *row = &p->plan.rows[i];
        const uint32_t *pages = p->plan.pages + row->page_first;
        for (uint32_t c = event->layer * each; c < (event->layer + 1) * each; c++) {
            uint64_t h = 0;
            if (row->position > 0) {
                h = *sim_kv(world, p, pages, c, row->position - 1) - sim_row(0, c);
            }
            for (uint32_t k = 0; k < row->token_count; k++) {
                h = sim_advance(h, p->plan.tokens[row->token_first + k]);
                *sim_kv(world, p, pages, c, row->position + k) = sim_row(h, c);
            }
        }
    }
    if (p->plan.wants_layers && !sim_chance(world, world->knobs.layer_lost)) {
        struct sim_event *post =
            sim_post(world, event->process, EVENT_LAYER_DONE, world->now + MS / 100);
        post->event.u.layer_done.number = event->number;
        post->event.u.layer_done.layer = event->layer;
    }
}

static void sim_step_done(struct world *world, struct sim_event *event) {
    struct process *p = &world->processes[event->process];
    CHECK(p->is_stepping && p->plan.number == event->number);
    struct sim_event *post =
        sim_post(world, event->process, EVENT_STEP_DONE, world->now + MS / 100);
    const uint64_t *seeds = event->owned;
    uint32_t count = 0;
    for (uint32_t i = 0; i < p->plan.row_count && !p->is_step_failing; i++) {
        const struct plan_row *row = &p->plan.rows[i];
        struct step_result *result = &post->results[count++];
        *result = (struct step_result){.entry = row->entry};
        if (row->is_sampled) {
            uint64_t attention = 0;
            uint32_t end = row->position + row->token_count;
            for (uint32_t j = 0; j < end; j++) {
                for (uint32_t c = 0; c < SIM_COMPONENTS; c++) {
                    attention +=
                        sim_attend(*sim_kv(world, p, p->plan.pages + row->page_first, c, j));
                }
            }
            result->token = sim_sample(attention, seeds[i], end);
            result->is_valid = true;
        }
    }
    post->event.u.step_done.number = event->number;
    post->event.u.step_done.status = p->is_step_failing ? STATUS_INTERNAL : STATUS_OK;
    post->event.u.step_done.results = post->results;
    post->event.u.step_done.count = count;
    post->event.u.step_done.elapsed = event->event.u.step_done.elapsed;
    p->is_stepping = false;
    sim_drop_plan(p);
}

/* --- link: receiver
 * ---------------------------------------------------------------------------------- */

static void sim_arm(struct world *world, uint32_t process, const struct effect *effect) {
    struct process *p = &world->processes[process];
    struct arm *arm = &p->arms[pool_index(effect->u.arm.slot.v)];
    SIM_CHECK(world, arm->slot == 0, "a slot was armed twice");
    *arm = (struct arm){.slot = effect->u.arm.slot.v,
                        .key = effect->u.arm.key,
                        .first = effect->u.arm.token_first,
                        .end = effect->u.arm.token_end};
    arm->pages = sim_copy(effect->u.arm.pages, effect->u.arm.page_count * sizeof(uint32_t));
    arm->covered = calloc((uint64_t)SIM_COMPONENTS * (arm->end + 1), 1);
    CHECK(arm->covered != NULL);
}

static void sim_disarm(struct world *world, struct sim_event *event) {
    struct process *p = &world->processes[event->process];
    struct arm *arm = &p->arms[pool_index(event->slot)];
    SIM_CHECK(world, arm->slot == event->slot, "a slot was disarmed that is not armed");
    free(arm->pages);
    free(arm->covered);
    memset(arm, 0, sizeof *arm);
    sim_post(world, event->process, EVENT_LINK_DISARMED, world->now + MS / 50)
        ->event.u.link.slot.v = event->slot;
}

static void sim_data(struct world *world, struct sim_event *event) {
    struct process *p = &world->processes[event->process];
    uint32_t index = pool_index(event->slot);
    if (index >= world->knobs.entries_max) {
        return;
    }
    struct arm *arm = &p->arms[index];
    if (arm->slot != event->slot || arm->key != event->key || arm->is_bad ||
        event->token_first < arm->first || event->token_first + event->token_count > arm->end) {
        return; /* dropped */
    }
    /* I1, seen from outside: we only write where the core says the slot is alive. */
    const struct decode_core *core = p->core;
    SIM_CHECK(world, core->entries[index].id == event->slot,
              "I1: the link writes for a slot whose pages were freed");
    for (uint32_t c = 0; c < event->component_count; c++) {
        for (uint32_t k = 0; k < event->token_count; k++) {
            uint32_t token = event->token_first + k;
            uint8_t *covered = &arm->covered[(event->component_first + c) * (arm->end + 1) + token];
            if (*covered != 0) {
                continue;
            }
            uint64_t value = event->values[c * event->token_count + k];
            *sim_kv(world, p, arm->pages, event->component_first + c, token) =
                event->is_bad ? value ^ 0xbad : value;
            if (!event->is_bad) {
                *covered = 1;
                arm->bytes += ROW_BYTES;
            }
        }
    }
    uint64_t whole = (uint64_t)(arm->end - arm->first) * SIM_COMPONENTS * ROW_BYTES;
    enum event_kind kind = event->is_bad         ? EVENT_LINK_BAD
                           : arm->bytes == whole ? EVENT_LINK_COVERED
                                                 : EVENT_LINK_PROGRESS;
    arm->is_bad = event->is_bad;
    struct sim_event *post = sim_post(world, event->process, kind, world->now + MS / 50);
    post->event.u.link.slot.v = event->slot;
    post->event.u.link.bytes = arm->bytes;
    post->event.u.link.cause = CAUSE_BAD_CHUNK;
}

/* --- link: sender
 * ------------------------------------------------------------------------------------- */

static struct link_peer *sim_link_peer(struct process *p, uint64_t peer) {
    for (uint32_t i = 0; i < p->peer_count; i++) {
        if (p->peers[i].peer == peer) {
            return &p->peers[i];
        }
    }
    return NULL;
}

static void sim_sent(struct world *world, uint32_t process, uint64_t op, enum status status,
                     int64_t at) {
    struct sim_event *post = sim_post(world, process, EVENT_LINK_SENT, at);
    post->event.u.sent.op = op;
    post->event.u.sent.status = status;
}

static void sim_link_send(struct world *world, uint32_t process, const struct effect *effect) {
    struct process *p = &world->processes[process];
    struct link_peer *peer = sim_link_peer(p, effect->u.send.peer);
    SIM_CHECK(world, peer != NULL && !peer->is_closed, "a send to a peer that is not connected");
    if (sim_chance(world, world->knobs.send_fails) && !world->is_settling) {
        sim_sent(world, process, effect->u.send.op, STATUS_BUSY, world->now + MS / 10);
        return;
    }
    if (p->op_count == p->op_capacity) {
        p->op_capacity = p->op_capacity * 2 + 16;
        p->ops = realloc(p->ops, p->op_capacity * sizeof *p->ops);
        CHECK(p->ops != NULL);
    }
    p->ops[p->op_count] = (struct link_op){effect->u.send.op, effect->u.send.peer, true};
    struct sim_event *read =
        sim_schedule(world, SIM_READ, world->now + sim_time(world, world->knobs.delay_ns), process);
    read->number = p->op_count++;
    read->slot = effect->u.send.slot.v;
    read->key = effect->u.send.key;
    read->peer = effect->u.send.peer;
    read->component_first = effect->u.send.component_first;
    read->component_count = effect->u.send.component_count;
    read->token_first = effect->u.send.token_first;
    read->token_count = effect->u.send.token_count;
    read->pages = sim_copy(effect->u.send.pages, effect->u.send.page_count * sizeof(uint32_t));
    /* What is in the pages now is what must still be there when the link reads them. */
    uint64_t cells = (uint64_t)read->component_count * read->token_count;
    read->values = malloc(cells * sizeof(uint64_t) + 1);
    CHECK(read->values != NULL);
    for (uint32_t c = 0; c < read->component_count; c++) {
        for (uint32_t k = 0; k < read->token_count; k++) {
            read->values[c * read->token_count + k] =
                *sim_kv(world, p, read->pages, read->component_first + c, read->token_first + k);
        }
    }
}

static void sim_transmit(struct world *world, const struct sim_event *read, uint32_t target,
                         uint32_t first, uint32_t count, bool is_bad) {
    struct sim_event *data =
        sim_schedule(world, SIM_DATA, world->now + sim_time(world, world->knobs.delay_ns), target);
    data->slot = read->slot;
    data->key = read->key;
    data->component_first = read->component_first;
    data->component_count = read->component_count;
    data->token_first = read->token_first + first;
    data->token_count = count;
    data->is_bad = is_bad;
    data->values = malloc((uint64_t)read->component_count * count * sizeof(uint64_t) + 1);
    CHECK(data->values != NULL);
    for (uint32_t c = 0; c < read->component_count; c++) {
        memcpy(data->values + c * count, read->values + c * read->token_count + first,
               count * sizeof(uint64_t));
    }
}

static void sim_read(struct world *world, struct sim_event *read) {
    struct process *p = &world->processes[read->process];
    struct link_op *op = &p->ops[read->number];
    if (!op->is_open) {
        return; /* the endpoint was closed: its end was told already */
    }
    for (uint32_t c = 0; c < read->component_count; c++) {
        for (uint32_t k = 0; k < read->token_count; k++) {
            SIM_CHECK(world,
                      *sim_kv(world, p, read->pages, read->component_first + c,
                              read->token_first + k) == read->values[c * read->token_count + k],
                      "I1: a page changed under a running send");
        }
    }
    const struct link_peer *peer = sim_link_peer(p, read->peer);
    if (peer == NULL) {
        sim_fail(world, "a send to a peer that is not connected");
        return;
    }
    struct process *target = &world->processes[peer->process];
    bool is_there = target->is_alive && target->generation == peer->generation;
    bool is_stopped = is_there && target->paused_until > world->now;
    if (!is_there || is_stopped) {
        if (!is_there && sim_chance(world, 500)) {
            op->is_open = false;
            sim_sent(world, read->process, op->op, STATUS_UNAVAILABLE, world->now + MS);
            sim_post(world, read->process, EVENT_LINK_FAILED, world->now + MS)->event.u.peer.peer =
                read->peer;
        } else if (is_stopped && sim_chance(world, 500)) {
            /* Buffers take it: completes although nobody has read it; it arrives after the thaw. */
            op->is_open = false;
            sim_transmit(world, read, peer->process, 0, read->token_count, false);
            sim_sent(world, read->process, op->op, STATUS_OK, world->now + MS);
        }
        return; /* else it hangs until its endpoint is closed */
    }
    op->is_open = false;
    bool is_faulty = !world->is_settling;
    uint32_t cut = sim_below(world, read->token_count + 1);
    for (uint32_t part = 0; part < 2; part++) {
        uint32_t first = part == 0 ? 0 : cut;
        uint32_t count = part == 0 ? cut : read->token_count - cut;
        if (count == 0 || (is_faulty && sim_chance(world, world->knobs.chunk_lost))) {
            continue;
        }
        sim_transmit(world, read, peer->process, first, count,
                     is_faulty && sim_chance(world, world->knobs.chunk_bad));
        if (sim_chance(world, world->knobs.chunk_twice)) {
            sim_transmit(world, read, peer->process, first, count, false);
        }
    }
    sim_sent(world, read->process, op->op, STATUS_OK,
             world->now + sim_time(world, world->knobs.delay_ns / 2 + 1));
}

static void sim_link_close(struct world *world, uint32_t process, uint64_t peer_id) {
    struct process *p = &world->processes[process];
    struct link_peer *peer = sim_link_peer(p, peer_id);
    SIM_CHECK(world, peer != NULL && !peer->is_closed, "a peer was closed twice");
    peer->is_closed = true;
    for (uint32_t i = 0; i < p->op_count; i++) {
        if (p->ops[i].is_open && p->ops[i].peer == peer_id) {
            p->ops[i].is_open = false;
            sim_sent(world, process, p->ops[i].op, STATUS_CANCELLED, world->now + MS);
        }
    }
    sim_post(world, process, EVENT_LINK_CLOSED, world->now + 2 * MS)->event.u.peer.peer = peer_id;
}

/* --- clients
 * --------------------------------------------------------------------------------------------- */

static void sim_reference(struct client *client, uint32_t token) {
    client->h = sim_advance(client->h, token);
    for (uint32_t c = 0; c < SIM_COMPONENTS; c++) {
        client->attention += sim_attend(sim_row(client->h, c));
    }
}

static void sim_client(struct world *world) {
    if (world->client_count >= world->knobs.clients) {
        return;
    }
    (void)sim_schedule(world, SIM_CLIENT, world->now + sim_time(world, world->knobs.arrival_ns),
                       SIM_PROCESSES);
    uint32_t router = sim_below(world, world->knobs.routers);
    struct process *p = &world->processes[router];
    if (!p->is_alive) {
        return; /* connection refused: no request */
    }
    uint32_t index = world->client_count++;
    struct client *client = &world->clients[index];
    *client = (struct client){.is_used = true,
                              .router = router,
                              .generation = p->generation,
                              .seed = prng_next(&world->prng),
                              .prompt_count = 1 + sim_below(world, world->knobs.prompt_max),
                              .max_tokens = 1 + sim_below(world, world->knobs.new_max),
                              .is_abortable = sim_chance(world, world->knobs.abort_label)};
    /* A few families of prompts share long prefixes. */
    struct prng family = {sim_below(world, 3)};
    uint32_t shared = sim_below(world, client->prompt_count + 1);
    for (uint32_t i = 0; i < client->prompt_count; i++) {
        uint32_t common = 2 + prng_below(&family, world->knobs.alphabet);
        client->prompt[i] = i < shared ? common : 2 + sim_below(world, world->knobs.alphabet);
        sim_reference(client, client->prompt[i]);
    }
    if (sim_chance(world, world->knobs.stop_string)) {
        client->stop_at = 1 + sim_below(world, client->max_tokens);
    }
    world->clients_open++;
    world->result.requests++;
    struct sim_event *open = sim_post(world, router, EVENT_CLIENT_OPEN, world->now + MS / 10);
    open->event.u.client_open.call.v = index + 1;
    open->event.u.client_open.model = "m";
    open->event.u.client_open.request_label = client->is_abortable ? "abort-me" : "r";
    open->event.u.client_open.session_label = "";
    open->event.u.client_open.deadline = sim_chance(world, world->knobs.short_deadline)
                                             ? span_ms(1 + sim_below(world, 3000))
                                             : span_ms(60000);
    if (sim_chance(world, world->knobs.leave)) {
        struct sim_event *leave = sim_schedule(
            world, SIM_LEAVE, world->now + sim_time(world, 20 * world->knobs.step_ns), router);
        leave->number = index;
    } else if (client->is_abortable) {
        struct sim_event *abort = sim_post(world, router, EVENT_CLIENT_ABORT, world->now + MS / 10);
        abort->event.u.client_abort.label = "abort-me";
    }
}

static void sim_leave(struct world *world, struct sim_event *event) {
    struct client *client = &world->clients[event->number];
    if (client->is_answered || client->is_lost || client->is_left) {
        return;
    }
    client->is_left = true;
    struct sim_event *gone =
        sim_post(world, event->process, EVENT_CLIENT_GONE, world->now + MS / 10);
    gone->event.u.client_gone.call.v = event->number + 1;
    gone->event.u.client_gone.cause = CAUSE_CLIENT_GONE;
}

static void sim_tokenize(struct world *world, uint32_t process, const struct effect *effect) {
    struct client *client = &world->clients[effect->u.tokenize.call.v - 1];
    struct sim_event *post =
        sim_post(world, process, EVENT_TOKENIZED, world->now + sim_time(world, MS));
    static const uint32_t eos[1] = {SIM_EOS};
    post->event.u.tokenized.request = effect->u.tokenize.request;
    post->event.u.tokenized.detail = "";
    if (sim_chance(world, world->knobs.tokenize_fails)) {
        post->event.u.tokenized.status = STATUS_INVALID;
        post->event.u.tokenized.detail = "invalid UTF-8 at byte 3";
        return;
    }
    post->sampling = (struct sampling){
        .seed = client->seed, .top_k = -1, .top_p = 1.0f, .repetition_penalty = 1.0f};
    post->event.u.tokenized.tokens = client->prompt;
    post->event.u.tokenized.token_count = client->prompt_count;
    post->event.u.tokenized.max_tokens = client->max_tokens;
    post->event.u.tokenized.sampling = &post->sampling;
    post->event.u.tokenized.eos = eos;
    post->event.u.tokenized.eos_count = 1;
}

static void sim_deliver(struct world *world, uint32_t process, const struct effect *effect) {
    struct client *client = &world->clients[effect->u.deliver.call.v - 1];
    SIM_CHECK(world, !client->is_answered, "I20: a token after the terminal");
    for (uint32_t i = 0; i < effect->u.deliver.token_count; i++) {
        uint32_t token = effect->u.deliver.tokens[i];
        uint32_t position = client->prompt_count + client->delivered;
        uint32_t expected = sim_sample(client->attention, client->seed, position);
        SIM_CHECK(world, token == expected,
                  "REF: a token differs from its reference (wrong KV, or two outputs: I12, I15)");
        SIM_CHECK(world, client->delivered < client->max_tokens, "more tokens than asked for");
        SIM_CHECK(world, client->delivered == 0 || client->last_token != SIM_EOS,
                  "a token after the end of the sequence");
        client->delivered++;
        client->last_token = token;
        sim_reference(client, token);
        world->result.tokens++;
        if (client->delivered == client->stop_at && token != SIM_EOS) {
            struct sim_event *stop =
                sim_post(world, process, EVENT_STOP_FOUND, world->now + sim_time(world, MS));
            stop->event.u.stop_found.request = effect->u.deliver.request;
            stop->event.u.stop_found.completion_tokens = client->delivered;
            client->is_stopping = true;
        }
    }
}

static void sim_answer(struct world *world, uint32_t process, const struct effect *effect) {
    struct client *client = &world->clients[effect->u.answer.call.v - 1];
    SIM_CHECK(world, !client->is_answered, "I20: two terminals for one request");
    client->is_answered = true;
    world->clients_open--;
    TRACE(world, "  answer client %llu: %s %s finish %s, %u tokens",
          (unsigned long long)effect->u.answer.call.v - 1, outcome_name(effect->u.answer.outcome),
          cause_name(effect->u.answer.cause), finish_name(effect->u.answer.finish),
          client->delivered);
    if (effect->u.answer.outcome == OUTCOME_OK) {
        world->result.ok++;
        if (effect->u.answer.finish == FINISH_LENGTH) {
            SIM_CHECK(world, client->delivered == client->max_tokens,
                      "I20: success with fewer tokens than asked for");
        } else {
            SIM_CHECK(world,
                      effect->u.answer.finish == FINISH_STOP &&
                          (client->is_stopping || client->last_token == SIM_EOS),
                      "I20: success without a reason to stop");
        }
        SIM_CHECK(world,
                  client->is_stopping ||
                      effect->u.answer.usage.completion_tokens == client->delivered,
                  "usage differs from what was delivered");
    } else if (effect->u.answer.outcome == OUTCOME_ABORTED) {
        world->result.aborted++;
        SIM_CHECK(world, client->is_left || client->is_abortable || world->knobs.abort_label > 0,
                  "aborted although nobody wished it");
    } else {
        world->result.failed++;
        if (world->knobs.is_quiet) {
            TRACE(world, "quiet failure: %s", effect->u.answer.detail);
        }
        SIM_CHECK(world, !world->knobs.is_quiet, "a request failed in a world without faults");
        SIM_CHECK(world, effect->u.answer.status != STATUS_OK, "a failure that says OK");
        SIM_CHECK(world,
                  effect->u.answer.cause == CAUSE_DEADLINE || client->delivered == 0 ||
                      (client->delivered < client->max_tokens && client->last_token != SIM_EOS),
                  "a failure although the answer was complete");
    }
    sim_post(world, process, EVENT_ANSWERED, world->now + sim_time(world, MS))
        ->event.u.answered.request = effect->u.answer.request;
}

/* --- turns
 * --------------------------------------------------------------------------------------------------
 */

static void sim_effect(struct world *world, uint32_t process, const struct effect *effect) {
    switch (effect->kind) {
    case EFFECT_STREAM_OPEN: sim_stream_open(world, process, effect); break;
    case EFFECT_STREAM_SEND: sim_stream_send(world, process, effect); break;
    case EFFECT_STREAM_CLOSE: sim_stream_close(world, process, effect); break;
    case EFFECT_TOKENIZE: sim_tokenize(world, process, effect); break;
    case EFFECT_DELIVER: sim_deliver(world, process, effect); break;
    case EFFECT_ANSWER: sim_answer(world, process, effect); break;
    case EFFECT_STEP: sim_step(world, process, effect->u.plan); break;
    case EFFECT_LINK_ARM: sim_arm(world, process, effect); break;
    case EFFECT_LINK_DISARM:
        sim_schedule(world, SIM_DISARM, world->now + sim_time(world, MS / 10), process)->slot =
            effect->u.disarm.slot.v;
        break;
    case EFFECT_LINK_CONNECT: {
        struct process *p = &world->processes[process];
        struct link_peer *peer = &p->peers[p->peer_count++];
        CHECK(p->peer_count <= 256 && effect->u.connect.address_len == ADDRESS_OF);
        *peer = (struct link_peer){.peer = effect->u.connect.peer};
        memcpy(&peer->process, effect->u.connect.address, 4);
        memcpy(&peer->generation, effect->u.connect.address + 4, 4);
        break;
    }
    case EFFECT_LINK_SEND: sim_link_send(world, process, effect); break;
    case EFFECT_LINK_CLOSE: sim_link_close(world, process, effect->u.link_close.peer); break;
    case EFFECT_NOTE:
        TRACE(world, "  note %d %s cause %s number %llu", effect->u.note.kind, effect->u.note.label,
              cause_name(effect->u.note.cause), (unsigned long long)effect->u.note.number);
        break;
    case EFFECT_EXIT: world->processes[process].is_leaving = true; break;
    }
}

/* What a message is about: an attempt or a slot. */
static unsigned long long sim_subject(const struct message *message) {
    switch (message->kind) {
    case MESSAGE_ADMIT: return message->u.admit.attempt.v;
    case MESSAGE_ADMITTED: return message->u.admitted.attempt.v;
    case MESSAGE_REJECTED:
    case MESSAGE_BUSY: return message->u.rejected.attempt.v;
    case MESSAGE_PREFILL: return message->u.prefill.attempt.v;
    case MESSAGE_QUEUED: return message->u.queued.attempt.v;
    case MESSAGE_PREFILL_END: return message->u.prefill_end.attempt.v;
    case MESSAGE_ABORT: return message->u.abort.attempt.v;
    case MESSAGE_END: return message->u.end.attempt.v;
    case MESSAGE_COMMITTED: return message->u.committed.attempt.v;
    case MESSAGE_OPEN: return message->u.open.slot.v;
    case MESSAGE_ACCEPT: return message->u.accept.slot.v;
    case MESSAGE_REFUSE:
    case MESSAGE_ABORT_SLOT: return message->u.refuse.slot.v;
    case MESSAGE_FIN: return message->u.fin.slot.v;
    case MESSAGE_COMMIT: return message->u.commit.slot.v;
    case MESSAGE_AUDIT:
    case MESSAGE_UNKNOWN: return message->u.audit.count > 0 ? message->u.audit.ids[0] : 0;
    case MESSAGE_HELLO: return message->u.hello.session;
    case MESSAGE_BEAT:
    case MESSAGE_TOKENS: return message->u.tokens.count;
    }
    return 0;
}

static void sim_trace_event(struct world *world, uint32_t process, const struct event *event) {
    if (world->trace == NULL || event->kind == EVENT_TICK ||
        (event->kind == EVENT_STREAM_MAIL && event->u.mail.message->kind == MESSAGE_BEAT)) {
        return;
    }
    const struct process *p = &world->processes[process];
    bool is_mail = event->kind == EVENT_STREAM_MAIL;
    TRACE(world, "%s-%u %s %s %llx on %llu", role_name(p->role), process, event_name(event->kind),
          is_mail ? message_name(event->u.mail.message->kind) : "",
          is_mail ? sim_subject(event->u.mail.message) : 0, (unsigned long long)event->stream.v);
}

static void sim_trace_effects(struct world *world) {
    for (uint32_t i = 0; i < world->effects.count && world->trace != NULL; i++) {
        const struct effect *effect = &world->effects.items[i];
        if (effect->kind != EFFECT_NOTE && effect->kind != EFFECT_ANSWER &&
            !(effect->kind == EFFECT_STREAM_SEND && effect->u.message.kind == MESSAGE_BEAT)) {
            bool is_mail = effect->kind == EFFECT_STREAM_SEND;
            TRACE(world, "    -> %s %s %llx on %llu", effect_name(effect->kind),
                  is_mail ? message_name(effect->u.message.kind) : "",
                  is_mail ? sim_subject(&effect->u.message) : 0,
                  (unsigned long long)effect->stream.v);
        }
    }
}

/* Poison what nobody owns or may reuse: whoever reads it gets wrong tokens. */
static void sim_poison(struct world *world, struct process *p, const struct pages *pages) {
    uint64_t each = (uint64_t)SIM_COMPONENTS * world->knobs.page_tokens;
    uint32_t at = sim_below(world, pages->capacity);
    const struct page *page = &pages->table[at];
    if (page->references == 0 && !page->is_indexed) {
        for (uint64_t i = 0; i < each; i++) {
            p->kv[at * each + i] = prng_next(&world->prng);
        }
    }
}

static void sim_crash(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    TRACE(world, "FAULT crash %s-%u", role_name(p->role), process);
    for (uint32_t i = 0; i < world->connection_count; i++) {
        struct connection *c = &world->connections[i];
        for (uint32_t side = 0; side < 2; side++) {
            if (c->process[side] == process && c->generation[side] == p->generation) {
                c->is_broken = true;
                c->is_ended[side] = true;
                if (sim_chance(world, 750)) { /* else cut off: only silence tells */
                    sim_end_side(world, c, 1 - side,
                                 world->now + sim_time(world, world->knobs.delay_ns));
                }
            }
        }
    }
    for (uint32_t i = 0; p->role == ROLE_ROUTER && i < world->client_count; i++) {
        struct client *client = &world->clients[i];
        if (client->router == process && client->generation == p->generation &&
            !client->is_answered && !client->is_lost) {
            client->is_lost = true;
            world->clients_open--;
            world->result.lost_with_router++;
        }
    }
    if (p->role != ROLE_ROUTER) {
        struct sim_event *lease =
            sim_schedule(world, SIM_LEASE, world->now + 10 * SECOND, SIM_PROCESSES);
        lease->info = sim_info(world, process);
    }
    sim_stop(world, process);
    (void)sim_schedule(world, SIM_RESTART, world->now + sim_time(world, 800 * MS), SIM_PROCESSES);
}

/* The bounds of protocol.md section 5, in each process's own observed time: a second for the tick
 * that acts on it. */
static void sim_bounds(struct world *world, const struct node *node, const void *core) {
    const struct core_timers *timers = &node->config.timers;
    int64_t now = node->now.ns - SECOND;
    for (uint32_t i = 0; i < node->config.sessions_max; i++) {
        const struct session *session = &node->sessions[i];
        SIM_CHECK(world,
                  session->phase != SESSION_LIVE || now <= session->heard.ns + timers->lease.ns,
                  "I16: a silent session outlived its lease");
    }
    if (node->config.role == ROLE_DECODE) {
        const struct decode_core *decode = core;
        for (uint32_t i = 0; i < decode->config.entries_max; i++) {
            const struct decode_entry *entry = &decode->entries[i];
            SIM_CHECK(world,
                      entry->state != DECODE_RESERVED ||
                          now <= entry->state_since.ns + timers->open.ns,
                      "I3: a reserved slot outlived T_open");
            SIM_CHECK(world,
                      entry->state != DECODE_RECEIVING || !entry->is_fin_seen ||
                          now <= entry->moved.ns + timers->stall.ns,
                      "I3: a stalled transfer outlived T_stall");
        }
    } else if (node->config.role == ROLE_ROUTER) {
        const struct router_core *router = core;
        for (uint32_t i = 0; i < router->config.requests_max; i++) {
            const struct request *request = &router->requests[i];
            SIM_CHECK(world,
                      (request->state != REQUEST_ADMITTING && request->state != REQUEST_ASKING) ||
                          now <= request->state_since.ns + timers->admit.ns,
                      "I3: an unanswered Admit or question outlived T_admit");
        }
    } else {
        const struct prefill_core *prefill = core;
        for (uint32_t i = 0; i < prefill->config.entries_max; i++) {
            const struct prefill_entry *entry = &prefill->entries[i];
            SIM_CHECK(world,
                      entry->sends == 0 || now <= entry->moved.ns + timers->stall.ns + SECOND,
                      "I3: a stalled send outlived T_stall");
        }
    }
}

/* What R may never do: end a decode on a prefill worker's word. */
static void sim_check_abort(struct world *world, const struct event *event) {
    if (event->kind != EVENT_STREAM_MAIL || event->u.mail.message->kind != MESSAGE_ABORT ||
        event->u.mail.message->u.abort.is_unless_committed) {
        return;
    }
    enum cause cause = event->u.mail.message->u.abort.cause;
    SIM_CHECK(world,
              cause != CAUSE_SEND_FAILED && cause != CAUSE_STALL && cause != CAUSE_PEER_REFUSED &&
                  cause != CAUSE_STEP_FAILED && cause != CAUSE_SESSION_ENDED &&
                  cause != CAUSE_SESSION_SILENT,
              "a decode was aborted on its prefill worker's failure without asking D");
}

static void sim_turn(struct world *world, uint32_t process, const struct event *event) {
    struct process *p = &world->processes[process];
    struct instant now = {world->now};
    struct instant next = {0};
    const struct node *node = NULL;
    sim_trace_event(world, process, event);
    if (p->role == ROLE_DECODE) {
        sim_check_abort(world, event);
    }
    world->result.events++;
    if (p->role == ROLE_ROUTER) {
        router_core_step(p->core, event, now, &world->effects);
        router_verify(p->core);
        next = router_core_deadline(p->core);
        node = &((struct router_core *)p->core)->node;
    } else if (p->role == ROLE_DECODE) {
        struct decode_core *core = p->core;
        decode_core_step(core, event, now, &world->effects);
        decode_verify(core);
        next = decode_core_deadline(core);
        node = &core->node;
    } else {
        struct prefill_core *core = p->core;
        prefill_core_step(core, event, now, &world->effects);
        prefill_verify(core);
        next = prefill_core_deadline(core);
        node = &core->node;
    }
    sim_trace_effects(world);
    if (event->kind == EVENT_TICK) {
        sim_bounds(world, node, p->core);
    }
    SIM_CHECK(world, node->stats.audit_mismatch == 0, "an audit found a mismatch: a lost end");
    SIM_CHECK(world, node->stats.overrun_ns < 1500 * MS, "I3: an entry outlived its deadline");
    for (uint32_t i = 0; i < world->effects.count; i++) {
        sim_effect(world, process, &world->effects.items[i]);
    }
    if (p->role == ROLE_DECODE) {
        sim_poison(world, p, &((struct decode_core *)p->core)->pages);
    } else if (p->role == ROLE_PREFILL) {
        sim_poison(world, p, &((struct prefill_core *)p->core)->pages);
    }
    if (p->is_leaving) {
        SIM_CHECK(world, node->ledger.live == 0, "a drained process left with entries");
        sim_crash(world, process);
        return;
    }
    if (next.ns < p->next_tick || p->next_tick <= world->now) {
        p->next_tick = next.ns;
        (void)sim_schedule(world, SIM_TICK, next.ns, process);
    }
}

/* --- faults
 * ----------------------------------------------------------------------------------------------------
 */

static void sim_again(struct world *world, enum sim_kind kind, int64_t every) {
    if (every > 0 && !world->is_settling) {
        (void)sim_schedule(world, kind, world->now + sim_time(world, every), SIM_PROCESSES);
    }
}

static void sim_fault(struct world *world, struct sim_event *event) {
    const struct knobs *knobs = &world->knobs;
    if (world->is_settling) {
        return;
    }
    uint32_t process = sim_below(world, world->process_count);
    struct process *p = &world->processes[process];
    struct connection *c = NULL;
    if (world->connection_count > 0) {
        uint32_t recent = world->connection_count < 64 ? world->connection_count : 64;
        c = &world->connections[world->connection_count - 1 - sim_below(world, recent)];
    }
    switch (event->kind) {
    case SIM_FAULT_BREAK:
        sim_again(world, SIM_FAULT_BREAK, knobs->break_every_ns);
        if (c != NULL) {
            TRACE(world, "FAULT break %u-%u", c->process[0], c->process[1]);
            sim_break(world, c);
        }
        break;
    case SIM_FAULT_STALL:
        sim_again(world, SIM_FAULT_STALL, knobs->stall_every_ns);
        if (c != NULL) {
            TRACE(world, "FAULT stall %u-%u", c->process[0], c->process[1]);
            int64_t until = world->now + sim_time(world, 4 * SECOND);
            c->stalled_until = until > c->stalled_until ? until : c->stalled_until;
        }
        break;
    case SIM_FAULT_CRASH:
        sim_again(world, SIM_FAULT_CRASH, knobs->crash_every_ns);
        if (p->is_alive) {
            sim_crash(world, process);
        }
        break;
    case SIM_FAULT_PAUSE:
        sim_again(world, SIM_FAULT_PAUSE, knobs->pause_every_ns);
        if (p->is_alive) {
            int64_t until = world->now + sim_time(world, 5 * SECOND);
            p->paused_until = until > p->paused_until ? until : p->paused_until;
            TRACE(world, "FAULT pause %s-%u until %.3f", role_name(p->role), process,
                  (double)p->paused_until / 1e9);
        }
        break;
    case SIM_FAULT_ETCD:
        sim_again(world, SIM_FAULT_ETCD, knobs->etcd_every_ns);
        TRACE(world, "FAULT etcd deletes everything");
        for (uint32_t i = 0; i < world->process_count; i++) {
            if (world->processes[i].role != ROLE_ROUTER && world->processes[i].is_alive) {
                sim_announce(world, i, false);
            }
        }
        (void)sim_schedule(world, SIM_RELIST, world->now + sim_time(world, 500 * MS),
                           SIM_PROCESSES);
        break;
    case SIM_FAULT_DRAIN:
        sim_again(world, SIM_FAULT_DRAIN, knobs->drain_every_ns);
        if (p->is_alive && p->role != ROLE_ROUTER) {
            TRACE(world, "FAULT drain %s-%u", role_name(p->role), process);
            sim_post(world, process, EVENT_DRAIN, world->now + MS)->event.u.drain.grace =
                span_ms(1 + sim_below(world, 5000));
        }
        break;
    case SIM_CORE:
    case SIM_TICK:
    case SIM_LAYER:
    case SIM_STEP:
    case SIM_READ:
    case SIM_DATA:
    case SIM_DISARM:
    case SIM_CLIENT:
    case SIM_LEAVE:
    case SIM_RESTART:
    case SIM_LEASE:
    case SIM_RELIST:
    case SIM_RESUME: break;
    }
}

static void sim_lease(struct world *world, const struct sim_event *event) {
    for (uint32_t i = 0; i < world->process_count; i++) {
        if (world->processes[i].role == ROLE_ROUTER && world->processes[i].is_alive) {
            sim_post(world, i, EVENT_WORKER_LOST, world->now + MS)
                ->event.u.worker_lost.incarnation = event->info.incarnation;
        }
    }
}

static void sim_restart(struct world *world) {
    for (uint32_t i = 0; i < world->process_count; i++) {
        if (!world->processes[i].is_alive) {
            sim_start(world, i);
        }
    }
}

static void sim_relist(struct world *world) {
    for (uint32_t i = 0; i < world->process_count; i++) {
        if (world->processes[i].role != ROLE_ROUTER && world->processes[i].is_alive) {
            sim_announce(world, i, true);
        }
    }
}

/* --- the run
 * ------------------------------------------------------------------------------------------------------
 */

static bool sim_is_stale(const struct world *world, const struct sim_event *event) {
    if (event->process >= SIM_PROCESSES) {
        return false;
    }
    const struct process *p = &world->processes[event->process];
    if (!p->is_alive || event->generation != p->generation) {
        return true;
    }
    if (event->connection >= 0 && event->event.kind != EVENT_STREAM_ENDED) {
        return world->connections[event->connection].is_broken;
    }
    return false;
}

static void sim_handle(struct world *world, struct sim_event *event) {
    switch (event->kind) {
    case SIM_CORE: sim_turn(world, event->process, &event->event); break;
    case SIM_TICK:
        event->event.kind = EVENT_TICK;
        sim_turn(world, event->process, &event->event);
        break;
    case SIM_LAYER: sim_layer(world, event); break;
    case SIM_STEP: sim_step_done(world, event); break;
    case SIM_READ: sim_read(world, event); break;
    case SIM_DATA: sim_data(world, event); break;
    case SIM_DISARM: sim_disarm(world, event); break;
    case SIM_CLIENT: sim_client(world); break;
    case SIM_LEAVE: sim_leave(world, event); break;
    case SIM_FAULT_BREAK:
    case SIM_FAULT_STALL:
    case SIM_FAULT_CRASH:
    case SIM_FAULT_PAUSE:
    case SIM_FAULT_ETCD:
    case SIM_FAULT_DRAIN: sim_fault(world, event); break;
    case SIM_RESTART: sim_restart(world); break;
    case SIM_LEASE: sim_lease(world, event); break;
    case SIM_RELIST: sim_relist(world); break;
    case SIM_RESUME: break;
    }
}

/* Live entries over all processes. */
static uint32_t sim_live(const struct world *world) {
    uint32_t live = 0;
    for (uint32_t i = 0; i < world->process_count; i++) {
        const struct process *p = &world->processes[i];
        if (!p->is_alive) {
            live++; /* still to be restarted */
        } else if (p->role == ROLE_ROUTER) {
            live += ((struct router_core *)p->core)->node.ledger.live;
        } else if (p->role == ROLE_DECODE) {
            live += ((struct decode_core *)p->core)->node.ledger.live;
        } else {
            live += ((struct prefill_core *)p->core)->node.ledger.live;
        }
    }
    return live;
}

/* When the last pause and the last silence are over: neither is cut short, or order would break. */
static int64_t sim_last_fault(const struct world *world) {
    int64_t last = world->now;
    for (uint32_t i = 0; i < world->process_count; i++) {
        int64_t until = world->processes[i].paused_until;
        last = until > last ? until : last;
    }
    for (uint32_t i = 0; i < world->connection_count; i++) {
        int64_t until = world->connections[i].stalled_until;
        last = until > last ? until : last;
    }
    return last;
}

static void sim_settle(struct world *world) {
    world->is_settling = true;
    TRACE(world, "faults off, %u clients open", world->clients_open);
    (void)sim_schedule(world, SIM_RESTART, world->now + MS, SIM_PROCESSES);
    (void)sim_schedule(world, SIM_RELIST, world->now + 10 * MS, SIM_PROCESSES);
}

static void sim_set_up(struct world *world, uint64_t seed) {
    world->knobs = sim_knobs(seed);
    world->prng.state = mix64(seed);
    world->next_odd = 1;
    const struct knobs *knobs = &world->knobs;
    world->layout.page_tokens = knobs->page_tokens;
    world->layout.component_count = SIM_COMPONENTS;
    for (uint32_t i = 0; i < SIM_COMPONENTS; i++) {
        world->layout.components[i] =
            (struct kv_component){.name = "kv",
                                  .layer = (uint16_t)(i / (SIM_COMPONENTS / SIM_LAYERS)),
                                  .tokens_per_row = 1,
                                  .row_bytes = ROW_BYTES,
                                  .dtype = KV_DTYPE_F32,
                                  .lifetime = KV_LIFETIME_PAGE};
    }
    CHECK(layout_complete(&world->layout) == STATUS_OK);
    world->clients = calloc(SIM_CLIENTS, sizeof *world->clients);
    CHECK(world->clients != NULL);
    for (uint32_t i = 0; i < knobs->routers + knobs->prefills + knobs->decodes; i++) {
        world->processes[i].role = i < knobs->routers                     ? ROLE_ROUTER
                                   : i < knobs->routers + knobs->prefills ? ROLE_PREFILL
                                                                          : ROLE_DECODE;
        world->process_count++;
    }
    for (uint32_t i = 0; i < world->process_count; i++) {
        sim_start(world, i);
    }
    (void)sim_schedule(world, SIM_CLIENT, 200 * MS, SIM_PROCESSES);
    sim_again(world, SIM_FAULT_BREAK, knobs->break_every_ns);
    sim_again(world, SIM_FAULT_STALL, knobs->stall_every_ns);
    sim_again(world, SIM_FAULT_CRASH, knobs->crash_every_ns);
    sim_again(world, SIM_FAULT_PAUSE, knobs->pause_every_ns);
    sim_again(world, SIM_FAULT_ETCD, knobs->etcd_every_ns);
    sim_again(world, SIM_FAULT_DRAIN, knobs->drain_every_ns);
}

static void sim_check_hook(const char *file, int line, const char *what) {
    (void)file;
    (void)line;
    (void)what;
    if (sim_current != NULL) {
        sim_current->violation = "a CHECK of the core failed (printed above)";
        longjmp(sim_escape, 1);
    }
}

/* True if the process is stopped: it will read the event when it runs again. */
static bool sim_hold(struct world *world, struct sim_event *event) {
    if (event->process >= SIM_PROCESSES) {
        return false;
    }
    struct process *p = &world->processes[event->process];
    if (p->paused_until <= world->now && p->held_count == 0) {
        return false;
    }
    if (p->held_count == 0) {
        (void)sim_schedule(world, SIM_RESUME, p->paused_until, event->process);
    }
    if (p->held_count == p->held_capacity) {
        p->held_capacity = p->held_capacity * 2 + 64;
        p->held = realloc(p->held, p->held_capacity * sizeof(struct sim_event *));
        CHECK(p->held != NULL);
    }
    p->held[p->held_count++] = event;
    return true;
}

static void sim_resume(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    if (p->paused_until > world->now) { /* stopped again meanwhile */
        (void)sim_schedule(world, SIM_RESUME, p->paused_until, process);
        return;
    }
    /* The list is taken first: a process that leaves in mid-turn frees its own. */
    struct sim_event **held = p->held;
    uint32_t count = p->held_count;
    p->held = NULL;
    p->held_count = 0;
    p->held_capacity = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (!sim_is_stale(world, held[i])) {
            sim_handle(world, held[i]);
        }
        sim_free(held[i]);
    }
    free(held);
}

static void sim_loop(struct world *world) {
    int64_t settle_at = 0;
    int64_t done_at = 0;
    while (world->queue.count > 0) {
        struct queue_item item = queue_pop(&world->queue);
        struct sim_event *event = item.payload;
        world->now = item.at_ns > world->now ? item.at_ns : world->now;
        if (sim_is_stale(world, event)) {
            sim_free(event);
            continue;
        }
        if (event->kind == SIM_RESUME) {
            sim_resume(world, event->process);
        } else if (sim_hold(world, event)) {
            continue;
        } else {
            sim_handle(world, event);
        }
        sim_free(event);
        if (!world->is_settling && world->client_count >= world->knobs.clients) {
            if (settle_at == 0) {
                settle_at = world->now + 5 * SECOND;
            }
            if (world->now >= settle_at) {
                sim_settle(world);
                settle_at = sim_last_fault(world);
            }
        }
        if (!world->is_settling) {
            continue;
        }
        SIM_CHECK(world, world->clients_open == 0 || world->now < settle_at + 90 * SECOND,
                  "a request did not end within its deadline after the last fault: wedged");
        if (world->clients_open == 0) {
            done_at = done_at == 0 ? (world->now > settle_at ? world->now : settle_at) : done_at;
            if (sim_live(world) == 0) {
                world->result.drained_ns = world->now > done_at ? world->now - done_at : 0;
                return;
            }
            SIM_CHECK(world, world->now < done_at + 10 * SECOND,
                      "entries are left although every client is gone: an orphan");
        }
    }
}

static void sim_count(struct world *world) {
    for (uint32_t i = 0; i < world->process_count; i++) {
        const struct process *p = &world->processes[i];
        if (p->is_alive && p->role == ROLE_ROUTER) {
            const struct router_core *core = p->core;
            for (uint32_t c = 0; c < CAUSE_COUNT; c++) {
                world->result.retries += core->stats.retries[c];
            }
            world->result.resumes += core->stats.resumes_ok;
            world->result.local += core->stats.one_leg;
        } else if (p->is_alive && p->role == ROLE_DECODE) {
            const struct decode_core *core = p->core;
            world->result.commits += core->commits;
            SIM_CHECK(world, core->pages.owned == 0, "I4: pages owned at rest");
        } else if (p->is_alive) {
            const struct prefill_core *core = p->core;
            SIM_CHECK(world, core->pages.owned == 0, "I4: pages owned at rest");
        }
    }
}

static void sim_tear_down(struct world *world) {
    while (world->queue.count > 0) {
        sim_free(queue_pop(&world->queue).payload);
    }
    for (uint32_t i = 0; i < world->process_count; i++) {
        sim_stop(world, i);
    }
    queue_fini(&world->queue);
    free(world->connections);
    free(world->clients);
}

const char *sim_run(uint64_t seed, FILE *trace, struct sim_result *result_out) {
    struct world *world = calloc(1, sizeof *world);
    CHECK(world != NULL);
    world->trace = trace;
    sim_current = world;
    check_set_hook(sim_check_hook);
    if (setjmp(sim_escape) == 0) {
        sim_set_up(world, seed);
        sim_loop(world);
        sim_count(world);
    }
    check_set_hook(NULL);
    sim_current = NULL;
    const char *violation = world->violation;
    *result_out = world->result;
    sim_tear_down(world);
    free(world);
    return violation;
}
