#include "wire/registry.h"

#include <string.h>

#include "baton/v1/registry.pb-c.h"
#include "wire/pack.h"
#include "wire/record.h"

#define SLACK_BYTES 4096u

bool wire_text_is_valid(const char *text, size_t cap) {
    return memchr(text, '\0', cap) != NULL;
}

bool wire_text_take(const uint8_t *from, size_t len, char *to, size_t cap) {
    if (len >= cap || (len > 0 && memchr(from, '\0', len) != NULL)) {
        return false;
    }
    if (len > 0) {
        memcpy(to, from, len);
    }
    to[len] = '\0';
    return true;
}

static ProtobufCBinaryData text_data(const char *text) {
    return (ProtobufCBinaryData){strlen(text), wire_borrow(text)};
}

static bool text_take(ProtobufCBinaryData from, char *to, size_t cap) {
    return wire_text_take(from.data, from.len, to, cap);
}

static bool worker_record_is_valid(const struct worker_record *record) {
    const struct worker_info *info = &record->info;
    return info->incarnation.v != 0 && (info->role == ROLE_PREFILL || info->role == ROLE_DECODE) &&
           wire_text_is_valid(info->id, LABEL_MAX) && info->id[0] != '\0' &&
           wire_text_is_valid(info->address, ADDRESS_MAX) && info->address[0] != '\0' &&
           wire_text_is_valid(info->model, LABEL_MAX) &&
           wire_text_is_valid(info->numerics, MESSAGE_NUMERICS_MAX) &&
           wire_text_is_valid(record->admin, ADDRESS_MAX) &&
           wire_text_is_valid(record->version, LABEL_MAX);
}

static bool router_record_is_valid(const struct router_record *record) {
    return record->incarnation.v != 0 && wire_text_is_valid(record->id, LABEL_MAX) &&
           record->id[0] != '\0' && wire_text_is_valid(record->http, ADDRESS_MAX) &&
           wire_text_is_valid(record->grpc, ADDRESS_MAX) &&
           wire_text_is_valid(record->admin, ADDRESS_MAX) &&
           wire_text_is_valid(record->version, LABEL_MAX);
}

bool worker_record_fill(const struct worker_record *from, Baton__Registry__V1__WorkerRecord *to) {
    if (!worker_record_is_valid(from)) {
        return false;
    }
    baton__registry__v1__worker_record__init(to);
    to->incarnation = from->info.incarnation.v;
    to->role = from->info.role;
    to->id = text_data(from->info.id);
    to->address = text_data(from->info.address);
    to->model = text_data(from->info.model);
    to->numerics = text_data(from->info.numerics);
    to->layout_high = from->info.layout.high;
    to->layout_low = from->info.layout.low;
    to->tokenizer = from->info.tokenizer;
    to->vocab = from->info.vocab;
    to->context = from->info.context;
    to->kv_tokens = from->info.kv_tokens;
    to->page_tokens = from->info.page_tokens;
    to->is_draining = from->info.is_draining;
    to->kv_port = from->kv_port;
    to->admin = text_data(from->admin);
    to->pid = from->pid;
    to->started_unix_ms = from->started_unix_ms;
    to->version = text_data(from->version);
    return true;
}

bool worker_record_take(const Baton__Registry__V1__WorkerRecord *from, struct worker_record *to) {
    if (from == NULL || from->role > ROLE_DECODE || from->kv_port > UINT16_MAX) {
        return false;
    }
    struct worker_record record = {.kv_port = (uint16_t)from->kv_port,
                                   .pid = from->pid,
                                   .started_unix_ms = from->started_unix_ms};
    record.info.incarnation.v = from->incarnation;
    record.info.role = (enum role)from->role;
    record.info.layout.high = from->layout_high;
    record.info.layout.low = from->layout_low;
    record.info.tokenizer = from->tokenizer;
    record.info.vocab = from->vocab;
    record.info.context = from->context;
    record.info.kv_tokens = from->kv_tokens;
    record.info.page_tokens = from->page_tokens;
    record.info.is_draining = from->is_draining;
    if (!text_take(from->id, record.info.id, LABEL_MAX) ||
        !text_take(from->address, record.info.address, ADDRESS_MAX) ||
        !text_take(from->model, record.info.model, LABEL_MAX) ||
        !text_take(from->numerics, record.info.numerics, MESSAGE_NUMERICS_MAX) ||
        !text_take(from->admin, record.admin, ADDRESS_MAX) ||
        !text_take(from->version, record.version, LABEL_MAX) || !worker_record_is_valid(&record)) {
        return false;
    }
    *to = record;
    return true;
}

enum status worker_record_encode(const struct worker_record *record, struct wire_buffer *out) {
    out->len = 0;
    Baton__Registry__V1__WorkerRecord message;
    return worker_record_fill(record, &message) ? wire_pack(&message.base, out) : STATUS_INVALID;
}

enum status worker_record_decode(struct bytes bytes, struct wire_arena *arena,
                                 struct worker_record *out) {
    const void *message =
        wire_unpack(&baton__registry__v1__worker_record__descriptor, bytes, arena, SLACK_BYTES);
    return worker_record_take(message, out) ? STATUS_OK : STATUS_CORRUPT;
}

enum status router_record_encode(const struct router_record *record, struct wire_buffer *out) {
    out->len = 0;
    if (!router_record_is_valid(record)) {
        return STATUS_INVALID;
    }
    Baton__Registry__V1__RouterRecord message = BATON__REGISTRY__V1__ROUTER_RECORD__INIT;
    message.incarnation = record->incarnation.v;
    message.id = text_data(record->id);
    message.http = text_data(record->http);
    message.grpc = text_data(record->grpc);
    message.admin = text_data(record->admin);
    message.pid = record->pid;
    message.started_unix_ms = record->started_unix_ms;
    message.version = text_data(record->version);
    message.is_draining = record->is_draining;
    return wire_pack(&message.base, out);
}

enum status router_record_decode(struct bytes bytes, struct wire_arena *arena,
                                 struct router_record *out) {
    const void *unpacked =
        wire_unpack(&baton__registry__v1__router_record__descriptor, bytes, arena, SLACK_BYTES);
    if (unpacked == NULL) {
        return STATUS_CORRUPT;
    }
    const Baton__Registry__V1__RouterRecord *from = unpacked;
    struct router_record record = {.incarnation = {from->incarnation},
                                   .pid = from->pid,
                                   .started_unix_ms = from->started_unix_ms,
                                   .is_draining = from->is_draining};
    if (!text_take(from->id, record.id, LABEL_MAX) ||
        !text_take(from->http, record.http, ADDRESS_MAX) ||
        !text_take(from->grpc, record.grpc, ADDRESS_MAX) ||
        !text_take(from->admin, record.admin, ADDRESS_MAX) ||
        !text_take(from->version, record.version, LABEL_MAX) || !router_record_is_valid(&record)) {
        return STATUS_CORRUPT;
    }
    *out = record;
    return STATUS_OK;
}
