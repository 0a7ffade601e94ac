/* batonctl why RID: where one request is now and whom it waits for, or how it ended, and why. */
#include "tools/batonctl/batonctl.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"

#define STORIES_MAX 3u
#define LABEL_KEPT  23u /* of a label, in what a program remembers of ends */

/* One request: all its attempts. */
struct story {
    uint64_t router;
    uint64_t request; /* attempt_request() */
    bool is_live;
    int64_t ago_ms; /* of its last end */
};

/* ---- finding -------------------------------------------------------------------------------- */

static bool is_hex_id(const char *text) {
    size_t len = 0;
    while (isxdigit((unsigned char)text[len]) != 0) {
        len++;
    }
    return len == 16 && text[len] == '\0';
}

static bool fits(const char *wanted, const char *label, const char *id, uint64_t attempt) {
    if (strcmp(wanted, label) == 0) {
        return true;
    }
    return is_hex_id(wanted) &&
           (strcasecmp(wanted, id) == 0 ||
            attempt_request(strtoull(wanted, NULL, 16)) == attempt_request(attempt));
}

static bool fits_cut(const char *wanted, const char *label) {
    return strlen(label) == LABEL_KEPT && strncmp(wanted, label, LABEL_KEPT) == 0;
}

static void stories_add(struct story *stories, uint32_t *count, uint64_t router, uint64_t attempt,
                        bool is_live, int64_t ago_ms) {
    for (uint32_t i = 0; i < *count; i++) {
        struct story *story = &stories[i];
        if (story->router == router && story->request == attempt_request(attempt)) {
            story->is_live = story->is_live || is_live;
            story->ago_ms = ago_ms < story->ago_ms ? ago_ms : story->ago_ms;
            return;
        }
    }
    stories[(*count)++] = (struct story){router, attempt_request(attempt), is_live, ago_ms};
}

static int by_last(const void *a, const void *b) {
    const struct story *left = a;
    const struct story *right = b;
    if (left->is_live != right->is_live) {
        return left->is_live ? -1 : 1;
    }
    return left->ago_ms < right->ago_ms ? -1 : left->ago_ms > right->ago_ms;
}

static struct story *find_stories(const struct model *model, const char *wanted,
                                  uint32_t *count_out) {
    struct story *stories =
        calloc((size_t)model->held_count + model->ended_count + 1, sizeof *stories);
    CHECK(stories != NULL);
    *count_out = 0;
    for (uint32_t i = 0; i < model->held_count; i++) {
        const struct held *held = &model->held[i];
        if (fits(wanted, held->label, held->id, held->attempt)) {
            stories_add(stories, count_out, held->router, held->attempt, true, 0);
        }
    }
    for (uint32_t i = 0; i < model->ended_count; i++) {
        const struct ended *ended = &model->ended[i];
        if (fits(wanted, ended->label, ended->id, ended->attempt) ||
            fits_cut(wanted, ended->label)) {
            stories_add(stories, count_out, ended->router, ended->attempt, false, ended->ago_ms);
        }
    }
    if (*count_out > 0) {
        qsort(stories, *count_out, sizeof *stories, by_last);
    }
    return stories;
}

static bool story_has(const struct story *story, uint64_t router, uint64_t attempt) {
    return story->router == router && story->request == attempt_request(attempt);
}

static const char *router_id(const struct model *model, uint64_t incarnation, char text[17]) {
    for (uint32_t i = 0; i < model->source_count; i++) {
        if (model->sources[i].program->incarnation == incarnation) {
            return model->sources[i].program->id;
        }
    }
    return hex_text(incarnation, text);
}

/* ---- for people ----------------------------------------------------------------------------- */

static void print_parts(const struct survey *survey, const struct model *model,
                        const struct row *row) {
    static const struct column columns[] = {
        {.title = "PROGRAM", .least = 12},
        {.title = "STATE"},
        {.title = "FOR", .is_right = true},
        {.title = "LEFT", .is_right = true},
        {.title = "OPS", .is_right = true, .rank = 1},
        {.title = "PAGES", .is_right = true, .rank = 2},
        {.title = "KV BYTES", .is_right = true, .rank = 3},
        {.title = "WAITS FOR", .least = 16},
        {.title = "NEXT DEADLINE", .least = 14, .rank = 4},
    };
    struct table *table = table_create(columns, sizeof columns / sizeof columns[0]);
    for (enum role role = ROLE_ROUTER; role <= ROLE_DECODE; role++) {
        const struct held *held = row->at[role];
        if (held == NULL) {
            continue;
        }
        char age[24];
        table_cell(table, STYLE_PLAIN, "%s", model->sources[held->source].program->id);
        table_cell(table, STYLE_PLAIN, "%s", held->state);
        table_cell(table, STYLE_PLAIN, "%s", age_text(held->state_age_ms, age));
        table_cell(table, held->deadline_left_ms < 0 ? STYLE_BAD : STYLE_PLAIN, "%s",
                   age_text(held->deadline_left_ms, age));
        table_cell(table, STYLE_PLAIN, "%lld", (long long)json_number(held->json, "operations"));
        table_cell(table, STYLE_PLAIN, "%lld", (long long)json_number(held->json, "pages"));
        table_cell(table, STYLE_PLAIN, "%lld", (long long)json_number(held->json, "bytes"));
        table_cell(table, STYLE_PLAIN, "%s", held->waits_for);
        table_cell(table, STYLE_PLAIN, "%s", held->deadline);
    }
    table_print(table, &survey->screen, 2);
    table_destroy(table);
}

/* What a router that looks for a worker sees. */
static void print_fleet(const struct survey *survey, const struct model *model,
                        const struct row *row) {
    const struct held *held = row->at[ROLE_ROUTER];
    if (held == NULL || strcmp(held->state, "placing") != 0) {
        return;
    }
    const json_t *sessions = json_object_get(model->sources[held->source].document, "sessions");
    for (size_t i = 0; i < json_array_size(sessions); i++) {
        const json_t *session = json_array_get(sessions, i);
        bool is_decode = strcmp(json_text(session, "peer_role"), "decode") == 0;
        char backlog[24];
        char heard[24];
        screen_print(&survey->screen, STYLE_PLAIN, 4,
                     "  %s sees %s: session %s, %lld entries, %lld pages free%s%s%s; heard %s ago",
                     model->sources[held->source].program->id, json_text(session, "peer"),
                     json_text(session, "phase"), (long long)json_number(session, "peer_entries"),
                     (long long)json_number(session, "peer_pages_free"),
                     is_decode ? "" : ", backlog ",
                     is_decode ? "" : age_text(json_number(session, "peer_backlog_ms"), backlog),
                     json_is_true(json_object_get(session, "is_peer_draining")) ? ", draining" : "",
                     age_text(json_number(session, "silence_ms"), heard));
    }
    if (json_array_size(sessions) == 0) {
        screen_print(&survey->screen, STYLE_BAD, 4, "  %s has no session to any worker",
                     model->sources[held->source].program->id);
    }
}

static void print_live(const struct survey *survey, const struct model *model,
                       const struct row *row) {
    char text[256];
    char hex[17];
    char router[17];
    char age[24];
    const struct screen *screen = &survey->screen;
    const struct waiting *waiting = &row->waiting;
    waiting_text(waiting, text, sizeof text);
    screen_print(screen, STYLE_BOLD, 2, "%s %s is live for %s: attempt %u (%s of %s)",
                 row->at[ROLE_ROUTER] != NULL ? "request" : "a part of request",
                 row->label[0] != '\0' ? row->label : "(without a label)",
                 age_text(row->age_ms, age), attempt_number(row->attempt),
                 hex_text(row->attempt, hex), router_id(model, row->router, router));
    screen_print(screen,
                 waiting->kind == WAITING_SILENT || waiting->kind == WAITING_LOST ? STYLE_BAD
                                                                                  : STYLE_WARN,
                 4, "  waits for %s; in this state for %s", text, age_text(waiting->for_ms, age));
    const struct held *next = row->next;
    const char *holder = model->sources[next->source].program->id;
    if (next->deadline_left_ms >= 0) {
        screen_print(screen, STYLE_PLAIN, 4,
                     "  if nothing moves, this attempt ends in %s at %s: %s",
                     age_text(next->deadline_left_ms, age), holder, next->deadline);
    } else {
        screen_print(screen, STYLE_BAD, 4,
                     "  it should have ended %s ago at %s: %s. This must never be: a bug",
                     age_text(-next->deadline_left_ms, age), holder, next->deadline);
    }
    if (waiting->kind == WAITING_SILENT || waiting->kind == WAITING_LOST) {
        screen_print(screen, STYLE_PLAIN, 4,
                     "  earlier if %s stays silent: its sessions end after the lease "
                     "(--timer-lease, 6 s unless set)",
                     waiting->who);
    }
    if (row->at[ROLE_ROUTER] == NULL) {
        screen_print(screen, STYLE_WARN, 4,
                     "  its router holds nothing of it: the router has given this attempt up, is "
                     "gone, or does not answer");
    }
    const struct held *first = row->at[ROLE_ROUTER]   ? row->at[ROLE_ROUTER]
                               : row->at[ROLE_DECODE] ? row->at[ROLE_DECODE]
                                                      : row->at[ROLE_PREFILL];
    screen_print(screen, STYLE_DIM, 4,
                 "  %lld tokens of prompt and answer, %lld generated, %lld from the prefix cache",
                 (long long)json_number(first->json, "tokens"),
                 (long long)json_number(first->json, "generated"),
                 (long long)json_number(first->json, "cached"));
    print_parts(survey, model, row);
    print_fleet(survey, model, row);
}

/* Wall time of something that was so long ago, "12:00:01.250Z". */
static void wall_text(int64_t unix_ms, char *text, size_t cap) {
    time_t seconds = (time_t)(unix_ms / 1000);
    struct tm parts;
    (void)gmtime_r(&seconds, &parts);
    (void)snprintf(text, cap, "%02d:%02d:%02d.%03dZ", parts.tm_hour, parts.tm_min, parts.tm_sec,
                   (int)(unix_ms % 1000));
}

/* Its router still has it: whatever ended so far were parts of it. */
static bool is_at_router(const struct model *model, const struct story *story) {
    for (uint32_t i = 0; i < model->row_count; i++) {
        const struct row *row = &model->rows[i];
        if (story_has(story, row->router, row->attempt) && row->at[ROLE_ROUTER] != NULL) {
            return true;
        }
    }
    return false;
}

/* The end as the client saw it; workers may hold what is left for a moment longer. */
static void print_verdict(const struct survey *survey, const struct model *model,
                          const struct story *story) {
    if (is_at_router(model, story)) {
        return;
    }
    const struct ended *first = NULL; /* the earliest that was not good */
    const struct ended *router = NULL;
    const struct ended *last = NULL;
    for (uint32_t i = model->ended_count; i-- > 0;) {
        const struct ended *ended = &model->ended[i];
        if (!story_has(story, ended->router, ended->attempt)) {
            continue;
        }
        bool is_bad = strcmp(ended->outcome, "ok") != 0 && strcmp(ended->cause, "superseded") != 0;
        first = first == NULL && is_bad ? ended : first;
        router = ended->role == ROLE_ROUTER ? ended : router;
        last = ended;
    }
    const struct ended *verdict = router != NULL ? router : last;
    if (verdict == NULL || (story->is_live && router == NULL)) {
        return;
    }
    char ago[24];
    char age[24];
    const struct screen *screen = &survey->screen;
    bool is_good = strcmp(verdict->outcome, "ok") == 0;
    screen_print(screen, is_good ? STYLE_GOOD : STYLE_BAD, 2,
                 "request %s is over: %s at %s, %s ago, after %s, in state %s: %s",
                 verdict->label[0] != '\0' ? verdict->label : "(without a label)", verdict->outcome,
                 model->sources[verdict->source].program->id, age_text(verdict->ago_ms, ago),
                 age_text(verdict->age_ms, age), verdict->state, cause_text(verdict->cause));
    if (router == NULL) {
        screen_print(screen, STYLE_WARN, 4,
                     "  its router remembers nothing of it: it is gone, was restarted, does not "
                     "answer, or has ended 4,096 others since");
    }
    if (first != NULL && first != verdict) {
        screen_print(screen, STYLE_PLAIN, 4, "  %s %s, in state %s, attempt %u: %s",
                     is_good ? "the first trouble on the way was at" : "the first to end it was",
                     model->sources[first->source].program->id, first->state,
                     attempt_number(first->attempt), cause_text(first->cause));
    }
}

/* The same end at the same program: attempts that found no room come by the dozen. */
static bool is_same_end(const struct ended *a, const struct ended *b) {
    return a->source == b->source && strcmp(a->state, b->state) == 0 &&
           strcmp(a->outcome, b->outcome) == 0 && strcmp(a->cause, b->cause) == 0;
}

/* The end of this story that comes next in time, from index i downwards; NULL: none. */
static const struct ended *next_end(const struct model *model, const struct story *story,
                                    uint32_t *i) {
    while (*i > 0) {
        const struct ended *ended = &model->ended[--*i];
        if (story_has(story, ended->router, ended->attempt)) {
            return ended;
        }
    }
    return NULL;
}

static void add_end(const struct survey *survey, const struct model *model, struct table *table,
                    const struct ended *first, const struct ended *last, uint32_t count) {
    char when[24];
    char text[24];
    wall_text(survey->taken_unix_ms - last->ago_ms, when, sizeof when);
    bool is_good = strcmp(last->outcome, "ok") == 0;
    table_cell(table, STYLE_DIM, "%s", when);
    table_cell(table, STYLE_PLAIN, "%s", age_text(last->ago_ms, text));
    table_cell(table, STYLE_PLAIN, "%s", age_text(last->age_ms, text));
    table_cell(table, STYLE_PLAIN, "%s", model->sources[last->source].program->id);
    if (count > 1) {
        table_cell(table, STYLE_PLAIN, "%u-%u", attempt_number(first->attempt),
                   attempt_number(last->attempt));
    } else {
        table_cell(table, STYLE_PLAIN, "%u", attempt_number(last->attempt));
    }
    table_cell(table, is_good ? STYLE_GOOD : STYLE_BAD, "%s", last->outcome);
    table_cell(table, STYLE_PLAIN, "%s", last->state);
    if (last->kv_exposed_us > 0) {
        table_cell(table, STYLE_PLAIN, "%s: %s; %.1f ms of KV not hidden", last->cause,
                   cause_text(last->cause), (double)last->kv_exposed_us / 1e3);
    } else {
        table_cell(table, STYLE_PLAIN, "%s: %s", last->cause, cause_text(last->cause));
    }
}

static void print_ends(const struct survey *survey, const struct model *model,
                       const struct story *story) {
    static const struct column columns[] = {
        {.title = "ENDED", .rank = 1},
        {.title = "AGO", .is_right = true},
        {.title = "AFTER", .is_right = true},
        {.title = "PROGRAM", .least = 10},
        {.title = "ATTEMPT", .is_right = true, .rank = 2},
        {.title = "OUTCOME"},
        {.title = "IN STATE"},
        {.title = "CAUSE", .below = ""},
    };
    uint32_t i = model->ended_count;
    const struct ended *first = next_end(model, story, &i);
    if (first == NULL) {
        return;
    }
    struct table *table = table_create(columns, sizeof columns / sizeof columns[0]);
    while (first != NULL) {
        const struct ended *last = first;
        const struct ended *next = next_end(model, story, &i);
        uint32_t count = 1;
        for (; next != NULL && is_same_end(first, next); next = next_end(model, story, &i)) {
            last = next;
            count++;
        }
        add_end(survey, model, table, first, last, count);
        first = next;
    }
    table_print(table, &survey->screen, 2);
    table_destroy(table);
}

static void print_stories(const struct survey *survey, const struct model *model,
                          const struct story *stories, uint32_t count) {
    for (uint32_t s = 0; s < count && s < STORIES_MAX; s++) {
        if (s > 0) {
            screen_line(&survey->screen);
        }
        print_verdict(survey, model, &stories[s]);
        for (uint32_t i = 0; i < model->row_count; i++) {
            if (story_has(&stories[s], model->rows[i].router, model->rows[i].attempt)) {
                print_live(survey, model, &model->rows[i]);
            }
        }
        print_ends(survey, model, &stories[s]);
    }
    if (count > STORIES_MAX) {
        screen_print(&survey->screen, STYLE_WARN, 2,
                     "%u more requests carry this label; name one by its attempt (see 'batonctl "
                     "entries'), or use --json for all",
                     count - STORIES_MAX);
    }
    (void)survey_print_silent(survey, ". What it holds or remembers of this is not shown");
}

/* ---- for scripts ---------------------------------------------------------------------------- */

static json_t *ended_json(const struct survey *survey, const struct model *model,
                          const struct ended *ended) {
    char attempt[17];
    json_t *json =
        json_pack("{s:s, s:s, s:s, s:s, s:i, s:s, s:s, s:s, s:s, s:I, s:I, s:I}", "program",
                  model->sources[ended->source].program->id, "role", role_name(ended->role), "id",
                  ended->id, "attempt", hex_text(ended->attempt, attempt), "attempt_number",
                  (int)attempt_number(ended->attempt), "state", ended->state, "outcome",
                  ended->outcome, "cause", ended->cause, "text", cause_text(ended->cause),
                  "after_ms", (json_int_t)ended->age_ms, "ago_ms", (json_int_t)ended->ago_ms,
                  "ended_unix_ms", (json_int_t)(survey->taken_unix_ms - ended->ago_ms));
    CHECK(json != NULL);
    return json;
}

static json_t *stories_json(const struct survey *survey, const struct model *model,
                            const struct story *stories, uint32_t count) {
    json_t *json = survey_json(survey);
    json_t *list = json_array();
    for (uint32_t s = 0; s < count; s++) {
        json_t *live = json_array();
        json_t *ends = json_array();
        for (uint32_t i = 0; i < model->row_count; i++) {
            if (story_has(&stories[s], model->rows[i].router, model->rows[i].attempt)) {
                (void)json_array_append_new(live, row_json(model, &model->rows[i]));
            }
        }
        for (uint32_t i = model->ended_count; i-- > 0;) {
            if (story_has(&stories[s], model->ended[i].router, model->ended[i].attempt)) {
                (void)json_array_append_new(ends, ended_json(survey, model, &model->ended[i]));
            }
        }
        char router[17];
        json_t *story = json_pack("{s:s, s:b, s:o, s:o}", "router_incarnation",
                                  hex_text(stories[s].router, router), "is_live",
                                  stories[s].is_live, "live", live, "ended", ends);
        CHECK(story != NULL);
        (void)json_array_append_new(list, story);
    }
    (void)json_object_set_new(json, "requests", list);
    return json;
}

int command_why(const struct options *options) {
    if (options->operands.count != 1 || options->operands.values[0][0] == '\0') {
        return complain(EXIT_USAGE, "why takes one request: the client's request_id, or an "
                                    "attempt or slot as 16 hexadecimal digits");
    }
    const char *wanted = options->operands.values[0];
    struct survey survey;
    if (!survey_open(&survey, options)) {
        return EXIT_FAILED;
    }
    survey_ask(&survey, ASK_ENTRIES | ASK_TERMINALS);
    struct model model;
    model_build(survey.sources, survey.programs.count, &model);
    uint32_t count = 0;
    uint32_t silent = 0;
    struct story *stories = find_stories(&model, wanted, &count);
    for (uint32_t i = 0; i < survey.programs.count; i++) {
        silent += survey.asked[i].why[0] != '\0' ? 1 : 0;
    }
    int code = count == 0 ? EXIT_FAILED : silent > 0 ? EXIT_TROUBLE : EXIT_DONE;
    if (options->is_json) {
        code = print_json(stories_json(&survey, &model, stories, count), code);
    } else if (count > 0) {
        print_stories(&survey, &model, stories, count);
    } else {
        (void)survey_print_silent(&survey, "");
    }
    if (count == 0) {
        (void)complain(EXIT_FAILED,
                       "no program that answers holds or remembers '%s' (%u of %u answered; each "
                       "remembers its last 4,096 ends)",
                       wanted, survey.programs.count - silent, survey.programs.count);
    }
    free(stories);
    model_fini(&model);
    survey_close(&survey);
    return code;
}
