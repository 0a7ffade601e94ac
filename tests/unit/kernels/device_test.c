/* Every operation of a device library against the C oracle and double arithmetic, and against
 * itself in other batches and page maps, bit for bit. Runs over the emulated device everywhere, and
 * over the real one where there is one: device_test LIBRARY [NCCL]; 77 without a device. */
#include "kernels/device.h"

#include "base/prng.h"
#include "engine/accelerator.h"
#include "kernels/kernels.h"
#include "support/cuda/control.h"
#include "unit/kernels/drawn.h"

#include <dlfcn.h>
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

#define UNIT    0x1p-24 /* half a unit in the last place of 1.0f */
#define WAIT_MS 60000
#define GUARD   77.0f
#define SKIPPED 77

static struct accelerator *accelerator;
static const struct device_table *table;
static struct device *device;
static const struct kernels *oracle;
static struct emulation_control *control; /* NULL on a real device */
static const char *nccl;                  /* NULL: the system's */

/* ---- memory ---- */

static void *device_take(size_t bytes) {
    void *memory = table->alloc(device, bytes);
    assert_non_null(memory);
    return memory;
}
static void *up(const void *from, size_t bytes) {
    void *memory = device_take(bytes);
    assert_int_equal(accelerator_load(accelerator, memory, from, bytes), STATUS_OK);
    return memory;
}
static void settle(void) {
    table->mark(device, DEVICE_COMPUTE, 1);
    if (accelerator_wait(accelerator, 1, span_ms(WAIT_MS)) != STATUS_OK) {
        fail_msg("%s", table->failure(device));
    }
}
static void down(void *to, const void *from, size_t bytes) {
    void *pinned = table->host_alloc(device, bytes);
    assert_non_null(pinned);
    table->download(device, pinned, from, bytes);
    settle();
    memcpy(to, pinned, bytes);
    table->host_release(device, pinned);
}
static float *guards(size_t count) {
    float *values = take((count + 1) * sizeof(float));
    for (size_t i = 0; i < count; i++) {
        values[i] = GUARD;
    }
    return values;
}

static bool same_bits(const float *a, const float *b, size_t count) {
    return memcmp(a, b, count * sizeof(float)) == 0;
}

/* ---- products ---- */

struct matrix {
    struct device_matrix device;
    double *plain;
    struct kernels_weights packed; /* I8 only: the same for the oracle */
};

/* Room for `count` rounded rows. */
static struct kernels_quants quants_take(size_t count, uint32_t cols) {
    size_t groups = count * kernels_groups(cols);
    return (struct kernels_quants){.numbers = take(groups * KERNELS_GROUP),
                                   .scales = take(groups * sizeof(float)),
                                   .offsets = take(groups * sizeof(int32_t))};
}
static void quants_free(struct kernels_quants *quants) {
    free(quants->numbers);
    free(quants->scales);
    free(quants->offsets);
}

/* One row of I8 as the device has it; to[cols]: as it counts in products. */
static void row_make_i8(struct kernels_weights *packed, uint32_t row, unsigned char *to,
                        float *values) {
    uint32_t groups = kernels_groups(packed->cols);
    struct kernels_quants quants = quants_take(1, packed->cols);
    kernels_weights_pack(packed, row, values, KERNELS_F32, 1);
    oracle->quantize(&quants, 0, values, packed->cols);
    memcpy(to, quants.numbers, (size_t)groups * KERNELS_GROUP);
    memcpy(to + (size_t)groups * KERNELS_GROUP, quants.scales, groups * sizeof(float));
    kernels_weights_row(packed, row, values);
    quants_free(&quants);
}

static struct matrix matrix_make(struct prng *prng, enum kernels_dtype dtype, uint32_t rows,
                                 uint32_t cols) {
    struct matrix m = {.device = {.dtype = dtype, .rows = rows, .cols = cols},
                       .plain = take((size_t)rows * cols * sizeof(double)),
                       .packed = {.dtype = dtype, .rows = rows, .cols = cols}};
    if (dtype == KERNELS_I8) {
        m.packed.data = take(kernels_weights_bytes(dtype, rows, cols));
    }
    size_t bytes = device_matrix_bytes(dtype, rows, cols);
    unsigned char *host = take(bytes);
    for (uint32_t row = 0; row < rows; row++) {
        unsigned char *to = host + (size_t)row * device_row_bytes(dtype, cols);
        float *values = draw_many(prng, cols);
        switch (dtype) {
        case KERNELS_F32: memcpy(to, values, cols * sizeof(float)); break;
        case KERNELS_BF16:
            oracle->store(to, KERNELS_BF16, values, cols);
            oracle->widen(values, to, KERNELS_BF16, cols);
            break;
        case KERNELS_I8: row_make_i8(&m.packed, row, to, values); break;
        case KERNELS_F16: fail_msg("no device has F16"); break;
        }
        for (uint32_t k = 0; k < cols; k++) {
            m.plain[(size_t)row * cols + k] = (double)values[k];
        }
        free(values);
    }
    m.device.data = up(host, bytes);
    free(host);
    char why[DEVICE_TEXT];
    if (table->prepare(device, dtype, rows, cols, WAIT_MS, why, sizeof(why)) != 0) {
        fail_msg("%s", why);
    }
    return m;
}
static void matrix_free(struct matrix *m) {
    table->release(device, m->device.data);
    free(m->plain);
    free(m->packed.data);
}

static const enum kernels_dtype weights_dtypes[] = {KERNELS_F32, KERNELS_BF16, KERNELS_I8};
static const enum kernels_dtype dtypes[] = {KERNELS_F32, KERNELS_BF16};

/* One rounding more than the CPU's bound: BF16 weights take x in three parts, added at the end. */
static void test_a_product_of_any_shape_is_within_the_rounding_bound(void **state) {
    (void)state;
    static const uint32_t counts[] = {0, 1, 63, 64, 65, 130};
    static const struct {
        uint32_t rows;
        uint32_t cols;
    } shapes[] = {{1, 1}, {15, 2}, {17, 255}, {130, 600}};
    struct prng prng = {1};
    for (size_t s = 0; s < 2 * sizeof(shapes) / sizeof(shapes[0]); s++) {
        uint32_t rows = shapes[s / 2].rows;
        uint32_t cols = shapes[s / 2].cols;
        struct matrix m = matrix_make(&prng, dtypes[s % 2], rows, cols);
        size_t x_stride = cols + 3;
        size_t y_stride = rows + 5;
        for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
            uint32_t count = counts[c];
            float *x = draw_many(&prng, count * x_stride);
            float *y = guards((count + 1) * y_stride);
            float *x_there = up(x, (count * x_stride + 1) * sizeof(float));
            float *y_there = up(y, (count + 1) * y_stride * sizeof(float));
            table->product(device, &m.device, x_there, x_stride, y_there, y_stride, count);
            down(y, y_there, (count + 1) * y_stride * sizeof(float));
            for (uint32_t i = 0; i <= count; i++) {
                for (uint32_t j = 0; j < y_stride; j++) {
                    float found = y[i * y_stride + j];
                    if (i == count || j >= rows) {
                        assert_true(found == GUARD); /* nothing past the rows */
                        continue;
                    }
                    double exact = 0;
                    double size = 0;
                    for (uint32_t k = 0; k < cols; k++) {
                        double term = (double)x[i * x_stride + k] * m.plain[(size_t)j * cols + k];
                        exact += term;
                        size += fabs(term);
                    }
                    double bound = UNIT * (4 + 2 * sqrt(cols)) * size;
                    if (!(fabs((double)found - exact) <= bound)) {
                        fail_msg("type %d, %u rows, [%u, %u] at (%u, %u): error %g, bound %g",
                                 (int)dtypes[s % 2], count, rows, cols, i, j,
                                 fabs((double)found - exact), bound);
                    }
                }
            }
            table->release(device, x_there);
            table->release(device, y_there);
            free(x);
            free(y);
        }
        matrix_free(&m);
    }
}

static void test_a_product_row_has_the_same_bits_in_every_batch(void **state) {
    (void)state;
    struct prng prng = {2};
    for (size_t d = 0; d < sizeof(weights_dtypes) / sizeof(weights_dtypes[0]); d++) {
        uint32_t rows = 70;
        uint32_t cols = 333;
        uint32_t count = 150;
        struct matrix m = matrix_make(&prng, weights_dtypes[d], rows, cols);
        float *x = draw_many(&prng, (size_t)count * cols);
        float *whole = take((size_t)count * rows * sizeof(float));
        float *part = take((size_t)count * rows * sizeof(float));
        float *x_there = up(x, (size_t)count * cols * sizeof(float));
        float *y_there = device_take((size_t)count * rows * sizeof(float));
        table->product(device, &m.device, x_there, cols, y_there, rows, count);
        down(whole, y_there, (size_t)count * rows * sizeof(float));
        for (uint32_t row = 0; row < count;) {
            uint32_t some = 1 + prng_below(&prng, count - row < 90 ? count - row : 90);
            table->product(device, &m.device, x_there + (size_t)row * cols, cols, y_there, rows,
                           some);
            down(part, y_there, (size_t)some * rows * sizeof(float));
            assert_true(same_bits(part, whole + (size_t)row * rows, (size_t)some * rows));
            row += some;
        }
        table->release(device, x_there);
        table->release(device, y_there);
        free(x);
        free(whole);
        free(part);
        matrix_free(&m);
    }
}

/* Rows of every kind: of other sizes, of zeros, too small for a scale, with groups that are not
 * finite, with values half-way between two numbers. */
static float *rows_of_every_kind(struct prng *prng, uint32_t count, size_t stride) {
    float *x = draw_many(prng, count * stride);
    for (uint32_t n = 0; n < count; n++) {
        float *row = x + n * stride;
        for (size_t i = 0; i < stride; i++) {
            switch (n % 8) {
            case 1: row[i] *= 1e6f; break;
            case 3: row[i] = i < stride / 2 ? 0.0f : row[i]; break;
            case 4: row[i] *= 1e-33f; break;
            case 6: row[i] = i % KERNELS_GROUP == 0 ? 127.0f : rintf(row[i] * 250) / 2; break;
            }
        }
    }
    if (count > 13) {
        x[5 * stride] = INFINITY;
        x[13 * stride + stride / 2] = NAN;
    }
    return x;
}

/* The oracle's product of all rows: a row does not depend on its neighbours. */
static float *oracle_product_i8(const struct matrix *m, const float *x, size_t x_stride,
                                uint32_t count) {
    uint32_t panels = kernels_panels(m->packed.rows);
    size_t y_stride = (size_t)panels * KERNELS_PANEL;
    struct kernels_quants quants = quants_take(count, m->packed.cols);
    for (uint32_t n = 0; n < count; n++) {
        oracle->quantize(&quants, n, x + n * x_stride, m->packed.cols);
    }
    float *y = take(count * y_stride * sizeof(float));
    struct kernels_gemm gemm = {
        .weights = &m->packed, .y = y, .y_stride = y_stride, .count = count, .quants = quants};
    oracle->gemm(&gemm, 0, panels);
    quants_free(&quants);
    return y;
}

/* NaN has other bits on other machines; what it says is that it is one. */
static bool same_value(float a, float b) {
    return same_bits(&a, &b, 1) || (isnan(a) && isnan(b));
}

/* The first `count` rows of x at once; x_there, wanted: on the device, by the oracle. */
static void check_product_i8(const struct matrix *m, const float *x_there, size_t x_stride,
                             uint32_t count, const float *wanted) {
    uint32_t rows = m->device.rows;
    size_t y_stride = rows + 3;
    size_t wanted_stride = (size_t)kernels_panels(rows) * KERNELS_PANEL;
    float *y = guards((count + 1) * y_stride);
    float *y_there = up(y, (count + 1) * y_stride * sizeof(float));
    table->product(device, &m->device, x_there, x_stride, y_there, y_stride, count);
    down(y, y_there, (count + 1) * y_stride * sizeof(float));
    for (uint32_t n = 0; n <= count; n++) {
        for (uint32_t j = 0; j < y_stride; j++) {
            bool is_result = n < count && j < rows;
            float expected = is_result ? wanted[n * wanted_stride + j] : GUARD;
            if (!same_value(y[n * y_stride + j], expected)) {
                fail_msg("%u rows, [%u, %u] at (%u, %u): %a, not %a", count, rows, m->device.cols,
                         n, j, (double)y[n * y_stride + j], (double)expected);
            }
        }
    }
    table->release(device, y_there);
    free(y);
}

static void test_int8_products_have_the_bits_of_the_oracle(void **state) {
    (void)state;
    static const uint32_t counts[] = {0, 1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 130, 300};
    static const struct {
        uint32_t rows;
        uint32_t cols;
    } shapes[] = {{1, 1},    {15, 2},    {17, 63},  {16, 64},   {31, 65},
                  {33, 257}, {130, 600}, {9, 1025}, {20, 4160}, {576, 576}};
    struct prng prng = {9};
    for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++) {
        struct matrix m = matrix_make(&prng, KERNELS_I8, shapes[s].rows, shapes[s].cols);
        uint32_t most = counts[sizeof(counts) / sizeof(counts[0]) - 1];
        size_t x_stride = shapes[s].cols + 3;
        float *x = rows_of_every_kind(&prng, most, x_stride);
        float *wanted = oracle_product_i8(&m, x, x_stride, most);
        float *x_there = up(x, most * x_stride * sizeof(float));
        for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
            check_product_i8(&m, x_there, x_stride, counts[c], wanted);
        }
        table->release(device, x_there);
        free(x);
        free(wanted);
        matrix_free(&m);
    }
}

/* Each count of rows, also more than are rounded at a time. */
static void test_int8_products_of_any_number_of_rows_have_the_bits_of_the_oracle(void **state) {
    (void)state;
    struct prng prng = {10};
    uint32_t most = 1030;
    uint32_t cols = 70;
    struct matrix m = matrix_make(&prng, KERNELS_I8, 19, cols);
    float *x = rows_of_every_kind(&prng, most, cols);
    float *wanted = oracle_product_i8(&m, x, cols, most);
    float *x_there = up(x, (size_t)most * cols * sizeof(float));
    for (uint32_t count = 1; count <= 300; count++) {
        check_product_i8(&m, x_there, cols, count, wanted);
    }
    for (uint32_t count = 511; count <= most; count += 173) {
        check_product_i8(&m, x_there, cols, count, wanted);
    }
    table->release(device, x_there);
    free(x);
    free(wanted);
    matrix_free(&m);
}

/* ---- rows ---- */

static void test_norms_agree_with_double_arithmetic_at_every_width(void **state) {
    (void)state;
    static const uint32_t widths[] = {1, 2, 7, 8, 64, 127, 128, 129, 300, 1100};
    struct prng prng = {3};
    for (size_t w = 0; w < sizeof(widths) / sizeof(widths[0]); w++) {
        uint32_t width = widths[w];
        uint32_t heads = 1 + prng_below(&prng, 3);
        uint32_t count = 3;
        size_t stride = (size_t)heads * width + 2;
        const uint32_t picked[] = {4, 0, 3}; /* of five rows */
        float *x = draw_many(&prng, 5 * stride);
        float *weight = draw_many(&prng, width);
        float *out = guards(count * stride);
        float *x_there = up(x, 5 * stride * sizeof(float));
        float *weight_there = up(weight, width * sizeof(float));
        float *out_there = up(out, count * stride * sizeof(float));
        uint32_t *rows = up(picked, sizeof(picked));
        table->rms_norm(device, out_there, stride, x_there, stride, rows, weight_there, count,
                        heads, width, 1e-5f);
        down(out, out_there, count * stride * sizeof(float));
        for (uint32_t n = 0; n < count; n++) {
            for (uint32_t h = 0; h < heads; h++) {
                const float *from = x + picked[n] * stride + (size_t)h * width;
                double squares = 0;
                for (uint32_t i = 0; i < width; i++) {
                    squares += (double)from[i] * (double)from[i];
                }
                double scale = 1 / sqrt(squares / width + (double)1e-5f);
                for (uint32_t i = 0; i < width; i++) {
                    double exact = (double)from[i] * scale * (double)weight[i];
                    double found = (double)out[n * stride + (size_t)h * width + i];
                    assert_true(fabs(found - exact) <= UNIT * (8 + sqrt(width)) * fabs(exact));
                }
            }
            assert_true(out[n * stride + stride - 1] == GUARD);
        }
        /* In place, rows in their own order: the bits of the same rows. */
        float *again = take(5 * stride * sizeof(float));
        table->rms_norm(device, x_there, stride, x_there, stride, NULL, weight_there, 5, heads,
                        width, 1e-5f);
        down(again, x_there, 5 * stride * sizeof(float));
        for (uint32_t n = 0; n < count; n++) {
            assert_true(
                same_bits(again + picked[n] * stride, out + n * stride, (size_t)heads * width));
        }
        table->rms_norm(device, out_there, stride, x_there, stride, NULL, weight_there, 0, heads,
                        width, 1e-5f); /* empty is legal */
        table->release(device, x_there);
        table->release(device, weight_there);
        table->release(device, out_there);
        table->release(device, rows);
        free(x);
        free(weight);
        free(out);
        free(again);
    }
}

static void test_row_operations_have_the_bits_of_the_oracle(void **state) {
    (void)state;
    static const uint32_t dims[] = {2, 6, 20, 64, 256};
    struct prng prng = {4};
    for (size_t d = 0; d < sizeof(dims) / sizeof(dims[0]); d++) {
        uint32_t dim = dims[d];
        uint32_t heads = 1 + prng_below(&prng, 5);
        uint32_t count = 1 + prng_below(&prng, 6);
        uint32_t width = heads * dim;
        size_t stride = 2 * width + 3;
        size_t bytes = count * stride * sizeof(float);
        float *x = draw_many(&prng, count * stride);
        float *wide = draw_many(&prng, count * stride); /* the whole range of silu */
        for (size_t i = 0; i < count * stride; i++) {
            wide[i] *= 110;
        }
        wide[0] = NAN;
        float *angles = draw_many(&prng, (size_t)count * dim);
        float *found = take(bytes);
        float *x_there = up(x, bytes);
        float *wide_there = up(wide, bytes);
        float *angles_there = up(angles, (size_t)count * dim * sizeof(float));
        struct device_step step = {.count = count,
                                   .cosine = angles_there,
                                   .sine = angles_there + (size_t)count * (dim / 2)};
        /* rotary, then + a row for all, then + rows */
        table->rotary(device, &step, x_there, stride, heads, dim);
        table->add(device, x_there, stride, angles_there, 0, count, dim / 2);
        table->add(device, x_there, stride, x_there + width, stride, count, width);
        down(found, x_there, bytes);
        for (uint32_t n = 0; n < count; n++) {
            float *row = x + n * stride;
            oracle->rotary(row, angles + (size_t)n * (dim / 2),
                           angles + (size_t)(count + n) * (dim / 2), heads, dim);
            oracle->add(row, angles, dim / 2);
            oracle->add(row, row + width, width);
        }
        assert_true(same_bits(found, x, count * stride));
        table->silu_mul(device, wide_there, stride, count, width);
        down(found, wide_there, bytes);
        for (uint32_t n = 0; n < count; n++) {
            oracle->silu_mul(wide + n * stride, wide + n * stride, wide + n * stride + width,
                             width);
        }
        assert_true(isnan(found[0]) && isnan(wide[0]));
        assert_true(same_bits(found + 1, wide + 1, count * stride - 1));
        step.count = 0;
        table->rotary(device, &step, x_there, stride, heads, dim);
        table->add(device, x_there, stride, x_there, stride, 0, width);
        table->silu_mul(device, x_there, stride, 0, width);
        settle();
        table->release(device, x_there);
        table->release(device, wide_there);
        table->release(device, angles_there);
        free(x);
        free(wide);
        free(angles);
        free(found);
    }
}

static void test_embedding_rows_are_gathered_exactly(void **state) {
    (void)state;
    struct prng prng = {5};
    const uint32_t tokens[] = {6, 0, 6, 3};
    for (size_t d = 0; d < sizeof(weights_dtypes) / sizeof(weights_dtypes[0]); d++) {
        struct matrix m = matrix_make(&prng, weights_dtypes[d], 7, 131);
        float x[4 * 131];
        struct device_step step = {.count = 4, .tokens = up(tokens, sizeof(tokens))};
        float *x_there = device_take(sizeof(x));
        table->embed(device, &m.device, &step, x_there);
        down(x, x_there, sizeof(x));
        for (uint32_t n = 0; n < 4; n++) {
            for (uint32_t i = 0; i < 131; i++) {
                assert_true((double)x[n * 131 + i] == m.plain[tokens[n] * 131 + i]);
            }
        }
        table->release(device, x_there);
        table->release(device, (void *)(uintptr_t)step.tokens);
        matrix_free(&m);
    }
}

/* ---- the pool ---- */

#define SEQUENCES 3u

/* Three sequences of some length in a pool of scattered pages; a step of `count` tokens. */
struct pool {
    struct device_kv kv;
    struct device_step step;
    size_t bytes;
    unsigned char *host; /* what the device's pool should hold */
    uint32_t positions[SEQUENCES];
    uint32_t page_first[SEQUENCES];
    uint32_t pages[1024];
    uint32_t page_count;
};

static void pool_make(struct pool *pool, struct prng *prng, enum kernels_dtype dtype,
                      uint32_t kv_heads, uint32_t dim, uint32_t page_tokens, uint32_t length) {
    memset(pool, 0, sizeof(*pool));
    uint32_t of_each = (length + page_tokens - 1) / page_tokens;
    uint32_t row_bytes = kv_heads * dim * kernels_dtype_bytes(dtype);
    uint64_t component = ((uint64_t)page_tokens * row_bytes + 63) / 64 * 64;
    pool->page_count = SEQUENCES * of_each;
    assert_true(pool->page_count <= 1024);
    pool->kv = (struct device_kv){.page_bytes = 64 + 2 * component,
                                  .k_offset = 64,
                                  .v_offset = 64 + component,
                                  .row_bytes = row_bytes,
                                  .page_tokens = page_tokens,
                                  .kv_heads = kv_heads,
                                  .head_dim = dim,
                                  .dtype = dtype};
    pool->bytes = pool->page_count * pool->kv.page_bytes;
    pool->host = take(pool->bytes);
    memset(pool->host, 0xff, pool->bytes); /* NaN: whoever reads too far shows it */
    for (uint32_t i = 0; i < pool->page_count; i++) {
        pool->pages[i] = i;
    }
    for (uint32_t i = pool->page_count; i > 1; i--) {
        uint32_t j = prng_below(prng, i);
        uint32_t swap = pool->pages[i - 1];
        pool->pages[i - 1] = pool->pages[j];
        pool->pages[j] = swap;
    }
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        pool->page_first[s] = s * of_each;
        pool->positions[s] = s == 0 ? length - 1 : prng_below(prng, length);
    }
    pool->kv.base = up(pool->host, pool->bytes);
    pool->step = (struct device_step){.count = SEQUENCES,
                                      .positions = up(pool->positions, sizeof(pool->positions)),
                                      .page_first = up(pool->page_first, sizeof(pool->page_first)),
                                      .pages = up(pool->pages, sizeof(pool->pages))};
}
static void pool_free(struct pool *pool) {
    table->release(device, pool->kv.base);
    table->release(device, (void *)(uintptr_t)pool->step.positions);
    table->release(device, (void *)(uintptr_t)pool->step.page_first);
    table->release(device, (void *)(uintptr_t)pool->step.pages);
    free(pool->host);
}
static unsigned char *pool_row(struct pool *pool, uint32_t sequence, uint32_t position,
                               bool is_value) {
    const struct device_kv *kv = &pool->kv;
    uint32_t page = pool->pages[pool->page_first[sequence] + position / kv->page_tokens];
    return pool->host + page * kv->page_bytes + (is_value ? kv->v_offset : kv->k_offset) +
           (uint64_t)(position % kv->page_tokens) * kv->row_bytes;
}

static void test_rows_are_stored_and_mirrored_where_they_belong_and_nowhere_else(void **state) {
    (void)state;
    struct prng prng = {6};
    for (size_t d = 0; d < 2; d++) {
        struct pool pool;
        pool_make(&pool, &prng, dtypes[d], 3, 26, 5, 17);
        size_t width = 3 * 26;
        size_t stride = 2 * width + 1;
        float *rows = draw_many(&prng, SEQUENCES * stride);
        rows[1] = NAN; /* stays one */
        float *rows_there = up(rows, SEQUENCES * stride * sizeof(float));
        unsigned char *mirror = aligned_alloc(4096, (pool.bytes + 4095) / 4096 * 4096);
        assert_non_null(mirror);
        memcpy(mirror, pool.host, pool.bytes);
        void *view = NULL;
        assert_int_equal(table->host_map(device, mirror, pool.bytes, &view), 0);
        table->store(device, &pool.kv, &pool.step, rows_there, rows_there + width, stride);
        table->mark(device, DEVICE_COMPUTE, 2);
        table->follow(device, DEVICE_COPY, 2);
        table->mirror(device, &pool.kv, &pool.step, view);
        table->mark(device, DEVICE_COPY, 3);
        assert_int_equal(accelerator_wait(accelerator, 3, span_ms(WAIT_MS)), STATUS_OK);
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            for (uint32_t v = 0; v < 2; v++) {
                oracle->store(pool_row(&pool, s, pool.positions[s], v != 0), dtypes[d],
                              rows + s * stride + v * width, width);
            }
        }
        unsigned char *found = take(pool.bytes);
        down(found, pool.kv.base, pool.bytes);
        assert_memory_equal(found, pool.host, pool.bytes);
        assert_memory_equal(mirror, pool.host, pool.bytes);
        table->host_unmap(device, mirror);
        table->release(device, rows_there);
        free(mirror);
        free(found);
        free(rows);
        pool_free(&pool);
    }
}

static void check_attention(struct prng *prng, enum kernels_dtype dtype, uint32_t kv_heads,
                            uint32_t group, uint32_t dim, uint32_t page_tokens, uint32_t length) {
    struct pool pool;
    pool_make(&pool, prng, dtype, kv_heads, dim, page_tokens, length);
    uint32_t heads = kv_heads * group;
    size_t width = (size_t)kv_heads * dim;
    float *row = take(width * sizeof(float));
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        for (uint32_t t = 0; t <= pool.positions[s]; t++) {
            for (uint32_t v = 0; v < 2; v++) {
                for (size_t i = 0; i < width; i++) {
                    row[i] = 3 * draw(prng);
                }
                oracle->store(pool_row(&pool, s, t, v != 0), dtype, row, width);
            }
        }
    }
    assert_int_equal(accelerator_load(accelerator, pool.kv.base, pool.host, pool.bytes), STATUS_OK);
    size_t q_stride = (size_t)heads * dim + 7;
    size_t out_stride = (size_t)heads * dim + 3;
    float *q = draw_many(prng, SEQUENCES * q_stride);
    float *out = guards(SEQUENCES * out_stride);
    float *wanted = guards(SEQUENCES * out_stride);
    float *q_there = up(q, SEQUENCES * q_stride * sizeof(float));
    float *out_there = up(out, SEQUENCES * out_stride * sizeof(float));
    float scale = (float)(1.0 / sqrt(dim));
    table->attention(device, &pool.kv, &pool.step, q_there, q_stride, out_there, out_stride, heads,
                     scale);
    down(out, out_there, SEQUENCES * out_stride * sizeof(float));
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        struct kernels_attention attention = {.q = q + s * q_stride,
                                              .out = wanted + s * out_stride,
                                              .tokens = 1,
                                              .base = pool.host,
                                              .page_bytes = pool.kv.page_bytes,
                                              .k_offset = pool.kv.k_offset,
                                              .v_offset = pool.kv.v_offset,
                                              .row_bytes = pool.kv.row_bytes,
                                              .pages = pool.pages + pool.page_first[s],
                                              .page_tokens = page_tokens,
                                              .length = pool.positions[s] + 1,
                                              .heads = heads,
                                              .kv_heads = kv_heads,
                                              .head_dim = dim,
                                              .kv_dtype = dtype,
                                              .scale = scale};
        oracle->attention(&attention, 0, kv_heads);
    }
    if (!same_bits(out, wanted, SEQUENCES * out_stride)) {
        fail_msg("type %d, %u heads on %u of %u, pages of %u, %u tokens: not the oracle's bits",
                 (int)dtype, heads, kv_heads, dim, page_tokens, length);
    }
    table->release(device, q_there);
    table->release(device, out_there);
    free(q);
    free(out);
    free(wanted);
    free(row);
    pool_free(&pool);
}

static void test_attention_has_the_bits_of_the_oracle(void **state) {
    (void)state;
    static const struct {
        uint32_t kv_heads, group, dim, page_tokens, length;
    } shapes[] = {{1, 1, 2, 1, 1},     {2, 3, 12, 16, 63},   {1, 8, 64, 16, 64},
                  {4, 2, 8, 7, 65},    {2, 1, 128, 64, 129}, {1, 2, 256, 32, 300},
                  {1, 1, 8, 16, 1000}, {1, 2, 258, 16, 70},  {1, 1, 1024, 16, 65}};
    struct prng prng = {7};
    for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++) {
        for (size_t d = 0; d < 2; d++) {
            check_attention(&prng, dtypes[d], shapes[s].kv_heads, shapes[s].group, shapes[s].dim,
                            shapes[s].page_tokens, shapes[s].length);
        }
    }
}

/* Each thread of a block on a thread of its own: a BLOCK_SYNC that is missing gives other bits
 * sooner or later, and a report of the thread sanitizer at once. */
static void test_kernels_with_real_threads_have_the_same_bits(void **state) {
    (void)state;
    if (control == NULL) {
        skip();
    }
    control->uses_threads = 1;
    struct prng prng = {8};
    check_attention(&prng, KERNELS_BF16, 1, 1, 70, 16, 130);
    const float x[] = {0.5f, -1.0f, 2.0f, 0.25f, 3.0f};
    float out[5];
    float wanted[5];
    float *x_there = up(x, sizeof(x));
    float *out_there = device_take(sizeof(out));
    table->rms_norm(device, out_there, 5, x_there, 5, NULL, x_there, 1, 1, 5, 1e-5f);
    down(out, out_there, sizeof(out));
    control->uses_threads = 0;
    table->rms_norm(device, out_there, 5, x_there, 5, NULL, x_there, 1, 1, 5, 1e-5f);
    down(wanted, out_there, sizeof(wanted));
    assert_true(same_bits(out, wanted, 5));
    table->release(device, x_there);
    table->release(device, out_there);
    uint32_t cols = 1100; /* the blocks go round their loops twice */
    struct matrix m = matrix_make(&prng, KERNELS_I8, 10, cols);
    float *rows = rows_of_every_kind(&prng, 20, cols);
    float *products = oracle_product_i8(&m, rows, cols, 20);
    float *rows_there = up(rows, 20 * cols * sizeof(float));
    control->uses_threads = 1;
    check_product_i8(&m, rows_there, cols, 3, products);
    check_product_i8(&m, rows_there, cols, 20, products);
    control->uses_threads = 0;
    table->release(device, rows_there);
    free(rows);
    free(products);
    matrix_free(&m);
}

/* ---- ranks ---- */

static void test_one_rank_joins_sums_and_leaves(void **state) {
    (void)state;
    unsigned char id[DEVICE_RANKS_ID_BYTES];
    char why[DEVICE_TEXT] = "";
    struct device_ranks *ranks = NULL;
    if (table->ranks_id(device, nccl, id, why, sizeof(why)) != 0 ||
        table->ranks_create(device, nccl, id, 0, 1, &ranks, why, sizeof(why)) != 0) {
        fail_msg("%s", why);
    }
    assert_int_equal(table->ranks_wait(ranks, WAIT_MS, why, sizeof(why)), DEVICE_RANKS_OK);
    float values[3] = {1.0f, -2.5f, 3.0f};
    float *there = up(values, sizeof(values));
    enum device_ranks_result result =
        table->all_reduce(ranks, there, KERNELS_F32, 3, why, sizeof(why));
    assert_true(result == DEVICE_RANKS_OK || result == DEVICE_RANKS_PENDING);
    assert_int_equal(table->ranks_wait(ranks, WAIT_MS, why, sizeof(why)), DEVICE_RANKS_OK);
    float found[3];
    down(found, there, sizeof(found));
    assert_true(same_bits(found, values, 3));
    assert_int_equal(table->all_reduce(ranks, there, KERNELS_F16, 3, why, sizeof(why)),
                     DEVICE_RANKS_FAILED);
    table->ranks_destroy(ranks, WAIT_MS);
    table->release(device, there);
}

/* Several ranks in one process; only over the emulated NCCL, since the real one takes one rank a
 * device. */
static void test_ranks_sum_together_and_one_that_never_comes_costs_only_a_limit(void **state) {
    (void)state;
    if (control == NULL) {
        skip();
    }
    unsigned char id[DEVICE_RANKS_ID_BYTES];
    char why[DEVICE_TEXT] = "";
    struct device_ranks *ranks[3];
    float *there[3];
    assert_int_equal(table->ranks_id(device, nccl, id, why, sizeof(why)), 0);
    for (uint32_t i = 0; i < 3; i++) {
        float values[2] = {(float)i + 1, 0.5f};
        there[i] = up(values, sizeof(values));
        assert_int_equal(table->ranks_create(device, nccl, id, i, 3, &ranks[i], why, sizeof(why)),
                         0);
        /* The others are not there yet: the wait ends all the same. */
        assert_int_equal(table->ranks_wait(ranks[i], 1, why, sizeof(why)),
                         i == 2 ? DEVICE_RANKS_OK : DEVICE_RANKS_PENDING);
    }
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(table->all_reduce(ranks[i], there[i], KERNELS_F32, 2, why, sizeof(why)),
                         i == 2 ? DEVICE_RANKS_OK : DEVICE_RANKS_PENDING);
    }
    for (uint32_t i = 0; i < 3; i++) {
        float sum[2];
        assert_int_equal(table->ranks_wait(ranks[i], 0, why, sizeof(why)), DEVICE_RANKS_OK);
        down(sum, there[i], sizeof(sum));
        assert_true(sum[0] == 6.0f && sum[1] == 1.5f);
    }
    /* One leaves in the middle: the others learn of it and give up. */
    assert_int_equal(table->all_reduce(ranks[0], there[0], KERNELS_F32, 2, why, sizeof(why)),
                     DEVICE_RANKS_PENDING);
    table->ranks_abort(ranks[1]);
    assert_int_equal(table->ranks_wait(ranks[0], WAIT_MS, why, sizeof(why)), DEVICE_RANKS_FAILED);
    assert_non_null(strstr(why, "remote process exited"));
    assert_int_equal(table->ranks_wait(ranks[1], WAIT_MS, why, sizeof(why)), DEVICE_RANKS_FAILED);
    assert_non_null(strstr(why, "given up"));
    for (uint32_t i = 0; i < 3; i++) {
        table->ranks_destroy(ranks[i], 0);
        table->release(device, there[i]);
    }
    /* Alone for ever. */
    assert_int_equal(table->ranks_id(device, nccl, id, why, sizeof(why)), 0);
    assert_int_equal(table->ranks_create(device, nccl, id, 0, 2, &ranks[0], why, sizeof(why)), 0);
    assert_int_equal(table->ranks_wait(ranks[0], 20, why, sizeof(why)), DEVICE_RANKS_PENDING);
    table->ranks_destroy(ranks[0], 20);
}

static void test_ranks_are_refused_in_one_sentence(void **state) {
    (void)state;
    unsigned char id[DEVICE_RANKS_ID_BYTES] = {0};
    char why[DEVICE_TEXT] = "";
    struct device_ranks *ranks = NULL;
    assert_int_equal(
        table->ranks_create(device, "/nowhere/libnccl.so", id, 0, 1, &ranks, why, sizeof(why)), -1);
    assert_non_null(strstr(why, "several ranks need NCCL: /nowhere/libnccl.so"));
    assert_int_equal(table->ranks_create(device, "libm.so.6", id, 0, 1, &ranks, why, sizeof(why)),
                     -1);
    assert_non_null(strstr(why, "has no ncclGetErrorString"));
    assert_int_equal(table->ranks_create(device, nccl, id, 2, 2, &ranks, why, sizeof(why)), -1);
    assert_non_null(strstr(why, "rank 2 of 2 does not exist"));
    assert_null(ranks);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        (void)fprintf(stderr, "usage: %s LIBRARY [NCCL]\n", argv[0]);
        return 2;
    }
    nccl = argc > 2 ? argv[2] : NULL;
    oracle = kernels_select("c");
    char text[512];
    struct writer error;
    writer_init(&error, text, sizeof(text));
    if (accelerator_open(argv[1], 0, &error, &accelerator) != STATUS_OK) {
        (void)printf("skipped, nothing was tested: %.*s\n", (int)error.len, text);
        return SKIPPED;
    }
    table = accelerator->table;
    device = accelerator->device;
    void *symbol = dlsym(accelerator->library, "emulation_control");
    emulation_control_fn get = NULL;
    memcpy(&get, &symbol, sizeof(get));
    control = get != NULL ? get() : NULL;
    (void)printf("%s, %s\n", accelerator->info.name, accelerator->info.numerics);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_product_of_any_shape_is_within_the_rounding_bound),
        cmocka_unit_test(test_a_product_row_has_the_same_bits_in_every_batch),
        cmocka_unit_test(test_int8_products_have_the_bits_of_the_oracle),
        cmocka_unit_test(test_int8_products_of_any_number_of_rows_have_the_bits_of_the_oracle),
        cmocka_unit_test(test_norms_agree_with_double_arithmetic_at_every_width),
        cmocka_unit_test(test_row_operations_have_the_bits_of_the_oracle),
        cmocka_unit_test(test_embedding_rows_are_gathered_exactly),
        cmocka_unit_test(test_rows_are_stored_and_mirrored_where_they_belong_and_nowhere_else),
        cmocka_unit_test(test_attention_has_the_bits_of_the_oracle),
        cmocka_unit_test(test_kernels_with_real_threads_have_the_same_bits),
        cmocka_unit_test(test_one_rank_joins_sums_and_leaves),
        cmocka_unit_test(test_ranks_sum_together_and_one_that_never_comes_costs_only_a_limit),
        cmocka_unit_test(test_ranks_are_refused_in_one_sentence),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    accelerator_close(accelerator);
    return failed == 0 ? 0 : 1;
}
