#include "engine/model_weights.h"

#include "base/check.h"
#include "base/prng.h"
#include "engine/accelerator.h"
#include "engine/block.h"
#include "engine/checkpoint.h"
#include "engine/fail.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME_MAX_BYTES 96

/* ---- memory ---- */

/* Zeroed and 64-aligned, for what is only needed while loading. */
static void *scratch_take(uint64_t bytes) {
    size_t rounded = ((size_t)bytes + 64) / 64 * 64;
    void *memory = aligned_alloc(64, rounded);
    CHECK(memory != NULL);
    return memset(memory, 0, rounded);
}

static uint64_t matrix_bytes(const struct model *model, const struct kernels_weights *matrix) {
    return model->accelerator != NULL
               ? device_matrix_bytes(matrix->dtype, matrix->rows, matrix->cols)
               : kernels_weights_bytes(matrix->dtype, matrix->rows, matrix->cols);
}

/* On the CPU it lies in the model's memory. */
static void matrix_free(const struct model *model, const struct kernels_weights *matrix) {
    if (model->accelerator != NULL) {
        model->accelerator->table->release(model->accelerator->device, matrix->data);
    }
}

/* ---- loading ---- */

struct loader {
    struct model *model;
    const struct checkpoint *checkpoint;
    struct writer *error;
    enum kernels_dtype source_dtype; /* of every matrix, as in the file */
    const char *source_name;
    uint32_t used; /* tensors that were found and read */
    uint64_t hash;
    bool is_dry;   /* only shapes are checked and memory is counted, nothing is read */
    bool *is_used; /* [checkpoint_count]: found by name */
};

static enum status matrix_take(const struct loader *loader, struct kernels_weights *matrix,
                               enum kernels_dtype dtype, uint32_t rows, uint32_t cols) {
    struct model *model = loader->model;
    *matrix = (struct kernels_weights){.dtype = dtype, .rows = rows, .cols = cols};
    uint64_t bytes = matrix_bytes(model, matrix);
    if (model->accelerator == NULL) {
        matrix->data = arena_take(&model->memory, bytes);
    }
    if (model->accelerator == NULL || loader->is_dry) {
        return STATUS_OK;
    }
    matrix->data = model->accelerator->table->alloc(model->accelerator->device, bytes);
    return matrix->data != NULL
               ? STATUS_OK
               : fail(loader->error, STATUS_BUSY,
                      "%s has no room for the weights: %" PRIu64 " bytes more are needed, %" PRIu64
                      " were free at the start",
                      model->accelerator->info.name, bytes, model->accelerator->info.free_bytes);
}

/* Where a row of a file is made into one of the device's, on its way there. */
struct row_room {
    unsigned char *source; /* the file promises no alignment */
    float *wide;
    struct kernels_quants quants; /* of one row */
};

static struct row_room row_room_take(uint32_t cols) {
    uint32_t groups = kernels_groups(cols);
    return (struct row_room){
        .source = scratch_take((uint64_t)cols * sizeof(float)), /* of the widest type */
        .wide = scratch_take((uint64_t)cols * sizeof(float)),
        .quants = {.numbers = scratch_take((uint64_t)groups * KERNELS_GROUP),
                   .scales = scratch_take((uint64_t)groups * sizeof(float)),
                   .offsets = scratch_take((uint64_t)groups * sizeof(int32_t))}};
}
static void row_room_free(struct row_room *room) {
    free(room->source);
    free(room->wide);
    free(room->quants.numbers);
    free(room->quants.scales);
    free(room->quants.offsets);
}

/* As the file has it, F16 widened, or rounded: weights and activations by one rule, so `quantize`
 * does it. */
static void row_make(const struct kernels *kernels, struct row_room *room,
                     const struct kernels_weights *matrix, unsigned char *to,
                     const unsigned char *source, enum kernels_dtype source_dtype) {
    uint32_t cols = matrix->cols;
    uint32_t source_bytes = cols * kernels_dtype_bytes(source_dtype);
    if (matrix->dtype == source_dtype) {
        memcpy(to, source, source_bytes);
        return;
    }
    memcpy(room->source, source, source_bytes);
    kernels->widen(room->wide, room->source, source_dtype, cols);
    if (matrix->dtype == KERNELS_F32) {
        memcpy(to, room->wide, cols * sizeof(float));
        return;
    }
    uint32_t groups = kernels_groups(cols);
    kernels->quantize(&room->quants, 0, room->wide, cols);
    memcpy(to, room->quants.numbers, (size_t)groups * KERNELS_GROUP);
    memcpy(to + (size_t)groups * KERNELS_GROUP, room->quants.scales, groups * sizeof(float));
}

/* Rows of a file into a matrix in device memory, padded with zeros. */
static enum status matrix_load(const struct loader *loader, struct kernels_weights *matrix,
                               uint32_t row_first, const unsigned char *source,
                               enum kernels_dtype source_dtype, uint32_t rows) {
    struct accelerator *accelerator = loader->model->accelerator;
    uint32_t source_row = matrix->cols * kernels_dtype_bytes(source_dtype);
    uint64_t row_bytes = device_row_bytes(matrix->dtype, matrix->cols);
    uint32_t some = (uint32_t)(ACCELERATOR_STAGING / row_bytes);
    some = some == 0 ? 1 : some < rows ? some : rows;
    unsigned char *staged = scratch_take(some * row_bytes);
    struct row_room room = row_room_take(matrix->cols);
    enum status status = STATUS_OK;
    for (uint32_t row = 0; status == STATUS_OK && row < rows; row += some) {
        uint32_t count = rows - row < some ? rows - row : some;
        for (uint32_t i = 0; i < count; i++) {
            row_make(loader->model->kernels, &room, matrix, staged + i * row_bytes,
                     source + (size_t)(row + i) * source_row, source_dtype);
        }
        status = accelerator_load(accelerator,
                                  (unsigned char *)matrix->data + (row_first + row) * row_bytes,
                                  staged, count * row_bytes);
    }
    row_room_free(&room);
    free(staged);
    if (status != STATUS_OK) {
        const char *why = accelerator->table->failure(accelerator->device);
        (void)fail(loader->error, status, "weights cannot be copied to the device: %s",
                   why != NULL ? why : "no end in time");
    }
    return status;
}

/* The type of matrices in memory. */
static enum kernels_dtype packed_dtype(const struct loader *loader) {
    if (loader->model->weights == MODEL_WEIGHTS_INT8) {
        return KERNELS_I8;
    }
    return loader->source_dtype == KERNELS_BF16 ? KERNELS_BF16 : KERNELS_F32;
}

static bool dtype_parse(const char *name, enum kernels_dtype *dtype_out) {
    if (strcmp(name, "F32") == 0) {
        *dtype_out = KERNELS_F32;
    } else if (strcmp(name, "F16") == 0) {
        *dtype_out = KERNELS_F16;
    } else if (strcmp(name, "BF16") == 0) {
        *dtype_out = KERNELS_BF16;
    } else {
        return false;
    }
    return true;
}

/* True if some value is infinite or NaN. */
static bool values_are_broken(const unsigned char *data, enum kernels_dtype dtype, uint64_t bytes) {
    uint32_t is_broken = 0;
    if (dtype == KERNELS_F32) {
        for (uint64_t i = 0; i < bytes; i += 4) {
            uint32_t bits;
            memcpy(&bits, data + i, 4);
            is_broken |= (bits & 0x7f800000u) == 0x7f800000u;
        }
    } else {
        uint32_t exponent = dtype == KERNELS_F16 ? 0x7c00u : 0x7f80u;
        for (uint64_t i = 0; i < bytes; i += 2) {
            uint16_t bits;
            memcpy(&bits, data + i, 2);
            is_broken |= (bits & exponent) == exponent;
        }
    }
    return is_broken != 0;
}

/* Four lanes of multiply and rotate: some GB/s, and any changed byte changes the result. */
static uint64_t hash_bytes(uint64_t seed, const unsigned char *data, uint64_t bytes) {
    uint64_t lanes[4] = {seed + 1, seed + 2, seed + 3, seed + 4};
    uint64_t at = 0;
    for (; at + 32 <= bytes; at += 32) {
        for (uint32_t i = 0; i < 4; i++) {
            uint64_t word;
            memcpy(&word, data + at + i * 8, 8);
            lanes[i] = (lanes[i] ^ word) * 0x9e3779b97f4a7c15ull;
            lanes[i] ^= lanes[i] >> 29;
        }
    }
    for (; at < bytes; at++) {
        lanes[0] = mix64(lanes[0] ^ data[at]);
    }
    uint64_t hash = bytes;
    for (uint32_t i = 0; i < 4; i++) {
        hash = mix64(hash ^ lanes[i]);
    }
    return hash;
}

/* Finds a tensor and checks type, shape and values; cols 0 means one dimension. */
static enum status tensor_find(struct loader *loader, const char *name, uint32_t rows,
                               uint32_t cols, const struct checkpoint_tensor **tensor_out,
                               enum kernels_dtype *dtype_out) {
    const struct checkpoint_tensor *tensor = checkpoint_find(loader->checkpoint, name);
    if (tensor == NULL) {
        return fail(loader->error, STATUS_CORRUPT,
                    "tensor \"%s\" is missing from the safetensors files", name);
    }
    uint32_t rank = cols == 0 ? 1 : 2;
    if (tensor->rank != rank || tensor->shape[0] != rows ||
        (rank == 2 && tensor->shape[1] != cols)) {
        char expected[32];
        (void)snprintf(expected, sizeof(expected), rank == 1 ? "[%u]" : "[%u, %u]", rows, cols);
        return fail(loader->error, STATUS_CORRUPT,
                    "%s: tensor \"%s\" has %u dimensions [%" PRIu64 "%s%" PRIu64
                    "%s], but config.json makes it %s",
                    fail_text(tensor->file).text, name, tensor->rank,
                    tensor->rank > 0 ? tensor->shape[0] : 0, tensor->rank > 1 ? ", " : "; ",
                    tensor->rank > 1 ? tensor->shape[1] : 0, tensor->rank > 2 ? ", ..." : "",
                    expected);
    }
    if (!dtype_parse(tensor->dtype, dtype_out)) {
        return fail(loader->error, STATUS_UNSUPPORTED,
                    "%s: tensor \"%s\" is %s, but only F32, F16 and BF16 are served",
                    fail_text(tensor->file).text, name, tensor->dtype);
    }
    *tensor_out = tensor;
    loader->is_used[checkpoint_index(loader->checkpoint, tensor)] = true;
    if (loader->is_dry) {
        loader->used++;
        return STATUS_OK;
    }
    if (values_are_broken(tensor->data, *dtype_out, tensor->bytes)) {
        return fail(loader->error, STATUS_CORRUPT,
                    "%s: tensor \"%s\" holds a value that is not a finite number",
                    fail_text(tensor->file).text, name);
    }
    loader->hash = mix64(loader->hash ^ hash_bytes(loader->used, tensor->data, tensor->bytes));
    loader->used++;
    loader->model->info.parameter_count += (uint64_t)rows * (cols == 0 ? 1 : cols);
    return STATUS_OK;
}

static enum status load_matrix(struct loader *loader, const char *name,
                               struct kernels_weights *matrix, uint32_t row_first, uint32_t rows,
                               uint32_t cols) {
    const struct checkpoint_tensor *tensor = NULL;
    enum kernels_dtype dtype = KERNELS_F32;
    enum status status = tensor_find(loader, name, rows, cols, &tensor, &dtype);
    if (status != STATUS_OK) {
        return status;
    }
    if (loader->source_name == NULL) { /* the first matrix sets the type of the model */
        loader->source_dtype = dtype;
        loader->source_name = name;
    }
    if (dtype != loader->source_dtype) {
        return fail(loader->error, STATUS_CORRUPT,
                    "%s: tensor \"%s\" is %s, unlike \"%s\": all matrices must share one dtype",
                    fail_text(tensor->file).text, name, tensor->dtype, loader->source_name);
    }
    if (loader->is_dry) {
        return STATUS_OK;
    }
    if (loader->model->accelerator != NULL) {
        return matrix_load(loader, matrix, row_first, tensor->data, dtype, rows);
    }
    kernels_weights_pack(matrix, row_first, tensor->data, dtype, rows);
    return STATUS_OK;
}

/* Reads a tensor of one dimension as F32 to to[width]. */
static enum status load_vector(struct loader *loader, const char *name, uint32_t width, float *to) {
    const struct checkpoint_tensor *tensor = NULL;
    enum kernels_dtype dtype = KERNELS_F32;
    enum status status = tensor_find(loader, name, width, 0, &tensor, &dtype);
    if (status == STATUS_OK && !loader->is_dry) {
        /* The file promises no alignment. */
        unsigned char *aligned = scratch_take(tensor->bytes);
        memcpy(aligned, tensor->data, tensor->bytes);
        loader->model->kernels->widen(to, aligned, dtype, width);
        free(aligned);
    }
    return status;
}

static float *vector_take(const struct loader *loader, uint32_t width) {
    return arena_take(&loader->model->memory, (uint64_t)width * sizeof(float));
}

static const char *layer_name(char *to, uint32_t layer, const char *part) {
    (void)snprintf(to, NAME_MAX_BYTES, "model.layers.%u.%s", layer, part);
    return to;
}

static enum status load_layer(struct loader *loader, uint32_t index, struct model_layer *layer) {
    const struct model_config *config = &loader->model->config;
    uint32_t q_rows = config->heads * config->head_dim;
    uint32_t kv_rows = config->kv_heads * config->head_dim;
    enum kernels_dtype packed = packed_dtype(loader);
    const struct {
        struct kernels_weights *matrix;
        uint32_t rows;
        uint32_t cols;
    } matrices[] = {{&layer->qkv, q_rows + 2 * kv_rows, config->hidden},
                    {&layer->output, config->hidden, q_rows},
                    {&layer->gate_up, 2 * config->ffn, config->hidden},
                    {&layer->down, config->hidden, config->ffn}};
    enum status status = STATUS_OK;
    for (size_t i = 0; status == STATUS_OK && i < 4; i++) {
        status =
            matrix_take(loader, matrices[i].matrix, packed, matrices[i].rows, matrices[i].cols);
    }
    const struct {
        const char *part;
        struct kernels_weights *matrix;
        uint32_t row_first;
        uint32_t rows;
        uint32_t cols;
    } parts[] = {
        {"self_attn.q_proj.weight", &layer->qkv, 0, q_rows, config->hidden},
        {"self_attn.k_proj.weight", &layer->qkv, q_rows, kv_rows, config->hidden},
        {"self_attn.v_proj.weight", &layer->qkv, q_rows + kv_rows, kv_rows, config->hidden},
        {"self_attn.o_proj.weight", &layer->output, 0, config->hidden, q_rows},
        {"mlp.gate_proj.weight", &layer->gate_up, 0, config->ffn, config->hidden},
        {"mlp.up_proj.weight", &layer->gate_up, config->ffn, config->ffn, config->hidden},
        {"mlp.down_proj.weight", &layer->down, 0, config->hidden, config->ffn},
    };
    char name[NAME_MAX_BYTES];
    for (size_t i = 0; status == STATUS_OK && i < sizeof(parts) / sizeof(parts[0]); i++) {
        status = load_matrix(loader, layer_name(name, index, parts[i].part), parts[i].matrix,
                             parts[i].row_first, parts[i].rows, parts[i].cols);
    }
    layer->attention_norm = vector_take(loader, config->hidden);
    layer->ffn_norm = vector_take(loader, config->hidden);
    layer->qkv_bias = config->has_qkv_bias ? vector_take(loader, q_rows + 2 * kv_rows) : NULL;
    layer->q_norm = config->has_qk_norm ? vector_take(loader, config->head_dim) : NULL;
    layer->k_norm = config->has_qk_norm ? vector_take(loader, config->head_dim) : NULL;
    const struct {
        const char *part;
        bool is_there;
        float *vector;
        uint32_t first;
        uint32_t width;
    } vectors[] = {
        {"input_layernorm.weight", true, layer->attention_norm, 0, config->hidden},
        {"post_attention_layernorm.weight", true, layer->ffn_norm, 0, config->hidden},
        {"self_attn.q_proj.bias", config->has_qkv_bias, layer->qkv_bias, 0, q_rows},
        {"self_attn.k_proj.bias", config->has_qkv_bias, layer->qkv_bias, q_rows, kv_rows},
        {"self_attn.v_proj.bias", config->has_qkv_bias, layer->qkv_bias, q_rows + kv_rows, kv_rows},
        {"self_attn.q_norm.weight", config->has_qk_norm, layer->q_norm, 0, config->head_dim},
        {"self_attn.k_norm.weight", config->has_qk_norm, layer->k_norm, 0, config->head_dim},
    };
    for (size_t i = 0; status == STATUS_OK && i < sizeof(vectors) / sizeof(vectors[0]); i++) {
        if (vectors[i].is_there) {
            float *to = loader->is_dry ? NULL : vectors[i].vector + vectors[i].first;
            status =
                load_vector(loader, layer_name(name, index, vectors[i].part), vectors[i].width, to);
        }
    }
    return status;
}

/* Tensors that may be there without a use; any other stranger means a model we would compute
 * wrongly. */
static bool name_is_harmless(const char *name, bool is_tied) {
    static const char suffix[] = ".rotary_emb.inv_freq";
    size_t length = strlen(name);
    size_t tail = sizeof(suffix) - 1;
    return (is_tied && strcmp(name, "lm_head.weight") == 0) ||
           (length > tail && strcmp(name + length - tail, suffix) == 0);
}

static enum status strangers_check(const struct loader *loader) {
    for (uint32_t i = 0; i < checkpoint_count(loader->checkpoint); i++) {
        const struct checkpoint_tensor *tensor = checkpoint_at(loader->checkpoint, i);
        if (!loader->is_used[i] && !name_is_harmless(tensor->name, loader->model->config.is_tied)) {
            return fail(loader->error, STATUS_UNSUPPORTED,
                        "%s: tensor \"%s\" has no place in this architecture: the model would be "
                        "computed wrongly",
                        fail_text(tensor->file).text, fail_text(tensor->name).text);
        }
    }
    return STATUS_OK;
}

/* Dry to check everything before memory is taken on the word of a file, and once more to count it,
 * when the type of the matrices is known; then for real. */
static enum status load_all(struct loader *loader) {
    struct model *model = loader->model;
    const struct model_config *config = &model->config;
    loader->used = 0;
    loader->source_name = NULL;
    enum kernels_dtype packed = packed_dtype(loader);
    enum status status = STATUS_OK;
    if (!loader->is_dry) {
        model->layers = calloc(config->layers, sizeof(*model->layers));
        CHECK(model->layers != NULL);
    }
    status = matrix_take(loader, &model->embedding, packed, config->vocab, config->hidden);
    if (config->is_tied) {
        model->head = model->embedding;
    } else if (status == STATUS_OK) {
        status = matrix_take(loader, &model->head, packed, config->vocab, config->hidden);
    }
    if (status == STATUS_OK) {
        status = load_matrix(loader, "model.embed_tokens.weight", &model->embedding, 0,
                             config->vocab, config->hidden);
    }
    if (status == STATUS_OK && !config->is_tied) {
        status =
            load_matrix(loader, "lm_head.weight", &model->head, 0, config->vocab, config->hidden);
    }
    if (status == STATUS_OK) {
        model->final_norm = vector_take(loader, config->hidden);
        status = load_vector(loader, "model.norm.weight", config->hidden, model->final_norm);
    }
    struct model_layer untouched = {0}; /* a dry run writes nothing */
    for (uint32_t i = 0; status == STATUS_OK && i < config->layers; i++) {
        status = load_layer(loader, i, loader->is_dry ? &untouched : &model->layers[i]);
    }
    return status;
}

/* ---- constants ---- */

/* Radians per position of pair i: theta^(-2i / head_dim), stretched as Llama 3.1 does where asked.
 */
static void frequencies_make(struct model *model) {
    const struct model_config *config = &model->config;
    const struct config_rope_llama3 *llama3 = &config->rope_llama3;
    uint32_t half = config->head_dim / 2;
    model->frequencies = calloc(half, sizeof(double));
    CHECK(model->frequencies != NULL);
    for (uint32_t i = 0; i < half; i++) {
        double frequency = pow(config->rope_theta, -2.0 * i / config->head_dim);
        if (llama3->is_on) {
            double turns = llama3->original_tokens * frequency / (2 * 3.14159265358979323846);
            double share = (turns - llama3->low_freq_factor) /
                           (llama3->high_freq_factor - llama3->low_freq_factor);
            share = share < 0 ? 0 : share > 1 ? 1 : share;
            frequency = share * frequency + (1 - share) * frequency / llama3->factor;
        }
        model->frequencies[i] = frequency;
    }
}

static void name_take(const char *directory, char *to, size_t cap) {
    size_t end = strlen(directory);
    while (end > 1 && directory[end - 1] == '/') {
        end--;
    }
    size_t start = end;
    while (start > 0 && directory[start - 1] != '/') {
        start--;
    }
    size_t length = end - start < cap - 1 ? end - start : cap - 1;
    memcpy(to, directory + start, length);
    to[length] = '\0';
}

static uint64_t shape_hash(const struct model_config *config) {
    uint64_t theta;
    memcpy(&theta, &config->rope_theta, sizeof(theta));
    uint64_t epsilon = 0;
    memcpy(&epsilon, &config->norm_epsilon, sizeof(config->norm_epsilon));
    const uint64_t numbers[] = {config->hidden,
                                config->ffn,
                                config->layers,
                                config->heads,
                                config->vocab,
                                config->kv_heads,
                                config->head_dim,
                                epsilon,
                                theta,
                                config->is_tied,
                                config->rope_llama3.is_on,
                                config->has_qkv_bias,
                                config->has_qk_norm};
    uint64_t hash = 0;
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        hash = mix64(hash ^ numbers[i]) + i;
    }
    return hash_bytes(hash, (const unsigned char *)&config->rope_llama3.factor, 4 * sizeof(double));
}

static void info_make(struct model *model, enum kernels_dtype source, const char *directory) {
    const struct model_config *config = &model->config;
    struct model_info *info = &model->info;
    name_take(directory, info->name, sizeof(info->name));
    text_copy(info->architecture, sizeof(info->architecture), config->architecture);
    const char *dtype = source == KERNELS_F32 ? "f32" : source == KERNELS_F16 ? "f16" : "bf16";
    const char *rounded = model->weights == MODEL_WEIGHTS_INT8 ? "int8-" : "";
    const char *numerics = model->accelerator != NULL ? model->accelerator->info.numerics
                           : model->embedding.dtype == KERNELS_BF16 ? model->kernels->bf16_numerics
                                                                    : model->kernels->numerics;
    (void)snprintf(info->numerics, sizeof(info->numerics), "%s%s/%s/%u", rounded, dtype, numerics,
                   KERNELS_VERSION);
    info->vocab_count = config->vocab;
    info->context_tokens = config->context_tokens;
    info->layer_count = config->layers;
    info->hidden = config->hidden;
    info->heads = config->heads;
    info->kv_heads = config->kv_heads;
    info->head_dim = config->head_dim;
    info->ffn = config->ffn;
    info->kv_dtype = source == KERNELS_BF16 ? KV_DTYPE_BF16 : KV_DTYPE_F32;
    model->kv_dtype = source == KERNELS_BF16 ? KERNELS_BF16 : KERNELS_F32;
    info->is_tied = config->is_tied;
    info->has_bos = config->has_bos;
    info->bos_token = config->bos_token;
    info->eos_count = config->eos_count;
    memcpy(info->eos_tokens, config->eos_tokens, sizeof(info->eos_tokens));
    info->defaults = config->defaults;
    uint64_t bytes = matrix_bytes(model, &model->embedding);
    info->weight_bytes = config->is_tied ? bytes : 2 * bytes;
    for (uint32_t i = 0; i < config->layers; i++) {
        const struct model_layer *layer = &model->layers[i];
        const struct kernels_weights *all[] = {&layer->qkv, &layer->output, &layer->gate_up,
                                               &layer->down};
        for (size_t j = 0; j < 4; j++) {
            info->weight_bytes += matrix_bytes(model, all[j]);
        }
    }
}

enum status model_create(const char *directory, const struct kernels *kernels,
                         enum model_weights weights, struct writer *error,
                         struct model **model_out) {
    return model_create_on(directory, kernels, NULL, weights, error, model_out);
}

enum status model_create_on(const char *directory, const struct kernels *kernels,
                            struct accelerator *accelerator, enum model_weights weights,
                            struct writer *error, struct model **model_out) {
    struct model *model = calloc(1, sizeof(*model));
    struct checkpoint *checkpoint = NULL;
    CHECK(model != NULL && kernels != NULL);
    model->kernels = kernels;
    model->accelerator = accelerator;
    model->weights = weights;
    enum status status = config_read(directory, error, &model->config);
    if (status == STATUS_OK) {
        status = checkpoint_open(directory, error, &checkpoint);
    }
    struct loader loader = {
        .model = model, .checkpoint = checkpoint, .error = error, .is_dry = true};
    if (status == STATUS_OK) {
        loader.is_used = calloc((size_t)checkpoint_count(checkpoint) + 1, sizeof(bool));
        CHECK(loader.is_used != NULL);
        status = load_all(&loader);
    }
    if (status == STATUS_OK) {
        status = strangers_check(&loader);
    }
    if (status == STATUS_OK) {
        arena_init(&model->memory, NULL, 0);
        status = load_all(&loader);
    }
    if (status == STATUS_OK) {
        status = block_take(
            &model->memory, "the model's weights",
            "take a smaller model or --weights int8, or give the process more memory", error);
    }
    if (status == STATUS_OK) {
        loader.is_dry = false;
        loader.hash = mix64(shape_hash(&model->config) ^ weights);
        status = load_all(&loader);
    }
    free(loader.is_used);
    checkpoint_close(checkpoint);
    if (status != STATUS_OK) {
        model_destroy(model);
        return status;
    }
    frequencies_make(model);
    info_make(model, loader.source_dtype, directory);
    model->info.fingerprint = loader.hash;
    *model_out = model;
    return STATUS_OK;
}

void model_destroy(struct model *model) {
    if (model == NULL) {
        return;
    }
    for (uint32_t i = 0; model->layers != NULL && i < model->config.layers; i++) {
        struct model_layer *layer = &model->layers[i];
        matrix_free(model, &layer->qkv);
        matrix_free(model, &layer->output);
        matrix_free(model, &layer->gate_up);
        matrix_free(model, &layer->down);
    }
    free(model->layers);
    if (!model->config.is_tied) {
        matrix_free(model, &model->head);
    }
    matrix_free(model, &model->embedding);
    block_free(&model->memory);
    free(model->frequencies);
    free(model);
}

const struct model_info *model_info(const struct model *model) {
    return &model->info;
}

enum status model_layout(const struct model *model, uint32_t page_tokens,
                         struct kv_layout *layout_out) {
    const struct model_config *config = &model->config;
    memset(layout_out, 0, sizeof(*layout_out));
    layout_out->component_count = 2 * config->layers;
    layout_out->page_tokens = page_tokens;
    uint32_t row_bytes = config->kv_heads * config->head_dim * kernels_dtype_bytes(model->kv_dtype);
    for (uint32_t i = 0; i < layout_out->component_count; i++) {
        struct kv_component *component = &layout_out->components[i];
        text_copy(component->name, sizeof(component->name), i % 2 == 0 ? "k" : "v");
        component->layer = (uint16_t)(i / 2);
        component->tokens_per_row = 1;
        component->row_bytes = row_bytes;
        component->dtype = model->info.kv_dtype;
        component->lifetime = KV_LIFETIME_PAGE;
    }
    enum status status = layout_complete(layout_out);
    if (status == STATUS_OK) {
        layout_bind(layout_out, model->info.fingerprint);
    }
    return status;
}
