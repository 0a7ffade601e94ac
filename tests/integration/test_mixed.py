#!/usr/bin/python3
"""Same tokens, always: 64 mixed requests at once on two prefill and two decode workers equal their serial answers."""
import concurrent.futures
import random

from harness import GOLDEN, Case, Metrics, at_rest, client, filler, main, make_request, until, warm

ROUNDS = 3
REQUESTS = 64


def mixed_requests(seed):
    """Greedy and seeded, short and long, with stop strings, some with a prefix in common."""
    draw = random.Random(seed)
    shared = filler(150, 7)
    requests = []
    for index in range(REQUESTS):
        kind = index % 8
        count = draw.choice((1, 2, 7, 20, 45, 90))
        sampling = {}
        prompt = GOLDEN[draw.randrange(5)]["prompt"]
        if kind in (1, 5):
            sampling = {"temperature": draw.choice((0.7, 1.0, 1.5)), "seed": draw.randrange(2 ** 64), "ignore_eos": True}
        if kind in (2, 6):
            prompt = shared[:draw.choice((33, 64, 100, 150))] + filler(draw.choice((2, 20, 60)), index)[1:]
        if kind == 3:
            prompt = filler(draw.choice((2, 16, 17, 250, 400)), 1000 + index)
        if kind == 4:
            sampling = {"stop": [draw.choice((" the", "Lily", "\n", "."))]}
        if kind == 5:
            sampling.update(top_k=40, top_p=0.9, min_p=0.02)
        if kind == 6:
            sampling = {"temperature": 0.9, "seed": index, "repetition_penalty": 1.2, "frequency_penalty": 0.5,
                        "presence_penalty": -0.3}
        if kind == 7:
            sampling = {"logit_bias": {432: -5.0, 261: 2.5}, "min_tokens": min(3, count)}
        requests.append(make_request(prompt, max_tokens=count, request_id=f"mixed-{index}", **sampling))
    return requests


class Mixed(Case):
    def test_concurrent_answers_equal_serial_ones(self):
        requests = mixed_requests(1)
        alone = self.cluster(0, 1)
        warm(alone)
        with client(alone) as each:
            serial = [each.generate(request) for request in requests]
        alone.down()
        # Pools so small that cached prefixes are evicted, and found, and recomputed.
        made = self.cluster(2, 2, arguments={"router": ["--disaggregate-above", "24"], "decode": ["--kv-tokens", "6144"],
                                             "prefill": ["--kv-tokens", "6144"]})
        warm(made)
        with client(made) as each, concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
            used = set()
            cached = 0
            for round in range(ROUNDS):
                order = list(range(REQUESTS))
                random.Random(round).shuffle(order)
                futures = {index: pool.submit(each.generate, requests[index], 120) for index in order}
                for index, future in futures.items():
                    answer = future.result()
                    with self.subTest(round=round, request=index):
                        self.assertEqual(answer.ids, serial[index].ids)
                        self.assertEqual(answer.text, serial[index].text)
                        self.assertEqual(answer.finish, serial[index].finish)
                    used.add((answer.trace.prefill_worker, answer.trace.decode_worker))
                    cached += answer.usage.cached_tokens
                at_rest(made)
            print(f"pairs used: {sorted(used)}; {cached} prompt tokens came from prefix caches")
            self.assertGreater(cached, 0)
            self.assertEqual({decode for _, decode in used}, {"decode-1", "decode-2"})
            self.assertEqual({prefill for prefill, _ in used}, {"prefill-1", "prefill-2", ""})
        self.assert_no_faults(made)

    def test_a_seed_repeats_and_an_unset_seed_is_told(self):
        made = self.cluster()
        warm(made)
        with client(made) as each:
            first = each.ask(GOLDEN[0]["prompt"], max_tokens=30, temperature=1.0)
            again = each.ask(GOLDEN[0]["prompt"], max_tokens=30, temperature=1.0, seed=first.usage.seed)
            others = [each.ask(GOLDEN[0]["prompt"], max_tokens=30, temperature=1.0, seed=seed).ids for seed in range(5)]
        self.assertEqual(first.ids, again.ids)
        self.assertTrue(any(other != first.ids for other in others), "the seed changes nothing")


class Resume(Case):
    """A worker dies in the middle of everything: the others go on, and no client can tell from its answer."""

    STREAMS = 24

    def requests(self):
        """Long answers whose next token depends on all before: seeds, penalties over the emitted tokens, stop strings in flight."""
        draw = random.Random(5)
        requests = []
        for index in range(self.STREAMS):
            sampling = {"ignore_eos": True}
            if index % 2:
                sampling.update(temperature=1.0, seed=draw.randrange(2 ** 64))
            if index % 3 == 1:
                sampling.update(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4)
            if index % 6 == 5:
                sampling.update(min_tokens=50, logit_bias={432: -4.0, 261: 2.0})
            prompt = GOLDEN[index % 5]["prompt"] if index % 3 else filler(120, index)
            requests.append(make_request(prompt, max_tokens=150, request_id=f"resume-{index}", **sampling))
        return requests

    def die(self, role, state):
        requests = self.requests()
        made = self.cluster(3, 3, arguments={"router": ["--disaggregate-above", "0"],
                                             "prefill": ["--test-step-delay", "30ms", "--step-tokens", "64"],
                                             "decode": ["--test-step-delay", "8ms"]})
        warm(made)
        with client(made) as each, concurrent.futures.ThreadPoolExecutor(self.STREAMS) as pool:
            serial = list(pool.map(lambda request: each.generate(request, 120), requests))
            for index in range(3, self.STREAMS, 4):  # stop strings in flight: words from the middle of what would be said
                text = serial[index].text
                requests[index].sampling.stop.extend([text[len(text) * 2 // 3:][:7], "nothing says this"])
                serial[index] = each.generate(requests[index], 120)
            replies = []
            victim = made.of(role)[0]
            futures = [pool.submit(each.generate, request, 120) for request in requests]
            until(f"{victim} is in the middle", lambda: Metrics(victim).sum("baton_entries", state=state) >= 2, 20, 0.005)
            if role == "decode":
                at = Metrics(victim).sum("baton_tokens_total")
                until("tokens were sent", lambda: Metrics(victim).sum("baton_tokens_total") > at + 20, 20, 0.005)
            victim.kill()
            for index, future in enumerate(futures):
                answer = future.result()
                replies.append(answer)
                with self.subTest(request=index, attempts=answer.trace.attempts):
                    self.assertEqual(answer.ids, serial[index].ids)
                    self.assertEqual(answer.text, serial[index].text)
                    self.assertEqual(answer.finish, serial[index].finish)
                    self.assertEqual(answer.usage.prompt_tokens, serial[index].usage.prompt_tokens)
        resumed = sum(answer.trace.attempts > 1 for answer in replies)
        print(f"{victim} killed: {resumed} of {len(requests)} streams went on elsewhere, all answers as without the fault; "
              f"{sum(answer.finish == 'stop' for answer in serial)} ended by a stop string")
        self.assertGreater(sum(answer.finish == "stop" for answer in serial), 3)
        self.assertGreater(resumed, 0, "nothing was in the middle of anything")
        made.forget(victim)
        at_rest(made)
        self.assert_no_faults(made)

    def test_a_decode_worker_dies_after_tokens_were_sent(self):
        self.die("decode", "running")

    def test_a_prefill_worker_dies_in_mid_transfer(self):
        self.die("prefill", "computing")


if __name__ == "__main__":
    main()
