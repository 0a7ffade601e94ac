/* The router's own requests: a client without a call. core/canary.h decides when one is sent and
 * what its fate says; here it goes through a text thread, the core and the workers as any other.
 *
 * Its prompt is ids, for it needs no tokenizer; it passes a text thread all the same, each in turn,
 * so that one that hangs is noticed. All else runs on the control thread. */
#include "services/router/router.h"

#include <string.h>

#include "base/check.h"
#include "runtime/log.h"
#include "runtime/metrics.h"

#define CANARY_CALL UINT64_MAX /* no call of rpc has this id */

static const char *const legs_values[] = {"one", "two"};
static const char *const age_values[] = {"any", "two"};
static const char *const result_values[] = {"ok", "failed", "no_room"};

/* ---- sending -------------------------------------------------------------------------------- */

static void canary_open(struct router *router, enum canary_legs legs, const char *model) {
    struct shell_mail *mail = shell_mail_take(router->shell, EVENT_CLIENT_OPEN);
    char *name = shell_mail_payload(mail, LABEL_MAX);
    text_copy(name, LABEL_MAX, model);
    mail->event.u.client_open.call.v = CANARY_CALL;
    mail->event.u.client_open.model = name;
    mail->event.u.client_open.request_label = CANARY_LABEL;
    mail->event.u.client_open.session_label = "";
    mail->event.u.client_open.deadline = canary_budget(&router->canary.core);
    mail->event.u.client_open.canary = legs;
    shell_post(router->shell, mail);
}

void canary_tick(void *ctx, struct instant now) {
    struct router *router = ctx;
    struct canary_shell *canary = &router->canary;
    struct canary_facts facts;
    char model[LABEL_MAX];
    router_canary_facts(router->core, canary->core.number, &facts, model);
    facts.routers = 1 + atomic_load(&router->peers.known);
    canary->decodes = facts.decodes;
    enum canary_legs legs = canary_poll(&canary->core, &facts, now);
    if (legs != CANARY_NONE) {
        canary_open(router, legs, model);
    }
}

/* ---- its text ------------------------------------------------------------------------------- */

static void post_prompt(struct router *router, uint64_t request, enum status status) {
    static const uint32_t prompt[CANARY_PROMPT] = {1, 2, 3, 4};
    static const struct sampling greedy = {
        .top_p = 1, .top_k = -1, .repetition_penalty = 1, .ignore_eos = true};
    struct shell_mail *mail = shell_mail_take(router->shell, EVENT_TOKENIZED);
    mail->event.u.tokenized.request = request;
    mail->event.u.tokenized.status = status;
    mail->event.u.tokenized.detail = "no text thread takes it";
    mail->event.u.tokenized.tokens = prompt;
    mail->event.u.tokenized.token_count = CANARY_PROMPT;
    mail->event.u.tokenized.max_tokens = CANARY_TOKENS;
    mail->event.u.tokenized.sampling = &greedy;
    mail->event.u.tokenized.eos = prompt;
    shell_post(router->shell, mail);
}

/* Text thread. */
static void canary_text(struct mail *mail, void *ctx) {
    (void)mail;
    struct text_thread *thread = ctx;
    uint64_t request = thread->canary_request;
    atomic_store(&thread->is_canary_posted, false);
    post_prompt(thread->router, request, STATUS_OK);
}

static void canary_tokenize(struct router *router, uint64_t request) {
    struct text_thread *thread = &router->text[router->canary.core.number % router->text_count];
    if (atomic_load(&thread->is_canary_posted)) {
        post_prompt(router, request, STATUS_INTERNAL); /* it has not taken the one before */
        return;
    }
    atomic_store(&thread->is_canary_posted, true);
    thread->canary_request = request;
    thread->canary_mail.run = canary_text;
    if (!mailbox_post(&thread->box, &thread->canary_mail)) {
        post_prompt(router, request, STATUS_INTERNAL); /* the process is leaving */
    }
}

/* ---- its end -------------------------------------------------------------------------------- */

static void canary_answer(struct router *router, const struct effect *effect) {
    struct canary_shell *canary = &router->canary;
    enum canary_result result = canary_ended(
        &canary->core, effect->u.answer.outcome, effect->u.answer.cause,
        effect->u.answer.decode_label, effect->u.answer.prefill_label, router->core->node.now);
    if (result == CANARY_OK) {
        histogram_add(&canary->seconds, effect->u.answer.total);
    } else if (result == CANARY_FAILED) {
        LOG_WARN("a canary request failed", LOG_TEXT("cause", cause_name(effect->u.answer.cause)),
                 LOG_TEXT("why", effect->u.answer.detail),
                 LOG_TEXT("decode", effect->u.answer.decode_label),
                 LOG_TEXT("prefill", effect->u.answer.prefill_label),
                 LOG_SPAN("after", effect->u.answer.total));
    }
    if (effect->u.answer.request == 0) {
        return; /* refused without an entry */
    }
    struct shell_mail *mail = shell_mail_take(router->shell, EVENT_ANSWERED);
    mail->event.u.answered.request = effect->u.answer.request;
    shell_post(router->shell, mail);
}

bool canary_effect(struct router *router, const struct effect *effect) {
    if (effect->kind == EFFECT_TOKENIZE && effect->u.tokenize.call.v == CANARY_CALL) {
        canary_tokenize(router, effect->u.tokenize.request);
        return true;
    }
    if (effect->kind == EFFECT_ANSWER && effect->u.answer.call.v == CANARY_CALL) {
        canary_answer(router, effect);
        return true;
    }
    return effect->kind == EFFECT_DELIVER && effect->u.deliver.call.v == CANARY_CALL;
}

/* ---- what it says --------------------------------------------------------------------------- */

void canary_progress(void *ctx, struct buffer *lines) {
    struct router *router = ctx;
    struct canary_shell *canary = &router->canary;
    struct instant now = router->core->node.now;
    if (!canary_is_stuck(&canary->core, now)) {
        return;
    }
    char text[512];
    struct writer writer;
    writer_init(&writer, text, sizeof text - 1);
    canary_describe(&canary->core, canary->decodes, now, &writer);
    text[writer.len] = '\0';
    buffer_printf(lines, "%s\n", text);
}

void canary_start(struct router *router) {
    struct canary_shell *canary = &router->canary;
    canary_init(&canary->core, router->settings->canary, (struct instant){0});
    if (router->settings->canary.ns == 0) {
        return;
    }
    const char *causes[CAUSE_COUNT];
    for (uint32_t i = 0; i < CAUSE_COUNT; i++) {
        causes[i] = cause_name((enum cause)i);
    }
    struct metrics *metrics = shell_metrics(router->shell);
    canary->age = metrics_add(
        metrics, &(struct metric_config){
                     .kind = METRIC_GAUGE,
                     .name = "baton_canary_age_seconds",
                     .help = "Since the last good canary, of any kind or with a prefill worker; 0 "
                             "while no worker could answer one.",
                     .labels = {{"legs", age_values, 2}}});
    canary->ended = metrics_add(
        metrics,
        &(struct metric_config){
            .kind = METRIC_COUNTER,
            .name = "baton_canaries_total",
            .help = "The router's own requests; in baton_entries_*, in no clients' metric.",
            .labels = {{"legs", legs_values, 2}, {"outcome", result_values, 3}}});
    canary->failures =
        metrics_add(metrics, &(struct metric_config){.kind = METRIC_COUNTER,
                                                     .name = "baton_canary_failures_total",
                                                     .help = "Canaries that failed.",
                                                     .labels = {{"cause", causes, CAUSE_COUNT}},
                                                     .hides_zero = true});
    shell_histogram(router->shell, "baton_canary_seconds",
                    "From a canary's start until its good end.", &canary->seconds);
}

void canary_refresh(struct router *router) {
    struct canary_shell *canary = &router->canary;
    if (router->settings->canary.ns == 0) {
        return;
    }
    struct instant now = router->core->node.now;
    const struct canary_stats *stats = &canary->core.stats;
    for (uint32_t legs = 0; legs < 2; legs++) {
        metric_set(canary->age, legs, span_to_seconds(canary_age(&canary->core, legs == 1, now)));
        for (uint32_t result = 0; result < 3; result++) {
            metric_count_to(canary->ended, metric_series(canary->ended, legs, result, 0),
                            stats->results[legs][result]);
        }
    }
    for (uint32_t i = 0; i < CAUSE_COUNT; i++) {
        metric_count_to(canary->failures, i, stats->failures[i]);
    }
}
