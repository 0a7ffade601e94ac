#include "runtime/admin.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/prng.h"
#include "runtime/clock.h"
#include "runtime/log.h"
#include "runtime/signals.h"
#include "unit.h"

#define ANSWER_CAP (1 << 20)

static _Atomic uint32_t drains;

static void handle_livez(void *ctx, const struct admin_request *request,
                         struct admin_reply *reply) {
    (void)request;
    buffer_printf(&reply->body, "ok %s\n", (const char *)ctx);
}
static void handle_drain(void *ctx, const struct admin_request *request,
                         struct admin_reply *reply) {
    (void)ctx;
    (void)atomic_fetch_add(&drains, 1);
    reply->status = 202;
    reply->content_type = "application/json";
    buffer_text(&reply->body, "{\"got\":");
    buffer_json(&reply->body, (const char *)request->body.data, request->body.len);
    buffer_text(&reply->body, "}");
}
static void handle_query(void *ctx, const struct admin_request *request,
                         struct admin_reply *reply) {
    (void)ctx;
    char names[16];
    bool has_names = admin_query(request, "names", names, sizeof names);
    buffer_printf(&reply->body, "names=%s", has_names ? names : "(none)");
}
static void handle_large(void *ctx, const struct admin_request *request,
                         struct admin_reply *reply) {
    (void)ctx;
    (void)request;
    for (uint32_t i = 0; i < 50000; i++) {
        buffer_text(&reply->body, "0123456789abcde\n");
    }
}
/* More than the sockets of both ends hold. */
#define HUGE_LEN (24u * 1024 * 1024)
static void handle_huge(void *ctx, const struct admin_request *request, struct admin_reply *reply) {
    (void)ctx;
    (void)request;
    char block[1024];
    memset(block, 'h', sizeof block);
    while (reply->body.len < HUGE_LEN) {
        buffer_put(&reply->body, block, sizeof block);
    }
}
static void handle_endless(void *ctx, const struct admin_request *request,
                           struct admin_reply *reply) {
    (void)ctx;
    (void)request;
    while (!reply->body.is_full) {
        buffer_text(&reply->body,
                    "much too much to send to anybody at all, and more of the same; ");
    }
}

static const struct admin_route routes[] = {
    {ADMIN_GET, "/livez", handle_livez, (void *)(uintptr_t) "alive", "all threads beat"},
    {ADMIN_POST, "/drain", handle_drain, NULL, "stop taking work"},
    {ADMIN_GET, "/both", handle_livez, (void *)(uintptr_t) "get", NULL},
    {ADMIN_POST, "/both", handle_drain, NULL, NULL},
    {ADMIN_GET, "/query", handle_query, NULL, NULL},
    {ADMIN_GET, "/large", handle_large, NULL, NULL},
    {ADMIN_GET, "/huge", handle_huge, NULL, NULL},
    {ADMIN_GET, "/endless", handle_endless, NULL, NULL},
};

static struct admin *start_with(uint32_t connections_max, struct span idle_timeout) {
    struct admin_config config = {.host = "127.0.0.1",
                                  .routes = routes,
                                  .route_count = sizeof routes / sizeof routes[0],
                                  .connections_max = connections_max,
                                  .idle_timeout = idle_timeout};
    struct admin *admin = NULL;
    char text[256];
    struct writer error;
    writer_init(&error, text, sizeof text);
    assert_int_equal(admin_start(&config, &admin, &error), STATUS_OK);
    assert_int_not_equal(admin_port(admin), 0);
    return admin;
}

static struct instant soon(void) {
    return instant_add(clock_now(), span_ms(30000));
}

static void stop(struct admin *admin) {
    assert_int_equal(admin_stop(admin, soon()), STATUS_OK);
}

static int dial(const struct admin *admin) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons(admin_port(admin)),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_int_equal(connect(fd, (struct sockaddr *)(void *)&address, sizeof address), 0);
    struct timeval limit = {.tv_sec = 20}; /* a hang fails instead of hanging the suite */
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), 0);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit), 0);
    return fd;
}

static void send_text(int fd, const char *text) {
    assert_int_equal(send(fd, text, strlen(text), MSG_NOSIGNAL), (ssize_t)strlen(text));
}

/* Reads until the peer closes. */
static char answer[ANSWER_CAP];
static const char *read_to_end(int fd) {
    size_t len = 0;
    ssize_t got = 0;
    while ((got = recv(fd, answer + len, ANSWER_CAP - 1 - len, 0)) > 0) {
        len += (size_t)got;
    }
    assert_int_equal(got, 0);
    answer[len] = '\0';
    assert_int_equal(close(fd), 0);
    return answer;
}

/* Reads one answer with Content-Length from a connection that stays open. */
static const char *read_one(int fd) {
    size_t len = 0;
    char *body = NULL;
    while (body == NULL) {
        assert_int_equal(recv(fd, answer + len, 1, 0), 1);
        answer[++len] = '\0';
        body = strstr(answer, "\r\n\r\n");
    }
    const char *length = strstr(answer, "Content-Length: ");
    assert_non_null(length);
    size_t wanted = len + strtoul(length + 16, NULL, 10);
    while (len < wanted) {
        ssize_t got = recv(fd, answer + len, wanted - len, 0);
        assert_true(got > 0);
        len += (size_t)got;
    }
    answer[len] = '\0';
    return answer;
}

static const char *ask(const struct admin *admin, const char *request) {
    int fd = dial(admin);
    send_text(fd, request);
    return read_to_end(fd);
}

static void test_get_answers_with_the_handlers_reply(void **state) {
    (void)state;
    struct admin *admin = start_with(0, span_ms(0));
    const char *text = ask(admin, "GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    assert_contains(text, "HTTP/1.1 200 OK\r\n");
    assert_contains(text, "Content-Type: text/plain; charset=utf-8\r\n");
    assert_contains(text, "Content-Length: 9\r\n");
    assert_contains(text, "Connection: close\r\n");
    assert_contains(text, "\r\n\r\nok alive\n");
    stop(admin);
}

static void test_connections_are_kept_and_pipelined_requests_answered_in_order(void **state) {
    (void)state;
    struct admin *admin = start_with(0, span_ms(0));
    int fd = dial(admin);
    for (int i = 0; i < 3; i++) {
        send_text(fd, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n");
        const char *text = read_one(fd);
        assert_contains(text, "Connection: keep-alive\r\n");
        assert_contains(text, "ok alive\n");
    }
    send_text(fd, "GET /livez HTTP/1.1\r\n\r\nPOST /drain HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi"
                  "\r\nGET /query?names=q HTTP/1.1\r\n\r\n");
    assert_contains(read_one(fd), "ok alive\n");
    assert_contains(read_one(fd), "{\"got\":\"hi\"}");
    assert_contains(read_one(fd), "names=q");
    assert_int_equal(close(fd), 0);
    stop(admin);
}

static void test_http_1_0_closes_unless_asked_to_keep(void **state) {
    (void)state;
    struct admin *admin = start_with(0, span_ms(0));
    assert_contains(ask(admin, "GET /livez HTTP/1.0\r\n\r\n"), "ok alive\n");
    int fd = dial(admin);
    send_text(fd, "GET /livez HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    assert_contains(read_one(fd), "Connection: keep-alive\r\n");
    send_text(fd, "GET /livez HTTP/1.0\r\n\r\n");
    assert_contains(read_to_end(fd), "Connection: close\r\n");
    stop(admin);
}

static void test_head_is_get_without_a_body(void **state) {
    (void)state;
    struct admin *admin = start_with(0, span_ms(0));
    const char *text = ask(admin, "HEAD /livez HTTP/1.0\r\n\r\n");
    assert_contains(text, "HTTP/1.1 200 OK\r\n");
    assert_contains(text, "Content-Length: 9\r\n");
    assert_string_equal(strstr(text, "\r\n\r\n"), "\r\n\r\n");
    text = ask(admin, "HEAD /nothing HTTP/1.0\r\n\r\n");
    assert_contains(text, "404");
    assert_string_equal(strstr(text, "\r\n\r\n"), "\r\n\r\n");
    stop(admin);
}

static void test_other_methods_get_405_with_allow(void **state) {
    (void)state;
    static const struct {
        const char *line;
        const char *allow;
    } cases[] = {
        {"DELETE /livez", "Allow: GET, HEAD\r\n"},   {"POST /livez", "Allow: GET, HEAD\r\n"},
        {"GET /drain", "Allow: POST\r\n"},           {"HEAD /drain", "Allow: POST\r\n"},
        {"PUT /both", "Allow: GET, HEAD, POST\r\n"}, {"BREW /both", "Allow: GET, HEAD, POST\r\n"},
    };
    struct admin *admin = start_with(0, span_ms(0));
    uint32_t before = atomic_load(&drains);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char request[128];
        (void)snprintf(request, sizeof request, "%s HTTP/1.0\r\n\r\n", cases[i].line);
        const char *text = ask(admin, request);
        assert_contains(text, "HTTP/1.1 405 Method Not Allowed\r\n");
        assert_contains(text, cases[i].allow);
    }
    assert_int_equal(atomic_load(&drains), before);
    stop(admin);
}

static void test_an_unknown_path_lists_what_exists(void **state) {
    (void)state;
    struct admin *admin = start_with(0, span_ms(0));
    const char *text = ask(admin, "GET /metricz HTTP/1.0\r\n\r\n");
    assert_contains(text, "HTTP/1.1 404 Not Found\r\n");
    assert_contains(text, "/metricz is not here");
    assert_contains(text, "GET  /livez  all threads beat\n");
    assert_contains(text, "POST /drain  stop taking work\n");
    stop(admin);
}

static void test_bodies_arrive_whole_also_in_pieces_and_after_continue(void **state) {
    (void)state;
    struct admin *admin = start_with(0, span_ms(0));
    int fd = dial(admin);
    send_text(fd, "POST /drain HTTP/1.1\r\nContent-Length: 6\r\nExpect: 100-continue\r\n\r\n");
    char line[26] = "";
    assert_int_equal(recv(fd, line, 25, MSG_WAITALL), 25);
    assert_string_equal(line, "HTTP/1.1 100 Continue\r\n\r\n");
    send_text(fd, "abc");
    (void)poll(NULL, 0, 20); /* likely a packet of its own; either way must work */
    send_text(fd, "def");
    const char *text = read_one(fd);
    assert_contains(text, "202 Accepted");
    assert_contains(text, "Content-Type: application/json\r\n");
    assert_contains(text, "{\"got\":\"abcdef\"}");
    assert_int_equal(close(fd), 0);
    stop(admin);
}

static void test_query_values_are_decoded(void **state) {
    (void)state;
    static const struct {
        const char *query;
        const char *answer;
    } cases[] = {
        {"", "names=(none)"},
        {"?names=sglang%2Cvllm", "names=sglang,vllm"},
        {"?a=1&names=x+y&names=z", "names=x y"},
        {"?xnames=1", "names=(none)"},
        {"?names=", "names="},
        {"?names=%4", "names=%4"},
        {"?names=%00", "names=(none)"},
        {"?names=0123456789abcdef", "names=(none)"}, /* longer than the handler has room for */
    };
    struct admin *admin = start_with(0, span_ms(0));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char request[128];
        (void)snprintf(request, sizeof request, "GET /query%s HTTP/1.0\r\n\r\n", cases[i].query);
        const char *text = ask(admin, request);
        assert_string_equal(strstr(text, "\r\n\r\n") + 4, cases[i].answer);
    }
    stop(admin);
}

static void test_large_replies_arrive_whole_and_endless_ones_become_500(void **state) {
    (void)state;
    struct admin *admin = start_with(0, span_ms(0));
    const char *text = ask(admin, "GET /large HTTP/1.0\r\n\r\n");
    assert_contains(text, "Content-Length: 800000\r\n");
    assert_int_equal(strlen(strstr(text, "\r\n\r\n") + 4), 800000);
    assert_contains(ask(admin, "GET /endless HTTP/1.0\r\n\r\n"), "HTTP/1.1 500 ");
    stop(admin);
}

static void test_too_large_heads_and_bodies_are_refused(void **state) {
    (void)state;
    struct admin *admin = start_with(0, span_ms(0));
    char *request = malloc(ADMIN_HEAD_MAX + 1000);
    assert_non_null(request);
    memset(request, 'a', ADMIN_HEAD_MAX + 1000);
    memcpy(request, "GET /livez HTTP/1.1\r\nA: ", 24);
    request[ADMIN_HEAD_MAX + 999] = '\0';
    assert_contains(ask(admin, request), "HTTP/1.1 431 ");
    free(request);
    assert_contains(ask(admin, "POST /drain HTTP/1.1\r\nContent-Length: 65537\r\n\r\n"),
                    "HTTP/1.1 413 ");
    assert_contains(ask(admin, "POST /drain HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"),
                    "HTTP/1.1 411 ");
    /* The largest body that is allowed. */
    int fd = dial(admin);
    send_text(fd, "POST /drain HTTP/1.0\r\nContent-Length: 65536\r\n\r\n");
    char *body = malloc(ADMIN_BODY_MAX);
    assert_non_null(body);
    memset(body, 'b', ADMIN_BODY_MAX);
    for (size_t sent = 0; sent < ADMIN_BODY_MAX;) {
        ssize_t got = send(fd, body + sent, ADMIN_BODY_MAX - sent, MSG_NOSIGNAL);
        assert_true(got > 0);
        sent += (size_t)got;
    }
    free(body);
    assert_contains(read_to_end(fd), "Content-Length: 65546\r\n");
    stop(admin);
}

static void test_tls_and_other_nonsense_get_400_and_a_close(void **state) {
    (void)state;
    static const char *const nonsense[] = {"\x16\x03\x01\x02\x05\x01\x01", "\r\n\r\nhello\r\n\r\n",
                                           "GET\r\n\r\n", "GET / HTTP/1.1\r\nbroken\r\n\r\n",
                                           "{}\n"};
    struct admin *admin = start_with(0, span_ms(0));
    for (size_t i = 0; i < sizeof nonsense / sizeof nonsense[0]; i++) {
        assert_contains(ask(admin, nonsense[i]), "HTTP/1.1 400 ");
    }
    assert_contains(ask(admin, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), "HTTP/1.1 505 ");
    assert_contains(ask(admin, "GET /livez HTTP/1.0\r\n\r\n"), "ok alive\n");
    stop(admin);
}

static uint32_t descriptors(void) {
    DIR *folder = opendir("/proc/self/fd");
    assert_non_null(folder);
    uint32_t count = 0;
    while (readdir(folder) != NULL) {
        count++;
    }
    assert_int_equal(closedir(folder), 0);
    return count;
}

static void test_a_thousand_garbage_connections_leak_no_descriptor(void **state) {
    (void)state;
    struct admin *admin = start_with(0, span_ms(0));
    assert_contains(ask(admin, "GET /livez HTTP/1.0\r\n\r\n"), "ok alive\n");
    struct instant deadline = soon();
    while (admin_connections(admin) > 0) {
        assert_false(instant_reached(clock_now(), deadline));
        (void)poll(NULL, 0, 5);
    }
    uint32_t before = descriptors();
    struct prng prng = {42};
    for (uint32_t i = 0; i < 1000; i++) {
        int fd = dial(admin);
        char bytes[600];
        size_t len = prng_below(&prng, sizeof bytes);
        for (size_t j = 0; j < len; j++) {
            bytes[j] = (char)prng_next(&prng);
        }
        if (i % 3 == 0 && len > 5) {
            memcpy(bytes, "GET /", 5); /* gets past the first look */
        }
        (void)!send(fd, bytes, len, MSG_NOSIGNAL); /* the server may have closed already */
        if (i % 4 == 0) {
            struct linger reset = {.l_onoff = 1};
            assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset), 0);
        }
        assert_int_equal(close(fd), 0);
    }
    deadline = soon();
    while (admin_connections(admin) > 0 || descriptors() != before) { /* some wait to be accepted */
        assert_false(instant_reached(clock_now(), deadline));
        (void)poll(NULL, 0, 5);
    }
    assert_contains(ask(admin, "GET /livez HTTP/1.0\r\n\r\n"), "ok alive\n");
    stop(admin);
}

static void test_idle_and_dripping_connections_are_closed_after_the_timeout(void **state) {
    (void)state;
    struct admin *admin = start_with(0, span_ms(300));
    int silent = dial(admin);
    int dripping = dial(admin);
    char byte = 0;
    bool is_open = true;
    static const char drip[] = "GET /livez HTTP/1.1\r\nA: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    for (size_t i = 0; i < sizeof drip - 1 && is_open; i++) {
        (void)!send(dripping, drip + i, 1, MSG_NOSIGNAL); /* fails once it is closed */
        struct pollfd closed = {.fd = dripping, .events = POLLIN};
        is_open = poll(&closed, 1, 50) == 0;
    }
    assert_false(is_open); /* although a byte came every 50 ms */
    assert_int_equal(recv(silent, &byte, 1, 0), 0);
    assert_int_equal(close(silent), 0);
    assert_int_equal(close(dripping), 0);
    stop(admin);
}

static void test_at_the_connection_limit_the_longest_idle_one_makes_room(void **state) {
    (void)state;
    struct admin *admin = start_with(4, span_ms(0));
    int idle[4];
    for (int i = 0; i < 4; i++) {
        idle[i] = dial(admin);
        send_text(idle[i], "GET /livez HTTP/1.1\r\n\r\n");
        assert_contains(read_one(idle[i]), "ok alive\n");
    }
    assert_int_equal(admin_connections(admin), 4);
    int fd = dial(admin);
    send_text(fd, "GET /livez HTTP/1.1\r\n\r\n");
    assert_contains(read_one(fd), "ok alive\n");
    assert_int_equal(admin_connections(admin), 4);
    char byte = 0;
    assert_int_equal(recv(idle[0], &byte, 1, 0), 0); /* the first one was idle longest */
    send_text(idle[3], "GET /livez HTTP/1.1\r\n\r\n");
    assert_contains(read_one(idle[3]), "ok alive\n");
    for (int i = 0; i < 4; i++) {
        assert_int_equal(close(idle[i]), 0);
    }
    assert_int_equal(close(fd), 0);
    stop(admin);
}

static void test_a_client_that_half_closes_still_gets_its_answer(void **state) {
    (void)state;
    struct admin *admin = start_with(0, span_ms(0));
    int fd = dial(admin);
    send_text(fd, "GET /huge HTTP/1.1\r\n\r\n");
    assert_int_equal(shutdown(fd, SHUT_WR), 0);
    (void)poll(NULL, 0, 100); /* the server sees the end while the answer is still on its way */
    size_t len = 0;
    ssize_t got = 0;
    while ((got = recv(fd, answer, ANSWER_CAP, 0)) > 0) {
        len += (size_t)got;
    }
    assert_int_equal(got, 0);
    assert_true(len > HUGE_LEN);
    assert_int_equal(close(fd), 0);
    stop(admin);
}

static void test_an_occupied_port_is_named(void **state) {
    (void)state;
    struct admin *admin = start_with(0, span_ms(0));
    struct admin_config config = {
        .host = "127.0.0.1", .port = admin_port(admin), .routes = routes, .route_count = 1};
    struct admin *other = NULL;
    char text[256] = "";
    struct writer error;
    writer_init(&error, text, sizeof text - 1);
    uint32_t before = descriptors();
    assert_int_equal(admin_start(&config, &other, &error), STATUS_EXISTS);
    char wanted[64];
    (void)snprintf(wanted, sizeof wanted, "127.0.0.1:%u: Address already in use",
                   admin_port(admin));
    assert_contains(text, wanted);
    assert_null(other);
    assert_int_equal(admin_start(&config, &other, NULL), STATUS_EXISTS);
    assert_int_equal(descriptors(), before);
    stop(admin);
}

static void test_an_address_of_another_machine_is_refused(void **state) {
    (void)state;
    struct admin_config config = {.host = "192.0.2.1", .routes = routes, .route_count = 1};
    struct admin *admin = NULL;
    char text[256] = "";
    struct writer error;
    writer_init(&error, text, sizeof text - 1);
    assert_int_equal(admin_start(&config, &admin, &error), STATUS_INVALID);
    assert_contains(text, "192.0.2.1:0");
    assert_int_equal(admin_stop(NULL, soon()), STATUS_OK);
}

static void test_stop_closes_open_connections_and_frees_the_port(void **state) {
    (void)state;
    struct admin *admin = start_with(0, span_ms(0));
    int fd = dial(admin);
    send_text(fd, "GET /livez HTTP/1.1\r\n\r\n");
    assert_contains(read_one(fd), "ok alive\n");
    struct admin_config config = {
        .host = "127.0.0.1", .port = admin_port(admin), .routes = routes, .route_count = 1};
    stop(admin);
    char byte = 0;
    assert_int_equal(recv(fd, &byte, 1, 0), 0);
    assert_int_equal(close(fd), 0);
    assert_int_equal(admin_start(&config, &admin, NULL), STATUS_OK);
    assert_contains(ask(admin, "GET /livez HTTP/1.0\r\n\r\n"), "ok alive\n");
    stop(admin);
}

int main(void) {
    signals_block();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_get_answers_with_the_handlers_reply),
        cmocka_unit_test(test_connections_are_kept_and_pipelined_requests_answered_in_order),
        cmocka_unit_test(test_http_1_0_closes_unless_asked_to_keep),
        cmocka_unit_test(test_head_is_get_without_a_body),
        cmocka_unit_test(test_other_methods_get_405_with_allow),
        cmocka_unit_test(test_an_unknown_path_lists_what_exists),
        cmocka_unit_test(test_bodies_arrive_whole_also_in_pieces_and_after_continue),
        cmocka_unit_test(test_query_values_are_decoded),
        cmocka_unit_test(test_large_replies_arrive_whole_and_endless_ones_become_500),
        cmocka_unit_test(test_too_large_heads_and_bodies_are_refused),
        cmocka_unit_test(test_tls_and_other_nonsense_get_400_and_a_close),
        cmocka_unit_test(test_a_thousand_garbage_connections_leak_no_descriptor),
        cmocka_unit_test(test_idle_and_dripping_connections_are_closed_after_the_timeout),
        cmocka_unit_test(test_at_the_connection_limit_the_longest_idle_one_makes_room),
        cmocka_unit_test(test_a_client_that_half_closes_still_gets_its_answer),
        cmocka_unit_test(test_an_occupied_port_is_named),
        cmocka_unit_test(test_an_address_of_another_machine_is_refused),
        cmocka_unit_test(test_stop_closes_open_connections_and_frees_the_port),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
