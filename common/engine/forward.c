#include "engine/forward.h"

#include "base/check.h"
#include "engine/block.h"
#include "engine/forward_device.h"
#include "engine/model_weights.h"
#include "engine/team.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Where one token of the step stands: its position and its sequence's pages. */
struct token_place {
    uint32_t token;
    uint32_t position;
    const uint32_t *pages;
};

/* Neighbouring tokens of one sequence, whose attention is computed together. */
struct tile {
    uint32_t first;  /* of the step's tokens */
    uint32_t row;    /* of the activations: where the first one's result goes */
    uint32_t tokens; /* 1 to tile_tokens */
};

/* Rows as a product wants them that does not read them as they are, at most tokens_max (rows_max)
 * of them. */
struct prepared {
    struct kernels_quants quants; /* only for I8 weights */
    uint16_t *halves;             /* only for BF16 weights that meet rounded rows */
};

struct forward {
    struct forward_config config;
    struct forward_device *device; /* does everything below instead; NULL: the CPU */
    const struct kernels *kernels;
    struct arena memory; /* of all that follows */
    uint32_t token_count;
    uint32_t sampled_count;
    uint32_t row_count;         /* rows of activations that the loops go through: the step's tokens,
                                   and at last the sampled ones */
    struct token_place *places; /* [tokens_max] */
    uint32_t *sampled;          /* [rows_max]: index of each sampled row's last token */
    struct tile *tiles;         /* [tokens_max] */
    uint32_t tile_count;
    uint32_t tile_tokens;
    bool are_apart;   /* rows of one token each, of which none is long beside the others */
    float *x;         /* [tokens_max, hidden_stride]: the residual stream */
    float *normed;    /* [tokens_max, hidden_stride] */
    float *qkv;       /* [tokens_max, qkv_stride] */
    float *mixed;     /* [tokens_max, q_stride]: attention's result */
    float *projected; /* [tokens_max, hidden_stride] */
    float *gate_up;   /* [tokens_max, ffn_stride] */
    float *cosine;    /* [tokens_max, head_dim / 2] */
    float *sine;
    float *logits;                /* [rows_max, vocab_stride] */
    struct prepared prepared;     /* for products of hidden, or of q's width: one at a time */
    struct prepared prepared_ffn; /* what the same loop makes of those */
    size_t qkv_stride;
    size_t q_stride;
    size_t hidden_stride;
    size_t ffn_stride;
    size_t vocab_stride;
};

/* Query rows of one KV head that an attention tile has: as many as the kernels keep at hand. */
#define TILE_QUERIES    96u
#define PARTS_EACH      4u /* of a loop, for each thread */
#define PART_PANELS_MIN 8u
#define PART_ROWS       128u /* of many, about */
#define PART_ROWS_UNIT  32u  /* two tiles of the matrix instructions */
#define ROWS_MANY       128u /* for each thread */

/* Floats from one row to the next: whole panels, and an odd number of cache lines, so that the same
 * column of many rows does not fall into a few sets of the cache. */
static size_t padded(uint32_t width) {
    return (size_t)(kernels_panels(width) | 1) * KERNELS_PANEL;
}

static void *buffer_take(struct forward *forward, size_t count, size_t width, size_t size) {
    return arena_take_unset(&forward->memory, count * width * size);
}

static struct prepared prepared_take(struct forward *forward, uint32_t width) {
    const struct forward_config *config = &forward->config;
    enum kernels_dtype dtype = config->model->embedding.dtype;
    size_t rows = config->tokens_max > config->rows_max ? config->tokens_max : config->rows_max;
    struct prepared prepared = {.halves = NULL};
    if (dtype == KERNELS_BF16 && forward->kernels->round != NULL) {
        prepared.halves = buffer_take(forward, rows, kernels_halves(width), sizeof(uint16_t));
    }
    if (dtype == KERNELS_I8) {
        uint32_t groups = kernels_groups(width);
        prepared.quants.numbers = buffer_take(forward, rows, groups, KERNELS_GROUP);
        prepared.quants.scales = buffer_take(forward, rows, groups, sizeof(float));
        prepared.quants.offsets = buffer_take(forward, rows, groups, sizeof(int32_t));
    }
    return prepared;
}

static void buffers_lay(struct forward *forward) {
    const struct forward_config *config = &forward->config;
    const struct model_config *shape = &config->model->config;
    size_t tokens = config->tokens_max;
    uint32_t q_width = shape->heads * shape->head_dim;
    forward->places = buffer_take(forward, tokens, 1, sizeof(*forward->places));
    forward->sampled = buffer_take(forward, config->rows_max, 1, sizeof(*forward->sampled));
    forward->tiles = buffer_take(forward, tokens, 1, sizeof(*forward->tiles));
    forward->x = buffer_take(forward, tokens, forward->hidden_stride, sizeof(float));
    forward->normed = buffer_take(forward, tokens, forward->hidden_stride, sizeof(float));
    forward->qkv = buffer_take(forward, tokens, forward->qkv_stride, sizeof(float));
    forward->mixed = buffer_take(forward, tokens, forward->q_stride, sizeof(float));
    forward->projected = buffer_take(forward, tokens, forward->hidden_stride, sizeof(float));
    forward->gate_up = buffer_take(forward, tokens, forward->ffn_stride, sizeof(float));
    forward->cosine = buffer_take(forward, tokens, shape->head_dim / 2, sizeof(float));
    forward->sine = buffer_take(forward, tokens, shape->head_dim / 2, sizeof(float));
    forward->logits = buffer_take(forward, config->rows_max, forward->vocab_stride, sizeof(float));
    forward->prepared = prepared_take(forward, shape->hidden > q_width ? shape->hidden : q_width);
    forward->prepared_ffn = prepared_take(forward, shape->ffn);
}

struct forward *forward_create(const struct forward_config *config) {
    struct forward *forward = calloc(1, sizeof(*forward));
    CHECK(forward != NULL);
    const struct model_config *shape = &config->model->config;
    uint32_t q_width = shape->heads * shape->head_dim;
    forward->config = *config;
    if (config->model->accelerator != NULL) {
        if (forward_device_create(config, config->error, &forward->device) != STATUS_OK) {
            free(forward);
            return NULL;
        }
        return forward;
    }
    forward->kernels = config->model->kernels;
    uint32_t group = shape->heads / shape->kv_heads;
    forward->tile_tokens = group < TILE_QUERIES ? TILE_QUERIES / group : 1;
    forward->qkv_stride = padded(q_width + 2 * shape->kv_heads * shape->head_dim);
    forward->q_stride = padded(q_width);
    forward->hidden_stride = padded(shape->hidden);
    forward->ffn_stride = padded(2 * shape->ffn);
    forward->vocab_stride = padded(shape->vocab);
    buffers_lay(forward); /* once to count */
    if (block_take(&forward->memory, "the activations of a step",
                   "ask for fewer tokens in a step, or give the process more memory",
                   config->error) != STATUS_OK) {
        free(forward);
        return NULL;
    }
    buffers_lay(forward);
    return forward;
}

void forward_destroy(struct forward *forward) {
    if (forward == NULL) {
        return;
    }
    forward_device_destroy(forward->device);
    block_free(&forward->memory);
    free(forward);
}

/* ---- loops over the team ---- */

/* One loop: which layer, and what its parts are made of. */
struct loop {
    struct forward *forward;
    const struct model_layer *layer; /* NULL before the first and after the last */
    uint32_t layer_index;
    uint32_t parts; /* of the rows, or of a product's panels */
    struct kernels_gemm gemm;
    const float *norm;                  /* weights of the norm that follows an add */
    const struct kernels_weights *next; /* of the product that the rows are made for */
};

static uint32_t ceil_div(uint32_t count, uint32_t by) {
    return (count + by - 1) / by;
}

/* Where a part begins when `parts` share `count` in whole units. What does not divide goes to the
 * first ones, so that threads that take turns end together. */
static uint32_t part_first(uint32_t count, uint32_t unit, uint32_t parts, uint32_t part) {
    uint32_t units = ceil_div(count, unit);
    uint32_t more = units % parts;
    uint32_t first = unit * (units / parts * part + (part < more ? part : more));
    return first < count ? first : count;
}

/* With many rows every loop shares them in the same way, products too, so that a part's rows and
 * results mostly stay in one core's cache; with few, products share their panels. */
static bool rows_are_many(const struct forward *forward) {
    uint32_t threads = team_threads(forward->config.team);
    return threads > 1 && forward->row_count >= ROWS_MANY * threads;
}

/* One part when there is one thread, else a few for each, to even out their speeds. */
static uint32_t row_parts(const struct forward *forward) {
    uint32_t threads = team_threads(forward->config.team);
    uint32_t count = forward->row_count;
    if (threads == 1) {
        return 1;
    }
    if (!rows_are_many(forward)) {
        return count < PARTS_EACH * threads ? count : PARTS_EACH * threads;
    }
    uint32_t each = count / (PART_ROWS * threads);
    return threads * (each < 1 ? 1 : each);
}

/* As many for each thread, so that none waits for another, and none so small that it has no room
 * for the kernels' widest tile. */
static uint32_t panel_parts(const struct forward *forward, uint32_t panels) {
    uint32_t threads = team_threads(forward->config.team);
    uint32_t each = panels / (PART_PANELS_MIN * threads);
    each = each < 1 ? 1 : each > PARTS_EACH ? PARTS_EACH : each;
    return threads == 1 ? 1 : threads * each;
}

static uint32_t part_row(const struct loop *loop, uint32_t part) {
    uint32_t unit = rows_are_many(loop->forward) ? PART_ROWS_UNIT : 1;
    return part_first(loop->forward->row_count, unit, loop->parts, part);
}

static void rows_run(struct loop *loop, team_fn fn) {
    loop->parts = row_parts(loop->forward);
    team_run(loop->forward->config.team, loop->parts, fn, loop);
}

/* The product of a part's rows, where rows are shared. */
static struct kernels_gemm part_gemm(const struct loop *loop, uint32_t part) {
    uint32_t first = part_row(loop, part);
    return kernels_gemm_rows(&loop->gemm, first, part_row(loop, part + 1) - first);
}

static void gemm_part(void *context, uint32_t part, uint32_t worker) {
    (void)worker;
    struct loop *loop = context;
    uint32_t panels = kernels_panels(loop->gemm.weights->rows);
    if (rows_are_many(loop->forward)) {
        struct kernels_gemm some = part_gemm(loop, part);
        loop->forward->kernels->gemm(&some, 0, panels);
        return;
    }
    /* Kernels take four panels at a time, so fours are not torn where every thread gets as many,
     * else pairs. */
    uint32_t unit = panels % (4 * team_threads(loop->forward->config.team)) == 0 ? 4 : 2;
    loop->forward->kernels->gemm(&loop->gemm, part_first(panels, unit, loop->parts, part),
                                 part_first(panels, unit, loop->parts, part + 1));
}

/* x[count] becomes columns [first, first + count) of row n of what a product with these weights
 * reads, where that is not x itself. A part of the columns begins and ends with groups. */
static void columns_prepare(const struct kernels *kernels, const struct prepared *to,
                            const struct kernels_weights *weights, uint32_t n, const float *x,
                            uint32_t first, uint32_t count) {
    if (weights->dtype == KERNELS_I8) {
        size_t group = (size_t)n * kernels_groups(weights->cols) + first / KERNELS_GROUP;
        const struct kernels_quants quants = {.numbers = to->quants.numbers + group * KERNELS_GROUP,
                                              .scales = to->quants.scales + group,
                                              .offsets = to->quants.offsets + group};
        kernels->quantize(&quants, 0, x, count);
    } else if (to->halves != NULL) {
        kernels->round(to->halves + (size_t)n * kernels_halves(weights->cols) + first, x, count);
    }
}

static void row_prepare(const struct forward *forward, const struct kernels_weights *weights,
                        uint32_t n, const float *x) {
    columns_prepare(forward->kernels, &forward->prepared, weights, n, x, 0, weights->cols);
}

/* The rows are prepared by whoever made them, while they are in the cache. */
static void gemm_set(struct loop *loop, const struct kernels_weights *weights, const float *x,
                     size_t x_stride, const struct prepared *prepared, float *y, size_t y_stride) {
    loop->gemm = (struct kernels_gemm){.weights = weights,
                                       .x = x,
                                       .x_stride = x_stride,
                                       .y = y,
                                       .y_stride = y_stride,
                                       .count = loop->forward->row_count,
                                       .quants = prepared->quants,
                                       .halves = prepared->halves};
}

static void gemm_run(struct loop *loop) {
    const struct forward *forward = loop->forward;
    uint32_t panels = kernels_panels(loop->gemm.weights->rows);
    loop->parts = rows_are_many(forward) ? row_parts(forward) : panel_parts(forward, panels);
    team_run(forward->config.team, loop->parts, gemm_part, loop);
}

/* ---- the stages ---- */

/* Embedding, the position's rotation, and the first norm. The angle is computed in double. */
static void begin_part(void *context, uint32_t part, uint32_t worker) {
    (void)worker;
    struct loop *loop = context;
    struct forward *forward = loop->forward;
    const struct model *model = forward->config.model;
    uint32_t hidden = model->config.hidden;
    uint32_t half = model->config.head_dim / 2;
    for (uint32_t n = part_row(loop, part), end = part_row(loop, part + 1); n < end; n++) {
        const struct token_place *place = &forward->places[n];
        float *x = forward->x + n * forward->hidden_stride;
        kernels_weights_row(&model->embedding, place->token, x);
        for (uint32_t i = 0; i < half; i++) {
            double angle = place->position * model->frequencies[i];
            forward->cosine[(size_t)n * half + i] = (float)cos(angle);
            forward->sine[(size_t)n * half + i] = (float)sin(angle);
        }
        float *normed = forward->normed + n * forward->hidden_stride;
        forward->kernels->rms_norm(normed, x, loop->norm, hidden, model->config.norm_epsilon);
        row_prepare(forward, loop->next, n, normed);
    }
}

static void row_store(const struct forward *forward, const struct token_place *place,
                      uint32_t component, const float *values, uint32_t count) {
    const struct forward_config *config = &forward->config;
    uint32_t page = place->pages[place->position / config->layout->page_tokens];
    uint32_t in_page = place->position % config->layout->page_tokens;
    forward->kernels->store(config->kv +
                                layout_row_offset(config->layout, page, component, in_page),
                            config->model->kv_dtype, values, count);
    if (config->on_row != NULL) {
        config->on_row(config->on_row_context, page, component, in_page);
    }
}

/* Norms `heads` heads, each by itself. */
static void heads_norm(const struct forward *forward, float *x, const float *weight,
                       uint32_t heads) {
    const struct model_config *shape = &forward->config.model->config;
    for (uint32_t h = 0; h < heads; h++) {
        float *head = x + (size_t)h * shape->head_dim;
        forward->kernels->rms_norm(head, head, weight, shape->head_dim, shape->norm_epsilon);
    }
}

/* Finishes q, k and v (bias, norm of the heads, rotation) and writes k and v into the pool. */
static void token_store(const struct loop *loop, uint32_t n) {
    const struct forward *forward = loop->forward;
    const struct model_config *shape = &forward->config.model->config;
    uint32_t half = shape->head_dim / 2;
    uint32_t q_width = shape->heads * shape->head_dim;
    uint32_t kv_width = shape->kv_heads * shape->head_dim;
    uint32_t component = forward->config.layout->layer_first[loop->layer_index];
    float *q = forward->qkv + n * forward->qkv_stride;
    const float *cosine = forward->cosine + (size_t)n * half;
    const float *sine = forward->sine + (size_t)n * half;
    if (loop->layer->qkv_bias != NULL) {
        forward->kernels->add(q, loop->layer->qkv_bias, (size_t)q_width + 2 * kv_width);
    }
    if (loop->layer->q_norm != NULL) {
        heads_norm(forward, q, loop->layer->q_norm, shape->heads);
        heads_norm(forward, q + q_width, loop->layer->k_norm, shape->kv_heads);
    }
    forward->kernels->rotary(q, cosine, sine, shape->heads + shape->kv_heads, shape->head_dim);
    row_store(forward, &forward->places[n], component, q + q_width, kv_width);
    row_store(forward, &forward->places[n], component + 1, q + q_width + kv_width, kv_width);
}

static void store_part(void *context, uint32_t part, uint32_t worker) {
    (void)worker;
    struct loop *loop = context;
    for (uint32_t n = part_row(loop, part), end = part_row(loop, part + 1); n < end; n++) {
        token_store(loop, n);
    }
}

/* KV heads [head, head_end) of one tile. */
static void tile_attend(const struct loop *loop, const struct tile *tile, uint32_t head,
                        uint32_t head_end) {
    const struct forward *forward = loop->forward;
    const struct model *model = forward->config.model;
    const struct model_config *shape = &model->config;
    const struct kv_layout *layout = forward->config.layout;
    uint32_t component = layout->layer_first[loop->layer_index];
    const struct token_place *place = &forward->places[tile->first];
    struct kernels_attention attention = {.q = forward->qkv + tile->first * forward->qkv_stride,
                                          .q_stride = forward->qkv_stride,
                                          .out = forward->mixed + tile->row * forward->q_stride,
                                          .out_stride = forward->q_stride,
                                          .tokens = tile->tokens,
                                          .base = forward->config.kv,
                                          .page_bytes = layout->page_bytes,
                                          .k_offset = layout->page_offset[component],
                                          .v_offset = layout->page_offset[component + 1],
                                          .row_bytes = layout->components[component].row_bytes,
                                          .pages = place->pages,
                                          .page_tokens = layout->page_tokens,
                                          .length = place->position + 1,
                                          .heads = shape->heads,
                                          .kv_heads = shape->kv_heads,
                                          .head_dim = shape->head_dim,
                                          .kv_dtype = model->kv_dtype,
                                          .scale = (float)(1.0 / sqrt(shape->head_dim))};
    forward->kernels->attention(&attention, head, head_end);
}

/* One part is one tile and one KV head, or a whole tile when there is one thread. */
static void attention_part(void *context, uint32_t part, uint32_t worker) {
    (void)worker;
    struct loop *loop = context;
    struct forward *forward = loop->forward;
    uint32_t kv_heads = forward->config.model->config.kv_heads;
    bool is_whole = team_threads(forward->config.team) == 1;
    uint32_t head = is_whole ? 0 : part % kv_heads;
    tile_attend(loop, &forward->tiles[is_whole ? part : part / kv_heads], head,
                is_whole ? kv_heads : head + 1);
}

/* Attention's rows come together from several parts, so they are prepared on their own. */
static void mixed_part(void *context, uint32_t part, uint32_t worker) {
    (void)worker;
    struct loop *loop = context;
    struct forward *forward = loop->forward;
    for (uint32_t n = part_row(loop, part), end = part_row(loop, part + 1); n < end; n++) {
        row_prepare(forward, loop->next, n, forward->mixed + n * forward->q_stride);
    }
}

/* The three before in one, for rows that see nothing of each other: no thread waits in between, and
 * what one has made it reads itself. */
static void token_part(void *context, uint32_t part, uint32_t worker) {
    (void)worker;
    struct loop *loop = context;
    struct forward *forward = loop->forward;
    for (uint32_t n = part_row(loop, part), end = part_row(loop, part + 1); n < end; n++) {
        token_store(loop, n);
        tile_attend(loop, &forward->tiles[n], 0, forward->config.model->config.kv_heads);
        row_prepare(forward, loop->next, n, forward->mixed + n * forward->q_stride);
    }
}

/* x += projected, then the next norm. */
static void add_norm_part(void *context, uint32_t part, uint32_t worker) {
    (void)worker;
    struct loop *loop = context;
    struct forward *forward = loop->forward;
    const struct model_config *shape = &forward->config.model->config;
    for (uint32_t n = part_row(loop, part), end = part_row(loop, part + 1); n < end; n++) {
        float *x = forward->x + n * forward->hidden_stride;
        forward->kernels->add(x, forward->projected + n * forward->hidden_stride, shape->hidden);
        float *normed = forward->normed + n * forward->hidden_stride;
        forward->kernels->rms_norm(normed, x, loop->norm, shape->hidden, shape->norm_epsilon);
        row_prepare(forward, loop->next, n, normed);
    }
}

/* Panels of the gate, if the rows above them begin with a panel too; else 0. */
static uint32_t gate_panels(const struct forward *forward) {
    uint32_t ffn = forward->config.model->config.ffn;
    return ffn % KERNELS_PANEL == 0 ? ffn / KERNELS_PANEL : 0;
}

/* The same columns of gate and up, and the activation of them, written over the gate. */
static void activation_part(void *context, uint32_t part, uint32_t worker) {
    (void)worker;
    struct loop *loop = context;
    struct forward *forward = loop->forward;
    uint32_t ffn = forward->config.model->config.ffn;
    struct kernels_gemm gemm = loop->gemm;
    uint32_t row = 0;
    uint32_t first = 0;
    uint32_t end = ffn;
    if (loop->parts == 1 || rows_are_many(forward)) {
        row = part_row(loop, part);
        gemm = part_gemm(loop, part);
        forward->kernels->gemm(&gemm, 0, kernels_panels(2 * ffn));
    } else {
        uint32_t panels = gate_panels(forward);
        uint32_t unit = KERNELS_GROUP / KERNELS_PANEL;
        uint32_t panel = part_first(panels, unit, loop->parts, part);
        uint32_t panel_end = part_first(panels, unit, loop->parts, part + 1);
        forward->kernels->gemm(&gemm, panel, panel_end);
        forward->kernels->gemm(&gemm, panels + panel, panels + panel_end);
        first = panel * KERNELS_PANEL;
        end = panel_end * KERNELS_PANEL;
    }
    for (uint32_t n = row; n < row + gemm.count; n++) {
        float *gate = forward->gate_up + n * forward->ffn_stride + first;
        forward->kernels->silu_mul(gate, gate, gate + ffn, end - first);
        columns_prepare(forward->kernels, &forward->prepared_ffn, loop->next, n, gate, first,
                        end - first);
    }
}

/* From here on only the sampled tokens count: their rows move to the front, each is a tile. What
 * the others would still compute is read by nobody. */
static void rows_narrow(struct forward *forward) {
    for (uint32_t i = 0; i < forward->sampled_count; i++) {
        uint32_t n = forward->sampled[i]; /* upwards, so n >= i */
        memmove(forward->x + i * forward->hidden_stride, forward->x + n * forward->hidden_stride,
                forward->hidden_stride * sizeof(float));
        forward->tiles[i] = (struct tile){.first = n, .row = i, .tokens = 1};
    }
    forward->tile_count = forward->sampled_count;
    forward->row_count = forward->sampled_count;
}

/* From q, k and v to what the output's product reads. following: NULL after the last layer. False:
 * what comes behind is not wanted. */
static bool attention_run(struct loop *loop, const struct model_layer *following,
                          forward_on_layer on_layer, void *context) {
    struct forward *forward = loop->forward;
    struct team *team = forward->config.team;
    uint32_t kv_heads = forward->config.model->config.kv_heads;
    loop->next = &loop->layer->output;
    if (forward->are_apart && forward->sampled_count == forward->token_count) {
        loop->parts = rows_are_many(forward) ? row_parts(forward) : forward->row_count;
        team_run(team, loop->parts, token_part, loop);
        return forward_tell(on_layer, context, loop->layer_index);
    }
    rows_run(loop, store_part);
    if (!forward_tell(on_layer, context, loop->layer_index)) {
        return false;
    }
    if (following == NULL) {
        rows_narrow(forward);
    }
    team_run(team, forward->tile_count * (team_threads(team) == 1 ? 1 : kv_heads), attention_part,
             loop);
    if (loop->next->dtype == KERNELS_I8 || forward->prepared.halves != NULL) {
        rows_run(loop, mixed_part);
    }
    return true;
}

/* From the normed rows to the activation. */
static void activation_run(struct loop *loop) {
    struct forward *forward = loop->forward;
    gemm_set(loop, &loop->layer->gate_up, forward->normed, forward->hidden_stride,
             &forward->prepared, forward->gate_up, forward->ffn_stride);
    uint32_t panels = gate_panels(forward);
    loop->next = &loop->layer->down;
    loop->parts = rows_are_many(forward) ? row_parts(forward)
                  : panels > 0           ? panel_parts(forward, panels)
                                         : 1;
    team_run(forward->config.team, loop->parts, activation_part, loop);
}

/* False: the rest is not wanted. */
static bool layer_run(struct loop *loop, const struct model_layer *following,
                      forward_on_layer on_layer, void *context) {
    struct forward *forward = loop->forward;
    const struct model_layer *layer = loop->layer;
    gemm_set(loop, &layer->qkv, forward->normed, forward->hidden_stride, &forward->prepared,
             forward->qkv, forward->qkv_stride);
    gemm_run(loop);
    if (!attention_run(loop, following, on_layer, context)) {
        return false;
    }
    if (forward->row_count == 0) {
        return true;
    }
    gemm_set(loop, &layer->output, forward->mixed, forward->q_stride, &forward->prepared,
             forward->projected, forward->hidden_stride);
    gemm_run(loop);
    loop->norm = layer->ffn_norm;
    loop->next = &layer->gate_up;
    rows_run(loop, add_norm_part);
    activation_run(loop);
    gemm_set(loop, &layer->down, forward->gate_up, forward->ffn_stride, &forward->prepared_ffn,
             forward->projected, forward->hidden_stride);
    gemm_run(loop);
    const struct model *model = forward->config.model;
    loop->norm = following == NULL ? model->final_norm : following->attention_norm;
    loop->next = following == NULL ? &model->head : &following->qkv;
    rows_run(loop, add_norm_part);
    return true;
}

static void places_make(struct forward *forward, const struct forward_input *input) {
    uint32_t count = 0;
    uint32_t sampled = 0;
    uint64_t length = 0;
    uint32_t longest = 0;
    forward->tile_count = 0;
    for (uint32_t r = 0; r < input->row_count; r++) {
        const struct plan_row *row = &input->rows[r];
        for (uint32_t i = 0; i < row->token_count; i++) {
            CHECK_OP(count, <, forward->config.tokens_max);
            if (i % forward->tile_tokens == 0) {
                forward->tiles[forward->tile_count++] = (struct tile){.first = count, .row = count};
            }
            forward->tiles[forward->tile_count - 1].tokens++;
            forward->places[count++] =
                (struct token_place){.token = input->tokens[row->token_first + i],
                                     .position = row->position + i,
                                     .pages = input->pages + row->page_first};
        }
        if (row->is_sampled) {
            forward->sampled[sampled++] = count - 1;
        }
        length += row->position;
        longest = row->position > longest ? row->position : longest;
    }
    /* A long row's heads are better shared: nobody has anything else to do meanwhile. */
    uint32_t threads = team_threads(forward->config.team);
    forward->are_apart =
        count == input->row_count && (threads == 1 || (uint64_t)longest * 2 * threads <= length);
    forward->token_count = count;
    forward->row_count = count;
    forward->sampled_count = sampled;
}

bool forward_run(struct forward *forward, const struct forward_input *input,
                 forward_on_layer on_layer, void *context) {
    const struct model *model = forward->config.model;
    const struct model_config *shape = &model->config;
    if (forward->device != NULL) {
        return forward_device_run(forward->device, input, on_layer, context);
    }
    places_make(forward, input);
    if (forward->token_count == 0) {
        return true;
    }
    team_set_alone(forward->config.team,
                   (uint64_t)forward->token_count * model->info.parameter_count <
                       forward->config.alone_below);
    struct loop loop = {
        .forward = forward, .norm = model->layers[0].attention_norm, .next = &model->layers[0].qkv};
    rows_run(&loop, begin_part);
    for (uint32_t i = 0; i < shape->layers; i++) {
        bool is_last = i + 1 == shape->layers;
        loop.layer = &model->layers[i];
        loop.layer_index = i;
        if (!layer_run(&loop, is_last ? NULL : &model->layers[i + 1], on_layer, context)) {
            return false;
        }
    }
    gemm_set(&loop, &model->head, forward->normed, forward->hidden_stride, &forward->prepared,
             forward->logits, forward->vocab_stride);
    gemm_run(&loop);
    return true;
}

float *forward_logits(struct forward *forward, uint32_t n) {
    if (forward->device != NULL) {
        return forward_device_logits(forward->device, n);
    }
    CHECK_OP(n, <, forward->sampled_count);
    return forward->logits + n * forward->vocab_stride;
}

const char *forward_failure(const struct forward *forward) {
    return forward->device != NULL ? forward_device_failure(forward->device) : NULL;
}
