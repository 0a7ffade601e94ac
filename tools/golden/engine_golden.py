#!/usr/bin/env python3
"""Makes tests/data/golden/engine: tiny random models and what they must answer.

An independent Llama in float64 numpy (pip install numpy), written from the published equations and
not from common/engine: no paging, no cache, every position recomputed from the whole prefix with a
plain causal mask. Only one rounding of the engine is repeated, because it is part of its contract:
K (after the rotation) and V are kept in the model's KV type. Run it from anywhere; it rewrites the
folder. Prompts are drawn until every greedy choice leads the second by a margin, so that float32 may
not differ.
"""

import json
import math
import os
import random
import shutil
import struct
import subprocess
import sys

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OUT = os.path.join(ROOT, "tests", "data", "golden", "engine")
MODELS = {
    "untied_f32": ["--hidden", "24", "--heads", "6", "--kv-heads", "2", "--head-dim", "8", "--ffn", "56",
                   "--vocab", "260", "--untied", "--context", "256", "--seed", "11", "--shards", "2"],
    "gqa_bf16": ["--hidden", "40", "--heads", "5", "--kv-heads", "1", "--head-dim", "12", "--ffn", "90",
                 "--layers", "3", "--vocab", "261", "--context", "512", "--dtype", "bf16", "--seed", "12",
                 "--llama3-rope", "--rope-theta", "50000"],
}
GREEDY = 48
MARGIN = 0.02  # far above float32's error, and above what a flipped bf16 rounding of K or V moves


def load(folder):
    tensors = {}
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".safetensors"):
            continue
        with open(os.path.join(folder, name), "rb") as file:
            blob = file.read()
        (length,) = struct.unpack("<Q", blob[:8])
        data = blob[8 + length:]
        for key, info in json.loads(blob[8:8 + length]).items():
            begin, end = info["data_offsets"]
            if info["dtype"] == "BF16":
                bits = np.frombuffer(data[begin:end], dtype="<u2").astype(np.uint32) << 16
                value = bits.view(np.float32)
            else:
                value = np.frombuffer(data[begin:end], dtype="<f4")
            tensors[key] = value.astype(np.float64).reshape(info["shape"])
    return tensors


def round_bf16(values):
    bits = values.astype(np.float32).view(np.uint32)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).view(np.float32).astype(np.float64)


def inverse_frequencies(config):
    dim = config["head_dim"]
    plain = [config["rope_theta"] ** (-2 * i / dim) for i in range(dim // 2)]
    scaling = config["rope_scaling"]
    if scaling is None:
        return np.array(plain)
    low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    result = []
    for frequency in plain:  # Llama 3.1: long waves are stretched, short ones kept, a ramp between
        wave = 2 * math.pi / frequency
        if wave < high:
            result.append(frequency)
        elif wave > low:
            result.append(frequency / scaling["factor"])
        else:
            smooth = (scaling["original_max_position_embeddings"] / wave - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"])
            result.append((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
    return np.array(result)


def rotate(x, angles):  # x: [tokens, heads, dim]
    half = x.shape[-1] // 2
    flipped = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    both = np.concatenate([angles, angles], axis=-1)[:, None, :]
    return x * np.cos(both) + flipped * np.sin(both)


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def forward(config, w, ids):
    """Logits of the last position."""
    tokens, heads, kv_heads = len(ids), config["num_attention_heads"], config["num_key_value_heads"]
    dim, eps = config["head_dim"], config["rms_norm_eps"]
    keep = round_bf16 if config["torch_dtype"] == "bfloat16" else (lambda v: v)
    angles = np.arange(tokens)[:, None] * inverse_frequencies(config)[None, :]
    mask = np.triu(np.full((tokens, tokens), -np.inf), 1)
    x = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        p = "model.layers.%d." % i
        h = norm(x, w[p + "input_layernorm.weight"], eps)
        q = rotate((h @ w[p + "self_attn.q_proj.weight"].T).reshape(tokens, heads, dim), angles)
        k = keep(rotate((h @ w[p + "self_attn.k_proj.weight"].T).reshape(tokens, kv_heads, dim), angles))
        v = keep((h @ w[p + "self_attn.v_proj.weight"].T).reshape(tokens, kv_heads, dim))
        mixed = np.empty((tokens, heads, dim))
        for head in range(heads):
            source = head * kv_heads // heads
            score = q[:, head] @ k[:, source].T / math.sqrt(dim) + mask
            score = np.exp(score - score.max(axis=-1, keepdims=True))
            mixed[:, head] = score / score.sum(axis=-1, keepdims=True) @ v[:, source]
        x = x + mixed.reshape(tokens, -1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        up = h @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    last = norm(x[-1], w["model.norm.weight"], eps)
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return w[head] @ last


def case(config, weights, rng, length):
    """A prompt of about `length` whose greedy answer is clear at every step."""
    for _ in range(500):
        prompt = [rng.randrange(config["vocab_size"]) for _ in range(length)]
        ids, margins, first = list(prompt), [], None
        for _ in range(GREEDY):
            logits = forward(config, weights, ids)
            first = logits if first is None else first
            order = np.argsort(logits)
            margins.append(logits[order[-1]] - logits[order[-2]])
            if margins[-1] < MARGIN:
                break
            ids.append(int(order[-1]))
        if min(margins) >= MARGIN:
            return {"prompt_ids": prompt, "greedy_ids": ids[length:],
                    "min_top2_margin": round(float(min(margins)), 5),
                    "last_prompt_logits_f64": [round(float(value), 6) for value in first]}
    sys.exit("no clear prompt of length %d: choose other seeds" % length)


def main():
    result = {}
    for name, arguments in MODELS.items():
        folder = os.path.join(OUT, name)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([os.path.join(ROOT, "tools", "make-model"), "--out", folder, *arguments], check=True)
        os.remove(os.path.join(folder, "tokenizer.json"))  # these models are fed with ids only
        os.remove(os.path.join(folder, "tokenizer_config.json"))
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        weights = load(folder)
        rng = random.Random(7)
        result[name] = [case(config, weights, rng, length) for length in (1, 9, 70, 130)]
        print(name, [entry["min_top2_margin"] for entry in result[name]])
    with open(os.path.join(OUT, "engine.json"), "w", encoding="utf-8") as file:
        json.dump(result, file, separators=(",", ":"))
        file.write("\n")


main()
