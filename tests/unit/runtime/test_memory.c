/* A machine of files: what /proc and the control groups say is written into a folder. */
#include "runtime/memory.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "unit.h"

#define MIB (1024ull * 1024ull)

static char root[] = "/tmp/memory-XXXXXX";

/* Writes root/PATH, with the folders on the way. */
static void put(const char *path, const char *text) {
    char name[512];
    assert_true(snprintf(name, sizeof name, "%s/%s", root, path) < (int)sizeof name);
    for (char *cut = strchr(name + 1, '/'); cut != NULL; cut = strchr(cut + 1, '/')) {
        *cut = '\0';
        assert_true(mkdir(name, 0700) == 0 || errno == EEXIST);
        *cut = '/';
    }
    FILE *file = fopen(name, "we");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static int setup(void **state) {
    (void)state;
    memcpy(strrchr(root, '-'), "-XXXXXX", 8);
    return mkdtemp(root) == NULL;
}

static int teardown(void **state) {
    (void)state;
    char command[64];
    (void)snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command); /* NOLINT(cert-env33-c): a name of our own */
}

static void test_a_system_that_says_nothing_has_no_bound(void **state) {
    (void)state;
    assert_true(memory_left(root).bytes == UINT64_MAX);
    put("proc/meminfo", "MemTotal: 10 kB\nMemAvailable: much\n");
    put("proc/self/cgroup", "1:memory:/old\n");
    assert_true(memory_left(root).bytes == UINT64_MAX);
}

static void test_the_machine_counts_what_it_would_free_and_swap(void **state) {
    (void)state;
    put("proc/meminfo", "MemFree:  1 kB\nMemAvailable:    2048 kB\nSwapFree:   1024 kB\n");
    struct memory_left left = memory_left(root);
    assert_true(left.bytes == 3 * MIB);
    assert_string_equal(left.whose, "the machine has");
}

static void test_a_limit_counts_less_what_is_used_but_not_files(void **state) {
    (void)state;
    put("proc/meminfo", "MemAvailable: 1048576 kB\n");
    put("proc/self/cgroup", "4:cpu:/a\n0::/pods/one\n");
    put("sys/fs/cgroup/pods/one/memory.max", "104857600\n");
    put("sys/fs/cgroup/pods/one/memory.current", "83886080\n");
    struct memory_left left = memory_left(root);
    assert_true(left.bytes == 20 * MIB);
    assert_string_equal(left.whose, "the memory limit of its container leaves");
    put("sys/fs/cgroup/pods/one/memory.stat",
        "anon 1\ninactive_file 10485760\nactive_file 31457280\nfile 99\n");
    assert_true(memory_left(root).bytes == 60 * MIB);
    put("sys/fs/cgroup/pods/one/memory.max", "max\n");
    assert_true(memory_left(root).bytes == 1024 * MIB);
}

static void test_the_groups_around_count_as_well(void **state) {
    (void)state;
    put("proc/self/cgroup", "0::/pods/one\n");
    put("sys/fs/cgroup/pods/one/memory.max", "104857600\n");
    put("sys/fs/cgroup/pods/one/memory.current", "0\n");
    put("sys/fs/cgroup/pods/memory.max", "52428800\n");
    put("sys/fs/cgroup/pods/memory.current", "10485760\n");
    assert_true(memory_left(root).bytes == 40 * MIB);
    /* A container sees its own group as the root. */
    put("proc/self/cgroup", "0::/\n");
    put("sys/fs/cgroup/memory.max", "1048576\n");
    put("sys/fs/cgroup/memory.current", "4194304\n");
    assert_true(memory_left(root).bytes == 0);
}

static void test_this_machine_says_something(void **state) {
    (void)state;
    struct memory_left left = memory_left("");
    assert_true(left.bytes > 0 && left.bytes < UINT64_MAX);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_system_that_says_nothing_has_no_bound, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_the_machine_counts_what_it_would_free_and_swap, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_a_limit_counts_less_what_is_used_but_not_files, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_the_groups_around_count_as_well, setup, teardown),
        cmocka_unit_test(test_this_machine_says_something),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
