#include "sim/schedule.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

const char *fault_name(enum fault fault) {
    switch (fault) {
    case FAULT_CLIENT: return "client";
    case FAULT_LEAVE: return "leave";
    case FAULT_ABORT: return "abort";
    case FAULT_DEADLINE: return "deadline";
    case FAULT_STOP: return "stop";
    case FAULT_UNREAD: return "unread";
    case FAULT_TOKENIZE: return "tokenize";
    case FAULT_TOKENIZE_LATE: return "tokenize-late";
    case FAULT_REFUSED: return "refused";
    case FAULT_SEND_LOST: return "send-lost";
    case FAULT_SEND_LAST: return "send-last";
    case FAULT_SEND_LATE: return "send-late";
    case FAULT_SEND_BAD: return "send-bad";
    case FAULT_SEND_DEAF: return "send-deaf";
    case FAULT_STEP: return "step";
    case FAULT_STEP_SLOW: return "step-slow";
    case FAULT_ROW: return "row";
    case FAULT_LAYER: return "layer";
    case FAULT_ARM: return "arm";
    case FAULT_DISARM_LATE: return "disarm-late";
    case FAULT_CONNECT: return "connect";
    case FAULT_LINK_BUSY: return "link-busy";
    case FAULT_LINK_ERROR: return "link-error";
    case FAULT_LINK_ERROR_FIRST: return "link-error-first";
    case FAULT_LINK_HANGS: return "link-hangs";
    case FAULT_CLOSE_LATE: return "close-late";
    case FAULT_CHUNK_LOST: return "chunk-lost";
    case FAULT_CHUNK_BAD: return "chunk-bad";
    case FAULT_CHUNK_TWICE: return "chunk-twice";
    case FAULT_CHUNK_LATE: return "chunk-late";
    case FAULT_TURN_CRASH: return "turn-crash";
    case FAULT_TURN_PAUSE: return "turn-pause";
    case FAULT_BREAK: return "break";
    case FAULT_STALL: return "stall";
    case FAULT_DEAF: return "deaf";
    case FAULT_PARTITION: return "partition";
    case FAULT_CRASH: return "crash";
    case FAULT_PAUSE: return "pause";
    case FAULT_DRAIN: return "drain";
    case FAULT_ETCD_WIPE: return "etcd-wipe";
    case FAULT_ETCD_OUTAGE: return "etcd-outage";
    case FAULT_ETCD_LEASE: return "etcd-lease";
    case FAULT_FLOOD: return "flood";
    case FAULT_COUNT: break;
    }
    return "";
}

void schedule_add(struct schedule *schedule, enum fault fault, uint32_t index) {
    if (schedule->count == schedule->capacity) {
        schedule->capacity = schedule->capacity * 2 + 64;
        schedule->list = realloc(schedule->list, schedule->capacity * sizeof *schedule->list);
        CHECK(schedule->list != NULL);
    }
    schedule->list[schedule->count++] = (struct occurrence){(uint32_t)fault, index};
}

static int occurrence_compare(const void *left, const void *right) {
    const struct occurrence *a = left;
    const struct occurrence *b = right;
    if (a->fault != b->fault) {
        return a->fault < b->fault ? -1 : 1;
    }
    return a->index < b->index ? -1 : a->index > b->index;
}

void schedule_sort(struct schedule *schedule) {
    if (schedule->count > 0) {
        qsort(schedule->list, schedule->count, sizeof *schedule->list, occurrence_compare);
    }
}

bool schedule_has(const struct schedule *schedule, enum fault fault, uint32_t index) {
    struct occurrence key = {(uint32_t)fault, index};
    return schedule->count > 0 &&
           bsearch(&key, schedule->list, schedule->count, sizeof key, occurrence_compare) != NULL;
}

struct schedule schedule_copy(const struct schedule *schedule) {
    struct schedule copy = *schedule;
    copy.list = NULL;
    copy.count = 0;
    copy.capacity = 0;
    for (uint32_t i = 0; i < schedule->count; i++) {
        schedule_add(&copy, (enum fault)schedule->list[i].fault, schedule->list[i].index);
    }
    return copy;
}

void schedule_fini(struct schedule *schedule) {
    free(schedule->list);
    schedule->list = NULL;
    schedule->count = 0;
    schedule->capacity = 0;
}

/* --- as text: one word, safe in any shell ------------------------------------------------------
 */

struct field {
    const char *name;
    uint32_t *value;
};

#define SCHEDULE_FIELDS(schedule)                                                                  \
    {                                                                                              \
        {"world", &(schedule)->world}, {"routers", &(schedule)->routers},                          \
            {"prefills", &(schedule)->prefills}, {"decodes", &(schedule)->decodes},                \
            {"prompt", &(schedule)->prompt_max}, {"new", &(schedule)->new_max},                    \
    }

void schedule_write(const struct schedule *schedule, struct writer *writer) {
    struct schedule copy = *schedule;
    const struct field fields[] = SCHEDULE_FIELDS(&copy);
    writer_printf(writer, "seed=%llu", (unsigned long long)schedule->seed);
    for (uint32_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (*fields[i].value > 0) {
            writer_printf(writer, ",%s=%u", fields[i].name, *fields[i].value);
        }
    }
    writer_printf(writer, "%s%s%s", schedule->is_calm ? ",calm" : "",
                  schedule->is_strict ? ",strict" : "", schedule->is_listed ? ",only" : "");
    for (uint32_t i = 0; i < schedule->count; i++) {
        const struct occurrence *one = &schedule->list[i];
        if (i == 0 || one->fault != one[-1].fault) {
            writer_printf(writer, ",%s=%u", fault_name((enum fault)one->fault), one->index);
        } else {
            writer_printf(writer, "+%u", one->index);
        }
    }
}

static bool read_number(const char **at, uint64_t *out) {
    char *end = NULL;
    if (**at < '0' || **at > '9') {
        return false;
    }
    *out = strtoull(*at, &end, 10);
    *at = end;
    return true;
}

static bool word_is(const char *word, size_t len, const char *name) {
    return strlen(name) == len && memcmp(word, name, len) == 0;
}

/* "name=1+2+3": a field or a fault's list. */
static bool read_assignment(struct schedule *schedule, const char *word, size_t len,
                            const char **at) {
    const struct field fields[] = SCHEDULE_FIELDS(schedule);
    uint64_t value = 0;
    if (!read_number(at, &value)) {
        return false;
    }
    if (word_is(word, len, "seed")) {
        schedule->seed = value;
        return true;
    }
    for (uint32_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (word_is(word, len, fields[i].name)) {
            *fields[i].value = (uint32_t)value;
            return true;
        }
    }
    for (uint32_t fault = 0; fault < FAULT_COUNT; fault++) {
        if (!word_is(word, len, fault_name((enum fault)fault))) {
            continue;
        }
        schedule_add(schedule, (enum fault)fault, (uint32_t)value);
        while (**at == '+') {
            (*at)++;
            if (!read_number(at, &value)) {
                return false;
            }
            schedule_add(schedule, (enum fault)fault, (uint32_t)value);
        }
        return true;
    }
    return false;
}

enum status schedule_read(const char *text, struct schedule *schedule_out, const char **error_out) {
    struct schedule schedule = {0};
    const char *at = text;
    *error_out = "a schedule is what the driver prints: words between commas, each a name, "
                 "name=NUMBER or fault=N+N+N";
    while (*at != '\0') {
        size_t len = strcspn(at, "=,");
        const char *word = at;
        at += len;
        bool is_good = true;
        if (*at == '=') {
            at++;
            is_good = read_assignment(&schedule, word, len, &at);
        } else if (word_is(word, len, "calm")) {
            schedule.is_calm = true;
        } else if (word_is(word, len, "strict")) {
            schedule.is_strict = true;
        } else if (word_is(word, len, "only")) {
            schedule.is_listed = true;
        } else {
            is_good = false;
        }
        if (!is_good || (*at != ',' && *at != '\0')) {
            schedule_fini(&schedule);
            return STATUS_INVALID;
        }
        at += *at == ',' ? 1 : 0;
    }
    schedule_sort(&schedule);
    *schedule_out = schedule;
    return STATUS_OK;
}
