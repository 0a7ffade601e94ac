/* D, cell by cell: every (state, event) pair of the table in protocol.md section 4, and every
 * state's deadline. */
#include "unit/core/bed.h"

#include "base/prng.h"

#define ROUTER  1u /* streams */
#define PREFILL 3u
#define OTHER   5u /* a second prefill worker */
#define PROMPT  9u
#define BYTES   4u

enum column { UNKNOWN, RESERVED, RECEIVING, RUNNING, RETRACTED, LEAVING, COLUMNS };

struct bed {
    struct decode_core core;
    struct effects out;
    void *memory;
    int64_t now;
    struct slot_id slot;
    uint64_t key;
    char text[512];
};

static const struct attempt_id attempt = {0x77};
static const struct layout_digest digest = {5, 6};

static void bed_step(struct bed *bed, const struct event *event) {
    bed->now += 1000000;
    decode_core_step(&bed->core, event, (struct instant){bed->now}, &bed->out);
    decode_verify(&bed->core);
    bed_describe(&bed->out, bed->text, sizeof bed->text);
}

static void bed_wait(struct bed *bed, int64_t ms) {
    for (int64_t left = ms; left > 0; left -= TICK_MS) {
        bed->now += TICK_MS * 1000000ll;
        /* The peers stay alive: only the entry's own clocks are looked at. */
        struct message beat = {.kind = MESSAGE_BEAT};
        static const uint64_t streams[3] = {ROUTER, PREFILL, OTHER};
        for (uint32_t i = 0; i < 3; i++) {
            struct event mail = bed_mail(&beat, streams[i]);
            decode_core_step(&bed->core, &mail, (struct instant){bed->now}, &bed->out);
        }
        struct event tick = {.kind = EVENT_TICK};
        decode_core_step(&bed->core, &tick, (struct instant){bed->now}, &bed->out);
        bed_describe(&bed->out, bed->text, sizeof bed->text);
        decode_verify(&bed->core);
        if (bed->text[0] != '\0') {
            return;
        }
    }
}

static struct message bed_admit(uint32_t local_max) {
    static const uint32_t tokens[PROMPT] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    struct message admit = {.kind = MESSAGE_ADMIT};
    admit.u.admit.attempt = attempt;
    admit.u.admit.tokens = tokens;
    admit.u.admit.token_count = PROMPT;
    admit.u.admit.output_first = PROMPT;
    admit.u.admit.max_new = 3;
    admit.u.admit.deadline_ms = 60000;
    admit.u.admit.local_max = local_max;
    return admit;
}

static struct message bed_open(const struct bed *bed) {
    struct message open = {.kind = MESSAGE_OPEN};
    open.u.open.slot = bed->slot;
    open.u.open.key = bed->key;
    open.u.open.end = PROMPT - 1;
    open.u.open.bytes = (PROMPT - 1) * BYTES;
    return open;
}

static void bed_send(struct bed *bed, const struct message *message, uint64_t stream) {
    struct event event = bed_mail(message, stream);
    bed_step(bed, &event);
}

/* Room for so many entries and pages, and `rows` of them in a step of 4 tokens a row. */
static struct bed *bed_create_sized(uint32_t entries, uint32_t pages, uint32_t rows) {
    struct bed *bed = calloc(1, sizeof *bed);
    assert_non_null(bed);
    struct decode_config config = {.node = {.role = ROLE_DECODE,
                                            .incarnation = {9},
                                            .layout = digest,
                                            .sessions_max = 8,
                                            .timers = timers_default()},
                                   .entries_max = entries,
                                   .page_count = pages,
                                   .page_tokens = 4,
                                   .token_bytes = BYTES,
                                   .context = 32,
                                   .vocab = 100,
                                   .rows_max = rows,
                                   .step_tokens_max = 4 * rows,
                                   .eos_count = 1,
                                   .eos = {99},
                                   .shared_min = 4,
                                   .changes_max = 64,
                                   .secret = {1, 2},
                                   .address_len = 2};
    bed->memory = bed_memory(decode_bytes(&config));
    decode_init(&bed->core, &config, bed->memory);
    bed->now = BED_SECOND;
    const struct {
        uint64_t stream;
        enum role role;
        uint64_t incarnation;
    } peers[] = {
        {ROUTER, ROLE_ROUTER, 100}, {PREFILL, ROLE_PREFILL, 200}, {OTHER, ROLE_PREFILL, 300}};
    for (uint32_t i = 0; i < 3; i++) {
        struct event accepted = {.kind = EVENT_STREAM_ACCEPTED, .stream = {peers[i].stream}};
        bed_step(bed, &accepted);
        struct message message;
        struct event hello =
            bed_hello(&message, peers[i].stream, peers[i].role, peers[i].incarnation, digest);
        bed_step(bed, &hello);
        assert_string_equal(bed->text, "hello");
    }
    return bed;
}

static struct bed *bed_create(void) {
    return bed_create_sized(4, 8, 4);
}

/* Admits `count` tokens, told apart by the attempt, for D to prefill. Returns its slot, 0: refused.
 */
static uint64_t bed_admit_local(struct bed *bed, uint64_t which, uint32_t count, uint32_t max_new) {
    uint32_t tokens[32];
    for (uint32_t i = 0; i < count; i++) {
        tokens[i] = (uint32_t)((which * 7 + i) % 90);
    }
    struct message admit = {.kind = MESSAGE_ADMIT};
    admit.u.admit.attempt.v = which;
    admit.u.admit.tokens = tokens;
    admit.u.admit.token_count = count;
    admit.u.admit.output_first = count;
    admit.u.admit.max_new = max_new;
    admit.u.admit.deadline_ms = 600000;
    admit.u.admit.local_max = UINT32_MAX;
    bed_send(bed, &admit, ROUTER);
    const struct effect *first = &bed->out.items[0];
    return first->u.message.kind == MESSAGE_ADMITTED ? first->u.message.u.admitted.slot.v : 0;
}

static struct decode_entry *bed_entry(struct bed *bed, uint64_t slot) {
    uint32_t index = 0;
    assert_true(pool_find(&bed->core.slots, slot, &index));
    return &bed->core.entries[index];
}

/* The outstanding step is done: each sampled row got the same token. */
static void bed_step_done(struct bed *bed) {
    struct step_result results[16];
    struct event done = {.kind = EVENT_STEP_DONE};
    uint32_t count = 0;
    for (uint32_t i = 0; i < bed->core.plan.row_count; i++) {
        if (bed->core.rows[i].is_sampled) {
            results[count++] = (struct step_result){
                .entry = bed->core.rows[i].entry, .token = 5, .is_valid = true};
        }
    }
    done.u.step_done.number = bed->core.plan.number;
    done.u.step_done.results = results;
    done.u.step_done.count = count;
    done.u.step_done.elapsed = span_ms(60);
    bed_step(bed, &done);
}

/* The router aborts an attempt. */
static void bed_abort(struct bed *bed, uint64_t which) {
    struct message abort = {.kind = MESSAGE_ABORT};
    abort.u.abort.attempt.v = which;
    bed_send(bed, &abort, ROUTER);
}

static void bed_destroy(struct bed *bed) {
    free(bed->memory);
    free(bed);
}

static const char *bed_state(const struct bed *bed) {
    uint32_t index = 0;
    return pool_find(&bed->core.slots, bed->slot.v, &index)
               ? decode_state_name(bed->core.entries[index].state)
               : "gone";
}

static void bed_retracted(struct bed *bed);

/* A fresh bed with the entry in a state. RETRACTED: an older one needed its pages. LEAVING: a
 * RECEIVING entry aborted by R, waiting for its disarm. */
static struct bed *bed_in(enum column column) {
    struct bed *bed = column == RETRACTED ? bed_create_sized(4, 5, 4) : bed_create();
    if (column == RETRACTED) {
        bed_retracted(bed);
        return bed;
    }
    bed->slot.v = (uint64_t)7 << 32;
    bed->key = 1;
    if (column == UNKNOWN) {
        return bed;
    }
    struct message admit = bed_admit(column == RUNNING ? UINT32_MAX : 0);
    bed_send(bed, &admit, ROUTER);
    const struct message *admitted = bed_sent(&bed->out, MESSAGE_ADMITTED);
    bed->slot = admitted->u.admitted.slot;
    bed->key = admitted->u.admitted.key;
    if (column == RECEIVING || column == LEAVING) {
        struct message open = bed_open(bed);
        bed_send(bed, &open, PREFILL);
        assert_string_equal(bed->text, "link_arm accept");
    }
    if (column == LEAVING) {
        bed_abort(bed, attempt.v);
        assert_string_equal(bed->text, "end(aborted) refuse link_disarm");
    }
    return bed;
}

typedef void (*apply)(struct bed *bed);

static void apply_admit_again(struct bed *bed) {
    struct message admit = bed_admit(0);
    bed_send(bed, &admit, ROUTER);
    if (bed->out.count == 1 && bed->out.items[0].u.message.kind == MESSAGE_ADMITTED) {
        bed->slot = bed->out.items[0].u.message.u.admitted.slot;
    }
}
static void apply_admit_local(struct bed *bed) {
    struct message admit = bed_admit(UINT32_MAX);
    admit.u.admit.attempt.v = 0x99;
    bed_send(bed, &admit, ROUTER);
}
static void apply_open(struct bed *bed) {
    struct message open = bed_open(bed);
    bed_send(bed, &open, PREFILL);
}
static void apply_open_bad_key(struct bed *bed) {
    struct message open = bed_open(bed);
    open.u.open.key ^= 1;
    bed_send(bed, &open, PREFILL);
}
static void apply_open_other_range(struct bed *bed) {
    struct message open = bed_open(bed);
    open.u.open.end--;
    bed_send(bed, &open, PREFILL);
}
static void apply_fin(struct bed *bed) {
    struct message fin = {.kind = MESSAGE_FIN};
    fin.u.fin.slot = bed->slot;
    fin.u.fin.bytes = (PROMPT - 1) * BYTES;
    bed_send(bed, &fin, PREFILL);
}
static void apply_fin_short(struct bed *bed) {
    struct message fin = {.kind = MESSAGE_FIN};
    fin.u.fin.slot = bed->slot;
    fin.u.fin.bytes = 1;
    bed_send(bed, &fin, PREFILL);
}
static void apply_fin_other(struct bed *bed) {
    struct message fin = {.kind = MESSAGE_FIN};
    fin.u.fin.slot = bed->slot;
    bed_send(bed, &fin, OTHER);
}
static void apply_link(struct bed *bed, enum event_kind kind) {
    struct event event = {.kind = kind};
    event.u.link.slot = bed->slot;
    event.u.link.bytes = (PROMPT - 1) * BYTES;
    bed_step(bed, &event);
}
static void apply_covered(struct bed *bed) {
    apply_link(bed, EVENT_LINK_COVERED);
}
static void apply_covered_and_fin(struct bed *bed) {
    apply_covered(bed);
    apply_fin(bed);
}
static void apply_fin_and_covered(struct bed *bed) {
    apply_fin(bed);
    apply_covered(bed);
}
static void apply_progress(struct bed *bed) {
    apply_link(bed, EVENT_LINK_PROGRESS);
}
/* The entry came through the link and has one token; the older one takes the pool's last page. */
static void bed_retracted(struct bed *bed) {
    assert_int_not_equal(bed_admit_local(bed, 0x11, 7, 12), 0);
    struct message admit = bed_admit(0);
    bed_send(bed, &admit, ROUTER);
    bed->slot = bed_sent(&bed->out, MESSAGE_ADMITTED)->u.admitted.slot;
    bed->key = bed_sent(&bed->out, MESSAGE_ADMITTED)->u.admitted.key;
    apply_open(bed);
    apply_fin_and_covered(bed);
    apply_link(bed, EVENT_LINK_DISARMED);
    bed_step_done(bed);
    bed_step_done(bed);
    assert_string_equal(bed_state(bed), "retracted");
    assert_string_equal(bed->text, "tokens step");
    assert_int_equal(bed->core.retractions, 1);
}

static void apply_bad(struct bed *bed) {
    apply_link(bed, EVENT_LINK_BAD);
}
static void apply_disarmed(struct bed *bed) {
    apply_link(bed, EVENT_LINK_DISARMED);
}
static void apply_abort_slot(struct bed *bed) {
    struct message abort = {.kind = MESSAGE_ABORT_SLOT};
    abort.u.refuse.slot = bed->slot;
    bed_send(bed, &abort, PREFILL);
}
static void apply_abort_slot_other(struct bed *bed) {
    struct message abort = {.kind = MESSAGE_ABORT_SLOT};
    abort.u.refuse.slot = bed->slot;
    bed_send(bed, &abort, OTHER);
}
static void apply_end(struct bed *bed, uint64_t stream) {
    struct event event = {.kind = EVENT_STREAM_ENDED, .stream = {stream}};
    event.u.stream_end.cause = CAUSE_SESSION_ENDED;
    bed_step(bed, &event);
}
static void apply_prefill_ends(struct bed *bed) {
    apply_end(bed, PREFILL);
}
static void apply_router_ends(struct bed *bed) {
    apply_end(bed, ROUTER);
}
static void apply_abort(struct bed *bed) {
    bed_abort(bed, attempt.v);
}
static void apply_abort_twice(struct bed *bed) {
    apply_abort(bed);
    apply_abort(bed);
}
static void apply_abort_unless(struct bed *bed) {
    struct message abort = {.kind = MESSAGE_ABORT};
    abort.u.abort.attempt = attempt;
    abort.u.abort.is_unless_committed = true;
    bed_send(bed, &abort, ROUTER);
}
static void apply_unknown_by_router(struct bed *bed) {
    uint64_t id = attempt.v;
    struct message unknown = {.kind = MESSAGE_UNKNOWN};
    unknown.u.audit.count = 1;
    unknown.u.audit.ids = &id;
    bed_send(bed, &unknown, ROUTER);
}
static void apply_unknown_by_prefill(struct bed *bed) {
    uint64_t id = bed->slot.v;
    struct message unknown = {.kind = MESSAGE_UNKNOWN};
    unknown.u.audit.count = 1;
    unknown.u.audit.ids = &id;
    bed_send(bed, &unknown, PREFILL);
}
static void apply_audit_by_router(struct bed *bed) {
    uint64_t id = attempt.v;
    struct message audit = {.kind = MESSAGE_AUDIT};
    audit.u.audit.count = 1;
    audit.u.audit.ids = &id;
    bed_send(bed, &audit, ROUTER);
}
static void apply_step_done(struct bed *bed) {
    bed_step_done(bed);
}
static void apply_step_failed(struct bed *bed) {
    struct event event = {.kind = EVENT_STEP_DONE};
    event.u.step_done.number = bed->core.plan.number;
    event.u.step_done.status = STATUS_INTERNAL;
    bed_step(bed, &event);
}
static void apply_step_not_finite(struct bed *bed) {
    struct step_result result = {.entry = bed->slot.v};
    struct event event = {.kind = EVENT_STEP_DONE};
    event.u.step_done.number = bed->core.plan.number;
    event.u.step_done.results = &result;
    event.u.step_done.count = 1;
    bed_step(bed, &event);
}
static void apply_deadline(struct bed *bed) {
    bed_wait(bed, 61000);
}
static void apply_router_nonsense(struct bed *bed) {
    struct message commit = {.kind = MESSAGE_COMMIT};
    bed_send(bed, &commit, ROUTER);
}
static void apply_prefill_nonsense(struct bed *bed) {
    struct message admit = bed_admit(0);
    bed_send(bed, &admit, PREFILL);
}
static void apply_bad_bytes(struct bed *bed) {
    struct event event = {.kind = EVENT_STREAM_BAD, .stream = {ROUTER}};
    bed_step(bed, &event);
}

/* One row per event; cells in the order of enum column: "state: what was sent". NULL: the cell is a
 * CHECK. */
static const struct {
    const char *name;
    apply apply;
    const char *cell[COLUMNS];
} table[] = {
    {"Admit of the same attempt",
     apply_admit_again,
     {"reserved: admitted", "gone: stream_close", "leaving: stream_close refuse link_disarm",
      "leaving: stream_close step_abandon", "gone: stream_close step_abandon",
      "leaving: stream_close"}},
    {"Admit of another, local",
     apply_admit_local,
     {"gone: admitted step", "reserved: admitted step", "receiving: admitted step",
      "running: admitted", "retracted: rejected", "leaving: admitted step"}},
    {"Open",
     apply_open,
     {"gone: refuse", "receiving: link_arm accept", "receiving: refuse", "running: refuse",
      "retracted: refuse", "leaving: refuse"}},
    {"Open with a wrong key",
     apply_open_bad_key,
     {"gone: refuse", "reserved: refuse", "receiving: refuse", "running: refuse",
      "retracted: refuse", "leaving: refuse"}},
    {"Open of another range",
     apply_open_other_range,
     {"gone: refuse", "reserved: refuse", "receiving: refuse", "running: refuse",
      "retracted: refuse", "leaving: refuse"}},
    {"Fin",
     apply_fin,
     {"gone: refuse", "reserved: refuse", "receiving: ", "running: refuse", "retracted: commit",
      "leaving: refuse"}},
    {"Fin with another total",
     apply_fin_short,
     {"gone: refuse", "reserved: refuse", "leaving: end(failed) refuse link_disarm",
      "running: refuse", "retracted: commit", "leaving: refuse"}},
    {"Fin from a P it is not bound to",
     apply_fin_other,
     {"gone: refuse", "reserved: refuse", "receiving: refuse", "running: refuse",
      "retracted: refuse", "leaving: refuse"}},
    {"covered",
     apply_covered,
     {"gone: ", "reserved: ", "receiving: ", "running: ", "retracted: ", "leaving: "}},
    {"covered, then Fin",
     apply_covered_and_fin,
     {"gone: refuse", "reserved: refuse", "running: commit link_disarm step", "running: refuse",
      "retracted: commit", "leaving: refuse"}},
    {"Fin, then covered",
     apply_fin_and_covered,
     {"gone: ", "reserved: ", "running: commit link_disarm step",
      "running: ", "retracted: ", "leaving: "}},
    {"progress",
     apply_progress,
     {"gone: ", "reserved: ", "receiving: ", "running: ", "retracted: ", "leaving: "}},
    {"bad chunk",
     apply_bad,
     {"gone: ", "reserved: ", "leaving: end(failed) refuse link_disarm",
      "running: ", "retracted: ", "leaving: "}},
    {"Abort from P",
     apply_abort_slot,
     {"gone: ", "reserved: ", "leaving: end(failed) link_disarm",
      "running: ", "retracted: ", "leaving: "}},
    {"Abort from a P it is not bound to",
     apply_abort_slot_other,
     {"gone: ", "reserved: ", "receiving: ", "running: ", "retracted: ", "leaving: "}},
    {"P-D session ends",
     apply_prefill_ends,
     {"gone: ", "reserved: ", "leaving: end(failed) link_disarm",
      "running: ", "retracted: ", "leaving: "}},
    {"R-D session ends",
     apply_router_ends,
     {"gone: ", "gone: ", "leaving: refuse link_disarm", "leaving: step_abandon",
      "gone: step_abandon", "leaving: "}},
    {"Abort from R",
     apply_abort,
     {"gone: ", "gone: end(aborted)", "leaving: end(aborted) refuse link_disarm",
      "leaving: end(aborted) step_abandon", "gone: end(aborted)", "leaving: "}},
    {"Abort from R, twice",
     apply_abort_twice,
     {"gone: ", "gone: ", "leaving: ", "leaving: ", "gone: ", "leaving: "}},
    {"Abort unless committed",
     apply_abort_unless,
     {"gone: end(aborted)", "gone: end(aborted)", "leaving: end(aborted) refuse link_disarm",
      "running: committed", "retracted: committed", "leaving: end(aborted)"}},
    {"R does not know it",
     apply_unknown_by_router,
     {"gone: ", "gone: end(failed)", "leaving: end(failed) refuse link_disarm",
      "leaving: end(failed) step_abandon", "gone: end(failed)", "leaving: "}},
    {"P does not know it",
     apply_unknown_by_prefill,
     {"gone: ", "reserved: ", "leaving: end(failed) refuse link_disarm",
      "running: ", "retracted: ", "leaving: "}},
    {"R's audit",
     apply_audit_by_router,
     {"gone: unknown",
      "reserved: ", "receiving: ", "running: ", "retracted: ", "leaving: unknown"}},
    {"step done",
     apply_step_done,
     {"gone: ", "reserved: ", "receiving: ", "running: tokens step", "retracted: tokens step",
      "leaving: "}},
    {"step failed",
     apply_step_failed,
     {"gone: ", "reserved: ", "receiving: ", "gone: end(failed)", "running: end(failed) step",
      "leaving: "}},
    {"logits not finite",
     apply_step_not_finite,
     {"gone: ", "reserved: ", "receiving: ", "gone: end(failed)", "running: end(failed) step",
      "leaving: "}},
    {"disarmed",
     apply_disarmed,
     {"gone: ", "reserved: ", NULL, "running: ", "retracted: ", "gone: "}},
    {"its deadlines",
     apply_deadline,
     {"gone: ", "gone: end(failed)", "leaving: end(failed) refuse link_disarm",
      "leaving: end(failed) step_abandon", "gone: end(failed)", "leaving: "}},
    {"a message R may not send",
     apply_router_nonsense,
     {"gone: stream_close", "gone: stream_close", "leaving: stream_close refuse link_disarm",
      "leaving: stream_close step_abandon", "gone: stream_close step_abandon",
      "leaving: stream_close"}},
    {"a message P may not send",
     apply_prefill_nonsense,
     {"gone: stream_close", "reserved: stream_close",
      "leaving: stream_close end(failed) link_disarm", "running: stream_close",
      "retracted: stream_close", "leaving: stream_close"}},
    {"bytes that are no message from R",
     apply_bad_bytes,
     {"gone: stream_close", "gone: stream_close", "leaving: stream_close refuse link_disarm",
      "leaving: stream_close step_abandon", "gone: stream_close step_abandon",
      "leaving: stream_close"}},
};

static void test_every_cell_of_the_decode_table(void **state) {
    (void)state;
    uint32_t wrong = 0;
    for (uint32_t row = 0; row < sizeof table / sizeof table[0]; row++) {
        for (uint32_t column = 0; column < COLUMNS; column++) {
            if (table[row].cell[column] == NULL) {
                continue;
            }
            struct bed *bed = bed_in((enum column)column);
            table[row].apply(bed);
            char got[600];
            (void)snprintf(got, sizeof got, "%s: %s", bed_state(bed), bed->text);
            if (strcmp(got, table[row].cell[column]) != 0) {
                print_error("%s in column %u:\n  expected \"%s\"\n  got      \"%s\"\n",
                            table[row].name, column, table[row].cell[column], got);
                wrong++;
            }
            bed_destroy(bed);
        }
    }
    assert_int_equal(wrong, 0);
}

static void test_every_state_has_a_deadline_that_ends_it(void **state) {
    (void)state;
    for (uint32_t column = RESERVED; column <= RETRACTED; column++) {
        struct bed *bed = bed_in((enum column)column);
        uint32_t cursor = 0;
        struct entry_view view;
        do { /* an older one may be there too */
            assert_true(decode_view(&bed->core, &cursor, &view));
        } while (view.id != bed->slot.v);
        assert_in_range(view.deadline_left_ms, 1, 60000);
        assert_string_equal(view.deadline, column == RESERVED ? "T_open: no Open arrived"
                                                              : "the request's deadline");
        assert_int_equal(view.router, bed->core.entries[cursor - 1].router_incarnation.v);
        assert_int_not_equal(view.router, 0);
        bed_wait(bed, 61000);
        if (bed->core.node.terminals_total > 0) { /* else an own operation holds it */
            assert_int_equal(bed->core.node.terminals[0].router, view.router);
        }
        assert_int_equal(bed->core.node.ledger.reaped[column], 1);
        bed_destroy(bed);
    }
}

static void test_a_stall_after_fin_ends_the_slot_within_t_stall(void **state) {
    (void)state;
    struct bed *bed = bed_in(RECEIVING);
    apply_fin(bed);
    uint32_t cursor = 0;
    struct entry_view view;
    assert_true(decode_view(&bed->core, &cursor, &view));
    assert_string_equal(view.deadline, "T_stall: no KV bytes arrived");
    assert_int_equal(view.deadline_left_ms, 5000);
    int64_t start = bed->now;
    bed_wait(bed, 10000);
    assert_string_equal(bed->text, "end(failed) refuse link_disarm");
    assert_in_range(bed->now - start, 5 * BED_SECOND, 5 * BED_SECOND + 200000000);
    bed_destroy(bed);
}

static void test_silence_of_the_router_ends_its_entries_within_the_lease(void **state) {
    (void)state;
    struct bed *bed = bed_in(RUNNING);
    struct event tick = {.kind = EVENT_TICK};
    int64_t start = bed->now;
    while (bed->core.node.sessions_live > 0 && bed->now < start + 20 * BED_SECOND) {
        bed->now += TICK_MS * 1000000ll;
        decode_core_step(&bed->core, &tick, (struct instant){bed->now}, &bed->out);
    }
    assert_in_range(bed->now - start, 5 * BED_SECOND, 6 * BED_SECOND + 200000000);
    assert_string_equal(bed_state(bed), "leaving"); /* its step still runs */
    apply_step_done(bed);
    assert_string_equal(bed_state(bed), "gone");
    assert_int_equal(bed->core.pages.owned, 0);
    bed_destroy(bed);
}

static void test_a_paused_process_reads_its_mail_before_it_judges(void **state) {
    (void)state;
    struct bed *bed = bed_in(RUNNING);
    bed->now += 60 * BED_SECOND; /* SIGSTOP for a minute */
    struct event tick = {.kind = EVENT_TICK};
    bed_step(bed, &tick);
    assert_int_equal(bed->core.node.sessions_live, 3);
    assert_int_equal(bed->core.node.stats.pauses, 1);
    assert_string_equal(bed_state(bed), "running");
    bed_destroy(bed);
}

static void test_a_newer_hello_ends_the_older_session_of_that_incarnation(void **state) {
    (void)state;
    struct bed *bed = bed_in(RUNNING);
    struct event accepted = {.kind = EVENT_STREAM_ACCEPTED, .stream = {11}};
    bed_step(bed, &accepted);
    struct message message;
    struct event hello = bed_hello(&message, 11, ROLE_ROUTER, 100, digest);
    message.u.hello.session = 2;
    bed_step(bed, &hello);
    assert_string_equal(bed_state(bed), "leaving");
    struct message abort = {.kind = MESSAGE_ABORT}; /* mail of the old session says nothing more */
    bed_send(bed, &abort, ROUTER);
    assert_int_equal(bed->core.node.stats.stale_mail, 1);
    bed_destroy(bed);
}

static void test_a_prefill_worker_of_another_layout_is_refused(void **state) {
    (void)state;
    struct bed *bed = bed_create();
    struct event accepted = {.kind = EVENT_STREAM_ACCEPTED, .stream = {11}};
    bed_step(bed, &accepted);
    struct message message;
    struct event hello = bed_hello(&message, 11, ROLE_PREFILL, 400, (struct layout_digest){5, 7});
    bed_step(bed, &hello);
    assert_string_equal(bed->text, "stream_close");
    assert_int_equal(bed->core.node.stats.sessions_refused, 1);
    bed_destroy(bed);
}

static void test_admission_refuses_what_can_never_fit_and_what_does_not_fit_now(void **state) {
    (void)state;
    struct bed *bed = bed_create();
    struct message admit = bed_admit(0);
    admit.u.admit.max_new = 30; /* over the context */
    bed_send(bed, &admit, ROUTER);
    assert_int_equal(bed_sent(&bed->out, MESSAGE_REJECTED)->u.rejected.cause, CAUSE_TOO_LARGE);
    for (uint32_t i = 0; i < 2; i++) { /* 3 pages each, 8 in all */
        admit = bed_admit(0);
        admit.u.admit.attempt.v = 50 + i;
        bed_send(bed, &admit, ROUTER);
        assert_string_equal(bed->text, "admitted");
    }
    admit.u.admit.attempt.v = 60;
    bed_send(bed, &admit, ROUTER);
    const struct message *rejected = bed_sent(&bed->out, MESSAGE_REJECTED);
    assert_int_equal(rejected->u.rejected.cause, CAUSE_BUSY);
    assert_true(rejected->u.rejected.retry_after_ms > 0);
    uint32_t bad[1] = {100};
    admit.u.admit.tokens = bad;
    admit.u.admit.token_count = 1;
    admit.u.admit.output_first = 1;
    bed_send(bed, &admit, ROUTER);
    assert_int_equal(bed_sent(&bed->out, MESSAGE_REJECTED)->u.rejected.cause, CAUSE_INVALID);
    assert_int_equal(bed->core.node.ledger.created, 2);
    bed_destroy(bed);
}

static void test_prompts_get_a_quarter_of_the_rows_however_many_run(void **state) {
    (void)state;
    struct bed *bed = bed_create_sized(32, 256, 8);
    struct message admit = bed_admit(UINT32_MAX);
    uint32_t one = 1;
    admit.u.admit.tokens = &one;
    admit.u.admit.token_count = 1;
    admit.u.admit.output_first = 1;
    admit.u.admit.max_new = 30;
    for (uint32_t i = 0; i < 12; i++) { /* one token each: they run at once */
        admit.u.admit.attempt.v = 100 + i;
        bed_send(bed, &admit, ROUTER);
    }
    admit = bed_admit(UINT32_MAX);
    admit.u.admit.token_count = 2;
    admit.u.admit.output_first = 2;
    for (uint32_t i = 0; i < 6; i++) {
        admit.u.admit.attempt.v = 200 + i;
        bed_send(bed, &admit, ROUTER);
    }
    assert_int_equal(bed->core.run.count, 12);
    assert_int_equal(bed->core.fill.count, 6);
    for (uint32_t left = 6; left > 0; left -= 2) {
        bed_step_done(bed);
        uint32_t prompts = 0;
        for (uint32_t i = 0; i < bed->core.plan.row_count; i++) {
            prompts += bed->core.rows[i].position == 0 && bed->core.rows[i].token_count == 2;
        }
        assert_int_equal(bed->core.plan.row_count, 8);
        assert_int_equal(prompts, 2);
    }
    bed_step_done(bed);
    assert_int_equal(bed->core.fill.count, 0);
    assert_int_equal(bed->core.plan.row_count, 8);
    bed_destroy(bed);
}

/* Three requests of one router: the second and third want logprobs, with one alternative and none.
 */
static void test_logprobs_are_told_for_the_rows_that_want_them(void **state) {
    (void)state;
    struct bed *bed = bed_create_sized(32, 256, 8);
    struct message admit = bed_admit(UINT32_MAX);
    const uint32_t one = 1;
    admit.u.admit.tokens = &one;
    admit.u.admit.token_count = 1;
    admit.u.admit.output_first = 1;
    const uint32_t wanted[3] = {0, 2, 1};
    for (uint32_t i = 0; i < 3; i++) {
        admit.u.admit.attempt.v = 100 + i;
        admit.u.admit.sampling.logprobs = wanted[i];
        bed_send(bed, &admit, ROUTER);
    }
    bed_step_done(bed); /* of the first alone: the others came while it ran */
    const struct message *alone = bed_sent(&bed->out, MESSAGE_TOKENS);
    assert_int_equal(alone->u.tokens.count, 1);
    assert_null(alone->u.tokens.logprobs);
    assert_null(alone->u.tokens.top_counts);
    struct step_result results[3];
    assert_int_equal(bed->core.plan.row_count, 3);
    for (uint32_t i = 0; i < 3; i++) {
        const struct plan_row *row = &bed->core.rows[i];
        assert_true(row->is_sampled);
        results[i] = (struct step_result){.entry = row->entry,
                                          .token = 5,
                                          .is_valid = true,
                                          .logprob = -(float)(i + 1),
                                          .top_count = row->sampling->logprobs > 1 ? 1 : 0,
                                          .top_tokens = {7},
                                          .top_logprobs = {-0.5f}};
    }
    struct event done = {.kind = EVENT_STEP_DONE};
    done.u.step_done.number = bed->core.plan.number;
    done.u.step_done.results = results;
    done.u.step_done.count = 3;
    bed_step(bed, &done);
    const struct message *tokens = bed_sent(&bed->out, MESSAGE_TOKENS);
    assert_int_equal(tokens->u.tokens.count, 3);
    assert_int_equal(tokens->u.tokens.top_count, 1);
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t which = (uint32_t)(tokens->u.tokens.attempts[i] - 100);
        assert_int_equal(tokens->u.tokens.top_counts[i], wanted[which]);
        assert_true((tokens->u.tokens.logprobs[i] != 0.0f) == (wanted[which] > 0));
    }
    assert_int_equal(tokens->u.tokens.top_tokens[0], 7);
    assert_true(tokens->u.tokens.top_logprobs[0] == -0.5f);
    bed_destroy(bed);
}

/* --- growth and retraction
 * ----------------------------------------------------------------------------- */

static void test_a_retracted_request_computes_its_kv_again_and_goes_on(void **state) {
    (void)state;
    struct bed *bed = bed_in(RETRACTED);
    struct decode_entry *entry = bed_entry(bed, bed->slot.v);
    assert_int_equal(entry->page_count, 0);
    assert_int_equal(entry->token_count, PROMPT + 1);
    struct entry_view view;
    uint32_t cursor = 0;
    do {
        assert_true(decode_view(&bed->core, &cursor, &view));
    } while (view.id != bed->slot.v);
    assert_string_equal(view.state, "retracted");
    assert_string_equal(view.waits_for,
                        "room for its KV pages, which it gave up to older requests");
    uint64_t prefilled = bed->core.tokens_prefilled;
    for (uint32_t i = 0; entry->state == DECODE_RETRACTED; i++) { /* the older one has 12 in all */
        assert_in_range(i, 0, 12);
        bed_step_done(bed);
    }
    assert_string_equal(bed->text, "tokens end(ok) step");
    /* The older one came to need every page: nothing is left of what it had computed. */
    const struct plan_row *row = &bed->core.rows[0];
    assert_int_equal(row->entry, bed->slot.v);
    assert_true(row->is_sampled);
    assert_int_equal(row->position + row->token_count, PROMPT + 1);
    assert_int_equal(row->output_first, PROMPT);
    assert_int_equal(row->position, 0);
    bed_step_done(bed);
    bed_step_done(bed);
    assert_string_equal(bed->text, "tokens end(ok)");
    const struct message *end = bed_sent(&bed->out, MESSAGE_END);
    assert_int_equal(end->u.end.finish, FINISH_LENGTH);
    assert_int_equal(end->u.end.usage.completion_tokens, 3);
    assert_int_equal(end->u.end.usage.cached_tokens, 0); /* as it was admitted */
    assert_int_equal(bed->core.tokens_recomputed, PROMPT);
    assert_int_equal(bed->core.tokens_prefilled, prefilled);
    assert_int_equal(bed->core.pages.owned, 0);
    assert_int_equal(bed->core.growth, 0);
    bed_destroy(bed);
}

static void test_a_retracted_request_that_is_resumed_at_once_finds_its_pages(void **state) {
    (void)state;
    struct bed *bed = bed_in(RETRACTED);
    bed_abort(bed, 0x11); /* the older one leaves when its step ends */
    bed_step_done(bed);
    assert_string_equal(bed_state(bed), "running");
    assert_int_equal(bed->core.rows[0].position, 8);
    bed_destroy(bed);
}

static void test_the_youngest_gives_way_and_nobody_is_admitted_before_it_is_back(void **state) {
    (void)state;
    struct bed *bed = bed_create_sized(8, 6, 8);
    uint64_t slots[3];
    for (uint32_t i = 0; i < 3; i++) { /* two pages each */
        slots[i] = bed_admit_local(bed, 100 + i, 6, 14);
        assert_int_not_equal(slots[i], 0);
    }
    while (bed->core.retractions == 0) {
        bed_step_done(bed);
    }
    assert_int_equal(bed_entry(bed, slots[0])->state, DECODE_RUNNING);
    assert_int_equal(bed_entry(bed, slots[2])->state, DECODE_RETRACTED);
    assert_int_equal(bed_admit_local(bed, 200, 1, 1), 0); /* it would fit by itself */
    assert_int_equal(bed_sent(&bed->out, MESSAGE_REJECTED)->u.rejected.cause, CAUSE_BUSY);
    while (bed->core.node.ledger.live == 3) {
        assert_int_equal(bed_entry(bed, slots[0])->state, DECODE_RUNNING);
        bed_step_done(bed);
    }
    uint32_t index = 0;
    assert_false(pool_find(&bed->core.slots, slots[0], &index)); /* the oldest ended first */
    while (bed->core.retracted.count > 0) {
        bed_step_done(bed);
    }
    assert_int_not_equal(bed_admit_local(bed, 200, 1, 1), 0);
    while (bed->core.node.ledger.live > 0) {
        bed_step_done(bed);
    }
    assert_int_equal(bed->core.tokens_generated, 3 * 14 + 1);
    bed_destroy(bed);
}

static void test_the_next_in_the_queue_is_looked_at_when_the_first_has_left(void **state) {
    (void)state;
    struct bed *bed = bed_create_sized(4, 6, 4);
    (void)bed_admit_local(bed, 0x11, 7, 12);
    (void)bed_admit_local(bed, 0x12, 6, 14);
    uint64_t last = bed_admit_local(bed, 0x13, 2, 10);
    while (bed->core.retracted.count < 2) {
        bed_step_done(bed);
    }
    bed_step_done(bed); /* the first needs three pages, and two are free */
    assert_int_equal(bed->core.retracted.count, 2);
    assert_int_equal(pages_available(&bed->core.pages), 2);
    bed_abort(bed, 0x12);
    assert_string_equal(bed->text, "end(aborted)");
    bed_step_done(bed);
    assert_int_equal(pages_available(&bed->core.pages), 0); /* the last one needs two */
    assert_int_equal(bed_entry(bed, last)->state, DECODE_RUNNING);
    bed_destroy(bed);
}

static void test_an_armed_slot_keeps_its_pages_until_the_link_has_let_go(void **state) {
    (void)state;
    struct bed *bed = bed_create_sized(4, 5, 4);
    uint64_t elder = bed_admit_local(bed, 0x11, 7, 12);
    struct message admit = bed_admit(0);
    bed_send(bed, &admit, ROUTER);
    bed->slot = bed_sent(&bed->out, MESSAGE_ADMITTED)->u.admitted.slot;
    bed->key = bed_sent(&bed->out, MESSAGE_ADMITTED)->u.admitted.key;
    apply_open(bed);
    while (!bed->core.is_starved) { /* it may not be retracted either: the oldest waits */
        assert_string_equal(bed_state(bed), "receiving");
        bed_step_done(bed);
    }
    assert_string_equal(bed->text, "tokens");
    struct entry_view view;
    uint32_t cursor = 0;
    assert_true(decode_view(&bed->core, &cursor, &view));
    assert_int_equal(view.id, elder);
    assert_string_equal(view.waits_for, "a free KV page");
    apply_fin_and_covered(bed);
    assert_string_equal(bed_state(bed), "running"); /* committed, and still armed */
    assert_string_equal(bed->text, "commit link_disarm step");
    bed_step_done(bed);
    apply_disarmed(bed);
    while (bed->core.retractions == 0) {
        bed_step_done(bed);
    }
    assert_string_equal(bed_state(bed), "retracted");
    bed_destroy(bed);
}

/* Everything that admission, growth and retraction decide about pages, by counting: prompts are all
 * different, so an entry holds exactly the pages of its tokens, and what is cached is free. */
struct naive {
    uint64_t slot;
    uint32_t tokens, total, pages;
    bool is_waiting;
};

static uint32_t naive_pages(uint32_t tokens) {
    return (tokens + 3) / 4;
}

static uint32_t naive_free(const struct naive *all, uint32_t count, uint32_t pages) {
    for (uint32_t i = 0; i < count; i++) {
        pages -= all[i].pages;
    }
    return pages;
}

static uint32_t naive_wish(const struct naive *one, uint32_t reserve) {
    uint32_t ahead =
        one->tokens + reserve < one->total - 1 ? one->tokens + reserve : one->total - 1;
    return naive_pages(ahead);
}

static uint32_t naive_growth(const struct naive *all, uint32_t count, uint32_t reserve) {
    uint32_t growth = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t wish = naive_wish(&all[i], reserve);
        growth += !all[i].is_waiting && wish > all[i].pages ? wish - all[i].pages : 0;
    }
    return growth;
}

static bool naive_fits(const struct naive *all, uint32_t count, uint32_t pages, uint32_t reserve,
                       const struct naive *one) {
    return naive_free(all, count, pages) >=
           naive_growth(all, count, reserve) + naive_wish(one, reserve);
}

/* Before a step: the oldest that waits returns if it fits; who needs a page gets one, from the
 * youngest if it must be. `all` is in order of admission. */
static void naive_plan(struct naive *all, uint32_t count, uint32_t pages, uint32_t reserve) {
    uint32_t running = 0;
    for (uint32_t i = 0; i < count; i++) {
        running += all[i].is_waiting ? 0 : 1;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (all[i].is_waiting) {
            if (running > 0 && !naive_fits(all, count, pages, reserve, &all[i])) {
                break;
            }
            all[i].is_waiting = false;
            all[i].pages = naive_pages(all[i].tokens);
            running++;
        }
    }
    for (uint32_t last = count;;) {
        uint32_t lacking = 0;
        for (uint32_t i = 0; i < count; i++) {
            lacking += !all[i].is_waiting && naive_pages(all[i].tokens) > all[i].pages ? 1 : 0;
        }
        if (lacking <= naive_free(all, count, pages)) {
            break;
        }
        while (all[--last].is_waiting) {
        }
        all[last].is_waiting = true;
        all[last].pages = 0;
    }
    for (uint32_t i = 0; i < count; i++) {
        all[i].pages = all[i].is_waiting ? 0 : naive_pages(all[i].tokens);
    }
}

static void naive_compare(struct bed *bed, const struct naive *all, uint32_t count) {
    assert_int_equal(bed->core.node.ledger.live, count);
    for (uint32_t i = 0; i < count; i++) {
        const struct decode_entry *entry = bed_entry(bed, all[i].slot);
        assert_int_equal(entry->state, all[i].is_waiting ? DECODE_RETRACTED : DECODE_RUNNING);
        assert_int_equal(entry->token_count, all[i].tokens);
        assert_int_equal(entry->page_count, all[i].pages);
    }
}

static uint32_t naive_run(uint64_t seed, uint32_t reserve) {
    struct prng draw = {mix64(seed)};
    uint32_t pages = 8 + prng_below(&draw, 12);
    struct bed *bed = bed_create_sized(12, pages, 12);
    bed->core.config.reserve_tokens = reserve;
    struct naive all[12];
    uint32_t count = 0;
    uint32_t tokens = 0;
    for (uint32_t turn = 0; turn < 400 || count > 0; turn++) {
        assert_in_range(turn, 0, 4000);
        if (turn < 400 && prng_below(&draw, 3) == 0 && count < 12) {
            struct naive one = {.tokens = 1 + prng_below(&draw, 14)};
            one.total = one.tokens + 1 + prng_below(&draw, 17);
            bool is_waiting = false;
            for (uint32_t i = 0; i < count; i++) {
                is_waiting = is_waiting || all[i].is_waiting;
            }
            bool fits = !is_waiting && naive_fits(all, count, pages, reserve, &one);
            bool is_idle = !bed->core.is_stepping;
            one.slot =
                bed_admit_local(bed, 1000 + seed * 1000 + turn, one.tokens, one.total - one.tokens);
            assert_int_equal(one.slot != 0, fits);
            if (fits) {
                one.pages = naive_pages(one.tokens);
                all[count++] = one;
            }
            if (fits && is_idle) {
                naive_plan(all, count, pages, reserve);
            }
        } else if (bed->core.is_stepping) {
            for (uint32_t i = 0; i < bed->core.plan.row_count; i++) {
                for (uint32_t k = 0; k < count && bed->core.rows[i].is_sampled; k++) {
                    all[k].tokens += all[k].slot == bed->core.rows[i].entry ? 1 : 0;
                    tokens += all[k].slot == bed->core.rows[i].entry ? 1 : 0;
                }
            }
            uint32_t left = 0;
            for (uint32_t k = 0; k < count; k++) {
                if (all[k].tokens < all[k].total) {
                    all[left++] = all[k];
                }
            }
            count = left;
            naive_plan(all, count, pages, reserve);
            bed_step_done(bed);
        }
        naive_compare(bed, all, count);
    }
    assert_int_equal(bed->core.tokens_generated, tokens);
    assert_int_equal(bed->core.pages.owned, 0);
    assert_int_equal(bed->core.words.taken, 0);
    uint32_t retractions = (uint32_t)bed->core.retractions;
    bed_destroy(bed);
    return retractions;
}

static void test_pages_follow_a_naive_model_of_growth_and_retraction(void **state) {
    (void)state;
    uint32_t retractions = 0;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        retractions += naive_run(seed, (uint32_t)(seed % 6));
    }
    assert_true(retractions > 100);
}

static void test_a_full_reserve_retracts_nothing(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 30; seed++) {
        assert_int_equal(naive_run(seed, 32), 0);
    }
}

static void test_a_finished_prompt_is_found_again_by_the_next_request(void **state) {
    (void)state;
    struct bed *bed = bed_in(RUNNING);
    for (uint32_t i = 0; i < 3; i++) {
        apply_step_done(bed);
    }
    assert_string_equal(bed_state(bed), "gone");
    assert_int_equal(bed->core.pages.owned, 0);
    struct message admit = bed_admit(0);
    bed_send(bed, &admit, ROUTER);
    assert_int_equal(bed_sent(&bed->out, MESSAGE_ADMITTED)->u.admitted.cached, 8);
    assert_true(bed_sent(&bed->out, MESSAGE_ADMITTED)->u.admitted.is_local); /* nothing uncached */
    bed_destroy(bed);
}

/* A conversation: the answer's own tokens are found again, as far as they fill pages. */
static void test_what_was_decoded_is_found_by_the_next_turn(void **state) {
    (void)state;
    struct bed *bed = bed_create();
    uint32_t turn[PROMPT + 8 + 1] = {0};
    struct message first = bed_admit(UINT32_MAX);
    first.u.admit.max_new = 8;
    bed_send(bed, &first, ROUTER);
    bed->slot = bed_sent(&bed->out, MESSAGE_ADMITTED)->u.admitted.slot;
    memcpy(turn, first.u.admit.tokens, PROMPT * sizeof *turn);
    for (uint32_t i = 0; i < 8; i++) {
        apply_step_done(bed);
        turn[PROMPT + i] = bed_sent(&bed->out, MESSAGE_TOKENS)->u.tokens.tokens[0];
    }
    assert_string_equal(bed_state(bed), "gone");
    turn[PROMPT + 8] = 7;
    struct message admit = bed_admit(0);
    admit.u.admit.tokens = turn;
    admit.u.admit.token_count = PROMPT + 9;
    admit.u.admit.output_first = PROMPT + 9;
    bed_send(bed, &admit, ROUTER);
    /* All but the last token, which was chosen and never computed. */
    assert_int_equal(bed_sent(&bed->out, MESSAGE_ADMITTED)->u.admitted.cached, PROMPT + 7);
    bed_destroy(bed);
}

/* Prompts of one content, which differ in their attempts only (bed_admit_local). */
static void test_equal_prompts_that_come_together_are_computed_once(void **state) {
    (void)state;
    struct bed *bed = bed_create_sized(8, 32, 4);
    uint64_t blocker = bed_admit_local(bed, 3, 8, 4);
    uint64_t first = bed_admit_local(bed, 1, 13, 4);
    uint64_t second = bed_admit_local(bed, 91, 13, 4);
    uint64_t third = bed_admit_local(bed, 181, 13, 4);
    bed->core.budget.tokens = 16;
    bed_step_done(bed); /* the first token of the blocker */
    assert_int_equal(bed->core.plan.row_count, 2);
    assert_int_equal(bed->core.plan.token_count, 14);
    assert_true(bed->core.plan.rows[0].entry == blocker && bed->core.plan.rows[1].entry == first);
    bed_step_done(bed);
    /* All but the last token of theirs was in the step that they left to the first. */
    assert_int_equal(bed->core.plan.row_count, 4);
    assert_int_equal(bed->core.plan.token_count, 4);
    assert_int_equal(bed_entry(bed, second)->cached, 12);
    assert_int_equal(bed_entry(bed, third)->computed, 12);
    assert_int_equal(bed->core.tokens_prefilled, 8 + 13);
    assert_int_equal(bed->core.pages.hit_tokens_total, 24);
    bed_destroy(bed);
}

/* Whom one waits for may end without a result. Then one computes oneself, and nobody waits twice at
 * one place. */
static void test_who_has_waited_for_nothing_computes_it(void **state) {
    (void)state;
    struct bed *bed = bed_create_sized(8, 32, 4);
    (void)bed_admit_local(bed, 3, 8, 4);
    uint64_t first = bed_admit_local(bed, 1, 6, 4);
    (void)bed_admit_local(bed, 91, 6, 4);
    (void)bed_admit_local(bed, 181, 6, 4);
    bed->core.budget.tokens = 16;
    bed_step_done(bed);
    assert_int_equal(bed->core.plan.row_count, 2);
    assert_true(bed->core.plan.rows[1].entry == first);
    bed_abort(bed, 1);
    bed_step_done(bed);
    assert_int_equal(bed->core.plan.row_count, 3);
    assert_int_equal(bed->core.plan.token_count, 1 + 6 + 6);
    bed_destroy(bed);
}

static void test_a_step_that_nobody_wants_is_abandoned(void **state) {
    (void)state;
    struct bed *bed = bed_create_sized(4, 8, 4);
    (void)bed_admit_local(bed, 1, 3, 4);
    bed_step_done(bed);
    (void)bed_admit_local(bed, 2, 3, 4);
    bed_step_done(bed); /* both are in the step that follows */
    assert_int_equal(bed->core.plan.row_count, 2);
    uint32_t budget = bed->core.budget.tokens;
    bed_abort(bed, 1);
    assert_string_equal(bed->text, "end(aborted)"); /* the other one wants its token */
    bed_abort(bed, 2);
    assert_string_equal(bed->text, "end(aborted) step_abandon");
    assert_int_equal(bed->out.items[bed->out.count - 1].u.abandon.number, bed->core.plan.number);
    bed_wait(bed, 100);
    assert_null(strstr(bed->text, "step_abandon")); /* once is enough */
    assert_int_equal(bed->core.node.ledger.live, 2);
    struct event done = {.kind = EVENT_STEP_DONE};
    done.u.step_done.number = bed->core.plan.number;
    done.u.step_done.status = STATUS_CANCELLED;
    done.u.step_done.elapsed = span_ms(1);
    bed_step(bed, &done);
    assert_int_equal(bed->core.node.ledger.live, 0);
    assert_int_equal(bed->core.pages.owned, 0);
    assert_int_equal(bed->core.budget.tokens, budget); /* nothing is learnt from a piece */
    (void)bed_admit_local(bed, 3, 3, 4);
    assert_string_equal(bed->text, "admitted step");
    bed_step_done(bed); /* the next one is whole again */
    assert_string_equal(bed->text, "tokens step");
    assert_int_equal(bed->core.steps_abandoned, 1);
    bed_destroy(bed);
}

static void test_another_salt_finds_nothing(void **state) {
    (void)state;
    struct bed *bed = bed_in(RUNNING);
    for (uint32_t i = 0; i < 3; i++) {
        apply_step_done(bed);
    }
    struct message admit = bed_admit(0);
    admit.u.admit.salt = salt_of("tenant");
    bed_send(bed, &admit, ROUTER);
    assert_int_equal(bed_sent(&bed->out, MESSAGE_ADMITTED)->u.admitted.cached, 0);
    bed_destroy(bed);
}

/* Siblings that come while the first one's answer is still being made share its prompt. */
static void test_a_prompt_is_found_while_its_answer_is_being_made(void **state) {
    (void)state;
    struct bed *bed = bed_in(RECEIVING); /* from P: at commit */
    apply_covered_and_fin(bed);
    assert_string_equal(bed_state(bed), "running");
    struct message admit = bed_admit(0);
    admit.u.admit.attempt.v = 77;
    bed_send(bed, &admit, ROUTER);
    assert_int_equal(bed_sent(&bed->out, MESSAGE_ADMITTED)->u.admitted.cached,
                     (PROMPT - 1) / 4 * 4);
    bed_destroy(bed);
    bed = bed_create_sized(4, 24, 1); /* its own: with each step */
    admit = bed_admit(UINT32_MAX);
    bed_send(bed, &admit, ROUTER);
    bed->slot = bed_sent(&bed->out, MESSAGE_ADMITTED)->u.admitted.slot;
    assert_int_equal(bed->core.plan.token_count, 4);
    apply_step_done(bed);
    admit.u.admit.attempt.v = 77;
    bed_send(bed, &admit, ROUTER);
    assert_int_equal(bed_sent(&bed->out, MESSAGE_ADMITTED)->u.admitted.cached, 4);
    bed_destroy(bed);
}

static void test_usage_says_what_the_prefill_worker_had(void **state) {
    (void)state;
    struct bed *bed = bed_in(RECEIVING);
    struct message fin = {.kind = MESSAGE_FIN};
    fin.u.fin.slot = bed->slot;
    fin.u.fin.bytes = (PROMPT - 1) * BYTES;
    fin.u.fin.cached = 4;
    bed_send(bed, &fin, PREFILL);
    apply_covered(bed);
    for (uint32_t i = 0; i < 3; i++) {
        apply_step_done(bed);
    }
    assert_int_equal(bed_sent(&bed->out, MESSAGE_END)->u.end.usage.cached_tokens, 4);
    bed_destroy(bed);
}

/* Rows that led to no numbers may be none themselves: nobody else is given them. */
static void test_a_prompt_whose_logits_are_no_numbers_is_not_cached(void **state) {
    (void)state;
    struct bed *bed = bed_in(RUNNING);
    apply_step_not_finite(bed);
    assert_string_equal(bed_state(bed), "gone");
    assert_int_equal(bed->core.pages.index.count, 0);
    bed_destroy(bed);
}

static void test_a_failed_transfer_leaves_nothing_in_the_prefix_cache(void **state) {
    (void)state;
    struct bed *bed = bed_in(RECEIVING);
    apply_bad(bed);
    apply_disarmed(bed);
    assert_string_equal(bed_state(bed), "gone");
    assert_int_equal(bed->core.pages.index.count, 0);
    bed_destroy(bed);
}

static void test_drain_refuses_admits_and_exits_when_the_last_entry_is_gone(void **state) {
    (void)state;
    struct bed *bed = bed_in(RUNNING);
    struct event drain = {.kind = EVENT_DRAIN};
    drain.u.drain.grace = span_ms(30000);
    bed_step(bed, &drain);
    struct message admit = bed_admit(0);
    admit.u.admit.attempt.v = 60;
    bed_send(bed, &admit, ROUTER);
    assert_int_equal(bed_sent(&bed->out, MESSAGE_REJECTED)->u.rejected.cause, CAUSE_DRAINING);
    apply_step_done(bed);
    apply_step_done(bed);
    apply_step_done(bed);
    assert_string_equal(bed->text, "tokens end(ok) exit");
    bed_destroy(bed);
}

static void test_a_drain_deadline_hands_requests_back(void **state) {
    (void)state;
    struct bed *bed = bed_in(RESERVED);
    struct event drain = {.kind = EVENT_DRAIN};
    drain.u.drain.grace = span_ms(100);
    bed_step(bed, &drain);
    bed_wait(bed, 1000);
    assert_string_equal(bed->text, "end(failed) exit");
    bed_destroy(bed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_cell_of_the_decode_table),
        cmocka_unit_test(test_every_state_has_a_deadline_that_ends_it),
        cmocka_unit_test(test_a_stall_after_fin_ends_the_slot_within_t_stall),
        cmocka_unit_test(test_silence_of_the_router_ends_its_entries_within_the_lease),
        cmocka_unit_test(test_a_paused_process_reads_its_mail_before_it_judges),
        cmocka_unit_test(test_a_newer_hello_ends_the_older_session_of_that_incarnation),
        cmocka_unit_test(test_a_prefill_worker_of_another_layout_is_refused),
        cmocka_unit_test(test_admission_refuses_what_can_never_fit_and_what_does_not_fit_now),
        cmocka_unit_test(test_prompts_get_a_quarter_of_the_rows_however_many_run),
        cmocka_unit_test(test_logprobs_are_told_for_the_rows_that_want_them),
        cmocka_unit_test(test_a_retracted_request_computes_its_kv_again_and_goes_on),
        cmocka_unit_test(test_a_retracted_request_that_is_resumed_at_once_finds_its_pages),
        cmocka_unit_test(test_the_youngest_gives_way_and_nobody_is_admitted_before_it_is_back),
        cmocka_unit_test(test_the_next_in_the_queue_is_looked_at_when_the_first_has_left),
        cmocka_unit_test(test_an_armed_slot_keeps_its_pages_until_the_link_has_let_go),
        cmocka_unit_test(test_pages_follow_a_naive_model_of_growth_and_retraction),
        cmocka_unit_test(test_a_full_reserve_retracts_nothing),
        cmocka_unit_test(test_a_finished_prompt_is_found_again_by_the_next_request),
        cmocka_unit_test(test_what_was_decoded_is_found_by_the_next_turn),
        cmocka_unit_test(test_equal_prompts_that_come_together_are_computed_once),
        cmocka_unit_test(test_who_has_waited_for_nothing_computes_it),
        cmocka_unit_test(test_a_step_that_nobody_wants_is_abandoned),
        cmocka_unit_test(test_another_salt_finds_nothing),
        cmocka_unit_test(test_a_prompt_is_found_while_its_answer_is_being_made),
        cmocka_unit_test(test_usage_says_what_the_prefill_worker_had),
        cmocka_unit_test(test_a_prompt_whose_logits_are_no_numbers_is_not_cached),
        cmocka_unit_test(test_a_failed_transfer_leaves_nothing_in_the_prefix_cache),
        cmocka_unit_test(test_drain_refuses_admits_and_exits_when_the_last_entry_is_gone),
        cmocka_unit_test(test_a_drain_deadline_hands_requests_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
