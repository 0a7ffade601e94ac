#!/usr/bin/python3
"""The prefix cache as users see it: conversations whose turns come through different routers, salts, restarts, and that
usage says what /metrics says."""
import concurrent.futures

from harness import Case, Metrics, client, filler, main, make_request, until, warm

PAGE = 16  # tokens, the default of --page-tokens


def full(tokens):
    """As many of the tokens as fill pages."""
    return tokens // PAGE * PAGE


def salted(request, salt):
    request.cache_salt = salt
    return request


def total(members, name, **labels):
    return sum(Metrics(member).sum(name, **labels) for member in members)


def cached_blocks(worker):
    """Pages in a worker's prefix index, at rest."""
    return Metrics(worker).sum("baton_pages", state="cached")


class Prefix(Case):
    def views_agree(self, made):
        """Every router knows as many blocks of each kind of worker as these have."""
        wanted = {role: sum(cached_blocks(worker) for worker in made.of(role)) for role in ("decode", "prefill")}
        known = [{role: Metrics(router).sum("baton_prefix_blocks_known", peer_role=role) for role in wanted}
                 for router in made.routers()]
        return all(each == wanted for each in known)

    def test_the_next_turn_finds_the_last_one_through_another_router(self):
        made = self.cluster(2, 2, routers=2, arguments={"router": ["--disaggregate-above", "24"]})
        warm(made)
        before = total(made.routers(), "baton_tokens_total", kind="cached")
        usages = []
        for talk in range(4):
            prompt = filler(70, 50 + talk)
            with client(made, talk % 2) as first, client(made, 1 - talk % 2) as second:
                turn = first.generate(make_request(prompt, max_tokens=45, ignore_eos=True))
                until("both routers know what is cached where", lambda: self.views_agree(made), 5)
                told = prompt + turn.ids + filler(40, 90 + talk)[1:]
                again = second.generate(make_request(told, max_tokens=8, ignore_eos=True))
                cold = first.generate(salted(make_request(told, max_tokens=8, ignore_eos=True), f"tenant-{talk}"))
            usages += [turn.usage, again.usage, cold.usage]
            # The last token of the answer was chosen and never computed; all before it is there, as far as it fills pages.
            self.assertGreaterEqual(again.usage.cached_tokens, full(len(prompt) + 45 - 1))
            self.assertGreater(full(len(prompt) + 45 - 1), len(prompt))
            self.assertEqual(again.trace.decode_worker, turn.trace.decode_worker)
            self.assertEqual(cold.usage.cached_tokens, 0)
            self.assertEqual(again.ids, cold.ids)
        self.assertEqual(total(made.routers(), "baton_tokens_total", kind="cached") - before,
                         sum(each.cached_tokens for each in usages))
        for worker in made.of("decode"):
            metrics = Metrics(worker)
            self.assertLessEqual(metrics.sum("baton_prefix_cache_hit_tokens_total"),
                                 metrics.sum("baton_prefix_cache_query_tokens_total"))
        self.assert_no_faults(made)

    def test_usage_is_what_the_workers_count(self):
        made = self.cluster(1, 1, arguments={"router": ["--disaggregate-above", "24"]})
        [router], [decode], [prefill] = made.routers(), made.of("decode"), made.of("prefill")
        prompt = filler(100, 5)
        with client(made) as each:
            until("an answer", lambda: each.generate(make_request("x", max_tokens=1)), 15)
            cold = each.generate(make_request(prompt, max_tokens=20, ignore_eos=True))
            hits = [Metrics(each).sum("baton_prefix_cache_hit_tokens_total") for each in (decode, prefill)]
            warm_one = each.generate(make_request(prompt, max_tokens=20, ignore_eos=True))
            other = each.generate(salted(make_request(prompt, max_tokens=20, ignore_eos=True), "other"))
            same = each.generate(salted(make_request(prompt, max_tokens=20, ignore_eos=True), "other"))
        self.assertEqual(cold.usage.cached_tokens, 0)
        self.assertEqual(cold.trace.prefill_worker, prefill.id)
        self.assertEqual(warm_one.usage.cached_tokens, full(len(prompt) - 1))
        self.assertEqual(warm_one.trace.prefill_worker, "")  # the rest is too little for two
        self.assertEqual(other.usage.cached_tokens, 0)
        self.assertEqual(same.usage.cached_tokens, full(len(prompt) - 1))
        for each in (warm_one, other, same):
            self.assertEqual(each.ids, cold.ids)
        wanted = 2 * full(len(prompt) - 1)
        self.assertEqual(Metrics(decode).sum("baton_prefix_cache_hit_tokens_total") - hits[0], wanted)
        self.assertEqual(Metrics(prefill).sum("baton_prefix_cache_hit_tokens_total") - hits[1], 0)
        self.assertEqual(Metrics(router).sum("baton_tokens_total", kind="cached"), wanted)

    def test_a_crowd_with_one_beginning_has_it_computed_once(self):
        """Agents of one kind begin alike, and all at once: through a prefill worker, and on one leg."""
        crowd, begin, tail, step = 8, 240, 20, 128
        for above, role, kind in (("24", "prefill", "computed"), ("100000", "decode", "prefilled")):
            # All are there before the second step.
            slow = ["--test-step-delay", "150ms", "--timer-step", "1s", "--step-tokens", str(step)]
            made = self.cluster(1, 1, arguments={"router": ["--disaggregate-above", above], role: slow})
            [worker] = made.of(role)
            prompts = [filler(begin, 6) + filler(tail, 60 + i)[1:] for i in range(crowd)]
            requests = [make_request(prompt, max_tokens=3, ignore_eos=True) for prompt in prompts]
            with client(made) as each, concurrent.futures.ThreadPoolExecutor(crowd) as pool:
                until("an answer", lambda: each.generate(make_request("x", max_tokens=1)), 15)
                before = Metrics(worker).sum("baton_tokens_total", kind=kind)
                answers = list(pool.map(each.generate, requests))
                computed = Metrics(worker).sum("baton_tokens_total", kind=kind) - before
                alone = [each.generate(salted(request, f"alone-{i}")) for i, request in enumerate(requests[:3])]
            self.assertEqual([each.ids for each in answers[:3]], [each.ids for each in alone])
            own = len(prompts[0]) - full(begin) + 64  # for so few nobody waits
            self.assertLessEqual(computed, len(prompts[0]) + (crowd - 1) * own, "the beginning was computed again")
            self.assertGreaterEqual(sum(each.usage.cached_tokens for each in answers), (crowd - 1) * (full(begin) - 64))
            self.assert_no_faults(made)

    def test_a_worker_that_was_restarted_is_known_to_have_nothing(self):
        made = self.cluster(1, 1, arguments={"router": ["--disaggregate-above", "24"]})
        [router], [decode], [prefill] = made.routers(), made.of("decode"), made.of("prefill")
        prompt = filler(100, 6)
        with client(made) as each:
            until("an answer", lambda: each.generate(make_request("x", max_tokens=1)), 15)
            cold = each.generate(make_request(prompt, max_tokens=20, ignore_eos=True))
            until("the router knows what is cached", lambda: self.views_agree(made), 5)
            self.assertGreater(Metrics(router).sum("baton_prefix_blocks_known", peer_role="decode"), 0)
            decode.kill()
            until("the router forgets it",
                  lambda: not Metrics(router).sum("baton_prefix_blocks_known", peer_role="decode"), 10)
            made.restart(decode)
            until("it serves again", lambda: Metrics(router).sum("baton_workers", peer_role="decode", state="live") == 1, 15)
            again = each.generate(make_request(prompt, max_tokens=20, ignore_eos=True))
        self.assertEqual(again.ids, cold.ids)
        self.assertEqual(Metrics(decode).sum("baton_prefix_cache_hit_tokens_total"), 0)
        # What the prefill worker had in its own cache was not computed again by anybody.
        self.assertEqual(again.trace.prefill_worker, prefill.id)
        self.assertEqual(again.usage.cached_tokens, full(len(prompt) - 1))
        self.assertEqual(Metrics(prefill).sum("baton_prefix_cache_hit_tokens_total"), again.usage.cached_tokens)


if __name__ == "__main__":
    main()
