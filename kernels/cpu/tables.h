/* The CPU backends' tables; kernels_select is the way to them. */
#ifndef KERNELS_CPU_TABLES_H
#define KERNELS_CPU_TABLES_H

#include "kernels/kernels.h"

extern const struct kernels kernels_c;
/* Runs only on a CPU with AVX2 and FMA. */
extern const struct kernels kernels_avx2;
/* Runs only on a CPU that also has AVX-512 F, DQ and VL. */
extern const struct kernels kernels_avx512;

/* The product of I8 weights; runs only on a CPU that also has AVX-512 VNNI. */
void kernels_vnni_gemm(const struct kernels_gemm *gemm, uint32_t panel_first, uint32_t panel_end);

#endif
