#include "engine/config.h"

#include "engine/fail.h"
#include "engine/json_file.h"

#include <math.h>
#include <string.h>

#include <jansson.h>

#define CONFIG_MAX (1u << 20)

/* What is being read, so that messages name the file. */
struct reader {
    json_t *object;
    const char *file;
    struct writer *error;
};

static json_t *get(const struct reader *reader, const char *key) {
    json_t *value = json_object_get(reader->object, key);
    return json_is_null(value) ? NULL : value;
}

/* A whole number in [low, high]; an absent one keeps *out if is_optional. */
static enum status read_count(const struct reader *reader, const char *key, bool is_optional,
                              uint32_t low, uint32_t high, uint32_t *out) {
    json_t *value = get(reader, key);
    if (value == NULL) {
        return is_optional
                   ? STATUS_OK
                   : fail(reader->error, STATUS_INVALID, "%s: %s is missing", reader->file, key);
    }
    json_int_t number = json_integer_value(value);
    if (!json_is_integer(value) || number < low || number > high) {
        return fail(reader->error, STATUS_INVALID, "%s: %s must be a whole number from %u to %u",
                    reader->file, key, low, high);
    }
    *out = (uint32_t)number;
    return STATUS_OK;
}

/* A finite number in [low, high]; an absent one keeps *out. */
static enum status read_number(const struct reader *reader, const char *key, double low,
                               double high, double *out) {
    json_t *value = get(reader, key);
    if (value == NULL) {
        return STATUS_OK;
    }
    double number = json_number_value(value);
    if (!json_is_number(value) || !(number >= low && number <= high)) {
        return fail(reader->error, STATUS_INVALID, "%s: %s must be a number from %g to %g",
                    reader->file, key, low, high);
    }
    *out = number;
    return STATUS_OK;
}

static enum status read_bool(const struct reader *reader, const char *key, bool *out) {
    json_t *value = get(reader, key);
    if (value == NULL) {
        return STATUS_OK;
    }
    if (!json_is_boolean(value)) {
        return fail(reader->error, STATUS_INVALID, "%s: %s must be true or false", reader->file,
                    key);
    }
    *out = json_is_true(value);
    return STATUS_OK;
}

/* A text that must be the one value served; absent is fine. */
static enum status require_text(const struct reader *reader, const char *key, const char *wanted) {
    json_t *value = get(reader, key);
    if (value == NULL) {
        return STATUS_OK;
    }
    if (!json_is_string(value) || strcmp(json_string_value(value), wanted) != 0) {
        return fail(reader->error, STATUS_UNSUPPORTED,
                    "%s: %s \"%s\" is not served, only \"%s\" is", reader->file, key,
                    json_is_string(value) ? fail_text(json_string_value(value)).text : "?", wanted);
    }
    return STATUS_OK;
}

static enum status refuse_true(const struct reader *reader, const char *key) {
    bool is_on = false;
    enum status status = read_bool(reader, key, &is_on);
    if (status == STATUS_OK && is_on) {
        return fail(reader->error, STATUS_UNSUPPORTED, "%s: %s true is not served", reader->file,
                    key);
    }
    return status;
}

/* What an architecture is, as data: all of them are decoders with grouped-query attention, rotary
 * positions, RMS norms and a gated feed-forward layer. */
static const struct architecture {
    const char *name;
    const char *model_type;
    uint32_t head_dim; /* where the file does not say; 0: hidden_size / num_attention_heads */
    bool has_qkv_bias;
    bool has_qk_norm;
} architectures[] = {
    {"LlamaForCausalLM", "llama", 0, false, false},
    {"Qwen2ForCausalLM", "qwen2", 0, true, false},
    {"Qwen3ForCausalLM", "qwen3", 128, false, true},
};
#define ARCHITECTURES (sizeof(architectures) / sizeof(architectures[0]))

/* Sliding windows, by any of the keys that say so, would change what is computed. */
static enum status refuse_windows(const struct reader *reader) {
    enum status status = refuse_true(reader, "use_sliding_window");
    json_t *types = get(reader, "layer_types");
    if (status != STATUS_OK || types == NULL) {
        return status;
    }
    if (!json_is_array(types)) {
        return fail(reader->error, STATUS_INVALID, "%s: layer_types must be a list", reader->file);
    }
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *type = json_string_value(json_array_get(types, i));
        if (type == NULL || strcmp(type, "full_attention") != 0) {
            return fail(reader->error, STATUS_UNSUPPORTED,
                        "%s: layer_types has \"%s\", only \"full_attention\" is served",
                        reader->file, type == NULL ? "?" : fail_text(type).text);
        }
    }
    return STATUS_OK;
}

static enum status read_architecture(const struct reader *reader, struct model_config *config) {
    json_t *list = get(reader, "architectures");
    const char *name = architectures[0].name; /* old files give the model_type alone */
    if (list != NULL) {
        name = json_string_value(json_array_get(list, 0));
        if (name == NULL || json_array_size(list) != 1) {
            return fail(reader->error, STATUS_INVALID,
                        "%s: architectures must be a list of one name", reader->file);
        }
    } else if (get(reader, "model_type") == NULL) {
        return fail(reader->error, STATUS_INVALID,
                    "%s: neither architectures nor model_type is there", reader->file);
    }
    const struct architecture *found = NULL;
    for (size_t i = 0; i < ARCHITECTURES; i++) {
        found = strcmp(architectures[i].name, name) == 0 ? &architectures[i] : found;
    }
    if (found == NULL) {
        return fail(reader->error, STATUS_UNSUPPORTED,
                    "%s: the architecture \"%s\" is not served, only LlamaForCausalLM, "
                    "Qwen2ForCausalLM and Qwen3ForCausalLM are",
                    reader->file, fail_text(name).text);
    }
    text_copy(config->architecture, sizeof(config->architecture), name);
    config->has_qkv_bias = found->has_qkv_bias;
    config->has_qk_norm = found->has_qk_norm;
    config->head_dim = found->head_dim;
    enum status status = require_text(reader, "model_type", found->model_type);
    return status == STATUS_OK ? refuse_windows(reader) : status;
}

/* rope_scaling (or rope_parameters, its newer name): null, "default" or "llama3". */
static enum status read_rope(const struct reader *reader, struct model_config *config) {
    enum status status = read_number(reader, "rope_theta", 1.0, 1e12, &config->rope_theta);
    static const char *const keys[] = {"rope_scaling", "rope_parameters"};
    for (size_t i = 0; status == STATUS_OK && i < 2; i++) {
        json_t *object = get(reader, keys[i]);
        if (object == NULL) {
            continue;
        }
        struct reader inner = {.object = object, .file = reader->file, .error = reader->error};
        json_t *type = get(&inner, "rope_type");
        type = type != NULL ? type : get(&inner, "type");
        if (!json_is_object(object) || !json_is_string(type)) {
            return fail(reader->error, STATUS_INVALID, "%s: %s needs a rope_type", reader->file,
                        keys[i]);
        }
        status = read_number(&inner, "rope_theta", 1.0, 1e12, &config->rope_theta);
        if (status != STATUS_OK || strcmp(json_string_value(type), "default") == 0) {
            continue;
        }
        if (strcmp(json_string_value(type), "llama3") != 0) {
            return fail(reader->error, STATUS_UNSUPPORTED,
                        "%s: %s of type \"%s\" is not served, only \"llama3\" and null are",
                        reader->file, keys[i], fail_text(json_string_value(type)).text);
        }
        struct config_rope_llama3 *llama3 = &config->rope_llama3;
        llama3->is_on = true;
        struct {
            const char *key;
            double *to;
        } parts[] = {{"factor", &llama3->factor},
                     {"low_freq_factor", &llama3->low_freq_factor},
                     {"high_freq_factor", &llama3->high_freq_factor},
                     {"original_max_position_embeddings", &llama3->original_tokens}};
        for (size_t p = 0; status == STATUS_OK && p < 4; p++) {
            if (get(&inner, parts[p].key) == NULL) {
                return fail(reader->error, STATUS_INVALID, "%s: %s of type llama3 needs %s",
                            reader->file, keys[i], parts[p].key);
            }
            status = read_number(&inner, parts[p].key, 1e-3, 1e9, parts[p].to);
        }
        if (status == STATUS_OK && llama3->high_freq_factor <= llama3->low_freq_factor) {
            return fail(reader->error, STATUS_INVALID,
                        "%s: %s: high_freq_factor must be above low_freq_factor", reader->file,
                        keys[i]);
        }
    }
    return status;
}

static enum status read_shape(const struct reader *reader, struct model_config *config) {
    static const uint32_t context_max = 1u << 24;
    struct {
        const char *key;
        uint32_t high;
        uint32_t *to;
    } counts[] = {{"hidden_size", 1u << 16, &config->hidden},
                  {"intermediate_size", 1u << 20, &config->ffn},
                  {"num_hidden_layers", LAYOUT_COMPONENTS_MAX / 2, &config->layers},
                  {"num_attention_heads", 1u << 10, &config->heads},
                  {"vocab_size", 1u << 22, &config->vocab},
                  {"max_position_embeddings", context_max, &config->context_tokens}};
    enum status status = STATUS_OK;
    for (size_t i = 0; status == STATUS_OK && i < sizeof(counts) / sizeof(counts[0]); i++) {
        status = read_count(reader, counts[i].key, false, 1, counts[i].high, counts[i].to);
    }
    if (status != STATUS_OK) {
        return status;
    }
    config->kv_heads = config->heads;
    status = read_count(reader, "num_key_value_heads", true, 1, 1u << 10, &config->kv_heads);
    if (status != STATUS_OK) {
        return status;
    }
    if (config->heads % config->kv_heads != 0) {
        return fail(reader->error, STATUS_INVALID,
                    "%s: num_attention_heads %u is not a multiple of num_key_value_heads %u",
                    reader->file, config->heads, config->kv_heads);
    }
    bool is_derived = config->head_dim == 0 && get(reader, "head_dim") == NULL;
    if (is_derived && config->hidden % config->heads != 0) {
        return fail(reader->error, STATUS_INVALID,
                    "%s: without head_dim, hidden_size %u must be a multiple of "
                    "num_attention_heads %u",
                    reader->file, config->hidden, config->heads);
    }
    if (config->head_dim == 0) {
        config->head_dim = config->hidden / config->heads;
    }
    status = read_count(reader, "head_dim", true, 1, CONFIG_HEAD_DIM_MAX, &config->head_dim);
    if (status == STATUS_OK && (config->head_dim % 2 != 0 ||
                                config->head_dim > CONFIG_HEAD_DIM_MAX || config->head_dim == 0)) {
        return fail(reader->error, STATUS_INVALID,
                    "%s: the head dimension is %u, but must be even and at most %u", reader->file,
                    config->head_dim, CONFIG_HEAD_DIM_MAX);
    }
    return status;
}

static enum status read_token(const struct reader *reader, const char *key, json_t *value,
                              uint32_t vocab, uint32_t *out) {
    json_int_t number = json_integer_value(value);
    if (!json_is_integer(value) || number < 0 || number >= vocab) {
        return fail(reader->error, STATUS_INVALID,
                    "%s: %s must be a token id below the vocabulary's %u", reader->file, key,
                    vocab);
    }
    *out = (uint32_t)number;
    return STATUS_OK;
}

/* bos_token_id, eos_token_id (one id or a list); what is absent keeps what was read before. */
static enum status read_special(const struct reader *reader, struct model_config *config) {
    json_t *bos = get(reader, "bos_token_id");
    if (bos != NULL) {
        enum status status =
            read_token(reader, "bos_token_id", bos, config->vocab, &config->bos_token);
        if (status != STATUS_OK) {
            return status;
        }
        config->has_bos = true;
    }
    json_t *eos = get(reader, "eos_token_id");
    if (eos == NULL) {
        return STATUS_OK;
    }
    size_t count = json_is_array(eos) ? json_array_size(eos) : 1;
    if (count > MODEL_EOS_MAX) {
        return fail(reader->error, STATUS_UNSUPPORTED, "%s: %zu eos_token_ids, at most %u work",
                    reader->file, count, MODEL_EOS_MAX);
    }
    for (size_t i = 0; i < count; i++) {
        json_t *value = json_is_array(eos) ? json_array_get(eos, i) : eos;
        enum status status =
            read_token(reader, "eos_token_id", value, config->vocab, &config->eos_tokens[i]);
        if (status != STATUS_OK) {
            return status;
        }
    }
    config->eos_count = (uint32_t)count;
    return STATUS_OK;
}

static enum status read_main(const struct reader *reader, struct model_config *config) {
    enum status status = read_architecture(reader, config);
    if (status == STATUS_OK && get(reader, "quantization_config") != NULL) {
        status = fail(reader->error, STATUS_UNSUPPORTED,
                      "%s: quantization_config is there: quantised weights are not served",
                      reader->file);
    }
    if (status == STATUS_OK) {
        status = refuse_true(reader, "attention_bias");
    }
    if (status == STATUS_OK) {
        status = refuse_true(reader, "mlp_bias");
    }
    if (status == STATUS_OK) {
        status = require_text(reader, "hidden_act", "silu");
    }
    if (status == STATUS_OK) {
        status = read_shape(reader, config);
    }
    if (status == STATUS_OK) {
        status = read_rope(reader, config);
    }
    double epsilon = 1e-6;
    if (status == STATUS_OK) {
        status = read_number(reader, "rms_norm_eps", 0.0, 1.0, &epsilon);
    }
    config->norm_epsilon = (float)epsilon;
    if (status == STATUS_OK) {
        status = read_bool(reader, "tie_word_embeddings", &config->is_tied);
    }
    if (status == STATUS_OK) {
        status = read_special(reader, config);
    }
    return status;
}

static enum status read_generation(const struct reader *reader, struct model_config *config) {
    enum status status = read_special(reader, config);
    bool is_sampled = true;
    double temperature = 1;
    double top_p = 1;
    double min_p = 0;
    double repetition_penalty = 1;
    uint32_t top_k = 0;
    if (status == STATUS_OK) {
        status = read_bool(reader, "do_sample", &is_sampled);
    }
    if (status == STATUS_OK) {
        status = read_number(reader, "temperature", 0, 100, &temperature);
    }
    if (status == STATUS_OK) {
        status = read_number(reader, "top_p", 1e-6, 1, &top_p);
    }
    if (status == STATUS_OK) {
        status = read_number(reader, "min_p", 0, 1, &min_p);
    }
    if (status == STATUS_OK) {
        status = read_number(reader, "repetition_penalty", 1e-3, 1e3, &repetition_penalty);
    }
    if (status == STATUS_OK) {
        status = read_count(reader, "top_k", true, 0, INT32_MAX, &top_k);
    }
    if (status == STATUS_OK) {
        config->defaults =
            (struct model_defaults){.temperature = is_sampled ? (float)temperature : 0.0f,
                                    .top_p = (float)top_p,
                                    .min_p = (float)min_p,
                                    .top_k = top_k == 0 ? -1 : (int32_t)top_k,
                                    .repetition_penalty = (float)repetition_penalty};
    }
    return status;
}

enum status config_read(const char *directory, struct writer *error,
                        struct model_config *config_out) {
    struct model_config config = {
        .rope_theta = 10000.0,
        .defaults = {.temperature = 1, .top_p = 1, .top_k = -1, .repetition_penalty = 1}};
    struct reader reader = {.file = "config.json", .error = error};
    enum status status = json_file_read(directory, reader.file, CONFIG_MAX, &reader.object, error);
    if (status == STATUS_NOT_FOUND) {
        return fail(error, status, "%s: there is no config.json (is this a model directory?)",
                    fail_text(directory).text);
    }
    if (status != STATUS_OK) {
        return status;
    }
    status = read_main(&reader, &config);
    json_decref(reader.object);
    if (status != STATUS_OK) {
        return status;
    }
    reader = (struct reader){.file = "generation_config.json", .error = error};
    status = json_file_read(directory, reader.file, CONFIG_MAX, &reader.object, error);
    if (status == STATUS_NOT_FOUND) { /* optional */
        *config_out = config;
        return STATUS_OK;
    }
    if (status != STATUS_OK) {
        return status;
    }
    status = read_generation(&reader, &config);
    json_decref(reader.object);
    if (status == STATUS_OK) {
        *config_out = config;
    }
    return status;
}
