#include "runtime/escape.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/bytes.h"

size_t escape_utf8_len(const uint8_t *data, size_t len) {
    size_t want = data[0] < 0x80 ? 1 : data[0] < 0xe0 ? 2 : data[0] < 0xf0 ? 3 : 4;
    return want <= len && utf8_is_valid(data, want) ? want : 0;
}

/* C0, DEL, and the C1 controls, which some terminals obey. */
static bool is_control(const uint8_t *data, size_t len) {
    return data[0] < 0x20 || data[0] == 0x7f || (len == 2 && data[0] == 0xc2 && data[1] < 0xa0);
}

static char short_escape(uint8_t byte) {
    switch (byte) {
    case '\n': return 'n';
    case '\r': return 'r';
    case '\t': return 't';
    case '"': return '"';
    case '\\': return '\\';
    default: return 0;
    }
}

static size_t escape_common(const uint8_t *data, size_t len, char *to, size_t *to_len) {
    size_t used = escape_utf8_len(data, len);
    if (used == 0) {
        return 0;
    }
    char letter = short_escape(data[0]);
    if (letter != 0) {
        to[0] = '\\';
        to[1] = letter;
        *to_len = 2;
    } else if (is_control(data, used)) {
        unsigned code = used == 2 ? data[1] : data[0];
        char text[ESCAPE_MAX];
        (void)snprintf(text, sizeof text, "\\u%04x", code);
        memcpy(to, text, 6);
        *to_len = 6;
    } else {
        memcpy(to, data, used);
        *to_len = used;
    }
    return used;
}

size_t escape_json(const uint8_t *data, size_t len, char *to, size_t *to_len) {
    size_t used = escape_common(data, len, to, to_len);
    if (used == 0) {
        memcpy(to, "\xef\xbf\xbd", 3);
        *to_len = 3;
        return 1;
    }
    return used;
}

size_t escape_human(const uint8_t *data, size_t len, char *to, size_t *to_len) {
    size_t used = escape_common(data, len, to, to_len);
    if (used == 0) {
        static const char digits[] = "0123456789abcdef";
        to[0] = '\\';
        to[1] = 'x';
        to[2] = digits[data[0] >> 4];
        to[3] = digits[data[0] & 15];
        *to_len = 4;
        return 1;
    }
    return used;
}
