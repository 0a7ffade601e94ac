#include "base/bytes.h"

#include "base/prng.h"
#include "unit.h"

static void test_writer_stops_at_its_capacity_and_says_so(void **state) {
    (void)state;
    char *memory = exact(8);
    struct writer writer;
    writer_init(&writer, memory, 8);
    writer_text(&writer, "12345");
    writer_put(&writer, "678", 3);
    assert_false(writer.is_full);
    assert_int_equal(writer.len, 8);
    writer_put(&writer, "", 0);
    assert_false(writer.is_full);
    writer_put(&writer, "9", 1);
    assert_true(writer.is_full);
    assert_memory_equal(memory, "12345678", 8);
    free(memory);
}

static void test_writer_keeps_what_fits_of_a_long_text(void **state) {
    (void)state;
    char *memory = exact(4);
    struct writer writer;
    writer_init(&writer, memory, 4);
    writer_text(&writer, "abcdefgh");
    assert_true(writer.is_full);
    assert_int_equal(writer.len, 4);
    assert_memory_equal(memory, "abcd", 4);
    writer_init(&writer, NULL, 0);
    writer_text(&writer, "x");
    writer_printf(&writer, "%d", 1);
    assert_true(writer.is_full);
    assert_int_equal(writer.len, 0);
    free(memory);
}

static void test_writer_printf_never_passes_the_end(void **state) {
    (void)state;
    for (size_t cap = 0; cap < 12; cap++) {
        char *memory = exact(cap);
        struct writer writer;
        writer_init(&writer, memory, cap);
        writer_printf(&writer, "%s-%d", "abc", 42); /* 6 characters, and printf's NUL needs room */
        assert_int_equal(writer.is_full, cap <= 6);
        assert_true(writer.len <= cap);
        assert_memory_equal(memory, "abc-42", writer.len);
        free(memory);
    }
}

static void test_a_cut_text_ends_with_a_whole_character(void **state) {
    (void)state;
    static const char *const from = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z"; /* 1, 2, 3, 4, 1 */
    static const size_t whole[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 11};
    for (size_t room = 0; room < sizeof whole / sizeof whole[0]; room++) {
        char to[16];
        text_copy(to, room + 1, from);
        assert_int_equal(strlen(to), whole[room]);
        assert_memory_equal(to, from, whole[room]);
    }
    char stray[] = "\x80\x80\x80\x80"; /* no text: left alone */
    text_end_whole(stray);
    assert_int_equal(strlen(stray), 4);
    char cut[] = "ab\xf0\x9f";
    text_end_whole(cut);
    assert_string_equal(cut, "ab");
}

static void test_text_copy_cuts_and_terminates(void **state) {
    (void)state;
    char to[4];
    text_copy(to, sizeof to, "abcdef");
    assert_string_equal(to, "abc");
    text_copy(to, sizeof to, "ab");
    assert_string_equal(to, "ab");
    text_copy(to, 1, "ab");
    assert_string_equal(to, "");
    assert_aborts(text_copy(to, 0, "ab"));
}

/* A decoder written from the table of well-formed sequences in the Unicode standard (table 3-7),
 * not from arithmetic, so that it cannot share a mistake with the code under test. */
static bool naive_is_valid(const uint8_t *data, size_t len) {
    static const struct {
        uint8_t range[4][2];
        size_t len;
    } rows[] = {
        {{{0x00, 0x7f}}, 1},
        {{{0xc2, 0xdf}, {0x80, 0xbf}}, 2},
        {{{0xe0, 0xe0}, {0xa0, 0xbf}, {0x80, 0xbf}}, 3},
        {{{0xe1, 0xec}, {0x80, 0xbf}, {0x80, 0xbf}}, 3},
        {{{0xed, 0xed}, {0x80, 0x9f}, {0x80, 0xbf}}, 3},
        {{{0xee, 0xef}, {0x80, 0xbf}, {0x80, 0xbf}}, 3},
        {{{0xf0, 0xf0}, {0x90, 0xbf}, {0x80, 0xbf}, {0x80, 0xbf}}, 4},
        {{{0xf1, 0xf3}, {0x80, 0xbf}, {0x80, 0xbf}, {0x80, 0xbf}}, 4},
        {{{0xf4, 0xf4}, {0x80, 0x8f}, {0x80, 0xbf}, {0x80, 0xbf}}, 4},
    };
    size_t at = 0;
    while (at < len) {
        size_t matched = 0;
        for (size_t row = 0; row < sizeof rows / sizeof rows[0] && matched == 0; row++) {
            if (rows[row].len > len - at) {
                continue;
            }
            bool is_match = true;
            for (size_t i = 0; i < rows[row].len; i++) {
                is_match = is_match && data[at + i] >= rows[row].range[i][0] &&
                           data[at + i] <= rows[row].range[i][1];
            }
            matched = is_match ? rows[row].len : 0;
        }
        if (matched == 0) {
            return false;
        }
        at += matched;
    }
    return true;
}

static bool is_valid_exact(const uint8_t *data, size_t len) {
    uint8_t *copy = exact(len);
    memcpy(copy, data, len);
    bool is_valid = utf8_is_valid(copy, len);
    free(copy);
    return is_valid;
}

static void test_utf8_of_all_strings_of_one_and_two_bytes(void **state) {
    (void)state;
    assert_true(utf8_is_valid(NULL, 0));
    for (uint32_t first = 0; first < 256; first++) {
        uint8_t text[2] = {(uint8_t)first, 0};
        assert_int_equal(is_valid_exact(text, 1), first < 0x80);
        for (uint32_t second = 0; second < 256; second++) {
            text[1] = (uint8_t)second;
            assert_int_equal(is_valid_exact(text, 2), naive_is_valid(text, 2));
        }
    }
}

static void test_utf8_of_every_code_point_and_its_neighbours(void **state) {
    (void)state;
    for (uint32_t code = 0; code < 0x200000; code += code < 0x11000 ? 1 : 37) {
        uint8_t forms[3][4] = {
            {(uint8_t)(0xc0 | (code >> 6 & 0x1f)), (uint8_t)(0x80 | (code & 0x3f))},
            {(uint8_t)(0xe0 | (code >> 12 & 0xf)), (uint8_t)(0x80 | (code >> 6 & 0x3f)),
             (uint8_t)(0x80 | (code & 0x3f))},
            {(uint8_t)(0xf0 | (code >> 18 & 0x7)), (uint8_t)(0x80 | (code >> 12 & 0x3f)),
             (uint8_t)(0x80 | (code >> 6 & 0x3f)), (uint8_t)(0x80 | (code & 0x3f))}};
        for (size_t i = 0; i < 3; i++) {
            assert_int_equal(utf8_is_valid(forms[i], i + 2), naive_is_valid(forms[i], i + 2));
        }
        assert_int_equal(utf8_is_valid(forms[2], 4), code >= 0x10000 && code <= 0x10ffff);
    }
}

static void test_utf8_table_of_known_cases(void **state) {
    (void)state;
    static const struct {
        const char *text;
        bool is_valid;
    } cases[] = {
        {"plain", true},
        {"gr\xc3\xbc\xc3\x9f", true},
        {"\xe2\x82\xac", true},
        {"\xf0\x9f\x98\x80", true},
        {"\xf4\x8f\xbf\xbf", true},
        {"\xef\xbb\xbf", true}, /* a byte order mark is a character */
        {"\xc0\xaf", false},    /* overlong '/' */
        {"\xe0\x80\xaf", false},
        {"\xf0\x80\x80\xaf", false},
        {"\xed\xa0\x80", false}, /* surrogate */
        {"\xed\xbf\xbf", false},
        {"\xf4\x90\x80\x80", false}, /* past U+10FFFF */
        {"\xf8\x88\x80\x80\x80", false},
        {"\xff", false},
        {"\x80", false},
        {"abc\xe2\x82", false}, /* cut off */
        {"\xe2\x28\xa1", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t len = strlen(cases[i].text);
        assert_int_equal(is_valid_exact((const uint8_t *)cases[i].text, len), cases[i].is_valid);
    }
}

/* Also when the byte behind the end would complete the character. */
static void test_utf8_never_looks_behind_the_end(void **state) {
    (void)state;
    const uint8_t *text = (const uint8_t *)"\xc3\xbc\xe2\x82\xac\xf0\x9f\x98\x80";
    static const bool is_whole[] = {true, false, true,  false, false,
                                    true, false, false, false, true};
    for (size_t len = 0; len < 10; len++) {
        assert_int_equal(utf8_is_valid(text, len), is_whole[len]);
    }
}

static void test_utf8_of_random_strings_agrees_with_the_table_decoder(void **state) {
    (void)state;
    static const uint8_t alphabet[] = {0x00, 0x41, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf,
                                       0xc0, 0xc1, 0xc2, 0xdf, 0xe0, 0xe1, 0xec, 0xed, 0xee,
                                       0xef, 0xf0, 0xf1, 0xf3, 0xf4, 0xf5, 0xff};
    struct prng prng = {5};
    uint32_t valid = 0;
    for (uint32_t step = 0; step < 300000; step++) {
        uint8_t text[6];
        size_t len = prng_below(&prng, sizeof text + 1);
        for (size_t i = 0; i < len; i++) {
            text[i] = alphabet[prng_below(&prng, sizeof alphabet)];
        }
        bool is_valid = naive_is_valid(text, len);
        assert_int_equal(is_valid_exact(text, len), is_valid);
        valid += is_valid ? 1 : 0;
    }
    assert_in_range(valid, 10000, 290000); /* both kinds were really tried */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_writer_stops_at_its_capacity_and_says_so),
        cmocka_unit_test(test_writer_keeps_what_fits_of_a_long_text),
        cmocka_unit_test(test_writer_printf_never_passes_the_end),
        cmocka_unit_test(test_text_copy_cuts_and_terminates),
        cmocka_unit_test(test_a_cut_text_ends_with_a_whole_character),
        cmocka_unit_test(test_utf8_of_all_strings_of_one_and_two_bytes),
        cmocka_unit_test(test_utf8_of_every_code_point_and_its_neighbours),
        cmocka_unit_test(test_utf8_table_of_known_cases),
        cmocka_unit_test(test_utf8_never_looks_behind_the_end),
        cmocka_unit_test(test_utf8_of_random_strings_agrees_with_the_table_decoder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
