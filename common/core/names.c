/* Names of the core's enums, for logs, metrics and /debug/entries. */
#include "core/effect.h"
#include "core/event.h"
#include "core/message.h"

#include <string.h>

const char *role_name(enum role role) {
    switch (role) {
    case ROLE_NONE: return "none";
    case ROLE_ROUTER: return "router";
    case ROLE_PREFILL: return "prefill";
    case ROLE_DECODE: return "decode";
    }
    return "unknown";
}

const char *message_name(enum message_kind kind) {
    switch (kind) {
    case MESSAGE_HELLO: return "hello";
    case MESSAGE_BEAT: return "beat";
    case MESSAGE_AUDIT: return "audit";
    case MESSAGE_UNKNOWN: return "unknown";
    case MESSAGE_ADMIT: return "admit";
    case MESSAGE_ADMITTED: return "admitted";
    case MESSAGE_REJECTED: return "rejected";
    case MESSAGE_PREFILL: return "prefill";
    case MESSAGE_QUEUED: return "queued";
    case MESSAGE_BUSY: return "busy";
    case MESSAGE_PREFILL_END: return "prefill_end";
    case MESSAGE_OPEN: return "open";
    case MESSAGE_ACCEPT: return "accept";
    case MESSAGE_REFUSE: return "refuse";
    case MESSAGE_FIN: return "fin";
    case MESSAGE_COMMIT: return "commit";
    case MESSAGE_TOKENS: return "tokens";
    case MESSAGE_END: return "end";
    case MESSAGE_ABORT: return "abort";
    case MESSAGE_ABORT_SLOT: return "abort_slot";
    case MESSAGE_COMMITTED: return "committed";
    case MESSAGE_CACHED: return "cached";
    }
    return "unknown";
}

const char *outcome_name(enum outcome outcome) {
    switch (outcome) {
    case OUTCOME_NONE: return "none";
    case OUTCOME_OK: return "ok";
    case OUTCOME_ABORTED: return "aborted";
    case OUTCOME_FAILED: return "failed";
    }
    return "unknown";
}

const char *finish_name(enum finish finish) {
    switch (finish) {
    case FINISH_NONE: return "";
    case FINISH_STOP: return "stop";
    case FINISH_LENGTH: return "length";
    case FINISH_ABORT: return "abort";
    case FINISH_ERROR: return "error";
    }
    return "";
}

const char *cause_name(enum cause cause) {
    switch (cause) {
    case CAUSE_NONE: return "none";
    case CAUSE_DONE: return "done";
    case CAUSE_CLIENT_GONE: return "client_gone";
    case CAUSE_CLIENT_ABORT: return "client_abort";
    case CAUSE_STOP: return "stop";
    case CAUSE_SUPERSEDED: return "superseded";
    case CAUSE_DEADLINE: return "deadline";
    case CAUSE_T_ADMIT: return "t_admit";
    case CAUSE_T_OPEN: return "t_open";
    case CAUSE_STALL: return "stall";
    case CAUSE_QUEUE_TIMEOUT: return "queue_timeout";
    case CAUSE_BUSY: return "busy";
    case CAUSE_TOO_LARGE: return "too_large";
    case CAUSE_DRAINING: return "draining";
    case CAUSE_MISMATCH: return "mismatch";
    case CAUSE_UNKNOWN_SLOT: return "unknown_slot";
    case CAUSE_BAD_KEY: return "bad_key";
    case CAUSE_BAD_CHUNK: return "bad_chunk";
    case CAUSE_SHORT: return "short";
    case CAUSE_PEER_REFUSED: return "peer_refused";
    case CAUSE_PEER_ABORT: return "peer_abort";
    case CAUSE_SEND_FAILED: return "send_failed";
    case CAUSE_STEP_FAILED: return "step_failed";
    case CAUSE_SESSION_ENDED: return "session_ended";
    case CAUSE_SESSION_SILENT: return "session_silent";
    case CAUSE_SESSION_REPLACED: return "session_replaced";
    case CAUSE_SESSION_ERROR: return "session_error";
    case CAUSE_AUDIT: return "audit";
    case CAUSE_RETRIES: return "retries";
    case CAUSE_NO_WORKER: return "no_worker";
    case CAUSE_NO_MODEL: return "no_model";
    case CAUSE_INVALID: return "invalid";
    case CAUSE_SHUTDOWN: return "shutdown";
    case CAUSE_COUNT: break;
    }
    return "unknown";
}

const char *event_name(enum event_kind kind) {
    switch (kind) {
    case EVENT_TICK: return "tick";
    case EVENT_DRAIN: return "drain";
    case EVENT_STREAM_ACCEPTED: return "stream_accepted";
    case EVENT_STREAM_MAIL: return "stream_mail";
    case EVENT_STREAM_BAD: return "stream_bad";
    case EVENT_STREAM_ENDED: return "stream_ended";
    case EVENT_CLIENT_OPEN: return "client_open";
    case EVENT_TOKENIZED: return "tokenized";
    case EVENT_CLIENT_GONE: return "client_gone";
    case EVENT_CLIENT_ABORT: return "client_abort";
    case EVENT_STOP_FOUND: return "stop_found";
    case EVENT_ANSWERED: return "answered";
    case EVENT_WORKER_SEEN: return "worker_seen";
    case EVENT_WORKER_LOST: return "worker_lost";
    case EVENT_LAYER_DONE: return "layer_done";
    case EVENT_STEP_DONE: return "step_done";
    case EVENT_LINK_PROGRESS: return "link_progress";
    case EVENT_LINK_COVERED: return "link_covered";
    case EVENT_LINK_BAD: return "link_bad";
    case EVENT_LINK_DISARMED: return "link_disarmed";
    case EVENT_LINK_SENT: return "link_sent";
    case EVENT_LINK_FAILED: return "link_failed";
    case EVENT_LINK_CLOSED: return "link_closed";
    }
    return "unknown";
}

const char *effect_name(enum effect_kind kind) {
    switch (kind) {
    case EFFECT_STREAM_OPEN: return "stream_open";
    case EFFECT_STREAM_SEND: return "stream_send";
    case EFFECT_STREAM_CLOSE: return "stream_close";
    case EFFECT_TOKENIZE: return "tokenize";
    case EFFECT_DELIVER: return "deliver";
    case EFFECT_CHOICE: return "choice";
    case EFFECT_ANSWER: return "answer";
    case EFFECT_STEP: return "step";
    case EFFECT_STEP_ABANDON: return "step_abandon";
    case EFFECT_LINK_ARM: return "link_arm";
    case EFFECT_LINK_DISARM: return "link_disarm";
    case EFFECT_LINK_CONNECT: return "link_connect";
    case EFFECT_LINK_SEND: return "link_send";
    case EFFECT_LINK_CLOSE: return "link_close";
    case EFFECT_NOTE: return "note";
    case EFFECT_EXIT: return "exit";
    }
    return "unknown";
}

struct effect *effects_add(struct effects *effects, enum effect_kind kind) {
    CHECK_OP(effects->count, <, EFFECTS_MAX);
    struct effect *effect = &effects->items[effects->count++];
    memset(effect, 0, sizeof *effect);
    effect->kind = kind;
    return effect;
}
