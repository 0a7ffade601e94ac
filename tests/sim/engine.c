/* The engine: KV is memory, and a token is drawn from all rows before it. */
#include <stdlib.h>
#include <string.h>

#include "sim/state.h"

uint64_t *sim_kv(struct world *world, struct process *p, const uint32_t *pages, uint32_t component,
                 uint32_t position) {
    uint32_t page = pages[position / world->knobs.page_tokens];
    CHECK(page < p->page_count);
    return &p->kv[((uint64_t)page * SIM_COMPONENTS + component) * world->knobs.page_tokens +
                  position % world->knobs.page_tokens];
}

static const struct pages *sim_pages(const struct process *p) {
    return p->role == ROLE_DECODE ? &((struct decode_core *)p->core)->pages
                                  : &((struct prefill_core *)p->core)->pages;
}

void sim_check_writable(struct world *world, struct process *p, uint32_t page) {
    const struct page *state = &sim_pages(p)->table[page];
    SIM_CHECK(world, state->references > 0, "I1: a page that nobody owns is written");
    SIM_CHECK(world, state->references == 1 && !state->is_indexed,
              "I12: a page that others read, or the prefix index holds, is written");
}

void sim_drop_plan(struct process *p) {
    free((void *)(uintptr_t)p->plan.rows);
    free((void *)(uintptr_t)p->plan.tokens);
    free((void *)(uintptr_t)p->plan.pages);
    memset(&p->plan, 0, sizeof p->plan);
}

/* What the sampling of a row comes down to here. */
struct sim_wish {
    uint64_t seed;
    uint32_t logprobs;
};

void sim_step(struct world *world, uint32_t process, const struct step_plan *plan) {
    struct process *p = &world->processes[process];
    SIM_CHECK(world, !p->is_stepping, "I11: two engine steps outstanding");
    SIM_CHECK(world, plan->number == p->last_plan + 1, "I11: step plans are not numbered in order");
    p->last_plan = plan->number;
    p->is_stepping = true;
    p->is_step_failing = sim_strikes(world, FAULT_STEP);
    p->plan = *plan;
    p->plan.rows = sim_copy(plan->rows, plan->row_count * sizeof *plan->rows);
    p->plan.tokens = sim_copy(plan->tokens, plan->token_count * sizeof(uint32_t));
    p->plan.pages = sim_copy(plan->pages, plan->page_count * sizeof(uint32_t));
    int64_t length = sim_time(world, process, world->knobs.step_ns);
    if (sim_strikes(world, FAULT_STEP_SLOW)) {
        length += sim_time(world, process, 3 * SECOND);
    }
    for (uint32_t layer = 0; layer < SIM_LAYERS; layer++) {
        struct sim_event *event = sim_schedule(
            world, SIM_LAYER, world->now + length * (layer + 1) / (SIM_LAYERS + 1), process);
        event->layer = layer;
        event->number = plan->number;
    }
    struct sim_event *done = sim_schedule(world, SIM_STEP, world->now + length, process);
    done->number = plan->number;
    done->event.u.step_done.elapsed.ns = length;
    /* Seeds of the rows, while the core's memory is ours to read. */
    struct sim_wish *wishes = malloc((plan->row_count + 1) * sizeof *wishes);
    CHECK(wishes != NULL);
    for (uint32_t i = 0; i < plan->row_count; i++) {
        const struct sampling *sampling = plan->rows[i].sampling;
        wishes[i] = sampling != NULL ? (struct sim_wish){sampling->seed, sampling->logprobs}
                                     : (struct sim_wish){0};
    }
    done->owned = wishes;
    world->result.steps++;
}

/* Sooner now, or it is too late for that. Layers go on until then, and what was to be its end comes
 * to nobody. */
void sim_abandon(struct world *world, uint32_t process, uint64_t number) {
    struct process *p = &world->processes[process];
    SIM_CHECK(world, number == p->last_plan && number != p->last_abandoned,
              "I11: a step is abandoned that is not the last one, or twice");
    p->last_abandoned = number;
    if (p->is_stepping && sim_coin(world, process)) {
        int64_t length = sim_time(world, process, world->knobs.step_ns) / SIM_LAYERS;
        struct sim_event *done = sim_schedule(world, SIM_STEP, world->now + length, process);
        done->number = number;
        done->event.u.step_done.status = STATUS_CANCELLED;
        done->event.u.step_done.elapsed.ns = length;
        world->result.steps_abandoned++;
    }
}

static void sim_layer_row(struct world *world, struct process *p, const struct plan_row *row,
                          uint32_t component) {
    const uint32_t *pages = p->plan.pages + row->page_first;
    uint64_t h = 0;
    if (row->position > 0) {
        h = *sim_kv(world, p, pages, component, row->position - 1) - sim_row(0, component);
    }
    for (uint32_t k = 0; k < row->token_count; k++) {
        uint32_t position = row->position + k;
        if (k == 0 || position % world->knobs.page_tokens == 0) {
            sim_check_writable(world, p, pages[position / world->knobs.page_tokens]);
        }
        h = sim_advance(h, p->plan.tokens[row->token_first + k]);
        *sim_kv(world, p, pages, component, position) = sim_row(h, component);
    }
}

/* False: the step was abandoned, and is over. */
static bool sim_is_running(const struct process *p, uint64_t number) {
    bool is_running = p->is_stepping && p->plan.number == number;
    CHECK(is_running || number <= p->last_abandoned);
    return is_running;
}

/* One layer of every row: KV from the tokens and the KV before them. */
void sim_layer(struct world *world, struct sim_event *event) {
    struct process *p = &world->processes[event->process];
    if (!sim_is_running(p, event->number) || p->is_step_failing) {
        return;
    }
    const uint32_t *first = world->layout.layer_first;
    for (uint32_t i = 0; i < p->plan.row_count; i++) {
        for (uint32_t c = first[event->layer]; c < first[event->layer + 1]; c++) {
            sim_layer_row(world, p, &p->plan.rows[i], c);
        }
    }
    if (p->plan.wants_layers && !sim_strikes(world, FAULT_LAYER)) {
        struct sim_event *post =
            sim_post(world, event->process, LANE_ENGINE, EVENT_LAYER_DONE, world->now + MS / 100);
        post->event.u.layer_done.number = event->number;
        post->event.u.layer_done.layer = event->layer;
    }
}

static void sim_step_logprobs(struct step_result *result, uint64_t attention, uint32_t position,
                              uint32_t wanted) {
    result->logprob = sim_logprob(attention, position, result->token);
    for (uint32_t rank = 0; rank + 1 < wanted; rank++) {
        result->top_tokens[rank] = sim_alternative(attention, rank);
        result->top_logprobs[rank] = sim_logprob(attention, position, result->top_tokens[rank]);
        result->top_count++;
    }
}

void sim_step_done(struct world *world, struct sim_event *event) {
    struct process *p = &world->processes[event->process];
    if (!sim_is_running(p, event->number)) {
        return;
    }
    enum status status = p->is_step_failing ? STATUS_INTERNAL : event->event.u.step_done.status;
    struct sim_event *post =
        sim_post(world, event->process, LANE_ENGINE, EVENT_STEP_DONE, world->now + MS / 100);
    const struct sim_wish *wishes = event->owned;
    post->results = calloc(p->plan.row_count + 1, sizeof *post->results);
    CHECK(post->results != NULL);
    uint32_t count = 0;
    for (uint32_t i = 0; i < p->plan.row_count && status == STATUS_OK; i++) {
        const struct plan_row *row = &p->plan.rows[i];
        struct step_result *result = &post->results[count++];
        *result = (struct step_result){.entry = row->entry};
        if (row->is_sampled) {
            uint64_t attention = 0;
            uint32_t end = row->position + row->token_count;
            for (uint32_t j = 0; j < end; j++) {
                for (uint32_t c = 0; c < SIM_COMPONENTS; c++) {
                    attention +=
                        sim_attend(*sim_kv(world, p, p->plan.pages + row->page_first, c, j));
                }
            }
            result->token = sim_sample(attention, wishes[i].seed, end);
            sim_step_logprobs(result, attention, end, wishes[i].logprobs);
            result->is_valid = !sim_strikes(world, FAULT_ROW);
        }
    }
    post->event.u.step_done.number = event->number;
    post->event.u.step_done.status = status;
    post->event.u.step_done.results = post->results;
    post->event.u.step_done.count = count;
    post->event.u.step_done.elapsed = event->event.u.step_done.elapsed;
    post->event.u.step_done.ended.ns = world->now;
    p->is_stepping = false;
    sim_drop_plan(p);
}

/* Poison what nobody owns or may reuse: whoever reads it gets wrong tokens. */
void sim_poison(struct world *world, struct process *p) {
    const struct pages *pages = sim_pages(p);
    uint64_t each = (uint64_t)SIM_COMPONENTS * world->knobs.page_tokens;
    uint32_t at = (uint32_t)(p->cursor++ % pages->capacity);
    const struct page *page = &pages->table[at];
    if (page->references == 0 && !page->is_indexed) {
        for (uint64_t i = 0; i < each; i++) {
            p->kv[at * each + i] = mix64(p->cursor * 64 + i);
        }
    }
}
