/* Scalar conversions between float formats, shared by the CPU backends. Exact, except to BF16. */
#ifndef KERNELS_CPU_CONVERT_H
#define KERNELS_CPU_CONVERT_H

#include <stdint.h>
#include <string.h>

static inline float convert_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}
static inline uint32_t convert_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}
static inline float convert_from_bf16(uint16_t value) {
    return convert_bits((uint32_t)value << 16);
}
/* Nearest, ties to even; a NaN keeps its sign and turns quiet. */
static inline uint16_t convert_to_bf16(float value) {
    uint32_t bits = convert_to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((bits >> 16) | 0x0040u);
    }
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
static inline float convert_from_f16(uint16_t value) {
    uint32_t sign = (uint32_t)(value & 0x8000u) << 16;
    uint32_t exponent = (value >> 10) & 0x1fu;
    uint32_t fraction = value & 0x3ffu;
    if (exponent == 0x1fu) {
        return convert_bits(sign | 0x7f800000u | (fraction << 13));
    }
    if (exponent == 0) { /* zero and subnormals: fraction * 2^-24, exact in f32 */
        float magnitude = (float)fraction * 0x1p-24f;
        return sign != 0 ? -magnitude : magnitude;
    }
    return convert_bits(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

#endif
