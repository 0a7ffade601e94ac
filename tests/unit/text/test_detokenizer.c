#include "text/detokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/prng.h"
#include "unit/text/golden.h"

static char memory[1 << 20];

/* Pushes ids in pieces of random size, checks that each piece is whole characters, and returns the
 * whole text in static memory. */
static struct bytes decode_in_pieces(const struct tokenizer *tokenizer,
                                     struct detokenizer_options options, const uint32_t *ids,
                                     size_t count, struct prng *prng) {
    struct writer text;
    writer_init(&text, memory, sizeof memory);
    struct detokenizer stream;
    detokenizer_init(&stream, tokenizer, options);
    for (size_t i = 0; i < count;) {
        size_t piece = prng_below(prng, 4);
        piece = piece > count - i ? count - i : piece;
        size_t before = text.len;
        detokenizer_push(&stream, ids + i, piece, &text);
        assert_true(utf8_is_valid((const uint8_t *)memory + before, text.len - before));
        i += piece;
    }
    size_t before = text.len;
    detokenizer_flush(&stream, &text);
    assert_true(utf8_is_valid((const uint8_t *)memory + before, text.len - before));
    assert_false(text.is_full);
    assert_true(text.len <= detokenizer_bytes_max(tokenizer, count));
    return written(&text);
}

static struct bytes wanted_text(const json_t *value, struct bytes if_null) {
    return json_is_null(value) ? if_null : json_text(value);
}

static void check_golden(const char *model, const char *golden_name) {
    static uint32_t ids[IDS_MAX];
    struct tokenizer *tokenizer = data_tokenizer(model);
    json_t *golden = data_json(golden_name);
    struct prng prng = {42};
    struct detokenizer_options prompt_options = {0};
    struct detokenizer_options exact = {.holds_byte_runs = true};
    struct detokenizer_options special = {.holds_byte_runs = true, .keeps_special = true};
    json_t *texts = json_object_get(golden, "texts");
    for (size_t i = 0; i < json_array_size(texts); i++) {
        json_t *row = json_array_get(texts, i);
        size_t count = json_ids(json_array_get(row, 1), ids);
        struct bytes wanted =
            wanted_text(json_array_get(row, 2), json_text(json_array_get(row, 0)));
        assert_text(decode_in_pieces(tokenizer, prompt_options, ids, count, &prng), wanted);
        assert_text(decode_in_pieces(tokenizer, exact, ids, count, &prng), wanted);
    }
    json_t *decodes = json_object_get(golden, "decodes");
    assert_int_equal(json_array_size(decodes), 400);
    for (size_t i = 0; i < json_array_size(decodes); i++) {
        json_t *row = json_array_get(decodes, i);
        size_t count = json_ids(json_array_get(row, 0), ids);
        struct bytes wanted = json_text(json_array_get(row, 1));
        assert_text(decode_in_pieces(tokenizer, exact, ids, count, &prng), wanted);
        struct bytes with_special = wanted_text(json_array_get(row, 2), wanted);
        assert_text(decode_in_pieces(tokenizer, special, ids, count, &prng), with_special);
    }
    json_decref(golden);
    tokenizer_destroy(tokenizer);
}

static void test_byte_fallback_text_equals_the_library_wherever_it_is_split(void **state) {
    (void)state;
    check_golden(STORIES, "golden/tokenizer_stories260k.json");
}

static void test_byte_level_text_equals_the_library_wherever_it_is_split(void **state) {
    (void)state;
    check_golden(BYTELEVEL, "golden/tokenizer_bytelevel.json");
}

/* The same files with other settings: pre-tokenizers, behaviours, patterns of the known families.
 */
static void test_variants_of_the_files_equal_the_library(void **state) {
    (void)state;
    static uint32_t ids[IDS_MAX];
    static uint32_t wanted[IDS_MAX];
    json_t *rows = data_json("golden/tokenizer_variants.json");
    assert_true(json_array_size(rows) >= 20);
    struct prng prng = {8};
    struct detokenizer_options exact = {.holds_byte_runs = true};
    for (size_t i = 0; i < json_array_size(rows); i++) {
        json_t *row = json_array_get(rows, i);
        const char *base = json_string_value(json_array_get(row, 0));
        json_t *file = data_json(strcmp(base, "stories") == 0 ? STORIES "/tokenizer.json"
                                                              : BYTELEVEL "/tokenizer.json");
        const char *path = NULL;
        json_t *value = NULL;
        json_object_foreach(json_array_get(row, 1), path, value) {
            json_set_path(file, path, json_string_value(value));
        }
        char *text = json_dumps(file, JSON_COMPACT);
        struct tokenizer *tokenizer = NULL;
        char sentence[512];
        struct writer error;
        writer_init(&error, sentence, sizeof sentence);
        if (tokenizer_create(bytes_of(text), &tokenizer, &error) != STATUS_OK) {
            fail_msg("variant %zu: %.*s", i, (int)error.len, sentence);
        }
        json_t *texts = json_array_get(row, 2);
        assert_true(json_array_size(texts) >= 100);
        for (size_t j = 0; j < json_array_size(texts); j++) {
            json_t *golden = json_array_get(texts, j);
            struct bytes input = json_text(json_array_get(golden, 0));
            size_t count = json_ids(json_array_get(golden, 1), wanted);
            struct token_buffer out = {ids, IDS_MAX, 0};
            assert_int_equal(tokenizer_encode(tokenizer, input, false, &out, NULL), STATUS_OK);
            if (out.count != count || memcmp(ids, wanted, count * sizeof *ids) != 0) {
                for (size_t k = 0; k < out.count; k++) {
                    print_message("%u ", ids[k]);
                }
                fail_msg("variant %zu, text %zu \"%.*s\": the ids differ", i, j, (int)input.len,
                         (const char *)input.data);
            }
            assert_text(decode_in_pieces(tokenizer, exact, ids, count, &prng),
                        wanted_text(json_array_get(golden, 2), input));
        }
        tokenizer_destroy(tokenizer);
        free(text);
        json_decref(file);
    }
    json_decref(rows);
}

static void test_the_five_greedy_answers_decode_to_their_text(void **state) {
    (void)state;
    static uint32_t ids[IDS_MAX];
    struct tokenizer *tokenizer = data_tokenizer(STORIES);
    json_t *golden = data_json("golden/stories260k.json");
    struct prng prng = {1};
    struct detokenizer_options options = {0};
    for (size_t i = 0; i < 5; i++) {
        json_t *row = json_array_get(golden, i);
        size_t count = json_ids(json_object_get(row, "greedy_ids"), ids);
        assert_text(decode_in_pieces(tokenizer, options, ids, count, &prng),
                    json_text(json_object_get(row, "greedy_text")));
    }
    json_decref(golden);
    tokenizer_destroy(tokenizer);
}

/* prompt + output must be one text: the output alone keeps the space that a text of its own loses.
 */
static void test_a_continuation_is_the_rest_of_the_text_behind_the_prompt(void **state) {
    (void)state;
    static uint32_t ids[IDS_MAX];
    static char whole[1 << 16];
    struct tokenizer *tokenizer = data_tokenizer(STORIES);
    json_t *golden = data_json("golden/stories260k.json");
    struct prng prng = {1};
    struct detokenizer_options alone = {0};
    struct detokenizer_options continues = {.continues_text = true};
    for (size_t i = 0; i < 5; i++) {
        json_t *row = json_array_get(golden, i);
        size_t prompt = json_ids(json_object_get(row, "prompt_ids"), ids);
        size_t count = json_ids(json_object_get(row, "greedy_ids"), ids + prompt);
        struct bytes all = decode_in_pieces(tokenizer, alone, ids, prompt + count, &prng);
        struct writer joined;
        writer_init(&joined, whole, sizeof whole);
        writer_put(&joined, all.data, all.len);
        struct bytes text = json_text(json_object_get(row, "prompt"));
        struct bytes rest = {(const uint8_t *)whole + text.len, all.len - text.len};
        assert_text(decode_in_pieces(tokenizer, continues, ids + prompt, count, &prng), rest);
    }
    assert_text(decode_in_pieces(tokenizer, continues, (const uint32_t[]){265}, 1, &prng),
                bytes_of(" the"));
    assert_text(decode_in_pieces(tokenizer, alone, (const uint32_t[]){265}, 1, &prng),
                bytes_of("the"));
    json_decref(golden);
    tokenizer_destroy(tokenizer);
}

/* Older Llama files mark <s> as normalized, so it is searched, and decoded, as "\u2581<s>". The
 * library (0.23) then no longer knows it as special and lets it show; here special tokens stay left
 * out. */
static void test_a_special_token_that_is_normalized_is_left_out_all_the_same(void **state) {
    (void)state;
    json_t *file = data_json(STORIES "/tokenizer.json");
    json_set_path(file, "added_tokens.1.normalized", "true");
    char *text = json_dumps(file, JSON_COMPACT);
    struct tokenizer *tokenizer = NULL;
    assert_int_equal(tokenizer_create(bytes_of(text), &tokenizer, NULL), STATUS_OK);
    struct prng prng = {1};
    const uint32_t ids[] = {1, 265, 1};
    assert_text(decode_in_pieces(tokenizer, (struct detokenizer_options){0}, ids, 3, &prng),
                bytes_of("the"));
    assert_text(decode_in_pieces(tokenizer, (struct detokenizer_options){.keeps_special = true},
                                 ids, 3, &prng),
                bytes_of("<s> the <s>"));
    tokenizer_destroy(tokenizer);
    free(text);
    json_decref(file);
}

#define BYTE_ID(byte) ((byte) + 3u) /* of stories260k */

static void push_bytes(struct detokenizer *stream, const char *bytes, struct writer *text) {
    for (const char *at = bytes; *at != '\0'; at++) {
        uint32_t id = BYTE_ID((uint8_t)*at);
        detokenizer_push(stream, &id, 1, text);
    }
}

static void test_a_character_comes_out_with_its_last_byte(void **state) {
    (void)state;
    struct tokenizer *tokenizer = data_tokenizer(STORIES);
    struct detokenizer stream;
    struct writer text;
    writer_init(&text, memory, sizeof memory);
    detokenizer_init(&stream, tokenizer, (struct detokenizer_options){0});
    push_bytes(&stream, "\xf0\x9f\x98", &text);
    assert_int_equal(text.len, 0);
    push_bytes(&stream, "\x80", &text);
    assert_text(written(&text), bytes_of("\xf0\x9f\x98\x80"));
    tokenizer_destroy(tokenizer);
}

static void test_a_mixed_run_is_bad_as_a_whole_only_when_runs_are_held(void **state) {
    (void)state;
    struct tokenizer *tokenizer = data_tokenizer(STORIES);
    static const char run[] = "\xe6\x97\xa5\xff\xe6\x97";
    struct detokenizer stream;
    struct writer text;
    writer_init(&text, memory, sizeof memory);
    detokenizer_init(&stream, tokenizer, (struct detokenizer_options){0});
    push_bytes(&stream, run, &text);
    detokenizer_flush(&stream, &text);
    assert_text(written(&text), bytes_of("\xe6\x97\xa5\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"));
    writer_init(&text, memory, sizeof memory);
    detokenizer_init(&stream, tokenizer, (struct detokenizer_options){.holds_byte_runs = true});
    push_bytes(&stream, run, &text);
    assert_int_equal(text.len, 0);
    detokenizer_flush(&stream, &text);
    assert_int_equal(text.len, 6 * 3);
    tokenizer_destroy(tokenizer);
}

static void test_a_held_run_longer_than_the_buffer_loses_nothing(void **state) {
    (void)state;
    struct tokenizer *tokenizer = data_tokenizer(STORIES);
    struct detokenizer stream;
    struct writer text;
    writer_init(&text, memory, sizeof memory);
    detokenizer_init(&stream, tokenizer, (struct detokenizer_options){.holds_byte_runs = true});
    for (size_t i = 0; i < 200; i++) {
        push_bytes(&stream, "\xe6\x97\xa5", &text);
    }
    uint32_t the = 265;
    detokenizer_push(&stream, &the, 1, &text);
    push_bytes(&stream, "\xc3", &text); /* a new run is held again */
    assert_int_equal(text.len, 200 * 3 + 4);
    detokenizer_flush(&stream, &text);
    assert_int_equal(text.len, 200 * 3 + 4 + 3);
    for (size_t i = 0; i < 200; i++) {
        assert_memory_equal(memory + 3 * i, "\xe6\x97\xa5", 3);
    }
    tokenizer_destroy(tokenizer);
}

static void test_ids_that_do_not_exist_add_nothing(void **state) {
    (void)state;
    struct tokenizer *tokenizer = data_tokenizer(BYTELEVEL);
    struct prng prng = {3};
    const uint32_t ids[] = {TOKEN_NONE, tokenizer_vocab_size(tokenizer), 1u << 31};
    assert_int_equal(
        decode_in_pieces(tokenizer, (struct detokenizer_options){0}, ids, 3, &prng).len, 0);
    tokenizer_destroy(tokenizer);
}

static void test_a_full_writer_says_so(void **state) {
    (void)state;
    struct tokenizer *tokenizer = data_tokenizer(STORIES);
    struct detokenizer stream;
    struct writer text;
    writer_init(&text, memory, 3);
    detokenizer_init(&stream, tokenizer, (struct detokenizer_options){.continues_text = true});
    uint32_t the = 265;
    detokenizer_push(&stream, &the, 1, &text);
    assert_true(text.is_full);
    tokenizer_destroy(tokenizer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_byte_fallback_text_equals_the_library_wherever_it_is_split),
        cmocka_unit_test(test_byte_level_text_equals_the_library_wherever_it_is_split),
        cmocka_unit_test(test_variants_of_the_files_equal_the_library),
        cmocka_unit_test(test_the_five_greedy_answers_decode_to_their_text),
        cmocka_unit_test(test_a_continuation_is_the_rest_of_the_text_behind_the_prompt),
        cmocka_unit_test(test_a_special_token_that_is_normalized_is_left_out_all_the_same),
        cmocka_unit_test(test_a_character_comes_out_with_its_last_byte),
        cmocka_unit_test(test_a_mixed_run_is_bad_as_a_whole_only_when_runs_are_held),
        cmocka_unit_test(test_a_held_run_longer_than_the_buffer_loses_nothing),
        cmocka_unit_test(test_ids_that_do_not_exist_add_nothing),
        cmocka_unit_test(test_a_full_writer_says_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
