/* Streaming rate of common/rpc beside the bare C core, in the same run, alternating.
 *
 * bench_rpc_stream [STREAMS [MESSAGES [BYTES [ROUNDS]]]]: that many server streams, each of that
 * many messages, over loopback. The bare leg is the least a correct program can do: one queue and
 * one thread for each side, one message in flight per stream, every message read. Prints the
 * medians of both and their ratio; both sides share the machine, so only the ratio means much. The
 * processor time per message (client and server together) is there because other load disturbs it
 * less than the rate. */
#include "base/check.h"
#include "base/time.h"
#include "rpc/rpc.h"
#include "runtime/clock.h"

#include <grpc/byte_buffer.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/time.h>
#include <pthread.h>
#include <semaphore.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROUNDS_MAX = 21 };

struct load {
    uint32_t streams;
    uint32_t messages; /* per stream */
    uint32_t bytes;
};

/* ---- the bare core ---------------------------------------------------------------------- */

enum bare_state { BARE_WAITING, BARE_SENDING, BARE_ENDED };

struct bare_served {
    grpc_call *call;
    grpc_call_details details;
    grpc_metadata_array headers;
    enum bare_state state;
    uint32_t sent;
};

struct bare_server {
    const struct load *load;
    grpc_completion_queue *queue;
    grpc_server *server;
    struct bare_served *all;
    uint32_t used;
    uint32_t ended;
    char *data;
    int port;
    pthread_t thread;
};

static void bare_request(struct bare_server *server) {
    struct bare_served *served = &server->all[server->used++];
    grpc_call_details_init(&served->details);
    grpc_metadata_array_init(&served->headers);
    CHECK_OP(grpc_server_request_call(server->server, &served->call, &served->details,
                                      &served->headers, server->queue, server->queue, served),
             ==, GRPC_CALL_OK);
}

static void bare_send(struct bare_server *server, struct bare_served *served, bool is_first) {
    grpc_op ops[2];
    memset(ops, 0, sizeof ops);
    size_t len = 0;
    grpc_byte_buffer *message = NULL;
    if (is_first) {
        ops[len++].op = GRPC_OP_SEND_INITIAL_METADATA;
    }
    if (served->sent < server->load->messages) {
        served->sent++;
        grpc_slice slice = grpc_slice_from_copied_buffer(server->data, server->load->bytes);
        message = grpc_raw_byte_buffer_create(&slice, 1);
        grpc_slice_unref(slice);
        ops[len].op = GRPC_OP_SEND_MESSAGE;
        ops[len++].data.send_message.send_message = message;
    } else {
        served->state = BARE_ENDED;
        ops[len].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
        ops[len++].data.send_status_from_server.status = GRPC_STATUS_OK;
    }
    CHECK_OP(grpc_call_start_batch(served->call, ops, len, served, NULL), ==, GRPC_CALL_OK);
    if (message != NULL) {
        grpc_byte_buffer_destroy(message);
    }
}

static void *bare_server_main(void *arg) {
    struct bare_server *server = arg;
    bare_request(server);
    for (;;) {
        grpc_event event =
            grpc_completion_queue_next(server->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        if (event.type == GRPC_QUEUE_SHUTDOWN) {
            return NULL;
        }
        struct bare_served *served = event.tag;
        if (served == NULL || (event.success == 0 && served->state == BARE_WAITING)) {
            continue; /* the server's shutdown */
        }
        CHECK(event.success != 0);
        if (served->state == BARE_ENDED) {
            continue;
        }
        bool is_first = served->state == BARE_WAITING;
        if (is_first) {
            served->state = BARE_SENDING;
            if (server->used <= server->load->streams) {
                bare_request(server);
            }
        }
        bare_send(server, served, is_first);
    }
}

struct bare_call {
    grpc_call *call;
    grpc_metadata_array headers;
    grpc_metadata_array trailers;
    grpc_status_code status;
    grpc_slice details;
    grpc_byte_buffer *message;
    char is_status; /* the address of this member tags the status */
};

static void bare_read(struct bare_call *call) {
    grpc_op op;
    memset(&op, 0, sizeof op);
    op.op = GRPC_OP_RECV_MESSAGE;
    op.data.recv_message.recv_message = &call->message;
    CHECK_OP(grpc_call_start_batch(call->call, &op, 1, call, NULL), ==, GRPC_CALL_OK);
}

static void bare_call_start(struct bare_call *call, grpc_channel *channel,
                            grpc_completion_queue *queue) {
    grpc_metadata_array_init(&call->headers);
    grpc_metadata_array_init(&call->trailers);
    call->call = grpc_channel_create_call(channel, NULL, GRPC_PROPAGATE_DEFAULTS, queue,
                                          grpc_slice_from_static_string("/a.B/C"), NULL,
                                          gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    grpc_op ops[4];
    memset(ops, 0, sizeof ops);
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[1].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[2].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[2].data.recv_initial_metadata.recv_initial_metadata = &call->headers;
    ops[3].op = GRPC_OP_RECV_MESSAGE;
    ops[3].data.recv_message.recv_message = &call->message;
    CHECK_OP(grpc_call_start_batch(call->call, ops, 4, call, NULL), ==, GRPC_CALL_OK);
    memset(ops, 0, sizeof ops);
    ops[0].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[0].data.recv_status_on_client.trailing_metadata = &call->trailers;
    ops[0].data.recv_status_on_client.status = &call->status;
    ops[0].data.recv_status_on_client.status_details = &call->details;
    CHECK_OP(grpc_call_start_batch(call->call, ops, 1, &call->is_status, NULL), ==, GRPC_CALL_OK);
}

static void queue_end(grpc_completion_queue *queue) {
    grpc_completion_queue_shutdown(queue);
    while (grpc_completion_queue_next(queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL).type !=
           GRPC_QUEUE_SHUTDOWN) {
    }
    grpc_completion_queue_destroy(queue);
}

struct result {
    double rate; /* messages per second */
    double cpu;  /* microseconds of processor time per message */
};

static struct instant cpu_now(void) {
    struct timespec at;
    CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &at) == 0);
    return (struct instant){at.tv_sec * 1000000000 + at.tv_nsec};
}

static struct result result_of(uint64_t messages, struct instant start, struct instant cpu_start) {
    return (struct result){
        .rate = (double)messages / span_to_seconds(instant_since(clock_now(), start)),
        .cpu = span_to_seconds(instant_since(cpu_now(), cpu_start)) * 1e6 / (double)messages};
}

static struct result bare_leg(const struct load *load) {
    struct bare_server server = {.load = load};
    server.data = calloc(1, load->bytes + 1);
    server.all = calloc(load->streams + 1, sizeof *server.all);
    struct bare_call *calls = calloc(load->streams, sizeof *calls);
    CHECK(server.data != NULL && server.all != NULL && calls != NULL);
    server.queue = grpc_completion_queue_create_for_next(NULL);
    server.server = grpc_server_create(NULL, NULL);
    grpc_server_register_completion_queue(server.server, server.queue, NULL);
    grpc_server_credentials *server_plain = grpc_insecure_server_credentials_create();
    server.port = grpc_server_add_http2_port(server.server, "127.0.0.1:0", server_plain);
    grpc_server_credentials_release(server_plain);
    CHECK_OP(server.port, >, 0);
    grpc_server_start(server.server);
    CHECK(pthread_create(&server.thread, NULL, bare_server_main, &server) == 0);

    grpc_completion_queue *queue = grpc_completion_queue_create_for_next(NULL);
    char target[32];
    (void)snprintf(target, sizeof target, "127.0.0.1:%d", server.port);
    grpc_channel_credentials *plain = grpc_insecure_credentials_create();
    grpc_channel *channel = grpc_channel_create(target, plain, NULL);
    grpc_channel_credentials_release(plain);

    struct instant start = clock_now();
    struct instant cpu_start = cpu_now();
    for (uint32_t i = 0; i < load->streams; i++) {
        bare_call_start(&calls[i], channel, queue);
    }
    uint64_t got = 0;
    for (uint32_t done = 0; done < load->streams;) {
        grpc_event event =
            grpc_completion_queue_next(queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        CHECK_OP(event.type, ==, GRPC_OP_COMPLETE);
        /* Tags are the addresses of a call (messages) or of its is_status member. */
        size_t offset = (size_t)((char *)event.tag - (char *)calls) % sizeof *calls;
        if (offset == offsetof(struct bare_call, is_status)) {
            done++;
            continue;
        }
        struct bare_call *call = event.tag;
        if (call->message == NULL) {
            continue;
        }
        got++;
        grpc_byte_buffer_destroy(call->message);
        call->message = NULL;
        bare_read(call);
    }
    struct result result = result_of(got, start, cpu_start);
    CHECK_OP(got, ==, (uint64_t)load->streams * load->messages);

    for (uint32_t i = 0; i < load->streams; i++) {
        CHECK_OP(calls[i].status, ==, GRPC_STATUS_OK);
        grpc_slice_unref(calls[i].details);
        grpc_metadata_array_destroy(&calls[i].headers);
        grpc_metadata_array_destroy(&calls[i].trailers);
        grpc_call_unref(calls[i].call);
    }
    grpc_channel_destroy(channel);
    queue_end(queue);
    grpc_server_shutdown_and_notify(server.server, server.queue, NULL);
    grpc_server_cancel_all_calls(server.server);
    struct timespec pause = {.tv_nsec = 50000000}; /* the server thread takes the last tags */
    (void)nanosleep(&pause, NULL);
    for (uint32_t i = 0; i < server.used; i++) {
        if (server.all[i].call != NULL) {
            grpc_call_unref(server.all[i].call);
        }
        grpc_metadata_array_destroy(&server.all[i].headers);
        grpc_call_details_destroy(&server.all[i].details);
    }
    grpc_server_destroy(server.server);
    grpc_completion_queue_shutdown(server.queue);
    CHECK(pthread_join(server.thread, NULL) == 0);
    grpc_completion_queue_destroy(server.queue);
    free(calls);
    free(server.all);
    free(server.data);
    return result;
}

/* ---- the room --------------------------------------------------------------------------- */

struct stream { /* of the server */
    struct room_leg *leg;
    uint32_t sent;
};

struct room_leg {
    const struct load *load;
    struct rpc *server_rpc;
    struct stream *streams;
    uint32_t opened;
    char *data;
    uint64_t got; /* client's thread, until all are done */
    sem_t done;
};

static void stream_next(struct stream *stream, struct rpc_call_id call) {
    struct room_leg *leg = stream->leg;
    if (stream->sent < leg->load->messages) {
        stream->sent++;
        rpc_call_send(leg->server_rpc, call, leg->data, leg->load->bytes);
    } else {
        rpc_call_finish(leg->server_rpc, call, RPC_CODE_OK, NULL, NULL, 0);
    }
}

static void stream_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    (void)incoming;
    struct room_leg *leg = ctx;
    struct stream *stream = &leg->streams[leg->opened++];
    stream->leg = leg;
    rpc_call_set_ctx(leg->server_rpc, call, stream);
    stream_next(stream, call);
}

static void stream_writable(void *ctx, struct rpc_call_id call) {
    stream_next(ctx, call);
}

static void stream_closed(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome) {
    (void)ctx, (void)call;
    CHECK_OP(outcome->code, ==, RPC_CODE_OK);
}

static void reader_message(void *ctx, struct rpc_call_id call, const uint8_t *data, size_t len) {
    (void)call, (void)data;
    struct room_leg *leg = ctx;
    CHECK_OP(len, ==, leg->load->bytes);
    leg->got++;
}

static void reader_closed(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome) {
    (void)call;
    struct room_leg *leg = ctx;
    CHECK_OP(outcome->code, ==, RPC_CODE_OK);
    CHECK(sem_post(&leg->done) == 0);
}

static const struct rpc_handlers stream_handlers = {
    .on_open = stream_open, .on_writable = stream_writable, .on_closed = stream_closed};
static const struct rpc_handlers reader_handlers = {.on_message = reader_message,
                                                    .on_closed = reader_closed};

static struct result room_leg(const struct load *load) {
    struct room_leg leg = {.load = load};
    leg.data = calloc(1, load->bytes + 1);
    leg.streams = calloc(load->streams, sizeof *leg.streams);
    CHECK(leg.data != NULL && leg.streams != NULL && sem_init(&leg.done, 0, 0) == 0);
    struct rpc *client_rpc = NULL;
    struct rpc_server *server = NULL;
    struct rpc_channel *channel = NULL;
    CHECK(rpc_create(NULL, &leg.server_rpc) == STATUS_OK);
    CHECK(rpc_create(NULL, &client_rpc) == STATUS_OK);
    CHECK(rpc_server_create(leg.server_rpc, "127.0.0.1:0", NULL, NULL, &server, NULL) == STATUS_OK);
    struct rpc_method method = {.path = "/a.B/C",
                                .kind = RPC_KIND_SERVER_STREAM,
                                .handlers = &stream_handlers,
                                .ctx = &leg};
    CHECK(rpc_server_method(server, &method) == STATUS_OK);
    CHECK(rpc_server_start(server, NULL) == STATUS_OK);
    char target[32];
    (void)snprintf(target, sizeof target, "127.0.0.1:%u", (unsigned)rpc_server_port(server));
    struct rpc_channel_options options = {.own_connection = true};
    CHECK(rpc_channel_open(client_rpc, target, NULL, &options, &channel, NULL) == STATUS_OK);

    struct instant start = clock_now();
    struct instant cpu_start = cpu_now();
    for (uint32_t i = 0; i < load->streams; i++) {
        struct rpc_call_config config = {.method = "/a.B/C",
                                         .kind = RPC_KIND_SERVER_STREAM,
                                         .deadline = INSTANT_NEVER,
                                         .handlers = &reader_handlers,
                                         .ctx = &leg};
        struct rpc_call_id call;
        CHECK(rpc_call_start(channel, &config, &call) == STATUS_OK);
    }
    for (uint32_t i = 0; i < load->streams; i++) {
        CHECK(sem_wait(&leg.done) == 0);
    }
    uint64_t got = leg.got;
    struct result result = result_of(got, start, cpu_start);
    CHECK_OP(got, ==, (uint64_t)load->streams * load->messages);
    CHECK(rpc_shutdown(client_rpc, span_ms(0), span_ms(4000)) == STATUS_OK);
    CHECK(rpc_shutdown(leg.server_rpc, span_ms(0), span_ms(4000)) == STATUS_OK);
    rpc_destroy(client_rpc);
    rpc_destroy(leg.server_rpc);
    (void)sem_destroy(&leg.done); /* nobody waits */
    free(leg.streams);
    free(leg.data);
    return result;
}

/* ---- both ------------------------------------------------------------------------------- */

static int by_value(const void *left, const void *right) {
    double a = *(const double *)left;
    double b = *(const double *)right;
    return (a > b) - (a < b);
}

static double median(double *values, uint32_t len) {
    qsort(values, len, sizeof *values, by_value);
    return values[len / 2];
}

static uint32_t argument(int argc, char **argv, int index, uint32_t fallback) {
    return argc > index ? (uint32_t)strtoul(argv[index], NULL, 10) : fallback;
}

int main(int argc, char **argv) {
    struct load load = {.streams = argument(argc, argv, 1, 80),
                        .messages = argument(argc, argv, 2, 2000),
                        .bytes = argument(argc, argv, 3, 32)};
    uint32_t rounds = argument(argc, argv, 4, 5);
    CHECK_OP(rounds, >, 0);
    CHECK_OP(rounds, <=, ROUNDS_MAX);
    double rates[2][ROUNDS_MAX];
    double cpu[2][ROUNDS_MAX];
    grpc_init();
    for (uint32_t i = 0; i < rounds; i++) {
        for (uint32_t j = 0; j < 2; j++) {
            uint32_t which = (i + j) % 2; /* each leads as often as it follows */
            struct result result = which == 0 ? bare_leg(&load) : room_leg(&load);
            rates[which][i] = result.rate;
            cpu[which][i] = result.cpu;
        }
        (void)printf("round %u: bare %.0f, common/rpc %.0f messages/s\n", (unsigned)i + 1,
                     rates[0][i], rates[1][i]);
    }
    double bare = median(rates[0], rounds);
    double room = median(rates[1], rounds);
    double bare_cpu = median(cpu[0], rounds);
    double room_cpu = median(cpu[1], rounds);
    (void)printf("streams %u messages %u bytes %u: bare %.0f, common/rpc %.0f messages/s, ratio "
                 "%.2f; processor time bare %.2f, common/rpc %.2f us/message, ratio %.2f\n",
                 (unsigned)load.streams, (unsigned)load.messages, (unsigned)load.bytes, bare, room,
                 room / bare, bare_cpu, room_cpu, bare_cpu / room_cpu);
    grpc_shutdown();
    return 0;
}
