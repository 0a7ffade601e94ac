/* config.json and generation_config.json of a model directory, checked.
 *
 * Every number is bounded, so that the products of the loader stay far from overflow; what the
 * forward pass does not compute (sliding windows, other activations, other rotary scalings,
 * quantised weights, architectures other than Llama, Qwen2 and Qwen3) is refused by name. */
#ifndef ENGINE_CONFIG_H
#define ENGINE_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"
#include "engine/model.h"

#define CONFIG_HEAD_DIM_MAX 1024u

/* Llama 3's stretching of the low rotary frequencies. */
struct config_rope_llama3 {
    bool is_on;
    double factor;
    double low_freq_factor;
    double high_freq_factor;
    double original_tokens;
};

struct model_config {
    char architecture[64];
    uint32_t hidden;
    uint32_t ffn;
    uint32_t layers;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim; /* even, at most CONFIG_HEAD_DIM_MAX */
    uint32_t vocab;
    uint32_t context_tokens;
    float norm_epsilon;
    double rope_theta;
    struct config_rope_llama3 rope_llama3;
    bool has_qkv_bias; /* Qwen2: q, k and v have a bias */
    bool has_qk_norm;  /* Qwen3: each head of q and k is normed before its rotation */
    bool is_tied;
    bool has_bos;
    uint32_t bos_token;
    uint32_t eos_count;
    uint32_t eos_tokens[MODEL_EOS_MAX];
    struct model_defaults defaults;
};

MUST_USE enum status config_read(const char *directory, struct writer *error,
                                 struct model_config *config_out);

#endif
