/* Mailbox: many threads post, one thread takes. The only way in which threads share work.
 *
 * Mail is intrusive and owned by whoever holds it: posting hands it over, taking receives it. FIFO
 * per poster and over all posters. Nothing is allocated and the length is not bounded here (the
 * senders' tables bound it). The wake function runs on the posting thread, after the lock was left,
 * only when an empty box got its first mail since the last take; it must not block and must not
 * post to the same box (write an eventfd, signal a worker, arm an alarm). The lock is a leaf. */
#ifndef RUNTIME_MAIL_H
#define RUNTIME_MAIL_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/time.h"

/* First member of what is posted (or find the outer struct by offset). `run` is for consumers that
 * use mail_run_all; others may leave it NULL and tell mail apart by a kind of their own. */
struct mail {
    struct mail
        *next; /* the mailbox's while posted; then the chain that was taken, NULL at its end */
    void (*run)(struct mail *mail, void *ctx);
};

typedef void (*mailbox_wake)(void *ctx);

struct mailbox_counts {
    uint64_t posted;    /* accepted posts since init */
    uint32_t depth;     /* mail in the box now */
    uint32_t depth_max; /* largest depth since init */
};

struct mailbox {
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t changed;
    struct mail *head;
    struct mail *tail;
    struct mailbox_counts counts;
    uint32_t waking; /* wake calls in flight; close waits for them */
    bool is_closed;
    mailbox_wake wake;
    void *wake_ctx;
};

/* wake: NULL if the consumer uses mailbox_wait. */
void mailbox_init(struct mailbox *box, mailbox_wake wake, void *wake_ctx);
/* The box must be empty, and nobody may post any more. */
void mailbox_fini(struct mailbox *box);
/* Hands the mail over. False when the box is closed: the mail stays the caller's. Any thread. */
MUST_USE bool mailbox_post(struct mailbox *box, struct mail *mail);
/* Everything in the box as a chain, oldest first; NULL if empty. Never blocks. */
struct mail *mailbox_take_all(struct mailbox *box);
/* Blocks until there is mail, the box is closed (both: true), or the deadline (false). Consumer
 * only. */
bool mailbox_wait(struct mailbox *box, struct instant deadline);
/* Refuses all further mail and returns what was left, oldest first. After it returned no wake call
 * runs or will run. Call it holding no lock; a second call returns NULL. */
struct mail *mailbox_close(struct mailbox *box);
struct mailbox_counts mailbox_counts(struct mailbox *box);

/* Runs each mail of a chain with `ctx`, oldest first; `run` may free or post its mail again.
 * Returns how many. CHECKs that every mail has a `run`. */
uint32_t mail_run_all(struct mail *chain, void *ctx);

#endif
