#include "tools/batonctl/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/check.h"

#define HOPS_MAX    4u
#define NUMBER_MASK (UINT64_C(0xffff) << 24) /* core/ids.h: generation | number | index */

const char *json_text(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    return text != NULL ? text : "";
}

int64_t json_number(const json_t *object, const char *key) {
    return json_integer_value(json_object_get(object, key));
}

uint64_t json_hex(const json_t *object, const char *key) {
    return strtoull(json_text(object, key), NULL, 16);
}

uint64_t attempt_request(uint64_t attempt) {
    return attempt & ~NUMBER_MASK;
}

uint32_t attempt_number(uint64_t attempt) {
    return (uint32_t)((attempt & NUMBER_MASK) >> 24);
}

static enum role source_role(const struct source *source) {
    if (source->program->role != ROLE_NONE) {
        return source->program->role;
    }
    const char *name = json_text(source->document, "role");
    for (enum role role = ROLE_ROUTER; role <= ROLE_DECODE; role++) {
        if (strcmp(role_name(role), name) == 0) {
            return role;
        }
    }
    return ROLE_NONE;
}

/* ---- reading -------------------------------------------------------------------------------- */

static void read_held(struct model *model, uint32_t source, enum role role, const json_t *json) {
    model->held[model->held_count++] = (struct held){
        .source = source,
        .role = role,
        .router = json_hex(json, "router"),
        .attempt = json_hex(json, "attempt"),
        .age_ms = json_number(json, "age_ms"),
        .state_age_ms = json_number(json, "state_age_ms"),
        .deadline_left_ms = json_number(json, "deadline_left_ms"),
        .id = json_text(json, "id"),
        .label = json_text(json, "label"),
        .state = json_text(json, "state"),
        .waits_for = json_text(json, "waits_for"),
        .deadline = json_text(json, "deadline"),
        .json = json,
    };
}

static void read_ended(struct model *model, uint32_t source, enum role role, const json_t *json) {
    model->ended[model->ended_count++] = (struct ended){
        .source = source,
        .role = role,
        .router = json_hex(json, "router"),
        .attempt = json_hex(json, "attempt"),
        .age_ms = json_number(json, "age_ms"),
        .ago_ms = json_number(json, "ago_ms"),
        .kv_exposed_us = json_number(json, "kv_exposed_us"),
        .id = json_text(json, "id"),
        .label = json_text(json, "label"),
        .state = json_text(json, "state"),
        .outcome = json_text(json, "outcome"),
        .cause = json_text(json, "cause"),
    };
}

static int by_attempt(const void *a, const void *b) {
    const struct held *left = a;
    const struct held *right = b;
    if (left->router != right->router) {
        return left->router < right->router ? -1 : 1;
    }
    if (left->attempt != right->attempt) {
        return left->attempt < right->attempt ? -1 : 1;
    }
    return left->role < right->role ? -1 : left->role > right->role;
}

static int by_ago(const void *a, const void *b) {
    const struct ended *left = a;
    const struct ended *right = b;
    return left->ago_ms < right->ago_ms ? -1 : left->ago_ms > right->ago_ms;
}

static int by_age(const void *a, const void *b) {
    const struct row *left = a;
    const struct row *right = b;
    if (left->age_ms != right->age_ms) {
        return left->age_ms > right->age_ms ? -1 : 1;
    }
    return left->attempt < right->attempt ? -1 : left->attempt > right->attempt;
}

/* ---- whom it waits for ---------------------------------------------------------------------- */

/* A peer as one entry sees it. */
struct peer {
    const char *id;
    uint64_t incarnation;
    int64_t silence_ms;
};

static bool peer_of(const struct model *model, const struct held *held, enum role role,
                    struct peer *peer_out) {
    const json_t *sessions = json_object_get(model->sources[held->source].document, "sessions");
    const json_t *peers = json_object_get(held->json, "peers");
    for (size_t p = 0; p < json_array_size(peers); p++) {
        const json_t *peer = json_array_get(peers, p);
        for (size_t s = 0; s < json_array_size(sessions); s++) {
            const json_t *session = json_array_get(sessions, s);
            if (json_number(session, "stream") == json_number(peer, "stream") &&
                strcmp(json_text(session, "peer_role"), role_name(role)) == 0) {
                *peer_out = (struct peer){.id = json_text(peer, "peer"),
                                          .incarnation = json_hex(session, "incarnation"),
                                          .silence_ms = json_number(peer, "silence_ms")};
                return true;
            }
        }
    }
    return false;
}

static uint32_t source_of(const struct model *model, uint64_t incarnation) {
    for (uint32_t i = 0; i < model->source_count; i++) {
        const struct source *source = &model->sources[i];
        uint64_t own = source->program->incarnation != 0
                           ? source->program->incarnation
                           : json_hex(source->document, "incarnation");
        if (own == incarnation) {
            return i;
        }
    }
    return NOBODY;
}

/* The words of core's views. */
static enum role waited_role(const char *waits_for) {
    if (strstr(waits_for, "prefill worker") != NULL ||
        strcmp(waits_for, "the rest of the KV bytes") == 0) {
        return ROLE_PREFILL;
    }
    return strstr(waits_for, "the decode worker") != NULL ? ROLE_DECODE : ROLE_NONE;
}

static const char *source_id(const struct source *source) {
    return source->program->id[0] != '\0' ? source->program->id : json_text(source->document, "id");
}

static void waiting_at(const struct model *model, const struct held *held, enum waiting_kind kind,
                       struct waiting *waiting) {
    waiting->kind = kind;
    waiting->source = held->source;
    waiting->what = held->waits_for;
    waiting->for_ms = held->state_age_ms;
    text_copy(waiting->who, sizeof waiting->who, source_id(&model->sources[held->source]));
}

/* `held` waits for a peer that has no part of this row. */
static void waiting_on_peer(const struct model *model, const struct held *held,
                            const struct peer *peer, struct waiting *waiting) {
    waiting_at(model, held, WAITING_ABSENT, waiting);
    text_copy(waiting->who, sizeof waiting->who, peer->id);
    waiting->silence_ms = peer->silence_ms;
    waiting->source = source_of(model, peer->incarnation);
    if (waiting->source == NOBODY) {
        waiting->kind = WAITING_LOST;
    } else if (model->sources[waiting->source].document == NULL) {
        waiting->kind = WAITING_SILENT;
    }
}

static bool peer_is_silent(const struct model *model, const struct peer *peer) {
    uint32_t source = source_of(model, peer->incarnation);
    return source == NOBODY || model->sources[source].document == NULL;
}

static void row_follow(const struct model *model, struct row *row) {
    struct waiting *waiting = &row->waiting;
    *waiting = (struct waiting){.source = NOBODY, .silence_ms = -1, .what = ""};
    const struct held *held = row->at[ROLE_ROUTER]   ? row->at[ROLE_ROUTER]
                              : row->at[ROLE_DECODE] ? row->at[ROLE_DECODE]
                                                     : row->at[ROLE_PREFILL];
    bool is_seen[4] = {false};
    for (uint32_t hop = 0; hop < HOPS_MAX; hop++) {
        is_seen[held->role] = true;
        struct peer peer = {.id = ""};
        enum role role = waited_role(held->waits_for);
        if (role == ROLE_NONE && strstr(held->waits_for, "KV sends") != NULL &&
            peer_of(model, held, ROLE_DECODE, &peer) && peer_is_silent(model, &peer)) {
            waiting_on_peer(model, held, &peer, waiting); /* sends need a receiver that runs */
            return;
        }
        if (role == ROLE_NONE || role == held->role) {
            bool is_client = strstr(held->waits_for, "the client") != NULL;
            waiting_at(model, held, is_client ? WAITING_CLIENT : WAITING_AT, waiting);
            return;
        }
        bool has_peer = peer_of(model, held, role, &peer);
        const struct held *next = row->at[role];
        if (next != NULL && has_peer && source_of(model, peer.incarnation) != next->source) {
            next = NULL; /* another one holds it: what is left of an earlier choice */
        }
        if (next == NULL && has_peer) {
            waiting_on_peer(model, held, &peer, waiting);
            return;
        }
        if (next == NULL) {
            waiting_at(model, held, WAITING_AT, waiting); /* it has not chosen or met one yet */
            return;
        }
        if (is_seen[role]) {
            waiting_at(model, held, WAITING_EACH_OTHER, waiting);
            text_copy(waiting->other, sizeof waiting->other,
                      source_id(&model->sources[next->source]));
            return;
        }
        held = next;
    }
}

/* ---- joining -------------------------------------------------------------------------------- */

static void row_add(struct row *row, const struct held *held) {
    row->at[held->role] = held;
    row->router = held->router;
    row->attempt = held->attempt;
    row->age_ms = held->age_ms > row->age_ms ? held->age_ms : row->age_ms;
    if (row->label == NULL || row->label[0] == '\0') {
        row->label = held->label;
    }
    if (row->next == NULL || held->deadline_left_ms < row->next->deadline_left_ms) {
        row->next = held;
    }
}

static void join(struct model *model) {
    for (uint32_t i = 0; i < model->held_count; i++) {
        const struct held *held = &model->held[i];
        struct row *last = model->row_count > 0 ? &model->rows[model->row_count - 1] : NULL;
        if (last == NULL || last->router != held->router || last->attempt != held->attempt ||
            last->at[held->role] != NULL) {
            last = &model->rows[model->row_count++];
        }
        row_add(last, held);
    }
    for (uint32_t i = 0; i < model->row_count; i++) {
        row_follow(model, &model->rows[i]);
    }
    if (model->row_count > 0) {
        qsort(model->rows, model->row_count, sizeof *model->rows, by_age);
    }
}

void model_build(const struct source *sources, uint32_t count, struct model *model_out) {
    struct model model = {.sources = sources, .source_count = count};
    size_t held = 0;
    size_t ended = 0;
    for (uint32_t i = 0; i < count; i++) {
        held += json_array_size(json_object_get(sources[i].document, "entries"));
        ended += json_array_size(json_object_get(sources[i].document, "terminals"));
    }
    model.held = calloc(held + 1, sizeof *model.held);
    model.rows = calloc(held + 1, sizeof *model.rows);
    model.ended = calloc(ended + 1, sizeof *model.ended);
    CHECK(model.held != NULL && model.rows != NULL && model.ended != NULL);
    for (uint32_t i = 0; i < count; i++) {
        enum role role = source_role(&sources[i]);
        const json_t *entries = json_object_get(sources[i].document, "entries");
        const json_t *terminals = json_object_get(sources[i].document, "terminals");
        for (size_t e = 0; role != ROLE_NONE && e < json_array_size(entries); e++) {
            read_held(&model, i, role, json_array_get(entries, e));
        }
        for (size_t t = 0; role != ROLE_NONE && t < json_array_size(terminals); t++) {
            read_ended(&model, i, role, json_array_get(terminals, t));
        }
    }
    if (model.held_count > 0) {
        qsort(model.held, model.held_count, sizeof *model.held, by_attempt);
    }
    if (model.ended_count > 0) {
        qsort(model.ended, model.ended_count, sizeof *model.ended, by_ago);
    }
    join(&model);
    *model_out = model;
}

void model_fini(struct model *model) {
    free(model->held);
    free(model->rows);
    free(model->ended);
    *model = (struct model){.held = NULL};
}

/* ---- words ---------------------------------------------------------------------------------- */

const char *waiting_kind_name(enum waiting_kind kind) {
    switch (kind) {
    case WAITING_AT: return "at";
    case WAITING_CLIENT: return "client";
    case WAITING_SILENT: return "not_answering";
    case WAITING_LOST: return "not_listed";
    case WAITING_ABSENT: return "not_held";
    case WAITING_EACH_OTHER: return "each_other";
    }
    return "unknown";
}

static void waiting_words(const struct waiting *waiting, char *text, size_t cap) {
    char silence[48] = "";
    if (waiting->silence_ms >= 2000) { /* a live session beats each second */
        (void)snprintf(silence, sizeof silence, " (silent for %.1f s)",
                       (double)waiting->silence_ms / 1e3);
    }
    switch (waiting->kind) {
    case WAITING_AT:
        (void)snprintf(text, cap, "%s: %s", waiting->who,
                       waiting->what[0] != '\0' ? waiting->what : "nothing");
        return;
    case WAITING_CLIENT: (void)snprintf(text, cap, "%s (%s)", waiting->what, waiting->who); return;
    case WAITING_SILENT:
        (void)snprintf(text, cap, "%s, which does not answer%s", waiting->who, silence);
        return;
    case WAITING_LOST:
        (void)snprintf(text, cap, "%s, which is not listed (gone, or restarted)%s", waiting->who,
                       silence);
        return;
    case WAITING_ABSENT:
        (void)snprintf(text, cap, "%s, which does not hold it yet, or no more%s", waiting->who,
                       silence);
        return;
    case WAITING_EACH_OTHER:
        (void)snprintf(text, cap, "%s and %s wait for each other's message", waiting->who,
                       waiting->other);
        return;
    }
}

void waiting_text(const struct waiting *waiting, char *text, size_t cap) {
    waiting_words(waiting, text, cap);
    text_end_whole(text);
}

const char *cause_text(const char *cause) {
    static const struct {
        const char *cause;
        const char *text;
    } texts[] = {
        {"done", "it ran to its end"},
        {"client_gone", "the client closed its call"},
        {"client_abort", "Abort was called for it"},
        {"stop", "a stop string was found"},
        {"superseded", "another attempt took over"},
        {"deadline", "the request's deadline passed"},
        {"t_admit", "the decode worker did not answer Admit in time (--timer-admit)"},
        {"t_open", "the prefill worker's Open did not arrive in time (--timer-open)"},
        {"stall", "no KV bytes moved for too long (--timer-stall)"},
        {"queue_timeout", "it waited too long for a worker"},
        {"busy", "a worker had no room"},
        {"too_large", "it could never fit, whatever else ends"},
        {"draining", "the program was leaving"},
        {"mismatch", "KV layout or protocol of the two differ"},
        {"unknown_slot", "the slot was not held, or not in a state that allows it"},
        {"bad_key", "a slot was named with a wrong key"},
        {"bad_chunk", "a KV chunk had a wrong checksum, range or header"},
        {"short", "the prefill worker announced other KV bytes than the slot needs"},
        {"peer_refused", "the decode worker refused the hand-off"},
        {"peer_abort", "the other leg gave up"},
        {"send_failed", "a KV send ended with an error"},
        {"step_failed", "the engine failed a step"},
        {"session_ended", "the session with a peer was closed or reset"},
        {"session_silent", "nothing was heard from a peer for the lease (--timer-lease)"},
        {"session_replaced", "the peer opened a newer session"},
        {"session_error", "the peer broke the protocol"},
        {"audit", "the peer did not hold it: a bug"},
        {"retries", "attempts, or the retry budget, were used up"},
        {"no_worker", "no worker serves its model"},
        {"no_model", "its model is not known"},
        {"invalid", "the request was wrong"},
        {"shutdown", "the drain deadline of the program passed"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        if (strcmp(texts[i].cause, cause) == 0) {
            return texts[i].text;
        }
    }
    return cause;
}
