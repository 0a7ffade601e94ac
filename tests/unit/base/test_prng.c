#include "base/prng.h"

#include "unit.h"

/* Published first outputs of splitmix64 for seed 1234567: other implementations agree with ours. */
static void test_stream_is_splitmix64(void **state) {
    (void)state;
    static const uint64_t wanted[] = {6457827717110365317ull, 3203168211198807973ull,
                                      9817491932198370423ull, 4593380528125082431ull,
                                      16408922859458223821ull};
    struct prng prng = {1234567};
    for (size_t i = 0; i < 5; i++) {
        assert_true(prng_next(&prng) == wanted[i]);
    }
}

static void test_below_stays_below_and_reaches_all(void **state) {
    (void)state;
    struct prng prng = {6};
    for (uint32_t bound = 1; bound <= 17; bound++) {
        uint32_t seen = 0;
        for (uint32_t i = 0; i < 1000; i++) {
            uint32_t value = prng_below(&prng, bound);
            assert_true(value < bound);
            seen |= 1u << value;
        }
        assert_int_equal(seen, (1u << bound) - 1);
    }
    for (uint32_t i = 0; i < 1000; i++) {
        assert_true(prng_below(&prng, UINT32_MAX) < UINT32_MAX);
    }
}

/* With 64 buckets of 10,000 the chi-square has mean 63 and deviation 11: 130 is six deviations. */
static void assert_is_even(const uint32_t counts[64], uint32_t total) {
    double expected = total / 64.0;
    double chi = 0;
    for (uint32_t i = 0; i < 64; i++) {
        chi += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    assert_true(chi < 130);
}

static void test_counter_based_bits_depend_on_seed_and_position_evenly(void **state) {
    (void)state;
    uint32_t by_position[64] = {0};
    uint32_t by_seed[64] = {0};
    uint32_t low_bits[64] = {0};
    for (uint64_t i = 0; i < 640000; i++) {
        by_position[prng_at(7, i) >> 58]++;
        by_seed[prng_at(i, 7) >> 58]++;
        low_bits[prng_at(i, i) & 63]++;
    }
    assert_is_even(by_position, 640000);
    assert_is_even(by_seed, 640000);
    assert_is_even(low_bits, 640000);
    assert_true(prng_at(1, 2) == prng_at(1, 2));
    assert_true(prng_at(1, 2) != prng_at(2, 1));
    assert_true(prng_at(0, 0) != prng_at(0, 1));
}

/* Changing one bit of the input must change about half of the output's. */
static void test_mix_spreads_every_bit(void **state) {
    (void)state;
    struct prng prng = {8};
    for (uint32_t bit = 0; bit < 64; bit++) {
        uint32_t flipped = 0;
        for (uint32_t i = 0; i < 200; i++) {
            uint64_t x = prng_next(&prng);
            flipped += (uint32_t)__builtin_popcountll(mix64(x) ^ mix64(x ^ 1ull << bit));
        }
        assert_in_range(flipped, 200 * 28, 200 * 36);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stream_is_splitmix64),
        cmocka_unit_test(test_below_stays_below_and_reaches_all),
        cmocka_unit_test(test_counter_based_bits_depend_on_seed_and_position_evenly),
        cmocka_unit_test(test_mix_spreads_every_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
