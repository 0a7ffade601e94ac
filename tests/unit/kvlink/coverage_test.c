#include "kvlink/coverage.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/prng.h"

static void test_ranges_that_touch_melt_together(void **state) {
    (void)state;
    struct coverage coverage = {0};
    assert_int_equal(coverage_add(&coverage, 10, 20), STATUS_OK);
    assert_int_equal(coverage_add(&coverage, 30, 40), STATUS_OK);
    assert_int_equal(coverage.count, 2);
    assert_int_equal(coverage_missing(&coverage, 0, 50), 30);
    assert_int_equal(coverage_add(&coverage, 20, 30), STATUS_OK);
    assert_int_equal(coverage.count, 1);
    assert_int_equal(coverage.ranges[0].first, 10);
    assert_int_equal(coverage.ranges[0].end, 40);
}

static void test_one_range_too_many_is_busy_and_changes_nothing(void **state) {
    (void)state;
    struct coverage coverage = {0};
    for (uint32_t i = 0; i < COVERAGE_RANGES_MAX; i++) {
        assert_int_equal(coverage_add(&coverage, 10 * i, 10 * i + 5), STATUS_OK);
    }
    struct coverage before = coverage;
    assert_int_equal(coverage_add(&coverage, 7, 8), STATUS_BUSY);
    assert_memory_equal(&coverage, &before, sizeof(before));
    assert_int_equal(coverage_add(&coverage, 5, 10), STATUS_OK); /* closes a gap: fits */
    assert_int_equal(coverage.count, COVERAGE_RANGES_MAX - 1);
}

#define TOKENS 40u

static void test_random_ranges_agree_with_a_bitmap(void **state) {
    (void)state;
    struct prng prng = {7};
    uint32_t refused = 0;
    for (int round = 0; round < 2000; round++) {
        struct coverage coverage = {0};
        bool bitmap[TOKENS] = {false};
        for (int step = 0; step < 12; step++) {
            uint32_t first = prng_below(&prng, TOKENS);
            uint32_t end = first + 1 + prng_below(&prng, TOKENS - first);
            if (prng_below(&prng, 2) == 0 && end > first + 3) {
                end = first + 3;
            }
            uint32_t missing = 0;
            bool is_gap[TOKENS] = {false};
            for (uint32_t i = first; i < end; i++) {
                is_gap[i] = !bitmap[i];
                missing += !bitmap[i];
            }
            assert_int_equal(coverage_missing(&coverage, first, end), missing);
            uint32_t from = first;
            struct coverage_range gap;
            uint32_t seen = first;
            while (coverage_next_gap(&coverage, &from, end, &gap)) {
                assert_true(gap.first >= seen && gap.first < gap.end && gap.end <= end);
                for (uint32_t i = gap.first; i < gap.end; i++) {
                    assert_true(is_gap[i]);
                    is_gap[i] = false;
                }
                seen = gap.end;
            }
            for (uint32_t i = first; i < end; i++) {
                assert_false(is_gap[i]);
            }
            if (coverage_add(&coverage, first, end) == STATUS_OK) {
                memset(bitmap + first, 1, end - first);
            } else {
                refused++;
            }
            for (uint32_t i = 1; i < coverage.count; i++) {
                assert_true(coverage.ranges[i].first > coverage.ranges[i - 1].end);
            }
        }
    }
    assert_true(refused > 100); /* the bound was met */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranges_that_touch_melt_together),
        cmocka_unit_test(test_one_range_too_many_is_busy_and_changes_nothing),
        cmocka_unit_test(test_random_ranges_agree_with_a_bitmap),
    };
    return cmocka_run_group_tests_name("kvlink_coverage", tests, NULL, NULL);
}
