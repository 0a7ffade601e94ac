/* Every operation of every CPU backend against double arithmetic, and against itself in other
 * batches, ranges and page maps (bit for bit). Tolerances: see kernels/README.md. */
#include "kernels/kernels.h"

#include "base/prng.h"
#include "unit/kernels/drawn.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define UNIT 0x1p-24 /* half a unit in the last place of 1.0f */

static const char *const backend_names[] = {KERNELS_NAMES};

/* NULL where this CPU lacks the instructions. */
static const struct kernels *backend(size_t i) {
    return kernels_select(backend_names[i]);
}
#define BACKENDS (sizeof(backend_names) / sizeof(backend_names[0]))

static uint16_t bf16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static float bf16_value(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* A weight matrix in both forms: packed, and as plain doubles. */
struct matrix {
    struct kernels_weights packed;
    double *plain;
};
typedef float (*draw_fn)(struct prng *prng);
static struct matrix matrix_drawn(struct prng *prng, enum kernels_dtype dtype, uint32_t rows,
                                  uint32_t cols, draw_fn draw_one) {
    struct matrix m = {.packed = {.dtype = dtype, .rows = rows, .cols = cols}};
    m.packed.data = take(kernels_weights_bytes(dtype, rows, cols));
    m.plain = take((size_t)rows * cols * sizeof(double));
    unsigned char *source = take((size_t)rows * cols * 4 + 1);
    for (size_t i = 0; i < (size_t)rows * cols; i++) {
        float value = draw_one(prng);
        if (dtype == KERNELS_BF16) {
            uint16_t half = bf16_of(value);
            memcpy(source + 1 + i * 2, &half, 2); /* unaligned on purpose */
            m.plain[i] = (double)bf16_value(half);
        } else {
            memcpy(source + 1 + i * 4, &value, 4);
            m.plain[i] = (double)value;
        }
    }
    /* In two calls that split at an odd row, as q, k and v do. */
    uint32_t first = rows / 3;
    kernels_weights_pack(&m.packed, 0, source + 1, dtype, first);
    kernels_weights_pack(&m.packed, first,
                         source + 1 + (size_t)first * cols * kernels_dtype_bytes(dtype), dtype,
                         rows - first);
    free(source);
    return m;
}
static struct matrix matrix_make(struct prng *prng, enum kernels_dtype dtype, uint32_t rows,
                                 uint32_t cols) {
    return matrix_drawn(prng, dtype, rows, cols, draw);
}
static void matrix_free(struct matrix *m) {
    free(m->packed.data);
    free(m->plain);
}

static const enum kernels_dtype weight_dtypes[] = {KERNELS_F32, KERNELS_BF16};

/* x as a product with these weights takes it. */
static float taken(const struct kernels *kernels, enum kernels_dtype dtype, float x) {
    return dtype == KERNELS_BF16 && kernels->round != NULL ? bf16_value(bf16_of(x)) : x;
}

/* The product, with the rows rounded before it where the backend wants that. */
static void multiply(const struct kernels *kernels, const struct kernels_gemm *gemm,
                     uint32_t panel_first, uint32_t panel_end) {
    if (gemm->weights->dtype != KERNELS_BF16 || kernels->round == NULL) {
        kernels->gemm(gemm, panel_first, panel_end);
        return;
    }
    struct kernels_gemm rounded = *gemm;
    size_t width = kernels_halves(gemm->weights->cols);
    uint16_t *halves = take(gemm->count * width * sizeof(uint16_t) + 64);
    for (uint32_t i = 0; i < gemm->count; i++) {
        kernels->round(halves + i * width, gemm->x + i * gemm->x_stride, gemm->weights->cols);
    }
    rounded.x = NULL;
    rounded.halves = halves;
    kernels->gemm(&rounded, panel_first, panel_end);
    free(halves);
}

static void test_a_product_of_any_shape_is_within_the_rounding_bound(void **state) {
    (void)state;
    static const uint32_t counts[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 80};
    static const struct {
        uint32_t rows;
        uint32_t cols;
    } shapes[] = {{1, 1}, {15, 2}, {16, 7}, {17, 255}, {48, 256}, {65, 257}, {130, 600}};
    struct prng prng = {1};
    for (size_t b = 0; b < BACKENDS; b++) {
        const struct kernels *kernels = backend(b);
        for (size_t s = 0; kernels != NULL && s < sizeof(shapes) / sizeof(shapes[0]); s++) {
            for (size_t d = 0; d < 2; d++) {
                uint32_t rows = shapes[s].rows;
                uint32_t cols = shapes[s].cols;
                struct matrix m = matrix_make(&prng, weight_dtypes[d], rows, cols);
                size_t stride = (size_t)kernels_panels(rows) * KERNELS_PANEL + 16;
                for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
                    uint32_t count = counts[c];
                    float *x = draw_many(&prng, (size_t)count * (cols + 3) + 1);
                    float *y = take((count + 1) * stride * sizeof(float));
                    for (size_t i = 0; i < (count + 1) * stride; i++) {
                        y[i] = 77.0f;
                    }
                    struct kernels_gemm gemm = {.weights = &m.packed,
                                                .x = x,
                                                .x_stride = cols + 3,
                                                .y = y,
                                                .y_stride = stride,
                                                .count = count};
                    multiply(kernels, &gemm, 0, kernels_panels(rows));
                    for (uint32_t i = 0; i < count; i++) {
                        for (uint32_t j = 0; j < rows; j++) {
                            double exact = 0;
                            double size = 0;
                            for (uint32_t k = 0; k < cols; k++) {
                                float at = taken(kernels, weight_dtypes[d], x[i * (cols + 3) + k]);
                                double term = (double)at * m.plain[(size_t)j * cols + k];
                                exact += term;
                                size += fabs(term);
                            }
                            double bound = UNIT * (2 + 2 * sqrt(cols)) * size;
                            double error = fabs((double)y[i * stride + j] - exact);
                            if (!(error <= bound)) {
                                fail_msg("%s: %u rows, [%u, %u] at (%u, %u): error %g, bound %g",
                                         kernels->name, count, rows, cols, i, j, error, bound);
                            }
                        }
                        for (size_t j = rows; j < stride - 16; j++) {
                            assert_true(y[i * stride + j] == 0.0f);
                        }
                        for (size_t j = stride - 16; j < stride; j++) {
                            assert_true(y[i * stride + j] == 77.0f); /* nothing past the panels */
                        }
                    }
                    assert_true(y[count * stride] == 77.0f);
                    free(x);
                    free(y);
                }
                matrix_free(&m);
            }
        }
    }
}

static void test_a_product_row_has_the_same_bits_in_every_batch_and_panel_range(void **state) {
    (void)state;
    struct prng prng = {2};
    for (size_t b = 0; b < BACKENDS; b++) {
        const struct kernels *kernels = backend(b);
        for (uint32_t round = 0; kernels != NULL && round < 40; round++) {
            uint32_t rows = 1 + prng_below(&prng, 200);
            uint32_t cols = 1 + prng_below(&prng, 700);
            uint32_t count = 1 + prng_below(&prng, round < 36 ? 80 : 600);
            struct matrix m = matrix_make(&prng, weight_dtypes[round % 2], rows, cols);
            uint32_t panels = kernels_panels(rows);
            size_t stride = (size_t)panels * KERNELS_PANEL;
            float *x = draw_many(&prng, (size_t)count * cols);
            float *whole = take(count * stride * sizeof(float));
            float *parts = take(count * stride * sizeof(float));
            struct kernels_gemm gemm = {.weights = &m.packed,
                                        .x = x,
                                        .x_stride = cols,
                                        .y = whole,
                                        .y_stride = stride,
                                        .count = count};
            multiply(kernels, &gemm, 0, panels);
            for (uint32_t row = 0; row < count;) {
                uint32_t some = 1 + prng_below(&prng, count - row < 9 ? count - row : 9);
                gemm.x = x + (size_t)row * cols;
                gemm.y = parts + row * stride;
                gemm.count = some;
                for (uint32_t panel = 0; panel < panels;) {
                    uint32_t end = panel + 1 + prng_below(&prng, panels - panel);
                    multiply(kernels, &gemm, panel, end);
                    panel = end;
                }
                row += some;
            }
            assert_memory_equal(whole, parts, count * stride * sizeof(float));
            free(x);
            free(whole);
            free(parts);
            matrix_free(&m);
        }
    }
}

/* The order that amx.c promises for BF16 weights: over each 32 columns a chain of the even ones and
 * one of the odd ones, from zero, whose sum is added. Every fused operation here is exact in the
 * product, so a processor that rounds it first gives the same. */
static float tile_element(const float *x, const double *w, uint32_t cols) {
    float sum = 0;
    for (uint32_t first = 0; first < cols; first += 32) {
        float chains[2] = {0, 0};
        for (uint32_t k = first; k < cols && k < first + 32; k++) {
            chains[k % 2] = fmaf(bf16_value(bf16_of(x[k])), (float)w[k], chains[k % 2]);
        }
        sum += chains[0] + chains[1];
    }
    return sum;
}

/* The order of bf16.c: one chain over the pairs of columns, in each the second and then the first.
 */
static float pairs_element(const float *x, const double *w, uint32_t cols) {
    float sum = 0;
    for (uint32_t k = 0; k < cols; k += 2) {
        if (k + 1 < cols) {
            sum = fmaf(bf16_value(bf16_of(x[k + 1])), (float)w[k + 1], sum);
        }
        sum = fmaf(bf16_value(bf16_of(x[k])), (float)w[k], sum);
    }
    return sum;
}

static void check_order(const struct kernels *kernels,
                        float (*element)(const float *x, const double *w, uint32_t cols)) {
    struct prng prng = {41};
    for (uint32_t round = 0; kernels != NULL && round < 60; round++) {
        uint32_t rows = 1 + prng_below(&prng, 70);
        uint32_t cols = 1 + prng_below(&prng, 400);
        uint32_t count = 1 + prng_below(&prng, 70);
        struct matrix m = matrix_make(&prng, KERNELS_BF16, rows, cols);
        size_t stride = (size_t)kernels_panels(rows) * KERNELS_PANEL;
        float *x = draw_many(&prng, (size_t)count * cols);
        float *y = take(count * stride * sizeof(float));
        struct kernels_gemm gemm = {.weights = &m.packed,
                                    .x = x,
                                    .x_stride = cols,
                                    .y = y,
                                    .y_stride = stride,
                                    .count = count};
        multiply(kernels, &gemm, 0, kernels_panels(rows));
        for (uint32_t i = 0; i < count; i++) {
            for (uint32_t j = 0; j < rows; j++) {
                float expected = element(x + (size_t)i * cols, m.plain + (size_t)j * cols, cols);
                assert_memory_equal(&y[i * stride + j], &expected, sizeof(float));
            }
        }
        free(x);
        free(y);
        matrix_free(&m);
    }
}

static void test_bf16_products_of_rounded_rows_have_the_order_that_they_promise(void **state) {
    (void)state;
    check_order(kernels_select("amx"), tile_element);
    check_order(kernels_select("avx512bf16"), pairs_element);
}

/* So small that products lie about where numbers stop being normal; some are below that already. */
static float draw_bits(struct prng *prng) {
    uint32_t exponent = prng_below(prng, 4) == 0 ? prng_below(prng, 3) : 55 + prng_below(prng, 20);
    uint32_t bits = prng_below(prng, 2) << 31 | exponent << 23 | prng_below(prng, 1u << 23);
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* A row alone need not be computed by the instruction that takes sixteen; where numbers vanish
 * below the normal ones it has to be as careless. */
static void test_a_row_has_the_same_bits_alone_where_numbers_vanish(void **state) {
    (void)state;
    struct prng prng = {43};
    for (size_t b = 0; b < BACKENDS; b++) {
        const struct kernels *kernels = backend(b);
        for (uint32_t round = 0; kernels != NULL && round < 40; round++) {
            uint32_t rows = 1 + prng_below(&prng, 300);
            uint32_t cols = 1 + prng_below(&prng, 400);
            size_t stride = (size_t)kernels_panels(rows) * KERNELS_PANEL;
            struct matrix m = matrix_drawn(&prng, KERNELS_BF16, rows, cols, draw_bits);
            float *x = take(3 * cols * sizeof(float));
            for (size_t i = 0; i < 3 * (size_t)cols; i++) {
                x[i] = draw_bits(&prng);
            }
            float *together = take(3 * stride * sizeof(float));
            float *alone = take(3 * stride * sizeof(float));
            struct kernels_gemm gemm = {.weights = &m.packed,
                                        .x = x,
                                        .x_stride = cols,
                                        .y = together,
                                        .y_stride = stride,
                                        .count = 3};
            multiply(kernels, &gemm, 0, kernels_panels(rows));
            for (uint32_t i = 0; i < 3; i++) {
                gemm.x = x + (size_t)i * cols;
                gemm.y = alone + i * stride;
                gemm.count = 1;
                multiply(kernels, &gemm, 0, kernels_panels(rows));
            }
            assert_memory_equal(together, alone, 3 * stride * sizeof(float));
            matrix_free(&m);
            free(x);
            free(together);
            free(alone);
        }
    }
}

static void test_rows_are_rounded_as_bf16_is_stored(void **state) {
    (void)state;
    struct prng prng = {42};
    for (size_t b = 0; b < BACKENDS; b++) {
        const struct kernels *kernels = backend(b);
        for (uint32_t cols = 1; kernels != NULL && kernels->round != NULL && cols < 200; cols++) {
            static const float odd[] = {0.0f,   -0.0f,     INFINITY, -INFINITY, NAN,
                                        1e-40f, -1.2e-38f, 3.4e38f,  0x1.01p0f, 0x1.03p0f};
            float *x = draw_many(&prng, cols);
            uint16_t *stored = take(cols * sizeof(uint16_t));
            uint16_t *rounded = take((kernels_halves(cols) + 1) * sizeof(uint16_t));
            memset(rounded, 0x55, (kernels_halves(cols) + 1) * sizeof(uint16_t));
            for (uint32_t i = 0; i < cols; i++) {
                x[i] = i % 2 == 1 ? odd[i / 2 % 10] : x[i];
            }
            kernels->store(stored, KERNELS_BF16, x, cols);
            kernels->round(rounded, x, cols);
            assert_memory_equal(stored, rounded, cols * sizeof(uint16_t));
            for (uint32_t i = cols; i < kernels_halves(cols); i++) {
                assert_int_equal(rounded[i], 0);
            }
            assert_int_equal(rounded[kernels_halves(cols)], 0x5555);
            free(x);
            free(stored);
            free(rounded);
        }
    }
}

static void test_row_operations_agree_with_double_arithmetic_at_every_width(void **state) {
    (void)state;
    struct prng prng = {3};
    for (size_t b = 0; b < BACKENDS; b++) {
        const struct kernels *kernels = backend(b);
        for (uint32_t width = 1; kernels != NULL && width <= 1100; width += width < 70 ? 1 : 343) {
            float *x = draw_many(&prng, width);
            float *w = draw_many(&prng, width);
            float *out = take(width * sizeof(float));
            double squares = 0;
            for (uint32_t i = 0; i < width; i++) {
                squares += (double)x[i] * (double)x[i];
            }
            kernels->rms_norm(out, x, w, width, 1e-5f);
            double scale = 1 / sqrt(squares / width + (double)1e-5f);
            for (uint32_t i = 0; i < width; i++) {
                double exact = (double)x[i] * scale * (double)w[i];
                assert_true(fabs((double)out[i] - exact) <= UNIT * (8 + sqrt(width)) * fabs(exact));
            }
            kernels->silu_mul(out, x, w, width);
            for (uint32_t i = 0; i < width; i++) {
                double exact = (double)x[i] / (1 + exp(-(double)x[i])) * (double)w[i];
                assert_true(fabs((double)out[i] - exact) <= 1e-6 * fabs(exact));
            }
            memcpy(out, w, width * sizeof(float));
            kernels->add(out, x, width);
            for (uint32_t i = 0; i < width; i++) {
                assert_true(out[i] == w[i] + x[i]);
            }
            free(x);
            free(w);
            free(out);
        }
        if (kernels != NULL) { /* empty is legal */
            kernels->silu_mul(NULL, NULL, NULL, 0);
            kernels->add(NULL, NULL, 0);
        }
    }
}

static void test_silu_is_right_over_the_whole_range_and_keeps_nan(void **state) {
    (void)state;
    for (size_t b = 0; b < BACKENDS; b++) {
        const struct kernels *kernels = backend(b);
        if (kernels == NULL) {
            continue;
        }
        const float one = 1.0f;
        float out;
        for (double x = -110; x <= 110; x += 0.0371) {
            float gate = (float)x;
            kernels->silu_mul(&out, &gate, &one, 1);
            double exact = (double)gate / (1 + exp(-(double)gate));
            /* Below e^-88 the bound of the exponential shows: the result is tiny, not exact. */
            assert_true(fabs((double)out - exact) <= 1e-6 * fabs(exact) + 1e-36);
        }
        float nan = NAN;
        kernels->silu_mul(&out, &nan, &one, 1);
        assert_true(isnan(out));
    }
}

/* Against the C library at every place of a vector; then the bits of all backends. */
static void test_exponentials_are_within_two_units_and_the_same_everywhere(void **state) {
    (void)state;
    enum { COUNT = 4099 };
    float *x = take(COUNT * sizeof(float));
    double *first = take(COUNT * sizeof(double));
    double *out = take((COUNT + 1) * sizeof(double));
    struct prng prng = {45};
    for (uint32_t round = 0; round < 200; round++) {
        static const float temperatures[] = {1.0f, 0.7f, 2.0f, 1e-3f, 1e30f};
        float temperature = temperatures[round % 5];
        float largest = (float)prng_below(&prng, 4000) / 100.0f - 20.0f;
        size_t count = round == 0 ? COUNT : prng_below(&prng, 100);
        for (size_t i = 0; i < count; i++) {
            x[i] = largest + 709.5f * (2.0f * (float)prng_below(&prng, 1u << 20) * 0x1p-20f - 1.0f);
        }
        static const float ends[] = {-INFINITY, INFINITY, NAN, 3e38f, -3e38f, 0.0f, -0.0f};
        for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]) && round % 4 == 1 && i < count; i++) {
            x[prng_below(&prng, (uint32_t)count)] = ends[i];
        }
        for (size_t b = 0; b < BACKENDS; b++) {
            const struct kernels *kernels = backend(b);
            if (kernels == NULL) {
                continue;
            }
            out[count] = 77.0;
            kernels->exps(out, x, count, largest, temperature);
            assert_true(out[count] == 77.0);
            if (b == 0) {
                memcpy(first, out, count * sizeof(double));
            }
            assert_memory_equal(first, out, count * sizeof(double));
        }
        for (size_t i = 0; i < count; i++) {
            double distance = ((double)x[i] - (double)largest) / (double)temperature;
            double exact = distance < -708 ? 0 : distance > 709 ? (double)INFINITY : exp(distance);
            assert_true(isnan(distance)
                            ? isnan(first[i])
                            : first[i] == exact || fabs(first[i] - exact) <= 2 * 0x1p-52 * exact);
        }
    }
    free(x);
    free(first);
    free(out);
}

static void test_rotary_turns_pairs_of_halves(void **state) {
    (void)state;
    static const uint32_t dims[] = {2, 6, 8, 16, 20, 64, 128, 256};
    struct prng prng = {4};
    for (size_t b = 0; b < BACKENDS; b++) {
        const struct kernels *kernels = backend(b);
        for (size_t d = 0; kernels != NULL && d < sizeof(dims) / sizeof(dims[0]); d++) {
            uint32_t dim = dims[d];
            uint32_t half = dim / 2;
            uint32_t heads = 1 + prng_below(&prng, 5);
            float *x = draw_many(&prng, (size_t)heads * dim);
            float *turned = take((size_t)heads * dim * sizeof(float));
            float *c = draw_many(&prng, half);
            float *s = draw_many(&prng, half);
            memcpy(turned, x, (size_t)heads * dim * sizeof(float));
            kernels->rotary(turned, c, s, heads, dim);
            for (uint32_t head = 0; head < heads; head++) {
                for (uint32_t i = 0; i < half; i++) {
                    double low = (double)x[head * dim + i];
                    double high = (double)x[head * dim + half + i];
                    double new_low = low * (double)c[i] - high * (double)s[i];
                    double new_high = high * (double)c[i] + low * (double)s[i];
                    assert_true(fabs((double)turned[head * dim + i] - new_low) <= 4 * UNIT);
                    assert_true(fabs((double)turned[head * dim + half + i] - new_high) <= 4 * UNIT);
                }
            }
            free(x);
            free(turned);
            free(c);
            free(s);
        }
    }
}

/* An independent reading of a 16-bit float, by arithmetic on its fields. */
static double half_value(uint32_t half, int exponent_bits, int fraction_bits) {
    int bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = (int)(half >> fraction_bits) & ((1 << exponent_bits) - 1);
    double fraction = ldexp((double)(half & ((1u << fraction_bits) - 1)), -fraction_bits);
    double sign = (half & 0x8000u) != 0 ? -1 : 1;
    if (exponent == (1 << exponent_bits) - 1) {
        return fraction != 0 ? (double)NAN : sign * (double)INFINITY;
    }
    return exponent == 0 ? sign * ldexp(fraction, 1 - bias)
                         : sign * ldexp(1 + fraction, exponent - bias);
}

static void test_every_16_bit_float_widens_exactly_and_bf16_comes_back(void **state) {
    (void)state;
    for (size_t b = 0; b < BACKENDS; b++) {
        const struct kernels *kernels = backend(b);
        if (kernels == NULL) {
            continue;
        }
        uint16_t *halves = take(65536 * 2);
        uint16_t *back = take(65536 * 2);
        float *wide = take(65536 * 4);
        for (uint32_t i = 0; i < 65536; i++) {
            halves[i] = (uint16_t)i;
        }
        for (int f16 = 0; f16 < 2; f16++) {
            kernels->widen(wide, halves, f16 != 0 ? KERNELS_F16 : KERNELS_BF16, 65536);
            for (uint32_t i = 0; i < 65536; i++) {
                double exact = f16 != 0 ? half_value(i, 5, 10) : half_value(i, 8, 7);
                assert_true(isnan(exact) ? isnan(wide[i]) : (double)wide[i] == exact);
            }
        }
        kernels->widen(wide, halves, KERNELS_BF16, 65536);
        kernels->store(back, KERNELS_BF16, wide, 65536);
        for (uint32_t i = 0; i < 65536; i++) {
            assert_true(back[i] == halves[i] || isnan(wide[i]));
            assert_true(!isnan(wide[i]) || isnan(bf16_value(back[i])));
        }
        struct prng prng = {5};
        for (uint32_t i = 0; i < 20000; i++) { /* nearest of the two neighbours, even on a tie */
            uint32_t bits = (uint32_t)prng_next(&prng) & 0xbfffffffu;
            bits = i % 16 == 0 ? (bits & 0xffff0000u) | 0x8000u : bits;
            float value;
            memcpy(&value, &bits, 4);
            uint16_t stored;
            kernels->store(&stored, KERNELS_BF16, &value, 1);
            uint16_t down = (uint16_t)(bits >> 16);
            double to_down = fabs((double)value - (double)bf16_value(down));
            double to_up = fabs((double)bf16_value((uint16_t)(down + 1)) - (double)value);
            uint16_t nearest = to_down < to_up ? down : (uint16_t)(down + 1);
            if (to_down == to_up) {
                nearest = (uint16_t)(down + (down & 1));
            }
            assert_int_equal(stored, nearest);
        }
        kernels->widen(NULL, NULL, KERNELS_BF16, 0);
        float same[3] = {1.5f, -0.0f, 3e-41f};
        float copy[3];
        kernels->store(copy, KERNELS_F32, same, 3);
        assert_memory_equal(copy, same, sizeof(same));
        kernels->widen(copy, same, KERNELS_F32, 3);
        assert_memory_equal(copy, same, sizeof(same));
        free(halves);
        free(back);
        free(wide);
    }
}

/* ---- attention ---- */

struct paged {
    struct kernels_attention args;
    unsigned char *pool;
    uint32_t *pages;
    size_t pool_bytes;
};

/* The same K and V (from `seed`) behind any page size and page order; everything else is NaN. */
static struct paged paged_make(uint64_t seed, const float *q, float *out, uint32_t length,
                               uint32_t page_tokens, uint32_t heads, uint32_t kv_heads,
                               uint32_t dim, enum kernels_dtype dtype, struct prng *prng) {
    uint32_t page_count = (length + page_tokens - 1) / page_tokens;
    uint64_t row = (uint64_t)kv_heads * dim * kernels_dtype_bytes(dtype);
    struct paged paged = {0};
    paged.args = (struct kernels_attention){.q = q,
                                            .out = out,
                                            .tokens = 1,
                                            .k_offset = 64,
                                            .v_offset = 128 + row * page_tokens,
                                            .row_bytes = row,
                                            .page_tokens = page_tokens,
                                            .length = length,
                                            .heads = heads,
                                            .kv_heads = kv_heads,
                                            .head_dim = dim,
                                            .kv_dtype = dtype,
                                            .scale = (float)(1 / sqrt(dim))};
    paged.args.page_bytes = (paged.args.v_offset + row * page_tokens + 63) / 64 * 64;
    paged.pool_bytes = (page_count + 3) * paged.args.page_bytes;
    paged.pool = take(paged.pool_bytes);
    memset(paged.pool, 0xff, paged.pool_bytes);
    paged.pages = take(page_count * sizeof(uint32_t));
    for (uint32_t i = 0; i < page_count; i++) {
        paged.pages[i] = i + 2;
    }
    for (uint32_t i = page_count; i > 1; i--) {
        uint32_t j = prng_below(prng, i);
        uint32_t swap = paged.pages[i - 1];
        paged.pages[i - 1] = paged.pages[j];
        paged.pages[j] = swap;
    }
    paged.args.base = paged.pool;
    paged.args.pages = paged.pages;
    struct prng data = {seed};
    for (uint32_t t = 0; t < length; t++) {
        unsigned char *page = paged.pool + paged.pages[t / page_tokens] * paged.args.page_bytes;
        for (int is_v = 0; is_v < 2; is_v++) {
            unsigned char *to = page + (is_v != 0 ? paged.args.v_offset : paged.args.k_offset) +
                                (t % page_tokens) * row;
            for (uint32_t i = 0; i < kv_heads * dim; i++) {
                float value = draw(&data) * 3;
                if (dtype == KERNELS_BF16) {
                    uint16_t half = bf16_of(value);
                    memcpy(to + i * 2, &half, 2);
                } else {
                    memcpy(to + i * 4, &value, 4);
                }
            }
        }
    }
    return paged;
}
static void paged_free(struct paged *paged) {
    free(paged->pool);
    free(paged->pages);
}
static double paged_value(const struct paged *p, uint64_t offset, uint32_t t, uint32_t i) {
    const unsigned char *row = p->pool + p->pages[t / p->args.page_tokens] * p->args.page_bytes +
                               offset + (t % p->args.page_tokens) * p->args.row_bytes;
    if (p->args.kv_dtype == KERNELS_BF16) {
        uint16_t half;
        memcpy(&half, row + i * 2, 2);
        return (double)bf16_value(half);
    }
    float value;
    memcpy(&value, row + i * 4, 4);
    return (double)value;
}
static void check_attention(const struct kernels *kernels, const struct paged *p) {
    const struct kernels_attention *a = &p->args;
    double *weight = take(a->length * sizeof(double));
    for (uint32_t head = 0; head < a->heads; head++) {
        uint32_t first = head / (a->heads / a->kv_heads) * a->head_dim;
        double largest = -(double)INFINITY;
        for (uint32_t t = 0; t < a->length; t++) {
            weight[t] = 0;
            for (uint32_t i = 0; i < a->head_dim; i++) {
                weight[t] += (double)a->q[head * a->head_dim + i] *
                             paged_value(p, a->k_offset, t, first + i);
            }
            weight[t] *= (double)a->scale;
            largest = weight[t] > largest ? weight[t] : largest;
        }
        double total = 0;
        for (uint32_t t = 0; t < a->length; t++) {
            weight[t] = exp(weight[t] - largest);
            total += weight[t];
        }
        for (uint32_t i = 0; i < a->head_dim; i++) {
            double exact = 0;
            for (uint32_t t = 0; t < a->length; t++) {
                exact += weight[t] / total * paged_value(p, a->v_offset, t, first + i);
            }
            /* Values are below 3; scores below 3 sqrt(dim), so their rounding dominates. */
            double bound = 3 * UNIT * (16 + 4 * (double)a->head_dim);
            double error = fabs((double)a->out[head * a->head_dim + i] - exact);
            if (!(error <= bound)) {
                fail_msg("%s: length %u, head %u of %u/%u, dim %u: error %g, bound %g",
                         kernels->name, a->length, head, a->heads, a->kv_heads, a->head_dim, error,
                         bound);
            }
        }
    }
    free(weight);
}

static const struct {
    uint32_t length;
    uint32_t page_tokens;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t dim;
} attention_shapes[] = {{1, 16, 1, 1, 2},    {2, 1, 4, 4, 6},       {7, 5, 6, 2, 8},
                        {63, 16, 3, 1, 20},  {64, 64, 8, 4, 8},     {65, 16, 20, 1, 64},
                        {129, 24, 4, 2, 80}, {300, 100, 4, 1, 128}, {1000, 256, 2, 1, 32},
                        {128, 7, 34, 2, 16}, {90, 1024, 2, 2, 256}};

static void
test_attention_of_any_shape_matches_double_softmax_and_reads_no_other_row(void **state) {
    (void)state;
    struct prng prng = {6};
    for (size_t b = 0; b < BACKENDS; b++) {
        const struct kernels *kernels = backend(b);
        for (size_t s = 0;
             kernels != NULL && s < sizeof(attention_shapes) / sizeof(attention_shapes[0]); s++) {
            for (size_t d = 0; d < 2; d++) {
                uint32_t size = attention_shapes[s].heads * attention_shapes[s].dim;
                float *q = draw_many(&prng, size);
                float *out = take(size * sizeof(float));
                struct paged p = paged_make(100 + s, q, out, attention_shapes[s].length,
                                            attention_shapes[s].page_tokens,
                                            attention_shapes[s].heads, attention_shapes[s].kv_heads,
                                            attention_shapes[s].dim, weight_dtypes[d], &prng);
                kernels->attention(&p.args, 0, attention_shapes[s].kv_heads);
                check_attention(kernels, &p);
                paged_free(&p);
                free(q);
                free(out);
            }
        }
    }
}

static void test_attention_has_the_same_bits_behind_every_page_map_and_head_range(void **state) {
    (void)state;
    static const uint32_t page_sizes[] = {1, 3, 16, 64, 100, 512};
    struct prng prng = {7};
    for (size_t b = 0; b < BACKENDS; b++) {
        const struct kernels *kernels = backend(b);
        for (uint32_t round = 0; kernels != NULL && round < 30; round++) {
            uint32_t length = 1 + prng_below(&prng, 260);
            uint32_t kv_heads = 1 + prng_below(&prng, 4);
            uint32_t heads = kv_heads * (1 + prng_below(&prng, 5));
            uint32_t dim = 2 * (1 + prng_below(&prng, 40));
            enum kernels_dtype dtype = weight_dtypes[round % 2];
            float *q = draw_many(&prng, (size_t)heads * dim);
            float *first = take((size_t)heads * dim * sizeof(float));
            float *again = take((size_t)heads * dim * sizeof(float));
            struct paged p =
                paged_make(round, q, first, length, 16, heads, kv_heads, dim, dtype, &prng);
            kernels->attention(&p.args, 0, kv_heads);
            paged_free(&p);
            for (size_t s = 0; s < sizeof(page_sizes) / sizeof(page_sizes[0]); s++) {
                p = paged_make(round, q, again, length, page_sizes[s], heads, kv_heads, dim, dtype,
                               &prng);
                memset(again, 0, (size_t)heads * dim * sizeof(float));
                for (uint32_t head = kv_heads; head-- > 0;) {
                    kernels->attention(&p.args, head, head + 1);
                }
                assert_memory_equal(first, again, (size_t)heads * dim * sizeof(float));
                paged_free(&p);
            }
            free(q);
            free(first);
            free(again);
        }
    }
}

static void test_attention_of_neighbours_has_the_bits_of_each_alone(void **state) {
    (void)state;
    static const uint32_t dims[] = {2, 8, 12, 36, 64, 80, 128, 136, 256};
    struct prng prng = {17};
    for (size_t b = 0; b < BACKENDS; b++) {
        const struct kernels *kernels = backend(b);
        for (uint32_t round = 0; kernels != NULL && round < 60; round++) {
            uint32_t tokens = 1 + prng_below(&prng, 70);
            uint32_t length = 1 + prng_below(&prng, 150);
            uint32_t kv_heads = 1 + prng_below(&prng, 2);
            uint32_t heads = kv_heads * (1 + prng_below(&prng, 6));
            uint32_t dim = dims[round / 2 % 9];
            size_t size = (size_t)heads * dim;
            size_t stride = size + 5;
            float *q = draw_many(&prng, tokens * stride);
            float *apart = take(tokens * stride * sizeof(float));
            float *together = take(tokens * stride * sizeof(float));
            struct paged p = paged_make(round, q, together, length + tokens - 1, 16, heads,
                                        kv_heads, dim, weight_dtypes[round % 2], &prng);
            p.args.length = length;
            p.args.tokens = tokens;
            p.args.q_stride = stride;
            p.args.out_stride = stride;
            kernels->attention(&p.args, 0, kv_heads);
            p.args.tokens = 1;
            for (uint32_t i = 0; i < tokens; i++) {
                p.args.q = q + i * stride;
                p.args.out = apart + i * stride;
                p.args.length = length + i;
                kernels->attention(&p.args, 0, kv_heads);
            }
            assert_memory_equal(together, apart, tokens * stride * sizeof(float));
            /* What a later neighbour alone may see does not reach the earlier ones. */
            uint32_t last = length + tokens - 2;
            memset(p.pool + p.pages[last / 16] * p.args.page_bytes + p.args.v_offset +
                       last % 16 * p.args.row_bytes,
                   0xff, p.args.row_bytes);
            p.args.q = q;
            p.args.out = together;
            p.args.length = length;
            p.args.tokens = tokens;
            kernels->attention(&p.args, 0, kv_heads);
            assert_memory_equal(together, apart, (tokens - 1) * stride * sizeof(float));
            assert_true(isnan(together[(tokens - 1) * stride]));
            paged_free(&p);
            free(q);
            free(apart);
            free(together);
        }
    }
}

static void test_attention_over_a_poisoned_row_is_nan(void **state) {
    (void)state;
    struct prng prng = {8};
    for (size_t b = 0; b < BACKENDS; b++) {
        const struct kernels *kernels = backend(b);
        for (size_t d = 0; kernels != NULL && d < 2; d++) {
            float *q = draw_many(&prng, 16);
            float *out = take(16 * sizeof(float));
            struct paged p = paged_make(9, q, out, 100, 16, 2, 1, 8, weight_dtypes[d], &prng);
            memset(p.pool + p.pages[3] * p.args.page_bytes, 0xff, p.args.page_bytes);
            kernels->attention(&p.args, 0, 1);
            for (uint32_t i = 0; i < 16; i++) {
                assert_true(isnan(out[i]));
            }
            paged_free(&p);
            free(q);
            free(out);
        }
    }
}

/* One operation by both backends; the results must be the same bytes. */
static void check_same_product(const struct kernels *one, const struct kernels *other,
                               struct prng *prng, enum kernels_dtype dtype, uint32_t rows,
                               uint32_t cols, uint32_t count) {
    struct matrix m = matrix_make(prng, dtype, rows, cols);
    size_t stride = (size_t)kernels_panels(rows) * KERNELS_PANEL;
    float *x = draw_many(prng, (size_t)count * cols);
    float *y[2] = {take(count * stride * 4), take(count * stride * 4)};
    for (int i = 0; i < 2; i++) {
        struct kernels_gemm gemm = {.weights = &m.packed,
                                    .x = x,
                                    .x_stride = cols,
                                    .y = y[i],
                                    .y_stride = stride,
                                    .count = count};
        multiply(i == 0 ? one : other, &gemm, 0, kernels_panels(rows));
    }
    assert_memory_equal(y[0], y[1], count * stride * 4);
    free(y[0]);
    free(y[1]);
    free(x);
    matrix_free(&m);
}

static void check_same_rows(const struct kernels *one, const struct kernels *other,
                            struct prng *prng, uint32_t width) {
    float *x = draw_many(prng, width);
    float *up = draw_many(prng, width);
    for (uint32_t i = 0; i < width; i++) { /* also far out, zero, infinite and not a number */
        static const float odd[] = {0.0f, -0.0f, 90.0f, -90.0f, INFINITY, -INFINITY, NAN, 1e-40f};
        x[i] = i % 3 == 1 ? odd[i / 3 % 8] : x[i] * 20;
    }
    float *out[2] = {take(width * 4 + 4), take(width * 4 + 4)};
    for (int i = 0; i < 2; i++) {
        (i == 0 ? one : other)->silu_mul(out[i], x, up, width);
        (i == 0 ? one : other)->add(out[i], up, width);
        (i == 0 ? one : other)->rms_norm(out[i], out[i], up, width, 1e-5f);
        assert_true(out[i][width] == 0.0f); /* nothing behind the end */
    }
    assert_memory_equal(out[0], out[1], width * 4);
    free(out[0]);
    free(out[1]);
    free(x);
    free(up);
}

static void check_same_attention(const struct kernels *one, const struct kernels *other,
                                 struct prng *prng, enum kernels_dtype dtype, uint32_t length,
                                 uint32_t heads, uint32_t kv_heads, uint32_t dim) {
    float *q = draw_many(prng, (size_t)heads * dim);
    float *out[2] = {take((size_t)heads * dim * 4), take((size_t)heads * dim * 4)};
    struct paged p = paged_make(7, q, out[0], length, 16, heads, kv_heads, dim, dtype, prng);
    one->attention(&p.args, 0, kv_heads);
    p.args.out = out[1];
    other->attention(&p.args, 0, kv_heads);
    assert_memory_equal(out[0], out[1], (size_t)heads * dim * 4);
    paged_free(&p);
    free(out[0]);
    free(out[1]);
    free(q);
}

static void test_backends_of_one_numerics_give_the_same_bits(void **state) {
    (void)state;
    struct prng prng = {21};
    for (size_t b = 1; b < BACKENDS * BACKENDS; b++) {
        const struct kernels *one = backend(b / BACKENDS);
        const struct kernels *other = backend(b % BACKENDS);
        if (b / BACKENDS >= b % BACKENDS || one == NULL || other == NULL ||
            strcmp(one->numerics, other->numerics) != 0) {
            continue;
        }
        for (size_t d = 0; d < 2; d++) {
            bool has_same = d == 0 || strcmp(one->bf16_numerics, other->bf16_numerics) == 0;
            for (uint32_t count = 1; has_same && count <= 40; count++) {
                check_same_product(one, other, &prng, weight_dtypes[d], 1 + prng_below(&prng, 230),
                                   1 + prng_below(&prng, 700), count);
            }
            for (uint32_t i = 0; i < 60; i++) {
                static const uint32_t dims[] = {2, 8, 12, 32, 36, 64, 80, 96, 128, 256};
                uint32_t kv_heads = 1 + prng_below(&prng, 3);
                check_same_attention(
                    one, other, &prng, weight_dtypes[d], 1 + prng_below(&prng, 300),
                    kv_heads * (1 + prng_below(&prng, 20)), kv_heads, dims[i % 10]);
            }
        }
        for (uint32_t width = 1; width < 100; width++) {
            check_same_rows(one, other, &prng, width);
        }
    }
}

/* ---- whole numbers ---- */

/* Rows of activations, quantised by one backend. */
static struct kernels_quants quants_make(const struct kernels *kernels, const float *x,
                                         uint32_t count, uint32_t cols) {
    uint32_t groups = kernels_groups(cols);
    struct kernels_quants quants = {.numbers = take((size_t)count * groups * KERNELS_GROUP),
                                    .scales = take((size_t)count * groups * sizeof(float)),
                                    .offsets = take((size_t)count * groups * sizeof(int32_t))};
    for (uint32_t i = 0; i < count; i++) {
        kernels->quantize(&quants, i, x + (size_t)i * cols, cols);
    }
    return quants;
}
static void quants_free(struct kernels_quants *quants) {
    free(quants->numbers);
    free(quants->scales);
    free(quants->offsets);
}

static void test_whole_numbers_stand_for_values_within_half_a_step(void **state) {
    (void)state;
    struct prng prng = {31};
    for (size_t b = 0; b < BACKENDS; b++) {
        const struct kernels *kernels = backend(b);
        for (uint32_t round = 0; kernels != NULL && round < 60; round++) {
            uint32_t cols = 1 + prng_below(&prng, 300);
            float *x = draw_many(&prng, cols);
            float factor = exp2f((float)prng_below(&prng, 120) - 60.0f);
            for (uint32_t i = 0; i < cols; i++) {
                x[i] *= round % 7 == 0 && i < 64 ? 0.0f : factor;
            }
            struct kernels_quants quants = quants_make(kernels, x, 1, cols);
            for (uint32_t g = 0; g < kernels_groups(cols); g++) {
                float largest = 0;
                int32_t sum = 0;
                for (uint32_t i = 0; i < KERNELS_GROUP; i++) {
                    uint32_t k = g * KERNELS_GROUP + i;
                    float value = k < cols ? x[k] : 0.0f;
                    int number = quants.numbers[k];
                    largest = fabsf(value) > largest ? fabsf(value) : largest;
                    sum += number;
                    assert_in_range(number + 127, 0, 254);
                    /* A step may be one rounding off. */
                    double error = fabs((double)value - number * (double)quants.scales[g]);
                    assert_true(error <= 0.5001 * (double)quants.scales[g]);
                }
                assert_true(quants.scales[g] == largest / 127.0f);
                assert_int_equal(quants.offsets[g], -128 * sum);
            }
            quants_free(&quants);
            free(x);
        }
    }
}

static void test_a_group_that_is_not_finite_makes_its_products_nan(void **state) {
    (void)state;
    struct prng prng = {32};
    static const float broken[] = {NAN, INFINITY, -INFINITY};
    for (size_t b = 0; b < BACKENDS; b++) {
        const struct kernels *kernels = backend(b);
        for (size_t i = 0; kernels != NULL && i < 3; i++) {
            struct kernels_weights packed = {.dtype = KERNELS_I8, .rows = 16, .cols = 100};
            float rows[1600] = {0};
            packed.data = take(kernels_weights_bytes(KERNELS_I8, 16, 100));
            kernels_weights_pack(&packed, 0, rows, KERNELS_F32, 16);
            float *x = draw_many(&prng, 200);
            x[70 + i] = broken[i];
            struct kernels_quants quants = quants_make(kernels, x, 2, 100);
            float y[32];
            struct kernels_gemm gemm = {
                .weights = &packed, .y = y, .y_stride = 16, .count = 2, .quants = quants};
            kernels->gemm(&gemm, 0, 1);
            for (uint32_t j = 0; j < 16; j++) {
                assert_true(isnan(y[j]));
                assert_true(y[16 + j] == 0.0f);
            }
            quants_free(&quants);
            free(x);
            free(packed.data);
        }
    }
}

/* Products of whole numbers: right, and the same bits from every backend, batch and range. */
static void test_products_of_whole_numbers_are_exact_and_the_same_everywhere(void **state) {
    (void)state;
    struct prng prng = {33};
    for (uint32_t round = 0; round < 80; round++) {
        uint32_t rows = 1 + prng_below(&prng, 150);
        uint32_t cols = 1 + prng_below(&prng, round % 4 == 0 ? 2000 : 300);
        uint32_t count = 1 + prng_below(&prng, round % 20 == 1 ? 300 : 30);
        uint32_t groups = kernels_groups(cols);
        size_t stride = (size_t)kernels_panels(rows) * KERNELS_PANEL;
        float *source = draw_many(&prng, (size_t)rows * cols);
        struct kernels_weights packed = {.dtype = KERNELS_I8, .rows = rows, .cols = cols};
        packed.data = take(kernels_weights_bytes(KERNELS_I8, rows, cols));
        kernels_weights_pack(&packed, 0, source, KERNELS_F32, rows / 2);
        kernels_weights_pack(&packed, rows / 2, source + (size_t)(rows / 2) * cols, KERNELS_F32,
                             rows - rows / 2);
        float *x = draw_many(&prng, (size_t)count * cols);
        struct kernels_quants quants = quants_make(kernels_select("c"), x, count, cols);
        float *expected = take(count * stride * sizeof(float));
        float *weight = take(cols * sizeof(float));
        struct kernels_gemm gemm = {.weights = &packed,
                                    .y = expected,
                                    .y_stride = stride,
                                    .count = count,
                                    .quants = quants};
        kernels_select("c")->gemm(&gemm, 0, kernels_panels(rows));
        for (uint32_t j = 0; j < rows; j++) {
            kernels_weights_row(&packed, j, weight);
            for (uint32_t k = 0; k < cols; k++) { /* the largest of 64 values in [-1, 1] */
                assert_true(fabsf(weight[k] - source[(size_t)j * cols + k]) <= 0.51f / 127.0f);
            }
            for (uint32_t i = 0; i < count; i++) {
                double exact = 0;
                double size = 0;
                for (uint32_t k = 0; k < cols; k++) {
                    size_t at = (size_t)i * groups + k / KERNELS_GROUP;
                    double term = (double)weight[k] * quants.numbers[(size_t)i * groups * 64 + k] *
                                  (double)quants.scales[at];
                    exact += term;
                    size += fabs(term);
                }
                double error = fabs((double)expected[i * stride + j] - exact);
                assert_true(error <= UNIT * (4 + 2 * sqrt(groups)) * size);
            }
        }
        for (size_t j = rows; j < stride; j++) {
            assert_true(expected[j] == 0.0f);
        }
        for (size_t b = 1; b < BACKENDS; b++) {
            const struct kernels *kernels = backend(b);
            if (kernels == NULL) {
                continue;
            }
            struct kernels_quants same = quants_make(kernels, x, count, cols);
            assert_memory_equal(same.numbers, quants.numbers, (size_t)count * groups * 64);
            assert_memory_equal(same.scales, quants.scales, (size_t)count * groups * 4);
            assert_memory_equal(same.offsets, quants.offsets, (size_t)count * groups * 4);
            float *found = take(count * stride * sizeof(float));
            for (uint32_t row = 0; row < count;) {
                uint32_t some = 1 + prng_below(&prng, count - row);
                gemm.y = found + row * stride;
                gemm.count = some;
                gemm.quants = (struct kernels_quants){
                    .numbers = same.numbers + (size_t)row * groups * KERNELS_GROUP,
                    .scales = same.scales + (size_t)row * groups,
                    .offsets = same.offsets + (size_t)row * groups};
                for (uint32_t panel = 0; panel < kernels_panels(rows);) {
                    uint32_t end = panel + 1 + prng_below(&prng, kernels_panels(rows) - panel);
                    kernels->gemm(&gemm, panel, end);
                    panel = end;
                }
                row += some;
            }
            assert_memory_equal(found, expected, count * stride * sizeof(float));
            quants_free(&same);
            free(found);
        }
        quants_free(&quants);
        free(source);
        free(packed.data);
        free(x);
        free(expected);
        free(weight);
    }
}

static void test_a_backend_is_chosen_by_name_and_an_unknown_one_is_refused(void **state) {
    (void)state;
    assert_string_equal(kernels_select("c")->name, "c");
    assert_null(kernels_select("avx1024"));
    assert_null(kernels_select(""));
    assert_non_null(kernels_select(NULL));
    const struct kernels *best = kernels_select("amx");
    best = best != NULL ? best : kernels_select("avx512bf16");
    best = best != NULL ? best : kernels_select("avx512");
    best = best != NULL ? best : kernels_select("avx2");
    assert_ptr_equal(kernels_select(NULL), best != NULL ? best : kernels_select("c"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_product_of_any_shape_is_within_the_rounding_bound),
        cmocka_unit_test(test_a_product_row_has_the_same_bits_in_every_batch_and_panel_range),
        cmocka_unit_test(test_bf16_products_of_rounded_rows_have_the_order_that_they_promise),
        cmocka_unit_test(test_a_row_has_the_same_bits_alone_where_numbers_vanish),
        cmocka_unit_test(test_rows_are_rounded_as_bf16_is_stored),
        cmocka_unit_test(test_row_operations_agree_with_double_arithmetic_at_every_width),
        cmocka_unit_test(test_silu_is_right_over_the_whole_range_and_keeps_nan),
        cmocka_unit_test(test_exponentials_are_within_two_units_and_the_same_everywhere),
        cmocka_unit_test(test_rotary_turns_pairs_of_halves),
        cmocka_unit_test(test_every_16_bit_float_widens_exactly_and_bf16_comes_back),
        cmocka_unit_test(test_attention_of_any_shape_matches_double_softmax_and_reads_no_other_row),
        cmocka_unit_test(test_attention_has_the_same_bits_behind_every_page_map_and_head_range),
        cmocka_unit_test(test_attention_of_neighbours_has_the_bits_of_each_alone),
        cmocka_unit_test(test_attention_over_a_poisoned_row_is_nan),
        cmocka_unit_test(test_backends_of_one_numerics_give_the_same_bits),
        cmocka_unit_test(test_whole_numbers_stand_for_values_within_half_a_step),
        cmocka_unit_test(test_a_group_that_is_not_finite_makes_its_products_nan),
        cmocka_unit_test(test_products_of_whole_numbers_are_exact_and_the_same_everywhere),
        cmocka_unit_test(test_a_backend_is_chosen_by_name_and_an_unknown_one_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
