#include "base/siphash.h"

#include "unit.h"

/* From the vectors published with the reference implementation: key 00..0f, input 00, 01, 02, ...;
 * the lengths around word borders, the paper's own (15), and the longest. */
static void test_output_equals_the_published_vectors(void **state) {
    (void)state;
    static const struct {
        size_t len;
        const char *hex;
    } vectors[] = {
        {0, "a3817f04ba25a8e66df67214c7550293"},  {1, "da87c1d86b99af44347659119b22fc45"},
        {2, "8177228da4a45dc7fca38bdef60affe4"},  {7, "a1f1ebbed8dbc153c0b84aa61ff08239"},
        {8, "3b62a9ba6258f5610f83e264f31497b4"},  {9, "264499060ad9baabc47f8b02bb6d71ed"},
        {15, "5493e99933b0a8117e08ec0f97cfc3d9"}, {16, "6ee2a4ca67b054bbfd3315bf85230577"},
        {63, "5150d1772f50834a503e069a973fbd7c"},
    };
    struct siphash_key key = {0x0706050403020100ull, 0x0f0e0d0c0b0a0908ull};
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        uint8_t *input = exact(vectors[i].len);
        for (size_t j = 0; j < vectors[i].len; j++) {
            input[j] = (uint8_t)j;
        }
        struct siphash128 hash = siphash128(key, input, vectors[i].len);
        char hex[33];
        for (int j = 0; j < 16; j++) {
            uint64_t word = j < 8 ? hash.low : hash.high;
            (void)snprintf(hex + 2 * j, 3, "%02x", (unsigned)(word >> (8 * (j % 8)) & 0xff));
        }
        assert_string_equal(hex, vectors[i].hex);
        free(input);
    }
}

static void test_every_bit_of_the_key_matters(void **state) {
    (void)state;
    struct siphash128 base = siphash128((struct siphash_key){1, 2}, "abc", 3);
    for (uint32_t bit = 0; bit < 128; bit++) {
        struct siphash_key key = {1, 2};
        if (bit < 64) {
            key.k0 ^= 1ull << bit;
        } else {
            key.k1 ^= 1ull << (bit - 64);
        }
        struct siphash128 hash = siphash128(key, "abc", 3);
        assert_true(hash.low != base.low && hash.high != base.high);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_output_equals_the_published_vectors),
        cmocka_unit_test(test_every_bit_of_the_key_matters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
