/* What both kinds of worker share: settings, model, engine, link, and the rpc services beside
 * sessions (Files, Describe, health).
 *
 * main.c of a worker: worker_create, build the core from what it offers, worker_run. Engine and
 * link callbacks become mail here; effects towards them are worker_* calls, which give every
 * started operation its one end also where the call itself refuses. Main thread at start and end;
 * functions that carry out effects are the control thread's. */
#ifndef NODE_WORKER_H
#define NODE_WORKER_H

#include <stdint.h>

#include "base/siphash.h"
#include "core/layout.h"
#include "engine/model.h"
#include "services/node/settings.h"
#include "services/node/shell.h"

struct accelerator;
struct budget;
struct engine;
struct kvlink;
struct pages;
struct publisher;
struct words;
struct worker_files;
struct worker_metrics;

/* Where the engine computes. */
enum worker_device {
    WORKER_DEVICE_CPU,
    WORKER_DEVICE_CUDA,
    WORKER_DEVICE_AUTO, /* CUDA where there is a device, else the CPU */
};

/* Prompt tokens for which a request waits for the step that computes them for another. */
#define WORKER_SHARED_MIN  64u
#define WORKER_CHANGES_MAX 16384u /* of the prefix index, remembered for routers */

struct worker_settings {
    struct shell_settings shell;
    struct config_address grpc;
    uint32_t kv_port;
    const char *kv_device;
    uint32_t link; /* enum kvlink_transport */
    const char *model;
    uint32_t weights; /* enum model_weights */
    uint32_t kernels; /* 0: the best there is; n: the n-th of KERNELS_NAMES */
    uint32_t device;  /* enum worker_device */
    uint32_t device_index;
    const char *device_library; /* NULL: the one beside the program, or the system's */
    const char *served_name;    /* NULL: the directory's own name */
    uint64_t kv_tokens;         /* 0: worker_create chooses */
    uint32_t page_tokens;
    uint32_t reserve_tokens; /* decode workers only */
    uint32_t rows_max;
    uint32_t entries_max;
    uint32_t sessions_max;
    uint32_t threads; /* 0: all processors */
    uint32_t step_tokens;
    struct span engine_limit;
    struct span stuck_after; /* 0: never */
    struct span test_step_delay;
};

/* The table entries of both workers' programs; the last WORKER_CONFIG_DECODE are decode workers'
 * only. */
#define WORKER_CONFIG_DECODE 1u
extern const struct config_entry worker_config_entries[];
extern const uint32_t worker_config_count;

struct worker_config {
    enum role role;
    const char *program;
    const char *version;
    const struct worker_settings *settings; /* borrowed for the worker's life */
    uint32_t sends_high; /* prefill: of the core, sizes the link's table; else 0 */
};

struct worker {
    struct worker_config config;
    struct shell *shell;
    const struct kernels *kernels;
    struct accelerator *accelerator; /* NULL: the CPU */
    struct model *model;
    const struct model_info *info;
    struct kv_layout layout;
    uint32_t page_count;
    uint32_t context; /* tokens of one request: the model's, or what all pages hold */
    char served_name[LABEL_MAX];
    uint64_t tokenizer_digest;
    struct engine *engine;
    uint64_t *kv_sums; /* prefill: of the pool's rows, for the link; else NULL */
    struct kvlink *link;
    struct rpc_server *server;
    struct worker_files *files;
    struct worker_metrics *metrics;
    /* of the core, for metrics; control thread */
    struct pages *pages;
    const struct publisher *publisher;
    const struct words *words;
    const struct budget *budget;
    const struct ledger *ledger;
    const uint64_t *steps;
    const uint64_t *steps_abandoned;
    const bool *is_stepping;
    const bool *is_starved; /* decode: requests run, but none has pages; NULL: never so */
    uint32_t working_state; /* entries in it wait for steps of ours */
    /* control thread */
    uint64_t steps_seen;
    struct instant steps_seen_at;
    struct instant ticked_at;
};

/* Everything but the core: shell, model, engine, link, services. On failure one sentence was
 * logged, nothing is left behind, and the status is for shell_exit_code. */
MUST_USE enum status worker_create(const struct worker_config *config, struct worker **out);
/* node, layout digest, numerics and sessions_max of the core's configuration. */
void worker_node_config(const struct worker *worker, struct node_config *config);
/* A random key for what peers must not predict. */
struct siphash_key worker_secret(void);
/* `bytes` of zeroed memory, 64-aligned, for a core; aborts without memory. free() it. */
void *worker_memory(uint64_t bytes);

/* Listens, starts the core, registers, serves until drained, takes everything down and frees the
 * worker. Returns the exit code of the program. */
MUST_USE int worker_run(struct worker *worker, const struct shell_core *core);

/* Effects; control thread. */
void worker_step(struct worker *worker, const struct effect *effect);
void worker_step_abandon(struct worker *worker, const struct effect *effect);
void worker_arm(struct worker *worker, const struct effect *effect);
void worker_disarm(struct worker *worker, const struct effect *effect);
void worker_connect(struct worker *worker, const struct effect *effect);
void worker_send(struct worker *worker, const struct effect *effect);
void worker_link_close(struct worker *worker, const struct effect *effect);

/* For shell_core: pages, budget, steps, link counters. */
void worker_refresh(struct worker *worker);
void worker_balance(const struct worker *worker, struct shell_balance *balance);
void worker_leak(struct worker *worker);
/* Looks whether the engine completes steps while entries wait for it. */
void worker_tick(struct worker *worker, struct instant now);
void worker_progress(const struct worker *worker, struct buffer *lines);
/* Appends `"kv":{...}` and `"link":{...}`. */
void worker_describe(struct worker *worker, struct buffer *json);

#endif
