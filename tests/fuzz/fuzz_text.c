/* Text that a client sends and tokens that a model says, through the real tokenizers: encode,
 * decode, stop strings. The first byte chooses the tokenizer and what the rest is. */
#include <stdio.h>

#include "fuzz/fuzz.h"
#include "text/detokenizer.h"
#include "text/stop.h"
#include "text/tokenizer.h"

#define TOKENS_MAX 8192u

static struct tokenizer *tokenizers[2];

static const struct tokenizer *real_tokenizer(unsigned which) {
    static const char *const paths[2] = {BATON_SOURCE_DIR "/tests/data/models/stories260k",
                                         BATON_SOURCE_DIR "/tests/data/tokenizers/bytelevel"};
    if (tokenizers[which] == NULL) {
        CHECK_OP(tokenizer_open(paths[which], &tokenizers[which], NULL), ==, STATUS_OK);
    }
    return tokenizers[which];
}

/* Pushes the ids in pieces that the input chooses; returns the text (the caller's to free). */
static char *detokenize(const struct tokenizer *tokenizer, const uint32_t *ids, size_t count,
                        struct detokenizer_options options, struct input *cuts, size_t *len_out) {
    struct detokenizer detokenizer;
    detokenizer_init(&detokenizer, tokenizer, options);
    size_t cap = detokenizer_bytes_max(tokenizer, count);
    char *memory = malloc(cap > 0 ? cap : 1);
    CHECK(memory != NULL);
    struct writer out;
    writer_init(&out, memory, cap);
    for (size_t at = 0; at < count;) {
        size_t piece = 1 + (cuts != NULL ? input_u8(cuts) % 5 : count);
        piece = piece < count - at ? piece : count - at;
        detokenizer_push(&detokenizer, ids + at, piece, &out);
        CHECK(utf8_is_valid((const uint8_t *)memory, out.len)); /* whole characters only */
        at += piece;
    }
    detokenizer_flush(&detokenizer, &out);
    CHECK(!out.is_full);
    CHECK(utf8_is_valid((const uint8_t *)memory, out.len));
    *len_out = out.len;
    return memory;
}

static void check_tokens(const struct tokenizer *tokenizer, const uint32_t *ids, size_t count,
                         uint8_t flags, struct input *cuts) {
    struct detokenizer_options options = {.continues_text = (flags & 4) != 0,
                                          .keeps_special = (flags & 8) != 0,
                                          .holds_byte_runs = (flags & 16) != 0};
    size_t whole_len = 0;
    size_t cut_len = 0;
    char *whole = detokenize(tokenizer, ids, count, options, NULL, &whole_len);
    char *cut = detokenize(tokenizer, ids, count, options, cuts, &cut_len);
    CHECK_OP(whole_len, ==, cut_len); /* where the pieces are cut does not matter */
    CHECK(memcmp(whole, cut, whole_len) == 0);
    free(whole);
    free(cut);
}

static void check_text(const struct tokenizer *tokenizer, struct bytes text, uint8_t flags) {
    static uint32_t ids[TOKENS_MAX];
    struct token_buffer buffer = {.ids = ids, .cap = TOKENS_MAX};
    char sentence[512];
    struct writer error;
    writer_init(&error, sentence, sizeof sentence);
    enum status status = tokenizer_encode(tokenizer, text, false, &buffer, &error);
    CHECK((status == STATUS_OK) == (error.len == 0));
    CHECK((status == STATUS_INVALID) == !utf8_is_valid(text.data, text.len));
    if (status != STATUS_OK) {
        return;
    }
    struct input cuts = input_of(text.data, text.len);
    check_tokens(tokenizer, ids, buffer.count, flags, &cuts);
}

/* Stop strings: the result does not depend on where the text is cut. */
static void check_stop(struct input *input) {
    struct bytes strings[4];
    uint32_t count = input_below(input, 5);
    for (uint32_t i = 0; i < count; i++) {
        strings[i] = input_bytes(input, 1 + input_u8(input) % 8);
    }
    struct stop whole;
    struct stop cut;
    if (stop_init(&whole, strings, count, NULL) != STATUS_OK ||
        stop_init(&cut, strings, count, NULL) != STATUS_OK) {
        return;
    }
    size_t cap = input->len + STOP_BYTES_MAX;
    char *memory = malloc(2 * cap);
    CHECK(memory != NULL);
    struct writer first, second;
    writer_init(&first, memory, cap);
    writer_init(&second, memory + cap, cap);
    bool is_found = stop_push(&whole, (struct bytes){input->data, input->len}, &first);
    stop_flush(&whole, &first);
    bool is_found_cut = false;
    while (input->len > 0 && !is_found_cut) {
        is_found_cut = stop_push(&cut, input_bytes(input, 1 + input->data[0] % 7), &second);
    }
    stop_flush(&cut, &second);
    CHECK(is_found == is_found_cut && whole.matched == cut.matched);
    CHECK(!first.is_full && !second.is_full);
    CHECK_OP(first.len, ==, second.len);
    CHECK(memcmp(memory, memory + cap, first.len) == 0);
    free(memory);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    struct input input = input_of(data, len);
    uint8_t flags = input_u8(&input);
    const struct tokenizer *tokenizer = real_tokenizer(flags & 1);
    uint8_t *copy = input_copy(input_bytes(&input, SIZE_MAX));
    size_t left = len > 0 ? len - 1 : 0;
    input = input_of(copy, left);
    if (flags >= 192) {
        check_stop(&input);
    } else if ((flags & 2) == 0) {
        check_text(tokenizer, (struct bytes){copy, left}, flags);
    } else {
        static uint32_t ids[TOKENS_MAX];
        size_t count = left / 2 < TOKENS_MAX ? left / 2 : TOKENS_MAX;
        for (size_t i = 0; i < count;
             i++) { /* a model's vocabulary may be larger than the file's */
            ids[i] = input_u16(&input) % (tokenizer_vocab_size(tokenizer) + 2);
        }
        struct input cuts = input_of(copy, left);
        check_tokens(tokenizer, ids, count, flags, &cuts);
    }
    free(copy);
    return 0;
}
