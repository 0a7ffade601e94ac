#include "tools/batonctl/batonctl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/check.h"
#include "runtime/clock.h"
#include "tools/batonctl/metrics.h"

int complain(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    char *raw = NULL;
    CHECK(vasprintf(&raw, format, arguments) >= 0);
    va_end(arguments);
    char *text = text_visible(raw);
    (void)fprintf(stderr, "batonctl: %s\n", text);
    free(text);
    free(raw);
    return code;
}

const char *age_text(int64_t ms, char text[static 24]) {
    const char *sign = ms < 0 ? "-" : "";
    uint64_t size = ms < 0 ? -(uint64_t)ms : (uint64_t)ms;
    unsigned long long seconds = size / 1000;
    if (size < 1000) {
        (void)snprintf(text, 24, "%s%llu ms", sign, (unsigned long long)size);
    } else if (seconds < 100) {
        (void)snprintf(text, 24, "%s%.1f s", sign, (double)(size / 100) / 10);
    } else if (seconds < 6000) {
        (void)snprintf(text, 24, "%s%llu m %llu s", sign, seconds / 60, seconds % 60);
    } else {
        (void)snprintf(text, 24, "%s%llu h %llu m", sign, seconds / 3600, seconds / 60 % 60);
    }
    return text;
}

const char *hex_text(uint64_t id, char text[static 17]) {
    (void)snprintf(text, 17, "%016llx", (unsigned long long)id);
    return text;
}

void states_text(const char *metrics, char *text, size_t cap) {
    struct series series;
    char state[64];
    size_t len = 0;
    text[0] = '\0';
    while (series_next(&metrics, &series)) {
        if (series_is(&series, "baton_entries") && series.value > 0 && len < cap &&
            series_label(&series, "state", state, sizeof state)) {
            int more = snprintf(text + len, cap - len, "%s%.0f %s", len > 0 ? ", " : "",
                                series.value, state);
            len += more > 0 ? (size_t)more : 0;
        }
    }
}

/* Texts of other programs end up in JSON, which takes UTF-8 only. */
static void make_utf8(char *text) {
    if (!utf8_is_valid((const uint8_t *)text, strlen(text))) {
        for (; *text != '\0'; text++) {
            *text = (unsigned char)*text < 0x80 ? *text : '?';
        }
    }
}

/* ---- finding -------------------------------------------------------------------------------- */

bool survey_open(struct survey *survey, const struct options *options) {
    *survey = (struct survey){.options = options};
    screen_init(&survey->screen, stdout);
    char why[512] = "";
    if (options->at != NULL) {
        if (programs_at(options->at, &survey->programs, why) != STATUS_OK) {
            (void)complain(EXIT_FAILED, "%s", why);
            return false;
        }
    } else if (programs_read(options->etcd, options->cluster, &survey->programs, why) !=
               STATUS_OK) {
        (void)complain(EXIT_FAILED,
                       "etcd at %s cannot be read: %s. Is --etcd (or BATON_ETCD) right? Without "
                       "etcd, --at HOST:PORT,... asks the admin ports you name",
                       options->etcd, why);
        return false;
    }
    uint32_t count = survey->programs.count;
    if (count == 0) {
        (void)complain(EXIT_FAILED,
                       "etcd at %s lists no program of cluster '%s'%s. Programs of other clusters "
                       "are not shown: is --cluster (or BATON_CLUSTER) right?",
                       options->etcd, options->cluster,
                       survey->programs.unreadable > 0 ? ", only records that cannot be read" : "");
        return false;
    }
    survey->asked = calloc(count, sizeof *survey->asked);
    survey->sources = calloc(count, sizeof *survey->sources);
    CHECK(survey->asked != NULL && survey->sources != NULL);
    for (uint32_t i = 0; i < count; i++) {
        survey->asked[i].program = &survey->programs.items[i];
        if (survey->programs.items[i].id[0] == '\0') {
            text_copy(survey->programs.items[i].id, LABEL_MAX, survey->programs.items[i].admin);
        }
        make_utf8(survey->programs.items[i].id);
        make_utf8(survey->programs.items[i].admin);
        make_utf8(survey->programs.items[i].grpc);
        make_utf8(survey->programs.items[i].model);
        make_utf8(survey->programs.items[i].version);
    }
    return true;
}

static void asked_clear(struct asked *asked) {
    fetch_fini(&asked->metrics);
    fetch_fini(&asked->ready);
    fetch_fini(&asked->entries);
    json_decref(asked->document);
    asked->document = NULL;
    asked->why[0] = '\0';
}

void survey_close(struct survey *survey) {
    for (uint32_t i = 0; survey->asked != NULL && i < survey->programs.count; i++) {
        asked_clear(&survey->asked[i]);
    }
    free(survey->asked);
    free(survey->sources);
    programs_fini(&survey->programs);
}

/* ---- asking --------------------------------------------------------------------------------- */

/* Who it is, where only its address was known. */
static void learn_from_document(struct program *program, const json_t *document) {
    for (enum role role = ROLE_ROUTER; role <= ROLE_DECODE; role++) {
        if (strcmp(json_text(document, "role"), role_name(role)) == 0) {
            program->role = role;
        }
    }
    text_copy(program->id, LABEL_MAX, json_text(document, "id"));
    text_copy(program->version, LABEL_MAX, json_text(document, "version"));
    text_copy(program->model, LABEL_MAX, json_text(document, "model"));
    program->incarnation = json_hex(document, "incarnation");
    program->pid = (uint32_t)json_number(document, "pid");
}

static void learn_from_metrics(struct program *program, const char *text) {
    struct series series;
    char role_text[16];
    while (series_next(&text, &series)) {
        if (!series_label(&series, "role", role_text, sizeof role_text)) {
            continue;
        }
        for (enum role role = ROLE_ROUTER; role <= ROLE_DECODE; role++) {
            if (strcmp(role_text, role_name(role)) == 0) {
                program->role = role;
            }
        }
        (void)series_label(&series, "worker", program->id, LABEL_MAX);
        make_utf8(program->id);
        return;
    }
}

/* A reply that is no answer to the question: still starting, or its control thread hangs. */
static void asked_refused(struct asked *asked, const struct fetch *fetch) {
    (void)snprintf(asked->why, sizeof asked->why, "it answers %d: %.*s", fetch->status,
                   (int)strcspn(fetch->body, "\r\n"), fetch->body);
}

static void asked_take(struct asked *asked, unsigned what) {
    const struct fetch *fetches[] = {&asked->metrics, &asked->ready, &asked->entries};
    static const unsigned asks[] = {ASK_METRICS, ASK_READY, ASK_ENTRIES};
    for (uint32_t i = 0; i < 3 && asked->why[0] == '\0'; i++) {
        if ((what & asks[i]) == 0) {
            continue;
        }
        if (fetches[i]->end != FETCH_ANSWERED) {
            (void)snprintf(asked->why, sizeof asked->why, "%s", fetches[i]->why);
        } else if (asks[i] != ASK_READY && fetches[i]->status != 200) {
            asked_refused(asked, fetches[i]);
        }
    }
    text_end_whole(asked->why);
    make_utf8(asked->why);
    bool is_unknown = asked->program->role == ROLE_NONE;
    if ((what & ASK_ENTRIES) != 0 && asked->why[0] == '\0') {
        json_error_t error;
        asked->document = json_loadb(asked->entries.body, asked->entries.len, 0, &error);
        if (asked->document == NULL) {
            (void)snprintf(asked->why, sizeof asked->why,
                           "its /debug/entries is no JSON: line %d: %.100s", error.line,
                           error.text);
            text_end_whole(asked->why);
        } else if (is_unknown) {
            learn_from_document(asked->program, asked->document);
        }
    } else if ((what & ASK_METRICS) != 0 && asked->why[0] == '\0' && is_unknown) {
        learn_from_metrics(asked->program, asked->metrics.body);
    }
}

void survey_ask(struct survey *survey, unsigned what) {
    uint32_t count = survey->programs.count;
    struct fetch *all = calloc((size_t)count * 3, sizeof *all);
    CHECK(all != NULL);
    uint32_t used = 0;
    const char *entries =
        (what & ASK_TERMINALS) != 0 ? "/debug/entries?limit=4096" : "/debug/entries?limit=0";
    for (uint32_t i = 0; i < count; i++) {
        struct asked *asked = &survey->asked[i];
        asked_clear(asked);
        const char *paths[] = {(what & ASK_METRICS) != 0 ? "/metrics" : NULL,
                               (what & ASK_READY) != 0 ? "/readyz" : NULL,
                               (what & ASK_ENTRIES) != 0 ? entries : NULL};
        for (uint32_t p = 0; p < 3; p++) {
            if (paths[p] != NULL) {
                all[used++] = (struct fetch){.address = asked->program->admin, .path = paths[p]};
            }
        }
    }
    fetch_all(all, used, survey->options->timeout);
    survey->taken_unix_ms = clock_wall_ms();
    used = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct asked *asked = &survey->asked[i];
        struct fetch *to[] = {(what & ASK_METRICS) != 0 ? &asked->metrics : NULL,
                              (what & ASK_READY) != 0 ? &asked->ready : NULL,
                              (what & ASK_ENTRIES) != 0 ? &asked->entries : NULL};
        for (uint32_t p = 0; p < 3; p++) {
            if (to[p] != NULL) {
                *to[p] = all[used++];
            }
        }
        asked_take(asked, what);
        survey->sources[i] = (struct source){
            .program = asked->program, .document = asked->document, .why = asked->why};
    }
    free(all);
}

/* ---- showing -------------------------------------------------------------------------------- */

uint32_t survey_print_silent(const struct survey *survey, const char *consequence) {
    uint32_t silent = 0;
    for (uint32_t i = 0; i < survey->programs.count; i++) {
        const struct asked *asked = &survey->asked[i];
        if (asked->why[0] == '\0') {
            continue;
        }
        silent++;
        screen_print(&survey->screen, STYLE_BAD, 2, "! %s (%s, %s) does not answer: %s%s",
                     asked->program->id,
                     asked->program->role != ROLE_NONE ? role_name(asked->program->role)
                                                       : "role not known",
                     asked->program->admin[0] != '\0' ? asked->program->admin : "no admin port",
                     asked->why, consequence);
    }
    return silent;
}

json_t *survey_json(const struct survey *survey) {
    json_t *silent = json_array();
    for (uint32_t i = 0; i < survey->programs.count; i++) {
        const struct asked *asked = &survey->asked[i];
        if (asked->why[0] != '\0') {
            CHECK(json_array_append_new(silent,
                                        json_pack("{s:s, s:s, s:s, s:s}", "id", asked->program->id,
                                                  "role", role_name(asked->program->role), "admin",
                                                  asked->program->admin, "why", asked->why)) == 0);
        }
    }
    json_t *json = json_pack("{s:s, s:I, s:i, s:o}", "cluster", survey->options->cluster, "unix_ms",
                             (json_int_t)survey->taken_unix_ms, "programs_asked",
                             survey->programs.count, "not_answering", silent);
    CHECK(json != NULL);
    return json;
}

int print_json(json_t *json, int code) {
    bool is_pretty = isatty(STDOUT_FILENO) == 1;
    int rc = json_dumpf(json, stdout, is_pretty ? JSON_INDENT(1) : JSON_COMPACT);
    json_decref(json);
    if (rc != 0 || putchar('\n') == EOF || fflush(stdout) != 0) {
        return complain(EXIT_FAILED, "the output cannot be written");
    }
    return code;
}
