/* Threads that beat, and the watchdog that ends the process when one hangs or dies.
 *
 * Every long-lived thread calls thread_beat at least each 200 ms, also when idle: no wait in Baton
 * is longer. The watchdog looks at all beats each 100 ms; one that has not changed for its limit of
 * observed time (a tick counts at most 200 ms, so a stopped and resumed process is not blamed) is
 * logged with name and age, and the process exits with 70: a half-dead worker is worse than a dead
 * one. A thread that waits for a processor, or in the kernel for memory or a disk, is late and not
 * hung: such time counts only beyond ten limits. While the watchdog runs, so does a thread that
 * ends though nobody told it to, at once. Foreign threads (main, a library's) register a beat of
 * their own. */
#ifndef RUNTIME_THREAD_H
#define RUNTIME_THREAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include "base/bytes.h"
#include "base/status.h"
#include "base/time.h"

#define THREAD_NAME_CAP      16
#define WATCHDOG_EXIT_STATUS 70

struct beat {
    _Atomic int64_t at_ns; /* relaxed: only its change matters */
    char name[THREAD_NAME_CAP];
    struct span limit;
    clockid_t cpu_clock; /* of the thread that registered */
    pid_t tid;
    int64_t seen_ns;      /* this and all below: guarded by the list's lock */
    int64_t cpu_seen_ns;  /* its processor time when at_ns last changed */
    struct span silent;   /* observed time since at_ns last changed, without what was forgiven */
    struct span forgiven; /* observed time in which the thread was kept from running */
    struct beat *prev;
    struct beat *next;
    bool is_registered;
    bool is_reported;
};

struct thread;
typedef void (*thread_fn)(struct thread *self, void *arg);

struct thread_config {
    const char *
        name; /* 1 to 15 of printable ASCII: CHECKed; shown by top -H, /debug/threads and metrics */
    thread_fn fn;
    void *arg;
    struct span beat_limit; /* silence that the watchdog tolerates; > 0 */
};

struct thread {
    struct beat beat; /* registered while fn runs */
    pthread_t handle;
    thread_fn fn;
    void *arg;
    pthread_mutex_t done_lock; /* guards is_done */
    pthread_cond_t done;
    bool is_done;
    bool is_started;
    atomic_bool is_stop_asked;
    atomic_bool is_end_expected;
};

/* Starts a thread with all signals blocked but those of faults. thread: the caller's memory until
 * joined. STATUS_BUSY if the system has no thread left. */
MUST_USE enum status thread_start(struct thread *thread, const struct thread_config *config);
/* Sets a flag that fn may poll; wakes nobody (post a mail for that). Any thread. */
void thread_ask_stop(struct thread *thread);
/* For threads that are told to end in another way: say so first, with this. Any thread. */
void thread_expect_end(struct thread *thread);
bool thread_stop_asked(const struct thread *thread);
/* Waits for fn to return. STATUS_TIMEOUT at the deadline: the memory is still the thread's. Joining
 * one that was never started, or was joined already, is STATUS_OK. */
MUST_USE enum status thread_join(struct thread *thread, struct instant deadline);

/* One relaxed store of the clock. Only the thread that the beat belongs to. Does not return where
 * thread_test_fault says so. */
void thread_beat(struct beat *beat);
/* Registers the calling thread (not started by thread_start) and names it, except for the main
 * thread, whose name is the program's. beat: the caller's memory until unregistered. */
void beat_register(struct beat *beat, const char *name, struct span limit);
void beat_unregister(struct beat *beat);

/* A thread that the watchdog found silent. */
struct silence {
    char name[THREAD_NAME_CAP];
    struct span silent; /* observed time, without what was forgiven */
    struct span limit;
    struct span ran; /* processor time since its last beat */
    char state; /* as the kernel calls it: S sleeps, R runs, D waits in the kernel; 0: unknown */
};
/* What the watchdog calls on the first silent thread, from its own thread, holding no lock. */
typedef void (*watchdog_hook)(const struct silence *silence);
/* Starts the one watchdog of the process. hook: NULL logs an ERROR line and calls _exit(70); a
 * test's hook may return, and is called again only after the thread beat again. */
MUST_USE enum status watchdog_start(watchdog_hook hook);
/* Stops it (idempotent). */
void watchdog_stop(void);
/* How often the watchdog found the process paused (baton_pause_detected_total). */
uint64_t watchdog_pauses(void);

struct thread_view {
    char name[THREAD_NAME_CAP];
    struct span age;    /* since the last beat, plain monotonic time */
    struct span silent; /* the same as the watchdog counts it, in observed time */
    struct span limit;
    double cpu_seconds; /* negative: not known */
    bool is_silent;     /* the watchdog counted it past its limit (only seen with a test's hook) */
};
/* Copies up to `cap` threads in order of registration; returns how many there are. Any thread. */
uint32_t thread_snapshot(struct thread_view *views, uint32_t cap);
/* Writes a JSON array of {"name","beat_age_ms","limit_ms","cpu_seconds"}; no line break. */
void thread_describe(struct writer *writer);
/* True when every registered thread beat within its limit (/livez): by the watchdog's observed time
 * while it runs and beats itself, else by the plain clock. */
bool threads_are_alive(void);
/* For the main thread, which nothing else would tell: ends the process like the watchdog does if
 * that one has not beaten for its limit of observed time. Call it at least each 200 ms. */
void watchdog_watch(void);

/* For tests: what a bug would do to a thread. At its next beat the (first) thread of this name
 * stops for ever, or ends as if its function had returned. */
enum thread_fault { THREAD_FAULT_NONE, THREAD_FAULT_HANG, THREAD_FAULT_DIE };
/* False if no thread has this name. Once per process. Any thread. */
bool thread_test_fault(const char *name, enum thread_fault fault);

#endif
