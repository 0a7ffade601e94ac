#include "unit/etcd/bed.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/check.h"
#include "rpc/rpc.h"

static void cond_init(pthread_mutex_t *lock, pthread_cond_t *changed) {
    pthread_condattr_t attributes;
    CHECK(pthread_mutex_init(lock, NULL) == 0);
    CHECK(pthread_condattr_init(&attributes) == 0);
    CHECK(pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_cond_init(changed, &attributes) == 0);
    (void)pthread_condattr_destroy(&attributes);
}

static struct timespec wait_until(void) {
    struct timespec at;
    (void)clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_sec += BED_WAIT_S;
    return at;
}

/* ---- life ------------------------------------------------------------------------------------ */

void bed_open_with(struct bed *bed, const struct etcd_config *config) {
    const struct rpc_config rpc = {.name = "rpc"};
    struct etcd_error error = {.text = ""};
    assert_int_equal(rpc_create(&rpc, &bed->rpc), STATUS_OK);
    enum status status = etcd_create(bed->rpc, config, &bed->etcd, &error);
    if (status != STATUS_OK) {
        fail_msg("etcd_create: %s", error.text);
    }
}

void bed_open(struct bed *bed, const char *endpoints) {
    const struct etcd_config config = {.endpoints = endpoints,
                                       .attempt_timeout = span_ms(1000),
                                       .call_timeout = span_ms(5000),
                                       .backoff_max = span_ms(200),
                                       .keepalive_ms = 1000,
                                       .keepalive_timeout_ms = 1000};
    bed_open_with(bed, &config);
}

static void on_closed(void *ctx) {
    bed_done(ctx, &(struct etcd_reply){.status = STATUS_OK, .message = ""});
}

void bed_close_etcd(struct bed *bed) {
    struct bed_wait wait;
    bed_wait_init(&wait);
    etcd_close(bed->etcd, on_closed, &wait);
    struct bed_reply reply = bed_wait_take(&wait);
    bed_reply_fini(&reply);
    bed_wait_fini(&wait);
    etcd_destroy(bed->etcd);
    bed->etcd = NULL;
}

void bed_close(struct bed *bed) {
    if (bed->etcd != NULL) {
        bed_close_etcd(bed);
    }
    assert_int_equal(rpc_shutdown(bed->rpc, span_ms(0), span_ms(5000)), STATUS_OK);
    rpc_destroy(bed->rpc);
}

/* ---- calls ----------------------------------------------------------------------------------- */

void bed_wait_init(struct bed_wait *wait) {
    memset(wait, 0, sizeof(*wait));
    cond_init(&wait->lock, &wait->changed);
}

void bed_wait_fini(struct bed_wait *wait) {
    (void)pthread_cond_destroy(&wait->changed);
    (void)pthread_mutex_destroy(&wait->lock);
}

static void text_of(char *to, size_t cap, struct bytes from) {
    size_t len = from.len < cap - 1 ? from.len : cap - 1;
    if (len > 0) {
        memcpy(to, from.data, len);
    }
    to[len] = 0;
}

void bed_done(void *ctx, const struct etcd_reply *reply) {
    struct bed_wait *wait = ctx;
    pthread_mutex_lock(&wait->lock);
    wait->calls++;
    struct bed_reply *to = &wait->reply;
    to->status = reply->status;
    text_copy(to->message, sizeof(to->message), reply->message);
    to->header = reply->header;
    to->count = reply->count;
    to->has_more = reply->has_more;
    to->is_compacted = reply->is_compacted;
    to->deleted = reply->deleted;
    to->succeeded = reply->succeeded;
    to->lease = reply->lease;
    to->ttl_s = reply->ttl_s;
    to->granted_s = reply->granted_s;
    to->results_len = reply->results_len;
    const struct etcd_kv *kvs = reply->kvs;
    to->kvs_len = reply->kvs_len;
    for (size_t i = 0; kvs == NULL && i < reply->results_len; i++) {
        kvs = reply->results[i].kvs;
        to->kvs_len = reply->results[i].kvs_len;
    }
    to->kvs = calloc(to->kvs_len + 1, sizeof(*to->kvs));
    CHECK(to->kvs != NULL);
    for (size_t i = 0; i < to->kvs_len; i++) {
        text_of(to->kvs[i].key, sizeof(to->kvs[i].key), kvs[i].key);
        text_of(to->kvs[i].value, sizeof(to->kvs[i].value), kvs[i].value);
        to->kvs[i].value_len = kvs[i].value.len;
        to->kvs[i].create_revision = kvs[i].create_revision;
        to->kvs[i].mod_revision = kvs[i].mod_revision;
        to->kvs[i].version = kvs[i].version;
        to->kvs[i].lease = kvs[i].lease;
    }
    pthread_cond_broadcast(&wait->changed);
    pthread_mutex_unlock(&wait->lock);
}

struct bed_reply bed_wait_take(struct bed_wait *wait) {
    const struct timespec until = wait_until();
    pthread_mutex_lock(&wait->lock);
    while (wait->calls == 0 && pthread_cond_timedwait(&wait->changed, &wait->lock, &until) == 0) {
    }
    unsigned calls = wait->calls;
    struct bed_reply reply = wait->reply;
    memset(&wait->reply, 0, sizeof(wait->reply));
    wait->calls = 0;
    pthread_mutex_unlock(&wait->lock);
    CHECK_OP(calls, ==, 1); /* also used off the main thread, where cmocka may not jump */
    return reply;
}

void bed_reply_fini(struct bed_reply *reply) {
    free(reply->kvs);
    reply->kvs = NULL;
}

#define BED_CALL(call_)                                                                            \
    struct bed_wait wait;                                                                          \
    bed_wait_init(&wait);                                                                          \
    enum status status = (call_);                                                                  \
    CHECK_OP(status, ==, STATUS_OK);                                                               \
    struct bed_reply reply = bed_wait_take(&wait);                                                 \
    bed_wait_fini(&wait);                                                                          \
    return reply

struct bed_reply bed_put(struct bed *bed, const char *key, const char *value, int64_t lease) {
    BED_CALL(etcd_put(bed->etcd, etcd_text(key), etcd_text(value), lease, bed_done, &wait));
}

struct bed_reply bed_delete(struct bed *bed, const char *key, bool is_prefix) {
    BED_CALL(etcd_delete(bed->etcd, etcd_text(key), is_prefix, bed_done, &wait));
}

struct bed_reply bed_range(struct bed *bed, const char *key, bool is_prefix, int64_t limit,
                           int64_t revision) {
    const struct etcd_range range = {
        .key = etcd_text(key), .is_prefix = is_prefix, .limit = limit, .revision = revision};
    BED_CALL(etcd_range(bed->etcd, &range, bed_done, &wait));
}

struct bed_reply bed_txn(struct bed *bed, const struct etcd_txn *txn) {
    BED_CALL(etcd_txn(bed->etcd, txn, bed_done, &wait));
}

struct bed_reply bed_compact(struct bed *bed, int64_t revision) {
    BED_CALL(etcd_compact(bed->etcd, revision, bed_done, &wait));
}

struct bed_reply bed_grant(struct bed *bed, int64_t ttl_s) {
    BED_CALL(etcd_lease_grant(bed->etcd, ttl_s, bed_done, &wait));
}

struct bed_reply bed_revoke(struct bed *bed, int64_t lease) {
    BED_CALL(etcd_lease_revoke(bed->etcd, lease, bed_done, &wait));
}

struct bed_reply bed_ttl(struct bed *bed, int64_t lease) {
    BED_CALL(etcd_lease_time_to_live(bed->etcd, lease, bed_done, &wait));
}

void bed_put_surely(struct bed *bed, const char *key, const char *value) {
    const struct timespec until = wait_until();
    while (true) {
        struct bed_reply reply = bed_put(bed, key, value, 0);
        enum status status = reply.status;
        bed_reply_fini(&reply);
        if (status == STATUS_OK) {
            return;
        }
        struct timespec now;
        (void)clock_gettime(CLOCK_MONOTONIC, &now);
        CHECK_OP(now.tv_sec, <, until.tv_sec);
    }
}

/* ---- tape ------------------------------------------------------------------------------------ */

static unsigned number_of(struct bytes key) {
    unsigned number = 0;
    CHECK_OP(key.len, >=, 5);
    for (size_t i = key.len - 5; i < key.len; i++) {
        number = number * 10 + (unsigned)(key.data[i] - '0');
    }
    CHECK_OP(number, <, TAPE_KEYS_MAX);
    return number;
}

static void problem(struct tape *tape, const struct etcd_event *event, const char *what) {
    if (tape->problem[0] == 0) {
        (void)snprintf(tape->problem, sizeof(tape->problem),
                       "%s: %s%s of key %u at revision %lld, version %lld; last revision %lld",
                       what, event->is_listed ? "listed " : "", event->is_delete ? "DELETE" : "PUT",
                       number_of(event->kv.key), (long long)event->kv.mod_revision,
                       (long long)event->kv.version, (long long)tape->last_revision);
    }
}

static void on_event(void *ctx, const struct etcd_event *event) {
    struct tape *tape = ctx;
    pthread_mutex_lock(&tape->lock);
    struct tape_key *key = &tape->keys[number_of(event->kv.key)];
    tape->events++;
    tape->listed += event->is_listed;
    tape->value_bytes += event->kv.value.len;
    /* The writers of these tests put one key per revision; a lease takes all its keys in one. */
    if (event->kv.mod_revision < tape->last_revision ||
        (!event->is_listed && !event->is_delete && event->kv.mod_revision == tape->last_revision)) {
        problem(tape, event, "out of order");
    }
    if (event->is_delete) {
        if (!key->is_there) {
            problem(tape, event, "deleted, but was not there");
        }
        tape->there -= key->is_there;
        memset(key, 0, sizeof(*key));
    } else {
        if (!event->is_listed && event->kv.version != key->version + 1) {
            problem(tape, event, "an event before this one was lost or doubled");
        }
        if (event->is_listed && key->is_there && key->mod_revision == event->kv.mod_revision) {
            problem(tape, event, "known already");
        }
        tape->there += !key->is_there;
        key->is_there = true;
        key->version = event->kv.version;
        key->mod_revision = event->kv.mod_revision;
        text_of(key->value, sizeof(key->value), event->kv.value);
    }
    tape->last_revision = event->kv.mod_revision;
    pthread_cond_broadcast(&tape->changed);
    pthread_mutex_unlock(&tape->lock);
}

static void on_synced(void *ctx, int64_t revision) {
    struct tape *tape = ctx;
    pthread_mutex_lock(&tape->lock);
    tape->synced++;
    tape->last_revision = revision;
    pthread_cond_broadcast(&tape->changed);
    pthread_mutex_unlock(&tape->lock);
}

static void on_following(void *ctx) {
    struct tape *tape = ctx;
    pthread_mutex_lock(&tape->lock);
    tape->following++;
    pthread_cond_broadcast(&tape->changed);
    pthread_mutex_unlock(&tape->lock);
}

static void on_broken(void *ctx, const char *message) {
    struct tape *tape = ctx;
    pthread_mutex_lock(&tape->lock);
    tape->broken++;
    text_copy(tape->last_broken, sizeof(tape->last_broken), message);
    pthread_cond_broadcast(&tape->changed);
    pthread_mutex_unlock(&tape->lock);
}

static void on_reset(void *ctx, const char *message) {
    struct tape *tape = ctx;
    (void)message;
    pthread_mutex_lock(&tape->lock);
    tape->resets++;
    tape->last_revision = 0;
    for (unsigned i = 0; i < TAPE_KEYS_MAX; i++) {
        tape->keys[i].mod_revision = 0; /* of another history */
    }
    pthread_cond_broadcast(&tape->changed);
    pthread_mutex_unlock(&tape->lock);
}

static void on_watch_closed(void *ctx) {
    struct tape *tape = ctx;
    pthread_mutex_lock(&tape->lock);
    tape->closed++;
    pthread_cond_broadcast(&tape->changed);
    pthread_mutex_unlock(&tape->lock);
}

static const struct etcd_watch_handlers tape_handlers = {
    .on_event = on_event,
    .on_synced = on_synced,
    .on_following = on_following,
    .on_broken = on_broken,
    .on_reset = on_reset,
    .on_closed = on_watch_closed,
};

void tape_open(struct tape *tape, struct bed *bed, const char *prefix, int64_t revision) {
    memset(tape, 0, sizeof(*tape));
    cond_init(&tape->lock, &tape->changed);
    tape->keys = calloc(TAPE_KEYS_MAX, sizeof(*tape->keys));
    assert_non_null(tape->keys);
    const struct etcd_watch_config config = {
        .key = etcd_text(prefix), .is_prefix = true, .revision = revision};
    assert_int_equal(etcd_watch_open(bed->etcd, &config, &tape_handlers, tape, &tape->watch),
                     STATUS_OK);
}

enum tape_question {
    TAPE_SYNCED,
    TAPE_FOLLOWING,
    TAPE_BROKEN,
    TAPE_REVISION,
    TAPE_VALUE,
    TAPE_CLOSED
};

static bool tape_says(const struct tape *tape, enum tape_question question, int64_t number,
                      const char *value) {
    switch (question) {
    case TAPE_SYNCED: return tape->synced >= number;
    case TAPE_FOLLOWING: return tape->following >= number;
    case TAPE_BROKEN: return tape->broken >= number;
    case TAPE_REVISION: return tape->last_revision >= number;
    case TAPE_VALUE:
        return value == NULL
                   ? !tape->keys[number].is_there
                   : tape->keys[number].is_there && strcmp(tape->keys[number].value, value) == 0;
    case TAPE_CLOSED: return tape->closed >= number;
    }
    return false;
}

static void tape_wait(struct tape *tape, enum tape_question question, int64_t number,
                      const char *value) {
    const struct timespec until = wait_until();
    pthread_mutex_lock(&tape->lock);
    bool is_in_time = true;
    while (!tape_says(tape, question, number, value) && is_in_time) {
        is_in_time = pthread_cond_timedwait(&tape->changed, &tape->lock, &until) == 0;
    }
    bool is_so = tape_says(tape, question, number, value);
    char state[512];
    (void)snprintf(state, sizeof(state),
                   "synced %u following %u broken %u (%s) events %llu revision %lld", tape->synced,
                   tape->following, tape->broken, tape->last_broken,
                   (unsigned long long)tape->events, (long long)tape->last_revision);
    pthread_mutex_unlock(&tape->lock);
    if (!is_so) {
        fail_msg("waited in vain for question %d, %lld %s; %s", (int)question, (long long)number,
                 value == NULL ? "-" : value, state);
    }
}

void tape_wait_synced(struct tape *tape, unsigned times) {
    tape_wait(tape, TAPE_SYNCED, times, NULL);
}

void tape_wait_following(struct tape *tape, unsigned times) {
    tape_wait(tape, TAPE_FOLLOWING, times, NULL);
}

void tape_wait_broken(struct tape *tape, unsigned times) {
    tape_wait(tape, TAPE_BROKEN, times, NULL);
}

void tape_wait_revision(struct tape *tape, int64_t revision) {
    tape_wait(tape, TAPE_REVISION, revision, NULL);
}

void tape_wait_value(struct tape *tape, unsigned key, const char *value) {
    tape_wait(tape, TAPE_VALUE, key, value);
}

void tape_close(struct tape *tape) {
    etcd_watch_close(tape->watch);
    tape_wait(tape, TAPE_CLOSED, 1, NULL);
}

void tape_fini(struct tape *tape) {
    assert_int_equal(tape->closed, 1);
    free(tape->keys);
    (void)pthread_cond_destroy(&tape->changed);
    (void)pthread_mutex_destroy(&tape->lock);
}

void tape_check(struct tape *tape, struct bed *bed, const char *prefix) {
    struct bed_reply reply = bed_range(bed, prefix, true, 0, 0);
    if (reply.status != STATUS_OK) {
        fail_msg("the final range failed: %s", reply.message);
    }
    /* One more write under the prefix marks the end of what the range saw. */
    char key[64];
    (void)snprintf(key, sizeof(key), "%s%05u", prefix, TAPE_KEYS_MAX - 1);
    bed_put_surely(bed, key, "end");
    tape_wait_value(tape, TAPE_KEYS_MAX - 1, "end");
    pthread_mutex_lock(&tape->lock);
    char problem_text[256];
    text_copy(problem_text, sizeof(problem_text), tape->problem);
    uint64_t there = tape->there - tape->keys[TAPE_KEYS_MAX - 1].is_there;
    size_t wrong = 0;
    size_t counted = 0;
    for (size_t i = 0; i < reply.kvs_len; i++) {
        const struct bed_kv *kv = &reply.kvs[i];
        unsigned number = number_of(etcd_text(kv->key));
        if (number == TAPE_KEYS_MAX - 1) {
            continue; /* of an earlier check */
        }
        counted++;
        const struct tape_key *known = &tape->keys[number];
        wrong += !known->is_there || known->mod_revision != kv->mod_revision ||
                 known->version != kv->version ||
                 strncmp(known->value, kv->value, sizeof(known->value) - 1) != 0;
    }
    pthread_mutex_unlock(&tape->lock);
    bed_reply_fini(&reply);
    struct etcd_watch_counters counters;
    etcd_watch_counters(tape->watch, &counters);
    assert_string_equal(problem_text, "");
    assert_int_equal(wrong, 0);
    assert_int_equal(there, counted);
    assert_int_equal(counters.dropped, 0);
}

unsigned open_descriptors(void) {
    DIR *folder = opendir("/proc/self/fd");
    assert_non_null(folder);
    unsigned count = 0;
    while (readdir(folder) != NULL) {
        count++;
    }
    (void)closedir(folder);
    return count;
}
