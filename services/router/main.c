/* The router: the front door of a Baton cluster. Settings and life; service.c wires. */
#include <stdlib.h>
#include <unistd.h>

#include "base/check.h"
#include "runtime/config.h"
#include "runtime/log.h"
#include "runtime/signals.h"
#include "services/router/router.h"

#define STALL_MARGIN_MS 2000
#define CANARY_LEAST_MS 2000

static const struct config_entry entries[] = {
    {.flag = "grpc",
     .type = CONFIG_ADDRESS,
     .help = "where clients connect (gRPC)",
     .value = "0.0.0.0:8001",
     .offset = offsetof(struct router_settings, grpc)},
    {.flag = "max-requests",
     .type = CONFIG_U32,
     .unit = "requests",
     .help = "live at once; more are refused with a time to come back",
     .value = "16384",
     .least = 1,
     .most = 1048576,
     .offset = offsetof(struct router_settings, requests_max)},
    {.flag = "max-tokens-held",
     .type = CONFIG_U32,
     .unit = "tokens",
     .help = "prompts and answers of all live requests together, each rounded up to a power of two",
     .value = "16M",
     .least = 1024,
     .most = 1073741824,
     .offset = offsetof(struct router_settings, words_max)},
    {.flag = "max-workers",
     .type = CONFIG_U32,
     .unit = "workers",
     .help = "that this router knows at once",
     .value = "1024",
     .least = 1,
     .most = 16384,
     .offset = offsetof(struct router_settings, workers_max)},
    {.flag = "disaggregate-above",
     .type = CONFIG_U32,
     .unit = "tokens",
     .help = "prompts with more uncached tokens go to a prefill worker; 0: all",
     .value = "256",
     .most = 1073741824,
     .offset = offsetof(struct router_settings, disaggregate_above)},
    {.flag = "prefix-blocks",
     .type = CONFIG_U32,
     .unit = "blocks",
     .help = "cached pages of all workers that this router remembers, to send prompts to them (32 "
             "bytes each); 0: it looks at load only",
     .value = "512K",
     .most = 33554432,
     .offset = offsetof(struct router_settings, blocks_max)},
    {.flag = "text-threads",
     .type = CONFIG_U32,
     .unit = "threads",
     .help = "that tokenize and detokenize",
     .value = "2",
     .least = 1,
     .most = TEXT_THREADS_MAX,
     .offset = offsetof(struct router_settings, text_threads)},
    {.flag = "client-stall",
     .type = CONFIG_DURATION,
     .help = "a client that takes nothing for so long is ended",
     .value = "30s",
     .least = 100,
     .most = 3600000,
     .offset = offsetof(struct router_settings, client_stall)},
    {.flag = "canary",
     .type = CONFIG_DURATION,
     .help = "the router sends small requests of its own, and is not ready once nothing has "
             "completed for so long although there are workers; 0: it does not",
     .value = "10s",
     .most = 3600000,
     .offset = offsetof(struct router_settings, canary)},
    SHELL_CONFIG_ENTRIES(struct router_settings, shell, "0.0.0.0:8002"),
};

static const struct config_program program = {
    .name = "router",
    .version = BATON_VERSION,
    .summary = "The front door of a Baton cluster: takes requests, places them on workers, streams "
               "the answers.",
    .entries = entries,
    .count = sizeof entries / sizeof entries[0]};

/* An answer that is not taken is ended by --client-stall; the core expects that to be soon. */
static enum status check(const struct router_settings *settings) {
    struct span least = {settings->client_stall.ns + span_ms(STALL_MARGIN_MS).ns};
    if (settings->shell.timers.leave.ns < least.ns) {
        LOG_ERROR("--timer-leave must be at least 2 s longer than --client-stall",
                  LOG_SPAN("timer_leave", settings->shell.timers.leave),
                  LOG_SPAN("client_stall", settings->client_stall));
        return STATUS_RANGE;
    }
    if (settings->canary.ns > 0 && settings->canary.ns < span_ms(CANARY_LEAST_MS).ns) {
        LOG_ERROR("--canary must be 0 or at least 2 s", LOG_SPAN("canary", settings->canary));
        return STATUS_RANGE;
    }
    return STATUS_OK;
}

static _Noreturn void leave(int code) {
    log_stop();
    _exit(code);
}

int main(int argc, char **argv) {
    signals_block();
    static struct router_settings settings;
    static struct router router;
    int code = config_start(&program, argc, argv, &settings);
    if (code >= 0) {
        return code;
    }
    router.settings = &settings;
    const struct admin_route route = {.method = ADMIN_GET,
                                      .path = "/debug/workers",
                                      .handler = report_get_workers,
                                      .ctx = &router,
                                      .help = "every worker this router knows (JSON)"};
    const struct shell_config config = {.role = ROLE_ROUTER,
                                        .program = program.name,
                                        .version = program.version,
                                        .settings = &settings.shell,
                                        .listen_host = settings.grpc.host,
                                        /* a flood of clients leaves room for our own calls */
                                        .calls_max =
                                            settings.requests_max + 2 * settings.workers_max + 1024,
                                        .routes = &route,
                                        .route_count = 1};
    enum status status = shell_create(&config, &router.shell);
    if (status != STATUS_OK) {
        return shell_exit_code(status);
    }
    status = check(&settings);
    if (status != STATUS_OK) {
        code = shell_exit_code(status);
        if (shell_close(router.shell) != STATUS_OK) {
            leave(code);
        }
        return code;
    }
    status = router_start(&router);
    code = status == STATUS_OK ? 0 : shell_exit_code(status);
    if (status == STATUS_OK) {
        status = shell_wait(router.shell);
        code = status == STATUS_OK ? 0 : 1;
    }
    if (router_stop(&router) != STATUS_OK) {
        leave(1); /* something hangs and may still use its memory */
    }
    return code;
}
