#include "base/check.h"

#include "unit.h"

static void test_true_facts_pass_and_are_evaluated_once(void **state) {
    (void)state;
    int calls = 0;
    CHECK(++calls == 1);
    CHECK_OP(++calls, ==, 2);
    assert_int_equal(calls, 2);
}

static void test_false_facts_abort(void **state) {
    (void)state;
    assert_aborts(CHECK(1 == 2));
    assert_aborts(CHECK_OP(1, >, 2));
}

static void write_hook(const char *file, int line, const char *what) {
    (void)fprintf(stderr, "hook %s %d %s\n", file != NULL ? "file" : "", line > 0, what);
    (void)fflush(stderr);
}

static void test_failure_prints_operands_and_calls_the_hook_before_it_aborts(void **state) {
    (void)state;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    (void)fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        (void)signal(SIGABRT, SIG_DFL);
        (void)dup2(ends[1], STDERR_FILENO);
        check_set_hook(write_hook);
        int seven = 7;
        CHECK_OP(seven, <, -3);
        _exit(0);
    }
    assert_int_equal(close(ends[1]), 0);
    char text[1024] = "";
    size_t len = 0;
    ssize_t got = 0;
    while ((got = read(ends[0], text + len, sizeof text - 1 - len)) > 0) {
        len += (size_t)got;
    }
    assert_int_equal(close(ends[0]), 0);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    assert_non_null(strstr(text, "test_check.c:"));
    assert_non_null(strstr(text, "check failed: seven < -3 (7, -3)\nhook file 1 seven < -3\n"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_true_facts_pass_and_are_evaluated_once),
        cmocka_unit_test(test_false_facts_abort),
        cmocka_unit_test(test_failure_prints_operands_and_calls_the_hook_before_it_aborts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
