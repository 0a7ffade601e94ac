/* Products of F32 and BF16 weights in registers of sixteen lanes: which rows meet which panels, in
 * what order memory is read, and what is asked for meanwhile. The files that include it differ in
 * the instruction by which a weight meets a value (`enum factors`); each makes its own tiles, since
 * each is built for its own processors. */
#ifndef KERNELS_CPU_TILES512_H
#define KERNELS_CPU_TILES512_H

#include "kernels/cpu/vector.h"

#include <string.h>

#include <immintrin.h>

/* Many rows: six by four panels, as much as the registers hold with the fewest loads a product. */
#define BLOCK_TILE_ROWS 6u
#define BLOCK_PANELS    4u
/* Few rows: each weight comes from memory for them, so more rows by fewer panels. By two panels as
 * many as registers have sums for; somewhat more by one, in which loads are as dear as products. */
#define FEW_TILE_ROWS  14u
#define TALL_TILE_ROWS 16u
#define WIDE_TILE_ROWS 12u /* widening takes registers too, and work that fewer rows share */
#define FEW_ROWS       48u
/* Addresses of so many rows have a register each; of more, each is that of the first and a multiple
 * of the stride. */
#define POINTER_ROWS 12u
/* One row: as many streams of memory, and chains, as eight panels. */
#define ROW_PANELS   8u
#define TILE_COLS    128u /* four panels' slice (32 KiB in F32) stays in the first-level cache */
#define NARROW_STEPS 64u  /* two panels' slice is 8 KiB */
/* Rows that meet all panels before the next ones do: their values and results stay in the
 * second-level cache, and reading the weights again for each block costs next to nothing. */
#define BLOCK_ROWS 132u

/* ---- one tile ---- */

/* A panel's column in F32, or two of them in BF16. */
#define COLUMN_BYTES ((size_t)KERNELS_PANEL * 4)

/* What one step along k multiplies. */
enum factors {
    FACTORS_F32,  /* a column, by values of x */
    FACTORS_WIDE, /* two BF16 columns, widened, each by its values of x: the first, then the second
                   */
    FACTORS_HALVES, /* two BF16 columns by two rounded values: the second, then the first, which is
                       the instruction's order; numbers below the normal ones count as zero */
};

/* Rows of a tile of few, by two panels. */
INLINE uint32_t few_tile_rows(const enum factors factors) {
    return factors == FACTORS_WIDE ? WIDE_TILE_ROWS : FEW_TILE_ROWS;
}

/* Columns that a step takes. */
INLINE uint32_t step_columns(const enum factors factors) {
    return factors == FACTORS_F32 ? 1 : 2;
}

/* Columns of a row, with the zeros that rounded rows and their weights have behind them. */
INLINE uint32_t row_columns(const struct kernels_gemm *gemm, const enum factors factors) {
    uint32_t cols = gemm->weights->cols;
    return factors == FACTORS_HALVES ? kernels_halves(cols) : cols;
}

/* Where the values of a row begin that meet column `first`. */
INLINE const unsigned char *row_values(const struct kernels_gemm *gemm, size_t row, uint32_t first,
                                       const enum factors factors) {
    if (factors == FACTORS_HALVES) {
        const uint16_t *halves = gemm->halves + row * kernels_halves(gemm->weights->cols);
        return (const unsigned char *)(halves + first);
    }
    return (const unsigned char *)(gemm->x + row * gemm->x_stride + first);
}

/* Where a tile's rows of values are. What the addresses are made of are variables that the compiler
 * must keep, or it makes new ones between the products. */
struct values {
    const unsigned char *row[POINTER_ROWS]; /* of more rows only the first */
    size_t odd[TALL_TILE_ROWS / 2];         /* strides: 1, 3, 5, ... */
};

INLINE struct values values_of(const struct kernels_gemm *gemm, size_t row, uint32_t first,
                               const uint32_t rows, const enum factors factors) {
    struct values values;
    const uint32_t pointers = rows <= POINTER_ROWS ? rows : 1;
#pragma GCC unroll 12
    for (uint32_t i = 0; i < pointers; i++) {
        values.row[i] = row_values(gemm, row + i, first, factors);
        __asm__("" : "+r"(values.row[i]));
    }
    size_t stride = (size_t)(row_values(gemm, 1, 0, factors) - row_values(gemm, 0, 0, factors));
#pragma GCC unroll 8
    for (uint32_t i = 0; i < TALL_TILE_ROWS / 2 && pointers < rows; i++) {
        values.odd[i] = stride * (2 * i + 1);
        __asm__("" : "+r"(values.odd[i]));
    }
    return values;
}

INLINE const unsigned char *value_at(const struct values *values, const uint32_t i, size_t at,
                                     const uint32_t rows) {
    if (rows <= POINTER_ROWS) {
        return values->row[i] + at;
    }
    const uint32_t even = i & (0u - i); /* the power of two in i */
    return values->row[0] + at + (i == 0 ? 0 : values->odd[i / even / 2] * even);
}

/* One column of weights, or for FACTORS_HALVES two, meets the four bytes at `at` of each row; of a
 * pair of FACTORS_WIDE the first or the second. */
INLINE void column(const unsigned char *w, size_t w_stride, const struct values *x, size_t at,
                   __m512 (*sum)[ROW_PANELS], const uint32_t rows, const uint32_t panels,
                   const enum factors factors, const bool is_second) {
    __m512i weight[ROW_PANELS];
#pragma GCC unroll 8
    for (uint32_t p = 0; p < panels; p++) {
        weight[p] = _mm512_load_si512(w + p * w_stride);
        if (factors == FACTORS_WIDE) {
            weight[p] = is_second
                            ? _mm512_and_si512(weight[p], _mm512_set1_epi32((int32_t)0xffff0000u))
                            : _mm512_slli_epi32(weight[p], 16);
        }
    }
#pragma GCC unroll 16
    for (uint32_t i = 0; i < rows; i++) {
        int32_t bits;
        memcpy(&bits, value_at(x, i, at, rows), sizeof(bits));
        __m512i value = _mm512_set1_epi32(bits);
#pragma GCC unroll 8
        for (uint32_t p = 0; p < panels; p++) {
#ifdef __AVX512BF16__
            if (factors == FACTORS_HALVES) {
                sum[i][p] = _mm512_dpbf16_ps(sum[i][p], (__m512bh)weight[p], (__m512bh)value);
                continue;
            }
#endif
            sum[i][p] = _mm512_fmadd_ps(_mm512_castsi512_ps(weight[p]), _mm512_castsi512_ps(value),
                                        sum[i][p]);
        }
    }
}

/* Which memory a tile asks for while it computes: in each column of three ranges, that which lies
 * so far behind it. In steps. */
#define RANGES 3u
struct fetch {
    size_t end[RANGES]; /* of the range; it begins where the one before ends */
    size_t ahead[RANGES];
};

typedef void (*few_fn)(const struct kernels_gemm *gemm, uint32_t row, uint32_t panel,
                       uint32_t first, uint32_t count, const struct fetch *fetch);

/* `rows` rows times `panels` neighbouring panels, columns [first, first + count), first even: one
 * chain per element. fetch: NULL if somebody else sees to the memory. All of rows, panels, factors
 * and whether there is a fetch are constants after inlining. */
INLINE void tile(const struct kernels_gemm *gemm, uint32_t row, uint32_t panel, uint32_t first,
                 uint32_t count, const struct fetch *fetch, const uint32_t rows,
                 const uint32_t panels, const enum factors factors) {
    __m512 sum[TALL_TILE_ROWS][ROW_PANELS];
    const size_t step = step_columns(factors);
    const size_t x_step = factors == FACTORS_WIDE ? 8 : 4;
    size_t w_stride = panel_bytes(gemm->weights);
    const unsigned char *w =
        (const unsigned char *)gemm->weights->data + panel * w_stride + first / step * COLUMN_BYTES;
    const struct values x = values_of(gemm, row, first, rows, factors);
    float *y = gemm->y + row * gemm->y_stride + (size_t)panel * KERNELS_PANEL;
#pragma GCC unroll 16
    for (uint32_t i = 0; i < rows; i++) {
#pragma GCC unroll 8
        for (uint32_t p = 0; p < panels; p++) {
            sum[i][p] = first == 0
                            ? _mm512_setzero_ps()
                            : _mm512_loadu_ps(y + i * gemm->y_stride + (size_t)p * KERNELS_PANEL);
        }
    }
    size_t steps = count / step;
    size_t k = 0;
    for (uint32_t range = fetch == NULL ? RANGES - 1 : 0; range < RANGES; range++) {
        size_t end = fetch == NULL ? steps : fetch->end[range];
        size_t ahead = fetch == NULL ? 0 : fetch->ahead[range];
#pragma GCC unroll 2
        for (; k < end; k++) {
            const unsigned char *at = w + k * COLUMN_BYTES;
#pragma GCC unroll 8
            for (uint32_t p = 0; p < panels && fetch != NULL; p++) {
                _mm_prefetch((const char *)at + p * w_stride + ahead, _MM_HINT_T0);
            }
            column(at, w_stride, &x, k * x_step, sum, rows, panels, factors, false);
            if (factors == FACTORS_WIDE) {
                column(at, w_stride, &x, k * x_step + 4, sum, rows, panels, factors, true);
            }
        }
    }
    if (factors == FACTORS_WIDE && count % 2 != 0) {
        column(w + k * COLUMN_BYTES, w_stride, &x, k * x_step, sum, rows, panels, factors, false);
    }
#pragma GCC unroll 16
    for (uint32_t i = 0; i < rows; i++) {
#pragma GCC unroll 8
        for (uint32_t p = 0; p < panels; p++) {
            _mm512_storeu_ps(y + i * gemm->y_stride + (size_t)p * KERNELS_PANEL, sum[i][p]);
        }
    }
}

/* The tiles of one way to multiply. */
struct tiles {
    /* By the logarithm of panels, by rows - 1; NULL: never asked for. */
    few_fn few[4][TALL_TILE_ROWS];
    tile_fn block[BLOCK_TILE_ROWS]; /* by rows - 1 */
};

#define TILE(name_, factors_, rows_, panels_)                                                      \
    static void name_##_##rows_##x##panels_(const struct kernels_gemm *gemm, uint32_t row,         \
                                            uint32_t panel, uint32_t first, uint32_t count,        \
                                            const struct fetch *fetch) {                           \
        tile(gemm, row, panel, first, count, fetch, rows_, panels_, factors_);                     \
    }
#define BLOCK_TILE(name_, factors_, rows_)                                                         \
    static void name_##_block_##rows_(const struct kernels_gemm *gemm, uint32_t row,               \
                                      uint32_t panel, uint32_t first, uint32_t count) {            \
        tile(gemm, row, panel, first, count, NULL, rows_, BLOCK_PANELS, factors_);                 \
    }
#define TILES_OF_12(name_, factors_, panels_)                                                      \
    TILE(name_, factors_, 1, panels_)                                                              \
    TILE(name_, factors_, 2, panels_)                                                              \
    TILE(name_, factors_, 3, panels_)                                                              \
    TILE(name_, factors_, 4, panels_)                                                              \
    TILE(name_, factors_, 5, panels_)                                                              \
    TILE(name_, factors_, 6, panels_)                                                              \
    TILE(name_, factors_, 7, panels_)                                                              \
    TILE(name_, factors_, 8, panels_)                                                              \
    TILE(name_, factors_, 9, panels_)                                                              \
    TILE(name_, factors_, 10, panels_)                                                             \
    TILE(name_, factors_, 11, panels_)                                                             \
    TILE(name_, factors_, 12, panels_)
#define NAMES_OF_12(name_, panels_)                                                                \
    name_##_1x##panels_, name_##_2x##panels_, name_##_3x##panels_, name_##_4x##panels_,            \
        name_##_5x##panels_, name_##_6x##panels_, name_##_7x##panels_, name_##_8x##panels_,        \
        name_##_9x##panels_, name_##_10x##panels_, name_##_11x##panels_, name_##_12x##panels_
#define TILES_OF_ALL(name_, factors_)                                                              \
    TILES_OF_12(name_, factors_, 1)                                                                \
    TILES_OF_12(name_, factors_, 2)                                                                \
    TILE(name_, factors_, 1, 4)                                                                    \
    TILE(name_, factors_, 2, 4)                                                                    \
    TILE(name_, factors_, 3, 4)                                                                    \
    TILE(name_, factors_, 4, 4)                                                                    \
    TILE(name_, factors_, 1, 8)                                                                    \
    BLOCK_TILE(name_, factors_, 1)                                                                 \
    BLOCK_TILE(name_, factors_, 2)                                                                 \
    BLOCK_TILE(name_, factors_, 3)                                                                 \
    BLOCK_TILE(name_, factors_, 4)                                                                 \
    BLOCK_TILE(name_, factors_, 5)                                                                 \
    BLOCK_TILE(name_, factors_, 6)
#define NAMES_OF_FOURS(name_)                                                                      \
    {name_##_1x4, name_##_2x4, name_##_3x4, name_##_4x4}, {                                        \
        name_##_1x8                                                                                \
    }
#define NAMES_OF_BLOCKS(name_)                                                                     \
    {                                                                                              \
        name_##_block_1, name_##_block_2, name_##_block_3, name_##_block_4, name_##_block_5,       \
            name_##_block_6                                                                        \
    }
/* Define the functions and `name_`, their table. */
#define WIDE_TILES(name_)                                                                          \
    TILES_OF_ALL(name_, FACTORS_WIDE)                                                              \
    static const struct tiles name_ = {                                                            \
        .few = {{NAMES_OF_12(name_, 1)}, {NAMES_OF_12(name_, 2)}, NAMES_OF_FOURS(name_)},          \
        .block = NAMES_OF_BLOCKS(name_)};
#define TILES(name_, factors_)                                                                     \
    TILES_OF_ALL(name_, factors_)                                                                  \
    TILE(name_, factors_, 13, 1)                                                                   \
    TILE(name_, factors_, 14, 1)                                                                   \
    TILE(name_, factors_, 15, 1)                                                                   \
    TILE(name_, factors_, 16, 1)                                                                   \
    TILE(name_, factors_, 13, 2)                                                                   \
    TILE(name_, factors_, 14, 2)                                                                   \
    static const struct tiles name_ = {                                                            \
        .few = {{NAMES_OF_12(name_, 1), name_##_13x1, name_##_14x1, name_##_15x1, name_##_16x1},   \
                {NAMES_OF_12(name_, 2), name_##_13x2, name_##_14x2},                               \
                NAMES_OF_FOURS(name_)},                                                            \
        .block = NAMES_OF_BLOCKS(name_)};

/* ---- few rows ---- */

/* Rows of one tile meet each weight once, on its way from memory. What lies behind a panel's end is
 * its neighbour, which is read already: near the end it is time for the panels that follow. */
INLINE void few_stream(const struct kernels_gemm *gemm, uint32_t row, uint32_t rows, uint32_t panel,
                       const uint32_t panels_log, const bool is_fetched, const struct tiles *tiles,
                       const enum factors factors) {
    uint32_t cols = row_columns(gemm, factors);
    size_t steps = cols / step_columns(factors);
    const size_t reach = PREFETCH_BYTES / COLUMN_BYTES;
    size_t others = ((1u << panels_log) - 1) * panel_bytes(gemm->weights);
    const struct fetch fetch = {.end = {steps > reach ? steps - reach : 0, steps, steps},
                                .ahead = {PREFETCH_BYTES, PREFETCH_BYTES + others, 0}};
    tiles->few[panels_log][rows - 1](gemm, row, panel, 0, cols, is_fetched ? &fetch : NULL);
}

/* Rows of several tiles: cut along k, so that the weights stay in the cache. While a slice of
 * columns is computed the next one is fetched, a share by each tile. */
INLINE void few_slices(const struct kernels_gemm *gemm, uint32_t row, uint32_t rows, uint32_t panel,
                       const uint32_t panels_log, const struct tiles *tiles,
                       const enum factors factors) {
    uint32_t cols = row_columns(gemm, factors);
    const uint32_t step = step_columns(factors);
    const uint32_t most = few_tile_rows(factors);
    uint32_t parts = (rows + most - 1) / most;
    /* Two tiles are done soon: what comes next had better be little. */
    uint32_t slice = parts == 2 && wants_few_streams() ? NARROW_STEPS * step : TILE_COLS;
    for (uint32_t first = 0; first < cols; first += slice) {
        uint32_t count = cols - first < slice ? cols - first : slice;
        uint32_t steps = count / step;
        size_t next = first + count < cols ? steps * COLUMN_BYTES
                                           : (panel_bytes(gemm->weights) << panels_log) -
                                                 first / step * COLUMN_BYTES;
        /* Rows are spread evenly: eighteen are nine and nine, not fourteen and a slow four. */
        for (uint32_t i = 0; i < parts; i++) {
            uint32_t at = share_first(rows, parts, i);
            uint32_t end = share_first(rows, parts, i + 1);
            const struct fetch fetch = {
                .end = {share_first(steps, parts, i), share_first(steps, parts, i + 1), steps},
                .ahead = {0, next, 0}};
            tiles->few[panels_log][end - at - 1](gemm, row + at, panel, first, count, &fetch);
        }
    }
}

INLINE void few_run(const struct kernels_gemm *gemm, uint32_t row, uint32_t rows, uint32_t panel,
                    uint32_t panel_end, const struct tiles *tiles, const enum factors factors) {
    bool is_narrow = wants_few_streams();
    for (; rows == 1 && !is_narrow && panel + ROW_PANELS <= panel_end; panel += ROW_PANELS) {
        few_stream(gemm, row, rows, panel, 3, true, tiles, factors);
    }
    for (; rows <= (is_narrow ? 1 : 4) && panel + 4 <= panel_end; panel += 4) {
        few_stream(gemm, row, rows, panel, 2, !is_narrow, tiles, factors);
    }
    const uint32_t most = few_tile_rows(factors);
    bool is_tall = rows > most && rows <= TALL_TILE_ROWS && factors != FACTORS_WIDE;
    while (panel < panel_end) {
        uint32_t panels_log = is_tall || panel + 2 > panel_end ? 0 : 1;
        if (rows <= most || is_tall) {
            few_stream(gemm, row, rows, panel, panels_log, true, tiles, factors);
        } else {
            few_slices(gemm, row, rows, panel, panels_log, tiles, factors);
        }
        panel += 1u << panels_log;
    }
}

/* ---- many rows ---- */

/* Brings columns [from, end) of a block's panels nearer. */
INLINE void slice_fetch(const unsigned char *w, size_t w_stride, size_t from, size_t end) {
    for (size_t at = from * COLUMN_BYTES; at < end * COLUMN_BYTES; at += COLUMN_BYTES) {
#pragma GCC unroll 4
        for (uint32_t p = 0; p < BLOCK_PANELS; p++) {
            _mm_prefetch((const char *)w + p * w_stride + at, _MM_HINT_T1);
        }
    }
}

/* As few_slices, but each tile's share of the fetching is small enough to be had at once. */
INLINE void block_run(const struct kernels_gemm *gemm, uint32_t row, uint32_t rows, uint32_t panel,
                      const struct tiles *tiles, const enum factors factors) {
    uint32_t cols = row_columns(gemm, factors);
    const uint32_t step = step_columns(factors);
    size_t w_stride = panel_bytes(gemm->weights);
    const unsigned char *w = (const unsigned char *)gemm->weights->data + panel * w_stride;
    uint32_t parts = (rows + BLOCK_TILE_ROWS - 1) / BLOCK_TILE_ROWS;
    for (uint32_t first = 0; first < cols; first += TILE_COLS) {
        uint32_t count = cols - first < TILE_COLS ? cols - first : TILE_COLS;
        uint32_t steps = TILE_COLS / step;
        const unsigned char *next = first + count < cols ? w + (first + count) / step * COLUMN_BYTES
                                                         : w + BLOCK_PANELS * w_stride;
        for (uint32_t i = 0; i < parts; i++) {
            uint32_t at = share_first(rows, parts, i);
            uint32_t end = share_first(rows, parts, i + 1);
            slice_fetch(next, w_stride, share_first(steps, parts, i),
                        share_first(steps, parts, i + 1));
            tiles->block[end - at - 1](gemm, row + at, panel, first, count);
        }
    }
}

INLINE void gemm_panels(const struct kernels_gemm *gemm, uint32_t panel, uint32_t panel_end,
                        const struct tiles *tiles, const enum factors factors) {
    uint32_t blocks = (gemm->count + BLOCK_ROWS - 1) / BLOCK_ROWS;
    for (uint32_t i = 0; i < blocks; i++) {
        uint32_t row = share_first(gemm->count, blocks, i);
        uint32_t rows = share_first(gemm->count, blocks, i + 1) - row;
        uint32_t at = panel;
        for (; rows > FEW_ROWS && at + BLOCK_PANELS <= panel_end; at += BLOCK_PANELS) {
            block_run(gemm, row, rows, at, tiles, factors);
        }
        few_run(gemm, row, rows, at, panel_end, tiles, factors);
    }
}

#endif
