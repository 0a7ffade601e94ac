"""What the figures of this room share: a cluster, its terminals by request, its cost, and the table at the end."""
import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(HERE)), "integration"))
import harness  # noqa: E402
from harness import (BUILD, Metrics, Problem, at_rest, clusters, descriptors, http_get, resident_kib,  # noqa: E402,F401
                     until, warm)

LOAD = os.path.join(BUILD, "bin", "cluster_load")
FAULTS = ("baton_audit_mismatch_total", "baton_ledger_imbalance", "baton_slots_bad_total", "baton_deadline_overrun_seconds")


def arguments(text, **defaults):
    """The options of a script: --name VALUE for each default; its type is the default's."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(value), default=value, help=f"default {value}")
    return parser.parse_args()


class Pinned(clusters.Cluster):
    """A cluster whose programs stay on given processors. pins: role -> as taskset -c takes it; none: on all."""

    own_sessions = False
    pins = {}

    def place(self, id):
        cpus = self.pins.get(id.split("-")[0])
        return clusters.HOST, ["taskset", "-c", cpus] if cpus else []


class Others:
    """The share of the machine's processors that others than a cluster, its clients and we have used, while it is used as
    a with block; also what the host kept."""

    def __init__(self, made):
        self.made = made
        self.share = 0.0

    def ours(self):
        total = 0
        for pid in (*clusters.marked_processes(self.made.state), os.getpid()):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rsplit(")", 1)[1].split()
                total += int(fields[11]) + int(fields[12])
        # Children that have ended: the C clients.
        return total + sum(os.times()[2:4]) * os.sysconf("SC_CLK_TCK")

    def read(self):
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(each) for each in file.readline().split()[1:9]]
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks), self.ours()

    def __enter__(self):
        self.first = self.read()
        return self

    def __exit__(self, *unused):
        busy, total, ours = (now - then for now, then in zip(self.read(), self.first))
        self.share = max(0.0, busy - ours) / max(1, total)


@contextlib.contextmanager
def cluster(prefill, decode, routers=1, router=(), workers=()):
    """A cluster in a temporary folder; when something fails the ends of its logs are printed."""
    if not os.access(LOAD, os.X_OK):
        sys.exit(f"{LOAD} does not exist: build it with 'ninja -C {BUILD} cluster_load router prefill-worker decode-worker', "
                 "or name another build folder in BATON_BUILD")
    folder = tempfile.mkdtemp(prefix="baton-figures-")
    router, workers = list(router), list(workers)
    both = {"router": router, "prefill": ["--threads", "1", *workers], "decode": ["--threads", "1", *workers]}
    made = clusters.Cluster(folder, BUILD, arguments=both, dies_with_us=True)
    made.own_sessions = False
    try:
        made.up(prefill, decode, routers)
        warm(made)
        at_rest(made, 10)
        yield made
    except BaseException:
        for member in made.members:
            if member.role != "etcd":
                print(f"--- {member}, the end of its log:{member.tail(15)}", file=sys.stderr)
        raise
    finally:
        made.down()
        shutil.rmtree(folder, True)


def load(made, mode, *flags, **pipes):
    """A running cluster_load against the first router."""
    return subprocess.Popen([LOAD, mode, "--router", made.routers()[0].address("grpc"), *map(str, flags)],
                            stdout=subprocess.PIPE, text=True, **pipes)


def programs(made):
    return made.routers() + made.workers()


def faults(made):
    """What must be 0 and is not, as sentences."""
    found = []
    for member in programs(made):
        if not member.alive():
            found.append(f"{member} is gone, code {member.code}")
            continue
        metrics = Metrics(member)
        found += [f"{name} of {member} is {metrics.sum(name):g}" for name in FAULTS if metrics.sum(name) != 0]
    return found


def quantile(values, share):
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, int(len(ordered) * share + 0.999999) - 1))]


def slope(points):
    """Least squares: what y grows for one x."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


class Sampler:
    """Calls take() again and again, and once at each end, while it is used as a with block."""

    def __init__(self, every):
        self.every = every
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        while not self.stopping.wait(self.every):
            self.take()

    def __enter__(self):
        self.take()
        self.thread.start()
        return self

    def __exit__(self, *unused):
        self.stopping.set()
        self.thread.join()
        self.take()


class Terminals(Sampler):
    """Collects the terminals of all programs, by request id, while it is used as a with block.

    Always as many at once: a longer answer takes more memory, which would pass for a leak."""

    def __init__(self, made, prefix, every=1.0):
        super().__init__(every)
        self.made, self.prefix = made, prefix
        self.by_label = {}
        self.seen = {}  # program -> terminals_total
        self.missed = 0

    def take(self):
        for member in programs(self.made):
            known = self.seen.get(member.id)
            status, body = http_get(member.address("admin"), "/debug/entries?entries=0&limit=1000" if known is not None
                                    else "/debug/entries?entries=0&limit=0", 5)
            if status != 200:
                continue
            answer = json.loads(body)
            total = answer["terminals_total"]
            if known is not None:
                fresh = total - known
                self.missed += max(0, fresh - len(answer["terminals"]))
                for each in answer["terminals"][:fresh]:
                    if each["label"].startswith(self.prefix):
                        each["program"], each["role"] = member.id, member.role
                        self.by_label.setdefault(each["label"], []).append(each)
            self.seen[member.id] = total


def cpu_seconds(member):
    """Processor time of a program by the names of its threads."""
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    folder = f"/proc/{member.pid}/task"
    for task in os.listdir(folder):
        with contextlib.suppress(OSError):
            with open(f"{folder}/{task}/stat", encoding="ascii", errors="replace") as file:
                name, rest = re.match(r"\d+ \((.*)\) (.*)", file.read(), re.DOTALL).groups()
            fields = rest.split()
            found[name] = found.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / ticks
    return found


class Figures:
    """The table at the end: value beside bound. Exits with 1 if one was missed."""

    def __init__(self, title):
        self.title, self.rows = title, []

    def add(self, what, value, bound=None, passes=None):
        self.rows.append((what, value, bound or "", "" if passes is None else "PASS" if passes else "FAIL"))

    def at_most(self, what, value, bound, unit, judged=True):
        self.add(what, f"{value:.4g} {unit}", f"<= {bound:g} {unit}", value <= bound if judged else None)

    def none(self, what, found):
        """Nothing of the kind may have been found."""
        self.add(what, "none" if not found else f"{len(found)}: {'; '.join(map(str, found[:3]))}", "none", not found)

    def table(self):
        return table([("figure", "measured", "bound", ""), *self.rows])

    def finish(self):
        print(f"\n{self.title}\n")
        self.table()
        sys.exit(1 if any(row[3] == "FAIL" for row in self.rows) else 0)


def markdown(rows, widths):
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() + " |" for row in rows]
    return "\n".join((lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]))


def table(rows):
    """Prints rows as Markdown, in columns; the first is the head. Returns it for a file, without the padding."""
    rows = [[str(cell) for cell in row] for row in rows]
    print(markdown(rows, [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]), flush=True)
    return markdown(rows, [1] * len(rows[0]))


class Footprint(Sampler):
    """Memory and descriptors of every program, sampled while it is used as a with block."""

    def __init__(self, made, count, every=1.0):
        """count(): how much was done so far, the x of the slope."""
        super().__init__(every)
        self.made, self.count = made, count
        self.samples = {each: [] for each in programs(made)}

    def take(self):
        done = self.count()
        for each, samples in self.samples.items():
            samples.append((done, resident_kib(each), descriptors(each)))

    def report(self, figures, unit, bytes_bound, descriptors_bound, judges_memory=True):
        """A line a program; the bounds are for bytes of a unit's slope, and descriptors more at rest than before."""
        rows = [("program", "KiB before", "1/4", "1/2", "3/4", "after", f"bytes a {unit}, 2nd half", "descriptors before",
                 "most", "after")]
        slopes, more = [], []
        for each, samples in self.samples.items():
            grows = slope([(done, kib * 1024) for done, kib, _ in samples[len(samples) // 2:]])
            slopes.append(grows)
            more.append(samples[-1][2] - samples[0][2])
            quarters = [samples[len(samples) * quarter // 4][1] for quarter in (0, 1, 2, 3)]
            rows.append((each, *quarters, samples[-1][1], f"{grows:+.1f}", samples[0][2],
                         max(fds for _, _, fds in samples), samples[-1][2]))
        print()
        table(rows)
        figures.at_most(f"memory: steepest slope of the second half, a {unit}", max(slopes), bytes_bound, "bytes",
                        judges_memory)
        figures.at_most("descriptors: most above before", max(more), descriptors_bound, "")
