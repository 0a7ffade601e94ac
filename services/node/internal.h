/* Private to services/node: the shell's parts and who owns what.
 *
 * sessions.c: streams; the table is the control thread's, the list of all streams has a lock.
 * report.c: admin handlers (admin thread), snapshots taken by queries on the control thread.
 * shell.c: life, mail, the control loop, discovery. */
#ifndef NODE_INTERNAL_H
#define NODE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "registry/registry.h"
#include "runtime/metrics.h"
#include "runtime/thread.h"
#include "services/node/shell.h"

#define SHELL_HISTOGRAMS_MAX 24u
#define SHELL_HEALTH_MAX     8u
#define STREAM_BUCKETS       1024u

/* Why a process is not ready; each is a series of baton_ready. */
enum shell_reason {
    SHELL_REASON_START,
    SHELL_REASON_ETCD,
    SHELL_REASON_DRAINING,
    SHELL_REASON_LEDGER,
    SHELL_REASON_OVERRUN,
    SHELL_REASON_AUDIT,
    SHELL_REASON_PROGRESS, /* what should move does not */
    SHELL_REASON_BEATS,    /* a thread is silent for half of what the watchdog tolerates */
    SHELL_REASON_CONTROL,  /* the control thread did not answer */
    SHELL_REASON_ROLE,
    SHELL_REASON_COUNT
};

struct stream {
    struct shell *shell;
    struct stream_id id;
    struct stream *next_in_bucket; /* control thread */
    struct stream *prev;           /* list of all, under streams_lock */
    struct stream *next;
    uint64_t call;               /* struct rpc_call_id */
    struct rpc_channel *channel; /* ours only; control thread */
    _Atomic size_t pending;      /* bytes received that the core has not seen yet */
    bool is_ours;
    bool is_over_limit;        /* rpc thread */
    char address[ADDRESS_MAX]; /* whom we called */
};

struct shell_histogram_shown {
    const char *name;
    const char *help;
    const struct histogram *source;
    struct histogram shown; /* under report_lock */
};

struct shell_metrics_set {
    struct metric *entries;
    struct metric *oldest;
    struct metric *overrun;
    struct metric *created;
    struct metric *terminals;
    struct metric *causes;
    struct metric *imbalance;
    struct metric *operations;
    struct metric *progress_age;
    struct metric *reaped;
    struct metric *sessions;
    struct metric *silence;
    struct metric *session_ends;
    struct metric *sessions_refused;
    struct metric *audit;
    struct metric *stale_mail;
    struct metric *stale_events;
    struct metric *pauses;
    struct metric *log_dropped;
    struct metric *mailbox;
    struct metric *rpc_calls;
    struct metric *rpc_ended;
    struct metric *registrations;
    struct metric *leases_lost;
    struct metric *ready;
    struct metric *draining;
};

struct shell {
    struct shell_config config;
    struct shell_core core;
    struct incarnation incarnation;
    char id[LABEL_MAX];
    char advertise[ADDRESS_MAX];
    char admin_text[ADDRESS_MAX];
    int64_t started_unix_ms;
    struct rpc *rpc;
    struct registry *registry;
    struct admin *admin;
    struct metrics *metrics;
    struct admin_route *routes;
    struct rpc_server *server; /* of Sessions; workers only */
    struct rpc_health *own_health;

    struct {
        struct rpc_health *health;
        char service[128];
    } healths[SHELL_HEALTH_MAX]; /* main thread */
    uint32_t health_count;
    bool is_health_serving;
    bool is_health_known;

    /* mail */
    struct mailbox box;
    pthread_mutex_t spare_lock;
    struct shell_mail *spare; /* through mail.next */
    uint32_t spare_count;

    /* control thread */
    struct thread control;
    struct effects *effects;
    struct wire_buffer out; /* encoded message to be sent */
    struct stream *buckets[STREAM_BUCKETS];
    _Atomic bool is_control_started;
    _Atomic bool is_stopping;
    _Atomic bool is_drained; /* EFFECT_EXIT was seen */
    _Atomic bool is_draining;
    _Atomic bool is_started; /* the core is there */
    _Atomic int64_t drain_grace_ns;
    _Atomic(const char *) phase;

    /* streams */
    pthread_mutex_t streams_lock;
    struct stream *streams;
    uint32_t accepted;
    uint32_t accepted_max;
    uint64_t next_stream; /* rpc thread; odd */

    /* discovery, under record_lock */
    pthread_mutex_t record_lock;
    bool has_worker;
    bool has_router;
    struct worker_record worker;
    struct router_record router;

    /* reports */
    pthread_mutex_t report_lock;
    struct shell_histogram_shown histograms[SHELL_HISTOGRAMS_MAX];
    uint32_t histogram_count;
    struct shell_metrics_set m;
    uint64_t audit_seen; /* control thread, as the next two */
    struct instant audit_seen_at;
    struct shell_balance balance_seen; /* as last logged */
};

/* ---- shell.c */
void shell_mail_done(struct shell *shell, struct shell_mail *mail, bool was_stepped);

/* ---- sessions.c: control thread unless noted */
void sessions_init(struct shell *shell);
/* After rpc_shutdown: frees what is left. */
void sessions_fini(struct shell *shell);
/* Before the step of this event: makes an accepted stream known. */
void sessions_before(struct shell *shell, struct shell_mail *mail);
/* After its effects: forgets an ended stream. */
void sessions_after(struct shell *shell, struct shell_mail *mail);
void sessions_open(struct shell *shell, const struct effect *effect);
void sessions_send(struct shell *shell, const struct effect *effect);
void sessions_close(struct shell *shell, const struct effect *effect);
extern const struct rpc_handlers sessions_handlers;

/* ---- advertise.c */
/* The first address that is up and not loopback, IPv4; false if there is none. */
bool advertise_own(char *out, size_t cap);
/* What others are told. wanted: --advertise or NULL. */
void advertise_choose(const char *wanted, const char *listen_host, char *out, size_t cap);

/* ---- report.c */
extern const struct admin_route report_routes[];
extern const uint32_t report_route_count;
extern const struct admin_route report_test_routes[]; /* only with --test-hooks */
extern const uint32_t report_test_route_count;
/* Control thread. */
struct shell_balance report_balance(const struct shell *shell);
static inline bool report_is_balanced(const struct shell_balance *balance) {
    return balance->entries == 0 && balance->pages == 0 && balance->words == 0;
}
void report_add_metrics(struct shell *shell);       /* in shell_create */
void report_add_state_metrics(struct shell *shell); /* in shell_start */
/* Fills `lines`, one reason per line, and which they are. True if ready. Main or admin thread. */
bool report_ready(struct shell *shell, struct buffer *lines, bool codes[SHELL_REASON_COUNT]);

#endif
