#include "runtime/thread.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/clock.h"
#include "runtime/log.h"
#include "runtime/mail.h"
#include "runtime/signals.h"
#include "unit.h"

/* Beats each 10 ms until told to stop. */
static void beat_until_stopped(struct thread *self, void *arg) {
    (void)arg;
    while (!thread_stop_asked(self)) {
        thread_beat(&self->beat);
        (void)poll(NULL, 0, 10);
    }
}

/* Beats only while *arg is false. */
static void beat_unless_stuck(struct thread *self, void *arg) {
    while (!thread_stop_asked(self)) {
        if (!atomic_load((atomic_bool *)arg)) {
            thread_beat(&self->beat);
        }
        (void)poll(NULL, 0, 5);
    }
}

static void wait_for_mail(struct thread *self, void *arg) {
    while (!mailbox_wait(arg, instant_add(clock_now(), span_ms(100)))) {
        thread_beat(&self->beat);
    }
}

static void report_name(struct thread *self, void *arg) {
    (void)self;
    assert_int_equal(pthread_getname_np(pthread_self(), arg, THREAD_NAME_CAP), 0);
}

static void report_signals(struct thread *self, void *arg) {
    (void)self;
    assert_int_equal(pthread_sigmask(SIG_BLOCK, NULL, arg), 0);
}

static struct instant soon(void) {
    return instant_add(clock_now(), span_ms(30000));
}

static void test_thread_carries_its_name(void **state) {
    (void)state;
    char name[THREAD_NAME_CAP] = "";
    struct thread thread;
    struct thread_config config = {"control", report_name, name, span_ms(1000)};
    assert_int_equal(thread_start(&thread, &config), STATUS_OK);
    assert_int_equal(thread_join(&thread, soon()), STATUS_OK);
    assert_string_equal(name, "control");
}

static void test_thread_starts_with_signals_blocked_but_faults_open(void **state) {
    (void)state;
    sigset_t set;
    struct thread thread;
    struct thread_config config = {"masked", report_signals, &set, span_ms(1000)};
    assert_int_equal(thread_start(&thread, &config), STATUS_OK);
    assert_int_equal(thread_join(&thread, soon()), STATUS_OK);
    assert_int_equal(sigismember(&set, SIGTERM), 1);
    assert_int_equal(sigismember(&set, SIGUSR1), 1);
    assert_int_equal(sigismember(&set, SIGSEGV), 0);
    assert_int_equal(pthread_sigmask(SIG_BLOCK, NULL, &set), 0);
    assert_int_equal(sigismember(&set, SIGUSR1), 0); /* ours was put back */
}

static void test_join_reports_a_timeout_and_succeeds_later_and_twice(void **state) {
    (void)state;
    struct mailbox box;
    mailbox_init(&box, NULL, NULL);
    struct thread thread;
    struct thread_config config = {"waiter", wait_for_mail, &box, span_ms(1000)};
    assert_int_equal(thread_start(&thread, &config), STATUS_OK);
    assert_int_equal(thread_join(&thread, instant_add(clock_now(), span_ms(10))), STATUS_TIMEOUT);
    assert_null(mailbox_close(&box));
    assert_int_equal(thread_join(&thread, soon()), STATUS_OK);
    assert_int_equal(thread_join(&thread, soon()), STATUS_OK);
    mailbox_fini(&box);
}

static void test_snapshot_and_json_list_live_threads_only(void **state) {
    (void)state;
    struct thread threads[2];
    struct thread_config first = {"first", beat_until_stopped, NULL, span_ms(1000)};
    struct thread_config second = {"second", beat_until_stopped, NULL, span_ms(30000)};
    struct beat own;
    char name_before[THREAD_NAME_CAP];
    char name_after[THREAD_NAME_CAP];
    assert_int_equal(pthread_getname_np(pthread_self(), name_before, THREAD_NAME_CAP), 0);
    beat_register(&own, "main", span_ms(1000));
    assert_int_equal(pthread_getname_np(pthread_self(), name_after, THREAD_NAME_CAP), 0);
    assert_string_equal(name_before, name_after); /* ps must still find the program */
    assert_int_equal(thread_start(&threads[0], &first), STATUS_OK);
    assert_int_equal(thread_start(&threads[1], &second), STATUS_OK);
    struct thread_view views[8];
    while (thread_snapshot(views, 8) < 3) {
        (void)poll(NULL, 0, 1);
    }
    assert_int_equal(thread_snapshot(views, 1), 3); /* counts more than it copies */
    assert_string_equal(views[0].name, "main");
    assert_true(views[0].cpu_seconds >= 0);
    char text[1024];
    struct writer writer;
    writer_init(&writer, text, sizeof text - 1);
    thread_describe(&writer);
    text[writer.len] = '\0';
    assert_contains(text, "[{\"name\":\"main\",\"beat_age_ms\":");
    assert_contains(text, "\"limit_ms\":30000,");
    for (int i = 0; i < 2; i++) {
        thread_ask_stop(&threads[i]);
        assert_int_equal(thread_join(&threads[i], soon()), STATUS_OK);
    }
    assert_int_equal(thread_snapshot(views, 8), 1);
    beat_unregister(&own);
    beat_unregister(&own); /* harmless */
    assert_int_equal(thread_snapshot(views, 8), 0);
}

static _Atomic uint32_t hook_calls;
static char hook_name[THREAD_NAME_CAP];

static char hook_state;

static void note_hook(const struct silence *silence) {
    assert_true(silence->silent.ns > silence->limit.ns);
    text_copy(hook_name, sizeof hook_name, silence->name);
    hook_state = silence->state;
    (void)atomic_fetch_add(&hook_calls, 1);
}

static void wait_for_calls(uint32_t calls) {
    struct instant deadline = soon();
    while (atomic_load(&hook_calls) < calls) {
        assert_false(instant_reached(clock_now(), deadline));
        (void)poll(NULL, 0, 5);
    }
}

static void test_watchdog_reports_only_the_silent_thread_and_once_per_silence(void **state) {
    (void)state;
    atomic_store(&hook_calls, 0);
    atomic_bool is_stuck = false;
    struct thread good;
    struct thread bad;
    struct thread_config good_config = {"good", beat_until_stopped, NULL, span_ms(20000)};
    struct thread_config bad_config = {"bad", beat_unless_stuck, &is_stuck, span_ms(1000)};
    assert_int_equal(watchdog_start(note_hook), STATUS_OK);
    assert_int_equal(thread_start(&good, &good_config), STATUS_OK);
    assert_int_equal(thread_start(&bad, &bad_config), STATUS_OK);
    assert_true(threads_are_alive());
    atomic_store(&is_stuck, true);
    wait_for_calls(1);
    assert_string_equal(hook_name, "bad");
    assert_int_equal(hook_state, 'S');
    assert_false(threads_are_alive());
    (void)poll(NULL, 0, 350); /* some more ticks, which must stay quiet */
    assert_int_equal(atomic_load(&hook_calls), 1);
    /* It beats again and is forgiven; a second silence is a second report. */
    atomic_store(&is_stuck, false);
    struct instant deadline = soon();
    while (!threads_are_alive()) {
        assert_false(instant_reached(clock_now(), deadline));
        (void)poll(NULL, 0, 5);
    }
    assert_int_equal(atomic_load(&hook_calls), 1);
    atomic_store(&is_stuck, true);
    wait_for_calls(2);
    thread_ask_stop(&good);
    thread_ask_stop(&bad);
    assert_int_equal(thread_join(&good, soon()), STATUS_OK);
    assert_int_equal(thread_join(&bad, soon()), STATUS_OK);
    watchdog_stop();
    watchdog_stop(); /* idempotent */
    assert_true(threads_are_alive());
}

static int one_cpu;

static void stay_on_one_cpu(void) {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(one_cpu, &only);
    assert_int_equal(sched_setaffinity(0, sizeof only, &only), 0);
}

static int64_t own_cpu_ms(void) {
    struct timespec now;
    assert_int_equal(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now), 0);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Runs all the time, and beats. */
static void hog_cpu(struct thread *self, void *arg) {
    (void)arg;
    stay_on_one_cpu();
    while (!thread_stop_asked(self)) {
        thread_beat(&self->beat);
    }
}

/* Beats after each 250 ms of processor time, of which it gets next to none beside a hog (a sixth,
 * where the hog has the lowest priority itself). */
static void work_when_let(struct thread *self, void *arg) {
    (void)arg;
    stay_on_one_cpu();
    assert_int_equal(sched_setscheduler(0, SCHED_IDLE, &(struct sched_param){0}), 0);
    while (!thread_stop_asked(self)) {
        for (int64_t until = own_cpu_ms() + 250; own_cpu_ms() < until;) {
        }
        thread_beat(&self->beat);
    }
}

static struct thread_view view_of(const char *name) {
    struct thread_view views[8];
    uint32_t count = thread_snapshot(views, 8);
    for (uint32_t i = 0; i < count; i++) {
        if (strcmp(views[i].name, name) == 0) {
            return views[i];
        }
    }
    fail_msg("there is no thread %s", name);
    abort();
}

static void test_watchdog_forgives_a_thread_that_is_kept_from_running(void **state) {
    (void)state;
    atomic_store(&hook_calls, 0);
    one_cpu = sched_getcpu();
    struct thread hog;
    struct thread late;
    struct thread_config hog_config = {"hog", hog_cpu, NULL, span_ms(20000)};
    struct thread_config late_config = {"late", work_when_let, NULL, span_ms(400)};
    assert_int_equal(watchdog_start(note_hook), STATUS_OK);
    assert_int_equal(thread_start(&late, &late_config), STATUS_OK);
    struct instant deadline = soon();
    while (thread_snapshot(NULL, 0) < 2) { /* the watchdog and it: it has begun */
        assert_false(instant_reached(clock_now(), deadline));
        (void)poll(NULL, 0, 5);
    }
    assert_int_equal(thread_start(&hog, &hog_config), STATUS_OK);
    while (view_of("late").age.ns < span_ms(1000).ns) {
        assert_false(instant_reached(clock_now(), deadline)); /* or it was never late */
        (void)poll(NULL, 0, 5);
    }
    assert_int_equal(atomic_load(&hook_calls), 0);
    assert_true(threads_are_alive());
    thread_ask_stop(&hog);
    assert_int_equal(thread_join(&hog, soon()), STATUS_OK);
    thread_ask_stop(&late);
    assert_int_equal(thread_join(&late, soon()), STATUS_OK);
    watchdog_stop();
}

/* Stands in the kernel, as one does for memory, until its child is gone. */
static void stand_in_the_kernel(struct thread *self, void *arg) {
    atomic_bool *is_back = arg;
    long pid = syscall(SYS_clone, CLONE_VFORK | SIGCHLD, NULL, NULL, NULL, NULL);
    if (pid == 0) {
        (void)poll(NULL, 0, 1200);
        _exit(0);
    }
    assert_true(pid > 0);
    thread_beat(&self->beat);
    assert_int_equal(waitpid((pid_t)pid, NULL, 0), pid);
    atomic_store(is_back, true);
    while (!thread_stop_asked(self)) {
        thread_beat(&self->beat);
        (void)poll(NULL, 0, 10);
    }
}

static void test_watchdog_forgives_a_thread_that_waits_for_the_kernel(void **state) {
    (void)state;
    atomic_store(&hook_calls, 0);
    atomic_bool is_back = false;
    struct thread thread;
    struct thread_config config = {"stands", stand_in_the_kernel, &is_back, span_ms(300)};
    assert_int_equal(watchdog_start(note_hook), STATUS_OK);
    assert_int_equal(thread_start(&thread, &config), STATUS_OK);
    struct instant deadline = soon();
    while (!atomic_load(&is_back)) {
        assert_false(instant_reached(clock_now(), deadline));
        (void)poll(NULL, 0, 5);
    }
    assert_int_equal(atomic_load(&hook_calls), 0);
    thread_ask_stop(&thread);
    assert_int_equal(thread_join(&thread, soon()), STATUS_OK);
    watchdog_stop();
}

static void spin_without_a_beat(struct thread *self, void *arg) {
    (void)arg;
    while (!thread_stop_asked(self)) {
    }
}

static void test_watchdog_reports_a_thread_that_spins(void **state) {
    (void)state;
    atomic_store(&hook_calls, 0);
    struct thread spinner;
    struct thread_config config = {"spinner", spin_without_a_beat, NULL, span_ms(300)};
    assert_int_equal(watchdog_start(note_hook), STATUS_OK);
    assert_int_equal(thread_start(&spinner, &config), STATUS_OK);
    wait_for_calls(1);
    assert_string_equal(hook_name, "spinner");
    assert_int_equal(hook_state, 'R');
    thread_ask_stop(&spinner);
    assert_int_equal(thread_join(&spinner, soon()), STATUS_OK);
    watchdog_stop();
}

static void test_watchdog_starts_again_after_a_stop(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        assert_int_equal(watchdog_start(NULL), STATUS_OK);
        watchdog_stop();
    }
}

/* The two below run this program again as a child, because their end is the process's end. */

static int child_hangs(void) {
    struct log_settings settings = {LOG_LEVEL_INFO, LOG_FORMAT_HUMAN};
    atomic_bool is_stuck = true;
    struct thread thread;
    struct thread_config config = {"engine", beat_unless_stuck, &is_stuck, span_ms(300)};
    if (log_start(&settings, "test", "child") != STATUS_OK || watchdog_start(NULL) != STATUS_OK ||
        thread_start(&thread, &config) != STATUS_OK) {
        return 1;
    }
    return thread_join(&thread, soon()) == STATUS_OK ? 2 : 3; /* the watchdog is faster */
}

static void return_when_told(struct thread *self, void *arg) {
    atomic_bool *is_told = arg;
    while (!atomic_load(is_told)) {
        thread_beat(&self->beat);
        (void)poll(NULL, 0, 10);
    }
}

/* What a bug in a loop looks like from outside: its function returns. The end of another one that
 * was announced is in order. */
static int child_ends(void) {
    struct log_settings settings = {LOG_LEVEL_INFO, LOG_FORMAT_HUMAN};
    atomic_bool is_told = false;
    struct thread good;
    struct thread bad;
    struct thread_config good_config = {"good", return_when_told, &is_told, span_ms(5000)};
    struct thread_config bad_config = {"link", return_when_told, &is_told, span_ms(60000)};
    if (log_start(&settings, "test", "child") != STATUS_OK || watchdog_start(NULL) != STATUS_OK ||
        thread_start(&good, &good_config) != STATUS_OK) {
        return 1;
    }
    thread_expect_end(&good);
    atomic_store(&is_told, true);
    if (thread_join(&good, soon()) != STATUS_OK || thread_start(&bad, &bad_config) != STATUS_OK) {
        return 2;
    }
    return thread_join(&bad, soon()) == STATUS_OK ? 3 : 4;
}

/* The faults that --test-hooks can put into a program. */
static int child_meets(enum thread_fault fault, const char *victim) {
    struct log_settings settings = {LOG_LEVEL_INFO, LOG_FORMAT_HUMAN};
    struct thread thread;
    struct thread_config config = {"engine", beat_until_stopped, NULL, span_ms(300)};
    if (log_start(&settings, "test", "child") != STATUS_OK || watchdog_start(NULL) != STATUS_OK ||
        thread_start(&thread, &config) != STATUS_OK) {
        return 1;
    }
    struct instant deadline = soon();
    while (!thread_test_fault(victim, fault)) {
        if (thread_test_fault("nobody", fault) || instant_reached(clock_now(), deadline)) {
            return 2;
        }
        (void)poll(NULL, 0, 1);
    }
    while (!instant_reached(clock_now(), deadline)) {
        watchdog_watch();
        (void)poll(NULL, 0, 20);
    }
    return 3;
}

/* The watched thread beats up to the pause, and again only some ticks after it: on the plain clock
 * it was silent for longer than its limit, in observed time it was not. */
static int child_is_paused(void) {
    signals_block();
    atomic_bool is_stuck = false;
    struct thread thread;
    struct thread_config config = {"busy", beat_unless_stuck, &is_stuck, span_ms(1500)};
    if (watchdog_start(NULL) != STATUS_OK || thread_start(&thread, &config) != STATUS_OK) {
        return 1;
    }
    (void)poll(NULL, 0, 50); /* at least one beat after the first */
    atomic_store(&is_stuck, true);
    (void)poll(NULL, 0, 250); /* the watchdog has seen that beat and begun to count */
    (void)!write(STDERR_FILENO, "ready\n", 6); /* the parent fails without it */
    if (signals_wait(soon()) != SIGTERM) {
        return 2;
    }
    struct instant deadline = soon();
    while (watchdog_pauses() == 0 && !instant_reached(clock_now(), deadline)) {
        (void)poll(NULL, 0, 10);
    }
    (void)poll(NULL, 0, 300);
    atomic_store(&is_stuck, false);
    (void)poll(NULL, 0, 300);
    thread_ask_stop(&thread);
    if (thread_join(&thread, soon()) != STATUS_OK) {
        return 3;
    }
    watchdog_stop();
    return watchdog_pauses() > 0 ? 0 : 4;
}

static pid_t spawn_child(const char *role, int *errors_out) {
    int ends[2];
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    assert_int_equal(posix_spawn_file_actions_init(&actions), 0);
    assert_int_equal(posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO), 0);
    char program[] = "test_thread";
    char copy[32];
    text_copy(copy, sizeof copy, role);
    char *argv[] = {program, copy, NULL};
    pid_t pid = 0;
    assert_int_equal(posix_spawn(&pid, "/proc/self/exe", &actions, NULL, argv, environ), 0);
    assert_int_equal(posix_spawn_file_actions_destroy(&actions), 0);
    assert_int_equal(close(ends[1]), 0);
    *errors_out = ends[0];
    return pid;
}

static void read_all(int fd, char *text, size_t cap) {
    size_t len = 0;
    ssize_t got = 0;
    while (len + 1 < cap && (got = read(fd, text + len, cap - 1 - len)) > 0) {
        len += (size_t)got;
    }
    text[len] = '\0';
    assert_int_equal(close(fd), 0);
}

static void test_watchdog_ends_the_process_and_says_who_hung(void **state) {
    (void)state;
    int errors = -1;
    pid_t pid = spawn_child("hangs", &errors);
    char text[4096];
    read_all(errors, text, sizeof text);
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), WATCHDOG_EXIT_STATUS);
    assert_contains(text, " ERROR test/child thread does not beat");
    assert_contains(text, " thread engine silent ");
}

static void expect_end(const char *role, const char *line, const char *more) {
    int errors = -1;
    pid_t pid = spawn_child(role, &errors);
    char text[4096];
    read_all(errors, text, sizeof text);
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != WATCHDOG_EXIT_STATUS) {
        fail_msg("child ended with status %x: %s", status, text);
    }
    assert_contains(text, line);
    assert_contains(text, more);
}

static void test_a_thread_that_ends_unasked_ends_the_process(void **state) {
    (void)state;
    expect_end("ends", " ERROR test/child a thread has ended that nobody told to", " thread link");
}

static void test_a_thread_can_be_made_to_hang_or_die(void **state) {
    (void)state;
    expect_end("hang", " ERROR test/child thread does not beat", " thread engine silent ");
    expect_end("die", " ERROR test/child a thread has ended that nobody told to", " thread engine");
}

static void test_the_end_of_the_log_thread_is_said_without_it(void **state) {
    (void)state;
    expect_end("log-dies", "a thread has ended that nobody told to", "thread=log");
}

static void test_the_watchdog_is_watched_too(void **state) {
    (void)state;
    expect_end("watchdog-hangs", " ERROR test/child thread does not beat", " thread watchdog ");
}

static void test_watchdog_forgives_a_process_that_was_stopped(void **state) {
    (void)state;
    int errors = -1;
    pid_t pid = spawn_child("paused", &errors);
    char ready[6];
    assert_int_equal(read(errors, ready, sizeof ready), 6);
    assert_int_equal(kill(pid, SIGSTOP), 0);
    int status = 0;
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    assert_true(WIFSTOPPED(status));
    (void)poll(NULL, 0, 2500); /* well past the thread's limit: the pause is the input here */
    assert_int_equal(kill(pid, SIGTERM), 0);
    assert_int_equal(kill(pid, SIGCONT), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    char text[4096];
    read_all(errors, text, sizeof text);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        fail_msg("child ended with status %x: %s", status, text);
    }
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "hangs") == 0) {
        return child_hangs();
    }
    if (argc == 2 && strcmp(argv[1], "paused") == 0) {
        return child_is_paused();
    }
    if (argc == 2 && strcmp(argv[1], "ends") == 0) {
        return child_ends();
    }
    if (argc == 2 && strcmp(argv[1], "hang") == 0) {
        return child_meets(THREAD_FAULT_HANG, "engine");
    }
    if (argc == 2 && strcmp(argv[1], "die") == 0) {
        return child_meets(THREAD_FAULT_DIE, "engine");
    }
    if (argc == 2 && strcmp(argv[1], "log-dies") == 0) {
        return child_meets(THREAD_FAULT_DIE, "log");
    }
    if (argc == 2 && strcmp(argv[1], "watchdog-hangs") == 0) {
        return child_meets(THREAD_FAULT_HANG, "watchdog");
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_thread_carries_its_name),
        cmocka_unit_test(test_thread_starts_with_signals_blocked_but_faults_open),
        cmocka_unit_test(test_join_reports_a_timeout_and_succeeds_later_and_twice),
        cmocka_unit_test(test_snapshot_and_json_list_live_threads_only),
        cmocka_unit_test(test_watchdog_reports_only_the_silent_thread_and_once_per_silence),
        cmocka_unit_test(test_watchdog_forgives_a_thread_that_is_kept_from_running),
        cmocka_unit_test(test_watchdog_forgives_a_thread_that_waits_for_the_kernel),
        cmocka_unit_test(test_watchdog_reports_a_thread_that_spins),
        cmocka_unit_test(test_watchdog_starts_again_after_a_stop),
        cmocka_unit_test(test_watchdog_ends_the_process_and_says_who_hung),
        cmocka_unit_test(test_watchdog_forgives_a_process_that_was_stopped),
        cmocka_unit_test(test_a_thread_that_ends_unasked_ends_the_process),
        cmocka_unit_test(test_a_thread_can_be_made_to_hang_or_die),
        cmocka_unit_test(test_the_end_of_the_log_thread_is_said_without_it),
        cmocka_unit_test(test_the_watchdog_is_watched_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
