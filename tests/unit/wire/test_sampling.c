#include "wire/public.h"

#include <math.h>

#include "unit/wire/support.h"

#define SEED_DRAWN 77u

static char sentence[PUBLIC_ERROR_MAX];

/* Resolves and leaves the sentence, NUL-terminated, in `sentence`. */
static enum status resolve(const struct public_sampling *sampling,
                           const struct generation_defaults *defaults, uint32_t max_tokens,
                           struct sampling *out) {
    struct writer writer;
    writer_init(&writer, sentence, sizeof sentence - 1);
    enum status status =
        public_sampling_resolve(sampling, defaults, SEED_DRAWN, max_tokens, out, &writer);
    assert_false(writer.is_full);
    sentence[writer.len] = '\0';
    assert_int_equal(status == STATUS_OK, writer.len == 0);
    return status;
}

static void test_unset_everything_is_plain_sampling_with_the_drawn_seed(void **state) {
    (void)state;
    const struct generation_defaults defaults = {0};
    const struct public_sampling nothing = {0};
    struct sampling out;
    assert_int_equal(resolve(&nothing, &defaults, 0, &out), STATUS_OK);
    assert_true(out.seed == SEED_DRAWN);
    assert_true(out.temperature == 1.0f && out.top_p == 1.0f && out.min_p == 0.0f);
    assert_true(out.top_k == -1 && out.repetition_penalty == 1.0f);
    assert_true(out.frequency_penalty == 0.0f && out.presence_penalty == 0.0f);
    assert_true(out.stop_token_count == 0 && out.bias_count == 0 && out.min_tokens == 0);
    assert_false(out.ignore_eos);
    assert_false(sampling_needs_history(&out));
}

static void test_unset_takes_the_models_own_values(void **state) {
    (void)state;
    const struct generation_defaults defaults = {.has_temperature = true,
                                                 .temperature = 0.6f,
                                                 .has_top_p = true,
                                                 .top_p = 0.95f,
                                                 .has_top_k = true,
                                                 .top_k = 20,
                                                 .has_min_p = true,
                                                 .min_p = 0.05f,
                                                 .has_repetition_penalty = true,
                                                 .repetition_penalty = 1.05f};
    const struct public_sampling nothing = {0};
    struct sampling out;
    assert_int_equal(resolve(&nothing, &defaults, 0, &out), STATUS_OK);
    assert_true(out.temperature == 0.6f && out.top_p == 0.95f && out.top_k == 20);
    assert_true(out.min_p == 0.05f && out.repetition_penalty == 1.05f);
}

static void test_set_to_zero_is_not_unset(void **state) {
    (void)state;
    const struct generation_defaults defaults = {.has_temperature = true,
                                                 .temperature = 0.6f,
                                                 .has_top_k = true,
                                                 .top_k = 20,
                                                 .has_min_p = true,
                                                 .min_p = 0.5f};
    const struct public_sampling zeros = {
        .has_temperature = true, .has_top_k = true, .has_min_p = true, .has_seed = true};
    struct sampling out;
    assert_int_equal(resolve(&zeros, &defaults, 0, &out), STATUS_OK);
    assert_true(out.temperature == 0.0f);
    assert_int_equal(out.top_k, -1); /* 0 is off */
    assert_true(out.min_p == 0.0f);
    assert_true(out.seed == 0);
}

static void test_everything_set_comes_through(void **state) {
    (void)state;
    const struct generation_defaults defaults = {.vocab = 1000};
    const uint32_t stop_tokens[] = {5, 999};
    const struct public_bias biases[] = {{7, -100.0f}, {8, 3.5f}, {7, 100.0f}};
    const struct bytes stops[] = {{(const uint8_t *)"\n\n", 2}};
    const struct public_sampling sampling = {.has_temperature = true,
                                             .temperature = 100.0f,
                                             .has_top_p = true,
                                             .top_p = 1.0f,
                                             .has_top_k = true,
                                             .top_k = 40,
                                             .has_min_p = true,
                                             .min_p = 1.0f,
                                             .frequency_penalty = -2.0f,
                                             .presence_penalty = 2.0f,
                                             .has_repetition_penalty = true,
                                             .repetition_penalty = 100.0f,
                                             .has_seed = true,
                                             .seed = UINT64_MAX,
                                             .min_tokens = 9,
                                             .ignore_eos = true,
                                             .stop_count = 1,
                                             .stops = stops,
                                             .stop_token_count = 2,
                                             .stop_tokens = stop_tokens,
                                             .bias_count = 3,
                                             .biases = biases};
    struct sampling out;
    assert_int_equal(resolve(&sampling, &defaults, 9, &out), STATUS_OK);
    assert_true(out.temperature == 100.0f && out.top_p == 1.0f && out.min_p == 1.0f);
    assert_true(out.top_k == 40 && out.seed == UINT64_MAX && out.min_tokens == 9);
    assert_true(out.frequency_penalty == -2.0f && out.presence_penalty == 2.0f);
    assert_true(out.repetition_penalty == 100.0f && out.ignore_eos);
    assert_int_equal(out.stop_token_count, 2);
    assert_int_equal(out.stop_tokens[1], 999);
    assert_int_equal(out.bias_count, 2); /* the key 7 counts once, its last value wins */
    assert_true(out.biases[0].token == 7 && out.biases[0].bias == 100.0f);
    assert_true(out.biases[1].token == 8 && out.biases[1].bias == 3.5f);
}

/* One wrong number each, and what the sentence must say: field, value, what is accepted. */
struct wrong {
    size_t has; /* offset of the flag; SIZE_MAX = none */
    size_t at;
    float value;
    const char *says;
    const char *also;
};

static void test_numbers_out_of_range_are_refused_by_name_value_and_range(void **state) {
    (void)state;
#define HAS(field) offsetof(struct public_sampling, has_##field)
#define AT(field)  offsetof(struct public_sampling, field)
    const struct wrong wrongs[] = {
        {HAS(temperature), AT(temperature), -1.0f, "temperature is -1:", "0 (greedy) to 100"},
        {HAS(temperature), AT(temperature), 100.5f, "temperature is 100.5:", "0 (greedy) to 100"},
        {HAS(temperature), AT(temperature), NAN, "temperature is nan:", "0 (greedy) to 100"},
        {HAS(temperature), AT(temperature), INFINITY, "temperature is inf:", "to 100"},
        {HAS(top_p), AT(top_p), 0.0f, "top_p is 0:", "above 0, at most 1"},
        {HAS(top_p), AT(top_p), -0.25f, "top_p is -0.25:", "above 0, at most 1"},
        {HAS(top_p), AT(top_p), 1.5f, "top_p is 1.5:", "above 0, at most 1"},
        {HAS(top_p), AT(top_p), NAN, "top_p is nan:", "above 0, at most 1"},
        {HAS(min_p), AT(min_p), -0.5f, "min_p is -0.5:", "from 0 (off) to 1"},
        {HAS(min_p), AT(min_p), 2.0f, "min_p is 2:", "from 0 (off) to 1"},
        {HAS(min_p), AT(min_p), NAN, "min_p is nan:", "from 0 (off) to 1"},
        {SIZE_MAX, AT(frequency_penalty), 2.5f, "frequency_penalty is 2.5:", "-2 to 2"},
        {SIZE_MAX, AT(frequency_penalty), NAN, "frequency_penalty is nan:", "-2 to 2"},
        {SIZE_MAX, AT(presence_penalty), -2.5f, "presence_penalty is -2.5:", "-2 to 2"},
        {SIZE_MAX, AT(presence_penalty), -INFINITY, "presence_penalty is -inf:", "-2 to 2"},
        {HAS(repetition_penalty), AT(repetition_penalty), 0.0f,
         "repetition_penalty is 0:", "above 0"},
        {HAS(repetition_penalty), AT(repetition_penalty), -1.0f,
         "repetition_penalty is -1:", "above 0"},
        {HAS(repetition_penalty), AT(repetition_penalty), NAN,
         "repetition_penalty is nan:", "at most 100"},
    };
#undef HAS
#undef AT
    const struct generation_defaults defaults = {0};
    for (size_t i = 0; i < sizeof wrongs / sizeof wrongs[0]; i++) {
        struct public_sampling sampling = {0};
        if (wrongs[i].has != SIZE_MAX) {
            *((bool *)&sampling + wrongs[i].has) = true;
        }
        memcpy((char *)&sampling + wrongs[i].at, &wrongs[i].value, sizeof(float));
        struct sampling out;
        memset(&out, 0x5a, sizeof out);
        assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_INVALID);
        assert_non_null(strstr(sentence, wrongs[i].says));
        assert_non_null(strstr(sentence, wrongs[i].also));
        assert_int_equal(((unsigned char *)&out)[0], 0x5a); /* untouched */
    }
}

static void test_logprobs_distinguish_unset_from_zero(void **state) {
    (void)state;
    const struct generation_defaults defaults = {0};
    struct public_sampling sampling = {0};
    struct sampling out;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_OK);
    assert_int_equal(out.logprobs, 0);
    sampling.has_logprobs = true;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_OK);
    assert_int_equal(out.logprobs, 1);
    sampling.logprobs = LOGPROBS_TOP_MAX;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_OK);
    assert_int_equal(out.logprobs, 1 + LOGPROBS_TOP_MAX);
    sampling.logprobs = 21;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_INVALID);
    assert_string_equal(sentence,
                        "logprobs is 21: it must be at most 20, the alternatives of each token");
}

static void test_top_k_below_minus_one_is_refused(void **state) {
    (void)state;
    const struct generation_defaults defaults = {0};
    const struct public_sampling sampling = {.has_top_k = true, .top_k = -2};
    struct sampling out;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_INVALID);
    assert_non_null(strstr(sentence, "top_k is -2:"));
}

static void test_more_minimum_than_maximum_tokens_is_refused(void **state) {
    (void)state;
    const struct generation_defaults defaults = {0};
    const struct public_sampling sampling = {.min_tokens = 5};
    struct sampling out;
    assert_int_equal(resolve(&sampling, &defaults, 4, &out), STATUS_INVALID);
    assert_string_equal(sentence, "min_tokens is 5: it must be at most max_tokens, which is 4");
    assert_int_equal(resolve(&sampling, &defaults, 5, &out), STATUS_OK);
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_OK); /* not set */
}

static void test_stop_strings_are_bounded_not_empty_and_text(void **state) {
    (void)state;
    const struct generation_defaults defaults = {0};
    struct bytes stops[PUBLIC_STOPS_MAX + 1];
    for (size_t i = 0; i <= PUBLIC_STOPS_MAX; i++) {
        stops[i] = (struct bytes){(const uint8_t *)"stop", 4};
    }
    struct public_sampling sampling = {.stop_count = PUBLIC_STOPS_MAX, .stops = stops};
    struct sampling out;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_OK);
    sampling.stop_count++;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_INVALID);
    assert_string_equal(sentence, "stop has 17 strings: at most 16 are accepted");
    sampling.stop_count = 3;
    stops[1].len = 0;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_INVALID);
    assert_non_null(strstr(sentence, "stop[1] is empty"));
    stops[1] = (struct bytes){(const uint8_t *)"\xff", 1};
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_INVALID);
    assert_non_null(strstr(sentence, "stop[1] is not valid UTF-8"));
    static uint8_t long_text[PUBLIC_STOP_BYTES_MAX];
    memset(long_text, 'x', sizeof long_text);
    stops[1] = (struct bytes){long_text, sizeof long_text - 8};
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_OK);
    stops[1].len++;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_INVALID);
    assert_string_equal(sentence, "stop has 1025 bytes in all: at most 1024 are accepted");
}

static void test_stop_tokens_are_bounded_and_of_the_vocabulary(void **state) {
    (void)state;
    const uint32_t tokens[SAMPLING_STOP_TOKENS_MAX + 1] = {0, 100};
    struct generation_defaults defaults = {.vocab = 100};
    struct public_sampling sampling = {.stop_token_count = 2, .stop_tokens = tokens};
    struct sampling out;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_INVALID);
    assert_string_equal(sentence, "stop_token_ids[1] is 100: it must be below 100, the model's "
                                  "vocabulary size");
    defaults.vocab = 0; /* not known: not checked */
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_OK);
    sampling.stop_token_count = SAMPLING_STOP_TOKENS_MAX;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_OK);
    sampling.stop_token_count++;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_INVALID);
    assert_string_equal(sentence, "stop_token_ids has 17 ids: at most 16 are accepted");
}

static void test_biases_are_bounded_finite_and_of_the_vocabulary(void **state) {
    (void)state;
    struct public_bias biases[SAMPLING_BIAS_MAX + 1];
    for (uint32_t i = 0; i <= SAMPLING_BIAS_MAX; i++) {
        biases[i] = (struct public_bias){i, 1.0f};
    }
    const struct generation_defaults defaults = {.vocab = 80};
    struct public_sampling sampling = {.bias_count = SAMPLING_BIAS_MAX, .biases = biases};
    struct sampling out;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_OK);
    assert_int_equal(out.bias_count, SAMPLING_BIAS_MAX);
    sampling.bias_count++;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_INVALID);
    assert_string_equal(sentence, "logit_bias has 65 entries: at most 64 are accepted");
    sampling.bias_count = 4;
    biases[3].bias = NAN;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_INVALID);
    assert_non_null(strstr(sentence, "logit_bias of token 3 is nan:"));
    biases[3].bias = -100.5f;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_INVALID);
    assert_non_null(strstr(sentence, "-100 to 100"));
    biases[3] = (struct public_bias){80, 0.0f};
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_INVALID);
    assert_non_null(strstr(sentence, "logit_bias names token 80: it must be below 80"));
}

static void test_a_wrong_default_of_the_model_is_named_and_can_be_overridden(void **state) {
    (void)state;
    const struct generation_defaults defaults = {.has_top_p = true, .top_p = 7.0f};
    struct public_sampling sampling = {0};
    struct sampling out;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_INVALID);
    assert_non_null(strstr(sentence, "top_p is 7 in the model's generation_config.json"));
    sampling.has_top_p = true;
    sampling.top_p = 0.5f;
    assert_int_equal(resolve(&sampling, &defaults, 0, &out), STATUS_OK);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unset_everything_is_plain_sampling_with_the_drawn_seed),
        cmocka_unit_test(test_unset_takes_the_models_own_values),
        cmocka_unit_test(test_set_to_zero_is_not_unset),
        cmocka_unit_test(test_everything_set_comes_through),
        cmocka_unit_test(test_numbers_out_of_range_are_refused_by_name_value_and_range),
        cmocka_unit_test(test_logprobs_distinguish_unset_from_zero),
        cmocka_unit_test(test_top_k_below_minus_one_is_refused),
        cmocka_unit_test(test_more_minimum_than_maximum_tokens_is_refused),
        cmocka_unit_test(test_stop_strings_are_bounded_not_empty_and_text),
        cmocka_unit_test(test_stop_tokens_are_bounded_and_of_the_vocabulary),
        cmocka_unit_test(test_biases_are_bounded_finite_and_of_the_vocabulary),
        cmocka_unit_test(test_a_wrong_default_of_the_model_is_named_and_can_be_overridden),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
