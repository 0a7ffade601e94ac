/* How this room reports: one sentence into the caller's writer, and the status to return. */
#ifndef ENGINE_FAIL_H
#define ENGINE_FAIL_H

#include "base/bytes.h"
#include "base/status.h"

/* Writes the sentence (error may be NULL) and returns `status`. Text that comes from files goes
 * through fail_text first. */
enum status fail(struct writer *error, enum status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#define FAIL_TEXT_CAP 112
struct fail_text {
    char text[FAIL_TEXT_CAP];
};
/* A printable copy of untrusted text: control characters become '?', long text ends in "...". */
struct fail_text fail_text(const char *text);

#endif
