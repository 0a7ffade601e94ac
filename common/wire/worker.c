#include "wire/worker.h"

#include <string.h>

#include "baton/v1/worker.pb-c.h"
#include "wire/pack.h"
#include "wire/record.h"

#define SLACK_BYTES (64u * 1024u)

bool files_name_is_valid(const char *name) {
    if (!wire_text_is_valid(name, FILES_NAME_BYTES_MAX) || name[0] == '\0' || name[0] == '.') {
        return false;
    }
    for (size_t i = 0; name[i] != '\0'; i++) {
        if (name[i] == '/' || (unsigned char)name[i] < 0x20 || name[i] == 0x7f) {
            return false;
        }
    }
    return true;
}

static bool files_request_is_valid(const struct files_request *request) {
    if (request->count == 0 || request->count > FILES_NAMES_MAX) {
        return false;
    }
    for (uint32_t i = 0; i < request->count; i++) {
        if (!files_name_is_valid(request->names[i])) {
            return false;
        }
    }
    return true;
}

static bool file_chunk_is_valid(const struct file_chunk *chunk) {
    if (!files_name_is_valid(chunk->name) || chunk->data.len > FILES_CHUNK_MAX ||
        chunk->offset > chunk->total_bytes ||
        chunk->data.len > chunk->total_bytes - chunk->offset ||
        (chunk->data.len > 0 && chunk->data.data == NULL)) {
        return false;
    }
    if (chunk->is_missing && (!chunk->is_last || chunk->total_bytes != 0)) {
        return false;
    }
    return chunk->is_last == (chunk->offset + chunk->data.len == chunk->total_bytes);
}

enum status files_request_encode(const struct files_request *request, struct wire_buffer *out) {
    out->len = 0;
    if (!files_request_is_valid(request)) {
        return STATUS_INVALID;
    }
    ProtobufCBinaryData names[FILES_NAMES_MAX];
    for (uint32_t i = 0; i < request->count; i++) {
        names[i] = (ProtobufCBinaryData){strlen(request->names[i]), wire_borrow(request->names[i])};
    }
    Baton__Worker__V1__FilesRequest message = BATON__WORKER__V1__FILES_REQUEST__INIT;
    message.n_names = request->count;
    message.names = names;
    return wire_pack(&message.base, out);
}

enum status files_request_decode(struct bytes bytes, struct wire_arena *arena,
                                 struct files_request *out) {
    const void *unpacked =
        wire_unpack(&baton__worker__v1__files_request__descriptor, bytes, arena, SLACK_BYTES);
    if (unpacked == NULL) {
        return STATUS_CORRUPT;
    }
    const Baton__Worker__V1__FilesRequest *from = unpacked;
    if (from->n_names > FILES_NAMES_MAX) {
        return STATUS_CORRUPT;
    }
    struct files_request request = {.count = (uint32_t)from->n_names};
    for (size_t i = 0; i < from->n_names; i++) {
        if (!wire_text_take(from->names[i].data, from->names[i].len, request.names[i],
                            FILES_NAME_BYTES_MAX)) {
            return STATUS_CORRUPT;
        }
    }
    if (!files_request_is_valid(&request)) {
        return STATUS_CORRUPT;
    }
    *out = request;
    return STATUS_OK;
}

enum status file_chunk_encode(const struct file_chunk *chunk, struct wire_buffer *out) {
    out->len = 0;
    if (!file_chunk_is_valid(chunk)) {
        return STATUS_INVALID;
    }
    Baton__Worker__V1__FileChunk message = BATON__WORKER__V1__FILE_CHUNK__INIT;
    message.name = (ProtobufCBinaryData){strlen(chunk->name), wire_borrow(chunk->name)};
    message.total_bytes = chunk->total_bytes;
    message.offset = chunk->offset;
    message.digest = chunk->digest;
    message.data = (ProtobufCBinaryData){chunk->data.len, wire_borrow(chunk->data.data)};
    message.is_last = chunk->is_last;
    message.is_missing = chunk->is_missing;
    return wire_pack(&message.base, out);
}

enum status file_chunk_decode(struct bytes bytes, struct wire_arena *arena,
                              struct file_chunk *out) {
    const void *unpacked =
        wire_unpack(&baton__worker__v1__file_chunk__descriptor, bytes, arena, SLACK_BYTES);
    if (unpacked == NULL) {
        return STATUS_CORRUPT;
    }
    const Baton__Worker__V1__FileChunk *from = unpacked;
    struct file_chunk chunk = {.total_bytes = from->total_bytes,
                               .offset = from->offset,
                               .digest = from->digest,
                               .data = {from->data.data, from->data.len},
                               .is_last = from->is_last,
                               .is_missing = from->is_missing};
    if (!wire_text_take(from->name.data, from->name.len, chunk.name, FILES_NAME_BYTES_MAX) ||
        !file_chunk_is_valid(&chunk)) {
        return STATUS_CORRUPT;
    }
    *out = chunk;
    return STATUS_OK;
}

enum status describe_request_encode(struct wire_buffer *out) {
    Baton__Worker__V1__DescribeRequest message = BATON__WORKER__V1__DESCRIBE_REQUEST__INIT;
    return wire_pack(&message.base, out);
}

enum status describe_request_decode(struct bytes bytes, struct wire_arena *arena) {
    const void *unpacked =
        wire_unpack(&baton__worker__v1__describe_request__descriptor, bytes, arena, SLACK_BYTES);
    return unpacked != NULL ? STATUS_OK : STATUS_CORRUPT;
}

enum status describe_reply_encode(const struct worker_record *record, struct wire_buffer *out) {
    out->len = 0;
    Baton__Registry__V1__WorkerRecord inner;
    if (!worker_record_fill(record, &inner)) {
        return STATUS_INVALID;
    }
    Baton__Worker__V1__DescribeReply message = BATON__WORKER__V1__DESCRIBE_REPLY__INIT;
    message.record = &inner;
    return wire_pack(&message.base, out);
}

enum status describe_reply_decode(struct bytes bytes, struct wire_arena *arena,
                                  struct worker_record *out) {
    const void *unpacked =
        wire_unpack(&baton__worker__v1__describe_reply__descriptor, bytes, arena, SLACK_BYTES);
    if (unpacked == NULL) {
        return STATUS_CORRUPT;
    }
    const Baton__Worker__V1__DescribeReply *from = unpacked;
    return worker_record_take(from->record, out) ? STATUS_OK : STATUS_CORRUPT;
}
