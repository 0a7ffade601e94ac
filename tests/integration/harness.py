"""What the integration tests share: real clusters, clients, metrics, waiting with a deadline.

A test gets a cluster of its own in a temporary folder; programs die with the test process, however it ends. Nothing here
knows how a program works inside: tests see the public API, the admin ports, /proc and signals.
"""
import atexit
import collections
import concurrent.futures
import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "tools", "lib"))
import cluster as clusters  # noqa: E402
from cluster import Cluster, Problem, http_get  # noqa: E402,F401

BUILD = os.path.abspath(clusters.default_build())


def generated_stubs():
    """The folder of the Python stubs of the public API, generated once per build folder and version of the proto."""
    folder = os.path.join(BUILD, "integration-stubs")
    done = os.path.join(folder, "done")
    source = os.path.join(ROOT, "proto", "baton", "v1", "inference.proto")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(done) or os.path.getmtime(done) < os.path.getmtime(source):
            subprocess.run([os.path.join(ROOT, "tests", "sdk", "python", "generate"), folder], check=True)
            with open(done, "w", encoding="ascii"):
                pass
    return folder


STUBS = generated_stubs()
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # we start programs, we do not fork clients
sys.path.insert(0, STUBS)
import grpc  # noqa: E402
from baton.v1 import inference_pb2 as api, inference_pb2_grpc  # noqa: E402

MODEL = "stories260k"
MODEL_DIR = clusters.DEFAULT_MODEL
with open(os.path.join(ROOT, "tests", "data", "golden", "stories260k.json"), encoding="utf-8") as golden_file:
    GOLDEN = [{name: each[name] for name in ("prompt", "prompt_ids", "greedy_ids", "greedy_text")}
              for each in json.load(golden_file)]
RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


# ---- waiting

def until(what, check, within, every=0.02):
    """Polls check() until it returns something true and returns that; fails with `what` and the last answer."""
    deadline = time.monotonic() + within
    while True:
        last = check()
        if last:
            return last
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within} s: {what() if callable(what) else what} (last: {last!r})")
        time.sleep(every)


# ---- clusters

class Case(unittest.TestCase):
    """A test with clusters. Each ends with its test; when the test fails, the ends of all logs are printed."""

    def folder(self):
        folder = tempfile.mkdtemp(prefix="baton-test-")
        self.addCleanup(shutil.rmtree, folder, True)
        return folder

    def cluster(self, prefill=1, decode=1, routers=1, model=None, arguments=None, start=True, state=None):
        """arguments: role -> list; the key "workers" stands for both kinds of worker."""
        arguments = dict(arguments or {})
        workers = arguments.pop("workers", [])
        both = {role: list(arguments.get(role, [])) + (workers if role != "router" else []) for role in clusters.ROLES}
        both["prefill"] = ["--threads", "1"] + both["prefill"]
        both["decode"] = ["--threads", "1"] + both["decode"]
        made = Cluster(state or self.folder(), BUILD, model, arguments=both, dies_with_us=True)
        # Most tests count requests: those of the routers themselves are only where a test asks for them.
        if "--canary" not in both["router"] and made.knows("router", "canary"):
            made.arguments["router"] = ["--canary", "0"] + both["router"]
        self.addCleanup(made.down)
        self.addCleanup(self.show_logs, made)
        if start:
            made.up(prefill, decode, routers)
        return made

    def show_logs(self, made):
        result = self._outcome.result
        failed = any(test is self for test, _ in result.failures + result.errors)
        if failed:
            for member in made.members:
                if member.role == "etcd" and member.alive():
                    continue
                state = "alive" if member.alive() else f"gone, code {member.code}"
                print(f"--- {member} ({state}), the end of its log:{member.tail(40)}", file=sys.stderr)

    def assert_alive(self, made):
        for member in made.members:
            self.assertTrue(member.alive(), f"{member} ended with code {member.code}:{member.tail()}")

    def assert_no_faults(self, made):
        """What must be 0 in every test, whatever was done to the cluster."""
        for member in made.routers() + made.workers():
            if member.alive():
                metrics = Metrics(member)
                for name in ("baton_audit_mismatch_total", "baton_ledger_imbalance", "baton_slots_bad_total"):
                    self.assertEqual(metrics.sum(name), 0, f"{name} of {member}")


def client(made, router=0):
    return Client(made.routers()[router].address("grpc"))


# ---- clients

Answer = collections.namedtuple("Answer", "ids text finish usage trace replies logprobs")
# Of one token: top is a tuple of (token id, logprob).
Logprobs = collections.namedtuple("Logprobs", "logprob top")


class Client:
    """The public API of one router."""

    def __init__(self, address):
        self.address = address
        self.channel = grpc.insecure_channel(address, options=[
            ("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 500)])
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    def close(self):
        self.channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def stream(self, request, timeout=60):
        return self.stub.Generate(request, timeout=timeout)

    def generate(self, request, timeout=60):
        """The whole answer. grpc.RpcError as it comes."""
        return collect(self.stream(request, timeout))

    def ask(self, prompt, timeout=60, **fields):
        return self.generate(make_request(prompt, **fields), timeout)

    def refused(self, request, timeout=20):
        """(code, sentence) of a request that must not be served."""
        try:
            answer = self.generate(request, timeout)
        except grpc.RpcError as error:
            return error.code(), error.details()
        raise AssertionError(f"was served: {answer}")


def collect(stream, *taken):
    """The whole answer of a stream, of which some replies may have been taken already."""
    ids, text, last, replies, logprobs = [], "", None, 0, []
    stream = itertools.chain(taken, stream)
    for reply in stream:
        ids += reply.token_ids
        text += reply.text
        replies += 1
        assert len(reply.logprobs) in (0, len(reply.token_ids)), "logprobs are not those of the tokens"
        logprobs += [logprobs_of(each) for each in reply.logprobs]
        assert last is None or not last.finish_reason, "a reply after the last"
        last = reply
    assert last is not None and last.finish_reason, "the stream ended well without a finish_reason"
    assert last.usage.completion_tokens == len(ids), (last.usage, len(ids))
    return Answer(ids, text, last.finish_reason, last.usage, last.trace, replies, logprobs)


def collect_choices(stream, *taken):
    """(answers, usage, trace) of a call with n > 1: an Answer for each choice, by index, without usage and trace."""
    replies, ended, last = collections.defaultdict(list), set(), None
    for reply in itertools.chain(taken, stream):
        assert reply.index not in ended, f"choice {reply.index} goes on after its last reply"
        assert last is None or not last.HasField("usage"), "a reply after that with the usage"
        replies[reply.index].append(reply)
        ended |= {reply.index} if reply.finish_reason else set()
        last = reply
    assert last is not None and last.HasField("usage") and last.finish_reason, "the stream ended well without usage"
    assert ended == set(replies), f"only {ended} of {set(replies)} have a last reply"
    found = []
    for index in sorted(replies):
        for reply in replies[index]:
            assert len(reply.logprobs) in (0, len(reply.token_ids)), "logprobs are not those of the tokens"
        found.append(Answer([id for reply in replies[index] for id in reply.token_ids],
                            "".join(reply.text for reply in replies[index]), replies[index][-1].finish_reason, None, None,
                            len(replies[index]), [logprobs_of(each) for reply in replies[index] for each in reply.logprobs]))
    assert last.usage.completion_tokens == sum(len(each.ids) for each in found), last.usage
    return found, last.usage, last.trace


def choice_seed(seed, index):
    """The seed with which a request alone gives choice `index`: as inference.proto documents it."""
    if index == 0:
        return seed
    x = (seed + index * 0x9e3779b97f4a7c15) % 2 ** 64
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9 % 2 ** 64
    x = (x ^ x >> 27) * 0x94d049bb133111eb % 2 ** 64
    return x ^ x >> 31


def logprobs_of(each):
    return Logprobs(each.logprob, tuple(zip(each.top_token_ids, each.top_logprobs)))


def make_request(prompt, max_tokens=16, model=MODEL, request_id="", session_id="", n=0, **sampling):
    """sampling: fields of Sampling; greedy unless a temperature is given."""
    request = api.GenerateRequest(model=model, max_tokens=max_tokens, request_id=request_id, session_id=session_id, n=n)
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.ids.extend(prompt)
    request.sampling.temperature = sampling.pop("temperature", 0.0)
    for name, value in sampling.items():
        if isinstance(value, (list, tuple, range)):
            getattr(request.sampling, name).extend(value)
        elif isinstance(value, dict):
            getattr(request.sampling, name).update(value)
        else:
            setattr(request.sampling, name, value)
    return request


def golden_request(index=0, **fields):
    each = GOLDEN[index]
    fields.setdefault("max_tokens", len(each["greedy_ids"]))
    return make_request(each["prompt"], **fields)


def filler(count, seed=0):
    """A prompt of `count` token ids that shares no prefix with that of another seed."""
    state = seed * 2654435761 + 12345
    ids = [1]
    while len(ids) < count:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2 ** 64
        ids.append(259 + (state >> 33) % 200)
    return ids


def warm(made, requests=8):
    """Lets every session form, and every pool reach the size it keeps."""
    with client(made) as each:
        until("the first answer", lambda: answers(each, golden_request(0, max_tokens=4)), 15)
        with concurrent.futures.ThreadPoolExecutor(requests) as pool:
            list(pool.map(lambda index: each.generate(golden_request(index % 5, max_tokens=4)), range(requests)))


def answers(each, request, timeout=10):
    """The answer, or None while the cluster says that it cannot serve now."""
    try:
        return each.generate(request, timeout)
    except grpc.RpcError as error:
        if error.code() in RETRYABLE:
            return None
        raise


class Canary:
    """Asks for the beginning of a golden answer again and again; every answer must be right. Used as a with block.

    tolerates: codes that are honest errors while a fault is on (counted in `errors`, never silent)."""

    LABEL = "canary"

    def __init__(self, made, tolerates=(), router=0, index=0, tokens=12, every=0.02):
        self.address = made.routers()[router].address("grpc")
        self.tolerates = tolerates
        self.every = every
        self.index = index
        self.tokens = tokens
        self.answered = 0
        self.errors = []
        self.wrong = []
        self.retried = 0
        self.longest = 0.0
        self.stopping = threading.Event()
        self.running = threading.Event()
        self.running.set()
        self.resting = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        wanted = GOLDEN[self.index]["greedy_ids"][:self.tokens]
        request = golden_request(self.index, max_tokens=self.tokens, request_id=self.LABEL)
        with Client(self.address) as each:
            while not self.stopping.is_set():
                if not self.running.is_set():
                    self.resting.set()
                    self.running.wait(0.05)
                    continue
                self.resting.clear()
                began = time.monotonic()
                try:
                    answer = each.generate(request, timeout=30)
                    if answer.ids != wanted:
                        self.wrong.append(f"wrong tokens: {answer}")
                    self.retried += answer.trace.attempts > 1
                    self.answered += 1
                except grpc.RpcError as error:
                    told = f"{error.code().name} after {time.monotonic() - began:.1f} s: {error.details()}"
                    (self.errors if error.code() in self.tolerates else self.wrong).append(told)
                except Exception as error:  # everything else is a wrong answer too
                    self.wrong.append(f"{type(error).__name__}: {error}")
                self.longest = max(self.longest, time.monotonic() - began)
                self.stopping.wait(self.every)

    def pause(self, waits=True):
        """No new request; waits: until the current one has ended."""
        self.running.clear()
        if waits:
            self.resting.clear()
            assert self.resting.wait(35), "the canary hangs"

    def go_on(self):
        self.running.set()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, kind, *unused):
        self.stopping.set()
        self.thread.join(40)
        if kind is None:
            self.check()

    def check(self):
        assert not self.thread.is_alive(), "the canary hangs"
        assert not self.wrong, f"{len(self.wrong)} bad answers beside {self.answered} good ones: {self.wrong[:5]}"
        assert self.answered, f"the canary was never answered: {self.errors[:5]}"

    def answers_again(self, within):
        """How long until a request that begins now is answered."""
        before = self.answered
        began = time.monotonic()
        until(lambda: f"the canary is answered; its errors: {self.errors[-3:]} {self.wrong[-3:]}",
              lambda: self.answered > before + 1, within, 0.01)
        return time.monotonic() - began


class Load:
    """Several canaries with different prompts: a steady load that checks every token."""

    def __init__(self, made, streams=6, tolerates=(), tokens=40, router=0):
        self.canaries = [Canary(made, tolerates, router, index % 5, tokens) for index in range(streams)]

    def __enter__(self):
        for each in self.canaries:
            each.thread.start()
        until("the load is answered", lambda: all(each.answered or each.wrong for each in self.canaries), 30)
        return self

    def __exit__(self, kind, *unused):
        for each in self.canaries:
            each.stopping.set()
        for each in self.canaries:
            each.thread.join(40)
        if kind is None:
            for each in self.canaries:
                each.check()

    def answers_again(self, within):
        """How long until every stream had a request that began now answered."""
        before = [each.answered for each in self.canaries]
        began = time.monotonic()
        until(lambda: f"every stream is answered; errors: {self.errors[-5:]} {self.wrong[-5:]}",
              lambda: all(each.answered > count + 1 for each, count in zip(self.canaries, before)), within, 0.01)
        return time.monotonic() - began

    @property
    def answered(self):
        return sum(each.answered for each in self.canaries)

    @property
    def errors(self):
        return [error for each in self.canaries for error in each.errors]

    @property
    def wrong(self):
        return [error for each in self.canaries for error in each.wrong]

    def told(self):
        return (f"{self.answered} right, {len(self.errors)} honest errors, "
                f"{sum(each.retried for each in self.canaries)} answered by a later attempt, "
                f"longest {max(each.longest for each in self.canaries):.1f} s")


# ---- metrics

LINE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$')
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Metrics:
    """One scrape of a program's /metrics."""

    def __init__(self, member, timeout=5.0):
        status, self.text = http_get(member.address("admin"), "/metrics", timeout)
        if status != 200:
            raise AssertionError(f"/metrics of {member}: {status} {self.text}")
        self.series = []
        for line in self.text.splitlines():
            match = LINE.match(line)
            if match and not line.startswith("#"):
                self.series.append((match[1], dict(LABEL.findall(match[2] or "")), float(match[3])))

    def rows(self, name, **labels):
        return [(found, value) for metric, found, value in self.series
                if metric == name and all(found.get(key) == wanted for key, wanted in labels.items())]

    def sum(self, name, **labels):
        return sum(value for _, value in self.rows(name, **labels))

    def has(self, name):
        return bool(self.rows(name))


def not_at_rest(member):
    """Why a worker or router still holds something; "" if it is at rest. Pages count on workers."""
    try:
        metrics = Metrics(member)
    except AssertionError as error:
        return str(error)
    entries = {labels["state"]: value for labels, value in metrics.rows("baton_entries") if value}
    problems = []
    if not metrics.has("baton_entries"):
        problems.append("no baton_entries")
    if entries:
        problems.append(f"entries {entries}")
    created, ended = metrics.sum("baton_entries_created_total"), metrics.sum("baton_entries_terminal_total")
    if created != ended:
        problems.append(f"created {created} ended {ended}")
    if member.role != "router":
        pages = {labels["state"]: value for labels, value in metrics.rows("baton_pages")}
        if set(pages) != {"free", "cached", "owned"}:
            problems.append(f"baton_pages {pages}")
        elif pages["owned"] != 0 or pages["free"] + pages["cached"] != capacity(member, pages):
            problems.append(f"pages {pages} of {capacity(member, pages)}")
    if metrics.sum("baton_ledger_imbalance") != 0:
        problems.append("ledger imbalance")
    return ", ".join(problems)


CAPACITY = {}


def capacity(member, pages):
    """Pages of a worker, from the first scrape of this process (its pools never grow)."""
    return CAPACITY.setdefault((member.pid, member.start), sum(pages.values()))


def at_rest(made, within=2.0, programs=None):
    """Waits until every program (or these) is at rest; returns how long that took."""
    began = time.monotonic()
    programs = programs or [each for each in made.workers() + made.routers() if each.alive()]
    left = {}

    def check():
        left.clear()
        for each in programs:
            why = not_at_rest(each)
            if why:
                left[str(each)] = why
        return not left
    until(lambda: f"everything at rest, but {left}", check, within)
    return time.monotonic() - began


def entries(member):
    status, body = http_get(member.address("admin"), "/debug/entries", 5)
    if status != 200:
        raise AssertionError(f"/debug/entries of {member}: {status} {body}")
    return json.loads(body)


def descriptors(member):
    return len(os.listdir(f"/proc/{member.pid}/fd"))


def resident_kib(member):
    with open(f"/proc/{member.pid}/status", encoding="ascii", errors="replace") as file:
        return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1])


def descriptors_settle(made, before, slack, within=10.0):
    """Waits until no program has more than `slack` descriptors above `before` (by member)."""
    def check():
        return all(descriptors(each) <= count + slack for each, count in before.items() if each.alive())

    def told():
        return "descriptors back: " + ", ".join(f"{each}: {count} -> {descriptors(each)}"
                                                for each, count in before.items() if each.alive())
    until(told, check, within, 0.1)


# ---- models

def random_model(folder, name, **options):
    """A model of random weights made by tools/make-model; options are its flags."""
    path = os.path.join(folder, name)
    command = [sys.executable, os.path.join(ROOT, "tools", "make-model"), "--out", path]
    for key, value in options.items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


@contextlib.contextmanager
def stopped(member):
    """SIGSTOP for the length of a with block."""
    import signal
    member.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        member.signal(signal.SIGCONT)


def main():
    for role in clusters.ROLES:
        try:
            Cluster("/", BUILD).program(role)
        except Problem as problem:
            sys.exit(str(problem))
    atexit.register(sys.stdout.flush)
    unittest.main(verbosity=2)
