/* R, cell by cell: every (state, event) pair of the table in protocol.md section 4, and every
 * state's deadline. */
#include "unit/core/bed.h"

#define DECODE  2u /* streams that R opens, in the order in which workers are seen */
#define PREFILL 4u
#define DECODE2 6u
#define CALL    31u

enum column { TOKENIZING, PLACING, ADMITTING, PREFILLING, ASKING, STREAMING, ANSWERING, COLUMNS };

struct bed {
    struct router_core core;
    struct effects out;
    void *memory;
    int64_t now;
    uint64_t request;
    struct attempt_id attempt; /* the first one */
    char text[512];
};

static const struct layout_digest digest = {5, 6};

static void bed_step(struct bed *bed, const struct event *event) {
    bed->now += 1000000;
    router_core_step(&bed->core, event, (struct instant){bed->now}, &bed->out);
    router_verify(&bed->core);
    bed_describe(&bed->out, bed->text, sizeof bed->text);
}

static void bed_send(struct bed *bed, const struct message *message, uint64_t stream) {
    struct event event = bed_mail(message, stream);
    bed_step(bed, &event);
}

static void bed_wait(struct bed *bed, int64_t ms) {
    for (int64_t left = ms; left > 0; left -= TICK_MS) {
        bed->now += TICK_MS * 1000000ll;
        for (uint32_t i = 0; i < bed->core.node.config.sessions_max; i++) {
            const struct session *session = &bed->core.node.sessions[i];
            struct message beat = {.kind = MESSAGE_BEAT};
            struct event mail = bed_mail(&beat, session->stream.v);
            if (session->phase == SESSION_LIVE) {
                router_core_step(&bed->core, &mail, (struct instant){bed->now}, &bed->out);
            }
        }
        struct event tick = {.kind = EVENT_TICK};
        router_core_step(&bed->core, &tick, (struct instant){bed->now}, &bed->out);
        router_verify(&bed->core);
        bed_describe(&bed->out, bed->text, sizeof bed->text);
        if (strstr(bed->text, "abort") != NULL || strstr(bed->text, "answer") != NULL) {
            return;
        }
    }
}

/* A worker of the model "m", at an address of its own. */
static struct worker_info bed_info(enum role role, uint64_t incarnation) {
    struct worker_info info = {.incarnation = {incarnation},
                               .role = role,
                               .layout = digest,
                               .vocab = 100,
                               .context = 64,
                               .kv_tokens = 256,
                               .page_tokens = 4,
                               .model = "m",
                               .id = "w"};
    (void)snprintf(info.address, ADDRESS_MAX, "w:%llu", (unsigned long long)incarnation);
    return info;
}

static void bed_seen(struct bed *bed, const struct worker_info *info) {
    struct event seen = {.kind = EVENT_WORKER_SEEN};
    seen.u.worker_seen.info = info;
    bed_step(bed, &seen);
}

static void bed_worker(struct bed *bed, enum role role, uint64_t incarnation, uint64_t stream) {
    struct worker_info info = bed_info(role, incarnation);
    bed_seen(bed, &info);
    struct message message;
    struct event hello = bed_hello(&message, stream, role, incarnation, digest);
    bed_step(bed, &hello);
}

/* size: sessions, requests and workers at most. */
static struct bed *bed_create_of(uint32_t size, bool has_workers) {
    struct bed *bed = calloc(1, sizeof *bed);
    assert_non_null(bed);
    struct router_config config = {.node = {.role = ROLE_ROUTER,
                                            .incarnation = {9},
                                            .sessions_max = size,
                                            .timers = timers_default()},
                                   .requests_max = size,
                                   .workers_max = size,
                                   .blocks_max = 256,
                                   .words_max = 4096,
                                   .secret = {1, 2}};
    bed->memory = bed_memory(router_bytes(&config));
    router_init(&bed->core, &config, bed->memory);
    bed->now = BED_SECOND;
    if (has_workers) {
        bed_worker(bed, ROLE_DECODE, 500, DECODE);
        bed_worker(bed, ROLE_PREFILL, 600, PREFILL);
    }
    return bed;
}

static struct bed *bed_create(bool has_workers) {
    return bed_create_of(8, has_workers);
}

static void bed_destroy(struct bed *bed) {
    free(bed->memory);
    free(bed);
}

static const char *bed_state(const struct bed *bed) {
    for (uint32_t i = 0; i < bed->core.config.requests_max; i++) {
        if (bed->core.requests[i].call.v == CALL) {
            return request_state_name(bed->core.requests[i].state);
        }
    }
    return "gone";
}

static void apply_open(struct bed *bed) {
    struct event open = {.kind = EVENT_CLIENT_OPEN};
    open.u.client_open.call.v = CALL;
    open.u.client_open.model = "m";
    open.u.client_open.request_label = "label";
    open.u.client_open.session_label = "agent";
    open.u.client_open.deadline = span_ms(60000);
    bed_step(bed, &open);
    for (uint32_t i = 0; i < bed->out.count; i++) {
        if (bed->out.items[i].kind == EFFECT_TOKENIZE) {
            bed->request = bed->out.items[i].u.tokenize.request;
        }
    }
}

static void bed_tokenized(struct bed *bed, enum status status, uint32_t count, uint32_t max) {
    static const uint32_t tokens[64] = {3, 4, 5, 6, 7};
    static const uint32_t eos[1] = {99};
    struct sampling sampling = {.seed = 1};
    struct event event = {.kind = EVENT_TOKENIZED};
    event.u.tokenized.request = bed->request;
    event.u.tokenized.status = status;
    event.u.tokenized.detail = "why not";
    event.u.tokenized.tokens = tokens;
    event.u.tokenized.token_count = count;
    event.u.tokenized.max_tokens = max;
    event.u.tokenized.sampling = &sampling;
    event.u.tokenized.eos = eos;
    event.u.tokenized.eos_count = 1;
    bed_step(bed, &event);
}
static void apply_tokenized(struct bed *bed) {
    bed_tokenized(bed, STATUS_OK, 5, 3);
}
static void apply_not_tokenized(struct bed *bed) {
    bed_tokenized(bed, STATUS_INVALID, 0, 0);
}

static void bed_admitted(struct bed *bed, bool is_local) {
    struct message admitted = {.kind = MESSAGE_ADMITTED};
    admitted.u.admitted.attempt = bed->attempt;
    admitted.u.admitted.slot.v = (uint64_t)1 << 32;
    admitted.u.admitted.is_local = is_local;
    bed_send(bed, &admitted, DECODE);
}
static void apply_admitted(struct bed *bed) {
    bed_admitted(bed, false);
}
static void apply_admitted_local(struct bed *bed) {
    bed_admitted(bed, true);
}
static void bed_rejected(struct bed *bed, enum cause cause) {
    struct message rejected = {.kind = MESSAGE_REJECTED};
    rejected.u.rejected.attempt = bed->attempt;
    rejected.u.rejected.cause = cause;
    bed_send(bed, &rejected, DECODE);
}
static void apply_rejected(struct bed *bed) {
    bed_rejected(bed, CAUSE_BUSY);
}
static void apply_rejected_for_good(struct bed *bed) {
    bed_rejected(bed, CAUSE_TOO_LARGE);
}
static void bed_from_prefill(struct bed *bed, enum message_kind kind, enum outcome outcome) {
    struct message message = {.kind = kind};
    if (kind == MESSAGE_PREFILL_END) {
        message.u.prefill_end.attempt = bed->attempt;
        message.u.prefill_end.outcome = outcome;
        message.u.prefill_end.cause = CAUSE_SEND_FAILED;
        message.u.prefill_end.exposed_us = outcome == OUTCOME_OK ? 1500 : 0;
    } else if (kind == MESSAGE_BUSY) {
        message.u.rejected.attempt = bed->attempt;
        message.u.rejected.cause = CAUSE_BUSY;
    } else {
        message.u.queued.attempt = bed->attempt;
    }
    bed_send(bed, &message, PREFILL);
}
static void apply_queued(struct bed *bed) {
    bed_from_prefill(bed, MESSAGE_QUEUED, OUTCOME_NONE);
}
static void apply_busy(struct bed *bed) {
    bed_from_prefill(bed, MESSAGE_BUSY, OUTCOME_NONE);
}
static void apply_prefill_ok(struct bed *bed) {
    bed_from_prefill(bed, MESSAGE_PREFILL_END, OUTCOME_OK);
}
static void apply_prefill_failed(struct bed *bed) {
    bed_from_prefill(bed, MESSAGE_PREFILL_END, OUTCOME_FAILED);
}
static void bed_tokens(struct bed *bed, uint32_t token) {
    struct message tokens = {.kind = MESSAGE_TOKENS};
    tokens.u.tokens.count = 1;
    tokens.u.tokens.attempts = &bed->attempt.v;
    tokens.u.tokens.tokens = &token;
    bed_send(bed, &tokens, DECODE);
}
static void apply_tokens(struct bed *bed) {
    bed_tokens(bed, 42);
}
static void bed_end(struct bed *bed, enum outcome outcome, enum cause cause) {
    struct message end = {.kind = MESSAGE_END};
    end.u.end.attempt = bed->attempt;
    end.u.end.outcome = outcome;
    end.u.end.cause = cause;
    end.u.end.finish = FINISH_LENGTH;
    end.u.end.kv_bytes = 320;
    bed_send(bed, &end, DECODE);
}
static void apply_end_ok(struct bed *bed) {
    bed_end(bed, OUTCOME_OK, CAUSE_DONE);
}
static void apply_end_failed(struct bed *bed) {
    bed_end(bed, OUTCOME_FAILED, CAUSE_STALL);
}
static void apply_end_late(struct bed *bed) {
    bed_end(bed, OUTCOME_FAILED, CAUSE_DEADLINE);
}
static void apply_committed(struct bed *bed) {
    struct message committed = {.kind = MESSAGE_COMMITTED};
    committed.u.committed.attempt = bed->attempt;
    bed_send(bed, &committed, DECODE);
}
static void bed_stream_ends(struct bed *bed, uint64_t stream) {
    struct event event = {.kind = EVENT_STREAM_ENDED, .stream = {stream}};
    event.u.stream_end.cause = CAUSE_SESSION_ENDED;
    bed_step(bed, &event);
}
static void apply_decode_ends(struct bed *bed) {
    bed_stream_ends(bed, DECODE);
}
static void apply_prefill_ends(struct bed *bed) {
    bed_stream_ends(bed, PREFILL);
}
static void apply_gone(struct bed *bed) {
    struct event event = {.kind = EVENT_CLIENT_GONE};
    event.u.client_gone.call.v = CALL;
    event.u.client_gone.cause = CAUSE_CLIENT_GONE;
    bed_step(bed, &event);
}
static void apply_gone_twice(struct bed *bed) {
    apply_gone(bed);
    apply_gone(bed);
}
static void apply_abort_label(struct bed *bed) {
    struct event event = {.kind = EVENT_CLIENT_ABORT};
    event.u.client_abort.label = "label";
    bed_step(bed, &event);
}
static void apply_abort_session(struct bed *bed) {
    struct event event = {.kind = EVENT_CLIENT_ABORT};
    event.u.client_abort.label = "agent";
    event.u.client_abort.is_session = true;
    bed_step(bed, &event);
}
static void apply_stop_found(struct bed *bed) {
    struct event event = {.kind = EVENT_STOP_FOUND};
    event.u.stop_found.request = bed->request;
    event.u.stop_found.completion_tokens = 1;
    bed_step(bed, &event);
}
static void apply_answered(struct bed *bed) {
    struct event event = {.kind = EVENT_ANSWERED};
    event.u.answered.request = bed->request;
    bed_step(bed, &event);
}
static void apply_decode_unknown(struct bed *bed) {
    struct message unknown = {.kind = MESSAGE_UNKNOWN};
    unknown.u.audit.count = 1;
    unknown.u.audit.ids = &bed->attempt.v;
    bed_send(bed, &unknown, DECODE);
}
static void apply_decode_audit(struct bed *bed) {
    struct message audit = {.kind = MESSAGE_AUDIT};
    audit.u.audit.count = 1;
    audit.u.audit.ids = &bed->attempt.v;
    bed_send(bed, &audit, DECODE);
}
static void apply_deadline(struct bed *bed) {
    struct event gone = {.kind = EVENT_CLIENT_GONE};
    gone.u.client_gone.call.v = CALL;
    gone.u.client_gone.cause = CAUSE_DEADLINE;
    bed_step(bed, &gone);
}
static void apply_nonsense(struct bed *bed) {
    struct message commit = {.kind = MESSAGE_COMMIT};
    bed_send(bed, &commit, DECODE);
}
static void apply_lost(struct bed *bed) {
    struct event event = {.kind = EVENT_WORKER_LOST};
    event.u.worker_lost.incarnation.v = 500;
    bed_step(bed, &event);
}

/* A fresh bed with the request in a state. PLACING: its only decode worker said BUSY. ASKING: P
 * failed. */
static struct bed *bed_in(enum column column) {
    struct bed *bed = bed_create(true);
    apply_open(bed);
    assert_string_equal(bed->text, "tokenize");
    bed->attempt = bed->core.requests[pool_index(bed->request)].attempt;
    if (column == TOKENIZING) {
        return bed;
    }
    apply_tokenized(bed);
    assert_string_equal(bed->text, "admit");
    if (column == PLACING) {
        apply_rejected(bed);
    }
    if (column == PREFILLING || column == ASKING) {
        apply_admitted(bed);
        assert_string_equal(bed->text, "prefill");
    }
    if (column == ASKING) {
        apply_prefill_failed(bed);
        assert_string_equal(bed->text, "abort");
    }
    if (column == STREAMING || column == ANSWERING) {
        apply_admitted_local(bed);
        apply_tokens(bed);
        assert_string_equal(bed->text, "deliver");
    }
    if (column == ANSWERING) {
        apply_end_ok(bed);
        assert_string_equal(bed->text, "answer(ok)");
    }
    return bed;
}

typedef void (*apply)(struct bed *bed);

static const struct {
    const char *name;
    apply apply;
    const char *cell[COLUMNS]; /* NULL: the cell is a CHECK or its sender is not there */
} table[] = {
    {"tokenized",
     apply_tokenized,
     {"admitting: admit",
      "placing: ", "admitting: ", "prefilling: ", "asking: ", "streaming: ", "answering: "}},
    {"not tokenized",
     apply_not_tokenized,
     {"answering: answer(failed)",
      "placing: ", "admitting: ", "prefilling: ", "asking: ", "streaming: ", "answering: "}},
    {"Admitted, remote",
     apply_admitted,
     {"tokenizing: ", "placing: ", "prefilling: prefill", "placing: stream_close abort", NULL, NULL,
      "answering: "}},
    {"Admitted, local",
     apply_admitted_local,
     {"tokenizing: ", "placing: ", "streaming: ", NULL, NULL, NULL, "answering: "}},
    {"Rejected BUSY",
     apply_rejected,
     {"tokenizing: ", "placing: ", "placing: ", NULL, NULL, NULL, "answering: "}},
    {"Rejected for good",
     apply_rejected_for_good,
     {"tokenizing: ", "placing: ", "answering: answer(failed)", NULL, NULL, NULL, "answering: "}},
    {"P Queued",
     apply_queued,
     {"tokenizing: ", "placing: ", "admitting: ", "prefilling: ", "asking: ", "streaming: ",
      "answering: "}},
    {"P Busy",
     apply_busy,
     {"tokenizing: ", "placing: ", "admitting: ", "placing: abort",
      "asking: ", "streaming: ", "answering: "}},
    {"PrefillEnd(ok)",
     apply_prefill_ok,
     {"tokenizing: ", "placing: ", "admitting: ", "prefilling: ", "asking: ", "streaming: ",
      "answering: "}},
    {"PrefillEnd(fail)",
     apply_prefill_failed,
     {"tokenizing: ", "placing: ", "admitting: ", "asking: abort",
      "asking: ", "streaming: ", "answering: "}},
    {"R-P session ends",
     apply_prefill_ends,
     {"tokenizing: ", "placing: ", "admitting: ", "asking: abort",
      "asking: ", "streaming: ", "answering: "}},
    {"Tokens",
     apply_tokens,
     {"tokenizing: ", "placing: ", "placing: stream_close", "streaming: deliver",
      "streaming: deliver", "streaming: deliver", "answering: "}},
    {"Committed",
     apply_committed,
     {"tokenizing: ", "placing: ", "admitting: ", "prefilling: ", "streaming: ", "streaming: ",
      "answering: "}},
    {"End(ok)",
     apply_end_ok,
     {"tokenizing: ", "placing: ", "admitting: admit", "answering: abort answer(ok)",
      "answering: answer(ok)", "answering: answer(ok)", "answering: "}},
    {"End(fail)",
     apply_end_failed,
     {"tokenizing: ", "placing: ", "admitting: admit", "admitting: abort admit", "admitting: admit",
      "admitting: admit", "answering: "}},
    {"End(fail) by the deadline",
     apply_end_late,
     {"tokenizing: ", "placing: ", "answering: answer(failed)", "answering: abort answer(failed)",
      "answering: answer(failed)", "answering: answer(failed)", "answering: "}},
    {"R-D session ends",
     apply_decode_ends,
     {"tokenizing: ", "placing: ", "placing: ", "placing: abort",
      "placing: ", "placing: ", "answering: "}},
    {"client gone",
     apply_gone,
     {"answering: answer(aborted)", "answering: answer(aborted)",
      "answering: abort answer(aborted)", "answering: abort abort answer(aborted)",
      "answering: abort answer(aborted)", "answering: abort answer(aborted)", "answering: "}},
    {"client gone, twice",
     apply_gone_twice,
     {"answering: ", "answering: ", "answering: ", "answering: ", "answering: ", "answering: ",
      "answering: "}},
    {"Abort by request_id",
     apply_abort_label,
     {"answering: answer(aborted)", "answering: answer(aborted)",
      "answering: abort answer(aborted)", "answering: abort abort answer(aborted)",
      "answering: abort answer(aborted)", "answering: abort answer(aborted)", "answering: "}},
    {"Abort by session_id",
     apply_abort_session,
     {"answering: answer(aborted)", "answering: answer(aborted)",
      "answering: abort answer(aborted)", "answering: abort abort answer(aborted)",
      "answering: abort answer(aborted)", "answering: abort answer(aborted)", "answering: "}},
    {"deadline",
     apply_deadline,
     {"answering: answer(failed)", "answering: answer(failed)", "answering: abort answer(failed)",
      "answering: abort abort answer(failed)", "answering: abort answer(failed)",
      "answering: abort answer(failed)", "answering: "}},
    {"stop string found",
     apply_stop_found,
     {NULL, NULL, NULL, NULL, NULL, "answering: abort answer(ok)", "answering: "}},
    {"answered", apply_answered, {NULL, NULL, NULL, NULL, NULL, NULL, "gone: "}},
    {"D does not know it",
     apply_decode_unknown,
     {"tokenizing: ", "placing: ", "admitting: admit", "admitting: abort admit", "admitting: admit",
      "admitting: admit", "answering: "}},
    {"D's audit",
     apply_decode_audit,
     {"tokenizing: unknown", "placing: unknown",
      "admitting: ", "prefilling: ", "asking: ", "streaming: ", "answering: unknown"}},
    {"a message D may not send",
     apply_nonsense,
     {"tokenizing: stream_close", "placing: stream_close", "placing: stream_close",
      "placing: stream_close abort", "placing: stream_close", "placing: stream_close",
      "answering: stream_close"}},
    {"D deleted from etcd while its session lives",
     apply_lost,
     {"tokenizing: ", "placing: ", "admitting: ", "prefilling: ", "asking: ", "streaming: ",
      "answering: "}},
};

static void test_every_cell_of_the_router_table(void **state) {
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

static void test_every_state_ends_by_the_requests_deadline(void **state) {
    (void)state;
    for (uint32_t column = TOKENIZING; column < ANSWERING; column++) {
        struct bed *bed = bed_in((enum column)column);
        for (uint32_t i = 0; i < 40 && strcmp(bed_state(bed), "answering") != 0; i++) {
            bed_wait(bed, 61000); /* stops at each abort: an attempt may be replaced on the way */
        }
        assert_string_equal(bed_state(bed), "answering");
        assert_int_equal(bed->core.parked.count, 0);
        bed_destroy(bed);
    }
}

static void test_an_admit_without_answer_is_aborted_and_placed_again(void **state) {
    (void)state;
    struct bed *bed = bed_in(ADMITTING);
    int64_t start = bed->now;
    bed_wait(bed, 5000);
    assert_string_equal(bed->text, "abort");
    assert_in_range(bed->now - start, BED_SECOND, 2 * BED_SECOND + 200000000);
    assert_int_equal(bed->core.stats.retries[CAUSE_T_ADMIT], 1);
    bed_destroy(bed);
}

static void test_a_resume_sends_the_emitted_tokens_as_prompt(void **state) {
    (void)state;
    struct bed *bed = bed_in(STREAMING);
    bed_worker(bed, ROLE_DECODE, 700, DECODE2);
    apply_decode_ends(bed);
    const struct message *admit = bed_sent(&bed->out, MESSAGE_ADMIT);
    assert_int_equal(admit->u.admit.token_count, 6);
    assert_int_equal(admit->u.admit.tokens[5], 42);
    assert_int_equal(admit->u.admit.output_first, 5);
    assert_int_equal(admit->u.admit.max_new, 2);
    assert_int_not_equal(admit->u.admit.attempt.v, bed->attempt.v);
    apply_tokens(bed); /* the old attempt's output, on a session that has ended: nothing */
    assert_string_equal(bed->text, "");
    bed_destroy(bed);
}

static void test_a_resume_prefers_a_worker_that_computes_the_same(void **state) {
    (void)state;
    struct bed *bed = bed_in(TOKENIZING);
    bed_worker(bed, ROLE_DECODE, 700, DECODE2);
    bed_worker(bed, ROLE_DECODE, 701, DECODE2 + 2);
    for (uint32_t i = 0; i < 4; i++) {
        struct worker *worker = &bed->core.workers[i];
        bool is_other = worker->info.incarnation.v == 700;
        text_copy(worker->info.numerics, MESSAGE_NUMERICS_MAX, is_other ? "f32/c/1" : "f32/avx2/1");
    }
    apply_tokenized(bed);
    apply_admitted_local(bed);
    apply_tokens(bed);
    struct event ended = {.kind = EVENT_STREAM_ENDED, .stream = {DECODE}};
    ended.u.stream_end.cause = CAUSE_SESSION_ENDED;
    bed->now += 1000000;
    for (uint32_t i = 0; i < 4; i++) { /* 701 has the most to do: it is chosen all the same */
        struct worker *worker = &bed->core.workers[i];
        worker->tokens_due += worker->info.incarnation.v == 701 ? 50 : 10;
    }
    router_core_step(&bed->core, &ended, (struct instant){bed->now}, &bed->out);
    const struct request *request = &bed->core.requests[pool_index(bed->request)];
    assert_int_equal(bed->core.workers[request->decode].info.incarnation.v, 701);
    assert_int_equal(bed->core.stats.resumes_other_numerics, 0);
    bed_destroy(bed);
}

static void test_a_prompt_is_read_by_a_worker_that_computes_like_its_decode_worker(void **state) {
    (void)state;
    for (int has_equal = 0; has_equal < 2; has_equal++) {
        struct bed *bed = bed_in(ADMITTING);
        bed_worker(bed, ROLE_PREFILL, 601, DECODE2);
        /* 600 has nothing to do: one that computes like D is chosen all the same. */
        for (uint32_t i = 0; i < 3; i++) {
            struct worker *worker = &bed->core.workers[i];
            bool is_other = worker->info.role == ROLE_PREFILL &&
                            (worker->info.incarnation.v == 600 || !has_equal);
            text_copy(worker->info.numerics, MESSAGE_NUMERICS_MAX,
                      is_other ? "f32/c/1" : "f32/avx2/1");
            uint32_t backlog = worker->info.incarnation.v == 601 ? 50 : 0;
            bed->core.node.sessions[worker->session].peer_backlog_tokens = backlog;
        }
        apply_admitted(bed);
        const struct request *request = &bed->core.requests[pool_index(bed->request)];
        assert_int_equal(bed->core.workers[request->prefill].info.incarnation.v,
                         has_equal ? 601 : 600);
        assert_int_equal(bed->core.stats.pairs_other_numerics, has_equal ? 0 : 1);
        bed_destroy(bed);
    }
}

/* --- where the prefix is */

/* One more request, of the five tokens of bed_tokenized; the incarnation of its decode worker, 0 if
 * it waits. */
static uint64_t bed_place(struct bed *bed, uint64_t call, const char *salt) {
    struct event open = {.kind = EVENT_CLIENT_OPEN};
    open.u.client_open.call.v = call;
    open.u.client_open.model = "m";
    open.u.client_open.request_label = "";
    open.u.client_open.session_label = "";
    open.u.client_open.cache_salt = salt;
    bed_step(bed, &open);
    bed->request = bed->out.items[bed->out.count - 1].u.tokenize.request;
    apply_tokenized(bed);
    const struct request *request = &bed->core.requests[pool_index(bed->request)];
    return request->decode != ROUTER_NONE ? bed->core.workers[request->decode].info.incarnation.v
                                          : 0;
}

/* The name of the first page of those five tokens. */
static uint64_t bed_block(const char *salt) {
    static const uint32_t tokens[4] = {3, 4, 5, 6};
    return block_next(block_key(digest), block_first(salt_of(salt)), tokens, 4);
}

static void bed_cached(struct bed *bed, uint64_t stream, uint64_t stored, uint64_t removed,
                       bool is_reset) {
    struct message cached = {.kind = MESSAGE_CACHED};
    cached.u.cached.is_reset = is_reset;
    cached.u.cached.stored_count = stored != 0 ? 1 : 0;
    cached.u.cached.stored = &stored;
    cached.u.cached.removed_count = removed != 0 ? 1 : 0;
    cached.u.cached.removed = &removed;
    bed_send(bed, &cached, stream);
}

static void test_a_request_goes_where_its_prefix_is_until_others_have_less_to_do(void **state) {
    (void)state;
    struct bed *bed = bed_create(true);
    bed_worker(bed, ROLE_DECODE, 700, DECODE2);
    bed_cached(bed, DECODE2, bed_block(""), 0, false);
    assert_int_equal(bed_place(bed, 1, ""), 700); /* 1 token to compute there, 5 elsewhere */
    assert_int_equal(bed_place(bed, 2, ""), 500); /* 700 has 1 + 3 tokens to do by now */
    assert_int_equal(bed_place(bed, 3, ""), 700); /* as 500 has 5 + 3 */
    assert_int_equal(bed_place(bed, 4, ""), 700);
    assert_int_equal(bed_place(bed, 5, ""), 500); /* 1 + 3 * 4 against 5 + 8: fewer requests */
    bed_destroy(bed);
}

static void test_a_prefix_of_another_salt_attracts_nothing(void **state) {
    (void)state;
    struct bed *bed = bed_create(true);
    bed_worker(bed, ROLE_DECODE, 700, DECODE2);
    bed_cached(bed, DECODE2, bed_block("a"), 0, false);
    assert_int_equal(bed_place(bed, 1, ""), 500); /* equals: the first in turn */
    bed_destroy(bed);
    bed = bed_create(true);
    bed_worker(bed, ROLE_DECODE, 700, DECODE2);
    bed_cached(bed, DECODE2, bed_block("a"), 0, false);
    assert_int_equal(bed_place(bed, 1, "a"), 700);
    assert_true(bed_sent(&bed->out, MESSAGE_ADMIT)->u.admit.salt.low == salt_of("a").low);
    bed_destroy(bed);
}

enum forgetting { BY_REMOVAL, BY_RESET, BY_SESSION, FORGETTINGS };

static void test_what_left_a_workers_cache_attracts_nothing(void **state) {
    (void)state;
    for (uint32_t how = BY_REMOVAL; how < FORGETTINGS; how++) {
        struct bed *bed = bed_create(true);
        bed_worker(bed, ROLE_DECODE, 700, DECODE2);
        bed_cached(bed, DECODE2, bed_block(""), 0, false);
        assert_int_equal(bed->core.blocks.count, 1);
        if (how == BY_REMOVAL) {
            bed_cached(bed, DECODE2, 0, bed_block(""), false);
            assert_int_equal(bed->core.blocks.count, 0);
        } else if (how == BY_RESET) {
            bed_cached(bed, DECODE2, 0, 0, true);
        } else { /* the same life is greeted again, and has not said anything yet */
            struct event ended = {.kind = EVENT_STREAM_ENDED, .stream = {DECODE2}};
            ended.u.stream_end.cause = CAUSE_SESSION_ENDED;
            bed_step(bed, &ended);
            bed_wait(bed, 200);
            struct message message;
            struct event hello = bed_hello(&message, 8, ROLE_DECODE, 700, digest);
            bed_step(bed, &hello);
        }
        assert_int_equal(bed_place(bed, 1, ""), 500);
        bed_wait(bed, 200); /* what nobody knows any more is swept */
        assert_int_equal(bed->core.blocks.count, 0);
        bed_destroy(bed);
    }
}

static void test_a_prefill_worker_is_chosen_by_what_is_left_to_compute(void **state) {
    (void)state;
    struct bed *bed = bed_create(true);
    bed_worker(bed, ROLE_PREFILL, 601, DECODE2);
    bed_cached(bed, DECODE2, bed_block(""), 0, false);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(bed_place(bed, 1 + i, ""), 500);
        struct request *request = &bed->core.requests[pool_index(bed->request)];
        bed->attempt = request->attempt;
        apply_admitted(bed);
        assert_int_equal(bed->core.workers[request->prefill].info.incarnation.v,
                         i == 1 ? 600 : 601); /* 1, then 5 against 1 + 5, then 1 + 1 against 10 */
        if (i == 0) { /* all of what its queue holds counts, whoever sent it */
            struct message beat = {.kind = MESSAGE_BEAT};
            beat.u.beat.backlog_tokens = 5;
            bed_send(bed, &beat, DECODE2);
        } else if (i == 1) {
            struct message beat = {.kind = MESSAGE_BEAT};
            bed_send(bed, &beat, DECODE2);
        }
    }
    bed_destroy(bed);
}

static void bed_old_worker(struct bed *bed, enum role role, uint64_t incarnation, uint64_t stream) {
    struct worker_info info = bed_info(role, incarnation);
    bed_seen(bed, &info);
    struct message message;
    struct event hello = bed_hello(&message, stream, role, incarnation, digest);
    message.u.hello.protocol = PROTOCOL_OLDEST;
    bed_step(bed, &hello);
    assert_int_equal(bed->core.node.sessions_live, stream / 2); /* it is welcome */
}

static void test_salted_requests_go_only_where_salts_are_kept_apart(void **state) {
    (void)state;
    struct bed *bed = bed_create(false);
    bed_old_worker(bed, ROLE_DECODE, 500, 2);
    assert_int_equal(bed_place(bed, 1, ""), 500);
    assert_int_equal(bed_place(bed, 2, "a"), 0);
    bed_worker(bed, ROLE_DECODE, 700, 4);
    const struct message *admit = bed_sent(&bed->out, MESSAGE_ADMIT);
    assert_true(salt_is_set(admit->u.admit.salt));
    bed_old_worker(bed, ROLE_PREFILL, 600, 6);
    assert_int_equal(bed_place(bed, 3, "a"), 700);
    assert_true(bed_sent(&bed->out, MESSAGE_ADMIT)->u.admit.local_max == UINT32_MAX);
    bed_destroy(bed);
}

/* The prefill worker says how far its own cache went; the decode worker knows it before it says
 * that the answer is over, whoever of the two is heard first. */
static void test_usage_counts_what_nobody_computed_again(void **state) {
    (void)state;
    for (uint32_t order = 0; order < 3; order++) {
        struct bed *bed = bed_in(PREFILLING);
        struct message over = {.kind = MESSAGE_PREFILL_END};
        over.u.prefill_end.attempt = bed->attempt;
        over.u.prefill_end.outcome = OUTCOME_OK;
        over.u.prefill_end.cached = 4;
        struct message end = {.kind = MESSAGE_END};
        end.u.end.attempt = bed->attempt;
        end.u.end.outcome = OUTCOME_OK;
        end.u.end.finish = FINISH_LENGTH;
        end.u.end.usage.cached_tokens = order == 1 ? 0 : 4;
        if (order == 0) {
            bed_send(bed, &over, PREFILL);
        }
        apply_tokens(bed);
        if (order == 1) {
            bed_send(bed, &over, PREFILL);
        }
        bed_send(bed, &end, DECODE);
        const struct effect *answer = &bed->out.items[bed->out.count - 1];
        assert_int_equal(answer->kind, EFFECT_ANSWER);
        assert_int_equal(answer->u.answer.usage.cached_tokens, 4);
        assert_int_equal(bed->core.stats.cached_tokens, 4);
        bed_destroy(bed);
    }
}

static void test_a_lost_end_after_the_last_token_costs_nothing(void **state) {
    (void)state;
    struct bed *bed = bed_in(STREAMING);
    bed_tokens(bed, 99); /* end of sequence */
    apply_decode_ends(bed);
    assert_string_equal(bed->text, "answer(ok)");
    bed_destroy(bed);
}

static void test_the_answer_says_what_crossed_though_the_prefill_worker_is_late(void **state) {
    (void)state;
    struct bed *bed = bed_in(STREAMING);
    apply_end_ok(bed); /* no PrefillEnd was there yet */
    const struct effect *answer = &bed->out.items[bed->out.count - 1];
    assert_int_equal(answer->kind, EFFECT_ANSWER);
    assert_int_equal(answer->u.answer.kv_bytes, 320);
    assert_int_equal(answer->u.answer.kv_exposed_us, 0); /* not known, and not made up */
    bed_destroy(bed);
}

static void test_the_answer_says_what_of_the_hand_off_was_exposed(void **state) {
    (void)state;
    struct bed *bed = bed_in(PREFILLING);
    apply_tokens(bed);
    apply_prefill_ok(bed); /* after the first token */
    apply_end_ok(bed);
    const struct effect *answer = &bed->out.items[bed->out.count - 1];
    assert_int_equal(answer->kind, EFFECT_ANSWER);
    assert_int_equal(answer->u.answer.kv_exposed_us, 1500);
    bed_destroy(bed);
}

/* What an attempt that is over had measured says nothing of the one that answers. */
static void test_a_new_attempt_forgets_the_exposed_time_of_the_last(void **state) {
    (void)state;
    struct bed *bed = bed_in(PREFILLING);
    apply_prefill_ok(bed);
    assert_int_equal(bed->core.requests[pool_index(bed->request)].kv_exposed_us, 1500);
    apply_end_failed(bed);
    assert_string_equal(bed->text, "admit");
    assert_int_equal(bed->core.requests[pool_index(bed->request)].kv_exposed_us, 0);
    bed_destroy(bed);
}

static void test_attempts_are_bounded_and_the_error_says_so(void **state) {
    (void)state;
    struct bed *bed = bed_in(ADMITTING);
    for (uint32_t i = 0; i < ROUTER_RETRIES; i++) {
        bed->attempt = bed->core.requests[pool_index(bed->request)].attempt;
        apply_end_failed(bed);
        assert_string_equal(bed->text, "admit");
    }
    bed->attempt = bed->core.requests[pool_index(bed->request)].attempt;
    apply_end_failed(bed);
    assert_string_equal(bed->text, "answer(failed)");
    const struct effect *answer = &bed->out.items[bed->out.count - 1];
    assert_int_equal(answer->u.answer.status, STATUS_UNAVAILABLE);
    assert_non_null(strstr(answer->u.answer.detail, "3 attempts"));
    assert_non_null(strstr(answer->u.answer.detail, "stall"));
    assert_true(answer->u.answer.retry_after_ms > 0);
    bed_destroy(bed);
}

static void test_the_retry_budget_stops_a_storm(void **state) {
    (void)state;
    struct bed *bed = bed_in(ADMITTING);
    bed->core.retry_tenths = 9;
    apply_end_failed(bed);
    assert_string_equal(bed->text, "answer(failed)");
    assert_non_null(strstr(bed->core.requests[pool_index(bed->request)].detail, "budget"));
    bed_destroy(bed);
}

static void test_no_worker_at_all_waits_and_then_says_unavailable(void **state) {
    (void)state;
    struct bed *bed = bed_create(false);
    apply_open(bed);
    assert_string_equal(bed->text, "");
    int64_t start = bed->now;
    bed_wait(bed, 10000);
    assert_string_equal(bed->text, "answer(failed)");
    assert_in_range(bed->now - start, 4 * BED_SECOND, 5 * BED_SECOND + 200000000);
    bed_destroy(bed);
}

static void test_a_worker_that_appears_in_time_serves_who_waited(void **state) {
    (void)state;
    struct bed *bed = bed_create(false);
    apply_open(bed);
    struct worker_info info = bed_info(ROLE_DECODE, 500);
    bed_seen(bed, &info);
    assert_string_equal(bed->text, "stream_open hello tokenize");
    bed_destroy(bed);
}

static void test_without_prefill_workers_the_decode_worker_serves_alone(void **state) {
    (void)state;
    struct bed *bed = bed_create(false);
    bed_worker(bed, ROLE_DECODE, 500, DECODE);
    apply_open(bed);
    apply_tokenized(bed);
    assert_int_equal(bed_sent(&bed->out, MESSAGE_ADMIT)->u.admit.local_max, UINT32_MAX);
    bed_destroy(bed);
}

static void test_an_unknown_model_is_named_together_with_those_that_exist(void **state) {
    (void)state;
    struct bed *bed = bed_create(true);
    struct event open = {.kind = EVENT_CLIENT_OPEN};
    open.u.client_open.call.v = CALL;
    open.u.client_open.model = "other";
    open.u.client_open.request_label = "";
    open.u.client_open.session_label = "";
    bed_step(bed, &open);
    assert_string_equal(bed->text, "answer(failed)");
    const struct effect *answer = &bed->out.items[bed->out.count - 1];
    assert_int_equal(answer->u.answer.status, STATUS_NOT_FOUND);
    assert_non_null(strstr(answer->u.answer.detail, "\"other\""));
    assert_non_null(strstr(answer->u.answer.detail, "served here: m"));
    bed_destroy(bed);
}

static void test_lengths_are_checked_before_any_worker_is_asked(void **state) {
    (void)state;
    const struct {
        uint32_t count, max;
        const char *says;
    } cases[] = {{0, 3, "prompt is empty"}, {5, 60, "together exceed"}, {64, 1, "leaves no room"}};
    for (uint32_t i = 0; i < 3; i++) {
        struct bed *bed = bed_in(TOKENIZING);
        bed_tokenized(bed, STATUS_OK, cases[i].count, cases[i].max);
        assert_string_equal(bed->text, "answer(failed)");
        assert_int_equal(bed->out.items[0].u.answer.status, STATUS_INVALID);
        assert_non_null(strstr(bed->out.items[0].u.answer.detail, cases[i].says));
        bed_destroy(bed);
    }
}

static void test_without_max_tokens_an_answer_may_fill_the_context(void **state) {
    (void)state;
    struct bed *bed = bed_in(TOKENIZING); /* a context of 64 */
    bed_tokenized(bed, STATUS_OK, 5, 0);
    assert_string_equal(bed->text, "admit");
    assert_int_equal(bed_sent(&bed->out, MESSAGE_ADMIT)->u.admit.max_new, 64 - 5);
    bed_destroy(bed);
    for (uint32_t context = 4; context <= 6; context++) {
        bed = bed_create(false);
        struct worker_info info = bed_info(ROLE_DECODE, 500);
        info.context = context;
        bed_seen(bed, &info);
        apply_open(bed);
        bed_tokenized(bed, STATUS_OK, 5, 0);
        assert_string_equal(bed->text, context > 5 ? "" : "answer(failed)");
        if (context <= 5) {
            assert_int_equal(bed->out.items[0].u.answer.status, STATUS_INVALID);
            assert_non_null(strstr(bed->out.items[0].u.answer.detail, "leaves no room"));
        }
        bed_destroy(bed);
    }
}

/* What a request may ask for does not make its worker look full: what it is likely to need does. */
static void test_a_large_max_tokens_counts_as_an_ordinary_answer(void **state) {
    (void)state;
    struct bed *bed = bed_create(false);
    struct worker_info info = bed_info(ROLE_DECODE, 500);
    info.context = info.kv_tokens = 4000;
    bed_seen(bed, &info);
    struct message message;
    struct event hello = bed_hello(&message, 2, ROLE_DECODE, 500, digest);
    bed_step(bed, &hello);
    apply_open(bed);
    bed_tokenized(bed, STATUS_OK, 5, 0);
    assert_string_equal(bed->text, "admit");
    uint32_t cursor = 0;
    assert_int_equal(router_worker(&bed->core, &cursor)->tokens_reserved, 5 + 512);
    apply_gone(bed);
    cursor = 0;
    assert_int_equal(router_worker(&bed->core, &cursor)->tokens_reserved, 0);
    bed_destroy(bed);
}

static void test_mass_deletion_in_etcd_stops_nothing_that_has_a_session(void **state) {
    (void)state;
    struct bed *bed = bed_create(true);
    apply_lost(bed);
    apply_open(bed);
    apply_tokenized(bed);
    assert_string_equal(bed->text, "admit");
    bed_destroy(bed);
}

/* The dead life of a worker, and its next one at the same address. */
static void bed_lists(struct bed *bed, uint64_t incarnation) {
    struct worker_info info = bed_info(ROLE_DECODE, incarnation);
    text_copy(info.address, ADDRESS_MAX, "w:1");
    bed_seen(bed, &info);
}

static uint32_t bed_count(const struct effects *out, enum effect_kind kind) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < out->count; i++) {
        count += out->items[i].kind == kind ? 1 : 0;
    }
    return count;
}

static void test_a_dead_life_at_the_same_address_is_not_greeted_while_the_next_lives(void **state) {
    (void)state;
    struct bed *bed = bed_create(false);
    bed_lists(bed, 501);
    assert_int_equal(bed_count(&bed->out, EFFECT_STREAM_OPEN), 1);
    struct message message;
    struct event hello = bed_hello(&message, 2, ROLE_DECODE, 501, digest);
    bed_step(bed, &hello);
    bed_lists(bed, 500); /* etcd still lists who crashed */
    assert_int_equal(bed_count(&bed->out, EFFECT_STREAM_OPEN), 0);
    struct event tick = {.kind = EVENT_TICK};
    for (uint32_t i = 0; i < 60; i++) {
        bed->now += TICK_MS * 1000000ll;
        bed_step(bed, &tick);
        assert_int_equal(bed_count(&bed->out, EFFECT_STREAM_OPEN), 0);
    }
    bed_destroy(bed);
}

static void test_a_worker_whose_address_answers_with_another_life_is_forgotten(void **state) {
    (void)state;
    struct bed *bed = bed_create(false);
    bed_lists(bed, 500);
    struct message message;
    struct event hello = bed_hello(&message, 2, ROLE_DECODE, 501, digest);
    bed_step(bed, &hello);
    bed_stream_ends(bed, 2);
    struct event tick = {.kind = EVENT_TICK};
    for (uint32_t i = 0; i < 60; i++) {
        bed->now += TICK_MS * 1000000ll;
        bed_step(bed, &tick);
        assert_int_equal(bed_count(&bed->out, EFFECT_STREAM_OPEN), 0);
    }
    uint32_t cursor = 0;
    assert_null(router_worker(&bed->core, &cursor));
    bed_destroy(bed);
}

static void test_an_unlisted_worker_is_forgotten_though_it_is_asked_in_vain(void **state) {
    (void)state;
    struct bed *bed = bed_create(false);
    bed_lists(bed, 500);
    struct event lost = {.kind = EVENT_WORKER_LOST};
    lost.u.worker_lost.incarnation.v = 500;
    bed_step(bed, &lost);
    uint64_t stream = 2;
    struct event tick = {.kind = EVENT_TICK};
    uint32_t cursor = 0;
    for (uint32_t i = 0; i < 40000 / TICK_MS; i++) {
        bed->now += TICK_MS * 1000000ll;
        bed_step(bed, &tick);
        if (bed_count(&bed->out, EFFECT_STREAM_OPEN) > 0) {
            stream += 2;
        }
        bed_stream_ends(bed, stream); /* refused at once, each time */
        cursor = 0;
        if (router_worker(&bed->core, &cursor) == NULL) {
            break;
        }
    }
    cursor = 0;
    assert_null(router_worker(&bed->core, &cursor));
    bed_destroy(bed);
}

static void test_a_worker_that_missed_two_beats_is_given_nothing_until_it_speaks(void **state) {
    (void)state;
    struct bed *bed = bed_create(true);
    struct message beat = {.kind = MESSAGE_BEAT};
    struct event tick = {.kind = EVENT_TICK};
    for (uint32_t i = 0; i < 2600 / TICK_MS; i++) { /* D is silent, P is not */
        bed->now += TICK_MS * 1000000ll;
        bed_send(bed, &beat, PREFILL);
        bed_step(bed, &tick);
    }
    apply_open(bed);
    apply_tokenized(bed);
    assert_string_equal(bed->text, "");
    assert_string_equal(bed_state(bed), "placing");
    bed_send(bed, &beat, DECODE);
    assert_string_equal(bed->text, "admit");
    bed_destroy(bed);
}

/* A router of its own size: it shares nothing with the bed's. */
static void crowd_step(struct router_core *core, const struct event *event, struct effects *out,
                       int64_t *now) {
    *now += 1000000;
    router_core_step(core, event, (struct instant){*now}, out);
    router_verify(core);
}

static void test_a_crowd_that_waited_for_the_first_worker_is_tokenized_to_the_last(void **state) {
    (void)state;
    enum { CROWD = 3000 };
    struct router_config config = {
        .node = {.role = ROLE_ROUTER, .sessions_max = 8, .timers = timers_default()},
        .requests_max = CROWD,
        .workers_max = 8,
        .blocks_max = 256,
        .words_max = 4096};
    struct router_core *core = calloc(1, sizeof *core);
    struct effects *out = calloc(1, sizeof *out);
    void *memory = bed_memory(router_bytes(&config));
    assert_non_null(core);
    assert_non_null(out);
    router_init(core, &config, memory);
    int64_t now = BED_SECOND;
    for (uint32_t i = 0; i < CROWD; i++) {
        struct event open = {.kind = EVENT_CLIENT_OPEN};
        open.u.client_open.call.v = 1 + i;
        open.u.client_open.model = "m";
        open.u.client_open.request_label = "";
        open.u.client_open.session_label = "";
        router_core_step(core, &open, (struct instant){now}, out);
    }
    struct worker_info info = bed_info(ROLE_DECODE, 500);
    struct event seen = {.kind = EVENT_WORKER_SEEN};
    seen.u.worker_seen.info = &info;
    crowd_step(core, &seen, out, &now);
    uint32_t woken = bed_count(out, EFFECT_TOKENIZE);
    struct event tick = {.kind = EVENT_TICK};
    for (uint32_t i = 0; i < 20; i++) {
        crowd_step(core, &tick, out, &now);
        woken += bed_count(out, EFFECT_TOKENIZE);
    }
    assert_int_equal(woken, CROWD);
    free(memory);
    free(out);
    free(core);
}

/* The models of waiting requests, more than any turn looks at in one go. */
static void test_a_model_with_room_is_served_though_many_others_wait(void **state) {
    (void)state;
    struct bed *bed = bed_create_of(16, false);
    uint32_t models = 11;
    for (uint32_t i = 0; i <= models; i++) {
        struct worker_info info = bed_info(ROLE_DECODE, 500 + i);
        (void)snprintf(info.model, LABEL_MAX, "m%u", i);
        bed_seen(bed, &info);
    }
    for (uint32_t i = 0; i <= models; i++) {
        char model[LABEL_MAX];
        (void)snprintf(model, sizeof model, "m%u", i);
        struct event open = {.kind = EVENT_CLIENT_OPEN};
        open.u.client_open.call.v = 100 + i;
        open.u.client_open.model = model;
        open.u.client_open.request_label = "";
        open.u.client_open.session_label = "";
        bed_step(bed, &open);
        bed->request = bed->out.items[bed->out.count - 1].u.tokenize.request;
        apply_tokenized(bed);
    }
    /* No session is up: all wait, each for its own model. Then the last one's comes up. */
    assert_int_equal(bed->core.parked.lanes.count, models + 1);
    struct message message;
    struct event hello = bed_hello(&message, 2 + 2 * models, ROLE_DECODE, 500 + models, digest);
    bed_step(bed, &hello);
    assert_non_null(strstr(bed->text, "admit"));
    assert_int_equal(bed->core.parked.lanes.count, models);
    bed_destroy(bed);
}

static void test_a_record_that_changes_a_workers_role_is_not_believed(void **state) {
    (void)state;
    struct bed *bed = bed_create(false);
    bed_worker(bed, ROLE_PREFILL, 600, DECODE);
    struct worker_info info = bed_info(ROLE_DECODE, 600);
    bed_seen(bed, &info);
    apply_open(bed);
    apply_tokenized(bed);
    assert_string_equal(bed->text, ""); /* no Admit on a session to a prefill worker */
    assert_int_equal(bed->core.node.stats.stale_events, 1);
    bed_destroy(bed);
}

static void test_a_busy_decode_worker_is_probed_by_one_request_at_a_time(void **state) {
    (void)state;
    struct bed *bed = bed_in(PLACING);
    for (uint32_t i = 0; i < 4; i++) {
        struct event open = {.kind = EVENT_CLIENT_OPEN};
        open.u.client_open.call.v = 100 + i;
        open.u.client_open.model = "m";
        open.u.client_open.request_label = "";
        open.u.client_open.session_label = "";
        bed_step(bed, &open);
        uint64_t first = bed->request;
        bed->request = bed->out.items[bed->out.count - 1].u.tokenize.request;
        apply_tokenized(bed);
        bed->request = first;
    }
    uint32_t admits = 0;
    struct event tick = {.kind = EVENT_TICK};
    for (uint32_t i = 0; i < 10; i++) {
        bed->now += TICK_MS * 1000000ll;
        router_core_step(&bed->core, &tick, (struct instant){bed->now}, &bed->out);
        for (uint32_t j = 0; j < bed->out.count; j++) {
            admits += bed->out.items[j].kind == EFFECT_STREAM_SEND &&
                              bed->out.items[j].u.message.kind == MESSAGE_ADMIT
                          ? 1
                          : 0;
        }
    }
    assert_int_equal(admits, 1);
    bed_destroy(bed);
}

static void test_an_end_without_a_reason_is_another_attempt(void **state) {
    (void)state;
    const enum finish reasons[] = {FINISH_NONE, FINISH_ABORT, FINISH_ERROR};
    for (uint32_t i = 0; i < 3; i++) {
        struct bed *bed = bed_in(STREAMING);
        struct message end = {.kind = MESSAGE_END};
        end.u.end.attempt = bed->attempt;
        end.u.end.outcome = OUTCOME_OK;
        end.u.end.cause = CAUSE_DONE;
        end.u.end.finish = reasons[i];
        bed_send(bed, &end, DECODE);
        assert_string_equal(bed->text, "admit");
        bed_destroy(bed);
    }
}

/* --- several answers to one prompt --- */

#define CHOICES 3u

static uint32_t choice_index(const struct bed *bed, uint32_t choice) {
    const struct request *leader = &bed->core.requests[pool_index(bed->request)];
    return choice == 0                ? pool_index(bed->request)
           : leader->choices > choice ? leader->others[choice]
                                      : ROUTER_NONE;
}

static struct request *choice_of(struct bed *bed, uint32_t choice) {
    uint32_t at = choice_index(bed, choice);
    assert_int_not_equal(at, ROUTER_NONE);
    return &bed->core.requests[at];
}

/* "state state state" of the three choices. */
static void choices_states(const struct bed *bed, char text[128]) {
    struct writer writer;
    writer_init(&writer, text, 127);
    for (uint32_t choice = 0; choice < CHOICES; choice++) {
        uint32_t at = choice_index(bed, choice);
        bool is_gone = at == ROUTER_NONE || bed->core.requests[at].call.v != CALL;
        writer_printf(&writer, "%s%s", choice > 0 ? " " : "",
                      is_gone ? "gone" : request_state_name(bed->core.requests[at].state));
    }
    text[writer.len] = '\0';
}

static void choice_send(struct bed *bed, uint32_t choice, enum message_kind kind,
                        enum outcome outcome, enum cause cause) {
    const struct request *request = choice_of(bed, choice);
    struct attempt_id attempt = request->attempt;
    uint64_t stream = request->decode_stream.v;
    uint32_t token = 40 + choice;
    struct message message = {.kind = kind};
    if (kind == MESSAGE_ADMITTED) {
        message.u.admitted.attempt = attempt;
        message.u.admitted.slot.v = (uint64_t)(1 + choice) << 32;
        message.u.admitted.is_local = true;
    } else if (kind == MESSAGE_TOKENS) {
        message.u.tokens.count = 1;
        message.u.tokens.attempts = &attempt.v;
        message.u.tokens.tokens = &token;
    } else {
        message.u.end.attempt = attempt;
        message.u.end.outcome = outcome;
        message.u.end.cause = cause;
        message.u.end.finish = outcome == OUTCOME_OK ? FINISH_LENGTH : FINISH_ERROR;
    }
    bed_send(bed, &message, stream);
}
static void choice_ends(struct bed *bed, uint32_t choice) {
    choice_send(bed, choice, MESSAGE_END, OUTCOME_OK, CAUSE_DONE);
}

static void call_tokenized(struct bed *bed, uint32_t choices, uint32_t max_tokens) {
    static const uint32_t tokens[5] = {3, 4, 5, 6, 7};
    struct sampling sampling = {.seed = 1};
    struct event event = {.kind = EVENT_TOKENIZED};
    event.u.tokenized.request = bed->request;
    event.u.tokenized.detail = "";
    event.u.tokenized.tokens = tokens;
    event.u.tokenized.token_count = 5;
    event.u.tokenized.max_tokens = max_tokens;
    event.u.tokenized.choices = choices;
    event.u.tokenized.sampling = &sampling;
    event.u.tokenized.eos = tokens;
    bed_step(bed, &event);
}

/* Where the three choices are, one situation after the other. */
enum situation { BEGINS, FIRST_RUNS, ALL_RUN, GATHERS, ONE_IS_LEFT, FIRST_IS_LEFT, SITUATIONS };

static struct bed *bed_choices(enum situation situation) {
    struct bed *bed = bed_create(true);
    apply_open(bed);
    call_tokenized(bed, CHOICES, 3);
    assert_string_equal(bed->text, "admit");
    if (situation == BEGINS) {
        return bed;
    }
    choice_send(bed, 0, MESSAGE_ADMITTED, OUTCOME_NONE, CAUSE_NONE);
    choice_send(bed, 0, MESSAGE_TOKENS, OUTCOME_NONE, CAUSE_NONE);
    assert_string_equal(bed->text, "deliver admit admit");
    if (situation == FIRST_RUNS) {
        return bed;
    }
    for (uint32_t choice = 1; choice < CHOICES; choice++) {
        choice_send(bed, choice, MESSAGE_ADMITTED, OUTCOME_NONE, CAUSE_NONE);
        choice_send(bed, choice, MESSAGE_TOKENS, OUTCOME_NONE, CAUSE_NONE);
        assert_string_equal(bed->text, "deliver");
    }
    if (situation == FIRST_IS_LEFT) {
        choice_ends(bed, 1);
        choice_ends(bed, 2);
    } else if (situation != ALL_RUN) {
        choice_ends(bed, 0);
        assert_string_equal(bed->text, "choice(0 length)");
    }
    if (situation == ONE_IS_LEFT) {
        choice_ends(bed, 1);
        assert_string_equal(bed->text, "choice(1 length)");
    }
    return bed;
}

static void apply_first_ends(struct bed *bed) {
    choice_ends(bed, 0);
}
static void apply_other_ends(struct bed *bed) {
    choice_ends(bed, 2);
}
static void apply_first_is_lost(struct bed *bed) {
    choice_send(bed, 0, MESSAGE_END, OUTCOME_FAILED, CAUSE_STEP_FAILED);
}
static void apply_other_is_lost(struct bed *bed) {
    choice_send(bed, 2, MESSAGE_END, OUTCOME_FAILED, CAUSE_STEP_FAILED);
}
static void apply_first_fails(struct bed *bed) {
    choice_of(bed, 0)->failures = ROUTER_RETRIES;
    apply_first_is_lost(bed);
}
static void apply_other_fails(struct bed *bed) {
    choice_of(bed, 2)->failures = ROUTER_RETRIES;
    apply_other_is_lost(bed);
}
static void bed_stop_found(struct bed *bed, uint32_t choice) {
    struct event event = {.kind = EVENT_STOP_FOUND};
    event.u.stop_found.request = bed->request;
    event.u.stop_found.index = choice;
    event.u.stop_found.completion_tokens = 1;
    bed_step(bed, &event);
}
static void apply_first_stops(struct bed *bed) {
    bed_stop_found(bed, 0);
}
static void apply_other_stops(struct bed *bed) {
    bed_stop_found(bed, 2);
}
static void apply_nobody_stops(struct bed *bed) {
    bed_stop_found(bed, 7);
}
static void apply_grace_is_over(struct bed *bed) {
    struct event drain = {.kind = EVENT_DRAIN};
    drain.u.drain.grace = span_ms(1);
    bed_step(bed, &drain);
    bed->now += BED_SECOND;
    struct event tick = {.kind = EVENT_TICK};
    bed_step(bed, &tick);
}

static const struct {
    const char *name;
    apply apply;
    const char *cell[SITUATIONS]; /* NULL: nobody is there to say so */
} choices_table[] = {
    {"choice 0 ends",
     apply_first_ends,
     {"admitting waiting waiting: admit", "gathering admitting admitting: choice(0 length)",
      "gathering streaming streaming: choice(0 length)", NULL, NULL,
      "answering gone gone: answer(ok)"}},
    {"choice 2 ends",
     apply_other_ends,
     {NULL, "streaming admitting admitting: admit", "streaming streaming gone: choice(2 length)",
      "gathering streaming gone: choice(2 length)", "answering gone gone: answer(ok)", NULL}},
    {"the attempt of choice 0 is lost",
     apply_first_is_lost,
     {"admitting waiting waiting: admit", "admitting admitting admitting: admit",
      "admitting streaming streaming: admit", NULL, NULL, "admitting gone gone: admit"}},
    {"the attempt of choice 2 is lost",
     apply_other_is_lost,
     {NULL, "streaming admitting admitting: admit", "streaming streaming admitting: admit",
      "gathering streaming admitting: admit", "gathering gone admitting: admit", NULL}},
    {"choice 0 fails",
     apply_first_fails,
     {"answering gone gone: choice(0 error) choice(1 error) answer(failed)",
      "answering gone gone: choice(0 error) choice(1 error) abort abort answer(failed)",
      "answering gone gone: choice(0 error) choice(1 error) abort abort answer(failed)", NULL, NULL,
      "answering gone gone: answer(failed)"}},
    {"choice 2 fails",
     apply_other_fails,
     {NULL, "answering gone gone: choice(0 error) choice(1 error) abort abort answer(failed)",
      "answering gone gone: choice(0 error) choice(1 error) abort abort answer(failed)",
      "answering gone gone: choice(1 error) abort answer(failed)",
      "answering gone gone: answer(failed)", NULL}},
    {"a stop string in choice 0",
     apply_first_stops,
     {NULL, "gathering admitting admitting: choice(0 stop) abort",
      "gathering streaming streaming: choice(0 stop) abort", "gathering streaming streaming: ",
      "gathering gone streaming: ", "answering gone gone: abort answer(ok)"}},
    {"a stop string in choice 2",
     apply_other_stops,
     {NULL, NULL, "streaming streaming gone: choice(2 stop) abort",
      "gathering streaming gone: choice(2 stop) abort", "answering gone gone: abort answer(ok)",
      "streaming gone gone: "}},
    {"a stop string in no choice",
     apply_nobody_stops,
     {"admitting waiting waiting: ", "streaming admitting admitting: ",
      "streaming streaming streaming: ", "gathering streaming streaming: ",
      "gathering gone streaming: ", "streaming gone gone: "}},
    {"client gone",
     apply_gone,
     {"answering gone gone: abort answer(aborted)",
      "answering gone gone: abort abort abort answer(aborted)",
      "answering gone gone: abort abort abort answer(aborted)",
      "answering gone gone: abort abort answer(aborted)",
      "answering gone gone: abort answer(aborted)", "answering gone gone: abort answer(aborted)"}},
    {"client gone, twice",
     apply_gone_twice,
     {"answering gone gone: ", "answering gone gone: ", "answering gone gone: ",
      "answering gone gone: ", "answering gone gone: ", "answering gone gone: "}},
    {"Abort by request_id",
     apply_abort_label,
     {"answering gone gone: choice(0 abort) choice(1 abort) abort answer(aborted)",
      "answering gone gone: choice(0 abort) choice(1 abort) abort abort abort answer(aborted)",
      "answering gone gone: choice(0 abort) choice(1 abort) abort abort abort answer(aborted)",
      "answering gone gone: choice(1 abort) abort abort answer(aborted)",
      "answering gone gone: abort answer(aborted)", "answering gone gone: abort answer(aborted)"}},
    {"Abort by session_id",
     apply_abort_session,
     {"answering gone gone: choice(0 abort) choice(1 abort) abort answer(aborted)",
      "answering gone gone: choice(0 abort) choice(1 abort) abort abort abort answer(aborted)",
      "answering gone gone: choice(0 abort) choice(1 abort) abort abort abort answer(aborted)",
      "answering gone gone: choice(1 abort) abort abort answer(aborted)",
      "answering gone gone: abort answer(aborted)", "answering gone gone: abort answer(aborted)"}},
    {"deadline",
     apply_deadline,
     {"answering gone gone: choice(0 error) choice(1 error) abort answer(failed)",
      "answering gone gone: choice(0 error) choice(1 error) abort abort abort answer(failed)",
      "answering gone gone: choice(0 error) choice(1 error) abort abort abort answer(failed)",
      "answering gone gone: choice(1 error) abort abort answer(failed)",
      "answering gone gone: abort answer(failed)", "answering gone gone: abort answer(failed)"}},
    {"R-D session ends",
     apply_decode_ends,
     {"placing waiting waiting: ", "placing placing placing: ", "placing placing placing: ",
      "gathering placing placing: ", "gathering gone placing: ", "placing gone gone: "}},
    {"shut down",
     apply_grace_is_over,
     {"answering gone gone: choice(0 error) choice(1 error) abort answer(failed)",
      "answering gone gone: choice(0 error) choice(1 error) abort abort abort answer(failed)",
      "answering gone gone: choice(0 error) choice(1 error) abort abort abort answer(failed)",
      "answering gone gone: choice(1 error) abort abort answer(failed)",
      "answering gone gone: abort answer(failed)", "answering gone gone: abort answer(failed)"}},
};

static void test_every_cell_of_the_table_of_choices(void **state) {
    (void)state;
    for (uint32_t i = 0; i < sizeof choices_table / sizeof choices_table[0]; i++) {
        for (enum situation situation = BEGINS; situation < SITUATIONS; situation++) {
            if (choices_table[i].cell[situation] == NULL) {
                continue;
            }
            struct bed *bed = bed_choices(situation);
            choices_table[i].apply(bed);
            char states[128];
            char found[1024];
            choices_states(bed, states);
            (void)snprintf(found, sizeof found, "%s: %s", states, bed->text);
            if (strcmp(found, choices_table[i].cell[situation]) != 0) {
                fail_msg("%s, situation %u: \"%s\", expected \"%s\"", choices_table[i].name,
                         situation, found, choices_table[i].cell[situation]);
            }
            bed_destroy(bed);
        }
    }
}

/* The answer of a step; fails the test if there is none. */
static const struct effect *bed_answer(const struct bed *bed) {
    for (uint32_t i = 0; i < bed->out.count; i++) {
        if (bed->out.items[i].kind == EFFECT_ANSWER) {
            return &bed->out.items[i];
        }
    }
    fail_msg("nothing was answered");
    abort();
}

static void test_choices_have_seeds_of_their_own_and_one_usage(void **state) {
    (void)state;
    struct bed *bed = bed_choices(FIRST_RUNS);
    uint64_t seeds[CHOICES];
    for (uint32_t choice = 0; choice < CHOICES; choice++) {
        seeds[choice] = choice_of(bed, choice)->sampling.seed;
    }
    assert_true(seeds[0] == 1);
    assert_true(seeds[1] == mix64(1 + 0x9e3779b97f4a7c15ull));
    assert_true(seeds[2] == mix64(1 + 2 * 0x9e3779b97f4a7c15ull));
    /* Both are sent where the prompt is, and may compute what is left of its last page. */
    for (uint32_t i = 0; i < bed->out.count; i++) {
        const struct effect *effect = &bed->out.items[i];
        if (effect->kind == EFFECT_STREAM_SEND && effect->u.message.kind == MESSAGE_ADMIT) {
            assert_int_equal(effect->stream.v, DECODE);
            assert_int_equal(effect->u.message.u.admit.local_max, 4);
            assert_int_equal(effect->u.message.u.admit.token_count, 5);
        }
    }
    bed_destroy(bed);
    bed = bed_choices(ONE_IS_LEFT);
    apply_other_ends(bed);
    const struct effect *answer = bed_answer(bed);
    assert_int_equal(answer->u.answer.index, 2);
    assert_int_equal(answer->u.answer.finish, FINISH_LENGTH);
    assert_int_equal(answer->u.answer.usage.prompt_tokens, 5);
    assert_int_equal(answer->u.answer.usage.completion_tokens, 3);
    assert_true(answer->u.answer.seed == 1);
    apply_answered(bed);
    assert_int_equal(bed->core.node.ledger.live, 0);
    assert_int_equal(bed->core.words.taken, 0);
    bed_destroy(bed);
}

static void test_choices_go_where_the_prompt_is_though_another_worker_is_idle(void **state) {
    (void)state;
    struct bed *bed = bed_create(true);
    bed_worker(bed, ROLE_DECODE, 501, DECODE2);
    apply_open(bed);
    call_tokenized(bed, 8, 3);
    choice_send(bed, 0, MESSAGE_ADMITTED, OUTCOME_NONE, CAUSE_NONE);
    choice_send(bed, 0, MESSAGE_TOKENS, OUTCOME_NONE, CAUSE_NONE);
    for (uint32_t choice = 1; choice < 8; choice++) {
        assert_int_equal(choice_of(bed, choice)->decode, choice_of(bed, 0)->decode);
    }
    /* What of them is lost is placed like any other. */
    choice_send(bed, 5, MESSAGE_END, OUTCOME_FAILED, CAUSE_STEP_FAILED);
    assert_int_equal(choice_of(bed, 5)->prefer, 0);
    bed_destroy(bed);
}

static void test_choices_that_do_not_fit_are_refused_whole(void **state) {
    (void)state;
    static const struct {
        uint32_t choices, max_tokens;
        enum status status;
        const char *says;
    } cases[] = {
        {17, 1, STATUS_INVALID, "n is 17: at most 16"},
        {UINT32_MAX, 1, STATUS_INVALID, "n is 4294967295"},
        {6, 42, STATUS_INVALID,
         "prompt (5 tokens) and n (6) x max_tokens (42) are 257 tokens: more than the 256"},
        {9, 1, STATUS_BUSY, "--max-requests"},
    };
    for (uint32_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct bed *bed = bed_create(true);
        apply_open(bed);
        call_tokenized(bed, cases[i].choices, cases[i].max_tokens);
        assert_string_equal(bed->text, "answer(failed)");
        assert_int_equal(bed_answer(bed)->u.answer.status, cases[i].status);
        assert_non_null(strstr(bed_answer(bed)->u.answer.detail, cases[i].says));
        assert_int_equal(bed->core.node.ledger.live, 1);
        assert_int_equal(bed->core.words.taken, 0);
        bed_destroy(bed);
    }
    struct bed *bed = bed_create(true);
    apply_open(bed);
    call_tokenized(bed, 8, 31); /* 5 + 8 x 31 = 253 of 256, and all eight places */
    assert_string_equal(bed->text, "admit");
    assert_int_equal(bed->core.node.ledger.live, 8);
    bed_destroy(bed);
    bed = bed_create(true);
    uint32_t first = 0;
    while (words_take(&bed->core.words, WORDS_UNIT, &first) == STATUS_OK) {
        bed->core.words_held++;
    }
    words_free(&bed->core.words, first); /* room for one of three */
    bed->core.words_held--;
    apply_open(bed);
    call_tokenized(bed, 3, 3);
    assert_string_equal(bed->text, "answer(failed)");
    assert_int_equal(bed_answer(bed)->u.answer.status, STATUS_BUSY);
    assert_int_equal(bed->core.node.ledger.live, 1);
    bed_destroy(bed);
}

static void test_choices_that_wait_are_placed_though_the_first_has_no_token(void **state) {
    (void)state;
    struct bed *bed = bed_choices(BEGINS);
    choice_send(bed, 0, MESSAGE_ADMITTED, OUTCOME_NONE, CAUSE_NONE);
    choice_ends(bed, 0); /* not a token: whatever that worker thinks */
    char states[128];
    choices_states(bed, states);
    assert_string_equal(states, "gathering admitting admitting");
    assert_string_equal(bed->text, "choice(0 length) admit admit");
    bed_destroy(bed);
}

static void test_choices_that_wait_end_with_the_deadline_of_their_call(void **state) {
    (void)state;
    struct bed *bed = bed_choices(BEGINS);
    choice_send(bed, 0, MESSAGE_ADMITTED, OUTCOME_NONE, CAUSE_NONE);
    char states[128];
    choices_states(bed, states);
    assert_string_equal(states, "streaming waiting waiting");
    bed_wait(bed, 70000);
    assert_non_null(strstr(bed->text, "answer(failed)"));
    choices_states(bed, states);
    assert_string_equal(states, "answering gone gone");
    assert_int_equal(bed_answer(bed)->u.answer.status, STATUS_TIMEOUT);
    bed_destroy(bed);
}

/* A request that wants logprobs with up to `alternatives`, admitted. */
static struct bed *bed_wanting(uint32_t alternatives) {
    struct bed *bed = bed_in(STREAMING);
    bed->core.requests[pool_index(bed->request)].sampling.logprobs = 1 + alternatives;
    return bed;
}

static void test_logprobs_reach_the_client_with_their_token(void **state) {
    (void)state;
    struct bed *bed = bed_wanting(2);
    const uint64_t attempts[3] = {~0ull, bed->attempt.v, bed->attempt.v}; /* the first: no one's */
    const uint32_t tokens[3] = {1, 42, 43};
    const float logprobs[3] = {-9, -0.5f, -0.25f};
    const uint32_t top_counts[3] = {3, 3, 2};
    const uint32_t top_tokens[5] = {90, 91, 42, 7, 43};
    const float top_logprobs[5] = {-8, -7, -0.5f, -1.5f, -0.25f};
    struct message message = {.kind = MESSAGE_TOKENS};
    message.u.tokens.count = 3;
    message.u.tokens.attempts = attempts;
    message.u.tokens.tokens = tokens;
    message.u.tokens.logprobs = logprobs;
    message.u.tokens.top_counts = top_counts;
    message.u.tokens.top_count = 5;
    message.u.tokens.top_tokens = top_tokens;
    message.u.tokens.top_logprobs = top_logprobs;
    bed_send(bed, &message, DECODE);
    assert_string_equal(bed->text, "deliver deliver");
    const struct effect *first = &bed->out.items[0];
    assert_true(first->u.deliver.has_logprobs && first->u.deliver.logprob == -0.5f);
    assert_int_equal(first->u.deliver.top_count, 2);
    assert_int_equal(first->u.deliver.top_tokens[0], 42);
    assert_int_equal(first->u.deliver.top_tokens[1], 7);
    assert_true(first->u.deliver.top_logprobs[1] == -1.5f);
    const struct effect *second = &bed->out.items[1];
    assert_true(second->u.deliver.has_logprobs && second->u.deliver.logprob == -0.25f);
    assert_int_equal(second->u.deliver.top_count, 1);
    assert_int_equal(second->u.deliver.top_tokens[0], 43);
    bed_destroy(bed);
}

static void test_who_asked_for_no_logprobs_gets_none(void **state) {
    (void)state;
    struct bed *bed = bed_in(STREAMING);
    apply_tokens(bed);
    assert_string_equal(bed->text, "deliver");
    assert_false(bed->out.items[0].u.deliver.has_logprobs);
    bed_destroy(bed);
}

/* A worker of an earlier version, or one that gives more than was asked for. */
static void test_a_token_without_its_logprobs_is_another_attempt(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 2; i++) {
        struct bed *bed = bed_wanting(0);
        const float logprobs[1] = {-1};
        const uint32_t top_counts[1] = {2};
        const uint32_t tokens[1] = {42};
        struct message message = {.kind = MESSAGE_TOKENS};
        message.u.tokens.count = 1;
        message.u.tokens.attempts = &bed->attempt.v;
        message.u.tokens.tokens = tokens;
        if (i == 1) {
            message.u.tokens.logprobs = logprobs;
            message.u.tokens.top_counts = top_counts;
            message.u.tokens.top_count = 1;
            message.u.tokens.top_tokens = tokens;
            message.u.tokens.top_logprobs = logprobs;
        }
        bed_send(bed, &message, DECODE);
        assert_string_equal(bed->text, "abort admit");
        assert_int_equal(bed->core.stats.retries[CAUSE_MISMATCH], 1);
        assert_int_equal(bed->core.requests[pool_index(bed->request)].token_count, 5 + 1);
        bed_destroy(bed);
    }
}

static void test_the_token_store_counts_the_logprobs_that_may_have_to_wait(void **state) {
    (void)state;
    static const uint32_t tokens[5] = {3, 4, 5, 6, 7};
    const uint32_t most[2] = {500, 50}; /* of 4096 words: 505 and 55 tokens fit */
    for (uint32_t i = 0; i < 2; i++) {
        struct bed *bed = bed_create(false);
        struct worker_info info = bed_info(ROLE_DECODE, 500);
        info.context = info.kv_tokens = 10000;
        bed_seen(bed, &info);
        apply_open(bed);
        struct sampling sampling = {.seed = 1, .logprobs = 1 + LOGPROBS_TOP_MAX};
        struct event event = {.kind = EVENT_TOKENIZED};
        event.u.tokenized.request = bed->request;
        event.u.tokenized.detail = "";
        event.u.tokenized.tokens = tokens;
        event.u.tokenized.token_count = 5;
        event.u.tokenized.max_tokens = most[i];
        event.u.tokenized.sampling = &sampling;
        event.u.tokenized.eos = tokens;
        bed_step(bed, &event);
        assert_string_equal(bed->text, i == 0 ? "answer(failed)" : "");
        assert_int_equal(bed->core.words.taken, i);
        bed_destroy(bed);
    }
}

static void test_equal_workers_take_turns_on_a_quiet_cluster(void **state) {
    (void)state;
    struct bed *bed = bed_create(false);
    bed_worker(bed, ROLE_DECODE, 500, 2);
    bed_worker(bed, ROLE_DECODE, 501, 4);
    uint32_t given[2] = {0};
    for (uint32_t i = 0; i < 6; i++) {
        apply_open(bed);
        apply_tokenized(bed);
        const struct request *request = &bed->core.requests[pool_index(bed->request)];
        assert_in_range(request->decode, 0, 1);
        given[request->decode]++;
        assert_in_range(given[0], given[1] == 0 ? 0 : given[1] - 1, given[1] + 1);
        uint64_t stream = request->decode_stream.v;
        struct message admitted = {.kind = MESSAGE_ADMITTED};
        admitted.u.admitted.attempt = request->attempt;
        admitted.u.admitted.slot.v = (uint64_t)1 << 32;
        admitted.u.admitted.is_local = true;
        bed_send(bed, &admitted, stream);
        uint32_t token = 42;
        struct message tokens = {.kind = MESSAGE_TOKENS};
        tokens.u.tokens.count = 1;
        tokens.u.tokens.attempts = &request->attempt.v;
        tokens.u.tokens.tokens = &token;
        bed_send(bed, &tokens, stream);
        struct message end = {.kind = MESSAGE_END};
        end.u.end.attempt = request->attempt;
        end.u.end.outcome = OUTCOME_OK;
        end.u.end.cause = CAUSE_DONE;
        end.u.end.finish = FINISH_LENGTH;
        bed_send(bed, &end, stream);
        assert_string_equal(bed->text, "answer(ok)");
        apply_answered(bed);
        assert_string_equal(bed_state(bed), "gone");
    }
    assert_int_equal(given[0], 3);
    bed_destroy(bed);
}

static struct worker *bed_worker_of(struct bed *bed, uint64_t incarnation) {
    for (uint32_t i = 0; i < bed->core.config.workers_max; i++) {
        if (bed->core.workers[i].info.incarnation.v == incarnation) {
            return &bed->core.workers[i];
        }
    }
    fail_msg("there is no worker %llu", (unsigned long long)incarnation);
    abort();
}

/* By turns alone any other worker would be next. */
static void bed_had_its_turn(struct bed *bed, uint64_t incarnation) {
    bed_worker_of(bed, incarnation)->last_given[0] = UINT64_MAX;
}

/* The new attempt is admitted, and its prompt goes to the worker of this stream. */
static void bed_is_given_to(struct bed *bed, uint64_t stream) {
    bed->attempt = bed->core.requests[pool_index(bed->request)].attempt;
    apply_admitted(bed);
    assert_string_equal(bed->text, "prefill");
    for (uint32_t i = 0; i < bed->out.count; i++) {
        if (bed->out.items[i].kind == EFFECT_STREAM_SEND) {
            assert_int_equal(bed->out.items[i].stream.v, stream);
        }
    }
}

static void test_a_pair_that_could_not_talk_is_avoided_while_there_is_another(void **state) {
    (void)state;
    struct bed *bed = bed_in(PREFILLING);
    bed_worker(bed, ROLE_PREFILL, 601, DECODE2);
    bed_had_its_turn(bed, 601);
    apply_prefill_failed(bed);
    apply_end_failed(bed); /* D: aborted; a new attempt */
    bed_is_given_to(bed, DECODE2);
    bed_destroy(bed);
}

static void test_a_pair_is_avoided_though_the_decode_worker_is_the_first_to_tell(void **state) {
    (void)state;
    static const enum cause causes[] = {CAUSE_STALL, CAUSE_T_OPEN, CAUSE_SESSION_ENDED,
                                        CAUSE_SESSION_SILENT, CAUSE_BAD_CHUNK};
    for (uint32_t i = 0; i < sizeof causes / sizeof causes[0]; i++) {
        struct bed *bed = bed_in(PREFILLING);
        bed_worker(bed, ROLE_PREFILL, 601, DECODE2);
        bed_had_its_turn(bed, 601);
        bed_end(bed, OUTCOME_FAILED, causes[i]);
        bed_is_given_to(bed, DECODE2);
        bed_destroy(bed);
    }
}

static void test_a_request_waits_for_a_busy_worker_rather_than_try_a_suspected_pair(void **state) {
    (void)state;
    struct bed *bed = bed_in(PREFILLING);
    bed_worker(bed, ROLE_PREFILL, 601, DECODE2);
    bed_worker_of(bed, 601)->busy_until = instant_add(bed->core.node.now, span_ms(800));
    bed_end(bed, OUTCOME_FAILED, CAUSE_SESSION_ENDED);
    assert_string_equal(bed_state(bed), "placing");
    bed_wait(bed, 600);
    assert_string_equal(bed_state(bed), "placing");
    bed_wait(bed, 400);
    assert_string_equal(bed_state(bed), "admitting");
    bed_is_given_to(bed, DECODE2);
    bed_destroy(bed);
}

static void test_a_decode_worker_that_nobody_reaches_is_avoided_though_it_looks_idle(void **state) {
    (void)state;
    struct bed *bed = bed_in(PREFILLING);
    bed_worker(bed, ROLE_DECODE, 501, DECODE2);
    bed_had_its_turn(bed, 501);
    bed_end(bed, OUTCOME_FAILED, CAUSE_STALL);
    assert_string_equal(bed_state(bed), "admitting");
    for (uint32_t i = 0; i < bed->out.count; i++) {
        if (bed->out.items[i].kind == EFFECT_STREAM_SEND &&
            bed->out.items[i].u.message.kind == MESSAGE_ADMIT) {
            assert_int_equal(bed->out.items[i].stream.v, DECODE2);
        }
    }
    bed_destroy(bed);
}

/* A worker's session ends, and the next one is up as soon as the router tries. */
static void bed_flap(struct bed *bed, uint64_t incarnation, int64_t after_ms) {
    const struct worker *worker = bed_worker_of(bed, incarnation);
    bed_wait(bed, after_ms);
    bed_stream_ends(bed, worker->stream.v);
    for (uint32_t i = 0; i < 50 && worker->session == ROUTER_NONE; i++) {
        bed_wait(bed, TICK_MS);
    }
    assert_int_not_equal(worker->session, ROUTER_NONE);
    struct message message;
    struct event hello =
        bed_hello(&message, worker->stream.v, worker->info.role, incarnation, digest);
    message.u.hello.session = worker->flaps + 2;
    bed_step(bed, &hello);
}

/* The stream that a request which is tokenized now is admitted on; 0: it waits. */
static uint64_t bed_admitted_on(struct bed *bed) {
    apply_open(bed);
    apply_tokenized(bed);
    uint64_t stream = strcmp(bed->text, "admit") == 0 ? bed->out.items[0].stream.v : 0;
    apply_gone(bed);
    apply_answered(bed);
    return stream;
}

static void test_a_worker_whose_sessions_die_young_is_doubted_for_longer_each_time(void **state) {
    (void)state;
    static const int64_t doubt_ms[] = {2500, 5000, 10000, 10000};
    struct bed *bed = bed_create(true);
    bed_worker(bed, ROLE_DECODE, 501, DECODE2);
    struct worker *flapping = bed_worker_of(bed, 500);
    const struct worker *steady = bed_worker_of(bed, 501);
    bed_flap(bed, 500, 1000); /* once may be an accident */
    bed_had_its_turn(bed, 501);
    assert_int_equal(bed_admitted_on(bed), flapping->stream.v);
    for (uint32_t i = 0; i < 4; i++) {
        bed_flap(bed, 500, 1000);
        int64_t ended = flapping->doubted_until.ns - doubt_ms[i] * 1000000;
        assert_in_range(bed->now - ended, 0, 2200000000); /* while it connected again */
        bed_had_its_turn(bed, 501);
        assert_int_equal(bed_admitted_on(bed), steady->stream.v);
        bed_wait(bed, (flapping->doubted_until.ns - bed->now) / 1000000 + 2 * TICK_MS);
        bed_had_its_turn(bed, 501);
        assert_int_equal(bed_admitted_on(bed), flapping->stream.v);
    }
    bed_flap(bed, 500, 7000); /* this one was good for longer than a lease */
    bed_had_its_turn(bed, 501);
    assert_int_equal(bed_admitted_on(bed), flapping->stream.v);
    bed_destroy(bed);
}

static void test_a_doubted_worker_is_used_where_there_is_no_other(void **state) {
    (void)state;
    struct bed *bed = bed_create(true);
    for (uint32_t i = 0; i < 3; i++) {
        bed_flap(bed, 500, 1000);
    }
    assert_true(bed_worker_of(bed, 500)->is_doubted);
    assert_int_equal(bed_admitted_on(bed), bed_worker_of(bed, 500)->stream.v);
    bed_destroy(bed);
}

static void test_a_suspected_pair_is_tried_where_there_is_no_other(void **state) {
    (void)state;
    struct bed *bed = bed_in(PREFILLING);
    bed_end(bed, OUTCOME_FAILED, CAUSE_SESSION_ENDED);
    assert_string_equal(bed_state(bed), "admitting");
    bed_is_given_to(bed, PREFILL);
    bed_destroy(bed);
}

/* --- canaries: the router's own requests */

static void bed_canary(struct bed *bed, enum canary_legs legs) {
    struct event open = {.kind = EVENT_CLIENT_OPEN};
    open.u.client_open.call.v = CALL;
    open.u.client_open.model = "m";
    open.u.client_open.request_label = CANARY_LABEL;
    open.u.client_open.session_label = "";
    open.u.client_open.deadline = span_ms(5000);
    open.u.client_open.canary = legs;
    bed_step(bed, &open);
    bed->request = bed->out.items[bed->out.count - 1].u.tokenize.request;
    bed->attempt = bed->core.requests[pool_index(bed->request)].attempt;
    bed_tokenized(bed, STATUS_OK, 4, CANARY_TOKENS);
}

static enum cause bed_answer_cause(const struct bed *bed) {
    for (uint32_t i = 0; i < bed->out.count; i++) {
        if (bed->out.items[i].kind == EFFECT_ANSWER) {
            return bed->out.items[i].u.answer.cause;
        }
    }
    return CAUSE_NONE;
}

static void test_a_canary_takes_the_legs_it_is_told_and_is_in_no_clients_numbers(void **state) {
    (void)state;
    struct bed *bed = bed_create(true);
    bed->core.config.disaggregate_above = 20;
    uint32_t tenths = bed->core.retry_tenths;
    bed_canary(bed, CANARY_TWO_LEGS);
    assert_int_equal(bed_sent(&bed->out, MESSAGE_ADMIT)->u.admit.local_max, 0);
    apply_admitted(bed);
    assert_string_equal(bed->text, "prefill");
    apply_tokens(bed);
    apply_prefill_ok(bed);
    apply_end_ok(bed);
    assert_string_equal(bed->text, "answer(ok)");
    apply_answered(bed);
    bed_canary(bed, CANARY_ONE_LEG);
    assert_true(bed_sent(&bed->out, MESSAGE_ADMIT)->u.admit.local_max > 1000);
    apply_admitted_local(bed);
    apply_tokens(bed);
    apply_end_ok(bed);
    apply_answered(bed);
    static const struct router_stats nothing;
    assert_memory_equal(&bed->core.stats, &nothing, sizeof nothing);
    assert_int_equal(bed->core.retry_tenths, tenths);
    assert_int_equal(bed->core.node.ledger.terminals[OUTCOME_OK], 2);
    bed_destroy(bed);
}

static void test_a_canary_is_given_up_where_others_would_wait(void **state) {
    (void)state;
    struct bed *bed = bed_in(PLACING); /* no room: a client's request waits */
    uint64_t waiting = bed->request;
    bed_canary(bed, CANARY_ONE_LEG);
    assert_string_equal(bed->text, "answer(failed)");
    assert_int_equal(bed_answer_cause(bed), CAUSE_BUSY);
    assert_int_equal(bed->core.requests[pool_index(waiting)].state, REQUEST_PLACING);
    bed_destroy(bed);
    bed = bed_create(true);
    bed_canary(bed, CANARY_TWO_LEGS);
    apply_rejected(bed); /* alone, but the only decode worker is full */
    assert_string_equal(bed->text, "answer(failed)");
    assert_int_equal(bed_answer_cause(bed), CAUSE_BUSY);
    bed_destroy(bed);
    bed = bed_create(true);
    bed_canary(bed, CANARY_TWO_LEGS);
    apply_admitted(bed);
    apply_busy(bed); /* the same of the prefill worker */
    assert_string_equal(bed->text, "abort answer(failed)");
    assert_int_equal(bed_answer_cause(bed), CAUSE_BUSY);
    bed_destroy(bed);
}

static void test_a_canary_leaves_the_last_places_to_clients(void **state) {
    (void)state;
    struct bed *bed = bed_create(true);
    for (uint32_t i = 0; i < 8; i++) {
        bool is_canary = i == 7;
        struct event open = {.kind = EVENT_CLIENT_OPEN};
        open.u.client_open.call.v = 100 + i;
        open.u.client_open.model = "m";
        open.u.client_open.request_label = "";
        open.u.client_open.session_label = "";
        open.u.client_open.canary = is_canary ? CANARY_ONE_LEG : CANARY_NONE;
        bed_step(bed, &open);
        assert_string_equal(bed->text, is_canary ? "answer(failed)" : "tokenize");
    }
    assert_int_equal(bed_answer_cause(bed), CAUSE_BUSY);
    assert_int_equal(bed->core.ids.live, 7);
    bed_destroy(bed);
}

static void test_a_canary_is_not_tried_again(void **state) {
    (void)state;
    struct bed *bed = bed_create(true);
    bed_worker(bed, ROLE_DECODE, 501, DECODE2);
    bed_canary(bed, CANARY_TWO_LEGS);
    uint64_t stream = bed->core.requests[pool_index(bed->request)].decode_stream.v;
    bed_stream_ends(bed, stream);
    assert_non_null(strstr(bed->text, "answer(failed)"));
    assert_int_equal(bed_answer_cause(bed), CAUSE_SESSION_ENDED);
    apply_answered(bed);
    bed_canary(bed, CANARY_ONE_LEG);
    bed_wait(bed, 3000);
    assert_int_equal(bed_answer_cause(bed), CAUSE_T_ADMIT);
    bed_destroy(bed);
}

static void test_a_canary_is_no_clients_to_abort_and_ends_with_a_drain(void **state) {
    (void)state;
    struct bed *bed = bed_create(true);
    bed_canary(bed, CANARY_ONE_LEG);
    struct event abort = {.kind = EVENT_CLIENT_ABORT};
    abort.u.client_abort.label = CANARY_LABEL;
    bed_step(bed, &abort);
    assert_string_equal(bed_state(bed), "admitting");
    assert_int_equal(bed->core.stats.aborted_last, 0);
    struct event drain = {.kind = EVENT_DRAIN};
    drain.u.drain.grace = span_ms(30000);
    bed_step(bed, &drain);
    bed_wait(bed, 100);
    assert_int_equal(bed_answer_cause(bed), CAUSE_SHUTDOWN);
    bed_destroy(bed);
}

static void test_canaries_do_not_take_the_turns_of_clients(void **state) {
    (void)state;
    struct bed *bed = bed_create(false);
    bed_worker(bed, ROLE_DECODE, 500, 2);
    bed_worker(bed, ROLE_DECODE, 501, 4);
    uint32_t client = ROUTER_NONE;
    uint32_t canary = ROUTER_NONE;
    for (uint32_t i = 0; i < 8; i++) {
        bool is_canary = i % 2 == 0;
        if (is_canary) {
            bed_canary(bed, CANARY_ONE_LEG);
        } else {
            apply_open(bed);
            apply_tokenized(bed);
        }
        const struct request *request = &bed->core.requests[pool_index(bed->request)];
        uint32_t *last = is_canary ? &canary : &client;
        assert_int_not_equal(request->decode, *last);
        *last = request->decode;
        apply_gone(bed);
        apply_answered(bed);
    }
    bed_destroy(bed);
}

static void test_the_facts_for_a_canary_count_who_could_serve_it(void **state) {
    (void)state;
    struct bed *bed = bed_create(true);
    struct canary_facts facts;
    char model[LABEL_MAX];
    router_canary_facts(&bed->core, 7, &facts, model);
    assert_int_equal(facts.decodes, 1);
    assert_true(facts.has_prefill);
    assert_string_equal(model, "m");
    struct message beat = {.kind = MESSAGE_BEAT};
    beat.u.beat.progress = 12;
    beat.u.beat.is_draining = true;
    bed_send(bed, &beat, PREFILL);
    router_canary_facts(&bed->core, 8, &facts, model);
    assert_false(facts.has_prefill);
    beat.u.beat.is_draining = false;
    bed_send(bed, &beat, DECODE);
    router_canary_facts(&bed->core, 8, &facts, model);
    assert_int_equal(facts.fleet_progress, 12);
    bed_stream_ends(bed, DECODE);
    router_canary_facts(&bed->core, 8, &facts, model);
    assert_int_equal(facts.decodes, 0);
    assert_string_equal(model, "");
    bed_destroy(bed);
}

static void test_a_range_of_words_that_is_not_given_back_is_seen(void **state) {
    (void)state;
    struct bed *bed = bed_in(STREAMING);
    bed->core.words.drops_next_free = true;
    assert_int_equal(bed->core.words.taken, bed->core.words_held);
    struct event gone = {.kind = EVENT_CLIENT_GONE};
    gone.u.client_gone.call.v = CALL;
    gone.u.client_gone.cause = CAUSE_CLIENT_GONE;
    router_core_step(&bed->core, &gone, (struct instant){bed->now}, &bed->out);
    struct event answered = {.kind = EVENT_ANSWERED};
    answered.u.answered.request = bed->request;
    router_core_step(&bed->core, &answered, (struct instant){bed->now}, &bed->out);
    assert_int_equal(bed->core.words.taken, bed->core.words_held + 1);
    bed_destroy(bed);
}

static void test_drain_refuses_new_requests_and_exits_after_the_last(void **state) {
    (void)state;
    struct bed *bed = bed_in(STREAMING);
    struct event drain = {.kind = EVENT_DRAIN};
    drain.u.drain.grace = span_ms(30000);
    bed_step(bed, &drain);
    struct event open = {.kind = EVENT_CLIENT_OPEN};
    open.u.client_open.call.v = 77;
    open.u.client_open.model = "m";
    open.u.client_open.request_label = "";
    open.u.client_open.session_label = "";
    bed_step(bed, &open);
    assert_string_equal(bed->text, "answer(failed)");
    apply_end_ok(bed);
    apply_answered(bed);
    assert_string_equal(bed->text, "exit");
    bed_destroy(bed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_cell_of_the_router_table),
        cmocka_unit_test(test_every_state_ends_by_the_requests_deadline),
        cmocka_unit_test(test_an_admit_without_answer_is_aborted_and_placed_again),
        cmocka_unit_test(test_a_resume_sends_the_emitted_tokens_as_prompt),
        cmocka_unit_test(test_a_resume_prefers_a_worker_that_computes_the_same),
        cmocka_unit_test(test_a_prompt_is_read_by_a_worker_that_computes_like_its_decode_worker),
        cmocka_unit_test(test_a_request_goes_where_its_prefix_is_until_others_have_less_to_do),
        cmocka_unit_test(test_a_prefix_of_another_salt_attracts_nothing),
        cmocka_unit_test(test_what_left_a_workers_cache_attracts_nothing),
        cmocka_unit_test(test_a_prefill_worker_is_chosen_by_what_is_left_to_compute),
        cmocka_unit_test(test_salted_requests_go_only_where_salts_are_kept_apart),
        cmocka_unit_test(test_usage_counts_what_nobody_computed_again),
        cmocka_unit_test(test_a_lost_end_after_the_last_token_costs_nothing),
        cmocka_unit_test(test_the_answer_says_what_crossed_though_the_prefill_worker_is_late),
        cmocka_unit_test(test_the_answer_says_what_of_the_hand_off_was_exposed),
        cmocka_unit_test(test_a_new_attempt_forgets_the_exposed_time_of_the_last),
        cmocka_unit_test(test_attempts_are_bounded_and_the_error_says_so),
        cmocka_unit_test(test_the_retry_budget_stops_a_storm),
        cmocka_unit_test(test_no_worker_at_all_waits_and_then_says_unavailable),
        cmocka_unit_test(test_a_worker_that_appears_in_time_serves_who_waited),
        cmocka_unit_test(test_without_prefill_workers_the_decode_worker_serves_alone),
        cmocka_unit_test(test_an_unknown_model_is_named_together_with_those_that_exist),
        cmocka_unit_test(test_lengths_are_checked_before_any_worker_is_asked),
        cmocka_unit_test(test_without_max_tokens_an_answer_may_fill_the_context),
        cmocka_unit_test(test_a_large_max_tokens_counts_as_an_ordinary_answer),
        cmocka_unit_test(test_mass_deletion_in_etcd_stops_nothing_that_has_a_session),
        cmocka_unit_test(test_a_record_that_changes_a_workers_role_is_not_believed),
        cmocka_unit_test(test_a_crowd_that_waited_for_the_first_worker_is_tokenized_to_the_last),
        cmocka_unit_test(test_a_model_with_room_is_served_though_many_others_wait),
        cmocka_unit_test(test_a_worker_that_missed_two_beats_is_given_nothing_until_it_speaks),
        cmocka_unit_test(test_a_dead_life_at_the_same_address_is_not_greeted_while_the_next_lives),
        cmocka_unit_test(test_a_worker_whose_address_answers_with_another_life_is_forgotten),
        cmocka_unit_test(test_an_unlisted_worker_is_forgotten_though_it_is_asked_in_vain),
        cmocka_unit_test(test_a_busy_decode_worker_is_probed_by_one_request_at_a_time),
        cmocka_unit_test(test_an_end_without_a_reason_is_another_attempt),
        cmocka_unit_test(test_every_cell_of_the_table_of_choices),
        cmocka_unit_test(test_choices_have_seeds_of_their_own_and_one_usage),
        cmocka_unit_test(test_choices_go_where_the_prompt_is_though_another_worker_is_idle),
        cmocka_unit_test(test_choices_that_do_not_fit_are_refused_whole),
        cmocka_unit_test(test_choices_that_wait_are_placed_though_the_first_has_no_token),
        cmocka_unit_test(test_choices_that_wait_end_with_the_deadline_of_their_call),
        cmocka_unit_test(test_logprobs_reach_the_client_with_their_token),
        cmocka_unit_test(test_who_asked_for_no_logprobs_gets_none),
        cmocka_unit_test(test_a_token_without_its_logprobs_is_another_attempt),
        cmocka_unit_test(test_the_token_store_counts_the_logprobs_that_may_have_to_wait),
        cmocka_unit_test(test_equal_workers_take_turns_on_a_quiet_cluster),
        cmocka_unit_test(test_a_pair_that_could_not_talk_is_avoided_while_there_is_another),
        cmocka_unit_test(test_a_pair_is_avoided_though_the_decode_worker_is_the_first_to_tell),
        cmocka_unit_test(test_a_request_waits_for_a_busy_worker_rather_than_try_a_suspected_pair),
        cmocka_unit_test(test_a_decode_worker_that_nobody_reaches_is_avoided_though_it_looks_idle),
        cmocka_unit_test(test_a_suspected_pair_is_tried_where_there_is_no_other),
        cmocka_unit_test(test_a_worker_whose_sessions_die_young_is_doubted_for_longer_each_time),
        cmocka_unit_test(test_a_doubted_worker_is_used_where_there_is_no_other),
        cmocka_unit_test(test_drain_refuses_new_requests_and_exits_after_the_last),
        cmocka_unit_test(test_a_canary_takes_the_legs_it_is_told_and_is_in_no_clients_numbers),
        cmocka_unit_test(test_a_canary_is_given_up_where_others_would_wait),
        cmocka_unit_test(test_a_canary_leaves_the_last_places_to_clients),
        cmocka_unit_test(test_a_canary_is_not_tried_again),
        cmocka_unit_test(test_a_canary_is_no_clients_to_abort_and_ends_with_a_drain),
        cmocka_unit_test(test_canaries_do_not_take_the_turns_of_clients),
        cmocka_unit_test(test_the_facts_for_a_canary_count_who_could_serve_it),
        cmocka_unit_test(test_a_range_of_words_that_is_not_given_back_is_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
