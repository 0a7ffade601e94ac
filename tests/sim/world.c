#include "sim/world.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim/state.h"

static jmp_buf sim_escape;
static struct world *sim_current;

void sim_fail(struct world *world, const char *sentence) {
    if (world->violation == NULL) {
        world->violation = sentence;
    }
    TRACE(world, "VIOLATION: %s", world->violation);
    longjmp(sim_escape, 1);
}

/* --- chance ------------------------------------------------------------------------------------
 */

static struct prng *sim_chance_of(struct world *world, uint32_t process) {
    return process < SIM_PROCESSES ? &world->processes[process].chance : &world->chance;
}

int64_t sim_time(struct world *world, uint32_t process, int64_t mean) {
    if (world->schedule->is_calm) {
        return mean;
    }
    struct prng *chance = sim_chance_of(world, process);
    int64_t base = (int64_t)(((uint64_t)mean * (1 + prng_below(chance, 2000))) / 1000);
    return prng_below(chance, 100) == 0 && base < SECOND ? base * 10 : base;
}

bool sim_coin(struct world *world, uint32_t process) {
    return (prng_next(sim_chance_of(world, process)) >> 63) != 0;
}

bool sim_strikes_at(struct world *world, enum fault fault, uint32_t index) {
    const struct schedule *schedule = world->schedule;
    bool strikes = false;
    if (world->is_settling) {
        return false;
    }
    if (schedule->is_listed) {
        strikes = schedule_has(schedule, fault, index);
    } else if (fault == FAULT_CLIENT || fault >= FAULT_TIMED_FIRST) {
        strikes = true; /* its moment is the draw */
    } else if (world->knobs.rate[fault] > 0) {
        struct prng draw = fault_draw(schedule->seed ^ 0xfa, fault, index);
        strikes = prng_below(&draw, 1000000) < world->knobs.rate[fault];
    }
    if (!strikes) {
        return false;
    }
    world->result.struck[fault]++;
    if (world->options.record != NULL) {
        schedule_add(world->options.record, fault, index);
    }
    if (fault != FAULT_CLIENT && fault < FAULT_TIMED_FIRST) {
        TRACE(world, "FAULT %s (number %u)", fault_name(fault), index);
    }
    return true;
}

bool sim_strikes(struct world *world, enum fault fault) {
    if (world->is_settling) {
        return false;
    }
    return sim_strikes_at(world, fault, world->result.opportunities[fault]++);
}

/* --- events ------------------------------------------------------------------------------------
 */

struct sim_event *sim_schedule(struct world *world, enum sim_kind kind, int64_t at,
                               uint32_t process) {
    struct sim_event *event = calloc(1, sizeof *event);
    CHECK(event != NULL);
    event->kind = kind;
    event->process = process;
    event->generation = process < SIM_PROCESSES ? world->processes[process].generation : 0;
    event->connection = -1;
    queue_push(&world->queue, at, event);
    return event;
}

struct sim_event *sim_post(struct world *world, uint32_t process, enum lane lane,
                           enum event_kind kind, int64_t at) {
    int64_t *last = &world->processes[process].lane_last[lane];
    *last = at > *last ? at : *last;
    struct sim_event *event = sim_schedule(world, SIM_CORE, *last, process);
    event->event.kind = kind;
    return event;
}

void sim_free(struct sim_event *event) {
    free(event->message);
    free(event->owned);
    free(event->info);
    free(event->sampling);
    free(event->logprobs);
    free(event->results);
    free(event->values);
    free(event->pages);
    free(event);
}

void *sim_copy(const void *from, uint64_t bytes) {
    void *to = malloc(bytes > 0 ? bytes : 1);
    CHECK(to != NULL);
    if (bytes > 0) {
        memcpy(to, from, bytes);
    }
    return to;
}

/* --- turns -------------------------------------------------------------------------------------
 */

static void sim_effect(struct world *world, uint32_t process, const struct effect *effect) {
    switch (effect->kind) {
    case EFFECT_STREAM_OPEN: sim_stream_open(world, process, effect); break;
    case EFFECT_STREAM_SEND: sim_stream_send(world, process, effect); break;
    case EFFECT_STREAM_CLOSE: sim_stream_close(world, process, effect); break;
    case EFFECT_TOKENIZE: sim_tokenize(world, process, effect); break;
    case EFFECT_DELIVER: sim_deliver(world, process, effect); break;
    case EFFECT_CHOICE: sim_choice(world, effect); break;
    case EFFECT_ANSWER: sim_answer(world, process, effect); break;
    case EFFECT_STEP: sim_step(world, process, effect->u.plan); break;
    case EFFECT_STEP_ABANDON: sim_abandon(world, process, effect->u.abandon.number); break;
    case EFFECT_LINK_ARM: sim_arm(world, process, effect); break;
    case EFFECT_LINK_DISARM: sim_disarm_soon(world, process, effect); break;
    case EFFECT_LINK_CONNECT: sim_link_connect(world, process, effect); break;
    case EFFECT_LINK_SEND: sim_link_send(world, process, effect); break;
    case EFFECT_LINK_CLOSE: sim_link_close(world, process, effect->u.link_close.peer); break;
    case EFFECT_NOTE: break;
    case EFFECT_EXIT: world->processes[process].is_leaving = true; break;
    }
}

static int64_t sim_clock_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (int64_t)now.tv_sec * SECOND + now.tv_nsec;
}

/* One step of one core; its next deadline. */
static struct instant sim_core_step(struct world *world, struct process *p,
                                    const struct event *event) {
    struct instant now = {world->now};
    int64_t start = world->options.is_timed ? sim_clock_ns() : 0;
    struct instant next = {0};
    if (p->role == ROLE_ROUTER) {
        router_core_step(p->core, event, now, &world->effects);
        next = router_core_deadline(p->core);
    } else if (p->role == ROLE_DECODE) {
        decode_core_step(p->core, event, now, &world->effects);
        next = decode_core_deadline(p->core);
    } else {
        prefill_core_step(p->core, event, now, &world->effects);
        next = prefill_core_deadline(p->core);
    }
    if (world->options.is_timed) {
        struct sim_cost *cost = &world->result.cost[p->role];
        int64_t took = sim_clock_ns() - start;
        cost->turns++;
        if (event->kind != EVENT_TICK) {
            cost->ns += took;
        } else {
            cost->tick_ns += took;
            cost->worst_tick_ns = took > cost->worst_tick_ns ? took : cost->worst_tick_ns;
        }
    }
    return next;
}

void sim_turn(struct world *world, uint32_t process, const struct event *event) {
    struct process *p = &world->processes[process];
    sim_trace_event(world, process, event);
    world->result.events++;
    struct instant next = sim_core_step(world, p, event);
    sim_trace_effects(world);
    uint32_t live = sim_node_of(p)->ledger.live;
    if (p->role == ROLE_DECODE && live > world->result.peak_live) {
        world->result.peak_live = live;
    }
    bool is_idle = event->kind == EVENT_TICK && live == 0 && world->effects.count == 0;
    uint32_t every = world->options.verify_every;
    if (every <= 1 && !is_idle) {
        sim_verify(p);
        sim_after(world, process, event);
    } else if (every > 1 && world->result.events % every == 0) {
        sim_verify(p);
    }
    for (uint32_t i = 0; i < world->effects.count; i++) {
        sim_effect(world, process, &world->effects.items[i]);
    }
    if (p->role != ROLE_ROUTER) {
        sim_poison(world, p);
    }
    if (p->is_leaving) {
        SIM_CHECK(world, sim_node_of(p)->ledger.live == 0, "a drained process left with entries");
        sim_crash(world, process);
        return;
    }
    if (next.ns < p->next_tick || p->next_tick <= world->now) {
        p->next_tick = next.ns;
        (void)sim_schedule(world, SIM_TICK, next.ns, process);
    }
    /* A turn of an idle process differs from the one before in nothing. */
    if (event->kind == EVENT_TICK && world->effects.count == 0) {
        return;
    }
    if (sim_strikes(world, FAULT_TURN_PAUSE)) {
        sim_pause(world, process, world->now + sim_time(world, process, 4 * SECOND));
    }
    if (sim_strikes(world, FAULT_TURN_CRASH)) {
        sim_crash(world, process);
    }
}

bool sim_is_stale(const struct world *world, const struct sim_event *event) {
    if (event->process >= SIM_PROCESSES) {
        return false;
    }
    const struct process *p = &world->processes[event->process];
    if (!p->is_alive || event->generation != p->generation) {
        return true;
    }
    if (event->connection >= 0 && event->event.kind != EVENT_STREAM_ENDED) {
        return world->connections[event->connection].is_broken;
    }
    return false;
}

void sim_handle(struct world *world, struct sim_event *event) {
    switch (event->kind) {
    case SIM_CORE:
        sim_turn(world, event->process, &event->event);
        if (event->is_last) {
            sim_break(world, &world->connections[event->connection]);
        }
        break;
    case SIM_TICK:
        event->event.kind = EVENT_TICK;
        sim_turn(world, event->process, &event->event);
        break;
    case SIM_LAYER: sim_layer(world, event); break;
    case SIM_STEP: sim_step_done(world, event); break;
    case SIM_READ: sim_read(world, event); break;
    case SIM_DATA: sim_data(world, event); break;
    case SIM_DISARM: sim_disarm(world, event); break;
    case SIM_CLIENT: sim_client(world); break;
    case SIM_LEAVE: sim_leave(world, event); break;
    case SIM_FAULT: sim_timed(world, (enum fault)event->number); break;
    case SIM_RESTART: sim_restart(world); break;
    case SIM_LEASE: sim_lease(world, event); break;
    case SIM_RELIST: sim_relist(world); break;
    case SIM_RESUME: break;
    }
}

/* --- the run -----------------------------------------------------------------------------------
 */

/* Live entries over all processes. */
static uint32_t sim_live(struct world *world) {
    uint32_t live = 0;
    for (uint32_t i = 0; i < world->process_count; i++) {
        struct process *p = &world->processes[i];
        live += p->is_alive ? sim_node_of(p)->ledger.live : 1; /* still to be restarted */
    }
    return live;
}

/* When the last pause and the last silence are over: neither is cut short, or order would break. */
static int64_t sim_last_fault(const struct world *world) {
    int64_t last = world->now;
    last = world->etcd_down_until > last ? world->etcd_down_until : last;
    for (uint32_t i = 0; i < world->process_count; i++) {
        int64_t until = world->processes[i].paused_until;
        last = until > last ? until : last;
        for (uint32_t j = 0; j < world->process_count; j++) {
            last = world->cut_until[i][j] > last ? world->cut_until[i][j] : last;
        }
    }
    for (uint32_t i = 0; i < world->connection_count; i++) {
        int64_t until = world->connections[i].stalled_until;
        last = until > last ? until : last;
    }
    return last;
}

static void sim_settle(struct world *world) {
    world->is_settling = true;
    TRACE(world, "faults off, %u clients open", world->clients_open);
    (void)sim_schedule(world, SIM_RESTART, world->now + MS, NOBODY);
    int64_t listed = world->etcd_down_until > world->now ? world->etcd_down_until : world->now;
    (void)sim_schedule(world, SIM_RELIST, listed + 10 * MS, NOBODY);
}

static void sim_set_up_layout(struct world *world) {
    /* No K and V anywhere: compressed rows, with a separate index cache in one layer only. */
    static const struct kv_component components[SIM_COMPONENTS] = {
        {"latent", 0, 1, 1152, KV_DTYPE_BF16, KV_LIFETIME_PAGE},
        {"latent", 1, 1, 656, KV_DTYPE_U8, KV_LIFETIME_PAGE},
        {"index_k", 1, 1, 132, KV_DTYPE_U8, KV_LIFETIME_PAGE},
        {"state", 1, 1, 12, KV_DTYPE_F32, KV_LIFETIME_PAGE}};
    world->layout.page_tokens = world->knobs.page_tokens;
    world->layout.component_count = SIM_COMPONENTS;
    memcpy(world->layout.components, components, sizeof components);
    CHECK(layout_complete(&world->layout) == STATUS_OK);
    CHECK(world->layout.layer_count == SIM_LAYERS);
}

static void sim_set_up(struct world *world) {
    const struct schedule *schedule = world->schedule;
    world->knobs = world->options.knobs != NULL ? *world->options.knobs : sim_knobs(schedule);
    world->chance.state = mix64(schedule->seed);
    world->next_odd = 1;
    world->arrivals_last = UINT32_MAX;
    if (schedule->is_listed) {
        world->arrivals_last = 0;
        for (uint32_t i = 0; i < schedule->count; i++) {
            if (schedule->list[i].fault == FAULT_CLIENT) {
                world->arrivals_last = schedule->list[i].index;
            }
        }
    }
    sim_set_up_layout(world);
    const struct knobs *knobs = &world->knobs;
    for (uint32_t i = 0; i < knobs->routers + knobs->prefills + knobs->decodes; i++) {
        world->processes[i].role = i < knobs->routers                     ? ROLE_ROUTER
                                   : i < knobs->routers + knobs->prefills ? ROLE_PREFILL
                                                                          : ROLE_DECODE;
        world->process_count++;
    }
    for (uint32_t i = 0; i < world->process_count; i++) {
        sim_start(world, i);
    }
    (void)sim_schedule(world, SIM_CLIENT, 200 * MS, NOBODY);
    sim_timed_start(world);
}

static void sim_check_hook(const char *file, int line, const char *what) {
    struct world *world = sim_current;
    if (world == NULL) {
        return;
    }
    world->violation = "a CHECK of a core failed (printed above)";
    if (world->options.sentence != NULL) {
        const char *name = strrchr(file, '/');
        (void)snprintf(world->options.sentence, SIM_SENTENCE_MAX, "CHECK at %s:%d: %s",
                       name == NULL ? file : name + 1, line, what);
        world->violation = world->options.sentence;
    }
    TRACE(world, "VIOLATION: %s", world->violation);
    longjmp(sim_escape, 1);
}

/* Where the run stands after all faults. */
struct ending {
    int64_t settle_at; /* then no fault is left */
    int64_t done_at;   /* then the last client had its answer */
    int64_t empty_at;  /* then no process had an entry */
};

/* True when the run is over. */
static bool sim_wind_down(struct world *world, struct ending *end) {
    if (!world->is_settling) {
        if (world->arrivals < world->knobs.clients) {
            return false;
        }
        end->settle_at = end->settle_at == 0 ? world->now + 5 * SECOND : end->settle_at;
        if (world->now >= end->settle_at) {
            sim_settle(world);
            end->settle_at = sim_last_fault(world);
        }
        return false;
    }
    int64_t patience = world->knobs.is_quiet || world->is_probing ? 310 * SECOND : 90 * SECOND;
    SIM_CHECK(world, world->clients_open == 0 || world->now < end->settle_at + patience,
              "a request did not end within its deadline after the last fault: wedged");
    if (world->clients_open > 0 || world->now < end->settle_at) {
        return false;
    }
    if (end->done_at == 0) {
        end->done_at = world->now;
    }
    int64_t closed = world->answered_until > end->done_at ? world->answered_until : end->done_at;
    if (sim_live(world) > 0) {
        /* The lease, and a step of ten seconds that began before it ended. */
        SIM_CHECK(world, world->now < closed + 20 * SECOND,
                  "entries are left although every client is gone: an orphan");
        end->empty_at = 0;
        return false;
    }
    end->empty_at = end->empty_at == 0 ? world->now : end->empty_at;
    if (world->is_probing) {
        bool is_agreed = sim_views_agree(world);
        SIM_CHECK(world, is_agreed || world->now < closed + 20 * SECOND,
                  "a router's view of a prefix index is not what that index is");
        return is_agreed;
    }
    /* The last half-open stream has ended too before anybody asks again. */
    if (world->now < closed + 8 * SECOND) {
        return false;
    }
    world->result.drained_ns = end->empty_at > closed ? end->empty_at - closed : 0;
    world->is_probing = true;
    end->settle_at = world->now;
    end->done_at = 0;
    sim_probe(world);
    return false;
}

static void sim_loop(struct world *world) {
    struct ending end = {0};
    while (world->queue.count > 0) {
        struct queue_item item = queue_pop(&world->queue);
        struct sim_event *event = item.payload;
        world->now = item.at_ns > world->now ? item.at_ns : world->now;
        if (sim_is_stale(world, event)) {
            sim_free(event);
            continue;
        }
        if (event->kind == SIM_RESUME) {
            sim_resume(world, event->process);
        } else if (sim_hold(world, event)) {
            continue;
        } else {
            sim_handle(world, event);
        }
        sim_free(event);
        if (sim_wind_down(world, &end)) {
            return;
        }
    }
}

static void sim_count_cache(struct world *world, const struct pages *pages,
                            const struct publisher *publisher) {
    world->result.prompt_tokens += pages->query_tokens_total;
    world->result.hit_tokens += pages->hit_tokens_total;
    world->result.blocks_told += publisher->blocks_sent;
    world->result.blocks_walks += publisher->walks;
}

static void sim_count(struct world *world) {
    world->result.virtual_ns = world->now;
    for (uint32_t i = 0; i < world->process_count; i++) {
        const struct process *p = &world->processes[i];
        if (p->role == ROLE_ROUTER) {
            const struct router_core *core = p->core;
            for (uint32_t c = 0; c < CAUSE_COUNT; c++) {
                world->result.retries += core->stats.retries[c];
            }
            world->result.resumes += core->stats.resumes_ok;
            world->result.blocks_forgotten += core->blocks.forgotten_total;
            world->result.local += core->stats.one_leg;
        } else if (p->role == ROLE_DECODE) {
            const struct decode_core *core = p->core;
            world->result.commits += core->commits;
            SIM_CHECK(world, core->pages.owned == 0, "I4: pages owned at rest");
            sim_count_cache(world, &core->pages, &core->publisher);
        } else {
            const struct prefill_core *core = p->core;
            SIM_CHECK(world, core->pages.owned == 0, "I4: pages owned at rest");
            sim_count_cache(world, &core->pages, &core->publisher);
        }
    }
}

static void sim_tear_down(struct world *world) {
    while (world->queue.count > 0) {
        sim_free(queue_pop(&world->queue).payload);
    }
    for (uint32_t i = 0; i < world->process_count; i++) {
        sim_stop(world, i);
    }
    queue_fini(&world->queue);
    free(world->connections);
    free(world->clients);
}

const char *sim_run(const struct schedule *schedule, const struct sim_options *options,
                    struct sim_result *result_out) {
    struct world *world = calloc(1, sizeof *world);
    CHECK(world != NULL);
    world->schedule = schedule;
    world->options = *options;
    world->trace = options->trace;
    sim_current = world;
    check_set_hook(sim_check_hook);
    if (setjmp(sim_escape) == 0) {
        sim_set_up(world);
        sim_loop(world);
        sim_count(world);
    }
    check_set_hook(NULL);
    sim_current = NULL;
    const char *violation = world->violation;
    sim_tear_down(world);
    *result_out = world->result;
    free(world);
    return violation;
}
