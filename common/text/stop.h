/* Stop strings: ends a stream of text before the first of up to 16 strings.
 *
 * Text goes in as the detokenizer gives it out, in pieces of any size; the result does not depend
 * on where the pieces are cut. A suffix that may still become a stop string is held back. The first
 * string to be complete wins; of several that end at the same byte, the longest. Fixed size, no
 * allocation, O(strings) per byte. One thread at a time. */
#ifndef TEXT_STOP_H
#define TEXT_STOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"

#define STOP_STRINGS_MAX 16
#define STOP_BYTES_MAX   1024 /* all strings of one request together */
#define STOP_NONE        UINT32_MAX

struct stop {
    uint32_t count;
    uint32_t matched; /* index of the string that ended the text, or STOP_NONE */
    uint16_t first[STOP_STRINGS_MAX];
    uint16_t len[STOP_STRINGS_MAX];
    uint16_t state[STOP_STRINGS_MAX]; /* bytes of each string that the text ends with now */
    uint8_t text[STOP_BYTES_MAX];
    uint16_t border[STOP_BYTES_MAX]; /* longest proper border of each prefix */
};

/* Copies the strings. count 0 is fine: then nothing is held back and nothing matches.
 * error: may be NULL; one sentence. Returns STATUS_INVALID (an empty string, not UTF-8) or
 * STATUS_RANGE (more than STOP_STRINGS_MAX strings or STOP_BYTES_MAX bytes). */
MUST_USE enum status stop_init(struct stop *stop, const struct bytes *strings, size_t count,
                               struct writer *error);
/* Appends to `emitted` the text that is certainly not part of a stop string: at most text.len +
 * STOP_BYTES_MAX bytes. True once a stop string was found: the text before it has been appended,
 * the string and everything after it never are. */
bool stop_push(struct stop *stop, struct bytes text, struct writer *emitted);
/* The end of the stream without a stop string: appends what was held back (nothing after a match).
 */
void stop_flush(struct stop *stop, struct writer *emitted);

#endif
