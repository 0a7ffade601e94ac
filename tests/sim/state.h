/* Inside of the simulated world: what its files share. */
#ifndef SIM_STATE_H
#define SIM_STATE_H

#include "base/check.h"
#include "core/decode.h"
#include "core/prefill.h"
#include "core/router.h"
#include "sim/queue.h"
#include "sim/world.h"

#define MS         1000000ll
#define SECOND     1000000000ll
#define ADDRESS_OF 8u /* bytes of a simulated worker address: process, generation */
#define NOBODY     SIM_PROCESSES

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
    SIM_FAULT, /* `number` is the kind */
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
    bool is_last; /* the stream breaks behind this message */
    struct event event;
    struct message *message; /* owned */
    void *owned;             /* what the message or event points to */
    void *logprobs;          /* the same, of MESSAGE_TOKENS */
    struct worker_info *info;
    struct sampling *sampling;
    struct step_result *results;
    uint64_t number; /* step, op, fault or client */
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
    bool is_deaf[2]; /* nothing reaches this side any more, not even the end */
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
    bool is_failed;
};

struct link_op {
    uint64_t op, peer;
    bool is_open;
};

/* What the oracle remembers of one entry from the step before. */
struct shadow {
    uint64_t id;
    uint64_t attempt;
    uint64_t stream; /* of its router's session */
    uint32_t state, outcome, cause;
    int64_t orphan_since; /* observed time; 0: somebody wants it */
};

/* Shells of one process; each keeps its own order. */
enum lane { LANE_ENGINE, LANE_LINK, LANE_CLIENTS, LANE_DISCOVERY, LANE_COUNT };

struct process {
    enum role role;
    bool is_alive;
    uint32_t generation;
    struct incarnation incarnation;
    struct prng chance; /* delays of this life */
    int64_t paused_until;
    struct sim_event **held; /* what arrived while it was stopped */
    uint32_t held_count, held_capacity;
    int64_t next_tick;
    int64_t lane_last[LANE_COUNT];
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
    struct shadow *shadows;
    uint64_t last_plan, last_abandoned;
    uint64_t created;        /* ledger.created before the step */
    uint32_t retracted;      /* entries in that state before the step */
    uint32_t sessions_ended; /* the same */
    uint64_t cursor;         /* steps of the poisoner */
    uint64_t *salts;         /* of each page: of whoever wrote it last */
};

#define SIM_CHOICES 4u

/* One of the answers to a client's prompt. */
struct choice {
    bool is_done, is_stopping;
    bool is_cut; /* told that it ends with its call */
    uint32_t delivered;
    uint64_t h, attention; /* reference state after all known tokens */
    uint32_t last_token;
    int64_t last_at;
};

struct client {
    bool is_used, is_answered, is_lost, is_left, is_abortable, is_probe, is_crowd;
    bool is_doomed; /* a fault that ends this request honestly has struck it */
    uint32_t router, generation;
    uint32_t prompt_count, max_tokens, choice_count;
    uint32_t prompt[SIM_PROMPT_MAX];
    uint32_t salt;
    uint64_t seed;
    uint32_t logprobs;  /* as in struct sampling */
    uint32_t stop_at;   /* in each choice; 0 = no stop string */
    uint32_t unread_at; /* of choice 0; 0 = reads everything */
    int64_t deadline_at;
    struct choice choices[SIM_CHOICES];
};

struct world {
    const struct schedule *schedule;
    struct sim_options options;
    struct knobs knobs;
    struct queue queue;
    int64_t now;
    bool is_settling;
    bool is_probing;
    FILE *trace;
    struct process processes[SIM_PROCESSES];
    uint32_t process_count;
    struct connection *connections;
    uint32_t connection_count, connection_capacity;
    uint64_t next_odd;
    struct client *clients;
    uint32_t client_count, client_capacity, clients_open;
    uint32_t arrivals;      /* clients that came or were refused so far */
    uint32_t arrivals_last; /* of the list, when there is one */
    struct kv_layout layout;
    struct effects effects;
    struct sim_result result;
    const char *violation;
    uint64_t next_incarnation;
    int64_t cut_until[SIM_PROCESSES][SIM_PROCESSES]; /* from, to */
    int64_t etcd_down_until;
    int64_t answered_until; /* the last call that is still to close */
    struct prng chance;     /* delays that no process draws */
};

_Noreturn void sim_fail(struct world *world, const char *sentence);

#define SIM_CHECK(world, fact, sentence)                                                           \
    do {                                                                                           \
        if (!(fact)) {                                                                             \
            sim_fail((world), (sentence));                                                         \
        }                                                                                          \
    } while (0)

#define TRACE(world, ...)                                                                          \
    do {                                                                                           \
        if ((world)->trace != NULL) {                                                              \
            (void)fprintf((world)->trace, "%10.4f  ", (double)(world)->now / 1e9);                 \
            (void)fprintf((world)->trace, __VA_ARGS__);                                            \
            (void)fputc('\n', (world)->trace);                                                     \
        }                                                                                          \
    } while (0)

/* --- world.c: time and chance --- */

/* Around `mean`, now and then ten times as long; drawn by a process (NOBODY: the world). */
int64_t sim_time(struct world *world, uint32_t process, int64_t mean);
/* Heads or tails, drawn by a process. */
bool sim_coin(struct world *world, uint32_t process);
/* One more opportunity of a fault of chance: whether it strikes. */
bool sim_strikes(struct world *world, enum fault fault);
/* The same at an opportunity that has a number of its own (a client's). */
bool sim_strikes_at(struct world *world, enum fault fault, uint32_t index);
struct sim_event *sim_schedule(struct world *world, enum sim_kind kind, int64_t at,
                               uint32_t process);
/* An event from a shell of the process, in that shell's order. */
struct sim_event *sim_post(struct world *world, uint32_t process, enum lane lane,
                           enum event_kind kind, int64_t at);
void sim_free(struct sim_event *event);
void *sim_copy(const void *from, uint64_t bytes);
void sim_turn(struct world *world, uint32_t process, const struct event *event);
void sim_handle(struct world *world, struct sim_event *event);
bool sim_is_stale(const struct world *world, const struct sim_event *event);

static inline struct node *sim_node_of(struct process *p) {
    return p->role == ROLE_ROUTER   ? &((struct router_core *)p->core)->node
           : p->role == ROLE_DECODE ? &((struct decode_core *)p->core)->node
                                    : &((struct prefill_core *)p->core)->node;
}

/* The model: a row of KV from the row before it and its token; a token from all rows. */
static inline uint64_t sim_row(uint64_t h, uint32_t component) {
    return h + component * 0x9e3779b97f4a7c15ull;
}
static inline uint64_t sim_advance(uint64_t h, uint32_t token) {
    return mix64(h ^ ((uint64_t)token + 1) * 0xd1342543de82ef95ull);
}
static inline uint64_t sim_attend(uint64_t row) {
    return mix64(row);
}
static inline uint32_t sim_sample(uint64_t attention, uint64_t seed, uint32_t position) {
    return (uint32_t)(mix64(attention ^ prng_at(seed, position)) % SIM_VOCAB);
}

/* Logprobs are any function of what the model has read: exact floats, at most 0. */
static inline float sim_logprob(uint64_t attention, uint32_t position, uint32_t token) {
    uint64_t mixed = mix64(attention ^ ((uint64_t)position << 32 | token));
    return -(float)(mixed >> 44) / 1024.0f;
}
static inline uint32_t sim_alternative(uint64_t attention, uint32_t rank) {
    return (uint32_t)((mix64(attention + 1) + rank) % SIM_VOCAB);
}

/* --- process.c --- */
void sim_start(struct world *world, uint32_t process);
void sim_stop(struct world *world, uint32_t process);
void sim_crash(struct world *world, uint32_t process);
void sim_pause(struct world *world, uint32_t process, int64_t until);
bool sim_hold(struct world *world, struct sim_event *event);
void sim_resume(struct world *world, uint32_t process);
void sim_restart(struct world *world);
void sim_list(struct world *world, uint32_t process, uint32_t router, bool is_seen);
void sim_announce(struct world *world, uint32_t process, bool is_seen);
void sim_lease(struct world *world, const struct sim_event *event);
void sim_relist(struct world *world);

/* --- stream.c --- */
void sim_break(struct world *world, struct connection *c);
/* The end of a stream as one side will hear of it, once, behind whatever is on its way there. */
void sim_end_side(struct world *world, struct connection *c, uint32_t side, int64_t at);
void sim_stream_open(struct world *world, uint32_t process, const struct effect *effect);
void sim_stream_send(struct world *world, uint32_t process, const struct effect *effect);
void sim_stream_close(struct world *world, uint32_t process, const struct effect *effect);
int64_t sim_cut_until(const struct world *world, uint32_t from, uint32_t to);

/* --- engine.c --- */
uint64_t *sim_kv(struct world *world, struct process *p, const uint32_t *pages, uint32_t component,
                 uint32_t position);
void sim_step(struct world *world, uint32_t process, const struct step_plan *plan);
void sim_abandon(struct world *world, uint32_t process, uint64_t number);
void sim_layer(struct world *world, struct sim_event *event);
void sim_step_done(struct world *world, struct sim_event *event);
void sim_drop_plan(struct process *p);
void sim_poison(struct world *world, struct process *p);
/* I1, I12: the page may be written by whoever holds `pages`. */
void sim_check_writable(struct world *world, struct process *p, uint32_t page);

/* --- link.c --- */
void sim_arm(struct world *world, uint32_t process, const struct effect *effect);
void sim_disarm_soon(struct world *world, uint32_t process, const struct effect *effect);
void sim_disarm(struct world *world, struct sim_event *event);
void sim_data(struct world *world, struct sim_event *event);
void sim_link_connect(struct world *world, uint32_t process, const struct effect *effect);
void sim_link_send(struct world *world, uint32_t process, const struct effect *effect);
void sim_link_close(struct world *world, uint32_t process, uint64_t peer_id);
void sim_read(struct world *world, struct sim_event *read);

/* --- client.c --- */
void sim_client(struct world *world);
void sim_flood(struct world *world, uint32_t index);
void sim_probe(struct world *world);
void sim_leave(struct world *world, struct sim_event *event);
void sim_tokenize(struct world *world, uint32_t process, const struct effect *effect);
void sim_deliver(struct world *world, uint32_t process, const struct effect *effect);
void sim_choice(struct world *world, const struct effect *effect);
void sim_answer(struct world *world, uint32_t process, const struct effect *effect);
void sim_lose_clients(struct world *world, uint32_t process);

/* --- timed.c --- */
void sim_timed_start(struct world *world);
void sim_timed(struct world *world, enum fault fault);

/* --- oracle.c --- */
void sim_after(struct world *world, uint32_t process, const struct event *event);
/* After the effects were carried out. */
void sim_verify(struct process *p);
/* What routers believe of prefix indexes: true when it is what they are. CHECKs that nothing that
 * is believed could not be. */
bool sim_views_agree(struct world *world);
uint32_t sim_shadow_count(const struct world *world, enum role role);

/* --- trace.c --- */
void sim_trace_event(struct world *world, uint32_t process, const struct event *event);
void sim_trace_effects(struct world *world);

#endif
