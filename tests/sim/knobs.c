#include "sim/state.h"

struct dice {
    struct prng prng;
};

static uint32_t below(struct dice *dice, uint32_t bound) {
    return bound == 0 ? 0 : prng_below(&dice->prng, bound);
}

static bool chance(struct dice *dice, uint32_t thousandths) {
    return below(dice, 1000) < thousandths;
}

/* Faults of chance: in how many of a thousand runs, and up to how many millionths of the
 * opportunities in those. */
static const struct {
    enum fault fault;
    uint32_t runs, most;
} rates[] = {
    {FAULT_LEAVE, 450, 600000},           {FAULT_ABORT, 250, 300000},
    {FAULT_DEADLINE, 250, 300000},        {FAULT_STOP, 300, 300000},
    {FAULT_UNREAD, 150, 200000},          {FAULT_TOKENIZE, 150, 100000},
    {FAULT_TOKENIZE_LATE, 100, 100000},   {FAULT_REFUSED, 100, 300000},
    {FAULT_SEND_LOST, 150, 3000},         {FAULT_SEND_LAST, 150, 3000},
    {FAULT_SEND_LATE, 150, 3000},         {FAULT_SEND_BAD, 100, 2000},
    {FAULT_SEND_DEAF, 100, 2000},         {FAULT_STEP, 200, 40000},
    {FAULT_STEP_SLOW, 150, 30000},        {FAULT_ROW, 100, 10000},
    {FAULT_LAYER, 200, 300000},           {FAULT_ARM, 100, 50000},
    {FAULT_DISARM_LATE, 150, 300000},     {FAULT_CONNECT, 100, 300000},
    {FAULT_LINK_BUSY, 150, 60000},        {FAULT_LINK_ERROR, 100, 20000},
    {FAULT_LINK_ERROR_FIRST, 100, 20000}, {FAULT_LINK_HANGS, 100, 20000},
    {FAULT_CLOSE_LATE, 150, 500000},      {FAULT_CHUNK_LOST, 200, 100000},
    {FAULT_CHUNK_BAD, 150, 100000},       {FAULT_CHUNK_TWICE, 250, 300000},
    {FAULT_CHUNK_LATE, 150, 100000},      {FAULT_TURN_CRASH, 100, 300},
    {FAULT_TURN_PAUSE, 100, 300},
};

/* Timed faults: in how many of a thousand runs; mean time between two: least and spread in ms. */
static const struct {
    enum fault fault;
    uint32_t runs, least_ms, spread_ms;
} timed[] = {
    {FAULT_BREAK, 400, 200, 8000},        {FAULT_STALL, 250, 500, 9000},
    {FAULT_DEAF, 200, 500, 9000},         {FAULT_PARTITION, 200, 1000, 9000},
    {FAULT_CRASH, 350, 500, 9000},        {FAULT_PAUSE, 300, 500, 9000},
    {FAULT_DRAIN, 250, 1000, 9000},       {FAULT_ETCD_WIPE, 200, 1000, 9000},
    {FAULT_ETCD_OUTAGE, 200, 2000, 9000}, {FAULT_ETCD_LEASE, 200, 1000, 9000},
    {FAULT_FLOOD, 100, 3000, 9000},
};

static void draw_faults(struct dice *dice, struct knobs *knobs) {
    for (uint32_t i = 0; i < sizeof rates / sizeof rates[0]; i++) {
        bool is_on = chance(dice, rates[i].runs);
        uint32_t rate = 1 + below(dice, rates[i].most);
        knobs->rate[rates[i].fault] = is_on ? rate : 0;
    }
    for (uint32_t i = 0; i < sizeof timed / sizeof timed[0]; i++) {
        bool is_on = chance(dice, timed[i].runs);
        int64_t every = (int64_t)(timed[i].least_ms + below(dice, timed[i].spread_ms)) * MS;
        knobs->every_ns[timed[i].fault] = is_on ? every : 0;
    }
}

static uint32_t one_request(const struct knobs *knobs) {
    return (knobs->prompt_max + knobs->new_max + knobs->page_tokens - 1) / knobs->page_tokens;
}

/* How much room admission leaves. In a third of the runs it is none, answers are longer than
 * prompts, and the pool holds one or two requests: whoever grows takes from another. */
static void draw_room(uint64_t seed, struct knobs *knobs) {
    struct dice draw = {{mix64(seed ^ 0x4007)}};
    uint32_t kind = below(&draw, 3);
    knobs->reserve_tokens = kind == 0 ? SIM_NEW_MAX : kind == 1 ? below(&draw, 12) : 0;
    if (kind == 2 && knobs->decode_pages > 1) {
        knobs->page_tokens = 4;
        knobs->prompt_max = 4 + below(&draw, 16);
        knobs->new_max = SIM_NEW_MAX / 2 + below(&draw, SIM_NEW_MAX / 2);
        knobs->decode_pages = one_request(knobs) + below(&draw, one_request(knobs));
        knobs->prefill_pages += one_request(knobs);
    }
}

static struct knobs drawn_knobs(uint64_t seed) {
    struct dice draw = {{mix64(seed ^ 0x5eed)}};
    struct dice *dice = &draw;
    struct knobs knobs = {.routers = 1 + below(dice, 3),
                          .prefills = 1 + below(dice, 3),
                          .decodes = 1 + below(dice, 3),
                          .page_tokens = 4u << below(dice, 3),
                          .entries_max = 2 + below(dice, 30),
                          .requests_max = 8u << below(dice, 5),
                          .rows_max = 1 + below(dice, 8),
                          .sends_high = 1 + below(dice, 16),
                          .clients = 20 + below(dice, 60),
                          .prompt_max = 8 + below(dice, SIM_PROMPT_MAX - 8),
                          .new_max = 1 + below(dice, SIM_NEW_MAX),
                          .alphabet = chance(dice, 300) ? 2 : SIM_VOCAB - 2,
                          .arrival_ns = (1 + below(dice, 400)) * MS,
                          .delay_ns = (1 + below(dice, 40)) * MS / 10,
                          .step_ns = (1 + below(dice, 200)) * MS / 10,
                          .discovery_ns = chance(dice, 250) ? 1500 * MS : 20 * MS,
                          .notice_lag_ms = 1 + below(dice, 4000)};
    if (chance(dice, 100)) { /* a page holds a whole request, and there is one */
        knobs.page_tokens = 64;
        knobs.prompt_max = 8 + below(dice, 24);
        knobs.new_max = 1 + below(dice, 24);
        knobs.decode_pages = 1;
        knobs.prefill_pages = 1;
    } else {
        knobs.decode_pages = one_request(&knobs) + below(dice, 6 * one_request(&knobs));
        knobs.prefill_pages = one_request(&knobs) + below(dice, 4 * one_request(&knobs));
    }
    draw_room(seed, &knobs);
    knobs.step_tokens_max = knobs.rows_max + below(dice, 64);
    knobs.disaggregate_above = chance(dice, 700) ? 0 : below(dice, 60);
    knobs.changes_max = chance(dice, 300) ? 2u << below(dice, 3) : 256;
    knobs.blocks_max = chance(dice, 150) ? below(dice, 40) : 4096;
    knobs.old = chance(dice, 100) ? below(dice, 1 << 9) : 0;
    knobs.salts = chance(dice, 300) ? 3 : 1;
    if (chance(dice, 100)) {
        knobs.is_quiet = true;
        knobs.requests_max = 128;
        knobs.discovery_ns = 20 * MS; /* news that is seconds late is a fault */
        return knobs;
    }
    if (chance(dice, 100)) {
        knobs.prefills = 0;
    }
    if (chance(dice, 100)) { /* slow engines: seconds a step */
        knobs.step_ns = (int64_t)(500 + below(dice, 1500)) * MS;
        knobs.new_max = 1 + below(dice, 6);
    }
    draw_faults(dice, &knobs);
    return knobs;
}

/* --- the small fixed worlds --------------------------------------------------------------------
 */

static const struct {
    const char *name;
    uint32_t routers, prefills, decodes;
    uint32_t clients;
    uint32_t pages, entries;
    uint32_t disaggregate_above;
    int64_t arrival_ns;
    uint32_t prompt_max, new_max;
} worlds[SIM_WORLDS] = {
    {"one request, two legs", 1, 1, 1, 1, 16, 4, 0, 20 * MS, 24, 6},
    {"one request, one leg", 1, 0, 1, 1, 16, 4, 0, 20 * MS, 24, 6},
    {"four requests want the same pages", 1, 1, 1, 4, 4, 4, 0, 5 * MS, 24, 6},
    {"another worker of each kind", 1, 2, 2, 3, 12, 4, 0, 30 * MS, 24, 6},
    {"two routers", 2, 1, 1, 4, 8, 4, 0, 20 * MS, 24, 6},
    {"short prompts stay with D, long ones do not", 1, 1, 2, 4, 8, 2, 8, 10 * MS, 24, 6},
    {"answers outgrow the pool", 1, 1, 1, 3, 4, 3, 6, 5 * MS, 8, 24},
};

const char *sim_world_name(uint32_t world) {
    return world >= 1 && world <= SIM_WORLDS ? worlds[world - 1].name : "drawn from the seed";
}

static struct knobs fixed_knobs(uint32_t world) {
    CHECK(world >= 1 && world <= SIM_WORLDS);
    return (struct knobs){.routers = worlds[world - 1].routers,
                          .prefills = worlds[world - 1].prefills,
                          .decodes = worlds[world - 1].decodes,
                          .page_tokens = 8,
                          .decode_pages = worlds[world - 1].pages,
                          .prefill_pages = worlds[world - 1].pages,
                          .entries_max = worlds[world - 1].entries,
                          .requests_max = 8,
                          .rows_max = 2,
                          .step_tokens_max = 12,
                          .sends_high = 4,
                          .disaggregate_above = worlds[world - 1].disaggregate_above,
                          .changes_max = 64,
                          .blocks_max = 1024,
                          .salts = 2,
                          .clients = worlds[world - 1].clients,
                          .arrival_ns = worlds[world - 1].arrival_ns,
                          .prompt_max = worlds[world - 1].prompt_max,
                          .new_max = worlds[world - 1].new_max,
                          .alphabet = SIM_VOCAB - 2,
                          .delay_ns = MS / 2,
                          .step_ns = 5 * MS,
                          .discovery_ns = 5 * MS,
                          .notice_lag_ms = 200};
}

static void at_most(uint32_t *value, uint32_t limit) {
    if (limit > 0 && *value > limit) {
        *value = limit;
    }
}

struct knobs sim_knobs(const struct schedule *schedule) {
    struct knobs knobs =
        schedule->world > 0 ? fixed_knobs(schedule->world) : drawn_knobs(schedule->seed);
    at_most(&knobs.routers, schedule->routers);
    at_most(&knobs.prefills, schedule->prefills);
    at_most(&knobs.decodes, schedule->decodes);
    at_most(&knobs.prompt_max, schedule->prompt_max);
    at_most(&knobs.new_max, schedule->new_max);
    if (knobs.salts > 1) { /* who does not keep salts apart is not used for them: D serves alone */
        knobs.old &= ((1u << knobs.prefills) - 1) << knobs.routers;
    }
    return knobs;
}
