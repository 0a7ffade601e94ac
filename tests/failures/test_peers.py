#!/usr/bin/python3
"""The catalogue of failures (README.md), the entries where a peer must misbehave to show them: it leaves out a message, sends
one at the wrong moment, dies between two, or says nothing. The workers are real, what misbehaves is played (played.py)."""
import signal
import time

from played import (CAUSE_CLIENT_GONE, DECODE, KINDS, OUTCOME_ABORTED, OUTCOME_FAILED, OUTCOME_OK, PREFILL, ROUTER, PlayedWorker,
                    Session, Wire, incarnation, peer, serves, token_bytes)

from harness import (Case, Metrics, at_rest, descriptors, entries, filler, main, resident_kib, stopped, until)

# A lease of one second, and what must be shorter than it: the bounds below are these plus room for a busy machine.
LEASE_S = 1.0
SHORT = ("--timer-beat", "200ms", "--timer-lease", "1s", "--timer-admit", "500ms", "--timer-open", "700ms", "--timer-stall", "1s")
ROOM_S = 1.5
EVERYTHING = 10000  # local_max: the decode worker prefills it all itself


class Peers(Case):
    def setUp(self):
        self.made = self.cluster(start=False)
        self.made.external = "http://127.0.0.1:1"  # nobody needs etcd here, and nobody waits for it

    def worker(self, role, *arguments):
        member = self.made.start_program(role, arguments=("--test-verify",) + arguments)
        serves(member)
        return member

    def session(self, member, **more):
        each = Session(member.address("grpc"), **more)
        self.addCleanup(each.close)
        return each

    def prefill_session(self, decode, like):
        """A session to a decode worker as a prefill worker of its own layout (`like`: its Hello)."""
        return self.session(decode, role=PREFILL, layout=like)

    def played_decode(self, answers, like):
        each = PlayedWorker(DECODE, answers, layout=like)
        self.addCleanup(each.close)
        return each

    def reference(self, requests, max_new):
        """What a decode worker that does everything itself answers, request by request."""
        alone = self.worker("decode")
        session = self.session(alone)
        answers = []
        for attempt, tokens in enumerate(requests, 1):
            session.admit(attempt, tokens, max_new, EVERYTHING)
            answers.append(session.answer(attempt)[0])
        session.close()
        alone.kill()
        return answers

    def hand_over(self, to_d, to_p, decode, requests, max_new, first=1, **more):
        """Admits all, and asks the prefill worker for all. Returns attempt -> Admitted."""
        admitted = {attempt: to_d.reserve(attempt, tokens, max_new, **more) for attempt, tokens in enumerate(requests, first)}
        for attempt, tokens in enumerate(requests, first):
            to_p.prefill(admitted[attempt], tokens, to_d.hello.incarnation, decode.address("grpc"))
        return admitted

    def is_served(self, session, attempt, tokens=None):
        """The worker does its work: a request of our own is answered."""
        session.admit(attempt, tokens or filler(20, attempt), 4, EVERYTHING)
        answer, end = session.answer(attempt)
        self.assertEqual((end.outcome, len(answer)), (OUTCOME_OK, 4))

    def rest(self, *members, within=2.0):
        return at_rest(self.made, within, list(members))

    @staticmethod
    def count(member, **labels):
        return Metrics(member).sum("baton_entries", **labels)


class Aborts(Peers):
    def test_F03_an_abort_at_the_decode_worker_empties_the_prefill_queue_without_computing_it(self):
        decode = self.worker("decode")
        prefill = self.worker("prefill", "--test-step-delay", "400ms", "--timer-step", "1s", "--timer-backlog", "60s")
        to_d, to_p = self.session(decode), self.session(prefill)
        requests = [filler(300, seed) for seed in range(20)]
        self.hand_over(to_d, to_p, decode, requests, 8)
        until("the hand-shake of all, and a queue", lambda: self.count(decode, state="receiving") == 20 and
              self.count(prefill, state="queued") >= 10, 5)
        before = Metrics(prefill).sum("baton_tokens_total", kind="prefilled")
        for attempt in range(1, 21):
            to_d.abort(attempt)  # the prefill worker hears of it from the decode worker only
        until("the queue is empty", lambda: self.count(prefill) == 0, 2)
        computed = Metrics(prefill).sum("baton_tokens_total", kind="prefilled") - before
        self.assertLessEqual(computed, 2 * 512, "it computed prompts that nobody waits for")
        for attempt in range(1, 21):
            end = to_p.expect("prefill_end", where=lambda each, attempt=attempt: each.attempt == attempt)
            self.assertEqual(end.outcome, OUTCOME_FAILED)
        self.rest(decode, prefill)

    def test_F06_an_abort_at_the_very_first_token_frees_everything(self):
        decode = self.worker("decode", "--test-step-delay", "5ms")
        prefill = self.worker("prefill")
        to_d, to_p = self.session(decode), self.session(prefill)
        for attempt in range(1, 41):
            self.hand_over(to_d, to_p, decode, [filler(60, attempt)], 100, attempt)
            to_d.expect("tokens", where=lambda each, attempt=attempt: attempt in each.attempts)
            to_d.abort(attempt)
            _, end = to_d.answer(attempt)
            self.assertEqual(end.outcome, OUTCOME_ABORTED)
        self.rest(decode, prefill)
        self.assertEqual(Metrics(decode).sum("baton_commits_total"), 40)

    def test_F12_whatever_a_decode_worker_refuses_leaves_the_prefill_worker_within_a_second(self):
        decode = self.worker("decode", "--timer-admit", "200ms", "--timer-open", "300ms", "--kv-tokens", "1024")
        prefill = self.worker("prefill")
        to_d, to_p = self.session(decode), self.session(prefill)
        tokens = filler(100)
        for attempt, (why, request) in enumerate((
                ("larger than its pool", lambda at: to_d.admit(at, filler(510), 600)),
                ("a token outside the vocabulary", lambda at: to_d.admit(at, [1, 5000], 4))), 1):
            with self.subTest(refuses=why):
                request(attempt)
                to_d.expect("rejected", where=lambda each, at=attempt: each.attempt == at)

        def spoil(attempt, spoiler):
            admitted = to_d.reserve(attempt, tokens)
            return spoiler(admitted)

        def ended(admitted):
            to_d.abort(admitted.attempt)
            to_d.answer(admitted.attempt)
            return admitted

        def expired(admitted):
            to_d.expect("end", where=lambda each: each.attempt == admitted.attempt)
            return admitted

        def other(**changes):
            def change(admitted):
                for name, value in changes.items():
                    setattr(admitted, name, value)
                return admitted
            return change
        cases = [("a slot that was never there", other(slot=77 << 32)), ("a wrong key", other(key=12345)),
                 ("another range of tokens", other(cached=16)), ("a request that was aborted", ended),
                 ("a request that waited too long", expired)]
        for attempt, (why, spoiler) in enumerate(cases, 100):
            with self.subTest(refuses=why):
                admitted = spoil(attempt, spoiler)
                to_p.prefill(admitted, tokens, to_d.hello.incarnation, decode.address("grpc"))
                end = to_p.expect("prefill_end", within=1 + ROOM_S, where=lambda each, at=attempt: each.attempt == at)
                self.assertEqual(end.outcome, OUTCOME_FAILED)
                self.rest(prefill, within=1)
        self.rest(decode)
        self.assertEqual(Metrics(prefill).sum("baton_tokens_total", kind="prefilled"), 0, "it computed a refused prompt")


class Frames(Peers):
    """F04: every legal message in every state, from whoever has a right to say it and from whoever has not."""

    TOKENS = filler(64, 3)

    def frames(self, attempt, slot, key, own):
        tokens = self.TOKENS
        ids = peer.Ids(ids=[attempt, slot, 99])
        refusal = peer.Refusal(attempt=attempt, cause=1, retry_after_ms=1)
        return {
            "hello": peer.Hello(incarnation=own, session=2, protocol=1, role=ROUTER, id=b"again"),
            "beat": peer.Beat(progress=7), "audit": ids, "unknown": ids,
            "admit": peer.Admit(attempt=attempt, tokens=tokens, output_first=len(tokens), max_new=4, deadline_ms=5000,
                                sampling=peer.Sampling(top_p=1, top_k=-1, repetition_penalty=1)),
            "admitted": peer.Admitted(attempt=attempt, slot=slot, key=key), "rejected": refusal,
            "prefill": peer.Prefill(attempt=attempt, tokens=tokens, slot=slot, key=key, decode=5, address=b"127.0.0.1:1",
                                    deadline_ms=5000),
            "queued": peer.Queued(attempt=attempt), "busy": refusal,
            "prefill_end": peer.PrefillEnd(attempt=attempt, outcome=OUTCOME_OK, cause=1),
            "open": peer.Open(slot=slot, key=key, end=len(tokens) - 1, bytes=(len(tokens) - 1) * token_bytes()),
            "accept": peer.Accept(slot=slot, address=b"x" * 40), "refuse": peer.SlotCause(slot=slot, cause=1),
            "fin": peer.Fin(slot=slot, bytes=(len(tokens) - 1) * token_bytes()), "commit": peer.Commit(slot=slot),
            "tokens": peer.Tokens(attempts=[attempt], tokens=[5]),
            "end": peer.End(attempt=attempt, outcome=OUTCOME_OK, cause=1, finish=1),
            "abort": peer.Abort(attempt=attempt, cause=CAUSE_CLIENT_GONE), "abort_slot": peer.SlotCause(slot=slot, cause=1),
            "committed": peer.Committed(attempt=attempt), "cached": peer.Cached(is_reset=True, removed=[key], stored=[slot, key])}

    def test_F04_every_message_in_every_state_at_a_decode_worker_costs_only_its_own(self):
        decode = self.worker("decode", "--test-step-delay", "20ms", "--timer-open", "20s")
        canary = self.session(decode)
        self.assertEqual(set(self.frames(1, 1, 1, 1)), set(KINDS), "a message that this test does not know")
        attempt, ended = 1000, {"router": set(), "prefill": set()}
        for state in ("reserved", "receiving", "running", "leaving", "gone"):
            for sender in ("router", "prefill"):
                for kind in KINDS:
                    attempt += 1
                    to_d, from_p = self.session(decode), self.prefill_session(decode, canary.hello)
                    to_d.admit(attempt, self.TOKENS, 400, EVERYTHING if state in ("running", "leaving") else 0)
                    admitted = to_d.expect("admitted")
                    if state == "receiving":
                        from_p.open(admitted, self.TOKENS)
                        from_p.expect("accept")
                    if state in ("leaving", "gone"):
                        to_d.abort(attempt)
                    if state == "gone":
                        to_d.expect("end")
                    own = to_d if sender == "router" else from_p
                    own.send(**{kind: self.frames(attempt, admitted.slot, admitted.key, own.incarnation)[kind]})
                    if not own.is_read():
                        ended[sender].add(kind)
                    to_d.close()
                    from_p.close()
                self.is_served(canary, attempt)
                self.assertTrue(decode.alive(), decode.tail())
            self.rest(decode, within=3)
        self.assertIsNone(canary.end)
        # What the other side of such a session never says ends it; what it may say late, early or twice does not.
        for sender, may in (("router", {"beat", "audit", "unknown", "abort"}),
                            ("prefill", {"beat", "audit", "unknown", "open", "fin", "abort_slot"})):
            self.assertFalse(ended[sender] & may, f"legal messages of a {sender} ended its session")
            self.assertLessEqual({"admitted", "rejected", "queued", "prefill_end", "commit", "tokens", "end", "committed",
                                  "cached"}, ended[sender], f"impossible messages of a {sender} did not end its session")
        metrics = Metrics(decode)
        self.assertEqual((metrics.sum("baton_ledger_imbalance"), metrics.sum("baton_deadline_overrun_seconds")), (0, 0))

    def test_F04_no_message_of_a_stranger_touches_the_request_of_another(self):
        decode = self.worker("decode", "--test-step-delay", "20ms", "--timer-open", "20s")
        canary = self.session(decode)
        for state in ("reserved", "receiving", "running"):
            to_d, from_p = self.session(decode), self.prefill_session(decode, canary.hello)
            to_d.admit(7, self.TOKENS, 300, EVERYTHING if state == "running" else 0)
            admitted = to_d.expect("admitted")
            if state == "receiving":
                from_p.open(admitted, self.TOKENS)
                from_p.expect("accept")
            for role in (ROUTER, PREFILL):
                for kind in KINDS:
                    stranger = self.session(decode, role=role, layout=canary.hello)
                    stranger.send(**{kind: self.frames(7, admitted.slot, admitted.key + 1, stranger.incarnation)[kind]})
                    stranger.is_read()
                    stranger.close()
            self.is_served(canary, 8000 + len(state))
            self.assertIsNone(to_d.end)
            self.assertFalse(to_d.has("end"), f"a stranger ended a request that was {state}")
            mine = [each for each in entries(decode)["entries"] if each["label"] == "played-7"]
            self.assertEqual([each["state"] for each in mine], [state])
            to_d.abort(7)
            _, end = to_d.answer(7)
            self.assertEqual(end.outcome, OUTCOME_ABORTED)
            to_d.close()
            from_p.close()
        self.rest(decode, within=3)

    def test_F04_every_message_in_every_state_at_a_prefill_worker_costs_only_its_own(self):
        decode = self.worker("decode")
        prefill = self.worker("prefill", "--test-step-delay", "20ms")
        to_d = self.session(decode)
        from_p = self.prefill_session(decode, to_d.hello)
        from_p.open(to_d.reserve(1, self.TOKENS), self.TOKENS)
        address = from_p.expect("accept").address  # a link that is there: what comes for unknown slots is dropped
        to_d.abort(1)
        liar = self.played_decode({}, to_d.hello)
        attempt = 1000
        for state in ("queued", "computing", "sent", "leaving", "gone"):
            for sender in ("router", "decode"):
                for kind in KINDS:
                    attempt += 1
                    to_p = self.session(prefill)
                    tokens = filler(64, attempt)
                    slot = attempt << 32
                    admitted = peer.Admitted(attempt=attempt, slot=slot, key=attempt)
                    to_p.prefill(admitted, tokens, liar.incarnation, liar.address)

                    def opened(slot=slot):
                        return [each for each in liar.sessions if each.end is None and
                                each.has("open", lambda message: message.slot == slot)]
                    session = until("its Open", opened, 5, 0.002)[0]
                    if state in ("computing", "sent", "leaving"):
                        session.send(accept=peer.Accept(slot=slot, address=address))
                    if state == "sent":
                        session.expect("fin", where=lambda each, slot=slot: each.slot == slot)
                    if state in ("leaving", "gone"):
                        to_p.abort(attempt)
                    if state == "gone":
                        to_p.expect("prefill_end")
                    own = to_p if sender == "router" else session
                    own.send(**{kind: self.frames(attempt, slot, attempt, liar.incarnation)[kind]})
                    if sender == "router":
                        to_p.is_read()
                    else:
                        # Read, or the end of their session: its answer to an audit.
                        session.send(audit=peer.Ids(ids=[0xDEAD << 48]))
                        until("it is read", lambda session=session: session.end is not None or session.has(
                            "unknown", lambda message: 0xDEAD << 48 in message.ids), 5, 0.002)
                        with session.changed:
                            session.envelopes.clear()
                    to_p.close()
                self.assertTrue(prefill.alive(), prefill.tail())
            self.rest(prefill, within=3)
        to_p = self.session(prefill)
        self.hand_over(to_d, to_p, decode, [filler(80, 1)], 4, 9)
        tokens, end = to_d.answer(9)
        self.assertEqual((end.outcome, len(tokens)), (OUTCOME_OK, 4))
        self.rest(decode, prefill)
        self.assertEqual(Metrics(prefill).sum("baton_deadline_overrun_seconds"), 0)


class Memory(Peers):
    def test_F18_F19_F74_late_bytes_of_an_aborted_request_never_reach_the_next_one_in_its_pages(self):
        # A pool of one request: the second one gets exactly the pages that the first one's bytes are still on the way to.
        decode = self.worker("decode", "--kv-tokens", "256")
        prefill = self.worker("prefill", "--step-tokens", "32", "--max-running", "32", "--test-step-delay", "20ms")
        victims = [filler(240, 100 + turn) for turn in range(8)]
        followers = [filler(240, 200 + turn) for turn in range(8)]
        expected = self.reference(followers, 8)
        to_d, to_p = self.session(decode), self.session(prefill)
        late = 0
        for turn, (victim, follower) in enumerate(zip(victims, followers)):
            attempt = 10 * turn + 1
            self.hand_over(to_d, to_p, decode, [victim], 8, attempt)
            until("it is being received", lambda: self.count(decode, state="receiving") == 1 and
                  Metrics(prefill).sum("baton_own_operations", kind="step") > 0, 5, 0.001)
            with stopped(decode):
                # All of it is under way, none of it has arrived: the decode worker does not read.
                until("everything is sent", lambda: self.count(prefill, state="sent") == 1, 5, 0.005)
                dropped = Metrics  # scraped once it runs again
                to_d.abort(attempt)
                to_d.admit(attempt + 1, follower, 8, EVERYTHING)
                time.sleep(0.05)
            following = attempt + 1
            while True:
                answer = to_d.expect("admitted", "rejected", where=lambda each, at=following: each.attempt == at)
                if answer.HasField("admitted"):
                    break
                following += 1
                to_d.admit(following, follower, 8, EVERYTHING)
            tokens, end = to_d.answer(following)
            self.assertEqual((end.outcome, tokens), (OUTCOME_OK, expected[turn]), f"turn {turn}: foreign bytes in its pages")
            self.rest(decode, prefill)
            late = dropped(decode).sum("baton_chunks_dropped_total")
        self.assertGreater(late, 0, "no chunk came late: the test did not show anything")
        for member in (decode, prefill):
            self.assertEqual(Metrics(member).sum("baton_reaped_total"), 0, "memory came back by a timer")

    def link_address(self, decode, to_d):
        """The address of a real KV link: a played decode worker hands it over as its own; chunks of its slots are dropped."""
        from_p = self.prefill_session(decode, to_d.hello)
        from_p.open(to_d.reserve(900, filler(30, 900)), filler(30, 900))
        address = from_p.expect("accept").address
        to_d.abort(900)
        to_d.answer(900)
        from_p.close()
        return address

    def test_F24_a_sender_whose_sends_are_done_has_delivered_nothing(self):
        decode = self.worker("decode")
        prefill = self.worker("prefill")
        to_d, to_p = self.session(decode), self.session(prefill)
        address = self.link_address(decode, to_d)
        liar = self.played_decode({"open": lambda session, message: session.send(
            accept=peer.Accept(slot=message.slot, address=address))}, to_d.hello)
        to_p.prefill(peer.Admitted(attempt=1, slot=1 << 32, key=5), filler(200), liar.incarnation, liar.address)
        until("everything is sent", lambda: liar.sessions and liar.sessions[0].has("fin"), 5, 0.002)
        until("every send has completed", lambda: self.count(prefill, state="sent") == 1 and
              Metrics(prefill).sum("baton_own_operations", kind="send") == 0, 5, 0.005)
        self.assertFalse(to_p.has("prefill_end"))
        liar.close()  # dies right after the last chunk
        end = to_p.expect("prefill_end", within=1 + ROOM_S)
        self.assertEqual(end.outcome, OUTCOME_FAILED, "completed sends were taken for a delivery")
        self.rest(prefill)
        self.assertEqual(Metrics(prefill).sum("baton_entries_terminal_total", outcome="ok"), 0)

    def test_F24_a_lost_commit_ends_both_sides_and_the_answer_is_complete(self):
        decode = self.worker("decode", *SHORT)
        prefill = self.worker("prefill", "--test-step-delay", "300ms", "--timer-step", "900ms", *SHORT)
        wire = Wire("127.0.0.2", decode.ports["grpc"])
        self.addCleanup(wire.close)
        request = filler(200, 2)
        expected = self.reference([request], 12)[0]
        to_d, to_p = self.session(decode), self.session(prefill)
        to_p.prefill(to_d.reserve(1, request, 12), request, to_d.hello.incarnation, f"127.0.0.2:{decode.ports['grpc']}")
        until("it is accepted and computed", lambda: self.count(prefill, state="computing") == 1, 3, 0.002)
        wire.swallows["from"] = True  # from here on nothing that the decode worker says arrives; the KV does
        tokens, end = to_d.answer(1)
        self.assertEqual((end.outcome, tokens), (OUTCOME_OK, expected), "a committed request does not need its prefill worker")
        end = to_p.expect("prefill_end", within=LEASE_S + 1 + ROOM_S)
        self.assertEqual(end.outcome, OUTCOME_FAILED, "without Commit nothing is delivered")
        self.assertGreater(wire.swallowed, 0)
        self.rest(decode, prefill)


class Clocks(Peers):
    """Nothing waits without a clock: whatever is left out, each entry ends by its own deadline."""

    def within(self, what, seconds, check):
        began = time.monotonic()
        until(what, check, seconds + ROOM_S)
        return time.monotonic() - began

    def test_F47_F55_each_message_left_out_ends_by_the_clock_of_who_waits_for_it(self):
        decode = self.worker("decode", *SHORT)
        prefill = self.worker("prefill", *SHORT)
        to_d, to_p = self.session(decode), self.session(prefill)
        address = Memory.link_address(self, decode, to_d)
        tokens = filler(100, 1)
        from_p = self.prefill_session(decode, to_d.hello)

        def accepts(session, message):
            session.send(accept=peer.Accept(slot=message.slot, address=address))
        silent = self.played_decode({}, to_d.hello)  # lives, beats, and never answers Open
        keeps = self.played_decode({"open": accepts}, to_d.hello)  # accepts, takes everything, and never commits
        for attempt, (left_out, seconds, act) in enumerate((
                ("Prefill", 0.7, lambda at: to_d.admit(at, tokens, 4)),
                ("the KV", 1.2, lambda at: from_p.open(to_d.reserve(at, tokens, deadline_ms=1200), tokens)),
                ("the KV after Fin", 1.0, lambda at: self.fin_without_kv(to_d, from_p, at, tokens))), 10):
            with self.subTest(left_out=left_out):
                act(attempt)
                end = to_d.expect("end", within=seconds + ROOM_S, where=lambda each, at=attempt: each.attempt == at)
                self.assertEqual(end.outcome, OUTCOME_FAILED)
                self.rest(decode, within=0.5)
        for attempt, (left_out, liar) in enumerate((("Accept", silent), ("Commit", keeps)), 20):
            with self.subTest(left_out=left_out):
                to_p.prefill(peer.Admitted(attempt=attempt, slot=attempt << 32, key=5), tokens, liar.incarnation, liar.address,
                             deadline_ms=1200)
                end = to_p.expect("prefill_end", within=1.2 + ROOM_S, where=lambda each, at=attempt: each.attempt == at)
                self.assertEqual(end.outcome, OUTCOME_FAILED)
                self.rest(prefill, within=0.5)
        with self.subTest(left_out="beats"):
            for session, member in ((to_d, decode), (to_p, prefill)):
                session.beats = False
                if member is decode:
                    session.admit(30, filler(20), 480, EVERYTHING)
                session.wait_end(LEASE_S + ROOM_S)
                self.rest(member, within=0.5)
        for member in (decode, prefill):
            self.assertEqual(Metrics(member).sum("baton_deadline_overrun_seconds"), 0)

    @staticmethod
    def fin_without_kv(to_d, from_p, attempt, tokens):
        admitted = to_d.reserve(attempt, tokens)
        from_p.open(admitted, tokens)
        from_p.expect("accept", where=lambda each: each.slot == admitted.slot)
        from_p.send(fin=peer.Fin(slot=admitted.slot, bytes=(len(tokens) - 1) * token_bytes()))

    def test_F32_a_message_for_a_request_that_is_over_is_refused_at_once_and_creates_nothing(self):
        decode = self.worker("decode", *SHORT)
        prefill = self.worker("prefill", *SHORT)
        to_d, to_p = self.session(decode), self.session(prefill)
        from_p = self.prefill_session(decode, to_d.hello)
        tokens = filler(100, 1)
        admitted = to_d.reserve(1, tokens)
        to_d.expect("end", within=0.7 + ROOM_S)  # T_open: the prefill worker was too slow
        created = Metrics(decode).sum("baton_entries_created_total")
        for slot in (admitted.slot, admitted.slot + (1 << 32), 12345):
            admitted.slot = slot
            from_p.open(admitted, tokens)
            from_p.expect("refuse", within=1, where=lambda each, slot=slot: each.slot == slot)
            from_p.send(fin=peer.Fin(slot=slot, bytes=1))
            from_p.expect("refuse", within=1, where=lambda each, slot=slot: each.slot == slot)
        to_d.abort(1)
        to_d.abort(77)
        # The same at the prefill worker: an Accept, a Commit or a Refuse that comes after the end.
        liar = self.played_decode({}, to_d.hello)
        to_p.prefill(peer.Admitted(attempt=2, slot=2 << 32, key=5), tokens, liar.incarnation, liar.address, deadline_ms=300)
        to_p.expect("prefill_end", within=0.3 + ROOM_S)
        session = liar.sessions[0]
        for slot in (2 << 32, 9 << 32):
            session.send(accept=peer.Accept(slot=slot, address=b"x" * 40))
            session.send(commit=peer.Commit(slot=slot))
            session.send(refuse=peer.SlotCause(slot=slot, cause=1))
        to_p.prefill(peer.Admitted(attempt=3, slot=3 << 32, key=5), tokens, liar.incarnation, liar.address)
        until("the next Open on the same session", lambda: session.has("open", lambda each: each.slot == 3 << 32), 2)
        to_p.abort(3)
        self.rest(decode, prefill)
        self.assertEqual(Metrics(decode).sum("baton_entries_created_total"), created)
        self.assertEqual(Metrics(prefill).sum("baton_entries_created_total"), 2)

    def test_F49_a_pool_full_of_orphans_is_free_again_though_nothing_else_ever_happens(self):
        decode = self.worker("decode", "--kv-tokens", "4096", *SHORT)
        for how in ("the router goes on and forgets them", "the router says nothing more", "the router is gone"):
            with self.subTest(how):
                session = self.session(decode)
                attempt = 0
                while True:
                    attempt += 1
                    session.admit(attempt, filler(100, attempt), 400)
                    if session.expect("admitted", "rejected").HasField("rejected"):
                        break
                self.assertGreater(attempt, 7)
                seconds = 0.7
                if how.endswith("nothing more"):
                    session.beats = False
                elif how.endswith("gone"):
                    session.close()
                    seconds = 0.0
                self.rest(decode, within=seconds + ROOM_S)
                session.close()

    def test_F52_reserved_requests_that_nobody_serves_never_block_those_behind_them(self):
        decode = self.worker("decode", "--kv-tokens", "4096", "--timer-open", "20s")
        orphans, others = self.session(decode), self.session(decode)
        for attempt in range(1, 7):
            orphans.reserve(attempt, filler(100, attempt), 400)
        for attempt in range(1, 20):
            self.is_served(others, attempt)
        self.assertEqual(self.count(decode, state="reserved"), 6, "the orphans were to be there the whole time")
        orphans.close()
        self.rest(decode)

    def test_F59_hundreds_of_peers_that_come_and_die_leave_no_descriptor_and_no_memory(self):
        decode = self.worker("decode", "--timer-open", "60s", "--timer-admit", "1s")
        canary = self.session(decode)

        def generation(count, first):
            for turn in range(first, first + count):
                to_d = self.session(decode)
                from_p = self.prefill_session(decode, canary.hello)
                tokens = filler(60, turn)
                from_p.open(to_d.reserve(turn + 1, tokens), tokens)
                if turn % 2:
                    from_p.expect("accept")
                (from_p if turn % 3 else to_d).close()  # dies in the middle of a hand-off
                to_d.close()
                from_p.close()
            self.rest(decode, within=3)
            until("their sessions are gone", lambda: Metrics(decode).sum("baton_sessions") == 1, 3)

        generation(80, 0)
        kib, fds = resident_kib(decode), descriptors(decode)
        generation(240, 1000)
        self.is_served(canary, 1)
        until(lambda: f"descriptors: {fds} -> {descriptors(decode)}", lambda: descriptors(decode) <= fds + 2, 5, 0.1)
        self.assertLess(resident_kib(decode), kib * 1.05 + 4096, "memory grows with each peer that dies")


if __name__ == "__main__":
    main()
