/* Streams: the transport of sessions over bidirectional gRPC calls.
 *
 * A stream is made by us (EFFECT_STREAM_OPEN) or accepted on the rpc thread; it is freed after the
 * control thread has stepped its last event, EVENT_STREAM_ENDED, which comes from the call's
 * on_closed and is therefore exactly one and the last. Messages are decoded on the rpc thread into
 * the mail's own arena. Nothing waits: a peer that does not read ends the call (16 MiB, 5 s), a
 * peer that sends faster than the core reads ends it too. */
#include "services/node/internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "rpc/rpc.h"
#include "runtime/log.h"
#include "wire/session.h"

#define SESSION_METHOD        "/baton.peer.v1.Sessions/Session"
#define SESSION_QUEUE_MAX     (16u * 1024u * 1024u)
#define SESSION_STALL_MS      5000u
#define SESSION_PENDING_MAX   (64u * 1024u * 1024u)
#define SESSION_ACCEPTED_SOME 256u /* until the core's capacity is known */

void sessions_init(struct shell *shell) {
    CHECK(pthread_mutex_init(&shell->streams_lock, NULL) == 0);
    shell->accepted_max = SESSION_ACCEPTED_SOME;
    shell->next_stream = 1;
}

static struct stream *stream_create(struct shell *shell) {
    struct stream *stream = calloc(1, sizeof *stream);
    CHECK(stream != NULL);
    stream->shell = shell;
    return stream;
}

static void stream_list(struct stream *stream) {
    struct shell *shell = stream->shell;
    pthread_mutex_lock(&shell->streams_lock);
    stream->next = shell->streams;
    if (stream->next != NULL) {
        stream->next->prev = stream;
    }
    shell->streams = stream;
    if (!stream->is_ours) {
        shell->accepted++;
    }
    pthread_mutex_unlock(&shell->streams_lock);
}

static void stream_destroy(struct stream *stream) {
    struct shell *shell = stream->shell;
    pthread_mutex_lock(&shell->streams_lock);
    if (stream->prev != NULL) {
        stream->prev->next = stream->next;
    } else {
        shell->streams = stream->next;
    }
    if (stream->next != NULL) {
        stream->next->prev = stream->prev;
    }
    if (!stream->is_ours) {
        shell->accepted--;
    }
    pthread_mutex_unlock(&shell->streams_lock);
    free(stream);
}

void sessions_fini(struct shell *shell) {
    while (shell->streams != NULL) {
        stream_destroy(shell->streams);
    }
    pthread_mutex_destroy(&shell->streams_lock);
}

/* ---- the table, control thread ------------------------------------------------------------- */

static struct stream **stream_bucket(struct shell *shell, struct stream_id id) {
    return &shell->buckets[(id.v >> 1 ^ (id.v & 1) << 9) % STREAM_BUCKETS];
}

static struct stream *stream_find(struct shell *shell, struct stream_id id) {
    struct stream *stream = *stream_bucket(shell, id);
    while (stream != NULL && stream->id.v != id.v) {
        stream = stream->next_in_bucket;
    }
    return stream;
}

static void stream_add(struct shell *shell, struct stream *stream) {
    struct stream **bucket = stream_bucket(shell, stream->id);
    stream->next_in_bucket = *bucket;
    *bucket = stream;
}

void sessions_before(struct shell *shell, struct shell_mail *mail) {
    if (mail->event.kind == EVENT_STREAM_ACCEPTED) {
        stream_add(shell, mail->stream);
    }
}

void sessions_after(struct shell *shell, struct shell_mail *mail) {
    struct stream *stream = mail->stream;
    if (mail->event.kind != EVENT_STREAM_ENDED || stream == NULL) {
        return;
    }
    struct stream **at = stream_bucket(shell, stream->id);
    while (*at != NULL && *at != stream) {
        at = &(*at)->next_in_bucket;
    }
    CHECK(*at == stream);
    *at = stream->next_in_bucket;
    rpc_channel_close(stream->channel);
    stream_destroy(stream);
    mail->stream = NULL;
}

/* ---- rpc thread ---------------------------------------------------------------------------- */

static struct shell_mail *stream_mail(struct stream *stream, enum event_kind kind) {
    struct shell_mail *mail = shell_mail_take(stream->shell, kind);
    mail->event.stream = stream->id;
    mail->stream = stream;
    return mail;
}

static void on_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    struct shell *shell = ctx;
    (void)incoming;
    pthread_mutex_lock(&shell->streams_lock);
    bool is_full = shell->accepted >= shell->accepted_max;
    pthread_mutex_unlock(&shell->streams_lock);
    if (is_full || atomic_load(&shell->is_stopping)) {
        rpc_call_set_ctx(shell->rpc, call, NULL);
        rpc_call_abort(shell->rpc, call, RPC_CODE_RESOURCE_EXHAUSTED,
                       is_full ? "this worker has as many sessions as it can hold; try another one"
                               : "this worker is leaving; try another one");
        return;
    }
    struct stream *stream = stream_create(shell);
    stream->id.v = shell->next_stream;
    shell->next_stream += 2;
    stream->call = call.v;
    stream_list(stream);
    rpc_call_set_ctx(shell->rpc, call, stream);
    shell_post(shell, stream_mail(stream, EVENT_STREAM_ACCEPTED));
}

static void on_message(void *ctx, struct rpc_call_id call, const uint8_t *data, size_t len) {
    struct stream *stream = ctx;
    if (stream == NULL || stream->is_over_limit) {
        return;
    }
    if (atomic_load_explicit(&stream->pending, memory_order_relaxed) > SESSION_PENDING_MAX) {
        stream->is_over_limit = true;
        LOG_WARN("session ends: its peer sends faster than we read",
                 LOG_U64("stream", stream->id.v), LOG_U64("limit_bytes", SESSION_PENDING_MAX));
        rpc_call_cancel(stream->shell->rpc, call);
        return;
    }
    struct shell_mail *mail = stream_mail(stream, EVENT_STREAM_MAIL);
    enum status status =
        wire_session_decode((struct bytes){data, len}, &mail->arena, &mail->message);
    if (status == STATUS_OK) {
        mail->event.u.mail.message = &mail->message;
    } else {
        LOG_WARN("session ends: bytes that are no message", LOG_U64("stream", stream->id.v),
                 LOG_U64("bytes", len), LOG_STATUS("status", status));
        mail->event.kind = EVENT_STREAM_BAD;
    }
    mail->bytes = len;
    atomic_fetch_add_explicit(&stream->pending, len, memory_order_relaxed);
    shell_post(stream->shell, mail);
}

static void on_half_closed(void *ctx, struct rpc_call_id call) {
    struct stream *stream = ctx;
    if (stream != NULL) {
        rpc_call_finish(stream->shell->rpc, call, RPC_CODE_OK, NULL, NULL, 0);
    }
}

static const char *end_name(enum rpc_end end) {
    switch (end) {
    case RPC_END_STATUS: return "status";
    case RPC_END_CANCELLED: return "cancelled";
    case RPC_END_PEER: return "peer";
    case RPC_END_DEADLINE: return "deadline";
    case RPC_END_OVERFLOW: return "overflow";
    case RPC_END_STALLED: return "stalled";
    case RPC_END_SHUTDOWN: return "shutdown";
    }
    return "unknown";
}

static void on_closed(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome) {
    struct stream *stream = ctx;
    (void)call;
    if (stream == NULL) {
        return;
    }
    if (stream->is_ours && outcome->end == RPC_END_STATUS && outcome->code != RPC_CODE_OK) {
        LOG_INFO("stream ended", LOG_U64("stream", stream->id.v),
                 LOG_TEXT("address", stream->address),
                 LOG_TEXT("code", rpc_code_name(outcome->code)), LOG_TEXT("why", outcome->message));
    } else {
        LOG_DEBUG("stream ended", LOG_U64("stream", stream->id.v),
                  LOG_TEXT("end", end_name(outcome->end)),
                  LOG_TEXT("code", rpc_code_name(outcome->code)));
    }
    struct shell_mail *mail = stream_mail(stream, EVENT_STREAM_ENDED);
    mail->event.u.stream_end.cause = CAUSE_SESSION_ENDED;
    shell_post(stream->shell, mail);
}

const struct rpc_handlers sessions_handlers = {
    .on_open = on_open,
    .on_message = on_message,
    .on_half_closed = on_half_closed,
    .on_closed = on_closed,
};

/* ---- effects, control thread --------------------------------------------------------------- */

void sessions_open(struct shell *shell, const struct effect *effect) {
    struct stream *stream = stream_create(shell);
    stream->id = effect->stream;
    stream->is_ours = true;
    text_copy(stream->address, sizeof stream->address, effect->u.open.address);
    stream_list(stream);
    stream_add(shell, stream);
    struct rpc_error error = {.text = ""};
    struct rpc_call_id call = {0};
    enum status status = rpc_channel_open(shell->rpc, effect->u.open.address, NULL,
                                          &(struct rpc_channel_options){.own_connection = true},
                                          &stream->channel, &error);
    if (status == STATUS_OK) {
        struct rpc_call_config config = {.method = SESSION_METHOD,
                                         .kind = RPC_KIND_BIDI,
                                         .deadline = INSTANT_NEVER,
                                         .handlers = &sessions_handlers,
                                         .ctx = stream,
                                         .queue_bytes_max = SESSION_QUEUE_MAX,
                                         .stall_ms = SESSION_STALL_MS};
        status = rpc_call_start(stream->channel, &config, &call);
    }
    if (status == STATUS_OK) {
        stream->call = call.v;
        return;
    }
    LOG_WARN("session not opened", LOG_TEXT("address", stream->address),
             LOG_STATUS("status", status), LOG_TEXT("why", error.text));
    struct shell_mail *mail = stream_mail(stream, EVENT_STREAM_ENDED);
    mail->event.u.stream_end.cause = CAUSE_SESSION_ENDED;
    shell_post(shell, mail);
}

void sessions_send(struct shell *shell, const struct effect *effect) {
    struct stream *stream = stream_find(shell, effect->stream);
    if (stream == NULL || stream->call == 0) {
        return;
    }
    enum status status = wire_session_encode(&effect->u.message, &shell->out);
    if (status != STATUS_OK) {
        LOG_ERROR("message not sent, its session ends", LOG_U64("stream", stream->id.v),
                  LOG_TEXT("message", message_name(effect->u.message.kind)),
                  LOG_STATUS("status", status));
        rpc_call_cancel(shell->rpc, (struct rpc_call_id){stream->call});
        return;
    }
    rpc_call_send(shell->rpc, (struct rpc_call_id){stream->call}, shell->out.data, shell->out.len);
}

static enum rpc_code close_code(enum cause cause) {
    if (cause == CAUSE_BUSY) {
        return RPC_CODE_RESOURCE_EXHAUSTED;
    }
    if (cause == CAUSE_MISMATCH) {
        return RPC_CODE_FAILED_PRECONDITION;
    }
    if (cause == CAUSE_SESSION_ERROR) {
        return RPC_CODE_INVALID_ARGUMENT;
    }
    return cause == CAUSE_SESSION_REPLACED ? RPC_CODE_ABORTED : RPC_CODE_UNAVAILABLE;
}

void sessions_close(struct shell *shell, const struct effect *effect) {
    struct stream *stream = stream_find(shell, effect->stream);
    if (stream == NULL || stream->call == 0) {
        return;
    }
    enum cause cause = effect->u.close.cause;
    struct rpc_call_id call = {stream->call};
    if (stream->is_ours || cause == CAUSE_SESSION_SILENT) {
        rpc_call_cancel(shell->rpc, call);
    } else {
        rpc_call_abort(shell->rpc, call, close_code(cause), cause_name(cause));
    }
}
