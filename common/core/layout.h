/* The KV layout: which rows a model keeps per token, as data.
 *
 * A *component* is one row kind of one layer (K of layer 0, V of layer 0, ...). Components are
 * numbered in layer order; the number travels in chunk headers, page sizes never do. The digest
 * covers everything two workers must agree on (not page_tokens: that is each worker's own). Inside
 * a page all components lie one after the other, each as page_rows consecutive rows, so one page is
 * one contiguous range of memory. Models with compressed KV, index rows or sliding windows are
 * other lists of the same kind. Pure. */
#ifndef CORE_LAYOUT_H
#define CORE_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#define LAYOUT_COMPONENTS_MAX  1024u
#define LAYOUT_PAGE_TOKENS_MAX 1024u

enum kv_dtype {
    KV_DTYPE_F32 = 1,
    KV_DTYPE_F16 = 2,
    KV_DTYPE_BF16 = 3,
    KV_DTYPE_U8 = 4, /* opaque rows: quantised or packed formats */
};

enum kv_lifetime {
    KV_LIFETIME_PAGE = 1, /* one row for each tokens_per_row tokens, kept for the whole sequence */
    KV_LIFETIME_WINDOW = 2,  /* only the last window is kept (not served yet: refused at load) */
    KV_LIFETIME_REQUEST = 3, /* one state per request (not served yet: refused at load) */
};

struct kv_component {
    char name[12]; /* row kind: "k", "v", "index_k" ...; the same for every layer */
    uint16_t layer;
    uint16_t tokens_per_row; /* 1 for plain K and V; a divisor of page_tokens */
    uint32_t row_bytes;
    enum kv_dtype dtype;
    enum kv_lifetime lifetime;
};

struct layout_digest {
    uint64_t high;
    uint64_t low;
};

struct kv_layout {
    uint32_t component_count;
    uint32_t layer_count;
    uint32_t page_tokens;
    uint32_t page_bytes;  /* sum over components of page_rows * row_bytes, each aligned to 64 */
    uint32_t token_bytes; /* sum over components of row_bytes / tokens_per_row */
    struct layout_digest digest;
    struct kv_component components[LAYOUT_COMPONENTS_MAX];
    uint32_t page_offset[LAYOUT_COMPONENTS_MAX]; /* bytes from the start of a page */
    uint32_t layer_first[LAYOUT_COMPONENTS_MAX +
                         1]; /* components of layer l: [layer_first[l], layer_first[l+1]) */
};

/* Completes a layout whose components, component_count and page_tokens are filled in.
 * Returns STATUS_INVALID if components are not in layer order, a layer is missing, a row is empty,
 * not a multiple of 4 bytes, or tokens_per_row does not divide page_tokens; STATUS_UNSUPPORTED for
 * lifetimes other than PAGE and tokens_per_row other than 1; STATUS_RANGE past the maxima. */
MUST_USE enum status layout_complete(struct kv_layout *layout);

/* Binds a complete layout to one set of weights: KV of other weights has the same shape and is
 * wrong all the same, so two workers pair only if both are equal. fingerprint: a hash of the model.
 */
void layout_bind(struct kv_layout *layout, uint64_t fingerprint);

static inline bool layout_digest_equal(struct layout_digest a, struct layout_digest b) {
    return a.high == b.high && a.low == b.low;
}

/* Byte offset of the row of `token` (position within the page) of a component, from the pool's
 * base. */
static inline uint64_t layout_row_offset(const struct kv_layout *layout, uint32_t page,
                                         uint32_t component, uint32_t token_in_page) {
    return (uint64_t)page * layout->page_bytes + layout->page_offset[component] +
           (uint64_t)token_in_page * layout->components[component].row_bytes;
}

/* Bytes of `tokens` tokens over the components [first, first + count). */
uint64_t layout_range_bytes(const struct kv_layout *layout, uint32_t component_first,
                            uint32_t component_count, uint32_t tokens);

#endif
