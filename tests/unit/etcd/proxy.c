#define _GNU_SOURCE /* accept4 */
#include "unit/etcd/proxy.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"

#define PAIRS_MAX 64

struct proxy {
    int listener;
    int wake;
    uint16_t port;
    uint16_t target;
    int pairs[PAIRS_MAX][2]; /* client, server; -1: free */
    pthread_t thread;
    pthread_mutex_t lock; /* guards the rest */
    pthread_cond_t done;
    enum proxy_mode mode;
    bool is_cut_asked;
    bool is_stop_asked;
};

static struct sockaddr_in loopback(uint16_t port) {
    return (struct sockaddr_in){
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

static void pair_close(int *pair) {
    const struct linger reset = {.l_onoff = 1, .l_linger = 0};
    for (int side = 0; side < 2; side++) {
        if (pair[side] >= 0) {
            (void)setsockopt(pair[side], SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
            (void)close(pair[side]);
            pair[side] = -1;
        }
    }
}

static void accept_one(struct proxy *proxy) {
    int client = accept4(proxy->listener, NULL, NULL, SOCK_CLOEXEC);
    if (client < 0) {
        return;
    }
    int *pair = NULL;
    for (int i = 0; i < PAIRS_MAX && pair == NULL; i++) {
        pair = proxy->pairs[i][0] < 0 ? proxy->pairs[i] : NULL;
    }
    int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = loopback(proxy->target);
    int on = 1;
    if (pair == NULL || server < 0 ||
        connect(server, (struct sockaddr *)&address, sizeof(address)) != 0) {
        (void)close(client);
        if (server >= 0) {
            (void)close(server);
        }
        return;
    }
    (void)setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    (void)setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    pair[0] = client;
    pair[1] = server;
}

static bool forward(int from, int to) {
    char buffer[65536];
    ssize_t len = recv(from, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (len <= 0) {
        return len < 0 && (errno == EAGAIN || errno == EINTR);
    }
    for (ssize_t sent = 0; sent < len;) {
        ssize_t n = send(to, buffer + sent, (size_t)(len - sent), MSG_NOSIGNAL);
        if (n <= 0) {
            return false;
        }
        sent += n;
    }
    return true;
}

static void *proxy_main(void *arg) {
    struct proxy *proxy = arg;
    while (true) {
        struct pollfd fds[2 + 2 * PAIRS_MAX];
        pthread_mutex_lock(&proxy->lock);
        bool is_passing = proxy->mode == PROXY_PASS;
        pthread_mutex_unlock(&proxy->lock);
        fds[0] = (struct pollfd){.fd = proxy->wake, .events = POLLIN};
        fds[1] = (struct pollfd){.fd = proxy->listener, .events = POLLIN};
        for (int i = 0; i < 2 * PAIRS_MAX; i++) {
            int fd = is_passing ? proxy->pairs[i / 2][i % 2] : -1;
            fds[2 + i] = (struct pollfd){.fd = fd, .events = POLLIN};
        }
        (void)poll(fds, 2 + 2 * PAIRS_MAX, -1);
        for (int i = 0; i < 2 * PAIRS_MAX; i++) {
            int *pair = proxy->pairs[i / 2];
            if (fds[2 + i].revents != 0 && pair[i % 2] == fds[2 + i].fd && pair[i % 2] >= 0 &&
                !forward(pair[i % 2], pair[1 - i % 2])) {
                pair_close(pair);
            }
        }
        if (fds[1].revents != 0) {
            accept_one(proxy);
        }
        if (fds[0].revents != 0) {
            uint64_t count = 0;
            (void)!read(proxy->wake, &count, sizeof(count));
        }
        pthread_mutex_lock(&proxy->lock);
        bool is_stop_asked = proxy->is_stop_asked;
        if (proxy->is_cut_asked || is_stop_asked) {
            for (int i = 0; i < PAIRS_MAX; i++) {
                pair_close(proxy->pairs[i]);
            }
            proxy->is_cut_asked = false;
            pthread_cond_broadcast(&proxy->done);
        }
        pthread_mutex_unlock(&proxy->lock);
        if (is_stop_asked) {
            return NULL;
        }
    }
}

static void proxy_wake(struct proxy *proxy) {
    uint64_t one = 1;
    CHECK(write(proxy->wake, &one, sizeof(one)) == sizeof(one));
}

struct proxy *proxy_open(uint16_t target) {
    struct proxy *proxy = calloc(1, sizeof(*proxy));
    CHECK(proxy != NULL);
    memset(proxy->pairs, 0xff, sizeof(proxy->pairs)); /* -1 */
    proxy->target = target;
    proxy->wake = eventfd(0, EFD_CLOEXEC);
    proxy->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = loopback(0);
    socklen_t len = sizeof(address);
    CHECK(bind(proxy->listener, (struct sockaddr *)&address, len) == 0);
    CHECK(listen(proxy->listener, 64) == 0);
    CHECK(getsockname(proxy->listener, (struct sockaddr *)&address, &len) == 0);
    proxy->port = ntohs(address.sin_port);
    CHECK(pthread_mutex_init(&proxy->lock, NULL) == 0);
    CHECK(pthread_cond_init(&proxy->done, NULL) == 0);
    CHECK(pthread_create(&proxy->thread, NULL, proxy_main, proxy) == 0);
    return proxy;
}

uint16_t proxy_port(const struct proxy *proxy) {
    return proxy->port;
}

void proxy_cut(struct proxy *proxy) {
    pthread_mutex_lock(&proxy->lock);
    proxy->is_cut_asked = true;
    proxy_wake(proxy);
    while (proxy->is_cut_asked) {
        pthread_cond_wait(&proxy->done, &proxy->lock);
    }
    pthread_mutex_unlock(&proxy->lock);
}

void proxy_set_mode(struct proxy *proxy, enum proxy_mode mode) {
    pthread_mutex_lock(&proxy->lock);
    proxy->mode = mode;
    pthread_mutex_unlock(&proxy->lock);
    proxy_wake(proxy);
}

void proxy_close(struct proxy *proxy) {
    pthread_mutex_lock(&proxy->lock);
    proxy->is_stop_asked = true;
    pthread_mutex_unlock(&proxy->lock);
    proxy_wake(proxy);
    CHECK(pthread_join(proxy->thread, NULL) == 0);
    (void)close(proxy->listener);
    (void)close(proxy->wake);
    (void)pthread_cond_destroy(&proxy->done);
    (void)pthread_mutex_destroy(&proxy->lock);
    free(proxy);
}
