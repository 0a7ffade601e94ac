/* Joining, on documents recorded from a cluster whose prefill worker is slow, and on made ones. */
#include "tools/batonctl/model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/bytes.h"
#include "core/event.h"
#include "core/message.h"

enum { ROUTER, PREFILL, DECODE, PROGRAMS };

struct bed {
    struct program programs[PROGRAMS];
    struct source sources[PROGRAMS];
    json_t *documents[PROGRAMS];
    struct model model;
};

static void bed_add(struct bed *bed, uint32_t which, enum role role, json_t *document) {
    static const char *const ids[] = {"router-1", "prefill-1", "decode-1"};
    assert_non_null(document);
    struct program *program = &bed->programs[which];
    *program = (struct program){.role = role, .incarnation = json_hex(document, "incarnation")};
    text_copy(program->id, sizeof program->id, ids[which]);
    bed->documents[which] = document;
    bed->sources[which] = (struct source){.program = program, .document = document, .why = ""};
}

static void bed_record(struct bed *bed, const char *when) {
    static const char *const names[] = {"router", "prefill", "decode"};
    static const enum role roles[] = {ROLE_ROUTER, ROLE_PREFILL, ROLE_DECODE};
    memset(bed, 0, sizeof *bed);
    for (uint32_t i = 0; i < PROGRAMS; i++) {
        char path[512];
        json_error_t error;
        (void)snprintf(path, sizeof path, RECORDED "/%s-%s.json", when, names[i]);
        bed_add(bed, i, roles[i], json_load_file(path, 0, &error));
    }
}

static void bed_build(struct bed *bed) {
    model_build(bed->sources, PROGRAMS, &bed->model);
}

static void bed_fini(struct bed *bed) {
    model_fini(&bed->model);
    for (uint32_t i = 0; i < PROGRAMS; i++) {
        json_decref(bed->documents[i]);
    }
}

static const struct row *find(const struct bed *bed, const char *label) {
    for (uint32_t i = 0; i < bed->model.row_count; i++) {
        if (strcmp(bed->model.rows[i].label, label) == 0) {
            return &bed->model.rows[i];
        }
    }
    fail_msg("no row %s", label);
    return NULL;
}

static void expect_waiting(const struct row *row, enum waiting_kind kind, const char *who) {
    assert_string_equal(waiting_kind_name(row->waiting.kind), waiting_kind_name(kind));
    assert_string_equal(row->waiting.who, who);
}

static void test_an_attempt_is_one_row_over_all_programs(void **state) {
    (void)state;
    struct bed bed;
    bed_record(&bed, "prefilling");
    bed_build(&bed);
    assert_int_equal(bed.model.row_count, 3);
    const struct row *row = find(&bed, "agent-0");
    assert_string_equal(row->at[ROLE_ROUTER]->state, "prefilling");
    assert_string_equal(row->at[ROLE_PREFILL]->state, "computing");
    assert_string_equal(row->at[ROLE_DECODE]->state, "receiving");
    for (enum role role = ROLE_ROUTER; role <= ROLE_DECODE; role++) {
        assert_true(row->age_ms >= row->at[role]->age_ms);
        assert_true(row->next->deadline_left_ms <= row->at[role]->deadline_left_ms);
    }
    bed_fini(&bed);
}

static void test_the_chain_of_waiting_ends_at_who_works(void **state) {
    (void)state;
    struct bed bed;
    char text[256];
    bed_record(&bed, "prefilling");
    bed_build(&bed);
    const struct row *row = find(&bed, "agent-0");
    expect_waiting(row, WAITING_AT, "prefill-1");
    waiting_text(&row->waiting, text, sizeof text);
    assert_string_equal(text, "prefill-1: its engine step");
    row = find(&bed, "agent-1");
    expect_waiting(row, WAITING_AT, "router-1");
    waiting_text(&row->waiting, text, sizeof text);
    assert_string_equal(text, "router-1: a worker with room");
    bed_fini(&bed);
}

static void test_who_does_not_answer_is_named(void **state) {
    (void)state;
    struct bed bed;
    char text[256];
    bed_record(&bed, "prefilling");
    bed.sources[PREFILL].document = NULL;
    bed_build(&bed);
    const struct row *row = find(&bed, "agent-0");
    expect_waiting(row, WAITING_SILENT, "prefill-1");
    assert_null(row->at[ROLE_PREFILL]);
    assert_int_equal(row->waiting.source, PREFILL);
    assert_int_equal(row->waiting.for_ms, row->at[ROLE_ROUTER]->state_age_ms);
    waiting_text(&row->waiting, text, sizeof text);
    assert_string_equal(text, "prefill-1, which does not answer");
    bed_fini(&bed);
}

static void test_who_is_in_etcd_no_more_is_named(void **state) {
    (void)state;
    struct bed bed;
    bed_record(&bed, "prefilling");
    bed.programs[PREFILL].incarnation = 1; /* restarted: a new process under the old id */
    bed_build(&bed);
    expect_waiting(find(&bed, "agent-0"), WAITING_LOST, "prefill-1");
    bed_fini(&bed);
}

static void test_who_answers_but_does_not_hold_it_is_named(void **state) {
    (void)state;
    struct bed bed;
    bed_record(&bed, "prefilling");
    (void)json_array_clear(json_object_get(bed.documents[PREFILL], "entries"));
    bed_build(&bed);
    expect_waiting(find(&bed, "agent-0"), WAITING_ABSENT, "prefill-1");
    bed_fini(&bed);
}

static void test_without_its_router_the_workers_still_tell(void **state) {
    (void)state;
    struct bed bed;
    bed_record(&bed, "prefilling");
    bed.sources[ROUTER].document = NULL;
    bed_build(&bed);
    assert_int_equal(bed.model.row_count, 2); /* placing ones are at the router only */
    const struct row *row = find(&bed, "agent-0");
    assert_null(row->at[ROLE_ROUTER]);
    expect_waiting(row, WAITING_AT, "prefill-1");
    bed_fini(&bed);
}

#define SESSION(stream_, peer_, role_, incarnation_)                                               \
    "{\"stream\":" stream_ ",\"peer\":\"" peer_ "\",\"peer_role\":\"" role_                        \
    "\",\"incarnation\":\"" incarnation_ "\"}"
#define ENTRY(attempt_, router_, state_, waits_, age_, left_, peers_)                              \
    "{\"id\":\"1\",\"attempt\":\"" attempt_ "\",\"router\":\"" router_ "\",\"state\":\"" state_    \
    "\",\"label\":\"l\",\"waits_for\":\"" waits_ "\",\"age_ms\":" age_                             \
    ",\"state_age_ms\":5,\"deadline_left_ms\":" left_ ",\"peers\":[" peers_ "]}"
#define PEER(stream_, peer_, silence_)                                                             \
    "{\"stream\":" stream_ ",\"peer\":\"" peer_ "\",\"silence_ms\":" silence_ "}"

static void bed_make(struct bed *bed, const char *router, const char *prefill, const char *decode) {
    static const enum role roles[] = {ROLE_ROUTER, ROLE_PREFILL, ROLE_DECODE};
    const char *const texts[] = {router, prefill, decode};
    memset(bed, 0, sizeof *bed);
    for (uint32_t i = 0; i < PROGRAMS; i++) {
        bed_add(bed, i, roles[i], json_loads(texts[i], 0, NULL));
    }
    bed_build(bed);
}

static void test_two_that_wait_for_each_other_are_both_named(void **state) {
    (void)state;
    struct bed bed;
    bed_make(
        &bed,
        "{\"incarnation\":\"a\",\"sessions\":[" SESSION("2", "decode-1", "decode", "d") "," SESSION(
            "4", "prefill-1", "prefill",
            "b") "],\"entries\":[" ENTRY("1000001", "a", "prefilling", "the prefill worker", "9",
                                         "70",
                                         PEER("2", "decode-1", "1") "," PEER("4", "prefill-1",
                                                                             "1")) "]}",
        "{\"incarnation\":\"b\",\"sessions\":[" SESSION(
            "2", "decode-1", "decode",
            "d") "],\"entries\":[" ENTRY("1000001", "a", "queued", "the decode worker's Accept",
                                         "8", "60", PEER("2", "decode-1", "1")) "]}",
        "{\"incarnation\":\"d\",\"entries\":[" ENTRY(
            "1000001", "a", "reserved", "the prefill worker's Open", "8", "50", "") "]}");
    assert_int_equal(bed.model.row_count, 1);
    const struct row *row = &bed.model.rows[0];
    expect_waiting(row, WAITING_EACH_OTHER, "decode-1");
    assert_string_equal(row->waiting.other, "prefill-1");
    assert_string_equal(row->next->state, "reserved");
    bed_fini(&bed);
}

static void test_equal_attempts_of_two_routers_are_two_rows(void **state) {
    (void)state;
    struct bed bed;
    bed_make(&bed,
             "{\"incarnation\":\"a\",\"entries\":[" ENTRY("1000001", "a", "placing",
                                                          "a worker with room", "9", "70", "") "]}",
             "{\"incarnation\":\"b\",\"entries\":[]}",
             "{\"incarnation\":\"d\",\"entries\":[" ENTRY("1000001", "c", "running",
                                                          "its engine step", "12", "50", "") "]}");
    assert_int_equal(bed.model.row_count, 2);
    assert_int_equal(bed.model.rows[0].router, 0xc); /* the older first */
    expect_waiting(&bed.model.rows[0], WAITING_AT, "decode-1");
    expect_waiting(&bed.model.rows[1], WAITING_AT, "router-1");
    bed_fini(&bed);
}

static void test_sends_to_a_receiver_that_is_silent_wait_for_the_receiver(void **state) {
    (void)state;
    struct bed bed;
    char text[256];
    bed_make(&bed, "{\"incarnation\":\"a\"}",
             "{\"incarnation\":\"b\",\"sessions\":[" SESSION(
                 "2", "decode-9", "decode",
                 "e") "],\"entries\":[" ENTRY("1000001", "a", "sent", "its KV sends to end", "8",
                                              "60", PEER("2", "decode-9", "3100")) "]}",
             "{\"incarnation\":\"d\"}");
    expect_waiting(&bed.model.rows[0], WAITING_LOST, "decode-9");
    waiting_text(&bed.model.rows[0].waiting, text, sizeof text);
    assert_string_equal(text,
                        "decode-9, which is not listed (gone, or restarted) (silent for 3.1 s)");
    bed_fini(&bed);
}

static void test_documents_of_nonsense_hold_nothing(void **state) {
    (void)state;
    struct bed bed;
    bed_make(&bed, "{\"entries\":7,\"terminals\":{\"a\":1}}", "[1,2]",
             "{\"entries\":[null,{\"peers\":3,\"attempt\":5,\"waits_for\":\"the prefill "
             "worker\"}]}");
    assert_int_equal(bed.model.held_count, 2);
    assert_int_equal(bed.model.row_count, 2); /* one program holds an attempt once */
    expect_waiting(&bed.model.rows[0], WAITING_AT, "decode-1");
    bed_fini(&bed);
}

static void test_ends_are_newest_first_and_keep_request_and_number_apart(void **state) {
    (void)state;
    struct bed bed;
    bed_record(&bed, "after");
    bed_build(&bed);
    assert_true(bed.model.ended_count > 10);
    for (uint32_t i = 1; i < bed.model.ended_count; i++) {
        assert_true(bed.model.ended[i - 1].ago_ms <= bed.model.ended[i].ago_ms);
    }
    assert_int_equal(attempt_number(0x000001000e00000c), 14);
    assert_int_equal(attempt_request(0x000001000e00000c), attempt_request(0x000001000100000c));
    assert_int_not_equal(attempt_request(0x000001000e00000c), attempt_request(0x000001000e00000d));
    assert_int_not_equal(attempt_request(0x000001000e00000c), attempt_request(0x000002000e00000c));
    bed_fini(&bed);
}

/* core/names.c is the list: a cause added there must get its words here. */
static void test_every_cause_has_words(void **state) {
    (void)state;
    for (uint32_t i = 1; i < CAUSE_COUNT; i++) {
        const char *name = cause_name((enum cause)i);
        assert_string_not_equal(cause_text(name), name);
    }
    assert_string_equal(cause_text("of a newer version"), "of a newer version");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_an_attempt_is_one_row_over_all_programs),
        cmocka_unit_test(test_the_chain_of_waiting_ends_at_who_works),
        cmocka_unit_test(test_who_does_not_answer_is_named),
        cmocka_unit_test(test_who_is_in_etcd_no_more_is_named),
        cmocka_unit_test(test_who_answers_but_does_not_hold_it_is_named),
        cmocka_unit_test(test_without_its_router_the_workers_still_tell),
        cmocka_unit_test(test_two_that_wait_for_each_other_are_both_named),
        cmocka_unit_test(test_equal_attempts_of_two_routers_are_two_rows),
        cmocka_unit_test(test_sends_to_a_receiver_that_is_silent_wait_for_the_receiver),
        cmocka_unit_test(test_documents_of_nonsense_hold_nothing),
        cmocka_unit_test(test_ends_are_newest_first_and_keep_request_and_number_apart),
        cmocka_unit_test(test_every_cause_has_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
