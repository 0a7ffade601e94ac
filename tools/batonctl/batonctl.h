/* What the commands share: flags, exit codes, asking all programs, and printing.
 *
 * Each command reads which programs there are, asks all of them at once, prints a table or one
 * JSON document, and returns its exit code. */
#ifndef BATONCTL_BATONCTL_H
#define BATONCTL_BATONCTL_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/time.h"
#include "runtime/config.h"
#include "tools/batonctl/fetch.h"
#include "tools/batonctl/fleet.h"
#include "tools/batonctl/model.h"
#include "tools/batonctl/screen.h"

enum exit_code {
    EXIT_DONE = 0,
    EXIT_FAILED = 1,  /* could not do it; a sentence on stderr */
    EXIT_USAGE = 2,   /* wrong flags; a sentence on stderr */
    EXIT_TROUBLE = 3, /* done and shown, but a program does not answer or something is wrong */
};

struct options {
    const char *etcd;
    const char *cluster;
    const char *at; /* NULL: ask etcd */
    struct span timeout;
    bool is_json;
    const char *role;  /* entries */
    const char *state; /* entries */
    struct span older_than;
    double grace_s; /* drain; < 0: the program's own */
    const char *grace;
    bool waits; /* drain */
    bool is_once;
    struct span every;
    struct config_operands operands;
};

/* One program and what it answered. */
struct asked {
    struct program *program;
    struct fetch metrics;
    struct fetch ready;
    struct fetch entries;
    json_t *document; /* of entries; NULL: none, or it was no JSON */
    char why[192];    /* a phrase if there is no answer, "" else */
};

struct survey {
    const struct options *options;
    struct screen screen;
    struct programs programs;
    struct asked *asked; /* one for each program */
    struct source *sources;
    int64_t taken_unix_ms;
};

enum ask {
    ASK_METRICS = 1,
    ASK_READY = 2,
    ASK_ENTRIES = 4,
    ASK_TERMINALS = 8, /* with ASK_ENTRIES: all that are remembered */
};

/* Finds the programs. Returns false after a sentence on stderr. */
bool survey_open(struct survey *survey, const struct options *options);
/* Asks all of them; `what`: or'ed enum ask. May be repeated. */
void survey_ask(struct survey *survey, unsigned what);
void survey_close(struct survey *survey);
/* One line for each program that did not answer; returns how many. */
uint32_t survey_print_silent(const struct survey *survey, const char *consequence);
/* Members that each JSON document begins with: cluster, time, programs that did not answer. */
json_t *survey_json(const struct survey *survey);
/* Prints and frees. */
int print_json(json_t *json, int code);
/* A sentence on stderr; returns code. */
int complain(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* "350 ms", "12.3 s", "4 m 10 s", "2 h 5 m"; text: 24 bytes. */
const char *age_text(int64_t ms, char text[static 24]);
/* The 16 digits that every other view shows; text: 17 bytes. */
const char *hex_text(uint64_t id, char text[static 17]);
/* "3 running, 1 leaving": the states of a metric's labels that are not 0. */
void states_text(const char *metrics, char *text, size_t cap);

/* A joined attempt as --json shows it. */
json_t *row_json(const struct model *model, const struct row *row);

int command_status(const struct options *options);
int command_entries(const struct options *options);
int command_why(const struct options *options);
int command_drain(const struct options *options);
int command_top(const struct options *options);

#endif
