#include "base/arena.h"

#include "unit.h"

#if ARENA_GAP_BYTES > 0
int __asan_address_is_poisoned(const volatile void *at);
#endif

static void test_counting_first_gives_exactly_the_size_needed(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 63, 64, 65, 0, 1000};
    struct arena arena;
    arena_init(&arena, NULL, 0);
    for (size_t i = 0; i < 6; i++) {
        assert_null(arena_take(&arena, sizes[i]));
    }
    size_t need = arena.len;
    assert_int_equal(need, 64 + 64 + 64 + 128 + 0 + 1024 + 5 * ARENA_GAP);
    unsigned char *memory = aligned_alloc(64, need);
    assert_non_null(memory);
    memset(memory, 0xff, need);
    arena_init(&arena, memory, need);
    unsigned char *before = memory;
    for (size_t i = 0; i < 6; i++) {
        unsigned char *at = arena_take(&arena, sizes[i]);
        assert_non_null(at);
        assert_int_equal((uintptr_t)at % 64, 0);
        assert_true(at >= before);
        before = at + sizes[i];
        for (size_t j = 0; j < sizes[i]; j++) {
            assert_int_equal(at[j], 0);
        }
        memset(at, 0xee, sizes[i]); /* must not reach the next one */
    }
    assert_int_equal(arena.len, need);
    assert_aborts((void)arena_take(&arena, 1));
    free(memory);
}

static void test_a_request_past_the_end_is_a_check(void **state) {
    (void)state;
    unsigned char *memory = aligned_alloc(64, 128 + ARENA_GAP);
    assert_non_null(memory);
    struct arena arena;
    arena_init(&arena, memory, 128 + ARENA_GAP);
    assert_aborts((void)arena_take(&arena, 129));
    assert_non_null(arena_take(&arena, 65));
    assert_aborts((void)arena_take(&arena, 1));
    free(memory);
}

static void test_unset_memory_is_not_written(void **state) {
    (void)state;
    size_t need = 2 * (128 + ARENA_GAP);
    unsigned char *memory = aligned_alloc(64, need);
    assert_non_null(memory);
    memset(memory, 0xff, need);
    struct arena arena;
    arena_init(&arena, memory, need);
    unsigned char *first = arena_take_unset(&arena, 100);
    unsigned char *second = arena_take(&arena, 100);
    assert_int_equal(second - first, need / 2);
#if ARENA_GAP_BYTES > 0
    assert_true(__asan_address_is_poisoned(first + 100)); /* nobody's, up to the next piece */
    assert_true(__asan_address_is_poisoned(second - 1));
#endif
    for (size_t i = 0; i < 100; i++) {
        assert_int_equal(first[i], 0xff);
        assert_int_equal(second[i], 0);
    }
    free(memory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_counting_first_gives_exactly_the_size_needed),
        cmocka_unit_test(test_a_request_past_the_end_is_a_check),
        cmocka_unit_test(test_unset_memory_is_not_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
