/* baton-sim: the three cores under a seeded world. See README.md. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim/big.h"
#include "sim/nth.h"
#include "sim/shrink.h"
#include "sim/world.h"

static void usage(FILE *out) {
    (void)fprintf(
        out, "baton-sim: runs the protocol cores under seeded faults and checks every invariant\n\n"
             "  --seconds N    fresh seeds for so many seconds (default 10)\n"
             "  --runs N       fresh seeds, so many\n"
             "  --requests N   fresh seeds until so many requests were made\n"
             "  --first N      start of the fresh seeds (default: from the clock; printed)\n"
             "  --keep-going   print every failing seed instead of stopping at the first\n"
             "  --faults       at the end, how often each fault struck\n"
             "  --seed N       one seed, replayed to its last event\n"
             "  --replay TEXT  one schedule, as the driver prints it for a failure\n"
             "  --trace        print what happens (with --seed or --replay)\n"
             "  --shrink N     seconds for shortening a failing schedule (default 10; 0: not)\n"
             "  --nth          small worlds, every effect fails once, alone (with --seed: other "
             "clients)\n"
             "  --pairs N      small worlds, two drawn faults at a time, for N seconds\n"
             "  --big          10,000 live requests on one worker: cost, memory, fairness\n");
}

static uint64_t number(const char *name, const char *text) {
    char *end = NULL;
    unsigned long long value = strtoull(text, &end, 0);
    if (end == text || *end != '\0') {
        (void)fprintf(stderr, "baton-sim: %s wants a number, not \"%s\"\n", name, text);
        exit(2);
    }
    return value;
}

static void add(struct sim_result *total, const struct sim_result *one) {
    total->requests += one->requests;
    total->ok += one->ok;
    total->failed += one->failed;
    total->aborted += one->aborted;
    total->lost_with_router += one->lost_with_router;
    total->tokens += one->tokens;
    total->steps += one->steps;
    total->steps_abandoned += one->steps_abandoned;
    total->events += one->events;
    total->retries += one->retries;
    total->resumes += one->resumes;
    total->choices += one->choices;
    total->commits += one->commits;
    total->local += one->local;
    total->retractions += one->retractions;
    total->prompt_tokens += one->prompt_tokens;
    total->hit_tokens += one->hit_tokens;
    total->blocks_told += one->blocks_told;
    total->blocks_walks += one->blocks_walks;
    total->blocks_forgotten += one->blocks_forgotten;
    total->recomputed += one->recomputed;
    total->drained_ns = one->drained_ns > total->drained_ns ? one->drained_ns : total->drained_ns;
    for (uint32_t i = 0; i < FAULT_COUNT; i++) {
        total->struck[i] += one->struck[i];
    }
}

static char text_of_schedule[1 << 20];

static const char *schedule_text(const struct schedule *schedule) {
    struct writer writer;
    writer_init(&writer, text_of_schedule, sizeof text_of_schedule - 1);
    schedule_write(schedule, &writer);
    text_of_schedule[writer.len] = '\0';
    return text_of_schedule;
}

void sim_report(const struct schedule *schedule, const char *sentence, double shrink_seconds) {
    char kept[SIM_SENTENCE_MAX];
    (void)snprintf(kept, sizeof kept, "%s", sentence);
    if (schedule->is_listed) {
        printf("%s\n", kept);
    } else {
        printf("seed %llu: %s\n  replay: baton-sim --seed %llu --trace\n",
               (unsigned long long)schedule->seed, kept, (unsigned long long)schedule->seed);
    }
    if (shrink_seconds <= 0) {
        if (schedule->is_listed) {
            printf("  replay: baton-sim --replay %s --trace\n", schedule_text(schedule));
        }
        return;
    }
    struct shrunk shrunk = sim_shrink(schedule, kept, shrink_seconds);
    if (shrunk.is_same) {
        printf("  shrunk from %u clients and %u faults to %u and %u in %u runs, %.1f s\n"
               "  replay: baton-sim --replay %s --trace\n",
               shrunk.clients_before, shrunk.faults_before, shrunk.clients, shrunk.faults,
               shrunk.runs, shrunk.seconds, schedule_text(&shrunk.schedule));
    } else {
        printf("  the recorded faults alone do not repeat it: use the seed\n");
    }
    schedule_fini(&shrunk.schedule);
    (void)fflush(stdout);
}

struct settings {
    struct schedule schedule;
    bool is_one, is_traced, is_keeping_on, is_telling_faults;
    uint64_t runs, requests, first;
    double seconds, shrink_seconds;
};

static int run_one(const struct settings *settings) {
    struct sim_result result;
    char sentence[SIM_SENTENCE_MAX];
    struct sim_options options = {.trace = settings->is_traced ? stdout : NULL,
                                  .sentence = sentence};
    const char *violation = sim_run(&settings->schedule, &options, &result);
    printf("seed %llu: %s\n", (unsigned long long)settings->schedule.seed,
           violation == NULL ? "all checks hold" : violation);
    if (violation != NULL && !settings->is_traced) {
        sim_report(&settings->schedule, violation, settings->shrink_seconds);
    }
    return violation == NULL ? 0 : 1;
}

static void tell(const struct sim_result *total, uint64_t seeds, uint64_t failures, double elapsed,
                 bool is_telling_faults) {
    printf("%llu seeds, %llu violations; requests %llu: ok %llu, failed %llu, aborted %llu, lost "
           "with their router %llu\n",
           (unsigned long long)seeds, (unsigned long long)failures,
           (unsigned long long)total->requests, (unsigned long long)total->ok,
           (unsigned long long)total->failed, (unsigned long long)total->aborted,
           (unsigned long long)total->lost_with_router);
    printf("tokens %llu, steps %llu (%llu abandoned), commits %llu, one-leg %llu, retries %llu, "
           "resumes %llu, "
           "choices %llu, retractions %llu (%llu tokens computed again); slowest drain %.3f s "
           "(virtual); %.0f requests/s, %.0f events/s\n",
           (unsigned long long)total->tokens, (unsigned long long)total->steps,
           (unsigned long long)total->steps_abandoned, (unsigned long long)total->commits,
           (unsigned long long)total->local, (unsigned long long)total->retries,
           (unsigned long long)total->resumes, (unsigned long long)total->choices,
           (unsigned long long)total->retractions, (unsigned long long)total->recomputed,
           (double)total->drained_ns / 1e9, (double)total->requests / elapsed,
           (double)total->events / elapsed);
    printf("prefix cache: %llu of %llu tokens found at the end's workers; %llu blocks told, %llu "
           "whole "
           "indexes, %llu forgotten\n",
           (unsigned long long)total->hit_tokens, (unsigned long long)total->prompt_tokens,
           (unsigned long long)total->blocks_told, (unsigned long long)total->blocks_walks,
           (unsigned long long)total->blocks_forgotten);
    uint64_t all = 0;
    for (uint32_t i = FAULT_CLIENT + 1; i < FAULT_COUNT; i++) {
        all += total->struck[i];
        if (is_telling_faults) {
            printf("  %-17s %10llu\n", fault_name((enum fault)i),
                   (unsigned long long)total->struck[i]);
        }
    }
    printf("faults that struck: %llu\n", (unsigned long long)all);
}

static int run_fresh(const struct settings *settings) {
    struct sim_result result;
    struct sim_result total = {0};
    char sentence[SIM_SENTENCE_MAX];
    printf("fresh seeds from %llu\n", (unsigned long long)settings->first);
    (void)fflush(stdout);
    double start = sim_seconds_now();
    uint64_t done = 0;
    uint64_t failures = 0;
    for (;; done++) {
        if (settings->requests > 0 ? total.requests >= settings->requests
            : settings->runs > 0   ? done >= settings->runs
                                   : sim_seconds_now() - start >= settings->seconds) {
            break;
        }
        struct schedule schedule = {.seed = settings->first + done};
        struct sim_options options = {.sentence = sentence};
        const char *violation = sim_run(&schedule, &options, &result);
        add(&total, &result);
        if (violation != NULL) {
            failures++;
            sim_report(&schedule, violation, settings->shrink_seconds);
            if (!settings->is_keeping_on) {
                done++;
                break;
            }
        }
    }
    tell(&total, done, failures, sim_seconds_now() - start, settings->is_telling_faults);
    return failures == 0 ? 0 : 1;
}

int main(int argc, char **argv) {
    static const struct option options[] = {{"seed", required_argument, NULL, 's'},
                                            {"trace", no_argument, NULL, 't'},
                                            {"seconds", required_argument, NULL, 'S'},
                                            {"runs", required_argument, NULL, 'r'},
                                            {"requests", required_argument, NULL, 'q'},
                                            {"first", required_argument, NULL, 'f'},
                                            {"keep-going", no_argument, NULL, 'k'},
                                            {"faults", no_argument, NULL, 'F'},
                                            {"replay", required_argument, NULL, 'p'},
                                            {"shrink", required_argument, NULL, 'z'},
                                            {"nth", no_argument, NULL, 'n'},
                                            {"pairs", required_argument, NULL, 'P'},
                                            {"big", no_argument, NULL, 'b'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    struct settings settings = {
        .seconds = 10, .shrink_seconds = 10, .first = (uint64_t)time(NULL) * 1000003u};
    bool is_nth = false;
    bool is_big = false;
    double pairs = 0;
    const char *error = NULL;
    int option = 0;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 's':
            settings.schedule.seed = number("--seed", optarg);
            settings.is_one = true;
            break;
        case 'p':
            if (schedule_read(optarg, &settings.schedule, &error) != STATUS_OK) {
                (void)fprintf(stderr, "baton-sim: --replay: %s\n", error);
                return 2;
            }
            settings.is_one = true;
            break;
        case 't': settings.is_traced = true; break;
        case 'S': settings.seconds = (double)number("--seconds", optarg); break;
        case 'r': settings.runs = number("--runs", optarg); break;
        case 'q': settings.requests = number("--requests", optarg); break;
        case 'f': settings.first = number("--first", optarg); break;
        case 'k': settings.is_keeping_on = true; break;
        case 'F': settings.is_telling_faults = true; break;
        case 'z': settings.shrink_seconds = (double)number("--shrink", optarg); break;
        case 'n': is_nth = true; break;
        case 'P': pairs = (double)number("--pairs", optarg); break;
        case 'b': is_big = true; break;
        case 'h': usage(stdout); return 0;
        default: usage(stderr); return 2;
        }
    }
    if (is_nth) {
        return sim_nth(settings.schedule.seed, settings.is_traced) ? 0 : 1;
    }
    if (pairs > 0) {
        return sim_pairs(settings.first, pairs) ? 0 : 1;
    }
    if (is_big) {
        return sim_big() ? 0 : 1;
    }
    int status = settings.is_one ? run_one(&settings) : run_fresh(&settings);
    schedule_fini(&settings.schedule);
    return status;
}
