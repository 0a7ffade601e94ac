#include "sim/shrink.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"

struct shrink {
    struct schedule best;
    const char *sentence;
    uint32_t runs;
    double until;
};

double sim_seconds_now(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

const char *sim_run_silently(const struct schedule *schedule, struct schedule *record,
                             char *sentence_out) {
    struct sim_result result;
    struct sim_options options = {.record = record, .sentence = sentence_out};
    int saved = dup(STDERR_FILENO);
    int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    CHECK(saved >= 0 && nowhere >= 0);
    CHECK(dup2(nowhere, STDERR_FILENO) >= 0);
    const char *violation = sim_run(schedule, &options, &result);
    CHECK(dup2(saved, STDERR_FILENO) >= 0);
    (void)close(saved);
    (void)close(nowhere);
    return violation;
}

static bool shrink_is_over(const struct shrink *shrink) {
    return sim_seconds_now() >= shrink->until;
}

/* Keeps the candidate if it fails alike, else throws it away. */
static bool shrink_try(struct shrink *shrink, struct schedule candidate) {
    char sentence[SIM_SENTENCE_MAX];
    shrink->runs++;
    const char *violation = sim_run_silently(&candidate, NULL, sentence);
    if (violation == NULL || strcmp(violation, shrink->sentence) != 0) {
        schedule_fini(&candidate);
        return false;
    }
    schedule_fini(&shrink->best);
    shrink->best = candidate;
    return true;
}

/* The best without list[first, end). */
static struct schedule shrink_without(const struct shrink *shrink, uint32_t first, uint32_t end) {
    struct schedule copy = schedule_copy(&shrink->best);
    memmove(copy.list + first, copy.list + end, (copy.count - end) * sizeof *copy.list);
    copy.count -= end - first;
    return copy;
}

/* Whole kinds of faults, the last (rarest) first. */
static void shrink_kinds(struct shrink *shrink) {
    for (uint32_t fault = FAULT_COUNT; fault-- > FAULT_CLIENT + 1;) {
        uint32_t first = 0;
        while (first < shrink->best.count && shrink->best.list[first].fault < fault) {
            first++;
        }
        uint32_t end = first;
        while (end < shrink->best.count && shrink->best.list[end].fault == fault) {
            end++;
        }
        if (end > first && !shrink_is_over(shrink)) {
            (void)shrink_try(shrink, shrink_without(shrink, first, end));
        }
    }
}

static void shrink_field(struct shrink *shrink, uint32_t *field, uint32_t value) {
    uint32_t before = *field;
    if (shrink_is_over(shrink) || before == value) {
        return;
    }
    *field = value;
    struct schedule candidate = schedule_copy(&shrink->best);
    *field = before;
    (void)shrink_try(shrink, candidate);
}

static void shrink_world(struct shrink *shrink) {
    if (!shrink->best.is_calm && !shrink_is_over(shrink)) {
        struct schedule candidate = schedule_copy(&shrink->best);
        candidate.is_calm = true;
        (void)shrink_try(shrink, candidate);
    }
    shrink_field(shrink, &shrink->best.routers, 1);
    shrink_field(shrink, &shrink->best.prefills, 1);
    shrink_field(shrink, &shrink->best.decodes, 1);
    shrink_field(shrink, &shrink->best.decodes, 2);
    for (uint32_t size = 8; size <= 32; size *= 2) {
        shrink_field(shrink, &shrink->best.prompt_max, size);
        shrink_field(shrink, &shrink->best.new_max, size / 2);
    }
}

/* Zeller's ddmin over the list: halves, quarters, ... single occurrences. */
static void shrink_list(struct shrink *shrink) {
    uint32_t parts = 2;
    while (shrink->best.count > 0 && !shrink_is_over(shrink)) {
        uint32_t size = (shrink->best.count + parts - 1) / parts;
        bool is_shorter = false;
        for (uint32_t first = 0; first < shrink->best.count && !shrink_is_over(shrink);) {
            uint32_t end = first + size;
            end = end > shrink->best.count ? shrink->best.count : end;
            if (shrink_try(shrink, shrink_without(shrink, first, end))) {
                is_shorter = true; /* what follows has moved to `first` */
            } else {
                first = end;
            }
        }
        if (size == 1 && !is_shorter) {
            return;
        }
        if (size > 1) {
            parts = parts * 2;
        }
    }
}

/* The best with one client and the one fault of an effect at another opportunity. */
static struct schedule shrink_moved(const struct shrink *shrink, uint32_t client, uint32_t index) {
    struct schedule copy = schedule_copy(&shrink->best);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < copy.count; i++) {
        struct occurrence one = copy.list[i];
        if (one.fault == FAULT_CLIENT && one.index != client) {
            continue;
        }
        if (one.fault >= FAULT_TOKENIZE && one.fault < FAULT_TIMED_FIRST) {
            one.index = index;
        }
        copy.list[kept++] = one;
    }
    copy.count = kept;
    return copy;
}

/* Fewer clients send fewer messages: the effect that must fail has another number among them. If
 * one such fault is left, each client alone is tried with each number up to the old one. */
static void shrink_alone(struct shrink *shrink) {
    uint32_t clients = 0;
    uint32_t effects = 0;
    uint32_t last = 0;
    for (uint32_t i = 0; i < shrink->best.count; i++) {
        const struct occurrence *one = &shrink->best.list[i];
        clients += one->fault == FAULT_CLIENT ? 1 : 0;
        if (one->fault >= FAULT_TOKENIZE && one->fault < FAULT_TIMED_FIRST) {
            effects++;
            last = one->index;
        }
    }
    if (effects != 1 || clients < 2) {
        return;
    }
    for (uint32_t i = 0; i < clients; i++) { /* clients come first in the list */
        uint32_t client = shrink->best.list[i].index;
        for (uint32_t index = 0; index <= last && !shrink_is_over(shrink); index++) {
            if (shrink_try(shrink, shrink_moved(shrink, client, index))) {
                return;
            }
        }
    }
}

static void shrink_count(const struct schedule *schedule, uint32_t *clients, uint32_t *faults) {
    *clients = 0;
    *faults = 0;
    for (uint32_t i = 0; i < schedule->count; i++) {
        if (schedule->list[i].fault == FAULT_CLIENT) {
            (*clients)++;
        } else {
            (*faults)++;
        }
    }
}

struct shrunk sim_shrink(const struct schedule *schedule, const char *sentence, double seconds) {
    double start = sim_seconds_now();
    struct shrink shrink = {.sentence = sentence, .until = start + seconds};
    char unused[SIM_SENTENCE_MAX];
    shrink.best = schedule_copy(schedule);
    struct schedule record = {0};
    (void)sim_run_silently(schedule, &record, unused);
    struct schedule listed = *schedule;
    listed.is_listed = true;
    listed.list = record.list;
    listed.count = record.count;
    listed.capacity = record.capacity;
    schedule_sort(&listed);
    struct shrunk shrunk = {.runs = 1};
    shrink_count(&listed, &shrunk.clients_before, &shrunk.faults_before);
    shrunk.is_same = shrink_try(&shrink, listed);
    if (shrunk.is_same) {
        shrink_kinds(&shrink);
        shrink_world(&shrink);
        shrink_list(&shrink);
        shrink_alone(&shrink);
        shrink_world(&shrink);
    }
    shrink_count(&shrink.best, &shrunk.clients, &shrunk.faults);
    shrunk.schedule = shrink.best;
    shrunk.runs += shrink.runs;
    shrunk.seconds = sim_seconds_now() - start;
    return shrunk;
}
