/* Events: everything that can happen to a core. One per step; payloads are borrowed until it
 * returns.
 *
 * Shells turn the world into these and decide nothing. A shell may deliver any event late or for
 * something that no longer exists: the core ignores and counts it. What a shell must never do is
 * end a started operation twice or not at all. */
#ifndef CORE_EVENT_H
#define CORE_EVENT_H

#include "base/bytes.h"
#include "base/time.h"
#include "core/ids.h"
#include "core/message.h"
#include "core/plan.h"

enum event_kind {
    EVENT_TICK = 1, /* time passed; at least every 50 ms and at the core's deadline */
    EVENT_DRAIN,    /* stop admission; fail what is left after u.drain.grace */

    /* sessions, all cores */
    EVENT_STREAM_ACCEPTED, /* a peer opened a stream to us */
    EVENT_STREAM_MAIL,     /* one decoded message */
    EVENT_STREAM_BAD,      /* bytes that are no message: the session ends */
    EVENT_STREAM_ENDED,    /* exactly once per opened or accepted stream, and its last event */

    /* router: clients */
    EVENT_CLIENT_OPEN,  /* a Generate call was accepted */
    EVENT_TOKENIZED,    /* ends EFFECT_TOKENIZE */
    EVENT_CLIENT_GONE,  /* the call is over for the client: left, reset, deadline, does not read */
    EVENT_CLIENT_ABORT, /* Abort by label */
    EVENT_STOP_FOUND,   /* a stop string ended the text of this request */
    EVENT_ANSWERED,     /* ends EFFECT_ANSWER: the call is closed and its memory back */

    /* router: fleet (discovery is advice) */
    EVENT_WORKER_SEEN,
    EVENT_WORKER_LOST,

    /* workers */
    EVENT_LAYER_DONE, /* KV of this layer is complete in all rows of the step */
    EVENT_STEP_DONE,  /* ends EFFECT_STEP */

    /* decode worker: link */
    EVENT_LINK_PROGRESS, /* verified bytes so far, at most once per link turn and slot */
    EVENT_LINK_COVERED,  /* every byte of the armed range is verified */
    EVENT_LINK_BAD,      /* a chunk of this slot failed its checks */
    EVENT_LINK_DISARMED, /* ends EFFECT_LINK_ARM .. EFFECT_LINK_DISARM: nothing writes there any
                            more */

    /* prefill worker: link */
    EVENT_LINK_SENT,   /* ends EFFECT_LINK_SEND */
    EVENT_LINK_FAILED, /* the endpoint reported an error: close it */
    EVENT_LINK_CLOSED, /* ends EFFECT_LINK_CONNECT .. EFFECT_LINK_CLOSE */
};

#define EOS_MAX 8u

/* A canary is the router's own request: it shows that requests complete (core/canary.h). It is
 * given up where another request would wait, is never tried again, and is in no user's numbers. */
enum canary_legs {
    CANARY_NONE = 0, /* a client's request */
    CANARY_ONE_LEG,  /* the decode worker prefills it */
    CANARY_TWO_LEGS, /* a prefill worker does, however short it is */
};

/* A worker as discovery describes it. Copied by the core. */
struct worker_info {
    struct incarnation incarnation;
    enum role role;
    char id[LABEL_MAX];
    char address[ADDRESS_MAX]; /* gRPC */
    char model[LABEL_MAX];     /* served model name */
    char numerics[MESSAGE_NUMERICS_MAX];
    struct layout_digest layout;
    uint64_t tokenizer; /* digest of the tokenizer file */
    uint32_t vocab;
    uint32_t context;   /* tokens of prompt + answer */
    uint32_t kv_tokens; /* capacity */
    uint32_t page_tokens;
    bool is_draining;
};

struct event {
    enum event_kind kind;
    struct stream_id stream; /* EVENT_STREAM_* */
    union {
        struct {
            struct span grace;
        } drain;
        struct {
            const struct message *message;
        } mail;
        struct {
            enum cause cause; /* SESSION_ENDED for a close or reset, SESSION_ERROR for bad bytes */
        } stream_end;
        struct {
            struct call_id call;
            struct span deadline; /* remaining; 0 = none given */
            const char *model;
            const char *request_label; /* "" = none */
            const char *session_label;
            const char *cache_salt;  /* NULL or "" = none */
            enum canary_legs canary; /* of a canary request: how it is to be served */
        } client_open;
        struct {
            uint64_t request;   /* of EFFECT_TOKENIZE */
            enum status status; /* STATUS_OK, or why not; then only detail is set */
            const char *detail; /* a sentence for the client */
            const uint32_t *tokens;
            uint32_t token_count;
            uint32_t max_tokens; /* of each choice; 0: as many as fit */
            uint32_t choices;    /* answers to one prompt; 0 = 1 */
            const struct sampling *sampling;
            const uint32_t *eos; /* end-of-sequence ids of the model */
            uint32_t eos_count;
        } tokenized;
        struct {
            struct call_id call;
            enum cause cause; /* CLIENT_GONE or DEADLINE */
        } client_gone;
        struct {
            const char *label;
            bool is_session;
        } client_abort;
        struct {
            uint64_t request;           /* of the call */
            uint32_t index;             /* of the choice */
            uint32_t completion_tokens; /* up to and including the token that completed the stop */
        } stop_found;
        struct {
            uint64_t request;
        } answered;
        struct {
            const struct worker_info *info;
        } worker_seen;
        struct {
            struct incarnation incarnation;
        } worker_lost;
        struct {
            uint64_t number;
            uint32_t layer;
        } layer_done;
        struct {
            uint64_t number;
            enum status status;
            const struct step_result *results;
            uint32_t count;
            struct span elapsed;
            struct instant ended; /* when the engine was through, on the core's clock */
        } step_done;
        struct {
            struct slot_id slot;
            uint64_t bytes;
            enum cause cause; /* EVENT_LINK_BAD */
        } link;               /* EVENT_LINK_PROGRESS, _COVERED, _BAD, _DISARMED */
        struct {
            uint64_t op; /* of EFFECT_LINK_SEND */
            enum status status;
        } sent;
        struct {
            uint64_t peer; /* of EFFECT_LINK_CONNECT */
        } peer;            /* EVENT_LINK_FAILED, EVENT_LINK_CLOSED */
    } u;
};

const char *event_name(enum event_kind kind);

#endif
