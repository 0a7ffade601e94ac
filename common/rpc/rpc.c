#include "rpc/rpc.h"

#include "base/check.h"
#include "base/pool.h"
#include "rpc/address.h"
#include "runtime/clock.h"
#include "runtime/log.h"
#include "runtime/mail.h"
#include "runtime/thread.h"

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <grpc/support/log.h>
#include <grpc/support/time.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert((int)RPC_CODE_CANCELLED == (int)GRPC_STATUS_CANCELLED, "codes repeat gRPC's");
_Static_assert((int)RPC_CODE_RESOURCE_EXHAUSTED == (int)GRPC_STATUS_RESOURCE_EXHAUSTED, "same");
_Static_assert((int)RPC_CODE_UNAUTHENTICATED == (int)GRPC_STATUS_UNAUTHENTICATED, "same");

enum {
    WAIT_MS = 100,            /* longest wait in the queue: the beat and the stall check go on */
    TURNS_PER_CLOCK = 16,     /* while busy */
    BEAT_EVERY_MS = 10,       /* while busy: a beat is a store, but a shared one */
    SLOTS_PER_METHOD = 8,     /* accept requests kept posted; re-armed in the turn that takes one */
    SLOTS_RESERVE = 2048,     /* table entries beyond calls_max, for slots and refusals */
    METHODS_MAX = 128,        /* per server */
    SERVERS_MAX = 16,         /* per rpc */
    MESSAGE_BYTES_MAX = 1024, /* of a status */
    PAIRS_MAX = 32,           /* metadata pairs in one call or finish */
    CALLS_MAX_DEFAULT = 16384,
    RECEIVE_BYTES_DEFAULT = 16 << 20,
    QUEUE_BYTES_DEFAULT = 1 << 20,
    STALL_MS_DEFAULT = 5000,
    KEEPALIVE_MS_DEFAULT = 5000,
    KEEPALIVE_TIMEOUT_MS_DEFAULT = 3000,
    ARGS_MAX = 24
};

/* ---- types ------------------------------------------------------------------------------ */

enum op_kind {
    OP_ACCEPT,  /* server: the slot was taken */
    OP_CLOSE,   /* server: RECV_CLOSE, in a batch of its own: it always reports success */
    OP_SEND,    /* headers, message, status or half-close: one batch at a time */
    OP_RECEIVE, /* one message */
    OP_HEADERS, /* client: the server's initial metadata */
    OP_STATUS,  /* client: RECV_STATUS, alone for the same reason */
    OP_IN_CALL, /* how many kinds live in a call */
    OP_KICK,    /* an empty batch that wakes the queue */
    OP_DRAINED, /* a server's shutdown is complete */
};

/* What a completion's tag points at. */
struct op {
    enum op_kind kind;
    void *owner; /* struct rpc_call, struct rpc or struct rpc_server */
};

struct rpc_headers {
    const grpc_metadata *pairs;
    size_t len;
};

struct chunk {
    struct chunk *next;
    grpc_slice slice;
};

struct pairs { /* metadata to send: owned */
    grpc_metadata *list;
    size_t len;
};

enum call_state {
    CALL_FREE,
    CALL_ARMED, /* a server's accept slot */
    CALL_OPEN,
    CALL_CLOSING, /* on_closed runs; the id is stale already */
};

struct rpc_call {
    struct mail mail; /* posted when another thread wished something; survives reuse of the entry */
    struct rpc *rpc;
    bool is_mailed;              /* guarded by rpc->lock; survives reuse */
    bool is_dirty;               /* rpc thread; on the turn's list; survives reuse */
    bool is_watched;             /* rpc thread; on the stall list; survives reuse */
    struct rpc_call *dirty_next; /* rpc thread */
    struct rpc_call *watch_next; /* rpc thread */

    /* From here on: zeroed when the entry is taken. Rpc thread, unless it says otherwise. */
    uint64_t id;
    enum call_state state; /* written under rpc->lock */
    bool is_server;
    bool is_silent; /* refused by us: the handlers know nothing of it */
    bool is_started;
    bool is_send_busy;
    bool is_receive_busy;
    bool is_dead; /* nothing can be sent any more */
    bool is_killed;
    bool is_finished_by_kill;
    bool has_headers_out;
    bool has_status_out;
    bool has_half_closed;
    bool has_ended;  /* the close (server) or status (client) tag was seen */
    uint8_t pending; /* started batches whose tag has not come */
    enum rpc_kind kind;
    const struct rpc_handlers *handlers;
    void *ctx;
    struct rpc_server *server;
    uint32_t method; /* index in server->methods, or METHODS_MAX: the generic slot */
    grpc_call *grpc;
    struct op ops[OP_IN_CALL];
    struct instant deadline;
    struct instant sending_since; /* observed time */
    struct span stall;
    size_t sending_bytes;
    bool is_sending_message;
    grpc_byte_buffer *payload; /* client: the request, until the call has started */
    struct pairs headers_out;
    /* out-parameters of batches */
    grpc_metadata_array headers_in;
    grpc_metadata_array trailers_in;
    grpc_call_details details;
    gpr_timespec accept_deadline;
    grpc_byte_buffer *received;
    grpc_status_code status;
    grpc_slice status_details;
    int cancelled;

    /* Wishes: guarded by rpc->lock, carried out by call_pump on the rpc thread. */
    bool is_accepting; /* send, half-close and finish still count */
    struct chunk *queue_head;
    struct chunk *queue_tail;
    size_t queued_bytes; /* in the queue and in flight */
    size_t queue_bytes_max;
    bool wants_half_close;
    bool wants_finish;
    bool wants_kill;
    enum rpc_code finish_code;
    char *finish_message; /* owned; NULL = "" */
    struct pairs trailers_out;
    enum rpc_end kill_end;
    enum rpc_code kill_code;
    char kill_text[256];
};

struct method {
    char *path;
    size_t service_len; /* path + 1, so many bytes */
    enum rpc_kind kind;
    const struct rpc_handlers *handlers;
    void *ctx;
    size_t queue_bytes_max;
    struct span stall;
    void *registered;
    uint32_t armed; /* rpc thread */
};

struct rpc_server {
    struct rpc *rpc;
    struct address address;
    struct rpc_server_options options;
    grpc_server *grpc;
    struct method methods[METHODS_MAX + 1]; /* the last: everything unknown */
    uint32_t methods_len;
    _Atomic uint32_t port;
    atomic_bool is_drain_asked;
    bool is_started;  /* rpc_server_start succeeded; guarded by rpc->lock */
    bool is_armed;    /* rpc thread: the start mail has run */
    bool is_draining; /* rpc thread */
    bool is_drained;  /* guarded by rpc->lock */
    struct mail start_mail;
    struct mail drain_mail;
    struct op drained;
};

struct rpc_channel {
    struct rpc *rpc;
    grpc_channel *grpc;
    struct rpc_channel *next; /* guarded by rpc->lock */
    struct rpc_channel *prev;
};

struct counts {
    _Atomic uint64_t opened, closed, sent, received, dead_on_arrival, refused_full, unknown_methods,
        stalled, overflowed;
};

struct rpc {
    struct thread thread;
    struct mailbox box;
    grpc_completion_queue *queue;
    grpc_channel *lame;
    grpc_call *kicker;
    struct op kick;
    struct mail drain_mail; /* of rpc_shutdown, in this order */
    struct mail cancel_mail;
    struct mail reset_mail;
    struct mail finish_mail;
    struct counts counts;

    pthread_mutex_t lock; /* guards what is below; a leaf except for pool and list functions */
    pthread_cond_t changed;
    struct pool pool;
    void *pool_memory;
    struct rpc_call *calls;
    uint32_t calls_max;
    uint32_t calls_live; /* open, handlers know them */
    uint32_t server_calls_live;
    uint32_t slots_armed;
    struct rpc_server *servers[SERVERS_MAX];
    uint32_t servers_len;
    struct rpc_channel *channels;
    bool is_closing;    /* rpc_call_start is refused */
    bool is_shut_asked; /* this and the next: of the thread that calls rpc_shutdown */
    bool is_shut;       /* rpc_shutdown succeeded */

    /* rpc thread */
    struct rpc_call *dirty;
    struct rpc_call *watched;
    struct clock_observer observer;
    struct instant now; /* observed, at this turn */
    struct instant beaten;
    struct instant checked;
    bool is_slot_missing;
    bool is_finishing;
};

static __thread struct rpc *current_rpc;

static void count(_Atomic uint64_t *counter) {
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

/* For counters that only the rpc thread writes: no locked instruction per message. */
static void count_alone(_Atomic uint64_t *counter) {
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + 1,
                          memory_order_relaxed);
}

bool rpc_on_thread(const struct rpc *rpc) {
    return current_rpc == rpc;
}

static gpr_timespec timespec_from(struct instant at) {
    if (instant_is_never(at)) {
        return gpr_inf_future(GPR_CLOCK_MONOTONIC);
    }
    return (gpr_timespec){.tv_sec = at.ns / 1000000000,
                          .tv_nsec = (int32_t)(at.ns % 1000000000),
                          .clock_type = GPR_CLOCK_MONOTONIC};
}

static struct instant instant_from(gpr_timespec at) {
    at = gpr_convert_clock_type(at, GPR_CLOCK_MONOTONIC);
    if (gpr_time_cmp(at, gpr_inf_future(GPR_CLOCK_MONOTONIC)) == 0 || at.tv_sec > INT32_MAX) {
        return INSTANT_NEVER;
    }
    return (struct instant){at.tv_sec * 1000000000 + at.tv_nsec};
}

/* ---- metadata --------------------------------------------------------------------------- */

static bool pair_is_legal(const struct rpc_pair *pair) {
    return pair->key != NULL && pair->value != NULL &&
           grpc_header_key_is_legal(grpc_slice_from_static_string(pair->key)) &&
           !grpc_is_binary_header(grpc_slice_from_static_string(pair->key)) &&
           grpc_header_nonbin_value_is_legal(grpc_slice_from_static_string(pair->value));
}

/* False if a pair is malformed (nothing is kept then). */
static bool pairs_copy(struct pairs *to, const struct rpc_pair *from, size_t len) {
    *to = (struct pairs){0};
    if (len == 0) {
        return true;
    }
    if (len > PAIRS_MAX) {
        return false;
    }
    for (size_t i = 0; i < len; i++) {
        if (!pair_is_legal(&from[i])) {
            return false;
        }
    }
    to->list = calloc(len, sizeof *to->list);
    CHECK(to->list != NULL);
    to->len = len;
    for (size_t i = 0; i < len; i++) {
        to->list[i].key = grpc_slice_from_copied_string(from[i].key);
        to->list[i].value = grpc_slice_from_copied_string(from[i].value);
    }
    return true;
}

static void pairs_free(struct pairs *pairs) {
    for (size_t i = 0; i < pairs->len; i++) {
        grpc_slice_unref(pairs->list[i].key);
        grpc_slice_unref(pairs->list[i].value);
    }
    free(pairs->list);
    *pairs = (struct pairs){0};
}

bool rpc_headers_get(const struct rpc_headers *headers, const char *key, struct bytes *value_out) {
    if (headers == NULL) {
        return false;
    }
    size_t len = strlen(key);
    for (size_t i = 0; i < headers->len; i++) {
        const grpc_slice *name = &headers->pairs[i].key;
        if (GRPC_SLICE_LENGTH(*name) == len && memcmp(GRPC_SLICE_START_PTR(*name), key, len) == 0) {
            *value_out = (struct bytes){GRPC_SLICE_START_PTR(headers->pairs[i].value),
                                        GRPC_SLICE_LENGTH(headers->pairs[i].value)};
            return true;
        }
    }
    return false;
}

/* ---- the table of calls ----------------------------------------------------------------- */

static void call_mail_run(struct mail *mail, void *ctx);

/* The open call with this id, or NULL. Lock held. */
static struct rpc_call *call_find_locked(struct rpc *rpc, struct rpc_call_id id) {
    uint32_t index = 0;
    if (!pool_find(&rpc->pool, id.v, &index) || rpc->calls[index].state != CALL_OPEN) {
        return NULL;
    }
    return &rpc->calls[index];
}

/* NULL when the table is full. Lock held. */
static struct rpc_call *call_take_locked(struct rpc *rpc) {
    uint64_t id = 0;
    if (pool_take(&rpc->pool, &id) != STATUS_OK) {
        return NULL;
    }
    struct rpc_call *call = &rpc->calls[pool_index(id)];
    if (call->rpc == NULL) { /* never used before: the table's memory is touched as needed */
        call->rpc = rpc;
        call->mail.run = call_mail_run;
    }
    memset((char *)call + offsetof(struct rpc_call, id), 0,
           sizeof *call - offsetof(struct rpc_call, id));
    call->id = id;
    for (uint32_t i = 0; i < OP_IN_CALL; i++) {
        call->ops[i] = (struct op){.kind = (enum op_kind)i, .owner = call};
    }
    grpc_metadata_array_init(&call->headers_in);
    grpc_metadata_array_init(&call->trailers_in);
    grpc_call_details_init(&call->details);
    call->status_details = grpc_empty_slice();
    return call;
}

static struct chunk *queue_take_locked(struct rpc_call *call) {
    struct chunk *all = call->queue_head;
    call->queue_head = NULL;
    call->queue_tail = NULL;
    call->queued_bytes = call->sending_bytes;
    return all;
}

static void chunks_free(struct chunk *chunk) {
    while (chunk != NULL) {
        struct chunk *next = chunk->next;
        grpc_slice_unref(chunk->slice);
        free(chunk);
        chunk = next;
    }
}

/* Gives the entry back. Nothing of it is pending; not on a path that still uses it. */
static void call_free(struct rpc_call *call) {
    struct rpc *rpc = call->rpc;
    CHECK_OP(call->pending, ==, 0);
    if (call->grpc != NULL) {
        grpc_call_unref(call->grpc);
    }
    grpc_metadata_array_destroy(&call->headers_in);
    grpc_metadata_array_destroy(&call->trailers_in);
    grpc_call_details_destroy(&call->details);
    grpc_slice_unref(call->status_details);
    if (call->received != NULL) {
        grpc_byte_buffer_destroy(call->received);
    }
    if (call->payload != NULL) {
        grpc_byte_buffer_destroy(call->payload);
    }
    pairs_free(&call->headers_out);
    pairs_free(&call->trailers_out);
    free(call->finish_message);
    pthread_mutex_lock(&rpc->lock);
    struct chunk *left = queue_take_locked(call);
    call->state = CALL_FREE;
    pool_free(&rpc->pool, call->id);
    pthread_cond_broadcast(&rpc->changed);
    pthread_mutex_unlock(&rpc->lock);
    chunks_free(left);
}

/* Puts the call on this turn's list. Rpc thread. */
static void call_mark_dirty(struct rpc_call *call) {
    if (!call->is_dirty) {
        call->is_dirty = true;
        call->dirty_next = call->rpc->dirty;
        call->rpc->dirty = call;
    }
}

static void call_mail_run(struct mail *mail, void *ctx) {
    struct rpc *rpc = ctx;
    struct rpc_call *call = (struct rpc_call *)(void *)mail;
    pthread_mutex_lock(&rpc->lock);
    call->is_mailed = false;
    pthread_mutex_unlock(&rpc->lock);
    call_mark_dirty(call);
}

/* After a wish was noted: makes the rpc thread look at the call. Releases the lock. */
static void call_touch_unlock(struct rpc_call *call) {
    struct rpc *rpc = call->rpc;
    if (rpc_on_thread(rpc)) {
        pthread_mutex_unlock(&rpc->lock);
        call_mark_dirty(call);
        return;
    }
    bool is_mailed = call->is_mailed;
    call->is_mailed = true;
    pthread_mutex_unlock(&rpc->lock);
    if (!is_mailed) {
        /* Refused only after rpc_shutdown has closed every call: then there is nothing to do. */
        (void)!mailbox_post(&rpc->box, &call->mail);
    }
}

/* Notes that the call is to end; the first reason counts. Returns what was queued. Lock held. */
static struct chunk *call_wish_kill_locked(struct rpc_call *call, enum rpc_end end,
                                           enum rpc_code code, const char *text) {
    if (call->wants_kill) {
        return NULL;
    }
    call->wants_kill = true;
    call->kill_end = end;
    call->kill_code = code;
    text_copy(call->kill_text, sizeof call->kill_text, text);
    call->is_accepting = false;
    return queue_take_locked(call);
}

/* ---- wishes (any thread) ---------------------------------------------------------------- */

void rpc_call_send(struct rpc *rpc, struct rpc_call_id id, const void *data, size_t len) {
    struct chunk *chunk = malloc(sizeof *chunk);
    CHECK(chunk != NULL);
    chunk->next = NULL;
    chunk->slice = grpc_slice_from_copied_buffer(data, len);
    struct chunk *drop = chunk;
    pthread_mutex_lock(&rpc->lock);
    struct rpc_call *call = call_find_locked(rpc, id);
    if (call == NULL || !call->is_accepting || (!call->is_server && call->kind != RPC_KIND_BIDI)) {
        pthread_mutex_unlock(&rpc->lock);
        chunks_free(drop);
        return;
    }
    if (call->queued_bytes > 0 && call->queued_bytes + len > call->queue_bytes_max) {
        char text[200];
        (void)snprintf(text, sizeof text, /* fits */
                       "the peer reads too slowly: %zu bytes wait for it and %zu more do not fit "
                       "into the limit of %zu; read faster or ask for less at once",
                       call->queued_bytes, len, call->queue_bytes_max);
        drop->next =
            call_wish_kill_locked(call, RPC_END_OVERFLOW, RPC_CODE_RESOURCE_EXHAUSTED, text);
        count(&rpc->counts.overflowed);
        call_touch_unlock(call);
        chunks_free(drop);
        return;
    }
    if (call->queue_tail != NULL) {
        call->queue_tail->next = chunk;
    } else {
        call->queue_head = chunk;
    }
    call->queue_tail = chunk;
    call->queued_bytes += len;
    call_touch_unlock(call);
}

size_t rpc_call_queued_bytes(struct rpc *rpc, struct rpc_call_id id) {
    pthread_mutex_lock(&rpc->lock);
    const struct rpc_call *call = call_find_locked(rpc, id);
    size_t bytes = call == NULL ? 0 : call->queued_bytes;
    pthread_mutex_unlock(&rpc->lock);
    return bytes;
}

/* At most MESSAGE_BYTES_MAX bytes, cut between characters: a status travels in HTTP/2 headers, and
 * a peer takes 8 KiB of them by default. */
static char *message_copy(const char *message) {
    size_t len = strnlen(message, MESSAGE_BYTES_MAX + 1);
    if (len > MESSAGE_BYTES_MAX) {
        len = MESSAGE_BYTES_MAX;
        while (len > 0 && ((unsigned char)message[len] & 0xc0) == 0x80) {
            len--;
        }
    }
    char *copy = strndup(message, len);
    CHECK(copy != NULL);
    return copy;
}

void rpc_call_finish(struct rpc *rpc, struct rpc_call_id id, enum rpc_code code,
                     const char *message, const struct rpc_pair *trailers, size_t trailers_len) {
    struct pairs pairs;
    if (!pairs_copy(&pairs, trailers, trailers_len)) {
        LOG_ERROR("trailers dropped: a key or value is not legal in HTTP/2",
                  LOG_TEXT("first_key", trailers[0].key), LOG_U64("count", trailers_len));
    }
    char *text = message == NULL || message[0] == '\0' ? NULL : message_copy(message);
    pthread_mutex_lock(&rpc->lock);
    struct rpc_call *call = call_find_locked(rpc, id);
    if (call == NULL || !call->is_server || !call->is_accepting) {
        pthread_mutex_unlock(&rpc->lock);
        pairs_free(&pairs);
        free(text);
        return;
    }
    call->is_accepting = false;
    call->wants_finish = true;
    call->finish_code = code;
    call->finish_message = text;
    call->trailers_out = pairs;
    call_touch_unlock(call);
}

static void call_wish_end(struct rpc *rpc, struct rpc_call_id id, bool server_only,
                          enum rpc_code code, const char *text) {
    pthread_mutex_lock(&rpc->lock);
    struct rpc_call *call = call_find_locked(rpc, id);
    if (call == NULL || (server_only && !call->is_server)) {
        pthread_mutex_unlock(&rpc->lock);
        return;
    }
    struct chunk *left =
        call_wish_kill_locked(call, server_only ? RPC_END_STATUS : RPC_END_CANCELLED, code, text);
    call_touch_unlock(call);
    chunks_free(left);
}

void rpc_call_abort(struct rpc *rpc, struct rpc_call_id call, enum rpc_code code,
                    const char *message) {
    call_wish_end(rpc, call, true, code, message == NULL ? "" : message);
}

void rpc_call_cancel(struct rpc *rpc, struct rpc_call_id call) {
    call_wish_end(rpc, call, false, RPC_CODE_CANCELLED, "cancelled");
}

void rpc_call_half_close(struct rpc *rpc, struct rpc_call_id id) {
    pthread_mutex_lock(&rpc->lock);
    struct rpc_call *call = call_find_locked(rpc, id);
    if (call == NULL || call->is_server || call->kind != RPC_KIND_BIDI || !call->is_accepting) {
        pthread_mutex_unlock(&rpc->lock);
        return;
    }
    call->is_accepting = false;
    call->wants_half_close = true;
    call_touch_unlock(call);
}

void rpc_call_set_ctx(struct rpc *rpc, struct rpc_call_id id, void *ctx) {
    CHECK(rpc_on_thread(rpc));
    pthread_mutex_lock(&rpc->lock);
    struct rpc_call *call = call_find_locked(rpc, id);
    pthread_mutex_unlock(&rpc->lock);
    if (call != NULL) {
        call->ctx = ctx;
    }
}

/* ---- carrying out (rpc thread) ---------------------------------------------------------- */

static void call_batch(struct rpc_call *call, enum op_kind kind, const grpc_op *ops, size_t len) {
    call->pending++;
    grpc_call_error error = grpc_call_start_batch(call->grpc, ops, len, &call->ops[kind], NULL);
    CHECK_OP(error, ==, GRPC_CALL_OK); /* anything else is a bug of ours and brings no tag */
}

static void call_receive(struct rpc_call *call) {
    call->is_receive_busy = true;
    grpc_op op;
    memset(&op, 0, sizeof op);
    op.op = GRPC_OP_RECV_MESSAGE;
    op.data.recv_message.recv_message = &call->received;
    call_batch(call, OP_RECEIVE, &op, 1);
}

static void call_sending(struct rpc_call *call) {
    struct rpc *rpc = call->rpc;
    call->is_send_busy = true;
    call->sending_since = rpc->now;
    if (!call->is_watched) {
        call->is_watched = true;
        call->watch_next = rpc->watched;
        rpc->watched = call;
    }
}

/* Client: everything that can be started at once. Cancelling before this is legal. */
static void call_start(struct rpc_call *call) {
    call->is_started = true;
    grpc_op ops[3];
    memset(ops, 0, sizeof ops);
    ops[0].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[0].data.recv_status_on_client.trailing_metadata = &call->trailers_in;
    ops[0].data.recv_status_on_client.status = &call->status;
    ops[0].data.recv_status_on_client.status_details = &call->status_details;
    call_batch(call, OP_STATUS, ops, 1);
    memset(ops, 0, sizeof ops);
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[0].data.send_initial_metadata.metadata = call->headers_out.list;
    ops[0].data.send_initial_metadata.count = call->headers_out.len;
    size_t len = 1;
    if (call->kind != RPC_KIND_BIDI) {
        ops[1].op = GRPC_OP_SEND_MESSAGE;
        ops[1].data.send_message.send_message = call->payload;
        ops[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
        call->has_half_closed = true;
        count_alone(&call->rpc->counts.sent);
        len = 3;
    }
    call->has_headers_out = true;
    call_sending(call);
    call_batch(call, OP_SEND, ops, len);
    if (call->payload != NULL) {
        grpc_byte_buffer_destroy(call->payload); /* the batch has its own references */
        call->payload = NULL;
    }
    memset(ops, 0, sizeof ops);
    ops[0].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[0].data.recv_initial_metadata.recv_initial_metadata = &call->headers_in;
    call_batch(call, OP_HEADERS, ops, 1);
    call_receive(call);
}

/* Starts the next send batch, if there is something to send and none is in flight. No message gets
 * GRPC_WRITE_BUFFER_HINT: with gRPC 1.51 a long burst of hinted messages was seen to stop until the
 * stall time ended the call. Whoever has many small things to say merges them. */
static void call_send_next(struct rpc_call *call) {
    if (call->is_send_busy || call->is_dead || call->has_status_out) {
        return;
    }
    struct rpc *rpc = call->rpc;
    pthread_mutex_lock(&rpc->lock);
    struct chunk *chunk = call->queue_head;
    if (chunk != NULL) {
        call->queue_head = chunk->next;
        if (call->queue_head == NULL) {
            call->queue_tail = NULL;
        }
        call->sending_bytes = GRPC_SLICE_LENGTH(chunk->slice);
    }
    bool is_last = call->queue_head == NULL;
    bool is_status = is_last && call->is_server && call->wants_finish;
    bool is_half_close = is_last && call->wants_half_close && !call->has_half_closed;
    pthread_mutex_unlock(&rpc->lock);
    bool is_headers =
        !call->has_headers_out && (chunk != NULL || is_status || call->kind != RPC_KIND_UNARY);

    grpc_op ops[3];
    memset(ops, 0, sizeof ops);
    size_t len = 0;
    grpc_byte_buffer *message = NULL;
    grpc_slice details = grpc_empty_slice();
    if (is_headers) {
        ops[len++].op = GRPC_OP_SEND_INITIAL_METADATA;
        call->has_headers_out = true;
    }
    if (chunk != NULL) {
        message = grpc_raw_byte_buffer_create(&chunk->slice, 1);
        ops[len].op = GRPC_OP_SEND_MESSAGE;
        ops[len].data.send_message.send_message = message;
        len++;
        count_alone(&rpc->counts.sent);
    }
    if (is_status) {
        if (call->finish_message != NULL) {
            details = grpc_slice_from_copied_string(call->finish_message);
        }
        ops[len].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
        ops[len].data.send_status_from_server.status = (grpc_status_code)call->finish_code;
        ops[len].data.send_status_from_server.status_details = &details;
        ops[len].data.send_status_from_server.trailing_metadata = call->trailers_out.list;
        ops[len].data.send_status_from_server.trailing_metadata_count = call->trailers_out.len;
        len++;
        call->has_status_out = true;
    }
    if (is_half_close) {
        ops[len++].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
        call->has_half_closed = true;
    }
    if (len == 0) {
        return;
    }
    call->is_sending_message = chunk != NULL;
    call_sending(call);
    call_batch(call, OP_SEND, ops, len);
    if (message != NULL) {
        grpc_byte_buffer_destroy(message);
        grpc_slice_unref(chunk->slice);
        free(chunk);
    }
    grpc_slice_unref(details);
}

/* A server that can still speak sends a status; otherwise the stream is reset. gRPC 1.51 writes
 * code and text of such a reset as trailers, past flow control, if none were sent before. */
static void call_kill(struct rpc_call *call) {
    call->is_killed = true;
    if (call->is_server && call->kill_end != RPC_END_CANCELLED && !call->is_send_busy &&
        !call->is_dead && !call->has_status_out) {
        pthread_mutex_lock(&call->rpc->lock);
        if (!call->wants_finish) {
            call->is_finished_by_kill = true;
            call->wants_finish = true;
            call->finish_code = call->kill_code;
            call->finish_message = strdup(call->kill_text);
        }
        pthread_mutex_unlock(&call->rpc->lock);
        call_send_next(call);
        return;
    }
    grpc_call_error error = grpc_call_cancel_with_status(
        call->grpc, (grpc_status_code)call->kill_code, call->kill_text, NULL);
    CHECK_OP(error, ==, GRPC_CALL_OK);
}

static void call_pump(struct rpc_call *call) {
    struct rpc *rpc = call->rpc;
    pthread_mutex_lock(&rpc->lock);
    bool is_open = call->state == CALL_OPEN;
    bool wants_kill = call->wants_kill;
    bool has_something = call->queue_head != NULL || call->wants_finish || call->wants_half_close ||
                         !call->has_headers_out;
    pthread_mutex_unlock(&rpc->lock);
    if (!is_open) {
        return;
    }
    if (!call->is_started) {
        call_start(call);
    }
    if (wants_kill && !call->is_killed) {
        call_kill(call);
    }
    if (has_something) {
        call_send_next(call);
    }
}

/* 2 ms: gRPC's own timers are that coarse. */
static bool deadline_is_over(const struct rpc_call *call) {
    return instant_reached(instant_add(clock_now(), span_ms(2)), call->deadline);
}

static void call_describe_end(const struct rpc_call *call, struct rpc_outcome *outcome) {
    if (!call->is_server) {
        outcome->code = (enum rpc_code)call->status;
        if (call->is_killed && outcome->code == call->kill_code) {
            outcome->end = call->kill_end;
        } else if (outcome->code == RPC_CODE_DEADLINE_EXCEEDED && deadline_is_over(call)) {
            outcome->end = RPC_END_DEADLINE;
        }
        return;
    }
    outcome->is_cancelled = call->cancelled != 0;
    if (!outcome->is_cancelled) {
        outcome->code = call->finish_code;
        outcome->message = call->finish_message == NULL ? "" : call->finish_message;
        outcome->end = call->is_finished_by_kill ? call->kill_end : RPC_END_STATUS;
    } else if (call->is_killed) {
        outcome->end = call->kill_end;
        outcome->code = call->kill_code;
        outcome->message = call->kill_text;
    } else if (deadline_is_over(call)) {
        outcome->end = RPC_END_DEADLINE;
        outcome->code = RPC_CODE_DEADLINE_EXCEEDED;
        outcome->message = "the client's deadline passed";
    } else {
        outcome->end = RPC_END_PEER;
        outcome->code = RPC_CODE_CANCELLED;
        outcome->message = "the client cancelled or vanished";
    }
}

static void server_rearm(struct rpc *rpc);

/* The one place where a call ends. */
static void call_close_if_done(struct rpc_call *call) {
    struct rpc *rpc = call->rpc;
    if (!call->has_ended || call->pending > 0) {
        return;
    }
    bool is_live = !call->is_silent;
    pthread_mutex_lock(&rpc->lock);
    call->state = CALL_CLOSING;
    call->is_accepting = false;
    if (is_live) {
        rpc->calls_live--;
        rpc->server_calls_live -= call->is_server ? 1 : 0;
    }
    pthread_mutex_unlock(&rpc->lock);
    if (is_live) {
        char *text = NULL;
        struct rpc_headers trailers = {call->trailers_in.metadata, call->trailers_in.count};
        struct rpc_outcome outcome = {.message = "", .end = RPC_END_STATUS};
        if (!call->is_server) {
            text = grpc_slice_to_c_string(call->status_details);
            outcome.message = text;
            outcome.trailers = &trailers;
        }
        call_describe_end(call, &outcome);
        count_alone(&rpc->counts.closed);
        call->handlers->on_closed(call->ctx, (struct rpc_call_id){call->id}, &outcome);
        gpr_free(text);
    }
    call_free(call);
    if (rpc->is_slot_missing) {
        server_rearm(rpc);
    }
}

/* Nothing more can be sent: what is queued is dropped. */
static void call_set_dead(struct rpc_call *call) {
    call->is_dead = true;
    pthread_mutex_lock(&call->rpc->lock);
    call->is_accepting = false;
    struct chunk *left = queue_take_locked(call);
    pthread_mutex_unlock(&call->rpc->lock);
    chunks_free(left);
}

static void call_sent(struct rpc_call *call, bool success) {
    struct rpc *rpc = call->rpc;
    call->is_send_busy = false;
    bool had_message = call->is_sending_message;
    call->is_sending_message = false;
    pthread_mutex_lock(&rpc->lock);
    call->queued_bytes -= call->sending_bytes;
    call->sending_bytes = 0;
    bool is_writable = success && had_message && call->is_accepting && call->queue_head == NULL;
    pthread_mutex_unlock(&rpc->lock);
    if (!success) {
        call_set_dead(call);
    }
    if (is_writable && call->handlers->on_writable != NULL) {
        call->handlers->on_writable(call->ctx, (struct rpc_call_id){call->id});
    }
    call_mark_dirty(call);
}

/* Hands the bytes of a buffer to a function without copying when they lie in one piece. */
static void buffer_deliver(struct rpc_call *call, grpc_byte_buffer *buffer) {
    count_alone(&call->rpc->counts.received);
    if (call->handlers->on_message == NULL) {
        return;
    }
    struct rpc_call_id id = {call->id};
    if (buffer->type == GRPC_BB_RAW && buffer->data.raw.compression == GRPC_COMPRESS_NONE &&
        buffer->data.raw.slice_buffer.count == 1) {
        const grpc_slice *slice = &buffer->data.raw.slice_buffer.slices[0];
        call->handlers->on_message(call->ctx, id, GRPC_SLICE_START_PTR(*slice),
                                   GRPC_SLICE_LENGTH(*slice));
        return;
    }
    grpc_byte_buffer_reader reader;
    CHECK(grpc_byte_buffer_reader_init(&reader, buffer) != 0);
    grpc_slice all = grpc_byte_buffer_reader_readall(&reader);
    grpc_byte_buffer_reader_destroy(&reader);
    call->handlers->on_message(call->ctx, id, GRPC_SLICE_START_PTR(all), GRPC_SLICE_LENGTH(all));
    grpc_slice_unref(all);
}

static void call_received(struct rpc_call *call, bool success) {
    call->is_receive_busy = false;
    grpc_byte_buffer *buffer = call->received;
    call->received = NULL;
    if (buffer == NULL) {
        bool is_clean = success && grpc_call_failed_before_recv_message(call->grpc) == 0;
        if (call->is_server && is_clean && call->handlers->on_half_closed != NULL) {
            call->handlers->on_half_closed(call->ctx, (struct rpc_call_id){call->id});
        }
        return; /* the end: the status or close tag says why */
    }
    buffer_deliver(call, buffer);
    grpc_byte_buffer_destroy(buffer);
    call_receive(call); /* always, also when nobody cares: a status waits for its messages */
}

/* Fails calls whose send batch has not moved for their stall time. */
static void calls_check_stalls(struct rpc *rpc) {
    struct rpc_call **link = &rpc->watched;
    while (*link != NULL) {
        struct rpc_call *call = *link;
        pthread_mutex_lock(&rpc->lock);
        bool is_open = call->state == CALL_OPEN;
        pthread_mutex_unlock(&rpc->lock);
        if (!is_open || !call->is_send_busy) {
            *link = call->watch_next;
            call->is_watched = false;
            continue;
        }
        if (!call->is_killed &&
            instant_reached(rpc->now, instant_add(call->sending_since, call->stall))) {
            char text[200];
            (void)snprintf(text, sizeof text, /* fits */
                           "the peer has read nothing for %lld ms while data waited for it",
                           (long long)span_to_ms(call->stall));
            pthread_mutex_lock(&rpc->lock);
            bool is_first = !call->wants_kill;
            struct chunk *left =
                call_wish_kill_locked(call, RPC_END_STALLED, RPC_CODE_RESOURCE_EXHAUSTED, text);
            pthread_mutex_unlock(&rpc->lock);
            chunks_free(left);
            if (is_first) {
                count_alone(&rpc->counts.stalled);
            }
            call_mark_dirty(call);
        }
        link = &call->watch_next;
    }
}

/* ---- server, on the rpc thread ---------------------------------------------------------- */

static uint32_t servers_len(struct rpc *rpc) {
    pthread_mutex_lock(&rpc->lock);
    uint32_t len = rpc->servers_len;
    pthread_mutex_unlock(&rpc->lock);
    return len;
}

/* Posts one accept request. False if the table is full. */
static bool slot_arm(struct rpc_server *server, uint32_t index) {
    struct rpc *rpc = server->rpc;
    struct method *method = &server->methods[index];
    pthread_mutex_lock(&rpc->lock);
    struct rpc_call *call = call_take_locked(rpc);
    if (call == NULL) {
        pthread_mutex_unlock(&rpc->lock);
        return false;
    }
    call->state = CALL_ARMED;
    rpc->slots_armed++;
    pthread_mutex_unlock(&rpc->lock);
    call->is_server = true;
    call->is_started = true;
    call->kind = method->kind;
    call->handlers = method->handlers;
    call->ctx = method->ctx;
    call->server = server;
    call->method = index;
    call->queue_bytes_max = method->queue_bytes_max;
    call->stall = method->stall;
    call->pending = 1;
    method->armed++;
    grpc_call_error error;
    if (index == METHODS_MAX) {
        error =
            grpc_server_request_call(server->grpc, &call->grpc, &call->details, &call->headers_in,
                                     rpc->queue, rpc->queue, &call->ops[OP_ACCEPT]);
    } else {
        error = grpc_server_request_registered_call(
            server->grpc, method->registered, &call->grpc, &call->accept_deadline,
            &call->headers_in, method->kind == RPC_KIND_BIDI ? NULL : &call->received, rpc->queue,
            rpc->queue, &call->ops[OP_ACCEPT]);
    }
    CHECK_OP(error, ==, GRPC_CALL_OK);
    return true;
}

/* Slots are never withheld to slow clients down: a call that nobody accepts waits in gRPC until its
 * deadline without an answer. Only a full table leaves one out, until the next call is freed. */
static void method_arm(struct rpc_server *server, uint32_t index) {
    while (server->methods[index].armed < SLOTS_PER_METHOD) {
        if (!slot_arm(server, index)) {
            server->rpc->is_slot_missing = true;
            return;
        }
    }
}

static void server_arm(struct rpc_server *server) {
    server->is_armed = true;
    if (server->is_draining) {
        return;
    }
    for (uint32_t i = 0; i < server->methods_len; i++) {
        method_arm(server, i);
    }
    method_arm(server, METHODS_MAX);
}

static void server_rearm(struct rpc *rpc) {
    rpc->is_slot_missing = false;
    uint32_t len = servers_len(rpc);
    for (uint32_t i = 0; i < len; i++) {
        if (rpc->servers[i]->is_armed) {
            server_arm(rpc->servers[i]);
        }
    }
}

/* Ends an accepted call with a status of our own; its handlers never hear of it. */
static void call_refuse(struct rpc_call *call, enum rpc_code code, const char *text) {
    call->is_silent = true;
    pthread_mutex_lock(&call->rpc->lock);
    call->wants_finish = true;
    call->is_accepting = false;
    call->finish_code = code;
    call->finish_message = strdup(text);
    pthread_mutex_unlock(&call->rpc->lock);
    call_mark_dirty(call);
}

static void refuse_unknown(struct rpc_call *call) {
    struct rpc_server *server = call->server;
    char text[1024];
    struct writer writer;
    writer_init(&writer, text, sizeof text - 1);
    char *path = grpc_slice_to_c_string(call->details.method);
    writer_printf(&writer, "method %.200s does not exist here; this server offers", path);
    gpr_free(path);
    const char *name = NULL;
    size_t len = 0;
    uint32_t i = 0;
    for (; rpc_server_service(server, i, &name, &len); i++) {
        writer_printf(&writer, "%s %.*s", i == 0 ? "" : ",", (int)len, name);
    }
    writer_text(&writer, i == 0 ? " no service" : "");
    text[writer.len] = '\0';
    count_alone(&call->rpc->counts.unknown_methods);
    call_refuse(call, RPC_CODE_UNIMPLEMENTED, text);
}

static void call_accepted(struct rpc_call *call, bool success) {
    struct rpc *rpc = call->rpc;
    struct rpc_server *server = call->server;
    struct method *method = &server->methods[call->method];
    method->armed--;
    pthread_mutex_lock(&rpc->lock);
    rpc->slots_armed--;
    pthread_mutex_unlock(&rpc->lock);
    if (!success) { /* the server drains */
        call_free(call);
        return;
    }
    if (!server->is_draining) {
        method_arm(server, call->method);
    }
    call->deadline =
        instant_from(call->method == METHODS_MAX ? call->details.deadline : call->accept_deadline);
    grpc_op op;
    memset(&op, 0, sizeof op);
    op.op = GRPC_OP_RECV_CLOSE_ON_SERVER;
    op.data.recv_close_on_server.cancelled = &call->cancelled;
    call_batch(call, OP_CLOSE, &op, 1);

    pthread_mutex_lock(&rpc->lock);
    bool is_full = rpc->calls_live >= rpc->calls_max;
    bool is_dead = instant_reached(clock_now(), call->deadline);
    bool is_unknown = call->method == METHODS_MAX;
    bool is_empty = !is_unknown && call->kind != RPC_KIND_BIDI && call->received == NULL;
    bool is_live = !is_full && !is_dead && !is_unknown && !is_empty;
    call->state = CALL_OPEN;
    call->is_accepting = is_live;
    if (is_live) {
        rpc->calls_live++;
        rpc->server_calls_live++;
    }
    pthread_mutex_unlock(&rpc->lock);
    if (is_dead) {
        count_alone(&rpc->counts.dead_on_arrival);
        call_refuse(call, RPC_CODE_DEADLINE_EXCEEDED, "the deadline passed before the call began");
        return;
    }
    if (is_unknown) {
        refuse_unknown(call);
        return;
    }
    if (is_full) {
        count_alone(&rpc->counts.refused_full);
        call_refuse(call, RPC_CODE_RESOURCE_EXHAUSTED,
                    "this server has as many calls as it can hold; try again later");
        return;
    }
    if (is_empty) {
        call_refuse(call, RPC_CODE_INVALID_ARGUMENT,
                    "the request message is missing: this method takes exactly one");
        return;
    }
    if (call->kind == RPC_KIND_BIDI) {
        call_receive(call);
    }
    count(&rpc->counts.opened);
    char *peer = grpc_call_get_peer(call->grpc);
    struct rpc_headers headers = {call->headers_in.metadata, call->headers_in.count};
    struct rpc_incoming incoming = {.method = method->path,
                                    .peer = peer == NULL ? "" : peer,
                                    .deadline = call->deadline,
                                    .headers = &headers};
    grpc_slice payload = grpc_empty_slice();
    if (call->kind != RPC_KIND_BIDI) {
        grpc_byte_buffer_reader reader;
        if (grpc_byte_buffer_reader_init(&reader, call->received) != 0) {
            payload = grpc_byte_buffer_reader_readall(&reader);
            grpc_byte_buffer_reader_destroy(&reader);
        }
        grpc_byte_buffer_destroy(call->received);
        call->received = NULL;
        incoming.payload =
            (struct bytes){GRPC_SLICE_START_PTR(payload), GRPC_SLICE_LENGTH(payload)};
        count_alone(&rpc->counts.received);
    }
    call->handlers->on_open(call->ctx, (struct rpc_call_id){call->id}, &incoming);
    grpc_slice_unref(payload);
    gpr_free(peer);
    call_mark_dirty(call); /* streams send their headers now, even with nothing to say yet */
}

static void server_start_run(struct mail *mail, void *ctx) {
    (void)ctx;
    server_arm(
        (struct rpc_server *)(void *)((char *)mail - offsetof(struct rpc_server, start_mail)));
}

static void server_drain_now(struct rpc_server *server) {
    pthread_mutex_lock(&server->rpc->lock);
    bool is_started = server->is_started;
    pthread_mutex_unlock(&server->rpc->lock);
    if (server->is_draining || !is_started) {
        return;
    }
    server->is_draining = true;
    grpc_server_shutdown_and_notify(server->grpc, server->rpc->queue, &server->drained);
}

static void server_drain_run(struct mail *mail, void *ctx) {
    (void)ctx;
    server_drain_now(
        (struct rpc_server *)(void *)((char *)mail - offsetof(struct rpc_server, drain_mail)));
}

/* ---- the thread ------------------------------------------------------------------------- */

static void dispatch(struct rpc *rpc, const grpc_event *event) {
    struct op *op = event->tag;
    bool success = event->success != 0;
    if (op->kind == OP_KICK) { /* one for each time that the box became non-empty */
        struct mail *chain = mailbox_take_all(&rpc->box);
        if (chain != NULL) {
            (void)mail_run_all(chain, rpc);
        }
        return;
    }
    if (op->kind == OP_DRAINED) {
        struct rpc_server *server = op->owner;
        pthread_mutex_lock(&rpc->lock);
        server->is_drained = true;
        pthread_cond_broadcast(&rpc->changed);
        pthread_mutex_unlock(&rpc->lock);
        return;
    }
    struct rpc_call *call = op->owner;
    call->pending--;
    switch (op->kind) {
    case OP_ACCEPT: call_accepted(call, success); return;
    case OP_CLOSE:
        call->has_ended = true;
        if (call->cancelled != 0) {
            call_set_dead(call);
        }
        break;
    case OP_SEND: call_sent(call, success); break;
    case OP_RECEIVE: call_received(call, success); break;
    case OP_HEADERS:
        if (success && call->handlers->on_headers != NULL) {
            struct rpc_headers headers = {call->headers_in.metadata, call->headers_in.count};
            call->handlers->on_headers(call->ctx, (struct rpc_call_id){call->id}, &headers);
        }
        break;
    case OP_STATUS:
        call->has_ended = true;
        call_set_dead(call);
        break;
    case OP_IN_CALL:
    case OP_KICK:
    case OP_DRAINED: CHECK(false);
    }
    call_close_if_done(call);
}

static void rpc_beat(struct rpc *rpc, struct instant real) {
    if (instant_reached(real, instant_add(rpc->beaten, span_ms(BEAT_EVERY_MS)))) {
        rpc->beaten = real;
        thread_beat(&rpc->thread.beat);
    }
}

/* What every turn does after its event: the calls that were touched. They may be ten thousand (a
 * client with as many calls left): that is work, not silence. */
static void turn_end(struct rpc *rpc) {
    for (uint32_t pumped = 1; rpc->dirty != NULL; pumped++) {
        struct rpc_call *call = rpc->dirty;
        rpc->dirty = call->dirty_next;
        call->is_dirty = false;
        call_pump(call);
        if (pumped % TURNS_PER_CLOCK == 0) {
            rpc_beat(rpc, clock_now());
        }
    }
}

static void rpc_wake(void *ctx) {
    struct rpc *rpc = ctx;
    grpc_call_error error = grpc_call_start_batch(rpc->kicker, NULL, 0, &rpc->kick, NULL);
    CHECK_OP(error, ==, GRPC_CALL_OK);
}

static void rpc_take_down(struct rpc *rpc) {
    struct mail *left = mailbox_close(&rpc->box); /* no wake runs after this */
    if (left != NULL) {
        (void)mail_run_all(left, rpc);
    }
    rpc->dirty = NULL; /* stale: every call is back in the table */
    uint32_t len = servers_len(rpc);
    for (uint32_t i = 0; i < len; i++) {
        grpc_server_destroy(rpc->servers[i]->grpc);
        rpc->servers[i]->grpc = NULL;
    }
    pthread_mutex_lock(&rpc->lock);
    for (struct rpc_channel *channel = rpc->channels; channel != NULL; channel = channel->next) {
        grpc_channel_destroy(channel->grpc);
        channel->grpc = NULL;
    }
    pthread_mutex_unlock(&rpc->lock);
    grpc_call_unref(rpc->kicker);
    grpc_channel_destroy(rpc->lame);
    grpc_completion_queue_shutdown(rpc->queue);
}

static void rpc_main(struct thread *self, void *arg) {
    (void)self; /* rpc->thread */
    struct rpc *rpc = arg;
    current_rpc = rpc;
    clock_observer_init(&rpc->observer);
    struct instant real = clock_now();
    for (uint32_t turn = 0;; turn++) {
        if (turn % TURNS_PER_CLOCK == 0) { /* a stale clock only makes the wait below shorter */
            real = clock_now();
            rpc->now = clock_observe_at(&rpc->observer, real);
            rpc_beat(rpc, real);
            if (instant_reached(real, instant_add(rpc->checked, span_ms(WAIT_MS)))) {
                rpc->checked = real;
                calls_check_stalls(rpc);
            }
        }
        turn_end(rpc);
        if (rpc->is_finishing) {
            rpc->is_finishing = false;
            rpc_take_down(rpc);
        }
        grpc_event event = grpc_completion_queue_next(
            rpc->queue, timespec_from(instant_add(real, span_ms(WAIT_MS))), NULL);
        if (event.type == GRPC_QUEUE_SHUTDOWN) {
            break;
        }
        if (event.type == GRPC_OP_COMPLETE) {
            dispatch(rpc, &event);
        } else {
            turn = UINT32_MAX; /* idle: look at the clock */
        }
    }
    current_rpc = NULL;
}

/* ---- life ------------------------------------------------------------------------------- */

static void grpc_log_to_ours(gpr_log_func_args *args) {
    LOG_WARN("grpc says", LOG_TEXT("text", args->message));
}

static void drain_all_run(struct mail *mail, void *ctx) {
    (void)mail;
    struct rpc *rpc = ctx;
    uint32_t len = servers_len(rpc);
    for (uint32_t i = 0; i < len; i++) {
        server_drain_now(rpc->servers[i]);
    }
}

static void cancel_all_run(struct mail *mail, void *ctx) {
    (void)mail;
    struct rpc *rpc = ctx;
    for (uint32_t i = 0; i < rpc->pool.capacity; i++) {
        struct rpc_call *call = &rpc->calls[i];
        pthread_mutex_lock(&rpc->lock);
        bool is_open = call->state == CALL_OPEN;
        struct chunk *left =
            is_open ? call_wish_kill_locked(call, RPC_END_SHUTDOWN, RPC_CODE_UNAVAILABLE,
                                            "the program is shutting down")
                    : NULL;
        pthread_mutex_unlock(&rpc->lock);
        chunks_free(left);
        if (is_open) {
            call_mark_dirty(call);
        }
    }
}

static void reset_all_run(struct mail *mail, void *ctx) {
    (void)mail;
    struct rpc *rpc = ctx;
    uint32_t len = servers_len(rpc);
    for (uint32_t i = 0; i < len; i++) {
        if (rpc->servers[i]->is_draining) {
            grpc_server_cancel_all_calls(rpc->servers[i]->grpc);
        }
    }
}

static void finish_run(struct mail *mail, void *ctx) {
    (void)mail;
    struct rpc *rpc = ctx;
    rpc->is_finishing = true;
}

enum status rpc_create(const struct rpc_config *config, struct rpc **out) {
    struct rpc *rpc = calloc(1, sizeof *rpc);
    CHECK(rpc != NULL);
    const char *name = config != NULL && config->name != NULL ? config->name : "rpc";
    rpc->calls_max =
        config != NULL && config->calls_max != 0 ? config->calls_max : CALLS_MAX_DEFAULT;
    uint32_t capacity = rpc->calls_max + SLOTS_RESERVE;
    rpc->calls = calloc(capacity, sizeof *rpc->calls);
    rpc->pool_memory = malloc(pool_bytes(capacity));
    CHECK(rpc->calls != NULL && rpc->pool_memory != NULL);
    pool_init(&rpc->pool, capacity, rpc->pool_memory);
    pthread_condattr_t attributes;
    CHECK(pthread_condattr_init(&attributes) == 0 &&
          pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_mutex_init(&rpc->lock, NULL) == 0 &&
          pthread_cond_init(&rpc->changed, &attributes) == 0);
    (void)pthread_condattr_destroy(&attributes); /* cannot fail */
    rpc->drain_mail.run = drain_all_run;
    rpc->cancel_mail.run = cancel_all_run;
    rpc->reset_mail.run = reset_all_run;
    rpc->finish_mail.run = finish_run;

    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    CHECK(pthread_sigmask(SIG_SETMASK, &all, &before) == 0); /* gRPC's threads inherit it */
    gpr_set_log_function(grpc_log_to_ours);
    grpc_init();
    rpc->queue = grpc_completion_queue_create_for_next(NULL);
    rpc->lame = grpc_lame_client_channel_create("kick", GRPC_STATUS_UNAVAILABLE, "kick");
    rpc->kicker = grpc_channel_create_call(rpc->lame, NULL, GRPC_PROPAGATE_DEFAULTS, rpc->queue,
                                           grpc_slice_from_static_string("/kick"), NULL,
                                           gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    CHECK(pthread_sigmask(SIG_SETMASK, &before, NULL) == 0);
    rpc->kick = (struct op){.kind = OP_KICK, .owner = rpc};
    mailbox_init(&rpc->box, rpc_wake, rpc);

    struct thread_config thread = {
        .name = name, .fn = rpc_main, .arg = rpc, .beat_limit = span_ms(1000)};
    if (thread_start(&rpc->thread, &thread) != STATUS_OK) {
        rpc_take_down(rpc);
        while (grpc_completion_queue_next(rpc->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL)
                   .type != GRPC_QUEUE_SHUTDOWN) {
        }
        rpc->is_shut = true;
        rpc_destroy(rpc);
        return STATUS_INTERNAL;
    }
    *out = rpc;
    return STATUS_OK;
}

bool rpc_post(struct rpc *rpc, struct mail *mail) {
    return mailbox_post(&rpc->box, mail);
}

/* True when servers accept nothing any more and their calls are over. Lock held. */
static bool is_drained_locked(const struct rpc *rpc) {
    return rpc->server_calls_live == 0;
}

/* True when nothing is left. Lock held. */
static bool is_quiet_locked(const struct rpc *rpc) {
    for (uint32_t i = 0; i < rpc->servers_len; i++) {
        if (rpc->servers[i]->is_started && !rpc->servers[i]->is_drained) {
            return false;
        }
    }
    return rpc->pool.live == 0;
}

static bool wait_until(struct rpc *rpc, bool (*fact)(const struct rpc *), struct instant deadline) {
    struct timespec at = clock_to_timespec(deadline);
    pthread_mutex_lock(&rpc->lock);
    while (!fact(rpc) && !instant_reached(clock_now(), deadline)) {
        (void)pthread_cond_timedwait(&rpc->changed, &rpc->lock, &at); /* the loop judges */
    }
    bool is_true = fact(rpc);
    pthread_mutex_unlock(&rpc->lock);
    return is_true;
}

enum status rpc_shutdown(struct rpc *rpc, struct span grace, struct span abort_within) {
    CHECK(!rpc_on_thread(rpc));
    if (rpc->is_shut) {
        return STATUS_OK;
    }
    if (rpc->is_shut_asked) { /* it timed out before; the mails may still be under way */
        return STATUS_TIMEOUT;
    }
    rpc->is_shut_asked = true;
    CHECK(mailbox_post(&rpc->box, &rpc->drain_mail));
    (void)wait_until(rpc, is_drained_locked, instant_add(clock_now(), grace));

    pthread_mutex_lock(&rpc->lock);
    rpc->is_closing = true;
    pthread_mutex_unlock(&rpc->lock);
    struct instant deadline = instant_add(clock_now(), abort_within);
    CHECK(mailbox_post(&rpc->box, &rpc->cancel_mail));
    if (!wait_until(rpc, is_quiet_locked,
                    instant_add(clock_now(), (struct span){abort_within.ns / 2}))) {
        CHECK(mailbox_post(&rpc->box, &rpc->reset_mail));
    }
    if (!wait_until(rpc, is_quiet_locked, deadline)) {
        struct rpc_counters counters;
        rpc_counters(rpc, &counters);
        LOG_ERROR("rpc did not become quiet in time", LOG_SPAN("waited", abort_within),
                  LOG_U64("calls", counters.calls_live), LOG_U64("slots", counters.slots_armed));
        return STATUS_TIMEOUT;
    }
    thread_expect_end(&rpc->thread);
    CHECK(mailbox_post(&rpc->box, &rpc->finish_mail));
    enum status status = thread_join(&rpc->thread, instant_add(clock_now(), span_ms(2000)));
    if (status != STATUS_OK) {
        LOG_ERROR("rpc thread did not end in time", LOG_TEXT("why", "its queue is not empty"));
        return status;
    }
    rpc->is_shut = true;
    return STATUS_OK;
}

void rpc_destroy(struct rpc *rpc) {
    if (rpc == NULL) {
        return;
    }
    CHECK(rpc->is_shut);
    grpc_completion_queue_destroy(rpc->queue);
    for (uint32_t i = 0; i < rpc->servers_len; i++) {
        for (uint32_t j = 0; j < rpc->servers[i]->methods_len; j++) {
            free(rpc->servers[i]->methods[j].path);
        }
        free(rpc->servers[i]);
    }
    while (rpc->channels != NULL) {
        struct rpc_channel *next = rpc->channels->next;
        free(rpc->channels);
        rpc->channels = next;
    }
    mailbox_fini(&rpc->box);
    (void)pthread_cond_destroy(&rpc->changed); /* nobody waits */
    (void)pthread_mutex_destroy(&rpc->lock);
    free(rpc->pool_memory);
    free(rpc->calls);
    free(rpc);
    grpc_shutdown();
}

void rpc_counters(struct rpc *rpc, struct rpc_counters *out) {
    const struct counts *c = &rpc->counts;
    *out = (struct rpc_counters){
        .calls_opened = atomic_load_explicit(&c->opened, memory_order_relaxed),
        .calls_closed = atomic_load_explicit(&c->closed, memory_order_relaxed),
        .messages_sent = atomic_load_explicit(&c->sent, memory_order_relaxed),
        .messages_received = atomic_load_explicit(&c->received, memory_order_relaxed),
        .dead_on_arrival = atomic_load_explicit(&c->dead_on_arrival, memory_order_relaxed),
        .refused_full = atomic_load_explicit(&c->refused_full, memory_order_relaxed),
        .unknown_methods = atomic_load_explicit(&c->unknown_methods, memory_order_relaxed),
        .stalled = atomic_load_explicit(&c->stalled, memory_order_relaxed),
        .overflowed = atomic_load_explicit(&c->overflowed, memory_order_relaxed),
    };
    pthread_mutex_lock(&rpc->lock);
    out->calls_live = rpc->calls_live;
    out->slots_armed = rpc->slots_armed;
    pthread_mutex_unlock(&rpc->lock);
}

/* ---- server, from outside --------------------------------------------------------------- */

struct args {
    grpc_arg list[ARGS_MAX];
    size_t len;
};

static void args_put(struct args *args, const char *key, int64_t value) {
    CHECK_OP(args->len, <, ARGS_MAX);
    CHECK_OP(value, <=, INT32_MAX);
    /* gRPC 1.51 takes `char *` for keys that it only reads. */
    args->list[args->len++] = (grpc_arg){
        .type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)key, .value.integer = (int)value};
}

static uint32_t or_default(uint32_t value, uint32_t fallback) {
    return value != 0 ? value : fallback;
}

/* What both sides share. Pings go on without calls and without data: a stopped peer of an idle
 * session was not noticed in 20 s otherwise (measured). */
static void args_put_common(struct args *args, uint32_t receive_bytes_max, uint32_t keepalive_ms,
                            uint32_t keepalive_timeout_ms) {
    args_put(args, GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
             or_default(receive_bytes_max, RECEIVE_BYTES_DEFAULT));
    args_put(args, GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, -1);
    args_put(args, GRPC_ARG_KEEPALIVE_TIME_MS, or_default(keepalive_ms, KEEPALIVE_MS_DEFAULT));
    args_put(args, GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
             or_default(keepalive_timeout_ms, KEEPALIVE_TIMEOUT_MS_DEFAULT));
    args_put(args, GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    args_put(args, GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
}

enum status rpc_server_create(struct rpc *rpc, const char *listen,
                              const struct rpc_credentials *credentials,
                              const struct rpc_server_options *options, struct rpc_server **out,
                              struct rpc_error *error_out) {
    CHECK(credentials == NULL); /* no other kind can be made in this build */
    struct address address;
    enum status status = address_parse(listen, &address, error_out);
    if (status != STATUS_OK) {
        return status;
    }
    struct rpc_server *server = calloc(1, sizeof *server);
    CHECK(server != NULL);
    server->rpc = rpc;
    server->address = address;
    if (options != NULL) {
        server->options = *options;
    }
    const struct rpc_server_options *set = &server->options;
    server->drained = (struct op){.kind = OP_DRAINED, .owner = server};
    server->start_mail.run = server_start_run;
    server->drain_mail.run = server_drain_run;
    server->methods[METHODS_MAX] = (struct method){
        .kind = RPC_KIND_UNARY,
        .queue_bytes_max = QUEUE_BYTES_DEFAULT,
        .stall = span_ms(or_default(set->stall_ms, STALL_MS_DEFAULT)),
    };

    struct args args = {.len = 0};
    args_put_common(&args, set->receive_bytes_max, set->keepalive_ms, set->keepalive_timeout_ms);
    args_put(&args, GRPC_ARG_ALLOW_REUSEPORT, 0); /* a taken port must fail */
    args_put(&args, GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 300);
    args_put(&args, GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 10000);
    if (set->streams_max != 0) {
        args_put(&args, GRPC_ARG_MAX_CONCURRENT_STREAMS, set->streams_max);
    }
    if (set->lookahead_bytes != 0) {
        args_put(&args, GRPC_ARG_HTTP2_BDP_PROBE, 0);
        args_put(&args, GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, set->lookahead_bytes);
    }
    grpc_channel_args channel_args = {.num_args = args.len, .args = args.list};
    server->grpc = grpc_server_create(&channel_args, NULL);
    grpc_server_register_completion_queue(server->grpc, rpc->queue, NULL);

    pthread_mutex_lock(&rpc->lock);
    CHECK_OP(rpc->servers_len, <, SERVERS_MAX);
    rpc->servers[rpc->servers_len++] = server;
    pthread_mutex_unlock(&rpc->lock);
    *out = server;
    return STATUS_OK;
}

enum status rpc_server_method(struct rpc_server *server, const struct rpc_method *method) {
    CHECK_OP(rpc_server_port(server), ==, 0);
    CHECK(method->handlers != NULL && method->handlers->on_open != NULL &&
          method->handlers->on_closed != NULL);
    CHECK_OP(server->methods_len, <, METHODS_MAX);
    const char *slash = method->path[0] == '/' ? strchr(method->path + 1, '/') : NULL;
    if (slash == NULL || slash == method->path + 1 || slash[1] == '\0') {
        return STATUS_INVALID;
    }
    for (uint32_t i = 0; i < server->methods_len; i++) {
        if (strcmp(server->methods[i].path, method->path) == 0) {
            return STATUS_EXISTS;
        }
    }
    struct method *to = &server->methods[server->methods_len];
    *to = (struct method){
        .path = strdup(method->path),
        .service_len = (size_t)(slash - method->path) - 1,
        .kind = method->kind,
        .handlers = method->handlers,
        .ctx = method->ctx,
        .queue_bytes_max =
            or_default(method->queue_bytes_max,
                       or_default(server->options.queue_bytes_max, QUEUE_BYTES_DEFAULT)),
        .stall = span_ms(
            or_default(method->stall_ms, or_default(server->options.stall_ms, STALL_MS_DEFAULT))),
    };
    CHECK(to->path != NULL);
    to->registered = grpc_server_register_method(server->grpc, to->path, NULL,
                                                 to->kind == RPC_KIND_BIDI
                                                     ? GRPC_SRM_PAYLOAD_NONE
                                                     : GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER,
                                                 0);
    CHECK(to->registered != NULL);
    server->methods_len++;
    return STATUS_OK;
}

enum status rpc_server_start(struct rpc_server *server, struct rpc_error *error_out) {
    CHECK(!rpc_on_thread(server->rpc));
    CHECK_OP(rpc_server_port(server), ==, 0);
    enum status status = address_probe(&server->address, error_out);
    if (status != STATUS_OK) {
        return status;
    }
    grpc_server_credentials *plain = grpc_insecure_server_credentials_create();
    int port = grpc_server_add_http2_port(server->grpc, server->address.text, plain);
    grpc_server_credentials_release(plain);
    if (port == 0) {
        rpc_error_set(error_out, "cannot listen on %.100s: the port was taken a moment ago",
                      server->address.text);
        return STATUS_EXISTS;
    }
    grpc_server_start(server->grpc);
    pthread_mutex_lock(&server->rpc->lock);
    server->is_started = true;
    pthread_mutex_unlock(&server->rpc->lock);
    atomic_store_explicit(&server->port, (uint32_t)port, memory_order_release);
    if (!mailbox_post(&server->rpc->box, &server->start_mail)) {
        rpc_error_set(error_out, "the program is shutting down");
        return STATUS_CANCELLED;
    }
    return STATUS_OK;
}

uint16_t rpc_server_port(const struct rpc_server *server) {
    return (uint16_t)atomic_load_explicit(&server->port, memory_order_acquire);
}

bool rpc_server_service(const struct rpc_server *server, uint32_t index, const char **name_out,
                        size_t *len_out) {
    for (uint32_t i = 0; i < server->methods_len; i++) {
        const struct method *method = &server->methods[i];
        bool is_new = true;
        for (uint32_t j = 0; j < i && is_new; j++) {
            is_new = server->methods[j].service_len != method->service_len ||
                     memcmp(server->methods[j].path, method->path, method->service_len + 1) != 0;
        }
        if (is_new && index-- == 0) {
            *name_out = method->path + 1;
            *len_out = method->service_len;
            return true;
        }
    }
    return false;
}

void rpc_server_drain(struct rpc_server *server) {
    if (rpc_on_thread(server->rpc)) {
        server_drain_now(server);
        return;
    }
    if (!atomic_exchange(&server->is_drain_asked, true)) {
        /* Refused only after rpc_shutdown drained it already. */
        (void)!mailbox_post(&server->rpc->box, &server->drain_mail);
    }
}

/* ---- client, from outside --------------------------------------------------------------- */

enum status rpc_channel_open(struct rpc *rpc, const char *target,
                             const struct rpc_credentials *credentials,
                             const struct rpc_channel_options *options, struct rpc_channel **out,
                             struct rpc_error *error_out) {
    CHECK(credentials == NULL); /* no other kind can be made in this build */
    struct address address;
    enum status status = address_parse(target, &address, error_out);
    if (status != STATUS_OK) {
        return status;
    }
    struct rpc_channel_options set = {0};
    if (options != NULL) {
        set = *options;
    }
    struct args args = {.len = 0};
    args_put_common(&args, set.receive_bytes_max, set.keepalive_ms, set.keepalive_timeout_ms);
    args_put(&args, GRPC_ARG_ENABLE_RETRIES, 0); /* the core decides about retries */
    args_put(&args, GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    args_put(&args, GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    args_put(&args, GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000); /* also the time to connect */
    args_put(&args, GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
    args_put(&args, GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 1000);
    if (set.own_connection) {
        args_put(&args, GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    }
    grpc_channel_args channel_args = {.num_args = args.len, .args = args.list};
    char url[sizeof address.text + 8];
    (void)snprintf(url, sizeof url, "dns:///%s", address.text); /* fits */
    grpc_channel_credentials *plain = grpc_insecure_credentials_create();
    struct rpc_channel *channel = calloc(1, sizeof *channel);
    CHECK(channel != NULL);
    channel->rpc = rpc;
    channel->grpc = grpc_channel_create(url, plain, &channel_args);
    grpc_channel_credentials_release(plain);
    pthread_mutex_lock(&rpc->lock);
    channel->next = rpc->channels;
    if (channel->next != NULL) {
        channel->next->prev = channel;
    }
    rpc->channels = channel;
    pthread_mutex_unlock(&rpc->lock);
    *out = channel;
    return STATUS_OK;
}

void rpc_channel_close(struct rpc_channel *channel) {
    if (channel == NULL) {
        return;
    }
    struct rpc *rpc = channel->rpc;
    pthread_mutex_lock(&rpc->lock);
    if (channel->next != NULL) {
        channel->next->prev = channel->prev;
    }
    if (channel->prev != NULL) {
        channel->prev->next = channel->next;
    } else {
        rpc->channels = channel->next;
    }
    grpc_channel *grpc = channel->grpc; /* NULL after rpc_shutdown */
    pthread_mutex_unlock(&rpc->lock);
    if (grpc != NULL) {
        grpc_channel_destroy(grpc);
    }
    free(channel);
}

enum status rpc_call_start(struct rpc_channel *channel, const struct rpc_call_config *config,
                           struct rpc_call_id *call_out) {
    struct rpc *rpc = channel->rpc;
    CHECK(config->handlers != NULL && config->handlers->on_closed != NULL);
    CHECK(config->kind != RPC_KIND_BIDI || config->payload.len == 0);
    struct pairs headers;
    if (config->method == NULL || config->method[0] != '/' ||
        !pairs_copy(&headers, config->headers, config->headers_len)) {
        return STATUS_INVALID;
    }
    pthread_mutex_lock(&rpc->lock);
    struct rpc_call *call = NULL;
    enum status status = STATUS_OK;
    if (rpc->is_closing) {
        status = STATUS_CANCELLED;
    } else if (rpc->calls_live >= rpc->calls_max || (call = call_take_locked(rpc)) == NULL) {
        status = STATUS_BUSY;
    } else {
        rpc->calls_live++; /* from now on shutdown waits for it */
    }
    pthread_mutex_unlock(&rpc->lock);
    if (status != STATUS_OK) {
        pairs_free(&headers);
        return status;
    }
    call->kind = config->kind;
    call->handlers = config->handlers;
    call->ctx = config->ctx;
    call->deadline = config->deadline;
    call->headers_out = headers;
    call->queue_bytes_max = or_default(config->queue_bytes_max, QUEUE_BYTES_DEFAULT);
    call->stall = span_ms(or_default(config->stall_ms, STALL_MS_DEFAULT));
    if (config->kind != RPC_KIND_BIDI) {
        grpc_slice slice =
            grpc_slice_from_copied_buffer((const char *)config->payload.data, config->payload.len);
        call->payload = grpc_raw_byte_buffer_create(&slice, 1);
        grpc_slice_unref(slice);
    }
    grpc_slice method = grpc_slice_from_copied_string(config->method);
    call->grpc = grpc_channel_create_call(channel->grpc, NULL, GRPC_PROPAGATE_DEFAULTS, rpc->queue,
                                          method, NULL, timespec_from(config->deadline), NULL);
    grpc_slice_unref(method);
    count(&rpc->counts.opened);
    *call_out = (struct rpc_call_id){call->id};
    pthread_mutex_lock(&rpc->lock);
    call->state = CALL_OPEN;
    call->is_accepting = true;
    if (rpc->is_closing) { /* it may have missed the round of cancel_all_run */
        (void)!call_wish_kill_locked(call, RPC_END_SHUTDOWN, RPC_CODE_UNAVAILABLE,
                                     "the program is shutting down");
    }
    call_touch_unlock(call);
    return STATUS_OK;
}
