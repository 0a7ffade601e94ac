#include "text/grow.h"

#include <stdlib.h>
#include <string.h>

void grow_fini(struct grow *grow) {
    free(grow->data);
    *grow = (struct grow){0};
}

enum status grow_reserve(struct grow *grow, size_t more) {
    if (more <= grow->cap - grow->len) {
        return STATUS_OK;
    }
    if (more > GROW_BYTES_MAX - grow->len) {
        return STATUS_BUSY;
    }
    size_t cap = grow->cap < 256 ? 256 : grow->cap;
    while (cap - grow->len < more) {
        cap *= 2;
    }
    uint8_t *data = realloc(grow->data, cap);
    if (data == NULL) {
        return STATUS_BUSY;
    }
    grow->data = data;
    grow->cap = cap;
    return STATUS_OK;
}

enum status grow_put(struct grow *grow, const void *data, size_t len) {
    enum status status = grow_reserve(grow, len);
    if (status == STATUS_OK && len > 0) {
        memcpy(grow->data + grow->len, data, len);
        grow->len += len;
    }
    return status;
}

#define STORE_BLOCK_BYTES 65536u

struct store_block {
    struct store_block *next;
    size_t len;
    size_t cap;
    uint8_t data[];
};

void store_fini(struct store *store) {
    while (store->blocks != NULL) {
        struct store_block *next = store->blocks->next;
        free(store->blocks);
        store->blocks = next;
    }
}

enum status store_copy(struct store *store, struct bytes text, struct bytes *out) {
    struct store_block *block = store->blocks;
    if (block == NULL || block->cap - block->len < text.len) {
        size_t cap = text.len > STORE_BLOCK_BYTES ? text.len : STORE_BLOCK_BYTES;
        block = malloc(sizeof *block + cap);
        if (block == NULL) {
            return STATUS_BUSY;
        }
        *block = (struct store_block){.next = store->blocks, .cap = cap};
        store->blocks = block;
    }
    uint8_t *to = block->data + block->len;
    if (text.len > 0) {
        memcpy(to, text.data, text.len);
    }
    block->len += text.len;
    *out = (struct bytes){to, text.len};
    return STATUS_OK;
}
