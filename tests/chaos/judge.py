"""Oracles: what every scenario is judged by, from outside: answers to clients, /readyz, /metrics, /debug/entries.

  Q     quiet: after the last client left every program is at rest within its bound, and while a fault is on, those it leaves
        reachable hold nothing of clients that left
  FREE  what two programs shared when the link between them failed is over at both within its bound
  CAP   capacity is back: as many of the largest requests as the pools hold succeed at once
  REF   every token that any client was sent is that of the reference, before, during and after the fault
  PROG  unrelated requests are answered while the fault is on
  ONE   each request has exactly one terminal, at the client and in the router's records, and they agree
  RDY   /readyz tells the truth: red when requests are not answered, with a reason; green when they are; green again after
"""
import concurrent.futures
import json
import random
import threading
import time

from world import harness
from harness import GOLDEN, RETRYABLE, Metrics, collect, filler, grpc, http_get, make_request, not_at_rest, until

KILLED_S = 4.0    # a killed peer is seen in 1 s, then a retry; two busy cores
SILENT_S = 8.5    # a silent peer: its lease of 6 s, a step, a tick at each end; two busy cores
QUIET_S = 2.0     # protocol.md, mass abort
READY_S = 20.0    # programs are ready again so long after a fault: reconnects, etcd, the probe of a suspected pair
RED_AFTER_S = 15  # requests that are not answered for so long and a green /readyz: a lie
GREEN_AFTER_S = 8  # requests that are answered all the while and a red /readyz: a lie too
REQUEST_S = 45    # nothing may hang longer; a request that needs it is a finding
OK = "ok"


class Client(harness.Client):
    """As harness.Client, but it gives a connection time to form: gRPC calls the bound of that "min_reconnect_backoff"."""

    def __init__(self, address):
        super().__init__(address)
        self.channel.close()
        self.channel = grpc.insecure_channel(address, options=[
            ("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 3000),
            ("grpc.max_reconnect_backoff_ms", 500)])
        self.stub = harness.inference_pb2_grpc.InferenceStub(self.channel)


def reference_requests():
    """Prompts of every kind of length with their sampling; the same for the whole life of the tests."""
    made = []
    for index in range(6):
        prompt = filler((380, 24, 200, 300, 3, 120)[index], 100 + index)
        fields = {"temperature": 0.8, "seed": 7 + index} if index % 2 else {}
        made.append((prompt, dict(max_tokens=(60, 90, 40, 50, 80, 30)[index], ignore_eos=True, **fields)))
    return made


class Reference:
    """What the answers must be: recorded golden ones, and those of a calm cluster."""

    answers = {}

    @classmethod
    def learn(cls, world):
        if not cls.answers:
            with Client(world.routers()[0].address("grpc")) as client:
                for index, (prompt, fields) in enumerate(reference_requests()):
                    cls.answers[index] = client.generate(make_request(prompt, **fields)).ids
        return cls.answers


class Outcome:
    def __init__(self, label, router):
        self.label, self.router = label, router
        self.began = time.monotonic()
        self.ended = None
        self.code = None  # OK, "CANCELLED" by us, or the name of a gRPC status
        self.told = ""
        self.attempts = 0


class Asker:
    """One client thread that asks again and again and remembers every outcome. pick() -> (request, wanted ids)."""

    def __init__(self, address, router, label, pick, every=0.02, timeout=REQUEST_S):
        self.address, self.router, self.label, self.pick = address, router, label, pick
        self.every, self.timeout = every, timeout
        self.outcomes, self.wrong = [], []
        self.stopping = threading.Event()
        self.call = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        with Client(self.address) as client:
            while not self.stopping.is_set():
                self.ask(client)
                self.stopping.wait(self.every)

    def ask(self, client):
        request, wanted = self.pick(len(self.outcomes))
        request.request_id = f"{self.label}-{len(self.outcomes)}"
        outcome = Outcome(request.request_id, self.router)
        self.outcomes.append(outcome)
        taken = []
        try:
            self.call = client.stream(request, self.timeout)
            if self.stopping.is_set():
                self.call.cancel()
            answer = collect(tee(self.call, taken))
            outcome.attempts = answer.trace.attempts
            outcome.code = OK
            if answer.ids != wanted:
                self.wrong.append(f"{outcome.label}: wrong tokens {answer.ids} instead of {wanted}")
        except grpc.RpcError as error:
            outcome.code, outcome.told = error.code().name, error.details() or ""
            if taken != wanted[:len(taken)]:
                self.wrong.append(f"{outcome.label}: wrong tokens {taken} before {outcome.code}")
        except Exception as error:  # a stream that ended well without a finish reason, a reply after the last, ...
            outcome.code, outcome.told = "BROKEN", f"{type(error).__name__}: {error}"
            self.wrong.append(f"{outcome.label}: {outcome.told}")
        outcome.ended = time.monotonic()

    def leave(self):
        """At once, in the middle of an answer."""
        self.stopping.set()
        if self.call is not None:
            self.call.cancel()

    def end(self, within=REQUEST_S + 5):
        self.stopping.set()
        self.thread.join(within)
        return not self.thread.is_alive()

    @property
    def answered(self):
        return sum(each.code == OK for each in self.outcomes)


def tee(stream, taken):
    for reply in stream:
        taken += reply.token_ids
        yield reply


def golden_pick(index, tokens=12):
    each = GOLDEN[index]
    return lambda _: (make_request(each["prompt"], max_tokens=tokens), each["greedy_ids"][:tokens])


def herd_pick(seed):
    draw = random.Random(seed)
    requests = reference_requests()

    def pick(_):
        index = draw.randrange(len(requests))
        prompt, fields = requests[index]
        return make_request(prompt, **fields), Reference.answers[index]
    return pick


class Prober:
    """Asks every program for /readyz five times a second and remembers when what it said changed."""

    def __init__(self, world):
        self.world = world
        self.history = {}  # id -> [(since, status, body)]
        self.stopping = threading.Event()
        self.threads = {}
        self.watch()

    def watch(self):
        for member in self.world.routers() + self.world.workers():
            if member.id not in self.threads:
                self.history[member.id] = []
                self.threads[member.id] = threading.Thread(target=self.run, args=(member,), daemon=True)
                self.threads[member.id].start()

    def run(self, member):
        while not self.stopping.wait(0.2):
            status, body = http_get(member.address("admin"), "/readyz", 1.5)
            history = self.history[member.id]
            if not history or history[-1][1:] != (status, body):
                history.append((time.monotonic(), status, body))

    def stop(self):
        self.stopping.set()
        for each in self.threads.values():
            each.join(5)

    def spans(self, id, until_when):
        """[(from, to, status, body)]"""
        history = self.history[id]
        ends = [each[0] for each in history[1:]] + [until_when]
        return [(since, end, status, body) for (since, status, body), end in zip(history, ends)]


class Trial:
    """One scenario being played: its world, its clients, what they saw, and the checks."""

    def __init__(self, world, draw):
        self.world, self.draw = world, draw
        self.canaries, self.herd, self.gone = [], [], []
        self.prober = None
        self.fault_at = self.healed_at = None
        self.failed = []
        self.worst_free = self.worst_gap = 0.0
        self.notes = []
        self.replaced = set()  # ids of programs whose records are lost with their process
        self.touched = set()   # programs that the fault itself may make unready
        self.honest = {code.name for code in RETRYABLE}
        self.details = []
        self.phases = [("start", time.monotonic())]

    # ---- bookkeeping

    def check(self, name, ok, told=""):
        if not ok:
            self.failed.append(f"{name}: {told() if callable(told) else told}")
        return ok

    def phase(self, name):
        """What begins now; where the time went is printed with --verbose."""
        self.phases.append((name, time.monotonic()))

    def note(self, text):
        self.notes.append(text)

    def until(self, name, what, check, within, every=0.05):
        """As harness.until, but a failure is a finding of oracle `name`. Returns seconds, or None."""
        began = time.monotonic()
        try:
            until(what, check, within, every)
            return time.monotonic() - began
        except AssertionError as error:
            self.check(name, False, str(error))
            return None

    # ---- clients

    def calm(self):
        """A warm cluster, references learnt, canaries at every router and the prober at work."""
        self.phase("warm")
        harness.warm(self.world)
        Reference.learn(self.world)
        self.prober = Prober(self.world)
        for index, router in enumerate(self.world.routers()):
            self.canaries.append(Asker(router.address("grpc"), router.id, f"canary-{index}", golden_pick(index)))
        until("the canaries are answered", lambda: all(each.answered for each in self.canaries), 20)
        self.phase("fault")

    def crowd(self, count=8, router=0, address=None):
        """Clients that ask for long and short answers of which every token is known."""
        router = self.world.routers()[router]
        address = address or self.world.client_address(router)
        made = [Asker(address, router.id, f"herd-{len(self.herd) + index}", herd_pick(self.draw.random()))
                for index in range(count)]
        self.herd += made
        return made

    def leave(self, clients=None):
        """The clients go away in the middle of their answers, and do not come back."""
        clients = list(clients if clients is not None else self.herd)
        for each in clients:
            each.leave()
        for each in clients:
            if each in self.herd:
                self.herd.remove(each)
                self.gone.append(each)

    def clients(self):
        return self.canaries + self.herd + self.gone

    # ---- the oracles

    def entries(self, member, limit=None):
        status, body = http_get(member.address("admin"), "/debug/entries" + (f"?limit={limit}" if limit else ""), 3)
        return json.loads(body) if status == 200 else None

    def shared(self, pairs):
        """{(member, other): {id: age in ms} of the herd's entries at member that name other}, now."""
        held = {}
        for one, two in pairs:
            for member, other in ((one, two), (two, one)):
                page = self.entries(member)
                if page is not None:
                    held[(member, other)] = {
                        entry["id"]: entry["age_ms"] for entry in page["entries"] if entry["label"].startswith("herd-") and
                        any(peer["peer"] == other.id for peer in entry["peers"])}
        return held

    def caught(self, pairs, within=10.0):
        """Waits until these pairs share something that is young, so that it outlives the start of the fault; returns what."""
        held = {}

        def check():
            held.clear()
            held.update(self.shared(pairs))
            return all(any(age < 100 for ids in (held.get((one, two), {}), held.get((two, one), {})) for age in ids.values())
                       for one, two in pairs)
        until(lambda: f"requests that {[f'{one}-{two}' for one, two in pairs]} share", check, within, 0.005)
        return held

    def free(self, held, within, blind=()):
        """FREE: what was held is not shared any more, at every end that can be looked at."""
        watched = {key: ids for key, ids in held.items() if ids and key[0] not in blind and key[0].alive()}

        def left():
            found = {}
            for (member, other), ids in watched.items():
                page = self.entries(member)
                still = None if page is None else [
                    (entry["id"], entry["state"], entry["age_ms"]) for entry in page["entries"]
                    if entry["id"] in ids and any(peer["peer"] == other.id for peer in entry["peers"])]
                if still is None or still:
                    found[f"{member} with {other}"] = still
            return found
        took = self.until("FREE", lambda: f"let go of what was shared: {left()}", lambda: not left(), within)
        if took is not None:
            self.worst_free = max(self.worst_free, took)
        return took

    def quiet(self, within=QUIET_S, programs=None, name="Q"):
        """Q without a fault, once no client is left: everything at rest."""
        programs = programs or [each for each in self.world.routers() + self.world.workers() if each.alive()]
        left = {}

        def check():
            left.clear()
            left.update({str(each): why for each in programs if (why := not_at_rest(each))})
            return not left
        took = self.until(name, lambda: f"at rest, but {left}", check, within)
        if took is not None:
            self.worst_free = max(self.worst_free, took)
        return took

    def quiet_of(self, clients, within, programs=None):
        """Q while others still ask: nothing is left of these clients."""
        programs = programs or [each for each in self.world.routers() + self.world.workers() if each.alive()]
        prefixes = tuple(each.label + "-" for each in clients)

        def left():
            found = []
            for member in programs:
                page = self.entries(member)
                found += ["no answer of " + str(member)] if page is None else [
                    (str(member), entry["label"], entry["state"], entry["waits_for"]) for entry in page["entries"]
                    if entry["label"].startswith(prefixes)]
            return found
        took = self.until("Q", lambda: f"nothing left of those who went: {left()[:6]}", lambda: not left(), within)
        if took is not None:
            self.worst_free = max(self.worst_free, took)

    def progress(self, canaries, within, what):
        """PROG: each of these canaries has a request that began now answered."""
        began = time.monotonic()
        for each in canaries:
            self.until("PROG", lambda each=each: f"{what}: {each.label} is answered; it was told "
                       f"{[(last.code, last.told) for last in each.outcomes[-4:]]}",
                       lambda each=each: any(last.code == OK and last.began >= began for last in each.outcomes[-50:]),
                       max(0.1, within - (time.monotonic() - began)))

    def ready_again(self, within=READY_S, members=None):
        members = members or [each for each in self.world.routers() + self.world.workers() if each.alive()]
        took = self.until("RDY", lambda: f"ready again: {[(str(each), each.ready()[1]) for each in members]}",
                          lambda: all(each.ready()[0] for each in members), within)
        return took

    def stop_clients(self):
        """No more requests; every one that runs must end by itself."""
        for each in self.canaries + self.herd:
            each.stopping.set()
        for each in self.canaries + self.herd + self.gone:
            self.check("ONE", each.end(), f"{each.label} hangs in {each.outcomes[-1].label if each.outcomes else '-'}")

    def references(self):
        """REF: nothing wrong so far, and the recorded answers now."""
        for each in self.clients():
            self.check("REF", not each.wrong, lambda each=each: f"{len(each.wrong)} wrong: {each.wrong[:2]}")
        def golden(router, index):
            with Client(router.address("grpc")) as client:
                try:
                    answer = client.generate(harness.golden_request(index), 20)
                    self.check("REF", answer.ids == GOLDEN[index]["greedy_ids"], f"golden {index} by {router}: {answer.ids}")
                except grpc.RpcError as error:
                    self.check("REF", False, f"golden {index} by {router}: {error.code().name} {error.details()}")
        futures = []
        with concurrent.futures.ThreadPoolExecutor(10) as pool:
            for router in self.world.routers():
                if router.alive():
                    futures += [pool.submit(golden, router, index) for index in range(len(GOLDEN))]
            for future in futures:
                future.result()

    def capacity(self):
        """CAP: the largest requests, as many as the pools hold."""
        pages = sum(Metrics(each).sum("baton_pages") for each in self.world.of("decode") if each.alive())
        count = max(1, int(pages // 30) - 2)  # 480 tokens are 30 pages; placement may not pack the last perfectly
        with Client(self.world.routers()[-1].address("grpc")) as client, \
                concurrent.futures.ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(client.generate, make_request(
                filler(380, 7000 + index + self.draw.randrange(10 ** 6)), max_tokens=100, ignore_eos=True), 60)
                for index in range(count)]
            for future in futures:
                try:
                    self.check("CAP", len(future.result().ids) == 100, "a short answer")
                except grpc.RpcError as error:
                    self.check("CAP", False, f"{error.code().name}: {error.details()}")

    def terminals(self):
        """ONE: the router's records beside what clients saw."""
        for client in self.clients():
            for outcome in client.outcomes:
                self.check("ONE", outcome.code is not None, f"{outcome.label} never ended")
                if outcome.code not in (OK, None, "CANCELLED") and outcome.code not in self.honest:
                    self.check("ONE", False, f"{outcome.label} after {outcome.ended - outcome.began:.1f} s: "
                                             f"{outcome.code} {outcome.told}")
        for router in self.world.routers():
            page = self.entries(router, 4096) if router.alive() and router.id not in self.replaced else None
            if page is None:
                continue
            recorded = {}
            for each in page["terminals"]:
                recorded.setdefault(each["label"], []).append(each["outcome"])
            complete = page["terminals_total"] <= len(page["terminals"])
            for client in self.clients():
                for outcome in client.outcomes:
                    if outcome.router != router.id:
                        continue
                    ends = recorded.get(outcome.label, [])
                    self.check("ONE", len(ends) <= 1, f"{outcome.label} ended {len(ends)} times: {ends}")
                    if outcome.code == OK and complete:
                        self.check("ONE", ends == ["ok"], f"{outcome.label} was answered, but {router} recorded {ends}")
        for member in self.world.routers() + self.world.workers():
            if member.alive():
                metrics = Metrics(member)
                for name in ("baton_audit_mismatch_total", "baton_ledger_imbalance", "baton_slots_bad_total",
                             "baton_deadline_overrun_seconds"):
                    self.check("ONE", metrics.sum(name) == 0, f"{name} of {member} is {metrics.sum(name)}")
            else:
                self.check("ONE", False, f"{member} ended with code {member.code}: {member.tail()}")

    def truth(self):
        """RDY, over the whole trial: what /readyz said beside what canaries were told."""
        now = time.monotonic()
        for canary in self.canaries:
            good = [(each.began, each.ended) for each in canary.outcomes if each.code == OK]
            spans = self.prober.spans(canary.router, now)
            asked = [each.began for each in canary.outcomes]
            # Red too late: nothing that began in a long time was answered, and it said ready all that time.
            marks = sorted([asked[0]] + [ended for _, ended in good] + [canary.outcomes[-1].ended or now])
            for start, end in zip(marks, marks[1:]):
                if end - start > RED_AFTER_S:
                    red = any(status != 200 and since < end and until_ > start for since, until_, status, _ in spans)
                    self.check("RDY", red, f"{canary.router} said ready while {canary.label} was not answered for "
                                           f"{end - start:.1f} s")
            # Green too late: it said not ready, and every request that began meanwhile was answered.
            for since, until_, status, body in spans:
                if status != 503:
                    continue
                self.check("RDY", body.strip(), f"{canary.router} is not ready without a reason")
                meanwhile = [each for each in canary.outcomes if since + 1 < each.began < until_ - 1]
                if until_ - since > GREEN_AFTER_S and len(meanwhile) > 20 and all(each.code == OK for each in meanwhile):
                    self.check("RDY", canary.router in self.touched,
                               f"{canary.router} said '{body.strip()}' for {until_ - since:.1f} s "
                               f"while {len(meanwhile)} of {len(meanwhile)} requests were answered")
        for member in self.world.workers():
            for since, until_, status, body in self.prober.spans(member.id, now):
                if status == 503:
                    self.check("RDY", body.strip(), f"{member} is not ready without a reason")
                    if member.id not in self.touched and until_ - since > GREEN_AFTER_S:
                        self.check("RDY", False, f"{member} said '{body.strip()}' for {until_ - since:.1f} s, untouched")

    def causes(self):
        """How entries ended at each program, and what routers counted: for people, with --verbose."""
        told = []
        for member in self.world.routers() + self.world.workers():
            if member.alive():
                metrics = Metrics(member)
                rows = [(labels["cause"], value) for labels, value in metrics.rows("baton_entries_terminal_cause_total")]
                for name in ("baton_retries_total", "baton_worker_busy_total"):
                    rows += [(f"{name} {labels.get('cause') or labels.get('peer_role')}", value)
                             for labels, value in metrics.rows(name)]
                told.append(f"{member}: " + ", ".join(f"{name} {value:.0f}" for name, value in rows if value))
        return told

    def conclude(self, leaves=True):
        """After the fault: everything is as before it. The order matters: readiness is asked under load."""
        self.phase("heal")
        self.ready_again()
        self.progress(self.canaries + self.herd, KILLED_S + 6, "after the fault")
        if leaves:
            self.leave()
        self.phase("leave")
        self.details = self.causes()
        self.stop_clients()
        self.quiet()
        self.truth()
        self.prober.stop()
        self.phase("references")
        self.references()
        self.phase("capacity")
        self.capacity()
        self.quiet(QUIET_S + 1, name="CAP")
        self.terminals()
        self.phase("end")
        self.worst_gap = max([self.worst_gap] + [each.ended - each.began for canary in self.canaries
                                                 for each in canary.outcomes if each.ended])
        outcomes = [outcome for each in self.clients() for outcome in each.outcomes]
        codes = {}
        for each in outcomes:
            codes[each.code] = codes.get(each.code, 0) + 1
        self.note(" ".join(f"{count} {code}" for code, count in sorted(codes.items(), key=str)))
        longest = max((each.ended - each.began for each in outcomes if each.code == OK and each.ended), default=0.0)
        self.note(f"longest answer {longest:.1f} s, {sum(each.attempts > 1 for each in outcomes)} by a later attempt")
        told = sorted({f"{each.code}: {each.told[:90]}" for each in outcomes if each.code not in (OK, "CANCELLED")})
        if told:
            self.note("; ".join(told[:3]))
