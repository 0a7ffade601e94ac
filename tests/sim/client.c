/* Clients: what they ask, what they may see, and how they leave. */
#include <stdlib.h>
#include <string.h>

#include "sim/state.h"

#define UNREAD_NS (30 * SECOND) /* the router's bound for a client that does not read */

static void sim_reference(struct choice *choice, uint32_t token) {
    choice->h = sim_advance(choice->h, token);
    for (uint32_t c = 0; c < SIM_COMPONENTS; c++) {
        choice->attention += sim_attend(sim_row(choice->h, c));
    }
}

static struct client *sim_client_take(struct world *world, uint32_t router, uint32_t *index_out) {
    if (world->client_count == world->client_capacity) {
        world->client_capacity = world->client_capacity * 2 + 64;
        world->clients = realloc(world->clients, world->client_capacity * sizeof *world->clients);
        CHECK(world->clients != NULL);
    }
    *index_out = world->client_count++;
    struct client *client = &world->clients[*index_out];
    *client = (struct client){
        .is_used = true, .router = router, .generation = world->processes[router].generation};
    world->clients_open++;
    world->result.requests++;
    return client;
}

/* A few families of prompts share long prefixes. */
static void sim_prompt(const struct world *world, struct client *client, struct prng *draw) {
    struct prng family = {prng_below(draw, 3)};
    client->salt = prng_below(draw, world->knobs.salts);
    uint32_t shared = prng_below(draw, client->prompt_count + 1);
    for (uint32_t i = 0; i < client->prompt_count; i++) {
        uint32_t common = 2 + prng_below(&family, world->knobs.alphabet);
        uint32_t own = 2 + prng_below(draw, world->knobs.alphabet);
        client->prompt[i] = i < shared ? common : own;
        sim_reference(&client->choices[0], client->prompt[i]);
    }
}

/* A quarter of all clients want logprobs, with up to four alternatives; by seed, so that the other
 * draws of a world stay as they are. */
static uint32_t sim_logprobs_wanted(const struct world *world, const struct client *client) {
    if (world->knobs.new_min > 0) {
        return 0; /* what a plain request costs is measured */
    }
    uint64_t mixed = mix64(client->seed ^ 0x6c6f6770726f6273ull);
    return mixed % 4 != 0 ? 0 : 1 + (uint32_t)(mixed >> 32) % 5;
}

/* A sixth of all clients want several answers, as many as a worker could hold together; by seed
 * again. Where nothing may fail there must be places for all of them. */
static uint32_t sim_choices_wanted(const struct world *world, const struct client *client) {
    uint64_t mixed = mix64(client->seed ^ 0x63686f69636573ull);
    bool is_tight = world->knobs.is_quiet || world->schedule->world > 0;
    uint32_t most = is_tight ? 2 : SIM_CHOICES;
    uint32_t wanted = mixed % 6 != 0 ? 1 : 1 + (uint32_t)(mixed >> 32) % most;
    uint32_t held = world->knobs.decode_pages * world->knobs.page_tokens;
    while (wanted > 1 && client->prompt_count + wanted * client->max_tokens > held) {
        wanted--;
    }
    bool is_counted = world->knobs.new_min > 0; /* so many are to be live, neither more nor fewer */
    return client->is_probe || client->is_crowd || is_counted ? 1 : wanted;
}

static void sim_ask(struct world *world, uint32_t index, int64_t deadline_ns) {
    struct client *client = &world->clients[index];
    client->logprobs = sim_logprobs_wanted(world, client);
    client->choice_count = sim_choices_wanted(world, client);
    client->choices[0].last_at = world->now;
    for (uint32_t i = 1; i < client->choice_count; i++) {
        client->choices[i] = client->choices[0];
    }
    struct sim_event *open =
        sim_post(world, client->router, LANE_CLIENTS, EVENT_CLIENT_OPEN, world->now + MS / 10);
    open->event.u.client_open.call.v = index + 1;
    open->event.u.client_open.model = "m";
    open->event.u.client_open.request_label = client->is_abortable ? "abort-me" : "r";
    open->event.u.client_open.session_label = client->is_abortable ? "agent" : "";
    static const char *const salts[] = {"", "tenant-a", "tenant-b"};
    open->event.u.client_open.cache_salt = salts[client->salt];
    open->event.u.client_open.deadline.ns = deadline_ns;
    client->deadline_at = world->now + deadline_ns;
}

static void sim_leave_at(struct world *world, uint32_t index, int64_t at) {
    sim_schedule(world, SIM_LEAVE, at, world->clients[index].router)->number = index;
}

/* How this client misbehaves: each fault at the client's own number. */
static void sim_habits(struct world *world, uint32_t index, uint32_t arrival, struct prng *draw) {
    struct client *client = &world->clients[index];
    int64_t soon = (int64_t)prng_below(draw, 40) * world->knobs.step_ns + MS / 10;
    uint32_t point = 1 + prng_below(draw, client->max_tokens);
    bool is_session = prng_below(draw, 2) == 0;
    int64_t deadline = world->knobs.is_quiet ? 300 * SECOND : 60 * SECOND;
    int64_t hurry = (int64_t)(1 + prng_below(draw, 3000)) * MS;
    if (sim_strikes_at(world, FAULT_STOP, arrival)) {
        client->stop_at = point;
    }
    if (sim_strikes_at(world, FAULT_UNREAD, arrival)) {
        client->unread_at = point;
    }
    if (sim_strikes_at(world, FAULT_DEADLINE, arrival)) {
        deadline = hurry;
    }
    client->is_abortable = sim_strikes_at(world, FAULT_ABORT, arrival);
    sim_ask(world, index, deadline);
    if (sim_strikes_at(world, FAULT_LEAVE, arrival)) {
        sim_leave_at(world, index, world->now + soon);
    } else if (client->is_abortable) {
        struct sim_event *abort =
            sim_post(world, client->router, LANE_CLIENTS, EVENT_CLIENT_ABORT, world->now + MS / 10);
        abort->event.u.client_abort.is_session = is_session;
        abort->event.u.client_abort.label = is_session ? "agent" : "abort-me";
    }
}

void sim_client(struct world *world) {
    if (world->arrivals >= world->knobs.clients || world->arrivals > world->arrivals_last) {
        world->arrivals = world->knobs.clients;
        return;
    }
    uint32_t arrival = world->arrivals++;
    struct prng draw = fault_draw(world->schedule->seed, FAULT_CLIENT, arrival);
    int64_t pause =
        (int64_t)((uint64_t)world->knobs.arrival_ns * (1 + prng_below(&draw, 2000)) / 1000);
    (void)sim_schedule(world, SIM_CLIENT, world->now + pause, NOBODY);
    if (!sim_strikes_at(world, FAULT_CLIENT, arrival)) {
        return;
    }
    uint32_t router = prng_below(&draw, world->knobs.routers);
    if (!world->processes[router].is_alive) {
        return; /* connection refused: no request */
    }
    uint32_t index = 0;
    struct client *client = sim_client_take(world, router, &index);
    client->seed = prng_next(&draw);
    client->prompt_count = 1 + prng_below(&draw, world->knobs.prompt_max);
    client->max_tokens = 1 + prng_below(&draw, world->knobs.new_max);
    if (client->max_tokens < world->knobs.new_min) {
        client->max_tokens = world->knobs.new_min;
    }
    sim_prompt(world, client, &draw);
    sim_habits(world, index, arrival, &draw);
}

/* Hundreds at once, who all leave at once: an agent that is killed. */
void sim_flood(struct world *world, uint32_t index) {
    struct prng draw = fault_draw(world->schedule->seed, FAULT_FLOOD, index);
    (void)prng_next(&draw);
    uint32_t router = prng_below(&draw, world->knobs.routers);
    uint32_t count = 20 + prng_below(&draw, 200);
    int64_t stay = (int64_t)prng_below(&draw, 400) * MS;
    if (!world->processes[router].is_alive) {
        return;
    }
    TRACE(world, "FAULT flood of %u clients at router-%u for %.3f s", count, router,
          (double)stay / 1e9);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = 0;
        struct client *client = sim_client_take(world, router, &at);
        client->is_crowd = true;
        client->seed = prng_next(&draw);
        client->prompt_count = 1 + prng_below(&draw, world->knobs.prompt_max);
        client->max_tokens = 1 + prng_below(&draw, world->knobs.new_max);
        sim_prompt(world, client, &draw);
        sim_ask(world, at, 60 * SECOND);
        sim_leave_at(world, at, world->now + stay);
    }
}

/* After everything: each router must serve again, at once and in full. */
void sim_probe(struct world *world) {
    TRACE(world, "all quiet: is the capacity back?");
    for (uint32_t router = 0; router < world->knobs.routers; router++) {
        for (uint32_t i = 0; i < 3; i++) {
            uint32_t index = 0;
            struct client *client = sim_client_take(world, router, &index);
            struct prng draw = fault_draw(~world->schedule->seed, FAULT_CLIENT, router * 16 + i);
            client->is_probe = true;
            client->seed = prng_next(&draw);
            bool is_whole = i == 0 && world->knobs.step_ns < 100 * MS;
            client->prompt_count = is_whole ? world->knobs.prompt_max : 1 + prng_below(&draw, 6);
            client->max_tokens = is_whole ? world->knobs.new_max : 1;
            sim_prompt(world, client, &draw);
            sim_ask(world, index, 300 * SECOND);
        }
    }
}

void sim_leave(struct world *world, struct sim_event *event) {
    struct client *client = &world->clients[event->number];
    if (client->is_answered || client->is_lost || client->is_left) {
        return;
    }
    client->is_left = true;
    struct sim_event *gone =
        sim_post(world, event->process, LANE_CLIENTS, EVENT_CLIENT_GONE, world->now + MS / 10);
    gone->event.u.client_gone.call.v = event->number + 1;
    gone->event.u.client_gone.cause = CAUSE_CLIENT_GONE;
}

/* A router died: what its clients had asked is lost with it. */
void sim_lose_clients(struct world *world, uint32_t process) {
    const struct process *p = &world->processes[process];
    for (uint32_t i = 0; i < world->client_count; i++) {
        struct client *client = &world->clients[i];
        if (client->router == process && client->generation == p->generation &&
            !client->is_answered && !client->is_lost) {
            client->is_lost = true;
            world->clients_open--;
            world->result.lost_with_router++;
        }
    }
}

void sim_tokenize(struct world *world, uint32_t process, const struct effect *effect) {
    struct client *client = &world->clients[effect->u.tokenize.call.v - 1];
    int64_t at = world->now + sim_time(world, process, MS);
    if (sim_strikes(world, FAULT_TOKENIZE_LATE)) {
        at += sim_time(world, process, 2 * SECOND);
    }
    /* A pool of threads: no order between two prompts. */
    struct sim_event *post = sim_schedule(world, SIM_CORE, at, process);
    post->event.kind = EVENT_TOKENIZED;
    static const uint32_t eos[1] = {SIM_EOS};
    post->event.u.tokenized.request = effect->u.tokenize.request;
    post->event.u.tokenized.detail = "";
    if (sim_strikes(world, FAULT_TOKENIZE)) {
        client->is_doomed = true;
        post->event.u.tokenized.status = STATUS_INVALID;
        post->event.u.tokenized.detail = "invalid UTF-8 at byte 3";
        return;
    }
    struct sampling sampling = {.seed = client->seed,
                                .top_k = -1,
                                .top_p = 1.0f,
                                .repetition_penalty = 1.0f,
                                .logprobs = client->logprobs,
                                .ignore_eos = world->knobs.new_min > 0};
    post->sampling = sim_copy(&sampling, sizeof sampling);
    post->owned = sim_copy(client->prompt, client->prompt_count * sizeof(uint32_t));
    post->event.u.tokenized.tokens = post->owned;
    post->event.u.tokenized.token_count = client->prompt_count;
    post->event.u.tokenized.max_tokens = client->max_tokens;
    post->event.u.tokenized.choices = client->choice_count;
    post->event.u.tokenized.sampling = post->sampling;
    post->event.u.tokenized.eos = eos;
    post->event.u.tokenized.eos_count = 1;
}

static void sim_token_logprobs(struct world *world, const struct client *client,
                               const struct choice *choice, const struct effect *effect,
                               uint32_t position) {
    SIM_CHECK(world, effect->u.deliver.has_logprobs == (client->logprobs > 0),
              "REF: logprobs for who asked for none, or none for who did");
    if (client->logprobs == 0) {
        return;
    }
    uint32_t token = effect->u.deliver.tokens[0];
    SIM_CHECK(world,
              effect->u.deliver.token_count == 1 &&
                  effect->u.deliver.top_count == client->logprobs - 1 &&
                  effect->u.deliver.logprob == sim_logprob(choice->attention, position, token),
              "REF: a logprob differs from its reference");
    for (uint32_t rank = 0; rank < effect->u.deliver.top_count; rank++) {
        uint32_t other = effect->u.deliver.top_tokens[rank];
        SIM_CHECK(world,
                  other == sim_alternative(choice->attention, rank) &&
                      effect->u.deliver.top_logprobs[rank] ==
                          sim_logprob(choice->attention, position, other),
                  "REF: an alternative differs from its reference");
    }
}

static void sim_token(struct world *world, uint32_t process, struct client *client,
                      const struct effect *effect, uint32_t token) {
    uint32_t index = effect->u.deliver.index;
    struct choice *choice = &client->choices[index];
    uint32_t position = client->prompt_count + choice->delivered;
    sim_token_logprobs(world, client, choice, effect, position);
    uint64_t seed = sampling_choice_seed(client->seed, index);
    uint32_t expected = sim_sample(choice->attention, seed, position);
    SIM_CHECK(world, token == expected,
              "REF: a token differs from its reference (wrong KV, or two outputs: I12, I15)");
    SIM_CHECK(world, choice->delivered < client->max_tokens, "I20: more tokens than asked for");
    SIM_CHECK(world,
              choice->delivered == 0 || choice->last_token != SIM_EOS || world->knobs.new_min > 0,
              "I20: a token after the end of the sequence");
    if (choice->delivered > 0 && world->now - choice->last_at > world->result.longest_wait_ns) {
        world->result.longest_wait_ns = world->now - choice->last_at;
    }
    choice->last_at = world->now;
    choice->delivered++;
    choice->last_token = token;
    sim_reference(choice, token);
    world->result.tokens++;
    if (choice->delivered == client->stop_at && token != SIM_EOS) {
        struct sim_event *stop =
            sim_schedule(world, SIM_CORE, world->now + sim_time(world, process, MS), process);
        stop->event.kind = EVENT_STOP_FOUND;
        stop->event.u.stop_found.request = effect->u.deliver.request;
        stop->event.u.stop_found.index = index;
        stop->event.u.stop_found.completion_tokens = choice->delivered;
        choice->is_stopping = true;
    }
    if (index == 0 && choice->delivered == client->unread_at) {
        sim_leave_at(world, (uint32_t)(client - world->clients), world->now + UNREAD_NS);
    }
}

void sim_deliver(struct world *world, uint32_t process, const struct effect *effect) {
    struct client *client = &world->clients[effect->u.deliver.call.v - 1];
    uint32_t index = effect->u.deliver.index;
    SIM_CHECK(world, !client->is_answered, "I20: a token after the terminal");
    SIM_CHECK(world, index < client->choice_count && !client->choices[index].is_done,
              "I20: a token after the end of its choice");
    SIM_CHECK(world, client->router == process, "I19: a token for another router's client");
    for (uint32_t i = 0; i < effect->u.deliver.token_count; i++) {
        sim_token(world, process, client, effect, effect->u.deliver.tokens[i]);
    }
}

/* One choice ends well: it is as long as was asked for, or there is a reason. */
static void sim_choice_ok(struct world *world, const struct client *client,
                          const struct choice *choice, enum finish finish) {
    if (finish == FINISH_LENGTH) {
        SIM_CHECK(world, choice->delivered == client->max_tokens,
                  "I20: success with fewer tokens than asked for");
    } else {
        SIM_CHECK(world,
                  finish == FINISH_STOP && (choice->is_stopping || choice->last_token == SIM_EOS),
                  "I20: success without a reason to stop");
    }
}

static void sim_choice_done(struct world *world, struct client *client, uint32_t index) {
    SIM_CHECK(world, index < client->choice_count && !client->choices[index].is_done,
              "I20: two ends for one choice");
    client->choices[index].is_done = true;
}

void sim_choice(struct world *world, const struct effect *effect) {
    struct client *client = &world->clients[effect->u.choice.call.v - 1];
    enum finish finish = effect->u.choice.finish;
    SIM_CHECK(world, !client->is_answered, "I20: the end of a choice after that of its call");
    sim_choice_done(world, client, effect->u.choice.index);
    client->choices[effect->u.choice.index].is_cut = finish >= FINISH_ABORT;
    TRACE(world, "  client %llu: choice %u ends: %s",
          (unsigned long long)effect->u.choice.call.v - 1, effect->u.choice.index,
          finish_name(finish));
    if (finish < FINISH_ABORT) {
        sim_choice_ok(world, client, &client->choices[effect->u.choice.index], finish);
        world->result.choices++;
    }
}

static void sim_answer_ok(struct world *world, struct client *client, const struct effect *effect) {
    world->result.ok++;
    sim_choice_done(world, client, effect->u.answer.index);
    sim_choice_ok(world, client, &client->choices[effect->u.answer.index], effect->u.answer.finish);
    uint32_t delivered = 0;
    bool is_stopping = false;
    for (uint32_t i = 0; i < client->choice_count; i++) {
        SIM_CHECK(world, client->choices[i].is_done && !client->choices[i].is_cut,
                  "I20: success although a choice has no end");
        delivered += client->choices[i].delivered;
        is_stopping = is_stopping || client->choices[i].is_stopping;
    }
    SIM_CHECK(world, is_stopping || effect->u.answer.usage.completion_tokens == delivered,
              "I20: usage differs from what was delivered");
    SIM_CHECK(world, effect->u.answer.usage.prompt_tokens == client->prompt_count,
              "I20: the prompt counts once");
}

/* A choice that was not told a good end and lacks something. */
static bool sim_is_incomplete(const struct client *client, const struct choice *choice) {
    return (!choice->is_done || choice->is_cut) &&
           (choice->delivered == 0 ||
            (choice->delivered < client->max_tokens && choice->last_token != SIM_EOS));
}

static void sim_answer_failed(struct world *world, const struct client *client,
                              const struct effect *effect) {
    world->result.failed++;
    TRACE(world, "  failed: %s", effect->u.answer.detail);
    SIM_CHECK(world, !world->knobs.is_quiet, "a request failed in a world without faults");
    SIM_CHECK(world, !client->is_probe,
              "a request failed after all faults were over: the "
              "capacity did not come back");
    SIM_CHECK(world, !world->schedule->is_strict || client->is_doomed,
              "one fault alone made a request fail");
    SIM_CHECK(world, effect->u.answer.status != STATUS_OK, "I20: a failure that says OK");
    bool is_incomplete = effect->u.answer.cause == CAUSE_DEADLINE;
    for (uint32_t i = 0; i < client->choice_count; i++) {
        is_incomplete = is_incomplete || sim_is_incomplete(client, &client->choices[i]);
    }
    SIM_CHECK(world, is_incomplete, "I20: a failure although the answer was complete");
}

void sim_answer(struct world *world, uint32_t process, const struct effect *effect) {
    struct client *client = &world->clients[effect->u.answer.call.v - 1];
    const struct choice *first = &client->choices[0];
    SIM_CHECK(world, !client->is_answered, "I20: two terminals for one request");
    TRACE(world, "  answer client %llu: %s %s finish %s, %u tokens of choice 0 of %u",
          (unsigned long long)effect->u.answer.call.v - 1, outcome_name(effect->u.answer.outcome),
          cause_name(effect->u.answer.cause), finish_name(effect->u.answer.finish),
          first->delivered, client->choice_count);
    if (effect->u.answer.outcome == OUTCOME_OK) {
        sim_answer_ok(world, client, effect);
    } else if (effect->u.answer.outcome == OUTCOME_ABORTED) {
        world->result.aborted++;
        SIM_CHECK(world, client->is_left || client->is_abortable,
                  "aborted although nobody wished it");
    } else {
        sim_answer_failed(world, client, effect);
    }
    client->is_answered = true;
    world->clients_open--;
    if (effect->u.answer.request == 0) {
        return; /* refused before it was an entry: nothing of it is left */
    }
    int64_t at = world->now + sim_time(world, process, MS);
    if (client->unread_at > 0 && first->delivered >= client->unread_at && !client->is_left) {
        int64_t closed = first->last_at + UNREAD_NS; /* the call cannot close before */
        at = closed > at && !world->is_settling ? closed : at;
    }
    world->answered_until = at > world->answered_until ? at : world->answered_until;
    struct sim_event *post = sim_schedule(world, SIM_CORE, at, process);
    post->event.kind = EVENT_ANSWERED;
    post->event.u.answered.request = effect->u.answer.request;
}
