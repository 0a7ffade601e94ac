/* Addresses, shutdown in every situation, peers that vanish or stop, clients that do not read, and
 * strangers on the port. */
#include "unit/rpc/bed.h"

#include "base/check.h"
#include "base/prng.h"
#include "runtime/clock.h"
#include "runtime/mail.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include <grpc/byte_buffer.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>

enum { SOON = 10000 }; /* ms; a bound for things that take milliseconds, under sanitizers too */

/* ---- addresses -------------------------------------------------------------------------- */

static void test_malformed_addresses_get_a_sentence(void **state) {
    (void)state;
    static const struct {
        const char *text;
        const char *part;
    } rows[] = {{"", "no port"},
                {"localhost", "no port"},
                {":80", "no host"},
                {"host:", "not a number"},
                {"host:65536", "not a number"},
                {"host:-1", "not a number"},
                {"host:80x", "not a number"},
                {"::1:80", "brackets"},
                {"[::1]80", "no port"},
                {"[::1:80", "no port"},
                {"a b:80", "character"},
                {"https://host:80", "only http://"},
                {"unix:///tmp/x", "only http://"},
                {"http://host/path:80", "character"}};
    struct rpc *rpc = NULL;
    assert_int_equal(rpc_create(NULL, &rpc), STATUS_OK);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct rpc_error error = {""};
        struct rpc_channel *channel = NULL;
        struct rpc_server *server = NULL;
        assert_int_equal(rpc_channel_open(rpc, rows[i].text, NULL, NULL, &channel, &error),
                         STATUS_INVALID);
        assert_non_null(strstr(error.text, rows[i].part));
        assert_int_equal(rpc_server_create(rpc, rows[i].text, NULL, NULL, &server, NULL),
                         STATUS_INVALID);
        assert_null(channel);
        assert_null(server);
    }
    assert_int_equal(rpc_shutdown(rpc, span_ms(0), span_ms(2000)), STATUS_OK);
    rpc_destroy(rpc);
}

static void test_taken_ports_and_foreign_hosts_fail_with_a_sentence(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct rpc *rpc = NULL;
    assert_int_equal(rpc_create(NULL, &rpc), STATUS_OK);
    char taken[32];
    char everywhere[32];
    (void)snprintf(taken, sizeof taken, "127.0.0.1:%u", (unsigned)bed.port);
    (void)snprintf(everywhere, sizeof everywhere, "0.0.0.0:%u", (unsigned)bed.port);
    const struct {
        const char *listen;
        enum status status;
        const char *part;
    } rows[] = {{taken, STATUS_EXISTS, "is in use by another program"},
                {everywhere, STATUS_EXISTS, "is in use by another program"},
                {"192.0.2.1:0", STATUS_INVALID, "no such address"},
                {"no.such.host.invalid:0", STATUS_INVALID, "does not resolve"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct rpc_server *server = NULL;
        struct rpc_error error = {""};
        assert_int_equal(rpc_server_create(rpc, rows[i].listen, NULL, NULL, &server, &error),
                         STATUS_OK);
        assert_int_equal(rpc_server_start(server, &error), rows[i].status);
        assert_non_null(strstr(error.text, rows[i].part));
        assert_int_equal(rpc_server_port(server), 0);
    }
    assert_int_equal(rpc_shutdown(rpc, span_ms(0), span_ms(2000)), STATUS_OK);
    rpc_destroy(rpc);
    bed_close(&bed);
}

static void test_method_paths_are_checked(void **state) {
    (void)state;
    struct rpc *rpc = NULL;
    assert_int_equal(rpc_create(NULL, &rpc), STATUS_OK);
    struct rpc_server *server = NULL;
    assert_int_equal(rpc_server_create(rpc, "127.0.0.1:0", NULL, NULL, &server, NULL), STATUS_OK);
    static const char *const bad[] = {"", "x", "/x", "/x/", "//y"};
    struct rpc_handlers handlers = probe_handlers;
    handlers.on_open = (void (*)(void *, struct rpc_call_id, const struct rpc_incoming *))abort;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct rpc_method method = {.path = bad[i], .handlers = &handlers};
        assert_int_equal(rpc_server_method(server, &method), STATUS_INVALID);
    }
    assert_int_equal(rpc_shutdown(rpc, span_ms(0), span_ms(2000)), STATUS_OK); /* never started */
    rpc_destroy(rpc);
}

/* ---- shutdown --------------------------------------------------------------------------- */

static void test_shutdown_with_idle_slots(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    bed_close(&bed);
}

struct noted_mail {
    struct mail mail;
    int runs;
};

static void noted_run(struct mail *mail, void *ctx) {
    (void)ctx;
    ((struct noted_mail *)(void *)mail)->runs++;
}

static void test_nothing_starts_after_shutdown(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    struct noted_mail before = {{.run = noted_run}, 0};
    struct noted_mail after = {{.run = noted_run}, 0};
    assert_true(rpc_post(bed.client_rpc, &before.mail));
    struct rpc_call_id call = bed_call(&bed, &probe, "/t.T/Chat", RPC_KIND_BIDI, NULL, 0);
    assert_int_equal(rpc_shutdown(bed.client_rpc, span_ms(0), span_ms(4000)), STATUS_OK);
    assert_int_equal(before.runs, 1);
    assert_int_equal(probe.closed, 1);
    assert_int_equal(probe.outcome.end, RPC_END_SHUTDOWN);
    assert_false(rpc_post(bed.client_rpc, &after.mail));
    assert_int_equal(after.runs, 0);
    struct rpc_call_config config = {
        .method = "/t.T/Echo", .deadline = INSTANT_NEVER, .handlers = &probe_handlers};
    assert_int_equal(rpc_call_start(bed.channel, &config, &call), STATUS_CANCELLED);
    rpc_call_send(bed.client_rpc, call, "x", 1);
    rpc_call_cancel(bed.client_rpc, call);
    bed_close(&bed);
    probe_fini(&probe);
}

static void test_shutdown_with_live_calls_tells_the_clients(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    static const struct {
        const char *method;
        enum rpc_kind kind;
    } rows[] = {{"/t.T/Hang", RPC_KIND_UNARY},
                {"/t.T/HangStream", RPC_KIND_SERVER_STREAM},
                {"/t.T/Chat", RPC_KIND_BIDI}};
    struct probe probes[3];
    for (uint32_t i = 0; i < 3; i++) {
        probe_init(&probes[i], bed.client_rpc);
        (void)bed_call(&bed, &probes[i], rows[i].method, rows[i].kind, "x", 0);
    }
    assert_true(probe_wait(&bed.served, &bed.served.opened, 3, SOON));
    assert_int_equal(rpc_shutdown(bed.server_rpc, span_ms(50), span_ms(4000)), STATUS_OK);
    assert_int_equal(bed.served.closed, 3);
    assert_int_equal(bed.served.outcome.end, RPC_END_SHUTDOWN);
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(probe_wait(&probes[i], &probes[i].closed, 1, SOON));
        assert_int_equal(probes[i].outcome.code, RPC_CODE_UNAVAILABLE);
        assert_non_null(strstr(probes[i].message, "shutting down"));
    }
    bed_close(&bed);
    for (uint32_t i = 0; i < 3; i++) {
        probe_fini(&probes[i]);
    }
}

struct shutter {
    struct rpc *rpc;
    pthread_t thread;
    enum status status;
};

static void *shutter_main(void *arg) {
    struct shutter *shutter = arg;
    shutter->status = rpc_shutdown(shutter->rpc, span_ms(20000), span_ms(4000));
    return NULL;
}

static void test_grace_lets_a_call_finish_while_new_ones_are_refused(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe held;
    probe_init(&held, bed.client_rpc);
    (void)bed_call(&bed, &held, "/t.T/HangStream", RPC_KIND_SERVER_STREAM, "x", 0);
    assert_true(probe_wait(&bed.served, &bed.served.opened, 1, SOON));
    struct rpc_call_id held_call = bed.served.call;
    struct shutter shutter = {.rpc = bed.server_rpc, .status = STATUS_INTERNAL};
    assert_int_equal(pthread_create(&shutter.thread, NULL, shutter_main, &shutter), 0);
    struct instant deadline = instant_add(clock_now(), span_ms(SOON));
    enum rpc_code code = RPC_CODE_OK;
    /* The drain begins some time after the thread; a call that meets its very moment may be
     * CANCELLED by gRPC. */
    while (code != RPC_CODE_UNAVAILABLE && !instant_reached(clock_now(), deadline)) {
        struct probe probe;
        probe_init(&probe, bed.client_rpc);
        (void)bed_call(&bed, &probe, "/t.T/Echo", RPC_KIND_UNARY, "x", 5000);
        assert_true(probe_wait(&probe, &probe.closed, 1, SOON));
        code = probe.outcome.code;
        probe_fini(&probe);
    }
    assert_int_equal(code, RPC_CODE_UNAVAILABLE);
    assert_int_equal(held.closed, 0);
    rpc_call_finish(bed.server_rpc, held_call, RPC_CODE_OK, "in time", NULL, 0);
    assert_true(probe_wait(&held, &held.closed, 1, SOON));
    assert_int_equal(held.outcome.code, RPC_CODE_OK);
    assert_int_equal(pthread_join(shutter.thread, NULL), 0);
    assert_int_equal(shutter.status, STATUS_OK);
    bed_close(&bed);
    probe_fini(&held);
}

struct starter {
    struct bed *bed;
    struct probe *probe;
    uint32_t started;
    pthread_t thread;
};

static void *starter_main(void *arg) {
    struct starter *starter = arg;
    static const char *const methods[] = {"/t.T/Echo", "/t.T/Hang"};
    for (uint32_t i = 0;; i++) {
        bool is_chat = i % 3 == 2;
        struct rpc_call_config config = {.method = is_chat ? "/t.T/Chat" : methods[i % 2],
                                         .kind = is_chat ? RPC_KIND_BIDI : RPC_KIND_UNARY,
                                         .deadline = INSTANT_NEVER,
                                         .handlers = &probe_handlers,
                                         .ctx = starter->probe};
        struct rpc_call_id call;
        enum status status = rpc_call_start(starter->bed->channel, &config, &call);
        if (status == STATUS_CANCELLED) {
            return NULL;
        }
        CHECK_OP(status, ==, STATUS_OK);
        starter->started++;
        rpc_call_send(starter->bed->client_rpc, call, "x", 1);
        if (i % 4 != 0) {
            rpc_call_cancel(starter->bed->client_rpc, call);
        }
        (void)poll(NULL, 0, 1);
    }
}

static void test_shutdown_against_threads_that_go_on_starting_calls(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 5; round++) {
        struct bed bed;
        bed_open(&bed, NULL);
        struct probe probe;
        probe_init(&probe, bed.client_rpc);
        struct starter starters[3];
        for (uint32_t i = 0; i < 3; i++) {
            starters[i] = (struct starter){.bed = &bed, .probe = &probe};
            assert_int_equal(pthread_create(&starters[i].thread, NULL, starter_main, &starters[i]),
                             0);
        }
        assert_true(probe_wait(&probe, &probe.closed, 50, SOON));
        assert_int_equal(rpc_shutdown(bed.client_rpc, span_ms(0), span_ms(8000)), STATUS_OK);
        uint32_t started = 0;
        for (uint32_t i = 0; i < 3; i++) {
            assert_int_equal(pthread_join(starters[i].thread, NULL), 0);
            started += starters[i].started;
        }
        assert_int_equal(probe.closed, started); /* each exactly once */
        bed_close(&bed);
        probe_fini(&probe);
    }
}

static void test_shutdown_with_a_stopped_reader_ends_in_time(void **state) {
    (void)state;
    struct bed bed;
    struct bed_options options = {.is_server_only = true, .flood_bytes = 256 << 10};
    bed_open(&bed, &options);
    char port[8];
    (void)snprintf(port, sizeof port, "%u", (unsigned)bed.port);
    struct child child;
    child_start(&child, "client", port, "/t.T/Flood");
    char line[32];
    child_line(&child, line, sizeof line);
    assert_string_equal(line, "started");
    child_kill(&child, SIGSTOP);
    assert_int_equal(rpc_shutdown(bed.server_rpc, span_ms(0), span_ms(4000)), STATUS_OK);
    assert_int_equal(bed.served.closed, 1);
    child_end(&child);
    bed_close(&bed);
}

/* ---- peers that vanish ------------------------------------------------------------------ */

static void open_remote(struct bed *bed, struct child *child,
                        const struct rpc_channel_options *channel) {
    child_start(child, "server", "0", "-");
    char line[32];
    child_line(child, line, sizeof line);
    struct bed_options options = {.remote_port = (uint16_t)strtoul(line, NULL, 10)};
    if (channel != NULL) {
        options.channel = *channel;
    }
    assert_true(options.remote_port > 0);
    bed_open(bed, &options);
}

static void test_killed_server_ends_calls_at_once_and_new_ones_fail_fast(void **state) {
    (void)state;
    struct bed bed;
    struct child child;
    open_remote(&bed, &child, NULL);
    struct probe probes[2];
    for (uint32_t i = 0; i < 2; i++) {
        probe_init(&probes[i], bed.client_rpc);
        (void)bed_call(&bed, &probes[i], i == 0 ? "/t.T/HangStream" : "/t.T/Hang",
                       i == 0 ? RPC_KIND_SERVER_STREAM : RPC_KIND_UNARY, "x", 0);
    }
    assert_true(probe_wait(&probes[0], &probes[0].headers, 1, SOON));
    child_end(&child);
    for (uint32_t i = 0; i < 2; i++) {
        assert_true(probe_wait(&probes[i], &probes[i].closed, 1, SOON));
        assert_int_equal(probes[i].outcome.code, RPC_CODE_UNAVAILABLE);
        probe_fini(&probes[i]);
    }
    for (uint32_t i = 0; i < 20; i++) { /* no deadline: only failing fast ends them */
        struct probe probe;
        probe_init(&probe, bed.client_rpc);
        (void)bed_call(&bed, &probe, "/t.T/Echo", RPC_KIND_UNARY, "x", 0);
        assert_true(probe_wait(&probe, &probe.closed, 1, SOON));
        assert_int_equal(probe.outcome.code, RPC_CODE_UNAVAILABLE);
        probe_fini(&probe);
    }
    bed_close(&bed);
}

static void test_channel_reconnects_to_a_server_that_came_back(void **state) {
    (void)state;
    struct bed bed;
    struct child child;
    open_remote(&bed, &child, NULL);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    (void)bed_call(&bed, &probe, "/t.T/Echo", RPC_KIND_UNARY, "x", 5000);
    assert_true(probe_wait(&probe, &probe.closed, 1, SOON));
    child_end(&child);
    struct rpc *rpc = NULL;
    assert_int_equal(rpc_create(NULL, &rpc), STATUS_OK);
    char listen[32];
    (void)snprintf(listen, sizeof listen, "127.0.0.1:%u", (unsigned)bed.port);
    struct rpc_server *server = NULL;
    struct rpc_error error = {""};
    assert_int_equal(rpc_server_create(rpc, listen, NULL, NULL, &server, &error), STATUS_OK);
    assert_int_equal(rpc_server_start(server, &error), STATUS_OK);
    enum rpc_code code = RPC_CODE_UNAVAILABLE;
    struct instant deadline = instant_add(clock_now(), span_ms(SOON));
    while (code == RPC_CODE_UNAVAILABLE && !instant_reached(clock_now(), deadline)) {
        struct probe again;
        probe_init(&again, bed.client_rpc);
        (void)bed_call(&bed, &again, "/t.T/Echo", RPC_KIND_UNARY, "x", 5000);
        assert_true(probe_wait(&again, &again.closed, 1, SOON));
        code = again.outcome.code;
        probe_fini(&again);
    }
    assert_int_equal(code, RPC_CODE_UNIMPLEMENTED); /* answered: this server has no methods */
    assert_int_equal(rpc_shutdown(rpc, span_ms(0), span_ms(4000)), STATUS_OK);
    rpc_destroy(rpc);
    bed_close(&bed);
    probe_fini(&probe);
}

static void test_killed_client_is_noticed_by_the_server(void **state) {
    (void)state;
    struct bed bed;
    struct bed_options options = {.is_server_only = true};
    bed_open(&bed, &options);
    char port[8];
    (void)snprintf(port, sizeof port, "%u", (unsigned)bed.port);
    struct child child;
    child_start(&child, "client", port, "/t.T/HangStream");
    char line[32];
    child_line(&child, line, sizeof line);
    assert_true(probe_wait(&bed.served, &bed.served.opened, 1, SOON));
    child_end(&child);
    assert_true(probe_wait(&bed.served, &bed.served.closed, 1, SOON));
    assert_true(bed.served.outcome.is_cancelled);
    assert_int_equal(bed.served.outcome.end, RPC_END_PEER);
    bed_close(&bed);
}

/* Idle for some pings first: by default gRPC stops pinging a connection without data after two, and
 * then never notices (max_pings_without_data). Shorter timers than a program's, same mechanism. */
static void test_stopped_peers_of_idle_streams_are_noticed_on_both_sides(void **state) {
    (void)state;
    struct bed client;
    struct child stopped_server;
    struct rpc_channel_options channel = {.keepalive_ms = 400, .keepalive_timeout_ms = 1000};
    open_remote(&client, &stopped_server, &channel);
    struct probe probe;
    probe_init(&probe, client.client_rpc);
    (void)bed_call(&client, &probe, "/t.T/HangStream", RPC_KIND_SERVER_STREAM, "x", 0);
    assert_true(probe_wait(&probe, &probe.headers, 1, SOON));

    struct bed server;
    struct bed_options options = {.server = {.keepalive_ms = 400, .keepalive_timeout_ms = 1000},
                                  .is_server_only = true};
    bed_open(&server, &options);
    char port[8];
    (void)snprintf(port, sizeof port, "%u", (unsigned)server.port);
    struct child stopped_client;
    child_start(&stopped_client, "client", port, "/t.T/HangStream");
    char line[32];
    child_line(&stopped_client, line, sizeof line);

    assert_false(probe_wait(&probe, &probe.closed, 1, 3000));
    assert_false(probe_wait(&server.served, &server.served.closed, 1, 1));
    child_kill(&stopped_server, SIGSTOP);
    child_kill(&stopped_client, SIGSTOP);
    assert_true(probe_wait(&probe, &probe.closed, 1, SOON));
    assert_int_equal(probe.outcome.code, RPC_CODE_UNAVAILABLE);
    assert_true(probe_wait(&server.served, &server.served.closed, 1, SOON));
    assert_true(server.served.outcome.is_cancelled);
    child_end(&stopped_server);
    child_end(&stopped_client);
    bed_close(&client);
    bed_close(&server);
    probe_fini(&probe);
}

static void test_idle_streams_live_on_while_pings_are_answered(void **state) {
    (void)state;
    struct bed bed;
    struct bed_options options = {.server = {.keepalive_ms = 300, .keepalive_timeout_ms = 2000},
                                  .channel = {.keepalive_ms = 300, .keepalive_timeout_ms = 2000}};
    bed_open(&bed, &options);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    struct rpc_call_id call = bed_call(&bed, &probe, "/t.T/Chat", RPC_KIND_BIDI, NULL, 0);
    assert_true(probe_wait(&probe, &probe.headers, 1, SOON));
    assert_false(probe_wait(&probe, &probe.closed, 1, 2500)); /* no "too_many_pings" */
    rpc_call_half_close(bed.client_rpc, call);
    assert_true(probe_wait(&probe, &probe.closed, 1, SOON));
    assert_int_equal(probe.outcome.code, RPC_CODE_OK);
    bed_close(&bed);
    probe_fini(&probe);
}

/* ---- a client that does not read -------------------------------------------------------- */

struct raw {
    grpc_completion_queue *queue;
    grpc_channel *channel;
    grpc_call *call;
    grpc_metadata_array headers;
    grpc_metadata_array trailers;
    grpc_status_code status;
    grpc_slice details;
    grpc_byte_buffer *received;
    bool has[4]; /* by tag: 1 started, 2 status, 3 a message or the end */
};

static void raw_batch(struct raw *raw, grpc_op *ops, size_t len, intptr_t tag) {
    assert_int_equal(grpc_call_start_batch(raw->call, ops, len, (void *)tag, NULL), GRPC_CALL_OK);
}

/* Notes one tag; false if none came within `ms`. */
static bool raw_next(struct raw *raw, int ms) {
    grpc_event event = grpc_completion_queue_next(
        raw->queue,
        gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(ms, GPR_TIMESPAN)), NULL);
    if (event.type != GRPC_OP_COMPLETE) {
        return false;
    }
    raw->has[(intptr_t)event.tag] = true;
    return true;
}

static void raw_start(struct raw *raw, uint16_t port, const char *method) {
    memset(raw, 0, sizeof *raw);
    grpc_init();
    raw->queue = grpc_completion_queue_create_for_next(NULL);
    char target[32];
    (void)snprintf(target, sizeof target, "127.0.0.1:%u", (unsigned)port);
    grpc_channel_credentials *plain = grpc_insecure_credentials_create();
    /* HTTP/2 windows are the receiver's: this client takes 64 KiB and asks for no more. */
    grpc_arg args[] = {{.type = GRPC_ARG_INTEGER,
                        .key = (char *)(uintptr_t)GRPC_ARG_HTTP2_BDP_PROBE,
                        .value.integer = 0}};
    grpc_channel_args channel_args = {.num_args = 1, .args = args};
    raw->channel = grpc_channel_create(target, plain, &channel_args);
    grpc_channel_credentials_release(plain);
    raw->call = grpc_channel_create_call(raw->channel, NULL, GRPC_PROPAGATE_DEFAULTS, raw->queue,
                                         grpc_slice_from_static_string(method), NULL,
                                         gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    grpc_metadata_array_init(&raw->headers);
    grpc_metadata_array_init(&raw->trailers);
    grpc_op ops[4];
    memset(ops, 0, sizeof ops);
    grpc_slice slice = grpc_slice_from_static_string("x");
    grpc_byte_buffer *message = grpc_raw_byte_buffer_create(&slice, 1);
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[1].op = GRPC_OP_SEND_MESSAGE;
    ops[1].data.send_message.send_message = message;
    ops[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[3].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &raw->headers;
    raw_batch(raw, ops, 4, 1);
    grpc_byte_buffer_destroy(message);
    memset(ops, 0, sizeof ops);
    ops[0].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[0].data.recv_status_on_client.trailing_metadata = &raw->trailers;
    ops[0].data.recv_status_on_client.status = &raw->status;
    ops[0].data.recv_status_on_client.status_details = &raw->details;
    raw_batch(raw, ops, 1, 2);
}

/* Reads until the end and the status; returns the bytes that came. */
static uint64_t raw_drain(struct raw *raw, char *text, size_t cap) {
    uint64_t bytes = 0;
    bool has_ended = false;
    grpc_op op;
    memset(&op, 0, sizeof op);
    op.op = GRPC_OP_RECV_MESSAGE;
    op.data.recv_message.recv_message = &raw->received;
    raw_batch(raw, &op, 1, 3);
    while (!raw->has[1] || !raw->has[2] || !has_ended) {
        assert_true(raw_next(raw, SOON));
        if (!raw->has[3]) {
            continue;
        }
        raw->has[3] = false;
        if (raw->received == NULL) {
            has_ended = true;
            continue;
        }
        bytes += grpc_byte_buffer_length(raw->received);
        grpc_byte_buffer_destroy(raw->received);
        raw->received = NULL;
        raw_batch(raw, &op, 1, 3);
    }
    char *details = grpc_slice_to_c_string(raw->details);
    text_copy(text, cap, details);
    gpr_free(details);
    return bytes;
}

static void raw_end(struct raw *raw) {
    grpc_slice_unref(raw->details);
    grpc_metadata_array_destroy(&raw->headers);
    grpc_metadata_array_destroy(&raw->trailers);
    grpc_call_unref(raw->call);
    grpc_channel_destroy(raw->channel);
    grpc_completion_queue_shutdown(raw->queue);
    while (grpc_completion_queue_next(raw->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL).type !=
           GRPC_QUEUE_SHUTDOWN) {
    }
    grpc_completion_queue_destroy(raw->queue);
    grpc_shutdown();
}

static void test_client_that_never_reads_is_ended_after_stall_ms_and_told_why(void **state) {
    (void)state;
    struct bed bed;
    struct bed_options options = {.is_server_only = true};
    bed_open(&bed, &options);
    struct raw raw;
    raw_start(&raw, bed.port, "/t.T/Flood");
    struct instant deadline = instant_add(clock_now(), span_ms(SOON));
    while (!probe_wait(&bed.served, &bed.served.closed, 1, 10) &&
           !instant_reached(clock_now(), deadline)) {
        (void)raw_next(&raw, 50); /* a queue must be polled for its transport to move */
    }
    assert_true(probe_wait(&bed.served, &bed.served.closed, 1, 1));
    assert_int_equal(bed.served.outcome.end, RPC_END_STALLED);
    assert_int_equal(bed.served.outcome.code, RPC_CODE_RESOURCE_EXHAUSTED);
    struct rpc_counters counters;
    rpc_counters(bed.server_rpc, &counters);
    assert_int_equal(counters.stalled, 1);
    char text[256];
    uint64_t bytes = raw_drain(&raw, text, sizeof text);
    assert_true(bytes < 512 << 10);
    assert_int_equal(raw.status, GRPC_STATUS_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(text, "has read nothing"));
    raw_end(&raw);
    bed_close(&bed);
}

static void test_client_that_never_reads_a_full_queue_overflows_and_is_told_why(void **state) {
    (void)state;
    struct bed bed;
    struct bed_options options = {.is_server_only = true};
    bed_open(&bed, &options);
    struct raw raw;
    raw_start(&raw, bed.port, "/t.T/Pour");
    assert_true(raw_next(&raw, SOON));
    assert_true(probe_wait(&bed.served, &bed.served.closed, 1, SOON));
    assert_int_equal(bed.served.outcome.end, RPC_END_OVERFLOW);
    char text[256];
    (void)raw_drain(&raw, text, sizeof text);
    assert_int_equal(raw.status, GRPC_STATUS_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(text, "reads too slowly"));
    raw_end(&raw);
    bed_close(&bed);
}

static void test_calls_that_carry_no_message_are_refused(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    /* A bidi client on a unary method may half-close without a message. */
    struct rpc_call_id call = bed_call(&bed, &probe, "/t.T/Echo", RPC_KIND_BIDI, NULL, 5000);
    rpc_call_half_close(bed.client_rpc, call);
    assert_true(probe_wait(&probe, &probe.closed, 1, SOON));
    assert_int_equal(probe.outcome.code, RPC_CODE_INVALID_ARGUMENT);
    assert_int_equal(bed.served.opened, 0);
    bed_close(&bed);
    probe_fini(&probe);
}

struct burst_mail {
    struct mail mail;
    struct bed *bed;
    struct probe *probe;
};

static void burst_run(struct mail *mail, void *ctx) {
    (void)ctx;
    struct burst_mail *burst = (struct burst_mail *)(void *)mail;
    for (uint32_t i = 0; i < 30; i++) {
        (void)bed_call(burst->bed, burst->probe, "/t.T/Sleep", RPC_KIND_UNARY, "", 60);
    }
}

static void test_calls_whose_deadline_passed_in_the_queue_reach_no_handler(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    struct burst_mail burst = {{.run = burst_run}, &bed, &probe};
    assert_true(rpc_post(bed.client_rpc, &burst.mail));
    assert_true(probe_wait(&probe, &probe.closed, 30, SOON));
    assert_int_equal(probe.outcome.code, RPC_CODE_DEADLINE_EXCEEDED);
    struct instant deadline = instant_add(clock_now(), span_ms(SOON));
    struct rpc_counters counters;
    do {
        rpc_counters(bed.server_rpc, &counters);
    } while (counters.dead_on_arrival == 0 && !instant_reached(clock_now(), deadline));
    assert_true(counters.dead_on_arrival > 0);
    assert_true(counters.calls_opened < 30);
    bed_close(&bed);
    probe_fini(&probe);
}

/* ---- strangers -------------------------------------------------------------------------- */

static int stranger_connect(uint16_t port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_equal(connect(fd, (const struct sockaddr *)&to, sizeof to), 0);
    return fd;
}

static void test_garbage_on_the_port_costs_only_itself(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe stream;
    probe_init(&stream, bed.client_rpc);
    struct rpc_call_id call = bed_call(&bed, &stream, "/t.T/Chat", RPC_KIND_BIDI, NULL, 0);
    assert_true(probe_wait(&stream, &stream.headers, 1, SOON));
    uint32_t before = descriptors_open();

    static const uint8_t zeros[64] = {0};
    static const char http1[] = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    static const uint8_t hello[] = {0x16, 0x03, 0x01, 0x00, 0x2e, 0x01,
                                    0x00, 0x00, 0x2a, 0x03, 0x03};
    /* The right preface, then frames that are not. */
    static const char preface[] =
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff";
    struct prng prng = {7};
    for (uint32_t i = 0; i < 300; i++) {
        uint8_t random[256];
        for (size_t j = 0; j < sizeof random; j++) {
            random[j] = (uint8_t)prng_next(&prng);
        }
        const struct bytes kinds[] = {{random, sizeof random},
                                      {zeros, sizeof zeros},
                                      {(const uint8_t *)http1, sizeof http1 - 1},
                                      {hello, sizeof hello},
                                      {(const uint8_t *)preface, sizeof preface - 1},
                                      {(const uint8_t *)preface, 10},
                                      {NULL, 0}};
        struct bytes kind = kinds[i % 7];
        int fd = stranger_connect(bed.port);
        if (kind.len > 0) {
            (void)!send(fd, kind.data, kind.len, MSG_NOSIGNAL); /* may be cut off already */
        }
        if (i % 2 == 0) {
            (void)shutdown(fd, SHUT_WR);
        }
        (void)close(fd);
    }
    struct instant deadline = instant_add(clock_now(), span_ms(SOON));
    while (descriptors_open() > before && !instant_reached(clock_now(), deadline)) {
        (void)poll(NULL, 0, 10);
    }
    assert_int_equal(descriptors_open(), before);
    rpc_call_send(bed.client_rpc, call, "alive", 5);
    assert_true(probe_wait(&stream, &stream.messages, 1, SOON));
    assert_int_equal(stream.closed, 0);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    (void)bed_call(&bed, &probe, "/t.T/Echo", RPC_KIND_UNARY, "x", 5000);
    assert_true(probe_wait(&probe, &probe.closed, 1, SOON));
    assert_int_equal(probe.outcome.code, RPC_CODE_OK);
    bed_close(&bed);
    probe_fini(&probe);
    probe_fini(&stream);
}

int main(int argc, char **argv) {
    int rc = 0;
    if (bed_child(argc, argv, &rc)) {
        return rc;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_malformed_addresses_get_a_sentence),
        cmocka_unit_test(test_taken_ports_and_foreign_hosts_fail_with_a_sentence),
        cmocka_unit_test(test_method_paths_are_checked),
        cmocka_unit_test(test_shutdown_with_idle_slots),
        cmocka_unit_test(test_nothing_starts_after_shutdown),
        cmocka_unit_test(test_shutdown_with_live_calls_tells_the_clients),
        cmocka_unit_test(test_grace_lets_a_call_finish_while_new_ones_are_refused),
        cmocka_unit_test(test_shutdown_against_threads_that_go_on_starting_calls),
        cmocka_unit_test(test_shutdown_with_a_stopped_reader_ends_in_time),
        cmocka_unit_test(test_killed_server_ends_calls_at_once_and_new_ones_fail_fast),
        cmocka_unit_test(test_channel_reconnects_to_a_server_that_came_back),
        cmocka_unit_test(test_killed_client_is_noticed_by_the_server),
        cmocka_unit_test(test_stopped_peers_of_idle_streams_are_noticed_on_both_sides),
        cmocka_unit_test(test_idle_streams_live_on_while_pings_are_answered),
        cmocka_unit_test(test_client_that_never_reads_is_ended_after_stall_ms_and_told_why),
        cmocka_unit_test(test_client_that_never_reads_a_full_queue_overflows_and_is_told_why),
        cmocka_unit_test(test_calls_that_carry_no_message_are_refused),
        cmocka_unit_test(test_calls_whose_deadline_passed_in_the_queue_reach_no_handler),
        cmocka_unit_test(test_garbage_on_the_port_costs_only_itself),
    };
    return cmocka_run_group_tests_name("rpc_life", tests, NULL, NULL);
}
