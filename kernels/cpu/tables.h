/* The CPU backends' tables; kernels_select is the way to them. */
#ifndef KERNELS_CPU_TABLES_H
#define KERNELS_CPU_TABLES_H

#include "kernels/kernels.h"

#include <stdbool.h>

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
