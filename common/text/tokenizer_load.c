/* Reading a tokenizer.json: every key is either understood or refused by name. */
#include "text/tokenizer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <jansson.h>

#include "base/check.h"
#include "text/refuse.h"
#include "text/tokenizer_parts.h"
#include "text/utf8.h"

#define GPT2_PATTERN                                                                               \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define STEP_TEXT_BYTES_MAX  64u
#define NORMALIZED_BYTES_MAX (4 * TOKENIZER_ADDED_BYTES_MAX)
#define STRIP_COUNT_MAX      16
#define PATH_BYTES_MAX       4096

struct loader {
    struct tokenizer *tokenizer;
    struct writer *error;
};

static struct bytes json_bytes(const json_t *string) {
    return (struct bytes){(const uint8_t *)json_string_value(string), json_string_length(string)};
}

static bool bytes_equal(struct bytes a, struct bytes b) {
    return a.len == b.len && (a.len == 0 || memcmp(a.data, b.data, a.len) == 0);
}

static struct bytes text_of(const char *text) {
    return (struct bytes){(const uint8_t *)text, strlen(text)};
}

static enum status no_memory(const struct loader *loader) {
    return text_refuse(loader->error, STATUS_BUSY, "no memory for the tokenizer");
}

static enum status keep(struct loader *loader, struct bytes text, struct bytes *out) {
    return store_copy(&loader->tokenizer->store, text, out) == STATUS_OK ? STATUS_OK
                                                                         : no_memory(loader);
}

/* A key of the object must be one of the NULL-ended names. */
static enum status check_keys(const struct loader *loader, json_t *object, const char *where,
                              const char *const *names) {
    const char *key = NULL;
    json_t *value = NULL;
    json_object_foreach(object, key, value) {
        const char *const *name = names;
        while (*name != NULL && strcmp(*name, key) != 0) {
            name++;
        }
        if (*name == NULL) {
            return text_refuse(loader->error, STATUS_UNSUPPORTED,
                               "%s has the key \"%.*s\", which is not supported", where,
                               text_shown(text_of(key)), key);
        }
    }
    return STATUS_OK;
}

/* Reads an optional boolean. */
static enum status get_flag(const struct loader *loader, json_t *object, const char *where,
                            const char *key, bool if_absent, bool *out) {
    json_t *value = json_object_get(object, key);
    if (value != NULL && !json_is_null(value) && !json_is_boolean(value)) {
        return text_refuse(loader->error, STATUS_CORRUPT, "%s: \"%s\" is not true or false", where,
                           key);
    }
    *out = json_is_boolean(value) ? json_is_true(value) : if_absent;
    return STATUS_OK;
}

/* Reads a string that must be there. */
static enum status get_text(const struct loader *loader, json_t *object, const char *where,
                            const char *key, struct bytes *out) {
    json_t *value = json_object_get(object, key);
    if (!json_is_string(value)) {
        return text_refuse(loader->error, STATUS_CORRUPT, "%s: \"%s\" is missing or not a string",
                           where, key);
    }
    *out = json_bytes(value);
    return STATUS_OK;
}

/* A string that must be there, may not be empty, and is short: the text of a step. */
static enum status get_step_text(struct loader *loader, json_t *object, const char *where,
                                 const char *key, bool may_be_empty, struct bytes *out) {
    struct bytes text = {0};
    enum status status = get_text(loader, object, where, key, &text);
    if (status != STATUS_OK) {
        return status;
    }
    if ((text.len == 0 && !may_be_empty) || text.len > STEP_TEXT_BYTES_MAX) {
        return text_refuse(loader->error, STATUS_RANGE, "%s: \"%s\" has %zu bytes, not 1 to %u",
                           where, key, text.len, STEP_TEXT_BYTES_MAX);
    }
    return keep(loader, text, out);
}

static bool is_type(json_t *object, const char *type) {
    json_t *value = json_object_get(object, "type");
    return json_is_string(value) && bytes_equal(json_bytes(value), text_of(type));
}

static enum status refuse_type(const struct loader *loader, json_t *object, const char *where) {
    json_t *value = json_object_get(object, "type");
    if (!json_is_object(object) || !json_is_string(value)) {
        return text_refuse(loader->error, STATUS_CORRUPT, "the %s is not an object with a \"type\"",
                           where);
    }
    return text_refuse(loader->error, STATUS_UNSUPPORTED,
                       "the %s is of type \"%.*s\", which is not supported", where,
                       text_shown(json_bytes(value)), json_string_value(value));
}

static enum status require_type(const struct loader *loader, json_t *object, const char *where,
                                const char *type) {
    return is_type(object, type) ? STATUS_OK : refuse_type(loader, object, where);
}

/* A step or a Sequence of steps: `get` yields them one after the other. A Sequence inside a
 * Sequence is refused, so nothing here recurses. */
struct steps {
    json_t *only; /* not a Sequence */
    json_t *list;
    size_t count;
};

static enum status get_steps(const struct loader *loader, json_t *object, const char *where,
                             const char *list_key, struct steps *out) {
    *out = (struct steps){0};
    if (object == NULL || json_is_null(object)) {
        return STATUS_OK;
    }
    if (!is_type(object, "Sequence")) {
        *out = (struct steps){.only = object, .count = 1};
        return STATUS_OK;
    }
    json_t *list = json_object_get(object, list_key);
    if (!json_is_array(list)) {
        return text_refuse(loader->error, STATUS_CORRUPT, "the %s Sequence has no list \"%s\"",
                           where, list_key);
    }
    if (json_array_size(list) > TOKENIZER_STEPS_MAX) {
        return text_refuse(loader->error, STATUS_RANGE, "the %s has %zu steps, more than %d", where,
                           json_array_size(list), TOKENIZER_STEPS_MAX);
    }
    *out = (struct steps){.list = list, .count = json_array_size(list)};
    return STATUS_OK;
}

static json_t *steps_at(const struct steps *steps, size_t index) {
    return steps->only != NULL ? steps->only : json_array_get(steps->list, index);
}

/* {"String": "..."} or {"Regex": "..."}. */
static enum status get_pattern(const struct loader *loader, json_t *object, const char *where,
                               bool *is_regex_out, struct bytes *out) {
    json_t *pattern = json_object_get(object, "pattern");
    json_t *string = json_object_get(pattern, "String");
    json_t *regex = json_object_get(pattern, "Regex");
    if (!json_is_string(string) == !json_is_string(regex) || json_object_size(pattern) != 1) {
        return text_refuse(loader->error, STATUS_CORRUPT,
                           "%s: \"pattern\" is not {\"String\": ...} or {\"Regex\": ...}", where);
    }
    *is_regex_out = json_is_string(regex);
    *out = json_bytes(json_is_string(regex) ? regex : string);
    return STATUS_OK;
}

/* Replace of a literal: for the normalizer and for the decoder. */
static enum status load_replace(struct loader *loader, json_t *object, const char *where,
                                struct normal *out) {
    static const char *const keys[] = {"type", "pattern", "content", NULL};
    bool is_regex = false;
    struct bytes from = {0};
    enum status status = check_keys(loader, object, where, keys);
    if (status == STATUS_OK) {
        status = get_pattern(loader, object, where, &is_regex, &from);
    }
    if (status != STATUS_OK) {
        return status;
    }
    if (is_regex) {
        return text_refuse(loader->error, STATUS_UNSUPPORTED,
                           "%s replaces a regex, which is not supported", where);
    }
    if (from.len == 0 || from.len > STEP_TEXT_BYTES_MAX) {
        return text_refuse(loader->error, STATUS_RANGE,
                           "%s: the pattern has %zu bytes, not 1 to %u", where, from.len,
                           STEP_TEXT_BYTES_MAX);
    }
    out->kind = NORMAL_REPLACE;
    status = keep(loader, from, &out->from);
    if (status == STATUS_OK) {
        status = get_step_text(loader, object, where, "content", true, &out->to);
    }
    return status;
}

static enum status load_normal(struct loader *loader, json_t *object) {
    static const char *const prepend_keys[] = {"type", "prepend", NULL};
    static const char *const nfc_keys[] = {"type", NULL};
    struct normal *out = &loader->tokenizer->normals[loader->tokenizer->normal_count++];
    if (is_type(object, "Prepend")) {
        out->kind = NORMAL_PREPEND;
        enum status status = check_keys(loader, object, "the Prepend normalizer", prepend_keys);
        return status != STATUS_OK ? status
                                   : get_step_text(loader, object, "the Prepend normalizer",
                                                   "prepend", false, &out->to);
    }
    if (is_type(object, "Replace")) {
        return load_replace(loader, object, "the Replace normalizer", out);
    }
    if (is_type(object, "NFC")) {
        out->kind = NORMAL_NFC;
        return check_keys(loader, object, "the NFC normalizer", nfc_keys);
    }
    return refuse_type(loader, object, "normalizer");
}

static enum status load_normalizer(struct loader *loader, json_t *object) {
    struct steps steps;
    enum status status = get_steps(loader, object, "normalizer", "normalizers", &steps);
    for (size_t i = 0; i < steps.count && status == STATUS_OK; i++) {
        status = load_normal(loader, steps_at(&steps, i));
    }
    return status;
}

static enum status load_metaspace(struct loader *loader, json_t *object, struct pre *out) {
    static const char where[] = "the Metaspace pre-tokenizer";
    static const char *const keys[] = {"type",           "replacement", "add_prefix_space",
                                       "prepend_scheme", "split",       NULL};
    bool has_prefix = true;
    enum status status = check_keys(loader, object, where, keys);
    if (status == STATUS_OK) {
        status = get_step_text(loader, object, where, "replacement", false, &out->text);
    }
    if (status == STATUS_OK) {
        status = get_flag(loader, object, where, "add_prefix_space", true, &has_prefix);
    }
    if (status == STATUS_OK) {
        status = get_flag(loader, object, where, "split", true, &out->is_split);
    }
    if (status != STATUS_OK) {
        return status;
    }
    if (out->text.len != utf8_len(out->text.data[0])) {
        return text_refuse(loader->error, STATUS_CORRUPT,
                           "%s: \"replacement\" is not one character", where);
    }
    out->kind = PRE_METASPACE;
    json_t *scheme = json_object_get(object, "prepend_scheme");
    struct bytes name = json_is_string(scheme) ? json_bytes(scheme) : text_of("");
    if (scheme == NULL) {
        out->prepend = has_prefix ? PREPEND_ALWAYS : PREPEND_NEVER;
    } else if (bytes_equal(name, text_of("always"))) {
        out->prepend = PREPEND_ALWAYS;
    } else if (bytes_equal(name, text_of("first"))) {
        out->prepend = PREPEND_FIRST;
    } else if (bytes_equal(name, text_of("never"))) {
        out->prepend = PREPEND_NEVER;
    } else {
        return text_refuse(loader->error, STATUS_CORRUPT,
                           "%s: \"prepend_scheme\" is not always, first or never", where);
    }
    if (!has_prefix && out->prepend != PREPEND_NEVER) {
        return text_refuse(loader->error, STATUS_CORRUPT,
                           "%s: \"add_prefix_space\" contradicts \"prepend_scheme\"", where);
    }
    return STATUS_OK;
}

static enum status load_regex(struct loader *loader, struct bytes pattern, struct pre *out) {
    loader->tokenizer->needs_match = true;
    return regex_create(pattern, &out->regex, loader->error);
}

static enum status load_behaviour(const struct loader *loader, json_t *object,
                                  enum pre_behaviour *out) {
    static const struct {
        const char *name;
        bool is_inverted;
        enum pre_behaviour behaviour;
    } served[] = {
        {"Isolated", false, BEHAVIOUR_ISOLATED},
        {"Isolated", true, BEHAVIOUR_ISOLATED},
        {"Removed", false, BEHAVIOUR_REMOVED},
        {"Removed", true, BEHAVIOUR_KEPT_ONLY},
        {"MergedWithPrevious", false, BEHAVIOUR_MERGED_WITH_PREVIOUS},
        {"MergedWithNext", false, BEHAVIOUR_MERGED_WITH_NEXT},
    };
    struct bytes name = {0};
    bool is_inverted = false;
    enum status status = get_text(loader, object, "the Split pre-tokenizer", "behavior", &name);
    if (status == STATUS_OK) {
        status = get_flag(loader, object, "the Split pre-tokenizer", "invert", false, &is_inverted);
    }
    if (status != STATUS_OK) {
        return status;
    }
    for (size_t i = 0; i < sizeof served / sizeof served[0]; i++) {
        if (bytes_equal(name, text_of(served[i].name)) && is_inverted == served[i].is_inverted) {
            *out = served[i].behaviour;
            return STATUS_OK;
        }
    }
    return text_refuse(loader->error, STATUS_UNSUPPORTED,
                       "the Split pre-tokenizer has the behavior \"%.*s\"%s, which is not "
                       "supported",
                       text_shown(name), (const char *)name.data,
                       is_inverted ? " with \"invert\"" : "");
}

static enum status load_split(struct loader *loader, json_t *object, struct pre *out) {
    static const char where[] = "the Split pre-tokenizer";
    static const char *const keys[] = {"type", "pattern", "behavior", "invert", NULL};
    bool is_regex = false;
    struct bytes pattern = {0};
    out->kind = PRE_SPLIT;
    enum status status = check_keys(loader, object, where, keys);
    if (status == STATUS_OK) {
        status = load_behaviour(loader, object, &out->behaviour);
    }
    if (status == STATUS_OK) {
        status = get_pattern(loader, object, where, &is_regex, &pattern);
    }
    if (status != STATUS_OK || is_regex) {
        return status != STATUS_OK ? status : load_regex(loader, pattern, out);
    }
    if (pattern.len == 0 || pattern.len > STEP_TEXT_BYTES_MAX) {
        return text_refuse(loader->error, STATUS_RANGE,
                           "%s: the pattern has %zu bytes, not 1 to %u", where, pattern.len,
                           STEP_TEXT_BYTES_MAX);
    }
    return keep(loader, pattern, &out->text);
}

/* Digits (SmolLM and others): numbers of any script, one by one or in runs, are pieces of their
 * own. */
static enum status load_digits(struct loader *loader, json_t *object, struct pre *out) {
    static const char where[] = "the Digits pre-tokenizer";
    static const char *const keys[] = {"type", "individual_digits", NULL};
    bool is_individual = false;
    enum status status = check_keys(loader, object, where, keys);
    if (status == STATUS_OK) {
        status = get_flag(loader, object, where, "individual_digits", false, &is_individual);
    }
    if (status != STATUS_OK) {
        return status;
    }
    out->kind = PRE_SPLIT;
    out->behaviour = BEHAVIOUR_ISOLATED;
    return load_regex(loader, text_of(is_individual ? "\\p{N}" : "\\p{N}+"), out);
}

static enum status load_byte_level(struct loader *loader, json_t *object, struct pre *out) {
    static const char where[] = "the ByteLevel pre-tokenizer";
    static const char *const keys[] = {"type", "add_prefix_space", "trim_offsets", "use_regex",
                                       NULL};
    bool has_prefix = true;
    bool has_regex = true;
    enum status status = check_keys(loader, object, where, keys);
    if (status == STATUS_OK) {
        status = get_flag(loader, object, where, "add_prefix_space", true, &has_prefix);
    }
    if (status == STATUS_OK) {
        status = get_flag(loader, object, where, "use_regex", true, &has_regex);
    }
    if (status != STATUS_OK) {
        return status;
    }
    out->kind = PRE_BYTE_LEVEL;
    out->prepend = has_prefix ? PREPEND_ALWAYS : PREPEND_NEVER;
    return has_regex ? load_regex(loader, text_of(GPT2_PATTERN), out) : STATUS_OK;
}

static enum status load_pre_tokenizer(struct loader *loader, json_t *object) {
    struct tokenizer *tokenizer = loader->tokenizer;
    struct steps steps;
    enum status status = get_steps(loader, object, "pre-tokenizer", "pretokenizers", &steps);
    for (size_t i = 0; i < steps.count && status == STATUS_OK; i++) {
        if (i > 0 && tokenizer->pres[i - 1].kind == PRE_BYTE_LEVEL) {
            return text_refuse(loader->error, STATUS_UNSUPPORTED,
                               "the pre-tokenizer has a step behind ByteLevel, which is not "
                               "supported");
        }
        json_t *step = steps_at(&steps, i);
        struct pre *out = &tokenizer->pres[tokenizer->pre_count++];
        if (is_type(step, "Metaspace")) {
            status = load_metaspace(loader, step, out);
        } else if (is_type(step, "Split")) {
            status = load_split(loader, step, out);
        } else if (is_type(step, "Digits")) {
            status = load_digits(loader, step, out);
        } else if (is_type(step, "ByteLevel")) {
            status = load_byte_level(loader, step, out);
        } else {
            status = refuse_type(loader, step, "pre-tokenizer");
        }
    }
    return status;
}

static enum status load_id(const struct loader *loader, const json_t *value, struct bytes name,
                           uint32_t *out) {
    json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
    if (id < 0 || id >= (json_int_t)TOKENIZER_IDS_MAX) {
        return text_refuse(loader->error, STATUS_RANGE,
                           "token \"%.*s\" has an id that is not an integer below %u",
                           text_shown(name), (const char *)name.data, TOKENIZER_IDS_MAX);
    }
    *out = (uint32_t)id;
    return STATUS_OK;
}

static enum status make_map(const struct loader *loader, struct map *map, void **memory,
                            size_t count) {
    uint32_t limit = count == 0 ? 1 : (uint32_t)count;
    *memory = malloc(map_bytes(limit));
    if (*memory == NULL) {
        return no_memory(loader);
    }
    map_init(map, limit, *memory);
    return STATUS_OK;
}

static enum status load_vocabulary(struct loader *loader, json_t *vocabulary) {
    struct bpe *bpe = &loader->tokenizer->bpe;
    if (!json_is_object(vocabulary) || json_object_size(vocabulary) == 0) {
        return text_refuse(loader->error, STATUS_CORRUPT, "the model has no \"vocab\"");
    }
    if (json_object_size(vocabulary) > TOKENIZER_IDS_MAX) {
        return text_refuse(loader->error, STATUS_RANGE, "the vocabulary has more than %u tokens",
                           TOKENIZER_IDS_MAX);
    }
    const char *key = NULL;
    json_t *value = NULL;
    uint32_t ids = 0;
    json_object_foreach(vocabulary, key, value) {
        uint32_t id = 0;
        enum status status = load_id(loader, value, text_of(key), &id);
        if (status != STATUS_OK) {
            return status;
        }
        ids = id >= ids ? id + 1 : ids;
    }
    bpe->texts = calloc(ids, sizeof *bpe->texts);
    if (bpe->texts == NULL) {
        return no_memory(loader);
    }
    bpe->ids = ids;
    enum status status =
        make_map(loader, &bpe->vocabulary, &bpe->vocabulary_memory, json_object_size(vocabulary));
    if (status != STATUS_OK) {
        return status;
    }
    json_object_foreach(vocabulary, key, value) {
        struct bytes text = text_of(key);
        uint32_t id = (uint32_t)json_integer_value(value);
        if (text.len == 0) {
            return text_refuse(loader->error, STATUS_CORRUPT, "token %u of the vocabulary is empty",
                               id);
        }
        if (bpe->texts[id].len != 0) {
            return text_refuse(loader->error, STATUS_CORRUPT,
                               "tokens \"%.*s\" and \"%.*s\" have the same id %u",
                               text_shown(bpe->texts[id]), (const char *)bpe->texts[id].data,
                               text_shown(text), key, id);
        }
        status = keep(loader, text, &bpe->texts[id]);
        if (status != STATUS_OK) {
            return status;
        }
        map_add(&bpe->vocabulary, text_hash(text), id);
        bpe->text_bytes_max = text.len > bpe->text_bytes_max ? text.len : bpe->text_bytes_max;
    }
    return STATUS_OK;
}

/* A merge is "left right" or ["left", "right"]. */
static bool read_merge(const json_t *merge, struct bytes *left, struct bytes *right) {
    if (json_is_array(merge)) {
        const json_t *first = json_array_get(merge, 0);
        const json_t *second = json_array_get(merge, 1);
        if (json_array_size(merge) != 2 || !json_is_string(first) || !json_is_string(second)) {
            return false;
        }
        *left = json_bytes(first);
        *right = json_bytes(second);
        return true;
    }
    if (!json_is_string(merge)) {
        return false;
    }
    struct bytes both = json_bytes(merge);
    const uint8_t *space = memchr(both.data, ' ', both.len);
    if (space == NULL) {
        return false;
    }
    *left = (struct bytes){both.data, (size_t)(space - both.data)};
    *right = (struct bytes){space + 1, both.len - left->len - 1};
    return memchr(right->data, ' ', right->len) == NULL;
}

static enum status load_merge(struct loader *loader, const json_t *json, uint32_t rank,
                              struct grow *joined) {
    struct bpe *bpe = &loader->tokenizer->bpe;
    struct bytes parts[3] = {0};
    if (!read_merge(json, &parts[0], &parts[1])) {
        return text_refuse(loader->error, STATUS_CORRUPT,
                           "merge %u is neither \"left right\" nor [\"left\", \"right\"]", rank);
    }
    joined->len = 0;
    if (grow_put(joined, parts[0].data, parts[0].len) != STATUS_OK ||
        grow_put(joined, parts[1].data, parts[1].len) != STATUS_OK) {
        return no_memory(loader);
    }
    parts[2] = grow_bytes(joined);
    uint32_t ids[3];
    for (size_t i = 0; i < 3; i++) {
        ids[i] = bpe_id(bpe, parts[i]);
        if (ids[i] == TOKEN_NONE) {
            return text_refuse(loader->error, STATUS_CORRUPT,
                               "merge %u needs the token \"%.*s\", which is not in the vocabulary",
                               rank, text_shown(parts[i]), (const char *)parts[i].data);
        }
    }
    uint64_t pair = (uint64_t)ids[0] << 32 | ids[1];
    uint32_t cursor = 0;
    if (map_next(&bpe->pairs, pair, &cursor) != UINT32_MAX) {
        return text_refuse(loader->error, STATUS_CORRUPT,
                           "merge %u (\"%.*s\" and \"%.*s\") stands in the list twice", rank,
                           text_shown(parts[0]), (const char *)parts[0].data, text_shown(parts[1]),
                           (const char *)parts[1].data);
    }
    map_add(&bpe->pairs, pair, rank);
    bpe->merges[rank] = (struct bpe_merge){ids[0], ids[1], ids[2]};
    return STATUS_OK;
}

static enum status load_merges(struct loader *loader, json_t *merges) {
    struct bpe *bpe = &loader->tokenizer->bpe;
    if (!json_is_array(merges)) {
        return text_refuse(loader->error, STATUS_CORRUPT, "the model has no list \"merges\"");
    }
    size_t count = json_array_size(merges);
    if (count > TOKENIZER_IDS_MAX) {
        return text_refuse(loader->error, STATUS_RANGE, "the model has more than %u merges",
                           TOKENIZER_IDS_MAX);
    }
    enum status status = make_map(loader, &bpe->pairs, &bpe->pairs_memory, count);
    if (status != STATUS_OK) {
        return status;
    }
    bpe->merges = calloc(count == 0 ? 1 : count, sizeof *bpe->merges);
    if (bpe->merges == NULL) {
        return no_memory(loader);
    }
    bpe->merge_count = (uint32_t)count;
    struct grow joined = {0};
    for (size_t i = 0; i < count && status == STATUS_OK; i++) {
        status = load_merge(loader, json_array_get(merges, i), (uint32_t)i, &joined);
    }
    grow_fini(&joined);
    return status;
}

/* Options of the model that change its ids and that nobody serves here. */
static enum status check_model(const struct loader *loader, json_t *model) {
    static const char *const keys[] = {"type",
                                       "dropout",
                                       "unk_token",
                                       "continuing_subword_prefix",
                                       "end_of_word_suffix",
                                       "fuse_unk",
                                       "byte_fallback",
                                       "ignore_merges",
                                       "vocab",
                                       "merges",
                                       NULL};
    enum status status = require_type(loader, model, "model", "BPE");
    if (status == STATUS_OK) {
        status = check_keys(loader, model, "the BPE model", keys);
    }
    if (status != STATUS_OK) {
        return status;
    }
    const json_t *dropout = json_object_get(model, "dropout");
    if (dropout != NULL && !json_is_null(dropout) &&
        !(json_is_number(dropout) && !(json_number_value(dropout) > 0.0))) {
        return text_refuse(loader->error, STATUS_UNSUPPORTED,
                           "the BPE model has a \"dropout\", which is not supported");
    }
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (size_t i = 0; i < 2; i++) {
        const json_t *affix = json_object_get(model, affixes[i]);
        if (affix != NULL && !json_is_null(affix) && !(json_string_length(affix) == 0)) {
            return text_refuse(loader->error, STATUS_UNSUPPORTED,
                               "the BPE model has a \"%s\", which is not supported", affixes[i]);
        }
    }
    return STATUS_OK;
}

static bool is_byte_level(const struct tokenizer *tokenizer) {
    return tokenizer->pre_count > 0 &&
           tokenizer->pres[tokenizer->pre_count - 1].kind == PRE_BYTE_LEVEL;
}

static struct bytes encode_code(uint32_t code, uint8_t memory[2]) {
    if (code < 0x80) {
        memory[0] = (uint8_t)code;
        return (struct bytes){memory, 1};
    }
    memory[0] = (uint8_t)(0xc0 | code >> 6);
    memory[1] = (uint8_t)(0x80 | (code & 0x3f));
    return (struct bytes){memory, 2};
}

/* The characters of a text need tokens to begin with. Byte-level vocabularies of real models lack a
 * few control bytes and bytes of rare scripts (SmolLM2: 0x04, ...), which the library then drops
 * without a word, and so do we; one that lacks printable ASCII is damaged. */
static enum status check_is_complete(struct loader *loader) {
    struct tokenizer *tokenizer = loader->tokenizer;
    struct bpe *bpe = &tokenizer->bpe;
    uint8_t memory[2];
    for (uint32_t code = 0; code < BPE_DIRECT_CODES; code++) {
        bpe->code_ids[code] = bpe_id(bpe, encode_code(code, memory));
    }
    if (is_byte_level(tokenizer)) {
        for (uint32_t byte = ' '; byte <= '~'; byte++) {
            if (bpe->code_ids[byte_level_code((uint8_t)byte)] == TOKEN_NONE) {
                return text_refuse(loader->error, STATUS_CORRUPT,
                                   "the byte-level vocabulary has no token for byte 0x%02X", byte);
            }
        }
        return STATUS_OK;
    }
    if (!bpe->has_byte_fallback) {
        return text_refuse(loader->error, STATUS_UNSUPPORTED,
                           "the BPE model has neither a ByteLevel pre-tokenizer nor "
                           "\"byte_fallback\", which is not supported");
    }
    for (uint32_t byte = 0; byte < 256; byte++) {
        char name[8];
        (void)snprintf(name, sizeof name, "<0x%02X>", byte);
        bpe->byte_ids[byte] = bpe_id(bpe, text_of(name));
        if (bpe->byte_ids[byte] == TOKEN_NONE) {
            return text_refuse(loader->error, STATUS_CORRUPT,
                               "the model has \"byte_fallback\" but no token %s", name);
        }
    }
    return STATUS_OK;
}

static enum status load_model(struct loader *loader, json_t *model) {
    struct bpe *bpe = &loader->tokenizer->bpe;
    enum status status = check_model(loader, model);
    if (status == STATUS_OK) {
        status = get_flag(loader, model, "the BPE model", "byte_fallback", false,
                          &bpe->has_byte_fallback);
    }
    if (status == STATUS_OK) {
        status =
            get_flag(loader, model, "the BPE model", "ignore_merges", false, &bpe->ignores_merges);
    }
    if (status == STATUS_OK) {
        status = load_vocabulary(loader, json_object_get(model, "vocab"));
    }
    if (status == STATUS_OK) {
        status = load_merges(loader, json_object_get(model, "merges"));
    }
    return status;
}

struct added_flags {
    bool is_special;
    bool is_normalized;
};

static enum status load_added_flags(const struct loader *loader, json_t *object,
                                    struct bytes content, struct added_flags *out) {
    static const char *const keys[] = {"id",     "content",    "single_word", "lstrip",
                                       "rstrip", "normalized", "special",     NULL};
    static const char *const refused[] = {"single_word", "lstrip", "rstrip"};
    static const char where[] = "an added token";
    enum status status = check_keys(loader, object, where, keys);
    for (size_t i = 0; i < 3 && status == STATUS_OK; i++) {
        bool is_set = false;
        status = get_flag(loader, object, where, refused[i], false, &is_set);
        if (status == STATUS_OK && is_set) {
            status = text_refuse(loader->error, STATUS_UNSUPPORTED,
                                 "the added token \"%.*s\" has \"%s\", which is not supported",
                                 text_shown(content), (const char *)content.data, refused[i]);
        }
    }
    if (status == STATUS_OK) {
        status = get_flag(loader, object, where, "special", false, &out->is_special);
    }
    if (status == STATUS_OK) {
        status =
            get_flag(loader, object, where, "normalized", !out->is_special, &out->is_normalized);
    }
    return status;
}

/* The two tries and their texts while the added tokens are read. */
struct added_lists {
    struct bytes *raw;
    uint32_t *raw_ids;
    size_t raw_count;
    struct bytes *normalized;
    uint32_t *normalized_ids;
    size_t normalized_count;
    struct grow scratch[3];
};

/* A normalized token is searched in normalized text, so its own text is normalized, too; and (since
 * tokenizers 0.23) that is also what decoding makes of it. */
static enum status put_normalized(struct loader *loader, struct added_lists *lists,
                                  struct bytes text, uint32_t id) {
    struct tokenizer *tokenizer = loader->tokenizer;
    struct bytes made = {0};
    enum status status =
        text_normalize(tokenizer->normals, tokenizer->normal_count, text, &lists->scratch[0],
                       &lists->scratch[1], &lists->scratch[2], &made);
    if (status != STATUS_OK) {
        return no_memory(loader);
    }
    if (made.len == 0 || made.len > NORMALIZED_BYTES_MAX) {
        return text_refuse(loader->error, STATUS_RANGE,
                           "the added token \"%.*s\" has %zu bytes once normalized, not 1 to %u",
                           text_shown(text), (const char *)text.data, made.len,
                           NORMALIZED_BYTES_MAX);
    }
    lists->normalized_ids[lists->normalized_count] = id;
    status = keep(loader, made, &lists->normalized[lists->normalized_count]);
    tokenizer->tokens[id].text = lists->normalized[lists->normalized_count++];
    return status;
}

static enum status load_added_token(struct loader *loader, json_t *object, size_t index,
                                    struct added_lists *lists) {
    struct tokenizer *tokenizer = loader->tokenizer;
    struct bytes content = {0};
    struct added_flags flags = {0};
    struct added_entry *entry = &tokenizer->added[tokenizer->added_count];
    char where[48];
    (void)snprintf(where, sizeof where, "added token number %zu", index);
    enum status status = get_text(loader, object, where, "content", &content);
    if (status != STATUS_OK) {
        return status;
    }
    if (content.len == 0 || content.len > TOKENIZER_ADDED_BYTES_MAX) {
        return text_refuse(loader->error, STATUS_RANGE, "%s has %zu bytes, not 1 to %u", where,
                           content.len, TOKENIZER_ADDED_BYTES_MAX);
    }
    status = load_id(loader, json_object_get(object, "id"), content, &entry->id);
    if (status == STATUS_OK) {
        status = load_added_flags(loader, object, content, &flags);
    }
    if (status == STATUS_OK) {
        status = keep(loader, content, &entry->text);
    }
    if (status != STATUS_OK) {
        return status;
    }
    const struct bpe *bpe = &tokenizer->bpe;
    uint32_t known = bpe_id(bpe, content);
    bool is_taken = known == TOKEN_NONE && entry->id < bpe->ids && bpe->texts[entry->id].len != 0;
    if ((known != TOKEN_NONE && known != entry->id) || is_taken) {
        return text_refuse(loader->error, STATUS_CORRUPT,
                           "the added token \"%.*s\" has id %u, against the vocabulary",
                           text_shown(content), (const char *)content.data, entry->id);
    }
    tokenizer->added_count++;
    struct decode_token *token = &tokenizer->tokens[entry->id];
    if (token->is_known) {
        return text_refuse(loader->error, STATUS_CORRUPT,
                           "two added tokens have the same id %u or the same text", entry->id);
    }
    *token = (struct decode_token){
        .text = entry->text, .is_known = true, .is_special = flags.is_special};
    if (flags.is_normalized) {
        return put_normalized(loader, lists, entry->text, entry->id);
    }
    lists->raw_ids[lists->raw_count] = entry->id;
    lists->raw[lists->raw_count++] = entry->text;
    return STATUS_OK;
}

static enum status build_tries(struct loader *loader, const struct added_lists *lists) {
    struct tokenizer *tokenizer = loader->tokenizer;
    enum status status = added_build(&tokenizer->raw, lists->raw, lists->raw_ids, lists->raw_count);
    if (status == STATUS_OK) {
        status = added_build(&tokenizer->normalized, lists->normalized, lists->normalized_ids,
                             lists->normalized_count);
    }
    switch (status) {
    case STATUS_OK: return STATUS_OK;
    case STATUS_EXISTS:
        return text_refuse(loader->error, STATUS_CORRUPT, "two added tokens have the same text");
    case STATUS_RANGE:
        return text_refuse(loader->error, STATUS_RANGE, "the added tokens are too long together");
    case STATUS_INVALID:
    case STATUS_NOT_FOUND:
    case STATUS_BUSY:
    case STATUS_UNAVAILABLE:
    case STATUS_TIMEOUT:
    case STATUS_CANCELLED:
    case STATUS_CORRUPT:
    case STATUS_UNSUPPORTED:
    case STATUS_IO:
    case STATUS_INTERNAL: break;
    }
    return no_memory(loader);
}

/* Sizes the table of all tokens: the vocabulary and the added tokens behind it. */
static enum status make_tokens(struct loader *loader, json_t *list) {
    struct tokenizer *tokenizer = loader->tokenizer;
    uint32_t size = tokenizer->bpe.ids;
    for (size_t i = 0; i < json_array_size(list); i++) {
        json_int_t id = json_integer_value(json_object_get(json_array_get(list, i), "id"));
        if (id >= (json_int_t)size && id < (json_int_t)TOKENIZER_IDS_MAX) {
            size = (uint32_t)id + 1;
        }
    }
    tokenizer->tokens = calloc(size, sizeof *tokenizer->tokens);
    tokenizer->added = calloc(json_array_size(list) + 1, sizeof *tokenizer->added);
    tokenizer->vocab_size = size;
    return tokenizer->tokens == NULL || tokenizer->added == NULL ? no_memory(loader) : STATUS_OK;
}

static enum status load_added(struct loader *loader, json_t *list) {
    if (list != NULL && !json_is_null(list) && !json_is_array(list)) {
        return text_refuse(loader->error, STATUS_CORRUPT, "\"added_tokens\" is not a list");
    }
    size_t count = json_array_size(list);
    if (count > TOKENIZER_IDS_MAX) {
        return text_refuse(loader->error, STATUS_RANGE, "there are more than %u added tokens",
                           TOKENIZER_IDS_MAX);
    }
    enum status status = make_tokens(loader, list);
    if (status != STATUS_OK) {
        return status;
    }
    struct added_lists lists = {
        .raw = calloc(count + 1, sizeof(struct bytes)),
        .raw_ids = calloc(count + 1, sizeof(uint32_t)),
        .normalized = calloc(count + 1, sizeof(struct bytes)),
        .normalized_ids = calloc(count + 1, sizeof(uint32_t)),
    };
    if (lists.raw == NULL || lists.raw_ids == NULL || lists.normalized == NULL ||
        lists.normalized_ids == NULL) {
        status = no_memory(loader);
    }
    for (size_t i = 0; i < count && status == STATUS_OK; i++) {
        status = load_added_token(loader, json_array_get(list, i), i, &lists);
    }
    if (status == STATUS_OK) {
        status = build_tries(loader, &lists);
    }
    free(lists.raw);
    free(lists.raw_ids);
    free(lists.normalized);
    free(lists.normalized_ids);
    for (size_t i = 0; i < 3; i++) {
        grow_fini(&lists.scratch[i]);
    }
    return status;
}

/* The ids that one {"SpecialToken": {"id": name}} of a template stands for. */
static enum status put_template_token(const struct loader *loader, json_t *special, json_t *table,
                                      uint32_t *ids, uint32_t *count) {
    struct bytes name = {0};
    enum status status = get_text(loader, special, "the template", "id", &name);
    if (status != STATUS_OK) {
        return status;
    }
    json_t *list =
        json_object_get(json_object_getn(table, (const char *)name.data, name.len), "ids");
    if (json_array_size(list) == 0) {
        return text_refuse(loader->error, STATUS_CORRUPT,
                           "the template uses \"%.*s\", which its \"special_tokens\" do not give",
                           text_shown(name), (const char *)name.data);
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        uint32_t id = 0;
        status = load_id(loader, json_array_get(list, i), name, &id);
        if (status != STATUS_OK) {
            return status;
        }
        if (id >= loader->tokenizer->vocab_size || !loader->tokenizer->tokens[id].is_known) {
            return text_refuse(loader->error, STATUS_CORRUPT,
                               "the template's token \"%.*s\" has id %u, which does not exist",
                               text_shown(name), (const char *)name.data, id);
        }
        if (*count == TOKENIZER_TEMPLATE_MAX) {
            return text_refuse(loader->error, STATUS_RANGE,
                               "the template has more than %d tokens on one side",
                               TOKENIZER_TEMPLATE_MAX);
        }
        ids[(*count)++] = id;
    }
    return STATUS_OK;
}

static enum status load_template(struct loader *loader, json_t *object) {
    static const char *const keys[] = {"type", "single", "pair", "special_tokens", NULL};
    struct tokenizer *tokenizer = loader->tokenizer;
    enum status status = check_keys(loader, object, "the template", keys);
    if (status != STATUS_OK) {
        return status;
    }
    json_t *single = json_object_get(object, "single");
    json_t *table = json_object_get(object, "special_tokens");
    size_t sequences = 0;
    for (size_t i = 0; i < json_array_size(single) && status == STATUS_OK; i++) {
        json_t *item = json_array_get(single, i);
        json_t *special = json_object_get(item, "SpecialToken");
        json_t *id = json_object_get(json_object_get(item, "Sequence"), "id");
        if (special != NULL && sequences == 0) {
            status = put_template_token(loader, special, table, tokenizer->prefix,
                                        &tokenizer->prefix_count);
        } else if (special != NULL) {
            status = put_template_token(loader, special, table, tokenizer->suffix,
                                        &tokenizer->suffix_count);
        } else if (json_is_string(id) && bytes_equal(json_bytes(id), text_of("A"))) {
            sequences++;
        } else {
            sequences = 2;
        }
    }
    if (status == STATUS_OK && sequences != 1) {
        return text_refuse(loader->error, STATUS_CORRUPT,
                           "the template's \"single\" does not have the sequence A exactly once");
    }
    return status;
}

static enum status load_post_processor(struct loader *loader, json_t *object) {
    struct steps steps;
    bool has_template = false;
    enum status status = get_steps(loader, object, "post-processor", "processors", &steps);
    for (size_t i = 0; i < steps.count && status == STATUS_OK; i++) {
        json_t *step = steps_at(&steps, i);
        if (is_type(step, "TemplateProcessing") && !has_template) {
            has_template = true;
            status = load_template(loader, step);
        } else if (is_type(step, "TemplateProcessing")) {
            status = text_refuse(loader->error, STATUS_UNSUPPORTED,
                                 "the post-processor has two templates, which is not supported");
        } else if (!is_type(step, "ByteLevel")) { /* that one changes offsets only */
            status = refuse_type(loader, step, "post-processor");
        }
    }
    return status;
}

/* The decoder: Replace..., ByteFallback, Fuse, Strip in this order, each optional, or ByteLevel. */
struct decoder_plan {
    struct normal replaces[TOKENIZER_STEPS_MAX];
    uint32_t replace_count;
    bool is_fused;
};

static enum status load_strip(struct loader *loader, json_t *step) {
    static const char *const keys[] = {"type", "content", "start", "stop", NULL};
    static const char where[] = "the Strip decoder";
    struct tokenizer *tokenizer = loader->tokenizer;
    struct bytes content = {0};
    enum status status = check_keys(loader, step, where, keys);
    if (status == STATUS_OK) {
        status = get_step_text(loader, step, where, "content", false, &content);
    }
    if (status != STATUS_OK) {
        return status;
    }
    json_t *start = json_object_get(step, "start");
    json_t *stop = json_object_get(step, "stop");
    if (content.len != utf8_len(content.data[0]) || !json_is_integer(start) ||
        !json_is_integer(stop) || json_integer_value(start) < 0 ||
        json_integer_value(start) > STRIP_COUNT_MAX || json_integer_value(stop) != 0) {
        return text_refuse(loader->error, STATUS_UNSUPPORTED,
                           "%s takes away something else than up to %d characters at the start, "
                           "which is not supported",
                           where, STRIP_COUNT_MAX);
    }
    tokenizer->strip = content;
    tokenizer->strip_count = (uint32_t)json_integer_value(start);
    return STATUS_OK;
}

/* One that makes texts longer could, repeated, make a small file fill the memory. */
static enum status load_decoder_replace(struct loader *loader, json_t *step,
                                        struct decoder_plan *plan) {
    struct normal *out = &plan->replaces[plan->replace_count++];
    enum status status = load_replace(loader, step, "the Replace decoder", out);
    if (status == STATUS_OK && out->to.len > out->from.len) {
        status = text_refuse(loader->error, STATUS_UNSUPPORTED,
                             "the Replace decoder makes texts longer, which is not supported");
    }
    return status;
}

static enum status load_decoder(struct loader *loader, json_t *object, struct decoder_plan *plan) {
    struct tokenizer *tokenizer = loader->tokenizer;
    struct steps steps;
    enum status status = get_steps(loader, object, "decoder", "decoders", &steps);
    if (status == STATUS_OK && steps.count == 0) {
        return text_refuse(loader->error, STATUS_UNSUPPORTED,
                           "there is no decoder (tokens joined by spaces), which is not supported");
    }
    static const char *const order[] = {"Replace", "ByteFallback", "Fuse", "Strip"};
    size_t stage = 0;
    for (size_t i = 0; i < steps.count && status == STATUS_OK; i++) {
        json_t *step = steps_at(&steps, i);
        if (is_type(step, "ByteLevel") && steps.count == 1) {
            tokenizer->is_byte_level_decoder = true;
            return STATUS_OK;
        }
        size_t kind = 0;
        while (kind < 4 && !is_type(step, order[kind])) {
            kind++;
        }
        if (kind == 4) {
            return refuse_type(loader, step, "decoder");
        }
        if (kind < stage ||
            (kind > 0 && kind == stage && i > 0 && is_type(steps_at(&steps, i - 1), order[kind]))) {
            return text_refuse(loader->error, STATUS_UNSUPPORTED,
                               "the decoder has %s out of the order Replace, ByteFallback, Fuse, "
                               "Strip, which is not supported",
                               order[kind]);
        }
        stage = kind;
        if (kind == 0) {
            status = load_decoder_replace(loader, step, plan);
        } else if (kind == 1) {
            tokenizer->has_byte_fallback_decoder = true;
        } else if (kind == 2) {
            plan->is_fused = true;
        } else if (!plan->is_fused) {
            status = text_refuse(loader->error, STATUS_UNSUPPORTED,
                                 "the decoder has Strip without Fuse before it, which is not "
                                 "supported");
        } else {
            status = load_strip(loader, step);
        }
    }
    return status;
}

static int hex_digit(uint8_t c) {
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    if (c >= 'A' && c <= 'F') {
        return c - 'A' + 10;
    }
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The byte of a token "<0xXX>", or -1. */
static int fallback_byte(struct bytes text) {
    if (text.len != 6 || memcmp(text.data, "<0x", 3) != 0 || text.data[5] != '>') {
        return -1;
    }
    int high = hex_digit(text.data[3]);
    int low = hex_digit(text.data[4]);
    return high < 0 || low < 0 ? -1 : high << 4 | low;
}

/* A byte-level token's bytes; one with a character outside the alphabet stands for itself. */
static enum status decode_alphabet(struct bytes text, struct grow *out) {
    out->len = 0;
    for (size_t i = 0; i < text.len; i += utf8_len(text.data[i])) {
        int byte = byte_level_byte(utf8_code(text.data + i));
        if (byte < 0) {
            out->len = 0;
            return grow_put(out, text.data, text.len);
        }
        uint8_t one = (uint8_t)byte;
        enum status status = grow_put(out, &one, 1);
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}

static enum status decode_one(struct loader *loader, const struct decoder_plan *plan,
                              struct decode_token *token, struct grow scratch[3]) {
    struct tokenizer *tokenizer = loader->tokenizer;
    struct bytes made = token->text;
    enum status status = STATUS_OK;
    if (tokenizer->is_byte_level_decoder) {
        status = decode_alphabet(token->text, &scratch[0]);
        made = grow_bytes(&scratch[0]);
    } else {
        status = text_normalize(plan->replaces, plan->replace_count, token->text, &scratch[0],
                                &scratch[1], &scratch[2], &made);
    }
    if (status != STATUS_OK) {
        return no_memory(loader);
    }
    int byte = tokenizer->has_byte_fallback_decoder ? fallback_byte(made) : -1;
    uint8_t one = (uint8_t)byte;
    if (byte >= 0) {
        made = (struct bytes){&one, 1};
        token->is_byte = true;
    }
    tokenizer->token_bytes_max =
        made.len > tokenizer->token_bytes_max ? made.len : tokenizer->token_bytes_max;
    return bytes_equal(made, token->text) ? STATUS_OK : keep(loader, made, &token->text);
}

/* Fills in what each token stands for, now that the decoder is known. */
static enum status decode_tokens(struct loader *loader, const struct decoder_plan *plan) {
    struct tokenizer *tokenizer = loader->tokenizer;
    struct grow scratch[3] = {{0}};
    enum status status = STATUS_OK;
    for (uint32_t id = 0; id < tokenizer->vocab_size && status == STATUS_OK; id++) {
        if (tokenizer->tokens[id].is_known) {
            status = decode_one(loader, plan, &tokenizer->tokens[id], scratch);
        }
    }
    for (size_t i = 0; i < 3; i++) {
        grow_fini(&scratch[i]);
    }
    return status;
}

static enum status check_file(const struct loader *loader, json_t *file) {
    static const char *const keys[] = {
        "version",       "truncation",     "padding", "added_tokens", "normalizer",
        "pre_tokenizer", "post_processor", "decoder", "model",        NULL};
    static const char *const refused[] = {"truncation", "padding"};
    if (!json_is_object(file)) {
        return text_refuse(loader->error, STATUS_CORRUPT, "tokenizer.json is not a JSON object");
    }
    enum status status = check_keys(loader, file, "tokenizer.json", keys);
    for (size_t i = 0; i < 2 && status == STATUS_OK; i++) {
        json_t *value = json_object_get(file, refused[i]);
        if (value != NULL && !json_is_null(value)) {
            status = text_refuse(loader->error, STATUS_UNSUPPORTED,
                                 "tokenizer.json sets \"%s\", which is not supported; set it to "
                                 "null",
                                 refused[i]);
        }
    }
    return status;
}

static enum status load_file(struct loader *loader, json_t *file) {
    struct tokenizer *tokenizer = loader->tokenizer;
    struct decoder_plan plan = {0};
    enum status status = check_file(loader, file);
    if (status == STATUS_OK) {
        status = load_model(loader, json_object_get(file, "model"));
    }
    if (status == STATUS_OK) {
        status = load_normalizer(loader, json_object_get(file, "normalizer"));
    }
    if (status == STATUS_OK) {
        status = load_pre_tokenizer(loader, json_object_get(file, "pre_tokenizer"));
    }
    if (status == STATUS_OK) {
        status = check_is_complete(loader);
    }
    if (status == STATUS_OK) {
        status = load_added(loader, json_object_get(file, "added_tokens"));
    }
    if (status != STATUS_OK) {
        return status;
    }
    for (uint32_t id = 0; id < tokenizer->bpe.ids; id++) {
        if (tokenizer->bpe.texts[id].len != 0 && !tokenizer->tokens[id].is_known) {
            tokenizer->tokens[id].text = tokenizer->bpe.texts[id];
            tokenizer->tokens[id].is_known = true;
        }
    }
    status = load_post_processor(loader, json_object_get(file, "post_processor"));
    if (status == STATUS_OK) {
        status = load_decoder(loader, json_object_get(file, "decoder"), &plan);
    }
    if (status == STATUS_OK) {
        status = decode_tokens(loader, &plan);
    }
    for (uint32_t i = 0; i < tokenizer->prefix_count && tokenizer->bos == TOKEN_NONE; i++) {
        tokenizer->bos = tokenizer->prefix[i];
    }
    for (uint32_t i = 0; i < tokenizer->suffix_count; i++) {
        tokenizer->eos = tokenizer->suffix[i];
    }
    return status;
}

static enum status parse(struct bytes text, const char *name, json_t **out, struct writer *error) {
    if (text.len > TOKENIZER_FILE_BYTES_MAX) {
        return text_refuse(error, STATUS_RANGE, "%s has more than %u bytes", name,
                           TOKENIZER_FILE_BYTES_MAX);
    }
    json_error_t where;
    *out = json_loadb((const char *)text.data, text.len, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL,
                      &where);
    if (*out == NULL) {
        return text_refuse(error, STATUS_CORRUPT, "%s: %s (line %d, column %d)", name, where.text,
                           where.line, where.column);
    }
    return STATUS_OK;
}

/* bos_token or eos_token of a tokenizer_config.json: null, "text" or {"content": "text"}. */
static enum status load_named(struct loader *loader, json_t *config, const char *key,
                              uint32_t *out) {
    json_t *value = json_object_get(config, key);
    if (json_is_object(value)) {
        value = json_object_get(value, "content");
    }
    if (value == NULL || json_is_null(value)) {
        return STATUS_OK;
    }
    if (!json_is_string(value)) {
        return text_refuse(loader->error, STATUS_CORRUPT,
                           "tokenizer_config.json: \"%s\" is not a token", key);
    }
    struct bytes text = json_bytes(value);
    uint32_t id = tokenizer_added_id(loader->tokenizer, text);
    if (id == TOKEN_NONE) {
        id = bpe_id(&loader->tokenizer->bpe, text);
    }
    if (id == TOKEN_NONE) {
        return text_refuse(loader->error, STATUS_CORRUPT,
                           "tokenizer_config.json: the %s \"%.*s\" is not a token of "
                           "tokenizer.json",
                           key, text_shown(text), (const char *)text.data);
    }
    *out = id;
    return STATUS_OK;
}

static enum status load_config(struct loader *loader, struct bytes text) {
    json_t *config = NULL;
    enum status status = parse(text, "tokenizer_config.json", &config, loader->error);
    if (status == STATUS_OK) {
        status = load_named(loader, config, "bos_token", &loader->tokenizer->bos);
    }
    if (status == STATUS_OK) {
        status = load_named(loader, config, "eos_token", &loader->tokenizer->eos);
    }
    json_decref(config);
    return status;
}

/* config: empty for none. */
static enum status create(struct bytes tokenizer_json, struct bytes config, struct tokenizer **out,
                          struct writer *error) {
    struct loader loader = {.error = error};
    json_t *file = NULL;
    enum status status = parse(tokenizer_json, "tokenizer.json", &file, error);
    if (status != STATUS_OK) {
        return status;
    }
    loader.tokenizer = calloc(1, sizeof *loader.tokenizer);
    if (loader.tokenizer == NULL) {
        json_decref(file);
        return no_memory(&loader);
    }
    loader.tokenizer->bos = TOKEN_NONE;
    loader.tokenizer->eos = TOKEN_NONE;
    status = load_file(&loader, file);
    json_decref(file);
    if (status == STATUS_OK && config.len > 0) {
        status = load_config(&loader, config);
    }
    if (status != STATUS_OK) {
        tokenizer_destroy(loader.tokenizer);
        return status;
    }
    *out = loader.tokenizer;
    return STATUS_OK;
}

enum status tokenizer_create(struct bytes tokenizer_json, struct tokenizer **out,
                             struct writer *error) {
    struct bytes none = {0};
    return create(tokenizer_json, none, out, error);
}

/* Reads a whole file; *out->len stays 0 for an empty one. */
static enum status read_file(const char *path, struct grow *out, struct writer *error) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        enum status status = errno == ENOENT || errno == ENOTDIR ? STATUS_NOT_FOUND : STATUS_IO;
        return text_refuse(error, status, "cannot open %s: %s", path, strerror(errno));
    }
    enum status status = STATUS_OK;
    size_t got = 1;
    while (got > 0 && out->len <= TOKENIZER_FILE_BYTES_MAX && status == STATUS_OK) {
        status = grow_reserve(out, 65536);
        if (status == STATUS_OK) {
            got = fread(out->data + out->len, 1, 65536, file);
            out->len += got;
        }
    }
    if (status != STATUS_OK) {
        status = text_refuse(error, status, "no memory to read %s", path);
    } else if (ferror(file) != 0) {
        status = text_refuse(error, STATUS_IO, "cannot read %s: %s", path, strerror(errno));
    }
    (void)fclose(file); /* only read from */
    return status;
}

enum status tokenizer_open(const char *path, struct tokenizer **out, struct writer *error) {
    char file[PATH_BYTES_MAX];
    char config[PATH_BYTES_MAX];
    struct stat about;
    bool is_directory = stat(path, &about) == 0 && S_ISDIR(about.st_mode);
    const char *slash = strrchr(path, '/');
    int folder = is_directory ? (int)strlen(path) : slash == NULL ? 0 : (int)(slash - path);
    const char *between = folder > 0 || slash == path || is_directory ? "/" : "";
    int file_len = is_directory ? snprintf(file, sizeof file, "%s/tokenizer.json", path)
                                : snprintf(file, sizeof file, "%s", path);
    int config_len =
        snprintf(config, sizeof config, "%.*s%stokenizer_config.json", folder, path, between);
    if (file_len < 0 || file_len >= PATH_BYTES_MAX || config_len < 0 ||
        config_len >= PATH_BYTES_MAX) {
        return text_refuse(error, STATUS_RANGE, "the path of the tokenizer is too long");
    }
    struct grow text = {0};
    struct grow config_text = {0};
    enum status status = read_file(file, &text, error);
    if (status == STATUS_OK) {
        enum status found = read_file(config, &config_text, NULL);
        if (found != STATUS_OK && found != STATUS_NOT_FOUND) {
            status = text_refuse(error, found, "cannot read %s", config);
        }
    }
    if (status == STATUS_OK) {
        status = create(grow_bytes(&text), grow_bytes(&config_text), out, error);
    }
    grow_fini(&text);
    grow_fini(&config_text);
    return status;
}
