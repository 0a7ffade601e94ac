#include "runtime/buffer.h"

#include "unit.h"

static void test_buffer_grows_and_keeps_its_bytes(void **state) {
    (void)state;
    struct buffer buffer;
    buffer_init(&buffer, 1 << 20);
    for (int i = 0; i < 5000; i++) {
        buffer_printf(&buffer, "%04d ", i);
    }
    assert_int_equal(buffer.len, 25000);
    assert_memory_equal(buffer.data, "0000 0001 ", 10);
    assert_memory_equal(buffer.data + buffer.len - 5, "4999 ", 5);
    assert_false(buffer.is_full);
    buffer_clear(&buffer);
    assert_int_equal(buffer.len, 0);
    buffer_fini(&buffer);
    buffer_fini(&buffer);
}

static void test_buffer_stops_at_its_maximum(void **state) {
    (void)state;
    struct buffer buffer;
    buffer_init(&buffer, 10);
    buffer_text(&buffer, "12345678");
    assert_false(buffer.is_full);
    buffer_text(&buffer, "abcdef");
    assert_true(buffer.is_full);
    assert_int_equal(buffer.len, 10);
    assert_memory_equal(buffer.data, "12345678ab", 10);
    buffer_fini(&buffer);
}

static void test_long_printf_is_not_cut(void **state) {
    (void)state;
    struct buffer buffer;
    buffer_init(&buffer, 1 << 16);
    buffer_printf(&buffer, "<%*d>", 3000, 7);
    assert_int_equal(buffer.len, 3002);
    assert_int_equal(buffer.data[3000], '7');
    buffer_fini(&buffer);
}

static void test_json_escapes_everything_that_would_break_a_string(void **state) {
    (void)state;
    static const struct {
        const char *text;
        const char *json;
    } cases[] = {
        {"", "\"\""},
        {"plain", "\"plain\""},
        {"a\"b\\c", "\"a\\\"b\\\\c\""},
        {"line\nreturn\rtab\t", "\"line\\nreturn\\rtab\\t\""},
        {"\x01\x1f\x7f", "\"\\u0001\\u001f\\u007f\""},
        {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\""},
        {"\xc2\x85", "\"\\u0085\""}, /* C1 next line */
        {"a\xff"
         "b",
         "\"a\xef\xbf\xbd"
         "b\""},                                                      /* no UTF-8 */
        {"\xe2\x82", "\"\xef\xbf\xbd\xef\xbf\xbd\""},                 /* cut off */
        {"\xed\xa0\x80", "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\""}, /* surrogate */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct buffer buffer;
        buffer_init(&buffer, 1000);
        buffer_json(&buffer, cases[i].text, strlen(cases[i].text));
        buffer_put(&buffer, "", 1);
        assert_string_equal(buffer.data, cases[i].json);
        buffer_fini(&buffer);
    }
}

static void test_reserved_room_is_committed_as_written(void **state) {
    (void)state;
    struct buffer buffer;
    buffer_init(&buffer, 100);
    buffer_text(&buffer, "a");
    struct writer writer = buffer_reserve(&buffer, 50);
    assert_int_equal(writer.cap, 50);
    writer_text(&writer, "bc");
    buffer_commit(&buffer, &writer);
    buffer_text(&buffer, "d");
    assert_int_equal(buffer.len, 4);
    assert_memory_equal(buffer.data, "abcd", 4);
    writer = buffer_reserve(&buffer, 1000); /* only 96 are left */
    assert_int_equal(writer.cap, 96);
    buffer_commit(&buffer, &writer);
    assert_false(buffer.is_full); /* nothing was lost yet */
    writer = buffer_reserve(&buffer, 1000);
    writer_printf(&writer, "%200d", 1);
    buffer_commit(&buffer, &writer);
    assert_true(buffer.is_full);
    buffer_fini(&buffer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_buffer_grows_and_keeps_its_bytes),
        cmocka_unit_test(test_buffer_stops_at_its_maximum),
        cmocka_unit_test(test_long_printf_is_not_cut),
        cmocka_unit_test(test_json_escapes_everything_that_would_break_a_string),
        cmocka_unit_test(test_reserved_room_is_committed_as_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
