/* Tokenizer: a Hugging Face tokenizer.json as one immutable object that turns text into token ids.
 *
 * Serves BPE with byte fallback (Llama 2 style) and byte-level BPE (GPT-2, Llama 3, Qwen style),
 * with the ids of the `tokenizers` library; whatever else a file asks for is refused by name while
 * loading. A tokenizer never changes after creation: any number of threads may use it at once.
 * Encoding allocates scratch memory in proportion to the text and takes O(n log n) time, whatever
 * the text is: keep it off control threads. Special tokens spelled out in a text are recognised, as
 * the library does; who must not allow that has to look at the ids. */
#ifndef TEXT_TOKENIZER_H
#define TEXT_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"

#define TOKEN_NONE                UINT32_MAX
#define TOKENIZER_FILE_BYTES_MAX  (64u << 20)
#define TOKENIZER_IDS_MAX         (1u << 22) /* every id is below this */
#define TOKENIZER_TEXT_BYTES_MAX  (8u << 20)
#define TOKENIZER_ADDED_BYTES_MAX 256u /* one added token's text */

struct tokenizer;

struct token_buffer {
    uint32_t *ids; /* the caller's, [cap] */
    size_t cap;
    size_t count; /* set by the encoder; 0 after an error */
};

/* Reads a tokenizer.json from memory (borrowed until return).
 * error: may be NULL; gets one sentence that says what is wrong and where, without a newline.
 * Returns STATUS_CORRUPT (not JSON, or contradicts itself), STATUS_UNSUPPORTED (a feature that is
 * not served; the sentence names it), STATUS_RANGE (over a limit above), STATUS_BUSY (no memory).
 */
MUST_USE enum status tokenizer_create(struct bytes tokenizer_json, struct tokenizer **out,
                                      struct writer *error);
/* The same from a file, or from a directory that holds a tokenizer.json. A tokenizer_config.json
 * beside it names the beginning and end tokens. Reads files; STATUS_NOT_FOUND, STATUS_IO besides.
 */
MUST_USE enum status tokenizer_open(const char *path, struct tokenizer **out, struct writer *error);
/* Accepts NULL. No other thread may still use it. */
void tokenizer_destroy(struct tokenizer *tokenizer);

/* Writes the ids of a text to out->ids[0...] and their number to out->count.
 * add_special: put the special tokens of the file's template (usually a beginning token) around it.
 * error: may be NULL; one sentence. Returns STATUS_INVALID (not UTF-8; the sentence gives the byte
 * offset), STATUS_RANGE (more than out->cap tokens, or a text over TOKENIZER_TEXT_BYTES_MAX),
 * STATUS_TIMEOUT (one that the file's regex cannot split within its step limit), STATUS_BUSY (no
 * memory). */
MUST_USE enum status tokenizer_encode(const struct tokenizer *tokenizer, struct bytes utf8,
                                      bool add_special, struct token_buffer *out,
                                      struct writer *error);

/* One more than the highest id of the file. Ids below it may still be unused. */
uint32_t tokenizer_vocab_size(const struct tokenizer *tokenizer);
/* The bytes that a token stands for inside a text ("▁the" gives " the"); a special token gives its
 * name. Not always whole UTF-8 characters. Empty for ids that do not exist. Lives as long as the
 * tokenizer. */
struct bytes tokenizer_token_bytes(const struct tokenizer *tokenizer, uint32_t id);
/* The longest of the above. */
size_t tokenizer_token_bytes_max(const struct tokenizer *tokenizer);
/* True for added tokens marked special (the detokenizer leaves them out). */
bool tokenizer_is_special(const struct tokenizer *tokenizer, uint32_t id);
/* The id of an added token by its exact text ("<|eot_id|>"), or TOKEN_NONE. */
uint32_t tokenizer_added_id(const struct tokenizer *tokenizer, struct bytes text);
/* The token at the beginning: tokenizer_config.json's bos_token if it was read, else the first
 * special token that the template puts before a text; TOKEN_NONE if neither. */
uint32_t tokenizer_bos(const struct tokenizer *tokenizer);
/* The token at the end: the config's eos_token, else the template's last one behind a text, else
 * TOKEN_NONE. Engines end a sequence by generation_config.json, which may name several. */
uint32_t tokenizer_eos(const struct tokenizer *tokenizer);

#endif
