/* When the router sends a canary request of its own, and what its fate says (I18).
 *
 * One at a time, about once a second divided among the routers; some are prefilled by the decode
 * worker alone and some by a prefill worker, so that each leg is seen. The verdict is about
 * progress: a router is stuck when for `bound` nothing at all has completed although there are
 * workers that it believes usable. A canary's answer counts as much as a token for a client; and
 * where canaries only find no room, the beats of the workers say whether those who have it move. So
 * neither a full cluster nor one that drains is stuck. Pure; times are observed ones; the router's
 * control thread. */
#ifndef CORE_CANARY_H
#define CORE_CANARY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/time.h"
#include "core/event.h"

#define CANARY_EVERY_MS 1000
#define CANARY_TOKENS   2u /* that it asks for */
#define CANARY_PROMPT   4u /* tokens of its prompt */
#define CANARY_LABEL    "baton-canary"

struct canary_facts {
    uint32_t decodes;  /* workers with a live session that do not drain */
    uint32_t prefills; /* the same */
    bool has_prefill;  /* one of them serves the model of this turn */
    bool is_draining;
    uint32_t routers;        /* that use the same workers, this one included; 0 counts as 1 */
    uint64_t user_progress;  /* changes with each token for a client and each good end */
    uint64_t fleet_progress; /* changes with the work of any worker, as its beats tell */
};

enum canary_result { CANARY_OK, CANARY_FAILED, CANARY_NO_ROOM };

struct canary_stats {
    uint64_t results[2][3]; /* by who prefilled (0: one leg, 1: two), enum canary_result */
    uint64_t failures[CAUSE_COUNT];
};

struct canary {
    struct span bound; /* 0: no canaries */
    bool is_running;
    bool is_watching; /* there is somebody who could answer */
    bool is_watching_two;
    enum canary_legs legs; /* asked for by the running or last one */
    enum canary_result last;
    uint64_t number;
    struct instant due;
    struct instant started;
    struct instant ok_at[2]; /* of any, of two legs; before the first: since there could be one */
    struct instant moved_at; /* when anything last completed */
    uint64_t user_progress;
    uint64_t fleet_progress;
    /* of the last one that failed; CAUSE_NONE: none since the last good one */
    enum cause failed_cause;
    struct span failed_after;
    char failed_decode[LABEL_MAX];
    char failed_prefill[LABEL_MAX];
    struct canary_stats stats;
};

void canary_init(struct canary *canary, struct span bound, struct instant now);
/* Looks at the facts; CANARY_NONE, or how the one that is to be sent now shall be served: it is
 * then running until canary_ended. Each tick. */
enum canary_legs canary_poll(struct canary *canary, const struct canary_facts *facts,
                             struct instant now);
/* How long the running one may take. */
struct span canary_budget(const struct canary *canary);
/* The running one has its answer. decode, prefill: where it ran, "" = nowhere. */
enum canary_result canary_ended(struct canary *canary, enum outcome outcome, enum cause cause,
                                const char *decode, const char *prefill, struct instant now);
/* Whether nothing has completed for the bound though something should have. */
bool canary_is_stuck(const struct canary *canary, struct instant now);
/* Since the last good one that was prefilled by anybody, or (is_two) by a prefill worker; 0 while
 * there can be none. */
struct span canary_age(const struct canary *canary, bool is_two, struct instant now);
/* One line without its break: what does not complete, since when, and how the last one failed. */
void canary_describe(const struct canary *canary, uint32_t decodes, struct instant now,
                     struct writer *out);

#endif
