#include "kvlink/copysum.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <xxhash.h>

#include "base/prng.h"

#define LEN_MAX  (256u * 1024u + 77u)
#define GUARD    64u
#define ROWS_MAX 4096u

struct buffers {
    uint8_t *whole; /* LEN_MAX + 2 * GUARD + 64 and more */
    uint8_t *other;
};

static void fill(struct prng *prng, uint8_t *to, size_t len) {
    for (size_t i = 0; i < len; i++) {
        to[i] = (uint8_t)prng_next(prng);
    }
}

static struct buffers make_buffers(struct prng *prng) {
    struct buffers made = {aligned_alloc(64, LEN_MAX / 64 * 64 + 512),
                           aligned_alloc(64, LEN_MAX / 64 * 64 + 512)};
    assert_non_null(made.whole);
    assert_non_null(made.other);
    fill(prng, made.whole, LEN_MAX / 64 * 64 + 512);
    fill(prng, made.other, LEN_MAX / 64 * 64 + 512);
    return made;
}

static void free_buffers(struct buffers *buffers) {
    free(buffers->whole);
    free(buffers->other);
}

/* Rows, copied or only summed. Sums, copied bytes and the bytes around them must be right. */
static void check_one(struct prng *prng, struct buffers *buffers, size_t row_bytes, size_t rows,
                      enum copysum_cpu cpu, bool is_copied) {
    bool is_aligned = prng_below(prng, 2) == 0;
    uint8_t *from = buffers->whole + GUARD + (is_aligned ? 0 : prng_below(prng, 64));
    uint8_t *to = buffers->other + GUARD + (is_aligned ? 0 : prng_below(prng, 64));
    size_t len = row_bytes * rows;
    fill(prng, from, len < 4096 ? len : 4096);
    fill(prng, to, len < 4096 ? len : 4096);
    static uint8_t before[GUARD + LEN_MAX + GUARD];
    memcpy(before, to - GUARD, GUARD + len + GUARD);
    static uint64_t sums[ROWS_MAX + 1];
    sums[rows] = 77;
    copysum_rows(cpu, is_copied ? to : NULL, from, row_bytes, rows, sums);
    copysum_flush();
    assert_memory_equal(to, is_copied ? from : before + GUARD, len);
    assert_memory_equal(to - GUARD, before, GUARD);
    assert_memory_equal(to + len, before + GUARD + len, GUARD);
    for (size_t r = 0; r < rows; r++) {
        assert_int_equal(sums[r], XXH3_64bits(from + r * row_bytes, row_bytes));
    }
    assert_int_equal(sums[rows], 77);
}

static void test_every_short_row_has_the_sum_of_the_library(void **state) {
    (void)state;
    struct prng prng = {.state = 1};
    struct buffers buffers = make_buffers(&prng);
    for (int cpu = COPYSUM_CPU_PLAIN; cpu <= (int)copysum_best(); cpu++) {
        for (size_t len = 1; len <= 2200; len++) {
            check_one(&prng, &buffers, len, 1 + len % 3, (enum copysum_cpu)cpu, len % 2 == 0);
        }
    }
    free_buffers(&buffers);
}

static void test_random_rows_have_the_sums_of_the_library(void **state) {
    (void)state;
    struct prng prng = {.state = 2};
    struct buffers buffers = make_buffers(&prng);
    for (int cpu = COPYSUM_CPU_PLAIN; cpu <= (int)copysum_best(); cpu++) {
        for (int i = 0; i < 3000; i++) {
            size_t most = i % 10 == 0 ? LEN_MAX - 64 : i % 10 < 6 ? 3000 : 20000;
            size_t len = 1 + prng_below(&prng, (uint32_t)most);
            len = i % 4 == 0 ? (len + 63) / 64 * 64 : len;
            size_t rows_most = LEN_MAX / len < ROWS_MAX ? LEN_MAX / len : ROWS_MAX;
            rows_most = i % 50 == 0 || rows_most < 8 ? rows_most : 8;
            size_t rows = 1 + prng_below(&prng, (uint32_t)rows_most);
            check_one(&prng, &buffers, len, rows, (enum copysum_cpu)cpu, i % 3 != 0);
        }
    }
    free_buffers(&buffers);
}

static void test_a_flipped_bit_changes_its_rows_sum_and_no_other(void **state) {
    (void)state;
    struct prng prng = {.state = 3};
    struct buffers buffers = make_buffers(&prng);
    for (int i = 0; i < 2000; i++) {
        size_t len = 1 + prng_below(&prng, 4000);
        uint64_t clean[4];
        copysum_rows(copysum_best(), buffers.other, buffers.whole, len, 4, clean);
        uint32_t row = prng_below(&prng, 4);
        buffers.whole[row * len + prng_below(&prng, (uint32_t)len)] ^=
            (uint8_t)(1u << prng_below(&prng, 8));
        uint64_t damaged[4];
        copysum_rows(copysum_best(), buffers.other, buffers.whole, len, 4, damaged);
        for (uint32_t r = 0; r < 4; r++) {
            assert_true((clean[r] == damaged[r]) == (r != row));
        }
    }
    copysum_flush();
    free_buffers(&buffers);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_short_row_has_the_sum_of_the_library),
        cmocka_unit_test(test_random_rows_have_the_sums_of_the_library),
        cmocka_unit_test(test_a_flipped_bit_changes_its_rows_sum_and_no_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
