/* Inside: one block of memory for everything that the engine streams through, on huge pages.
 *
 * Weights and activations of a layer are a few hundred kilobytes each. Taken one by one they would
 * lie on small pages: a miss of the address cache for each 4 KiB that a product reads, and another
 * speed at every start, as the pages happen to fall into the processor's caches. */
#ifndef ENGINE_BLOCK_H
#define ENGINE_BLOCK_H

#include "base/arena.h"

/* Makes a counting arena (arena_init without memory) one that has what was counted, in memory of
 * its own; what is not zeroed by arena_take has no known contents. */
void block_take(struct arena *arena);
/* Accepts an arena that only counted, and one of zeros. */
void block_free(struct arena *arena);

#endif
