#!/usr/bin/python3
"""The motivating incident: 80 streaming clients leave at once, again and again, and everything they held is free in time."""
import concurrent.futures
import os
import random
import signal
import subprocess
import sys
import time

from harness import (HERE, RETRYABLE, Canary, Case, at_rest, client, descriptors, entries, filler, grpc, main, make_request,
                     resident_kib, until, warm)

STREAMS = 80
ROUNDS = 20
WARM_ROUNDS = 5  # after these, memory and descriptors must not grow
BOUND_S = 2.0


class Leave(Case):
    def crowd(self, made, seed, end):
        """Starts the crowd, lets it run for a random time, kills it. Returns how many had their first token."""
        process = subprocess.Popen([sys.executable, os.path.join(HERE, "crowd.py"), made.routers()[0].address("grpc"),
                                    str(seed), str(STREAMS), end], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            line = process.stdout.readline()
            self.assertEqual(line, b"started\n", "the crowd could not start")
            time.sleep(1.5 * random.Random(seed).random() ** 3)  # mostly early: a fast machine has tokens after 0.1 s
            self.assertIsNone(process.poll(), "the crowd ended by itself")
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        lines = process.stdout.read().decode().splitlines()
        process.stdout.close()
        problems = [line for line in lines if line != "first" and not line.startswith(tuple(
            code.name for code in RETRYABLE))]
        self.assertEqual(problems, [])
        return lines.count("first")

    def gone(self, made, within):
        """Waits until only the canary's requests are left anywhere."""
        def left():
            return [(member.id, entry["state"], entry["label"]) for member in made.routers() + made.workers()
                    for entry in entries(member)["entries"] if entry["label"] != Canary.LABEL]
        began = time.monotonic()
        until(lambda: f"entries of dead clients gone: {left()[:8]}", lambda: not left(), within)
        return time.monotonic() - began

    def test_eighty_clients_are_killed_twenty_times(self):
        made = self.cluster(2, 2, arguments={
            "router": ["--disaggregate-above", "16"],
            # Slow steps and a small pool: requests are caught in every state, waiting for room included.
            "workers": ["--test-step-delay", "10ms", "--kv-tokens", "12288", "--test-verify"]})
        warm(made)
        at_rest(made, 10)
        times, firsts, before, beside = [], [], {}, 0
        with Canary(made, index=0) as canary:
            for round in range(ROUNDS):
                end = ("fin", "rst")[round % 2]
                is_paused = round % 4 < 2
                answered = canary.answered
                firsts.append(self.crowd(made, round, end))
                killed = time.monotonic()
                if is_paused:  # then even the canary's pages must be back
                    canary.pause(waits=False)
                    at_rest(made, BOUND_S)
                else:
                    self.gone(made, BOUND_S)
                times.append(time.monotonic() - killed)
                beside += canary.answered > answered
                canary.pause()
                at_rest(made, BOUND_S)
                canary.go_on()
                canary.answers_again(5)
                self.assert_alive(made)
                if round == WARM_ROUNDS - 1:
                    before = {each: (resident_kib(each), descriptors(each)) for each in made.routers() + made.workers()}
            canary.pause()
            at_rest(made, BOUND_S)
            after = {each: (resident_kib(each), descriptors(each)) for each in made.routers() + made.workers()}
        times.sort()
        print(f"until free: median {times[len(times) // 2]:.3f} s, p90 {times[int(len(times) * 0.9)]:.3f} s, "
              f"longest {times[-1]:.3f} s; streams of {STREAMS} with a first token: {firsts}")
        for member, (kib, fds) in before.items():
            print(f"{member}: {kib} -> {after[member][0]} KiB, {fds} -> {after[member][1]} descriptors")
        self.assertTrue(any(count < STREAMS // 2 for count in firsts) and any(count >= 10 for count in firsts),
                        f"the moments of death did not differ: {firsts}")
        # Some crowds are killed sooner than anybody answers.
        self.assertGreater(beside, ROUNDS // 2, "the canary was not answered while crowds were there")
        for member, (kib, fds) in before.items():
            # One heap growth of malloc is no leak; a request that stays costs more over fifteen crowds of eighty.
            self.assertLess(after[member][0], kib * 1.05 + 4096, f"{member} grows")
            self.assertLessEqual(after[member][1], fds + 2, f"{member} leaks descriptors")
        self.assert_no_faults(made)
        self.check_capacity(made)

    def check_capacity(self, made):
        """Nothing hidden is pinned: requests of the largest size fill both decode workers at once."""
        with client(made) as each, concurrent.futures.ThreadPoolExecutor(48) as pool:
            futures = [pool.submit(each.generate, make_request(filler(380, 5000 + index), max_tokens=100, ignore_eos=True),
                                   120) for index in range(48)]
            for future in futures:
                self.assertEqual(len(future.result().ids), 100)
        at_rest(made)

    def test_closing_one_stream_leaves_the_others(self):
        made = self.cluster(1, 1, arguments={"workers": ["--test-step-delay", "10ms"]})
        warm(made)
        with client(made) as each, Canary(made) as canary:
            for count in (0, 1, 5):
                stream = each.stream(make_request(filler(40, count), max_tokens=400, ignore_eos=True, request_id="leaver"))
                for _ in range(count):
                    next(stream)
                stream.cancel()
                self.gone(made, BOUND_S)
            canary.answers_again(5)
        at_rest(made)

    def test_a_deadline_of_the_client_ends_the_request_everywhere(self):
        made = self.cluster(1, 1, arguments={"workers": ["--test-step-delay", "10ms"]})
        warm(made)
        with client(made) as each:
            code, _ = each.refused(make_request(filler(40), max_tokens=400, ignore_eos=True), timeout=0.7)
        self.assertEqual(code, grpc.StatusCode.DEADLINE_EXCEEDED)
        at_rest(made)


if __name__ == "__main__":
    main()
