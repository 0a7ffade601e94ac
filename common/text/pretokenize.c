#define _GNU_SOURCE /* memmem */
#include "text/pretokenize.h"

#include <string.h>

#include "text/normalize.h"
#include "text/utf8.h"

/* GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100. */
static bool stands_for_itself(uint32_t byte) {
    return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) ||
           (byte >= 0xae && byte <= 0xff);
}

uint32_t byte_level_code(uint8_t byte) {
    if (stands_for_itself(byte)) {
        return byte;
    }
    if (byte <= ' ') {
        return 0x100u + byte;
    }
    return byte <= 0xa0 ? 0x121u + (byte - 0x7fu) : 0x143u; /* 7f...a0, ad */
}

int byte_level_byte(uint32_t code) {
    if (code < 0x100) {
        return stands_for_itself(code) ? (int)code : -1;
    }
    if (code <= 0x120) {
        return (int)(code - 0x100);
    }
    if (code <= 0x142) {
        return (int)(code - 0x121 + 0x7f);
    }
    return code == 0x143 ? 0xad : -1;
}

static enum status put_piece(struct pieces *out, size_t at, size_t len, bool is_first) {
    if (len == 0) {
        return STATUS_OK;
    }
    struct piece piece = {(uint32_t)at, (uint32_t)len, is_first};
    return grow_put(&out->list, &piece, sizeof piece);
}

struct cut {
    struct pieces *out;
    size_t base; /* where the piece lies in out->text */
    bool is_first;
};

static enum status put_cut(const struct cut *cut, size_t begin, size_t end) {
    return put_piece(cut->out, cut->base + begin, end - begin, cut->is_first && begin == 0);
}

/* One match [at, at + len) after `*done`, the end of what has been put. */
static enum status put_match(const struct cut *cut, enum pre_behaviour behaviour, size_t *done,
                             size_t at, size_t len) {
    enum status status = STATUS_OK;
    size_t begin = *done;
    switch (behaviour) {
    case BEHAVIOUR_ISOLATED:
        status = put_cut(cut, begin, at);
        if (status == STATUS_OK) {
            status = put_cut(cut, at, at + len);
        }
        *done = at + len;
        break;
    case BEHAVIOUR_REMOVED:
        status = put_cut(cut, begin, at);
        *done = at + len;
        break;
    case BEHAVIOUR_KEPT_ONLY:
        status = put_cut(cut, at, at + len);
        *done = at + len;
        break;
    case BEHAVIOUR_MERGED_WITH_PREVIOUS:
        status = put_cut(cut, begin, at + len);
        *done = at + len;
        break;
    case BEHAVIOUR_MERGED_WITH_NEXT:
        status = put_cut(cut, begin, at);
        *done = at;
        break;
    }
    return status;
}

/* Cuts `text`, which lies at cut->base of the output text, at the matches of regex or literal. */
static enum status cut_piece(const struct cut *cut, struct bytes text, const struct regex *regex,
                             struct bytes literal, enum pre_behaviour behaviour,
                             struct regex_match *match) {
    size_t done = 0;
    size_t from = 0;
    while (from < text.len) {
        size_t at = 0;
        size_t len = 0;
        enum status status = STATUS_NOT_FOUND;
        if (regex != NULL) {
            status = regex_find(regex, match, text, from, &at, &len);
        } else {
            const uint8_t *found =
                memmem(text.data + from, text.len - from, literal.data, literal.len);
            if (found != NULL) {
                at = (size_t)(found - text.data);
                len = literal.len;
                status = STATUS_OK;
            }
        }
        if (status == STATUS_NOT_FOUND) {
            break;
        }
        if (status == STATUS_OK) {
            status = put_match(cut, behaviour, &done, at, len);
        }
        if (status != STATUS_OK) {
            return status;
        }
        from = at + len;
    }
    return behaviour == BEHAVIOUR_KEPT_ONLY ? STATUS_OK : put_cut(cut, done, text.len);
}

static bool starts_with(struct bytes text, struct bytes prefix) {
    return text.len >= prefix.len && memcmp(text.data, prefix.data, prefix.len) == 0;
}

static enum status run_metaspace(const struct pre *step, struct bytes text, bool is_first,
                                 struct pieces *out) {
    const struct bytes space = {(const uint8_t *)" ", 1};
    size_t base = out->text.len;
    bool has_prefix = starts_with(text, space) || starts_with(text, step->text);
    bool is_prepended = !has_prefix && (step->prepend == PREPEND_ALWAYS ||
                                        (step->prepend == PREPEND_FIRST && is_first));
    enum status status = STATUS_OK;
    if (is_prepended) {
        status = grow_put(&out->text, step->text.data, step->text.len);
    }
    if (status == STATUS_OK) {
        status = text_replace(&out->text, text, space, step->text);
    }
    if (status != STATUS_OK) {
        return status;
    }
    struct cut cut = {out, base, is_first};
    struct bytes made = {out->text.data + base, out->text.len - base};
    if (!step->is_split) {
        return put_cut(&cut, 0, made.len);
    }
    return cut_piece(&cut, made, NULL, step->text, BEHAVIOUR_MERGED_WITH_NEXT, NULL);
}

static enum status run_split(const struct pre *step, struct bytes text, bool is_first,
                             struct regex_match *match, struct pieces *out) {
    struct cut cut = {out, out->text.len, is_first};
    enum status status = grow_put(&out->text, text.data, text.len);
    if (status != STATUS_OK) {
        return status;
    }
    return cut_piece(&cut, text, step->regex, step->text, step->behaviour, match);
}

static enum status put_alphabet(struct grow *out, struct bytes text) {
    enum status status = grow_reserve(out, text.len * 2);
    if (status != STATUS_OK) {
        return status;
    }
    for (size_t i = 0; i < text.len; i++) {
        uint32_t code = byte_level_code(text.data[i]);
        if (code < 0x80) {
            out->data[out->len++] = (uint8_t)code;
        } else {
            out->data[out->len++] = (uint8_t)(0xc0 | code >> 6);
            out->data[out->len++] = (uint8_t)(0x80 | (code & 0x3f));
        }
    }
    return STATUS_OK;
}

/* spare: scratch; takes the piece with its prefix and the cuts in it. */
static enum status run_byte_level(const struct pre *step, struct bytes text, bool is_first,
                                  struct regex_match *match, struct pieces *spare,
                                  struct pieces *out) {
    spare->text.len = 0;
    spare->list.len = 0;
    enum status status = STATUS_OK;
    if (step->prepend == PREPEND_ALWAYS && text.data[0] != ' ') {
        status = grow_put(&spare->text, " ", 1);
    }
    if (status == STATUS_OK) {
        status = grow_put(&spare->text, text.data, text.len);
    }
    struct cut cut = {spare, 0, is_first};
    if (status == STATUS_OK && step->regex != NULL) {
        struct bytes none = {0};
        status =
            cut_piece(&cut, grow_bytes(&spare->text), step->regex, none, BEHAVIOUR_ISOLATED, match);
    } else if (status == STATUS_OK) {
        status = put_cut(&cut, 0, spare->text.len);
    }
    size_t count = spare->list.len / sizeof(struct piece);
    for (size_t i = 0; i < count && status == STATUS_OK; i++) {
        struct piece piece = ((const struct piece *)(const void *)spare->list.data)[i];
        size_t base = out->text.len;
        struct bytes part = {spare->text.data + piece.at, piece.len};
        status = put_alphabet(&out->text, part);
        if (status == STATUS_OK) {
            status = put_piece(out, base, out->text.len - base, piece.is_first);
        }
    }
    return status;
}

enum status text_pretokenize(const struct pre *steps, uint32_t count, struct bytes text,
                             bool is_first, struct regex_match *match, struct pieces lists[3],
                             struct pieces **result_out) {
    struct pieces *now = &lists[0];
    struct pieces *next = &lists[1];
    now->text.len = 0;
    now->list.len = 0;
    enum status status = grow_put(&now->text, text.data, text.len);
    if (status == STATUS_OK) {
        status = put_piece(now, 0, text.len, is_first);
    }
    for (uint32_t i = 0; i < count && status == STATUS_OK; i++) {
        const struct pre *step = &steps[i];
        next->text.len = 0;
        next->list.len = 0;
        size_t pieces = now->list.len / sizeof(struct piece);
        for (size_t j = 0; j < pieces && status == STATUS_OK; j++) {
            struct piece piece = ((const struct piece *)(const void *)now->list.data)[j];
            struct bytes part = {now->text.data + piece.at, piece.len};
            switch (step->kind) {
            case PRE_METASPACE: status = run_metaspace(step, part, piece.is_first, next); break;
            case PRE_SPLIT: status = run_split(step, part, piece.is_first, match, next); break;
            case PRE_BYTE_LEVEL:
                status = run_byte_level(step, part, piece.is_first, match, &lists[2], next);
                break;
            }
        }
        struct pieces *swap = now;
        now = next;
        next = swap;
    }
    *result_out = now;
    return status;
}
