/* Calls of every kind, cancelled and timed out at every point, and their bounds. */
#include "unit/rpc/bed.h"

#include "base/check.h"
#include "runtime/clock.h"
#include "runtime/mail.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SOON = 10000 }; /* ms; a bound for things that take milliseconds, under sanitizers too */

static void assert_closed(struct probe *probe, enum rpc_code code, enum rpc_end end) {
    assert_true(probe_wait(probe, &probe->closed, 1, SOON));
    assert_int_equal(probe->closed, 1);
    assert_int_equal(probe->outcome.code, code);
    assert_int_equal(probe->outcome.end, end);
}

static void test_unary_call_carries_payload_headers_and_peer(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    struct rpc_call_id call = bed_call(&bed, &probe, "/t.T/Echo", RPC_KIND_UNARY, "hello", 5000);
    assert_closed(&probe, RPC_CODE_OK, RPC_END_STATUS);
    assert_int_equal(probe.messages, 1);
    assert_string_equal(probe.last, "hello");
    assert_true(probe_wait(&bed.served, &bed.served.closed, 1, SOON));
    assert_string_equal(bed.served.header, "yes");
    assert_int_equal(strncmp(bed.served.peer, "ipv4:127.0.0.1:", 15), 0);
    /* On the wire the budget is rounded up, coarsely when it is long. */
    assert_true(bed.served.budget_ms > 0 && bed.served.budget_ms <= 5100);
    assert_false(bed.served.outcome.is_cancelled);
    assert_int_equal(bed.served.outcome.end, RPC_END_STATUS);
    /* The id is stale now: nothing may happen. */
    rpc_call_cancel(bed.client_rpc, call);
    rpc_call_send(bed.client_rpc, call, "x", 1);
    assert_int_equal(rpc_call_queued_bytes(bed.client_rpc, call), 0);
    bed_close(&bed);
    probe_fini(&probe);
}

static void test_empty_messages_travel(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    (void)bed_call(&bed, &probe, "/t.T/Echo", RPC_KIND_UNARY, "", 5000);
    assert_closed(&probe, RPC_CODE_OK, RPC_END_STATUS);
    assert_int_equal(probe.messages, 1);
    assert_int_equal(probe.bytes, 0);
    bed_close(&bed);
    probe_fini(&probe);
}

static void test_failure_carries_code_sentence_and_trailers(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    for (int code = RPC_CODE_CANCELLED; code <= RPC_CODE_UNAUTHENTICATED; code++) {
        struct probe probe;
        probe_init(&probe, bed.client_rpc);
        char payload[2] = {(char)('a' + code), 0};
        (void)bed_call(&bed, &probe, "/t.T/Fail", RPC_KIND_UNARY, payload, 5000);
        assert_closed(&probe, (enum rpc_code)code, RPC_END_STATUS);
        assert_string_equal(probe.message, "no: 100 % sure, \"quoted\", \xc3\xa9");
        assert_string_equal(probe.trailer, "250");
        assert_int_equal(probe.messages, 0);
        probe_fini(&probe);
    }
    bed_close(&bed);
}

static void test_server_stream_delivers_all_messages_in_order_and_then_closes(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    static const struct {
        const char *payload;
        uint32_t count;
        uint64_t bytes;
        const char *last;
    } rows[] = {
        {"0 10", 0, 0, ""},
        {"1 10", 1, 10, "0"},
        {"1000 7", 1000, 7000, "999"},
        {"20000 16", 20000, 320000, "19999"}, /* across gRPC's write buffer, in small steps */
        {"3000 100", 3000, 300000, "2999"},
        {"40000 5", 40000, 200000, "39999"},
        {"100 32768", 100, 3276800, "99"},
        {"9 65536", 9, 9 * 65536, "8"},
        {"40 262144", 40, 40 * 262144, "39"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct probe probe;
        probe_init(&probe, bed.client_rpc);
        (void)bed_call(&bed, &probe, "/t.T/Count", RPC_KIND_SERVER_STREAM, rows[i].payload, 20000);
        assert_closed(&probe, RPC_CODE_OK, RPC_END_STATUS);
        assert_string_equal(probe.message, "all sent");
        assert_int_equal(probe.messages, rows[i].count);
        assert_int_equal(probe.bytes, rows[i].bytes);
        assert_string_equal(probe.last, rows[i].last);
        probe_fini(&probe);
    }
    bed_close(&bed);
}

static void test_bidi_stream_echoes_until_half_close(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    struct rpc_call_id call = bed_call(&bed, &probe, "/t.T/Chat", RPC_KIND_BIDI, NULL, 0);
    assert_true(probe_wait(&probe, &probe.headers, 1, SOON)); /* early, before any message */
    assert_true(probe_wait(&bed.served, &bed.served.opened, 1, SOON));
    assert_int_equal(bed.served.budget_ms, -1);
    for (uint32_t i = 0; i < 500; i++) {
        rpc_call_send(bed.client_rpc, call, "abc", 3);
    }
    assert_true(probe_wait(&probe, &probe.messages, 500, SOON));
    assert_true(probe_wait(&probe, &probe.writable, 1, SOON));
    assert_int_equal(rpc_call_queued_bytes(bed.client_rpc, call), 0);
    rpc_call_send(bed.client_rpc, call, "last", 4);
    rpc_call_half_close(bed.client_rpc, call);
    rpc_call_send(bed.client_rpc, call, "ignored", 7);
    assert_closed(&probe, RPC_CODE_OK, RPC_END_STATUS);
    assert_int_equal(probe.messages, 501);
    assert_string_equal(probe.last, "last");
    assert_true(probe_wait(&bed.served, &bed.served.half_closed, 1, SOON));
    bed_close(&bed);
    probe_fini(&probe);
}

static void test_unknown_method_is_answered_with_what_exists(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    for (uint32_t i = 0; i < 30; i++) { /* more than there are slots */
        struct probe probe;
        probe_init(&probe, bed.client_rpc);
        (void)bed_call(&bed, &probe, "/t.T/Nothing", RPC_KIND_UNARY, "x", 5000);
        assert_closed(&probe, RPC_CODE_UNIMPLEMENTED, RPC_END_STATUS);
        assert_string_equal(probe.message,
                            "method /t.T/Nothing does not exist here; this server offers t.T");
        probe_fini(&probe);
    }
    assert_int_equal(bed.served.opened, 0);
    struct rpc_counters counters;
    rpc_counters(bed.server_rpc, &counters);
    assert_int_equal(counters.unknown_methods, 30);
    bed_close(&bed);
}

static void test_long_sentences_are_cut_between_characters(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    (void)bed_call(&bed, &probe, "/t.T/Hang", RPC_KIND_UNARY, "x", 5000);
    assert_true(probe_wait(&bed.served, &bed.served.opened, 1, SOON));
    char *text = calloc(1, 100002);
    assert_non_null(text);
    for (uint32_t i = 0; i + 1 < 100000; i += 2) {
        memcpy(text + 1 + i, "\xc3\xa9", 2);
    }
    text[0] = 'x';
    rpc_call_finish(bed.server_rpc, bed.served.call, RPC_CODE_ABORTED, text, NULL, 0);
    free(text);
    assert_closed(&probe, RPC_CODE_ABORTED, RPC_END_STATUS);
    assert_int_equal(probe.message_len, 1023); /* 'x' and 511 times two bytes */
    bed_close(&bed);
    probe_fini(&probe);
}

/* ---- cancellation ----------------------------------------------------------------------- */

struct start_mail {
    struct mail mail;
    struct bed *bed;
    struct probe *probe;
};

/* On the rpc thread start and cancel come in one turn: nothing was sent before the cancel. */
static void start_and_cancel_run(struct mail *mail, void *ctx) {
    (void)ctx;
    struct start_mail *start = (struct start_mail *)(void *)mail;
    struct rpc_call_id call =
        bed_call(start->bed, start->probe, "/t.T/Hang", RPC_KIND_UNARY, "x", 5000);
    rpc_call_cancel(start->bed->client_rpc, call);
}

static void test_cancel_before_invoke(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    struct start_mail start = {{.run = start_and_cancel_run}, &bed, &probe};
    assert_true(rpc_post(bed.client_rpc, &start.mail));
    assert_closed(&probe, RPC_CODE_CANCELLED, RPC_END_CANCELLED);
    assert_int_equal(probe.messages, 0);
    bed_close(&bed);
    probe_fini(&probe);
}

static void test_cancel_after_accept_reaches_the_server(void **state) {
    (void)state;
    static const struct {
        const char *method;
        enum rpc_kind kind;
    } rows[] = {{"/t.T/Hang", RPC_KIND_UNARY},
                {"/t.T/HangStream", RPC_KIND_SERVER_STREAM},
                {"/t.T/Chat", RPC_KIND_BIDI}};
    struct bed bed;
    bed_open(&bed, NULL);
    for (uint32_t i = 0; i < 3; i++) {
        struct probe probe;
        probe_init(&probe, bed.client_rpc);
        struct rpc_call_id call = bed_call(&bed, &probe, rows[i].method, rows[i].kind, "x", 20000);
        assert_true(probe_wait(&bed.served, &bed.served.opened, i + 1, SOON));
        struct rpc_call_id at_server = bed.served.call;
        rpc_call_cancel(bed.client_rpc, call);
        rpc_call_cancel(bed.client_rpc, call);
        assert_closed(&probe, RPC_CODE_CANCELLED, RPC_END_CANCELLED);
        assert_true(probe_wait(&bed.served, &bed.served.closed, i + 1, SOON));
        assert_true(bed.served.outcome.is_cancelled);
        assert_int_equal(bed.served.outcome.code, RPC_CODE_CANCELLED);
        assert_int_equal(bed.served.outcome.end, RPC_END_PEER);
        /* What the server does afterwards has no effect. */
        rpc_call_send(bed.server_rpc, at_server, "late", 4);
        rpc_call_finish(bed.server_rpc, at_server, RPC_CODE_OK, NULL, NULL, 0);
        rpc_call_abort(bed.server_rpc, at_server, RPC_CODE_INTERNAL, "late");
        probe_fini(&probe);
    }
    bed_close(&bed);
}

static void test_cancel_after_first_message_ends_a_flood(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    probe.cancel_on_message = true;
    probe.cancel_twice = true;
    (void)bed_call(&bed, &probe, "/t.T/Flood", RPC_KIND_SERVER_STREAM, "", 20000);
    assert_closed(&probe, RPC_CODE_CANCELLED, RPC_END_CANCELLED);
    assert_true(probe_wait(&bed.served, &bed.served.closed, 1, SOON));
    assert_true(bed.served.outcome.is_cancelled);
    bed_close(&bed);
    probe_fini(&probe);
}

static void test_cancel_after_status_changes_nothing(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    struct rpc_call_id call = bed_call(&bed, &probe, "/t.T/Echo", RPC_KIND_UNARY, "x", 5000);
    assert_closed(&probe, RPC_CODE_OK, RPC_END_STATUS);
    rpc_call_cancel(bed.client_rpc, call);
    assert_true(probe_wait(&bed.served, &bed.served.closed, 1, SOON));
    rpc_call_cancel(bed.server_rpc, bed.served.call);
    assert_int_equal(bed.served.outcome.code, RPC_CODE_OK);
    bed_close(&bed);
    assert_int_equal(probe.closed, 1);
    probe_fini(&probe);
}

static void test_server_cancels_aborts_and_finishes_streams(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    for (uint32_t i = 0; i < 3; i++) {
        struct probe probe;
        probe_init(&probe, bed.client_rpc);
        (void)bed_call(&bed, &probe, "/t.T/HangStream", RPC_KIND_SERVER_STREAM, "x", 20000);
        assert_true(probe_wait(&bed.served, &bed.served.opened, i + 1, SOON));
        if (i == 0) {
            rpc_call_cancel(bed.server_rpc, bed.served.call);
            assert_closed(&probe, RPC_CODE_CANCELLED, RPC_END_STATUS);
        } else if (i == 1) {
            rpc_call_abort(bed.server_rpc, bed.served.call, RPC_CODE_ABORTED, "reasons");
            assert_closed(&probe, RPC_CODE_ABORTED, RPC_END_STATUS);
            assert_string_equal(probe.message, "reasons");
        } else {
            rpc_call_finish(bed.server_rpc, bed.served.call, RPC_CODE_OK, "", NULL, 0);
            assert_closed(&probe, RPC_CODE_OK, RPC_END_STATUS);
        }
        assert_true(probe_wait(&bed.served, &bed.served.closed, i + 1, SOON));
        probe_fini(&probe);
    }
    bed_close(&bed);
}

/* ---- deadlines -------------------------------------------------------------------------- */

static void test_deadline_passes_on_both_sides(void **state) {
    (void)state;
    static const struct {
        const char *method;
        enum rpc_kind kind;
    } rows[] = {{"/t.T/Hang", RPC_KIND_UNARY},
                {"/t.T/HangStream", RPC_KIND_SERVER_STREAM},
                {"/t.T/Flood", RPC_KIND_SERVER_STREAM},
                {"/t.T/Chat", RPC_KIND_BIDI}};
    struct bed bed;
    bed_open(&bed, NULL);
    for (uint32_t i = 0; i < 4; i++) {
        struct probe probe;
        probe_init(&probe, bed.client_rpc);
        (void)bed_call(&bed, &probe, rows[i].method, rows[i].kind, "x", 300);
        assert_closed(&probe, RPC_CODE_DEADLINE_EXCEEDED, RPC_END_DEADLINE);
        assert_true(probe_wait(&bed.served, &bed.served.closed, i + 1, SOON));
        assert_true(bed.served.outcome.is_cancelled);
        probe_fini(&probe);
    }
    bed_close(&bed);
}

static void test_deadline_in_the_past_never_reaches_a_handler(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    struct rpc_call_config config = {.method = "/t.T/Echo",
                                     .kind = RPC_KIND_UNARY,
                                     .deadline = instant_add(clock_now(), span_ms(-20)),
                                     .handlers = &probe_handlers,
                                     .ctx = &probe};
    struct rpc_call_id call;
    assert_int_equal(rpc_call_start(bed.channel, &config, &call), STATUS_OK);
    assert_closed(&probe, RPC_CODE_DEADLINE_EXCEEDED, RPC_END_DEADLINE);
    assert_int_equal(bed.served.opened, 0);
    bed_close(&bed);
    probe_fini(&probe);
}

/* ---- bounds ----------------------------------------------------------------------------- */

static void test_overflow_of_the_send_queue_fails_the_call_with_a_sentence(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    (void)bed_call(&bed, &probe, "/t.T/Pour", RPC_KIND_SERVER_STREAM, "x", 20000);
    assert_closed(&probe, RPC_CODE_RESOURCE_EXHAUSTED, RPC_END_STATUS);
    assert_non_null(strstr(probe.message, "reads too slowly"));
    assert_true(probe_wait(&bed.served, &bed.served.closed, 1, SOON));
    assert_int_equal(bed.served.outcome.end, RPC_END_OVERFLOW);
    struct rpc_counters counters;
    rpc_counters(bed.server_rpc, &counters);
    assert_int_equal(counters.overflowed, 1);
    bed_close(&bed);
    probe_fini(&probe);
}

static void test_first_message_larger_than_the_queue_is_sent(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    struct rpc_call_id call = bed_call(&bed, &probe, "/t.T/Chat", RPC_KIND_BIDI, NULL, 0);
    size_t len = 3 << 20; /* the limit is 1 MiB on both sides */
    char *data = calloc(1, len);
    assert_non_null(data);
    rpc_call_send(bed.client_rpc, call, data, len);
    free(data);
    assert_true(probe_wait(&probe, &probe.messages, 1, SOON));
    assert_int_equal(probe.bytes, len);
    rpc_call_half_close(bed.client_rpc, call);
    assert_closed(&probe, RPC_CODE_OK, RPC_END_STATUS);
    bed_close(&bed);
    probe_fini(&probe);
}

static void test_message_over_the_limit_fails_its_call_only(void **state) {
    (void)state;
    struct bed bed;
    struct bed_options options = {.server.receive_bytes_max = 1000,
                                  .channel.receive_bytes_max = 2000};
    bed_open(&bed, &options);
    char big[3001];
    memset(big, 'x', 3000);
    big[3000] = '\0';

    struct probe bystander;
    probe_init(&bystander, bed.client_rpc);
    struct rpc_call_id stream = bed_call(&bed, &bystander, "/t.T/Chat", RPC_KIND_BIDI, NULL, 0);
    assert_true(probe_wait(&bystander, &bystander.headers, 1, SOON));

    static const enum rpc_kind kinds[] = {RPC_KIND_UNARY, RPC_KIND_BIDI};
    static const char *const methods[] = {"/t.T/Echo", "/t.T/Chat"};
    for (uint32_t i = 0; i < 2; i++) {
        struct probe probe;
        probe_init(&probe, bed.client_rpc);
        struct rpc_call_id call = bed_call(&bed, &probe, methods[i], kinds[i], big, 5000);
        if (kinds[i] == RPC_KIND_BIDI) {
            rpc_call_send(bed.client_rpc, call, big, 3000);
        }
        assert_closed(&probe, RPC_CODE_RESOURCE_EXHAUSTED, RPC_END_STATUS);
        assert_non_null(strstr(probe.message, "larger than max"));
        probe_fini(&probe);
    }
    struct probe probe; /* and the other way: what the client will not take */
    probe_init(&probe, bed.client_rpc);
    (void)bed_call(&bed, &probe, "/t.T/Count", RPC_KIND_SERVER_STREAM, "5 2001", 5000);
    assert_closed(&probe, RPC_CODE_RESOURCE_EXHAUSTED, RPC_END_STATUS);
    probe_fini(&probe);

    rpc_call_send(bed.client_rpc, stream, "alive", 5); /* same connection */
    assert_true(probe_wait(&bystander, &bystander.messages, 1, SOON));
    rpc_call_half_close(bed.client_rpc, stream);
    assert_closed(&bystander, RPC_CODE_OK, RPC_END_STATUS);
    bed_close(&bed);
    probe_fini(&bystander);
}

static void test_calls_past_the_table_are_refused_and_the_server_recovers(void **state) {
    (void)state;
    struct bed bed;
    struct bed_options options = {.server_calls_max = 4};
    bed_open(&bed, &options);
    struct probe held;
    probe_init(&held, bed.client_rpc);
    struct rpc_call_id calls[4];
    for (uint32_t i = 0; i < 4; i++) {
        calls[i] = bed_call(&bed, &held, "/t.T/Hang", RPC_KIND_UNARY, "x", 60000);
    }
    assert_true(probe_wait(&bed.served, &bed.served.opened, 4, SOON));
    for (uint32_t i = 0; i < 20; i++) {
        struct probe probe;
        probe_init(&probe, bed.client_rpc);
        (void)bed_call(&bed, &probe, "/t.T/Echo", RPC_KIND_UNARY, "x", 5000);
        assert_closed(&probe, RPC_CODE_RESOURCE_EXHAUSTED, RPC_END_STATUS);
        probe_fini(&probe);
    }
    for (uint32_t i = 0; i < 4; i++) {
        rpc_call_cancel(bed.client_rpc, calls[i]);
    }
    assert_true(probe_wait(&held, &held.closed, 4, SOON));
    assert_true(probe_wait(&bed.served, &bed.served.closed, 4, SOON));
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    (void)bed_call(&bed, &probe, "/t.T/Echo", RPC_KIND_UNARY, "x", 5000);
    assert_closed(&probe, RPC_CODE_OK, RPC_END_STATUS);
    struct rpc_counters counters;
    rpc_counters(bed.server_rpc, &counters);
    assert_int_equal(counters.refused_full, 20);
    bed_close(&bed);
    probe_fini(&probe);
    probe_fini(&held);
}

static void test_malformed_calls_are_refused_at_once(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct rpc_pair bad[] = {{"Upper", "x"}, {"ok", "a\nb"}, {"x-bin", "raw"}, {"", "x"}};
    struct rpc_call_id call = {0};
    for (uint32_t i = 0; i < 4; i++) {
        struct rpc_call_config config = {.method = "/t.T/Echo",
                                         .deadline = INSTANT_NEVER,
                                         .headers = &bad[i],
                                         .headers_len = 1,
                                         .handlers = &probe_handlers};
        assert_int_equal(rpc_call_start(bed.channel, &config, &call), STATUS_INVALID);
    }
    struct rpc_call_config config = {.method = "no-slash", .handlers = &probe_handlers};
    assert_int_equal(rpc_call_start(bed.channel, &config, &call), STATUS_INVALID);
    bed_close(&bed);
}

static void test_ten_thousand_calls_leave_descriptors_and_tables_flat(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe probe;
    probe_init(&probe, bed.client_rpc);
    uint32_t before = 0;
    uint32_t sent = 0;
    struct rpc_counters first;
    for (uint32_t round = 0; round < 101; round++) {
        struct rpc_call_id calls[100];
        for (uint32_t i = 0; i < 100; i++, sent++) {
            static const char *const methods[] = {"/t.T/Echo", "/t.T/Count", "/t.T/Hang"};
            calls[i] = bed_call(&bed, &probe, methods[i % 3],
                                i % 3 == 1 ? RPC_KIND_SERVER_STREAM : RPC_KIND_UNARY, "2 9", 60000);
        }
        for (uint32_t i = 2; i < 100; i += 3) {
            rpc_call_cancel(bed.client_rpc, calls[i]);
        }
        assert_true(probe_wait(&probe, &probe.closed, sent, SOON));
        if (round == 0) { /* connections, slots and caches exist now */
            before = descriptors_open();
            rpc_counters(bed.server_rpc, &first);
        }
    }
    assert_int_equal(probe.closed, 10100);
    assert_int_equal(descriptors_open(), before);
    struct rpc_counters counters;
    rpc_counters(bed.client_rpc, &counters);
    assert_int_equal(counters.calls_opened, 10100);
    assert_int_equal(counters.calls_closed, 10100);
    assert_int_equal(counters.calls_live, 0);
    /* The server's close tags may still be on their way. */
    struct instant deadline = instant_add(clock_now(), span_ms(SOON));
    do {
        rpc_counters(bed.server_rpc, &counters);
    } while (counters.calls_live > 0 && !instant_reached(clock_now(), deadline));
    assert_int_equal(counters.calls_live, 0);
    assert_int_equal(counters.slots_armed, first.slots_armed);
    bed_close(&bed);
    probe_fini(&probe);
}

/* ---- threads ---------------------------------------------------------------------------- */

struct sender {
    struct bed *bed;
    struct rpc_call_id call;
    pthread_t thread;
};

static void *sender_main(void *arg) {
    struct sender *sender = arg;
    for (uint32_t i = 0; i < 2000; i++) {
        while (rpc_call_queued_bytes(sender->bed->client_rpc, sender->call) > (512 << 10)) {
        }
        rpc_call_send(sender->bed->client_rpc, sender->call, "0123456789", 10);
    }
    return NULL;
}

static void test_four_threads_send_on_two_calls_and_nothing_is_lost(void **state) {
    (void)state;
    struct bed bed;
    bed_open(&bed, NULL);
    struct probe probes[2];
    struct sender senders[4];
    for (uint32_t i = 0; i < 2; i++) {
        probe_init(&probes[i], bed.client_rpc);
        senders[i].call = bed_call(&bed, &probes[i], "/t.T/Chat", RPC_KIND_BIDI, NULL, 0);
        senders[i + 2].call = senders[i].call;
    }
    for (uint32_t i = 0; i < 4; i++) {
        senders[i].bed = &bed;
        assert_int_equal(pthread_create(&senders[i].thread, NULL, sender_main, &senders[i]), 0);
    }
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(senders[i].thread, NULL), 0);
    }
    for (uint32_t i = 0; i < 2; i++) {
        rpc_call_half_close(bed.client_rpc, senders[i].call);
        assert_closed(&probes[i], RPC_CODE_OK, RPC_END_STATUS);
        assert_int_equal(probes[i].messages, 4000);
        assert_int_equal(probes[i].bytes, 40000);
        probe_fini(&probes[i]);
    }
    bed_close(&bed);
}

static void test_status_codes_map_both_ways(void **state) {
    (void)state;
    for (int i = STATUS_OK; i <= STATUS_INTERNAL; i++) {
        enum rpc_code code = rpc_code_from_status((enum status)i);
        assert_true((code == RPC_CODE_OK) == (i == STATUS_OK));
        if (i != STATUS_IO) { /* has no code of its own: INTERNAL */
            assert_int_equal(rpc_code_to_status(code), i);
        }
    }
    for (int i = 0; i <= 16; i++) {
        enum status status = rpc_code_to_status((enum rpc_code)i);
        assert_true((status == STATUS_OK) == (i == 0));
        assert_string_not_equal(rpc_code_name((enum rpc_code)i), i == 2 ? "" : "UNKNOWN");
    }
    assert_int_equal(rpc_code_to_status((enum rpc_code)99), STATUS_INTERNAL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unary_call_carries_payload_headers_and_peer),
        cmocka_unit_test(test_empty_messages_travel),
        cmocka_unit_test(test_failure_carries_code_sentence_and_trailers),
        cmocka_unit_test(test_server_stream_delivers_all_messages_in_order_and_then_closes),
        cmocka_unit_test(test_bidi_stream_echoes_until_half_close),
        cmocka_unit_test(test_unknown_method_is_answered_with_what_exists),
        cmocka_unit_test(test_long_sentences_are_cut_between_characters),
        cmocka_unit_test(test_cancel_before_invoke),
        cmocka_unit_test(test_cancel_after_accept_reaches_the_server),
        cmocka_unit_test(test_cancel_after_first_message_ends_a_flood),
        cmocka_unit_test(test_cancel_after_status_changes_nothing),
        cmocka_unit_test(test_server_cancels_aborts_and_finishes_streams),
        cmocka_unit_test(test_deadline_passes_on_both_sides),
        cmocka_unit_test(test_deadline_in_the_past_never_reaches_a_handler),
        cmocka_unit_test(test_overflow_of_the_send_queue_fails_the_call_with_a_sentence),
        cmocka_unit_test(test_first_message_larger_than_the_queue_is_sent),
        cmocka_unit_test(test_message_over_the_limit_fails_its_call_only),
        cmocka_unit_test(test_calls_past_the_table_are_refused_and_the_server_recovers),
        cmocka_unit_test(test_malformed_calls_are_refused_at_once),
        cmocka_unit_test(test_ten_thousand_calls_leave_descriptors_and_tables_flat),
        cmocka_unit_test(test_four_threads_send_on_two_calls_and_nothing_is_lost),
        cmocka_unit_test(test_status_codes_map_both_ways),
    };
    return cmocka_run_group_tests_name("rpc_calls", tests, NULL, NULL);
}
