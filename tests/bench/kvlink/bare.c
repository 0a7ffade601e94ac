/* The bare loop that the link is measured against: the same UCX settings, chunks, pages and window;
 * no slots, no checks, no sum, no mail. It waits for events as the link does, or ("spin") never. */
#include "bench/kvlink/bench.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <ucp/api/ucp.h>

#define AM_ID      7u
#define CHUNKS_MAX 256u
#define IOV_MAX_   64u

#define IN_PLACE_RUNS 13u

struct header {
    uint32_t token;
    uint32_t tokens;
    uint32_t component;
    uint32_t is_last;
    uint64_t spare[4];
};
struct chunk {
    struct header header;
    ucp_dt_iov_t iov[IOV_MAX_];
    uint32_t bytes;
    struct chunk *next;
};

static struct bench *self;
static ucp_context_h context;
static ucp_worker_h worker;
static int worker_fd;
static struct chunk chunks[CHUNKS_MAX];
static struct chunk *unused;
static uint64_t in_flight;
static uint64_t received;
static double first_at;
static double first_cpu;

static unsigned char *row_at(uint32_t component, uint32_t token) {
    return self->pool + (uint64_t)self->pages[token / self->page_tokens] * self->page_bytes +
           (uint64_t)component * self->page_tokens * BENCH_ROW_BYTES +
           (uint64_t)(token % self->page_tokens) * BENCH_ROW_BYTES;
}

static uint32_t run_at(uint32_t token, uint32_t end) {
    uint32_t run = self->page_tokens - token % self->page_tokens;
    return run < end - token ? run : end - token;
}

static ucs_status_t on_chunk(void *arg, const void *header_bytes, size_t header_len, void *data,
                             size_t len, const ucp_am_recv_param_t *param) {
    (void)arg;
    (void)header_len;
    (void)param;
    struct header header;
    memcpy(&header, header_bytes, sizeof(header));
    const unsigned char *from = data;
    uint32_t end = header.token + header.tokens;
    for (uint32_t token = header.token; token < end;) {
        uint32_t run = run_at(token, end);
        memcpy(row_at(header.component, token), from, (size_t)run * BENCH_ROW_BYTES);
        from += (size_t)run * BENCH_ROW_BYTES;
        token += run;
    }
    if (first_at == 0) {
        first_at = bench_now();
        first_cpu = bench_cpu();
    } else {
        received += len;
    }
    return UCS_OK;
}

static void turn(void) {
    if (ucp_worker_progress(worker) != 0 || self->is_spinning) {
        return;
    }
    if (ucp_worker_arm(worker) == UCS_OK) {
        struct pollfd fd = {.fd = worker_fd, .events = POLLIN};
        (void)poll(&fd, 1, 100);
    }
}

static void set(ucp_config_t *config, const char *name, const char *value) {
    if (ucp_config_modify(config, name, value) != UCS_OK) {
        bench_fail(name);
    }
}

static void open_worker(void) {
    ucp_config_t *config;
    if (ucp_config_read(NULL, NULL, &config) != UCS_OK) {
        bench_fail("ucp_config_read");
    }
    set(config, "TLS", self->is_tcp ? "tcp" : "posix");
    set(config, "RNDV_THRESH", "inf");
    set(config, "RCACHE_ENABLE", "n");
    if (self->is_tcp) {
        set(config, "NET_DEVICES", "lo");
        set(config, "TX_SEG_SIZE", "320K");
        set(config, "RX_SEG_SIZE", "320K");
        set(config, "MAX_IOV", "16");
    } else {
        set(config, "MM_SEG_SIZE", "62K");
        set(config, "MM_FIFO_SIZE", "32");
        set(config, "MM_RX_BUFS_GROW", "32");
        set(config, "MM_ERROR_HANDLING", "y");
    }
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                           .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    ucp_worker_params_t worker_params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                         .thread_mode = UCS_THREAD_MODE_SINGLE};
    if (ucp_init(&params, config, &context) != UCS_OK ||
        ucp_worker_create(context, &worker_params, &worker) != UCS_OK ||
        ucp_worker_get_efd(worker, &worker_fd) != UCS_OK) {
        bench_fail("UCX does not start");
    }
    ucp_config_release(config);
}

void bare_receive(struct bench *bench, struct bench_result *result) {
    self = bench;
    open_worker();
    ucp_am_handler_param_t handler = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID |
                                                    UCP_AM_HANDLER_PARAM_FIELD_CB,
                                      .id = AM_ID,
                                      .cb = on_chunk};
    ucp_address_t *address;
    size_t len;
    if (ucp_worker_set_am_recv_handler(worker, &handler) != UCS_OK ||
        ucp_worker_get_address(worker, &address, &len) != UCS_OK) {
        bench_fail("UCX has no address");
    }
    bench_put(bench, &len, sizeof(len));
    bench_put(bench, address, len);
    uint32_t chunk_bytes = bench->is_tcp ? BENCH_CHUNK_BYTES : BENCH_SHM_CHUNK_BYTES;
    uint32_t first = bench->op_bytes < chunk_bytes ? bench->op_bytes : chunk_bytes;
    while (received < bench->total_bytes - first) {
        turn();
    }
    result->seconds = bench_now() - first_at;
    result->cpu_seconds = bench_cpu() - first_cpu;
    result->bytes = received;
    char done = 1;
    bench_put(bench, &done, 1);
    struct pollfd other = {.fd = bench->fd, .events = POLLIN};
    while (poll(&other, 1, 0) == 0) { /* the sender's flush wants an answer */
        ucp_worker_progress(worker);
    }
}

static void chunk_end(struct chunk *chunk) {
    in_flight -= chunk->bytes;
    chunk->next = unused;
    unused = chunk;
}

static void on_sent(void *request, ucs_status_t status, void *arg) {
    ucp_request_free(request);
    if (status != UCS_OK) {
        bench_fail("a send failed");
    }
    chunk_end(arg);
}

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status) {
    (void)arg;
    (void)ep;
    bench_fail(ucs_status_string(status));
}

static void send_chunk(ucp_ep_h ep, uint32_t component, uint32_t token, uint32_t tokens) {
    while (unused == NULL || in_flight >= self->window_bytes) {
        turn();
    }
    struct chunk *chunk = unused;
    unused = chunk->next;
    chunk->header = (struct header){.token = token, .tokens = tokens, .component = component};
    chunk->bytes = tokens * BENCH_ROW_BYTES;
    size_t count = 0;
    for (uint32_t at = token; at < token + tokens;) {
        uint32_t run = run_at(at, token + tokens);
        chunk->iov[count++] = (ucp_dt_iov_t){.buffer = row_at(component, at),
                                             .length = (size_t)run * BENCH_ROW_BYTES};
        at += run;
    }
    in_flight += chunk->bytes;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_DATATYPE,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = on_sent,
        .user_data = chunk,
        .datatype = count == 1 ? ucp_dt_make_contig(1) : ucp_dt_make_iov()};
    const void *data = count == 1 ? chunk->iov[0].buffer : (const void *)chunk->iov;
    ucs_status_ptr_t request = ucp_am_send_nbx(ep, AM_ID, &chunk->header, sizeof(chunk->header),
                                               data, count == 1 ? chunk->bytes : count, &param);
    if (request == NULL) {
        chunk_end(chunk);
    } else if (UCS_PTR_IS_ERR(request)) {
        bench_fail("a send is refused");
    }
}

void bare_send(struct bench *bench, struct bench_result *result) {
    self = bench;
    open_worker();
    size_t len;
    unsigned char address[1024];
    bench_get(bench, &len, sizeof(len));
    bench_get(bench, address, len);
    double cpu = bench_cpu();
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLER,
                              .address = (const ucp_address_t *)(const void *)address,
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {.cb = on_error}};
    ucp_ep_h ep;
    if (ucp_ep_create(worker, &params, &ep) != UCS_OK) {
        bench_fail("no endpoint");
    }
    for (uint32_t i = 0; i < CHUNKS_MAX; i++) {
        chunks[i].next = unused;
        unused = &chunks[i];
    }
    uint32_t step = bench->op_bytes / BENCH_ROW_BYTES;
    uint32_t chunk_bytes = bench->is_tcp ? BENCH_CHUNK_BYTES : BENCH_SHM_CHUNK_BYTES;
    uint32_t most = chunk_bytes / BENCH_ROW_BYTES;
    uint32_t in_place = IN_PLACE_RUNS * bench->page_tokens;
    if (bench->is_tcp && most > in_place) {
        most = in_place; /* as the link cuts: with more runs UCX makes two messages of a chunk */
    }
    for (uint32_t token = 0; token < bench->tokens; token += step) {
        for (uint32_t c = 0; c < BENCH_COMPONENTS; c++) {
            for (uint32_t at = 0; at < step; at += most) {
                send_chunk(ep, c, token + at, step - at < most ? step - at : most);
            }
        }
    }
    while (in_flight > 0) {
        turn();
    }
    /* an ended send may still be in a buffer of UCX, which nobody empties while we read below */
    ucp_request_param_t none = {.op_attr_mask = 0};
    ucs_status_ptr_t flush = ucp_ep_flush_nbx(ep, &none);
    while (UCS_PTR_IS_PTR(flush) && ucp_request_check_status(flush) == UCS_INPROGRESS) {
        turn();
    }
    result->cpu_seconds = bench_cpu() - cpu;
    char done;
    bench_get(bench, &done, 1);
}
