#include "engine/forward_device.h"

#include "base/check.h"
#include "engine/accelerator.h"
#include "engine/config.h"
#include "engine/fail.h"
#include "engine/model_weights.h"
#include "engine/team.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Marks; accelerator.h has the first. */
enum {
    MARK_STORED = 1, /* a layer's rows are in the device's pool */
    MARK_COPIED = 2, /* and 3, by turns: they are in the host's */
    MARK_LOGITS = 4,
};
/* Less than the silence that a watchdog tolerates by default: the sentence comes first. */
#define WAIT_MS     20000
#define PROVE_MS    20000
#define ROWS_A_PART 16u
_Static_assert(CONFIG_HEAD_DIM_MAX <= DEVICE_HEAD_DIM_MAX, "a device computes every model's heads");

/* Vectors of one layer, in device memory. */
struct layer_vectors {
    float *attention_norm;
    float *ffn_norm;
    float *qkv_bias; /* or NULL, as the two below */
    float *q_norm;
    float *k_norm;
};

struct forward_device {
    struct forward_config config;
    const struct model_config *shape;
    struct accelerator *accelerator;
    const struct device_table *table;
    struct device *device;
    struct layer_vectors *layers;
    float *final_norm;
    unsigned char *pool;   /* page_count pages in device memory */
    void *view;            /* the host's pool, as the device names it */
    unsigned char *inputs; /* device memory, laid out as `staged` */
    unsigned char *staged; /* pinned: what a step brings */
    uint64_t inputs_bytes;
    struct device_step step; /* pointers into `inputs` */
    uint32_t *sampled;       /* likewise */
    /* The same places in `staged`. */
    uint32_t *host_tokens;
    uint32_t *host_positions;
    uint32_t *host_page_first;
    uint32_t *host_sampled;
    float *host_cosine;
    float *host_sine;
    uint32_t *host_pages;
    float *x; /* device memory; as in forward.c */
    float *normed;
    float *qkv;
    float *mixed;
    float *projected;
    float *gate_up;
    float *logits;
    float *host_logits; /* pinned, [rows_max, vocab] */
    uint32_t sampled_count;
    uint32_t qkv_width;
    bool is_mapped;
    const char *failure;
    char failure_text[DEVICE_TEXT];
};

/* ---- life ---- */

static enum status no_room(const struct forward_device *forward, struct writer *error,
                           const char *what, uint64_t bytes) {
    return fail(error, STATUS_BUSY,
                "%s has no room for %s: %" PRIu64 " bytes, %" PRIu64 " of %" PRIu64
                " were free at the start",
                forward->accelerator->info.name, what, bytes, forward->accelerator->info.free_bytes,
                forward->accelerator->info.memory_bytes);
}

static enum status take(struct forward_device *forward, struct writer *error, const char *what,
                        uint64_t bytes, void *memory_out) {
    void *memory = forward->table->alloc(forward->device, bytes);
    if (memory == NULL) {
        return no_room(forward, error, what, bytes);
    }
    memcpy(memory_out, &memory, sizeof(memory));
    return STATUS_OK;
}

static enum status vector_load(struct forward_device *forward, struct writer *error,
                               const float *from, uint32_t width, float **to) {
    if (from == NULL) {
        return STATUS_OK;
    }
    uint64_t bytes = (uint64_t)width * sizeof(float);
    enum status status = take(forward, error, "a norm", bytes, to);
    if (status == STATUS_OK) {
        status = accelerator_load(forward->accelerator, *to, from, bytes);
        if (status != STATUS_OK) {
            (void)fail(error, status, "a norm cannot be copied to the device");
        }
    }
    return status;
}

static enum status vectors_load(struct forward_device *forward, struct writer *error) {
    const struct model *model = forward->config.model;
    const struct model_config *shape = forward->shape;
    forward->layers = calloc(shape->layers, sizeof(*forward->layers));
    CHECK(forward->layers != NULL);
    enum status status =
        vector_load(forward, error, model->final_norm, shape->hidden, &forward->final_norm);
    for (uint32_t i = 0; status == STATUS_OK && i < shape->layers; i++) {
        const struct model_layer *from = &model->layers[i];
        struct layer_vectors *to = &forward->layers[i];
        const struct {
            const float *from;
            uint32_t width;
            float **to;
        } vectors[] = {{from->attention_norm, shape->hidden, &to->attention_norm},
                       {from->ffn_norm, shape->hidden, &to->ffn_norm},
                       {from->qkv_bias, forward->qkv_width, &to->qkv_bias},
                       {from->q_norm, shape->head_dim, &to->q_norm},
                       {from->k_norm, shape->head_dim, &to->k_norm}};
        for (size_t j = 0; status == STATUS_OK && j < sizeof(vectors) / sizeof(vectors[0]); j++) {
            status = vector_load(forward, error, vectors[j].from, vectors[j].width, vectors[j].to);
        }
    }
    return status;
}

/* Each shape of matrix once; the table knows those it has seen. */
static enum status products_prepare(struct forward_device *forward, struct writer *error) {
    const struct model *model = forward->config.model;
    const struct model_layer *layer = &model->layers[0]; /* all layers have the same shapes */
    const struct kernels_weights *all[] = {&layer->qkv, &layer->output, &layer->gate_up,
                                           &layer->down, &model->head};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        char why[DEVICE_TEXT] = "";
        if (forward->table->prepare(forward->device, all[i]->dtype, all[i]->rows, all[i]->cols,
                                    PROVE_MS, why, sizeof(why)) != 0) {
            return fail(error, STATUS_UNSUPPORTED, "%s: %s", forward->accelerator->info.name, why);
        }
    }
    return STATUS_OK;
}

/* Cuts one block of inputs into its arrays; the same cuts in pinned and in device memory. */
static uint64_t inputs_cut(struct forward_device *forward, unsigned char *device) {
    const struct forward_config *config = &forward->config;
    uint64_t tokens = config->tokens_max;
    uint64_t half = forward->shape->head_dim / 2;
    uint64_t context = (forward->shape->context_tokens + config->layout->page_tokens - 1) /
                       config->layout->page_tokens;
    struct {
        uint64_t count;
        void *host;
        void *device;
    } parts[] = {{tokens, &forward->host_tokens, &forward->step.tokens},
                 {tokens, &forward->host_positions, &forward->step.positions},
                 {tokens, &forward->host_page_first, &forward->step.page_first},
                 {config->rows_max, &forward->host_sampled, &forward->sampled},
                 {tokens * half, &forward->host_cosine, &forward->step.cosine},
                 {tokens * half, &forward->host_sine, &forward->step.sine},
                 {config->rows_max * context, &forward->host_pages, &forward->step.pages}};
    uint64_t at = 0;
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        if (forward->staged != NULL) {
            unsigned char *host = forward->staged + at;
            unsigned char *there = device + at;
            memcpy(parts[i].host, &host, sizeof(host));
            memcpy(parts[i].device, &there, sizeof(there));
        }
        at += (parts[i].count * sizeof(uint32_t) + 255) / 256 * 256;
    }
    return at;
}

static enum status buffers_take(struct forward_device *forward, struct writer *error) {
    const struct forward_config *config = &forward->config;
    const struct model_config *shape = forward->shape;
    uint64_t tokens = config->tokens_max;
    uint64_t rows = tokens > config->rows_max ? tokens : config->rows_max;
    const struct {
        uint64_t count;
        uint64_t width;
        float **to;
    } buffers[] = {{tokens, shape->hidden, &forward->x},
                   {rows, shape->hidden, &forward->normed},
                   {tokens, forward->qkv_width, &forward->qkv},
                   {tokens, (uint64_t)shape->heads * shape->head_dim, &forward->mixed},
                   {tokens, shape->hidden, &forward->projected},
                   {tokens, (uint64_t)2 * shape->ffn, &forward->gate_up},
                   {config->rows_max, shape->vocab, &forward->logits}};
    enum status status = STATUS_OK;
    for (size_t i = 0; status == STATUS_OK && i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        status = take(forward, error, "a step's activations",
                      buffers[i].count * buffers[i].width * sizeof(float), buffers[i].to);
    }
    forward->inputs_bytes = inputs_cut(forward, NULL);
    if (status == STATUS_OK) {
        status = take(forward, error, "a step's inputs", forward->inputs_bytes, &forward->inputs);
    }
    if (status != STATUS_OK) {
        return status;
    }
    uint64_t logits = (uint64_t)config->rows_max * shape->vocab * sizeof(float);
    forward->staged = forward->table->host_alloc(forward->device, forward->inputs_bytes);
    forward->host_logits = forward->table->host_alloc(forward->device, logits);
    if (forward->staged == NULL || forward->host_logits == NULL) {
        return fail(error, STATUS_BUSY, "no %" PRIu64 " bytes of pinned memory for a step",
                    forward->inputs_bytes + logits);
    }
    (void)inputs_cut(forward, forward->inputs);
    return STATUS_OK;
}

static enum status pool_take(struct forward_device *forward, struct writer *error) {
    const struct forward_config *config = &forward->config;
    uint64_t bytes = (uint64_t)config->page_count * config->layout->page_bytes;
    enum status status =
        take(forward, error, "the KV pool (see --kv-tokens)", bytes, &forward->pool);
    if (status == STATUS_OK &&
        forward->table->host_map(forward->device, config->kv, bytes, &forward->view) != 0) {
        status =
            fail(error, STATUS_BUSY,
                 "the KV pool in the host's memory, %" PRIu64 " bytes, cannot be pinned", bytes);
    } else if (status == STATUS_OK) {
        forward->is_mapped = true;
    }
    return status;
}

enum status forward_device_create(const struct forward_config *config, struct writer *error,
                                  struct forward_device **out) {
    const struct model *model = config->model;
    const struct model_config *shape = &model->config;
    struct forward_device *forward = calloc(1, sizeof(*forward));
    CHECK(forward != NULL);
    forward->config = *config;
    forward->shape = shape;
    forward->accelerator = model->accelerator;
    forward->table = model->accelerator->table;
    forward->device = model->accelerator->device;
    forward->qkv_width = (shape->heads + 2 * shape->kv_heads) * shape->head_dim;
    enum status status = vectors_load(forward, error);
    if (status == STATUS_OK) {
        status = products_prepare(forward, error);
    }
    if (status == STATUS_OK) {
        status = buffers_take(forward, error);
    }
    if (status == STATUS_OK) {
        status = pool_take(forward, error);
    }
    if (status != STATUS_OK) {
        forward_device_destroy(forward);
        return status;
    }
    *out = forward;
    return STATUS_OK;
}

void forward_device_destroy(struct forward_device *forward) {
    if (forward == NULL) {
        return;
    }
    const struct device_table *table = forward->table;
    struct device *device = forward->device;
    table->attach(device);
    if (forward->is_mapped) {
        table->host_unmap(device, forward->config.kv);
    }
    for (uint32_t i = 0; forward->layers != NULL && i < forward->shape->layers; i++) {
        struct layer_vectors *layer = &forward->layers[i];
        table->release(device, layer->attention_norm);
        table->release(device, layer->ffn_norm);
        table->release(device, layer->qkv_bias);
        table->release(device, layer->q_norm);
        table->release(device, layer->k_norm);
    }
    free(forward->layers);
    void *const memory[] = {
        forward->final_norm, forward->pool,  forward->inputs,    forward->x,       forward->normed,
        forward->qkv,        forward->mixed, forward->projected, forward->gate_up, forward->logits};
    for (size_t i = 0; i < sizeof(memory) / sizeof(memory[0]); i++) {
        table->release(device, memory[i]);
    }
    table->host_release(device, forward->staged);
    table->host_release(device, forward->host_logits);
    free(forward);
}

/* ---- one step ---- */

static void lost(struct forward_device *forward, const char *what) {
    if (forward->failure == NULL) {
        const char *why = forward->table->failure(forward->device);
        (void)snprintf(forward->failure_text, sizeof(forward->failure_text), "%s: %s", what,
                       why != NULL ? why : "no end within 20 s");
        forward->failure = forward->failure_text;
    }
}

/* The angle is computed in double, on the host, as for the CPU. */
static void inputs_upload(struct forward_device *forward, const struct forward_input *input) {
    const struct model *model = forward->config.model;
    uint32_t half = forward->shape->head_dim / 2;
    uint32_t page_tokens = forward->config.layout->page_tokens;
    uint32_t count = 0;
    uint32_t pages = 0;
    forward->sampled_count = 0;
    for (uint32_t r = 0; r < input->row_count; r++) {
        const struct plan_row *row = &input->rows[r];
        uint32_t needed = (row->position + row->token_count + page_tokens - 1) / page_tokens;
        memcpy(forward->host_pages + pages, input->pages + row->page_first,
               needed * sizeof(uint32_t));
        for (uint32_t i = 0; i < row->token_count; i++, count++) {
            CHECK_OP(count, <, forward->config.tokens_max);
            uint32_t position = row->position + i;
            forward->host_tokens[count] = input->tokens[row->token_first + i];
            forward->host_positions[count] = position;
            forward->host_page_first[count] = pages;
            for (uint32_t j = 0; j < half; j++) {
                double angle = position * model->frequencies[j];
                forward->host_cosine[(size_t)count * half + j] = (float)cos(angle);
                forward->host_sine[(size_t)count * half + j] = (float)sin(angle);
            }
        }
        if (row->is_sampled) {
            forward->host_sampled[forward->sampled_count++] = count - 1;
        }
        pages += needed;
    }
    forward->step.count = count;
    const struct {
        const void *to;
        const void *from;
        uint64_t count;
    } parts[] = {{forward->step.tokens, forward->host_tokens, count},
                 {forward->step.positions, forward->host_positions, count},
                 {forward->step.page_first, forward->host_page_first, count},
                 {forward->sampled, forward->host_sampled, forward->sampled_count},
                 {forward->step.cosine, forward->host_cosine, (uint64_t)count * half},
                 {forward->step.sine, forward->host_sine, (uint64_t)count * half},
                 {forward->step.pages, forward->host_pages, pages}};
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        uint64_t offset = (uint64_t)((const unsigned char *)parts[i].to - forward->inputs);
        forward->table->upload(forward->device, forward->inputs + offset, parts[i].from,
                               parts[i].count * sizeof(uint32_t));
    }
}

static void pages_upload(struct forward_device *forward, const struct forward_input *input) {
    uint64_t bytes = forward->config.layout->page_bytes;
    for (uint32_t i = 0; i < input->stale_count; i++) {
        uint64_t at = input->stale[i] * bytes;
        forward->table->upload(forward->device, forward->pool + at, forward->config.kv + at, bytes);
    }
}

static struct device_kv layer_kv(const struct forward_device *forward, uint32_t layer) {
    const struct kv_layout *layout = forward->config.layout;
    uint32_t component = layout->layer_first[layer];
    return (struct device_kv){.base = forward->pool,
                              .page_bytes = layout->page_bytes,
                              .k_offset = layout->page_offset[component],
                              .v_offset = layout->page_offset[component + 1],
                              .row_bytes = layout->components[component].row_bytes,
                              .page_tokens = layout->page_tokens,
                              .kv_heads = forward->shape->kv_heads,
                              .head_dim = forward->shape->head_dim,
                              .dtype = forward->config.model->kv_dtype};
}

static void norm(struct forward_device *forward, const float *weight) {
    uint32_t hidden = forward->shape->hidden;
    forward->table->rms_norm(forward->device, forward->normed, hidden, forward->x, hidden, NULL,
                             weight, forward->step.count, 1, hidden, forward->shape->norm_epsilon);
}

/* Norms each head of a part of qkv by itself, in place. */
static void heads_norm(struct forward_device *forward, float *x, const float *weight,
                       uint32_t heads) {
    if (weight != NULL) {
        forward->table->rms_norm(forward->device, x, forward->qkv_width, x, forward->qkv_width,
                                 NULL, weight, forward->step.count, heads, forward->shape->head_dim,
                                 forward->shape->norm_epsilon);
    }
}

static struct device_matrix matrix_of(const struct kernels_weights *weights) {
    return (struct device_matrix){.dtype = weights->dtype,
                                  .rows = weights->rows,
                                  .cols = weights->cols,
                                  .data = weights->data};
}

static void product(struct forward_device *forward, const struct kernels_weights *weights,
                    const float *x, size_t x_stride, float *y, size_t y_stride, uint32_t count) {
    struct device_matrix matrix = matrix_of(weights);
    forward->table->product(forward->device, &matrix, x, x_stride, y, y_stride, count);
}

/* x += weights * from. */
static void project(struct forward_device *forward, const struct kernels_weights *weights,
                    const float *from, size_t stride) {
    uint32_t hidden = forward->shape->hidden;
    uint32_t count = forward->step.count;
    product(forward, weights, from, stride, forward->projected, hidden, count);
    forward->table->add(forward->device, forward->x, hidden, forward->projected, hidden, count,
                        hidden);
}

static void layer_enqueue(struct forward_device *forward, uint32_t index) {
    const struct device_table *table = forward->table;
    struct device *device = forward->device;
    const struct model_config *shape = forward->shape;
    const struct model_layer *layer = &forward->config.model->layers[index];
    const struct layer_vectors *vectors = &forward->layers[index];
    const struct device_step *step = &forward->step;
    uint32_t q_width = shape->heads * shape->head_dim;
    uint32_t kv_width = shape->kv_heads * shape->head_dim;
    uint32_t qkv_width = forward->qkv_width;
    float *k = forward->qkv + q_width;
    struct device_kv kv = layer_kv(forward, index);
    norm(forward, vectors->attention_norm);
    product(forward, &layer->qkv, forward->normed, shape->hidden, forward->qkv, qkv_width,
            step->count);
    if (vectors->qkv_bias != NULL) {
        table->add(device, forward->qkv, qkv_width, vectors->qkv_bias, 0, step->count, qkv_width);
    }
    heads_norm(forward, forward->qkv, vectors->q_norm, shape->heads);
    heads_norm(forward, k, vectors->k_norm, shape->kv_heads);
    table->rotary(device, step, forward->qkv, qkv_width, shape->heads + shape->kv_heads,
                  shape->head_dim);
    table->store(device, &kv, step, k, k + kv_width, qkv_width);
    table->mark(device, DEVICE_COMPUTE, MARK_STORED);
    table->follow(device, DEVICE_COPY, MARK_STORED);
    table->mirror(device, &kv, step, forward->view);
    table->mark(device, DEVICE_COPY, MARK_COPIED + index % 2);
    table->attention(device, &kv, step, forward->qkv, qkv_width, forward->mixed, q_width,
                     shape->heads, (float)(1.0 / sqrt(shape->head_dim)));
    project(forward, &layer->output, forward->mixed, q_width);
    norm(forward, vectors->ffn_norm);
    product(forward, &layer->gate_up, forward->normed, shape->hidden, forward->gate_up,
            (size_t)2 * shape->ffn, step->count);
    table->silu_mul(device, forward->gate_up, (size_t)2 * shape->ffn, step->count, shape->ffn);
    project(forward, &layer->down, forward->gate_up, (size_t)2 * shape->ffn);
}

static void head_enqueue(struct forward_device *forward) {
    const struct model_config *shape = forward->shape;
    const struct device_table *table = forward->table;
    uint32_t count = forward->sampled_count;
    table->rms_norm(forward->device, forward->normed, shape->hidden, forward->x, shape->hidden,
                    forward->sampled, forward->final_norm, count, 1, shape->hidden,
                    shape->norm_epsilon);
    product(forward, &forward->config.model->head, forward->normed, shape->hidden, forward->logits,
            shape->vocab, count);
    table->download(forward->device, forward->host_logits, forward->logits,
                    (uint64_t)count * shape->vocab * sizeof(float));
    table->mark(forward->device, DEVICE_COMPUTE, MARK_LOGITS);
}

struct rows_loop {
    const struct forward_device *forward;
    uint32_t component;
};

static void rows_part(void *context, uint32_t part, uint32_t worker) {
    (void)worker;
    const struct rows_loop *loop = context;
    const struct forward_device *forward = loop->forward;
    const struct forward_config *config = &forward->config;
    uint32_t page_tokens = config->layout->page_tokens;
    for (uint32_t n = part * ROWS_A_PART; n < forward->step.count && n < (part + 1) * ROWS_A_PART;
         n++) {
        uint32_t position = forward->host_positions[n];
        uint32_t page = forward->host_pages[forward->host_page_first[n] + position / page_tokens];
        for (uint32_t c = 0; c < 2; c++) {
            config->on_row(config->on_row_context, page, loop->component + c,
                           position % page_tokens);
        }
    }
}

/* Until the layer's rows are in the host's pool. False: the device is lost. */
static bool layer_wait(struct forward_device *forward, uint32_t index) {
    if (accelerator_wait(forward->accelerator, MARK_COPIED + index % 2, span_ms(WAIT_MS)) !=
        STATUS_OK) {
        lost(forward, "a layer's rows");
        return false;
    }
    return true;
}

/* Says that they are. False: the rest need not be computed. */
static bool layer_report(struct forward_device *forward, uint32_t index, forward_on_layer on_layer,
                         void *context) {
    const struct forward_config *config = &forward->config;
    if (config->on_row != NULL) {
        struct rows_loop loop = {.forward = forward,
                                 .component = config->layout->layer_first[index]};
        team_run(config->team, (forward->step.count + ROWS_A_PART - 1) / ROWS_A_PART, rows_part,
                 &loop);
    }
    return forward_tell(on_layer, context, index);
}

bool forward_device_run(struct forward_device *forward, const struct forward_input *input,
                        forward_on_layer on_layer, void *context) {
    const struct model *model = forward->config.model;
    forward->sampled_count = 0;
    if (forward->failure != NULL) {
        return true;
    }
    forward->table->attach(forward->device);
    inputs_upload(forward, input);
    if (forward->step.count == 0) {
        return true;
    }
    team_set_alone(forward->config.team, false);
    pages_upload(forward, input);
    struct device_matrix embedding = matrix_of(&model->embedding);
    forward->table->embed(forward->device, &embedding, &forward->step, forward->x);
    for (uint32_t i = 0; i < forward->shape->layers; i++) {
        layer_enqueue(forward, i);
        if (i > 0 && !layer_wait(forward, i - 1)) {
            return true;
        }
        if (i > 0 && !layer_report(forward, i - 1, on_layer, context)) {
            return !layer_wait(forward, i); /* it still writes this one's */
        }
    }
    head_enqueue(forward);
    uint32_t last = forward->shape->layers - 1;
    if (!layer_wait(forward, last)) {
        return true;
    }
    bool is_wanted = layer_report(forward, last, on_layer, context);
    if (accelerator_wait(forward->accelerator, MARK_LOGITS, span_ms(WAIT_MS)) != STATUS_OK) {
        lost(forward, "a step's end");
    }
    return is_wanted;
}

float *forward_device_logits(struct forward_device *forward, uint32_t n) {
    CHECK_OP(n, <, forward->sampled_count);
    return forward->host_logits + (size_t)n * forward->shape->vocab;
}

const char *forward_device_failure(const struct forward_device *forward) {
    return forward->failure;
}
