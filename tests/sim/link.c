/* The KV link: D's handler copies chunks into its own pages; P's sends end by completion or close.
 * As measured of UCX: a completed send says nothing about delivery, the error callback may come
 * before or after the completions, and a stopped peer is silent. */
#include <stdlib.h>
#include <string.h>

#include "sim/state.h"

/* --- receiver ----------------------------------------------------------------------------------
 */

void sim_arm(struct world *world, uint32_t process, const struct effect *effect) {
    struct process *p = &world->processes[process];
    struct arm *arm = &p->arms[pool_index(effect->u.arm.slot.v)];
    SIM_CHECK(world, arm->slot == 0, "a slot was armed twice");
    if (sim_strikes(world, FAULT_ARM)) {
        struct sim_event *bad = sim_post(world, process, LANE_LINK, EVENT_LINK_BAD, world->now);
        bad->event.u.link.slot = effect->u.arm.slot;
        bad->event.u.link.cause = CAUSE_BAD_CHUNK;
        return;
    }
    *arm = (struct arm){.slot = effect->u.arm.slot.v,
                        .key = effect->u.arm.key,
                        .first = effect->u.arm.token_first,
                        .end = effect->u.arm.token_end};
    arm->pages = sim_copy(effect->u.arm.pages, effect->u.arm.page_count * sizeof(uint32_t));
    arm->covered = calloc((uint64_t)SIM_COMPONENTS * (arm->end + 1), 1);
    CHECK(arm->covered != NULL);
}

void sim_disarm_soon(struct world *world, uint32_t process, const struct effect *effect) {
    int64_t at = world->now + sim_time(world, process, MS / 10);
    if (sim_strikes(world, FAULT_DISARM_LATE)) {
        at += sim_time(world, process, 500 * MS);
    }
    sim_schedule(world, SIM_DISARM, at, process)->slot = effect->u.disarm.slot.v;
}

void sim_disarm(struct world *world, struct sim_event *event) {
    struct process *p = &world->processes[event->process];
    struct arm *arm = &p->arms[pool_index(event->slot)];
    SIM_CHECK(world, arm->slot == event->slot || arm->slot == 0,
              "a slot was disarmed that is not armed");
    free(arm->pages);
    free(arm->covered);
    memset(arm, 0, sizeof *arm);
    sim_post(world, event->process, LANE_LINK, EVENT_LINK_DISARMED, world->now + MS / 50)
        ->event.u.link.slot.v = event->slot;
}

/* Copies what is missing; what is damaged lands too, and is not counted as covered. */
static void sim_data_copy(struct world *world, struct process *p, struct arm *arm,
                          const struct sim_event *event) {
    for (uint32_t c = 0; c < event->component_count; c++) {
        for (uint32_t k = 0; k < event->token_count; k++) {
            uint32_t token = event->token_first + k;
            uint8_t *covered = &arm->covered[(event->component_first + c) * (arm->end + 1) + token];
            if (*covered != 0) {
                continue;
            }
            sim_check_writable(world, p, arm->pages[token / world->knobs.page_tokens]);
            uint64_t value = event->values[c * event->token_count + k];
            *sim_kv(world, p, arm->pages, event->component_first + c, token) =
                event->is_bad ? value ^ 0xbad : value;
            if (!event->is_bad) {
                *covered = 1;
                arm->bytes += world->layout.components[event->component_first + c].row_bytes;
            }
        }
    }
}

void sim_data(struct world *world, struct sim_event *event) {
    struct process *p = &world->processes[event->process];
    uint32_t index = pool_index(event->slot);
    if (index >= world->knobs.entries_max) {
        return;
    }
    struct arm *arm = &p->arms[index];
    if (arm->slot != event->slot || arm->key != event->key || arm->is_bad ||
        event->token_first < arm->first || event->token_first + event->token_count > arm->end) {
        return; /* dropped */
    }
    /* I1, seen from outside: we only write where the core says the slot is alive. */
    const struct decode_core *core = p->core;
    SIM_CHECK(world, core->entries[index].id == event->slot,
              "I1: the link writes for a slot whose pages were freed");
    sim_data_copy(world, p, arm, event);
    uint64_t whole = layout_range_bytes(&world->layout, 0, SIM_COMPONENTS, arm->end - arm->first);
    enum event_kind kind = event->is_bad         ? EVENT_LINK_BAD
                           : arm->bytes == whole ? EVENT_LINK_COVERED
                                                 : EVENT_LINK_PROGRESS;
    arm->is_bad = event->is_bad;
    struct sim_event *post = sim_post(world, event->process, LANE_LINK, kind, world->now + MS / 50);
    post->event.u.link.slot.v = event->slot;
    post->event.u.link.bytes = arm->bytes;
    post->event.u.link.cause = CAUSE_BAD_CHUNK;
}

/* --- sender ------------------------------------------------------------------------------------
 */

static struct link_peer *sim_link_peer(struct process *p, uint64_t peer) {
    for (uint32_t i = 0; i < p->peer_count; i++) {
        if (p->peers[i].peer == peer) {
            return &p->peers[i];
        }
    }
    return NULL;
}

static void sim_sent(struct world *world, uint32_t process, uint64_t op, enum status status,
                     int64_t at) {
    struct sim_event *post = sim_post(world, process, LANE_LINK, EVENT_LINK_SENT, at);
    post->event.u.sent.op = op;
    post->event.u.sent.status = status;
}

static void sim_link_failed(struct world *world, uint32_t process, uint64_t peer, int64_t at) {
    sim_post(world, process, LANE_LINK, EVENT_LINK_FAILED, at)->event.u.peer.peer = peer;
}

void sim_link_connect(struct world *world, uint32_t process, const struct effect *effect) {
    struct process *p = &world->processes[process];
    struct link_peer *peer = &p->peers[p->peer_count++];
    CHECK(p->peer_count <= 256 && effect->u.connect.address_len == ADDRESS_OF);
    *peer = (struct link_peer){.peer = effect->u.connect.peer};
    memcpy(&peer->process, effect->u.connect.address, 4);
    memcpy(&peer->generation, effect->u.connect.address + 4, 4);
    if (sim_strikes(world, FAULT_CONNECT)) {
        peer->is_failed = true;
        sim_link_failed(world, process, peer->peer, world->now + MS / 10);
    }
}

void sim_link_send(struct world *world, uint32_t process, const struct effect *effect) {
    struct process *p = &world->processes[process];
    struct link_peer *peer = sim_link_peer(p, effect->u.send.peer);
    SIM_CHECK(world, peer != NULL && !peer->is_closed, "a send to a peer that is not connected");
    if (peer->is_failed || sim_strikes(world, FAULT_LINK_BUSY)) {
        sim_sent(world, process, effect->u.send.op,
                 peer->is_failed ? STATUS_UNAVAILABLE : STATUS_BUSY, world->now + MS / 10);
        return;
    }
    if (p->op_count == p->op_capacity) {
        p->op_capacity = p->op_capacity * 2 + 16;
        p->ops = realloc(p->ops, p->op_capacity * sizeof *p->ops);
        CHECK(p->ops != NULL);
    }
    p->ops[p->op_count] = (struct link_op){effect->u.send.op, effect->u.send.peer, true};
    struct sim_event *read = sim_schedule(
        world, SIM_READ, world->now + sim_time(world, process, world->knobs.delay_ns), process);
    read->number = p->op_count++;
    read->slot = effect->u.send.slot.v;
    read->key = effect->u.send.key;
    read->peer = effect->u.send.peer;
    read->component_first = effect->u.send.component_first;
    read->component_count = effect->u.send.component_count;
    read->token_first = effect->u.send.token_first;
    read->token_count = effect->u.send.token_count;
    read->pages = sim_copy(effect->u.send.pages, effect->u.send.page_count * sizeof(uint32_t));
    /* What is in the pages now is what must still be there when the link reads them. */
    uint64_t cells = (uint64_t)read->component_count * read->token_count;
    read->values = malloc(cells * sizeof(uint64_t) + 1);
    CHECK(read->values != NULL);
    for (uint32_t c = 0; c < read->component_count; c++) {
        for (uint32_t k = 0; k < read->token_count; k++) {
            read->values[c * read->token_count + k] =
                *sim_kv(world, p, read->pages, read->component_first + c, read->token_first + k);
        }
    }
}

static void sim_transmit(struct world *world, const struct sim_event *read, uint32_t target,
                         uint32_t first, uint32_t count, int64_t after) {
    int64_t at = (after > world->now ? after : world->now) +
                 sim_time(world, read->process, world->knobs.delay_ns);
    if (sim_strikes(world, FAULT_CHUNK_LATE)) {
        at += sim_time(world, read->process, 3 * SECOND);
    }
    struct sim_event *data = sim_schedule(world, SIM_DATA, at, target);
    data->slot = read->slot;
    data->key = read->key;
    data->component_first = read->component_first;
    data->component_count = read->component_count;
    data->token_first = read->token_first + first;
    data->token_count = count;
    data->is_bad = sim_strikes(world, FAULT_CHUNK_BAD);
    data->values = malloc((uint64_t)read->component_count * count * sizeof(uint64_t) + 1);
    CHECK(data->values != NULL);
    for (uint32_t c = 0; c < read->component_count; c++) {
        memcpy(data->values + c * count, read->values + c * read->token_count + first,
               count * sizeof(uint64_t));
    }
}

/* The peer is gone, stopped or cut off: an error now, silence, or success without delivery. */
static void sim_read_unheard(struct world *world, const struct sim_event *read, struct link_op *op,
                             const struct link_peer *peer, bool is_there) {
    if (!sim_coin(world, read->process)) {
        return; /* hangs until its endpoint is closed */
    }
    op->is_open = false;
    if (!is_there) {
        sim_sent(world, read->process, op->op, STATUS_UNAVAILABLE, world->now + MS);
        sim_link_failed(world, read->process, read->peer, world->now + MS);
        return;
    }
    /* Buffers take it: completes although nobody has read it, and arrives after the thaw. */
    sim_transmit(world, read, peer->process, 0, read->token_count,
                 sim_cut_until(world, read->process, peer->process));
    sim_sent(world, read->process, op->op, STATUS_OK, world->now + MS);
}

static bool sim_read_fails(struct world *world, const struct sim_event *read, struct link_op *op) {
    if (sim_strikes(world, FAULT_LINK_HANGS)) {
        return true;
    }
    bool is_first = sim_strikes(world, FAULT_LINK_ERROR_FIRST);
    if (!is_first && !sim_strikes(world, FAULT_LINK_ERROR)) {
        return false;
    }
    op->is_open = false;
    if (is_first) {
        sim_link_failed(world, read->process, read->peer, world->now + MS);
    }
    sim_sent(world, read->process, op->op, STATUS_UNAVAILABLE, world->now + 2 * MS);
    if (!is_first) {
        sim_link_failed(world, read->process, read->peer, world->now + 3 * MS);
    }
    return true;
}

void sim_read(struct world *world, struct sim_event *read) {
    struct process *p = &world->processes[read->process];
    struct link_op *op = &p->ops[read->number];
    if (!op->is_open) {
        return; /* the endpoint was closed: its end was told already */
    }
    for (uint32_t c = 0; c < read->component_count; c++) {
        for (uint32_t k = 0; k < read->token_count; k++) {
            SIM_CHECK(world,
                      *sim_kv(world, p, read->pages, read->component_first + c,
                              read->token_first + k) == read->values[c * read->token_count + k],
                      "I1: a page changed under a running send");
        }
    }
    const struct link_peer *peer = sim_link_peer(p, read->peer);
    if (peer == NULL) {
        sim_fail(world, "a send to a peer that is not connected");
    }
    const struct process *target = &world->processes[peer->process];
    bool is_there = target->is_alive && target->generation == peer->generation;
    bool is_heard = is_there && target->paused_until <= world->now &&
                    sim_cut_until(world, read->process, peer->process) <= world->now;
    if (!is_heard) {
        sim_read_unheard(world, read, op, peer, is_there);
        return;
    }
    if (sim_read_fails(world, read, op)) {
        return;
    }
    op->is_open = false;
    uint32_t cut = (uint32_t)(sim_time(world, read->process, MS) % (read->token_count + 1));
    for (uint32_t part = 0; part < 2; part++) {
        uint32_t first = part == 0 ? 0 : cut;
        uint32_t count = part == 0 ? cut : read->token_count - cut;
        if (count == 0 || sim_strikes(world, FAULT_CHUNK_LOST)) {
            continue;
        }
        sim_transmit(world, read, peer->process, first, count, 0);
        if (sim_strikes(world, FAULT_CHUNK_TWICE)) {
            sim_transmit(world, read, peer->process, first, count, 0);
        }
    }
    sim_sent(world, read->process, op->op, STATUS_OK,
             world->now + sim_time(world, read->process, world->knobs.delay_ns / 2 + 1));
}

void sim_link_close(struct world *world, uint32_t process, uint64_t peer_id) {
    struct process *p = &world->processes[process];
    struct link_peer *peer = sim_link_peer(p, peer_id);
    SIM_CHECK(world, peer != NULL && !peer->is_closed, "a peer was closed twice");
    peer->is_closed = true;
    int64_t at = world->now + MS;
    if (sim_strikes(world, FAULT_CLOSE_LATE)) {
        at += sim_time(world, process, 500 * MS);
    }
    for (uint32_t i = 0; i < p->op_count; i++) {
        if (p->ops[i].is_open && p->ops[i].peer == peer_id) {
            p->ops[i].is_open = false;
            sim_sent(world, process, p->ops[i].op, STATUS_CANCELLED, at);
        }
    }
    sim_post(world, process, LANE_LINK, EVENT_LINK_CLOSED, at + MS)->event.u.peer.peer = peer_id;
}
