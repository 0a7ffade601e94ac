#include "text/added.h"

#include <stdlib.h>

#include "text/tokenizer.h"

static uint32_t added_child(const struct added *added, uint32_t node, uint8_t byte) {
    uint32_t cursor = 0;
    return map_next(&added->map, (uint64_t)node << 8 | byte, &cursor);
}

static enum status added_insert(struct added *added, struct bytes token, uint32_t id) {
    uint32_t node = 0;
    for (size_t i = 0; i < token.len; i++) {
        uint32_t child = added_child(added, node, token.data[i]);
        if (child == UINT32_MAX) {
            const uint32_t none = TOKEN_NONE;
            child = (uint32_t)(added->nodes.len / sizeof none);
            enum status status = grow_put(&added->nodes, &none, sizeof none);
            if (status != STATUS_OK) {
                return status;
            }
            map_add(&added->map, (uint64_t)node << 8 | token.data[i], child);
        }
        node = child;
    }
    uint32_t *end = (uint32_t *)(void *)added->nodes.data + node;
    if (*end != TOKEN_NONE) {
        return STATUS_EXISTS;
    }
    *end = id;
    added->starts[token.data[0]] = true;
    return STATUS_OK;
}

enum status added_build(struct added *added, const struct bytes *tokens, const uint32_t *ids,
                        size_t count) {
    uint64_t total = 1;
    for (size_t i = 0; i < count; i++) {
        total += tokens[i].len;
    }
    if (total > (1u << 26)) {
        return STATUS_RANGE;
    }
    added->memory = malloc(map_bytes((uint32_t)total));
    if (added->memory == NULL) {
        return STATUS_BUSY;
    }
    map_init(&added->map, (uint32_t)total, added->memory);
    const uint32_t none = TOKEN_NONE;
    enum status status = grow_put(&added->nodes, &none, sizeof none);
    for (size_t i = 0; i < count && status == STATUS_OK; i++) {
        status = added_insert(added, tokens[i], ids[i]);
    }
    return status;
}

void added_fini(struct added *added) {
    free(added->memory);
    grow_fini(&added->nodes);
    *added = (struct added){0};
}

bool added_find(const struct added *added, struct bytes text, size_t from, size_t *at_out,
                size_t *len_out, uint32_t *id_out) {
    const uint32_t *ends = (const uint32_t *)(const void *)added->nodes.data;
    for (size_t at = from; at < text.len; at++) {
        if (!added->starts[text.data[at]]) {
            continue;
        }
        uint32_t node = 0;
        size_t len = 0;
        for (size_t i = at; i < text.len; i++) {
            node = added_child(added, node, text.data[i]);
            if (node == UINT32_MAX) {
                break;
            }
            if (ends[node] != TOKEN_NONE) {
                len = i + 1 - at;
                *id_out = ends[node];
            }
        }
        if (len > 0) {
            *at_out = at;
            *len_out = len;
            return true;
        }
    }
    return false;
}
