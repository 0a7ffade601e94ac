#!/usr/bin/python3
"""Programs are killed, stopped, replaced, and etcd goes away, all under load: the rest recover in time and no token is wrong."""
import os
import shutil
import signal
import subprocess
import threading
import time

from harness import (RETRYABLE, Canary, Case, Client, Load, Metrics, api, at_rest, client, collect, entries, filler, grpc,
                     main, make_request, stopped, until, warm)

KILLED_S = 3.0    # a peer was killed: seen in 1 s, then a retry; on two busy cores
STOPPED_S = 8.0   # a peer is silent: its lease, a step
REPLACED_S = 2.0  # from registration to first use


def wait_used(member, before, within):
    """Waits until a worker got a request after `before` were there."""
    return until(f"{member} is used", lambda: Metrics(member).sum("baton_entries_created_total") > before, within)


class Kill(Case):
    def kill_under_load(self, role):
        made = self.cluster(2, 2, arguments={"router": ["--disaggregate-above", "0"],
                                             "workers": ["--test-step-delay", "3ms"]})
        warm(made)
        pids = {each: each.pid for each in made.members}
        with Load(made, tolerates=RETRYABLE) as load:
            for turn in range(2):
                victim = made.of(role)[turn % 2]
                victim.kill()
                recovered = load.answers_again(KILLED_S)
                time.sleep(0.5)
                # The same id at the same address, a new incarnation.
                made.restart(victim)
                until(f"{victim} is ready", lambda: victim.ready()[0], 10)
                began = time.monotonic()
                wait_used(victim, 0, REPLACED_S)
                print(f"{victim} killed: every stream answered after {recovered:.2f} s, its replacement used "
                      f"{time.monotonic() - began:.2f} s after it was ready")
            load.answers_again(KILLED_S)
        print(f"load: {load.told()}")
        self.assertEqual({each for each, pid in pids.items() if each.pid != pid}, set(made.of(role)))
        self.assert_alive(made)
        at_rest(made)
        self.assert_no_faults(made)

    def test_a_decode_worker_is_killed_and_replaced(self):
        self.kill_under_load("decode")

    def test_a_prefill_worker_is_killed_and_replaced(self):
        self.kill_under_load("prefill")

    def test_a_replacement_with_another_id_and_address_is_used(self):
        made = self.cluster(1, 1, arguments={"router": ["--disaggregate-above", "0"]})
        warm(made)
        with Load(made, 3, tolerates=RETRYABLE) as load:
            for role in ("decode", "prefill"):
                old = made.of(role)[0]
                old.kill()
                fresh = made.start_program(role, f"new-{role}")
                made.wait_ready([fresh])
                wait_used(fresh, 0, REPLACED_S)
                made.forget(old)
                load.answers_again(KILLED_S)
        print(f"load: {load.told()}")
        at_rest(made)

    def test_without_any_decode_worker_the_error_is_honest_and_goes_away(self):
        made = self.cluster(1, 1, arguments={"router": ["--timer-place", "1s"]})
        warm(made)
        victim = made.of("decode")[0]
        victim.kill()
        with client(made) as each:
            began = time.monotonic()
            code, sentence = each.refused(make_request("Once", max_tokens=4))
            self.assertIn(code, RETRYABLE)
            self.assertGreater(len(sentence), 15)
            self.assertLess(time.monotonic() - began, 8)
            router = made.routers()[0]
            until("the router says that it is not ready", lambda: not router.ready()[0], 3)
            made.restart(victim)
            made.wait_ready([victim, router], 10)
            self.assertEqual(len(each.ask("Once", max_tokens=4).ids), 4)
        self.assert_alive(made)

    def test_a_router_is_killed(self):
        made = self.cluster(2, 2, routers=2, arguments={"workers": ["--test-step-delay", "3ms"]})
        warm(made)
        victim, other = made.routers()
        with Load(made, 4, router=1) as kept:
            with Load(made, 4, tolerates=(grpc.StatusCode.UNAVAILABLE,)) as load:
                victim.kill()
                kept.answers_again(KILLED_S)
                # What the dead router's clients had is gone on every worker: only the other router's requests are left.
                until("sessions of the dead router ended", lambda: all(
                    Metrics(each).sum("baton_sessions", peer_role="router") == 1 for each in made.workers()), 2)
                made.restart(victim)
                made.wait_ready([victim], 10)
                load.answers_again(10)
            print(f"clients of the dead router: {load.told()}; of the other: {kept.told()}")
            self.assertEqual(kept.errors, [])
        self.assertTrue(other.alive())
        at_rest(made)
        self.assert_no_faults(made)


class Stop(Case):
    """SIGSTOP: the process is there, its connections are there, it says nothing."""

    def stop_in_mid_transfer(self, role, state):
        made = self.cluster(2, 2, arguments={
            "router": ["--disaggregate-above", "0"],
            # Several steps for each prompt, each of them slow: transfers last.
            "prefill": ["--test-step-delay", "150ms", "--timer-step", "1s", "--step-tokens", "128", "--max-running", "32"],
            "decode": ["--test-step-delay", "5ms", "--timer-step", "1s"]})
        warm(made)
        victim = made.of(role)[0]
        outcomes = []

        def long_request(index):
            with client(made) as each:
                request = make_request(filler(380, index), max_tokens=60, ignore_eos=True)
                try:
                    outcomes.append((each.generate(request, 60).ids, index))
                except grpc.RpcError as error:
                    outcomes.append((error.code(), index))

        with Canary(made, tolerates=RETRYABLE, tokens=20) as canary:
            threads = [threading.Thread(target=long_request, args=(index,)) for index in range(6)]
            for thread in threads:
                thread.start()
            until("a transfer runs", lambda: Metrics(victim).sum("baton_entries", state=state) > 0, 10, 0.005)
            with stopped(victim):
                began = time.monotonic()
                others = [each for each in made.workers() + made.routers() if each is not victim]
                held = {each: {entry["id"] for entry in entries(each)["entries"]} for each in others}
                # What was there when it stopped is over, one way or the other, at everybody else.
                until("the others let go of what they shared with it", lambda: not any(
                    peer["peer"] == victim.id and entry["id"] in held[each] for each in others
                    for entry in entries(each)["entries"] for peer in entry["peers"]), STOPPED_S)
                let_go = time.monotonic() - began
                canary.answers_again(STOPPED_S)
                answered = time.monotonic() - began
                for thread in threads:
                    thread.join(max(0.0, 30 - (time.monotonic() - began)))
                self.assertFalse(any(thread.is_alive() for thread in threads), "requests hang on a stopped worker")
                print(f"{victim} stopped: the others let go after {let_go:.1f} s, canary answered after {answered:.1f} s, "
                      f"all requests over after {time.monotonic() - began:.1f} s")
                canary.pause()
                at_rest(made, 2, others)
                canary.go_on()
            until(f"{victim} is ready again", lambda: victim.ready()[0], 15)
            at = Metrics(victim).sum("baton_entries_created_total")
            until("it is used again", lambda: Metrics(victim).sum("baton_entries_created_total") > at, 20, 0.1)
        print(f"canary: {canary.answered} right, errors {canary.errors}, longest {canary.longest:.1f} s")
        with client(made) as each:
            for result, index in outcomes:
                if isinstance(result, list):
                    again = each.generate(make_request(filler(380, index), max_tokens=60, ignore_eos=True))
                    self.assertEqual(result, again.ids)
                else:
                    self.assertIn(result, RETRYABLE)
        self.assertTrue(any(isinstance(result, list) for result, _ in outcomes), f"no request survived: {outcomes}")
        self.assert_alive(made)
        at_rest(made, 5)
        self.assert_no_faults(made)

    def test_a_prefill_worker_stops_in_mid_transfer(self):
        self.stop_in_mid_transfer("prefill", "computing")

    def test_a_decode_worker_stops_in_mid_transfer(self):
        self.stop_in_mid_transfer("decode", "receiving")


class Etcd(Case):
    """Discovery goes away, or forgets everything, while requests run: no request fails."""

    LEASE_S = 5
    OUTAGE_S = 30
    ARGUMENTS = {role: ["--etcd-lease", "5s", "--etcd-keepalive", "1s"] for role in ("router", "prefill", "decode")}

    def registered(self, made):
        return all(each.ready()[0] for each in made.routers() + made.workers())

    @staticmethod
    def sessions_ended(made):
        return sum(Metrics(each).sum("baton_session_ends_total") for each in made.routers() + made.workers())

    def finish(self, made, load, ended):
        load.answers_again(5)
        self.assertEqual(self.sessions_ended(made), ended, "discovery is advice: what it forgets must not end a session")
        until("every program is registered again", lambda: self.registered(made), 20)
        fresh = made.start_program("decode")
        made.wait_ready([fresh])
        wait_used(fresh, 0, REPLACED_S)
        self.assertEqual(load.errors, [])

    def test_etcd_stops_beyond_every_lease_and_thaws(self):
        made = self.cluster(2, 2, arguments=self.ARGUMENTS)
        warm(made)
        ended = self.sessions_ended(made)
        with Load(made, 4) as load:
            with stopped(made.of("etcd")[0]):
                time.sleep(self.OUTAGE_S)
                load.answers_again(5)
            time.sleep(2)  # the mass deletion comes within the first moments
            self.finish(made, load, ended)
        print(f"load: {load.told()}")

    def test_etcd_is_killed_and_comes_back(self):
        made = self.cluster(2, 2, arguments=self.ARGUMENTS)
        warm(made)
        etcd = made.of("etcd")[0]
        ended = self.sessions_ended(made)
        with Load(made, 4) as load:
            etcd.kill()
            time.sleep(self.OUTAGE_S)
            made.restart(etcd)
            made.wait_ready([etcd])
            self.finish(made, load, ended)
        print(f"load: {load.told()}")

    def test_etcd_comes_back_empty(self):
        made = self.cluster(1, 1, arguments=self.ARGUMENTS)
        warm(made)
        etcd = made.of("etcd")[0]
        ended = self.sessions_ended(made)
        with Load(made, 3) as load:
            etcd.kill()
            shutil.rmtree(os.path.join(made.state, "etcd"))
            made.restart(etcd)
            made.wait_ready([etcd])
            self.finish(made, load, ended)
        print(f"load: {load.told()}")

    def test_everything_in_etcd_is_deleted(self):
        made = self.cluster(2, 2, arguments=self.ARGUMENTS)
        warm(made)
        ended = self.sessions_ended(made)
        with Load(made, 4) as load:
            done = subprocess.run(["etcdctl", "--endpoints", made.etcd_url(), "del", "--prefix", "/baton/"],
                                  env=dict(os.environ, ETCDCTL_API="3"), capture_output=True, text=True, timeout=20, check=False)
            self.assertEqual((done.returncode, done.stdout.strip()), (0, "5"), done.stderr)
            self.finish(made, load, ended)
            # Whoever comes later finds everybody again.
            made.wait_ready([made.start_program("router")], 3 * self.LEASE_S)
            with client(made, 1) as each:
                until("both workers of each kind are listed", lambda: [
                    (model.prefill_workers_ready, model.decode_workers_ready) for model in each.stub.ListModels(
                        api.ListModelsRequest(), timeout=5).models] == [(2, 3)], 3 * self.LEASE_S)
        print(f"load: {load.told()}")

    def test_without_etcd_at_start_programs_wait_and_say_so(self):
        made = self.cluster(start=False, arguments=self.ARGUMENTS)
        etcd = made.start_etcd()
        made.wait_ready([etcd])
        etcd.kill()
        members = [made.start_program(role) for role in ("decode", "prefill", "router")]
        time.sleep(2)
        for member in members:
            self.assertTrue(member.alive(), f"{member}:{member.tail()}")
            is_ready, why = member.ready()
            self.assertFalse(is_ready)
            if member.role != "router":
                self.assertIn("etcd", why)
        made.restart(etcd)
        made.wait_ready([etcd] + members, 30)
        with client(made) as each:
            self.assertEqual(len(each.ask("Once", max_tokens=4).ids), 4)


class Scale(Case):
    def test_workers_come_and_drain_away_and_no_request_fails(self):
        made = self.cluster(1, 1, arguments={"router": ["--disaggregate-above", "0"],
                                             "workers": ["--test-step-delay", "2ms"]})
        warm(made)
        with Load(made, 5) as load:
            for role in ("decode", "prefill"):
                old = made.of(role)[0]
                fresh = made.start_program(role)
                made.wait_ready([fresh])
                wait_used(fresh, 0, REPLACED_S)
                began = time.monotonic()
                made.remove(old)
                self.assertEqual(old.code, 0, old.tail(60))
                print(f"{role}: drained in {time.monotonic() - began:.1f} s")
                load.answers_again(5)
        print(f"load: {load.told()}")
        self.assertEqual(load.errors, [])
        at_rest(made)
        self.assert_no_faults(made)

    def test_a_draining_worker_finishes_what_it_runs(self):
        made = self.cluster(1, 2, arguments={"workers": ["--test-step-delay", "10ms"]})
        warm(made)
        with client(made) as each:
            reference = each.generate(make_request(filler(30), max_tokens=200, ignore_eos=True)).ids
            streams = [each.stream(make_request(filler(30), max_tokens=200, ignore_eos=True)) for _ in range(4)]
            firsts = [next(stream) for stream in streams]
            for victim in made.of("decode")[:1]:
                victim.signal(signal.SIGTERM)
                until(f"{victim} says that it drains", lambda: "draining" in victim.ready()[1] or not victim.alive(), 2)
                for first, stream in zip(firsts, streams):
                    answer = collect(stream, first)
                    self.assertEqual(answer.ids, reference)
                    self.assertEqual(answer.trace.attempts, 1, "a drain is no fail-over")
                self.assertTrue(victim.wait(10), "a drained worker does not end")
                self.assertEqual(victim.code, 0, victim.tail())
                with Client(each.address) as other:
                    self.assertEqual(len(other.ask("Once", max_tokens=4).ids), 4)


if __name__ == "__main__":
    main()
