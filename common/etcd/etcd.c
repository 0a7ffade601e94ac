#include "etcd/etcd.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "etcd/internal.h"
#include "runtime/clock.h"
#include "runtime/random.h"

/* ---- small things ---------------------------------------------------------------------------- */

void *etcd_alloc(size_t len) {
    void *memory = calloc(1, len == 0 ? 1 : len);
    CHECK(memory != NULL);
    return memory;
}

void member_link(struct member *head, struct member *member) {
    member->prev = head->prev;
    member->next = head;
    head->prev->next = member;
    head->prev = member;
}

void member_unlink(struct member *member) {
    member->prev->next = member->next;
    member->next->prev = member->prev;
    member->prev = NULL;
    member->next = NULL;
}

void etcd_error_set(struct etcd_error *error, const char *format, ...) {
    if (error == NULL) {
        return;
    }
    va_list args;
    va_start(args, format);
    (void)vsnprintf(error->text, sizeof(error->text), format, args); /* cut: still a sentence */
    va_end(args);
}

void span_text(char *text, size_t cap, struct span span) {
    int64_t ms = span_to_ms(span);
    if (ms >= 1000 && ms % 1000 == 0) {
        (void)snprintf(text, cap, "%lld s", (long long)(ms / 1000));
    } else {
        (void)snprintf(text, cap, "%lld ms", (long long)ms);
    }
}

size_t prefix_end(struct bytes key, uint8_t *to) {
    size_t len = key.len;
    while (len > 0 && key.data[len - 1] == 0xff) {
        len--;
    }
    if (len == 0) {
        to[0] = 0; /* etcd: "from the key on, all" */
        return 1;
    }
    memcpy(to, key.data, len);
    to[len - 1]++;
    return len;
}

/* ---- endpoints ------------------------------------------------------------------------------- */

struct span etcd_backoff(struct etcd *etcd, uint32_t failures) {
    uint32_t doublings = failures < 2 ? 0 : failures - 1;
    int64_t ms = (int64_t)ETCD_BACKOFF_MS << (doublings < 6 ? doublings : 6);
    int64_t most = span_to_ms(etcd->config.backoff_max);
    if (ms > most) {
        ms = most;
    }
    return span_ms(ms / 2 + prng_below(&etcd->prng, (uint32_t)(ms / 2 + 1)));
}

bool endpoint_pick(struct etcd *etcd, struct instant now, uint32_t *index_out,
                   struct instant *ready_at_out) {
    struct instant earliest = INSTANT_NEVER;
    for (uint32_t i = 0; i < etcd->endpoints_len; i++) {
        uint32_t index = (etcd->current + i) % etcd->endpoints_len;
        if (instant_reached(now, etcd->endpoints[index].ready_at)) {
            etcd->current = index;
            *index_out = index;
            return true;
        }
        earliest = instant_min(earliest, etcd->endpoints[index].ready_at);
    }
    *ready_at_out = earliest;
    return false;
}

void endpoint_failed(struct etcd *etcd, uint32_t index, struct instant now) {
    struct endpoint *endpoint = &etcd->endpoints[index];
    if (!instant_reached(now, endpoint->ready_at)) {
        return; /* several users of one connection report one failure */
    }
    endpoint->failures++;
    endpoint->ready_at = instant_add(now, etcd_backoff(etcd, endpoint->failures));
    if (etcd->current == index) {
        etcd->current = (index + 1) % etcd->endpoints_len;
    }
}

void endpoint_worked(struct etcd *etcd, uint32_t index) {
    etcd->endpoints[index].failures = 0;
    etcd->endpoints[index].ready_at = (struct instant){0};
}

void explain_silence(const struct etcd *etcd, uint32_t endpoint, struct span waited,
                     struct etcd_error *error_out) {
    char span[32];
    span_text(span, sizeof(span), waited);
    etcd_error_set(error_out, "etcd at %s did not answer within %s",
                   etcd->endpoints[endpoint].address, span);
}

bool outcome_explain(const struct etcd *etcd, uint32_t endpoint, const struct rpc_outcome *outcome,
                     struct span waited, enum status *status_out, struct etcd_error *error_out) {
    const char *address = etcd->endpoints[endpoint].address;
    const char *message = outcome->message;
    static const char prefix[] = "etcdserver: ";
    if (strncmp(message, prefix, sizeof(prefix) - 1) == 0) {
        message += sizeof(prefix) - 1;
    }
    if (message[0] == 0) {
        message = rpc_code_name(outcome->code);
    }
    switch (outcome->code) {
    case RPC_CODE_DEADLINE_EXCEEDED:
        *status_out = STATUS_TIMEOUT;
        explain_silence(etcd, endpoint, waited, error_out);
        return true;
    case RPC_CODE_UNAVAILABLE:
    case RPC_CODE_CANCELLED:
    case RPC_CODE_UNKNOWN:
    case RPC_CODE_INTERNAL:
    case RPC_CODE_OK: /* a stream that etcd ended, or an answer without a message */
        *status_out = STATUS_UNAVAILABLE;
        if (outcome->code == RPC_CODE_OK) {
            message = "it ended the call without an answer";
        }
        if (strstr(message, "SETTINGS") != NULL) { /* gRPC 1.51: "... before receiving SETTINGS" */
            etcd_error_set(error_out, "etcd at %s accepts connections but does not answer",
                           address);
            return true;
        }
        if (strstr(message, "failed to connect") != NULL && strrchr(message, ':') != NULL) {
            /* gRPC 1.51: "failed to connect to all addresses; last error: UNKNOWN: ipv4:...: Failed
             * to connect to remote host: Connection refused": the last words are the news. */
            message = strrchr(message, ':') + 1;
            etcd_error_set(error_out, "etcd at %s cannot be reached:%s", address, message);
            return true;
        }
        etcd_error_set(error_out, "etcd at %s cannot serve: %s", address, message);
        return true;
    case RPC_CODE_INVALID_ARGUMENT:
    case RPC_CODE_NOT_FOUND:
    case RPC_CODE_ALREADY_EXISTS:
    case RPC_CODE_PERMISSION_DENIED:
    case RPC_CODE_RESOURCE_EXHAUSTED:
    case RPC_CODE_FAILED_PRECONDITION:
    case RPC_CODE_ABORTED:
    case RPC_CODE_OUT_OF_RANGE:
    case RPC_CODE_UNIMPLEMENTED:
    case RPC_CODE_DATA_LOSS:
    case RPC_CODE_UNAUTHENTICATED: break;
    }
    *status_out = rpc_code_to_status(outcome->code);
    etcd_error_set(error_out, "etcd at %s refused: %s", address, message);
    return false;
}

/* ---- clock ----------------------------------------------------------------------------------- */

static void etcd_finish(struct etcd *etcd) {
    if (atomic_load(&etcd->is_closing) && !etcd->is_ended && atomic_load(&etcd->objects) == 0) {
        etcd->is_ended = true;
        thread_ask_stop(&etcd->clock); /* its last mail is the end */
    }
}

static struct etcd *etcd_of_tick(struct mail *mail) {
    return (struct etcd *)(void *)((unsigned char *)mail - offsetof(struct etcd, tick_mail));
}

static void etcd_tick(struct mail *mail, void *ctx) {
    (void)ctx; /* the rpc's; not needed */
    struct etcd *etcd = etcd_of_tick(mail);
    struct instant now = clock_now();
    watches_tick(etcd, now);
    leases_tick(etcd, now);
    calls_tick(etcd, now); /* last: what the two before cancelled ends here */
    etcd_finish(etcd);
    atomic_store(&etcd->is_tick_posted, false);
}

static void etcd_end(struct mail *mail, void *ctx) {
    (void)ctx;
    struct etcd *etcd = etcd_of_tick(mail);
    void (*on_closed)(void *) = etcd->on_closed;
    void *on_closed_ctx = etcd->on_closed_ctx;
    etcd->is_closed = true;
    if (on_closed != NULL) {
        on_closed(on_closed_ctx); /* may let another thread free the client */
    }
}

static void clock_main(struct thread *self, void *arg) {
    struct etcd *etcd = arg;
    const struct timespec pause = {.tv_sec = 0, .tv_nsec = ETCD_TICK_MS * 1000000L};
    while (true) {
        thread_beat(&self->beat);
        bool is_free = !atomic_load(&etcd->is_tick_posted);
        if (is_free && thread_stop_asked(self)) {
            break;
        }
        if (is_free) {
            atomic_store(&etcd->is_tick_posted, true);
            etcd->tick_mail.run = etcd_tick;
            if (!rpc_post(etcd->rpc, &etcd->tick_mail)) {
                atomic_store(&etcd->is_tick_posted, false); /* the rpc is shut down */
            }
        }
        (void)nanosleep(&pause, NULL); /* early is fine */
    }
    etcd->tick_mail.run = etcd_end;
    if (!rpc_post(etcd->rpc, &etcd->tick_mail)) {
        etcd_end(&etcd->tick_mail, NULL); /* the rpc thread will run nothing any more */
    }
}

/* ---- life ------------------------------------------------------------------------------------ */

enum status etcd_enter(struct etcd *etcd) {
    atomic_fetch_add(&etcd->objects, 1);
    if (atomic_load(&etcd->is_closing)) {
        etcd_leave(etcd);
        return STATUS_CANCELLED;
    }
    return STATUS_OK;
}

void etcd_leave(struct etcd *etcd) {
    unsigned before = atomic_fetch_sub(&etcd->objects, 1);
    CHECK_OP(before, >, 0u);
}

static struct span or_default(struct span span, int64_t ms) {
    return span.ns > 0 ? span : span_ms(ms);
}

static enum status endpoints_open(struct etcd *etcd, const char *text,
                                  struct etcd_error *error_out) {
    const struct rpc_channel_options options = {
        .receive_bytes_max = 64u << 20, /* a page of large values */
        .keepalive_ms = etcd->config.keepalive_ms,
        .keepalive_timeout_ms = etcd->config.keepalive_timeout_ms,
        .own_connection = true,
    };
    if (text == NULL) {
        text = "";
    }
    while (true) {
        size_t len = strcspn(text, ",");
        struct endpoint *endpoint = &etcd->endpoints[etcd->endpoints_len];
        if (etcd->endpoints_len == ETCD_ENDPOINTS_MAX) {
            etcd_error_set(error_out, "more than %u etcd endpoints: name fewer",
                           ETCD_ENDPOINTS_MAX);
            return STATUS_INVALID;
        }
        static const char scheme[] = "http://";
        const char *address = text;
        size_t address_len = len;
        if (len >= sizeof(scheme) - 1 && memcmp(text, scheme, sizeof(scheme) - 1) == 0) {
            address += sizeof(scheme) - 1;
            address_len -= sizeof(scheme) - 1;
        }
        if (address_len > 0 && address[address_len - 1] == '/') {
            address_len--;
        }
        if (address_len == 0 || address_len >= sizeof(endpoint->address)) {
            etcd_error_set(error_out,
                           "etcd endpoint '%.*s' is not of the form http://host:port: write "
                           "http://a:2379, several with commas",
                           (int)(len < 128 ? len : 128), text);
            return STATUS_INVALID;
        }
        memcpy(endpoint->address, address, address_len);
        struct rpc_error reason = {.text = ""};
        enum status status = rpc_channel_open(etcd->rpc, endpoint->address, NULL, &options,
                                              &endpoint->channel, &reason);
        if (status != STATUS_OK) {
            etcd_error_set(error_out, "etcd endpoint '%s': %.180s", endpoint->address, reason.text);
            return status;
        }
        etcd->endpoints_len++;
        if (text[len] == 0) {
            return STATUS_OK;
        }
        text += len + 1;
    }
}

static void endpoints_close(struct etcd *etcd) {
    for (uint32_t i = 0; i < etcd->endpoints_len; i++) {
        rpc_channel_close(etcd->endpoints[i].channel);
    }
}

enum status etcd_create(struct rpc *rpc, const struct etcd_config *config, struct etcd **out,
                        struct etcd_error *error_out) {
    CHECK(rpc != NULL && config != NULL && out != NULL);
    struct etcd *etcd = etcd_alloc(sizeof(*etcd));
    etcd->rpc = rpc;
    etcd->config = *config;
    etcd->config.endpoints = NULL;
    etcd->config.call_timeout = or_default(config->call_timeout, 5000);
    etcd->config.attempt_timeout = or_default(config->attempt_timeout, 2000);
    etcd->config.backoff_max = or_default(config->backoff_max, ETCD_BACKOFF_MOST_MS);
    if (span_to_ms(etcd->config.backoff_max) > ETCD_BACKOFF_MOST_MS) {
        etcd->config.backoff_max = span_ms(ETCD_BACKOFF_MOST_MS);
    }
    etcd->config.keepalive_ms = config->keepalive_ms != 0 ? config->keepalive_ms : 6000;
    etcd->config.keepalive_timeout_ms =
        config->keepalive_timeout_ms != 0 ? config->keepalive_timeout_ms : 3000;
    etcd->config.calls_max = config->calls_max != 0 ? config->calls_max : 1024;
    etcd->config.page_keys = config->page_keys != 0 ? config->page_keys : 1000;
    etcd->config.range_bytes_max =
        config->range_bytes_max != 0 ? config->range_bytes_max : (size_t)64 << 20;
    etcd->config.watch_keys_max = config->watch_keys_max != 0 ? config->watch_keys_max : 1000000;
    etcd->prng.state = random_u64();
    struct member *heads[] = {&etcd->calls, &etcd->leases, &etcd->watches};
    for (size_t i = 0; i < sizeof(heads) / sizeof(heads[0]); i++) {
        heads[i]->prev = heads[i];
        heads[i]->next = heads[i];
    }
    enum status status = endpoints_open(etcd, config->endpoints, error_out);
    if (status != STATUS_OK) {
        goto fail;
    }
    const struct thread_config clock = {
        .name = "etcd-clock", .fn = clock_main, .arg = etcd, .beat_limit = span_ms(1000)};
    status = thread_start(&etcd->clock, &clock);
    if (status != STATUS_OK) {
        etcd_error_set(error_out, "cannot start the clock thread of the etcd client: %s",
                       status_name(status));
        status = STATUS_INTERNAL;
        goto fail;
    }
    *out = etcd;
    return STATUS_OK;
fail:
    endpoints_close(etcd);
    free(etcd);
    return status;
}

static void etcd_close_run(struct mail *mail, void *ctx) {
    (void)ctx;
    struct etcd *etcd =
        (struct etcd *)(void *)((unsigned char *)mail - offsetof(struct etcd, close_mail));
    watches_close(etcd);
    leases_close(etcd);
    calls_close(etcd);
    etcd_leave(etcd);
}

void etcd_close(struct etcd *etcd, void (*on_closed)(void *ctx), void *ctx) {
    etcd->on_closed = on_closed;
    etcd->on_closed_ctx = ctx;
    etcd->close_mail.run = etcd_close_run;
    /* Counted as an object until the mail has run, so that the end cannot overtake it. */
    atomic_fetch_add(&etcd->objects, 1);
    bool was_closing = atomic_exchange(&etcd->is_closing, true);
    CHECK(!was_closing);
    bool is_posted = rpc_post(etcd->rpc, &etcd->close_mail);
    CHECK(is_posted); /* rpc_shutdown comes after etcd_close has ended */
}

void etcd_destroy(struct etcd *etcd) {
    if (etcd == NULL) {
        return;
    }
    CHECK(!rpc_on_thread(etcd->rpc));
    enum status status = thread_join(&etcd->clock, instant_add(clock_now(), span_ms(5000)));
    CHECK_OP(status, ==, STATUS_OK);
    CHECK(etcd->is_closed);
    endpoints_close(etcd);
    free(etcd);
}
