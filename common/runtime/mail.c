#include "runtime/mail.h"

#include <errno.h>
#include <stddef.h>

#include "base/check.h"
#include "runtime/clock.h"

void mailbox_init(struct mailbox *box, mailbox_wake wake, void *wake_ctx) {
    *box = (struct mailbox){.wake = wake, .wake_ctx = wake_ctx};
    CHECK(pthread_mutex_init(&box->lock, NULL) == 0);
    pthread_condattr_t attributes;
    CHECK(pthread_condattr_init(&attributes) == 0);
    CHECK(pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_cond_init(&box->changed, &attributes) == 0);
    CHECK(pthread_condattr_destroy(&attributes) == 0);
}

void mailbox_fini(struct mailbox *box) {
    CHECK(box->head == NULL);
    CHECK_OP(box->waking, ==, 0);
    CHECK(pthread_cond_destroy(&box->changed) == 0);
    CHECK(pthread_mutex_destroy(&box->lock) == 0);
}

static void mailbox_lock(struct mailbox *box) {
    CHECK(pthread_mutex_lock(&box->lock) == 0);
}

static void mailbox_unlock(struct mailbox *box) {
    CHECK(pthread_mutex_unlock(&box->lock) == 0);
}

bool mailbox_post(struct mailbox *box, struct mail *mail) {
    mailbox_lock(box);
    if (box->is_closed) {
        mailbox_unlock(box);
        return false;
    }
    bool was_empty = box->head == NULL;
    mail->next = NULL;
    if (was_empty) {
        box->head = mail;
    } else {
        box->tail->next = mail;
    }
    box->tail = mail;
    box->counts.posted++;
    box->counts.depth++;
    if (box->counts.depth > box->counts.depth_max) {
        box->counts.depth_max = box->counts.depth;
    }
    bool wakes = was_empty && box->wake != NULL;
    if (wakes) {
        box->waking++;
    } else if (was_empty) {
        CHECK(pthread_cond_signal(&box->changed) == 0);
    }
    mailbox_unlock(box);
    if (wakes) {
        box->wake(box->wake_ctx);
        mailbox_lock(box);
        box->waking--;
        if (box->is_closed && box->waking == 0) {
            CHECK(pthread_cond_broadcast(&box->changed) == 0);
        }
        mailbox_unlock(box);
    }
    return true;
}

static struct mail *mailbox_take_locked(struct mailbox *box) {
    struct mail *chain = box->head;
    box->head = NULL;
    box->tail = NULL;
    box->counts.depth = 0;
    return chain;
}

struct mail *mailbox_take_all(struct mailbox *box) {
    mailbox_lock(box);
    struct mail *chain = mailbox_take_locked(box);
    mailbox_unlock(box);
    return chain;
}

bool mailbox_wait(struct mailbox *box, struct instant deadline) {
    struct timespec until = clock_to_timespec(deadline);
    mailbox_lock(box);
    CHECK(box->wake == NULL);
    int rc = 0;
    while (box->head == NULL && !box->is_closed && rc == 0) {
        rc = pthread_cond_timedwait(&box->changed, &box->lock, &until);
        CHECK(rc == 0 || rc == ETIMEDOUT);
    }
    bool has_news = box->head != NULL || box->is_closed;
    mailbox_unlock(box);
    return has_news;
}

struct mail *mailbox_close(struct mailbox *box) {
    mailbox_lock(box);
    box->is_closed = true;
    CHECK(pthread_cond_broadcast(&box->changed) == 0);
    while (box->waking > 0) {
        CHECK(pthread_cond_wait(&box->changed, &box->lock) == 0);
    }
    struct mail *chain = mailbox_take_locked(box);
    mailbox_unlock(box);
    return chain;
}

struct mailbox_counts mailbox_counts(struct mailbox *box) {
    mailbox_lock(box);
    struct mailbox_counts counts = box->counts;
    mailbox_unlock(box);
    return counts;
}

uint32_t mail_run_all(struct mail *chain, void *ctx) {
    uint32_t count = 0;
    while (chain != NULL) {
        struct mail *mail = chain;
        chain = mail->next;
        mail->next = NULL;
        CHECK(mail->run != NULL);
        mail->run(mail, ctx);
        count++;
    }
    return count;
}
