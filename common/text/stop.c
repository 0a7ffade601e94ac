#include "text/stop.h"

#include <string.h>

#include "base/check.h"
#include "text/refuse.h"

/* border[i]: the length of the longest string that both begins and ends text[0..i], shorter than
 * it: where the comparison goes on after a mismatch (Knuth, Morris, Pratt). */
static void fill_borders(const uint8_t *text, uint16_t *border, size_t len) {
    border[0] = 0;
    uint16_t now = 0;
    for (size_t i = 1; i < len; i++) {
        while (now > 0 && text[i] != text[now]) {
            now = border[now - 1];
        }
        if (text[i] == text[now]) {
            now++;
        }
        border[i] = now;
    }
}

enum status stop_init(struct stop *stop, const struct bytes *strings, size_t count,
                      struct writer *error) {
    if (count > STOP_STRINGS_MAX) {
        return text_refuse(error, STATUS_RANGE,
                           "there are %zu stop strings, more than the %d "
                           "allowed",
                           count, STOP_STRINGS_MAX);
    }
    size_t total = 0;
    for (size_t i = 0; i < count; i++) {
        if (strings[i].len == 0) {
            return text_refuse(error, STATUS_INVALID, "stop string %zu is empty", i);
        }
        if (strings[i].len > STOP_BYTES_MAX - total) {
            return text_refuse(error, STATUS_RANGE,
                               "the stop strings have more than %d bytes together", STOP_BYTES_MAX);
        }
        if (!utf8_is_valid(strings[i].data, strings[i].len)) {
            return text_refuse(error, STATUS_INVALID, "stop string %zu is not valid UTF-8", i);
        }
        total += strings[i].len;
    }
    stop->count = (uint32_t)count;
    stop->matched = STOP_NONE;
    size_t first = 0;
    for (size_t i = 0; i < count; i++) {
        stop->first[i] = (uint16_t)first;
        stop->len[i] = (uint16_t)strings[i].len;
        stop->state[i] = 0;
        memcpy(stop->text + first, strings[i].data, strings[i].len);
        fill_borders(stop->text + first, stop->border + first, strings[i].len);
        first += strings[i].len;
    }
    return STATUS_OK;
}

/* The string of which most has been seen, or STOP_NONE if nothing is held back. */
static uint32_t longest_held(const struct stop *stop) {
    uint32_t best = STOP_NONE;
    for (uint32_t i = 0; i < stop->count; i++) {
        if (stop->state[i] > (best == STOP_NONE ? 0 : stop->state[best])) {
            best = i;
        }
    }
    return best;
}

/* Moves every string on by one byte; the longest that is complete now, or STOP_NONE. */
static uint32_t step(struct stop *stop, uint8_t byte) {
    uint32_t best = STOP_NONE;
    for (uint32_t i = 0; i < stop->count; i++) {
        const uint8_t *text = stop->text + stop->first[i];
        const uint16_t *border = stop->border + stop->first[i];
        uint16_t state = stop->state[i];
        while (state > 0 && text[state] != byte) {
            state = border[state - 1];
        }
        if (text[state] == byte) {
            state++;
        }
        stop->state[i] = state;
        if (state == stop->len[i] && (best == STOP_NONE || state > stop->len[best])) {
            best = i;
        }
    }
    return best;
}

/* Appends the first `count` bytes of what was held back (the beginning of a stop string) followed
 * by `text`. */
static void put_first(const struct stop *stop, uint32_t held_by, size_t held, struct bytes text,
                      size_t count, struct writer *emitted) {
    size_t from_held = count < held ? count : held;
    if (from_held > 0) {
        writer_put(emitted, stop->text + stop->first[held_by], from_held);
    }
    CHECK_OP(count - from_held, <=, text.len);
    writer_put(emitted, text.data, count - from_held);
}

bool stop_push(struct stop *stop, struct bytes text, struct writer *emitted) {
    if (stop->matched != STOP_NONE) {
        return true;
    }
    uint32_t held_by = longest_held(stop);
    size_t held = held_by == STOP_NONE ? 0 : stop->state[held_by];
    for (size_t i = 0; i < text.len; i++) {
        uint32_t found = step(stop, text.data[i]);
        if (found != STOP_NONE) {
            stop->matched = found;
            put_first(stop, held_by, held, text, held + i + 1 - stop->len[found], emitted);
            return true;
        }
    }
    uint32_t holds = longest_held(stop);
    size_t keeps = holds == STOP_NONE ? 0 : stop->state[holds];
    put_first(stop, held_by, held, text, held + text.len - keeps, emitted);
    return false;
}

void stop_flush(struct stop *stop, struct writer *emitted) {
    uint32_t held_by = longest_held(stop);
    if (stop->matched == STOP_NONE && held_by != STOP_NONE) {
        writer_put(emitted, stop->text + stop->first[held_by], stop->state[held_by]);
    }
    memset(stop->state, 0, sizeof stop->state);
}
