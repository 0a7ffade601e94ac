#!/usr/bin/python3
"""The worker programs from outside: start-up errors, probes, metrics, sessions, hand-offs, aborts, drain.

workers_test.py BIN STUBS MODEL [unittest arguments]: BIN holds decode-worker and prefill-worker; STUBS the Python code of
proto/baton/v1. A router is played here: it opens sessions, says Hello and Beat, admits and aborts."""
import base64
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request
from concurrent import futures

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # children are started with vfork; nothing to be done

import grpc  # noqa: E402

BIN, STUBS, MODEL = (os.path.abspath(a) for a in sys.argv[1:4])
sys.path.insert(0, STUBS)
from baton.v1 import peer_pb2 as peer, registry_pb2 as registry, worker_pb2 as worker  # noqa: E402

WITHIN_S = 30.0
ROUTER, PREFILL, DECODE = 1, 2, 3
OUTCOME_OK, OUTCOME_ABORTED = 1, 2
CAUSE_CLIENT_GONE = 2


# Children die with us; without preexec_fn, which would fork under gRPC's threads.
DIE_WITH_US = ["setpriv", "--pdeathsig", "KILL", "--"]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def until(what, check, within=WITHIN_S):
    end = time.monotonic() + within
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {within} s: {what}")
        time.sleep(0.02)


def get(address, path, method="GET"):
    """(status, body)"""
    request = urllib.request.Request(f"http://{address}{path}", method=method, data=b"" if method == "POST" else None)
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Etcd:
    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="baton-etcd-")
        client, peers = free_port(), free_port()
        self.url = f"http://127.0.0.1:{client}"
        self.argv = ["etcd", "--data-dir", self.folder, "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
                     "--listen-peer-urls", f"http://127.0.0.1:{peers}", "--initial-advertise-peer-urls",
                     f"http://127.0.0.1:{peers}", "--initial-cluster", f"default=http://127.0.0.1:{peers}"]
        self.process = None

    def start(self):
        self.process = subprocess.Popen(DIE_WITH_US + self.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def keys(self):
        """The records of the cluster, by id."""
        done = subprocess.run(["etcdctl", "--endpoints", self.url, "get", "--prefix", "/baton/", "-w", "json"],
                              env=dict(os.environ, ETCDCTL_API="3"), capture_output=True, text=True, timeout=10, check=True)
        found = {}
        for each in json.loads(done.stdout).get("kvs", []):
            record = registry.WorkerRecord.FromString(base64.b64decode(each["value"]))
            found[record.id if isinstance(record.id, str) else record.id.decode()] = record
        return found

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Program:
    """One worker process; its log goes to a file."""

    def __init__(self, role, *args, etcd="http://127.0.0.1:1", model=MODEL):
        self.log_file = tempfile.NamedTemporaryFile("r", prefix=f"baton-{role}-", suffix=".log")
        argv = [os.path.join(BIN, f"{role}-worker"), "--model", model, "--etcd", etcd, "--grpc", "127.0.0.1:0", "--admin",
                "127.0.0.1:0", "--test-verify", "--threads", "1", *args]
        with open(self.log_file.name, "w") as log:
            self.process = subprocess.Popen(DIE_WITH_US + argv, stderr=log, stdout=log)

    def log(self):
        with open(self.log_file.name) as file:
            return file.read()

    def logged(self, pattern):
        def find():
            found = re.search(pattern, self.log())
            if found is None and self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode}:\n{self.log()}")
            return found
        return until(f"{pattern!r} in the log", find)

    def up(self):
        found = self.logged(r" admin (\S+)")
        self.admin = found.group(1)
        found = self.logged(r"serving .* grpc (\S+) kv_port (\d+)")
        self.grpc, self.kv = found.group(1), int(found.group(2))
        until("/livez", lambda: get(self.admin, "/debug/entries")[0] == 200)
        return self

    def debug(self, query=""):
        status, body = get(self.admin, "/debug/entries" + query)
        assert status == 200, body
        return json.loads(body)

    def metrics(self):
        status, body = get(self.admin, "/metrics")
        assert status == 200, body
        values = {}
        for line in body.splitlines():
            if line and not line.startswith("#"):
                series, value = line.rsplit(" ", 1)
                series = re.sub(r'(role|worker)="[^"]*",?', "", series).replace(",}", "}").replace("{}", "")
                values[series] = float(value)
        return values

    def wait(self, within=WITHIN_S):
        return self.process.wait(timeout=within)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log_file.close()


class Session:
    """A router's session to a worker."""

    def __init__(self, address, incarnation, hello=True):
        self.channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.out = queue.Queue()
        self.mail = queue.Queue()
        self.end = None
        self.call = self.channel.stream_stream("/baton.peer.v1.Sessions/Session")(iter(self.out.get, None))
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        if hello:
            self.send(peer.Envelope(hello=peer.Hello(incarnation=incarnation, session=1, protocol=1, role=ROUTER,
                                                     id=b"test-router")))
            self.hello = self.expect("hello")

    def read(self):
        try:
            for data in self.call:
                self.mail.put(peer.Envelope.FromString(data))
            self.end = "closed"
        except grpc.RpcError as error:
            self.end = f"{error.code().name}: {error.details()}"

    def send(self, envelope):
        self.out.put(envelope.SerializeToString())

    def expect(self, *kinds, within=WITHIN_S):
        """The next message of one of these kinds; all others are dropped. Beats are answered."""
        end = time.monotonic() + within
        while True:
            try:
                message = self.mail.get(timeout=0.5)
            except queue.Empty:
                if self.end is not None:
                    raise AssertionError(f"session ended while waiting for {kinds}: {self.end}")
                self.send(peer.Envelope(beat=peer.Beat(progress=1)))
                if time.monotonic() > end:
                    raise AssertionError(f"no {kinds} within {within} s")
                continue
            kind = message.WhichOneof("message")
            if kind == "beat":
                self.send(peer.Envelope(beat=peer.Beat(progress=1)))
            if kind in kinds:
                return getattr(message, kind) if len(kinds) == 1 else message

    def admit(self, attempt, tokens, max_new, local_max, deadline_ms=60000):
        self.send(peer.Envelope(admit=peer.Admit(
            attempt=attempt, tokens=tokens, output_first=len(tokens), max_new=max_new, deadline_ms=deadline_ms,
            local_max=local_max, label=b"label-%d" % attempt,
            sampling=peer.Sampling(top_p=1, top_k=-1, repetition_penalty=1, ignore_eos=True))))

    def collect(self, attempts):
        """Tokens and ends of these attempts, until all have ended."""
        tokens, ends = {a: [] for a in attempts}, {}
        while len(ends) < len(attempts):
            message = self.expect("tokens", "end")
            if message.HasField("tokens"):
                for attempt, token in zip(message.tokens.attempts, message.tokens.tokens):
                    tokens[attempt].append(token)
            else:
                ends[message.end.attempt] = message.end
        return tokens, ends

    def close(self):
        self.call.cancel()
        self.out.put(None)
        self.channel.close()


class FakeDecode(grpc.GenericRpcHandler):
    """A decode worker that accepts every Open and hands over `address` as its own of the KV link."""

    def __init__(self, address):
        self.link_address = address
        self.server = grpc.server(futures.ThreadPoolExecutor(max_workers=4), handlers=[self])
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(self.session)

    def session(self, requests, _):
        for data in requests:
            message = peer.Envelope.FromString(data)
            kind = message.WhichOneof("message")
            if kind == "hello":
                hello = message.hello
                yield peer.Envelope(hello=peer.Hello(
                    incarnation=99, session=1, protocol=1, role=DECODE, id=b"liar", layout_high=hello.layout_high,
                    layout_low=hello.layout_low, numerics=hello.numerics)).SerializeToString()
            elif kind == "open":
                yield peer.Envelope(accept=peer.Accept(slot=message.open.slot, address=self.link_address)).SerializeToString()
            elif kind == "beat":
                yield peer.Envelope(beat=peer.Beat(progress=1)).SerializeToString()

    def close(self):
        self.server.stop(0).wait()


def prompt(seed, count):
    return [1] + [(seed * 7919 + i * 104729) % 400 + 100 for i in range(count - 1)]


class Case(unittest.TestCase):
    def program(self, role, *args, **more):
        each = Program(role, *args, **more)
        self.addCleanup(each.close)
        return each

    def session(self, program, incarnation=77, **more):
        each = Session(program.grpc, incarnation, **more)
        self.addCleanup(each.close)
        return each

    def etcd(self):
        each = Etcd()
        self.addCleanup(each.close)
        return each

    def assert_quiet(self, program, within=5.0):
        """Everything back: no entries, no owned pages, ledger balanced, nothing overdue."""
        def is_quiet():
            m = program.metrics()
            return (all(v == 0 for k, v in m.items() if k.startswith("baton_entries{")) and
                    m['baton_pages{state="owned"}'] == 0 and m["baton_entry_operations"] == 0)
        until("quiet", is_quiet, within)
        m = program.metrics()
        ended = sum(v for k, v in m.items() if k.startswith("baton_entries_terminal_total"))
        self.assertEqual(m["baton_entries_created_total"], ended)
        self.assertEqual(m['baton_ledger_imbalance{what="entries"}'], 0)
        self.assertEqual(m['baton_ledger_imbalance{what="pages"}'], 0)
        self.assertEqual(m["baton_deadline_overrun_seconds"], 0)
        self.assertEqual(m["baton_audit_mismatch_total"], 0)
        return m


class TestStart(Case):
    def refused(self, code, sentence, *args, role="decode", **more):
        program = self.program(role, *args, **more)
        self.assertEqual(program.wait(), code, program.log())
        self.assertIn(sentence, program.log())

    def test_unknown_flag_is_refused_with_the_nearest_one(self):
        self.refused(2, "--kv-tokens", "--kv-token", "4")

    def test_timers_that_contradict_each_other_are_refused(self):
        self.refused(2, "lease must be at least twice the beat", "--timer-beat", "5s")

    def test_an_id_with_a_space_is_refused(self):
        self.refused(2, "--id", "--id", "my worker")

    def test_occupied_ports_are_named(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            for flag in ("admin", "grpc"):
                self.refused(1, f"--{flag}", f"--{flag}", f"127.0.0.1:{port}")
            self.refused(1, "--kv", "--kv", str(port))

    def test_a_missing_model_is_named(self):
        self.refused(1, "/no/such/model", model="/no/such/model", role="prefill")

    def test_a_malformed_etcd_url_is_named(self):
        self.refused(1, "--etcd", etcd="http://:what")

    def test_one_page_is_too_little(self):
        self.refused(1, "--kv-tokens", "--kv-tokens", "16")

    def test_kernels_are_taken_by_name_or_refused_in_a_sentence(self):
        self.refused(2, "--kernels", "--kernels", "sse")
        self.assertIn(" kernels c numerics f32/c/", self.program("decode", "--kernels", "c").up().log())
        for name in ("avx2", "avx512", "avx512bf16", "amx"):
            program = self.program("prefill", "--kernels", name)
            program.logged(rf" kernels {name} numerics|--kernels asks for instructions .*value {name} best ")

    def test_help_lists_every_flag_with_its_default(self):
        for role in ("decode", "prefill"):
            done = subprocess.run([os.path.join(BIN, f"{role}-worker"), "--help"], capture_output=True, text=True, timeout=30,
                                  check=True)
            for flag in ("--etcd", "--cluster", "--model", "--kv", "--timer-lease", "--test-step-delay"):
                self.assertIn(flag, done.stdout)

    def test_timer_flags_default_to_the_core_s_own(self):
        done = subprocess.run([os.path.join(BIN, "decode-worker"), "--help"], capture_output=True, text=True, timeout=30,
                              check=True)
        with open(os.path.join(os.path.dirname(__file__), "../../../common/core/node.c")) as file:
            source = file.read()
        timers = dict(re.findall(r"\.(\w+) = span_ms\((\d+)\)", source))
        self.assertGreater(len(timers), 15)
        unit = {"ms": 1, "s": 1000, "m": 60000}
        for name, ms in timers.items():
            flag = "--timer-" + name.replace("_", "-")
            found = re.search(re.escape(flag) + r"\b.*?default:? (\d+)(ms|s|m)\b", done.stdout, re.S)
            self.assertIsNotNone(found, flag)
            self.assertEqual(int(found.group(1)) * unit[found.group(2)], int(ms), flag)


class TestProbes(Case):
    def test_without_etcd_it_serves_but_is_not_ready_and_says_why(self):
        program = self.program("decode").up()
        status, body = get(program.admin, "/readyz")
        self.assertEqual(status, 503)
        self.assertIn("etcd", body)
        self.assertEqual(get(program.admin, "/livez"), (200, "alive\n"))
        self.assertEqual(program.metrics()['baton_ready{reason="etcd"}'], 0)

    def test_it_registers_is_ready_drains_and_leaves_nothing(self):
        etcd = self.etcd()
        programs = [self.program(role, "--id", role + "-1", etcd=etcd.url).up() for role in ("decode", "prefill")]
        etcd.start()  # after them: they wait for it
        for each in programs:
            until("ready", lambda: get(each.admin, "/readyz") == (200, "ready\n"))
        records = etcd.keys()
        self.assertEqual(sorted(records), ["decode-1", "prefill-1"])
        record = records["decode-1"]
        self.assertEqual(record.address.decode() if isinstance(record.address, bytes) else record.address, programs[0].grpc)
        self.assertEqual(get(programs[0].admin, "/drain?grace=1", "POST"), (202, "draining\n"))
        programs[1].process.send_signal(signal.SIGTERM)
        for each in programs:
            self.assertEqual(each.wait(), 0, each.log())
        self.assertEqual(etcd.keys(), {})

    def test_drain_refuses_a_grace_that_is_no_number(self):
        program = self.program("decode").up()
        self.assertEqual(get(program.admin, "/drain?grace=soon", "POST")[0], 400)
        self.assertFalse(program.debug()["is_draining"])

    def test_metrics_are_clean_under_promtool_also_the_aliases_exist(self):
        for role, alias in (("decode", "sglang:num_decode_prealloc_queue_reqs"), ("prefill", "sglang:num_prefill_inflight_queue_reqs")):
            program = self.program(role).up()
            _, body = get(program.admin, "/metrics")
            done = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, text=True, timeout=30,
                                  check=False)
            self.assertEqual((done.returncode, done.stdout + done.stderr), (0, ""))
            self.assertNotIn("sglang:", body)
            _, body = get(program.admin, "/metrics?names=sglang,vllm")
            self.assertIn(alias, body)
            self.assertIn("vllm:num_requests_running", body)

    def test_every_thread_is_shown_with_its_beat(self):
        program = self.program("decode").up()
        names = {each["name"] for each in json.loads(get(program.admin, "/debug/threads")[1])}
        self.assertLessEqual({"control", "rpc", "link", "engine", "admin", "log", "main", "watchdog"}, names)

    def test_a_process_that_was_stopped_is_not_blamed_and_goes_on(self):
        program = self.program("decode").up()
        program.process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)  # longer than the watchdog's limit: that is the point
        program.process.send_signal(signal.SIGCONT)
        until("answers again", lambda: get(program.admin, "/livez")[0] == 200)
        self.assertIsNone(program.process.poll())


class TestFiles(Case):
    def fetch(self, program, *names):
        with grpc.insecure_channel(program.grpc) as channel:
            call = channel.unary_stream("/baton.worker.v1.Worker/Files", worker.FilesRequest.SerializeToString,
                                        worker.FileChunk.FromString)
            return list(call(worker.FilesRequest(names=[n.encode() for n in names]), timeout=WITHIN_S))

    def test_large_files_arrive_whole_and_missing_ones_are_said_to_be(self):
        folder = tempfile.mkdtemp(prefix="baton-model-")
        self.addCleanup(shutil.rmtree, folder)
        for name in os.listdir(MODEL):
            shutil.copy(os.path.join(MODEL, name), folder)
        os.unlink(os.path.join(folder, "tokenizer_config.json"))
        with open(os.path.join(folder, "tokenizer.json"), "a") as file:
            file.write(" " * 1500000)
        program = self.program("decode", model=folder).up()
        chunks = self.fetch(program, "tokenizer.json", "tokenizer_config.json", "config.json")
        for name in ("tokenizer.json", "config.json"):
            own = [c for c in chunks if c.name.decode() == name]
            with open(os.path.join(folder, name), "rb") as file:
                self.assertEqual(b"".join(c.data for c in own), file.read())
            self.assertTrue(own[-1].is_last)
        self.assertGreater(len(chunks), 6)
        missing = [c for c in chunks if c.name == b"tokenizer_config.json"]
        self.assertEqual([(c.is_missing, c.is_last, c.data) for c in missing], [(True, True, b"")])

    def test_other_files_are_not_handed_out(self):
        program = self.program("prefill").up()
        for name in ("model.safetensors", "../config.json", "README.md"):
            with self.assertRaises(grpc.RpcError) as caught:
                self.fetch(program, name)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)

    def test_describe_is_what_was_registered(self):
        program = self.program("decode", "--id", "d7").up()
        with grpc.insecure_channel(program.grpc) as channel:
            call = channel.unary_unary("/baton.worker.v1.Worker/Describe", worker.DescribeRequest.SerializeToString,
                                       worker.DescribeReply.FromString)
            record = call(worker.DescribeRequest(), timeout=WITHIN_S).record
        self.assertEqual((record.id, record.address), (b"d7", program.grpc.encode()) if isinstance(record.id, bytes)
                         else ("d7", program.grpc))


class TestSessions(Case):
    def pair(self, *args):
        decode = self.program("decode", "--id", "d1", *args).up()
        prefill = self.program("prefill", "--id", "p1", *args).up()
        return decode, prefill

    def hand_over(self, decode, to_d, to_p, attempts, tokens, max_new):
        """Admits and sends the prefills; the caller collects."""
        for attempt in attempts:
            to_d.admit(attempt, tokens[attempt], max_new, 0)
        for _ in attempts:
            message = to_d.expect("admitted", "rejected")
            self.assertTrue(message.HasField("admitted"), message)
            admitted = message.admitted
            if admitted.is_local:
                continue
            to_p.send(peer.Envelope(prefill=peer.Prefill(
                attempt=admitted.attempt, tokens=tokens[admitted.attempt], slot=admitted.slot, key=admitted.key,
                **{"from": admitted.cached}, decode=to_d.hello.incarnation, address=decode.grpc.encode(), deadline_ms=60000)))

    def test_two_legs_give_the_tokens_of_one_on_every_link(self):
        for link in ("auto", "tcp", "shm"):
            with self.subTest(link):
                self.two_legs_give_the_tokens_of_one(link)

    def two_legs_give_the_tokens_of_one(self, link):
        decode, prefill = self.pair("--link", link)
        for each in (decode, prefill):
            each.logged(r"kv link open transports \"?" + {"auto": "tcp,posix", "tcp": "tcp", "shm": "posix"}[link] + r"\"? ")
        alone = self.program("decode").up()
        attempts = list(range(1, 9))
        tokens = {a: prompt(a, 20 + 30 * a) for a in attempts}
        one = self.session(alone)
        for attempt in attempts:
            one.admit(attempt, tokens[attempt], 24, 10000)
        expected, ends = one.collect(attempts)
        self.assertEqual({e.outcome for e in ends.values()}, {OUTCOME_OK})
        to_d, to_p = self.session(decode), self.session(prefill)
        self.hand_over(decode, to_d, to_p, attempts, tokens, 24)
        got, ends = to_d.collect(attempts)
        self.assertEqual({e.outcome for e in ends.values()}, {OUTCOME_OK})
        self.assertEqual(got, expected)
        self.assertTrue(all(len(t) == 24 for t in got.values()))
        m = self.assert_quiet(decode)
        self.assertEqual(m["baton_commits_total"], 8)
        self.assertGreater(m['baton_transfer_bytes_total{direction="received"}'], 0)
        m = self.assert_quiet(prefill)
        self.assertEqual(m['baton_entries_terminal_total{outcome="ok"}'], 8)
        debug = decode.debug("?limit=3")
        self.assertEqual(len(debug["terminals"]), 3)
        self.assertEqual(debug["terminals_total"], 8)
        self.assertEqual(sorted(s["peer_role"] for s in debug["sessions"]), ["prefill", "router"])
        self.assertEqual({t["outcome"] for t in debug["terminals"]}, {"ok"})
        for terminal in debug["terminals"]:  # at_us is the clock that all programs of a host share
            self.assertTrue(0 <= time.monotonic() * 1e6 - terminal["at_us"] < 60e6, terminal)
            self.assertTrue(0 <= terminal["freeing_us"] < 5e6, terminal)

    def test_routers_that_vanish_take_their_eighty_requests_with_them_again_and_again(self):
        decode, prefill = self.pair("--test-step-delay", "30ms")
        for cycle in range(5):
            to_d, to_p = self.session(decode, incarnation=100 + cycle), self.session(prefill, incarnation=100 + cycle)
            attempts = list(range(1, 81))
            tokens = {a: prompt(a + cycle * 100, 150) for a in attempts}
            self.hand_over(decode, to_d, to_p, attempts, tokens, 200)
            until("entries in flight", lambda: decode.debug()["live"] >= 60)
            entry = decode.debug()["entries"][0]
            self.assertGreater(entry["deadline_left_ms"], 0)
            self.assertIn(entry["peers"][0]["peer"], ("test-router", "p1"))
            to_d.close()
            to_p.close()
            for each in (decode, prefill):
                m = self.assert_quiet(each, within=5.0)
                self.assertGreater(m["baton_abort_to_freed_seconds_count"], 0)
        canary = self.session(decode)
        canary.admit(1, prompt(1, 150), 20, 10000)
        _, ends = canary.collect([1])
        self.assertEqual(ends[1].outcome, OUTCOME_OK)

    LEASE = ("--timer-beat", "200ms", "--timer-lease", "1s", "--timer-admit", "1s", "--timer-stall", "2s")

    def test_a_prefill_worker_that_is_stopped_is_given_up_and_finds_nothing_left_when_it_goes_on(self):
        decode, prefill = self.pair("--test-step-delay", "300ms", *self.LEASE)
        to_d, to_p = self.session(decode), self.session(prefill)
        self.hand_over(decode, to_d, to_p, [1], {1: prompt(1, 300)}, 20)
        until("the transfer", lambda: any(e["state"] == "receiving" for e in decode.debug()["entries"]))
        prefill.process.send_signal(signal.SIGSTOP)
        _, ends = to_d.collect([1])
        self.assertNotEqual(ends[1].outcome, OUTCOME_OK)
        self.assert_quiet(decode)
        prefill.process.send_signal(signal.SIGCONT)
        self.assert_quiet(prefill, within=10)
        self.assertIsNone(prefill.process.poll())

    def test_a_decode_worker_that_is_killed_ends_what_was_sent_to_it(self):
        decode, prefill = self.pair("--test-step-delay", "300ms", *self.LEASE)
        to_d, to_p = self.session(decode), self.session(prefill)
        self.hand_over(decode, to_d, to_p, [1], {1: prompt(1, 300)}, 20)
        until("the transfer", lambda: any(e["state"] == "computing" for e in prefill.debug()["entries"]))
        decode.process.kill()
        end = to_p.expect("prefill_end")
        self.assertNotEqual(end.outcome, OUTCOME_OK)
        m = self.assert_quiet(prefill)
        until("its endpoint is closed", lambda: prefill.metrics()['baton_link_operations{kind="peers"}'] == 0)
        self.assertEqual(m['baton_own_operations{kind="send"}'], 0)

    def test_abort_frees_before_the_request_is_done(self):
        decode = self.program("decode", "--test-step-delay", "20ms").up()
        session = self.session(decode)
        session.admit(5, prompt(5, 30), 400, 10000)
        session.expect("tokens")
        session.send(peer.Envelope(abort=peer.Abort(attempt=5, cause=CAUSE_CLIENT_GONE)))
        end = session.expect("end")
        self.assertEqual((end.outcome, end.cause), (OUTCOME_ABORTED, CAUSE_CLIENT_GONE))
        self.assert_quiet(decode)

    def test_a_prefill_worker_that_is_killed_costs_only_what_is_not_committed(self):
        decode, prefill = self.pair("--test-step-delay", "300ms")
        to_d, to_p = self.session(decode), self.session(prefill)
        tokens = {a: prompt(a, 300) for a in (1, 2, 3)}
        self.hand_over(decode, to_d, to_p, [1, 2, 3], tokens, 50)
        until("the hand-off runs", lambda: decode.debug()["kv"]["owned"] > 0 and
              any(e["state"] == "receiving" for e in decode.debug()["entries"]))
        prefill.process.kill()
        _, ends = to_d.collect([1, 2, 3])
        self.assertEqual(len(ends), 3)
        self.assert_quiet(decode, within=10)
        to_d.admit(9, prompt(9, 40), 4, 10000)
        _, ends = to_d.collect([9])
        self.assertEqual(ends[9].outcome, OUTCOME_OK)

    def test_garbage_ends_its_own_session_only(self):
        decode = self.program("decode", "--test-step-delay", "20ms").up()
        good = self.session(decode, incarnation=1)
        good.admit(3, prompt(3, 30), 60, 10000)
        for nonsense in (b"\xff\xff\xff\xff", b"", os.urandom(5000), peer.Envelope(beat=peer.Beat()).SerializeToString()):
            bad = self.session(decode, incarnation=2, hello=False)
            bad.out.put(nonsense)
            until("the bad session's end", lambda: bad.end is not None)
        _, ends = good.collect([3])
        self.assertEqual(ends[3].outcome, OUTCOME_OK)
        m = self.assert_quiet(decode)
        self.assertEqual(m['baton_session_ends_total{why="session_error"}'], 4)

    def test_a_decode_worker_that_hands_over_a_nonsense_address_costs_its_own_entries_only(self):
        decode, prefill = self.pair()
        to_d, to_p = self.session(decode), self.session(prefill)
        cached = prompt(1, 161)  # ten whole pages: all of it is in the cache the second time
        self.hand_over(decode, to_d, to_p, [1], {1: cached}, 2)
        _, ends = to_d.collect([1])
        self.assertEqual(ends[1].outcome, OUTCOME_OK)
        liar = FakeDecode(b"nonsense")
        self.addCleanup(liar.close)
        for attempt, tokens in ((2, cached), (3, prompt(7, 100))):
            to_p.send(peer.Envelope(prefill=peer.Prefill(attempt=attempt, tokens=tokens, slot=attempt << 32, key=5, decode=99,
                                                         address=liar.address.encode(), deadline_ms=60000)))
            while True:
                end = to_p.expect("prefill_end")
                if end.attempt == attempt:
                    break
            self.assertNotEqual(end.outcome, OUTCOME_OK)
        self.assert_quiet(prefill)
        self.assertEqual(prefill.metrics()['baton_own_operations{kind="send"}'], 0)
        self.hand_over(decode, to_d, to_p, [4], {4: prompt(9, 100)}, 2)
        _, ends = to_d.collect([4])
        self.assertEqual(ends[4].outcome, OUTCOME_OK)

    def test_an_entry_past_its_deadline_makes_unready_until_it_is_gone(self):
        decode = self.program("decode", "--timer-stall", "300ms", "--timer-leave", "300ms", "--test-step-delay", "3s").up()
        session = self.session(decode)
        session.admit(1, prompt(1, 30), 4, 10000)
        until("its step", lambda: decode.metrics()['baton_own_operations{kind="step"}'] == 1)
        session.send(peer.Envelope(abort=peer.Abort(attempt=1, cause=CAUSE_CLIENT_GONE)))
        until("the overrun is said", lambda: "deadline overrun" in get(decode.admin, "/readyz")[1], within=10)
        until("the overrun is over", lambda: "deadline overrun" not in get(decode.admin, "/readyz")[1] and
              decode.metrics()["baton_deadline_overrun_seconds"] == 0, within=10)
        self.assert_quiet(decode)

    def test_a_silent_session_ends_by_the_lease(self):
        decode = self.program("decode", "--timer-beat", "100ms", "--timer-lease", "500ms", "--timer-admit", "500ms",
                              "--test-step-delay", "20ms").up()
        session = self.session(decode)
        session.admit(1, prompt(1, 30), 400, 10000)
        session.expect("tokens")
        until("its end", lambda: session.end is not None, within=10)  # we say nothing any more
        self.assert_quiet(decode)
        self.assertEqual(decode.metrics()['baton_session_ends_total{why="session_silent"}'], 1)

    def test_draining_lets_a_request_finish_and_refuses_new_ones(self):
        decode = self.program("decode", "--test-step-delay", "20ms").up()
        session = self.session(decode)
        session.admit(1, prompt(1, 30), 40, 10000)
        session.expect("tokens")
        decode.process.send_signal(signal.SIGTERM)
        until("draining", lambda: "draining" in get(decode.admin, "/readyz")[1])
        session.admit(2, prompt(2, 30), 40, 10000)
        self.assertEqual(session.expect("rejected").attempt, 2)
        self.assertEqual(session.expect("end").outcome, OUTCOME_OK)
        self.assertEqual(decode.wait(), 0, decode.log())

    def test_while_it_drains_its_record_and_its_health_say_so(self):
        etcd = self.etcd()
        etcd.start()
        decode = self.program("decode", "--id", "d1", "--test-step-delay", "50ms", etcd=etcd.url).up()
        until("ready", lambda: get(decode.admin, "/readyz")[0] == 200)
        session = self.session(decode)
        health = session.channel.unary_unary("/grpc.health.v1.Health/Check")
        until("serving", lambda: health(b"", timeout=5) == b"\x08\x01")
        self.assertFalse(etcd.keys()["d1"].is_draining)
        session.admit(1, prompt(1, 30), 400, 10000)
        session.expect("tokens")
        decode.process.send_signal(signal.SIGTERM)
        until("the record says draining", lambda: etcd.keys()["d1"].is_draining, within=10)
        until("not serving", lambda: health(b"", timeout=5) == b"\x08\x02", within=10)
        session.send(peer.Envelope(abort=peer.Abort(attempt=1, cause=CAUSE_CLIENT_GONE)))
        self.assertEqual(decode.wait(), 0, decode.log())
        self.assertEqual(etcd.keys(), {})

    def test_a_drain_fails_what_outlives_its_grace_and_a_second_signal_leaves_at_once(self):
        decode = self.program("decode", "--test-step-delay", "50ms", "--drain-timeout", "300ms").up()
        session = self.session(decode)
        session.admit(1, prompt(1, 30), 400, 10000)
        session.expect("tokens")
        decode.process.send_signal(signal.SIGTERM)
        self.assertNotEqual(session.expect("end").outcome, OUTCOME_OK)
        self.assertEqual(decode.wait(), 0, decode.log())
        decode = self.program("decode", "--test-step-delay", "50ms").up()
        session = self.session(decode)
        session.admit(1, prompt(1, 30), 400, 10000)
        session.expect("tokens")
        decode.process.send_signal(signal.SIGTERM)
        until("draining", lambda: "draining" in get(decode.admin, "/readyz")[1])
        decode.process.send_signal(signal.SIGTERM)
        self.assertEqual(decode.wait(), 128 + signal.SIGTERM)

    def test_more_sessions_than_it_can_hold_are_refused_and_the_first_go_on(self):
        decode = self.program("decode", "--max-sessions", "2").up()
        first = self.session(decode, incarnation=1)
        self.session(decode, incarnation=2)
        third = self.session(decode, incarnation=3, hello=False)
        until("the third's refusal", lambda: third.end is not None)
        self.assertIn("RESOURCE_EXHAUSTED", third.end)
        first.admit(1, prompt(1, 30), 4, 10000)
        _, ends = first.collect([1])
        self.assertEqual(ends[1].outcome, OUTCOME_OK)

    def test_an_address_where_nobody_listens_fails_the_prefill_only(self):
        prefill = self.program("prefill").up()
        session = self.session(prefill)
        session.send(peer.Envelope(prefill=peer.Prefill(attempt=4, tokens=prompt(1, 40), slot=1 << 32, key=5,
                                                        decode=99, address=b"127.0.0.1:1", deadline_ms=60000)))
        self.assertEqual(session.expect("prefill_end").attempt, 4)
        self.assert_quiet(prefill, within=10)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[4:], verbosity=2)
