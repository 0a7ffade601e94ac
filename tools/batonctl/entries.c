/* batonctl entries: all live attempts over all programs, oldest first. */
#include "tools/batonctl/batonctl.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"

static bool row_is_wanted(const struct options *options, const struct row *row) {
    bool has_role = options->role == NULL;
    bool has_state = options->state == NULL;
    for (enum role role = ROLE_ROUTER; role <= ROLE_DECODE; role++) {
        const struct held *held = row->at[role];
        if (held == NULL) {
            continue;
        }
        bool is_role = options->role == NULL || strcmp(options->role, role_name(role)) == 0;
        has_role = has_role || is_role;
        has_state = has_state || (is_role && strcmp(options->state, held->state) == 0);
    }
    return has_role && has_state && row->age_ms >= span_to_ms(options->older_than);
}

static const struct column columns[] = {
    {.title = "REQUEST", .least = 10},
    {.title = "AGE", .is_right = true},
    {.title = "ROUTER"},
    {.title = "PREFILL"},
    {.title = "DECODE"},
    {.title = "FOR", .is_right = true},
    {.title = "LEFT", .is_right = true},
    {.title = "PAGES", .is_right = true, .rank = 2},
    {.title = "TOKENS", .is_right = true, .rank = 1},
    {.title = "ATTEMPT", .rank = 3},
    {.title = "WAITS FOR", .below = "waits for "},
};

static enum style waiting_style(const struct row *row) {
    switch (row->waiting.kind) {
    case WAITING_AT:
    case WAITING_CLIENT: return STYLE_PLAIN;
    case WAITING_SILENT:
    case WAITING_LOST: return STYLE_BAD;
    case WAITING_ABSENT:
    case WAITING_EACH_OTHER: return STYLE_WARN;
    }
    return STYLE_PLAIN;
}

/* A state; "?" where somebody who does not answer may hold it; "-" where nobody does. */
static void cell_state(struct table *table, const struct survey *survey, const struct row *row,
                       enum role role) {
    if (row->at[role] != NULL) {
        table_cell(table, STYLE_PLAIN, "%s", row->at[role]->state);
        return;
    }
    for (uint32_t i = 0; i < survey->programs.count; i++) {
        if (survey->asked[i].why[0] != '\0' && (survey->programs.items[i].role == role ||
                                                survey->programs.items[i].role == ROLE_NONE)) {
            table_cell(table, STYLE_DIM, "?");
            return;
        }
    }
    table_cell(table, STYLE_DIM, "-");
}

static void add_row(struct table *table, const struct survey *survey, const struct row *row) {
    char age[24];
    char text[256];
    char hex[17];
    uint32_t tokens = 0;
    uint32_t pages = 0;
    for (enum role role = ROLE_ROUTER; role <= ROLE_DECODE; role++) {
        if (row->at[role] != NULL) {
            uint32_t held = (uint32_t)json_number(row->at[role]->json, "tokens");
            tokens = held > tokens ? held : tokens;
            pages += (uint32_t)json_number(row->at[role]->json, "pages");
        }
    }
    table_cell(table, STYLE_PLAIN, "%s",
               row->label[0] != '\0' ? row->label : hex_text(row->attempt, hex));
    table_cell(table, STYLE_PLAIN, "%s", age_text(row->age_ms, age));
    cell_state(table, survey, row, ROLE_ROUTER);
    cell_state(table, survey, row, ROLE_PREFILL);
    cell_state(table, survey, row, ROLE_DECODE);
    table_cell(table, STYLE_PLAIN, "%s", age_text(row->waiting.for_ms, age));
    table_cell(table, row->next->deadline_left_ms < 0 ? STYLE_BAD : STYLE_PLAIN, "%s",
               age_text(row->next->deadline_left_ms, age));
    table_cell(table, STYLE_PLAIN, "%u", pages);
    table_cell(table, STYLE_PLAIN, "%u", tokens);
    table_cell(table, STYLE_DIM, "%s", hex_text(row->attempt, hex));
    waiting_text(&row->waiting, text, sizeof text);
    table_cell(table, waiting_style(row), "%s", text);
}

static void print_entries(const struct survey *survey, const struct model *model) {
    struct table *table = table_create(columns, sizeof columns / sizeof columns[0]);
    uint32_t shown = 0;
    for (uint32_t i = 0; i < model->row_count; i++) {
        if (row_is_wanted(survey->options, &model->rows[i])) {
            add_row(table, survey, &model->rows[i]);
            shown++;
        }
    }
    if (shown > 0) {
        table_print(table, &survey->screen, 0);
    } else {
        screen_print(&survey->screen, STYLE_PLAIN, 2, "%s",
                     model->row_count == 0 ? "nothing is in flight"
                                           : "no live entry fits these flags");
    }
    table_destroy(table);
    (void)survey_print_silent(survey, ". What it holds is shown only as far as others know it");
}

static json_t *held_json(const struct model *model, const struct held *held) {
    json_t *json = json_deep_copy(held->json);
    CHECK(json != NULL);
    (void)json_object_set_new(json, "program",
                              json_string(model->sources[held->source].program->id));
    return json;
}

json_t *row_json(const struct model *model, const struct row *row) {
    char attempt[17];
    char router[17];
    char text[256];
    const struct waiting *waiting = &row->waiting;
    waiting_text(waiting, text, sizeof text);
    json_t *json = json_pack(
        "{s:s, s:s, s:s, s:i, s:I, s:I, s:s, s:{s:s, s:s, s:s, s:s, s:I, s:I}}", "label",
        row->label, "attempt", hex_text(row->attempt, attempt), "router_incarnation",
        hex_text(row->router, router), "attempt_number", (int)attempt_number(row->attempt),
        "age_ms", (json_int_t)row->age_ms, "deadline_left_ms",
        (json_int_t)row->next->deadline_left_ms, "deadline", row->next->deadline, "waiting", "kind",
        waiting_kind_name(waiting->kind), "who", waiting->who, "what", waiting->what, "text", text,
        "for_ms", (json_int_t)waiting->for_ms, "silence_ms", (json_int_t)waiting->silence_ms);
    CHECK(json != NULL);
    for (enum role role = ROLE_ROUTER; role <= ROLE_DECODE; role++) {
        (void)json_object_set_new(json, role_name(role),
                                  row->at[role] != NULL ? held_json(model, row->at[role])
                                                        : json_null());
    }
    return json;
}

int command_entries(const struct options *options) {
    struct survey survey;
    if (!survey_open(&survey, options)) {
        return EXIT_FAILED;
    }
    survey_ask(&survey, ASK_ENTRIES);
    struct model model;
    model_build(survey.sources, survey.programs.count, &model);
    int code = EXIT_DONE;
    for (uint32_t i = 0; i < survey.programs.count; i++) {
        code = survey.asked[i].why[0] != '\0' ? EXIT_TROUBLE : code;
    }
    if (options->is_json) {
        json_t *json = survey_json(&survey);
        json_t *rows = json_array();
        for (uint32_t i = 0; i < model.row_count; i++) {
            if (row_is_wanted(options, &model.rows[i])) {
                (void)json_array_append_new(rows, row_json(&model, &model.rows[i]));
            }
        }
        (void)json_object_set_new(json, "entries", rows);
        code = print_json(json, code);
    } else {
        print_entries(&survey, &model);
    }
    model_fini(&model);
    survey_close(&survey);
    return code;
}
