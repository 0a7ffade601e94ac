/* A team: the step thread and its helpers, which share one loop at a time.
 *
 * Parts are handed out one by one to whoever is free; which thread computes a part never changes
 * its result. Helpers wait actively for some microseconds after a loop (the next one of the step is
 * near), then sleep until they are woken; they beat as all threads do. team_run comes from one
 * thread and returns when every part is done. */
#ifndef ENGINE_TEAM_H
#define ENGINE_TEAM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

struct team;

/* worker: 0 for the caller of team_run, 1 to threads - 1 for helpers (an index of scratch memory).
 */
typedef void (*team_fn)(void *context, uint32_t part, uint32_t worker);

/* threads >= 1, the caller included. STATUS_BUSY if the system has no thread left. */
MUST_USE enum status team_create(uint32_t threads, struct team **team_out);
/* Accepts NULL. No loop may be running. */
void team_destroy(struct team *team);
uint32_t team_threads(const struct team *team);
/* Whether the loops from now on are the caller's alone: a small one ends sooner than a helper
 * wakes, and cores that only wait are taken from the threads that carry tokens away. Never changes
 * a result. Caller of team_run only. */
void team_set_alone(struct team *team, bool is_alone);
/* Calls fn(context, part, worker) once for each part in [0, parts). */
void team_run(struct team *team, uint32_t parts, team_fn fn, void *context);

#endif
