#include "text/tokenizer.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "unit/text/golden.h"

static void assert_encodes(const struct tokenizer *tokenizer, struct bytes text, bool add_special,
                           const json_t *wanted_ids) {
    uint32_t ids[IDS_MAX];
    uint32_t wanted[IDS_MAX];
    size_t count = json_ids(wanted_ids, wanted);
    struct token_buffer out = {ids, IDS_MAX, 0};
    assert_int_equal(tokenizer_encode(tokenizer, text, add_special, &out, NULL), STATUS_OK);
    bool is_equal = out.count == count && memcmp(ids, wanted, count * sizeof *ids) == 0;
    if (!is_equal) {
        print_message("text \"%.*s\"\n", (int)text.len, (const char *)text.data);
        for (size_t i = 0; i < (count > out.count ? count : out.count); i++) {
            print_message("%d/%d ", i < out.count ? (int)ids[i] : -1,
                          i < count ? (int)wanted[i] : -1);
        }
        fail_msg("the ids (got/wanted) differ");
    }
}

static void check_golden(const char *model, const char *golden_name, size_t texts_min) {
    struct tokenizer *tokenizer = data_tokenizer(model);
    json_t *golden = data_json(golden_name);
    json_t *texts = json_object_get(golden, "texts");
    assert_true(json_array_size(texts) >= texts_min);
    for (size_t i = 0; i < json_array_size(texts); i++) {
        json_t *row = json_array_get(texts, i);
        assert_encodes(tokenizer, json_text(json_array_get(row, 0)), false, json_array_get(row, 1));
    }
    json_t *special = json_object_get(golden, "with_special");
    assert_true(json_array_size(special) > 0);
    for (size_t i = 0; i < json_array_size(special); i++) {
        json_t *row = json_array_get(special, i);
        assert_encodes(tokenizer, json_text(json_array_get(row, 0)), true, json_array_get(row, 1));
    }
    json_decref(golden);
    tokenizer_destroy(tokenizer);
}

static void test_byte_fallback_ids_equal_the_library(void **state) {
    (void)state;
    check_golden(STORIES, "golden/tokenizer_stories260k.json", 2000);
}

static void test_byte_level_ids_equal_the_library(void **state) {
    (void)state;
    check_golden(BYTELEVEL, "golden/tokenizer_bytelevel.json", 1200);
}

static void test_the_five_prompts_give_their_prompt_ids(void **state) {
    (void)state;
    struct tokenizer *tokenizer = data_tokenizer(STORIES);
    json_t *golden = data_json("golden/stories260k.json");
    assert_int_equal(json_array_size(golden), 5);
    for (size_t i = 0; i < 5; i++) {
        json_t *row = json_array_get(golden, i);
        assert_encodes(tokenizer, json_text(json_object_get(row, "prompt")), true,
                       json_object_get(row, "prompt_ids"));
    }
    json_decref(golden);
    tokenizer_destroy(tokenizer);
}

static void assert_refuses(const struct tokenizer *tokenizer, struct bytes text, size_t cap,
                           enum status wanted, const char *sentence) {
    uint32_t ids[IDS_MAX];
    char memory[256];
    struct writer error;
    writer_init(&error, memory, sizeof memory);
    struct token_buffer out = {ids, cap, 7};
    assert_int_equal(tokenizer_encode(tokenizer, text, true, &out, &error), wanted);
    assert_int_equal(out.count, 0);
    assert_text(written(&error), bytes_of(sentence));
}

static void test_bad_utf8_is_refused_with_its_byte_offset(void **state) {
    (void)state;
    static const struct {
        const char *text;
        const char *sentence;
    } rows[] = {
        {"abc\xff", "the text is not valid UTF-8 at byte 3"},
        {"\x80", "the text is not valid UTF-8 at byte 0"},
        {"h\xc3\xa9\xe6\x97", "the text is not valid UTF-8 at byte 3"},
        {"\xe6\x97\xa5\xed\xa0\x80", "the text is not valid UTF-8 at byte 3"},
        {"\xf0\x9f\x98\x80\xc0\xaf", "the text is not valid UTF-8 at byte 4"},
        {"\xf4\x90\x80\x80", "the text is not valid UTF-8 at byte 0"},
        {"a\xf8\x88\x80\x80\x80", "the text is not valid UTF-8 at byte 1"},
    };
    struct tokenizer *tokenizer = data_tokenizer(STORIES);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        assert_refuses(tokenizer, bytes_of(rows[i].text), IDS_MAX, STATUS_INVALID,
                       rows[i].sentence);
    }
    tokenizer_destroy(tokenizer);
}

static void test_more_tokens_than_fit_are_refused_and_exactly_as_many_are_not(void **state) {
    (void)state;
    struct tokenizer *tokenizer = data_tokenizer(STORIES);
    struct bytes text = bytes_of("Once upon a time"); /* 5 tokens with the first */
    for (size_t cap = 0; cap < 5; cap++) {
        char sentence[64];
        (void)snprintf(sentence, sizeof sentence, "the text has more than %zu tokens", cap);
        assert_refuses(tokenizer, text, cap, STATUS_RANGE, sentence);
    }
    uint32_t ids[5];
    struct token_buffer out = {ids, 5, 0};
    assert_int_equal(tokenizer_encode(tokenizer, text, true, &out, NULL), STATUS_OK);
    assert_int_equal(out.count, 5);
    tokenizer_destroy(tokenizer);
}

static void test_a_text_over_the_limit_is_refused(void **state) {
    (void)state;
    struct tokenizer *tokenizer = data_tokenizer(STORIES);
    size_t len = TOKENIZER_TEXT_BYTES_MAX + 1;
    uint8_t *data = malloc(len);
    assert_non_null(data);
    memset(data, 'a', len);
    uint32_t id = 0;
    struct token_buffer out = {&id, 1, 0};
    assert_int_equal(tokenizer_encode(tokenizer, (struct bytes){data, len}, false, &out, NULL),
                     STATUS_RANGE);
    free(data);
    tokenizer_destroy(tokenizer);
}

/* Work that would be quadratic in a wrong merge loop, in a wrong mark ordering, or in the regex:
 * the test's time limit is the assertion. */
static void check_long(const char *model, const char *unit, size_t bytes) {
    struct tokenizer *tokenizer = data_tokenizer(model);
    size_t unit_len = strlen(unit);
    size_t len = bytes / unit_len * unit_len;
    uint8_t *data = malloc(len);
    uint32_t *ids = malloc(len * 3 * sizeof *ids);
    assert_non_null(data);
    assert_non_null(ids);
    for (size_t i = 0; i < len; i += unit_len) {
        memcpy(data + i, unit, unit_len);
    }
    struct token_buffer out = {ids, len * 3, 0};
    assert_int_equal(tokenizer_encode(tokenizer, (struct bytes){data, len}, false, &out, NULL),
                     STATUS_OK);
    assert_true(out.count > 0);
    free(data);
    free(ids);
    tokenizer_destroy(tokenizer);
}

static void test_long_texts_of_one_pattern_take_no_quadratic_time(void **state) {
    (void)state;
    static const char *const units[] = {
        "a", " ",  "\n", "e", "the ",      " \n",          "\xcc\x81\xcc\xa7",
        "A", "'s", "1",  "<", "<|eot_id|", "\xe6\x97\xa5", "!"};
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        check_long(STORIES, units[i], 300000);
        check_long(BYTELEVEL, units[i], 300000);
    }
}

static void test_ids_know_their_bytes_and_flags(void **state) {
    (void)state;
    struct tokenizer *tokenizer = data_tokenizer(STORIES);
    assert_int_equal(tokenizer_vocab_size(tokenizer), 512);
    assert_text(tokenizer_token_bytes(tokenizer, 265), bytes_of(" the"));
    assert_text(tokenizer_token_bytes(tokenizer, 258), bytes_of("\xff"));
    assert_text(tokenizer_token_bytes(tokenizer, 1), bytes_of("<s>"));
    assert_int_equal(tokenizer_token_bytes(tokenizer, 512).len, 0);
    assert_int_equal(tokenizer_token_bytes(tokenizer, TOKEN_NONE).len, 0);
    assert_true(tokenizer_is_special(tokenizer, 2));
    assert_false(tokenizer_is_special(tokenizer, 265));
    assert_false(tokenizer_is_special(tokenizer, TOKEN_NONE));
    assert_int_equal(tokenizer_added_id(tokenizer, bytes_of("</s>")), 2);
    assert_int_equal(tokenizer_added_id(tokenizer, bytes_of("the")), TOKEN_NONE);
    tokenizer_destroy(tokenizer);
}

static void test_first_and_last_token_come_from_the_config_beside_the_file(void **state) {
    (void)state;
    struct tokenizer *stories = data_tokenizer(STORIES);
    assert_int_equal(tokenizer_bos(stories), 1);
    assert_int_equal(tokenizer_eos(stories), 2);
    tokenizer_destroy(stories);
    struct tokenizer *bytelevel = data_tokenizer(BYTELEVEL "/tokenizer.json");
    assert_int_equal(tokenizer_bos(bytelevel),
                     tokenizer_added_id(bytelevel, bytes_of("<|begin_of_text|>")));
    assert_int_equal(tokenizer_eos(bytelevel),
                     tokenizer_added_id(bytelevel, bytes_of("<|eot_id|>")));
    tokenizer_destroy(bytelevel);
}

static void test_without_a_config_the_template_gives_the_first_token_only(void **state) {
    (void)state;
    struct bytes file = data_bytes(STORIES "/tokenizer.json");
    struct tokenizer *tokenizer = NULL;
    assert_int_equal(tokenizer_create(file, &tokenizer, NULL), STATUS_OK);
    assert_int_equal(tokenizer_bos(tokenizer), 1);
    assert_int_equal(tokenizer_eos(tokenizer), TOKEN_NONE);
    tokenizer_destroy(tokenizer);
    free((void *)(uintptr_t)file.data);
}

struct shared {
    const struct tokenizer *tokenizer;
    json_t *texts;
    size_t wrong;
};

static void *encode_all(void *context) {
    struct shared *shared = context;
    static _Thread_local uint32_t ids[IDS_MAX];
    for (size_t i = 0; i < json_array_size(shared->texts); i++) {
        json_t *row = json_array_get(shared->texts, i);
        json_t *wanted = json_array_get(row, 1);
        struct token_buffer out = {ids, IDS_MAX, 0};
        struct bytes text = json_text(json_array_get(row, 0));
        bool is_equal = tokenizer_encode(shared->tokenizer, text, false, &out, NULL) == STATUS_OK &&
                        out.count == json_array_size(wanted);
        for (size_t j = 0; j < out.count && is_equal; j++) {
            is_equal = ids[j] == (uint32_t)json_integer_value(json_array_get(wanted, j));
        }
        shared->wrong += is_equal ? 0 : 1;
    }
    return NULL;
}

static void test_threads_may_share_one_tokenizer(void **state) {
    (void)state;
    struct tokenizer *tokenizer = data_tokenizer(BYTELEVEL);
    json_t *golden = data_json("golden/tokenizer_bytelevel.json");
    struct shared shared[4];
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++) {
        shared[i] = (struct shared){tokenizer, json_object_get(golden, "texts"), 0};
        assert_int_equal(pthread_create(&threads[i], NULL, encode_all, &shared[i]), 0);
    }
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(shared[i].wrong, 0);
    }
    json_decref(golden);
    tokenizer_destroy(tokenizer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_byte_fallback_ids_equal_the_library),
        cmocka_unit_test(test_byte_level_ids_equal_the_library),
        cmocka_unit_test(test_the_five_prompts_give_their_prompt_ids),
        cmocka_unit_test(test_bad_utf8_is_refused_with_its_byte_offset),
        cmocka_unit_test(test_more_tokens_than_fit_are_refused_and_exactly_as_many_are_not),
        cmocka_unit_test(test_a_text_over_the_limit_is_refused),
        cmocka_unit_test(test_long_texts_of_one_pattern_take_no_quadratic_time),
        cmocka_unit_test(test_ids_know_their_bytes_and_flags),
        cmocka_unit_test(test_first_and_last_token_come_from_the_config_beside_the_file),
        cmocka_unit_test(test_without_a_config_the_template_gives_the_first_token_only),
        cmocka_unit_test(test_threads_may_share_one_tokenizer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
