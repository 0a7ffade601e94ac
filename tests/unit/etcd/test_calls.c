#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "rpc/rpc.h"
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

/* Fails the test with etcd's sentence. */
static struct bed_reply ok(struct bed_reply reply) {
    if (reply.status != STATUS_OK) {
        fail_msg("status %s: %s", status_name(reply.status), reply.message);
    }
    return reply;
}

static void done(struct bed_reply reply) {
    bed_reply_fini(&reply);
}

static void test_a_key_is_put_read_and_deleted(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, test_etcd_endpoints(server));
    struct bed_reply put = ok(bed_put(&bed, "one/key", "value", 0));
    assert_true(put.header.revision > 0);
    assert_true(put.header.cluster_id != 0);
    struct bed_reply range = ok(bed_range(&bed, "one/key", false, 0, 0));
    assert_int_equal(range.kvs_len, 1);
    assert_string_equal(range.kvs[0].key, "one/key");
    assert_string_equal(range.kvs[0].value, "value");
    assert_int_equal(range.kvs[0].version, 1);
    assert_int_equal(range.kvs[0].mod_revision, put.header.revision);
    assert_int_equal(range.kvs[0].create_revision, put.header.revision);
    struct bed_reply deleted = ok(bed_delete(&bed, "one/key", false));
    assert_int_equal(deleted.deleted, 1);
    struct bed_reply empty = ok(bed_range(&bed, "one/key", false, 0, 0));
    assert_int_equal(empty.kvs_len, 0);
    /* The past is still there. */
    struct bed_reply past = ok(bed_range(&bed, "one/key", false, 0, put.header.revision));
    assert_int_equal(past.kvs_len, 1);
    done(put), done(range), done(deleted), done(empty), done(past);
    bed_close(&bed);
}

/* Keys prefix00000 ... in transactions of 100. */
static void many_put(struct bed *bed, const char *prefix, unsigned from, unsigned count) {
    static struct etcd_op ops[100];
    static char keys[100][64];
    for (unsigned i = 0; i < count; i += 100) {
        unsigned len = count - i < 100 ? count - i : 100;
        for (unsigned j = 0; j < len; j++) {
            (void)snprintf(keys[j], sizeof(keys[j]), "%s%05u", prefix, from + i + j);
            ops[j] = (struct etcd_op){
                .kind = ETCD_OP_PUT, .key = etcd_text(keys[j]), .value = etcd_text("v")};
        }
        const struct etcd_txn txn = {.then_ops = ops, .then_len = len};
        struct bed_reply reply = ok(bed_txn(bed, &txn));
        assert_true(reply.succeeded);
        assert_int_equal(reply.results_len, len);
        done(reply);
    }
}

static void test_a_range_of_several_pages_comes_whole_and_in_order(void **state) {
    (void)state;
    struct bed bed;
    const struct etcd_config config = {.endpoints = test_etcd_endpoints(server), .page_keys = 100};
    bed_open_with(&bed, &config);
    many_put(&bed, "pages/", 0, 1050);
    struct bed_reply all = ok(bed_range(&bed, "pages/", true, 0, 0));
    assert_int_equal(all.kvs_len, 1050);
    assert_int_equal(all.count, 1050);
    assert_false(all.has_more);
    for (unsigned i = 0; i < all.kvs_len; i++) {
        char key[64];
        (void)snprintf(key, sizeof(key), "pages/%05u", i);
        assert_string_equal(all.kvs[i].key, key);
    }
    struct bed_reply some = ok(bed_range(&bed, "pages/", true, 250, 0));
    assert_int_equal(some.kvs_len, 250);
    assert_int_equal(some.count, 1050);
    assert_true(some.has_more);
    /* All pages of a range in the past are read there. */
    struct bed_reply gone = ok(bed_delete(&bed, "pages/", true));
    assert_int_equal(gone.deleted, 1050);
    struct bed_reply past = ok(bed_range(&bed, "pages/", true, 0, all.header.revision));
    assert_int_equal(past.kvs_len, 1050);
    done(all), done(some), done(gone), done(past);
    bed_close(&bed);
}

static void test_a_range_larger_than_its_memory_is_refused(void **state) {
    (void)state;
    struct bed bed;
    const struct etcd_config config = {
        .endpoints = test_etcd_endpoints(server), .page_keys = 100, .range_bytes_max = 2000};
    bed_open_with(&bed, &config);
    many_put(&bed, "large/", 0, 300);
    struct bed_reply reply = bed_range(&bed, "large/", true, 0, 0);
    assert_int_equal(reply.status, STATUS_RANGE);
    assert_false(reply.is_compacted);
    assert_non_null(strstr(reply.message, "range_bytes_max"));
    done(reply);
    done(ok(bed_delete(&bed, "large/", true)));
    bed_close(&bed);
}

static void test_a_compacted_revision_is_named_as_such(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, test_etcd_endpoints(server));
    struct bed_reply first = ok(bed_put(&bed, "compact", "1", 0));
    struct bed_reply second = ok(bed_put(&bed, "compact", "2", 0));
    done(ok(bed_compact(&bed, second.header.revision)));
    struct bed_reply past = bed_range(&bed, "compact", false, 0, first.header.revision);
    assert_int_equal(past.status, STATUS_RANGE);
    assert_true(past.is_compacted);
    assert_non_null(strstr(past.message, "etcd at 127.0.0.1:"));
    done(first), done(second), done(past);
    bed_close(&bed);
}

static void test_a_prefix_of_all_ones_and_binary_keys_are_ranged_right(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, test_etcd_endpoints(server));
    done(ok(bed_put(&bed,
                    "\xff\xff"
                    "a",
                    "", 0)));
    done(ok(bed_put(&bed,
                    "\xff\xfe"
                    "b",
                    "", 0)));
    struct bed_reply reply = ok(bed_range(&bed, "\xff\xff", true, 0, 0));
    assert_int_equal(reply.kvs_len, 1);
    assert_int_equal(reply.kvs[0].value_len, 0);
    done(reply);
    reply = ok(bed_range(&bed, "\xff", true, 0, 0));
    assert_int_equal(reply.kvs_len, 2);
    done(reply);
    reply = ok(bed_range(&bed, "", true, 0, 0)); /* everything */
    assert_true(reply.kvs_len >= 2);
    done(reply);
    done(ok(bed_delete(&bed, "\xff", true)));
    bed_close(&bed);
}

static void test_a_transaction_takes_the_branch_that_its_compares_say(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, test_etcd_endpoints(server));
    done(ok(bed_delete(&bed, "txn", true)));
    const struct bytes key = etcd_text("txn");
    struct bed_reply first = ok(bed_put(&bed, "txn", "value", 0));
    const struct {
        struct etcd_compare compare;
        bool holds;
    } cases[] = {
        {{.target = ETCD_COMPARE_VERSION, .is = ETCD_COMPARE_EQUAL, .number = 1}, true},
        {{.target = ETCD_COMPARE_VERSION, .is = ETCD_COMPARE_GREATER, .number = 1}, false},
        {{.target = ETCD_COMPARE_CREATE_REVISION, .is = ETCD_COMPARE_EQUAL, .number = 0}, false},
        {{.target = ETCD_COMPARE_CREATE_REVISION,
          .is = ETCD_COMPARE_EQUAL,
          .number = first.header.revision},
         true},
        {{.target = ETCD_COMPARE_MOD_REVISION,
          .is = ETCD_COMPARE_LESS,
          .number = first.header.revision},
         false},
        {{.target = ETCD_COMPARE_MOD_REVISION, .is = ETCD_COMPARE_GREATER, .number = 0}, true},
        {{.target = ETCD_COMPARE_VALUE, .is = ETCD_COMPARE_EQUAL, .value = etcd_text("value")},
         true},
        {{.target = ETCD_COMPARE_VALUE, .is = ETCD_COMPARE_NOT_EQUAL, .value = etcd_text("value")},
         false},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct etcd_compare compare = cases[i].compare;
        compare.key = key;
        const struct etcd_op then_ops[] = {{.kind = ETCD_OP_RANGE, .key = key},
                                           {.kind = ETCD_OP_DELETE, .key = etcd_text("absent")}};
        const struct etcd_op else_ops[] = {
            {.kind = ETCD_OP_PUT, .key = etcd_text("txn/else"), .value = etcd_text("x")}};
        const struct etcd_txn txn = {.compares = &compare,
                                     .compares_len = 1,
                                     .then_ops = then_ops,
                                     .then_len = 2,
                                     .else_ops = else_ops,
                                     .else_len = 1};
        struct bed_reply reply = ok(bed_txn(&bed, &txn));
        assert_int_equal(reply.succeeded, cases[i].holds);
        assert_int_equal(reply.results_len, cases[i].holds ? 2 : 1);
        assert_int_equal(reply.kvs_len, cases[i].holds ? 1 : 0);
        done(reply);
    }
    done(first);
    bed_close(&bed);
}

static void test_a_revoked_lease_takes_its_key_along(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, test_etcd_endpoints(server));
    struct bed_reply grant = ok(bed_grant(&bed, 60));
    assert_true(grant.lease != 0);
    assert_int_equal(grant.ttl_s, 60);
    done(ok(bed_put(&bed, "leased", "v", grant.lease)));
    struct bed_reply ttl = ok(bed_ttl(&bed, grant.lease));
    assert_true(ttl.ttl_s > 50 && ttl.ttl_s <= 60);
    assert_int_equal(ttl.granted_s, 60);
    done(ok(bed_revoke(&bed, grant.lease)));
    struct bed_reply range = ok(bed_range(&bed, "leased", false, 0, 0));
    assert_int_equal(range.kvs_len, 0);
    struct bed_reply gone = ok(bed_ttl(&bed, grant.lease));
    assert_int_equal(gone.ttl_s, -1);
    done(grant), done(ttl), done(range), done(gone);
    bed_close(&bed);
}

static void test_a_refusal_of_etcd_is_a_sentence(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, test_etcd_endpoints(server));
    struct bed_reply reply = bed_put(&bed, "leased", "v", 12345);
    assert_int_equal(reply.status, STATUS_NOT_FOUND);
    char expected[128];
    (void)snprintf(expected, sizeof(expected),
                   "etcd at 127.0.0.1:%u refused: requested lease not found",
                   test_etcd_port(server, 0));
    assert_string_equal(reply.message, expected);
    done(reply);
    bed_close(&bed);
}

/* A port on which nobody listens: just given back. */
static void dead_endpoint(char *text, size_t cap) {
    struct proxy *proxy = proxy_open(1);
    (void)snprintf(text, cap, "http://127.0.0.1:%u", proxy_port(proxy));
    proxy_close(proxy);
}

static void test_without_etcd_each_call_ends_once_with_a_sentence(void **state) {
    (void)state;
    struct bed bed;
    char endpoint[64];
    dead_endpoint(endpoint, sizeof(endpoint));
    const struct etcd_config config = {.endpoints = endpoint, .call_timeout = span_ms(1000)};
    bed_open_with(&bed, &config);
    struct bed_reply put = bed_put(&bed, "k", "v", 0);
    assert_int_equal(put.status, STATUS_UNAVAILABLE);
    assert_non_null(strstr(put.message, "cannot be reached"));
    assert_non_null(strstr(put.message, endpoint + strlen("http://")));
    struct bed_reply range = bed_range(&bed, "k", false, 0, 0); /* tries until its deadline */
    assert_int_equal(range.status, STATUS_TIMEOUT);
    assert_non_null(strstr(range.message, "cannot be reached"));
    done(put), done(range);
    bed_close(&bed);
}

static void test_a_silent_etcd_is_left_after_the_attempt_time(void **state) {
    (void)state;
    struct bed bed;
    struct proxy *proxy = proxy_open(test_etcd_port(server, 0));
    char endpoints[128];
    char expected[128];
    (void)snprintf(endpoints, sizeof(endpoints), "http://127.0.0.1:%u", proxy_port(proxy));
    bed_open(&bed, endpoints);
    done(ok(bed_put(&bed, "k", "v", 0)));
    proxy_set_mode(proxy, PROXY_HOLD);
    struct bed_reply put = bed_put(&bed, "k", "v", 0);
    assert_int_equal(put.status, STATUS_TIMEOUT);
    (void)snprintf(expected, sizeof(expected), "etcd at 127.0.0.1:%u did not answer within 1 s",
                   proxy_port(proxy));
    assert_string_equal(put.message, expected);
    done(put);
    bed_close(&bed);
    bed_open(&bed, endpoints); /* a new client does not even get a connection */
    put = bed_put(&bed, "k", "v", 0);
    assert_true(put.status == STATUS_UNAVAILABLE || put.status == STATUS_TIMEOUT);
    assert_non_null(strstr(put.message, "answer"));
    done(put);
    bed_close(&bed);
    /* With a second endpoint the reader does not notice, and later writers go there at once. */
    (void)snprintf(endpoints, sizeof(endpoints), "http://127.0.0.1:%u,%s", proxy_port(proxy),
                   test_etcd_endpoints(server));
    bed_open(&bed, endpoints);
    done(ok(bed_range(&bed, "k", false, 0, 0)));
    done(ok(bed_put(&bed, "k", "v", 0)));
    bed_close(&bed);
    proxy_close(proxy);
}

static void test_malformed_endpoints_are_refused_with_a_sentence(void **state) {
    (void)state;
    static const char *const wrong[] = {
        "",
        "http://",
        "127.0.0.1",
        "http://127.0.0.1:2379,",
        "http://127.0.0.1:99999",
        "https://a:1",
        "a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1"};
    struct rpc *rpc = NULL;
    assert_int_equal(rpc_create(&(struct rpc_config){.name = "rpc"}, &rpc), STATUS_OK);
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        struct etcd *etcd = NULL;
        struct etcd_error error = {.text = ""};
        const struct etcd_config config = {.endpoints = wrong[i]};
        if (etcd_create(rpc, &config, &etcd, &error) != STATUS_INVALID) {
            fail_msg("accepted: %s", wrong[i]);
        }
        assert_null(etcd);
        assert_non_null(strstr(error.text, "etcd endpoint"));
    }
    assert_int_equal(rpc_shutdown(rpc, span_ms(0), span_ms(1000)), STATUS_OK);
    rpc_destroy(rpc);
}

static void test_senseless_arguments_are_refused_without_a_callback(void **state) {
    (void)state;
    struct bed bed;
    struct bed_wait wait;
    bed_open(&bed, test_etcd_endpoints(server));
    bed_wait_init(&wait);
    const struct bytes none = {NULL, 0};
    const struct bytes key = etcd_text("k");
    assert_int_equal(etcd_put(bed.etcd, none, key, 0, bed_done, &wait), STATUS_INVALID);
    assert_int_equal(etcd_delete(bed.etcd, none, true, bed_done, &wait), STATUS_INVALID);
    assert_int_equal(etcd_range(bed.etcd, &(struct etcd_range){.key = none}, bed_done, &wait),
                     STATUS_INVALID);
    assert_int_equal(
        etcd_range(bed.etcd, &(struct etcd_range){.key = key, .revision = -1}, bed_done, &wait),
        STATUS_INVALID);
    assert_int_equal(etcd_compact(bed.etcd, 0, bed_done, &wait), STATUS_INVALID);
    assert_int_equal(etcd_lease_grant(bed.etcd, 0, bed_done, &wait), STATUS_INVALID);
    assert_int_equal(etcd_lease_revoke(bed.etcd, 0, bed_done, &wait), STATUS_INVALID);
    const struct etcd_op op = {.kind = ETCD_OP_PUT};
    assert_int_equal(
        etcd_txn(bed.etcd, &(struct etcd_txn){.then_ops = &op, .then_len = 1}, bed_done, &wait),
        STATUS_INVALID);
    bed_close(&bed);
    assert_int_equal(wait.calls, 0);
    bed_wait_fini(&wait);
}

static void test_more_calls_than_allowed_are_refused_and_the_close_ends_the_rest(void **state) {
    (void)state;
    struct bed bed;
    struct bed_wait waits[3];
    struct proxy *proxy = proxy_open(test_etcd_port(server, 0));
    proxy_set_mode(proxy, PROXY_HOLD);
    char endpoint[64];
    (void)snprintf(endpoint, sizeof(endpoint), "http://127.0.0.1:%u", proxy_port(proxy));
    const struct etcd_config config = {.endpoints = endpoint,
                                       .calls_max = 3,
                                       .call_timeout = span_ms(60000),
                                       .attempt_timeout = span_ms(60000)};
    bed_open_with(&bed, &config);
    for (size_t i = 0; i < 3; i++) {
        bed_wait_init(&waits[i]);
    }
    assert_int_equal(etcd_put(bed.etcd, etcd_text("k"), etcd_text("v"), 0, bed_done, &waits[0]),
                     STATUS_OK);
    assert_int_equal(
        etcd_range(bed.etcd, &(struct etcd_range){.key = etcd_text("k")}, bed_done, &waits[1]),
        STATUS_OK);
    assert_int_equal(etcd_wait(bed.etcd, span_ms(60000), bed_done, &waits[2]), STATUS_OK);
    assert_int_equal(etcd_put(bed.etcd, etcd_text("k"), etcd_text("v"), 0, bed_done, &waits[0]),
                     STATUS_BUSY);
    bed_close(&bed);
    for (size_t i = 0; i < 3; i++) {
        struct bed_reply reply = bed_wait_take(&waits[i]);
        assert_int_equal(reply.status, STATUS_CANCELLED);
        done(reply);
        bed_wait_fini(&waits[i]);
    }
    proxy_close(proxy);
}

static void test_a_wait_ends_after_its_time(void **state) {
    (void)state;
    struct bed bed;
    struct bed_wait wait;
    bed_open(&bed, test_etcd_endpoints(server));
    bed_wait_init(&wait);
    assert_int_equal(etcd_wait(bed.etcd, span_ms(100), bed_done, &wait), STATUS_OK);
    struct bed_reply reply = bed_wait_take(&wait);
    assert_int_equal(reply.status, STATUS_OK);
    done(reply);
    bed_wait_fini(&wait);
    bed_close(&bed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_key_is_put_read_and_deleted),
        cmocka_unit_test(test_a_range_of_several_pages_comes_whole_and_in_order),
        cmocka_unit_test(test_a_range_larger_than_its_memory_is_refused),
        cmocka_unit_test(test_a_compacted_revision_is_named_as_such),
        cmocka_unit_test(test_a_prefix_of_all_ones_and_binary_keys_are_ranged_right),
        cmocka_unit_test(test_a_transaction_takes_the_branch_that_its_compares_say),
        cmocka_unit_test(test_a_revoked_lease_takes_its_key_along),
        cmocka_unit_test(test_a_refusal_of_etcd_is_a_sentence),
        cmocka_unit_test(test_without_etcd_each_call_ends_once_with_a_sentence),
        cmocka_unit_test(test_a_silent_etcd_is_left_after_the_attempt_time),
        cmocka_unit_test(test_malformed_endpoints_are_refused_with_a_sentence),
        cmocka_unit_test(test_senseless_arguments_are_refused_without_a_callback),
        cmocka_unit_test(test_more_calls_than_allowed_are_refused_and_the_close_ends_the_rest),
        cmocka_unit_test(test_a_wait_ends_after_its_time),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
