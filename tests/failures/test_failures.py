#!/usr/bin/python3
"""The catalogue of failures (README.md), the entries that whole clusters show: clients, workers and routers that leave, die,
stop and come back. What a test is named after is the entry that it shows."""
import concurrent.futures
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time

from played import DECODE, OUTCOME_FAILED, PREFILL, PlayedWorker, Wire, peer

from harness import (GOLDEN, HERE as INTEGRATION, RETRYABLE, Canary, Case, Client, Load, Metrics, answers, api, at_rest, client,
                     collect, entries, filler, golden_request, grpc, main, make_request, stopped, until, warm)

BOUND_S = 2.0  # mass abort: everything is free
KILLED_S = 3.0  # a peer was killed: seen in 1 s, then a retry; on two busy cores
ROOM_S = 1.5  # what a busy machine adds to a bound of the protocol
SHORT = ["--timer-beat", "250ms", "--timer-lease", "1500ms", "--timer-admit", "1s", "--timer-open", "1s", "--timer-stall", "1s"]
TWO_LEGS = ["--disaggregate-above", "0"]


def ended_badly(member):
    """Entries that ended in another way than well."""
    metrics = Metrics(member)
    return sum(metrics.sum("baton_entries_terminal_total", outcome=outcome) for outcome in ("failed", "aborted"))


class Clusters(Case):
    def references(self, requests):
        """The answers of a decode worker that does everything itself, with nobody else there."""
        alone = self.cluster(0, 1, arguments={"router": ["--disaggregate-above", "100000"]})
        warm(alone)
        with client(alone) as each:
            ids = [each.generate(request).ids for request in requests]
        alone.down()
        return ids

    def crowd(self, made, seed, streams, end="fin"):
        """A process of clients (tests/integration/crowd.py), all of whose calls are on their way."""
        process = subprocess.Popen([sys.executable, os.path.join(INTEGRATION, "crowd.py"), made.routers()[0].address("grpc"),
                                    str(seed), str(streams), end], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.assertEqual(process.stdout.readline(), b"started\n", "the crowd could not start")
        return process

    @staticmethod
    def count(member, state=None):
        return Metrics(member).sum("baton_entries", **({"state": state} if state else {}))

    @staticmethod
    def left(made, labels, programs=None):
        """Entries anywhere whose label is none of these, and programs that do not answer just now."""
        found = []
        for member in programs or made.routers() + made.workers():
            try:
                found += [(member.id, entry["state"]) for entry in entries(member)["entries"] if entry["label"] not in labels]
            except AssertionError as error:
                found.append((member.id, str(error)))
        return found

    def gone(self, made, labels, within, programs=None):
        until(lambda: f"gone: {self.left(made, labels, programs)[:8]}", lambda: not self.left(made, labels, programs), within)

    def all_of(self, each, requests, timeout=90):
        """All at once; the ids of each, in order. Any error fails."""
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            streams = [each.stream(request, timeout) for request in requests]
            return [answer.ids for answer in pool.map(collect, streams)]

    def capacity(self, made, count):
        """CAP: so many of the largest requests at once fill every pool, and all succeed."""
        with client(made) as each:
            requests = [make_request(filler(400, 7000 + index), max_tokens=100, ignore_eos=True) for index in range(count)]
            self.assertEqual({len(ids) for ids in self.all_of(each, requests)}, {100})
        at_rest(made)


class Aborts(Clusters):
    def test_F01_clients_killed_in_every_phase_leave_nothing_and_cost_nobody(self):
        made = self.cluster(1, 1, arguments={
            "router": TWO_LEGS,
            "prefill": ["--test-step-delay", "60ms", "--timer-step", "500ms", "--step-tokens", "128"],
            "decode": ["--test-step-delay", "15ms", "--kv-tokens", "12288"], "workers": ["--test-verify"]})
        warm(made)
        router, decode, prefill = made.routers()[0], made.of("decode")[0], made.of("prefill")[0]
        others = [make_request(filler(60, 900 + index), max_tokens=20, ignore_eos=True, request_id="stays") for index in range(4)]
        outcomes = []
        with client(made) as each:
            for turn, (member, state, at_least) in enumerate((
                    (router, "placing", 1), (prefill, "queued", 3), (prefill, "computing", 1), (decode, "receiving", 3),
                    (decode, "running", 5), (decode, "reserved", 1))):
                with self.subTest(phase=f"{state} at {member}"):
                    streams = [each.stream(request, 60) for request in others]
                    if state == "reserved":  # until the Open, which a prefill worker that stands still does not send
                        prefill.signal(signal.SIGSTOP)
                    crowd = self.crowd(made, turn, 40, ("fin", "rst")[turn % 2])
                    try:
                        until(f"{at_least} {state}", lambda member=member, state=state, at_least=at_least:
                              self.count(member, state) >= at_least, 8, 0.003)
                    finally:
                        crowd.kill()
                    try:
                        self.gone(made, ("stays",), BOUND_S, [each for each in (router, decode, prefill)
                                                              if state != "reserved" or each is not prefill])
                    finally:
                        prefill.signal(signal.SIGCONT)
                    outcomes.append([collect(stream).ids for stream in streams])
                    at_rest(made, BOUND_S)
            expected = [each.generate(request).ids for request in others]
        self.assertEqual(outcomes, [expected] * 6)
        self.capacity(made, 24)
        self.assert_alive(made)
        self.assert_no_faults(made)

    def test_F02_requests_that_wait_for_a_full_pool_are_gone_at_once_while_it_is_still_full(self):
        made = self.cluster(0, 1, arguments={"workers": ["--kv-tokens", "4096", "--test-step-delay", "40ms"]})
        warm(made)
        router, decode = made.routers()[0], made.of("decode")[0]
        with client(made) as each:
            long = [each.stream(make_request(filler(20, index), max_tokens=490, ignore_eos=True, request_id="long"))
                    for index in range(8)]
            for stream in long:
                next(stream)
            crowd = self.crowd(made, 1, 60)
            until("all wait", lambda: self.count(router) == 68, 5)
            self.assertEqual(self.count(decode, "running"), 8)
            crowd.kill()
            self.gone(made, ("long",), BOUND_S)
            self.assertEqual((self.count(router), self.count(decode, "running")), (8, 8), "the pool is full as before")
            for stream in long:
                next(stream)
                stream.cancel()
        at_rest(made)

    def test_F13_F62_closing_at_any_moment_of_the_hand_off_stops_the_work_within_a_step(self):
        made = self.cluster(1, 1, arguments={
            "router": TWO_LEGS, "prefill": ["--step-tokens", "64", "--max-running", "32", "--test-step-delay", "20ms"],
            "decode": ["--test-step-delay", "20ms"]})
        warm(made)
        decode, prefill = made.of("decode")[0], made.of("prefill")[0]

        def computed():
            return (Metrics(prefill).sum("baton_tokens_total", kind="prefilled"),
                    Metrics(decode).sum("baton_tokens_total", kind="generated"))
        with client(made) as each:
            for turn in range(36):
                stream = each.stream(make_request(filler(300, 50 + turn), max_tokens=200, ignore_eos=True))
                time.sleep(0.006 * turn)
                if turn % 3:
                    stream.cancel()
                    continue
                before = computed()
                stream.cancel()
                at_rest(made, BOUND_S)
                after = computed()
                # One step that ran, and one that began between our look and the cancel's arrival.
                self.assertLessEqual(after[0] - before[0], 3 * 64, f"the prompt was computed for nobody, turn {turn}")
                self.assertLessEqual(after[1] - before[1], 8, f"tokens were generated for nobody, turn {turn}")
        at_rest(made, BOUND_S)
        self.assertEqual(Metrics(prefill).sum("baton_reaped_total") + Metrics(decode).sum("baton_reaped_total"), 0)

    def test_F14_thousands_of_aborts_meet_their_completions_and_no_process_ends(self):
        made = self.cluster(1, 1, arguments={"router": TWO_LEGS, "workers": ["--test-verify"]})
        warm(made)
        kinds = set()

        def some(seed):
            draw = random.Random(seed)
            with client(made) as each:
                for index in range(250):
                    request = make_request(filler(draw.randrange(2, 40), draw.randrange(50)), ignore_eos=True,
                                           max_tokens=draw.randrange(1, 5), request_id=f"f14-{seed}")
                    stream = each.stream(request, 30)
                    kind = draw.randrange(4)
                    try:
                        if kind == 0:
                            time.sleep(draw.random() * 0.02)
                            stream.cancel()
                        elif kind == 1:
                            next(stream)
                            stream.cancel()
                        elif kind == 2:
                            each.stub.Abort(api.AbortRequest(request_id=f"f14-{seed}"), timeout=10)
                            kinds.add(collect(stream).finish)
                        else:
                            kinds.add(collect(stream).finish)
                    except grpc.RpcError as error:
                        kinds.add(error.code().name)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(some, range(8)))
        self.assertLessEqual(kinds, {"abort", "length", "CANCELLED"})
        self.assertLessEqual({"abort", "length"}, kinds, "all aborts came too early, or all too late")
        self.assert_alive(made)
        at_rest(made)
        self.assert_no_faults(made)

    def test_F16_an_abort_through_another_router_ends_the_request(self):
        made = self.cluster(0, 1, routers=3, arguments={"workers": ["--test-step-delay", "20ms"]})
        warm(made)
        with client(made) as first, client(made, 1) as second:
            until("the second router serves", lambda: answers(second, golden_request(0, max_tokens=2)), 10)
            for turn, labels in enumerate(({"session_id": "agent"}, {"request_id": "one"})):
                mine = [first.stream(make_request(filler(20, index), max_tokens=480, ignore_eos=True, **labels))
                        for index in range(6)]
                other = first.stream(make_request(filler(20, 9), max_tokens=480, ignore_eos=True, request_id="other"))
                for stream in mine + [other]:
                    next(stream)
                # It answers what it ended itself, and tells the others.
                self.assertEqual(second.stub.Abort(api.AbortRequest(**labels), timeout=5).aborted, 0)
                began = time.monotonic()
                for stream in mine:
                    self.assertEqual([reply.finish_reason for reply in stream][-1], "abort")
                self.assertLess(time.monotonic() - began, BOUND_S + ROOM_S, f"turn {turn}")
                next(other)
                other.cancel()
                at_rest(made)

    def test_F07_F53_long_answers_in_a_small_pool_all_finish_and_those_who_leave_free_their_part(self):
        made = self.cluster(1, 1, arguments={"router": TWO_LEGS, "prefill": ["--kv-tokens", "512"],
                                             "decode": ["--kv-tokens", "1536", "--reserve-tokens", "0"]})
        warm(made)
        requests = [make_request(filler(40, index), max_tokens=300, ignore_eos=True) for index in range(24)]
        with client(made) as each:
            crowd = self.crowd(made, 5, 30)
            streams = [each.stream(request, 120) for request in requests]
            time.sleep(0.5)
            crowd.kill()
            with concurrent.futures.ThreadPoolExecutor(24) as pool:
                ids = [answer.ids for answer in pool.map(collect, streams)]
            self.assertEqual({len(each) for each in ids}, {300})
            self.assertEqual(each.generate(requests[3]).ids, ids[3])
        self.assertGreater(Metrics(made.of("decode")[0]).sum("baton_retractions_total"), 0)
        at_rest(made)
        self.assert_no_faults(made)


class Identity(Clusters):
    def test_F34_a_thousand_equal_requests_without_any_id_are_a_thousand_requests(self):
        made = self.cluster(2, 2, arguments={"router": TWO_LEGS})
        warm(made)
        wanted = GOLDEN[0]["greedy_ids"][:6]
        before = Metrics(made.routers()[0]).sum("baton_entries_created_total")
        request = golden_request(0, max_tokens=6)
        clients = [client(made) for _ in range(4)]
        try:
            streams = [clients[index % 4].stream(request, 120) for index in range(1000)]
            for stream in streams:
                self.assertEqual(collect(stream).ids, wanted)
        finally:
            for each in clients:
                each.close()
        at_rest(made)
        self.assertEqual(Metrics(made.routers()[0]).sum("baton_entries_created_total") - before, 1000)
        self.assert_no_faults(made)

    def in_mid_transfer(self, made, each, request, label):
        """Starts a request and waits until one prefill worker has sent a part of it. Returns the stream and that worker."""
        stream = each.stream(request, 60)

        def sending():
            return [member for member in made.of("prefill") if member.alive() and any(
                entry["label"] == label and entry["state"] == "computing" for entry in entries(member)["entries"])]
        return stream, until("a transfer", sending, 5, 0.003)[0]

    def test_F30_F35_F58_a_transfer_that_dies_is_told_retried_apart_and_poisons_no_cache(self):
        requests = [make_request(filler(380, seed), max_tokens=10, ignore_eos=True, request_id="victim") for seed in (1, 2)]
        cousins = [make_request(filler(380, seed)[:370] + filler(20, 70 + seed)[1:], max_tokens=10, ignore_eos=True)
                   for seed in (1, 2)]
        expected = self.references(requests + cousins)
        made = self.cluster(2, 1, arguments={
            "router": TWO_LEGS + SHORT, "decode": SHORT,
            "prefill": ["--step-tokens", "64", "--max-running", "32", "--test-step-delay", "60ms", *SHORT]})
        warm(made)
        decode = made.of("decode")[0]
        with client(made) as each, client(made) as other:
            for turn, how in enumerate(("killed", "stopped")):
                with self.subTest(how=how):
                    before = ended_badly(decode)
                    stream, victim = self.in_mid_transfer(made, each, requests[turn], "victim")
                    victim.signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                    try:
                        # By its own session's end, or by the router, whichever notices first.
                        until("the decode worker is told", lambda before=before: ended_badly(decode) > before,
                              (0 if how == "killed" else 2) + 1 + ROOM_S)
                        # The same decode worker, another attempt; and somebody else with the same prefix meanwhile.
                        cousin = other.generate(cousins[turn])
                        answer = collect(stream)
                        self.assertEqual((answer.ids, cousin.ids), (expected[turn], expected[2 + turn]))
                        self.assertGreater(answer.trace.attempts, 1)
                    finally:
                        victim.signal(signal.SIGCONT)  # what it still has to say is of an attempt that is over
                    self.assertEqual(each.generate(requests[turn]).ids, expected[turn])
                    self.assertEqual(other.generate(cousins[turn]).ids, expected[2 + turn])
                    if how == "killed":
                        made.restart(victim)
                    until(f"{victim} is ready", lambda victim=victim: victim.ready()[0], 10)
        self.assert_alive(made)
        at_rest(made, 5)
        self.assert_no_faults(made)

    def test_F37_F70_a_worker_that_is_replaced_at_its_address_is_used_at_once_and_its_past_is_gone(self):
        made = self.cluster(1, 1, arguments={"router": TWO_LEGS})
        warm(made)
        decode, prefill = made.of("decode")[0], made.of("prefill")[0]
        with client(made) as each:
            for turn in range(4):
                victim = (prefill, decode)[turn % 2]
                before = {entry["incarnation"] for entry in entries(decode)["sessions"]} if victim is prefill else set()
                self.assertTrue(victim is decode or before)
                victim.kill()
                if victim is prefill:  # what the decode worker had of it is gone, long before its lease
                    until("the dead one's session is over", lambda: Metrics(decode).sum("baton_sessions", peer_role="prefill") == 0,
                          1 + ROOM_S)
                else:
                    until("the link to the dead one is closed",
                          lambda: Metrics(prefill).sum("baton_link_operations", kind="peers") == 0, 1 + ROOM_S)
                made.restart(victim)
                made.wait_ready([victim], 10)
                answer = until("answered with the new one", lambda turn=turn: self.two_legs(each, turn), 2 + ROOM_S)
                self.assertEqual(answer.ids, GOLDEN[turn]["greedy_ids"][:8])
        at_rest(made)
        self.assert_no_faults(made)

    @staticmethod
    def two_legs(each, turn):
        answer = answers(each, golden_request(turn, max_tokens=8))
        return answer if answer is not None and answer.trace.prefill_worker else None

    def test_F40_F77_all_three_programs_name_a_request_alike(self):
        made = self.cluster(2, 2, arguments={"router": TWO_LEGS, "prefill": [
            "--test-step-delay", "150ms", "--timer-step", "900ms", "--timer-backlog", "60s"]})
        warm(made)
        with client(made) as each:
            streams = [each.stream(make_request(filler(60, index), max_tokens=4, request_id=f"named-{index}")) for index in range(4)]

            def named():
                found = {}
                for member in made.workers():
                    for entry in entries(member)["entries"]:
                        if entry["label"].startswith("named-"):
                            found.setdefault(entry["label"], []).append((member.role, entry["router"], entry["attempt"]))
                return found if len(found) == 4 and all(len(places) == 2 for places in found.values()) else None
            for label, places in until("each is at two workers", named, 5, 0.01).items():
                self.assertEqual({role for role, _, _ in places}, {"prefill", "decode"}, label)
                self.assertEqual(len({(router, attempt) for _, router, attempt in places}), 1, f"{label}: {places}")
            for stream in streams:
                collect(stream)
        at_rest(made)


class Pressure(Clusters):
    def test_F48_F65_a_burst_of_eight_times_the_capacity_fails_nobody_and_everybody_stays_ready(self):
        made = self.cluster(1, 1, arguments={"router": TWO_LEGS, "workers": ["--kv-tokens", "2048"]})
        warm(made)
        requests = [make_request(filler(100, index % 16), max_tokens=28, ignore_eos=True) for index in range(128)]
        unready, stopping = [], threading.Event()

        def watch():
            while not stopping.wait(0.05):
                unready.extend(f"{each}: {each.ready()[1]}" for each in made.routers() + made.workers() if not each.ready()[0])
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with client(made) as each:
                ids = self.all_of(each, requests)
                expected = [each.generate(request).ids for request in requests[:16]]
        finally:
            stopping.set()
            watcher.join()
        self.assertEqual(ids, expected * 8)
        self.assertEqual(unready, [], "busy is not broken")
        at_rest(made)
        self.assert_no_faults(made)

    def test_F50_pools_of_one_request_go_on_one_request_at_a_time(self):
        made = self.cluster(2, 2, arguments={"router": TWO_LEGS, "workers": ["--kv-tokens", "64"]})
        warm(made)
        requests = [make_request(filler(50, index), max_tokens=12, ignore_eos=True) for index in range(50)]
        ended = []
        with client(made) as each, concurrent.futures.ThreadPoolExecutor(50) as pool:
            def one(request):
                ids = each.generate(request, 90).ids
                ended.append(time.monotonic())
                return ids
            ids = list(pool.map(one, requests))
            self.assertEqual([each.generate(request).ids for request in requests[:5]], ids[:5])
        self.assertEqual({len(each) for each in ids}, {12})
        longest = max(after - before for before, after in zip(sorted(ended), sorted(ended)[1:]))
        self.assertLess(longest, 3 + ROOM_S, "all stood still for longer than the longest of the timers that a hand-off has")
        at_rest(made)
        self.assert_no_faults(made)

    def test_F51_what_can_never_fit_is_refused_at_once(self):
        made = self.cluster(1, 1, arguments={"router": TWO_LEGS, "decode": ["--kv-tokens", "128"]})
        warm(made)
        with client(made) as each, Canary(made) as canary:
            for prompt, max_tokens in ((filler(300), 4), (filler(20), 300), (filler(129), 1)):
                began = time.monotonic()
                code, sentence = each.refused(make_request(prompt, max_tokens=max_tokens))
                self.assertIn(code, (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED), sentence)
                self.assertGreater(len(sentence), 20)
                self.assertLess(time.monotonic() - began, 1 + ROOM_S, "it was tried again and again")
            canary.answers_again(5)
        at_rest(made)

    def test_F51_a_prompt_that_fits_no_prefill_worker_is_read_by_the_decode_worker_or_refused_at_once(self):
        made = self.cluster(1, 1, arguments={"router": TWO_LEGS, "prefill": ["--kv-tokens", "64"]})
        warm(made)
        with client(made) as each, Canary(made) as canary:
            began = time.monotonic()
            try:
                self.assertEqual(len(each.ask(filler(300), timeout=20, max_tokens=4, ignore_eos=True).ids), 4)
            except grpc.RpcError as error:
                self.assertIn(error.code(), (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE,
                                             grpc.StatusCode.INVALID_ARGUMENT))
            self.assertLess(time.monotonic() - began, 1 + ROOM_S)
            canary.answers_again(5)
        at_rest(made)

    def test_F54_one_of_three_prefill_workers_stands_still_and_the_others_serve(self):
        made = self.cluster(3, 1, arguments={"router": TWO_LEGS + SHORT, "workers": SHORT})
        warm(made)
        with Load(made, 6, tokens=10) as load:
            with stopped(made.of("prefill")[0]):
                counts = []
                for _ in range(6):  # far beyond its lease
                    time.sleep(0.7)
                    counts.append(load.answered)
            load.answers_again(5)
        print(f"a prefill worker of three stopped: {load.told()}; answered each 0.7 s {counts}")
        self.assertEqual(load.errors, [])
        # What met it waits for T_open, 1 s, once.
        self.assertLess(max(each.longest for each in load.canaries), 1 + ROOM_S)
        self.assertTrue(all(after > before for before, after in zip(counts[2:], counts[3:])), counts)
        at_rest(made, 8)
        self.assert_no_faults(made)

    def test_F56_a_decode_worker_that_stops_in_mid_transfer_holds_nothing_of_its_prefill_worker(self):
        made = self.cluster(1, 2, arguments={
            "router": TWO_LEGS + SHORT, "decode": SHORT,
            "prefill": ["--step-tokens", "64", "--max-running", "32", "--test-step-delay", "30ms", *SHORT]})
        warm(made)
        prefill, victim = made.of("prefill")[0], made.of("decode")[0]
        with client(made) as each, Canary(made, tolerates=RETRYABLE) as canary:
            streams = [each.stream(make_request(filler(380, index), max_tokens=8, ignore_eos=True, request_id="f56"), 60)
                       for index in range(6)]
            until("a transfer to it runs", lambda: self.count(victim, "receiving") > 0, 5, 0.003)
            with stopped(victim):
                until("the prefill worker has let go of it", lambda: not any(
                    part["peer"] == victim.id for entry in entries(prefill)["entries"] for part in entry["peers"]), 1.5 + 1 + ROOM_S)
                answered = canary.answered
                until("its other transfers go on", lambda: canary.answered > answered + 2, 3)
                self.assertEqual({len(collect(stream).ids) for stream in streams}, {8})
        at_rest(made, 5)
        self.assert_no_faults(made)

    def test_F60_a_control_port_that_is_a_black_hole_stops_no_decode(self):
        made = self.cluster(1, 1, arguments={"router": TWO_LEGS + SHORT, "workers": SHORT,
                                             "decode": ["--test-step-delay", "20ms"]})
        far = made.start_program("prefill", "far", arguments=["--advertise", "127.0.0.3"])
        wire = Wire("127.0.0.3", far.ports["grpc"])
        self.addCleanup(wire.close)
        made.wait_ready([far])
        warm(made)
        until("the far one is used", lambda: Metrics(far).sum("baton_entries_created_total") > 0 or
              warm(made, 2), 10)
        gaps, ids = [], []

        def follow(stream):
            last = time.monotonic()
            for reply in stream:
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
                ids.extend(reply.token_ids)
        with client(made) as each:
            stream = each.stream(make_request(filler(20), max_tokens=160, ignore_eos=True))
            ids.extend(next(stream).token_ids)
            follower = threading.Thread(target=follow, args=(stream,))
            follower.start()
            wire.swallows.update({"to": True, "from": True})
            while follower.is_alive():
                self.assertEqual(len(each.ask(filler(40, len(gaps)), max_tokens=2, ignore_eos=True, timeout=20).ids), 2)
            follower.join()
        self.assertGreater(wire.swallowed, 0)
        self.assertEqual(len(ids), 160)  # the last reply may have none
        self.assertLess(max(gaps), 0.5, "a running decode waited for somebody else's port")
        wire.close()
        far.kill()
        made.forget(far)
        at_rest(made, 5)


class Legs(Clusters):
    def test_F61_a_prefill_leg_that_fails_at_once_leaves_no_decode_leg(self):
        made = self.cluster(0, 1, arguments={"router": TWO_LEGS})
        warm(made)
        decode = made.of("decode")[0]
        bad = PlayedWorker(PREFILL, {"prefill": lambda session, message: session.send(
            prefill_end=peer.PrefillEnd(attempt=message.attempt, outcome=OUTCOME_FAILED, cause=22))}, id="bad")
        self.addCleanup(bad.close)
        bad.register(made, decode)
        with client(made) as each:
            until("the router knows it", lambda: bad.sessions and bad.sessions[0].hello, 5)
            until("it is asked", lambda: (answers(each, make_request(filler(40), max_tokens=4, ignore_eos=True)) or True) and
                  bad.sessions[0].has("prefill"), 5)
            began = time.monotonic()
            answers(each, make_request(filler(50), max_tokens=4, ignore_eos=True))  # by the decode worker alone, or an error
            self.assertLess(time.monotonic() - began, 2 + ROOM_S)
            at_rest(made, 1)

    def test_F61_a_decode_leg_that_fails_at_once_leaves_no_prefill_leg(self):
        made = self.cluster(1, 0, arguments={"router": TWO_LEGS, "prefill": ["--test-step-delay", "200ms", "--timer-step", "600ms"]})
        prefill = made.of("prefill")[0]
        routers = []
        slots = iter(range(1, 1000))
        attempts = {}

        def admit(session, message):
            slot = next(slots) << 32
            attempts[slot] = (session, message.attempt)
            session.send(admitted=peer.Admitted(attempt=message.attempt, slot=slot, key=5))

        def opened(session, message):
            # The prefill worker hears nothing from us: only the router can tell it.
            router, attempt = attempts[message.slot]
            routers.append(attempt)
            router.send(end=peer.End(attempt=attempt, outcome=OUTCOME_FAILED, cause=22, finish=4))
        bad = PlayedWorker(DECODE, {"admit": admit, "open": opened}, id="bad")
        self.addCleanup(bad.close)
        # A real one first, for the tokenizer; then only the bad one.
        good = made.start_program("decode")
        made.wait_ready([good])
        warm(made)
        bad.register(made, good)
        good.signal(signal.SIGTERM)
        self.assertTrue(good.wait(10))
        made.forget(good)
        with client(made) as each:
            until("the router knows it", lambda: bad.sessions and bad.sessions[0].hello, 5)
            self.assertIsNone(until("an answer", lambda: [answers(each, make_request(filler(200), max_tokens=4))], 1)[0])
            self.assertTrue(routers, "the hand-off never began")
            at_rest(made, 1 + ROOM_S, [prefill] + made.routers())

    def test_F64_a_lost_way_back_means_one_attempt_after_the_other_never_two(self):
        made = self.cluster(0, 1, arguments={"router": SHORT, "decode": ["--test-step-delay", "10ms", *SHORT]})
        far = made.start_program("decode", "far", arguments=["--advertise", "127.0.0.4"])
        wire = Wire("127.0.0.4", far.ports["grpc"])
        self.addCleanup(wire.close)
        made.wait_ready([far])
        warm(made)
        near = made.of("decode")[0]
        request = make_request(filler(30), max_tokens=260, ignore_eos=True, request_id="once")
        with client(made) as each:
            expected = each.generate(request).ids

            salts = itertools.count()

            def at_far():
                request.cache_salt = str(next(salts))  # else it goes where its prompt is cached
                stream = each.stream(request, 60)
                first = next(stream)
                if self.count(far, "running") == 1:
                    return stream, first
                stream.cancel()
                return None
            stream, first = until("it runs at the far one", at_far, 10)
            wire.swallows["from"] = True
            both, began, seen = 0.0, time.monotonic(), []
            result = []
            reader = threading.Thread(target=lambda: result.append(collect(stream, first)))
            reader.start()
            while reader.is_alive():
                counts = (self.count(near, "running"), self.count(far, "running"))
                now = time.monotonic()
                both += now - began if all(counts) else 0.0
                began = now
                seen.append(counts)
                time.sleep(0.02)
            reader.join()
        self.assertEqual(result[0].ids, expected)
        self.assertGreater(result[0].trace.attempts, 1)
        self.assertTrue(any(counts[0] for counts in seen), "the near one never took over")
        self.assertLess(both, 1.5, "two attempts computed tokens side by side, for longer than a lease")
        wire.swallows["from"] = False
        at_rest(made, 5)

    def test_F65_ready_means_progressing_in_both_directions(self):
        made = self.cluster(1, 1, arguments={"router": SHORT, "workers": SHORT})
        warm(made)
        router, decode = made.routers()[0], made.of("decode")[0]
        pids = [each.pid for each in made.members]
        with stopped(decode):
            until("the router says that it cannot serve", lambda: not router.ready()[0], 1.5 + 1 + ROOM_S)
            self.assertIn("decode", router.ready()[1])
        until("it serves again", lambda: router.ready()[0], 10)
        with client(made) as each:
            self.assertEqual(until("an answer", lambda: answers(each, golden_request(0)), 5).ids, GOLDEN[0]["greedy_ids"])
        self.assertEqual([each.pid for each in made.members], pids, "nobody was restarted")

    def test_F69_a_rolling_restart_under_load_fails_no_client(self):
        made = self.cluster(2, 2, arguments={"router": TWO_LEGS, "workers": ["--test-step-delay", "2ms"]})
        warm(made)
        with Load(made, 6, tokens=30) as load:
            for member in made.workers():
                member.signal(signal.SIGTERM)
                self.assertTrue(member.wait(15), f"{member} does not end")
                self.assertEqual(member.code, 0, member.tail())
                made.restart(member)
                made.wait_ready([member], 10)
                until(f"{member} is used again", lambda member=member: Metrics(member).sum("baton_entries_created_total") > 0, 5)
            load.answers_again(KILLED_S)
        print(f"rolling restart: {load.told()}")
        self.assertEqual(load.errors, [])
        at_rest(made)
        self.assert_no_faults(made)

    def test_F72_a_step_that_lasts_longer_than_the_lease_ends_no_session(self):
        made = self.cluster(1, 1, arguments={"router": TWO_LEGS + SHORT, "prefill": SHORT,
                                             "decode": ["--test-step-delay", "2500ms", *SHORT]})
        ended = sum(Metrics(each).sum("baton_session_ends_total") for each in made.routers() + made.workers())
        with client(made) as each:
            answer = until("an answer", lambda: answers(each, golden_request(0, max_tokens=2), 60), 30)
        self.assertEqual(answer.ids, GOLDEN[0]["greedy_ids"][:2])
        self.assertEqual(answer.trace.attempts, 1)
        self.assertEqual(sum(Metrics(each).sum("baton_session_ends_total") for each in made.routers() + made.workers()), ended)
        self.assert_no_faults(made)

    def test_F75_what_clients_have_no_business_to_say_is_not_heard(self):
        made = self.cluster(1, 1, arguments={"router": TWO_LEGS})
        warm(made)
        with Client(made.routers()[0].address("grpc")) as each:
            plain = golden_request(0, max_tokens=8).SerializeToString()
            # Fields that the API does not have, with the names and numbers of internal messages: slot, key, address, attempt.
            inner = peer.Prefill(attempt=1, slot=1 << 32, key=5, decode=99, address=b"2.2.2.2:1", deadline_ms=1)
            inner_bytes = inner.SerializeToString()
            for number in (10, 15, 100, 536870911):
                tag = (number << 3 | 2)
                extra = bytearray()
                for value in (tag, len(inner_bytes)):
                    while value > 127:
                        extra.append(value & 127 | 128)
                        value >>= 7
                    extra.append(value)
                call = each.channel.unary_stream("/baton.v1.Inference/Generate", request_serializer=lambda data: data,
                                                 response_deserializer=api.GenerateReply.FromString)
                stream = call(plain + bytes(extra) + inner_bytes, timeout=20, metadata=(
                    ("baton-forwarded", "1"), ("baton-slot", "1"), ("bootstrap-room", "7"), ("grpc-previous-rpc-attempts", "3")))
                self.assertEqual(collect(stream).ids, GOLDEN[0]["greedy_ids"][:8])
            for label in ("0000000100000000", "router-1", "decode-1", "../../etcd", "%s%n", "\u2028"):
                answer = each.generate(golden_request(1, max_tokens=4, request_id=label, session_id=label))
                self.assertEqual(answer.ids, GOLDEN[1]["greedy_ids"][:4])
                self.assertEqual(each.stub.Abort(api.AbortRequest(request_id=label), timeout=5).aborted, 0)
        at_rest(made)
        self.assert_alive(made)

    def test_F79_each_program_shows_each_state_and_how_old_its_oldest_is(self):
        made = self.cluster(1, 2, arguments={"router": TWO_LEGS, "decode": ["--test-step-delay", "30ms"]})
        warm(made)
        with client(made) as each:
            stream = each.stream(make_request(filler(30), max_tokens=300, ignore_eos=True))
            next(stream)
            until("an age of half a second at exactly one of two", lambda: sorted(
                Metrics(member).sum("baton_oldest_entry_age_seconds", state="running") > 0.5 for member in made.of("decode")) ==
                [False, True], 5)
            for member in made.of("decode"):
                self.assertEqual({labels["state"] for labels, _ in Metrics(member).rows("baton_oldest_entry_age_seconds")},
                                 {"reserved", "receiving", "running", "retracted", "leaving"})
            stream.cancel()
        at_rest(made)


if __name__ == "__main__":
    main()
