/* Products with BF16 weights by AVX-512 BF16: pairs of rounded values with pairs of weights, two
 * multiply-adds of a lane at once. For CPUs that have it and no matrix tiles.
 *
 * A product's element is one chain over the pairs of columns from 0 upwards, in each the second
 * column and then the first, every multiply-add rounded once; numbers below the normal ones count
 * as zero. That is how the instruction is described, and how it is on the CPUs that were tried;
 * since others must give the same bits under the same numerics, each is asked. */
#include "kernels/cpu/tables.h"
#include "kernels/cpu/tiles512.h"

#include <math.h>

TILES(halves_tiles, FACTORS_HALVES)

void kernels_bf16_gemm(const struct kernels_gemm *gemm, uint32_t panel_first, uint32_t panel_end) {
    if (gemm->weights->dtype == KERNELS_BF16) {
        gemm_panels(gemm, panel_first, panel_end, &halves_tiles, FACTORS_HALVES);
    } else {
        kernels_avx512.gemm(gemm, panel_first, panel_end);
    }
}

/* ---- whether it may run ---- */

static float widened(uint32_t pair, bool is_second) {
    uint32_t bits = is_second ? pair & 0xffff0000u : pair << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

bool kernels_bf16_is_usual(void) {
    float sum[16];
    uint32_t x[16];
    uint32_t w[16];
    bool is_usual = true;
    for (uint32_t seed = 1; seed <= 16 && is_usual; seed++) {
        /* Values between 1/4 and 4 of either sign, whose sums cancel now and then: any other order,
         * or one rounding more or less, shows. */
        for (uint32_t i = 0; i < 16; i++) {
            uint32_t mixed = (seed * 16 + i) * 0x9e3779b1u;
            x[i] = (mixed & 0x80ff80ffu) | 0x3f003f00u;
            w[i] = (mixed * 0x85ebca6bu & 0x80ff80ffu) | 0x3f003f00u;
            sum[i] = (float)(int32_t)(mixed * 0xc2b2ae35u) * 0x1p-30f;
        }
        __m512 got = _mm512_dpbf16_ps(_mm512_loadu_ps(sum), (__m512bh)_mm512_loadu_si512(w),
                                      (__m512bh)_mm512_loadu_si512(x));
        for (uint32_t i = 0; i < 16; i++) {
            sum[i] = fmaf(widened(x[i], true), widened(w[i], true), sum[i]);
            sum[i] = fmaf(widened(x[i], false), widened(w[i], false), sum[i]);
        }
        is_usual = _mm512_cmp_ps_mask(got, _mm512_loadu_ps(sum), _CMP_EQ_OQ) == 0xffff;
    }
    return is_usual;
}
