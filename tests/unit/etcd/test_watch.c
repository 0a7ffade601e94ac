#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/check.h"
#include "support/etcd.h"
#include "unit/etcd/bed.h"
#include "unit/etcd/proxy.h"

static struct test_etcd *server;

static int start(void **state) {
    (void)state;
    server = test_etcd_start(1);
    return 0;
}

static int stop(void **state) {
    (void)state;
    test_etcd_destroy(server);
    return 0;
}

static int64_t put(struct bed *bed, const char *key, const char *value) {
    struct bed_reply reply = bed_put(bed, key, value, 0);
    if (reply.status != STATUS_OK) {
        fail_msg("put: %s", reply.message);
    }
    bed_reply_fini(&reply);
    return reply.header.revision;
}

static void delete (struct bed *bed, const char *key, bool is_prefix) {
    struct bed_reply reply = bed_delete(bed, key, is_prefix);
    if (reply.status != STATUS_OK) {
        fail_msg("delete: %s", reply.message);
    }
    bed_reply_fini(&reply);
}

/* prefix00000 ... in transactions of 100, with the value. */
static void many_put(struct bed *bed, const char *prefix, unsigned from, unsigned count,
                     const char *value) {
    static struct etcd_op ops[100];
    static char keys[100][64];
    for (unsigned i = 0; i < count; i += 100) {
        unsigned len = count - i < 100 ? count - i : 100;
        for (unsigned j = 0; j < len; j++) {
            (void)snprintf(keys[j], sizeof(keys[j]), "%s%05u", prefix, from + i + j);
            ops[j] = (struct etcd_op){
                .kind = ETCD_OP_PUT, .key = etcd_text(keys[j]), .value = etcd_text(value)};
        }
        const struct etcd_txn txn = {.then_ops = ops, .then_len = len};
        struct bed_reply reply = bed_txn(bed, &txn);
        assert_int_equal(reply.status, STATUS_OK);
        bed_reply_fini(&reply);
    }
}

static void many_delete(struct bed *bed, const char *prefix, unsigned from, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        char key[64];
        (void)snprintf(key, sizeof(key), "%s%05u", prefix, from + i);
        delete (bed, key, false);
    }
}

static void proxied(char *text, size_t cap, struct proxy *proxy) {
    (void)snprintf(text, cap, "http://127.0.0.1:%u", proxy_port(proxy));
}

static void test_a_watch_lists_and_then_follows(void **state) {
    (void)state;
    struct bed bed;
    struct tape tape;
    bed_open(&bed, test_etcd_endpoints(server));
    put(&bed, "follow/00001", "a");
    put(&bed, "follow/00002", "b");
    put(&bed, "other/00003", "x");
    tape_open(&tape, &bed, "follow/", 0);
    tape_wait_synced(&tape, 1);
    assert_int_equal(tape.there, 2);
    put(&bed, "follow/00001", "c");
    put(&bed, "follow/00004", "d");
    delete (&bed, "follow/00002", false);
    tape_wait_value(&tape, 1, "c");
    tape_wait_value(&tape, 4, "d");
    tape_wait_value(&tape, 2, NULL);
    tape_check(&tape, &bed, "follow/");
    assert_int_equal(tape.listed, 2);
    tape_close(&tape);
    tape_fini(&tape);
    bed_close(&bed);
}

static void test_a_watch_from_a_revision_gets_each_event_since(void **state) {
    (void)state;
    struct bed bed;
    struct tape tape;
    bed_open(&bed, test_etcd_endpoints(server));
    int64_t first = put(&bed, "since/00001", "0");
    for (unsigned i = 1; i < 50; i++) {
        char value[16];
        (void)snprintf(value, sizeof(value), "%u", i);
        put(&bed, "since/00001", value);
    }
    delete (&bed, "since/00001", false);
    put(&bed, "since/00001", "again");
    tape_open(&tape, &bed, "since/", first);
    tape_wait_value(&tape, 1, "again");
    assert_int_equal(tape.events, 52);
    assert_int_equal(tape.listed, 0);
    assert_int_equal(tape.synced, 0);
    tape_check(&tape, &bed, "since/");
    tape_close(&tape);
    tape_fini(&tape);
    bed_close(&bed);
}

static void test_a_watch_from_a_compacted_revision_lists(void **state) {
    (void)state;
    struct bed bed;
    struct tape tape;
    bed_open(&bed, test_etcd_endpoints(server));
    int64_t first = put(&bed, "old/00001", "1");
    int64_t last = put(&bed, "old/00001", "2");
    struct bed_reply reply = bed_compact(&bed, last);
    assert_int_equal(reply.status, STATUS_OK);
    bed_reply_fini(&reply);
    tape_open(&tape, &bed, "old/", first);
    tape_wait_synced(&tape, 1);
    tape_check(&tape, &bed, "old/");
    assert_int_equal(tape.listed, 1);
    assert_non_null(strstr(tape.last_broken, "compacted"));
    tape_close(&tape);
    tape_fini(&tape);
    bed_close(&bed);
}

static void test_a_broken_stream_is_resumed_without_listing(void **state) {
    (void)state;
    struct bed bed;
    struct bed writer;
    struct tape tape;
    struct proxy *proxy = proxy_open(test_etcd_port(server, 0));
    char endpoint[64];
    proxied(endpoint, sizeof(endpoint), proxy);
    bed_open(&bed, endpoint);
    bed_open(&writer, test_etcd_endpoints(server));
    tape_open(&tape, &bed, "resume/", 0);
    tape_wait_following(&tape, 1);
    for (unsigned i = 0; i < 10; i++) {
        char value[16];
        (void)snprintf(value, sizeof(value), "%u", i);
        proxy_cut(proxy);
        put(&writer, "resume/00001", value); /* while there is no stream */
        put(&writer, "resume/00002", value);
        delete (&writer, "resume/00002", false);
        tape_wait_value(&tape, 1, value);
    }
    tape_check(&tape, &writer, "resume/");
    assert_int_equal(tape.synced, 1);
    assert_int_equal(tape.listed, 0);
    assert_true(tape.following >= 11);
    tape_close(&tape);
    tape_fini(&tape);
    bed_close(&writer);
    bed_close(&bed);
    proxy_close(proxy);
}

/* 10,000 keys; while the stream is held, 300 change, and etcd compacts what would tell. */
static void test_after_compaction_only_the_difference_is_delivered(void **state) {
    (void)state;
    struct bed bed;
    struct bed writer;
    struct tape tape;
    struct proxy *proxy = proxy_open(test_etcd_port(server, 0));
    char endpoint[64];
    proxied(endpoint, sizeof(endpoint), proxy);
    bed_open(&bed, endpoint);
    bed_open(&writer, test_etcd_endpoints(server));
    many_put(&writer, "many/", 0, 10000, "1");
    tape_open(&tape, &bed, "many/", 0);
    tape_wait_synced(&tape, 1);
    tape_wait_following(&tape, 1);
    assert_int_equal(tape.events, 10000);
    proxy_set_mode(proxy, PROXY_HOLD);
    proxy_cut(proxy);
    tape_wait_broken(&tape, 1);
    many_put(&writer, "many/", 0, 100, "2");
    many_put(&writer, "many/", 10000, 100, "2");
    many_delete(&writer, "many/", 5000, 100);
    struct bed_reply reply = bed_range(&writer, "many/", true, 1, 0);
    struct bed_reply compacted = bed_compact(&writer, reply.header.revision);
    assert_int_equal(compacted.status, STATUS_OK);
    bed_reply_fini(&reply);
    bed_reply_fini(&compacted);
    proxy_set_mode(proxy, PROXY_PASS);
    tape_wait_synced(&tape, 2);
    assert_int_equal(tape.events, 10300);
    assert_int_equal(tape.there, 10000);
    tape_check(&tape, &writer, "many/");
    tape_close(&tape);
    tape_fini(&tape);
    delete (&writer, "many/", true);
    bed_close(&writer);
    bed_close(&bed);
    proxy_close(proxy);
}

static void test_a_restarted_etcd_is_followed_on(void **state) {
    (void)state;
    struct bed bed;
    struct tape tape;
    bed_open(&bed, test_etcd_endpoints(server));
    tape_open(&tape, &bed, "restart/", 0);
    tape_wait_following(&tape, 1);
    put(&bed, "restart/00001", "before");
    for (unsigned i = 0; i < 2; i++) {
        test_etcd_kill(server, 0);
        tape_wait_broken(&tape, i + 1);
        test_etcd_restart(server, 0);
        char value[16];
        (void)snprintf(value, sizeof(value), "after %u", i);
        bed_put_surely(&bed, "restart/00001", value);
        tape_wait_value(&tape, 1, value);
    }
    tape_check(&tape, &bed, "restart/");
    assert_int_equal(tape.resets, 0);
    tape_close(&tape);
    tape_fini(&tape);
    bed_close(&bed);
}

static void test_an_etcd_that_forgot_everything_is_listed_anew(void **state) {
    (void)state;
    struct bed bed;
    struct tape tape;
    bed_open(&bed, test_etcd_endpoints(server));
    tape_open(&tape, &bed, "forgot/", 0);
    tape_wait_following(&tape, 1);
    put(&bed, "forgot/00001", "1");
    put(&bed, "forgot/00002", "2");
    tape_wait_value(&tape, 2, "2");
    test_etcd_kill(server, 0);
    test_etcd_wipe(server, 0);
    test_etcd_restart(server, 0);
    tape_wait_value(&tape, 1, NULL);
    tape_wait_value(&tape, 2, NULL);
    assert_int_equal(tape.resets, 1);
    bed_put_surely(&bed, "forgot/00002", "new");
    tape_wait_value(&tape, 2, "new");
    tape_check(&tape, &bed, "forgot/");
    tape_close(&tape);
    tape_fini(&tape);
    bed_close(&bed);
}

/* The listing was good and the stream would wait for ever for a revision that is far away. */
static void test_history_lost_between_the_listing_and_the_stream_is_noticed(void **state) {
    (void)state;
    for (unsigned round = 0; round < 5; round++) { /* whether it falls between is chance */
        struct bed bed;
        struct tape tape;
        bed_open(&bed, test_etcd_endpoints(server));
        for (unsigned i = 0; i < 5; i++) {
            put(&bed, "between/00001", "1");
        }
        tape_open(&tape, &bed, "between/", 0);
        tape_wait_synced(&tape, 1);
        test_etcd_kill(server, 0);
        test_etcd_wipe(server, 0);
        test_etcd_restart(server, 0);
        tape_wait_value(&tape, 1, NULL);
        tape_check(&tape, &bed, "between/");
        tape_close(&tape);
        tape_fini(&tape);
        bed_close(&bed);
    }
}

static void test_events_in_fragments_arrive_once_and_whole(void **state) {
    (void)state;
    struct bed bed;
    struct tape tape;
    bed_open(&bed, test_etcd_endpoints(server));
    size_t len = 200000;
    char *value = malloc(len + 1);
    assert_non_null(value);
    memset(value, 'x', len);
    value[len] = 0;
    int64_t first = 0;
    for (unsigned i = 0; i < 40; i++) { /* 8 MB: etcd cuts an answer at about 2 MB */
        char key[64];
        (void)snprintf(key, sizeof(key), "large/%05u", i);
        int64_t revision = put(&bed, key, value);
        first = i == 0 ? revision : first;
    }
    free(value);
    tape_open(&tape, &bed, "large/", first);
    tape_wait_value(&tape, 39, "xxxxxxxxxxxxxxxxxxxxxxx");
    assert_int_equal(tape.events, 40);
    assert_int_equal(tape.value_bytes, 40 * len);
    assert_int_equal(tape.broken, 0);
    tape_check(&tape, &bed, "large/");
    tape_close(&tape);
    tape_fini(&tape);
    delete (&bed, "large/", true);
    bed_close(&bed);
}

static void test_a_silent_etcd_is_noticed_in_each_state_and_left(void **state) {
    (void)state;
    struct bed bed;
    struct bed writer;
    struct tape tape;
    struct proxy *proxy = proxy_open(test_etcd_port(server, 0));
    char endpoints[128];
    (void)snprintf(endpoints, sizeof(endpoints), "http://127.0.0.1:%u,%s", proxy_port(proxy),
                   test_etcd_endpoints(server));
    bed_open(&bed, endpoints);
    bed_open(&writer, test_etcd_endpoints(server));
    tape_open(&tape, &bed, "silent/", 0);
    tape_wait_following(&tape, 1);
    proxy_set_mode(proxy, PROXY_HOLD); /* the stream stays open and says nothing any more */
    put(&writer, "silent/00001", "1");
    tape_wait_value(&tape, 1, "1"); /* by keep-alive, over the second endpoint */
    assert_true(tape.broken >= 1);
    tape_check(&tape, &writer, "silent/");
    tape_close(&tape);
    tape_fini(&tape);
    tape_open(&tape, &bed, "silent/", 0); /* and a new watch is not stuck either */
    tape_wait_synced(&tape, 1);
    tape_close(&tape);
    tape_fini(&tape);
    bed_close(&writer);
    bed_close(&bed);
    proxy_close(proxy);
}

static void test_a_prefix_with_too_many_keys_says_so_and_recovers(void **state) {
    (void)state;
    struct bed bed;
    struct tape tape;
    const struct etcd_config config = {.endpoints = test_etcd_endpoints(server),
                                       .watch_keys_max = 10,
                                       .backoff_max = span_ms(200)};
    bed_open_with(&bed, &config);
    many_put(&bed, "toomany/", 0, 9, "1");
    tape_open(&tape, &bed, "toomany/", 0);
    tape_wait_following(&tape, 1);
    put(&bed, "toomany/00010", "1");
    put(&bed, "toomany/00011", "1"); /* the eleventh */
    tape_wait_broken(&tape, 3);
    assert_non_null(strstr(tape.last_broken, "watch_keys_max"));
    assert_int_equal(tape.there, 10);
    many_delete(&bed, "toomany/", 0, 9);
    tape_wait_synced(&tape, 2);
    tape_check(&tape, &bed, "toomany/");
    tape_close(&tape);
    tape_fini(&tape);
    bed_close(&bed);
}

static void test_a_watch_closes_once_from_every_state(void **state) {
    (void)state;
    struct bed bed;
    struct tape tape;
    struct proxy *proxy = proxy_open(test_etcd_port(server, 0));
    char endpoint[64];
    proxied(endpoint, sizeof(endpoint), proxy);
    bed_open(&bed, endpoint);
    tape_open(&tape, &bed, "close/", 0); /* not even begun */
    tape_close(&tape);
    tape_fini(&tape);
    tape_open(&tape, &bed, "close/", 0);
    tape_wait_following(&tape, 1);
    etcd_watch_close(tape.watch); /* twice */
    tape_close(&tape);
    tape_fini(&tape);
    tape_open(&tape, &bed, "close/", 0);
    tape_wait_following(&tape, 1);
    proxy_set_mode(proxy, PROXY_HOLD);
    tape_close(&tape); /* the server does not answer */
    tape_fini(&tape);
    tape_open(&tape, &bed, "close/", 0); /* while it lists */
    tape_close(&tape);
    tape_fini(&tape);
    tape_open(&tape, &bed, "close/", 5); /* while it opens */
    tape_close(&tape);
    tape_fini(&tape);
    proxy_cut(proxy);
    struct tape tapes[3];
    for (size_t i = 0; i < 3; i++) {
        tape_open(&tapes[i], &bed, "close/", (int64_t)i);
    }
    bed_close_etcd(&bed); /* with the client */
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(tapes[i].events, 0);
        tape_fini(&tapes[i]);
    }
    bed_close(&bed);
    proxy_close(proxy);
}

static void test_two_hundred_reconnects_leave_no_descriptor_behind(void **state) {
    (void)state;
    struct bed bed;
    struct bed writer;
    struct tape tape;
    struct proxy *proxy = proxy_open(test_etcd_port(server, 0));
    char endpoint[64];
    proxied(endpoint, sizeof(endpoint), proxy);
    const struct etcd_config config = {.endpoints = endpoint, .backoff_max = span_ms(10)};
    bed_open_with(&bed, &config);
    bed_open(&writer, test_etcd_endpoints(server));
    tape_open(&tape, &bed, "again/", 0);
    tape_wait_following(&tape, 1);
    unsigned before = 0;
    unsigned most = 0;
    for (unsigned i = 0; i < 200; i++) {
        char value[16];
        (void)snprintf(value, sizeof(value), "%u", i);
        proxy_cut(proxy);
        put(&writer, "again/00001", value);
        tape_wait_value(&tape, 1, value);
        unsigned now = open_descriptors();
        before = i == 10 ? now : before;
        most = i >= 10 && now > most ? now : most;
    }
    assert_true(most <= before + 4); /* a socket or two may be closing at any moment */
    tape_check(&tape, &writer, "again/");
    assert_true(tape.following >= 201);
    tape_close(&tape);
    tape_fini(&tape);
    bed_close(&writer);
    bed_close(&bed);
    proxy_close(proxy);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_watch_lists_and_then_follows),
        cmocka_unit_test(test_a_watch_from_a_revision_gets_each_event_since),
        cmocka_unit_test(test_a_watch_from_a_compacted_revision_lists),
        cmocka_unit_test(test_a_broken_stream_is_resumed_without_listing),
        cmocka_unit_test(test_after_compaction_only_the_difference_is_delivered),
        cmocka_unit_test(test_a_restarted_etcd_is_followed_on),
        cmocka_unit_test(test_an_etcd_that_forgot_everything_is_listed_anew),
        cmocka_unit_test(test_history_lost_between_the_listing_and_the_stream_is_noticed),
        cmocka_unit_test(test_events_in_fragments_arrive_once_and_whole),
        cmocka_unit_test(test_a_silent_etcd_is_noticed_in_each_state_and_left),
        cmocka_unit_test(test_a_prefix_with_too_many_keys_says_so_and_recovers),
        cmocka_unit_test(test_a_watch_closes_once_from_every_state),
        cmocka_unit_test(test_two_hundred_reconnects_leave_no_descriptor_behind),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
