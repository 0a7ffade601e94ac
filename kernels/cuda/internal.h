/* The inside of the CUDA backend: one opened device, and what its files offer each other.
 *
 * device.cu has life, memory and order; kernels.cu the operations; product.cu the products by
 * cuBLAS; int8.cu those with I8 weights; ranks.cu the communicator. Only device.cu exports
 * anything. */
#ifndef KERNELS_CUDA_INTERNAL_H
#define KERNELS_CUDA_INTERNAL_H

#include <cublasLt.h>
#include <cuda_runtime.h>

#include "kernels/device.h"

#define SHAPES_MAX 64u
/* Rows of x that are rounded at a time for I8 weights: enough to fill a device with their product,
 * few enough to stay small beside the weights. */
#define ROUNDED_ROWS 512u

/* The chosen algorithm of one shape of matrix: always DEVICE_TILE rows of x (three parts of each
 * for BF16). */
struct shape {
    enum kernels_dtype dtype;
    uint32_t rows; /* padded */
    uint32_t cols; /* padded */
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a;
    cublasLtMatrixLayout_t b;
    cublasLtMatrixLayout_t c;
    cublasLtMatmulAlgo_t algorithm;
};

struct device {
    struct device_info info;
    int index;
    cudaStream_t queues[2];
    cudaEvent_t marks[DEVICE_MARKS];
    cublasLtHandle_t blas;
    struct shape shapes[SHAPES_MAX];
    uint32_t shape_count;
    void *staged; /* one tile of x, as products take it; ROUNDED_ROWS rows for I8 */
    uint64_t staged_bytes;
    float *partial; /* one tile of results, before the parts are added */
    uint64_t partial_bytes;
    char failure[DEVICE_TEXT]; /* "": none */
};

/* Keeps the first failure. */
void device_fail(struct device *device, const char *what, cudaError_t error);
void device_fail_text(struct device *device, const char *what, const char *why);
/* Looks whether the last launch was accepted. */
void device_launched(struct device *device, const char *kernel);
/* Waits until the compute queue is empty. 0, or -1: failed, or not within the limit. */
int device_drain(struct device *device, uint32_t limit_ms);
void *device_alloc(struct device *device, uint64_t bytes);
void device_release(struct device *device, void *memory);
void *device_host_alloc(struct device *device, uint64_t bytes);
void device_host_release(struct device *device, void *memory);
void device_upload(struct device *device, void *to, const void *from, uint64_t bytes);
void device_download(struct device *device, void *to, const void *from, uint64_t bytes);

/* ---- kernels.cu ---- */
void kernel_embed(struct device *device, const struct device_matrix *matrix,
                  const struct device_step *step, float *x);
void kernel_rms_norm(struct device *device, float *out, size_t out_stride, const float *x,
                     size_t x_stride, const uint32_t *rows, const float *weight, uint32_t count,
                     uint32_t heads, uint32_t width, float epsilon);
void kernel_add(struct device *device, float *out, size_t out_stride, const float *x,
                size_t x_stride, uint32_t count, uint32_t width);
void kernel_rotary(struct device *device, const struct device_step *step, float *x, size_t stride,
                   uint32_t heads, uint32_t head_dim);
void kernel_store(struct device *device, const struct device_kv *kv, const struct device_step *step,
                  const float *k, const float *v, size_t stride);
void kernel_mirror(struct device *device, const struct device_kv *kv,
                   const struct device_step *step, void *to);
void kernel_attention(struct device *device, const struct device_kv *kv,
                      const struct device_step *step, const float *q, size_t q_stride, float *out,
                      size_t out_stride, uint32_t heads, float scale);
void kernel_silu_mul(struct device *device, float *gate_up, size_t stride, uint32_t count,
                     uint32_t width);
/* Writes `count` rows of x into the staging tile: F32 as they are; BF16 as three parts, one below
 * the other, DEVICE_TILE rows each. Rows from count on and columns from cols on become zero. */
void kernel_stage(struct device *device, enum kernels_dtype dtype, const float *x, size_t x_stride,
                  uint32_t count, uint32_t cols, uint32_t cols_padded);
/* y[n, 0..rows) of `count` rows from the tile of results; the smallest part is added first. */
void kernel_combine(struct device *device, enum kernels_dtype dtype, float *y, size_t y_stride,
                    uint32_t count, uint32_t rows, uint32_t rows_padded);
/* Adds 1 to *different for each value of the tile of results that is not, bit by bit, what the
 * first row of its part has. */
void kernel_compare(struct device *device, enum kernels_dtype dtype, uint32_t rows_padded,
                    uint32_t *different);

/* ---- int8.cu ---- */
/* Rounds `count` rows of x, at most ROUNDED_ROWS, into `staged`: laid out as rows of an I8 matrix
 * of as many columns, so that both sides of a product are read alike. */
void kernel_round(struct device *device, const float *x, size_t x_stride, uint32_t count,
                  uint32_t cols);
/* y[n, 0..rows) of the `count` rows in `staged`. */
void kernel_product_i8(struct device *device, const struct device_matrix *matrix, float *y,
                       size_t y_stride, uint32_t count);

/* ---- product.cu ---- */
int product_prepare(struct device *device, enum kernels_dtype dtype, uint32_t rows, uint32_t cols,
                    uint32_t limit_ms, char *why, size_t why_cap);
void product_run(struct device *device, const struct device_matrix *matrix, const float *x,
                 size_t x_stride, float *y, size_t y_stride, uint32_t count);
void product_close(struct device *device);

/* ---- ranks.cu ---- */
int ranks_id(struct device *device, const char *library, unsigned char *id_out, char *why,
             size_t why_cap);
int ranks_create(struct device *device, const char *library, const unsigned char *id, uint32_t rank,
                 uint32_t count, struct device_ranks **ranks_out, char *why, size_t why_cap);
enum device_ranks_result ranks_wait(struct device_ranks *ranks, uint32_t limit_ms, char *why,
                                    size_t why_cap);
enum device_ranks_result ranks_all_reduce(struct device_ranks *ranks, void *values,
                                          enum kernels_dtype dtype, uint64_t count, char *why,
                                          size_t why_cap);
void ranks_abort(struct device_ranks *ranks);
void ranks_destroy(struct device_ranks *ranks, uint32_t limit_ms);

#endif
