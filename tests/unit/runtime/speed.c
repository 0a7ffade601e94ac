/* What the primitives of this room cost. Prints nanoseconds per call; asserts nothing.
 *
 * Usage: bin/runtime_speed (about two seconds) */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "runtime/clock.h"
#include "runtime/log.h"
#include "runtime/mail.h"
#include "runtime/metrics.h"
#include "runtime/thread.h"

#define CALLS 1000000

static struct instant started;

static void start(void) {
    started = clock_now();
}
static void report(const char *what, uint32_t calls) {
    struct span took = instant_since(clock_now(), started);
    printf("%-44s %9.1f ns\n", what, (double)took.ns / calls);
}

static void measure_metrics(void) {
    static const char *const states[] = {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"};
    struct metrics *metrics = metrics_create(&(struct metric_label){"role", "decode"}, 1);
    struct metric *counter = metrics_add(
        metrics,
        &(struct metric_config){.kind = METRIC_COUNTER, .name = "baton_x_total", .help = "X."});
    struct metric *histogram =
        metrics_add(metrics, &(struct metric_config){.kind = METRIC_HISTOGRAM,
                                                     .name = "baton_x_seconds",
                                                     .help = "X.",
                                                     .buckets = metric_latency_buckets,
                                                     .bucket_count = METRIC_LATENCY_BUCKETS});
    (void)metrics_add(metrics, &(struct metric_config){
                                   .kind = METRIC_COUNTER,
                                   .name = "baton_y_total",
                                   .help = "Y.",
                                   .labels = {{"a", states, 10}, {"b", states, 10}}}); /* shown */
    start();
    for (uint32_t i = 0; i < CALLS; i++) {
        metric_count(counter, 0, 1);
    }
    report("metric_count", CALLS);
    start();
    for (uint32_t i = 0; i < CALLS; i++) {
        metric_observe(histogram, 0, 0.03);
    }
    report("metric_observe, 15 buckets", CALLS);
    struct buffer buffer;
    buffer_init(&buffer, 1 << 20);
    start();
    for (uint32_t i = 0; i < 1000; i++) {
        buffer_clear(&buffer);
        metrics_expose(metrics, NULL, &buffer);
    }
    report("metrics_expose of 119 series", 1000);
    buffer_fini(&buffer);
    metrics_destroy(metrics);
}

static void measure_log(void) {
    struct log_settings settings = {LOG_LEVEL_INFO, LOG_FORMAT_HUMAN};
    log_set_fd(open("/dev/null", O_WRONLY | O_CLOEXEC));
    if (log_start(&settings, "speed", NULL) != STATUS_OK) {
        return;
    }
    start();
    for (uint32_t i = 0; i < CALLS; i++) {
        LOG_DEBUG("off", LOG_U64("number", i));
    }
    report("log line below the level", CALLS);
    log_set_level(LOG_LEVEL_DEBUG);
    start();
    for (uint32_t i = 0; i < CALLS / 10; i++) {
        LOG_DEBUG("request ended", LOG_U64("number", i), LOG_TEXT("id", "r-123"),
                  LOG_SPAN("took", span_us(1500)));
    }
    report("log line with three fields", CALLS / 10);
    start();
    for (uint32_t i = 0; i < CALLS; i++) {
        LOG_INFO("silenced", LOG_U64("number", i));
    }
    report("log line silenced by its rate", CALLS);
    log_stop();
    printf("%-44s %9llu\n", "  dropped of the above", (unsigned long long)log_dropped());
}

struct posting {
    struct mailbox *box;
    struct mail *mails;
};

static void *post_all(void *arg) {
    const struct posting *posting = arg;
    for (uint32_t i = 0; i < CALLS; i++) {
        if (!mailbox_post(posting->box, &posting->mails[i])) {
            abort();
        }
    }
    return NULL;
}

static void measure_mail(void) {
    struct mailbox box;
    mailbox_init(&box, NULL, NULL);
    struct posting posting = {&box, calloc(CALLS, sizeof(struct mail))};
    if (posting.mails == NULL) {
        return;
    }
    start();
    for (uint32_t i = 0; i < CALLS; i++) {
        if (!mailbox_post(&box, &posting.mails[i])) {
            abort();
        }
        (void)mailbox_take_all(&box);
    }
    report("mailbox_post and take_all, one thread", CALLS);
    pthread_t thread;
    start();
    if (pthread_create(&thread, NULL, post_all, &posting) != 0) {
        abort();
    }
    for (uint32_t taken = 0; taken < CALLS;) {
        (void)mailbox_wait(&box, INSTANT_NEVER);
        for (const struct mail *at = mailbox_take_all(&box); at != NULL; at = at->next) {
            taken++;
        }
    }
    (void)pthread_join(thread, NULL);
    report("mail from thread to thread", CALLS);
    (void)mailbox_close(&box);
    mailbox_fini(&box);
    free(posting.mails);
}

int main(void) {
    struct beat beat;
    beat_register(&beat, "speed", span_ms(1000));
    start();
    for (uint32_t i = 0; i < CALLS; i++) {
        thread_beat(&beat);
    }
    report("thread_beat", CALLS);
    beat_unregister(&beat);
    measure_mail();
    measure_metrics();
    measure_log();
    return 0;
}
