/* Unary calls: made on the user's thread, run on the rpc thread, ended there exactly once. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "etcd/etcd.h"
#include "etcd/internal.h"
#include "etcd/proto/etcdserverpb.pb-c.h"
#include "runtime/clock.h"

#define RANGE_RESTARTS_MAX 8u /* of a range whose pages vanish under it */

enum call_kind {
    CALL_RANGE,
    CALL_PUT,
    CALL_DELETE,
    CALL_TXN,
    CALL_COMPACT,
    CALL_GRANT,
    CALL_REVOKE,
    CALL_TTL,
    CALL_WAIT, /* only time */
};

struct call {
    struct member member; /* first: etcd->calls */
    struct mail mail;
    struct etcd *etcd;
    enum call_kind kind;
    bool is_retried; /* repeated until the deadline */
    bool is_counted; /* against calls_max */
    bool is_cancelled;
    etcd_done done;
    void *ctx;
    uint8_t *request; /* packed; of a range: the next page's */
    size_t request_len;

    bool is_running;
    struct rpc_call_id rpc_call;
    uint32_t endpoint;
    struct span waits; /* the attempt's time */
    struct instant next_at;
    struct instant deadline;
    ProtobufCMessage *response; /* of this attempt */
    bool is_garbled;
    enum status last_status; /* why the last attempt failed */
    struct etcd_error last_error;

    struct etcd_range range; /* CALL_RANGE; key is a copy of our own */
    Etcdserverpb__RangeResponse **pages;
    size_t pages_len;
    size_t pages_cap;
    size_t kvs_len;
    size_t bytes;
    uint32_t restarts;
};

static const struct {
    const char *method;
    const ProtobufCMessageDescriptor *response;
} call_kinds[] = {
    [CALL_RANGE] = {"/etcdserverpb.KV/Range", &etcdserverpb__range_response__descriptor},
    [CALL_PUT] = {"/etcdserverpb.KV/Put", &etcdserverpb__put_response__descriptor},
    [CALL_DELETE] = {"/etcdserverpb.KV/DeleteRange",
                     &etcdserverpb__delete_range_response__descriptor},
    [CALL_TXN] = {"/etcdserverpb.KV/Txn", &etcdserverpb__txn_response__descriptor},
    [CALL_COMPACT] = {"/etcdserverpb.KV/Compact", &etcdserverpb__compaction_response__descriptor},
    [CALL_GRANT] = {"/etcdserverpb.Lease/LeaseGrant",
                    &etcdserverpb__lease_grant_response__descriptor},
    [CALL_REVOKE] = {"/etcdserverpb.Lease/LeaseRevoke",
                     &etcdserverpb__lease_revoke_response__descriptor},
    [CALL_TTL] = {"/etcdserverpb.Lease/LeaseTimeToLive",
                  &etcdserverpb__lease_time_to_live_response__descriptor},
    [CALL_WAIT] = {NULL, NULL},
};

static void call_pack(struct call *call, const ProtobufCMessage *message) {
    free(call->request);
    call->request_len = protobuf_c_message_get_packed_size(message);
    call->request = etcd_alloc(call->request_len);
    (void)protobuf_c_message_pack(message, call->request);
}

static ProtobufCBinaryData borrowed(struct bytes bytes) {
    return (ProtobufCBinaryData){
        .len = bytes.len,
        .data = (uint8_t *)(uintptr_t)bytes.data /* protobuf-c has no const; pack only reads */
    };
}

static struct bytes bytes_of(ProtobufCBinaryData data) {
    return (struct bytes){data.data, data.len};
}

static struct bytes bytes_copy(struct bytes bytes) {
    uint8_t *copy = etcd_alloc(bytes.len);
    if (bytes.len > 0) {
        memcpy(copy, bytes.data, bytes.len);
    }
    return (struct bytes){copy, bytes.len};
}

/* ---- making ---------------------------------------------------------------------------------- */

static struct call *call_make(struct etcd *etcd, enum call_kind kind, struct span timeout,
                              etcd_done done, void *ctx) {
    struct call *call = etcd_alloc(sizeof(*call));
    call->etcd = etcd;
    call->kind = kind;
    call->done = done;
    call->ctx = ctx;
    call->deadline = instant_add(clock_now(), timeout);
    return call;
}

static void call_free(struct call *call) {
    if (call->response != NULL) {
        protobuf_c_message_free_unpacked(call->response, NULL);
    }
    for (size_t i = 0; i < call->pages_len; i++) {
        etcdserverpb__range_response__free_unpacked(call->pages[i], NULL);
    }
    free(call->pages);
    free((uint8_t *)(uintptr_t)call->range.key.data);
    free(call->request);
    free(call);
}

static void range_pack(struct call *call, struct bytes from) {
    const struct etcd_range *range = &call->range;
    uint8_t zero = 0;
    uint8_t *end = etcd_alloc(range->key.len + 1);
    Etcdserverpb__RangeRequest request = ETCDSERVERPB__RANGE_REQUEST__INIT;
    request.key = borrowed(from.len == 0 ? (struct bytes){&zero, 1} : from);
    if (range->is_prefix) {
        request.range_end = (ProtobufCBinaryData){.len = prefix_end(range->key, end), .data = end};
    }
    int64_t page = call->etcd->config.page_keys;
    int64_t left = range->limit > 0 ? range->limit - (int64_t)call->kvs_len : page;
    request.limit = left < page ? left : page;
    request.revision = range->revision;
    if (call->pages_len > 0 && range->revision == 0) {
        request.revision = call->pages[0]->header->revision;
    }
    request.serializable = range->is_serializable;
    request.keys_only = range->is_keys_only;
    call_pack(call, &request.base);
    free(end);
}

/* Forgets the pages read so far. */
static void range_restart(struct call *call) {
    call->restarts++;
    for (size_t i = 0; i < call->pages_len; i++) {
        etcdserverpb__range_response__free_unpacked(call->pages[i], NULL);
    }
    call->pages_len = 0;
    call->kvs_len = 0;
    call->bytes = 0;
    range_pack(call, call->range.key);
}

static struct call *range_make(struct etcd *etcd, const struct etcd_range *range, etcd_done done,
                               void *ctx) {
    struct call *call = call_make(etcd, CALL_RANGE, etcd->config.call_timeout, done, ctx);
    call->range = *range;
    call->range.key = bytes_copy(range->key);
    call->is_retried = true;
    range_pack(call, call->range.key);
    return call;
}

/* ---- ending ---------------------------------------------------------------------------------- */

static void header_read(struct etcd_header *to, const Etcdserverpb__ResponseHeader *from) {
    if (from != NULL) {
        *to = (struct etcd_header){.cluster_id = from->cluster_id,
                                   .member_id = from->member_id,
                                   .revision = from->revision,
                                   .raft_term = from->raft_term};
    }
}

static void kv_read(struct etcd_kv *to, const Mvccpb__KeyValue *from) {
    *to = (struct etcd_kv){.key = bytes_of(from->key),
                           .value = bytes_of(from->value),
                           .create_revision = from->create_revision,
                           .mod_revision = from->mod_revision,
                           .version = from->version,
                           .lease = from->lease};
}

static struct etcd_kv *kvs_read(Mvccpb__KeyValue *const *from, size_t len) {
    struct etcd_kv *kvs = etcd_alloc(len * sizeof(*kvs));
    for (size_t i = 0; i < len; i++) {
        kv_read(&kvs[i], from[i]);
    }
    return kvs;
}

/* Unlinks, tells and frees. Only from calls_tick, the call's own first mail or its on_closed. */
static void call_finish(struct call *call, struct etcd_reply *reply) {
    struct etcd *etcd = call->etcd;
    CHECK(!call->is_running);
    member_unlink(&call->member);
    if (reply->message == NULL) {
        reply->message = "";
    }
    if (call->is_counted) {
        atomic_fetch_sub(&etcd->calls_live, 1);
    }
    call->done(call->ctx, reply);
    call_free(call);
    etcd_leave(etcd);
}

static void call_fail(struct call *call, enum status status, const char *message) {
    struct etcd_reply reply = {.status = status, .message = message};
    reply.is_compacted =
        call->kind == CALL_RANGE && status == STATUS_RANGE && strstr(message, "compacted") != NULL;
    call_finish(call, &reply);
}

static void range_finish(struct call *call) {
    const Etcdserverpb__RangeResponse *first = call->pages[0];
    const Etcdserverpb__RangeResponse *last = call->pages[call->pages_len - 1];
    struct etcd_kv *kvs = etcd_alloc(call->kvs_len * sizeof(*kvs));
    size_t len = 0;
    for (size_t i = 0; i < call->pages_len; i++) {
        for (size_t j = 0; j < call->pages[i]->n_kvs; j++) {
            kv_read(&kvs[len++], call->pages[i]->kvs[j]);
        }
    }
    struct etcd_reply reply = {.status = STATUS_OK,
                               .kvs = kvs,
                               .kvs_len = len,
                               .count = first->count,
                               .has_more = last->more};
    header_read(&reply.header, first->header);
    call_finish(call, &reply);
    free(kvs);
}

static void txn_finish(struct call *call, const Etcdserverpb__TxnResponse *txn) {
    struct etcd_reply reply = {.status = STATUS_OK, .succeeded = txn->succeeded};
    header_read(&reply.header, txn->header);
    struct etcd_op_result *results = etcd_alloc(txn->n_responses * sizeof(*results));
    for (size_t i = 0; i < txn->n_responses; i++) {
        const Etcdserverpb__ResponseOp *op = txn->responses[i];
        switch (op->response_case) {
        case ETCDSERVERPB__RESPONSE_OP__RESPONSE_RESPONSE_RANGE:
            results[i].kind = ETCD_OP_RANGE;
            results[i].kvs = kvs_read(op->response_range->kvs, op->response_range->n_kvs);
            results[i].kvs_len = op->response_range->n_kvs;
            results[i].count = op->response_range->count;
            break;
        case ETCDSERVERPB__RESPONSE_OP__RESPONSE_RESPONSE_DELETE_RANGE:
            results[i].kind = ETCD_OP_DELETE;
            results[i].deleted = op->response_delete_range->deleted;
            break;
        case ETCDSERVERPB__RESPONSE_OP__RESPONSE_RESPONSE_PUT:
        case ETCDSERVERPB__RESPONSE_OP__RESPONSE__NOT_SET:
        case _ETCDSERVERPB__RESPONSE_OP__RESPONSE__CASE_IS_INT_SIZE:
            results[i].kind = ETCD_OP_PUT;
            break;
        }
    }
    reply.results = results;
    reply.results_len = txn->n_responses;
    size_t len = txn->n_responses;
    call_finish(call, &reply); /* txn is gone after this */
    for (size_t i = 0; i < len; i++) {
        free((void *)(uintptr_t)results[i].kvs);
    }
    free(results);
}

/* The whole answer is in call->response. */
static void call_succeed(struct call *call) {
    struct etcd_reply reply = {.status = STATUS_OK};
    const void *response = call->response;
    switch (call->kind) {
    case CALL_RANGE: range_finish(call); return;
    case CALL_TXN: txn_finish(call, response); return;
    case CALL_PUT:
        header_read(&reply.header, ((const Etcdserverpb__PutResponse *)response)->header);
        break;
    case CALL_DELETE: {
        const Etcdserverpb__DeleteRangeResponse *deleted = response;
        header_read(&reply.header, deleted->header);
        reply.deleted = deleted->deleted;
        break;
    }
    case CALL_COMPACT:
        header_read(&reply.header, ((const Etcdserverpb__CompactionResponse *)response)->header);
        break;
    case CALL_GRANT: {
        const Etcdserverpb__LeaseGrantResponse *grant = response;
        header_read(&reply.header, grant->header);
        reply.lease = grant->id;
        reply.ttl_s = grant->ttl;
        break;
    }
    case CALL_REVOKE:
        header_read(&reply.header, ((const Etcdserverpb__LeaseRevokeResponse *)response)->header);
        break;
    case CALL_TTL: {
        const Etcdserverpb__LeaseTimeToLiveResponse *ttl = response;
        header_read(&reply.header, ttl->header);
        reply.lease = ttl->id;
        reply.ttl_s = ttl->ttl;
        reply.granted_s = ttl->grantedttl;
        break;
    }
    case CALL_WAIT: break;
    }
    call_finish(call, &reply);
}

/* ---- running --------------------------------------------------------------------------------- */

static void call_on_message(void *ctx, struct rpc_call_id id, const uint8_t *data, size_t len) {
    struct call *call = ctx;
    (void)id;
    if (call->response == NULL) {
        call->response =
            protobuf_c_message_unpack(call_kinds[call->kind].response, NULL, len, data);
        call->is_garbled = call->response == NULL;
        call->bytes += len;
    }
}

static void call_try(struct call *call, struct instant now);

/* Takes the page; true if another one is to be read. */
static bool range_next_page(struct call *call) {
    Etcdserverpb__RangeResponse *page = (Etcdserverpb__RangeResponse *)(void *)call->response;
    call->response = NULL;
    if (call->pages_len > 0 && page->header->cluster_id != call->pages[0]->header->cluster_id &&
        call->restarts < RANGE_RESTARTS_MAX) {
        etcdserverpb__range_response__free_unpacked(page, NULL); /* endpoints of two clusters */
        range_restart(call);
        return true;
    }
    if (call->pages_len == call->pages_cap) {
        call->pages_cap = call->pages_cap == 0 ? 4 : call->pages_cap * 2;
        call->pages = realloc(call->pages, call->pages_cap * sizeof(call->pages[0]));
        CHECK(call->pages != NULL);
    }
    call->pages[call->pages_len++] = page;
    call->kvs_len += page->n_kvs;
    bool is_full = call->range.limit > 0 && (int64_t)call->kvs_len >= call->range.limit;
    if (!page->more || page->n_kvs == 0 || is_full) {
        return false;
    }
    ProtobufCBinaryData last = page->kvs[page->n_kvs - 1]->key;
    uint8_t *from = etcd_alloc(last.len + 1); /* the least key after the last one: a 0 appended */
    if (last.len > 0) {                       /* an empty key comes without data */
        memcpy(from, last.data, last.len);
    }
    range_pack(call, (struct bytes){from, last.len + 1});
    free(from);
    return true;
}

static bool range_is_compacted_between_pages(const struct call *call) {
    return call->kind == CALL_RANGE && call->range.revision == 0 && call->pages_len > 0 &&
           call->last_status == STATUS_RANGE && call->restarts < RANGE_RESTARTS_MAX;
}

static void call_on_closed(void *ctx, struct rpc_call_id id, const struct rpc_outcome *outcome) {
    struct call *call = ctx;
    struct etcd *etcd = call->etcd;
    struct instant now = clock_now();
    (void)id;
    call->is_running = false;
    bool is_answer = outcome->code == RPC_CODE_OK && call->response != NULL;
    if (is_answer && call->kind == CALL_RANGE) {
        is_answer = ((Etcdserverpb__RangeResponse *)(void *)call->response)->header != NULL;
        call->is_garbled = !is_answer;
    }
    if (is_answer) {
        endpoint_worked(etcd, call->endpoint);
        if (call->kind == CALL_RANGE && range_next_page(call)) {
            if (call->bytes > etcd->config.range_bytes_max) {
                call_fail(call, STATUS_RANGE,
                          "the range is larger than range_bytes_max: read less at once");
                return;
            }
            call->deadline = instant_add(now, etcd->config.call_timeout);
            call_try(call, now);
            return;
        }
        call_succeed(call);
        return;
    }
    if (outcome->end == RPC_END_SHUTDOWN || call->is_cancelled || atomic_load(&etcd->is_closing)) {
        call_fail(call, STATUS_CANCELLED, "the etcd client closes");
        return;
    }
    bool is_endpoints_fault = true;
    if (call->is_garbled) {
        call->last_status = STATUS_CORRUPT;
        etcd_error_set(&call->last_error, "etcd at %s sent an answer that cannot be read",
                       etcd->endpoints[call->endpoint].address);
    } else {
        is_endpoints_fault = outcome_explain(etcd, call->endpoint, outcome, call->waits,
                                             &call->last_status, &call->last_error);
    }
    if (call->response != NULL) {
        protobuf_c_message_free_unpacked(call->response, NULL);
        call->response = NULL;
    }
    if (is_endpoints_fault) {
        endpoint_failed(etcd, call->endpoint, now);
        if (call->is_retried) {
            call_try(call, now);
            return;
        }
    } else {
        endpoint_worked(etcd, call->endpoint);
        if (range_is_compacted_between_pages(call)) {
            range_restart(call);
            call_try(call, now);
            return;
        }
    }
    call_fail(call, call->last_status, call->last_error.text);
}

static const struct rpc_handlers call_handlers = {
    .on_message = call_on_message,
    .on_closed = call_on_closed,
};

/* Starts the next attempt, or sets next_at, or ends the call. */
static void call_try(struct call *call, struct instant now) {
    struct etcd *etcd = call->etcd;
    if (call->is_cancelled || atomic_load(&etcd->is_closing)) {
        call_fail(call, STATUS_CANCELLED, "the etcd client closes");
        return;
    }
    if (call->kind == CALL_WAIT) {
        call->next_at = call->deadline;
        if (instant_reached(now, call->deadline)) {
            call_succeed(call);
        }
        return;
    }
    if (instant_reached(now, call->deadline)) {
        if (call->last_error.text[0] == 0) {
            etcd_error_set(&call->last_error, "no etcd endpoint was ready in time");
        }
        /* The deadline is what ended it; the sentence says what went wrong before. */
        call_fail(call, STATUS_TIMEOUT, call->last_error.text);
        return;
    }
    struct instant ready_at = now;
    if (!endpoint_pick(etcd, now, &call->endpoint, &ready_at)) {
        call->next_at = ready_at;
        return;
    }
    struct instant until =
        instant_min(call->deadline, instant_add(now, etcd->config.attempt_timeout));
    call->waits = instant_since(until, now);
    const struct rpc_call_config config = {
        .method = call_kinds[call->kind].method,
        .kind = RPC_KIND_UNARY,
        .deadline = until,
        .payload = {call->request, call->request_len},
        .handlers = &call_handlers,
        .ctx = call,
    };
    call->is_garbled = false;
    call->is_running = true;
    enum status status =
        rpc_call_start(etcd->endpoints[call->endpoint].channel, &config, &call->rpc_call);
    if (status == STATUS_OK) {
        return;
    }
    call->is_running = false;
    if (status == STATUS_BUSY) {
        etcd_error_set(&call->last_error, "too many rpc calls are alive in this process");
        call->next_at = instant_add(now, span_ms(ETCD_BACKOFF_MS));
        return;
    }
    call_fail(call, status, "the rpc layer takes no calls: it shuts down");
}

static void call_run(struct mail *mail, void *ctx) {
    (void)ctx;
    struct call *call =
        (struct call *)(void *)((unsigned char *)mail - offsetof(struct call, mail));
    member_link(&call->etcd->calls, &call->member);
    call_try(call, clock_now());
}

/* From any thread. Takes the call, whatever the outcome. */
static enum status call_submit(struct call *call) {
    struct etcd *etcd = call->etcd;
    enum status status = etcd_enter(etcd);
    if (status != STATUS_OK) {
        call_free(call);
        return status;
    }
    if (atomic_fetch_add(&etcd->calls_live, 1) >= etcd->config.calls_max) {
        status = STATUS_BUSY;
        goto fail;
    }
    call->is_counted = true;
    call->mail.run = call_run;
    if (!rpc_post(etcd->rpc, &call->mail)) {
        status = STATUS_CANCELLED;
        goto fail;
    }
    return STATUS_OK;
fail:
    atomic_fetch_sub(&etcd->calls_live, 1);
    call_free(call);
    etcd_leave(etcd);
    return status;
}

/* On the rpc thread, for the client itself: starts at the next tick at the latest. */
static struct call *call_submit_own(struct call *call) {
    CHECK(rpc_on_thread(call->etcd->rpc));
    atomic_fetch_add(&call->etcd->objects, 1);
    call->next_at = clock_now();
    member_link(&call->etcd->calls, &call->member);
    return call;
}

void call_cancel(struct call *call) {
    call->is_cancelled = true;
    call->next_at = (struct instant){0};
    if (call->is_running) {
        rpc_call_cancel(call->etcd->rpc, call->rpc_call);
    }
}

void calls_tick(struct etcd *etcd, struct instant now) {
    struct member *next = NULL;
    for (struct member *at = etcd->calls.next; at != &etcd->calls; at = next) {
        struct call *call = (struct call *)(void *)at;
        next = at->next; /* call_try may free `at`, and only `at` */
        if (!call->is_running && instant_reached(now, instant_min(call->next_at, call->deadline))) {
            call_try(call, now);
        }
    }
}

void calls_close(struct etcd *etcd) {
    for (struct member *at = etcd->calls.next; at != &etcd->calls; at = at->next) {
        call_cancel((struct call *)(void *)at);
    }
}

/* ---- the calls ------------------------------------------------------------------------------- */

enum status etcd_range(struct etcd *etcd, const struct etcd_range *range, etcd_done done,
                       void *ctx) {
    CHECK(done != NULL);
    if ((range->key.len == 0 && !range->is_prefix) || range->revision < 0 || range->limit < 0) {
        return STATUS_INVALID;
    }
    return call_submit(range_make(etcd, range, done, ctx));
}

enum status etcd_put(struct etcd *etcd, struct bytes key, struct bytes value, int64_t lease,
                     etcd_done done, void *ctx) {
    CHECK(done != NULL);
    if (key.len == 0) {
        return STATUS_INVALID;
    }
    struct call *call = call_make(etcd, CALL_PUT, etcd->config.call_timeout, done, ctx);
    Etcdserverpb__PutRequest request = ETCDSERVERPB__PUT_REQUEST__INIT;
    request.key = borrowed(key);
    request.value = borrowed(value);
    request.lease = lease;
    call_pack(call, &request.base);
    return call_submit(call);
}

enum status etcd_delete(struct etcd *etcd, struct bytes key, bool is_prefix, etcd_done done,
                        void *ctx) {
    CHECK(done != NULL);
    if (key.len == 0) {
        return STATUS_INVALID; /* an empty prefix would delete everything: not by accident */
    }
    struct call *call = call_make(etcd, CALL_DELETE, etcd->config.call_timeout, done, ctx);
    uint8_t *end = etcd_alloc(key.len + 1);
    Etcdserverpb__DeleteRangeRequest request = ETCDSERVERPB__DELETE_RANGE_REQUEST__INIT;
    request.key = borrowed(key);
    if (is_prefix) {
        request.range_end = (ProtobufCBinaryData){.len = prefix_end(key, end), .data = end};
    }
    call_pack(call, &request.base);
    free(end);
    return call_submit(call);
}

/* Room for one operation's messages; they borrow from the caller's op. */
struct op_room {
    Etcdserverpb__RequestOp op;
    Etcdserverpb__RangeRequest range;
    Etcdserverpb__PutRequest put;
    Etcdserverpb__DeleteRangeRequest delete_range;
    uint8_t *end;
};

static bool op_fill(struct op_room *room, const struct etcd_op *op) {
    if (op->key.len == 0 || op->limit < 0) {
        return false;
    }
    etcdserverpb__request_op__init(&room->op);
    room->end = etcd_alloc(op->key.len + 1);
    ProtobufCBinaryData end = {.len = 0, .data = NULL};
    if (op->is_prefix) {
        end = (ProtobufCBinaryData){.len = prefix_end(op->key, room->end), .data = room->end};
    }
    switch (op->kind) {
    case ETCD_OP_RANGE:
        etcdserverpb__range_request__init(&room->range);
        room->range.key = borrowed(op->key);
        room->range.range_end = end;
        room->range.limit = op->limit;
        room->op.request_case = ETCDSERVERPB__REQUEST_OP__REQUEST_REQUEST_RANGE;
        room->op.request_range = &room->range;
        return true;
    case ETCD_OP_PUT:
        etcdserverpb__put_request__init(&room->put);
        room->put.key = borrowed(op->key);
        room->put.value = borrowed(op->value);
        room->put.lease = op->lease;
        room->op.request_case = ETCDSERVERPB__REQUEST_OP__REQUEST_REQUEST_PUT;
        room->op.request_put = &room->put;
        return true;
    case ETCD_OP_DELETE:
        etcdserverpb__delete_range_request__init(&room->delete_range);
        room->delete_range.key = borrowed(op->key);
        room->delete_range.range_end = end;
        room->op.request_case = ETCDSERVERPB__REQUEST_OP__REQUEST_REQUEST_DELETE_RANGE;
        room->op.request_delete_range = &room->delete_range;
        return true;
    }
    return false;
}

static bool compare_fill(Etcdserverpb__Compare *to, const struct etcd_compare *from) {
    static const Etcdserverpb__Compare__CompareResult results[] = {
        [ETCD_COMPARE_EQUAL] = ETCDSERVERPB__COMPARE__COMPARE_RESULT__EQUAL,
        [ETCD_COMPARE_GREATER] = ETCDSERVERPB__COMPARE__COMPARE_RESULT__GREATER,
        [ETCD_COMPARE_LESS] = ETCDSERVERPB__COMPARE__COMPARE_RESULT__LESS,
        [ETCD_COMPARE_NOT_EQUAL] = ETCDSERVERPB__COMPARE__COMPARE_RESULT__NOT_EQUAL,
    };
    etcdserverpb__compare__init(to);
    if (from->key.len == 0 || (size_t)from->is >= sizeof(results) / sizeof(results[0])) {
        return false;
    }
    to->key = borrowed(from->key);
    to->result = results[from->is];
    switch (from->target) {
    case ETCD_COMPARE_VERSION:
        to->target = ETCDSERVERPB__COMPARE__COMPARE_TARGET__VERSION;
        to->target_union_case = ETCDSERVERPB__COMPARE__TARGET_UNION_VERSION;
        to->version = from->number;
        return true;
    case ETCD_COMPARE_CREATE_REVISION:
        to->target = ETCDSERVERPB__COMPARE__COMPARE_TARGET__CREATE;
        to->target_union_case = ETCDSERVERPB__COMPARE__TARGET_UNION_CREATE_REVISION;
        to->create_revision = from->number;
        return true;
    case ETCD_COMPARE_MOD_REVISION:
        to->target = ETCDSERVERPB__COMPARE__COMPARE_TARGET__MOD;
        to->target_union_case = ETCDSERVERPB__COMPARE__TARGET_UNION_MOD_REVISION;
        to->mod_revision = from->number;
        return true;
    case ETCD_COMPARE_VALUE:
        to->target = ETCDSERVERPB__COMPARE__COMPARE_TARGET__VALUE;
        to->target_union_case = ETCDSERVERPB__COMPARE__TARGET_UNION_VALUE;
        to->value = borrowed(from->value);
        return true;
    }
    return false;
}

enum status etcd_txn(struct etcd *etcd, const struct etcd_txn *txn, etcd_done done, void *ctx) {
    CHECK(done != NULL);
    size_t ops = txn->then_len + txn->else_len;
    struct op_room *rooms = etcd_alloc(ops * sizeof(*rooms));
    Etcdserverpb__RequestOp **op_list = etcd_alloc(ops * sizeof(*op_list));
    Etcdserverpb__Compare *compares = etcd_alloc(txn->compares_len * sizeof(*compares));
    Etcdserverpb__Compare **compare_list = etcd_alloc(txn->compares_len * sizeof(*compare_list));
    enum status status = STATUS_INVALID;
    for (size_t i = 0; i < txn->compares_len; i++) {
        if (!compare_fill(&compares[i], &txn->compares[i])) {
            goto out;
        }
        compare_list[i] = &compares[i];
    }
    for (size_t i = 0; i < ops; i++) {
        const struct etcd_op *op =
            i < txn->then_len ? &txn->then_ops[i] : &txn->else_ops[i - txn->then_len];
        if (!op_fill(&rooms[i], op)) {
            goto out;
        }
        op_list[i] = &rooms[i].op;
    }
    Etcdserverpb__TxnRequest request = ETCDSERVERPB__TXN_REQUEST__INIT;
    request.n_compare = txn->compares_len;
    request.compare = compare_list;
    request.n_success = txn->then_len;
    request.success = op_list;
    request.n_failure = txn->else_len;
    request.failure = op_list + txn->then_len;
    struct call *call = call_make(etcd, CALL_TXN, etcd->config.call_timeout, done, ctx);
    call_pack(call, &request.base);
    status = call_submit(call);
out:
    for (size_t i = 0; i < ops; i++) {
        free(rooms[i].end);
    }
    free(compare_list);
    free(compares);
    free(op_list);
    free(rooms);
    return status;
}

enum status etcd_compact(struct etcd *etcd, int64_t revision, etcd_done done, void *ctx) {
    CHECK(done != NULL);
    if (revision <= 0) {
        return STATUS_INVALID;
    }
    struct call *call = call_make(etcd, CALL_COMPACT, etcd->config.call_timeout, done, ctx);
    Etcdserverpb__CompactionRequest request = ETCDSERVERPB__COMPACTION_REQUEST__INIT;
    request.revision = revision;
    call_pack(call, &request.base);
    return call_submit(call);
}

static struct call *grant_make(struct etcd *etcd, int64_t ttl_s, etcd_done done, void *ctx) {
    struct call *call = call_make(etcd, CALL_GRANT, etcd->config.call_timeout, done, ctx);
    Etcdserverpb__LeaseGrantRequest request = ETCDSERVERPB__LEASE_GRANT_REQUEST__INIT;
    request.ttl = ttl_s;
    call_pack(call, &request.base);
    return call;
}

enum status etcd_lease_grant(struct etcd *etcd, int64_t ttl_s, etcd_done done, void *ctx) {
    CHECK(done != NULL);
    return ttl_s <= 0 ? STATUS_INVALID : call_submit(grant_make(etcd, ttl_s, done, ctx));
}

static struct call *revoke_make(struct etcd *etcd, int64_t lease, struct span within,
                                etcd_done done, void *ctx) {
    struct call *call = call_make(etcd, CALL_REVOKE, within, done, ctx);
    Etcdserverpb__LeaseRevokeRequest request = ETCDSERVERPB__LEASE_REVOKE_REQUEST__INIT;
    request.id = lease;
    call_pack(call, &request.base);
    return call;
}

enum status etcd_lease_revoke(struct etcd *etcd, int64_t lease, etcd_done done, void *ctx) {
    CHECK(done != NULL);
    if (lease == 0) {
        return STATUS_INVALID;
    }
    return call_submit(revoke_make(etcd, lease, etcd->config.call_timeout, done, ctx));
}

enum status etcd_lease_time_to_live(struct etcd *etcd, int64_t lease, etcd_done done, void *ctx) {
    CHECK(done != NULL);
    if (lease == 0) {
        return STATUS_INVALID;
    }
    struct call *call = call_make(etcd, CALL_TTL, etcd->config.call_timeout, done, ctx);
    Etcdserverpb__LeaseTimeToLiveRequest request = ETCDSERVERPB__LEASE_TIME_TO_LIVE_REQUEST__INIT;
    request.id = lease;
    call_pack(call, &request.base);
    call->is_retried = true;
    return call_submit(call);
}

enum status etcd_wait(struct etcd *etcd, struct span after, etcd_done done, void *ctx) {
    CHECK(done != NULL);
    return after.ns < 0 ? STATUS_INVALID
                        : call_submit(call_make(etcd, CALL_WAIT, after, done, ctx));
}

struct call *call_range(struct etcd *etcd, const struct etcd_range *range, etcd_done done,
                        void *ctx) {
    return call_submit_own(range_make(etcd, range, done, ctx));
}

struct call *call_grant(struct etcd *etcd, int64_t ttl_s, etcd_done done, void *ctx) {
    return call_submit_own(grant_make(etcd, ttl_s, done, ctx));
}

struct call *call_revoke(struct etcd *etcd, int64_t lease, struct span within, etcd_done done,
                         void *ctx) {
    struct call *call = revoke_make(etcd, lease, within, done, ctx);
    call->is_retried = true;
    return call_submit_own(call);
}
