#!/usr/bin/python3
"""Logprobs: what transformers says, and the same bits under every way of serving. n: each choice is the request alone."""
import concurrent.futures
import json
import os
import signal

import grpc

from harness import (ROOT, Case, Metrics, answers, api, at_rest, choice_seed, client, collect, collect_choices, filler, golden_request,
                     main, make_request, until)

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


class Choices(LogprobsCase):
    """n answers to one prompt."""

    def together(self, each, request, n, timeout=60):
        again = api.GenerateRequest()
        again.CopyFrom(request)
        again.n = n
        return collect_choices(each.stream(again, timeout))

    def alone(self, each, request, n):
        """The same as n requests with the documented seeds."""
        found = []
        for index in range(n):
            again = api.GenerateRequest()
            again.CopyFrom(request)
            again.sampling.seed = choice_seed(request.sampling.seed, index)
            found.append(each.generate(again))
        return found

    def assert_same(self, found, wanted):
        self.assertEqual(len(found), len(wanted))
        for one, other in zip(found, wanted):
            self.assertEqual((one.ids, one.text, one.finish), (other.ids, other.text, other.finish))
            self.assertEqual(one.logprobs, other.logprobs)

    def test_each_choice_is_the_request_alone_and_the_prompt_crosses_once(self):
        made = self.cluster(prefill=1, decode=2, arguments=TWO_LEGS)
        requests = [sampled(0, seed=7, max_tokens=30), sampled(1, seed=2 ** 64 - 1, max_tokens=30, ignore_eos=False, stop=[" the"]),
                    make_request(filler(150, 3), max_tokens=20, temperature=1.0, seed=5, logprobs=0)]
        with client(made) as each:
            self.ready(each)
            for request in requests:
                # Together first: then nothing of the prompt is cached anywhere.
                found, usage, trace = self.together(each, request, 4)
                wanted = self.alone(each, request, 4)
                self.assert_same(found, wanted)
                self.assertGreater(len({tuple(answer.ids) for answer in found}), 1, "choices differ")
                self.assertEqual(usage.prompt_tokens, wanted[0].usage.prompt_tokens)
                self.assertEqual(usage.seed, request.sampling.seed)
            moved = sum(Metrics(member).sum("baton_transfer_bytes_total", direction="received") for member in made.of("decode"))
            long = make_request(filler(150, 4), max_tokens=2, temperature=1.0, seed=5)
            _, _, trace = self.together(each, long, 4)
            again = sum(Metrics(member).sum("baton_transfer_bytes_total", direction="received") for member in made.of("decode"))
            self.assertEqual(again - moved, trace.kv_bytes)
            other = make_request(filler(150, 5), max_tokens=2, temperature=1.0, seed=5)
            self.assertEqual(trace.kv_bytes, each.generate(other).trace.kv_bytes, "as much as one request moves")
        at_rest(made)

    def test_greedy_choices_are_equal_and_one_is_as_none(self):
        made = self.cluster(prefill=0)
        with client(made) as each:
            self.ready(each)
            alone = each.generate(golden_request(0, max_tokens=20))
            one, usage, _ = self.together(each, golden_request(0, max_tokens=20), 1)
            self.assertEqual((one[0].ids, one[0].text), (alone.ids, alone.text))
            found, usage, _ = self.together(each, golden_request(0, max_tokens=20), 16)
            self.assertEqual([answer.ids for answer in found], [alone.ids] * 16)
            self.assertEqual((usage.prompt_tokens, usage.completion_tokens), (alone.usage.prompt_tokens, 320))

    def test_too_many_are_refused_with_their_numbers(self):
        made = self.cluster(prefill=0, arguments={"decode": ["--kv-tokens", "512"], "router": ["--max-requests", "12"]})
        with client(made) as each:
            self.ready(each)
            cases = ((make_request("a", n=17), grpc.StatusCode.INVALID_ARGUMENT, ("n is 17", "at most 16")),
                     (make_request("a", n=2 ** 32 - 1), grpc.StatusCode.INVALID_ARGUMENT, ("n is 4294967295",)),
                     (make_request(filler(20), max_tokens=130, n=4), grpc.StatusCode.INVALID_ARGUMENT,
                      ("prompt (20 tokens) and n (4) x max_tokens (130) are 540 tokens", "512")),
                     (make_request("a", max_tokens=2, n=16), grpc.StatusCode.RESOURCE_EXHAUSTED, ("--max-requests",)))
            for request, wanted, words in cases:
                code, sentence = each.refused(request)
                self.assertEqual(code, wanted, sentence)
                for word in words:
                    self.assertIn(word, sentence)
            found, _, _ = self.together(each, make_request(filler(20), max_tokens=120, ignore_eos=True), 4)
            self.assertEqual([len(answer.ids) for answer in found], [120] * 4)
        at_rest(made)

    def test_a_killed_worker_an_abort_and_a_client_that_leaves(self):
        made = self.cluster(prefill=1, decode=2, arguments={**TWO_LEGS, "decode": ["--test-step-delay", "8"]})
        requests = [sampled(index, seed=900 + index, max_tokens=60) for index in range(4)]
        with client(made) as each, concurrent.futures.ThreadPoolExecutor(8) as pool:
            self.ready(each)
            wanted = list(pool.map(lambda request: self.alone(each, request, 4), requests))

            def started(request, **fields):
                again = api.GenerateRequest(**fields)
                again.MergeFrom(request)
                again.n = 4
                stream = each.stream(again)
                return stream, next(stream)
            # A client that leaves in the middle, and an Abort: at once, for all choices.
            stream, _ = started(requests[0])
            stream.cancel()
            at_rest(made)
            stream, first = started(requests[0], session_id="agent")
            self.assertEqual(each.stub.Abort(api.AbortRequest(session_id="agent"), timeout=5).aborted, 1)
            replies = [first, *stream]
            self.assertEqual({reply.finish_reason for reply in replies if reply.finish_reason}, {"abort"})
            self.assertTrue(replies[-1].HasField("usage"))
            self.assertEqual(replies[-1].usage.completion_tokens, sum(len(reply.token_ids) for reply in replies))
            at_rest(made)
            # A worker dies under all of them.
            streams = [started(request) for request in requests]
            made.of("decode")[0].signal(signal.SIGKILL)
            after = list(pool.map(lambda pair: collect_choices(pair[0], pair[1]), streams))
        self.assertGreater(sum(trace.attempts > 1 for _, _, trace in after), 0, "nobody was on the worker that was killed")
        for (found, _, _), alone in zip(after, wanted):
            self.assert_same(found, alone)
        at_rest(made, programs=[made.of("decode")[1]] + made.routers())


if __name__ == "__main__":
    main()
