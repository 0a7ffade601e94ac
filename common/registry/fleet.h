/* Room-private: the router's view of all workers, out of one etcd watch.
 *
 * Delivers what etcd says, in its order. The rpc thread's, except the counters. */
#ifndef REGISTRY_FLEET_H
#define REGISTRY_FLEET_H

#include "registry/registry.h"

struct etcd;
struct fleet;

#define FLEET_WORKERS_MAX 16384u /* more are counted as malformed and not delivered */

/* prefix: "/baton/CLUSTER/"; copied. */
struct fleet *fleet_create(const char *prefix);
/* The watch must have closed (etcd_close does it). NULL is fine. */
void fleet_destroy(struct fleet *fleet);
/* Before fleet_start. */
void fleet_set_handlers(struct fleet *fleet, const struct registry_fleet_handlers *handlers,
                        void *ctx);
/* Only the first does something. */
void fleet_start(struct fleet *fleet, struct etcd *etcd);
/* Fills in its share. Any thread. */
void fleet_counters(struct fleet *fleet, struct registry_counters *out);

#endif
