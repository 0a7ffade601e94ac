#!/usr/bin/python3
"""The router from outside: golden answers on one and two legs, bad input, stop strings, aborts, slow clients, lost workers, drain.

router_test.py BIN STUBS DATA [unittest arguments]: BIN holds the three programs; STUBS the Python code of the public API; DATA
is tests/data."""
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request
from concurrent import futures

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # children are started with vfork; nothing to be done

import grpc  # noqa: E402

BIN, STUBS, DATA = (os.path.abspath(a) for a in sys.argv[1:4])
sys.path.insert(0, STUBS)
from baton.v1 import inference_pb2 as api, inference_pb2_grpc  # noqa: E402

WITHIN_S = 60.0
MODEL = "stories260k"
GREEDY = {"temperature": 0, "ignore_eos": True}
with open(os.path.join(DATA, "golden", "stories260k.json"), encoding="utf-8") as file:
    GOLDEN = json.load(file)


class Process:
    """A child that dies with us; its log is a file."""

    def __init__(self, folder, name, *command):
        self.log_path = os.path.join(folder, f"{name}.log")
        with open(self.log_path, "wb") as log:
            self.child = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "--", *command], stdout=log, stderr=log)

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as log:
            return log.read()

    def find(self, pattern):
        end = time.monotonic() + WITHIN_S
        while time.monotonic() < end:
            found = re.search(pattern, self.log())
            if found:
                return found.group(1)
            if self.child.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in the log:\n{self.log()}")

    def stop(self):
        """SIGTERM; the exit code."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        return self.child.wait(WITHIN_S)

    def kill(self):
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(WITHIN_S)


class Cluster:
    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="baton-router-test.")
        self.programs = []
        for _ in range(20):  # etcd cannot be asked for any free port: draw until it starts
            low = 20000 + int.from_bytes(os.urandom(2), "big") % 12000
            client, peer = f"http://127.0.0.1:{low}", f"http://127.0.0.1:{low + 1}"
            self.etcd = Process(self.folder, "etcd", "etcd", "--data-dir", os.path.join(self.folder, f"etcd{low}"),
                                "--listen-client-urls", client, "--advertise-client-urls", client,
                                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                                "--initial-cluster", f"default={peer}")
            self.url = client
            if self.etcd_is_up():
                return
            self.etcd.kill()
        raise AssertionError("etcd does not start")

    def etcd_is_up(self):
        end = time.monotonic() + 10
        while time.monotonic() < end and self.etcd.child.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=1) as reply:
                    return reply.status == 200
            except OSError:
                time.sleep(0.05)
        return False

    def start(self, program, name, *flags):
        process = Process(self.folder, name, os.path.join(BIN, program), "--etcd", self.url, "--id", name, "--grpc",
                          "127.0.0.1:0", "--admin", "127.0.0.1:0", "--test-verify", *flags)
        process.name = name
        self.programs.append(process)
        return process

    def router(self, name, *flags):
        process = self.start("router", name, *flags)
        process.grpc = process.find(r"serving grpc (\S+)")
        process.admin = process.find(r"serving grpc \S+ admin (\S+)")
        return process

    def worker(self, role, name, *flags):
        return self.start(f"{role}-worker", name, "--model", os.path.join(DATA, "models", MODEL), *flags)

    def close(self, case):
        for process in self.programs:
            code = process.stop() if process.child.returncode is None else process.child.returncode
            case.assertIn(code, (0, -signal.SIGKILL), process.name + ":\n" + process.log())
            for word in ("Sanitizer", " ERROR "):
                case.assertNotIn(word, process.log())
        self.etcd.kill()
        shutil.rmtree(self.folder)


def fetch(router, path):
    try:
        with urllib.request.urlopen(f"http://{router.admin}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def until(what, fact):
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end:
        if fact():
            return
        time.sleep(0.02)
    raise AssertionError(f"never: {what}")


def metric(router, name, **labels):
    total = 0.0
    for line in fetch(router, "/metrics")[1].splitlines():
        found = re.match(re.escape(name) + r"\{(.*)\} (\S+)$", line)
        if found and all(f'{key}="{value}"' in found.group(1) for key, value in labels.items()):
            total += float(found.group(2))
    return total


def stub(router, **options):
    channel = grpc.insecure_channel(router.grpc, options=[("grpc.max_send_message_length", -1), *options.items()])
    return inference_pb2_grpc.InferenceStub(channel)


def ask(sampling=None, **fields):
    fields.setdefault("model", MODEL)
    fields.setdefault("max_tokens", 16)
    return api.GenerateRequest(sampling=api.Sampling(**(sampling or {})), **fields)


def answer(inference, request):
    """Token ids, text and the last reply."""
    tokens, text, last = [], "", None
    for reply in inference.Generate(request, timeout=WITHIN_S):
        tokens += reply.token_ids
        text += reply.text
        last = reply
    return tokens, text, last


def by_choice(stream, pause=0.0):
    """({index: [(token, logprob, alternatives)]}, tokens of the largest reply); reads nothing for a while after the first."""
    found, largest = {}, 0
    for reply in stream:
        if not found:
            time.sleep(pause)
        largest = max(largest, len(reply.token_ids))
        assert len(reply.logprobs) == len(reply.token_ids)
        found.setdefault(reply.index, []).extend(
            (token, each.logprob, tuple(zip(each.top_token_ids, each.top_logprobs)))
            for token, each in zip(reply.token_ids, reply.logprobs))
    return dict(sorted(found.items())), largest


class RouterTest(unittest.TestCase):
    def setUp(self):
        self.cluster = Cluster()
        self.addCleanup(self.cluster.close, self)

    def ready(self, router, decode=1, prefill=0):
        inference = stub(router)
        until("ready", lambda: fetch(router, "/readyz")[0] == 200)

        def has_all():
            models = inference.ListModels(api.ListModelsRequest(), timeout=WITHIN_S).models
            return [(m.name, m.decode_workers_ready, m.prefill_workers_ready) for m in models] == [(MODEL, decode, prefill)]
        until("all workers", has_all)
        return inference

    def check_golden(self, inference):
        for one in GOLDEN:
            request = ask(GREEDY, prompt=one["prompt"], max_tokens=len(one["greedy_ids"]), request_id="mine")
            tokens, text, last = answer(inference, request)
            self.assertEqual(tokens, one["greedy_ids"])
            self.assertEqual(text.removeprefix(" "), one["greedy_text"])
            self.assertEqual((last.finish_reason, last.request_id), ("length", "mine"))
            self.assertEqual(last.usage.prompt_tokens, len(one["prompt_ids"]))
            self.assertEqual(last.usage.completion_tokens, len(tokens))
        return last

    def refused(self, inference, request):
        with self.assertRaises(grpc.RpcError) as caught:
            answer(inference, request)
        return caught.exception.code().name, caught.exception.details()

    def idle(self, router):
        until("no entries", lambda: metric(router, "baton_entries") == 0)

    def test_golden_answers_on_one_leg_and_bad_input(self):
        router = self.cluster.router("r")
        self.assertEqual(fetch(router, "/readyz")[0], 503)
        self.cluster.worker("decode", "d")
        inference = self.ready(router)
        self.assertEqual(self.check_golden(inference).trace.prefill_worker, "")
        tokens, text, _ = answer(inference, ask(GREEDY, token_ids=api.TokenIds(ids=GOLDEN[0]["prompt_ids"]), max_tokens=8))
        self.assertEqual(tokens, GOLDEN[0]["greedy_ids"][:8])
        reply = inference.Tokenize(api.TokenizeRequest(model=MODEL, text=GOLDEN[0]["prompt"], add_special=True))
        self.assertEqual((list(reply.token_ids), reply.context_tokens), (GOLDEN[0]["prompt_ids"], 512))
        invalid = "INVALID_ARGUMENT"
        for request, code, words in (
                (ask(prompt="a", model="nope"), "NOT_FOUND", 'unknown model "nope"; served here: stories260k'),
                (ask(prompt="a", model=""), invalid, "model is empty"),
                (ask(prompt="a", max_tokens=2, n=17), invalid, "n is 17: at most 16"),
                (ask(prompt=""), invalid, "prompt is empty"),
                (ask(), invalid, "set prompt or token_ids"),
                (ask(prompt="Once", max_tokens=600), invalid, "exceed the model's context of 512"),
                (ask(prompt="Once upon " * 300, max_tokens=0), invalid, "no room for an answer in the model's context of 512"),
                (ask(prompt="Once upon " * 99999), invalid, "may have 512, shorten the prompt"),
                (ask(prompt="a" * (9 << 20)), invalid, "more than the 8388608 allowed"),
                (ask(prompt="a" * (17 << 20)), "RESOURCE_EXHAUSTED", "larger than max"),
                (ask(token_ids=api.TokenIds(ids=[1, 512]), max_tokens=1), invalid, "token id 512 at position 1"),
                (ask(token_ids=api.TokenIds()), invalid, "token_ids is empty"),
                (ask({"temperature": -1}, prompt="a"), invalid, "temperature is -1"),
                (ask({"top_p": math.nan}, prompt="a"), invalid, "top_p is nan"),
                (ask({"stop": [""]}, prompt="a"), invalid, "stop[0] is empty"),
                (ask({"min_tokens": 4}, prompt="a", max_tokens=3), invalid, "min_tokens is 4"),
                (ask({"logprobs": 21}, prompt="a"), "INVALID_ARGUMENT", "logprobs is 21")):
            got, sentence = self.refused(inference, request)
            self.assertEqual(got, code, sentence)
            self.assertIn(words, sentence)
        raw = grpc.insecure_channel(router.grpc).unary_stream("/baton.v1.Inference/Generate")
        for payload, words in ((b"\x0a\x0bstories260k\x12\x03a\xff\xfe", "UTF-8: the byte at offset 1"), (b"\xff" * 99999, "not a valid")):
            with self.assertRaises(grpc.RpcError) as caught:
                list(raw(payload, timeout=WITHIN_S))
            self.assertIn(words, caught.exception.details())
        self.idle(router)
        self.assertEqual(fetch(router, "/readyz"), (200, "ready\n"))

    def test_golden_answers_on_two_legs_stop_strings_and_aborts(self):
        first = self.cluster.router("r1", "--disaggregate-above", "0")
        second = self.cluster.router("r2")
        self.cluster.worker("decode", "d")
        self.cluster.worker("prefill", "p")
        inference, other = self.ready(first, prefill=1), self.ready(second, prefill=1)
        last = self.check_golden(inference)
        self.assertEqual((last.trace.prefill_worker, last.trace.decode_worker), ("p", "d"))
        self.assertGreater(last.trace.kv_bytes, 0)
        tokens, text, last = answer(inference, ask({"temperature": 0, "stop": ["Lily"]}, prompt=GOLDEN[0]["prompt"], max_tokens=90))
        self.assertEqual((text, last.finish_reason), (", there was a little girl named ", "stop"))
        self.assertEqual(len(tokens), last.usage.completion_tokens)
        request = ask({"ignore_eos": True}, prompt="Once", max_tokens=500, session_id="agent")
        with futures.ThreadPoolExecutor(40) as pool:
            runs = [pool.submit(answer, (inference, other)[i % 2], request) for i in range(40)]
            for router in (first, second):
                until("all are in", lambda router=router: metric(router, "baton_entries_created_total") >= 20)
            aborted = inference.Abort(api.AbortRequest(session_id="agent"), timeout=WITHIN_S).aborted
            ends = [run.result(WITHIN_S)[2].finish_reason for run in runs]
        self.assertLessEqual(aborted, 20)
        self.assertTrue(set(ends) <= {"abort", "length"}, ends)
        for router in (first, second):
            self.assertIn("abort by label label agent session true", router.log())
            self.idle(router)

    def test_clients_that_leave_or_do_not_read_leave_nothing_behind(self):
        router = self.cluster.router("r", "--client-stall", "500ms")
        self.cluster.worker("decode", "d")
        inference = self.ready(router)
        many = {"temperature": 0.9, "seed": 3, "ignore_eos": True, "logprobs": 20}
        left = [inference.Generate(ask(GREEDY, prompt="Once", max_tokens=500)) for _ in range(15)]
        left += [inference.Generate(ask(many, prompt="Once", max_tokens=400, n=8)) for _ in range(5)]
        next(left[0])
        for call in left:
            call.cancel()
        slow = stub(router, **{"grpc.http2.bdp_probe": 0, "grpc.http2.lookahead_bytes": 1024})
        calls = [slow.Generate(ask(GREEDY, prompt="Once", max_tokens=500)) for _ in range(6)]
        calls += [slow.Generate(ask(many, prompt="Once", max_tokens=200, n=4)) for _ in range(2)]
        self.idle(router)
        until("no calls", lambda: metric(router, "baton_client_calls") == 0)
        for call in calls:
            with self.assertRaises(grpc.RpcError) as caught:
                list(call)
            self.assertEqual(caught.exception.code().name, "RESOURCE_EXHAUSTED")
        self.assertEqual(metric(router, "baton_deadline_overrun_seconds"), 0)
        # One that reads late gets larger replies with the same in them, each token beside its logprobs, at most 256 in one.
        patient = self.cluster.router("patient")
        inference = self.ready(patient)
        slow = stub(patient, **{"grpc.http2.bdp_probe": 0, "grpc.http2.lookahead_bytes": 1024})
        request = ask(many, prompt="Once upon a time", max_tokens=400, n=4)
        fast, _ = by_choice(inference.Generate(request, timeout=WITHIN_S))
        began = time.monotonic()
        list(inference.Generate(request, timeout=WITHIN_S))
        late, largest = by_choice(slow.Generate(request, timeout=WITHIN_S), pause=2 * (time.monotonic() - began) + 0.5)
        self.assertEqual([len(each) for each in fast.values()], [400] * 4)
        self.assertEqual(fast, late)
        self.assertEqual(largest, 256)

    def test_a_killed_worker_costs_a_pause_and_a_drain_finishes_what_was_accepted(self):
        router = self.cluster.router("r")
        doomed = self.cluster.worker("decode", "d1", "--test-step-delay", "5ms")
        self.cluster.worker("decode", "d2", "--test-step-delay", "5ms")
        inference = self.ready(router, decode=2)
        request = ask({"ignore_eos": True, "seed": 7, "temperature": 0.8}, prompt="Once upon a time", max_tokens=200)
        expected = answer(inference, request)[0]
        with futures.ThreadPoolExecutor(12) as pool:
            runs = [pool.submit(answer, inference, request) for _ in range(12)]
            until("tokens", lambda: metric(router, "baton_tokens_total", kind="generated") > 300)
            doomed.kill()
            for run in runs:
                self.assertEqual(run.result(WITHIN_S)[0], expected)
            self.assertGreater(metric(router, "baton_retries_total"), 0)
            before = metric(router, "baton_entries_created_total")
            runs = [pool.submit(answer, inference, request) for _ in range(8)]
            until("all are in", lambda: metric(router, "baton_entries_created_total") == before + 8)
            router.child.send_signal(signal.SIGTERM)
            until("draining", lambda: "draining" in router.log())
            self.assertEqual(self.refused(inference, request)[0], "UNAVAILABLE")
            for run in runs:
                self.assertEqual(run.result(WITHIN_S)[0], expected)
        self.assertEqual(router.child.wait(WITHIN_S), 0)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]], verbosity=2)
