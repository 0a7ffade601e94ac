/* The canary's judgement: when one is sent, and when silence means that the router is stuck. */
#include "unit/core/bed.h"

#include "core/canary.h"

#define BOUND_MS 10000

struct cage {
    struct canary canary;
    struct canary_facts facts;
    int64_t now_ms;
    uint32_t sent;
};

static struct instant at(const struct cage *cage) {
    return (struct instant){cage->now_ms * 1000000};
}

static struct cage cage_create(void) {
    struct cage cage = {.facts = {.decodes = 2, .prefills = 1, .has_prefill = true, .routers = 1},
                        .now_ms = 5000};
    canary_init(&cage.canary, span_ms(BOUND_MS), at(&cage));
    return cage;
}

static void ended(struct cage *cage, enum cause cause, const char *prefill) {
    (void)canary_ended(&cage->canary, cause == CAUSE_DONE ? OUTCOME_OK : OUTCOME_FAILED, cause,
                       "decode-1", prefill, at(cage));
}

/* Ticks of 50 ms; each canary ends at once with this cause (CAUSE_NONE: never). */
static void wait_ms(struct cage *cage, int64_t ms, enum cause cause) {
    for (int64_t left = ms; left > 0; left -= 50) {
        cage->now_ms += 50;
        enum canary_legs legs = canary_poll(&cage->canary, &cage->facts, at(cage));
        if (legs == CANARY_NONE) {
            continue;
        }
        cage->sent++;
        if (cause != CAUSE_NONE) {
            ended(cage, cause, legs == CANARY_TWO_LEGS ? "prefill-1" : "");
        }
    }
}

static bool is_stuck(const struct cage *cage) {
    return canary_is_stuck(&cage->canary, at(cage));
}

static void test_one_canary_a_second_is_sent_by_each_path(void **state) {
    (void)state;
    struct cage cage = cage_create();
    wait_ms(&cage, 60000, CAUSE_DONE);
    assert_in_range(cage.sent, 59, 61);
    assert_true(cage.canary.stats.results[0][CANARY_OK] > 10);
    assert_true(cage.canary.stats.results[1][CANARY_OK] > 10);
    assert_false(is_stuck(&cage));
    assert_true(span_to_ms(canary_age(&cage.canary, false, at(&cage))) <= 1000);
    assert_true(span_to_ms(canary_age(&cage.canary, true, at(&cage))) <= 10000);
}

static void test_several_routers_share_the_rate_as_far_as_the_bound_allows(void **state) {
    (void)state;
    struct cage cage = cage_create();
    cage.facts.routers = 2;
    wait_ms(&cage, 60000, CAUSE_DONE);
    assert_in_range(cage.sent, 29, 31);
    cage.sent = 0;
    cage.facts.routers = 100;
    wait_ms(&cage, 60000, CAUSE_DONE);
    assert_in_range(cage.sent, 23, 25); /* a quarter of the bound between them */
    assert_false(is_stuck(&cage));
}

static void test_a_slow_canary_leaves_room_for_others(void **state) {
    (void)state;
    struct cage cage = cage_create();
    int64_t busy_ms = 0;
    for (uint32_t i = 0; i < 600; i++) {
        wait_ms(&cage, 50, CAUSE_NONE);
        if (cage.canary.is_running) {
            cage.now_ms += 500;
            busy_ms += 500;
            ended(&cage, CAUSE_DONE, "");
        }
    }
    assert_true(cage.sent > 5);
    assert_true(busy_ms * 4 < cage.now_ms);
    assert_false(is_stuck(&cage));
}

static void test_only_one_runs_and_one_that_hangs_makes_the_router_stuck(void **state) {
    (void)state;
    struct cage cage = cage_create();
    wait_ms(&cage, 2000, CAUSE_DONE);
    uint32_t before = cage.sent;
    wait_ms(&cage, BOUND_MS - 1500, CAUSE_NONE);
    assert_int_equal(cage.sent, before + 1);
    assert_false(is_stuck(&cage));
    wait_ms(&cage, 2500, CAUSE_NONE);
    assert_true(is_stuck(&cage));
    ended(&cage, CAUSE_DEADLINE, "prefill-1");
    char text[256];
    struct writer writer;
    writer_init(&writer, text, sizeof text - 1);
    canary_describe(&cage.canary, cage.facts.decodes, at(&cage), &writer);
    text[writer.len] = '\0';
    assert_non_null(strstr(text, "although 2 decode workers look usable"));
    assert_non_null(strstr(text, "at decode-1 and prefill-1: deadline"));
    assert_int_equal(cage.canary.stats.failures[CAUSE_DEADLINE], 1);
    wait_ms(&cage, 50, CAUSE_DONE);
    assert_false(is_stuck(&cage)); /* it recovers by itself */
}

static void test_what_clients_get_is_progress_too(void **state) {
    (void)state;
    struct cage cage = cage_create();
    for (uint32_t i = 0; i < 10; i++) {
        wait_ms(&cage, 5000, CAUSE_DEADLINE);
        cage.facts.user_progress++;
        assert_false(is_stuck(&cage));
    }
    wait_ms(&cage, BOUND_MS + 1000, CAUSE_DEADLINE);
    assert_true(is_stuck(&cage));
}

static void test_a_full_cluster_is_stuck_only_if_nobodys_work_moves(void **state) {
    (void)state;
    struct cage cage = cage_create();
    for (uint32_t i = 0; i < 10; i++) {
        wait_ms(&cage, 5000, CAUSE_BUSY);
        cage.facts.fleet_progress++;
        assert_false(is_stuck(&cage));
    }
    assert_int_equal(cage.canary.stats.results[0][CANARY_FAILED], 0);
    wait_ms(&cage, BOUND_MS + 1000, CAUSE_BUSY);
    assert_true(is_stuck(&cage));
}

static void test_beats_do_not_excuse_canaries_that_fail(void **state) {
    (void)state;
    struct cage cage = cage_create();
    for (uint32_t i = 0; i < 12; i++) {
        wait_ms(&cage, 1000, CAUSE_STALL);
        cage.facts.fleet_progress++;
    }
    assert_true(is_stuck(&cage));
}

static void test_without_workers_or_in_a_drain_nothing_is_expected(void **state) {
    (void)state;
    struct cage cage = cage_create();
    wait_ms(&cage, 8000, CAUSE_DEADLINE);
    cage.facts.decodes = 0;
    wait_ms(&cage, 60000, CAUSE_DEADLINE);
    assert_false(is_stuck(&cage));
    assert_int_equal(span_to_ms(canary_age(&cage.canary, false, at(&cage))), 0);
    cage.facts.decodes = 1; /* the time without them does not count */
    wait_ms(&cage, 8000, CAUSE_DEADLINE);
    assert_false(is_stuck(&cage));
    cage.facts.is_draining = true;
    uint32_t before = cage.sent;
    wait_ms(&cage, 60000, CAUSE_DEADLINE);
    assert_int_equal(cage.sent, before);
    assert_false(is_stuck(&cage));
}

static void test_a_broken_prefill_path_ages_alone_and_does_not_hide_the_other(void **state) {
    (void)state;
    struct cage cage = cage_create();
    for (uint32_t i = 0; i < 1200; i++) {
        cage.now_ms += 50;
        enum canary_legs legs = canary_poll(&cage.canary, &cage.facts, at(&cage));
        if (legs == CANARY_TWO_LEGS) {
            cage.now_ms += span_to_ms(canary_budget(&cage.canary));
            ended(&cage, CAUSE_DEADLINE, "prefill-1");
        } else if (legs == CANARY_ONE_LEG) {
            ended(&cage, CAUSE_DONE, "");
        }
        assert_false(is_stuck(&cage));
    }
    assert_true(span_to_ms(canary_age(&cage.canary, true, at(&cage))) > 60000);
    cage.facts.prefills = 0;
    cage.facts.has_prefill = false;
    wait_ms(&cage, 5000, CAUSE_DONE);
    assert_int_equal(span_to_ms(canary_age(&cage.canary, true, at(&cage))), 0);
}

static void test_no_bound_means_no_canaries(void **state) {
    (void)state;
    struct cage cage = cage_create();
    canary_init(&cage.canary, span_ms(0), at(&cage));
    wait_ms(&cage, 60000, CAUSE_DONE);
    assert_int_equal(cage.sent, 0);
    assert_false(is_stuck(&cage));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_canary_a_second_is_sent_by_each_path),
        cmocka_unit_test(test_several_routers_share_the_rate_as_far_as_the_bound_allows),
        cmocka_unit_test(test_a_slow_canary_leaves_room_for_others),
        cmocka_unit_test(test_only_one_runs_and_one_that_hangs_makes_the_router_stuck),
        cmocka_unit_test(test_what_clients_get_is_progress_too),
        cmocka_unit_test(test_a_full_cluster_is_stuck_only_if_nobodys_work_moves),
        cmocka_unit_test(test_beats_do_not_excuse_canaries_that_fail),
        cmocka_unit_test(test_without_workers_or_in_a_drain_nothing_is_expected),
        cmocka_unit_test(test_a_broken_prefill_path_ages_alone_and_does_not_hide_the_other),
        cmocka_unit_test(test_no_bound_means_no_canaries),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
