/* Health and reflection, which every program serves to whoever connects: a program of calls,
 * messages right, nearly right and raw, changes of health, and ends. Under the real handlers lies
 * a false rpc that only keeps books.
 *
 * Checked: a Check gets one answer or one refusal, a Watch the present state and then changes only,
 * each reflection message one answer that any client can parse (its texts are UTF-8), or the end of
 * its stream with a sentence. */
#include <stdio.h>

#include "fuzz/fuzz.h"
#include "rpc/health.h"
#include "rpc/proto/health.pb-c.h"
#include "rpc/proto/reflection_v1.pb-c.h"
#include "rpc/reflection.h"
#include "rpc/rpc.h"
#include "runtime/mail.h"

#define METHODS_MAX 8u
#define CALLS_MAX   300u /* more than the watchers that health keeps */

struct rpc_server {
    struct rpc_method methods[METHODS_MAX];
    uint32_t method_count;
};

struct call {
    const struct rpc_method *method; /* NULL = free */
    uint64_t id;
    uint32_t sent; /* since it was last looked at */
    bool is_finished;
    int last; /* Watch: the state last sent */
};

static struct {
    struct rpc_server server;
    struct call calls[CALLS_MAX];
    uint64_t next_id;
    struct mail *mail;
    struct rpc_health *health;
    struct rpc_reflection *reflection;
} bed;

static char no_rpc;

/* ---- the false rpc ---- */

enum status rpc_server_method(struct rpc_server *server, const struct rpc_method *method) {
    CHECK_OP(server->method_count, <, METHODS_MAX);
    server->methods[server->method_count++] = *method;
    return STATUS_OK;
}

bool rpc_server_service(const struct rpc_server *server, uint32_t index, const char **name_out,
                        size_t *len_out) {
    if (index >= server->method_count) {
        return false;
    }
    const char *path = server->methods[index].path;
    *name_out = path + 1;
    *len_out = (size_t)(strrchr(path, '/') - path - 1);
    return true;
}

bool rpc_post(struct rpc *rpc, struct mail *mail) {
    CHECK((void *)rpc == &no_rpc && bed.mail == NULL);
    bed.mail = mail;
    return true;
}

static struct call *call_find(uint64_t id) {
    for (uint32_t i = 0; i < CALLS_MAX; i++) {
        if (bed.calls[i].method != NULL && bed.calls[i].id == id) {
            return &bed.calls[i];
        }
    }
    return NULL;
}

static void check_text(const char *text) {
    CHECK(utf8_is_valid((const uint8_t *)text, strlen(text)));
}

static void check_health(struct call *call, const uint8_t *data, size_t len) {
    Grpc__Health__V1__HealthCheckResponse *answer =
        grpc__health__v1__health_check_response__unpack(NULL, len, data);
    CHECK(answer != NULL);
    CHECK((int)answer->status != call->last); /* a Watch hears of changes only */
    call->last = (int)answer->status;
    grpc__health__v1__health_check_response__free_unpacked(answer, NULL);
}

static void check_reflection(const uint8_t *data, size_t len) {
    Grpc__Reflection__V1__ServerReflectionResponse *answer =
        grpc__reflection__v1__server_reflection_response__unpack(NULL, len, data);
    CHECK(answer != NULL && answer->original_request != NULL);
    check_text(answer->valid_host);
    CHECK(answer->message_response_case !=
          GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE__NOT_SET);
    if (answer->message_response_case ==
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE) {
        CHECK(answer->error_response->error_message[0] != '\0');
        check_text(answer->error_response->error_message);
    }
    const Grpc__Reflection__V1__ServerReflectionRequest *request = answer->original_request;
    if (request->message_request_case ==
        GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL) {
        check_text(request->file_containing_symbol);
    }
    grpc__reflection__v1__server_reflection_response__free_unpacked(answer, NULL);
}

static bool is_reflection(const struct call *call) {
    return call->method->kind == RPC_KIND_BIDI;
}

void rpc_call_send(struct rpc *rpc, struct rpc_call_id id, const void *data, size_t len) {
    struct call *call = call_find(id.v);
    CHECK((void *)rpc == &no_rpc && call != NULL && !call->is_finished);
    call->sent++;
    if (is_reflection(call)) {
        check_reflection(data, len);
    } else {
        check_health(call, data, len);
    }
}

void rpc_call_finish(struct rpc *rpc, struct rpc_call_id id, enum rpc_code code,
                     const char *message, const struct rpc_pair *trailers, size_t trailers_len) {
    struct call *call = call_find(id.v);
    CHECK((void *)rpc == &no_rpc && call != NULL && !call->is_finished);
    CHECK(trailers == NULL && trailers_len == 0);
    call->is_finished = true;
    CHECK((code == RPC_CODE_OK) == (message == NULL));
    if (message != NULL) {
        CHECK(strlen(message) > 10);
    }
}

/* ---- what clients do ---- */

static struct call *call_open(uint32_t method, struct bytes payload) {
    struct call *call = NULL;
    for (uint32_t i = 0; i < CALLS_MAX && call == NULL; i++) {
        call = bed.calls[i].method == NULL ? &bed.calls[i] : NULL;
    }
    if (call == NULL) {
        return NULL;
    }
    *call = (struct call){.method = &bed.server.methods[method], .id = ++bed.next_id, .last = -1};
    const struct rpc_incoming incoming = {
        .method = call->method->path, .peer = "ipv4:1.2.3.4:5", .payload = payload};
    call->method->handlers->on_open(call->method->ctx, (struct rpc_call_id){call->id}, &incoming);
    return call;
}

static void call_close(struct call *call) {
    struct call over = *call;
    *call = (struct call){.method = NULL};
    const struct rpc_outcome outcome = {.message = "", .end = RPC_END_PEER};
    over.method->handlers->on_closed(over.method->ctx, (struct rpc_call_id){over.id}, &outcome);
}

static const char *const names[] = {
    "",
    "baton.v1.Inference",
    "grpc.health.v1.Health",
    "grpc.health.v1.Health.Check",
    "grpc.health.v1.HealthCheckResponse.ServingStatus",
    "grpc.health.v1.HealthCheckResponse.SERVING",
    "grpc.health.v1.HealthCheckRequest.service",
    "grpc.reflection.v1.ServerReflection.ServerReflectionInfo",
    "grpc.reflection.v1.ServerReflectionRequest.message_request",
    "grpc/health/v1/health.proto",
    "rpc/proto/health.proto",
};

/* One of the names above, perhaps with something behind it, or the input's own bytes. The caller
 * frees it. */
static char *draw_text(struct input *input) {
    uint8_t how = input_u8(input);
    const char *name = names[how % (sizeof names / sizeof names[0])];
    struct bytes more = input_bytes(input, how < 128 ? 0 : how < 192 ? 4 : input_u8(input));
    char *tail = input_text(more);
    size_t cap = strlen(name) + strlen(tail) + 1;
    char *text = malloc(cap);
    CHECK(text != NULL);
    CHECK(snprintf(text, cap, "%s%s", how < 220 ? name : "", tail) < (int)cap);
    free(tail);
    return text;
}

static uint8_t *packed(const ProtobufCMessage *message, size_t *len_out) {
    *len_out = protobuf_c_message_get_packed_size(message);
    uint8_t *bytes = malloc(*len_out + 1);
    CHECK(bytes != NULL);
    CHECK_OP(protobuf_c_message_pack(message, bytes), ==, *len_out);
    return bytes;
}

static uint8_t *raw(struct input *input, size_t *len_out) {
    struct bytes bytes = input_bytes(input, input_u8(input));
    *len_out = bytes.len;
    return input_copy(bytes);
}

static void health_call(struct input *input, bool is_watch) {
    size_t len = 0;
    uint8_t *bytes = NULL;
    if (input_u8(input) > 240) {
        bytes = raw(input, &len);
    } else {
        Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
        char *text = draw_text(input);
        request.service = text;
        bytes = packed(&request.base, &len);
        free(text);
    }
    struct call *call = call_open(is_watch ? 1 : 0, (struct bytes){bytes, len});
    free(bytes);
    if (call == NULL) {
        return;
    }
    if (is_watch) { /* it goes on, or was refused */
        CHECK(call->is_finished ? call->sent == 0 : call->sent == 1);
    } else {
        CHECK(call->is_finished && call->sent <= 1);
    }
    call->sent = 0;
    if (call->is_finished) {
        call_close(call);
    }
}

static uint8_t *draw_question(struct input *input, size_t *len_out) {
    Grpc__Reflection__V1__ServerReflectionRequest request =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT;
    Grpc__Reflection__V1__ExtensionRequest extension =
        GRPC__REFLECTION__V1__EXTENSION_REQUEST__INIT;
    uint8_t how = input_u8(input);
    char *host = draw_text(input);
    char *text = draw_text(input);
    request.host = host;
    request.message_request_case =
        (Grpc__Reflection__V1__ServerReflectionRequest__MessageRequestCase)(3 + how % 5);
    switch (how % 5) {
    case 0: request.file_by_filename = text; break;
    case 1: request.file_containing_symbol = text; break;
    case 2:
        extension.containing_type = text;
        request.file_containing_extension = &extension;
        break;
    case 3: request.all_extension_numbers_of_type = text; break;
    case 4: request.list_services = text; break;
    }
    uint8_t *bytes = packed(&request.base, len_out);
    free(host);
    free(text);
    return bytes;
}

static void reflection_message(struct input *input) {
    struct call *call = NULL;
    uint32_t skip = input_u8(input) % 4;
    for (uint32_t i = 0; i < CALLS_MAX; i++) {
        struct call *each = &bed.calls[i];
        if (each->method != NULL && is_reflection(each) && (call == NULL || skip-- > 0)) {
            call = each;
        }
    }
    if (call == NULL) {
        (void)call_open(2 + input_u8(input) % 2, (struct bytes){0});
        return;
    }
    struct rpc_call_id id = {call->id};
    const struct rpc_handlers *handlers = call->method->handlers;
    uint8_t how = input_u8(input);
    if (how < 8) {
        handlers->on_half_closed(call->method->ctx, id);
        CHECK(call->is_finished && call->sent == 0);
    } else {
        size_t len = 0;
        uint8_t *bytes = how > 200 ? raw(input, &len) : draw_question(input, &len);
        handlers->on_message(call->method->ctx, id, bytes, len);
        free(bytes);
        CHECK_OP(call->sent + (call->is_finished ? 1 : 0), ==, 1);
    }
    call->sent = 0;
    if (call->is_finished) { /* rpc hands nothing more to a call that we have finished */
        call_close(call);
    }
}

static void mail_run(void) {
    struct mail *mail = bed.mail;
    bed.mail = NULL;
    if (mail != NULL) {
        mail->run(mail, NULL);
        for (uint32_t i = 0; i < CALLS_MAX; i++) {
            CHECK_OP(bed.calls[i].sent, <=, 1);
            bed.calls[i].sent = 0;
        }
    }
}

static void step(struct input *input) {
    uint8_t what = input_u8(input);
    if (what < 60) {
        health_call(input, what % 2 == 1);
    } else if (what < 64) { /* a crowd */
        for (uint32_t i = 0; i < 100; i++) {
            struct call *call = call_open(1, (struct bytes){0});
            if (call != NULL && call->is_finished) {
                call_close(call);
            } else if (call != NULL) {
                call->sent = 0;
            }
        }
    } else if (what < 90) {
        rpc_health_set(bed.health, names[what % 3], input_u8(input) % 2 == 0);
    } else if (what < 110) {
        mail_run();
    } else if (what < 130) {
        struct call *call = &bed.calls[input_u16(input) % CALLS_MAX];
        if (call->method != NULL) {
            call_close(call);
        }
    } else {
        reflection_message(input);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    memset(&bed, 0, sizeof bed);
    struct input input = input_of(data, len);
    struct rpc *rpc = (struct rpc *)(void *)&no_rpc;
    CHECK_OP(rpc_health_create(rpc, &bed.server, &bed.health), ==, STATUS_OK);
    CHECK_OP(rpc_reflection_create(rpc, &bed.server, &bed.reflection), ==, STATUS_OK);
    /* Another program's descriptors are embedded by the build; a damaged set is refused whole. */
    size_t set_len = 0;
    uint8_t *set = raw(&input, &set_len);
    enum status added = rpc_reflection_add(bed.reflection, set, set_len);
    CHECK(added == STATUS_OK || added == STATUS_CORRUPT);
    while (input.len > 0) {
        step(&input);
    }
    mail_run();
    for (uint32_t i = 0; i < CALLS_MAX; i++) {
        if (bed.calls[i].method != NULL) {
            call_close(&bed.calls[i]);
        }
    }
    rpc_reflection_destroy(bed.reflection);
    rpc_health_destroy(bed.health);
    free(set);
    return 0;
}
