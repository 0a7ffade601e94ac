/* Records of the registry and the worker's own service: the first byte chooses one; what decodes
 * must encode again, to what decodes to the same. */
#include "fuzz/fuzz.h"
#include "wire/registry.h"
#include "wire/worker.h"

static struct wire_arena arena;
static struct wire_buffer buffer;

static struct bytes encoded(enum status status) {
    CHECK_OP(status, ==, STATUS_OK);
    return wire_buffer_bytes(&buffer);
}

/* Without padding in the comparison: the encodings are compared. */
static void same(const uint8_t *first, size_t len) {
    CHECK_OP(buffer.len, ==, len);
    CHECK(len == 0 || memcmp(first, buffer.data, len) == 0);
}

static void worker(struct bytes bytes, bool is_describe) {
    struct worker_record record, again;
    enum status status = is_describe ? describe_reply_decode(bytes, &arena, &record)
                                     : worker_record_decode(bytes, &arena, &record);
    if (status != STATUS_OK) {
        return;
    }
    CHECK(record.info.incarnation.v != 0 && record.info.id[0] != '\0');
    CHECK(record.info.role == ROLE_PREFILL || record.info.role == ROLE_DECODE);
    uint8_t *first = input_copy(encoded(worker_record_encode(&record, &buffer)));
    size_t len = buffer.len;
    CHECK_OP(worker_record_decode((struct bytes){first, len}, &arena, &again), ==, STATUS_OK);
    CHECK_OP(record.info.kv_tokens, ==, again.info.kv_tokens);
    CHECK_OP(record.kv_port, ==, again.kv_port);
    CHECK(strcmp(record.info.address, again.info.address) == 0);
    CHECK(strcmp(record.admin, again.admin) == 0);
    (void)encoded(worker_record_encode(&again, &buffer));
    same(first, len);
    (void)encoded(describe_reply_encode(&record, &buffer));
    free(first);
}

static void router(struct bytes bytes) {
    struct router_record record, again;
    if (router_record_decode(bytes, &arena, &record) != STATUS_OK) {
        return;
    }
    uint8_t *first = input_copy(encoded(router_record_encode(&record, &buffer)));
    size_t len = buffer.len;
    CHECK_OP(router_record_decode((struct bytes){first, len}, &arena, &again), ==, STATUS_OK);
    CHECK(strcmp(record.grpc, again.grpc) == 0 && record.pid == again.pid);
    (void)encoded(router_record_encode(&again, &buffer));
    same(first, len);
    free(first);
}

static void files(struct bytes bytes) {
    struct files_request request, again;
    if (files_request_decode(bytes, &arena, &request) != STATUS_OK) {
        return;
    }
    CHECK(request.count > 0 && request.count <= FILES_NAMES_MAX);
    uint8_t *first = input_copy(encoded(files_request_encode(&request, &buffer)));
    CHECK_OP(files_request_decode((struct bytes){first, buffer.len}, &arena, &again), ==,
             STATUS_OK);
    CHECK_OP(request.count, ==, again.count);
    for (uint32_t i = 0; i < request.count; i++) {
        CHECK(files_name_is_valid(request.names[i]) && strchr(request.names[i], '/') == NULL);
        CHECK(strcmp(request.names[i], again.names[i]) == 0);
    }
    free(first);
}

static void chunk(struct bytes bytes) {
    struct file_chunk got, again;
    if (file_chunk_decode(bytes, &arena, &got) != STATUS_OK) {
        return;
    }
    CHECK(got.data.len <= FILES_CHUNK_MAX && got.offset <= got.total_bytes);
    CHECK_OP(got.data.len, <=, got.total_bytes - got.offset);
    uint8_t *first = input_copy(encoded(file_chunk_encode(&got, &buffer)));
    CHECK_OP(file_chunk_decode((struct bytes){first, buffer.len}, &arena, &again), ==, STATUS_OK);
    CHECK(got.data.len == again.data.len && got.digest == again.digest);
    CHECK(got.data.len == 0 || memcmp(got.data.data, again.data.data, got.data.len) == 0);
    free(first);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    struct input input = input_of(data, len);
    uint8_t which = input_u8(&input);
    uint8_t *copy = input_copy(input_bytes(&input, SIZE_MAX));
    struct bytes bytes = {copy, len > 0 ? len - 1 : 0};
    switch (which % 6) {
    case 0: worker(bytes, false); break;
    case 1: router(bytes); break;
    case 2: files(bytes); break;
    case 3: chunk(bytes); break;
    case 4: worker(bytes, true); break;
    case 5: /* has no fields: nothing but the verdict can differ */
        CHECK_OP(describe_request_decode(bytes, &arena), ==,
                 describe_request_decode(bytes, &arena));
        break;
    }
    free(copy);
    wire_arena_reset(&arena);
    return 0;
}
