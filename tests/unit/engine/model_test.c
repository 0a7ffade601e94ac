/* Opening model directories: good ones in every dtype and cut, and everything that must be refused
 * with a sentence and without a crash. Directories are made on the fly, tiny and exact. */
#include "engine/model.h"

#include "base/prng.h"
#include "engine/model_weights.h"
#include "kernels/kernels.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

/* ---- a directory under construction ---- */

struct builder {
    char directory[64];
    json_t *config;
    json_t *header; /* of model.safetensors */
    unsigned char *data;
    size_t data_bytes;
};

static void write_file(const struct builder *b, const char *name, const void *data, size_t len) {
    char path[256];
    (void)snprintf(path, sizeof(path), "%s/%s", b->directory, name);
    FILE *file = fopen(path, "wbe");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, len, file), len);
    assert_int_equal(fclose(file), 0);
}
static void write_text(const struct builder *b, const char *name, const char *text) {
    write_file(b, name, text, strlen(text));
}

static void add_tensor(struct builder *b, const char *name, const char *dtype, size_t size,
                       int rows, int cols) {
    size_t count = (size_t)rows * (size_t)(cols == 0 ? 1 : cols);
    json_t *shape = cols == 0 ? json_pack("[i]", rows) : json_pack("[ii]", rows, cols);
    json_t *entry =
        json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype, "shape", shape, "data_offsets",
                  (json_int_t)b->data_bytes, (json_int_t)(b->data_bytes + count * size));
    assert_int_equal(json_object_set_new(b->header, name, entry), 0);
    b->data = realloc(b->data, b->data_bytes + count * size);
    assert_non_null(b->data);
    for (size_t i = 0; i < count; i++) { /* small whole numbers are exact in every dtype */
        float value = (float)((i * 7 + b->data_bytes) % 16) - 8.0f;
        uint32_t bits;
        memcpy(&bits, &value, 4);
        uint16_t half = (uint16_t)(bits >> 16);
        if (strcmp(dtype, "F16") == 0 && value != 0.0f) {
            half = (uint16_t)((bits >> 16 & 0x8000u) | (((bits >> 23 & 0xffu) - 112) << 10) |
                              (bits >> 13 & 0x3ffu));
        }
        memcpy(b->data + b->data_bytes + i * size, size == 4 ? (void *)&bits : (void *)&half, size);
    }
    b->data_bytes += count * size;
}

/* hidden 4, 2 heads of 2, 1 KV head, ffn 6, vocabulary 10, 1 layer. */
static void builder_init(struct builder *b, const char *dtype, bool is_tied) {
    memset(b, 0, sizeof(*b));
    (void)snprintf(b->directory, sizeof(b->directory), "/tmp/baton-model-XXXXXX");
    assert_non_null(mkdtemp(b->directory));
    b->config = json_pack("{s:[s], s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:b, s:[ii], s:i}",
                          "architectures", "LlamaForCausalLM", "model_type", "llama", "hidden_size",
                          4, "intermediate_size", 6, "num_hidden_layers", 1, "num_attention_heads",
                          2, "num_key_value_heads", 1, "vocab_size", 10, "max_position_embeddings",
                          32, "rms_norm_eps", 1e-5, "tie_word_embeddings", (int)is_tied,
                          "eos_token_id", 2, 3, "bos_token_id", 1);
    assert_non_null(b->config);
    b->header = json_object();
    size_t size = strcmp(dtype, "F32") == 0 ? 4 : 2;
    add_tensor(b, "model.embed_tokens.weight", dtype, size, 10, 4);
    add_tensor(b, "model.layers.0.input_layernorm.weight", dtype, size, 4, 0);
    add_tensor(b, "model.layers.0.mlp.down_proj.weight", dtype, size, 4, 6);
    add_tensor(b, "model.layers.0.mlp.gate_proj.weight", dtype, size, 6, 4);
    add_tensor(b, "model.layers.0.mlp.up_proj.weight", dtype, size, 6, 4);
    add_tensor(b, "model.layers.0.post_attention_layernorm.weight", dtype, size, 4, 0);
    add_tensor(b, "model.layers.0.self_attn.k_proj.weight", dtype, size, 2, 4);
    add_tensor(b, "model.layers.0.self_attn.o_proj.weight", dtype, size, 4, 4);
    add_tensor(b, "model.layers.0.self_attn.q_proj.weight", dtype, size, 4, 4);
    add_tensor(b, "model.layers.0.self_attn.v_proj.weight", dtype, size, 2, 4);
    add_tensor(b, "model.norm.weight", dtype, size, 4, 0);
    if (!is_tied) {
        add_tensor(b, "lm_head.weight", dtype, size, 10, 4);
    }
}

static void write_safetensors(const struct builder *b, const char *name, const char *header,
                              size_t header_len, uint64_t claimed, const unsigned char *data,
                              size_t data_bytes) {
    unsigned char *file = malloc(8 + header_len + data_bytes + 1);
    assert_non_null(file);
    for (int i = 0; i < 8; i++) {
        file[i] = (unsigned char)(claimed >> (8 * i));
    }
    memcpy(file + 8, header, header_len);
    memcpy(file + 8 + header_len, data, data_bytes);
    write_file(b, name, file, 8 + header_len + data_bytes);
    free(file);
}

static void builder_write(struct builder *b) {
    char *config = json_dumps(b->config, 0);
    char *header = json_dumps(b->header, JSON_COMPACT);
    assert_true(config != NULL && header != NULL);
    write_text(b, "config.json", config);
    write_safetensors(b, "model.safetensors", header, strlen(header), strlen(header), b->data,
                      b->data_bytes);
    free(config);
    free(header);
}

static void builder_fini(struct builder *b) {
    DIR *directory = opendir(b->directory);
    assert_non_null(directory);
    struct dirent *entry;
    while ((entry = readdir(directory)) != NULL) {
        char path[512];
        (void)snprintf(path, sizeof(path), "%s/%s", b->directory, entry->d_name);
        if (entry->d_name[0] != '.') {
            assert_int_equal(unlink(path), 0);
        }
    }
    assert_int_equal(closedir(directory), 0);
    assert_int_equal(rmdir(b->directory), 0);
    json_decref(b->config);
    json_decref(b->header);
    free(b->data);
}

static struct model *open_good(const struct builder *b) {
    char text[512];
    struct writer error;
    struct model *model = NULL;
    writer_init(&error, text, sizeof(text));
    if (model_create(b->directory, kernels_select(NULL), MODEL_WEIGHTS_FILE, &error, &model) !=
        STATUS_OK) {
        fail_msg("%.*s", (int)error.len, text);
    }
    return model;
}

/* The model must be refused with this status and a sentence that holds `part`. */
static void expect_refusal_as(const struct builder *b, enum model_weights weights,
                              enum status status, const char *part) {
    char text[513];
    struct writer error;
    struct model *model = NULL;
    writer_init(&error, text, sizeof(text) - 1);
    enum status found = model_create(b->directory, kernels_select("c"), weights, &error, &model);
    text[error.len] = '\0';
    if (found != status || strstr(text, part) == NULL) {
        fail_msg("wanted %s and \"%s\", got %s: %s", status_name(status), part, status_name(found),
                 text);
    }
    assert_null(model);
}

static void expect_refusal(const struct builder *b, enum status status, const char *part) {
    expect_refusal_as(b, MODEL_WEIGHTS_FILE, status, part);
}

static void set(json_t *object, const char *key, json_t *value) {
    assert_int_equal(json_object_set_new(object, key, value), 0);
}

/* ---- good models ---- */

static void test_a_model_tells_what_it_is(void **state) {
    (void)state;
    struct builder b;
    builder_init(&b, "F32", false);
    builder_write(&b);
    write_text(&b, "generation_config.json",
               "{\"eos_token_id\": 5, \"temperature\": 0.6, \"top_p\": 0.9, \"top_k\": 50, "
               "\"do_sample\": true}");
    struct model *model = open_good(&b);
    const struct model_info *info = model_info(model);
    assert_string_equal(info->name, b.directory + 5);
    assert_string_equal(info->architecture, "LlamaForCausalLM");
    char numerics[32];
    (void)snprintf(numerics, sizeof(numerics), "f32/%s/%u", kernels_select(NULL)->numerics,
                   KERNELS_VERSION);
    assert_string_equal(info->numerics, numerics);
    assert_int_equal(info->vocab_count, 10);
    assert_int_equal(info->context_tokens, 32);
    assert_int_equal(info->layer_count, 1);
    assert_int_equal(info->head_dim, 2);
    assert_int_equal(info->kv_dtype, KV_DTYPE_F32);
    assert_int_equal(info->parameter_count, b.data_bytes / 4);
    assert_true(info->has_bos);
    assert_int_equal(info->bos_token, 1);
    assert_int_equal(info->eos_count, 1); /* generation_config.json goes before config.json */
    assert_int_equal(info->eos_tokens[0], 5);
    assert_true(info->defaults.temperature == 0.6f && info->defaults.top_p == 0.9f);
    assert_int_equal(info->defaults.top_k, 50);
    struct kv_layout *layout = malloc(sizeof(*layout));
    assert_non_null(layout);
    assert_int_equal(model_layout(model, 16, layout), STATUS_OK);
    assert_int_equal(layout->component_count, 2);
    assert_int_equal(layout->components[0].row_bytes, 8);
    assert_string_equal(layout->components[1].name, "v");
    assert_int_not_equal(model_layout(model, 0, layout), STATUS_OK);
    free(layout);
    model_destroy(model);
    builder_fini(&b);
}

static void test_defaults_are_neutral_where_nothing_is_said(void **state) {
    (void)state;
    struct builder b;
    builder_init(&b, "F32", true);
    json_object_del(b.config, "bos_token_id");
    set(b.config, "eos_token_id", json_null());
    set(b.config, "head_dim", json_null());
    set(b.config, "rope_scaling", json_null());
    builder_write(&b);
    struct model *model = open_good(&b);
    const struct model_info *info = model_info(model);
    assert_false(info->has_bos);
    assert_int_equal(info->eos_count, 0);
    assert_true(info->defaults.temperature == 1 && info->defaults.top_p == 1 &&
                info->defaults.min_p == 0 && info->defaults.repetition_penalty == 1);
    assert_int_equal(info->defaults.top_k, -1);
    assert_true(model->config.rope_theta == 10000.0);
    model_destroy(model);
    write_text(&b, "generation_config.json", "{\"do_sample\": false, \"temperature\": 0.6}");
    model = open_good(&b);
    assert_true(model_info(model)->defaults.temperature == 0);
    model_destroy(model);
    builder_fini(&b);
}

static void test_all_three_dtypes_hold_the_same_weights(void **state) {
    (void)state;
    static const char *const dtypes[] = {"F32", "F16", "BF16"};
    float first[10 * 4];
    for (int i = 0; i < 3; i++) {
        struct builder b;
        builder_init(&b, dtypes[i], true);
        builder_write(&b);
        struct model *model = open_good(&b);
        float rows[10 * 4];
        for (uint32_t row = 0; row < 10; row++) {
            kernels_weights_row(&model->embedding, row, rows + row * 4);
        }
        if (i == 0) {
            memcpy(first, rows, sizeof(first));
            assert_true(rows[1] == -1.0f); /* 7 % 16 - 8 */
        }
        assert_memory_equal(first, rows, sizeof(first));
        assert_int_equal(model_info(model)->kv_dtype, i == 2 ? KV_DTYPE_BF16 : KV_DTYPE_F32);
        float q[4];
        kernels_weights_row(&model->layers[0].qkv, 4, q); /* the first row of k */
        assert_true(q[1] - q[0] == 7 || q[1] - q[0] == -9);
        model_destroy(model);
        builder_fini(&b);
    }
}

static void test_the_fingerprint_changes_with_every_weight_and_shape(void **state) {
    (void)state;
    struct builder b;
    builder_init(&b, "F32", true);
    builder_write(&b);
    struct model *model = open_good(&b);
    uint64_t first = model_info(model)->fingerprint;
    model_destroy(model);
    model = open_good(&b);
    assert_int_equal(model_info(model)->fingerprint, first);
    model_destroy(model);
    for (size_t at = 0; at < b.data_bytes; at += 37) {
        b.data[at / 4 * 4] ^= 1; /* the lowest bit of one value */
        builder_write(&b);
        model = open_good(&b);
        assert_int_not_equal(model_info(model)->fingerprint, first);
        model_destroy(model);
        b.data[at / 4 * 4] ^= 1;
    }
    set(b.config, "rope_theta", json_real(20000));
    builder_write(&b);
    model = open_good(&b);
    assert_int_not_equal(model_info(model)->fingerprint, first);
    model_destroy(model);
    builder_fini(&b);
}

/* Splits the tensors of `b` over two files: every second one goes to the other. */
static void write_shards(struct builder *b, json_t *map) {
    for (int shard = 0; shard < 2; shard++) {
        json_t *header = json_object();
        unsigned char *data = malloc(b->data_bytes);
        assert_non_null(data);
        size_t at = 0;
        int index = 0;
        const char *name;
        json_t *entry;
        char file[32];
        (void)snprintf(file, sizeof(file), "model-%d.safetensors", shard);
        json_object_foreach(b->header, name, entry) {
            if (index++ % 2 != shard) {
                continue;
            }
            json_t *offsets = json_object_get(entry, "data_offsets");
            size_t begin = (size_t)json_integer_value(json_array_get(offsets, 0));
            size_t end = (size_t)json_integer_value(json_array_get(offsets, 1));
            memcpy(data + at, b->data + begin, end - begin);
            json_t *moved = json_deep_copy(entry);
            set(moved, "data_offsets",
                json_pack("[I, I]", (json_int_t)at, (json_int_t)(at + end - begin)));
            set(header, name, moved);
            set(map, name, json_string(file));
            at += end - begin;
        }
        char *text = json_dumps(header, 0);
        write_safetensors(b, file, text, strlen(text), strlen(text), data, at);
        free(text);
        free(data);
        json_decref(header);
    }
    char *config = json_dumps(b->config, 0);
    write_text(b, "config.json", config);
    free(config);
}
static void write_index(const struct builder *b, json_t *map) {
    json_t *index = json_pack("{s:{}, s:O}", "metadata", "weight_map", map);
    char *text = json_dumps(index, 0);
    write_text(b, "model.safetensors.index.json", text);
    free(text);
    json_decref(index);
}

static void test_shards_make_the_same_model_and_must_fit_their_index(void **state) {
    (void)state;
    struct builder whole;
    struct builder b;
    builder_init(&whole, "F32", false);
    builder_write(&whole);
    struct model *model = open_good(&whole);
    uint64_t fingerprint = model_info(model)->fingerprint;
    model_destroy(model);
    builder_fini(&whole);

    builder_init(&b, "F32", false);
    json_t *map = json_object();
    write_shards(&b, map);
    expect_refusal(&b, STATUS_NOT_FOUND, "neither model.safetensors nor");
    write_index(&b, map);
    model = open_good(&b);
    assert_int_equal(model_info(model)->fingerprint, fingerprint);
    model_destroy(model);

    static const char *const paths[] = {
        "../model-1.safetensors", "/etc/passwd", "",
        ".safetensors",           "model-1.bin", "a/model-1.safetensors"};
    json_t *right = json_incref(json_object_get(map, "model.norm.weight"));
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        set(map, "model.norm.weight", json_string(paths[i]));
        write_index(&b, map);
        expect_refusal(&b, STATUS_CORRUPT, "not mapped to a plain");
    }
    set(map, "model.norm.weight", json_integer(3));
    write_index(&b, map);
    expect_refusal(&b, STATUS_CORRUPT, "not mapped to a plain");
    set(map, "model.norm.weight", json_string("model-7.safetensors"));
    write_index(&b, map);
    expect_refusal(&b, STATUS_NOT_FOUND, "model-7.safetensors");
    const char *other = strcmp(json_string_value(right), "model-0.safetensors") == 0
                            ? "model-1.safetensors"
                            : "model-0.safetensors";
    set(map, "model.norm.weight", json_string(other));
    write_index(&b, map);
    expect_refusal(&b, STATUS_CORRUPT, "index.json says");
    json_object_del(map, "model.norm.weight");
    write_index(&b, map);
    expect_refusal(&b, STATUS_CORRUPT, "nothing of it");
    set(map, "model.norm.weight", right);
    set(map, "model.extra.weight", json_string("model-1.safetensors"));
    write_index(&b, map);
    expect_refusal(&b, STATUS_CORRUPT, "\"model.extra.weight\" is missing");
    write_text(&b, "model.safetensors.index.json", "{\"weight_map\": {}}");
    expect_refusal(&b, STATUS_CORRUPT, "no weight_map");
    write_text(&b, "model.safetensors.index.json", "[1");
    expect_refusal(&b, STATUS_CORRUPT, "model.safetensors.index.json");
    json_decref(map);
    builder_fini(&b);
}

static void test_a_tensor_in_two_shards_is_refused(void **state) {
    (void)state;
    struct builder b;
    builder_init(&b, "F32", false);
    json_t *map = json_object();
    write_shards(&b, map);
    write_index(&b, map);
    /* Shard 1 becomes a copy of shard 0, so that every tensor of it is there twice. */
    char path[128];
    unsigned char bytes[8192];
    (void)snprintf(path, sizeof(path), "%s/model-0.safetensors", b.directory);
    FILE *file = fopen(path, "rbe");
    assert_non_null(file);
    size_t len = fread(bytes, 1, sizeof(bytes), file);
    assert_int_equal(fclose(file), 0);
    write_file(&b, "model-1.safetensors", bytes, len);
    expect_refusal(&b, STATUS_CORRUPT, "is in both model-0.safetensors and model-1.safetensors");
    json_decref(map);
    builder_fini(&b);
}

static void test_make_model_makes_models_that_load(void **state) {
    (void)state;
    static const struct {
        const char *arguments;
        const char *numerics;
        uint64_t parameters;
    } cases[] = {
        {"--dtype f32 --vocab 300", "f32/c/", 2 * 300 * 8 / 2 + 2 * (3 * 16 * 8 + 192 + 16) + 8},
        {"--dtype bf16 --vocab 300 --untied --shards 3", "bf16/c/",
         2 * 300 * 8 + 2 * (3 * 16 * 8 + 192 + 16) + 8},
        {"--dtype f16 --vocab 259 --llama3-rope", "f16/c/",
         259 * 8 + 2 * (3 * 16 * 8 + 192 + 16) + 8},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct builder b;
        char command[512];
        builder_init(&b, "F32", true); /* only its directory is used */
        (void)snprintf(
            command, sizeof(command),
            "%s/tools/make-model --hidden 8 --heads 4 --kv-heads 2 --head-dim 2 --ffn 16 "
            "--layers 2 --out %s %s >/dev/null",
            BATON_SOURCE_DIR, b.directory, cases[i].arguments);
        assert_int_equal(system(command), 0);
        char text[512];
        struct writer error;
        struct model *model = NULL;
        writer_init(&error, text, sizeof(text));
        if (model_create(b.directory, kernels_select("c"), MODEL_WEIGHTS_FILE, &error, &model) !=
            STATUS_OK) {
            fail_msg("%.*s", (int)error.len, text);
        }
        const struct model_info *info = model_info(model);
        assert_memory_equal(info->numerics, cases[i].numerics, strlen(cases[i].numerics));
        assert_int_equal(info->parameter_count, cases[i].parameters);
        assert_true(info->eos_count == 1 && info->eos_tokens[0] == info->vocab_count - 1);
        model_destroy(model);
        builder_fini(&b);
    }
}

/* ---- configurations that are refused ---- */

static void test_a_configuration_that_is_wrong_is_refused_by_name(void **state) {
    (void)state;
    static const struct {
        const char *key;
        const char *value; /* JSON; NULL removes the key */
        enum status status;
        const char *sentence;
    } cases[] = {
        {"architectures", "[\"MixtralForCausalLM\"]", STATUS_UNSUPPORTED, "\"MixtralForCausalLM\""},
        {"architectures", "[]", STATUS_INVALID, "architectures"},
        {"architectures", "7", STATUS_INVALID, "architectures"},
        {"model_type", "\"qwen3\"", STATUS_UNSUPPORTED, "\"qwen3\""},
        {"use_sliding_window", "true", STATUS_UNSUPPORTED, "use_sliding_window true"},
        {"layer_types", "[\"sliding_attention\"]", STATUS_UNSUPPORTED, "\"sliding_attention\""},
        {"layer_types", "[3]", STATUS_UNSUPPORTED, "layer_types"},
        {"layer_types", "\"sliding_attention\"", STATUS_INVALID, "layer_types must be a list"},
        {"attention_bias", "true", STATUS_UNSUPPORTED, "attention_bias true"},
        {"mlp_bias", "true", STATUS_UNSUPPORTED, "mlp_bias true"},
        {"mlp_bias", "1", STATUS_INVALID, "mlp_bias"},
        {"hidden_act", "\"gelu\"", STATUS_UNSUPPORTED, "\"gelu\""},
        {"quantization_config", "{\"quant_method\": \"fp8\"}", STATUS_UNSUPPORTED, "quantization"},
        {"rope_scaling", "{\"rope_type\": \"yarn\", \"factor\": 4}", STATUS_UNSUPPORTED,
         "\"yarn\""},
        {"rope_scaling", "{\"type\": \"linear\"}", STATUS_UNSUPPORTED, "\"linear\""},
        {"rope_scaling", "{\"factor\": 4}", STATUS_INVALID, "rope_type"},
        {"rope_scaling", "3", STATUS_INVALID, "rope_type"},
        {"rope_scaling", "{\"rope_type\": \"llama3\", \"factor\": 8}", STATUS_INVALID,
         "low_freq_factor"},
        {"rope_theta", "0", STATUS_INVALID, "rope_theta"},
        {"rope_theta", "\"big\"", STATUS_INVALID, "rope_theta"},
        {"hidden_size", NULL, STATUS_INVALID, "hidden_size is missing"},
        {"hidden_size", "0", STATUS_INVALID, "hidden_size must be a whole number from 1"},
        {"hidden_size", "-4", STATUS_INVALID, "hidden_size"},
        {"hidden_size", "4.5", STATUS_INVALID, "hidden_size"},
        {"hidden_size", "5", STATUS_INVALID, "multiple of num_attention_heads"},
        {"hidden_size", "1000000000", STATUS_INVALID, "hidden_size"},
        {"num_hidden_layers", "99999", STATUS_INVALID, "num_hidden_layers"},
        {"num_key_value_heads", "3", STATUS_INVALID, "multiple of num_key_value_heads"},
        {"num_key_value_heads", "0", STATUS_INVALID, "num_key_value_heads"},
        {"head_dim", "3", STATUS_INVALID, "must be even"},
        {"rms_norm_eps", "-1", STATUS_INVALID, "rms_norm_eps"},
        {"vocab_size", "\"ten\"", STATUS_INVALID, "vocab_size"},
        {"eos_token_id", "10", STATUS_INVALID, "eos_token_id"},
        {"eos_token_id", "[1, -1]", STATUS_INVALID, "eos_token_id"},
        {"eos_token_id", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", STATUS_UNSUPPORTED,
         "17 eos_token_ids"},
        {"bos_token_id", "true", STATUS_INVALID, "bos_token_id"},
        /* Sound alone, but not with these weights. */
        {"vocab_size", "11", STATUS_CORRUPT, "[10, 4], but config.json makes it [11, 4]"},
        {"intermediate_size", "7", STATUS_CORRUPT, "gate_proj.weight\" has"},
        {"num_hidden_layers", "2", STATUS_CORRUPT, "model.layers.1.self_attn.q_proj"},
        {"tie_word_embeddings", "false", STATUS_CORRUPT, "\"lm_head.weight\" is missing"},
        {"head_dim", "4", STATUS_CORRUPT, "q_proj"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct builder b;
        builder_init(&b, "F32", true);
        if (cases[i].value == NULL) {
            json_object_del(b.config, cases[i].key);
        } else {
            json_t *value = json_loads(cases[i].value, JSON_DECODE_ANY, NULL);
            assert_non_null(value);
            set(b.config, cases[i].key, value);
        }
        builder_write(&b);
        expect_refusal(&b, cases[i].status, cases[i].sentence);
        builder_fini(&b);
    }
}

static void test_config_files_that_are_not_json_are_refused(void **state) {
    (void)state;
    struct builder b;
    builder_init(&b, "F32", true);
    expect_refusal(&b, STATUS_NOT_FOUND, "there is no config.json");
    write_text(&b, "config.json", "{\"hidden_size\": 4");
    expect_refusal(&b, STATUS_CORRUPT, "config.json: line 1");
    write_text(&b, "config.json", "[]");
    expect_refusal(&b, STATUS_CORRUPT, "not a JSON object");
    write_text(&b, "config.json", "");
    expect_refusal(&b, STATUS_CORRUPT, "config.json");
    write_text(&b, "config.json", "{\"a\": 1, \"a\": 2}");
    expect_refusal(&b, STATUS_CORRUPT, "duplicate");
    static char huge[(1 << 20) + 2];
    memset(huge, ' ', sizeof(huge) - 1);
    write_text(&b, "config.json", huge);
    expect_refusal(&b, STATUS_CORRUPT, "longer than");
    builder_write(&b);
    write_text(&b, "generation_config.json", "{\"temperature\": \"hot\"}");
    expect_refusal(&b, STATUS_INVALID, "generation_config.json: temperature");
    write_text(&b, "generation_config.json", "{\"top_p\": 0}");
    expect_refusal(&b, STATUS_INVALID, "top_p");
    write_text(&b, "generation_config.json", "nonsense");
    expect_refusal(&b, STATUS_CORRUPT, "generation_config.json");
    builder_fini(&b);
    (void)snprintf(b.directory, sizeof(b.directory), "/nonexistent/model");
    expect_refusal(&b, STATUS_NOT_FOUND, "/nonexistent/model");
}

/* ---- files that lie ---- */

static void test_a_safetensors_file_that_lies_is_refused(void **state) {
    (void)state;
    struct builder b;
    builder_init(&b, "F32", true);
    builder_write(&b);
    char *header = json_dumps(b.header, JSON_COMPACT);
    size_t len = strlen(header);
    static const uint64_t claims[] = {UINT64_MAX, 1ull << 63, 1ull << 40, 1ull << 32};
    for (size_t i = 0; i < sizeof(claims) / sizeof(claims[0]); i++) {
        write_safetensors(&b, "model.safetensors", header, len, claims[i], b.data, b.data_bytes);
        expect_refusal(&b, STATUS_CORRUPT, "model.safetensors: the header claims");
    }
    write_safetensors(&b, "model.safetensors", header, len, 0, b.data, b.data_bytes);
    expect_refusal(&b, STATUS_CORRUPT, "not a JSON object");
    write_safetensors(&b, "model.safetensors", header, len, len - 1, b.data, b.data_bytes);
    expect_refusal(&b, STATUS_CORRUPT, "not a JSON object");
    for (size_t cut = 1; cut <= b.data_bytes; cut += 61) { /* truncated data */
        write_safetensors(&b, "model.safetensors", header, len, len, b.data, b.data_bytes - cut);
        expect_refusal(&b, STATUS_CORRUPT, "bytes of data");
    }
    for (size_t cut = 1; cut < len; cut += 97) { /* truncated header */
        write_safetensors(&b, "model.safetensors", header, len - cut, len, b.data, 0);
        expect_refusal(&b, STATUS_CORRUPT, "cut off");
    }
    write_text(&b, "model.safetensors", "");
    expect_refusal(&b, STATUS_CORRUPT, "0 bytes long");
    write_text(&b, "model.safetensors", "1234567");
    expect_refusal(&b, STATUS_CORRUPT, "7 bytes long");
    b.data = realloc(b.data, b.data_bytes + 4);
    assert_non_null(b.data);
    memset(b.data + b.data_bytes, 0, 4);
    write_safetensors(&b, "model.safetensors", header, len, len, b.data, b.data_bytes + 4);
    expect_refusal(&b, STATUS_CORRUPT, "belong to no tensor");
    free(header);
    builder_fini(&b);
}

static void test_a_tensor_entry_that_is_wrong_is_refused(void **state) {
    (void)state;
    static const char name[] = "model.layers.0.self_attn.q_proj.weight";
    static const struct {
        const char *key; /* of the q_proj entry; NULL replaces the entry itself */
        const char *value;
        enum status status;
        const char *sentence;
    } cases[] = {
        {"dtype", "\"F64\"", STATUS_CORRUPT, "shape and dtype need 128"},
        {"dtype", "\"I32\"", STATUS_UNSUPPORTED, "is I32, but only F32"},
        {"dtype", "\"Q4\"", STATUS_UNSUPPORTED, "unknown dtype \"Q4\""},
        {"dtype", "4", STATUS_CORRUPT, "needs a dtype"},
        {"shape", "[4, 5]", STATUS_CORRUPT, "shape and dtype need 80"},
        {"shape", "[2, 8]", STATUS_CORRUPT, "[2, 8], but config.json makes it [4, 4]"},
        {"shape", "[16]", STATUS_CORRUPT, "config.json makes it [4, 4]"},
        {"shape", "[4, 4, 1]", STATUS_CORRUPT, "config.json makes it [4, 4]"},
        {"shape", "[-4, -4]", STATUS_CORRUPT, "impossible shape"},
        {"shape", "[4611686018427387904, 4611686018427387904]", STATUS_CORRUPT, "impossible shape"},
        {"shape", "[1,1,1,1,1,1,1,1,16]", STATUS_CORRUPT, "9 dimensions"},
        {"shape", "{}", STATUS_CORRUPT, "needs a dtype"},
        {"data_offsets", "[0, 64]", STATUS_CORRUPT, "overlaps"},
        {"data_offsets", "[64, 0]", STATUS_CORRUPT, "lies at"},
        {"data_offsets", "[-64, 0]", STATUS_CORRUPT, "lies at"},
        {"data_offsets", "[9223372036854775743, 9223372036854775807]", STATUS_CORRUPT, "lies at"},
        {"data_offsets", "[0]", STATUS_CORRUPT, "needs a dtype"},
        {"data_offsets", "[0, 64.0]", STATUS_CORRUPT, "needs a dtype"},
        {NULL, "7", STATUS_CORRUPT, "needs a dtype"},
        {NULL, "null", STATUS_CORRUPT, "needs a dtype"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct builder b;
        builder_init(&b, "F32", true);
        json_t *value = json_loads(cases[i].value, JSON_DECODE_ANY, NULL);
        assert_non_null(value);
        if (cases[i].key == NULL) {
            set(b.header, name, value);
        } else {
            set(json_object_get(b.header, name), cases[i].key, value);
        }
        builder_write(&b);
        expect_refusal(&b, cases[i].status, cases[i].sentence);
        builder_fini(&b);
    }
}

/* The names that Qwen2 and Qwen3 add, and what is said when one is missing, or is there in the
 * other. */
static void test_each_architecture_wants_its_own_tensors(void **state) {
    (void)state;
    static const struct {
        const char *architecture, *model_type;
        const char *names[3];
        uint32_t widths[3];
    } rows[] = {
        {"Qwen2ForCausalLM",
         "qwen2",
         {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"},
         {4, 2, 2}},
        {"Qwen3ForCausalLM",
         "qwen3",
         {"self_attn.q_norm.weight", "self_attn.k_norm.weight", NULL},
         {2, 2, 0}},
    };
    for (size_t i = 0; i < 2; i++) {
        for (size_t missing = 0; missing < 4; missing++) { /* 3: none */
            struct builder b;
            char name[96];
            char sentence[160] = "";
            builder_init(&b, "F32", true);
            set(b.config, "architectures", json_pack("[s]", rows[i].architecture));
            set(b.config, "model_type", json_string(rows[i].model_type));
            set(b.config, "head_dim", json_integer(2));
            for (size_t j = 0; j < 3 && rows[i].names[j] != NULL; j++) {
                (void)snprintf(name, sizeof(name), "model.layers.0.%s", rows[i].names[j]);
                if (j == missing) {
                    (void)snprintf(sentence, sizeof(sentence), "\"%s\" is missing", name);
                } else {
                    add_tensor(&b, name, "F32", 4, rows[i].widths[j], 0);
                }
            }
            builder_write(&b);
            if (sentence[0] != '\0') {
                expect_refusal(&b, STATUS_CORRUPT, sentence);
            } else {
                struct model *model = open_good(&b);
                assert_string_equal(model_info(model)->architecture, rows[i].architecture);
                model_destroy(model);
                set(b.config, "architectures", json_pack("[s]", rows[1 - i].architecture));
                set(b.config, "model_type", json_string(rows[1 - i].model_type));
                builder_write(&b);
                expect_refusal(&b, STATUS_CORRUPT, "is missing");
            }
            builder_fini(&b);
        }
    }
}

static void test_missing_surplus_mixed_and_broken_tensors_are_refused(void **state) {
    (void)state;
    struct builder b;
    builder_init(&b, "F32", true);
    add_tensor(&b, "model.layers.0.self_attn.q_proj.bias", "F32", 4, 4, 0);
    builder_write(&b);
    expect_refusal(&b, STATUS_UNSUPPORTED, "q_proj.bias\" has no place");
    builder_fini(&b);

    builder_init(&b, "F32", true);
    add_tensor(&b, "bad\nname\x7f", "F32", 4, 4, 0);
    builder_write(&b);
    expect_refusal(&b, STATUS_UNSUPPORTED, "\"bad?name?\""); /* no line break in a log line */
    builder_fini(&b);

    builder_init(&b, "F32", true); /* these two are in many old files, and do no harm */
    add_tensor(&b, "lm_head.weight", "F32", 4, 10, 4);
    add_tensor(&b, "model.layers.0.self_attn.rotary_emb.inv_freq", "F32", 4, 1, 0);
    builder_write(&b);
    model_destroy(open_good(&b));
    builder_fini(&b);

    builder_init(&b, "F32", true);
    set(b.header, "model.norm2.weight",
        json_incref(json_object_get(b.header, "model.norm.weight")));
    json_object_del(b.header, "model.norm.weight");
    builder_write(&b);
    expect_refusal(&b, STATUS_CORRUPT, "\"model.norm.weight\" is missing");
    builder_fini(&b);

    builder_init(&b, "F32", false);
    json_object_del(b.header, "lm_head.weight");
    b.data_bytes -= 10 * 4 * 4;
    add_tensor(&b, "lm_head.weight", "BF16", 2, 10, 4);
    builder_write(&b);
    expect_refusal(&b, STATUS_CORRUPT, "all matrices must share one dtype");
    builder_fini(&b);
}

/* In the first and in the last tensor, of every type, whatever the weights become. */
static void test_weights_that_are_no_numbers_are_refused_by_name(void **state) {
    (void)state;
    static const struct {
        const char *dtype;
        size_t size;
        uint32_t values[4]; /* infinite, minus infinite, and two of the many NaN */
    } types[] = {{"F32", 4, {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffffffffu}},
                 {"F16", 2, {0x7c00u, 0xfc00u, 0x7e00u, 0xffffu}},
                 {"BF16", 2, {0x7f80u, 0xff80u, 0x7fc0u, 0xffffu}}};
    static const enum model_weights weights[] = {MODEL_WEIGHTS_FILE, MODEL_WEIGHTS_INT8};
    for (size_t t = 0; t < 3; t++) {
        for (size_t v = 0; v < 4; v++) {
            for (size_t w = 0; w < 2; w++) {
                struct builder b;
                builder_init(&b, types[t].dtype, true);
                bool is_last = (v + w) % 2 == 0;
                size_t at = is_last ? b.data_bytes - types[t].size : 6 * types[t].size;
                memcpy(b.data + at, &types[t].values[v], types[t].size);
                builder_write(&b);
                expect_refusal_as(&b, weights[w], STATUS_CORRUPT,
                                  is_last ? "\"model.norm.weight\" holds a value that is not"
                                          : "\"model.embed_tokens.weight\" holds a value that");
                builder_fini(&b);
            }
        }
    }
}

static void test_random_damage_never_crashes_the_loader(void **state) {
    (void)state;
    struct builder b;
    builder_init(&b, "BF16", true);
    builder_write(&b);
    char *header = json_dumps(b.header, JSON_COMPACT);
    size_t len = strlen(header);
    unsigned char *file = malloc(8 + len + b.data_bytes);
    assert_non_null(file);
    struct prng prng = {2026};
    uint32_t refused = 0;
    for (uint32_t round = 0; round < 3000; round++) {
        memset(file, 0, 8);
        file[0] = (unsigned char)len;
        file[1] = (unsigned char)(len >> 8);
        memcpy(file + 8, header, len);
        memcpy(file + 8 + len, b.data, b.data_bytes);
        size_t bytes = 8 + len + b.data_bytes;
        uint32_t changes = 1 + prng_below(&prng, 4);
        for (uint32_t i = 0; i < changes; i++) {
            size_t at = prng_below(&prng, (uint32_t)(8 + len));
            /* Digits for digits keeps the JSON alive, so that the numbers lie. */
            bool is_digit = file[at] >= '0' && file[at] <= '9';
            file[at] = (unsigned char)(is_digit && round % 2 == 0 ? '0' + prng_below(&prng, 10)
                                                                  : prng_next(&prng));
        }
        if (round % 5 == 0) {
            bytes -= prng_below(&prng, (uint32_t)bytes);
        }
        write_file(&b, "model.safetensors", file, bytes);
        char text[512];
        struct writer error;
        struct model *model = NULL;
        writer_init(&error, text, sizeof(text));
        enum status status =
            model_create(b.directory, kernels_select("c"), MODEL_WEIGHTS_FILE, &error, &model);
        if (status != STATUS_OK) {
            assert_null(model);
            assert_true(error.len > 10);
            assert_true(utf8_is_valid((const uint8_t *)text, error.len));
            refused++;
        }
        model_destroy(model);
    }
    assert_true(refused > 2000);
    free(file);
    free(header);
    builder_fini(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_model_tells_what_it_is),
        cmocka_unit_test(test_defaults_are_neutral_where_nothing_is_said),
        cmocka_unit_test(test_all_three_dtypes_hold_the_same_weights),
        cmocka_unit_test(test_the_fingerprint_changes_with_every_weight_and_shape),
        cmocka_unit_test(test_shards_make_the_same_model_and_must_fit_their_index),
        cmocka_unit_test(test_a_tensor_in_two_shards_is_refused),
        cmocka_unit_test(test_make_model_makes_models_that_load),
        cmocka_unit_test(test_a_configuration_that_is_wrong_is_refused_by_name),
        cmocka_unit_test(test_config_files_that_are_not_json_are_refused),
        cmocka_unit_test(test_a_safetensors_file_that_lies_is_refused),
        cmocka_unit_test(test_a_tensor_entry_that_is_wrong_is_refused),
        cmocka_unit_test(test_each_architecture_wants_its_own_tensors),
        cmocka_unit_test(test_missing_surplus_mixed_and_broken_tensors_are_refused),
        cmocka_unit_test(test_weights_that_are_no_numbers_are_refused_by_name),
        cmocka_unit_test(test_random_damage_never_crashes_the_loader),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
