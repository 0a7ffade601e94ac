#include "bench/kvlink/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

double bench_now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

double bench_cpu(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

_Noreturn void bench_fail(const char *what) {
    fprintf(stderr, "kvlink-bench: %s\n", what);
    _exit(1);
}

void bench_put(const struct bench *bench, const void *data, size_t len) {
    if (write(bench->fd, data, len) != (ssize_t)len) {
        bench_fail("the other process is gone");
    }
}

void bench_get(const struct bench *bench, void *data, size_t len) {
    size_t got = 0;
    while (got < len) {
        ssize_t n = read(bench->fd, (unsigned char *)data + got, len - got);
        if (n <= 0) {
            bench_fail("the other process is gone");
        }
        got += (size_t)n;
    }
}

static void make_pool(struct bench *bench) {
    uint32_t slice = bench->is_scattered ? BENCH_SLICE_BYTES : bench->op_bytes;
    bench->page_tokens = slice / BENCH_ROW_BYTES;
    bench->page_bytes = slice * BENCH_COMPONENTS;
    bench->page_count = (uint32_t)(BENCH_POOL_BYTES / bench->page_bytes);
    bench->tokens = (uint32_t)(bench->total_bytes / (BENCH_ROW_BYTES * BENCH_COMPONENTS));
    bench->pages_used = bench->tokens / bench->page_tokens;
    bench->pages = malloc(bench->pages_used * sizeof(uint32_t));
    bench->pool = mmap(NULL, BENCH_POOL_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (bench->pages == NULL || bench->pool == MAP_FAILED) {
        bench_fail("no memory for the page pool");
    }
    for (uint32_t i = 0; i < bench->pages_used; i++) {
        bench->pages[i] = (uint32_t)((i * 2654435761ull) % bench->page_count);
    }
    for (size_t i = 0; i < BENCH_POOL_BYTES; i += sizeof(uint64_t)) {
        uint64_t word = i * 0x9e3779b97f4a7c15ull;
        memcpy(bench->pool + i, &word, sizeof(word));
    }
}

static uint64_t number(const char *text) {
    char *end;
    uint64_t value = strtoull(text, &end, 10);
    if (*end != '\0') {
        bench_fail("a number was expected");
    }
    return value;
}

int main(int argc, char **argv) {
    if (argc != 7) {
        fprintf(stderr, "usage: kvlink-bench link|bare|spin tcp|shm contiguous|scattered OP_BYTES "
                        "WINDOW_BYTES TOTAL_MIB\n");
        return 2;
    }
    bool is_link = strcmp(argv[1], "link") == 0;
    struct bench bench = {
        .is_tcp = strcmp(argv[2], "tcp") == 0,
        .is_spinning = strcmp(argv[1], "spin") == 0,
        .is_scattered = strcmp(argv[3], "scattered") == 0,
        .op_bytes = (uint32_t)number(argv[4]),
        .window_bytes = (uint32_t)number(argv[5]),
        .total_bytes = number(argv[6]) << 20,
    };
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0) {
        bench_fail("no socket pair");
    }
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[0]);
        bench.fd = fds[1];
        struct bench_result result = {0};
        make_pool(&bench);
        (is_link ? link_send : bare_send)(&bench, &result);
        bench_put(&bench, &result, sizeof(result));
        _exit(0);
    }
    close(fds[1]);
    bench.fd = fds[0];
    struct bench_result got = {0};
    struct bench_result sent = {0};
    make_pool(&bench);
    (is_link ? link_receive : bare_receive)(&bench, &got);
    bench_get(&bench, &sent, sizeof(sent));
    waitpid(child, NULL, 0);
    double gigabytes = (double)got.bytes / 1e9;
    double sums = sent.sum_bytes > 0 ? sent.sum_seconds * 1e9 / (double)sent.sum_bytes : 0;
    printf("%-4s %s %-10s %8u %8u  %6.3f GB/s  receiver %.3f s/GB  sender %.3f s/GB  writer's sums "
           "%.3f s/GB\n",
           argv[1], argv[2], argv[3], bench.op_bytes, bench.window_bytes, gigabytes / got.seconds,
           got.cpu_seconds / gigabytes, sent.cpu_seconds / gigabytes, sums);
    return 0;
}
