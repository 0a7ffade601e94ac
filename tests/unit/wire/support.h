/* What the tests of wire share: random values, and a way to bend bytes. Include once per program.
 */
#ifndef UNIT_WIRE_SUPPORT_H
#define UNIT_WIRE_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/bytes.h"
#include "base/prng.h"

/* Mostly ordinary, sometimes an extreme. */
static inline uint64_t random_u64(struct prng *prng) {
    uint64_t value = prng_next(prng);
    switch (prng_below(prng, 4)) {
    case 0: return value & 0x7f;
    case 1: return value & 0xffff;
    case 2: return UINT64_MAX - (value & 1);
    default: return value;
    }
}
static inline uint32_t random_u32(struct prng *prng) {
    return (uint32_t)random_u64(prng);
}
static inline uint64_t random_id(struct prng *prng) {
    uint64_t value = random_u64(prng);
    return value != 0 ? value : 1;
}
static inline bool random_bool(struct prng *prng) {
    return prng_below(prng, 2) == 1;
}
/* In [low, high], never -0. */
static inline float random_float(struct prng *prng, float low, float high) {
    float value = low + (high - low) * (float)prng_below(prng, 1025) / 1024.0f;
    return value == 0.0f ? 0.0f : value;
}
/* Any bytes but NUL, least .. cap - 1 of them; the rest of the array is zero. */
static inline void random_text(struct prng *prng, char *to, size_t cap, size_t least) {
    memset(to, 0, cap);
    size_t len = least + prng_below(prng, (uint32_t)(cap - least));
    for (size_t i = 0; i < len; i++) {
        to[i] = (char)(1 + prng_below(prng, 255));
    }
}
static inline void random_ascii(struct prng *prng, char *to, size_t cap, size_t least) {
    random_text(prng, to, cap, least);
    for (size_t i = 0; to[i] != '\0'; i++) {
        to[i] = (char)('!' + (uint8_t)to[i] % 90);
    }
}

/* A malloced copy of exactly that size, so that the address sanitizer sees one byte too many. */
static inline uint8_t *bytes_copy(const uint8_t *data, size_t len) {
    uint8_t *copy = malloc(len > 0 ? len : 1);
    assert_non_null(copy);
    if (len > 0) {
        memcpy(copy, data, len);
    }
    return copy;
}

/* Changes, inserts, drops or repeats a few bytes. cap of data >= len + 64. */
static inline size_t bytes_bend(struct prng *prng, uint8_t *data, size_t len) {
    uint32_t changes = 1 + prng_below(prng, 4);
    for (uint32_t i = 0; i < changes; i++) {
        size_t at = len > 0 ? prng_below(prng, (uint32_t)len) : 0;
        switch (prng_below(prng, 5)) {
        case 0: /* one bit */
            if (len > 0) {
                data[at] ^= (uint8_t)(1u << prng_below(prng, 8));
            }
            break;
        case 1: /* any byte */
            if (len > 0) {
                data[at] = (uint8_t)prng_next(prng);
            }
            break;
        case 2: /* insert */
            memmove(data + at + 1, data + at, len - at);
            data[at] = (uint8_t)prng_next(prng);
            len++;
            break;
        case 3: /* drop */
            if (len > 0) {
                memmove(data + at, data + at + 1, len - at - 1);
                len--;
            }
            break;
        default: { /* repeat a stretch */
            size_t stretch = len - at < 12 ? len - at : 12;
            memmove(data + at + stretch, data + at, len - at);
            len += stretch;
            break;
        }
        }
    }
    return len;
}

#endif
