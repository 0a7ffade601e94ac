"""One model directory as several: F32 and BF16 directories for our engine, F32, BF16 and Q8_0 GGUF files for its peers.

The same values everywhere: what BF16 rounds, every variant has rounded (F32 is then its exact widening). Llama architecture only.
"""
import importlib.machinery
import importlib.util
import json
import os
import shutil
import struct

import numpy

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def load_script(path):
    loader = importlib.machinery.SourceFileLoader("convert_gguf", path)
    spec = importlib.util.spec_from_loader("convert_gguf", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


convert = load_script(os.path.join(ROOT, "tools", "convert-gguf"))
NAMES = {theirs: ours for ours, theirs in convert.NAMES.items()}
LAYER_NAMES = {theirs: ours for ours, theirs in convert.LAYER_NAMES.items()}
BLOCK = 32  # of Q8_0


class Refused(Exception):
    """Why a variant cannot be made, for people."""


def read_tensors(folder):
    """name -> float32 array, in the file's order."""
    path = os.path.join(folder, "model.safetensors")
    if not os.path.exists(path):
        raise Refused(f"{folder} has no model.safetensors (shards are not read here)")
    data = memoryview(numpy.memmap(path, mode="r"))
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(bytes(data[8:8 + length]))
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors[name] = convert.floats(entry["dtype"], entry["shape"], data[8 + length + begin:8 + length + end])
    return tensors


def rounded(values):
    return (convert.bf16(values).astype(numpy.uint32) << 16).view(numpy.float32).reshape(values.shape)


def write_directory(source, config, tensors, dtype, out):
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    with open(os.path.join(out, "config.json"), "w", encoding="utf-8") as file:
        json.dump({**config, "torch_dtype": {"F32": "float32", "BF16": "bfloat16"}[dtype]}, file)
    header, at = {}, 0
    for name, values in tensors.items():
        length = values.size * convert.BYTES_OF[dtype]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(out, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in tensors.values():
            file.write(convert.encode(dtype, values))


# ---- GGUF ----

def q8_0(values):
    if values.shape[-1] % BLOCK:
        raise Refused(f"rows of {values.shape[-1]} values are not whole blocks of Q8_0")
    blocks = values.reshape(-1, BLOCK)
    scale = (numpy.abs(blocks).max(axis=1) / 127).astype(numpy.float32)
    inverse = numpy.where(scale > 0, 1 / numpy.where(scale > 0, scale, 1), 0)
    out = numpy.empty(len(blocks), numpy.dtype([("d", "<f2"), ("q", "i1", BLOCK)]))
    out["d"] = scale
    out["q"] = numpy.rint(blocks * inverse[:, None])
    return out.tobytes()


def gguf_name(name):
    if name in NAMES:
        return NAMES[name]
    parts = name.split(".", 3)
    if parts[:2] == ["model", "layers"] and len(parts) == 4 and parts[3] in LAYER_NAMES:
        return f"blk.{parts[2]}.{LAYER_NAMES[parts[3]]}"
    raise Refused(f"tensor {name!r} has no name in GGUF")


def permuted(values, heads):
    """Halves of a head to neighbouring pairs: the way back from convert-gguf's unpermute."""
    rows, cols = values.shape
    return values.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def write_gguf(config, tensors, label, out):
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    numbers = {"block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
               "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
               "attention.head_count_kv": "num_key_value_heads", "vocab_size": "vocab_size"}
    keys = [text("general.architecture") + struct.pack("<I", 8) + text("llama"),
            text("general.name") + struct.pack("<I", 8) + text("random"),
            text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("no_vocab")]
    keys += [text("llama." + name) + struct.pack("<II", 4, config[key]) for name, key in numbers.items()]
    keys += [text("llama." + name) + struct.pack("<II", 4, head) for name in ("rope.dimension_count", "attention.key_length",
                                                                             "attention.value_length")]
    keys += [text("llama." + name) + struct.pack("<If", 6, value) for name, value in
             (("attention.layer_norm_rms_epsilon", config["rms_norm_eps"]), ("rope.freq_base", config["rope_theta"]))]
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    kinds = {name: number for number, (name, _, _) in convert.TYPES.items()}
    table, bodies, at = [], [], 0
    for name, values in tensors.items():
        part = ".".join(name.split(".")[-3:-1])
        if part in heads:
            values = permuted(values, heads[part])
        kind = label if values.ndim == 2 else "F32"
        body = q8_0(values) if kind == "Q8_0" else convert.encode(kind, values)
        shape = values.shape[::-1]
        table.append(text(gguf_name(name)) + struct.pack("<I%dQIQ" % len(shape), len(shape), *shape, kinds[kind], at))
        bodies.append(body + b"\0" * (-len(body) % convert.ALIGNMENT))
        at += len(bodies[-1])
    data = b"GGUF" + struct.pack("<IQQ", 3, len(table), len(keys)) + b"".join(keys) + b"".join(table)
    with open(out, "wb") as file:
        file.write(data + b"\0" * (-len(data) % convert.ALIGNMENT))
        for body in bodies:
            file.write(body)


def make(source, work):
    """Makes what is missing below `work`; returns {format: (model directory, weights of engine_bench, GGUF file)}."""
    with open(os.path.join(source, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    if config.get("model_type") != "llama":
        raise Refused(f"{source} is not of the llama architecture")
    name = os.path.basename(os.path.abspath(source))
    base = os.path.join(work, name)
    os.makedirs(base, exist_ok=True)
    made, tensors = {}, None
    for label, dtype, kind, weights in (("f32", "F32", "F32", "file"), ("bf16", "BF16", "BF16", "file"), ("int8", "BF16", "Q8_0", "int8")):
        folder, file = os.path.join(base, dtype.lower(), name), os.path.join(base, f"{kind.lower()}.gguf")
        if not (os.path.exists(file) and os.path.isdir(folder)):
            if tensors is None:
                tensors = {key: rounded(values) for key, values in read_tensors(source).items()}
            try:
                write_gguf(config, tensors, kind, file + ".new")
            except Refused as sentence:
                print(f"{name}: no {label}: {sentence}")
                continue
            if not os.path.isdir(folder):
                shutil.rmtree(folder + ".new", ignore_errors=True)
                write_directory(source, config, tensors, dtype, folder + ".new")
                os.rename(folder + ".new", folder)
            os.rename(file + ".new", file)
        made[label] = (folder, weights, file)
    return name, made
