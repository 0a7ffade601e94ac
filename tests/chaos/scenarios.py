"""The catalogue: every scenario is a function of a Stage, registered under a name, most of them made by rows of a table.

A function says what the world is, what goes wrong and for how long; what is then asked of the programs is the judge's and
the same for all. `honest` are the errors that a client may be told in it; nothing is honest but what is named.
"""
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import time

from world import HERE, World, harness
from harness import Metrics, descriptors, filler, grpc, make_request, until
import judge
from judge import KILLED_S, OK, QUIET_S, SILENT_S, Client, Trial

SCENARIOS = {}
RETRYABLE = {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}
# Whoever is behind a broken link of its own may be told anything that is an error, by its own gRPC library.
CUT_CLIENT = RETRYABLE | {"INTERNAL", "UNKNOWN", "CANCELLED", "DEADLINE_EXCEEDED"}


class Scenario:
    def __init__(self, name, title, play, quick=False):
        self.name, self.title, self.play, self.quick = name, title, play, quick


def scenario(name, title, quick=False):
    def register(play):
        SCENARIOS[name] = Scenario(name, title, play, quick)
        return play
    return register


class Stage:
    """What a scenario gets: worlds on demand, ended with it."""

    def __init__(self, folder, draw, stack):
        self.folder, self.draw, self.stack = folder, draw, stack
        self.trial = None

    def world(self, prefill=2, decode=2, routers=2, honest=RETRYABLE, start=True, **options):
        world = World(self.folder, **options)
        self.stack.callback(world.down)
        self.trial = Trial(world, self.draw)
        self.trial.honest = set(honest)
        if start:
            world.up(prefill, decode, routers)
        return self.trial


def member(trial, id):
    return trial.world.find(id)


# ---- kills, stops, thaws

def play_kill(stage, role):
    trial = stage.world()
    trial.calm()
    trial.crowd(8)
    victim = member(trial, f"{role}-1")
    trial.touched.add(victim.id)
    peers = [each for each in trial.world.routers()[:1] + trial.world.workers() if role != each.role]
    if role == "prefill":
        peers = [each for each in peers if each.role != "router"]  # the router lets go only when it has another
    for _ in range(2):
        held = trial.caught([(victim, peer) for peer in peers[:1]])
        held.update(trial.shared([(victim, peer) for peer in peers[1:]]))
        trial.replaced.add(victim.id)
        victim.kill()
        trial.free(held, KILLED_S, blind=(victim,))
        others = [each for each in trial.canaries if each.router != victim.id]
        trial.progress(others, KILLED_S, f"with {victim} killed")
        trial.world.restart(victim)
        trial.ready_again(members=[victim])
    trial.conclude()


def play_stop(stage, role):
    trial = stage.world(honest=RETRYABLE)
    trial.calm()
    victim = member(trial, f"{role}-1")
    trial.touched.add(victim.id)
    trial.crowd(6)
    if role == "router":
        trial.crowd(3, router=1)
    others = [each for each in trial.world.routers() + trial.world.workers() if each is not victim]
    pairs = [(victim, each) for each in others if each.role != role]
    held = trial.caught([pairs[0]] if role != "prefill" else [(victim, member(trial, "decode-1"))])
    held.update(trial.shared(pairs))
    with harness.stopped(victim):
        trial.free(held, SILENT_S, blind=(victim,))
        trial.progress([each for each in trial.canaries if each.router != victim.id], SILENT_S, f"with {victim} stopped")
        gone = trial.herd[:4]
        trial.leave(gone)
        if role != "router":
            trial.quiet_of(gone, SILENT_S, others)
        time.sleep(2)
    trial.quiet_of(trial.gone, SILENT_S)
    trial.conclude()


for _role in ("router", "prefill", "decode"):
    scenario(f"kill-{_role}", f"a {_role} is killed twice under load", quick=_role == "decode")(
        lambda stage, role=_role: play_kill(stage, role))
    scenario(f"stop-{_role}", f"a {_role} is stopped in mid-transfer, then thaws")(
        lambda stage, role=_role: play_stop(stage, role))


@scenario("same-address", "a worker of each kind is killed and started at its address twenty times")
def play_same_address(stage):
    trial = stage.world()
    trial.calm()
    trial.crowd(6)
    before = {each: descriptors(each) for each in trial.world.routers()}
    for turn in range(20):
        victim = member(trial, ("decode-1", "prefill-1")[turn % 2])
        trial.touched.add(victim.id)
        victim.kill()
        trial.world.restart(victim)
        trial.ready_again(10, [victim])
        created = Metrics(victim).sum("baton_entries_created_total")
        trial.until("PROG", f"{victim} is used again after restart {turn}",
                    lambda: Metrics(victim).sum("baton_entries_created_total") > created, 4)
        trial.progress(trial.canaries, KILLED_S, f"after restart {turn}")
    trial.conclude()
    for each, count in before.items():
        trial.check("Q", descriptors(each) <= count + 12, f"{each}: descriptors {count} -> {descriptors(each)}")


@scenario("rolling-restart", "every worker, then every router, drains and comes back under load", quick=False)
def play_rolling(stage):
    trial = stage.world(honest=set())
    trial.calm()
    trial.crowd(4)
    for victim in trial.world.workers():
        trial.touched.add(victim.id)
        victim.signal(signal.SIGTERM)
        trial.check("Q", victim.wait(30), f"{victim} does not end")
        trial.check("Q", victim.code == 0, f"{victim} ended with {victim.code}: {victim.tail()}")
        trial.world.restart(victim)
        trial.ready_again(members=[victim])
        trial.progress(trial.canaries, KILLED_S, f"after {victim} drained")
    trial.honest = {"UNAVAILABLE"}  # of clients whose own router leaves
    for victim in trial.world.routers():
        for each in trial.clients():
            if each.router != victim.id:
                trial.check("ONE", all(last.code in (OK, None, "UNAVAILABLE") for last in each.outcomes), each.label)
        trial.touched.add(victim.id)
        trial.replaced.add(victim.id)
        victim.signal(signal.SIGTERM)
        trial.check("Q", victim.wait(30), f"{victim} does not end")
        trial.check("Q", victim.code == 0, f"{victim} ended with {victim.code}: {victim.tail()}")
        trial.world.restart(victim)
        trial.ready_again(members=[victim])
    trial.conclude()


# ---- packets that vanish, between each pair, each way

CUTS = {
    "router-decode": ["router-1>decode-1"],
    "router-prefill": ["router-1>prefill-1"],
    "prefill-decode": ["prefill-1>decode-1"],
    "prefill-decode-kv": ["prefill-1>decode-1/kv"],
}


def play_cut(stage, links, way, proxied=False, during=None):
    trial = stage.world()
    trial.calm()
    pair = tuple(member(trial, each) for each in trial.world.links[links[0]][:2])
    trial.crowd(8)
    held = trial.caught([pair])
    with trial.world.lost(links, way):
        trial.free(held, SILENT_S)
        trial.progress(trial.canaries, SILENT_S, f"with {links[0]} lost")
        gone = trial.herd[:4]
        trial.leave(gone)
        trial.quiet_of(gone, SILENT_S)
        time.sleep(3)
        trial.progress(trial.canaries, SILENT_S, f"with {links[0]} lost for long")
    trial.conclude()


for _pair, _links in CUTS.items():
    for _way in ("both", "up", "down"):
        scenario(f"cut-{_pair}-{_way}",
                 f"packets between {_pair} vanish, " + {"both": "both ways", "up": "from the dialler",
                                                        "down": "to the dialler"}[_way],
                 quick=(_pair, _way) in (("prefill-decode-kv", "up"), ("router-decode", "down")))(
            lambda stage, links=_links, way=_way: play_cut(stage, links, way))


@scenario("cut-worker-all", "a decode worker is cut off from everybody, etcd too")
def play_cut_worker(stage):
    trial = stage.world()
    trial.calm()
    victim = member(trial, "decode-1")
    trial.touched.add(victim.id)
    links = [name for name, (dialler, target, _) in trial.world.links.items() if victim.id in (dialler, target)]
    trial.crowd(8)
    pairs = [(victim, member(trial, "router-1")), (victim, member(trial, "prefill-1"))]
    held = trial.caught(pairs)
    with trial.world.lost(links):
        trial.free(held, SILENT_S)
        trial.progress(trial.canaries, SILENT_S, f"with {victim} cut off")
        trial.quiet(SILENT_S, [victim])
        time.sleep(8)
        trial.progress(trial.canaries, KILLED_S, f"with {victim} cut off for long")
    trial.conclude()


@scenario("control-blackhole", "all control traffic vanishes during transfers, the KV links live", quick=True)
def play_blackhole(stage):
    trial = stage.world()
    trial.calm()
    links = [name for name, (_, target, _) in trial.world.links.items() if target != "etcd" and not name.endswith("/kv")]
    trial.touched.update(each.id for each in trial.world.routers())
    trial.crowd(8)
    pairs = [(one, two) for one in trial.world.routers()[:1] + trial.world.of("prefill") for two in
             trial.world.of("decode")]
    held = trial.caught(pairs[:1] + [(member(trial, "prefill-1"), member(trial, "decode-1"))])
    held.update(trial.shared(pairs))
    with trial.world.lost(links):
        trial.free(held, SILENT_S)
        trial.quiet(SILENT_S, trial.world.workers())
        routers = trial.world.routers()
        trial.until("RDY", "the routers say that they reach nobody", lambda: not any(each.ready()[0] for each in routers), 5)
        trial.leave()
        trial.quiet_of(trial.gone, QUIET_S)
    trial.conclude()


# ---- etcd

def finish_etcd(trial, ended):
    trial.progress(trial.canaries, KILLED_S, "after etcd came back")
    trial.check("PROG", harness_sessions_ended(trial) == ended, "discovery is advice: what it forgets must not end a session")
    trial.ready_again()
    fresh = trial.world.start_program("decode", "decode-fresh")
    trial.world.wait_ready([fresh])
    trial.prober.watch()
    trial.until("PROG", f"{fresh} is used", lambda: Metrics(fresh).sum("baton_entries_created_total") > 0, 5)
    trial.conclude(leaves=False)


def harness_sessions_ended(trial):
    return sum(Metrics(each).sum("baton_session_ends_total") for each in trial.world.routers() + trial.world.workers())


def play_etcd(stage, fault, hold=12):
    trial = stage.world(honest=set())
    trial.calm()
    trial.crowd(4)
    ended = harness_sessions_ended(trial)
    with fault(trial.world):
        for _ in range(hold // 4):
            time.sleep(4)
            trial.progress(trial.canaries, KILLED_S, "without etcd")
    time.sleep(2)  # mass deletions come in the first moments
    finish_etcd(trial, ended)


@contextlib.contextmanager
def etcd_killed(world):
    etcd = world.of("etcd")[0]
    etcd.kill()
    yield
    world.restart(etcd)
    world.wait_ready([etcd])


def etcd_links(world, role):
    return [name for name, (dialler, target, _) in world.links.items()
            if target == "etcd" and dialler.startswith(role)]


scenario("etcd-stop", "etcd is stopped beyond every lease, then thaws")(
    lambda stage: play_etcd(stage, lambda world: harness.stopped(world.of("etcd")[0])))
scenario("etcd-restart", "etcd is killed and started again after every lease")(
    lambda stage: play_etcd(stage, etcd_killed))
for _role in ("router", "prefill", "decode"):
    for _way in ("both", "up", "down"):
        scenario(f"cut-{_role}-etcd-{_way}", f"packets between every {_role} and etcd vanish ({_way})")(
            lambda stage, role=_role, way=_way: play_etcd(
                stage, lambda world: world.lost(etcd_links(world, role), way)))
scenario("cut-all-etcd", "packets between everybody and etcd vanish", quick=True)(
    lambda stage: play_etcd(stage, lambda world: world.lost(etcd_links(world, "")), 8))


# ---- clients

SLOW_ANSWERS = {"decode": ["--test-step-delay", "40ms", "--timer-step", "1s"]}


@contextlib.contextmanager
def foreign_crowd(trial, host, router, streams=24):
    """A process full of streaming clients in a namespace of its own; labelled by nothing."""
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "--"] + host.enter +
        [sys.executable, os.path.join(os.path.dirname(HERE), "integration", "crowd.py"), router.address("grpc"),
         str(trial.draw.randrange(1000)), str(streams), "fin"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(os.environ, BATON_BUILD=harness.BUILD))
    try:
        assert process.stdout.readline() == b"started\n", "the crowd could not start"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def strangers(trial):
    """Entries that are not of the clients that this process knows."""
    return [(str(each), entry["state"], entry["waits_for"]) for each in trial.world.routers() + trial.world.workers()
            for entry in (trial.entries(each) or {"entries": []})["entries"]
            if not entry["label"].startswith(("canary-", "herd-", "baton-canary"))]


HALF_OPEN_S = 10.0  # keepalive after 5 s, its timeout of 3 s, then the abort; two busy cores


def play_cut_client(stage, way):
    trial = stage.world(arguments=SLOW_ANSWERS)
    trial.calm()
    router = member(trial, "router-1")
    host = trial.world.client_host("clients", router)
    with foreign_crowd(trial, host, router):
        until("the crowd is served", lambda: len(strangers(trial)) > 20, 20)
        with trial.world.lost([f"clients>{router.id}"], way):
            took = trial.until("Q", lambda: f"nothing left of clients that cannot be reached: {strangers(trial)[:5]}",
                               lambda: not strangers(trial), HALF_OPEN_S)
            trial.worst_free = max(trial.worst_free, took or 0.0)
            trial.progress(trial.canaries, KILLED_S, "with clients cut off")
            trial.quiet_of([], QUIET_S)
    trial.conclude()


for _way in ("both", "up", "down"):
    scenario(f"cut-client-router-{_way}", f"packets between clients and their router vanish ({_way}): half-open")(
        lambda stage, way=_way: play_cut_client(stage, way))


@scenario("slow-readers", "clients that do not read for 30 s")
def play_slow_readers(stage):
    trial = stage.world()
    trial.calm()
    router = member(trial, "router-1")
    channel = grpc.insecure_channel(router.address("grpc"), options=[
        ("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 256)])
    stub = harness.inference_pb2_grpc.InferenceStub(channel)
    trial.crowd(3)
    calls = [stub.Generate(make_request(filler(30, index), max_tokens=450, ignore_eos=True, request_id=f"slow-{index}"),
                           timeout=120) for index in range(24)]
    until("every slow reader is served", lambda: sum(
        entry["label"].startswith("slow-") for entry in (trial.entries(router) or {"entries": []})["entries"]) == 24, 20)
    began = time.monotonic()
    # The workers are free as soon as the tokens are made: a reader costs the router alone.
    trial.until("FREE", "the workers are done with slow readers", lambda: not any(
        entry["label"].startswith("slow-") for each in trial.world.workers()
        for entry in trial.entries(each)["entries"]), 20)
    trial.worst_free = time.monotonic() - began
    trial.progress(trial.canaries, KILLED_S, "with slow readers")
    trial.until("Q", "the router has ended slow readers", lambda: not any(
        entry["label"].startswith("slow-") for entry in trial.entries(router)["entries"]), 34, 0.2)
    ended = time.monotonic() - began
    trial.check("Q", ended > 20, f"ended after {ended:.1f} s: they were given no time")
    trial.note(f"ended after {ended:.1f} s")
    for call in calls:
        try:
            for _ in call:
                pass
            trial.check("ONE", False, "a reader that did not read was answered")
        except grpc.RpcError as error:
            trial.check("ONE", error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, f"{error.code()} {error.details()}")
    channel.close()
    trial.conclude()


def all_are_answered(trial, count, max_tokens):
    """So many requests of the longest prompt at once: they go on, one after the other at the least, and none fails."""
    with Client(trial.world.routers()[0].address("grpc")) as each, concurrent.futures.ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(each.generate, make_request(filler(380, 100 + index), max_tokens=max_tokens, ignore_eos=True), 120)
                   for index in range(count)]
        while not all(future.done() for future in futures):
            done = sum(future.done() for future in futures)
            trial.until("PROG", lambda done=done: f"more than {done} of {count} are answered", lambda done=done: sum(
                future.done() for future in futures) > done, 15)
            if trial.failed:
                break
        for future in futures:
            error = future.exception()
            trial.check("ONE", error is None, lambda error=error: f"{getattr(error, 'details', lambda: error)()}")


@scenario("burst", "eight times as many of the largest requests at once as the pools hold: none fails")
def play_burst(stage):
    trial = stage.world(honest=set(), arguments={
        "prefill": ["--step-tokens", "512", "--timer-step", "1s"], "decode": [], "workers": [
            "--kv-tokens", "2048", "--link", "tcp", "--test-verify"]})
    trial.calm()
    count = 8 * 2 * (2048 // 16 // 30)
    began = time.monotonic()
    all_are_answered(trial, count, 100)
    trial.note(f"{count} requests in {time.monotonic() - began:.1f} s")
    trial.conclude()


@scenario("tiny-pools", "pools of one request, fifty at once: all finish", quick=True)
def play_tiny(stage):
    trial = stage.world(honest=set(), arguments={
        "prefill": ["--step-tokens", "512"], "decode": [], "workers": [
            "--kv-tokens", "512", "--link", "tcp", "--test-verify"]})
    trial.calm()
    all_are_answered(trial, 50, 30)
    trial.conclude()


# ---- the KV link

@scenario("slow-link-abort", "1 MB/s, an abort at half of the transfer, and a canary into the one-request pool (F18)", quick=True)
def play_slow_link(stage):
    trial = stage.world(1, 1, 1, arguments={
        "prefill": ["--timer-step", "1s"], "decode": [], "workers": [
            "--kv-tokens", "512", "--link", "tcp", "--test-verify"]})
    harness.warm(trial.world)
    trial.prober = judge.Prober(trial.world)
    router, decode = member(trial, "router-1"), member(trial, "decode-1")
    late = 0
    with Client(router.address("grpc")) as each:
        want = make_request(filler(381, 1), max_tokens=40, ignore_eos=True)
        reference = each.generate(want).ids
        each.generate(make_request(filler(381, 2), max_tokens=40, ignore_eos=True))
        with trial.world.net.throttled("prefill-1", decode.ports["kv"], 1_000_000):
            for turn in range(12):
                at = trial.entries(decode)["link"]["bytes_received"]
                dropped = Metrics(decode).sum("baton_chunks_dropped_total", why="unknown")
                call = each.stream(make_request(filler(381, 1000 + turn), max_tokens=40, ignore_eos=True,
                                                request_id=f"victim-{turn}"), 30)
                share = (0.5, 0.3, 0.7)[turn % 3]
                until("a part of the bytes is there",
                      lambda: trial.entries(decode)["link"]["bytes_received"] - at > share * 380 * 1280, 10, 0.002)
                began = time.monotonic()
                call.cancel()
                # Straight into the pages that the late bytes were meant for; its own bytes queue behind those.
                answer = each.generate(want, 30)
                trial.worst_gap = max(trial.worst_gap, time.monotonic() - began)
                trial.check("REF", answer.ids == reference, f"turn {turn}: {answer.ids} instead of {reference}")
                late += Metrics(decode).sum("baton_chunks_dropped_total", why="unknown") > dropped
                # The pages must not be answered from the cache the next time.
                each.generate(make_request(filler(381, 2000 + turn), max_tokens=40, ignore_eos=True), 30)
    trial.note(f"late bytes came in {late} of 12 turns")
    trial.check("REF", late >= 3, f"late bytes came in {late} of 12 turns only: this proves nothing")
    trial.conclude()


def play_kv_resets(stage):
    trial = stage.world()
    trial.calm()
    trial.crowd(8)
    links = [name for name in trial.world.links if name.endswith("/kv")]
    count = 0
    for _ in range(6):
        time.sleep(0.7)
        count += sum(trial.world.net.reset(trial.world.links[name]) for name in links)
    trial.check("PROG", count >= 12, f"only {count} sockets were reset: this proves nothing")
    trial.note(f"{count} sockets reset")
    trial.progress(trial.canaries, KILLED_S, "after resets of the KV links")
    trial.conclude()


scenario("kv-resets", "all KV connections are reset six times under load")(play_kv_resets)


@scenario("kv-throttled", "the KV links of one prefill worker carry 200 kB/s")
def play_kv_throttled(stage):
    trial = stage.world()
    trial.calm()
    trial.crowd(8)
    with contextlib.ExitStack() as stack:
        for decode in trial.world.of("decode")[:1]:
            stack.enter_context(trial.world.net.throttled("prefill-1", decode.ports["kv"], 200_000))
        for _ in range(3):
            time.sleep(4)
            trial.progress(trial.canaries, SILENT_S, "with a slow KV link")
        trial.leave()
        trial.quiet_of(trial.gone, QUIET_S)
    trial.conclude()


@scenario("kv-sole-prefill", "the only prefill worker cannot send to one of two decode workers, which so looks idle")
def play_sole_prefill(stage):
    trial = stage.world(prefill=1)
    trial.calm()
    trial.crowd(6)
    held = trial.caught([(member(trial, "prefill-1"), member(trial, "decode-1"))])
    with trial.world.lost(["prefill-1>decode-1/kv"]):
        trial.free(held, SILENT_S)
        for _ in range(3):
            trial.progress(trial.canaries, SILENT_S, "by the other decode worker")
            time.sleep(3)
    trial.conclude()


# ---- several at once, and again and again

@scenario("flapping", "every link of a decode worker vanishes for 1.5 s and is back for 1.5 s, six times")
def play_flapping(stage):
    trial = stage.world()
    trial.calm()
    links = [name for name, (dialler, target, _) in trial.world.links.items() if "decode-1" in (dialler, target)]
    trial.crowd(8)
    for _ in range(6):
        with trial.world.lost(links):
            time.sleep(1.5)
        time.sleep(1.5)
    trial.progress(trial.canaries, SILENT_S, "after flaps")
    trial.conclude()


@scenario("split", "the cluster is cut in two halves, each with a router, a prefill and a decode worker; etcd stays with one")
def play_split(stage):
    trial = stage.world()
    trial.calm()
    halves = {id: (id + "-1")[-1] if id == "etcd" else id[-1] for id in [each.id for each in trial.world.members]}
    links = [name for name, (dialler, target, _) in trial.world.links.items() if halves[dialler] != halves[target]]
    trial.touched.update(id for id, half in halves.items() if half == "2")
    trial.crowd(6)
    trial.crowd(4, router=1)
    pairs = [(member(trial, "router-1"), member(trial, "decode-2")), (member(trial, "router-2"), member(trial, "decode-1"))]
    held = trial.caught(pairs)
    with trial.world.lost(links):
        trial.free(held, SILENT_S)
        trial.progress(trial.canaries, SILENT_S, "in halves")
        gone = trial.herd[:3] + trial.herd[-2:]
        trial.leave(gone)
        trial.quiet_of(gone, SILENT_S)
        time.sleep(8)
        trial.progress(trial.canaries, KILLED_S, "in halves for long")
    trial.conclude()


@scenario("all-paused", "every program is stopped for ten seconds and thaws, as when a machine is paused")
def play_all_paused(stage):
    trial = stage.world()
    trial.calm()
    trial.crowd(8)
    until("the herd is answered", lambda: all(each.answered for each in trial.herd), 30)
    trial.touched.update(each.id for each in trial.world.members)
    with contextlib.ExitStack() as stack:
        for each in trial.world.members:
            stack.enter_context(harness.stopped(each))
        time.sleep(10)
    trial.progress(trial.canaries, SILENT_S, "after the pause")
    trial.conclude()


@scenario("stutter", "a decode worker is stopped for 3 s, less than its lease, and runs for 1 s, four times")
def play_stutter(stage):
    trial = stage.world()
    trial.calm()
    victim = member(trial, "decode-1")
    trial.touched.add(victim.id)
    trial.crowd(8)
    for _ in range(4):
        with harness.stopped(victim):
            time.sleep(3)
        time.sleep(1)
    trial.progress(trial.canaries, SILENT_S, "after stutters")
    trial.conclude()


@scenario("kill-without-etcd", "etcd is stopped; a decode and a prefill worker are killed and started again; etcd thaws")
def play_kill_without_etcd(stage):
    trial = stage.world()
    trial.calm()
    trial.crowd(6)
    victims = [member(trial, "decode-1"), member(trial, "prefill-1")]
    trial.touched.update(each.id for each in victims)
    with harness.stopped(trial.world.of("etcd")[0]):
        time.sleep(1)
        for each in victims:
            each.kill()
        trial.progress(trial.canaries, KILLED_S, "with workers killed while etcd is silent")
        for each in victims:
            trial.world.restart(each)
        time.sleep(6)
        for each in victims:
            is_ready, why = each.ready()
            trial.check("RDY", not is_ready and "etcd" in why, f"{each} cannot be known to anybody, and says: {why}")
        trial.progress(trial.canaries, KILLED_S, "with replacements that nobody knows")
    trial.ready_again()
    created = {each: Metrics(each).sum("baton_entries_created_total") for each in victims}
    trial.until("PROG", "the replacements are used", lambda: all(
        Metrics(each).sum("baton_entries_created_total") > count for each, count in created.items()), 5)
    trial.conclude()


@scenario("both-legs", "a prefill worker is killed while a decode worker is cut off from its router")
def play_both_legs(stage):
    trial = stage.world()
    trial.calm()
    trial.crowd(8)
    victim = member(trial, "prefill-1")
    trial.touched.add(victim.id)
    pair = (member(trial, "router-1"), member(trial, "decode-1"))
    held = trial.caught([pair])
    with trial.world.lost(["router-1>decode-1"]):
        victim.kill()
        trial.free(held, SILENT_S)
        trial.progress(trial.canaries, SILENT_S, "with a leg of each kind broken")
        trial.world.restart(victim)
        trial.ready_again(members=[victim])
    trial.conclude()


# ---- bytes that are delayed, swallowed, cut, throttled: the proxy

PROXY_LINKS = {
    "router-decode": (["router-1>decode-1"], RETRYABLE),
    "router-prefill": (["router-1>prefill-1"], RETRYABLE),
    "prefill-decode": (["prefill-1>decode-1"], RETRYABLE),
    "etcd": (["router-1>etcd", "router-2>etcd", "prefill-1>etcd", "prefill-2>etcd", "decode-1>etcd", "decode-2>etcd"], set()),
    "client-router": (["client>router-1"], CUT_CLIENT),
}
BOTH = ("up", "down")
# name -> (policy, then what is done every second while it is on). None: the link works on, only worse.
HARMS = {
    "delay": ({way: {"delay_ms": 150} for way in BOTH}, None),
    "slow": ({way: {"rate": 20_000} for way in BOTH}, None),
    "lost-up": ({"up": {"lost": True}}, None),
    "lost-down": ({"down": {"lost": True}}, None),
    "paused": ({way: {"hold": True} for way in BOTH}, None),
    "cut-up": ({"up": {"cut": 3000}}, None),
    "cut-down": ({"down": {"cut": 3000}}, None),
    "resets": ({}, ("reset", {})),
    "refused": ({"refuse": True}, ("reset", {})),
    "half-open-near": ({"blind": True}, ("lose", {"side": "near"})),
    "half-open-far": ({"blind": True}, ("lose", {"side": "far"})),
}
HARM_TITLES = {
    "delay": "150 ms each way", "slow": "20 kB/s each way", "lost-up": "bytes of the dialler vanish",
    "lost-down": "bytes to the dialler vanish", "paused": "nothing arrives, then all of it, late",
    "cut-up": "ends after 3,000 bytes of the dialler", "cut-down": "ends after 3,000 bytes to the dialler",
    "resets": "reset each second", "refused": "reset, and new ones are too",
    "half-open-near": "the dialler goes and the target does not hear of it",
    "half-open-far": "the target goes and the dialler does not hear of it",
}


def play_proxy(stage, pair, harm):
    links, honest = PROXY_LINKS[pair]
    policy, repeated = HARMS[harm]
    if harm == "delay":
        honest = set()
    trial = stage.world(proxied=True, honest=honest)
    trial.calm()
    trial.crowd(8)
    until("the herd is answered", lambda: all(each.answered for each in trial.herd), 30)
    world = trial.world
    held = {}
    if pair not in ("etcd", "client-router"):
        held = trial.caught([tuple(member(trial, each) for each in world.links[links[0]][:2])])
    with world.proxies.policy(links, **policy):
        began = time.monotonic()
        if repeated is not None:
            for link in links:
                world.proxies.tell(repeated[0], link, **repeated[1])
        trial.free(held, SILENT_S)
        while time.monotonic() - began < SILENT_S:
            if repeated is not None:
                for link in links:
                    world.proxies.tell(repeated[0], link, **repeated[1])
            time.sleep(1)
        trial.progress(trial.canaries, SILENT_S if pair not in ("etcd", "client-router") else KILLED_S, f"{pair} {harm}")
        gone = trial.herd[:4]
        trial.leave(gone)
        if pair != "client-router" or harm in ("delay", "slow", "resets", "refused", "cut-up", "cut-down"):
            trial.quiet_of(gone, SILENT_S)
        else:
            trial.quiet_of(gone, HALF_OPEN_S)
    trial.conclude()


for _pair in PROXY_LINKS:
    for _harm in HARMS:
        scenario(f"proxy-{_pair}-{_harm}", f"{_pair} through a proxy: {HARM_TITLES[_harm]}",
                 quick=(_pair, _harm) in (("client-router", "half-open-near"), ("prefill-decode", "cut-down")))(
            lambda stage, pair=_pair, harm=_harm: play_proxy(stage, pair, harm))
