/* The shell's life, its mail, and the control loop. */
#include "services/node/shell.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "rpc/health.h"
#include "rpc/rpc.h"
#include "runtime/clock.h"
#include "runtime/log.h"
#include "runtime/random.h"
#include "runtime/signals.h"
#include "services/node/internal.h"

#define SPARE_MAX        1024u
#define PAYLOAD_KEPT     4096u    /* bytes of a payload buffer that is kept with a spare mail */
#define TICK_NS          40000000 /* below TICK_MS, so that a late wake-up is still in time */
#define CONTROL_LIMIT_MS 1000
#define MAIN_LIMIT_MS    3000
#define READY_EACH_MS    500
#define DRAIN_SLACK_MS   10000
#define DEREGISTER_MS    3000
#define STOP_MS          2000
#define RPC_ABORT_MS     5000

/* ---- mail ----------------------------------------------------------------------------------- */

struct shell_mail *shell_mail_take(struct shell *shell, enum event_kind kind) {
    pthread_mutex_lock(&shell->spare_lock);
    struct shell_mail *mail = shell->spare;
    if (mail != NULL) {
        shell->spare = (struct shell_mail *)(void *)mail->mail.next;
        shell->spare_count--;
        mail->mail.next = NULL;
    }
    pthread_mutex_unlock(&shell->spare_lock);
    if (mail == NULL) {
        mail = calloc(1, sizeof *mail);
        CHECK(mail != NULL);
    }
    mail->event.kind = kind;
    return mail;
}

void *shell_mail_payload(struct shell_mail *mail, size_t len) {
    if (mail->payload_cap < len) {
        free(mail->payload);
        mail->payload = malloc(len);
        CHECK(mail->payload != NULL);
        mail->payload_cap = len;
    }
    return mail->payload;
}

static void mail_free(struct shell_mail *mail) {
    wire_arena_fini(&mail->arena);
    free(mail->payload);
    free(mail);
}

void shell_mail_done(struct shell *shell, struct shell_mail *mail, bool was_stepped) {
    if (mail->after != NULL) {
        mail->after(mail, was_stepped);
    }
    if (mail->bytes > 0 && mail->stream != NULL) {
        struct stream *stream = mail->stream;
        atomic_fetch_sub_explicit(&stream->pending, mail->bytes, memory_order_relaxed);
    }
    if (mail->payload_cap > PAYLOAD_KEPT) {
        free(mail->payload);
        mail->payload = NULL;
        mail->payload_cap = 0;
    }
    wire_arena_reset(&mail->arena);
    memset(&mail->event, 0, sizeof mail->event);
    mail->after = NULL;
    mail->after_ctx = NULL;
    mail->stream = NULL;
    mail->bytes = 0;
    pthread_mutex_lock(&shell->spare_lock);
    bool is_kept = shell->spare_count < SPARE_MAX;
    if (is_kept) {
        mail->mail.next = (struct mail *)(void *)shell->spare;
        shell->spare = mail;
        shell->spare_count++;
    }
    pthread_mutex_unlock(&shell->spare_lock);
    if (!is_kept) {
        mail_free(mail);
    }
}

void shell_post(struct shell *shell, struct shell_mail *mail) {
    if (!mailbox_post(&shell->box, &mail->mail)) {
        shell_mail_done(shell, mail, false);
    }
}

bool shell_on_control(const struct shell *shell) {
    return shell->is_control_started && pthread_equal(shell->control.handle, pthread_self()) != 0;
}

struct query {
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t changed;
    void (*fn)(void *ctx);
    void (*done)(void *ctx);
    void *ctx;
    uint32_t references;
    bool is_over;
    bool was_run;
    bool is_abandoned;
};

/* Gives one reference and the lock back. */
static void query_unref_locked(struct query *query) {
    bool is_last = --query->references == 0;
    pthread_mutex_unlock(&query->lock);
    if (is_last) {
        if (query->is_abandoned && query->done != NULL) {
            query->done(query->ctx);
        }
        pthread_cond_destroy(&query->changed);
        pthread_mutex_destroy(&query->lock);
        free(query);
    }
}

static void query_run(struct shell_mail *mail, bool was_stepped) {
    struct query *query = mail->after_ctx;
    pthread_mutex_lock(&query->lock);
    bool is_wanted = was_stepped && !query->is_abandoned;
    pthread_mutex_unlock(&query->lock);
    if (is_wanted) {
        query->fn(query->ctx);
    }
    pthread_mutex_lock(&query->lock);
    query->was_run = is_wanted;
    query->is_over = true;
    pthread_cond_signal(&query->changed);
    query_unref_locked(query);
}

bool shell_query(struct shell *shell, void (*fn)(void *ctx), void (*done)(void *ctx), void *ctx,
                 struct instant deadline) {
    struct query *query = calloc(1, sizeof *query);
    CHECK(query != NULL);
    pthread_condattr_t attributes;
    CHECK(pthread_condattr_init(&attributes) == 0);
    CHECK(pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_cond_init(&query->changed, &attributes) == 0);
    pthread_condattr_destroy(&attributes);
    CHECK(pthread_mutex_init(&query->lock, NULL) == 0);
    query->fn = fn;
    query->done = done;
    query->ctx = ctx;
    query->references = 2;
    struct shell_mail *mail = shell_mail_take(shell, 0);
    mail->after = query_run;
    mail->after_ctx = query;
    shell_post(shell, mail);
    struct timespec until = clock_to_timespec(deadline);
    pthread_mutex_lock(&query->lock);
    int error = 0;
    while (!query->is_over && error == 0) {
        error = pthread_cond_timedwait(&query->changed, &query->lock, &until);
    }
    bool was_run = query->was_run;
    query->is_abandoned = !was_run;
    query_unref_locked(query);
    return was_run;
}

/* ---- control loop --------------------------------------------------------------------------- */

static void note(const struct effect *effect) {
    const char *role = role_name(effect->u.note.role);
    const char *label = effect->u.note.label;
    const char *cause = cause_name(effect->u.note.cause);
    switch (effect->u.note.kind) {
    case NOTE_SESSION_UP:
        LOG_INFO("session up", LOG_TEXT("peer", label), LOG_TEXT("peer_role", role),
                 LOG_HEX("incarnation", effect->u.note.id));
        break;
    case NOTE_SESSION_ENDED:
        LOG_INFO("session ended", LOG_TEXT("peer", label), LOG_TEXT("peer_role", role),
                 LOG_TEXT("cause", cause), LOG_U64("entries", effect->u.note.number));
        break;
    case NOTE_SESSION_REFUSED:
        LOG_WARN("session refused", LOG_TEXT("peer", label), LOG_TEXT("peer_role", role),
                 LOG_TEXT("cause", cause));
        break;
    case NOTE_WORKER_SEEN:
        LOG_INFO("worker seen", LOG_TEXT("worker_id", label), LOG_TEXT("worker_role", role),
                 LOG_HEX("incarnation", effect->u.note.id));
        break;
    case NOTE_WORKER_LOST:
        LOG_INFO("worker lost", LOG_TEXT("worker_id", label), LOG_TEXT("worker_role", role),
                 LOG_HEX("incarnation", effect->u.note.id), LOG_TEXT("cause", cause));
        break;
    case NOTE_DRAINING: LOG_INFO("draining", LOG_U64("entries", effect->u.note.number)); break;
    case NOTE_DRAINED: LOG_INFO("drained"); break;
    case NOTE_AUDIT_MISMATCH:
        LOG_ERROR("audit mismatch: the peer does not hold what it should; please report this",
                  LOG_TEXT("peer_role", role), LOG_HEX("entry", effect->u.note.id),
                  LOG_HEX("attempt", effect->u.note.number), LOG_TEXT("request", label));
        break;
    case NOTE_RETRACTED:
        LOG_DEBUG("running -> retracted: no page is free", LOG_HEX("entry", effect->u.note.id),
                  LOG_U64("tokens", effect->u.note.number), LOG_TEXT("request", label));
        break;
    case NOTE_RESUMED:
        LOG_DEBUG("retracted -> running", LOG_HEX("entry", effect->u.note.id),
                  LOG_U64("tokens_again", effect->u.note.number), LOG_TEXT("request", label));
        break;
    }
}

static void carry_out(struct shell *shell, const struct effect *effect) {
    switch (effect->kind) {
    case EFFECT_STREAM_OPEN: sessions_open(shell, effect); break;
    case EFFECT_STREAM_SEND: sessions_send(shell, effect); break;
    case EFFECT_STREAM_CLOSE: sessions_close(shell, effect); break;
    case EFFECT_NOTE: note(effect); break;
    case EFFECT_EXIT: atomic_store(&shell->is_drained, true); break;
    case EFFECT_TOKENIZE:
    case EFFECT_DELIVER:
    case EFFECT_CHOICE:
    case EFFECT_ANSWER:
    case EFFECT_STEP:
    case EFFECT_STEP_ABANDON:
    case EFFECT_LINK_ARM:
    case EFFECT_LINK_DISARM:
    case EFFECT_LINK_CONNECT:
    case EFFECT_LINK_SEND:
    case EFFECT_LINK_CLOSE:
        CHECK(shell->core.effect != NULL);
        shell->core.effect(shell->core.ctx, effect);
        break;
    }
}

/* What an event or a message is about: the layer, or an operation's own number; 0 for others. */
static uint64_t event_number(const struct event *event) {
    return event->kind == EVENT_LAYER_DONE  ? event->u.layer_done.layer
           : event->kind == EVENT_STEP_DONE ? event->u.step_done.number
           : event->kind == EVENT_LINK_SENT ? event->u.sent.op
                                            : 0;
}

static uint64_t effect_number(const struct effect *effect) {
    return effect->kind == EFFECT_STEP           ? effect->u.plan->token_count
           : effect->kind == EFFECT_STEP_ABANDON ? effect->u.abandon.number
           : effect->kind == EFFECT_LINK_SEND    ? effect->u.send.component_first
                                                 : 0;
}

/* The whole story of a process at --log-level debug, on the clock that all programs of a host
 * share: every event with its time, and what came of it. Beats and idle ticks are left out. */
static void tell_turn(const struct shell *shell, const struct event *event, struct instant now) {
    bool is_mail = event->kind == EVENT_STREAM_MAIL;
    bool is_beat = is_mail && event->u.mail.message->kind == MESSAGE_BEAT;
    if (event->kind != EVENT_TICK && !is_beat) {
        LOG_DEBUG("event",
                  LOG_TEXT("what", is_mail ? message_name(event->u.mail.message->kind)
                                           : event_name(event->kind)),
                  LOG_U64("number", event_number(event)), LOG_I64("at_us", now.ns / 1000));
    }
    for (uint32_t i = 0; i < shell->effects->count; i++) {
        const struct effect *effect = &shell->effects->items[i];
        bool is_send = effect->kind == EFFECT_STREAM_SEND;
        if (!is_send || effect->u.message.kind != MESSAGE_BEAT) {
            LOG_DEBUG("effect",
                      LOG_TEXT("what", is_send ? message_name(effect->u.message.kind)
                                               : effect_name(effect->kind)),
                      LOG_U64("number", effect_number(effect)), LOG_I64("at_us", now.ns / 1000));
        }
    }
}

static void turn(struct shell *shell, const struct event *event) {
    struct instant now = clock_now();
    shell->effects->count = 0;
    shell->core.step(shell->core.core, event, now, shell->effects);
    if (log_is_on(LOG_LEVEL_DEBUG)) {
        tell_turn(shell, event, now);
    }
    for (uint32_t i = 0; i < shell->effects->count; i++) {
        carry_out(shell, &shell->effects->items[i]);
    }
}

/* A leak is a bug that ends in a wedge, much later: it is said when it happens. */
static void watch_ledger(struct shell *shell) {
    struct shell_balance balance = report_balance(shell);
    struct shell_balance *seen = &shell->balance_seen;
    if (balance.entries == seen->entries && balance.pages == seen->pages &&
        balance.words == seen->words) {
        return;
    }
    *seen = balance;
    if (report_is_balanced(&balance)) {
        LOG_INFO("the ledger balances again");
        return;
    }
    LOG_ERROR("ledger imbalance: something was lost or counted twice; please report this",
              LOG_I64("entries", balance.entries), LOG_I64("pages", balance.pages),
              LOG_I64("words", balance.words));
}

static void tick(struct shell *shell) {
    turn(shell, &(struct event){.kind = EVENT_TICK});
    if (shell->core.tick != NULL) {
        shell->core.tick(shell->core.ctx, shell->core.node->now);
    }
    watch_ledger(shell);
    const struct node_stats *stats = &shell->core.node->stats;
    if (stats->audit_mismatch != shell->audit_seen) {
        shell->audit_seen = stats->audit_mismatch;
        shell->audit_seen_at = clock_now();
    }
    if (shell->config.settings->test_verify && shell->core.verify != NULL) {
        shell->core.verify(shell->core.core);
    }
}

static void control_main(struct thread *self, void *arg) {
    struct shell *shell = arg;
    struct instant last = clock_now();
    tick(shell);
    while (!atomic_load(&shell->is_stopping)) {
        thread_beat(&self->beat);
        struct instant due = instant_min(instant_add(last, (struct span){TICK_NS}),
                                         shell->core.deadline(shell->core.core));
        struct mail *chain = NULL;
        if (mailbox_wait(&shell->box, due)) {
            chain = mailbox_take_all(&shell->box);
        }
        while (chain != NULL) {
            struct shell_mail *mail = (struct shell_mail *)(void *)chain;
            chain = chain->next;
            if (mail->event.kind != 0) {
                sessions_before(shell, mail);
                turn(shell, &mail->event);
                sessions_after(shell, mail);
            }
            shell_mail_done(shell, mail, true);
            struct instant now = clock_now();
            if (now.ns - last.ns >= TICK_NS) {
                last = now;
                thread_beat(&self->beat);
                tick(shell);
            }
        }
        struct instant now = clock_now();
        if (instant_reached(now, due)) {
            last = now;
            tick(shell);
        }
    }
}

/* ---- life ----------------------------------------------------------------------------------- */

static enum status settings_check(const struct shell_settings *settings) {
    const char *sentence = timers_check(&settings->timers);
    if (sentence != NULL) {
        LOG_ERROR("the --timer flags contradict each other", LOG_TEXT("why", sentence));
        return STATUS_RANGE;
    }
    if (settings->etcd_lease.ns % 1000000000 != 0) {
        LOG_ERROR("--etcd-lease must be whole seconds", LOG_SPAN("value", settings->etcd_lease));
        return STATUS_RANGE;
    }
    for (const char *at = settings->id; at != NULL && *at != '\0'; at++) {
        bool is_good = (*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z') ||
                       (*at >= '0' && *at <= '9') || strchr("._-", *at) != NULL;
        if (!is_good) {
            LOG_ERROR("--id may hold letters, digits, '.', '_' and '-' only",
                      LOG_TEXT("value", settings->id));
            return STATUS_RANGE;
        }
    }
    return STATUS_OK;
}

static void choose_id(struct shell *shell) {
    const char *id = shell->config.settings->id;
    if (id != NULL) {
        text_copy(shell->id, sizeof shell->id, id);
        return;
    }
    char host[40];
    if (gethostname(host, sizeof host) != 0) {
        text_copy(host, sizeof host, "host");
    }
    host[sizeof host - 1] = '\0';
    for (char *at = host; *at != '\0'; at++) {
        bool is_good = (*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z') ||
                       (*at >= '0' && *at <= '9') || strchr("._-", *at) != NULL;
        if (!is_good) {
            *at = '-';
        }
    }
    (void)snprintf(shell->id, sizeof shell->id, "%s-%s-%u", role_name(shell->config.role), host,
                   (unsigned)getpid());
}

static enum status start_admin(struct shell *shell) {
    const struct shell_config *config = &shell->config;
    uint32_t tests = config->settings->test_hooks ? report_test_route_count : 0;
    uint32_t count = report_route_count + config->route_count + tests;
    shell->routes = calloc(count, sizeof *shell->routes);
    CHECK(shell->routes != NULL);
    for (uint32_t i = 0; i < report_route_count; i++) {
        shell->routes[i] = report_routes[i];
        shell->routes[i].ctx = shell;
    }
    for (uint32_t i = 0; i < config->route_count; i++) {
        shell->routes[report_route_count + i] = config->routes[i];
    }
    for (uint32_t i = 0; i < tests; i++) {
        shell->routes[count - tests + i] = report_test_routes[i];
        shell->routes[count - tests + i].ctx = shell;
    }
    struct admin_config admin = {.host = config->settings->admin.host,
                                 .port = config->settings->admin.port,
                                 .routes = shell->routes,
                                 .route_count = count};
    char text[256];
    struct writer error;
    writer_init(&error, text, sizeof text - 1);
    enum status status = admin_start(&admin, &shell->admin, &error);
    if (status != STATUS_OK) {
        text[error.len] = '\0';
        LOG_ERROR("--admin cannot be served", LOG_TEXT("host", admin.host),
                  LOG_U64("port", admin.port), LOG_TEXT("why", text));
        return status == STATUS_RANGE ? STATUS_INVALID : status;
    }
    shell_address(shell, admin_port(shell->admin), shell->admin_text);
    return STATUS_OK;
}

static enum status start_discovery(struct shell *shell) {
    const struct shell_settings *settings = shell->config.settings;
    struct registry_config config = {.endpoints = settings->etcd,
                                     .cluster = settings->cluster,
                                     .lease = settings->etcd_lease,
                                     .keepalive = settings->etcd_keepalive};
    struct registry_error error = {.text = ""};
    enum status status = registry_create(shell->rpc, &config, &shell->registry, &error);
    if (status != STATUS_OK) {
        LOG_ERROR("discovery cannot work with --etcd and --cluster",
                  LOG_TEXT("etcd", settings->etcd), LOG_TEXT("cluster", settings->cluster),
                  LOG_TEXT("why", error.text));
        return STATUS_INVALID;
    }
    return STATUS_OK;
}

enum status shell_create(const struct shell_config *config, struct shell **out) {
    enum status status = log_start(&config->settings->log, role_name(config->role), NULL);
    if (status != STATUS_OK) {
        return STATUS_INTERNAL;
    }
    status = settings_check(config->settings);
    if (status != STATUS_OK) {
        log_stop();
        return status;
    }
    struct shell *shell = calloc(1, sizeof *shell);
    CHECK(shell != NULL);
    shell->config = *config;
    shell->incarnation.v = random_u64();
    shell->started_unix_ms = clock_wall_ms();
    atomic_store(&shell->phase, "starting");
    shell->effects = calloc(1, sizeof *shell->effects);
    CHECK(shell->effects != NULL);
    choose_id(shell);
    log_set_id(shell->id);
    advertise_choose(config->settings->advertise, config->listen_host, shell->advertise,
                     sizeof shell->advertise);
    mailbox_init(&shell->box, NULL, NULL);
    CHECK(pthread_mutex_init(&shell->spare_lock, NULL) == 0);
    CHECK(pthread_mutex_init(&shell->record_lock, NULL) == 0);
    CHECK(pthread_mutex_init(&shell->report_lock, NULL) == 0);
    sessions_init(shell);
    shell->metrics = metrics_create(
        (const struct metric_label[]){{"role", role_name(config->role)}, {"worker", shell->id}}, 2);
    report_add_metrics(shell);
    status = watchdog_start(NULL);
    if (status == STATUS_OK) {
        const struct rpc_config rpc = {.calls_max = config->calls_max};
        status = rpc_create(&rpc, &shell->rpc);
    }
    if (status == STATUS_OK) {
        status = start_discovery(shell);
    }
    if (status == STATUS_OK) {
        status = start_admin(shell);
    }
    if (status != STATUS_OK) {
        if (shell_close(shell) != STATUS_OK) {
            _exit(1); /* something hangs; the first failure has been logged */
        }
        return status;
    }
    LOG_INFO("started", LOG_TEXT("version", config->version),
             LOG_HEX("incarnation", shell->incarnation.v), LOG_U64("pid", getpid()),
             LOG_TEXT("admin", shell->admin_text), LOG_TEXT("etcd", config->settings->etcd),
             LOG_TEXT("cluster", config->settings->cluster));
    *out = shell;
    return STATUS_OK;
}

void shell_phase(struct shell *shell, const char *phase) {
    atomic_store(&shell->phase, phase);
}

struct incarnation shell_incarnation(const struct shell *shell) {
    return shell->incarnation;
}

const char *shell_id(const struct shell *shell) {
    return shell->id;
}

const char *shell_advertise(const struct shell *shell) {
    return shell->advertise;
}

struct rpc *shell_rpc(struct shell *shell) {
    return shell->rpc;
}

struct registry *shell_registry(struct shell *shell) {
    return shell->registry;
}

struct metrics *shell_metrics(struct shell *shell) {
    return shell->metrics;
}

void shell_histogram(struct shell *shell, const char *name, const char *help,
                     const struct histogram *source) {
    CHECK(!atomic_load(&shell->is_started));
    CHECK_OP(shell->histogram_count, <, SHELL_HISTOGRAMS_MAX);
    shell->histograms[shell->histogram_count++] =
        (struct shell_histogram_shown){.name = name, .help = help, .source = source};
}

void shell_node_config(const struct shell *shell, struct node_config *config) {
    config->role = shell->config.role;
    config->incarnation = shell->incarnation;
    config->timers = shell->config.settings->timers;
    text_copy(config->id, sizeof config->id, shell->id);
}

void shell_address(const struct shell *shell, uint16_t port, char out[ADDRESS_MAX]) {
    bool is_v6 = strchr(shell->advertise, ':') != NULL;
    (void)snprintf(out, ADDRESS_MAX, is_v6 ? "[%.110s]:%u" : "%.110s:%u", shell->advertise,
                   (unsigned)port);
}

static void listen_text(const struct config_address *listen, char *out, size_t cap) {
    bool is_v6 = strchr(listen->host, ':') != NULL;
    (void)snprintf(out, cap, is_v6 ? "[%s]:%u" : "%s:%u", listen->host, (unsigned)listen->port);
}

enum status shell_serve(struct shell *shell, const char *flag, const struct config_address *listen,
                        struct rpc_server **out) {
    char text[CONFIG_HOST_CAP + 16];
    listen_text(listen, text, sizeof text);
    struct rpc_error error = {.text = ""};
    enum status status = rpc_server_create(shell->rpc, text, NULL, NULL, &shell->server, &error);
    if (status != STATUS_OK) {
        LOG_ERROR("the server cannot be made", LOG_TEXT("flag", flag), LOG_TEXT("value", text),
                  LOG_TEXT("why", error.text));
        return STATUS_INVALID;
    }
    struct rpc_method method = {.path = "/baton.peer.v1.Sessions/Session",
                                .kind = RPC_KIND_BIDI,
                                .handlers = &sessions_handlers,
                                .ctx = shell,
                                .queue_bytes_max = 16u * 1024u * 1024u,
                                .stall_ms = 5000};
    status = rpc_server_method(shell->server, &method);
    CHECK(status == STATUS_OK);
    status = rpc_health_create(shell->rpc, shell->server, &shell->own_health);
    CHECK(status == STATUS_OK);
    shell_health(shell, shell->own_health, "baton.peer.v1.Sessions");
    *out = shell->server;
    return STATUS_OK;
}

enum status shell_listen(struct shell *shell, const char *flag, const struct config_address *listen,
                         struct rpc_server *server) {
    (void)shell;
    struct rpc_error error = {.text = ""};
    enum status status = rpc_server_start(server, &error);
    if (status != STATUS_OK) {
        char text[CONFIG_HOST_CAP + 16];
        listen_text(listen, text, sizeof text);
        LOG_ERROR("cannot listen", LOG_TEXT("flag", flag), LOG_TEXT("value", text),
                  LOG_TEXT("why", error.text));
        return status == STATUS_RANGE ? STATUS_INVALID : status;
    }
    return STATUS_OK;
}

void shell_health(struct shell *shell, struct rpc_health *health, const char *service) {
    CHECK_OP(shell->health_count, <, SHELL_HEALTH_MAX);
    shell->healths[shell->health_count].health = health;
    text_copy(shell->healths[shell->health_count].service, sizeof shell->healths[0].service,
              service == NULL ? "" : service);
    shell->health_count++;
}

enum status shell_start(struct shell *shell, const struct shell_core *core) {
    shell->core = *core;
    pthread_mutex_lock(&shell->streams_lock);
    shell->accepted_max = core->node->config.sessions_max + 16;
    pthread_mutex_unlock(&shell->streams_lock);
    report_add_state_metrics(shell);
    enum status status = thread_start(
        &shell->control, &(struct thread_config){.name = "control",
                                                 .fn = control_main,
                                                 .arg = shell,
                                                 .beat_limit = span_ms(CONTROL_LIMIT_MS)});
    if (status != STATUS_OK) {
        LOG_ERROR("the control thread cannot be started", LOG_STATUS("status", status));
        return STATUS_INTERNAL;
    }
    shell->is_control_started = true;
    atomic_store(&shell->is_started, true);
    return STATUS_OK;
}

/* ---- discovery ------------------------------------------------------------------------------ */

void shell_worker_record(const struct shell *shell, struct worker_record *record) {
    record->info.incarnation = shell->incarnation;
    record->info.role = shell->config.role;
    text_copy(record->info.id, LABEL_MAX, shell->id);
    text_copy(record->admin, ADDRESS_MAX, shell->admin_text);
    record->pid = (uint32_t)getpid();
    record->started_unix_ms = (uint64_t)shell->started_unix_ms;
    text_copy(record->version, LABEL_MAX, shell->config.version);
}

void shell_router_record(const struct shell *shell, struct router_record *record) {
    record->incarnation = shell->incarnation;
    text_copy(record->id, LABEL_MAX, shell->id);
    text_copy(record->admin, ADDRESS_MAX, shell->admin_text);
    record->pid = (uint32_t)getpid();
    record->started_unix_ms = (uint64_t)shell->started_unix_ms;
    text_copy(record->version, LABEL_MAX, shell->config.version);
}

static enum status publish_locked(struct shell *shell) {
    enum status status = STATUS_OK;
    bool is_draining = atomic_load(&shell->is_draining);
    if (shell->has_worker) {
        shell->worker.info.is_draining = is_draining;
        status = registry_register_worker(shell->registry, &shell->worker);
    } else if (shell->has_router) {
        shell->router.is_draining = is_draining;
        status = registry_register_router(shell->registry, &shell->router);
    }
    if (status != STATUS_OK && status != STATUS_CANCELLED) {
        LOG_ERROR("the record of this process cannot be published", LOG_STATUS("status", status));
    }
    return status;
}

enum status shell_register_worker(struct shell *shell, const struct worker_record *record) {
    pthread_mutex_lock(&shell->record_lock);
    shell->worker = *record;
    shell->has_worker = true;
    enum status status = publish_locked(shell);
    pthread_mutex_unlock(&shell->record_lock);
    return status;
}

bool shell_published(struct shell *shell, struct worker_record *record) {
    pthread_mutex_lock(&shell->record_lock);
    bool has_worker = shell->has_worker;
    if (has_worker) {
        *record = shell->worker;
    }
    pthread_mutex_unlock(&shell->record_lock);
    return has_worker;
}

enum status shell_register_router(struct shell *shell, const struct router_record *record) {
    pthread_mutex_lock(&shell->record_lock);
    shell->router = *record;
    shell->has_router = true;
    enum status status = publish_locked(shell);
    pthread_mutex_unlock(&shell->record_lock);
    return status;
}

/* ---- running and leaving -------------------------------------------------------------------- */

void shell_drain(struct shell *shell, struct span grace) {
    atomic_store(&shell->drain_grace_ns, grace.ns);
    if (!atomic_exchange(&shell->is_draining, true)) {
        pthread_mutex_lock(&shell->record_lock);
        (void)publish_locked(shell); /* logged; the drain does not depend on it */
        pthread_mutex_unlock(&shell->record_lock);
    }
    struct shell_mail *mail = shell_mail_take(shell, EVENT_DRAIN);
    mail->event.u.drain.grace = grace;
    shell_post(shell, mail);
}

static void set_health(struct shell *shell, bool is_serving) {
    if (shell->is_health_known && shell->is_health_serving == is_serving) {
        return;
    }
    shell->is_health_known = true;
    shell->is_health_serving = is_serving;
    for (uint32_t i = 0; i < shell->health_count; i++) {
        rpc_health_set(shell->healths[i].health, "", is_serving);
        if (shell->healths[i].service[0] != '\0') {
            rpc_health_set(shell->healths[i].health, shell->healths[i].service, is_serving);
        }
    }
}

/* Keeps gRPC health and the log in step with /readyz. */
static void watch_readiness(struct shell *shell, bool *was_ready) {
    struct buffer lines;
    buffer_init(&lines, 4096);
    bool codes[SHELL_REASON_COUNT];
    bool is_ready = report_ready(shell, &lines, codes);
    if (is_ready != *was_ready && is_ready) {
        LOG_INFO("not ready -> ready");
    } else if (is_ready != *was_ready) {
        LOG_WARN("ready -> not ready", LOG_BYTES("why", lines.data, lines.len));
    }
    *was_ready = is_ready;
    set_health(shell, is_ready);
    buffer_fini(&lines);
}

static _Noreturn void leave_now(struct shell *shell, int signal) {
    (void)shell;
    LOG_WARN("second signal: leaving at once", LOG_I64("signal", signal));
    log_stop();
    _exit(128 + signal);
}

enum status shell_wait(struct shell *shell) {
    struct beat beat;
    beat_register(&beat, "main", span_ms(MAIN_LIMIT_MS));
    bool was_ready = false;
    bool has_signal = false;
    struct instant ready_due = clock_now();
    struct instant bound = INSTANT_NEVER;
    enum status status = STATUS_OK;
    while (!atomic_load(&shell->is_drained)) {
        thread_beat(&beat);
        watchdog_watch();
        int signal = signals_wait(instant_add(clock_now(), span_ms(50)));
        if (signal != 0 && signal != 1) {
            if (has_signal) {
                leave_now(shell, signal);
            }
            has_signal = true;
            LOG_INFO("signal: draining", LOG_I64("signal", signal),
                     LOG_SPAN("timeout", shell->config.settings->drain_timeout));
            shell_drain(shell, shell->config.settings->drain_timeout);
        }
        struct instant now = clock_now();
        if (atomic_load(&shell->is_draining) && instant_is_never(bound)) {
            struct span all = {atomic_load(&shell->drain_grace_ns) +
                               shell->config.settings->timers.leave.ns};
            bound = instant_add(instant_add(now, all), span_ms(DRAIN_SLACK_MS));
            set_health(shell, false);
        }
        if (instant_reached(now, bound)) {
            LOG_ERROR("the core did not drain within its own bounds: leaving without it");
            status = STATUS_TIMEOUT;
            break;
        }
        if (instant_reached(now, ready_due)) {
            ready_due = instant_add(now, span_ms(READY_EACH_MS));
            watch_readiness(shell, &was_ready);
        }
    }
    beat_unregister(&beat);
    return status;
}

static void give_back_mail(struct shell *shell, struct mail *chain) {
    while (chain != NULL) {
        struct shell_mail *mail = (struct shell_mail *)(void *)chain;
        chain = chain->next;
        shell_mail_done(shell, mail, false);
    }
}

enum status shell_stop(struct shell *shell) {
    enum status first = STATUS_OK;
    if (shell->registry != NULL) {
        first = registry_shutdown(shell->registry, span_ms(DEREGISTER_MS));
        if (first != STATUS_OK) {
            LOG_ERROR("discovery did not end in time", LOG_STATUS("status", first));
        }
    }
    thread_expect_end(&shell->control); /* before it can see the flag */
    atomic_store(&shell->is_stopping, true);
    if (shell->is_control_started) {
        shell_post(shell, shell_mail_take(shell, 0)); /* wakes it */
        enum status status =
            thread_join(&shell->control, instant_add(clock_now(), span_ms(STOP_MS)));
        if (status != STATUS_OK) {
            LOG_ERROR("the control thread did not end in time");
            return STATUS_TIMEOUT; /* it may still use the core: nothing more can be taken down */
        }
        shell->is_control_started = false;
    }
    give_back_mail(shell, mailbox_close(&shell->box));
    return first;
}

enum status shell_close(struct shell *shell) {
    if (shell == NULL) {
        return STATUS_OK;
    }
    enum status status = STATUS_OK;
    if (!atomic_load(&shell->is_stopping)) {
        status = shell_stop(shell);
        if (status != STATUS_OK) {
            return status;
        }
    }
    if (shell->rpc != NULL) {
        status = rpc_shutdown(shell->rpc, span_ms(0), span_ms(RPC_ABORT_MS));
        if (status != STATUS_OK) {
            LOG_ERROR("gRPC did not end in time", LOG_STATUS("status", status));
            log_stop();
            return status;
        }
    }
    if (shell->admin != NULL) {
        status = admin_stop(shell->admin, instant_add(clock_now(), span_ms(STOP_MS)));
        if (status != STATUS_OK) {
            LOG_ERROR("the admin thread did not end in time", LOG_STATUS("status", status));
            log_stop();
            return status;
        }
    }
    registry_destroy(shell->registry);
    rpc_health_destroy(shell->own_health);
    rpc_destroy(shell->rpc);
    watchdog_stop();
    sessions_fini(shell);
    wire_buffer_fini(&shell->out);
    while (shell->spare != NULL) {
        struct shell_mail *mail = shell->spare;
        shell->spare = (struct shell_mail *)(void *)mail->mail.next;
        mail_free(mail);
    }
    mailbox_fini(&shell->box);
    pthread_mutex_destroy(&shell->spare_lock);
    pthread_mutex_destroy(&shell->record_lock);
    pthread_mutex_destroy(&shell->report_lock);
    metrics_destroy(shell->metrics);
    free(shell->routes);
    free(shell->effects);
    LOG_INFO("ended");
    log_stop();
    free(shell);
    return STATUS_OK;
}
