/* Matrix tiles (AMX): products of sixteen rows with sixteen outputs at once, for I8 and BF16
 * weights; everything else is the AVX-512 backend's.
 *
 * I8: sums inside a group are exact, so the bits are those of every other backend. BF16: rows of x
 * are rounded to BF16 first (kernels.round), and the instruction has its own fixed order: over each
 * 32 columns two chains from zero, of the even ones and of the odd ones, whose sum is added to the
 * element; numbers below the normal ones count as zero. It depends on nothing but the element, so
 * a row has one result in any company, but not that of the other backends: hence bf16_numerics. */
#include "kernels/cpu/tables.h"

#include "kernels/cpu/vector.h"

#include <cpuid.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ROWS       16u /* of a tile: rows of x, or outputs of a panel */
#define TILE_BYTES 1024u
/* Rows of x that meet all panels before the next ones do: they stay in the second-level cache. */
#define BLOCK_ROWS 256u
#define NUMBERS_FEW                                                                                \
    3u /* up to so many rows the byte instruction is as fast: memory sets the pace */

struct tile_config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights. Sums 0, 1 belong to the rows of tile
 * 4, sums 2, 3 to those of tile 5. upper, lower: how many rows those are; lower may be 0. */
static void tiles_shape(uint32_t upper, uint32_t lower) {
    static const uint8_t is_upper[8] = {1, 1, 0, 0, 1, 0, 0, 0};
    struct tile_config config = {.palette = 1};
    for (uint32_t i = 0; i < 6; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = (uint8_t)(is_upper[i] != 0 ? upper : lower == 0 ? 1 : lower);
    }
    for (uint32_t i = 6; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = ROWS;
    }
    _tile_loadconfig(&config);
}

/* ---- BF16 ---- */

INLINE void prefetch_tile(const unsigned char *at) {
#pragma GCC unroll 16
    for (uint32_t i = 0; i < TILE_BYTES; i += 64) {
        _mm_prefetch((const char *)at + i, _MM_HINT_T0);
    }
}

/* Up to 32 rows from `row` times one or two panels. is_first: the weights come from memory. */
INLINE void halves_block(const struct kernels_gemm *gemm, uint32_t row, uint32_t panel,
                         const bool has_lower, const bool has_two, const bool is_first) {
    size_t width = kernels_halves(gemm->weights->cols);
    size_t x_stride = width * 2;
    size_t w_stride = panel_bytes(gemm->weights);
    size_t y_stride = gemm->y_stride * sizeof(float);
    const unsigned char *w = (const unsigned char *)gemm->weights->data + panel * w_stride;
    const unsigned char *x = (const unsigned char *)(gemm->halves + row * width);
    float *y = gemm->y + row * gemm->y_stride + (size_t)panel * KERNELS_PANEL;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t k = 0; k < width; k += KERNELS_HALVES) {
        if (is_first) {
            prefetch_tile(w + PREFETCH_BYTES);
            if (has_two) {
                prefetch_tile(w + w_stride + PREFETCH_BYTES);
            }
        }
        _tile_loadd(4, x, x_stride);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (has_two) {
            _tile_loadd(7, w + w_stride, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (has_lower) {
            _tile_loadd(5, x + ROWS * x_stride, x_stride);
            _tile_dpbf16ps(2, 5, 6);
            if (has_two) {
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        x += KERNELS_HALVES * 2;
        w += TILE_BYTES;
    }
    _tile_stored(0, y, y_stride);
    if (has_two) {
        _tile_stored(1, y + KERNELS_PANEL, y_stride);
    }
    if (has_lower) {
        _tile_stored(2, y + ROWS * gemm->y_stride, y_stride);
        if (has_two) {
            _tile_stored(3, y + ROWS * gemm->y_stride + KERNELS_PANEL, y_stride);
        }
    }
}

/* All panels for whole blocks of 32 rows, then, in tiles of another shape, for the rest. */
static void halves_whole(const struct kernels_gemm *gemm, uint32_t row, uint32_t end,
                         uint32_t panel, uint32_t panel_end) {
    tiles_shape(ROWS, ROWS);
    for (; panel < panel_end; panel += 2) {
        bool has_two = panel + 2 <= panel_end;
        for (uint32_t at = row; at < end; at += 2 * ROWS) {
            if (has_two && at == row) {
                halves_block(gemm, at, panel, true, true, true);
            } else if (has_two) {
                halves_block(gemm, at, panel, true, true, false);
            } else {
                halves_block(gemm, at, panel, true, false, false);
            }
        }
    }
}

static void halves_rest(const struct kernels_gemm *gemm, uint32_t row, uint32_t end, uint32_t panel,
                        uint32_t panel_end) {
    uint32_t count = end - row;
    tiles_shape(count < ROWS ? count : ROWS, count > ROWS ? count - ROWS : 0);
    for (; panel < panel_end; panel += 2) {
        bool has_two = panel + 2 <= panel_end;
        if (count > ROWS && has_two) {
            halves_block(gemm, row, panel, true, true, true);
        } else if (count > ROWS) {
            halves_block(gemm, row, panel, true, false, true);
        } else if (has_two) {
            halves_block(gemm, row, panel, false, true, true);
        } else {
            halves_block(gemm, row, panel, false, false, true);
        }
    }
}

/* One row without tiles: memory sets the pace, and eight panels side by side are as many streams
 * of it. The order is the instruction's, with numbers below the normal ones as zero (the caller
 * sees to that), so the bits are the same. */
INLINE void halves_row(const struct kernels_gemm *gemm, uint32_t panel, const uint32_t panels) {
    const __m512i high = _mm512_set1_epi32((int32_t)0xffff0000u);
    size_t pairs = kernels_halves(gemm->weights->cols) / 2;
    size_t w_stride = panel_bytes(gemm->weights);
    const unsigned char *w = (const unsigned char *)gemm->weights->data + panel * w_stride;
    const uint16_t *x = gemm->halves;
    __m512 sum[8];
#pragma GCC unroll 8
    for (uint32_t p = 0; p < panels; p++) {
        sum[p] = _mm512_setzero_ps();
    }
    for (size_t first = 0; first < pairs; first += KERNELS_HALVES / 2) {
        /* Near the end of a panel it is time for those that come after these. */
        size_t left = (pairs - first) * 64;
        size_t ahead =
            left > PREFETCH_BYTES ? PREFETCH_BYTES : PREFETCH_BYTES + (panels - 1) * w_stride;
        __m512 even[8];
        __m512 odd[8];
#pragma GCC unroll 8
        for (uint32_t p = 0; p < panels; p++) {
            even[p] = _mm512_setzero_ps();
            odd[p] = _mm512_setzero_ps();
        }
#pragma GCC unroll 2
        for (size_t k = first; k < first + KERNELS_HALVES / 2; k++) {
            int32_t two;
            memcpy(&two, x + 2 * k, sizeof(two));
            __m512i both = _mm512_set1_epi32(two);
            __m512 x_even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
            __m512 x_odd = _mm512_castsi512_ps(_mm512_and_si512(both, high));
#pragma GCC unroll 8
            for (uint32_t p = 0; p < panels; p++) {
                const unsigned char *at = w + p * w_stride + k * 64;
                _mm_prefetch((const char *)at + ahead, _MM_HINT_T0);
                __m512i weights = _mm512_load_si512(at);
                __m512 w_even = _mm512_castsi512_ps(_mm512_slli_epi32(weights, 16));
                __m512 w_odd = _mm512_castsi512_ps(_mm512_and_si512(weights, high));
                even[p] = _mm512_fmadd_ps(x_even, w_even, even[p]);
                odd[p] = _mm512_fmadd_ps(x_odd, w_odd, odd[p]);
            }
        }
#pragma GCC unroll 8
        for (uint32_t p = 0; p < panels; p++) {
            sum[p] = _mm512_add_ps(sum[p], _mm512_add_ps(even[p], odd[p]));
        }
    }
#pragma GCC unroll 8
    for (uint32_t p = 0; p < panels; p++) {
        _mm512_storeu_ps(gemm->y + (size_t)(panel + p) * KERNELS_PANEL, sum[p]);
    }
}

/* Not inlined: its caller changes how the processor rounds, of which the compiler knows nothing. */
static __attribute__((noinline)) void halves_alone(const struct kernels_gemm *gemm, uint32_t panel,
                                                   uint32_t panel_end) {
    for (; panel + 8 <= panel_end; panel += 8) {
        halves_row(gemm, panel, 8);
    }
    for (; panel + 2 <= panel_end; panel += 2) {
        halves_row(gemm, panel, 2);
    }
    if (panel < panel_end) {
        halves_row(gemm, panel, 1);
    }
}

#define FLUSH_TO_ZERO 0x8040u /* results and inputs below the normal numbers */

static void gemm_halves(const struct kernels_gemm *gemm, uint32_t panel, uint32_t panel_end) {
    if (gemm->count == 1) {
        uint32_t usual = _mm_getcsr();
        _mm_setcsr(usual | FLUSH_TO_ZERO);
        halves_alone(gemm, panel, panel_end);
        _mm_setcsr(usual);
        return;
    }
    for (uint32_t first = 0; first < gemm->count; first += BLOCK_ROWS) {
        uint32_t end = gemm->count - first < BLOCK_ROWS ? gemm->count : first + BLOCK_ROWS;
        uint32_t whole = first + (end - first) / (2 * ROWS) * 2 * ROWS;
        if (whole > first) {
            halves_whole(gemm, first, whole, panel, panel_end);
        }
        if (whole < end) {
            halves_rest(gemm, whole, end, panel, panel_end);
        }
    }
    _tile_release();
}

/* ---- I8 ---- */

/* One group: the sums of `rows` rows with the weights of one panel, less the offsets. */
INLINE void group_sums(const struct kernels_gemm *gemm, uint32_t row, uint32_t group,
                       const unsigned char *w, int32_t *sums) {
    size_t stride = (size_t)kernels_groups(gemm->weights->cols) * KERNELS_GROUP;
    const int8_t *x = gemm->quants.numbers + row * stride + (size_t)group * KERNELS_GROUP;
    _tile_zero(0);
    _tile_loadd(4, x, stride);
    _tile_loadd(6, w + KERNELS_PANEL * sizeof(float), 64);
    _tile_dpbsud(0, 4, 6); /* signed by unsigned, as they are packed */
    _tile_stored(0, sums, 64);
}

/* `rows` rows times one panel. The next group's sums are under way while this one's are scaled. */
INLINE void numbers_tile(const struct kernels_gemm *gemm, uint32_t row, uint32_t panel,
                         const uint32_t rows) {
    _Alignas(64) int32_t sums[2][ROWS * KERNELS_PANEL];
    uint32_t groups = kernels_groups(gemm->weights->cols);
    const unsigned char *w =
        (const unsigned char *)gemm->weights->data + (size_t)panel * groups * KERNELS_GROUP_BYTES;
    const float *scales = gemm->quants.scales + (size_t)row * groups;
    const int32_t *offsets = gemm->quants.offsets + (size_t)row * groups;
    float *y = gemm->y + row * gemm->y_stride + (size_t)panel * KERNELS_PANEL;
    __m512 total[ROWS];
#pragma GCC unroll 16
    for (uint32_t i = 0; i < rows; i++) {
        total[i] = _mm512_setzero_ps();
    }
    group_sums(gemm, row, 0, w, sums[0]);
    for (uint32_t group = 0; group < groups; group++, w += KERNELS_GROUP_BYTES) {
        prefetch_tile(w + PREFETCH_BYTES);
        if (group + 1 < groups) {
            group_sums(gemm, row, group + 1, w + KERNELS_GROUP_BYTES, sums[(group + 1) % 2]);
        }
        const int32_t *from = sums[group % 2];
        __m512 weight_scale = _mm512_load_ps(w);
#pragma GCC unroll 16
        for (uint32_t i = 0; i < rows; i++) {
            size_t at = (size_t)i * groups + group;
            __m512i sum = _mm512_add_epi32(_mm512_load_si512(from + (size_t)i * KERNELS_PANEL),
                                           _mm512_set1_epi32(offsets[at]));
            __m512 scale = _mm512_mul_ps(weight_scale, _mm512_set1_ps(scales[at]));
            total[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, total[i]);
        }
    }
#pragma GCC unroll 16
    for (uint32_t i = 0; i < rows; i++) {
        _mm512_storeu_ps(y + i * gemm->y_stride, total[i]);
    }
}

typedef void (*numbers_fn)(const struct kernels_gemm *gemm, uint32_t row, uint32_t panel);
#define NUMBERS(rows_)                                                                             \
    static void numbers_##rows_(const struct kernels_gemm *gemm, uint32_t row, uint32_t panel) {   \
        numbers_tile(gemm, row, panel, rows_);                                                     \
    }
NUMBERS(1)
NUMBERS(2)
NUMBERS(3)
NUMBERS(4)
NUMBERS(5)
NUMBERS(6)
NUMBERS(7)
NUMBERS(8)
NUMBERS(9)
NUMBERS(10)
NUMBERS(11)
NUMBERS(12)
NUMBERS(13)
NUMBERS(14)
NUMBERS(15)
NUMBERS(16)
static const numbers_fn numbers_tiles[ROWS] = {
    numbers_1, numbers_2,  numbers_3,  numbers_4,  numbers_5,  numbers_6,  numbers_7,  numbers_8,
    numbers_9, numbers_10, numbers_11, numbers_12, numbers_13, numbers_14, numbers_15, numbers_16};

static void gemm_numbers(const struct kernels_gemm *gemm, uint32_t panel_first,
                         uint32_t panel_end) {
    for (uint32_t first = 0; first < gemm->count; first += BLOCK_ROWS) {
        uint32_t end = gemm->count - first < BLOCK_ROWS ? gemm->count : first + BLOCK_ROWS;
        uint32_t whole = first + (end - first) / ROWS * ROWS;
        if (whole > first) {
            tiles_shape(ROWS, 0);
            for (uint32_t panel = panel_first; panel < panel_end; panel++) {
                for (uint32_t row = first; row < whole; row += ROWS) {
                    numbers_16(gemm, row, panel);
                }
            }
        }
        if (whole < end) {
            tiles_shape(end - whole, 0);
            for (uint32_t panel = panel_first; panel < panel_end; panel++) {
                numbers_tiles[end - whole - 1](gemm, whole, panel);
            }
        }
    }
    _tile_release();
}

void kernels_amx_gemm(const struct kernels_gemm *gemm, uint32_t panel_first, uint32_t panel_end) {
    switch (gemm->weights->dtype) {
    case KERNELS_BF16: gemm_halves(gemm, panel_first, panel_end); return;
    case KERNELS_I8:
        if (gemm->count > NUMBERS_FEW) {
            gemm_numbers(gemm, panel_first, panel_end);
            return;
        }
        break;
    case KERNELS_F32:
    case KERNELS_F16: break;
    }
    kernels_avx512.gemm(gemm, panel_first, panel_end);
}

/* ---- whether it may run ---- */

bool kernels_amx_is_allowed(void) {
    /* Bits of leaf 7: BF16 tiles, tiles, I8 tiles. The system hands out the tiles' eight kilobytes
     * of state to a process that asks; all its threads have them then. */
    const unsigned int all = 1u << 22 | 1u << 24 | 1u << 25;
    const long ask_permission = 0x1023; /* ARCH_REQ_XCOMP_PERM */
    const long tile_data = 18;
    unsigned int a = 0;
    unsigned int b = 0;
    unsigned int c = 0;
    unsigned int d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & all) == all &&
           syscall(SYS_arch_prctl, ask_permission, tile_data) == 0;
}
