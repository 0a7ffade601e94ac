/* The inside of struct tokenizer, shared by the files of this room that load it and use it. */
#ifndef TEXT_TOKENIZER_PARTS_H
#define TEXT_TOKENIZER_PARTS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bytes.h"
#include "text/added.h"
#include "text/bpe.h"
#include "text/grow.h"
#include "text/normalize.h"
#include "text/pretokenize.h"

#define TOKENIZER_STEPS_MAX    8
#define TOKENIZER_TEMPLATE_MAX 16

struct decode_token {
    struct bytes text; /* what it stands for */
    bool is_known;
    bool is_special;
    bool is_byte; /* byte fallback: text is one byte of a character */
};
struct added_entry {
    struct bytes text;
    uint32_t id;
};

struct tokenizer {
    struct bpe bpe;
    struct added raw;        /* added tokens found in the text as it comes */
    struct added normalized; /* added tokens found after the normalizer */
    struct added_entry *added;
    uint32_t added_count;

    struct normal normals[TOKENIZER_STEPS_MAX];
    uint32_t normal_count;
    struct pre pres[TOKENIZER_STEPS_MAX];
    uint32_t pre_count;
    bool needs_match; /* some step has a regex */
    uint32_t prefix[TOKENIZER_TEMPLATE_MAX];
    uint32_t prefix_count;
    uint32_t suffix[TOKENIZER_TEMPLATE_MAX];
    uint32_t suffix_count;

    bool is_byte_level_decoder;
    bool has_byte_fallback_decoder;
    struct bytes strip; /* one character; len 0: nothing is stripped */
    uint32_t strip_count;
    struct decode_token *tokens; /* [vocab_size] */
    uint32_t vocab_size;
    size_t token_bytes_max;
    uint32_t bos;
    uint32_t eos;

    struct store store; /* memory behind all struct bytes above */
};

#endif
