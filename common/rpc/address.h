/* "host:port" texts: splitting them, and finding out why a port cannot be bound.
 *
 * Room-private. gRPC reports a failed bind as 0 without a reason; address_probe asks the system
 * itself first, so that the person who mistyped an address gets a sentence. */
#ifndef RPC_ADDRESS_H
#define RPC_ADDRESS_H

#include <stdint.h>

#include "base/status.h"

struct rpc_error;

#define ADDRESS_HOST_CAP 256

struct address {
    char host[ADDRESS_HOST_CAP];      /* without brackets */
    char text[ADDRESS_HOST_CAP + 16]; /* "host:port" or "[v6]:port" */
    uint16_t port;
};

/* STATUS_INVALID with a sentence in error_out (NULL-able). "http://" is skipped. */
MUST_USE enum status address_parse(const char *text, struct address *out,
                                   struct rpc_error *error_out);
/* Tries to bind every address that the host resolves to and lets go again. STATUS_EXISTS: taken;
 * STATUS_INVALID: no such host, or not an address of this machine; STATUS_IO: else. May block on
 * name resolution. */
MUST_USE enum status address_probe(const struct address *address, struct rpc_error *error_out);

/* Formats into error->text; error may be NULL. */
void rpc_error_set(struct rpc_error *error, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
