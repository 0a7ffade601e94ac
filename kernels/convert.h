/* Scalar arithmetic that must come out in the same bits everywhere: conversions between float
 * formats (exact, except to BF16) and the exponential. Shared by the CPU backends and by device
 * code, so in the common part of C and C++; whoever includes it is built without contraction or
 * writes each fused operation itself. */
#ifndef KERNELS_CONVERT_H
#define KERNELS_CONVERT_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define CONVERT_FUNCTION static inline __host__ __device__
#else
#define CONVERT_FUNCTION static inline
#endif

#define CONVERT_EXP_MIN (-87.0f)
#define CONVERT_EXP_MAX 88.0f

CONVERT_FUNCTION float convert_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}
CONVERT_FUNCTION uint32_t convert_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}
CONVERT_FUNCTION float convert_from_bf16(uint16_t value) {
    return convert_bits((uint32_t)value << 16);
}
/* Nearest, ties to even; a NaN keeps its sign and turns quiet. */
CONVERT_FUNCTION uint16_t convert_to_bf16(float value) {
    uint32_t bits = convert_to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((bits >> 16) | 0x0040u);
    }
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
CONVERT_FUNCTION float convert_from_f16(uint16_t value) {
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

/* What 1 stands for in a group of whole numbers in [-127, 127] whose largest magnitude has these
 * bits (which are ordered as the magnitudes are): NaN if it is not finite. *inverse_out: for
 * convert_i8_number. */
CONVERT_FUNCTION float convert_i8_scale(uint32_t magnitude, float *inverse_out) {
    *inverse_out = 0.0f;
    if (magnitude >= 0x7f800000u) {
        return convert_bits(0x7fc00000u);
    }
    float largest = convert_bits(magnitude);
    /* A scale below the normal numbers would lose bits by chance of the machine's settings. */
    if (largest < 0x1p-100f) {
        return 0.0f;
    }
    *inverse_out = 127.0f / largest;
    return largest / 127.0f;
}
/* Nearest, ties to even; inverse 0 makes zeros of all values, also of those that are not finite. */
CONVERT_FUNCTION int8_t convert_i8_number(float value, float inverse) {
    if (inverse == 0.0f) {
        return 0;
    }
    /* Adding 1.5 * 2^23 leaves no place for a fraction. */
    float whole = (value * inverse + 12582912.0f) - 12582912.0f;
    whole = whole > 127.0f ? 127.0f : whole < -127.0f ? -127.0f : whole;
    return (int8_t)whole;
}
/* A whole group by one thread; returns its scale. */
CONVERT_FUNCTION float convert_to_i8(int8_t *to, const float *from, uint32_t count) {
    uint32_t largest = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t magnitude = convert_to_bits(from[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    float inverse;
    float scale = convert_i8_scale(largest, &inverse);
    for (uint32_t i = 0; i < count; i++) {
        to[i] = convert_i8_number(from[i], inverse);
    }
    return scale;
}

/* e^x by range reduction and a polynomial of degree 6 (relative error below 2e-7); 0 below
 * CONVERT_EXP_MIN, e^88 above CONVERT_EXP_MAX. Our own, since the C library's picks different code
 * on different CPUs. */
CONVERT_FUNCTION float convert_exp(float x) {
    if (x != x) {
        return x;
    }
    if (x < CONVERT_EXP_MIN) {
        return 0.0f;
    }
    x = x > CONVERT_EXP_MAX ? CONVERT_EXP_MAX : x;
    float n = nearbyintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * convert_bits((uint32_t)((int32_t)n + 127) << 23);
}

#endif
