/* A program of what an etcd can do to us: replies, streams that end, silence, time. Under the real
 * client (calls, leases, watches) and the fleet view of the registry lies a false rpc whose
 * messages come from the input: drawn answers with drawn keys and records, or raw bytes.
 *
 * Checked: each call ends once, a worker is lost only after it was seen, a lease says one thing at
 * a time, and whatever etcd did, closing ends everything. */
#include "etcd/etcd.c" /* its static tick: the client's own clock thread would be no program */

#include <fcntl.h>

#include "etcd/proto/etcdserverpb.pb-c.h"
#include "fuzz/fuzz.h"
#include "registry/fleet.h"
#include "runtime/clock.h"
#include "runtime/log.h"
#include "runtime/random.h"
#include "wire/registry.h"

#define CALLS_MAX   64u
#define MAILS_MAX   64u
#define PREFIX      "/baton/c/workers/"
#define WORKERS_MAX 4u

struct false_call {
    struct rpc_call_id id; /* 0 = free */
    char method[48];
    const struct rpc_handlers *handlers;
    void *ctx;
    bool is_cancelled;
};

struct rpc_channel {
    int unused;
};

static struct {
    struct input input;
    struct instant now;
    struct false_call calls[CALLS_MAX];
    uint64_t next_call;
    struct mail *mails[MAILS_MAX];
    uint32_t mail_count;
    bool is_on_thread;
    bool is_clock_stopped;
    bool is_closed;
    int64_t revision;
    uint32_t started; /* calls with a `done` */
    uint32_t ended;
    bool seen[WORKERS_MAX + 1];
    struct etcd *etcd;
    struct etcd_lease *lease;
    bool is_granted;
    bool is_lost;
} bed;

static struct rpc_channel channel;

/* --- the false rpc, clock and threads: these stand in for the libraries' functions ---------------
 */

struct instant clock_now(void) {
    return bed.now;
}

uint64_t random_u64(void) {
    return 1;
}

enum status thread_start(struct thread *thread, const struct thread_config *config) {
    (void)thread;
    (void)config;
    return STATUS_OK;
}

void thread_ask_stop(struct thread *thread) {
    (void)thread;
    bed.is_clock_stopped = true;
}

bool thread_stop_asked(const struct thread *thread) {
    (void)thread;
    return bed.is_clock_stopped;
}

enum status thread_join(struct thread *thread, struct instant deadline) {
    (void)thread;
    (void)deadline;
    return STATUS_OK;
}

void thread_beat(struct beat *beat) {
    (void)beat;
}

bool rpc_post(struct rpc *rpc, struct mail *mail) {
    (void)rpc;
    CHECK_OP(bed.mail_count, <, MAILS_MAX);
    bed.mails[bed.mail_count++] = mail;
    return true;
}

bool rpc_on_thread(const struct rpc *rpc) {
    (void)rpc;
    return bed.is_on_thread;
}

enum status rpc_channel_open(struct rpc *rpc, const char *target,
                             const struct rpc_credentials *credentials,
                             const struct rpc_channel_options *options, struct rpc_channel **out,
                             struct rpc_error *error_out) {
    (void)rpc;
    (void)target;
    (void)credentials;
    (void)options;
    (void)error_out;
    *out = &channel;
    return STATUS_OK;
}

void rpc_channel_close(struct rpc_channel *closed) {
    CHECK(closed == &channel);
}

static struct false_call *call_find(uint64_t id) {
    for (uint32_t i = 0; i < CALLS_MAX; i++) {
        if (bed.calls[i].id.v == id) {
            return &bed.calls[i];
        }
    }
    return NULL;
}

enum status rpc_call_start(struct rpc_channel *on, const struct rpc_call_config *config,
                           struct rpc_call_id *call_out) {
    struct false_call *call = call_find(0);
    CHECK(on == &channel);
    if (call == NULL) {
        return STATUS_BUSY;
    }
    *call = (struct false_call){
        .id = {++bed.next_call}, .handlers = config->handlers, .ctx = config->ctx};
    text_copy(call->method, sizeof call->method, config->method);
    *call_out = call->id;
    return STATUS_OK;
}

void rpc_call_send(struct rpc *rpc, struct rpc_call_id call, const void *data, size_t len) {
    (void)rpc;
    (void)call;
    CHECK(data != NULL || len == 0);
}

void rpc_call_cancel(struct rpc *rpc, struct rpc_call_id id) {
    (void)rpc;
    struct false_call *call = id.v != 0 ? call_find(id.v) : NULL;
    if (call != NULL) {
        call->is_cancelled = true;
    }
}

/* --- what arrives ----------------------------------------------------------------------------- */

static void call_closed(struct false_call *call, enum rpc_code code, enum rpc_end end,
                        const char *message) {
    struct false_call over = *call;
    *call = (struct false_call){0};
    struct rpc_outcome outcome = {.code = code, .message = message, .end = end};
    over.handlers->on_closed(over.ctx, over.id, &outcome);
}

static void mails_run(void) {
    bed.is_on_thread = true;
    while (bed.mail_count > 0) {
        struct mail *mail = bed.mails[0];
        bed.mail_count--;
        memmove(bed.mails, bed.mails + 1, bed.mail_count * sizeof(struct mail *));
        mail->run(mail, NULL);
    }
    for (uint32_t i = 0; i < CALLS_MAX; i++) {
        if (bed.calls[i].id.v != 0 && bed.calls[i].is_cancelled) {
            call_closed(&bed.calls[i], RPC_CODE_CANCELLED, RPC_END_CANCELLED, "cancelled");
        }
    }
}

static void tick(int64_t ms) {
    bed.now.ns += ms * 1000000;
    atomic_store(&bed.etcd->is_tick_posted, true);
    bed.is_on_thread = true;
    etcd_tick(&bed.etcd->tick_mail, NULL);
    mails_run();
}

static int64_t draw_number(void) {
    uint8_t how = input_u8(&bed.input);
    return how < 200   ? bed.revision + how % 8 - 3
           : how < 250 ? how % 8
                       : (int64_t)input_u64(&bed.input);
}

static Etcdserverpb__ResponseHeader *draw_header(void) {
    static Etcdserverpb__ResponseHeader header;
    uint8_t how = input_u8(&bed.input);
    etcdserverpb__response_header__init(&header);
    header.cluster_id = how < 248 ? 1 : 2;
    header.revision = how < 128 ? bed.revision : draw_number();
    header.raft_term = how % 16 == 0 ? 1 : 2;
    return how == 255 ? NULL : &header;
}

/* Keys and values: mostly records of a few workers, under their own key or another's. */
static void draw_kv(Mvccpb__KeyValue *kv, char *key, size_t key_cap, struct wire_buffer *value) {
    uint8_t how = input_u8(&bed.input);
    uint32_t worker = 1 + how % WORKERS_MAX;
    int len = how < 240 ? snprintf(key, key_cap, PREFIX "%016x", worker)
                        : snprintf(key, key_cap, "%s", how < 248 ? PREFIX "zz" : "");
    CHECK(len >= 0 && (size_t)len < key_cap);
    struct worker_record record = {.info = {.incarnation = {how < 224 ? worker : worker + 1},
                                            .role = ROLE_DECODE,
                                            .id = "w",
                                            .address = "h:1",
                                            .model = "m"}};
    record.pid = input_u8(&bed.input);
    CHECK_OP(worker_record_encode(&record, value), ==, STATUS_OK);
    mvccpb__key_value__init(kv);
    kv->key = (ProtobufCBinaryData){(size_t)len, (uint8_t *)key};
    kv->value = (ProtobufCBinaryData){value->len, value->data};
    if (record.pid > 250) { /* not a record */
        kv->value.len = record.pid % 2 == 0 ? value->len / 2 : 0;
    }
    kv->mod_revision = draw_number();
    kv->create_revision = kv->mod_revision;
    kv->version = 1;
}

#define KVS_MAX 8u
static struct {
    Mvccpb__KeyValue kvs[KVS_MAX];
    Mvccpb__KeyValue *list[KVS_MAX];
    Mvccpb__Event events[KVS_MAX];
    Mvccpb__Event *event_list[KVS_MAX];
    char keys[KVS_MAX][64];
    struct wire_buffer values[KVS_MAX];
} drawn;

static size_t draw_kvs(void) {
    size_t count = input_below(&bed.input, KVS_MAX + 1);
    for (size_t i = 0; i < count; i++) {
        draw_kv(&drawn.kvs[i], drawn.keys[i], sizeof drawn.keys[i], &drawn.values[i]);
        drawn.list[i] = &drawn.kvs[i];
    }
    return count;
}

static void message_deliver(struct false_call *call, const ProtobufCMessage *message) {
    size_t len = protobuf_c_message_get_packed_size(message);
    uint8_t *bytes = malloc(len + 1);
    CHECK(bytes != NULL);
    CHECK_OP(protobuf_c_message_pack(message, bytes), ==, len);
    call->handlers->on_message(call->ctx, call->id, bytes, len);
    free(bytes);
}

static void answer_range(struct false_call *call) {
    Etcdserverpb__RangeResponse range = ETCDSERVERPB__RANGE_RESPONSE__INIT;
    range.header = draw_header();
    range.n_kvs = draw_kvs();
    range.kvs = drawn.list;
    range.more = input_u8(&bed.input) > 240;
    range.count = (int64_t)range.n_kvs;
    message_deliver(call, &range.base);
}

static void answer_watch(struct false_call *call) {
    static char reason[] = "compacted";
    Etcdserverpb__WatchResponse watch = ETCDSERVERPB__WATCH_RESPONSE__INIT;
    uint8_t how = input_u8(&bed.input);
    watch.header = draw_header();
    watch.created = how < 100;
    watch.canceled = how >= 240;
    watch.compact_revision = how >= 248 ? draw_number() : 0;
    watch.fragment = how >= 230 && how < 240;
    if (how >= 240) {
        watch.cancel_reason = reason;
    }
    if (!watch.created || how < 8) {
        bed.revision++;
        watch.n_events = draw_kvs();
        for (size_t i = 0; i < watch.n_events; i++) {
            mvccpb__event__init(&drawn.events[i]);
            drawn.events[i].kv = input_u8(&bed.input) < 253 ? &drawn.kvs[i] : NULL;
            drawn.events[i].type = input_u8(&bed.input) < 100 ? MVCCPB__EVENT__EVENT_TYPE__DELETE
                                                              : MVCCPB__EVENT__EVENT_TYPE__PUT;
            drawn.event_list[i] = &drawn.events[i];
        }
        watch.events = drawn.event_list;
    }
    message_deliver(call, &watch.base);
}

static void answer_lease(struct false_call *call) {
    if (strcmp(call->method, "/etcdserverpb.Lease/LeaseGrant") == 0) {
        Etcdserverpb__LeaseGrantResponse grant = ETCDSERVERPB__LEASE_GRANT_RESPONSE__INIT;
        grant.header = draw_header();
        grant.id = input_u8(&bed.input) < 250 ? 5 : draw_number();
        grant.ttl = input_u8(&bed.input) < 250 ? 10 : draw_number();
        message_deliver(call, &grant.base);
    } else if (strcmp(call->method, "/etcdserverpb.Lease/LeaseKeepAlive") == 0) {
        Etcdserverpb__LeaseKeepAliveResponse alive = ETCDSERVERPB__LEASE_KEEP_ALIVE_RESPONSE__INIT;
        alive.header = draw_header();
        alive.id = input_u8(&bed.input) < 250 ? 5 : draw_number();
        alive.ttl = input_u8(&bed.input) < 240 ? 10 : draw_number();
        message_deliver(call, &alive.base);
    } else {
        Etcdserverpb__LeaseTimeToLiveResponse left =
            ETCDSERVERPB__LEASE_TIME_TO_LIVE_RESPONSE__INIT;
        left.header = draw_header();
        left.id = 5;
        left.ttl = draw_number();
        message_deliver(call, &left.base);
    }
}

static void answer_txn(struct false_call *call) {
    Etcdserverpb__TxnResponse txn = ETCDSERVERPB__TXN_RESPONSE__INIT;
    Etcdserverpb__ResponseOp op = ETCDSERVERPB__RESPONSE_OP__INIT;
    Etcdserverpb__RangeResponse range = ETCDSERVERPB__RANGE_RESPONSE__INIT;
    Etcdserverpb__DeleteRangeResponse deleted = ETCDSERVERPB__DELETE_RANGE_RESPONSE__INIT;
    Etcdserverpb__ResponseOp *ops[3] = {&op, &op, &op};
    uint8_t how = input_u8(&bed.input);
    txn.header = draw_header();
    txn.succeeded = how % 2 == 0;
    txn.n_responses = how % 4;
    txn.responses = ops;
    if (how < 128) {
        range.n_kvs = draw_kvs();
        range.kvs = drawn.list;
        op.response_case = ETCDSERVERPB__RESPONSE_OP__RESPONSE_RESPONSE_RANGE;
        op.response_range = &range;
    } else if (how < 200) {
        op.response_case = ETCDSERVERPB__RESPONSE_OP__RESPONSE_RESPONSE_DELETE_RANGE;
        op.response_delete_range = &deleted;
    }
    message_deliver(call, &txn.base);
}

static void answer(struct false_call *call) {
    if (input_u8(&bed.input) > 248) {
        uint8_t *copy = input_copy(input_bytes(&bed.input, input_u8(&bed.input)));
        free(copy);
        struct bytes raw = input_bytes(&bed.input, input_u8(&bed.input));
        copy = input_copy(raw);
        call->handlers->on_message(call->ctx, call->id, copy, raw.len);
        free(copy);
    } else if (strcmp(call->method, "/etcdserverpb.KV/Range") == 0) {
        answer_range(call);
    } else if (strcmp(call->method, "/etcdserverpb.Watch/Watch") == 0) {
        answer_watch(call);
    } else if (strcmp(call->method, "/etcdserverpb.KV/Txn") == 0) {
        answer_txn(call);
    } else {
        answer_lease(
            call); /* unary calls of other kinds get a strange answer, which is the point */
    }
}

static void network(void) {
    uint8_t how = input_u8(&bed.input);
    uint32_t skip = input_u8(&bed.input) % 4;
    struct false_call *call = NULL;
    for (uint32_t i = 0; i < CALLS_MAX; i++) {
        if (bed.calls[i].id.v != 0 && (call == NULL || skip > 0)) {
            skip -= call != NULL ? 1 : 0;
            call = &bed.calls[i];
        }
    }
    if (call == NULL) {
        return;
    }
    bed.is_on_thread = true;
    bool is_stream = strcmp(call->method, "/etcdserverpb.Watch/Watch") == 0 ||
                     strcmp(call->method, "/etcdserverpb.Lease/LeaseKeepAlive") == 0;
    uint64_t id = call->id.v;
    if (how < 200) {
        answer(call);
        call = call_find(id);
        if (call != NULL && !is_stream) { /* a unary call is over with its answer */
            call_closed(call, RPC_CODE_OK, RPC_END_STATUS, "");
        }
    } else if (how < 216) {
        call_closed(call, RPC_CODE_UNAVAILABLE, RPC_END_PEER, "failed to connect: x: refused");
    } else if (how < 224) {
        call_closed(call, RPC_CODE_OUT_OF_RANGE, RPC_END_STATUS,
                    "etcdserver: mvcc: required revision has been compacted");
    } else if (how < 232) {
        call_closed(call, RPC_CODE_NOT_FOUND, RPC_END_STATUS,
                    "etcdserver: requested lease not found");
    } else {
        call_closed(call, (enum rpc_code)(how % 17), RPC_END_DEADLINE, "");
    }
    mails_run();
}

/* --- those who use the client -------------------------------------------------------------------
 */

static void on_done(void *ctx, const struct etcd_reply *reply) {
    CHECK(ctx == &bed && reply->message != NULL);
    CHECK((reply->status == STATUS_OK) == (reply->message[0] == '\0'));
    unsigned sum = 0;
    for (size_t i = 0; i < reply->kvs_len; i++) {
        for (size_t k = 0; k < reply->kvs[i].value.len; k++) {
            sum += reply->kvs[i].value.data[k];
        }
    }
    for (size_t i = 0; i < reply->results_len; i++) {
        for (size_t k = 0; k < reply->results[i].kvs_len; k++) {
            sum += (unsigned)reply->results[i].kvs[k].key.len;
        }
    }
    bed.ended += sum == UINT32_MAX ? 1 : 1; /* the sum is there so that the bytes are read */
}

static void on_granted(void *ctx, int64_t lease, int64_t ttl_s) {
    (void)ctx;
    (void)lease;
    CHECK(!bed.is_granted && !bed.is_lost && ttl_s > 0);
    bed.is_granted = true;
}

static void on_lost(void *ctx, const char *message) {
    (void)ctx;
    CHECK(!bed.is_lost && message[0] != '\0');
    bed.is_lost = true;
}

static void on_lease_closed(void *ctx, bool is_revoked) {
    (void)ctx;
    (void)is_revoked;
    CHECK(bed.lease != NULL);
    bed.lease = NULL;
}

static const struct etcd_lease_handlers lease_handlers = {
    .on_granted = on_granted, .on_lost = on_lost, .on_closed = on_lease_closed};

static void on_seen(void *ctx, const struct worker_record *record) {
    (void)ctx;
    CHECK(record->info.incarnation.v > 0 && record->info.incarnation.v <= WORKERS_MAX);
    bed.seen[record->info.incarnation.v] = true;
}

static void on_worker_lost(void *ctx, struct incarnation incarnation) {
    (void)ctx;
    CHECK(incarnation.v <= WORKERS_MAX && bed.seen[incarnation.v]);
    bed.seen[incarnation.v] = false;
}

static const struct registry_fleet_handlers fleet_handlers = {.on_seen = on_seen,
                                                              .on_lost = on_worker_lost};

static void started(enum status status) {
    bed.started += status == STATUS_OK ? 1 : 0;
    mails_run();
}

static void user(void) {
    uint8_t how = input_u8(&bed.input);
    const struct etcd_range range = {.key = etcd_text(PREFIX), .is_prefix = true, .limit = how % 4};
    const struct etcd_op ops[2] = {{.kind = ETCD_OP_RANGE, .key = etcd_text("a")},
                                   {.kind = ETCD_OP_DELETE, .key = etcd_text("b")}};
    const struct etcd_txn txn = {.then_ops = ops, .then_len = 2};
    const struct etcd_lease_config keep = {.ttl_s = 10};
    switch (how % 8) {
    case 0: started(etcd_range(bed.etcd, &range, on_done, &bed)); break;
    case 1: started(etcd_put(bed.etcd, etcd_text("k"), etcd_text("v"), 0, on_done, &bed)); break;
    case 2: started(etcd_txn(bed.etcd, &txn, on_done, &bed)); break;
    case 3: started(etcd_lease_grant(bed.etcd, 10, on_done, &bed)); break;
    case 4: started(etcd_lease_time_to_live(bed.etcd, 5, on_done, &bed)); break;
    case 5: started(etcd_wait(bed.etcd, span_ms(how), on_done, &bed)); break;
    case 6:
        if (bed.lease == NULL) {
            bed.is_granted = bed.is_lost = false;
            CHECK_OP(etcd_lease_open(bed.etcd, &keep, &lease_handlers, NULL, &bed.lease), ==,
                     STATUS_OK);
            mails_run();
        }
        break;
    case 7:
        if (bed.lease != NULL) {
            etcd_lease_close(bed.lease, how < 128, span_ms(500));
            mails_run();
        }
        break;
    }
}

static void on_closed(void *ctx) {
    (void)ctx;
    bed.is_closed = true;
}

static void bed_end(struct fleet *fleet) {
    etcd_close(bed.etcd, on_closed, NULL);
    mails_run();
    for (uint32_t i = 0; i < 2000 && !bed.is_clock_stopped; i++) {
        tick(50);
    }
    CHECK(bed.is_clock_stopped); /* nothing is left that could keep it open */
    etcd_end(&bed.etcd->tick_mail, NULL);
    CHECK(bed.is_closed && bed.lease == NULL && bed.started == bed.ended);
    for (uint32_t i = 0; i < CALLS_MAX; i++) {
        CHECK_OP(bed.calls[i].id.v, ==, 0);
    }
    bed.is_on_thread = false;
    etcd_destroy(bed.etcd);
    fleet_destroy(fleet);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    static int quiet = -1;
    if (quiet < 0) {
        quiet = open("/dev/null", O_WRONLY | O_CLOEXEC);
        CHECK(quiet >= 0);
        log_set_fd(quiet);
    }
    memset(&bed, 0, sizeof bed);
    bed.input = input_of(data, len);
    bed.now.ns = 1000000000;
    bed.revision = 10;
    static char no_rpc;
    const struct etcd_config config = {.endpoints = "http://a:1,b:2", .calls_max = 16};
    CHECK_OP(etcd_create((struct rpc *)(void *)&no_rpc, &config, &bed.etcd, NULL), ==, STATUS_OK);
    struct fleet *fleet = fleet_create("/baton/c/");
    fleet_set_handlers(fleet, &fleet_handlers, NULL);
    fleet_start(fleet, bed.etcd);
    mails_run();
    while (bed.input.len > 0) {
        uint8_t what = input_u8(&bed.input);
        if (what < 140) {
            network();
        } else if (what < 200) {
            tick(what < 190 ? 50 : 1000);
        } else {
            user();
        }
    }
    bed_end(fleet);
    return 0;
}
