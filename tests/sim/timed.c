/* Faults at moments that the seed draws: each moment's target and length depend on its number. */
#include "sim/state.h"

/* The time of the next one; its draw is that of the next index. */
static void sim_timed_next(struct world *world, enum fault fault) {
    int64_t every = world->knobs.every_ns[fault];
    if (every == 0 || world->is_settling) {
        return;
    }
    struct prng draw = fault_draw(world->schedule->seed, fault, world->result.opportunities[fault]);
    int64_t wait = (int64_t)((uint64_t)every * (1 + prng_below(&draw, 2000)) / 1000);
    sim_schedule(world, SIM_FAULT, world->now + wait, NOBODY)->number = fault;
}

void sim_timed_start(struct world *world) {
    for (uint32_t i = FAULT_TIMED_FIRST; i < FAULT_COUNT; i++) {
        sim_timed_next(world, (enum fault)i);
    }
}

static struct connection *sim_timed_stream(struct world *world, struct prng *draw) {
    if (world->connection_count == 0) {
        return NULL;
    }
    uint32_t recent = world->connection_count < 24 ? world->connection_count : 24;
    return &world->connections[world->connection_count - 1 - prng_below(draw, recent)];
}

static void sim_stream_fault(struct world *world, enum fault fault, struct prng *draw) {
    struct connection *c = sim_timed_stream(world, draw);
    if (c == NULL || c->is_broken) {
        return;
    }
    TRACE(world, "FAULT %s %u-%u", fault_name(fault), c->process[0], c->process[1]);
    if (fault == FAULT_BREAK) {
        sim_break(world, c);
    } else if (fault == FAULT_STALL) {
        int64_t until = world->now + (int64_t)prng_below(draw, 8000) * MS;
        c->stalled_until = until > c->stalled_until ? until : c->stalled_until;
    } else {
        c->is_deaf[prng_below(draw, 2)] = true;
    }
}

static void sim_partition(struct world *world, struct prng *draw) {
    uint32_t a = prng_below(draw, world->process_count);
    uint32_t b = prng_below(draw, world->process_count);
    bool is_both = prng_below(draw, 2) == 0;
    int64_t until = world->now + (int64_t)prng_below(draw, 15000) * MS;
    if (a == b) {
        return;
    }
    TRACE(world, "FAULT partition %u %s %u until %.3f", a, is_both ? "<->" : "->", b,
          (double)until / 1e9);
    world->cut_until[a][b] = until > world->cut_until[a][b] ? until : world->cut_until[a][b];
    if (is_both) {
        world->cut_until[b][a] = until > world->cut_until[b][a] ? until : world->cut_until[b][a];
    }
}

static void sim_etcd_fault(struct world *world, enum fault fault, struct prng *draw) {
    int64_t back = world->now + (int64_t)(100 + prng_below(draw, 1000)) * MS;
    if (fault == FAULT_ETCD_OUTAGE) {
        back = world->now + (int64_t)(1000 + prng_below(draw, 20000)) * MS;
    }
    TRACE(world, "FAULT %s until %.3f", fault_name(fault), (double)back / 1e9);
    if (fault == FAULT_ETCD_OUTAGE) {
        world->etcd_down_until = back;
    }
    uint32_t only = prng_below(draw, world->process_count);
    for (uint32_t i = 0; fault != FAULT_ETCD_OUTAGE && i < world->process_count; i++) {
        if (world->processes[i].role != ROLE_ROUTER && world->processes[i].is_alive &&
            (fault == FAULT_ETCD_WIPE || i == only)) {
            sim_announce(world, i, false);
        }
    }
    (void)sim_schedule(world, SIM_RELIST, back + MS, NOBODY);
}

void sim_timed(struct world *world, enum fault fault) {
    if (world->is_settling) {
        return;
    }
    uint32_t index = world->result.opportunities[fault];
    struct prng draw = fault_draw(world->schedule->seed, fault, index);
    (void)prng_next(&draw);
    (void)prng_next(&draw);
    uint32_t process = prng_below(&draw, world->process_count);
    bool strikes = sim_strikes(world, fault);
    sim_timed_next(world, fault);
    if (!strikes) {
        return;
    }
    struct process *p = &world->processes[process];
    if (fault == FAULT_BREAK || fault == FAULT_STALL || fault == FAULT_DEAF) {
        sim_stream_fault(world, fault, &draw);
    } else if (fault == FAULT_PARTITION) {
        sim_partition(world, &draw);
    } else if (fault == FAULT_FLOOD) {
        sim_flood(world, index);
    } else if (fault == FAULT_ETCD_WIPE || fault == FAULT_ETCD_OUTAGE ||
               fault == FAULT_ETCD_LEASE) {
        sim_etcd_fault(world, fault, &draw);
    } else if (!p->is_alive) {
        return;
    } else if (fault == FAULT_CRASH) {
        TRACE(world, "FAULT crash %s-%u", role_name(p->role), process);
        sim_crash(world, process);
    } else if (fault == FAULT_PAUSE) {
        sim_pause(world, process, world->now + (int64_t)prng_below(&draw, 12000) * MS);
    } else if (fault == FAULT_DRAIN && p->role != ROLE_ROUTER) {
        TRACE(world, "FAULT drain %s-%u", role_name(p->role), process);
        struct sim_event *drain = sim_schedule(world, SIM_CORE, world->now + MS, process);
        drain->event.kind = EVENT_DRAIN;
        drain->event.u.drain.grace = span_ms(1 + prng_below(&draw, 5000));
    }
}
