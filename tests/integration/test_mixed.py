#!/usr/bin/python3
"""Same tokens, always: 64 mixed requests at once on two prefill and two decode workers equal their serial answers."""
import concurrent.futures
import random

from harness import GOLDEN, Case, at_rest, client, filler, main, make_request, warm

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


if __name__ == "__main__":
    main()
