/* AVX2 + FMA: the same operations in the same order per element, sixteen elements at a time. Built
 * with its own flags; runs only after kernels_select asked the CPU. */
#include "kernels/cpu/tables.h"

#include "kernels/convert.h"
#include "kernels/cpu/vector.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include <immintrin.h>

#define TILE_ROWS 6u
/* A panel's slice of 256 columns (16 KiB in F32) stays in the first-level cache while all rows
 * pass. Cutting k changes no bit: partial sums are stored and loaded as the same floats. */
#define TILE_COLS 256u

/* ---- helpers ---- */

INLINE __m256i tail_mask(uint32_t count) {
    static const int32_t ones[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_loadu_si256((const __m256i *)(const void *)(ones + 8 - count));
}
/* count in [1, 8]; lanes past it are zero and not read from memory. */
INLINE __m256 load_some(const float *from, uint32_t count) {
    return count == 8 ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, tail_mask(count));
}
INLINE void store_some(float *to, __m256 value, uint32_t count) {
    if (count == 8) {
        _mm256_storeu_ps(to, value);
    } else {
        _mm256_maskstore_ps(to, tail_mask(count), value);
    }
}
INLINE __m256 widen_bf16(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
INLINE __m256 load_kv(const unsigned char *row, const bool is_bf16, uint32_t first,
                      uint32_t count) {
    if (!is_bf16) {
        return load_some((const float *)(const void *)row + first, count);
    }
    const unsigned char *from = row + (size_t)first * 2;
    if (count == 8) {
        return widen_bf16(_mm_loadu_si128((const __m128i *)(const void *)from));
    }
    uint16_t halves[8] = {0};
    memcpy(halves, from, (size_t)count * 2);
    return widen_bf16(_mm_loadu_si128((const __m128i *)(const void *)halves));
}
/* As the oracle's exponential; NaN stays NaN (the bound is the first operand of min and max). */
INLINE __m256 exp_lanes(__m256 x) {
    const __m256 lowest = _mm256_set1_ps(-87.0f);
    __m256 is_zero = _mm256_cmp_ps(x, lowest, _CMP_LT_OQ);
    x = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(lowest, x));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
    __m256i power =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(is_zero, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}
INLINE float exp_one(float x) {
    return _mm256_cvtss_f32(exp_lanes(_mm256_set1_ps(x)));
}

/* ---- matrix product ---- */

/* A panel's column in F32, or two of them in BF16. */
#define COLUMN_BYTES ((size_t)KERNELS_PANEL * 4)

/* One column of weights meets value k of each row; of a pair in BF16 the first or the second. */
INLINE void column(const unsigned char *w, size_t w_stride, const float *const *x, size_t k,
                   __m256 (*low)[4], __m256 (*high)[4], const uint32_t rows, const uint32_t panels,
                   const bool is_bf16, const bool is_second) {
    __m256 w_low[4];
    __m256 w_high[4];
#pragma GCC unroll 4
    for (uint32_t p = 0; p < panels; p++) {
        const unsigned char *at = w + p * w_stride;
        if (!is_second) {
            _mm_prefetch((const char *)at + PREFETCH_BYTES, _MM_HINT_T0);
        }
        const __m256i *pairs = (const __m256i *)(const void *)at;
        if (!is_bf16) {
            w_low[p] = _mm256_load_ps((const float *)(const void *)at);
            w_high[p] = _mm256_load_ps((const float *)(const void *)at + 8);
        } else if (is_second) {
            const __m256i upper = _mm256_set1_epi32((int32_t)0xffff0000u);
            w_low[p] = _mm256_castsi256_ps(_mm256_and_si256(_mm256_load_si256(pairs), upper));
            w_high[p] = _mm256_castsi256_ps(_mm256_and_si256(_mm256_load_si256(pairs + 1), upper));
        } else {
            w_low[p] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_load_si256(pairs), 16));
            w_high[p] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_load_si256(pairs + 1), 16));
        }
    }
#pragma GCC unroll 6
    for (uint32_t i = 0; i < rows; i++) {
        __m256 value = _mm256_broadcast_ss(x[i] + k);
#pragma GCC unroll 4
        for (uint32_t p = 0; p < panels; p++) {
            low[i][p] = _mm256_fmadd_ps(w_low[p], value, low[i][p]);
            high[i][p] = _mm256_fmadd_ps(w_high[p], value, high[i][p]);
        }
    }
}

/* `rows` rows times `panels` neighbouring panels, columns [first, first + count): one chain per
 * element. All of rows, panels and is_bf16 are constants after inlining. */
INLINE void tile(const struct kernels_gemm *gemm, uint32_t row, uint32_t panel, uint32_t first,
                 uint32_t count, const uint32_t rows, const uint32_t panels, const bool is_bf16) {
    __m256 low[TILE_ROWS][4];
    __m256 high[TILE_ROWS][4];
    /* What one step of k takes: a column in F32, two in BF16. */
    const size_t step = is_bf16 ? 2 : 1;
    size_t w_stride = panel_bytes(gemm->weights);
    const unsigned char *w =
        (const unsigned char *)gemm->weights->data + panel * w_stride + first / step * COLUMN_BYTES;
    const float *x[TILE_ROWS];
    float *y = gemm->y + row * gemm->y_stride + (size_t)panel * KERNELS_PANEL;
#pragma GCC unroll 6
    for (uint32_t i = 0; i < rows; i++) {
        x[i] = gemm->x + (row + i) * gemm->x_stride + first;
        /* One register for each row: gcc 12 would compute addresses on the multipliers' ports. */
        __asm__("" : "+r"(x[i]));
#pragma GCC unroll 4
        for (uint32_t p = 0; p < panels; p++) {
            float *cell = y + i * gemm->y_stride + (size_t)p * KERNELS_PANEL;
            low[i][p] = first == 0 ? _mm256_setzero_ps() : _mm256_loadu_ps(cell);
            high[i][p] = first == 0 ? _mm256_setzero_ps() : _mm256_loadu_ps(cell + 8);
        }
    }
    size_t steps = is_bf16 ? count / 2 : count;
#pragma GCC unroll 2
    for (size_t k = 0; k < steps; k++) {
        column(w + k * COLUMN_BYTES, w_stride, x, k * step, low, high, rows, panels, is_bf16,
               false);
        if (is_bf16) {
            column(w + k * COLUMN_BYTES, w_stride, x, k * 2 + 1, low, high, rows, panels, true,
                   true);
        }
    }
    if (is_bf16 && count % 2 != 0) {
        column(w + steps * COLUMN_BYTES, w_stride, x, count - 1, low, high, rows, panels, true,
               false);
    }
#pragma GCC unroll 6
    for (uint32_t i = 0; i < rows; i++) {
#pragma GCC unroll 4
        for (uint32_t p = 0; p < panels; p++) {
            float *cell = y + i * gemm->y_stride + (size_t)p * KERNELS_PANEL;
            _mm256_storeu_ps(cell, low[i][p]);
            _mm256_storeu_ps(cell + 8, high[i][p]);
        }
    }
}

INLINE void tile_rows(const struct kernels_gemm *gemm, uint32_t row, uint32_t rows, uint32_t panel,
                      uint32_t first, uint32_t count, const bool is_bf16) {
    switch (rows) {
    case 1: tile(gemm, row, panel, first, count, 1, 1, is_bf16); break;
    case 2: tile(gemm, row, panel, first, count, 2, 1, is_bf16); break;
    case 3: tile(gemm, row, panel, first, count, 3, 1, is_bf16); break;
    case 4: tile(gemm, row, panel, first, count, 4, 1, is_bf16); break;
    case 5: tile(gemm, row, panel, first, count, 5, 1, is_bf16); break;
    case 6: tile(gemm, row, panel, first, count, 6, 1, is_bf16); break;
    default: break; /* a tile has at most TILE_ROWS rows */
    }
}

/* Few rows: several panels side by side, so that enough chains hide the multiplier's latency. */
INLINE uint32_t gemm_few(const struct kernels_gemm *gemm, uint32_t panel, uint32_t panel_end,
                         const bool is_bf16) {
    uint32_t cols = gemm->weights->cols;
    for (; gemm->count == 1 && panel + 4 <= panel_end; panel += 4) {
        tile(gemm, 0, panel, 0, cols, 1, 4, is_bf16);
    }
    for (; gemm->count == 2 && panel + 3 <= panel_end; panel += 3) {
        tile(gemm, 0, panel, 0, cols, 2, 3, is_bf16);
    }
    for (; gemm->count == 3 && panel + 2 <= panel_end; panel += 2) {
        tile(gemm, 0, panel, 0, cols, 3, 2, is_bf16);
    }
    return panel;
}

INLINE void gemm_panels(const struct kernels_gemm *gemm, uint32_t panel_first, uint32_t panel_end,
                        const bool is_bf16) {
    uint32_t cols = gemm->weights->cols;
    uint32_t tiles = (gemm->count + TILE_ROWS - 1) / TILE_ROWS;
    uint32_t cols_step = tiles > 1 ? TILE_COLS : cols;
    uint32_t panel = gemm_few(gemm, panel_first, panel_end, is_bf16);
    for (; panel < panel_end; panel++) {
        for (uint32_t first = 0; first < cols; first += cols_step) {
            uint32_t count = cols - first < cols_step ? cols - first : cols_step;
            /* Rows are spread evenly: seven are four and three, not six and a slow single one. */
            for (uint32_t i = 0; i < tiles; i++) {
                uint32_t row = share_first(gemm->count, tiles, i);
                uint32_t row_end = share_first(gemm->count, tiles, i + 1);
                tile_rows(gemm, row, row_end - row, panel, first, count, is_bf16);
            }
        }
    }
}

/* ---- whole numbers ---- */

static void avx2_quantize(const struct kernels_quants *to, uint32_t row, const float *x,
                          uint32_t cols) {
    uint32_t groups = kernels_groups(cols);
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    for (uint32_t group = 0; group < groups; group++) {
        size_t at = (size_t)row * groups + group;
        uint32_t count = cols - group * KERNELS_GROUP;
        const float *from = x + (size_t)group * KERNELS_GROUP;
        if (count < KERNELS_GROUP) { /* the last group of an odd width */
            struct kernels_quants rest = {.numbers = to->numbers + at * KERNELS_GROUP,
                                          .scales = to->scales + at,
                                          .offsets = to->offsets + at};
            kernels_c.quantize(&rest, 0, from, count);
            return;
        }
        /* Magnitudes compare as whole numbers; what is not finite is above all others. */
        __m256i most = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (uint32_t i = 0; i < KERNELS_GROUP; i += 8) {
            __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(from + i));
            most = _mm256_max_epi32(most, _mm256_and_si256(bits, magnitude));
        }
        __m128i half =
            _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
        half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
        half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
        uint32_t bits = (uint32_t)_mm_cvtsi128_si32(half);
        float largest = convert_bits(bits);
        if (bits >= 0x7f800000u || largest < 0x1p-100f) {
            memset(to->numbers + at * KERNELS_GROUP, 0, KERNELS_GROUP);
            to->scales[at] = bits >= 0x7f800000u ? convert_bits(0x7fc00000u) : 0.0f;
            to->offsets[at] = 0;
            continue;
        }
        __m256 inverse = _mm256_set1_ps(127.0f / largest);
        __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 2
        for (uint32_t i = 0; i < KERNELS_GROUP; i += 32) {
            __m256i n[4];
#pragma GCC unroll 4
            for (uint32_t j = 0; j < 4; j++) {
                n[j] =
                    _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + i + j * 8), inverse));
                sum = _mm256_add_epi32(sum, n[j]);
            }
            /* Packing works in halves of a register: the permutation puts them in order again. */
            __m256i bytes =
                _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
            bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
            _mm256_storeu_si256((__m256i *)(void *)(to->numbers + at * KERNELS_GROUP + i), bytes);
        }
        __m128i part = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        part = _mm_add_epi32(part, _mm_shuffle_epi32(part, 0x4e));
        part = _mm_add_epi32(part, _mm_shuffle_epi32(part, 0xb1));
        to->scales[at] = largest / 127.0f;
        to->offsets[at] = -128 * _mm_cvtsi128_si32(part);
    }
}

/* `rows` rows times one panel. Products of a byte pair stay below 2^15, since both sides are at
 * most 127. */
INLINE void tile_i8(const struct kernels_gemm *gemm, uint32_t row, uint32_t panel,
                    const uint32_t rows) {
    uint32_t groups = kernels_groups(gemm->weights->cols);
    const unsigned char *w =
        (const unsigned char *)gemm->weights->data + (size_t)panel * groups * KERNELS_GROUP_BYTES;
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i shift = _mm256_set1_epi8((char)0x80);
    __m256 y[2][2];
    memset(y, 0, sizeof(y));
    for (uint32_t group = 0; group < groups; group++, w += KERNELS_GROUP_BYTES) {
        const int8_t *x[2];
        __m256i sum[2][2];
        memset(sum, 0, sizeof(sum));
#pragma GCC unroll 2
        for (uint32_t i = 0; i < rows; i++) {
            x[i] = gemm->quants.numbers + ((size_t)(row + i) * groups + group) * KERNELS_GROUP;
        }
        const unsigned char *numbers = w + KERNELS_PANEL * sizeof(float);
        _mm_prefetch((const char *)w + PREFETCH_BYTES, _MM_HINT_T0);
#pragma GCC unroll 4
        for (uint32_t quad = 0; quad < KERNELS_GROUP / 4; quad++) {
            const __m256i *at = (const __m256i *)(const void *)(numbers + quad * 64);
            __m256i w_low = _mm256_xor_si256(_mm256_load_si256(at), shift);
            __m256i w_high = _mm256_xor_si256(_mm256_load_si256(at + 1), shift);
#pragma GCC unroll 2
            for (uint32_t i = 0; i < rows; i++) {
                int32_t four;
                memcpy(&four, x[i] + quad * 4, sizeof(four));
                __m256i value = _mm256_set1_epi32(four);
                __m256i size = _mm256_abs_epi8(value);
                __m256i low = _mm256_maddubs_epi16(size, _mm256_sign_epi8(w_low, value));
                __m256i high = _mm256_maddubs_epi16(size, _mm256_sign_epi8(w_high, value));
                sum[i][0] = _mm256_add_epi32(sum[i][0], _mm256_madd_epi16(low, ones));
                sum[i][1] = _mm256_add_epi32(sum[i][1], _mm256_madd_epi16(high, ones));
            }
        }
#pragma GCC unroll 2
        for (uint32_t i = 0; i < rows; i++) {
            __m256 by = _mm256_set1_ps(gemm->quants.scales[(size_t)(row + i) * groups + group]);
            const float *scales = (const float *)(const void *)w;
            for (uint32_t j = 0; j < 2; j++) {
                __m256 scale = _mm256_mul_ps(_mm256_load_ps(scales + j * 8), by);
                y[i][j] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i][j]), scale, y[i][j]);
            }
        }
    }
    for (uint32_t i = 0; i < rows; i++) {
        float *to = gemm->y + (row + i) * gemm->y_stride + (size_t)panel * KERNELS_PANEL;
        _mm256_storeu_ps(to, y[i][0]);
        _mm256_storeu_ps(to + 8, y[i][1]);
    }
}

static void gemm_i8(const struct kernels_gemm *gemm, uint32_t panel_first, uint32_t panel_end) {
    for (uint32_t panel = panel_first; panel < panel_end; panel++) {
        uint32_t row = 0;
        for (; row + 2 <= gemm->count; row += 2) {
            tile_i8(gemm, row, panel, 2);
        }
        if (row < gemm->count) {
            tile_i8(gemm, row, panel, 1);
        }
    }
}

static void avx2_gemm(const struct kernels_gemm *gemm, uint32_t panel_first, uint32_t panel_end) {
    if (gemm->weights->dtype == KERNELS_I8) {
        gemm_i8(gemm, panel_first, panel_end);
        return;
    }
    if (gemm->weights->dtype == KERNELS_BF16) {
        gemm_panels(gemm, panel_first, panel_end, true);
    } else {
        gemm_panels(gemm, panel_first, panel_end, false);
    }
}

/* ---- row operations ---- */

static void avx2_rms_norm(float *out, const float *x, const float *weight, uint32_t width,
                          float epsilon) {
    __m256 sum = _mm256_setzero_ps();
    for (uint32_t i = 0; i < width; i += 8) {
        __m256 value = load_some(x + i, width - i < 8 ? width - i : 8);
        sum = _mm256_fmadd_ps(value, value, sum);
    }
    float scale = 1.0f / sqrtf(sum_lanes(sum) / (float)width + epsilon);
    for (uint32_t i = 0; i < width; i += 8) {
        uint32_t count = width - i < 8 ? width - i : 8;
        __m256 value = _mm256_mul_ps(load_some(x + i, count), _mm256_set1_ps(scale));
        store_some(out + i, _mm256_mul_ps(value, load_some(weight + i, count)), count);
    }
}

static void avx2_rotary(float *x, const float *cosine, const float *sine, uint32_t heads,
                        uint32_t head_dim) {
    uint32_t half = head_dim / 2;
    for (uint32_t i = 0; i < half; i += 8) {
        uint32_t count = half - i < 8 ? half - i : 8;
        __m256 c = load_some(cosine + i, count);
        __m256 s = load_some(sine + i, count);
        for (uint32_t head = 0; head < heads; head++) {
            float *low = x + (size_t)head * head_dim + i;
            float *high = low + half;
            __m256 a = load_some(low, count);
            __m256 b = load_some(high, count);
            store_some(low, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)), count);
            store_some(high, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)), count);
        }
    }
}

static void avx2_silu_mul(float *out, const float *gate, const float *up, size_t count) {
    const __m256 one = _mm256_set1_ps(1.0f);
    for (size_t i = 0; i < count; i += 8) {
        uint32_t some = count - i < 8 ? (uint32_t)(count - i) : 8;
        __m256 g = load_some(gate + i, some);
        __m256 e = exp_lanes(_mm256_xor_ps(g, _mm256_set1_ps(-0.0f)));
        __m256 silu = _mm256_div_ps(g, _mm256_add_ps(one, e));
        store_some(out + i, _mm256_mul_ps(silu, load_some(up + i, some)), some);
    }
}

/* As plain.c's, lane by lane: no fused operation here. */
INLINE __m256d wide_exp(__m256d x) {
    static const double inverse_factorial[] = {EXP_FACTORS};
    const __m256d shift = _mm256_set1_pd(EXP_SHIFT);
    __m256d shifted = _mm256_add_pd(_mm256_mul_pd(x, _mm256_set1_pd(EXP_LOG2_E)), shift);
    __m256d n = _mm256_sub_pd(shifted, shift);
    __m256d r = _mm256_sub_pd(x, _mm256_mul_pd(n, _mm256_set1_pd(EXP_LN_2)));
    r = _mm256_sub_pd(r, _mm256_mul_pd(n, _mm256_set1_pd(EXP_LN_2_REST)));
    __m256d p = _mm256_set1_pd(inverse_factorial[0]);
    for (size_t i = 1; i < sizeof(inverse_factorial) / sizeof(inverse_factorial[0]); i++) {
        p = _mm256_add_pd(_mm256_mul_pd(p, r), _mm256_set1_pd(inverse_factorial[i]));
    }
    p = _mm256_add_pd(r, _mm256_mul_pd(_mm256_mul_pd(r, r), p));
    p = _mm256_add_pd(_mm256_set1_pd(1.0), p);
    /* The whole number is in the low bits; those above it leave at the top. */
    __m256i power = _mm256_slli_epi64(
        _mm256_add_epi64(_mm256_castpd_si256(shifted), _mm256_set1_epi64x(1023)), 52);
    p = _mm256_mul_pd(p, _mm256_castsi256_pd(power));
    p = _mm256_andnot_pd(_mm256_cmp_pd(x, _mm256_set1_pd(EXP_LOWEST), _CMP_LT_OQ), p);
    p = _mm256_blendv_pd(p, _mm256_set1_pd((double)INFINITY),
                         _mm256_cmp_pd(x, _mm256_set1_pd(EXP_HIGHEST), _CMP_GT_OQ));
    return _mm256_blendv_pd(p, x, _mm256_cmp_pd(x, x, _CMP_UNORD_Q));
}

static void avx2_exps(double *out, const float *x, size_t count, float largest, float temperature) {
    const __m256d top = _mm256_set1_pd((double)largest);
    const __m256d by = _mm256_set1_pd((double)temperature);
    size_t whole = count / 4 * 4;
    for (size_t i = 0; i < whole; i += 4) {
        __m256d distance = _mm256_sub_pd(_mm256_cvtps_pd(_mm_loadu_ps(x + i)), top);
        _mm256_storeu_pd(out + i, wide_exp(_mm256_div_pd(distance, by)));
    }
    if (whole < count) {
        float values[4] = {0};
        double last[4];
        memcpy(values, x + whole, (count - whole) * sizeof(float));
        avx2_exps(last, values, 4, largest, temperature);
        memcpy(out + whole, last, (count - whole) * sizeof(double));
    }
}

static void avx2_add(float *out, const float *x, size_t count) {
    for (size_t i = 0; i < count; i += 8) {
        uint32_t some = count - i < 8 ? (uint32_t)(count - i) : 8;
        store_some(out + i, _mm256_add_ps(load_some(out + i, some), load_some(x + i, some)), some);
    }
}

static void avx2_widen(float *to, const void *from, enum kernels_dtype dtype, size_t count) {
    if (dtype != KERNELS_BF16) {
        kernels_c.widen(to, from, dtype, count);
        return;
    }
    for (size_t i = 0; i < count; i += 8) {
        uint32_t some = count - i < 8 ? (uint32_t)(count - i) : 8;
        store_some(to + i, load_kv((const unsigned char *)from + i * 2, true, 0, some), some);
    }
}

static void avx2_store(void *to, enum kernels_dtype dtype, const float *from, size_t count) {
    kernels_c.store(to, dtype, from, count); /* one row per token and layer: not worth vectors */
}

/* ---- attention ---- */

/* sum_lanes of eight registers at once, in its order: halves, then pairs, then the last two. */
INLINE __m256 sum_lanes_of_8(const __m256 *v) {
    __m256 part[4];
#pragma GCC unroll 4
    for (uint32_t t = 0; t < 4; t++) {
        part[t] = _mm256_add_ps(_mm256_permute2f128_ps(v[t], v[t + 4], 0x20),
                                _mm256_permute2f128_ps(v[t], v[t + 4], 0x31));
    }
    __m256 first = _mm256_add_ps(_mm256_shuffle_ps(part[0], part[1], 0x44),
                                 _mm256_shuffle_ps(part[0], part[1], 0xee));
    __m256 second = _mm256_add_ps(_mm256_shuffle_ps(part[2], part[3], 0x44),
                                  _mm256_shuffle_ps(part[2], part[3], 0xee));
    return _mm256_add_ps(_mm256_shuffle_ps(first, second, 0x88),
                         _mm256_shuffle_ps(first, second, 0xdd));
}

/* Eight dot products; each is one chain of lanes over the dimension, then sum_lanes' order. */
INLINE __m256 dots(const float *q, const unsigned char *const *k, size_t at, uint32_t dim,
                   const bool is_bf16) {
    __m256 sum[8];
#pragma GCC unroll 8
    for (uint32_t t = 0; t < 8; t++) {
        sum[t] = _mm256_setzero_ps();
    }
    uint32_t i = 0;
    for (; i + 8 <= dim; i += 8) {
        __m256 value = _mm256_loadu_ps(q + i);
#pragma GCC unroll 8
        for (uint32_t t = 0; t < 8; t++) {
            sum[t] = _mm256_fmadd_ps(value, load_kv(k[t] + at, is_bf16, i, 8), sum[t]);
        }
    }
    if (i < dim) {
        __m256 value = load_some(q + i, dim - i);
#pragma GCC unroll 8
        for (uint32_t t = 0; t < 8; t++) {
            sum[t] = _mm256_fmadd_ps(value, load_kv(k[t] + at, is_bf16, i, dim - i), sum[t]);
        }
    }
    return sum_lanes_of_8(sum);
}

/* out[i .. i + 8 * vectors) = out * keep + sum of weight[t] * v[t], t upwards in one chain. The
 * last vector holds `last` values. */
INLINE void values(float *out, const float *weight, const unsigned char *const *v, size_t at,
                   uint32_t i, uint32_t count, float keep, uint32_t last, const uint32_t vectors,
                   const bool is_bf16) {
    __m256 sum[8];
#pragma GCC unroll 8
    for (uint32_t j = 0; j < vectors; j++) {
        sum[j] = _mm256_setzero_ps();
    }
    for (uint32_t t = 0; t < count; t++) {
        __m256 by = _mm256_broadcast_ss(weight + t);
#pragma GCC unroll 8
        for (uint32_t j = 0; j < vectors; j++) {
            uint32_t some = j + 1 == vectors ? last : 8;
            sum[j] = _mm256_fmadd_ps(by, load_kv(v[t] + at, is_bf16, i + j * 8, some), sum[j]);
        }
    }
#pragma GCC unroll 8
    for (uint32_t j = 0; j < vectors; j++) {
        uint32_t some = j + 1 == vectors ? last : 8;
        __m256 old = load_some(out + i + j * 8, some);
        store_some(out + i + j * 8, _mm256_fmadd_ps(old, _mm256_set1_ps(keep), sum[j]), some);
    }
}

struct softmax {
    float largest;
    float total;
};

/* One block in one query head, whose K and V begin `at` bytes into the rows. next: the block whose
 * part is asked for meanwhile, or NULL. */
INLINE void attend_block(const struct kernels_attention *a, const struct rows *rows,
                         const struct rows *next, uint32_t count, size_t at, uint32_t head,
                         struct softmax *state, const bool is_bf16) {
    const float *q = a->q + (size_t)head * a->head_dim;
    float *out = a->out + (size_t)head * a->head_dim;
    _Alignas(32) float score[KERNELS_ATTENTION_BLOCK];
    __m256 largest = _mm256_set1_ps(-INFINITY);
    __m256 scale = _mm256_set1_ps(a->scale);
    for (uint32_t t = 0; t < count; t += 8) {
        if (next != NULL) {
            rows_fetch(next, t, at, (size_t)a->head_dim * (is_bf16 ? 2 : 4));
        }
        __m256 value = _mm256_mul_ps(dots(q, rows->k + t, at, a->head_dim, is_bf16), scale);
        if (count - t < 8) {
            __m256 is_real = _mm256_castsi256_ps(tail_mask(count - t));
            value = _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), value, is_real);
        }
        _mm256_store_ps(score + t, value);
        largest = _mm256_max_ps(value, largest);
    }
    float block_largest = largest_lane(largest);
    float merged = block_largest > state->largest ? block_largest : state->largest;
    float keep = exp_one(state->largest - merged);
    __m256 sum = _mm256_setzero_ps();
    for (uint32_t t = 0; t < count; t += 8) {
        __m256 value = exp_lanes(_mm256_sub_ps(_mm256_load_ps(score + t), _mm256_set1_ps(merged)));
        _mm256_store_ps(score + t, value);
        sum = _mm256_add_ps(sum, value);
    }
    uint32_t dim = a->head_dim;
    uint32_t i = 0;
    for (; i + 64 <= dim; i += 64) {
        values(out, score, rows->v, at, i, count, keep, 8, 8, is_bf16);
    }
    for (; i + 32 <= dim; i += 32) {
        values(out, score, rows->v, at, i, count, keep, 8, 4, is_bf16);
    }
    for (; i + 8 <= dim; i += 8) {
        values(out, score, rows->v, at, i, count, keep, 8, 1, is_bf16);
    }
    if (i < dim) {
        values(out, score, rows->v, at, i, count, keep, dim - i, 1, is_bf16);
    }
    state->total = state->total * keep + sum_lanes(sum);
    state->largest = merged;
}

/* Query heads that go through the blocks together: what is read lies in memory block by block. */
#define HEADS_MAX 64u

INLINE void attend_heads(const struct kernels_attention *a, uint32_t head_first, uint32_t head_end,
                         const bool is_bf16) {
    struct softmax state[HEADS_MAX];
    struct rows rows[2]; /* this block's and the next one's */
    uint32_t dim = a->head_dim;
    uint32_t group = a->heads / a->kv_heads;
    size_t head_size = (size_t)dim * (is_bf16 ? 2 : 4);
    memset(a->out + (size_t)head_first * dim, 0,
           (size_t)(head_end - head_first) * dim * sizeof(float));
    for (uint32_t head = head_first; head < head_end; head++) {
        state[head - head_first] = (struct softmax){.largest = -INFINITY, .total = 0.0f};
    }
    rows_find(a, 0, a->length, &rows[0]);
    for (uint32_t first = 0, block = 0; first < a->length;
         first += KERNELS_ATTENTION_BLOCK, block++) {
        uint32_t count = block_tokens(a->length, first);
        struct rows *next = NULL;
        if (first + count < a->length) {
            next = &rows[(block + 1) % 2];
            rows_find(a, first + count, a->length, next);
        }
        for (uint32_t head = head_first; head < head_end; head++) {
            bool is_fresh = head == head_first || head % group == 0;
            attend_block(a, &rows[block % 2], is_fresh ? next : NULL, count,
                         head / group * head_size, head, &state[head - head_first], is_bf16);
        }
    }
    for (uint32_t head = head_first; head < head_end; head++) {
        float *out = a->out + (size_t)head * dim;
        for (uint32_t j = 0; j < dim; j++) {
            out[j] /= state[head - head_first].total;
        }
    }
}

static void attend_f32(const struct kernels_attention *a, uint32_t head_first, uint32_t head_end) {
    attend_heads(a, head_first, head_end, false);
}
static void attend_bf16(const struct kernels_attention *a, uint32_t head_first, uint32_t head_end) {
    attend_heads(a, head_first, head_end, true);
}

static void attend_token(const struct kernels_attention *a, uint32_t kv_head_first,
                         uint32_t kv_head_end) {
    uint32_t group = a->heads / a->kv_heads;
    uint32_t last = kv_head_end * group;
    for (uint32_t first = kv_head_first * group; first < last; first += HEADS_MAX) {
        uint32_t end = last - first < HEADS_MAX ? last : first + HEADS_MAX;
        if (a->kv_dtype == KERNELS_BF16) {
            attend_bf16(a, first, end);
        } else {
            attend_f32(a, first, end);
        }
    }
}

static void avx2_attention(const struct kernels_attention *a, uint32_t kv_head_first,
                           uint32_t kv_head_end) {
    struct kernels_attention one = *a;
    for (uint32_t i = 0; i < a->tokens; i++) {
        one.q = a->q + i * a->q_stride;
        one.out = a->out + i * a->out_stride;
        one.length = a->length + i;
        attend_token(&one, kv_head_first, kv_head_end);
    }
}

const struct kernels kernels_avx2 = {
    .name = "avx2",
    .numerics = "avx2",
    .bf16_numerics = "avx2",
    .gemm = avx2_gemm,
    .quantize = avx2_quantize,
    .rms_norm = avx2_rms_norm,
    .rotary = avx2_rotary,
    .silu_mul = avx2_silu_mul,
    .add = avx2_add,
    .widen = avx2_widen,
    .store = avx2_store,
    .exps = avx2_exps,
    .attention = avx2_attention,
};
