#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

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

/* What a lease told. */
struct keeper {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct etcd_lease *lease;
    unsigned granted;
    unsigned lost;
    unsigned closed;
    unsigned disorder; /* calls that must not come at that point */
    bool is_revoked;
    int64_t id;
    int64_t ttl_s;
    char message[256];
};

static void on_granted(void *ctx, int64_t lease, int64_t ttl_s) {
    struct keeper *keeper = ctx;
    pthread_mutex_lock(&keeper->lock);
    keeper->disorder += keeper->granted + keeper->lost + keeper->closed;
    keeper->granted++;
    keeper->id = lease;
    keeper->ttl_s = ttl_s;
    pthread_cond_broadcast(&keeper->changed);
    pthread_mutex_unlock(&keeper->lock);
}

static void on_lost(void *ctx, const char *message) {
    struct keeper *keeper = ctx;
    pthread_mutex_lock(&keeper->lock);
    keeper->disorder += keeper->lost + keeper->closed;
    keeper->lost++;
    text_copy(keeper->message, sizeof(keeper->message), message);
    pthread_cond_broadcast(&keeper->changed);
    pthread_mutex_unlock(&keeper->lock);
}

static void on_closed(void *ctx, bool is_revoked) {
    struct keeper *keeper = ctx;
    pthread_mutex_lock(&keeper->lock);
    keeper->disorder += keeper->closed;
    keeper->closed++;
    keeper->is_revoked = is_revoked;
    pthread_cond_broadcast(&keeper->changed);
    pthread_mutex_unlock(&keeper->lock);
}

static const struct etcd_lease_handlers handlers = {
    .on_granted = on_granted, .on_lost = on_lost, .on_closed = on_closed};

static void keeper_open(struct keeper *keeper, struct bed *bed, int64_t ttl_s) {
    memset(keeper, 0, sizeof(*keeper));
    assert_int_equal(pthread_mutex_init(&keeper->lock, NULL), 0);
    assert_int_equal(pthread_cond_init(&keeper->changed, NULL), 0);
    const struct etcd_lease_config config = {.ttl_s = ttl_s};
    assert_int_equal(etcd_lease_open(bed->etcd, &config, &handlers, keeper, &keeper->lease),
                     STATUS_OK);
}

static void wait_for(struct keeper *keeper, const unsigned *counter, const char *name) {
    struct timespec until;
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += BED_WAIT_S;
    pthread_mutex_lock(&keeper->lock);
    while (*counter == 0 && pthread_cond_timedwait(&keeper->changed, &keeper->lock, &until) == 0) {
    }
    bool is_so = *counter > 0;
    pthread_mutex_unlock(&keeper->lock);
    if (!is_so) {
        fail_msg("waited in vain: %s (lost: %s)", name, keeper->message);
    }
}

static void keeper_fini(struct keeper *keeper, unsigned lost) {
    wait_for(keeper, &keeper->closed, "closed");
    assert_int_equal(keeper->disorder, 0);
    assert_int_equal(keeper->lost, lost);
    (void)pthread_cond_destroy(&keeper->changed);
    (void)pthread_mutex_destroy(&keeper->lock);
}

static void keeper_close(struct keeper *keeper, bool revoke, unsigned lost) {
    etcd_lease_close(keeper->lease, revoke, span_ms(5000));
    etcd_lease_close(keeper->lease, !revoke, span_ms(5000)); /* only the first counts */
    keeper_fini(keeper, lost);
}

static size_t keys_under(struct bed *bed, const char *prefix) {
    struct bed_reply reply = bed_range(bed, prefix, true, 0, 0);
    assert_int_equal(reply.status, STATUS_OK);
    size_t len = reply.kvs_len;
    bed_reply_fini(&reply);
    return len;
}

static void put_leased(struct bed *bed, const char *key, int64_t lease) {
    struct bed_reply reply = bed_put(bed, key, "v", lease);
    if (reply.status != STATUS_OK) {
        fail_msg("put: %s", reply.message);
    }
    bed_reply_fini(&reply);
}

/* Lets etcd's own time pass: here the passing is the subject, not a synchronisation. */
static void pass_ms(long ms) {
    const struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    (void)nanosleep(&pause, NULL);
}

static void test_a_kept_lease_outlives_its_time_and_a_revoke_ends_it(void **state) {
    (void)state;
    struct bed bed;
    struct keeper keeper;
    bed_open(&bed, test_etcd_endpoints(server));
    keeper_open(&keeper, &bed, 1);
    wait_for(&keeper, &keeper.granted, "granted");
    put_leased(&bed, "kept/1", keeper.id);
    pass_ms(3000); /* three times its life */
    assert_int_equal(keys_under(&bed, "kept/"), 1);
    keeper_close(&keeper, true, 0);
    assert_true(keeper.is_revoked);
    assert_int_equal(keys_under(&bed, "kept/"), 0);
    bed_close(&bed);
}

static void test_a_lease_that_is_not_kept_runs_out(void **state) {
    (void)state;
    struct bed bed;
    struct keeper keeper;
    struct tape tape;
    bed_open(&bed, test_etcd_endpoints(server));
    tape_open(&tape, &bed, "left/", 0);
    tape_wait_synced(&tape, 1);
    keeper_open(&keeper, &bed, 1);
    wait_for(&keeper, &keeper.granted, "granted");
    put_leased(&bed, "left/00001", keeper.id);
    tape_wait_value(&tape, 1, "v");
    keeper_close(&keeper, false, 0);
    assert_false(keeper.is_revoked);
    tape_wait_value(&tape, 1, NULL);
    tape_close(&tape);
    tape_fini(&tape);
    bed_close(&bed);
}

static void test_a_lease_revoked_by_others_is_lost_with_a_sentence(void **state) {
    (void)state;
    struct bed bed;
    struct keeper keeper;
    bed_open(&bed, test_etcd_endpoints(server));
    keeper_open(&keeper, &bed, 3);
    wait_for(&keeper, &keeper.granted, "granted");
    struct bed_reply reply = bed_revoke(&bed, keeper.id);
    assert_int_equal(reply.status, STATUS_OK);
    bed_reply_fini(&reply);
    wait_for(&keeper, &keeper.lost, "lost");
    assert_non_null(strstr(keeper.message, "no longer has the lease"));
    keeper_close(&keeper, true, 1);
    bed_close(&bed);
}

static void test_a_restarted_etcd_still_has_the_lease(void **state) {
    (void)state;
    struct bed bed;
    struct keeper keeper;
    bed_open(&bed, test_etcd_endpoints(server));
    keeper_open(&keeper, &bed, 10);
    wait_for(&keeper, &keeper.granted, "granted");
    put_leased(&bed, "restart/1", keeper.id);
    test_etcd_kill(server, 0);
    test_etcd_restart(server, 0);
    assert_int_equal(keys_under(&bed, "restart/"), 1);
    keeper_close(&keeper, true, 0);
    assert_true(keeper.is_revoked);
    assert_int_equal(keys_under(&bed, "restart/"), 0);
    bed_close(&bed);
}

static void test_an_etcd_frozen_past_the_lease_loses_it_and_deletes_its_keys(void **state) {
    (void)state;
    struct bed bed;
    struct keeper keeper;
    struct tape tape;
    bed_open(&bed, test_etcd_endpoints(server));
    tape_open(&tape, &bed, "frozen/", 0);
    tape_wait_synced(&tape, 1);
    keeper_open(&keeper, &bed, 2);
    wait_for(&keeper, &keeper.granted, "granted");
    for (unsigned i = 0; i < 20; i++) {
        char key[64];
        (void)snprintf(key, sizeof(key), "frozen/%05u", i);
        put_leased(&bed, key, keeper.id);
    }
    test_etcd_freeze(server, 0);
    wait_for(&keeper, &keeper.lost, "lost");
    assert_non_null(strstr(keeper.message, "was not confirmed for 2 s"));
    test_etcd_thaw(server, 0);
    for (unsigned i = 0; i < 20; i++) {
        tape_wait_value(&tape, i, NULL); /* the mass deletion arrives, over whatever stream */
    }
    tape_check(&tape, &bed, "frozen/");
    keeper_close(&keeper, true, 1);
    tape_close(&tape);
    tape_fini(&tape);
    bed_close(&bed);
}

static void test_a_lease_survives_broken_streams(void **state) {
    (void)state;
    struct bed bed;
    struct keeper keeper;
    struct proxy *proxy = proxy_open(test_etcd_port(server, 0));
    char endpoint[64];
    (void)snprintf(endpoint, sizeof(endpoint), "http://127.0.0.1:%u", proxy_port(proxy));
    bed_open(&bed, endpoint);
    keeper_open(&keeper, &bed, 2);
    wait_for(&keeper, &keeper.granted, "granted");
    for (unsigned i = 0; i < 12; i++) {
        proxy_cut(proxy);
        pass_ms(200);
    }
    struct bed_reply reply = bed_ttl(&bed, keeper.id);
    assert_int_equal(reply.status, STATUS_OK);
    assert_true(reply.ttl_s >= 0);
    bed_reply_fini(&reply);
    keeper_close(&keeper, true, 0);
    bed_close(&bed);
    proxy_close(proxy);
}

static void test_without_etcd_a_lease_is_lost_before_it_was_granted(void **state) {
    (void)state;
    struct bed bed;
    struct keeper keeper;
    struct proxy *proxy = proxy_open(test_etcd_port(server, 0));
    proxy_set_mode(proxy, PROXY_HOLD);
    char endpoint[64];
    (void)snprintf(endpoint, sizeof(endpoint), "http://127.0.0.1:%u", proxy_port(proxy));
    bed_open(&bed, endpoint);
    keeper_open(&keeper, &bed, 1);
    wait_for(&keeper, &keeper.lost, "lost");
    assert_int_equal(keeper.granted, 0);
    assert_non_null(strstr(keeper.message, "etcd at 127.0.0.1:"));
    keeper_close(&keeper, true, 1);
    /* Closed while the grant is on its way. */
    keeper_open(&keeper, &bed, 1);
    keeper_close(&keeper, true, 0);
    assert_false(keeper.is_revoked);
    bed_close(&bed);
    proxy_close(proxy);
}

static void test_a_revoke_that_is_not_answered_ends_at_its_deadline(void **state) {
    (void)state;
    struct bed bed;
    struct keeper keeper;
    struct proxy *proxy = proxy_open(test_etcd_port(server, 0));
    char endpoint[64];
    (void)snprintf(endpoint, sizeof(endpoint), "http://127.0.0.1:%u", proxy_port(proxy));
    bed_open(&bed, endpoint);
    keeper_open(&keeper, &bed, 60);
    wait_for(&keeper, &keeper.granted, "granted");
    proxy_set_mode(proxy, PROXY_HOLD);
    etcd_lease_close(keeper.lease, true, span_ms(1200));
    keeper_fini(&keeper, 0);
    assert_false(keeper.is_revoked);
    bed_close(&bed);
    proxy_close(proxy);
}

static void test_closing_the_client_closes_its_leases_without_revoking(void **state) {
    (void)state;
    struct bed bed;
    struct bed other;
    struct keeper keepers[3];
    bed_open(&bed, test_etcd_endpoints(server));
    bed_open(&other, test_etcd_endpoints(server));
    for (size_t i = 0; i < 2; i++) {
        keeper_open(&keepers[i], &bed, 60);
        wait_for(&keepers[i], &keepers[i].granted, "granted");
    }
    keeper_open(&keepers[2], &bed, 60); /* perhaps not granted yet */
    bed_close_etcd(&bed);
    for (size_t i = 0; i < 3; i++) {
        keeper_fini(&keepers[i], 0);
        assert_false(keepers[i].is_revoked);
    }
    struct bed_reply reply = bed_ttl(&other, keepers[0].id);
    assert_true(reply.ttl_s > 0);
    bed_reply_fini(&reply);
    bed_close(&other);
    bed_close(&bed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_kept_lease_outlives_its_time_and_a_revoke_ends_it),
        cmocka_unit_test(test_a_lease_that_is_not_kept_runs_out),
        cmocka_unit_test(test_a_lease_revoked_by_others_is_lost_with_a_sentence),
        cmocka_unit_test(test_a_restarted_etcd_still_has_the_lease),
        cmocka_unit_test(test_an_etcd_frozen_past_the_lease_loses_it_and_deletes_its_keys),
        cmocka_unit_test(test_a_lease_survives_broken_streams),
        cmocka_unit_test(test_without_etcd_a_lease_is_lost_before_it_was_granted),
        cmocka_unit_test(test_a_revoke_that_is_not_answered_ends_at_its_deadline),
        cmocka_unit_test(test_closing_the_client_closes_its_leases_without_revoking),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
