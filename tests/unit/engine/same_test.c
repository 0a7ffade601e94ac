/* Same tokens, always, as a property: what a sequence becomes does not depend on how it is run.
 *
 * A world is drawn from one seed: a model, a backend, up to 129 sequences (some of which continue
 * others), and a way to run them: together, in chunks, behind scattered pages of any size, on pages
 * shared with others, retracted and computed again, moved between two engines, on 1, 2 or 4
 * threads. Each sequence is run alone first, by one thread, its prompt in one step. That and what
 * it became in the world are a pair: tokens, log-probabilities and every KV byte must be equal.
 *
 *     engine_same_test [--pairs N] [--seed WORLD]     --seed: this world only */
#include "base/prng.h"
#include "engine/model_weights.h"
#include "kernels/kernels.h"
#include "unit/engine/driver.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

_Static_assert(DRIVER_BACKENDS == 5, "kind_draw names each backend");

#define MEMBERS_MAX  129u
#define PROMPT_MAX   150u
#define OUTPUT_MAX   8u
#define TOKENS_MAX   (PROMPT_MAX + OUTPUT_MAX)
#define STEP_TOKENS  4096u
#define PLACES_MAX   2u
#define RETRACTS_MAX 3u
#define ALONE_PAGE   16u
#define SENTENCE_MAX 640u

static uint64_t only_seed;      /* --seed: this world and no other */
static uint32_t pairs_wanted;   /* --pairs: of worlds nobody has seen */
static uint64_t running_seed;   /* 0 between worlds */
static const char *running_way; /* what the world is, for people */

/* ---- what is run ---- */

static const char *const model_paths[] = {"models/stories260k",      "golden/engine/untied_f32",
                                          "golden/engine/gqa_bf16",  "golden/engine/theta_f16",
                                          "golden/engine/qwen2_f32", "golden/engine/qwen3_bf16",
                                          "golden/engine/seven_f16", "golden/engine/wide_f32"};
#define MODELS (sizeof(model_paths) / sizeof(model_paths[0]))

/* Loaded once; NULL where the CPU lacks the backend. */
static struct model *model_of(uint32_t path, uint32_t backend, enum model_weights weights) {
    static struct {
        struct model *model;
        bool is_known;
    } models[MODELS][DRIVER_BACKENDS][2];
    bool is_int8 = weights == MODEL_WEIGHTS_INT8;
    if (!models[path][backend][is_int8].is_known) {
        models[path][backend][is_int8].is_known = true;
        models[path][backend][is_int8].model =
            driver_model_as(model_paths[path], driver_backends[backend], weights);
    }
    return models[path][backend][is_int8].model;
}

/* An engine with its free pages. Pages may be held by several sequences. */
struct place {
    struct driver driver;
    uint32_t page_count;
    uint32_t *uses;
    uint32_t *free;
    uint32_t free_count;
};

struct member {
    struct sequence sequence; /* as it is in the world */
    float logprobs[OUTPUT_MAX];
    uint64_t tops[OUTPUT_MAX];
    uint32_t home; /* its place */
    uint32_t starts_at;
    uint32_t retracts_left; /* so that it ends */
    bool is_started;
    bool is_done;
    /* What it must become. */
    uint32_t tokens[TOKENS_MAX];
    float wanted[OUTPUT_MAX];
    uint64_t wanted_tops[OUTPUT_MAX];
    uint32_t prompt_count;
    uint32_t total; /* prompt and output */
    struct sampling sampling;
    uint32_t alone_pages[TOKENS_MAX / ALONE_PAGE + 1];
};

struct way {
    uint32_t places;
    uint32_t threads[PLACES_MAX];
    uint32_t page_tokens[PLACES_MAX];
    uint64_t alone_below;
    uint32_t rows_max;
    uint32_t chunk_max;
    uint32_t late;     /* sequences start within so many turns */
    uint32_t retracts; /* of 256 looks at a sequence: its KV is thrown away */
    uint32_t moves;    /* of 256: it goes to the other engine */
    bool shares;       /* pages of others are taken where the tokens are the same */
    bool shuffles;     /* another set of rows in every step */
};

struct world {
    struct prng prng;
    const struct model *model;              /* of the sequences alone */
    const struct model *models[PLACES_MAX]; /* the same, of backends that promise the same bits */
    struct way way;
    struct member *members;
    uint32_t count;
    struct driver alone;
    struct place places[PLACES_MAX];
    uint32_t turn;
    uint32_t shared_tokens, retracted, moved; /* how often it struck */
    char *sentence;
};

static bool coin(struct world *world, uint32_t of_256) {
    return prng_below(&world->prng, 256) < of_256;
}

/* ---- pages ---- */

static uint32_t page_take(struct world *world, struct place *place) {
    assert_true(place->free_count > 0);
    uint32_t at = prng_below(&world->prng, place->free_count);
    uint32_t page = place->free[at];
    place->free[at] = place->free[--place->free_count];
    place->uses[page] = 1;
    return page;
}

static void page_drop(struct place *place, uint32_t page) {
    assert_true(place->uses[page] > 0);
    if (--place->uses[page] == 0) { /* whoever reads it still is caught */
        engine_poison_page(place->driver.engine, page);
        place->free[place->free_count++] = page;
    }
}

static void pages_drop(struct place *place, struct sequence *sequence) {
    for (uint32_t i = 0; i < sequence->page_count; i++) {
        page_drop(place, sequence->pages[i]);
    }
    sequence->page_count = 0;
}

static void pages_grow(struct world *world, struct place *place, struct sequence *sequence,
                       uint32_t tokens) {
    while (sequence->page_count * place->driver.layout->page_tokens < tokens) {
        sequence->pages[sequence->page_count++] = page_take(world, place);
    }
}

static void place_open(struct world *world, struct place *place, uint32_t index) {
    const struct way *way = &world->way;
    place->page_count = 2;
    for (uint32_t i = 0; i < world->count; i++) {
        place->page_count += world->members[i].total / way->page_tokens[index] + 1;
    }
    driver_open(&place->driver, &(struct driver_config){.model = world->models[index],
                                                        .page_tokens = way->page_tokens[index],
                                                        .page_count = place->page_count,
                                                        .threads = way->threads[index],
                                                        .tokens_max = STEP_TOKENS,
                                                        .alone_below = way->alone_below});
    place->uses = calloc(place->page_count, sizeof(*place->uses));
    place->free = calloc(place->page_count, sizeof(*place->free));
    assert_true(place->uses != NULL && place->free != NULL);
    for (uint32_t i = 0; i < place->page_count; i++) {
        place->free[place->free_count++] = i;
    }
}

static void place_close(struct place *place) {
    driver_close(&place->driver);
    free(place->uses);
    free(place->free);
}

/* ---- drawing ---- */

static struct sampling draw_sampling(struct prng *prng, uint32_t vocab) {
    struct sampling sampling = driver_greedy;
    sampling.ignore_eos = prng_below(prng, 4) != 0;
    sampling.seed = prng_next(prng);
    sampling.temperature = prng_below(prng, 3) == 0 ? 0.0f : 0.1f * (float)prng_below(prng, 20);
    sampling.top_k = prng_below(prng, 3) == 0 ? 1 + (int32_t)prng_below(prng, 50) : -1;
    sampling.top_p = prng_below(prng, 3) == 0 ? 0.05f * (float)(1 + prng_below(prng, 20)) : 1.0f;
    sampling.min_p = prng_below(prng, 4) == 0 ? 0.01f * (float)prng_below(prng, 30) : 0.0f;
    if (prng_below(prng, 3) == 0) {
        sampling.presence_penalty = 0.1f * (float)prng_below(prng, 20);
        sampling.frequency_penalty = -0.1f * (float)prng_below(prng, 20);
        sampling.repetition_penalty = 0.5f + 0.1f * (float)prng_below(prng, 20);
    }
    if (prng_below(prng, 3) == 0) {
        sampling.min_tokens = prng_below(prng, OUTPUT_MAX);
        sampling.stop_token_count = prng_below(prng, 4);
        sampling.bias_count = prng_below(prng, 5);
    }
    sampling.logprobs += prng_below(prng, 3) == 0 ? prng_below(prng, 1 + LOGPROBS_TOP_MAX) : 0;
    for (uint32_t i = 0; i < sampling.stop_token_count; i++) {
        sampling.stop_tokens[i] = prng_below(prng, vocab);
    }
    for (uint32_t i = 0; i < sampling.bias_count; i++) {
        sampling.biases[i].token = prng_below(prng, vocab);
        sampling.biases[i].bias = (float)prng_below(prng, 21) - 10.0f;
    }
    return sampling;
}

static uint32_t draw_of(struct prng *prng, const uint32_t *values, uint32_t count) {
    return values[prng_below(prng, count)];
}
#define DRAW_OF(prng, values) draw_of(prng, values, sizeof(values) / sizeof((values)[0]))

/* Prompt and sampling; half of them continue what another one is, up to its end or some token. */
static void member_draw(struct world *world, uint32_t index) {
    static const uint32_t lengths[] = {8, 16, 16, 30, 64, 65, 80, PROMPT_MAX};
    struct prng *prng = &world->prng;
    struct member *member = &world->members[index];
    uint32_t vocab = model_info(world->model)->vocab_count;
    const struct member *other = &world->members[index > 0 ? prng_below(prng, index) : 0];
    uint32_t common = 0;
    if (index > 0 && prng_below(prng, 2) == 0) {
        common = prng_below(prng, 2) == 0 ? other->total : prng_below(prng, other->total);
        common = common < PROMPT_MAX ? common : PROMPT_MAX - 1;
    }
    uint32_t most = DRAW_OF(prng, lengths);
    most = most < PROMPT_MAX - common ? most : PROMPT_MAX - common;
    member->prompt_count = common + 1 + prng_below(prng, most);
    member->total = member->prompt_count + 1 + prng_below(prng, OUTPUT_MAX);
    for (uint32_t i = 0; i < member->prompt_count; i++) {
        uint32_t fresh = prng_below(prng, vocab);
        member->tokens[i] = i < common ? other->tokens[i] : fresh;
    }
    member->sampling = draw_sampling(prng, vocab);
}

/* Alone, by one thread, the prompt in one step: what it must be in every other way too. */
static void member_run_alone(struct world *world, struct member *member, uint32_t *page_next) {
    static struct sequence sequence;
    static struct batch batch;
    uint32_t pages = member->total / ALONE_PAGE + 1;
    for (uint32_t i = 0; i < pages; i++) {
        member->alone_pages[i] = (*page_next)++;
    }
    sequence_init(&sequence, member->tokens, member->prompt_count, member->alone_pages, pages);
    sequence.sampling = member->sampling;
    while (sequence.token_count < member->total) {
        batch_clear(&batch);
        batch_add(&batch, &sequence, sequence.token_count - sequence.computed);
        batch_run(&world->alone, &batch);
        member->tokens[sequence.token_count - 1] = sequence.tokens[sequence.token_count - 1];
        member->wanted[sequence.token_count - 1 - member->prompt_count] = sequence.logprob;
        member->wanted_tops[sequence.token_count - 1 - member->prompt_count] = sequence.tops;
    }
}

static void way_draw(struct world *world) {
    static const uint32_t threads[] = {1, 1, 2, 4};
    static const uint32_t pages[] = {1, 2, 3, 5, 8, 16, 16, 24, 64, 100};
    static const uint32_t chunks[] = {1, 2, 7, 16, 33, 64, TOKENS_MAX, TOKENS_MAX};
    static const uint32_t rows[] = {1, 2, 3, 8, 16, 31, MEMBERS_MAX, MEMBERS_MAX, MEMBERS_MAX};
    static const uint32_t alone[] = {1, 1, 60000, 8000000};
    static const uint32_t chances[] = {0, 0, 4, 16, 40};
    struct prng *prng = &world->prng;
    struct way *way = &world->way;
    way->places = 1 + (prng_below(prng, 3) == 0);
    for (uint32_t i = 0; i < PLACES_MAX; i++) {
        way->threads[i] = DRAW_OF(prng, threads);
        way->page_tokens[i] = DRAW_OF(prng, pages);
    }
    way->alone_below = DRAW_OF(prng, alone);
    way->rows_max = DRAW_OF(prng, rows);
    way->chunk_max = DRAW_OF(prng, chunks);
    way->late = prng_below(prng, 2) == 0 ? 1 : 1 + prng_below(prng, 40);
    way->retracts = DRAW_OF(prng, chances);
    way->moves = way->places == 1 ? 0 : 16 + DRAW_OF(prng, chances);
    way->shares = prng_below(prng, 2) == 0;
    way->shuffles = prng_below(prng, 2) == 0;
}

/* ---- running ---- */

/* Pages of the sequence that has most tokens in common, where they are full and computed. At least
 * one token stays to be computed. */
static void member_share(struct world *world, struct member *member) {
    struct place *place = &world->places[member->home];
    struct sequence *sequence = &member->sequence;
    uint32_t page_tokens = place->driver.layout->page_tokens;
    const struct sequence *best = NULL;
    uint32_t best_pages = 0;
    for (uint32_t i = 0; i < world->count; i++) {
        const struct member *other = &world->members[i];
        uint32_t limit = other->sequence.computed;
        limit = limit < sequence->token_count - 1 ? limit : sequence->token_count - 1;
        uint32_t common = 0;
        if (other == member || other->home != member->home || other->sequence.page_count == 0) {
            continue;
        }
        while (common < limit && other->sequence.tokens[common] == sequence->tokens[common]) {
            common++;
        }
        if (common / page_tokens > best_pages) {
            best_pages = common / page_tokens;
            best = &other->sequence;
        }
    }
    for (uint32_t i = 0; i < best_pages; i++) {
        sequence->pages[i] = best->pages[i];
        place->uses[best->pages[i]]++;
    }
    sequence->page_count = best_pages;
    sequence->computed = best_pages * page_tokens;
    world->shared_tokens += sequence->computed;
}

static void rows_copy(const struct place *from, const uint32_t *from_pages, const struct place *to,
                      const uint32_t *to_pages, uint32_t first, uint32_t end) {
    const struct kv_layout *a = from->driver.layout;
    const struct kv_layout *b = to->driver.layout;
    for (uint32_t c = 0; c < a->component_count; c++) {
        for (uint32_t t = first; t < end; t++) {
            memcpy(engine_kv_base(to->driver.engine) +
                       layout_row_offset(b, to_pages[t / b->page_tokens], c, t % b->page_tokens),
                   engine_kv_base(from->driver.engine) +
                       layout_row_offset(a, from_pages[t / a->page_tokens], c, t % a->page_tokens),
                   a->components[c].row_bytes);
        }
    }
}

/* To the other engine, with its rows; what is there already is not copied. */
static void member_move(struct world *world, struct member *member) {
    static struct sequence old;
    old = member->sequence;
    struct place *from = &world->places[member->home];
    member->home = 1 - member->home;
    struct place *to = &world->places[member->home];
    member->sequence.page_count = 0;
    member->sequence.computed = 0;
    if (world->way.shares) {
        member_share(world, member);
    }
    if (member->sequence.computed < old.computed) {
        pages_grow(world, to, &member->sequence, old.computed);
        rows_copy(from, old.pages, to, member->sequence.pages, member->sequence.computed,
                  old.computed);
        member->sequence.computed = old.computed;
    }
    pages_drop(from, &old);
    world->moved++;
}

/* False: it takes no part now. */
static bool member_look(struct world *world, struct member *member, uint32_t place) {
    if (member->is_done || member->home != place || world->turn < member->starts_at) {
        return false;
    }
    if (!member->is_started) {
        member->is_started = true;
        if (world->way.shares) {
            member_share(world, member);
        }
    } else if (member->retracts_left > 0 && coin(world, world->way.retracts)) {
        member->retracts_left--;
        pages_drop(&world->places[place], &member->sequence);
        member->sequence.computed = 0;
        world->retracted++;
        if (world->way.shares && coin(world, 128)) {
            member_share(world, member);
        }
    } else if (coin(world, world->way.moves)) {
        member_move(world, member);
        return false;
    }
    return true;
}

static bool world_turn(struct world *world, uint32_t at) {
    static struct batch batch;
    struct place *place = &world->places[at];
    uint32_t rows = world->way.rows_max;
    rows = world->way.shuffles ? 1 + prng_below(&world->prng, rows) : rows;
    uint32_t start = prng_below(&world->prng, world->count);
    bool is_done = true;
    batch_clear(&batch);
    for (uint32_t i = 0; i < world->count; i++) {
        struct member *member = &world->members[(start + i) % world->count];
        struct sequence *sequence = &member->sequence;
        is_done = is_done && member->is_done;
        if (batch.row_count == rows || batch.token_count == STEP_TOKENS ||
            !member_look(world, member, at)) {
            continue;
        }
        uint32_t most = sequence->token_count - sequence->computed;
        most = most < world->way.chunk_max ? most : world->way.chunk_max;
        most = most < STEP_TOKENS - batch.token_count ? most : STEP_TOKENS - batch.token_count;
        uint32_t count = coin(world, 128) ? most : 1 + prng_below(&world->prng, most);
        pages_grow(world, place, sequence, sequence->computed + count);
        batch_add(&batch, sequence, count);
    }
    if (batch.row_count == 0) {
        return !is_done;
    }
    batch_run(&place->driver, &batch);
    for (uint32_t i = 0; i < batch.row_count; i++) {
        struct sequence *sequence = batch.sequences[i];
        struct member *member =
            &world->members[0] + (((unsigned char *)sequence - (unsigned char *)world->members) /
                                  (ptrdiff_t)sizeof(*member));
        if (batch.rows[i].is_sampled) {
            member->logprobs[sequence->token_count - 1 - member->prompt_count] = sequence->logprob;
            member->tops[sequence->token_count - 1 - member->prompt_count] = sequence->tops;
            member->is_done = sequence->token_count == member->total;
        }
    }
    return true;
}

/* ---- comparing ---- */

static bool differs(struct world *world, uint32_t index, const char *what, uint32_t at,
                    uint32_t component) {
    (void)snprintf(world->sentence, SENTENCE_MAX,
                   "sequence %u of %u (%u + %u tokens): %s at token %u%s%.0u differs; %s", index,
                   world->count, world->members[index].prompt_count,
                   world->members[index].total - world->members[index].prompt_count, what, at,
                   component == UINT32_MAX ? "" : ", component ",
                   component == UINT32_MAX ? 0 : component, running_way);
    return false;
}

/* True if a sequence became what it is alone. */
static bool member_is_right(struct world *world, uint32_t index) {
    const struct member *member = &world->members[index];
    const struct sequence *sequence = &member->sequence;
    for (uint32_t i = member->prompt_count; i < member->total; i++) {
        uint32_t at = i - member->prompt_count;
        if (sequence->tokens[i] != member->tokens[i]) {
            return differs(world, index, "the token", i, UINT32_MAX);
        }
        if (memcmp(&member->logprobs[at], &member->wanted[at], sizeof(float)) != 0) {
            return differs(world, index, "the log-probability", i, UINT32_MAX);
        }
        if (member->tops[at] != member->wanted_tops[at]) {
            return differs(world, index, "an alternative", i, UINT32_MAX);
        }
    }
    const struct place *place = &world->places[member->home];
    const struct kv_layout *here = place->driver.layout;
    const struct kv_layout *there = world->alone.layout;
    assert_int_equal(sequence->computed, member->total - 1);
    for (uint32_t c = 0; c < here->component_count; c++) {
        for (uint32_t t = 0; t < sequence->computed; t++) {
            const unsigned char *found =
                engine_kv_base(place->driver.engine) +
                layout_row_offset(here, sequence->pages[t / here->page_tokens], c,
                                  t % here->page_tokens);
            const unsigned char *wanted =
                engine_kv_base(world->alone.engine) +
                layout_row_offset(there, member->alone_pages[t / ALONE_PAGE], c, t % ALONE_PAGE);
            if (memcmp(found, wanted, here->components[c].row_bytes) != 0) {
                return differs(world, index, "KV", t, c);
            }
        }
    }
    return true;
}

/* ---- worlds ---- */

struct kind {
    uint32_t path;
    uint32_t backend;
    enum model_weights weights;
    const struct model *model;
};

/* From the seed alone, so that a seed means the same on every machine; the model is NULL where the
 * CPU cannot run it. */
static struct kind kind_draw(struct prng *prng) {
    static const uint32_t paths[] = {0, 0, 1, 2, 3, 4, 5, 6, 7};
    static const uint32_t backends[] = {0, 1, 1, 2, 2, 3, 3, 4, 4}; /* plain C takes longest */
    struct kind kind = {.path = DRAW_OF(prng, paths), .backend = DRAW_OF(prng, backends)};
    kind.weights = prng_below(prng, 3) == 0 ? MODEL_WEIGHTS_INT8 : MODEL_WEIGHTS_FILE;
    kind.model = model_of(kind.path, kind.backend, kind.weights);
    return kind;
}

/* A worker with another instruction class is a peer where `numerics` are equal. */
static const struct model *peer_draw(struct prng *prng, const struct kind *kind) {
    const struct model *peer =
        model_of(kind->path, prng_below(prng, DRIVER_BACKENDS), kind->weights);
    bool is_same =
        peer != NULL && strcmp(model_info(peer)->numerics, model_info(kind->model)->numerics) == 0;
    return is_same ? peer : kind->model;
}

static const char *way_tell(const struct world *world, const struct kind *kind) {
    static char text[384];
    const struct way *way = &world->way;
    (void)snprintf(
        text, sizeof(text),
        "%s/%s%s, %u engines (%s %s), threads %u %u, pages of %u %u, rows to %u%s, chunks to %u, "
        "start within %u, retract %u, move %u%s",
        model_paths[kind->path], driver_backends[kind->backend],
        kind->weights == MODEL_WEIGHTS_INT8 ? " int8" : "", way->places,
        world->models[0]->kernels->name, world->models[1]->kernels->name, way->threads[0],
        way->threads[1], way->page_tokens[0], way->page_tokens[1], way->rows_max,
        way->shuffles ? " drawn" : "", way->chunk_max, way->late, way->retracts, way->moves,
        way->shares ? ", shared pages" : "");
    return text;
}

/* Sums over worlds. */
struct tally {
    uint32_t worlds, pairs, skipped;
    uint64_t shared_tokens, retracted, moved;
};

static uint32_t count_draw(struct prng *prng) {
    static const uint32_t counts[] = {1,  2,  3,  4,  5,  7,  8,  9,  11, 12,
                                      15, 16, 17, 24, 32, 33, 48, 65, 96, MEMBERS_MAX};
    return counts[prng_below(prng, prng_below(prng, 2) == 0 ? 12 : 20)];
}

/* Runs one world; false, with a sentence, if a sequence is not what it is alone. model: instead of
 * the one that the seed draws, or NULL. */
static bool world_run(uint64_t seed, const struct model *model, struct tally *tally,
                      char *sentence) {
    static struct member members[MEMBERS_MAX];
    static struct world world;
    memset(members, 0, sizeof(members));
    world = (struct world){.prng = {seed}, .members = members, .sentence = sentence};
    struct kind kind = kind_draw(&world.prng);
    world.model = model != NULL ? model : kind.model;
    if (world.model == NULL) {
        tally->skipped++;
        return true;
    }
    way_draw(&world);
    for (uint32_t i = 0; i < PLACES_MAX; i++) {
        world.models[i] = model != NULL ? model : peer_draw(&world.prng, &kind);
    }
    running_seed = seed;
    running_way = way_tell(&world, &kind);
    world.count = count_draw(&world.prng);
    if (world.count > SAME_TEST_MEMBERS) {
        tally->skipped++;
        running_seed = 0;
        return true;
    }
    driver_open(&world.alone,
                &(struct driver_config){.model = world.model,
                                        .page_tokens = ALONE_PAGE,
                                        .page_count = world.count * (TOKENS_MAX / ALONE_PAGE + 1),
                                        .threads = 1,
                                        .tokens_max = TOKENS_MAX});
    uint32_t page_next = 0;
    for (uint32_t i = 0; i < world.count; i++) {
        member_draw(&world, i);
        member_run_alone(&world, &members[i], &page_next);
        sequence_init(&members[i].sequence, members[i].tokens, members[i].prompt_count, NULL, 0);
        members[i].sequence.sampling = members[i].sampling;
        members[i].starts_at = prng_below(&world.prng, world.way.late);
        members[i].retracts_left = RETRACTS_MAX;
        members[i].home = prng_below(&world.prng, world.way.places);
    }
    for (uint32_t i = 0; i < world.way.places; i++) {
        place_open(&world, &world.places[i], i);
    }
    while (world_turn(&world, prng_below(&world.prng, world.way.places))) {
        assert_true(world.turn++ < 1000000);
    }
    bool is_right = true;
    for (uint32_t i = 0; is_right && i < world.count; i++) {
        is_right = member_is_right(&world, i);
    }
    for (uint32_t i = 0; i < world.way.places; i++) {
        place_close(&world.places[i]);
    }
    driver_close(&world.alone);
    tally->worlds++;
    tally->pairs += world.count;
    tally->shared_tokens += world.shared_tokens;
    tally->retracted += world.retracted;
    tally->moved += world.moved;
    running_seed = 0;
    return is_right;
}

static int tell_seed(void **state) {
    (void)state;
    if (running_seed != 0) { /* it ended in the middle of a world */
        print_message("world: %s\nrepeat it with --seed 0x%llx\n", running_way,
                      (unsigned long long)running_seed);
        running_seed = 0;
    }
    return 0;
}

static void worlds_run(uint64_t seed, bool is_one, uint32_t pairs) {
    char sentence[SENTENCE_MAX];
    struct tally tally = {0};
    for (uint64_t i = 0; tally.pairs < pairs && (!is_one || i == 0); i++) {
        /* The n-th world of a seed is a seed itself. */
        uint64_t own = is_one ? seed : mix64(seed + i);
        if (!world_run(own, NULL, &tally, sentence)) {
            fail_msg("%s\nrepeat it with --seed 0x%llx", sentence, (unsigned long long)own);
        }
    }
    print_message("%u pairs in %u worlds (%u left out); %llu tokens on shared pages, %llu "
                  "times retracted, %llu times moved\n",
                  tally.pairs, tally.worlds, tally.skipped, (unsigned long long)tally.shared_tokens,
                  (unsigned long long)tally.retracted, (unsigned long long)tally.moved);
    if (!is_one && pairs >= 500) {
        assert_true(tally.shared_tokens > 0 && tally.retracted > 0 && tally.moved > 0);
    }
}

static void test_a_sequence_is_the_same_in_every_way_of_kept_worlds(void **state) {
    (void)state;
    if (only_seed != 0) {
        worlds_run(only_seed, true, 1);
        return;
    }
    worlds_run(2026, false, pairs_wanted / 4);
}

static void test_a_sequence_is_the_same_in_every_way_of_new_worlds(void **state) {
    (void)state;
    if (only_seed != 0) {
        return;
    }
    struct timespec now;
    assert_int_equal(clock_gettime(CLOCK_REALTIME, &now), 0);
    uint64_t seed = mix64((uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec);
    print_message("worlds from seed 0x%llx\n", (unsigned long long)seed);
    worlds_run(seed, false, pairs_wanted);
}

/* ---- is a difference found? ---- */

/* A table whose result has the last bit of one number wrong, in one situation. */
static const struct kernels *honest;

static void flip(float *number) {
    uint32_t bits;
    memcpy(&bits, number, sizeof(bits));
    bits ^= 1;
    memcpy(number, &bits, sizeof(bits));
}

static void gemm_wrong_of(const struct kernels_gemm *gemm, uint32_t first, uint32_t end,
                          uint32_t count) {
    honest->gemm(gemm, first, end);
    if (gemm->count == count && first == 0 && end > 0) {
        flip(gemm->y + (count / 2) * gemm->y_stride + 2);
    }
}

static void gemm_wrong_of_eleven(const struct kernels_gemm *gemm, uint32_t first, uint32_t end) {
    gemm_wrong_of(gemm, first, end, 11);
}

static void gemm_wrong_of_one(const struct kernels_gemm *gemm, uint32_t first, uint32_t end) {
    gemm_wrong_of(gemm, first, end, 1);
}

static void gemm_wrong_where_cut(const struct kernels_gemm *gemm, uint32_t first, uint32_t end) {
    honest->gemm(gemm, first, end);
    if (first > 0 && first < end && gemm->count > 0) {
        flip(gemm->y + first * KERNELS_PANEL);
    }
}

static void attention_wrong_in_pages(const struct kernels_attention *attention, uint32_t first,
                                     uint32_t end) {
    honest->attention(attention, first, end);
    if (attention->page_tokens == 5 && first == 0) {
        flip(attention->out);
    }
}

static void test_one_wrong_bit_is_found(void **state) {
    (void)state;
    if (only_seed != 0 || SAME_TEST_MEMBERS < MEMBERS_MAX) {
        return;
    }
    static const struct {
        const char *what;
        void (*gemm)(const struct kernels_gemm *gemm, uint32_t first, uint32_t end);
        void (*attention)(const struct kernels_attention *attention, uint32_t first, uint32_t end);
    } faults[] = {
        {"one number of a product of eleven rows", gemm_wrong_of_eleven, NULL},
        {"one number of a product of one row", gemm_wrong_of_one, NULL},
        {"one number where a second thread begins", gemm_wrong_where_cut, NULL},
        {"one number of attention over pages of five", NULL, attention_wrong_in_pages},
    };
    honest = kernels_select(NULL);
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
        struct kernels wrong = *honest;
        wrong.gemm = faults[i].gemm != NULL ? faults[i].gemm : honest->gemm;
        wrong.attention = faults[i].attention != NULL ? faults[i].attention : honest->attention;
        struct model *model =
            driver_model_with("golden/engine/untied_f32", &wrong, MODEL_WEIGHTS_FILE);
        char sentence[SENTENCE_MAX];
        struct tally tally = {0};
        uint32_t worlds = 0;
        while (worlds < 60 && world_run(mix64(77 + worlds), model, &tally, sentence)) {
            worlds++;
        }
        if (worlds == 60) {
            fail_msg("%s: wrong, and nobody noticed", faults[i].what);
        }
        print_message("%s: found in world %u, within %u pairs\n", faults[i].what, worlds + 1,
                      tally.pairs);
        model_destroy(model);
    }
}

int main(int argc, char **argv) {
    pairs_wanted = SAME_TEST_PAIRS;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--pairs") == 0) {
            pairs_wanted = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        } else if (strcmp(argv[i], "--seed") == 0) {
            only_seed = strtoull(argv[i + 1], NULL, 0);
        }
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_a_sequence_is_the_same_in_every_way_of_kept_worlds,
                                  tell_seed),
        cmocka_unit_test_teardown(test_a_sequence_is_the_same_in_every_way_of_new_worlds,
                                  tell_seed),
        cmocka_unit_test_teardown(test_one_wrong_bit_is_found, tell_seed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
