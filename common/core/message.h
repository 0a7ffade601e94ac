/* Messages of the session protocol (protocol.md section 3), as the core sees them.
 *
 * A session is one FIFO stream between two processes; wire/ turns these structs into bytes and
 * back. Every pointer is borrowed: in an event until the step returns, in an effect until the next
 * step. Budgets travel as remaining time, never as a clock reading. */
#ifndef CORE_MESSAGE_H
#define CORE_MESSAGE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/siphash.h"
#include "core/ids.h"
#include "core/layout.h"
#include "core/sampling.h"

/* What sessions speak. A process says in its Hello the oldest and the newest version it
 * understands, and two of them use the newest that both do. */
#define PROTOCOL_OLDEST  1u
#define PROTOCOL_VERSION 2u
#define PROTOCOL_CACHED  2u /* from this one on: MESSAGE_CACHED, and cache salts are kept apart */

#define WORKER_ADDRESS_MAX   1024u /* bytes of a UCX worker address */
#define MESSAGE_IDS_MAX      16384u
#define MESSAGE_NUMERICS_MAX 32u
#define MESSAGE_BLOCKS_MAX   1024u /* in each list of a MESSAGE_CACHED */

enum message_kind {
    MESSAGE_HELLO = 1,   /* both ways, first on every session */
    MESSAGE_BEAT,        /* both ways, each second */
    MESSAGE_AUDIT,       /* both ways, each 5 s: what I hold of what you mentioned */
    MESSAGE_UNKNOWN,     /* answer to an audit: these I do not hold */
    MESSAGE_ADMIT,       /* R -> D */
    MESSAGE_ADMITTED,    /* D -> R */
    MESSAGE_REJECTED,    /* D -> R */
    MESSAGE_PREFILL,     /* R -> P */
    MESSAGE_QUEUED,      /* P -> R */
    MESSAGE_BUSY,        /* P -> R */
    MESSAGE_PREFILL_END, /* P -> R */
    MESSAGE_OPEN,        /* P -> D */
    MESSAGE_ACCEPT,      /* D -> P */
    MESSAGE_REFUSE,      /* D -> P */
    MESSAGE_FIN,         /* P -> D */
    MESSAGE_COMMIT,      /* D -> P */
    MESSAGE_TOKENS,      /* D -> R */
    MESSAGE_END,         /* D -> R */
    MESSAGE_ABORT,       /* R -> D, R -> P (by attempt) */
    MESSAGE_ABORT_SLOT,  /* P -> D (by slot) */
    MESSAGE_COMMITTED,   /* D -> R */
    MESSAGE_CACHED,      /* D -> R, P -> R: what entered and left my prefix index */
};

/* How an entry ended, in any process; first cause wins. */
enum outcome {
    OUTCOME_NONE = 0,
    OUTCOME_OK,
    OUTCOME_ABORTED, /* somebody wished it: client gone, Abort, superseded */
    OUTCOME_FAILED,  /* something broke; another attempt may succeed */
};

/* Why: the first cause of a terminal, a refusal or a session's end. */
enum cause {
    CAUSE_NONE = 0,
    CAUSE_DONE,             /* ran to its end */
    CAUSE_CLIENT_GONE,      /* the client's call ended */
    CAUSE_CLIENT_ABORT,     /* Abort by request_id or session_id */
    CAUSE_STOP,             /* a stop string was found by the router */
    CAUSE_SUPERSEDED,       /* another attempt took over */
    CAUSE_DEADLINE,         /* the request's deadline */
    CAUSE_T_ADMIT,          /* D did not answer Admit */
    CAUSE_T_OPEN,           /* no Open arrived */
    CAUSE_STALL,            /* no KV progress for T_stall */
    CAUSE_QUEUE_TIMEOUT,    /* waited too long for a worker */
    CAUSE_BUSY,             /* a fixed capacity is full */
    CAUSE_TOO_LARGE,        /* could never fit, whatever ends first */
    CAUSE_DRAINING,         /* the process is leaving */
    CAUSE_MISMATCH,         /* layout or protocol differ */
    CAUSE_UNKNOWN_SLOT,     /* named slot is not held, or not in a state that allows it */
    CAUSE_BAD_KEY,          /* slot named with a wrong key */
    CAUSE_BAD_CHUNK,        /* checksum, range or header of a chunk */
    CAUSE_SHORT,            /* Fin announced other than the slot needs */
    CAUSE_PEER_REFUSED,     /* D refused the hand-off */
    CAUSE_PEER_ABORT,       /* the other leg aborted */
    CAUSE_SEND_FAILED,      /* a KV send ended with an error */
    CAUSE_STEP_FAILED,      /* the engine failed a step or produced non-finite logits */
    CAUSE_SESSION_ENDED,    /* stream closed or reset */
    CAUSE_SESSION_SILENT,   /* nothing heard for L */
    CAUSE_SESSION_REPLACED, /* a newer Hello of the same incarnation */
    CAUSE_SESSION_ERROR,    /* the peer broke the protocol */
    CAUSE_AUDIT,            /* the peer does not hold it */
    CAUSE_RETRIES,          /* attempts or the retry budget are used up */
    CAUSE_NO_WORKER,        /* no worker serves this model */
    CAUSE_NO_MODEL,         /* the model is not known */
    CAUSE_INVALID,          /* the request is wrong; the detail says how */
    CAUSE_SHUTDOWN,         /* drain deadline passed */
    CAUSE_COUNT
};

enum finish {
    FINISH_NONE = 0,
    FINISH_STOP,   /* end-of-sequence, stop token or stop string */
    FINISH_LENGTH, /* max_tokens or context */
    FINISH_ABORT,
    FINISH_ERROR,
};

struct usage {
    uint32_t prompt_tokens;
    uint32_t cached_tokens;
    uint32_t completion_tokens;
};

struct message {
    enum message_kind kind;
    union {
        struct {
            struct incarnation incarnation;
            uint64_t session;            /* grows with every Hello of this incarnation */
            struct layout_digest layout; /* zero from routers */
            uint32_t protocol;           /* the oldest understood */
            uint32_t newest;             /* below `protocol`: the same as it */
            enum role role;
            char id[LABEL_MAX];                  /* label for people */
            char numerics[MESSAGE_NUMERICS_MAX]; /* "" from routers */
            bool is_draining;
        } hello;
        struct {
            uint64_t progress;       /* grows whenever the sender's own work moves */
            uint32_t entries;        /* live entries at the sender */
            uint32_t pages_free;     /* free + evictable pages (0 from routers) */
            uint32_t backlog_ms;     /* P: queued prefill work */
            uint32_t backlog_tokens; /* P: the same in tokens to be computed */
            bool is_draining;
        } beat;
        struct {
            uint32_t count;
            const uint64_t *ids; /* attempts on router sessions, slots on P-D sessions */
        } audit;                 /* and MESSAGE_UNKNOWN */
        struct {
            struct attempt_id attempt;
            uint32_t token_count;
            const uint32_t *tokens; /* prompt, on a resume followed by the tokens already emitted */
            uint32_t output_first;  /* tokens of the original prompt */
            uint32_t max_new;       /* tokens still to be generated, >= 1 */
            uint32_t deadline_ms;   /* remaining */
            struct sampling sampling;
            uint32_t local_max; /* D prefills it itself if at most so many tokens are uncached */
            struct siphash128 salt; /* only requests of one salt share cached pages; 0 = none */
            char label[LABEL_MAX];  /* the client's request_id, for logs and /debug/entries only */
        } admit;
        struct {
            struct attempt_id attempt;
            struct slot_id slot;
            uint64_t key;
            uint32_t cached; /* tokens whose KV D has already */
            bool is_local;
        } admitted;
        struct {
            struct attempt_id attempt;
            enum cause cause;
            uint32_t retry_after_ms;
        } rejected; /* and MESSAGE_BUSY */
        struct {
            struct attempt_id attempt;
            uint32_t token_count;
            const uint32_t *tokens; /* whole prompt; P computes KV of [0, n-1), sends [from, n-1) */
            uint32_t from;
            struct slot_id slot;
            uint64_t key;
            struct incarnation decode;
            char address[ADDRESS_MAX]; /* D's gRPC address */
            uint32_t deadline_ms;
            char label[LABEL_MAX];
            struct siphash128 salt; /* as in admit */
        } prefill;
        struct {
            struct attempt_id attempt;
            uint32_t backlog_ms;
        } queued;
        struct {
            struct attempt_id attempt;
            enum outcome outcome;
            enum cause cause;
            uint64_t bytes;      /* KV bytes handed to the link for this attempt */
            uint64_t exposed_us; /* OK: KV time that computing did not hide; 0 = not told */
            uint32_t cached;     /* prompt tokens that P found in its own cache */
        } prefill_end;
        struct {
            struct slot_id slot;
            uint64_t key;
            uint32_t from; /* token range [from, end) that P will send */
            uint32_t end;
            uint64_t bytes;
        } open;
        struct {
            struct slot_id slot;
            uint32_t address_len;
            const uint8_t *address; /* D's UCX worker address */
        } accept;
        struct {
            struct slot_id slot;
            enum cause cause;
        } refuse; /* and MESSAGE_ABORT_SLOT */
        struct {
            struct slot_id slot;
            uint64_t bytes;
            uint32_t cached; /* prompt tokens that P found in its own cache */
        } fin;
        struct {
            struct slot_id slot;
        } commit;
        struct {
            uint32_t count; /* attempts and tokens in parallel, one pair per token */
            const uint64_t *attempts;
            const uint32_t *tokens;
            /* NULL and 0 unless one of these requests wants logprobs */
            const float *logprobs;      /* [count] */
            const uint32_t *top_counts; /* [count]: 0 = not wanted, else 1 + its alternatives */
            uint32_t top_count;         /* alternatives of all tokens, one after the other */
            const uint32_t *top_tokens; /* [top_count] */
            const float *top_logprobs;  /* [top_count] */
        } tokens;
        struct {
            struct attempt_id attempt;
            enum outcome outcome;
            enum cause cause;
            enum finish finish;
            struct usage usage;
            uint64_t kv_bytes; /* that came from P, verified */
        } end;
        struct {
            struct attempt_id attempt;
            enum cause cause;
            bool is_unless_committed;
        } abort;
        struct {
            struct attempt_id attempt;
        } committed;
        struct {
            bool is_reset; /* forget everything I said before; then the lists */
            uint32_t removed_count;
            uint32_t stored_count;
            const uint64_t *removed; /* blocks (core/blocks.h) that left, before those that came */
            const uint64_t *stored;
        } cached;
    } u;
};

const char *message_name(enum message_kind kind);
const char *cause_name(enum cause cause);
const char *outcome_name(enum outcome outcome);
const char *finish_name(enum finish finish); /* "stop" | "length" | "abort" | "error" | "" */

#endif
