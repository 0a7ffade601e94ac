#!/usr/bin/env python3
"""Writes the golden files of the tokenizer tests with the `tokenizers` library.

    python3 -m venv VENV && VENV/bin/pip install tokenizers==0.23.3
    VENV/bin/python tools/golden/tokenizer_golden.py

Trains tests/data/tokenizers/bytelevel/tokenizer.json (a byte-level BPE like Llama 3's, from text made here), then writes
tests/data/golden/tokenizer_NAME.json for both tokenizers. Deterministic: the same library version writes the same files.

A golden file: {"library": version, "texts": [[text, ids without special tokens, decode() or null if it is the text]...],
"decodes": [[ids, decode(skip_special_tokens=True), decode(skip_special_tokens=False) or null if the same]...],
"with_special": [[text, ids]...]}. tokenizer_variants.json: see variants().
"""
import json
import os
import random

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "data")
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")

SENTENCES = [
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park.",
    "One day, she saw a big, red ball. \"It's too high!\" she said. They'd found it; we'll go, I'm sure you've seen it.",
    "IT'S WE'LL THEY'RE I'M YOU'VE HE'D don'T", "it'ſ we'Ll İstanbul ıI ﬁne ﬀ ß ẞ K Å",
    "Die Straße führt über größere Hügel nach Österreich, wo süße Äpfel wachsen.",
    "L'été, le garçon mangeait du bœuf à Noël; ça va? Où êtes-vous?",
    "La niña pequeña comió piñones en el jardín. ¿Qué pasó? ¡Olé!",
    "Zażółć gęślą jaźń. Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.", "日本語と中文 mixed 한국어 텍스트 ça va?", "我们今天去公园玩,好吗?她说:“好的!”",
    "東京都の天気は晴れです。カタカナとひらがな。ﾊﾝｶｸ", "안녕하세요 세계. 각 각 힣",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣٤٥", "שלום עולם, מה שלומך?", "नमस्ते दुनिया, क्या हाल है? १२३",
    "สวัสดีชาวโลก ๑๒๓", "გამარჯობა მსოფლიო", "ሰላም ዓለም", "😀 😃👍🏽 👨‍👩‍👧‍👦 🇮🇹🇩🇪 ❤️ 1️⃣", "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α∧¬β = ½ + ²³ ⅷ",
    "def f(x):\n    return x**2 + 0x1F  # comment\n\n\nclass A:\n\tpass\r\n", "{\"key\": [1, 2.5e-10, null, true], \"a\\u00e9\": \"\\n\"}",
    "12345678901234567890 3.14159 1,000,000 v1.2.3 2026-11-29T19:34:14Z", "http://example.org/a_b?c=d&e=%20f#g <b>bold</b>",
    "e\u0301 e\u0327\u0301 e\u0301\u0327 a\u0308\u0304 \u1e9b\u0323 \u212b \u2126 \u0958 \u1100\u1161\u11a8 \uac00\u11a8 \u0f73\u0f71",
    "\u0301leading mark", "a\u00a0b\u2003c\u3000d\u2028e\u2029f\u0085g\u180eh\u200bi\u202fj\u1680k\ufeffl\x0b\x0cm\x1cn",
    "tab\tand\x00nul\x01\x7f\x80\x9f end", "\U00010000\U0010ffff\ue000\ufffd\ufffe\uffff", "▁a▁▁b ▁c", "<0x41><0xZZ><unk>", "Ġa ĠĊ Ã©",
]
SPECIAL = ["<s>", "</s>", "<unk>", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<tool_call>", "<tool>", "</tool_call>",
           "<|begin", "<|", "naïve tag", "é́x"]


def corpus(rng):
    """Text to train on: the sentences' words in many orders."""
    words = " ".join(SENTENCES).split(" ")
    for _ in range(400):
        yield " ".join(rng.choice(words) for _ in range(rng.randint(3, 30)))
    for sentence in SENTENCES:
        for _ in range(3):
            yield sentence


def train():
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1000, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(corpus(random.Random(7)), trainer)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("<tool>", normalized=False),
                          AddedToken("nai\u0308ve tag", normalized=True)])
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B",
                                      special_tokens=[("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))])])
    folder = os.path.join(DATA, "tokenizers", "bytelevel")
    os.makedirs(folder, exist_ok=True)
    tokenizer.save(os.path.join(folder, "tokenizer.json"), pretty=False)
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as out:
        json.dump({"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot_id|>", "special": True}}, out)
        out.write("\n")
    return tokenizer


def random_char(rng):
    while True:
        kind = rng.randrange(8)
        if kind < 3:
            code = rng.randrange(0x80)
        elif kind < 5:
            code = rng.randrange(0x800)
        elif kind < 7:
            code = rng.randrange(0x10000)
        else:
            code = rng.randrange(0x110000)
        # Unassigned code points differ with the Unicode version of each library, not with the rules tested here.
        if not 0xd800 <= code < 0xe000 and is_assigned(chr(code)):
            return chr(code)


def is_assigned(char):
    import unicodedata
    return unicodedata.category(char) not in ("Cn", "Co")


def texts(rng, count):
    made = ["", " ", "  ", "\n", " \n ", "a", " a", "a ", "  a  ", "\n\n\n", "\r\n \r\n", "   \n   x", "a" * 300, "ab" * 150, " " * 100,
            "\u0301\u0327" * 40 + "a"]
    made += SENTENCES
    made += [" " + s for s in SPECIAL] + SPECIAL + [a + b for a in SPECIAL[:6] for b in ("x", " x", "</s>", "<|eot_id|>")]
    while len(made) < count:
        kind = rng.randrange(6)
        if kind == 0:
            text = "".join(random_char(rng) for _ in range(rng.randint(1, 24)))
        elif kind == 1:
            sentence = rng.choice(SENTENCES)
            begin = rng.randrange(len(sentence))
            text = sentence[begin:begin + rng.randint(1, 60)]
        elif kind == 2:
            words = " ".join(SENTENCES).split(" ")
            text = rng.choice(["", " ", "\n"]).join(rng.choice(words) for _ in range(rng.randint(1, 6)))
        elif kind == 3:
            text = "".join(rng.choice([" ", "  ", "\n", "\t", "\r\n", "a", "The", "'s", "'LL", "1", "1234", "é", "e\u0301", ".", "?!", "日",
                                       "\u00a0", "▁", "_"]) for _ in range(rng.randint(1, 20)))
        elif kind == 4:
            text = "".join(rng.choice(SPECIAL + [" ", "a", "the ", "\n"]) for _ in range(rng.randint(1, 8)))
        else:
            text = "".join(rng.choice("abeht \n") for _ in range(rng.randint(1, 40)))
        made.append(text)
    return made


def golden(tokenizer, name, text_count, seed):
    rng = random.Random(seed)
    out = {"library": "tokenizers " + tokenizers.__version__, "texts": [], "decodes": [], "with_special": []}
    for text in texts(rng, text_count):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.decode(ids)
        out["texts"].append([text, ids, None if decoded == text else decoded])
    for text in SENTENCES[:4] + [""]:
        out["with_special"].append([text, tokenizer.encode(text).ids])
    size = tokenizer.get_vocab_size()
    for i in range(400):
        low = rng.choice([0, 0, 3, 259])
        ids = [rng.randrange(low, rng.choice([size, size, min(size, 259), size + 20]) if low < 259 else size) for _ in range(rng.randint(1, 24))]
        plain = tokenizer.decode(ids)
        special = tokenizer.decode(ids, skip_special_tokens=False)
        out["decodes"].append([ids, plain, None if special == plain else special])
    path = os.path.join(DATA, "golden", "tokenizer_" + name + ".json")
    with open(path, "w", encoding="utf-8") as file:
        for key, value in out.items():
            file.write(("{" if key == "library" else ",") + "\n" + json.dumps(key) + ":")
            if isinstance(value, str):
                file.write(json.dumps(value))
            else:
                file.write("[\n" + ",\n".join(json.dumps(row, ensure_ascii=True, separators=(",", ":")) for row in value) + "\n]")
        file.write("\n}\n")
    print(path, os.path.getsize(path), "bytes")


def split(pattern, behavior, invert=False):
    kind = "Regex" if pattern is not LITERAL else "String"
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


LITERAL = " "
GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = ["\\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
            "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


def metaspace(scheme, is_split):
    return {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": is_split}}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


VARIANTS = [
    ("stories", metaspace("first", False)), ("stories", metaspace("always", False)), ("stories", metaspace("never", False)),
    ("stories", metaspace("first", True)), ("stories", metaspace("always", True)),
    ("stories", {"normalizer": {"type": "NFC"}, **{"decoder.decoders.3.start": 2}}),
    ("stories", {"normalizer": REPLACE, "pre_tokenizer": split(LITERAL, "MergedWithPrevious")}),  # Gemma
    ("stories", {"normalizer": None, "pre_tokenizer": split(LITERAL, "MergedWithPrevious")}),
    ("stories", {"normalizer": None, "pre_tokenizer": split(LITERAL, "MergedWithNext")}),
    ("stories", {"normalizer": None, "pre_tokenizer": split(LITERAL, "Removed")}),
    ("stories", {"normalizer": None, "pre_tokenizer": split("[a-z]+", "Removed", True)}),
    ("stories", {"normalizer": None, "pre_tokenizer": split("[a-z]", "Isolated", True), "model.ignore_merges": True}),
    ("stories", {"added_tokens.1.normalized": True, "added_tokens.1.special": False, "post_processor": None}),
    ("stories", {"added_tokens.2.special": False, "decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]}}),
    ("bytelevel", {"pre_tokenizer": {**BYTES, "use_regex": True}, "model.ignore_merges": False}),  # GPT-2
    ("bytelevel", {"pre_tokenizer": {**BYTES, "use_regex": True, "add_prefix_space": True}, "normalizer": None}),
    ("bytelevel", {"pre_tokenizer": {**BYTES, "add_prefix_space": True}}),
    ("bytelevel", {"pre_tokenizer": sequence(split(LLAMA3.replace("{1,3}", ""), "Isolated"), BYTES), "model.ignore_merges": False}),  # Qwen
    ("bytelevel", {"pre_tokenizer": sequence(split(GPT4O, "Isolated"), BYTES)}),
    ("bytelevel", {"pre_tokenizer": sequence(*[split(p, "Isolated") for p in DEEPSEEK], BYTES), "normalizer": None}),
    ("bytelevel", {"pre_tokenizer": sequence(split(GPT4O, "Removed", True), BYTES), "model.ignore_merges": False}),
    ("bytelevel", {"pre_tokenizer": sequence(split(r"\s", "MergedWithNext"), {**BYTES, "add_prefix_space": True})}),
    ("bytelevel", {"pre_tokenizer": sequence(split(r"[\p{Han}\p{Greek}\p{^Latin}]|\d+|\S\v|\u00e9|(?<=a)b++|(?>c+)", "Isolated"), BYTES)}),
    ("bytelevel", {"pre_tokenizer": sequence({"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True})}),  # SmolLM
    ("bytelevel", {"pre_tokenizer": sequence({"type": "Digits", "individual_digits": False}, BYTES), "model.ignore_merges": False}),
]


def change(tree, path, value):
    keys = path.split(".")
    for key in keys[:-1]:
        tree = tree[int(key)] if isinstance(tree, list) else tree[key]
    tree[keys[-1]] = value


def variants():
    """The same two tokenizers with other settings: rows of [base, {path: value}, [[text, ids, decode() or null]...]]."""
    rng = random.Random(3)
    pool = texts(rng, 700)
    bases = {"stories": os.path.join("models", "stories260k"), "bytelevel": os.path.join("tokenizers", "bytelevel")}
    rows = []
    for base, changes in VARIANTS:
        with open(os.path.join(DATA, bases[base], "tokenizer.json"), encoding="utf-8") as file:
            tree = json.load(file)
        for path, value in changes.items():
            change(tree, path, value)
        tokenizer = Tokenizer.from_str(json.dumps(tree))
        chosen = pool[:len(pool) // 6] if base == "stories" else pool[:len(pool) // 5]
        chosen = rng.sample(chosen, len(chosen) // 2) + rng.sample(pool, 60)
        made = []
        for text in chosen:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            decoded = tokenizer.decode(ids)
            made.append([text, ids, None if decoded == text else decoded])
        rows.append([base, {path: json.dumps(value) for path, value in changes.items()}, made])
    path = os.path.join(DATA, "golden", "tokenizer_variants.json")
    with open(path, "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(row, ensure_ascii=True, separators=(",", ":")) for row in rows) + "\n]\n")
    print(path, os.path.getsize(path), "bytes")


def main():
    stories = Tokenizer.from_file(os.path.join(DATA, "models", "stories260k", "tokenizer.json"))
    golden(stories, "stories260k", 2000, 1)
    golden(train(), "bytelevel", 1200, 2)
    variants()


if __name__ == "__main__":
    main()
