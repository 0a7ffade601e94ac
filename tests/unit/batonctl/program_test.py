#!/usr/bin/python3
"""batonctl as people run it, against admin ports that this file plays: program_test.py BATONCTL."""
import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import unittest

PROGRAM = sys.argv.pop(1) if len(sys.argv) > 1 else "batonctl"
RECORDED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "recorded")
METRICS = """# TYPE baton_entries gauge
baton_entries{{role="{role}",worker="{id}",state="{state}"}} 2
baton_oldest_entry_age_seconds{{role="{role}",worker="{id}",state="{state}"}} 3.25
baton_sessions{{role="{role}",worker="{id}",peer_role="router"}} 4
baton_pages{{role="{role}",worker="{id}",state="free"}} 90
baton_pages{{role="{role}",worker="{id}",state="owned"}} 10
baton_ledger_imbalance{{role="{role}",worker="{id}",what="entries"}} {imbalance}
baton_ledger_imbalance{{role="{role}",worker="{id}",what="pages"}} 0
baton_deadline_overrun_seconds{{role="{role}",worker="{id}"}} {overrun}
baton_audit_mismatch_total{{role="{role}",worker="{id}"}} 0
baton_draining{{role="{role}",worker="{id}"}} 0
baton_entries_created_total{{role="{role}",worker="{id}"}} {created}
baton_entries_terminal_total{{role="{role}",worker="{id}",outcome="ok"}} {created}
baton_canaries_total{{role="{role}",worker="{id}",legs="one",outcome="ok"}} {canaries}
baton_canary_age_seconds{{role="{role}",worker="{id}",legs="any"}} 1.25
baton_tokens_total{{role="{role}",worker="{id}",kind="generated"}} {tokens}
baton_time_to_first_token_seconds_bucket{{role="{role}",worker="{id}",le="0.1"}} {created}
baton_time_to_first_token_seconds_bucket{{role="{role}",worker="{id}",le="+Inf"}} {created}
baton_transfer_exposed_seconds_bucket{{role="{role}",worker="{id}",le="0.001"}} {created}
baton_transfer_exposed_seconds_bucket{{role="{role}",worker="{id}",le="+Inf"}} {created}
"""


def recorded(when, role):
    with open(os.path.join(RECORDED, f"{when}-{role}.json"), encoding="utf-8") as file:
        return json.load(file)


class Fake:
    """One program's admin port."""

    def __init__(self, role, document):
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self):
                fake.asked.append(f"{self.command} {self.path}")
                status, body = fake.reply(self.path.split("?")[0])
                body = body.encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body) + fake.lies))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = answer

            def log_message(self, *unused):
                pass

        self.role, self.document = role, document
        self.asked = []
        self.lies = 0
        self.ready = (200, "ready\n")
        self.numbers = {"imbalance": 0, "overrun": 0, "created": 100, "tokens": 1000}
        self.scrapes = 0
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def reply(self, path):
        if path == "/debug/entries":
            return 200, json.dumps(self.document)
        if path == "/readyz":
            return self.ready
        if path == "/metrics":
            self.scrapes += 1
            numbers = dict(self.numbers, created=self.numbers["created"] + 10 * self.scrapes,
                           tokens=self.numbers["tokens"] + 500 * self.scrapes,
                           canaries=5 * self.scrapes if self.role == "router" else 0)  # half of what ended
            return 200, METRICS.format(role=self.role, id=self.document["id"],
                                       state={"router": "streaming", "prefill": "computing", "decode": "running"}[self.role],
                                       **numbers)
        if path == "/drain":
            return 202, "draining\n"
        return 404, "no such path\n"

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@contextlib.contextmanager
def listener(reply=None):
    """A port that accepts and says nothing, or these bytes."""
    server = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def serve():
        while not stop.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                if reply is not None:
                    connection.recv(65536)
                    connection.sendall(reply)
    thread = threading.Thread(target=serve)
    if reply is not None:
        thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        stop.set()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()
        if reply is not None:
            thread.join()


class Case(unittest.TestCase):
    when = "prefilling"

    def setUp(self):
        self.fakes = {role: Fake(role, recorded(self.when, role)) for role in ("router", "prefill", "decode")}
        for fake in self.fakes.values():
            self.addCleanup(fake.close)

    def run_it(self, *arguments, code=0, columns=None, at=None, environment=None):
        addresses = at or [fake.address for fake in self.fakes.values()]
        variables = {key: value for key, value in os.environ.items() if not key.startswith("BATON_") and key != "COLUMNS"}
        if columns:
            variables["COLUMNS"] = str(columns)
        variables.update(environment or {})
        done = subprocess.run([PROGRAM, *arguments] + (["--at", ",".join(addresses)] if at != [] else []), env=variables,
                              capture_output=True, text=True, timeout=30, check=False)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        if columns:
            for line in done.stdout.splitlines():
                self.assertLessEqual(len(line), columns, line)
        self.assertNotIn("\033", done.stdout)
        return done.stderr if code in (1, 2) else done.stdout

    def json(self, *arguments, **more):
        return json.loads(self.run_it(*arguments, "--json", **more))


class Status(Case):
    def test_one_line_for_each_program(self):
        shown = self.run_it("status", columns=80)
        self.assertRegex(shown, r"cluster .*1 router, 1 prefill worker, 1 decode worker: all\s+is\s+well")
        self.assertRegex(shown, r"prefill +prefill-1 +ready +2 computing +3.2 s +90/0/10 +4")
        self.assertRegex(self.run_it("status", columns=140), r"PAGES FREE/CACHED/OWNED.*ADMIN")

    def test_what_is_wrong_is_said_in_words(self):
        self.fakes["decode"].numbers.update(imbalance=2, overrun=1.5)
        self.fakes["decode"].ready = (503, "ledger imbalance: entries 2, pages 0 (must be 0)\nanother reason\n")
        shown = self.run_it("status", code=3)
        self.assertIn("! decode-1 is not ready: ledger imbalance", shown)
        self.assertIn("! decode-1 is not ready: another reason", shown)
        self.assertIn("decode-1: 2 entries are neither live nor ended", shown)
        self.assertIn("1.5 s past the deadline", shown)
        told = self.json("status", code=3)
        self.assertFalse(told["well"])
        decode = [each for each in told["programs"] if each["id"] == "decode-1"][0]
        self.assertEqual((decode["ledger_imbalance"]["entries"], decode["overrun_ms"], decode["ready"]), (2, 1500, False))
        self.assertEqual(decode["why"][1], "another reason")
        self.assertEqual(decode["entries"], {"running": 2})

    def test_each_kind_of_silence_is_told_apart(self):
        with listener() as silent, listener(b"SSH-2.0-x\r\n") as ssh, listener(b"") as closes, \
                listener(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\nshort") as cut, \
                listener(b"HTTP/1.1 503 No\r\nContent-Length: 8\r\n\r\nloading\n") as loading:
            with socket.create_server(("127.0.0.1", 0)) as gone:
                refused = f"127.0.0.1:{gone.getsockname()[1]}"
            shown = self.run_it("entries", "--timeout", "300ms", code=3,
                                at=[silent, ssh, closes, cut, loading, refused, self.fakes["router"].address])
        for address, why in ((silent, "connected, but no reply within 0.3 s"), (ssh, "does not speak HTTP"),
                             (closes, "closed the connection without an answer"), (cut, "broke off after 5 of 900 bytes"),
                             (loading, "it answers 503: loading"), (refused, "nothing listens there")):
            self.assertRegex(shown, rf"! {address} \(role not known, {address}\) does not answer: .*{why}")
        self.assertIn("agent-0", shown)

    def test_host_names_are_resolved_and_unknown_ones_named(self):
        port = self.fakes["router"].address.split(":")[1]
        told = self.json("status", at=[f"localhost:{port}", "no-such-host.invalid:80"], code=3, environment={})
        self.assertEqual([each["answers"] for each in told["programs"]], [True, False])
        self.assertRegex(told["not_answering"][0]["why"], "host name .*no-such-host.invalid|not resolved")


class Entries(Case):
    def test_a_request_is_one_line_with_whom_it_waits_for(self):
        shown = self.run_it("entries")
        self.assertRegex(shown, r"agent-0 +[\d.]+ m?s +prefilling +computing +receiving .*prefill-1: its engine step")
        self.assertRegex(shown, r"agent-1 .*placing +- +- .*router-1: a worker with room")
        narrow = self.run_it("entries", columns=80)
        self.assertIn("\n  waits for prefill-1: its engine step\n", narrow)

    def test_filters(self):
        def labels(*flags):
            return sorted(each["label"] for each in self.json("entries", *flags)["entries"])
        self.assertEqual(labels(), ["agent-0", "agent-1", "agent-2"])
        self.assertEqual(labels("--role", "decode"), ["agent-0", "agent-2"])
        self.assertEqual(labels("--state", "placing"), ["agent-1"])
        self.assertEqual(labels("--state", "queued"), ["agent-2"])
        self.assertEqual(labels("--role", "prefill", "--state", "placing"), [])
        self.assertEqual(labels("--older-than", "1h"), [])
        self.assertIn("no live entry fits", self.run_it("entries", "--older-than", "1h"))

    def test_a_hostile_label_reaches_neither_terminal_nor_line(self):
        for fake in self.fakes.values():
            for entry in fake.document["entries"]:
                if entry["label"] == "agent-0":
                    entry["label"] = "\x1b[2J\nroot\u202e"
        self.assertIn("\\x1b[2J\\x0aroot\\xe2\\x80\\xae", self.run_it("entries"))
        self.assertIn("\x1b[2J\nroot\u202e", [each["label"] for each in self.json("entries")["entries"]])

    def test_json_that_is_none_is_told(self):
        self.fakes["decode"].reply = lambda path: (200, "{ nonsense")
        self.assertIn("is no JSON", self.run_it("entries", code=3))


class Why(Case):
    def test_a_live_request_by_label_and_by_ids(self):
        attempt = [each for each in self.fakes["router"].document["entries"] if each["label"] == "agent-0"][0]["attempt"]
        slot = self.fakes["decode"].document["entries"][0]["id"]
        for name in ("agent-0", attempt, slot, attempt.upper()):
            shown = self.run_it("why", name, columns=100)
            self.assertRegex(shown, r"request agent-0 is live for [\d.]+ m?s: attempt 1 \(" + attempt + r" of router-1\)")
            self.assertIn("waits for prefill-1: its engine step", shown)
            self.assertRegex(shown, r"if nothing moves, this attempt ends in [\d.]+ s at")
            self.assertRegex(shown, r"decode-1 +receiving .*KV from the prefill worker")

    def test_a_request_without_room_shows_what_its_router_sees(self):
        shown = self.run_it("why", "agent-1")
        self.assertIn("waits for router-1: a worker with room", shown)
        self.assertRegex(shown, r"router-1 sees prefill-1: session live, \d+ entries, \d+ pages free, backlog .*heard [\d.]+ m?s ago")
        self.assertRegex(shown, r"decode-1 +1-7 +aborted +reserved +superseded: another attempt took over")

    def test_unknown_requests_are_an_error_with_a_sentence(self):
        self.assertIn("no program that answers holds or remembers 'nobody' (3 of 3 answered",
                      self.run_it("why", "nobody", code=1))
        self.assertIn("why takes one request", self.run_it("why", code=2))
        self.assertIn("why takes one request", self.run_it("why", "", code=2))


class WhyOver(Case):
    when = "after"

    def test_the_story_of_a_request_that_is_over(self):
        shown = self.run_it("why", "agent-0")
        self.assertRegex(shown, r"request agent-0 is over: ok at router-1, .* in state streaming: it ran to its end")
        self.assertRegex(shown, r"prefill-1 +1 +ok +sent +done: it ran to its end")
        story = self.json("why", "agent-0")["requests"][0]
        self.assertFalse(story["is_live"])
        self.assertEqual(story["ended"][-1]["role"], "router")
        self.assertTrue(all(each["attempt"][:6] == story["ended"][0]["attempt"][:6] for each in story["ended"]))

    def test_a_part_that_a_worker_still_lets_go_of_does_not_make_a_request_live(self):
        request = [each for each in self.fakes["router"].document["terminals"] if each["label"] == "agent-0"][0]
        part = dict(recorded("prefilling", "prefill")["entries"][0], attempt=request["attempt"], label="agent-0",
                    router=request["router"], state="leaving", waits_for="its engine step to end", peers=[])
        self.fakes["prefill"].document["entries"].append(part)
        shown = self.run_it("why", "agent-0")
        self.assertTrue(shown.startswith("request agent-0 is over: ok at router-1"), shown)
        self.assertRegex(shown, r"a part of request agent-0 is live .*\n +waits for prefill-1: its engine step to end")

    def test_the_first_trouble_is_named(self):
        router, decode = self.fakes["router"].document, self.fakes["decode"].document
        request = [each for each in router["terminals"] if each["label"] == "agent-0"][0]
        request.update(outcome="failed", cause="retries")
        for each in decode["terminals"]:
            if each["attempt"] == request["attempt"]:
                each.update(outcome="failed", cause="stall", state="receiving")
        shown = self.run_it("why", "agent-0")
        self.assertIn("is over: failed at router-1", shown)
        self.assertIn("the first to end it was decode-1, in state receiving, attempt 1: no KV bytes moved", shown)

    def test_a_prefill_worker_says_what_of_the_hand_off_was_not_hidden(self):
        for each in self.fakes["prefill"].document["terminals"]:
            each["kv_exposed_us"] = 1230
        shown = self.run_it("why", "agent-0", columns=200)
        found = [line for line in shown.splitlines() if "; 1.2 ms of KV not hidden" in line]
        self.assertTrue(found and all(" prefill-1 " in line for line in found), shown)

    def test_a_label_is_found_though_programs_keep_only_its_beginning(self):
        label = "a-label-of-more-than-23-bytes"
        for fake in self.fakes.values():
            for each in fake.document["terminals"]:
                if each["label"] == "agent-0":
                    each["label"] = label[:23]
        self.assertIn("is over", self.run_it("why", label))
        self.run_it("why", label[:22], code=1)

    def test_without_the_router_the_workers_remember(self):
        shown = self.run_it("why", "agent-0", at=[self.fakes["decode"].address, self.fakes["prefill"].address])
        self.assertIn("its router remembers nothing of it", shown)
        self.assertIn("ok at decode-1", shown)


class Drain(Case):
    def test_one_program_is_asked(self):
        shown = self.run_it("drain", "decode-1", "--grace", "1.5")
        self.assertIn("decode decode-1 drains: it takes nothing new", shown)
        self.assertIn("after 1.5 s", shown)
        self.assertIn("POST /drain?grace=1.500", self.fakes["decode"].asked)
        self.assertFalse([each for role in ("router", "prefill") for each in self.fakes[role].asked if "drain" in each])

    def test_a_role_is_all_its_programs(self):
        told = self.json("drain", "prefill")
        self.assertEqual([(each["id"], each["drains"]) for each in told["programs"]], [("prefill-1", True)])
        self.assertIn("POST /drain", self.fakes["prefill"].asked)

    def test_nobody_of_that_name_is_an_error_that_lists_who_there_is(self):
        self.assertIn("no program is called 'x' or has that role; there are: router-1, prefill-1, decode-1",
                      self.run_it("drain", "x", code=1))

    def test_a_refusal_is_an_error(self):
        fake, known = self.fakes["decode"], self.fakes["decode"].reply
        fake.reply = lambda path: (400, "grace is too long\n") if path == "/drain" else known(path)
        done = subprocess.run([PROGRAM, "drain", "decode-1", "--at", fake.address], capture_output=True, text=True,
                              timeout=30, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("refuses: 400: grace is too long", done.stdout)

    def test_waiting_ends_when_nothing_listens_there_any_more(self):
        fake, known = self.fakes["decode"], self.fakes["decode"].reply
        looks = []

        def reply(path):
            if path == "/debug/entries" and "POST /drain" in fake.asked:
                looks.append(path)
                if len(looks) == 2:
                    threading.Thread(target=fake.close).start()
            return known(path)
        fake.reply = reply
        shown = self.run_it("drain", "decode-1", "--wait", at=[fake.address])
        self.assertIn("decode-1: 2 entries left", shown)
        self.assertIn("decode-1 has left", shown)

    def test_a_wrong_grace_is_refused_before_anybody_is_asked(self):
        for grace in ("-1", "1e9", "soon", "nan", "5m"):
            self.assertIn("--grace is a number of seconds", self.run_it("drain", "decode-1", f"--grace={grace}", code=2))
        self.assertEqual(self.fakes["decode"].asked, [])


class Top(Case):
    def test_one_interval(self):
        shown = self.run_it("top", "--once", "--every", "200ms", columns=80)
        self.assertRegex(shown, r"requests +2 live, \d+\.\d ok")
        self.assertRegex(shown, r"time to first token p50 [\d.]+ ms")
        told = self.json("top", "--once", "--every", "200ms")
        self.assertGreater(told["ok_per_s"], 0)  # how much depends on how long the interval really was
        self.assertAlmostEqual(told["generated_tokens_per_s"] / told["ok_per_s"], 100, delta=0.1)
        self.assertEqual(told["time_to_first_token"]["samples"], 10)
        self.assertAlmostEqual(told["time_to_first_token"]["p50_ms"], 50, delta=0.1)
        self.assertIsNone(told["inter_token_latency"]["p50_ms"])
        self.assertRegex(shown, r"KV not hidden +p50 0\.5 ms")
        self.assertEqual(told["kv_exposed"]["samples"], 10)  # of the prefill worker alone

    def test_without_once_it_goes_on_until_the_reader_leaves(self):
        process = subprocess.Popen([PROGRAM, "top", "--every", "100ms", "--json", "--at", self.fakes["router"].address],
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.stdout.close()
        self.assertEqual([len(each["programs"]) for each in lines], [1, 1, 1])
        self.assertNotEqual(process.wait(10), 0)


class Usage(Case):
    def test_help_of_each_command_and_of_all(self):
        told = subprocess.run([PROGRAM, "--help"], capture_output=True, text=True, timeout=10, check=True).stdout
        for name in ("status", "entries", "why", "drain", "top"):
            self.assertIn(f"\n  {name}", told)
            more = subprocess.run([PROGRAM, name, "--help"], capture_output=True, text=True, timeout=10, check=True).stdout
            self.assertIn(f"batonctl {name}", more)
            self.assertIn("--json", more)
        self.assertIn("exit codes", told)

    def test_wrong_usage_is_a_sentence(self):
        for arguments, told in ((["statu"], "no command 'statu'"), (["status", "--rol", "x"], "--rol"),
                                (["status", "extra"], "extra"), (["status", "--at", "nonsense"], "HOST:PORT"),
                                (["status", "--timeout", "1ms"], "timeout")):
            done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=10, check=False)
            self.assertIn(done.returncode, (1, 2))
            self.assertIn(told, done.stderr)
            self.assertEqual(done.stdout, "")

    def test_etcd_that_is_away_is_a_sentence(self):
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        told = self.run_it("status", "--etcd", f"http://127.0.0.1:{port}", at=[], code=1)
        self.assertRegex(told, r"etcd at http://127.0.0.1:\d+ cannot be read: .* Is --etcd \(or BATON_ETCD\) right\?")
        self.assertIn("--cluster is", self.run_it("status", "--cluster", "a/b", at=[], code=1))


if __name__ == "__main__":
    unittest.main(verbosity=2)
