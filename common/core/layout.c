#include "core/layout.h"

#include <string.h>

#include "base/siphash.h"

/* Not a secret: both sides must come to the same digest. */
static const struct siphash_key digest_key = {0x6261746f6e2d6b76ull, 0x6c61796f75742d31ull};

static struct layout_digest layout_compute_digest(const struct kv_layout *layout) {
    struct siphash128 chain = {layout->component_count, layout->layer_count};
    for (uint32_t i = 0; i < layout->component_count; i++) {
        const struct kv_component *component = &layout->components[i];
        struct {
            uint64_t low, high;
            char name[12];
            uint32_t layer, tokens_per_row, row_bytes, dtype, lifetime;
        } record = {.low = chain.low,
                    .high = chain.high,
                    .layer = component->layer,
                    .tokens_per_row = component->tokens_per_row,
                    .row_bytes = component->row_bytes,
                    .dtype = (uint32_t)component->dtype,
                    .lifetime = (uint32_t)component->lifetime};
        _Static_assert(sizeof record == 48, "no padding in the canonical encoding");
        memcpy(record.name, component->name, sizeof record.name);
        chain = siphash128(digest_key, &record, sizeof record);
    }
    return (struct layout_digest){chain.high, chain.low};
}

static enum status layout_check_component(const struct kv_layout *layout, uint32_t index) {
    const struct kv_component *component = &layout->components[index];
    uint32_t previous = index == 0 ? 0 : layout->components[index - 1].layer;
    if (component->layer < previous || component->layer > previous + 1u ||
        (index == 0 && component->layer != 0)) {
        return STATUS_INVALID;
    }
    if (component->row_bytes == 0 || component->row_bytes % 4 != 0 ||
        component->tokens_per_row == 0 || layout->page_tokens % component->tokens_per_row != 0) {
        return STATUS_INVALID;
    }
    if (component->row_bytes > (1u << 20)) {
        return STATUS_RANGE;
    }
    if (component->lifetime != KV_LIFETIME_PAGE || component->tokens_per_row != 1) {
        return STATUS_UNSUPPORTED;
    }
    return STATUS_OK;
}

enum status layout_complete(struct kv_layout *layout) {
    if (layout->component_count == 0 || layout->component_count > LAYOUT_COMPONENTS_MAX ||
        layout->page_tokens == 0 || layout->page_tokens > LAYOUT_PAGE_TOKENS_MAX) {
        return STATUS_RANGE;
    }
    uint64_t page_bytes = 0;
    uint64_t token_bytes = 0;
    uint32_t layers = 0;
    for (uint32_t i = 0; i < layout->component_count; i++) {
        enum status status = layout_check_component(layout, i);
        if (status != STATUS_OK) {
            return status;
        }
        const struct kv_component *component = &layout->components[i];
        if (i == 0 || component->layer != layout->components[i - 1].layer) {
            layout->layer_first[layers++] = i;
        }
        layout->page_offset[i] = (uint32_t)page_bytes;
        page_bytes += ((uint64_t)component->row_bytes * layout->page_tokens + 63) & ~63ull;
        token_bytes += component->row_bytes;
        if (page_bytes > UINT32_MAX) {
            return STATUS_RANGE;
        }
    }
    layout->layer_first[layers] = layout->component_count;
    layout->layer_count = layers;
    layout->page_bytes = (uint32_t)page_bytes;
    layout->token_bytes = (uint32_t)token_bytes;
    layout->digest = layout_compute_digest(layout);
    return STATUS_OK;
}

void layout_bind(struct kv_layout *layout, uint64_t fingerprint) {
    const uint64_t words[3] = {layout->digest.low, layout->digest.high, fingerprint};
    struct siphash128 bound = siphash128(digest_key, words, sizeof words);
    layout->digest = (struct layout_digest){bound.high, bound.low};
}

uint64_t layout_range_bytes(const struct kv_layout *layout, uint32_t component_first,
                            uint32_t component_count, uint32_t tokens) {
    uint64_t bytes = 0;
    for (uint32_t i = component_first; i < component_first + component_count; i++) {
        bytes += (uint64_t)layout->components[i].row_bytes * tokens;
    }
    return bytes;
}
