#include "sim/nth.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "sim/shrink.h"

#define NTH_FIRST FAULT_TOKENIZE
#define NTH_LAST  FAULT_TURN_PAUSE

static struct schedule nth_base(uint32_t world, uint64_t seed) {
    struct schedule schedule = {.world = world,
                                .seed = seed + world,
                                .is_listed = true,
                                .is_calm = true,
                                .is_strict = true};
    uint32_t clients = sim_knobs(&schedule).clients;
    for (uint32_t i = 0; i < clients; i++) {
        schedule_add(&schedule, FAULT_CLIENT, i);
    }
    return schedule;
}

static bool nth_world(uint32_t world, uint64_t seed, bool is_verbose, uint32_t *runs,
                      uint64_t *retractions) {
    struct schedule base = nth_base(world, seed);
    struct sim_options options = {0};
    struct sim_result counted;
    char sentence[SIM_SENTENCE_MAX];
    const char *violation = sim_run(&base, &options, &counted);
    bool is_good = violation == NULL;
    *retractions += counted.retractions;
    if (!is_good) {
        sim_report(&base, violation, 0);
    }
    for (uint32_t fault = NTH_FIRST; fault <= NTH_LAST; fault++) {
        for (uint32_t n = 0; n < counted.opportunities[fault]; n++) {
            struct schedule one = schedule_copy(&base);
            schedule_add(&one, (enum fault)fault, n);
            schedule_sort(&one);
            violation = sim_run_silently(&one, NULL, sentence);
            if (violation != NULL) {
                is_good = false;
                sim_report(&one, violation, 5);
            }
            schedule_fini(&one);
            (*runs)++;
        }
        if (is_verbose && counted.opportunities[fault] > 0) {
            printf("  %-17s %4u times\n", fault_name((enum fault)fault),
                   counted.opportunities[fault]);
        }
    }
    schedule_fini(&base);
    return is_good;
}

bool sim_nth(uint64_t seed, bool is_verbose) {
    bool is_good = true;
    uint32_t total = 0;
    uint64_t retractions = 0;
    double start = sim_seconds_now();
    for (uint32_t world = 1; world <= SIM_WORLDS; world++) {
        uint32_t runs = 0;
        is_good = nth_world(world, seed, is_verbose, &runs, &retractions) && is_good;
        printf("world %u, %s: each of %u effects failed once\n", world, sim_world_name(world),
               runs);
        total += runs;
    }
    if (retractions == 0) {
        printf("the worlds are not what they should be: nothing was retracted\n");
        is_good = false;
    }
    printf("%u runs with one fault each in %.1f s: %s\n", total, sim_seconds_now() - start,
           is_good ? "all checks hold" : "FAILED");
    return is_good;
}

bool sim_pairs(uint64_t first, double seconds) {
    double start = sim_seconds_now();
    uint64_t runs = 0;
    for (; sim_seconds_now() - start < seconds; runs++) {
        struct schedule pair = nth_base(1 + (uint32_t)((first + runs) % SIM_WORLDS), 0);
        struct sim_options options = {0};
        struct sim_result counted;
        char sentence[SIM_SENTENCE_MAX];
        pair.seed = first + runs;
        pair.is_calm = false;
        pair.is_strict = false;
        const char *violation = sim_run(&pair, &options, &counted);
        struct prng draw = {mix64(first + runs)};
        for (uint32_t i = 0; i < 2 && violation == NULL;) {
            uint32_t fault = NTH_FIRST + prng_below(&draw, NTH_LAST - NTH_FIRST + 1);
            if (counted.opportunities[fault] == 0) {
                continue;
            }
            schedule_add(&pair, (enum fault)fault, prng_below(&draw, counted.opportunities[fault]));
            i++;
        }
        schedule_sort(&pair);
        if (violation == NULL) {
            violation = sim_run_silently(&pair, NULL, sentence);
        }
        if (violation != NULL) {
            sim_report(&pair, violation, 5);
            schedule_fini(&pair);
            return false;
        }
        schedule_fini(&pair);
    }
    printf("%llu runs with two faults each from seed %llu: all checks hold\n",
           (unsigned long long)runs, (unsigned long long)first);
    return true;
}
