/* batonctl top: what the cluster does per second, from the difference of two scrapes. */
#include "tools/batonctl/batonctl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "runtime/clock.h"
#include "tools/batonctl/metrics.h"

/* Counters of one program at one time. */
struct sample {
    uint64_t incarnation;
    bool answers;
    struct instant at;
    char *text; /* the scrape; owned */
};

struct samples {
    struct sample *items;
    uint32_t count;
};

struct rates {
    bool has_rates; /* there are two samples of the same process */
    double seconds;
    double requests;   /* per second: ended */
    double tokens;     /* per second: generated (router, decode), computed (prefill) */
    double ttft_p50_s; /* router; -1: none in this interval */
    double ttft_p95_s;
    double itl_p50_s;
    double itl_p95_s;
};

/* Sums over routers. */
struct totals {
    double live;
    double ok;
    double failed;
    double aborted;
    double prompt_tokens;
    double cached_tokens;
    double generated_tokens;
    double retries;
    struct histogram_bins ttft;
    struct histogram_bins itl;
    struct histogram_bins queue;
    struct histogram_bins exposed; /* of prefill workers */
};

#define TTFT    "baton_time_to_first_token_seconds"
#define ITL     "baton_inter_token_latency_seconds"
#define QUEUE   "baton_queue_seconds"
#define EXPOSED "baton_transfer_exposed_seconds"

/* ---- samples -------------------------------------------------------------------------------- */

static void samples_take(const struct survey *survey, struct samples *samples) {
    *samples = (struct samples){.count = survey->programs.count};
    samples->items = calloc(samples->count, sizeof *samples->items);
    CHECK(samples->items != NULL);
    for (uint32_t i = 0; i < samples->count; i++) {
        struct asked *asked = &survey->asked[i];
        samples->items[i] = (struct sample){.incarnation = asked->program->incarnation,
                                            .answers = asked->why[0] == '\0',
                                            .at = asked->metrics.at,
                                            .text = asked->metrics.body};
        asked->metrics.body = NULL; /* moved */
    }
}

static void samples_fini(struct samples *samples) {
    for (uint32_t i = 0; i < samples->count; i++) {
        free(samples->items[i].text);
    }
    free(samples->items);
    *samples = (struct samples){.items = NULL};
}

/* The scrape of the same process before, or NULL. Without etcd only the address is known, and a
 * counter that went back tells of another process. */
static const struct sample *earlier(const struct samples *before, const struct sample *sample,
                                    uint32_t index) {
    for (uint32_t i = 0; i < before->count; i++) {
        const struct sample *one = &before->items[i];
        bool is_same =
            sample->incarnation != 0 ? one->incarnation == sample->incarnation : i == index;
        if (is_same && one->answers &&
            metrics_sum(one->text, "baton_entries_created_total", NULL, NULL) <=
                metrics_sum(sample->text, "baton_entries_created_total", NULL, NULL)) {
            return one;
        }
    }
    return NULL;
}

static double change(const struct sample *then, const struct sample *now, const char *name,
                     const char *label, const char *value) {
    return metrics_sum(now->text, name, label, value) - metrics_sum(then->text, name, label, value);
}

/* Requests of clients that ended: routers count their canaries among their entries. */
static double ended_change(const struct sample *then, const struct sample *now,
                           const char *outcome) {
    static const char *const canaries = "baton_canaries_total";
    double ended = change(then, now, "baton_entries_terminal_total", "outcome", outcome);
    if (strcmp(outcome, "ok") == 0) {
        ended -= change(then, now, canaries, "outcome", "ok");
    } else if (strcmp(outcome, "failed") == 0) {
        ended -= change(then, now, canaries, "outcome", "failed") +
                 change(then, now, canaries, "outcome", "no_room");
    }
    return ended > 0 ? ended : 0;
}

static void bins_change(struct histogram_bins *bins, const struct sample *then,
                        const struct sample *now, const char *name) {
    bins_add(bins, now->text, name, 1);
    bins_add(bins, then->text, name, -1);
}

static void rates_make(const struct program *program, const struct sample *then,
                       const struct sample *now, struct rates *rates) {
    *rates = (struct rates){.ttft_p50_s = -1, .ttft_p95_s = -1, .itl_p50_s = -1, .itl_p95_s = -1};
    if (then == NULL) {
        return;
    }
    rates->has_rates = true;
    rates->seconds = span_to_seconds(instant_since(now->at, then->at));
    rates->requests = (ended_change(then, now, "ok") + ended_change(then, now, "failed") +
                       ended_change(then, now, "aborted")) /
                      rates->seconds;
    rates->tokens = change(then, now, "baton_tokens_total", "kind",
                           program->role == ROLE_PREFILL ? "computed" : "generated") /
                    rates->seconds;
    struct histogram_bins ttft = {.used = 0};
    struct histogram_bins itl = {.used = 0};
    bins_change(&ttft, then, now, TTFT);
    bins_change(&itl, then, now, ITL);
    rates->ttft_p50_s = bins_quantile(&ttft, 0.5);
    rates->ttft_p95_s = bins_quantile(&ttft, 0.95);
    rates->itl_p50_s = bins_quantile(&itl, 0.5);
    rates->itl_p95_s = bins_quantile(&itl, 0.95);
}

static void totals_add(struct totals *totals, const struct sample *then, const struct sample *now) {
    static const char *const tokens = "baton_tokens_total";
    totals->live += metrics_sum(now->text, "baton_entries", NULL, NULL);
    if (then == NULL) {
        return;
    }
    double seconds = span_to_seconds(instant_since(now->at, then->at));
    totals->ok += ended_change(then, now, "ok") / seconds;
    totals->failed += ended_change(then, now, "failed") / seconds;
    totals->aborted += ended_change(then, now, "aborted") / seconds;
    totals->prompt_tokens += change(then, now, tokens, "kind", "prompt") / seconds;
    totals->cached_tokens += change(then, now, tokens, "kind", "cached") / seconds;
    totals->generated_tokens += change(then, now, tokens, "kind", "generated") / seconds;
    totals->retries += change(then, now, "baton_retries_total", NULL, NULL) / seconds;
    bins_change(&totals->ttft, then, now, TTFT);
    bins_change(&totals->itl, then, now, ITL);
    bins_change(&totals->queue, then, now, QUEUE);
}

/* ---- for people ----------------------------------------------------------------------------- */

static const char *latency_text(double seconds, char text[static 24]) {
    if (seconds < 0) {
        (void)snprintf(text, 24, "-");
    } else if (seconds < 0.01) {
        (void)snprintf(text, 24, "%.1f ms", seconds * 1e3);
    } else {
        (void)age_text((int64_t)(seconds * 1e3), text);
    }
    return text;
}

static void print_latency(const struct screen *screen, const char *what,
                          const struct histogram_bins *bins) {
    char p50[24];
    char p95[24];
    char p99[24];
    screen_print(screen, STYLE_PLAIN, 2, "  %-19s p50 %-9s p95 %-9s p99 %s", what,
                 latency_text(bins_quantile(bins, 0.5), p50),
                 latency_text(bins_quantile(bins, 0.95), p95),
                 latency_text(bins_quantile(bins, 0.99), p99));
}

static void print_totals(const struct survey *survey, const struct totals *totals) {
    const struct screen *screen = &survey->screen;
    time_t seconds = (time_t)(survey->taken_unix_ms / 1000);
    struct tm parts;
    (void)gmtime_r(&seconds, &parts);
    screen_print(screen, STYLE_BOLD, 2, "cluster %s at %02d:%02d:%02dZ, per second",
                 survey->options->at != NULL ? "-" : survey->options->cluster, parts.tm_hour,
                 parts.tm_min, parts.tm_sec);
    screen_print(screen, STYLE_PLAIN, 2,
                 "  requests            %.0f live, %.1f ok, %.1f failed, %.1f aborted, %.1f "
                 "retried",
                 totals->live, totals->ok, totals->failed, totals->aborted, totals->retries);
    screen_print(
        screen, STYLE_PLAIN, 2,
        "  tokens              %.0f generated, %.0f of prompts, %.0f of them cached (%.0f %%)",
        totals->generated_tokens, totals->prompt_tokens, totals->cached_tokens,
        totals->prompt_tokens > 0 ? 100 * totals->cached_tokens / totals->prompt_tokens : 0.0);
    print_latency(screen, "time to first token", &totals->ttft);
    print_latency(screen, "between tokens", &totals->itl);
    print_latency(screen, "queued", &totals->queue);
    print_latency(screen, "KV not hidden", &totals->exposed);
}

static const struct column columns[] = {
    {.title = "ROLE"},
    {.title = "ID", .least = 12},
    {.title = "REQ/S", .is_right = true},
    {.title = "TOK/S", .is_right = true},
    {.title = "TTFT P50", .is_right = true, .rank = 2},
    {.title = "P95", .is_right = true, .rank = 2},
    {.title = "ITL P50", .is_right = true, .rank = 1},
    {.title = "P95", .is_right = true, .rank = 3},
    {.title = "PAGES", .is_right = true},
    {.title = "LIVE", .is_right = true},
};

static void cell_rate(struct table *table, bool has_rates, double rate) {
    if (has_rates) {
        table_cell(table, STYLE_PLAIN, rate < 100 ? "%.1f" : "%.0f", rate);
    } else {
        table_cell(table, STYLE_DIM, "-");
    }
}

static void add_row(struct table *table, const struct program *program, const struct sample *sample,
                    const struct rates *rates) {
    table_cell(table, STYLE_PLAIN, "%s",
               program->role != ROLE_NONE ? role_name(program->role) : "-");
    table_cell(table, STYLE_PLAIN, "%s", program->id);
    cell_rate(table, rates->has_rates, rates->requests);
    cell_rate(table, rates->has_rates, rates->tokens);
    char text[24];
    table_cell(table, STYLE_PLAIN, "%s", latency_text(rates->ttft_p50_s, text));
    table_cell(table, STYLE_PLAIN, "%s", latency_text(rates->ttft_p95_s, text));
    table_cell(table, STYLE_PLAIN, "%s", latency_text(rates->itl_p50_s, text));
    table_cell(table, STYLE_PLAIN, "%s", latency_text(rates->itl_p95_s, text));
    if (!sample->answers) {
        table_cell(table, STYLE_DIM, "-");
        table_cell(table, STYLE_BAD, "no answer");
        return;
    }
    double pages = metrics_sum(sample->text, "baton_pages", NULL, NULL);
    if (pages > 0) {
        table_cell(table, STYLE_PLAIN, "%.0f%%",
                   100 * metrics_sum(sample->text, "baton_pages", "state", "owned") / pages);
    } else {
        table_cell(table, STYLE_DIM, "-");
    }
    double live = metrics_sum(sample->text, "baton_entries", NULL, NULL);
    double retracted = metrics_sum(sample->text, "baton_entries", "state", "retracted");
    if (retracted > 0) {
        table_cell(table, STYLE_PLAIN, "%.0f, %.0f retracted", live, retracted);
    } else {
        table_cell(table, STYLE_PLAIN, "%.0f", live);
    }
}

/* ---- for scripts ---------------------------------------------------------------------------- */

/* null where there is no sample. */
static json_t *ms_json(double seconds) {
    return seconds < 0 ? json_null() : json_real(seconds * 1e3);
}

static json_t *latency_json(const struct histogram_bins *bins) {
    return json_pack("{s:o, s:o, s:o, s:I}", "p50_ms", ms_json(bins_quantile(bins, 0.5)), "p95_ms",
                     ms_json(bins_quantile(bins, 0.95)), "p99_ms",
                     ms_json(bins_quantile(bins, 0.99)), "samples", (json_int_t)bins_total(bins));
}

static json_t *top_json(const struct survey *survey, const struct totals *totals,
                        json_t *programs) {
    json_t *json = survey_json(survey);
    json_t *more = json_pack(
        "{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:o, s:o, s:o, s:o, s:o}", "live", totals->live,
        "ok_per_s", totals->ok, "failed_per_s", totals->failed, "aborted_per_s", totals->aborted,
        "retries_per_s", totals->retries, "prompt_tokens_per_s", totals->prompt_tokens,
        "cached_tokens_per_s", totals->cached_tokens, "generated_tokens_per_s",
        totals->generated_tokens, "time_to_first_token", latency_json(&totals->ttft),
        "inter_token_latency", latency_json(&totals->itl), "queue", latency_json(&totals->queue),
        "kv_exposed", latency_json(&totals->exposed), "programs", programs);
    CHECK(more != NULL && json_object_update(json, more) == 0);
    json_decref(more);
    return json;
}

static json_t *program_json(const struct program *program, const struct sample *sample,
                            const struct rates *rates) {
    json_t *json = json_pack(
        "{s:s, s:s, s:b, s:f, s:f, s:o, s:o}", "role", role_name(program->role), "id", program->id,
        "answers", sample->answers, "ended_per_s", rates->requests, "tokens_per_s", rates->tokens,
        "time_to_first_token_p50_ms", ms_json(rates->ttft_p50_s), "inter_token_latency_p50_ms",
        ms_json(rates->itl_p50_s));
    CHECK(json != NULL);
    if (sample->answers && program->role != ROLE_ROUTER) {
        static const char *const states[] = {"free", "cached", "owned"};
        json_t *pages = json_object();
        for (uint32_t i = 0; i < 3; i++) {
            (void)json_object_set_new(pages, states[i],
                                      json_integer((json_int_t)metrics_sum(
                                          sample->text, "baton_pages", "state", states[i])));
        }
        (void)json_object_set_new(json, "pages", pages);
        (void)json_object_set_new(json, "retracted",
                                  json_integer((json_int_t)metrics_sum(
                                      sample->text, "baton_entries", "state", "retracted")));
    }
    return json;
}

/* ---- the command ---------------------------------------------------------------------------- */

static int show(const struct survey *survey, const struct samples *before,
                const struct samples *now) {
    const struct options *options = survey->options;
    bool refreshes = survey->screen.has_color && !options->is_once && !options->is_json;
    struct totals totals = {.live = 0};
    struct table *table = table_create(columns, sizeof columns / sizeof columns[0]);
    json_t *programs = json_array();
    int code = EXIT_DONE;
    for (uint32_t i = 0; i < now->count; i++) {
        const struct program *program = &survey->programs.items[i];
        const struct sample *sample = &now->items[i];
        const struct sample *then = sample->answers ? earlier(before, sample, i) : NULL;
        struct rates rates;
        rates_make(program, then, sample, &rates);
        if (sample->answers && program->role == ROLE_ROUTER) {
            totals_add(&totals, then, sample);
        } else if (then != NULL && program->role == ROLE_PREFILL) {
            bins_change(&totals.exposed, then, sample, EXPOSED);
        }
        code = sample->answers ? code : EXIT_TROUBLE;
        add_row(table, program, sample, &rates);
        (void)json_array_append_new(programs, program_json(program, sample, &rates));
    }
    if (options->is_json) {
        code = print_json(top_json(survey, &totals, programs), code);
    } else {
        json_decref(programs);
        (void)fputs(refreshes ? "\033[H\033[2J" : "", survey->screen.out);
        print_totals(survey, &totals);
        screen_line(&survey->screen);
        table_print(table, &survey->screen, 0);
        (void)survey_print_silent(survey, "");
        if (!options->is_once) {
            screen_line(&survey->screen);
        }
        if (fflush(survey->screen.out) != 0) {
            code = EXIT_FAILED; /* the reader of a pipe has gone */
        }
    }
    table_destroy(table);
    return code;
}

static void sleep_until(struct instant until) {
    struct timespec at = clock_to_timespec(until);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) != 0) {
    }
}

int command_top(const struct options *options) {
    struct samples before = {.items = NULL};
    int code = EXIT_DONE;
    for (uint32_t turn = 0;; turn++) {
        struct instant began = clock_now();
        struct survey survey;
        if (!survey_open(&survey, options)) {
            code = EXIT_FAILED;
            break;
        }
        struct samples now;
        survey_ask(&survey, ASK_METRICS);
        samples_take(&survey, &now);
        if (turn > 0) {
            code = show(&survey, &before, &now);
        }
        samples_fini(&before);
        before = now;
        survey_close(&survey);
        if (code == EXIT_FAILED || (turn > 0 && options->is_once)) {
            break;
        }
        sleep_until(
            instant_add(began, turn == 0 && !options->is_once ? span_ms(1000) : options->every));
    }
    samples_fini(&before);
    return code;
}
