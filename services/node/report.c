/* The admin port: health, readiness, metrics, entries, threads, drain.
 *
 * Handlers run on the admin thread. What belongs to the control thread is copied there by a query
 * and turned into text here, so that a large answer costs the control thread a copy only. */
#include "services/node/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "rpc/rpc.h"
#include "runtime/clock.h"
#include "runtime/log.h"

#define QUERY_MS        500
#define AUDIT_WINDOW_MS 60000 /* so long a mismatch makes unready */
#define OVERRUN_MAX_MS  500
#define BEATS_LIMIT_MS  2000
#define TERMINALS_SHOWN 100u
#define ENTRIES_SHOWN   10000u
#define DRAIN_MAX_S     86400.0
#define THREADS_MAX     128u

static const char *const reason_names[SHELL_REASON_COUNT] = {
    "start", "etcd",     "draining", "ledger",  "overrun",
    "audit", "progress", "beats",    "control", "role"};
static const char *const role_values[] = {"none", "router", "prefill", "decode"};
static const char *const outcome_values[] = {"none", "ok", "aborted", "failed"};

static struct instant query_deadline(void) {
    return instant_add(clock_now(), span_ms(QUERY_MS));
}

/* ---- the ledger ----------------------------------------------------------------------------- */

struct shell_balance report_balance(const struct shell *shell) {
    const struct shell_core *core = &shell->core;
    struct shell_balance balance = {.entries = ledger_imbalance(&core->node->ledger)};
    if (core->balance != NULL) {
        core->balance(core->ctx, &balance);
    }
    return balance;
}

/* ---- readiness ------------------------------------------------------------------------------ */

struct ready_query {
    struct shell *shell;
    struct buffer lines;
    bool codes[SHELL_REASON_COUNT];
};

static void ready_reason(struct ready_query *query, enum shell_reason reason) {
    query->codes[reason] = true;
}

/* The entry that is furthest past its deadline. */
static void ready_entries(struct ready_query *query) {
    const struct shell_core *core = &query->shell->core;
    uint32_t cursor = 0;
    struct entry_view view;
    struct entry_view worst = {.deadline_left_ms = -OVERRUN_MAX_MS};
    while (core->view(core->core, &cursor, &view)) {
        if (view.deadline_left_ms < worst.deadline_left_ms) {
            worst = view;
        }
    }
    if (worst.state != NULL) {
        buffer_printf(
            &query->lines,
            "deadline overrun: entry %016llx in state %s is %lld ms past its deadline, it "
            "waits for %s\n",
            (unsigned long long)worst.id, worst.state, -(long long)worst.deadline_left_ms,
            worst.waits_for != NULL ? worst.waits_for : "nothing");
        ready_reason(query, SHELL_REASON_OVERRUN);
    }
}

static void ready_fn(void *ctx) {
    struct ready_query *query = ctx;
    struct shell *shell = query->shell;
    const struct shell_core *core = &shell->core;
    const struct node *node = core->node;
    struct shell_balance balance = report_balance(shell);
    if (!report_is_balanced(&balance)) {
        buffer_printf(&query->lines,
                      "ledger imbalance: entries %lld, pages %lld, words %lld (must be 0): a bug "
                      "has lost them, restart this process\n",
                      (long long)balance.entries, (long long)balance.pages,
                      (long long)balance.words);
        ready_reason(query, SHELL_REASON_LEDGER);
    }
    if (node->stats.overrun_ns > span_ms(OVERRUN_MAX_MS).ns) {
        ready_entries(query);
    }
    if (shell->audit_seen > 0 &&
        instant_since(clock_now(), shell->audit_seen_at).ns < span_ms(AUDIT_WINDOW_MS).ns) {
        buffer_printf(&query->lines, "audit mismatch: %llu in all, the last within a minute\n",
                      (unsigned long long)shell->audit_seen);
        ready_reason(query, SHELL_REASON_AUDIT);
    }
    size_t before = query->lines.len;
    if (core->progress != NULL) {
        core->progress(core->ctx, &query->lines);
    }
    if (query->lines.len > before) {
        ready_reason(query, SHELL_REASON_PROGRESS);
    }
    before = query->lines.len;
    if (core->reasons != NULL) {
        core->reasons(core->ctx, &query->lines);
    }
    if (query->lines.len > before) {
        ready_reason(query, SHELL_REASON_ROLE);
    }
}

static void ready_done(void *ctx) {
    struct ready_query *query = ctx;
    buffer_fini(&query->lines);
    free(query);
}

static void ready_core(struct shell *shell, struct buffer *lines, bool *codes) {
    struct ready_query *query = calloc(1, sizeof *query);
    CHECK(query != NULL);
    query->shell = shell;
    buffer_init(&query->lines, 4096);
    if (shell_query(shell, ready_fn, ready_done, query, query_deadline())) {
        buffer_put(lines, query->lines.data, query->lines.len);
        for (uint32_t i = 0; i < SHELL_REASON_COUNT; i++) {
            codes[i] = codes[i] || query->codes[i];
        }
        ready_done(query);
        return;
    }
    buffer_printf(lines, "control thread: no answer within %d ms\n", QUERY_MS);
    codes[SHELL_REASON_CONTROL] = true;
}

/* A thread that has been silent for half of what the watchdog gives it. Where that is little the
 * process is gone before anybody could act on the answer. */
static void ready_beats(struct buffer *lines, bool *codes) {
    struct thread_view views[THREADS_MAX];
    uint32_t count = thread_snapshot(views, THREADS_MAX);
    for (uint32_t i = 0; i < count && i < THREADS_MAX; i++) {
        const struct thread_view *view = &views[i];
        if (view->limit.ns < span_ms(BEATS_LIMIT_MS).ns || view->silent.ns <= view->limit.ns / 2) {
            continue;
        }
        buffer_printf(lines, "thread %s: silent for %.1f s; the process ends at %.1f s\n",
                      view->name, span_to_seconds(view->silent), span_to_seconds(view->limit));
        codes[SHELL_REASON_BEATS] = true;
    }
}

bool report_ready(struct shell *shell, struct buffer *lines, bool codes[SHELL_REASON_COUNT]) {
    memset(codes, 0, SHELL_REASON_COUNT * sizeof *codes);
    if (!atomic_load(&shell->is_started)) {
        buffer_printf(lines, "%s\n", atomic_load(&shell->phase));
        codes[SHELL_REASON_START] = true;
        return false;
    }
    enum registry_state state = registry_state(shell->registry);
    if (state == REGISTRY_IDLE || state == REGISTRY_WAITING) {
        char text[512];
        registry_describe(shell->registry, text, sizeof text);
        buffer_printf(lines, "%s\n", text);
        codes[SHELL_REASON_ETCD] = true;
    }
    if (atomic_load(&shell->is_draining)) {
        buffer_text(lines, "draining\n");
        codes[SHELL_REASON_DRAINING] = true;
    }
    ready_beats(lines, codes);
    ready_core(shell, lines, codes);
    for (uint32_t i = 0; i < SHELL_REASON_COUNT; i++) {
        if (codes[i]) {
            return false;
        }
    }
    return true;
}

static void get_ready(void *ctx, const struct admin_request *request, struct admin_reply *reply) {
    (void)request;
    bool codes[SHELL_REASON_COUNT];
    if (report_ready(ctx, &reply->body, codes)) {
        buffer_text(&reply->body, "ready\n");
    } else {
        reply->status = 503;
    }
}

static void get_live(void *ctx, const struct admin_request *request, struct admin_reply *reply) {
    (void)ctx;
    (void)request;
    if (threads_are_alive()) {
        buffer_text(&reply->body, "alive\n");
        return;
    }
    reply->status = 503;
    buffer_text(&reply->body, "a thread does not beat:\n");
    struct writer writer = buffer_reserve(&reply->body, 16 * 1024);
    thread_describe(&writer);
    buffer_commit(&reply->body, &writer);
    buffer_text(&reply->body, "\n");
}

/* ---- metrics -------------------------------------------------------------------------------- */

static void collect_threads(void *ctx, struct metric_emitter *emitter) {
    (void)ctx;
    struct thread_view views[THREADS_MAX];
    uint32_t count = thread_snapshot(views, THREADS_MAX);
    for (uint32_t i = 0; i < count && i < THREADS_MAX; i++) {
        bool is_first = true; /* names need not be unique: the first of a name is shown */
        for (uint32_t j = 0; j < i && is_first; j++) {
            is_first = strcmp(views[i].name, views[j].name) != 0;
        }
        if (is_first) {
            metric_emit(emitter, (const char *const[]){views[i].name},
                        span_to_seconds(views[i].age));
        }
    }
}

static struct metric *add(struct shell *shell, enum metric_kind kind, const char *name,
                          const char *help) {
    return metrics_add(shell->metrics,
                       &(struct metric_config){.kind = kind, .name = name, .help = help});
}

static struct metric *add_labelled(struct shell *shell, enum metric_kind kind, const char *name,
                                   const char *help, const char *label, const char *const *values,
                                   uint32_t count) {
    return metrics_add(shell->metrics, &(struct metric_config){.kind = kind,
                                                               .name = name,
                                                               .help = help,
                                                               .labels = {{label, values, count}}});
}

void report_add_metrics(struct shell *shell) {
    struct shell_metrics_set *m = &shell->m;
    const char *causes[CAUSE_COUNT];
    for (uint32_t i = 0; i < CAUSE_COUNT; i++) {
        causes[i] = cause_name((enum cause)i);
    }
    m->overrun = add(shell, METRIC_GAUGE, "baton_deadline_overrun_seconds",
                     "How far the worst live entry is past its deadline; must be 0.");
    m->created = add(shell, METRIC_COUNTER, "baton_entries_created_total", "Entries admitted.");
    m->terminals = add_labelled(shell, METRIC_COUNTER, "baton_entries_terminal_total",
                                "Entries that reached their one terminal state.", "outcome",
                                outcome_values, 4);
    m->causes = metrics_add(shell->metrics,
                            &(struct metric_config){.kind = METRIC_COUNTER,
                                                    .name = "baton_entries_terminal_cause_total",
                                                    .help = "Why entries ended: the first cause.",
                                                    .labels = {{"cause", causes, CAUSE_COUNT}},
                                                    .hides_zero = true});
    m->imbalance = add_labelled(shell, METRIC_GAUGE, "baton_ledger_imbalance",
                                "Created minus live minus terminal; pages and token buffers nobody "
                                "accounts for; must be 0.",
                                "what", (const char *const[]){"entries", "pages", "words"}, 3);
    m->operations = add(shell, METRIC_GAUGE, "baton_entry_operations",
                        "Own operations outstanding, summed over live entries.");
    m->progress_age = add(shell, METRIC_GAUGE, "baton_last_progress_age_seconds",
                          "Since own work last moved while there are entries, else 0.");
    m->sessions = add_labelled(shell, METRIC_GAUGE, "baton_sessions", "Live sessions.", "peer_role",
                               role_values, 4);
    m->silence =
        add_labelled(shell, METRIC_GAUGE, "baton_session_silence_seconds",
                     "Longest silence of a live session now.", "peer_role", role_values, 4);
    m->session_ends = metrics_add(shell->metrics,
                                  &(struct metric_config){.kind = METRIC_COUNTER,
                                                          .name = "baton_session_ends_total",
                                                          .help = "Sessions that ended.",
                                                          .labels = {{"why", causes, CAUSE_COUNT}},
                                                          .hides_zero = true});
    m->sessions_refused =
        add(shell, METRIC_COUNTER, "baton_sessions_refused_total", "Sessions refused at Hello.");
    m->audit = add(shell, METRIC_COUNTER, "baton_audit_mismatch_total",
                   "Entries that a peer did not hold though it should; must be 0.");
    m->stale_mail = add(shell, METRIC_COUNTER, "baton_stale_mail_total",
                        "Messages of sessions that had ended.");
    m->stale_events = add(shell, METRIC_COUNTER, "baton_stale_events_total",
                          "Events for entries or operations that no longer existed.");
    m->pauses = add_labelled(shell, METRIC_COUNTER, "baton_pause_detected_total",
                             "Times the process found that it had not run for a while.", "where",
                             (const char *const[]){"core", "watchdog"}, 2);
    m->log_dropped =
        add(shell, METRIC_COUNTER, "baton_log_dropped_total", "Log lines that nobody took.");
    m->mailbox = add_labelled(shell, METRIC_GAUGE, "baton_mailbox_depth",
                              "Mail waiting for the control thread.", "what",
                              (const char *const[]){"now", "max"}, 2);
    m->rpc_calls = add(shell, METRIC_GAUGE, "baton_rpc_calls", "gRPC calls alive.");
    m->rpc_ended = add_labelled(shell, METRIC_COUNTER, "baton_rpc_calls_cut_total",
                                "gRPC calls cut off by this side.", "why",
                                (const char *const[]){"stalled", "overflow", "full"}, 3);
    m->registrations = add(shell, METRIC_COUNTER, "baton_registrations_total",
                           "Times etcd confirmed this process's record.");
    m->leases_lost = add(shell, METRIC_COUNTER, "baton_etcd_leases_lost_total",
                         "Leases in etcd that were lost.");
    m->ready = add_labelled(shell, METRIC_GAUGE, "baton_ready",
                            "1 where nothing is wrong; ready is the minimum over all.", "reason",
                            reason_names, SHELL_REASON_COUNT);
    m->draining = add(shell, METRIC_GAUGE, "baton_draining", "1 while the process is leaving.");
    (void)metrics_add(shell->metrics,
                      &(struct metric_config){.kind = METRIC_GAUGE,
                                              .name = "baton_thread_beat_age_seconds",
                                              .help = "Since each thread last gave a sign of life.",
                                              .labels = {{"thread", NULL, 0}},
                                              .collect = collect_threads});
}

void report_add_state_metrics(struct shell *shell) {
    const char *states[STATES_MAX];
    const struct shell_core *core = &shell->core;
    CHECK_OP(core->state_count, <, STATES_MAX);
    for (uint32_t i = 1; i <= core->state_count; i++) {
        states[i - 1] = core->state_name(i);
    }
    struct shell_metrics_set *m = &shell->m;
    m->entries = add_labelled(shell, METRIC_GAUGE, "baton_entries", "Live entries.", "state",
                              states, core->state_count);
    m->oldest = add_labelled(shell, METRIC_GAUGE, "baton_oldest_entry_age_seconds",
                             "Age in this state of the entry that is in it longest.", "state",
                             states, core->state_count);
    m->reaped = metrics_add(
        shell->metrics,
        &(struct metric_config){.kind = METRIC_COUNTER,
                                .name = "baton_reaped_total",
                                .help = "Entries ended by a deadline.",
                                .labels = {{"state", states, core->state_count},
                                           {"why", (const char *const[]){"deadline"}, 1}}});
    shell_histogram(shell, "baton_abort_to_freed_seconds",
                    "From the decision that an entry fails or is aborted until its memory is back.",
                    &core->node->ledger.abort_to_freed);
    shell_histogram(shell, "baton_entry_lifetime_seconds", "From admission to memory back.",
                    &core->node->ledger.lifetime);
}

static void refresh_entries(struct shell *shell) {
    const struct shell_core *core = &shell->core;
    double oldest[STATES_MAX] = {0};
    uint64_t operations = 0;
    uint32_t cursor = 0;
    struct entry_view view;
    while (core->view(core->core, &cursor, &view)) {
        operations += view.operations;
        for (uint32_t i = 0; i < core->state_count; i++) {
            double age = (double)view.state_age_ms / 1e3;
            if (age > oldest[i] && strcmp(view.state, core->state_name(i + 1)) == 0) {
                oldest[i] = age;
            }
        }
    }
    metric_set(shell->m.operations, 0, (double)operations);
    for (uint32_t i = 0; i < core->state_count; i++) {
        metric_set(shell->m.oldest, i, oldest[i]);
        metric_set(shell->m.entries, i, core->node->ledger.in_state[i + 1]);
        metric_count_to(shell->m.reaped, metric_series(shell->m.reaped, i, 0, 0),
                        core->node->ledger.reaped[i + 1]);
    }
}

static void refresh_sessions(struct shell *shell) {
    const struct node *node = shell->core.node;
    uint32_t live[4] = {0};
    double silence[4] = {0};
    for (uint32_t i = 0; i < node->config.sessions_max; i++) {
        const struct session *session = &node->sessions[i];
        if (session->phase != SESSION_LIVE || (uint32_t)session->role > 3) {
            continue;
        }
        live[session->role]++;
        double age = span_to_seconds(instant_since(node->now, session->heard));
        if (age > silence[session->role]) {
            silence[session->role] = age;
        }
    }
    for (uint32_t i = 0; i < 4; i++) {
        metric_set(shell->m.sessions, i, live[i]);
        metric_set(shell->m.silence, i, silence[i]);
    }
}

/* Control thread. */
static void refresh_fn(void *ctx) {
    struct shell *shell = ctx;
    const struct shell_core *core = &shell->core;
    const struct node *node = core->node;
    const struct ledger *ledger = &node->ledger;
    struct shell_metrics_set *m = &shell->m;
    refresh_entries(shell);
    refresh_sessions(shell);
    metric_set(m->overrun, 0, (double)node->stats.overrun_ns / 1e9);
    metric_count_to(m->created, 0, ledger->created);
    for (uint32_t i = 0; i < 4; i++) {
        metric_count_to(m->terminals, i, ledger->terminals[i]);
    }
    for (uint32_t i = 0; i < CAUSE_COUNT; i++) {
        metric_count_to(m->causes, i, ledger->terminal_causes[i]);
        metric_count_to(m->session_ends, i, node->stats.session_ends[i]);
    }
    struct shell_balance balance = report_balance(shell);
    metric_set(m->imbalance, 0, (double)balance.entries);
    metric_set(m->imbalance, 1, (double)balance.pages);
    metric_set(m->imbalance, 2, (double)balance.words);
    metric_set(
        m->progress_age, 0,
        ledger->live == 0 ? 0 : span_to_seconds(instant_since(node->now, node->stats.progress_at)));
    metric_count_to(m->sessions_refused, 0, node->stats.sessions_refused);
    metric_count_to(m->audit, 0, node->stats.audit_mismatch);
    metric_count_to(m->stale_mail, 0, node->stats.stale_mail);
    metric_count_to(m->stale_events, 0, node->stats.stale_events);
    metric_count_to(m->pauses, 0, node->stats.pauses);
    if (core->refresh != NULL) {
        core->refresh(core->ctx);
    }
    pthread_mutex_lock(&shell->report_lock);
    for (uint32_t i = 0; i < shell->histogram_count; i++) {
        shell->histograms[i].shown = *shell->histograms[i].source;
    }
    pthread_mutex_unlock(&shell->report_lock);
}

static void expose_histograms(struct shell *shell, struct buffer *body) {
    char labels[160];
    (void)snprintf(labels, sizeof labels, "role=\"%s\",worker=\"%s\"",
                   role_name(shell->config.role), shell->id);
    pthread_mutex_lock(&shell->report_lock);
    for (uint32_t i = 0; i < shell->histogram_count; i++) {
        const struct shell_histogram_shown *each = &shell->histograms[i];
        buffer_printf(body, "# HELP %s %s\n# TYPE %s histogram\n", each->name, each->help,
                      each->name);
        uint64_t count = 0;
        for (uint32_t b = 0; b < HISTOGRAM_BUCKETS; b++) {
            count += each->shown.bucket[b];
            buffer_printf(body, "%s_bucket{%s,le=\"%.9g\"} %llu\n", each->name, labels,
                          (double)histogram_bounds_us[b] / 1e6, (unsigned long long)count);
        }
        count += each->shown.bucket[HISTOGRAM_BUCKETS];
        buffer_printf(body, "%s_bucket{%s,le=\"+Inf\"} %llu\n%s_sum{%s} %.9g\n%s_count{%s} %llu\n",
                      each->name, labels, (unsigned long long)count, each->name, labels,
                      (double)each->shown.sum_us / 1e6, each->name, labels,
                      (unsigned long long)count);
    }
    pthread_mutex_unlock(&shell->report_lock);
}

static void get_metrics(void *ctx, const struct admin_request *request, struct admin_reply *reply) {
    struct shell *shell = ctx;
    if (!atomic_load(&shell->is_started)) {
        reply->status = 503;
        buffer_printf(&reply->body, "%s\n", atomic_load(&shell->phase));
        return;
    }
    /* If the control thread does not answer, the old numbers are shown, and baton_ready and the
     * beat's age tell. */
    (void)shell_query(shell, refresh_fn, NULL, shell, query_deadline());
    struct buffer lines;
    buffer_init(&lines, 4096);
    bool codes[SHELL_REASON_COUNT];
    (void)report_ready(shell, &lines, codes);
    buffer_fini(&lines);
    for (uint32_t i = 0; i < SHELL_REASON_COUNT; i++) {
        metric_set(shell->m.ready, i, codes[i] ? 0 : 1);
    }
    metric_set(shell->m.draining, 0, atomic_load(&shell->is_draining) ? 1 : 0);
    metric_count_to(shell->m.pauses, 1, watchdog_pauses());
    metric_count_to(shell->m.log_dropped, 0, log_dropped());
    struct mailbox_counts counts = mailbox_counts(&shell->box);
    metric_set(shell->m.mailbox, 0, counts.depth);
    metric_set(shell->m.mailbox, 1, counts.depth_max);
    struct rpc_counters calls;
    rpc_counters(shell->rpc, &calls);
    metric_set(shell->m.rpc_calls, 0, (double)calls.calls_live);
    metric_count_to(shell->m.rpc_ended, 0, calls.stalled);
    metric_count_to(shell->m.rpc_ended, 1, calls.overflowed);
    metric_count_to(shell->m.rpc_ended, 2, calls.refused_full);
    struct registry_counters registry;
    registry_counters(shell->registry, &registry);
    metric_count_to(shell->m.registrations, 0, registry.registrations);
    metric_count_to(shell->m.leases_lost, 0, registry.leases_lost);
    char names[64];
    bool has_names = admin_query(request, "names", names, sizeof names);
    reply->content_type = "text/plain; version=0.0.4; charset=utf-8";
    metrics_expose(shell->metrics, has_names ? names : NULL, &reply->body);
    expose_histograms(shell, &reply->body);
}

/* ---- entries -------------------------------------------------------------------------------- */

struct entries_query {
    struct shell *shell;
    uint32_t entries_max;
    uint32_t terminals_max;
    struct instant now; /* observed */
    struct span lost;   /* real minus observed */
    bool is_draining;
    struct ledger ledger;
    struct session *sessions;
    uint32_t session_count;
    struct entry_view *views;
    uint32_t view_count;
    struct terminal *terminals; /* newest first */
    uint32_t terminal_count;
    uint64_t terminals_total;
    struct buffer more;
};

static void entries_fn(void *ctx) {
    struct entries_query *query = ctx;
    const struct shell_core *core = &query->shell->core;
    const struct node *node = core->node;
    query->now = node->now;
    query->lost = instant_since(node->real, node->now);
    query->is_draining = node->is_draining;
    query->ledger = node->ledger;
    query->sessions = calloc(node->config.sessions_max, sizeof *query->sessions);
    CHECK(query->sessions != NULL);
    for (uint32_t i = 0; i < node->config.sessions_max; i++) {
        if (node->sessions[i].phase != SESSION_FREE) {
            query->sessions[query->session_count++] = node->sessions[i];
        }
    }
    uint32_t wanted =
        node->ledger.live < query->entries_max ? node->ledger.live : query->entries_max;
    query->views = calloc(wanted + 1, sizeof *query->views);
    CHECK(query->views != NULL);
    uint32_t cursor = 0;
    while (query->view_count < wanted &&
           core->view(core->core, &cursor, &query->views[query->view_count])) {
        query->view_count++;
    }
    query->terminals_total = node->terminals_total;
    uint64_t kept = node->terminals_total < TERMINALS_KEPT ? node->terminals_total : TERMINALS_KEPT;
    uint32_t count = kept < query->terminals_max ? (uint32_t)kept : query->terminals_max;
    query->terminals = calloc(count + 1, sizeof *query->terminals);
    CHECK(query->terminals != NULL);
    for (uint32_t i = 0; i < count; i++) {
        query->terminals[i] = node->terminals[(node->terminals_total - 1 - i) % TERMINALS_KEPT];
    }
    query->terminal_count = count;
    if (core->describe != NULL) {
        core->describe(core->ctx, &query->more);
    }
}

static void entries_free(void *ctx) {
    struct entries_query *query = ctx;
    free(query->sessions);
    free(query->views);
    free(query->terminals);
    buffer_fini(&query->more);
    free(query);
}

static void put_text(struct buffer *body, const char *key, const char *text) {
    buffer_printf(body, ",\"%s\":", key);
    buffer_json(body, text, strlen(text));
}

static const char *phase_name(enum session_phase phase) {
    switch (phase) {
    case SESSION_FREE: return "free";
    case SESSION_GREETING: return "greeting";
    case SESSION_LIVE: return "live";
    case SESSION_ENDED: return "ended";
    }
    return "unknown";
}

static long long since_ms(struct instant now, struct instant then) {
    return (long long)span_to_ms(instant_since(now, then));
}

static void put_sessions(struct buffer *body, const struct entries_query *query) {
    buffer_text(body, ",\"sessions\":[");
    for (uint32_t i = 0; i < query->session_count; i++) {
        const struct session *session = &query->sessions[i];
        buffer_printf(body, "%s{\"stream\":%llu", i > 0 ? ",\n" : "\n",
                      (unsigned long long)session->stream.v);
        put_text(body, "peer", session->id);
        put_text(body, "peer_role", role_name(session->role));
        put_text(body, "phase", phase_name(session->phase));
        put_text(body, "cause", session->phase == SESSION_ENDED ? cause_name(session->cause) : "");
        put_text(body, "numerics", session->numerics);
        buffer_printf(body,
                      ",\"incarnation\":\"%016llx\",\"is_ours\":%s,\"age_ms\":%lld,"
                      "\"silence_ms\":%lld,\"entries\":%u,\"peer_entries\":%u,"
                      "\"peer_pages_free\":%u,\"peer_backlog_ms\":%u,\"is_peer_draining\":%s}",
                      (unsigned long long)session->incarnation.v,
                      session->is_ours ? "true" : "false", since_ms(query->now, session->since),
                      since_ms(query->now, session->heard), session->entries.count,
                      session->peer_entries, session->peer_pages_free, session->peer_backlog_ms,
                      session->is_peer_draining ? "true" : "false");
    }
    buffer_text(body, "]");
}

/* Which router's `attempt` this is: attempts of different routers may be equal. */
static void put_router(struct buffer *body, const struct entries_query *query, uint64_t router) {
    buffer_printf(body, ",\"router\":\"%016llx\"",
                  (unsigned long long)(router != 0 ? router : query->shell->incarnation.v));
}

static void put_entries(struct buffer *body, const struct entries_query *query) {
    buffer_text(body, ",\"entries\":[");
    for (uint32_t i = 0; i < query->view_count; i++) {
        const struct entry_view *view = &query->views[i];
        buffer_printf(body, "%s{\"id\":\"%016llx\",\"attempt\":\"%016llx\"", i > 0 ? ",\n" : "\n",
                      (unsigned long long)view->id, (unsigned long long)view->attempt);
        put_router(body, query, view->router);
        put_text(body, "state", view->state);
        put_text(body, "label", view->label);
        put_text(body, "waits_for", view->waits_for != NULL ? view->waits_for : "");
        put_text(body, "deadline", view->deadline != NULL ? view->deadline : "");
        buffer_printf(body,
                      ",\"age_ms\":%lld,\"state_age_ms\":%lld,\"deadline_left_ms\":%lld,"
                      "\"operations\":%u,\"tokens\":%u,\"generated\":%u,\"pages\":%u,"
                      "\"bytes\":%llu,\"cached\":%u,\"peers\":[",
                      (long long)view->age_ms, (long long)view->state_age_ms,
                      (long long)view->deadline_left_ms, view->operations, view->tokens,
                      view->generated, view->pages, (unsigned long long)view->bytes, view->cached);
        bool is_first = true;
        for (uint32_t p = 0; p < 2; p++) {
            if (view->sessions[p] == 0) {
                continue;
            }
            buffer_printf(body, "%s{\"stream\":%llu", is_first ? "" : ",",
                          (unsigned long long)view->sessions[p]);
            put_text(body, "peer", view->peers[p]);
            buffer_printf(body, ",\"silence_ms\":%lld}", (long long)view->peer_silence_ms[p]);
            is_first = false;
        }
        buffer_text(body, "]}");
    }
    buffer_text(body, "]");
}

static void put_terminals(struct buffer *body, const struct entries_query *query) {
    buffer_printf(body, ",\"terminals_total\":%llu,\"terminals\":[",
                  (unsigned long long)query->terminals_total);
    for (uint32_t i = 0; i < query->terminal_count; i++) {
        const struct terminal *each = &query->terminals[i];
        buffer_printf(body, "%s{\"id\":\"%016llx\",\"attempt\":\"%016llx\"", i > 0 ? ",\n" : "\n",
                      (unsigned long long)each->id, (unsigned long long)each->attempt);
        put_router(body, query, each->router);
        put_text(body, "label", each->label);
        put_text(body, "state", query->shell->core.state_name(each->state));
        put_text(body, "outcome", outcome_name((enum outcome)each->outcome));
        put_text(body, "cause", cause_name((enum cause)each->cause));
        if (each->exposed.ns > 0) {
            buffer_printf(body, ",\"kv_exposed_us\":%lld", (long long)(each->exposed.ns / 1000));
        }
        /* at_us: the monotonic clock, which all programs of a host share. */
        buffer_printf(body, ",\"age_ms\":%lld,\"ago_ms\":%lld,\"freeing_us\":%lld,\"at_us\":%lld}",
                      (long long)span_to_ms(each->age), since_ms(query->now, each->at),
                      (long long)(each->freeing.ns / 1000),
                      (long long)((each->at.ns + query->lost.ns) / 1000));
    }
    buffer_text(body, "]");
}

static uint32_t query_number(const struct admin_request *request, const char *name,
                             uint32_t otherwise, uint32_t most) {
    char text[16];
    if (!admin_query(request, name, text, sizeof text) || text[0] < '0' || text[0] > '9') {
        return otherwise;
    }
    unsigned long value = strtoul(text, NULL, 10);
    return value > most ? most : (uint32_t)value;
}

static void get_entries(void *ctx, const struct admin_request *request, struct admin_reply *reply) {
    struct shell *shell = ctx;
    if (!atomic_load(&shell->is_started)) {
        reply->status = 503;
        buffer_printf(&reply->body, "%s\n", atomic_load(&shell->phase));
        return;
    }
    struct entries_query *query = calloc(1, sizeof *query);
    CHECK(query != NULL);
    query->shell = shell;
    query->terminals_max = query_number(request, "limit", TERMINALS_SHOWN, TERMINALS_KEPT);
    query->entries_max = query_number(request, "entries", ENTRIES_SHOWN, 1u << 20);
    buffer_init(&query->more, 1024 * 1024);
    if (!shell_query(shell, entries_fn, entries_free, query, query_deadline())) {
        reply->status = 503;
        buffer_printf(&reply->body, "control thread: no answer within %d ms\n", QUERY_MS);
        return;
    }
    struct buffer *body = &reply->body;
    reply->content_type = "application/json";
    buffer_printf(body, "{\"role\":\"%s\"", role_name(shell->config.role));
    put_text(body, "id", shell->id);
    put_text(body, "cluster", shell->config.settings->cluster);
    put_text(body, "version", shell->config.version);
    buffer_printf(body,
                  ",\"incarnation\":\"%016llx\",\"pid\":%u,\"is_draining\":%s,\"live\":%u,"
                  "\"created\":%llu",
                  (unsigned long long)shell->incarnation.v, (unsigned)getpid(),
                  query->is_draining ? "true" : "false", query->ledger.live,
                  (unsigned long long)query->ledger.created);
    buffer_put(body, query->more.data, query->more.len);
    put_sessions(body, query);
    put_entries(body, query);
    put_terminals(body, query);
    buffer_text(body, "}\n");
    entries_free(query);
}

/* ---- threads, drain ------------------------------------------------------------------------- */

static void get_threads(void *ctx, const struct admin_request *request, struct admin_reply *reply) {
    (void)ctx;
    (void)request;
    reply->content_type = "application/json";
    struct writer writer = buffer_reserve(&reply->body, 64 * 1024);
    thread_describe(&writer);
    buffer_commit(&reply->body, &writer);
    buffer_text(&reply->body, "\n");
}

static void post_drain(void *ctx, const struct admin_request *request, struct admin_reply *reply) {
    struct shell *shell = ctx;
    struct span grace = shell->config.settings->drain_timeout;
    char text[32];
    if (admin_query(request, "grace", text, sizeof text)) {
        char *end = NULL;
        double seconds = strtod(text, &end);
        if (end == text || *end != '\0' || !(seconds >= 0 && seconds <= DRAIN_MAX_S)) {
            reply->status = 400;
            buffer_text(&reply->body, "grace is a number of seconds between 0 and 86400\n");
            return;
        }
        grace = (struct span){(int64_t)(seconds * 1e9)};
    }
    if (!atomic_load(&shell->is_started)) {
        reply->status = 503;
        buffer_printf(&reply->body, "%s\n", atomic_load(&shell->phase));
        return;
    }
    LOG_INFO("asked to drain", LOG_SPAN("grace", grace));
    shell_drain(shell, grace);
    reply->status = 202;
    buffer_text(&reply->body, "draining\n");
}

/* ---- --test-hooks --------------------------------------------------------------------------- */

static void post_test_thread(void *ctx, const struct admin_request *request,
                             struct admin_reply *reply) {
    (void)ctx;
    char name[THREAD_NAME_CAP];
    char what[8];
    bool is_given = admin_query(request, "name", name, sizeof name) &&
                    admin_query(request, "do", what, sizeof what);
    bool is_die = is_given && strcmp(what, "die") == 0;
    if (!is_given || !(is_die || strcmp(what, "hang") == 0)) {
        reply->status = 400;
        buffer_text(&reply->body, "?name=THREAD&do=hang|die\n");
    } else if (!thread_test_fault(name, is_die ? THREAD_FAULT_DIE : THREAD_FAULT_HANG)) {
        reply->status = 404;
        buffer_text(&reply->body, "no such thread: /debug/threads lists them\n");
    } else {
        LOG_WARN("a test makes a thread fail", LOG_TEXT("thread", name), LOG_TEXT("how", what));
    }
}

static void leak_fn(void *ctx) {
    struct shell *shell = ctx;
    shell->core.leak(shell->core.ctx);
}

static void post_test_leak(void *ctx, const struct admin_request *request,
                           struct admin_reply *reply) {
    (void)request;
    struct shell *shell = ctx;
    if (!atomic_load(&shell->is_started) || shell->core.leak == NULL ||
        !shell_query(shell, leak_fn, NULL, shell, query_deadline())) {
        reply->status = 503;
        return;
    }
    LOG_WARN("a test drops one free");
}

const struct admin_route report_test_routes[] = {
    {ADMIN_POST, "/test/thread", post_test_thread, NULL,
     "a thread hangs or dies at its next beat; ?name=THREAD&do=hang|die"},
    {ADMIN_POST, "/test/leak", post_test_leak, NULL, "the next thing freed is forgotten, once"},
};
const uint32_t report_test_route_count = sizeof report_test_routes / sizeof report_test_routes[0];

const struct admin_route report_routes[] = {
    {ADMIN_GET, "/livez", get_live, NULL, "200 while every thread beats"},
    {ADMIN_GET, "/readyz", get_ready, NULL, "200 when ready, else 503 with one reason a line"},
    {ADMIN_GET, "/metrics", get_metrics, NULL, "Prometheus; ?names=sglang,vllm adds their names"},
    {ADMIN_GET, "/debug/entries", get_entries, NULL,
     "live entries, sessions, last terminals; ?limit=N terminals"},
    {ADMIN_GET, "/debug/threads", get_threads, NULL, "threads and their beats"},
    {ADMIN_POST, "/drain", post_drain, NULL, "stop admission and leave; ?grace=SECONDS"},
};
const uint32_t report_route_count = sizeof report_routes / sizeof report_routes[0];
