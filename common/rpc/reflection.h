/* Server reflection (grpc.reflection.v1 and v1alpha): what a server offers, for grpcurl and SDKs.
 *
 * Services are listed from the server's own method table; files come from descriptor sets made by
 * protoc (--descriptor_set_out --include_imports) and embedded by the build. The room's own sets
 * (health, reflection) are there from the start; add others before rpc_server_start. */
#ifndef RPC_REFLECTION_H
#define RPC_REFLECTION_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct rpc;
struct rpc_server;
struct rpc_reflection;

/* Registers the methods. STATUS_EXISTS if the server has them already. */
MUST_USE enum status rpc_reflection_create(struct rpc *rpc, struct rpc_server *server,
                                           struct rpc_reflection **out);
/* set: a serialized google.protobuf.FileDescriptorSet, borrowed for the life of the reflection.
 * Files known by name already are skipped. STATUS_CORRUPT if it cannot be parsed (nothing added).
 */
MUST_USE enum status rpc_reflection_add(struct rpc_reflection *reflection, const uint8_t *set,
                                        size_t len);
/* After rpc_shutdown. NULL is fine. */
void rpc_reflection_destroy(struct rpc_reflection *reflection);

#endif
