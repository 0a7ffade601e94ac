/* Command lines and addresses: the first byte chooses; lines are arguments, from the second half on
 * (behind an empty line) the environment. */
#include <stdio.h>

#include "fuzz/fuzz.h"
#include "rpc/address.h"
#include "rpc/rpc.h"
#include "runtime/config.h"

#define WORDS_MAX 32u

struct settings {
    const char *text;
    uint32_t number;
    uint64_t large;
    bool is_on;
    struct span span;
    struct config_address address;
    uint32_t choice;
    struct config_operands operands;
};

static const char *const choices[] = {"info", "debug", "warn", NULL};

static const struct config_entry entries[] = {
    {.flag = "model",
     .type = CONFIG_TEXT,
     .help = "a",
     .most = 100,
     .offset = offsetof(struct settings, text)},
    {.flag = "kv-tokens",
     .type = CONFIG_U32,
     .help = "b",
     .value = "16K",
     .least = 16,
     .most = 1u << 30,
     .offset = offsetof(struct settings, number)},
    {.flag = "bytes",
     .type = CONFIG_U64,
     .help = "c",
     .value = "1",
     .offset = offsetof(struct settings, large)},
    {.flag = "on",
     .type = CONFIG_BOOL,
     .help = "d",
     .value = "false",
     .offset = offsetof(struct settings, is_on)},
    {.flag = "grace",
     .type = CONFIG_DURATION,
     .help = "e",
     .value = "30s",
     .least = 0,
     .most = 3600000,
     .offset = offsetof(struct settings, span)},
    {.flag = "grpc",
     .type = CONFIG_ADDRESS,
     .help = "f",
     .value = ":0",
     .offset = offsetof(struct settings, address)},
    {.flag = "log-level",
     .type = CONFIG_CHOICE,
     .help = "g",
     .value = "info",
     .choices = choices,
     .offset = offsetof(struct settings, choice)},
};

static const struct config_program program = {.name = "fuzz",
                                              .version = "1",
                                              .summary = "Nothing.",
                                              .entries = entries,
                                              .count = sizeof entries / sizeof entries[0],
                                              .operands = "[ARG...]",
                                              .operands_offset =
                                                  offsetof(struct settings, operands)};

static void check_settings(const struct settings *settings) {
    CHECK(settings->text == NULL || strlen(settings->text) <= 100);
    CHECK(settings->number >= 16 && settings->number <= 1u << 30);
    CHECK(settings->span.ns >= 0 && settings->span.ns <= 3600000 * 1000000ll);
    CHECK(settings->choice < 3);
    CHECK(memchr(settings->address.host, '\0', CONFIG_HOST_CAP) != NULL);
    CHECK_OP(settings->operands.count, <=, CONFIG_OPERANDS_MAX);
    char *line = config_describe(&program, settings);
    CHECK(line != NULL && strchr(line, '\n') == NULL);
    free(line);
}

static void command_line(char *text) {
    char *words[2][WORDS_MAX + 1] = {{NULL}};
    unsigned counts[2] = {1, 0};
    char name[] = "fuzz";
    words[0][0] = name;
    unsigned where = 0;
    for (char *at = text; *at != '\0';) {
        char *end = strchrnul(at, '\n');
        bool is_last = *end == '\0';
        *end = '\0';
        if (*at == '\0' && where == 0) {
            where = 1;
        } else if (counts[where] < WORDS_MAX) {
            words[where][counts[where]++] = at;
        }
        at = is_last ? end : end + 1;
    }
    struct settings settings;
    memset(&settings, 0, sizeof settings);
    char *message = NULL;
    enum config_outcome outcome =
        config_parse(&program, (int)counts[0], words[0], words[1], &settings, &message);
    CHECK((outcome == CONFIG_OUTCOME_RUN) == (message == NULL));
    if (outcome == CONFIG_OUTCOME_RUN) {
        check_settings(&settings);
    } else if (outcome == CONFIG_OUTCOME_WRONG) { /* one sentence on one line */
        CHECK(strchr(message, '\n') == message + strlen(message) - 1);
    }
    free(message);
}

static void addresses(const char *text) {
    struct address address;
    struct rpc_error error = {.text = ""};
    enum status status = address_parse(text, &address, &error);
    CHECK((status == STATUS_OK) == (error.text[0] == '\0'));
    if (status == STATUS_OK) { /* its own text parses to the same */
        struct address again;
        CHECK_OP(address_parse(address.text, &again, NULL), ==, STATUS_OK);
        CHECK(strcmp(address.host, again.host) == 0 && address.port == again.port);
        CHECK(strcmp(address.text, again.text) == 0);
    }
    struct config_address config;
    if (config_address_parse(text, &config)) {
        CHECK(memchr(config.host, '\0', CONFIG_HOST_CAP) != NULL);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    struct input input = input_of(data, len);
    bool is_address = (input_u8(&input) & 1) != 0;
    char *text = input_text(input_bytes(&input, SIZE_MAX));
    if (is_address) {
        addresses(text);
    } else {
        command_line(text);
    }
    free(text);
    return 0;
}
