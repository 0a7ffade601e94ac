#include "runtime/buffer.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "runtime/escape.h"

#define BUFFER_FIRST 1024

void buffer_init(struct buffer *buffer, size_t max) {
    *buffer = (struct buffer){.max = max};
}

void buffer_fini(struct buffer *buffer) {
    free(buffer->data);
    *buffer = (struct buffer){.max = buffer->max};
}

void buffer_clear(struct buffer *buffer) {
    buffer->len = 0;
    buffer->is_full = false;
}

/* Makes room for `len` more bytes if max allows; returns how many of them there is room for. */
static size_t buffer_grow(struct buffer *buffer, size_t len) {
    if (len > buffer->max - buffer->len) {
        buffer->is_full = true;
        len = buffer->max - buffer->len;
    }
    if (len > buffer->cap - buffer->len) {
        size_t cap = buffer->cap == 0 ? BUFFER_FIRST : buffer->cap;
        while (cap - buffer->len < len) {
            cap *= 2;
        }
        buffer->data = realloc(buffer->data, cap);
        CHECK(buffer->data != NULL);
        buffer->cap = cap;
    }
    return len;
}

void buffer_put(struct buffer *buffer, const void *data, size_t len) {
    len = buffer_grow(buffer, len);
    if (len > 0) {
        memcpy(buffer->data + buffer->len, data, len);
        buffer->len += len;
    }
}

void buffer_text(struct buffer *buffer, const char *text) {
    buffer_put(buffer, text, strlen(text));
}

void buffer_printf(struct buffer *buffer, const char *format, ...) {
    va_list args;
    va_list again;
    va_start(args, format);
    va_copy(again, args);
    char text[256];
    int wanted = vsnprintf(text, sizeof text, format, args);
    CHECK(wanted >= 0);
    if ((size_t)wanted < sizeof text) {
        buffer_put(buffer, text, (size_t)wanted);
    } else {
        char *longer = malloc((size_t)wanted + 1);
        CHECK(longer != NULL);
        CHECK_OP(vsnprintf(longer, (size_t)wanted + 1, format, again), ==, wanted);
        buffer_put(buffer, longer, (size_t)wanted);
        free(longer);
    }
    va_end(again);
    va_end(args);
}

void buffer_json(struct buffer *buffer, const char *text, size_t len) {
    const uint8_t *data = (const uint8_t *)text;
    buffer_put(buffer, "\"", 1);
    for (size_t at = 0; at < len;) {
        char escaped[ESCAPE_MAX];
        size_t escaped_len = 0;
        at += escape_json(data + at, len - at, escaped, &escaped_len);
        buffer_put(buffer, escaped, escaped_len);
    }
    buffer_put(buffer, "\"", 1);
}

struct writer buffer_reserve(struct buffer *buffer, size_t room) {
    bool was_full = buffer->is_full;
    size_t got = buffer_grow(buffer, room);
    buffer->is_full = was_full; /* less room is no loss until somebody needs it */
    struct writer writer;
    writer_init(&writer, got > 0 ? buffer->data + buffer->len : NULL, got);
    return writer;
}

void buffer_commit(struct buffer *buffer, const struct writer *writer) {
    CHECK(writer->cap == 0 || writer->data == buffer->data + buffer->len);
    buffer->len += writer->len;
    buffer->is_full = buffer->is_full || writer->is_full;
}
