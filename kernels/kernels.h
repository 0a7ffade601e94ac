/* One backend table: every arithmetic operation the engine needs, each a pure function of memory.
 *
 * The rule that everything rests on: a result element is reduced in one fixed order, whatever
 * range, batch, tile or thread it is computed in. So matrix products run over k from 0 upwards in
 * one chain for each element, and attention is cut into blocks of KERNELS_ATTENTION_BLOCK tokens at
 * absolute positions, merged in order. Ranges (panels, heads, rows) let threads share one call.
 * The CPU backends, "c" (the oracle), "avx2", "avx512", "avx512bf16" and "amx", take the same
 * packed weights; all but "c" give the same bits, but for products of the last two with BF16
 * weights, which have an order of their own in each. All entries but `round` are present in every
 * CPU table. Nothing here allocates, blocks or fails. */
#ifndef KERNELS_KERNELS_H
#define KERNELS_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KERNELS_VERSION         1u  /* raised by every change that may change one bit of a result */
#define KERNELS_PANEL           16u /* outputs of one panel of packed weights */
#define KERNELS_ATTENTION_BLOCK 64u

enum kernels_dtype {
    KERNELS_F32 = 1,
    KERNELS_F16 = 2, /* only as a source of weights_pack and in widen */
    KERNELS_BF16 = 3,
    KERNELS_I8 = 4, /* weights only: whole numbers in [-127, 127] with a scale for each group */
};

/* Columns that share a scale, in weights and in the activations that meet them. */
#define KERNELS_GROUP 64u
/* A panel's group: scales (F32) of its 16 rows, then 16 quads of columns, each 16 rows times 4
 * bytes that hold the number plus 128. */
#define KERNELS_GROUP_BYTES (KERNELS_PANEL * 4 + KERNELS_PANEL * KERNELS_GROUP)

/* Columns of BF16 weights come in whole blocks of this many, zeros behind the last. */
#define KERNELS_HALVES 32u

/* A matrix [rows, cols] packed into panels of 16 rows. F32: for each panel, for each column, 16
 * values. BF16: for each panel, for each two columns, 16 pairs of values. I8: for each panel, its
 * groups in order. The rows of the last panel are padded with zeros. */
struct kernels_weights {
    enum kernels_dtype dtype; /* F32, BF16 or I8 */
    uint32_t rows;
    uint32_t cols;
    void *data; /* kernels_weights_bytes, 64-aligned */
};

static inline uint32_t kernels_panels(uint32_t rows) {
    return (rows + KERNELS_PANEL - 1) / KERNELS_PANEL;
}

/* Columns of BF16 weights with their padding. */
static inline uint32_t kernels_halves(uint32_t cols) {
    return (cols + KERNELS_HALVES - 1) / KERNELS_HALVES * KERNELS_HALVES;
}

static inline uint32_t kernels_groups(uint32_t cols) {
    return (cols + KERNELS_GROUP - 1) / KERNELS_GROUP;
}

/* Rows of activations as I8 weights take them: of each group, the numbers, what one of them stands
 * for, and -128 times their sum (which undoes the 128 that is added to each weight). */
struct kernels_quants {
    int8_t *numbers;  /* [count, groups * KERNELS_GROUP], 64-aligned; zeros behind cols */
    float *scales;    /* [count, groups] */
    int32_t *offsets; /* [count, groups] */
};

/* y = x * weights^T for `count` rows of x. With I8 weights, of each group the sum of the products
 * is exact and so independent of any order; groups are added upwards in one chain of
 * y = fma(sum, weight scale * x scale, y). */
struct kernels_gemm {
    const struct kernels_weights *weights;
    const float *x; /* [count, cols], rows x_stride apart; not read with I8 weights */
    size_t x_stride;
    float *y; /* [count, panels * 16], rows y_stride apart; the padding is written (zeros) */
    size_t y_stride;
    uint32_t count;               /* any, also 0 */
    struct kernels_quants quants; /* only read, and only with I8 weights */
    /* [count, kernels_halves(cols)]: x as `round` writes it; only read with BF16 weights by a
     * backend that has `round`, which does not read x then. */
    const uint16_t *halves;
};

/* The same product of `count` rows from `first` on. */
static inline struct kernels_gemm kernels_gemm_rows(const struct kernels_gemm *gemm, uint32_t first,
                                                    uint32_t count) {
    struct kernels_gemm rows = *gemm;
    size_t groups = kernels_groups(gemm->weights->cols);
    rows.count = count;
    rows.y += first * gemm->y_stride;
    if (gemm->weights->dtype == KERNELS_I8) {
        rows.quants.numbers += first * groups * KERNELS_GROUP;
        rows.quants.scales += first * groups;
        rows.quants.offsets += first * groups;
        return rows;
    }
    rows.x += first * gemm->x_stride;
    if (gemm->halves != NULL) {
        rows.halves += (size_t)first * kernels_halves(gemm->weights->cols);
    }
    return rows;
}

/* Attention of neighbouring tokens of one sequence over its paged KV rows: token i over
 * [0, length + i). */
struct kernels_attention {
    const float *q; /* [tokens] of [heads, head_dim], q_stride apart */
    size_t q_stride;
    float *out; /* [tokens] of [heads, head_dim], out_stride apart */
    size_t out_stride;
    uint32_t tokens;           /* >= 1 */
    const unsigned char *base; /* the pool */
    uint64_t page_bytes;
    uint64_t k_offset; /* of this layer's K and V rows from the start of a page */
    uint64_t v_offset;
    uint64_t row_bytes;    /* kv_heads * head_dim values of kv_dtype */
    const uint32_t *pages; /* page of each page_tokens positions */
    uint32_t page_tokens;
    uint32_t length; /* of the first token; >= 1 */
    uint32_t heads;  /* a multiple of kv_heads */
    uint32_t kv_heads;
    uint32_t head_dim;
    enum kernels_dtype kv_dtype; /* F32 or BF16 */
    float scale;                 /* multiplies q.k */
};

struct kernels {
    const char *name;
    const char *numerics;      /* backends that share it give the same bits */
    const char *bf16_numerics; /* the same for models with BF16 weights */

    /* Computes the outputs of panels [panel_first, panel_end) in all rows. */
    void (*gemm)(const struct kernels_gemm *gemm, uint32_t panel_first, uint32_t panel_end);

    /* Writes to[kernels_halves(cols)] from x[cols]: the nearest BF16 values, ties to even, NaN
     * stays NaN, zeros behind. NULL where products with BF16 weights take x as it is. */
    void (*round)(uint16_t *to, const float *x, uint32_t cols);

    /* Writes row `row` of `to` from x[cols]. A group's scale is its largest magnitude / 127;
     * numbers are rounded to nearest, ties to even. A group with a value that is not finite gets
     * the scale NaN. All backends give the same bits. */
    void (*quantize)(const struct kernels_quants *to, uint32_t row, const float *x, uint32_t cols);

    /* out[i] = x[i] / sqrt(mean(x^2) + epsilon) * weight[i] for one row; out may be x. width >= 1.
     */
    void (*rms_norm)(float *out, const float *x, const float *weight, uint32_t width,
                     float epsilon);

    /* Rotates `heads` consecutive heads in place; pairs are (i, i + head_dim / 2), head_dim even.
     * cosine, sine: [head_dim / 2] of the token's position. */
    void (*rotary)(float *x, const float *cosine, const float *sine, uint32_t heads,
                   uint32_t head_dim);

    /* out[i] = gate[i] / (1 + e^-gate[i]) * up[i]; out may be gate or up. */
    void (*silu_mul)(float *out, const float *gate, const float *up, size_t count);

    /* out[i] += x[i]. */
    void (*add)(float *out, const float *x, size_t count);

    /* to[i] = from[i] of any dtype, exactly (embedding rows, norms). */
    void (*widen)(float *to, const void *from, enum kernels_dtype dtype, size_t count);

    /* Writes one KV row: F32 copied, BF16 rounded to nearest even (NaN stays NaN). */
    void (*store)(void *to, enum kernels_dtype dtype, const float *from, size_t count);

    /* out[i] = e^((x[i] - largest) / temperature) in double; 0 below e^-708, +inf above e^709, NaN
     * stays NaN. Within 2 ulp of the exponential; no fused operation, so that all backends give the
     * same bits. */
    void (*exps)(double *out, const float *x, size_t count, float largest, float temperature);

    /* Softmax attention of the query heads that belong to KV heads [kv_head_first, kv_head_end). */
    void (*attention)(const struct kernels_attention *attention, uint32_t kv_head_first,
                      uint32_t kv_head_end);
};

/* The CPU backends, each better than those before it. */
#define KERNELS_NAMES "c", "avx2", "avx512", "avx512bf16", "amx"

/* One of KERNELS_NAMES, or NULL for the best this CPU can run. NULL if unknown or not supported by
 * the CPU, or by the system, which is asked to let this process use matrix tiles. The tables are
 * static: the pointer lives for ever. Any thread. */
const struct kernels *kernels_select(const char *name);

/* Bytes of packed data for a matrix; dtype F32, BF16 or I8. */
uint64_t kernels_weights_bytes(enum kernels_dtype dtype, uint32_t rows, uint32_t cols);
/* Packs source rows [row_count, cols] of source_dtype as rows [row_first, row_first + row_count) of
 * `weights` (data zeroed before the first call). The source may be unaligned. BF16 weights take
 * BF16 sources only; F32 and I8 weights take all. I8 rounds: a group's scale is its largest
 * magnitude / 127. */
void kernels_weights_pack(struct kernels_weights *weights, uint32_t row_first, const void *source,
                          enum kernels_dtype source_dtype, uint32_t row_count);

/* Reads one row back, as it counts in products: to[cols]. row < weights->rows. */
void kernels_weights_row(const struct kernels_weights *weights, uint32_t row, float *to);

/* Bytes of one value of a type that has a size: not I8. */
static inline uint32_t kernels_dtype_bytes(enum kernels_dtype dtype) {
    return dtype == KERNELS_F32 ? 4u : 2u;
}

#ifdef __cplusplus
}
#endif

#endif
