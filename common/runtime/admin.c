#include "runtime/admin.h"

#include <errno.h>
#include <netdb.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/listener.h>
#include <netinet/in.h>

#include "base/check.h"
#include "runtime/clock.h"
#include "runtime/http_head.h"
#include "runtime/log.h"
#include "runtime/thread.h"

#define TICK_MS     50
#define LINGER_MS   1000
#define BACKLOG     128
#define INPUT_MAX   (ADMIN_HEAD_MAX + ADMIN_BODY_MAX + 1024)
#define DEFAULT_MAX 256

enum connection_state {
    CONNECTION_READING,   /* waits for a whole request */
    CONNECTION_ANSWERING, /* a reply is on its way out */
    CONNECTION_LINGERING, /* answered and shut; what still comes in is thrown away, so that the
                             reply is not lost to a reset */
};

struct connection {
    struct admin *admin;
    struct connection *prev;
    struct connection *next;
    struct bufferevent *bev;
    enum connection_state state;
    struct instant deadline;
    size_t unsent; /* at the last tick */
    bool closes_after;
    bool has_continued;
};

struct admin {
    const struct admin_route *routes;
    uint32_t route_count;
    uint32_t connections_max;
    struct span idle_timeout;
    uint16_t port;
    struct event_base *base;
    struct event *tick;
    struct evconnlistener *listener;
    struct thread thread;
    struct connection *first; /* thread only, as everything below but the count */
    _Atomic uint32_t count;
    bool is_accept_paused; /* out of descriptors; tried again at the next tick */
    char head_text[ADMIN_HEAD_MAX + 1];
};

static void connection_free(struct connection *connection) {
    struct admin *admin = connection->admin;
    if (connection->prev == NULL) {
        admin->first = connection->next;
    } else {
        connection->prev->next = connection->next;
    }
    if (connection->next != NULL) {
        connection->next->prev = connection->prev;
    }
    bufferevent_free(connection->bev);
    free(connection);
    (void)atomic_fetch_sub_explicit(&admin->count, 1, memory_order_relaxed);
}

static const char *status_text(int status) {
    switch (status) {
    case 200: return "OK";
    case 202: return "Accepted";
    case 400: return "Bad Request";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 409: return "Conflict";
    case 411: return "Length Required";
    case 413: return "Content Too Large";
    case 431: return "Request Header Fields Too Large";
    case 500: return "Internal Server Error";
    case 503: return "Service Unavailable";
    case 505: return "HTTP Version Not Supported";
    default: return "Answer";
    }
}

static void body_release(const void *data, size_t len, void *body) {
    (void)data; /* the same memory as body, which is not const */
    (void)len;
    free(body);
}

/* Sends the reply and takes its body. allow: the Allow header's value or NULL. */
static void connection_answer(struct connection *connection, struct admin_reply *reply,
                              const char *allow, bool has_body) {
    struct evbuffer *out = bufferevent_get_output(connection->bev);
    int added = evbuffer_add_printf(
        out,
        "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\nCache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\nConnection: %s\r\n%s%s%s\r\n",
        reply->status, status_text(reply->status), reply->content_type, reply->body.len,
        connection->closes_after ? "close" : "keep-alive", allow != NULL ? "Allow: " : "",
        allow != NULL ? allow : "", allow != NULL ? "\r\n" : "");
    CHECK_OP(added, >, 0);
    if (has_body && reply->body.len > 0) {
        CHECK(evbuffer_add_reference(out, reply->body.data, reply->body.len, body_release,
                                     reply->body.data) == 0);
        reply->body = (struct buffer){.max = reply->body.max};
    } else {
        buffer_fini(&reply->body);
    }
    connection->state = CONNECTION_ANSWERING;
    connection->unsent = evbuffer_get_length(out);
    connection->deadline = instant_add(clock_now(), connection->admin->idle_timeout);
}

static void reply_init(struct admin_reply *reply, int status) {
    *reply = (struct admin_reply){.status = status, .content_type = "text/plain; charset=utf-8"};
    buffer_init(&reply->body, ADMIN_REPLY_MAX);
}

/* Refuses what cannot be understood; the connection cannot be used further. */
static void connection_refuse(struct connection *connection, int status, const char *why) {
    struct admin_reply reply;
    reply_init(&reply, status);
    buffer_printf(&reply.body, "%s\n", why);
    connection->closes_after = true;
    connection_answer(connection, &reply, NULL, true);
}

static const char *method_text(enum admin_method method) {
    switch (method) {
    case ADMIN_GET: return "GET";
    case ADMIN_POST: return "POST";
    }
    return "";
}

static void answer_not_found(struct connection *connection, const char *path, bool has_body) {
    const struct admin *admin = connection->admin;
    struct admin_reply reply;
    reply_init(&reply, 404);
    buffer_printf(&reply.body, "%.200s is not here; what is:\n", path);
    for (uint32_t i = 0; i < admin->route_count; i++) {
        const struct admin_route *route = &admin->routes[i];
        buffer_printf(&reply.body, "%-4s %s%s%s\n", method_text(route->method), route->path,
                      route->help != NULL ? "  " : "", route->help != NULL ? route->help : "");
    }
    connection_answer(connection, &reply, NULL, has_body);
}

static void answer_not_allowed(struct connection *connection, const char *path, bool has_get,
                               bool has_post) {
    const char *allow = has_get && has_post ? "GET, HEAD, POST" : has_get ? "GET, HEAD" : "POST";
    struct admin_reply reply;
    reply_init(&reply, 405);
    buffer_printf(&reply.body, "%.200s takes %s\n", path, allow);
    connection_answer(connection, &reply, allow, true);
}

static void connection_serve(struct connection *connection, const struct http_head *head,
                             struct bytes body) {
    const struct admin *admin = connection->admin;
    bool is_head = strcmp(head->method, "HEAD") == 0;
    bool is_get = is_head || strcmp(head->method, "GET") == 0;
    bool is_post = strcmp(head->method, "POST") == 0;
    bool has_get = false;
    bool has_post = false;
    const struct admin_route *found = NULL;
    for (uint32_t i = 0; i < admin->route_count; i++) {
        const struct admin_route *route = &admin->routes[i];
        if (strcmp(route->path, head->path) != 0) {
            continue;
        }
        bool is_wanted = false;
        switch (route->method) {
        case ADMIN_GET:
            has_get = true;
            is_wanted = is_get;
            break;
        case ADMIN_POST:
            has_post = true;
            is_wanted = is_post;
            break;
        }
        if (is_wanted) {
            found = route;
        }
    }
    if (!has_get && !has_post) {
        answer_not_found(connection, head->path, !is_head);
        return;
    }
    if (found == NULL) {
        answer_not_allowed(connection, head->path, has_get, has_post);
        return;
    }
    struct admin_request request = {
        .method = found->method, .path = head->path, .query = head->query, .body = body};
    struct admin_reply reply;
    reply_init(&reply, 200);
    found->handler(found->ctx, &request, &reply);
    if (reply.body.is_full) {
        LOG_WARN("admin reply is too large", LOG_TEXT("path", found->path),
                 LOG_U64("limit", ADMIN_REPLY_MAX));
        buffer_fini(&reply.body);
        reply_init(&reply, 500);
        buffer_printf(&reply.body, "the reply is larger than %d bytes\n", ADMIN_REPLY_MAX);
    }
    connection_answer(connection, &reply, NULL, !is_head);
}

/* Serves or refuses one request if it is complete. */
static void connection_advance(struct connection *connection) {
    struct admin *admin = connection->admin;
    struct evbuffer *in = bufferevent_get_input(connection->bev);
    /* Line breaks before a request line are allowed leftovers of the one before. */
    char first = 0;
    while (evbuffer_copyout(in, &first, 1) == 1 && (first == '\r' || first == '\n')) {
        CHECK(evbuffer_drain(in, 1) == 0);
    }
    ev_ssize_t copied = evbuffer_copyout(in, admin->head_text, ADMIN_HEAD_MAX);
    CHECK_OP(copied, >=, 0);
    size_t seen = (size_t)copied;
    if (seen == 0) {
        return;
    }
    if (!http_head_is_plausible(admin->head_text, seen)) {
        connection_refuse(connection, 400, "this is not an HTTP request");
        return;
    }
    size_t head_len = http_head_find(admin->head_text, seen);
    if (head_len == 0) {
        if (seen == ADMIN_HEAD_MAX) {
            connection_refuse(connection, 431, "the request's head is over 8 KiB");
        }
        return;
    }
    struct http_head head;
    const char *why = "";
    int status = http_head_parse(admin->head_text, head_len, &head, &why);
    if (status != 0) {
        connection_refuse(connection, status, why);
        return;
    }
    if (head.content_length > ADMIN_BODY_MAX) {
        connection_refuse(connection, 413, "the request's body is over 64 KiB");
        return;
    }
    size_t body_len = (size_t)head.content_length;
    if (evbuffer_get_length(in) - head_len < body_len) {
        if (head.expects_continue && !connection->has_continued) {
            connection->has_continued = true;
            CHECK(bufferevent_write(connection->bev, "HTTP/1.1 100 Continue\r\n\r\n", 25) == 0);
        }
        return;
    }
    CHECK(evbuffer_drain(in, head_len) == 0);
    struct bytes body = {.len = body_len};
    if (body_len > 0) {
        body.data = evbuffer_pullup(in, (ev_ssize_t)body_len);
        CHECK(body.data != NULL);
    }
    connection->closes_after = connection->closes_after || !head.keeps_alive;
    connection_serve(connection, &head, body);
    connection->has_continued = false;
    CHECK(evbuffer_drain(in, body_len) == 0);
}

static void on_read(struct bufferevent *bev, void *ctx) {
    struct connection *connection = ctx;
    switch (connection->state) {
    case CONNECTION_READING: connection_advance(connection); break;
    case CONNECTION_ANSWERING: break; /* its turn comes when the reply is out */
    case CONNECTION_LINGERING: {
        struct evbuffer *in = bufferevent_get_input(bev);
        CHECK(evbuffer_drain(in, evbuffer_get_length(in)) == 0);
        break;
    }
    }
}

static void on_written(struct bufferevent *bev, void *ctx) {
    struct connection *connection = ctx;
    if (connection->state != CONNECTION_ANSWERING ||
        evbuffer_get_length(bufferevent_get_output(bev)) > 0) {
        return;
    }
    if (connection->closes_after) {
        if (shutdown(bufferevent_getfd(bev), SHUT_WR) != 0) {
            connection_free(connection);
            return;
        }
        connection->state = CONNECTION_LINGERING;
        connection->deadline = instant_add(clock_now(), span_ms(LINGER_MS));
        on_read(bev, connection);
        return;
    }
    connection->state = CONNECTION_READING;
    connection->deadline = instant_add(clock_now(), connection->admin->idle_timeout);
    connection_advance(connection);
}

static void on_event(struct bufferevent *bev, short what, void *ctx) {
    (void)bev; /* connection->bev */
    struct connection *connection = ctx;
    bool is_half_closed = (what & BEV_EVENT_EOF) != 0 && (what & BEV_EVENT_ERROR) == 0;
    if (is_half_closed && connection->state == CONNECTION_ANSWERING) {
        connection->closes_after = true; /* it may still read the answer */
        return;
    }
    connection_free(connection);
}

/* Makes room for a new connection at the limit. False if every one is being answered. */
static bool admin_evict(struct admin *admin) {
    struct connection *oldest = NULL;
    for (struct connection *at = admin->first; at != NULL; at = at->next) {
        bool is_idle = at->state != CONNECTION_ANSWERING;
        if (is_idle && (oldest == NULL || at->deadline.ns < oldest->deadline.ns)) {
            oldest = at;
        }
    }
    if (oldest == NULL) {
        return false;
    }
    connection_free(oldest);
    return true;
}

static void on_accept(struct evconnlistener *listener, evutil_socket_t fd, struct sockaddr *peer,
                      int peer_len, void *ctx) {
    (void)listener; /* one only */
    (void)peer;
    (void)peer_len;
    struct admin *admin = ctx;
    if (atomic_load_explicit(&admin->count, memory_order_relaxed) >= admin->connections_max &&
        !admin_evict(admin)) {
        (void)close(fd); /* nothing was sent on it */
        return;
    }
    struct connection *connection = calloc(1, sizeof *connection);
    struct bufferevent *bev = bufferevent_socket_new(admin->base, fd, BEV_OPT_CLOSE_ON_FREE);
    if (connection == NULL || bev == NULL) {
        free(connection);
        if (bev != NULL) {
            bufferevent_free(bev);
        } else {
            (void)close(fd); /* nothing was sent on it */
        }
        return;
    }
    connection->admin = admin;
    connection->bev = bev;
    connection->deadline = instant_add(clock_now(), admin->idle_timeout);
    connection->next = admin->first;
    if (admin->first != NULL) {
        admin->first->prev = connection;
    }
    admin->first = connection;
    (void)atomic_fetch_add_explicit(&admin->count, 1, memory_order_relaxed);
    bufferevent_setcb(connection->bev, on_read, on_written, on_event, connection);
    bufferevent_setwatermark(connection->bev, EV_READ, 0, INPUT_MAX);
    CHECK(bufferevent_enable(connection->bev, EV_READ | EV_WRITE) == 0);
}

static void on_accept_error(struct evconnlistener *listener, void *ctx) {
    struct admin *admin = ctx;
    LOG_WARN("admin cannot accept", LOG_ERRNO("error", errno));
    (void)evconnlistener_disable(listener); /* else it would spin; the tick enables it */
    admin->is_accept_paused = true;
}

static void on_tick(evutil_socket_t fd, short what, void *ctx) {
    (void)fd; /* a timer */
    (void)what;
    struct admin *admin = ctx;
    thread_beat(&admin->thread.beat);
    if (thread_stop_asked(&admin->thread)) {
        (void)event_base_loopbreak(admin->base);
        return;
    }
    if (admin->is_accept_paused) {
        admin->is_accept_paused = false;
        (void)evconnlistener_enable(admin->listener); /* fails again: on_accept_error again */
    }
    struct instant now = clock_now();
    struct connection *next = NULL;
    for (struct connection *at = admin->first; at != NULL; at = next) {
        next = at->next;
        if (at->state == CONNECTION_ANSWERING) {
            size_t unsent = evbuffer_get_length(bufferevent_get_output(at->bev));
            if (unsent < at->unsent) {
                at->unsent = unsent;
                at->deadline = instant_add(now, admin->idle_timeout);
            }
        }
        if (instant_reached(now, at->deadline)) {
            connection_free(at);
        }
    }
}

static void admin_main(struct thread *self, void *arg) {
    (void)self; /* admin->thread */
    struct admin *admin = arg;
    CHECK(event_base_dispatch(admin->base) >= 0);
    while (admin->first != NULL) {
        connection_free(admin->first);
    }
}

static void admin_free(struct admin *admin) {
    if (admin->listener != NULL) {
        evconnlistener_free(admin->listener);
    }
    if (admin->tick != NULL) {
        event_free(admin->tick);
    }
    if (admin->base != NULL) {
        event_base_free(admin->base);
    }
    free(admin);
}

static enum status listen_status(int error) {
    if (error == EADDRINUSE) {
        return STATUS_EXISTS;
    }
    return error == EADDRNOTAVAIL || error == EACCES ? STATUS_INVALID : STATUS_IO;
}

static int listen_on(const struct addrinfo *address) {
    int fd = socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    int on = 1;
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        bind(fd, address->ai_addr, address->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0) {
        return fd;
    }
    int error = errno;
    (void)close(fd); /* the first error counts */
    errno = error;
    return -1;
}

static enum status admin_listen(const struct admin_config *config, int *fd_out,
                                struct writer *error) {
    const char *host = config->host != NULL ? config->host : "";
    bool is_v6 = strchr(host, ':') != NULL;
    char shown[300];
    (void)snprintf(shown, sizeof shown, "%s%s%s:%u", is_v6 ? "[" : "", host, is_v6 ? "]" : "",
                   config->port);
    char port[8];
    (void)snprintf(port, sizeof port, "%u", config->port);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *addresses = NULL;
    int rc = getaddrinfo(host[0] != '\0' ? host : NULL, port, &hints, &addresses);
    if (rc != 0) {
        writer_printf(error,
                      "cannot listen for admin on %s: %s; give an address of this machine with "
                      "--admin",
                      shown, gai_strerror(rc));
        return STATUS_INVALID;
    }
    int fd = -1;
    int failed = 0;
    for (const struct addrinfo *at = addresses; at != NULL && fd < 0; at = at->ai_next) {
        fd = listen_on(at);
        failed = fd < 0 ? errno : 0;
    }
    freeaddrinfo(addresses);
    if (fd < 0) {
        writer_printf(error, "cannot listen for admin on %s: %s; %s with --admin", shown,
                      strerrordesc_np(failed),
                      failed == EADDRINUSE
                          ? "another program has it: stop that one or choose another port"
                          : "choose another address");
        return listen_status(failed);
    }
    *fd_out = fd;
    return STATUS_OK;
}

static uint16_t bound_port(int fd) {
    struct sockaddr_storage address = {.ss_family = 0};
    socklen_t len = sizeof address;
    CHECK(getsockname(fd, (struct sockaddr *)(void *)&address, &len) == 0);
    if (address.ss_family == AF_INET6) {
        return ntohs(((const struct sockaddr_in6 *)(const void *)&address)->sin6_port);
    }
    return ntohs(((const struct sockaddr_in *)(const void *)&address)->sin_port);
}

static void on_libevent_log(int severity, const char *text) {
    (void)severity; /* it says nothing unless something is odd */
    LOG_WARN("libevent", LOG_TEXT("text", text));
}

enum status admin_start(const struct admin_config *config, struct admin **admin_out,
                        struct writer *error) {
    char unwanted[1];
    struct writer nowhere;
    writer_init(&nowhere, unwanted, sizeof unwanted);
    if (error == NULL) {
        error = &nowhere;
    }
    int fd = -1;
    enum status status = admin_listen(config, &fd, error);
    if (status != STATUS_OK) {
        return status;
    }
    event_set_log_callback(on_libevent_log);
    struct admin *admin = calloc(1, sizeof *admin);
    CHECK(admin != NULL);
    admin->routes = config->routes;
    admin->route_count = config->route_count;
    admin->connections_max = config->connections_max > 0 ? config->connections_max : DEFAULT_MAX;
    admin->idle_timeout = config->idle_timeout.ns > 0 ? config->idle_timeout : span_ms(10000);
    admin->port = bound_port(fd);
    /* The tick ends the loop, so nobody else ever touches this base and it needs no locks. */
    struct event_config *event_config = event_config_new();
    CHECK(event_config != NULL);
    CHECK(event_config_set_flag(event_config, EVENT_BASE_FLAG_NOLOCK) == 0);
    admin->base = event_base_new_with_config(event_config);
    event_config_free(event_config);
    if (admin->base == NULL) {
        writer_printf(error, "cannot start the admin server: no event loop (%s)",
                      strerrordesc_np(errno));
        (void)close(fd); /* never used */
        admin_free(admin);
        return STATUS_IO;
    }
    admin->listener = evconnlistener_new(admin->base, on_accept, admin,
                                         LEV_OPT_CLOSE_ON_FREE | LEV_OPT_CLOSE_ON_EXEC, 0, fd);
    CHECK(admin->listener != NULL);
    evconnlistener_set_error_cb(admin->listener, on_accept_error);
    admin->tick = event_new(admin->base, -1, EV_PERSIST, on_tick, admin);
    CHECK(admin->tick != NULL);
    struct timeval period = {.tv_usec = TICK_MS * 1000};
    CHECK(event_add(admin->tick, &period) == 0);
    struct thread_config thread = {.name = "admin",
                                   .fn = admin_main,
                                   .arg = admin,
                                   .beat_limit = config->beat_limit.ns > 0 ? config->beat_limit
                                                                           : span_ms(1000)};
    status = thread_start(&admin->thread, &thread);
    if (status != STATUS_OK) {
        writer_text(error, "cannot start the admin server: the system has no thread left");
        admin_free(admin);
        return status;
    }
    *admin_out = admin;
    return STATUS_OK;
}

uint16_t admin_port(const struct admin *admin) {
    return admin->port;
}

enum status admin_stop(struct admin *admin, struct instant deadline) {
    if (admin == NULL) {
        return STATUS_OK;
    }
    thread_ask_stop(&admin->thread);
    enum status status = thread_join(&admin->thread, deadline);
    if (status == STATUS_OK) {
        admin_free(admin);
    }
    return status;
}

uint32_t admin_connections(const struct admin *admin) {
    return atomic_load_explicit(&admin->count, memory_order_relaxed);
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    if (c >= 'a' && c <= 'f') {
        return c - 'a' + 10;
    }
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

bool admin_query(const struct admin_request *request, const char *name, char *to, size_t cap) {
    size_t name_len = strlen(name);
    const char *at = request->query;
    while (strncmp(at, name, name_len) != 0 || at[name_len] != '=') {
        at = strchr(at, '&');
        if (at == NULL) {
            return false;
        }
        at++;
    }
    size_t len = 0;
    for (at += name_len + 1; *at != '\0' && *at != '&'; at++) {
        char c = *at;
        if (c == '+') {
            c = ' ';
        } else if (c == '%' && hex_digit(at[1]) >= 0 && hex_digit(at[2]) >= 0) {
            c = (char)(hex_digit(at[1]) * 16 + hex_digit(at[2]));
            at += 2;
        }
        if (len + 1 >= cap || c == '\0') {
            return false;
        }
        to[len++] = c;
    }
    to[len] = '\0';
    return true;
}
