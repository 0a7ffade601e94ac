#!/usr/bin/python3
"""batonctl at a real cluster: cluster_test.py BATONCTL. What it says must be what was done to the cluster."""
import json
import os
import subprocess
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "integration"))
PROGRAM = sys.argv.pop(1)
from harness import (Case, Client, client, filler, grpc, http_get, inference_pb2_grpc, main, make_request,  # noqa: E402
                     stopped, until, warm)


class Batonctl(Case):
    def run_it(self, *arguments, codes=(0,)):
        done = subprocess.run([PROGRAM, *arguments, "--etcd", self.made.etcd_url(), "--cluster", self.made.name],
                              capture_output=True, text=True, timeout=60, check=False)
        self.assertIn(done.returncode, codes, done.stdout + done.stderr)
        return done.stdout

    def json(self, *arguments, codes=(0,)):
        return json.loads(self.run_it(*arguments, "--json", codes=codes))

    def waiting(self, label, codes=(0,)):
        """What entries says of one request, once it is as `check` wants it."""
        rows = [each for each in self.json("entries", codes=codes)["entries"] if each["label"] == label]
        return rows[0] if rows else None

    def start(self, label, tokens):
        """A request in a thread of its own; the list gets its answer or its error."""
        outcome = []

        def ask():
            with client(self.made) as each:
                try:
                    outcome.append(each.generate(make_request(filler(380, tokens), max_tokens=tokens, ignore_eos=True,
                                                              request_id=label), 60))
                except Exception as error:  # the test looks at it
                    outcome.append(error)
        thread = threading.Thread(target=ask)
        thread.start()
        self.addCleanup(thread.join, 60)
        return thread, outcome

    def test_it_names_who_is_waited_for_and_who_does_not_answer(self):
        self.made = self.cluster(1, 1, arguments={
            "router": ["--disaggregate-above", "0"],
            "prefill": ["--test-step-delay", "1s", "--timer-step", "3s", "--step-tokens", "128"],
            "decode": ["--test-step-delay", "40ms", "--timer-step", "1s"]})
        prefill = self.made.of("prefill")[0]
        ids = {each.role: each.id for each in self.made.routers() + self.made.workers()}
        with Client(self.made.routers()[0].address("grpc")) as each:
            until("an answer", lambda: each.ask("Once", max_tokens=2), 20)
        self.assertIn("all is well", self.run_it("status"))
        self.assertTrue(self.json("status")["well"])

        thread, outcome = self.start("slow-prefill", 40)
        row = until("its prefill computes", lambda: self.on(self.waiting("slow-prefill"), "prefill", "computing"), 10)
        self.assertEqual((row["waiting"]["kind"], row["waiting"]["who"]), ("at", ids["prefill"]))
        self.assertEqual((row["router"]["state"], row["decode"]["state"]), ("prefilling", "receiving"))
        shown = self.run_it("why", "slow-prefill")
        self.assertRegex(shown, rf"waits for {ids['prefill']}: its (engine step|turn in a step)")
        self.assertRegex(shown, rf"{ids['decode']} +receiving .*KV from the prefill worker")
        self.assertEqual(self.run_it("why", row["decode"]["id"]).splitlines()[0].split(" is live")[0], "request slow-prefill")
        row = until("it generates", lambda: self.on(self.waiting("slow-prefill"), "decode", "running"), 20)
        self.assertEqual(row["waiting"]["who"], ids["decode"])
        thread.join(60)
        self.assertEqual(len(outcome[0].ids), 40, outcome)
        until("it is remembered as over", lambda: "is over: ok" in self.run_it("why", "slow-prefill"), 3)

        thread, outcome = self.start("stopped-prefill", 30)
        until("its prefill computes", lambda: self.on(self.waiting("stopped-prefill"), "prefill", "computing"), 10)
        with stopped(prefill):
            told = self.json("status", codes=(3,))
            self.assertEqual([each["id"] for each in told["programs"] if not each["answers"]], [ids["prefill"]])
            self.assertIn("connected, but no reply within", told["not_answering"][0]["why"])
            row = self.waiting("stopped-prefill", codes=(3,))
            self.assertEqual((row["waiting"]["kind"], row["waiting"]["who"]), ("not_answering", ids["prefill"]), row)
            self.assertIn(f"! {ids['prefill']} (prefill, {prefill.address('admin')}) does not answer",
                          self.run_it("entries", codes=(3,)))
            thread.join(60)
        self.assertEqual(len(outcome), 1)
        until("everybody answers again", lambda: not self.json("entries", codes=(0, 3))["not_answering"], 10)
        shown = self.run_it("why", "stopped-prefill")
        self.assertRegex(shown, r"session_silent: nothing was heard from a peer")
        self.assertIn("request stopped-prefill is over", shown)  # for its client, though a worker may still let go of a part

    @staticmethod
    def on(row, role, state):
        return row if row and row[role] and row[role]["state"] == state else None

    def test_a_drained_program_leaves_and_the_rest_are_asked_to_by_role(self):
        self.made = self.cluster(1, 2, arguments={"decode": ["--test-step-delay", "20ms"]})
        warm(self.made)
        victim = self.made.of("decode")[1]
        thread, outcome = self.start("in-flight", 100)
        until("it runs", lambda: self.waiting("in-flight"), 10)
        self.assertIn(f"{victim.id} has left", self.run_it("drain", victim.id, "--grace", "20", "--wait"))
        until("its process is gone", lambda: not victim.alive(), 5)
        self.assertEqual(victim.code, 0)
        thread.join(60)
        self.assertEqual(len(outcome[0].ids), 100, outcome)
        self.assertEqual({each["id"] for each in self.json("status")["programs"]},
                         {each.id for each in self.made.routers() + self.made.workers() if each is not victim})
        told = self.json("drain", "decode", "--grace", "0", "--wait")
        self.assertEqual([(each["id"], each["gone"]) for each in told["programs"]], [(self.made.of("decode")[0].id, True)])
        self.assertIn("there is no decode worker", self.run_it("status", codes=(3,)))

    def test_it_names_a_client_that_does_not_read(self):
        self.made = self.cluster(0, 1)
        warm(self.made)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]
        with grpc.insecure_channel(self.made.routers()[0].address("grpc"), options=options) as channel:
            request = make_request("Once", max_tokens=400, ignore_eos=True, request_id="not-reading")
            stream = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)
            next(stream)
            row = until("its answer is not taken", lambda: self.on(self.waiting("not-reading"), "router", "answering"), 15)
            self.assertEqual(row["waiting"]["kind"], "client")
            self.assertRegex(self.run_it("entries"), r"the client to take its answer \(router-1\)")
            shown = self.run_it("why", "not-reading")
            self.assertIn("waits for the client to take its answer (router-1)", shown)
            self.assertIn("the client does not take its answer (--timer-leave)", shown)
            stream.cancel()
        until("it is over", lambda: "is over" in self.run_it("why", "not-reading"), 5)

    def test_it_tells_canaries_from_clients_and_a_router_that_is_stuck(self):
        self.made = self.cluster(0, 1, arguments={"router": ["--canary", "3s", "--timer-lease", "30s"],
                                                  "decode": ["--test-step-delay", "60ms", "--timer-lease", "30s"]})
        decode = self.made.of("decode")[0]

        def age():
            ages = [each["canary_age_ms"] for each in self.json("status", codes=(0, 3))["programs"] if each["role"] == "router"]
            return ages[0]["any"]
        until("a canary is answered", lambda: 0 < age() < 2500, 10)
        told = self.json("top", "--once", "--every", "2s")
        self.assertEqual((told["ok_per_s"], told["failed_per_s"], told["generated_tokens_per_s"]), (0, 0, 0))
        until("an entry is shown as what it is", lambda: self.waiting("baton-canary"), 10)
        with stopped(decode):
            until("the router is stuck", lambda: "no request has completed for" in self.run_it("status", codes=(0, 3)), 10)
            shown = self.run_it("status", codes=(3,))
            self.assertRegex(shown, r"! router-1 is not ready: no request has completed for \d+\.\d s although 1 decode worker looks")
            self.assertRegex(shown, rf"{decode.id} \(decode, \S+\) does not answer")
        until("it recovers", lambda: "all is well" in self.run_it("status", codes=(0, 3)), 10)

    def test_it_names_who_holds_a_leak(self):
        self.made = self.cluster(0, 1, arguments={"decode": ["--test-hooks"]})
        decode = self.made.of("decode")[0]
        self.assertEqual(http_get(decode.address("admin"), "/test/leak", method="POST")[0], 200)
        warm(self.made)
        shown = until("the leak is said", lambda: "lost" in self.run_it("status", codes=(0, 3)) and
                      self.run_it("status", codes=(3,)), 5)
        self.assertIn(f"! {decode.id} is not ready: ledger imbalance: entries 0, pages 1, words 0", shown)
        self.assertIn(f"! {decode.id}: 1 pages are neither free, cached nor owned", shown)

    def test_a_live_table_of_a_loaded_cluster(self):
        self.made = self.cluster(1, 1, arguments={"workers": ["--test-step-delay", "5ms"]})
        warm(self.made)
        thread, _ = self.start("load", 120)
        told = self.json("top", "--once", "--every", "300ms")
        self.assertGreater(told["generated_tokens_per_s"], 0)
        self.assertEqual({each["role"] for each in told["programs"]}, {"router", "prefill", "decode"})
        thread.join(60)


if __name__ == "__main__":
    main()
