/* Private to this room: one character of untrusted text at a time, made safe for a sink. */
#ifndef RUNTIME_ESCAPE_H
#define RUNTIME_ESCAPE_H

#include <stddef.h>
#include <stdint.h>

#define ESCAPE_MAX 8

/* Bytes of the well-formed UTF-8 character at data[0..len), len > 0; 0 if there is none. */
size_t escape_utf8_len(const uint8_t *data, size_t len);
/* Each consumes at least one byte, writes at most ESCAPE_MAX bytes, and returns what it consumed.
 * JSON: string contents; a byte that is not UTF-8 becomes U+FFFD. Human: C-like escapes of quotes,
 * backslashes, control characters and bytes that are not UTF-8. */
size_t escape_json(const uint8_t *data, size_t len, char *to, size_t *to_len);
size_t escape_human(const uint8_t *data, size_t len, char *to, size_t *to_len);

#endif
