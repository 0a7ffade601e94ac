/* The worker's own service: proto/baton/v1/worker.proto <-> structs.
 *
 * A router fetches a model's small text files (tokenizer.json, ...) from any worker that serves it:
 * Files streams chunks, file after file in the order asked for; Describe returns the record of the
 * registry. Decoded pointers live until wire_arena_reset. Any thread. */
#ifndef WIRE_WORKER_H
#define WIRE_WORKER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"
#include "core/ids.h"
#include "wire/memory.h"
#include "wire/registry.h"

#define FILES_NAMES_MAX      8u
#define FILES_CHUNK_MAX      (256u * 1024u) /* bytes of data in one chunk */
#define FILES_NAME_BYTES_MAX LABEL_MAX      /* with the NUL */

struct files_request {
    uint32_t count; /* 1 .. FILES_NAMES_MAX */
    char names[FILES_NAMES_MAX][FILES_NAME_BYTES_MAX];
};

struct file_chunk {
    char name[FILES_NAME_BYTES_MAX];
    uint64_t total_bytes; /* of the whole file */
    uint64_t offset;      /* of data in the file */
    uint64_t digest;      /* XXH3-64 of the whole file; the same in every chunk */
    struct bytes data;    /* at most FILES_CHUNK_MAX; offset + len <= total_bytes */
    bool is_last;         /* of this file; then offset + len == total_bytes */
    bool is_missing;      /* the worker has no such file: one chunk, is_last, without data */
};

/* A name is a plain file name: not empty, no '/', no control bytes, no leading dot. */
bool files_name_is_valid(const char *name);

/* Encoders replace the buffer's contents and return STATUS_INVALID for structs that break the
 * facts above, STATUS_BUSY without memory; decoders return STATUS_CORRUPT for them. Which files a
 * worker hands out is its own decision. */
MUST_USE enum status files_request_encode(const struct files_request *request,
                                          struct wire_buffer *out);
MUST_USE enum status files_request_decode(struct bytes bytes, struct wire_arena *arena,
                                          struct files_request *out);
MUST_USE enum status file_chunk_encode(const struct file_chunk *chunk, struct wire_buffer *out);
MUST_USE enum status file_chunk_decode(struct bytes bytes, struct wire_arena *arena,
                                       struct file_chunk *out);
MUST_USE enum status describe_request_encode(struct wire_buffer *out);
MUST_USE enum status describe_request_decode(struct bytes bytes, struct wire_arena *arena);
MUST_USE enum status describe_reply_encode(const struct worker_record *record,
                                           struct wire_buffer *out);
MUST_USE enum status describe_reply_decode(struct bytes bytes, struct wire_arena *arena,
                                           struct worker_record *out);

#endif
