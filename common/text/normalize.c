#define _GNU_SOURCE /* memmem */
#include "text/normalize.h"

#include <stdbool.h>
#include <string.h>

#include <utf8proc.h>

#include "text/utf8.h"

enum status text_replace(struct grow *out, struct bytes text, struct bytes from, struct bytes to) {
    size_t done = 0;
    while (done < text.len) {
        const uint8_t *found = memmem(text.data + done, text.len - done, from.data, from.len);
        size_t at = found == NULL ? text.len : (size_t)(found - text.data);
        enum status status = grow_put(out, text.data + done, at - done);
        if (status == STATUS_OK && found != NULL) {
            status = grow_put(out, to.data, to.len);
        }
        if (status != STATUS_OK) {
            return status;
        }
        done = found == NULL ? text.len : at + from.len;
    }
    return STATUS_OK;
}

/* Orders a run of combining marks by class, stable. utf8proc's own ordering is an insertion sort:
 * quadratic for a text that is one long run of marks, so this counts instead. */
static void sort_marks(int32_t *marks, size_t count, int32_t *spare) {
    size_t starts[257] = {0};
    for (size_t i = 0; i < count; i++) {
        starts[(uint8_t)utf8proc_get_property(marks[i])->combining_class + 1]++;
    }
    for (size_t i = 1; i < 257; i++) {
        starts[i] += starts[i - 1];
    }
    for (size_t i = 0; i < count; i++) {
        spare[starts[(uint8_t)utf8proc_get_property(marks[i])->combining_class]++] = marks[i];
    }
    memcpy(marks, spare, count * sizeof *marks);
}

/* Everything below U+0300 is its own NFC form and never composes with its like. */
static bool is_surely_nfc(struct bytes text) {
    for (size_t i = 0; i < text.len; i++) {
        if (text.data[i] >= 0xcc) {
            return false;
        }
    }
    return true;
}

#define NFC_EXPANSION_MAX 4 /* code points of a canonical decomposition, any Unicode version */

enum status text_nfc(struct grow *out, struct bytes text, struct grow *scratch) {
    if (is_surely_nfc(text)) {
        return grow_put(out, text.data, text.len);
    }
    size_t chars = 0;
    for (size_t i = 0; i < text.len; i += utf8_len(text.data[i])) {
        chars++;
    }
    scratch->len = 0;
    size_t most = chars * NFC_EXPANSION_MAX;
    enum status status = grow_reserve(scratch, 2 * most * sizeof(int32_t));
    if (status != STATUS_OK) {
        return status;
    }
    int32_t *codes = (int32_t *)(void *)scratch->data;
    int32_t *spare = codes + most;
    size_t count = 0;
    for (size_t i = 0; i < text.len; i += utf8_len(text.data[i])) {
        int boundary = 0;
        utf8proc_ssize_t made = utf8proc_decompose_char(
            (int32_t)utf8_code(text.data + i), codes + count, NFC_EXPANSION_MAX,
            (utf8proc_option_t)(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE), &boundary);
        if (made < 0 || made > NFC_EXPANSION_MAX) {
            return STATUS_INTERNAL;
        }
        count += (size_t)made;
    }
    for (size_t i = 0; i < count;) {
        size_t end = i;
        while (end < count && utf8proc_get_property(codes[end])->combining_class != 0) {
            end++;
        }
        if (end - i > 1) {
            sort_marks(codes + i, end - i, spare);
        }
        i = end + 1;
    }
    utf8proc_ssize_t composed = utf8proc_normalize_utf32(
        codes, (utf8proc_ssize_t)count, (utf8proc_option_t)(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
    if (composed < 0 || (size_t)composed > count) {
        return STATUS_INTERNAL;
    }
    status = grow_reserve(out, (size_t)composed * 4);
    if (status != STATUS_OK) {
        return status;
    }
    for (utf8proc_ssize_t i = 0; i < composed; i++) {
        out->len += (size_t)utf8proc_encode_char(codes[i], out->data + out->len);
    }
    return STATUS_OK;
}

enum status text_normalize(const struct normal *steps, uint32_t count, struct bytes text,
                           struct grow *a, struct grow *b, struct grow *scratch,
                           struct bytes *result_out) {
    struct bytes now = text;
    for (uint32_t i = 0; i < count; i++) {
        const struct normal *step = &steps[i];
        struct grow *out = i % 2 == 0 ? a : b;
        out->len = 0;
        enum status status = STATUS_OK;
        switch (step->kind) {
        case NORMAL_PREPEND:
            if (now.len > 0) {
                status = grow_put(out, step->to.data, step->to.len);
            }
            if (status == STATUS_OK) {
                status = grow_put(out, now.data, now.len);
            }
            break;
        case NORMAL_REPLACE: status = text_replace(out, now, step->from, step->to); break;
        case NORMAL_NFC: status = text_nfc(out, now, scratch); break;
        }
        if (status != STATUS_OK) {
            return status;
        }
        now = grow_bytes(out);
    }
    *result_out = now;
    return STATUS_OK;
}
