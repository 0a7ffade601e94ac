/* A program of events against the decode core: routers, prefill workers, engine and link. */
#include "core/decode.h"
#include "fuzz/world.h"

#define ARMS_MAX    16u
#define TOKEN_BYTES 8u

struct arm {
    uint64_t slot; /* 0 = free */
    uint64_t whole;
    uint64_t bytes;
    bool is_disarming;
    bool is_covered;
};

struct bed {
    struct world world; /* first */
    struct decode_core core;
    bool is_stepping;  /* from here on zeroed for each run */
    bool is_abandoned; /* the step */
    uint64_t step;
    uint32_t rows;
    uint64_t entries[STEP_ROWS_MAX];
    struct arm arms[ARMS_MAX];
};

static const struct layout_digest digest = {1, 2};
static const enum message_kind kinds[] = {MESSAGE_ADMIT, MESSAGE_ADMIT,      MESSAGE_OPEN,
                                          MESSAGE_FIN,   MESSAGE_ABORT,      MESSAGE_AUDIT,
                                          MESSAGE_BEAT,  MESSAGE_ABORT_SLOT, MESSAGE_UNKNOWN};

static struct bed *bed_of(struct world *world) {
    return (struct bed *)(void *)world;
}

static void bed_step(struct world *world, const struct event *event) {
    struct bed *bed = bed_of(world);
    decode_core_step(&bed->core, event, world->now, &world->effects);
    decode_verify(&bed->core);
    struct entry_view view;
    for (uint32_t cursor = 0;
         event->kind == EVENT_TICK && decode_view(&bed->core, &cursor, &view);) {
        CHECK(view.state != NULL && view.waits_for != NULL);
    }
}

static uint32_t bed_live(const struct world *world) {
    return ((const struct bed *)(const void *)world)->core.node.ledger.live;
}

static struct arm *bed_arm(struct bed *bed, uint64_t slot) {
    for (uint32_t i = 0; i < ARMS_MAX; i++) {
        if (bed->arms[i].slot == slot) {
            return &bed->arms[i];
        }
    }
    return NULL;
}

static void bed_effect(struct world *world, const struct effect *effect) {
    struct bed *bed = bed_of(world);
    struct arm *arm = NULL;
    const struct step_plan *plan = effect->u.plan;
    if (effect->kind == EFFECT_STEP) {
        CHECK(!bed->is_stepping && plan->row_count > 0);
        CHECK_OP(plan->number, ==, bed->step + 1);
        CHECK_OP(plan->row_count, <=, bed->core.config.rows_max);
        bed->is_stepping = true;
        bed->is_abandoned = false;
        bed->step = plan->number;
        bed->rows = plan->row_count;
        for (uint32_t i = 0; i < plan->row_count; i++) {
            const struct plan_row *row = &plan->rows[i];
            bed->entries[i] = row->entry;
            CHECK(row->token_count > 0 && row->is_sampled == (row->sampling != NULL));
            CHECK_OP(row->token_first + row->token_count, <=, plan->token_count);
            CHECK_OP(row->page_first + row->page_count, <=, plan->page_count);
            for (uint32_t k = 0; k < row->page_count; k++) {
                CHECK_OP(plan->pages[row->page_first + k], <, bed->core.config.page_count);
            }
        }
    } else if (effect->kind == EFFECT_STEP_ABANDON) {
        CHECK(bed->is_stepping && !bed->is_abandoned && effect->u.abandon.number == bed->step);
        bed->is_abandoned = true;
    } else if (effect->kind == EFFECT_LINK_ARM) {
        CHECK(bed_arm(bed, effect->u.arm.slot.v) == NULL);
        CHECK_OP(effect->u.arm.token_first, <=, effect->u.arm.token_end);
        arm = bed_arm(bed, 0);
        CHECK(arm != NULL);
        *arm = (struct arm){
            .slot = effect->u.arm.slot.v,
            .whole = (uint64_t)(effect->u.arm.token_end - effect->u.arm.token_first) * TOKEN_BYTES};
    } else {
        CHECK_OP(effect->kind, ==, EFFECT_LINK_DISARM);
        arm = bed_arm(bed, effect->u.disarm.slot.v);
        CHECK(arm != NULL && !arm->is_disarming);
        arm->is_disarming = true;
    }
}

static void bed_honest(struct world *world, struct world_stream *stream, struct message *message) {
    struct bed *bed = bed_of(world);
    uint32_t index = 0;
    bool is_router = stream->id % 4 == 1;
    if (is_router && (message->kind == MESSAGE_OPEN || message->kind == MESSAGE_FIN)) {
        return;
    }
    if (message->kind == MESSAGE_HELLO) {
        message->u.hello.layout = digest;
        message->u.hello.role = is_router ? ROLE_ROUTER : ROLE_PREFILL;
    } else if (message->kind == MESSAGE_OPEN &&
               pool_find(&bed->core.slots, message->u.open.slot.v, &index)) {
        const struct decode_entry *entry = &bed->core.entries[index];
        message->u.open.key = entry->key;
        message->u.open.from = entry->cached;
        message->u.open.end = entry->prompt_count - 1;
        message->u.open.bytes = (uint64_t)(entry->prompt_count - 1 - entry->cached) * TOKEN_BYTES;
    } else if (message->kind == MESSAGE_FIN &&
               pool_find(&bed->core.slots, message->u.fin.slot.v, &index)) {
        message->u.fin.bytes = bed->core.entries[index].announced;
    } else if (message->kind == MESSAGE_ADMIT) {
        message->u.admit.token_count = 1 + message->u.admit.token_count % (WORLD_CONTEXT / 2);
        message->u.admit.max_new = 1 + message->u.admit.max_new % 8;
        message->u.admit.output_first = 1;
        message->u.admit.deadline_ms += 1000;
    }
}

/* The next word of an honest prefill worker about some slot: Open, or Fin. */
static void bed_hand_off(struct bed *bed) {
    struct world *world = &bed->world;
    struct world_stream *stream = NULL;
    for (uint32_t i = 0; i < world->stream_count; i++) {
        bool is_prefill = world->streams[i].id % 4 == 3 && !world->streams[i].is_ended;
        stream = is_prefill && !world->streams[i].is_closed ? &world->streams[i] : stream;
    }
    uint32_t at = input_below(&world->input, bed->core.config.entries_max);
    const struct decode_entry *entry = &bed->core.entries[at];
    if (stream == NULL || entry->state == DECODE_NONE) {
        return;
    }
    struct message message = {.kind = entry->state == DECODE_RESERVED ? MESSAGE_OPEN : MESSAGE_FIN};
    if (message.kind == MESSAGE_OPEN) {
        message.u.open.slot.v = entry->id;
    } else {
        message.u.fin.slot.v = entry->id;
        struct world_stream *bound = world_stream(world, entry->peer_stream.v);
        stream = bound != NULL ? bound : stream;
    }
    bed_honest(world, stream, &message);
    world_mail(world, stream, &message);
}

static void bed_step_done(struct bed *bed, bool is_failing) {
    struct input *input = &bed->world.input;
    struct step_result results[STEP_ROWS_MAX];
    uint32_t count = 0;
    uint8_t how = input_u8(input);
    for (uint32_t i = 0; i < bed->rows; i++) {
        if (how < 250 || input_u8(input) % 4 != 0) { /* a row may be missing */
            results[count++] = (struct step_result){.entry = bed->entries[i],
                                                    .token = input_u8(input) % (WORLD_VOCAB + 1),
                                                    .is_valid = input_u8(input) < 250,
                                                    .top_count = how % (1 + LOGPROBS_TOP_MAX)};
        }
    }
    struct event event = {.kind = EVENT_STEP_DONE};
    event.u.step_done.number = bed->step;
    event.u.step_done.status = is_failing ? STATUS_INTERNAL : STATUS_OK;
    event.u.step_done.results = results;
    event.u.step_done.count = is_failing ? 0 : count;
    event.u.step_done.elapsed = span_ms(input_u8(input));
    if (bed->is_abandoned && event.u.step_done.elapsed.ns % span_ms(2).ns != 0) {
        event.u.step_done.status = STATUS_CANCELLED;
        event.u.step_done.count = 0;
    }
    bed->is_stepping = false;
    world_turn(&bed->world, &event);
}

static void bed_disarmed(struct bed *bed, struct arm *arm) {
    struct event event = {.kind = EVENT_LINK_DISARMED};
    event.u.link.slot.v = arm->slot;
    *arm = (struct arm){0};
    world_turn(&bed->world, &event);
}

static void bed_link(struct bed *bed) {
    struct input *input = &bed->world.input;
    struct arm *arm = &bed->arms[input_below(input, ARMS_MAX)];
    for (uint32_t i = 0; arm->slot == 0 && i < ARMS_MAX; i++) {
        arm = &bed->arms[i];
    }
    if (arm->slot == 0) {
        return;
    }
    uint8_t what = input_u8(input);
    if (what < 64 && arm->is_disarming) {
        bed_disarmed(bed, arm);
        return;
    }
    struct event event = {.kind = EVENT_LINK_PROGRESS};
    event.u.link.slot.v = arm->slot;
    if (what < 200 && !arm->is_covered) {
        event.kind = EVENT_LINK_COVERED;
        arm->is_covered = true;
        arm->bytes = arm->whole;
    } else if (what < 240) {
        arm->bytes += arm->bytes + TOKEN_BYTES <= arm->whole ? TOKEN_BYTES : 0;
    } else {
        event.kind = EVENT_LINK_BAD;
        event.u.link.cause = CAUSE_BAD_CHUNK;
    }
    event.u.link.bytes = arm->bytes;
    world_turn(&bed->world, &event);
}

static void bed_init(struct bed *bed) {
    struct input *input = &bed->world.input;
    uint32_t rows_max = 1 + input_below(input, 4);
    struct decode_config config = {.node = {.role = ROLE_DECODE,
                                            .incarnation = {77},
                                            .id = "decode",
                                            .layout = digest,
                                            .sessions_max = 1 + input_below(input, 6),
                                            .timers = timers_default()},
                                   .entries_max = 1 + input_below(input, ARMS_MAX / 2),
                                   .page_count = 1 + input_below(input, 24),
                                   .page_tokens = 1u << input_below(input, 4),
                                   .token_bytes = TOKEN_BYTES,
                                   .context = WORLD_CONTEXT,
                                   .vocab = WORLD_VOCAB,
                                   .rows_max = rows_max,
                                   .step_tokens_max = rows_max + input_below(input, 16),
                                   .eos_count = 1,
                                   .eos = {3},
                                   .shared_min = 3,
                                   .changes_max = 64,
                                   .secret = {1, 2},
                                   .address_len = 3,
                                   .address = {9, 8, 7}};
    /* Nothing, a little and all of what an answer may need. */
    config.reserve_tokens = config.page_count % 3 * 4;
    decode_init(&bed->core, &config, world_memory(decode_bytes(&config)));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    static struct bed only; /* too large to be allocated for each run */
    struct bed *bed = &only;
    struct world *world = &bed->world;
    world_init(world, data, len);
    memset(&bed->is_stepping, 0, sizeof *bed - offsetof(struct bed, is_stepping));
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
        if (what < 40) {
            stream = world_accept(world);
            if (stream != NULL && what < 36) {
                world_hello(world, stream, stream->id % 4 == 1 ? ROLE_ROUTER : ROLE_PREFILL,
                            1 + what % 4, digest);
            }
        } else if (what < 100 && bed->is_stepping) {
            bed_step_done(bed, what > 96);
        } else if (what < 120) {
            bed_link(bed);
        } else if (what < 140) {
            bed_hand_off(bed);
        } else {
            world_anything(world);
        }
    }
    /* Everybody leaves, and every own operation ends. */
    if (bed->is_stepping) {
        bed_step_done(bed, false);
    }
    for (uint32_t round = 0; round < 2; round++) {
        if (round == 1) {
            world_end(world, 32);
        }
        for (uint32_t i = 0; i < world->stream_count && round == 0; i++) {
            struct event bad = {.kind = EVENT_STREAM_BAD, .stream = {world->streams[i].id}};
            if (!world->streams[i].is_ended) {
                world_turn(world, &bad);
            }
        }
        for (uint32_t i = 0; i < 4; i++) {
            world_pass(world, 1, 50);
            if (bed->is_stepping) {
                bed_step_done(bed, false);
            }
            for (uint32_t k = 0; k < ARMS_MAX; k++) {
                if (bed->arms[k].is_disarming) {
                    bed_disarmed(bed, &bed->arms[k]);
                }
            }
        }
    }
    CHECK_OP(bed->core.pages.owned, ==, 0);
    CHECK_OP(bed->core.node.sessions_live + bed->core.node.sessions_ended, ==, 0);
    for (uint32_t i = 0; i < ARMS_MAX; i++) {
        CHECK_OP(bed->arms[i].slot, ==, 0);
    }
    world_fini(world);
    return 0;
}
