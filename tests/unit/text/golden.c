#include "unit/text/golden.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

const char *data_path(const char *name) {
    static char path[4096];
    (void)snprintf(path, sizeof path, "%s/tests/data/%s", BATON_SOURCE_DIR, name);
    return path;
}

json_t *data_json(const char *name) {
    json_error_t error;
    json_t *json = json_load_file(data_path(name), JSON_ALLOW_NUL, &error);
    if (json == NULL) {
        fail_msg("%s: %s", name, error.text);
    }
    return json;
}

struct bytes data_bytes(const char *name) {
    FILE *file = fopen(data_path(name), "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    long len = ftell(file);
    assert_true(len > 0);
    rewind(file);
    uint8_t *data = malloc((size_t)len);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, (size_t)len, file), len);
    (void)fclose(file);
    return (struct bytes){data, (size_t)len};
}

struct tokenizer *data_tokenizer(const char *name) {
    char sentence[512];
    struct writer error;
    writer_init(&error, sentence, sizeof sentence);
    struct tokenizer *tokenizer = NULL;
    if (tokenizer_open(data_path(name), &tokenizer, &error) != STATUS_OK) {
        fail_msg("%s: %.*s", name, (int)error.len, sentence);
    }
    return tokenizer;
}

struct bytes json_text(const json_t *string) {
    assert_true(json_is_string(string));
    return (struct bytes){(const uint8_t *)json_string_value(string), json_string_length(string)};
}

size_t json_ids(const json_t *list, uint32_t ids[IDS_MAX]) {
    size_t count = json_array_size(list);
    assert_true(count <= IDS_MAX);
    for (size_t i = 0; i < count; i++) {
        ids[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    }
    return count;
}

struct bytes bytes_of(const char *text) {
    return (struct bytes){(const uint8_t *)text, strlen(text)};
}

void assert_text(struct bytes got, struct bytes wanted) {
    if (got.len != wanted.len || (got.len > 0 && memcmp(got.data, wanted.data, got.len) != 0)) {
        fail_msg("got \"%.*s\", wanted \"%.*s\"", (int)got.len, (const char *)got.data,
                 (int)wanted.len, (const char *)wanted.data);
    }
}

void json_set_path(json_t *root, const char *path, const char *value_text) {
    json_t *value = json_loads(value_text, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    assert_non_null(value);
    json_t *at = root;
    const char *part = path;
    for (;;) {
        size_t len = strcspn(part, ".");
        char key[64];
        assert_true(len < sizeof key);
        memcpy(key, part, len);
        key[len] = '\0';
        bool is_last = part[len] == '\0';
        if (json_is_array(at)) {
            size_t place = (size_t)strtoul(key, NULL, 10);
            if (is_last) {
                assert_int_equal(json_array_set_new(at, place, value), 0);
                return;
            }
            at = json_array_get(at, place);
        } else {
            if (is_last) {
                assert_int_equal(json_object_set_new(at, key, value), 0);
                return;
            }
            at = json_object_get(at, key);
        }
        assert_non_null(at);
        part += len + 1;
    }
}
