#!/usr/bin/python3
"""Programs that know when they are stuck: a thread that hangs or dies, a leak, a cluster in which nothing completes."""
import os
import signal
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import (Canary, Case, Metrics, RETRYABLE, api, at_rest, client, entries, filler, golden_request, http_get,  # noqa: E402
                     main, make_request, stopped, until, warm)

HOOKS = ["--test-hooks"]
EXIT_SILENT = 70
SLACK_S = 1.5  # of a slow machine, on top of each bound


def post(member, path):
    return http_get(member.address("admin"), path, method="POST")


def readyz(member):
    status, body = http_get(member.address("admin"), "/readyz")
    return status, body


def last_line(member):
    return member.tail(1).strip()


class Threads(Case):
    """F57: no process lives on half-dead."""

    FAULTS = (("decode", "control", "hang"), ("decode", "control", "die"), ("decode", "rpc", "hang"), ("decode", "rpc", "die"),
              ("decode", "link", "hang"), ("decode", "engine", "hang"), ("decode", "log", "die"),
              ("prefill", "link", "hang"), ("prefill", "link", "die"), ("prefill", "engine", "die"),
              ("router", "control", "hang"), ("router", "rpc", "hang"), ("router", "text-0", "die"),
              ("router", "etcd-clock", "hang"), ("router", "admin", "die"))
    BOUNDS_S = {"engine": 3.0}  # --engine-limit and its turn of the watchdog; all others 2 s

    def test_a_thread_that_hangs_or_dies_ends_the_process_and_others_take_over(self):
        made = self.cluster(2, 2, routers=2, arguments={
            "router": ["--disaggregate-above", "0", "--canary", "10s"] + HOOKS,
            "workers": HOOKS + ["--engine-limit", "2s"]})
        warm(made)
        with Canary(made, router=1) as canary:
            for role, thread, how in self.FAULTS:
                with self.subTest(role=role, thread=thread, how=how):
                    member = made.of(role)[0]
                    began = time.monotonic()
                    self.assertEqual(post(member, f"/test/thread?name={thread}&do={how}")[0], 200)
                    self.assertTrue(member.wait(10), f"{member} lives on")
                    took = time.monotonic() - began
                    self.assertEqual(member.code, EXIT_SILENT, member.tail())
                    self.assertLess(took, self.BOUNDS_S.get(thread, 2.0) + SLACK_S)
                    said = "does not beat" if how == "hang" else "has ended that nobody told to"
                    self.assertIn(said, last_line(member))
                    self.assertRegex(last_line(member), rf"\bthread[ =]{thread}\b")
                    again = canary.answers_again(10)
                    print(f"{role} {thread} {how}: ended after {took:.2f} s, answers after {again:.2f} s more")
                    made.restart(member)
                    made.wait_ready([member])
            canary.pause()
        at_rest(made, 10)
        self.assert_no_faults(made)

    def test_the_hooks_are_not_there_unless_asked_for(self):
        made = self.cluster(0, 1, arguments={"router": []})
        for member in made.routers() + made.workers():
            self.assertEqual(post(member, "/test/leak")[0], 404)
            self.assertEqual(post(member, "/test/thread?name=control&do=die")[0], 404)


class Ledger(Case):
    """F52: a leak is an alarm at once, not a slow death."""

    def test_one_lost_free_is_said_within_a_second(self):
        made = self.cluster(1, 1, arguments={"router": ["--disaggregate-above", "0"] + HOOKS, "workers": HOOKS})
        warm(made)
        what = {"router": "words", "prefill": "pages", "decode": "pages"}
        for member in made.routers() + made.workers():
            self.assertEqual(Metrics(member).sum("baton_ledger_imbalance"), 0)
            self.assertEqual(post(member, "/test/leak")[0], 200)
            with client(made) as each:  # prompts without a full page are not cached: their pages are freed
                each.generate(make_request(filler(9, ord(member.role[0])), max_tokens=2))
            began = time.monotonic()
            until(f"the alarm of {member}", lambda: Metrics(member).sum("baton_ledger_imbalance") == 1, 1 + SLACK_S)
            until(f"{member} is not ready", lambda: readyz(member)[0] == 503, 1 + SLACK_S)
            took = time.monotonic() - began
            self.assertIn("ledger imbalance", readyz(member)[1])
            self.assertEqual(Metrics(member).sum("baton_ledger_imbalance", what=what[member.role]), 1)
            self.assertEqual(Metrics(member).sum("baton_ready", reason="ledger"), 0)
            until("its log says so", lambda: "ERROR" in member.tail(50) and "ledger imbalance" in member.tail(50), 1)
            print(f"{member.role}: a leak was seen after {took:.3f} s")
        with client(made) as each:  # an alarm, not an outage
            self.assertTrue(each.generate(golden_request(0, max_tokens=4)).ids)


class Canaries(Case):
    """F65: ready means that requests complete."""

    def count(self, member, **labels):
        return Metrics(member).sum("baton_canaries_total", **labels)

    def test_canaries_take_both_paths_and_are_in_no_clients_numbers(self):
        made = self.cluster(1, 2, arguments={"router": ["--canary", "10s"], "workers": ["--test-step-delay", "20ms"]})
        router = made.routers()[0]
        until("a canary through each path", lambda: all(self.count(router, legs=legs, outcome="ok") for legs in ("one", "two")), 15)
        until("each worker has seen one", lambda: all(Metrics(each).sum("baton_entries_terminal_total", outcome="ok")
                                                      for each in made.workers()), 15)
        seen = until("an operator sees what it is", lambda: [each for each in entries(router)["entries"]], 10, 0.005)
        self.assertEqual(seen[0]["label"], "baton-canary")
        metrics = Metrics(router)
        self.assertLess(metrics.sum("baton_canary_age_seconds", legs="any"), 5)
        for name in ("baton_tokens_total", "baton_placements_total", "baton_time_to_first_token_seconds_count",
                     "baton_inter_token_latency_seconds_count", "baton_queue_seconds_count", "baton_retries_total",
                     "baton_worker_busy_total", "baton_client_calls", "baton_canary_failures_total"):
            self.assertEqual(metrics.sum(name), 0, name)
        with client(made) as each:  # labels are clients': a canary is none of them
            abort = each.stub.Abort(api.AbortRequest(request_id="baton-canary"), timeout=5)
            self.assertEqual(abort.aborted, 0)
        at_rest(made, 5)
        self.assert_no_faults(made)

    def test_a_router_is_not_ready_while_nothing_completes_and_recovers_by_itself(self):
        made = self.cluster(1, 1, arguments={"router": ["--canary", "3s", "--timer-lease", "30s"],
                                             "workers": ["--timer-lease", "30s"]})
        router, decode = made.routers()[0], made.of("decode")[0]
        until("a canary is answered", lambda: self.count(router, outcome="ok"), 10)
        with stopped(decode):  # its session lives on: nothing but the canary can tell
            body = until("the router is not ready", lambda: readyz(router)[0] == 503 and readyz(router)[1], 3 + 3 + SLACK_S)
            self.assertIn("no request has completed for", body)
            self.assertIn("although 1 decode worker looks usable", body)
            metrics = Metrics(router)
            self.assertEqual(metrics.sum("baton_ready", reason="progress"), 0)
            self.assertGreater(metrics.sum("baton_canary_age_seconds", legs="any"), 3)
        until("it is ready again", lambda: readyz(router)[0] == 200, 5 + SLACK_S)
        self.assertGreater(Metrics(router).sum("baton_canary_failures_total"), 0)
        at_rest(made, 10)

    def test_a_worker_says_that_its_engine_is_stuck(self):
        made = self.cluster(0, 1, arguments={"router": ["--canary", "3s"],
                                             "workers": HOOKS + ["--stuck-after", "2s", "--engine-limit", "60s"]})
        router, decode = made.routers()[0], made.of("decode")[0]
        until("a canary is answered", lambda: self.count(router, outcome="ok"), 10)
        self.assertEqual(post(decode, "/test/thread?name=engine&do=hang")[0], 200)
        body = until("the worker is not ready", lambda: readyz(decode)[0] == 503 and readyz(decode)[1], 2 + 3 + SLACK_S)
        self.assertRegex(body, r"engine: a step has lasted for \d\.\d s; \d requests need it")
        self.assertEqual(http_get(decode.address("admin"), "/livez")[0], 200)
        body = until("the router is not ready", lambda: readyz(router)[0] == 503 and readyz(router)[1], 5 + SLACK_S)
        self.assertIn("no request has completed for", body)
        decode.signal(signal.SIGKILL)
        self.assertTrue(decode.wait(5))
        made.restart(decode)
        made.wait_ready([decode, router])

    def test_a_full_cluster_is_ready_for_every_router(self):
        made = self.cluster(0, 1, routers=2, arguments={
            "router": ["--canary", "3s"], "decode": ["--kv-tokens", "64", "--page-tokens", "16", "--test-step-delay", "50ms"]})
        busy, idle = made.routers()
        until("canaries", lambda: self.count(busy, outcome="ok") and self.count(idle, outcome="ok"), 10)
        ended = threading.Event()

        def fill():
            with client(made) as each:
                while not ended.is_set():
                    try:
                        each.generate(make_request(filler(30, 1), max_tokens=34, ignore_eos=True), 60)
                    except Exception as error:
                        if getattr(error, "code", lambda: None)() not in RETRYABLE:
                            raise
        thread = threading.Thread(target=fill)
        thread.start()
        try:
            until("the pool is full", lambda: self.count(idle, outcome="no_room") > 1, 15)
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                for member in (busy, idle):
                    self.assertEqual(readyz(member), (200, "ready\n"), member)
                time.sleep(0.05)
        finally:
            ended.set()
            thread.join(60)
        at_rest(made, 10)

    def test_without_canaries_there_is_no_trace_of_them(self):
        made = self.cluster(0, 1, arguments={"router": ["--canary", "0"]})
        router = made.routers()[0]
        warm(made)
        metrics = Metrics(router)
        self.assertFalse(metrics.has("baton_canaries_total") or metrics.has("baton_canary_age_seconds"))
        self.assertEqual(metrics.sum("baton_entries_created_total"), Metrics(made.workers()[0]).sum("baton_entries_created_total"))


if __name__ == "__main__":
    main()
