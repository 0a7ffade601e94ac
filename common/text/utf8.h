/* UTF-8 steps over text that is known to be well formed. */
#ifndef TEXT_UTF8_H
#define TEXT_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Bytes of the character that begins with `lead`. */
static inline size_t utf8_len(uint8_t lead) {
    return lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

/* The code point of the whole character at `at`. */
static inline uint32_t utf8_code(const uint8_t *at) {
    switch (utf8_len(*at)) {
    case 1: return at[0];
    case 2: return (at[0] & 0x1fu) << 6 | (at[1] & 0x3fu);
    case 3: return (at[0] & 0x0fu) << 12 | (at[1] & 0x3fu) << 6 | (at[2] & 0x3fu);
    default:
        return (at[0] & 0x07u) << 18 | (at[1] & 0x3fu) << 12 | (at[2] & 0x3fu) << 6 |
               (at[3] & 0x3fu);
    }
}

#endif
