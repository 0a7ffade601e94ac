/* The admin HTTP server: health, metrics, debug views, drain. HTTP/1.1 and 1.0, GET, HEAD, POST.
 *
 * One thread of its own that beats; handlers run on it one at a time and must not block (ask other
 * threads by mail, read atomics, or take a leaf lock). Whatever bytes arrive cost only their own
 * connection: heads over 8 KiB get 431, bodies over 64 KiB 413, nonsense 400 and a close. A request
 * must be complete 10 s after its connection became idle, at most `connections_max` connections are
 * kept, and at the limit the one idle longest makes room, so probes get through. */
#ifndef RUNTIME_ADMIN_H
#define RUNTIME_ADMIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"
#include "base/time.h"
#include "runtime/buffer.h"

#define ADMIN_HEAD_MAX  (8 * 1024)
#define ADMIN_BODY_MAX  (64 * 1024)
#define ADMIN_REPLY_MAX (32 * 1024 * 1024)

enum admin_method { ADMIN_GET, ADMIN_POST };

/* Borrowed for the handler's call. */
struct admin_request {
    enum admin_method method; /* HEAD arrives as GET */
    const char *path;
    const char *query; /* after '?', still encoded; "" if none */
    struct bytes body;
};

struct admin_reply {
    int status;               /* 200 unless changed */
    const char *content_type; /* "text/plain; charset=utf-8" unless changed; static text */
    struct buffer body;       /* at most ADMIN_REPLY_MAX */
};

typedef void (*admin_handler)(void *ctx, const struct admin_request *request,
                              struct admin_reply *reply);

struct admin_route {
    enum admin_method method;
    const char *path; /* exact; two routes may share a path with different methods */
    admin_handler handler;
    void *ctx;
    const char *help; /* for the list of what exists */
};

struct admin_config {
    const char *host;                 /* a name or address; "" = all */
    uint16_t port;                    /* 0 = any free one */
    const struct admin_route *routes; /* borrowed until admin_stop */
    uint32_t route_count;
    uint32_t connections_max; /* 0 = 256 */
    struct span idle_timeout; /* 0 = 10 s */
    struct span beat_limit;   /* 0 = 1 s */
};

struct admin;

/* Listens and starts the thread. On failure nothing is left behind and `error` (may be NULL) holds
 * one sentence that names the address: STATUS_EXISTS if it is taken, STATUS_INVALID if it cannot be
 * resolved or is not of this machine, STATUS_IO otherwise. */
MUST_USE enum status admin_start(const struct admin_config *config, struct admin **admin_out,
                                 struct writer *error);
/* The bound port. */
uint16_t admin_port(const struct admin *admin);
/* Closes all connections and ends the thread; frees `admin` (NULL is fine). STATUS_TIMEOUT if a
 * handler did not return by the deadline: then nothing is freed. */
MUST_USE enum status admin_stop(struct admin *admin, struct instant deadline);
/* Connections open now; for a gauge. Any thread. */
uint32_t admin_connections(const struct admin *admin);
/* Copies the decoded value of a query parameter; false if absent or too long. */
bool admin_query(const struct admin_request *request, const char *name, char *to, size_t cap);

#endif
