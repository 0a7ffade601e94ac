/* Which programs there are: the records in etcd, or addresses that the operator names.
 *
 * One range read over a client of its own, which is gone again on return. Blocks at most about
 * five seconds. Main thread. */
#ifndef BATONCTL_FLEET_H
#define BATONCTL_FLEET_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "core/ids.h"

struct program {
    enum role role; /* ROLE_NONE: only an address is known yet */
    char id[LABEL_MAX];
    char admin[ADDRESS_MAX];
    char grpc[ADDRESS_MAX];
    char model[LABEL_MAX];
    char version[LABEL_MAX];
    uint64_t incarnation;
    uint64_t started_unix_ms;
    uint32_t pid;
    bool is_draining; /* as etcd has it */
};

struct programs {
    struct program *items; /* by role (router, prefill, decode), then id */
    uint32_t count;
    uint32_t unreadable; /* records that this version does not understand */
};

/* etcd: "http://a:2379,..."; cluster: its name. On failure a sentence is in why. */
MUST_USE enum status programs_read(const char *etcd, const char *cluster,
                                   struct programs *programs_out, char why[static 512]);
/* addresses: "host:port,host:port" of admin ports. */
MUST_USE enum status programs_at(const char *addresses, struct programs *programs_out,
                                 char why[static 512]);
void programs_fini(struct programs *programs);

#endif
