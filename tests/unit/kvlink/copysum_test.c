#include "kvlink/copysum.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <xxhash.h>

#include "base/prng.h"

#define LEN_MAX (256u * 1024u + 77u)
#define GUARD   64u

struct buffers {
    uint8_t *whole; /* LEN_MAX + 2 * GUARD + 64 */
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

/* One payload, cut at random: copied out of `whole` (a receiver) or into it (a sender), some pieces
 * only summed. Sum, copied bytes and the bytes around them must be right. */
static void check_one(struct prng *prng, struct buffers *buffers, size_t len, enum copysum_cpu cpu,
                      bool is_sender, bool is_aligned) {
    uint8_t *whole = buffers->whole + GUARD + (is_aligned ? 0 : prng_below(prng, 64));
    uint8_t *other = buffers->other + GUARD + (is_aligned ? 0 : prng_below(prng, 64));
    fill(prng, is_sender ? other : whole, len < 4096 ? len : 4096);
    uint8_t *to = is_sender ? whole : other;
    const uint8_t *from = is_sender ? other : whole;
    uint8_t before[GUARD];
    uint8_t after[GUARD];
    memcpy(before, to - GUARD, GUARD);
    memcpy(after, to + len, GUARD);
    static uint8_t skipped[LEN_MAX];

    struct copysum sum;
    copysum_begin(&sum, whole, len, cpu);
    uint32_t grain = 1u << prng_below(prng, 18); /* from single bytes to all at once */
    while (copysum_taken(&sum) < len) {
        size_t at = copysum_taken(&sum);
        size_t piece = 1 + prng_below(prng, grain);
        if (is_aligned) {
            piece = (piece + 63) / 64 * 64;
        }
        piece = piece < len - at ? piece : len - at;
        if (!is_sender && prng_below(prng, 8) == 0) {
            memcpy(skipped, to + at, piece);
            copysum_take(&sum, NULL, from + at, piece, COPYSUM_TO_NOWHERE,
                         prng_below(prng, 2) == 0 ? NULL : from + at + piece);
            assert_memory_equal(to + at, skipped, piece);
        } else {
            copysum_take(&sum, to + at, from + at, piece,
                         prng_below(prng, 2) == 0 ? COPYSUM_TO_CACHE : COPYSUM_TO_MEMORY, NULL);
            assert_memory_equal(to + at, from + at, piece);
        }
    }
    uint64_t expected = XXH3_64bits(from, len);
    assert_int_equal(copysum_end(&sum), expected);
    assert_memory_equal(to - GUARD, before, GUARD);
    assert_memory_equal(to + len, after, GUARD);
}

static void test_every_short_length_has_the_sum_of_the_library(void **state) {
    (void)state;
    struct prng prng = {.state = 1};
    struct buffers buffers = make_buffers(&prng);
    for (int cpu = COPYSUM_CPU_PLAIN; cpu <= (int)copysum_best(); cpu++) {
        for (size_t len = 1; len <= 2200; len++) {
            check_one(&prng, &buffers, len, (enum copysum_cpu)cpu, len % 2 == 0, len % 3 == 0);
        }
    }
    free_buffers(&buffers);
}

static void test_random_lengths_cuts_and_alignments_have_the_sum_of_the_library(void **state) {
    (void)state;
    struct prng prng = {.state = 2};
    struct buffers buffers = make_buffers(&prng);
    for (int cpu = COPYSUM_CPU_PLAIN; cpu <= (int)copysum_best(); cpu++) {
        for (int i = 0; i < 3000; i++) {
            size_t most = i % 10 == 0 ? LEN_MAX - 64 : 20000;
            size_t len = 1 + prng_below(&prng, (uint32_t)most);
            len = i % 4 == 0 ? (len + 63) / 64 * 64 : len;
            check_one(&prng, &buffers, len, (enum copysum_cpu)cpu, i % 2 == 0, i % 3 == 0);
        }
    }
    free_buffers(&buffers);
}

static void test_a_flipped_bit_changes_the_sum(void **state) {
    (void)state;
    struct prng prng = {.state = 3};
    struct buffers buffers = make_buffers(&prng);
    for (int i = 0; i < 2000; i++) {
        size_t len = 241 + prng_below(&prng, 4000);
        struct copysum sum;
        copysum_begin(&sum, buffers.whole, len, copysum_best());
        copysum_take(&sum, buffers.other, buffers.whole, len, COPYSUM_TO_CACHE, NULL);
        uint64_t clean = copysum_end(&sum);
        buffers.whole[prng_below(&prng, (uint32_t)len)] ^= (uint8_t)(1u << prng_below(&prng, 8));
        copysum_begin(&sum, buffers.whole, len, copysum_best());
        copysum_take(&sum, buffers.other, buffers.whole, len, COPYSUM_TO_CACHE, NULL);
        assert_int_not_equal(copysum_end(&sum), clean);
    }
    free_buffers(&buffers);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_short_length_has_the_sum_of_the_library),
        cmocka_unit_test(test_random_lengths_cuts_and_alignments_have_the_sum_of_the_library),
        cmocka_unit_test(test_a_flipped_bit_changes_the_sum),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
