/* Products with I8 weights, in the bits of every CPU backend.
 *
 * A group's sum of products is exact, so threads may share it in any way; across groups there is
 * one chain of fused multiply-adds from the first group upwards, in one thread. So the bits of a
 * row depend neither on its neighbours nor on which of the two kernels computes it: few rows are
 * the reading of the weights, so they are read once, without a stop, and meet each row on the way;
 * many rows take tiles through shared memory. Both sides lie as rows of an I8 matrix. */
#include "kernels/cuda/internal.h"

#include "kernels/convert.h"
#include "kernels/cuda/block.h"

#include <math.h>

#define PIECE        16u /* numbers that one load brings */
#define GROUP_PIECES (KERNELS_GROUP / PIECE)

struct rows {
    const unsigned char *data;
    uint32_t row_bytes;
    uint32_t groups;
    uint32_t count;
};

static struct rows rows_of(const void *data, uint32_t cols, uint32_t count) {
    struct rows rows = {(const unsigned char *)data, device_row_bytes(KERNELS_I8, cols),
                        kernels_groups(cols), count};
    return rows;
}

static __device__ const int4 *row_pieces(const struct rows &rows, uint32_t row) {
    return (const int4 *)(rows.data + (size_t)row * rows.row_bytes);
}
static __device__ float row_scale(const struct rows &rows, uint32_t row, uint32_t group) {
    return ((const float *)(row_pieces(rows, row) + rows.groups * GROUP_PIECES))[group];
}

static __device__ int dot(int4 a, int4 b, int sum) {
    sum = __dp4a(a.x, b.x, sum);
    sum = __dp4a(a.y, b.y, sum);
    sum = __dp4a(a.z, b.z, sum);
    return __dp4a(a.w, b.w, sum);
}

/* ---- x, rounded ---- */

#define ROUND_VALUES  8u /* of a thread */
#define ROUND_LANES   (KERNELS_GROUP / ROUND_VALUES)
#define ROUND_GROUPS  16u
#define ROUND_THREADS (ROUND_GROUPS * ROUND_LANES)

__global__ static void round_rows(unsigned char *to, uint32_t row_bytes, uint32_t groups,
                                  const float *x, size_t x_stride, uint32_t cols) {
    __shared__ uint32_t largest[ROUND_THREADS];
    uint32_t group_first = blockIdx.y * ROUND_GROUPS;
    const float *from = x + blockIdx.x * x_stride;
    unsigned char *row = to + (size_t)blockIdx.x * row_bytes;
    EACH_THREAD(t) {
        uint32_t first = group_first * KERNELS_GROUP + t * ROUND_VALUES;
        uint32_t most = 0;
        for (uint32_t i = first; i < first + ROUND_VALUES && i < cols; i++) {
            uint32_t magnitude = convert_to_bits(from[i]) & 0x7fffffffu;
            most = magnitude > most ? magnitude : most;
        }
        largest[t] = most;
    }
    BLOCK_SYNC();
    EACH_THREAD(t) {
        uint32_t group = group_first + t / ROUND_LANES;
        if (group < groups) {
            uint32_t first = group_first * KERNELS_GROUP + t * ROUND_VALUES;
            uint32_t most = 0;
            for (uint32_t i = 0; i < ROUND_LANES; i++) {
                uint32_t magnitude = largest[t / ROUND_LANES * ROUND_LANES + i];
                most = magnitude > most ? magnitude : most;
            }
            float inverse;
            float scale = convert_i8_scale(most, &inverse);
            uint32_t words[ROUND_VALUES / 4] = {0};
            for (uint32_t i = 0; i < ROUND_VALUES; i++) {
                float value = first + i < cols ? from[first + i] : 0.0f;
                uint32_t byte = (uint8_t)convert_i8_number(value, inverse);
                words[i / 4] |= byte << (i % 4 * 8);
            }
            uint32_t *numbers = (uint32_t *)(row + first);
            for (uint32_t i = 0; i < ROUND_VALUES / 4; i++) {
                numbers[i] = words[i];
            }
            if (t % ROUND_LANES == 0) {
                ((float *)(row + (size_t)groups * KERNELS_GROUP))[group] = scale;
            }
        }
    }
}

/* ---- few rows ---- */

#define FEW_ROWS    8u /* of x, at most */
#define FEW_OUTPUTS 8u /* of a block */
#define FEW_LANES   16u
#define FEW_THREADS (FEW_OUTPUTS * FEW_LANES)
#define FEW_GROUPS  16u /* at a time */
#define FEW_PIECES  (FEW_GROUPS * GROUP_PIECES)
#define FEW_LOADS   (FEW_PIECES / FEW_LANES)

struct few_shared {
    int sums[FEW_ROWS][FEW_OUTPUTS][FEW_PIECES + GROUP_PIECES]; /* outputs apart in the banks */
    float weight_scales[FEW_OUTPUTS][FEW_GROUPS];
    float x_scales[FEW_ROWS][FEW_GROUPS];
};
static_assert(FEW_ROWS * FEW_OUTPUTS <= FEW_THREADS, "a thread for each chain");
static_assert(FEW_GROUPS <= FEW_LANES, "a lane for each scale");

/* The neighbouring lanes of an output read neighbouring pieces of its weights, all loads at once;
 * each piece meets every row of x. The last block's outputs may be the matrix's padding. */
static __device__ void few_pieces(struct few_shared *shared, const struct rows &weights,
                                  const struct rows &x, uint32_t output_first, uint32_t group_first,
                                  unsigned t) {
    uint32_t output = t / FEW_LANES;
    uint32_t lane = t % FEW_LANES;
    uint32_t piece_first = group_first * GROUP_PIECES;
    uint32_t left = weights.groups * GROUP_PIECES - piece_first;
    const int4 *from = row_pieces(weights, output_first + output) + piece_first;
    int4 loaded[FEW_LOADS];
    for (uint32_t i = 0; i < FEW_LOADS; i++) {
        uint32_t piece = lane + i * FEW_LANES;
        loaded[i] = piece < left ? from[piece] : int4{0, 0, 0, 0};
    }
    for (uint32_t n = 0; n < x.count; n++) {
        const int4 *with = row_pieces(x, n) + piece_first;
        for (uint32_t i = 0; i < FEW_LOADS; i++) {
            uint32_t piece = lane + i * FEW_LANES;
            if (piece < left) {
                shared->sums[n][output][piece] = dot(loaded[i], with[piece], 0);
            }
        }
    }
}

static __device__ void few_scales(struct few_shared *shared, const struct rows &weights,
                                  const struct rows &x, uint32_t output_first, uint32_t group_first,
                                  unsigned t) {
    uint32_t row = t / FEW_LANES;
    uint32_t lane = t % FEW_LANES;
    uint32_t group = group_first + lane;
    if (lane < FEW_GROUPS && group < weights.groups) {
        shared->weight_scales[row][lane] = row_scale(weights, output_first + row, group);
        if (row < x.count) {
            shared->x_scales[row][lane] = row_scale(x, row, group);
        }
    }
}

static __device__ float few_chain(const struct few_shared *shared, uint32_t row, uint32_t output,
                                  uint32_t groups, float chain) {
    for (uint32_t group = 0; group < groups; group++) {
        const int *parts = &shared->sums[row][output][group * GROUP_PIECES];
        int sum = 0;
        for (uint32_t i = 0; i < GROUP_PIECES; i++) {
            sum += parts[i];
        }
        chain = fmaf((float)sum,
                     shared->weight_scales[output][group] * shared->x_scales[row][group], chain);
    }
    return chain;
}

__global__ static void product_few(struct rows weights, struct rows x, float *y, size_t y_stride) {
    __shared__ struct few_shared shared;
    THREAD_OWN(float, chain);
    uint32_t output_first = blockIdx.x * FEW_OUTPUTS;
    EACH_THREAD(t) {
        OWN(chain, t) = 0.0f;
    }
    for (uint32_t first = 0; first < weights.groups; first += FEW_GROUPS) {
        uint32_t groups = weights.groups - first;
        groups = groups < FEW_GROUPS ? groups : FEW_GROUPS;
        BLOCK_SYNC();
        EACH_THREAD(t) {
            few_pieces(&shared, weights, x, output_first, first, t);
            few_scales(&shared, weights, x, output_first, first, t);
        }
        BLOCK_SYNC();
        EACH_THREAD(t) {
            if (t < x.count * FEW_OUTPUTS) {
                OWN(chain, t) =
                    few_chain(&shared, t / FEW_OUTPUTS, t % FEW_OUTPUTS, groups, OWN(chain, t));
            }
        }
    }
    EACH_THREAD(t) {
        uint32_t output = output_first + t % FEW_OUTPUTS;
        if (t < x.count * FEW_OUTPUTS && output < weights.count) {
            y[t / FEW_OUTPUTS * y_stride + output] = OWN(chain, t);
        }
    }
}

/* ---- many rows ---- */

#define TILE_ROWS    64u /* of x */
#define TILE_OUTPUTS 32u
#define TILE_EACH    4u /* rows, and outputs, of a thread */
#define TILE_ACROSS  (TILE_OUTPUTS / TILE_EACH)
#define TILE_DOWN    (TILE_ROWS / TILE_EACH)
#define TILE_THREADS (TILE_ACROSS * TILE_DOWN)
#define TILE_GROUPS  4u /* at a time */
#define TILE_PIECES  (TILE_GROUPS * GROUP_PIECES)

struct tile_shared {
    int4 weights[TILE_OUTPUTS][TILE_PIECES + 1]; /* rows apart in the banks */
    int4 x[TILE_ROWS][TILE_PIECES + 1];
    float weight_scales[TILE_OUTPUTS][TILE_GROUPS + 1];
    float x_scales[TILE_ROWS][TILE_GROUPS + 1];
};

/* What a thread adds up: its rows, and of each its outputs. */
struct tile_chains {
    float of[TILE_EACH][TILE_EACH];
};

/* The next groups of ROWS rows from `first` on; zeros where there is nothing. */
template <uint32_t ROWS>
static __device__ void tile_load(int4 (&to)[ROWS][TILE_PIECES + 1],
                                 float (&scales)[ROWS][TILE_GROUPS + 1], const struct rows &from,
                                 uint32_t first, uint32_t group_first, unsigned t) {
    for (uint32_t i = t; i < ROWS * TILE_PIECES; i += TILE_THREADS) {
        uint32_t row = i / TILE_PIECES;
        uint32_t piece = group_first * GROUP_PIECES + i % TILE_PIECES;
        bool is_there = first + row < from.count && piece < from.groups * GROUP_PIECES;
        to[row][i % TILE_PIECES] =
            is_there ? row_pieces(from, first + row)[piece] : int4{0, 0, 0, 0};
    }
    for (uint32_t i = t; i < ROWS * TILE_GROUPS; i += TILE_THREADS) {
        uint32_t row = i / TILE_GROUPS;
        uint32_t group = group_first + i % TILE_GROUPS;
        bool is_there = first + row < from.count && group < from.groups;
        scales[row][i % TILE_GROUPS] = is_there ? row_scale(from, first + row, group) : 0.0f;
    }
}

/* One group of a thread's rows and outputs: the first of each, and every TILE_DOWN-th or
 * TILE_ACROSS-th. `rows` of the tile are there, so steps behind them are left out, by all threads
 * alike. */
static __device__ void tile_group(const struct tile_shared *shared, uint32_t rows, uint32_t group,
                                  unsigned t, struct tile_chains *chains) {
    uint32_t output = t % TILE_ACROSS;
    uint32_t row = t / TILE_ACROSS;
    int sums[TILE_EACH][TILE_EACH] = {{0}};
    for (uint32_t piece = group * GROUP_PIECES; piece < (group + 1) * GROUP_PIECES; piece++) {
        int4 loaded[TILE_EACH];
        for (uint32_t j = 0; j < TILE_EACH; j++) {
            loaded[j] = shared->weights[output + j * TILE_ACROSS][piece];
        }
        for (uint32_t i = 0; i < TILE_EACH; i++) {
            if (i * TILE_DOWN < rows) {
                int4 x = shared->x[row + i * TILE_DOWN][piece];
                for (uint32_t j = 0; j < TILE_EACH; j++) {
                    sums[i][j] = dot(loaded[j], x, sums[i][j]);
                }
            }
        }
    }
    for (uint32_t i = 0; i < TILE_EACH; i++) {
        float x_scale = shared->x_scales[row + i * TILE_DOWN][group];
        for (uint32_t j = 0; j < TILE_EACH; j++) {
            float scale = shared->weight_scales[output + j * TILE_ACROSS][group] * x_scale;
            chains->of[i][j] = fmaf((float)sums[i][j], scale, chains->of[i][j]);
        }
    }
}

__global__ static void product_tiles(struct rows weights, struct rows x, float *y,
                                     size_t y_stride) {
    __shared__ struct tile_shared shared;
    THREAD_OWN(struct tile_chains, chains);
    uint32_t output_first = blockIdx.x * TILE_OUTPUTS;
    uint32_t row_first = blockIdx.y * TILE_ROWS;
    EACH_THREAD(t) {
        for (uint32_t i = 0; i < TILE_EACH * TILE_EACH; i++) {
            OWN(chains, t).of[i / TILE_EACH][i % TILE_EACH] = 0.0f;
        }
    }
    for (uint32_t first = 0; first < weights.groups; first += TILE_GROUPS) {
        uint32_t groups = weights.groups - first;
        groups = groups < TILE_GROUPS ? groups : TILE_GROUPS;
        BLOCK_SYNC();
        EACH_THREAD(t) {
            tile_load(shared.weights, shared.weight_scales, weights, output_first, first, t);
            tile_load(shared.x, shared.x_scales, x, row_first, first, t);
        }
        BLOCK_SYNC();
        EACH_THREAD(t) {
            for (uint32_t group = 0; group < groups; group++) {
                tile_group(&shared, x.count - row_first, group, t, &OWN(chains, t));
            }
        }
    }
    EACH_THREAD(t) {
        for (uint32_t i = 0; i < TILE_EACH * TILE_EACH; i++) {
            uint32_t row = row_first + t / TILE_ACROSS + i / TILE_EACH * TILE_DOWN;
            uint32_t output = output_first + t % TILE_ACROSS + i % TILE_EACH * TILE_ACROSS;
            if (row < x.count && output < weights.count) {
                y[row * y_stride + output] = OWN(chains, t).of[i / TILE_EACH][i % TILE_EACH];
            }
        }
    }
}

/* ---- launches ---- */

static uint32_t ceil_div(uint32_t count, uint32_t by) {
    return (count + by - 1) / by;
}

void kernel_round(struct device *device, const float *x, size_t x_stride, uint32_t count,
                  uint32_t cols) {
    uint32_t groups = kernels_groups(cols);
    LAUNCH(device->queues[DEVICE_COMPUTE], dim3(count, ceil_div(groups, ROUND_GROUPS)),
           ROUND_THREADS, round_rows, (unsigned char *)device->staged,
           device_row_bytes(KERNELS_I8, cols), groups, x, x_stride, cols);
    device_launched(device, "round");
}

void kernel_product_i8(struct device *device, const struct device_matrix *matrix, float *y,
                       size_t y_stride, uint32_t count) {
    struct rows weights = rows_of(matrix->data, matrix->cols, matrix->rows);
    struct rows x = rows_of(device->staged, matrix->cols, count);
    if (count <= FEW_ROWS) {
        LAUNCH(device->queues[DEVICE_COMPUTE], ceil_div(matrix->rows, FEW_OUTPUTS), FEW_THREADS,
               product_few, weights, x, y, y_stride);
    } else {
        LAUNCH(device->queues[DEVICE_COMPUTE],
               dim3(ceil_div(matrix->rows, TILE_OUTPUTS), ceil_div(count, TILE_ROWS)), TILE_THREADS,
               product_tiles, weights, x, y, y_stride);
    }
    device_launched(device, "product");
}
