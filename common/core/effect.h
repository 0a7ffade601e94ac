/* Effects: everything a core can want. Appended to a bounded buffer, carried out in order by the
 * shell before the next step; payload pointers are the core's memory, borrowed until that next
 * step.
 *
 * An effect that starts an operation carries an id, and exactly one event with that id ends it. */
#ifndef CORE_EFFECT_H
#define CORE_EFFECT_H

#include "base/check.h"
#include "base/time.h"
#include "core/ids.h"
#include "core/message.h"
#include "core/plan.h"

enum effect_kind {
    /* sessions */
    EFFECT_STREAM_OPEN = 1, /* ended by EVENT_STREAM_ENDED */
    EFFECT_STREAM_SEND,
    EFFECT_STREAM_CLOSE, /* idempotent; EVENT_STREAM_ENDED follows if it has not come */

    /* router */
    EFFECT_TOKENIZE, /* ended by EVENT_TOKENIZED */
    EFFECT_DELIVER,  /* tokens for the client, in order */
    EFFECT_CHOICE,   /* the end of one choice of a call that has others still */
    EFFECT_ANSWER,   /* the one terminal of the client's call; ended by EVENT_ANSWERED */

    /* workers */
    EFFECT_STEP,         /* ended by EVENT_STEP_DONE; one outstanding */
    EFFECT_STEP_ABANDON, /* nobody wants its results any more: it may end sooner, then with
                          * STATUS_CANCELLED; at most once for each step */

    /* decode worker */
    EFFECT_LINK_ARM,
    EFFECT_LINK_DISARM, /* ended by EVENT_LINK_DISARMED */

    /* prefill worker */
    EFFECT_LINK_CONNECT,
    EFFECT_LINK_SEND,  /* ended by EVENT_LINK_SENT */
    EFFECT_LINK_CLOSE, /* ended by EVENT_LINK_CLOSED, after the end of every send of that peer */

    /* all */
    EFFECT_NOTE, /* something an operator may want in the log */
    EFFECT_EXIT, /* drained: the process may end */
};

enum note_kind {
    NOTE_SESSION_UP = 1, /* peer id, role */
    NOTE_SESSION_ENDED,  /* peer id, role, cause, entries that ended with it */
    NOTE_SESSION_REFUSED,
    NOTE_WORKER_SEEN,
    NOTE_WORKER_LOST,
    NOTE_DRAINING,
    NOTE_DRAINED,
    NOTE_AUDIT_MISMATCH, /* our bug: the entry's slot or attempt */
    NOTE_RETRACTED,      /* slot, tokens whose KV it gave up, label of the request */
    NOTE_RESUMED,        /* slot, tokens to be computed again, label of the request */
};

struct effect {
    enum effect_kind kind;
    struct stream_id stream; /* EFFECT_STREAM_* */
    union {
        struct {
            char address[ADDRESS_MAX];
        } open;
        struct {
            enum cause cause;
        } close;
        struct message message; /* EFFECT_STREAM_SEND */
        struct {
            uint64_t request;
            struct call_id call;
        } tokenize;
        struct {
            uint64_t request; /* of the call: its choice 0 */
            struct call_id call;
            uint32_t index; /* of the choice */
            const uint32_t *tokens;
            uint32_t token_count;
            /* of the one token, if the request wants logprobs; as in struct step_result */
            bool has_logprobs;
            float logprob;
            uint32_t top_count;
            uint32_t top_tokens[LOGPROBS_TOP_MAX];
            float top_logprobs[LOGPROBS_TOP_MAX];
        } deliver;
        struct {
            uint64_t request; /* of the call: its choice 0 */
            struct call_id call;
            uint32_t index;
            enum finish finish;
        } choice;
        struct {
            uint64_t request;
            struct call_id call;
            uint32_t index; /* the choice whose end this is as well: the last of the call */
            enum outcome outcome;
            enum cause cause;
            enum status status; /* what the client is told, mapped once to a gRPC code */
            enum finish finish;
            struct usage usage;
            uint64_t seed;
            uint32_t retry_after_ms; /* 0 = none */
            const char *detail;      /* a sentence, static or the request's; never NULL */
            bool is_client_gone;     /* nobody listens: close without words */
            /* for people: where it ran; "" = nowhere */
            const char *decode_label;
            const char *prefill_label;
            uint64_t kv_bytes;      /* that crossed from prefill to decode */
            uint64_t kv_exposed_us; /* of it not hidden by computing; 0 = nobody said */
            uint32_t attempts;
            struct span queued; /* accepted -> placed, the first time */
            struct span ttft;   /* accepted -> first token; 0 = none came */
            struct span total;
        } answer;
        const struct step_plan *plan; /* EFFECT_STEP */
        struct {
            uint64_t number; /* of the plan */
        } abandon;
        struct {
            struct slot_id slot;
            uint64_t key;
            uint32_t token_first; /* missing range [token_first, token_end) */
            uint32_t token_end;
            const uint32_t *pages; /* of the sequence, from token 0 */
            uint32_t page_count;
        } arm;
        struct {
            struct slot_id slot;
        } disarm;
        struct {
            uint64_t peer;
            const uint8_t *address;
            uint32_t address_len;
        } connect;
        struct {
            uint64_t op;
            uint64_t peer;
            struct slot_id slot;
            uint64_t key;
            uint32_t component_first;
            uint32_t component_count;
            uint32_t token_first;
            uint32_t token_count;
            const uint32_t *pages; /* of the sequence, from token 0 */
            uint32_t page_count;
        } send;
        struct {
            uint64_t peer;
        } link_close;
        struct {
            enum note_kind kind;
            enum role role;
            enum cause cause;
            uint64_t id;
            uint64_t number;
            char label[LABEL_MAX];
        } note;
    } u;
};

#define EFFECTS_MAX 1024u

_Static_assert(4 * STEP_ROWS_MAX <= EFFECTS_MAX, "a step in which every row ends must fit");

/* One step's output. A step never appends more than EFFECTS_MAX: work that could is cut into turns.
 */
struct effects {
    uint32_t count;
    struct effect items[EFFECTS_MAX];
};

/* Appends a zeroed effect of a kind and returns it. CHECKs the bound. */
struct effect *effects_add(struct effects *effects, enum effect_kind kind);

static inline uint32_t effects_room(const struct effects *effects) {
    return EFFECTS_MAX - effects->count;
}

const char *effect_name(enum effect_kind kind);

#endif
