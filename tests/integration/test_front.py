#!/usr/bin/python3
"""What users and operators touch: the client of the SDK, Abort, Tokenize, ListModels, health, reflection, the admin ports."""
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

from google.protobuf import descriptor_pb2, descriptor_pool

from harness import (GOLDEN, MODEL, ROOT, STUBS, Case, Metrics, answers, api, at_rest, client, collect, entries, filler,
                     golden_request, grpc, http_get, main, make_request, until, warm)

PROMTOOL = shutil.which("promtool")


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
        shift += 7


def fields(data):
    """(number, value) of each field of a message nobody here has the types of."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        if tag & 7 == 0:
            value, at = varint(data, at)
        else:
            length, at = varint(data, at)
            value, at = data[at:at + length], at + length
        yield tag >> 3, value


def raw(channel, method, streams=False):
    kind = channel.stream_stream if streams else channel.unary_unary
    return kind(method, request_serializer=lambda data: data, response_deserializer=lambda data: data)


class Front(Case):
    def test_the_client_of_the_sdk_prints_the_golden_answer(self):
        made = self.cluster()
        warm(made)
        golden = GOLDEN[0]
        done = subprocess.run(
            [sys.executable, os.path.join(ROOT, "tests", "sdk", "python", "client.py"), made.routers()[0].address("grpc"),
             golden["prompt"], "--max-tokens", str(len(golden["greedy_ids"])), "--temperature", "0"],
            env=dict(os.environ, PYTHONPATH=STUBS, PYTHONIOENCODING="utf-8"), capture_output=True, encoding="utf-8",
            timeout=60, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(golden["greedy_text"].strip(), done.stdout)
        self.assertIn(f"[length: {len(golden['prompt_ids'])} prompt tokens", done.stdout)

    def test_tokens_stream_as_they_are_made(self):
        made = self.cluster(arguments={"workers": ["--test-step-delay", "20ms"]})
        warm(made)
        with client(made) as each:
            stream = each.stream(golden_request(0))
            first = next(stream)
            self.assertEqual(Metrics(made.of("decode")[0]).sum("baton_entries", state="running"), 1,
                             "the first reply came when all was over")
            answer = collect(stream, first)
        self.assertGreater(answer.replies, 20)

    def test_usage_and_stop_strings(self):
        made = self.cluster()
        warm(made)
        golden = GOLDEN[0]
        with client(made) as each:
            plain = each.ask(golden["prompt"], max_tokens=60)
            self.assertEqual((plain.usage.prompt_tokens, plain.usage.completion_tokens), (len(golden["prompt_ids"]), 60))
            stop = "Lily"
            cut = each.ask(golden["prompt"], max_tokens=60, stop=[stop])
            self.assertEqual(cut.finish, "stop")
            self.assertEqual(cut.text, plain.text[:plain.text.index(stop)])
            token = golden["greedy_ids"][10]
            cut = each.ask(golden["prompt"], max_tokens=60, stop_token_ids=[token])
            self.assertEqual(cut.finish, "stop")
            self.assertEqual(cut.ids, golden["greedy_ids"][:golden["greedy_ids"].index(token) + 1])
            long = filler(200, 9)
            first = each.ask(long, max_tokens=4)
            second = each.ask(long, max_tokens=4)
            self.assertEqual(first.ids, second.ids)
            self.assertGreater(second.usage.cached_tokens, 100)
        at_rest(made)

    def test_tokenize_and_list_models(self):
        made = self.cluster()
        warm(made)
        with client(made) as each:
            for golden in GOLDEN:
                reply = each.stub.Tokenize(api.TokenizeRequest(model=MODEL, text=golden["prompt"], add_special=True), timeout=5)
                self.assertEqual(list(reply.token_ids), golden["prompt_ids"])
                self.assertEqual(reply.context_tokens, 512)
            self.assertEqual(list(each.stub.Tokenize(api.TokenizeRequest(model=MODEL), timeout=5).token_ids), [])
            with self.assertRaises(grpc.RpcError) as caught:
                each.stub.Tokenize(api.TokenizeRequest(model="nobody", text="a"), timeout=5)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)
            models = each.stub.ListModels(api.ListModelsRequest(), timeout=5).models
            self.assertEqual([(each.name, each.context_tokens, each.vocab, each.prefill_workers_ready,
                               each.decode_workers_ready) for each in models], [(MODEL, 512, 512, 1, 1)])

    def test_abort_by_request_and_by_session(self):
        made = self.cluster(1, 1, arguments={"workers": ["--test-step-delay", "10ms"]})
        warm(made)
        with client(made) as each:
            def start(index, **labels):
                stream = each.stream(make_request(filler(20, index), max_tokens=450, ignore_eos=True, **labels))
                outcomes = []

                def follow():
                    try:
                        outcomes.append(collect(stream).finish)
                    except grpc.RpcError as error:
                        outcomes.append(error.code())
                thread = threading.Thread(target=follow)
                thread.start()
                return thread, outcomes, stream
            agents = [start(index, session_id="agent", request_id=f"r{index}") for index in range(8)]
            other = start(50, session_id="other", request_id="same")
            twins = [start(60 + index, request_id="twin") for index in range(2)]
            router = made.routers()[0]
            until("all are there", lambda: Metrics(router).sum("baton_entries") == 11, 5)
            abort = each.stub.Abort
            self.assertEqual(abort(api.AbortRequest(request_id="nobody"), timeout=5).aborted, 0)
            self.assertEqual(abort(api.AbortRequest(request_id="twin"), timeout=5).aborted, 2)
            self.assertEqual(abort(api.AbortRequest(request_id="r3"), timeout=5).aborted, 1)
            self.assertEqual(abort(api.AbortRequest(session_id="agent"), timeout=5).aborted, 7)
            self.assertEqual(abort(api.AbortRequest(session_id="agent"), timeout=5).aborted, 0)
            for thread, outcomes, _ in agents + twins:
                thread.join(5)
                self.assertEqual(outcomes, ["abort"])
            self.assertEqual(Metrics(router).sum("baton_entries"), 1, "the other request must go on")
            self.assertEqual(other[1], [])
            other[2].cancel()
            other[0].join(5)
            for bad in (api.AbortRequest(), api.AbortRequest(request_id=""), api.AbortRequest(session_id="s" * 64)):
                with self.assertRaises(grpc.RpcError) as caught:
                    abort(bad, timeout=5)
                self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        at_rest(made)

    def test_health_follows_the_cluster_and_reflection_describes_the_service(self):
        made = self.cluster(1, 1, arguments={"router": ["--timer-forget", "1s"]})
        warm(made)
        with client(made) as each:
            check = raw(each.channel, "/grpc.health.v1.Health/Check")

            def health(service):
                request = bytes([0x0a, len(service)]) + service.encode() if service else b""
                return dict(fields(check(request, timeout=5))).get(1, 0)
            for service in ("", "baton.v1.Inference"):
                until(f"'{service}' is SERVING", lambda name=service: health(name) == 1, 5)
            with self.assertRaises(grpc.RpcError) as caught:
                health("no.such.Service")
            self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)

            for package in ("grpc.reflection.v1", "grpc.reflection.v1alpha"):
                with self.subTest(package=package):
                    ask = raw(each.channel, f"/{package}.ServerReflection/ServerReflectionInfo", True)
                    listed = dict(fields(dict(fields(next(ask(iter([b"\x3a\x01*"]), timeout=5))))[6]))
                    self.assertTrue(listed)
                    name = b"baton.v1.Inference"
                    answer = dict(fields(next(ask(iter([b"\x22" + bytes([len(name)]) + name]), timeout=5))))
                    pool = descriptor_pool.DescriptorPool()
                    for _, data in fields(answer[4]):
                        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
                    service = pool.FindServiceByName("baton.v1.Inference")
                    self.assertEqual({method.name for method in service.methods},
                                     {"Generate", "Abort", "Tokenize", "ListModels"})
            made.of("decode")[0].kill()
            until("NOT_SERVING without a decode worker", lambda: health("baton.v1.Inference") == 2, 5)
            made.restart(made.of("decode")[0])
            until("SERVING again", lambda: health("baton.v1.Inference") == 1, 10)


class Admin(Case):
    def test_metrics_pass_promtool_on_every_program(self):
        self.assertIsNotNone(PROMTOOL, "promtool is not installed: tools/setup")
        made = self.cluster(arguments={"router": ["--disaggregate-above", "0"]})
        warm(made)
        for member in made.routers() + made.workers():
            metrics = Metrics(member)
            done = subprocess.run([PROMTOOL, "check", "metrics"], input=metrics.text, capture_output=True, text=True,
                                  timeout=30, check=False)
            self.assertEqual((done.returncode, done.stdout + done.stderr), (0, ""), str(member))
            for name in ("baton_entries", "baton_ready", "baton_ledger_imbalance", "baton_sessions",
                         "baton_entries_created_total", "baton_thread_beat_age_seconds"):
                self.assertTrue(metrics.has(name), f"{name} of {member}")
            role = {"router": "router", "prefill": "prefill", "decode": "decode"}[member.role]
            self.assertTrue(all(labels.get("role") == role and labels.get("worker") == member.id
                                for labels, _ in metrics.rows("baton_entries")))
            self.assertEqual(http_get(member.address("admin"), "/metrics?names=sglang,vllm")[0], 200)
        self.assertGreater(Metrics(made.of("decode")[0]).sum("baton_commits_total"), 0)
        decode = http_get(made.of("decode")[0].address("admin"), "/metrics?names=sglang,vllm")[1]
        for name in ("sglang:num_decode_prealloc_queue_reqs", "sglang:num_decode_transfer_queue_reqs",
                     "sglang:num_running_reqs", "sglang:token_usage", "vllm:num_requests_running"):
            self.assertIn(f"\n{name}{{", decode)

    def test_debug_entries_show_a_live_request_and_what_it_waits_for(self):
        made = self.cluster(arguments={
            "router": ["--disaggregate-above", "0"],
            "prefill": ["--test-step-delay", "400ms", "--timer-step", "2s"], "decode": ["--test-step-delay", "20ms"]})
        warm(made)
        with client(made) as each:
            stream = each.stream(make_request(filler(60, 4), max_tokens=400, ignore_eos=True, request_id="look-at-me"))

            def shown(member):
                return [entry for entry in entries(member)["entries"] if entry["label"] == "look-at-me"]
            for role, state in (("prefill", "computing"), ("decode", "receiving"), ("decode", "running")):
                member = made.of(role)[0]
                seen = until(f"{state} at {member}", lambda member=member, state=state: [
                    entry for entry in shown(member) if entry["state"] == state], 5, 0.005)[0]
                self.assertGreater(seen["deadline_left_ms"], 0)
                self.assertTrue(seen["waits_for"], seen)
                self.assertTrue(any(peer["peer"] == "router-1" for peer in seen["peers"]), seen)
            seen = shown(made.routers()[0])[0]
            self.assertTrue(seen["waits_for"], seen)
            self.assertEqual({peer["peer"] for peer in seen["peers"]} & {"decode-1"}, {"decode-1"})
            stream.cancel()
            at_rest(made)
            last = [entry for entry in entries(made.of("decode")[0])["terminals"] if entry["label"] == "look-at-me"]
            self.assertEqual([(entry["outcome"], entry["state"]) for entry in last], [("aborted", "running")])
        for member in made.routers() + made.workers():
            status, body = http_get(member.address("admin"), "/debug/threads")
            self.assertEqual(status, 200)
            self.assertTrue(json.loads(body))
            self.assertEqual(http_get(member.address("admin"), "/livez")[0], 200)
            self.assertEqual(http_get(member.address("admin"), "/nothing")[0], 404)
            self.assertEqual(http_get(member.address("admin"), "/drain")[0], 405)

    def test_sigterm_drains_every_program_with_code_0(self):
        for how in ("signal", "post"):
            made = self.cluster(arguments={"workers": ["--test-step-delay", "10ms"]})
            warm(made)
            with client(made) as each:
                stream = each.stream(golden_request(0))
                first = next(stream)
                programs = made.routers() + made.workers()
                for member in made.routers() if how == "signal" else programs:
                    if how == "signal":
                        member.signal(signal.SIGTERM)
                    else:
                        self.assertEqual(http_get(member.address("admin"), "/drain", method="POST")[0], 202)
                with self.subTest(how=how):
                    answer = collect(stream, first)
                    self.assertEqual(answer.ids, GOLDEN[0]["greedy_ids"], "a drain finishes what runs")
                if how == "signal":
                    for member in made.workers():
                        member.signal(signal.SIGTERM)
                for member in programs:
                    self.assertTrue(member.wait(10), f"{member} does not end:{member.tail()}")
                    self.assertEqual(member.code, 0, f"{member}:{member.tail()}")
            made.down()

    def test_a_draining_router_refuses_new_requests_and_the_other_serves(self):
        made = self.cluster(routers=2, arguments={"workers": ["--test-step-delay", "10ms"]})
        warm(made)
        first, second = made.routers()
        with client(made) as each, client(made, 1) as other:
            until("the other router answers", lambda: answers(other, golden_request(0, max_tokens=3)), 10)
            stream = each.stream(make_request(filler(20), max_tokens=300, ignore_eos=True))
            next(stream)
            first.signal(signal.SIGTERM)
            until("it says that it drains", lambda: "draining" in first.ready()[1], 2)
            code, sentence = each.refused(golden_request(1))
            self.assertEqual(code, grpc.StatusCode.UNAVAILABLE, sentence)
            self.assertEqual(other.generate(golden_request(1)).ids, GOLDEN[1]["greedy_ids"])
            self.assertEqual(len([token for reply in stream for token in reply.token_ids]), 299)
        self.assertTrue(first.wait(10))
        self.assertEqual(first.code, 0)
        self.assertTrue(second.ready()[0])


class Hurry(Case):
    def test_a_second_sigterm_ends_a_drain_at_once(self):
        made = self.cluster(1, 1, arguments={"workers": ["--test-step-delay", "50ms"]})
        warm(made)
        with client(made) as each:
            stream = each.stream(make_request(filler(20), max_tokens=450, ignore_eos=True))
            next(stream)
            worker = made.of("decode")[0]
            worker.signal(signal.SIGTERM)
            until("it drains", lambda: "draining" in worker.ready()[1], 2)
            time.sleep(0.2)
            worker.signal(signal.SIGTERM)
            self.assertTrue(worker.wait(2), "a second signal does not end it")
            stream.cancel()


if __name__ == "__main__":
    main()
