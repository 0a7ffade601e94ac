/* kvlink: KV chunks over UCX eager active messages into armed slots.
 *
 * One link = one UCX context, one worker and one thread, the only user of that worker. As receiver
 * (D) it has no endpoint and never an outstanding UCX operation: the handler checks each chunk
 * against its armed slot and copies it into D's pages with the checksum in the copy loop, or drops
 * and counts it. As sender (P) it keeps one endpoint per peer and a bounded window of bytes in
 * flight, and sums nothing: the rows' writer did. Every function may be called from any thread (one
 * at a time per slot, peer and op), never blocks on the network, and only posts; outcomes come
 * through the callbacks, on the link thread, which must not block and may call the functions of
 * this header other than kvlink_stop and kvlink_destroy. A completed send means "the pages may be
 * reused", never "delivered". */
#ifndef KVLINK_KVLINK_H
#define KVLINK_KVLINK_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/status.h"
#include "base/time.h"

struct kvlink;
struct kv_layout;

/* Bytes that kvlink_address never exceeds. */
#define KVLINK_ADDRESS_MAX 1024u

enum kvlink_transport {
    KVLINK_TRANSPORT_TCP = 0,
    /* Shared memory. UCX 1.13: all senders share one queue at the receiver, and one that is killed
     * in the middle of writing blocks it for the others until the receiver restarts. For machines
     * where all workers live and die together. */
    KVLINK_TRANSPORT_SHM,
    KVLINK_TRANSPORT_AUTO, /* SHM to peers on this host, with what is said there; TCP to others */
};

/* Why a slot can no longer become covered. A chunk whose slot, generation or key does not match is
 * dropped and counted instead: it proves nothing about the slot. */
enum kvlink_bad {
    KVLINK_BAD_CHECKSUM = 1, /* payload and header disagree */
    KVLINK_BAD_RANGE,        /* tokens outside [token_first, token_end) */
    KVLINK_BAD_LAYOUT,       /* no such component, or not the byte count that the layout gives */
    KVLINK_BAD_GAPS,         /* more separate ranges of one component than a slot keeps track of */
};

/* All run on the link thread; context is config.context. */
struct kvlink_callbacks {
    /* Verified, new bytes of the slot so far; at most once per slot and loop turn. */
    void (*on_progress)(void *context, uint64_t slot, uint64_t bytes);
    /* Once: every byte of every component over the armed range is verified and in the pages. */
    void (*on_covered)(void *context, uint64_t slot, uint64_t bytes);
    /* Once: the slot stays armed (and drops) until it is disarmed. */
    void (*on_bad)(void *context, uint64_t slot, enum kvlink_bad reason);
    /* Exactly once per kvlink_disarm; no byte is written into the slot's pages from here on. */
    void (*on_disarmed)(void *context, uint64_t slot);
    /* Exactly once per accepted kvlink_send: the link no longer reads the source pages. STATUS_OK,
     * STATUS_CANCELLED (the peer was closed) or STATUS_UNAVAILABLE (the peer failed). */
    void (*on_sent)(void *context, uint64_t op, enum status status);
    /* At most once per peer: no further send will succeed; the owner calls kvlink_close. */
    void (*on_peer_failed)(void *context, uint64_t peer, enum status status);
    /* Exactly once per kvlink_close, after the last on_sent of the peer; the id may be reused. */
    void (*on_closed)(void *context, uint64_t peer);
};

struct kvlink_config {
    const struct kv_layout *layout; /* borrowed for the link's life */
    void *kv;                       /* page 0; page_count * layout->page_bytes bytes, borrowed */
    uint32_t page_count;
    const uint64_t *sums; /* sender: of the pool's rows, see kvlink_sum_rows; borrowed; else NULL */
    enum kvlink_transport transport;
    uint16_t port;            /* the one TCP port; 0 = any free one */
    const char *device;       /* network interface name, or NULL */
    const char *host;         /* with device NULL: use the interface that has this address or name;
                                 NULL = the first interface that is up and not loopback, else lo */
    uint32_t slots_max;       /* receiver: slot indices are < slots_max; 0 = sends only */
    uint32_t slot_tokens_max; /* token_end of an arm is at most this */
    uint32_t peers_max;       /* sender: peers not yet closed; 0 = receives only */
    uint32_t ops_max;         /* sender: sends not yet ended, all peers together */
    uint32_t op_tokens_max;   /* token_count of a send is at most this */
    uint32_t window_bytes;    /* in flight per peer; 0 = 8 MiB */
    struct kvlink_callbacks callbacks; /* those of a role that is switched off may be NULL */
    void *context;
};

/* The slot that P will name. pages: local page numbers of the whole sequence from token 0 in units
 * of layout.page_tokens, borrowed until return; page_count * page_tokens >= token_end. */
struct kvlink_arm {
    uint64_t slot; /* index in the low 32 bits, generation in the high */
    uint64_t key;
    uint32_t token_first; /* first missing token */
    uint32_t token_end;   /* > token_first */
    uint32_t page_count;
    const uint32_t *pages;
};

/* One range of tokens of consecutive components. pages: source pages of the sequence from token 0,
 * borrowed until return; the pages' contents must not change until on_sent. */
struct kvlink_send {
    uint64_t op;   /* echoed in on_sent */
    uint64_t peer; /* must be connected and not closed */
    uint64_t slot; /* the receiver's */
    uint64_t key;
    uint32_t component_first;
    uint32_t component_count;
    uint32_t token_first;
    uint32_t token_count;
    uint32_t page_count;
    const uint32_t *pages;
};

struct kvlink_counters {
    uint64_t chunks_received; /* all, whatever became of them */
    uint64_t chunks_accepted; /* verified, with at least one new byte */
    uint64_t bytes_accepted;
    uint64_t dropped_header;   /* not a chunk header of this version, or sizes disagree */
    uint64_t dropped_unknown;  /* no such slot armed, or another generation */
    uint64_t dropped_key;      /* wrong key */
    uint64_t dropped_covered;  /* nothing in it that was not covered already */
    uint64_t dropped_bad_slot; /* the slot was bad before */
    uint64_t bad_checksum;     /* slots that became bad, by reason */
    uint64_t bad_range;
    uint64_t bad_layout;
    uint64_t bad_gaps;
    uint64_t chunks_sent; /* handed to UCX */
    uint64_t bytes_sent;
    uint64_t ops_ended_ok;
    uint64_t ops_ended_failed;
    uint64_t peers_failed;
    uint64_t slots_armed;          /* now */
    uint64_t peers_open;           /* now */
    uint64_t ops_outstanding;      /* now */
    uint64_t requests_outstanding; /* now: UCX operations of ours; always 0 at a receiver */
};

/* Entries of the table of row sums that belongs to a pool of so many pages. Zero is the sum of no
 * row that anybody will ever see: a table that starts as zeros sends nothing that was not summed.
 */
uint64_t kvlink_sum_count(const struct kv_layout *layout, uint32_t page_count);
/* Takes the sums of rows that were just written: tokens [token_in_page, token_in_page + count) of a
 * component in a page. Whoever writes rows that may be sent calls this on the same thread, while
 * they are in its cache and before kvlink_send names them; what happens to the rows afterwards, up
 * to the receiver's pages, spoils the receiver's slot. Any thread, not twice at once for a row. */
void kvlink_sum_rows(const struct kv_layout *layout, const void *kv, uint64_t *sums, uint32_t page,
                     uint32_t component, uint32_t token_in_page, uint32_t count);

/* Opens the port, builds everything the link will ever use and starts its thread.
 * Errors, with a sentence in *why (may be NULL): STATUS_INVALID (configuration), STATUS_EXISTS (the
 * port is taken), STATUS_NOT_FOUND (no such device or host), STATUS_INTERNAL (UCX said no). */
MUST_USE enum status kvlink_create(const struct kvlink_config *config, struct writer *why,
                                   struct kvlink **link_out);

/* What a receiver puts into Accept; constant for the link's life, the link's memory. */
struct bytes kvlink_address(const struct kvlink *link);
/* The TCP port, or 0 with KVLINK_TRANSPORT_SHM. */
uint16_t kvlink_port(const struct kvlink *link);
/* The network interface in use, or "" with KVLINK_TRANSPORT_SHM. */
const char *kvlink_device(const struct kvlink *link);

/* Arms a slot at once: a chunk that arrives after the return finds it. STATUS_EXISTS if the index
 * is armed (its on_disarmed has not run yet), STATUS_RANGE for an index, range or page outside the
 * bounds; nothing changed then. */
MUST_USE enum status kvlink_arm(struct kvlink *link, const struct kvlink_arm *arm);
/* Starts disarming; ended by on_disarmed. STATUS_NOT_FOUND (no event follows) if this slot with
 * this generation is not armed or is being disarmed already. */
MUST_USE enum status kvlink_disarm(struct kvlink *link, uint64_t slot);

/* Starts an endpoint to a receiver. address: from its kvlink_address, borrowed until return.
 * STATUS_INVALID (not such an address, or one without a transport in common), STATUS_EXISTS (id in
 * use), STATUS_BUSY (peers_max). A failure found later is on_peer_failed. */
MUST_USE enum status kvlink_connect(struct kvlink *link, uint64_t peer, struct bytes address);
/* Queues one op; first in, first out per peer. STATUS_NOT_FOUND (peer unknown or closing),
 * STATUS_RANGE (components, tokens or pages outside the bounds), STATUS_BUSY (ops_max); no on_sent
 * follows then. */
MUST_USE enum status kvlink_send(struct kvlink *link, const struct kvlink_send *send);
/* Force-closes the endpoint: outstanding ops end with STATUS_CANCELLED, then on_closed.
 * STATUS_NOT_FOUND (no event follows) if the peer is unknown or closing already. */
MUST_USE enum status kvlink_close(struct kvlink *link, uint64_t peer);

/* Closes all peers, disarms all slots (their events still run), counts requests to zero and ends
 * the thread. STATUS_TIMEOUT if that took longer than `bound`: the link then may not be destroyed
 * and the process should leave by _exit. Not from a callback. */
MUST_USE enum status kvlink_stop(struct kvlink *link, struct span bound);
/* After kvlink_stop returned STATUS_OK. Accepts NULL. */
void kvlink_destroy(struct kvlink *link);
/* Instead of kvlink_destroy, for a process that is about to end: leaves UCX's own memory and
 * sockets to the system. UCX 1.13 can assert while it destroys a worker that somebody is just
 * connecting to. */
void kvlink_abandon(struct kvlink *link);

void kvlink_read_counters(const struct kvlink *link, struct kvlink_counters *counters_out);

#endif
