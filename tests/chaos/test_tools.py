#!/usr/bin/python3
"""The tools of chaos themselves: each harm does what its name says, each oracle can fail, and nothing is left behind."""
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import net  # noqa: E402
from world import harness  # noqa: E402
from judge import OK, Outcome, Trial  # noqa: E402


class Echo:
    """A server that sends back what it gets, and how each of its connections ended."""

    def __init__(self, host=None):
        self.ends = []
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(peer,), daemon=True).start()

    def serve(self, peer):
        try:
            while data := peer.recv(65536):
                peer.sendall(data)
            self.ends.append("end")
        except OSError as error:
            self.ends.append(type(error).__name__)
        peer.close()


class ProxyTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.proxies = net.Proxies()
        cls.addClassCleanup(cls.proxies.close)

    def setUp(self):
        self.echo = Echo()
        self.addCleanup(self.echo.listener.close)
        self.link = self.id()
        self.port = self.proxies.listen(self.link, None, "127.0.0.1", self.echo.port)
        self.peer = self.dial()

    def dial(self):
        peer = socket.create_connection(("127.0.0.1", self.port), 5)
        self.addCleanup(peer.close)
        return peer

    def ask(self, data=b"hello", peer=None):
        """What comes back, and after how long."""
        peer = peer or self.peer
        began = time.monotonic()
        peer.sendall(data)
        got = b""
        while len(got) < len(data):
            piece = peer.recv(65536)
            if not piece:
                break
            got += piece
        return got, time.monotonic() - began

    def silent(self, peer, seconds=0.4):
        peer.settimeout(seconds)
        try:
            return peer.recv(1) is None
        except TimeoutError:
            return True
        finally:
            peer.settimeout(5)

    def test_without_a_policy_every_byte_passes_and_an_end_is_told(self):
        data = os.urandom(1 << 20)
        back = threading.Thread(target=self.peer.sendall, args=(data,))
        back.start()
        got = b""
        while len(got) < len(data):
            got += self.peer.recv(65536)
        back.join()
        self.assertEqual(got, data)
        self.peer.shutdown(socket.SHUT_WR)
        self.assertEqual(self.peer.recv(1), b"")
        self.assertEqual(self.echo.ends, ["end"])

    def test_a_delay_delays_each_way(self):
        with self.proxies.policy([self.link], up={"delay_ms": 200}, down={"delay_ms": 100}):
            got, took = self.ask()
        self.assertEqual(got, b"hello")
        self.assertGreater(took, 0.29)

    def test_a_rate_is_kept(self):
        with self.proxies.policy([self.link], down={"rate": 100_000}):
            got, took = self.ask(b"x" * 50_000)
        self.assertEqual(len(got), 50_000)
        self.assertGreater(took, 0.45)

    def test_what_is_held_arrives_late_and_whole(self):
        with self.proxies.policy([self.link], up={"hold": True}):
            self.peer.sendall(b"hello")
            self.assertTrue(self.silent(self.peer))
        self.assertEqual(self.peer.recv(5), b"hello")

    def test_what_is_lost_never_arrives_and_its_connection_is_reset_at_the_end(self):
        with self.proxies.policy([self.link], down={"lost": True}):
            self.peer.sendall(b"hello")
            self.assertTrue(self.silent(self.peer))
            self.assertEqual(self.echo.ends, [])
        with self.assertRaises(ConnectionResetError):
            self.peer.recv(1)
        self.assertEqual(self.ask(peer=self.dial())[0], b"hello")

    def test_a_cut_ends_each_connection_in_the_middle(self):
        with self.proxies.policy([self.link], down={"cut": 3}):
            self.assertEqual(self.ask()[0], b"hel")
            self.assertEqual(self.ask(peer=self.dial())[0], b"hel")

    def test_a_reset_reaches_both_ends(self):
        self.ask()
        for _ in range(3):  # however often it is said
            self.proxies.tell("reset", self.link)
        with self.assertRaises(ConnectionResetError):
            self.peer.recv(1)
        harness.until("the target hears of it", lambda: self.echo.ends == ["ConnectionResetError"], 5)

    def test_refused_means_reset_on_arrival(self):
        self.ask()
        with self.proxies.policy([self.link], refuse=True):
            with self.assertRaises(OSError):
                self.assertEqual(self.dial().recv(1), None)
            self.assertEqual(self.ask()[0], b"hello", "connections that were there live on")

    def test_half_open_is_told_to_one_end_only(self):
        self.ask()
        with self.proxies.policy([self.link], blind=True):
            self.proxies.tell("lose", self.link, side="far")
            harness.until("the target hears of it", lambda: self.echo.ends == ["end"], 5)
            self.assertTrue(self.silent(self.peer))
            self.peer.sendall(b"anybody?")
            self.assertTrue(self.silent(self.peer))
        with self.assertRaises(ConnectionResetError):
            self.peer.recv(1)


class NetTest(unittest.TestCase):
    def setUp(self):
        self.net = net.Net()
        self.addCleanup(self.net.close)

    def serve(self, host, port=7000):
        """A server in a namespace that echoes; ends with the test."""
        program = (f"import socket,threading\ns=socket.socket()\ns.bind(('0.0.0.0',{port}))\ns.listen()\nprint(1,flush=True)\n"
                   "def f(c):\n while d:=c.recv(65536): c.sendall(d)\n"
                   "while 1: threading.Thread(target=f,args=(s.accept()[0],),daemon=True).start()\n")
        process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "--"] + host.enter + [sys.executable, "-c", program],
                                   stdout=subprocess.PIPE)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.assertEqual(process.stdout.readline(), b"1\n")
        return process

    def dial(self, host, target, text="x", size=1):
        """What a client in a namespace gets back within a second, as text."""
        program = (f"import socket\ns=socket.create_connection(('{target.address}',7000),1)\n"
                   f"s.sendall(b'{text}'*{size})\nn=0\nwhile n<{size}: n+=len(s.recv(65536))\nprint(n)")
        done = subprocess.run(["nsenter", f"--net={host.path}", "--", sys.executable, "-c", program],
                              capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.strip() or done.stderr.strip().splitlines()[-1]

    def test_hosts_reach_each_other_and_each_way_can_be_lost(self):
        one, two, three = (self.net.host(name) for name in ("one", "two", "three"))
        self.serve(two)
        self.assertEqual(self.dial(one, two), "1")
        with socket.create_connection((two.address, 7000), 2):
            pass
        for way in ("up", "down", "both"):
            with self.net.lost([("one", "two", 7000)], way):
                self.assertIn("timed out", self.dial(one, two))
                self.assertEqual(self.dial(three, two), "1", "only that wire is cut")
            self.assertEqual(self.dial(one, two), "1")

    def test_a_throttled_port_is_slow(self):
        one, two = self.net.host("one"), self.net.host("two")
        self.serve(two)
        began = time.monotonic()
        with self.net.throttled("one", 7000, 100_000):
            self.assertEqual(self.dial(one, two, size=120_000), "120000")
        self.assertGreater(time.monotonic() - began, 0.8)

    def test_programs_see_their_own_interfaces(self):
        host = self.net.host("one")
        done = subprocess.run(host.enter + ["ls", "/sys/class/net"], capture_output=True, text=True, timeout=10, check=True)
        self.assertEqual(done.stdout.split(), ["lo", "wire"])


class CleanTest(unittest.TestCase):
    def test_nothing_is_left_of_a_run_that_was_killed(self):
        for number in (signal.SIGTERM, signal.SIGKILL):
            with self.subTest(number):
                program = ("import sys,tempfile,time\nsys.path.insert(0,sys.argv[1])\nimport net\nn=net.Net()\nh=n.host('one')\n"
                           "import subprocess\np=net.Proxies()\n"
                           "s=subprocess.Popen(['setpriv','--pdeathsig','KILL','--']+h.enter+['sleep','100'])\n"
                           "print(s.pid,p.process.pid,flush=True)\ntime.sleep(100)\n")
                process = subprocess.Popen([sys.executable, "-c", program, HERE], stdout=subprocess.PIPE, text=True)
                children = [int(each) for each in process.stdout.readline().split()]
                self.assertEqual(len(children), 2)
                harness.until("its program runs", lambda: b"sleep" in net.read(f"/proc/{children[0]}/comm"), 5)
                process.send_signal(number)
                process.wait()
                process.stdout.close()
                harness.until("its programs are gone", lambda: not any(
                    os.path.exists(f"/proc/{each}") for each in children), 5)
                harness.until("its interface is gone", lambda pid=process.pid: f"chaos{pid}:" not in net.tool(
                    ["ip", "-o", "link"]) and f"chaos{pid}@" not in net.tool(["ip", "-o", "link"]), 10)


class FakeMember:
    """A program that only has an admin port, and says what it is told to say."""

    role = "decode"
    pid = start = 1

    def __init__(self, id, pages):
        self.id = id
        self.metrics = {"baton_entries": 0, "baton_entries_created_total": 5, "baton_entries_terminal_total": 5}
        self.pages = pages
        self.ready_status = 200
        self.page = {"entries": [], "terminals": [], "terminals_total": 0}
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                status, text = fake.answer(self.path)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *unused):
                pass
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path):
        if path.startswith("/metrics"):
            return 200, "".join(f'{name}{{state="running"}} {value}\n' for name, value in self.metrics.items()) + "".join(
                f'baton_pages{{state="{name}"}} {value}\n' for name, value in self.pages.items())
        if path.startswith("/readyz"):
            return self.ready_status, "a reason\n"
        return 200, json.dumps(self.page)

    def address(self, _):
        return f"127.0.0.1:{self.server.server_address[1]}"

    def alive(self):
        return True

    def __str__(self):
        return self.id


class JudgeTest(unittest.TestCase):
    """Each oracle sees the fault that it is for."""

    def setUp(self):
        harness.CAPACITY.clear()
        self.member = FakeMember("decode-1", {"free": 10, "cached": 2, "owned": 0})
        self.addCleanup(self.member.server.server_close)
        self.addCleanup(self.member.server.shutdown)
        self.trial = Trial(None, None)

    def test_quiet_holds_and_fails(self):
        self.trial.quiet(0.3, [self.member])
        self.assertEqual(self.trial.failed, [])
        for name, value, told in (("baton_entries", 1, "entries"), ("baton_entries_created_total", 6, "created")):
            with self.subTest(name):
                before, self.member.metrics[name] = self.member.metrics[name], value
                self.trial.failed.clear()
                self.trial.quiet(0.3, [self.member])
                self.assertIn(told, str(self.trial.failed))
                self.member.metrics[name] = before
        self.trial.failed.clear()
        self.member.pages = {"free": 9, "cached": 2, "owned": 0}
        self.trial.quiet(0.3, [self.member])
        self.assertIn("pages", str(self.trial.failed))

    def test_what_is_still_shared_is_not_free(self):
        self.member.page["entries"] = [{"id": "1", "state": "receiving", "age_ms": 1, "peers": [{"peer": "prefill-1"}]}]
        other = FakeMember("prefill-1", {})
        self.addCleanup(other.server.server_close)
        self.addCleanup(other.server.shutdown)
        held = {(self.member, other): {"1"}}
        self.trial.free(held, 0.3)
        self.assertIn("FREE", str(self.trial.failed))
        self.trial.failed.clear()
        self.member.page["entries"] = [{"id": "2", "state": "receiving", "age_ms": 1, "peers": [{"peer": "prefill-1"}]}]
        self.trial.free(held, 0.3)
        self.assertEqual(self.trial.failed, [])

    def watched(self, outcomes, spans):
        """A trial of a router whose canary saw these outcomes and whose /readyz said that."""
        router = FakeMember("router-1", {})
        router.role = "router"
        router.server.shutdown()
        router.server.server_close()
        world = types.SimpleNamespace(routers=lambda: [router], workers=lambda: [], of=lambda role: [])
        trial = Trial(world, None)
        trial.canaries = [types.SimpleNamespace(label="canary", router="router-1", outcomes=outcomes, wrong=[])]
        trial.prober = types.SimpleNamespace(spans=lambda id, now: spans)
        trial.truth()
        return trial.failed

    @staticmethod
    def outcomes(*rows):
        """rows: (began, ended, code)"""
        made = []
        for began, ended, code in rows:
            outcome = Outcome(f"canary-{len(made)}", "router-1")
            outcome.began, outcome.ended, outcome.code = began, ended, code
            made.append(outcome)
        return made

    def test_green_while_nothing_is_answered_is_a_lie(self):
        wedged = self.outcomes((0, 0.1, OK), (0.2, 30, "UNAVAILABLE"), (30.1, 30.2, OK))
        self.assertIn("said ready while", str(self.watched(wedged, [(0, 40, 200, "ready")])))
        self.assertEqual(self.watched(wedged, [(0, 10, 200, "ready"), (10, 31, 503, "why"), (31, 40, 200, "ready")]), [])

    def test_red_while_everything_is_answered_is_a_lie(self):
        fine = self.outcomes(*[(each / 2, each / 2 + 0.1, OK) for each in range(80)])
        self.assertIn("requests were answered", str(self.watched(fine, [(0, 5, 200, ""), (5, 30, 503, "why"), (30, 40, 200, "")])))
        self.assertIn("without a reason", str(self.watched(fine, [(0, 5, 200, ""), (5, 6, 503, ""), (6, 40, 200, "")])))
        self.assertEqual(self.watched(fine, [(0, 40, 200, "ready")]), [])

    def test_a_request_with_two_ends_or_a_false_one_is_found(self):
        self.member.role = "router"
        self.member.metrics.update({name: 0 for name in ("baton_audit_mismatch_total", "baton_ledger_imbalance",
                                                          "baton_slots_bad_total", "baton_deadline_overrun_seconds")})
        def judged(code, ends):
            world = types.SimpleNamespace(routers=lambda: [self.member], workers=lambda: [])
            trial = Trial(world, None)
            outcome = self.outcomes((0, 1, code))[0]
            outcome.router = self.member.id
            trial.canaries = [types.SimpleNamespace(outcomes=[outcome], label="canary", wrong=[])]
            self.member.page = {"entries": [], "terminals_total": len(ends),
                                "terminals": [{"label": outcome.label, "outcome": end} for end in ends]}
            trial.terminals()
            return trial.failed
        self.assertEqual(judged(OK, ["ok"]), [])
        self.assertEqual(judged("UNAVAILABLE", ["failed"]), [])
        self.assertEqual(judged("UNAVAILABLE", []), [])
        self.assertIn("ended 2 times", str(judged(OK, ["ok", "failed"])))
        self.assertIn("recorded", str(judged(OK, ["failed"])))
        self.assertIn("INTERNAL", str(judged("INTERNAL", ["failed"])))
        self.assertIn("never ended", str(judged(None, [])))


if __name__ == "__main__":
    try:
        net.Net().close()
    except net.NoNetwork as problem:
        print(f"chaos: {problem}", file=sys.stderr)
        sys.exit(77 if os.environ.get("BATON_CHAOS_MAY_SKIP") else 1)
    unittest.main(verbosity=2)
