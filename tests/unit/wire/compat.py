#!/usr/bin/python3
"""Our messages through an independent implementation of protobuf.

compat.py WIRE_ECHO STUBS: python3-protobuf fills messages at random (from a fixed seed) and writes them, WIRE_ECHO decodes
them into Baton's structs and encodes those again, Python parses the result, which must be equal.
"""
import random
import subprocess
import sys

echo, stubs = sys.argv[1], sys.argv[2]
sys.path.insert(0, stubs)
from baton.v1 import inference_pb2 as public, peer_pb2 as peer, registry_pb2 as registry, worker_pb2 as worker

rng = random.Random(20240601)
process = subprocess.Popen([echo], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
checked = 0


def ask(kind, data):
    process.stdin.write(f"{kind} {data.hex()}\n")
    process.stdin.flush()
    status, _, rest = process.stdout.readline().rstrip("\n").partition(" ")
    return status, rest


def same(message):
    global checked
    kind = type(message).__name__
    status, rest = ask(kind, message.SerializeToString())
    assert status == "ok", f"{kind}: {status} {rest}\n{message}"
    back = type(message).FromString(bytes.fromhex(rest))
    assert back == message, f"{kind} came back different\nsent:\n{message}\ngot:\n{back}"
    checked += 1


def refused(message, sentence):
    global checked
    data = message if isinstance(message, bytes) else message.SerializeToString()
    kind = "GenerateRequest" if isinstance(message, bytes) else type(message).__name__
    status, rest = ask(kind, data)
    assert status == "invalid" and sentence in rest, f"{kind}: {status} {rest!r}, expected {sentence!r}"
    checked += 1


def u32(): return rng.choice([0, 1, 127, 128, 70000, 2**31, 2**32 - 1, rng.getrandbits(32)])
def u64(): return rng.choice([0, 1, 2**32, 2**63, 2**64 - 1, rng.getrandbits(64)])
def some_id(): return rng.randint(1, 2**64 - 1)
def f32(low, high): return rng.randint(int(low * 64), int(high * 64)) / 64  # exact in 32 bits
def label(least=0, most=63): return "".join(rng.choice("abcXYZ019-_.:/") for _ in range(rng.randint(least, most)))
def blabel(least=0, most=63): return bytes(rng.randint(1, 255) for _ in range(rng.randint(least, most)))
def text(): return "".join(rng.choice(["a", " ", "\n", "\0", "é", "€", "🎼", "\U0010ffff"]) for _ in range(rng.randint(1, 60)))
def maybe(): return rng.random() < 0.5


def sampling():
    s = public.Sampling(frequency_penalty=f32(-2, 2), presence_penalty=f32(-2, 2), ignore_eos=maybe(), min_tokens=u32())
    if maybe(): s.temperature = f32(0, 2)
    if maybe(): s.top_p = f32(0, 1)
    if maybe(): s.top_k = rng.choice([-1, 0, 1, 40, -2**31, 2**31 - 1])
    if maybe(): s.min_p = f32(0, 1)
    if maybe(): s.repetition_penalty = f32(0, 2)
    if maybe(): s.seed = u64()
    if maybe(): s.logprobs = u32()
    s.stop.extend(text().replace("\0", "") + "." for _ in range(rng.randint(0, 16)))
    s.stop_token_ids.extend(u32() for _ in range(rng.randint(0, 16)))
    for _ in range(rng.randint(0, 64)):
        s.logit_bias[u32()] = f32(-100, 100)
    return s


def request():
    r = public.GenerateRequest(model=label(1), max_tokens=u32(), request_id=label(), session_id=label(), cache_salt=label(),
                               sampling=sampling(), n=u32())
    if maybe():
        r.prompt = text()
    else:
        r.token_ids.ids.extend(u32() for _ in range(rng.randint(1, 200)))
    return r


def reply():
    r = public.GenerateReply(token_ids=[u32() for _ in range(rng.randint(0, 20))], text=rng.choice(["", text()]),
                             finish_reason=rng.choice(["", "stop", "length", "abort", "error"]), request_id=label(), index=u32())
    if maybe():
        for _ in r.token_ids:
            k = rng.randint(0, 20)
            r.logprobs.add(logprob=f32(-50, 0), top_token_ids=[u32() for _ in range(k)], top_logprobs=[f32(-50, 0) for _ in range(k)])
    if maybe():
        r.usage.CopyFrom(public.Usage(prompt_tokens=u32(), cached_tokens=u32(), completion_tokens=u32(), seed=u64()))
    if maybe():
        r.trace.CopyFrom(public.Trace(prefill_worker=label(), decode_worker=label(), kv_bytes=u64(), attempts=u32(),
                                      queue_ms=f32(0, 999), ttft_ms=f32(0, 999), total_ms=f32(0, 999)))
        if maybe():
            r.trace.kv_exposed_ms = f32(0, 9)
    return r


def salt(): return bytes(rng.randint(1, 255) for _ in range(rng.choice([0, 16])))


def peer_sampling():
    n = rng.randint(0, 64)
    return peer.Sampling(seed=u64(), temperature=f32(0, 2), top_p=f32(0.5, 1), min_p=f32(0, 1), top_k=rng.choice([-1, 1, 50]),
                         frequency_penalty=f32(-2, 2), presence_penalty=f32(-2, 2), repetition_penalty=f32(0.5, 2), min_tokens=u32(),
                         stop_tokens=[u32() for _ in range(rng.randint(0, 16))], bias_tokens=[u32() for _ in range(n)],
                         biases=[f32(-100, 100) for _ in range(n)], ignore_eos=maybe(), logprobs=rng.randint(0, 21))


def peer_tokens(n):
    t = peer.Tokens(attempts=[some_id() for _ in range(n)], tokens=[u32() for _ in range(n)])
    if n and maybe():
        t.logprobs.extend(f32(-50, 0) for _ in range(n))
        t.top_counts.extend(rng.randint(0, 21) for _ in range(n))
        for count in t.top_counts:
            t.top_tokens.extend(u32() for _ in range(count - 1))
            t.top_logprobs.extend(f32(-50, 0) for _ in range(count - 1))
    return t


def envelopes():
    tokens = [u32() for _ in range(rng.randint(1, 100))]
    n = rng.randint(0, 50)
    cause, outcome = rng.randint(0, 32), rng.randint(1, 3)
    refusal = peer.Refusal(attempt=some_id(), cause=cause, retry_after_ms=u32())
    slot = peer.SlotCause(slot=some_id(), cause=cause)
    ids = peer.Ids(ids=[some_id() for _ in range(n)])
    return dict(
        hello=peer.Hello(incarnation=some_id(), session=u64(), layout_high=u64(), layout_low=u64(), protocol=u32(),
                         role=rng.randint(1, 3), id=blabel(), numerics=blabel(0, 31), is_draining=maybe(), newest=u32()),
        beat=peer.Beat(progress=u64(), entries=u32(), pages_free=u32(), backlog_ms=u32(), is_draining=maybe(),
                       backlog_tokens=u32()),
        audit=ids, unknown=ids,
        admit=peer.Admit(attempt=some_id(), tokens=tokens, output_first=rng.randint(1, len(tokens)), max_new=1 + u32() % 9999,
                         deadline_ms=u32(), sampling=peer_sampling(), local_max=u32(), label=blabel(), salt=salt()),
        admitted=peer.Admitted(attempt=some_id(), slot=some_id(), key=u64(), cached=u32(), is_local=maybe()),
        rejected=refusal, busy=refusal,
        prefill=peer.Prefill(attempt=some_id(), tokens=tokens, **{"from": rng.randrange(len(tokens))}, slot=some_id(), key=u64(),
                             decode=some_id(), address=blabel(1, 127), deadline_ms=u32(), label=blabel(), salt=salt()),
        queued=peer.Queued(attempt=some_id(), backlog_ms=u32()),
        prefill_end=peer.PrefillEnd(attempt=some_id(), outcome=outcome, cause=cause, bytes=u64(), cached=u32(),
                                    exposed_us=u64()),
        open=peer.Open(slot=some_id(), key=u64(), **{"from": 3}, end=rng.randint(3, 2**32 - 1), bytes=u64()),
        accept=peer.Accept(slot=some_id(), address=blabel(1, 1024)),
        refuse=slot, abort_slot=slot,
        fin=peer.Fin(slot=some_id(), bytes=u64(), cached=u32()),
        commit=peer.Commit(slot=some_id()),
        tokens=peer_tokens(n),
        end=peer.End(attempt=some_id(), outcome=outcome, cause=cause, finish=rng.randint(0, 4),
                     usage=peer.Usage(prompt_tokens=u32(), cached_tokens=u32(), completion_tokens=u32()), kv_bytes=u64()),
        abort=peer.Abort(attempt=some_id(), cause=cause, is_unless_committed=maybe()),
        committed=peer.Committed(attempt=some_id()),
        cached=peer.Cached(is_reset=maybe(), removed=[some_id() for _ in range(n)], stored=[some_id() for _ in range(2 * n)]))


def worker_record():
    return registry.WorkerRecord(incarnation=some_id(), role=rng.choice([2, 3]), id=blabel(1), address=blabel(1, 127), model=blabel(),
                                 numerics=blabel(0, 31), layout_high=u64(), layout_low=u64(), tokenizer=u64(), vocab=u32(),
                                 context=u32(), kv_tokens=u32(), page_tokens=u32(), is_draining=maybe(), kv_port=rng.randint(0, 65535),
                                 admin=blabel(0, 127), pid=u32(), started_unix_ms=u64(), version=blabel())


kinds = [field.name for field in peer.Envelope.DESCRIPTOR.fields]
assert set(kinds) == set(envelopes()), "a kind of peer.proto is not tested here"
for _ in range(300):
    same(request())
    same(reply())
    same(rng.choice([public.AbortRequest(request_id=label(1)), public.AbortRequest(session_id=label(1))]))
    same(public.AbortReply(aborted=u32()))
    same(public.TokenizeRequest(model=label(1), text=rng.choice(["", text()]), add_special=maybe()))
    same(public.TokenizeReply(token_ids=[u32() for _ in range(rng.randint(0, 50))], context_tokens=u32()))
    same(public.ListModelsReply(models=[public.Model(name=label(), context_tokens=u32(), vocab=u32(), prefill_workers_ready=u32(),
                                                     decode_workers_ready=u32()) for _ in range(rng.randint(0, 4))]))
    for name, message in envelopes().items():
        same(peer.Envelope(**{name: message}))
    same(worker_record())
    same(worker.DescribeReply(record=worker_record()))
    same(registry.RouterRecord(incarnation=some_id(), id=blabel(1), http=blabel(0, 127), grpc=blabel(0, 127), admin=blabel(0, 127),
                               pid=u32(), started_unix_ms=u64(), version=blabel(), is_draining=maybe()))
    same(worker.FilesRequest(names=[label(1, 60).replace("/", "_").strip(".").encode() or b"x" for _ in range(rng.randint(1, 8))]))
    data = blabel(0, 500)
    same(worker.FileChunk(name=b"config.json", total_bytes=len(data) + 7, offset=7, digest=u64(), data=data, is_last=True))

refused(public.GenerateRequest(model="m"), "there is no input")
refused(public.GenerateRequest(prompt="p"), "model is empty")
refused(public.GenerateRequest(model="m" * 64, prompt="p"), "model has 64 bytes: at most 63")
refused(public.GenerateRequest(model="m", prompt="p", request_id="a\0b"), "request_id contains a NUL")
refused(public.GenerateRequest(model="m", prompt="p", cache_salt="s" * 64), "cache_salt has 64 bytes: at most 63")
refused(public.AbortRequest(), "set request_id or session_id")
refused(public.AbortRequest(session_id=""), "session_id is empty")
refused(b"\x0a\x01m\x12\x04ab\xc3(", "prompt is not valid UTF-8: the byte at offset 2")

process.stdin.close()
assert process.wait(timeout=30) == 0, "wire_echo ended with an error"
print(f"{checked} messages are the same in both implementations")
