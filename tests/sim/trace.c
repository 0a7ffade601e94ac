/* The run for people: one line an event, one line an effect. */
#include "sim/state.h"

/* What a message is about: an attempt or a slot. */
static unsigned long long sim_subject(const struct message *message) {
    switch (message->kind) {
    case MESSAGE_ADMIT: return message->u.admit.attempt.v;
    case MESSAGE_ADMITTED: return message->u.admitted.attempt.v;
    case MESSAGE_REJECTED:
    case MESSAGE_BUSY: return message->u.rejected.attempt.v;
    case MESSAGE_PREFILL: return message->u.prefill.attempt.v;
    case MESSAGE_QUEUED: return message->u.queued.attempt.v;
    case MESSAGE_PREFILL_END: return message->u.prefill_end.attempt.v;
    case MESSAGE_ABORT: return message->u.abort.attempt.v;
    case MESSAGE_END: return message->u.end.attempt.v;
    case MESSAGE_COMMITTED: return message->u.committed.attempt.v;
    case MESSAGE_OPEN: return message->u.open.slot.v;
    case MESSAGE_ACCEPT: return message->u.accept.slot.v;
    case MESSAGE_REFUSE:
    case MESSAGE_ABORT_SLOT: return message->u.refuse.slot.v;
    case MESSAGE_FIN: return message->u.fin.slot.v;
    case MESSAGE_COMMIT: return message->u.commit.slot.v;
    case MESSAGE_AUDIT:
    case MESSAGE_UNKNOWN: return message->u.audit.count > 0 ? message->u.audit.ids[0] : 0;
    case MESSAGE_HELLO: return message->u.hello.session;
    case MESSAGE_CACHED: return message->u.cached.stored_count;
    case MESSAGE_BEAT:
    case MESSAGE_TOKENS: return message->u.tokens.count;
    }
    return 0;
}

static enum cause sim_message_cause(const struct message *message) {
    switch (message->kind) {
    case MESSAGE_REJECTED:
    case MESSAGE_BUSY: return message->u.rejected.cause;
    case MESSAGE_PREFILL_END: return message->u.prefill_end.cause;
    case MESSAGE_ABORT: return message->u.abort.cause;
    case MESSAGE_END: return message->u.end.cause;
    case MESSAGE_REFUSE:
    case MESSAGE_ABORT_SLOT: return message->u.refuse.cause;
    case MESSAGE_ADMIT:
    case MESSAGE_ADMITTED:
    case MESSAGE_PREFILL:
    case MESSAGE_QUEUED:
    case MESSAGE_COMMITTED:
    case MESSAGE_OPEN:
    case MESSAGE_ACCEPT:
    case MESSAGE_FIN:
    case MESSAGE_COMMIT:
    case MESSAGE_AUDIT:
    case MESSAGE_UNKNOWN:
    case MESSAGE_HELLO:
    case MESSAGE_BEAT:
    case MESSAGE_CACHED:
    case MESSAGE_TOKENS: break;
    }
    return CAUSE_NONE;
}

void sim_trace_event(struct world *world, uint32_t process, const struct event *event) {
    if (world->trace == NULL || event->kind == EVENT_TICK ||
        (event->kind == EVENT_STREAM_MAIL && event->u.mail.message->kind == MESSAGE_BEAT)) {
        return;
    }
    const struct process *p = &world->processes[process];
    if (event->kind == EVENT_STREAM_MAIL) {
        const struct message *message = event->u.mail.message;
        enum cause cause = sim_message_cause(message);
        TRACE(world, "%s-%u reads %s %llx on %llu%s%s", role_name(p->role), process,
              message_name(message->kind), sim_subject(message),
              (unsigned long long)event->stream.v, cause != CAUSE_NONE ? ": " : "",
              cause != CAUSE_NONE ? cause_name(cause) : "");
    } else {
        TRACE(world, "%s-%u %s on %llu", role_name(p->role), process, event_name(event->kind),
              (unsigned long long)event->stream.v);
    }
}

void sim_trace_effects(struct world *world) {
    for (uint32_t i = 0; i < world->effects.count && world->trace != NULL; i++) {
        const struct effect *effect = &world->effects.items[i];
        bool is_mail = effect->kind == EFFECT_STREAM_SEND;
        if (effect->kind == EFFECT_NOTE) {
            TRACE(world, "    note %d %s %s", effect->u.note.kind, effect->u.note.label,
                  cause_name(effect->u.note.cause));
        } else if (is_mail && effect->u.message.kind != MESSAGE_BEAT) {
            enum cause cause = sim_message_cause(&effect->u.message);
            TRACE(world, "    -> %s %llx on %llu%s%s", message_name(effect->u.message.kind),
                  sim_subject(&effect->u.message), (unsigned long long)effect->stream.v,
                  cause != CAUSE_NONE ? ": " : "", cause != CAUSE_NONE ? cause_name(cause) : "");
        } else if (!is_mail && effect->kind != EFFECT_ANSWER) {
            TRACE(world, "    -> %s", effect_name(effect->kind));
        }
    }
}
