#include "registry/fleet.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/map.h"
#include "base/prng.h"
#include "etcd/etcd.h"
#include "runtime/clock.h"
#include "runtime/log.h"

#define COMPLAINT_MS 5000

struct fleet {
    char prefix[160]; /* "/baton/CLUSTER/workers/" */
    size_t prefix_len;
    const struct registry_fleet_handlers *handlers;
    void *ctx;
    struct etcd_watch *watch;
    struct wire_arena arena;
    uint64_t *workers; /* [FLEET_WORKERS_MAX]: the incarnations that were delivered as seen */
    uint32_t workers_len;
    struct map map; /* incarnation -> index into workers */
    void *map_memory;
    bool is_broken;
    struct instant complained_at;

    _Atomic uint64_t seen;
    _Atomic uint64_t lost;
    _Atomic uint64_t malformed;
    _Atomic uint64_t workers_count;
    _Atomic uint64_t breaks;
    atomic_bool is_synced;
};

/* Relaxed: figures, nothing hangs on them. */
static void count(_Atomic uint64_t *counter) {
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

struct fleet *fleet_create(const char *prefix) {
    struct fleet *fleet = calloc(1, sizeof(*fleet));
    CHECK(fleet != NULL);
    fleet->workers = calloc(FLEET_WORKERS_MAX, sizeof(*fleet->workers));
    fleet->map_memory = calloc(1, map_bytes(FLEET_WORKERS_MAX));
    CHECK(fleet->workers != NULL && fleet->map_memory != NULL);
    map_init(&fleet->map, FLEET_WORKERS_MAX, fleet->map_memory);
    (void)snprintf(fleet->prefix, sizeof(fleet->prefix), "%sworkers/", prefix);
    fleet->prefix_len = strlen(fleet->prefix);
    return fleet;
}

void fleet_destroy(struct fleet *fleet) {
    if (fleet == NULL) {
        return;
    }
    CHECK(fleet->watch == NULL);
    wire_arena_fini(&fleet->arena);
    free(fleet->map_memory);
    free(fleet->workers);
    free(fleet);
}

void fleet_set_handlers(struct fleet *fleet, const struct registry_fleet_handlers *handlers,
                        void *ctx) {
    fleet->handlers = handlers;
    fleet->ctx = ctx;
}

/* ---- the set of delivered workers ------------------------------------------------------------ */

static uint32_t worker_find(const struct fleet *fleet, uint64_t incarnation) {
    uint32_t cursor = 0;
    uint32_t index = map_next(&fleet->map, mix64(incarnation), &cursor);
    while (index != UINT32_MAX && fleet->workers[index] != incarnation) {
        index = map_next(&fleet->map, mix64(incarnation), &cursor);
    }
    return index;
}

static bool worker_add(struct fleet *fleet, uint64_t incarnation) {
    if (worker_find(fleet, incarnation) != UINT32_MAX) {
        return true;
    }
    if (fleet->workers_len == FLEET_WORKERS_MAX) {
        return false;
    }
    fleet->workers[fleet->workers_len] = incarnation;
    map_add(&fleet->map, mix64(incarnation), fleet->workers_len);
    fleet->workers_len++;
    return true;
}

static bool worker_remove(struct fleet *fleet, uint64_t incarnation) {
    uint32_t index = worker_find(fleet, incarnation);
    if (index == UINT32_MAX) {
        return false;
    }
    uint32_t last = fleet->workers_len - 1;
    bool is_removed = map_remove(&fleet->map, mix64(incarnation), index);
    CHECK(is_removed);
    if (index != last) { /* the last one moves into the gap */
        is_removed = map_remove(&fleet->map, mix64(fleet->workers[last]), last);
        CHECK(is_removed);
        fleet->workers[index] = fleet->workers[last];
        map_add(&fleet->map, mix64(fleet->workers[index]), index);
    }
    fleet->workers_len = last;
    return true;
}

/* ---- events ---------------------------------------------------------------------------------- */

/* The incarnation in "/baton/CLUSTER/workers/<16 hexadecimal digits>"; 0 if it is not of that form.
 */
static uint64_t incarnation_of(const struct fleet *fleet, struct bytes key) {
    if (key.len != fleet->prefix_len + 16) {
        return 0;
    }
    uint64_t incarnation = 0;
    for (size_t i = 0; i < 16; i++) {
        uint8_t digit = key.data[fleet->prefix_len + i];
        uint64_t value = 0;
        if (digit >= '0' && digit <= '9') {
            value = (uint64_t)digit - '0';
        } else if (digit >= 'a' && digit <= 'f') {
            value = (uint64_t)digit - 'a' + 10;
        } else {
            return 0;
        }
        incarnation = incarnation << 4 | value;
    }
    return incarnation;
}

static void refuse(struct fleet *fleet, struct bytes key, const char *why) {
    count(&fleet->malformed);
    LOG_WARN("worker record in etcd ignored", LOG_BYTES("key", key.data, key.len),
             LOG_TEXT("because", why));
}

static void on_event(void *ctx, const struct etcd_event *event) {
    struct fleet *fleet = ctx;
    uint64_t incarnation = incarnation_of(fleet, event->kv.key);
    if (event->is_delete) {
        if (incarnation != 0 && worker_remove(fleet, incarnation)) {
            count(&fleet->lost);
            atomic_store_explicit(&fleet->workers_count, fleet->workers_len, memory_order_relaxed);
            fleet->handlers->on_lost(fleet->ctx, (struct incarnation){incarnation});
        }
        return;
    }
    if (incarnation == 0) {
        refuse(fleet, event->kv.key, "the key does not end in an incarnation of 16 hex digits");
        return;
    }
    struct worker_record record;
    enum status status = worker_record_decode(event->kv.value, &fleet->arena, &record);
    wire_arena_reset(&fleet->arena);
    if (status != STATUS_OK) {
        refuse(fleet, event->kv.key, "the record cannot be read (another version, or not ours)");
    } else if (record.info.incarnation.v != incarnation) {
        refuse(fleet, event->kv.key, "the record's incarnation is not the key's");
    } else if (!worker_add(fleet, incarnation)) {
        refuse(fleet, event->kv.key, "more workers than a router can know");
    } else {
        count(&fleet->seen);
        atomic_store_explicit(&fleet->workers_count, fleet->workers_len, memory_order_relaxed);
        fleet->handlers->on_seen(fleet->ctx, &record);
    }
}

static void on_synced(void *ctx, int64_t revision) {
    struct fleet *fleet = ctx;
    LOG_INFO("fleet read from etcd", LOG_U64("workers", fleet->workers_len),
             LOG_I64("revision", revision));
    atomic_store(&fleet->is_synced, true);
    if (fleet->handlers->on_synced != NULL) {
        fleet->handlers->on_synced(fleet->ctx);
    }
}

static void on_following(void *ctx) {
    struct fleet *fleet = ctx;
    if (fleet->is_broken) {
        fleet->is_broken = false;
        LOG_INFO("following the fleet in etcd again");
    }
}

static void on_broken(void *ctx, const char *message) {
    struct fleet *fleet = ctx;
    struct instant now = clock_now();
    count(&fleet->breaks);
    if (!fleet->is_broken ||
        instant_reached(now, instant_add(fleet->complained_at, span_ms(COMPLAINT_MS)))) {
        fleet->complained_at = now;
        LOG_WARN("cannot follow the fleet in etcd, trying again", LOG_TEXT("because", message));
    }
    fleet->is_broken = true;
}

static void on_reset(void *ctx, const char *message) {
    (void)ctx;
    LOG_WARN("etcd's history is not the one that was seen: fleet listed anew",
             LOG_TEXT("because", message));
}

static void on_closed(void *ctx) {
    struct fleet *fleet = ctx;
    fleet->watch = NULL;
}

static const struct etcd_watch_handlers watch_handlers = {
    .on_event = on_event,
    .on_synced = on_synced,
    .on_following = on_following,
    .on_broken = on_broken,
    .on_reset = on_reset,
    .on_closed = on_closed,
};

void fleet_start(struct fleet *fleet, struct etcd *etcd) {
    if (fleet->watch != NULL) {
        return;
    }
    const struct etcd_watch_config config = {.key = etcd_text(fleet->prefix), .is_prefix = true};
    /* CANCELLED only: the client closes, and with it whoever asked. */
    if (etcd_watch_open(etcd, &config, &watch_handlers, fleet, &fleet->watch) != STATUS_OK) {
        fleet->watch = NULL;
    }
}

void fleet_counters(struct fleet *fleet, struct registry_counters *out) {
    out->seen = atomic_load_explicit(&fleet->seen, memory_order_relaxed);
    out->lost = atomic_load_explicit(&fleet->lost, memory_order_relaxed);
    out->malformed = atomic_load_explicit(&fleet->malformed, memory_order_relaxed);
    out->workers = atomic_load_explicit(&fleet->workers_count, memory_order_relaxed);
    out->breaks = atomic_load_explicit(&fleet->breaks, memory_order_relaxed);
    out->is_synced = atomic_load(&fleet->is_synced);
}
