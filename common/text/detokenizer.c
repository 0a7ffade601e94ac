#include "text/detokenizer.h"

#include <string.h>

#include "text/tokenizer.h"
#include "text/tokenizer_parts.h"
#include "text/utf8.h"

static const char replacement[] = "\xef\xbf\xbd"; /* U+FFFD */

void detokenizer_init(struct detokenizer *detokenizer, const struct tokenizer *tokenizer,
                      struct detokenizer_options options) {
    *detokenizer = (struct detokenizer){
        .tokenizer = tokenizer,
        .options = options,
        .strip_left = options.continues_text ? 0 : tokenizer->strip_count,
    };
}

/* All text leaves through here, whole characters only: the first of them may be stripped. */
static void emit(struct detokenizer *detokenizer, const void *data, size_t len,
                 struct writer *text) {
    const uint8_t *at = data;
    const struct bytes strip = detokenizer->tokenizer->strip;
    while (detokenizer->strip_left > 0 && len > 0) {
        if (len >= strip.len && memcmp(at, strip.data, strip.len) == 0) {
            at += strip.len;
            len -= strip.len;
            detokenizer->strip_left--;
        } else {
            detokenizer->strip_left = 0;
        }
    }
    writer_put(text, at, len);
}

static void emit_replacements(struct detokenizer *detokenizer, size_t count, struct writer *text) {
    for (size_t i = 0; i < count; i++) {
        emit(detokenizer, replacement, sizeof replacement - 1, text);
    }
}

/* The held bytes cannot become a character. Byte level: one U+FFFD for all of them (Rust's lossy
 * conversion, "maximal subparts"); byte fallback: one for each. */
static void give_up_held(struct detokenizer *detokenizer, struct writer *text) {
    size_t count = detokenizer->held_len;
    if (count > 1 && detokenizer->tokenizer->is_byte_level_decoder) {
        count = 1;
    }
    detokenizer->held_len = 0;
    emit_replacements(detokenizer, count, text);
}

/* True if `byte` may follow the held bytes, which begin a character. */
static bool continues_character(const struct detokenizer *detokenizer, uint8_t byte) {
    uint8_t lead = detokenizer->held[0];
    uint8_t low = 0x80;
    uint8_t high = 0xbf;
    if (detokenizer->held_len == 1) {
        low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : low;
        high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : high;
    }
    return byte >= low && byte <= high;
}

/* One byte of a text that comes in bytes: gives out characters as soon as they are whole. */
static void push_byte(struct detokenizer *detokenizer, uint8_t byte, struct writer *text) {
    if (detokenizer->held_len > 0 && !continues_character(detokenizer, byte)) {
        give_up_held(detokenizer, text);
    }
    detokenizer->held[detokenizer->held_len++] = byte;
    if (detokenizer->held_len == 1 && byte >= 0x80 && (byte < 0xc2 || byte > 0xf4)) {
        give_up_held(detokenizer, text);
        return;
    }
    size_t len = utf8_len(detokenizer->held[0]);
    if (detokenizer->held_len == len) {
        detokenizer->held_len = 0;
        emit(detokenizer, detokenizer->held, len, text);
    }
}

/* One byte of a run that is kept until it ends, as far as there is room. */
static void push_run_byte(struct detokenizer *detokenizer, uint8_t byte, struct writer *text) {
    if (!detokenizer->is_run_too_long && detokenizer->held_len == DETOKENIZER_HELD_BYTES_MAX) {
        uint8_t run[DETOKENIZER_HELD_BYTES_MAX];
        memcpy(run, detokenizer->held, sizeof run);
        detokenizer->held_len = 0;
        detokenizer->is_run_too_long = true;
        for (size_t i = 0; i < sizeof run; i++) {
            push_byte(detokenizer, run[i], text);
        }
    }
    if (detokenizer->is_run_too_long) {
        push_byte(detokenizer, byte, text);
    } else {
        detokenizer->held[detokenizer->held_len++] = byte;
    }
}

/* A run of byte tokens (or the stream) is over. */
static void end_run(struct detokenizer *detokenizer, struct writer *text) {
    size_t len = detokenizer->held_len;
    bool is_kept_run = detokenizer->options.holds_byte_runs && !detokenizer->is_run_too_long &&
                       !detokenizer->tokenizer->is_byte_level_decoder;
    if (is_kept_run && utf8_is_valid(detokenizer->held, len)) {
        detokenizer->held_len = 0;
        emit(detokenizer, detokenizer->held, len, text);
    } else {
        give_up_held(detokenizer, text);
    }
    detokenizer->is_run_too_long = false;
}

static void push_token(struct detokenizer *detokenizer, const struct decode_token *token,
                       struct writer *text) {
    if (detokenizer->tokenizer->is_byte_level_decoder) {
        for (size_t i = 0; i < token->text.len; i++) {
            push_byte(detokenizer, token->text.data[i], text);
        }
    } else if (token->is_byte && detokenizer->options.holds_byte_runs) {
        push_run_byte(detokenizer, token->text.data[0], text);
    } else if (token->is_byte) {
        push_byte(detokenizer, token->text.data[0], text);
    } else {
        end_run(detokenizer, text);
        emit(detokenizer, token->text.data, token->text.len, text);
    }
}

void detokenizer_push(struct detokenizer *detokenizer, const uint32_t *token_ids, size_t count,
                      struct writer *text) {
    const struct tokenizer *tokenizer = detokenizer->tokenizer;
    for (size_t i = 0; i < count; i++) {
        if (token_ids[i] >= tokenizer->vocab_size) {
            continue;
        }
        const struct decode_token *token = &tokenizer->tokens[token_ids[i]];
        bool is_left_out = token->is_special && !detokenizer->options.keeps_special;
        if (token->is_known && !is_left_out) {
            push_token(detokenizer, token, text);
        }
    }
}

void detokenizer_flush(struct detokenizer *detokenizer, struct writer *text) {
    end_run(detokenizer, text);
}

size_t detokenizer_bytes_max(const struct tokenizer *tokenizer, size_t count) {
    size_t replaced = sizeof replacement - 1; /* each byte may become U+FFFD */
    return (count * tokenizer->token_bytes_max + DETOKENIZER_HELD_BYTES_MAX) * replaced;
}
