/* What the tests of this room share: files below tests/data, and golden strings as C values. */
#ifndef TEST_TEXT_GOLDEN_H
#define TEST_TEXT_GOLDEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "base/bytes.h"
#include "text/tokenizer.h"

#define STORIES   "models/stories260k"
#define BYTELEVEL "tokenizers/bytelevel"
#define IDS_MAX   4096

/* "tests/data/" + name; static memory, overwritten by the next call. */
const char *data_path(const char *name);
/* A JSON file below tests/data; fails the test if it cannot be read. The caller's to decref. */
json_t *data_json(const char *name);
/* A whole file below tests/data, malloc'ed. */
struct bytes data_bytes(const char *name);
struct tokenizer *data_tokenizer(const char *name);

struct bytes json_text(const json_t *string);
/* Reads a list of ids; their number. */
size_t json_ids(const json_t *list, uint32_t ids[IDS_MAX]);
/* Sets the value (JSON text) at a path like "model.merges.3": keys and places in lists. */
void json_set_path(json_t *root, const char *path, const char *value_text);
struct bytes bytes_of(const char *text);
/* Fails the test, showing both, unless they are equal. */
void assert_text(struct bytes got, struct bytes wanted);
static inline struct bytes written(const struct writer *writer) {
    return (struct bytes){(const uint8_t *)writer->data, writer->len};
}

#endif
