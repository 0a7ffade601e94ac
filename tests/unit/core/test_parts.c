/* The core's parts: pages against a naive model, word buffers, step budget, layout, timers,
 * observed time. */
#include "unit/core/bed.h"

#include "base/prng.h"
#include "core/budget.h"
#include "core/layout.h"
#include "core/pages.h"
#include "core/words.h"

#define PAGES       24u
#define PAGE_TOKENS 4u
#define HOLDERS     6u

/* Pages of a test; memory_out is to be freed. */
static void pages_set_up(struct pages *pages, uint32_t capacity, void **memory_out) {
    const struct pages_config config = {.capacity = capacity,
                                        .page_tokens = PAGE_TOKENS,
                                        .changes_max = 64,
                                        .secret = {1, 2},
                                        .model = {3, 4}};
    struct arena arena;
    arena_init(&arena, NULL, 0);
    pages_init(pages, &config, &arena);
    *memory_out = bed_memory(arena.len);
    arena_init(&arena, *memory_out, arena.len);
    pages_init(pages, &config, &arena);
}

struct holder {
    struct siphash128 salt;
    uint32_t tokens[PAGES * PAGE_TOKENS];
    uint32_t pages[PAGES];
    uint32_t count;
};

/* Sequences from a two-letter alphabet share prefixes all the time; whatever the index returns must
 * hold exactly the tokens that were asked for, and the ledger must balance after every step. */
static void test_pages_hold_what_the_index_says_through_random_histories(void **state) {
    (void)state;
    struct pages pages;
    void *memory = NULL;
    pages_set_up(&pages, PAGES, &memory);
    static uint32_t contents[PAGES][PAGE_TOKENS]; /* what was computed into each page */
    static struct siphash128 salts[PAGES];        /* and for whom */
    static struct holder holders[HOLDERS];
    memset(holders, 0, sizeof holders);
    struct prng prng = {7};
    uint64_t hits = 0;
    for (uint32_t step = 0; step < 200000; step++) {
        struct holder *holder = &holders[prng_below(&prng, HOLDERS)];
        if (holder->count == 0) {
            uint32_t total = 1 + prng_below(&prng, 10);
            for (uint32_t i = 0; i < total * PAGE_TOKENS; i++) {
                holder->tokens[i] = prng_below(&prng, 20) == 0 ? 1 : 0;
            }
            holder->salt = salt_of(prng_below(&prng, 2) == 0 ? "" : "tenant");
            uint32_t matched =
                pages_match(&pages, holder->salt, holder->tokens, total, holder->pages);
            for (uint32_t i = 0; i < matched; i++) {
                assert_memory_equal(&salts[holder->pages[i]], &holder->salt, sizeof salts[0]);
                assert_memory_equal(contents[holder->pages[i]], holder->tokens + i * PAGE_TOKENS,
                                    sizeof contents[0]);
            }
            hits += matched;
            uint32_t before = pages_available(&pages);
            if (pages_take(&pages, total - matched, holder->pages + matched) != STATUS_OK) {
                assert_true(before < total - matched);
                pages_release(&pages, holder->pages, matched);
            } else {
                holder->count = total;
                for (uint32_t i = matched; i < total; i++) {
                    salts[holder->pages[i]] = holder->salt;
                    memcpy(contents[holder->pages[i]], holder->tokens + i * PAGE_TOKENS,
                           sizeof contents[0]);
                }
            }
        } else if (prng_below(&prng, 2) == 0) {
            /* From anywhere: what lies before has been indexed, or is elsewhere, or is not yet. */
            uint32_t end = prng_below(&prng, holder->count + 1);
            pages_index(&pages, holder->salt, holder->tokens, holder->pages,
                        prng_below(&prng, end + 1), end);
        } else {
            pages_release(&pages, holder->pages, holder->count);
            holder->count = 0;
        }
        pages_verify(&pages);
    }
    assert_true(hits > 1000);
    assert_true(pages.evictions_total > 1000);
    for (uint32_t i = 0; i < HOLDERS; i++) {
        pages_release(&pages, holders[i].pages, holders[i].count);
    }
    assert_int_equal(pages_available(&pages), PAGES);
    free(memory);
}

static void test_a_take_that_does_not_fit_changes_nothing(void **state) {
    (void)state;
    struct pages pages;
    void *memory = NULL;
    pages_set_up(&pages, 4, &memory);
    uint32_t list[5];
    assert_int_equal(pages_take(&pages, 5, list), STATUS_BUSY);
    assert_int_equal(pages_available(&pages), 4);
    assert_int_equal(pages_take(&pages, 4, list), STATUS_OK);
    assert_int_equal(pages_take(&pages, 1, list), STATUS_BUSY);
    pages.drops_next_free = true; /* what a leak would look like: nobody accounts for one page */
    pages_release(&pages, list, 4);
    assert_int_equal(pages_available(&pages) + pages.owned, 3);
    free(memory);
}

static void test_the_budget_finds_the_planned_step_from_either_side(void **state) {
    (void)state;
    const int64_t ns_per_token[] = {1000, 100000, 3000000, 200000000};
    for (uint32_t i = 0; i < 4; i++) {
        struct budget budget;
        budget_init(&budget, 4096);
        for (uint32_t step = 0; step < 60; step++) {
            struct span elapsed = {(int64_t)budget.tokens * ns_per_token[i]};
            budget_learn(&budget, budget.tokens, elapsed, span_ms(100));
        }
        int64_t length = (int64_t)budget.tokens * ns_per_token[i];
        assert_true(length <= span_ms(100).ns || budget.tokens == 1);
        assert_true(length >= span_ms(74).ns || budget.tokens < 4 || budget.tokens == 4096);
        assert_int_equal(budget.ns_per_token, ns_per_token[i]);
    }
}

/* One step that took five times as long, because of something else on the machine. */
static void test_the_budget_recovers_from_an_accident_in_two_steps(void **state) {
    (void)state;
    struct budget budget;
    budget_init(&budget, 4096);
    for (uint32_t step = 0; step < 60; step++) {
        budget_learn(&budget, budget.tokens, span_us((int64_t)budget.tokens * 100), span_ms(100));
    }
    uint32_t before = budget.tokens;
    budget_learn(&budget, before, span_us((int64_t)before * 500), span_ms(100));
    assert_int_equal(budget.tokens, before / 2);
    for (uint32_t step = 0; step < 2; step++) {
        budget_learn(&budget, budget.tokens, span_us((int64_t)budget.tokens * 100), span_ms(100));
    }
    assert_true(budget.tokens >= before * 9 / 10);
}

static void test_a_partly_filled_step_does_not_grow_the_budget(void **state) {
    (void)state;
    struct budget budget;
    budget_init(&budget, 4096);
    uint32_t before = budget.tokens;
    budget_learn(&budget, 1, span_us(10), span_ms(100));
    assert_int_equal(budget.tokens, before);
}

static struct kv_layout plain_layout(void) {
    struct kv_layout layout = {.page_tokens = 16, .component_count = 4};
    for (uint32_t i = 0; i < 4; i++) {
        layout.components[i] = (struct kv_component){.name = "k",
                                                     .layer = (uint16_t)(i / 2),
                                                     .tokens_per_row = 1,
                                                     .row_bytes = 36,
                                                     .dtype = KV_DTYPE_F32,
                                                     .lifetime = KV_LIFETIME_PAGE};
    }
    return layout;
}

static void test_the_layout_digest_covers_all_that_two_workers_must_share(void **state) {
    (void)state;
    struct kv_layout base = plain_layout();
    assert_int_equal(layout_complete(&base), STATUS_OK);
    struct kv_layout other = plain_layout();
    other.page_tokens = 32; /* each worker's own */
    assert_int_equal(layout_complete(&other), STATUS_OK);
    assert_true(layout_digest_equal(base.digest, other.digest));
    for (uint32_t field = 0; field < 3; field++) {
        other = plain_layout();
        if (field == 0) {
            other.components[3].row_bytes = 40;
        } else if (field == 1) {
            other.components[3].dtype = KV_DTYPE_BF16;
        } else {
            other.components[3].name[0] = 'v';
        }
        assert_int_equal(layout_complete(&other), STATUS_OK);
        assert_false(layout_digest_equal(base.digest, other.digest));
    }
}

/* Index rows are never attended, they choose what is: were two workers to disagree about them, no
 * number would be broken and the text would only become worse. */
static void test_a_layout_is_whatever_rows_a_model_keeps(void **state) {
    (void)state;
    static const struct kv_component mixed[] = {
        {"latent", 0, 1, 1152, KV_DTYPE_BF16, KV_LIFETIME_PAGE},
        {"index_k", 1, 1, 132, KV_DTYPE_U8, KV_LIFETIME_PAGE},
        {"latent", 1, 1, 656, KV_DTYPE_U8, KV_LIFETIME_PAGE},
        {"window", 1, 1, 584, KV_DTYPE_U8, KV_LIFETIME_PAGE},
        {"index_k", 2, 1, 256, KV_DTYPE_BF16, KV_LIFETIME_PAGE}};
    static const uint32_t offsets[] = {0, 8064, 9024, 13632, 17728}; /* pages of 7, 64-aligned */
    struct kv_layout layout = {.page_tokens = 7, .component_count = 5};
    memcpy(layout.components, mixed, sizeof mixed);
    assert_int_equal(layout_complete(&layout), STATUS_OK);
    assert_int_equal(layout.layer_count, 3);
    assert_int_equal(layout.token_bytes, 1152 + 132 + 656 + 584 + 256);
    assert_int_equal(layout.page_bytes, 17728 + 1792);
    assert_memory_equal(layout.page_offset, offsets, sizeof offsets);
    static const uint32_t first[] = {0, 1, 4, 5};
    assert_memory_equal(layout.layer_first, first, sizeof first);
    assert_int_equal(layout_row_offset(&layout, 2, 3, 6), 2 * 19520 + 13632 + 6 * 584);
    assert_int_equal(layout_range_bytes(&layout, 1, 2, 10), 10 * (132 + 656));
    struct layout_digest digest = layout.digest;
    layout.components[1].dtype = KV_DTYPE_F32; /* as many bytes, meant differently */
    assert_int_equal(layout_complete(&layout), STATUS_OK);
    assert_false(layout_digest_equal(layout.digest, digest));
    memcpy(layout.components, mixed, sizeof mixed);
    layout.components[1] = mixed[2]; /* the same rows in another order */
    layout.components[2] = mixed[1];
    assert_int_equal(layout_complete(&layout), STATUS_OK);
    assert_false(layout_digest_equal(layout.digest, digest));
}

static void test_a_layout_bound_to_other_weights_is_another_layout(void **state) {
    (void)state;
    struct kv_layout one = plain_layout();
    struct kv_layout two = plain_layout();
    assert_int_equal(layout_complete(&one), STATUS_OK);
    assert_int_equal(layout_complete(&two), STATUS_OK);
    layout_bind(&one, 7);
    assert_false(layout_digest_equal(one.digest, two.digest));
    layout_bind(&two, 8);
    assert_false(layout_digest_equal(one.digest, two.digest));
    two = plain_layout();
    assert_int_equal(layout_complete(&two), STATUS_OK);
    layout_bind(&two, 7);
    assert_true(layout_digest_equal(one.digest, two.digest));
}

static void test_a_layout_that_is_wrong_is_refused(void **state) {
    (void)state;
    struct kv_layout layout = plain_layout();
    layout.components[2].layer = 5;
    assert_int_equal(layout_complete(&layout), STATUS_INVALID);
    layout = plain_layout();
    layout.components[1].row_bytes = 0;
    assert_int_equal(layout_complete(&layout), STATUS_INVALID);
    layout = plain_layout();
    layout.components[1].tokens_per_row = 4;
    assert_int_equal(layout_complete(&layout), STATUS_UNSUPPORTED);
    layout = plain_layout();
    layout.component_count = 0;
    assert_int_equal(layout_complete(&layout), STATUS_RANGE);
    layout = plain_layout();
    layout.page_tokens = 0;
    assert_int_equal(layout_complete(&layout), STATUS_RANGE);
}

static void test_the_rows_of_a_page_do_not_overlap(void **state) {
    (void)state;
    struct kv_layout layout = plain_layout();
    assert_int_equal(layout_complete(&layout), STATUS_OK);
    uint8_t *seen = calloc(2, layout.page_bytes);
    assert_non_null(seen);
    for (uint32_t page = 0; page < 2; page++) {
        for (uint32_t c = 0; c < layout.component_count; c++) {
            for (uint32_t token = 0; token < layout.page_tokens; token++) {
                uint64_t at = layout_row_offset(&layout, page, c, token);
                for (uint32_t b = 0; b < layout.components[c].row_bytes; b++) {
                    assert_true(at + b < 2ull * layout.page_bytes);
                    assert_int_equal(seen[at + b]++, 0);
                }
            }
        }
    }
    free(seen);
}

static void test_timers_that_contradict_each_other_are_refused_by_name(void **state) {
    (void)state;
    struct core_timers timers = timers_default();
    assert_null(timers_check(&timers));
    timers.lease = span_ms(1500);
    assert_non_null(strstr(timers_check(&timers), "lease"));
    timers = timers_default();
    timers.open = span_ms(10);
    assert_non_null(strstr(timers_check(&timers), "T_open"));
}

static void test_words_are_contiguous_and_come_back(void **state) {
    (void)state;
    struct arena arena;
    struct words words;
    arena_init(&arena, NULL, 0);
    words_init(&words, 1024, &arena);
    void *memory = bed_memory(arena.len);
    arena_init(&arena, memory, arena.len);
    words_init(&words, 1024, &arena);
    uint32_t a = 0;
    uint32_t b = 0;
    assert_int_equal(words_take(&words, 500, &a), STATUS_OK);
    assert_int_equal(words_take(&words, 500, &b), STATUS_OK);
    uint32_t c = 0;
    assert_int_equal(words_take(&words, 1, &c), STATUS_BUSY);
    memset(words_at(&words, a), 1, 500 * sizeof(uint32_t));
    memset(words_at(&words, b), 2, 500 * sizeof(uint32_t));
    assert_int_equal(words_at(&words, a)[499], 0x01010101);
    words_free(&words, a);
    words_free(&words, b);
    words_free(&words, WORDS_NONE);
    assert_int_equal(words.taken, 0);
    assert_int_equal(words_take(&words, 1024, &c), STATUS_OK);
    free(memory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pages_hold_what_the_index_says_through_random_histories),
        cmocka_unit_test(test_a_take_that_does_not_fit_changes_nothing),
        cmocka_unit_test(test_the_budget_finds_the_planned_step_from_either_side),
        cmocka_unit_test(test_the_budget_recovers_from_an_accident_in_two_steps),
        cmocka_unit_test(test_a_partly_filled_step_does_not_grow_the_budget),
        cmocka_unit_test(test_the_layout_digest_covers_all_that_two_workers_must_share),
        cmocka_unit_test(test_a_layout_bound_to_other_weights_is_another_layout),
        cmocka_unit_test(test_a_layout_is_whatever_rows_a_model_keeps),
        cmocka_unit_test(test_a_layout_that_is_wrong_is_refused),
        cmocka_unit_test(test_the_rows_of_a_page_do_not_overlap),
        cmocka_unit_test(test_timers_that_contradict_each_other_are_refused_by_name),
        cmocka_unit_test(test_words_are_contiguous_and_come_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
