/* Private to services/router: what the parts share, and which thread owns what.
 *
 *   client.c   one Generate or Tokenize call: its inbox, its text, its one end
 *   text.c     the text threads, which turn bytes into tokens and tokens into bytes
 *   models.c   which tokenizers there are; fetch.c gets them from workers
 *   calls.c    Abort and ListModels; peers.c knows the other routers, for Abort
 *   canary.c   the router's own requests, which show that requests complete
 *   report.c   metrics, /debug/workers, reasons not to be ready
 *   service.c  the public server, discovery, effects, life
 *
 * Threads: rpc (calls arrive and close), control (the core's effects), text (all work on texts; a
 * call stays on one). A client is shared by all three through its inbox only. Nothing here decides
 * anything about a request. */
#ifndef ROUTER_ROUTER_H
#define ROUTER_ROUTER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/router.h"
#include "rpc/rpc.h"
#include "runtime/mail.h"
#include "runtime/thread.h"
#include "services/node/shell.h"
#include "text/tokenizer.h"
#include "wire/public.h"

#define TEXT_THREADS_MAX      64u
#define CLIENT_BUCKETS        16384u
#define CLIENT_INLINE_MAX     (64u * 1024u) /* requests up to so many bytes are decoded at accept */
#define TOKENIZER_WAIT_MS     5000
#define INFERENCE_SERVICE     "baton.v1.Inference"
#define INFERENCE_ABORT       "/baton.v1.Inference/Abort"
#define FORWARDED_HEADER      "baton-forwarded"
#define ROUTER_REPLY_MAX      (1024u * 1024u)
#define ROUTER_SHUTTING_DOWN  "this router is shutting down: use another one"
#define ROUTER_GRPC_LOOKAHEAD (1024u * 1024u)

struct etcd;
struct metric;
struct rpc_health;
struct rpc_reflection;
struct router;
struct text_thread;

struct router_settings {
    struct shell_settings shell;
    struct config_address grpc;
    uint32_t requests_max;
    uint32_t workers_max;
    uint32_t words_max;
    uint32_t disaggregate_above;
    uint32_t blocks_max;
    uint32_t text_threads;
    struct span client_stall;
    struct span canary; /* 0: none */
};

/* ---- clients ----------------------------------------------------------------------------- */

struct client;

/* The calls that are alive, by rpc call id. */
struct clients {
    pthread_mutex_t lock; /* guards buckets and count */
    struct client *buckets[CLIENT_BUCKETS];
    uint32_t count;
};

void clients_init(struct clients *clients);
/* After all threads have ended: frees what is left. */
void clients_fini(struct clients *clients);
extern const struct rpc_handlers generate_handlers; /* ctx: the router, then the client */
extern const struct rpc_handlers tokenize_handlers;
/* EFFECT_TOKENIZE, EFFECT_DELIVER, EFFECT_CHOICE, EFFECT_ANSWER. Control thread. */
void client_effect(struct router *router, const struct effect *effect);
/* Looks at the clients of this thread that have a clock. Text thread. */
void client_watch(struct text_thread *thread, struct instant now);

/* ---- text threads ------------------------------------------------------------------------ */

struct text_thread {
    struct router *router;
    uint32_t index;
    struct thread thread;
    struct mailbox box;
    struct client *watched; /* clients with a clock: they wait for a tokenizer, or for their end */
    struct mail canary_mail;
    uint64_t canary_request; /* whose mail this is, while it is posted */
    _Atomic bool is_canary_posted;
    uint32_t *scratch; /* token ids of one encoding */
    size_t scratch_cap;
    struct wire_buffer out;
};

MUST_USE enum status text_start(struct router *router);
/* STATUS_TIMEOUT: one hangs; leave by _exit. */
MUST_USE enum status text_stop(struct router *router);
void text_fini(struct router *router);
struct text_thread *text_thread_of(struct router *router, struct rpc_call_id call);
/* Room for `cap` ids, until the next use of the thread's scratch. */
uint32_t *text_scratch(struct text_thread *thread, size_t cap);

/* ---- models ------------------------------------------------------------------------------ */

#define MODEL_VERSIONS_MAX 64u

/* A model's tokenizer and defaults; immutable once it is handed out. */
struct model_version {
    _Atomic uint32_t references;
    char name[LABEL_MAX];
    uint64_t digest; /* of tokenizer.json as workers publish it */
    uint32_t vocab;
    struct tokenizer *tokenizer;
    struct generation_defaults defaults;
    uint32_t eos[EOS_MAX];
    uint32_t eos_count;
    /* below: guarded by the models' lock */
    enum model_state { MODEL_WANTED, MODEL_FETCHING, MODEL_READY } state;
    struct instant retry_at;
    uint64_t tried; /* incarnation of the worker that was asked last */
    char why[256];  /* why it is not there */
};

struct model_source {
    struct incarnation incarnation; /* 0 = free */
    enum role role;
    uint64_t digest;
    struct layout_digest layout;
    uint32_t vocab;
    uint32_t context;
    char model[LABEL_MAX];
    char id[LABEL_MAX];
    char address[ADDRESS_MAX];
};

struct models {
    pthread_mutex_t lock; /* guards all below; a leaf but for calls into rpc */
    struct model_version *versions[MODEL_VERSIONS_MAX];
    uint32_t version_count;
    struct model_source *sources;
    uint32_t source_max;
    _Atomic uint64_t fetched;
    _Atomic uint64_t fetch_failures;
};

void models_init(struct router *router);
void models_fini(struct router *router);
/* A worker is listed, or not any more. rpc thread. */
void models_seen(struct router *router, const struct worker_info *info);
void models_lost(struct router *router, struct incarnation incarnation);
/* Starts what is due. First text thread. */
void models_poke(struct router *router, struct instant now);

enum models_answer {
    MODELS_READY,   /* *out holds a reference */
    MODELS_WAIT,    /* known, its tokenizer is not there yet */
    MODELS_UNKNOWN, /* there are workers, none of this model */
    MODELS_NONE,    /* no worker is known */
};
/* why: a sentence unless ready. context_out: of the model's decode workers. Any thread. */
enum models_answer models_get(struct router *router, const char *name, struct model_version **out,
                              uint32_t *context_out, struct writer *why);
void model_unref(struct model_version *version);
uint32_t models_ready_count(struct router *router);
/* The end of a fetch: files are there (the caller's), or a sentence. Any thread. */
void models_fetched(struct router *router, struct model_version *version);
void models_failed(struct router *router, struct model_version *version, const char *sentence);

/* fetch.c: gets a version's files from this address and parses them on a text thread; ends with
 * models_fetched or models_failed, once. Holds a reference. */
void fetch_start(struct router *router, struct model_version *version, const char *address);

/* ---- Abort, ListModels, peers ------------------------------------------------------------ */

extern const struct rpc_handlers abort_handlers;
extern const struct rpc_handlers list_models_handlers;

#define PEERS_MAX 64u

struct peers {
    struct etcd *etcd;
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t changed;
    bool is_closed;
    uint32_t count;
    _Atomic uint32_t known; /* the count, for who has no lock */
    struct {
        uint64_t incarnation;
        char address[ADDRESS_MAX];
    } items[PEERS_MAX];
};

MUST_USE enum status peers_start(struct router *router);
/* After shell_stop, before shell_close. */
MUST_USE enum status peers_stop(struct router *router);
/* Sends this Abort to every other router, once, best effort. rpc thread. */
void peers_forward(struct router *router, struct bytes payload);

/* ---- canaries; control thread ------------------------------------------------------------ */

struct canary_shell {
    struct canary core;
    uint32_t decodes; /* usable ones at the last tick */
    struct histogram seconds;
    struct metric *age;
    struct metric *ended;
    struct metric *failures;
};

void canary_start(struct router *router); /* before shell_start; main thread */
void canary_tick(void *ctx, struct instant now);
/* True: the effect was for a canary. */
bool canary_effect(struct router *router, const struct effect *effect);
void canary_progress(void *ctx, struct buffer *lines);
void canary_refresh(struct router *router);

/* ---- report ------------------------------------------------------------------------------ */

struct report {
    struct metric *tokens;
    struct metric *retries;
    struct metric *resumes;
    struct metric *placements;
    struct metric *mixed_pairs;
    struct metric *refusals;
    struct metric *workers;
    struct metric *clients;
    struct metric *tokenizers;
    struct metric *fetches;
    struct metric *blocks;
    struct metric *blocks_forgotten;
    struct metric *block_messages;
};

void report_init(struct router *router); /* before shell_start */
void report_refresh(void *ctx);          /* control thread, as are the next two */
void report_reasons(void *ctx, struct buffer *lines);
void report_get_workers(void *ctx, const struct admin_request *request, struct admin_reply *reply);

/* ---- all --------------------------------------------------------------------------------- */

struct router {
    const struct router_settings *settings;
    struct shell *shell;
    struct rpc *rpc;
    struct router_core *core; /* control thread */
    void *core_memory;
    struct rpc_server *server;
    struct rpc_health *health;
    struct rpc_reflection *reflection;
    struct clients clients;
    struct text_thread text[TEXT_THREADS_MAX];
    uint32_t text_count;
    struct models models;
    struct peers peers;
    struct canary_shell canary;
    struct report report;
    _Atomic uint32_t is_started; /* the control thread runs */
};

/* service.c: everything from a shell to a serving router. The sentence is logged on failure. */
MUST_USE enum status router_start(struct router *router);
/* After shell_wait. STATUS_TIMEOUT: something hangs; leave by _exit. Closes the shell. */
MUST_USE enum status router_stop(struct router *router);

#endif
