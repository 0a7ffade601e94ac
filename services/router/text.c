/* The text threads: what takes time in proportion to a text happens here, in order per call. */
#include "services/router/router.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/prng.h"
#include "runtime/clock.h"
#include "runtime/log.h"

#define TEXT_LIMIT_MS  60000 /* one text of 8 MiB, or one tokenizer.json of 64 MiB */
#define TEXT_WAIT_MS   100
#define TEXT_SOON_MS   10 /* while somebody waits for a tokenizer */
#define TEXT_STOP_MS   5000
#define SCRATCH_KEPT   (256u * 1024u) /* ids */
#define OUT_BYTES_KEPT (1024u * 1024u)

struct text_thread *text_thread_of(struct router *router, struct rpc_call_id call) {
    return &router->text[mix64(call.v) % router->text_count];
}

uint32_t *text_scratch(struct text_thread *thread, size_t cap) {
    if (thread->scratch_cap < cap) {
        free(thread->scratch);
        thread->scratch = malloc(cap * sizeof *thread->scratch);
        CHECK(thread->scratch != NULL);
        thread->scratch_cap = cap;
    }
    return thread->scratch;
}

/* One huge request must not keep its memory for ever. */
static void text_trim(struct text_thread *thread) {
    if (thread->scratch_cap > SCRATCH_KEPT) {
        free(thread->scratch);
        thread->scratch = NULL;
        thread->scratch_cap = 0;
    }
    if (thread->out.cap > OUT_BYTES_KEPT) {
        wire_buffer_fini(&thread->out);
    }
}

static void text_main(struct thread *self, void *arg) {
    struct text_thread *thread = arg;
    struct instant looked = clock_now();
    while (!thread_stop_asked(self)) {
        thread_beat(&self->beat);
        int64_t wait = thread->watched != NULL ? TEXT_SOON_MS : TEXT_WAIT_MS;
        if (mailbox_wait(&thread->box, instant_add(looked, span_ms(wait)))) {
            struct mail *chain = mailbox_take_all(&thread->box);
            while (chain != NULL) {
                struct mail *mail = chain;
                chain = mail->next;
                mail->run(mail, thread);
                thread_beat(&self->beat);
            }
            text_trim(thread);
        }
        struct instant now = clock_now();
        if (!instant_reached(now, instant_add(looked, span_ms(wait)))) {
            continue;
        }
        looked = now;
        client_watch(thread, now);
        if (thread->index == 0) {
            models_poke(thread->router, now);
        }
    }
}

enum status text_start(struct router *router) {
    router->text_count = router->settings->text_threads;
    CHECK(router->text_count > 0 && router->text_count <= TEXT_THREADS_MAX);
    for (uint32_t i = 0; i < router->text_count; i++) {
        struct text_thread *thread = &router->text[i];
        thread->router = router;
        thread->index = i;
        mailbox_init(&thread->box, NULL, NULL);
    }
    for (uint32_t i = 0; i < router->text_count; i++) {
        char name[THREAD_NAME_CAP];
        (void)snprintf(name, sizeof name, "text-%u", (unsigned)i); /* fits */
        enum status status = thread_start(
            &router->text[i].thread, &(struct thread_config){.name = name,
                                                             .fn = text_main,
                                                             .arg = &router->text[i],
                                                             .beat_limit = span_ms(TEXT_LIMIT_MS)});
        if (status != STATUS_OK) {
            LOG_ERROR("a text thread cannot be started", LOG_STATUS("status", status));
            return STATUS_INTERNAL;
        }
    }
    return STATUS_OK;
}

enum status text_stop(struct router *router) {
    for (uint32_t i = 0; i < router->text_count; i++) {
        thread_ask_stop(&router->text[i].thread);
    }
    struct instant deadline = instant_add(clock_now(), span_ms(TEXT_STOP_MS));
    for (uint32_t i = 0; i < router->text_count; i++) {
        enum status status = thread_join(&router->text[i].thread, deadline);
        if (status != STATUS_OK) {
            LOG_ERROR("a text thread did not end in time", LOG_U64("thread", i));
            return STATUS_TIMEOUT;
        }
    }
    return STATUS_OK;
}

void text_fini(struct router *router) {
    for (uint32_t i = 0; i < router->text_count; i++) {
        struct text_thread *thread = &router->text[i];
        free(thread->scratch);
        wire_buffer_fini(&thread->out);
        (void)mailbox_close(&thread->box); /* the mail is the clients' own memory */
        mailbox_fini(&thread->box);
    }
}
