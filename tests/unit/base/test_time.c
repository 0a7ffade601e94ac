#include "base/time.h"

#include "unit.h"

static void test_never_absorbs_additions_and_sorts_last(void **state) {
    (void)state;
    assert_true(instant_is_never(instant_add(INSTANT_NEVER, span_ms(-5))));
    assert_true(instant_is_never(instant_add((struct instant){INT64_MAX - 10}, span_ms(1))));
    assert_int_equal(instant_min(INSTANT_NEVER, (struct instant){5}).ns, 5);
    assert_false(instant_reached((struct instant){INT64_MAX - 1}, INSTANT_NEVER));
}

static void test_arithmetic_is_exact(void **state) {
    (void)state;
    struct instant start = {1000};
    struct instant end = instant_add(start, span_us(3));
    assert_int_equal(end.ns, 4000);
    assert_int_equal(instant_since(end, start).ns, 3000);
    assert_true(instant_reached(end, end));
    assert_false(instant_reached(start, end));
    /* A point before the clock's zero, as subtraction makes it soon after boot. */
    assert_int_equal(instant_add((struct instant){-5}, span_us(1)).ns, 995);
    assert_int_equal(instant_add((struct instant){5}, span_us(-1)).ns, -995);
    assert_int_equal(span_to_ms(span_ms(1234)), 1234);
    assert_true(span_to_seconds(span_ms(2500)) > 2.4999 && span_to_seconds(span_ms(2500)) < 2.5001);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_never_absorbs_additions_and_sorts_last),
        cmocka_unit_test(test_arithmetic_is_exact),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
