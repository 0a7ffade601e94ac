#include "runtime/metrics.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "runtime/escape.h"

#define SERIES_MAX 65536
#define NUMBER_CAP 32

struct metric {
    struct metric *next;
    enum metric_kind kind;
    char *name;
    char *help; /* escaped */
    char *label_names[METRIC_LABELS];
    char **label_values[METRIC_LABELS];
    uint32_t label_count;                /* labels in use are the first ones */
    uint32_t value_count[METRIC_LABELS]; /* 1 for absent labels */
    uint32_t series_count;
    double *buckets;
    uint32_t bucket_count;
    uint32_t stride; /* cells per series: 1; histograms: buckets, +Inf, sum */
    char *group;
    bool hides_zero;
    metric_collect collect;
    void *collect_ctx;
    _Atomic uint64_t *cells; /* counts, or the bits of a double for gauges and sums */
};

struct metrics {
    struct metric *first;
    struct metric *last;
    char **constant_names; /* for the check that no metric repeats one */
    uint32_t constant_count;
    char *constant_text; /* role="x",worker="y" */
};

struct metric_emitter {
    const struct metrics *metrics;
    const struct metric *metric;
    struct buffer *buffer;
};

const double metric_latency_buckets[METRIC_LATENCY_BUCKETS] = {
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60};

static void *checked_alloc(size_t count, size_t size) {
    void *memory = calloc(count > 0 ? count : 1, size);
    CHECK(memory != NULL);
    return memory;
}

static char *text_clone(const char *text) {
    size_t size = strlen(text) + 1;
    char *clone = checked_alloc(size, 1);
    memcpy(clone, text, size);
    return clone;
}

static bool name_is_good(const char *name, bool allows_colon) {
    if (name[0] == '\0' || (name[0] >= '0' && name[0] <= '9')) {
        return false;
    }
    for (; *name != '\0'; name++) {
        bool is_good = (*name >= 'a' && *name <= 'z') || (*name >= 'A' && *name <= 'Z') ||
                       (*name >= '0' && *name <= '9') || *name == '_' ||
                       (allows_colon && *name == ':');
        if (!is_good) {
            return false;
        }
    }
    return true;
}

static bool ends_with(const char *text, const char *end) {
    size_t len = strlen(text);
    size_t end_len = strlen(end);
    return len >= end_len && strcmp(text + len - end_len, end) == 0;
}

/* Backslash and line break always, the quote only in label values; bytes that are not UTF-8 become
 * U+FFFD because a scraper refuses the whole page for one of them. */
static void put_escaped(struct buffer *to, const char *text, bool is_label) {
    const uint8_t *data = (const uint8_t *)text;
    size_t len = strlen(text);
    for (size_t at = 0; at < len;) {
        size_t used = escape_utf8_len(data + at, len - at);
        if (used == 0) {
            buffer_text(to, "\xef\xbf\xbd");
            used = 1;
        } else if (text[at] == '\\') {
            buffer_text(to, "\\\\");
        } else if (text[at] == '\n') {
            buffer_text(to, "\\n");
        } else if (text[at] == '"' && is_label) {
            buffer_text(to, "\\\"");
        } else {
            buffer_put(to, text + at, used);
        }
        at += used;
    }
}

static char *escaped_clone(const char *text, bool is_label) {
    struct buffer buffer;
    buffer_init(&buffer, 64 * 1024);
    put_escaped(&buffer, text, is_label);
    buffer_put(&buffer, "", 1);
    CHECK(!buffer.is_full);
    return buffer.data;
}

struct metrics *metrics_create(const struct metric_label *labels, uint32_t count) {
    struct metrics *metrics = checked_alloc(1, sizeof *metrics);
    metrics->constant_names = checked_alloc(count, sizeof(char *));
    metrics->constant_count = count;
    struct buffer text;
    buffer_init(&text, 64 * 1024);
    for (uint32_t i = 0; i < count; i++) {
        CHECK(name_is_good(labels[i].name, false));
        metrics->constant_names[i] = text_clone(labels[i].name);
        buffer_printf(&text, "%s%s=\"", i > 0 ? "," : "", labels[i].name);
        put_escaped(&text, labels[i].value, true);
        buffer_text(&text, "\"");
    }
    buffer_put(&text, "", 1);
    CHECK(!text.is_full);
    metrics->constant_text = text.data;
    return metrics;
}

static void metric_destroy(struct metric *metric) {
    for (uint32_t i = 0; i < metric->label_count; i++) {
        for (uint32_t j = 0; metric->label_values[i] != NULL && j < metric->value_count[i]; j++) {
            free(metric->label_values[i][j]);
        }
        free(metric->label_values[i]);
        free(metric->label_names[i]);
    }
    free(metric->cells);
    free(metric->buckets);
    free(metric->group);
    free(metric->help);
    free(metric->name);
    free(metric);
}

void metrics_destroy(struct metrics *metrics) {
    if (metrics == NULL) {
        return;
    }
    while (metrics->first != NULL) {
        struct metric *metric = metrics->first;
        metrics->first = metric->next;
        metric_destroy(metric);
    }
    for (uint32_t i = 0; i < metrics->constant_count; i++) {
        free(metrics->constant_names[i]);
    }
    free(metrics->constant_names);
    free(metrics->constant_text);
    free(metrics);
}

static void check_config(const struct metrics *metrics, const struct metric_config *config) {
    CHECK(name_is_good(config->name, true));
    CHECK(config->help != NULL && config->help[0] != '\0');
    /* Names of other people's dashboards keep their own rules. */
    if (config->group == NULL) {
        CHECK((config->kind == METRIC_COUNTER) == ends_with(config->name, "_total"));
    }
    CHECK(!ends_with(config->name, "_bucket") && !ends_with(config->name, "_count") &&
          !ends_with(config->name, "_sum"));
    for (const struct metric *other = metrics->first; other != NULL; other = other->next) {
        CHECK(strcmp(other->name, config->name) != 0);
    }
    CHECK((config->kind == METRIC_HISTOGRAM) == (config->bucket_count > 0));
    for (uint32_t i = 0; i < config->bucket_count; i++) {
        CHECK(isfinite(config->buckets[i]));
        CHECK(i == 0 || config->buckets[i - 1] < config->buckets[i]);
    }
    CHECK(config->collect == NULL || config->kind != METRIC_HISTOGRAM);
    for (uint32_t i = 0; i < METRIC_LABELS; i++) {
        const struct metric_dimension *label = &config->labels[i];
        if (label->name == NULL) {
            continue;
        }
        CHECK(i == 0 || config->labels[i - 1].name != NULL);
        CHECK(name_is_good(label->name, false) && strcmp(label->name, "le") != 0);
        CHECK((config->collect != NULL) == (label->values == NULL));
        CHECK((config->collect != NULL) == (label->count == 0));
        for (uint32_t j = 0; j < metrics->constant_count; j++) {
            CHECK(strcmp(metrics->constant_names[j], label->name) != 0);
        }
        for (uint32_t j = 0; j < i; j++) {
            CHECK(strcmp(config->labels[j].name, label->name) != 0);
        }
    }
}

struct metric *metrics_add(struct metrics *metrics, const struct metric_config *config) {
    check_config(metrics, config);
    struct metric *metric = checked_alloc(1, sizeof *metric);
    metric->kind = config->kind;
    metric->name = text_clone(config->name);
    metric->help = escaped_clone(config->help, false);
    metric->group = config->group != NULL ? text_clone(config->group) : NULL;
    metric->hides_zero = config->hides_zero;
    metric->collect = config->collect;
    metric->collect_ctx = config->collect_ctx;
    uint64_t series = 1;
    for (uint32_t i = 0; i < METRIC_LABELS; i++) {
        const struct metric_dimension *label = &config->labels[i];
        metric->value_count[i] = 1;
        if (label->name == NULL) {
            continue;
        }
        metric->label_names[i] = text_clone(label->name);
        metric->label_count = i + 1;
        if (label->values != NULL) {
            metric->value_count[i] = label->count;
            metric->label_values[i] = checked_alloc(label->count, sizeof(char *));
            for (uint32_t j = 0; j < label->count; j++) {
                metric->label_values[i][j] = escaped_clone(label->values[j], true);
            }
        }
        series *= metric->value_count[i];
    }
    CHECK_OP(series, <=, SERIES_MAX);
    metric->series_count = (uint32_t)series;
    metric->bucket_count = config->bucket_count;
    metric->stride = config->kind == METRIC_HISTOGRAM ? config->bucket_count + 2 : 1;
    metric->buckets = checked_alloc(config->bucket_count, sizeof(double));
    for (uint32_t i = 0; i < config->bucket_count; i++) {
        metric->buckets[i] = config->buckets[i];
    }
    metric->cells = checked_alloc((size_t)series * metric->stride, sizeof *metric->cells);
    if (metrics->last == NULL) {
        metrics->first = metric;
    } else {
        metrics->last->next = metric;
    }
    metrics->last = metric;
    return metric;
}

uint32_t metric_series(const struct metric *metric, uint32_t a, uint32_t b, uint32_t c) {
    CHECK_OP(a, <, metric->value_count[0]);
    CHECK_OP(b, <, metric->value_count[1]);
    CHECK_OP(c, <, metric->value_count[2]);
    return (a * metric->value_count[1] + b) * metric->value_count[2] + c;
}

static double bits_to_real(uint64_t bits) {
    double value = 0;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint64_t real_to_bits(double value) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void cell_add_real(_Atomic uint64_t *cell, double by) {
    uint64_t before = atomic_load_explicit(cell, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(cell, &before,
                                                  real_to_bits(bits_to_real(before) + by),
                                                  memory_order_relaxed, memory_order_relaxed)) {
        /* `before` was refreshed */
    }
}

static _Atomic uint64_t *metric_cells(const struct metric *metric, enum metric_kind kind,
                                      uint32_t series) {
    CHECK(metric->kind == kind);
    CHECK_OP(series, <, metric->series_count);
    return metric->cells + (size_t)series * metric->stride;
}

void metric_count(struct metric *metric, uint32_t series, uint64_t by) {
    (void)atomic_fetch_add_explicit(metric_cells(metric, METRIC_COUNTER, series), by,
                                    memory_order_relaxed);
}

void metric_count_to(struct metric *metric, uint32_t series, uint64_t value) {
    _Atomic uint64_t *cell = metric_cells(metric, METRIC_COUNTER, series);
    uint64_t before = atomic_load_explicit(cell, memory_order_relaxed);
    while (before < value &&
           !atomic_compare_exchange_weak_explicit(cell, &before, value, memory_order_relaxed,
                                                  memory_order_relaxed)) {
        /* `before` was refreshed */
    }
}

void metric_set(struct metric *metric, uint32_t series, double value) {
    atomic_store_explicit(metric_cells(metric, METRIC_GAUGE, series), real_to_bits(value),
                          memory_order_relaxed);
}

void metric_adjust(struct metric *metric, uint32_t series, double by) {
    cell_add_real(metric_cells(metric, METRIC_GAUGE, series), by);
}

void metric_observe(struct metric *metric, uint32_t series, double value) {
    _Atomic uint64_t *cells = metric_cells(metric, METRIC_HISTOGRAM, series);
    uint32_t bucket = 0;
    while (bucket < metric->bucket_count && !(value <= metric->buckets[bucket])) {
        bucket++;
    }
    (void)atomic_fetch_add_explicit(&cells[bucket], 1, memory_order_relaxed);
    cell_add_real(&cells[metric->bucket_count + 1], value);
}

double metric_value(const struct metric *metric, uint32_t series) {
    const _Atomic uint64_t *cells = metric_cells(metric, metric->kind, series);
    switch (metric->kind) {
    case METRIC_COUNTER: return (double)atomic_load_explicit(cells, memory_order_relaxed);
    case METRIC_GAUGE: return bits_to_real(atomic_load_explicit(cells, memory_order_relaxed));
    case METRIC_HISTOGRAM: break;
    }
    uint64_t count = 0;
    for (uint32_t i = 0; i <= metric->bucket_count; i++) {
        count += atomic_load_explicit(&cells[i], memory_order_relaxed);
    }
    return (double)count;
}

/* The shortest text that reads back as the same value. */
static void real_text(double value, char *text) {
    if (isnan(value)) {
        (void)snprintf(text, NUMBER_CAP, "NaN");
        return;
    }
    if (isinf(value)) {
        (void)snprintf(text, NUMBER_CAP, value > 0 ? "+Inf" : "-Inf");
        return;
    }
    for (int digits = 6; digits <= 17; digits++) {
        (void)snprintf(text, NUMBER_CAP, "%.*g", digits, value);
        double back = strtod(text, NULL);
        if (back >= value && back <= value) {
            return;
        }
    }
}

/* name{constant,labels,le} up to the blank before the value. values: escaped, one per label. */
static void put_series(const struct metrics *metrics, const struct metric *metric,
                       const char *suffix, const char *const *values, const char *le,
                       struct buffer *to) {
    buffer_printf(to, "%s%s", metric->name, suffix);
    bool has_some = metrics->constant_text[0] != '\0';
    if (has_some || metric->label_count > 0 || le != NULL) {
        buffer_printf(to, "{%s", metrics->constant_text);
        for (uint32_t i = 0; i < metric->label_count; i++) {
            buffer_printf(to, "%s%s=\"", has_some ? "," : "", metric->label_names[i]);
            buffer_text(to, values[i]);
            buffer_text(to, "\"");
            has_some = true;
        }
        if (le != NULL) {
            buffer_printf(to, "%sle=\"%s\"", has_some ? "," : "", le);
        }
        buffer_text(to, "}");
    }
    buffer_text(to, " ");
}

void metric_emit(struct metric_emitter *emitter, const char *const *values, double value) {
    char *escaped[METRIC_LABELS] = {NULL};
    const char *borrowed[METRIC_LABELS] = {NULL};
    for (uint32_t i = 0; i < emitter->metric->label_count; i++) {
        escaped[i] = escaped_clone(values[i], true);
        borrowed[i] = escaped[i];
    }
    char text[NUMBER_CAP];
    real_text(value, text);
    put_series(emitter->metrics, emitter->metric, "", borrowed, NULL, emitter->buffer);
    buffer_printf(emitter->buffer, "%s\n", text);
    for (uint32_t i = 0; i < emitter->metric->label_count; i++) {
        free(escaped[i]);
    }
}

static void put_histogram(const struct metrics *metrics, const struct metric *metric,
                          const _Atomic uint64_t *cells, const char *const *values,
                          struct buffer *to) {
    uint64_t total = 0;
    char text[NUMBER_CAP];
    for (uint32_t i = 0; i <= metric->bucket_count; i++) {
        total += atomic_load_explicit(&cells[i], memory_order_relaxed);
        real_text(i < metric->bucket_count ? metric->buckets[i] : (double)INFINITY, text);
        put_series(metrics, metric, "_bucket", values, text, to);
        buffer_printf(to, "%llu\n", (unsigned long long)total);
    }
    real_text(
        bits_to_real(atomic_load_explicit(&cells[metric->bucket_count + 1], memory_order_relaxed)),
        text);
    put_series(metrics, metric, "_sum", values, NULL, to);
    buffer_printf(to, "%s\n", text);
    put_series(metrics, metric, "_count", values, NULL, to);
    buffer_printf(to, "%llu\n", (unsigned long long)total);
}

static void put_metric(const struct metrics *metrics, const struct metric *metric,
                       struct buffer *to) {
    for (uint32_t series = 0; series < metric->series_count; series++) {
        const char *values[METRIC_LABELS] = {NULL};
        uint32_t rest = series;
        for (uint32_t i = METRIC_LABELS; i-- > 0;) {
            if (i < metric->label_count) {
                values[i] = metric->label_values[i][rest % metric->value_count[i]];
            }
            rest /= metric->value_count[i];
        }
        const _Atomic uint64_t *cells = metric->cells + (size_t)series * metric->stride;
        char text[NUMBER_CAP];
        switch (metric->kind) {
        case METRIC_COUNTER: {
            uint64_t count = atomic_load_explicit(cells, memory_order_relaxed);
            if (count != 0 || !metric->hides_zero) {
                put_series(metrics, metric, "", values, NULL, to);
                buffer_printf(to, "%llu\n", (unsigned long long)count);
            }
            break;
        }
        case METRIC_GAUGE:
            real_text(bits_to_real(atomic_load_explicit(cells, memory_order_relaxed)), text);
            put_series(metrics, metric, "", values, NULL, to);
            buffer_printf(to, "%s\n", text);
            break;
        case METRIC_HISTOGRAM: put_histogram(metrics, metric, cells, values, to); break;
        }
    }
}

static bool group_is_asked(const char *groups, const char *group) {
    size_t len = strlen(group);
    while (groups != NULL) {
        if (strncmp(groups, group, len) == 0 && (groups[len] == ',' || groups[len] == '\0')) {
            return true;
        }
        groups = strchr(groups, ',');
        groups = groups != NULL ? groups + 1 : NULL;
    }
    return false;
}

static const char *kind_text(enum metric_kind kind) {
    switch (kind) {
    case METRIC_COUNTER: return "counter";
    case METRIC_GAUGE: return "gauge";
    case METRIC_HISTOGRAM: return "histogram";
    }
    return "untyped";
}

void metrics_expose(struct metrics *metrics, const char *groups, struct buffer *buffer) {
    for (const struct metric *metric = metrics->first; metric != NULL; metric = metric->next) {
        if (metric->group != NULL && !group_is_asked(groups, metric->group)) {
            continue;
        }
        buffer_printf(buffer, "# HELP %s %s\n# TYPE %s %s\n", metric->name, metric->help,
                      metric->name, kind_text(metric->kind));
        if (metric->collect != NULL) {
            struct metric_emitter emitter = {metrics, metric, buffer};
            metric->collect(metric->collect_ctx, &emitter);
        } else {
            put_metric(metrics, metric, buffer);
        }
    }
}
