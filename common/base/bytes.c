#include "base/bytes.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"

void writer_init(struct writer *writer, void *memory, size_t cap) {
    *writer = (struct writer){.data = memory, .cap = cap};
}

void writer_put(struct writer *writer, const void *data, size_t len) {
    size_t room = writer->cap - writer->len;
    if (len > room) {
        writer->is_full = true;
        len = room;
    }
    if (len > 0) {
        memcpy(writer->data + writer->len, data, len);
        writer->len += len;
    }
}

void writer_text(struct writer *writer, const char *text) {
    writer_put(writer, text, strlen(text));
}

void writer_printf(struct writer *writer, const char *format, ...) {
    size_t room = writer->cap - writer->len;
    va_list args;
    va_start(args, format);
    int wanted = vsnprintf(writer->data + writer->len, room, format, args);
    va_end(args);
    CHECK(wanted >= 0);
    if ((size_t)wanted >= room) {
        writer->is_full = true;
        writer->len += room > 0 ? room - 1 : 0;
    } else {
        writer->len += (size_t)wanted;
    }
}

void text_copy(char *to, size_t cap, const char *from) {
    CHECK(cap > 0);
    size_t len = strlen(from);
    bool is_cut = len >= cap;
    if (is_cut) {
        len = cap - 1;
    }
    memcpy(to, from, len);
    to[len] = '\0';
    if (is_cut) {
        text_end_whole(to);
    }
}

void text_end_whole(char *text) {
    size_t len = strlen(text);
    for (size_t back = 1; back <= 3 && back <= len; back++) {
        uint8_t byte = (uint8_t)text[len - back];
        if ((byte & 0xc0) != 0x80) { /* where the last character begins */
            size_t needed = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
            if (needed > back) {
                text[len - back] = '\0';
            }
            return;
        }
    }
}

bool utf8_is_valid(const uint8_t *data, size_t len) {
    size_t at = 0;
    while (at < len) {
        uint8_t lead = data[at];
        size_t more = 0;
        uint32_t code = 0;
        uint32_t least = 0;
        if (lead < 0x80) {
            at++;
            continue;
        }
        if ((lead & 0xe0) == 0xc0) {
            more = 1;
            code = lead & 0x1fu;
            least = 0x80;
        } else if ((lead & 0xf0) == 0xe0) {
            more = 2;
            code = lead & 0x0fu;
            least = 0x800;
        } else if ((lead & 0xf8) == 0xf0) {
            more = 3;
            code = lead & 0x07u;
            least = 0x10000;
        } else {
            return false;
        }
        if (len - at <= more) {
            return false;
        }
        for (size_t i = 1; i <= more; i++) {
            if ((data[at + i] & 0xc0) != 0x80) {
                return false;
            }
            code = code << 6 | (data[at + i] & 0x3fu);
        }
        if (code < least || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) {
            return false;
        }
        at += more + 1;
    }
    return true;
}
