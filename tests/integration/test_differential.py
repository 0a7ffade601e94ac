#!/usr/bin/python3
"""Two legs equal one: random requests over every public field, on every kind of pair of workers, get the same answer.

One cluster whose router sends every prompt to a prefill worker, if the model has one. The same weights are served under
several names, and a name stands for a kind of place: "one" has a decode worker only, the others have workers of other page
sizes, and several of them. A request is asked at "one" first, alone; what it gets there it must get everywhere else: alone
and among others, cold and from the prefix cache, and when a worker is killed in the middle. Refusals must be equal too.

    BATON_DIFFERENTIAL_SEED=7 BATON_DIFFERENTIAL_REQUESTS=2000 tests/integration/test_differential.py
"""
import collections
import concurrent.futures
import os
import random
import time

from google.protobuf import text_format
from harness import (GOLDEN, Case, Metrics, api, at_rest, client, collect_choices, filler, grpc, main, until)

SEED = int(os.environ.get("BATON_DIFFERENTIAL_SEED") or random.randrange(2 ** 32))
REQUESTS = int(os.environ.get("BATON_DIFFERENTIAL_REQUESTS") or 300)
CONTEXT, VOCAB = 512, 512
NEIGHBOURS = 32

# name -> (page sizes of prefill workers, page sizes of decode workers, arguments of both). "tight" has two contexts of KV and
# reserves nothing: what runs there is retracted and computed again.
PLACES = {
    "one": ([], [16], []),
    "two": ([8], [24], ["--kv-tokens", "524288"]),  # nothing is ever evicted
    "four": ([32, 5], [16, 7], ["--test-step-delay", "2ms", "--step-tokens", "96"]),
    "tight": ([16], [12], ["--kv-tokens", "1024", "--reserve-tokens", "0"]),
    "one-int8": ([], [16], ["--weights", "int8"]),
    "two-int8": ([64], [10], ["--weights", "int8"]),
}

# What a client can see of an answer: everything but the names and times in the trace, and cached_tokens, which is checked
# on its own.
Seen = collections.namedtuple("Seen", "code sentence ids text finish prompt_tokens completion_tokens seed logprobs others")


class Draw:
    """Requests and what they are drawn from."""

    WORDS = ("Once", "upon", "a", "time", "Lily", "the", "dog", "was", "sad", "red", "ball", "caf\u00e9", "\u4f60\u597d",
             "\U0001f600", "\n", "\t", "  ", ".", ",", "\"", "\u0000", "e\u0301", "<s>", "</s>", "123")

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.histories = [filler(120, 7)]  # ids that conversations continue

    def pick(self, *values):
        return self.draw.choice(values)

    def chance(self, share):
        return self.draw.random() < share

    def prompt(self, request):
        kind = self.draw.randrange(6)
        if kind == 0:
            request.prompt = self.pick(*GOLDEN)["prompt"]
        elif kind == 1:
            request.prompt = self.pick("", " ", ".").join(self.pick(*self.WORDS) for _ in range(self.draw.randrange(1, 40)))
        elif kind == 2:
            request.token_ids.ids.extend(self.draw.randrange(VOCAB) for _ in range(self.pick(1, 2, 3, 16, 17, 33, 90, 300)))
        elif kind == 3:  # as long as the context allows, or nearly
            request.token_ids.ids.extend(filler(CONTEXT - self.pick(1, 2, 9, 70), self.draw.randrange(10 ** 6)))
        else:  # the next turn of a conversation
            ids = self.pick(*self.histories)
            ids = ids[:self.draw.randrange(1, len(ids) + 1)] if self.chance(0.3) else ids
            request.token_ids.ids.extend(ids[:400] + filler(self.pick(2, 3, 12, 40), self.draw.randrange(10 ** 6))[1:])

    def sampling(self, sampling):
        if self.chance(0.8):
            sampling.temperature = self.pick(0.0, 0.0, 0.3, 0.8, 1.0, 1.7, 100.0)
        for field, values in (("top_p", (1.0, 0.9, 0.5, 1e-6)), ("top_k", (-1, 0, 1, 2, 40, 600)), ("min_p", (0.0, 0.05, 0.5, 1.0)),
                              ("repetition_penalty", (1.0, 1.2, 0.7, 100.0)), ("frequency_penalty", (0.0, 0.5, -2.0)),
                              ("presence_penalty", (0.0, 2.0, -0.3))):
            if self.chance(0.25):
                setattr(sampling, field, self.pick(*values))
        if self.chance(0.5):
            sampling.seed = self.pick(0, 1, 2 ** 64 - 1, self.draw.randrange(2 ** 64))
        if self.chance(0.2):
            sampling.stop.extend(self.pick((" the",), (".", "\n"), ("a", "b", "c"), ("never said",), ("\u00e9",)))
        if self.chance(0.15):
            sampling.stop_token_ids.extend(self.draw.randrange(VOCAB) for _ in range(self.draw.randrange(1, 17)))
        if self.chance(0.15):
            for _ in range(self.pick(1, 3, 64)):
                sampling.logit_bias[self.draw.randrange(VOCAB)] = self.pick(-100.0, -5.0, 0.5, 3.0, 100.0)
        sampling.ignore_eos = self.chance(0.6)
        if self.chance(0.3):
            sampling.logprobs = self.pick(0, 1, 5, 20)

    def request(self):
        request = api.GenerateRequest(request_id=self.pick("", "r", "x" * 63), session_id=self.pick("", "s"),
                                      cache_salt=self.pick("", "", "", "mine"))
        self.prompt(request)
        request.max_tokens = self.pick(1, 2, 3, 8, 20, 20, 45)
        length = len(request.token_ids.ids) or 60
        request.max_tokens = max(1, min(request.max_tokens, CONTEXT - length))
        self.sampling(request.sampling)
        if self.chance(0.15):
            request.n = self.pick(1, 2, 3, 5)
        if self.chance(0.2):
            request.sampling.min_tokens = self.draw.randrange(request.max_tokens + 1)
        return request

    def spoiled(self):
        """One that is refused, or whose answer is an error."""
        request = self.request()
        request.max_tokens = max(request.max_tokens, 2)
        kind = self.draw.randrange(11)
        if kind == 0:
            request.max_tokens = self.pick(0, CONTEXT, 2 ** 32 - 1)
        elif kind == 1:
            request.token_ids.ids.append(self.pick(VOCAB, 2 ** 32 - 1))
        elif kind == 2:
            request.token_ids.ids.extend(filler(CONTEXT + 1))
        elif kind == 3:
            setattr(request.sampling, *self.pick(("temperature", -1.0), ("top_p", 0.0), ("top_k", -2), ("min_p", 1.5),
                                                 ("repetition_penalty", 0.0), ("frequency_penalty", float("nan"))))
        elif kind == 4:
            request.sampling.stop.append(self.pick("", "x" * 1025))
        elif kind == 5:
            request.sampling.stop_token_ids.append(VOCAB)
        elif kind == 6:
            request.sampling.min_tokens = request.max_tokens + 1
        elif kind == 7:
            request.sampling.logit_bias[self.pick(1, VOCAB)] = 101.0
        elif kind == 8:
            request.sampling.logprobs = self.pick(21, 2 ** 32 - 1)
        elif kind == 9:
            request.n = self.pick(17, 2 ** 32 - 1)
        else:
            request.prompt = ""
        return request

    def stopped(self, request, seen):
        """The same request with what it said as a stop: strings from anywhere in the text, so also across tokens."""
        again = api.GenerateRequest()
        again.CopyFrom(request)
        again.sampling.seed = seen.seed
        if seen.text and self.chance(0.8):
            first = self.draw.randrange(len(seen.text))
            del again.sampling.stop[14:]
            again.sampling.stop.append(seen.text[first:first + self.pick(1, 2, 3, 7, 30)])
        else:
            del again.sampling.stop_token_ids[14:]
            again.sampling.stop_token_ids.append(self.pick(*seen.ids))
        return again


def told(request):
    return text_format.MessageToString(request, as_one_line=True)


class Cached:
    """What a worker that serves one request at a time has in its prefix cache."""

    def __init__(self, page_tokens):
        self.page_tokens = page_tokens
        self.pages = set()

    def expected(self, salt, ids):
        """Tokens of whole pages from the first on; the last token of a prompt is always computed."""
        count = 0
        while count + self.page_tokens <= len(ids) - 1 and (salt, *ids[:count + self.page_tokens]) in self.pages:
            count += self.page_tokens
        return count

    def keep(self, salt, ids):
        for end in range(self.page_tokens, len(ids) + 1, self.page_tokens):
            self.pages.add((salt, *ids[:end]))


class Differential(Case):
    def setUp(self):
        self.made = self.cluster(0, 0, routers=1, arguments={"router": ["--disaggregate-above", "0"]})
        self.members = collections.defaultdict(list)
        for name, (prefill, decode, arguments) in PLACES.items():
            for role, sizes in (("prefill", prefill), ("decode", decode)):
                for index, size in enumerate(sizes):
                    given = [word for flag, value in zip(arguments[::2], arguments[1::2])
                             for word in (flag, value) if self.made.knows(role, flag[2:])]
                    self.members[name].append(self.made.start_program(role, f"{role}-{name}-{index + 1}", arguments=[
                        "--served-model-name", name, "--page-tokens", str(size), *given]))
        self.made.wait_ready([member for members in self.members.values() for member in members])
        self.client = client(self.made)
        self.addCleanup(self.client.close)
        until("every model has its workers", lambda: {
            model.name: (model.prefill_workers_ready, model.decode_workers_ready)
            for model in self.client.stub.ListModels(api.ListModelsRequest(), timeout=5).models} == {
                name: (len(prefill), len(decode)) for name, (prefill, decode, _) in PLACES.items()}, 10)
        self.asked = 0
        self.traces = collections.defaultdict(list)

    def ask(self, request, name, seed=None):
        """(what a client sees, cached tokens)"""
        request = api.GenerateRequest.FromString(request.SerializeToString())
        request.model = name
        if seed is not None:
            request.sampling.seed = seed
        self.asked += 1
        try:
            if request.n > 1:
                (answer, *others), usage, trace = collect_choices(self.client.stream(request, 120))
                self.assertEqual(len(others), request.n - 1)
            else:
                answer, others = self.client.generate(request, 120), []
                usage, trace = answer.usage, answer.trace
        except grpc.RpcError as error:
            return Seen(error.code(), (error.details() or "").replace(f'"{name}"', "MODEL"), [], "", "", 0, 0, 0, [], []), 0
        self.traces[name].append(trace)
        return Seen(grpc.StatusCode.OK, "", answer.ids, answer.text, answer.finish, usage.prompt_tokens, usage.completion_tokens,
                    usage.seed, answer.logprobs,
                    [(each.ids, each.text, each.finish, each.logprobs) for each in others]), usage.cached_tokens

    def same(self, wanted, found, request, where):
        for field in Seen._fields:
            if getattr(wanted, field) != getattr(found, field):
                self.fail(f"{where}: {field} is {getattr(found, field)!r}, not {getattr(wanted, field)!r}, with "
                          f"BATON_DIFFERENTIAL_SEED={SEED} BATON_DIFFERENTIAL_REQUESTS={REQUESTS}; the request: {told(request)}")

    def ids_of(self, request, name):
        if request.WhichOneof("input") == "token_ids":
            return list(request.token_ids.ids)
        return list(self.client.stub.Tokenize(api.TokenizeRequest(model=name, text=request.prompt, add_special=True),
                                              timeout=10).token_ids)

    def crowd(self, cases, name, order):
        """All of them, NEIGHBOURS at a time."""
        with concurrent.futures.ThreadPoolExecutor(NEIGHBOURS) as pool:
            return list(zip(order, pool.map(lambda index: self.ask(cases[index][0], name, cases[index][1].seed or None), order)))

    def references(self, draw):
        """[(request, what it gets alone on one leg)]; what was said becomes histories and stops of later ones."""
        cases = []
        while len(cases) < REQUESTS:
            if cases and draw.chance(0.3):
                request, seen = draw.pick(*cases)
                if not seen.ids:
                    continue
                request = draw.stopped(request, seen)
            else:
                request = draw.spoiled() if draw.chance(0.1) else draw.request()
            seen, _ = self.ask(request, "one")
            if seen.code == grpc.StatusCode.OK:
                draw.histories.append((self.ids_of(request, "one") + seen.ids)[:CONTEXT - 60])
            cases.append((request, seen))
        return cases

    def test_random_requests_get_the_same_answer_everywhere(self):
        print(f"BATON_DIFFERENTIAL_SEED={SEED} BATON_DIFFERENTIAL_REQUESTS={REQUESTS}")
        draw = Draw(SEED)
        began = time.monotonic()
        cases = self.references(draw)
        codes = collections.Counter(seen.code.name for _, seen in cases)
        finishes = collections.Counter(seen.finish for _, seen in cases)
        print(f"{time.monotonic() - began:.1f} s: references; {dict(codes)}, {dict(finishes)}")

        # Alone on two legs: cold or with what earlier ones left, then the same once more.
        cached, hits = Cached(PLACES["two"][1][0]), 0
        read = Cached(PLACES["two"][0][0])  # by the prefill worker
        for index, (request, wanted) in enumerate(cases[:REQUESTS // 2]):
            ids = self.ids_of(request, "two") if wanted.code == grpc.StatusCode.OK else []
            for turn in ("first", "again"):
                found, tokens = self.ask(request, "two", wanted.seed or None)
                self.same(wanted, found, request, f"two legs, request {index}, {turn}")
                if ids:
                    expected = [cached.expected(request.cache_salt, ids)]
                    if self.traces["two"][-1].prefill_worker:
                        # What neither computed; a stop string may end the answer before that is known.
                        expected = [max(expected[0], read.expected(request.cache_salt, ids))] + (
                            expected if wanted.finish == "stop" else [])
                        read.keep(request.cache_salt, ids[:-1])
                    self.assertIn(tokens, expected, f"cached tokens, {turn}: {told(request)}")
                    hits += tokens > 0
                    # The last token that was generated has no KV.
                    for said in [wanted.ids] + [other[0] for other in wanted.others]:
                        cached.keep(request.cache_salt, (ids + said)[:-1])
        moved = sum(trace.kv_bytes for trace in self.traces["two"])
        legs = collections.Counter(bool(trace.prefill_worker) for trace in self.traces["two"])
        print(f"{time.monotonic() - began:.1f} s: alone on two legs: {legs[True]} with a prefill worker, {legs[False]} "
              f"without, {hits} with cached pages, {moved} bytes of KV moved")
        self.assertGreater(legs[True], REQUESTS // 2)
        self.assertGreater(hits, REQUESTS // 8)

        order = list(range(len(cases)))
        for name in ("one", "two", "four", "tight"):
            draw.draw.shuffle(order)
            for index, (found, _) in self.crowd(cases, name, order):
                self.same(cases[index][1], found, cases[index][0], f"{name}, request {index} among {NEIGHBOURS}")
            print(f"{time.monotonic() - began:.1f} s: among {NEIGHBOURS} at {name}")
        used = {(trace.prefill_worker, trace.decode_worker) for trace in self.traces["four"]}
        self.assertEqual({decode for _, decode in used}, {"decode-four-1", "decode-four-2"})
        self.assertEqual({prefill for prefill, _ in used} - {""}, {"prefill-four-1", "prefill-four-2"})

        # int8 answers otherwise than f32, and the same everywhere.
        rounded = [(request, self.ask(request, "one-int8", wanted.seed or None)[0]) for request, wanted in cases[:REQUESTS // 3]]
        self.assertTrue(any(mine.ids != theirs.ids for (_, mine), (_, theirs) in zip(rounded, cases)))
        for index, (found, _) in self.crowd(rounded, "two-int8", list(range(len(rounded)))):
            self.same(rounded[index][1], found, rounded[index][0], f"int8, request {index}")
        print(f"{time.monotonic() - began:.1f} s: int8")

        self.kill_in_the_middle(draw)
        print(f"{time.monotonic() - began:.1f} s: {self.asked} requests in all")
        at_rest(self.made)
        self.assert_no_faults(self.made)

    def kill_in_the_middle(self, draw):
        """A decode worker and then a prefill worker of two dies while long answers run; and no worker, but their pages."""
        for role, state in (("decode", "running"), ("prefill", "computing")):
            requests = [draw.request() for _ in range(NEIGHBOURS)]
            for request in requests:
                del request.token_ids.ids[CONTEXT - 130:]
                request.max_tokens = 120
                request.n = 0
                request.sampling.min_tokens = 60
            order = range(len(requests))
            cases = [(requests[index], seen) for index, (seen, _) in self.crowd([(each, Seen._make([0] * len(Seen._fields))) for each in requests],
                                                                             "one", order)]
            victim = next(member for member in self.members["four"] if member.role == role)
            before = len(self.traces["four"])
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                running = pool.submit(self.crowd, cases, "four", order)
                until(f"{victim} is in the middle", lambda: running.done() or Metrics(victim).sum(
                    "baton_entries", state=state) >= 4, 20, 0.002)
                victim.kill()
                for index, (found, _) in running.result():
                    self.same(cases[index][1], found, cases[index][0], f"{role} killed, request {index}")
            for index, (found, _) in self.crowd(cases, "tight", order):
                self.same(cases[index][1], found, cases[index][0], f"retracted, request {index}")
            again = sum(trace.attempts > 1 for trace in self.traces["four"][before:])
            print(f"{victim} killed: {again} of {len(requests)} went on elsewhere")
            if role == "decode":
                self.assertGreater(again, 0, "nothing was in the middle of anything")
            self.made.restart(victim)
            self.made.wait_ready([victim])
        retracted = Metrics(self.members["tight"][-1]).sum("baton_retractions_total")
        print(f"{retracted:.0f} times retracted at tight")
        self.assertGreater(retracted, 0)


if __name__ == "__main__":
    main()
