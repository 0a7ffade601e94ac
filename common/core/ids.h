/* Identities that cross process borders. Each is a one-member struct so that they cannot be
 * swapped.
 *
 * slot: minted by a decode worker: generation << 32 | index, never reused within an incarnation;
 * together with its 64-bit key it is the capability to write into that slot. attempt: minted by a
 * router: names one attempt of one request exactly (pool id of the request with the attempt number
 * folded in). Client-supplied ids are labels and never identities. incarnation: 64 random bits a
 * process draws at start and keeps for life. stream: one bidirectional transport stream as this
 * process numbers it (odd: accepted by the shell, even: opened by the core); never reused within
 * the process. */
#ifndef CORE_IDS_H
#define CORE_IDS_H

#include <stdbool.h>
#include <stdint.h>

struct slot_id {
    uint64_t v; /* 0 = none */
};
struct attempt_id {
    uint64_t v; /* generation (24) | attempt number (16) | index (24); 0 = none */
};
struct incarnation {
    uint64_t v; /* 0 = none */
};
struct stream_id {
    uint64_t v; /* 0 = none */
};
struct call_id {
    uint64_t v; /* a client's call as the rpc shell numbers it; 0 = none */
};

enum role {
    ROLE_NONE = 0,
    ROLE_ROUTER = 1,
    ROLE_PREFILL = 2,
    ROLE_DECODE = 3,
};

const char *role_name(enum role role);

#define LABEL_MAX   64u  /* bytes of a label or worker id with its NUL */
#define ADDRESS_MAX 128u /* bytes of "host:port" with its NUL */

#endif
