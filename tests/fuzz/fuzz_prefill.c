/* A program of events against the prefill core: routers, decode workers, engine and link. */
#include "core/prefill.h"
#include "fuzz/world.h"

#define PEERS_MAX  64u
#define OPS_MAX    1024u
#define COMPONENTS 4u
#define LAYERS     2u

struct peer {
    uint64_t id; /* 0 = free */
    bool is_closing;
};

struct op {
    uint64_t op; /* 0 = free */
    uint64_t peer;
};

static const enum message_kind kinds[] = {MESSAGE_PREFILL, MESSAGE_PREFILL, MESSAGE_ACCEPT,
                                          MESSAGE_COMMIT,  MESSAGE_REFUSE,  MESSAGE_ABORT,
                                          MESSAGE_AUDIT,   MESSAGE_BEAT,    MESSAGE_UNKNOWN};

struct bed {
    struct world world; /* first */
    struct prefill_core core;
    struct kv_layout layout; /* from here on zeroed for each run */
    bool is_stepping;
    bool is_abandoned; /* the step */
    uint64_t step;
    struct peer peers[PEERS_MAX];
    struct op ops[OPS_MAX];
};

static struct bed *bed_of(struct world *world) {
    return (struct bed *)(void *)world;
}

static void bed_step(struct world *world, const struct event *event) {
    struct bed *bed = bed_of(world);
    prefill_core_step(&bed->core, event, world->now, &world->effects);
    prefill_verify(&bed->core);
    struct entry_view view;
    for (uint32_t cursor = 0;
         event->kind == EVENT_TICK && prefill_view(&bed->core, &cursor, &view);) {
        CHECK(view.state != NULL && view.waits_for != NULL);
    }
}

static uint32_t bed_live(const struct world *world) {
    return ((const struct bed *)(const void *)world)->core.node.ledger.live;
}

static struct peer *bed_peer(struct bed *bed, uint64_t id) {
    for (uint32_t i = 0; i < PEERS_MAX; i++) {
        if (bed->peers[i].id == id) {
            return &bed->peers[i];
        }
    }
    return NULL;
}

static void bed_plan(struct bed *bed, const struct step_plan *plan) {
    CHECK(!bed->is_stepping && plan->row_count > 0);
    CHECK_OP(plan->number, ==, bed->step + 1);
    CHECK_OP(plan->row_count, <=, bed->core.config.rows_max);
    bed->is_stepping = true;
    bed->is_abandoned = false;
    bed->step = plan->number;
    for (uint32_t i = 0; i < plan->row_count; i++) {
        const struct plan_row *row = &plan->rows[i];
        CHECK(row->token_count > 0 && !row->is_sampled);
        CHECK_OP(row->token_first + row->token_count, <=, plan->token_count);
        CHECK_OP(row->page_first + row->page_count, <=, plan->page_count);
        for (uint32_t k = 0; k < row->page_count; k++) {
            CHECK_OP(plan->pages[row->page_first + k], <, bed->core.config.page_count);
        }
    }
}

static void bed_effect(struct world *world, const struct effect *effect) {
    struct bed *bed = bed_of(world);
    struct peer *peer = NULL;
    if (effect->kind == EFFECT_STEP) {
        bed_plan(bed, effect->u.plan);
    } else if (effect->kind == EFFECT_STEP_ABANDON) {
        CHECK(bed->is_stepping && !bed->is_abandoned && effect->u.abandon.number == bed->step);
        bed->is_abandoned = true;
    } else if (effect->kind == EFFECT_LINK_CONNECT) {
        CHECK(effect->u.connect.peer != 0 && bed_peer(bed, effect->u.connect.peer) == NULL);
        CHECK(effect->u.connect.address_len > 0);
        peer = bed_peer(bed, 0);
        CHECK(peer != NULL);
        *peer = (struct peer){.id = effect->u.connect.peer};
    } else if (effect->kind == EFFECT_LINK_SEND) {
        peer = bed_peer(bed, effect->u.send.peer);
        CHECK(peer != NULL && !peer->is_closing);
        CHECK(effect->u.send.component_count > 0 && effect->u.send.token_count > 0);
        CHECK_OP(effect->u.send.component_first + effect->u.send.component_count, <=, COMPONENTS);
        CHECK_OP(effect->u.send.token_first + effect->u.send.token_count, <=,
                 effect->u.send.page_count * bed->layout.page_tokens);
        uint32_t at = 0;
        while (bed->ops[at].op != 0) {
            at++;
            CHECK_OP(at, <, OPS_MAX);
        }
        bed->ops[at] = (struct op){effect->u.send.op, effect->u.send.peer};
    } else {
        CHECK_OP(effect->kind, ==, EFFECT_LINK_CLOSE);
        peer = bed_peer(bed, effect->u.link_close.peer);
        CHECK(peer != NULL && !peer->is_closing);
        peer->is_closing = true;
    }
}

static void bed_honest(struct world *world, struct world_stream *stream, struct message *message) {
    struct bed *bed = bed_of(world);
    if (message->kind == MESSAGE_HELLO) {
        message->u.hello.layout = bed->layout.digest;
        message->u.hello.role = (stream->id & 1) == 1 ? ROLE_ROUTER : ROLE_DECODE;
        for (uint32_t i = 0; i < bed->core.node.config.sessions_max; i++) {
            const struct session *session = &bed->core.node.sessions[i];
            if (session->stream.v == stream->id && session->is_ours) {
                message->u.hello.incarnation = session->incarnation;
            }
        }
    } else if (message->kind == MESSAGE_PREFILL) {
        message->u.prefill.token_count = 2 + message->u.prefill.token_count % (WORLD_CONTEXT / 2);
        message->u.prefill.from %= message->u.prefill.token_count - 1;
        message->u.prefill.deadline_ms += 1000;
    }
}

/* The next word of an honest decode worker about some hand-off: Hello, Accept, Commit. */
static void bed_hand_off(struct bed *bed) {
    struct world *world = &bed->world;
    uint32_t at = input_below(&world->input, bed->core.config.entries_max);
    const struct prefill_entry *entry = &bed->core.entries[at];
    struct world_stream *stream = world_stream(world, entry->peer_stream.v);
    if (entry->state == PREFILL_NONE || stream == NULL) {
        return;
    }
    static const uint8_t address[3] = {1, 2, 3};
    const struct session *session = &bed->core.node.sessions[entry->peer];
    struct message message = {.kind = MESSAGE_COMMIT};
    if (session->stream.v == stream->id && session->phase == SESSION_GREETING) {
        message.kind = MESSAGE_HELLO;
        message.u.hello.protocol = PROTOCOL_VERSION;
        bed_honest(world, stream, &message);
    } else if (!entry->is_accepted) {
        message.kind = MESSAGE_ACCEPT;
        message.u.accept.slot = entry->slot;
        message.u.accept.address = address;
        message.u.accept.address_len = sizeof address;
    } else {
        message.u.commit.slot = entry->slot;
    }
    world_mail(world, stream, &message);
}

static void bed_sent(struct bed *bed, struct op *op, enum status status) {
    struct event event = {.kind = EVENT_LINK_SENT};
    event.u.sent.op = op->op;
    event.u.sent.status = status;
    *op = (struct op){0};
    world_turn(&bed->world, &event);
}

static void bed_closed(struct bed *bed, struct peer *peer) {
    for (uint32_t i = 0; i < OPS_MAX; i++) {
        if (bed->ops[i].op != 0 && bed->ops[i].peer == peer->id) {
            bed_sent(bed, &bed->ops[i], STATUS_CANCELLED);
        }
    }
    struct event event = {.kind = EVENT_LINK_CLOSED};
    event.u.peer.peer = peer->id;
    *peer = (struct peer){0};
    world_turn(&bed->world, &event);
}

static void bed_link(struct bed *bed) {
    struct input *input = &bed->world.input;
    uint8_t what = input_u8(input);
    struct peer *peer = &bed->peers[input_below(input, 4)];
    if (what < 200) {
        for (uint32_t i = 0; i < OPS_MAX; i++) {
            if (bed->ops[i].op != 0) {
                bed_sent(bed, &bed->ops[i], what < 192 ? STATUS_OK : STATUS_UNAVAILABLE);
                return;
            }
        }
    } else if (what < 230 && peer->id != 0 && peer->is_closing) {
        bed_closed(bed, peer);
    } else if (peer->id != 0 && what > 250) {
        struct event event = {.kind = EVENT_LINK_FAILED};
        event.u.peer.peer = peer->id;
        world_turn(&bed->world, &event);
    }
}

static void bed_step_done(struct bed *bed, bool is_failing) {
    struct event event = {.kind = EVENT_STEP_DONE};
    event.u.step_done.number = bed->step;
    event.u.step_done.status = is_failing ? STATUS_INTERNAL : STATUS_OK;
    event.u.step_done.elapsed = span_ms(input_u8(&bed->world.input));
    if (bed->is_abandoned && event.u.step_done.elapsed.ns % span_ms(2).ns != 0) {
        event.u.step_done.status = STATUS_CANCELLED;
    }
    bed->is_stepping = false;
    world_turn(&bed->world, &event);
}

static void bed_init(struct bed *bed) {
    struct input *input = &bed->world.input;
    bed->layout.page_tokens = 1u << input_below(input, 4);
    bed->layout.component_count = COMPONENTS;
    for (uint32_t i = 0; i < COMPONENTS; i++) {
        bed->layout.components[i] =
            (struct kv_component){.name = "kv",
                                  .layer = (uint16_t)(i * LAYERS / COMPONENTS),
                                  .tokens_per_row = 1,
                                  .row_bytes = 4,
                                  .dtype = KV_DTYPE_F32,
                                  .lifetime = KV_LIFETIME_PAGE};
    }
    CHECK_OP(layout_complete(&bed->layout), ==, STATUS_OK);
    uint32_t rows_max = 1 + input_below(input, 4);
    struct prefill_config config = {.node = {.role = ROLE_PREFILL,
                                             .incarnation = {77},
                                             .id = "prefill",
                                             .layout = bed->layout.digest,
                                             .sessions_max = 1 + input_below(input, 6),
                                             .timers = timers_default()},
                                    .layout = &bed->layout,
                                    .entries_max = 1 + input_below(input, 8),
                                    .page_count = 1 + input_below(input, 24),
                                    .context = WORLD_CONTEXT,
                                    .vocab = WORLD_VOCAB,
                                    .rows_max = rows_max,
                                    .step_tokens_max = rows_max + input_below(input, 16),
                                    .sends_high = 1 + input_below(input, 8),
                                    .batch_bytes = input_below(input, 64),
                                    .shared_min = 3,
                                    .changes_max = 64,
                                    .secret = {1, 2}};
    prefill_init(&bed->core, &config, world_memory(prefill_bytes(&config)));
}

static void bed_quiet(struct bed *bed) {
    for (uint32_t i = 0; i < 4; i++) {
        world_pass(&bed->world, 1, 50);
        if (bed->is_stepping) {
            bed_step_done(bed, false);
        }
        for (uint32_t k = 0; k < OPS_MAX; k++) {
            if (bed->ops[k].op != 0) {
                bed_sent(bed, &bed->ops[k], STATUS_OK);
            }
        }
        for (uint32_t k = 0; k < PEERS_MAX; k++) {
            if (bed->peers[k].is_closing) {
                bed_closed(bed, &bed->peers[k]);
            }
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    static struct bed only; /* too large to be allocated for each run */
    struct bed *bed = &only;
    struct world *world = &bed->world;
    world_init(world, data, len);
    memset(&bed->layout, 0, sizeof *bed - offsetof(struct bed, layout));
    world->step = bed_step;
    world->effect = bed_effect;
    world->honest = bed_honest;
    world->live = bed_live;
    world->kinds = kinds;
    world->kind_count = sizeof kinds / sizeof kinds[0];
    bed_init(bed);
    while (world->input.len > 0) {
        uint8_t what = input_u8(&world->input);
        struct world_stream *stream = NULL;
        if (what < 24) {
            stream = world_accept(world);
            if (stream != NULL && what < 20) {
                world_hello(world, stream, ROLE_ROUTER, 1 + what % 4, bed->layout.digest);
            }
        } else if (what < 52) {
            bed_hand_off(bed);
        } else if (what < 90 && bed->is_stepping) {
            struct event layer = {.kind = EVENT_LAYER_DONE};
            layer.u.layer_done.number = bed->step;
            layer.u.layer_done.layer = what % (LAYERS + 1);
            if (what < 70) {
                world_turn(world, &layer);
            } else {
                bed_step_done(bed, what > 86);
            }
        } else if (what < 140) {
            bed_link(bed);
        } else {
            world_anything(world);
        }
    }
    if (bed->is_stepping) {
        bed_step_done(bed, false);
    }
    for (uint32_t i = 0; i < world->stream_count; i++) {
        struct event bad = {.kind = EVENT_STREAM_BAD, .stream = {world->streams[i].id}};
        if (!world->streams[i].is_ended) {
            world_turn(world, &bad);
        }
    }
    bed_quiet(bed);
    world_end(world, 32);
    bed_quiet(bed);
    CHECK_OP(bed->core.pages.owned, ==, 0);
    CHECK_OP(bed->core.sends, ==, 0);
    CHECK_OP(bed->core.node.sessions_live + bed->core.node.sessions_ended, ==, 0);
    for (uint32_t i = 0; i < PEERS_MAX; i++) {
        CHECK_OP(bed->peers[i].id, ==, 0);
    }
    world_fini(world);
    return 0;
}
