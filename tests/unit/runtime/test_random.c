#include "runtime/random.h"

#include "unit.h"

static void test_bytes_differ_between_calls_and_fill_all(void **state) {
    (void)state;
    unsigned char a[64] = {0};
    unsigned char b[64] = {0};
    random_bytes(a, sizeof a);
    random_bytes(b, sizeof b);
    assert_memory_not_equal(a, b, sizeof a);
    /* Each byte is non-zero at least once in many draws (chance of failure 64 * 2^-160). */
    unsigned char seen[64] = {0};
    for (int i = 0; i < 20; i++) {
        random_bytes(a, sizeof a);
        for (size_t j = 0; j < sizeof a; j++) {
            seen[j] |= a[j];
        }
    }
    for (size_t j = 0; j < sizeof seen; j++) {
        assert_int_not_equal(seen[j], 0);
    }
}

static void test_nothing_is_written_past_the_end(void **state) {
    (void)state;
    unsigned char a[8] = {0};
    random_bytes(a, 0);
    random_bytes(a + 2, 4);
    assert_int_equal(a[0] | a[1] | a[6] | a[7], 0);
}

static void test_words_are_distinct_and_never_zero(void **state) {
    (void)state;
    uint64_t before = 0;
    for (int i = 0; i < 1000; i++) {
        uint64_t value = random_u64();
        assert_true(value != 0 && value != before);
        before = value;
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes_differ_between_calls_and_fill_all),
        cmocka_unit_test(test_nothing_is_written_past_the_end),
        cmocka_unit_test(test_words_are_distinct_and_never_zero),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
