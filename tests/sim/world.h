/* The simulated world around the three cores: one schedule, virtual time, every fault a knob.
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

#include "sim/schedule.h"

#define SIM_PROCESSES  12
#define SIM_COMPONENTS 4 /* one in the first layer, three in the second: see sim_set_up_layout */
#define SIM_LAYERS     2
#define SIM_VOCAB      64
#define SIM_EOS        1
#define SIM_PROMPT_MAX 120
#define SIM_NEW_MAX    40

/* Drawn from the seed once per run (swarm): many runs of different temper find more than one of
 * all. */
struct knobs {
    uint32_t routers, prefills, decodes;
    uint32_t page_tokens, decode_pages, prefill_pages;
    uint32_t reserve_tokens; /* of decode workers: SIM_NEW_MAX and more retract nothing */
    uint32_t entries_max, requests_max, rows_max, step_tokens_max, sends_high;
    uint32_t disaggregate_above;
    uint32_t changes_max; /* of a prefix index, remembered for routers */
    uint32_t blocks_max;  /* of all prefix indexes, known to a router */
    uint32_t old;         /* these processes, one bit each, speak the oldest protocol */
    uint32_t salts;       /* tenants that share no cached page */
    uint32_t clients;
    int64_t arrival_ns; /* mean time between clients */
    uint32_t prompt_max, new_max;
    uint32_t new_min;           /* 0: as few as 1; else no end of sequence before max_tokens */
    uint32_t alphabet;          /* 2: pages of equal tokens behind different prefixes are common */
    int64_t delay_ns;           /* mean message delay */
    int64_t step_ns;            /* mean engine step */
    int64_t discovery_ns;       /* how late news of workers is, in the mean */
    uint32_t notice_lag_ms;     /* how late an end of a stream may notice */
    bool is_quiet;              /* no faults at all: everything must succeed */
    uint32_t rate[FAULT_COUNT]; /* of chance, in millionths of its opportunities */
    int64_t every_ns[FAULT_COUNT]; /* of timed ones: mean time between two; 0 = never */
};

struct knobs sim_knobs(const struct schedule *schedule);
/* The small fixed worlds, 1 .. SIM_WORLDS: no faults but listed ones. */
#define SIM_WORLDS 7u
const char *sim_world_name(uint32_t world);

/* What one core's turns cost, for the big world. */
struct sim_cost {
    uint64_t turns;
    int64_t ns;      /* of all turns but ticks */
    int64_t tick_ns; /* of the sweeps */
    int64_t worst_tick_ns;
};

struct sim_result {
    uint64_t requests, ok, failed, aborted, lost_with_router;
    uint64_t tokens, steps, steps_abandoned, events, retries, resumes, commits, local, retractions,
        recomputed;
    uint64_t choices;                   /* that ended well before their call did */
    uint64_t prompt_tokens, hit_tokens; /* looked up in prefix indexes, and found */
    uint64_t blocks_told, blocks_walks, blocks_forgotten;
    uint64_t tokens_messages;
    uint64_t struck[FAULT_COUNT]; /* how often each fault struck */
    uint32_t opportunities[FAULT_COUNT];
    int64_t drained_ns; /* virtual time from the last call that closed, faults off, to all tables
                           empty */
    int64_t longest_wait_ns; /* virtual time between two tokens of one stream */
    int64_t virtual_ns;
    struct sim_cost cost[4]; /* by enum role; only with options.is_timed */
    uint32_t peak_live;      /* entries of one decode worker */
    uint64_t memory[4];      /* bytes of one core of that role */
};

struct sim_options {
    FILE *trace;               /* NULL: none */
    struct schedule *record;   /* NULL: none; every fault that struck is added to its list */
    const struct knobs *knobs; /* NULL: from the schedule */
    uint32_t verify_every;     /* 0 = after every step; n = after every n-th event */
    bool is_timed;             /* measure the cores' own time */
    char *sentence;            /* SIM_SENTENCE_MAX bytes for the violation, or NULL */
};
#define SIM_SENTENCE_MAX 256

/* Runs one schedule to its end. Returns NULL if every check held, else a sentence: static, or in
 * options->sentence for a failed CHECK of a core. */
const char *sim_run(const struct schedule *schedule, const struct sim_options *options,
                    struct sim_result *result_out);

#endif
