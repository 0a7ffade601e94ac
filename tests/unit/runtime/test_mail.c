#include "runtime/mail.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#include "runtime/clock.h"
#include "unit.h"

#define POSTERS    4
#define PER_POSTER 5000

struct letter {
    struct mail mail;
    uint32_t poster;
    uint32_t number;
};

static void count_wake(void *ctx) {
    (void)atomic_fetch_add((_Atomic uint32_t *)ctx, 1);
}

static void test_mail_comes_out_in_the_order_of_posting(void **state) {
    (void)state;
    struct mailbox box;
    mailbox_init(&box, NULL, NULL);
    struct letter letters[5] = {0};
    for (uint32_t i = 0; i < 5; i++) {
        letters[i].number = i;
        assert_true(mailbox_post(&box, &letters[i].mail));
    }
    struct mailbox_counts counts = mailbox_counts(&box);
    assert_int_equal(counts.depth, 5);
    uint32_t seen = 0;
    for (struct mail *at = mailbox_take_all(&box); at != NULL; at = at->next) {
        assert_int_equal(((struct letter *)(void *)at)->number, seen++);
    }
    assert_int_equal(seen, 5);
    assert_null(mailbox_take_all(&box));
    counts = mailbox_counts(&box);
    assert_int_equal(counts.depth, 0);
    assert_int_equal(counts.depth_max, 5);
    assert_int_equal(counts.posted, 5);
    mailbox_fini(&box);
}

static void test_wake_is_called_only_for_the_first_mail_since_a_take(void **state) {
    (void)state;
    _Atomic uint32_t wakes = 0;
    struct mailbox box;
    mailbox_init(&box, count_wake, &wakes);
    struct letter letters[4] = {0};
    assert_true(mailbox_post(&box, &letters[0].mail));
    assert_true(mailbox_post(&box, &letters[1].mail));
    assert_int_equal(wakes, 1);
    assert_non_null(mailbox_take_all(&box));
    assert_true(mailbox_post(&box, &letters[2].mail));
    assert_int_equal(wakes, 2);
    assert_ptr_equal(mailbox_close(&box), &letters[2].mail);
    mailbox_fini(&box);
}

static void test_closed_box_refuses_and_returns_what_was_left(void **state) {
    (void)state;
    struct mailbox box;
    mailbox_init(&box, NULL, NULL);
    struct letter letters[3] = {0};
    assert_true(mailbox_post(&box, &letters[0].mail));
    assert_true(mailbox_post(&box, &letters[1].mail));
    struct mail *left = mailbox_close(&box);
    assert_ptr_equal(left, &letters[0].mail);
    assert_ptr_equal(left->next, &letters[1].mail);
    assert_null(left->next->next);
    assert_false(mailbox_post(&box, &letters[2].mail));
    assert_null(mailbox_close(&box));
    assert_null(mailbox_take_all(&box));
    assert_true(mailbox_wait(&box, INSTANT_NEVER)); /* closed counts as news */
    mailbox_fini(&box);
}

static void test_wait_ends_at_the_deadline(void **state) {
    (void)state;
    struct mailbox box;
    mailbox_init(&box, NULL, NULL);
    struct instant deadline = instant_add(clock_now(), span_ms(20));
    assert_false(mailbox_wait(&box, deadline));
    assert_true(instant_reached(clock_now(), deadline));
    assert_false(mailbox_wait(&box, (struct instant){0})); /* long past */
    mailbox_fini(&box);
}

struct posting {
    struct mailbox *box;
    struct letter *letters;
    uint32_t poster;
    uint32_t refused;
};

static void *post_all(void *arg) {
    struct posting *posting = arg;
    for (uint32_t i = 0; i < PER_POSTER; i++) {
        posting->letters[i].poster = posting->poster;
        posting->letters[i].number = i;
        if (!mailbox_post(posting->box, &posting->letters[i].mail)) {
            posting->refused++;
        }
    }
    return NULL;
}

static void test_many_posters_lose_nothing_and_keep_each_ones_order(void **state) {
    (void)state;
    struct mailbox box;
    mailbox_init(&box, NULL, NULL);
    pthread_t threads[POSTERS];
    struct posting postings[POSTERS];
    for (uint32_t i = 0; i < POSTERS; i++) {
        postings[i] = (struct posting){&box, calloc(PER_POSTER, sizeof(struct letter)), i, 0};
        assert_int_equal(pthread_create(&threads[i], NULL, post_all, &postings[i]), 0);
    }
    uint32_t next[POSTERS] = {0};
    uint32_t seen = 0;
    while (seen < POSTERS * PER_POSTER) {
        assert_true(mailbox_wait(&box, instant_add(clock_now(), span_ms(30000))));
        for (struct mail *at = mailbox_take_all(&box); at != NULL; at = at->next) {
            struct letter *letter = (struct letter *)(void *)at;
            assert_int_equal(letter->number, next[letter->poster]++);
            seen++;
        }
    }
    for (uint32_t i = 0; i < POSTERS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(postings[i].refused, 0);
        free(postings[i].letters);
    }
    assert_null(mailbox_close(&box));
    mailbox_fini(&box);
}

static void test_close_under_fire_accounts_for_every_mail(void **state) {
    (void)state;
    _Atomic uint32_t wakes = 0;
    struct mailbox box;
    mailbox_init(&box, count_wake, &wakes);
    pthread_t threads[POSTERS];
    struct posting postings[POSTERS];
    for (uint32_t i = 0; i < POSTERS; i++) {
        postings[i] = (struct posting){&box, calloc(PER_POSTER, sizeof(struct letter)), i, 0};
        assert_int_equal(pthread_create(&threads[i], NULL, post_all, &postings[i]), 0);
    }
    uint32_t taken = 0;
    while (taken < PER_POSTER / 2) {
        for (struct mail *at = mailbox_take_all(&box); at != NULL; at = at->next) {
            taken++;
        }
    }
    for (struct mail *at = mailbox_close(&box); at != NULL; at = at->next) {
        taken++;
    }
    uint32_t wakes_at_close = atomic_load(&wakes);
    uint32_t refused = 0;
    for (uint32_t i = 0; i < POSTERS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        refused += postings[i].refused;
        free(postings[i].letters);
    }
    assert_int_equal(taken + refused, POSTERS * PER_POSTER);
    assert_int_equal(atomic_load(&wakes), wakes_at_close); /* none after close returned */
    mailbox_fini(&box);
}

struct slow_wake {
    struct mailbox box;
    struct letter letter;
    atomic_bool is_begun;
    atomic_bool is_done;
};

static void wake_slowly(void *ctx) {
    struct slow_wake *slow = ctx;
    atomic_store(&slow->is_begun, true);
    (void)poll(NULL, 0, 50); /* a close that did not wait would return now */
    atomic_store(&slow->is_done, true);
}

static void *post_one(void *arg) {
    struct slow_wake *slow = arg;
    assert_true(mailbox_post(&slow->box, &slow->letter.mail));
    return NULL;
}

static void test_close_returns_only_after_a_wake_that_runs(void **state) {
    (void)state;
    struct slow_wake slow = {.is_begun = false};
    mailbox_init(&slow.box, wake_slowly, &slow);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, post_one, &slow), 0);
    while (!atomic_load(&slow.is_begun)) {
        (void)poll(NULL, 0, 1);
    }
    assert_ptr_equal(mailbox_close(&slow.box), &slow.letter.mail);
    assert_true(atomic_load(&slow.is_done));
    assert_int_equal(pthread_join(thread, NULL), 0);
    mailbox_fini(&slow.box);
}

struct memo {
    struct mail mail;
    struct mailbox *back_to;
    uint32_t runs;
};

static void run_memo(struct mail *mail, void *ctx) {
    struct memo *memo = (struct memo *)(void *)mail;
    (*(uint32_t *)ctx)++;
    if (memo->runs++ == 0 && memo->back_to != NULL) {
        assert_true(mailbox_post(memo->back_to, mail));
    }
}

static void test_run_all_lets_a_mail_post_itself_again(void **state) {
    (void)state;
    struct mailbox box;
    mailbox_init(&box, NULL, NULL);
    struct memo memos[2] = {{.mail.run = run_memo, .back_to = &box}, {.mail.run = run_memo}};
    assert_true(mailbox_post(&box, &memos[0].mail));
    assert_true(mailbox_post(&box, &memos[1].mail));
    uint32_t runs = 0;
    assert_int_equal(mail_run_all(mailbox_take_all(&box), &runs), 2);
    assert_int_equal(mail_run_all(mailbox_take_all(&box), &runs), 1);
    assert_int_equal(mail_run_all(mailbox_take_all(&box), &runs), 0);
    assert_int_equal(runs, 3);
    assert_int_equal(memos[0].runs, 2);
    mailbox_fini(&box);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mail_comes_out_in_the_order_of_posting),
        cmocka_unit_test(test_wake_is_called_only_for_the_first_mail_since_a_take),
        cmocka_unit_test(test_closed_box_refuses_and_returns_what_was_left),
        cmocka_unit_test(test_wait_ends_at_the_deadline),
        cmocka_unit_test(test_many_posters_lose_nothing_and_keep_each_ones_order),
        cmocka_unit_test(test_close_under_fire_accounts_for_every_mail),
        cmocka_unit_test(test_close_returns_only_after_a_wake_that_runs),
        cmocka_unit_test(test_run_all_lets_a_mail_post_itself_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
