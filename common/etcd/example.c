/* etcd-example ENDPOINTS: writes a key under a lease, watches it go, and says what it saw.
 *
 * What a program outside Baton needs to know is all here: one rpc, one client, callbacks on the rpc
 * thread, a semaphore where main waits for them, and the order of the end. */
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "etcd/etcd.h"
#include "rpc/rpc.h"

struct example {
    struct etcd *etcd;
    struct etcd_lease *lease;
    struct etcd_watch *watch;
    _Atomic int64_t lease_id;
    atomic_int failures;
    sem_t granted;
    sem_t synced;
    sem_t put;
    sem_t deleted;
    sem_t lease_closed;
    sem_t watch_closed;
    sem_t closed;
};

/* Waits at most ten seconds, so that the program ends also without etcd. */
static bool wait_for(struct example *example, sem_t *what, const char *name) {
    struct timespec until;
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 10;
    if (sem_timedwait(what, &until) == 0) {
        return true;
    }
    (void)fprintf(stderr, "gave up waiting: %s\n", name);
    atomic_fetch_add(&example->failures, 1);
    return false;
}

static void on_granted(void *ctx, int64_t lease, int64_t ttl_s) {
    struct example *example = ctx;
    (void)printf("lease granted for %lld s\n", (long long)ttl_s);
    atomic_store(&example->lease_id, lease);
    (void)sem_post(&example->granted);
}

static void on_lost(void *ctx, const char *message) {
    struct example *example = ctx;
    (void)fprintf(stderr, "lease lost: %s\n", message);
    atomic_fetch_add(&example->failures, 1);
}

static void on_lease_closed(void *ctx, bool is_revoked) {
    struct example *example = ctx;
    (void)printf("lease %s\n", is_revoked ? "revoked" : "left to run out");
    (void)sem_post(&example->lease_closed);
}

static const struct etcd_lease_handlers lease_handlers = {
    .on_granted = on_granted, .on_lost = on_lost, .on_closed = on_lease_closed};

static void on_event(void *ctx, const struct etcd_event *event) {
    struct example *example = ctx;
    (void)printf("%s %.*s = %.*s\n", event->is_delete ? "DELETE" : "PUT", (int)event->kv.key.len,
                 (const char *)event->kv.key.data, (int)event->kv.value.len,
                 event->kv.value.len == 0 ? "" : (const char *)event->kv.value.data);
    if (event->is_delete) {
        (void)sem_post(&example->deleted);
    }
}

static void on_synced(void *ctx, int64_t revision) {
    struct example *example = ctx;
    (void)revision;
    (void)sem_post(&example->synced);
}

static void on_broken(void *ctx, const char *message) {
    (void)ctx;
    (void)fprintf(stderr, "watch broken, trying again: %s\n", message);
}

static void on_watch_closed(void *ctx) {
    struct example *example = ctx;
    (void)sem_post(&example->watch_closed);
}

static const struct etcd_watch_handlers watch_handlers = {.on_event = on_event,
                                                          .on_synced = on_synced,
                                                          .on_broken = on_broken,
                                                          .on_closed = on_watch_closed};

static void on_put(void *ctx, const struct etcd_reply *reply) {
    struct example *example = ctx;
    if (reply->status != STATUS_OK) {
        (void)fprintf(stderr, "put failed: %s\n", reply->message);
        atomic_fetch_add(&example->failures, 1);
    }
    (void)sem_post(&example->put);
}

static void on_closed(void *ctx) {
    struct example *example = ctx;
    (void)sem_post(&example->closed);
}

static void run(struct example *example) {
    const struct etcd_watch_config watch = {.key = etcd_text("example/"), .is_prefix = true};
    const struct etcd_lease_config lease = {.ttl_s = 5};
    if (etcd_watch_open(example->etcd, &watch, &watch_handlers, example, &example->watch) !=
            STATUS_OK ||
        etcd_lease_open(example->etcd, &lease, &lease_handlers, example, &example->lease) !=
            STATUS_OK) {
        atomic_fetch_add(&example->failures, 1);
        return;
    }
    if (wait_for(example, &example->synced, "the first listing") &&
        wait_for(example, &example->granted, "a lease") &&
        etcd_put(example->etcd, etcd_text("example/hello"), etcd_text("world"),
                 atomic_load(&example->lease_id), on_put, example) == STATUS_OK) {
        (void)wait_for(example, &example->put, "the put");
    }
    etcd_lease_close(example->lease, true, span_ms(2000));
    (void)wait_for(example, &example->lease_closed, "the revoke");
    if (atomic_load(&example->failures) == 0) {
        (void)wait_for(example, &example->deleted, "the key to go with its lease");
    }
    etcd_watch_close(example->watch);
    (void)wait_for(example, &example->watch_closed, "the end of the watch");
}

int main(int argc, char **argv) {
    if (argc != 2) {
        (void)fprintf(stderr, "usage: %s http://HOST:PORT[,...]\n", argv[0]);
        return 2;
    }
    static struct example example;
    sem_t *all[] = {&example.granted,      &example.synced,       &example.put,   &example.deleted,
                    &example.lease_closed, &example.watch_closed, &example.closed};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        (void)sem_init(all[i], 0, 0);
    }
    struct rpc *rpc = NULL;
    const struct rpc_config rpc_config = {.name = "rpc"};
    if (rpc_create(&rpc_config, &rpc) != STATUS_OK) {
        return 1;
    }
    struct etcd_error error = {.text = ""};
    const struct etcd_config config = {.endpoints = argv[1]};
    if (etcd_create(rpc, &config, &example.etcd, &error) != STATUS_OK) {
        (void)fprintf(stderr, "%s\n", error.text);
        atomic_fetch_add(&example.failures, 1);
    } else {
        run(&example);
        etcd_close(example.etcd, on_closed, &example);
        if (!wait_for(&example, &example.closed, "the end of the client")) {
            return 1; /* something still uses the memory */
        }
        etcd_destroy(example.etcd);
    }
    if (rpc_shutdown(rpc, span_ms(0), span_ms(1000)) != STATUS_OK) {
        return 1;
    }
    rpc_destroy(rpc);
    return atomic_load(&example.failures) == 0 ? 0 : 1;
}
