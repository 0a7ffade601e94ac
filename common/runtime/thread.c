#include "runtime/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "runtime/clock.h"
#include "runtime/log.h"

#define WATCHDOG_TICK_MS  100
#define WATCHDOG_LIMIT_MS 5000
#define FORGIVEN_LIMITS   9 /* of its own limits: so long a thread may be kept from running */

static pthread_mutex_t beats_lock = PTHREAD_MUTEX_INITIALIZER; /* guards all of this block */
static struct beat *beats_first;
static struct beat *beats_last;
static uint32_t beats_count;

static struct {
    struct thread thread;
    pthread_mutex_t lock; /* guards nothing but the wait */
    pthread_cond_t stop;
    watchdog_hook hook;
    struct clock_observer observer; /* the thread's, once it runs */
    atomic_bool is_running;
    _Atomic uint64_t pauses;
} watchdog = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct {
    _Atomic int kind; /* enum thread_fault; release: after the beat is chosen */
    const struct beat *beat;
} fault;

static void beats_acquire(void) {
    CHECK(pthread_mutex_lock(&beats_lock) == 0);
}

static void beats_release(void) {
    CHECK(pthread_mutex_unlock(&beats_lock) == 0);
}

/* Names go into JSON and metric labels as they are. */
static void thread_name_check(const char *name) {
    size_t len = strlen(name);
    CHECK(len > 0 && len < THREAD_NAME_CAP);
    for (size_t i = 0; i < len; i++) {
        CHECK(name[i] > ' ' && name[i] < 0x7f && name[i] != '"' && name[i] != '\\');
    }
}

static void fault_meet(const struct beat *beat, enum thread_fault kind) {
    if (fault.beat != beat) {
        return;
    }
    if (kind == THREAD_FAULT_DIE) {
        pthread_exit(NULL);
    }
    for (;;) {
        (void)pause(); /* a signal's return is no reason to go on */
    }
}

bool thread_test_fault(const char *name, enum thread_fault kind) {
    bool is_found = false;
    beats_acquire();
    for (struct beat *beat = beats_first; beat != NULL && !is_found; beat = beat->next) {
        is_found = strcmp(beat->name, name) == 0;
        if (is_found) {
            fault.beat = beat;
            atomic_store_explicit(&fault.kind, kind, memory_order_release);
        }
    }
    beats_release();
    return is_found;
}

void thread_beat(struct beat *beat) {
    int kind = atomic_load_explicit(&fault.kind, memory_order_acquire);
    if (kind != THREAD_FAULT_NONE) {
        fault_meet(beat, (enum thread_fault)kind);
    }
    atomic_store_explicit(&beat->at_ns, clock_now().ns, memory_order_relaxed);
}

/* Processor time of its thread. */
static int64_t beat_cpu_ns(const struct beat *beat) {
    struct timespec cpu;
    return clock_gettime(beat->cpu_clock, &cpu) == 0 ? cpu.tv_sec * 1000000000ll + cpu.tv_nsec : 0;
}

void beat_register(struct beat *beat, const char *name, struct span limit) {
    thread_name_check(name);
    CHECK_OP(limit.ns, >, 0);
    char copy[THREAD_NAME_CAP]; /* name may be the beat's own */
    text_copy(copy, sizeof copy, name);
    *beat = (struct beat){.limit = limit};
    text_copy(beat->name, sizeof beat->name, copy);
    /* The main thread's name is the process's: ps and pgrep must find the program. */
    if (gettid() != getpid()) {
        CHECK(pthread_setname_np(pthread_self(), beat->name) == 0);
    }
    CHECK(pthread_getcpuclockid(pthread_self(), &beat->cpu_clock) == 0);
    beat->tid = gettid();
    beat->cpu_seen_ns = beat_cpu_ns(beat);
    thread_beat(beat);
    beat->seen_ns = atomic_load_explicit(&beat->at_ns, memory_order_relaxed);
    beats_acquire();
    beat->is_registered = true;
    beat->prev = beats_last;
    if (beats_last == NULL) {
        beats_first = beat;
    } else {
        beats_last->next = beat;
    }
    beats_last = beat;
    beats_count++;
    beats_release();
}

void beat_unregister(struct beat *beat) {
    beats_acquire();
    if (beat->is_registered) {
        if (beat->prev == NULL) {
            beats_first = beat->next;
        } else {
            beat->prev->next = beat->next;
        }
        if (beat->next == NULL) {
            beats_last = beat->prev;
        } else {
            beat->next->prev = beat->prev;
        }
        beat->is_registered = false;
        beats_count--;
    }
    beats_release();
}

/* The last words of a process that must end now. */
static _Noreturn void leave(const char *why, const char *name) {
    if (!log_flush(instant_add(clock_now(), span_ms(500)))) {
        /* It may be the log's own thread: then nothing else would say what happened. */
        char line[160];
        struct writer writer;
        writer_init(&writer, line, sizeof line);
        writer_printf(&writer, "ERROR %s, ending the process thread=%s\n", why, name);
        (void)!write(STDERR_FILENO, line, writer.len); /* there is nobody left to tell */
    }
    _exit(WATCHDOG_EXIT_STATUS);
}

/* A thread has ended: by itself, or by pthread_exit in some library. */
static void thread_ended(void *arg) {
    struct thread *thread = arg;
    bool is_expected = atomic_load_explicit(&thread->is_end_expected, memory_order_acquire);
    if (!is_expected && atomic_load(&watchdog.is_running)) {
        LOG_ERROR("a thread has ended that nobody told to, ending the process",
                  LOG_TEXT("thread", thread->beat.name));
        leave("a thread has ended that nobody told to", thread->beat.name);
    }
}

static void *thread_main(void *arg) {
    struct thread *thread = arg;
    beat_register(&thread->beat, thread->beat.name, thread->beat.limit);
    pthread_cleanup_push(thread_ended, thread);
    thread->fn(thread, thread->arg);
    pthread_cleanup_pop(1);
    beat_unregister(&thread->beat);
    CHECK(pthread_mutex_lock(&thread->done_lock) == 0);
    thread->is_done = true;
    CHECK(pthread_cond_signal(&thread->done) == 0);
    CHECK(pthread_mutex_unlock(&thread->done_lock) == 0);
    return NULL;
}

static void thread_sync_init(pthread_mutex_t *lock, pthread_cond_t *cond) {
    pthread_condattr_t attributes;
    CHECK(pthread_condattr_init(&attributes) == 0);
    CHECK(pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_cond_init(cond, &attributes) == 0);
    CHECK(pthread_condattr_destroy(&attributes) == 0);
    CHECK(pthread_mutex_init(lock, NULL) == 0);
}

enum status thread_start(struct thread *thread, const struct thread_config *config) {
    CHECK(config->fn != NULL && config->name != NULL);
    thread_name_check(config->name);
    CHECK_OP(config->beat_limit.ns, >, 0);
    *thread = (struct thread){.fn = config->fn, .arg = config->arg};
    thread->beat.limit = config->beat_limit;
    text_copy(thread->beat.name, sizeof thread->beat.name, config->name);
    thread_sync_init(&thread->done_lock, &thread->done);

    /* A blocked fault signal would kill without a report, so those stay open. */
    sigset_t blocked;
    sigset_t before;
    CHECK(sigfillset(&blocked) == 0);
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS};
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        CHECK(sigdelset(&blocked, faults[i]) == 0);
    }
    CHECK(pthread_sigmask(SIG_SETMASK, &blocked, &before) == 0);
    int rc = pthread_create(&thread->handle, NULL, thread_main, thread);
    CHECK(pthread_sigmask(SIG_SETMASK, &before, NULL) == 0);
    if (rc != 0) {
        CHECK_OP(rc, ==, EAGAIN);
        CHECK(pthread_cond_destroy(&thread->done) == 0);
        CHECK(pthread_mutex_destroy(&thread->done_lock) == 0);
        return STATUS_BUSY;
    }
    thread->is_started = true;
    return STATUS_OK;
}

void thread_expect_end(struct thread *thread) {
    atomic_store_explicit(&thread->is_end_expected, true, memory_order_release);
}

void thread_ask_stop(struct thread *thread) {
    thread_expect_end(thread);
    atomic_store_explicit(&thread->is_stop_asked, true, memory_order_release);
}

bool thread_stop_asked(const struct thread *thread) {
    return atomic_load_explicit(&thread->is_stop_asked, memory_order_acquire);
}

enum status thread_join(struct thread *thread, struct instant deadline) {
    if (!thread->is_started) {
        return STATUS_OK;
    }
    /* Waiting for a flag first, not pthread_clockjoin_np: the sanitizers know only these calls. */
    struct timespec until = clock_to_timespec(deadline);
    CHECK(pthread_mutex_lock(&thread->done_lock) == 0);
    int rc = 0;
    while (!thread->is_done && rc == 0) {
        rc = pthread_cond_timedwait(&thread->done, &thread->done_lock, &until);
        CHECK(rc == 0 || rc == ETIMEDOUT);
    }
    bool is_done = thread->is_done;
    CHECK(pthread_mutex_unlock(&thread->done_lock) == 0);
    if (!is_done) {
        return STATUS_TIMEOUT;
    }
    CHECK(pthread_join(thread->handle, NULL) == 0);
    CHECK(pthread_cond_destroy(&thread->done) == 0);
    CHECK(pthread_mutex_destroy(&thread->done_lock) == 0);
    thread->is_started = false;
    return STATUS_OK;
}

static void watchdog_exit(const struct silence *silence) {
    const char state[] = {silence->state != 0 ? silence->state : '?', '\0'};
    LOG_ERROR("thread does not beat, ending the process", LOG_TEXT("thread", silence->name),
              LOG_SPAN("silent", silence->silent), LOG_SPAN("limit", silence->limit),
              LOG_SPAN("ran", silence->ran), LOG_TEXT("state", state));
    leave("a thread does not beat", silence->name);
}

/* The thread's state as the kernel calls it; 0 if it does not say. */
static char thread_state(pid_t tid) {
    char path[64];
    char text[256];
    (void)snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)tid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return 0;
    }
    ssize_t len = read(fd, text, sizeof text - 1);
    (void)close(fd); /* nothing was written */
    text[len > 0 ? len : 0] = '\0';
    const char *name_end = strrchr(text, ')'); /* a name may hold anything */
    return name_end != NULL && name_end[1] == ' ' ? name_end[2] : 0;
}

static struct span beat_ran(const struct beat *beat) {
    return (struct span){beat_cpu_ns(beat) - beat->cpu_seen_ns};
}

static struct silence silence_of(const struct beat *beat, struct span silent, struct span ran,
                                 struct span limit) {
    struct silence silence = {
        .silent = silent, .limit = limit, .ran = ran, .state = thread_state(beat->tid)};
    text_copy(silence.name, sizeof silence.name, beat->name);
    return silence;
}

void watchdog_watch(void) {
    static struct clock_observer observer; /* the main thread's */
    static struct instant alive_at;
    static int64_t seen_ns;
    static int64_t cpu_seen_ns; /* not the beat's own, which the one that is judged here writes */
    static bool is_observing;
    if (!atomic_load(&watchdog.is_running)) {
        is_observing = false;
        return;
    }
    int64_t at_ns = atomic_load_explicit(&watchdog.thread.beat.at_ns, memory_order_relaxed);
    if (!is_observing) {
        is_observing = true;
        clock_observer_init(&observer);
        alive_at = observer.observed;
        seen_ns = at_ns;
        cpu_seen_ns = beat_cpu_ns(&watchdog.thread.beat);
    }
    struct instant now = clock_observe(&observer);
    if (at_ns != seen_ns) {
        seen_ns = at_ns;
        cpu_seen_ns = beat_cpu_ns(&watchdog.thread.beat);
        alive_at = now;
    } else if (instant_since(now, alive_at).ns > span_ms(WATCHDOG_LIMIT_MS).ns) {
        struct span ran = {beat_cpu_ns(&watchdog.thread.beat) - cpu_seen_ns};
        struct silence silence = silence_of(&watchdog.thread.beat, instant_since(now, alive_at),
                                            ran, span_ms(WATCHDOG_LIMIT_MS));
        watchdog_exit(&silence);
    }
}

/* Whether the thread is kept from running just now: by too little processor for all, or by a kernel
 * that finds memory, while which others of the process wait too. It can be late for seconds without
 * having hung, and ending the process would make things worse. One that spins has run itself. The
 * first half of the limit passes for all, so that few are looked at. */
static bool beat_is_kept(const struct beat *beat) {
    if (beat->is_reported || beat->silent.ns < beat->limit.ns / 2 ||
        beat->forgiven.ns >= beat->limit.ns * FORGIVEN_LIMITS) {
        return false;
    }
    struct span ran = beat_ran(beat);
    if (ran.ns >= beat->limit.ns || ran.ns >= (beat->silent.ns + beat->forgiven.ns) / 2) {
        return false;
    }
    char state = thread_state(beat->tid);
    return state == 'R' || state == 'D';
}

/* Counts `advance` for all beats; describes the first one newly past its limit. */
static bool watchdog_judge(struct span advance, struct silence *found) {
    bool is_found = false;
    beats_acquire();
    for (struct beat *beat = beats_first; beat != NULL; beat = beat->next) {
        int64_t at_ns = atomic_load_explicit(&beat->at_ns, memory_order_relaxed);
        if (at_ns != beat->seen_ns) {
            beat->seen_ns = at_ns;
            beat->cpu_seen_ns = beat_cpu_ns(beat);
            beat->silent.ns = 0;
            beat->forgiven.ns = 0;
            beat->is_reported = false;
            continue;
        }
        if (beat_is_kept(beat)) {
            beat->forgiven.ns += advance.ns;
        } else {
            beat->silent.ns += advance.ns;
        }
        if (beat->silent.ns > beat->limit.ns && !beat->is_reported && !is_found) {
            beat->is_reported = true;
            is_found = true;
            *found = silence_of(beat, beat->silent, beat_ran(beat), beat->limit);
        }
    }
    beats_release();
    return is_found;
}

static void watchdog_main(struct thread *self, void *arg) {
    (void)arg; /* one watchdog, static */
    struct clock_observer *observer = &watchdog.observer;
    struct instant before = observer->observed;
    while (!thread_stop_asked(self)) {
        struct timespec until =
            clock_to_timespec(instant_add(clock_now(), span_ms(WATCHDOG_TICK_MS)));
        CHECK(pthread_mutex_lock(&watchdog.lock) == 0);
        int rc = 0;
        while (rc == 0 && !thread_stop_asked(self)) {
            rc = pthread_cond_timedwait(&watchdog.stop, &watchdog.lock, &until);
            CHECK(rc == 0 || rc == ETIMEDOUT);
        }
        CHECK(pthread_mutex_unlock(&watchdog.lock) == 0);
        thread_beat(&self->beat);
        struct instant now = clock_observe(observer);
        atomic_store_explicit(&watchdog.pauses, observer->pauses, memory_order_relaxed);
        struct silence found;
        if (watchdog_judge(instant_since(now, before), &found)) {
            watchdog.hook(&found);
        }
        before = now;
    }
}

enum status watchdog_start(watchdog_hook hook) {
    CHECK(!atomic_load(&watchdog.is_running));
    watchdog.hook = hook != NULL ? hook : watchdog_exit;
    CHECK(pthread_mutex_destroy(&watchdog.lock) == 0);
    thread_sync_init(&watchdog.lock, &watchdog.stop);
    clock_observer_init(&watchdog.observer);
    struct thread_config config = {
        .name = "watchdog", .fn = watchdog_main, .beat_limit = span_ms(WATCHDOG_LIMIT_MS)};
    enum status status = thread_start(&watchdog.thread, &config);
    atomic_store(&watchdog.is_running, status == STATUS_OK);
    return status;
}

void watchdog_stop(void) {
    if (!atomic_load(&watchdog.is_running)) {
        return;
    }
    thread_ask_stop(&watchdog.thread);
    CHECK(pthread_mutex_lock(&watchdog.lock) == 0);
    CHECK(pthread_cond_broadcast(&watchdog.stop) == 0);
    CHECK(pthread_mutex_unlock(&watchdog.lock) == 0);
    CHECK(thread_join(&watchdog.thread, INSTANT_NEVER) == STATUS_OK);
    CHECK(pthread_cond_destroy(&watchdog.stop) == 0);
    atomic_store(&watchdog.is_running, false);
}

uint64_t watchdog_pauses(void) {
    return atomic_load_explicit(&watchdog.pauses, memory_order_relaxed);
}

uint32_t thread_snapshot(struct thread_view *views, uint32_t cap) {
    struct instant now = clock_now();
    uint32_t count = 0;
    beats_acquire();
    for (const struct beat *beat = beats_first; beat != NULL; beat = beat->next) {
        if (count < cap) {
            struct thread_view *view = &views[count];
            *view = (struct thread_view){.limit = beat->limit, .cpu_seconds = -1};
            text_copy(view->name, sizeof view->name, beat->name);
            int64_t at_ns = atomic_load_explicit(&beat->at_ns, memory_order_relaxed);
            view->age.ns = now.ns > at_ns ? now.ns - at_ns : 0;
            view->silent = beat->silent;
            view->is_silent = beat->silent.ns > beat->limit.ns;
            struct timespec cpu;
            if (clock_gettime(beat->cpu_clock, &cpu) == 0) {
                view->cpu_seconds = (double)cpu.tv_sec + (double)cpu.tv_nsec / 1e9;
            }
        }
        count++;
    }
    beats_release();
    return count;
}

#define DESCRIBE_MAX 256

void thread_describe(struct writer *writer) {
    struct thread_view views[DESCRIBE_MAX];
    uint32_t count = thread_snapshot(views, DESCRIBE_MAX);
    writer_text(writer, "[");
    for (uint32_t i = 0; i < count && i < DESCRIBE_MAX; i++) {
        writer_printf(writer,
                      "%s{\"name\":\"%s\",\"beat_age_ms\":%lld,\"limit_ms\":%lld,"
                      "\"cpu_seconds\":%.3f}",
                      i > 0 ? "," : "", views[i].name, (long long)span_to_ms(views[i].age),
                      (long long)span_to_ms(views[i].limit), views[i].cpu_seconds);
    }
    writer_text(writer, "]");
}

bool threads_are_alive(void) {
    struct instant now = clock_now();
    bool is_watched = atomic_load(&watchdog.is_running);
    bool is_alive = true;
    beats_acquire();
    for (const struct beat *beat = beats_first; beat != NULL; beat = beat->next) {
        bool is_judged = is_watched && beat != &watchdog.thread.beat;
        int64_t age_ns = now.ns - atomic_load_explicit(&beat->at_ns, memory_order_relaxed);
        if ((is_judged ? beat->silent.ns : age_ns) > beat->limit.ns) {
            is_alive = false;
        }
    }
    beats_release();
    return is_alive;
}
