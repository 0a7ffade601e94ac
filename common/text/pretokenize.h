/* Pre-tokenizers: cut a normalized text into the pieces that are merged each on its own.
 *
 * Runs the steps of the file one after the other over the whole list of pieces; each step may cut
 * pieces and may rewrite the text under them. */
#ifndef TEXT_PRETOKENIZE_H
#define TEXT_PRETOKENIZE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"
#include "text/grow.h"
#include "text/regex.h"

enum pre_kind {
    PRE_METASPACE,
    PRE_SPLIT,
    PRE_BYTE_LEVEL, /* always the last step: its output is the byte alphabet, not the text */
};
enum pre_prepend {
    PREPEND_ALWAYS,
    PREPEND_FIRST, /* only the piece that begins the text */
    PREPEND_NEVER,
};
enum pre_behaviour {
    BEHAVIOUR_ISOLATED,
    BEHAVIOUR_REMOVED,
    BEHAVIOUR_KEPT_ONLY, /* Removed with invert: what lies between the matches goes */
    BEHAVIOUR_MERGED_WITH_PREVIOUS,
    BEHAVIOUR_MERGED_WITH_NEXT,
};
struct pre {
    enum pre_kind kind;
    enum pre_prepend prepend;     /* PRE_METASPACE; PRE_BYTE_LEVEL: ALWAYS or NEVER */
    enum pre_behaviour behaviour; /* PRE_SPLIT */
    bool is_split;                /* PRE_METASPACE: cut before every replacement */
    struct bytes text;   /* PRE_METASPACE: the replacement; PRE_SPLIT: literal, if no regex */
    struct regex *regex; /* PRE_SPLIT; PRE_BYTE_LEVEL with use_regex; else NULL */
};

struct piece {
    uint32_t at; /* in the text of the list */
    uint32_t len;
    bool is_first; /* begins where the caller's whole text begins */
};
struct pieces {
    struct grow text;
    struct grow list; /* struct piece; none is empty */
};

/* Cuts `text` (one segment between added tokens; is_first: it begins the whole text). lists:
 * scratch; *result_out is one of them. match: NULL if no step has a regex. Status as regex_find,
 * grow_reserve. */
MUST_USE enum status text_pretokenize(const struct pre *steps, uint32_t count, struct bytes text,
                                      bool is_first, struct regex_match *match,
                                      struct pieces lists[3], struct pieces **result_out);

/* The code point (< U+0144) that stands for a byte in byte-level vocabularies. */
uint32_t byte_level_code(uint8_t byte);
/* The byte behind a code point, or -1. */
int byte_level_byte(uint32_t code);

#endif
