#include "wire/worker.h"

#include "baton/v1/registry.pb-c.h"
#include "unit/wire/support.h"

static struct wire_buffer buffer;
static struct wire_arena arena;

static int fini(void **state) {
    (void)state;
    wire_buffer_fini(&buffer);
    wire_arena_fini(&arena);
    return 0;
}

static void random_worker(struct prng *prng, struct worker_record *record) {
    memset(record, 0, sizeof *record);
    record->info.incarnation.v = random_id(prng);
    record->info.role = random_bool(prng) ? ROLE_PREFILL : ROLE_DECODE;
    random_text(prng, record->info.id, LABEL_MAX, 1);
    random_text(prng, record->info.address, ADDRESS_MAX, 1);
    random_text(prng, record->info.model, LABEL_MAX, 0);
    random_text(prng, record->info.numerics, MESSAGE_NUMERICS_MAX, 0);
    record->info.layout.high = random_u64(prng);
    record->info.layout.low = random_u64(prng);
    record->info.tokenizer = random_u64(prng);
    record->info.vocab = random_u32(prng);
    record->info.context = random_u32(prng);
    record->info.kv_tokens = random_u32(prng);
    record->info.page_tokens = random_u32(prng);
    record->info.is_draining = random_bool(prng);
    record->kv_port = (uint16_t)prng_next(prng);
    random_text(prng, record->admin, ADDRESS_MAX, 0);
    record->pid = random_u32(prng);
    record->started_unix_ms = random_u64(prng);
    random_text(prng, record->version, LABEL_MAX, 0);
}

static void random_router(struct prng *prng, struct router_record *record) {
    memset(record, 0, sizeof *record);
    record->incarnation.v = random_id(prng);
    random_text(prng, record->id, LABEL_MAX, 1);
    random_text(prng, record->http, ADDRESS_MAX, 0);
    random_text(prng, record->grpc, ADDRESS_MAX, 0);
    random_text(prng, record->admin, ADDRESS_MAX, 0);
    random_text(prng, record->version, LABEL_MAX, 0);
    record->pid = random_u32(prng);
    record->started_unix_ms = random_u64(prng);
    record->is_draining = random_bool(prng);
}

/* A field added to struct worker_info must be added to registry.proto, registry.c and
 * random_worker, and then here. */
static void test_no_record_has_grown_a_field_that_does_not_travel(void **state) {
    (void)state;
    assert_int_equal(sizeof(struct worker_info), 352);
}

static void test_worker_records_come_back_as_they_were(void **state) {
    (void)state;
    struct prng prng = {1};
    for (int round = 0; round < 2000; round++) {
        struct worker_record in;
        struct worker_record out;
        memset(&out, 0xee, sizeof out);
        random_worker(&prng, &in);
        assert_int_equal(worker_record_encode(&in, &buffer), STATUS_OK);
        assert_int_equal(worker_record_decode(wire_buffer_bytes(&buffer), &arena, &out), STATUS_OK);
        wire_arena_reset(&arena); /* everything was copied */
        assert_memory_equal(&in, &out, sizeof in);
        assert_int_equal(describe_reply_encode(&in, &buffer), STATUS_OK);
        memset(&out, 0xee, sizeof out);
        assert_int_equal(describe_reply_decode(wire_buffer_bytes(&buffer), &arena, &out),
                         STATUS_OK);
        assert_memory_equal(&in, &out, sizeof in);
        wire_arena_reset(&arena);
    }
}

static void test_router_records_come_back_as_they_were(void **state) {
    (void)state;
    struct prng prng = {2};
    for (int round = 0; round < 2000; round++) {
        struct router_record in;
        struct router_record out;
        memset(&out, 0xee, sizeof out);
        random_router(&prng, &in);
        assert_int_equal(router_record_encode(&in, &buffer), STATUS_OK);
        assert_int_equal(router_record_decode(wire_buffer_bytes(&buffer), &arena, &out), STATUS_OK);
        wire_arena_reset(&arena);
        assert_memory_equal(&in, &out, sizeof in);
    }
}

static void test_records_without_what_makes_them_one_are_not_written(void **state) {
    (void)state;
    struct prng prng = {3};
    struct worker_record worker;
    random_worker(&prng, &worker);
    worker.info.incarnation.v = 0;
    assert_int_equal(worker_record_encode(&worker, &buffer), STATUS_INVALID);
    random_worker(&prng, &worker);
    worker.info.role = ROLE_ROUTER;
    assert_int_equal(worker_record_encode(&worker, &buffer), STATUS_INVALID);
    random_worker(&prng, &worker);
    worker.info.address[0] = '\0';
    assert_int_equal(worker_record_encode(&worker, &buffer), STATUS_INVALID);
    random_worker(&prng, &worker);
    memset(worker.info.model, 'x', LABEL_MAX);
    assert_int_equal(worker_record_encode(&worker, &buffer), STATUS_INVALID);
    assert_int_equal(describe_reply_encode(&worker, &buffer), STATUS_INVALID);
    struct router_record router;
    random_router(&prng, &router);
    router.id[0] = '\0';
    assert_int_equal(router_record_encode(&router, &buffer), STATUS_INVALID);
}

static void test_records_with_numbers_out_of_range_are_corrupt(void **state) {
    (void)state;
    static uint8_t text[] = "x";
    Baton__Registry__V1__WorkerRecord raw = BATON__REGISTRY__V1__WORKER_RECORD__INIT;
    raw.incarnation = 1;
    raw.role = ROLE_DECODE;
    raw.id = raw.address = (ProtobufCBinaryData){1, text};
    raw.kv_port = UINT16_MAX;
    uint8_t bytes[128];
    struct worker_record out;
    size_t len = baton__registry__v1__worker_record__pack(&raw, bytes);
    assert_int_equal(worker_record_decode((struct bytes){bytes, len}, &arena, &out), STATUS_OK);
    raw.kv_port = UINT16_MAX + 1;
    len = baton__registry__v1__worker_record__pack(&raw, bytes);
    assert_int_equal(worker_record_decode((struct bytes){bytes, len}, &arena, &out),
                     STATUS_CORRUPT);
    raw.kv_port = 1;
    raw.role = ROLE_DECODE + 1;
    len = baton__registry__v1__worker_record__pack(&raw, bytes);
    assert_int_equal(worker_record_decode((struct bytes){bytes, len}, &arena, &out),
                     STATUS_CORRUPT);
}

static void test_empty_records_are_corrupt(void **state) {
    (void)state;
    struct worker_record worker;
    struct router_record router;
    struct bytes nothing = {NULL, 0};
    assert_int_equal(worker_record_decode(nothing, &arena, &worker), STATUS_CORRUPT);
    assert_int_equal(router_record_decode(nothing, &arena, &router), STATUS_CORRUPT);
    assert_int_equal(describe_reply_decode(nothing, &arena, &worker), STATUS_CORRUPT);
    assert_int_equal(describe_request_encode(&buffer), STATUS_OK);
    assert_int_equal(describe_request_decode(wire_buffer_bytes(&buffer), &arena), STATUS_OK);
}

/* Decodes with every decoder of the room; what decodes can be written again. */
static size_t decode_hostile(const uint8_t *data, size_t len) {
    uint8_t *copy = bytes_copy(data, len);
    struct bytes bytes = {copy, len};
    size_t accepted = 0;
    struct worker_record worker;
    struct router_record router;
    struct files_request request;
    struct file_chunk chunk;
    wire_arena_reset(&arena);
    struct wire_buffer again = {0};
    if (worker_record_decode(bytes, &arena, &worker) == STATUS_OK) {
        assert_int_equal(worker_record_encode(&worker, &again), STATUS_OK);
        accepted++;
    }
    if (router_record_decode(bytes, &arena, &router) == STATUS_OK) {
        assert_int_equal(router_record_encode(&router, &again), STATUS_OK);
        accepted++;
    }
    if (files_request_decode(bytes, &arena, &request) == STATUS_OK) {
        assert_int_equal(files_request_encode(&request, &again), STATUS_OK);
        accepted++;
    }
    if (file_chunk_decode(bytes, &arena, &chunk) == STATUS_OK) {
        assert_int_equal(file_chunk_encode(&chunk, &again), STATUS_OK);
        accepted++;
    }
    if (describe_reply_decode(bytes, &arena, &worker) == STATUS_OK) {
        assert_int_equal(describe_reply_encode(&worker, &again), STATUS_OK);
        accepted++;
    }
    wire_buffer_fini(&again);
    free(copy);
    return accepted;
}

static void test_cut_and_bent_records_are_refused_or_records(void **state) {
    (void)state;
    struct prng prng = {4};
    static uint8_t bent[4096];
    size_t accepted = 0;
    for (int round = 0; round < 600; round++) {
        struct worker_record worker;
        struct router_record router;
        if (random_bool(&prng)) {
            random_worker(&prng, &worker);
            assert_int_equal(worker_record_encode(&worker, &buffer), STATUS_OK);
        } else {
            random_router(&prng, &router);
            assert_int_equal(router_record_encode(&router, &buffer), STATUS_OK);
        }
        for (int i = 0; i < 8; i++) {
            accepted += decode_hostile(buffer.data, prng_below(&prng, (uint32_t)buffer.len));
            memcpy(bent, buffer.data, buffer.len);
            accepted += decode_hostile(bent, bytes_bend(&prng, bent, buffer.len));
        }
    }
    assert_true(accepted > 100); /* records with a harmless change do exist */
}

static void test_chunks_come_back_as_they_were(void **state) {
    (void)state;
    struct prng prng = {5};
    static uint8_t data[FILES_CHUNK_MAX];
    static uint8_t bent[FILES_CHUNK_MAX + 1024];
    for (int round = 0; round < 300; round++) {
        struct file_chunk in = {.name = "tokenizer.json", .digest = random_u64(&prng)};
        in.data.len = prng_below(&prng, round % 10 == 0 ? FILES_CHUNK_MAX + 1 : 200);
        in.data.data = data;
        for (size_t i = 0; i < in.data.len; i++) {
            data[i] = (uint8_t)prng_next(&prng);
        }
        in.offset = prng_below(&prng, 1000000);
        in.is_last = random_bool(&prng);
        in.total_bytes = in.offset + in.data.len + (in.is_last ? 0 : 1 + prng_below(&prng, 1000));
        struct file_chunk out;
        assert_int_equal(file_chunk_encode(&in, &buffer), STATUS_OK);
        wire_arena_reset(&arena);
        assert_int_equal(file_chunk_decode(wire_buffer_bytes(&buffer), &arena, &out), STATUS_OK);
        assert_string_equal(out.name, in.name);
        assert_true(out.digest == in.digest && out.offset == in.offset &&
                    out.total_bytes == in.total_bytes && out.is_last == in.is_last &&
                    !out.is_missing);
        assert_int_equal(out.data.len, in.data.len);
        if (in.data.len > 0) {
            assert_memory_equal(out.data.data, data, in.data.len);
        }
        memcpy(bent, buffer.data, buffer.len);
        (void)decode_hostile(bent, bytes_bend(&prng, bent, buffer.len));
    }
}

static void test_chunks_that_do_not_fit_their_file_are_not_written(void **state) {
    (void)state;
    static const uint8_t data[FILES_CHUNK_MAX + 1];
    struct file_chunk missing = {.name = "x.json", .is_last = true, .is_missing = true};
    struct file_chunk out;
    assert_int_equal(file_chunk_encode(&missing, &buffer), STATUS_OK);
    assert_int_equal(file_chunk_decode(wire_buffer_bytes(&buffer), &arena, &out), STATUS_OK);
    assert_true(out.is_missing && out.is_last);
    missing.total_bytes = 3;
    missing.data = (struct bytes){data, 3};
    assert_int_equal(file_chunk_encode(&missing, &buffer), STATUS_INVALID);
    missing.data.len = 0;
    missing.is_last = false;
    assert_int_equal(file_chunk_encode(&missing, &buffer), STATUS_INVALID);
    struct file_chunk chunk = {
        .name = "x.json", .total_bytes = 10, .offset = 5, .data = {data, 5}, .is_last = true};
    assert_int_equal(file_chunk_encode(&chunk, &buffer), STATUS_OK);
    chunk.is_last = false;
    assert_int_equal(file_chunk_encode(&chunk, &buffer), STATUS_INVALID);
    chunk.is_last = true;
    chunk.data.len = 6;
    assert_int_equal(file_chunk_encode(&chunk, &buffer), STATUS_INVALID);
    chunk.offset = UINT64_MAX;
    assert_int_equal(file_chunk_encode(&chunk, &buffer), STATUS_INVALID);
    chunk.is_last = false; /* past the end, and not the last either */
    assert_int_equal(file_chunk_encode(&chunk, &buffer), STATUS_INVALID);
    chunk = (struct file_chunk){
        .name = "x.json", .total_bytes = sizeof data, .data = {data, sizeof data}, .is_last = true};
    assert_int_equal(file_chunk_encode(&chunk, &buffer), STATUS_INVALID);
}

static void test_file_names_are_plain(void **state) {
    (void)state;
    const char *const bad[] = {"", "..", ".", ".hidden", "a/b", "/etc/passwd", "a\nb", "a\x7f"};
    struct files_request request = {.count = 2, .names = {"tokenizer.json", "config.json"}};
    struct files_request out;
    assert_int_equal(files_request_encode(&request, &buffer), STATUS_OK);
    assert_int_equal(files_request_decode(wire_buffer_bytes(&buffer), &arena, &out), STATUS_OK);
    assert_int_equal(out.count, 2);
    assert_string_equal(out.names[1], "config.json");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        text_copy(request.names[1], FILES_NAME_BYTES_MAX, bad[i]);
        assert_int_equal(files_request_encode(&request, &buffer), STATUS_INVALID);
        uint8_t bytes[32] = {0x0a, (uint8_t)strlen(bad[i])};
        memcpy(bytes + 2, bad[i], strlen(bad[i]));
        assert_int_equal(
            files_request_decode((struct bytes){bytes, 2 + strlen(bad[i])}, &arena, &out),
            STATUS_CORRUPT);
    }
    request.count = 0;
    assert_int_equal(files_request_encode(&request, &buffer), STATUS_INVALID);
    request.count = FILES_NAMES_MAX + 1;
    assert_int_equal(files_request_encode(&request, &buffer), STATUS_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_record_has_grown_a_field_that_does_not_travel),
        cmocka_unit_test(test_worker_records_come_back_as_they_were),
        cmocka_unit_test(test_router_records_come_back_as_they_were),
        cmocka_unit_test(test_records_without_what_makes_them_one_are_not_written),
        cmocka_unit_test(test_records_with_numbers_out_of_range_are_corrupt),
        cmocka_unit_test(test_empty_records_are_corrupt),
        cmocka_unit_test(test_cut_and_bent_records_are_refused_or_records),
        cmocka_unit_test(test_chunks_come_back_as_they_were),
        cmocka_unit_test(test_chunks_that_do_not_fit_their_file_are_not_written),
        cmocka_unit_test(test_file_names_are_plain),
    };
    return cmocka_run_group_tests(tests, NULL, fini);
}
