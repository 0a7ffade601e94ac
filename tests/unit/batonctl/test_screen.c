/* Tables that fit, paragraphs that wrap, and texts that cannot harm a terminal. */
#include "tools/batonctl/screen.h"

#include <locale.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct paper {
    struct screen screen;
    char *text;
    size_t len;
};

static void paper_open(struct paper *paper, uint32_t width) {
    *paper = (struct paper){.text = NULL};
    paper->screen =
        (struct screen){.out = open_memstream(&paper->text, &paper->len), .width = width};
    assert_non_null(paper->screen.out);
}

static void paper_expect(struct paper *paper, const char *wanted) {
    assert_int_equal(fclose(paper->screen.out), 0);
    assert_string_equal(paper->text, wanted);
    free(paper->text);
}

static void expect_visible(const char *text, const char *wanted) {
    char *visible = text_visible(text);
    assert_string_equal(visible, wanted);
    free(visible);
}

static void test_what_could_steer_a_terminal_is_made_visible(void **state) {
    (void)state;
    expect_visible("plain, \xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80", "plain, ä€😀");
    expect_visible("\x1b[2J\a\x7f\t\n", "\\x1b[2J\\x07\\x7f\\x09\\x0a");
    expect_visible("\xc2\x9b"
                   "31m",
                   "\\xc2\\x9b31m"); /* a C1 control: CSI */
    expect_visible("a\xe2\x80\xae"
                   "b",
                   "a\\xe2\\x80\\xaeb");      /* right-to-left override */
    expect_visible("\xff\xc3", "\\xff\\xc3"); /* no UTF-8 */
    expect_visible("\xed\xa0", "\\xed\\xa0"); /* cut */
}

static void test_columns_count_characters_not_bytes(void **state) {
    (void)state;
    assert_int_equal(text_columns("äöü"), 3);
    assert_int_equal(text_columns("日本"), 4);
    assert_int_equal(text_columns("e\xcc\x81"), 1);
}

static const struct column columns[] = {
    {.title = "NAME", .least = 6},
    {.title = "N", .is_right = true},
    {.title = "EXTRA", .rank = 1},
    {.title = "WHY", .below = "because "},
};

static struct table *make(void) {
    struct table *table = table_create(columns, 4);
    table_cell(table, STYLE_PLAIN, "long-name-%d", 1);
    table_cell(table, STYLE_GOOD, "%d", 5);
    table_cell(table, STYLE_PLAIN, "12345");
    table_cell(table, STYLE_PLAIN, "of a reason");
    table_cell(table, STYLE_PLAIN, "日本");
    table_cell(table, STYLE_PLAIN, "1000");
    table_cell(table, STYLE_PLAIN, "x");
    table_cell(table, STYLE_PLAIN, "%s", "");
    return table;
}

static void expect_table(uint32_t width, uint32_t indent, const char *wanted) {
    struct paper paper;
    struct table *table = make();
    paper_open(&paper, width);
    table_print(table, &paper.screen, indent);
    paper_expect(&paper, wanted);
    table_destroy(table);
}

static void test_a_table_without_a_limit_shows_everything(void **state) {
    (void)state;
    expect_table(0, 0,
                 "NAME            N  EXTRA  WHY\n"
                 "long-name-1     5  12345  of a reason\n"
                 "日本         1000  x      \n");
}

static void test_a_column_that_matters_less_is_dropped(void **state) {
    (void)state;
    expect_table(31, 0,
                 "NAME            N  WHY\n"
                 "long-name-1     5  of a reason\n"
                 "日本         1000  \n");
}

static void test_the_last_column_goes_below_before_anything_is_cut(void **state) {
    (void)state;
    expect_table(26, 1,
                 " NAME            N  EXTRA\n"
                 " long-name-1     5  12345\n"
                 "   because of a reason\n"
                 " 日本         1000  x\n");
}

static void test_texts_are_cut_last(void **state) {
    (void)state;
    expect_table(14, 0,
                 "NAME         N\n"
                 "long-n..     5\n"
                 "  because of a\n"
                 "    reason\n"
                 "日本      1000\n");
}

static void test_a_paragraph_wraps_at_spaces(void **state) {
    (void)state;
    struct paper paper;
    paper_open(&paper, 12);
    screen_print(&paper.screen, STYLE_PLAIN, 2, "one two three %s", "abcdefghijklmnop four");
    paper_expect(&paper, "one two\n  three\n  abcdefghij\n  klmnop\n  four\n");
}

static void test_colours_surround_texts_only_where_they_are_wanted(void **state) {
    (void)state;
    struct paper paper;
    paper_open(&paper, 0);
    paper.screen.has_color = true;
    screen_print(&paper.screen, STYLE_BAD, 0, "bad");
    screen_print(&paper.screen, STYLE_PLAIN, 0, "plain");
    paper_expect(&paper, "\033[1;31mbad\033[0m\nplain\n");
}

static void test_a_pipe_has_no_limit_and_no_colour(void **state) {
    (void)state;
    FILE *file = tmpfile();
    assert_non_null(file);
    assert_int_equal(unsetenv("COLUMNS"), 0);
    struct screen screen;
    screen_init(&screen, file);
    assert_int_equal(screen.width, 0);
    assert_false(screen.has_color);
    assert_int_equal(setenv("COLUMNS", "100", 1), 0);
    screen_init(&screen, file);
    assert_int_equal(screen.width, 100);
    assert_int_equal(fclose(file), 0);
}

int main(void) {
    (void)setlocale(LC_CTYPE, "C.UTF-8");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_could_steer_a_terminal_is_made_visible),
        cmocka_unit_test(test_columns_count_characters_not_bytes),
        cmocka_unit_test(test_a_table_without_a_limit_shows_everything),
        cmocka_unit_test(test_a_column_that_matters_less_is_dropped),
        cmocka_unit_test(test_the_last_column_goes_below_before_anything_is_cut),
        cmocka_unit_test(test_texts_are_cut_last),
        cmocka_unit_test(test_a_paragraph_wraps_at_spaces),
        cmocka_unit_test(test_colours_surround_texts_only_where_they_are_wanted),
        cmocka_unit_test(test_a_pipe_has_no_limit_and_no_colour),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
