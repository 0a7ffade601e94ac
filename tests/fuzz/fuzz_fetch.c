/* The router's side of Files: a worker's answer, chunk by chunk, to the request for a model's
 * files, and what becomes of them; and the other routers' keys and records in etcd.
 *
 * Checked: a fetch ends once, with files that are the published ones or with a sentence; memory
 * stays inside the bounds; the table of routers holds who is there. */
#include "services/router/fetch.c"

#include "services/router/peers.c"

#include "fuzz/fuzz.h"

static struct {
    struct router router;
    const struct rpc_handlers *handlers;
    void *ctx;
    struct mail *posted;
    uint32_t ended; /* fetches that said how they ended */
    bool is_cancelled;
    bool is_fetched;
} bed;

/* ---- what stands in for the rest of the router ---- */

void models_fetched(struct router *router, struct model_version *version) {
    CHECK(router == &bed.router && version->tokenizer != NULL);
    bed.ended++;
    bed.is_fetched = true;
}

void models_failed(struct router *router, struct model_version *version, const char *sentence) {
    CHECK(router == &bed.router && version->tokenizer == NULL && sentence[0] != '\0');
    bed.ended++;
}

struct incarnation shell_incarnation(const struct shell *shell) {
    (void)shell;
    return (struct incarnation){1};
}

bool mailbox_post(struct mailbox *box, struct mail *mail) {
    CHECK(box == &bed.router.text[0].box);
    bed.posted = mail;
    return true;
}

static int no_channel;

enum status rpc_channel_open(struct rpc *rpc, const char *target,
                             const struct rpc_credentials *credentials,
                             const struct rpc_channel_options *options, struct rpc_channel **out,
                             struct rpc_error *error_out) {
    (void)rpc, (void)target, (void)credentials, (void)options, (void)error_out;
    *out = (struct rpc_channel *)(void *)&no_channel;
    return STATUS_OK;
}

void rpc_channel_close(struct rpc_channel *channel) {
    CHECK((void *)channel == &no_channel);
}

enum status rpc_call_start(struct rpc_channel *channel, const struct rpc_call_config *config,
                           struct rpc_call_id *call_out) {
    (void)channel;
    struct wire_arena arena = {0};
    struct files_request request;
    CHECK_OP(files_request_decode(config->payload, &arena, &request), ==, STATUS_OK);
    wire_arena_fini(&arena);
    bed.handlers = config->handlers;
    bed.ctx = config->ctx;
    *call_out = (struct rpc_call_id){1};
    return STATUS_OK;
}

void rpc_call_cancel(struct rpc *rpc, struct rpc_call_id call) {
    (void)rpc;
    CHECK(call.v == 1);
    bed.is_cancelled = true;
}

/* ---- a worker's answer ---- */

static const char tokenizer_file[] =
    "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}}";

/* The next bytes of the input up to a NUL are a file's text; the well-known one if empty. */
static struct bytes draw_file(struct input *input) {
    const uint8_t *end = input->len > 0 ? memchr(input->data, '\0', input->len) : NULL;
    size_t len = end != NULL ? (size_t)(end - input->data) : input->len;
    struct bytes file = input_bytes(input, len);
    (void)input_u8(input);
    if (file.len == 0) {
        file = (struct bytes){(const uint8_t *)tokenizer_file, sizeof tokenizer_file - 1};
    }
    return file;
}

static void deliver(const struct file_chunk *chunk) {
    struct wire_buffer buffer = {0};
    if (file_chunk_encode(chunk, &buffer) == STATUS_OK) {
        uint8_t *copy = input_copy(wire_buffer_bytes(&buffer));
        bed.handlers->on_message(bed.ctx, (struct rpc_call_id){1}, copy, buffer.len);
        free(copy);
    }
    wire_buffer_fini(&buffer);
}

/* Honest but for what `how` breaks. */
static void send_file(struct input *input, const char *name, struct bytes file) {
    uint8_t how = input_u8(input);
    size_t step = how % 3 == 0 ? file.len : 1u + input_u8(input);
    size_t at = 0;
    bool is_missing = how >= 224 && how < 232;
    while (true) {
        size_t len = is_missing ? 0 : file.len - at < step ? file.len - at : step;
        struct file_chunk chunk = {.total_bytes = is_missing ? 0 : file.len,
                                   .offset = is_missing ? 0 : at,
                                   .digest = 1,
                                   .data = {file.data + at, len},
                                   .is_last = is_missing || at + len == file.len,
                                   .is_missing = is_missing};
        text_copy(chunk.name, sizeof chunk.name, how >= 252 ? "other" : name);
        if (how >= 232 && how < 240 && at > 0) {
            chunk.offset = chunk.offset + input_u8(input) % 3 - 1; /* again, or a gap */
        } else if (how >= 240 && how < 252) {
            chunk.total_bytes += input_u64(input);
        }
        deliver(&chunk);
        at += len;
        if (chunk.is_last || len == 0) {
            return;
        }
    }
}

static void worker(struct input *input) {
    struct model_version version = {.vocab = 512, .name = "m"};
    fetch_start(&bed.router, &version, "h:1");
    CHECK(bed.handlers != NULL);
    struct bytes files[3];
    for (uint32_t i = 0; i < 3; i++) {
        files[i] = draw_file(input);
    }
    version.digest = XXH3_64bits(files[0].data, files[0].len) ^ (input_u8(input) > 250 ? 1 : 0);
    for (uint32_t i = 0; i < 4 && (i < 3 || input->len > 0); i++) {
        uint8_t which = input_u8(input);
        if (which > 240) {
            struct bytes raw = input_bytes(input, input_u8(input));
            uint8_t *copy = input_copy(raw);
            bed.handlers->on_message(bed.ctx, (struct rpc_call_id){1}, copy, raw.len);
            free(copy);
        } else {
            uint32_t file = which < 200 ? i % 3 : which % 3;
            send_file(input, file_names[file], files[file]);
        }
    }
    uint8_t end = input_u8(input);
    struct rpc_outcome outcome = {.code = end < 240 ? RPC_CODE_OK : (enum rpc_code)(end % 17),
                                  .message = "why"};
    bed.handlers->on_closed(bed.ctx, (struct rpc_call_id){1}, &outcome);
    if (bed.posted != NULL) {
        CHECK_OP(bed.ended, ==, 0);
        bed.posted->run(bed.posted, NULL);
    }
    CHECK_OP(bed.ended, ==, 1);
    CHECK(!bed.is_cancelled || !bed.is_fetched);
    if (bed.is_fetched) {
        CHECK_OP(version.eos_count, <=, EOS_MAX);
        for (uint32_t i = 0; i < version.eos_count; i++) {
            CHECK_OP(version.eos[i], <, version.vocab);
        }
    }
    tokenizer_destroy(version.tokenizer);
}

/* ---- the other routers ---- */

static void routers(struct input *input) {
    static const char prefix[] = "/baton/c/routers/";
    bool is_there[8] = {false};
    while (input->len > 0) {
        uint8_t how = input_u8(input);
        uint64_t who = 1 + how % 7;
        char key[64];
        int len = snprintf(key, sizeof key, "%s%016llx", prefix, (unsigned long long)who);
        CHECK(len > 0 && (size_t)len < sizeof key);
        struct router_record record = {.incarnation = {who}, .id = "r", .grpc = "h:1"};
        struct wire_buffer buffer = {0};
        CHECK_OP(router_record_encode(&record, &buffer), ==, STATUS_OK);
        struct etcd_event event = {.is_delete = (how & 0x40) != 0};
        event.kv.key = (struct bytes){(const uint8_t *)key, (size_t)len};
        event.kv.value = wire_buffer_bytes(&buffer);
        if (how >= 240) { /* raw key or value */
            struct bytes raw = input_bytes(input, input_u8(input));
            if (how % 2 == 0) {
                event.kv.key = raw;
                on_event(&bed.router, &event);
                wire_buffer_fini(&buffer);
                CHECK_OP(bed.router.peers.count, <=, PEERS_MAX);
                if (raw.len >= 16) { /* it may have named anybody */
                    bed.router.peers.count = 0;
                    memset(is_there, 0, sizeof is_there);
                }
                continue;
            }
            event.kv.value = raw;
        }
        on_event(&bed.router, &event);
        wire_buffer_fini(&buffer);
        if (how < 240) {
            is_there[who] = !event.is_delete && who != 1;
            uint32_t count = 0;
            for (uint32_t i = 0; i < 8; i++) {
                count += is_there[i] ? 1 : 0;
            }
            CHECK_OP(bed.router.peers.count, ==, count);
        } else {
            bed.router.peers.count = 0;
            memset(is_there, 0, sizeof is_there);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    static struct router_settings settings;
    memset(&bed, 0, sizeof bed);
    bed.router.settings = &settings;
    CHECK(pthread_mutex_init(&bed.router.peers.lock, NULL) == 0);
    struct input input = input_of(data, len);
    if (input_u8(&input) % 4 == 0) {
        routers(&input);
    } else {
        worker(&input);
    }
    CHECK(pthread_mutex_destroy(&bed.router.peers.lock) == 0);
    return 0;
}
