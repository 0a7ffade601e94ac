#include "kernels/kernels.h"

#include "base/check.h"
#include "kernels/convert.h"

#include <string.h>

uint64_t kernels_weights_bytes(enum kernels_dtype dtype, uint32_t rows, uint32_t cols) {
    if (dtype == KERNELS_I8) {
        return (uint64_t)kernels_panels(rows) * kernels_groups(cols) * KERNELS_GROUP_BYTES;
    }
    uint32_t width = dtype == KERNELS_BF16 ? kernels_halves(cols) : cols;
    return (uint64_t)kernels_panels(rows) * KERNELS_PANEL * width * kernels_dtype_bytes(dtype);
}

/* Which value of the packed data, F32 or BF16, a row and column is. */
static size_t pack_slot(const struct kernels_weights *weights, uint32_t row, uint32_t k) {
    size_t panel = row / KERNELS_PANEL;
    uint32_t j = row % KERNELS_PANEL;
    if (weights->dtype == KERNELS_F32) {
        return (panel * weights->cols + k) * KERNELS_PANEL + j;
    }
    size_t pair = panel * kernels_halves(weights->cols) / 2 + k / 2;
    return (pair * KERNELS_PANEL + j) * 2 + k % 2;
}

static float pack_read(const unsigned char *source, enum kernels_dtype dtype) {
    uint16_t half;
    float value;
    switch (dtype) {
    case KERNELS_F32: memcpy(&value, source, sizeof(value)); return value;
    case KERNELS_F16: memcpy(&half, source, sizeof(half)); return convert_from_f16(half);
    case KERNELS_BF16: memcpy(&half, source, sizeof(half)); return convert_from_bf16(half);
    case KERNELS_I8: break; /* not a source */
    }
    return 0.0f;
}

static unsigned char *pack_group(const struct kernels_weights *weights, uint32_t row,
                                 uint32_t group) {
    size_t panel = (size_t)(row / KERNELS_PANEL) * kernels_groups(weights->cols);
    return (unsigned char *)weights->data + (panel + group) * KERNELS_GROUP_BYTES;
}
/* Where the number of one row and column of a group lies. */
static size_t pack_number(uint32_t row, uint32_t in_group) {
    return KERNELS_PANEL * sizeof(float) +
           ((size_t)(in_group / 4) * KERNELS_PANEL + row % KERNELS_PANEL) * 4 + in_group % 4;
}

static void pack_row_i8(struct kernels_weights *weights, uint32_t row, const unsigned char *source,
                        enum kernels_dtype source_dtype) {
    uint32_t size = kernels_dtype_bytes(source_dtype);
    for (uint32_t group = 0; group < kernels_groups(weights->cols); group++) {
        uint32_t first = group * KERNELS_GROUP;
        uint32_t count = weights->cols - first;
        count = count < KERNELS_GROUP ? count : KERNELS_GROUP;
        float values[KERNELS_GROUP] = {0};
        int8_t numbers[KERNELS_GROUP];
        for (uint32_t i = 0; i < count; i++) {
            values[i] = pack_read(source + (size_t)(first + i) * size, source_dtype);
        }
        float scale = convert_to_i8(numbers, values, KERNELS_GROUP);
        unsigned char *to = pack_group(weights, row, group);
        memcpy(to + row % KERNELS_PANEL * sizeof(float), &scale, sizeof(scale));
        for (uint32_t i = 0; i < KERNELS_GROUP; i++) {
            to[pack_number(row, i)] = (unsigned char)(numbers[i] + 128);
        }
    }
}

void kernels_weights_pack(struct kernels_weights *weights, uint32_t row_first, const void *source,
                          enum kernels_dtype source_dtype, uint32_t row_count) {
    CHECK(weights->dtype == KERNELS_F32 || weights->dtype == KERNELS_I8 ||
          (weights->dtype == KERNELS_BF16 && source_dtype == KERNELS_BF16));
    CHECK_OP((uint64_t)row_first + row_count, <=, weights->rows);
    uint32_t cols = weights->cols;
    uint32_t size = kernels_dtype_bytes(source_dtype);
    const unsigned char *from = source;
    if (weights->dtype == KERNELS_I8) {
        for (uint32_t row = 0; row < row_count; row++) {
            pack_row_i8(weights, row_first + row, from + (size_t)row * cols * size, source_dtype);
        }
        return;
    }
    /* Panel by panel, columns inside, so that the writes go forward through memory. */
    for (uint32_t row = 0; row < row_count;) {
        uint32_t target = row_first + row;
        uint32_t in_panel = target % KERNELS_PANEL;
        uint32_t take = KERNELS_PANEL - in_panel;
        take = take < row_count - row ? take : row_count - row;
        const unsigned char *rows = from + (size_t)row * cols * size;
        for (uint32_t k = 0; k < cols; k++) {
            for (uint32_t j = 0; j < take; j++) {
                const unsigned char *cell = rows + ((size_t)j * cols + k) * size;
                size_t slot = pack_slot(weights, target + j, k);
                if (weights->dtype == KERNELS_F32) {
                    ((float *)weights->data)[slot] = pack_read(cell, source_dtype);
                } else {
                    memcpy((unsigned char *)weights->data + slot * 2, cell, 2);
                }
            }
        }
        row += take;
    }
}

void kernels_weights_row(const struct kernels_weights *weights, uint32_t row, float *to) {
    CHECK_OP(row, <, weights->rows);
    uint32_t cols = weights->cols;
    if (weights->dtype == KERNELS_I8) {
        for (uint32_t k = 0; k < cols; k++) {
            const unsigned char *group = pack_group(weights, row, k / KERNELS_GROUP);
            float scale;
            memcpy(&scale, group + row % KERNELS_PANEL * sizeof(float), sizeof(scale));
            to[k] = scale * (float)(group[pack_number(row, k % KERNELS_GROUP)] - 128);
        }
        return;
    }
    uint32_t size = kernels_dtype_bytes(weights->dtype);
    const unsigned char *data = weights->data;
    for (uint32_t k = 0; k < cols; k++) {
        to[k] = pack_read(data + pack_slot(weights, row, k) * size, weights->dtype);
    }
}
