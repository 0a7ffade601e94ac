/* Processes: their start, their end, their pauses, and what discovery tells routers of them. */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "sim/state.h"

static struct siphash_key sim_secret(struct process *p) {
    return (struct siphash_key){prng_next(&p->chance), prng_next(&p->chance)};
}

static struct node_config sim_node(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    struct node_config config = {.role = p->role,
                                 .incarnation = p->incarnation,
                                 .layout = world->layout.digest,
                                 .sessions_max = 64,
                                 .timers = timers_default()};
    struct writer writer;
    writer_init(&writer, config.id, LABEL_MAX - 1);
    writer_printf(&writer, "%s-%u", role_name(p->role), process);
    return config;
}

static void sim_core_memory(struct world *world, struct process *p, uint64_t bytes, uint64_t core) {
    p->memory = aligned_alloc(64, (bytes + 63) & ~63ull);
    p->core = calloc(1, core);
    CHECK(p->memory != NULL && p->core != NULL);
    world->result.memory[p->role] = bytes + core;
}

static void sim_start_decode(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    struct decode_config config = {.node = sim_node(world, process),
                                   .entries_max = world->knobs.entries_max,
                                   .page_count = world->knobs.decode_pages,
                                   .page_tokens = world->knobs.page_tokens,
                                   .token_bytes = world->layout.token_bytes,
                                   .context = SIM_PROMPT_MAX + SIM_NEW_MAX,
                                   .reserve_tokens = world->knobs.reserve_tokens,
                                   .vocab = SIM_VOCAB,
                                   .rows_max = world->knobs.rows_max,
                                   .step_tokens_max = world->knobs.step_tokens_max,
                                   .eos_count = 1,
                                   .eos = {SIM_EOS},
                                   .shared_min = 1 + world->knobs.page_tokens,
                                   .changes_max = world->knobs.changes_max,
                                   .secret = sim_secret(p),
                                   .address_len = ADDRESS_OF};
    memcpy(config.address, &process, 4);
    memcpy(config.address + 4, &p->generation, 4);
    sim_core_memory(world, p, decode_bytes(&config), sizeof(struct decode_core));
    decode_init(p->core, &config, p->memory);
    p->page_count = config.page_count;
    p->arms = calloc(config.entries_max, sizeof *p->arms);
    CHECK(p->arms != NULL);
}

static void sim_start_prefill(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    struct prefill_config config = {.node = sim_node(world, process),
                                    .layout = &world->layout,
                                    .entries_max = world->knobs.entries_max,
                                    .page_count = world->knobs.prefill_pages,
                                    .context = SIM_PROMPT_MAX + SIM_NEW_MAX,
                                    .vocab = SIM_VOCAB,
                                    .rows_max = world->knobs.rows_max,
                                    .step_tokens_max = world->knobs.step_tokens_max,
                                    .sends_high = world->knobs.sends_high,
                                    .batch_bytes = 8 * world->layout.components[0].row_bytes,
                                    .shared_min = 1 + world->knobs.page_tokens,
                                    .changes_max = world->knobs.changes_max,
                                    .secret = sim_secret(p)};
    sim_core_memory(world, p, prefill_bytes(&config), sizeof(struct prefill_core));
    prefill_init(p->core, &config, p->memory);
    p->page_count = config.page_count;
}

static void sim_start_router(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    uint32_t words = world->knobs.new_min > 0 ? 256 : 1024; /* the more for logprobs */
    struct router_config config = {.node = sim_node(world, process),
                                   .requests_max = world->knobs.requests_max,
                                   .workers_max = 32,
                                   .words_max = world->knobs.requests_max * words,
                                   .blocks_max = world->knobs.blocks_max,
                                   .disaggregate_above = world->knobs.disaggregate_above,
                                   .secret = sim_secret(p)};
    sim_core_memory(world, p, router_bytes(&config), sizeof(struct router_core));
    router_init(p->core, &config, p->memory);
}

/* --- discovery ---------------------------------------------------------------------------------
 */

static struct worker_info sim_info(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    struct worker_info info = {.incarnation = p->incarnation,
                               .role = p->role,
                               .layout = world->layout.digest,
                               .vocab = SIM_VOCAB,
                               .context = SIM_PROMPT_MAX + SIM_NEW_MAX,
                               .kv_tokens = p->page_count * world->knobs.page_tokens,
                               .page_tokens = world->knobs.page_tokens,
                               .model = "m"};
    memcpy(info.id, sim_node(world, process).id, LABEL_MAX);
    struct writer writer;
    writer_init(&writer, info.address, ADDRESS_MAX - 1);
    writer_printf(&writer, "host:%u", process);
    return info;
}

void sim_list(struct world *world, uint32_t process, uint32_t router, bool is_seen) {
    if (world->etcd_down_until > world->now) {
        return; /* nobody hears of it; the whole list follows */
    }
    int64_t at = world->now + sim_time(world, router, world->knobs.discovery_ns);
    struct sim_event *event = sim_post(world, router, LANE_DISCOVERY,
                                       is_seen ? EVENT_WORKER_SEEN : EVENT_WORKER_LOST, at);
    struct worker_info info = sim_info(world, process);
    event->info = sim_copy(&info, sizeof info);
    if (is_seen) {
        event->event.u.worker_seen.info = event->info;
    } else {
        event->event.u.worker_lost.incarnation = event->info->incarnation;
    }
}

void sim_announce(struct world *world, uint32_t process, bool is_seen) {
    for (uint32_t i = 0; i < world->process_count; i++) {
        if (world->processes[i].role == ROLE_ROUTER && world->processes[i].is_alive) {
            sim_list(world, process, i, is_seen);
        }
    }
}

/* A dead worker's lease ends; in an outage only when that is over. */
void sim_lease(struct world *world, const struct sim_event *event) {
    if (world->etcd_down_until > world->now) {
        sim_schedule(world, SIM_LEASE, world->etcd_down_until + MS, NOBODY)->number = event->number;
        return;
    }
    for (uint32_t i = 0; i < world->process_count; i++) {
        if (world->processes[i].role == ROLE_ROUTER && world->processes[i].is_alive) {
            sim_post(world, i, LANE_DISCOVERY, EVENT_WORKER_LOST, world->now + MS)
                ->event.u.worker_lost.incarnation.v = event->number;
        }
    }
}

void sim_relist(struct world *world) {
    for (uint32_t i = 0; i < world->process_count; i++) {
        if (world->processes[i].role != ROLE_ROUTER && world->processes[i].is_alive) {
            sim_announce(world, i, true);
        }
    }
}

/* --- life and death ----------------------------------------------------------------------------
 */

void sim_start(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    p->is_alive = true;
    p->is_leaving = false;
    p->generation++;
    p->incarnation.v = ++world->next_incarnation;
    p->chance = fault_draw(world->schedule->seed + 1, (enum fault)process, p->generation);
    p->paused_until = 0;
    p->next_tick = world->now;
    for (uint32_t i = 0; i < LANE_COUNT; i++) {
        p->lane_last[i] = world->now;
    }
    p->is_stepping = false;
    p->peer_count = 0;
    p->op_count = 0;
    p->last_plan = 0;
    p->last_abandoned = 0;
    p->created = 0;
    p->retracted = 0;
    p->sessions_ended = 0;
    p->cursor = 0;
    TRACE(world, "start %s-%u incarnation %llu", role_name(p->role), process,
          (unsigned long long)p->incarnation.v);
    p->shadows = calloc(sim_shadow_count(world, p->role), sizeof *p->shadows);
    CHECK(p->shadows != NULL);
    if (p->role == ROLE_ROUTER) {
        sim_start_router(world, process);
        for (uint32_t i = 0; i < world->process_count; i++) {
            if (world->processes[i].role != ROLE_ROUTER && world->processes[i].is_alive) {
                sim_list(world, i, process, true);
            }
        }
    } else {
        if (p->role == ROLE_DECODE) {
            sim_start_decode(world, process);
        } else {
            sim_start_prefill(world, process);
        }
        uint64_t rows = (uint64_t)p->page_count * SIM_COMPONENTS * world->knobs.page_tokens;
        p->kv = calloc(rows, sizeof *p->kv);
        CHECK(p->kv != NULL);
        p->salts = calloc(p->page_count, sizeof *p->salts);
        CHECK(p->salts != NULL);
        sim_announce(world, process, true);
    }
    (void)sim_schedule(world, SIM_TICK, world->now, process);
}

void sim_stop(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    if (p->is_alive && p->role == ROLE_DECODE) {
        const struct decode_core *core = p->core;
        world->result.retractions += core->retractions;
        world->result.recomputed += core->tokens_recomputed;
    }
    for (uint32_t i = 0; p->arms != NULL && i < world->knobs.entries_max; i++) {
        free(p->arms[i].pages);
        free(p->arms[i].covered);
    }
    for (uint32_t i = 0; i < p->held_count; i++) {
        sim_free(p->held[i]);
    }
    free(p->arms);
    free(p->core);
    free(p->memory);
    free(p->kv);
    free(p->ops);
    free(p->held);
    free(p->shadows);
    free(p->salts);
    sim_drop_plan(p);
    p->arms = NULL;
    p->core = NULL;
    p->memory = NULL;
    p->kv = NULL;
    p->ops = NULL;
    p->held = NULL;
    p->shadows = NULL;
    p->salts = NULL;
    p->held_count = 0;
    p->held_capacity = 0;
    p->op_capacity = 0;
    p->op_count = 0;
    p->is_alive = false;
}

void sim_crash(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    for (uint32_t i = 0; i < world->connection_count; i++) {
        struct connection *c = &world->connections[i];
        for (uint32_t side = 0; side < 2; side++) {
            if (c->process[side] != process || c->generation[side] != p->generation) {
                continue;
            }
            c->is_broken = true;
            c->is_ended[side] = true;
            int64_t cut = sim_cut_until(world, process, c->process[1 - side]);
            int64_t at = world->now + sim_time(world, process, world->knobs.delay_ns);
            if (prng_below(&p->chance, 4) > 0) { /* else cut off: only silence tells */
                sim_end_side(world, c, 1 - side, at > cut ? at : cut);
            }
        }
    }
    if (p->role == ROLE_ROUTER) {
        sim_lose_clients(world, process);
    } else {
        sim_schedule(world, SIM_LEASE, world->now + 10 * SECOND, NOBODY)->number = p->incarnation.v;
    }
    int64_t back = world->now + sim_time(world, process, 800 * MS);
    sim_stop(world, process);
    sim_schedule(world, SIM_RESTART, back, NOBODY)->number = process;
}

void sim_restart(struct world *world) {
    for (uint32_t i = 0; i < world->process_count; i++) {
        if (!world->processes[i].is_alive) {
            sim_start(world, i);
        }
    }
}

/* --- pauses ------------------------------------------------------------------------------------
 */

void sim_pause(struct world *world, uint32_t process, int64_t until) {
    struct process *p = &world->processes[process];
    p->paused_until = until > p->paused_until ? until : p->paused_until;
    TRACE(world, "FAULT pause %s-%u until %.3f", role_name(p->role), process,
          (double)p->paused_until / 1e9);
}

/* True if the process is stopped: it will read the event when it runs again. */
bool sim_hold(struct world *world, struct sim_event *event) {
    if (event->process >= SIM_PROCESSES) {
        return false;
    }
    struct process *p = &world->processes[event->process];
    if (p->paused_until <= world->now && p->held_count == 0) {
        return false;
    }
    if (p->held_count == 0) {
        (void)sim_schedule(world, SIM_RESUME, p->paused_until, event->process);
    }
    if (p->held_count == p->held_capacity) {
        p->held_capacity = p->held_capacity * 2 + 64;
        p->held = realloc(p->held, p->held_capacity * sizeof(struct sim_event *));
        CHECK(p->held != NULL);
    }
    p->held[p->held_count++] = event;
    return true;
}

void sim_resume(struct world *world, uint32_t process) {
    struct process *p = &world->processes[process];
    if (p->paused_until > world->now) { /* stopped again meanwhile */
        (void)sim_schedule(world, SIM_RESUME, p->paused_until, process);
        return;
    }
    /* The list is taken first: a process that leaves in mid-turn frees its own. */
    struct sim_event **held = p->held;
    uint32_t count = p->held_count;
    p->held = NULL;
    p->held_count = 0;
    p->held_capacity = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (sim_is_stale(world, held[i])) {
            sim_free(held[i]);
        } else if (!sim_hold(world, held[i])) { /* it may have been stopped in one of these turns */
            sim_handle(world, held[i]);
            sim_free(held[i]);
        }
    }
    free(held);
}
