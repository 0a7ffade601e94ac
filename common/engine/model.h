/* A model directory in the Hugging Face layout, opened and checked: what it is, and its weights.
 *
 * Reads config.json, generation_config.json (optional) and *.safetensors (one file, or the shards
 * of model.safetensors.index.json). The architectures of config.h in F32, F16 (widened, exact) and
 * BF16 are served; everything else is refused by name, with the file, what was expected and what
 * was found. The files are untrusted. Weights are packed for the kernels at load, so a model costs
 * its own memory once and the files may be closed or replaced afterwards. Immutable after creation:
 * any thread may read it. */
#ifndef ENGINE_MODEL_H
#define ENGINE_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"
#include "core/layout.h"

#define MODEL_EOS_MAX  16u
#define MODEL_TEXT_MAX 128u

struct accelerator;
struct kernels;
struct model;

/* What the matrices become in memory. */
enum model_weights {
    MODEL_WEIGHTS_FILE, /* as the file has them; F16 is widened, exactly */
    MODEL_WEIGHTS_INT8, /* rounded to 8 bits in groups of 64, at load: half the bytes of BF16 */
};

/* Default sampling of generation_config.json; where it says nothing, the neutral value. */
struct model_defaults {
    float temperature;        /* 1 when unset; 0 when do_sample is false explicitly */
    float top_p;              /* 1 when unset */
    float min_p;              /* 0 when unset */
    int32_t top_k;            /* -1 when unset or 0 */
    float repetition_penalty; /* 1 when unset */
};

struct model_info {
    char name[MODEL_TEXT_MAX]; /* the directory's own name */
    char architecture[64];     /* "LlamaForCausalLM" */
    char numerics[32];         /* dtype/instruction class/kernel version: "f32/avx2/1" or, rounded
                                  from BF16, "int8-bf16/avx2/1" */
    uint64_t fingerprint;      /* hash of the shape, of every weight byte, and of the rounding */
    uint64_t parameter_count;  /* a tied head counts once */
    uint64_t weight_bytes;     /* resident, as packed */
    uint32_t vocab_count;      /* token ids are [0, vocab_count) */
    uint32_t context_tokens;   /* positions are [0, context_tokens) */
    uint32_t layer_count;
    uint32_t hidden;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t ffn;
    enum kv_dtype kv_dtype; /* F32 for F32 and F16 models, BF16 for BF16 models */
    bool is_tied;           /* the head shares the embedding's weights */
    bool has_bos;
    uint32_t bos_token;
    uint32_t eos_count; /* 0: the model has no end token */
    uint32_t eos_tokens[MODEL_EOS_MAX];
    struct model_defaults defaults;
};

/* Opens and packs the model in `directory` for `kernels` (borrowed for the model's life).
 * error: receives one sentence on failure (512 bytes are enough); not terminated by this function.
 * STATUS_NOT_FOUND: a file is missing; STATUS_CORRUPT: a file contradicts itself; STATUS_INVALID:
 * a value is wrong; STATUS_UNSUPPORTED: understood, not served; STATUS_IO: cannot read;
 * STATUS_BUSY: the weights do not fit the memory. Blocks for the time it takes to read the files.
 */
MUST_USE enum status model_create(const char *directory, const struct kernels *kernels,
                                  enum model_weights weights, struct writer *error,
                                  struct model **model_out);
/* The same, for an accelerator (borrowed for the model's life): matrices go to its memory, row by
 * row as the files have them. kernels: for what is done on the host while loading, with the bits of
 * every table. Also STATUS_IO if the device fails. */
MUST_USE enum status model_create_on(const char *directory, const struct kernels *kernels,
                                     struct accelerator *accelerator, enum model_weights weights,
                                     struct writer *error, struct model **model_out);
/* Accepts NULL. No engine may be using it. */
void model_destroy(struct model *model);

/* Lives as long as the model. */
const struct model_info *model_info(const struct model *model);

/* Describes the model's KV: components k and v of each layer, in layer order, kv_heads * head_dim
 * values per row, pages of `page_tokens`; the digest covers the weights too. Errors as
 * layout_complete. */
MUST_USE enum status model_layout(const struct model *model, uint32_t page_tokens,
                                  struct kv_layout *layout_out);

#endif
