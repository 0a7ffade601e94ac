#include "wire/chunk.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/prng.h"

static const struct chunk_header sample = {
    .slot = 0x0a0b0c0d01020304ull,
    .key = 0x1112131415161718ull,
    .token_first = 0x21222324,
    .token_count = 0x31323334,
    .component_first = 0x4142,
    .component_count = 0x5152,
    .bytes = 0x00036364,
    .sum = 0x7172737475767778ull,
};

static void test_the_bytes_are_those_of_the_protocol(void **state) {
    (void)state;
    static const uint8_t golden[CHUNK_HEADER_BYTES] = {
        0x42, 0x4b, 2,    1,    0x04, 0x03, 0x02, 0x01, 0x0d, 0x0c, 0x0b, 0x0a,
        0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, 0x24, 0x23, 0x22, 0x21,
        0x34, 0x33, 0x32, 0x31, 0x42, 0x41, 0x52, 0x51, 0x64, 0x63, 0x03, 0x00,
        0,    0,    0,    0,    0x78, 0x77, 0x76, 0x75, 0x74, 0x73, 0x72, 0x71};
    uint8_t bytes[CHUNK_HEADER_BYTES];
    memset(bytes, 0xff, sizeof(bytes));
    chunk_encode(&sample, bytes);
    assert_memory_equal(bytes, golden, sizeof(golden));
    struct chunk_header back;
    assert_int_equal(chunk_decode(bytes, sizeof(bytes), &back), STATUS_OK);
    assert_true(back.slot == sample.slot && back.key == sample.key && back.sum == sample.sum);
    assert_true(back.token_first == sample.token_first && back.token_count == sample.token_count);
    assert_true(back.component_first == sample.component_first &&
                back.component_count == sample.component_count && back.bytes == sample.bytes);
    memset(bytes + CHUNK_SUM_OFFSET, 0, sizeof(sample.sum));
    chunk_set_sum(bytes, sample.sum);
    assert_memory_equal(bytes, golden, sizeof(golden));
}

static void test_each_damage_has_its_own_answer(void **state) {
    (void)state;
    static const struct {
        size_t at;
        uint8_t value;
        enum status status;
    } cases[] = {
        {0, 0x43, STATUS_CORRUPT},  {1, 0x42, STATUS_CORRUPT}, {2, 1, STATUS_UNSUPPORTED},
        {3, 0, STATUS_UNSUPPORTED}, {36, 1, STATUS_INVALID},   {39, 0x80, STATUS_INVALID},
        {34, 0x04, STATUS_INVALID}, /* larger than a chunk may be */
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint8_t bytes[CHUNK_HEADER_BYTES];
        chunk_encode(&sample, bytes);
        bytes[cases[i].at] = cases[i].value;
        struct chunk_header out = {.slot = 5};
        assert_int_equal(chunk_decode(bytes, sizeof(bytes), &out), cases[i].status);
        assert_int_equal(out.slot, 5);
    }
    static const size_t zeroed[][2] = {{24, 4}, {30, 2}, {32, 4}}; /* tokens, components, bytes */
    for (size_t i = 0; i < 3; i++) {
        uint8_t bytes[CHUNK_HEADER_BYTES];
        chunk_encode(&sample, bytes);
        memset(bytes + zeroed[i][0], 0, zeroed[i][1]);
        struct chunk_header out;
        assert_int_equal(chunk_decode(bytes, sizeof(bytes), &out), STATUS_INVALID);
    }
}

static void test_every_other_length_is_refused(void **state) {
    (void)state;
    uint8_t bytes[CHUNK_HEADER_BYTES + 8] = {0};
    chunk_encode(&sample, bytes);
    struct chunk_header out;
    assert_int_equal(chunk_decode(NULL, 0, &out), STATUS_CORRUPT);
    for (size_t len = 0; len <= sizeof(bytes); len++) {
        assert_int_equal(chunk_decode(bytes, len, &out),
                         len == CHUNK_HEADER_BYTES ? STATUS_OK : STATUS_CORRUPT);
    }
}

static void test_random_bytes_never_decode_by_luck(void **state) {
    (void)state;
    struct prng prng = {1};
    for (int i = 0; i < 100000; i++) {
        uint8_t bytes[CHUNK_HEADER_BYTES];
        for (size_t at = 0; at < sizeof(bytes); at += 8) {
            uint64_t word = prng_next(&prng);
            memcpy(bytes + at, &word, 8);
        }
        struct chunk_header out;
        assert_int_not_equal(chunk_decode(bytes, sizeof(bytes), &out), STATUS_OK);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_bytes_are_those_of_the_protocol),
        cmocka_unit_test(test_each_damage_has_its_own_answer),
        cmocka_unit_test(test_every_other_length_is_refused),
        cmocka_unit_test(test_random_bytes_never_decode_by_luck),
    };
    return cmocka_run_group_tests_name("kvlink_chunk", tests, NULL, NULL);
}
