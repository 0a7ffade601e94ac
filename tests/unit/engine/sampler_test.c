/* The sampler: each rule alone against a plain recomputation, and the draw against chi-square. */
#include "engine/sampler.h"

#include "base/prng.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define VOCAB 64u

static const struct sampling neutral = {
    .temperature = 1, .top_p = 1, .top_k = -1, .repetition_penalty = 1};

struct fixture {
    float logits[VOCAB];
    struct sampling sampling;
    struct sampler_input input;
    uint32_t history[32];
    _Alignas(16) unsigned char scratch[VOCAB * 24];
};

static void fixture_init(struct fixture *f, uint64_t seed) {
    memset(f, 0, sizeof(*f));
    struct prng prng = {seed};
    for (uint32_t i = 0; i < VOCAB; i++) {
        f->logits[i] = (float)prng_below(&prng, 8000) / 1000.0f - 4.0f;
    }
    f->sampling = neutral;
    f->input = (struct sampler_input){.kernels = kernels_select(NULL),
                                      .vocab_count = VOCAB,
                                      .sampling = &f->sampling,
                                      .position = 10,
                                      .output_first = 10,
                                      .scratch = f->scratch};
}

/* Chooses from a copy of the logits. */
static struct sampler_choice choose(struct fixture *f) {
    float logits[VOCAB];
    memcpy(logits, f->logits, sizeof(logits));
    f->input.logits = logits;
    assert_int_equal(sampler_scratch_bytes(VOCAB), sizeof(f->scratch));
    struct sampler_choice choice = sampler_choose(&f->input);
    f->input.logits = NULL;
    return choice;
}

static void test_greedy_takes_the_largest_and_the_lowest_id_of_a_tie(void **state) {
    (void)state;
    struct fixture f;
    fixture_init(&f, 1);
    f.sampling.temperature = 0;
    f.logits[40] = 9;
    f.logits[17] = 9;
    f.logits[63] = 9;
    assert_int_equal(choose(&f).token, 17);
    f.logits[63] = 9.5f;
    assert_int_equal(choose(&f).token, 63);
}

static void test_the_logprob_is_that_of_the_untouched_logits(void **state) {
    (void)state;
    struct fixture f;
    fixture_init(&f, 2);
    f.sampling.temperature = 0;
    f.sampling.logprobs = 1;
    f.sampling.bias_count = 1;
    f.sampling.biases[0].token = 5;
    f.sampling.biases[0].bias = 50;
    double sum = 0;
    for (uint32_t i = 0; i < VOCAB; i++) {
        sum += exp((double)f.logits[i]);
    }
    struct sampler_choice choice = choose(&f);
    assert_int_equal(choice.token, 5);
    assert_true(fabs((double)choice.logprob - ((double)f.logits[5] - log(sum))) < 1e-5);
}

/* Whether token a stands before token b among the alternatives. */
static bool is_likelier(const struct fixture *f, uint32_t a, uint32_t b) {
    return f->logits[a] != f->logits[b] ? f->logits[a] > f->logits[b] : a < b;
}

static void test_alternatives_are_the_likeliest_of_the_untouched_logits(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 500; round++) {
        struct fixture f;
        fixture_init(&f, 100 + round);
        struct prng prng = {round};
        uint32_t wanted = prng_below(&prng, 1 + LOGPROBS_TOP_MAX);
        for (uint32_t i = 0; round % 2 == 0 && i < VOCAB; i++) {
            f.logits[i] = (float)prng_below(&prng, 4); /* many ties */
        }
        f.sampling.logprobs = 1 + wanted;
        f.sampling.temperature = round % 3 == 0 ? 0.0f : 0.7f;
        f.sampling.bias_count = 1;
        f.sampling.biases[0].token = prng_below(&prng, VOCAB);
        f.sampling.biases[0].bias = 100;
        double sum = 0;
        for (uint32_t i = 0; i < VOCAB; i++) {
            sum += exp((double)f.logits[i]);
        }
        struct sampler_choice choice = choose(&f);
        assert_true(choice.is_valid);
        assert_int_equal(choice.top_count, wanted);
        bool is_taken[VOCAB] = {false};
        for (uint32_t rank = 0; rank < wanted; rank++) {
            uint32_t best = VOCAB;
            for (uint32_t i = 0; i < VOCAB; i++) {
                if (!is_taken[i] && (best == VOCAB || is_likelier(&f, i, best))) {
                    best = i;
                }
            }
            is_taken[best] = true;
            assert_int_equal(choice.top_tokens[rank], best);
            double exact = (double)f.logits[best] - log(sum);
            assert_true(fabs((double)choice.top_logprobs[rank] - exact) < 1e-6 * (1 - exact));
            if (best == choice.token) {
                assert_true(choice.top_logprobs[rank] == choice.logprob);
            }
        }
        f.sampling.logprobs = 0; /* asking changes nothing else */
        struct sampler_choice plain = choose(&f);
        assert_int_equal(plain.token, choice.token);
        assert_true(choice.logprob < 0.0f && plain.logprob == 0.0f);
        assert_int_equal(plain.top_count, 0);
    }
}

static void test_a_small_vocabulary_has_as_many_alternatives_as_tokens(void **state) {
    (void)state;
    struct fixture f;
    fixture_init(&f, 5);
    f.sampling.logprobs = 1 + LOGPROBS_TOP_MAX;
    f.sampling.temperature = 0;
    float logits[3] = {1, 3, 2};
    f.input.logits = logits;
    f.input.vocab_count = 3;
    struct sampler_choice choice = sampler_choose(&f.input);
    assert_int_equal(choice.top_count, 3);
    assert_int_equal(choice.top_tokens[0], 1);
    assert_int_equal(choice.top_tokens[1], 2);
    assert_int_equal(choice.top_tokens[2], 0);
}

static void test_logprobs_of_logits_at_the_ends_of_the_floats_are_finite(void **state) {
    (void)state;
    struct fixture f;
    fixture_init(&f, 6);
    f.sampling.logprobs = 3;
    f.sampling.temperature = 0;
    float logits[2] = {3e38f, -3e38f};
    f.input.logits = logits;
    f.input.vocab_count = 2;
    struct sampler_choice choice = sampler_choose(&f.input);
    assert_true(choice.is_valid);
    assert_true(choice.top_logprobs[0] == 0.0f);
    assert_true(isfinite(choice.top_logprobs[1]) && choice.top_logprobs[1] < -1e38f);
}

static void test_a_logit_that_is_not_finite_makes_the_choice_invalid(void **state) {
    (void)state;
    static const float wrong[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < 3; i++) {
        for (int is_greedy = 0; is_greedy < 2; is_greedy++) {
            struct fixture f;
            fixture_init(&f, 3);
            f.sampling.temperature = is_greedy != 0 ? 0.0f : 1.0f;
            assert_true(choose(&f).is_valid);
            f.logits[33] = wrong[i];
            assert_false(choose(&f).is_valid);
        }
    }
}

/* The distribution that `share` describes must explain `draws` draws. */
static void check_draws(struct fixture *f, const double *share, uint32_t draws) {
    uint32_t counts[VOCAB] = {0};
    double total = 0;
    for (uint32_t i = 0; i < VOCAB; i++) {
        total += share[i];
    }
    for (uint32_t n = 0; n < draws; n++) { /* half by position, half by seed */
        f->input.position = 10 + (n % 2 == 0 ? n : 0);
        f->sampling.seed = n % 2 == 0 ? 9 : n;
        struct sampler_choice choice = choose(f);
        assert_true(choice.is_valid);
        counts[choice.token]++;
    }
    double chi = 0;
    double rest_expected = 0;
    double rest_count = 0;
    uint32_t cells = 0;
    for (uint32_t i = 0; i < VOCAB; i++) {
        double expected = share[i] / total * draws;
        if (share[i] <= 0) {
            assert_int_equal(counts[i], 0);
        } else if (expected < 8) { /* small cells are put together */
            rest_expected += expected;
            rest_count += counts[i];
        } else {
            chi += (counts[i] - expected) * (counts[i] - expected) / expected;
            cells++;
        }
    }
    if (rest_expected > 0) {
        chi += (rest_count - rest_expected) * (rest_count - rest_expected) / rest_expected;
        cells++;
    }
    /* Mean cells - 1, deviation sqrt(2 (cells - 1)): five deviations; the seeds are fixed. */
    double freedom = cells > 1 ? cells - 1 : 1;
    assert_true(chi <= freedom + 5 * sqrt(2 * freedom));
}

/* Weights e^(logit / temperature), cut as asked, the slow and plain way. */
static void shares_make(const struct fixture *f, double *share) {
    bool is_kept[VOCAB];
    double temperature = (double)f->sampling.temperature;
    for (uint32_t i = 0; i < VOCAB; i++) {
        share[i] = exp((double)f->logits[i] / temperature);
        is_kept[i] = true;
    }
    double kept_total = 0;
    for (uint32_t i = 0; i < VOCAB; i++) {
        uint32_t better = 0;
        for (uint32_t j = 0; j < VOCAB; j++) {
            better += f->logits[j] > f->logits[i] || (f->logits[j] == f->logits[i] && j < i);
        }
        is_kept[i] = f->sampling.top_k <= 0 || better < (uint32_t)f->sampling.top_k;
        kept_total += is_kept[i] ? share[i] : 0;
    }
    double largest = 0;
    bool in_nucleus[VOCAB];
    for (uint32_t i = 0; i < VOCAB; i++) {
        double above = 0; /* mass of the kept ones in front */
        for (uint32_t j = 0; j < VOCAB; j++) {
            bool is_before = f->logits[j] > f->logits[i] || (f->logits[j] == f->logits[i] && j < i);
            above += is_kept[j] && is_before ? share[j] : 0;
        }
        in_nucleus[i] = f->sampling.top_p >= 1 || above < (double)f->sampling.top_p * kept_total;
        largest = share[i] > largest ? share[i] : largest;
    }
    for (uint32_t i = 0; i < VOCAB; i++) {
        if (!is_kept[i] || !in_nucleus[i] || share[i] < (double)f->sampling.min_p * largest) {
            share[i] = 0;
        }
    }
}

static void test_draws_follow_the_distribution_under_every_cut(void **state) {
    (void)state;
    static const struct {
        float temperature;
        int32_t top_k;
        float top_p;
        float min_p;
    } cuts[] = {{1, -1, 1, 0},         {0.5f, -1, 1, 0},     {2, -1, 1, 0},
                {1, 1, 1, 0},          {1, 7, 1, 0},         {1, 64, 1, 0},
                {1, 1000, 1, 0},       {1, -1, 0.9f, 0},     {1, -1, 0.3f, 0},
                {1, -1, 1e-6f, 0},     {1, -1, 1, 0.1f},     {1, -1, 1, 1},
                {1, 20, 0.8f, 0},      {0.7f, 20, 1, 0.05f}, {1.3f, -1, 0.95f, 0.02f},
                {1.5f, 30, 0.9f, 0.1f}};
    for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++) {
        struct fixture f;
        double share[VOCAB];
        fixture_init(&f, 100 + i);
        f.logits[50] = f.logits[51]; /* a tie somewhere */
        f.sampling.temperature = cuts[i].temperature;
        f.sampling.top_k = cuts[i].top_k;
        f.sampling.top_p = cuts[i].top_p;
        f.sampling.min_p = cuts[i].min_p;
        shares_make(&f, share);
        check_draws(&f, share, 20000);
    }
}

static void test_a_draw_depends_on_seed_and_position_only(void **state) {
    (void)state;
    struct fixture f;
    fixture_init(&f, 4);
    uint32_t differing = 0;
    for (uint32_t n = 0; n < 200; n++) {
        f.input.position = 10 + n;
        f.sampling.seed = 5;
        uint32_t first = choose(&f).token;
        assert_int_equal(choose(&f).token, first);
        f.sampling.seed = 6;
        differing += choose(&f).token != first;
    }
    assert_true(differing > 100);
}

static void test_penalties_change_logits_as_documented(void **state) {
    (void)state;
    struct fixture f;
    fixture_init(&f, 5);
    /* Prompt: 1, 2, 2; generated: 3, 3, 4, and 70 that is no token. */
    static const uint32_t history[] = {1, 2, 2, 3, 3, 4, 70};
    memcpy(f.history, history, sizeof(history));
    f.input.history = f.history;
    f.input.position = 7;
    f.input.output_first = 3;
    f.sampling.repetition_penalty = 2.0f;
    f.sampling.frequency_penalty = 0.25f;
    f.sampling.presence_penalty = 0.5f;
    f.logits[1] = 3.0f;
    f.logits[2] = -1.0f;
    f.logits[3] = 2.0f;
    f.logits[4] = -2.0f;
    float logits[VOCAB];
    memcpy(logits, f.logits, sizeof(logits));
    f.input.logits = logits;
    assert_true(sampler_choose(&f.input).is_valid);
    assert_true(logits[1] == 1.5f);                    /* prompt: repetition only */
    assert_true(logits[2] == -2.0f);                   /* negative: multiplied, once */
    assert_true(logits[3] == 1.0f - 2 * 0.25f - 0.5f); /* twice generated */
    assert_true(logits[4] == -4.0f - 1 * 0.25f - 0.5f);
    assert_true(logits[5] == f.logits[5]);
}

static void test_bias_can_force_and_forbid(void **state) {
    (void)state;
    struct fixture f;
    fixture_init(&f, 6);
    f.sampling.bias_count = 2;
    f.sampling.biases[0].token = 60;
    f.sampling.biases[0].bias = 100;
    f.sampling.biases[1].token = VOCAB; /* no token: ignored */
    f.sampling.biases[1].bias = 100;
    for (uint32_t n = 0; n < 100; n++) {
        f.sampling.seed = n;
        assert_int_equal(choose(&f).token, 60);
    }
    f.sampling.biases[0].bias = -100;
    for (uint32_t n = 0; n < 2000; n++) {
        f.sampling.seed = n;
        assert_int_not_equal(choose(&f).token, 60);
    }
}

static void test_min_tokens_holds_back_stop_and_end_tokens(void **state) {
    (void)state;
    static const uint32_t eos[] = {7, VOCAB + 3};
    for (int is_greedy = 0; is_greedy < 2; is_greedy++) {
        struct fixture f;
        fixture_init(&f, 7);
        f.sampling.temperature = is_greedy != 0 ? 0.0f : 0.05f;
        f.logits[7] = 30;
        f.logits[8] = 20;
        f.logits[9] = 10;
        f.input.eos_tokens = eos;
        f.input.eos_count = 2;
        f.sampling.min_tokens = 3;
        f.sampling.stop_token_count = 1;
        f.sampling.stop_tokens[0] = 8;
        f.input.output_first = 10;
        f.input.position = 12; /* two generated so far */
        assert_int_equal(choose(&f).token, 9);
        f.input.position = 13;
        assert_int_equal(choose(&f).token, 7);
        f.input.position = 12;
        f.sampling.ignore_eos = true; /* then the end token is a token like any other */
        assert_int_equal(choose(&f).token, 7);
    }
}

static void test_nothing_left_to_choose_is_invalid(void **state) {
    (void)state;
    struct fixture f;
    fixture_init(&f, 8);
    static uint32_t all[VOCAB];
    for (uint32_t i = 0; i < VOCAB; i++) {
        all[i] = i;
    }
    f.input.eos_tokens = all;
    f.input.eos_count = VOCAB;
    f.sampling.min_tokens = 1;
    assert_false(choose(&f).is_valid);
    f.input.vocab_count = 0;
    f.sampling.min_tokens = 0;
    assert_false(sampler_choose(&f.input).is_valid);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy_takes_the_largest_and_the_lowest_id_of_a_tie),
        cmocka_unit_test(test_the_logprob_is_that_of_the_untouched_logits),
        cmocka_unit_test(test_alternatives_are_the_likeliest_of_the_untouched_logits),
        cmocka_unit_test(test_a_small_vocabulary_has_as_many_alternatives_as_tokens),
        cmocka_unit_test(test_logprobs_of_logits_at_the_ends_of_the_floats_are_finite),
        cmocka_unit_test(test_a_logit_that_is_not_finite_makes_the_choice_invalid),
        cmocka_unit_test(test_draws_follow_the_distribution_under_every_cut),
        cmocka_unit_test(test_a_draw_depends_on_seed_and_position_only),
        cmocka_unit_test(test_penalties_change_logits_as_documented),
        cmocka_unit_test(test_bias_can_force_and_forbid),
        cmocka_unit_test(test_min_tokens_holds_back_stop_and_end_tokens),
        cmocka_unit_test(test_nothing_left_to_choose_is_invalid),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
