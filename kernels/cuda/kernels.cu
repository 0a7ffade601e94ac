#include "kernels/cuda/internal.h"

#include "kernels/convert.h"
#include "kernels/cuda/block.h"

#include <math.h>

/* Built without contraction: a product and a sum are rounded one by one, as in the C oracle. */

#define ROW_THREADS 128u /* of kernels that share a row */

static __device__ float read_value(const void *values, enum kernels_dtype dtype, size_t i) {
    return dtype == KERNELS_F32 ? ((const float *)values)[i]
                                : convert_from_bf16(((const uint16_t *)values)[i]);
}

/* Byte offset of token n's row from the pool's base, without the component's own. */
static __device__ uint64_t row_place(const struct device_kv &kv, const struct device_step &step,
                                     uint32_t first_page, uint32_t position) {
    uint32_t page = step.pages[first_page + position / kv.page_tokens];
    return page * kv.page_bytes + (position % kv.page_tokens) * kv.row_bytes;
}

/* ---- rows ---- */

/* numbers: what a row of I8 has before its scales. */
__global__ static void embed_rows(struct device_matrix matrix, uint32_t row_bytes, uint32_t numbers,
                                  const uint32_t *tokens, float *x) {
    const unsigned char *from =
        (const unsigned char *)matrix.data + (size_t)tokens[blockIdx.x] * row_bytes;
    const float *scales = (const float *)(from + numbers);
    float *to = x + (size_t)blockIdx.x * matrix.cols;
    EACH_THREAD(t) {
        for (uint32_t i = t; i < matrix.cols; i += blockDim.x) {
            to[i] = matrix.dtype == KERNELS_I8
                        ? scales[i / KERNELS_GROUP] * (float)((const int8_t *)from)[i]
                        : read_value(from, matrix.dtype, i);
        }
    }
}

__global__ static void norm_rows(float *out, size_t out_stride, const float *x, size_t x_stride,
                                 const uint32_t *rows, const float *weight, uint32_t width,
                                 float epsilon) {
    __shared__ float squares[ROW_THREADS];
    size_t row = rows != NULL ? rows[blockIdx.x] : blockIdx.x;
    const float *from = x + row * x_stride + (size_t)blockIdx.y * width;
    float *to = out + blockIdx.x * out_stride + (size_t)blockIdx.y * width;
    EACH_THREAD(t) {
        float sum = 0.0f;
        for (uint32_t i = t; i < width; i += ROW_THREADS) {
            sum += from[i] * from[i];
        }
        squares[t] = sum;
    }
    for (uint32_t half = ROW_THREADS / 2; half > 0; half /= 2) {
        BLOCK_SYNC();
        EACH_THREAD(t) {
            if (t < half) {
                squares[t] += squares[t + half];
            }
        }
    }
    BLOCK_SYNC();
    float scale = 1.0f / sqrtf(squares[0] / (float)width + epsilon);
    EACH_THREAD(t) {
        for (uint32_t i = t; i < width; i += ROW_THREADS) {
            to[i] = from[i] * scale * weight[i];
        }
    }
}

__global__ static void add_rows(float *out, size_t out_stride, const float *x, size_t x_stride,
                                uint32_t width) {
    float *to = out + blockIdx.x * out_stride;
    const float *from = x + blockIdx.x * x_stride;
    EACH_THREAD(t) {
        for (uint32_t i = t; i < width; i += blockDim.x) {
            to[i] += from[i];
        }
    }
}

__global__ static void rotary_rows(struct device_step step, float *x, size_t stride, uint32_t heads,
                                   uint32_t half) {
    float *row = x + blockIdx.x * stride;
    const float *cosine = step.cosine + (size_t)blockIdx.x * half;
    const float *sine = step.sine + (size_t)blockIdx.x * half;
    EACH_THREAD(t) {
        for (uint32_t i = t; i < heads * half; i += blockDim.x) {
            uint32_t pair = i % half;
            float *low = row + (size_t)(i / half) * 2 * half + pair;
            float a = low[0];
            float b = low[half];
            low[0] = a * cosine[pair] - b * sine[pair];
            low[half] = b * cosine[pair] + a * sine[pair];
        }
    }
}

__global__ static void silu_rows(float *gate_up, size_t stride, uint32_t width) {
    float *gate = gate_up + blockIdx.x * stride;
    const float *up = gate + width;
    EACH_THREAD(t) {
        for (uint32_t i = t; i < width; i += blockDim.x) {
            gate[i] = gate[i] / (1.0f + convert_exp(-gate[i])) * up[i];
        }
    }
}

/* ---- the pool ---- */

__global__ static void store_rows(struct device_kv kv, struct device_step step, const float *k,
                                  const float *v, size_t stride) {
    uint32_t n = blockIdx.x;
    bool is_value = blockIdx.y != 0;
    unsigned char *row = (unsigned char *)kv.base + (is_value ? kv.v_offset : kv.k_offset) +
                         row_place(kv, step, step.page_first[n], step.positions[n]);
    const float *from = (is_value ? v : k) + n * stride;
    EACH_THREAD(t) {
        for (uint32_t i = t; i < kv.kv_heads * kv.head_dim; i += blockDim.x) {
            if (kv.dtype == KERNELS_F32) {
                ((float *)row)[i] = from[i];
            } else {
                ((uint16_t *)row)[i] = convert_to_bf16(from[i]);
            }
        }
    }
}

/* Words go out in order, so that each warp's stores are one transfer on the bus. */
__global__ static void mirror_rows(struct device_kv kv, struct device_step step,
                                   unsigned char *to_base) {
    uint32_t n = blockIdx.x;
    uint64_t offset = (blockIdx.y != 0 ? kv.v_offset : kv.k_offset) +
                      row_place(kv, step, step.page_first[n], step.positions[n]);
    const uint32_t *from = (const uint32_t *)((const unsigned char *)kv.base + offset);
    uint32_t *to = (uint32_t *)(to_base + offset);
    EACH_THREAD(t) {
        for (uint32_t i = t; i < kv.row_bytes / 4; i += blockDim.x) {
            to[i] = from[i];
        }
    }
}

/* ---- attention ---- */

#define DIM_USUAL 256u

/* One block of threads is one head of one token; DIM_MAX is room for it in shared memory, and the
 * less a block has of it, the more of them run at once. Thread t scores the t-th token of a block
 * of positions, then sums the values of dimensions t, t + 64, ... : every chain runs upwards, and
 * blocks are merged in order, as in the oracle. */
template <uint32_t DIM_MAX>
__global__ static void attention_rows(struct device_kv kv, struct device_step step, const float *q,
                                      size_t q_stride, float *out, size_t out_stride,
                                      uint32_t group, float scale) {
    __shared__ float query[DIM_MAX];
    __shared__ float mixed[DIM_MAX];
    __shared__ float score[KERNELS_ATTENTION_BLOCK];
    __shared__ float weight[KERNELS_ATTENTION_BLOCK];
    uint32_t dim = kv.head_dim;
    uint32_t length = step.positions[blockIdx.x] + 1;
    uint32_t first_page = step.page_first[blockIdx.x];
    size_t head = (size_t)blockIdx.y * dim;
    size_t kv_head = (size_t)(blockIdx.y / group) * dim;
    const unsigned char *k_base = (const unsigned char *)kv.base + kv.k_offset;
    const unsigned char *v_base = (const unsigned char *)kv.base + kv.v_offset;
    EACH_THREAD(t) {
        for (uint32_t i = t; i < dim; i += KERNELS_ATTENTION_BLOCK) {
            query[i] = q[blockIdx.x * q_stride + head + i];
            mixed[i] = 0.0f;
        }
    }
    float largest = -INFINITY;
    float total = 0.0f;
    for (uint32_t first = 0; first < length; first += KERNELS_ATTENTION_BLOCK) {
        uint32_t count = length - first;
        count = count < KERNELS_ATTENTION_BLOCK ? count : KERNELS_ATTENTION_BLOCK;
        BLOCK_SYNC();
        EACH_THREAD(t) {
            if (t < count) {
                const unsigned char *k = k_base + row_place(kv, step, first_page, first + t);
                float sum = 0.0f;
                for (uint32_t i = 0; i < dim; i++) {
                    sum += query[i] * read_value(k, kv.dtype, kv_head + i);
                }
                score[t] = sum * scale;
            }
        }
        BLOCK_SYNC();
        float merged = largest;
        for (uint32_t t = 0; t < count; t++) {
            merged = score[t] > merged ? score[t] : merged;
        }
        float keep = convert_exp(largest - merged); /* the first block keeps nothing: e^-inf is 0 */
        EACH_THREAD(t) {
            if (t < count) {
                weight[t] = convert_exp(score[t] - merged);
            }
        }
        BLOCK_SYNC();
        float sum = 0.0f;
        for (uint32_t t = 0; t < count; t++) {
            sum += weight[t];
        }
        EACH_THREAD(t) {
            for (uint32_t i = t; i < dim; i += KERNELS_ATTENTION_BLOCK) {
                float value = 0.0f;
                for (uint32_t n = 0; n < count; n++) {
                    const unsigned char *v = v_base + row_place(kv, step, first_page, first + n);
                    value += weight[n] * read_value(v, kv.dtype, kv_head + i);
                }
                mixed[i] = mixed[i] * keep + value;
            }
        }
        total = total * keep + sum;
        largest = merged;
    }
    EACH_THREAD(t) {
        for (uint32_t i = t; i < dim; i += KERNELS_ATTENTION_BLOCK) {
            out[blockIdx.x * out_stride + head + i] = mixed[i] / total;
        }
    }
}

/* ---- around a product ---- */

/* x = high + middle + low exactly: each part takes the next eight bits of the 24. */
__global__ static void stage_bf16(uint16_t *to, const float *x, size_t x_stride, uint32_t count,
                                  uint32_t cols, uint32_t cols_padded) {
    uint32_t row = blockIdx.x;
    size_t part = (size_t)DEVICE_TILE * cols_padded;
    EACH_THREAD(t) {
        for (uint32_t i = t; i < cols_padded; i += blockDim.x) {
            float left = row < count && i < cols ? x[row * x_stride + i] : 0.0f;
            size_t at = (size_t)row * cols_padded + i;
            for (uint32_t p = 0; p < 3; p++) {
                uint16_t half = convert_to_bf16(left);
                to[p * part + at] = half;
                left = left - convert_from_bf16(half);
            }
        }
    }
}

__global__ static void stage_f32(float *to, const float *x, size_t x_stride, uint32_t count,
                                 uint32_t cols, uint32_t cols_padded) {
    uint32_t row = blockIdx.x;
    EACH_THREAD(t) {
        for (uint32_t i = t; i < cols_padded; i += blockDim.x) {
            to[(size_t)row * cols_padded + i] =
                row < count && i < cols ? x[row * x_stride + i] : 0.0f;
        }
    }
}

__global__ static void combine_rows(float *y, size_t y_stride, const float *partial, uint32_t parts,
                                    uint32_t rows, uint32_t rows_padded) {
    size_t row = (size_t)blockIdx.x * rows_padded;
    size_t part = (size_t)DEVICE_TILE * rows_padded;
    EACH_THREAD(t) {
        for (uint32_t i = t; i < rows; i += blockDim.x) {
            float sum = partial[(parts - 1) * part + row + i];
            for (uint32_t p = parts - 1; p > 0; p--) {
                sum += partial[(p - 1) * part + row + i];
            }
            y[blockIdx.x * y_stride + i] = sum;
        }
    }
}

__global__ static void compare_rows(const float *partial, uint32_t rows_padded,
                                    uint32_t *different) {
    const float *row = partial + (size_t)blockIdx.x * rows_padded;
    const float *first = partial + (size_t)(blockIdx.x / DEVICE_TILE * DEVICE_TILE) * rows_padded;
    EACH_THREAD(t) {
        for (uint32_t i = t; i < rows_padded; i += blockDim.x) {
            if (convert_to_bits(row[i]) != convert_to_bits(first[i])) {
                atomicAdd(different, 1u);
            }
        }
    }
}

/* ---- launches ---- */

void kernel_embed(struct device *device, const struct device_matrix *matrix,
                  const struct device_step *step, float *x) {
    if (step->count == 0) {
        return;
    }
    LAUNCH(device->queues[DEVICE_COMPUTE], step->count, ROW_THREADS, embed_rows, *matrix,
           device_row_bytes(matrix->dtype, matrix->cols),
           kernels_groups(matrix->cols) * KERNELS_GROUP, step->tokens, x);
    device_launched(device, "embed");
}

void kernel_rms_norm(struct device *device, float *out, size_t out_stride, const float *x,
                     size_t x_stride, const uint32_t *rows, const float *weight, uint32_t count,
                     uint32_t heads, uint32_t width, float epsilon) {
    if (count == 0) {
        return;
    }
    LAUNCH(device->queues[DEVICE_COMPUTE], dim3(count, heads), ROW_THREADS, norm_rows, out,
           out_stride, x, x_stride, rows, weight, width, epsilon);
    device_launched(device, "rms_norm");
}

void kernel_add(struct device *device, float *out, size_t out_stride, const float *x,
                size_t x_stride, uint32_t count, uint32_t width) {
    if (count == 0) {
        return;
    }
    LAUNCH(device->queues[DEVICE_COMPUTE], count, ROW_THREADS, add_rows, out, out_stride, x,
           x_stride, width);
    device_launched(device, "add");
}

void kernel_rotary(struct device *device, const struct device_step *step, float *x, size_t stride,
                   uint32_t heads, uint32_t head_dim) {
    if (step->count == 0) {
        return;
    }
    LAUNCH(device->queues[DEVICE_COMPUTE], step->count, ROW_THREADS, rotary_rows, *step, x, stride,
           heads, head_dim / 2);
    device_launched(device, "rotary");
}

void kernel_store(struct device *device, const struct device_kv *kv, const struct device_step *step,
                  const float *k, const float *v, size_t stride) {
    if (step->count == 0) {
        return;
    }
    LAUNCH(device->queues[DEVICE_COMPUTE], dim3(step->count, 2), ROW_THREADS, store_rows, *kv,
           *step, k, v, stride);
    device_launched(device, "store");
}

void kernel_mirror(struct device *device, const struct device_kv *kv,
                   const struct device_step *step, void *to) {
    if (step->count == 0) {
        return;
    }
    LAUNCH(device->queues[DEVICE_COPY], dim3(step->count, 2), ROW_THREADS, mirror_rows, *kv, *step,
           (unsigned char *)to);
    device_launched(device, "mirror");
}

void kernel_attention(struct device *device, const struct device_kv *kv,
                      const struct device_step *step, const float *q, size_t q_stride, float *out,
                      size_t out_stride, uint32_t heads, float scale) {
    if (step->count == 0) {
        return;
    }
    auto *rows =
        kv->head_dim <= DIM_USUAL ? attention_rows<DIM_USUAL> : attention_rows<DEVICE_HEAD_DIM_MAX>;
    LAUNCH(device->queues[DEVICE_COMPUTE], dim3(step->count, heads), KERNELS_ATTENTION_BLOCK, rows,
           *kv, *step, q, q_stride, out, out_stride, heads / kv->kv_heads, scale);
    device_launched(device, "attention");
}

void kernel_silu_mul(struct device *device, float *gate_up, size_t stride, uint32_t count,
                     uint32_t width) {
    if (count == 0) {
        return;
    }
    LAUNCH(device->queues[DEVICE_COMPUTE], count, ROW_THREADS, silu_rows, gate_up, stride, width);
    device_launched(device, "silu_mul");
}

void kernel_stage(struct device *device, enum kernels_dtype dtype, const float *x, size_t x_stride,
                  uint32_t count, uint32_t cols, uint32_t cols_padded) {
    if (dtype == KERNELS_F32) {
        LAUNCH(device->queues[DEVICE_COMPUTE], DEVICE_TILE, ROW_THREADS, stage_f32,
               (float *)device->staged, x, x_stride, count, cols, cols_padded);
    } else {
        LAUNCH(device->queues[DEVICE_COMPUTE], DEVICE_TILE, ROW_THREADS, stage_bf16,
               (uint16_t *)device->staged, x, x_stride, count, cols, cols_padded);
    }
    device_launched(device, "stage");
}

void kernel_combine(struct device *device, enum kernels_dtype dtype, float *y, size_t y_stride,
                    uint32_t count, uint32_t rows, uint32_t rows_padded) {
    LAUNCH(device->queues[DEVICE_COMPUTE], count, ROW_THREADS, combine_rows, y, y_stride,
           device->partial, dtype == KERNELS_F32 ? 1u : 3u, rows, rows_padded);
    device_launched(device, "combine");
}

void kernel_compare(struct device *device, enum kernels_dtype dtype, uint32_t rows_padded,
                    uint32_t *different) {
    LAUNCH(device->queues[DEVICE_COMPUTE], (dtype == KERNELS_F32 ? 1u : 3u) * DEVICE_TILE,
           ROW_THREADS, compare_rows, device->partial, rows_padded, different);
    device_launched(device, "compare");
}
