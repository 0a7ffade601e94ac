#!/usr/bin/python3
"""Clients ask for far more tokens than they come to need: a decode worker runs as many as it has pages for, takes pages back
from the youngest when answers outgrow the pool, and every answer is as if it had run alone."""
import concurrent.futures
import json
import random
import threading

from harness import Case, GOLDEN, Metrics, at_rest, client, filler, http_get, main, make_request, until, warm

REQUESTS = 40
ASKED = 400  # tokens that each asks for
POOL = 1024  # tokens of the decode worker: two whole requests
SMALL = ["--kv-tokens", str(POOL), "--test-step-delay", "2ms"]
TWO_LEGS = ["--disaggregate-above", "24"]


def mixed_requests(seed):
    """All ask for ASKED tokens, or do not say. Most stop early; every fifth does not; greedy and seeded, short prompts and longer ones."""
    draw = random.Random(seed)
    requests = []
    for index in range(REQUESTS):
        sampling = {"stop": [draw.choice((".", " the", "\n"))]} if index % 5 else {"ignore_eos": True}
        if index % 2:
            sampling.update(temperature=0.9, seed=draw.randrange(2 ** 64))
        if index % 10 == 5:
            sampling.update(repetition_penalty=1.3, presence_penalty=0.4)
        prompt = GOLDEN[index % 5]["prompt"] if index % 3 else filler(draw.choice((17, 40, 70)), index)
        requests.append(make_request(prompt, max_tokens=0 if index % 4 == 1 else ASKED, request_id=f"long-{index}", **sampling))
    return requests


class Watch:
    """The most that ran at once on a decode worker, and the most that were retracted, by its own metrics."""

    def __init__(self, decode):
        self.decode = decode
        self.running = self.retracted = 0
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)

    def look(self):
        while not self.is_over.wait(0.01):
            metrics = Metrics(self.decode)
            self.running = max(self.running, int(metrics.sum("baton_entries", state="running")))
            self.retracted = max(self.retracted, int(metrics.sum("baton_entries", state="retracted")))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *unused):
        self.is_over.set()
        self.thread.join(10)


class Retract(Case):
    def run_all(self, made, requests, expected):
        decode = made.of("decode")[0]
        with client(made) as each, concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool, Watch(decode) as watch:
            got = list(pool.map(lambda request: each.generate(request, 120), requests))
        for index, (answer, wanted) in enumerate(zip(got, expected)):
            with self.subTest(request=index):
                self.assertEqual((answer.ids, answer.text, answer.finish), (wanted.ids, wanted.text, wanted.finish))
                self.assertEqual(answer.usage.completion_tokens, wanted.usage.completion_tokens)
        at_rest(made)
        self.assert_alive(made)
        self.assert_no_faults(made)
        return watch, Metrics(decode).sum("baton_retractions_total")

    def test_answers_that_outgrow_the_pool_are_as_if_each_had_run_alone(self):
        requests = mixed_requests(3)
        alone = self.cluster(0, 1)
        warm(alone)
        with client(alone) as each:
            expected = [each.generate(request) for request in requests]
            rest = each.ask(filler(500), max_tokens=0, ignore_eos=True)
            self.assertEqual((len(rest.ids), rest.finish), (12, "length"), "without max_tokens: the rest of the context")
        alone.down()
        full = self.cluster(1, 1, arguments={"router": TWO_LEGS, "decode": SMALL + ["--reserve-tokens", "512"]})
        warm(full)
        reserved, none = self.run_all(full, requests, expected)
        full.down()
        made = self.cluster(1, 1, arguments={"router": TWO_LEGS, "decode": SMALL + ["--reserve-tokens", "16", "--test-verify",
                                                                                        "--test-step-delay", "6ms"]})
        warm(made)
        watch, retractions = self.run_all(made, requests, expected)
        metrics = Metrics(made.of("decode")[0])
        again = metrics.sum("baton_tokens_total", kind="recomputed")
        print(f"{REQUESTS} requests of up to {ASKED} tokens in {POOL}: everything reserved, {reserved.running} at once; "
              f"by need, {watch.running} at once, {int(retractions)} retractions, "
              f"at most {watch.retracted} waiting, {int(again)} tokens computed again of "
              f"{int(metrics.sum('baton_tokens_total', kind='generated'))}")
        self.assertEqual(none, 0, "a full reserve retracts nothing")
        self.assertLessEqual(reserved.running, 3)
        self.assertGreater(watch.running, 2 * reserved.running)
        self.assertGreater(retractions, 0)

    def test_those_who_leave_or_are_aborted_while_they_are_retracted_are_gone_at_once(self):
        made = self.cluster(0, 1, arguments={"decode": SMALL + ["--reserve-tokens", "0", "--test-step-delay", "10ms"]})
        warm(made)
        decode = made.of("decode")[0]

        def retracted():
            return int(Metrics(decode).sum("baton_entries", state="retracted"))
        with client(made) as each:
            streams = {}
            for index in range(8):
                streams[f"r-{index}"] = each.stream(make_request(filler(60, index), max_tokens=ASKED, ignore_eos=True,
                                                                 request_id=f"r-{index}"))
            # The page tells whom each waits for; those that were admitted last are the ones that gave way.
            until("several are retracted", lambda: retracted() >= 3, 30)
            entries = decode_entries(decode)
            waiting = [entry for entry in entries if entry["state"] == "retracted"]
            self.assertTrue(all("room for its KV pages" in entry["waits_for"] and entry["pages"] == 0 for entry in waiting))
            eldest = max((entry for entry in entries if entry["state"] == "running"), key=lambda entry: entry["age_ms"])
            self.assertGreaterEqual(eldest["age_ms"], max(entry["age_ms"] for entry in waiting))
            status, body = http_get(decode.address("admin"), "/readyz")
            self.assertEqual((status, body.strip()), (200, "ready"), "it makes progress")
            victim = waiting[-1]["label"]
            streams[victim].cancel()
            until("it is gone", lambda: all(entry["label"] != victim for entry in decode_entries(decode)), 1)
            for stream in streams.values():
                stream.cancel()
        at_rest(made)
        self.assert_no_faults(made)


def decode_entries(decode):
    status, body = http_get(decode.address("admin"), "/debug/entries")
    assert status == 200, body
    return json.loads(body)["entries"]


if __name__ == "__main__":
    main()
