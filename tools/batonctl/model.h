/* What all programs said, joined: which attempt is where, and whom it waits for in the end.
 *
 * Pure: documents of /debug/entries in, rows out. An attempt is named by (router, attempt), since
 * two routers may use the same number; a request is an attempt without its attempt number. The
 * joined row follows "waits for" from program to program until somebody works, does not answer, or
 * does not hold the attempt: that is the party an operator must look at. Texts are borrowed from
 * the documents. */
#ifndef BATONCTL_MODEL_H
#define BATONCTL_MODEL_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/ids.h"
#include "tools/batonctl/fleet.h"

#define NOBODY UINT32_MAX

/* One program and its document. */
struct source {
    const struct program *program;
    const json_t *document; /* of /debug/entries; NULL: it did not answer */
    const char *why;        /* why not: a phrase */
};

/* A live entry of one program. */
struct held {
    uint32_t source;
    enum role role;
    uint64_t router; /* incarnation */
    uint64_t attempt;
    int64_t age_ms;
    int64_t state_age_ms;
    int64_t deadline_left_ms;
    const char *id;
    const char *label;
    const char *state;
    const char *waits_for;
    const char *deadline;
    const json_t *json;
};

enum waiting_kind {
    WAITING_AT,         /* `who` has it and works on it, or waits for its own turn */
    WAITING_CLIENT,     /* for the client, says `who` */
    WAITING_SILENT,     /* for `who`, which does not answer */
    WAITING_LOST,       /* for a program that etcd does not list */
    WAITING_ABSENT,     /* for `who`, which answers but does not hold it */
    WAITING_EACH_OTHER, /* `who` and `other` wait for each other: mail is on its way or was lost */
};

struct waiting {
    enum waiting_kind kind;
    uint32_t source;     /* of who; NOBODY: not listed */
    char who[LABEL_MAX]; /* program id */
    char other[LABEL_MAX];
    const char *what;   /* the last "waits_for" */
    int64_t for_ms;     /* how long the last holder is in its state */
    int64_t silence_ms; /* since the last message of who to the asker; -1: not known */
};

/* One attempt over all programs. */
struct row {
    const struct held *at[4]; /* by role; NULL: not held by an answering program */
    uint64_t router;
    uint64_t attempt;
    const char *label;
    int64_t age_ms;          /* of the oldest part */
    const struct held *next; /* the part whose deadline comes first */
    struct waiting waiting;
};

/* How something ended at one program. */
struct ended {
    uint32_t source;
    enum role role;
    uint64_t router;
    uint64_t attempt;
    int64_t age_ms;
    int64_t ago_ms;
    int64_t kv_exposed_us; /* prefill worker: KV time that computing did not hide; 0 = none */
    const char *id;
    const char *label; /* cut to 23 bytes */
    const char *state;
    const char *outcome;
    const char *cause;
};

struct model {
    const struct source *sources;
    uint32_t source_count;
    struct held *held;
    uint32_t held_count;
    struct row *rows; /* oldest first */
    uint32_t row_count;
    struct ended *ended; /* newest first */
    uint32_t ended_count;
};

/* sources: borrowed for the model's life. Documents that lack members count as holding nothing. */
void model_build(const struct source *sources, uint32_t count, struct model *model_out);
void model_fini(struct model *model);

/* An attempt without its number: what stays the same over the attempts of one request. */
uint64_t attempt_request(uint64_t attempt);
uint32_t attempt_number(uint64_t attempt);
/* "decode-1: its engine step" and the like; text: at least 256 bytes. */
void waiting_text(const struct waiting *waiting, char *text, size_t cap);
const char *waiting_kind_name(enum waiting_kind kind);
/* What a cause means, as a phrase for people; the cause itself if it is not known. */
const char *cause_text(const char *cause);

/* Members of JSON objects with a default. */
const char *json_text(const json_t *object, const char *key);
int64_t json_number(const json_t *object, const char *key);
uint64_t json_hex(const json_t *object, const char *key);

#endif
