/* What the link and the bare UCX loop have in common: one leg is two processes, a page pool each,
 * and a stream of ops that both cut and place alike. Prints one line per leg. */
#ifndef BENCH_KVLINK_BENCH_H
#define BENCH_KVLINK_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BENCH_ROW_BYTES       1024u
#define BENCH_COMPONENTS      4u
#define BENCH_SLICE_BYTES     (16u * 1024u) /* a page's share of one component when scattered */
#define BENCH_POOL_BYTES      (512ull * 1024 * 1024)
#define BENCH_CHUNK_BYTES     (256u * 1024u)
#define BENCH_SHM_CHUNK_BYTES (60u * 1024u)

struct bench {
    bool is_tcp;
    bool is_scattered;
    bool is_spinning;  /* the bare loop never waits */
    uint32_t op_bytes; /* of one component */
    uint32_t window_bytes;
    uint64_t total_bytes; /* a multiple of op_bytes * BENCH_COMPONENTS */

    uint32_t page_tokens;
    uint32_t page_bytes;
    uint32_t page_count; /* in the pool */
    uint32_t tokens;     /* of the whole stream */
    uint32_t pages_used;
    uint32_t *pages; /* of the stream, visited in scattered order; the same page comes again */
    unsigned char *pool;
    int fd; /* the other process */
};

/* Both fill in the result of their own side. */
struct bench_result {
    double seconds; /* receiver: from the first to the last byte */
    double cpu_seconds;
    uint64_t bytes;
    double sum_seconds; /* sender of the link: the row sums of sum_bytes, hot in the cache */
    uint64_t sum_bytes;
};

/* One leg, as receiver and as sender. They talk over bench->fd. */
void link_receive(struct bench *bench, struct bench_result *result);
void link_send(struct bench *bench, struct bench_result *result);
void bare_receive(struct bench *bench, struct bench_result *result);
void bare_send(struct bench *bench, struct bench_result *result);

double bench_now(void);
double bench_cpu(void);
void bench_put(const struct bench *bench, const void *data, size_t len);
void bench_get(const struct bench *bench, void *data, size_t len);
_Noreturn void bench_fail(const char *what);

#endif
