/* Health and reflection, asked by our own client and by the stock Python gRPC. */
#define _GNU_SOURCE /* memmem */
#include "unit/rpc/bed.h"

#include "base/check.h"
#include "rpc/descriptors.pb.h"
#include "rpc/health.h"
#include "rpc/proto/health.pb-c.h"
#include "rpc/proto/reflection_v1.pb-c.h"
#include "rpc/reflection.h"
#include "runtime/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SOON = 10000 }; /* ms */

/* A bed with the two services on its server; the bed's own server is not used. */
struct served {
    struct rpc *rpc;
    struct rpc_server *server;
    struct rpc_health *health;
    struct rpc_reflection *reflection;
    struct bed client;
};

static void ignore_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    (void)ctx, (void)call, (void)incoming;
}
static void ignore_closed(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome) {
    (void)ctx, (void)call, (void)outcome;
}
static const struct rpc_handlers ignore_handlers = {.on_open = ignore_open,
                                                    .on_closed = ignore_closed};

static void served_open(struct served *served) {
    memset(served, 0, sizeof *served);
    assert_int_equal(rpc_create(NULL, &served->rpc), STATUS_OK);
    assert_int_equal(
        rpc_server_create(served->rpc, "127.0.0.1:0", NULL, NULL, &served->server, NULL),
        STATUS_OK);
    struct rpc_method method = {
        .path = "/t.T/Ignore", .kind = RPC_KIND_BIDI, .handlers = &ignore_handlers};
    assert_int_equal(rpc_server_method(served->server, &method), STATUS_OK);
    assert_int_equal(rpc_health_create(served->rpc, served->server, &served->health), STATUS_OK);
    assert_int_equal(rpc_reflection_create(served->rpc, served->server, &served->reflection),
                     STATUS_OK);
    struct rpc_health *twice = NULL;
    assert_int_equal(rpc_health_create(served->rpc, served->server, &twice), STATUS_EXISTS);
    rpc_health_set(served->health, "t.T", true);
    assert_int_equal(rpc_server_start(served->server, NULL), STATUS_OK);
    struct bed_options options = {.remote_port = rpc_server_port(served->server)};
    bed_open(&served->client, &options);
}

static void served_close(struct served *served) {
    bed_close(&served->client);
    assert_int_equal(rpc_shutdown(served->rpc, span_ms(0), span_ms(4000)), STATUS_OK);
    rpc_destroy(served->rpc);
    rpc_health_destroy(served->health);
    rpc_reflection_destroy(served->reflection);
}

static struct rpc_call_id health_call(struct served *served, struct probe *probe,
                                      const char *method, enum rpc_kind kind, const char *service) {
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    request.service = (char *)(uintptr_t)service; /* packing only reads */
    uint8_t bytes[300];
    struct rpc_call_config config = {
        .method = method,
        .kind = kind,
        .deadline = instant_add(clock_now(), span_ms(SOON)),
        .payload = {bytes, grpc__health__v1__health_check_request__pack(&request, bytes)},
        .handlers = &probe_handlers,
        .ctx = probe};
    struct rpc_call_id call;
    assert_int_equal(rpc_call_start(served->client.channel, &config, &call), STATUS_OK);
    return call;
}

static int told(const struct probe *probe) {
    return probe->bytes == 0 ? -1 : probe->last[1]; /* 0x08, then the status */
}

static void test_check_answers_by_name(void **state) {
    (void)state;
    struct served served;
    served_open(&served);
    char long_name[201];
    memset(long_name, 'x', 200);
    long_name[200] = '\0';
    const struct {
        const char *service;
        enum rpc_code code;
        int told;
    } rows[] = {{"", RPC_CODE_OK, 2},
                {"t.T", RPC_CODE_OK, 1},
                {"t.Other", RPC_CODE_NOT_FOUND, -1},
                {long_name, RPC_CODE_INVALID_ARGUMENT, -1}};
    for (size_t i = 0; i < 4; i++) {
        struct probe probe;
        probe_init(&probe, served.client.client_rpc);
        (void)health_call(&served, &probe, "/grpc.health.v1.Health/Check", RPC_KIND_UNARY,
                          rows[i].service);
        assert_true(probe_wait(&probe, &probe.closed, 1, SOON));
        assert_int_equal(probe.outcome.code, rows[i].code);
        assert_int_equal(told(&probe), rows[i].told);
        probe_fini(&probe);
    }
    struct probe probe;
    probe_init(&probe, served.client.client_rpc);
    (void)bed_call(&served.client, &probe, "/grpc.health.v1.Health/Check", RPC_KIND_UNARY,
                   "\x0a\xff", 5000);
    assert_true(probe_wait(&probe, &probe.closed, 1, SOON));
    assert_int_equal(probe.outcome.code, RPC_CODE_INVALID_ARGUMENT);
    probe_fini(&probe);
    served_close(&served);
}

static void test_watch_tells_changes_once_each(void **state) {
    (void)state;
    struct served served;
    served_open(&served);
    struct probe all;
    struct probe later;
    probe_init(&all, served.client.client_rpc);
    probe_init(&later, served.client.client_rpc);
    struct rpc_call_id call =
        health_call(&served, &all, "/grpc.health.v1.Health/Watch", RPC_KIND_SERVER_STREAM, "");
    (void)health_call(&served, &later, "/grpc.health.v1.Health/Watch", RPC_KIND_SERVER_STREAM,
                      "comes.Later");
    assert_true(probe_wait(&all, &all.messages, 1, SOON));
    assert_true(probe_wait(&later, &later.messages, 1, SOON));
    assert_int_equal(told(&all), 2);
    assert_int_equal(told(&later), 3); /* SERVICE_UNKNOWN, and the stream stays */
    rpc_health_set(served.health, "", true);
    assert_true(probe_wait(&all, &all.messages, 2, SOON));
    assert_int_equal(told(&all), 1);
    rpc_health_set(served.health, "", true); /* no change, no message */
    rpc_health_set(served.health, "comes.Later", false);
    assert_true(probe_wait(&later, &later.messages, 2, SOON));
    assert_int_equal(told(&later), 2);
    rpc_call_cancel(served.client.client_rpc, call);
    assert_true(probe_wait(&all, &all.closed, 1, SOON));
    assert_int_equal(all.messages, 2);
    served_close(&served);
    assert_int_equal(later.closed, 1);
    probe_fini(&all);
    probe_fini(&later);
}

static void test_watchers_are_bounded(void **state) {
    (void)state;
    struct served served;
    served_open(&served);
    struct probe probe;
    probe_init(&probe, served.client.client_rpc);
    for (uint32_t i = 0; i < 257; i++) {
        (void)health_call(&served, &probe, "/grpc.health.v1.Health/Watch", RPC_KIND_SERVER_STREAM,
                          "");
    }
    assert_true(probe_wait(&probe, &probe.closed, 1, SOON));
    assert_int_equal(probe.outcome.code, RPC_CODE_RESOURCE_EXHAUSTED);
    assert_true(probe_wait(&probe, &probe.messages, 256, SOON));
    served_close(&served);
    assert_int_equal(probe.closed, 257);
    probe_fini(&probe);
}

struct question {
    Grpc__Reflection__V1__ServerReflectionRequest__MessageRequestCase kind;
    const char *text;
    const char *file; /* the first file of the answer; NULL: an error */
    int error;
};

static void test_reflection_finds_files_by_name_and_by_every_kind_of_symbol(void **state) {
    (void)state;
    struct served served;
    served_open(&served);
#define BY_NAME GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME
#define BY_SYMBOL                                                                                  \
    GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL
    static const struct question rows[] = {
        {BY_NAME, "health.proto", "health.proto", 0},
        {BY_NAME, "health", NULL, RPC_CODE_NOT_FOUND},
        {BY_NAME, "", NULL, RPC_CODE_NOT_FOUND},
        {BY_SYMBOL, "grpc.health.v1.Health", "health.proto", 0},
        {BY_SYMBOL, "grpc.health.v1.Health.Check", "health.proto", 0},
        {BY_SYMBOL, "grpc.health.v1.Health.Nope", NULL, RPC_CODE_NOT_FOUND},
        {BY_SYMBOL, "grpc.health.v1.HealthCheckResponse", "health.proto", 0},
        {BY_SYMBOL, "grpc.health.v1.HealthCheckResponse.status", "health.proto", 0},
        {BY_SYMBOL, "grpc.health.v1.HealthCheckResponse.ServingStatus", "health.proto", 0},
        {BY_SYMBOL, "grpc.health.v1.HealthCheckResponse.SERVING", "health.proto", 0},
        {BY_SYMBOL, "grpc.health.v1.HealthCheck", NULL, RPC_CODE_NOT_FOUND},
        {BY_SYMBOL, "grpc.health.v1", NULL, RPC_CODE_NOT_FOUND},
        {BY_SYMBOL, "grpc.health.v1.", NULL, RPC_CODE_NOT_FOUND},
        {BY_SYMBOL, "grpc.reflection.v1alpha.ServerReflection", "reflection_v1alpha.proto", 0},
        {BY_SYMBOL, "grpc.reflection.v1.ServerReflectionRequest.message_request",
         "reflection_v1.proto", 0},
        {BY_SYMBOL, "", NULL, RPC_CODE_NOT_FOUND},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        Grpc__Reflection__V1__ServerReflectionRequest request =
            GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT;
        request.message_request_case = rows[i].kind;
        request.file_by_filename = (char *)(uintptr_t)rows[i].text; /* the union's text */
        uint8_t bytes[256];
        size_t len = grpc__reflection__v1__server_reflection_request__pack(&request, bytes);
        struct probe probe;
        probe_init(&probe, served.client.client_rpc);
        struct rpc_call_id call = bed_call(
            &served.client, &probe, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            RPC_KIND_BIDI, NULL, 5000);
        rpc_call_send(served.client.client_rpc, call, bytes, len);
        rpc_call_half_close(served.client.client_rpc, call);
        assert_true(probe_wait(&probe, &probe.closed, 1, SOON));
        assert_int_equal(probe.outcome.code, RPC_CODE_OK);
        assert_int_equal(probe.messages, 1);
        /* The probe keeps the first bytes only: look for the file's name, or the code. */
        char wanted[64];
        if (rows[i].file != NULL) {
            (void)snprintf(wanted, sizeof wanted, "\x0a%c%s", (int)strlen(rows[i].file),
                           rows[i].file);
            assert_non_null(memmem(probe.last, sizeof probe.last - 1, wanted, strlen(wanted)));
        } else {
            assert_non_null(memmem(probe.last, sizeof probe.last - 1, "no file here", 12));
        }
        probe_fini(&probe);
    }
    served_close(&served);
}

static void test_reflection_refuses_what_is_no_request_and_no_descriptor_set(void **state) {
    (void)state;
    struct served served;
    served_open(&served);
    struct probe probe;
    probe_init(&probe, served.client.client_rpc);
    struct rpc_call_id call = bed_call(
        &served.client, &probe, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        RPC_KIND_BIDI, NULL, 5000);
    rpc_call_send(served.client.client_rpc, call, "\xff\xff\xff", 3);
    assert_true(probe_wait(&probe, &probe.closed, 1, SOON));
    assert_int_equal(probe.outcome.code, RPC_CODE_INVALID_ARGUMENT);
    probe_fini(&probe);
    served_close(&served);

    /* Parsing needs no running server. */
    struct rpc *rpc = NULL;
    struct rpc_server *server = NULL;
    struct rpc_reflection *reflection = NULL;
    assert_int_equal(rpc_create(NULL, &rpc), STATUS_OK);
    assert_int_equal(rpc_server_create(rpc, "127.0.0.1:0", NULL, NULL, &server, NULL), STATUS_OK);
    assert_int_equal(rpc_reflection_create(rpc, server, &reflection), STATUS_OK);
    assert_int_equal(rpc_reflection_add(reflection, rpc_descriptors, rpc_descriptors_len),
                     STATUS_OK); /* again: skipped */
    static const uint8_t nameless[] = {0x0a, 0x02, 0x12, 0x00};
    assert_int_equal(rpc_reflection_add(reflection, nameless, sizeof nameless), STATUS_CORRUPT);
    for (size_t len = 0; len < rpc_descriptors_len; len++) { /* every cut, in its own memory */
        uint8_t *cut = malloc(len + 1);
        assert_non_null(cut);
        memcpy(cut, rpc_descriptors, len);
        enum status status = rpc_reflection_add(reflection, cut, len);
        free(cut);
        /* A cut between two files is a valid, shorter set. */
        assert_true(status == STATUS_CORRUPT || (status == STATUS_OK && len > 200));
    }
    assert_int_equal(rpc_shutdown(rpc, span_ms(0), span_ms(4000)), STATUS_OK);
    rpc_destroy(rpc);
    rpc_reflection_destroy(reflection);
}

static void test_stock_python_client_understands_health_and_reflection(void **state) {
    (void)state;
    if (system("/usr/bin/python3 -c 'import grpc, google.protobuf' 2>/dev/null") != 0) {
        print_message("python3 has no grpc here: not compared\n");
        skip();
    }
    struct served served;
    served_open(&served);
    char command[512];
    (void)snprintf(command, sizeof command,
                   "timeout 60 /usr/bin/python3 " BATON_SOURCE_DIR
                   "/tests/unit/rpc/probe_services.py %u",
                   (unsigned)rpc_server_port(served.server));
    FILE *out = popen(command, "r");
    assert_non_null(out);
    char line[64] = {0};
    char *got = fgets(line, sizeof line, out);
    assert_int_equal(pclose(out), 0);
    assert_non_null(got);
    assert_string_equal(line, "ok\n");
    served_close(&served);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_check_answers_by_name),
        cmocka_unit_test(test_watch_tells_changes_once_each),
        cmocka_unit_test(test_watchers_are_bounded),
        cmocka_unit_test(test_reflection_finds_files_by_name_and_by_every_kind_of_symbol),
        cmocka_unit_test(test_reflection_refuses_what_is_no_request_and_no_descriptor_set),
        cmocka_unit_test(test_stock_python_client_understands_health_and_reflection),
    };
    return cmocka_run_group_tests_name("rpc_services", tests, NULL, NULL);
}
