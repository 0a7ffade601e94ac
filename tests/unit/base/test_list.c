#include "base/list.h"

#include "base/prng.h"
#include "unit.h"

#define ENTRIES 24

struct entry {
    uint64_t before; /* so that the link is not at offset 0 */
    struct link link;
};

static void push(struct list *list, struct entry *entries, uint32_t index) {
    list_push_back(list, &entries[0].link, sizeof(struct entry), index);
}
static void drop(struct list *list, struct entry *entries, uint32_t index) {
    list_remove(list, &entries[0].link, sizeof(struct entry), index);
}

static void assert_holds(const struct list *list, struct entry *entries, const uint32_t *wanted,
                         uint32_t count) {
    assert_int_equal(list->count, count);
    uint32_t at = list->head;
    uint32_t before = LIST_NONE;
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(at, wanted[i]);
        assert_true(entries[at].link.is_linked);
        assert_int_equal(entries[at].link.prev, before);
        before = at;
        at = entries[at].link.next;
    }
    assert_int_equal(at, LIST_NONE);
    assert_int_equal(list->tail, before);
}

static void test_push_keeps_order_and_remove_closes_the_gap(void **state) {
    (void)state;
    struct entry entries[4] = {0};
    struct list list;
    list_init(&list);
    assert_holds(&list, entries, NULL, 0);
    for (uint32_t i = 0; i < 4; i++) {
        push(&list, entries, 3 - i);
    }
    assert_holds(&list, entries, (uint32_t[]){3, 2, 1, 0}, 4);
    drop(&list, entries, 1);
    assert_holds(&list, entries, (uint32_t[]){3, 2, 0}, 3);
    drop(&list, entries, 3);
    drop(&list, entries, 0);
    assert_holds(&list, entries, (uint32_t[]){2}, 1);
    drop(&list, entries, 2);
    assert_holds(&list, entries, NULL, 0);
}

static void test_removing_an_unlinked_entry_does_nothing(void **state) {
    (void)state;
    struct entry entries[2] = {0};
    struct list list;
    list_init(&list);
    push(&list, entries, 0);
    drop(&list, entries, 1);
    assert_holds(&list, entries, (uint32_t[]){0}, 1);
}

static void test_pushing_a_linked_entry_is_a_check(void **state) {
    (void)state;
    struct entry entries[1] = {0};
    struct list list;
    list_init(&list);
    push(&list, entries, 0);
    assert_aborts(push(&list, entries, 0));
}

static void test_random_use_agrees_with_a_naive_model(void **state) {
    (void)state;
    struct entry entries[ENTRIES] = {0};
    struct list list;
    list_init(&list);
    uint32_t model[ENTRIES];
    uint32_t count = 0;
    struct prng prng = {3};
    for (uint32_t step = 0; step < 200000; step++) {
        uint32_t index = prng_below(&prng, ENTRIES);
        uint32_t at = 0;
        while (at < count && model[at] != index) {
            at++;
        }
        if (at == count) { /* behind any of those that are there, or in front */
            uint32_t place = prng_below(&prng, count + 1);
            list_insert(&list, &entries[0].link, sizeof(struct entry), index,
                        place == 0 ? LIST_NONE : model[place - 1]);
            memmove(&model[place + 1], &model[place], (count - place) * sizeof model[0]);
            model[place] = index;
            count++;
        } else {
            drop(&list, entries, index);
            memmove(&model[at], &model[at + 1], (count - at - 1) * sizeof model[0]);
            count--;
        }
        assert_holds(&list, entries, model, count);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_push_keeps_order_and_remove_closes_the_gap),
        cmocka_unit_test(test_removing_an_unlinked_entry_does_nothing),
        cmocka_unit_test(test_pushing_a_linked_entry_is_a_check),
        cmocka_unit_test(test_random_use_agrees_with_a_naive_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
