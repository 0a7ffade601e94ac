#include "text/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "text/refuse.h"
#include "text/tokenizer_parts.h"
#include "text/utf8.h"

/* All memory of one encode call. */
struct encoder {
    const struct tokenizer *tokenizer;
    struct token_buffer *out;
    struct regex_match *match;
    struct grow normal_a;
    struct grow normal_b;
    struct grow normal_scratch;
    struct pieces lists[3];
    struct bpe_scratch bpe;
};

static void encoder_fini(struct encoder *encoder) {
    regex_match_destroy(encoder->match);
    grow_fini(&encoder->normal_a);
    grow_fini(&encoder->normal_b);
    grow_fini(&encoder->normal_scratch);
    for (size_t i = 0; i < 3; i++) {
        grow_fini(&encoder->lists[i].text);
        grow_fini(&encoder->lists[i].list);
    }
    grow_fini(&encoder->bpe.symbols);
    grow_fini(&encoder->bpe.heap);
}

static enum status put_ids(struct token_buffer *out, const uint32_t *ids, uint32_t count) {
    if (count > out->cap - out->count) {
        return STATUS_RANGE;
    }
    for (uint32_t i = 0; i < count; i++) {
        out->ids[out->count++] = ids[i];
    }
    return STATUS_OK;
}

/* A text without added tokens, normalized. */
static enum status encode_plain(struct encoder *encoder, struct bytes text, bool is_first) {
    const struct tokenizer *tokenizer = encoder->tokenizer;
    struct pieces *pieces = NULL;
    enum status status = text_pretokenize(tokenizer->pres, tokenizer->pre_count, text, is_first,
                                          encoder->match, encoder->lists, &pieces);
    if (status != STATUS_OK) {
        return status;
    }
    const struct piece *list = (const struct piece *)(const void *)pieces->list.data;
    size_t count = pieces->list.len / sizeof *list;
    for (size_t i = 0; i < count && status == STATUS_OK; i++) {
        struct bytes piece = {pieces->text.data + list[i].at, list[i].len};
        status = bpe_encode(&tokenizer->bpe, piece, &encoder->bpe, encoder->out);
    }
    return status;
}

typedef enum status (*part_encoder)(struct encoder *encoder, struct bytes text, bool is_first);

/* Cuts the text at the added tokens and gives what lies between them to `between`. */
static enum status encode_around(struct encoder *encoder, const struct added *added,
                                 struct bytes text, bool is_first, part_encoder between) {
    size_t done = 0;
    while (done < text.len) {
        size_t at = text.len;
        size_t len = 0;
        uint32_t id = TOKEN_NONE;
        bool is_found = added_find(added, text, done, &at, &len, &id);
        enum status status = STATUS_OK;
        if (at > done) {
            struct bytes part = {text.data + done, at - done};
            status = between(encoder, part, is_first && done == 0);
        }
        if (status == STATUS_OK && is_found) {
            status = put_ids(encoder->out, &id, 1);
        }
        if (status != STATUS_OK) {
            return status;
        }
        done = at + len;
    }
    return STATUS_OK;
}

static enum status encode_segment(struct encoder *encoder, struct bytes text, bool is_first) {
    const struct tokenizer *tokenizer = encoder->tokenizer;
    struct bytes normalized = {0};
    enum status status =
        text_normalize(tokenizer->normals, tokenizer->normal_count, text, &encoder->normal_a,
                       &encoder->normal_b, &encoder->normal_scratch, &normalized);
    if (status != STATUS_OK) {
        return status;
    }
    return encode_around(encoder, &tokenizer->normalized, normalized, is_first, encode_plain);
}

/* Where the text stops being UTF-8. */
static size_t first_bad_byte(struct bytes text) {
    size_t at = 0;
    while (at < text.len) {
        size_t len = text.data[at] >= 0x80 && text.data[at] < 0xc2 ? 1 : utf8_len(text.data[at]);
        if (len > text.len - at || !utf8_is_valid(text.data + at, len)) {
            return at;
        }
        at += len;
    }
    return at;
}

enum status tokenizer_encode(const struct tokenizer *tokenizer, struct bytes utf8, bool add_special,
                             struct token_buffer *out, struct writer *error) {
    out->count = 0;
    if (utf8.len > TOKENIZER_TEXT_BYTES_MAX) {
        return text_refuse(error, STATUS_RANGE, "the text has %zu bytes, more than the %u allowed",
                           utf8.len, TOKENIZER_TEXT_BYTES_MAX);
    }
    if (!utf8_is_valid(utf8.data, utf8.len)) {
        return text_refuse(error, STATUS_INVALID, "the text is not valid UTF-8 at byte %zu",
                           first_bad_byte(utf8));
    }
    struct encoder encoder = {.tokenizer = tokenizer, .out = out};
    enum status status = STATUS_OK;
    if (tokenizer->needs_match) {
        status = regex_match_create(&encoder.match);
    }
    if (status == STATUS_OK && add_special) {
        status = put_ids(out, tokenizer->prefix, tokenizer->prefix_count);
    }
    if (status == STATUS_OK) {
        status = encode_around(&encoder, &tokenizer->raw, utf8, true, encode_segment);
    }
    if (status == STATUS_OK && add_special) {
        status = put_ids(out, tokenizer->suffix, tokenizer->suffix_count);
    }
    encoder_fini(&encoder);
    if (status == STATUS_OK) {
        return STATUS_OK;
    }
    out->count = 0;
    if (status == STATUS_RANGE) {
        return text_refuse(error, status, "the text has more than %zu tokens", out->cap);
    }
    if (status == STATUS_TIMEOUT) {
        return text_refuse(error, status,
                           "the text takes the tokenizer's split pattern more steps than allowed: "
                           "break up its long runs of similar characters");
    }
    return text_refuse(error, status, "the text could not be tokenized: %s", status_name(status));
}

uint32_t tokenizer_vocab_size(const struct tokenizer *tokenizer) {
    return tokenizer->vocab_size;
}

struct bytes tokenizer_token_bytes(const struct tokenizer *tokenizer, uint32_t id) {
    return id < tokenizer->vocab_size ? tokenizer->tokens[id].text : (struct bytes){0};
}

size_t tokenizer_token_bytes_max(const struct tokenizer *tokenizer) {
    return tokenizer->token_bytes_max;
}

bool tokenizer_is_special(const struct tokenizer *tokenizer, uint32_t id) {
    return id < tokenizer->vocab_size && tokenizer->tokens[id].is_special;
}

uint32_t tokenizer_added_id(const struct tokenizer *tokenizer, struct bytes text) {
    for (uint32_t i = 0; i < tokenizer->added_count; i++) {
        struct bytes known = tokenizer->added[i].text;
        if (known.len == text.len && memcmp(known.data, text.data, text.len) == 0) {
            return tokenizer->added[i].id;
        }
    }
    return TOKEN_NONE;
}

uint32_t tokenizer_bos(const struct tokenizer *tokenizer) {
    return tokenizer->bos;
}

uint32_t tokenizer_eos(const struct tokenizer *tokenizer) {
    return tokenizer->eos;
}

void tokenizer_destroy(struct tokenizer *tokenizer) {
    if (tokenizer == NULL) {
        return;
    }
    free(tokenizer->bpe.texts);
    free(tokenizer->bpe.vocabulary_memory);
    free(tokenizer->bpe.merges);
    free(tokenizer->bpe.pairs_memory);
    added_fini(&tokenizer->raw);
    added_fini(&tokenizer->normalized);
    free(tokenizer->added);
    for (uint32_t i = 0; i < tokenizer->pre_count; i++) {
        regex_destroy(tokenizer->pres[i].regex);
    }
    free(tokenizer->tokens);
    store_fini(&tokenizer->store);
    free(tokenizer);
}
