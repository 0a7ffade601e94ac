/* batonctl: what a cluster of Baton does, which request waits where for whom, and how to take a
 * program out. See README.md. */
#include "tools/batonctl/batonctl.h"

#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

extern char **environ;

#define AT(member_) .offset = offsetof(struct options, member_)
#define COMMON_ENTRIES                                                                             \
    {.flag = "etcd",                                                                               \
     .type = CONFIG_TEXT,                                                                          \
     .unit = "URL[,URL...]",                                                                       \
     .help = "where the programs are registered",                                                  \
     .value = "http://127.0.0.1:2379",                                                             \
     AT(etcd)},                                                                                    \
        {.flag = "cluster",                                                                        \
         .type = CONFIG_TEXT,                                                                      \
         .unit = "NAME",                                                                           \
         .help = "whose programs to look at",                                                      \
         .value = "baton",                                                                         \
         .least = 1,                                                                               \
         .most = 63,                                                                               \
         AT(cluster)},                                                                             \
        {.flag = "at",                                                                             \
         .type = CONFIG_TEXT,                                                                      \
         .unit = "HOST:PORT[,HOST:PORT...]",                                                       \
         .help = "ask these admin ports instead of those in etcd",                                 \
         AT(at)},                                                                                  \
        {.flag = "timeout",                                                                        \
         .type = CONFIG_DURATION,                                                                  \
         .help = "a program that does not answer within this is shown as such",                    \
         .value = "2s",                                                                            \
         .least = 50,                                                                              \
         .most = 60000,                                                                            \
         AT(timeout)},                                                                             \
    {                                                                                              \
        .flag = "json", .type = CONFIG_BOOL, .help = "one JSON document, for scripts",             \
        .value = "false", AT(is_json)                                                              \
    }

static const struct config_entry status_entries[] = {COMMON_ENTRIES};
static const struct config_entry why_entries[] = {COMMON_ENTRIES};
static const struct config_entry entries_entries[] = {
    COMMON_ENTRIES,
    {.flag = "role",
     .type = CONFIG_TEXT,
     .unit = "router|prefill|decode",
     .help = "only what programs of this role hold",
     AT(role)},
    {.flag = "state",
     .type = CONFIG_TEXT,
     .unit = "STATE",
     .help = "only what is in this state somewhere (with --role: there)",
     AT(state)},
    {.flag = "older-than",
     .type = CONFIG_DURATION,
     .help = "only what is older than this",
     .value = "0",
     .most = 86400000,
     AT(older_than)},
};
static const struct config_entry drain_entries[] = {
    COMMON_ENTRIES,
    {.flag = "grace",
     .type = CONFIG_TEXT,
     .unit = "SECONDS",
     .help = "what is not finished by then fails; unset: each program's --drain-timeout",
     AT(grace)},
    {.flag = "wait",
     .type = CONFIG_BOOL,
     .help = "return only when they are gone",
     .value = "false",
     AT(waits)},
};
static const struct config_entry top_entries[] = {
    COMMON_ENTRIES,
    {.flag = "every",
     .type = CONFIG_DURATION,
     .help = "time between two looks",
     .value = "2s",
     .least = 100,
     .most = 3600000,
     AT(every)},
    {.flag = "once",
     .type = CONFIG_BOOL,
     .help = "show one interval and end",
     .value = "false",
     AT(is_once)},
};

struct command {
    const char *name;
    const char *operands; /* usage text; NULL: none */
    const char *summary;
    int (*run)(const struct options *options);
    const struct config_entry *entries;
    uint32_t count;
};

#define COMMAND(name_, operands_, summary_)                                                        \
    {                                                                                              \
#name_, operands_, summary_, command_##name_, name_##_entries,                             \
            sizeof name_##_entries / sizeof name_##_entries[0]                                     \
    }

static const struct command commands[] = {
    COMMAND(status, NULL, "one line for each program, and what is wrong, in words"),
    COMMAND(entries, NULL,
            "every live request: its state at each program, and whom it waits for in the end"),
    COMMAND(why, "RID",
            "one request's story: where it is and what it waits for, or how and why it ended. RID "
            "is the client's request_id, or an attempt or slot of 16 hexadecimal digits"),
    COMMAND(drain, "ID|ROLE",
            "asks a program, or all of a role, to finish what it has and to leave"),
    COMMAND(top, NULL, "requests, tokens and latencies per second, refreshed"),
};
#define COMMAND_COUNT (sizeof commands / sizeof commands[0])

static void print_help(FILE *out) {
    (void)fprintf(out, "batonctl " BATON_VERSION ": look into a cluster of Baton, and operate it\n"
                       "\nusage: batonctl COMMAND [FLAGS]\n\ncommands:\n");
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        char usage[32];
        (void)snprintf(usage, sizeof usage, "%s%s%s", commands[i].name,
                       commands[i].operands != NULL ? " " : "",
                       commands[i].operands != NULL ? commands[i].operands : "");
        (void)fprintf(out, "  %-14s %.*s\n", usage, (int)strcspn(commands[i].summary, "."),
                      commands[i].summary);
    }
    (void)fputs("\nevery command: --etcd URL (or BATON_ETCD), --cluster NAME (or BATON_CLUSTER),\n"
                "  --at HOST:PORT,... instead of etcd, --timeout, --json; 'batonctl COMMAND "
                "--help'\n"
                "\nexit codes: 0 done, and all is well; 1 it could not be done; 2 wrong flags;\n"
                "  3 shown, but a program does not answer or something is wrong\n",
                out);
}

static int run(const struct command *command, int argc, char **argv) {
    char name[32];
    struct options options = {.grace_s = -1};
    char *message = NULL;
    (void)snprintf(name, sizeof name, "batonctl %s", command->name);
    const struct config_program program = {.name = name,
                                           .version = BATON_VERSION,
                                           .summary = command->summary,
                                           .entries = command->entries,
                                           .count = command->count,
                                           .operands = command->operands,
                                           .operands_offset = offsetof(struct options, operands)};
    enum config_outcome outcome = config_parse(&program, argc, argv, environ, &options, &message);
    int code = EXIT_USAGE;
    switch (outcome) {
    case CONFIG_OUTCOME_RUN: code = command->run(&options); break;
    case CONFIG_OUTCOME_SHOWN: code = fputs(message, stdout) < 0 ? EXIT_FAILED : EXIT_DONE; break;
    case CONFIG_OUTCOME_WRONG: (void)fputs(message, stderr); break;
    }
    free(message);
    return code;
}

int main(int argc, char **argv) {
    (void)setlocale(LC_CTYPE, "C.UTF-8"); /* for the width of characters */
    if (argc < 2) {
        print_help(stderr);
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        print_help(stdout);
        return EXIT_DONE;
    }
    if (strcmp(argv[1], "--version") == 0) {
        (void)puts("batonctl " BATON_VERSION);
        return EXIT_DONE;
    }
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        if (strcmp(argv[1], commands[i].name) == 0) {
            return run(&commands[i], argc - 1, argv + 1);
        }
    }
    return complain(EXIT_USAGE,
                    "there is no command '%s'; there are status, entries, why, drain and top "
                    "(batonctl --help)",
                    argv[1]);
}
