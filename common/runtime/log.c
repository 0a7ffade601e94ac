#include "runtime/log.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/check.h"
#include "runtime/clock.h"
#include "runtime/escape.h"
#include "runtime/thread.h"

#define LOG_NAME_CAP  64
#define LOG_VALUE_MAX 1024 /* bytes of one text value after escaping */
#define LOG_TAIL_ROOM 64   /* kept free for the cut mark, the repeat count and the end */
#define LOG_BLOCK     4096 /* one write; a pipe that polls writable takes this much at once */
#define LOG_WAIT_MS   100

enum sink_kind { SINK_PLAIN, SINK_NONBLOCKING, SINK_SOCKET };

struct log_slot {
    uint32_t len;
    char text[LOG_LINE_MAX];
};

static struct {
    pthread_mutex_t lock; /* guards the ring, its numbers, is_running and the names; a leaf */
    pthread_cond_t filled;
    pthread_cond_t written;
    uint64_t next_put; /* line numbers; slot = number % LOG_RING_LINES */
    uint64_t next_take;
    uint64_t next_done; /* lines below this were written or dropped */
    bool is_running;
    bool is_stopping;
    char role[LOG_NAME_CAP];
    char id[LOG_NAME_CAP];
    struct thread thread;
    int fd;      /* set before the thread starts */
    int sink_fd; /* what is written to; fd, or a non-blocking opening of the same file */
    enum sink_kind sink;
    _Atomic int level;
    _Atomic int format;
    _Atomic uint64_t dropped;
    struct log_slot slots[LOG_RING_LINES];
} the_log = {.lock = PTHREAD_MUTEX_INITIALIZER,
             .filled = PTHREAD_COND_INITIALIZER,
             .written = PTHREAD_COND_INITIALIZER,
             .fd = 2,
             .sink_fd = 2,
             .level = LOG_LEVEL_INFO};

static void log_lock(void) {
    CHECK(pthread_mutex_lock(&the_log.lock) == 0);
}

static void log_unlock(void) {
    CHECK(pthread_mutex_unlock(&the_log.lock) == 0);
}

struct log_field log_text(const char *key, const char *text) {
    if (text == NULL) {
        text = "-";
    }
    return log_bytes(key, text, strlen(text));
}

struct log_field log_bytes(const char *key, const void *data, size_t len) {
    return (struct log_field){.key = key, .kind = LOG_KIND_TEXT, .number = len, .text = data};
}

struct log_field log_errno(const char *key, int error) {
    const char *text = strerrordesc_np(error); /* static storage, unlike strerror's */
    return log_text(key, text != NULL ? text : "unknown error");
}

static const char *level_text(enum log_level level, bool is_json) {
    switch (level) {
    case LOG_LEVEL_ERROR: return is_json ? "error" : "ERROR";
    case LOG_LEVEL_WARN: return is_json ? "warn" : "WARN";
    case LOG_LEVEL_INFO: return is_json ? "info" : "INFO";
    case LOG_LEVEL_DEBUG: return is_json ? "debug" : "DEBUG";
    }
    return "?";
}

/* A value of untrusted bytes; human values are quoted when a reader could not tell where they end.
 */
static void put_text(struct writer *line, const char *text, size_t len, bool is_json) {
    const uint8_t *data = (const uint8_t *)text;
    bool is_quoted = is_json || len == 0;
    for (size_t i = 0; i < len && !is_quoted; i++) {
        is_quoted = data[i] <= ' ' || data[i] == '"' || data[i] == '\\' || data[i] >= 0x7f;
    }
    if (is_quoted) {
        writer_put(line, "\"", 1);
    }
    size_t start = line->len;
    for (size_t at = 0; at < len;) {
        char escaped[ESCAPE_MAX];
        size_t escaped_len = 0;
        size_t used = is_json ? escape_json(data + at, len - at, escaped, &escaped_len)
                              : escape_human(data + at, len - at, escaped, &escaped_len);
        if (line->len - start + escaped_len > LOG_VALUE_MAX) {
            writer_text(line, "...");
            break;
        }
        writer_put(line, escaped, escaped_len);
        at += used;
    }
    if (is_quoted) {
        writer_put(line, "\"", 1);
    }
}

static void put_real(struct writer *line, double value, bool is_json) {
    bool is_finite = value - value == 0;
    if (is_json && !is_finite) {
        writer_text(line, "null");
    } else {
        writer_printf(line, "%.9g", value);
    }
}

static void put_value(struct writer *line, const struct log_field *field, bool is_json) {
    switch (field->kind) {
    case LOG_KIND_TEXT: put_text(line, field->text, (size_t)field->number, is_json); break;
    case LOG_KIND_U64: writer_printf(line, "%llu", (unsigned long long)field->number); break;
    case LOG_KIND_I64: writer_printf(line, "%lld", (long long)field->number); break;
    case LOG_KIND_F64: put_real(line, field->real, is_json); break;
    case LOG_KIND_BOOL: writer_text(line, field->number != 0 ? "true" : "false"); break;
    case LOG_KIND_HEX:
        writer_printf(line, is_json ? "\"%016llx\"" : "%016llx", (unsigned long long)field->number);
        break;
    case LOG_KIND_SPAN:
        writer_printf(line, is_json ? "%.6g" : "%.6gms", (double)(int64_t)field->number / 1e6);
        break;
    case LOG_KIND_END: break;
    }
}

/* Appends one field, or takes it back and returns false when the line has no room for it. */
static bool put_field(struct writer *line, const struct log_field *field, bool is_json) {
    size_t before = line->len;
    if (is_json) {
        bool is_span = field->kind == LOG_KIND_SPAN;
        writer_printf(line, ",\"%s%s\":", field->key, is_span ? "_ms" : "");
    } else {
        writer_printf(line, " %s ", field->key);
    }
    put_value(line, field, is_json);
    if (line->is_full || line->len > line->cap - LOG_TAIL_ROOM) {
        line->len = before;
        line->is_full = false;
        return false;
    }
    return true;
}

static void put_names(struct writer *line, bool is_json) {
    char role[LOG_NAME_CAP];
    char id[LOG_NAME_CAP];
    log_lock();
    text_copy(role, sizeof role, the_log.role);
    text_copy(id, sizeof id, the_log.id);
    log_unlock();
    if (is_json) {
        writer_text(line, ",\"role\":");
        put_text(line, role, strlen(role), true);
        writer_text(line, ",\"instance\":");
        put_text(line, id, strlen(id), true);
    } else {
        put_text(line, role[0] != '\0' ? role : "-", strlen(role[0] != '\0' ? role : "-"), false);
        if (id[0] != '\0') {
            writer_text(line, "/");
            put_text(line, id, strlen(id), false);
        }
    }
}

static void log_format_line(struct writer *line, enum log_level level, const char *message,
                            const struct log_field *fields, uint32_t silenced) {
    bool is_json =
        atomic_load_explicit(&the_log.format, memory_order_relaxed) == (int)LOG_FORMAT_JSON;
    char time[CLOCK_WALL_TEXT];
    clock_wall_text(time);
    if (is_json) {
        writer_printf(line, "{\"time\":\"%s\",\"level\":\"%s\"", time, level_text(level, true));
        put_names(line, true);
        writer_text(line, ",\"message\":");
        put_text(line, message, strlen(message), true);
    } else {
        writer_printf(line, "%s %s ", time, level_text(level, false));
        put_names(line, false);
        writer_printf(line, " %.*s", LOG_VALUE_MAX, message);
    }
    for (uint32_t i = 0; fields[i].kind != LOG_KIND_END; i++) {
        if (!put_field(line, &fields[i], is_json)) {
            writer_text(line, is_json ? ",\"cut\":true" : " cut true");
            break;
        }
    }
    if (silenced > 0) {
        writer_printf(line, is_json ? ",\"repeated\":%u" : " repeated %u", silenced);
    }
    writer_text(line, is_json ? "}\n" : "\n");
}

/* One attempt: bytes taken (all or some), 0 when the sink is full for now, -1 when it is broken. */
static ssize_t sink_write(const char *data, size_t len) {
    ssize_t rc = 0;
    switch (the_log.sink) {
    case SINK_SOCKET: rc = send(the_log.sink_fd, data, len, MSG_DONTWAIT | MSG_NOSIGNAL); break;
    case SINK_NONBLOCKING: rc = write(the_log.sink_fd, data, len); break;
    case SINK_PLAIN: {
        /* A regular file never blocks. A pipe that could not be opened anew takes one block
         * once it polls writable, unless another process is faster: a race we accept. */
        struct pollfd ready = {.fd = the_log.sink_fd, .events = POLLOUT};
        if (poll(&ready, 1, 0) <= 0) {
            return 0;
        }
        rc = write(the_log.sink_fd, data, len);
        break;
    }
    }
    if (rc >= 0) {
        return rc;
    }
    return errno == EAGAIN || errno == EINTR || errno == ENOBUFS ? 0 : -1;
}

/* Another opening of a pipe or terminal can be non-blocking without changing the mode for the
 * processes that share the first one. Regular files keep theirs, which has the right offset. */
static void sink_open(void) {
    the_log.sink_fd = the_log.fd;
    the_log.sink = SINK_PLAIN;
    struct stat info;
    if (fstat(the_log.fd, &info) != 0) {
        return;
    }
    if (S_ISSOCK(info.st_mode)) {
        the_log.sink = SINK_SOCKET;
    } else if (S_ISFIFO(info.st_mode) || S_ISCHR(info.st_mode)) {
        char path[32];
        (void)snprintf(path, sizeof path, "/proc/self/fd/%d", the_log.fd);
        int fd = open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        if (fd >= 0) {
            the_log.sink_fd = fd;
            the_log.sink = SINK_NONBLOCKING;
        }
    }
}

static void sink_close(void) {
    if (the_log.sink == SINK_NONBLOCKING) {
        (void)close(the_log.sink_fd); /* nothing is buffered behind it */
    }
    the_log.sink_fd = the_log.fd;
    the_log.sink = SINK_PLAIN;
}

static void log_drop(uint64_t lines) {
    (void)atomic_fetch_add_explicit(&the_log.dropped, lines, memory_order_relaxed);
}

/* Takes whole lines up to one block; waits for the first one at most LOG_WAIT_MS. */
static size_t log_take_block(char *block, uint32_t *lines_out) {
    size_t len = 0;
    uint32_t lines = 0;
    log_lock();
    if (the_log.next_take == the_log.next_put && !the_log.is_stopping) {
        struct timespec until = clock_to_timespec(instant_add(clock_now(), span_ms(LOG_WAIT_MS)));
        int rc = pthread_cond_timedwait(&the_log.filled, &the_log.lock, &until);
        CHECK(rc == 0 || rc == ETIMEDOUT);
    }
    while (the_log.next_take < the_log.next_put) {
        const struct log_slot *slot = &the_log.slots[the_log.next_take % LOG_RING_LINES];
        if (slot->len > LOG_BLOCK - len) {
            break;
        }
        memcpy(block + len, slot->text, slot->len);
        len += slot->len;
        lines++;
        the_log.next_take++;
    }
    log_unlock();
    *lines_out = lines;
    return len;
}

/* Writes a block, beating while the sink is full; gives up when told to stop or when it broke. */
static bool log_write_block(struct thread *self, const char *block, size_t len) {
    size_t at = 0;
    while (at < len) {
        thread_beat(&self->beat);
        ssize_t rc = sink_write(block + at, len - at);
        if (rc < 0 || (rc == 0 && thread_stop_asked(self))) {
            return false;
        }
        at += (size_t)rc;
        if (rc == 0) {
            struct pollfd ready = {.fd = the_log.sink_fd, .events = POLLOUT};
            (void)poll(&ready, 1, LOG_WAIT_MS); /* only a pause; the write tells */
        }
    }
    return true;
}

static void log_main(struct thread *self, void *arg) {
    (void)arg; /* one log, static */
    char block[LOG_BLOCK];
    for (;;) {
        thread_beat(&self->beat);
        uint32_t lines = 0;
        size_t len = log_take_block(block, &lines);
        if (lines > 0 && !log_write_block(self, block, len)) {
            log_drop(lines);
        }
        log_lock();
        the_log.next_done += lines;
        bool is_over = the_log.is_stopping && the_log.next_done == the_log.next_put;
        CHECK(pthread_cond_broadcast(&the_log.written) == 0);
        log_unlock();
        if (is_over) {
            return;
        }
    }
}

/* The per-site limit: true if this line may pass, with the number silenced before it. */
static bool site_passes(struct log_site *site, enum log_level level, uint32_t *silenced_out) {
    if (level == LOG_LEVEL_DEBUG) {
        return true;
    }
    int64_t second = clock_now().ns / 1000000000;
    if (atomic_load_explicit(&site->second, memory_order_relaxed) != second) {
        atomic_store_explicit(&site->second, second, memory_order_relaxed);
        atomic_store_explicit(&site->count, 0, memory_order_relaxed);
    }
    if (atomic_fetch_add_explicit(&site->count, 1, memory_order_relaxed) >= LOG_SITE_BURST) {
        (void)atomic_fetch_add_explicit(&site->silenced, 1, memory_order_relaxed);
        return false;
    }
    *silenced_out = atomic_exchange_explicit(&site->silenced, 0, memory_order_relaxed);
    return true;
}

/* A flood of debug lines must not crowd out the error that explains it. */
static uint64_t log_ring_limit(enum log_level level) {
    return level == LOG_LEVEL_DEBUG ? LOG_RING_LINES / 4 * 3 : LOG_RING_LINES;
}

bool log_is_on(enum log_level level) {
    return (int)level <= atomic_load_explicit(&the_log.level, memory_order_relaxed);
}

void log_write(struct log_site *site, enum log_level level, const char *message,
               const struct log_field *fields) {
    int errno_before = errno;
    uint32_t silenced = 0;
    if (!log_is_on(level) || !site_passes(site, level, &silenced)) {
        return;
    }
    char text[LOG_LINE_MAX];
    struct writer line;
    writer_init(&line, text, sizeof text);
    log_format_line(&line, level, message, fields, silenced);
    log_lock();
    if (!the_log.is_running) {
        /* Start and end of the process: no thread to hand it to. The lock keeps lines whole. */
        if (sink_write(line.data, line.len) != (ssize_t)line.len) {
            log_drop(1);
        }
    } else if (the_log.next_put - the_log.next_take >= log_ring_limit(level)) {
        log_drop(1);
    } else {
        struct log_slot *slot = &the_log.slots[the_log.next_put % LOG_RING_LINES];
        slot->len = (uint32_t)line.len;
        memcpy(slot->text, line.data, line.len);
        if (the_log.next_put == the_log.next_take) {
            CHECK(pthread_cond_signal(&the_log.filled) == 0);
        }
        the_log.next_put++;
    }
    log_unlock();
    errno = errno_before;
}

static void log_check_hook(const char *file, int line, const char *what) {
    LOG_ERROR("check failed", LOG_TEXT("file", file), LOG_I64("line", line),
              LOG_TEXT("what", what));
    (void)log_flush(instant_add(clock_now(), span_ms(200))); /* aborting either way */
}

enum status log_start(const struct log_settings *settings, const char *role, const char *id) {
    CHECK(!the_log.is_running);
    log_set_level((enum log_level)settings->level);
    atomic_store(&the_log.format, (int)settings->format);
    pthread_condattr_t attributes;
    CHECK(pthread_condattr_init(&attributes) == 0);
    CHECK(pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_cond_init(&the_log.filled, &attributes) == 0);
    CHECK(pthread_cond_init(&the_log.written, &attributes) == 0);
    CHECK(pthread_condattr_destroy(&attributes) == 0);
    log_lock();
    text_copy(the_log.role, sizeof the_log.role, role);
    text_copy(the_log.id, sizeof the_log.id, id != NULL ? id : "");
    the_log.is_stopping = false;
    sink_open();
    log_unlock();
    struct thread_config config = {.name = "log", .fn = log_main, .beat_limit = span_ms(10000)};
    enum status status = thread_start(&the_log.thread, &config);
    log_lock();
    if (status == STATUS_OK) {
        the_log.is_running = true;
    } else {
        sink_close();
    }
    log_unlock();
    if (status == STATUS_OK) {
        check_set_hook(log_check_hook);
    }
    return status;
}

void log_set_id(const char *id) {
    log_lock();
    text_copy(the_log.id, sizeof the_log.id, id);
    log_unlock();
}

void log_set_level(enum log_level level) {
    atomic_store_explicit(&the_log.level, (int)level, memory_order_relaxed);
}

bool log_flush(struct instant deadline) {
    struct timespec until = clock_to_timespec(deadline);
    log_lock();
    uint64_t wanted = the_log.next_put;
    int rc = 0;
    while (the_log.is_running && the_log.next_done < wanted && rc == 0) {
        rc = pthread_cond_timedwait(&the_log.written, &the_log.lock, &until);
        CHECK(rc == 0 || rc == ETIMEDOUT);
    }
    bool is_written = !the_log.is_running || the_log.next_done >= wanted;
    log_unlock();
    return is_written;
}

void log_stop(void) {
    log_lock();
    bool was_running = the_log.is_running;
    log_unlock();
    if (!was_running) {
        return;
    }
    (void)log_flush(instant_add(clock_now(), span_ms(1000))); /* what is left is dropped, counted */
    check_set_hook(NULL);
    thread_ask_stop(&the_log.thread); /* first: it may end as soon as it sees is_stopping */
    log_lock();
    the_log.is_running = false;
    the_log.is_stopping = true;
    CHECK(pthread_cond_broadcast(&the_log.filled) == 0);
    CHECK(pthread_cond_broadcast(&the_log.written) == 0);
    log_unlock();
    CHECK(thread_join(&the_log.thread, INSTANT_NEVER) == STATUS_OK);
    log_lock();
    sink_close();
    log_unlock();
    CHECK(pthread_cond_destroy(&the_log.filled) == 0);
    CHECK(pthread_cond_destroy(&the_log.written) == 0);
}

uint64_t log_dropped(void) {
    return atomic_load_explicit(&the_log.dropped, memory_order_relaxed);
}

void log_set_fd(int fd) {
    CHECK(!the_log.is_running);
    the_log.fd = fd;
    the_log.sink_fd = fd;
    the_log.sink = SINK_PLAIN;
}
