#include "kvlink/link.h"

#include <string.h>

#include "base/check.h"
#include "base/prng.h"
#include "kvlink/sum.h"
#include "runtime/log.h"

/* Chunks handed to UCX per loop turn: at 256 KiB about 10 ms of work, so that mail and arrivals
 * never wait longer. */
#define PUMP_CHUNKS_PER_TURN 64u

/* ---- lists of peers ---- */

static void ready_push(struct kvlink *link, struct peer *peer) {
    if (!peer->ready.is_linked) {
        list_push_back(&link->ready, &link->peers[0].ready, sizeof(struct peer),
                       (uint32_t)(peer - link->peers));
    }
}

static void ready_remove(struct kvlink *link, struct peer *peer) {
    list_remove(&link->ready, &link->peers[0].ready, sizeof(struct peer),
                (uint32_t)(peer - link->peers));
}

static void ended_push(struct kvlink *link, struct peer *peer) {
    if (!peer->ended.is_linked) {
        list_push_back(&link->ended, &link->peers[0].ended, sizeof(struct peer),
                       (uint32_t)(peer - link->peers));
    }
}

/* ---- chunks ---- */

static struct chunk *chunk_take(struct kvlink *link) {
    CHECK_OP(link->chunk_free, !=, LINK_NONE); /* peers_max * LINK_CHUNKS_PER_PEER exist */
    struct chunk *chunk = &link->chunks[link->chunk_free];
    link->chunk_free = chunk->next_free;
    return chunk;
}

static void chunk_give(struct kvlink *link, struct chunk *chunk) {
    chunk->next_free = link->chunk_free;
    link->chunk_free = (uint32_t)(chunk - link->chunks);
}

/* ---- ops ---- */

static void op_check_end(struct kvlink *link, struct op *op) {
    if (op->is_ended || op->chunks != 0 || (!op->is_cut && op->status == STATUS_OK)) {
        return;
    }
    op->is_ended = true;
    op->next = LINK_NONE;
    uint32_t index = (uint32_t)(op - link->ops);
    if (link->ended_tail == LINK_NONE) {
        link->ended_head = index;
    } else {
        link->ops[link->ended_tail].next = index;
    }
    link->ended_tail = index;
}

static void op_queue_pop(struct kvlink *link, struct peer *peer) {
    peer->op_head = link->ops[peer->op_head].next;
    if (peer->op_head == LINK_NONE) {
        peer->op_tail = LINK_NONE;
    }
}

/* Ends what is queued at a peer that will send no more; ops with chunks in flight end with them. */
static void peer_drop_queue(struct kvlink *link, struct peer *peer, enum status status) {
    while (peer->op_head != LINK_NONE) {
        struct op *op = &link->ops[peer->op_head];
        op_queue_pop(link, peer);
        if (op->status == STATUS_OK) {
            op->status = status;
        }
        op_check_end(link, op);
    }
    ready_remove(link, peer);
}

static enum status peer_status(const struct peer *peer) {
    return peer->is_closing ? STATUS_CANCELLED : STATUS_UNAVAILABLE;
}

static void peer_fail(struct kvlink *link, struct peer *peer, ucs_status_t status) {
    if (peer->is_failed || peer->is_closing) {
        return;
    }
    peer->is_failed = true;
    link_count(&link->counts.peers_failed, 1);
    LOG_WARN("kv peer failed", LOG_HEX("peer", peer->id),
             LOG_TEXT("cause", ucs_status_string(status)));
    peer_drop_queue(link, peer, STATUS_UNAVAILABLE);
    ended_push(link, peer);
}

static bool peer_can_send(const struct peer *peer, uint32_t window) {
    return peer->op_head != LINK_NONE && peer->chunks_in_flight < LINK_CHUNKS_PER_PEER &&
           peer->bytes_in_flight < window;
}

/* ---- cutting an op into chunks ---- */

/* Which row of the pool's this is, and so where its sum is. */
static uint64_t row_number(const struct kv_layout *layout, uint32_t page, uint32_t component,
                           uint32_t token_in_page) {
    return ((uint64_t)page * layout->component_count + component) * layout->page_tokens +
           token_in_page;
}

uint64_t kvlink_sum_count(const struct kv_layout *layout, uint32_t page_count) {
    return row_number(layout, page_count, 0, 0);
}

void kvlink_sum_rows(const struct kv_layout *layout, const void *kv, uint64_t *sums, uint32_t page,
                     uint32_t component, uint32_t token_in_page, uint32_t count) {
    copysum_rows(copysum_best(), NULL,
                 (const uint8_t *)kv + layout_row_offset(layout, page, component, token_in_page),
                 layout->components[component].row_bytes, count,
                 sums + row_number(layout, page, component, token_in_page));
}

/* Adds the source runs of tokens [first, end) of a component while there are at most runs_max.
 * Returns the token after the last one that went in. */
static uint32_t chunk_add_rows(const struct kvlink *link, const struct op *op, struct chunk *chunk,
                               uint32_t component, uint32_t first, uint32_t end,
                               uint32_t runs_max) {
    const struct kv_layout *layout = link->layout;
    uint32_t row_bytes = layout->components[component].row_bytes;
    uint32_t page_base = op->token_first / layout->page_tokens;
    while (first < end) {
        uint32_t in_page = first % layout->page_tokens;
        uint32_t run = layout->page_tokens - in_page;
        run = run < end - first ? run : end - first;
        uint8_t *from =
            link->kv + layout_row_offset(layout, op->pages[first / layout->page_tokens - page_base],
                                         component, in_page);
        size_t len = (size_t)run * row_bytes;
        ucp_dt_iov_t *last = chunk->iov_count > 0 ? &chunk->iov[chunk->iov_count - 1] : NULL;
        if (last != NULL && (uint8_t *)last->buffer + last->length == from) {
            last->length += len;
        } else if (chunk->iov_count < runs_max) {
            chunk->iov[chunk->iov_count++] = (ucp_dt_iov_t){.buffer = from, .length = len};
        } else {
            break;
        }
        chunk->bytes += (uint32_t)len;
        first += run;
    }
    return first;
}

/* ---- sums ---- */

/* Puts the sum into the encoded header. The payload's bytes are not read: whoever wrote its rows
 * has taken their sums. */
static void chunk_seal(const struct kvlink *link, const struct op *op,
                       const struct chunk_header *header, uint8_t *bytes) {
    const struct kv_layout *layout = link->layout;
    uint32_t page_base = op->token_first / layout->page_tokens;
    uint32_t component_end = (uint32_t)header->component_first + header->component_count;
    uint32_t end = header->token_first + header->token_count;
    struct chunk_sum sum;
    chunk_sum_begin(&sum);
    for (uint32_t c = header->component_first; c < component_end; c++) {
        for (uint32_t token = header->token_first; token < end;) {
            uint32_t in_page = token % layout->page_tokens;
            uint32_t run = layout->page_tokens - in_page;
            run = run < end - token ? run : end - token;
            uint32_t page = op->pages[token / layout->page_tokens - page_base];
            chunk_sum_rows(&sum, link->config.sums + row_number(layout, page, c, in_page), run);
            token += run;
        }
    }
    chunk_set_sum(bytes, chunk_sum_end(&sum, bytes));
}

/* ---- copying many short runs into one piece ---- */

static size_t chunk_pack(void *state, size_t offset, void *to_any, size_t most) {
    const struct chunk *chunk = state;
    uint8_t *to = to_any;
    size_t len = chunk->bytes - offset;
    len = len < most ? len : most;
    size_t at = 0;     /* of the run in the payload */
    size_t copied = 0; /* of this fragment */
    for (uint32_t i = 0; i < chunk->iov_count && copied < len; i++) {
        size_t end = at + chunk->iov[i].length;
        size_t from = offset + copied;
        if (from < end) {
            size_t piece = end - from < len - copied ? end - from : len - copied;
            memcpy(to + copied, (const uint8_t *)chunk->iov[i].buffer + (from - at), piece);
            copied += piece;
        }
        at = end;
    }
    return len;
}

static void *chunk_start_pack(void *context, const void *buffer, size_t count) {
    struct kvlink *link = context;
    const struct chunk *chunk = buffer;
    (void)count;
    return &link->chunks[chunk - link->chunks];
}

static size_t chunk_packed_size(void *state) {
    return ((const struct chunk *)state)->bytes;
}

static void chunk_finish_pack(void *state) {
    (void)state; /* the chunk ends with its send */
}

ucs_status_t link_chunk_type_make(struct kvlink *link) {
    static const ucp_generic_dt_ops_t ops = {.start_pack = chunk_start_pack,
                                             .packed_size = chunk_packed_size,
                                             .pack = chunk_pack,
                                             .finish = chunk_finish_pack};
    return ucp_dt_create_generic(&ops, link, &link->chunk_type);
}

/* ---- cutting ---- */

/* Long runs are sent from where they lie, short ones are copied together. */
static uint32_t runs_per_chunk(const struct kvlink *link, const struct op *op) {
    const struct kv_layout *layout = link->layout;
    uint64_t run_bytes =
        (uint64_t)layout->page_tokens * layout->components[op->component].row_bytes;
    return link->peers[op->peer].is_in_place && run_bytes >= LINK_RUN_BYTES_MIN ? LINK_RUNS_IN_PLACE
                                                                                : LINK_IOV_MAX;
}

/* Cuts the next chunk and moves the op's cursor: a piece of one component of at most
 * CHUNK_BYTES_MAX, or several whole components where each is small. */
static void chunk_cut(struct kvlink *link, struct op *op, struct chunk *chunk) {
    const struct kv_layout *layout = link->layout;
    uint32_t bytes_max = link->peers[op->peer].chunk_bytes;
    uint32_t runs_max = runs_per_chunk(link, op);
    uint32_t component = op->component;
    uint32_t first = op->token;
    chunk->bytes = 0;
    chunk->iov_count = 0;
    uint32_t most = bytes_max / layout->components[component].row_bytes;
    most = most > 0 ? most : 1;
    uint32_t end = op->token_end - first < most ? op->token_end : first + most;
    uint32_t reached = chunk_add_rows(link, op, chunk, component, first, end, runs_max);
    uint32_t components = 1;
    if (reached < op->token_end) {
        op->token = reached;
    } else {
        bool is_whole = first == op->token_first && chunk->bytes <= LINK_PACK_BYTES;
        op->component++;
        while (is_whole && op->component < op->component_end) {
            uint64_t bytes = layout_range_bytes(layout, op->component, 1, end - first);
            if (bytes > LINK_PACK_BYTES || chunk->bytes + bytes > bytes_max) {
                break;
            }
            uint32_t iov_count = chunk->iov_count;
            size_t last_length = chunk->iov[iov_count - 1].length;
            uint32_t bytes_before = chunk->bytes;
            if (chunk_add_rows(link, op, chunk, op->component, first, end, runs_max) < end) {
                chunk->iov_count = iov_count; /* it did not fit whole: undo */
                chunk->iov[iov_count - 1].length = last_length;
                chunk->bytes = bytes_before;
                break;
            }
            op->component++;
            components++;
        }
        op->token = op->token_first;
    }
    op->is_cut = op->component == op->component_end;

    struct chunk_header header = {
        .slot = op->slot,
        .key = op->key,
        .token_first = first,
        .token_count = reached - first,
        .component_first = (uint16_t)component,
        .component_count = (uint16_t)components,
        .bytes = chunk->bytes,
    };
    chunk_encode(&header, chunk->header);
    chunk_seal(link, op, &header, chunk->header);
}

/* ---- sending ---- */

static void chunk_end(struct kvlink *link, struct chunk *chunk, ucs_status_t status) {
    struct peer *peer = &link->peers[chunk->peer];
    struct op *op = &link->ops[chunk->op];
    peer->bytes_in_flight -= chunk->bytes;
    peer->chunks_in_flight--;
    chunk_give(link, chunk);
    CHECK_OP(op->chunks, >, 0);
    op->chunks--;
    if (status != UCS_OK) {
        if (op->status == STATUS_OK) {
            op->status = peer_status(peer);
        }
        /* Request callbacks and the error handler come in either order: both mean the same. */
        peer_fail(link, peer, status);
    }
    op_check_end(link, op);
    if (peer_can_send(peer, link->config.window_bytes)) {
        ready_push(link, peer);
    }
    ended_push(link, peer);
}

static void request_end(struct kvlink *link, struct peer *peer, void *request) {
    ucp_request_free(request);
    CHECK_OP(peer->requests, >, 0);
    peer->requests--;
    link_uncount(&link->counts.requests_outstanding, 1);
}

static void on_chunk_sent(void *request, ucs_status_t status, void *arg) {
    struct chunk *chunk = arg;
    request_end(chunk->link, &chunk->link->peers[chunk->peer], request);
    chunk_end(chunk->link, chunk, status);
}

static void peer_send_chunk(struct kvlink *link, struct peer *peer) {
    uint32_t op_index = peer->op_head;
    struct op *op = &link->ops[op_index];
    struct chunk *chunk = chunk_take(link);
    chunk->op = op_index;
    chunk->peer = (uint32_t)(peer - link->peers);
    chunk_cut(link, op, chunk);
    if (op->is_cut) {
        op_queue_pop(link, peer);
    }
    op->chunks++;
    peer->bytes_in_flight += chunk->bytes;
    peer->chunks_in_flight++;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_DATATYPE,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = on_chunk_sent,
        .user_data = chunk,
        .datatype = chunk->iov_count == 1                    ? ucp_dt_make_contig(1)
                    : chunk->iov_count <= LINK_RUNS_IN_PLACE ? ucp_dt_make_iov()
                                                             : link->chunk_type,
    };
    const void *payload = chunk->iov_count == 1                    ? chunk->iov[0].buffer
                          : chunk->iov_count <= LINK_RUNS_IN_PLACE ? (const void *)chunk->iov
                                                                   : chunk;
    size_t count = chunk->iov_count == 1                    ? chunk->bytes
                   : chunk->iov_count <= LINK_RUNS_IN_PLACE ? chunk->iov_count
                                                            : 1;
    link_count(&link->counts.chunks_sent, 1);
    link_count(&link->counts.bytes_sent, chunk->bytes);
    ucs_status_ptr_t request = ucp_am_send_nbx(peer->ep, LINK_AM_ID, chunk->header,
                                               CHUNK_HEADER_BYTES, payload, count, &param);
    if (UCS_PTR_IS_PTR(request)) {
        peer->requests++;
        link_count(&link->counts.requests_outstanding, 1);
    } else {
        chunk_end(link, chunk, request == NULL ? UCS_OK : UCS_PTR_STATUS(request));
    }
}

bool link_pump(struct kvlink *link) {
    for (uint32_t i = 0; i < PUMP_CHUNKS_PER_TURN; i++) {
        uint32_t index = link->ready.head;
        if (index == LIST_NONE) {
            return false;
        }
        struct peer *peer = &link->peers[index];
        ready_remove(link, peer);
        if (!peer_can_send(peer, link->config.window_bytes)) {
            continue;
        }
        peer_send_chunk(link, peer);
        if (peer_can_send(peer, link->config.window_bytes)) {
            ready_push(link, peer); /* at the end: peers take turns */
        }
    }
    return link->ready.head != LIST_NONE;
}

/* ---- mail ---- */

static void on_ep_error(void *arg, ucp_ep_h ep, ucs_status_t status) {
    struct peer *peer = arg;
    if (peer->ep == ep) { /* else: of an endpoint closed before */
        peer_fail(peer->link, peer, status);
    }
}

static void run_connect(struct mail *mail, void *arg) {
    struct kvlink *link = arg;
    struct peer *peer = (struct peer *)(void *)mail;
    peer->is_opened = true;
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)(const void *)peer->address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_ep_error, .arg = peer},
    };
    link_sockets_before(link);
    ucs_status_t status = ucp_ep_create(link->worker, &params, &peer->ep);
    link_sockets_after(peer);
    if (status != UCS_OK) {
        peer->ep = NULL;
        peer_fail(link, peer, status);
    }
}

static void run_send(struct mail *mail, void *arg) {
    struct kvlink *link = arg;
    struct op *op = (struct op *)(void *)mail;
    struct peer *peer = &link->peers[op->peer];
    if (peer->is_closing || peer->is_failed) {
        op->status = peer_status(peer);
        op_check_end(link, op);
        return;
    }
    op->next = LINK_NONE;
    uint32_t index = (uint32_t)(op - link->ops);
    if (peer->op_tail == LINK_NONE) {
        peer->op_head = index;
    } else {
        link->ops[peer->op_tail].next = index;
    }
    peer->op_tail = index;
    if (peer_can_send(peer, link->config.window_bytes)) {
        ready_push(link, peer);
    }
}

static void on_ep_closed(void *request, ucs_status_t status, void *arg) {
    struct peer *peer = arg;
    (void)status; /* closed either way */
    request_end(peer->link, peer, request);
    ended_push(peer->link, peer);
}

static void peer_close(struct kvlink *link, struct peer *peer) {
    peer->is_closing = true;
    peer_drop_queue(link, peer, STATUS_CANCELLED);
    ucp_ep_h ep = peer->ep;
    peer->ep = NULL;
    if (ep != NULL) {
        ucp_request_param_t param = {
            .op_attr_mask =
                UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
            .flags = UCP_EP_CLOSE_FLAG_FORCE,
            .cb.send = on_ep_closed,
            .user_data = peer,
        };
        ucs_status_ptr_t request = ucp_ep_close_nbx(ep, &param);
        link_sockets_shut(peer);
        if (UCS_PTR_IS_PTR(request)) {
            peer->requests++;
            link_count(&link->counts.requests_outstanding, 1);
        } else if (UCS_PTR_IS_ERR(request)) {
            LOG_WARN("closing a kv endpoint failed", LOG_HEX("peer", peer->id),
                     LOG_TEXT("cause", ucs_status_string(UCS_PTR_STATUS(request))));
        }
    }
    ended_push(link, peer);
}

static void run_close(struct mail *mail, void *arg) {
    struct peer *peer =
        (struct peer *)(void *)((unsigned char *)mail - offsetof(struct peer, close_mail));
    peer_close(arg, peer);
}

/* ---- what the turn leaves to say ---- */

static void op_release(struct kvlink *link, struct op *op) {
    uint64_t id = op->id;
    enum status status = op->status;
    uint32_t peer = op->peer;
    pthread_mutex_lock(&link->tables_lock);
    link->peers[peer].ops_live--;
    op->next = link->op_free;
    link->op_free = (uint32_t)(op - link->ops);
    pthread_mutex_unlock(&link->tables_lock);
    link_uncount(&link->counts.ops_outstanding, 1);
    link_count(status == STATUS_OK ? &link->counts.ops_ended_ok : &link->counts.ops_ended_failed,
               1);
    link->config.callbacks.on_sent(link->config.context, id, status);
}

/* Frees the peer if it is closing and nothing is left of it. */
static void peer_check_closed(struct kvlink *link, struct peer *peer) {
    if (!peer->is_closing || peer->requests != 0 || peer->chunks_in_flight != 0) {
        return;
    }
    uint64_t id = peer->id;
    uint32_t index = (uint32_t)(peer - link->peers);
    pthread_mutex_lock(&link->tables_lock);
    bool is_quiet = peer->ops_live == 0;
    if (is_quiet) {
        bool removed = map_remove(&link->peer_map, mix64(id), index);
        CHECK(removed);
        peer->state = PEER_FREE;
        peer->next_free = link->peer_free;
        link->peer_free = index;
        link->peers_live--;
    }
    pthread_mutex_unlock(&link->tables_lock);
    if (is_quiet) {
        link_uncount(&link->counts.peers_open, 1);
        link->config.callbacks.on_closed(link->config.context, id);
    }
}

void link_settle(struct kvlink *link) {
    while (link->ended_head != LINK_NONE) {
        struct op *op = &link->ops[link->ended_head];
        link->ended_head = op->next;
        if (link->ended_head == LINK_NONE) {
            link->ended_tail = LINK_NONE;
        }
        ended_push(link, &link->peers[op->peer]);
        op_release(link, op);
    }
    uint32_t count = link->ended.count;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t index = link->ended.head;
        struct peer *peer = &link->peers[index];
        list_remove(&link->ended, &link->peers[0].ended, sizeof(struct peer), index);
        if (peer->is_failed && !peer->is_fail_told && !peer->is_closing) {
            peer->is_fail_told = true;
            link->config.callbacks.on_peer_failed(link->config.context, peer->id,
                                                  STATUS_UNAVAILABLE);
        }
        peer_check_closed(link, peer);
    }
}

void link_close_all(struct kvlink *link) {
    for (uint32_t i = 0; i < link->config.peers_max; i++) {
        struct peer *peer = &link->peers[i];
        pthread_mutex_lock(&link->tables_lock);
        bool is_ours = peer->state == PEER_OPEN && peer->is_opened;
        if (is_ours) {
            peer->state = PEER_CLOSING; /* a kvlink_close from now on is NOT_FOUND */
        }
        pthread_mutex_unlock(&link->tables_lock);
        if (is_ours) {
            peer_close(link, peer);
        }
    }
}

bool link_peers_are_free(struct kvlink *link) {
    pthread_mutex_lock(&link->tables_lock);
    bool are_free = link->peers_live == 0;
    pthread_mutex_unlock(&link->tables_lock);
    return are_free;
}

void link_send_init(struct kvlink *link) {
    list_init(&link->ready);
    list_init(&link->ended);
    link->ended_head = LINK_NONE;
    link->ended_tail = LINK_NONE;
    link->peer_free = LINK_NONE;
    link->op_free = LINK_NONE;
    link->chunk_free = LINK_NONE;
    for (uint32_t i = link->config.peers_max; i-- > 0;) {
        link->peers[i].link = link;
        link->peers[i].next_free = link->peer_free;
        link->peer_free = i;
    }
    for (uint32_t i = link->config.ops_max; i-- > 0;) {
        link->ops[i].pages = link->op_pages + (size_t)i * link->pages_per_op;
        link->ops[i].next = link->op_free;
        link->op_free = i;
    }
    for (uint32_t i = link->config.peers_max * LINK_CHUNKS_PER_PEER; i-- > 0;) {
        link->chunks[i].link = link;
        chunk_give(link, &link->chunks[i]);
    }
}

/* ---- called from other threads ---- */

/* Index of an id, or LINK_NONE. Under tables_lock. */
static uint32_t peer_find_locked(const struct kvlink *link, uint64_t id) {
    uint32_t cursor = 0;
    uint32_t index = map_next(&link->peer_map, mix64(id), &cursor);
    return index; /* mix64 is a bijection: same hash, same id */
}

enum status kvlink_connect(struct kvlink *link, uint64_t id, struct bytes address) {
    struct bytes ucx;
    bool is_same_host;
    uint16_t port;
    enum status status = link_address_open(link, address, &ucx, &is_same_host, &port);
    if (status != STATUS_OK) {
        return status;
    }
    if (atomic_load(&link->is_stopping)) {
        return STATUS_CANCELLED;
    }
    if (link->config.peers_max == 0) {
        return STATUS_BUSY;
    }
    struct peer *peer = NULL;
    pthread_mutex_lock(&link->tables_lock);
    if (peer_find_locked(link, id) != LINK_NONE) {
        status = STATUS_EXISTS;
    } else if (link->peer_free == LINK_NONE) {
        status = STATUS_BUSY;
    } else {
        uint32_t index = link->peer_free;
        peer = &link->peers[index];
        link->peer_free = peer->next_free;
        link->peers_live++;
        map_add(&link->peer_map, mix64(id), index);
        peer->id = id;
        peer->state = PEER_OPEN;
        peer->ops_live = 0;
        peer->ep = NULL;
        peer->op_head = LINK_NONE;
        peer->op_tail = LINK_NONE;
        peer->is_failed = false;
        peer->is_fail_told = false;
        peer->is_closing = false;
        peer->is_opened = false;
        peer->chunk_bytes = is_same_host ? LINK_SHM_CHUNK_BYTES : CHUNK_BYTES_MAX;
        peer->is_in_place = !is_same_host;
        peer->port = port;
        peer->socket_count = 0;
        peer->address_len = (uint32_t)ucx.len;
        memcpy(peer->address, ucx.data, ucx.len);
        peer->connect_mail.run = run_connect;
        peer->close_mail.run = run_close;
    }
    pthread_mutex_unlock(&link->tables_lock);
    if (peer == NULL) {
        return status;
    }
    link_count(&link->counts.peers_open, 1);
    bool posted = mailbox_post(&link->mailbox, &peer->connect_mail);
    CHECK(posted); /* the box closes only after all peers are free */
    return STATUS_OK;
}

enum status kvlink_send(struct kvlink *link, const struct kvlink_send *send) {
    const struct kv_layout *layout = link->layout;
    uint64_t token_end = (uint64_t)send->token_first + send->token_count;
    if (send->component_count == 0 || send->component_first >= layout->component_count ||
        send->component_count > layout->component_count - send->component_first ||
        send->token_count == 0 || send->token_count > link->config.op_tokens_max ||
        token_end > (uint64_t)send->page_count * layout->page_tokens || token_end > UINT32_MAX) {
        return STATUS_RANGE;
    }
    uint32_t page_first = send->token_first / layout->page_tokens;
    uint32_t page_count = (uint32_t)(token_end - 1) / layout->page_tokens + 1 - page_first;
    for (uint32_t i = 0; i < page_count; i++) {
        if (send->pages[page_first + i] >= link->config.page_count) {
            return STATUS_RANGE;
        }
    }
    if (link->config.peers_max == 0) {
        return STATUS_NOT_FOUND;
    }
    enum status status = STATUS_OK;
    struct op *op = NULL;
    pthread_mutex_lock(&link->tables_lock);
    uint32_t peer = peer_find_locked(link, send->peer);
    if (peer == LINK_NONE || link->peers[peer].state != PEER_OPEN) {
        status = STATUS_NOT_FOUND;
    } else if (link->op_free == LINK_NONE) {
        status = STATUS_BUSY;
    } else {
        op = &link->ops[link->op_free];
        link->op_free = op->next;
        link->peers[peer].ops_live++;
    }
    pthread_mutex_unlock(&link->tables_lock);
    if (op == NULL) {
        return status;
    }
    op->mail.run = run_send;
    op->id = send->op;
    op->slot = send->slot;
    op->key = send->key;
    op->peer = peer;
    op->component_first = send->component_first;
    op->component_end = send->component_first + send->component_count;
    op->token_first = send->token_first;
    op->token_end = (uint32_t)token_end;
    op->component = op->component_first;
    op->token = op->token_first;
    op->chunks = 0;
    op->status = STATUS_OK;
    op->is_cut = false;
    op->is_ended = false;
    memcpy(op->pages, send->pages + page_first, page_count * sizeof(op->pages[0]));
    link_count(&link->counts.ops_outstanding, 1);
    bool posted = mailbox_post(&link->mailbox, &op->mail);
    CHECK(posted); /* the box closes only after all ops have ended */
    return STATUS_OK;
}

enum status kvlink_close(struct kvlink *link, uint64_t id) {
    if (link->config.peers_max == 0) {
        return STATUS_NOT_FOUND;
    }
    struct peer *peer = NULL;
    pthread_mutex_lock(&link->tables_lock);
    uint32_t index = peer_find_locked(link, id);
    if (index != LINK_NONE && link->peers[index].state == PEER_OPEN) {
        peer = &link->peers[index];
        peer->state = PEER_CLOSING;
    }
    pthread_mutex_unlock(&link->tables_lock);
    if (peer == NULL) {
        return STATUS_NOT_FOUND;
    }
    bool posted = mailbox_post(&link->mailbox, &peer->close_mail);
    CHECK(posted);
    return STATUS_OK;
}
