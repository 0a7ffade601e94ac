/* The inside of struct model, for the forward pass: weights and constants, read only.
 *
 * With an accelerator the data of matrices is in its memory, in rows as kernels/device.h has them;
 * without, packed for the CPU. Vectors are the host's. */
#ifndef ENGINE_MODEL_WEIGHTS_H
#define ENGINE_MODEL_WEIGHTS_H

#include "base/arena.h"
#include "engine/config.h"
#include "engine/model.h"
#include "kernels/kernels.h"

struct accelerator;

struct model_layer {
    struct kernels_weights qkv;     /* rows: q, then k, then v */
    struct kernels_weights output;  /* attention output */
    struct kernels_weights gate_up; /* rows: gate, then up */
    struct kernels_weights down;
    float *attention_norm; /* [hidden] */
    float *ffn_norm;       /* [hidden] */
    float *qkv_bias;       /* [rows of qkv], or NULL */
    float *q_norm;         /* [head_dim], or NULL */
    float *k_norm;         /* [head_dim], or NULL */
};

struct model {
    struct model_info info;
    struct model_config config;
    const struct kernels *kernels;
    struct accelerator *accelerator; /* NULL: the CPU */
    enum model_weights weights;
    struct arena memory; /* of matrices on the CPU, and of all vectors of weights */
    struct model_layer *layers;
    struct kernels_weights embedding; /* [vocab, hidden] */
    struct kernels_weights head;      /* the same data as the embedding when tied */
    float *final_norm;                /* [hidden] */
    double *frequencies;              /* [head_dim / 2] radians per position */
    enum kernels_dtype kv_dtype;
};

#endif
