/* AVX-512: the AVX2 backend's results, bit for bit, with registers twice as wide. A product's
 * element is one chain over k whatever the register; where lanes are added up (norms, dot products,
 * softmax) the order is that of eight lanes, so two tokens share a register instead of one token
 * taking it whole. Machines of both kinds may therefore serve one model together. */
#include "kernels/cpu/tables.h"

#include "kernels/convert.h"
#include "kernels/cpu/tiles512.h"
#include "kernels/cpu/vector.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include <immintrin.h>

/* ---- matrix product ---- */

TILES(f32_tiles, FACTORS_F32)
WIDE_TILES(wide_tiles)

static void avx512_gemm(const struct kernels_gemm *gemm, uint32_t panel_first, uint32_t panel_end) {
    if (gemm->weights->dtype == KERNELS_I8) {
        if (__builtin_cpu_supports("avx512vnni")) {
            kernels_vnni_gemm(gemm, panel_first, panel_end);
        } else {
            kernels_avx2.gemm(gemm, panel_first, panel_end);
        }
    } else if (gemm->weights->dtype == KERNELS_BF16) {
        gemm_panels(gemm, panel_first, panel_end, &wide_tiles, FACTORS_WIDE);
    } else {
        gemm_panels(gemm, panel_first, panel_end, &f32_tiles, FACTORS_F32);
    }
}

/* ---- element by element ---- */

INLINE __mmask16 tail_mask(size_t count) {
    uint32_t lanes = count >= 16 ? 0xffffu : (1u << count) - 1;
    return (__mmask16)lanes;
}

/* As avx2.c's, lane by lane. */
INLINE __m512 exp_lanes(__m512 x) {
    const __m512 lowest = _mm512_set1_ps(-87.0f);
    __mmask16 is_zero = _mm512_cmp_ps_mask(x, lowest, _CMP_LT_OQ);
    x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(lowest, x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    __m512i power =
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    return _mm512_mask_mul_ps(_mm512_setzero_ps(), (__mmask16)~is_zero, p,
                              _mm512_castsi512_ps(power));
}

static void avx512_silu_mul(float *out, const float *gate, const float *up, size_t count) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 sign = _mm512_set1_ps(-0.0f);
    for (size_t i = 0; i < count; i += 16) {
        __mmask16 mask = tail_mask(count - i);
        __m512 g = _mm512_maskz_loadu_ps(mask, gate + i);
        __m512 e = exp_lanes(_mm512_xor_ps(g, sign));
        __m512 silu = _mm512_div_ps(g, _mm512_add_ps(one, e));
        _mm512_mask_storeu_ps(out + i, mask,
                              _mm512_mul_ps(silu, _mm512_maskz_loadu_ps(mask, up + i)));
    }
}

static void avx512_round(uint16_t *to, const float *x, uint32_t cols) {
    const __m512i one = _mm512_set1_epi32(1);
    const __m512i half = _mm512_set1_epi32(0x7fff);
    for (uint32_t i = 0; i < kernels_halves(cols); i += 16) {
        __mmask16 mask = tail_mask(cols > i ? cols - i : 0);
        __m512 value = _mm512_maskz_loadu_ps(mask, x + i);
        __m512i bits = _mm512_castps_si512(value);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
        __m512i nearest =
            _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, half), odd), 16);
        /* A NaN keeps its sign and turns quiet. */
        __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
        nearest =
            _mm512_mask_mov_epi32(nearest, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), quiet);
        _mm256_storeu_si256((__m256i *)(void *)(to + i), _mm512_cvtepi32_epi16(nearest));
    }
}

static void avx512_add(float *out, const float *x, size_t count) {
    for (size_t i = 0; i < count; i += 16) {
        __mmask16 mask = tail_mask(count - i);
        __m512 sum =
            _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out + i), _mm512_maskz_loadu_ps(mask, x + i));
        _mm512_mask_storeu_ps(out + i, mask, sum);
    }
}

/* ---- attention ---- */

/* Two query rows (a token's head each) of one KV head side by side: the low half of a register is
 * one, the high half the other, each with the lanes and the order that avx2.c gives it. The second
 * attends to as many tokens as the first, or more. */
struct pair {
    const float *q; /* eight values of one, eight of the other, and so on */
    float *out[2];
    uint32_t length[2];
    float largest[2];
    float total[2];
};

INLINE __m512 both(__m256 low, __m256 high) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

/* Values [first, first + count) of a K row, in both halves; count in [1, 8]. */
INLINE __m512 load_key(const unsigned char *row, uint32_t first, uint32_t count,
                       const bool is_bf16) {
    __mmask8 mask = (__mmask8)((1u << count) - 1);
    if (!is_bf16) {
        const float *from = (const float *)(const void *)row + first;
        if (count == 8) {
            return _mm512_broadcast_f32x8(_mm256_loadu_ps(from));
        }
        return _mm512_broadcast_f32x8(_mm256_maskz_loadu_ps(mask, from));
    }
    uint16_t halves[8] = {0};
    const unsigned char *from = row + (size_t)first * 2;
    if (count < 8) {
        memcpy(halves, from, (size_t)count * 2);
        from = (const unsigned char *)halves;
    }
    __m256i twice =
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(twice), 16));
}

/* The lanes of each half added up, for eight registers: sums of the low halves, then of the high
 * ones. The order is avx2.c's sum_lanes. */
INLINE __m512 sum_halves_of_8(const __m512 *v) {
    __m512 part[4];
#pragma GCC unroll 4
    for (uint32_t t = 0; t < 4; t++) {
        part[t] = _mm512_add_ps(_mm512_shuffle_f32x4(v[t], v[t + 4], 0x88),
                                _mm512_shuffle_f32x4(v[t], v[t + 4], 0xdd));
    }
    __m512 first = _mm512_add_ps(_mm512_shuffle_ps(part[0], part[1], 0x44),
                                 _mm512_shuffle_ps(part[0], part[1], 0xee));
    __m512 second = _mm512_add_ps(_mm512_shuffle_ps(part[2], part[3], 0x44),
                                  _mm512_shuffle_ps(part[2], part[3], 0xee));
    __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(first, second, 0x88),
                                _mm512_shuffle_ps(first, second, 0xdd));
    return _mm512_shuffle_f32x4(sums, sums, 0xd8); /* quarters: low, high, low, high */
}

/* Eight tokens' dot products with both rows of `pairs` neighbouring pairs. */
INLINE void dots(const struct pair *pair, const unsigned char *const *k, size_t at, uint32_t dim,
                 __m512 *out, const uint32_t pairs, const bool is_bf16) {
    __m512 sum[2][8];
#pragma GCC unroll 2
    for (uint32_t p = 0; p < pairs; p++) {
#pragma GCC unroll 8
        for (uint32_t t = 0; t < 8; t++) {
            sum[p][t] = _mm512_setzero_ps();
        }
    }
    uint32_t i = 0;
    for (; i + 8 <= dim; i += 8) {
        __m512 value[2];
#pragma GCC unroll 2
        for (uint32_t p = 0; p < pairs; p++) {
            value[p] = _mm512_load_ps(pair[p].q + (size_t)i * 2);
        }
#pragma GCC unroll 8
        for (uint32_t t = 0; t < 8; t++) {
            __m512 key = load_key(k[t] + at, i, 8, is_bf16);
#pragma GCC unroll 2
            for (uint32_t p = 0; p < pairs; p++) {
                sum[p][t] = _mm512_fmadd_ps(value[p], key, sum[p][t]);
            }
        }
    }
    if (i < dim) { /* the rows' own values are followed by zeros */
#pragma GCC unroll 8
        for (uint32_t t = 0; t < 8; t++) {
            __m512 key = load_key(k[t] + at, i, dim - i, is_bf16);
#pragma GCC unroll 2
            for (uint32_t p = 0; p < pairs; p++) {
                __m512 value = _mm512_load_ps(pair[p].q + (size_t)i * 2);
                sum[p][t] = _mm512_fmadd_ps(value, key, sum[p][t]);
            }
        }
    }
#pragma GCC unroll 2
    for (uint32_t p = 0; p < pairs; p++) {
        out[p] = sum_halves_of_8(sum[p]);
    }
}

INLINE __m512 load_value(const unsigned char *row, uint32_t first, __mmask16 mask,
                         const bool is_bf16) {
    if (!is_bf16) {
        return _mm512_maskz_loadu_ps(mask, (const float *)(const void *)row + first);
    }
    const unsigned char *from = row + (size_t)first * 2;
    uint16_t halves[16] = {0};
    if (mask != 0xffff) {
        memcpy(halves, from, (size_t)__builtin_popcount(mask) * 2);
        from = (const unsigned char *)halves;
    }
    __m256i packed = _mm256_loadu_si256((const __m256i *)(const void *)from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16));
}

/* What a pair makes of one block: its rows' tokens in it (none of the first's, perhaps), their
 * scores, and by how much what was summed before shrinks. */
struct part {
    _Alignas(64) float score[2][KERNELS_ATTENTION_BLOCK];
    uint32_t count[2];
    float keep[2];
};

/* out[i .. i + 16 * vectors) = out * keep + sum of score[t] * v[t] for both rows, t upwards in one
 * chain. The last vector has the lanes of `last`. */
INLINE void values(const struct pair *pair, const struct part *part, const unsigned char *const *v,
                   size_t at, uint32_t i, __mmask16 last, const uint32_t vectors,
                   const bool is_bf16) {
    __m512 sum[2][4];
    memset(sum, 0, sizeof(sum));
    uint32_t t = 0;
    for (; t < part->count[0]; t++) {
        __m512 by[2] = {_mm512_set1_ps(part->score[0][t]), _mm512_set1_ps(part->score[1][t])};
#pragma GCC unroll 4
        for (uint32_t j = 0; j < vectors; j++) {
            __mmask16 mask = j + 1 == vectors ? last : (__mmask16)0xffff;
            __m512 value = load_value(v[t] + at, i + j * 16, mask, is_bf16);
            sum[0][j] = _mm512_fmadd_ps(by[0], value, sum[0][j]);
            sum[1][j] = _mm512_fmadd_ps(by[1], value, sum[1][j]);
        }
    }
    for (; t < part->count[1]; t++) { /* what only the second row sees */
        __m512 by = _mm512_set1_ps(part->score[1][t]);
#pragma GCC unroll 4
        for (uint32_t j = 0; j < vectors; j++) {
            __mmask16 mask = j + 1 == vectors ? last : (__mmask16)0xffff;
            sum[1][j] =
                _mm512_fmadd_ps(by, load_value(v[t] + at, i + j * 16, mask, is_bf16), sum[1][j]);
        }
    }
#pragma GCC unroll 2
    for (uint32_t h = 0; h < 2; h++) {
        if (part->count[h] == 0) {
            continue;
        }
#pragma GCC unroll 4
        for (uint32_t j = 0; j < vectors; j++) {
            __mmask16 mask = j + 1 == vectors ? last : (__mmask16)0xffff;
            float *out = pair->out[h] + i + (size_t)j * 16;
            __m512 old = _mm512_maskz_loadu_ps(mask, out);
            _mm512_mask_storeu_ps(out, mask,
                                  _mm512_fmadd_ps(old, _mm512_set1_ps(part->keep[h]), sum[h][j]));
        }
    }
}

INLINE __m256 half_of(__m512 v, const int which) {
    return which == 0 ? _mm512_castps512_ps256(v) : _mm512_extractf32x8_ps(v, 1);
}

/* Lanes of both halves that stand for tokens below the rows' counts, of the eight from t. */
INLINE __mmask16 real_lanes(const uint32_t *counts, uint32_t t) {
    uint32_t lanes[2];
    for (int h = 0; h < 2; h++) {
        lanes[h] = counts[h] >= t + 8 ? 0xffu : counts[h] > t ? (1u << (counts[h] - t)) - 1 : 0;
    }
    return (__mmask16)(lanes[0] | lanes[1] << 8);
}

/* Scores to weights, and the running maximum and total. */
INLINE void soften(struct pair *pair, struct part *part, __m512 largest) {
    float merged[2];
    for (int h = 0; h < 2; h++) {
        float block = largest_lane(h == 0 ? half_of(largest, 0) : half_of(largest, 1));
        merged[h] = block > pair->largest[h] ? block : pair->largest[h];
    }
    __m512 shrunk = exp_lanes(both(_mm256_set1_ps(pair->largest[0] - merged[0]),
                                   _mm256_set1_ps(pair->largest[1] - merged[1])));
    part->keep[0] = _mm256_cvtss_f32(half_of(shrunk, 0));
    part->keep[1] = _mm256_cvtss_f32(half_of(shrunk, 1));
    __m512 top = both(_mm256_set1_ps(merged[0]), _mm256_set1_ps(merged[1]));
    __m512 sum = _mm512_setzero_ps();
    for (uint32_t t = 0; t < part->count[1]; t += 8) {
        __m512 value = both(_mm256_load_ps(part->score[0] + t), _mm256_load_ps(part->score[1] + t));
        value = exp_lanes(_mm512_sub_ps(value, top));
        _mm256_store_ps(part->score[0] + t, half_of(value, 0));
        _mm256_store_ps(part->score[1] + t, half_of(value, 1));
        sum = _mm512_add_ps(sum, value);
    }
    for (int h = 0; h < 2; h++) {
        if (part->count[h] > 0) {
            float added = sum_lanes(h == 0 ? half_of(sum, 0) : half_of(sum, 1));
            pair->total[h] = pair->total[h] * part->keep[h] + added;
            pair->largest[h] = merged[h];
        }
    }
}

/* One block of one or two neighbouring pairs, which share the loads of the keys. K and V of their
 * head begin `at` bytes into the rows. next: the block whose part is asked for meanwhile, or NULL.
 */
INLINE void attend_block(const struct kernels_attention *a, const struct rows *rows,
                         const struct rows *next, size_t at, uint32_t first, struct pair *pair,
                         const uint32_t pairs, const bool is_bf16) {
    struct part parts[2];
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    __m512 largest[2] = {lowest, lowest};
    uint32_t count = 0;
    for (uint32_t p = 0; p < pairs; p++) {
        for (int h = 0; h < 2; h++) {
            parts[p].count[h] = block_tokens(pair[p].length[h], first);
        }
        count = parts[p].count[1]; /* later pairs see as many tokens, or more */
    }
    for (uint32_t t = 0; t < count; t += 8) {
        __m512 score[2];
        if (next != NULL) {
            rows_fetch(next, t, at, (size_t)a->head_dim * (is_bf16 ? 2 : 4));
        }
        dots(pair, rows->k + t, at, a->head_dim, score, pairs, is_bf16);
#pragma GCC unroll 2
        for (uint32_t p = 0; p < pairs; p++) {
            __mmask16 real = real_lanes(parts[p].count, t);
            __m512 value = _mm512_mul_ps(score[p], _mm512_set1_ps(a->scale));
            value = _mm512_mask_blend_ps(real, lowest, value);
            _mm256_store_ps(parts[p].score[0] + t, half_of(value, 0));
            _mm256_store_ps(parts[p].score[1] + t, half_of(value, 1));
            largest[p] = _mm512_max_ps(value, largest[p]);
        }
    }
    uint32_t dim = a->head_dim;
    for (uint32_t p = 0; p < pairs; p++) {
        if (parts[p].count[1] == 0) {
            continue;
        }
        soften(&pair[p], &parts[p], largest[p]);
        uint32_t i = 0;
        for (; i + 64 <= dim; i += 64) {
            values(&pair[p], &parts[p], rows->v, at, i, 0xffff, 4, is_bf16);
        }
        for (; i < dim; i += 16) {
            values(&pair[p], &parts[p], rows->v, at, i, tail_mask(dim - i), 1, is_bf16);
        }
    }
}

typedef void (*attend_fn)(const struct kernels_attention *a, const struct rows *rows,
                          const struct rows *next, size_t at, uint32_t first, struct pair *pair,
                          uint32_t pairs);

static void attend_block_f32(const struct kernels_attention *a, const struct rows *rows,
                             const struct rows *next, size_t at, uint32_t first, struct pair *pair,
                             uint32_t pairs) {
    if (pairs == 2) {
        attend_block(a, rows, next, at, first, pair, 2, false);
    } else {
        attend_block(a, rows, next, at, first, pair, 1, false);
    }
}
static void attend_block_bf16(const struct kernels_attention *a, const struct rows *rows,
                              const struct rows *next, size_t at, uint32_t first, struct pair *pair,
                              uint32_t pairs) {
    if (pairs == 2) {
        attend_block(a, rows, next, at, first, pair, 2, true);
    } else {
        attend_block(a, rows, next, at, first, pair, 1, true);
    }
}

/* Query rows that go through the blocks together: few enough for their values to stay in the cache.
 * Those of one KV head, so that they share each block; for a single token those of several, so that
 * what is read lies in memory block by block. */
#define PAIRS_MAX    24u
#define HEAD_DIM_MAX 1024u
#define QUERY_FLOATS 8192u

/* Some query rows of neighbouring KV heads, of each head as many: row r of a head is head r % group
 * of token r / group. */
struct attend {
    const struct kernels_attention *a;
    struct pair pairs[PAIRS_MAX];
    uint32_t count;   /* pairs of each KV head */
    uint32_t kv_head; /* the first */
    uint32_t kv_heads;
    float spare[HEAD_DIM_MAX]; /* what the second half of an odd last pair computes */
    _Alignas(64) float query[QUERY_FLOATS];
};

/* A head's width in whole eights; q has zeros there. */
static uint32_t eights(uint32_t dim) {
    return (dim + 7) / 8 * 8;
}

static uint32_t query_floats(uint32_t dim) {
    return 2 * eights(dim); /* of a pair */
}

static void pairs_make(struct attend *attend, uint32_t row_first, uint32_t row_count) {
    const struct kernels_attention *a = attend->a;
    uint32_t dim = a->head_dim;
    uint32_t group = a->heads / a->kv_heads;
    attend->count = (row_count + 1) / 2;
    for (uint32_t p = 0; p < attend->kv_heads * attend->count; p++) {
        struct pair *pair = &attend->pairs[p];
        float *query = attend->query + (size_t)p * query_floats(dim);
        pair->q = query;
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t r = p % attend->count * 2 + half;
            bool is_spare = r == row_count;
            uint32_t row = row_first + (is_spare ? r - 1 : r);
            uint32_t token = row / group;
            uint32_t kv_head = attend->kv_head + p / attend->count;
            size_t head = (size_t)(kv_head * group + row % group) * dim;
            const float *from = a->q + token * a->q_stride + head;
            for (uint32_t i = 0; i < dim; i += 8) {
                __mmask8 mask = (__mmask8)tail_mask(dim - i < 8 ? dim - i : 8);
                _mm256_store_ps(query + (size_t)i * 2 + (size_t)half * 8,
                                _mm256_maskz_loadu_ps(mask, from + i));
            }
            pair->out[half] = is_spare ? attend->spare : a->out + token * a->out_stride + head;
            pair->length[half] = a->length + token;
            pair->largest[half] = -INFINITY;
            pair->total[half] = 0;
            memset(pair->out[half], 0, dim * sizeof(float));
        }
    }
}

/* One block in all heads. */
static void heads_attend(struct attend *attend, uint32_t first, const struct rows *rows,
                         const struct rows *next) {
    const struct kernels_attention *a = attend->a;
    bool is_bf16 = a->kv_dtype == KERNELS_BF16;
    attend_fn block = is_bf16 ? attend_block_bf16 : attend_block_f32;
    for (uint32_t h = 0; h < attend->kv_heads; h++) {
        size_t at = (size_t)(attend->kv_head + h) * a->head_dim * (is_bf16 ? 2 : 4);
        for (uint32_t i = 0; i < attend->count; i += 2) {
            block(a, rows, i == 0 ? next : NULL, at, first, &attend->pairs[h * attend->count + i],
                  attend->count - i < 2 ? 1 : 2);
        }
    }
}

static void attend_rows(const struct kernels_attention *a, uint32_t kv_head, uint32_t kv_heads,
                        uint32_t row_first, uint32_t row_count) {
    struct attend attend;
    struct rows rows[2]; /* this block's and the next one's */
    attend.a = a;
    attend.kv_head = kv_head;
    attend.kv_heads = kv_heads;
    pairs_make(&attend, row_first, row_count);
    uint32_t length = attend.pairs[attend.count - 1].length[1];
    rows_find(a, 0, length, &rows[0]);
    for (uint32_t first = 0, n = 0; first < length; first += KERNELS_ATTENTION_BLOCK, n++) {
        struct rows *next = NULL;
        if (length - first > KERNELS_ATTENTION_BLOCK) {
            next = &rows[(n + 1) % 2];
            rows_find(a, first + KERNELS_ATTENTION_BLOCK, length, next);
        }
        heads_attend(&attend, first, &rows[n % 2], next);
    }
    for (uint32_t p = 0; p < kv_heads * attend.count; p++) {
        for (uint32_t half = 0; half < 2; half++) {
            float *out = attend.pairs[p].out[half];
            for (uint32_t j = 0; j < a->head_dim && out != attend.spare; j++) {
                out[j] /= attend.pairs[p].total[half];
            }
        }
    }
}

/* ---- attention of many query rows of one KV head ---- */

/* A block's keys are turned first, so that a register holds one column of sixteen tokens and a
 * query value meets it whole. A dot product's eight lanes are eight registers then, each a chain
 * over every eighth column, added up in the order in which sum_lanes adds lanes: the same bits,
 * without a shuffle for each product. */

#define MANY_ROWS_MIN  8u   /* for fewer the turning costs more than it gives */
#define MANY_DIM_MAX   128u /* whose keys and values stay in the cache */
#define MANY_ROWS_MAX  96u
#define FOUR           4u /* rows that are computed together */
#define TOKENS         32u
#define TURNED(d_, t_) ((size_t)(d_)*KERNELS_ATTENTION_BLOCK + (t_))

struct many {
    const struct kernels_attention *a;
    uint32_t wide;  /* head_dim, padded to whole eights with zeros in q and keys */
    uint32_t count; /* rows, padded to whole fours by the last one again */
    float *out[MANY_ROWS_MAX];
    uint32_t length[MANY_ROWS_MAX];
    float largest[MANY_ROWS_MAX];
    float total[MANY_ROWS_MAX];
    float spare[MANY_DIM_MAX]; /* what the padding computes */
    _Alignas(64) float query[QUERY_FLOATS];
    _Alignas(64) float keys[MANY_DIM_MAX * KERNELS_ATTENTION_BLOCK];   /* [wide] of [tokens] */
    _Alignas(64) float values[KERNELS_ATTENTION_BLOCK * MANY_DIM_MAX]; /* of BF16, widened */
    _Alignas(64) float score[FOUR][KERNELS_ATTENTION_BLOCK];
};

/* Sixteen registers as rows of a square become its columns. */
INLINE void turn_16(__m512 *r) {
    __m512 s[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        s[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        s[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            __m512d low = _mm512_castps_pd(s[4 * i + j]);
            __m512d high = _mm512_castps_pd(s[4 * i + 2 + j]);
            r[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            r[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        s[i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88);
        s[4 + i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
        s[8 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
        s[12 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(s[i], s[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_f32x4(s[i], s[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_f32x4(s[4 + i], s[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_f32x4(s[4 + i], s[12 + i], 0xdd);
    }
}

/* The block's keys, turned; tokens past the last one repeat it. */
INLINE void keys_turn(struct many *many, const struct rows *rows, size_t at, const bool is_bf16) {
    uint32_t dim = many->a->head_dim;
    uint32_t end = (rows->count + TOKENS - 1) / TOKENS * TOKENS;
    for (uint32_t t = 0; t < end; t += 16) {
        for (uint32_t d = 0; d < dim; d += 16) {
            __m512 square[16];
#pragma GCC unroll 16
            for (uint32_t i = 0; i < 16; i++) {
                uint32_t token = t + i < rows->count ? t + i : rows->count - 1;
                square[i] = load_value(rows->k[token] + at, d, tail_mask(dim - d), is_bf16);
            }
            turn_16(square);
#pragma GCC unroll 16
            for (uint32_t i = 0; i < 16; i++) {
                if (d + i < many->wide) {
                    _mm512_store_ps(many->keys + TURNED(d + i, t), square[i]);
                }
            }
        }
    }
}

static void values_widen(struct many *many, struct rows *rows, size_t at) {
    uint32_t dim = many->a->head_dim;
    for (uint32_t t = 0; t < rows->count; t++) {
        float *to = many->values + (size_t)t * MANY_DIM_MAX;
        for (uint32_t d = 0; d < dim; d += 16) {
            __mmask16 mask = tail_mask(dim - d);
            _mm512_mask_storeu_ps(to + d, mask, load_value(rows->v[t] + at, d, mask, true));
        }
        rows->v[t] = (const unsigned char *)to;
    }
}

/* Sums of lanes `lane` and `lane` + 4 of four rows with 32 tokens: a register each half. */
INLINE void two_lanes(const float *q, uint32_t wide, const float *keys, uint32_t lane,
                      __m512 (*out)[2]) {
    __m512 sum[FOUR][2][2];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < FOUR; i++) {
#pragma GCC unroll 2
        for (uint32_t j = 0; j < 2; j++) {
            sum[i][j][0] = _mm512_setzero_ps();
            sum[i][j][1] = _mm512_setzero_ps();
        }
    }
    for (uint32_t d = lane; d < wide; d += 8) {
#pragma GCC unroll 2
        for (uint32_t j = 0; j < 2; j++) {
            const float *column = keys + TURNED(d + 4 * j, 0);
            __m512 low = _mm512_load_ps(column);
            __m512 high = _mm512_load_ps(column + 16);
#pragma GCC unroll 4
            for (uint32_t i = 0; i < FOUR; i++) {
                __m512 value = _mm512_set1_ps(q[(size_t)i * wide + d + 4 * j]);
                sum[i][j][0] = _mm512_fmadd_ps(value, low, sum[i][j][0]);
                sum[i][j][1] = _mm512_fmadd_ps(value, high, sum[i][j][1]);
            }
        }
    }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < FOUR; i++) {
        out[i][0] = _mm512_add_ps(sum[i][0][0], sum[i][1][0]);
        out[i][1] = _mm512_add_ps(sum[i][0][1], sum[i][1][1]);
    }
}

/* The same for that lane and the second next, which are added in turn. */
INLINE void four_lanes(const float *q, uint32_t wide, const float *keys, uint32_t lane,
                       __m512 (*out)[2]) {
    __m512 more[FOUR][2];
    two_lanes(q, wide, keys, lane, out);
    two_lanes(q, wide, keys, lane + 2, more);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < FOUR; i++) {
        out[i][0] = _mm512_add_ps(out[i][0], more[i][0]);
        out[i][1] = _mm512_add_ps(out[i][1], more[i][1]);
    }
}

/* Four rows' scores with the block's tokens, and their largest. counts: each row's tokens in it. */
static __attribute__((noinline)) void four_scores(struct many *many, uint32_t row,
                                                  const uint32_t *counts, float *largest) {
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    const __m512 scale = _mm512_set1_ps(many->a->scale);
    const float *q = many->query + (size_t)row * many->wide;
    __m512 most[FOUR] = {lowest, lowest, lowest, lowest};
    for (uint32_t first = 0; first < counts[FOUR - 1]; first += TOKENS) {
        __m512 even[FOUR][2];
        __m512 odd[FOUR][2];
        four_lanes(q, many->wide, many->keys + first, 0, even);
        four_lanes(q, many->wide, many->keys + first, 1, odd);
#pragma GCC unroll 4
        for (uint32_t i = 0; i < FOUR; i++) {
#pragma GCC unroll 2
            for (uint32_t j = 0; j < 2; j++) {
                uint32_t t = first + j * 16;
                __mmask16 real = counts[i] > t ? tail_mask(counts[i] - t) : 0;
                __m512 value = _mm512_mul_ps(_mm512_add_ps(even[i][j], odd[i][j]), scale);
                value = _mm512_mask_blend_ps(real, lowest, value);
                _mm512_store_ps(many->score[i] + t, value);
                most[i] = _mm512_max_ps(value, most[i]);
            }
        }
    }
    for (uint32_t i = 0; i < FOUR; i++) {
        largest[i] = largest_lane(_mm256_max_ps(half_of(most[i], 0), half_of(most[i], 1)));
    }
}

/* As soften, for one row; returns by how much what was summed before shrinks. */
INLINE float row_soften(struct many *many, uint32_t row, float *score, uint32_t count,
                        float block) {
    float merged = block > many->largest[row] ? block : many->largest[row];
    float keep = _mm512_cvtss_f32(exp_lanes(_mm512_set1_ps(many->largest[row] - merged)));
    __m256 sum = _mm256_setzero_ps();
    for (uint32_t t = 0; t < count; t += 16) {
        __m512 value = exp_lanes(_mm512_sub_ps(_mm512_load_ps(score + t), _mm512_set1_ps(merged)));
        _mm512_store_ps(score + t, value);
        sum = _mm256_add_ps(_mm256_add_ps(sum, half_of(value, 0)), half_of(value, 1));
    }
    many->total[row] = many->total[row] * keep + sum_lanes(sum);
    many->largest[row] = merged;
    return keep;
}

/* out[i .. i + 16 * vectors) of four rows, as in `values`. The counts do not fall. */
INLINE void four_values(struct many *many, uint32_t row, const uint32_t *counts, const float *keep,
                        const unsigned char *const *v, size_t at, uint32_t i, __mmask16 last,
                        const uint32_t vectors) {
    __m512 sum[FOUR][4];
#pragma GCC unroll 4
    for (uint32_t r = 0; r < FOUR; r++) {
#pragma GCC unroll 4
        for (uint32_t j = 0; j < vectors; j++) {
            sum[r][j] = _mm512_setzero_ps();
        }
    }
    uint32_t t = 0;
#pragma GCC unroll 4
    for (uint32_t begin = 0; begin < FOUR; begin++) { /* rows from here on see these tokens */
        for (; t < counts[begin]; t++) {
            const float *from = (const float *)(const void *)(v[t] + at) + i;
            __m512 value[4];
#pragma GCC unroll 4
            for (uint32_t j = 0; j < vectors; j++) {
                __mmask16 mask = j + 1 == vectors ? last : (__mmask16)0xffff;
                value[j] = _mm512_maskz_loadu_ps(mask, from + (size_t)j * 16);
            }
#pragma GCC unroll 4
            for (uint32_t r = 0; r < FOUR; r++) {
                if (r < begin) {
                    continue;
                }
                __m512 by = _mm512_set1_ps(many->score[r][t]);
#pragma GCC unroll 4
                for (uint32_t j = 0; j < vectors; j++) {
                    sum[r][j] = _mm512_fmadd_ps(by, value[j], sum[r][j]);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (uint32_t r = 0; r < FOUR; r++) {
        if (counts[r] == 0) {
            continue;
        }
#pragma GCC unroll 4
        for (uint32_t j = 0; j < vectors; j++) {
            __mmask16 mask = j + 1 == vectors ? last : (__mmask16)0xffff;
            float *out = many->out[row + r] + i + (size_t)j * 16;
            __m512 old = _mm512_maskz_loadu_ps(mask, out);
            _mm512_mask_storeu_ps(out, mask,
                                  _mm512_fmadd_ps(old, _mm512_set1_ps(keep[r]), sum[r][j]));
        }
    }
}

/* Functions of their own: inlined into one, they would take registers from each other. */
#define FOUR_VALUES(vectors_)                                                                      \
    static __attribute__((noinline)) void four_values_##vectors_(                                  \
        struct many *many, uint32_t row, const uint32_t *counts, const float *keep,                \
        const unsigned char *const *v, size_t at, uint32_t i, __mmask16 last) {                    \
        four_values(many, row, counts, keep, v, at, i, last, vectors_);                            \
    }
FOUR_VALUES(1)
FOUR_VALUES(2)
FOUR_VALUES(3)
FOUR_VALUES(4)
/* By vectors - 1. */
static void (*const four_values_of[])(struct many *many, uint32_t row, const uint32_t *counts,
                                      const float *keep, const unsigned char *const *v, size_t at,
                                      uint32_t i, __mmask16 last) = {four_values_1, four_values_2,
                                                                     four_values_3, four_values_4};

/* Four rows and the block that begins at token `first`. */
static void four_attend(struct many *many, uint32_t row, uint32_t first, const struct rows *rows,
                        size_t at) {
    uint32_t counts[FOUR];
    float keep[FOUR] = {1, 1, 1, 1};
    float largest[FOUR];
    for (uint32_t i = 0; i < FOUR; i++) {
        counts[i] = block_tokens(many->length[row + i], first);
    }
    four_scores(many, row, counts, largest);
    for (uint32_t i = 0; i < FOUR; i++) {
        if (counts[i] > 0) {
            keep[i] = row_soften(many, row + i, many->score[i], counts[FOUR - 1], largest[i]);
        }
    }
    uint32_t dim = many->a->head_dim;
    for (uint32_t i = 0; i < dim; i += 64) {
        uint32_t width = dim - i < 64 ? dim - i : 64;
        uint32_t vectors = (width + 15) / 16;
        four_values_of[vectors - 1](many, row, counts, keep, rows->v, at, i,
                                    tail_mask(width - 16 * (vectors - 1)));
    }
}

static void many_attend(const struct kernels_attention *a, uint32_t kv_head, uint32_t row_first,
                        uint32_t row_count) {
    struct many many;
    uint32_t dim = a->head_dim;
    uint32_t group = a->heads / a->kv_heads;
    bool is_bf16 = a->kv_dtype == KERNELS_BF16;
    size_t at = (size_t)kv_head * dim * (is_bf16 ? 2 : 4);
    many.a = a;
    many.wide = eights(dim);
    many.count = (row_count + FOUR - 1) / FOUR * FOUR;
    for (uint32_t r = 0; r < many.count; r++) {
        uint32_t row = row_first + (r < row_count ? r : row_count - 1);
        size_t head = (size_t)(kv_head * group + row % group) * dim;
        float *query = many.query + (size_t)r * many.wide;
        memset(query, 0, many.wide * sizeof(float));
        memcpy(query, a->q + row / group * a->q_stride + head, dim * sizeof(float));
        many.out[r] = r < row_count ? a->out + row / group * a->out_stride + head : many.spare;
        many.length[r] = a->length + row / group;
        many.largest[r] = -INFINITY;
        many.total[r] = 0;
        memset(many.out[r], 0, dim * sizeof(float));
    }
    memset(many.keys + TURNED(dim, 0), 0,
           (size_t)(many.wide - dim) * KERNELS_ATTENTION_BLOCK * sizeof(float));
    uint32_t length = many.length[many.count - 1];
    for (uint32_t first = 0; first < length; first += KERNELS_ATTENTION_BLOCK) {
        struct rows rows;
        rows_find(a, first, length, &rows);
        if (is_bf16) {
            keys_turn(&many, &rows, at, true);
            values_widen(&many, &rows, at);
        } else {
            keys_turn(&many, &rows, at, false);
        }
        for (uint32_t row = 0; row < many.count; row += FOUR) {
            if (many.length[row + FOUR - 1] > first) {
                four_attend(&many, row, first, &rows, is_bf16 ? 0 : at);
            }
        }
    }
    for (uint32_t r = 0; r < row_count; r++) {
        for (uint32_t j = 0; j < dim; j++) {
            many.out[r][j] /= many.total[r];
        }
    }
}

static void avx512_attention(const struct kernels_attention *a, uint32_t kv_head_first,
                             uint32_t kv_head_end) {
    uint32_t rows = a->tokens * (a->heads / a->kv_heads);
    if (rows == 1 || a->head_dim > HEAD_DIM_MAX) { /* nothing to pair */
        kernels_avx2.attention(a, kv_head_first, kv_head_end);
        return;
    }
    if (rows >= MANY_ROWS_MIN && a->tokens > 1 && a->head_dim <= MANY_DIM_MAX) {
        uint32_t most = QUERY_FLOATS / eights(a->head_dim) / FOUR * FOUR;
        most = most < MANY_ROWS_MAX ? most : MANY_ROWS_MAX;
        for (uint32_t h = kv_head_first; h < kv_head_end; h++) {
            for (uint32_t row = 0; row < rows; row += most) {
                many_attend(a, h, row, rows - row < most ? rows - row : most);
            }
        }
        return;
    }
    uint32_t pairs = QUERY_FLOATS / query_floats(a->head_dim);
    pairs = pairs < PAIRS_MAX ? pairs : PAIRS_MAX;
    uint32_t at_once = a->tokens > 1 ? 1 : pairs / ((rows + 1) / 2);
    at_once = at_once < 1 ? 1 : at_once;
    for (uint32_t h = kv_head_first; h < kv_head_end; h += at_once) {
        uint32_t heads = kv_head_end - h < at_once ? kv_head_end - h : at_once;
        for (uint32_t row = 0; row < rows; row += 2 * pairs) {
            attend_rows(a, h, heads, row, rows - row < 2 * pairs ? rows - row : 2 * pairs);
        }
    }
}

/* ---- what is the same instructions ---- */

static void avx512_quantize(const struct kernels_quants *to, uint32_t row, const float *x,
                            uint32_t cols) {
    kernels_avx2.quantize(to, row, x, cols);
}
static void avx512_rms_norm(float *out, const float *x, const float *weight, uint32_t width,
                            float epsilon) {
    kernels_avx2.rms_norm(out, x, weight, width, epsilon);
}
static void avx512_rotary(float *x, const float *cosine, const float *sine, uint32_t heads,
                          uint32_t head_dim) {
    kernels_avx2.rotary(x, cosine, sine, heads, head_dim);
}
static void avx512_widen(float *to, const void *from, enum kernels_dtype dtype, size_t count) {
    kernels_avx2.widen(to, from, dtype, count);
}
static void avx512_store(void *to, enum kernels_dtype dtype, const float *from, size_t count) {
    kernels_avx2.store(to, dtype, from, count);
}

/* As plain.c's, lane by lane: no fused operation here. */
INLINE __m512d wide_exp(__m512d x) {
    static const double inverse_factorial[] = {EXP_FACTORS};
    const __m512d shift = _mm512_set1_pd(EXP_SHIFT);
    __m512d shifted = _mm512_add_pd(_mm512_mul_pd(x, _mm512_set1_pd(EXP_LOG2_E)), shift);
    __m512d n = _mm512_sub_pd(shifted, shift);
    __m512d r = _mm512_sub_pd(x, _mm512_mul_pd(n, _mm512_set1_pd(EXP_LN_2)));
    r = _mm512_sub_pd(r, _mm512_mul_pd(n, _mm512_set1_pd(EXP_LN_2_REST)));
    __m512d p = _mm512_set1_pd(inverse_factorial[0]);
#pragma GCC unroll 12
    for (size_t i = 1; i < sizeof(inverse_factorial) / sizeof(inverse_factorial[0]); i++) {
        p = _mm512_add_pd(_mm512_mul_pd(p, r), _mm512_set1_pd(inverse_factorial[i]));
    }
    p = _mm512_add_pd(r, _mm512_mul_pd(_mm512_mul_pd(r, r), p));
    p = _mm512_add_pd(_mm512_set1_pd(1.0), p);
    /* The whole number is in the low bits; those above it leave at the top. */
    __m512i power = _mm512_slli_epi64(
        _mm512_add_epi64(_mm512_castpd_si512(shifted), _mm512_set1_epi64(1023)), 52);
    __mmask8 is_less = _mm512_cmp_pd_mask(x, _mm512_set1_pd(EXP_LOWEST), _CMP_LT_OQ);
    __mmask8 is_more = _mm512_cmp_pd_mask(x, _mm512_set1_pd(EXP_HIGHEST), _CMP_GT_OQ);
    __mmask8 is_none = _mm512_cmp_pd_mask(x, x, _CMP_UNORD_Q);
    p = _mm512_maskz_mul_pd((__mmask8)~is_less, p, _mm512_castsi512_pd(power));
    p = _mm512_mask_mov_pd(p, is_more, _mm512_set1_pd((double)INFINITY));
    return _mm512_mask_mov_pd(p, is_none, x);
}

INLINE __m512d distance_of(__m256 x, __m512d top, __m512d by, const bool is_divided) {
    __m512d distance = _mm512_sub_pd(_mm512_cvtps_pd(x), top);
    return is_divided ? _mm512_div_pd(distance, by) : distance;
}

/* Four registers at a time: each step of the polynomial waits for the one before. */
INLINE void exps(double *out, const float *x, size_t count, __m512d top, __m512d by,
                 const bool is_divided) {
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
#pragma GCC unroll 4
        for (size_t j = i; j < i + 32; j += 8) {
            __m512d distance = distance_of(_mm256_loadu_ps(x + j), top, by, is_divided);
            _mm512_storeu_pd(out + j, wide_exp(distance));
        }
    }
    for (; i < count; i += 8) {
        __mmask8 mask = (__mmask8)tail_mask(count - i < 8 ? count - i : 8);
        __m512d distance = distance_of(_mm256_maskz_loadu_ps(mask, x + i), top, by, is_divided);
        _mm512_mask_storeu_pd(out + i, mask, wide_exp(distance));
    }
}

static void avx512_exps(double *out, const float *x, size_t count, float largest,
                        float temperature) {
    const __m512d top = _mm512_set1_pd((double)largest);
    const __m512d by = _mm512_set1_pd((double)temperature);
    if (temperature == 1.0f) {
        exps(out, x, count, top, by, false);
    } else {
        exps(out, x, count, top, by, true);
    }
}

/* All that does not depend on how products are computed. */
#define REST                                                                                       \
    .numerics = "avx2" /* bit for bit */, .quantize = avx512_quantize,                             \
    .rms_norm = avx512_rms_norm, .rotary = avx512_rotary, .silu_mul = avx512_silu_mul,             \
    .add = avx512_add, .widen = avx512_widen, .store = avx512_store, .exps = avx512_exps,          \
    .attention = avx512_attention

const struct kernels kernels_avx512 = {
    .name = "avx512", .bf16_numerics = "avx2", .gemm = avx512_gemm, REST};

/* Pairs of BF16 at once, and all else the same. */
const struct kernels kernels_avx512bf16 = {.name = "avx512bf16",
                                           .bf16_numerics = "avx512bf16",
                                           .gemm = kernels_bf16_gemm,
                                           .round = avx512_round,
                                           REST};

/* Matrix tiles for the products of the two short types, and all else the same. */
const struct kernels kernels_amx = {
    .name = "amx", .bf16_numerics = "amx", .gemm = kernels_amx_gemm, .round = avx512_round, REST};
