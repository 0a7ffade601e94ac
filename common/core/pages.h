/* The page ledger of one worker: who holds each KV page, and which full pages a later prompt may
 * reuse.
 *
 * free + cached + owned = capacity at every instant (I4). A page is *owned* while entries hold
 * references, *cached* when nobody does but its contents are in the prefix index, *free* otherwise.
 * Cached pages are evicted oldest first the moment somebody needs them, so they count as available.
 * The prefix index holds only pages whose every byte is computed or verified (I12): the caller
 * indexes, and never before. A page is found by the keyed 128-bit hash of everything before it and
 * the exact tokens in it. Order of eviction is free: a page whose predecessor is gone is merely
 * unreachable until it returns. A tenant's salt is where its chains begin, so that no two tenants
 * share a page. What enters and leaves the index is noted in a ring, under the names that routers
 * know (core/blocks.h); core/publish.h reads it. */
#ifndef CORE_PAGES_H
#define CORE_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/list.h"
#include "base/map.h"
#include "base/siphash.h"
#include "base/status.h"
#include "core/blocks.h"

struct page {
    uint32_t references;
    bool is_indexed;
    struct siphash128 before;  /* hash of salt and all tokens before this page */
    struct siphash128 through; /* hash of salt and all tokens up to its end */
    uint64_t block;            /* the same as routers know it */
    uint64_t stored_at;        /* number of the change that put it into the index, from 1 */
    struct link link;          /* in free or cached list */
};

/* One change of the index. */
struct page_change {
    uint64_t block;
    uint64_t
        stored_at; /* of a block that left: the number of the change that had stored it; else 0 */
};

struct pages_config {
    uint32_t capacity;
    uint32_t page_tokens;
    uint32_t changes_max;       /* remembered for routers; a power of two */
    struct siphash_key secret;  /* this process's: nobody can make two prefixes look alike */
    struct layout_digest model; /* what names of blocks are shared with */
};

struct pages {
    struct page *table;
    uint32_t *tokens; /* [capacity][page_tokens], valid while is_indexed */
    struct map index; /* through.low -> page */
    struct list free;
    struct list cached; /* oldest first */
    struct siphash_key key;
    struct siphash_key block_key;
    struct page_change *changes; /* the last of them, at their number modulo changes_mask + 1 */
    uint64_t changes_total;
    uint32_t changes_mask;
    uint32_t capacity;
    uint32_t page_tokens;
    uint32_t owned;
    bool drops_next_free;        /* for tests of the ledger: one page is forgotten */
    uint64_t query_tokens_total; /* of prompts that were looked up and admitted */
    uint64_t hit_tokens_total;   /* of those, found */
    uint64_t evictions_total;
};

void pages_init(struct pages *pages, const struct pages_config *config, struct arena *arena);

/* Takes references on the longest run of indexed full pages that equals tokens[0..] under this
 * salt, at most `limit` pages. Returns how many; their numbers are in pages_out. */
uint32_t pages_match(struct pages *pages, struct siphash128 salt, const uint32_t *tokens,
                     uint32_t limit, uint32_t *pages_out);
/* Looks again for what was not there before: list[0..first) are this sequence's pages, whole and
 * its own or shared; list[first..limit) are its own, and nobody uses what is in them. As far as the
 * index goes on by now, those are given back for the pages that it has. Returns up to where, >=
 * first. */
uint32_t pages_match_more(struct pages *pages, struct siphash128 salt, const uint32_t *tokens,
                          uint32_t first, uint32_t limit, uint32_t *list);
/* A sequence, as far as its pages go. */
struct pages_run {
    struct siphash128 salt;
    const uint32_t *tokens;
    uint32_t count;
};
/* Whether the whole pages that both have are the same, and reach `least` tokens or more beyond
 * `from`. */
bool pages_are_common(const struct pages *pages, struct pages_run a, struct pages_run b,
                      uint32_t from, uint32_t least);
/* Takes `count` pages, evicting cached ones as needed. All or nothing: STATUS_BUSY changes nothing.
 */
MUST_USE enum status pages_take(struct pages *pages, uint32_t count, uint32_t *pages_out);
/* Drops one reference on each, last page first so that the ends of chains are evicted before their
 * heads. */
void pages_release(struct pages *pages, const uint32_t *list, uint32_t count);
/* Puts the full pages [first, end) of a sequence into the index. tokens: the whole sequence from 0;
 * list: its pages from 0. Pages already indexed, or whose contents are indexed elsewhere, are left
 * as they are. Costs O(end - first) where the page before `first` is indexed. */
void pages_index(struct pages *pages, struct siphash128 salt, const uint32_t *tokens,
                 const uint32_t *list, uint32_t first, uint32_t end);
/* A prompt was admitted of which so many tokens were found. */
static inline void pages_count(struct pages *pages, uint32_t prompt, uint32_t hit) {
    pages->query_tokens_total += prompt;
    pages->hit_tokens_total += hit;
}

static inline uint32_t pages_available(const struct pages *pages) {
    return pages->free.count + pages->cached.count;
}
static inline uint32_t pages_for(const struct pages *pages, uint32_t tokens) {
    return (tokens + pages->page_tokens - 1) / pages->page_tokens;
}
/* CHECKs the ledger and every list; O(capacity): tests and the simulator. */
void pages_verify(const struct pages *pages);

#endif
