#include "core/pages.h"

#include <string.h>

#include "base/check.h"

#define PAGE_LINKS(pages) &(pages)->table[0].link, (uint32_t)sizeof(struct page)

void pages_init(struct pages *pages, const struct pages_config *config, struct arena *arena) {
    uint32_t capacity = config->capacity;
    CHECK(config->changes_max > 0 && (config->changes_max & (config->changes_max - 1)) == 0);
    struct page *table = arena_take(arena, (uint64_t)capacity * sizeof *table);
    uint32_t *tokens = arena_take(arena, (uint64_t)capacity * config->page_tokens * sizeof *tokens);
    void *slots = arena_take(arena, map_bytes(capacity));
    struct page_change *changes =
        arena_take(arena, (uint64_t)config->changes_max * sizeof *changes);
    if (table == NULL) {
        return;
    }
    *pages = (struct pages){.table = table,
                            .tokens = tokens,
                            .key = config->secret,
                            .block_key = block_key(config->model),
                            .changes = changes,
                            .changes_mask = config->changes_max - 1,
                            .capacity = capacity,
                            .page_tokens = config->page_tokens};
    map_init(&pages->index, capacity, slots);
    list_init(&pages->free);
    list_init(&pages->cached);
    for (uint32_t i = 0; i < capacity; i++) {
        list_push_back(&pages->free, PAGE_LINKS(pages), i);
    }
}

/* Change number n (from 1) lies at n - 1. */
static uint64_t pages_changed(struct pages *pages, uint64_t block, uint64_t stored_at) {
    pages->changes[pages->changes_total & pages->changes_mask] =
        (struct page_change){block, stored_at};
    return ++pages->changes_total;
}

static struct siphash128 pages_hash(const struct pages *pages, struct siphash128 before,
                                    const uint32_t *tokens) {
    /* The chain value is folded into the key, so that the tokens are hashed where they lie. */
    struct siphash_key key = {pages->key.k0 ^ before.low, pages->key.k1 ^ before.high};
    return siphash128(key, tokens, (size_t)pages->page_tokens * sizeof *tokens);
}

static uint32_t pages_lookup(const struct pages *pages, struct siphash128 before,
                             struct siphash128 through, const uint32_t *tokens) {
    uint32_t cursor = 0;
    for (;;) {
        uint32_t at = map_next(&pages->index, through.low, &cursor);
        if (at == UINT32_MAX) {
            return UINT32_MAX;
        }
        const struct page *page = &pages->table[at];
        if (page->through.high == through.high && page->before.low == before.low &&
            page->before.high == before.high &&
            memcmp(pages->tokens + (uint64_t)at * pages->page_tokens, tokens,
                   (size_t)pages->page_tokens * sizeof *tokens) == 0) {
            return at;
        }
    }
}

static void pages_reference(struct pages *pages, uint32_t at) {
    struct page *page = &pages->table[at];
    if (page->references == 0) {
        list_remove(page->is_indexed ? &pages->cached : &pages->free, PAGE_LINKS(pages), at);
        pages->owned++;
    }
    page->references++;
}

/* Where the chain of a sequence's first pages [0, first) is known from: the end of its last indexed
 * one. The contents of those behind it are indexed elsewhere. */
static uint32_t chain_start(const struct pages *pages, struct siphash128 salt, const uint32_t *list,
                            uint32_t first, struct siphash128 *before_out) {
    uint32_t start = first;
    while (start > 0 && !pages->table[list[start - 1]].is_indexed) {
        start--;
    }
    *before_out = start > 0 ? pages->table[list[start - 1]].through : salt;
    return start;
}

/* References the indexed pages that hold tokens behind `before`, which is where page `first`
 * begins; is_swap: those that are in the list are given back for them. Returns how far that went.
 */
static uint32_t pages_walk(struct pages *pages, struct siphash128 before, const uint32_t *tokens,
                           uint32_t first, uint32_t limit, uint32_t *list, bool is_swap) {
    uint32_t count = first;
    while (count < limit) {
        const uint32_t *here = tokens + (uint64_t)count * pages->page_tokens;
        struct siphash128 through = pages_hash(pages, before, here);
        uint32_t at = pages_lookup(pages, before, through, here);
        if (at == UINT32_MAX) {
            break;
        }
        pages_reference(pages, at);
        if (is_swap) {
            pages_release(pages, &list[count], 1);
        }
        list[count++] = at;
        before = through;
    }
    return count;
}

uint32_t pages_match(struct pages *pages, struct siphash128 salt, const uint32_t *tokens,
                     uint32_t limit, uint32_t *pages_out) {
    return pages_walk(pages, salt, tokens, 0, limit, pages_out, false);
}

uint32_t pages_match_more(struct pages *pages, struct siphash128 salt, const uint32_t *tokens,
                          uint32_t first, uint32_t limit, uint32_t *list) {
    struct siphash128 before;
    for (uint32_t start = chain_start(pages, salt, list, first, &before); start < first; start++) {
        before = pages_hash(pages, before, tokens + (uint64_t)start * pages->page_tokens);
    }
    return pages_walk(pages, before, tokens, first, limit, list, true);
}

bool pages_are_common(const struct pages *pages, struct pages_run a, struct pages_run b,
                      uint32_t from, uint32_t least) {
    uint32_t count = a.count < b.count ? a.count : b.count;
    count -= count % pages->page_tokens;
    /* From behind: sequences that differ mostly do so after a long beginning in common. */
    return count >= from + least && a.salt.low == b.salt.low && a.salt.high == b.salt.high &&
           memcmp(a.tokens + from, b.tokens + from, (count - from) * sizeof *a.tokens) == 0 &&
           memcmp(a.tokens, b.tokens, from * sizeof *a.tokens) == 0;
}

enum status pages_take(struct pages *pages, uint32_t count, uint32_t *pages_out) {
    if (count > pages_available(pages)) {
        return STATUS_BUSY;
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = pages->free.head;
        if (at == LIST_NONE) {
            at = pages->cached.head;
            list_remove(&pages->cached, PAGE_LINKS(pages), at);
            CHECK(map_remove(&pages->index, pages->table[at].through.low, at));
            pages->table[at].is_indexed = false;
            (void)pages_changed(pages, pages->table[at].block, pages->table[at].stored_at);
            pages->evictions_total++;
        } else {
            list_remove(&pages->free, PAGE_LINKS(pages), at);
        }
        CHECK_OP(pages->table[at].references, ==, 0);
        pages->table[at].references = 1;
        pages->owned++;
        pages_out[i] = at;
    }
    return STATUS_OK;
}

void pages_release(struct pages *pages, const uint32_t *list, uint32_t count) {
    for (uint32_t i = count; i-- > 0;) {
        CHECK_OP(list[i], <, pages->capacity);
        struct page *page = &pages->table[list[i]];
        CHECK_OP(page->references, >, 0);
        page->references--;
        if (page->references == 0 && pages->drops_next_free && !page->is_indexed) {
            pages->drops_next_free = false;
            pages->owned--;
        } else if (page->references == 0) {
            list_push_back(page->is_indexed ? &pages->cached : &pages->free, PAGE_LINKS(pages),
                           list[i]);
            pages->owned--;
        }
    }
}

void pages_index(struct pages *pages, struct siphash128 salt, const uint32_t *tokens,
                 const uint32_t *list, uint32_t first, uint32_t end) {
    struct siphash128 before;
    uint32_t start = chain_start(pages, salt, list, first, &before);
    uint64_t block = start > 0 ? pages->table[list[start - 1]].block : block_first(salt);
    for (uint32_t i = start; i < end; i++) {
        struct page *page = &pages->table[list[i]];
        const uint32_t *here = tokens + (uint64_t)i * pages->page_tokens;
        CHECK_OP(page->references, >, 0);
        if (page->is_indexed) {
            before = page->through;
            block = page->block;
            continue;
        }
        struct siphash128 through = pages_hash(pages, before, here);
        uint32_t twin = pages_lookup(pages, before, through, here);
        block = twin != UINT32_MAX ? pages->table[twin].block
                                   : block_next(pages->block_key, block, here, pages->page_tokens);
        if (i >= first && twin == UINT32_MAX) {
            page->before = before;
            page->through = through;
            page->block = block;
            page->is_indexed = true;
            memcpy(pages->tokens + (uint64_t)list[i] * pages->page_tokens, here,
                   (size_t)pages->page_tokens * sizeof *here);
            map_add(&pages->index, through.low, list[i]);
            page->stored_at = pages_changed(pages, block, 0);
        }
        before = through;
    }
}

void pages_verify(const struct pages *pages) {
    uint32_t owned = 0;
    uint32_t indexed = 0;
    for (uint32_t i = 0; i < pages->capacity; i++) {
        const struct page *page = &pages->table[i];
        owned += page->references > 0 ? 1 : 0;
        indexed += page->is_indexed ? 1 : 0;
        CHECK(page->link.is_linked == (page->references == 0));
    }
    CHECK_OP(owned, ==, pages->owned);
    CHECK_OP(indexed, ==, pages->index.count);
    CHECK_OP(pages->free.count + pages->cached.count + owned, ==, pages->capacity);
}
