/* The example program does what it says, and says what is wrong without an etcd. */
#define _GNU_SOURCE /* popen, pclose */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "support/etcd.h"

/* Runs it; output: both streams. Returns its exit status. */
static int example(const char *argument, char *output, size_t cap) {
    char command[512];
    (void)snprintf(command, sizeof(command), "%s %s 2>&1", ETCD_EXAMPLE, argument);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    size_t len = fread(output, 1, cap - 1, pipe);
    output[len] = 0;
    int status = pclose(pipe);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void test_the_example_sees_its_own_key_come_and_go(void **state) {
    (void)state;
    char output[4096];
    struct test_etcd *server = test_etcd_start(1);
    assert_int_equal(example(test_etcd_endpoints(server), output, sizeof(output)), 0);
    assert_string_equal(output, "lease granted for 5 s\nPUT example/hello = world\n"
                                "DELETE example/hello = \nlease revoked\n");
    test_etcd_destroy(server);
}

static void test_the_example_refuses_a_malformed_endpoint_with_a_sentence(void **state) {
    (void)state;
    char output[4096];
    assert_int_equal(example("nowhere", output, sizeof(output)), 1);
    assert_non_null(strstr(output, "etcd endpoint 'nowhere'"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_example_sees_its_own_key_come_and_go),
        cmocka_unit_test(test_the_example_refuses_a_malformed_endpoint_with_a_sentence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
