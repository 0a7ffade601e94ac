/* Numbers out of scrapes. */
#include "tools/batonctl/metrics.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static const char scrape[] = "# HELP baton_entries Live entries.\n"
                             "# TYPE baton_entries gauge\n"
                             "baton_entries{role=\"decode\",worker=\"d 1\",state=\"running\"} 3\n"
                             "baton_entries{role=\"decode\",worker=\"d 1\",state=\"leaving\"} 1\n"
                             "baton_entries_created_total{role=\"decode\"} 1e3\n"
                             "odd{a=\"x}\\\"y\\\\,b=\\n\",b=\"2\"} -4.5\n"
                             "bare 7\n"
                             "broken{a=\"1\"\n"
                             "broken2 x\n"
                             "last{a=\"1\"} 5";

static void close_to(double value, double wanted) {
    assert_true(value > wanted - 1e-9 && value < wanted + 1e-9);
}

static void test_sums_are_over_one_label_or_all(void **state) {
    (void)state;
    close_to(metrics_sum(scrape, "baton_entries", NULL, NULL), 4);
    close_to(metrics_sum(scrape, "baton_entries", "state", "running"), 3);
    close_to(metrics_sum(scrape, "baton_entries", "state", "run"), 0);
    close_to(metrics_sum(scrape, "baton_entries", "nothing", "running"), 0);
    close_to(metrics_sum(scrape, "baton_entries_created_total", NULL, NULL), 1000);
    close_to(metrics_sum(scrape, "bare", NULL, NULL), 7);
    close_to(metrics_sum(scrape, "last", "a", "1"), 5);
    close_to(metrics_sum("", "bare", NULL, NULL), 0);
}

static void test_labels_are_unescaped_and_cut(void **state) {
    (void)state;
    const char *cursor = strstr(scrape, "odd");
    struct series series;
    char value[32];
    char small[4];
    assert_true(series_next(&cursor, &series));
    close_to(series.value, -4.5);
    assert_true(series_label(&series, "a", value, sizeof value));
    assert_string_equal(value, "x}\"y\\,b=\n");
    assert_true(series_label(&series, "b", value, sizeof value));
    assert_string_equal(value, "2");
    assert_false(series_label(&series, "c", value, sizeof value));
    assert_true(series_label(&series, "a", small, sizeof small));
    assert_string_equal(small, "x}\"");
}

static void test_lines_that_are_no_series_are_skipped(void **state) {
    (void)state;
    const char *cursor = scrape;
    struct series series;
    uint32_t count = 0;
    while (series_next(&cursor, &series)) {
        assert_false(series_is(&series, "broken") || series_is(&series, "broken2"));
        count++;
    }
    assert_int_equal(count, 6);
}

static const char before[] = "h_bucket{le=\"0.1\"} 10\nh_bucket{le=\"0.2\"} 10\n"
                             "h_bucket{le=\"+Inf\"} 10\nh_sum 1\nh_count 10\n";
static const char after[] = "h_bucket{le=\"0.1\"} 20\nh_bucket{le=\"0.2\"} 40\n"
                            "h_bucket{le=\"+Inf\"} 50\nh_sum 3\nh_count 50\n";

static void test_quantiles_are_of_the_difference(void **state) {
    (void)state;
    struct histogram_bins bins = {.used = 0};
    close_to(bins_quantile(&bins, 0.5), -1);
    bins_add(&bins, after, "h", 1);
    bins_add(&bins, before, "h", -1);
    assert_int_equal(bins.used, 3);
    close_to(bins_total(&bins), 40);
    close_to(bins_quantile(&bins, 0.25), 0.1);
    close_to(bins_quantile(&bins, 0.5), 0.15); /* 10 of the 20 between 0.1 and 0.2 */
    close_to(bins_quantile(&bins, 0.99), 0.2); /* above the last bound */
}

static void test_an_interval_without_samples_has_no_quantile(void **state) {
    (void)state;
    struct histogram_bins bins = {.used = 0};
    bins_add(&bins, after, "h", 1);
    bins_add(&bins, after, "h", -1);
    close_to(bins_quantile(&bins, 0.5), -1);
}

static void test_more_bins_than_there_is_room_for_are_dropped(void **state) {
    (void)state;
    struct histogram_bins bins = {.used = 0};
    for (uint32_t i = 0; i < 2 * BINS_MAX; i++) {
        char line[64];
        (void)snprintf(line, sizeof line, "h_bucket{le=\"%u\"} 1\n", i);
        bins_add(&bins, line, "h", 1);
    }
    assert_int_equal(bins.used, BINS_MAX);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums_are_over_one_label_or_all),
        cmocka_unit_test(test_labels_are_unescaped_and_cut),
        cmocka_unit_test(test_lines_that_are_no_series_are_skipped),
        cmocka_unit_test(test_quantiles_are_of_the_difference),
        cmocka_unit_test(test_an_interval_without_samples_has_no_quantile),
        cmocka_unit_test(test_more_bins_than_there_is_room_for_are_dropped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
