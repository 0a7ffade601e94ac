#include "engine/fail.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum status fail(struct writer *error, enum status status, const char *format, ...) {
    if (error != NULL) {
        char text[512];
        va_list args;
        va_start(args, format);
        (void)vsnprintf(text, sizeof(text), format, args); /* cut at 511 bytes by intent */
        va_end(args);
        writer_text(error, text);
    }
    return status;
}

struct fail_text fail_text(const char *text) {
    struct fail_text copy;
    size_t i = 0;
    for (; text[i] != '\0' && i < sizeof(copy.text) - 4; i++) {
        unsigned char c = (unsigned char)text[i];
        copy.text[i] = c < 0x20 || c == 0x7f ? '?' : (char)c;
    }
    if (text[i] != '\0') {
        /* Not in the middle of a UTF-8 character. */
        while (i > 0 && ((unsigned char)text[i] & 0xc0) == 0x80) {
            i--;
        }
        memcpy(copy.text + i, "...", 3);
        i += 3;
    }
    copy.text[i] = '\0';
    return copy;
}
