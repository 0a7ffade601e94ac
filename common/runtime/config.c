#include "runtime/config.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "runtime/buffer.h"

#define MESSAGE_MAX  (256 * 1024)
#define ENV_CAP      80
#define ACCEPTED_CAP 512

/* A cursor over one program's parse, so that helpers need few arguments. */
struct parse {
    const struct config_program *program;
    unsigned char *settings;
    struct buffer message;
};

struct unit_scale {
    const char *suffix;
    uint64_t factor;
};
static const struct unit_scale size_scales[] = {
    {"", 1}, {"K", 1ull << 10}, {"M", 1ull << 20}, {"G", 1ull << 30}, {NULL, 0}};
static const struct unit_scale duration_scales[] = {{"", 1},      {"ms", 1},      {"s", 1000},
                                                    {"m", 60000}, {"h", 3600000}, {NULL, 0}};

/* Digits and an optional suffix; no sign, no spaces, no overflow. */
static bool number_parse(const char *text, const struct unit_scale *scales, uint64_t *value_out) {
    uint64_t value = 0;
    const char *at = text;
    for (; *at >= '0' && *at <= '9'; at++) {
        uint64_t digit = (uint64_t)(*at - '0');
        if (value > (UINT64_MAX - digit) / 10) {
            return false;
        }
        value = value * 10 + digit;
    }
    if (at == text) {
        return false;
    }
    for (; scales->suffix != NULL; scales++) {
        if (strcmp(at, scales->suffix) == 0) {
            if (value > UINT64_MAX / scales->factor) {
                return false;
            }
            *value_out = value * scales->factor;
            return true;
        }
    }
    return false;
}

static bool bool_parse(const char *text, bool *value_out) {
    static const char *const words[][2] = {
        {"true", "false"}, {"on", "off"}, {"yes", "no"}, {"1", "0"}};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        for (size_t j = 0; j < 2; j++) {
            if (strcmp(text, words[i][j]) == 0) {
                *value_out = j == 0;
                return true;
            }
        }
    }
    return false;
}

bool config_address_parse(const char *text, struct config_address *out) {
    const char *host = text;
    const char *colon = strrchr(text, ':');
    if (colon == NULL) {
        return false;
    }
    size_t host_len = (size_t)(colon - text);
    if (text[0] == '[') {
        if (host_len < 3 || text[host_len - 1] != ']') {
            return false;
        }
        host = text + 1;
        host_len -= 2;
        if (memchr(host, ']', host_len) != NULL) {
            return false;
        }
    } else if (memchr(text, ':', host_len) != NULL) {
        return false; /* a v6 address without brackets is ambiguous */
    }
    uint64_t port = 0;
    static const struct unit_scale plain[] = {{"", 1}, {NULL, 0}};
    if (!number_parse(colon + 1, plain, &port) || port > UINT16_MAX ||
        host_len >= CONFIG_HOST_CAP) {
        return false;
    }
    for (size_t i = 0; i < host_len; i++) {
        if ((unsigned char)host[i] <= ' ' || (unsigned char)host[i] >= 0x7f || host[i] == '/') {
            return false;
        }
    }
    struct config_address address = {.port = (uint16_t)port};
    if (host_len == 0) {
        text_copy(address.host, sizeof address.host, "0.0.0.0");
    } else {
        memcpy(address.host, host, host_len);
    }
    *out = address;
    return true;
}

/* The bounds that apply: the entry's, else the type's. */
static uint64_t bound_least(const struct config_entry *entry) {
    return entry->least;
}
static uint64_t bound_most(const struct config_entry *entry) {
    if (entry->most != 0) {
        return entry->most;
    }
    switch (entry->type) {
    case CONFIG_U32: return UINT32_MAX;
    case CONFIG_DURATION: return (uint64_t)INT64_MAX / 1000000;
    case CONFIG_ADDRESS: return UINT16_MAX;
    case CONFIG_TEXT:
    case CONFIG_U64:
    case CONFIG_BOOL:
    case CONFIG_CHOICE: break;
    }
    return UINT64_MAX;
}

static const char *unit_text(const struct config_entry *entry) {
    if (entry->unit != NULL) {
        return entry->unit;
    }
    switch (entry->type) {
    case CONFIG_TEXT: return "text";
    case CONFIG_U32:
    case CONFIG_U64: return "number";
    case CONFIG_BOOL: return "true|false";
    case CONFIG_DURATION: return "duration";
    case CONFIG_ADDRESS: return "host:port";
    case CONFIG_CHOICE: return "choice";
    }
    return "";
}

static void put_choices(struct writer *to, const struct config_entry *entry) {
    for (uint32_t i = 0; entry->choices[i] != NULL; i++) {
        writer_printf(to, "%s%s", i > 0 ? "|" : "", entry->choices[i]);
    }
}

/* A duration in the largest unit that keeps it whole. */
static void put_duration(struct writer *to, uint64_t ms) {
    const char *suffix = "ms";
    if (ms != 0 && ms % 3600000 == 0) {
        suffix = "h";
        ms /= 3600000;
    } else if (ms != 0 && ms % 60000 == 0) {
        suffix = "m";
        ms /= 60000;
    } else if (ms != 0 && ms % 1000 == 0) {
        suffix = "s";
        ms /= 1000;
    }
    writer_printf(to, "%llu%s", (unsigned long long)ms, suffix);
}

static void put_bound(struct writer *to, const struct config_entry *entry, uint64_t bound) {
    if (entry->type == CONFIG_DURATION) {
        put_duration(to, bound);
    } else {
        writer_printf(to, "%llu", (unsigned long long)bound);
    }
}

/* "1..64", "1 or more", "" when the type's own bounds hold. */
static void put_bounds(struct writer *to, const struct config_entry *entry) {
    if (entry->least == 0 && entry->most == 0) {
        return;
    }
    if (entry->most == 0) {
        put_bound(to, entry, entry->least);
        writer_text(to, " or more");
        return;
    }
    put_bound(to, entry, entry->least);
    writer_text(to, "..");
    put_bound(to, entry, entry->most);
}

/* What a person may write, as the end of "... is not accepted: give ". */
static void put_accepted(struct writer *to, const struct config_entry *entry) {
    switch (entry->type) {
    case CONFIG_TEXT: writer_text(to, "a text"); break;
    case CONFIG_U32:
    case CONFIG_U64: writer_text(to, "a whole number (K, M, G allowed)"); break;
    case CONFIG_BOOL: writer_text(to, "true or false"); break;
    case CONFIG_DURATION: writer_text(to, "a duration such as 250ms, 5s, 2m or 1h"); break;
    case CONFIG_ADDRESS: writer_text(to, "host:port such as 0.0.0.0:8000 or [::1]:8000"); break;
    case CONFIG_CHOICE:
        writer_text(to, "one of ");
        put_choices(to, entry);
        return;
    }
    char bounds[96];
    struct writer bounds_writer;
    writer_init(&bounds_writer, bounds, sizeof bounds);
    put_bounds(&bounds_writer, entry);
    if (bounds_writer.len > 0) {
        writer_printf(to, "%s%s %.*s", entry->type == CONFIG_TEXT ? " of" : " within",
                      entry->type == CONFIG_ADDRESS ? " port" : "", (int)bounds_writer.len, bounds);
        if (entry->type == CONFIG_TEXT) {
            writer_text(to, " bytes");
        } else if (entry->unit != NULL) {
            writer_printf(to, " %s", entry->unit);
        }
    }
}

/* Stores a value; false if the text is not acceptable for the entry. */
static bool entry_set(const struct config_entry *entry, void *settings, const char *text) {
    unsigned char *member = (unsigned char *)settings + entry->offset;
    uint64_t number = 0;
    uint64_t least = bound_least(entry);
    uint64_t most = bound_most(entry);
    switch (entry->type) {
    case CONFIG_TEXT: {
        size_t len = strlen(text);
        if (len < least || len > most) {
            return false;
        }
        memcpy(member, &text, sizeof text);
        return true;
    }
    case CONFIG_U32: {
        if (!number_parse(text, size_scales, &number) || number < least || number > most) {
            return false;
        }
        uint32_t value = (uint32_t)number;
        memcpy(member, &value, sizeof value);
        return true;
    }
    case CONFIG_U64: {
        if (!number_parse(text, size_scales, &number) || number < least || number > most) {
            return false;
        }
        memcpy(member, &number, sizeof number);
        return true;
    }
    case CONFIG_BOOL: {
        bool value = false;
        if (!bool_parse(text, &value)) {
            return false;
        }
        memcpy(member, &value, sizeof value);
        return true;
    }
    case CONFIG_DURATION: {
        if (!number_parse(text, duration_scales, &number) || number < least || number > most) {
            return false;
        }
        struct span value = span_ms((int64_t)number);
        memcpy(member, &value, sizeof value);
        return true;
    }
    case CONFIG_ADDRESS: {
        struct config_address value = {.port = 0};
        if (!config_address_parse(text, &value) || value.port < least || value.port > most) {
            return false;
        }
        memcpy(member, &value, sizeof value);
        return true;
    }
    case CONFIG_CHOICE:
        for (uint32_t i = 0; entry->choices[i] != NULL; i++) {
            if (strcmp(text, entry->choices[i]) == 0) {
                memcpy(member, &i, sizeof i);
                return true;
            }
        }
        return false;
    }
    return false;
}

static void entry_clear(const struct config_entry *entry, void *settings) {
    unsigned char *member = (unsigned char *)settings + entry->offset;
    switch (entry->type) {
    case CONFIG_TEXT: memset(member, 0, sizeof(const char *)); break;
    case CONFIG_U32:
    case CONFIG_CHOICE: memset(member, 0, sizeof(uint32_t)); break;
    case CONFIG_U64: memset(member, 0, sizeof(uint64_t)); break;
    case CONFIG_BOOL: memset(member, 0, sizeof(bool)); break;
    case CONFIG_DURATION: memset(member, 0, sizeof(struct span)); break;
    case CONFIG_ADDRESS: memset(member, 0, sizeof(struct config_address)); break;
    }
}

static void environment_name(const char *flag, char *name) {
    char text[ENV_CAP] = "BATON_";
    size_t at = 6;
    for (; *flag != '\0'; flag++) {
        CHECK_OP(at, <, sizeof text - 1);
        char c = *flag;
        CHECK((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-');
        text[at++] = c == '-' ? '_' : (char)(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
    }
    text[at] = '\0';
    text_copy(name, ENV_CAP, text);
}

static const char *environment_find(char *const *environment, const char *name) {
    size_t len = strlen(name);
    for (; environment != NULL && *environment != NULL; environment++) {
        if (strncmp(*environment, name, len) == 0 && (*environment)[len] == '=') {
            return *environment + len + 1;
        }
    }
    return NULL;
}

static const struct config_entry *entry_find(const struct config_program *program, const char *flag,
                                             size_t len) {
    for (uint32_t i = 0; i < program->count; i++) {
        if (strlen(program->entries[i].flag) == len &&
            memcmp(program->entries[i].flag, flag, len) == 0) {
            return &program->entries[i];
        }
    }
    return NULL;
}

#define NEAR_CAP 64

/* Edit distance between short texts. */
static size_t text_distance(const char *a, size_t a_len, const char *b, size_t b_len) {
    size_t row[NEAR_CAP + 1];
    if (a_len > NEAR_CAP || b_len > NEAR_CAP) {
        return SIZE_MAX;
    }
    for (size_t j = 0; j <= b_len; j++) {
        row[j] = j;
    }
    for (size_t i = 1; i <= a_len; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_len; j++) {
            size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
            diagonal = row[j];
            size_t best = row[j - 1] + 1 < row[j] + 1 ? row[j - 1] + 1 : row[j] + 1;
            row[j] = change < best ? change : best;
        }
    }
    return row[b_len];
}

static const struct config_entry *entry_nearest(const struct config_program *program,
                                                const char *flag, size_t len) {
    const struct config_entry *nearest = NULL;
    size_t least = len / 3 + 2; /* further away it would only mislead */
    for (uint32_t i = 0; i < program->count; i++) {
        const char *known = program->entries[i].flag;
        size_t distance = text_distance(flag, len, known, strlen(known));
        if (distance < least) {
            least = distance;
            nearest = &program->entries[i];
        }
    }
    return nearest;
}

static void complain_value(struct parse *parse, const struct config_entry *entry,
                           const char *source, const char *value) {
    char accepted[ACCEPTED_CAP];
    struct writer writer;
    writer_init(&writer, accepted, sizeof accepted);
    put_accepted(&writer, entry);
    buffer_printf(&parse->message, "%s: %s: %s%.200s%s is not accepted; give %.*s\n",
                  parse->program->name, source, entry->is_secret ? "" : "\"",
                  entry->is_secret ? "the value" : value, entry->is_secret ? "" : "\"",
                  (int)writer.len, accepted);
}

static void put_help(struct parse *parse) {
    const struct config_program *program = parse->program;
    struct buffer *to = &parse->message;
    size_t flag_width = strlen("version");
    size_t unit_width = 0;
    for (uint32_t i = 0; i < program->count; i++) {
        size_t flag_len = strlen(program->entries[i].flag);
        size_t unit_len = strlen(unit_text(&program->entries[i]));
        flag_width = flag_len > flag_width ? flag_len : flag_width;
        unit_width = unit_len > unit_width ? unit_len : unit_width;
    }
    buffer_printf(to, "%s %s: %s\n\nUsage: %s [--flag value | --flag=value]...%s%s\n\n",
                  program->name, program->version, program->summary, program->name,
                  program->operands != NULL ? " " : "",
                  program->operands != NULL ? program->operands : "");
    buffer_text(to, "Each flag is also an environment variable: --log-level is BATON_LOG_LEVEL. "
                    "The command line wins.\n\n");
    for (uint32_t i = 0; i < program->count; i++) {
        const struct config_entry *entry = &program->entries[i];
        char facts_text[ACCEPTED_CAP];
        struct writer facts;
        writer_init(&facts, facts_text, sizeof facts_text);
        if (entry->value != NULL) {
            writer_printf(&facts, "default %s", entry->value[0] != '\0' ? entry->value : "empty");
        } else {
            writer_text(&facts, entry->is_required ? "required" : "no default");
        }
        if (entry->type == CONFIG_CHOICE) {
            writer_text(&facts, "; ");
            put_choices(&facts, entry);
        } else if (entry->least != 0 || entry->most != 0) {
            writer_text(&facts, "; ");
            put_bounds(&facts, entry);
        }
        buffer_printf(to, "  --%-*s  %-*s  %s (%.*s)\n", (int)flag_width, entry->flag,
                      (int)unit_width, unit_text(entry), entry->help, (int)facts.len, facts_text);
    }
    buffer_printf(to, "  --%-*s  %-*s  print this and exit\n", (int)flag_width, "help",
                  (int)unit_width, "");
    buffer_printf(to, "  --%-*s  %-*s  print the version and exit\n", (int)flag_width, "version",
                  (int)unit_width, "");
}

/* Defaults, then the environment. A default that its own entry refuses is a bug of the table. */
static bool parse_defaults(struct parse *parse, char *const *environment) {
    for (uint32_t i = 0; i < parse->program->count; i++) {
        const struct config_entry *entry = &parse->program->entries[i];
        CHECK((entry->type == CONFIG_CHOICE) == (entry->choices != NULL));
        entry_clear(entry, parse->settings);
        if (entry->value != NULL) {
            CHECK(entry_set(entry, parse->settings, entry->value));
        }
        char name[ENV_CAP];
        environment_name(entry->flag, name);
        const char *value = environment_find(environment, name);
        if (value != NULL && !entry_set(entry, parse->settings, value)) {
            complain_value(parse, entry, name, value);
            return false;
        }
    }
    return true;
}

static bool add_operand(struct parse *parse, const char *text) {
    if (parse->program->operands == NULL) {
        buffer_printf(&parse->message,
                      "%s: \"%.200s\" is not a flag; write --flag value (see %s --help)\n",
                      parse->program->name, text, parse->program->name);
        return false;
    }
    struct config_operands operands;
    unsigned char *member = parse->settings + parse->program->operands_offset;
    memcpy(&operands, member, sizeof operands);
    if (operands.count == CONFIG_OPERANDS_MAX) {
        buffer_printf(&parse->message, "%s: more than %d operands; see %s --help\n",
                      parse->program->name, CONFIG_OPERANDS_MAX, parse->program->name);
        return false;
    }
    operands.values[operands.count++] = text;
    memcpy(member, &operands, sizeof operands);
    return true;
}

/* One --flag; advances *at when the value is the next argument. is_given: by entry index. */
static bool parse_flag(struct parse *parse, int argc, char *const *argv, int *at, bool *is_given) {
    const struct config_program *program = parse->program;
    const char *flag = argv[*at] + 2;
    const char *equals = strchr(flag, '=');
    size_t len = equals != NULL ? (size_t)(equals - flag) : strlen(flag);
    const struct config_entry *entry = entry_find(program, flag, len);
    if (entry == NULL) {
        const struct config_entry *nearest = entry_nearest(program, flag, len);
        buffer_printf(&parse->message, "%s: unknown flag --%.*s; %s%s%s--help lists all\n",
                      program->name, (int)(len < 100 ? len : 100), flag,
                      nearest != NULL ? "did you mean --" : "",
                      nearest != NULL ? nearest->flag : "", nearest != NULL ? "? Else " : "");
        return false;
    }
    char source[ENV_CAP + 2] = "--";
    text_copy(source + 2, sizeof source - 2, entry->flag);
    const char *value = equals != NULL ? equals + 1 : NULL;
    if (value == NULL && entry->type == CONFIG_BOOL) {
        value = "true";
    } else if (value == NULL) {
        /* A value that starts with two dashes is far more often a forgotten value. */
        if (*at + 1 >= argc || strncmp(argv[*at + 1], "--", 2) == 0) {
            char accepted[ACCEPTED_CAP];
            struct writer writer;
            writer_init(&writer, accepted, sizeof accepted);
            put_accepted(&writer, entry);
            buffer_printf(&parse->message, "%s: %s needs a value; give %.*s\n", program->name,
                          source, (int)writer.len, accepted);
            return false;
        }
        (*at)++;
        value = argv[*at];
    }
    if (!entry_set(entry, parse->settings, value)) {
        complain_value(parse, entry, source, value);
        return false;
    }
    is_given[entry - program->entries] = true;
    return true;
}

static bool parse_required(struct parse *parse, char *const *environment, const bool *is_given) {
    for (uint32_t i = 0; i < parse->program->count; i++) {
        const struct config_entry *entry = &parse->program->entries[i];
        char name[ENV_CAP];
        environment_name(entry->flag, name);
        if (entry->is_required && entry->value == NULL && !is_given[i] &&
            environment_find(environment, name) == NULL) {
            buffer_printf(&parse->message, "%s: --%s is missing; give %s (%s), or set %s\n",
                          parse->program->name, entry->flag, unit_text(entry), entry->help, name);
            return false;
        }
    }
    return true;
}

static enum config_outcome parse_all(struct parse *parse, int argc, char *const *argv,
                                     char *const *environment, bool *is_given) {
    const struct config_program *program = parse->program;
    /* Help is given even when something else is wrong. */
    for (int at = 1; at < argc && strcmp(argv[at], "--") != 0; at++) {
        if (strcmp(argv[at], "--help") == 0 || strcmp(argv[at], "-h") == 0) {
            put_help(parse);
            return CONFIG_OUTCOME_SHOWN;
        }
        if (strcmp(argv[at], "--version") == 0) {
            buffer_printf(&parse->message, "%s %s\n", program->name, program->version);
            return CONFIG_OUTCOME_SHOWN;
        }
    }
    if (program->operands != NULL) {
        struct config_operands none = {.count = 0};
        memcpy(parse->settings + program->operands_offset, &none, sizeof none);
    }
    if (!parse_defaults(parse, environment)) {
        return CONFIG_OUTCOME_WRONG;
    }
    bool is_flags = true;
    for (int at = 1; at < argc; at++) {
        bool is_good = true;
        if (is_flags && strcmp(argv[at], "--") == 0) {
            is_flags = false;
        } else if (is_flags && strncmp(argv[at], "--", 2) == 0) {
            is_good = parse_flag(parse, argc, argv, &at, is_given);
        } else {
            is_good = add_operand(parse, argv[at]);
        }
        if (!is_good) {
            return CONFIG_OUTCOME_WRONG;
        }
    }
    return parse_required(parse, environment, is_given) ? CONFIG_OUTCOME_RUN : CONFIG_OUTCOME_WRONG;
}

enum config_outcome config_parse(const struct config_program *program, int argc, char *const *argv,
                                 char *const *environment, void *settings, char **message_out) {
    struct parse parse = {.program = program, .settings = settings};
    buffer_init(&parse.message, MESSAGE_MAX);
    bool *is_given = calloc(program->count + 1, sizeof *is_given);
    CHECK(is_given != NULL);
    enum config_outcome outcome = parse_all(&parse, argc, argv, environment, is_given);
    free(is_given);
    *message_out = NULL;
    if (outcome != CONFIG_OUTCOME_RUN) {
        buffer_put(&parse.message, "", 1);
        *message_out = parse.message.data; /* handed over */
    }
    return outcome;
}

int config_start(const struct config_program *program, int argc, char *const *argv,
                 void *settings) {
    char *message = NULL;
    enum config_outcome outcome = config_parse(program, argc, argv, environ, settings, &message);
    int code = -1;
    switch (outcome) {
    case CONFIG_OUTCOME_RUN: break;
    case CONFIG_OUTCOME_SHOWN:
        code = fputs(message, stdout) >= 0 && fflush(stdout) == 0 ? 0 : 1;
        break;
    case CONFIG_OUTCOME_WRONG:
        (void)fputs(message, stderr); /* nobody is left to tell */
        code = 2;
        break;
    }
    free(message);
    return code;
}

static void put_setting(struct buffer *to, const struct config_entry *entry, const void *settings) {
    const unsigned char *member = (const unsigned char *)settings + entry->offset;
    uint64_t number = 0;
    uint32_t small = 0;
    switch (entry->type) {
    case CONFIG_TEXT: {
        const char *text = NULL;
        memcpy(&text, member, sizeof text);
        if (text == NULL) {
            buffer_text(to, "-");
        } else if (entry->is_secret) {
            buffer_text(to, "(set)");
        } else {
            bool is_plain = text[0] != '\0' && strpbrk(text, " \"\\\n\r\t") == NULL;
            if (is_plain) {
                buffer_text(to, text);
            } else {
                buffer_json(to, text, strlen(text));
            }
        }
        break;
    }
    case CONFIG_U32:
        memcpy(&small, member, sizeof small);
        buffer_printf(to, "%u", small);
        break;
    case CONFIG_U64:
        memcpy(&number, member, sizeof number);
        buffer_printf(to, "%llu", (unsigned long long)number);
        break;
    case CONFIG_BOOL: {
        bool value = false;
        memcpy(&value, member, sizeof value);
        buffer_text(to, value ? "true" : "false");
        break;
    }
    case CONFIG_DURATION: {
        struct span value;
        memcpy(&value, member, sizeof value);
        struct writer writer = buffer_reserve(to, 32);
        put_duration(&writer, (uint64_t)span_to_ms(value));
        buffer_commit(to, &writer);
        break;
    }
    case CONFIG_ADDRESS: {
        struct config_address value;
        memcpy(&value, member, sizeof value);
        bool is_v6 = strchr(value.host, ':') != NULL;
        buffer_printf(to, "%s%s%s:%u", is_v6 ? "[" : "", value.host, is_v6 ? "]" : "", value.port);
        break;
    }
    case CONFIG_CHOICE:
        memcpy(&small, member, sizeof small);
        buffer_text(to, entry->choices[small]);
        break;
    }
}

char *config_describe(const struct config_program *program, const void *settings) {
    struct buffer text;
    buffer_init(&text, MESSAGE_MAX);
    for (uint32_t i = 0; i < program->count; i++) {
        buffer_printf(&text, "%s%s ", i > 0 ? " " : "", program->entries[i].flag);
        put_setting(&text, &program->entries[i], settings);
    }
    buffer_put(&text, "", 1);
    return text.data;
}
