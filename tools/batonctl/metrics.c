#include "tools/batonctl/metrics.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

bool series_next(const char **cursor, struct series *series_out) {
    while (**cursor != '\0') {
        const char *line = *cursor;
        size_t len = strcspn(line, "\n");
        *cursor = line + len + (line[len] == '\n' ? 1 : 0);
        size_t name_len = strcspn(line, "{ \n");
        if (line[0] == '#' || name_len == 0 || name_len >= len) {
            continue;
        }
        struct series series = {.name = line, .name_len = name_len, .labels = ""};
        const char *end = line + len;
        const char *value = line + name_len;
        if (*value == '{') {
            series.labels = value + 1;
            bool is_quoted = false;
            for (value++; value < end && (is_quoted || *value != '}'); value++) {
                if (*value == '\\' && is_quoted && value + 1 < end) {
                    value++;
                } else if (*value == '"') {
                    is_quoted = !is_quoted;
                }
            }
            series.labels_len = (size_t)(value - series.labels);
            value += value < end ? 1 : 0;
        }
        char *after = NULL;
        series.value = strtod(value, &after);
        if (after == value || after > end) {
            continue;
        }
        *series_out = series;
        return true;
    }
    return false;
}

bool series_is(const struct series *series, const char *name) {
    return strlen(name) == series->name_len && memcmp(series->name, name, series->name_len) == 0;
}

bool series_label(const struct series *series, const char *label, char *value, size_t cap) {
    const char *at = series->labels;
    const char *end = series->labels + series->labels_len;
    size_t label_len = strlen(label);
    while (at < end) {
        const char *equals = memchr(at, '=', (size_t)(end - at));
        if (equals == NULL || equals + 1 >= end || equals[1] != '"') {
            return false;
        }
        bool is_it = (size_t)(equals - at) == label_len && memcmp(at, label, label_len) == 0;
        size_t len = 0;
        for (at = equals + 2; at < end && *at != '"'; at++) {
            at += *at == '\\' && at + 1 < end ? 1 : 0;
            if (is_it && len + 1 < cap) {
                value[len++] = at[-1] == '\\' && *at == 'n' ? '\n' : *at;
            }
        }
        if (is_it) {
            value[len] = '\0';
            return true;
        }
        at += at < end ? 1 : 0;
        at += at < end && *at == ',' ? 1 : 0;
    }
    return false;
}

double metrics_sum(const char *text, const char *name, const char *label, const char *value) {
    double sum = 0;
    struct series series;
    char found[128];
    while (series_next(&text, &series)) {
        if (series_is(&series, name) &&
            (label == NULL ||
             (series_label(&series, label, found, sizeof found) && strcmp(found, value) == 0))) {
            sum += series.value;
        }
    }
    return sum;
}

void bins_add(struct histogram_bins *bins, const char *text, const char *name, double factor) {
    struct series series;
    char bound_text[32];
    size_t name_len = strlen(name);
    while (series_next(&text, &series)) {
        if (series.name_len != name_len + 7 || memcmp(series.name, name, name_len) != 0 ||
            memcmp(series.name + name_len, "_bucket", 7) != 0 ||
            !series_label(&series, "le", bound_text, sizeof bound_text)) {
            continue;
        }
        double bound = strtod(bound_text, NULL); /* "+Inf" too */
        uint32_t i = 0;
        while (i < bins->used && bins->bound[i] < bound) {
            i++;
        }
        if (i == BINS_MAX || (bins->used == BINS_MAX && bins->bound[i] > bound)) {
            continue;
        }
        if (i == bins->used || bins->bound[i] > bound) {
            memmove(&bins->bound[i + 1], &bins->bound[i], (bins->used - i) * sizeof(double));
            memmove(&bins->count[i + 1], &bins->count[i], (bins->used - i) * sizeof(double));
            bins->bound[i] = bound;
            bins->count[i] = 0;
            bins->used++;
        }
        bins->count[i] += factor * series.value;
    }
}

double bins_total(const struct histogram_bins *bins) {
    return bins->used > 0 ? bins->count[bins->used - 1] : 0;
}

double bins_quantile(const struct histogram_bins *bins, double quantile) {
    double total = bins_total(bins);
    if (!(total > 0)) {
        return -1;
    }
    double rank = quantile * total;
    uint32_t i = 0;
    while (i + 1 < bins->used && bins->count[i] < rank) {
        i++;
    }
    double low = i > 0 ? bins->bound[i - 1] : 0;
    double before = i > 0 ? bins->count[i - 1] : 0;
    if (isinf(bins->bound[i])) {
        return low; /* above the last bound: nothing better is known */
    }
    double inside = bins->count[i] - before;
    return inside > 0 ? low + (bins->bound[i] - low) * (rank - before) / inside : bins->bound[i];
}
