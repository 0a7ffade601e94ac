/* Private to this room: the head of one HTTP/1 request, parsed from bytes that anybody may send.
 *
 * Pure; never reads past what it was given. */
#ifndef RUNTIME_HTTP_HEAD_H
#define RUNTIME_HTTP_HEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct http_head {
    const char *method; /* these three point into the head's text */
    const char *path;
    const char *query; /* "" if none */
    uint64_t content_length;
    bool keeps_alive;
    bool expects_continue;
};

/* Length of the head with its empty line in data[0..len), or 0 if it is not complete yet. */
size_t http_head_find(const char *data, size_t len);
/* False as soon as the bytes cannot begin a request (a TLS hello, for one). */
bool http_head_is_plausible(const char *data, size_t len);
/* Parses text[0..len), which is changed and must have one byte of room for a NUL.
 * Returns 0, or the HTTP status to refuse it with and why (static text). */
int http_head_parse(char *text, size_t len, struct http_head *head, const char **why_out);

#endif
