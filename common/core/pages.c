#include "core/pages.h"

#include <string.h>

#include "base/check.h"

#define PAGE_LINKS(pages) &(pages)->table[0].link, (uint32_t)sizeof(struct page)

void pages_init(struct pages *pages, uint32_t capacity, uint32_t page_tokens,
                struct siphash_key key, struct arena *arena) {
    struct page *table = arena_take(arena, (uint64_t)capacity * sizeof *table);
    uint32_t *tokens = arena_take(arena, (uint64_t)capacity * page_tokens * sizeof *tokens);
    void *slots = arena_take(arena, map_bytes(capacity));
    if (table == NULL) {
        return;
    }
    *pages = (struct pages){.table = table,
                            .tokens = tokens,
                            .key = key,
                            .capacity = capacity,
                            .page_tokens = page_tokens};
    map_init(&pages->index, capacity, slots);
    list_init(&pages->free);
    list_init(&pages->cached);
    for (uint32_t i = 0; i < capacity; i++) {
        list_push_back(&pages->free, PAGE_LINKS(pages), i);
    }
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

uint32_t pages_match(struct pages *pages, const uint32_t *tokens, uint32_t limit,
                     uint32_t *pages_out) {
    struct siphash128 before = {0, 0};
    uint32_t count = 0;
    while (count < limit) {
        const uint32_t *here = tokens + (uint64_t)count * pages->page_tokens;
        struct siphash128 through = pages_hash(pages, before, here);
        uint32_t at = pages_lookup(pages, before, through, here);
        if (at == UINT32_MAX) {
            break;
        }
        pages_reference(pages, at);
        pages_out[count++] = at;
        before = through;
    }
    pages->hit_tokens_total += (uint64_t)count * pages->page_tokens;
    return count;
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

void pages_index(struct pages *pages, const uint32_t *tokens, const uint32_t *list, uint32_t first,
                 uint32_t end) {
    struct siphash128 before = {0, 0};
    for (uint32_t i = 0; i < end; i++) {
        struct page *page = &pages->table[list[i]];
        const uint32_t *here = tokens + (uint64_t)i * pages->page_tokens;
        CHECK_OP(page->references, >, 0);
        if (page->is_indexed) {
            before = page->through;
            continue;
        }
        struct siphash128 through = pages_hash(pages, before, here);
        if (i >= first && pages_lookup(pages, before, through, here) == UINT32_MAX) {
            page->before = before;
            page->through = through;
            page->is_indexed = true;
            memcpy(pages->tokens + (uint64_t)list[i] * pages->page_tokens, here,
                   (size_t)pages->page_tokens * sizeof *here);
            map_add(&pages->index, through.low, list[i]);
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
