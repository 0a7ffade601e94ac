#!/usr/bin/python3
"""tools/convert-gguf: the committed model written as GGUF and converted back is the same model; every block type; hostile files."""
import json
import os
import random
import shutil
import struct
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOOL = os.path.join(ROOT, "tools", "convert-gguf")
MODEL = os.path.join(ROOT, "tests", "data", "models", "stories260k")
F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9


# ---- a writer of GGUF, from its specification

def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind, what):
    if kind == STRING:
        return text(what)
    if isinstance(kind, tuple):
        return struct.pack("<IQ", kind[1], len(what)) + b"".join(value(kind[1], each) for each in what)
    return struct.pack({UINT32: "<I", FLOAT32: "<f", BOOL: "<?", 5: "<i"}[kind], what)


def gguf(keys, tensors):
    """keys: name -> (type, value); tensors: name -> (type, shape as rows x columns, bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for name, (kind, what) in keys.items():
        out += text(name) + struct.pack("<I", ARRAY if isinstance(kind, tuple) else kind) + value(kind, what)
    at = 0
    for name, (kind, shape, raw) in tensors.items():
        out += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", count) for count in reversed(shape))
        out += struct.pack("<IQ", kind, at)
        at += -(-len(raw) // 32) * 32
    out += b"\0" * (-len(out) % 32)
    return out + b"".join(raw + b"\0" * (-len(raw) % 32) for _, _, raw in tensors.values())


# ---- model directories

def read_tensors(folder):
    with open(os.path.join(folder, "model.safetensors"), "rb") as file:
        data = file.read()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    return {name: (each["dtype"], each["shape"], data[8 + length:][slice(*each["data_offsets"])]) for name, each in header.items()}


def read_json(folder, name):
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        return json.load(file)


def permuted(raw, heads, rows):
    """Rows as the llama architecture has them in GGUF: of each head, rows i and i + half become neighbours."""
    size = len(raw) // rows
    half = rows // heads // 2
    order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in range(2)]
    return b"".join(raw[row * size:(row + 1) * size] for row in order)


def stories():
    """The committed model as keys and tensors of a GGUF file."""
    config, tokenizer = read_json(MODEL, "config.json"), read_json(MODEL, "tokenizer.json")
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm"}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name, (dtype, shape, raw) in read_tensors(MODEL).items():
        assert dtype == "F32", dtype
        parts = name.split(".")
        if parts[1] == "layers":
            short = names[".".join(parts[3:-1])]
            if short in heads:
                raw = permuted(raw, heads[short], shape[0])
            tensors[f"blk.{parts[2]}.{short}.weight"] = (F32, shape, raw)
        else:
            tensors[{"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]] + ".weight"] = (F32, shape, raw)
    vocab = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    ranks = {}
    for at, merge in enumerate(tokenizer["model"]["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(left + right, at)
    kinds = [3 if at in (1, 2) else 2 if at == 0 else 6 if token.startswith("<0x") else 1 for at, token in enumerate(tokens)]
    keys = {
        "general.architecture": (STRING, "llama"), "llama.block_count": (UINT32, config["num_hidden_layers"]),
        "llama.context_length": (UINT32, config["max_position_embeddings"]), "llama.embedding_length": (UINT32, config["hidden_size"]),
        "llama.feed_forward_length": (UINT32, config["intermediate_size"]),
        "llama.attention.head_count": (UINT32, config["num_attention_heads"]),
        "llama.attention.head_count_kv": (UINT32, config["num_key_value_heads"]),
        "llama.attention.layer_norm_rms_epsilon": (FLOAT32, config["rms_norm_eps"]), "llama.rope.freq_base": (FLOAT32, config["rope_theta"]),
        "tokenizer.ggml.model": (STRING, "llama"), "tokenizer.ggml.tokens": ((ARRAY, STRING), tokens),
        "tokenizer.ggml.scores": ((ARRAY, FLOAT32), [-float(ranks.get(token, 0)) for token in tokens]),
        "tokenizer.ggml.token_type": ((ARRAY, 5), kinds), "tokenizer.ggml.bos_token_id": (UINT32, 1),
        "tokenizer.ggml.eos_token_id": (UINT32, 2), "tokenizer.ggml.unknown_token_id": (UINT32, 0),
    }
    return keys, tensors


def half(number):
    return struct.unpack("<e", struct.pack("<e", number))[0]


class Convert(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="baton-test-")
        self.addCleanup(shutil.rmtree, self.folder, True)

    def run_tool(self, data, *arguments, name="made"):
        path = os.path.join(self.folder, "model.gguf")
        with open(path, "wb") as file:
            file.write(data)
        out = os.path.join(self.folder, name)
        done = subprocess.run([TOOL, path, "--out", out, *arguments], capture_output=True, text=True, check=False, timeout=60)
        return done, out

    def converted(self, keys, tensors, *arguments, name="made"):
        done, out = self.run_tool(gguf(keys, tensors), *arguments, name=name)
        self.assertEqual(done.returncode, 0, done.stderr)
        return out

    def refused(self, keys, tensors, sentence):
        done, out = self.run_tool(gguf(keys, tensors))
        self.assertEqual(done.returncode, 1)
        self.assertIn(sentence, done.stderr)
        self.assert_clean(done, out)

    def assert_clean(self, done, out):
        self.assertNotIn("Traceback", done.stderr)
        self.assertTrue(done.stderr.startswith("convert-gguf: "), done.stderr)
        self.assertFalse(os.path.exists(out), "something was left behind")
        self.assertEqual(os.listdir(self.folder), ["model.gguf"])

    def test_a_model_comes_back_as_it_was(self):
        keys, tensors = stories()
        out = self.converted(keys, tensors)
        self.assertEqual(read_tensors(out), read_tensors(MODEL))
        wanted, made = read_json(MODEL, "config.json"), read_json(out, "config.json")
        self.assertEqual({name: made.get(name) for name in wanted}, wanted)
        wanted, made = read_json(MODEL, "tokenizer.json")["model"], read_json(out, "tokenizer.json")["model"]
        self.assertEqual(made["vocab"], wanted["vocab"])
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in wanted["merges"]]
        kept = {"".join(pair) for pair in pairs}
        self.assertEqual(sorted(map(tuple, pairs)), sorted(tuple(pair) for pair in made["merges"] if "".join(pair) in kept))

    def test_every_block_type_has_the_values_of_its_definition(self):
        draw = random.Random(3)
        keys, tensors = stories()
        hidden, ffn = 64, 172
        rows = ffn
        for kind, size in ((Q8_0, 34), (Q4_0, 18), (Q4_1, 20)):
            raw, wanted = b"", []
            for _ in range(rows * hidden // 32):
                scale, low = half(draw.uniform(-0.1, 0.1)), half(draw.uniform(-1, 1))
                block = struct.pack("<e", scale)
                if kind == Q8_0:
                    quants = [draw.randrange(-128, 128) for _ in range(32)]
                    block += struct.pack("<32b", *quants)
                    wanted += [scale * quant for quant in quants]
                else:
                    quants = [draw.randrange(16) for _ in range(32)]
                    block += struct.pack("<e", low) if kind == Q4_1 else b""
                    block += bytes(quants[i] | quants[i + 16] << 4 for i in range(16))
                    wanted += [scale * quant + low if kind == Q4_1 else scale * (quant - 8) for quant in quants]
                self.assertEqual(len(block), size)
                raw += block
            tensors["blk.0.ffn_up.weight"] = (kind, [rows, hidden], raw)
            out = self.converted(keys, tensors, "--dtype", "f32", name=f"exact-{kind}")
            exact = struct.unpack(f"<{len(wanted)}f", read_tensors(out)["model.layers.0.mlp.up_proj.weight"][2])
            for one, other in zip(exact, wanted):
                self.assertAlmostEqual(one, other, delta=1e-6)

    def test_bf16_is_rounded_to_the_nearest_even(self):
        keys, tensors = stories()
        shape = tensors["blk.0.ffn_up.weight"][1]
        for name, (kind, its_shape, raw) in list(tensors.items()):
            if len(its_shape) == 2:  # a quantised model: all matrices are
                count = its_shape[0] * its_shape[1] // 32
                if its_shape[1] % 32 == 0:
                    tensors[name] = (Q8_0, its_shape, (struct.pack("<e", 1 / 256) + bytes(range(100, 132))) * count)
                else:
                    tensors[name] = (F32, its_shape, raw)
        out = self.converted(keys, tensors)
        dtype, made_shape, raw = read_tensors(out)["model.layers.0.mlp.up_proj.weight"]
        self.assertEqual((dtype, made_shape), ("BF16", shape))
        first = struct.unpack("<32H", raw[:64])
        for at, bits in enumerate(first):
            byte = (100 + at + 128) % 256 - 128
            self.assertEqual(struct.unpack("<f", struct.pack("<I", bits << 16))[0], byte / 256)  # 8 bits are enough

    def test_what_is_not_served_is_refused_by_name(self):
        keys, tensors = stories()

        def changed(**changes):
            return {**keys, **{name.replace("__", "."): each for name, each in changes.items()}}

        name = "blk.0.attn_v.weight"
        kind, shape, raw = tensors[name]
        rows = [
            (changed(general__architecture=(STRING, "mamba")), tensors, "the architecture 'mamba' is not read"),
            (changed(llama__expert_count=(UINT32, 8)), tensors, "has experts"),
            (changed(llama__rope__scaling__type=(STRING, "yarn")), tensors, "rotary scaling 'yarn' is not read"),
            (changed(tokenizer__ggml__model=(STRING, "bert")), tensors, "the tokenizer model 'bert' is not read"),
            (changed(llama__block_count=(STRING, "five")), tensors, "not a value of type int"),
            (changed(llama__block_count=(UINT32, 2)), tensors, "has no place in this architecture"),
            (changed(tokenizer__ggml__eos_token_id=(UINT32, 9999)), tensors, "the eos token 9999 is not in the vocabulary of 512"),
            ({key: each for key, each in keys.items() if key != "llama.embedding_length"}, tensors, "'llama.embedding_length' is missing"),
            (keys, {**tensors, name: (12, shape, raw)}, "is of the type Q4_K, which is not read"),
            (keys, {**tensors, name: (kind, [1 << 40, 64], raw)}, "has the shape"),
            (keys, {**tensors, name: (Q8_0, [32, 65], raw)}, "are not whole blocks of 32"),
            (keys, {**tensors, "blk.0.what.weight": (kind, shape, raw)}, "has no place"),
            (keys, {**tensors, name: (kind, shape, struct.pack("<f", float("nan")) * (len(raw) // 4))}, "not finite"),
        ]
        for number, (its_keys, its_tensors, sentence) in enumerate(rows):
            with self.subTest(number=number):
                self.refused(its_keys, its_tensors, sentence)

    def test_damaged_files_get_a_sentence_and_leave_nothing(self):
        data = gguf(*stories())
        draw = random.Random(11)
        head = 24000  # keys and the tensor table
        for number in range(24):
            if number % 2:
                made = data[:draw.randrange(len(data) if number % 3 else head)]
            else:
                made = bytearray(data)
                for _ in range(draw.choice((1, 3))):
                    made[draw.randrange(head)] = draw.randrange(256)
            done, out = self.run_tool(bytes(made), name="damaged")
            self.assertNotIn("Traceback", done.stderr)
            if done.returncode == 0:
                shutil.rmtree(out)  # a byte that does not matter
            else:
                self.assert_clean(done, out)

    def test_a_folder_that_is_in_use_is_not_touched(self):
        out = os.path.join(self.folder, "made")
        os.mkdir(out)
        with open(os.path.join(out, "mine"), "w", encoding="ascii"):
            pass
        done, _ = self.run_tool(gguf(*stories()))
        self.assertEqual(done.returncode, 1)
        self.assertIn("is not an empty folder", done.stderr)
        self.assertEqual(os.listdir(out), ["mine"])


if __name__ == "__main__":
    unittest.main()
