/* What the two vector backends share: addresses of paged rows, and reductions of eight lanes in the
 * one order that both give. Included by files that are built for AVX2 at least. */
#ifndef KERNELS_CPU_VECTOR_H
#define KERNELS_CPU_VECTOR_H

#include "kernels/kernels.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

/* Lanes added in one fixed order. */
INLINE float sum_lanes(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    half = _mm_add_ss(half, _mm_movehdup_ps(half));
    return _mm_cvtss_f32(half);
}
INLINE float largest_lane(__m256 v) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    half = _mm_max_ss(half, _mm_movehdup_ps(half));
    return _mm_cvtss_f32(half);
}

/* Bytes of a panel of F32 or BF16 weights. */
INLINE size_t panel_bytes(const struct kernels_weights *weights) {
    return weights->dtype == KERNELS_F32
               ? (size_t)weights->cols * KERNELS_PANEL * sizeof(float)
               : (size_t)kernels_halves(weights->cols) * KERNELS_PANEL * sizeof(uint16_t);
}

/* Where share i begins when `parts` share `count` as evenly as whole numbers allow. */
INLINE uint32_t share_first(uint32_t count, uint32_t parts, uint32_t i) {
    return (uint32_t)((uint64_t)count * i / parts);
}

/* How many tokens of the block at `first` lie below `length`. */
INLINE uint32_t block_tokens(uint32_t length, uint32_t first) {
    uint32_t rest = length > first ? length - first : 0;
    return rest < KERNELS_ATTENTION_BLOCK ? rest : KERNELS_ATTENTION_BLOCK;
}

/* The rows of one block of tokens, all heads: where each begins. */
struct rows {
    const unsigned char *k[KERNELS_ATTENTION_BLOCK];
    const unsigned char *v[KERNELS_ATTENTION_BLOCK];
    uint32_t count; /* a multiple of 8; past the last real row that one repeats: it is computed and
                       thrown away */
};

/* Of the block that begins at token `first` and ends with it, or at `length`. */
static inline void rows_find(const struct kernels_attention *a, uint32_t first, uint32_t length,
                             struct rows *rows) {
    uint32_t page = first / a->page_tokens;
    uint32_t in_page = first % a->page_tokens;
    uint32_t count = block_tokens(length, first);
    for (uint32_t t = 0; t < count; t++) {
        uint64_t at = (uint64_t)a->pages[page] * a->page_bytes + in_page * a->row_bytes;
        rows->k[t] = a->base + at + a->k_offset;
        rows->v[t] = a->base + at + a->v_offset;
        if (++in_page == a->page_tokens) {
            in_page = 0;
            page++;
        }
    }
    for (rows->count = count; rows->count % 8 != 0; rows->count++) {
        rows->k[rows->count] = rows->k[count - 1];
        rows->v[rows->count] = rows->v[count - 1];
    }
}

/* Asks for one head's part, `size` bytes from `at`, of eight rows of the block that comes next: a
 * few lines here and there, which no prefetcher of the processor guesses. */
INLINE void rows_fetch(const struct rows *next, uint32_t t, size_t at, size_t size) {
    for (uint32_t end = t + 8; t < end && t < next->count; t++) {
        for (size_t line = at; line < at + size; line += 64) {
            _mm_prefetch((const char *)next->k[t] + line, _MM_HINT_T0);
            _mm_prefetch((const char *)next->v[t] + line, _MM_HINT_T0);
        }
    }
}

/* A function for each size of tile: inlined into one, they would take a compiler minutes. */
typedef void (*tile_fn)(const struct kernels_gemm *gemm, uint32_t row, uint32_t panel,
                        uint32_t first, uint32_t count);

/* The processor's own prefetchers stop at each 4 KiB; few streams need one that does not. */
#define PREFETCH_BYTES 4096

/* AMD's (measured on Zen 5) follow a stream by themselves, and are slower over more streams than a
 * few; others want many, to have as much under way. */
INLINE bool wants_few_streams(void) {
    return __builtin_cpu_is("amd") != 0;
}

#endif
