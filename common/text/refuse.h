/* Refusals: how this room says no: a status together with one sentence for people. */
#ifndef TEXT_REFUSE_H
#define TEXT_REFUSE_H

#include "base/bytes.h"
#include "base/status.h"

/* Writes the sentence (printf) to `error` unless that is NULL, control characters made spaces, and
 * returns `status`. */
MUST_USE enum status text_refuse(struct writer *error, enum status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* For "%.*s" of foreign text in a sentence: its length, cut to 60 bytes between characters. */
int text_shown(struct bytes text);

#endif
