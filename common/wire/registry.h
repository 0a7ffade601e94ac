/* What processes publish about themselves in etcd: proto/baton/v1/registry.proto <-> structs.
 *
 * Discovery is advice, so a record that does not decode is skipped by its reader, never fatal.
 * Everything is copied: the arena is only scratch, and may be reset at once. Any thread. */
#ifndef WIRE_REGISTRY_H
#define WIRE_REGISTRY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"
#include "core/event.h"
#include "core/ids.h"
#include "wire/memory.h"

struct worker_record {
    struct worker_info info;
    uint16_t kv_port;        /* UCX; 0 = none (prefill workers only connect) */
    char admin[ADDRESS_MAX]; /* "host:port" of /metrics and the like; "" = none */
    uint32_t pid;
    uint64_t started_unix_ms;
    char version[LABEL_MAX]; /* of the program */
};

struct router_record {
    struct incarnation incarnation;
    char id[LABEL_MAX];
    char http[ADDRESS_MAX]; /* "" = not served */
    char grpc[ADDRESS_MAX];
    char admin[ADDRESS_MAX];
    uint32_t pid;
    uint64_t started_unix_ms;
    char version[LABEL_MAX];
    bool is_draining;
};

/* Replaces the buffer's contents. STATUS_INVALID for a record without incarnation, id, address (a
 * worker), or with a role other than prefill and decode; STATUS_BUSY without memory. */
MUST_USE enum status worker_record_encode(const struct worker_record *record,
                                          struct wire_buffer *out);
MUST_USE enum status router_record_encode(const struct router_record *record,
                                          struct wire_buffer *out);

/* STATUS_CORRUPT for bytes that are no record or break the facts above or a text's bound. */
MUST_USE enum status worker_record_decode(struct bytes bytes, struct wire_arena *arena,
                                          struct worker_record *out);
MUST_USE enum status router_record_decode(struct bytes bytes, struct wire_arena *arena,
                                          struct router_record *out);

#endif
