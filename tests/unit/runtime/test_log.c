#include "runtime/log.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/check.h"
#include "runtime/clock.h"
#include "unit.h"

#define TEXT_CAP (4 * 1024 * 1024)

/* A running log whose lines can be read back. */
struct fixture {
    int read_fd;
    int write_fd;
    char *text;
};

static void fixture_start(struct fixture *fixture, enum log_level level, enum log_format format) {
    int ends[2];
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    *fixture = (struct fixture){ends[0], ends[1], calloc(1, TEXT_CAP)};
    assert_non_null(fixture->text);
    struct log_settings settings = {level, format};
    log_set_fd(fixture->write_fd);
    assert_int_equal(log_start(&settings, "router", "r1"), STATUS_OK);
}

/* Stops the log and reads what it wrote. */
static const char *fixture_read(struct fixture *fixture) {
    log_stop();
    log_set_fd(2);
    assert_int_equal(close(fixture->write_fd), 0);
    size_t len = 0;
    ssize_t got = 0;
    while ((got = read(fixture->read_fd, fixture->text + len, TEXT_CAP - 1 - len)) > 0) {
        len += (size_t)got;
    }
    fixture->text[len] = '\0';
    assert_int_equal(close(fixture->read_fd), 0);
    return fixture->text;
}

static void fixture_end(struct fixture *fixture) {
    free(fixture->text);
}

static void test_human_line_has_time_level_names_message_and_pairs(void **state) {
    (void)state;
    struct fixture fixture;
    fixture_start(&fixture, LOG_LEVEL_INFO, LOG_FORMAT_HUMAN);
    LOG_INFO("worker registered", LOG_TEXT("worker", "w1"), LOG_U64("pid", 7), LOG_I64("delta", -3),
             LOG_BOOL("local", true), LOG_HEX("slot", 0xabcu), LOG_F64("load", 0.25),
             LOG_SPAN("age", span_us(12500)), LOG_STATUS("status", STATUS_BUSY),
             LOG_ERRNO("error", ENOENT));
    const char *text = fixture_read(&fixture);
    assert_string_equal(
        text + 24, " INFO router/r1 worker registered worker w1 pid 7 delta -3 local true slot "
                   "0000000000000abc load 0.25 age 12.5ms status busy error \"No such file or "
                   "directory\"\n");
    assert_int_equal(text[23], 'Z');
    fixture_end(&fixture);
}

static void test_json_line_is_one_object_with_typed_members(void **state) {
    (void)state;
    struct fixture fixture;
    fixture_start(&fixture, LOG_LEVEL_INFO, LOG_FORMAT_JSON);
    LOG_WARN("odd \"thing\"", LOG_TEXT("id", "a\nb"), LOG_U64("pid", 7),
             LOG_SPAN("age", span_us(12500)), LOG_BOOL("ok", false), LOG_F64("load", 1e300 * 1e300),
             LOG_HEX("slot", 1));
    const char *text = fixture_read(&fixture);
    assert_contains(text, ",\"level\":\"warn\",\"role\":\"router\",\"instance\":\"r1\","
                          "\"message\":\"odd \\\"thing\\\"\",\"id\":\"a\\nb\",\"pid\":7,"
                          "\"age_ms\":12.5,\"ok\":false,\"load\":null,"
                          "\"slot\":\"0000000000000001\"}\n");
    assert_int_equal(text[0], '{');
    fixture_end(&fixture);
}

static void test_values_cannot_forge_lines_or_terminal_codes(void **state) {
    (void)state;
    struct fixture fixture;
    fixture_start(&fixture, LOG_LEVEL_INFO, LOG_FORMAT_HUMAN);
    LOG_INFO("x", LOG_TEXT("a", "1\n2026-01-01 ERROR forged"), LOG_TEXT("b", "\x1b[31mred"),
             LOG_TEXT("c", "\xff\xfe"), LOG_TEXT("d", ""), LOG_TEXT("e", NULL),
             LOG_TEXT("f", "say \"hi\""), LOG_BYTES("g", "a\0b", 3));
    const char *text = fixture_read(&fixture);
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
    assert_null(strchr(text, 0x1b));
    assert_contains(text, " a \"1\\n2026-01-01 ERROR forged\" b \"\\u001b[31mred\" c \"\\xff\\xfe\""
                          " d \"\" e - f \"say \\\"hi\\\"\" g \"a\\u0000b\"\n");
    fixture_end(&fixture);
}

static void test_levels_below_the_limit_are_silent(void **state) {
    (void)state;
    struct fixture fixture;
    fixture_start(&fixture, LOG_LEVEL_WARN, LOG_FORMAT_HUMAN);
    LOG_ERROR("one");
    LOG_WARN("two");
    LOG_INFO("three");
    assert_false(log_is_on(LOG_LEVEL_DEBUG));
    log_set_level(LOG_LEVEL_DEBUG);
    LOG_DEBUG("four");
    const char *text = fixture_read(&fixture);
    assert_contains(text, "ERROR router/r1 one\n");
    assert_contains(text, "WARN router/r1 two\n");
    assert_lacks(text, "three");
    assert_contains(text, "DEBUG router/r1 four\n");
    fixture_end(&fixture);
}

static void test_overlong_lines_are_cut_and_stay_whole(void **state) {
    (void)state;
    static char longest[5000];
    memset(longest, 'y', sizeof longest - 1);
    for (int format = LOG_FORMAT_HUMAN; format <= LOG_FORMAT_JSON; format++) {
        struct fixture fixture;
        fixture_start(&fixture, LOG_LEVEL_INFO, (enum log_format)format);
        LOG_INFO("cut", LOG_TEXT("a", longest), LOG_TEXT("b", longest), LOG_TEXT("c", longest),
                 LOG_U64("d", 4));
        const char *text = fixture_read(&fixture);
        size_t len = strlen(text);
        assert_in_range(len, 1024, LOG_LINE_MAX);
        assert_contains(text, format == LOG_FORMAT_JSON ? ",\"cut\":true}\n" : " cut true\n");
        assert_contains(text, "yyy...");
        assert_lacks(text, "\"d\"");
        fixture_end(&fixture);
    }
}

static uint32_t count_lines(const char *text, const char *part) {
    uint32_t count = 0;
    for (const char *at = text; (at = strstr(at, part)) != NULL; at++) {
        count++;
    }
    return count;
}

static void repeat(uint32_t times) {
    for (uint32_t i = 0; i < times; i++) {
        LOG_WARN("again and again", LOG_U64("number", i));
    }
}

static void test_a_call_site_that_repeats_itself_is_silenced_and_says_so(void **state) {
    (void)state;
    struct fixture fixture;
    fixture_start(&fixture, LOG_LEVEL_INFO, LOG_FORMAT_HUMAN);
    uint32_t tried = 0;
    int64_t second = clock_now().ns / 1000000000;
    while (clock_now().ns / 1000000000 < second + 2) {
        repeat(10);
        tried += 10;
        LOG_INFO("another site is not affected");
        usleep(1000);
    }
    const char *text = fixture_read(&fixture);
    uint32_t written = count_lines(text, "again and again");
    assert_true(tried > 4 * LOG_SITE_BURST);
    assert_true(written <= 4 * LOG_SITE_BURST); /* at most four calendar seconds were touched */
    assert_contains(text, " repeated ");
    assert_contains(text, "another site");
    fixture_end(&fixture);
}

static void test_debug_lines_are_not_silenced(void **state) {
    (void)state;
    struct fixture fixture;
    fixture_start(&fixture, LOG_LEVEL_DEBUG, LOG_FORMAT_HUMAN);
    for (uint32_t i = 0; i < 4 * LOG_SITE_BURST; i++) {
        LOG_DEBUG("per request", LOG_U64("number", i));
    }
    const char *text = fixture_read(&fixture);
    assert_int_equal(count_lines(text, "per request"), 4 * LOG_SITE_BURST);
    fixture_end(&fixture);
}

/* Nobody reads: callers must go on, lines are dropped and counted, and the stop ends too. */
static void test_a_full_sink_drops_lines_and_blocks_nobody(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct fixture fixture;
        int ends[2];
        if (i == 0) {
            assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
        } else {
            assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
        }
        fixture = (struct fixture){ends[0], ends[1], calloc(1, TEXT_CAP)};
        struct log_settings settings = {LOG_LEVEL_DEBUG, LOG_FORMAT_HUMAN};
        log_set_fd(fixture.write_fd);
        assert_int_equal(log_start(&settings, "router", "r1"), STATUS_OK);
        uint64_t before = log_dropped();
        char filler[1000];
        memset(filler, 'z', sizeof filler - 1);
        filler[sizeof filler - 1] = '\0';
        for (uint32_t j = 0; j < 3000; j++) {
            LOG_DEBUG("flood", LOG_TEXT("filler", filler), LOG_U64("number", j));
        }
        LOG_ERROR("still has room");
        assert_false(log_flush(instant_add(clock_now(), span_ms(20))));
        const char *text = fixture_read(&fixture);
        uint64_t dropped = log_dropped() - before;
        assert_true(dropped > 0);
        assert_int_equal(count_lines(text, " DEBUG ") + dropped, 3001);
        fixture_end(&fixture);
    }
}

static void test_lines_survive_a_slow_reader_in_order(void **state) {
    (void)state;
    struct fixture fixture;
    fixture_start(&fixture, LOG_LEVEL_DEBUG, LOG_FORMAT_HUMAN);
    char filler[400];
    memset(filler, 'z', sizeof filler - 1);
    filler[sizeof filler - 1] = '\0';
    for (uint32_t i = 0; i < 500; i++) { /* more than a pipe holds, less than the ring */
        LOG_DEBUG("slow", LOG_TEXT("filler", filler), LOG_U64("number", i));
    }
    /* The pipe is full now; reading it lets the log thread go on. */
    size_t len = 0;
    while (count_lines(fixture.text, "number 499\n") == 0) {
        ssize_t got = read(fixture.read_fd, fixture.text + len, 4096);
        assert_true(got > 0);
        len += (size_t)got;
        fixture.text[len] = '\0';
    }
    const char *at = fixture.text;
    for (uint32_t i = 0; i < 500; i++) {
        char wanted[32];
        (void)snprintf(wanted, sizeof wanted, " number %u\n", i);
        at = strstr(at, wanted);
        assert_non_null(at);
    }
    char *text = fixture.text;
    fixture.text = calloc(1, TEXT_CAP);
    assert_string_equal(fixture_read(&fixture), "");
    free(text);
    fixture_end(&fixture);
}

static void *log_some(void *arg) {
    for (uint32_t i = 0; i < 40; i++) {
        LOG_DEBUG("from a thread", LOG_TEXT("thread", arg), LOG_U64("number", i));
    }
    return NULL;
}

static void test_lines_of_many_threads_are_never_mixed(void **state) {
    (void)state;
    struct fixture fixture;
    fixture_start(&fixture, LOG_LEVEL_DEBUG, LOG_FORMAT_HUMAN);
    pthread_t threads[4];
    static char names[4][4] = {"t0", "t1", "t2", "t3"};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, log_some, names[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
    uint32_t lines = 0;
    const char *line = fixture_read(&fixture);
    for (const char *end = strchr(line, '\n'); end != NULL; end = strchr(line, '\n')) {
        char name[8];
        unsigned number = 0;
        int used = 0;
        assert_int_equal(sscanf(line + 24, " DEBUG router/r1 from a thread thread %7s number %u%n",
                                name, &number, &used),
                         2);
        assert_ptr_equal(line + 24 + used, end); /* nothing of another line behind it */
        lines++;
        line = end + 1;
    }
    assert_string_equal(line, "");
    assert_int_equal(lines, 160);
    fixture_end(&fixture);
}

static void test_id_may_come_later(void **state) {
    (void)state;
    struct fixture fixture;
    int ends[2];
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    fixture = (struct fixture){ends[0], ends[1], calloc(1, TEXT_CAP)};
    struct log_settings settings = {LOG_LEVEL_INFO, LOG_FORMAT_HUMAN};
    log_set_fd(fixture.write_fd);
    LOG_INFO("before the start");
    assert_int_equal(log_start(&settings, "decode", NULL), STATUS_OK);
    LOG_INFO("no id");
    log_set_id("d7");
    LOG_INFO("with id");
    const char *text = fixture_read(&fixture);
    assert_contains(text, " before the start\n");
    assert_contains(text, " INFO decode no id\n");
    assert_contains(text, " INFO decode/d7 with id\n");
    fixture_end(&fixture);
}

static void test_the_readers_file_mode_is_left_alone(void **state) {
    (void)state;
    struct fixture fixture;
    fixture_start(&fixture, LOG_LEVEL_INFO, LOG_FORMAT_HUMAN);
    LOG_INFO("x");
    /* Other processes share this opening: it must stay blocking. */
    assert_int_equal(fcntl(fixture.write_fd, F_GETFL) & O_NONBLOCK, 0);
    assert_contains(fixture_read(&fixture), " x\n");
    fixture_end(&fixture);
}

/* Runs as a child: a failed CHECK must bring out what was logged before it. */
static int child_fails_a_check(void) {
    struct log_settings settings = {LOG_LEVEL_INFO, LOG_FORMAT_HUMAN};
    if (log_start(&settings, "decode", "d1") != STATUS_OK) {
        return 1;
    }
    LOG_INFO("last words");
    CHECK_OP(1, ==, 2);
    return 2;
}

static void test_a_failed_check_flushes_the_log_before_it_aborts(void **state) {
    (void)state;
    int ends[2];
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    assert_int_equal(posix_spawn_file_actions_init(&actions), 0);
    assert_int_equal(posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO), 0);
    char program[] = "test_log";
    char role[] = "check";
    char *argv[] = {program, role, NULL};
    pid_t pid = 0;
    assert_int_equal(posix_spawn(&pid, "/proc/self/exe", &actions, NULL, argv, environ), 0);
    assert_int_equal(posix_spawn_file_actions_destroy(&actions), 0);
    assert_int_equal(close(ends[1]), 0);
    char text[8192] = "";
    size_t len = 0;
    ssize_t got = 0;
    while ((got = read(ends[0], text + len, sizeof text - 1 - len)) > 0) {
        len += (size_t)got;
    }
    text[len] = '\0';
    assert_int_equal(close(ends[0]), 0);
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status));
    assert_contains(text, "last words\n");
    assert_contains(text, "check failed: 1 == 2 (1, 2)");
    assert_contains(text, " ERROR decode/d1 check failed file ");
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "check") == 0) {
        return child_fails_a_check();
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_human_line_has_time_level_names_message_and_pairs),
        cmocka_unit_test(test_json_line_is_one_object_with_typed_members),
        cmocka_unit_test(test_values_cannot_forge_lines_or_terminal_codes),
        cmocka_unit_test(test_levels_below_the_limit_are_silent),
        cmocka_unit_test(test_overlong_lines_are_cut_and_stay_whole),
        cmocka_unit_test(test_a_call_site_that_repeats_itself_is_silenced_and_says_so),
        cmocka_unit_test(test_debug_lines_are_not_silenced),
        cmocka_unit_test(test_a_full_sink_drops_lines_and_blocks_nobody),
        cmocka_unit_test(test_lines_survive_a_slow_reader_in_order),
        cmocka_unit_test(test_lines_of_many_threads_are_never_mixed),
        cmocka_unit_test(test_id_may_come_later),
        cmocka_unit_test(test_the_readers_file_mode_is_left_alone),
        cmocka_unit_test(test_a_failed_check_flushes_the_log_before_it_aborts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
