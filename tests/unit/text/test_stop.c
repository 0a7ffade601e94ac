#include "text/stop.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/prng.h"

static struct bytes bytes_of(const char *text) {
    return (struct bytes){(const uint8_t *)text, strlen(text)};
}

static void init(struct stop *stop, const char *const *strings, size_t count) {
    struct bytes list[STOP_STRINGS_MAX];
    for (size_t i = 0; i < count; i++) {
        list[i] = bytes_of(strings[i]);
    }
    assert_int_equal(stop_init(stop, list, count, NULL), STATUS_OK);
}

static void assert_written(const struct writer *writer, const char *wanted) {
    assert_int_equal(writer->len, strlen(wanted));
    assert_memory_equal(writer->data, wanted, writer->len);
}

static void test_text_before_the_stop_comes_out_and_the_stop_does_not(void **state) {
    (void)state;
    char memory[64];
    struct writer out;
    struct stop stop;
    writer_init(&out, memory, sizeof memory);
    init(&stop, (const char *const[]){"END", "\n\n"}, 2);
    assert_false(stop_push(&stop, bytes_of("one E"), &out));
    assert_written(&out, "one ");
    assert_false(stop_push(&stop, bytes_of("NE"), &out));
    assert_written(&out, "one EN");
    assert_true(stop_push(&stop, bytes_of("ND two"), &out));
    assert_written(&out, "one EN");
    assert_int_equal(stop.matched, 0);
    assert_true(stop_push(&stop, bytes_of("more"), &out));
    stop_flush(&stop, &out);
    assert_written(&out, "one EN");
}

static void test_flush_gives_out_what_never_became_a_stop(void **state) {
    (void)state;
    char memory[64];
    struct writer out;
    struct stop stop;
    writer_init(&out, memory, sizeof memory);
    init(&stop, (const char *const[]){"###", "Human:"}, 2);
    assert_false(stop_push(&stop, bytes_of("a##"), &out));
    assert_written(&out, "a");
    stop_flush(&stop, &out);
    assert_written(&out, "a##");
    assert_int_equal(stop.matched, STOP_NONE);
}

static void test_of_stops_that_end_together_the_longest_wins(void **state) {
    (void)state;
    char memory[64];
    struct writer out;
    struct stop stop;
    writer_init(&out, memory, sizeof memory);
    init(&stop, (const char *const[]){"c", "abc", "bc"}, 3);
    assert_true(stop_push(&stop, bytes_of("xabc"), &out));
    assert_int_equal(stop.matched, 1);
    assert_written(&out, "x");
}

static void test_without_strings_everything_passes_at_once(void **state) {
    (void)state;
    char memory[64];
    struct writer out;
    struct stop stop;
    writer_init(&out, memory, sizeof memory);
    init(&stop, NULL, 0);
    assert_false(stop_push(&stop, bytes_of("all"), &out));
    assert_written(&out, "all");
}

static void test_bad_lists_are_refused_with_a_sentence(void **state) {
    (void)state;
    static char long_text[STOP_BYTES_MAX + 2];
    memset(long_text, 'a', sizeof long_text - 1);
    struct bytes many[STOP_STRINGS_MAX + 1];
    for (size_t i = 0; i <= STOP_STRINGS_MAX; i++) {
        many[i] = bytes_of("a");
    }
    const struct {
        struct bytes strings[2];
        size_t count;
        enum status status;
        const char *sentence;
    } rows[] = {
        {{bytes_of("a"), bytes_of("")}, 2, STATUS_INVALID, "stop string 1 is empty"},
        {{bytes_of("\xff"), bytes_of("a")}, 2, STATUS_INVALID, "stop string 0 is not valid UTF-8"},
        {{bytes_of("a"), bytes_of(long_text)},
         2,
         STATUS_RANGE,
         "the stop strings have more than 1024 bytes together"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char memory[128];
        struct writer error;
        struct stop stop;
        writer_init(&error, memory, sizeof memory);
        assert_int_equal(stop_init(&stop, rows[i].strings, rows[i].count, &error), rows[i].status);
        assert_written(&error, rows[i].sentence);
    }
    struct stop stop;
    assert_int_equal(stop_init(&stop, many, STOP_STRINGS_MAX + 1, NULL), STATUS_RANGE);
    assert_int_equal(stop_init(&stop, many, STOP_STRINGS_MAX, NULL), STATUS_OK);
}

/* What the matcher should do, by trying every end and every string. */
static size_t naive(const char *text, char strings[][8], size_t count, size_t *which) {
    for (size_t end = 1; text[end - 1] != '\0'; end++) {
        size_t best = 0;
        for (size_t i = 0; i < count; i++) {
            size_t len = strlen(strings[i]);
            if (len <= end && len > best && memcmp(text + end - len, strings[i], len) == 0) {
                best = len;
                *which = i;
            }
        }
        if (best > 0) {
            return end - best;
        }
    }
    return strlen(text);
}

static void fill(struct prng *prng, char *to, size_t len) {
    for (size_t i = 0; i < len; i++) {
        to[i] = (char)('a' + prng_below(prng, 2));
    }
    to[len] = '\0';
}

static void test_the_result_does_not_depend_on_where_the_text_is_cut(void **state) {
    (void)state;
    struct prng prng = {5};
    for (int round = 0; round < 20000; round++) {
        char strings[STOP_STRINGS_MAX][8];
        const char *list[STOP_STRINGS_MAX];
        size_t count = 1 + prng_below(&prng, 4);
        for (size_t i = 0; i < count; i++) {
            fill(&prng, strings[i], 1 + prng_below(&prng, 7));
            list[i] = strings[i];
        }
        char text[41];
        fill(&prng, text, prng_below(&prng, 41));
        size_t which = STOP_NONE;
        size_t wanted = naive(text, strings, count, &which);
        char memory[64];
        struct writer out;
        struct stop stop;
        writer_init(&out, memory, sizeof memory);
        init(&stop, list, count);
        size_t len = strlen(text);
        bool is_stopped = false;
        for (size_t at = 0; at < len;) {
            size_t piece = prng_below(&prng, 6);
            piece = piece > len - at ? len - at : piece;
            is_stopped = stop_push(&stop, (struct bytes){(uint8_t *)text + at, piece}, &out);
            at += piece;
        }
        stop_flush(&stop, &out);
        assert_int_equal(is_stopped, which != STOP_NONE);
        assert_int_equal(out.len, wanted);
        assert_memory_equal(memory, text, wanted);
        if (is_stopped) {
            assert_int_equal(strcmp(strings[stop.matched], strings[which]), 0);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text_before_the_stop_comes_out_and_the_stop_does_not),
        cmocka_unit_test(test_flush_gives_out_what_never_became_a_stop),
        cmocka_unit_test(test_of_stops_that_end_together_the_longest_wins),
        cmocka_unit_test(test_without_strings_everything_passes_at_once),
        cmocka_unit_test(test_bad_lists_are_refused_with_a_sentence),
        cmocka_unit_test(test_the_result_does_not_depend_on_where_the_text_is_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
