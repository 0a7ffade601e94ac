#include "text/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/prng.h"
#include "unit/text/golden.h"

static enum status load(const json_t *json, struct tokenizer **out, struct writer *error) {
    char *text = json_dumps(json, JSON_COMPACT | JSON_ENCODE_ANY);
    assert_non_null(text);
    enum status status = tokenizer_create(bytes_of(text), out, error);
    free(text);
    return status;
}

static void check_change(const char *model, const char *path, const char *value, enum status wanted,
                         const char *sentence) {
    char name[256];
    char memory[512];
    (void)snprintf(name, sizeof name, "%s/tokenizer.json", model);
    json_t *json = data_json(name);
    struct writer error;
    struct tokenizer *tokenizer = NULL;
    json_set_path(json, path, value);
    writer_init(&error, memory, sizeof memory);
    enum status status = load(json, &tokenizer, &error);
    json_decref(json);
    tokenizer_destroy(tokenizer);
    if (status != wanted) {
        fail_msg("%s = %s: status %s, wanted %s (%.*s)", path, value, status_name(status),
                 status_name(wanted), (int)error.len, memory);
    }
    assert_text(written(&error), bytes_of(sentence));
}

static void test_what_is_not_served_is_refused_by_name(void **state) {
    (void)state;
    static const struct {
        const char *model, *path, *value, *sentence;
    } rows[] = {
        {STORIES, "truncation", "{\"max_length\":5}",
         "tokenizer.json sets \"truncation\", which is not supported; set it to null"},
        {STORIES, "padding", "{}",
         "tokenizer.json sets \"padding\", which is not supported; set it to null"},
        {STORIES, "surprise", "1",
         "tokenizer.json has the key \"surprise\", which is not supported"},
        {STORIES, "model.type", "\"WordPiece\"",
         "the model is of type \"WordPiece\", which is not supported"},
        {STORIES, "model.dropout", "0.1",
         "the BPE model has a \"dropout\", which is not supported"},
        {STORIES, "model.continuing_subword_prefix", "\"##\"",
         "the BPE model has a \"continuing_subword_prefix\", which is not supported"},
        {STORIES, "model.end_of_word_suffix", "\"</w>\"",
         "the BPE model has a \"end_of_word_suffix\", which is not supported"},
        {STORIES, "model.byte_fallback", "false",
         "the BPE model has neither a ByteLevel pre-tokenizer nor \"byte_fallback\", which is not "
         "supported"},
        {STORIES, "added_tokens.1.lstrip", "true",
         "the added token \"<s>\" has \"lstrip\", which is not supported"},
        {STORIES, "added_tokens.1.rstrip", "true",
         "the added token \"<s>\" has \"rstrip\", which is not supported"},
        {STORIES, "added_tokens.2.single_word", "true",
         "the added token \"</s>\" has \"single_word\", which is not supported"},
        {STORIES, "normalizer", "{\"type\":\"Lowercase\"}",
         "the normalizer is of type \"Lowercase\", which is not supported"},
        {STORIES, "normalizer.normalizers.0", "{\"type\":\"Sequence\",\"normalizers\":[]}",
         "the normalizer is of type \"Sequence\", which is not supported"},
        {STORIES, "normalizer.normalizers.1.pattern", "{\"Regex\":\" +\"}",
         "the Replace normalizer replaces a regex, which is not supported"},
        {STORIES, "pre_tokenizer", "{\"type\":\"Whitespace\"}",
         "the pre-tokenizer is of type \"Whitespace\", which is not supported"},
        {STORIES, "post_processor", "{\"type\":\"BertProcessing\"}",
         "the post-processor is of type \"BertProcessing\", which is not supported"},
        {STORIES, "decoder", "{\"type\":\"WordPiece\"}",
         "the decoder is of type \"WordPiece\", which is not supported"},
        {STORIES, "decoder", "null",
         "there is no decoder (tokens joined by spaces), which is not supported"},
        {STORIES, "decoder.decoders.0.content", "\"four\"",
         "the Replace decoder makes texts longer, which is not supported"},
        {STORIES, "decoder.decoders.3.stop", "1",
         "the Strip decoder takes away something else than up to 16 characters at the start, which "
         "is not supported"},
        {STORIES, "decoder.decoders.2", "{\"type\":\"ByteFallback\"}",
         "the decoder has ByteFallback out of the order Replace, ByteFallback, Fuse, Strip, which "
         "is not supported"},
        {BYTELEVEL, "pre_tokenizer.pretokenizers.0", "{\"type\":\"ByteLevel\"}",
         "the pre-tokenizer has a step behind ByteLevel, which is not supported"},
        {BYTELEVEL, "pre_tokenizer.pretokenizers.0.behavior", "\"Contiguous\"",
         "the Split pre-tokenizer has the behavior \"Contiguous\", which is not supported"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        check_change(rows[i].model, rows[i].path, rows[i].value, STATUS_UNSUPPORTED,
                     rows[i].sentence);
    }
}

static void test_patterns_that_mean_something_else_in_pcre_are_refused_by_name(void **state) {
    (void)state;
    static const struct {
        const char *pattern, *what;
    } rows[] = {
        {"\\\\w+", "the escape \\w"},
        {"a\\\\b", "the escape \\b"},
        {"(a)\\\\1", "the escape \\1"},
        {"[[a-z]x]", "a class inside a class"},
        {"[a-z&&b]", "&& (intersection of classes)"},
        {"^a", "^"},
        {"a$", "$"},
        {"(?<n>a)", "a (?...) group other than (?: (?i: (?= (?! (?<= (?<! (?>"},
        {"(?R)", "a (?...) group other than (?: (?i: (?= (?! (?<= (?<! (?>"},
        {"(*LIMIT_MATCH=1)a", "(*...)"},
        {"a{,3}", "{ that is not {n}, {n,} or {n,m}"},
        {"a{2}+", "+ or ? behind {n,m}"},
        {"\\\\x80", "a character code of this form"},
        {"[]a]", "] as the first member of a class"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char value[128];
        char start[160];
        char memory[512];
        json_t *json = data_json(BYTELEVEL "/tokenizer.json");
        struct writer error;
        struct tokenizer *tokenizer = NULL;
        (void)snprintf(value, sizeof value, "{\"Regex\":\"%s\"}", rows[i].pattern);
        json_set_path(json, "pre_tokenizer.pretokenizers.0.pattern", value);
        writer_init(&error, memory, sizeof memory);
        assert_int_equal(load(json, &tokenizer, &error), STATUS_UNSUPPORTED);
        json_decref(json);
        int len = snprintf(start, sizeof start, "the split pattern uses %s at byte ", rows[i].what);
        error.len = error.len > (size_t)len ? (size_t)len : error.len;
        assert_text(written(&error), bytes_of(start));
    }
}

static void test_files_that_contradict_themselves_are_refused_with_the_place(void **state) {
    (void)state;
    static const struct {
        const char *model, *path, *value;
        enum status status;
        const char *sentence;
    } rows[] = {
        {STORIES, "model.merges.3", "\"zz q\"", STATUS_CORRUPT,
         "merge 3 needs the token \"zz\", which is not in the vocabulary"},
        {STORIES, "model.merges.3", "\"z q\"", STATUS_CORRUPT,
         "merge 3 needs the token \"zq\", which is not in the vocabulary"},
        {STORIES, "model.merges.3", "\"h e\"", STATUS_CORRUPT,
         "merge 3 (\"h\" and \"e\") stands in the list twice"},
        {STORIES, "model.merges.3", "\"he\"", STATUS_CORRUPT,
         "merge 3 is neither \"left right\" nor [\"left\", \"right\"]"},
        {STORIES, "model.merges.3", "[\"h\",\"e\",\"r\"]", STATUS_CORRUPT,
         "merge 3 is neither \"left right\" nor [\"left\", \"right\"]"},
        /* The only way to a merge that makes what it was made of: a token of no text. */
        {STORIES, "model.merges.3", "[\"\",\"h\"]", STATUS_CORRUPT,
         "merge 3 needs the token \"\", which is not in the vocabulary"},
        {STORIES, "model.vocab.", "300", STATUS_CORRUPT, "token 300 of the vocabulary is empty"},
        {STORIES, "model.merges", "{}", STATUS_CORRUPT, "the model has no list \"merges\""},
        {STORIES, "model.vocab", "{}", STATUS_CORRUPT, "the model has no \"vocab\""},
        {STORIES, "model.vocab.he", "261", STATUS_CORRUPT,
         "tokens \"he\" and \"\u2581a\" have the same id 261"},
        {STORIES, "model.vocab.he", "-1", STATUS_RANGE,
         "token \"he\" has an id that is not an integer below 4194304"},
        {STORIES, "model.vocab.he", "4194304", STATUS_RANGE,
         "token \"he\" has an id that is not an integer below 4194304"},
        {STORIES, "model.vocab.he", "1.5", STATUS_RANGE,
         "token \"he\" has an id that is not an integer below 4194304"},
        {STORIES, "added_tokens.1.id", "260", STATUS_CORRUPT,
         "the added token \"<s>\" has id 260, against the vocabulary"},
        {STORIES, "added_tokens.1.content", "\"<new>\"", STATUS_CORRUPT,
         "the added token \"<new>\" has id 1, against the vocabulary"},
        {STORIES, "added_tokens.1.content", "\"\"", STATUS_RANGE,
         "added token number 1 has 0 bytes, not 1 to 256"},
        {STORIES, "added_tokens.1", "{\"id\":0,\"content\":\"<unk>\"}", STATUS_CORRUPT,
         "two added tokens have the same id 0 or the same text"},
        {STORIES, "added_tokens.1", "7", STATUS_CORRUPT,
         "added token number 1: \"content\" is missing or not a string"},
        {STORIES, "post_processor.special_tokens.<s>.ids.0", "600", STATUS_CORRUPT,
         "the template's token \"<s>\" has id 600, which does not exist"},
        {STORIES, "post_processor.special_tokens", "{}", STATUS_CORRUPT,
         "the template uses \"<s>\", which its \"special_tokens\" do not give"},
        {STORIES, "post_processor.single", "[]", STATUS_CORRUPT,
         "the template's \"single\" does not have the sequence A exactly once"},
        {STORIES, "normalizer.normalizers.0.prepend", "3", STATUS_CORRUPT,
         "the Prepend normalizer: \"prepend\" is missing or not a string"},
        {STORIES, "normalizer",
         "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Replace\",\"pattern\":{\"String\":\"<"
         "s>\"},"
         "\"content\":\"\"}]}",
         STATUS_OK, ""},
        {STORIES, "added_tokens.1.normalized", "true", STATUS_OK, ""},
        {STORIES, "model.fuse_unk", "true", STATUS_OK, ""},
        {BYTELEVEL, "pre_tokenizer.pretokenizers.0.pattern", "{\"Regex\":\"(a\"}", STATUS_CORRUPT,
         "the split pattern does not compile: missing closing parenthesis"},
        {BYTELEVEL, "pre_tokenizer.pretokenizers.0.pattern", "{\"Regex\":\"\\\\p{Klingon}\"}",
         STATUS_CORRUPT, "the split pattern does not compile: unknown property after \\P or \\p"},
        {BYTELEVEL, "pre_tokenizer.pretokenizers.0.pattern", "{\"Regex\":\"a*\"}",
         STATUS_UNSUPPORTED, "the split pattern can match an empty text, which is not supported"},
        {BYTELEVEL, "pre_tokenizer.pretokenizers.0.pattern", "[]", STATUS_CORRUPT,
         "the Split pre-tokenizer: \"pattern\" is not {\"String\": ...} or {\"Regex\": ...}"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        check_change(rows[i].model, rows[i].path, rows[i].value, rows[i].status, rows[i].sentence);
    }
}

static void test_a_vocabulary_with_a_hole_in_its_bytes_is_refused(void **state) {
    (void)state;
    static const struct {
        const char *model, *token, *sentence;
    } rows[] = {
        {STORIES, "<0x41>", "the model has \"byte_fallback\" but no token <0x41>"},
        {BYTELEVEL, "!", "the byte-level vocabulary has no token for byte 0x21"},
    };
    for (size_t i = 0; i < 2; i++) {
        char name[256];
        char memory[512];
        (void)snprintf(name, sizeof name, "%s/tokenizer.json", rows[i].model);
        json_t *json = data_json(name);
        struct writer error;
        struct tokenizer *tokenizer = NULL;
        json_t *model = json_object_get(json, "model");
        assert_int_equal(json_object_del(json_object_get(model, "vocab"), rows[i].token), 0);
        assert_int_equal(json_array_clear(json_object_get(model, "merges")), 0);
        writer_init(&error, memory, sizeof memory);
        assert_int_equal(load(json, &tokenizer, &error), STATUS_CORRUPT);
        assert_text(written(&error), bytes_of(rows[i].sentence));
        json_decref(json);
    }
}

static void test_a_byte_without_a_token_is_left_out_as_in_the_library(void **state) {
    (void)state;
    json_t *json = data_json(BYTELEVEL "/tokenizer.json");
    struct tokenizer *tokenizer = NULL;
    json_t *vocab = json_object_get(json_object_get(json, "model"), "vocab");
    assert_int_equal(json_object_del(vocab, "\u0104"), 0); /* how byte 0x04 is written */
    assert_int_equal(load(json, &tokenizer, NULL), STATUS_OK);
    uint32_t ids[8];
    struct token_buffer out = {ids, 8, 0};
    assert_int_equal(tokenizer_encode(tokenizer, bytes_of("a\004b\004\004"), false, &out, NULL),
                     STATUS_OK);
    assert_int_equal(out.count, 2);
    assert_int_equal(ids[0], json_integer_value(json_object_get(vocab, "a")));
    assert_int_equal(ids[1], json_integer_value(json_object_get(vocab, "b")));
    tokenizer_destroy(tokenizer);
    json_decref(json);
}

static void test_an_added_token_that_normalizes_to_nothing_or_to_much_is_refused(void **state) {
    (void)state;
    static const struct {
        const char *content, *sentence;
    } rows[] = {
        {"", "the added token \"<s>\" has 0 bytes once normalized, not 1 to 1024"},
        {"<s><s><s><s><s><s><s><s>",
         "the added token \"<s>\" has 1536 bytes once normalized, not 1 to 1024"},
    };
    for (size_t i = 0; i < 2; i++) {
        char step[256];
        char value[1024];
        char memory[512];
        json_t *json = data_json(STORIES "/tokenizer.json");
        struct writer error;
        struct tokenizer *tokenizer = NULL;
        (void)snprintf(step, sizeof step,
                       "{\"type\":\"Replace\",\"pattern\":{\"String\":\"<s>\"},\"content\":\"%s\"}",
                       rows[i].content);
        (void)snprintf(value, sizeof value, "{\"type\":\"Sequence\",\"normalizers\":[%s,%s,%s]}",
                       step, step, step);
        json_set_path(json, "normalizer", value);
        json_set_path(json, "added_tokens.1.normalized", "true");
        writer_init(&error, memory, sizeof memory);
        assert_int_equal(load(json, &tokenizer, &error), STATUS_RANGE);
        assert_text(written(&error), bytes_of(rows[i].sentence));
        json_decref(json);
    }
}

static void test_a_huge_pattern_is_refused(void **state) {
    (void)state;
    json_t *json = data_json(BYTELEVEL "/tokenizer.json");
    size_t len = 1 << 20;
    char *pattern = malloc(len);
    assert_non_null(pattern);
    memset(pattern, '(', len);
    json_t *split =
        json_array_get(json_object_get(json_object_get(json, "pre_tokenizer"), "pretokenizers"), 0);
    struct tokenizer *tokenizer = NULL;
    static const size_t lens[] = {1 << 20, 4097, 4096, 33};
    static const enum status wanted[] = {STATUS_RANGE, STATUS_RANGE, STATUS_CORRUPT,
                                         STATUS_CORRUPT};
    for (size_t i = 0; i < 4; i++) {
        json_object_set_new(json_object_get(split, "pattern"), "Regex",
                            json_stringn(pattern, lens[i]));
        assert_int_equal(load(json, &tokenizer, NULL), wanted[i]);
    }
    free(pattern);
    json_decref(json);
}

static void test_a_pattern_that_backtracks_without_end_costs_only_its_text(void **state) {
    (void)state;
    json_t *json = data_json(BYTELEVEL "/tokenizer.json");
    struct tokenizer *tokenizer = NULL;
    json_set_path(json, "pre_tokenizer.pretokenizers.0.pattern", "{\"Regex\":\"(?:a+)+b|x\"}");
    assert_int_equal(load(json, &tokenizer, NULL), STATUS_OK);
    json_decref(json);
    uint32_t ids[128];
    char memory[256];
    struct writer error;
    writer_init(&error, memory, sizeof memory);
    struct token_buffer out = {ids, 128, 0};
    struct bytes hard = bytes_of("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaac b");
    assert_int_equal(tokenizer_encode(tokenizer, hard, false, &out, &error), STATUS_TIMEOUT);
    assert_text(
        written(&error),
        bytes_of("the text takes the tokenizer's split pattern more steps than allowed: break "
                 "up its long runs of similar characters"));
    assert_int_equal(tokenizer_encode(tokenizer, bytes_of("aab"), false, &out, NULL), STATUS_OK);
    tokenizer_destroy(tokenizer);
}

/* No single match takes many steps, so a limit for each bounds nothing: this text would take an
 * hour. */
static void test_a_text_of_many_hard_places_is_refused_soon(void **state) {
    (void)state;
    json_t *json = data_json(BYTELEVEL "/tokenizer.json");
    struct tokenizer *tokenizer = NULL;
    json_set_path(json, "pre_tokenizer.pretokenizers.0.pattern", "{\"Regex\":\"a*a*a*b|[^x]\"}");
    assert_int_equal(load(json, &tokenizer, NULL), STATUS_OK);
    json_decref(json);
    size_t len = TOKENIZER_TEXT_BYTES_MAX;
    uint8_t *text = malloc(len);
    uint32_t *ids = malloc(len * sizeof(uint32_t));
    assert_true(text != NULL && ids != NULL);
    for (size_t i = 0; i < len; i++) {
        text[i] = i % 301 == 300 ? 'c' : 'a';
    }
    char memory[256];
    struct writer error;
    writer_init(&error, memory, sizeof memory);
    struct token_buffer out = {ids, len, 0};
    assert_int_equal(tokenizer_encode(tokenizer, (struct bytes){text, len}, false, &out, &error),
                     STATUS_TIMEOUT);
    assert_text(
        written(&error),
        bytes_of("the text takes the tokenizer's split pattern more steps than allowed: break "
                 "up its long runs of similar characters"));
    assert_int_equal(tokenizer_encode(tokenizer, (struct bytes){text, 301}, false, &out, NULL),
                     STATUS_OK);
    assert_int_equal(out.count, 301);
    tokenizer_destroy(tokenizer);
    free(ids);
    free(text);
}

/* Where a match cannot start, however many steps it is given, the search goes on behind it. */
static void test_hard_places_change_nothing_in_what_is_found(void **state) {
    (void)state;
    json_t *json = data_json(BYTELEVEL "/tokenizer.json");
    struct tokenizer *tokenizer = NULL;
    json_set_path(json, "pre_tokenizer.pretokenizers.0",
                  "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(?:a|aa)+bd|e+\"},"
                  "\"behavior\":\"Removed\",\"invert\":false}");
    assert_int_equal(load(json, &tokenizer, NULL), STATUS_OK);
    json_decref(json);
    static const struct {
        const char *text, *kept[3]; /* what is left, piece by piece */
    } rows[] = {{"aaaaaaaaaaaaaaaaaabeeexee\xc3\xa9", {"aaaaaaaaaaaaaaaaaab", "x", "\xc3\xa9"}},
                {"eaaaaaaaaaaaaaaaaaabd\xc3\xa9", {"\xc3\xa9", "", ""}},
                {"\xc3\xa9"
                 "aaaaaaaaaaaaaaaaaaaab\xc3\xa9"
                 "aaaaaaaaaaaaaaaaaabdx",
                 {"\xc3\xa9"
                  "aaaaaaaaaaaaaaaaaaaab\xc3\xa9",
                  "x", ""}}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        uint32_t ids[64];
        uint32_t wanted[64];
        size_t count = 0;
        struct token_buffer out = {ids, 64, 0};
        for (size_t k = 0; k < 3; k++) {
            struct token_buffer part = {wanted + count, 64 - count, 0};
            assert_int_equal(
                tokenizer_encode(tokenizer, bytes_of(rows[i].kept[k]), false, &part, NULL),
                STATUS_OK);
            count += part.count;
        }
        assert_int_equal(tokenizer_encode(tokenizer, bytes_of(rows[i].text), false, &out, NULL),
                         STATUS_OK);
        assert_int_equal(out.count, count);
        assert_memory_equal(ids, wanted, count * sizeof(uint32_t));
    }
    tokenizer_destroy(tokenizer);
}

static void test_every_truncation_is_refused(void **state) {
    (void)state;
    static const char *const models[] = {STORIES "/tokenizer.json", BYTELEVEL "/tokenizer.json"};
    for (size_t i = 0; i < 2; i++) {
        struct bytes file = data_bytes(models[i]);
        for (size_t len = 0; len + 2 < file.len; len += len < 200 ? 1 : 97) {
            struct tokenizer *tokenizer = NULL;
            char *cut = malloc(len + 1); /* its own block: reading past it is seen */
            memcpy(cut, file.data, len);
            assert_int_equal(
                tokenizer_create((struct bytes){(uint8_t *)cut, len}, &tokenizer, NULL),
                STATUS_CORRUPT);
            free(cut);
        }
        free((void *)(uintptr_t)file.data);
    }
}

static void test_deep_nesting_and_double_keys_are_refused(void **state) {
    (void)state;
    size_t len = 1 << 20;
    uint8_t *deep = malloc(len);
    assert_non_null(deep);
    memset(deep, '[', len);
    struct tokenizer *tokenizer = NULL;
    assert_int_equal(tokenizer_create((struct bytes){deep, len}, &tokenizer, NULL), STATUS_CORRUPT);
    free(deep);
    assert_int_equal(
        tokenizer_create(bytes_of("{\"model\":null,\"model\":null}"), &tokenizer, NULL),
        STATUS_CORRUPT);
    assert_int_equal(tokenizer_create(bytes_of("[]"), &tokenizer, NULL), STATUS_CORRUPT);
    assert_int_equal(tokenizer_create((struct bytes){0}, &tokenizer, NULL), STATUS_CORRUPT);
    assert_null(tokenizer);
}

/* Whatever loads in spite of its damage must also encode and name its tokens without harm. */
static void exercise(struct tokenizer *tokenizer) {
    static const char *const texts[] = {"", "Once upon <s>a time", "日本語 ça va? 12345  \n\n x",
                                        "<|eot_id|><tool_call>'s nai\xcc\x88ve tag"};
    static uint32_t ids[IDS_MAX];
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        struct token_buffer out = {ids, IDS_MAX, 0};
        enum status status = tokenizer_encode(tokenizer, bytes_of(texts[i]), true, &out, NULL);
        assert_true(status == STATUS_OK || status == STATUS_RANGE);
        for (size_t j = 0; j < out.count; j++) {
            assert_true(ids[j] < tokenizer_vocab_size(tokenizer));
        }
    }
}

static void try_load(const uint8_t *data, size_t len, size_t *loaded) {
    char memory[512];
    struct writer error;
    struct tokenizer *tokenizer = NULL;
    writer_init(&error, memory, sizeof memory);
    enum status status = tokenizer_create((struct bytes){data, len}, &tokenizer, &error);
    if (status == STATUS_OK) {
        exercise(tokenizer);
        (*loaded)++;
    } else {
        assert_null(tokenizer);
        assert_true(error.len > 0);
        assert_null(memchr(memory, '\n', error.len));
    }
    tokenizer_destroy(tokenizer);
}

static void test_files_with_random_bytes_changed_never_do_harm(void **state) {
    (void)state;
    static const char *const models[] = {STORIES "/tokenizer.json", BYTELEVEL "/tokenizer.json"};
    struct prng prng = {11};
    size_t loaded = 0;
    for (size_t i = 0; i < 2; i++) {
        struct bytes file = data_bytes(models[i]);
        uint8_t *copy = malloc(file.len);
        assert_non_null(copy);
        for (int round = 0; round < 400; round++) {
            memcpy(copy, file.data, file.len);
            for (uint32_t n = 1 + prng_below(&prng, 3); n > 0; n--) {
                static const char likely[] = "\"{}[]:,0123456789ae\\ \xe2\x80";
                uint32_t at = prng_below(&prng, (uint32_t)file.len);
                copy[at] = prng_below(&prng, 2) == 0
                               ? (uint8_t)prng_below(&prng, 256)
                               : (uint8_t)likely[prng_below(&prng, sizeof likely - 1)];
            }
            try_load(copy, file.len, &loaded);
        }
        free(copy);
        free((void *)(uintptr_t)file.data);
    }
    assert_true(loaded > 0); /* some damage is harmless: then the rest of the path was tried, too */
}

/* A random place of the tree gets a random other value. */
static void damage(json_t *root, struct prng *prng) {
    json_t *at = root;
    for (;;) {
        size_t size = json_is_array(at) ? json_array_size(at) : json_object_size(at);
        if (size == 0) {
            return;
        }
        size_t place = prng_below(prng, (uint32_t)size);
        void *iter = json_object_iter(at);
        for (size_t i = 0; i < place && iter != NULL; i++) {
            iter = json_object_iter_next(at, iter);
        }
        json_t *child =
            json_is_array(at) ? json_array_get(at, place) : json_object_iter_value(iter);
        bool is_inner = json_is_array(child) || json_is_object(child);
        if (is_inner && prng_below(prng, 5) != 0) {
            at = child;
            continue;
        }
        static const char *const values[] = {"null",
                                             "true",
                                             "false",
                                             "0",
                                             "-1",
                                             "4194303",
                                             "1e9",
                                             "\"\"",
                                             "\"a\"",
                                             "\"\\u0000\"",
                                             "[]",
                                             "{}",
                                             "\"Sequence\"",
                                             "\"ByteLevel\"",
                                             "\"Fuse\"",
                                             "[[\"a\",\"b\"]]",
                                             "\"first\"",
                                             "\"Removed\"",
                                             "{\"String\":\"a\"}",
                                             "{\"type\":\"NFC\"}"};
        json_t *value = json_loads(values[prng_below(prng, sizeof values / sizeof values[0])],
                                   JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
        assert_non_null(value);
        if (json_is_array(at)) {
            (void)json_array_set_new(at, place, value);
        } else {
            (void)json_object_iter_set_new(at, iter, value);
        }
        return;
    }
}

static void test_files_with_random_values_changed_never_do_harm(void **state) {
    (void)state;
    static const char *const models[] = {STORIES "/tokenizer.json", BYTELEVEL "/tokenizer.json"};
    struct prng prng = {12};
    size_t loaded = 0;
    for (size_t i = 0; i < 2; i++) {
        json_t *whole = data_json(models[i]);
        for (int round = 0; round < 500; round++) {
            json_t *copy = json_deep_copy(whole);
            for (uint32_t n = 1 + prng_below(&prng, 2); n > 0; n--) {
                damage(copy, &prng);
            }
            char *text = json_dumps(copy, JSON_COMPACT);
            assert_non_null(text);
            try_load((const uint8_t *)text, strlen(text), &loaded);
            free(text);
            json_decref(copy);
        }
        json_decref(whole);
    }
    assert_true(loaded > 0);
}

static void test_a_missing_file_is_not_found_and_says_which(void **state) {
    (void)state;
    char memory[512];
    struct writer error;
    struct tokenizer *tokenizer = NULL;
    writer_init(&error, memory, sizeof memory);
    assert_int_equal(tokenizer_open("/nowhere/tokenizer.json", &tokenizer, &error),
                     STATUS_NOT_FOUND);
    assert_text(written(&error),
                bytes_of("cannot open /nowhere/tokenizer.json: No such file or directory"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_not_served_is_refused_by_name),
        cmocka_unit_test(test_patterns_that_mean_something_else_in_pcre_are_refused_by_name),
        cmocka_unit_test(test_files_that_contradict_themselves_are_refused_with_the_place),
        cmocka_unit_test(test_a_vocabulary_with_a_hole_in_its_bytes_is_refused),
        cmocka_unit_test(test_a_byte_without_a_token_is_left_out_as_in_the_library),
        cmocka_unit_test(test_an_added_token_that_normalizes_to_nothing_or_to_much_is_refused),
        cmocka_unit_test(test_a_huge_pattern_is_refused),
        cmocka_unit_test(test_a_pattern_that_backtracks_without_end_costs_only_its_text),
        cmocka_unit_test(test_a_text_of_many_hard_places_is_refused_soon),
        cmocka_unit_test(test_hard_places_change_nothing_in_what_is_found),
        cmocka_unit_test(test_every_truncation_is_refused),
        cmocka_unit_test(test_deep_nesting_and_double_keys_are_refused),
        cmocka_unit_test(test_files_with_random_bytes_changed_never_do_harm),
        cmocka_unit_test(test_files_with_random_values_changed_never_do_harm),
        cmocka_unit_test(test_a_missing_file_is_not_found_and_says_which),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
