#include "runtime/config.h"

#include "runtime/log.h"
#include "unit.h"

enum color { COLOR_RED, COLOR_GREEN };

struct settings {
    const char *name;
    const char *token;
    const char *model;
    uint32_t threads;
    uint64_t kv_tokens;
    bool is_fast;
    struct span beat;
    struct config_address http;
    enum color color;
    struct log_settings log;
    struct config_operands operands;
};

static const char *const colors[] = {"red", "green", NULL};
#define AT(member) .offset = offsetof(struct settings, member)
static const struct config_entry entries[] = {
    {.flag = "name",
     .type = CONFIG_TEXT,
     .help = "what others call it",
     .value = "n0",
     .most = 8,
     AT(name)},
    {.flag = "token", .type = CONFIG_TEXT, .help = "secret", .is_secret = true, AT(token)},
    {.flag = "model",
     .type = CONFIG_TEXT,
     .unit = "DIR",
     .help = "model folder",
     .is_required = true,
     AT(model)},
    {.flag = "threads",
     .type = CONFIG_U32,
     .unit = "threads",
     .help = "compute threads",
     .value = "4",
     .least = 1,
     .most = 64,
     AT(threads)},
    {.flag = "kv-tokens",
     .type = CONFIG_U64,
     .unit = "tokens",
     .help = "capacity",
     .value = "64K",
     .least = 16,
     AT(kv_tokens)},
    {.flag = "fast", .type = CONFIG_BOOL, .help = "hurry", .value = "false", AT(is_fast)},
    {.flag = "beat",
     .type = CONFIG_DURATION,
     .help = "session beat",
     .value = "1s",
     .least = 100,
     .most = 60000,
     AT(beat)},
    {.flag = "http",
     .type = CONFIG_ADDRESS,
     .help = "listen address",
     .value = "0.0.0.0:8000",
     AT(http)},
    {.flag = "color",
     .type = CONFIG_CHOICE,
     .help = "paint",
     .value = "red",
     .choices = colors,
     AT(color)},
    LOG_CONFIG_ENTRIES(struct settings, log),
};
static const struct config_program program = {.name = "router",
                                              .version = "0.1.0",
                                              .summary = "the front door",
                                              .entries = entries,
                                              .count = sizeof entries / sizeof entries[0]};

/* Parses a NULL-ended list of arguments; the message is kept until the next call. */
static char *last_message;
static enum config_outcome parse_with(const struct config_program *with, char *const *environment,
                                      struct settings *settings, char *const *arguments) {
    char name[] = "router";
    char *argv[32] = {name};
    int argc = 1;
    for (; arguments[argc - 1] != NULL; argc++) {
        argv[argc] = arguments[argc - 1];
    }
    free(last_message);
    memset(settings, 0xa5, sizeof *settings);
    return config_parse(with, argc, argv, environment, settings, &last_message);
}
/* The literals are never written to; argv's type is a relic. */
#define ARGS(...)                                                                                  \
    ((char *const[]){(char *)(uintptr_t) "--model=m", __VA_ARGS__ __VA_OPT__(, ) NULL})
#define ARG(text)            ((char *)(uintptr_t)(text))
#define PARSE(settings, ...) parse_with(&program, NULL, (settings), ARGS(__VA_ARGS__))

static void test_defaults_fill_every_member(void **state) {
    (void)state;
    struct settings settings;
    assert_int_equal(PARSE(&settings), CONFIG_OUTCOME_RUN);
    assert_null(last_message);
    assert_string_equal(settings.name, "n0");
    assert_null(settings.token);
    assert_string_equal(settings.model, "m");
    assert_int_equal(settings.threads, 4);
    assert_int_equal(settings.kv_tokens, 65536);
    assert_false(settings.is_fast);
    assert_int_equal(span_to_ms(settings.beat), 1000);
    assert_string_equal(settings.http.host, "0.0.0.0");
    assert_int_equal(settings.http.port, 8000);
    assert_int_equal(settings.color, COLOR_RED);
    assert_int_equal(settings.log.level, LOG_LEVEL_INFO);
    assert_int_equal(settings.log.format, LOG_FORMAT_HUMAN);
}

static void test_both_spellings_of_a_flag_work_and_the_last_wins(void **state) {
    (void)state;
    struct settings settings;
    assert_int_equal(PARSE(&settings, ARG("--threads"), ARG("8"), ARG("--name=a=b"), ARG("--fast"),
                           ARG("--threads=9"), ARG("--color"), ARG("green"), ARG("--http"),
                           ARG("[::1]:0"), ARG("--beat=250ms"), ARG("--log-format=json")),
                     CONFIG_OUTCOME_RUN);
    assert_int_equal(settings.threads, 9);
    assert_string_equal(settings.name, "a=b");
    assert_true(settings.is_fast);
    assert_int_equal(settings.color, COLOR_GREEN);
    assert_string_equal(settings.http.host, "::1");
    assert_int_equal(settings.http.port, 0);
    assert_int_equal(span_to_ms(settings.beat), 250);
    assert_int_equal(settings.log.format, LOG_FORMAT_JSON);
}

static void test_a_bool_flag_takes_a_value_only_after_equals(void **state) {
    (void)state;
    struct settings settings;
    assert_int_equal(PARSE(&settings, ARG("--fast=off")), CONFIG_OUTCOME_RUN);
    assert_false(settings.is_fast);
    assert_int_equal(PARSE(&settings, ARG("--fast"), ARG("false")), CONFIG_OUTCOME_WRONG);
    assert_contains(last_message, "\"false\" is not a flag");
}

static void test_environment_stands_between_default_and_command_line(void **state) {
    (void)state;
    struct settings settings;
    char *environment[] = {ARG("BATON_KV_TOKENS=1M"), ARG("BATON_THREADS=2"),  ARG("BATON_KV=x"),
                           ARG("BATON_MODEL=/m"),     ARG("BATON_NOT_OURS=1"), NULL};
    char *const none[] = {NULL};
    assert_int_equal(parse_with(&program, environment, &settings, none), CONFIG_OUTCOME_RUN);
    assert_int_equal(settings.kv_tokens, 1 << 20);
    assert_int_equal(settings.threads, 2);
    assert_string_equal(settings.model, "/m");
    assert_int_equal(parse_with(&program, environment, &settings, ARGS(ARG("--threads=3"))),
                     CONFIG_OUTCOME_RUN);
    assert_int_equal(settings.threads, 3);
    char *bad[] = {ARG("BATON_THREADS=many"), NULL};
    assert_int_equal(parse_with(&program, bad, &settings, ARGS()), CONFIG_OUTCOME_WRONG);
    assert_string_equal(last_message, "router: BATON_THREADS: \"many\" is not accepted; give a "
                                      "whole number (K, M, G allowed) within 1..64 threads\n");
}

static void test_wrong_values_name_flag_value_and_what_is_accepted(void **state) {
    (void)state;
    static const struct {
        const char *argument;
        const char *message;
    } cases[] = {
        {"--threads=0", "router: --threads: \"0\" is not accepted; give a whole number (K, M, G "
                        "allowed) within 1..64 threads\n"},
        {"--threads=65", "\"65\" is not accepted"},
        {"--threads=-1", "\"-1\" is not accepted"},
        {"--threads=4294967297", "is not accepted"},
        {"--threads=", "\"\" is not accepted"},
        {"--threads= 4", "\" 4\" is not accepted"},
        {"--threads=4x", "\"4x\" is not accepted"},
        {"--kv-tokens=15", "within 16 or more tokens"},
        {"--kv-tokens=99999999999999999999", "is not accepted"},
        {"--kv-tokens=18446744073709551615G", "is not accepted"},
        {"--fast=maybe", "give true or false"},
        {"--beat=99ms", "give a duration such as 250ms, 5s, 2m or 1h within 100ms..1m\n"},
        {"--beat=2h", "is not accepted"},
        {"--beat=1.5s", "is not accepted"},
        {"--http=8000", "give host:port such as 0.0.0.0:8000 or [::1]:8000\n"},
        {"--http=a:65536", "is not accepted"},
        {"--http=::1:80", "is not accepted"},
        {"--http=[::1:80", "is not accepted"},
        {"--http=a b:80", "is not accepted"},
        {"--color=blue", "--color: \"blue\" is not accepted; give one of red|green\n"},
        {"--name=123456789", "give a text of 0..8 bytes\n"},
        {"--thread=4", "router: unknown flag --thread; did you mean --threads? Else --help lists "
                       "all\n"},
        {"--zzzzzzzz", "router: unknown flag --zzzzzzzz; --help lists all\n"},
        {"--", NULL}, /* ends the flags; nothing follows */
        {"-x", "\"-x\" is not a flag; write --flag value"},
        {"stray", "\"stray\" is not a flag"},
        {"--threads", "router: --threads needs a value; give a whole number"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct settings settings;
        enum config_outcome outcome = PARSE(&settings, ARG(cases[i].argument));
        if (cases[i].message == NULL) {
            assert_int_equal(outcome, CONFIG_OUTCOME_RUN);
            continue;
        }
        assert_int_equal(outcome, CONFIG_OUTCOME_WRONG);
        assert_contains(last_message, cases[i].message);
        assert_ptr_equal(strchr(last_message, '\n'), last_message + strlen(last_message) - 1);
    }
}

static void test_a_forgotten_value_does_not_swallow_the_next_flag(void **state) {
    (void)state;
    struct settings settings;
    assert_int_equal(PARSE(&settings, ARG("--name"), ARG("--fast")), CONFIG_OUTCOME_WRONG);
    assert_contains(last_message, "--name needs a value");
    assert_int_equal(PARSE(&settings, ARG("--name=--fast")), CONFIG_OUTCOME_RUN);
    assert_string_equal(settings.name, "--fast");
}

static void test_a_missing_required_flag_names_flag_and_variable(void **state) {
    (void)state;
    struct settings settings;
    char *const none[] = {NULL};
    assert_int_equal(parse_with(&program, NULL, &settings, none), CONFIG_OUTCOME_WRONG);
    assert_string_equal(
        last_message, "router: --model is missing; give DIR (model folder), or set BATON_MODEL\n");
}

static void test_help_shows_name_unit_default_bounds_and_meaning_aligned(void **state) {
    (void)state;
    struct settings settings;
    assert_int_equal(PARSE(&settings, ARG("--bogus"), ARG("--help")), CONFIG_OUTCOME_SHOWN);
    assert_contains(last_message, "router 0.1.0: the front door\n");
    assert_contains(last_message,
                    "\n  --threads     threads     compute threads (default 4; 1..64)\n");
    assert_contains(last_message,
                    "\n  --kv-tokens   tokens      capacity (default 64K; 16 or more)\n");
    assert_contains(last_message, "\n  --model       DIR         model folder (required)\n");
    assert_contains(last_message, "\n  --color       choice      paint (default red; red|green)\n");
    assert_contains(last_message,
                    "\n  --beat        duration    session beat (default 1s; 100ms..1m)\n");
    assert_contains(last_message, "\n  --log-format  choice      ");
    assert_contains(last_message, "\n  --version     ");
}

static void test_version_prints_program_and_version(void **state) {
    (void)state;
    struct settings settings;
    assert_int_equal(PARSE(&settings, ARG("--version")), CONFIG_OUTCOME_SHOWN);
    assert_string_equal(last_message, "router 0.1.0\n");
}

static void test_secrets_appear_neither_in_errors_nor_in_the_description(void **state) {
    (void)state;
    struct settings settings;
    char *environment[] = {ARG("BATON_TOKEN=hunter2"), NULL};
    assert_int_equal(parse_with(&program, environment, &settings, ARGS(ARG("--http=[::1]:80"))),
                     CONFIG_OUTCOME_RUN);
    char *text = config_describe(&program, &settings);
    assert_string_equal(text, "name n0 token (set) model m threads 4 kv-tokens 65536 fast false "
                              "beat 1s http [::1]:80 color red log-level info log-format human");
    free(text);
    static const struct config_entry secret[] = {{.flag = "token",
                                                  .type = CONFIG_TEXT,
                                                  .help = "secret",
                                                  .is_secret = true,
                                                  .most = 3,
                                                  AT(token)}};
    static const struct config_program strict = {
        .name = "router", .version = "1", .summary = "s", .entries = secret, .count = 1};
    char *const none[] = {NULL};
    assert_int_equal(parse_with(&strict, environment, &settings, none), CONFIG_OUTCOME_WRONG);
    assert_lacks(last_message, "hunter2");
    assert_contains(last_message, "BATON_TOKEN: the value is not accepted");
}

static void test_operands_are_collected_for_tools(void **state) {
    (void)state;
    static const struct config_program tool = {.name = "batonctl",
                                               .version = "1",
                                               .summary = "s",
                                               .entries = entries,
                                               .count = sizeof entries / sizeof entries[0],
                                               .operands = "COMMAND [ARG...]",
                                               .operands_offset =
                                                   offsetof(struct settings, operands)};
    struct settings settings;
    assert_int_equal(
        parse_with(&tool, NULL, &settings,
                   ARGS(ARG("drain"), ARG("--fast"), ARG("w1"), ARG("--"), ARG("--x"))),
        CONFIG_OUTCOME_RUN);
    assert_int_equal(settings.operands.count, 3);
    assert_string_equal(settings.operands.values[0], "drain");
    assert_string_equal(settings.operands.values[1], "w1");
    assert_string_equal(settings.operands.values[2], "--x");
    assert_true(settings.is_fast);
    char *many[20];
    for (size_t i = 0; i < 19; i++) {
        many[i] = ARG("x");
    }
    many[19] = NULL;
    assert_int_equal(parse_with(&tool, NULL, &settings, many), CONFIG_OUTCOME_WRONG);
    assert_contains(last_message, "more than 16 operands");
}

static void test_addresses_are_parsed_or_left_alone(void **state) {
    (void)state;
    struct config_address address = {.port = 1};
    assert_true(config_address_parse(":0", &address));
    assert_string_equal(address.host, "0.0.0.0");
    assert_true(config_address_parse("worker-1.baton:65535", &address));
    assert_string_equal(address.host, "worker-1.baton");
    assert_int_equal(address.port, 65535);
    static const char *const bad[] = {"",     "host",  "host:", "host:x", "host:1:2",
                                      "[]:1", "[::1]", "h/p:1", "h:1 "};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_false(config_address_parse(bad[i], &address));
        assert_int_equal(address.port, 65535);
    }
    char longest[400];
    memset(longest, 'a', sizeof longest);
    memcpy(longest + sizeof longest - 3, ":1", 3);
    assert_false(config_address_parse(longest, &address));
}

static int forget_message(void **state) {
    (void)state;
    free(last_message);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults_fill_every_member),
        cmocka_unit_test(test_both_spellings_of_a_flag_work_and_the_last_wins),
        cmocka_unit_test(test_a_bool_flag_takes_a_value_only_after_equals),
        cmocka_unit_test(test_environment_stands_between_default_and_command_line),
        cmocka_unit_test(test_wrong_values_name_flag_value_and_what_is_accepted),
        cmocka_unit_test(test_a_forgotten_value_does_not_swallow_the_next_flag),
        cmocka_unit_test(test_a_missing_required_flag_names_flag_and_variable),
        cmocka_unit_test(test_help_shows_name_unit_default_bounds_and_meaning_aligned),
        cmocka_unit_test(test_version_prints_program_and_version),
        cmocka_unit_test(test_secrets_appear_neither_in_errors_nor_in_the_description),
        cmocka_unit_test(test_operands_are_collected_for_tools),
        cmocka_unit_test(test_addresses_are_parsed_or_left_alone),
    };
    return cmocka_run_group_tests(tests, NULL, forget_message);
}
