/* A device table: what kernels.h is for the CPU, for an accelerator with memory of its own.
 *
 * A shared object exports `baton_device_table`; it is loaded at run time, so programs neither link
 * nor need it. Everything is asynchronous in the order of two queues: compute, and copies to the
 * host. Marks order them and tell the host how far they are; nothing here waits without an end.
 * Rows are as in kernels.h: a result element is reduced in one fixed order, whatever shares the
 * call; so products of F32 and BF16 run in tiles of DEVICE_TILE rows, padded with zeros, by one
 * fixed algorithm for each shape of matrix. The first failure is kept (`failure`) and everything
 * after it is void: the device is lost to this process. One thread at a time. */
#ifndef KERNELS_DEVICE_H
#define KERNELS_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DEVICE_TABLE_VERSION 2u  /* raised by every change of this header that old objects miss */
#define DEVICE_TILE          64u /* rows of x in one product of F32 or BF16 */
#define DEVICE_ALIGN         16u /* rows and columns of a matrix are padded to multiples of it */
#define DEVICE_HEAD_DIM_MAX  1024u
#define DEVICE_MARKS         8u
#define DEVICE_TEXT          256u
#define DEVICE_NUMERICS      20u

struct device; /* one opened device; the library's */

enum device_queue { DEVICE_COMPUTE = 0, DEVICE_COPY = 1 };
enum device_state { DEVICE_PENDING = 0, DEVICE_PASSED = 1, DEVICE_FAILED = 2 };

struct device_info {
    char name[64];                  /* of the product */
    char numerics[DEVICE_NUMERICS]; /* all that may change a bit: class, size, library */
    uint64_t memory_bytes;
    uint64_t free_bytes; /* when it was opened */
};

/* A weight matrix [rows, cols] in device memory: rows device_row_bytes apart, and as many rows as
 * device_padded(rows); what is padding is zero. A row of I8 is the numbers of its groups, one after
 * the other, then the groups' scales (F32). */
struct device_matrix {
    enum kernels_dtype dtype; /* F32, BF16 or I8 */
    uint32_t rows;
    uint32_t cols;
    void *data;
};

static inline uint32_t device_padded(uint32_t count) {
    return (count + DEVICE_ALIGN - 1) / DEVICE_ALIGN * DEVICE_ALIGN;
}
static inline uint32_t device_row_bytes(enum kernels_dtype dtype, uint32_t cols) {
    if (dtype == KERNELS_I8) {
        return device_padded(kernels_groups(cols) * (KERNELS_GROUP + (uint32_t)sizeof(float)));
    }
    return device_padded(cols) * kernels_dtype_bytes(dtype);
}
static inline uint64_t device_matrix_bytes(enum kernels_dtype dtype, uint32_t rows, uint32_t cols) {
    return (uint64_t)device_padded(rows) * device_row_bytes(dtype, cols);
}

/* The tokens of one step; arrays in device memory. Token n is at `positions[n]` of a sequence whose
 * pages are pages[page_first[n]...]. */
struct device_step {
    uint32_t count;
    const uint32_t *tokens;
    const uint32_t *positions;
    const uint32_t *page_first;
    const uint32_t *pages;
    const float *cosine; /* [count, head_dim / 2] */
    const float *sine;
};

/* One layer's K and V rows in a pool of pages (in device memory, or the host's as mapped). */
struct device_kv {
    void *base;
    uint64_t page_bytes;
    uint64_t k_offset; /* of the layer's rows from the start of a page */
    uint64_t v_offset;
    uint64_t row_bytes; /* a multiple of 4 */
    uint32_t page_tokens;
    uint32_t kv_heads;
    uint32_t head_dim;
    enum kernels_dtype dtype; /* F32 or BF16 */
};

/* Ranks of one worker: a communicator. Every call returns at once or within `limit_ms`. */
#define DEVICE_RANKS_ID_BYTES 128u
struct device_ranks;
enum device_ranks_result {
    DEVICE_RANKS_OK = 0,
    DEVICE_RANKS_PENDING, /* still under way when the limit passed */
    DEVICE_RANKS_FAILED,  /* `why` says what; only abort is left */
};

struct device_table {
    uint32_t version; /* DEVICE_TABLE_VERSION */
    uint32_t bytes;   /* of this struct */
    const char *kind; /* "cuda" */

    /* ---- life. open: 0, or -1 with one sentence in `why` (no driver, no such device, too old).
     * close: NULL is accepted; the queues must be idle or lost. ---- */
    int (*open)(uint32_t index, struct device **device_out, char *why, size_t why_cap);
    void (*close)(struct device *device);
    /* Before the first call of any other thread than the one that opened it, by that thread. */
    void (*attach)(struct device *device);
    void (*info)(const struct device *device, struct device_info *info_out);
    const char *(*failure)(const struct device *device); /* NULL: all is well */

    /* ---- memory. alloc: device memory, zeroed, 256-aligned. host_alloc: pinned host memory,
     * zeroed. NULL: no room (that is no failure of the device). host_map: makes a range of the
     * host's memory reachable; *view_out is how the device names it; 0, or -1 with no harm. ---- */
    void *(*alloc)(struct device *device, uint64_t bytes);
    void (*release)(struct device *device, void *memory);
    void *(*host_alloc)(struct device *device, uint64_t bytes);
    void (*host_release)(struct device *device, void *memory);
    int (*host_map)(struct device *device, void *base, uint64_t bytes, void **view_out);
    void (*host_unmap)(struct device *device, void *base);
    /* The host side is pinned or mapped, and is left alone until a later mark has passed. */
    void (*upload)(struct device *device, void *to, const void *from, uint64_t bytes);
    void (*download)(struct device *device, void *to, const void *from, uint64_t bytes);

    /* ---- order. mark: puts mark `mark` at the end of a queue, in the place of its last use.
     * follow: the queue's later work waits for the mark. look: has it been reached? ---- */
    void (*mark)(struct device *device, enum device_queue queue, uint32_t mark);
    void (*follow)(struct device *device, enum device_queue queue, uint32_t mark);
    enum device_state (*look)(struct device *device, uint32_t mark);

    /* Makes room for products with matrices of this shape; for F32 and BF16 also chooses the
     * algorithm, and proves on the device that a row's bits do not depend on its place in the tile.
     * Before the first product; while loading, since it waits, `limit_ms` at most. 0, or -1 with a
     * sentence. */
    int (*prepare)(struct device *device, enum kernels_dtype dtype, uint32_t rows, uint32_t cols,
                   uint32_t limit_ms, char *why, size_t why_cap);

    /* ---- operations, all on the compute queue unless said otherwise; strides in elements. ---- */
    /* x[n] = row tokens[n] of the matrix, as it counts in products. */
    void (*embed)(struct device *device, const struct device_matrix *matrix,
                  const struct device_step *step, float *x);
    /* Norms each of `heads` runs of `width` in rows x + row * x_stride, row = rows[n], or n where
     * rows is NULL; to out + n * out_stride. out may be x. */
    void (*rms_norm)(struct device *device, float *out, size_t out_stride, const float *x,
                     size_t x_stride, const uint32_t *rows, const float *weight, uint32_t count,
                     uint32_t heads, uint32_t width, float epsilon);
    /* y[n] = matrix * x[n]; writes `rows` values a row and nothing else. BF16 matrices take x as
     * the exact sum of three BF16 parts; I8 ones as kernels.h says, with the bits of its tables. */
    void (*product)(struct device *device, const struct device_matrix *matrix, const float *x,
                    size_t x_stride, float *y, size_t y_stride, uint32_t count);
    /* out[n] += x[n]; x_stride 0: the same row for all. */
    void (*add)(struct device *device, float *out, size_t out_stride, const float *x,
                size_t x_stride, uint32_t count, uint32_t width);
    void (*rotary)(struct device *device, const struct device_step *step, float *x, size_t stride,
                   uint32_t heads, uint32_t head_dim);
    /* Writes token n's K and V (k + n * stride, v + n * stride) into the pool. */
    void (*store)(struct device *device, const struct device_kv *kv, const struct device_step *step,
                  const float *k, const float *v, size_t stride);
    /* Copies the K and V rows of the step's tokens from `kv` to the pool at `to`, laid out alike.
     * On the copy queue. */
    void (*mirror)(struct device *device, const struct device_kv *kv,
                   const struct device_step *step, void *to);
    /* Causal attention of each token over [0, position]. q, out: [count, heads, head_dim]. */
    void (*attention)(struct device *device, const struct device_kv *kv,
                      const struct device_step *step, const float *q, size_t q_stride, float *out,
                      size_t out_stride, uint32_t heads, float scale);
    /* gate = silu(gate) * up, where gate is [count, width] and up lies `width` behind it. */
    void (*silu_mul)(struct device *device, float *gate_up, size_t stride, uint32_t count,
                     uint32_t width);

    /* ---- ranks. `library`: NULL for libnccl.so.2. ranks_id: rank 0 makes it, the leader carries
     * its bytes to the others. ranks_create: starts joining; ranks_wait until PENDING is over.
     * all_reduce: sums `count` values of F32 or BF16 in place on the compute queue, in the order in
     * which the plan's collectives were enqueued: never by a rank's own queue or clock. ranks_wait:
     * polls for an asynchronous error or the end of what was started. ranks_destroy: once nothing
     * is under way; past its limit it aborts. ---- */
    int (*ranks_id)(struct device *device, const char *library,
                    unsigned char id_out[DEVICE_RANKS_ID_BYTES], char *why, size_t why_cap);
    int (*ranks_create)(struct device *device, const char *library, const unsigned char *id,
                        uint32_t rank, uint32_t count, struct device_ranks **ranks_out, char *why,
                        size_t why_cap);
    enum device_ranks_result (*ranks_wait)(struct device_ranks *ranks, uint32_t limit_ms, char *why,
                                           size_t why_cap);
    enum device_ranks_result (*all_reduce)(struct device_ranks *ranks, void *values,
                                           enum kernels_dtype dtype, uint64_t count, char *why,
                                           size_t why_cap);
    void (*ranks_abort)(struct device_ranks *ranks);
    void (*ranks_destroy)(struct device_ranks *ranks, uint32_t limit_ms);
};

/* The one symbol of the shared object, by this name and type. */
typedef const struct device_table *(*device_table_fn)(void);
#define DEVICE_TABLE_SYMBOL "baton_device_table"

#ifdef __cplusplus
}
#endif

#endif
