#include "base/pool.h"

#include "base/prng.h"
#include "unit.h"

static void test_ids_are_never_zero_and_find_their_index(void **state) {
    (void)state;
    void *memory = exact(pool_bytes(3));
    struct pool pool;
    pool_init(&pool, 3, memory);
    uint64_t ids[3];
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(pool_take(&pool, &ids[i]), STATUS_OK);
        uint32_t index = 99;
        assert_int_not_equal(ids[i], 0);
        assert_true(pool_find(&pool, ids[i], &index));
        assert_int_equal(index, pool_index(ids[i]));
        assert_int_equal(pool_id_at(&pool, index), ids[i]);
    }
    uint64_t none = 77;
    assert_int_equal(pool_take(&pool, &none), STATUS_BUSY);
    assert_int_equal(none, 77);
    free(memory);
}

static void test_stale_zero_and_forged_ids_are_not_found(void **state) {
    (void)state;
    void *memory = exact(pool_bytes(2));
    struct pool pool;
    pool_init(&pool, 2, memory);
    uint64_t id = 0;
    assert_int_equal(pool_take(&pool, &id), STATUS_OK);
    pool_free(&pool, id);
    uint32_t index = 0;
    assert_false(pool_find(&pool, id, &index));
    assert_false(pool_find(&pool, 0, &index));
    assert_false(pool_find(&pool, id + (1ull << 32), &index)); /* the free generation itself */
    assert_false(pool_find(&pool, 1ull << 32 | 2, &index));    /* past the end */
    assert_false(pool_find(&pool, UINT64_MAX, &index));
    assert_int_equal(pool_id_at(&pool, pool_index(id)), 0);
    free(memory);
}

static void test_the_slot_free_longest_is_taken_first(void **state) {
    (void)state;
    void *memory = exact(pool_bytes(3));
    struct pool pool;
    pool_init(&pool, 3, memory);
    uint64_t ids[3];
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(pool_take(&pool, &ids[i]), STATUS_OK);
    }
    static const uint32_t order[] = {1, 2, 0};
    for (uint32_t i = 0; i < 3; i++) {
        pool_free(&pool, ids[order[i]]);
    }
    for (uint32_t i = 0; i < 3; i++) {
        uint64_t id = 0;
        assert_int_equal(pool_take(&pool, &id), STATUS_OK);
        assert_int_equal(pool_index(id), pool_index(ids[order[i]]));
        assert_true(id > ids[order[i]]);
    }
    free(memory);
}

static void test_freeing_twice_is_a_check(void **state) {
    (void)state;
    void *memory = exact(pool_bytes(1));
    struct pool pool;
    pool_init(&pool, 1, memory);
    uint64_t id = 0;
    assert_int_equal(pool_take(&pool, &id), STATUS_OK);
    pool_free(&pool, id);
    assert_aborts(pool_free(&pool, id));
    assert_aborts(pool_free(&pool, 0));
    free(memory);
}

#define CAPACITY 13
#define HISTORY  4096

static void test_random_use_agrees_with_a_naive_model(void **state) {
    (void)state;
    void *memory = exact(pool_bytes(CAPACITY));
    struct pool pool;
    pool_init(&pool, CAPACITY, memory);
    uint64_t live[CAPACITY];
    uint32_t live_count = 0;
    uint64_t dead[HISTORY];
    uint32_t dead_count = 0;
    struct prng prng = {1};
    for (uint32_t step = 0; step < 100000; step++) {
        if (prng_below(&prng, 2) == 0) {
            uint64_t id = 0;
            enum status status = pool_take(&pool, &id);
            assert_int_equal(status, live_count == CAPACITY ? STATUS_BUSY : STATUS_OK);
            if (status == STATUS_OK) {
                for (uint32_t i = 0; i < live_count; i++) {
                    assert_int_not_equal(pool_index(live[i]), pool_index(id));
                }
                live[live_count++] = id;
            }
        } else if (live_count > 0) {
            uint32_t victim = prng_below(&prng, live_count);
            pool_free(&pool, live[victim]);
            dead[dead_count++ % HISTORY] = live[victim];
            live[victim] = live[--live_count];
        }
        assert_int_equal(pool.live, live_count);
        uint32_t seen = 0;
        for (uint32_t i = pool_next(&pool, 0); i != UINT32_MAX; i = pool_next(&pool, i + 1)) {
            assert_int_not_equal(pool_id_at(&pool, i), 0);
            seen++;
        }
        assert_int_equal(seen, live_count);
        uint32_t index = 0;
        for (uint32_t i = 0; i < live_count; i++) {
            assert_true(pool_find(&pool, live[i], &index));
            assert_int_equal(index, pool_index(live[i]));
        }
        if (dead_count > 0) {
            uint32_t known = dead_count < HISTORY ? dead_count : HISTORY;
            assert_false(pool_find(&pool, dead[prng_below(&prng, known)], &index));
        }
    }
    free(memory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ids_are_never_zero_and_find_their_index),
        cmocka_unit_test(test_stale_zero_and_forged_ids_are_not_found),
        cmocka_unit_test(test_the_slot_free_longest_is_taken_first),
        cmocka_unit_test(test_freeing_twice_is_a_check),
        cmocka_unit_test(test_random_use_agrees_with_a_naive_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
