/* Test bed: a server with one method of each behaviour, a client, and probes that record calls.
 *
 * Methods of /t.T: Echo (unary), Fail (unary: code from the payload's first byte, with trailers),
 * Hang (unary), HangStream, Count (payload "COUNT BYTES": sends that many), Flood (sends for ever,
 * paced by on_writable), Pour (sends far past its queue limit at once), Chat (bidi echo), Sleep
 * (unary, keeps the rpc thread for 150 ms, which no real handler may do). */
#ifndef TESTS_UNIT_RPC_BED_H
#define TESTS_UNIT_RPC_BED_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "rpc/rpc.h"

/* What happened on calls; everything guarded by lock, read it after probe_wait. */
struct probe {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct rpc *rpc;
    uint32_t opened;
    uint32_t headers;
    uint32_t messages;
    uint64_t bytes;
    uint32_t half_closed;
    uint32_t writable;
    uint32_t closed;
    uint32_t after_closed; /* handlers that ran after on_closed: must stay 0 */
    uint32_t wrong_order;
    struct rpc_call_id call; /* the last opened */
    struct rpc_outcome outcome;
    char message[512];  /* of the outcome */
    size_t message_len; /* uncut */
    char last[256];     /* the last message's first bytes */
    char trailer[64];   /* retry-after-ms */
    char header[64];    /* x-test as the server saw it */
    char peer[64];
    int64_t budget_ms; /* deadline - now, at on_open */
    /* What the client does by itself, on the rpc thread. */
    bool cancel_on_message;
    bool cancel_twice;
};

void probe_init(struct probe *probe, struct rpc *rpc);
void probe_fini(struct probe *probe);
/* Waits up to `ms` until *counter >= n; returns whether it is. */
bool probe_wait(struct probe *probe, const uint32_t *counter, uint32_t n, uint32_t ms);

struct bed {
    struct rpc *server_rpc;
    struct rpc_server *server;
    struct rpc *client_rpc;
    struct rpc_channel *channel;
    struct probe served;  /* all calls at the server */
    uint32_t flood_bytes; /* size of a Flood message */
    uint16_t port;
};

struct bed_options {
    struct rpc_server_options server;
    struct rpc_channel_options channel;
    uint32_t server_calls_max;
    uint16_t remote_port; /* != 0: no server of our own, connect there */
    bool is_server_only;
    uint32_t flood_bytes; /* of a Flood or Pour message; 0: 16 KiB */
};

void bed_open(struct bed *bed, const struct bed_options *options);
/* Shuts both sides down within two seconds each and asserts that it worked. */
void bed_close(struct bed *bed);

extern const struct rpc_handlers probe_handlers; /* ctx: struct probe */
/* Starts a call that records into probe. deadline_ms 0: none. */
struct rpc_call_id bed_call(struct bed *bed, struct probe *probe, const char *method,
                            enum rpc_kind kind, const char *payload, uint32_t deadline_ms);

/* Another process of this program in a mode ("server", "client PORT METHOD"), see bed_child. */
struct child {
    pid_t pid;
    int to;   /* its stdin: closing it asks it to leave */
    int from; /* its stdout */
};
void child_start(struct child *child, const char *mode, const char *port, const char *method);
/* Reads one line from it (without the newline) within 5 s; asserts that it came. */
void child_line(struct child *child, char *line, size_t cap);
void child_kill(struct child *child, int signal_number);
/* Kills it for good and reaps it. */
void child_end(struct child *child);
/* True if main was started as a child; then *rc is its exit code. */
bool bed_child(int argc, char **argv, int *rc);

uint32_t descriptors_open(void);

#endif
