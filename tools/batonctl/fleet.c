#include "tools/batonctl/fleet.h"

#include <errno.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/time.h"
#include "etcd/etcd.h"
#include "rpc/rpc.h"
#include "runtime/config.h"
#include "runtime/log.h"
#include "wire/registry.h"

#define CALL_MS     3000
#define END_MS      2000
#define PREFIX_MAX  96u
#define ADDRESS_CAP 16384u

struct reading {
    struct programs programs;
    enum status status;
    char why[256];
    size_t prefix_len;
    sem_t done;
    sem_t closed;
};

static struct program *programs_add(struct programs *programs) {
    if ((programs->count & (programs->count + 1)) == 0) { /* full at 0, 1, 3, 7, ... */
        programs->items =
            realloc(programs->items, (programs->count * 2 + 1) * sizeof *programs->items);
        CHECK(programs->items != NULL);
    }
    struct program *program = &programs->items[programs->count++];
    memset(program, 0, sizeof *program);
    return program;
}

static void take_worker(struct programs *programs, const struct worker_record *record) {
    struct program *program = programs_add(programs);
    program->role = record->info.role;
    program->incarnation = record->info.incarnation.v;
    program->started_unix_ms = record->started_unix_ms;
    program->pid = record->pid;
    program->is_draining = record->info.is_draining;
    text_copy(program->id, sizeof program->id, record->info.id);
    text_copy(program->admin, sizeof program->admin, record->admin);
    text_copy(program->grpc, sizeof program->grpc, record->info.address);
    text_copy(program->model, sizeof program->model, record->info.model);
    text_copy(program->version, sizeof program->version, record->version);
}

static void take_router(struct programs *programs, const struct router_record *record) {
    struct program *program = programs_add(programs);
    program->role = ROLE_ROUTER;
    program->incarnation = record->incarnation.v;
    program->started_unix_ms = record->started_unix_ms;
    program->pid = record->pid;
    program->is_draining = record->is_draining;
    text_copy(program->id, sizeof program->id, record->id);
    text_copy(program->admin, sizeof program->admin, record->admin);
    text_copy(program->grpc, sizeof program->grpc, record->grpc);
    text_copy(program->version, sizeof program->version, record->version);
}

static bool begins(struct bytes key, size_t skip, const char *with) {
    size_t len = strlen(with);
    return key.len >= skip + len && memcmp(key.data + skip, with, len) == 0;
}

static void on_range(void *ctx, const struct etcd_reply *reply) {
    struct reading *reading = ctx;
    reading->status = reply->status;
    text_copy(reading->why, sizeof reading->why, reply->message);
    struct wire_arena arena = {0};
    for (size_t i = 0; reply->status == STATUS_OK && i < reply->kvs_len; i++) {
        const struct etcd_kv *kv = &reply->kvs[i];
        struct worker_record worker;
        struct router_record router;
        wire_arena_reset(&arena);
        if (begins(kv->key, reading->prefix_len, "workers/") &&
            worker_record_decode(kv->value, &arena, &worker) == STATUS_OK) {
            take_worker(&reading->programs, &worker);
        } else if (begins(kv->key, reading->prefix_len, "routers/") &&
                   router_record_decode(kv->value, &arena, &router) == STATUS_OK) {
            take_router(&reading->programs, &router);
        } else {
            reading->programs.unreadable++;
        }
    }
    wire_arena_fini(&arena);
    (void)sem_post(&reading->done);
}

static void on_closed(void *ctx) {
    struct reading *reading = ctx;
    (void)sem_post(&reading->closed);
}

static bool wait_for(sem_t *what, int64_t ms) {
    struct timespec until;
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += ms / 1000;
    int rc = 0;
    do {
        rc = sem_timedwait(what, &until);
    } while (rc != 0 && errno == EINTR);
    return rc == 0;
}

/* False if something still uses `reading`: it must then live on. */
static bool read_range(struct reading *reading, const char *etcd_urls, const char *prefix) {
    struct rpc *rpc = NULL;
    struct etcd *etcd = NULL;
    struct etcd_error error = {.text = ""};
    reading->status = STATUS_INTERNAL;
    text_copy(reading->why, sizeof reading->why, "gRPC cannot be started");
    const struct rpc_config rpc_config = {.name = "rpc", .calls_max = 64};
    if (rpc_create(&rpc_config, &rpc) != STATUS_OK) {
        return true;
    }
    const struct etcd_config config = {.endpoints = etcd_urls, .call_timeout = span_ms(CALL_MS)};
    reading->status = etcd_create(rpc, &config, &etcd, &error);
    bool is_over = true;
    if (reading->status != STATUS_OK) {
        text_copy(reading->why, sizeof reading->why, error.text);
    } else {
        /* Also a member without a leader may answer: what it knows is better than nothing. */
        const struct etcd_range range = {
            .key = etcd_text(prefix), .is_prefix = true, .is_serializable = true};
        enum status asked = etcd_range(etcd, &range, on_range, reading);
        if (asked != STATUS_OK) {
            reading->status = asked;
            text_copy(reading->why, sizeof reading->why, "etcd cannot be asked");
        } else {
            is_over = wait_for(&reading->done, CALL_MS + END_MS);
        }
        etcd_close(etcd, on_closed, reading);
        is_over = wait_for(&reading->closed, END_MS) && is_over;
        if (is_over) {
            etcd_destroy(etcd);
        }
    }
    if (is_over && rpc_shutdown(rpc, span_ms(0), span_ms(END_MS)) == STATUS_OK) {
        rpc_destroy(rpc);
        return true;
    }
    return is_over;
}

static int by_role_and_id(const void *a, const void *b) {
    const struct program *left = a;
    const struct program *right = b;
    if (left->role != right->role) {
        return left->role < right->role ? -1 : 1;
    }
    int order = strverscmp(left->id, right->id); /* decode-2 before decode-10 */
    if (order != 0) {
        return order;
    }
    return left->incarnation < right->incarnation ? -1 : left->incarnation > right->incarnation;
}

enum status programs_read(const char *etcd, const char *cluster, struct programs *programs_out,
                          char why[static 512]) {
    if (strspn(cluster, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") !=
            strlen(cluster) ||
        strlen(cluster) > 63) {
        (void)snprintf(why, 512,
                       "--cluster is 1 to 63 of letters, digits, '.', '_' and '-', not '%s'",
                       cluster);
        return STATUS_INVALID;
    }
    /* Whatever is wrong with etcd comes back as a sentence; the library's own lines would only
     * stand between the operator and the table. */
    log_set_level(LOG_LEVEL_ERROR);
    struct reading *reading = calloc(1, sizeof *reading);
    CHECK(reading != NULL);
    (void)sem_init(&reading->done, 0, 0);
    (void)sem_init(&reading->closed, 0, 0);
    char prefix[PREFIX_MAX];
    (void)snprintf(prefix, sizeof prefix, "/baton/%s/", cluster);
    reading->prefix_len = strlen(prefix);
    if (!read_range(reading, etcd, prefix)) {
        (void)snprintf(why, 512, "the etcd client did not end in time");
        return STATUS_TIMEOUT; /* `reading` is still in use */
    }
    enum status status = reading->status;
    if (status == STATUS_OK) {
        *programs_out = reading->programs;
        if (programs_out->count > 0) {
            qsort(programs_out->items, programs_out->count, sizeof *programs_out->items,
                  by_role_and_id);
        }
    } else {
        (void)snprintf(why, 512, "%s", reading->why);
    }
    (void)sem_destroy(&reading->done);
    (void)sem_destroy(&reading->closed);
    free(reading);
    return status;
}

enum status programs_at(const char *addresses, struct programs *programs_out,
                        char why[static 512]) {
    struct programs programs = {.items = NULL};
    for (const char *at = addresses; *at != '\0';) {
        size_t len = strcspn(at, ",");
        char text[ADDRESS_MAX];
        struct config_address address;
        (void)snprintf(text, sizeof text, "%.*s", (int)(len < ADDRESS_CAP ? len : 0), at);
        if (len == 0 || len >= ADDRESS_MAX || !config_address_parse(text, &address) ||
            address.port == 0) {
            (void)snprintf(why, 512, "--at is HOST:PORT[,HOST:PORT...] of admin ports; '%s' is not",
                           text);
            programs_fini(&programs);
            return STATUS_INVALID;
        }
        text_copy(programs_add(&programs)->admin, ADDRESS_MAX, text);
        at += len + (at[len] == ',' ? 1 : 0);
    }
    *programs_out = programs;
    return STATUS_OK;
}

void programs_fini(struct programs *programs) {
    free(programs->items);
    *programs = (struct programs){.items = NULL};
}
