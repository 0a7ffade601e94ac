/* Inside: one block of memory for everything of a kind that the engine streams through (weights,
 * activations, KV), on huge pages, had at once.
 *
 * Weights and activations of a layer are a few hundred kilobytes each. Taken one by one they would
 * lie on small pages: a miss of the address cache for each 4 KiB that a product reads, and another
 * speed at every start, as the pages happen to fall into the processor's caches.
 *
 * It is had when it is taken, not when it is first touched: a prompt would pay for that, and what
 * the system cannot give after all is known before anybody is served. */
#ifndef ENGINE_BLOCK_H
#define ENGINE_BLOCK_H

#include "base/arena.h"
#include "base/bytes.h"
#include "base/status.h"

/* Makes a counting arena (arena_init without memory) one that has what was counted, in zeroed
 * memory of its own. STATUS_BUSY when the system has not got it: `error` says how much of `what`
 * was wanted, what there is, and `advice`; the arena then stays as it was. */
MUST_USE enum status block_take(struct arena *arena, const char *what, const char *advice,
                                struct writer *error);
/* Accepts an arena that only counted, and one of zeros. */
void block_free(struct arena *arena);

#endif
