#!/usr/bin/env python3
"""What transformers finds for the perplexity of a text, beside engine_perplexity.

    VENV/bin/python tools/golden/perplexity.py MODEL_DIRECTORY TEXT_FILE IDS_FILE [COUNT]
    build/bin/engine_perplexity MODEL_DIRECTORY IDS_FILE
    build/bin/engine_perplexity MODEL_DIRECTORY IDS_FILE int8

Writes the first COUNT (default 1024) token ids of the text to IDS_FILE and prints the perplexity in float32. VENV as in README.md.
"""
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    model_path, text_path, ids_path = sys.argv[1:4]
    count = int(sys.argv[4]) if len(sys.argv) > 4 else 1024
    with open(text_path, encoding="utf-8") as file:
        ids = AutoTokenizer.from_pretrained(model_path)(file.read())["input_ids"][:count]
    with open(ids_path, "w", encoding="ascii") as file:
        file.write("\n".join(map(str, ids)) + "\n")
    model = AutoModelForCausalLM.from_pretrained(model_path, torch_dtype=torch.float32).eval()
    batch = torch.tensor([ids])
    with torch.no_grad():
        logs = torch.log_softmax(model(batch).logits[0, :-1].double(), dim=-1)
    loss = -logs.gather(1, batch[0, 1:, None]).mean()
    print(f"transformers, float32: {len(ids)} tokens, perplexity {loss.exp():.4f}")


main()
