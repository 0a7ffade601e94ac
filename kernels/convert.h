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

/* Whole numbers in [-127, 127] for `count` values, nearest with ties to even; returns what 1 stands
 * for. NaN, with zeros, if a value is not finite. */
CONVERT_FUNCTION float convert_to_i8(int8_t *to, const float *from, uint32_t count) {
    float largest = 0.0f;
    uint32_t is_broken = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t magnitude = convert_to_bits(from[i]) & 0x7fffffffu;
        is_broken |= magnitude >= 0x7f800000u;
        largest = convert_bits(magnitude) > largest ? convert_bits(magnitude) : largest;
    }
    /* A scale below the normal numbers would lose bits by chance of the machine's settings. */
    if (is_broken != 0 || largest < 0x1p-100f) {
        memset(to, 0, count);
        return is_broken != 0 ? convert_bits(0x7fc00000u) : 0.0f;
    }
    float scale = largest / 127.0f;
    float inverse = 127.0f / largest;
    for (uint32_t i = 0; i < count; i++) {
        /* Adding 1.5 * 2^23 leaves no place for a fraction. */
        float whole = (from[i] * inverse + 12582912.0f) - 12582912.0f;
        whole = whole > 127.0f ? 127.0f : whole < -127.0f ? -127.0f : whole;
        to[i] = (int8_t)whole;
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
