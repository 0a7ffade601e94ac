/* gRPC over the C core: one completion queue and one thread that owns every call on it.
 *
 * A `struct rpc` carries servers and client channels. Every function here may be called from any
 * thread unless it says otherwise; every handler runs on the rpc thread, must not block, and may
 * call everything except rpc_shutdown and rpc_destroy. Calls are named by ids: an id whose call
 * has closed is ignored everywhere, so a late send, finish or cancel is harmless. Each opened call
 * ends with exactly one on_closed, and no handler of it runs afterwards. Nothing grows without
 * bound: queues are limited in bytes and in time, calls in number. Errors towards the peer are
 * sentences that say what to change. */
#ifndef RPC_RPC_H
#define RPC_RPC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"
#include "base/time.h"
#include "rpc/status_map.h"

struct mail;            /* runtime/mail.h */
struct rpc;             /* one completion queue, one thread */
struct rpc_server;      /* a listening port and its methods; owned by its rpc */
struct rpc_channel;     /* a client's connection to one address */
struct rpc_headers;     /* received metadata, borrowed inside a handler */
struct rpc_credentials; /* NULL = plaintext, the only kind in this build */

/* A call. 0 is "none". Never reused: a stale id is recognised for ever. */
struct rpc_call_id {
    uint64_t v;
};

/* A sentence for a person; always terminated. */
struct rpc_error {
    char text[256];
};

/* One metadata pair to send: lower-case key, printable ASCII value; borrowed until return. */
struct rpc_pair {
    const char *key;
    const char *value;
};

enum rpc_kind {
    RPC_KIND_UNARY,         /* one message in, one message out */
    RPC_KIND_SERVER_STREAM, /* one message in, any number out */
    RPC_KIND_BIDI,          /* any number both ways; also serves client streaming */
};

/* Why a call closed, as far as this side knows. */
enum rpc_end {
    RPC_END_STATUS,    /* client: the status came, or gRPC made one (UNAVAILABLE: connection lost);
                          server: our status was handed over */
    RPC_END_CANCELLED, /* by our own rpc_call_cancel */
    RPC_END_PEER,      /* the peer cancelled, vanished or broke the connection */
    RPC_END_DEADLINE,  /* the call's deadline passed */
    RPC_END_OVERFLOW,  /* our send queue would have passed queue_bytes_max */
    RPC_END_STALLED,   /* our send queue did not move for stall_ms: the peer does not read */
    RPC_END_SHUTDOWN,  /* rpc_shutdown ended it */
};

struct rpc_outcome {
    enum rpc_code code;                 /* client: the call's status; server: what was sent, or
                                           CANCELLED / DEADLINE_EXCEEDED / RESOURCE_EXHAUSTED */
    const char *message;                /* never NULL; borrowed until on_closed returns */
    const struct rpc_headers *trailers; /* client: the peer's trailers; server: NULL */
    enum rpc_end end;
    bool is_cancelled; /* server: the client did not get our status (it left, or time was up) */
};

/* What a server learns when a call arrives; all borrowed until on_open returns. */
struct rpc_incoming {
    const char *method;      /* "/package.Service/Method" */
    const char *peer;        /* "ipv4:127.0.0.1:40000" */
    struct bytes payload;    /* UNARY and SERVER_STREAM: the request; BIDI: empty */
    struct instant deadline; /* INSTANT_NEVER if the client set none */
    const struct rpc_headers *headers;
};

/* Any member may be NULL except on_closed (and on_open for a method). Data is borrowed until the
 * handler returns. Order: on_open, then the others as they happen, on_closed last. */
struct rpc_handlers {
    void (*on_open)(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming);
    void (*on_headers)(void *ctx, struct rpc_call_id call, const struct rpc_headers *headers);
    void (*on_message)(void *ctx, struct rpc_call_id call, const uint8_t *data, size_t len);
    /* Server, BIDI: the client has half-closed; no message follows. */
    void (*on_half_closed)(void *ctx, struct rpc_call_id call);
    /* The send queue went from something to empty. */
    void (*on_writable)(void *ctx, struct rpc_call_id call);
    void (*on_closed)(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome);
};

/* ---- life ------------------------------------------------------------------------------- */

struct rpc_config {
    const char *name;   /* of the thread, <= 15 bytes; borrowed for the rpc's life; NULL: "rpc" */
    uint32_t calls_max; /* client and server calls alive at once; 0: 16384. More: RESOURCE_EXHAUSTED
                           to a client of ours, STATUS_BUSY to a caller of rpc_call_start */
};

/* Starts the thread (it beats; watchdog limit 1 s). Call before any fork-sensitive work: gRPC makes
 * threads of its own. STATUS_INTERNAL if the thread cannot be started. */
MUST_USE enum status rpc_create(const struct rpc_config *config, struct rpc **out);

/* Runs the mail on the rpc thread, in order of posting. False after rpc_shutdown closed the box:
 * the mail then stays the caller's and will not run. */
MUST_USE bool rpc_post(struct rpc *rpc, struct mail *mail);
bool rpc_on_thread(const struct rpc *rpc);

/* Blocks. Stops accepting; waits up to `grace` for server calls to end by themselves; then cancels
 * all calls (their on_closed runs) and waits up to `abort_within`; then destroys servers, channels
 * and queue and joins the thread. STATUS_TIMEOUT: something did not end in time; it is logged and
 * left alone (memory is never taken from under gRPC): leave the process. Not on the rpc thread. */
MUST_USE enum status rpc_shutdown(struct rpc *rpc, struct span grace, struct span abort_within);
/* Frees everything, servers and channels too. NULL is fine. CHECKs that rpc_shutdown succeeded. */
void rpc_destroy(struct rpc *rpc);

struct rpc_counters {
    uint64_t calls_live;   /* accepted or started, not yet closed */
    uint64_t slots_armed;  /* accept slots waiting in the servers */
    uint64_t calls_opened; /* since start */
    uint64_t calls_closed; /* since start */
    uint64_t messages_sent;
    uint64_t messages_received;
    uint64_t dead_on_arrival; /* calls dropped at accept because nobody waits for them any more */
    uint64_t refused_full;    /* answered RESOURCE_EXHAUSTED because calls_max was reached */
    uint64_t unknown_methods;
    uint64_t stalled;    /* calls ended with RPC_END_STALLED */
    uint64_t overflowed; /* calls ended with RPC_END_OVERFLOW */
};
void rpc_counters(struct rpc *rpc, struct rpc_counters *out);

/* ---- server ----------------------------------------------------------------------------- */

struct rpc_server_options {        /* 0 = the default in brackets */
    uint32_t receive_bytes_max;    /* per message [16 MiB] */
    uint32_t keepalive_ms;         /* [5000] pings also without calls */
    uint32_t keepalive_timeout_ms; /* [3000] */
    uint32_t streams_max;          /* concurrent calls per connection [no limit] */
    uint32_t lookahead_bytes; /* != 0: flow-control probing off and this window for what clients
                                 send; the window of what they receive is theirs to choose */
    uint32_t queue_bytes_max; /* per call, unless the method says so [1 MiB] */
    uint32_t stall_ms;        /* per call, unless the method says so [5000] */
};

struct rpc_method {
    const char *path; /* "/package.Service/Method"; copied */
    enum rpc_kind kind;
    const struct rpc_handlers *handlers; /* borrowed for the server's life */
    void *ctx;                           /* handed to handlers until rpc_call_set_ctx */
    uint32_t queue_bytes_max;            /* 0: the server's */
    uint32_t stall_ms;                   /* 0: the server's */
};

/* Makes a server; nothing listens yet. listen: "host:port", "[v6]:port"; port 0 = any; borrowed
 * until return. credentials: NULL. options: NULL = defaults. STATUS_INVALID with the reason in
 * error_out (NULL-able) if the address is malformed. */
MUST_USE enum status rpc_server_create(struct rpc *rpc, const char *listen,
                                       const struct rpc_credentials *credentials,
                                       const struct rpc_server_options *options,
                                       struct rpc_server **out, struct rpc_error *error_out);
/* Before rpc_server_start. STATUS_EXISTS if the path is there already; STATUS_INVALID if it is not
 * of the form /Service/Method. */
MUST_USE enum status rpc_server_method(struct rpc_server *server, const struct rpc_method *method);
/* Listens. STATUS_EXISTS if the port is taken, STATUS_INVALID if the host does not resolve or is
 * not ours, with a sentence in error_out (NULL-able). Not on the rpc thread. */
MUST_USE enum status rpc_server_start(struct rpc_server *server, struct rpc_error *error_out);
/* The bound port, after rpc_server_start; 0 before. */
uint16_t rpc_server_port(const struct rpc_server *server);
/* Walks the distinct service names ("package.Service") in order of registration; false past the
 * end. Stable once the server has started. */
bool rpc_server_service(const struct rpc_server *server, uint32_t index, const char **name_out,
                        size_t *len_out);
/* Stops accepting: new calls get UNAVAILABLE (one that meets the very moment may get CANCELLED),
 * live ones go on. rpc_shutdown does it too. */
void rpc_server_drain(struct rpc_server *server);

/* ---- client ----------------------------------------------------------------------------- */

struct rpc_channel_options {       /* 0 = the default in brackets */
    uint32_t receive_bytes_max;    /* per message [16 MiB] */
    uint32_t keepalive_ms;         /* [5000] pings also without calls */
    uint32_t keepalive_timeout_ms; /* [3000] */
    bool own_connection;           /* do not share the connection with other channels to the same
                                      address in this process (tests; one session = one link) */
};

/* target: "host:port" or "http://host:port"; borrowed until return. Connects when the first call
 * starts; a call on a broken connection fails fast with UNAVAILABLE and gRPC reconnects behind
 * (back-off 100 ms .. 2 s). STATUS_INVALID with the reason in error_out (NULL-able). */
MUST_USE enum status rpc_channel_open(struct rpc *rpc, const char *target,
                                      const struct rpc_credentials *credentials,
                                      const struct rpc_channel_options *options,
                                      struct rpc_channel **out, struct rpc_error *error_out);
/* Live calls go on; the channel must not be used afterwards. NULL is fine. Before rpc_destroy, or
 * not at all: rpc_destroy closes what is left. */
void rpc_channel_close(struct rpc_channel *channel);

struct rpc_call_config {
    const char *method; /* "/package.Service/Method"; borrowed until return */
    enum rpc_kind kind;
    struct instant deadline;        /* INSTANT_NEVER: none, for session streams only */
    const struct rpc_pair *headers; /* borrowed until return */
    size_t headers_len;
    struct bytes payload; /* UNARY, SERVER_STREAM: the request; copied. BIDI: must be empty */
    const struct rpc_handlers *handlers; /* borrowed until on_closed; on_open is not used */
    void *ctx;
    uint32_t queue_bytes_max; /* 0: 1 MiB. Does not bound `payload` */
    uint32_t stall_ms;        /* 0: 5000 */
};

/* Starts a call; *call_out is written before any handler can run. STATUS_BUSY: calls_max reached;
 * STATUS_CANCELLED: the rpc shuts down; STATUS_INVALID: method or a header is malformed. In all
 * three no handler runs. A peer that cannot be reached is not an error here: on_closed says so. */
MUST_USE enum status rpc_call_start(struct rpc_channel *channel,
                                    const struct rpc_call_config *config,
                                    struct rpc_call_id *call_out);

/* ---- calls ------------------------------------------------------------------------------ */

/* Queues one message (copied). Server: any time from on_open to finish; client: BIDI only. If the
 * queue would pass queue_bytes_max the call is failed with RESOURCE_EXHAUSTED (RPC_END_OVERFLOW);
 * the first message of an empty queue always fits. Ignored after finish, half-close or cancel. */
void rpc_call_send(struct rpc *rpc, struct rpc_call_id call, const void *data, size_t len);
/* Bytes accepted by rpc_call_send and not yet past gRPC's flow control; 0 for a stale id. */
size_t rpc_call_queued_bytes(struct rpc *rpc, struct rpc_call_id call);
/* Server: after what is queued, sends the status; message: NULL = "", cut after 1024 bytes.
 * trailers: borrowed until return. Only the first finish counts. */
void rpc_call_finish(struct rpc *rpc, struct rpc_call_id call, enum rpc_code code,
                     const char *message, const struct rpc_pair *trailers, size_t trailers_len);
/* Server: like finish, but drops what is queued and does not wait for flow control; a peer that
 * does not read still gets code and message. Also ends a finish that is stuck. */
void rpc_call_abort(struct rpc *rpc, struct rpc_call_id call, enum rpc_code code,
                    const char *message);
/* Client: after what is queued, tells the server that no message follows (BIDI only). */
void rpc_call_half_close(struct rpc *rpc, struct rpc_call_id call);
/* Either side, any time, also twice: ends the call now. on_closed follows (CANCELLED). */
void rpc_call_cancel(struct rpc *rpc, struct rpc_call_id call);
/* Replaces the ctx given to this call's handlers from now on. Rpc thread only (e.g. in on_open). */
void rpc_call_set_ctx(struct rpc *rpc, struct rpc_call_id call, void *ctx);

/* The value of the first pair with this lower-case key; false if absent. Inside a handler. */
bool rpc_headers_get(const struct rpc_headers *headers, const char *key, struct bytes *value_out);

#endif
