/* Our tokenizer beside what another one said:
 *
 *     tokenizer_compare TOKENIZER_JSON < LINES
 *
 * Each line: [text, [id, ...]] as JSON. Prints how many differ (the first few whole) and how fast
 * texts were encoded; exits 1 if any differs. */
#include "base/check.h"
#include "runtime/clock.h"
#include "text/tokenizer.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include <jansson.h>

#define IDS_MAX   (1u << 20)
#define SHOWN_MAX 5u

int main(int argc, char **argv) {
    if (argc != 2) {
        (void)fprintf(stderr, "usage: tokenizer_compare TOKENIZER_JSON < LINES\n");
        return 2;
    }
    char memory[512];
    struct writer error;
    struct tokenizer *tokenizer = NULL;
    writer_init(&error, memory, sizeof memory);
    if (tokenizer_open(argv[1], &tokenizer, &error) != STATUS_OK) {
        (void)fprintf(stderr, "tokenizer_compare: %.*s\n", (int)error.len, memory);
        return 2;
    }
    static uint32_t ids[IDS_MAX];
    char *line = NULL;
    size_t cap = 0;
    uint64_t texts = 0;
    uint64_t different = 0;
    uint64_t bytes = 0;
    struct span spent = {0};
    while (getline(&line, &cap, stdin) > 0) {
        json_t *pair = json_loads(line, JSON_ALLOW_NUL, NULL);
        const json_t *wanted = json_array_get(pair, 1);
        const json_t *text = json_array_get(pair, 0);
        CHECK(json_is_string(text) && json_is_array(wanted));
        struct bytes input = {(const uint8_t *)json_string_value(text), json_string_length(text)};
        struct token_buffer out = {ids, IDS_MAX, 0};
        struct instant start = clock_now();
        bool is_same = tokenizer_encode(tokenizer, input, false, &out, NULL) == STATUS_OK;
        spent.ns += instant_since(clock_now(), start).ns;
        is_same = is_same && out.count == json_array_size(wanted);
        for (size_t i = 0; is_same && i < out.count; i++) {
            is_same = ids[i] == json_integer_value(json_array_get(wanted, i));
        }
        texts++;
        bytes += input.len;
        different += is_same ? 0 : 1;
        if (!is_same && different <= SHOWN_MAX) {
            printf("differs: %s", line);
        }
        json_decref(pair);
    }
    printf("%llu texts, %llu differ, %.1f MB/s\n", (unsigned long long)texts,
           (unsigned long long)different, (double)bytes / (double)spent.ns * 1e3);
    free(line);
    tokenizer_destroy(tokenizer);
    return different == 0 && texts > 0 ? 0 : 1;
}
