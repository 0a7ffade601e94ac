/* What waits for a client: tokens and logprobs stay in step, whatever is put in and taken out. */
#include "services/router/token_queue.h"

#include "base/prng.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#define TOPS 20u

/* The n-th token that was ever put, and what belongs to it. */
static struct token_item item_of(uint32_t n, bool has_logprobs) {
    static uint32_t tops[TOPS];
    static float logprobs[TOPS];
    struct token_item item = {.token = n * 7, .has_logprobs = has_logprobs};
    if (has_logprobs) {
        item.logprob = -(float)n;
        item.top_count = n % (TOPS + 1);
        for (uint32_t i = 0; i < item.top_count; i++) {
            tops[i] = n + i;
            logprobs[i] = -(float)(n * 32 + i);
        }
        item.top_tokens = tops;
        item.top_logprobs = logprobs;
    }
    return item;
}

static void assert_holds(const struct token_queue *queue, uint32_t first, uint32_t count,
                         bool has_logprobs) {
    assert_int_equal(queue->count, count);
    uint32_t top_at = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct token_item expected = item_of(first + i, has_logprobs);
        struct token_item found = token_queue_at(queue, i, &top_at);
        assert_int_equal(found.token, expected.token);
        assert_int_equal(found.has_logprobs, expected.has_logprobs);
        assert_true(found.logprob == expected.logprob);
        assert_int_equal(found.top_count, expected.top_count);
        if (found.top_count > 0) {
            size_t bytes = found.top_count * sizeof(uint32_t);
            assert_memory_equal(found.top_tokens, expected.top_tokens, bytes);
            assert_memory_equal(found.top_logprobs, expected.top_logprobs, bytes);
        }
    }
    assert_int_equal(top_at, queue->top_count);
}

static void test_any_order_of_puts_and_drops_keeps_each_token_with_its_own(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 40; round++) {
        bool has_logprobs = round % 4 != 0;
        struct token_queue queue = {0};
        struct prng prng = {round};
        uint32_t put = 0;
        uint32_t dropped = 0;
        for (uint32_t i = 0; i < 300; i++) {
            for (uint32_t more = prng_below(&prng, 9); more > 0; more--) {
                struct token_item item = item_of(put++, has_logprobs);
                token_queue_put(&queue, &item);
            }
            uint32_t drop = prng_below(&prng, queue.count + 1);
            token_queue_drop(&queue, drop);
            dropped += drop;
            assert_holds(&queue, dropped, put - dropped, has_logprobs);
        }
        token_queue_fini(&queue);
        assert_int_equal(queue.count, 0);
        assert_null(queue.tokens);
    }
}

static void test_without_logprobs_nothing_is_kept_for_them(void **state) {
    (void)state;
    struct token_queue queue = {0};
    for (uint32_t i = 0; i < 100; i++) {
        struct token_item item = item_of(i, false);
        token_queue_put(&queue, &item);
    }
    assert_null(queue.logprobs);
    assert_null(queue.top_tokens);
    token_queue_fini(&queue);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_order_of_puts_and_drops_keeps_each_token_with_its_own),
        cmocka_unit_test(test_without_logprobs_nothing_is_kept_for_them),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
