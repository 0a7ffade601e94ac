/* Detokenizer: token ids of one stream to text, piece by piece, as they are generated.
 *
 * Gives out whole UTF-8 characters only; bytes that may still become one are held back, bytes that
 * cannot become U+FFFD as the `tokenizers` library does it. All pieces together are the library's
 * decode() of all ids (exception: `holds_byte_runs`). A stream is one fixed-size struct: nothing is
 * allocated, nothing needs to be released. One thread at a time per stream. */
#ifndef TEXT_DETOKENIZER_H
#define TEXT_DETOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"

#define DETOKENIZER_HELD_BYTES_MAX 256

struct tokenizer;

struct detokenizer_options {
    /* The ids continue a text (generated tokens after a prompt): the first token keeps its leading
     * space, so that prompt + output is one text. False: the ids are a text of their own and the
     * one space that encoding put in front of it is taken away (only some files have that rule). */
    bool continues_text;
    bool keeps_special; /* write special tokens by name instead of leaving them out */
    /* Byte-fallback files only. The library turns *every* byte of a run of byte tokens into U+FFFD
     * if any part of the run is bad, so the exact text is known only when the run ends. True: wait
     * for that (runs up to DETOKENIZER_HELD_BYTES_MAX bytes). False: give out each character as
     * soon as it is whole, and one U+FFFD for each byte that is bad; differs only for runs that
     * mix. */
    bool holds_byte_runs;
};

struct detokenizer {
    const struct tokenizer *tokenizer; /* borrowed for the stream's life */
    struct detokenizer_options options;
    uint32_t strip_left; /* leading characters that may still be taken away */
    uint32_t held_len;
    bool is_run_too_long; /* the present run of byte tokens is past what `held` can hold */
    uint8_t held[DETOKENIZER_HELD_BYTES_MAX];
};

void detokenizer_init(struct detokenizer *detokenizer, const struct tokenizer *tokenizer,
                      struct detokenizer_options options);
/* Appends to `text` what the next ids add. Ids that the tokenizer does not have (padding of a
 * model's vocabulary) add nothing, as in the library. text->is_full is set if it did not fit:
 * detokenizer_bytes_max says how much is enough. */
void detokenizer_push(struct detokenizer *detokenizer, const uint32_t *token_ids, size_t count,
                      struct writer *text);
/* Appends what is still held back (an incomplete character becomes U+FFFD). The stream is at its
 * end then; further ids would begin in the middle of a text. */
void detokenizer_flush(struct detokenizer *detokenizer, struct writer *text);
/* The most bytes that pushing `count` ids and a flush can append. */
size_t detokenizer_bytes_max(const struct tokenizer *tokenizer, size_t count);

#endif
