#!/usr/bin/env python3
"""Writes the golden answers of the engine with Hugging Face transformers; see README.md here for versions.

    VENV/bin/python tools/golden/transformers_golden.py

tests/data/golden/stories260k.json: the five stories. tests/data/golden/engine/: tiny random models, made here by
tools/make-model, and engine.json with what they must answer.

Two things of the engine's contract are repeated, because they are choices and not arithmetic: weights of any type are
widened exactly and activations are float32 (so every model is loaded as float32), and K (after the rotation) and V of a
BF16 model are kept in BF16, by the library's own cache with one rounding put in front. Prompts of random models are
drawn until every greedy choice leads the second by MARGIN, so that another float32 program may not differ.
"""

import json
import os
import random
import shutil
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DATA = os.path.join(ROOT, "tests", "data")
OUT = os.path.join(DATA, "golden", "engine")
COMMON = ["--context", "256", "--vocab", "260"]
MODELS = {
    "untied_f32": ["--hidden", "24", "--heads", "6", "--kv-heads", "2", "--head-dim", "8", "--ffn", "56",
                   "--untied", "--seed", "11", "--shards", "2", *COMMON],
    "gqa_bf16": ["--hidden", "40", "--heads", "5", "--kv-heads", "1", "--head-dim", "12", "--ffn", "90",
                 "--layers", "3", "--vocab", "261", "--context", "512", "--dtype", "bf16", "--seed", "12",
                 "--llama3-rope", "--rope-theta", "50000"],
    "theta_f16": ["--hidden", "32", "--heads", "4", "--kv-heads", "4", "--ffn", "40", "--dtype", "f16", "--seed", "13",
                  "--rope-theta", "500000", *COMMON],
    "qwen2_f32": ["--arch", "qwen2", "--hidden", "32", "--heads", "4", "--kv-heads", "2", "--ffn", "48", "--seed", "14",
                  "--rope-theta", "1000000", *COMMON],
    "qwen3_bf16": ["--arch", "qwen3", "--hidden", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "16",
                   "--ffn", "48", "--dtype", "bf16", "--seed", "15", "--untied", *COMMON],
    "seven_f16": ["--arch", "qwen2", "--hidden", "24", "--heads", "7", "--kv-heads", "1", "--head-dim", "64", "--ffn", "40",
                  "--dtype", "f16", "--seed", "16", "--untied", "--shards", "2", *COMMON],
    "wide_f32": ["--hidden", "16", "--heads", "3", "--kv-heads", "1", "--head-dim", "128", "--ffn", "32", "--layers", "1",
                 "--seed", "17", "--shards", "3", "--llama3-rope", "--context", "512", "--vocab", "260"],
}
LENGTHS = (1, 9, 70, 130)  # of the prompts of random models
GREEDY = 48
MARGIN = 0.02  # far above float32's error, and above what a flipped BF16 rounding of K or V moves
STORIES = ["Once upon a time", "Lily and Ben went to the park to", "The little dog was sad because",
           "One day, a big red ball", "Tom said \"caf\u00e9\" and laughed."]
STORY_TOKENS = 160
TOP, TOP_TOKENS = 5, 16  # alternatives are kept for the first tokens of each answer


class Bf16Cache(DynamicCache):
    """The library's cache, whose entries have been stored as BF16."""

    def update(self, key_states, value_states, layer_idx, cache_kwargs=None):
        return super().update(key_states.bfloat16().float(), value_states.bfloat16().float(), layer_idx, cache_kwargs)


def load(folder):
    """(model in float32, class of its cache)."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        is_bf16 = json.load(file)["torch_dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, attn_implementation="eager")
    return model.eval(), Bf16Cache if is_bf16 else DynamicCache


def answer(model, cache_class, prompt, count, margin):
    """A case for this prompt, or None as soon as a greedy choice leads the second by less than `margin`."""
    cache, ids = cache_class(), torch.tensor([prompt])
    greedy, logprobs, least, first = [], [], float("inf"), None
    top_ids, top_logprobs = [], []
    with torch.no_grad():
        for _ in range(count):
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1]
            first = logits if first is None else first
            best = torch.topk(logits, 2)
            lead = float(best.values[0] - best.values[1])
            if lead < margin:
                return None
            least = min(least, lead)
            greedy.append(int(best.indices[0]))
            all_logprobs = torch.log_softmax(logits.double(), -1)
            logprobs.append(round(float(all_logprobs[greedy[-1]]), 5))
            if len(top_ids) < TOP_TOKENS:
                top = torch.topk(all_logprobs, TOP)
                top_ids.append(top.indices.tolist())
                top_logprobs.append([round(value, 5) for value in top.values.tolist()])
            ids = torch.tensor([[greedy[-1]]])
    return {"prompt_ids": prompt, "greedy_ids": greedy, "greedy_logprobs": logprobs,
            "top_ids": top_ids, "top_logprobs": top_logprobs, "min_top2_margin": round(least, 5), "prompt_logits": [round(float(value), 5) for value in first]}


def random_models():
    cases = {}
    for name, arguments in MODELS.items():
        folder = os.path.join(OUT, name)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([os.path.join(ROOT, "tools", "make-model"), "--out", folder, *arguments], check=True)
        for unused in ("tokenizer.json", "tokenizer_config.json"):  # these models are fed with ids only
            os.remove(os.path.join(folder, unused))
        model, cache_class = load(folder)
        rng = random.Random(7)
        cases[name] = []
        for length in LENGTHS:
            case = None
            for _ in range(2000):
                prompt = [rng.randrange(model.config.vocab_size) for _ in range(length)]
                case = answer(model, cache_class, prompt, GREEDY, MARGIN)
                if case is not None:
                    break
            if case is None:
                sys.exit("no clear prompt of length %d for %s: choose another seed" % (length, name))
            cases[name].append(case)
        print(name, [case["min_top2_margin"] for case in cases[name]], flush=True)
    with open(os.path.join(OUT, "engine.json"), "w", encoding="utf-8") as file:
        file.write("{\n" + ",\n".join(json.dumps(name) + ":" + rows(each) for name, each in cases.items()) + "\n}\n")


def stories():
    folder = os.path.join(DATA, "models", "stories260k")
    model, cache_class = load(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cases = []
    for prompt in STORIES:
        case = answer(model, cache_class, tokenizer(prompt).input_ids, STORY_TOKENS, 0)
        cases.append({"prompt": prompt, **case, "greedy_text": tokenizer.decode(case["greedy_ids"])})
        print(repr(prompt), case["min_top2_margin"], flush=True)
    with open(os.path.join(DATA, "golden", "stories260k.json"), "w", encoding="utf-8") as file:
        file.write(rows(cases) + "\n")


def rows(cases):
    """One line for each case, so that a difference can be read."""
    return "[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]"


def main():
    stories()
    random_models()


if __name__ == "__main__":
    main()
