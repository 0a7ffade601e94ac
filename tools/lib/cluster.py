"""A local cluster of Baton programs with its own etcd: what tools/cluster, tools/demo and the integration tests share.

A cluster is a folder (its state): cluster.json says where everything listens, members.json how each program was
started (so that it can be started again in the same place), logs/ holds one log per program. Every program carries the
folder in its environment, so `down` finds what it started even when the files are gone. Needs Python 3 and nothing else.
"""
import contextlib
import fcntl
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HOST = "127.0.0.1"
MARK = "BATON_LOCAL_CLUSTER"  # in the environment of everything that a cluster started
PROGRAMS = {"router": "router", "prefill": "prefill-worker", "decode": "decode-worker"}
ROLES = tuple(PROGRAMS)
DEFAULT_MODEL = os.path.join(ROOT, "tests", "data", "models", "stories260k")
# Below the range from which the system takes ports of outgoing connections: a program that is killed and started again
# at its old port must find it free.
PORTS = (12000, 31000)
READY_WITHIN_S = 60.0


class Problem(Exception):
    """One or more sentences for a person: what was wrong and what to change."""


def default_build():
    return os.environ.get("BATON_BUILD") or os.path.join(ROOT, "build")


handed_out = set()  # ports that a program of ours may still be about to take


def free_port():
    for _ in range(1000):
        port = random.randrange(*PORTS)
        if port in handed_out:
            continue
        with contextlib.closing(socket.socket()) as probe:
            try:
                probe.bind((HOST, port))
                if len(handed_out) > (PORTS[1] - PORTS[0]) // 4:
                    handed_out.clear()
                handed_out.add(port)
                return port
            except OSError:
                continue
    raise Problem(f"no free TCP port between {PORTS[0]} and {PORTS[1]}")


def http_get(address, path, timeout=2.0, method="GET"):
    """(status, body) of an admin port; (0, why) where nothing answers."""
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as reply:
            return reply.status, reply.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode("utf-8", "replace")
    except OSError as error:
        return 0, str(getattr(error, "reason", error))
    except Exception as error:  # http.client.HTTPException and its kin: a peer that died in mid-answer
        return 0, f"{type(error).__name__}: {error}"


def sessions(admin, timeout=2.0):
    """(id, gRPC port) of each worker that the router at this admin address can use now."""
    status, body = http_get(admin, "/debug/workers", timeout)
    listed = json.loads(body)["workers"] if status == 200 else []
    return {(each["id"], int(each["address"].rpartition(":")[2])) for each in listed if each["listed"] and each["session_live"]}


def process_start(pid):
    """When a process started, in clock ticks; None if it is gone (a zombie is gone). With the pid it names one process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def marked_processes(state):
    """Pids of everything that carries this state folder in its environment."""
    wanted = f"{MARK}={os.path.realpath(state)}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0") and process_start(int(name)) is not None:
                        found.append(int(name))
            except OSError:
                continue
    return found


class Member:
    """One program of a cluster."""

    def __init__(self, record):
        self.role = record["role"]
        self.id = record["id"]
        self.argv = record["argv"]
        self.log = record["log"]
        self.ports = record["ports"]  # name -> number
        self.host = record.get("host", HOST)
        self.enter = record.get("enter", [])  # words before its command line that take it to where it runs
        self.pid = record.get("pid", 0)
        self.start = record.get("start")
        self.process = None  # Popen, where we are its parent
        self.code = None

    def record(self):
        return {name: getattr(self, name) for name in ("role", "id", "argv", "log", "ports", "host", "enter", "pid",
                                                         "start")}

    def address(self, port):
        return f"{self.host}:{self.ports[port]}" if port in self.ports else None

    def alive(self):
        if self.process is not None and self.code is None:
            self.code = self.process.poll()
        return self.pid > 0 and self.start is not None and process_start(self.pid) == self.start

    def signal(self, number):
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout):
        """True once it is gone."""
        deadline = time.monotonic() + timeout
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        if self.process is not None and self.code is None:
            self.code = self.process.wait()
        return True

    def kill(self):
        self.signal(signal.SIGKILL)
        self.wait(10)

    def tail(self, lines=12):
        try:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                last = file.read().splitlines()[-lines:]
        except OSError:
            last = []
        return "".join(f"\n    {line}" for line in last) or "\n    (its log is empty)"

    def ready(self, timeout=2.0):
        """(is ready, why not)."""
        if self.role == "etcd":
            status, body = http_get(self.address("client"), "/health", timeout)
            return status == 200 and '"true"' in body, body.strip()
        status, body = http_get(self.address("admin"), "/readyz", timeout)
        return status == 200, "; ".join(body.split("\n")).strip("; ")

    def __str__(self):
        return self.id if self.role in ("etcd", "router") or self.id.startswith(self.role) else f"{self.role} {self.id}"


class Cluster:
    """All programs of one state folder. Not for several threads."""

    # A session for each program: they outlive the terminal. But Linux gives every session a scheduling group of its own
    # (autogroup), and a busy machine lets a woken thread wait for other groups up to 0.2 s: what measures turns this off.
    own_sessions = True

    def __init__(self, state, build=None, model=None, etcd=None, name="local", arguments=None, say=None,
                 dies_with_us=False):
        self.state = os.path.realpath(state)
        self.build = os.path.abspath(build or default_build())
        self.model = os.path.abspath(model or DEFAULT_MODEL)
        self.external = etcd
        self.name = name
        self.arguments = dict(arguments or {})  # role -> further arguments
        self.members = []
        self.say = say or (lambda text: None)
        self.dies_with_us = dies_with_us
        self.help = {}

    # ---- files

    @property
    def path(self):
        return os.path.join(self.state, "cluster.json")

    @classmethod
    def load(cls, state, say=None):
        """The cluster of a state folder; None if there is none."""
        try:
            with open(os.path.join(state, "members.json"), encoding="utf-8") as file:
                record = json.load(file)
            cluster = cls(state, record["build"], record["model"], record["external"], record["name"],
                          record["arguments"], say)
            cluster.members = [Member(each) for each in record["members"]]
            return cluster
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            cluster = cls(state, say=say)  # damaged: `down` still finds everything by its mark
            return cluster

    def save(self):
        os.makedirs(self.state, exist_ok=True)
        record = {"build": self.build, "model": self.model, "external": self.external, "name": self.name,
                  "arguments": self.arguments, "members": [each.record() for each in self.members]}
        self._write("members.json", record)
        self._write("cluster.json", self.description())

    def _write(self, name, value):
        path = os.path.join(self.state, name)
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
        os.rename(path + ".new", path)

    def description(self):
        return {
            "etcd": self.etcd_url(),
            "routers": [{"id": each.id, "pid": each.pid, "http": each.address("http"), "grpc": each.address("grpc"),
                         "admin": each.address("admin")} for each in self.of("router")],
            "workers": [{"role": each.role, "id": each.id, "pid": each.pid, "grpc": each.address("grpc"),
                         "admin": each.address("admin"), "kv": each.address("kv")}
                        for each in self.members if each.role in ("prefill", "decode")],
        }

    def etcd_url(self):
        if self.external:
            return self.external
        etcd = self.of("etcd")
        return f"http://{etcd[0].address('client')}" if etcd else None

    @contextlib.contextmanager
    def lock(self):
        """One command at a time on one state folder."""
        os.makedirs(self.state, exist_ok=True)
        with open(os.path.join(self.state, "lock"), "w", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self.say(f"waiting for another command that works on {self.state}")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # ---- members

    def of(self, role):
        return [each for each in self.members if each.role == role]

    def routers(self):
        return self.of("router")

    def workers(self):
        return [each for each in self.members if each.role in ("prefill", "decode")]

    def find(self, id):
        for each in self.members:
            if each.id == id:
                return each
        names = ", ".join(each.id for each in self.members) or "none"
        raise Problem(f"no member is called '{id}'; there are: {names}")

    def program(self, role):
        path = os.path.join(self.build, "bin", PROGRAMS[role])
        if not os.access(path, os.X_OK):
            raise Problem(f"{path} does not exist: build it with 'cmake -G Ninja -S {ROOT} -B {self.build} && ninja -C "
                          f"{self.build} router prefill-worker decode-worker' (tools/demo and tools/test do so "
                          "themselves), or name another build folder with --build")
        return path

    def knows(self, role, flag):
        if role not in self.help:
            done = subprocess.run([self.program(role), "--help"], capture_output=True, text=True, timeout=30, check=False)
            if done.returncode != 0:
                raise Problem(f"'{self.program(role)} --help' failed: {(done.stderr or done.stdout).strip()}")
            self.help[role] = done.stdout
        return f"--{flag} " in self.help[role] or f"--{flag}\n" in self.help[role]

    def draw_id(self, role):
        number = 1
        while any(each.id == f"{role}-{number}" for each in self.members):
            number += 1
        return f"{role}-{number}"

    def launch(self, member):
        """Starts the program of a member, appending to its log."""
        os.makedirs(os.path.dirname(member.log), exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        environment[MARK] = self.state
        # The tests: nothing outlives the program that started it, however that ends.
        argv = member.enter + member.argv
        argv = ["setpriv", "--pdeathsig", "KILL", "--"] + argv if self.dies_with_us else argv
        with open(member.log, "ab") as log:
            try:
                member.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                  env=environment, start_new_session=self.own_sessions)
            except FileNotFoundError as error:
                raise Problem(f"{error.filename} cannot be started: it is not there; tools/setup installs what is "
                              "missing") from None
        member.code = None
        member.pid = member.process.pid
        member.start = process_start(member.pid)
        if member not in self.members:
            self.members.append(member)
        self.save()
        return member

    def place(self, id):
        """(address, words before the command line) of a member that is about to be made: another network namespace, say."""
        del id
        return HOST, []

    def _member(self, role, id, argv, ports, place):
        host, enter = place
        return Member({"role": role, "id": id, "argv": argv, "ports": ports, "host": host, "enter": enter,
                       "log": os.path.join(self.state, "logs", id + ".log")})

    def start_etcd(self):
        path = shutil.which("etcd")
        if path is None:
            raise Problem("there is no etcd on PATH: 'tools/setup --only run' installs it, or name one with --etcd URL")
        ports = {"client": free_port(), "peer": free_port()}
        place = self.place("etcd")
        client, peer = (f"http://{place[0]}:{ports[name]}" for name in ("client", "peer"))
        # Nothing here must survive a power cut: without fsync a slow disk does not slow the cluster.
        return self.launch(self._member("etcd", "etcd", [
            path, "--name", "etcd", "--data-dir", os.path.join(self.state, "etcd"), "--logger", "zap",
            "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
            "--initial-advertise-peer-urls", peer, "--initial-cluster", f"etcd={peer}", "--unsafe-no-fsync"], ports,
            place))

    def start_program(self, role, id=None, ports=None, arguments=(), model=None):
        """Starts a router or a worker on free ports (or on `ports`) and does not wait for it."""
        id = id or self.draw_id(role)
        ports = dict(ports or {})
        for name in ("grpc", "admin", "kv", "http"):
            if name not in ports and self.knows(role, name):
                ports[name] = free_port()
        argv = [self.program(role), "--etcd", self.etcd_url() or "http://127.0.0.1:2379", "--cluster", self.name,
                "--id", id]
        place = self.place(id)
        for name, port in ports.items():
            argv += [f"--{name}", str(port) if name == "kv" else f"{place[0]}:{port}"]
        if role != "router":
            argv += ["--model", model or self.model]
        argv += self.arguments.get(role, []) + list(arguments)
        return self.launch(self._member(role, id, argv, ports, place))

    def restart(self, member):
        """Starts a member that is gone again: same id, same addresses, same arguments."""
        if member.alive():
            raise Problem(f"{member.id} is still running")
        return self.launch(member)

    def forget(self, member):
        self.members.remove(member)
        self.save()

    def wait_ready(self, members, within=READY_WITHIN_S):
        """Waits until all are ready, telling what each is waiting for whenever that changes."""
        began = time.monotonic()
        waiting = {each: None for each in members}
        while waiting:
            for member in list(waiting):
                is_alive = member.alive()
                is_ready, why = member.ready()
                if is_ready:
                    where = ", ".join(f"{name} {member.host}:{port}" for name, port in member.ports.items()
                                      if name != "peer")
                    self.say(f"{member} is ready ({where})")
                    del waiting[member]
                    continue
                if not is_alive:
                    code = "" if member.code is None else f" (code {member.code})"
                    raise Problem(f"{member} ended{code} before it was ready; the end of {member.log}:{member.tail()}")
                if member.role == "etcd" or why.startswith(("[Errno", "timed out")) or "refused" in why:
                    why = None  # it does not listen yet
                if why and why != waiting[member]:
                    self.say(f"{member}: {why}")
                    waiting[member] = why
            if waiting and time.monotonic() - began > within:
                told = "".join(f"\n{member}: {why or 'does not answer'}; the end of {member.log}:{member.tail(6)}"
                               for member, why in waiting.items())
                raise Problem(f"not ready after {within:.0f} s: {', '.join(str(each) for each in waiting)}{told}")
            if waiting:
                time.sleep(0.05)

    def wait_met(self, fresh, within=READY_WITHIN_S):
        """Waits until routers and workers of which one is in `fresh` have met. A router is ready as soon as it can serve:
        with one decode worker, even while the prefill workers are still to come."""
        deadline = time.monotonic() + within
        while True:
            # By port too: an id that is back may still be listed with its old one. Not by host: that is what it advertises.
            apart = []
            for router in self.routers():
                met = sessions(router.address("admin"))
                apart += [f"{router} and {each}" for each in self.workers()
                          if (router in fresh or each in fresh) and (each.id, each.ports["grpc"]) not in met and
                          each.ready()[0] and router.ready()[0]]
            if not apart:
                return
            if time.monotonic() > deadline:
                raise Problem(f"no session after {within:.0f} s between {', '.join(apart)}; their logs are in "
                              f"{os.path.join(self.state, 'logs')}")
            time.sleep(0.02)

    def up(self, prefill=1, decode=1, routers=1, within=READY_WITHIN_S):
        """Starts everything and waits until it is ready and has met; takes all down again if it does not come up."""
        for role, count in (("router", routers), ("prefill", prefill), ("decode", decode)):
            if count:
                self.program(role)
        if not os.path.isdir(self.model):
            raise Problem(f"--model {self.model} is not a directory; it must hold config.json, *.safetensors and "
                          "tokenizer.json")
        try:
            if not self.external:
                self.wait_ready([self.start_etcd()], within)
            for role, count in (("decode", decode), ("prefill", prefill), ("router", routers)):
                for _ in range(count):
                    self.start_program(role)
            self.wait_ready(self.workers(), within)
            if decode:
                self.wait_ready(self.routers(), within)
            self.wait_met(self.members, within)
        except BaseException:
            with contextlib.suppress(Problem):
                self.down()
            raise
        return self

    def remove(self, member, within=90.0):
        """SIGTERM (the program drains: what runs is finished), then waits."""
        if not member.alive():
            self.forget(member)
            return False
        member.signal(signal.SIGTERM)
        if not member.wait(within):
            raise Problem(f"{member} still drains after {within:.0f} s; 'tools/cluster kill {member.id}' ends it at once. "
                          f"The end of {member.log}:{member.tail()}")
        self.forget(member)
        return True

    def down(self):
        """Ends everything, politely first. Idempotent; also finds programs that the files do not name."""
        programs = [each for each in self.members if each.role != "etcd" and each.alive()]
        for number, within in ((signal.SIGTERM, 2.0), (signal.SIGTERM, 1.0), (signal.SIGKILL, 10.0)):
            for member in programs:
                member.signal(number)
                member.signal(signal.SIGCONT)
            deadline = time.monotonic() + within
            programs = [each for each in programs if not each.wait(max(0.0, deadline - time.monotonic()))]
        for member in self.of("etcd"):
            member.kill()
        for pid in marked_processes(self.state):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while marked_processes(self.state) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = marked_processes(self.state)
        if left:
            raise Problem(f"processes {left} of {self.state} do not end")
        for member in self.members:
            member.wait(1)  # reaps children of ours
        self.members = []
        shutil.rmtree(os.path.join(self.state, "etcd"), ignore_errors=True)
        for name in ("cluster.json", "members.json"):
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(self.state, name))


# ---- the command

def positive(text):
    value = int(text)
    if not 0 <= value <= 64:
        raise ValueError
    return value


def find_cluster(options, say):
    cluster = Cluster.load(options.dir, say)
    if cluster is None:
        raise Problem(f"no cluster in {options.dir}; 'tools/cluster up' starts one, --dir names another folder")
    return cluster


def command_up(options, say):
    old = Cluster.load(options.dir, say)
    arguments = {"router": shlex.split(options.router_args), "prefill": shlex.split(options.worker_args),
                 "decode": shlex.split(options.worker_args)}
    arguments["prefill"] += shlex.split(options.prefill_args)
    arguments["decode"] += shlex.split(options.decode_args)
    cluster = Cluster(options.dir, options.build, options.model, options.etcd,
                      "local" if not options.etcd else f"local-{random.randrange(16 ** 8):08x}", arguments, say)
    with cluster.lock():
        if old is not None or marked_processes(options.dir):
            if old is not None and any(each.alive() for each in old.members):
                raise Problem(f"a cluster runs in {options.dir} already: 'tools/cluster down' stops it, --dir starts "
                              "another one beside it")
            (old or cluster).down()
        shutil.rmtree(os.path.join(options.dir, "logs"), ignore_errors=True)
        began = time.monotonic()
        cluster.up(options.prefill, options.decode, options.routers, options.within)
        say(f"up in {time.monotonic() - began:.1f} s; addresses are in {cluster.path}")


def command_add(options, say):
    cluster = find_cluster(options, say)
    with cluster.lock():
        known = [each for each in cluster.members if each.id == options.id]
        if known and known[0].role != options.role:
            raise Problem(f"{options.id} is a {known[0].role}, not a {options.role}")
        member = cluster.restart(known[0]) if known else cluster.start_program(options.role, options.id)
        try:
            cluster.wait_ready([member], options.within)
            cluster.wait_met([member], options.within)
        except Problem:
            member.kill()
            if not known:
                cluster.forget(member)
            raise
    print(member.id)


def command_remove(options, say):
    cluster = find_cluster(options, say)
    with cluster.lock():
        candidates = [each for each in cluster.of(options.role) if options.id in (None, each.id)]
        if not candidates:
            there = ", ".join(each.id for each in cluster.of(options.role)) or "none"
            raise Problem(f"there is no {options.role} {options.id or ''} to remove; there are: {there}")
        member = candidates[-1]
        say(f"{member} drains")
        if not cluster.remove(member, options.within):
            say(f"{member} was gone already")
    print(member.id)


def command_kill(options, say):
    cluster = find_cluster(options, say)
    with cluster.lock():
        for member in [cluster.find(id) for id in options.id]:
            member.kill()
            say(f"{member} (pid {member.pid}) is killed; 'tools/cluster add {member.role} {member.id}' starts it again in "
                "the same place" if member.role != "etcd" else "etcd is killed")


def command_down(options, say):
    cluster = Cluster.load(options.dir, say)
    if cluster is None and not marked_processes(options.dir):
        say(f"nothing runs in {options.dir}")
        return
    cluster = cluster or Cluster(options.dir, say=say)
    with cluster.lock():
        count = sum(each.alive() for each in cluster.members)
        cluster.down()
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(options.dir, "lock"))
    say(f"{count} processes ended; logs stay in {os.path.join(options.dir, 'logs')}")


def command_status(options, say):
    del say
    cluster = find_cluster(options, None)
    rows = []
    for member in cluster.members:
        is_alive = member.alive()
        is_ready, why = member.ready() if is_alive else (False, "gone")
        rows.append({"role": member.role, "id": member.id, "pid": member.pid, "alive": is_alive, "ready": is_ready,
                     "why": "" if is_ready else why, "log": member.log,
                     "addresses": {name: member.address(name) for name in member.ports}})
    if options.json:
        print(json.dumps({"state": cluster.state, "model": cluster.model, "etcd": cluster.etcd_url(), "members": rows},
                         indent=1))
        return
    print(f"{'id':<14} {'pid':>8}  {'state':<9} addresses")
    for row in rows:
        state = "ready" if row["ready"] else "not ready" if row["alive"] else "gone"
        where = "  ".join(f"{name} {address}" for name, address in row["addresses"].items() if name != "peer")
        print(f"{row['id']:<14} {row['pid']:>8}  {state:<9} {where}" + (f"  ({row['why']})" if state == "not ready" else ""))


def main(argv=None):
    import argparse
    parser = argparse.ArgumentParser(prog="tools/cluster", description="Starts, changes, shows and stops a local cluster.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--dir", metavar="STATE", help="folder of this cluster (default: 'cluster' in the build folder)")
    common.add_argument("--build", metavar="DIR", default=default_build(), help="build folder (default: build/)")
    common.add_argument("--within", metavar="SECONDS", type=float, default=READY_WITHIN_S,
                        help="how long to wait for programs (default: 60)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name, function, text):
        sub = commands.add_parser(name, parents=[common], help=text, description=text)
        sub.set_defaults(function=function)
        return sub

    up = command("up", command_up, "start a cluster and wait until it is ready")
    up.add_argument("--prefill", metavar="N", type=positive, default=1, help="prefill workers (default: 1; 0: one leg only)")
    up.add_argument("--decode", metavar="M", type=positive, default=1, help="decode workers (default: 1)")
    up.add_argument("--routers", metavar="K", type=positive, default=1, help="routers (default: 1)")
    up.add_argument("--model", metavar="DIR", help="model directory (default: the small model of the tests)")
    up.add_argument("--etcd", metavar="URL", help="use this etcd instead of starting one")
    for role, text in (("router", "every router"), ("worker", "every worker"), ("prefill", "every prefill worker"),
                       ("decode", "every decode worker")):
        up.add_argument(f"--{role}-args", metavar="ARGS", default="",
                        help=f"further arguments of {text}, as one text: --{role}-args='--log-level debug'")
    add = command("add", command_add, "start one more program, or one that is gone again in its old place; prints its id")
    add.add_argument("role", choices=ROLES)
    add.add_argument("id", nargs="?")
    remove = command("remove", command_remove, "drain a program (the newest of its role) away: SIGTERM, then wait")
    remove.add_argument("role", choices=ROLES)
    remove.add_argument("id", nargs="?")
    kill = command("kill", command_kill, "SIGKILL programs, to see what the rest do")
    kill.add_argument("id", nargs="+")
    command("down", command_down, "stop everything; may be repeated, and works on what a crash left")
    status = command("status", command_status, "show what runs")
    status.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    options.dir = os.path.realpath(options.dir or os.path.join(options.build, "cluster"))

    def say(text):
        print(text, file=sys.stderr, flush=True)

    try:
        options.function(options, say)
    except Problem as problem:
        print(f"cluster: {problem}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"cluster: {error.filename or options.dir}: {error.strerror}; is --dir right?", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cluster: interrupted", file=sys.stderr)
        return 130
    return 0
