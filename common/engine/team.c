#include "engine/team.h"

#include "base/check.h"
#include "runtime/clock.h"
#include "runtime/thread.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#define BEAT_LIMIT_MS 30000
#define IDLE_WAIT_MS  100
#define SPINS         2000 /* some ten microseconds */

/* One word says everything about the current loop, so that joining it is one compare-and-swap:
 * generation in the high half, then whether it is open, then how many helpers are inside. */
#define WORD_OPEN     0x80000000ull
#define WORD_INSIDE   0x7fffffffull
#define WORD_NEXT_RUN 0x100000000ull

struct helper {
    struct thread thread;
    struct team *team;
    uint32_t worker;
};

struct team {
    uint32_t threads;
    bool is_alone;          /* the caller's own */
    struct helper *helpers; /* [threads - 1] */
    _Atomic uint64_t word;
    /* The open loop: written while no helper is inside, published by `word`. */
    team_fn fn;
    void *context;
    uint32_t parts;
    _Atomic uint32_t next;
    /* Sleeping: a helper counts itself before it looks at `word` for the last time, the caller
     * writes `word` before it looks at the count (both sequentially consistent), so no wake-up is
     * lost. */
    pthread_mutex_t sleep_lock;
    pthread_cond_t wake;
    _Atomic uint32_t sleepers;
};

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void parts_take(struct team *team, uint32_t worker) {
    for (;;) {
        uint32_t part = atomic_fetch_add_explicit(&team->next, 1, memory_order_relaxed);
        if (part >= team->parts) {
            return;
        }
        team->fn(team->context, part, worker);
    }
}

/* Enters the open loop if it is another than the last one this helper was in. */
static bool helper_join(struct team *team, uint64_t *last) {
    uint64_t word = atomic_load_explicit(&team->word, memory_order_acquire);
    while ((word & WORD_OPEN) != 0 && word / WORD_NEXT_RUN != *last) {
        if (atomic_compare_exchange_weak_explicit(&team->word, &word, word + 1,
                                                  memory_order_acq_rel, memory_order_acquire)) {
            *last = word / WORD_NEXT_RUN;
            return true;
        }
    }
    return false;
}

static void helper_sleep(struct team *team, uint64_t last) {
    struct timespec until = clock_to_timespec(instant_add(clock_now(), span_ms(IDLE_WAIT_MS)));
    CHECK(pthread_mutex_lock(&team->sleep_lock) == 0);
    atomic_fetch_add(&team->sleepers, 1);
    uint64_t word = atomic_load(&team->word);
    if ((word & WORD_OPEN) == 0 || word / WORD_NEXT_RUN == last) {
        (void)pthread_cond_timedwait(&team->wake, &team->sleep_lock, &until); /* or a beat is due */
    }
    atomic_fetch_sub(&team->sleepers, 1);
    CHECK(pthread_mutex_unlock(&team->sleep_lock) == 0);
}

static void helper_run(struct thread *self, void *arg) {
    struct helper *helper = arg;
    struct team *team = helper->team;
    uint64_t last = 0;
    uint32_t spins = 0;
    while (!thread_stop_asked(self)) {
        if (helper_join(team, &last)) {
            parts_take(team, helper->worker);
            atomic_fetch_sub_explicit(&team->word, 1, memory_order_release);
            spins = 0;
        } else if (spins < SPINS) {
            spins++;
            pause_briefly();
        } else {
            thread_beat(&self->beat);
            helper_sleep(team, last);
        }
    }
}

enum status team_create(uint32_t threads, struct team **team_out) {
    CHECK_OP(threads, >=, 1);
    struct team *team = calloc(1, sizeof(*team));
    CHECK(team != NULL);
    team->threads = threads;
    team->helpers = calloc(threads, sizeof(*team->helpers));
    CHECK(team->helpers != NULL);
    pthread_condattr_t attributes;
    CHECK(pthread_condattr_init(&attributes) == 0);
    CHECK(pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_cond_init(&team->wake, &attributes) == 0);
    CHECK(pthread_condattr_destroy(&attributes) == 0);
    CHECK(pthread_mutex_init(&team->sleep_lock, NULL) == 0);
    for (uint32_t i = 0; i + 1 < threads; i++) {
        struct helper *helper = &team->helpers[i];
        char name[THREAD_NAME_CAP];
        (void)snprintf(name, sizeof(name), "engine-%u", (i + 1) % 1000);
        helper->team = team;
        helper->worker = i + 1;
        struct thread_config config = {
            .name = name, .fn = helper_run, .arg = helper, .beat_limit = span_ms(BEAT_LIMIT_MS)};
        enum status status = thread_start(&helper->thread, &config);
        if (status != STATUS_OK) {
            team->threads = i + 1;
            team_destroy(team);
            return status;
        }
    }
    *team_out = team;
    return STATUS_OK;
}

void team_destroy(struct team *team) {
    if (team == NULL) {
        return;
    }
    for (uint32_t i = 0; i + 1 < team->threads; i++) {
        thread_ask_stop(&team->helpers[i].thread);
    }
    CHECK(pthread_mutex_lock(&team->sleep_lock) == 0);
    CHECK(pthread_cond_broadcast(&team->wake) == 0);
    CHECK(pthread_mutex_unlock(&team->sleep_lock) == 0);
    for (uint32_t i = 0; i + 1 < team->threads; i++) {
        struct instant deadline = instant_add(clock_now(), span_ms(BEAT_LIMIT_MS));
        CHECK(thread_join(&team->helpers[i].thread, deadline) == STATUS_OK);
    }
    CHECK(pthread_cond_destroy(&team->wake) == 0);
    CHECK(pthread_mutex_destroy(&team->sleep_lock) == 0);
    free(team->helpers);
    free(team);
}

uint32_t team_threads(const struct team *team) {
    return team->threads;
}

void team_set_alone(struct team *team, bool is_alone) {
    team->is_alone = is_alone;
}

void team_run(struct team *team, uint32_t parts, team_fn fn, void *context) {
    if (team->threads == 1 || parts <= 1 || team->is_alone) {
        for (uint32_t part = 0; part < parts; part++) {
            fn(context, part, 0);
        }
        return;
    }
    team->fn = fn;
    team->context = context;
    team->parts = parts;
    atomic_store_explicit(&team->next, 0, memory_order_relaxed);
    uint64_t word = atomic_load_explicit(&team->word, memory_order_relaxed);
    CHECK_OP(word % WORD_NEXT_RUN, ==, 0);
    atomic_store(&team->word, word + WORD_NEXT_RUN + WORD_OPEN);
    if (atomic_load(&team->sleepers) > 0) {
        CHECK(pthread_mutex_lock(&team->sleep_lock) == 0);
        CHECK(pthread_cond_broadcast(&team->wake) == 0);
        CHECK(pthread_mutex_unlock(&team->sleep_lock) == 0);
    }
    parts_take(team, 0);
    atomic_fetch_sub_explicit(&team->word, WORD_OPEN, memory_order_acq_rel);
    /* Nobody joins any more; those inside finish the part they hold. A helper that lost its core
     * gets it back sooner when this thread yields its own. */
    uint32_t spins = 0;
    while ((atomic_load_explicit(&team->word, memory_order_acquire) & WORD_INSIDE) != 0) {
        if (spins++ < SPINS) {
            pause_briefly();
        } else {
            (void)sched_yield();
        }
    }
}
