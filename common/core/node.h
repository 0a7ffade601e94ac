/* What every Baton process has: an identity, observed time, sessions, a ledger of entries.
 *
 * A session is one stream to one peer; its end is the end of the entries it carries, judged by each
 * side alone (I16). The node keeps the sessions; the role (decode, prefill, router) keeps entries
 * and hangs them on session lists, and empties the lists of ended sessions in bounded turns.
 * Nothing here knows what an entry is. Control thread only. */
#ifndef CORE_NODE_H
#define CORE_NODE_H

#include "base/arena.h"
#include "base/list.h"
#include "base/map.h"
#include "base/time.h"
#include "core/effect.h"
#include "core/event.h"
#include "core/view.h"

/* Each a flag; the relations between them are checked at start (timers_check). */
struct core_timers {
    struct span beat;            /* 1 s */
    struct span lease;           /* L: 6 s of silence end a session */
    struct span handshake;       /* 3 s from stream to Hello */
    struct span audit;           /* 5 s */
    struct span admit;           /* T_admit: 2 s */
    struct span open;            /* T_open: 3 s */
    struct span stall;           /* T_stall: 5 s */
    struct span leave;           /* longest own operation: a step or a send; 35 s */
    struct span request;         /* 300 s when the client gives no deadline */
    struct span place;           /* 5 s without any worker for a model, then UNAVAILABLE */
    struct span busy;            /* 50 ms before a full worker is asked again */
    struct span backlog;         /* P: 2 s of queued work, then Busy */
    struct span suspect;         /* a pair that could not talk: 10 s */
    struct span forget;          /* an unlisted worker without a session: 30 s */
    struct span reconnect_first; /* 100 ms */
    struct span reconnect_max;   /* 2 s */
    struct span step;            /* planned length of one engine step: 100 ms */
    struct span hop;             /* taken off a budget that is passed on: 100 ms */
};

struct core_timers timers_default(void);
/* NULL if the relations hold, else a sentence that names the two timers (static). */
const char *timers_check(const struct core_timers *timers);

#define TICK_MS           50
#define OBSERVED_STEP_MS  200 /* an advance of the clock counts at most this much per turn */
#define TERMINALS_KEPT    4096u
#define HISTOGRAM_BUCKETS 12u
#define STATES_MAX        10u

enum session_phase {
    SESSION_FREE = 0,
    SESSION_GREETING, /* stream is there or opening; the peer's Hello is not */
    SESSION_LIVE,
    SESSION_ENDED, /* over for us; entries still to be ended, or the stream's last event to come */
};

struct session {
    enum session_phase phase;
    struct stream_id stream;
    enum role role; /* of the peer; known from the start for sessions we open */
    bool is_ours;   /* we opened it */
    bool is_stream_ended;
    bool is_hello_sent;
    bool is_other_life; /* the address answered with another incarnation than the one expected */
    bool is_link_used;  /* P: the link has, or had, an endpoint for it */
    bool is_link_closing;
    bool is_link_closed;
    bool is_peer_draining;
    enum cause cause;               /* why it ended */
    struct incarnation incarnation; /* of the peer; expected one until its Hello */
    uint64_t number;                /* the peer's Hello.session */
    uint32_t protocol;              /* the newest that both understand; 0 until its Hello */
    struct layout_digest layout;
    uint64_t link_peer; /* P: id towards the link; 0 = none yet */
    uint64_t peer_progress;
    uint32_t peer_entries;
    uint32_t peer_pages_free;
    uint32_t peer_backlog_ms;
    uint32_t peer_backlog_tokens;
    struct instant since;
    struct instant heard;
    struct instant beat_due;
    struct instant audit_due;
    struct list entries; /* of the role's entries, through the role's own links */
    char id[LABEL_MAX];
    char numerics[MESSAGE_NUMERICS_MAX];
};

struct histogram {
    uint64_t bucket[HISTOGRAM_BUCKETS + 1]; /* last: above all bounds */
    uint64_t sum_us;
};
/* Upper bounds in microseconds, shared by all core histograms. */
extern const uint32_t histogram_bounds_us[HISTOGRAM_BUCKETS];
void histogram_add(struct histogram *histogram, struct span value);

/* One remembered terminal. */
struct terminal {
    uint64_t id;
    uint64_t attempt;
    uint64_t router; /* incarnation that minted `attempt`; 0 = this process */
    struct instant at;
    struct span age;
    struct span freeing; /* outcome decided -> memory back; ledger_end fills it in */
    struct span exposed; /* P, committed: KV time that computing did not hide; else 0 */
    uint8_t state;       /* it was in when its outcome was decided */
    uint8_t outcome;
    uint8_t cause;
    char label[LABEL_MAX];
};

struct ledger {
    uint64_t created;
    uint64_t terminals[4];                 /* by enum outcome */
    uint64_t terminal_causes[CAUSE_COUNT]; /* by enum cause */
    uint32_t live;
    uint32_t in_state[STATES_MAX];
    uint64_t reaped[STATES_MAX];     /* ended by a deadline, by the state they were in */
    struct histogram abort_to_freed; /* decided -> memory back, not for OUTCOME_OK */
    struct histogram lifetime;
};

struct node_stats {
    uint64_t stale_mail;     /* for sessions that have ended */
    uint64_t stale_events;   /* for entries or operations that no longer exist */
    uint64_t audit_mismatch; /* must be 0 */
    uint64_t session_ends[CAUSE_COUNT];
    uint64_t sessions_refused;
    uint64_t pauses;   /* clock advances above OBSERVED_STEP_MS */
    uint64_t progress; /* grows whenever own work moves */
    struct instant progress_at;
    int64_t overrun_ns; /* worst passed deadline of a live entry now; must be 0 */
};

struct node_config {
    enum role role;
    struct incarnation incarnation;
    char id[LABEL_MAX];
    char numerics[MESSAGE_NUMERICS_MAX];
    struct layout_digest layout;
    uint32_t sessions_max;
    struct core_timers timers;
};

struct node {
    struct node_config config;
    struct instant now;  /* observed */
    struct instant real; /* what the shell said last */
    bool is_started;
    bool is_draining;
    bool is_exit_sent;
    struct instant drain_deadline;
    struct session *sessions;
    struct map by_stream;
    uint32_t sessions_live;
    uint32_t sessions_ended;  /* SESSION_ENDED now: work for the sweep */
    uint32_t beat_pages_free; /* the role keeps these three for its beats */
    uint32_t beat_backlog_ms;
    uint32_t beat_backlog_tokens;
    uint64_t next_stream;
    uint64_t next_session;
    uint64_t next_link_peer;
    struct ledger ledger;
    struct node_stats stats;
    struct terminal *terminals; /* ring of TERMINALS_KEPT */
    uint64_t terminals_total;
    struct message scratch; /* where sends to sessions that are not live go */
};

void node_init(struct node *node, const struct node_config *config, struct arena *arena);
/* First call of every step: moves observed time. */
void node_observe(struct node *node, struct instant now);

/* Handles EVENT_STREAM_*, EVENT_DRAIN. Returns the live session and leaves event->u.mail.message
 * for the role if the event is mail that the role must see (also HELLO, after the session became
 * live, and BEAT); else NULL. */
struct session *node_event(struct node *node, const struct event *event, struct effects *out);
/* Silences, handshakes, beats. Call on EVENT_TICK. */
void node_tick(struct node *node, struct effects *out);

/* EVENT_DRAIN: no admission from now on; what is left at the deadline is the role's to fail. Peers
 * hear of it at once. */
void node_drain(struct node *node, struct span grace, struct effects *out);
/* Whether a draining node's grace is over. */
static inline bool node_is_grace_over(const struct node *node) {
    return node->is_draining && instant_reached(node->now, node->drain_deadline);
}
/* Last in every step: a drained node without entries says so once, and that the process may end. */
void node_exit_when_idle(struct node *node, struct effects *out);

/* Opens a session to a peer of a known role and incarnation. NULL when the table is full. */
struct session *node_open(struct node *node, enum role role, struct incarnation incarnation,
                          const char *address, struct effects *out);
/* The session with this peer that is live or greeting; NULL if there is none. */
struct session *node_find(struct node *node, enum role role, struct incarnation incarnation);
/* A message to fill in, sent to the peer if the session is live, else dropped. Never NULL. */
struct message *node_send(struct node *node, struct session *session, enum message_kind kind,
                          struct effects *out);
/* Ends a session for us, once; its entries are the role's to end (node.sessions_ended > 0 until
 * freed). */
void node_end(struct node *node, struct session *session, enum cause cause, struct effects *out);
/* Frees an ended session whose list is empty and whose stream and link endpoint are over. True if
 * freed. */
bool node_release(struct node *node, struct session *session);

static inline uint32_t node_session_index(const struct node *node, const struct session *session) {
    return (uint32_t)(session - node->sessions);
}
/* Own work moved: what readiness and beats look at. */
static inline void node_progressed(struct node *node) {
    node->stats.progress++;
    node->stats.progress_at = node->now;
}
/* True if this session's audit is due and its ids fit beside the `used` ones of this turn; the next
 * is then set. A session with more entries than fit at all lists the first of them. */
static inline bool node_audit_is_due(struct node *node, struct session *session, uint32_t used) {
    if (session->phase != SESSION_LIVE || !instant_reached(node->now, session->audit_due) ||
        (used > 0 && session->entries.count > MESSAGE_IDS_MAX - used)) {
        return false;
    }
    session->audit_due = instant_add(node->now, node->config.timers.audit);
    return true;
}
static inline bool session_is_live(const struct session *session) {
    return session->phase == SESSION_LIVE;
}

/* Ledger. States are the role's enum; 0 is never an entry's state. */
void ledger_create(struct node *node, uint32_t state);
void ledger_move(struct node *node, uint32_t from, uint32_t to);
void ledger_end(struct node *node, uint32_t state, const struct terminal *terminal,
                struct span decided_to_freed);
/* created - live - sum of terminals: must be 0. */
int64_t ledger_imbalance(const struct ledger *ledger);

/* Fills one peer's side (0 or 1) of a view from its session. label: how people know the peer. */
void node_view_peer(const struct node *node, struct entry_view *view, uint32_t which,
                    uint32_t session, const char *label);

void node_note(struct effects *out, enum note_kind kind, enum role role, enum cause cause,
               uint64_t id, uint64_t number, const char *label);

#endif
