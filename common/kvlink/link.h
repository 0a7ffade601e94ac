/* Inside of the link, shared by the room's files and nobody else.
 *
 * Who owns what: a slot is its caller's while SLOT_FREE and the link thread's otherwise; arming
 * publishes it with a release store, so the handler sees it at once. Peers and ops are allocated
 * and freed under tables_lock (a leaf); between, they are the link thread's. Everything else is the
 * link thread's alone. */
#ifndef KVLINK_LINK_H
#define KVLINK_LINK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "base/map.h"
#include "base/pool.h"
#include "base/status.h"
#include "core/layout.h"
#include "kvlink/copysum.h"
#include "kvlink/coverage.h"
#include "kvlink/kvlink.h"
#include "runtime/mail.h"
#include "runtime/thread.h"
#include "wire/chunk.h"

#include <ucp/api/ucp.h>

#define LINK_AM_ID 1u
/* Of the address that a receiver gives. Part of it: the version of chunks, and the SEG_SIZE and MM_
 * settings of ucx.c. UCX 1.13 assumes, unchecked, that both ends of a shared-memory queue have the
 * same, and that no segment over TCP is larger than the receiver's; else one of the two aborts.
 * Change them only with this number. */
#define LINK_ADDRESS_VERSION 2u
#define LINK_NONE            UINT32_MAX
#define LINK_CHUNKS_PER_PEER 32u
#define LINK_IOV_MAX         64u
#define LINK_PACK_BYTES      (64u * 1024u) /* components below this share a chunk */
/* Runs of rows that the kernel takes from where they lie, in one chunk. UCX 1.13 makes two messages
 * of a send over TCP with more than 15 (traced), and the receiver joins them with one more copy;
 * with the three headers 13 are 16 pieces, which is UCX's own limit for a send (UCP_MAX_IOV). */
#define LINK_RUNS_IN_PLACE 13u
/* Pages with shorter runs are copied into one piece: more chunks would cost more than the copy. */
#define LINK_RUN_BYTES_MIN (8u * 1024u)
/* UCX 1.13 counts the bytes of a shared-memory segment in 16 bits; more is cut and put together
 * again with one more copy. */
#define LINK_SHM_CHUNK_BYTES (60u * 1024u)
#define LINK_WINDOW_BYTES    (1024u * 1024u)
#define LINK_WINDOW_MAX      (64u * 1024u * 1024u)
#define LINK_DEVICE_CAP      32u
#define LINK_FDS_MAX         65536u
#define LINK_PEER_SOCKETS    4u

enum slot_state {
    SLOT_FREE = 0,  /* the caller may arm it */
    SLOT_ARMED,     /* the handler accepts */
    SLOT_DISARMING, /* the handler drops; mail to the link thread is on its way */
};

struct slot {
    struct mail mail; /* disarm; first member */
    _Atomic uint32_t state;
    uint32_t token_first;
    uint32_t token_end;
    uint64_t id;
    uint64_t key;
    uint64_t bytes_total;
    uint64_t bytes_covered;
    uint32_t *pages;           /* of the whole sequence from token 0 */
    struct coverage *coverage; /* one per component */
    enum kvlink_bad bad;       /* 0 = none */
    bool is_dirty;             /* in link->dirty_slots */
    bool is_reported;          /* covered or bad was called back */
};

enum peer_state {
    PEER_FREE = 0,
    PEER_OPEN,
    PEER_CLOSING, /* kvlink_close was called */
};

struct peer {
    struct mail connect_mail; /* first member */
    struct mail close_mail;
    struct kvlink *link;
    uint64_t id;
    enum peer_state state; /* under tables_lock */
    uint32_t ops_live;     /* under tables_lock: taken and not yet ended */
    uint32_t next_free;
    ucp_ep_h ep; /* NULL before connecting and after closing */
    uint32_t requests;
    uint32_t bytes_in_flight;
    uint32_t chunks_in_flight;
    uint32_t op_head; /* ops not yet cut to the end, first in, first out */
    uint32_t op_tail;
    struct link ready;    /* has something to send and room for it */
    struct link ended;    /* something happened that link_settle must look at */
    bool is_failed;       /* no send will succeed */
    bool is_fail_told;    /* on_peer_failed was called, or is no longer of interest */
    bool is_closing;      /* the close mail arrived */
    bool is_opened;       /* the connect mail arrived */
    uint32_t chunk_bytes; /* what a chunk is cut at */
    bool is_in_place;     /* the transport can take runs from where they lie */
    uint16_t port;        /* of the receiver; 0 = none */
    uint32_t socket_count;
    struct {
        int fd;
        uint64_t inode;
    } sockets[LINK_PEER_SOCKETS];
    uint32_t address_len;
    uint8_t address[KVLINK_ADDRESS_MAX];
};

struct op {
    struct mail mail; /* first member */
    uint64_t id;
    uint64_t slot;
    uint64_t key;
    uint32_t peer; /* index */
    uint32_t component_first;
    uint32_t component_end;
    uint32_t token_first;
    uint32_t token_end;
    uint32_t component; /* what to cut next */
    uint32_t token;
    uint32_t chunks; /* in flight */
    uint32_t next;   /* in the peer's queue, the ended list, or the free list */
    enum status status;
    bool is_cut;     /* nothing left to cut */
    bool is_ended;   /* in the ended list */
    uint32_t *pages; /* of tokens from page token_first / page_tokens on */
};

/* One UCX send. UCX 1.13: header and iov must outlive the request. */
struct chunk {
    uint8_t header[CHUNK_HEADER_BYTES];
    struct kvlink *link;
    uint32_t op;
    uint32_t peer;
    uint32_t bytes;
    uint32_t iov_count;
    uint32_t next_free;
    ucp_dt_iov_t iov[LINK_IOV_MAX];
};

struct link_counts {
    _Atomic uint64_t chunks_received;
    _Atomic uint64_t chunks_accepted;
    _Atomic uint64_t bytes_accepted;
    _Atomic uint64_t dropped_header;
    _Atomic uint64_t dropped_unknown;
    _Atomic uint64_t dropped_key;
    _Atomic uint64_t dropped_covered;
    _Atomic uint64_t dropped_bad_slot;
    _Atomic uint64_t bad_checksum;
    _Atomic uint64_t bad_range;
    _Atomic uint64_t bad_layout;
    _Atomic uint64_t bad_gaps;
    _Atomic uint64_t chunks_sent;
    _Atomic uint64_t bytes_sent;
    _Atomic uint64_t ops_ended_ok;
    _Atomic uint64_t ops_ended_failed;
    _Atomic uint64_t peers_failed;
    _Atomic uint64_t slots_armed;
    _Atomic uint64_t peers_open;
    _Atomic uint64_t ops_outstanding;
    _Atomic uint64_t requests_outstanding;
};

struct kvlink {
    struct kvlink_config config;
    const struct kv_layout *layout;
    unsigned char *kv;
    uint32_t pages_per_slot;
    uint32_t pages_per_op;

    ucp_context_h context;
    ucp_worker_h worker;
    ucp_datatype_t chunk_type; /* copies a struct chunk's runs into one piece */
    enum copysum_cpu cpu;
    int worker_fd;
    uint16_t port;
    char device[LINK_DEVICE_CAP];
    uint32_t transports; /* bits of enum link_transport */
    uint64_t host;       /* the same for links that share memory */
    uint8_t address[KVLINK_ADDRESS_MAX];
    uint32_t address_len;

    struct thread thread;
    bool is_thread_started;
    struct mailbox mailbox;
    struct mail stop_mail;
    atomic_bool is_stopping; /* set by kvlink_stop: nothing new begins */
    bool is_ending;          /* the stop mail arrived */

    struct slot *slots;
    uint32_t *slot_pages;
    struct coverage *slot_coverage;
    uint32_t *dirty_slots; /* something to call back after this turn's progress */
    uint32_t dirty_count;

    pthread_mutex_t tables_lock; /* guards the next six, and what struct peer says */
    struct map peer_map;
    void *peer_map_memory;
    uint32_t peer_free;
    uint32_t op_free;
    uint32_t peers_live;
    struct peer *peers;
    struct op *ops;
    uint32_t *op_pages;
    struct chunk *chunks;
    uint32_t chunk_free;
    struct list ready;
    struct list ended;
    uint64_t fds_before[LINK_FDS_MAX / 64]; /* bitmap, while an endpoint is made */
    uint32_t ended_head;                    /* ops */
    uint32_t ended_tail;

    struct link_counts counts;
};

/* Bits of the transports in an address. */
enum link_transport {
    LINK_TRANSPORT_TCP = 1,
    LINK_TRANSPORT_SHM = 2,
};

static inline void link_count(_Atomic uint64_t *counter, uint64_t by) {
    atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}
static inline void link_uncount(_Atomic uint64_t *counter, uint64_t by) {
    atomic_fetch_sub_explicit(counter, by, memory_order_relaxed);
}

/* ucx.c: context, worker, port and device. link->config is filled in. */
MUST_USE enum status link_ucx_open(struct kvlink *link, struct writer *why);
void link_ucx_close(struct kvlink *link);
/* The UCX part of an address, or STATUS_INVALID. *is_same_host_out: UCX will use shared memory. */
MUST_USE enum status link_address_open(const struct kvlink *link, struct bytes address,
                                       struct bytes *ucx_out, bool *is_same_host_out,
                                       uint16_t *port_out);
/* Around ucp_ep_create: remembers which sockets it opened. */
void link_sockets_before(struct kvlink *link);
void link_sockets_after(struct peer *peer);
/* Shuts them down. UCX 1.13 leaves a force-closed TCP endpoint half open until the receiver closes
 * its half. If it was waiting for room to send, the receiver's goodbye and that room can arrive in
 * one event: the goodbye frees the endpoint, the room is then given to freed memory, and the
 * process crashes. An end of stream ends the endpoint too, but later and in order. */
void link_sockets_shut(const struct peer *peer);

/* receive.c: the handler and what it leaves to call back. Link thread. */
ucs_status_t link_on_chunk(void *arg, const void *header, size_t header_len, void *data, size_t len,
                           const ucp_am_recv_param_t *param);
void link_tell_slots(struct kvlink *link);
void link_disarm_all(struct kvlink *link);
bool link_slots_are_free(const struct kvlink *link);

/* send.c. Link thread. */
void link_send_init(struct kvlink *link);
MUST_USE ucs_status_t link_chunk_type_make(struct kvlink *link);
/* Hands up to a bounded number of chunks to UCX; true if there may be more to hand over. */
bool link_pump(struct kvlink *link);
/* Ends ops and peers that have nothing outstanding, and calls back. */
void link_settle(struct kvlink *link);
void link_close_all(struct kvlink *link);
bool link_peers_are_free(struct kvlink *link);

#endif
