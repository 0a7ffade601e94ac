/* batonctl status: one line for each program, then what is wrong, in words. */
#include "tools/batonctl/batonctl.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "tools/batonctl/metrics.h"

#define OVERRUN_MAX_S 0.5 /* as /readyz counts it */

/* What one program says of itself, read once. */
struct health {
    bool answers;
    bool is_ready;
    bool is_draining;
    double imbalance_entries;
    double imbalance_pages;
    double imbalance_words;
    double overrun_s;
    double audit;
    double entries;
    double oldest_s; /* longest in its present state */
    char oldest_state[64];
};

static void health_read(const struct asked *asked, struct health *health) {
    *health = (struct health){.answers = asked->why[0] == '\0'};
    if (!health->answers) {
        return;
    }
    const char *text = asked->metrics.body;
    health->is_ready = asked->ready.status == 200;
    health->is_draining = metrics_sum(text, "baton_draining", NULL, NULL) > 0;
    health->imbalance_entries = metrics_sum(text, "baton_ledger_imbalance", "what", "entries");
    health->imbalance_pages = metrics_sum(text, "baton_ledger_imbalance", "what", "pages");
    health->imbalance_words = metrics_sum(text, "baton_ledger_imbalance", "what", "words");
    health->overrun_s = metrics_sum(text, "baton_deadline_overrun_seconds", NULL, NULL);
    health->audit = metrics_sum(text, "baton_audit_mismatch_total", NULL, NULL);
    health->entries = metrics_sum(text, "baton_entries", NULL, NULL);
    struct series series;
    while (series_next(&text, &series)) {
        if (series_is(&series, "baton_oldest_entry_age_seconds") &&
            series.value > health->oldest_s &&
            series_label(&series, "state", health->oldest_state, sizeof health->oldest_state)) {
            health->oldest_s = series.value;
        }
    }
}

static bool health_is_good(const struct health *health) {
    return health->answers && health->is_ready && health->imbalance_entries == 0 &&
           health->imbalance_pages == 0 && health->imbalance_words == 0 &&
           health->overrun_s <= OVERRUN_MAX_S && health->audit == 0;
}

/* ---- for people ----------------------------------------------------------------------------- */

static void print_wrong(const struct screen *screen, const struct asked *asked,
                        const struct health *health) {
    const char *id = asked->program->id;
    if (!health->answers) {
        return; /* survey_print_silent says it */
    }
    if (!health->is_ready) {
        const char *line = asked->ready.body;
        while (*line != '\0') {
            int len = (int)strcspn(line, "\n");
            screen_print(screen, health->is_draining ? STYLE_WARN : STYLE_BAD, 2,
                         "! %s is not ready: %.*s", id, len, line);
            line += len + (line[len] == '\n' ? 1 : 0);
        }
    }
    if (health->imbalance_entries != 0) {
        screen_print(screen, STYLE_BAD, 2,
                     "! %s: %.0f entries are neither live nor ended. This must never be: a bug; "
                     "keep its /debug/entries and its log",
                     id, health->imbalance_entries);
    }
    if (health->imbalance_pages != 0) {
        screen_print(screen, STYLE_BAD, 2,
                     "! %s: %.0f pages are neither free, cached nor owned. This must never be: a "
                     "bug; keep its /debug/entries and its log",
                     id, health->imbalance_pages);
    }
    if (health->imbalance_words != 0) {
        screen_print(screen, STYLE_BAD, 2,
                     "! %s: %.0f token buffers belong to nobody. This must never be: a bug; keep "
                     "its /debug/entries and its log",
                     id, health->imbalance_words);
    }
    if (health->overrun_s > OVERRUN_MAX_S) {
        screen_print(screen, STYLE_BAD, 2,
                     "! %s: an entry is %.1f s past the deadline that should have ended it. This "
                     "must never be: a bug; 'batonctl entries' shows which",
                     id, health->overrun_s);
    }
    if (health->audit != 0) {
        screen_print(screen, STYLE_BAD, 2,
                     "! %s: %.0f times a peer did not hold what it should (audit). This must never "
                     "be: a bug; its log says which entries",
                     id, health->audit);
    }
}

/* Prompt tokens since the program started: looked up in the prefix cache, and found. A router
 * counts what neither of its two workers had to compute. */
static double cache_tokens(const struct program *program, const char *text, bool is_found) {
    if (program->role == ROLE_ROUTER) {
        return metrics_sum(text, "baton_tokens_total", "kind", is_found ? "cached" : "prompt");
    }
    return metrics_sum(text,
                       is_found ? "baton_prefix_cache_hit_tokens_total"
                                : "baton_prefix_cache_query_tokens_total",
                       NULL, NULL);
}

static const char *hits_text(const struct program *program, const char *text, char out[static 16]) {
    double asked = cache_tokens(program, text, false);
    (void)snprintf(out, 16, "-");
    if (asked > 0) {
        (void)snprintf(out, 16, "%.0f %%", 100 * cache_tokens(program, text, true) / asked);
    }
    return out;
}

static void add_row(struct table *table, const struct asked *asked, const struct health *health) {
    const struct program *program = asked->program;
    table_cell(table, STYLE_PLAIN, "%s",
               program->role != ROLE_NONE ? role_name(program->role) : "-");
    table_cell(table, STYLE_PLAIN, "%s", program->id);
    if (!health->answers) {
        table_cell(table, STYLE_BAD, "no answer");
        for (uint32_t i = 0; i < 5; i++) {
            table_cell(table, STYLE_DIM, "-");
        }
    } else {
        const char *text = asked->metrics.body;
        char states[256];
        char age[24];
        table_cell(table,
                   health->is_ready      ? STYLE_GOOD
                   : health->is_draining ? STYLE_WARN
                                         : STYLE_BAD,
                   "%s",
                   health->is_draining ? "draining"
                   : health->is_ready  ? "ready"
                                       : "not ready");
        states_text(text, states, sizeof states);
        table_cell(table, states[0] == '\0' ? STYLE_DIM : STYLE_PLAIN, "%s",
                   states[0] == '\0' ? "none" : states);
        if (health->entries > 0) {
            table_cell(table, STYLE_PLAIN, "%s", age_text((int64_t)(health->oldest_s * 1e3), age));
        } else {
            table_cell(table, STYLE_DIM, "-");
        }
        if (program->role == ROLE_ROUTER) {
            table_cell(table, STYLE_DIM, "-");
        } else {
            table_cell(table, STYLE_PLAIN, "%.0f/%.0f/%.0f",
                       metrics_sum(text, "baton_pages", "state", "free"),
                       metrics_sum(text, "baton_pages", "state", "cached"),
                       metrics_sum(text, "baton_pages", "state", "owned"));
        }
        table_cell(table, STYLE_PLAIN, "%.0f", metrics_sum(text, "baton_sessions", NULL, NULL));
        char hits[16];
        table_cell(table, STYLE_PLAIN, "%s", hits_text(program, text, hits));
    }
    table_cell(table, STYLE_PLAIN, "%s", program->version);
    table_cell(table, STYLE_DIM, "%s", program->admin);
}

static const struct column columns[] = {
    {.title = "ROLE"},
    {.title = "ID", .least = 12},
    {.title = "STATE"},
    {.title = "ENTRIES", .least = 12},
    {.title = "LONGEST", .is_right = true},
    {.title = "PAGES FREE/CACHED/OWNED", .is_right = true, .rank = 1},
    {.title = "SESSIONS", .is_right = true, .rank = 2},
    {.title = "CACHE HITS", .is_right = true, .rank = 3},
    {.title = "VERSION", .rank = 3},
    {.title = "ADMIN", .rank = 4},
};
/* The same where the long title would cost a column. */
static const struct column columns_narrow[] = {
    {.title = "ROLE"},
    {.title = "ID", .least = 10},
    {.title = "STATE"},
    {.title = "ENTRIES", .least = 10},
    {.title = "LONGEST", .is_right = true},
    {.title = "F/C/O PAGES", .is_right = true, .rank = 1},
    {.title = "SESS", .is_right = true, .rank = 2},
    {.title = "HITS", .is_right = true, .rank = 3},
    {.title = "VERSION", .rank = 3},
    {.title = "ADMIN", .rank = 4},
};

static void print_heading(const struct survey *survey, uint32_t good) {
    const struct options *options = survey->options;
    uint32_t counts[4] = {0};
    for (uint32_t i = 0; i < survey->programs.count; i++) {
        counts[survey->programs.items[i].role]++;
    }
    bool is_well = good == survey->programs.count;
    screen_print(&survey->screen, is_well ? STYLE_GOOD : STYLE_BAD, 2,
                 "cluster %s: %u router%s, %u prefill worker%s, %u decode worker%s: %s",
                 options->at != NULL ? "(by address)" : options->cluster, counts[ROLE_ROUTER],
                 counts[ROLE_ROUTER] == 1 ? "" : "s", counts[ROLE_PREFILL],
                 counts[ROLE_PREFILL] == 1 ? "" : "s", counts[ROLE_DECODE],
                 counts[ROLE_DECODE] == 1 ? "" : "s",
                 is_well ? "all is well" : "something is wrong");
    if (survey->programs.unreadable > 0) {
        screen_print(&survey->screen, STYLE_WARN, 2,
                     "! %u records in etcd cannot be read by this version of batonctl",
                     survey->programs.unreadable);
    }
}

/* What a whole cluster lacks, whatever each program says. */
static bool print_lacks(const struct survey *survey) {
    uint32_t counts[4] = {0};
    for (uint32_t i = 0; i < survey->programs.count; i++) {
        counts[survey->programs.items[i].role]++;
    }
    if (survey->options->at != NULL || (counts[ROLE_ROUTER] > 0 && counts[ROLE_DECODE] > 0)) {
        return false;
    }
    screen_print(&survey->screen, STYLE_BAD, 2, "! there is no %s: nothing can be served",
                 counts[ROLE_DECODE] == 0 ? "decode worker" : "router");
    return true;
}

static int status_print(const struct survey *survey, const struct health *health, uint32_t good) {
    bool is_narrow = survey->screen.width > 0 && survey->screen.width < 110;
    struct table *table =
        table_create(is_narrow ? columns_narrow : columns, sizeof columns / sizeof columns[0]);
    for (uint32_t i = 0; i < survey->programs.count; i++) {
        add_row(table, &survey->asked[i], &health[i]);
    }
    print_heading(survey, good);
    table_print(table, &survey->screen, 0);
    table_destroy(table);
    if (good < survey->programs.count) {
        screen_line(&survey->screen);
    }
    (void)survey_print_silent(
        survey, ". It is stopped, overloaded, cut off or just gone (etcd forgets it after 10 s)");
    for (uint32_t i = 0; i < survey->programs.count; i++) {
        print_wrong(&survey->screen, &survey->asked[i], &health[i]);
    }
    bool lacks = print_lacks(survey);
    return good == survey->programs.count && !lacks ? EXIT_DONE : EXIT_TROUBLE;
}

/* ---- for scripts ---------------------------------------------------------------------------- */

/* {label value: number} of all series of a name. */
static json_t *by_label(const char *text, const char *name, const char *label, double factor) {
    json_t *json = json_object();
    struct series series;
    char value[64];
    while (series_next(&text, &series)) {
        if (series_is(&series, name) && series_label(&series, label, value, sizeof value) &&
            isfinite(series.value)) {
            (void)json_object_set_new(json, value,
                                      json_integer((json_int_t)llround(series.value * factor)));
        }
    }
    return json;
}

static json_t *lines_json(const char *text) {
    json_t *lines = json_array();
    while (*text != '\0') {
        size_t len = strcspn(text, "\n");
        json_t *line = json_stringn(text, len);
        if (line != NULL) { /* else it was no UTF-8 */
            (void)json_array_append_new(lines, line);
        }
        text += len + (text[len] == '\n' ? 1 : 0);
    }
    return lines;
}

static json_t *program_json(const struct asked *asked, const struct health *health) {
    const struct program *program = asked->program;
    char incarnation[17];
    json_t *json =
        json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:I, s:b, s:b, s:b}", "role",
                  role_name(program->role), "id", program->id, "incarnation",
                  hex_text(program->incarnation, incarnation), "admin", program->admin, "grpc",
                  program->grpc, "model", program->model, "version", program->version, "pid",
                  (int)program->pid, "started_unix_ms", (json_int_t)program->started_unix_ms,
                  "answers", health->answers, "ready", health->is_ready, "draining",
                  health->is_draining || (!health->answers && program->is_draining));
    CHECK(json != NULL);
    if (!health->answers) {
        (void)json_object_set_new(json, "why", lines_json(asked->why));
        return json;
    }
    const char *text = asked->metrics.body;
    (void)json_object_set_new(json, "why",
                              health->is_ready ? json_array() : lines_json(asked->ready.body));
    (void)json_object_set_new(json, "entries", by_label(text, "baton_entries", "state", 1));
    (void)json_object_set_new(json, "longest_in_state_ms",
                              by_label(text, "baton_oldest_entry_age_seconds", "state", 1e3));
    (void)json_object_set_new(json, "pages", by_label(text, "baton_pages", "state", 1));
    (void)json_object_set_new(json, "prefix_cache",
                              json_pack("{s:I, s:I}", "query_tokens",
                                        (json_int_t)llround(cache_tokens(program, text, false)),
                                        "hit_tokens",
                                        (json_int_t)llround(cache_tokens(program, text, true))));
    (void)json_object_set_new(json, "sessions", by_label(text, "baton_sessions", "peer_role", 1));
    (void)json_object_set_new(json, "ledger_imbalance",
                              by_label(text, "baton_ledger_imbalance", "what", 1));
    if (program->role == ROLE_ROUTER) { /* empty: --canary 0 */
        (void)json_object_set_new(json, "canary_age_ms",
                                  by_label(text, "baton_canary_age_seconds", "legs", 1e3));
    }
    (void)json_object_set_new(json, "overrun_ms",
                              json_integer((json_int_t)llround(health->overrun_s * 1e3)));
    (void)json_object_set_new(json, "audit_mismatches",
                              json_integer((json_int_t)llround(health->audit)));
    return json;
}

static int status_json(const struct survey *survey, const struct health *health, uint32_t good) {
    json_t *json = survey_json(survey);
    json_t *programs = json_array();
    bool is_well = good == survey->programs.count;
    for (uint32_t i = 0; i < survey->programs.count; i++) {
        (void)json_array_append_new(programs, program_json(&survey->asked[i], &health[i]));
    }
    (void)json_object_set_new(json, "well", json_boolean(is_well));
    (void)json_object_set_new(json, "programs", programs);
    return print_json(json, is_well ? EXIT_DONE : EXIT_TROUBLE);
}

int command_status(const struct options *options) {
    struct survey survey;
    if (!survey_open(&survey, options)) {
        return EXIT_FAILED;
    }
    survey_ask(&survey, ASK_METRICS | ASK_READY);
    struct health *health = calloc(survey.programs.count, sizeof *health);
    CHECK(health != NULL);
    uint32_t good = 0;
    for (uint32_t i = 0; i < survey.programs.count; i++) {
        health_read(&survey.asked[i], &health[i]);
        good += health_is_good(&health[i]) ? 1 : 0;
    }
    int code =
        options->is_json ? status_json(&survey, health, good) : status_print(&survey, health, good);
    free(health);
    survey_close(&survey);
    return code;
}
