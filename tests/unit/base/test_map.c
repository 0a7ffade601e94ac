#include "base/map.h"

#include "base/prng.h"
#include "unit.h"

static uint32_t count_under(const struct map *map, uint64_t hash, uint32_t value, bool *has_value) {
    uint32_t cursor = 0;
    uint32_t count = 0;
    *has_value = false;
    for (uint32_t at = map_next(map, hash, &cursor); at != UINT32_MAX;
         at = map_next(map, hash, &cursor)) {
        *has_value = *has_value || at == value;
        count++;
    }
    assert_int_equal(map_next(map, hash, &cursor), UINT32_MAX); /* the end stays the end */
    return count;
}

static void test_entries_with_one_hash_are_all_found(void **state) {
    (void)state;
    void *memory = exact(map_bytes(8));
    struct map map;
    map_init(&map, 8, memory);
    for (uint32_t i = 0; i < 8; i++) {
        map_add(&map, 7, 100 + i);
    }
    for (uint32_t i = 0; i < 8; i++) {
        bool has_value = false;
        assert_int_equal(count_under(&map, 7, 100 + i, &has_value), 8);
        assert_true(has_value);
    }
    bool has_value = false;
    assert_int_equal(count_under(&map, 8, 100, &has_value), 0);
    free(memory);
}

static void test_removing_takes_exactly_one_pair(void **state) {
    (void)state;
    void *memory = exact(map_bytes(4));
    struct map map;
    map_init(&map, 4, memory);
    map_add(&map, 1, 10);
    map_add(&map, 1, 11);
    map_add(&map, 2, 10);
    assert_false(map_remove(&map, 2, 11));
    assert_true(map_remove(&map, 1, 10));
    assert_false(map_remove(&map, 1, 10));
    bool has_value = false;
    assert_int_equal(count_under(&map, 1, 11, &has_value), 1);
    assert_true(has_value);
    assert_int_equal(count_under(&map, 2, 10, &has_value), 1);
    assert_int_equal(map.count, 2);
    free(memory);
}

static void test_going_past_the_limit_is_a_check(void **state) {
    (void)state;
    void *memory = exact(map_bytes(1));
    struct map map;
    map_init(&map, 1, memory);
    map_add(&map, 1, 1);
    assert_aborts(map_add(&map, 2, 2));
    assert_true(map_remove(&map, 1, 1));
    assert_aborts(map_add(&map, 1, UINT32_MAX));
    free(memory);
}

#define LIMIT  50
#define HASHES 20 /* few, so that equal hashes and long runs are common */

/* Few hashes in a full table make runs that wrap around its end: the hard case of backward shift.
 */
static void test_random_use_agrees_with_a_naive_model(void **state) {
    (void)state;
    void *memory = exact(map_bytes(LIMIT));
    struct map map;
    map_init(&map, LIMIT, memory);
    struct {
        uint64_t hash;
        uint32_t value;
    } pairs[LIMIT];
    uint32_t count = 0;
    struct prng prng = {2};
    for (uint32_t step = 0; step < 40000; step++) {
        uint64_t hash = prng_below(&prng, HASHES);
        uint32_t value = prng_below(&prng, 30);
        if (step % 3 == 0) {
            hash = prng_next(&prng);
        }
        if (count < LIMIT && prng_below(&prng, 100) < 55) {
            map_add(&map, hash, value);
            pairs[count].hash = hash;
            pairs[count].value = value;
            count++;
        } else if (count > 0) {
            uint32_t victim = prng_below(&prng, count);
            assert_true(map_remove(&map, pairs[victim].hash, pairs[victim].value));
            pairs[victim] = pairs[--count];
        }
        assert_int_equal(map.count, count);
        for (uint32_t i = 0; i < count; i++) {
            uint32_t same_hash = 0;
            for (uint32_t j = 0; j < count; j++) {
                same_hash += pairs[j].hash == pairs[i].hash ? 1 : 0;
            }
            bool has_value = false;
            assert_int_equal(count_under(&map, pairs[i].hash, pairs[i].value, &has_value),
                             same_hash);
            assert_true(has_value);
        }
    }
    free(memory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_entries_with_one_hash_are_all_found),
        cmocka_unit_test(test_removing_takes_exactly_one_pair),
        cmocka_unit_test(test_going_past_the_limit_is_a_check),
        cmocka_unit_test(test_random_use_agrees_with_a_naive_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
