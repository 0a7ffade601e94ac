/* The decode worker's core: admits by room, receives KV into armed slots, runs requests, decides
 * hand-offs.
 *
 *   RESERVED -> RECEIVING -> RUNNING <-> RETRACTED  LEAVING while an own operation still holds the
 *                               |                   pages
 *                              gone
 *
 * D alone decides whether a slot is committed, and frees its pages on nobody's word. An entry is
 * created only by Admit; its outcome is decided once, its memory returns when its own operations
 * are zero. It starts with the pages of its prompt and takes more as it grows; when there are none,
 * the youngest running ones give theirs up and wait (RETRACTED). Control thread only. */
#ifndef CORE_DECODE_H
#define CORE_DECODE_H

#include "base/pool.h"
#include "core/budget.h"
#include "core/node.h"
#include "core/pages.h"
#include "core/publish.h"
#include "core/view.h"
#include "core/words.h"

enum decode_state {
    DECODE_NONE = 0,
    DECODE_RESERVED,
    DECODE_RECEIVING,
    DECODE_RUNNING,
    DECODE_RETRACTED, /* holds no page; its tokens are kept, their KV is computed again */
    DECODE_LEAVING,
};

struct decode_config {
    struct node_config node;
    uint32_t entries_max;
    uint32_t page_count;
    uint32_t page_tokens;
    uint32_t token_bytes; /* KV bytes of one token, all components */
    uint32_t context;     /* tokens of prompt + answer */
    /* Admission leaves room for so many more tokens of every live request, or for the rest of its
     * answer: 0 admits whatever fits now, context and more never retracts anything. */
    uint32_t reserve_tokens;
    uint32_t vocab;
    uint32_t rows_max;        /* sequences in one step */
    uint32_t step_tokens_max; /* tokens in one step */
    uint32_t eos_count;
    uint32_t eos[EOS_MAX];
    uint32_t shared_min;       /* as a prefill worker's (core/prefill.h) */
    uint32_t changes_max;      /* of the prefix index, remembered for routers; a power of two */
    struct siphash_key secret; /* random: keys of slots, prefix index */
    uint32_t address_len;      /* the link's UCX worker address, for Accept */
    uint8_t address[WORKER_ADDRESS_MAX];
};

struct decode_entry {
    uint64_t id; /* slot; 0 = free */
    enum decode_state state;
    struct attempt_id attempt;
    uint64_t order; /* of admission: smaller is older */
    uint64_t key;
    uint32_t router; /* session index; valid while router_link is linked */
    uint32_t peer;   /* session index of P; valid while peer_link is linked */
    struct stream_id router_stream;
    struct incarnation router_incarnation;
    struct stream_id peer_stream; /* the P session it is or was bound to; 0 = never bound */
    struct link router_link;
    struct link peer_link;
    struct link run_link;   /* in run or fill */
    struct link order_link; /* in active or retracted */
    bool is_filling;        /* in fill: more than one token to compute */
    uint32_t words;         /* tokens, then page table, in one buffer */
    uint32_t token_count;   /* prompt and generated so far */
    uint32_t prompt_count;  /* as admitted (a resume's prompt holds emitted tokens) */
    uint32_t output_first;
    uint32_t max_new;
    uint32_t total_max;  /* prompt_count + max_new */
    uint32_t page_count; /* held now */
    uint32_t growth;     /* pages that admission keeps free for it */
    struct siphash128 salt;
    uint32_t cached;        /* prompt tokens found in the prefix index, at Admit or later */
    uint32_t cached_peer;   /* tokens that P said to have found in its cache */
    uint32_t computed;      /* tokens whose KV is in our pages and whole */
    uint32_t computed_most; /* before it was retracted: up to here they are computed again */
    uint32_t yielded;  /* 1 + `computed` when a step was left to another that computed the same */
    uint64_t received; /* KV bytes verified */
    uint64_t announced;
    bool is_fin_seen;
    bool is_covered;
    bool is_armed; /* own operation until EVENT_LINK_DISARMED */
    bool is_disarming;
    bool is_in_step; /* own operation until EVENT_STEP_DONE */
    enum outcome outcome;
    enum cause cause;
    uint8_t decided_in; /* state when decided */
    struct instant since;
    struct instant state_since;
    struct instant deadline;       /* the request's, or in LEAVING the bound of own operations */
    struct instant state_deadline; /* of this state */
    struct instant moved;          /* last KV progress */
    struct instant decided;
    struct sampling sampling;
    char label[LABEL_MAX];
};

struct decode_core {
    struct node node;
    struct decode_config config;
    struct pool slots;
    struct decode_entry *entries;
    struct map by_attempt;
    struct words words;
    struct pages pages;
    struct publisher publisher;
    struct budget budget;
    struct list run;       /* one token to compute */
    struct list fill;      /* a prompt, or the rest of one */
    struct list active;    /* run and fill, oldest admission first */
    struct list retracted; /* oldest admission first */
    uint64_t growth;       /* sum over the entries */
    uint64_t admissions;   /* also numbers their keys */
    int64_t resume_room;   /* of the last resume that did not fit: not tried again before there is
                              more */
    bool was_resume_idle;  /* it was tried because nothing ran */
    bool is_starved;       /* requests run, but none has the pages for its next token */
    /* the outstanding step */
    struct step_plan plan;
    bool is_stepping;
    bool is_abandoned; /* the step that runs, or ran last */
    struct plan_row *rows;
    uint32_t *row_tokens;
    uint32_t *row_pages;
    uint32_t row_pages_cap;
    uint64_t steps;
    uint64_t steps_abandoned;
    uint64_t tokens_generated;
    uint64_t tokens_prefilled;  /* prompt tokens computed here (local or the last one) */
    uint64_t tokens_recomputed; /* tokens computed again after a retraction */
    uint64_t retractions;
    uint64_t bytes_received;
    uint64_t commits;
    struct histogram transfer; /* Accept -> Commit */
    /* scratch of one step's results */
    const struct step_result **results;
    uint8_t *finish;
    /* scratch that effects point into */
    uint64_t *out_attempts;
    uint32_t *out_tokens;
    float *out_logprobs;
    uint32_t *out_top_counts;
    uint32_t *out_top_tokens; /* [rows_max * LOGPROBS_TOP_MAX] */
    float *out_top_logprobs;
    uint64_t *ids;
    uint32_t ids_used;
};

/* Bytes of memory that decode_init takes from its arena, beside the struct itself. */
uint64_t decode_bytes(const struct decode_config *config);
void decode_init(struct decode_core *core, const struct decode_config *config, void *memory);

/* One turn. Consumes exactly one event; never blocks, reads a clock, allocates or logs. */
void decode_core_step(struct decode_core *core, const struct event *event, struct instant now,
                      struct effects *out);
/* When it next wants EVENT_TICK (in the time of decode_core_step's now). */
struct instant decode_core_deadline(const struct decode_core *core);

/* The first live entry at or after *cursor (start with 0), and moves the cursor behind it; false at
 * the end. */
bool decode_view(const struct decode_core *core, uint32_t *cursor, struct entry_view *view_out);
const char *decode_state_name(uint32_t state);
/* CHECKs every invariant that a state can show; O(entries + pages): tests and the simulator. */
void decode_verify(const struct decode_core *core);

#endif
