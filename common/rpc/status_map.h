/* The one place that maps enum status to gRPC status codes and back.
 *
 * enum rpc_code repeats the numbers of the gRPC specification so that headers need no gRPC
 * include; rpc.c asserts that they agree. Both maps are total. */
#ifndef RPC_STATUS_MAP_H
#define RPC_STATUS_MAP_H

#include "base/status.h"

enum rpc_code {
    RPC_CODE_OK = 0,
    RPC_CODE_CANCELLED = 1,
    RPC_CODE_UNKNOWN = 2,
    RPC_CODE_INVALID_ARGUMENT = 3,
    RPC_CODE_DEADLINE_EXCEEDED = 4,
    RPC_CODE_NOT_FOUND = 5,
    RPC_CODE_ALREADY_EXISTS = 6,
    RPC_CODE_PERMISSION_DENIED = 7,
    RPC_CODE_RESOURCE_EXHAUSTED = 8,
    RPC_CODE_FAILED_PRECONDITION = 9,
    RPC_CODE_ABORTED = 10,
    RPC_CODE_OUT_OF_RANGE = 11,
    RPC_CODE_UNIMPLEMENTED = 12,
    RPC_CODE_INTERNAL = 13,
    RPC_CODE_UNAVAILABLE = 14,
    RPC_CODE_DATA_LOSS = 15,
    RPC_CODE_UNAUTHENTICATED = 16,
};

enum rpc_code rpc_code_from_status(enum status status);
/* A code with no closer meaning, or a number outside the specification, is STATUS_INTERNAL. */
enum status rpc_code_to_status(enum rpc_code code);
/* "RESOURCE_EXHAUSTED"; static storage; never NULL. */
const char *rpc_code_name(enum rpc_code code);

#endif
