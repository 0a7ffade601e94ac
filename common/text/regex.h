/* Regex: the patterns that tokenizer.json files split texts with, run by PCRE2.
 *
 * The `tokenizers` library reads them as Oniguruma does; what means the same in both is passed on,
 * what does not is rewritten (\s, \d, \v, \u, scripts) or refused by name. Matching has a step
 * limit for a whole text: patterns come from files, but texts come from requests. Immutable after
 * creation. */
#ifndef TEXT_REGEX_H
#define TEXT_REGEX_H

#include <stdbool.h>
#include <stddef.h>

#include "base/bytes.h"
#include "base/status.h"

#define REGEX_BYTES_MAX 4096

struct regex;
struct regex_match; /* what one thread needs to match one text, with the steps it has left */

/* STATUS_UNSUPPORTED, STATUS_CORRUPT (does not compile), STATUS_RANGE (too long), STATUS_BUSY. */
MUST_USE enum status regex_create(struct bytes pattern, struct regex **out, struct writer *error);
void regex_destroy(struct regex *regex);

MUST_USE enum status regex_match_create(struct regex_match **out);
void regex_match_destroy(struct regex_match *match);
/* The first match at or behind `from`; it is never empty. text: well-formed UTF-8; `from` between
 * characters. STATUS_NOT_FOUND at the end, STATUS_TIMEOUT when the text's steps are used up,
 * STATUS_BUSY, STATUS_INTERNAL. */
MUST_USE enum status regex_find(const struct regex *regex, struct regex_match *match,
                                struct bytes text, size_t from, size_t *at_out, size_t *len_out);

#endif
