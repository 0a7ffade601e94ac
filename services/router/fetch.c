/* Getting a model's small text files from a worker, and making a tokenizer of them.
 *
 * One call of baton.worker.v1.Worker/Files on the rpc thread, every byte bounded and the digest
 * checked; then one job of a text thread, because parsing a large vocabulary takes a while. */
#include "services/router/router.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/check.h"
#include "runtime/buffer.h"
#include "runtime/clock.h"
#include "wire/worker.h"

#define FILES_METHOD     "/baton.worker.v1.Worker/Files"
#define FETCH_MS         15000
#define FETCH_STALL_MS   5000u
#define CONFIG_BYTES_MAX (1024u * 1024u)

enum { FILE_TOKENIZER, FILE_GENERATION, FILE_CONFIG, FILE_COUNT };

static const char *const file_names[FILE_COUNT] = {"tokenizer.json", "generation_config.json",
                                                   "config.json"};

struct fetch {
    struct mail mail;
    struct router *router;
    struct model_version *version;
    struct rpc_channel *channel;
    struct wire_arena arena;
    struct {
        struct buffer data;
        bool is_complete;
        bool is_missing;
    } files[FILE_COUNT];
    char why[256]; /* "" = no fault yet */
    char address[ADDRESS_MAX];
};

static void fetch_free(struct fetch *fetch) {
    for (uint32_t i = 0; i < FILE_COUNT; i++) {
        buffer_fini(&fetch->files[i].data);
    }
    wire_arena_fini(&fetch->arena);
    rpc_channel_close(fetch->channel);
    free(fetch);
}

static void fetch_fail(struct fetch *fetch) {
    models_failed(fetch->router, fetch->version, fetch->why);
    fetch_free(fetch);
}

static void fetch_why(struct fetch *fetch, const char *what, const char *more) {
    struct writer writer;
    writer_init(&writer, fetch->why, sizeof fetch->why - 1);
    writer_printf(&writer, "worker at %s: %s%s", fetch->address, what, more);
    fetch->why[writer.len] = '\0';
}

/* ---- text thread: parsing ------------------------------------------------------------------- */

static bool number_of(const json_t *object, const char *key, float *out) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_number(value)) {
        return false;
    }
    *out = (float)json_number_value(value);
    return true;
}

static void read_eos(const json_t *object, struct model_version *version) {
    const json_t *eos = json_object_get(object, "eos_token_id");
    size_t count = json_is_array(eos) ? json_array_size(eos) : json_is_integer(eos) ? 1 : 0;
    if (count == 0) {
        return; /* what an earlier file said stands */
    }
    version->eos_count = 0;
    for (size_t i = 0; i < count && version->eos_count < EOS_MAX; i++) {
        const json_t *value = json_is_array(eos) ? json_array_get(eos, i) : eos;
        json_int_t id = json_integer_value(value);
        if (json_is_integer(value) && id >= 0 && id < (json_int_t)version->vocab) {
            version->eos[version->eos_count++] = (uint32_t)id;
        }
    }
}

/* Values are checked where they are used, so that the sentence reaches whoever can act. */
static void read_defaults(const json_t *object, struct generation_defaults *defaults) {
    defaults->has_temperature = number_of(object, "temperature", &defaults->temperature);
    defaults->has_top_p = number_of(object, "top_p", &defaults->top_p);
    defaults->has_min_p = number_of(object, "min_p", &defaults->min_p);
    defaults->has_repetition_penalty =
        number_of(object, "repetition_penalty", &defaults->repetition_penalty);
    const json_t *top_k = json_object_get(object, "top_k");
    json_int_t value = json_integer_value(top_k);
    if (json_is_integer(top_k) && value >= INT32_MIN && value <= INT32_MAX) {
        defaults->has_top_k = true;
        defaults->top_k = (int32_t)value;
    }
    if (json_is_false(json_object_get(object, "do_sample"))) {
        defaults->has_temperature = true;
        defaults->temperature = 0.0f;
    }
}

/* False with a reason: the file is there and is no JSON object. */
static bool read_config(struct fetch *fetch, uint32_t file) {
    const struct buffer *data = &fetch->files[file].data;
    if (fetch->files[file].is_missing) {
        return true;
    }
    json_error_t error;
    json_t *object = json_loadb(data->data != NULL ? data->data : "", data->len, 0, &error);
    if (!json_is_object(object)) {
        fetch_why(fetch, file_names[file], " is not a JSON object");
        json_decref(object);
        return false;
    }
    read_eos(object, fetch->version);
    if (file == FILE_GENERATION) {
        read_defaults(object, &fetch->version->defaults);
    }
    json_decref(object);
    return true;
}

static void fetch_parse(struct mail *mail, void *ctx) {
    struct fetch *fetch = (struct fetch *)(void *)mail; /* its first member */
    struct model_version *version = fetch->version;
    (void)ctx;
    char text[200];
    struct writer error;
    writer_init(&error, text, sizeof text - 1);
    const struct buffer *data = &fetch->files[FILE_TOKENIZER].data;
    struct bytes json = {(const uint8_t *)data->data, data->len};
    if (XXH3_64bits(json.data, json.len) != version->digest) {
        fetch_why(fetch, "tokenizer.json is not the one that it has published", "");
        fetch_fail(fetch);
        return;
    }
    version->eos_count = 0;
    version->defaults = (struct generation_defaults){.vocab = version->vocab};
    if (!read_config(fetch, FILE_CONFIG) || !read_config(fetch, FILE_GENERATION)) {
        fetch_fail(fetch);
        return;
    }
    if (tokenizer_create(json, &version->tokenizer, &error) != STATUS_OK) {
        text[error.len] = '\0';
        version->tokenizer = NULL;
        fetch_why(fetch, "tokenizer.json cannot be used: ", text);
        fetch_fail(fetch);
        return;
    }
    models_fetched(fetch->router, version);
    fetch_free(fetch);
}

/* ---- rpc thread ----------------------------------------------------------------------------- */

static void on_message(void *ctx, struct rpc_call_id call, const uint8_t *data, size_t len) {
    struct fetch *fetch = ctx;
    struct file_chunk chunk;
    if (fetch->why[0] != '\0') {
        return;
    }
    wire_arena_reset(&fetch->arena);
    uint32_t at = FILE_COUNT;
    if (file_chunk_decode((struct bytes){data, len}, &fetch->arena, &chunk) == STATUS_OK) {
        for (uint32_t i = 0; i < FILE_COUNT; i++) {
            at = strcmp(chunk.name, file_names[i]) == 0 ? i : at;
        }
    }
    if (at == FILE_COUNT || fetch->files[at].is_complete ||
        chunk.offset != fetch->files[at].data.len ||
        chunk.total_bytes > fetch->files[at].data.max) {
        fetch_why(fetch, "its answer to Files makes no sense", "");
        rpc_call_cancel(fetch->router->rpc, call);
        return;
    }
    buffer_put(&fetch->files[at].data, chunk.data.data, chunk.data.len);
    fetch->files[at].is_missing = chunk.is_missing;
    fetch->files[at].is_complete = chunk.is_last;
}

static void on_closed(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome) {
    struct fetch *fetch = ctx;
    (void)call;
    bool is_complete = true;
    for (uint32_t i = 0; i < FILE_COUNT; i++) {
        is_complete = is_complete && fetch->files[i].is_complete;
    }
    if (fetch->why[0] == '\0' && outcome->code != RPC_CODE_OK) {
        fetch_why(fetch, "it did not give its files: ", outcome->message);
    } else if (fetch->why[0] == '\0' && (!is_complete || fetch->files[FILE_TOKENIZER].is_missing)) {
        fetch_why(fetch, "it has no tokenizer.json, or did not send all of it", "");
    }
    if (fetch->why[0] != '\0') {
        fetch_fail(fetch);
        return;
    }
    fetch->mail.run = fetch_parse;
    if (!mailbox_post(&fetch->router->text[0].box, &fetch->mail)) {
        fetch_why(fetch, "this router is leaving", "");
        fetch_fail(fetch);
    }
}

static const struct rpc_handlers fetch_handlers = {.on_message = on_message,
                                                   .on_closed = on_closed};

void fetch_start(struct router *router, struct model_version *version, const char *address) {
    struct fetch *fetch = calloc(1, sizeof *fetch);
    CHECK(fetch != NULL);
    fetch->router = router;
    fetch->version = version;
    text_copy(fetch->address, sizeof fetch->address, address);
    struct files_request request = {.count = FILE_COUNT};
    for (uint32_t i = 0; i < FILE_COUNT; i++) {
        text_copy(request.names[i], FILES_NAME_BYTES_MAX, file_names[i]);
        buffer_init(&fetch->files[i].data,
                    i == FILE_TOKENIZER ? TOKENIZER_FILE_BYTES_MAX : CONFIG_BYTES_MAX);
    }
    struct wire_buffer payload = {0};
    enum status status = files_request_encode(&request, &payload);
    struct rpc_error error = {.text = ""};
    if (status == STATUS_OK) {
        status = rpc_channel_open(router->rpc, address, NULL, NULL, &fetch->channel, &error);
    }
    if (status == STATUS_OK) {
        struct rpc_call_id call;
        struct rpc_call_config config = {.method = FILES_METHOD,
                                         .kind = RPC_KIND_SERVER_STREAM,
                                         .deadline = instant_add(clock_now(), span_ms(FETCH_MS)),
                                         .payload = wire_buffer_bytes(&payload),
                                         .handlers = &fetch_handlers,
                                         .ctx = fetch,
                                         .stall_ms = FETCH_STALL_MS};
        status = rpc_call_start(fetch->channel, &config, &call);
    }
    wire_buffer_fini(&payload);
    if (status != STATUS_OK) {
        fetch_why(fetch, "it cannot be called: ",
                  error.text[0] != '\0' ? error.text : status_name(status));
        fetch_fail(fetch);
    }
}
