/* Settings that all three programs share: one table, put into each program's own by a macro.
 *
 * A program's settings struct has a `struct shell_settings` member; SHELL_CONFIG_ENTRIES gives the
 * table entries for it (see runtime/config.h for syntax, environment and --help). Every timer of
 * struct core_timers is a flag --timer-NAME; shell_create refuses relations that cannot work. */
#ifndef NODE_SETTINGS_H
#define NODE_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/time.h"
#include "core/node.h"
#include "runtime/config.h"
#include "runtime/log.h"

struct shell_settings {
    const char *etcd;
    const char *cluster;
    const char *id;        /* NULL: drawn from the host name, the role and the incarnation */
    const char *advertise; /* NULL: derived from the listen address */
    struct config_address admin;
    struct log_settings log;
    struct span drain_timeout;
    struct span etcd_lease;
    struct span etcd_keepalive;
    struct core_timers timers;
    bool test_verify;
    bool test_hooks;
};

#define SHELL_TIMER_ENTRY(type_, member_, flag_, name_, value_, help_)                             \
    {                                                                                              \
        .flag = "timer-" flag_, .type = CONFIG_DURATION, .help = help_, .value = value_,           \
        .least = 1, .most = 86400000, .offset = offsetof(type_, member_.timers.name_)              \
    }

/* The entries; admin_: the program's default of --admin as text. */
#define SHELL_CONFIG_ENTRIES(type_, member_, admin_)                                               \
    {.flag = "etcd",                                                                               \
     .type = CONFIG_TEXT,                                                                          \
     .unit = "URL[,URL...]",                                                                       \
     .help = "where discovery lives",                                                              \
     .value = "http://127.0.0.1:2379",                                                             \
     .offset = offsetof(type_, member_.etcd)},                                                     \
        {.flag = "cluster",                                                                        \
         .type = CONFIG_TEXT,                                                                      \
         .unit = "NAME",                                                                           \
         .help = "programs of one cluster find each other; clusters do not see each other",        \
         .value = "baton",                                                                         \
         .least = 1,                                                                               \
         .most = 63,                                                                               \
         .offset = offsetof(type_, member_.cluster)},                                              \
        {.flag = "id",                                                                             \
         .type = CONFIG_TEXT,                                                                      \
         .unit = "LABEL",                                                                          \
         .help = "name of this process for people; unset: role, host name and process number",     \
         .least = 1,                                                                               \
         .most = LABEL_MAX - 1,                                                                    \
         .offset = offsetof(type_, member_.id)},                                                   \
        {.flag = "advertise",                                                                      \
         .type = CONFIG_TEXT,                                                                      \
         .unit = "HOST",                                                                           \
         .help = "host that others are told; unset: the listen address, or this host's own",       \
         .least = 1,                                                                               \
         .most = 100,                                                                              \
         .offset = offsetof(type_, member_.advertise)},                                            \
        {.flag = "admin",                                                                          \
         .type = CONFIG_ADDRESS,                                                                   \
         .help = "health, metrics, debug views, drain (HTTP)",                                     \
         .value = admin_,                                                                          \
         .offset = offsetof(type_, member_.admin)},                                                \
        {.flag = "drain-timeout",                                                                  \
         .type = CONFIG_DURATION,                                                                  \
         .help = "what still runs so long after SIGTERM or /drain fails",                          \
         .value = "60s",                                                                           \
         .most = 86400000,                                                                         \
         .offset = offsetof(type_, member_.drain_timeout)},                                        \
        {.flag = "etcd-lease",                                                                     \
         .type = CONFIG_DURATION,                                                                  \
         .help = "lease of this process's record in etcd, whole seconds",                          \
         .value = "10s",                                                                           \
         .least = 1000,                                                                            \
         .most = 3600000,                                                                          \
         .offset = offsetof(type_, member_.etcd_lease)},                                           \
        {.flag = "etcd-keepalive",                                                                 \
         .type = CONFIG_DURATION,                                                                  \
         .help = "how often the lease is renewed; at most a third of it is used",                  \
         .value = "3s",                                                                            \
         .least = 100,                                                                             \
         .most = 1200000,                                                                          \
         .offset = offsetof(type_, member_.etcd_keepalive)},                                       \
        SHELL_TIMER_ENTRY(type_, member_, "beat", beat, "1s",                                      \
                          "a session says something at least so often"),                           \
        SHELL_TIMER_ENTRY(type_, member_, "lease", lease, "6s", "so much silence ends a session"), \
        SHELL_TIMER_ENTRY(type_, member_, "handshake", handshake, "3s",                            \
                          "from a session's stream to its Hello"),                                 \
        SHELL_TIMER_ENTRY(type_, member_, "audit", audit, "5s",                                    \
                          "how often sessions compare their entries"),                             \
        SHELL_TIMER_ENTRY(type_, member_, "admit", admit, "2s",                                    \
                          "router: until a decode worker answers Admit"),                          \
        SHELL_TIMER_ENTRY(type_, member_, "open", open, "3s",                                      \
                          "decode: until a prefill worker opens a slot"),                          \
        SHELL_TIMER_ENTRY(type_, member_, "stall", stall, "5s",                                    \
                          "workers: KV transfer without progress"),                                \
        SHELL_TIMER_ENTRY(type_, member_, "leave", leave, "35s",                                   \
                          "longest own operation: a step or a send"),                              \
        SHELL_TIMER_ENTRY(type_, member_, "request", request, "5m",                                \
                          "router: a request's deadline unless given"),                            \
        SHELL_TIMER_ENTRY(type_, member_, "place", place, "5s",                                    \
                          "router: wait without any worker for a model"),                          \
        SHELL_TIMER_ENTRY(type_, member_, "busy", busy, "50ms",                                    \
                          "until a full worker is asked again"),                                   \
        SHELL_TIMER_ENTRY(type_, member_, "backlog", backlog, "2s",                                \
                          "prefill: queued work, above it Busy"),                                  \
        SHELL_TIMER_ENTRY(type_, member_, "suspect", suspect, "10s",                               \
                          "router: a pair that could not talk is avoided"),                        \
        SHELL_TIMER_ENTRY(type_, member_, "forget", forget, "30s",                                 \
                          "router: an unlisted worker without a session"),                         \
        SHELL_TIMER_ENTRY(type_, member_, "reconnect-first", reconnect_first, "100ms",             \
                          "router: first wait to reconnect"),                                      \
        SHELL_TIMER_ENTRY(type_, member_, "reconnect-max", reconnect_max, "2s",                    \
                          "router: longest wait to reconnect"),                                    \
        SHELL_TIMER_ENTRY(type_, member_, "step", step, "100ms",                                   \
                          "workers: planned length of an engine step"),                            \
        SHELL_TIMER_ENTRY(type_, member_, "hop", hop, "100ms",                                     \
                          "taken off a deadline that is passed on"),                               \
        {.flag = "test-verify",                                                                    \
         .type = CONFIG_BOOL,                                                                      \
         .help = "for tests: check every invariant of the core at every tick",                     \
         .value = "false",                                                                         \
         .offset = offsetof(type_, member_.test_verify)},                                          \
        {.flag = "test-hooks",                                                                     \
         .type = CONFIG_BOOL,                                                                      \
         .help = "for tests: the admin port can hang or end a thread, or leak (POST /test/...)",   \
         .value = "false",                                                                         \
         .offset = offsetof(type_, member_.test_hooks)},                                           \
        LOG_CONFIG_ENTRIES(type_, member_.log)

#endif
