/* Borrowed byte ranges, and a bounded writer for text and binary output.
 *
 * A writer never overflows and never allocates: past its capacity it sets is_full and drops the
 * rest, so one check at the end is enough. */
#ifndef BASE_BYTES_H
#define BASE_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct bytes {
    const uint8_t *data; /* borrowed; may be NULL when len is 0 */
    size_t len;
};

struct writer {
    char *data;
    size_t cap;
    size_t len; /* <= cap; data[len] is not terminated unless writer_text is used */
    bool is_full;
};

void writer_init(struct writer *writer, void *memory, size_t cap);
void writer_put(struct writer *writer, const void *data, size_t len);
void writer_text(struct writer *writer, const char *text);
/* printf into the writer; output past the capacity is dropped and is_full set. */
void writer_printf(struct writer *writer, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Copies a NUL-terminated text into a fixed array; always terminates. What does not fit is cut,
 * never inside a UTF-8 character: a text stays one, or JSON and protobuf readers would refuse it.
 */
void text_copy(char *to, size_t cap, const char *from);
/* Drops the beginning of a UTF-8 character that was cut off at the text's end. */
void text_end_whole(char *text);

/* True if the bytes are well-formed UTF-8 (no surrogates, no overlong forms, <= U+10FFFF). */
bool utf8_is_valid(const uint8_t *data, size_t len);

#endif
