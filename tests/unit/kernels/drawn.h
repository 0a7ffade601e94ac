/* Memory and numbers that the tests of kernels feed their operations: aligned as kernels.h asks,
 * zeroed, and values in [-1, 1). Callers free. */
#ifndef TESTS_UNIT_KERNELS_DRAWN_H
#define TESTS_UNIT_KERNELS_DRAWN_H

#include "base/prng.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static inline void *take(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 127) / 64 * 64);
    assert_non_null(memory);
    memset(memory, 0, bytes);
    return memory;
}

static inline float draw(struct prng *prng) {
    return (float)((double)(prng_next(prng) >> 40) * 0x1p-23 - 1.0);
}

static inline float *draw_many(struct prng *prng, size_t count) {
    float *values = take(count * sizeof(float));
    for (size_t i = 0; i < count; i++) {
        values[i] = draw(prng);
    }
    return values;
}

#endif
