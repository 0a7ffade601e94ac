#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/check.h"
#include "etcd/etcd.h"
#include "registry/registry.h"
#include "rpc/rpc.h"
#include "support/etcd.h"

#define WAIT_S 30

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

/* ---- helpers --------------------------------------------------------------------------------- */

#define WORKERS_MAX 64u

/* What a router saw. */
struct seen_worker {
    uint64_t incarnation;
    bool is_there;
    bool is_draining;
    char id[LABEL_MAX];
    uint16_t kv_port;
    unsigned seen;
    unsigned lost;
};
struct view {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct seen_worker workers[WORKERS_MAX];
    unsigned synced;
    struct deregistration {
        unsigned calls;
        enum status status; /* of the last call */
    } deregistration;
};

/* A process: its rpc and its registry, and what it saw. */
struct node {
    struct rpc *rpc;
    struct registry *registry;
    struct view view;
};

static struct seen_worker *worker_of(struct view *view, uint64_t incarnation) {
    struct seen_worker *free_one = NULL;
    for (unsigned i = 0; i < WORKERS_MAX; i++) {
        if (view->workers[i].incarnation == incarnation) {
            return &view->workers[i];
        }
        if (view->workers[i].incarnation == 0 && free_one == NULL) {
            free_one = &view->workers[i];
        }
    }
    CHECK(free_one != NULL);
    free_one->incarnation = incarnation;
    return free_one;
}

static void on_seen(void *ctx, const struct worker_record *record) {
    struct view *view = ctx;
    pthread_mutex_lock(&view->lock);
    struct seen_worker *worker = worker_of(view, record->info.incarnation.v);
    worker->is_there = true;
    worker->is_draining = record->info.is_draining;
    worker->kv_port = record->kv_port;
    text_copy(worker->id, sizeof(worker->id), record->info.id);
    worker->seen++;
    pthread_cond_broadcast(&view->changed);
    pthread_mutex_unlock(&view->lock);
}

static void on_lost(void *ctx, struct incarnation incarnation) {
    struct view *view = ctx;
    pthread_mutex_lock(&view->lock);
    struct seen_worker *worker = worker_of(view, incarnation.v);
    CHECK(worker->is_there); /* LOST without SEEN */
    worker->is_there = false;
    worker->lost++;
    pthread_cond_broadcast(&view->changed);
    pthread_mutex_unlock(&view->lock);
}

static void on_synced(void *ctx) {
    struct view *view = ctx;
    pthread_mutex_lock(&view->lock);
    view->synced++;
    pthread_cond_broadcast(&view->changed);
    pthread_mutex_unlock(&view->lock);
}

static void on_deregistered(void *ctx, enum status status) {
    struct view *view = ctx;
    pthread_mutex_lock(&view->lock);
    view->deregistration.calls++;
    view->deregistration.status = status;
    pthread_cond_broadcast(&view->changed);
    pthread_mutex_unlock(&view->lock);
}

static const struct registry_fleet_handlers fleet_handlers = {
    .on_seen = on_seen, .on_lost = on_lost, .on_synced = on_synced};

static void node_open(struct node *node, const char *endpoints, const char *cluster,
                      int64_t lease_ms) {
    memset(node, 0, sizeof(*node));
    struct registry_error error = {.text = ""};
    const struct registry_config config = {.endpoints = endpoints,
                                           .cluster = cluster,
                                           .lease = span_ms(lease_ms),
                                           .etcd_keepalive_ms = 1000};
    assert_int_equal(pthread_mutex_init(&node->view.lock, NULL), 0);
    assert_int_equal(pthread_cond_init(&node->view.changed, NULL), 0);
    assert_int_equal(rpc_create(&(struct rpc_config){.name = "rpc"}, &node->rpc), STATUS_OK);
    if (registry_create(node->rpc, &config, &node->registry, &error) != STATUS_OK) {
        fail_msg("registry_create: %s", error.text);
    }
}

static void node_close_within(struct node *node, int64_t ms) {
    assert_int_equal(registry_shutdown(node->registry, span_ms(ms)), STATUS_OK);
    registry_destroy(node->registry);
    assert_int_equal(rpc_shutdown(node->rpc, span_ms(0), span_ms(5000)), STATUS_OK);
    rpc_destroy(node->rpc);
    (void)pthread_cond_destroy(&node->view.changed);
    (void)pthread_mutex_destroy(&node->view.lock);
}

static void node_close(struct node *node) {
    node_close_within(node, 10000);
}

static struct worker_record worker(uint64_t incarnation, const char *id) {
    struct worker_record record = {.kv_port = 7777, .pid = 1, .started_unix_ms = 1};
    record.info.incarnation.v = incarnation;
    record.info.role = ROLE_DECODE;
    text_copy(record.info.id, sizeof(record.info.id), id);
    text_copy(record.info.address, sizeof(record.info.address), "127.0.0.1:9000");
    text_copy(record.info.model, sizeof(record.info.model), "tiny");
    text_copy(record.info.numerics, sizeof(record.info.numerics), "f32");
    record.info.vocab = 100;
    record.info.context = 100;
    record.info.kv_tokens = 1000;
    record.info.page_tokens = 16;
    return record;
}

static void publish(struct node *node, uint64_t incarnation, const char *id) {
    const struct worker_record record = worker(incarnation, id);
    assert_int_equal(registry_register_worker(node->registry, &record), STATUS_OK);
}

enum question { IS_THERE, IS_GONE, IS_DRAINING, WAS_LOST, WAS_SEEN, IS_SYNCED, IS_DEREGISTERED };

static bool view_says(struct view *view, enum question question, uint64_t incarnation,
                      unsigned number) {
    const struct seen_worker *worker = incarnation == 0 ? NULL : worker_of(view, incarnation);
    switch (question) {
    case IS_THERE: return worker->is_there;
    case IS_GONE: return !worker->is_there;
    case IS_DRAINING: return worker->is_there && worker->is_draining;
    case WAS_LOST: return worker->lost >= number;
    case WAS_SEEN: return worker->seen >= number;
    case IS_SYNCED: return view->synced >= number;
    case IS_DEREGISTERED: return view->deregistration.calls >= number;
    }
    return false;
}

static void wait_view(struct node *node, enum question question, uint64_t incarnation,
                      unsigned number) {
    struct view *view = &node->view;
    struct timespec until;
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += WAIT_S;
    pthread_mutex_lock(&view->lock);
    bool is_in_time = true;
    while (!view_says(view, question, incarnation, number) && is_in_time) {
        is_in_time = pthread_cond_timedwait(&view->changed, &view->lock, &until) == 0;
    }
    bool is_so = view_says(view, question, incarnation, number);
    pthread_mutex_unlock(&view->lock);
    if (!is_so) {
        char text[512];
        registry_describe(node->registry, text, sizeof(text));
        fail_msg("waited in vain for question %d of worker %llu (%s)", (int)question,
                 (unsigned long long)incarnation, text);
    }
}

/* Copies: the registry's thread goes on writing while a test looks. */
static struct seen_worker seen_of(struct node *node, uint64_t incarnation) {
    pthread_mutex_lock(&node->view.lock);
    const struct seen_worker worker = *worker_of(&node->view, incarnation);
    pthread_mutex_unlock(&node->view.lock);
    return worker;
}

static struct deregistration deregistration_of(struct node *node) {
    pthread_mutex_lock(&node->view.lock);
    const struct deregistration deregistration = node->view.deregistration;
    pthread_mutex_unlock(&node->view.lock);
    return deregistration;
}

static void wait_state(struct node *node, enum registry_state state) {
    for (unsigned tries = 0; registry_state(node->registry) != state; tries++) {
        const struct timespec pause = {.tv_nsec = 10000000};
        (void)nanosleep(&pause, NULL);
        if (tries > WAIT_S * 100) {
            char text[512];
            registry_describe(node->registry, text, sizeof(text));
            fail_msg("never %s: %s", registry_state_name(state), text);
        }
    }
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void test_a_worker_is_seen_changed_and_lost(void **state) {
    (void)state;
    struct node router;
    struct node node;
    node_open(&router, test_etcd_endpoints(server), "basic", 2000);
    node_open(&node, test_etcd_endpoints(server), "basic", 2000);
    assert_int_equal(registry_state(node.registry), REGISTRY_IDLE);
    assert_int_equal(registry_watch(router.registry, &fleet_handlers, &router.view), STATUS_OK);
    assert_int_equal(registry_watch(router.registry, &fleet_handlers, &router.view), STATUS_EXISTS);
    wait_view(&router, IS_SYNCED, 0, 1);
    publish(&node, 0xabc, "w1");
    wait_view(&router, IS_THERE, 0xabc, 0);
    const struct seen_worker seen = seen_of(&router, 0xabc);
    assert_string_equal(seen.id, "w1");
    assert_int_equal(seen.kv_port, 7777);
    wait_state(&node, REGISTRY_REGISTERED);
    char text[256];
    registry_describe(node.registry, text, sizeof(text));
    assert_string_equal(text, "registered as /baton/basic/workers/0000000000000abc");

    struct worker_record draining = worker(0xabc, "w1");
    draining.info.is_draining = true;
    assert_int_equal(registry_register_worker(node.registry, &draining), STATUS_OK);
    wait_view(&router, IS_DRAINING, 0xabc, 0);
    const struct worker_record other = worker(0xdef, "w1");
    assert_int_equal(registry_register_worker(node.registry, &other), STATUS_INVALID);

    assert_int_equal(registry_deregister(node.registry, span_ms(5000), on_deregistered, &node.view),
                     STATUS_OK);
    assert_int_equal(registry_deregister(node.registry, span_ms(5000), on_deregistered, &node.view),
                     STATUS_EXISTS);
    wait_view(&node, IS_DEREGISTERED, 0, 1);
    assert_int_equal(deregistration_of(&node).status, STATUS_OK);
    assert_int_equal(registry_state(node.registry), REGISTRY_GONE);
    wait_view(&router, IS_GONE, 0xabc, 0);
    assert_int_equal(registry_register_worker(node.registry, &draining), STATUS_CANCELLED);
    assert_int_equal(seen_of(&router, 0xabc).lost, 1);
    node_close(&node);
    assert_int_equal(node.view.deregistration.calls, 1); /* its threads are gone */
    node_close(&router);
}

static void test_a_shutdown_takes_the_record_out(void **state) {
    (void)state;
    struct node router;
    struct node node;
    node_open(&router, test_etcd_endpoints(server), "shutdown", 60000);
    node_open(&node, test_etcd_endpoints(server), "shutdown", 60000);
    assert_int_equal(registry_watch(router.registry, &fleet_handlers, &router.view), STATUS_OK);
    publish(&node, 1, "w1");
    wait_view(&router, IS_THERE, 1, 0);
    node_close(&node);
    wait_view(&router, IS_GONE, 1, 0); /* long before its lease */
    node_close(&router);
}

static void test_clusters_do_not_see_each_other_and_routers_are_no_workers(void **state) {
    (void)state;
    struct node router;
    struct node here;
    struct node there;
    struct node longer;
    node_open(&router, test_etcd_endpoints(server), "one", 2000);
    node_open(&here, test_etcd_endpoints(server), "one", 2000);
    node_open(&there, test_etcd_endpoints(server), "two", 2000);
    node_open(&longer, test_etcd_endpoints(server), "one.more", 2000);
    const struct router_record record = {
        .incarnation = {0x77}, .id = "r1", .grpc = "127.0.0.1:8001", .pid = 1};
    assert_int_equal(registry_register_router(router.registry, &record), STATUS_OK);
    publish(&there, 2, "elsewhere");
    publish(&longer, 3, "elsewhere");
    wait_state(&router, REGISTRY_REGISTERED);
    wait_state(&there, REGISTRY_REGISTERED);
    wait_state(&longer, REGISTRY_REGISTERED);
    assert_int_equal(registry_watch(router.registry, &fleet_handlers, &router.view), STATUS_OK);
    publish(&here, 1, "here");
    wait_view(&router, IS_THERE, 1, 0);
    struct registry_counters counters;
    registry_counters(router.registry, &counters);
    assert_int_equal(counters.workers, 1);
    assert_int_equal(counters.seen, 1);
    assert_int_equal(counters.malformed, 0);
    assert_int_equal(counters.registrations, 1);
    node_close(&here);
    node_close(&there);
    node_close(&longer);
    node_close(&router);
}

static void test_names_and_endpoints_that_cannot_be_are_refused(void **state) {
    (void)state;
    static const char *const names[] = {
        "", "a/b", "a b", NULL, "0123456789012345678901234567890123456789012345678901234567890123"};
    struct rpc *rpc = NULL;
    assert_int_equal(rpc_create(&(struct rpc_config){.name = "rpc"}, &rpc), STATUS_OK);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        struct registry *registry = NULL;
        struct registry_error error = {.text = ""};
        const struct registry_config config = {.endpoints = "http://127.0.0.1:2379",
                                               .cluster = names[i]};
        assert_int_equal(registry_create(rpc, &config, &registry, &error), STATUS_INVALID);
        assert_non_null(strstr(error.text, "cluster name"));
    }
    struct registry *registry = NULL;
    struct registry_error error = {.text = ""};
    const struct registry_config config = {.endpoints = "nowhere", .cluster = "demo"};
    assert_int_equal(registry_create(rpc, &config, &registry, &error), STATUS_INVALID);
    assert_non_null(strstr(error.text, "nowhere"));
    assert_int_equal(rpc_shutdown(rpc, span_ms(0), span_ms(1000)), STATUS_OK);
    rpc_destroy(rpc);
}

static void raw_done(void *ctx, const struct etcd_reply *reply) {
    struct view *view = ctx;
    on_deregistered(view, reply->status);
}

static void raw_closed(void *ctx) {
    on_deregistered(ctx, STATUS_OK);
}

static void test_a_malformed_record_costs_only_itself(void **state) {
    (void)state;
    struct node router;
    struct node node;
    node_open(&router, test_etcd_endpoints(server), "malformed", 2000);
    node_open(&node, test_etcd_endpoints(server), "malformed", 2000);
    static const struct {
        const char *key;
        const char *value;
    } raw[] = {
        {"/baton/malformed/workers/0000000000000001", "not a record"},
        {"/baton/malformed/workers/0000000000000002", ""},
        {"/baton/malformed/workers/nonsense", "x"},
        {"/baton/malformed/workers/00000000000000AB", "x"},
        {"/baton/malformed/workers/0000000000000001/more", "x"},
    };
    struct etcd *etcd = NULL;
    const struct etcd_config config = {.endpoints = test_etcd_endpoints(server)};
    assert_int_equal(etcd_create(node.rpc, &config, &etcd, NULL), STATUS_OK);
    for (unsigned i = 0; i < sizeof(raw) / sizeof(raw[0]); i++) {
        assert_int_equal(
            etcd_put(etcd, etcd_text(raw[i].key), etcd_text(raw[i].value), 0, raw_done, &node.view),
            STATUS_OK);
        wait_view(&node, IS_DEREGISTERED, 0, i + 1);
        assert_int_equal(deregistration_of(&node).status, STATUS_OK);
    }
    /* A good record under another's key. */
    const struct worker_record good = worker(0x10, "w");
    struct wire_buffer buffer = {.data = NULL};
    assert_int_equal(worker_record_encode(&good, &buffer), STATUS_OK);
    assert_int_equal(etcd_put(etcd, etcd_text("/baton/malformed/workers/0000000000000011"),
                              wire_buffer_bytes(&buffer), 0, raw_done, &node.view),
                     STATUS_OK);
    wait_view(&node, IS_DEREGISTERED, 0, 6);
    wire_buffer_fini(&buffer);

    assert_int_equal(registry_watch(router.registry, &fleet_handlers, &router.view), STATUS_OK);
    publish(&node, 5, "good");
    wait_view(&router, IS_THERE, 5, 0);
    struct registry_counters counters;
    registry_counters(router.registry, &counters);
    assert_int_equal(counters.workers, 1);
    assert_int_equal(counters.malformed, 6);
    /* A record that turns bad does not take the good one out; its deletion does. */
    assert_int_equal(etcd_put(etcd, etcd_text("/baton/malformed/workers/0000000000000005"),
                              etcd_text("bad"), 0, raw_done, &node.view),
                     STATUS_OK);
    wait_view(&node, IS_DEREGISTERED, 0, 7);
    assert_int_equal(
        etcd_delete(etcd, etcd_text("/baton/malformed/workers/"), true, raw_done, &node.view),
        STATUS_OK);
    wait_view(&router, WAS_LOST, 5, 1);
    /* Whoever deleted it: the worker looks after its key and puts it again. */
    wait_view(&router, WAS_SEEN, 5, 2);
    etcd_close(etcd, raw_closed, &node.view);
    wait_view(&node, IS_DEREGISTERED, 0, 9);
    etcd_destroy(etcd);
    node_close(&node);
    node_close(&router);
}

static void test_a_dead_etcd_that_comes_back_loses_nobody(void **state) {
    (void)state;
    struct node router;
    struct node nodes[3];
    node_open(&router, test_etcd_endpoints(server), "restart", 10000);
    assert_int_equal(registry_watch(router.registry, &fleet_handlers, &router.view), STATUS_OK);
    for (uint64_t i = 0; i < 3; i++) {
        node_open(&nodes[i], test_etcd_endpoints(server), "restart", 10000);
        publish(&nodes[i], i + 1, "w");
        wait_view(&router, IS_THERE, i + 1, 0);
    }
    test_etcd_kill(server, 0);
    const struct timespec outage = {.tv_sec = 3};
    (void)nanosleep(&outage, NULL); /* its length is the subject */
    test_etcd_restart(server, 0);
    struct worker_record draining = worker(1, "w"); /* proves that both sides are back */
    draining.info.is_draining = true;
    assert_int_equal(registry_register_worker(nodes[0].registry, &draining), STATUS_OK);
    wait_view(&router, IS_DRAINING, 1, 0);
    for (uint64_t i = 0; i < 3; i++) {
        wait_state(&nodes[i], REGISTRY_REGISTERED);
        wait_view(&router, IS_THERE, i + 1, 0);
        assert_int_equal(seen_of(&router, i + 1).lost, 0);
        node_close(&nodes[i]);
    }
    node_close(&router);
}

static void test_after_a_mass_deletion_all_are_seen_again_under_the_same_incarnation(void **state) {
    (void)state;
    struct node router;
    struct node nodes[4];
    node_open(&router, test_etcd_endpoints(server), "mass", 2000);
    assert_int_equal(registry_watch(router.registry, &fleet_handlers, &router.view), STATUS_OK);
    for (uint64_t i = 0; i < 4; i++) {
        node_open(&nodes[i], test_etcd_endpoints(server), "mass", 2000);
        publish(&nodes[i], i + 1, "w");
        wait_view(&router, IS_THERE, i + 1, 0);
        wait_state(&nodes[i], REGISTRY_REGISTERED);
    }
    test_etcd_freeze(server, 0);
    for (uint64_t i = 0; i < 4; i++) {
        wait_state(&nodes[i], REGISTRY_LOST);
    }
    char text[512];
    registry_describe(nodes[0].registry, text, sizeof(text));
    assert_non_null(strstr(text, "registration lost"));
    test_etcd_thaw(server, 0);
    for (uint64_t i = 0; i < 4; i++) {
        /* Seen again after the deletion, or instead of it if the new put was faster. */
        wait_state(&nodes[i], REGISTRY_REGISTERED);
        wait_view(&router, WAS_SEEN, i + 1, 2);
        wait_view(&router, IS_THERE, i + 1, 0);
        struct registry_counters counters;
        registry_counters(nodes[i].registry, &counters);
        assert_true(counters.leases_lost >= 1);
        node_close(&nodes[i]);
        wait_view(&router, IS_GONE, i + 1, 0);
    }
    node_close(&router);
}

static void test_an_etcd_that_forgot_everything_gets_all_records_again(void **state) {
    (void)state;
    struct node router;
    struct node node;
    node_open(&router, test_etcd_endpoints(server), "forgot", 2000);
    node_open(&node, test_etcd_endpoints(server), "forgot", 2000);
    assert_int_equal(registry_watch(router.registry, &fleet_handlers, &router.view), STATUS_OK);
    publish(&node, 1, "w");
    wait_view(&router, IS_THERE, 1, 0);
    wait_state(&node, REGISTRY_REGISTERED);
    test_etcd_kill(server, 0);
    test_etcd_wipe(server, 0);
    test_etcd_restart(server, 0);
    wait_view(&router, WAS_SEEN, 1, 2);
    wait_view(&router, IS_THERE, 1, 0);
    wait_state(&node, REGISTRY_REGISTERED);
    node_close(&node);
    wait_view(&router, IS_GONE, 1, 0);
    node_close(&router);
}

static void test_a_program_waits_for_etcd_at_start_and_says_so(void **state) {
    (void)state;
    struct node router;
    struct node node;
    struct test_etcd *late = test_etcd_prepare(1);
    node_open(&router, test_etcd_endpoints(late), "late", 2000);
    node_open(&node, test_etcd_endpoints(late), "late", 2000);
    assert_int_equal(registry_watch(router.registry, &fleet_handlers, &router.view), STATUS_OK);
    publish(&node, 1, "w");
    wait_state(&node, REGISTRY_WAITING);
    char text[512];
    for (unsigned tries = 0;; tries++) { /* until the first attempt has failed */
        registry_describe(node.registry, text, sizeof(text));
        if (strstr(text, "cannot be reached") != NULL) {
            break;
        }
        const struct timespec pause = {.tv_nsec = 10000000};
        (void)nanosleep(&pause, NULL);
        assert_true(tries < WAIT_S * 100);
    }
    char expected[128];
    (void)snprintf(expected, sizeof(expected), "waiting for etcd at %s (",
                   test_etcd_endpoints(late));
    assert_int_equal(strncmp(text, expected, strlen(expected)), 0);
    test_etcd_restart(late, 0);
    wait_state(&node, REGISTRY_REGISTERED);
    wait_view(&router, IS_THERE, 1, 0);
    node_close(&node);
    wait_view(&router, IS_GONE, 1, 0);
    node_close(&router);
    test_etcd_destroy(late);
}

static void test_a_shutdown_without_etcd_ends_in_time(void **state) {
    (void)state;
    struct node never;
    struct node node;
    struct test_etcd *late = test_etcd_start(1);
    node_open(&node, test_etcd_endpoints(late), "gone", 10000);
    publish(&node, 1, "w");
    wait_state(&node, REGISTRY_REGISTERED);
    test_etcd_freeze(late, 0); /* does not answer the revoke */
    node_close_within(&node, 3000);
    test_etcd_kill(late, 0);
    node_open(&never, test_etcd_endpoints(late), "gone", 10000);
    publish(&never, 1, "w");
    assert_int_equal(registry_watch(never.registry, &fleet_handlers, &never.view), STATUS_OK);
    wait_state(&never, REGISTRY_WAITING);
    assert_int_equal(
        registry_deregister(never.registry, span_ms(5000), on_deregistered, &never.view),
        STATUS_OK);
    wait_view(&never, IS_DEREGISTERED, 0, 1);
    assert_int_equal(deregistration_of(&never).status, STATUS_OK); /* nothing was ever published */
    node_close_within(&never, 3000);
    test_etcd_destroy(late);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_worker_is_seen_changed_and_lost),
        cmocka_unit_test(test_a_shutdown_takes_the_record_out),
        cmocka_unit_test(test_clusters_do_not_see_each_other_and_routers_are_no_workers),
        cmocka_unit_test(test_names_and_endpoints_that_cannot_be_are_refused),
        cmocka_unit_test(test_a_malformed_record_costs_only_itself),
        cmocka_unit_test(test_a_dead_etcd_that_comes_back_loses_nobody),
        cmocka_unit_test(test_after_a_mass_deletion_all_are_seen_again_under_the_same_incarnation),
        cmocka_unit_test(test_an_etcd_that_forgot_everything_gets_all_records_again),
        cmocka_unit_test(test_a_program_waits_for_etcd_at_start_and_says_so),
        cmocka_unit_test(test_a_shutdown_without_etcd_ends_in_time),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
