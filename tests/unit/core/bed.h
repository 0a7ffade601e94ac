/* Helpers of the core's table tests: a core in a known state, one event, and what came of it as one
 * line of text. */
#ifndef TESTS_UNIT_CORE_BED_H
#define TESTS_UNIT_CORE_BED_H

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/decode.h"
#include "core/prefill.h"
#include "core/router.h"

#define BED_SECOND 1000000000ll

/* "message names and effect names, in order": what a step wanted. Beats, audits, news of the
 * prefix index and notes are left out. */
static inline void bed_describe(const struct effects *out, char *text, size_t cap) {
    struct writer writer;
    writer_init(&writer, text, cap - 1);
    for (uint32_t i = 0; i < out->count; i++) {
        const struct effect *effect = &out->items[i];
        if (effect->kind == EFFECT_NOTE ||
            (effect->kind == EFFECT_STREAM_SEND &&
             (effect->u.message.kind == MESSAGE_BEAT || effect->u.message.kind == MESSAGE_AUDIT ||
              effect->u.message.kind == MESSAGE_CACHED))) {
            continue;
        }
        const char *name = effect->kind == EFFECT_STREAM_SEND ? message_name(effect->u.message.kind)
                                                              : effect_name(effect->kind);
        writer_printf(&writer, "%s%s", writer.len > 0 ? " " : "", name);
        if (effect->kind == EFFECT_STREAM_SEND && effect->u.message.kind == MESSAGE_END) {
            writer_printf(&writer, "(%s)", outcome_name(effect->u.message.u.end.outcome));
        }
        if (effect->kind == EFFECT_STREAM_SEND && effect->u.message.kind == MESSAGE_PREFILL_END) {
            writer_printf(&writer, "(%s)", outcome_name(effect->u.message.u.prefill_end.outcome));
        }
        if (effect->kind == EFFECT_CHOICE) {
            writer_printf(&writer, "(%u %s)", effect->u.choice.index,
                          finish_name(effect->u.choice.finish));
        }
        if (effect->kind == EFFECT_ANSWER) {
            writer_printf(&writer, "(%s)", outcome_name(effect->u.answer.outcome));
        }
    }
    text[writer.len] = '\0';
}

/* The first message of a kind among the effects; fails the test if there is none. */
static inline const struct message *bed_sent(const struct effects *out, enum message_kind kind) {
    for (uint32_t i = 0; i < out->count; i++) {
        if (out->items[i].kind == EFFECT_STREAM_SEND && out->items[i].u.message.kind == kind) {
            return &out->items[i].u.message;
        }
    }
    fail_msg("no %s was sent", message_name(kind));
    abort();
}

static inline struct event bed_hello(struct message *message, uint64_t stream, enum role role,
                                     uint64_t incarnation, struct layout_digest layout) {
    *message = (struct message){.kind = MESSAGE_HELLO};
    message->u.hello.incarnation.v = incarnation;
    message->u.hello.session = 1;
    message->u.hello.protocol = PROTOCOL_VERSION;
    message->u.hello.role = role;
    message->u.hello.layout = layout;
    struct event event = {.kind = EVENT_STREAM_MAIL, .stream = {stream}};
    event.u.mail.message = message;
    return event;
}

static inline struct event bed_mail(const struct message *message, uint64_t stream) {
    struct event event = {.kind = EVENT_STREAM_MAIL, .stream = {stream}};
    event.u.mail.message = message;
    return event;
}

static inline void *bed_memory(uint64_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 63) & ~63ull);
    assert_non_null(memory);
    return memory;
}

#endif
