#include "text/refuse.h"

#include <stdarg.h>
#include <stdio.h>

#define SENTENCE_BYTES_MAX 512
#define SHOWN_BYTES_MAX    60

enum status text_refuse(struct writer *error, enum status status, const char *format, ...) {
    if (error == NULL) {
        return status;
    }
    char sentence[SENTENCE_BYTES_MAX];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(sentence, sizeof sentence, format, args); /* cut when too long */
    va_end(args);
    for (char *at = sentence; *at != '\0'; at++) {
        if ((unsigned char)*at < ' ' || *at == 0x7f) {
            *at = ' ';
        }
    }
    writer_text(error, sentence);
    return status;
}

int text_shown(struct bytes text) {
    if (text.len <= SHOWN_BYTES_MAX) {
        return (int)text.len;
    }
    size_t len = SHOWN_BYTES_MAX;
    while (len > 0 && (text.data[len] & 0xc0) == 0x80) {
        len--;
    }
    return (int)len;
}
