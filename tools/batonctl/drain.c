/* batonctl drain ID|ROLE: asks programs to leave, and waits for it if wanted. */
#include "tools/batonctl/batonctl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/check.h"
#include "runtime/clock.h"

#define GRACE_MAX_S  86400.0
#define POLL_US      500000u
#define AFTER_MS     15000  /* from the end of the grace until the process is gone */
#define DEFAULT_WAIT 600000 /* where the programs' own grace is not known */

struct leaving {
    struct program program;
    bool is_gone;
    long long live; /* entries at the last look; -1: not known */
};

static const char *role_or_unknown(enum role role) {
    return role == ROLE_NONE ? "program" : role_name(role);
}

/* ---- choosing ------------------------------------------------------------------------------- */

static bool is_meant(const struct program *program, const char *wanted) {
    char incarnation[17];
    return strcmp(wanted, program->id) == 0 || strcmp(wanted, role_name(program->role)) == 0 ||
           strcmp(wanted, program->admin) == 0 ||
           strcasecmp(wanted, hex_text(program->incarnation, incarnation)) == 0;
}

static void list_ids(const struct programs *programs, char *text, size_t cap) {
    size_t len = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < programs->count && len + LABEL_MAX + 4 < cap; i++) {
        len += (size_t)snprintf(text + len, cap - len, "%s%s", i > 0 ? ", " : "",
                                programs->items[i].id);
    }
}

static struct leaving *choose(const struct survey *survey, const char *wanted,
                              uint32_t *count_out) {
    struct leaving *leaving = calloc(survey->programs.count, sizeof *leaving);
    CHECK(leaving != NULL);
    *count_out = 0;
    for (uint32_t i = 0; i < survey->programs.count; i++) {
        if (is_meant(&survey->programs.items[i], wanted)) {
            leaving[(*count_out)++] =
                (struct leaving){.program = survey->programs.items[i], .live = -1};
        }
    }
    return leaving;
}

/* ---- asking --------------------------------------------------------------------------------- */

static uint32_t post(const struct survey *survey, struct leaving *leaving, uint32_t count,
                     struct fetch *posts) {
    char path[64] = "/drain";
    if (survey->options->grace_s >= 0) {
        (void)snprintf(path, sizeof path, "/drain?grace=%.3f", survey->options->grace_s);
    }
    for (uint32_t i = 0; i < count; i++) {
        posts[i] =
            (struct fetch){.address = leaving[i].program.admin, .path = path, .is_post = true};
    }
    fetch_all(posts, count, survey->options->timeout);
    uint32_t failed = 0;
    for (uint32_t i = 0; i < count; i++) {
        failed += posts[i].end != FETCH_ANSWERED || posts[i].status != 202 ? 1 : 0;
    }
    return failed;
}

static void print_posts(const struct survey *survey, const struct leaving *leaving, uint32_t count,
                        const struct fetch *posts) {
    const struct screen *screen = &survey->screen;
    for (uint32_t i = 0; i < count; i++) {
        const struct program *program = &leaving[i].program;
        if (posts[i].end != FETCH_ANSWERED) {
            screen_print(screen, STYLE_BAD, 2, "! %s %s cannot be asked: %s",
                         role_or_unknown(program->role), program->id, posts[i].why);
        } else if (posts[i].status != 202) {
            screen_print(screen, STYLE_BAD, 2, "! %s %s refuses: %d: %.*s",
                         role_or_unknown(program->role), program->id, posts[i].status,
                         (int)strcspn(posts[i].body, "\n"), posts[i].body);
        } else {
            char grace[64] = "its --drain-timeout";
            if (survey->options->grace_s >= 0) {
                (void)snprintf(grace, sizeof grace, "%g s", survey->options->grace_s);
            }
            screen_print(screen, STYLE_PLAIN, 2,
                         "%s %s drains: it takes nothing new, finishes what it has, fails what is "
                         "left after %s, and exits",
                         role_or_unknown(program->role), program->id, grace);
        }
    }
}

/* ---- waiting -------------------------------------------------------------------------------- */

/* One look at all that are still there. Gone is who does not answer and is in etcd no more. */
static uint32_t look(const struct options *options, struct leaving *leaving, uint32_t count) {
    struct programs now = {.items = NULL};
    char why[512];
    bool has_etcd = options->at == NULL &&
                    programs_read(options->etcd, options->cluster, &now, why) == STATUS_OK;
    struct fetch *looks = calloc(count, sizeof *looks);
    CHECK(looks != NULL);
    for (uint32_t i = 0; i < count; i++) {
        looks[i] = (struct fetch){.address = leaving[i].program.admin,
                                  .path = "/debug/entries?limit=0&entries=0"};
    }
    fetch_all(looks, count, options->timeout);
    uint32_t left = 0;
    for (uint32_t i = 0; i < count; i++) {
        bool is_listed = !has_etcd && options->at == NULL; /* not known: assume the worse */
        for (uint32_t p = 0; p < now.count; p++) {
            is_listed = is_listed || now.items[p].incarnation == leaving[i].program.incarnation;
        }
        bool is_silent = looks[i].end != FETCH_ANSWERED;
        bool is_refused = looks[i].end == FETCH_REFUSED;
        leaving[i].is_gone = leaving[i].is_gone || (is_silent && !is_listed) || is_refused;
        if (looks[i].end == FETCH_ANSWERED && looks[i].status == 200) {
            json_t *document = json_loadb(looks[i].body, looks[i].len, 0, NULL);
            /* Another process may have taken the address over. */
            uint64_t incarnation = json_hex(document, "incarnation");
            leaving[i].live = json_number(document, "live");
            leaving[i].is_gone =
                leaving[i].is_gone || (leaving[i].program.incarnation != 0 && incarnation != 0 &&
                                       incarnation != leaving[i].program.incarnation);
            json_decref(document);
        }
        left += leaving[i].is_gone ? 0 : 1;
        fetch_fini(&looks[i]);
    }
    free(looks);
    programs_fini(&now);
    return left;
}

static void print_left(const struct survey *survey, const struct leaving *leaving, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        if (!leaving[i].is_gone) {
            screen_print(&survey->screen, STYLE_DIM, 2, "%s: %lld entries left",
                         leaving[i].program.id, leaving[i].live);
        }
    }
    (void)fflush(survey->screen.out);
}

static uint32_t wait_for_end(const struct survey *survey, struct leaving *leaving, uint32_t count) {
    const struct options *options = survey->options;
    int64_t most = options->grace_s >= 0 ? (int64_t)(options->grace_s * 1e3) + AFTER_MS
                                         : DEFAULT_WAIT + AFTER_MS;
    struct instant until = instant_add(clock_now(), span_ms(most));
    uint32_t left = count;
    uint32_t turn = 0;
    while (left > 0 && !instant_reached(clock_now(), until)) {
        (void)usleep(POLL_US);
        left = look(options, leaving, count);
        if (!options->is_json && left > 0 && turn++ % 4 == 0) {
            print_left(survey, leaving, count);
        }
    }
    return left;
}

/* ---- the command ---------------------------------------------------------------------------- */

static json_t *drain_json(const struct survey *survey, const struct leaving *leaving,
                          uint32_t count, const struct fetch *posts) {
    json_t *json = survey_json(survey);
    json_t *list = json_array();
    for (uint32_t i = 0; i < count; i++) {
        bool is_asked = posts[i].end == FETCH_ANSWERED && posts[i].status == 202;
        json_t *one = json_pack("{s:s, s:s, s:b, s:b, s:s}", "id", leaving[i].program.id, "role",
                                role_name(leaving[i].program.role), "drains", is_asked, "gone",
                                leaving[i].is_gone, "why",
                                posts[i].end != FETCH_ANSWERED ? posts[i].why : "");
        CHECK(one != NULL);
        if (!is_asked && posts[i].end == FETCH_ANSWERED) {
            (void)json_object_set_new(one, "why", json_string(posts[i].body));
        }
        (void)json_array_append_new(list, one);
    }
    (void)json_object_set_new(json, "programs", list);
    return json;
}

static int drain_chosen(const struct survey *survey, struct leaving *leaving, uint32_t count) {
    const struct options *options = survey->options;
    struct fetch *posts = calloc(count, sizeof *posts);
    CHECK(posts != NULL);
    uint32_t failed = post(survey, leaving, count, posts);
    if (!options->is_json) {
        print_posts(survey, leaving, count, posts);
        (void)fflush(survey->screen.out);
    }
    uint32_t left = 0;
    if (options->waits && failed == 0) {
        left = wait_for_end(survey, leaving, count);
    }
    int code = failed > 0 || left > 0 ? EXIT_FAILED : EXIT_DONE;
    if (options->is_json) {
        code = print_json(drain_json(survey, leaving, count, posts), code);
    } else if (options->waits && failed == 0) {
        for (uint32_t i = 0; i < count; i++) {
            screen_print(&survey->screen, leaving[i].is_gone ? STYLE_GOOD : STYLE_BAD, 2,
                         leaving[i].is_gone ? "%s has left"
                                            : "! %s is still there; its log says why",
                         leaving[i].program.id);
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        fetch_fini(&posts[i]);
    }
    free(posts);
    return code;
}

int command_drain(const struct options *given) {
    struct options options = *given;
    if (options.operands.count != 1) {
        return complain(EXIT_USAGE, "drain takes one program's id, or a role: router, prefill or "
                                    "decode");
    }
    options.grace_s = -1;
    if (options.grace != NULL) {
        char *end = NULL;
        options.grace_s = strtod(options.grace, &end);
        if (end == options.grace || (*end != '\0' && strcmp(end, "s") != 0) ||
            !(options.grace_s >= 0 && options.grace_s <= GRACE_MAX_S)) {
            return complain(EXIT_USAGE,
                            "--grace is a number of seconds between 0 and 86400, not '%s'",
                            options.grace);
        }
    }
    struct survey survey;
    if (!survey_open(&survey, &options)) {
        return EXIT_FAILED;
    }
    if (options.at != NULL) {
        survey_ask(&survey, ASK_ENTRIES); /* who they are */
    }
    uint32_t count = 0;
    struct leaving *leaving = choose(&survey, options.operands.values[0], &count);
    int code = EXIT_FAILED;
    if (count == 0) {
        char ids[1024];
        list_ids(&survey.programs, ids, sizeof ids);
        (void)complain(EXIT_FAILED, "no program is called '%s' or has that role; there are: %s",
                       options.operands.values[0], ids);
    } else {
        survey.taken_unix_ms = clock_wall_ms();
        code = drain_chosen(&survey, leaving, count);
    }
    free(leaving);
    survey_close(&survey);
    return code;
}
