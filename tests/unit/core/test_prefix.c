/* The prefix index as routers see it: names of blocks, a router's set of them against a naive one,
 * and the whole way from a worker's pages to a router's view, against the index itself. */
#include "unit/core/bed.h"

#include "base/prng.h"
#include "core/blocks.h"
#include "core/publish.h"

static const struct layout_digest model = {11, 12};

/* --- names --- */

static void test_a_name_says_salt_model_and_all_tokens_so_far(void **state) {
    (void)state;
    uint32_t tokens[4] = {1, 2, 3, 4};
    struct siphash_key key = block_key(model);
    uint64_t first = block_first(salt_of(""));
    uint64_t block = block_next(key, first, tokens, 4);
    assert_true(block != 0);
    assert_true(block == block_next(key, first, tokens, 4));
    assert_true(block != block_next(key, block_first(salt_of("a")), tokens, 4));
    assert_true(block != block_next(block_key((struct layout_digest){11, 13}), first, tokens, 4));
    assert_true(block != block_next(key, block, tokens, 4));
    tokens[3] = 5;
    assert_true(block != block_next(key, first, tokens, 4));
    assert_true(block != block_next(key, first, tokens, 3));
}

static void test_salts_of_different_texts_differ_and_none_is_none(void **state) {
    (void)state;
    assert_false(salt_is_set(salt_of("")));
    assert_false(salt_is_set(salt_of(NULL)));
    const char *texts[] = {"a", "b", "aa", "tenant-1", "tenant-2"};
    for (uint32_t i = 0; i < 5; i++) {
        struct siphash128 salt = salt_of(texts[i]);
        assert_true(salt_is_set(salt));
        for (uint32_t j = 0; j < i; j++) {
            struct siphash128 other = salt_of(texts[j]);
            assert_memory_not_equal(&salt, &other, sizeof salt);
        }
    }
}

/* --- a set of blocks --- */

#define VIEWS  5u
#define NAMES  40u
#define LIMIT  64u
#define HOLDER 7u

struct naive {
    bool has[VIEWS][NAMES];
    bool is_live[VIEWS];
};

static bool naive_is_live(const void *context, const struct block_slot *slot) {
    const struct naive *naive = context;
    return naive->is_live[slot->view - 1];
}

static uint32_t naive_count(const struct naive *naive, uint32_t view) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < NAMES; i++) {
        count += naive->has[view][i] ? 1 : 0;
    }
    return count;
}

static void test_a_set_of_blocks_is_a_set(void **state) {
    (void)state;
    struct arena arena;
    struct block_set set;
    arena_init(&arena, NULL, 0);
    block_set_init(&set, LIMIT, &arena);
    void *memory = bed_memory(arena.len);
    arena_init(&arena, memory, arena.len);
    block_set_init(&set, LIMIT, &arena);
    static struct naive naive;
    memset(&naive, 0, sizeof naive);
    for (uint32_t i = 0; i < VIEWS; i++) {
        naive.is_live[i] = true;
    }
    struct prng prng = {3};
    for (uint32_t step = 0; step < 100000; step++) {
        uint32_t view = prng_below(&prng, VIEWS);
        uint32_t name = prng_below(&prng, NAMES);
        bool *has = &naive.has[view][name];
        uint32_t what = prng_below(&prng, 100);
        if (what < 55) {
            struct block_slot lost;
            bool was_full = set.count == LIMIT;
            assert_int_equal(block_set_add(&set, name + 1, view + 1, HOLDER, &lost), !*has);
            assert_int_equal(lost.block != 0, was_full && !*has);
            if (lost.block != 0) {
                assert_true(naive.has[lost.view - 1][lost.block - 1]);
                assert_int_equal(lost.holder, HOLDER);
                naive.has[lost.view - 1][lost.block - 1] = false;
            }
            *has = true;
        } else if (what < 97) {
            assert_int_equal(block_set_remove(&set, name + 1, view + 1), *has);
            *has = false;
        } else { /* a view ends: all of it is swept within two rounds */
            naive.is_live[view] = false;
            block_set_sweep(&set, 2 * (set.mask + 1), naive_is_live, &naive);
            block_set_sweep(&set, 2 * (set.mask + 1), naive_is_live, &naive);
            memset(naive.has[view], 0, sizeof naive.has[view]);
            naive.is_live[view] = true;
        }
        uint32_t count = 0;
        for (uint32_t i = 0; i < VIEWS; i++) {
            count += naive_count(&naive, i);
            assert_int_equal(block_set_has(&set, name + 1, i + 1), naive.has[i][name]);
        }
        assert_int_equal(set.count, count);
    }
    assert_true(set.forgotten_total > 100);
    assert_false(block_set_has(&set, 0, 1)); /* 0 is nobody's name */
    free(memory);
}

static void test_a_set_without_room_holds_nothing(void **state) {
    (void)state;
    struct arena arena;
    struct block_set set;
    arena_init(&arena, NULL, 0);
    block_set_init(&set, 0, &arena);
    void *memory = bed_memory(arena.len);
    arena_init(&arena, memory, arena.len);
    block_set_init(&set, 0, &arena);
    struct block_slot lost;
    assert_false(block_set_add(&set, 5, 1, 0, &lost));
    assert_false(block_set_has(&set, 5, 1));
    assert_false(block_set_remove(&set, 5, 1));
    free(memory);
}

/* --- from a worker's pages to a router's view --- */

#define PAGES       48u
#define PAGE_TOKENS 2u
#define SESSIONS    3u
#define HOLDERS     5u

/* What one router believes, by the rules of MESSAGE_CACHED. */
struct believer {
    uint64_t blocks[4 * PAGES];
    uint32_t count;
    uint64_t messages;
};

static void believe(struct believer *believer, const struct message *message) {
    believer->messages++;
    if (message->u.cached.is_reset) {
        believer->count = 0;
    }
    for (uint32_t i = 0; i < message->u.cached.removed_count; i++) {
        for (uint32_t j = 0; j < believer->count; j++) {
            if (believer->blocks[j] == message->u.cached.removed[i]) {
                believer->blocks[j--] = believer->blocks[--believer->count];
            }
        }
    }
    for (uint32_t i = 0; i < message->u.cached.stored_count; i++) {
        uint32_t at = 0;
        while (at < believer->count && believer->blocks[at] != message->u.cached.stored[i]) {
            at++;
        }
        if (at == believer->count) {
            assert_true(believer->count < 4 * PAGES);
            believer->blocks[believer->count++] = message->u.cached.stored[i];
        }
    }
}

struct publish_bed {
    struct node node;
    struct pages pages;
    struct publisher publisher;
    struct effects out;
    struct believer believers[SESSIONS];
    void *memory;
};

static void publish_layout(struct publish_bed *bed, uint32_t changes, struct arena *arena) {
    const struct pages_config config = {.capacity = PAGES,
                                        .page_tokens = PAGE_TOKENS,
                                        .changes_max = changes,
                                        .secret = {1, 2},
                                        .model = model};
    const struct node_config node = {.role = ROLE_DECODE,
                                     .incarnation = {5},
                                     .sessions_max = SESSIONS,
                                     .timers = timers_default()};
    node_init(&bed->node, &node, arena);
    pages_init(&bed->pages, &config, arena);
    publisher_init(&bed->publisher, SESSIONS, arena);
}

static void publish_session(struct publish_bed *bed, uint32_t at, uint64_t stream,
                            uint32_t protocol) {
    bed->node.sessions[at] = (struct session){
        .phase = SESSION_LIVE, .role = ROLE_ROUTER, .protocol = protocol, .stream = {stream}};
    bed->believers[at].count = 0; /* a router forgets what the session before had told */
}

/* changes: remembered. */
static struct publish_bed *publish_set_up(uint32_t changes) {
    struct publish_bed *bed = calloc(1, sizeof *bed);
    assert_non_null(bed);
    struct arena arena;
    arena_init(&arena, NULL, 0);
    publish_layout(bed, changes, &arena);
    bed->memory = bed_memory(arena.len);
    arena_init(&arena, bed->memory, arena.len);
    publish_layout(bed, changes, &arena);
    return bed;
}

static void publish_tear_down(struct publish_bed *bed) {
    free(bed->memory);
    free(bed);
}

/* One step; what it says reaches the routers at once. */
static void publish_step(struct publish_bed *bed, bool is_tick, int64_t later_ms) {
    bed->out.count = 0;
    bed->node.now = instant_add(bed->node.now, span_ms(later_ms));
    publisher_step(&bed->publisher, &bed->node, &bed->pages, is_tick, &bed->out);
    for (uint32_t i = 0; i < bed->out.count; i++) {
        const struct effect *effect = &bed->out.items[i];
        assert_int_equal(effect->u.message.kind, MESSAGE_CACHED);
        assert_true(effect->u.message.u.cached.stored_count +
                        effect->u.message.u.cached.removed_count <=
                    MESSAGE_BLOCKS_MAX);
        for (uint32_t j = 0; j < SESSIONS; j++) {
            if (bed->node.sessions[j].stream.v == effect->stream.v) {
                assert_true(bed->node.sessions[j].protocol >= PROTOCOL_CACHED);
                believe(&bed->believers[j], &effect->u.message);
            }
        }
    }
}

static void assert_believes_all(const struct publish_bed *bed, uint32_t session) {
    const struct believer *believer = &bed->believers[session];
    assert_int_equal(believer->count, bed->pages.index.count);
    for (uint32_t i = 0; i < PAGES; i++) {
        bool is_known = !bed->pages.table[i].is_indexed;
        for (uint32_t j = 0; j < believer->count && !is_known; j++) {
            is_known = believer->blocks[j] == bed->pages.table[i].block;
        }
        assert_true(is_known);
    }
}

struct holder {
    uint32_t tokens[PAGES * PAGE_TOKENS];
    uint32_t pages[PAGES];
    uint32_t count;
};

/* Somebody comes, or is computed, or goes. */
static void publish_live(struct pages *pages, struct holder *holder, struct prng *prng) {
    const struct siphash128 none = {0, 0};
    if (holder->count > 0) {
        pages_index(pages, none, holder->tokens, holder->pages, 0, holder->count);
        if (prng_below(prng, 3) > 0) {
            pages_release(pages, holder->pages, holder->count);
            holder->count = 0;
        }
        return;
    }
    uint32_t total = 1 + prng_below(prng, 12);
    for (uint32_t i = 0; i < total * PAGE_TOKENS; i++) {
        holder->tokens[i] = prng_below(prng, 8) == 0 ? prng_below(prng, 4) : 0;
    }
    uint32_t matched = pages_match(pages, none, holder->tokens, total, holder->pages);
    if (pages_take(pages, total - matched, holder->pages + matched) != STATUS_OK) {
        pages_release(pages, holder->pages, matched);
        return;
    }
    holder->count = total;
}

static void views_become_the_index(uint32_t changes) {
    struct publish_bed *bed = publish_set_up(changes);
    static struct holder holders[HOLDERS];
    memset(holders, 0, sizeof holders);
    struct prng prng = {5};
    uint64_t streams = 1;
    for (uint32_t round = 0; round < 4000; round++) {
        for (uint32_t i = 0; i < SESSIONS; i++) {
            if (bed->node.sessions[i].phase != SESSION_LIVE || prng_below(&prng, 60) == 0) {
                streams += 2;
                publish_session(bed, i, streams, PROTOCOL_CACHED);
            }
        }
        /* Now and then more changes at once than are remembered. */
        uint32_t lives = prng_below(&prng, 20) == 0 ? 60 : prng_below(&prng, 4);
        for (uint32_t i = 0; i < lives; i++) {
            publish_live(&bed->pages, &holders[prng_below(&prng, HOLDERS)], &prng);
        }
        publish_step(bed, prng_below(&prng, 2) == 0, prng_below(&prng, 60));
        if (prng_below(&prng, 4) == 0) { /* quiet */
            for (uint32_t i = 0; i < 4; i++) {
                publish_step(bed, true, 50);
            }
            for (uint32_t i = 0; i < SESSIONS; i++) {
                assert_believes_all(bed, i);
            }
        }
    }
    assert_int_equal(bed->publisher.changes_dropped > 100, changes < PAGES);
    assert_true(bed->publisher.walks > 100);
    assert_true(bed->pages.evictions_total > 1000);
    publish_tear_down(bed);
}

static void test_every_view_becomes_the_index_whatever_happens_on_the_way(void **state) {
    (void)state;
    views_become_the_index(16);   /* readers fall behind all the time */
    views_become_the_index(1024); /* none does: blocks come and leave within one message */
}

static void test_quiet_costs_no_words_and_an_old_router_hears_none(void **state) {
    (void)state;
    struct publish_bed *bed = publish_set_up(16);
    static struct holder holder;
    memset(&holder, 0, sizeof holder);
    publish_session(bed, 0, 1, PROTOCOL_CACHED);
    publish_session(bed, 1, 3, PROTOCOL_OLDEST);
    publish_step(bed, true, 100);
    assert_int_equal(bed->out.count, 0); /* nothing is cached yet */
    struct prng prng = {6};
    publish_live(&bed->pages, &holder, &prng);
    publish_live(&bed->pages, &holder, &prng);
    publish_step(bed, false, 0);
    assert_int_equal(bed->believers[0].messages, 1);
    assert_believes_all(bed, 0);
    assert_int_equal(bed->believers[1].messages, 0);
    for (uint32_t i = 0; i < 20; i++) {
        publish_step(bed, i % 2 == 0, 30);
        assert_int_equal(bed->out.count, 0);
    }
    publish_tear_down(bed);
}

/* However much changes, so much is said in an interval and not more. */
static void test_what_is_said_is_bounded_in_time(void **state) {
    (void)state;
    struct publish_bed *bed = publish_set_up(16);
    static struct holder holders[HOLDERS];
    memset(holders, 0, sizeof holders);
    publish_session(bed, 0, 1, PROTOCOL_CACHED);
    struct prng prng = {8};
    publish_step(bed, true, 100);
    uint64_t before = bed->publisher.blocks_sent;
    for (uint32_t i = 0; i < 20000; i++) {
        publish_live(&bed->pages, &holders[prng_below(&prng, HOLDERS)], &prng);
        publish_step(bed, true, 0);
    }
    assert_int_equal(bed->publisher.blocks_sent - before, PUBLISH_CREDIT);
    for (uint32_t i = 0; i < 4; i++) {
        publish_step(bed, true, 50);
    }
    assert_believes_all(bed, 0);
    publish_tear_down(bed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_name_says_salt_model_and_all_tokens_so_far),
        cmocka_unit_test(test_salts_of_different_texts_differ_and_none_is_none),
        cmocka_unit_test(test_a_set_of_blocks_is_a_set),
        cmocka_unit_test(test_a_set_without_room_holds_nothing),
        cmocka_unit_test(test_every_view_becomes_the_index_whatever_happens_on_the_way),
        cmocka_unit_test(test_quiet_costs_no_words_and_an_old_router_hears_none),
        cmocka_unit_test(test_what_is_said_is_bounded_in_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
