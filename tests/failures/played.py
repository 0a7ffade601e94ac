"""Peers that a test plays itself, against real programs: a router or a prefill worker that opens sessions, a worker that
routers find in etcd, and a wire that can fall silent in one direction. So every message can be left out, sent twice or sent
at the wrong moment, which real programs never do.
"""
import fcntl
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures

HERE = os.path.dirname(os.path.abspath(__file__))
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "integration"))
from harness import BUILD, MODEL_DIR, ROOT, clusters, grpc, http_get, until  # noqa: E402


def generated_stubs():
    """The folder of the Python stubs of sessions and records, generated once per build folder and version of the protos."""
    folder = os.path.join(BUILD, "failures-stubs")
    done = os.path.join(folder, "done")
    protos = os.path.join(ROOT, "proto")
    names = [f"baton/v1/{name}.proto" for name in ("peer", "registry")]
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max(os.path.getmtime(os.path.join(protos, name)) for name in names)
        if not os.path.exists(done) or os.path.getmtime(done) < newest:
            subprocess.run(["protoc", f"-I{protos}", f"--python_out={folder}", *names], check=True)
            with open(done, "w", encoding="ascii"):
                pass
    return folder


# The package baton.v1 has no __init__.py: its modules may lie in several folders.
sys.path.insert(0, generated_stubs())
from baton.v1 import peer_pb2 as peer, registry_pb2 as registry  # noqa: E402

ROUTER, PREFILL, DECODE = 1, 2, 3  # enum role
OUTCOME_OK, OUTCOME_ABORTED, OUTCOME_FAILED = 1, 2, 3  # enum outcome
CAUSE_CLIENT_GONE, CAUSE_STEP_FAILED = 2, 22  # enum cause
KINDS = [field.name for field in peer.Envelope.DESCRIPTOR.oneofs_by_name["message"].fields]
METHOD = "/baton.peer.v1.Sessions/Session"
DRAW = int.from_bytes(os.urandom(6), "little") << 16  # incarnations of this process


def incarnation():
    global DRAW  # pylint: disable=global-statement
    DRAW += 1
    return DRAW


def token_bytes():
    """KV bytes of one token of the model of the tests: K and V in every layer, f32."""
    with open(os.path.join(MODEL_DIR, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    head = config["hidden_size"] // config["num_attention_heads"]
    return config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head * 4


class Mail:
    """What arrives on a session: kept, in order, for whoever asks."""

    def __init__(self):
        self.envelopes = []
        self.end = None  # how the session ended, a text
        self.changed = threading.Condition()

    def put(self, envelope):
        with self.changed:
            self.envelopes.append(envelope)
            self.changed.notify_all()

    def close(self, why):
        with self.changed:
            self.end = self.end or why
            self.changed.notify_all()

    def expect(self, *kinds, within=10.0, where=lambda message: True):
        """Takes the first message of one of these kinds (for which `where` is true) out of the mail."""
        deadline = time.monotonic() + within
        with self.changed:
            while True:
                for at, envelope in enumerate(self.envelopes):
                    kind = envelope.WhichOneof("message")
                    if kind in kinds and where(getattr(envelope, kind)):
                        del self.envelopes[at]
                        return getattr(envelope, kind) if len(kinds) == 1 else envelope
                left = deadline - time.monotonic()
                if self.end is not None or left <= 0:
                    had = [each.WhichOneof("message") for each in self.envelopes][-20:]
                    raise AssertionError(f"no {kinds} within {within} s; the session: {self.end or 'lives'}; mail: {had}")
                self.changed.wait(left)

    def has(self, kind, where=lambda message: True):
        with self.changed:
            return any(each.WhichOneof("message") == kind and where(getattr(each, kind)) for each in self.envelopes)

    def wait_end(self, within=10.0):
        deadline = time.monotonic() + within
        with self.changed:
            while self.end is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"the session did not end within {within} s")
                self.changed.wait(left)
            return self.end


class Session(Mail):
    """A session that we open to a worker, as a router or as a prefill worker. Answers each beat while `beats`."""

    def __init__(self, address, role=ROUTER, own=None, layout=None, hello=True, id=b"played"):
        super().__init__()
        self.beats = True
        self.incarnation = own or incarnation()
        self.out = queue.Queue()
        self.channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.call = self.channel.stream_stream(METHOD)(iter(self.out.get, None))
        threading.Thread(target=self.read, daemon=True).start()
        if hello:
            greeting = peer.Hello(incarnation=self.incarnation, session=1, protocol=1, role=role, id=id)
            if layout is not None:
                greeting.layout_high, greeting.layout_low = layout.layout_high, layout.layout_low
                greeting.numerics = layout.numerics
            self.send(hello=greeting)
            self.hello = self.expect("hello")

    def read(self):
        try:
            for data in self.call:
                envelope = peer.Envelope.FromString(data)
                if envelope.WhichOneof("message") != "beat":
                    self.put(envelope)
                elif self.beats:
                    self.send(beat=peer.Beat(progress=1))
            self.close_mail("closed")
        except grpc.RpcError as error:
            self.close_mail(f"{error.code().name}: {error.details()}")

    def close_mail(self, why):
        Mail.close(self, why)

    def send(self, **message):
        self.out.put(peer.Envelope(**message).SerializeToString())

    def send_bytes(self, data):
        self.out.put(data)

    def is_read(self, within=10.0):
        """Waits until all that was said here has been read, or has ended the session: an id that nobody can hold comes
        back as unknown. Returns whether the session lives."""
        nobody = 0xDEAD << 48
        self.send(audit=peer.Ids(ids=[nobody]))
        try:
            self.expect("unknown", within=within, where=lambda message: nobody in message.ids)
        except AssertionError:
            if self.end is None:
                raise
        return self.end is None

    def close(self, why="closed by us"):
        self.call.cancel()
        self.out.put(None)
        self.channel.close()
        Mail.close(self, why)

    # ---- as a router

    def admit(self, attempt, tokens, max_new, local_max=0, deadline_ms=60000):
        self.send(admit=peer.Admit(
            attempt=attempt, tokens=tokens, output_first=len(tokens), max_new=max_new, deadline_ms=deadline_ms,
            local_max=local_max, label=b"played-%d" % attempt,
            sampling=peer.Sampling(top_p=1, top_k=-1, repetition_penalty=1, ignore_eos=True)))

    def reserve(self, attempt, tokens, max_new=8, **more):
        """Admit, and the Admitted that answers it."""
        self.admit(attempt, tokens, max_new, **more)
        return self.expect("admitted", where=lambda message: message.attempt == attempt)

    def prefill(self, admitted, tokens, decode_incarnation, decode_address, deadline_ms=60000):
        self.send(prefill=peer.Prefill(
            attempt=admitted.attempt, tokens=tokens, slot=admitted.slot, key=admitted.key, decode=decode_incarnation,
            address=decode_address.encode(), deadline_ms=deadline_ms, label=b"played-%d" % admitted.attempt,
            **{"from": admitted.cached}))

    def abort(self, attempt, cause=CAUSE_CLIENT_GONE):
        self.send(abort=peer.Abort(attempt=attempt, cause=cause))

    def answer(self, attempt, within=20.0):
        """(tokens, End) of one attempt."""
        end = self.expect("end", within=within, where=lambda message: message.attempt == attempt)
        with self.changed:
            tokens = [token for each in self.envelopes if each.WhichOneof("message") == "tokens"
                      for owner, token in zip(each.tokens.attempts, each.tokens.tokens) if owner == attempt]
        return tokens, end

    # ---- as a prefill worker

    def open(self, admitted, tokens, key=None):
        end = len(tokens) - 1
        self.send(open=peer.Open(slot=admitted.slot, key=admitted.key if key is None else key, end=end,
                                 bytes=(end - admitted.cached) * token_bytes(), **{"from": admitted.cached}))


class Accepted(Mail):
    """A session that somebody opened to a played worker."""

    def __init__(self):
        super().__init__()
        self.out = queue.Queue()
        self.hello = None

    def send(self, **message):
        self.out.put(peer.Envelope(**message).SerializeToString())


class PlayedWorker(grpc.GenericRpcHandler):
    """A worker that we play. `answers`: kind of message -> function(session, message), called on the session's thread;
    everything that arrives is also kept in the session's mail."""

    def __init__(self, role, answers=None, id="played", layout=None):
        self.role, self.answers, self.id, self.layout = role, dict(answers or {}), id, layout
        self.incarnation = incarnation()
        self.sessions = []
        self.beats = True
        self.server = grpc.server(futures.ThreadPoolExecutor(16), handlers=[self])
        self.port = self.server.add_insecure_port(f"{clusters.HOST}:0")
        self.address = f"{clusters.HOST}:{self.port}"
        self.server.start()

    def service(self, details):
        if details.method == METHOD:
            return grpc.stream_stream_rpc_method_handler(self.session)
        return None

    def session(self, requests, context):
        mine = Accepted()
        self.sessions.append(mine)

        def read():
            try:
                for data in requests:
                    envelope = peer.Envelope.FromString(data)
                    kind = envelope.WhichOneof("message")
                    if kind == "hello":
                        mine.hello = envelope.hello
                        layout = self.layout or envelope.hello
                        mine.send(hello=peer.Hello(
                            incarnation=self.incarnation, session=1, protocol=1, role=self.role, id=self.id.encode(),
                            layout_high=layout.layout_high, layout_low=layout.layout_low, numerics=layout.numerics))
                    elif kind == "beat":
                        if self.beats:
                            mine.send(beat=peer.Beat(progress=1, pages_free=1000))
                    else:
                        mine.put(envelope)
                        if kind in self.answers:
                            self.answers[kind](mine, getattr(envelope, kind))
            except grpc.RpcError:
                pass
            except Exception as error:  # its stream was closed under it
                mine.close(f"{type(error).__name__}: {error}")
            mine.close("the peer ended it")
            mine.out.put(None)

        context.add_callback(lambda: (mine.close("the call is over"), mine.out.put(None)))
        threading.Thread(target=read, daemon=True).start()
        yield from iter(mine.out.get, None)

    def register(self, made, like):
        """Puts a record into etcd as if this were a worker of the same model and layout as the member `like`."""
        record = record_of(made, like)
        record.incarnation, record.role, record.id = self.incarnation, self.role, self.id.encode()
        record.address = self.address.encode()
        record.admin = b""
        self.layout = record
        etcdctl(made, "put", f"/baton/{made.name}/workers/{self.incarnation:016x}", data=record.SerializeToString())

    def close(self):
        self.server.stop(0).wait()


def etcdctl(made, *arguments, data=None):
    done = subprocess.run(["etcdctl", "--endpoints", made.etcd_url(), *arguments], input=data,
                          env=dict(os.environ, ETCDCTL_API="3"), capture_output=True, timeout=10, check=False)
    if done.returncode != 0:
        raise AssertionError(f"etcdctl {arguments}: {done.stderr.decode()}")
    return done.stdout


def record_of(made, member):
    """A worker's record in etcd."""
    import base64
    listing = json.loads(etcdctl(made, "get", "--prefix", f"/baton/{made.name}/workers/", "-w", "json"))
    for each in listing.get("kvs", []):
        record = registry.WorkerRecord.FromString(base64.b64decode(each["value"]))
        if record.id == member.id.encode():
            return record
    raise AssertionError(f"{member} is not in etcd")


def serves(member, within=10.0):
    """Waits until a worker that has no etcd serves."""
    until(lambda: f"{member} serves:{member.tail()}",
          lambda: http_get(member.address("admin"), "/debug/entries")[0] == 200, within)
    # Its sessions are served once its gRPC port listens.
    until(f"{member} listens", lambda: listens(member.ports["grpc"]), within)


def listens(port):
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((clusters.HOST, port)) == 0


class Wire:
    """TCP between a client and a program whose address for others is on another loopback host: a program that listens at
    127.0.0.1:PORT and says --advertise HOST is reached through HOST:PORT, which is this wire. Either direction can be made
    to swallow what it carries while both connections stay up."""

    def __init__(self, host, port):
        self.swallows = {"to": False, "from": False}  # towards the program, and from it
        self.swallowed = 0
        self.peers = []
        self.listener = socket.create_server((host, port))
        self.target = (clusters.HOST, port)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.target, 5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self.peers += [near, far]
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink, way in ((near, far, "to"), (far, near, "from")):
                threading.Thread(target=self.carry, args=(source, sink, way), daemon=True).start()

    def carry(self, source, sink, way):
        try:
            while True:
                data = source.recv(65536)
                if not data:
                    break
                if self.swallows[way]:
                    self.swallowed += len(data)
                else:
                    sink.sendall(data)
        except OSError:
            pass
        for each in (source, sink):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self):
        for each in [self.listener] + self.peers:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            each.close()
