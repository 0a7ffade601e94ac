/* A connection to the admin port: requests whole, cut and broken, in pieces, under the real server
 * and libevent over a socket pair; the clock stands still.
 *
 * Checked: every answer is a well-formed reply of the announced length, a body reaches its handler
 * whole, nothing is answered after "Connection: close", and how the bytes were cut changes no byte
 * of the answers. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz/fuzz.h"

#include "runtime/admin.c"

#define ANSWERS_CAP (256u * 1024u)

static struct instant now;

struct instant clock_now(void) {
    return now;
}

/* The body comes back as digits: as it came, it could pass for the heads that the checks look for.
 */
static void echo(void *ctx, const struct admin_request *request, struct admin_reply *reply) {
    CHECK(ctx == &now && request->path[0] == '/');
    char value[16];
    if (admin_query(request, "x", value, sizeof value)) {
        CHECK_OP(strlen(value), <, sizeof value);
        buffer_printf(&reply->body, "x=%s\n", value);
    }
    for (size_t i = 0; i < request->body.len; i++) {
        uint8_t byte = request->body.data[i];
        buffer_put(&reply->body, (char[]){(char)('a' + byte / 16), (char)('a' + byte % 16)}, 2);
    }
}

static void refuse(void *ctx, const struct admin_request *request, struct admin_reply *reply) {
    CHECK(ctx == &now && request->method == ADMIN_POST);
    reply->status = 503;
    buffer_text(&reply->body, "no\n");
}

static const struct admin_route routes[] = {
    {ADMIN_GET, "/a", echo, &now, "echo"},
    {ADMIN_POST, "/a", echo, &now, "echo"},
    {ADMIN_POST, "/b", refuse, &now, NULL},
};

/* What came back on a connection that was sent `bytes`, `step` at a time. */
static size_t exchange(struct bytes bytes, size_t step, char *answers, bool *is_closed_out) {
    struct admin admin = {.routes = routes,
                          .route_count = sizeof routes / sizeof routes[0],
                          .connections_max = 4,
                          .idle_timeout = span_ms(10000)};
    static struct event_base *base;
    if (base == NULL) {
        struct event_config *config = event_config_new();
        CHECK(config != NULL && event_config_set_flag(config, EVENT_BASE_FLAG_NOLOCK) == 0);
        base = event_base_new_with_config(config);
        event_config_free(config);
        CHECK(base != NULL);
    }
    admin.base = base;
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
    on_accept(NULL, pair[0], NULL, 0, &admin);
    size_t got = 0;
    size_t sent = 0;
    bool is_closed = false;
    unsigned quiet = 0;
    while (quiet < 2) { /* one more turn when nothing moved */
        quiet++;
        size_t len = bytes.len - sent < step ? bytes.len - sent : step;
        ssize_t wrote = len > 0 ? send(pair[1], bytes.data + sent, len, MSG_NOSIGNAL) : 0;
        if (wrote > 0) {
            sent += (size_t)wrote;
            quiet = 0;
        }
        CHECK(event_base_loop(admin.base, EVLOOP_NONBLOCK) >= 0);
        ssize_t read = recv(pair[1], answers + got, ANSWERS_CAP - got, 0);
        is_closed = is_closed || read == 0 || (wrote < 0 && errno == EPIPE);
        if (read > 0) {
            got += (size_t)read;
            quiet = 0;
            CHECK_OP(got, <, ANSWERS_CAP);
        }
    }
    *is_closed_out = is_closed;
    CHECK(close(pair[1]) == 0);
    CHECK(event_base_loop(admin.base, EVLOOP_NONBLOCK) >= 0);
    while (admin.first != NULL) {
        connection_free(admin.first);
    }
    CHECK_OP(admin_connections(&admin), ==, 0);
    CHECK_OP(event_base_get_num_events(base, EVENT_BASE_COUNT_ADDED), ==, 0);
    return got;
}

/* Drops "100 Continue", which only those get who wait for it, and returns the new length. */
static size_t without_continue(char *answers, size_t len) {
    static const char wait[] = "HTTP/1.1 100 Continue\r\n\r\n";
    char *at = NULL;
    while ((at = memmem(answers, len, wait, sizeof wait - 1)) != NULL) {
        len -= sizeof wait - 1;
        memmove(at, at + sizeof wait - 1, len - (size_t)(at - answers));
    }
    return len;
}

static void check_answers(const char *answers, size_t len, bool is_closed, bool has_head_request) {
    size_t at = 0;
    bool is_last = false;
    while (at < len) {
        CHECK(!is_last);
        char head[512];
        const char *end = memmem(answers + at, len - at, "\r\n\r\n", 4);
        CHECK(end != NULL);
        size_t head_len = (size_t)(end - (answers + at)) + 4;
        CHECK_OP(head_len, <, sizeof head);
        memcpy(head, answers + at, head_len);
        head[head_len] = '\0';
        int status = 0;
        CHECK(sscanf(head, "HTTP/1.1 %3d", &status) == 1 && status >= 200 && status < 600);
        const char *length = strstr(head, "Content-Length: ");
        CHECK(length != NULL);
        size_t body = strtoull(length + 16, NULL, 10);
        is_last = strstr(head, "Connection: close") != NULL;
        at += head_len;
        if (has_head_request && (at == len || memcmp(answers + at, "HTTP/1.1 ", 9) == 0)) {
            continue; /* announced only */
        }
        CHECK_OP(body, <=, len - at);
        at += body;
    }
    CHECK(!is_last || is_closed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    static char first[ANSWERS_CAP], second[ANSWERS_CAP];
    static int quiet = -1;
    if (quiet < 0) {
        quiet = open("/dev/null", O_WRONLY | O_CLOEXEC);
        CHECK(quiet >= 0);
        log_set_fd(quiet);
    }
    struct input input = input_of(data, len);
    now.ns = 1000000000;
    size_t step = 1 + input_u8(&input) % 64;
    uint8_t *copy = input_copy(input_bytes(&input, SIZE_MAX));
    struct bytes bytes = {copy, len > 0 ? len - 1 : 0};
    bool is_closed = false;
    bool is_closed_too = false;
    size_t first_len = exchange(bytes, step, first, &is_closed);
    size_t second_len = exchange(bytes, SIZE_MAX, second, &is_closed_too);
    bool has_head_request = bytes.len >= 4 && memmem(bytes.data, bytes.len, "HEAD", 4) != NULL;
    first_len = without_continue(first, first_len);
    second_len = without_continue(second, second_len);
    CHECK_OP(first_len, ==, second_len);
    CHECK(memcmp(first, second, first_len) == 0 && is_closed == is_closed_too);
    check_answers(first, first_len, is_closed, has_head_request);
    free(copy);
    return 0;
}
