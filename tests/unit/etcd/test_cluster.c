#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/check.h"
#include "support/etcd.h"
#include "unit/etcd/bed.h"

static struct test_etcd *servers;

static int start(void **state) {
    (void)state;
    servers = test_etcd_start(3);
    return 0;
}

static int stop(void **state) {
    (void)state;
    test_etcd_destroy(servers);
    return 0;
}

/* The endpoints of the members 1 and 2. */
static void others(char *text, size_t cap) {
    (void)snprintf(text, cap, "%s,%s", test_etcd_endpoint(servers, 1),
                   test_etcd_endpoint(servers, 2));
}

static void test_a_watch_leaves_a_killed_member_for_another(void **state) {
    (void)state;
    struct bed bed;
    struct bed writer;
    struct tape tape;
    char endpoints[160];
    others(endpoints, sizeof(endpoints));
    bed_open(&bed, test_etcd_endpoints(servers));
    bed_open(&writer, endpoints);
    tape_open(&tape, &bed, "killed/", 0);
    tape_wait_following(&tape, 1);
    test_etcd_kill(servers, 0);
    bed_put_surely(&writer, "killed/00001", "1");
    tape_wait_value(&tape, 1, "1");
    struct bed_reply reply = bed_range(&bed, "killed/00001", false, 0, 0);
    assert_int_equal(reply.status, STATUS_OK);
    bed_reply_fini(&reply);
    tape_check(&tape, &writer, "killed/");
    assert_int_equal(tape.resets, 0);
    test_etcd_restart(servers, 0);
    tape_close(&tape);
    tape_fini(&tape);
    bed_close(&writer);
    bed_close(&bed);
}

static void test_a_watch_leaves_a_frozen_member_for_another(void **state) {
    (void)state;
    struct bed bed;
    struct bed writer;
    struct tape tape;
    char endpoints[160];
    others(endpoints, sizeof(endpoints));
    bed_open(&bed, test_etcd_endpoints(servers));
    bed_open(&writer, endpoints);
    tape_open(&tape, &bed, "frozen/", 0);
    tape_wait_following(&tape, 1);
    test_etcd_freeze(servers, 0);
    bed_put_surely(&writer, "frozen/00001", "1");
    tape_wait_value(&tape, 1, "1");
    bed_put_surely(&bed, "frozen/00002", "2"); /* calls leave it, too */
    tape_wait_value(&tape, 2, "2");
    test_etcd_thaw(servers, 0);
    tape_check(&tape, &writer, "frozen/");
    tape_close(&tape);
    tape_fini(&tape);
    bed_close(&writer);
    bed_close(&bed);
}

static void test_a_member_without_a_majority_is_not_trusted_to_be_silent(void **state) {
    (void)state;
    struct bed bed;
    struct tape tape;
    bed_open(&bed, test_etcd_endpoint(servers, 0));
    tape_open(&tape, &bed, "alone/", 0);
    tape_wait_following(&tape, 1);
    test_etcd_kill(servers, 1);
    test_etcd_kill(servers, 2);
    tape_wait_broken(&tape, 1); /* its connection is well, but it has no leader */
    test_etcd_restart(servers, 1);
    bed_put_surely(&bed, "alone/00001", "1");
    tape_wait_value(&tape, 1, "1");
    test_etcd_restart(servers, 2);
    tape_check(&tape, &bed, "alone/");
    tape_close(&tape);
    tape_fini(&tape);
    bed_close(&bed);
}

/* ---- everything at once ---------------------------------------------------------------------- */

struct storm {
    struct bed bed;
    pthread_t thread;
    atomic_bool is_stop_asked;
    atomic_uint done;
    atomic_uint failed;
};

/* A numbered sequence of puts and deletes; what fails may have happened or not. */
static void *writer_main(void *arg) {
    struct storm *storm = arg;
    for (unsigned i = 0; !atomic_load(&storm->is_stop_asked); i++) {
        char key[64];
        char value[16];
        (void)snprintf(key, sizeof(key), "storm/%05u", i % 37);
        (void)snprintf(value, sizeof(value), "%u", i);
        struct bed_reply reply =
            i % 7 == 3 ? bed_delete(&storm->bed, key, false) : bed_put(&storm->bed, key, value, 0);
        atomic_fetch_add(reply.status == STATUS_OK ? &storm->done : &storm->failed, 1);
        bed_reply_fini(&reply);
        const struct timespec pause = {.tv_nsec = 500000};
        (void)nanosleep(&pause, NULL); /* the machine is shared with etcd's three members */
    }
    return NULL;
}

/* Lets the writer get on by some operations while the trouble lasts. */
static void let_write(struct storm *storm, unsigned operations) {
    unsigned until = atomic_load(&storm->done) + operations;
    for (unsigned tries = 0; atomic_load(&storm->done) < until; tries++) {
        const struct timespec pause = {.tv_nsec = 10000000};
        (void)nanosleep(&pause, NULL);
        assert_true(tries < BED_WAIT_S * 100);
    }
}

static void compact_now(struct storm *storm) {
    struct bed_reply reply = bed_range(&storm->bed, "storm/", true, 1, 0);
    assert_int_equal(reply.status, STATUS_OK);
    struct bed_reply compacted = bed_compact(&storm->bed, reply.header.revision);
    bed_reply_fini(&reply);
    bed_reply_fini(&compacted); /* a lost answer is as good: the next restart shows it */
}

static void test_no_event_is_lost_or_doubled_whatever_happens(void **state) {
    (void)state;
    struct bed bed;
    struct bed narrow;
    struct tape tape;
    struct tape narrow_tape;
    struct storm writer = {.is_stop_asked = false};
    bed_open(&bed, test_etcd_endpoints(servers));
    bed_open(&narrow, test_etcd_endpoint(servers, 0)); /* only knows member 0 */
    bed_open(&writer.bed, test_etcd_endpoints(servers));
    tape_open(&tape, &bed, "storm/", 0);
    tape_open(&narrow_tape, &narrow, "storm/", 0);
    tape_wait_following(&tape, 1);
    tape_wait_following(&narrow_tape, 1);
    assert_int_equal(pthread_create(&writer.thread, NULL, writer_main, &writer), 0);
    let_write(&writer, 100);
    for (unsigned member = 0; member < 3; member++) { /* one of them leads */
        test_etcd_kill(servers, member);
        let_write(&writer, 50);
        test_etcd_restart(servers, member);
        let_write(&writer, 50);
    }
    for (unsigned member = 0; member < 3; member++) {
        test_etcd_freeze(servers, member);
        let_write(&writer, 50);
        test_etcd_thaw(servers, member);
        let_write(&writer, 50);
    }
    test_etcd_kill(servers, 0); /* and what the narrow watch misses is compacted away */
    let_write(&writer, 200);
    compact_now(&writer);
    test_etcd_restart(servers, 0);
    tape_wait_synced(&narrow_tape, 2);
    let_write(&writer, 100);
    test_etcd_kill(servers, 0); /* all of them */
    test_etcd_kill(servers, 1);
    test_etcd_kill(servers, 2);
    tape_wait_broken(&tape, 1);
    test_etcd_restart_all(servers);
    let_write(&writer, 100);
    atomic_store(&writer.is_stop_asked, true);
    assert_int_equal(pthread_join(writer.thread, NULL), 0);
    tape_check(&tape, &writer.bed, "storm/");
    tape_check(&narrow_tape, &writer.bed, "storm/");
    tape_close(&tape);
    tape_close(&narrow_tape);
    assert_int_equal(tape.resets + narrow_tape.resets, 0);
    assert_true(narrow_tape.listed > 0);
    print_message("%u writes, %u without an answer; watched %llu events over %u streams; narrow "
                  "%llu (%llu listed) over %u\n",
                  atomic_load(&writer.done), atomic_load(&writer.failed),
                  (unsigned long long)tape.events, tape.following,
                  (unsigned long long)narrow_tape.events, (unsigned long long)narrow_tape.listed,
                  narrow_tape.following);
    tape_fini(&tape);
    tape_fini(&narrow_tape);
    bed_close(&writer.bed);
    bed_close(&narrow);
    bed_close(&bed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_watch_leaves_a_killed_member_for_another),
        cmocka_unit_test(test_a_watch_leaves_a_frozen_member_for_another),
        cmocka_unit_test(test_a_member_without_a_majority_is_not_trusted_to_be_silent),
        cmocka_unit_test(test_no_event_is_lost_or_doubled_whatever_happens),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
