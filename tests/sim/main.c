/* baton-sim: the three cores under a seeded world. See README.md. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim/world.h"

static void usage(FILE *out) {
    (void)fprintf(
        out, "baton-sim: runs the protocol cores under seeded faults and checks every invariant\n\n"
             "  --seed N       one seed, replayed to its last event\n"
             "  --trace        print what happens (with --seed)\n"
             "  --seconds N    fresh seeds for so many seconds (default 10)\n"
             "  --runs N       fresh seeds, so many\n"
             "  --first N      start of the fresh seeds (default: from the clock; printed)\n"
             "  --keep-going   print every failing seed instead of stopping at the first\n");
}

static double seconds_now(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
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
    total->events += one->events;
    total->retries += one->retries;
    total->resumes += one->resumes;
    total->commits += one->commits;
    total->local += one->local;
    total->drained_ns = one->drained_ns > total->drained_ns ? one->drained_ns : total->drained_ns;
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"seed", required_argument, NULL, 's'},    {"trace", no_argument, NULL, 't'},
        {"seconds", required_argument, NULL, 'S'}, {"runs", required_argument, NULL, 'r'},
        {"first", required_argument, NULL, 'f'},   {"keep-going", no_argument, NULL, 'k'},
        {"help", no_argument, NULL, 'h'},          {NULL, 0, NULL, 0}};
    uint64_t seed = 0;
    uint64_t runs = 0;
    uint64_t first = (uint64_t)time(NULL) * 1000003u;
    double seconds = 10;
    bool is_one = false;
    bool is_traced = false;
    bool is_keeping_on = false;
    int option = 0;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 's':
            seed = number("--seed", optarg);
            is_one = true;
            break;
        case 't': is_traced = true; break;
        case 'S': seconds = (double)number("--seconds", optarg); break;
        case 'r': runs = number("--runs", optarg); break;
        case 'f': first = number("--first", optarg); break;
        case 'k': is_keeping_on = true; break;
        case 'h': usage(stdout); return 0;
        default: usage(stderr); return 2;
        }
    }
    struct sim_result result;
    struct sim_result total = {0};
    if (is_one) {
        const char *violation = sim_run(seed, is_traced ? stdout : NULL, &result);
        printf("seed %llu: %s\n", (unsigned long long)seed,
               violation == NULL ? "all checks hold" : violation);
        return violation == NULL ? 0 : 1;
    }
    printf("fresh seeds from %llu\n", (unsigned long long)first);
    double start = seconds_now();
    uint64_t done = 0;
    uint64_t failures = 0;
    for (; runs > 0 ? done < runs : seconds_now() - start < seconds; done++) {
        const char *violation = sim_run(first + done, NULL, &result);
        add(&total, &result);
        if (violation != NULL) {
            failures++;
            printf("seed %llu: %s\n  replay: baton-sim --seed %llu --trace\n",
                   (unsigned long long)(first + done), violation,
                   (unsigned long long)(first + done));
            if (!is_keeping_on) {
                break;
            }
        }
    }
    double elapsed = seconds_now() - start;
    printf("%llu seeds, %llu violations; requests %llu: ok %llu, failed %llu, aborted %llu, lost "
           "with their router %llu\n",
           (unsigned long long)done, (unsigned long long)failures,
           (unsigned long long)total.requests, (unsigned long long)total.ok,
           (unsigned long long)total.failed, (unsigned long long)total.aborted,
           (unsigned long long)total.lost_with_router);
    printf("tokens %llu, steps %llu, commits %llu, one-leg %llu, retries %llu, resumes %llu; "
           "slowest drain %.3f s (virtual); %.0f requests/s, %.0f events/s\n",
           (unsigned long long)total.tokens, (unsigned long long)total.steps,
           (unsigned long long)total.commits, (unsigned long long)total.local,
           (unsigned long long)total.retries, (unsigned long long)total.resumes,
           (double)total.drained_ns / 1e9, (double)total.requests / elapsed,
           (double)total.events / elapsed);
    return failures == 0 ? 0 : 1;
}
