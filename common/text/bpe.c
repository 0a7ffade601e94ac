#include "text/bpe.h"

#include <string.h>

#include "base/check.h"
#include "base/prng.h"
#include "text/utf8.h"

#define NO_SYMBOL UINT32_MAX

struct symbol {
    uint32_t id; /* TOKEN_NONE: merged into the symbol before it */
    uint32_t prev;
    uint32_t next;
};

uint64_t text_hash(struct bytes text) {
    uint64_t hash = text.len;
    for (size_t i = 0; i < text.len; i += 8) {
        uint64_t word = 0;
        memcpy(&word, text.data + i, text.len - i < 8 ? text.len - i : 8);
        hash = mix64(hash ^ word) * 0x9e3779b97f4a7c15ull;
    }
    return hash;
}

uint32_t bpe_id(const struct bpe *bpe, struct bytes text) {
    uint64_t hash = text_hash(text);
    uint32_t cursor = 0;
    uint32_t id = map_next(&bpe->vocabulary, hash, &cursor);
    while (id != UINT32_MAX) {
        const struct bytes *known = &bpe->texts[id];
        if (known->len == text.len && memcmp(known->data, text.data, text.len) == 0) {
            return id;
        }
        id = map_next(&bpe->vocabulary, hash, &cursor);
    }
    return TOKEN_NONE;
}

static uint32_t rank_of(const struct bpe *bpe, uint32_t left, uint32_t right) {
    uint32_t cursor = 0;
    return map_next(&bpe->pairs, (uint64_t)left << 32 | right, &cursor);
}

/* A binary heap of rank << 32 | place: lowest rank first, of one rank the leftmost. */
static void heap_push(struct grow *heap, uint64_t entry) {
    uint64_t *entries = (uint64_t *)(void *)heap->data;
    size_t at = heap->len / sizeof entry;
    CHECK_OP(heap->len + sizeof entry, <=, heap->cap);
    heap->len += sizeof entry;
    while (at > 0 && entries[(at - 1) / 2] > entry) {
        entries[at] = entries[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    entries[at] = entry;
}

static uint64_t heap_pop(struct grow *heap) {
    uint64_t *entries = (uint64_t *)(void *)heap->data;
    uint64_t top = entries[0];
    heap->len -= sizeof top;
    size_t count = heap->len / sizeof top;
    uint64_t last = entries[count];
    size_t at = 0;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= count) {
            break;
        }
        if (child + 1 < count && entries[child + 1] < entries[child]) {
            child++;
        }
        if (entries[child] >= last) {
            break;
        }
        entries[at] = entries[child];
        at = child;
    }
    entries[at] = last;
    return top;
}

static void push_pair(const struct bpe *bpe, struct grow *heap, const struct symbol *symbols,
                      uint32_t left) {
    uint32_t right = symbols[left].next;
    if (right == NO_SYMBOL) {
        return;
    }
    uint32_t rank = rank_of(bpe, symbols[left].id, symbols[right].id);
    if (rank != UINT32_MAX) {
        heap_push(heap, (uint64_t)rank << 32 | left);
    }
}

/* Fills the symbols of a piece: one for each character, or one for each byte where the character is
 * not in the vocabulary. Without byte fallback such a character (a byte, in a byte-level
 * vocabulary) is left out, as the library does. */
static uint32_t fill_symbols(const struct bpe *bpe, struct bytes piece, struct symbol *symbols) {
    uint32_t count = 0;
    for (size_t at = 0; at < piece.len;) {
        size_t len = utf8_len(piece.data[at]);
        struct bytes character = {piece.data + at, len};
        uint32_t code = utf8_code(character.data);
        uint32_t id = code < BPE_DIRECT_CODES ? bpe->code_ids[code] : bpe_id(bpe, character);
        if (id != TOKEN_NONE) {
            symbols[count++].id = id;
        } else if (bpe->has_byte_fallback) {
            for (size_t i = 0; i < len; i++) {
                symbols[count++].id = bpe->byte_ids[character.data[i]];
            }
        }
        at += len;
    }
    for (uint32_t i = 0; i < count; i++) {
        symbols[i].prev = i == 0 ? NO_SYMBOL : i - 1;
        symbols[i].next = i + 1 == count ? NO_SYMBOL : i + 1;
    }
    return count;
}

static void merge_symbols(const struct bpe *bpe, struct symbol *symbols, uint32_t count,
                          struct grow *heap) {
    for (uint32_t i = 0; i + 1 < count; i++) {
        push_pair(bpe, heap, symbols, i);
    }
    while (heap->len > 0) {
        uint64_t top = heap_pop(heap);
        uint32_t left = (uint32_t)top;
        struct symbol *symbol = &symbols[left];
        if (symbol->id == TOKEN_NONE || symbol->next == NO_SYMBOL) {
            continue;
        }
        uint32_t right = symbol->next;
        uint32_t rank = rank_of(bpe, symbol->id, symbols[right].id);
        uint32_t made = bpe->merges[top >> 32].made;
        /* A stale entry still counts if today's pair gives the same token: so does the library. */
        if (rank == UINT32_MAX || bpe->merges[rank].made != made) {
            continue;
        }
        symbol->id = made;
        symbol->next = symbols[right].next;
        symbols[right].id = TOKEN_NONE;
        if (symbol->next != NO_SYMBOL) {
            symbols[symbol->next].prev = left;
        }
        if (symbol->prev != NO_SYMBOL) {
            push_pair(bpe, heap, symbols, symbol->prev);
        }
        push_pair(bpe, heap, symbols, left);
    }
}

static enum status put_id(struct token_buffer *out, uint32_t id) {
    if (out->count == out->cap) {
        return STATUS_RANGE;
    }
    out->ids[out->count++] = id;
    return STATUS_OK;
}

enum status bpe_encode(const struct bpe *bpe, struct bytes piece, struct bpe_scratch *scratch,
                       struct token_buffer *out) {
    /* No token covers more than text_bytes_max: spare the work for what cannot fit anyway. */
    if (piece.len / bpe->text_bytes_max > out->cap - out->count) {
        return STATUS_RANGE;
    }
    if (bpe->ignores_merges) {
        uint32_t id = bpe_id(bpe, piece);
        if (id != TOKEN_NONE) {
            return put_id(out, id);
        }
    }
    scratch->symbols.len = 0;
    scratch->heap.len = 0;
    enum status status = grow_reserve(&scratch->symbols, piece.len * sizeof(struct symbol));
    if (status == STATUS_OK) {
        /* n - 1 pairs at first; each of at most n - 1 merges takes one out and adds two. */
        status = grow_reserve(&scratch->heap, piece.len * 2 * sizeof(uint64_t));
    }
    if (status != STATUS_OK) {
        return status;
    }
    struct symbol *symbols = (struct symbol *)(void *)scratch->symbols.data;
    uint32_t count = fill_symbols(bpe, piece, symbols);
    merge_symbols(bpe, symbols, count, &scratch->heap);
    for (uint32_t i = 0; i < count && status == STATUS_OK; i++) {
        if (symbols[i].id != TOKEN_NONE) {
            status = put_id(out, symbols[i].id);
        }
    }
    return status;
}
