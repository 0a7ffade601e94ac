#include "base/buddy.h"

#include "base/prng.h"
#include "unit.h"

static uint32_t rounded(uint32_t units) {
    uint32_t size = 1;
    while (size < units) {
        size *= 2;
    }
    return size;
}

static void test_the_whole_range_can_be_taken_and_comes_back(void **state) {
    (void)state;
    void *memory = exact(buddy_bytes(64));
    struct buddy buddy;
    buddy_init(&buddy, 64, memory);
    for (int round = 0; round < 3; round++) {
        uint32_t first = 99;
        assert_int_equal(buddy_take(&buddy, 64, &first), STATUS_OK);
        assert_int_equal(first, 0);
        assert_int_equal(buddy.units_free, 0);
        uint32_t other = 99;
        assert_int_equal(buddy_take(&buddy, 1, &other), STATUS_BUSY);
        assert_int_equal(other, 99);
        buddy_free(&buddy, first);
        assert_int_equal(buddy.units_free, 64);
    }
    free(memory);
}

static void test_odd_totals_are_usable_to_the_last_unit(void **state) {
    (void)state;
    for (uint32_t units = 1; units <= 70; units++) {
        void *memory = exact(buddy_bytes(units));
        struct buddy buddy;
        buddy_init(&buddy, units, memory);
        bool *is_taken = exact(units);
        for (uint32_t i = 0; i < units; i++) {
            uint32_t first = 0;
            assert_int_equal(buddy_take(&buddy, 1, &first), STATUS_OK);
            assert_in_range(first, 0, units - 1);
            assert_false(is_taken[first]);
            is_taken[first] = true;
        }
        uint32_t first = 0;
        assert_int_equal(buddy_take(&buddy, 1, &first), STATUS_BUSY);
        for (uint32_t i = 0; i < units; i++) {
            buddy_free(&buddy, i);
        }
        /* All joined again: the largest power of two is there in one piece. */
        assert_int_equal(buddy_take(&buddy, rounded(units + 1) / 2, &first), STATUS_OK);
        free(is_taken);
        free(memory);
    }
}

static void test_more_than_there_is_is_busy(void **state) {
    (void)state;
    void *memory = exact(buddy_bytes(10));
    struct buddy buddy;
    buddy_init(&buddy, 10, memory);
    uint32_t first = 0;
    assert_int_equal(buddy_take(&buddy, 9, &first), STATUS_BUSY); /* rounds up to 16 */
    assert_int_equal(buddy_take(&buddy, UINT32_MAX, &first), STATUS_BUSY);
    assert_int_equal(buddy_take(&buddy, 8, &first), STATUS_OK);
    free(memory);
}

static void test_freeing_what_was_not_taken_is_a_check(void **state) {
    (void)state;
    void *memory = exact(buddy_bytes(8));
    struct buddy buddy;
    buddy_init(&buddy, 8, memory);
    uint32_t first = 0;
    assert_int_equal(buddy_take(&buddy, 4, &first), STATUS_OK);
    assert_aborts(buddy_free(&buddy, first + 1));
    assert_aborts(buddy_free(&buddy, 8));
    buddy_free(&buddy, first);
    assert_aborts(buddy_free(&buddy, first));
    free(memory);
}

#define UNITS 203

/* True if an aligned block of `size` lies wholly in units nobody holds. */
static bool has_room(const uint32_t *owner, uint32_t size) {
    for (uint32_t first = 0; first + size <= UNITS; first += size) {
        bool is_free = true;
        for (uint32_t i = 0; i < size && is_free; i++) {
            is_free = owner[first + i] == 0;
        }
        if (is_free) {
            return true;
        }
    }
    return false;
}

/* The model is one owner per unit. Busy is right exactly if no aligned free block exists, which
 * holds only when freed blocks are always joined. */
static void test_random_use_agrees_with_a_naive_model(void **state) {
    (void)state;
    void *memory = exact(buddy_bytes(UNITS));
    struct buddy buddy;
    buddy_init(&buddy, UNITS, memory);
    uint32_t owner[UNITS] = {0};
    struct {
        uint32_t first;
        uint32_t size;
    } taken[UNITS];
    uint32_t count = 0;
    uint32_t units_free = UNITS;
    struct prng prng = {4};
    for (uint32_t step = 1; step < 100000; step++) {
        if (prng_below(&prng, 100) < 52) {
            uint32_t units = 1 + prng_below(&prng, prng_below(&prng, 8) == 0 ? 100 : 9);
            uint32_t size = rounded(units);
            uint32_t first = 0;
            enum status status = buddy_take(&buddy, units, &first);
            assert_int_equal(status, has_room(owner, size) ? STATUS_OK : STATUS_BUSY);
            if (status != STATUS_OK) {
                continue;
            }
            assert_true(first + size <= UNITS);
            assert_int_equal(first % size, 0);
            for (uint32_t i = 0; i < size; i++) {
                assert_int_equal(owner[first + i], 0);
                owner[first + i] = step;
            }
            taken[count].first = first;
            taken[count].size = size;
            count++;
            units_free -= size;
        } else if (count > 0) {
            uint32_t victim = prng_below(&prng, count);
            buddy_free(&buddy, taken[victim].first);
            memset(&owner[taken[victim].first], 0, taken[victim].size * sizeof owner[0]);
            units_free += taken[victim].size;
            taken[victim] = taken[--count];
        }
        assert_int_equal(buddy.units_free, units_free);
    }
    free(memory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_whole_range_can_be_taken_and_comes_back),
        cmocka_unit_test(test_odd_totals_are_usable_to_the_last_unit),
        cmocka_unit_test(test_more_than_there_is_is_busy),
        cmocka_unit_test(test_freeing_what_was_not_taken_is_a_check),
        cmocka_unit_test(test_random_use_agrees_with_a_naive_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
