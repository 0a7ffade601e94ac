/* Structured log lines to stderr: LOG_INFO("worker registered", LOG_TEXT("id", id), LOG_U64("pid",
 * pid)).
 *
 * The caller formats one line (at most LOG_LINE_MAX bytes, cut with a mark) into a slot of a fixed
 * ring; the log thread writes. A caller never waits: if the ring is full (nobody reads stderr) the
 * line is dropped and counted. A call site that repeats itself more than LOG_SITE_BURST times in a
 * second is silenced until the second is over (DEBUG is not); its next line carries `repeated N`.
 * Before log_start and after log_stop lines are written directly. Values are escaped, so one line
 * is one event whatever a client sends. Any thread; not from signal handlers. */
#ifndef RUNTIME_LOG_H
#define RUNTIME_LOG_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "base/time.h"

#define LOG_LINE_MAX   2048
#define LOG_RING_LINES 1024
#define LOG_SITE_BURST 50

enum log_level {
    LOG_LEVEL_ERROR, /* someone must act */
    LOG_LEVEL_WARN,  /* degraded */
    LOG_LEVEL_INFO,  /* life-cycle of the process and its workers */
    LOG_LEVEL_DEBUG, /* per request */
};
enum log_format {
    LOG_FORMAT_HUMAN, /* 2026-01-01T00:00:00.123Z INFO router/r1 worker registered id w1 pid 7 */
    LOG_FORMAT_JSON,  /* {"time":...,"level":"info","role":...,"instance":...,"message":...,"pid":7}
                       */
};

/* Members of a program's settings, filled by config through LOG_CONFIG_ENTRIES. */
struct log_settings {
    uint32_t level;  /* enum log_level */
    uint32_t format; /* enum log_format */
};

enum log_kind {
    LOG_KIND_END,
    LOG_KIND_TEXT,
    LOG_KIND_U64,
    LOG_KIND_I64,
    LOG_KIND_F64,
    LOG_KIND_BOOL,
    LOG_KIND_HEX,
    LOG_KIND_SPAN
};
struct log_field {
    const char *key; /* a literal: lower case, digits, '_' */
    enum log_kind kind;
    uint64_t number; /* U64, I64, BOOL, HEX, SPAN (ns); the text's length */
    double real;
    const char *text; /* borrowed until the call returns */
};

/* A NULL text prints as "-". */
struct log_field log_text(const char *key, const char *text);
struct log_field log_bytes(const char *key, const void *data, size_t len);
#define LOG_TEXT(key_, text_)        log_text((key_), (text_))
#define LOG_BYTES(key_, data_, len_) log_bytes((key_), (data_), (len_))
#define LOG_U64(key_, value_)                                                                      \
    ((struct log_field){.key = (key_), .kind = LOG_KIND_U64, .number = (uint64_t)(value_)})
#define LOG_I64(key_, value_)                                                                      \
    ((struct log_field){.key = (key_), .kind = LOG_KIND_I64, .number = (uint64_t)(int64_t)(value_)})
#define LOG_F64(key_, value_)                                                                      \
    ((struct log_field){.key = (key_), .kind = LOG_KIND_F64, .real = (double)(value_)})
#define LOG_BOOL(key_, value_)                                                                     \
    ((struct log_field){.key = (key_), .kind = LOG_KIND_BOOL, .number = (value_) ? 1 : 0})
/* 16 hexadecimal digits: ids and keys' fingerprints. */
#define LOG_HEX(key_, value_)                                                                      \
    ((struct log_field){.key = (key_), .kind = LOG_KIND_HEX, .number = (uint64_t)(value_)})
/* Milliseconds with a unit ("12.5ms"); in JSON a number under "<key>_ms". */
#define LOG_SPAN(key_, span_)                                                                      \
    ((struct log_field){.key = (key_), .kind = LOG_KIND_SPAN, .number = (uint64_t)(span_).ns})
#define LOG_STATUS(key_, status_) log_text((key_), status_name(status_))
/* The text of an errno value. */
struct log_field log_errno(const char *key, int error);
#define LOG_ERRNO(key_, error_) log_errno((key_), (error_))

/* One per call site: its rate limit. */
struct log_site {
    _Atomic int64_t second;
    _Atomic uint32_t count;    /* lines tried in this second */
    _Atomic uint32_t silenced; /* not yet reported */
};

/* fields: ends with LOG_KIND_END. Use the macros below. */
void log_write(struct log_site *site, enum log_level level, const char *message,
               const struct log_field *fields);
bool log_is_on(enum log_level level);

#define LOG_AT(level_, message_, ...)                                                              \
    do {                                                                                           \
        static struct log_site log_site_;                                                          \
        if (log_is_on(level_)) {                                                                   \
            log_write(                                                                             \
                &log_site_, (level_), (message_),                                                  \
                (const struct log_field[]){__VA_ARGS__ __VA_OPT__(, ){.kind = LOG_KIND_END}});     \
        }                                                                                          \
    } while (0)
#define LOG_ERROR(...) LOG_AT(LOG_LEVEL_ERROR, __VA_ARGS__)
#define LOG_WARN(...)  LOG_AT(LOG_LEVEL_WARN, __VA_ARGS__)
#define LOG_INFO(...)  LOG_AT(LOG_LEVEL_INFO, __VA_ARGS__)
#define LOG_DEBUG(...) LOG_AT(LOG_LEVEL_DEBUG, __VA_ARGS__)

/* Names the process and starts the log thread. role, id: copied (63 bytes); id may be NULL until
 * log_set_id. Also flushes before a failed CHECK aborts. */
MUST_USE enum status log_start(const struct log_settings *settings, const char *role,
                               const char *id);
void log_set_id(const char *id);
void log_set_level(enum log_level level);
/* Waits until what was logged so far is written; false at the deadline. */
bool log_flush(struct instant deadline);
/* Flushes for at most a second and ends the thread (idempotent). */
void log_stop(void);
/* Lines lost because the ring was full or stderr did not take them (baton_log_dropped_total). */
uint64_t log_dropped(void);
/* Writes lines to this descriptor instead of 2 (tests). Before log_start. */
void log_set_fd(int fd);

/* Entries of a file-scope table for a settings struct with a `struct log_settings` member. Needs
 * config.h. */
#define LOG_CONFIG_ENTRIES(settings_, member_)                                                     \
    {.flag = "log-level",                                                                          \
     .type = CONFIG_CHOICE,                                                                        \
     .help = "the least important lines that are written",                                         \
     .value = "info",                                                                              \
     .choices = (const char *const[]){"error", "warn", "info", "debug", NULL},                     \
     .offset = offsetof(settings_, member_.level)},                                                \
    {                                                                                              \
        .flag = "log-format", .type = CONFIG_CHOICE,                                               \
        .help = "lines for people, or one JSON object per line", .value = "human",                 \
        .choices = (const char *const[]){"human", "json", NULL},                                   \
        .offset = offsetof(settings_, member_.format)                                              \
    }

#endif
