#include "kvlink/kvlink.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "kvlink/link.h"
#include "runtime/clock.h"
#include "runtime/log.h"

/* UCX progress calls before mail is looked at. Over TCP each may bring 1 MiB of chunks: a disarm
 * waits for at most some milliseconds of copying. */
#define PROGRESS_PER_TURN 4u
#define WAIT_MAX_MS       100
#define BEAT_LIMIT_MS     1000

/* ---- the link thread ---- */

static void wake(void *arg) {
    struct kvlink *link = arg;
    ucs_status_t status = ucp_worker_signal(link->worker);
    if (status != UCS_OK) {
        LOG_WARN("signalling the kv worker failed", LOG_TEXT("cause", ucs_status_string(status)));
    }
}

static void run_stop(struct mail *mail, void *arg) {
    (void)mail;
    struct kvlink *link = arg;
    link->is_ending = true;
}

static void link_wait(struct kvlink *link) {
    ucs_status_t status = ucp_worker_arm(link->worker);
    if (status == UCS_ERR_BUSY) {
        return; /* something came in between: progress again */
    }
    if (status != UCS_OK) {
        LOG_WARN("arming the kv worker failed", LOG_TEXT("cause", ucs_status_string(status)));
    }
    struct pollfd fd = {.fd = link->worker_fd, .events = POLLIN};
    if (poll(&fd, 1, WAIT_MAX_MS) < 0 && errno != EINTR) {
        LOG_WARN("waiting for kv events failed", LOG_ERRNO("cause", errno));
    }
}

static void link_run(struct thread *self, void *arg) {
    struct kvlink *link = arg;
    for (;;) {
        thread_beat(&self->beat);
        uint32_t progressed = 0;
        while (progressed < PROGRESS_PER_TURN && ucp_worker_progress(link->worker) != 0) {
            progressed++;
        }
        /* Before mail: what the handler saw is told before a disarm that came after it. */
        link_tell_slots(link);
        uint32_t ran = mail_run_all(mailbox_take_all(&link->mailbox), link);
        if (link->is_ending) {
            link_disarm_all(link);
            link_close_all(link);
        }
        bool has_more = link_pump(link);
        link_settle(link);
        if (link->is_ending && link_slots_are_free(link) && link_peers_are_free(link)) {
            break;
        }
        if (progressed == 0 && ran == 0 && !has_more) {
            link_wait(link); /* spinning first was measured and gained nothing */
        }
    }
    CHECK_OP(atomic_load(&link->counts.requests_outstanding), ==, 0);
    CHECK(mailbox_close(&link->mailbox) == NULL);
}

/* ---- making and unmaking ---- */

static void *take_memory(size_t count, size_t size) {
    void *memory = calloc(count > 0 ? count : 1, size);
    CHECK(memory != NULL);
    return memory;
}

static enum status check_config(const struct kvlink_config *config, struct writer *why) {
    const struct kv_layout *layout = config->layout;
    if (config->kv == NULL || config->page_count == 0 || layout == NULL) {
        writer_printf(why, "the KV link needs a layout and at least one page");
        return STATUS_INVALID;
    }
    for (uint32_t c = 0; c < layout->component_count; c++) {
        if (layout->components[c].row_bytes > CHUNK_BYTES_MAX) {
            writer_printf(why, "component %s of layer %u has rows of %u bytes; a chunk holds %u",
                          layout->components[c].name, layout->components[c].layer,
                          layout->components[c].row_bytes, CHUNK_BYTES_MAX);
            return STATUS_INVALID;
        }
    }
    if ((config->slots_max > 0 && config->slot_tokens_max == 0) ||
        (config->peers_max > 0 && (config->ops_max == 0 || config->op_tokens_max == 0))) {
        writer_printf(why, "the KV link's limits must not be 0 where it has slots or peers");
        return STATUS_INVALID;
    }
    if (config->peers_max > 0 && config->sums == NULL) {
        writer_printf(why, "a KV link that sends needs the sums of the pool's rows");
        return STATUS_INVALID;
    }
    if (config->window_bytes > LINK_WINDOW_MAX || config->peers_max > 65536 ||
        config->slots_max > 1u << 20) {
        writer_printf(why, "the KV link's window, peers or slots are out of bounds");
        return STATUS_INVALID;
    }
    return STATUS_OK;
}

static void make_tables(struct kvlink *link) {
    const struct kvlink_config *config = &link->config;
    uint32_t page_tokens = link->layout->page_tokens;
    uint32_t components = link->layout->component_count;
    link->pages_per_slot =
        config->slot_tokens_max > 0 ? (config->slot_tokens_max - 1) / page_tokens + 1 : 0;
    link->slots = take_memory(config->slots_max, sizeof(struct slot));
    link->slot_pages =
        take_memory((size_t)config->slots_max * link->pages_per_slot, sizeof(uint32_t));
    link->slot_coverage =
        take_memory((size_t)config->slots_max * components, sizeof(struct coverage));
    link->dirty_slots = take_memory(config->slots_max, sizeof(uint32_t));
    for (uint32_t i = 0; i < config->slots_max; i++) {
        link->slots[i].pages = link->slot_pages + (size_t)i * link->pages_per_slot;
        link->slots[i].coverage = link->slot_coverage + (size_t)i * components;
    }
    /* a range of n tokens touches at most this many pages */
    link->pages_per_op =
        config->op_tokens_max > 0 ? (config->op_tokens_max - 1) / page_tokens + 2 : 0;
    link->peers = take_memory(config->peers_max, sizeof(struct peer));
    link->ops = take_memory(config->ops_max, sizeof(struct op));
    link->op_pages = take_memory((size_t)config->ops_max * link->pages_per_op, sizeof(uint32_t));
    link->chunks =
        take_memory((size_t)config->peers_max * LINK_CHUNKS_PER_PEER, sizeof(struct chunk));
    uint32_t map_limit = config->peers_max > 0 ? config->peers_max : 1;
    link->peer_map_memory = take_memory(map_bytes(map_limit), 1);
    map_init(&link->peer_map, map_limit, link->peer_map_memory);
    link_send_init(link);
}

enum status kvlink_create(const struct kvlink_config *config, struct writer *why,
                          struct kvlink **link_out) {
    char unread[256];
    struct writer nowhere;
    writer_init(&nowhere, unread, sizeof(unread));
    why = why != NULL ? why : &nowhere;
    enum status status = check_config(config, why);
    if (status != STATUS_OK) {
        return status;
    }
    struct kvlink *link = take_memory(1, sizeof(*link));
    link->config = *config;
    if (link->config.window_bytes == 0) {
        link->config.window_bytes = LINK_WINDOW_BYTES;
    }
    link->layout = config->layout;
    link->kv = config->kv;
    link->worker_fd = -1;
    link->cpu = copysum_best();
    link->stop_mail.run = run_stop;
    mailbox_init(&link->mailbox, wake, link);
    pthread_mutex_init(&link->tables_lock, NULL);
    make_tables(link);
    status = link_ucx_open(link, why);
    if (status == STATUS_OK) {
        struct thread_config thread = {
            .name = "link", .fn = link_run, .arg = link, .beat_limit = span_ms(BEAT_LIMIT_MS)};
        status = thread_start(&link->thread, &thread);
        if (status != STATUS_OK) {
            writer_printf(why, "no thread for the KV link: %s", status_name(status));
        }
    }
    if (status != STATUS_OK) {
        kvlink_destroy(link);
        return status;
    }
    link->is_thread_started = true;
    *link_out = link;
    return STATUS_OK;
}

enum status kvlink_stop(struct kvlink *link, struct span bound) {
    struct instant deadline = instant_add(clock_now(), bound);
    if (!link->is_thread_started) {
        return STATUS_OK;
    }
    if (!atomic_exchange(&link->is_stopping, true)) {
        thread_expect_end(&link->thread);
        bool posted = mailbox_post(&link->mailbox, &link->stop_mail);
        CHECK(posted); /* the thread closes the box only after this mail */
    }
    enum status status = thread_join(&link->thread, deadline);
    if (status != STATUS_OK) {
        LOG_ERROR("kv link does not come to rest: leave the process without destroying it",
                  LOG_U64("requests", atomic_load(&link->counts.requests_outstanding)),
                  LOG_U64("peers", atomic_load(&link->counts.peers_open)),
                  LOG_U64("slots", atomic_load(&link->counts.slots_armed)));
        return STATUS_TIMEOUT;
    }
    link->is_thread_started = false;
    return STATUS_OK;
}

void kvlink_destroy(struct kvlink *link) {
    if (link == NULL) {
        return;
    }
    CHECK(!link->is_thread_started); /* kvlink_stop first, and only if it was quiet */
    link_ucx_close(link);
    (void)mailbox_close(&link->mailbox); /* empty: the thread closed it, or never ran */
    mailbox_fini(&link->mailbox);
    pthread_mutex_destroy(&link->tables_lock);
    free(link->peer_map_memory);
    free(link->chunks);
    free(link->op_pages);
    free(link->ops);
    free(link->peers);
    free(link->dirty_slots);
    free(link->slot_coverage);
    free(link->slot_pages);
    free(link->slots);
    free(link);
}

void kvlink_abandon(struct kvlink *link) {
    static struct kvlink *abandoned; /* still reachable: left on purpose, not leaked */
    CHECK(!link->is_thread_started);
    abandoned = link;
    (void)abandoned;
}

/* ---- what is known about it ---- */

struct bytes kvlink_address(const struct kvlink *link) {
    return (struct bytes){link->address, link->address_len};
}

uint16_t kvlink_port(const struct kvlink *link) {
    return (link->transports & LINK_TRANSPORT_TCP) != 0 ? link->port : 0;
}

const char *kvlink_device(const struct kvlink *link) {
    return link->device;
}

void kvlink_read_counters(const struct kvlink *link, struct kvlink_counters *counters_out) {
    const struct link_counts *counts = &link->counts;
    struct kvlink_counters out = {
        .chunks_received = atomic_load(&counts->chunks_received),
        .chunks_accepted = atomic_load(&counts->chunks_accepted),
        .bytes_accepted = atomic_load(&counts->bytes_accepted),
        .dropped_header = atomic_load(&counts->dropped_header),
        .dropped_unknown = atomic_load(&counts->dropped_unknown),
        .dropped_key = atomic_load(&counts->dropped_key),
        .dropped_covered = atomic_load(&counts->dropped_covered),
        .dropped_bad_slot = atomic_load(&counts->dropped_bad_slot),
        .bad_checksum = atomic_load(&counts->bad_checksum),
        .bad_range = atomic_load(&counts->bad_range),
        .bad_layout = atomic_load(&counts->bad_layout),
        .bad_gaps = atomic_load(&counts->bad_gaps),
        .chunks_sent = atomic_load(&counts->chunks_sent),
        .bytes_sent = atomic_load(&counts->bytes_sent),
        .ops_ended_ok = atomic_load(&counts->ops_ended_ok),
        .ops_ended_failed = atomic_load(&counts->ops_ended_failed),
        .peers_failed = atomic_load(&counts->peers_failed),
        .slots_armed = atomic_load(&counts->slots_armed),
        .peers_open = atomic_load(&counts->peers_open),
        .ops_outstanding = atomic_load(&counts->ops_outstanding),
        .requests_outstanding = atomic_load(&counts->requests_outstanding),
    };
    *counters_out = out;
}
