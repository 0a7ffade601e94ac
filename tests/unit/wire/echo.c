/* For compat.py: reads lines "KIND HEX", decodes the bytes and writes "ok HEX" of the struct
 * encoded again, or "STATUS sentence". Ends at the end of its input. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wire/public.h"
#include "wire/session.h"
#include "wire/worker.h"

static struct wire_buffer buffer;
static struct wire_arena arena;
static struct writer error;

static enum status echo_request(struct bytes bytes) {
    struct public_generate_request out;
    enum status status = public_generate_request_decode(bytes, &arena, &out, &error);
    return status == STATUS_OK ? public_generate_request_encode(&out, &buffer) : status;
}

static enum status echo_reply(struct bytes bytes) {
    struct public_generate_reply out;
    enum status status = public_generate_reply_decode(bytes, &arena, &out);
    return status == STATUS_OK ? public_generate_reply_encode(&out, &buffer) : status;
}

static enum status echo_abort(struct bytes bytes) {
    struct public_abort_request out;
    enum status status = public_abort_request_decode(bytes, &arena, &out, &error);
    return status == STATUS_OK ? public_abort_request_encode(&out, &buffer) : status;
}

static enum status echo_abort_reply(struct bytes bytes) {
    uint32_t aborted = 0;
    enum status status = public_abort_reply_decode(bytes, &arena, &aborted);
    return status == STATUS_OK ? public_abort_reply_encode(aborted, &buffer) : status;
}

static enum status echo_tokenize(struct bytes bytes) {
    struct public_tokenize_request out;
    enum status status = public_tokenize_request_decode(bytes, &arena, &out, &error);
    return status == STATUS_OK ? public_tokenize_request_encode(&out, &buffer) : status;
}

static enum status echo_tokenize_reply(struct bytes bytes) {
    struct public_tokenize_reply out;
    enum status status = public_tokenize_reply_decode(bytes, &arena, &out);
    return status == STATUS_OK ? public_tokenize_reply_encode(&out, &buffer) : status;
}

static enum status echo_models(struct bytes bytes) {
    const struct public_model *models = NULL;
    uint32_t count = 0;
    enum status status = public_list_models_reply_decode(bytes, &arena, &models, &count);
    return status == STATUS_OK ? public_list_models_reply_encode(models, count, &buffer) : status;
}

static enum status echo_session(struct bytes bytes) {
    static struct message message;
    enum status status = wire_session_decode(bytes, &arena, &message);
    return status == STATUS_OK ? wire_session_encode(&message, &buffer) : status;
}

static enum status echo_worker(struct bytes bytes) {
    struct worker_record record;
    enum status status = worker_record_decode(bytes, &arena, &record);
    return status == STATUS_OK ? worker_record_encode(&record, &buffer) : status;
}

static enum status echo_router(struct bytes bytes) {
    struct router_record record;
    enum status status = router_record_decode(bytes, &arena, &record);
    return status == STATUS_OK ? router_record_encode(&record, &buffer) : status;
}

static enum status echo_files(struct bytes bytes) {
    struct files_request request;
    enum status status = files_request_decode(bytes, &arena, &request);
    return status == STATUS_OK ? files_request_encode(&request, &buffer) : status;
}

static enum status echo_chunk(struct bytes bytes) {
    struct file_chunk chunk;
    enum status status = file_chunk_decode(bytes, &arena, &chunk);
    return status == STATUS_OK ? file_chunk_encode(&chunk, &buffer) : status;
}

static enum status echo_describe(struct bytes bytes) {
    struct worker_record record;
    enum status status = describe_reply_decode(bytes, &arena, &record);
    return status == STATUS_OK ? describe_reply_encode(&record, &buffer) : status;
}

struct kind {
    const char *name;
    enum status (*echo)(struct bytes bytes);
};

static const struct kind kinds[] = {
    {"GenerateRequest", echo_request},  {"GenerateReply", echo_reply},
    {"AbortRequest", echo_abort},       {"AbortReply", echo_abort_reply},
    {"TokenizeRequest", echo_tokenize}, {"TokenizeReply", echo_tokenize_reply},
    {"ListModelsReply", echo_models},   {"Envelope", echo_session},
    {"WorkerRecord", echo_worker},      {"RouterRecord", echo_router},
    {"FilesRequest", echo_files},       {"FileChunk", echo_chunk},
    {"DescribeReply", echo_describe},
};

static int digit(char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* In place. Returns the number of bytes. */
static size_t hex_decode(char *text) {
    size_t len = 0;
    while (digit(text[2 * len]) >= 0 && digit(text[2 * len + 1]) >= 0) {
        text[len] = (char)(digit(text[2 * len]) << 4 | digit(text[2 * len + 1]));
        len++;
    }
    return len;
}

static void answer(enum status status) {
    if (status == STATUS_OK) {
        printf("ok ");
        for (size_t i = 0; i < buffer.len; i++) {
            printf("%02x", buffer.data[i]);
        }
        printf("\n");
    } else {
        printf("%s %.*s\n", status_name(status), (int)error.len, error.data);
    }
    fflush(stdout);
}

int main(void) {
    char *line = NULL;
    size_t cap = 0;
    static char sentence[PUBLIC_ERROR_MAX];
    while (getline(&line, &cap, stdin) > 0) {
        char *hex = strchr(line, ' ');
        if (hex == NULL) {
            return 2;
        }
        *hex++ = '\0';
        struct bytes bytes = {(const uint8_t *)hex, hex_decode(hex)};
        writer_init(&error, sentence, sizeof sentence);
        wire_arena_reset(&arena);
        bool is_known = false;
        for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
            if (strcmp(line, kinds[i].name) == 0) {
                answer(kinds[i].echo(bytes));
                is_known = true;
            }
        }
        if (!is_known) {
            return 2;
        }
    }
    free(line);
    wire_buffer_fini(&buffer);
    wire_arena_fini(&arena);
    return 0;
}
