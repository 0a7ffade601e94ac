#include "runtime/clock.h"

#include "unit.h"

static void test_clock_now_never_goes_back(void **state) {
    (void)state;
    struct instant before = clock_now();
    for (int i = 0; i < 1000; i++) {
        struct instant now = clock_now();
        assert_true(now.ns >= before.ns);
        before = now;
    }
}

static void test_wall_text_has_the_iso_shape(void **state) {
    (void)state;
    char text[CLOCK_WALL_TEXT];
    clock_wall_text(text);
    assert_int_equal(strlen(text), CLOCK_WALL_TEXT - 1);
    int year = 0;
    int month = 0;
    int day = 0;
    int hour = 0;
    int minute = 0;
    int second = 0;
    int ms = 0;
    int end = 0;
    assert_int_equal(sscanf(text, "%4d-%2d-%2dT%2d:%2d:%2d.%3dZ%n", &year, &month, &day, &hour,
                            &minute, &second, &ms, &end),
                     7);
    assert_int_equal(end, CLOCK_WALL_TEXT - 1);
    assert_in_range(month, 1, 12);
    assert_true(year >= 2024);
}

static void test_observed_time_follows_short_advances_exactly(void **state) {
    (void)state;
    struct clock_observer observer = {.real = {1000}, .observed = {1000}};
    assert_int_equal(clock_observe_at(&observer, (struct instant){51000}).ns, 51000);
    struct instant limit = {51000 + span_ms(CLOCK_TICK_MAX_MS).ns};
    assert_int_equal(clock_observe_at(&observer, limit).ns, limit.ns);
    assert_int_equal(observer.pauses, 0);
    assert_int_equal(observer.lost.ns, 0);
}

static void test_observed_time_counts_an_hours_pause_as_one_tick(void **state) {
    (void)state;
    struct clock_observer observer = {.real = {0}, .observed = {0}};
    struct instant thawed = {span_ms(3600 * 1000).ns};
    assert_int_equal(span_to_ms((struct span){clock_observe_at(&observer, thawed).ns}),
                     CLOCK_TICK_MAX_MS);
    assert_int_equal(observer.pauses, 1);
    assert_int_equal(observer.lost.ns, thawed.ns - span_ms(CLOCK_TICK_MAX_MS).ns);
    struct instant later = {thawed.ns + span_ms(50).ns};
    assert_int_equal(span_to_ms((struct span){clock_observe_at(&observer, later).ns}),
                     CLOCK_TICK_MAX_MS + 50);
    assert_int_equal(observer.pauses, 1);
}

static void test_observed_time_stands_still_when_the_clock_goes_back(void **state) {
    (void)state;
    struct clock_observer observer = {.real = {5000}, .observed = {700}};
    assert_int_equal(clock_observe_at(&observer, (struct instant){4000}).ns, 700);
    assert_int_equal(clock_observe_at(&observer, (struct instant){5000}).ns, 700);
    assert_int_equal(clock_observe_at(&observer, (struct instant){5001}).ns, 701);
}

static void test_real_deadline_adds_the_lost_time(void **state) {
    (void)state;
    struct clock_observer observer = {.real = {0}, .observed = {0}};
    (void)clock_observe_at(&observer, (struct instant){span_ms(1000).ns});
    struct instant due = {span_ms(300).ns};
    assert_int_equal(clock_real_deadline(&observer, due).ns, span_ms(1100).ns);
    assert_true(instant_is_never(clock_real_deadline(&observer, INSTANT_NEVER)));
}

static void test_timespec_clamps_what_it_cannot_hold(void **state) {
    (void)state;
    struct timespec at = clock_to_timespec((struct instant){1500000001});
    assert_int_equal(at.tv_sec, 1);
    assert_int_equal(at.tv_nsec, 500000001);
    at = clock_to_timespec((struct instant){-1});
    assert_int_equal(at.tv_sec, 0);
    assert_int_equal(at.tv_nsec, 0);
    at = clock_to_timespec(INSTANT_NEVER);
    assert_true(at.tv_sec > 9000000000);
    assert_in_range(at.tv_nsec, 0, 999999999);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_clock_now_never_goes_back),
        cmocka_unit_test(test_wall_text_has_the_iso_shape),
        cmocka_unit_test(test_observed_time_follows_short_advances_exactly),
        cmocka_unit_test(test_observed_time_counts_an_hours_pause_as_one_tick),
        cmocka_unit_test(test_observed_time_stands_still_when_the_clock_goes_back),
        cmocka_unit_test(test_real_deadline_adds_the_lost_time),
        cmocka_unit_test(test_timespec_clamps_what_it_cannot_hold),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
