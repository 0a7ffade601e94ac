#!/usr/bin/python3
"""Logprobs: what transformers says, and the same bits under every way of serving."""
import concurrent.futures
import json
import os
import signal

from harness import ROOT, Case, answers, at_rest, client, collect, golden_request, main, make_request, until

TOLERANCE = 2e-4  # of a logprob beside transformers: tools/golden/README.md
with open(os.path.join(ROOT, "tests", "data", "golden", "stories260k.json"), encoding="utf-8") as file:
    STORIES = json.load(file)
TWO_LEGS = {"router": ["--disaggregate-above", "0"]}


def sampled(index, seed, **fields):
    """A request whose answer is drawn, with logprobs."""
    fields = {"max_tokens": 60, "temperature": 0.8, "top_p": 0.95, "ignore_eos": True, "logprobs": 4, **fields}
    return golden_request(index, seed=seed, **fields)


class LogprobsCase(Case):
    def ready(self, each):
        until("a first answer", lambda: answers(each, make_request("a", max_tokens=1)), 20)


class Golden(LogprobsCase):
    def test_logprobs_are_those_of_the_reference_on_two_legs_and_the_same_bits_on_one(self):
        found = []
        for prefill, arguments in ((1, TWO_LEGS), (0, {})):
            made = self.cluster(prefill=prefill, arguments=arguments)
            with client(made) as each:
                self.ready(each)
                found.append([each.generate(golden_request(index, max_tokens=40, logprobs=5)) for index in range(5)])
                plain = each.generate(golden_request(0, max_tokens=5))
                self.assertEqual(plain.logprobs, [])
                chosen = each.generate(golden_request(0, max_tokens=5, logprobs=0))
                self.assertEqual([each.top for each in chosen.logprobs], [()] * 5)
                self.assertEqual([each.logprob for each in chosen.logprobs],
                                 [each.logprob for each in found[-1][0].logprobs[:5]])
                most = each.generate(golden_request(0, max_tokens=5, logprobs=20))
                self.assertEqual([len(each.top) for each in most.logprobs], [20] * 5)
                self.assertEqual([each.top[:5] for each in most.logprobs], [each.top for each in found[-1][0].logprobs[:5]])
            made.down()
        for two, one, story in zip(*found, STORIES):
            self.assertEqual(two.ids, story["greedy_ids"][:40])
            self.assertEqual(two.ids, one.ids)
            self.assertEqual(two.logprobs, one.logprobs)
            self.assertEqual(len(two.logprobs), 40)
            for token, reference, each in zip(two.ids, story["greedy_logprobs"], two.logprobs):
                self.assertAlmostEqual(each.logprob, reference, delta=TOLERANCE)
                self.assertEqual(each.top[0], (token, each.logprob), "greedy takes the likeliest")
                self.assertEqual(sorted(each.top, key=lambda top: -top[1]), list(each.top))
            for references, each in zip(story["top_logprobs"], two.logprobs):
                for reference, (_, logprob) in zip(references, each.top):
                    self.assertAlmostEqual(logprob, reference, delta=TOLERANCE)

    def test_biases_and_penalties_change_the_choice_and_not_the_logprobs(self):
        made = self.cluster(prefill=0)
        with client(made) as each:
            self.ready(each)
            plain = each.generate(golden_request(0, max_tokens=1, logprobs=20))
            last, logprob = plain.logprobs[0].top[-1]
            biased = each.generate(golden_request(0, max_tokens=1, logprobs=20, logit_bias={last: 100.0}, frequency_penalty=1.0))
            self.assertEqual(biased.ids, [last])
            self.assertEqual(biased.logprobs[0].logprob, logprob)
            self.assertEqual(biased.logprobs[0].top, plain.logprobs[0].top)

    def test_a_stop_string_takes_logprobs_and_tokens_together(self):
        made = self.cluster(prefill=0)
        with client(made) as each:
            self.ready(each)
            whole = each.generate(golden_request(0, max_tokens=60, logprobs=3))
            word = whole.text.split()[8]
            cut = each.generate(golden_request(0, max_tokens=60, logprobs=3, stop=[" " + word]))
            self.assertEqual(cut.finish, "stop")
            self.assertLess(len(cut.ids), len(whole.ids))
            self.assertEqual(cut.ids, whole.ids[:len(cut.ids)])
            self.assertEqual(cut.logprobs, whole.logprobs[:len(cut.ids)])


class Same(LogprobsCase):
    def test_beside_others_and_over_a_killed_worker_they_are_the_same_bits(self):
        made = self.cluster(prefill=1, decode=2, arguments={**TWO_LEGS, "decode": ["--test-step-delay", "5"]})
        requests = [sampled(index % 5, seed=100 + index) for index in range(8)]
        with client(made) as each, concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
            self.ready(each)
            alone = [each.generate(request) for request in requests]
            for answer in alone:
                self.assertEqual(len(answer.logprobs), 60)
            self.assertEqual([(answer.ids, answer.logprobs) for answer in pool.map(each.generate, requests)],
                             [(answer.ids, answer.logprobs) for answer in alone])
            streams = [each.stream(request) for request in requests]
            first = [next(stream) for stream in streams]
            made.of("decode")[0].signal(signal.SIGKILL)
            after = list(pool.map(collect, streams, first))
        self.assertGreater(sum(answer.trace.attempts > 1 for answer in after), 0, "nobody was on the worker that was killed")
        for answer, wanted in zip(after, alone):
            self.assertEqual(answer.ids, wanted.ids)
            self.assertEqual(answer.logprobs, wanted.logprobs, "neither repeated nor lost nor other bits")
        at_rest(made, programs=[made.of("decode")[1]] + made.routers())


if __name__ == "__main__":
    main()
