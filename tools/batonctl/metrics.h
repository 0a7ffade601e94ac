/* Numbers out of one scrape of /metrics, and what changed between two.
 *
 * Pure. A scrape is the text itself; series are found by name and by one label pair. */
#ifndef BATONCTL_METRICS_H
#define BATONCTL_METRICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BINS_MAX 64u

/* A series' line taken apart; texts are borrowed from the scrape and not terminated. */
struct series {
    const char *name;
    size_t name_len;
    const char *labels; /* between the braces */
    size_t labels_len;
    double value;
};

/* The next series at *cursor, which starts as the text and moves; false at the end. */
bool series_next(const char **cursor, struct series *series_out);
bool series_is(const struct series *series, const char *name);
/* The value of a label, unescaped, cut to cap - 1 bytes; false if it is not there. */
bool series_label(const struct series *series, const char *label, char *value, size_t cap);

/* The sum over all series of a name that have label=value (label NULL: all). 0 if there is none. */
double metrics_sum(const char *text, const char *name, const char *label, const char *value);

/* A histogram, cumulative as exposed; may be summed over programs and subtracted. */
struct histogram_bins {
    double bound[BINS_MAX]; /* the last is infinite */
    double count[BINS_MAX];
    uint32_t used;
};
/* Adds what the scrape holds of a histogram ("name" without _bucket), times `factor`. */
void bins_add(struct histogram_bins *bins, const char *text, const char *name, double factor);
double bins_total(const struct histogram_bins *bins);
/* The quantile (0..1), interpolated inside its bin as Prometheus does it; -1 without samples. */
double bins_quantile(const struct histogram_bins *bins, double quantile);

#endif
