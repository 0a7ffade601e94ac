/* The world around one core, read from bytes: its peers' messages, its streams and the shells.
 *
 * Peers may say anything that wire/session.h lets through: each message goes through encode and
 * decode, so a core meets exactly what the network can bring, in memory that is gone after the
 * step. The shells keep their promises: a stream ends once and says nothing afterwards, time does
 * not run backwards. What a core says is checked: each message must encode, and only go to a stream
 * that it has not closed. Fields are drawn from small ranges and from what the core said before. */
#ifndef TESTS_FUZZ_WORLD_H
#define TESTS_FUZZ_WORLD_H

#include "core/effect.h"
#include "core/event.h"
#include "fuzz/fuzz.h"
#include "wire/session.h"

#define WORLD_STREAMS_MAX 64u
#define WORLD_IDS         16u
#define WORLD_VOCAB       16u
#define WORLD_CONTEXT     32u

struct world_stream {
    uint64_t id;
    bool is_ended;  /* the last event was delivered */
    bool is_closed; /* by the core: it says nothing more */
};

/* The last few values of one kind that were said; drawn from again. */
struct world_ids {
    uint64_t values[WORLD_IDS];
    uint32_t count;
};

struct world {
    struct input input;
    struct instant now;
    void *core;
    struct world_stream streams[WORLD_STREAMS_MAX];
    uint32_t stream_count;
    uint64_t next_odd;
    struct world_ids attempts;
    struct world_ids slots;
    struct world_ids keys; /* of slots, in parallel */
    bool is_exit_seen;
    struct wire_arena arena;
    struct wire_buffer buffer;

    /* Of the role under test: one step with its verification. */
    void (*step)(struct world *world, const struct event *event);
    /* Carries out an effect that is no stream's. */
    void (*effect)(struct world *world, const struct effect *effect);
    /* Makes a drawn message right by looking at the core: what an honest peer would say. */
    void (*honest)(struct world *world, struct world_stream *stream, struct message *message);
    /* What peers of this role usually say; drawn more often than the rest. */
    const enum message_kind *kinds;
    uint32_t kind_count;
    /* Live entries of the core. */
    uint32_t (*live)(const struct world *world);

    struct effects effects; /* of the last step; last, because it is large and needs no zeroes */
};

/* input: borrowed. Zeroes the world; the function pointers are the caller's to set. */
void world_init(struct world *world, const uint8_t *data, size_t len);
void world_fini(struct world *world);
/* Memory for a core; the same block each run. The cores' arenas check their own bounds. */
void *world_memory(size_t bytes);

/* One turn: steps the core, checks what it said, carries out its effects. */
void world_turn(struct world *world, const struct event *event);
/* Time passes in ticks of 50 to 200 ms. */
void world_pass(struct world *world, uint32_t ticks, uint32_t tick_ms);
/* One drawn thing that happens to any core: ticks, streams, mail, drain, an event of another role.
 */
void world_anything(struct world *world);
/* A new stream from a peer; NULL if the table is full. */
struct world_stream *world_accept(struct world *world);
struct world_stream *world_stream(struct world *world, uint64_t id);
/* Hello, as an honest peer of that role would say it (numbers drawn). */
void world_hello(struct world *world, struct world_stream *stream, enum role role,
                 uint64_t incarnation, struct layout_digest layout);
/* Sends one message to the core through the wire; what no peer could have sent ends as BAD. */
void world_mail(struct world *world, struct world_stream *stream, const struct message *message);
/* Every stream ends; then time passes until nothing is live, at most `ticks` of 200 ms. */
void world_end(struct world *world, uint32_t ticks);

void world_remember(struct world_ids *ids, uint64_t value);
/* One of the remembered, or a small number. */
uint64_t world_draw(struct world *world, const struct world_ids *ids);
void world_draw_sampling(struct world *world, struct sampling *sampling);
/* Tokens below WORLD_VOCAB, mostly; in memory of the world's until the next call. */
const uint32_t *world_draw_tokens(struct world *world, uint32_t count);

#endif
