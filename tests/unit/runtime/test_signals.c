#include "runtime/signals.h"

#include <errno.h>
#include <signal.h>
#include <unistd.h>

#include "runtime/clock.h"
#include "unit.h"

static void test_wait_returns_each_pending_signal_once(void **state) {
    (void)state;
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP};
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(kill(getpid(), numbers[i]), 0);
        assert_int_equal(signals_wait(instant_add(clock_now(), span_ms(10000))), numbers[i]);
        assert_int_equal(signals_wait((struct instant){0}), 0);
    }
}

static void test_wait_ends_at_the_deadline(void **state) {
    (void)state;
    struct instant deadline = instant_add(clock_now(), span_ms(20));
    assert_int_equal(signals_wait(deadline), 0);
    assert_true(instant_reached(clock_now(), deadline));
}

static void test_writing_to_a_closed_pipe_is_an_error_not_a_death(void **state) {
    (void)state;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(close(ends[0]), 0);
    assert_int_equal(write(ends[1], "x", 1), -1);
    assert_int_equal(errno, EPIPE);
    assert_int_equal(close(ends[1]), 0);
}

int main(void) {
    signals_block();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wait_returns_each_pending_signal_once),
        cmocka_unit_test(test_wait_ends_at_the_deadline),
        cmocka_unit_test(test_writing_to_a_closed_pipe_is_an_error_not_a_death),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
