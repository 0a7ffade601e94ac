/* Clients of a live router, cheap enough to be ten thousand: the figures of this room.
 *
 * cluster_load aborts|crowd|hold|beside --router HOST:PORT ...   (--help lists the flags)
 *
 * aborts: keeps --live requests going and ends each at a random moment, by cancelling its call or
 *   by Abort, until --count were ended; prints one line for each request that is over:
 *   REQUEST_ID how ended_at_ns closed_at_ns tokens code. Times are CLOCK_MONOTONIC, as the
 * programs'. crowd: starts --live streams, says "started", then "first" for each first token, until
 * killed. hold: opens --live streams and, once each has its first token, says "live"; measures for
 *   --seconds, prints one JSON object, cancels all and says "closed".
 * beside: as hold, without asking; from the first measured second on there is always one more
 *   request, with a prompt of --long tokens and one token of answer, the next as soon as one is
 *   over. The JSON object has the time between two replies of all --live streams together.
 * One rpc thread and the main thread; `lock` guards everything that both touch. */
#include <dirent.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/prng.h"
#include "rpc/rpc.h"
#include "runtime/clock.h"
#include "runtime/config.h"
#include "wire/public.h"

#define GENERATE     "/baton.v1.Inference/Generate"
#define ABORT        "/baton.v1.Inference/Abort"
#define CHANNELS_MAX 1024u
#define PROMPT_MAX   448u /* tokens, or bytes of a text */
#define LONG_MAX     65536u
#define GAPS_MAX     (1u << 22)
#define OPENING_MAX  512u  /* hold: streams that wait for their first token, while it opens */
#define CATCH_UP_MS  20    /* aborts: of starts that came too late */
#define RETRY_AFTER  20    /* ms, of a request that was told to come back */
#define ABORT_MS     10000 /* longest wait for the answer to Abort */
#define FIRST_WORD   259u  /* token ids from here on are words of the small model */
#define WORDS        200u

struct settings {
    const char *router;
    const char *model;
    const char *prefix;
    uint32_t live;
    uint32_t count;
    uint32_t connections;
    uint32_t context;
    uint32_t max_tokens;
    uint32_t prompt;
    uint32_t longs;
    uint32_t seed;
    uint32_t per_second;
    struct span seconds;
    struct span deadline;
    bool reset;
    struct config_operands operands;
};

enum how { HOW_ALONE = '-', HOW_CANCEL = 'c', HOW_ABORT = 'a' };

/* One stream at a time; in aborts the next follows in the same place. */
struct stream {
    struct load *load;
    uint64_t number; /* of its request, from 1 */
    struct rpc_call_id call;
    enum how how;
    bool is_live;
    bool is_refused; /* it was told to come back: again, at start_at */
    struct instant start_at;
    struct instant due; /* aborts: when it is to be ended */
    struct instant ended;
    struct instant started;
    struct instant first;
    struct instant last;
    struct span gap; /* longest between replies, while measured */
    uint64_t tokens;
    bool is_long;
};

struct load {
    const struct settings *settings;
    struct rpc *rpc;
    struct rpc_channel *channels[CHANNELS_MAX];
    struct prng prng;
    struct wire_buffer out;  /* main thread */
    struct wire_arena arena; /* rpc thread */
    pthread_mutex_t lock;    /* guards all below, and the streams */
    struct stream *streams;
    uint64_t numbers;
    uint32_t live;
    uint32_t opening;
    uint32_t with_first;
    uint32_t aborts_open;
    uint32_t ended; /* by us, while it lived */
    uint32_t failed;
    uint32_t refused;
    char sentence[256]; /* of the last failure */
    bool is_measuring;
    bool is_leaving;
    uint64_t tokens; /* while measured */
    uint64_t replies;
    uint32_t *long_tokens; /* beside: of the prompt, main thread */
    int64_t *gaps;         /* beside: between replies of the streams, while measured; or NULL */
    uint32_t gap_count;
    int64_t *firsts; /* beside: from the start of a long request to its first token */
    uint32_t first_count;
};

static volatile sig_atomic_t was_told_to_stop;

static void on_signal(int number) {
    (void)number;
    was_told_to_stop = 1;
}

static void request_id(const struct load *load, uint64_t number, char out[LABEL_MAX]) {
    (void)snprintf(out, LABEL_MAX, "%s%" PRIu64, load->settings->prefix, number);
}

/* ---- rpc thread ------------------------------------------------------------------------------ */

static void on_message(void *ctx, struct rpc_call_id call, const uint8_t *data, size_t len) {
    (void)call;
    struct stream *stream = ctx;
    struct load *load = stream->load;
    struct public_generate_reply reply;
    CHECK(public_generate_reply_decode((struct bytes){data, len}, &load->arena, &reply) ==
          STATUS_OK);
    uint32_t count = reply.token_count;
    wire_arena_reset(&load->arena);
    if (count == 0) {
        return;
    }
    struct instant now = clock_now();
    pthread_mutex_lock(&load->lock);
    if (stream->tokens == 0) {
        stream->first = now;
        load->opening--;
        load->with_first++;
        if (stream->is_long && load->is_measuring && load->first_count < GAPS_MAX) {
            load->firsts[load->first_count++] = instant_since(now, stream->started).ns;
        }
    } else if (load->is_measuring) {
        struct span gap = instant_since(now, stream->last);
        stream->gap = gap.ns > stream->gap.ns ? gap : stream->gap;
        if (load->gaps != NULL && load->gap_count < GAPS_MAX) {
            load->gaps[load->gap_count++] = gap.ns;
        }
    }
    stream->last = now;
    stream->tokens += count;
    if (load->is_measuring && !stream->is_long) {
        load->tokens += count;
        load->replies++;
    }
    bool is_first = stream->tokens == count;
    pthread_mutex_unlock(&load->lock);
    if (is_first && strcmp(load->settings->operands.values[0], "crowd") == 0) {
        CHECK(write(STDOUT_FILENO, "first\n", 6) == 6);
    }
}

static bool is_retryable(enum rpc_code code) {
    return code == RPC_CODE_UNAVAILABLE || code == RPC_CODE_RESOURCE_EXHAUSTED;
}

static void on_closed(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome) {
    (void)call;
    struct stream *stream = ctx;
    struct load *load = stream->load;
    struct instant now = clock_now();
    pthread_mutex_lock(&load->lock);
    stream->is_live = false;
    load->live--;
    load->opening -= stream->tokens == 0 ? 1 : 0;
    bool is_fine = outcome->code == RPC_CODE_OK ||
                   (stream->how == HOW_CANCEL && outcome->code == RPC_CODE_CANCELLED);
    stream->is_refused = !is_fine && stream->how == HOW_ALONE && is_retryable(outcome->code);
    if (stream->is_refused) {
        load->refused++;
        stream->start_at = instant_add(now, span_ms(RETRY_AFTER));
    } else if (!is_fine && !load->is_leaving) {
        load->failed++;
        (void)snprintf(load->sentence, sizeof load->sentence, "code %d: %.200s", (int)outcome->code,
                       outcome->message);
    }
    if (strcmp(load->settings->operands.values[0], "aborts") == 0) {
        char id[LABEL_MAX];
        request_id(load, stream->number, id);
        (void)printf("%s %c %" PRId64 " %" PRId64 " %" PRIu64 " %d\n", id, (char)stream->how,
                     stream->ended.ns, now.ns, stream->tokens, (int)outcome->code);
    } else if (!is_fine && strcmp(load->settings->operands.values[0], "crowd") == 0) {
        (void)printf("code %d %.200s\n", (int)outcome->code, outcome->message);
        (void)fflush(stdout);
    }
    pthread_mutex_unlock(&load->lock);
}

static const struct rpc_handlers generate_handlers = {.on_message = on_message,
                                                      .on_closed = on_closed};

static void abort_closed(void *ctx, struct rpc_call_id call, const struct rpc_outcome *outcome) {
    (void)call;
    struct load *load = ctx;
    pthread_mutex_lock(&load->lock);
    load->aborts_open--;
    if (outcome->code != RPC_CODE_OK && !load->is_leaving) {
        load->failed++;
        (void)snprintf(load->sentence, sizeof load->sentence, "Abort: code %d: %.200s",
                       (int)outcome->code, outcome->message);
    }
    pthread_mutex_unlock(&load->lock);
}

static const struct rpc_handlers abort_handlers = {.on_closed = abort_closed};

/* ---- main thread ----------------------------------------------------------------------------- */

/* What a request asks for: by its shape it is caught in different places. Long ones cross from a
 * prefill worker, texts have to be tokenized, short ones are served by a decode worker alone. */
static void request_fill(struct load *load, struct public_generate_request *request,
                         uint32_t *tokens, char *text) {
    const struct settings *settings = load->settings;
    uint32_t shape = settings->prompt > 0 ? 100 : prng_below(&load->prng, 100);
    uint32_t count = settings->prompt > 0 ? settings->prompt
                     : shape < 35         ? 60 + prng_below(&load->prng, 140)
                     : shape < 60         ? 200 + prng_below(&load->prng, 240)
                                          : 2 + prng_below(&load->prng, 10);
    request->is_tokens = shape < 35 || shape >= 60;
    if (request->is_tokens) {
        tokens[0] = 1;
        for (uint32_t i = 1; i < count; i++) {
            tokens[i] = FIRST_WORD + prng_below(&load->prng, WORDS);
        }
        request->tokens = tokens;
        request->token_count = count;
    } else {
        for (uint32_t i = 0; i < count; i++) {
            text[i] = i % 6 == 5 ? ' ' : (char)('a' + (char)prng_below(&load->prng, 26));
        }
        request->prompt = (struct bytes){(const uint8_t *)text, count};
    }
    uint32_t room = settings->context - count - 8;
    request->has_max_tokens = true;
    request->max_tokens = settings->max_tokens < room ? settings->max_tokens : room;
    request->sampling.has_temperature = true; /* 0: greedy */
    request->sampling.ignore_eos = true;
    (void)snprintf(request->model, LABEL_MAX, "%s", settings->model);
}

/* Delays that reach every phase: most within the milliseconds that placing, prefill and transfer
 * take, some far into the answer. */
static struct span abort_delay(struct load *load) {
    uint32_t kind = prng_below(&load->prng, 100);
    uint32_t most_us = kind < 15 ? 400 : kind < 40 ? 3000 : kind < 70 ? 30000 : 150000;
    return span_us(prng_below(&load->prng, most_us));
}

/* A long prompt that shares nothing with any other, and one token of answer. */
static void request_fill_long(struct load *load, struct public_generate_request *request) {
    const struct settings *settings = load->settings;
    load->long_tokens[0] = 1;
    for (uint32_t i = 1; i < settings->longs; i++) {
        load->long_tokens[i] = FIRST_WORD + prng_below(&load->prng, WORDS);
    }
    request->tokens = load->long_tokens;
    request->token_count = settings->longs;
    request->has_max_tokens = true;
    request->max_tokens = 1;
    request->sampling.has_temperature = true;
    request->sampling.ignore_eos = true;
    (void)snprintf(request->model, LABEL_MAX, "%s", settings->model);
}

static void stream_start(struct load *load, struct stream *stream, uint32_t index) {
    struct public_generate_request request = {.is_tokens = true};
    uint32_t tokens[PROMPT_MAX];
    char text[PROMPT_MAX];
    pthread_mutex_lock(&load->lock);
    *stream = (struct stream){.load = load,
                              .is_long = index >= load->settings->live,
                              .number = ++load->numbers,
                              .how = HOW_ALONE,
                              .is_live = true,
                              .started = clock_now()};
    stream->last = stream->started;
    load->live++;
    load->opening++;
    request_id(load, stream->number, request.request_label);
    pthread_mutex_unlock(&load->lock);
    if (stream->is_long) {
        request_fill_long(load, &request);
    } else {
        request_fill(load, &request, tokens, text);
    }
    stream->due = instant_add(stream->started, abort_delay(load));
    CHECK(public_generate_request_encode(&request, &load->out) == STATUS_OK);
    struct rpc_call_config config = {.method = GENERATE,
                                     .kind = RPC_KIND_SERVER_STREAM,
                                     .deadline =
                                         instant_add(stream->started, load->settings->deadline),
                                     .payload = wire_buffer_bytes(&load->out),
                                     .handlers = &generate_handlers,
                                     .ctx = stream};
    CHECK(rpc_call_start(load->channels[index % load->settings->connections], &config,
                         &stream->call) == STATUS_OK);
}

static void stream_end(struct load *load, struct stream *stream, uint32_t index) {
    pthread_mutex_lock(&load->lock);
    bool is_live = stream->is_live;
    if (is_live) {
        stream->how = prng_below(&load->prng, 2) == 0 ? HOW_CANCEL : HOW_ABORT;
        stream->ended = clock_now();
        load->ended++;
        load->aborts_open += stream->how == HOW_ABORT ? 1 : 0;
    }
    pthread_mutex_unlock(&load->lock);
    if (is_live && stream->how == HOW_CANCEL) {
        rpc_call_cancel(load->rpc, stream->call);
    } else if (is_live) {
        struct public_abort_request request = {.is_session = false};
        request_id(load, stream->number, request.label);
        CHECK(public_abort_request_encode(&request, &load->out) == STATUS_OK);
        struct rpc_call_config config = {.method = ABORT,
                                         .kind = RPC_KIND_UNARY,
                                         .deadline = instant_add(clock_now(), span_ms(ABORT_MS)),
                                         .payload = wire_buffer_bytes(&load->out),
                                         .handlers = &abort_handlers,
                                         .ctx = load};
        struct rpc_call_id call;
        CHECK(rpc_call_start(load->channels[index % load->settings->connections], &config, &call) ==
              STATUS_OK);
    }
}

static void pause_us(uint32_t us) {
    struct timespec pause = {.tv_nsec = (long)us * 1000};
    (void)nanosleep(&pause, NULL); /* a shorter one does no harm */
}

static uint32_t load_read(struct load *load, const uint32_t *number) {
    pthread_mutex_lock(&load->lock);
    uint32_t value = *number;
    pthread_mutex_unlock(&load->lock);
    return value;
}

static void aborts(struct load *load) {
    const struct settings *settings = load->settings;
    struct instant next = clock_now();
    struct span every = {settings->per_second > 0 ? 1000000000 / settings->per_second : 0};
    bool is_done = false;
    while (was_told_to_stop == 0 && !(is_done && load_read(load, &load->live) == 0 &&
                                      load_read(load, &load->aborts_open) == 0)) {
        struct instant now = clock_now();
        is_done = load_read(load, &load->ended) >= settings->count;
        for (uint32_t i = 0; i < settings->live; i++) {
            struct stream *stream = &load->streams[i];
            pthread_mutex_lock(&load->lock);
            bool is_live = stream->is_live;
            bool is_due = is_live && stream->how == HOW_ALONE && instant_reached(now, stream->due);
            bool can_start = !is_live && instant_reached(now, stream->start_at);
            pthread_mutex_unlock(&load->lock);
            if (is_due) {
                stream_end(load, stream, i);
            } else if (can_start && !is_done && instant_reached(now, next)) {
                stream_start(load, stream, i);
                next = instant_add(next, every);
                next = instant_since(now, next).ns > CATCH_UP_MS * 1000000ll ? now : next;
            }
        }
        pause_us(200);
    }
}

/* With it the death of the process resets the connections instead of closing them. */
static void set_reset(void) {
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != NULL);
    struct dirent *entry = NULL;
    while ((entry = readdir(folder)) != NULL) {
        int fd = (int)strtol(entry->d_name, NULL, 10);
        struct stat stat;
        struct linger linger = {.l_onoff = 1, .l_linger = 0};
        if (fd > 2 && fstat(fd, &stat) == 0 && S_ISSOCK(stat.st_mode)) {
            (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
        }
    }
    (void)closedir(folder);
}

static void crowd(struct load *load) {
    for (uint32_t i = 0; i < load->settings->live; i++) {
        stream_start(load, &load->streams[i], i);
    }
    while (load_read(load, &load->with_first) == 0 && was_told_to_stop == 0) {
        pause_us(200); /* all connections are there once somebody is answered */
    }
    if (load->settings->reset) {
        set_reset();
    }
    (void)printf("started\n");
    (void)fflush(stdout);
    while (was_told_to_stop == 0) {
        pause_us(50000);
    }
}

static int by_value(const void *left, const void *right) {
    int64_t a = *(const int64_t *)left;
    int64_t b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

/* Opens until all have a first token; false if that does not happen within the deadline. */
static bool hold_open(struct load *load) {
    const struct settings *settings = load->settings;
    struct instant until = instant_add(clock_now(), settings->deadline);
    uint32_t started = 0;
    while (load_read(load, &load->with_first) < settings->live) {
        if (was_told_to_stop != 0 || instant_reached(clock_now(), until) ||
            load_read(load, &load->failed) > 0) {
            return false;
        }
        while (started < settings->live && load_read(load, &load->opening) < OPENING_MAX) {
            stream_start(load, &load->streams[started], started);
            started++;
        }
        for (uint32_t i = 0; i < started; i++) {
            struct stream *stream = &load->streams[i];
            pthread_mutex_lock(&load->lock);
            bool is_again = !stream->is_live && stream->is_refused &&
                            instant_reached(clock_now(), stream->start_at);
            pthread_mutex_unlock(&load->lock);
            if (is_again) {
                stream_start(load, stream, i);
            }
        }
        pause_us(2000);
    }
    return true;
}

static void hold_measure(struct load *load) {
    const struct settings *settings = load->settings;
    pthread_mutex_lock(&load->lock);
    load->is_measuring = true;
    load->tokens = 0;
    load->replies = 0;
    uint32_t live_first = load->live;
    for (uint32_t i = 0; i < settings->live; i++) {
        load->streams[i].gap.ns = 0;
    }
    pthread_mutex_unlock(&load->lock);
    struct instant began = clock_now();
    while (was_told_to_stop == 0 &&
           !instant_reached(clock_now(), instant_add(began, settings->seconds))) {
        pause_us(5000);
    }
    int64_t *gaps = calloc(settings->live, sizeof *gaps);
    CHECK(gaps != NULL);
    pthread_mutex_lock(&load->lock);
    load->is_measuring = false;
    struct instant now = clock_now();
    uint32_t still = 0;
    for (uint32_t i = 0; i < settings->live; i++) {
        struct stream *stream = &load->streams[i];
        still += stream->is_live ? 1 : 0;
        int64_t since = stream->is_live ? instant_since(now, stream->last).ns : 0;
        gaps[i] = since > stream->gap.ns ? since : stream->gap.ns;
    }
    double seconds = span_to_seconds(instant_since(now, began));
    qsort(gaps, settings->live, sizeof *gaps, by_value);
    (void)printf("{\"live_first\": %u, \"live_last\": %u, \"seconds\": %.3f, \"tokens\": %" PRIu64
                 ", \"replies\": %" PRIu64 ", \"gap_ms_p50\": %.1f, \"gap_ms_p99\": %.1f, "
                 "\"gap_ms_max\": %.1f, \"refused\": %u, \"failed\": %u}\n",
                 live_first, still, seconds, load->tokens, load->replies,
                 (double)gaps[settings->live / 2] / 1e6,
                 (double)gaps[(uint64_t)settings->live * 99 / 100] / 1e6,
                 (double)gaps[settings->live - 1] / 1e6, load->refused, load->failed);
    (void)fflush(stdout);
    pthread_mutex_unlock(&load->lock);
    free(gaps);
}

static void hold(struct load *load) {
    if (!hold_open(load)) {
        return;
    }
    (void)printf("live\n");
    (void)fflush(stdout);
    char line[16];
    (void)(fgets(line, sizeof line, stdin) !=
           NULL); /* whoever measures is ready: any line, or EOF */
    hold_measure(load);
    (void)(fgets(line, sizeof line, stdin) != NULL);
    pthread_mutex_lock(&load->lock);
    load->is_leaving = true;
    pthread_mutex_unlock(&load->lock);
    for (uint32_t i = 0; i < load->settings->live; i++) {
        pthread_mutex_lock(&load->lock);
        load->streams[i].how = HOW_CANCEL;
        pthread_mutex_unlock(&load->lock);
        rpc_call_cancel(load->rpc, load->streams[i].call);
    }
    while (load_read(load, &load->live) > 0 && was_told_to_stop == 0) {
        pause_us(1000);
    }
    (void)printf("closed\n");
    (void)fflush(stdout);
}

static double quantile_ms(int64_t *values, uint32_t count, double share) {
    qsort(values, count, sizeof *values, by_value);
    uint32_t at = (uint32_t)((double)count * share);
    return count == 0 ? 0 : (double)values[at < count ? at : count - 1] / 1e6;
}

static void beside_tell(struct load *load, struct span took) {
    pthread_mutex_lock(&load->lock);
    load->is_measuring = false;
    uint32_t still = load->live - (load->streams[load->settings->live].is_live ? 1 : 0);
    int64_t *gaps = load->gaps;
    uint32_t count = load->gap_count;
    (void)printf(
        "{\"live_last\": %u, \"seconds\": %.3f, \"tokens\": %" PRIu64
        ", \"gaps\": %u, \"itl_ms_p50\": %.3f, \"itl_ms_p90\": %.3f, \"itl_ms_p99\": %.3f, "
        "\"itl_ms_max\": %.3f, \"longs\": %u, \"long_ttft_ms_p50\": %.1f, "
        "\"refused\": %u, \"failed\": %u}\n",
        still, span_to_seconds(took), load->tokens, count, quantile_ms(gaps, count, 0.5),
        quantile_ms(gaps, count, 0.9), quantile_ms(gaps, count, 0.99), quantile_ms(gaps, count, 1),
        load->first_count, quantile_ms(load->firsts, load->first_count, 0.5), load->refused,
        load->failed);
    (void)fflush(stdout);
    pthread_mutex_unlock(&load->lock);
}

static void beside(struct load *load) {
    const struct settings *settings = load->settings;
    load->gaps = calloc(GAPS_MAX, sizeof *load->gaps);
    load->firsts = calloc(GAPS_MAX, sizeof *load->firsts);
    load->long_tokens = calloc(LONG_MAX, sizeof *load->long_tokens);
    CHECK(load->gaps != NULL && load->firsts != NULL && load->long_tokens != NULL);
    if (!hold_open(load)) {
        return;
    }
    pthread_mutex_lock(&load->lock);
    load->is_measuring = true;
    pthread_mutex_unlock(&load->lock);
    struct stream *extra = &load->streams[settings->live];
    struct instant began = clock_now();
    struct instant until = instant_add(began, settings->seconds);
    while (was_told_to_stop == 0 && !instant_reached(clock_now(), until)) {
        pthread_mutex_lock(&load->lock);
        bool can_start =
            settings->longs > 0 && !extra->is_live && instant_reached(clock_now(), extra->start_at);
        pthread_mutex_unlock(&load->lock);
        if (can_start) {
            stream_start(load, extra, settings->live);
        }
        pause_us(500);
    }
    beside_tell(load, instant_since(clock_now(), began));
    pthread_mutex_lock(&load->lock);
    load->is_leaving = true;
    pthread_mutex_unlock(&load->lock);
    for (uint32_t i = 0; i <= settings->live; i++) {
        pthread_mutex_lock(&load->lock);
        bool is_live = load->streams[i].is_live;
        load->streams[i].how = HOW_CANCEL;
        pthread_mutex_unlock(&load->lock);
        if (is_live) {
            rpc_call_cancel(load->rpc, load->streams[i].call);
        }
    }
    while (load_read(load, &load->live) > 0 && was_told_to_stop == 0) {
        pause_us(1000);
    }
    free(load->gaps);
    free(load->firsts);
    free(load->long_tokens);
}

#define AT(member_) .offset = offsetof(struct settings, member_)

static const struct config_entry entries[] = {
    {.flag = "router",
     .type = CONFIG_TEXT,
     .unit = "HOST:PORT",
     .help = "whose clients they are",
     .is_required = true,
     AT(router)},
    {.flag = "model",
     .type = CONFIG_TEXT,
     .unit = "NAME",
     .help = "that they ask for",
     .value = "stories260k",
     AT(model)},
    {.flag = "prefix",
     .type = CONFIG_TEXT,
     .unit = "TEXT",
     .help = "of request ids",
     .value = "load-",
     .most = 32,
     AT(prefix)},
    {.flag = "live",
     .type = CONFIG_U32,
     .unit = "streams",
     .help = "at once",
     .value = "16",
     .least = 1,
     .most = 1u << 20,
     AT(live)},
    {.flag = "count",
     .type = CONFIG_U32,
     .unit = "requests",
     .help = "aborts: that are ended",
     .value = "1000",
     .least = 1,
     .most = 1u << 30,
     AT(count)},
    {.flag = "connections",
     .type = CONFIG_U32,
     .help = "that carry them",
     .value = "4",
     .least = 1,
     .most = CHANNELS_MAX,
     AT(connections)},
    {.flag = "context",
     .type = CONFIG_U32,
     .unit = "tokens",
     .help = "of the model",
     .value = "512",
     .least = 512,
     .most = 1u << 20,
     AT(context)},
    {.flag = "max-tokens",
     .type = CONFIG_U32,
     .unit = "tokens",
     .help = "of an answer; less where the context ends before",
     .value = "500",
     .least = 1,
     .most = 1u << 20,
     AT(max_tokens)},
    {.flag = "prompt",
     .type = CONFIG_U32,
     .unit = "tokens",
     .help = "of each prompt; 0: a mixture",
     .value = "0",
     .most = PROMPT_MAX,
     AT(prompt)},
    {.flag = "long",
     .type = CONFIG_U32,
     .unit = "tokens",
     .help = "beside: of the prompts beside the streams; 0: there are none",
     .value = "0",
     .most = LONG_MAX,
     AT(longs)},
    {.flag = "seed", .type = CONFIG_U32, .help = "of all that is random", .value = "1", AT(seed)},
    {.flag = "per-second",
     .type = CONFIG_U32,
     .unit = "requests",
     .help = "aborts: that start at most; 0: no limit",
     .value = "0",
     .most = 1000000,
     AT(per_second)},
    {.flag = "seconds",
     .type = CONFIG_DURATION,
     .help = "hold, beside: that are measured",
     .value = "5s",
     .least = 10,
     .most = 3600000,
     AT(seconds)},
    {.flag = "deadline",
     .type = CONFIG_DURATION,
     .help = "of each request",
     .value = "120s",
     .least = 100,
     .most = 3600000,
     AT(deadline)},
    {.flag = "reset",
     .type = CONFIG_BOOL,
     .help = "crowd: its death resets the connections",
     .value = "false",
     AT(reset)},
};

static const struct config_program program = {
    .name = "cluster_load",
    .version = "1",
    .summary = "Clients of a live router for the benchmarks of a cluster.",
    .entries = entries,
    .count = sizeof entries / sizeof entries[0],
    .operands = "aborts|crowd|hold|beside",
    .operands_offset = offsetof(struct settings, operands)};

static void channels_open(struct load *load) {
    for (uint32_t i = 0; i < load->settings->connections; i++) {
        struct rpc_channel_options options = {.own_connection = true};
        struct rpc_error error = {.text = ""};
        if (rpc_channel_open(load->rpc, load->settings->router, NULL, &options, &load->channels[i],
                             &error) != STATUS_OK) {
            (void)fprintf(stderr, "cluster_load: --router %s: %s\n", load->settings->router,
                          error.text);
            exit(2);
        }
    }
}

int main(int argc, char **argv) {
    struct settings settings;
    int code = config_start(&program, argc, argv, &settings);
    if (code >= 0) {
        return code;
    }
    const char *mode = settings.operands.count == 1 ? settings.operands.values[0] : "";
    void (*run)(struct load * load) = strcmp(mode, "aborts") == 0   ? aborts
                                      : strcmp(mode, "crowd") == 0  ? crowd
                                      : strcmp(mode, "hold") == 0   ? hold
                                      : strcmp(mode, "beside") == 0 ? beside
                                                                    : NULL;
    if (run == NULL) {
        (void)fprintf(stderr, "cluster_load: say one of aborts, crowd, hold, beside\n");
        return 2;
    }
    struct sigaction action = {.sa_handler = on_signal};
    CHECK(sigaction(SIGINT, &action, NULL) == 0 && sigaction(SIGTERM, &action, NULL) == 0);
    static struct load load;
    load.settings = &settings;
    load.prng.state = settings.seed;
    load.streams = calloc((size_t)settings.live + 1, sizeof *load.streams);
    CHECK(load.streams != NULL && pthread_mutex_init(&load.lock, NULL) == 0);
    struct rpc_config rpc = {.calls_max = 2 * settings.live + 1024};
    CHECK(rpc_create(&rpc, &load.rpc) == STATUS_OK);
    channels_open(&load);
    run(&load);
    pthread_mutex_lock(&load.lock);
    load.is_leaving = true;
    uint32_t failed = load.failed;
    pthread_mutex_unlock(&load.lock);
    if (failed > 0) {
        (void)fprintf(stderr, "cluster_load: %u calls failed; the last: %s\n", failed,
                      load.sentence);
    }
    CHECK(rpc_shutdown(load.rpc, span_ms(0), span_ms(10000)) == STATUS_OK);
    rpc_destroy(load.rpc);
    wire_buffer_fini(&load.out);
    wire_arena_fini(&load.arena);
    free(load.streams);
    (void)fflush(stdout);
    return failed > 0 ? 1 : 0;
}
