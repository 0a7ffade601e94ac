/* Workers as the router knows them, and the choice of one. Internal to the router's core.
 *
 * Facts come from two sides: discovery lists workers, sessions prove them. Only a live session
 * makes a worker eligible; a deletion from discovery removes one only without a session. */
#ifndef CORE_ROUTER_FLEET_H
#define CORE_ROUTER_FLEET_H

#include "core/router.h"

uint64_t fleet_model_hash(const struct router_core *core, const char *model);
void fleet_seen(struct router_core *core, const struct worker_info *info, struct effects *out);
void fleet_lost(struct router_core *core, struct incarnation incarnation, struct effects *out);
/* Opens due sessions, forgets workers; EVENT_TICK. */
void fleet_tick(struct router_core *core, struct effects *out);
/* The session's worker, or NULL. */
struct worker *fleet_of_session(struct router_core *core, const struct session *session);
/* The session is over and its entries are gone: the worker loses it and is retried later. */
void fleet_session_over(struct router_core *core, struct session *session);

/* A session with this worker begins: nothing is known of its cache yet. */
void fleet_view_begin(struct router_core *core, struct worker *worker);
/* The worker says what entered and left its prefix index. */
void fleet_cached(struct router_core *core, struct worker *worker, const struct message *message);

struct fleet_choice {
    uint32_t worker;
    uint32_t cached; /* tokens of the prompt that it says to have, as far as we know */
};

enum fleet_answer {
    FLEET_CHOSEN,
    FLEET_BUSY, /* there are workers, none has room now */
    FLEET_NONE, /* no live worker for this model */
};

/* Clients' requests and canaries take turns apart: which of worker.last_given. */
static inline uint32_t fleet_turn_kind(const struct request *request) {
    return request->canary != CANARY_NONE ? 1 : 0;
}
/* Whether a worker computes as the one did whose tokens the client already has (or there is none
 * yet). */
bool fleet_has_numerics(const struct worker *worker, const struct request *request);
/* Whether the two compute alike, so that it shows in no token who read a prompt. */
bool fleet_pair_has_numerics(const struct worker *prefill, const struct worker *decode);
/* A decode worker for a request: where the least is left to do once it has this request too, its
 * cached prefix taken off; one that no prefill worker could reach lately only if there is no other.
 */
enum fleet_answer fleet_choose_decode(struct router_core *core, const struct request *request,
                                      struct fleet_choice *chosen_out);
/* A prefill worker that shares the decode worker's layout, by the same rule; a suspected pair only
 * if there is no other, not even a busy one. */
enum fleet_answer fleet_choose_prefill(struct router_core *core, const struct request *request,
                                       uint32_t decode, struct fleet_choice *chosen_out);
void fleet_suspect(struct router_core *core, uint32_t prefill, uint32_t decode);

/* What the fleet says of a model, for validation: listed at all, and the largest context of its
 * decode workers. */
struct fleet_model {
    bool is_known;
    uint32_t context;
    uint32_t vocab;
    uint32_t kv_tokens;
};
struct fleet_model fleet_model(const struct router_core *core, const char *model);
bool fleet_is_empty(const struct router_core *core);
/* Writes the names of the models served, comma-separated. */
void fleet_model_names(const struct router_core *core, struct writer *writer);

#endif
