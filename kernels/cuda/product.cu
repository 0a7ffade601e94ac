/* Products by cuBLAS, always in one shape for each matrix: DEVICE_TILE rows, padded with zeros.
 * Those with I8 weights are given to int8.cu.
 *
 * cuBLAS takes another kernel, and with it another order of adding, for another number of rows. So
 * the number is fixed, the algorithm is chosen once, and only algorithms are asked for that need no
 * workspace and no reduction across blocks: an element is then one chain over k in one block. That
 * the chain is the same at each place of the tile is not promised by the library, so it is tried on
 * the device, with these very matrices' shapes, before a worker serves. TF32 is off. */
#include "kernels/cuda/internal.h"

#include <stdio.h>
#include <string.h>

static uint32_t tile_rows(enum kernels_dtype dtype) {
    return dtype == KERNELS_F32 ? DEVICE_TILE : 3 * DEVICE_TILE;
}

static const struct shape *shape_find(const struct device *device, enum kernels_dtype dtype,
                                      uint32_t rows, uint32_t cols) {
    for (uint32_t i = 0; i < device->shape_count; i++) {
        const struct shape *shape = &device->shapes[i];
        if (shape->dtype == dtype && shape->rows == rows && shape->cols == cols) {
            return shape;
        }
    }
    return NULL;
}

/* Row-major y[n, rows] = x[n, cols] * w[rows, cols]^T is, column-major, y(rows, n) =
 * w(cols, rows)^T * x(cols, n). */
static cublasStatus_t shape_describe(struct shape *shape) {
    cudaDataType_t type = shape->dtype == KERNELS_F32 ? CUDA_R_32F : CUDA_R_16BF;
    cublasComputeType_t compute =
        shape->dtype == KERNELS_F32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
    cublasOperation_t transposed = CUBLAS_OP_T;
    uint32_t n = tile_rows(shape->dtype);
    cublasStatus_t status = cublasLtMatmulDescCreate(&shape->operation, compute, CUDA_R_32F);
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatmulDescSetAttribute(shape->operation, CUBLASLT_MATMUL_DESC_TRANSA,
                                                &transposed, sizeof(transposed));
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatrixLayoutCreate(&shape->a, type, shape->cols, shape->rows, shape->cols);
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatrixLayoutCreate(&shape->b, type, shape->cols, n, shape->cols);
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatrixLayoutCreate(&shape->c, CUDA_R_32F, shape->rows, n, shape->rows);
    }
    return status;
}

static cublasStatus_t shape_choose(const struct device *device, struct shape *shape) {
    cublasLtMatmulPreference_t preference = NULL;
    uint64_t workspace = 0;
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_NONE;
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    memset(&found, 0, sizeof(found));
    cublasStatus_t status = cublasLtMatmulPreferenceCreate(&preference);
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatmulPreferenceSetAttribute(
            preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace));
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatmulPreferenceSetAttribute(
            preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction, sizeof(reduction));
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatmulAlgoGetHeuristic(device->blas, shape->operation, shape->a, shape->b,
                                                shape->c, shape->c, preference, 1, &found, &count);
    }
    if (preference != NULL) {
        (void)cublasLtMatmulPreferenceDestroy(preference); /* nothing depends on it any more */
    }
    if (status == CUBLAS_STATUS_SUCCESS && count < 1) {
        status = CUBLAS_STATUS_NOT_SUPPORTED;
    }
    shape->algorithm = found.algo;
    return status;
}

static void shape_free(struct shape *shape) {
    if (shape->c != NULL) {
        (void)cublasLtMatrixLayoutDestroy(shape->c);
    }
    if (shape->b != NULL) {
        (void)cublasLtMatrixLayoutDestroy(shape->b);
    }
    if (shape->a != NULL) {
        (void)cublasLtMatrixLayoutDestroy(shape->a);
    }
    if (shape->operation != NULL) {
        (void)cublasLtMatmulDescDestroy(shape->operation);
    }
}

static int scratch_grow(struct device *device, void **memory, uint64_t *bytes, uint64_t needed) {
    if (*bytes >= needed) {
        return 0;
    }
    void *more = device_alloc(device, needed);
    if (more == NULL) {
        return -1;
    }
    device_release(device, *memory);
    *memory = more;
    *bytes = needed;
    return 0;
}

static void tile_run(struct device *device, const struct shape *shape, const void *matrix) {
    float one = 1.0f;
    float zero = 0.0f;
    cublasStatus_t status =
        cublasLtMatmul(device->blas, shape->operation, &one, matrix, shape->a, device->staged,
                       shape->b, &zero, device->partial, shape->c, device->partial, shape->c,
                       &shape->algorithm, NULL, 0, device->queues[DEVICE_COMPUTE]);
    if (status != CUBLAS_STATUS_SUCCESS) {
        device_fail_text(device, "cublasLtMatmul", cublasLtGetStatusName(status));
    }
}

/* One row of uneven numbers at each place of the tile, against a matrix of uneven numbers: all
 * results must agree bit by bit. Numbers are made on the host: rows of one prime and another. */
static int shape_prove(struct device *device, const struct shape *shape, uint32_t limit_ms,
                       char *why, size_t why_cap) {
    uint64_t elements = (uint64_t)shape->rows * shape->cols;
    uint32_t width = kernels_dtype_bytes(shape->dtype);
    uint32_t sample = shape->cols * width;
    unsigned char *host = (unsigned char *)device_host_alloc(device, sample + sizeof(uint32_t));
    unsigned char *matrix = (unsigned char *)device_alloc(device, elements * width);
    uint32_t *different = (uint32_t *)device_alloc(device, sizeof(uint32_t));
    int result = -1;
    if (host == NULL || matrix == NULL || different == NULL) {
        (void)snprintf(why, why_cap, "no room on the device to try a product of %u x %u",
                       shape->rows, shape->cols);
    } else {
        for (uint32_t k = 0; k < shape->cols; k++) {
            float value = ((float)(k * 7919u % 1009u) - 504.0f) / 331.0f;
            uint32_t bits;
            memcpy(&bits, &value, sizeof(bits));
            if (shape->dtype == KERNELS_F32) {
                memcpy(host + (size_t)k * 4, &bits, 4);
            } else {
                uint16_t half = (uint16_t)(bits >> 16);
                memcpy(host + (size_t)k * 2, &half, 2);
            }
        }
        for (uint32_t row = 0; row < shape->rows; row++) {
            device_upload(device, matrix + (size_t)row * sample, host, sample);
        }
        for (uint32_t row = 0; row < tile_rows(shape->dtype); row++) {
            device_upload(device, (unsigned char *)device->staged + (size_t)row * sample, host,
                          sample);
        }
        tile_run(device, shape, matrix);
        kernel_compare(device, shape->dtype, shape->rows, different);
        uint32_t *found = (uint32_t *)(void *)(host + sample);
        device_download(device, found, different, sizeof(*found));
        if (device_drain(device, limit_ms) != 0) {
            (void)snprintf(why, why_cap, "the device did not end a product of %u x %u: %s",
                           shape->rows, shape->cols, device->failure);
        } else if (*found != 0) {
            (void)snprintf(why, why_cap,
                           "cuBLAS adds up rows of one product of %u x %u in different orders "
                           "(%u values differ), so tokens would depend on what else runs",
                           shape->rows, shape->cols, *found);
        } else {
            result = 0;
        }
    }
    device_release(device, different);
    device_release(device, matrix);
    device_host_release(device, host);
    return result;
}

static uint64_t rounded_bytes(uint32_t cols) {
    return (uint64_t)ROUNDED_ROWS * device_row_bytes(KERNELS_I8, cols);
}

static int refuse_room(uint32_t rows, uint32_t cols, char *why, size_t why_cap) {
    (void)snprintf(why, why_cap, "no room on the device for products of %u x %u", rows, cols);
    return -1;
}

int product_prepare(struct device *device, enum kernels_dtype dtype, uint32_t rows, uint32_t cols,
                    uint32_t limit_ms, char *why, size_t why_cap) {
    if (dtype == KERNELS_I8) { /* its sums are exact: no order to choose, none to prove */
        int room =
            scratch_grow(device, &device->staged, &device->staged_bytes, rounded_bytes(cols));
        return room == 0 ? 0 : refuse_room(rows, cols, why, why_cap);
    }
    struct shape shape;
    memset(&shape, 0, sizeof(shape));
    shape.dtype = dtype;
    shape.rows = device_padded(rows);
    shape.cols = device_padded(cols);
    if (shape_find(device, dtype, shape.rows, shape.cols) != NULL) {
        return 0;
    }
    if ((dtype != KERNELS_F32 && dtype != KERNELS_BF16) || device->shape_count == SHAPES_MAX) {
        (void)snprintf(why, why_cap, "no product of type %d, shape %u of %u", (int)dtype,
                       device->shape_count + 1, SHAPES_MAX);
        return -1;
    }
    void *partial = device->partial;
    uint64_t tile = tile_rows(dtype);
    int room = scratch_grow(device, &device->staged, &device->staged_bytes,
                            tile * shape.cols * kernels_dtype_bytes(dtype));
    if (room == 0) {
        room = scratch_grow(device, &partial, &device->partial_bytes,
                            tile * shape.rows * sizeof(float));
        device->partial = (float *)partial;
    }
    if (room != 0) {
        return refuse_room(rows, cols, why, why_cap);
    }
    cublasStatus_t status = shape_describe(&shape);
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = shape_choose(device, &shape);
    }
    if (status != CUBLAS_STATUS_SUCCESS) {
        (void)snprintf(why, why_cap, "cuBLAS has no way to multiply %u x %u: %s", shape.rows,
                       shape.cols, cublasLtGetStatusName(status));
        shape_free(&shape);
        return -1;
    }
    if (shape_prove(device, &shape, limit_ms, why, why_cap) != 0) {
        shape_free(&shape);
        return -1;
    }
    device->shapes[device->shape_count++] = shape;
    return 0;
}

static void refuse_shape(struct device *device) {
    device_fail_text(device, "product", "a matrix of this shape was not prepared");
}

static void product_run_i8(struct device *device, const struct device_matrix *matrix,
                           const float *x, size_t x_stride, float *y, size_t y_stride,
                           uint32_t count) {
    if (device->staged_bytes < rounded_bytes(matrix->cols)) {
        refuse_shape(device);
        return;
    }
    for (uint32_t first = 0; first < count; first += ROUNDED_ROWS) {
        uint32_t some = count - first < ROUNDED_ROWS ? count - first : ROUNDED_ROWS;
        kernel_round(device, x + first * x_stride, x_stride, some, matrix->cols);
        kernel_product_i8(device, matrix, y + first * y_stride, y_stride, some);
    }
}

void product_run(struct device *device, const struct device_matrix *matrix, const float *x,
                 size_t x_stride, float *y, size_t y_stride, uint32_t count) {
    if (matrix->dtype == KERNELS_I8) {
        product_run_i8(device, matrix, x, x_stride, y, y_stride, count);
        return;
    }
    uint32_t rows = device_padded(matrix->rows);
    const struct shape *shape =
        shape_find(device, matrix->dtype, rows, device_padded(matrix->cols));
    if (shape == NULL) {
        refuse_shape(device);
        return;
    }
    for (uint32_t first = 0; first < count; first += DEVICE_TILE) {
        uint32_t some = count - first < DEVICE_TILE ? count - first : DEVICE_TILE;
        kernel_stage(device, matrix->dtype, x + first * x_stride, x_stride, some, matrix->cols,
                     shape->cols);
        tile_run(device, shape, matrix->data);
        kernel_combine(device, matrix->dtype, y + first * y_stride, y_stride, some, matrix->rows,
                       rows);
    }
}

void product_close(struct device *device) {
    for (uint32_t i = 0; i < device->shape_count; i++) {
        shape_free(&device->shapes[i]);
    }
    device->shape_count = 0;
    device_release(device, device->staged);
    device_release(device, device->partial);
    device->staged = NULL;
    device->partial = NULL;
}
