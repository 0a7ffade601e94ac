#include "sim/big.h"

#include <stdio.h>

#include "sim/state.h"

#define BIG_ROWS    256u
#define BIG_STEP_NS (20 * MS)

/* Everybody arrives within half a second and asks for enough tokens to stay until the last is in.
 */
static struct knobs big_knobs(uint32_t live) {
    uint32_t pages = live * ((32 + SIM_NEW_MAX + 15) / 16) + 64;
    return (struct knobs){.routers = 1,
                          .prefills = 1,
                          .decodes = 1,
                          .page_tokens = 16,
                          .decode_pages = pages,
                          .prefill_pages = pages,
                          .entries_max = live,
                          .requests_max = live,
                          .rows_max = BIG_ROWS,
                          .step_tokens_max = 4096,
                          .sends_high = 4096,
                          .changes_max = 16384,
                          .blocks_max = 65536,
                          .salts = 1,
                          .clients = live,
                          .arrival_ns = SECOND / 2 / live,
                          .prompt_max = 32,
                          .new_min = SIM_NEW_MAX,
                          .new_max = SIM_NEW_MAX,
                          .alphabet = SIM_VOCAB - 2,
                          .delay_ns = MS / 10,
                          .step_ns = BIG_STEP_NS,
                          .discovery_ns = MS,
                          .is_quiet = true};
}

static bool big_run(uint32_t live) {
    struct knobs knobs = big_knobs(live);
    struct schedule schedule = {.seed = 1, .is_calm = true};
    struct sim_options options = {.knobs = &knobs, .verify_every = 4000, .is_timed = true};
    struct sim_result result;
    const char *violation = sim_run(&schedule, &options, &result);
    if (violation != NULL) {
        printf("%u live: %s\n", live, violation);
        return false;
    }
    /* A stream's turn comes round once in live / rows steps; a quarter of each is kept for prompts.
     */
    int64_t round = (int64_t)((live + BIG_ROWS - 2) / (BIG_ROWS - 1) + 1) * BIG_STEP_NS;
    const struct sim_cost *r = &result.cost[ROLE_ROUTER];
    const struct sim_cost *p = &result.cost[ROLE_PREFILL];
    const struct sim_cost *d = &result.cost[ROLE_DECODE];
    double requests = (double)result.requests * 1e3;
    double percent = (double)result.virtual_ns / 100;
    printf("%6u %6u  %5.1f %5.1f %5.1f %6.2f  %5.2f %5.2f %5.2f  %6.1f  %6.3f %6.3f  %5.1f %5.1f "
           "%5.1f\n",
           live, result.peak_live, (double)r->ns / requests, (double)p->ns / requests,
           (double)d->ns / requests, (double)(r->ns + p->ns + d->ns) / (double)result.tokens / 1e3,
           (double)r->tick_ns / percent, (double)p->tick_ns / percent, (double)d->tick_ns / percent,
           (double)result.tokens / (double)result.tokens_messages,
           (double)result.longest_wait_ns / 1e9, (double)round / 1e9,
           (double)result.memory[ROLE_ROUTER] / live / 1024,
           (double)result.memory[ROLE_PREFILL] / live / 1024,
           (double)result.memory[ROLE_DECODE] / live / 1024);
    (void)fflush(stdout);
    if (result.longest_wait_ns > 2 * round) {
        printf("a stream was starved: it waited for more than two rounds\n");
        return false;
    }
    if (result.peak_live < live - live / 10) {
        printf("the world is not what it should be: not all requests were live at once\n");
        return false;
    }
    return true;
}

bool sim_big(void) {
    printf("          live  us a request in core  us a    sweeps, %% of core    tokens   wait, s  "
           "a round   "
           "KiB a request\n"
           " asked  in D      R     P     D    token      R     P     D   message longest  lasts   "
           "   R  "
           "   P     D\n");
    bool is_good = true;
    for (uint32_t live = 100; live <= 10000; live *= 10) {
        is_good = big_run(live) && is_good;
    }
    return is_good;
}
