/* Metrics: counters, gauges and histograms, updated from any thread without locks.
 *
 * All are registered at start (one thread), then only updated. Each has up to three labels whose
 * values are listed at registration, so the number of series is bounded and a series is an index.
 * Constant labels (role, worker) come from the registry and stand in front of every series. Text
 * exposition is format 0.0.4 and clean under `promtool check metrics`; bad names, a counter without
 * _total or a missing help text are CHECKs at registration. Sets of label values that only run time
 * knows (thread names, peers) come from a collect callback on the exposing thread. */
#ifndef RUNTIME_METRICS_H
#define RUNTIME_METRICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/buffer.h"

#define METRIC_LABELS 3

struct metrics;
struct metric;
struct metric_emitter;

enum metric_kind { METRIC_COUNTER, METRIC_GAUGE, METRIC_HISTOGRAM };

struct metric_label {
    const char *name;
    const char *value;
};
struct metric_dimension {
    const char *name;          /* NULL: no such label */
    const char *const *values; /* `count` texts; NULL for a metric with collect */
    uint32_t count;
};

typedef void (*metric_collect)(void *ctx, struct metric_emitter *emitter);

struct metric_config {
    enum metric_kind kind;
    const char *name; /* baton_...; _total for counters; base units (seconds, bytes) */
    const char *help;
    struct metric_dimension labels[METRIC_LABELS];
    const double *buckets; /* histogram: ascending upper bounds without +Inf */
    uint32_t bucket_count;
    const char *group;      /* NULL: always shown; else only when asked for ("sglang") */
    bool hides_zero;        /* counters: series that never counted are left out */
    metric_collect collect; /* counters and gauges: called instead of the stored series */
    void *collect_ctx;
};

/* labels: constant ones, copied. */
struct metrics *metrics_create(const struct metric_label *labels, uint32_t count);
void metrics_destroy(struct metrics *metrics);
/* All texts and arrays of the config are copied. The metric lives as long as the registry. */
struct metric *metrics_add(struct metrics *metrics, const struct metric_config *config);

/* The series of label values by their index in the config (0 for absent labels). CHECKs bounds.
 * For one label the series is the value's index. */
uint32_t metric_series(const struct metric *metric, uint32_t a, uint32_t b, uint32_t c);

void metric_count(struct metric *metric, uint32_t series, uint64_t by);
/* For a counter that somebody else keeps: sets it; a smaller value than the present is ignored. */
void metric_count_to(struct metric *metric, uint32_t series, uint64_t value);
void metric_set(struct metric *metric, uint32_t series, double value);
void metric_adjust(struct metric *metric, uint32_t series, double by);
void metric_observe(struct metric *metric, uint32_t series, double value);
/* Present value of a counter or gauge; number of observations of a histogram. */
double metric_value(const struct metric *metric, uint32_t series);

/* Inside collect: one series. values: one text per label of the metric. */
void metric_emit(struct metric_emitter *emitter, const char *const *values, double value);

/* Writes all metrics. groups: comma-separated names of extra groups ("sglang,vllm"), or NULL. */
void metrics_expose(struct metrics *metrics, const char *groups, struct buffer *buffer);

/* 1 ms to 60 s, for latencies. */
#define METRIC_LATENCY_BUCKETS 15
extern const double metric_latency_buckets[METRIC_LATENCY_BUCKETS];

#endif
