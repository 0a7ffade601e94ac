#include "runtime/http_head.h"

#include "base/prng.h"
#include "unit.h"

/* Parses a copy of the text; the head's pointers stay valid until the next call. */
static char text_copy_of[16384];
static int parse(const char *text, struct http_head *head) {
    const char *why = NULL;
    size_t len = strlen(text);
    memcpy(text_copy_of, text, len);
    int status = http_head_parse(text_copy_of, len, head, &why);
    assert_int_equal(status != 0, why != NULL);
    return status;
}

static void test_find_knows_both_line_ends_and_partial_heads(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t len;
    } cases[] = {
        {"", 0},
        {"\r\n", 0},
        {"GET / HTTP/1.1\r\n", 0},
        {"a\r\n\r\nb", 5},
        {"a\n\nb", 3},
        {"a\n\r\nb", 4},
        {"a\r\n\r", 0},
        {"a\r\nb: c\r\n\r\n", 11},
        {"a\nb\n", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(http_head_find(cases[i].text, strlen(cases[i].text)), cases[i].len);
    }
}

static void test_implausible_bytes_are_known_at_once(void **state) {
    (void)state;
    assert_true(http_head_is_plausible("G", 1));
    assert_true(http_head_is_plausible("GET", 3));
    assert_true(http_head_is_plausible("GET /\xff", 6));
    assert_false(http_head_is_plausible("\x16\x03\x01", 3)); /* TLS client hello */
    assert_false(http_head_is_plausible("get /", 5));
    assert_false(http_head_is_plausible(" GET", 4));
    assert_false(http_head_is_plausible("GET\0", 4));
    assert_false(http_head_is_plausible("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 26));
}

static void test_good_heads_are_taken_apart(void **state) {
    (void)state;
    struct http_head head;
    assert_int_equal(parse("POST /drain?x=1&y#z HTTP/1.1\r\nHost: a\r\nContent-LENGTH:  12 \r\n"
                           "Expect: 100-continue\r\n\r\n",
                           &head),
                     0);
    assert_string_equal(head.method, "POST");
    assert_string_equal(head.path, "/drain");
    assert_string_equal(head.query, "x=1&y");
    assert_int_equal(head.content_length, 12);
    assert_true(head.keeps_alive);
    assert_true(head.expects_continue);
    assert_int_equal(parse("GET http://host:1/livez HTTP/1.0\n\n", &head), 0);
    assert_string_equal(head.path, "/livez");
    assert_string_equal(head.query, "");
    assert_false(head.keeps_alive);
}

static void test_connection_header_decides_over_the_version(void **state) {
    (void)state;
    struct http_head head;
    assert_int_equal(parse("GET / HTTP/1.1\r\nConnection: foo, Close\r\n\r\n", &head), 0);
    assert_false(head.keeps_alive);
    assert_int_equal(parse("GET / HTTP/1.0\r\nconnection: Keep-Alive\r\n\r\n", &head), 0);
    assert_true(head.keeps_alive);
    assert_int_equal(parse("GET / HTTP/1.1\r\nConnection: closed\r\n\r\n", &head), 0);
    assert_true(head.keeps_alive);
}

static void test_bad_heads_are_refused_with_the_right_status(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int status;
    } cases[] = {
        {"GET\r\n\r\n", 400},
        {"GET /\r\n\r\n", 400},
        {"GET / FTP/1.1\r\n\r\n", 400},
        {"GET / HTTP/2.0\r\n\r\n", 505},
        {"GET / HTTP/1.11\r\n\r\n", 505},
        {"PRI * HTTP/2.0\r\n\r\n", 505},
        {"GET x HTTP/1.1\r\n\r\n", 400},
        {"GET http://host HTTP/1.1\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\n: empty\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\nA : b\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\nA: b\r\n folded: c\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\nContent-Length: +1\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\nContent-Length:\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\nContent-Length: 1, 2\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n", 0},
        {"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct http_head head;
        int status = parse(cases[i].text, &head);
        if (status != cases[i].status) {
            fail_msg("%s gave %d, not %d", cases[i].text, status, cases[i].status);
        }
    }
    struct http_head head;
    const char *why = NULL;
    char with_nul[] = "GET / HTTP/1.1\r\nA: \0\r\n\r\n_";
    assert_int_equal(http_head_parse(with_nul, sizeof with_nul - 2, &head, &why), 400);
}

/* Exact-size heap blocks let the address sanitizer see any read past the end. */
static void test_random_and_mutated_bytes_never_hurt(void **state) {
    (void)state;
    static const char seed[] = "POST /drain?a=b HTTP/1.1\r\nContent-Length: 3\r\nConnection: "
                               "keep-alive, close\r\nExpect: 100-continue\r\n\r\n";
    struct prng prng = {20260101};
    for (uint32_t step = 0; step < 20000; step++) {
        size_t len = 1 + prng_below(&prng, sizeof seed - 2);
        char *bytes = malloc(len + 1);
        assert_non_null(bytes);
        memcpy(bytes, seed, len);
        uint32_t changes = prng_below(&prng, 6);
        for (uint32_t i = 0; i < changes; i++) {
            bytes[prng_below(&prng, (uint32_t)len)] = (char)prng_next(&prng);
        }
        (void)http_head_is_plausible(bytes, len);
        size_t head_len = http_head_find(bytes, len);
        assert_true(head_len <= len);
        if (head_len > 0) {
            struct http_head head;
            const char *why = NULL;
            int status = http_head_parse(bytes, head_len, &head, &why);
            if (status == 0) {
                assert_int_equal(head.path[0], '/');
            } else {
                assert_in_range(status, 400, 505);
                assert_non_null(why);
            }
        }
        free(bytes);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_find_knows_both_line_ends_and_partial_heads),
        cmocka_unit_test(test_implausible_bytes_are_known_at_once),
        cmocka_unit_test(test_good_heads_are_taken_apart),
        cmocka_unit_test(test_connection_header_decides_over_the_version),
        cmocka_unit_test(test_bad_heads_are_refused_with_the_right_status),
        cmocka_unit_test(test_random_and_mutated_bytes_never_hurt),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
