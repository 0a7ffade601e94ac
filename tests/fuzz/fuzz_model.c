/* A whole model directory, as --model meets it: config.json, safetensors and tokenizer.json that
 * fit each other, but for what the input breaks in any of them. What is accepted is then used: its
 * layout, and a prompt of three tokens through the forward pass.
 *
 * Checked: every refusal is one sentence, an accepted model says of itself what its files say, and
 * no logit is read from memory that is not its own. */
#include <math.h>
#include <stdio.h>

#include "engine/forward.h"
#include "engine/model.h"
#include "engine/team.h"
#include "fuzz/folder.h"
#include "fuzz/fuzz.h"
#include "kernels/kernels.h"
#include "text/tokenizer.h"

#define FILE_CAP    (1u << 20)
#define TENSORS_MAX 40u
#define TWISTS_MAX  2u

struct shape {
    uint32_t hidden, layers, heads, kv_heads, head_dim, ffn, vocab;
    bool is_tied;
};

struct tensor {
    char name[96];
    const char *dtype;
    uint64_t dims[2];
    uint32_t rank;
    uint64_t begin, end;
    bool is_dropped;
};

static struct {
    struct input input;
    struct shape shape;
    uint32_t value_bytes;
    const char *dtype;
    struct tensor tensors[TENSORS_MAX];
    uint32_t tensor_count;
    uint64_t data_bytes;
    char *text; /* FILE_CAP */
} bed;

static void tensor_add(const char *name, uint64_t rows, uint64_t cols) {
    CHECK_OP(bed.tensor_count, <, TENSORS_MAX);
    struct tensor *tensor = &bed.tensors[bed.tensor_count++];
    *tensor = (struct tensor){.dtype = bed.dtype, .dims = {rows, cols}, .rank = cols > 0 ? 2 : 1};
    text_copy(tensor->name, sizeof tensor->name, name);
    tensor->begin = bed.data_bytes;
    bed.data_bytes += rows * (cols > 0 ? cols : 1) * bed.value_bytes;
    tensor->end = bed.data_bytes;
}

static void layer_add(uint32_t layer, const char *part, uint64_t rows, uint64_t cols) {
    char name[96];
    (void)snprintf(name, sizeof name, "model.layers.%u.%s.weight", layer, part);
    tensor_add(name, rows, cols);
}

static void tensors_draw(void) {
    const struct shape *shape = &bed.shape;
    uint64_t q = (uint64_t)shape->heads * shape->head_dim;
    uint64_t kv = (uint64_t)shape->kv_heads * shape->head_dim;
    bed.tensor_count = 0;
    bed.data_bytes = 0;
    tensor_add("model.embed_tokens.weight", shape->vocab, shape->hidden);
    for (uint32_t i = 0; i < shape->layers; i++) {
        layer_add(i, "self_attn.q_proj", q, shape->hidden);
        layer_add(i, "self_attn.k_proj", kv, shape->hidden);
        layer_add(i, "self_attn.v_proj", kv, shape->hidden);
        layer_add(i, "self_attn.o_proj", shape->hidden, q);
        layer_add(i, "mlp.gate_proj", shape->ffn, shape->hidden);
        layer_add(i, "mlp.up_proj", shape->ffn, shape->hidden);
        layer_add(i, "mlp.down_proj", shape->hidden, shape->ffn);
        layer_add(i, "input_layernorm", shape->hidden, 0);
        layer_add(i, "post_attention_layernorm", shape->hidden, 0);
    }
    tensor_add("model.norm.weight", shape->hidden, 0);
    if (!shape->is_tied) {
        tensor_add("lm_head.weight", shape->vocab, shape->hidden);
    }
}

static void tensor_break(void) {
    struct tensor *tensor = &bed.tensors[input_u8(&bed.input) % bed.tensor_count];
    static const char *const dtypes[] = {"F32", "F16", "BF16", "I8", "F8_E4M3", "f32", ""};
    uint8_t how = input_u8(&bed.input);
    switch (how % 10) {
    case 0: tensor->is_dropped = true; break;
    case 1: tensor->name[input_u8(&bed.input) % strlen(tensor->name)] ^= 1; break;
    case 2: tensor->dims[0] += input_u8(&bed.input) - 128u; break;
    case 3: tensor->dims[1] = input_u64(&bed.input); break;
    case 4: tensor->dtype = dtypes[input_u8(&bed.input) % 7]; break;
    case 5: tensor->begin += input_u8(&bed.input) - 128u; break;
    case 6: tensor->end += input_u8(&bed.input) - 128u; break;
    case 7: tensor->end = input_u64(&bed.input); break;
    case 8: { /* another's place, or its transpose */
        const struct tensor *other = &bed.tensors[input_u8(&bed.input) % bed.tensor_count];
        tensor->begin = other->begin;
        tensor->end = other->end;
        break;
    }
    case 9: tensor->rank = input_u8(&bed.input) % 3; break;
    }
}

/* The next bytes of the input up to a NUL, as JSON text put in as it is. */
static struct bytes draw_raw(void) {
    const uint8_t *end = bed.input.len > 0 ? memchr(bed.input.data, '\0', bed.input.len) : NULL;
    struct bytes raw =
        input_bytes(&bed.input, end != NULL ? (size_t)(end - bed.input.data) : SIZE_MAX);
    (void)input_u8(&bed.input);
    return raw;
}

/* A member of config.json, unless the input brings one of this name. */
static void config_put(struct writer *out, const struct bytes *raw, const char *key,
                       const char *value) {
    for (uint32_t i = 0; i < TWISTS_MAX; i++) {
        if (raw[i].len > 0 && memmem(raw[i].data, raw[i].len, key, strlen(key)) != NULL) {
            return;
        }
    }
    writer_printf(out, ",\"%s\":%s", key, value);
}

static void config_count(struct writer *out, const struct bytes *raw, const char *key,
                         uint32_t value) {
    char text[16];
    (void)snprintf(text, sizeof text, "%u", value);
    config_put(out, raw, key, text);
}

static void write_config(uint8_t flags, uint32_t twists) {
    const struct shape *shape = &bed.shape;
    struct bytes raw[TWISTS_MAX] = {{NULL}};
    for (uint32_t i = 0; i < twists; i++) {
        raw[i] = draw_raw();
    }
    struct writer out;
    writer_init(&out, bed.text, FILE_CAP);
    writer_text(&out, "{\"model_type\":\"llama\"");
    config_put(&out, raw, "architectures", "[\"LlamaForCausalLM\"]");
    config_put(&out, raw, "max_position_embeddings", "64");
    config_put(&out, raw, "rms_norm_eps", "1e-5");
    config_put(&out, raw, "rope_theta", "10000.0");
    config_count(&out, raw, "hidden_size", shape->hidden);
    config_count(&out, raw, "num_hidden_layers", shape->layers);
    config_count(&out, raw, "num_attention_heads", shape->heads);
    config_count(&out, raw, "num_key_value_heads", shape->kv_heads);
    config_count(&out, raw, "head_dim", shape->head_dim);
    config_count(&out, raw, "intermediate_size", shape->ffn);
    config_count(&out, raw, "vocab_size", shape->vocab);
    config_put(&out, raw, "tie_word_embeddings", shape->is_tied ? "true" : "false");
    if ((flags & 4) != 0) {
        config_put(&out, raw, "rope_scaling",
                   "{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,"
                   "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":16}");
    }
    for (uint32_t i = 0; i < twists; i++) {
        if (raw[i].len > 0) {
            writer_printf(&out, ",%.*s", (int)raw[i].len, (const char *)raw[i].data);
        }
    }
    writer_text(&out, "}");
    CHECK(!out.is_full);
    folder_write("config.json", (struct bytes){(const uint8_t *)bed.text, out.len});
}

static void values_fill(uint8_t *to, uint64_t bytes, uint8_t seed) {
    uint64_t state = seed * 2654435761u + 1;
    for (uint64_t i = 0; i + bed.value_bytes <= bytes; i += bed.value_bytes) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        float value = (float)(int32_t)(state >> 32) / 2147483648.0f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (bed.value_bytes == 4) {
            memcpy(to + i, &bits, 4);
        } else if (strcmp(bed.dtype, "BF16") == 0) {
            memcpy(to + i, (const uint8_t *)&bits + 2, 2);
        } else { /* F16: sign, an exponent near 0, some fraction */
            uint16_t half = (uint16_t)((bits >> 16 & 0x8000) | 0x3800 | (state >> 40 & 0x3ff));
            memcpy(to + i, &half, 2);
        }
    }
}

static void write_weights(void) {
    struct writer out;
    writer_init(&out, bed.text, FILE_CAP);
    writer_text(&out, "{");
    bool is_first = true;
    for (uint32_t i = 0; i < bed.tensor_count; i++) {
        const struct tensor *tensor = &bed.tensors[i];
        if (tensor->is_dropped) {
            continue;
        }
        writer_printf(&out, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", is_first ? "" : ",",
                      tensor->name, tensor->dtype);
        for (uint32_t d = 0; d < tensor->rank; d++) {
            writer_printf(&out, "%s%llu", d > 0 ? "," : "", (unsigned long long)tensor->dims[d]);
        }
        writer_printf(&out, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)tensor->begin,
                      (unsigned long long)tensor->end);
        is_first = false;
    }
    writer_text(&out, "}");
    CHECK(!out.is_full);
    uint8_t seed = input_u8(&bed.input);
    uint64_t header = out.len;
    uint8_t *file = malloc(8 + out.len + bed.data_bytes);
    CHECK(file != NULL);
    memcpy(file, &header, 8);
    memcpy(file + 8, bed.text, out.len);
    uint8_t *data = file + 8 + out.len;
    values_fill(data, bed.data_bytes, seed);
    uint8_t how = input_u8(&bed.input);
    if (how > 240 && bed.data_bytes >= 4) { /* somewhere a value that may not be finite */
        uint64_t at = input_u64(&bed.input) % (bed.data_bytes - 3);
        memset(data + at, 0xff, 4);
    }
    uint64_t len = 8 + out.len + bed.data_bytes;
    if (how > 224 && how <= 240) { /* cut, anywhere */
        len = input_u64(&bed.input) % (len + 1);
    }
    folder_write("model.safetensors", (struct bytes){file, (size_t)len});
    free(file);
}

static void forward_three(const struct model *model, const struct kv_layout *layout) {
    const struct model_info *info = model_info(model);
    unsigned char *kv = aligned_alloc(64, (size_t)layout->page_bytes);
    CHECK(kv != NULL);
    memset(kv, 0xff, (size_t)layout->page_bytes);
    struct team *team = NULL;
    CHECK_OP(team_create(1, &team), ==, STATUS_OK);
    struct forward *forward = forward_create(&(struct forward_config){
        .model = model, .layout = layout, .kv = kv, .team = team, .rows_max = 1, .tokens_max = 3});
    const uint32_t tokens[3] = {0, info->vocab_count - 1, info->vocab_count / 2};
    const uint32_t page = 0;
    uint32_t count = info->context_tokens < 3 ? info->context_tokens : 3;
    struct plan_row row = {.token_count = count, .page_count = 1, .is_sampled = true};
    struct forward_input what = {.rows = &row, .row_count = 1, .tokens = tokens, .pages = &page};
    forward_run(forward, &what, NULL, NULL);
    const float *logits = forward_logits(forward, 0);
    unsigned finite = 0;
    for (uint32_t i = 0; i < info->vocab_count; i++) {
        finite += isfinite(logits[i]) ? 1 : 0;
    }
    CHECK_OP(finite, <=, info->vocab_count);
    forward_destroy(forward);
    team_destroy(team);
    free(kv);
}

static void use_model(const struct model *model) {
    const struct model_info *info = model_info(model);
    CHECK(info->layer_count > 0 && info->vocab_count > 0 && info->context_tokens > 0);
    CHECK(info->head_dim % 2 == 0 && info->heads % info->kv_heads == 0);
    CHECK_OP(info->eos_count, <=, MODEL_EOS_MAX);
    for (uint32_t i = 0; i < info->eos_count; i++) {
        CHECK_OP(info->eos_tokens[i], <, info->vocab_count);
    }
    struct kv_layout *layout = calloc(1, sizeof *layout);
    CHECK(layout != NULL);
    CHECK_OP(model_layout(model, 4, layout), ==, STATUS_OK);
    CHECK_OP(layout->component_count, ==, 2 * info->layer_count);
    forward_three(model, layout);
    free(layout);
}

static void check_refusal(enum status status, bool is_there, const struct writer *error) {
    CHECK((status == STATUS_OK) == is_there);
    CHECK((status == STATUS_OK) == (error->len == 0));
    CHECK(memchr(error->data, '\n', error->len) == NULL);
}

/* What a worker looks at next: whether routers will be able to read prompts for it. */
static void use_tokenizer(struct writer *error) {
    struct bytes raw = draw_raw();
    struct tokenizer *tokenizer = NULL;
    error->len = 0;
    enum status status = tokenizer_create(raw, &tokenizer, error);
    check_refusal(status, tokenizer != NULL, error);
    tokenizer_destroy(tokenizer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    static const char *const dtypes[] = {"F32", "F32", "BF16", "F16"};
    if (bed.text == NULL) {
        bed.text = malloc(FILE_CAP);
        CHECK(bed.text != NULL);
    }
    bed.input = input_of(data, len);
    uint8_t flags = input_u8(&bed.input);
    bed.dtype = dtypes[flags >> 4 & 3];
    bed.value_bytes = strcmp(bed.dtype, "F32") == 0 ? 4 : 2;
    uint32_t kv_heads = 1 + input_u8(&bed.input) % 2;
    bed.shape = (struct shape){.hidden = 1 + input_u8(&bed.input) % 20,
                               .layers = 1 + input_u8(&bed.input) % 3,
                               .heads = kv_heads * (1 + input_u8(&bed.input) % 3),
                               .kv_heads = kv_heads,
                               .head_dim = 2 + 2 * (input_u8(&bed.input) % 5),
                               .ffn = 1 + input_u8(&bed.input) % 20,
                               .vocab = 1 + input_u8(&bed.input) % 40,
                               .is_tied = (flags & 1) != 0};
    write_config(flags, input_u8(&bed.input) % (TWISTS_MAX + 1));
    tensors_draw();
    for (uint32_t i = input_u8(&bed.input) % 4; i > 1; i--) {
        tensor_break();
    }
    write_weights();
    char sentence[1024];
    struct writer error;
    writer_init(&error, sentence, sizeof sentence);
    struct model *model = NULL;
    enum status status =
        model_create(folder_path(), kernels_select((flags & 8) != 0 ? "avx2" : "c"),
                     (flags & 2) != 0 ? MODEL_WEIGHTS_INT8 : MODEL_WEIGHTS_FILE, &error, &model);
    check_refusal(status, model != NULL, &error);
    if (model != NULL) {
        use_model(model);
        use_tokenizer(&error);
        model_destroy(model);
    }
    return 0;
}
