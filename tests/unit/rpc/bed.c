#include "unit/rpc/bed.h"

#include "base/check.h"
#include "runtime/clock.h"

#include <dirent.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

extern char **environ;

/* ---- probes ----------------------------------------------------------------------------- */

void probe_init(struct probe *probe, struct rpc *rpc) {
    memset(probe, 0, sizeof *probe);
    probe->rpc = rpc;
    pthread_condattr_t attributes;
    CHECK(pthread_condattr_init(&attributes) == 0);
    CHECK(pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_mutex_init(&probe->lock, NULL) == 0);
    CHECK(pthread_cond_init(&probe->changed, &attributes) == 0);
    (void)pthread_condattr_destroy(&attributes);
}

void probe_fini(struct probe *probe) {
    (void)pthread_cond_destroy(&probe->changed);
    (void)pthread_mutex_destroy(&probe->lock);
}

bool probe_wait(struct probe *probe, const uint32_t *counter, uint32_t n, uint32_t ms) {
    struct instant deadline = instant_add(clock_now(), span_ms(ms));
    struct timespec at = clock_to_timespec(deadline);
    pthread_mutex_lock(&probe->lock);
    while (*counter < n && !instant_reached(clock_now(), deadline)) {
        (void)pthread_cond_timedwait(&probe->changed, &probe->lock, &at);
    }
    bool is_there = *counter >= n;
    pthread_mutex_unlock(&probe->lock);
    return is_there;
}

static void note(struct probe *probe, uint32_t *counter) {
    pthread_mutex_lock(&probe->lock);
    (*counter)++;
    pthread_cond_broadcast(&probe->changed);
    pthread_mutex_unlock(&probe->lock);
}

static void take_header(const struct rpc_headers *headers, const char *key, char *to, size_t cap) {
    struct bytes value;
    if (rpc_headers_get(headers, key, &value) && value.len < cap) {
        memcpy(to, value.data, value.len);
        to[value.len] = '\0';
    }
}

static void probe_headers(void *ctx, struct rpc_call_id call, const struct rpc_headers *headers) {
    (void)call, (void)headers;
    struct probe *probe = ctx;
    note(probe, &probe->headers);
}

static void probe_message(void *ctx, struct rpc_call_id call, const uint8_t *data, size_t len) {
    struct probe *probe = ctx;
    pthread_mutex_lock(&probe->lock);
    probe->messages++;
    probe->bytes += len;
    size_t take = len < sizeof probe->last ? len : sizeof probe->last - 1;
    if (take > 0) {
        memcpy(probe->last, data, take);
    }
    probe->last[take] = '\0';
    pthread_cond_broadcast(&probe->changed);
    pthread_mutex_unlock(&probe->lock);
    if (probe->cancel_on_message) {
        rpc_call_cancel(probe->rpc, call);
        if (probe->cancel_twice) {
            rpc_call_cancel(probe->rpc, call);
        }
    }
}

static void probe_writable(void *ctx, struct rpc_call_id call) {
    (void)call;
    struct probe *probe = ctx;
    note(probe, &probe->writable);
}

static void probe_closed(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome) {
    (void)call;
    struct probe *probe = ctx;
    pthread_mutex_lock(&probe->lock);
    probe->closed++;
    probe->outcome = *outcome;
    text_copy(probe->message, sizeof probe->message, outcome->message);
    probe->message_len = strlen(outcome->message);
    probe->outcome.message = NULL;
    probe->outcome.trailers = NULL;
    if (outcome->trailers != NULL) {
        take_header(outcome->trailers, "retry-after-ms", probe->trailer, sizeof probe->trailer);
    }
    pthread_cond_broadcast(&probe->changed);
    pthread_mutex_unlock(&probe->lock);
}

const struct rpc_handlers probe_handlers = {
    .on_headers = probe_headers,
    .on_message = probe_message,
    .on_writable = probe_writable,
    .on_closed = probe_closed,
};

/* ---- the server's methods --------------------------------------------------------------- */

static void note_open(struct bed *bed, struct rpc_call_id call,
                      const struct rpc_incoming *incoming) {
    struct probe *probe = &bed->served;
    pthread_mutex_lock(&probe->lock);
    probe->opened++;
    probe->call = call;
    text_copy(probe->peer, sizeof probe->peer, incoming->peer);
    take_header(incoming->headers, "x-test", probe->header, sizeof probe->header);
    probe->budget_ms = instant_is_never(incoming->deadline)
                           ? -1
                           : span_to_ms(instant_since(incoming->deadline, clock_now()));
    pthread_cond_broadcast(&probe->changed);
    pthread_mutex_unlock(&probe->lock);
}

static void served_closed(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome) {
    struct bed *bed = ctx;
    probe_closed(&bed->served, call, outcome);
}

static void echo_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    struct bed *bed = ctx;
    note_open(bed, call, incoming);
    rpc_call_send(bed->server_rpc, call, incoming->payload.data, incoming->payload.len);
    rpc_call_finish(bed->server_rpc, call, RPC_CODE_OK, NULL, NULL, 0);
}

static void fail_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    struct bed *bed = ctx;
    note_open(bed, call, incoming);
    struct rpc_pair trailers[] = {{"retry-after-ms", "250"}, {"x-other", "1"}};
    CHECK_OP(incoming->payload.len, >, 0);
    rpc_call_finish(bed->server_rpc, call, (enum rpc_code)(incoming->payload.data[0] - 'a'),
                    "no: 100 % sure, \"quoted\", \xc3\xa9", trailers, 2);
}

static void hang_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    note_open(ctx, call, incoming);
}

static void sleep_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    note_open(ctx, call, incoming);
    (void)poll(NULL, 0, 150);
}

static void count_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    struct bed *bed = ctx;
    note_open(bed, call, incoming);
    char text[32] = {0};
    memcpy(text, incoming->payload.data, incoming->payload.len < 31 ? incoming->payload.len : 31);
    char *rest = NULL;
    unsigned long n = strtoul(text, &rest, 10);
    unsigned long size = strtoul(rest, NULL, 10);
    char *data = calloc(1, size + 1);
    CHECK(data != NULL);
    for (unsigned long i = 0; i < n; i++) {
        (void)snprintf(data, size + 1, "%lu", i);
        rpc_call_send(bed->server_rpc, call, data, size);
    }
    free(data);
    rpc_call_finish(bed->server_rpc, call, RPC_CODE_OK, "all sent", NULL, 0);
}

static void flood_more(struct bed *bed, struct rpc_call_id call) {
    char *data = calloc(1, bed->flood_bytes);
    CHECK(data != NULL);
    rpc_call_send(bed->server_rpc, call, data, bed->flood_bytes);
    free(data);
}

static void flood_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    note_open(ctx, call, incoming);
    flood_more(ctx, call);
}

static void flood_writable(void *ctx, struct rpc_call_id call) {
    struct bed *bed = ctx;
    note(&bed->served, &bed->served.writable);
    flood_more(bed, call);
}

static void pour_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    struct bed *bed = ctx;
    note_open(bed, call, incoming);
    for (uint32_t i = 0; i < 64; i++) {
        flood_more(bed, call);
    }
    CHECK_OP(rpc_call_queued_bytes(bed->server_rpc, call), <=, 256 << 10);
}

static void chat_message(void *ctx, struct rpc_call_id call, const uint8_t *data, size_t len) {
    struct bed *bed = ctx;
    note(&bed->served, &bed->served.messages);
    rpc_call_send(bed->server_rpc, call, data, len);
}

static void chat_half_closed(void *ctx, struct rpc_call_id call) {
    struct bed *bed = ctx;
    note(&bed->served, &bed->served.half_closed);
    rpc_call_finish(bed->server_rpc, call, RPC_CODE_OK, "bye", NULL, 0);
}

static const struct rpc_handlers echo_handlers = {.on_open = echo_open, .on_closed = served_closed};
static const struct rpc_handlers fail_handlers = {.on_open = fail_open, .on_closed = served_closed};
static const struct rpc_handlers hang_handlers = {.on_open = hang_open, .on_closed = served_closed};
static const struct rpc_handlers sleep_handlers = {.on_open = sleep_open,
                                                   .on_closed = served_closed};
static const struct rpc_handlers count_handlers = {.on_open = count_open,
                                                   .on_closed = served_closed};
static const struct rpc_handlers flood_handlers = {
    .on_open = flood_open, .on_writable = flood_writable, .on_closed = served_closed};
static const struct rpc_handlers pour_handlers = {.on_open = pour_open, .on_closed = served_closed};
static const struct rpc_handlers chat_handlers = {.on_open = hang_open,
                                                  .on_message = chat_message,
                                                  .on_half_closed = chat_half_closed,
                                                  .on_closed = served_closed};

static void bed_methods(struct bed *bed) {
    const struct rpc_method methods[] = {
        {.path = "/t.T/Echo", .kind = RPC_KIND_UNARY, .handlers = &echo_handlers},
        {.path = "/t.T/Fail", .kind = RPC_KIND_UNARY, .handlers = &fail_handlers},
        {.path = "/t.T/Hang", .kind = RPC_KIND_UNARY, .handlers = &hang_handlers},
        {.path = "/t.T/Sleep", .kind = RPC_KIND_UNARY, .handlers = &sleep_handlers},
        {.path = "/t.T/HangStream", .kind = RPC_KIND_SERVER_STREAM, .handlers = &hang_handlers},
        {.path = "/t.T/Count",
         .kind = RPC_KIND_SERVER_STREAM,
         .handlers = &count_handlers,
         .queue_bytes_max = 64 << 20},
        {.path = "/t.T/Flood",
         .kind = RPC_KIND_SERVER_STREAM,
         .handlers = &flood_handlers,
         .stall_ms = 400},
        {.path = "/t.T/Pour",
         .kind = RPC_KIND_SERVER_STREAM,
         .handlers = &pour_handlers,
         .queue_bytes_max = 256 << 10},
        {.path = "/t.T/Chat", .kind = RPC_KIND_BIDI, .handlers = &chat_handlers},
    };
    for (size_t i = 0; i < sizeof methods / sizeof methods[0]; i++) {
        struct rpc_method method = methods[i];
        method.ctx = bed;
        CHECK(rpc_server_method(bed->server, &method) == STATUS_OK);
        CHECK(rpc_server_method(bed->server, &method) == STATUS_EXISTS);
    }
}

/* ---- the bed ---------------------------------------------------------------------------- */

void bed_open(struct bed *bed, const struct bed_options *options) {
    struct bed_options set = {0};
    if (options != NULL) {
        set = *options;
    }
    memset(bed, 0, sizeof *bed);
    bed->flood_bytes = set.flood_bytes != 0 ? set.flood_bytes : 16 << 10;
    struct rpc_error error = {""};
    if (set.remote_port == 0) {
        struct rpc_config config = {.name = "rpc-server", .calls_max = set.server_calls_max};
        CHECK(rpc_create(&config, &bed->server_rpc) == STATUS_OK);
        probe_init(&bed->served, bed->server_rpc);
        CHECK(rpc_server_create(bed->server_rpc, "127.0.0.1:0", NULL, &set.server, &bed->server,
                                &error) == STATUS_OK);
        bed_methods(bed);
        CHECK(rpc_server_start(bed->server, &error) == STATUS_OK);
        bed->port = rpc_server_port(bed->server);
    } else {
        bed->port = set.remote_port;
    }
    if (set.is_server_only) {
        return;
    }
    struct rpc_config config = {.name = "rpc-client"};
    CHECK(rpc_create(&config, &bed->client_rpc) == STATUS_OK);
    char target[32];
    (void)snprintf(target, sizeof target, "127.0.0.1:%u", (unsigned)bed->port);
    set.channel.own_connection = true;
    CHECK(rpc_channel_open(bed->client_rpc, target, NULL, &set.channel, &bed->channel, &error) ==
          STATUS_OK);
}

void bed_close(struct bed *bed) {
    if (bed->client_rpc != NULL) {
        rpc_channel_close(bed->channel);
        assert_int_equal(rpc_shutdown(bed->client_rpc, span_ms(0), span_ms(4000)), STATUS_OK);
        rpc_destroy(bed->client_rpc);
    }
    if (bed->server_rpc != NULL) {
        assert_int_equal(rpc_shutdown(bed->server_rpc, span_ms(0), span_ms(4000)), STATUS_OK);
        rpc_destroy(bed->server_rpc);
        assert_int_equal(bed->served.opened, bed->served.closed);
        probe_fini(&bed->served);
    }
}

struct rpc_call_id bed_call(struct bed *bed, struct probe *probe, const char *method,
                            enum rpc_kind kind, const char *payload, uint32_t deadline_ms) {
    static const struct rpc_pair headers[] = {{"x-test", "yes"}};
    struct rpc_call_config config = {
        .method = method,
        .kind = kind,
        .deadline =
            deadline_ms == 0 ? INSTANT_NEVER : instant_add(clock_now(), span_ms(deadline_ms)),
        .headers = headers,
        .headers_len = 1,
        .handlers = &probe_handlers,
        .ctx = probe,
        .stall_ms = 400,
    };
    if (kind != RPC_KIND_BIDI) {
        config.payload = (struct bytes){(const uint8_t *)payload, strlen(payload)};
    }
    struct rpc_call_id call = {0};
    assert_int_equal(rpc_call_start(bed->channel, &config, &call), STATUS_OK);
    assert_true(call.v != 0);
    return call;
}

/* ---- processes -------------------------------------------------------------------------- */

void child_start(struct child *child, const char *mode, const char *port, const char *method) {
    int to[2];
    int from[2];
    CHECK(pipe(to) == 0 && pipe(from) == 0);
    posix_spawn_file_actions_t actions;
    CHECK(posix_spawn_file_actions_init(&actions) == 0);
    CHECK(posix_spawn_file_actions_adddup2(&actions, to[0], 0) == 0);
    CHECK(posix_spawn_file_actions_adddup2(&actions, from[1], 1) == 0);
    CHECK(posix_spawn_file_actions_addclose(&actions, to[1]) == 0);
    CHECK(posix_spawn_file_actions_addclose(&actions, from[0]) == 0);
    char *argv[] = {strdup("/proc/self/exe"),
                    strdup("--child"),
                    strdup(mode),
                    strdup(port),
                    strdup(method),
                    NULL};
    CHECK(posix_spawn(&child->pid, "/proc/self/exe", &actions, NULL, argv, environ) == 0);
    for (int i = 0; argv[i] != NULL; i++) {
        free(argv[i]);
    }
    (void)posix_spawn_file_actions_destroy(&actions);
    (void)close(to[0]);
    (void)close(from[1]);
    child->to = to[1];
    child->from = from[0];
}

void child_line(struct child *child, char *line, size_t cap) {
    size_t len = 0;
    struct instant deadline = instant_add(clock_now(), span_ms(20000));
    for (;;) {
        struct pollfd poll_fd = {.fd = child->from, .events = POLLIN};
        int64_t left = span_to_ms(instant_since(deadline, clock_now()));
        assert_true(left > 0 && poll(&poll_fd, 1, (int)left) == 1);
        char c = 0;
        assert_int_equal(read(child->from, &c, 1), 1);
        if (c == '\n') {
            break;
        }
        assert_true(len + 1 < cap);
        line[len++] = c;
    }
    line[len] = '\0';
}

void child_kill(struct child *child, int signal_number) {
    assert_int_equal(kill(child->pid, signal_number), 0);
}

void child_end(struct child *child) {
    (void)kill(child->pid, SIGKILL); /* may be gone */
    (void)waitpid(child->pid, NULL, 0);
    (void)close(child->to);
    (void)close(child->from);
}

static void wait_for_parent(void) {
    char c = 0;
    while (read(0, &c, 1) > 0) {
    }
}

bool bed_child(int argc, char **argv, int *rc) {
    if (argc < 5 || strcmp(argv[1], "--child") != 0) {
        return false;
    }
    *rc = 0;
    struct bed *bed = calloc(1, sizeof *bed);
    CHECK(bed != NULL);
    struct bed_options options = {0};
    if (strcmp(argv[2], "server") == 0) {
        options.is_server_only = true;
        bed_open(bed, &options);
        (void)printf("%u\n", (unsigned)bed->port);
        (void)fflush(stdout);
        wait_for_parent();
        _exit(0);
    }
    options.remote_port = (uint16_t)strtoul(argv[3], NULL, 10);
    bed_open(bed, &options);
    struct probe *probe = calloc(1, sizeof *probe);
    CHECK(probe != NULL);
    probe_init(probe, bed->client_rpc);
    struct rpc_call_config config = {.method = argv[4],
                                     .kind = RPC_KIND_SERVER_STREAM,
                                     .deadline = INSTANT_NEVER,
                                     .payload = {(const uint8_t *)"1000000 16", 10},
                                     .handlers = &probe_handlers,
                                     .ctx = probe};
    struct rpc_call_id call;
    CHECK(rpc_call_start(bed->channel, &config, &call) == STATUS_OK);
    CHECK(probe_wait(probe, &probe->headers, 1, 5000));
    (void)printf("started\n");
    (void)fflush(stdout);
    wait_for_parent();
    _exit(0);
}

uint32_t descriptors_open(void) {
    DIR *dir = opendir("/proc/self/fd");
    CHECK(dir != NULL);
    uint32_t count = 0;
    while (readdir(dir) != NULL) {
        count++;
    }
    (void)closedir(dir);
    return count;
}
