#define _GNU_SOURCE /* nftw */
#include "support/etcd.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define READY_WITHIN_S 30

struct member {
    uint16_t client_port;
    uint16_t peer_port;
    pid_t pid; /* 0: not running */
    char endpoint[64];
};

struct test_etcd {
    unsigned members_len;
    struct member members[TEST_ETCD_MEMBERS_MAX];
    char folder[128];
    char endpoints[256];
    char cluster[512];
};

static _Noreturn void give_up(const char *format, ...) __attribute__((format(printf, 1, 2)));
static _Noreturn void give_up(const char *format, ...) {
    va_list args;
    va_start(args, format);
    (void)fputs("test etcd: ", stderr);
    (void)vfprintf(stderr, format, args);
    (void)fputc('\n', stderr);
    va_end(args);
    abort();
}

/* A port that is free now, held by the caller so that the next one differs. Below the range from
 * which the system takes the ports of outgoing connections: a client that tries and tries to reach
 * a killed member would otherwise, once in some ten thousand tries, be given the member's own port
 * and connect to itself, and the member could not come back. */
static int port_hold(uint16_t *port_out) {
    static unsigned next;
    if (next == 0) {
        next = (unsigned)getpid() * 37u;
    }
    for (unsigned tries = 0; tries < 1000; tries++) {
        uint16_t port = (uint16_t)(12000u + next++ % 20000u);
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const struct sockaddr_in address = {.sin_family = AF_INET,
                                            .sin_port = htons(port),
                                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        if (fd < 0) {
            break;
        }
        if (bind(fd, (const struct sockaddr *)&address, sizeof(address)) == 0) {
            *port_out = port;
            return fd;
        }
        (void)close(fd);
    }
    give_up("no free port: %s", strerror(errno));
}

static void pause_ms(long ms) {
    const struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    (void)nanosleep(&pause, NULL);
}

/* Asks GET /health; true if the member says that it is well (it then has a leader). */
static bool member_is_healthy(const struct member *member) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons(member->client_port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    static const char request[] = "GET /health HTTP/1.0\r\n\r\n";
    const struct timeval wait = {.tv_sec = 1};
    char answer[1024];
    size_t len = 0;
    bool is_sent = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait)) == 0 &&
                   connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0 &&
                   send(fd, request, sizeof(request) - 1, MSG_NOSIGNAL) > 0;
    while (is_sent && len < sizeof(answer) - 1) {
        ssize_t got = recv(fd, answer + len, sizeof(answer) - 1 - len, 0);
        if (got <= 0) {
            break;
        }
        len += (size_t)got;
    }
    answer[len] = 0;
    if (fd >= 0) {
        (void)close(fd);
    }
    return strstr(answer, "\"health\":\"true\"") != NULL;
}

static void member_exec(const struct test_etcd *etcd, unsigned index) {
    const struct member *member = &etcd->members[index];
    char name[16];
    char data[192];
    char log[192];
    char client[64];
    char peer[64];
    (void)snprintf(name, sizeof(name), "m%u", index);
    (void)snprintf(data, sizeof(data), "%s/m%u", etcd->folder, index);
    (void)snprintf(log, sizeof(log), "%s/m%u.log", etcd->folder, index);
    (void)snprintf(client, sizeof(client), "http://127.0.0.1:%u", member->client_port);
    (void)snprintf(peer, sizeof(peer), "http://127.0.0.1:%u", member->peer_port);
    int fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (fd >= 0) {
        (void)dup2(fd, 1);
        (void)dup2(fd, 2);
    }
    (void)execlp("etcd", "etcd", "--name", name, "--data-dir", data, "--listen-client-urls", client,
                 "--advertise-client-urls", client, "--listen-peer-urls", peer,
                 "--initial-advertise-peer-urls", peer, "--initial-cluster", etcd->cluster,
                 "--unsafe-no-fsync", "--heartbeat-interval", "50", "--election-timeout", "500",
                 "--grpc-keepalive-min-time", "900ms", "--log-level", "error", (char *)NULL);
    _exit(127);
}

static void member_start(struct test_etcd *etcd, unsigned index) {
    struct member *member = &etcd->members[index];
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid < 0) {
        give_up("fork: %s", strerror(errno));
    }
    if (pid == 0) {
        sigset_t none;
        (void)sigemptyset(&none);
        (void)sigprocmask(SIG_SETMASK, &none, NULL);
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent) { /* otherwise it died before the line above */
            member_exec(etcd, index);
        }
        _exit(127);
    }
    member->pid = pid;
}

static void member_wait_ready(struct test_etcd *etcd, unsigned index) {
    struct member *member = &etcd->members[index];
    for (unsigned tries = 0; tries < READY_WITHIN_S * 20; tries++) {
        if (member_is_healthy(member)) {
            return;
        }
        int status = 0;
        if (waitpid(member->pid, &status, WNOHANG) == member->pid) {
            member->pid = 0;
            give_up("member %u ended with %d (127: is etcd on PATH?); see %s/m%u.log", index,
                    WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), etcd->folder,
                    index);
        }
        pause_ms(50);
    }
    give_up("member %u was not healthy within %d s; see %s/m%u.log", index, READY_WITHIN_S,
            etcd->folder, index);
}

struct test_etcd *test_etcd_prepare(unsigned members) {
    struct test_etcd *etcd = calloc(1, sizeof(*etcd));
    if (etcd == NULL || members < 1 || members > TEST_ETCD_MEMBERS_MAX) {
        give_up("%u members cannot be had", members);
    }
    const char *tmp = getenv("TMPDIR");
    (void)snprintf(etcd->folder, sizeof(etcd->folder), "%s/baton-etcd-XXXXXX",
                   tmp != NULL && strlen(tmp) < 100 ? tmp : "/tmp");
    if (mkdtemp(etcd->folder) == NULL) {
        give_up("mkdtemp %s: %s", etcd->folder, strerror(errno));
    }
    etcd->members_len = members;
    int held[2 * TEST_ETCD_MEMBERS_MAX];
    for (unsigned i = 0; i < members; i++) {
        struct member *member = &etcd->members[i];
        held[2 * i] = port_hold(&member->client_port);
        held[2 * i + 1] = port_hold(&member->peer_port);
        (void)snprintf(member->endpoint, sizeof(member->endpoint), "http://127.0.0.1:%u",
                       member->client_port);
        size_t len = strlen(etcd->endpoints);
        (void)snprintf(etcd->endpoints + len, sizeof(etcd->endpoints) - len, "%s%s",
                       i == 0 ? "" : ",", member->endpoint);
        len = strlen(etcd->cluster);
        (void)snprintf(etcd->cluster + len, sizeof(etcd->cluster) - len,
                       "%sm%u=http://127.0.0.1:%u", i == 0 ? "" : ",", i, member->peer_port);
    }
    for (unsigned i = 0; i < 2 * members; i++) {
        (void)close(held[i]);
    }
    return etcd;
}

struct test_etcd *test_etcd_start(unsigned members) {
    struct test_etcd *etcd = test_etcd_prepare(members);
    test_etcd_restart_all(etcd);
    return etcd;
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *walk) {
    (void)info;
    (void)kind;
    (void)walk;
    (void)remove(path); /* best effort in a temporary folder */
    return 0;
}

static void remove_tree(const char *path) {
    (void)nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

void test_etcd_destroy(struct test_etcd *etcd) {
    if (etcd == NULL) {
        return;
    }
    for (unsigned i = 0; i < etcd->members_len; i++) {
        test_etcd_kill(etcd, i);
    }
    remove_tree(etcd->folder);
    free(etcd);
}

const char *test_etcd_endpoints(const struct test_etcd *etcd) {
    return etcd->endpoints;
}

const char *test_etcd_endpoint(const struct test_etcd *etcd, unsigned member) {
    return etcd->members[member].endpoint;
}

uint16_t test_etcd_port(const struct test_etcd *etcd, unsigned member) {
    return etcd->members[member].client_port;
}

void test_etcd_kill(struct test_etcd *etcd, unsigned member) {
    pid_t pid = etcd->members[member].pid;
    if (pid > 0) {
        (void)kill(pid, SIGKILL);
        (void)waitpid(pid, NULL, 0);
        etcd->members[member].pid = 0;
    }
}

void test_etcd_restart(struct test_etcd *etcd, unsigned member) {
    test_etcd_kill(etcd, member);
    member_start(etcd, member);
    member_wait_ready(etcd, member);
}

void test_etcd_restart_all(struct test_etcd *etcd) {
    for (unsigned i = 0; i < etcd->members_len; i++) {
        if (etcd->members[i].pid == 0) {
            member_start(etcd, i);
        }
    }
    for (unsigned i = 0; i < etcd->members_len; i++) {
        member_wait_ready(etcd, i);
    }
}

void test_etcd_wipe(struct test_etcd *etcd, unsigned member) {
    char path[192];
    if (etcd->members[member].pid != 0) {
        give_up("wipe of a running member");
    }
    (void)snprintf(path, sizeof(path), "%s/m%u", etcd->folder, member);
    remove_tree(path);
}

void test_etcd_freeze(struct test_etcd *etcd, unsigned member) {
    (void)kill(etcd->members[member].pid, SIGSTOP);
}

void test_etcd_thaw(struct test_etcd *etcd, unsigned member) {
    (void)kill(etcd->members[member].pid, SIGCONT);
}
