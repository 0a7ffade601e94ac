#include "base/status.h"

#include "unit.h"

static void test_every_status_has_its_own_lower_case_name(void **state) {
    (void)state;
    for (int i = STATUS_OK; i <= STATUS_INTERNAL; i++) {
        const char *name = status_name((enum status)i);
        assert_string_not_equal(name, "unknown");
        assert_true(strlen(name) > 0);
        assert_int_equal(strspn(name, "abcdefghijklmnopqrstuvwxyz_"), strlen(name));
        for (int j = STATUS_OK; j < i; j++) {
            assert_string_not_equal(name, status_name((enum status)j));
        }
    }
}

static void test_known_names_are_stable(void **state) {
    (void)state;
    assert_string_equal(status_name(STATUS_OK), "ok");
    assert_string_equal(status_name(STATUS_NOT_FOUND), "not_found");
    assert_string_equal(status_name(STATUS_CANCELLED), "cancelled");
}

static void test_a_number_that_is_no_status_is_unknown(void **state) {
    (void)state;
    assert_string_equal(status_name((enum status)99), "unknown");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_status_has_its_own_lower_case_name),
        cmocka_unit_test(test_known_names_are_stable),
        cmocka_unit_test(test_a_number_that_is_no_status_is_unknown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
