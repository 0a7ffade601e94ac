/* What an operator may see of one live entry: plain data for /debug/entries and tests. */
#ifndef CORE_VIEW_H
#define CORE_VIEW_H

#include <stdint.h>

#include "core/ids.h"

struct entry_view {
    uint64_t id;
    uint64_t attempt;
    const char *state; /* static */
    char label[LABEL_MAX];
    int64_t age_ms;           /* since creation */
    int64_t state_age_ms;     /* since it entered the state */
    int64_t deadline_left_ms; /* until the next deadline that would end it */
    const char *deadline;     /* which one, for people; static */
    uint64_t router;          /* incarnation that minted `attempt`; 0 = this process */
    uint32_t operations;      /* own operations outstanding */
    uint32_t tokens;          /* prompt and generated so far */
    uint32_t generated;
    uint32_t pages;
    uint64_t bytes; /* KV bytes received or sent */
    uint32_t cached;
    const char *waits_for;      /* whom or what, for people; static */
    char peers[2][LABEL_MAX];   /* router or decode worker; prefill worker; "" = none */
    uint64_t sessions[2];       /* their streams */
    int64_t peer_silence_ms[2]; /* since their last message */
};

#endif
