#include "kernels/kernels.h"

#include "kernels/cpu/tables.h"

#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
static bool cpu_has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
static bool cpu_has_avx512(void) {
    return cpu_has_avx2() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
static bool cpu_has_bf16(void) {
    return cpu_has_avx512() && __builtin_cpu_supports("avx512bf16") && kernels_bf16_is_usual();
}
static bool cpu_has_amx(void) {
    return cpu_has_avx512() && __builtin_cpu_supports("avx512vnni") && kernels_amx_is_allowed();
}
#endif

const struct kernels *kernels_select(const char *name) {
#if defined(__x86_64__)
    if ((name == NULL || strcmp(name, "amx") == 0) && cpu_has_amx()) {
        return &kernels_amx;
    }
    if ((name == NULL || strcmp(name, "avx512bf16") == 0) && cpu_has_bf16()) {
        return &kernels_avx512bf16;
    }
    if ((name == NULL || strcmp(name, "avx512") == 0) && cpu_has_avx512()) {
        return &kernels_avx512;
    }
    if ((name == NULL || strcmp(name, "avx2") == 0) && cpu_has_avx2()) {
        return &kernels_avx2;
    }
#endif
    if (name == NULL || strcmp(name, "c") == 0) {
        return &kernels_c;
    }
    return NULL;
}
