#include "text/regex.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "text/refuse.h"

#define REGEX_STEPS_CHEAP    256u      /* a match may start anywhere for so many, uncounted */
#define REGEX_STEPS_MAX      50000000u /* all others of one text together */
#define REGEX_HEAP_KIB_MAX   65536u
#define REGEX_NESTING_MAX    32u
#define REGEX_JIT_STACK_MAX  (4u << 20)
#define REGEX_JIT_STACK_MIN  (32u << 10)
#define REGEX_TRANSLATED_MAX (REGEX_BYTES_MAX * 12)

struct regex {
    pcre2_code *code;
};
struct regex_match {
    uint32_t steps_left;
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

/* Reads the pattern once, front to back, and writes PCRE2's spelling of it. */
struct translation {
    struct bytes in;
    size_t at;
    bool is_in_class;
    struct writer out;
    struct writer *error;
};

static enum status refuse_construct(const struct translation *t, size_t at, const char *what) {
    return text_refuse(t->error, STATUS_UNSUPPORTED,
                       "the split pattern uses %s at byte %zu, which is not supported", what, at);
}

static int peek(const struct translation *t, size_t ahead) {
    return t->at + ahead < t->in.len ? t->in.data[t->at + ahead] : -1;
}

static bool is_digit(int c) {
    return c >= '0' && c <= '9';
}

static bool is_letter(int c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool is_hex(int c) {
    return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

static void copy_bytes(struct translation *t, size_t count) {
    writer_put(&t->out, t->in.data + t->at, count);
    t->at += count;
}

/* \p{Name} and \P{Name}: one or two letters are a general category, anything else has to be a
 * script. PCRE2 10.40 reads a bare script name as Script_Extensions, Oniguruma as Script. */
static enum status translate_property(struct translation *t) {
    size_t begin = t->at;
    if (peek(t, 2) != '{') {
        return refuse_construct(t, begin, "\\p without braces");
    }
    const char *letter = peek(t, 1) == 'p' ? "p" : "P";
    size_t name = t->at + 3;
    bool is_negated = name < t->in.len && t->in.data[name] == '^';
    name += is_negated ? 1 : 0;
    size_t end = name;
    while (end < t->in.len && (is_letter(t->in.data[end]) || t->in.data[end] == '_')) {
        end++;
    }
    size_t len = end - name;
    if (len == 0 || len > 40 || end >= t->in.len || t->in.data[end] != '}') {
        return refuse_construct(t, begin, "a \\p{...} that is no category or script");
    }
    writer_printf(&t->out, "\\%s{%s%s%.*s}", letter, is_negated ? "^" : "", len > 2 ? "sc:" : "",
                  (int)len, (const char *)t->in.data + name);
    t->at = end + 1;
    return STATUS_OK;
}

/* \x{H...}, \xHH below 80 and \uHHHH. */
static enum status translate_code(struct translation *t) {
    size_t begin = t->at;
    bool is_braced = peek(t, 1) == 'x' && peek(t, 2) == '{';
    size_t digits = t->at + (is_braced ? 3 : 2);
    size_t most = is_braced ? 6 : peek(t, 1) == 'x' ? 2 : 4;
    size_t end = digits;
    while (end < t->in.len && end - digits < most && is_hex(t->in.data[end])) {
        end++;
    }
    size_t len = end - digits;
    bool is_whole = is_braced ? len > 0 && end < t->in.len && t->in.data[end] == '}' : len == most;
    if (!is_whole || (!is_braced && most == 2 && t->in.data[digits] > '7')) {
        return refuse_construct(t, begin, "a character code of this form");
    }
    writer_printf(&t->out, "\\x{%.*s}", (int)len, (const char *)t->in.data + digits);
    t->at = end + (is_braced ? 1 : 0);
    return STATUS_OK;
}

static enum status translate_escape(struct translation *t) {
    int c = peek(t, 1);
    const char *instead = NULL;
    switch (c) {
    case 'p':
    case 'P': return translate_property(t);
    case 'x':
    case 'u': return translate_code(t);
    case 's': instead = "\\p{White_Space}"; break; /* PCRE2's \s has U+180E besides */
    case 'S': instead = "\\P{White_Space}"; break;
    case 'd': instead = "\\p{Nd}"; break;
    case 'D': instead = "\\P{Nd}"; break;
    case 'v': instead = "\\x{0b}"; break; /* PCRE2: any vertical space */
    case 'r':
    case 'n':
    case 't':
    case 'f': copy_bytes(t, 2); return STATUS_OK;
    default: break;
    }
    if (instead != NULL) {
        writer_text(&t->out, instead);
        t->at += 2;
        return STATUS_OK;
    }
    if (c < ' ' || c >= 0x7f || is_letter(c) || is_digit(c)) {
        char what[] = "the escape \\?";
        what[sizeof what - 2] = (char)(c < ' ' || c >= 0x7f ? '?' : c);
        return refuse_construct(t, t->at, what);
    }
    copy_bytes(t, 2);
    return STATUS_OK;
}

static enum status translate_in_class(struct translation *t) {
    int c = peek(t, 0);
    if (c == '[') {
        return refuse_construct(t, t->at, "a class inside a class");
    }
    if (c == '&' && peek(t, 1) == '&') {
        return refuse_construct(t, t->at, "&& (intersection of classes)");
    }
    if (c == ']') {
        t->is_in_class = false;
    }
    copy_bytes(t, 1);
    return STATUS_OK;
}

static enum status translate_group(struct translation *t) {
    static const char *const served[] = {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"};
    if (peek(t, 1) == '*') {
        return refuse_construct(t, t->at, "(*...)");
    }
    if (peek(t, 1) != '?') {
        copy_bytes(t, 1);
        return STATUS_OK;
    }
    for (size_t i = 0; i < sizeof served / sizeof served[0]; i++) {
        size_t len = strlen(served[i]);
        if (t->in.len - t->at >= len && memcmp(t->in.data + t->at, served[i], len) == 0) {
            copy_bytes(t, len);
            return STATUS_OK;
        }
    }
    return refuse_construct(t, t->at, "a (?...) group other than (?: (?i: (?= (?! (?<= (?<! (?>");
}

/* {n} {n,} {n,m}: the same in both; other braces and a + behind them are not. */
static enum status translate_braces(struct translation *t) {
    size_t end = t->at + 1;
    while (end < t->in.len && (is_digit(t->in.data[end]) || t->in.data[end] == ',')) {
        end++;
    }
    if (!is_digit(peek(t, 1)) || end >= t->in.len || t->in.data[end] != '}') {
        return refuse_construct(t, t->at, "{ that is not {n}, {n,} or {n,m}");
    }
    if (end + 1 < t->in.len && (t->in.data[end + 1] == '+' || t->in.data[end + 1] == '?')) {
        return refuse_construct(t, t->at, "+ or ? behind {n,m}");
    }
    copy_bytes(t, end + 1 - t->at);
    return STATUS_OK;
}

static enum status translate_step(struct translation *t) {
    int c = peek(t, 0);
    if (c == '\\') {
        return translate_escape(t);
    }
    if (t->is_in_class) {
        return translate_in_class(t);
    }
    switch (c) {
    case '[':
        copy_bytes(t, peek(t, 1) == '^' ? 2 : 1);
        t->is_in_class = true;
        if (peek(t, 0) == ']') {
            return refuse_construct(t, t->at, "] as the first member of a class");
        }
        return STATUS_OK;
    case '(': return translate_group(t);
    case '{': return translate_braces(t);
    case '^': return refuse_construct(t, t->at, "^");
    case '$': return refuse_construct(t, t->at, "$");
    default: copy_bytes(t, 1); return STATUS_OK;
    }
}

static enum status translate(struct translation *t) {
    while (t->at < t->in.len) {
        enum status status = translate_step(t);
        if (status != STATUS_OK) {
            return status;
        }
    }
    if (t->out.is_full) {
        return text_refuse(t->error, STATUS_RANGE, "the split pattern is too long");
    }
    return STATUS_OK;
}

static enum status compile(struct bytes pattern, pcre2_code **code_out, struct writer *error) {
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (context == NULL) {
        return text_refuse(error, STATUS_BUSY, "no memory for the split pattern");
    }
    (void)pcre2_set_newline(context, PCRE2_NEWLINE_LF); /* documented never to fail */
    (void)pcre2_set_parens_nest_limit(context, REGEX_NESTING_MAX);
    int code = 0;
    PCRE2_SIZE at = 0;
    pcre2_code *made =
        pcre2_compile(pattern.data, pattern.len,
                      PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_USE_OFFSET_LIMIT,
                      &code, &at, context);
    pcre2_compile_context_free(context);
    if (made == NULL) {
        PCRE2_UCHAR message[128] = {0};
        (void)pcre2_get_error_message(code, message, sizeof message); /* empty if unknown */
        return text_refuse(error, STATUS_CORRUPT, "the split pattern does not compile: %s",
                           (const char *)message);
    }
    uint32_t may_be_empty = 0;
    if (pcre2_pattern_info(made, PCRE2_INFO_MATCHEMPTY, &may_be_empty) != 0 || may_be_empty != 0) {
        pcre2_code_free(made);
        return text_refuse(error, STATUS_UNSUPPORTED,
                           "the split pattern can match an empty text, which is not supported");
    }
    (void)pcre2_jit_compile(made, PCRE2_JIT_COMPLETE); /* without it pcre2_match interprets */
    *code_out = made;
    return STATUS_OK;
}

enum status regex_create(struct bytes pattern, struct regex **out, struct writer *error) {
    if (pattern.len == 0) {
        return text_refuse(error, STATUS_UNSUPPORTED, "the split pattern is empty");
    }
    if (pattern.len > REGEX_BYTES_MAX) {
        return text_refuse(error, STATUS_RANGE,
                           "the split pattern has %zu bytes, more than the %d that are read",
                           pattern.len, REGEX_BYTES_MAX);
    }
    char *memory = malloc(REGEX_TRANSLATED_MAX);
    struct regex *regex = calloc(1, sizeof *regex);
    enum status status = STATUS_BUSY;
    if (memory == NULL || regex == NULL) {
        goto out;
    }
    struct translation translation = {.in = pattern, .error = error};
    writer_init(&translation.out, memory, REGEX_TRANSLATED_MAX);
    status = translate(&translation);
    if (status == STATUS_OK) {
        struct bytes translated = {(const uint8_t *)memory, translation.out.len};
        status = compile(translated, &regex->code, error);
    }
out:
    free(memory);
    if (status != STATUS_OK) {
        regex_destroy(regex);
        return status;
    }
    *out = regex;
    return STATUS_OK;
}

void regex_destroy(struct regex *regex) {
    if (regex == NULL) {
        return;
    }
    pcre2_code_free(regex->code);
    free(regex);
}

enum status regex_match_create(struct regex_match **out) {
    struct regex_match *match = calloc(1, sizeof *match);
    if (match == NULL) {
        return STATUS_BUSY;
    }
    match->data = pcre2_match_data_create(1, NULL);
    match->context = pcre2_match_context_create(NULL);
    /* NULL is fine: without JIT in the library, or then the small stack built into it is used. */
    match->stack = pcre2_jit_stack_create(REGEX_JIT_STACK_MIN, REGEX_JIT_STACK_MAX, NULL);
    if (match->data == NULL || match->context == NULL) {
        regex_match_destroy(match);
        return STATUS_BUSY;
    }
    match->steps_left = REGEX_STEPS_MAX;
    (void)pcre2_set_heap_limit(match->context, REGEX_HEAP_KIB_MAX); /* documented never to fail */
    if (match->stack != NULL) {
        pcre2_jit_stack_assign(match->context, NULL, match->stack);
    }
    *out = match;
    return STATUS_OK;
}

void regex_match_destroy(struct regex_match *match) {
    if (match == NULL) {
        return;
    }
    pcre2_match_data_free(match->data);
    pcre2_match_context_free(match->context);
    pcre2_jit_stack_free(match->stack);
    free(match);
}

/* A match that starts in [from, last], with so many steps for each start: PCRE2 counts anew at each
 * of them, so its limit alone bounds neither one search nor one text. */
static int run(const struct regex *regex, struct regex_match *match, struct bytes text, size_t from,
               size_t last, uint32_t steps) {
    (void)pcre2_set_match_limit(match->context, steps); /* documented never to fail */
    (void)pcre2_set_offset_limit(match->context, last);
    return pcre2_match(regex->code, text.data, text.len, from, PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY,
                       match->data, match->context);
}

/* The same at one start, which gets as many steps as it needs and the text has left. */
static int run_dearly(const struct regex *regex, struct regex_match *match, struct bytes text,
                      size_t at) {
    int found = PCRE2_ERROR_MATCHLIMIT;
    uint32_t steps = REGEX_STEPS_CHEAP;
    while (found == PCRE2_ERROR_MATCHLIMIT && match->steps_left > 0) {
        steps = steps < match->steps_left / 8 ? steps * 8 : match->steps_left;
        match->steps_left -= steps;
        found = run(regex, match, text, at, at, steps);
    }
    return found;
}

/* Of the starts behind `from` one takes more than the cheap steps: that one by itself, then on. */
static int find_dearly(const struct regex *regex, struct regex_match *match, struct bytes text,
                       size_t from) {
    int found = PCRE2_ERROR_NOMATCH;
    for (size_t at = from; at < text.len && found == PCRE2_ERROR_NOMATCH;) {
        found = run(regex, match, text, at, at, REGEX_STEPS_CHEAP);
        bool is_dear = found == PCRE2_ERROR_MATCHLIMIT;
        found = is_dear ? run_dearly(regex, match, text, at) : found;
        at++;
        while (at < text.len && (text.data[at] & 0xc0u) == 0x80u) { /* to the next character */
            at++;
        }
        if (is_dear && found == PCRE2_ERROR_NOMATCH) {
            int rest = run(regex, match, text, at, PCRE2_UNSET, REGEX_STEPS_CHEAP);
            found = rest == PCRE2_ERROR_MATCHLIMIT ? found : rest;
            if (rest == PCRE2_ERROR_NOMATCH) {
                break;
            }
        }
    }
    return found;
}

enum status regex_find(const struct regex *regex, struct regex_match *match, struct bytes text,
                       size_t from, size_t *at_out, size_t *len_out) {
    int found = run(regex, match, text, from, PCRE2_UNSET, REGEX_STEPS_CHEAP);
    if (found == PCRE2_ERROR_MATCHLIMIT) {
        found = find_dearly(regex, match, text, from);
    }
    if (found == PCRE2_ERROR_NOMATCH) {
        return STATUS_NOT_FOUND;
    }
    if (found == PCRE2_ERROR_MATCHLIMIT || found == PCRE2_ERROR_HEAPLIMIT ||
        found == PCRE2_ERROR_DEPTHLIMIT || found == PCRE2_ERROR_JIT_STACKLIMIT) {
        return STATUS_TIMEOUT;
    }
    if (found == PCRE2_ERROR_NOMEMORY) {
        return STATUS_BUSY;
    }
    if (found < 0) {
        return STATUS_INTERNAL;
    }
    const PCRE2_SIZE *ends = pcre2_get_ovector_pointer(match->data);
    *at_out = ends[0];
    *len_out = ends[1] - ends[0];
    return STATUS_OK;
}
