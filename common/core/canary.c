#include "core/canary.h"

#include <string.h>

#include "base/check.h"
#include "base/prng.h"

void canary_init(struct canary *canary, struct span bound, struct instant now) {
    *canary = (struct canary){.bound = bound, .due = now, .moved_at = now, .ok_at = {now, now}};
}

/* Whatever completes is a sign of life, whoever asked for it. */
static void canary_look(struct canary *canary, const struct canary_facts *facts,
                        struct instant now) {
    bool is_moved = facts->user_progress != canary->user_progress;
    if (canary->last == CANARY_NO_ROOM) {
        is_moved = is_moved || facts->fleet_progress != canary->fleet_progress;
    }
    canary->user_progress = facts->user_progress;
    canary->fleet_progress = facts->fleet_progress;
    if (is_moved) {
        canary->moved_at = now;
    }
}

/* The clocks run only while there is somebody who could answer. */
static void canary_watch(struct canary *canary, const struct canary_facts *facts,
                         struct instant now) {
    bool is_watching = facts->decodes > 0 && !facts->is_draining;
    if (!is_watching || !canary->is_watching) {
        canary->moved_at = now;
        canary->ok_at[0] = now;
    }
    bool is_watching_two = is_watching && facts->prefills > 0;
    if (!is_watching_two || !canary->is_watching_two) {
        canary->ok_at[1] = now;
    }
    canary->is_watching = is_watching;
    canary->is_watching_two = is_watching_two;
}

static struct span canary_every(const struct canary *canary, uint32_t routers) {
    int64_t every = span_ms(CANARY_EVERY_MS).ns * (routers > 0 ? routers : 1);
    return (struct span){every < canary->bound.ns / 4 ? every : canary->bound.ns / 4};
}

static enum canary_legs canary_choose(const struct canary *canary,
                                      const struct canary_facts *facts) {
    /* By turns, but not always: with two decode workers, each would see one kind only. */
    bool was_two = canary->legs == CANARY_TWO_LEGS;
    bool is_same = mix64(canary->number) % 4 == 0;
    bool is_broken = was_two && canary->last == CANARY_FAILED;
    bool is_two = facts->has_prefill && !is_broken && was_two == is_same;
    return is_two ? CANARY_TWO_LEGS : CANARY_ONE_LEG;
}

enum canary_legs canary_poll(struct canary *canary, const struct canary_facts *facts,
                             struct instant now) {
    if (canary->bound.ns == 0) {
        return CANARY_NONE;
    }
    canary_look(canary, facts, now);
    canary_watch(canary, facts, now);
    if (!canary->is_watching || canary->is_running || !instant_reached(now, canary->due)) {
        return CANARY_NONE;
    }
    canary->legs = canary_choose(canary, facts);
    canary->is_running = true;
    canary->started = now;
    canary->due = instant_add(now, canary_every(canary, facts->routers));
    canary->number++;
    return canary->legs;
}

struct span canary_budget(const struct canary *canary) {
    return (struct span){canary->bound.ns / 2}; /* one that hangs leaves time for another */
}

static enum canary_result canary_result_of(enum outcome outcome, enum cause cause) {
    if (outcome == OUTCOME_OK) {
        return CANARY_OK;
    }
    bool is_nobodys_fault = cause == CAUSE_BUSY || cause == CAUSE_DRAINING ||
                            cause == CAUSE_SHUTDOWN || cause == CAUSE_NO_WORKER;
    return is_nobodys_fault ? CANARY_NO_ROOM : CANARY_FAILED;
}

/* Where steps are slow a canary lasts, and holds a page: most of the time none runs. */
static void canary_rest(struct canary *canary, struct instant now) {
    int64_t rest = 4 * instant_since(now, canary->started).ns;
    rest = rest < canary->bound.ns / 4 ? rest : canary->bound.ns / 4;
    struct instant due = instant_add(now, (struct span){rest});
    canary->due = instant_reached(canary->due, due) ? canary->due : due;
}

enum canary_result canary_ended(struct canary *canary, enum outcome outcome, enum cause cause,
                                const char *decode, const char *prefill, struct instant now) {
    CHECK(canary->is_running);
    canary->is_running = false;
    canary->last = canary_result_of(outcome, cause);
    uint32_t legs = prefill[0] != '\0' ? 1 : 0;
    canary->stats.results[legs][canary->last]++;
    switch (canary->last) {
    case CANARY_OK:
        canary_rest(canary, now);
        canary->moved_at = now;
        canary->ok_at[0] = now;
        if (legs == 1) {
            canary->ok_at[1] = now;
        }
        canary->failed_cause = CAUSE_NONE;
        break;
    case CANARY_FAILED:
        canary->stats.failures[cause]++;
        canary->failed_cause = cause;
        canary->failed_after = instant_since(now, canary->started);
        text_copy(canary->failed_decode, LABEL_MAX, decode);
        text_copy(canary->failed_prefill, LABEL_MAX, prefill);
        break;
    case CANARY_NO_ROOM: break;
    }
    return canary->last;
}

bool canary_is_stuck(const struct canary *canary, struct instant now) {
    return canary->is_watching && instant_since(now, canary->moved_at).ns > canary->bound.ns;
}

struct span canary_age(const struct canary *canary, bool is_two, struct instant now) {
    bool is_watching = is_two ? canary->is_watching_two : canary->is_watching;
    return is_watching ? instant_since(now, canary->ok_at[is_two ? 1 : 0]) : (struct span){0};
}

static double canary_seconds(struct span span) {
    return (double)span_to_ms(span) / 1e3;
}

void canary_describe(const struct canary *canary, uint32_t decodes, struct instant now,
                     struct writer *out) {
    writer_printf(out, "no request has completed for %.1f s although %u decode worker%s usable",
                  canary_seconds(instant_since(now, canary->moved_at)), decodes,
                  decodes == 1 ? " looks" : "s look");
    if (canary->failed_cause != CAUSE_NONE) {
        bool has_two = canary->failed_prefill[0] != '\0';
        writer_printf(out, "; the last canary failed after %.1f s at %s%s%s: %s",
                      canary_seconds(canary->failed_after),
                      canary->failed_decode[0] != '\0' ? canary->failed_decode : "the router",
                      has_two ? " and " : "", canary->failed_prefill,
                      cause_name(canary->failed_cause));
    } else if (canary->last == CANARY_NO_ROOM && !canary->is_running) {
        writer_text(out, "; canaries find no room, and no worker's work moves");
    } else if (canary->is_running) {
        writer_printf(out, "; a canary has run for %.1f s",
                      canary_seconds(instant_since(now, canary->started)));
    }
}
