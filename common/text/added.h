/* Added tokens: finds whole tokens ("<|eot_id|>") in a text, leftmost first, then longest.
 *
 * A byte trie kept in one hash table, so a text of n bytes costs at most n times the longest token
 * and does not depend on how many tokens there are. Immutable after added_build. */
#ifndef TEXT_ADDED_H
#define TEXT_ADDED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/map.h"
#include "base/status.h"
#include "text/grow.h"

struct added {
    struct grow nodes; /* uint32_t: the token that ends in this node, or TOKEN_NONE */
    struct map map;    /* (node << 8 | byte) -> child node */
    void *memory;
    bool starts[256]; /* some token begins with this byte */
};

/* tokens: [count], not empty, each with its id; a second token of the same text is
 * STATUS_EXISTS, over 64 MiB together STATUS_RANGE.
 * May leave a half-built object for added_fini. */
MUST_USE enum status added_build(struct added *added, const struct bytes *tokens,
                                 const uint32_t *ids, size_t count);
void added_fini(struct added *added);
/* The first token at or behind `from`: its place and id. False if there is none. */
bool added_find(const struct added *added, struct bytes text, size_t from, size_t *at_out,
                size_t *len_out, uint32_t *id_out);

#endif
