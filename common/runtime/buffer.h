/* A growing byte buffer with an upper bound, for replies and reports off the hot path.
 *
 * Past `max` bytes it sets is_full and drops the rest, like the bounded writer. malloc failure
 * aborts. buffer_reserve lends room as a struct writer to functions that only know that. */
#ifndef RUNTIME_BUFFER_H
#define RUNTIME_BUFFER_H

#include <stdbool.h>
#include <stddef.h>

#include "base/bytes.h"

struct buffer {
    char *data;
    size_t len;
    size_t cap;
    size_t max;
    bool is_full;
};

void buffer_init(struct buffer *buffer, size_t max);
void buffer_fini(struct buffer *buffer);
void buffer_clear(struct buffer *buffer);
void buffer_put(struct buffer *buffer, const void *data, size_t len);
void buffer_text(struct buffer *buffer, const char *text);
void buffer_printf(struct buffer *buffer, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* A quoted JSON string; bytes that are not UTF-8 become U+FFFD. */
void buffer_json(struct buffer *buffer, const char *text, size_t len);
/* A writer over `room` fresh bytes at the end (fewer if max is near); give it back with
 * buffer_commit before anything else is put. */
struct writer buffer_reserve(struct buffer *buffer, size_t room);
void buffer_commit(struct buffer *buffer, const struct writer *writer);

#endif
