/* The prefill worker's core: queues prompts, computes their KV in bounded steps, streams it out by
 * layer.
 *
 *   QUEUED -> COMPUTING -> SENT -> gone        LEAVING while in a step or own sends are outstanding
 *
 * P computes the KV of tokens [0, n-1) and sends [from, n-1); it learns of delivery only by D's
 * Commit (I13). Pages are taken when computing starts, which is after D has reserved and accepted:
 * nobody waits for a peer while holding them (I9). A send's source pages stay referenced until that
 * send itself has ended. */
#ifndef CORE_PREFILL_H
#define CORE_PREFILL_H

#include "base/pool.h"
#include "core/budget.h"
#include "core/node.h"
#include "core/pages.h"
#include "core/publish.h"
#include "core/view.h"
#include "core/words.h"

enum prefill_state {
    PREFILL_NONE = 0,
    PREFILL_QUEUED,
    PREFILL_COMPUTING,
    PREFILL_SENT,
    PREFILL_LEAVING,
};

struct prefill_config {
    struct node_config node;
    const struct kv_layout *layout; /* borrowed for the core's life */
    uint32_t entries_max;
    uint32_t page_count;
    uint32_t context;
    uint32_t vocab;
    uint32_t rows_max;
    uint32_t step_tokens_max;
    uint32_t sends_high;  /* no new step while more sends are outstanding: back-pressure */
    uint32_t batch_bytes; /* layers are sent together up to this size (64 KiB) */
    /* Prompt tokens that one request leaves to another which computes the same ones in the very
     * step: fewer are not worth waiting for the next. At least 1. */
    uint32_t shared_min;
    uint32_t changes_max; /* of the prefix index, remembered for routers; a power of two */
    struct siphash_key secret;
};

struct prefill_entry {
    uint64_t id; /* own id, and the op of its sends; 0 = free */
    enum prefill_state state;
    struct attempt_id attempt;
    struct slot_id slot; /* D's */
    uint64_t key;
    uint32_t router; /* session index; valid while router_link is linked */
    uint32_t peer;   /* session index of D */
    struct stream_id router_stream;
    struct incarnation router_incarnation;
    struct stream_id peer_stream;
    struct link router_link;
    struct link peer_link;
    struct link queue_link; /* in queue or active */
    uint32_t words;         /* tokens [0, end), then page table */
    uint32_t end;           /* n - 1 */
    uint32_t from;
    struct siphash128 salt;
    uint32_t cached; /* tokens found in our own index, when computing began or later */
    uint32_t computed;
    uint32_t yielded;    /* 1 + `computed` when a step was left to another that computed the same */
    uint32_t page_count; /* 0 until computing starts */
    uint32_t component_next; /* of the running step: first component not handed to the link */
    uint32_t sends;          /* own operations until EVENT_LINK_SENT */
    bool is_in_step;         /* own operation until EVENT_STEP_DONE */
    bool is_open_sent;
    bool is_accepted;
    enum outcome outcome;
    enum cause cause;
    uint8_t decided_in;
    struct instant since;
    struct instant state_since;
    struct instant deadline;
    struct instant moved; /* when a send last ended, or the first began */
    struct instant decided;
    struct instant computed_at; /* SENT: when computing had ended */
    struct span held_before;    /* core's `held` when computing started */
    struct span exposed;        /* see the core's; known with Commit */
    uint64_t bytes_handed;
    char label[LABEL_MAX];
};

struct prefill_core {
    struct node node;
    struct prefill_config config;
    struct pool ids;
    struct prefill_entry *entries;
    struct map by_attempt; /* (router stream, attempt) */
    struct map by_slot;    /* (peer stream, slot) */
    struct words words;
    struct pages pages;
    struct publisher publisher;
    struct budget budget;
    struct list queue;  /* QUEUED, not yet accepted by D */
    struct list ready;  /* QUEUED and accepted, first come first served */
    struct list active; /* COMPUTING */
    uint32_t opens_pending;
    bool is_opening_due; /* a session to D came up: Opens may wait for it */
    uint32_t sends;      /* all outstanding */
    uint64_t backlog_tokens;
    struct step_plan plan;
    bool is_stepping;
    bool is_abandoned; /* the step that runs, or ran last */
    struct plan_row *rows;
    uint32_t *row_tokens;
    uint32_t *row_pages;
    uint32_t row_pages_cap;
    uint64_t steps;
    uint64_t steps_abandoned;
    uint64_t tokens_computed;
    uint64_t tokens_cached;
    uint64_t bytes_sent;
    struct instant held_since; /* sends keep the next step back since then; 0 = they do not */
    struct span held;          /* all such time so far */
    /* KV time of a request that computing did not hide: what steps were held back by outstanding
     * sends while it computed, and from the engine's end of its last step to D's Commit. All on
     * this one clock, so it is never less than the truth and at most Commit's way here more. */
    struct histogram exposed;
    uint64_t *out_ids;
    uint32_t out_ids_used;
    uint8_t address[WORKER_ADDRESS_MAX];
};

uint64_t prefill_bytes(const struct prefill_config *config);
void prefill_init(struct prefill_core *core, const struct prefill_config *config, void *memory);
/* One turn. Consumes exactly one event; never blocks, reads a clock, allocates or logs. */
void prefill_core_step(struct prefill_core *core, const struct event *event, struct instant now,
                       struct effects *out);
struct instant prefill_core_deadline(const struct prefill_core *core);
bool prefill_view(const struct prefill_core *core, uint32_t *cursor, struct entry_view *view_out);
const char *prefill_state_name(uint32_t state);
void prefill_verify(const struct prefill_core *core);

#endif
