#!/usr/bin/python3
"""The recorded greedy answers come out token for token: across two workers, and from one."""
import os

from harness import BUILD, GOLDEN, Case, Metrics, answers, client, filler, main, make_request, random_model, until

DEVICE = ["--device", "cuda", "--device-library", os.path.join(BUILD, "bin", "libbaton_cuda_emulated.so")]


class Golden(Case):
    def check_all(self, made, is_two_legs):
        with client(made) as each:
            until("a first answer", lambda: each.ask("a", max_tokens=1), 15)
            exposed = 0
            for golden in GOLDEN:
                with self.subTest(prompt=golden["prompt"]):
                    answer = each.ask(golden["prompt"], max_tokens=len(golden["greedy_ids"]))
                    exposed += answer.trace.HasField("kv_exposed_ms")
                    self.assertLess(answer.trace.kv_exposed_ms, answer.trace.total_ms)
                    self.assertEqual(answer.ids, golden["greedy_ids"])
                    # greedy_text is a plain decode, stripped; the stream continues the prompt and keeps its space.
                    self.assertEqual(answer.text.strip(), golden["greedy_text"].strip())
                    self.assertEqual(answer.finish, "length")
                    self.assertEqual(answer.usage.prompt_tokens, len(golden["prompt_ids"]))
                    self.assertEqual(answer.trace.attempts, 1)
                    self.assertEqual(answer.trace.prefill_worker, "prefill-1" if is_two_legs else "")
                    self.assertEqual(answer.trace.decode_worker, "decode-1")
                    self.assertEqual(answer.trace.kv_bytes > 0, is_two_legs)
            # An answer that is over before the prefill worker has heard of the Commit does not say.
            self.assertEqual(exposed > 0, is_two_legs)

    def test_two_legs_give_the_recorded_tokens(self):
        made = self.cluster(arguments={"router": ["--disaggregate-above", "0"]})
        self.check_all(made, True)
        decode, prefill = (Metrics(made.of(role)[0]) for role in ("decode", "prefill"))
        moved = decode.sum("baton_transfer_bytes_total", direction="received")
        self.assertGreater(moved, 0)
        self.assertEqual(moved, prefill.sum("baton_transfer_bytes_total", direction="sent"))
        self.assertGreater(prefill.sum("baton_transfer_exposed_seconds_sum"), 0)

    def test_one_leg_gives_the_recorded_tokens(self):
        made = self.cluster(prefill=0)
        self.check_all(made, False)
        self.assertEqual(Metrics(made.of("decode")[0]).sum("baton_transfer_bytes_total"), 0)

    def test_workers_on_a_device_give_the_recorded_tokens(self):
        """Over the emulated device: the KV goes from one device's pool to the other's through both hosts'."""
        made = self.cluster(arguments={"router": ["--disaggregate-above", "0"], "workers": DEVICE})
        self.check_all(made, True)

    def test_int8_weights_give_the_same_tokens_on_one_leg_and_on_two(self):
        self.check_int8([])

    def test_int8_weights_on_a_device_give_the_same_tokens_on_one_leg_and_on_two(self):
        self.check_int8(DEVICE)

    def check_int8(self, device):
        found = []
        for prefill, above in ((1, "0"), (0, "0")):
            made = self.cluster(prefill=prefill, arguments={"router": ["--disaggregate-above", above], "workers": ["--weights", "int8", *device]})
            with client(made) as each:
                until("a first answer", lambda each=each: answers(each, make_request("a", max_tokens=1)), 15)
                found.append([each.ask(golden["prompt"], max_tokens=60) for golden in GOLDEN])
            made.down()
        for two, one, golden in zip(*found, GOLDEN):
            self.assertEqual(two.ids, one.ids)
            self.assertTrue(two.trace.kv_bytes and not one.trace.kv_bytes)
            # Rounded weights answer as the exact ones do for a while.
            self.assertEqual(two.ids[:4], golden["greedy_ids"][:4])

    def test_weights_of_two_kinds_never_meet(self):
        made = self.cluster(prefill=0, arguments={"router": ["--disaggregate-above", "0"]})
        other = [made.start_program("prefill", arguments=["--weights", "int8"])]
        made.wait_ready(other)
        made.wait_met(other)
        with client(made) as each:
            until("an answer", lambda: answers(each, make_request("a", max_tokens=1)), 15)
            for golden in GOLDEN[:2]:
                answer = each.ask(golden["prompt"], max_tokens=20)
                self.assertEqual(answer.ids, golden["greedy_ids"][:20])
                self.assertEqual(answer.trace.prefill_worker, "")

    def test_token_ids_give_what_the_prompt_gives(self):
        made = self.cluster()
        with client(made) as each:
            for golden in GOLDEN:
                answer = until("an answer", lambda ids=golden: each.generate(
                    make_request(ids["prompt_ids"], max_tokens=len(ids["greedy_ids"]))), 15)
                self.assertEqual(answer.ids, golden["greedy_ids"])

    def test_a_prompt_of_32_thousand_tokens_crosses_whole(self):
        model = random_model(self.folder(), "long", hidden=32, layers=1, heads=2, kv_heads=1, ffn=64, context=33000)
        made = self.cluster(model=model)
        token_bytes = 2 * 16 * 4  # K and V of one layer: one head of 16 values in float32
        asked = make_request(filler(32768), max_tokens=8, model="long", ignore_eos=True)
        with client(made) as each:
            until("an answer", lambda: answers(each, make_request(filler(300, 1), max_tokens=1, model="long")), 15)
            before = self.moved(made)
            answer = each.generate(asked, timeout=200)
            self.assertEqual(answer.usage.prompt_tokens, 32768)
            self.assertEqual(answer.trace.attempts, 1)
            self.assertEqual(answer.trace.prefill_worker, "prefill-1")
            self.assertEqual(answer.trace.kv_bytes, 32767 * token_bytes)
            self.assertEqual(self.moved(made), [each + 32767 * token_bytes for each in before])
            again = each.generate(asked, timeout=60)
            self.assertEqual((again.ids, again.trace.kv_bytes), (answer.ids, 0))
            self.assertGreaterEqual(again.usage.cached_tokens, 32768 - 16)
            self.assertEqual(self.moved(made), [each + 32767 * token_bytes for each in before])

    @staticmethod
    def moved(made):
        return [Metrics(made.of(role)[0]).sum("baton_transfer_bytes_total", direction=direction)
                for role, direction in (("prefill", "sent"), ("decode", "received"))]


if __name__ == "__main__":
    main()
