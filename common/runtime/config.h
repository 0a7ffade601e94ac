/* Settings from one table per program: command line, then environment, then default.
 *
 * The table drives --flag value, --flag=value, BATON_FLAG in the environment (dashes become
 * underscores), --help and --version. A wrong value is one sentence that names the flag, the value
 * and what is accepted; an unknown flag names the nearest known one. A value that starts with two
 * dashes needs the --flag=value form. Nothing is read later: what
 * the program runs with is what config_describe prints. Texts in the settings are borrowed from
 * argv, the environment or the table and live as long as the process. Main thread, at start. */
#ifndef RUNTIME_CONFIG_H
#define RUNTIME_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/status.h"
#include "base/time.h"

#define CONFIG_HOST_CAP     256
#define CONFIG_OPERANDS_MAX 16

enum config_type {
    CONFIG_TEXT, /* const char *; NULL when there is no default; bounds: length in bytes */
    CONFIG_U32,  /* uint32_t; decimal, or with K, M, G (powers of 1024) */
    CONFIG_U64,  /* uint64_t; same */
    CONFIG_BOOL, /* bool; --flag alone is true; else true/false, on/off, yes/no, 1/0 after '=' */
    CONFIG_DURATION, /* struct span; 250ms, 5s, 2m, 1h; a bare number is ms; bounds in ms */
    CONFIG_ADDRESS,  /* struct config_address; host:port, [v6]:port; port 0 = any free one */
    CONFIG_CHOICE,   /* uint32_t or enum: index into choices */
};

struct config_address {
    char host[CONFIG_HOST_CAP]; /* without brackets; "0.0.0.0" when the text was ":port" */
    uint16_t port;
};

struct config_entry {
    const char *flag; /* without the dashes: "kv-tokens" */
    enum config_type type;
    const char *unit; /* "tokens"; NULL: derived from the type */
    const char *help; /* one phrase */
    const char
        *value;     /* default as text, same syntax; NULL: none (TEXT: NULL; ADDRESS: "" and 0) */
    uint64_t least; /* bounds; both 0: the type's own */
    uint64_t most;
    const char *const *choices; /* CHOICE: ends with NULL */
    size_t offset;              /* of the member in the settings struct */
    bool is_required;           /* no default makes sense: missing is an error */
    bool is_secret;             /* config_describe prints "(set)" */
};

/* What is left after the flags, for command-line tools. Borrowed from argv. */
struct config_operands {
    const char *values[CONFIG_OPERANDS_MAX];
    uint32_t count;
};

struct config_program {
    const char *name;
    const char *version;
    const char *summary; /* one sentence */
    const struct config_entry *entries;
    uint32_t count;
    const char *operands; /* NULL: none are accepted; else their usage text ("COMMAND [ARG...]") */
    size_t operands_offset; /* of a struct config_operands in the settings, if operands != NULL */
};

enum config_outcome {
    CONFIG_OUTCOME_RUN,   /* settings are complete */
    CONFIG_OUTCOME_SHOWN, /* --help or --version: message holds the text for stdout; exit 0 */
    CONFIG_OUTCOME_WRONG, /* message holds one sentence for stderr; exit 2 */
};

/* Fills `settings` (all members in the table; on WRONG its content is unspecified).
 * environment: array of "NAME=value" ending with NULL, usually environ; NULL: empty.
 * message_out: malloc'ed text ending with a line break, the caller's to free; NULL on RUN.
 * A BATON_ variable that is in no table is not an error (other programs share the environment). */
MUST_USE enum config_outcome config_parse(const struct config_program *program, int argc,
                                          char *const *argv, char *const *environment,
                                          void *settings, char **message_out);
/* config_parse for main: prints the message; returns -1 to go on, else the exit code. */
MUST_USE int config_start(const struct config_program *program, int argc, char *const *argv,
                          void *settings);
/* The settings in effect as `flag value` pairs on one line for the log at start (malloc'ed). */
char *config_describe(const struct config_program *program, const void *settings);

/* Parses host:port. False if malformed (`out` untouched). */
MUST_USE bool config_address_parse(const char *text, struct config_address *out);

#endif
