#!/usr/bin/python3
"""Whatever comes in costs only itself: a clear sentence, nothing else disturbed, no process dies, no descriptor leaks."""
import contextlib
import json
import os
import random
import re
import shutil
import socket
import ssl
import struct
import threading
import time

from harness import (GOLDEN, MODEL, MODEL_DIR, Canary, Case, Client, Metrics, at_rest, client, clusters, descriptors,
                     descriptors_settle, filler, grpc, main, make_request, random_model, until, warm)

CONTEXT = 512
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def change_json(folder, name, change):
    path = os.path.join(folder, name)
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    change(content)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def set_value(folder, tensor, index, value):
    """Overwrites one number of a tensor in model.safetensors."""
    with open(os.path.join(folder, "model.safetensors"), "r+b") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        begin, end = json.loads(file.read(length))[tensor]["data_offsets"]
        assert begin + 4 * index < end
        file.seek(8 + length + begin + 4 * index)
        file.write(struct.pack("<f", value))


def two_shards(folder):
    """Two files with all the tensors in both."""
    path = os.path.join(folder, "model.safetensors")
    with open(path, "rb") as file:
        names = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    names.pop("__metadata__", None)
    shutil.copy(path, os.path.join(folder, "model-1.safetensors"))
    os.rename(path, os.path.join(folder, "model-2.safetensors"))
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="ascii") as file:
        json.dump({"weight_map": {name: f"model-{1 + index % 2}.safetensors" for index, name in enumerate(names)}}, file)


class Requests(Case):
    """One cluster for the class: the cases must not disturb each other either."""

    def test_bad_requests_are_refused_with_a_sentence(self):
        made = self.cluster(arguments={"router": ["--disaggregate-above", "0"]})
        warm(made)
        nan, inf = float("nan"), float("inf")
        cases = [
            ("unknown model", make_request("a", model="nobody"), grpc.StatusCode.NOT_FOUND, "nobody"),
            ("empty model", make_request("a", model=""), INVALID, "model"),
            ("long model", make_request("a", model="m" * 64), INVALID, "model"),
            ("empty prompt", make_request(""), INVALID, "prompt"),
            ("no input", self.without_input(), INVALID, "prompt"),
            ("no token ids", self.empty_ids(), INVALID, "token_ids"),
            ("prompt over the context", make_request(filler(CONTEXT + 1)), INVALID, str(CONTEXT)),
            ("prompt fills the context", make_request(filler(CONTEXT)), INVALID, str(CONTEXT)),
            ("text over the context", make_request("word " * 2000), INVALID, str(CONTEXT)),
            ("prompt + max_tokens over the context", make_request(filler(500), max_tokens=13), INVALID, "max_tokens"),
            ("no max_tokens, and no room", make_request(filler(512), max_tokens=0), INVALID, "no room for an answer"),
            ("huge max_tokens", make_request("a", max_tokens=2 ** 32 - 1), INVALID, "max_tokens"),
            ("token id outside the vocabulary", make_request([1, 512]), INVALID, "512"),
            ("token id at the end of its type", make_request([2 ** 32 - 1]), INVALID, "4294967295"),
            ("long request_id", make_request("a", request_id="r" * 64), INVALID, "request_id"),
            ("long session_id", make_request("a", session_id="s" * 64), INVALID, "session_id"),
            ("too many stop strings", make_request("a", stop=["x"] * 17), INVALID, "stop"),
            ("empty stop string", make_request("a", stop=[""]), INVALID, "stop"),
            ("long stop string", make_request("a", stop=["x" * 1025]), INVALID, "stop"),
            ("too many stop tokens", make_request("a", stop_token_ids=range(17)), INVALID, "stop_token_ids"),
            ("stop token outside", make_request("a", stop_token_ids=[512]), INVALID, "stop_token_ids"),
            ("min_tokens over max_tokens", make_request("a", max_tokens=2, min_tokens=3), INVALID, "min_tokens"),
            ("too many biases", make_request("a", logit_bias={id: 1.0 for id in range(65)}), INVALID, "logit_bias"),
            ("bias outside the vocabulary", make_request("a", logit_bias={512: 1.0}), INVALID, "logit_bias"),
            ("bias out of range", make_request("a", logit_bias={5: 100.5}), INVALID, "logit_bias"),
            ("bias NaN", make_request("a", logit_bias={5: nan}), INVALID, "logit_bias"),
            ("logprobs", make_request("a", logprobs=21), INVALID, "logprobs is 21: it must be at most 20"),
        ]
        wrong = {"temperature": (-0.1, 100.5, nan, inf, -inf), "top_p": (0.0, -1.0, 1.01, nan), "top_k": (-2, -2 ** 31),
                 "min_p": (-0.1, 1.1, nan), "frequency_penalty": (-2.1, 2.1, nan), "presence_penalty": (-2.1, 2.1, inf),
                 "repetition_penalty": (0.0, -1.0, 100.5, nan)}
        for field, values in wrong.items():
            cases += [(f"{field} {value}", make_request("a", **{field: value}), INVALID, field) for value in values]
        before = {each: descriptors(each) for each in made.routers() + made.workers()}
        with client(made) as each, Canary(made) as canary:
            for name, request, wanted, word in cases:
                with self.subTest(case=name):
                    code, sentence = each.refused(request)
                    self.assertEqual(code, wanted, sentence)
                    self.assertIn(word, sentence)
                    self.assertGreater(len(sentence), len(word) + 8, "a sentence says what to change")
            self.assertEqual(len(each.ask("a", max_tokens=1).ids), 1)
            canary.answers_again(5)
        at_rest(made)
        self.assert_alive(made)
        descriptors_settle(made, before, 2)
        self.assert_no_faults(made)

    @staticmethod
    def without_input():
        request = make_request("a")
        request.ClearField("prompt")
        return request

    @staticmethod
    def empty_ids():
        request = make_request("a")
        request.token_ids.SetInParent()
        return request

    def raw(self, each, method, data, streams=False):
        """(code, sentence) of a call with these bytes as the message."""
        kind = each.channel.unary_stream if streams else each.channel.unary_unary
        call = kind(f"/baton.v1.Inference/{method}", request_serializer=lambda data: data,
                    response_deserializer=lambda data: data)
        try:
            answer = call(data, timeout=20)
            return grpc.StatusCode.OK, list(answer) if streams else answer
        except grpc.RpcError as error:
            return error.code(), error.details()

    def test_messages_that_are_no_messages(self):
        made = self.cluster()
        warm(made)
        good = make_request("Hello", max_tokens=2).SerializeToString()
        draw = random.Random(3)
        with client(made) as each, Canary(made) as canary:
            self.assertEqual(self.raw(each, "Generate", good, True)[0], grpc.StatusCode.OK)
            text = b"ab\xff\xfe\xc3"
            for field, word in ((0x12, "prompt"), (0x0a, "model")):
                bad = bytes([field, len(text)]) + text
                bad = (b"\x0a\x0b" + MODEL.encode() if field == 0x12 else b"\x12\x01a") + bad
                code, sentence = self.raw(each, "Generate", bad, True)
                self.assertEqual(code, INVALID, sentence)
                self.assertIn(word, sentence)
                self.assertIn("UTF-8", sentence)
            code, sentence = self.raw(each, "Tokenize", b"\x0a\x0b" + MODEL.encode() + bytes([0x12, len(text)]) + text)
            self.assertEqual(code, INVALID, sentence)
            for data in (b"\xff\xff\xff\xff", b"\x00" * 64, b"\x0a\xff\xff\xff\xff\x0f", good[:-1]):
                code, sentence = self.raw(each, "Generate", data, True)
                self.assertEqual(code, INVALID, sentence)
            for index in range(300):
                data = bytearray(good if index % 2 else draw.randbytes(draw.randrange(1, 200)))
                if index % 2:
                    for _ in range(draw.randrange(1, 4)):
                        data[draw.randrange(len(data))] = draw.randrange(256)
                code, sentence = self.raw(each, ("Generate", "Abort", "Tokenize", "ListModels")[index % 4], bytes(data),
                                          index % 4 == 0)
                self.assertIn(code, (grpc.StatusCode.OK, INVALID, grpc.StatusCode.NOT_FOUND,
                                     grpc.StatusCode.UNIMPLEMENTED), sentence)
            code, sentence = self.raw(each, "NoSuchMethod", b"")
            self.assertEqual(code, grpc.StatusCode.UNIMPLEMENTED, sentence)
            with self.subTest(case="over the message limit"):
                code, sentence = each.refused(make_request("x" * (17 * 1024 * 1024)))
                self.assertIn(code, (INVALID, grpc.StatusCode.RESOURCE_EXHAUSTED))
                self.assertRegex(sentence, "16777216|16 MiB|larger")
            code, sentence = each.refused(make_request("x" * (15 * 1024 * 1024)))
            self.assertEqual(code, INVALID, sentence)
            canary.answers_again(5)
        at_rest(made, 5)
        self.assert_alive(made)


def client_hello():
    """What a TLS client says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
OPENINGS = [b"", client_hello(), HTTP2 + SETTINGS, b"GET /metrics HTTP/1.1\r\nHost: a\r\n",
            b"POST /livez HTTP/1.0\r\nContent-Length: 100\r\n\r\n", b"\x16\x03\x01"]


def recorded(router):
    """All that a real client of the API sends for one request, from its first byte on."""
    taken = []

    def relay(peer, other, keep):
        with contextlib.suppress(OSError):
            while data := peer.recv(65536):
                keep(data)
                other.sendall(data)

    with socket.create_server((clusters.HOST, 0)) as listener, \
            socket.create_connection((clusters.HOST, router.ports["grpc"])) as there, \
            Client(f"{clusters.HOST}:{listener.getsockname()[1]}") as each:
        call = each.stream(make_request("Once", max_tokens=2))
        here = listener.accept()[0]
        threads = [threading.Thread(target=relay, args=(here, there, taken.append)),
                   threading.Thread(target=relay, args=(there, here, lambda data: None))]
        for thread in threads:
            thread.start()
        list(call)
        for peer in (here, there):
            peer.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        here.close()
    return b"".join(taken)


def strangers(port, talks, seed, until_end, counts):
    """Connects again and again: openings whole, cut, followed by noise, or with bytes changed; some stay and say nothing
    more. counts[port]: how many came."""
    draw = random.Random(seed)
    staying, count = [], 0
    while time.monotonic() < until_end:
        data = bytearray(draw.choice(talks))
        how = draw.randrange(6)
        if how == 0:
            data = data[:draw.randrange(len(data) + 1)]
        elif how in (1, 2):
            data += draw.randbytes(draw.choice((1, 9, 100, 4000, 70000)))
        elif how in (3, 4) and data:
            for _ in range(draw.randrange(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
        if draw.randrange(20) == 0:
            with contextlib.suppress(OSError):
                peer = socket.create_connection((clusters.HOST, port), 5)
                staying.append(peer)
                peer.sendall(data)
            while len(staying) > 40:  # the oldest leaves
                staying.pop(0).close()
        else:
            Strangers.send(port, data, draw.randrange(3))
        count += 1
        time.sleep(0.02)  # the two cores are shared with everybody in the picture
    for peer in staying:
        peer.close()
    counts[port] = count


class Strangers(Case):
    """Bytes on every port. Frames that carry UCX's own magic are not in here: see the README of common/kvlink."""

    CONNECTIONS = 300  # on each port

    def payloads(self):
        draw = random.Random(5)
        http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        fixed = [b"", b"\0", b"\0" * 28, b"\0" * 4096, b"\xff" * 4096, client_hello(), http2, http2 + b"\0" * 9,
                 http2 + struct.pack(">I", 0xffffff00) + b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n",
                 b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", b"GET " + b"a" * 100000 + b" HTTP/1.1\r\n\r\n",
                 b"POST /drain?grace=x HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
                 b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 5000, b"SSH-2.0-x\r\n", b"\x16\x03\x01\xff\xff"]
        for index in range(self.CONNECTIONS):
            yield fixed[index] if index < len(fixed) else draw.randbytes(draw.choice((1, 2, 8, 28, 100, 5000, 70000)))

    @staticmethod
    def send(port, data, how):
        with socket.socket() as peer:
            peer.settimeout(5)
            try:
                peer.connect((clusters.HOST, port))
                peer.sendall(data)
                if how == 0:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset
                elif how == 1:
                    peer.shutdown(socket.SHUT_WR)
                    peer.settimeout(0.2)
                    while peer.recv(65536):
                        pass
            except OSError:
                pass  # closed on us, or silence: both are fine answers

    def test_bytes_on_every_port(self):
        made = self.cluster(arguments={"router": ["--disaggregate-above", "0"]})
        warm(made)
        before = {each: descriptors(each) for each in made.routers() + made.workers()}
        with Canary(made) as canary:
            for member in made.routers() + made.workers():
                for name, port in member.ports.items():
                    with self.subTest(member=str(member), port=name):
                        began = time.monotonic()
                        for index, data in enumerate(self.payloads()):
                            self.send(port, data, index % 3)
                        self.assertTrue(member.alive(), f"{member} died of bytes on {name}:{member.tail(30)}")
                        canary.answers_again(5)
                        self.assertTrue(member.ready()[0], member.ready()[1])
                        self.assertLess(time.monotonic() - began, 60)
            with self.subTest("connections that stay and say nothing"):
                silent = []
                for member in made.routers() + made.workers():
                    for port in member.ports.values():
                        for _ in range(50):
                            silent.append(socket.create_connection((clusters.HOST, port), 5))
                canary.answers_again(5)
                for peer in silent:
                    peer.close()
        self.assert_alive(made)
        descriptors_settle(made, before, 3, within=15)
        at_rest(made)
        self.assert_no_faults(made)

    def test_bytes_on_all_ports_at_once(self):
        """BATON_STRANGERS_SECONDS makes it longer: an hour, say, before a release."""
        seconds = float(os.environ.get("BATON_STRANGERS_SECONDS", "10"))
        made = self.cluster(arguments={"router": ["--disaggregate-above", "0"]})
        warm(made)
        talks = {"grpc": [recorded(made.routers()[0]), *OPENINGS], "admin": OPENINGS, "kv": OPENINGS, "http": OPENINGS}
        members = made.routers() + made.workers()
        before = {each: descriptors(each) for each in members}
        until_end = time.monotonic() + seconds
        counts = {}
        with Canary(made) as canary:
            threads = [threading.Thread(target=strangers, args=(port, talks[name], seed, until_end, counts))
                       for seed, (name, port) in enumerate((name, port) for each in members
                                                           for name, port in sorted(each.ports.items()))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(len(counts), len(threads), "a stranger ended with an exception")
            canary.answers_again(5)
            # While it lasts an answer may be late, but two cores for all must not make it wait for a deadline.
            self.assertLess(canary.longest, 5, "an answer waited for strangers")
            self.assertGreater(canary.answered, seconds / 2)
        print(f"{sum(counts.values())} connections on {len(counts)} ports in {seconds:.0f} s, {canary.answered} canaries "
              f"beside them, the slowest {canary.longest:.2f} s")
        self.assert_alive(made)
        for member in members:
            until(lambda each=member: f"{each} ready: {each.ready()[1]}", lambda each=member: each.ready()[0], 5)
        descriptors_settle(made, before, 3, within=15)
        at_rest(made)
        self.assert_no_faults(made)

    def test_a_public_client_at_a_worker_port_and_a_worker_call_at_the_router(self):
        made = self.cluster()
        warm(made)
        with Canary(made) as canary:
            for member in made.workers():
                with Client(member.address("grpc")) as each:
                    code, sentence = each.refused(make_request("a"))
                    self.assertEqual(code, grpc.StatusCode.UNIMPLEMENTED, sentence)
            canary.answers_again(5)


class Start(Case):
    """What is wrong at the start ends the program with a sentence and a code."""

    def setUp(self):
        self.made = self.cluster(start=False)
        self.cases = 0
        self.made.wait_ready([self.made.start_etcd()])

    def refuses(self, words, role="decode", arguments=(), model=None, ports=None, within=15):
        """The program ends by itself, not with 0 and not by a signal, and its log has all words in one line."""
        self.cases += 1  # an id, so a log, of its own
        member = self.made.start_program(role, f"case-{self.cases}", arguments=arguments, model=model, ports=ports)
        ended = member.wait(within)
        if not ended:
            member.kill()
        with open(member.log, encoding="utf-8", errors="replace") as file:
            log = file.read()
        self.made.forget(member)
        self.assertTrue(ended, f"it does not end:\n{log}")
        self.assertIn(member.code, (1, 2), log)
        self.assertTrue(any(all(re.search(word, line) for word in words) for line in log.splitlines()),
                        f"no line has all of {words}:\n{log}")
        return member.code

    def model(self, **config):
        folder = os.path.join(self.folder(), "model")
        shutil.copytree(MODEL_DIR, folder)
        if config:
            path = os.path.join(folder, "config.json")
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
            content.update(config)
            with open(path, "w", encoding="utf-8") as file:
                json.dump({key: value for key, value in content.items() if value is not None}, file)
        return folder

    @staticmethod
    def weights(folder):
        return os.path.join(folder, "model.safetensors")

    def header(self, folder, change):
        """Rewrites the JSON header of the weights by change(header)."""
        with open(self.weights(folder), "rb") as file:
            data = file.read()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:8 + length])
        change(header)
        text = json.dumps(header).encode()
        with open(self.weights(folder), "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + data[8 + length:])

    def test_model_directories_that_cannot_be_served(self):
        def first(header):
            return sorted(name for name in header if name != "__metadata__")[0]

        def lying_shape(header):
            header[first(header)]["shape"] = [2 ** 40, 2 ** 40]

        def lying_end(header):
            header[first(header)]["data_offsets"][1] = 2 ** 60

        def overlapping(header):
            names = sorted(name for name in header if name != "__metadata__")
            header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]

        def missing_tensor(header):
            del header[[name for name in header if "q_proj" in name][0]]

        def wrong_dtype(header):
            header[first(header)]["dtype"] = "I8"

        def transposed(header):
            for name, each in header.items():
                if "up_proj" in name:
                    each["shape"].reverse()

        def truncate(length):
            def change(folder):
                with open(self.weights(folder), "r+b") as file:
                    file.truncate(length)
            return change

        def overwrite(data):
            def change(folder):
                with open(self.weights(folder), "r+b") as file:
                    file.write(data)
            return change

        def remove(name):
            return lambda folder: os.remove(os.path.join(folder, name))

        def replace(name, data):
            def change(folder):
                with open(os.path.join(folder, name), "wb") as file:
                    file.write(data)
            return change

        cases = [(kind.__name__, lambda folder, kind=kind: self.header(folder, kind), "safetensors|tensor")
                 for kind in (lying_shape, lying_end, overlapping, missing_tensor, wrong_dtype, transposed)]
        cases += [
            ("no weights", remove("model.safetensors"), "safetensors"),
            ("empty weights", truncate(0), "safetensors"),
            ("cut in the header length", truncate(5), "safetensors"),
            ("cut in the header", truncate(200), "safetensors"),
            ("cut in the data", truncate(500000), "safetensors"),
            ("a header longer than the file", overwrite(struct.pack("<Q", 2 ** 63)), "safetensors"),
            ("a header that is no JSON", overwrite(struct.pack("<Q", 64) + b"x" * 64), "safetensors"),
            ("no config", remove("config.json"), r"config\.json"),
            ("config is no JSON", replace("config.json", b"{"), r"config\.json"),
            ("config is a list", replace("config.json", b"[]"), r"config\.json"),
            ("no tokenizer", remove("tokenizer.json"), r"tokenizer\.json"),
            ("tokenizer is no JSON", replace("tokenizer.json", b"\xff\xfe"), r"tokenizer\.json"),
            ("a NaN among the weights", lambda folder: set_value(folder, "model.layers.2.mlp.up_proj.weight", 17, float("nan")),
             r"model\.layers\.2\.mlp\.up_proj\.weight.*not a finite number"),
            ("an infinite weight", lambda folder: set_value(folder, "model.norm.weight", 0, float("-inf")),
             r"model\.norm\.weight.*not a finite number"),
            ("a tensor in two shards", two_shards, "is in both model-1.safetensors and model-2.safetensors"),
            ("a vocabulary without one of the bytes", lambda folder: change_json(
                folder, "tokenizer.json", lambda all: all["model"]["vocab"].pop("<0x41>")), "no token <0x41>"),
            ("two tokens with one id", lambda folder: change_json(
                folder, "tokenizer.json", lambda all: all["model"]["vocab"].update(he=300)), "have the same id 300"),
            ("a merge into itself", lambda folder: change_json(
                folder, "tokenizer.json", lambda all: all["model"]["merges"].insert(0, ["", "h"])), r'needs the token \\"\\"'),
            ("a merge of what is not there", lambda folder: change_json(
                folder, "tokenizer.json", lambda all: all["model"]["merges"].append("z q")), r'needs the token \\"zq\\"'),
            ("a pattern without end", lambda folder: change_json(
                folder, "tokenizer.json", lambda all: all.update(pre_tokenizer=split("(" * 2000))), "pattern does not compile"),
        ]
        for name, change, word in cases:
            with self.subTest(case=name):
                folder = self.model()
                change(folder)
                self.refuses([word], model=folder)
        configs = [
            (dict(architectures=["GPT2LMHeadModel"], model_type="gpt2"), "architecture|model_type"),
            (dict(hidden_size=65), "hidden_size|dimension|head"), (dict(num_hidden_layers=6), "layer|tensor"),
            (dict(num_key_value_heads=3), "num_key_value_heads"), (dict(vocab_size=513), "vocab|shape|embed"),
            (dict(hidden_size=None), "hidden_size"), (dict(num_hidden_layers=0), "num_hidden_layers"),
            (dict(num_hidden_layers=2 ** 31), "num_hidden_layers"), (dict(intermediate_size=-1), "intermediate_size"),
            (dict(rms_norm_eps="a"), "rms_norm_eps"), (dict(hidden_act="gelu"), "hidden_act|gelu"),
            (dict(rope_scaling={"rope_type": "yarn", "factor": 4}), "rope"),
        ]
        for config, word in configs:
            with self.subTest(config=config):
                self.refuses([word], model=self.model(**config))
        for path in ("/no/such/folder", os.path.join(MODEL_DIR, "config.json")):
            with self.subTest(case="no directory", path=path):
                self.refuses(["--model is not a directory", path], model=path)
        with self.subTest(case="prefill"):
            folder = self.model()
            truncate(300000)(folder)
            self.refuses(["safetensors"], role="prefill", model=folder)

    def test_occupied_ports(self):
        for role in ("decode", "prefill", "router"):
            for name in ("grpc", "admin", "kv", "http"):
                if not self.made.knows(role, name):
                    continue
                with self.subTest(role=role, port=name), socket.socket() as holder:
                    holder.bind((clusters.HOST, 0))
                    holder.listen()
                    port = holder.getsockname()[1]
                    self.refuses([f"--{name}", str(port)], role=role, ports={name: port})

    def test_flags_that_make_no_sense(self):
        for role, arguments, words in (
                ("router", ["--etcd", "ftp://nowhere"], ["--etcd", "ftp"]),
                ("router", ["--etcd", "http://"], ["--etcd"]),
                ("decode", ["--etcd", "http://127.0.0.1:notaport"], ["--etcd", "notaport"]),
                ("decode", ["--etcd", "http://127.0.0.1:70000"], ["--etcd", "70000"]),
                ("prefill", ["--etcd", ""], ["--etcd"]),
                ("decode", ["--grpc", "127.0.0.1"], ["--grpc"]),
                ("router", ["--admin", "127.0.0.1:99999"], ["--admin", "99999"]),
                ("router", ["--grpc", "256.1.1.1:0"], ["--grpc", "256"]),
                ("decode", ["--kv-tokens", "1"], ["--kv-tokens"]),
                ("decode", ["--page-tokens", "0"], ["--page-tokens"]),
                ("decode", ["--max-running", "many"], ["--max-running", "many"]),
                ("router", ["--timer-lease", "1s", "--timer-beat", "5s"], ["lease", "beat"]),
                ("router", ["--id", "two words"], ["--id"]),
                ("router", ["--no-such-flag", "1"], ["no-such-flag"])):
            with self.subTest(role=role, arguments=arguments):
                self.assertIn(self.refuses(words, role=role, arguments=arguments), (1, 2))


class Odd(Case):
    """Models that load and are bad all the same: they cost only the requests that hit what is bad."""

    def odd(self, name, change):
        folder = os.path.join(self.folder(), name)
        shutil.copytree(MODEL_DIR, folder)
        change(folder)
        return folder

    def test_odd_models_cost_only_their_requests(self):
        hard = self.odd("hard", lambda folder: change_json(
            folder, "tokenizer.json", lambda all: all.update(pre_tokenizer=split("a*a*a*b|[^x]"))))
        loud = self.odd("loud", lambda folder: set_value(folder, "model.norm.weight", 3, 3e38))
        more = self.odd("more", lambda folder: change_json(folder, "tokenizer.json", lambda all: all["added_tokens"].append(
            {"id": 512, "content": "<new>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False})))
        made = self.cluster(1, 1, arguments={"router": ["--disaggregate-above", "0"]})
        workers = [made.start_program(role, f"{role}-{os.path.basename(path)}", model=path, arguments=arguments)
                   for path, arguments in ((hard, ["--kv-tokens", "160"]), (loud, []), (more, [])) for role in ("decode", "prefill")]
        made.wait_ready(workers)
        warm(made)
        with client(made) as each, Canary(made) as canary:
            text = ("a" * 300 + "c") * 20000
            code, sentence = each.refused(make_request(text, model="hard"))
            self.assertEqual(code, INVALID, sentence)
            self.assertIn("more steps than", sentence)
            self.assertNotIn("160", sentence, "it is not the length that is wrong")
            self.assertEqual(len(each.ask("aaaab", model="hard", max_tokens=3).ids), 3)
            # More than the workers of this model can hold at once, and just as much.
            code, sentence = each.refused(make_request(filler(100), max_tokens=61, model="hard"))
            self.assertEqual(code, INVALID, sentence)
            self.assertIn("KV capacity of the largest decode worker of 160 tokens", sentence)
            self.assertEqual(len(each.ask(filler(100), max_tokens=60, model="hard", ignore_eos=True).ids), 60)
            # Weights that are numbers, and logits that are none any more.
            code, sentence = each.refused(make_request("Once", model="loud"))
            self.assertEqual(code, grpc.StatusCode.UNAVAILABLE, sentence)
            self.assertIn("not finite", sentence)
            with open(made.find("decode-loud").log, encoding="utf-8") as log:
                self.assertIn("logits are not finite", log.read())
            # A text whose tokens the model does not have.
            code, sentence = each.refused(make_request("Once <new>", model="more"))
            self.assertEqual(code, INVALID, sentence)
            self.assertIn("token id 512", sentence)
            self.assertEqual(each.ask(GOLDEN[0]["prompt"], model="more", max_tokens=20).ids, GOLDEN[0]["greedy_ids"][:20])
            with open(made.find("decode-more").log, encoding="utf-8") as log:
                self.assertRegex(log.read(), "tokenizer.json has token ids.* highest_id 512 vocabulary 512")
            canary.answers_again(5)
        self.assert_alive(made)
        at_rest(made)
        self.assert_no_faults(made)


class Mixed(Case):
    """Workers of different models, or of different layouts of one model, in one cluster."""

    def test_each_model_is_answered_by_its_own_workers(self):
        folder = self.folder()
        other = random_model(folder, "other", context=256, vocab=600)
        made = self.cluster(1, 1, arguments={"router": ["--disaggregate-above", "0"]})
        fresh = [made.start_program(role, f"other-{role}", model=other) for role in ("decode", "prefill")]
        made.wait_ready(fresh)
        warm(made)
        with client(made) as each:
            def listed():
                from harness import api
                return {model.name: model for model in each.stub.ListModels(api.ListModelsRequest(), timeout=5).models
                        if model.decode_workers_ready and model.prefill_workers_ready}
            models = until("both models are listed", lambda: len(listed()) == 2 and listed(), 5)
            self.assertEqual((models["other"].context_tokens, models["other"].vocab), (256, 600))
            self.assertEqual((models[MODEL].context_tokens, models[MODEL].vocab), (512, 512))
            reference = each.ask(filler(20), model="other", max_tokens=10)
            for _ in range(5):
                ours = each.ask(GOLDEN[0]["prompt"], max_tokens=20)
                theirs = each.ask(filler(20), model="other", max_tokens=10)
                self.assertEqual(ours.ids, GOLDEN[0]["greedy_ids"][:20])
                self.assertEqual((ours.trace.prefill_worker, ours.trace.decode_worker), ("prefill-1", "decode-1"))
                self.assertEqual(theirs.ids, reference.ids)
                self.assertEqual((theirs.trace.prefill_worker, theirs.trace.decode_worker),
                                 ("other-prefill", "other-decode"))
            code, sentence = each.refused(make_request([1, 550], max_tokens=4))
            self.assertEqual(code, INVALID, sentence)
            self.assertEqual(len(each.ask([1, 550], model="other", max_tokens=4).ids), 4)
        at_rest(made)
        self.assert_no_faults(made)

    def test_workers_of_different_layouts_are_never_paired(self):
        self.never_paired(layers=3)

    def test_workers_of_different_weights_are_never_paired(self):
        self.never_paired(seed=2)

    def never_paired(self, **difference):
        """Two models of one name and one tokenizer that differ in one thing, a decode worker of one and a prefill worker
        of the other."""
        folder = self.folder()
        one = random_model(folder, "one/twin")
        two = random_model(folder, "two/twin", **difference)
        made = self.cluster(0, 0, routers=1, arguments={"router": ["--disaggregate-above", "0", "--timer-place", "2s"]})
        members = [made.start_program("decode", "decode-one", model=one),
                   made.start_program("prefill", "prefill-two", model=two)]
        made.wait_ready(members)
        with client(made) as each:
            # No prefill worker fits this decode worker: it reads the prompt itself, or the error is honest.
            def attempt():
                try:
                    return each.ask(filler(40), model="twin", max_tokens=5)
                except grpc.RpcError as error:
                    self.assertIn(error.code(), (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND))
                    self.assertGreater(len(error.details()), 10)
                    return None
            answers = [attempt() for _ in range(3)]
            self.assertTrue(all(answer is None or answer.trace.prefill_worker == "" for answer in answers))
            fitting = made.start_program("prefill", "prefill-one", model=one)
            made.wait_ready([fitting])
            answer = until("a fitting pair answers", lambda: attempt(), 10)
            until("the fitting pair is used", lambda: each.ask(filler(50), model="twin", max_tokens=2).trace.prefill_worker
                  == "prefill-one", 5)
            self.assertEqual(Metrics(members[1]).sum("baton_entries_created_total"), 0)
            self.assertEqual(len(answer.ids), 5)
        at_rest(made)
        self.assert_no_faults(made)


if __name__ == "__main__":
    main()
