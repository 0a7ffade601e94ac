/* The CPU backends' tables; kernels_select is the way to them. */
#ifndef KERNELS_CPU_TABLES_H
#define KERNELS_CPU_TABLES_H

#include "kernels/kernels.h"

#include <stdbool.h>

/* The exponential of `exps`: n = round(x / ln 2), then a Taylor polynomial of degree 13 on |r| <=
 * ln 2 / 2 (its first missing term is below 2^-58), then 2^n by the exponent bits. */
#define EXP_LOWEST    (-708.0)
#define EXP_HIGHEST   709.0
#define EXP_LOG2_E    1.4426950408889634
#define EXP_SHIFT     6755399441055744.0      /* 1.5 * 2^52: adding it rounds to a whole number */
#define EXP_LN_2      0.693147180369123816490 /* in two parts; n * the first is exact */
#define EXP_LN_2_REST 1.90821492927058770002e-10
#define EXP_FACTORS                                                                                \
    1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,   \
        1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 1.0 / 2

extern const struct kernels kernels_c;
/* Runs only on a CPU with AVX2 and FMA. */
extern const struct kernels kernels_avx2;
/* Runs only on a CPU that also has AVX-512 F, DQ and VL. */
extern const struct kernels kernels_avx512;

/* Runs only on a CPU that also has AVX-512 BF16, and where kernels_bf16_is_usual. */
extern const struct kernels kernels_avx512bf16;

/* Runs only on a CPU that also has AVX-512 VNNI, and where kernels_amx_is_allowed. */
extern const struct kernels kernels_amx;

/* The product of I8 weights; runs only on a CPU that also has AVX-512 VNNI. */
void kernels_vnni_gemm(const struct kernels_gemm *gemm, uint32_t panel_first, uint32_t panel_end);

/* Whether the CPU's instruction multiplies pairs in the order that bf16.c promises. Only where it
 * has one. */
bool kernels_bf16_is_usual(void);
void kernels_bf16_gemm(const struct kernels_gemm *gemm, uint32_t panel_first, uint32_t panel_end);

/* Whether the CPU has matrix tiles for both short types and the system lets this process use them,
 * which is asked for. */
bool kernels_amx_is_allowed(void);
void kernels_amx_gemm(const struct kernels_gemm *gemm, uint32_t panel_first, uint32_t panel_end);

#endif
