#include "rpc/reflection.h"

#include "base/bytes.h"
#include "base/check.h"
#include "rpc/descriptors.pb.h"
#include "rpc/proto/reflection_v1.pb-c.h"
#include "rpc/rpc.h"

#include <stdlib.h>
#include <string.h>

enum {
    FILES_MAX = 128,
    SERVICES_MAX = 64,
    NAME_CAP = 256,
    NAME_SHOWN = 200,      /* bytes of a client's text in a sentence */
    QUEUE_BYTES = 4 << 20, /* a client that asks and does not read is ended there */
    DEPTH_MAX = 32         /* of nested messages */
};

/* Field numbers of google/protobuf/descriptor.proto. */
enum {
    SET_FILE = 1,
    FILE_NAME = 1,
    FILE_PACKAGE = 2,
    FILE_DEPENDENCY = 3,
    FILE_MESSAGE = 4,
    FILE_ENUM = 5,
    FILE_SERVICE = 6,
    FILE_EXTENSION = 7,
    ANY_NAME = 1, /* of messages, fields, enums, values, services, methods */
    MESSAGE_FIELD = 2,
    MESSAGE_NESTED = 3,
    MESSAGE_ENUM = 4,
    MESSAGE_EXTENSION = 6,
    MESSAGE_ONEOF = 8,
    ENUM_VALUE = 2,
    SERVICE_METHOD = 2
};

struct file {
    struct bytes name;
    struct bytes package;
    struct bytes all; /* the serialized FileDescriptorProto, as protoc wrote it */
};

struct rpc_reflection {
    struct rpc *rpc;
    struct rpc_server *server;
    uint32_t files_len;
    struct file files[FILES_MAX]; /* fixed once the server has started */
};

/* ---- reading descriptors ---------------------------------------------------------------- */

struct wire {
    const uint8_t *at;
    const uint8_t *end;
    bool is_corrupt;
};

static struct wire wire_of(struct bytes bytes) {
    return (struct wire){bytes.data, bytes.data + bytes.len, false};
}

static uint64_t wire_varint(struct wire *wire) {
    uint64_t value = 0;
    for (uint32_t shift = 0; shift < 64; shift += 7) {
        if (wire->at == wire->end) {
            break;
        }
        uint8_t byte = *wire->at++;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            return value;
        }
    }
    wire->is_corrupt = true;
    return 0;
}

/* The next length-delimited field; others are skipped. False at the end or on corruption. */
static bool wire_next(struct wire *wire, uint32_t *field_out, struct bytes *out) {
    while (!wire->is_corrupt && wire->at != wire->end) {
        uint64_t tag = wire_varint(wire);
        uint64_t len = 0;
        switch (tag & 7) {
        case 0: (void)wire_varint(wire); continue;
        case 1: len = 8; break;
        case 2: len = wire_varint(wire); break;
        case 5: len = 4; break;
        default: wire->is_corrupt = true; return false;
        }
        if (wire->is_corrupt || len > (uint64_t)(wire->end - wire->at)) {
            wire->is_corrupt = true;
            return false;
        }
        struct bytes bytes = {wire->at, (size_t)len};
        wire->at += len;
        if ((tag & 7) == 2) {
            *field_out = (uint32_t)(tag >> 3);
            *out = bytes;
            return true;
        }
    }
    return false;
}

static bool bytes_equal(struct bytes a, struct bytes b) {
    return a.len == b.len && (a.len == 0 || memcmp(a.data, b.data, a.len) == 0);
}

/* The first field with this number; empty if there is none. */
static struct bytes wire_find(struct bytes in, uint32_t wanted) {
    struct wire wire = wire_of(in);
    uint32_t field = 0;
    struct bytes value = {0};
    while (wire_next(&wire, &field, &value)) {
        if (field == wanted) {
            return value;
        }
    }
    return (struct bytes){0};
}

/* True and the rest if `text` is `name` + "." + rest. */
static bool text_descend(struct bytes text, struct bytes name, struct bytes *rest_out) {
    if (name.len == 0 || text.len <= name.len + 1 || text.data[name.len] != '.' ||
        memcmp(text.data, name.data, name.len) != 0) {
        return false;
    }
    *rest_out = (struct bytes){text.data + name.len + 1, text.len - name.len - 1};
    return true;
}

/* True if a child with field number `kind` has this name. */
static bool has_child(struct bytes parent, uint32_t kind, struct bytes name) {
    struct wire wire = wire_of(parent);
    uint32_t field = 0;
    struct bytes child = {0};
    while (wire_next(&wire, &field, &child)) {
        if (field == kind && bytes_equal(wire_find(child, ANY_NAME), name)) {
            return true;
        }
    }
    return false;
}

static bool file_declares(const struct file *file, struct bytes symbol) {
    if (file->package.len > 0 && !text_descend(symbol, file->package, &symbol)) {
        return false;
    }
    struct bytes scope = file->all;
    for (uint32_t depth = 0; depth < DEPTH_MAX; depth++) {
        bool is_file = depth == 0;
        struct wire wire = wire_of(scope);
        uint32_t field = 0;
        struct bytes child = {0};
        struct bytes inner = {0};
        struct bytes inner_name = {0};
        while (wire_next(&wire, &field, &child)) {
            bool is_message = field == (is_file ? FILE_MESSAGE : MESSAGE_NESTED);
            bool is_enum = field == (is_file ? FILE_ENUM : MESSAGE_ENUM);
            bool is_service = is_file && field == FILE_SERVICE;
            bool is_leaf = is_file ? field == FILE_EXTENSION
                                   : field == MESSAGE_FIELD || field == MESSAGE_EXTENSION ||
                                         field == MESSAGE_ONEOF;
            if (!is_message && !is_enum && !is_service && !is_leaf) {
                continue;
            }
            struct bytes name = wire_find(child, ANY_NAME);
            struct bytes rest = {0};
            if (bytes_equal(name, symbol) ||
                (is_enum && has_child(child, ENUM_VALUE, symbol))) { /* values are siblings */
                return true;
            }
            if (is_service && text_descend(symbol, name, &rest) &&
                has_child(child, SERVICE_METHOD, rest)) {
                return true;
            }
            if (is_message && text_descend(symbol, name, &rest)) {
                inner = child;
                inner_name = rest;
            }
        }
        if (inner.data == NULL) {
            return false;
        }
        scope = inner;
        symbol = inner_name;
    }
    return false;
}

static uint32_t file_named(const struct rpc_reflection *reflection, struct bytes name) {
    for (uint32_t i = 0; i < reflection->files_len; i++) {
        if (bytes_equal(reflection->files[i].name, name)) {
            return i;
        }
    }
    return UINT32_MAX;
}

static uint32_t file_declaring(const struct rpc_reflection *reflection, struct bytes symbol) {
    for (uint32_t i = 0; i < reflection->files_len; i++) {
        if (file_declares(&reflection->files[i], symbol)) {
            return i;
        }
    }
    return UINT32_MAX;
}

/* ---- answering -------------------------------------------------------------------------- */

static void send_response(struct rpc_reflection *reflection, struct rpc_call_id call,
                          const Grpc__Reflection__V1__ServerReflectionResponse *response) {
    size_t len = grpc__reflection__v1__server_reflection_response__get_packed_size(response);
    uint8_t *bytes = malloc(len + 1);
    CHECK(bytes != NULL);
    (void)grpc__reflection__v1__server_reflection_response__pack(response, bytes); /* = len */
    rpc_call_send(reflection->rpc, call, bytes, len);
    free(bytes);
}

static void send_error(struct rpc_reflection *reflection, struct rpc_call_id call,
                       Grpc__Reflection__V1__ServerReflectionResponse *response, enum rpc_code code,
                       const char *format, const char *name) {
    char text[NAME_CAP + 128];
    char shown[NAME_SHOWN + 1];
    text_copy(shown, sizeof shown, name);
    struct writer writer;
    writer_init(&writer, text, sizeof text - 1);
    writer_text(&writer, format);
    writer_text(&writer, shown);
    text[writer.len] = '\0';
    Grpc__Reflection__V1__ErrorResponse error = GRPC__REFLECTION__V1__ERROR_RESPONSE__INIT;
    error.error_code = (int32_t)code;
    error.error_message = text;
    response->message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE;
    response->error_response = &error;
    send_response(reflection, call, response);
}

/* The file and everything it imports, each once. */
static void send_file(struct rpc_reflection *reflection, struct rpc_call_id call,
                      Grpc__Reflection__V1__ServerReflectionResponse *response, uint32_t first) {
    uint32_t order[FILES_MAX] = {first};
    bool is_taken[FILES_MAX] = {false};
    is_taken[first] = true;
    uint32_t len = 1;
    for (uint32_t i = 0; i < len; i++) {
        struct wire wire = wire_of(reflection->files[order[i]].all);
        uint32_t field = 0;
        struct bytes value = {0};
        while (wire_next(&wire, &field, &value)) {
            uint32_t index = field == FILE_DEPENDENCY ? file_named(reflection, value) : UINT32_MAX;
            if (index != UINT32_MAX && !is_taken[index]) {
                is_taken[index] = true;
                order[len++] = index;
            }
        }
    }
    ProtobufCBinaryData files[FILES_MAX];
    for (uint32_t i = 0; i < len; i++) {
        struct bytes all = reflection->files[order[i]].all;
        /* protobuf-c has no const; packing only reads. */
        files[i] = (ProtobufCBinaryData){.len = all.len, .data = (uint8_t *)(uintptr_t)all.data};
    }
    Grpc__Reflection__V1__FileDescriptorResponse file =
        GRPC__REFLECTION__V1__FILE_DESCRIPTOR_RESPONSE__INIT;
    file.n_file_descriptor_proto = len;
    file.file_descriptor_proto = files;
    response->message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_FILE_DESCRIPTOR_RESPONSE;
    response->file_descriptor_response = &file;
    send_response(reflection, call, response);
}

static void send_services(struct rpc_reflection *reflection, struct rpc_call_id call,
                          Grpc__Reflection__V1__ServerReflectionResponse *response) {
    char names[SERVICES_MAX][NAME_CAP];
    Grpc__Reflection__V1__ServiceResponse services[SERVICES_MAX];
    Grpc__Reflection__V1__ServiceResponse *list[SERVICES_MAX];
    size_t count = 0;
    const char *name = NULL;
    size_t len = 0;
    while (count < SERVICES_MAX &&
           rpc_server_service(reflection->server, (uint32_t)count, &name, &len)) {
        size_t take = len < NAME_CAP ? len : NAME_CAP - 1;
        memcpy(names[count], name, take);
        names[count][take] = '\0';
        grpc__reflection__v1__service_response__init(&services[count]);
        services[count].name = names[count];
        list[count] = &services[count];
        count++;
    }
    Grpc__Reflection__V1__ListServiceResponse answer =
        GRPC__REFLECTION__V1__LIST_SERVICE_RESPONSE__INIT;
    answer.n_service = count;
    answer.service = list;
    response->message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_LIST_SERVICES_RESPONSE;
    response->list_services_response = &answer;
    send_response(reflection, call, response);
}

static void send_extensions(struct rpc_reflection *reflection, struct rpc_call_id call,
                            Grpc__Reflection__V1__ServerReflectionResponse *response, char *type) {
    if (file_declaring(reflection, (struct bytes){(const uint8_t *)type, strlen(type)}) ==
        UINT32_MAX) {
        send_error(reflection, call, response, RPC_CODE_NOT_FOUND, "no file here declares ", type);
        return;
    }
    Grpc__Reflection__V1__ExtensionNumberResponse answer =
        GRPC__REFLECTION__V1__EXTENSION_NUMBER_RESPONSE__INIT;
    answer.base_type_name = type; /* proto3 messages have no extensions: the list is empty */
    response->message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ALL_EXTENSION_NUMBERS_RESPONSE;
    response->all_extension_numbers_response = &answer;
    send_response(reflection, call, response);
}

static void answer(struct rpc_reflection *reflection, struct rpc_call_id call,
                   Grpc__Reflection__V1__ServerReflectionRequest *request) {
    Grpc__Reflection__V1__ServerReflectionResponse response =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__INIT;
    response.valid_host = request->host;
    response.original_request = request;
    uint32_t file = UINT32_MAX;
    switch (request->message_request_case) {
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES:
        send_services(reflection, call, &response);
        return;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME:
        file = file_named(reflection, (struct bytes){(uint8_t *)request->file_by_filename,
                                                     strlen(request->file_by_filename)});
        if (file == UINT32_MAX) {
            send_error(reflection, call, &response, RPC_CODE_NOT_FOUND, "no file here is named ",
                       request->file_by_filename);
            return;
        }
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL:
        file = file_declaring(reflection, (struct bytes){(uint8_t *)request->file_containing_symbol,
                                                         strlen(request->file_containing_symbol)});
        if (file == UINT32_MAX) {
            send_error(reflection, call, &response, RPC_CODE_NOT_FOUND, "no file here declares ",
                       request->file_containing_symbol);
            return;
        }
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_ALL_EXTENSION_NUMBERS_OF_TYPE:
        send_extensions(reflection, call, &response, request->all_extension_numbers_of_type);
        return;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_EXTENSION:
        send_error(reflection, call, &response, RPC_CODE_NOT_FOUND, "no file here extends ",
                   request->file_containing_extension->containing_type);
        return;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST__NOT_SET:
    case _GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST__CASE_IS_INT_SIZE:
        send_error(reflection, call, &response, RPC_CODE_INVALID_ARGUMENT,
                   "the request asks for nothing: set one of its message_request fields", "");
        return;
    }
    send_file(reflection, call, &response, file);
}

/* ---- handlers --------------------------------------------------------------------------- */

static void info_open(void *ctx, struct rpc_call_id call, const struct rpc_incoming *incoming) {
    (void)ctx, (void)call, (void)incoming; /* each message is answered on its own */
}

/* protobuf-c does not look; what goes back to the client must be text that it can parse. */
static bool request_is_text(const Grpc__Reflection__V1__ServerReflectionRequest *request) {
    const char *text = "";
    switch (request->message_request_case) {
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES:
        text = request->list_services;
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME:
        text = request->file_by_filename;
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL:
        text = request->file_containing_symbol;
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_ALL_EXTENSION_NUMBERS_OF_TYPE:
        text = request->all_extension_numbers_of_type;
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_EXTENSION:
        text = request->file_containing_extension->containing_type;
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST__NOT_SET:
    case _GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST__CASE_IS_INT_SIZE: break;
    }
    return utf8_is_valid((const uint8_t *)text, strlen(text)) &&
           utf8_is_valid((const uint8_t *)request->host, strlen(request->host));
}

static void info_message(void *ctx, struct rpc_call_id call, const uint8_t *data, size_t len) {
    struct rpc_reflection *reflection = ctx;
    Grpc__Reflection__V1__ServerReflectionRequest *request =
        grpc__reflection__v1__server_reflection_request__unpack(NULL, len, data);
    if (request == NULL) {
        rpc_call_finish(reflection->rpc, call, RPC_CODE_INVALID_ARGUMENT,
                        "the message is not a ServerReflectionRequest", NULL, 0);
        return;
    }
    if (request_is_text(request)) {
        answer(reflection, call, request);
    } else {
        rpc_call_finish(reflection->rpc, call, RPC_CODE_INVALID_ARGUMENT,
                        "a text of the ServerReflectionRequest is not UTF-8", NULL, 0);
    }
    grpc__reflection__v1__server_reflection_request__free_unpacked(request, NULL);
}

static void info_half_closed(void *ctx, struct rpc_call_id call) {
    struct rpc_reflection *reflection = ctx;
    rpc_call_finish(reflection->rpc, call, RPC_CODE_OK, NULL, NULL, 0);
}

static void info_closed(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome) {
    (void)ctx, (void)call, (void)outcome; /* nothing is kept for a stream */
}

static const struct rpc_handlers info_handlers = {.on_open = info_open,
                                                  .on_message = info_message,
                                                  .on_half_closed = info_half_closed,
                                                  .on_closed = info_closed};

enum status rpc_reflection_create(struct rpc *rpc, struct rpc_server *server,
                                  struct rpc_reflection **out) {
    struct rpc_reflection *reflection = calloc(1, sizeof *reflection);
    CHECK(reflection != NULL);
    reflection->rpc = rpc;
    reflection->server = server;
    static const char *const paths[] = {
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"};
    for (uint32_t i = 0; i < 2; i++) { /* the two differ in the package name only */
        struct rpc_method method = {.path = paths[i],
                                    .kind = RPC_KIND_BIDI,
                                    .handlers = &info_handlers,
                                    .ctx = reflection,
                                    .queue_bytes_max = QUEUE_BYTES};
        enum status status = rpc_server_method(server, &method);
        if (status != STATUS_OK) {
            free(reflection);
            return status;
        }
    }
    CHECK(rpc_reflection_add(reflection, rpc_descriptors, rpc_descriptors_len) == STATUS_OK);
    *out = reflection;
    return STATUS_OK;
}

enum status rpc_reflection_add(struct rpc_reflection *reflection, const uint8_t *set, size_t len) {
    struct wire wire = wire_of((struct bytes){set, len});
    uint32_t field = 0;
    struct bytes all = {0};
    uint32_t before = reflection->files_len;
    while (wire_next(&wire, &field, &all)) {
        if (field != SET_FILE) {
            continue;
        }
        struct file file = {
            .name = wire_find(all, FILE_NAME), .package = wire_find(all, FILE_PACKAGE), .all = all};
        struct wire inner = wire_of(all);
        struct bytes ignored = {0};
        while (wire_next(&inner, &field, &ignored)) {
        }
        if (inner.is_corrupt || file.name.len == 0) {
            wire.is_corrupt = true;
            break;
        }
        if (file_named(reflection, file.name) == UINT32_MAX) {
            CHECK_OP(reflection->files_len, <, FILES_MAX);
            reflection->files[reflection->files_len++] = file;
        }
    }
    if (wire.is_corrupt || len == 0) {
        reflection->files_len = before;
        return STATUS_CORRUPT;
    }
    return STATUS_OK;
}

void rpc_reflection_destroy(struct rpc_reflection *reflection) {
    free(reflection);
}
