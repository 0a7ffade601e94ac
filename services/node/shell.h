/* What a Baton program is besides its core: identity, control thread, sessions, discovery, admin.
 *
 * main.c of a program: shell_create, load what it needs, shell_serve and methods (workers),
 * shell_start with the core, shell_register, shell_wait, shell_stop, its own ends, shell_close.
 * The control thread is the core's only caller: it takes mail in order, makes one step of each
 * event, carries out the effects in order, and only then gives the event's memory back. Sessions,
 * notes and exit are carried out here; every other effect goes to the program's `effect`. Nothing
 * here decides anything about a request. Functions are for the main thread unless they say
 * otherwise; whatever goes wrong at start is logged in one sentence by the function that fails. */
#ifndef NODE_SHELL_H
#define NODE_SHELL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "base/time.h"
#include "core/effect.h"
#include "core/event.h"
#include "core/node.h"
#include "core/view.h"
#include "runtime/admin.h"
#include "runtime/mail.h"
#include "services/node/settings.h"
#include "wire/memory.h"
#include "wire/registry.h"

struct metrics;
struct rpc;
struct rpc_health;
struct rpc_server;
struct shell;

/* ---- mail for the core ------------------------------------------------------------------- */

/* One event on its way to the control thread. Take, fill in `event` (its pointers may lead into
 * `message`, the arena, the payload, or anything that lives until `after`), post. */
struct shell_mail {
    struct mail mail;   /* the shell's */
    struct event event; /* kind 0: no step, only `after` */
    struct message message;
    struct wire_arena arena; /* empty when taken; kept for the next user */
    /* Called once, if not NULL: on the control thread after the event's effects were carried out
     * (was_stepped), or, if the shell has stopped, on the posting or the main thread. */
    void (*after)(struct shell_mail *mail, bool was_stepped);
    void *after_ctx;
    void *payload; /* of shell_mail_payload */
    size_t payload_cap;
    void *stream; /* the shell's */
    size_t bytes; /* the shell's */
};

/* Zeroed but for `kind`. Aborts without memory. Any thread. */
struct shell_mail *shell_mail_take(struct shell *shell, enum event_kind kind);
/* `len` bytes, 16-aligned, that live as long as the mail. Only once per mail. */
void *shell_mail_payload(struct shell_mail *mail, size_t len);
/* Hands it over. Mail from one thread keeps its order. Any thread, never blocks. */
void shell_post(struct shell *shell, struct shell_mail *mail);

/* Runs fn(ctx) on the control thread and waits for it: true, and ctx is the caller's again. False
 * if it did not happen by the deadline: then ctx is the shell's, which calls done(ctx) once, as
 * soon as the control thread does not use it any more (NULL: nothing to give back). Not on the
 * control, rpc, link or step thread. */
bool shell_query(struct shell *shell, void (*fn)(void *ctx), void (*done)(void *ctx), void *ctx,
                 struct instant deadline);
/* True on the control thread. */
bool shell_on_control(const struct shell *shell);

/* ---- the core ---------------------------------------------------------------------------- */

/* What nobody accounts for; all 0 unless there is a bug. */
struct shell_balance {
    int64_t entries; /* created - live - ended; the shell's */
    int64_t pages;   /* neither free, cached nor owned (or counted twice: negative) */
    int64_t words;   /* token buffers that no entry holds */
};

/* A core behind the functions that all cores have. `core` and `node` (inside it) must live until
 * shell_stop. All functions run on the control thread. */
struct shell_core {
    void *core;
    struct node *node;
    void (*step)(void *core, const struct event *event, struct instant now, struct effects *out);
    struct instant (*deadline)(const void *core);
    bool (*view)(const void *core, uint32_t *cursor, struct entry_view *view_out);
    const char *(*state_name)(uint32_t state); /* states are 1 .. state_count */
    uint32_t state_count;
    void (*verify)(const void *core);

    void *ctx; /* of the functions below; NULL functions are skipped */
    /* Every effect but EFFECT_STREAM_*, EFFECT_NOTE and EFFECT_EXIT. Must not block. */
    void (*effect)(void *ctx, const struct effect *effect);
    /* Before /metrics is written: sets the program's own metrics. */
    void (*refresh)(void *ctx);
    /* After each tick of the core, with its observed time. */
    void (*tick)(void *ctx, struct instant now);
    /* Appends one line for each further reason not to be ready. */
    void (*reasons)(void *ctx, struct buffer *lines);
    /* The same for what should move and does not. */
    void (*progress)(void *ctx, struct buffer *lines);
    /* Appends members to the object of /debug/entries, each as `,"name":value`. */
    void (*describe)(void *ctx, struct buffer *json);
    /* Fills in what is this program's to count. */
    void (*balance)(void *ctx, struct shell_balance *balance);
    /* --test-hooks: the next thing that is freed is forgotten instead, once. */
    void (*leak)(void *ctx);
};

/* ---- life -------------------------------------------------------------------------------- */

struct shell_config {
    enum role role;
    const char *program;                   /* "decode-worker"; static */
    const char *version;                   /* static */
    const struct shell_settings *settings; /* borrowed for the shell's life */
    const char *listen_host;               /* of the port that others connect to: for advertise */
    const struct admin_route *routes;      /* further ones; borrowed */
    uint32_t route_count;
    uint32_t calls_max; /* clients', sessions' and etcd's calls together; 0 = 16384 */
};

/* After config_start; signals_block must have come first. Starts log, watchdog, rpc, admin port
 * (not ready: "starting") and draws the incarnation. STATUS_RANGE: the settings contradict each
 * other. */
MUST_USE enum status shell_create(const struct shell_config *config, struct shell **out);
/* What main returns when something failed at start: 2 for settings, else 1. */
static inline int shell_exit_code(enum status status) {
    return status == STATUS_RANGE ? 2 : 1;
}

/* What /readyz says until shell_start; static text ("loading the model"). */
void shell_phase(struct shell *shell, const char *phase);

struct incarnation shell_incarnation(const struct shell *shell);
const char *shell_id(const struct shell *shell);
const char *shell_advertise(const struct shell *shell); /* host that others are told */
struct rpc *shell_rpc(struct shell *shell);
struct registry *shell_registry(struct shell *shell);
/* Has the constant labels role and worker (the id). Add metrics before shell_start. */
struct metrics *shell_metrics(struct shell *shell);
/* A core histogram as a Prometheus one, in seconds. source: control thread's memory, read there;
 * texts are static. Before shell_start. */
void shell_histogram(struct shell *shell, const char *name, const char *help,
                     const struct histogram *source);
/* Fills in all but layout, numerics and sessions_max. */
void shell_node_config(const struct shell *shell, struct node_config *config);
/* Formats "host:port" of ours as others are told; v6 hosts in brackets. */
void shell_address(const struct shell *shell, uint16_t port, char out[ADDRESS_MAX]);

/* Workers: makes the server with the Sessions service and health. Add methods, then shell_listen.
 */
MUST_USE enum status shell_serve(struct shell *shell, const char *flag,
                                 const struct config_address *listen, struct rpc_server **out);
/* rpc_server_start with the sentence; names the flag. Also for servers of the program's own. */
MUST_USE enum status shell_listen(struct shell *shell, const char *flag,
                                  const struct config_address *listen, struct rpc_server *server);
/* Sets "" and `service` (NULL: only "") of this health from now on whenever readiness changes. */
void shell_health(struct shell *shell, struct rpc_health *health, const char *service);

/* Starts the control thread. Sessions that arrive before it wait in the mailbox. */
MUST_USE enum status shell_start(struct shell *shell, const struct shell_core *core);

/* Fills in what the shell knows: incarnation, role, id, admin, pid, start, version. */
void shell_worker_record(const struct shell *shell, struct worker_record *record);
void shell_router_record(const struct shell *shell, struct router_record *record);
/* Publishes; on a drain it is published again with is_draining. */
MUST_USE enum status shell_register_worker(struct shell *shell, const struct worker_record *record);
MUST_USE enum status shell_register_router(struct shell *shell, const struct router_record *record);

/* The worker's record as last published. False before that. Any thread. */
bool shell_published(struct shell *shell, struct worker_record *record);

/* Stops admission; what is left after `grace` fails; then shell_wait returns. Any thread. */
void shell_drain(struct shell *shell, struct span grace);
/* Waits for a signal (the first drains, the second leaves the process at once) until the core is
 * drained; then call shell_stop. STATUS_TIMEOUT: the core missed its own deadline for that. */
MUST_USE enum status shell_wait(struct shell *shell);

/* Deregisters and ends the control thread: afterwards no function of shell_core runs, and mail is
 * given back unread. STATUS_TIMEOUT: something hangs; leave by _exit. */
MUST_USE enum status shell_stop(struct shell *shell);
/* Ends rpc and admin, frees all. After the program has ended what posts mail. Handlers of the
 * program's own methods may run until it returns. STATUS_TIMEOUT as above. Accepts a shell that
 * was never started. */
MUST_USE enum status shell_close(struct shell *shell);

#endif
