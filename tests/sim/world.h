/* The simulated world around the three cores: one seed, virtual time, every fault a knob.
 *
 * It is a second executor of the same effects that the programs carry out: streams are FIFO queues
 * that break and are noticed late at each end, engines and links are real memory (rows of KV that
 * tokens are computed from), so a byte in the wrong page becomes a wrong token. The cores run
 * unchanged. */
#ifndef SIM_WORLD_H
#define SIM_WORLD_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/prng.h"
#include "core/decode.h"
#include "core/prefill.h"
#include "core/router.h"

#define SIM_PROCESSES  12
#define SIM_COMPONENTS 4
#define SIM_LAYERS     2
#define SIM_VOCAB      64
#define SIM_EOS        1
#define SIM_CLIENTS    4096
#define SIM_PROMPT_MAX 120
#define SIM_NEW_MAX    40

/* Drawn from the seed once per run (swarm): many runs of different temper find more than one of
 * all. */
struct knobs {
    uint32_t routers, prefills, decodes;
    uint32_t page_tokens, decode_pages, prefill_pages;
    uint32_t entries_max, rows_max, step_tokens_max, sends_high;
    uint32_t disaggregate_above;
    uint32_t clients;
    int64_t arrival_ns; /* mean time between clients */
    uint32_t prompt_max, new_max;
    uint32_t alphabet; /* 2: pages of equal tokens behind different prefixes are common */
    int64_t delay_ns;  /* mean message delay */
    int64_t step_ns;   /* mean engine step */
    /* faults, in thousandths unless named otherwise */
    uint32_t leave;       /* clients that leave */
    uint32_t abort_label; /* clients aborted by label */
    uint32_t short_deadline;
    uint32_t stop_string;
    uint32_t tokenize_fails;
    int64_t break_every_ns; /* a stream breaks; 0 = never */
    int64_t stall_every_ns; /* a stream falls silent for seconds, half-open */
    int64_t crash_every_ns; /* a process dies and is started again */
    int64_t pause_every_ns; /* a process is stopped for up to 15 s */
    int64_t etcd_every_ns;  /* all workers deleted from discovery, back after a while */
    int64_t drain_every_ns; /* a worker is asked to drain, leaves and is started again */
    uint32_t chunk_lost, chunk_bad, chunk_twice; /* KV chunks */
    uint32_t send_fails;
    uint32_t step_fails;
    uint32_t layer_lost;    /* a layer's notice does not come */
    uint32_t notice_lag_ms; /* how late an end of a stream may notice */
    bool is_quiet;          /* no faults at all: everything must succeed */
};

struct sim_result {
    uint64_t requests, ok, failed, aborted, lost_with_router;
    uint64_t tokens, steps, events, retries, resumes, commits, local;
    int64_t drained_ns; /* virtual time from faults off and clients done to all tables empty */
};

struct world;

/* Runs one seed to its end. Returns NULL if every check held, else a sentence (static). trace: NULL
 * or a file. */
const char *sim_run(uint64_t seed, FILE *trace, struct sim_result *result_out);
struct knobs sim_knobs(uint64_t seed);

#endif
