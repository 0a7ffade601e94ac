#!/usr/bin/python3
"""The recorded greedy answers come out token for token: across two workers, and from one."""
from harness import GOLDEN, Case, Metrics, client, main, make_request, until


class Golden(Case):
    def check_all(self, made, is_two_legs):
        with client(made) as each:
            until("a first answer", lambda: each.ask("a", max_tokens=1), 15)
            for golden in GOLDEN:
                with self.subTest(prompt=golden["prompt"]):
                    answer = each.ask(golden["prompt"], max_tokens=len(golden["greedy_ids"]))
                    self.assertEqual(answer.ids, golden["greedy_ids"])
                    # greedy_text is a plain decode, stripped; the stream continues the prompt and keeps its space.
                    self.assertEqual(answer.text.strip(), golden["greedy_text"].strip())
                    self.assertEqual(answer.finish, "length")
                    self.assertEqual(answer.usage.prompt_tokens, len(golden["prompt_ids"]))
                    self.assertEqual(answer.trace.attempts, 1)
                    self.assertEqual(answer.trace.prefill_worker, "prefill-1" if is_two_legs else "")
                    self.assertEqual(answer.trace.decode_worker, "decode-1")
                    self.assertEqual(answer.trace.kv_bytes > 0, is_two_legs)

    def test_two_legs_give_the_recorded_tokens(self):
        made = self.cluster(arguments={"router": ["--disaggregate-above", "0"]})
        self.check_all(made, True)
        decode, prefill = (Metrics(made.of(role)[0]) for role in ("decode", "prefill"))
        moved = decode.sum("baton_transfer_bytes_total", direction="received")
        self.assertGreater(moved, 0)
        self.assertEqual(moved, prefill.sum("baton_transfer_bytes_total", direction="sent"))

    def test_one_leg_gives_the_recorded_tokens(self):
        made = self.cluster(prefill=0)
        self.check_all(made, False)
        self.assertEqual(Metrics(made.of("decode")[0]).sum("baton_transfer_bytes_total"), 0)

    def test_token_ids_give_what_the_prompt_gives(self):
        made = self.cluster()
        with client(made) as each:
            for golden in GOLDEN:
                answer = until("an answer", lambda ids=golden: each.generate(
                    make_request(ids["prompt_ids"], max_tokens=len(ids["greedy_ids"]))), 15)
                self.assertEqual(answer.ids, golden["greedy_ids"])


if __name__ == "__main__":
    main()
