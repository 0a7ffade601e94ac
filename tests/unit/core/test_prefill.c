/* P, cell by cell: every (state, event) pair of the table in protocol.md section 4, and every
 * state's deadline. */
#include "unit/core/bed.h"

#define ROUTER 1u
#define DECODE 2u /* the stream that P opens to D */
#define PROMPT 9u
#define INC_D  500u

enum column { UNKNOWN, QUEUED, COMPUTING, SENT, LEAVING, COLUMNS };

struct bed {
    struct prefill_core core;
    struct kv_layout layout;
    struct effects out;
    void *memory;
    int64_t now;
    char text[512];
};

static const struct attempt_id attempt = {0x77};
static const struct slot_id slot = {(uint64_t)1 << 32 | 3};

static void bed_step(struct bed *bed, const struct event *event) {
    bed->now += 1000000;
    prefill_core_step(&bed->core, event, (struct instant){bed->now}, &bed->out);
    prefill_verify(&bed->core);
    bed_describe(&bed->out, bed->text, sizeof bed->text);
}

static void bed_wait(struct bed *bed, int64_t ms) {
    for (int64_t left = ms; left > 0; left -= TICK_MS) {
        bed->now += TICK_MS * 1000000ll;
        struct message beat = {.kind = MESSAGE_BEAT};
        static const uint64_t streams[2] = {ROUTER, DECODE};
        for (uint32_t i = 0; i < 2; i++) {
            struct event mail = bed_mail(&beat, streams[i]);
            prefill_core_step(&bed->core, &mail, (struct instant){bed->now}, &bed->out);
        }
        struct event tick = {.kind = EVENT_TICK};
        prefill_core_step(&bed->core, &tick, (struct instant){bed->now}, &bed->out);
        prefill_verify(&bed->core);
        bed_describe(&bed->out, bed->text, sizeof bed->text);
        if (bed->text[0] != '\0') {
            return;
        }
    }
}

static struct message bed_prefill(void) {
    static const uint32_t tokens[PROMPT] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    struct message message = {.kind = MESSAGE_PREFILL};
    message.u.prefill.attempt = attempt;
    message.u.prefill.tokens = tokens;
    message.u.prefill.token_count = PROMPT;
    message.u.prefill.slot = slot;
    message.u.prefill.key = 5;
    message.u.prefill.decode.v = INC_D;
    message.u.prefill.deadline_ms = 60000;
    text_copy(message.u.prefill.address, ADDRESS_MAX, "d:1");
    return message;
}

static void bed_send(struct bed *bed, const struct message *message, uint64_t stream) {
    struct event event = bed_mail(message, stream);
    bed_step(bed, &event);
}

static struct bed *bed_create(void) {
    struct bed *bed = calloc(1, sizeof *bed);
    assert_non_null(bed);
    bed->layout = (struct kv_layout){.page_tokens = 4, .component_count = 2};
    for (uint32_t i = 0; i < 2; i++) {
        bed->layout.components[i] = (struct kv_component){.name = "k",
                                                          .layer = (uint16_t)i,
                                                          .tokens_per_row = 1,
                                                          .row_bytes = 4,
                                                          .dtype = KV_DTYPE_F32,
                                                          .lifetime = KV_LIFETIME_PAGE};
    }
    assert_int_equal(layout_complete(&bed->layout), STATUS_OK);
    struct prefill_config config = {.node = {.role = ROLE_PREFILL,
                                             .incarnation = {9},
                                             .layout = bed->layout.digest,
                                             .sessions_max = 8,
                                             .timers = timers_default()},
                                    .layout = &bed->layout,
                                    .entries_max = 4,
                                    .page_count = 8,
                                    .context = 32,
                                    .vocab = 100,
                                    .rows_max = 4,
                                    .step_tokens_max = 16,
                                    .sends_high = 8,
                                    .batch_bytes = 1,
                                    .shared_min = 4,
                                    .changes_max = 64,
                                    .secret = {1, 2}};
    bed->memory = bed_memory(prefill_bytes(&config));
    prefill_init(&bed->core, &config, bed->memory);
    bed->now = BED_SECOND;
    struct event accepted = {.kind = EVENT_STREAM_ACCEPTED, .stream = {ROUTER}};
    bed_step(bed, &accepted);
    struct message message;
    struct event hello =
        bed_hello(&message, ROUTER, ROLE_ROUTER, 100, (struct layout_digest){0, 0});
    bed_step(bed, &hello);
    assert_string_equal(bed->text, "hello");
    return bed;
}

static void bed_destroy(struct bed *bed) {
    free(bed->memory);
    free(bed);
}

static const char *bed_state(const struct bed *bed) {
    for (uint32_t i = 0; i < bed->core.config.entries_max; i++) {
        if (bed->core.entries[i].attempt.v == attempt.v) {
            return prefill_state_name(bed->core.entries[i].state);
        }
    }
    return "gone";
}

static void bed_decode_hello(struct bed *bed) {
    struct message message;
    struct event hello = bed_hello(&message, DECODE, ROLE_DECODE, INC_D, bed->layout.digest);
    bed_step(bed, &hello);
}

static struct message bed_accept(void) {
    static const uint8_t address[2] = {1, 2};
    struct message accept = {.kind = MESSAGE_ACCEPT};
    accept.u.accept.slot = slot;
    accept.u.accept.address = address;
    accept.u.accept.address_len = 2;
    return accept;
}

static void apply_step_done(struct bed *bed) {
    struct event event = {.kind = EVENT_STEP_DONE};
    event.u.step_done.number = bed->core.plan.number;
    event.u.step_done.elapsed = span_ms(1);
    event.u.step_done.ended.ns = bed->now; /* a millisecond before P hears of it */
    bed_step(bed, &event);
}

/* The router aborts an attempt. */
static void bed_abort(struct bed *bed, uint64_t which) {
    struct message abort = {.kind = MESSAGE_ABORT};
    abort.u.abort.attempt.v = which;
    bed_send(bed, &abort, ROUTER);
}

/* QUEUED: its Open is sent, D has not answered. LEAVING: aborted while its sends are outstanding.
 */
static struct bed *bed_in(enum column column) {
    struct bed *bed = bed_create();
    if (column == UNKNOWN) {
        return bed;
    }
    struct message prefill = bed_prefill();
    bed_send(bed, &prefill, ROUTER);
    assert_string_equal(bed->text, "stream_open hello queued");
    bed_decode_hello(bed);
    assert_string_equal(bed->text, "open");
    if (column == QUEUED) {
        return bed;
    }
    struct message accept = bed_accept();
    bed_send(bed, &accept, DECODE);
    assert_string_equal(bed->text, "link_connect step");
    if (column == COMPUTING) {
        return bed;
    }
    apply_step_done(bed);
    assert_string_equal(bed->text, "link_send fin");
    if (column == LEAVING) {
        bed_abort(bed, attempt.v);
        assert_string_equal(bed->text, "prefill_end(aborted) abort_slot");
    }
    return bed;
}

typedef void (*apply)(struct bed *bed);

static void apply_prefill_again(struct bed *bed) {
    struct message prefill = bed_prefill();
    bed_send(bed, &prefill, ROUTER);
}
static void apply_accept(struct bed *bed) {
    struct message accept = bed_accept();
    bed_send(bed, &accept, DECODE);
}
static void apply_refuse(struct bed *bed) {
    struct message refuse = {.kind = MESSAGE_REFUSE};
    refuse.u.refuse.slot = slot;
    bed_send(bed, &refuse, DECODE);
}
static void apply_commit(struct bed *bed) {
    struct message commit = {.kind = MESSAGE_COMMIT};
    commit.u.commit.slot = slot;
    bed_send(bed, &commit, DECODE);
}
static void apply_abort(struct bed *bed) {
    bed_abort(bed, attempt.v);
}
static void apply_end(struct bed *bed, uint64_t stream) {
    struct event event = {.kind = EVENT_STREAM_ENDED, .stream = {stream}};
    event.u.stream_end.cause = CAUSE_SESSION_ENDED;
    bed_step(bed, &event);
}
static void apply_router_ends(struct bed *bed) {
    apply_end(bed, ROUTER);
}
static void apply_decode_ends(struct bed *bed) {
    apply_end(bed, DECODE);
}
static void apply_step_failed(struct bed *bed) {
    struct event event = {.kind = EVENT_STEP_DONE};
    event.u.step_done.number = bed->core.plan.number;
    event.u.step_done.status = STATUS_INTERNAL;
    bed_step(bed, &event);
}
static void apply_layer_done(struct bed *bed) {
    struct event event = {.kind = EVENT_LAYER_DONE};
    event.u.layer_done.number = bed->core.plan.number;
    bed_step(bed, &event);
}
static void apply_sent(struct bed *bed, enum status status) {
    for (uint32_t i = 0; i < bed->core.config.entries_max; i++) {
        if (bed->core.entries[i].sends > 0) {
            struct event event = {.kind = EVENT_LINK_SENT};
            event.u.sent.op = bed->core.entries[i].id;
            event.u.sent.status = status;
            bed_step(bed, &event);
            return;
        }
    }
    bed->text[0] = '\0';
}
static void apply_send_done(struct bed *bed) {
    apply_sent(bed, STATUS_OK);
}
static void apply_send_failed(struct bed *bed) {
    apply_sent(bed, STATUS_UNAVAILABLE);
}
static void apply_link_failed(struct bed *bed) {
    struct event event = {.kind = EVENT_LINK_FAILED};
    event.u.peer.peer = 1;
    bed_step(bed, &event);
}
static void apply_unknown_by_router(struct bed *bed) {
    uint64_t id = attempt.v;
    struct message unknown = {.kind = MESSAGE_UNKNOWN};
    unknown.u.audit.count = 1;
    unknown.u.audit.ids = &id;
    bed_send(bed, &unknown, ROUTER);
}
static void apply_unknown_by_decode(struct bed *bed) {
    uint64_t id = slot.v;
    struct message unknown = {.kind = MESSAGE_UNKNOWN};
    unknown.u.audit.count = 1;
    unknown.u.audit.ids = &id;
    bed_send(bed, &unknown, DECODE);
}
static void apply_audit_by_router(struct bed *bed) {
    uint64_t id = attempt.v;
    struct message audit = {.kind = MESSAGE_AUDIT};
    audit.u.audit.count = 1;
    audit.u.audit.ids = &id;
    bed_send(bed, &audit, ROUTER);
}
static void apply_deadline(struct bed *bed) {
    bed_wait(bed, 61000);
}
static void apply_router_nonsense(struct bed *bed) {
    struct message accept = bed_accept();
    bed_send(bed, &accept, ROUTER);
}

static const struct {
    const char *name;
    apply apply;
    const char *cell[COLUMNS]; /* NULL: cannot happen (the event's sender is not there) */
} table[] = {
    {"Prefill of the same attempt",
     apply_prefill_again,
     {"queued: stream_open hello queued", "gone: stream_close abort_slot",
      "leaving: stream_close abort_slot step_abandon", "leaving: stream_close abort_slot",
      "leaving: stream_close"}},
    {"Accept",
     apply_accept,
     {NULL, "computing: link_connect step",
      "leaving: stream_close prefill_end(failed) link_close step_abandon",
      "leaving: stream_close prefill_end(failed) link_close", "leaving: "}},
    {"Refuse",
     apply_refuse,
     {NULL, "gone: prefill_end(failed)", "leaving: prefill_end(failed) step_abandon",
      "leaving: prefill_end(failed)", "leaving: "}},
    {"Commit",
     apply_commit,
     {NULL, "gone: stream_close prefill_end(failed)",
      "leaving: stream_close prefill_end(failed) link_close step_abandon",
      "leaving: prefill_end(ok)", "leaving: "}},
    {"Abort from R",
     apply_abort,
     {"gone: ", "gone: prefill_end(aborted) abort_slot",
      "leaving: prefill_end(aborted) abort_slot step_abandon",
      "leaving: prefill_end(aborted) abort_slot", "leaving: "}},
    {"R-P session ends",
     apply_router_ends,
     {"gone: ", "gone: abort_slot", "leaving: abort_slot step_abandon", "leaving: abort_slot",
      "leaving: "}},
    {"P-D session ends",
     apply_decode_ends,
     {NULL, "gone: prefill_end(failed)", "leaving: prefill_end(failed) link_close step_abandon",
      "leaving: prefill_end(failed) link_close", "leaving: link_close"}},
    {"endpoint failed",
     apply_link_failed,
     {NULL, NULL, "leaving: stream_close prefill_end(failed) link_close step_abandon",
      "leaving: stream_close prefill_end(failed) link_close", "leaving: stream_close link_close"}},
    {"layer done",
     apply_layer_done,
     {"gone: ", "queued: ", "computing: link_send", "sent: ", "leaving: "}},
    {"last step done",
     apply_step_done,
     {"gone: ", "queued: ", "sent: link_send fin", "sent: ", "leaving: "}},
    {"step failed",
     apply_step_failed,
     {"gone: ", "queued: ", "gone: prefill_end(failed) abort_slot", "sent: ", "leaving: "}},
    {"send done", apply_send_done, {NULL, NULL, NULL, "sent: ", "gone: "}},
    {"send failed",
     apply_send_failed,
     {NULL, NULL, NULL, "gone: prefill_end(failed) abort_slot", "gone: "}},
    {"R does not know it",
     apply_unknown_by_router,
     {"gone: ", "gone: prefill_end(failed) abort_slot",
      "leaving: prefill_end(failed) abort_slot step_abandon",
      "leaving: prefill_end(failed) abort_slot", "leaving: "}},
    {"D does not know it",
     apply_unknown_by_decode,
     {NULL, "gone: prefill_end(failed) abort_slot",
      "leaving: prefill_end(failed) abort_slot step_abandon",
      "leaving: prefill_end(failed) abort_slot", "leaving: "}},
    {"R's audit",
     apply_audit_by_router,
     {"gone: unknown", "queued: ", "computing: ", "sent: ", "leaving: unknown"}},
    {"its deadline; with a send outstanding T_stall comes first",
     apply_deadline,
     {"gone: ", "gone: prefill_end(failed) abort_slot",
      "leaving: prefill_end(failed) abort_slot step_abandon",
      "leaving: stream_close prefill_end(failed) link_close", "leaving: stream_close link_close"}},
    {"a message R may not send",
     apply_router_nonsense,
     {"gone: stream_close", "gone: stream_close abort_slot",
      "leaving: stream_close abort_slot step_abandon", "leaving: stream_close abort_slot",
      "leaving: stream_close"}},
};

static void test_every_cell_of_the_prefill_table(void **state) {
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

static void
test_a_send_that_never_ends_closes_the_endpoint_and_frees_when_it_is_closed(void **state) {
    (void)state;
    struct bed *bed = bed_in(SENT);
    int64_t start = bed->now;
    bed_wait(bed, 20000);
    assert_in_range(bed->now - start, 4 * BED_SECOND, 5 * BED_SECOND + 200000000);
    assert_string_equal(bed_state(bed), "leaving");
    assert_true(bed->core.pages.owned > 0); /* the link may still read them (I1) */
    apply_sent(bed, STATUS_CANCELLED);
    assert_string_equal(bed_state(bed), "gone");
    assert_int_equal(bed->core.pages.owned, 0);
    struct event closed = {.kind = EVENT_LINK_CLOSED};
    closed.u.peer.peer = 1;
    bed_step(bed, &closed);
    apply_decode_ends(bed);
    assert_int_equal(bed->core.node.sessions_ended, 0);
    bed_destroy(bed);
}

static void test_pages_are_taken_only_after_the_decode_worker_accepted(void **state) {
    (void)state;
    struct bed *bed = bed_in(QUEUED);
    assert_int_equal(bed->core.pages.owned, 0);
    apply_accept(bed);
    assert_int_equal(bed->core.pages.owned, 2);
    bed_destroy(bed);
}

static void test_what_is_cached_is_sent_but_not_computed_again(void **state) {
    (void)state;
    struct bed *bed = bed_in(SENT);
    apply_commit(bed);
    apply_send_done(bed);
    assert_string_equal(bed_state(bed), "gone");
    struct message prefill = bed_prefill();
    prefill.u.prefill.attempt.v = 0x78;
    prefill.u.prefill.slot.v += (uint64_t)2 << 32;
    bed_send(bed, &prefill, ROUTER);
    assert_string_equal(bed->text, "queued open");
    struct message accept = bed_accept();
    accept.u.accept.slot = prefill.u.prefill.slot;
    bed_send(bed, &accept, DECODE);
    assert_string_equal(bed->text, "link_send fin"); /* all eight tokens were cached */
    assert_int_equal(bed->core.tokens_computed, 8);
    assert_int_equal(bed_sent(&bed->out, MESSAGE_FIN)->u.fin.cached, 8);
    struct message commit = {.kind = MESSAGE_COMMIT};
    commit.u.commit.slot = prefill.u.prefill.slot;
    bed_send(bed, &commit, DECODE);
    assert_int_equal(bed_sent(&bed->out, MESSAGE_PREFILL_END)->u.prefill_end.cached, 8);
    assert_int_equal(bed->core.pages.hit_tokens_total, 8);
    assert_int_equal(bed->core.pages.query_tokens_total, 16);
    bed_destroy(bed);
}

/* Another prompt of PROMPT tokens from `first` upwards, accepted by D. */
static void bed_another(struct bed *bed, uint32_t which, uint32_t first) {
    uint32_t tokens[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++) {
        tokens[i] = first + i;
    }
    struct message prefill = bed_prefill();
    prefill.u.prefill.tokens = tokens;
    prefill.u.prefill.attempt.v = attempt.v + which;
    prefill.u.prefill.slot.v += (uint64_t)which << 32;
    bed_send(bed, &prefill, ROUTER);
    assert_string_equal(bed->text, "queued open");
    struct message accept = bed_accept();
    accept.u.accept.slot = prefill.u.prefill.slot;
    bed_send(bed, &accept, DECODE);
}

static void test_equal_prompts_that_come_together_are_computed_once(void **state) {
    (void)state;
    struct bed *bed = bed_in(QUEUED);
    bed->core.budget.tokens = 4;
    apply_accept(bed); /* tokens [0, 4) are in a step */
    bed_another(bed, 1, 1);
    assert_string_equal(bed->text, "");
    bed->core.budget.tokens = 16;
    apply_step_done(bed);
    /* The second has the first page, as the first one's is; what comes next it leaves to it. */
    assert_string_equal(bed->text, "link_send link_send step");
    assert_int_equal(bed->core.plan.row_count, 1);
    assert_int_equal(bed->core.plan.rows[0].position, 4);
    assert_int_equal(bed->core.pages.owned, 3);
    apply_step_done(bed);
    assert_string_equal(bed->text, "link_send fin link_send fin");
    assert_int_equal(bed_sent(&bed->out, MESSAGE_FIN)->u.fin.cached, 0);
    assert_int_equal(bed->core.tokens_computed, 8);
    assert_int_equal(bed->core.tokens_cached, 8);
    assert_int_equal(bed->core.bytes_sent, 2 * 8 * 8);
    assert_int_equal(bed->core.pages.owned, 2);
    assert_int_equal(bed->core.pages.hit_tokens_total, 8);
    assert_int_equal(bed->core.pages.query_tokens_total, 16);
    bed_destroy(bed);
}

/* Whom one waits for may end without a result. Then one computes oneself, and nobody waits twice at
 * one place. */
static void test_who_has_waited_for_nothing_computes_it(void **state) {
    (void)state;
    struct bed *bed = bed_in(COMPUTING);
    for (uint32_t which = 1; which <= 3; which++) {
        bed_another(bed, which, 20);
    }
    apply_step_done(bed);
    assert_int_equal(bed->core.plan.row_count, 1);
    bed_abort(bed, attempt.v + 1);
    apply_step_done(bed);
    assert_string_equal(bed->text, "step");
    assert_int_equal(bed->core.plan.row_count, 2);
    assert_int_equal(bed->core.plan.token_count, 16);
    bed_destroy(bed);
}

static void test_a_step_that_nobody_wants_is_abandoned(void **state) {
    (void)state;
    struct bed *bed = bed_in(COMPUTING);
    bed_another(bed, 1, 20);
    bed_another(bed, 2, 21);
    apply_step_done(bed);
    assert_int_equal(bed->core.plan.row_count, 2);
    for (uint32_t which = 1; which <= 2; which++) {
        bed_abort(bed, attempt.v + which);
        assert_int_equal(strstr(bed->text, "step_abandon") != NULL, which == 2);
    }
    assert_int_equal(bed->out.items[bed->out.count - 1].u.abandon.number, bed->core.plan.number);
    apply_layer_done(bed); /* what it still does is sent to nobody */
    assert_string_equal(bed->text, "");
    struct event done = {.kind = EVENT_STEP_DONE};
    done.u.step_done.number = bed->core.plan.number;
    done.u.step_done.status = STATUS_CANCELLED;
    bed_step(bed, &done);
    assert_int_equal(bed->core.steps_abandoned, 1);
    bed_destroy(bed);
}

static void test_another_prompt_does_not_wait(void **state) {
    (void)state;
    struct bed *bed = bed_in(COMPUTING);
    bed_another(bed, 1, 20);
    bed_another(bed, 2, 21);
    apply_step_done(bed);
    assert_int_equal(bed->core.plan.row_count, 2);
    bed_destroy(bed);
}

static void test_another_salt_is_computed_again(void **state) {
    (void)state;
    struct bed *bed = bed_in(SENT);
    apply_commit(bed);
    apply_send_done(bed);
    struct message prefill = bed_prefill();
    prefill.u.prefill.attempt.v = 0x78;
    prefill.u.prefill.slot.v += (uint64_t)2 << 32;
    prefill.u.prefill.salt = salt_of("tenant");
    bed_send(bed, &prefill, ROUTER);
    struct message accept = bed_accept();
    accept.u.accept.slot = prefill.u.prefill.slot;
    bed_send(bed, &accept, DECODE);
    assert_string_equal(bed->text, "step");
    bed_destroy(bed);
}

static void test_a_queue_of_more_than_its_seconds_is_busy(void **state) {
    (void)state;
    struct bed *bed = bed_in(QUEUED);
    bed->core.budget.ns_per_token = BED_SECOND; /* a very slow machine */
    struct message prefill = bed_prefill();
    prefill.u.prefill.attempt.v = 0x78;
    prefill.u.prefill.slot.v += (uint64_t)2 << 32;
    bed_send(bed, &prefill, ROUTER);
    assert_string_equal(bed->text, "busy");
    /* six seconds too many, by estimate: soon, not at once and not in six seconds */
    assert_int_equal(bed_sent(&bed->out, MESSAGE_BUSY)->u.rejected.retry_after_ms, 250);
    assert_int_equal(bed->core.node.ledger.live, 1);
    bed_destroy(bed);
}

static void test_a_decode_worker_that_is_another_process_by_now_is_not_talked_to(void **state) {
    (void)state;
    struct bed *bed = bed_create();
    struct message prefill = bed_prefill();
    bed_send(bed, &prefill, ROUTER);
    struct message message;
    struct event hello = bed_hello(&message, DECODE, ROLE_DECODE, INC_D + 1, bed->layout.digest);
    bed_step(bed, &hello);
    assert_string_equal(bed->text, "stream_close prefill_end(failed)");
    bed_destroy(bed);
}

static void test_long_prompts_are_cut_into_steps_within_the_budget(void **state) {
    (void)state;
    struct bed *bed = bed_in(QUEUED);
    bed->core.budget.tokens = 3;
    apply_accept(bed);
    assert_int_equal(bed->core.plan.token_count, 3);
    apply_step_done(bed);
    assert_string_equal(bed->text, "link_send step");
    assert_int_equal(bed->core.plan.token_count, 5); /* a full, short step: the budget grows */
    apply_step_done(bed);
    assert_string_equal(bed->text, "link_send fin");
    assert_int_equal(bed->core.bytes_sent, 8 * 8);
    bed_destroy(bed);
}

/* From the engine's end of the last step to Commit; told to R in whole microseconds. */
static void test_exposed_time_is_from_the_end_of_computing_to_commit(void **state) {
    (void)state;
    struct bed *bed = bed_in(SENT);
    bed->now += 5000000 + 1;
    apply_commit(bed);
    assert_int_equal(bed_sent(&bed->out, MESSAGE_PREFILL_END)->u.prefill_end.exposed_us, 7001);
    assert_int_equal(bed->core.exposed.sum_us, 7000);
    apply_send_done(bed);
    assert_int_equal(bed->core.node.terminals[0].exposed.ns, 7000001);
    bed_destroy(bed);
}

/* The time in which outstanding sends keep the next step back is not hidden either. */
static void test_time_in_which_sends_keep_a_step_back_is_exposed(void **state) {
    (void)state;
    struct bed *bed = bed_in(QUEUED);
    bed->core.budget.tokens = 5;
    bed->core.config.sends_high = 1;
    apply_accept(bed);
    apply_layer_done(bed);
    assert_string_equal(bed->text, "link_send");
    apply_step_done(bed);
    assert_string_equal(bed->text, "link_send"); /* two are under way: no step */
    bed->now += 20000000;
    apply_send_done(bed); /* 21 ms later */
    assert_string_equal(bed->text, "step");
    bed->now += 50000000; /* computing hides the other one */
    apply_send_done(bed);
    apply_step_done(bed);
    assert_string_equal(bed->text, "link_send fin");
    apply_commit(bed);
    assert_int_equal(bed_sent(&bed->out, MESSAGE_PREFILL_END)->u.prefill_end.exposed_us,
                     21000 + 2000);
    bed_destroy(bed);
}

/* Nothing was computed, so nothing hides the sends: from their start. */
static void test_of_a_cached_prompt_all_is_exposed(void **state) {
    (void)state;
    struct bed *bed = bed_in(SENT);
    apply_commit(bed);
    apply_send_done(bed);
    struct message prefill = bed_prefill();
    prefill.u.prefill.attempt.v = 0x78;
    prefill.u.prefill.slot.v += (uint64_t)2 << 32;
    bed_send(bed, &prefill, ROUTER);
    struct message accept = bed_accept();
    accept.u.accept.slot = prefill.u.prefill.slot;
    bed_send(bed, &accept, DECODE);
    assert_string_equal(bed->text, "link_send fin");
    bed->now += 4000000;
    struct message commit = {.kind = MESSAGE_COMMIT};
    commit.u.commit.slot = prefill.u.prefill.slot;
    bed_send(bed, &commit, DECODE);
    assert_int_equal(bed_sent(&bed->out, MESSAGE_PREFILL_END)->u.prefill_end.exposed_us, 5000);
    bed_destroy(bed);
}

static void test_a_failed_hand_off_tells_no_exposed_time(void **state) {
    (void)state;
    struct bed *bed = bed_in(SENT);
    apply_refuse(bed);
    assert_int_equal(bed_sent(&bed->out, MESSAGE_PREFILL_END)->u.prefill_end.exposed_us, 0);
    assert_int_equal(bed->core.exposed.sum_us, 0);
    bed_destroy(bed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_cell_of_the_prefill_table),
        cmocka_unit_test(
            test_a_send_that_never_ends_closes_the_endpoint_and_frees_when_it_is_closed),
        cmocka_unit_test(test_pages_are_taken_only_after_the_decode_worker_accepted),
        cmocka_unit_test(test_what_is_cached_is_sent_but_not_computed_again),
        cmocka_unit_test(test_equal_prompts_that_come_together_are_computed_once),
        cmocka_unit_test(test_who_has_waited_for_nothing_computes_it),
        cmocka_unit_test(test_a_step_that_nobody_wants_is_abandoned),
        cmocka_unit_test(test_another_prompt_does_not_wait),
        cmocka_unit_test(test_another_salt_is_computed_again),
        cmocka_unit_test(test_a_queue_of_more_than_its_seconds_is_busy),
        cmocka_unit_test(test_a_decode_worker_that_is_another_process_by_now_is_not_talked_to),
        cmocka_unit_test(test_long_prompts_are_cut_into_steps_within_the_budget),
        cmocka_unit_test(test_exposed_time_is_from_the_end_of_computing_to_commit),
        cmocka_unit_test(test_time_in_which_sends_keep_a_step_back_is_exposed),
        cmocka_unit_test(test_of_a_cached_prompt_all_is_exposed),
        cmocka_unit_test(test_a_failed_hand_off_tells_no_exposed_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
