/* grpc.health.v1 (Check and Watch) as ordinary methods of a server.
 *
 * Create before rpc_server_start; set from any thread. The name "" stands for the whole server and
 * exists from the start as not serving; Check of any other unknown name answers NOT_FOUND, Watch of
 * it answers SERVICE_UNKNOWN and goes on watching, as the protocol asks. */
#ifndef RPC_HEALTH_H
#define RPC_HEALTH_H

#include <stdbool.h>

#include "base/status.h"

struct rpc;
struct rpc_server;
struct rpc_health;

/* Registers the methods. STATUS_EXISTS if the server has them already. */
MUST_USE enum status rpc_health_create(struct rpc *rpc, struct rpc_server *server,
                                       struct rpc_health **out);
/* service: full name ("baton.v1.Inference") or ""; <= 127 bytes, copied; at most 32 names (CHECK).
 * Watchers are told at once. Any thread. */
void rpc_health_set(struct rpc_health *health, const char *service, bool is_serving);
/* After rpc_shutdown. NULL is fine. */
void rpc_health_destroy(struct rpc_health *health);

#endif
