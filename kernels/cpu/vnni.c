/* Products with I8 weights by AVX-512 VNNI: four products of a byte with a byte are added to each
 * lane at once, exactly. A file of its own, since not every CPU with AVX-512 has it. */
#include "kernels/cpu/tables.h"
#include "kernels/cpu/vector.h"

#include <string.h>

#define I8_ROWS   6u  /* of a tile, two panels wide or one of several */
#define I8_ALONE  12u /* of one panel's only tile */
#define I8_GROUPS 12u /* two panels' slice (26 KB) stays in the first-level cache */

/* `rows` rows times `panels` neighbouring panels, groups [first, end). Four products of a byte with
 * a byte are added to each lane at once, exactly. */
INLINE void tile_i8(const struct kernels_gemm *gemm, uint32_t row, uint32_t panel, uint32_t first,
                    uint32_t end, const uint32_t rows, const uint32_t panels) {
    uint32_t groups = kernels_groups(gemm->weights->cols);
    size_t w_stride = (size_t)groups * KERNELS_GROUP_BYTES;
    const unsigned char *w = (const unsigned char *)gemm->weights->data + panel * w_stride +
                             (size_t)first * KERNELS_GROUP_BYTES;
    float *y = gemm->y + row * gemm->y_stride + (size_t)panel * KERNELS_PANEL;
    __m512 total[I8_ALONE][8];
#pragma GCC unroll 12
    for (uint32_t i = 0; i < rows; i++) {
#pragma GCC unroll 8
        for (uint32_t p = 0; p < panels; p++) {
            total[i][p] = first == 0
                              ? _mm512_setzero_ps()
                              : _mm512_loadu_ps(y + i * gemm->y_stride + (size_t)p * KERNELS_PANEL);
        }
    }
    for (uint32_t group = first; group < end; group++, w += KERNELS_GROUP_BYTES) {
        const int8_t *x[I8_ALONE];
        __m512i sum[I8_ALONE][8];
#pragma GCC unroll 12
        for (uint32_t i = 0; i < rows; i++) {
            size_t at = (size_t)(row + i) * groups + group;
            x[i] = gemm->quants.numbers + at * KERNELS_GROUP;
            __asm__("" : "+r"(x[i]));
#pragma GCC unroll 8
            for (uint32_t p = 0; p < panels; p++) {
                sum[i][p] = _mm512_set1_epi32(gemm->quants.offsets[at]);
            }
        }
#pragma GCC unroll 4
        for (uint32_t quad = 0; quad < KERNELS_GROUP / 4; quad++) {
            __m512i numbers[8];
#pragma GCC unroll 8
            for (uint32_t p = 0; p < panels; p++) {
                const unsigned char *at =
                    w + p * w_stride + KERNELS_PANEL * sizeof(float) + (size_t)quad * 64;
                _mm_prefetch((const char *)at + PREFETCH_BYTES, _MM_HINT_T0);
                numbers[p] = _mm512_load_si512(at);
            }
#pragma GCC unroll 12
            for (uint32_t i = 0; i < rows; i++) {
                int32_t four;
                memcpy(&four, x[i] + (size_t)quad * 4, sizeof(four));
                __m512i value = _mm512_set1_epi32(four);
#pragma GCC unroll 8
                for (uint32_t p = 0; p < panels; p++) {
                    sum[i][p] = _mm512_dpbusd_epi32(sum[i][p], numbers[p], value);
                }
            }
        }
#pragma GCC unroll 12
        for (uint32_t i = 0; i < rows; i++) {
            __m512 by = _mm512_set1_ps(gemm->quants.scales[(size_t)(row + i) * groups + group]);
#pragma GCC unroll 8
            for (uint32_t p = 0; p < panels; p++) {
                __m512 scale = _mm512_mul_ps(_mm512_load_ps(w + p * w_stride), by);
                total[i][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[i][p]), scale, total[i][p]);
            }
        }
    }
#pragma GCC unroll 12
    for (uint32_t i = 0; i < rows; i++) {
#pragma GCC unroll 8
        for (uint32_t p = 0; p < panels; p++) {
            _mm512_storeu_ps(y + i * gemm->y_stride + (size_t)p * KERNELS_PANEL, total[i][p]);
        }
    }
}

#define TILE_I8(rows_, panels_)                                                                    \
    static void i8_##rows_##x##panels_(const struct kernels_gemm *gemm, uint32_t row,              \
                                       uint32_t panel, uint32_t first, uint32_t end) {             \
        tile_i8(gemm, row, panel, first, end, rows_, panels_);                                     \
    }
TILE_I8(1, 1)
TILE_I8(2, 1)
TILE_I8(3, 1)
TILE_I8(4, 1)
TILE_I8(5, 1)
TILE_I8(6, 1)
TILE_I8(7, 1)
TILE_I8(8, 1)
TILE_I8(9, 1)
TILE_I8(10, 1)
TILE_I8(11, 1)
TILE_I8(12, 1)
TILE_I8(1, 2)
TILE_I8(2, 2)
TILE_I8(3, 2)
TILE_I8(4, 2)
TILE_I8(5, 2)
TILE_I8(6, 2)
TILE_I8(1, 4)
TILE_I8(2, 4)

/* By rows - 1. */
static const tile_fn narrow_tiles_i8[I8_ALONE] = {i8_1x1, i8_2x1,  i8_3x1,  i8_4x1,
                                                  i8_5x1, i8_6x1,  i8_7x1,  i8_8x1,
                                                  i8_9x1, i8_10x1, i8_11x1, i8_12x1};
static const tile_fn tiles_i8[I8_ROWS] = {i8_1x2, i8_2x2, i8_3x2, i8_4x2, i8_5x2, i8_6x2};
static const tile_fn wide_tiles_i8[2] = {i8_1x4, i8_2x4};

/* All rows times the panels of a tile, cut along k where there are several tiles, so that the
 * weights stay in the cache. */
static void strip_i8(const struct kernels_gemm *gemm, uint32_t panel, const tile_fn *tiles,
                     uint32_t parts) {
    uint32_t groups = kernels_groups(gemm->weights->cols);
    uint32_t step = parts > 1 ? I8_GROUPS : groups;
    for (uint32_t first = 0; first < groups; first += step) {
        uint32_t end = first + step < groups ? first + step : groups;
        for (uint32_t i = 0; i < parts; i++) {
            uint32_t row = share_first(gemm->count, parts, i);
            uint32_t row_end = share_first(gemm->count, parts, i + 1);
            tiles[row_end - row - 1](gemm, row, panel, first, end);
        }
    }
}

void kernels_vnni_gemm(const struct kernels_gemm *gemm, uint32_t panel, uint32_t panel_end) {
    uint32_t groups = kernels_groups(gemm->weights->cols);
    uint32_t parts = (gemm->count + I8_ROWS - 1) / I8_ROWS;
    if (!wants_few_streams()) {
        for (; gemm->count >= 1 && gemm->count <= 2 && panel + 4 <= panel_end; panel += 4) {
            wide_tiles_i8[gemm->count - 1](gemm, 0, panel, 0, groups);
        }
        for (; panel + 2 <= panel_end; panel += 2) {
            strip_i8(gemm, panel, tiles_i8, parts);
        }
    } else if (gemm->count <= I8_ALONE) {
        parts = gemm->count > 0 ? 1 : 0;
    }
    for (; panel < panel_end; panel++) {
        strip_i8(gemm, panel, narrow_tiles_i8, parts);
    }
}
