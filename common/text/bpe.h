/* BPE: vocabulary, merge rules, and the merging of one piece into token ids.
 *
 * Merges run from a heap over a linked list of symbols: O(n log n) for a piece of n characters,
 * with the ties and the stale entries handled as the `tokenizers` library does, because both decide
 * which ids come out. Immutable after loading. */
#ifndef TEXT_BPE_H
#define TEXT_BPE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/map.h"
#include "base/status.h"
#include "text/grow.h"
#include "text/tokenizer.h"

#define BPE_DIRECT_CODES 0x180

struct bpe_merge {
    uint32_t left;
    uint32_t right;
    uint32_t made;
};
struct bpe {
    struct bytes *texts; /* [ids], as spelled in the file; len 0: not in the model's vocabulary */
    uint32_t ids;
    struct map vocabulary; /* hash of the text -> id */
    void *vocabulary_memory;
    struct bpe_merge *merges; /* by rank */
    uint32_t merge_count;
    struct map pairs; /* left << 32 | right -> rank */
    void *pairs_memory;
    uint32_t byte_ids[256];              /* <0xXX>; only with has_byte_fallback */
    uint32_t code_ids[BPE_DIRECT_CODES]; /* vocabulary of one character, or TOKEN_NONE */
    size_t text_bytes_max;               /* the longest of texts */
    bool has_byte_fallback;
    bool ignores_merges; /* a piece that is a token as a whole is not merged */
};
struct bpe_scratch {
    struct grow symbols;
    struct grow heap;
};

/* The id of a text in the model's vocabulary (added tokens are not part of it), or TOKEN_NONE. */
uint32_t bpe_id(const struct bpe *bpe, struct bytes text);
/* Appends the ids of one piece. STATUS_RANGE: more than out->cap; else as grow_reserve. */
MUST_USE enum status bpe_encode(const struct bpe *bpe, struct bytes piece,
                                struct bpe_scratch *scratch, struct token_buffer *out);
uint64_t text_hash(struct bytes text);

#endif
