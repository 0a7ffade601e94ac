/* The router's core: owns every client request from accept to its one terminal, and places its
 * attempts.
 *
 *   TOKENIZING -> PLACING -> ADMITTING -> PREFILLING -> STREAMING -> ANSWERING -> gone      (ASKING
 * beside)
 *
 * A call that wants n answers is n requests: choice 0 is the call's, the others wait (WAITING)
 * until it has its first token and then go where its prompt is cached; when it ends first, it waits
 * for them (GATHERING). One failure ends them all; the call has one terminal, that of choice 0.
 *
 * One attempt at a time: bound to one decode session and slot, D first, P after D has reserved
 * (I9). Only output of the current attempt on its own session is ever accepted (I15). A lost leg
 * becomes another attempt, on a resume with the emitted tokens as prompt, within a retry budget.
 * Discovery is advice (I17): workers are placed on by live sessions, and a deletion in etcd counts
 * only without one. Control thread only. */
#ifndef CORE_ROUTER_H
#define CORE_ROUTER_H

#include "base/pool.h"
#include "base/siphash.h"
#include "core/blocks.h"
#include "core/canary.h"
#include "core/node.h"
#include "core/view.h"
#include "core/words.h"

enum request_state {
    REQUEST_NONE = 0,
    REQUEST_TOKENIZING,
    REQUEST_PLACING,
    REQUEST_ADMITTING,
    REQUEST_PREFILLING,
    REQUEST_ASKING,
    REQUEST_STREAMING,
    REQUEST_ANSWERING,
    REQUEST_WAITING,   /* choice 1 and up: for choice 0's first token */
    REQUEST_GATHERING, /* choice 0 has ended; others have not */
};

#define ROUTER_CHAINS       4u    /* page sizes and models whose chains of a prompt are kept */
#define ROUTER_CHAIN_MAX    8192u /* blocks of a prompt that are looked up; the rest is a miss */
#define ROUTER_SWEEP        4096u /* slots of the block set looked at in a tick */
#define ROUTER_SUSPECTS     64u
#define ROUTER_DETAIL_MAX   256u
#define ROUTER_NONE         UINT32_MAX
#define ROUTER_ADMIT_WINDOW 64u
#define ROUTER_RETRIES      2u /* more attempts after failures, per request */
#define ROUTER_CHOICES_MAX  16u

struct router_config {
    struct node_config node;
    uint32_t requests_max; /* live at once; more are refused with Retry-After. < 2^24 */
    uint32_t workers_max;
    uint32_t words_max;          /* tokens of all live requests */
    uint32_t blocks_max;         /* cached blocks known of all workers; 0: none */
    uint32_t disaggregate_above; /* uncached prompt tokens; up to so many D prefills itself */
    struct siphash_key secret;
};

struct worker {
    bool is_used;
    bool is_listed;   /* in etcd, as far as we know */
    uint32_t session; /* index, ROUTER_NONE = none */
    struct stream_id stream;
    struct worker_info info;
    struct instant reconnect_at;
    struct span reconnect_after;
    struct instant gone_since; /* unlisted and without a session */
    struct instant busy_until;
    uint32_t flaps; /* sessions in a row that ended soon after they were trusted */
    bool is_doubted;
    struct instant doubted_until; /* the last time; it is trusted from then on */
    uint32_t
        admit_window; /* D: Admits that may be unanswered: 1 after BUSY, doubled by each Admitted */
    uint32_t admitting;
    uint32_t attempts;        /* of ours, live on it */
    uint64_t tokens_reserved; /* D: prompt + answer; P: prompt, of ours */
    uint64_t tokens_due;      /* of ours, still to be computed there, answers at their longest */
    uint32_t view;            /* of its blocks, in this session; 0 = none */
    uint32_t blocks;          /* in that view */
    /* router_core.given when it last got an attempt, and a canary: equals take turns */
    uint64_t last_given[2];
};

struct request {
    uint64_t id; /* pool id; 0 = free */
    enum request_state state;
    struct call_id call;
    struct attempt_id attempt;
    uint32_t attempt_number;
    uint32_t failures;
    uint32_t decode;  /* worker index while its leg is live, else ROUTER_NONE */
    uint32_t prefill; /* the same for P */
    struct stream_id decode_stream;
    struct stream_id prefill_stream;
    struct link decode_link;
    struct link prefill_link;
    struct link parked_link;
    /* of a call with several choices; each is a request of its own */
    uint32_t choice;
    uint32_t leader; /* index of choice 0; its own, if it is that */
    uint64_t prefer; /* decode worker that has the prompt: incarnation, 0 = none */
    /* choice 0's, for the call */
    uint32_t choices;                    /* asked for */
    uint32_t undone;                     /* not ended yet */
    uint32_t others[ROUTER_CHOICES_MAX]; /* indices of choices 1 and up; ROUTER_NONE = ended */
    uint32_t ended_tokens;               /* of choices that have ended */
    uint64_t ended_bytes;                /* kv_bytes of others that have ended */
    uint32_t ended_attempts;             /* the most that one of them took */
    uint32_t lane; /* of those that wait for the same model; valid while parked_link is linked */
    struct slot_id slot;
    uint64_t key;
    uint32_t cached;
    uint32_t due_decode;  /* its share of the worker's tokens_due while that leg is live */
    uint32_t due_prefill; /* the same */
    uint32_t words;       /* prompt, then emitted tokens */
    uint32_t prompt_count;
    uint32_t token_count;
    uint32_t max_tokens;
    uint32_t attempt_tokens; /* token_count when this attempt was admitted */
    bool is_tokenizing;      /* own operation until EVENT_TOKENIZED */
    bool is_answering;       /* own operation until EVENT_ANSWERED */
    bool is_admit_open;      /* D owes an answer to Admit */
    bool is_prefill_queued;  /* P has mentioned this attempt */
    bool is_abort_wished;
    uint32_t eos_count;
    uint32_t eos[EOS_MAX];
    uint32_t cached_first;            /* of the first admitted attempt, for usage */
    struct attempt_id cached_attempt; /* that attempt; 0 = none was admitted yet */
    uint64_t kv_bytes;
    uint64_t kv_exposed_us; /* of the present attempt; 0 = P has not said */
    enum outcome outcome;
    enum cause cause;
    uint8_t decided_in;
    struct instant since;
    struct instant state_since;
    struct instant deadline;
    struct instant
        state_deadline; /* of PLACING without any worker, ADMITTING, ASKING; else NEVER */
    struct instant first_placed;
    struct instant first_token;
    struct instant last_token;
    struct instant decided;
    uint64_t model_hash;
    struct siphash128 salt;
    enum canary_legs canary; /* CANARY_NONE: a client's */
    struct sampling sampling;
    char model[LABEL_MAX];
    char label[LABEL_MAX];
    char session_label[LABEL_MAX];
    char decode_label[LABEL_MAX];
    char prefill_label[LABEL_MAX];
    char numerics[MESSAGE_NUMERICS_MAX]; /* of the worker whose tokens the client has; "" = none yet
                                          */
    char detail[ROUTER_DETAIL_MAX];
};

struct router_suspect {
    struct incarnation prefill;
    struct incarnation decode;
    struct instant until;
};

/* The blocks of one prompt, computed once for all workers of one page size and model. */
struct router_chain {
    uint64_t request; /* 0 = unused */
    uint32_t token_count;
    uint32_t page_tokens;
    struct layout_digest layout;
    uint32_t count;
    uint64_t *blocks; /* [ROUTER_CHAIN_MAX] */
};

/* Requests of one model that wait to be placed, first come first served. */
struct router_lane {
    uint64_t model_hash;
    struct list requests;
    struct link link; /* in parked.lanes or lanes_free */
};

/* Of clients' requests only. */
struct router_stats {
    uint64_t retries[CAUSE_COUNT];
    uint64_t resumes_ok; /* resumed streams that went on */
    uint64_t resumes_failed;
    uint64_t
        resumes_other_numerics; /* placed on a worker that computes otherwise: tokens may differ */
    uint64_t
        pairs_other_numerics; /* read by a worker that computes otherwise than its D: likewise */
    uint64_t admits;
    uint64_t rejected_busy;
    uint64_t prefill_busy;
    uint64_t one_leg;
    uint64_t two_legs;
    uint64_t tokens;
    uint64_t prompt_tokens;
    uint64_t cached_tokens;
    uint64_t block_messages; /* MESSAGE_CACHED read */
    uint64_t block_resets;   /* of those, the beginnings of a whole index */
    uint64_t answers_ok;
    uint64_t aborted_last; /* how many the last EVENT_CLIENT_ABORT ended */
    struct histogram queue;
    struct histogram ttft;
    struct histogram itl;
};

struct router_core {
    struct node node;
    struct router_config config;
    struct pool ids;
    struct request *requests;
    struct map by_call;
    uint64_t *label_hashes; /* [requests_max][2]: of label and session_label; 0 = none */
    struct words words;
    uint32_t words_held; /* ranges that requests hold: must be words.taken */
    struct worker *workers;
    struct router_lane *lanes; /* [requests_max]: there are never more models than requests */
    struct list lanes_free;
    struct {
        uint32_t count;    /* requests in all lanes */
        struct list lanes; /* those with requests, the next one to be served first */
    } parked;
    bool is_placing_due;
    bool is_waking_due;      /* requests that waited for discovery are still to be tokenized */
    uint64_t given;          /* attempts given to workers so far */
    uint32_t retry_tenths;   /* budget: ten are one retry */
    struct block_set blocks; /* what workers say that they have cached */
    uint32_t views;          /* made so far */
    struct router_chain chains[ROUTER_CHAINS];
    uint32_t chain_next;
    struct router_suspect suspects[ROUTER_SUSPECTS];
    uint32_t suspect_next;
    struct router_stats stats;
    uint64_t *out_ids;
    uint32_t out_ids_used;
};

uint64_t router_bytes(const struct router_config *config);
void router_init(struct router_core *core, const struct router_config *config, void *memory);
/* One turn. Consumes exactly one event; never blocks, reads a clock, allocates or logs. */
void router_core_step(struct router_core *core, const struct event *event, struct instant now,
                      struct effects *out);
struct instant router_core_deadline(const struct router_core *core);
bool router_view(const struct router_core *core, uint32_t *cursor, struct entry_view *view_out);
const char *request_state_name(uint32_t state);
void router_verify(const struct router_core *core);

/* Whether a pair of workers that can serve this model is reachable now ("" = any model). */
bool router_has_pair(const struct router_core *core, const char *model);
/* What a canary needs to know of the fleet. `turn`: which of the models served it is for; "" where
 * there is none. */
void router_canary_facts(const struct router_core *core, uint64_t turn, struct canary_facts *facts,
                         char model_out[LABEL_MAX]);
/* The first worker at or after *cursor; NULL at the end. */
const struct worker *router_worker(const struct router_core *core, uint32_t *cursor);
static inline bool router_worker_is_live(const struct router_core *core,
                                         const struct worker *worker) {
    return worker->session != ROUTER_NONE &&
           core->node.sessions[worker->session].phase == SESSION_LIVE;
}

#endif
