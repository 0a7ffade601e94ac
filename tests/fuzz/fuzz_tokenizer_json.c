/* A tokenizer.json from a model directory. What is accepted must encode a text, and decode what it
 * encoded, whatever the file says. */
#include "fuzz/fuzz.h"
#include "text/detokenizer.h"
#include "text/tokenizer.h"

static void use(const struct tokenizer *tokenizer, const char *text) {
    uint32_t ids[512];
    struct token_buffer buffer = {.ids = ids, .cap = sizeof ids / sizeof ids[0]};
    struct bytes bytes = {(const uint8_t *)text, strlen(text)};
    enum status status = tokenizer_encode(tokenizer, bytes, true, &buffer, NULL);
    if (status != STATUS_OK) {
        CHECK_OP(buffer.count, ==, 0);
        return;
    }
    for (size_t i = 0; i < buffer.count; i++) {
        CHECK_OP(ids[i], <, tokenizer_vocab_size(tokenizer));
        CHECK_OP(tokenizer_token_bytes(tokenizer, ids[i]).len, <=,
                 tokenizer_token_bytes_max(tokenizer));
    }
    for (unsigned how = 0; how < 4; how++) {
        struct detokenizer detokenizer;
        struct detokenizer_options options = {.continues_text = (how & 1) != 0,
                                              .keeps_special = true,
                                              .holds_byte_runs = (how & 2) != 0};
        detokenizer_init(&detokenizer, tokenizer, options);
        size_t cap = detokenizer_bytes_max(tokenizer, buffer.count);
        char *memory = malloc(cap > 0 ? cap : 1);
        CHECK(memory != NULL);
        struct writer out;
        writer_init(&out, memory, cap);
        detokenizer_push(&detokenizer, ids, buffer.count, &out);
        detokenizer_flush(&detokenizer, &out);
        CHECK(!out.is_full);
        CHECK(utf8_is_valid((const uint8_t *)memory, out.len));
        free(memory);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    uint8_t *copy = input_copy((struct bytes){data, len});
    struct tokenizer *tokenizer = NULL;
    char sentence[1024];
    struct writer error;
    writer_init(&error, sentence, sizeof sentence);
    enum status status = tokenizer_create((struct bytes){copy, len}, &tokenizer, &error);
    free(copy); /* borrowed until return */
    CHECK((status == STATUS_OK) == (tokenizer != NULL));
    CHECK((status == STATUS_OK) == (error.len == 0));
    CHECK(memchr(sentence, '\n', error.len) == NULL);
    if (tokenizer != NULL) {
        use(tokenizer, "");
        use(tokenizer,
            " Once upon a time, 12345 caf\xc3\xa9s\n\n\t<s>ab</s> \xe6\x9d\xb1\xe4\xba\xac");
        (void)tokenizer_bos(tokenizer);
        (void)tokenizer_eos(tokenizer);
        (void)tokenizer_added_id(tokenizer, (struct bytes){(const uint8_t *)"<s>", 3});
        tokenizer_destroy(tokenizer);
    }
    return 0;
}
