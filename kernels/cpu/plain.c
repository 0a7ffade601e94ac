/* The oracle: every operation in plain C, one obvious loop each, in the order that kernels.h
 * promises. Built without contraction, so the same bits come out of every compiler and CPU. */
#include "kernels/cpu/tables.h"

#include "kernels/convert.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

static void widen_column(float *to, const struct kernels_weights *weights, size_t panel,
                         uint32_t k) {
    if (weights->dtype == KERNELS_F32) {
        size_t first = (panel * weights->cols + k) * KERNELS_PANEL;
        memcpy(to, (const float *)weights->data + first, KERNELS_PANEL * sizeof(float));
        return;
    }
    size_t pair = panel * kernels_halves(weights->cols) / 2 + k / 2;
    const uint16_t *pairs = (const uint16_t *)weights->data + pair * KERNELS_PANEL * 2;
    for (uint32_t j = 0; j < KERNELS_PANEL; j++) {
        to[j] = convert_from_bf16(pairs[j * 2 + k % 2]);
    }
}

static void plain_quantize(const struct kernels_quants *to, uint32_t row, const float *x,
                           uint32_t cols) {
    uint32_t groups = kernels_groups(cols);
    for (uint32_t group = 0; group < groups; group++) {
        int8_t *numbers = to->numbers + ((size_t)row * groups + group) * KERNELS_GROUP;
        float values[KERNELS_GROUP] = {0};
        uint32_t count = cols - group * KERNELS_GROUP;
        count = count < KERNELS_GROUP ? count : KERNELS_GROUP;
        memcpy(values, x + (size_t)group * KERNELS_GROUP, count * sizeof(float));
        to->scales[(size_t)row * groups + group] = convert_to_i8(numbers, values, KERNELS_GROUP);
        int32_t sum = 0;
        for (uint32_t i = 0; i < KERNELS_GROUP; i++) {
            sum += numbers[i];
        }
        to->offsets[(size_t)row * groups + group] = -128 * sum;
    }
}

static void plain_gemm_i8(const struct kernels_gemm *gemm, uint32_t panel_first,
                          uint32_t panel_end) {
    uint32_t groups = kernels_groups(gemm->weights->cols);
    for (uint32_t panel = panel_first; panel < panel_end; panel++) {
        for (uint32_t row = 0; row < gemm->count; row++) {
            float *y = gemm->y + row * gemm->y_stride + (size_t)panel * KERNELS_PANEL;
            memset(y, 0, KERNELS_PANEL * sizeof(float));
            for (uint32_t group = 0; group < groups; group++) {
                size_t at = (size_t)row * groups + group;
                const int8_t *x = gemm->quants.numbers + at * KERNELS_GROUP;
                const unsigned char *w = (const unsigned char *)gemm->weights->data +
                                         ((size_t)panel * groups + group) * KERNELS_GROUP_BYTES;
                const unsigned char *numbers = w + KERNELS_PANEL * sizeof(float);
                for (uint32_t j = 0; j < KERNELS_PANEL; j++) {
                    int32_t sum = gemm->quants.offsets[at];
                    for (uint32_t i = 0; i < KERNELS_GROUP; i++) {
                        sum += numbers[((size_t)(i / 4) * KERNELS_PANEL + j) * 4 + i % 4] * x[i];
                    }
                    float scale;
                    memcpy(&scale, w + j * sizeof(float), sizeof(scale));
                    y[j] = fmaf((float)sum, scale * gemm->quants.scales[at], y[j]);
                }
            }
        }
    }
}

static void plain_gemm(const struct kernels_gemm *gemm, uint32_t panel_first, uint32_t panel_end) {
    if (gemm->weights->dtype == KERNELS_I8) {
        plain_gemm_i8(gemm, panel_first, panel_end);
        return;
    }
    uint32_t cols = gemm->weights->cols;
    for (uint32_t panel = panel_first; panel < panel_end; panel++) {
        for (uint32_t row = 0; row < gemm->count; row++) {
            const float *x = gemm->x + row * gemm->x_stride;
            float sum[KERNELS_PANEL] = {0};
            for (uint32_t k = 0; k < cols; k++) {
                float column[KERNELS_PANEL];
                widen_column(column, gemm->weights, panel, k);
                for (uint32_t j = 0; j < KERNELS_PANEL; j++) {
                    sum[j] += column[j] * x[k];
                }
            }
            memcpy(gemm->y + row * gemm->y_stride + (size_t)panel * KERNELS_PANEL, sum,
                   sizeof(sum));
        }
    }
}

static void plain_rms_norm(float *out, const float *x, const float *weight, uint32_t width,
                           float epsilon) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < width; i++) {
        sum += x[i] * x[i];
    }
    float scale = 1.0f / sqrtf(sum / (float)width + epsilon);
    for (uint32_t i = 0; i < width; i++) {
        out[i] = x[i] * scale * weight[i];
    }
}

static void plain_rotary(float *x, const float *cosine, const float *sine, uint32_t heads,
                         uint32_t head_dim) {
    uint32_t half = head_dim / 2;
    for (uint32_t head = 0; head < heads; head++) {
        float *low = x + (size_t)head * head_dim;
        float *high = low + half;
        for (uint32_t i = 0; i < half; i++) {
            float a = low[i];
            float b = high[i];
            low[i] = a * cosine[i] - b * sine[i];
            high[i] = b * cosine[i] + a * sine[i];
        }
    }
}

static void plain_silu_mul(float *out, const float *gate, const float *up, size_t count) {
    for (size_t i = 0; i < count; i++) {
        out[i] = gate[i] / (1.0f + convert_exp(-gate[i])) * up[i];
    }
}

static void plain_add(float *out, const float *x, size_t count) {
    for (size_t i = 0; i < count; i++) {
        out[i] += x[i];
    }
}

static void plain_widen(float *to, const void *from, enum kernels_dtype dtype, size_t count) {
    const unsigned char *bytes = from;
    if (dtype == KERNELS_F32) {
        memcpy(to, from, count * sizeof(float));
        return;
    }
    for (size_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, bytes + i * 2, 2);
        to[i] = dtype == KERNELS_BF16 ? convert_from_bf16(half) : convert_from_f16(half);
    }
}

static void plain_store(void *to, enum kernels_dtype dtype, const float *from, size_t count) {
    if (dtype == KERNELS_F32) {
        memcpy(to, from, count * sizeof(float));
        return;
    }
    uint16_t *halves = to;
    for (size_t i = 0; i < count; i++) {
        halves[i] = convert_to_bf16(from[i]);
    }
}

static float plain_kv(const unsigned char *row, enum kernels_dtype dtype, size_t i) {
    if (dtype == KERNELS_F32) {
        return ((const float *)(const void *)row)[i];
    }
    return convert_from_bf16(((const uint16_t *)(const void *)row)[i]);
}

static const unsigned char *plain_row(const struct kernels_attention *a, uint64_t offset,
                                      uint32_t token) {
    return a->base + (uint64_t)a->pages[token / a->page_tokens] * a->page_bytes + offset +
           (uint64_t)(token % a->page_tokens) * a->row_bytes;
}

static void plain_attention_head(const struct kernels_attention *a, uint32_t head) {
    uint32_t dim = a->head_dim;
    size_t kv_first = (size_t)(head / (a->heads / a->kv_heads)) * dim;
    const float *q = a->q + (size_t)head * dim;
    float *out = a->out + (size_t)head * dim;
    float largest = -INFINITY;
    float total = 0.0f;
    memset(out, 0, dim * sizeof(float));
    for (uint32_t first = 0; first < a->length; first += KERNELS_ATTENTION_BLOCK) {
        uint32_t count = a->length - first;
        count = count < KERNELS_ATTENTION_BLOCK ? count : KERNELS_ATTENTION_BLOCK;
        float score[KERNELS_ATTENTION_BLOCK];
        float block_largest = -INFINITY;
        for (uint32_t t = 0; t < count; t++) {
            const unsigned char *k = plain_row(a, a->k_offset, first + t);
            float sum = 0.0f;
            for (uint32_t i = 0; i < dim; i++) {
                sum += q[i] * plain_kv(k, a->kv_dtype, kv_first + i);
            }
            score[t] = sum * a->scale;
            block_largest = score[t] > block_largest ? score[t] : block_largest;
        }
        float merged = block_largest > largest ? block_largest : largest;
        float keep = convert_exp(largest - merged); /* the first block keeps nothing: e^-inf is 0 */
        float sum = 0.0f;
        for (uint32_t t = 0; t < count; t++) {
            score[t] = convert_exp(score[t] - merged);
            sum += score[t];
        }
        for (uint32_t i = 0; i < dim; i++) {
            float value = 0.0f;
            for (uint32_t t = 0; t < count; t++) {
                const unsigned char *v = plain_row(a, a->v_offset, first + t);
                value += score[t] * plain_kv(v, a->kv_dtype, kv_first + i);
            }
            out[i] = out[i] * keep + value;
        }
        total = total * keep + sum;
        largest = merged;
    }
    for (uint32_t i = 0; i < dim; i++) {
        out[i] /= total;
    }
}

static void plain_attention(const struct kernels_attention *a, uint32_t kv_head_first,
                            uint32_t kv_head_end) {
    uint32_t group = a->heads / a->kv_heads;
    struct kernels_attention one = *a;
    for (uint32_t i = 0; i < a->tokens; i++) {
        one.q = a->q + i * a->q_stride;
        one.out = a->out + i * a->out_stride;
        one.length = a->length + i;
        for (uint32_t head = kv_head_first * group; head < kv_head_end * group; head++) {
            plain_attention_head(&one, head);
        }
    }
}

static double plain_exp(double x) {
    if (x != x) {
        return x;
    }
    if (x < EXP_LOWEST) {
        return 0.0;
    }
    if (x > EXP_HIGHEST) {
        return (double)INFINITY;
    }
    double n = (x * EXP_LOG2_E + EXP_SHIFT) - EXP_SHIFT;
    double r = x - n * EXP_LN_2;
    r -= n * EXP_LN_2_REST;
    static const double inverse_factorial[] = {EXP_FACTORS};
    double p = inverse_factorial[0];
    for (size_t i = 1; i < sizeof(inverse_factorial) / sizeof(inverse_factorial[0]); i++) {
        p = p * r + inverse_factorial[i];
    }
    p = 1.0 + (r + r * r * p);
    uint64_t bits = (uint64_t)((int64_t)n + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof(power));
    return p * power;
}
static void plain_exps(double *out, const float *x, size_t count, float largest,
                       float temperature) {
    for (size_t i = 0; i < count; i++) {
        out[i] = plain_exp(((double)x[i] - (double)largest) / (double)temperature);
    }
}

const struct kernels kernels_c = {
    .name = "c",
    .numerics = "c",
    .bf16_numerics = "c",
    .gemm = plain_gemm,
    .quantize = plain_quantize,
    .rms_norm = plain_rms_norm,
    .rotary = plain_rotary,
    .silu_mul = plain_silu_mul,
    .add = plain_add,
    .widen = plain_widen,
    .store = plain_store,
    .exps = plain_exps,
    .attention = plain_attention,
};
