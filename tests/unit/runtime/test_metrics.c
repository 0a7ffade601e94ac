#include "runtime/metrics.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "unit.h"

static const struct metric_label constant[] = {{"role", "decode"}, {"worker", "d\"1\\\n"}};
static const char *const states[] = {"reserved", "receiving", "running"};
static const char *const outcomes[] = {"ok", "failed"};

static char *expose(struct metrics *metrics, const char *groups) {
    struct buffer buffer;
    buffer_init(&buffer, 1 << 20);
    metrics_expose(metrics, groups, &buffer);
    buffer_put(&buffer, "", 1);
    assert_false(buffer.is_full);
    return buffer.data;
}

static void test_counter_shows_labels_in_order_and_escaped(void **state) {
    (void)state;
    struct metrics *metrics = metrics_create(constant, 2);
    struct metric *metric = metrics_add(
        metrics,
        &(struct metric_config){.kind = METRIC_COUNTER,
                                .name = "baton_entries_terminal_total",
                                .help = "Entries that ended,\nby \\state.",
                                .labels = {{"outcome", outcomes, 2}, {"state", states, 3}}});
    metric_count(metric, metric_series(metric, 1, 2, 0), 41);
    metric_count(metric, metric_series(metric, 1, 2, 0), 1);
    char *text = expose(metrics, NULL);
    assert_contains(text, "# HELP baton_entries_terminal_total Entries that ended,\\nby "
                          "\\\\state.\n# TYPE baton_entries_terminal_total counter\n");
    assert_contains(text, "\nbaton_entries_terminal_total{role=\"decode\",worker=\"d\\\"1\\\\\\n\","
                          "outcome=\"failed\",state=\"running\"} 42\n");
    assert_contains(text, "outcome=\"ok\",state=\"reserved\"} 0\n");
    free(text);
    metrics_destroy(metrics);
}

static void test_series_with_hides_zero_appear_once_they_count(void **state) {
    (void)state;
    struct metrics *metrics = metrics_create(NULL, 0);
    struct metric *metric =
        metrics_add(metrics, &(struct metric_config){.kind = METRIC_COUNTER,
                                                     .name = "baton_reaped_total",
                                                     .help = "Reaped.",
                                                     .labels = {{"state", states, 3}},
                                                     .hides_zero = true});
    char *text = expose(metrics, NULL);
    assert_lacks(text, "baton_reaped_total{");
    free(text);
    metric_count(metric, 1, 1);
    text = expose(metrics, NULL);
    assert_contains(text, "baton_reaped_total{state=\"receiving\"} 1\n");
    assert_lacks(text, "running");
    free(text);
    metrics_destroy(metrics);
}

static void test_gauge_prints_the_shortest_exact_number(void **state) {
    (void)state;
    static const struct {
        double value;
        const char *text;
    } cases[] = {
        {0, " 0\n"},           {-1.5, " -1.5\n"},           {0.1, " 0.1\n"},
        {1e15, " 1e+15\n"},    {123456789, " 123456789\n"}, {1.0 / 3, " 0.3333333333333333\n"},
        {INFINITY, " +Inf\n"}, {-INFINITY, " -Inf\n"},      {NAN, " NaN\n"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct metrics *metrics = metrics_create(NULL, 0);
        struct metric *metric =
            metrics_add(metrics, &(struct metric_config){METRIC_GAUGE, .name = "baton_age_seconds",
                                                         .help = "A."});
        metric_set(metric, 0, cases[i].value);
        char *text = expose(metrics, NULL);
        assert_contains(text, cases[i].text);
        free(text);
        metrics_destroy(metrics);
    }
}

static void test_gauge_adjusts_and_counter_never_falls(void **state) {
    (void)state;
    struct metrics *metrics = metrics_create(NULL, 0);
    struct metric *gauge = metrics_add(
        metrics, &(struct metric_config){METRIC_GAUGE, .name = "baton_entries", .help = "E."});
    struct metric *counter = metrics_add(
        metrics,
        &(struct metric_config){METRIC_COUNTER, .name = "baton_log_dropped_total", .help = "L."});
    metric_set(gauge, 0, 5);
    metric_adjust(gauge, 0, -2);
    assert_true(metric_value(gauge, 0) > 2.5 && metric_value(gauge, 0) < 3.5);
    metric_count_to(counter, 0, 10);
    metric_count_to(counter, 0, 7);
    assert_int_equal(metric_value(counter, 0), 10);
    metrics_destroy(metrics);
}

static void test_histogram_is_cumulative_with_inclusive_bounds(void **state) {
    (void)state;
    static const double bounds[] = {0.5, 1, 2.5};
    struct metrics *metrics = metrics_create(NULL, 0);
    struct metric *metric = metrics_add(
        metrics, &(struct metric_config){METRIC_HISTOGRAM, .name = "baton_abort_to_freed_seconds",
                                         .help = "H.", .buckets = bounds, .bucket_count = 3});
    static const double seen[] = {0.25, 0.5, 1, 2, 100};
    for (size_t i = 0; i < 5; i++) {
        metric_observe(metric, 0, seen[i]);
    }
    char *text = expose(metrics, NULL);
    assert_contains(text, "# TYPE baton_abort_to_freed_seconds histogram\n"
                          "baton_abort_to_freed_seconds_bucket{le=\"0.5\"} 2\n"
                          "baton_abort_to_freed_seconds_bucket{le=\"1\"} 3\n"
                          "baton_abort_to_freed_seconds_bucket{le=\"2.5\"} 4\n"
                          "baton_abort_to_freed_seconds_bucket{le=\"+Inf\"} 5\n"
                          "baton_abort_to_freed_seconds_sum 103.75\n"
                          "baton_abort_to_freed_seconds_count 5\n");
    assert_int_equal(metric_value(metric, 0), 5);
    free(text);
    metrics_destroy(metrics);
}

static void collect_threads(void *ctx, struct metric_emitter *emitter) {
    const char *first[] = {"control"};
    const char *second[] = {"od\"d\xff"};
    metric_emit(emitter, first, *(double *)ctx);
    metric_emit(emitter, second, 2);
}

static void test_collected_series_are_made_when_asked(void **state) {
    (void)state;
    double value = 0.5;
    struct metrics *metrics = metrics_create(NULL, 0);
    (void)metrics_add(metrics,
                      &(struct metric_config){METRIC_GAUGE, .name = "baton_thread_beat_age_seconds",
                                              .help = "T.", .labels = {{.name = "thread"}},
                                              .collect = collect_threads, .collect_ctx = &value});
    value = 0.75;
    char *text = expose(metrics, NULL);
    assert_contains(text, "baton_thread_beat_age_seconds{thread=\"control\"} 0.75\n");
    assert_contains(text, "{thread=\"od\\\"d\xef\xbf\xbd\"} 2\n");
    free(text);
    metrics_destroy(metrics);
}

static void test_groups_are_shown_only_when_named(void **state) {
    (void)state;
    struct metrics *metrics = metrics_create(NULL, 0);
    (void)metrics_add(metrics,
                      &(struct metric_config){METRIC_GAUGE, .name = "sglang:num_queue_reqs",
                                              .help = "S.", .group = "sglang"});
    (void)metrics_add(metrics,
                      &(struct metric_config){METRIC_GAUGE, .name = "vllm:num_requests_running",
                                              .help = "V.", .group = "vllm"});
    static const struct {
        const char *groups;
        bool has_sglang;
        bool has_vllm;
    } cases[] = {{NULL, false, false},  {"", false, false},          {"sglang", true, false},
                 {"vllm", false, true}, {"sglang,vllm", true, true}, {"vll,sglangx", false, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *text = expose(metrics, cases[i].groups);
        assert_int_equal(strstr(text, "sglang:") != NULL, cases[i].has_sglang);
        assert_int_equal(strstr(text, "vllm:") != NULL, cases[i].has_vllm);
        free(text);
    }
    metrics_destroy(metrics);
}

#define ADDERS 4
#define ADDS   20000

struct adding {
    struct metric *counter;
    struct metric *gauge;
    struct metric *histogram;
};

static void *add_many(void *arg) {
    const struct adding *adding = arg;
    for (uint32_t i = 0; i < ADDS; i++) {
        metric_count(adding->counter, 0, 1);
        metric_adjust(adding->gauge, 0, 1);
        metric_observe(adding->histogram, 0, 0.5);
    }
    return NULL;
}

static void test_updates_from_many_threads_lose_nothing(void **state) {
    (void)state;
    struct metrics *metrics = metrics_create(NULL, 0);
    struct adding adding = {
        metrics_add(metrics,
                    &(struct metric_config){METRIC_COUNTER, .name = "baton_a_total", .help = "A."}),
        metrics_add(metrics,
                    &(struct metric_config){METRIC_GAUGE, .name = "baton_b", .help = "B."}),
        metrics_add(metrics,
                    &(struct metric_config){METRIC_HISTOGRAM, .name = "baton_c_seconds",
                                            .help = "C.", .buckets = metric_latency_buckets,
                                            .bucket_count = METRIC_LATENCY_BUCKETS}),
    };
    pthread_t threads[ADDERS];
    for (int i = 0; i < ADDERS; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, add_many, &adding), 0);
    }
    for (int i = 0; i < 20; i++) { /* reading at the same time must be harmless */
        free(expose(metrics, NULL));
    }
    for (int i = 0; i < ADDERS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
    char *text = expose(metrics, NULL);
    assert_contains(text, "\nbaton_a_total 80000\n");
    assert_contains(text, "\nbaton_b 80000\n");
    assert_contains(text, "\nbaton_c_seconds_sum 40000\nbaton_c_seconds_count 80000\n");
    free(text);
    metrics_destroy(metrics);
}

/* Bad registrations are bugs: each must abort, which a child process shows. */
static void test_bad_registrations_are_checks(void **state) {
    (void)state;
    static const double falling[] = {2, 1};
    static const char *const one[] = {"x"};
    const struct metric_config bad[] = {
        {METRIC_GAUGE, .name = "9lives", .help = "x"},
        {METRIC_GAUGE, .name = "with space", .help = "x"},
        {METRIC_GAUGE, .name = "d\xc3\xa9j\xc3\xa0", .help = "x"},
        {METRIC_GAUGE, .name = "", .help = "x"},
        {METRIC_GAUGE, .name = "baton_x", .help = ""},
        {METRIC_COUNTER, .name = "baton_x", .help = "x"},
        {METRIC_GAUGE, .name = "baton_x_total", .help = "x"},
        {METRIC_GAUGE, .name = "baton_x_count", .help = "x"},
        {METRIC_HISTOGRAM, .name = "baton_x", .help = "x"},
        {METRIC_HISTOGRAM, .name = "baton_x", .help = "x", .buckets = falling, .bucket_count = 2},
        {METRIC_GAUGE, .name = "baton_x", .help = "x", .labels = {{"role", one, 1}}},
        {METRIC_GAUGE, .name = "baton_x", .help = "x", .labels = {{"le", one, 1}}},
        {METRIC_GAUGE, .name = "baton_x", .help = "x", .labels = {{"a:b", one, 1}}},
        {METRIC_GAUGE, .name = "baton_x", .help = "x", .labels = {{"a", one, 1}, {"a", one, 1}}},
        {METRIC_GAUGE, .name = "baton_x", .help = "x", .labels = {{"a", NULL, 0}}},
        {METRIC_GAUGE, .name = "baton_known", .help = "x"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        (void)fflush(NULL);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            (void)!freopen("/dev/null", "w", stderr);
            (void)signal(SIGABRT, SIG_DFL);
            struct metrics *metrics = metrics_create(constant, 2);
            (void)metrics_add(
                metrics, &(struct metric_config){METRIC_GAUGE, .name = "baton_known", .help = "x"});
            (void)metrics_add(metrics, &bad[i]);
            _exit(0);
        }
        int status = 0;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (!WIFSIGNALED(status)) {
            fail_msg("registration %zu (\"%s\") was accepted", i, bad[i].name);
        }
    }
}

/* Runs the real promtool on a text; its exit status is what counts. */
static int promtool(const char *text, char *answer, size_t cap) {
    char path[] = "/tmp/baton-metrics-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    assert_int_equal(close(fd), 0);
    char command[128];
    (void)snprintf(command, sizeof command, "promtool check metrics < %s 2>&1", path);
    FILE *pipe = popen(command, "re");
    assert_non_null(pipe);
    size_t len = fread(answer, 1, cap - 1, pipe);
    answer[len] = '\0';
    int status = pclose(pipe);
    assert_int_equal(unlink(path), 0);
    return WEXITSTATUS(status);
}

static void test_promtool_accepts_the_exposition(void **state) {
    (void)state;
    double value = 1.25;
    struct metrics *metrics = metrics_create(constant, 2);
    struct metric *entries =
        metrics_add(metrics, &(struct metric_config){METRIC_GAUGE, .name = "baton_entries",
                                                     .help = "Live entries.",
                                                     .labels = {{"state", states, 3}}});
    struct metric *ended = metrics_add(
        metrics,
        &(struct metric_config){
            METRIC_COUNTER, .name = "baton_entries_terminal_total",
            .help = "Ended \\ entries\nby outcome.",
            .labels = {{"outcome", outcomes, 2}, {"phase", states, 3}, {"origin", states, 3}}});
    struct metric *freed = metrics_add(
        metrics, &(struct metric_config){
                     METRIC_HISTOGRAM, .name = "baton_abort_to_freed_seconds",
                     .help = "From abort to freed pages.", .labels = {{"state", states, 3}},
                     .buckets = metric_latency_buckets, .bucket_count = METRIC_LATENCY_BUCKETS});
    struct metric *bytes = metrics_add(
        metrics, &(struct metric_config){METRIC_COUNTER, .name = "baton_transfer_bytes_total",
                                         .help = "KV bytes."});
    (void)metrics_add(metrics,
                      &(struct metric_config){METRIC_GAUGE, .name = "baton_thread_beat_age_seconds",
                                              .help = "Age.", .labels = {{.name = "thread"}},
                                              .collect = collect_threads, .collect_ctx = &value});
    metric_set(entries, 2, NAN);
    metric_count(ended, metric_series(ended, 1, 1, 1), UINT64_MAX);
    metric_count(bytes, 0, 1ull << 40);
    metric_observe(freed, 1, 0.0042);
    metric_observe(freed, 1, INFINITY);
    char *text = expose(metrics, NULL);
    char answer[4096];
    int status = promtool(text, answer, sizeof answer);
    if (status != 0 || answer[0] != '\0') {
        fail_msg("promtool says %d: %s\n%s", status, answer, text);
    }
    free(text);
    metrics_destroy(metrics);
}

static void test_promtool_does_find_faults(void **state) {
    (void)state;
    char answer[4096];
    assert_int_not_equal(promtool("# TYPE baton_x counter\nbaton_x 1\n", answer, sizeof answer), 0);
    assert_contains(answer, "_total");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_counter_shows_labels_in_order_and_escaped),
        cmocka_unit_test(test_series_with_hides_zero_appear_once_they_count),
        cmocka_unit_test(test_gauge_prints_the_shortest_exact_number),
        cmocka_unit_test(test_gauge_adjusts_and_counter_never_falls),
        cmocka_unit_test(test_histogram_is_cumulative_with_inclusive_bounds),
        cmocka_unit_test(test_collected_series_are_made_when_asked),
        cmocka_unit_test(test_groups_are_shown_only_when_named),
        cmocka_unit_test(test_bad_registrations_are_checks),
        cmocka_unit_test(test_promtool_accepts_the_exposition),
        cmocka_unit_test(test_promtool_does_find_faults),
        cmocka_unit_test(test_updates_from_many_threads_lose_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
