#include "services/node/files.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <xxhash.h>

#include "base/check.h"
#include "rpc/rpc.h"
#include "runtime/log.h"
#include "services/node/shell.h"
#include "wire/worker.h"

#define FILE_BYTES_MAX (64u * 1024u * 1024u)

struct text_file {
    const char *name;
    uint8_t *data; /* NULL: there is no such file */
    size_t len;
    uint64_t digest;
};

static const char *const file_names[] = {"tokenizer.json", "tokenizer_config.json",
                                         "generation_config.json", "config.json"};
#define FILE_COUNT (sizeof file_names / sizeof file_names[0])

struct worker_files {
    struct shell *shell;
    struct text_file files[FILE_COUNT]; /* read-only once open */
    struct wire_buffer out;             /* rpc thread */
};

/* One call of Files; rpc thread. */
struct files_call {
    struct worker_files *files;
    struct files_request request;
    uint32_t at;
    size_t offset;
    bool is_finished;
};

/* ---- reading ------------------------------------------------------------------------------- */

static enum status read_file(const char *path, struct text_file *file) {
    FILE *stream = fopen(path, "rb");
    if (stream == NULL) {
        return errno == ENOENT ? STATUS_NOT_FOUND : STATUS_IO;
    }
    enum status status = STATUS_IO;
    size_t cap = 1 << 16;
    uint8_t *data = malloc(cap);
    CHECK(data != NULL);
    size_t len = 0;
    for (;;) {
        len += fread(data + len, 1, cap - len, stream);
        if (len < cap) {
            break;
        }
        if (cap > FILE_BYTES_MAX) {
            status = STATUS_RANGE;
            goto out;
        }
        cap *= 2;
        data = realloc(data, cap);
        CHECK(data != NULL);
    }
    if (ferror(stream) == 0) {
        file->data = data;
        file->len = len;
        file->digest = XXH3_64bits(data, len);
        data = NULL;
        status = STATUS_OK;
    }
out:
    free(data);
    (void)fclose(stream); /* only read */
    return status;
}

enum status files_open(const char *directory, struct worker_files **out) {
    struct stat about;
    if (stat(directory, &about) != 0 || !S_ISDIR(about.st_mode)) {
        LOG_ERROR("--model is not a directory: it takes one in the Hugging Face layout (of a GGUF "
                  "file tools/convert-gguf makes one)",
                  LOG_TEXT("model", directory));
        return STATUS_INVALID;
    }
    struct worker_files *files = calloc(1, sizeof *files);
    CHECK(files != NULL);
    for (size_t i = 0; i < FILE_COUNT; i++) {
        char path[4096];
        int len = snprintf(path, sizeof path, "%s/%s", directory, file_names[i]);
        files->files[i].name = file_names[i];
        enum status status = len < 0 || (size_t)len >= sizeof path
                                 ? STATUS_RANGE
                                 : read_file(path, &files->files[i]);
        bool is_optional = i > 0;
        if (status != STATUS_OK && !(is_optional && status == STATUS_NOT_FOUND)) {
            LOG_ERROR("a file of --model cannot be used: routers need it to read prompts",
                      LOG_TEXT("file", path), LOG_STATUS("status", status),
                      LOG_U64("bytes_max", FILE_BYTES_MAX));
            files_close(files);
            return status == STATUS_RANGE ? STATUS_INVALID : status;
        }
    }
    *out = files;
    return STATUS_OK;
}

uint64_t files_tokenizer_digest(const struct worker_files *files) {
    return files->files[0].digest;
}

struct bytes files_tokenizer(const struct worker_files *files) {
    return (struct bytes){files->files[0].data, files->files[0].len};
}

void files_close(struct worker_files *files) {
    if (files == NULL) {
        return;
    }
    for (size_t i = 0; i < FILE_COUNT; i++) {
        free(files->files[i].data);
    }
    wire_buffer_fini(&files->out);
    free(files);
}

/* ---- Files ---------------------------------------------------------------------------------- */

static const struct text_file *find_file(const struct worker_files *files, const char *name) {
    for (size_t i = 0; i < FILE_COUNT; i++) {
        if (strcmp(files->files[i].name, name) == 0) {
            return &files->files[i];
        }
    }
    return NULL;
}

static void send_next(struct files_call *call, struct rpc_call_id id) {
    struct rpc *rpc = shell_rpc(call->files->shell);
    if (call->is_finished) {
        return;
    }
    if (call->at == call->request.count) {
        call->is_finished = true;
        rpc_call_finish(rpc, id, RPC_CODE_OK, NULL, NULL, 0);
        return;
    }
    const struct text_file *file = find_file(call->files, call->request.names[call->at]);
    CHECK(file != NULL);
    size_t left = file->len - call->offset;
    size_t len = left < FILES_CHUNK_MAX ? left : FILES_CHUNK_MAX;
    struct file_chunk chunk = {.total_bytes = file->len,
                               .offset = call->offset,
                               .digest = file->digest,
                               .data = {file->data == NULL ? NULL : file->data + call->offset, len},
                               .is_last = len == left,
                               .is_missing = file->data == NULL};
    text_copy(chunk.name, sizeof chunk.name, file->name);
    call->offset += len;
    if (chunk.is_last) {
        call->at++;
        call->offset = 0;
    }
    enum status status = file_chunk_encode(&chunk, &call->files->out);
    if (status != STATUS_OK) {
        call->is_finished = true;
        rpc_call_finish(rpc, id, RPC_CODE_INTERNAL, "a chunk could not be encoded", NULL, 0);
        return;
    }
    rpc_call_send(rpc, id, call->files->out.data, call->files->out.len);
}

/* NULL if the request is fine, else what is wrong with it. */
static const char *check_request(const struct worker_files *files,
                                 const struct rpc_incoming *incoming,
                                 struct files_request *request) {
    struct wire_arena arena = {0};
    enum status status = files_request_decode(incoming->payload, &arena, request);
    wire_arena_fini(&arena);
    if (status != STATUS_OK) {
        return "the request is not a FilesRequest with one to eight plain file names";
    }
    for (uint32_t i = 0; i < request->count; i++) {
        if (find_file(files, request->names[i]) == NULL) {
            return "this worker hands out tokenizer.json, tokenizer_config.json, "
                   "generation_config.json and config.json only";
        }
    }
    return NULL;
}

static void files_on_open(void *ctx, struct rpc_call_id id, const struct rpc_incoming *incoming) {
    struct worker_files *files = ctx;
    struct rpc *rpc = shell_rpc(files->shell);
    struct files_call *call = calloc(1, sizeof *call);
    CHECK(call != NULL);
    call->files = files;
    const char *wrong = check_request(files, incoming, &call->request);
    if (wrong != NULL) {
        free(call);
        rpc_call_set_ctx(rpc, id, NULL);
        rpc_call_finish(rpc, id, RPC_CODE_INVALID_ARGUMENT, wrong, NULL, 0);
        return;
    }
    rpc_call_set_ctx(rpc, id, call);
    send_next(call, id);
}

static void files_on_writable(void *ctx, struct rpc_call_id id) {
    if (ctx != NULL) {
        send_next(ctx, id);
    }
}

static void files_on_closed(void *ctx, struct rpc_call_id id, const struct rpc_outcome *outcome) {
    (void)id;
    (void)outcome;
    free(ctx);
}

static const struct rpc_handlers files_handlers = {
    .on_open = files_on_open, .on_writable = files_on_writable, .on_closed = files_on_closed};

/* ---- Describe ------------------------------------------------------------------------------- */

static void describe_on_open(void *ctx, struct rpc_call_id id,
                             const struct rpc_incoming *incoming) {
    struct worker_files *files = ctx;
    struct rpc *rpc = shell_rpc(files->shell);
    struct wire_arena arena = {0};
    enum status status = describe_request_decode(incoming->payload, &arena);
    wire_arena_fini(&arena);
    struct worker_record record = {.kv_port = 0};
    if (status != STATUS_OK) {
        rpc_call_finish(rpc, id, RPC_CODE_INVALID_ARGUMENT, "not a DescribeRequest", NULL, 0);
    } else if (!shell_published(files->shell, &record)) {
        rpc_call_finish(rpc, id, RPC_CODE_UNAVAILABLE, "the worker is starting; try again", NULL,
                        0);
    } else if (describe_reply_encode(&record, &files->out) != STATUS_OK) {
        rpc_call_finish(rpc, id, RPC_CODE_INTERNAL, "the record could not be encoded", NULL, 0);
    } else {
        rpc_call_send(rpc, id, files->out.data, files->out.len);
        rpc_call_finish(rpc, id, RPC_CODE_OK, NULL, NULL, 0);
    }
}

static void describe_on_closed(void *ctx, struct rpc_call_id id,
                               const struct rpc_outcome *outcome) {
    (void)ctx;
    (void)id;
    (void)outcome;
}

static const struct rpc_handlers describe_handlers = {.on_open = describe_on_open,
                                                      .on_closed = describe_on_closed};

enum status files_serve(struct worker_files *files, struct shell *shell,
                        struct rpc_server *server) {
    files->shell = shell;
    enum status status =
        rpc_server_method(server, &(struct rpc_method){.path = "/baton.worker.v1.Worker/Files",
                                                       .kind = RPC_KIND_SERVER_STREAM,
                                                       .handlers = &files_handlers,
                                                       .ctx = files,
                                                       .stall_ms = 30000});
    if (status == STATUS_OK) {
        status = rpc_server_method(server,
                                   &(struct rpc_method){.path = "/baton.worker.v1.Worker/Describe",
                                                        .kind = RPC_KIND_UNARY,
                                                        .handlers = &describe_handlers,
                                                        .ctx = files});
    }
    return status;
}
