/* The link over loopback and over shared memory. Where the other end must die, stop or speak
 * nonsense it is this program again, as a process of its own. */
#include "kvlink/kvlink.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/prng.h"
#include "kvlink/link.h"
#include "kvlink/sum.h"
#include "runtime/clock.h"
#include "unit/kvlink/side.h"

#define SEED 0x1234567890abcdefull
#define KEY  0xfeedfacecafebeefull

static uint64_t slot_id(uint32_t index, uint32_t generation) {
    return (uint64_t)generation << 32 | index;
}

static enum kvlink_transport transport_of(void **state) {
    return *(const enum kvlink_transport *)*state;
}

/* ---- layouts ---- */

static const uint32_t odd_rows[] = {4, 20, 260, 1028, 36, 4096, 12, 2052};
#define ODD_COUNT  8u
#define ODD_TOKENS 700u

static struct side_options odd_side(enum kvlink_transport transport, uint32_t page_tokens) {
    return (struct side_options){.transport = transport,
                                 .page_tokens = page_tokens,
                                 .page_count = ODD_TOKENS / page_tokens + 3,
                                 .token_max = ODD_TOKENS,
                                 .rows = odd_rows,
                                 .component_count = ODD_COUNT};
}

static const uint32_t big_rows[] = {1024, 1024, 1024, 1024};
#define BIG_COUNT  4u
#define BIG_TOKENS 2048u

static struct side_options big_side(enum kvlink_transport transport, uint32_t page_tokens) {
    return (struct side_options){.transport = transport,
                                 .page_tokens = page_tokens,
                                 .page_count = BIG_TOKENS / page_tokens,
                                 .token_max = BIG_TOKENS,
                                 .rows = big_rows,
                                 .component_count = BIG_COUNT};
}

/* ---- helpers ---- */

static void connect_to(struct side *from, uint64_t peer, struct side *to) {
    assert_int_equal(kvlink_connect(from->link, peer, kvlink_address(to->link)), STATUS_OK);
}

static void close_peer(struct side *side, uint64_t peer) {
    uint32_t before = side->peers_closed;
    assert_int_equal(kvlink_close(side->link, peer), STATUS_OK);
    assert_true(side_wait(side, side_closed_peers, before + 1));
}

static bool received_at_least(struct side *side, uint64_t count) {
    return side_counters(side).chunks_received >= count;
}

static uint32_t count_fds(void) {
    uint32_t count = 0;
    DIR *dir = opendir("/proc/self/fd");
    assert_non_null(dir);
    while (readdir(dir) != NULL) {
        count++;
    }
    closedir(dir);
    return count;
}

static uint64_t resident_bytes(void) {
    unsigned long long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%*u %llu", &pages), 1);
    fclose(file);
    return pages * 4096;
}

static bool fds_are_at_most(struct side *side, uint64_t count) {
    (void)side;
    return count_fds() <= count;
}

/* ---- another process ---- */

struct child {
    pid_t pid;
    int fd;
};

struct hello {
    uint16_t port;
    uint32_t len;
    uint8_t address[KVLINK_ADDRESS_MAX];
};

static struct child child_start(const char *role, enum kvlink_transport transport, uint16_t port) {
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        char fd_text[16];
        char transport_text[16];
        char port_text[16];
        int fd = dup(fds[1]); /* without close-on-exec */
        snprintf(fd_text, sizeof(fd_text), "%d", fd);
        snprintf(transport_text, sizeof(transport_text), "%d", (int)transport);
        snprintf(port_text, sizeof(port_text), "%u", port);
        execl("/proc/self/exe", "kvlink_link_test", role, fd_text, transport_text, port_text,
              (char *)NULL);
        _exit(127);
    }
    assert_true(pid > 0);
    close(fds[1]);
    return (struct child){pid, fds[0]};
}

static void read_all(int fd, void *data, size_t len) {
    size_t got = 0;
    while (got < len) {
        struct pollfd poller = {.fd = fd, .events = POLLIN};
        assert_int_equal(poll(&poller, 1, 2 * SIDE_WAIT_MS), 1);
        ssize_t n = read(fd, (unsigned char *)data + got, len - got);
        assert_true(n > 0);
        got += (size_t)n;
    }
}

static void write_all(int fd, const void *data, size_t len) {
    assert_int_equal(send(fd, data, len, MSG_NOSIGNAL), (ssize_t)len);
}

static void child_kill(struct child *child) {
    kill(child->pid, SIGKILL);
    int status;
    assert_int_equal(waitpid(child->pid, &status, 0), child->pid);
    assert_true(WIFSIGNALED(status));
    close(child->fd);
}

/* Closing its descriptor tells it to end; it exits 0 only if it came to rest cleanly. */
static void child_end(struct child *child) {
    close(child->fd);
    int status;
    assert_int_equal(waitpid(child->pid, &status, 0), child->pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void greet(struct side *side, int fd) {
    struct hello hello = {.port = kvlink_port(side->link)};
    struct bytes address = kvlink_address(side->link);
    hello.len = (uint32_t)address.len;
    memcpy(hello.address, address.data, address.len);
    write_all(fd, &hello, sizeof(hello));
}

/* A receiver with slot 0 armed over everything; answers 1 to a byte if it is covered and right. */
static void run_receiver(int fd, enum kvlink_transport transport, uint16_t port) {
    struct side side;
    struct side_options options = big_side(transport, 16);
    options.port = port;
    side_open(&side, &options);
    side_arm(&side, slot_id(0, 1), KEY, 0, BIG_TOKENS);
    greet(&side, fd);
    char byte;
    while (read(fd, &byte, 1) == 1) {
        byte = side_wait(&side, side_covered, slot_id(0, 1)) &&
               side_holds(&side, SEED, 0, BIG_COUNT, 0, BIG_TOKENS);
        write_all(fd, &byte, 1);
    }
    side_close(&side);
}

/* A sender that repeats the whole sequence for slot 0 until it is told to end. */
static void run_sender(int fd, enum kvlink_transport transport) {
    struct side side;
    struct side_options options = big_side(transport, 64);
    side_open(&side, &options);
    side_fill(&side, SEED, 0, BIG_COUNT, 0, BIG_TOKENS);
    struct hello hello;
    read_all(fd, &hello, sizeof(hello));
    assert_int_equal(kvlink_connect(side.link, 1, (struct bytes){hello.address, hello.len}),
                     STATUS_OK);
    struct pollfd poller = {.fd = fd, .events = POLLIN};
    uint32_t turn = 0;
    while (poll(&poller, 1, 0) == 0) {
        enum status status = side_send(&side, 1, slot_id(0, 1), KEY, turn % BIG_COUNT, 1,
                                       turn / BIG_COUNT % 8 * 256, 256);
        if (status == STATUS_OK) {
            turn++;
        } else {
            assert_int_equal(status, STATUS_BUSY);
            (void)poll(&poller, 1, 1);
        }
    }
    side_close(&side);
}

/* ---- a peer that speaks UCX and not our protocol ---- */

struct raw {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_ep_h ep;
};

static void raw_open(struct raw *raw, struct side *to) {
    ucp_config_t *config;
    assert_int_equal(ucp_config_read(NULL, NULL, &config), UCS_OK);
    bool is_tcp = to->options.transport == KVLINK_TRANSPORT_TCP;
    assert_int_equal(ucp_config_modify(config, "TLS", is_tcp ? "tcp" : "posix"), UCS_OK);
    if (is_tcp) {
        assert_int_equal(ucp_config_modify(config, "NET_DEVICES", "lo"), UCS_OK);
    } else {
        /* UCX 1.13 assumes, unchecked, that both ends have the same queue */
        assert_int_equal(ucp_config_modify(config, "MM_FIFO_SIZE", "32"), UCS_OK);
        assert_int_equal(ucp_config_modify(config, "MM_SEG_SIZE", "62K"), UCS_OK);
        assert_int_equal(ucp_config_modify(config, "MM_ERROR_HANDLING", "y"), UCS_OK);
    }
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_AM};
    assert_int_equal(ucp_init(&params, config, &raw->context), UCS_OK);
    ucp_config_release(config);
    ucp_worker_params_t worker = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SINGLE};
    assert_int_equal(ucp_worker_create(raw->context, &worker, &raw->worker), UCS_OK);
    struct bytes ucx;
    bool is_same_host;
    uint16_t port;
    assert_int_equal(
        link_address_open(to->link, kvlink_address(to->link), &ucx, &is_same_host, &port),
        STATUS_OK);
    assert_int_equal(port, kvlink_port(to->link));
    ucp_ep_params_t ep = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                        UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
                          .address = (const ucp_address_t *)(const void *)ucx.data,
                          .err_mode = UCP_ERR_HANDLING_MODE_PEER};
    assert_int_equal(ucp_ep_create(raw->worker, &ep, &raw->ep), UCS_OK);
}

/* Drives the worker until the request ends; false if it does not within the bound. */
static bool raw_finish(struct raw *raw, ucs_status_ptr_t request, int64_t bound_ms) {
    if (request == NULL) {
        return true;
    }
    assert_false(UCS_PTR_IS_ERR(request));
    struct instant deadline = instant_add(clock_now(), span_ms(bound_ms));
    bool is_done = false;
    while (!is_done && !instant_reached(clock_now(), deadline)) {
        ucp_worker_progress(raw->worker);
        is_done = ucp_request_check_status(request) != UCS_INPROGRESS;
    }
    ucp_request_free(request);
    return is_done;
}

static void raw_send(struct raw *raw, const void *header, size_t header_len, const void *data,
                     size_t len) {
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_AM_SEND_FLAG_EAGER};
    assert_true(
        raw_finish(raw, ucp_am_send_nbx(raw->ep, LINK_AM_ID, header, header_len, data, len, &param),
                   SIDE_WAIT_MS));
    ucp_request_param_t none = {0};
    assert_true(raw_finish(raw, ucp_ep_flush_nbx(raw->ep, &none), SIDE_WAIT_MS));
}

static void raw_close(struct raw *raw) {
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_EP_CLOSE_FLAG_FORCE};
    assert_true(raw_finish(raw, ucp_ep_close_nbx(raw->ep, &param), SIDE_WAIT_MS));
    ucp_worker_destroy(raw->worker);
    ucp_cleanup(raw->context);
}

/* Encodes the header with the right sum for a payload to `side`, as far as its layout has rows for
 * it. */
static void seal(const struct side *side, struct chunk_header header, const uint8_t *payload,
                 uint8_t *bytes) {
    const struct kv_layout *layout = &side->layout;
    chunk_encode(&header, bytes);
    struct chunk_sum sum;
    chunk_sum_begin(&sum);
    uint32_t left = header.bytes;
    for (uint32_t c = header.component_first; c < layout->component_count; c++) {
        uint32_t row_bytes = layout->components[c].row_bytes;
        for (uint32_t i = 0; i < header.token_count && left >= row_bytes; i++) {
            uint64_t row = XXH3_64bits(payload, row_bytes);
            chunk_sum_rows(&sum, &row, 1);
            payload += row_bytes;
            left -= row_bytes;
        }
    }
    chunk_set_sum(bytes, chunk_sum_end(&sum, bytes));
}

/* ---- transfers ---- */

static void test_kv_arrives_with_different_page_sizes_at_both_ends(void **state) {
    static const uint32_t sizes[][2] = {{16, 16}, {16, 7}, {1, 64}, {128, 5}, {700, 1}};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct side from;
        struct side to;
        struct side_options from_options = odd_side(transport_of(state), sizes[i][0]);
        struct side_options to_options = odd_side(transport_of(state), sizes[i][1]);
        side_open(&from, &from_options);
        side_open(&to, &to_options);
        uint64_t slot = slot_id(3, 9);
        side_fill(&from, SEED, 0, ODD_COUNT, 0, ODD_TOKENS);
        side_arm(&to, slot, KEY, 0, ODD_TOKENS);
        connect_to(&from, 1, &to);
        /* as a prefill does: prompt chunks, each layer by layer */
        for (uint32_t first = 0; first < ODD_TOKENS; first += 150) {
            uint32_t count = ODD_TOKENS - first < 150 ? ODD_TOKENS - first : 150;
            for (uint32_t c = 0; c < ODD_COUNT; c += 2) {
                assert_int_equal(side_send(&from, 1, slot, KEY, c, 2, first, count), STATUS_OK);
            }
        }
        assert_true(side_wait(&to, side_covered, slot));
        assert_true(side_wait(&from, side_ops_ended, 0));
        assert_int_equal(from.ops_by_status[STATUS_OK], from.ops_started);
        assert_true(side_holds(&to, SEED, 0, ODD_COUNT, 0, ODD_TOKENS));
        assert_int_equal(to.slots[3].covered, 1);
        assert_int_equal(to.slots[3].bad, 0);
        assert_int_equal(to.slots[3].bytes,
                         layout_range_bytes(&to.layout, 0, ODD_COUNT, ODD_TOKENS));
        assert_int_equal(side_counters(&to).requests_outstanding, 0);
        side_disarm(&to, slot);
        close_peer(&from, 1);
        side_close(&from);
        side_close(&to);
    }
}

static void test_large_ops_are_cut_and_flow_through_a_small_window(void **state) {
    struct side from;
    struct side to;
    struct side_options from_options = big_side(transport_of(state), 512);
    struct side_options to_options = big_side(transport_of(state), 16);
    from_options.window_bytes = 1; /* one chunk at a time */
    side_open(&from, &from_options);
    side_open(&to, &to_options);
    side_fill(&from, SEED, 0, BIG_COUNT, 0, BIG_TOKENS);
    side_arm(&to, slot_id(0, 1), KEY, 0, BIG_TOKENS);
    connect_to(&from, 1, &to);
    assert_int_equal(side_send(&from, 1, slot_id(0, 1), KEY, 0, BIG_COUNT, 0, BIG_TOKENS),
                     STATUS_OK);
    assert_true(side_wait(&to, side_covered, slot_id(0, 1)));
    assert_true(side_wait(&from, side_ops_ended, 0));
    assert_true(side_holds(&to, SEED, 0, BIG_COUNT, 0, BIG_TOKENS));
    struct kvlink_counters sent = side_counters(&from);
    struct kvlink_counters got = side_counters(&to);
    assert_int_equal(sent.bytes_sent, BIG_COUNT * BIG_TOKENS * 1024ull);
    assert_int_equal(got.bytes_accepted, sent.bytes_sent);
    assert_int_equal(got.chunks_accepted, sent.chunks_sent);
    assert_true(sent.chunks_sent >= sent.bytes_sent / CHUNK_BYTES_MAX);
    side_close(&from);
    side_close(&to);
}

static void test_small_components_share_a_chunk(void **state) {
    struct side from;
    struct side to;
    struct side_options from_options = odd_side(transport_of(state), 16);
    struct side_options to_options = odd_side(transport_of(state), 32);
    side_open(&from, &from_options);
    side_open(&to, &to_options);
    side_fill(&from, SEED, 0, ODD_COUNT, 0, 5);
    side_arm(&to, slot_id(0, 1), KEY, 0, 5);
    connect_to(&from, 1, &to);
    assert_int_equal(side_send(&from, 1, slot_id(0, 1), KEY, 0, ODD_COUNT, 0, 5), STATUS_OK);
    assert_true(side_wait(&to, side_covered, slot_id(0, 1)));
    assert_true(side_holds(&to, SEED, 0, ODD_COUNT, 0, 5));
    assert_int_equal(side_counters(&from).chunks_sent, 1);
    side_close(&from);
    side_close(&to);
}

/* Sends all of `from` and looks whether it arrived. */
static void check_transfer(struct side *from, struct side *to, uint32_t components,
                           uint32_t tokens) {
    side_fill(from, SEED, 0, components, 0, tokens);
    side_arm(to, slot_id(0, 1), KEY, 0, tokens);
    connect_to(from, 1, to);
    assert_int_equal(side_send(from, 1, slot_id(0, 1), KEY, 0, components, 0, tokens), STATUS_OK);
    assert_true(side_wait(to, side_covered, slot_id(0, 1)));
    assert_true(side_wait(from, side_ops_ended, 0));
    assert_true(side_holds(to, SEED, 0, components, 0, tokens));
    assert_int_equal(side_counters(to).bytes_accepted, side_counters(from).bytes_sent);
}

/* Models with compressed KV: one row where others have K and V, an index cache of another type and
 * size beside it, and layers that differ in what they keep. */
static uint32_t compressed_components(struct kv_component *components) {
    static const struct kv_component kinds[] = {
        {"latent", 0, 1, (512 + 64) * 2, KV_DTYPE_BF16, KV_LIFETIME_PAGE},
        {"index_k", 0, 1, 132, KV_DTYPE_U8, KV_LIFETIME_PAGE},
        {"window", 0, 1, 584, KV_DTYPE_U8, KV_LIFETIME_PAGE},
        {"score", 0, 1, 4, KV_DTYPE_F32, KV_LIFETIME_PAGE}};
    uint32_t count = 0;
    for (uint16_t layer = 0; layer < 9; layer++) {
        for (uint32_t kind = 0; kind <= layer % 4u; kind++) {
            /* Which rows come first is the model's choice too. */
            components[count] = kinds[layer % 2 == 0 ? kind : layer % 4u - kind];
            components[count++].layer = layer;
        }
    }
    return count;
}

static void test_a_layout_without_k_and_v_arrives_layer_by_layer(void **state) {
    static const uint32_t sizes[][2] = {{64, 16}, {16, 64}, {256, 7}, {1, 100}};
    struct kv_component components[64];
    uint32_t count = compressed_components(components);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct side from;
        struct side to;
        struct side_options options = {.transport = transport_of(state),
                                       .page_tokens = sizes[i][0],
                                       .page_count = ODD_TOKENS / sizes[i][0] + 2,
                                       .token_max = ODD_TOKENS,
                                       .components = components,
                                       .component_count = count};
        side_open(&from, &options);
        options.page_tokens = sizes[i][1];
        options.page_count = ODD_TOKENS / sizes[i][1] + 2;
        side_open(&to, &options);
        assert_true(layout_digest_equal(from.layout.digest, to.layout.digest));
        assert_int_equal(from.layout.layer_count, 9);
        side_fill(&from, SEED, 0, count, 0, ODD_TOKENS);
        side_arm(&to, slot_id(2, 5), KEY, 30, ODD_TOKENS); /* 30 tokens are there already */
        connect_to(&from, 1, &to);
        for (uint32_t first = 30; first < ODD_TOKENS; first += 190) {
            uint32_t tokens = ODD_TOKENS - first < 190 ? ODD_TOKENS - first : 190;
            for (uint32_t turn = 0; turn < 9; turn++) {
                uint32_t layer = i % 2 == 0 ? turn : 8 - turn; /* nothing hangs on the order */
                const uint32_t *begin = &from.layout.layer_first[layer];
                assert_int_equal(side_send(&from, 1, slot_id(2, 5), KEY, begin[0],
                                           begin[1] - begin[0], first, tokens),
                                 STATUS_OK);
            }
        }
        assert_true(side_wait(&to, side_covered, slot_id(2, 5)));
        assert_true(side_wait(&from, side_ops_ended, 0));
        assert_true(side_holds(&to, SEED, 0, count, 30, ODD_TOKENS));
        assert_true(side_is_untouched(&to, 0, count, 0, 30));
        uint64_t bytes = layout_range_bytes(&to.layout, 0, count, ODD_TOKENS - 30);
        assert_int_equal(to.slots[2].bytes, bytes);
        assert_int_equal(side_counters(&to).bytes_accepted, bytes);
        assert_int_equal(bytes, (uint64_t)to.layout.token_bytes * (ODD_TOKENS - 30));
        side_disarm(&to, slot_id(2, 5));
        close_peer(&from, 1);
        side_close(&from);
        side_close(&to);
    }
}

/* Over shared memory a row is more than a segment of UCX's, which asks for it piece by piece. */
static void test_rows_larger_than_a_segment_arrive(void **state) {
    static const uint32_t rows[] = {100u * 1024 + 4, 256u * 1024, 61u * 1024, 200u * 1024 + 60};
    struct side_options options = {.transport = transport_of(state),
                                   .page_tokens = 2,
                                   .page_count = 4,
                                   .token_max = 7,
                                   .rows = rows,
                                   .component_count = 4};
    struct side from;
    struct side to;
    side_open(&from, &options);
    options.page_tokens = 3;
    side_open(&to, &options);
    check_transfer(&from, &to, 4, 7);
    side_close(&from);
    side_close(&to);
}

/* Other processors than the one that the tests run on. */
static void test_every_way_to_take_the_sum_agrees_with_the_writers(void **state) {
    for (int cpu = COPYSUM_CPU_PLAIN; cpu <= (int)copysum_best(); cpu++) {
        struct side from;
        struct side to;
        struct side_options from_options = odd_side(transport_of(state), 16);
        struct side_options to_options = odd_side(transport_of(state), 7);
        side_open(&from, &from_options);
        side_open(&to, &to_options);
        to.link->cpu = (enum copysum_cpu)cpu;
        check_transfer(&from, &to, ODD_COUNT, ODD_TOKENS);
        side_close(&from);
        side_close(&to);
    }
}

/* Every length of a run below and above which UCX takes rows from where they lie, and every number
 * of runs up to which it does; over TCP one piece more and it would cut the chunk. */
static void test_kv_arrives_from_pages_of_every_size(void **state) {
    static const uint32_t page_tokens[] = {1, 2, 7, 8, 16, 20, 32, 100, 157, 158, 256, 1024};
    for (size_t i = 0; i < sizeof(page_tokens) / sizeof(page_tokens[0]); i++) {
        struct side from;
        struct side to;
        struct side_options from_options = big_side(transport_of(state), page_tokens[i]);
        struct side_options to_options = big_side(transport_of(state), 16);
        from_options.page_count = BIG_TOKENS / page_tokens[i] + 1;
        from_options.window_bytes = i % 2 == 0 ? 0 : 1; /* one chunk at a time */
        side_open(&from, &from_options);
        side_open(&to, &to_options);
        check_transfer(&from, &to, BIG_COUNT, BIG_TOKENS);
        side_close(&from);
        side_close(&to);
    }
}

static void test_kv_arrives_with_new_protocols_of_ucx_too(void **state) {
    struct side from;
    struct side to;
    struct side_options options = big_side(transport_of(state), 16);
    setenv("UCX_PROTO_ENABLE", "y", 1);
    side_open(&from, &options);
    side_open(&to, &options);
    unsetenv("UCX_PROTO_ENABLE");
    check_transfer(&from, &to, BIG_COUNT, BIG_TOKENS);
    side_close(&from);
    side_close(&to);
}

static void test_only_the_missing_range_is_written(void **state) {
    struct side from;
    struct side to;
    struct side_options from_options = odd_side(transport_of(state), 16);
    struct side_options to_options = odd_side(transport_of(state), 16);
    side_open(&from, &from_options);
    side_open(&to, &to_options);
    side_fill(&from, SEED, 0, ODD_COUNT, 0, ODD_TOKENS);
    side_arm(&to, slot_id(0, 1), KEY, 101, 333);
    connect_to(&from, 1, &to);
    assert_int_equal(side_send(&from, 1, slot_id(0, 1), KEY, 0, ODD_COUNT, 101, 232), STATUS_OK);
    assert_true(side_wait(&to, side_covered, slot_id(0, 1)));
    assert_true(side_holds(&to, SEED, 0, ODD_COUNT, 101, 333));
    assert_true(side_is_untouched(&to, 0, ODD_COUNT, 0, 101));
    assert_true(side_is_untouched(&to, 0, ODD_COUNT, 333, ODD_TOKENS));
    side_close(&from);
    side_close(&to);
}

static void test_what_is_covered_is_never_rewritten(void **state) {
    struct side from;
    struct side to;
    struct side_options from_options = odd_side(transport_of(state), 16);
    struct side_options to_options = odd_side(transport_of(state), 8);
    side_open(&from, &from_options);
    side_open(&to, &to_options);
    uint64_t slot = slot_id(0, 1);
    side_arm(&to, slot, KEY, 0, 300);
    connect_to(&from, 1, &to);
    side_fill(&from, SEED, 0, ODD_COUNT, 0, 300);
    assert_int_equal(side_send(&from, 1, slot, KEY, 0, ODD_COUNT, 50, 100), STATUS_OK);
    assert_true(side_wait(&from, side_ops_ended, 0));
    assert_true(side_wait(&to, side_progressed, slot));
    uint64_t all = side_counters(&from).chunks_sent;
    assert_true(side_wait(&to, received_at_least, all));
    /* the same range again with other contents, then one that overlaps it on both sides */
    side_fill(&from, SEED + 1, 0, ODD_COUNT, 0, 300);
    assert_int_equal(side_send(&from, 1, slot, KEY, 0, ODD_COUNT, 50, 100), STATUS_OK);
    assert_int_equal(side_send(&from, 1, slot, KEY, 0, ODD_COUNT, 0, 300), STATUS_OK);
    assert_true(side_wait(&to, side_covered, slot));
    assert_true(side_holds(&to, SEED, 0, ODD_COUNT, 50, 150));
    assert_true(side_holds(&to, SEED + 1, 0, ODD_COUNT, 0, 50));
    assert_true(side_holds(&to, SEED + 1, 0, ODD_COUNT, 150, 300));
    assert_true(side_counters(&to).dropped_covered > 0);
    assert_int_equal(to.slots[0].bytes, layout_range_bytes(&to.layout, 0, ODD_COUNT, 300));
    /* and everything once more after the end */
    assert_true(side_wait(&from, side_ops_ended, 0)); /* covered there, but still ours to keep */
    uint64_t dropped = side_counters(&to).dropped_covered;
    side_fill(&from, SEED + 2, 0, ODD_COUNT, 0, 300);
    assert_int_equal(side_send(&from, 1, slot, KEY, 0, ODD_COUNT, 0, 300), STATUS_OK);
    assert_true(side_wait(&from, side_ops_ended, 0));
    assert_true(side_wait(&to, received_at_least, side_counters(&from).chunks_sent));
    assert_true(side_counters(&to).dropped_covered > dropped);
    assert_true(side_holds(&to, SEED, 0, ODD_COUNT, 50, 150));
    assert_int_equal(to.slots[0].covered, 1);
    side_close(&from);
    side_close(&to);
}

static void test_a_stranger_cannot_touch_a_slot(void **state) {
    struct side from;
    struct side to;
    struct side_options from_options = odd_side(transport_of(state), 16);
    struct side_options to_options = odd_side(transport_of(state), 16);
    side_open(&from, &from_options);
    side_open(&to, &to_options);
    uint64_t slot = slot_id(2, 5);
    side_fill(&from, SEED + 1, 0, ODD_COUNT, 0, ODD_TOKENS);
    side_arm(&to, slot, KEY, 0, 40);
    connect_to(&from, 1, &to);
    const struct {
        uint64_t slot;
        uint64_t key;
    } wrong[] = {{slot, KEY + 1},
                 {slot_id(2, 4), KEY},
                 {slot_id(2, 6), KEY},
                 {slot_id(1, 5), KEY},
                 {slot_id(SIDE_SLOTS_MAX, 5), KEY},
                 {0, KEY},
                 {slot_id(UINT32_MAX, 5), KEY}};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        assert_int_equal(
            side_send(&from, 1, wrong[i].slot, wrong[i].key, 0, ODD_COUNT, 0, ODD_TOKENS),
            STATUS_OK);
    }
    assert_true(side_wait(&from, side_ops_ended, 0));
    uint64_t sent = side_counters(&from).chunks_sent;
    assert_true(side_wait(&to, received_at_least, sent));
    struct kvlink_counters counters = side_counters(&to);
    assert_int_equal(counters.dropped_key, sent / 7);
    assert_int_equal(counters.dropped_unknown, sent / 7 * 6);
    assert_int_equal(to.slots[2].bad, 0);
    /* the right one still can: what was covered by others would not be rewritten */
    side_fill(&from, SEED, 0, ODD_COUNT, 0, 40);
    assert_int_equal(side_send(&from, 1, slot, KEY, 0, ODD_COUNT, 0, 40), STATUS_OK);
    assert_true(side_wait(&to, side_covered, slot));
    assert_true(side_holds(&to, SEED, 0, ODD_COUNT, 0, 40));
    assert_true(side_is_untouched(&to, 0, ODD_COUNT, 40, ODD_TOKENS));
    side_close(&from);
    side_close(&to);
}

/* ---- bad chunks ---- */

static void test_each_kind_of_bad_chunk_spoils_its_slot_once(void **state) {
    struct side to;
    struct side_options options = odd_side(transport_of(state), 16);
    side_open(&to, &options);
    struct raw raw;
    raw_open(&raw, &to);
    uint8_t payload[4096];
    memset(payload, 0x11, sizeof(payload));
    const struct {
        struct chunk_header header; /* for tokens 10 to 12 of component 1: 3 rows of 20 bytes */
        bool is_sum_wrong;
        enum kvlink_bad reason;
    } cases[] = {
        {{.token_first = 10,
          .token_count = 3,
          .component_first = 1,
          .component_count = 1,
          .bytes = 60},
         true,
         KVLINK_BAD_CHECKSUM},
        {{.token_first = 10,
          .token_count = 3,
          .component_first = ODD_COUNT,
          .component_count = 1,
          .bytes = 60},
         false,
         KVLINK_BAD_LAYOUT},
        {{.token_first = 10,
          .token_count = 3,
          .component_first = 1,
          .component_count = UINT16_MAX,
          .bytes = 60},
         false,
         KVLINK_BAD_LAYOUT},
        {{.token_first = 10,
          .token_count = 3,
          .component_first = 1,
          .component_count = 1,
          .bytes = 64},
         false,
         KVLINK_BAD_LAYOUT},
        {{.token_first = 10,
          .token_count = UINT32_MAX,
          .component_first = 1,
          .component_count = 1,
          .bytes = 60},
         false,
         KVLINK_BAD_LAYOUT},
        {{.token_first = 4,
          .token_count = 3,
          .component_first = 1,
          .component_count = 1,
          .bytes = 60},
         false,
         KVLINK_BAD_RANGE},
        {{.token_first = 98,
          .token_count = 3,
          .component_first = 1,
          .component_count = 1,
          .bytes = 60},
         false,
         KVLINK_BAD_RANGE},
        {{.token_first = UINT32_MAX,
          .token_count = 3,
          .component_first = 1,
          .component_count = 1,
          .bytes = 60},
         false,
         KVLINK_BAD_RANGE},
    };
    size_t count = sizeof(cases) / sizeof(cases[0]);
    for (size_t i = 0; i < count; i++) {
        uint64_t slot = slot_id(1, (uint32_t)i + 1); /* the index is used again and again */
        side_arm(&to, slot, KEY, 5, 100);
        struct chunk_header header = cases[i].header;
        header.slot = slot;
        header.key = KEY;
        uint8_t bytes[CHUNK_HEADER_BYTES];
        seal(&to, header, payload, bytes);
        if (cases[i].is_sum_wrong) {
            bytes[CHUNK_SUM_OFFSET] ^= 1;
        }
        raw_send(&raw, bytes, sizeof(bytes), payload, header.bytes);
        assert_true(side_wait(&to, side_bad, slot));
        assert_int_equal(to.slots[1].reason, cases[i].reason);
        /* a good chunk afterwards does not heal it, and nothing is told again */
        header = (struct chunk_header){.slot = slot,
                                       .key = KEY,
                                       .token_first = 10,
                                       .token_count = 3,
                                       .component_first = 1,
                                       .component_count = 1,
                                       .bytes = 60};
        seal(&to, header, payload, bytes);
        raw_send(&raw, bytes, sizeof(bytes), payload, header.bytes);
        assert_true(side_wait(&to, received_at_least, 2 * (i + 1)));
        side_disarm(&to, slot);
        assert_int_equal(to.slots[1].bad, 1);
        assert_int_equal(to.slots[1].covered, 0);
        assert_int_equal(to.slots[1].progress, 0);
    }
    struct kvlink_counters counters = side_counters(&to);
    assert_int_equal(counters.bad_checksum, 1);
    assert_int_equal(counters.bad_layout, 4);
    assert_int_equal(counters.bad_range, 3);
    assert_int_equal(counters.dropped_bad_slot, count);
    assert_int_equal(counters.chunks_accepted, 0);
    raw_close(&raw);
    side_close(&to);
}

static void test_a_flipped_bit_anywhere_in_a_chunk_is_noticed(void **state) {
    struct side to;
    struct side_options options = odd_side(transport_of(state), 16);
    side_open(&to, &options);
    struct raw raw;
    raw_open(&raw, &to);
    uint8_t payload[60];
    memset(payload, 0x22, sizeof(payload));
    uint32_t sent = 0;
    for (uint32_t bit = 0; bit < 8 * (CHUNK_HEADER_BYTES + sizeof(payload)); bit += 5) {
        uint64_t slot = slot_id(0, bit + 1);
        side_arm(&to, slot, KEY, 0, ODD_TOKENS);
        struct chunk_header header = {.slot = slot,
                                      .key = KEY,
                                      .token_first = 64,
                                      .token_count = 3,
                                      .component_first = 1,
                                      .component_count = 1,
                                      .bytes = sizeof(payload)};
        uint8_t bytes[CHUNK_HEADER_BYTES];
        uint8_t damaged[sizeof(payload)];
        memcpy(damaged, payload, sizeof(payload));
        seal(&to, header, payload, bytes);
        if (bit < 8 * CHUNK_HEADER_BYTES) {
            bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        } else {
            damaged[bit / 8 - CHUNK_HEADER_BYTES] ^= (uint8_t)(1 << bit % 8);
        }
        raw_send(&raw, bytes, sizeof(bytes), damaged, sizeof(damaged));
        assert_true(side_wait(&to, received_at_least, ++sent));
        side_disarm(&to, slot);
    }
    assert_int_equal(side_counters(&to).chunks_accepted, 0);
    raw_close(&raw);
    side_close(&to);
}

/* The sum is the writer's: what happens to a row afterwards, at the sender too, is noticed. */
static void test_a_row_that_changed_after_its_sum_spoils_the_slot(void **state) {
    struct side from;
    struct side to;
    struct side_options options = big_side(transport_of(state), 16);
    side_open(&from, &options);
    side_open(&to, &options);
    side_fill(&from, SEED, 0, BIG_COUNT, 0, BIG_TOKENS);
    connect_to(&from, 1, &to);
    struct prng prng = {7};
    for (uint32_t i = 0; i < 16; i++) {
        uint64_t slot = slot_id(0, i + 1);
        side_arm(&to, slot, KEY, 0, 256);
        uint32_t token = prng_below(&prng, 256);
        unsigned char *row =
            from.kv + layout_row_offset(&from.layout, from.pages[token / 16], 0, token % 16);
        unsigned char *damaged = row + prng_below(&prng, 1024);
        unsigned char flip = (unsigned char)(1u << i % 8);
        *damaged ^= flip;
        assert_int_equal(side_send(&from, 1, slot, KEY, 0, 1, 0, 256), STATUS_OK);
        assert_true(side_wait(&to, side_bad, slot));
        assert_int_equal(to.slots[0].reason, KVLINK_BAD_CHECKSUM);
        assert_true(side_wait(&from, side_ops_ended, 0));
        *damaged ^= flip;
        side_disarm(&to, slot);
    }
    side_arm(&to, slot_id(0, 99), KEY, 0, 256); /* and undamaged it arrives */
    assert_int_equal(side_send(&from, 1, slot_id(0, 99), KEY, 0, BIG_COUNT, 0, 256), STATUS_OK);
    assert_true(side_wait(&to, side_covered, slot_id(0, 99)));
    assert_true(side_wait(&from, side_ops_ended, 0));
    side_close(&from);
    side_close(&to);
}

static void test_rows_that_nobody_summed_spoil_the_slot(void **state) {
    struct side from;
    struct side to;
    struct side_options options = big_side(transport_of(state), 16);
    side_open(&from, &options);
    side_open(&to, &options);
    memset(from.kv, 0, from.kv_bytes); /* as a pool and its sums are at the start */
    memset(from.sums, 0, kvlink_sum_count(&from.layout, options.page_count) * sizeof(uint64_t));
    side_arm(&to, slot_id(0, 1), KEY, 0, BIG_TOKENS);
    connect_to(&from, 1, &to);
    assert_int_equal(side_send(&from, 1, slot_id(0, 1), KEY, 0, 1, 0, 16), STATUS_OK);
    assert_true(side_wait(&to, side_bad, slot_id(0, 1)));
    assert_int_equal(to.slots[0].reason, KVLINK_BAD_CHECKSUM);
    assert_true(side_wait(&from, side_ops_ended, 0));
    side_close(&from);
    side_close(&to);
}

static void test_too_many_gaps_spoil_the_slot(void **state) {
    struct side from;
    struct side to;
    struct side_options from_options = odd_side(transport_of(state), 16);
    struct side_options to_options = odd_side(transport_of(state), 16);
    side_open(&from, &from_options);
    side_open(&to, &to_options);
    side_fill(&from, SEED, 0, ODD_COUNT, 0, ODD_TOKENS);
    side_arm(&to, slot_id(0, 1), KEY, 0, ODD_TOKENS);
    connect_to(&from, 1, &to);
    for (uint32_t i = 0; i <= COVERAGE_RANGES_MAX; i++) {
        assert_int_equal(side_send(&from, 1, slot_id(0, 1), KEY, 0, 1, 20 * i, 10), STATUS_OK);
    }
    assert_true(side_wait(&to, side_bad, slot_id(0, 1)));
    assert_int_equal(to.slots[0].reason, KVLINK_BAD_GAPS);
    side_close(&from);
    side_close(&to);
}

static void test_messages_that_are_no_chunks_are_dropped_and_counted(void **state) {
    struct side to;
    struct side_options options = odd_side(transport_of(state), 16);
    side_open(&to, &options);
    side_arm(&to, slot_id(0, 1), KEY, 0, 100);
    struct raw raw;
    raw_open(&raw, &to);
    uint8_t payload[60] = {0};
    struct chunk_header header = {.slot = slot_id(0, 1),
                                  .key = KEY,
                                  .token_count = 3,
                                  .component_first = 1,
                                  .component_count = 1,
                                  .bytes = 60};
    uint8_t good[CHUNK_HEADER_BYTES];
    seal(&to, header, payload, good);
    uint64_t sent = 0;
    for (size_t len = 0; len < CHUNK_HEADER_BYTES; len += 7) {
        raw_send(&raw, good, len, payload, sizeof(payload));
        sent++;
    }
    static const size_t damaged[] = {0, 1, 2, 3, 36, 39};
    for (size_t i = 0; i < sizeof(damaged) / sizeof(damaged[0]); i++) {
        uint8_t bytes[CHUNK_HEADER_BYTES];
        memcpy(bytes, good, sizeof(bytes));
        bytes[damaged[i]] ^= 0x80;
        raw_send(&raw, bytes, sizeof(bytes), payload, sizeof(payload));
        sent++;
    }
    raw_send(&raw, good, sizeof(good), payload, sizeof(payload) - 1); /* cut short */
    raw_send(&raw, good, sizeof(good), NULL, 0);
    sent += 2;
    assert_true(side_wait(&to, received_at_least, sent));
    assert_int_equal(side_counters(&to).dropped_header, sent);
    assert_true(side_is_painted(&to, SIDE_CANARY));
    assert_int_equal(to.slots[0].bad, 0);
    raw_close(&raw);
    side_close(&to);
}

static void test_a_rendezvous_offer_is_dropped_without_an_operation(void **state) {
    struct side to;
    struct side_options options = big_side(transport_of(state), 16);
    side_open(&to, &options);
    side_arm(&to, slot_id(0, 1), KEY, 0, BIG_TOKENS);
    struct raw raw;
    raw_open(&raw, &to);
    size_t len = 1024 * 256;
    uint8_t *payload = calloc(1, len);
    assert_non_null(payload);
    struct chunk_header header = {.slot = slot_id(0, 1),
                                  .key = KEY,
                                  .token_count = 256,
                                  .component_count = 1,
                                  .bytes = (uint32_t)len};
    uint8_t bytes[CHUNK_HEADER_BYTES];
    seal(&to, header, payload, bytes);
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_AM_SEND_FLAG_RNDV};
    ucs_status_ptr_t request =
        ucp_am_send_nbx(raw.ep, LINK_AM_ID, bytes, sizeof(bytes), payload, len, &param);
    (void)raw_finish(&raw, request, 500); /* how it ends for that sender is its own affair */
    assert_true(side_wait(&to, received_at_least, 1));
    assert_int_equal(side_counters(&to).dropped_header, 1);
    assert_int_equal(side_counters(&to).requests_outstanding, 0);
    assert_true(side_is_painted(&to, SIDE_CANARY));
    raw_close(&raw);
    free(payload);
    side_close(&to);
}

/* ---- disarming ---- */

static void test_no_byte_lands_after_disarmed(void **state) {
    struct side to;
    struct side_options options = big_side(transport_of(state), 16);
    side_open(&to, &options);
    struct child child = child_start("sender", transport_of(state), 0);
    greet(&to, child.fd);
    uint32_t landed = 0;
    for (uint32_t round = 0; round < 50; round++) {
        /* the sender repeats itself for ever, always for generation 1 */
        side_arm(&to, slot_id(0, 1), KEY, 0, BIG_TOKENS);
        assert_true(
            side_wait(&to, round % 10 == 9 ? side_covered : side_progressed, slot_id(0, 1)));
        side_disarm(&to, slot_id(0, 1));
        uint64_t bytes = to.slots[0].bytes;
        landed += bytes > 0;
        /* the same pages for another slot, while chunks for the old one keep coming */
        unsigned char canary = (unsigned char)(round + 1);
        side_paint(&to, canary);
        side_arm(&to, slot_id(1, round + 1), KEY + 1, 0, BIG_TOKENS);
        assert_true(side_wait(&to, received_at_least, side_counters(&to).chunks_received + 12));
        assert_true(side_is_painted(&to, canary));
        side_disarm(&to, slot_id(1, round + 1));
        assert_int_equal(to.slots[1].progress + to.slots[1].covered + to.slots[1].bad, 0);
    }
    assert_int_equal(landed, 50);
    assert_true(side_counters(&to).dropped_unknown >= 50 * 12);
    child_end(&child);
    side_close(&to);
}

static void test_a_stopped_sender_does_not_hold_a_slot(void **state) {
    struct side to;
    struct side_options options = big_side(transport_of(state), 16);
    side_open(&to, &options);
    struct child child = child_start("sender", transport_of(state), 0);
    greet(&to, child.fd);
    for (uint32_t round = 0; round < 3; round++) {
        side_arm(&to, slot_id(0, 1), KEY, 0, BIG_TOKENS);
        assert_true(side_wait(&to, side_progressed, slot_id(0, 1)));
        kill(child.pid, SIGSTOP);
        side_disarm(&to, slot_id(0, 1));
        side_paint(&to, 0x77);
        kill(child.pid, SIGCONT);
        assert_true(side_wait(&to, received_at_least, side_counters(&to).chunks_received + 8));
        assert_true(side_is_painted(&to, 0x77));
    }
    kill(child.pid, SIGSTOP);
    assert_int_equal(kvlink_stop(to.link, span_ms(SIDE_WAIT_MS)), STATUS_OK);
    child_kill(&child);
    side_close(&to);
}

/* ---- peers that die ---- */

static void test_killed_senders_leave_nothing_behind(void **state) {
    struct side to;
    struct side_options options = big_side(transport_of(state), 16);
    side_open(&to, &options);
    uint32_t fds = 0;
    uint64_t resident = 0;
    for (uint32_t round = 0; round < 10; round++) {
        struct child child = child_start("sender", transport_of(state), 0);
        greet(&to, child.fd);
        side_arm(&to, slot_id(0, 1), KEY, 0, BIG_TOKENS);
        assert_true(side_wait(&to, side_progressed, slot_id(0, 1)));
        child_kill(&child);
        side_disarm(&to, slot_id(0, 1));
        if (round == 3) { /* pools of UCX have grown to their size */
            fds = count_fds();
            resident = resident_bytes();
        }
    }
    assert_true(side_wait(&to, fds_are_at_most, fds));
    assert_true(resident_bytes() < resident + (16u << 20));
    /* and one that lives is served */
    struct child child = child_start("sender", transport_of(state), 0);
    greet(&to, child.fd);
    side_arm(&to, slot_id(0, 1), KEY, 0, BIG_TOKENS);
    assert_true(side_wait(&to, side_covered, slot_id(0, 1)));
    assert_true(side_holds(&to, SEED, 0, BIG_COUNT, 0, BIG_TOKENS));
    child_end(&child);
    side_close(&to);
}

/* Over shared memory no more than this can be asked of UCX 1.13 (see KVLINK_TRANSPORT_SHM). */
static void test_a_receiver_comes_to_rest_after_its_sender_was_killed(void **state) {
    uint32_t fds = 0;
    for (uint32_t round = 0; round < 6; round++) {
        struct side to;
        struct side_options options = big_side(transport_of(state), 16);
        side_open(&to, &options);
        struct child child = child_start("sender", transport_of(state), 0);
        greet(&to, child.fd);
        side_arm(&to, slot_id(0, 1), KEY, 0, BIG_TOKENS);
        assert_true(side_wait(&to, side_progressed, slot_id(0, 1)));
        child_kill(&child);
        side_disarm(&to, slot_id(0, 1));
        side_close(&to);
        if (round == 0) {
            fds = count_fds();
        }
    }
    assert_int_equal(count_fds(), fds);
}

static void test_a_killed_receiver_is_reported_and_its_ops_end(void **state) {
    struct side from;
    struct side_options options = big_side(transport_of(state), 16);
    side_open(&from, &options);
    struct child child = child_start("receiver", transport_of(state), 0);
    struct hello hello;
    read_all(child.fd, &hello, sizeof(hello));
    assert_int_equal(kvlink_connect(from.link, 1, (struct bytes){hello.address, hello.len}),
                     STATUS_OK);
    assert_int_equal(side_send(&from, 1, slot_id(0, 1), KEY, 0, BIG_COUNT, 0, BIG_TOKENS),
                     STATUS_OK);
    assert_true(side_wait(&from, side_ops_ended, 0));
    kill(child.pid, SIGSTOP); /* so that something is outstanding when it dies */
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(side_send(&from, 1, slot_id(0, 1), KEY, 0, BIG_COUNT, 0, BIG_TOKENS),
                         STATUS_OK);
    }
    child_kill(&child);
    assert_true(side_wait(&from, side_failed_peers, 1));
    close_peer(&from, 1);
    assert_true(side_ops_ended(&from, 0)); /* before on_closed */
    assert_int_equal(from.peers_failed, 1);
    assert_true(from.ops_by_status[STATUS_UNAVAILABLE] + from.ops_by_status[STATUS_CANCELLED] > 0);
    side_close(&from);
}

static void test_closing_ends_the_ops_to_a_stopped_receiver(void **state) {
    struct side from;
    struct side_options options = big_side(transport_of(state), 16);
    side_open(&from, &options);
    struct child child = child_start("receiver", transport_of(state), 0);
    struct hello hello;
    read_all(child.fd, &hello, sizeof(hello));
    for (uint32_t round = 0; round < 3; round++) {
        assert_int_equal(kvlink_connect(from.link, 1, (struct bytes){hello.address, hello.len}),
                         STATUS_OK);
        assert_int_equal(side_send(&from, 1, slot_id(0, 1), KEY, 0, 1, 0, 16), STATUS_OK);
        assert_true(side_wait(&from, side_ops_ended, 0));
        kill(child.pid, SIGSTOP);
        uint64_t cancelled = from.ops_by_status[STATUS_CANCELLED];
        for (uint32_t i = 0; i < 8; i++) { /* 64 MiB: no buffer takes that */
            assert_int_equal(side_send(&from, 1, slot_id(0, 1), KEY, 0, BIG_COUNT, 0, BIG_TOKENS),
                             STATUS_OK);
        }
        close_peer(&from, 1);
        assert_true(side_ops_ended(&from, 0));
        assert_true(from.ops_by_status[STATUS_CANCELLED] > cancelled);
        assert_int_equal(side_counters(&from).requests_outstanding, 0);
        kill(child.pid, SIGCONT);
    }
    child_end(&child);
    side_close(&from);
}

static void test_a_new_receiver_on_the_same_port_is_reached(void **state) {
    struct side from;
    struct side_options options = big_side(transport_of(state), 16);
    side_open(&from, &options);
    side_fill(&from, SEED, 0, BIG_COUNT, 0, BIG_TOKENS);
    uint16_t port = 0;
    for (uint64_t peer = 1; peer <= 4; peer++) {
        struct child child = child_start("receiver", transport_of(state), port);
        struct hello hello;
        read_all(child.fd, &hello, sizeof(hello));
        assert_true(port == 0 || hello.port == port);
        port = hello.port;
        assert_int_equal(kvlink_connect(from.link, peer, (struct bytes){hello.address, hello.len}),
                         STATUS_OK);
        assert_int_equal(side_send(&from, peer, slot_id(0, 1), KEY, 0, BIG_COUNT, 0, BIG_TOKENS),
                         STATUS_OK);
        char byte = 0;
        write_all(child.fd, &byte, 1);
        read_all(child.fd, &byte, 1);
        assert_int_equal(byte, 1);
        child_kill(&child);
        close_peer(&from, peer);
    }
    side_close(&from);
}

/* ---- nonsense on the port ---- */

static int dial(uint16_t port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_equal(connect(fd, (struct sockaddr *)&at, sizeof(at)), 0);
    return fd;
}

static void test_nonsense_on_the_port_costs_only_its_connection(void **state) {
    (void)state;
    struct side to;
    struct side_options options = big_side(KVLINK_TRANSPORT_TCP, 16);
    side_open(&to, &options);
    struct child child = child_start("sender", KVLINK_TRANSPORT_TCP, 0);
    greet(&to, child.fd);
    side_arm(&to, slot_id(0, 1), KEY, 0, BIG_TOKENS);
    assert_true(side_wait(&to, side_covered, slot_id(0, 1)));
    uint32_t fds = count_fds();
    struct prng prng = {3};
    uint64_t resident = 0;
    for (uint32_t i = 0; i < 1200; i++) {
        unsigned char text[512] = {0};
        size_t len = sizeof(text);
        if (i % 4 == 1) {
            len = (size_t)snprintf((char *)text, sizeof(text),
                                   "GET / HTTP/1.1\r\nHost: worker\r\n\r\n");
        } else if (i % 4 == 2) {
            static const unsigned char tls[] = {0x16, 3, 1, 1, 0x2c, 1, 0, 1, 0x28, 3, 3};
            memcpy(text, tls, sizeof(tls));
        } else if (i % 4 == 3) {
            for (size_t at = 0; at < sizeof(text); at++) {
                text[at] = (unsigned char)prng_next(&prng);
            }
            len = 1 + prng_below(&prng, sizeof(text));
        }
        int fd = dial(kvlink_port(to.link));
        (void)send(fd, text, len, MSG_NOSIGNAL); /* it may have hung up already */
        close(fd);
        if (i == 600) {
            resident = resident_bytes();
        }
    }
    assert_true(side_wait(&to, fds_are_at_most, fds));
    assert_true(resident_bytes() < resident + (16u << 20));
    /* the good peer is still served */
    side_disarm(&to, slot_id(0, 1));
    side_arm(&to, slot_id(0, 1), KEY, 0, BIG_TOKENS);
    assert_true(side_wait(&to, side_covered, slot_id(0, 1)));
    assert_true(side_holds(&to, SEED, 0, BIG_COUNT, 0, BIG_TOKENS));
    child_end(&child);
    side_close(&to);
}

/* ---- what is refused ---- */

static void test_a_taken_port_is_an_error_that_names_it(void **state) {
    (void)state;
    struct side side;
    struct side_options options = odd_side(KVLINK_TRANSPORT_TCP, 16);
    side_open(&side, &options);
    struct kvlink_config config = {.layout = &side.layout,
                                   .kv = side.kv,
                                   .page_count = options.page_count,
                                   .transport = KVLINK_TRANSPORT_TCP,
                                   .host = "127.0.0.1",
                                   .port = kvlink_port(side.link)};
    char text[256] = "";
    struct writer why;
    writer_init(&why, text, sizeof(text) - 1);
    struct kvlink *link = NULL;
    assert_int_equal(kvlink_create(&config, &why, &link), STATUS_EXISTS);
    assert_null(link);
    char port[8];
    snprintf(port, sizeof(port), "%u", config.port);
    assert_non_null(strstr(text, port));
    config.port = 0;
    config.device = "nosuchdevice";
    assert_int_equal(kvlink_create(&config, &why, &link), STATUS_NOT_FOUND);
    assert_non_null(strstr(text, "nosuchdevice"));
    side_close(&side);
}

static void test_addresses_that_are_none_are_refused(void **state) {
    struct side from;
    struct side to;
    struct side_options options = odd_side(transport_of(state), 16);
    side_open(&from, &options);
    side_open(&to, &options);
    struct bytes address = kvlink_address(to.link);
    uint8_t copy[KVLINK_ADDRESS_MAX + 1] = {0};
    for (size_t len = 0; len < address.len; len++) {
        memcpy(copy, address.data, address.len);
        assert_int_equal(kvlink_connect(from.link, 1, (struct bytes){copy, len}), STATUS_INVALID);
        copy[len] ^= 0x10;
        assert_int_equal(kvlink_connect(from.link, 1, (struct bytes){copy, address.len}),
                         STATUS_INVALID);
    }
    assert_int_equal(kvlink_connect(from.link, 1, (struct bytes){copy, sizeof(copy)}),
                     STATUS_INVALID);
    /* one of the other transport */
    struct side other;
    options.transport =
        options.transport == KVLINK_TRANSPORT_TCP ? KVLINK_TRANSPORT_SHM : KVLINK_TRANSPORT_TCP;
    side_open(&other, &options);
    assert_int_equal(kvlink_connect(from.link, 1, kvlink_address(other.link)), STATUS_INVALID);
    assert_int_equal(side_counters(&from).peers_open, 0);
    side_close(&other);
    side_close(&from);
    side_close(&to);
}

static void test_full_tables_say_busy_and_ids_say_what_is_wrong(void **state) {
    struct side from;
    struct side to;
    struct side_options options = odd_side(transport_of(state), 16);
    side_open(&from, &options);
    side_open(&to, &options);
    for (uint64_t peer = 1; peer <= SIDE_PEERS_MAX; peer++) {
        connect_to(&from, peer, &to);
    }
    struct bytes address = kvlink_address(to.link);
    assert_int_equal(kvlink_connect(from.link, 2, address), STATUS_EXISTS);
    assert_int_equal(kvlink_connect(from.link, 99, address), STATUS_BUSY);
    assert_int_equal(kvlink_close(from.link, 99), STATUS_NOT_FOUND);
    assert_int_equal(side_send(&from, 99, 1, KEY, 0, 1, 0, 1), STATUS_NOT_FOUND);
    close_peer(&from, 2);
    assert_int_equal(kvlink_close(from.link, 2), STATUS_NOT_FOUND);
    assert_int_equal(side_send(&from, 2, 1, KEY, 0, 1, 0, 1), STATUS_NOT_FOUND);
    connect_to(&from, 2, &to);
    static const uint32_t ranges[][4] = {
        {0, 0, 0, 1}, {ODD_COUNT, 1, 0, 1},        {1, ODD_COUNT, 0, 1},  {0, UINT32_MAX, 0, 1},
        {0, 1, 0, 0}, {0, 1, ODD_TOKENS + 100, 1}, {0, 1, UINT32_MAX, 2}, {0, 1, 0, UINT32_MAX}};
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        assert_int_equal(
            side_send(&from, 1, 1, KEY, ranges[i][0], ranges[i][1], ranges[i][2], ranges[i][3]),
            STATUS_RANGE);
    }
    /* ops: a burst larger than the table; what was taken ends, what was not does not */
    uint32_t busy = 0;
    for (uint32_t i = 0; i < 2000; i++) {
        enum status status = side_send(&from, 1 + i % 4, 1, KEY, 0, ODD_COUNT, 0, ODD_TOKENS);
        assert_true(status == STATUS_OK || status == STATUS_BUSY);
        busy += status == STATUS_BUSY;
    }
    assert_true(busy > 0);
    assert_true(side_wait(&from, side_ops_ended, 0));
    assert_int_equal(from.ops_by_status[STATUS_OK], 2000 - busy);
    side_close(&from);
    side_close(&to);
}

static void test_arming_says_what_is_wrong_and_changes_nothing(void **state) {
    struct side to;
    struct side_options options = odd_side(transport_of(state), 16);
    side_open(&to, &options);
    uint32_t pages[4] = {0, 1, 2, options.page_count};
    const struct kvlink_arm wrong[] = {
        {.slot = 0, .token_end = 10, .page_count = 1, .pages = pages},
        {.slot = slot_id(SIDE_SLOTS_MAX, 1), .token_end = 10, .page_count = 1, .pages = pages},
        {.slot = slot_id(0, 1),
         .token_first = 10,
         .token_end = 10,
         .page_count = 1,
         .pages = pages},
        {.slot = slot_id(0, 1), .token_end = 33, .page_count = 2, .pages = pages},
        {.slot = slot_id(0, 1), .token_end = 64, .page_count = 4, .pages = pages},
        {.slot = slot_id(0, 1),
         .token_end = ODD_TOKENS + 1,
         .page_count = options.page_count,
         .pages = to.pages},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        assert_int_equal(kvlink_arm(to.link, &wrong[i]), STATUS_RANGE);
    }
    side_arm(&to, slot_id(0, 1), KEY, 0, 48);
    struct kvlink_arm again = {
        .slot = slot_id(0, 2), .token_end = 48, .page_count = 3, .pages = pages};
    assert_int_equal(kvlink_arm(to.link, &again), STATUS_EXISTS);
    assert_int_equal(kvlink_disarm(to.link, slot_id(0, 2)), STATUS_NOT_FOUND);
    assert_int_equal(kvlink_disarm(to.link, slot_id(1, 1)), STATUS_NOT_FOUND);
    assert_int_equal(kvlink_disarm(to.link, slot_id(SIDE_SLOTS_MAX, 1)), STATUS_NOT_FOUND);
    side_disarm(&to, slot_id(0, 1));
    assert_int_equal(kvlink_disarm(to.link, slot_id(0, 1)), STATUS_NOT_FOUND);
    assert_int_equal(kvlink_arm(to.link, &again), STATUS_OK);
    side_close(&to); /* disarms it, with its event */
    assert_int_equal(to.slots[0].disarmed, 2);
}

static void test_stopping_ends_everything_that_was_started(void **state) {
    struct side from;
    struct side to;
    struct side_options options = big_side(transport_of(state), 16);
    side_open(&from, &options);
    side_open(&to, &options);
    for (uint32_t i = 0; i < SIDE_SLOTS_MAX; i++) {
        side_arm(&to, slot_id(i, 1), KEY, 0, BIG_TOKENS);
    }
    connect_to(&from, 1, &to);
    connect_to(&from, 2, &to);
    for (uint32_t i = 0; i < 32; i++) {
        assert_int_equal(side_send(&from, 1 + i % 2, slot_id(i % SIDE_SLOTS_MAX, 1), KEY, 0,
                                   BIG_COUNT, 0, BIG_TOKENS),
                         STATUS_OK);
    }
    assert_int_equal(kvlink_stop(from.link, span_ms(SIDE_WAIT_MS)), STATUS_OK);
    assert_int_equal(from.ops_ended, 32);
    assert_int_equal(from.peers_closed, 2);
    assert_int_equal(kvlink_connect(from.link, 3, kvlink_address(to.link)), STATUS_CANCELLED);
    assert_int_equal(kvlink_stop(to.link, span_ms(SIDE_WAIT_MS)), STATUS_OK);
    for (uint32_t i = 0; i < SIDE_SLOTS_MAX; i++) {
        assert_int_equal(to.slots[i].disarmed, 1);
    }
    side_close(&from);
    side_close(&to);
}

static void test_the_environment_does_not_change_the_transport(void **state) {
    (void)state;
    static const char *const variables[][2] = {
        {"UCX_TLS", "self"},           {"UCX_NET_DEVICES", "nosuchdevice"},
        {"UCX_TCP_PORT_RANGE", "1-2"}, {"UCX_RNDV_THRESH", "0"},
        {"UCX_TCP_TX_SEG_SIZE", "8k"}, {"UCX_KEEPALIVE_INTERVAL", "inf"}};
    for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++) {
        setenv(variables[i][0], variables[i][1], 1);
    }
    struct side from;
    struct side to;
    struct side_options options = odd_side(KVLINK_TRANSPORT_TCP, 16);
    side_open(&from, &options);
    side_open(&to, &options);
    for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++) {
        unsetenv(variables[i][0]);
    }
    close(dial(kvlink_port(to.link))); /* somebody listens there */
    side_fill(&from, SEED, 0, ODD_COUNT, 0, ODD_TOKENS);
    side_arm(&to, slot_id(0, 1), KEY, 0, ODD_TOKENS);
    connect_to(&from, 1, &to);
    assert_int_equal(side_send(&from, 1, slot_id(0, 1), KEY, 0, ODD_COUNT, 0, ODD_TOKENS),
                     STATUS_OK);
    assert_true(side_wait(&to, side_covered, slot_id(0, 1)));
    side_close(&from);
    side_close(&to);
}

#define BOTH_TRANSPORTS(test)                                                                      \
    {"tcp: " #test, test, NULL, NULL, &tcp}, {                                                     \
        "shm: " #test, test, NULL, NULL, &shm                                                      \
    }

int main(int argc, char **argv) {
    static enum kvlink_transport tcp = KVLINK_TRANSPORT_TCP;
    static enum kvlink_transport shm = KVLINK_TRANSPORT_SHM;
    static enum kvlink_transport both = KVLINK_TRANSPORT_AUTO;
    if (argc == 5) {
        int fd = (int)strtol(argv[2], NULL, 10);
        enum kvlink_transport transport = (enum kvlink_transport)strtol(argv[3], NULL, 10);
        if (strcmp(argv[1], "receiver") == 0) {
            run_receiver(fd, transport, (uint16_t)strtol(argv[4], NULL, 10));
        } else {
            run_sender(fd, transport);
        }
        return 0;
    }
    const struct CMUnitTest tests[] = {
        BOTH_TRANSPORTS(test_kv_arrives_with_different_page_sizes_at_both_ends),
        {"both: test_kv_arrives_with_different_page_sizes_at_both_ends",
         test_kv_arrives_with_different_page_sizes_at_both_ends, NULL, NULL, &both},
        BOTH_TRANSPORTS(test_large_ops_are_cut_and_flow_through_a_small_window),
        BOTH_TRANSPORTS(test_small_components_share_a_chunk),
        BOTH_TRANSPORTS(test_a_layout_without_k_and_v_arrives_layer_by_layer),
        BOTH_TRANSPORTS(test_rows_larger_than_a_segment_arrive),
        BOTH_TRANSPORTS(test_every_way_to_take_the_sum_agrees_with_the_writers),
        BOTH_TRANSPORTS(test_kv_arrives_from_pages_of_every_size),
        BOTH_TRANSPORTS(test_kv_arrives_with_new_protocols_of_ucx_too),
        BOTH_TRANSPORTS(test_only_the_missing_range_is_written),
        BOTH_TRANSPORTS(test_what_is_covered_is_never_rewritten),
        BOTH_TRANSPORTS(test_a_stranger_cannot_touch_a_slot),
        BOTH_TRANSPORTS(test_each_kind_of_bad_chunk_spoils_its_slot_once),
        BOTH_TRANSPORTS(test_a_flipped_bit_anywhere_in_a_chunk_is_noticed),
        BOTH_TRANSPORTS(test_a_row_that_changed_after_its_sum_spoils_the_slot),
        BOTH_TRANSPORTS(test_rows_that_nobody_summed_spoil_the_slot),
        BOTH_TRANSPORTS(test_too_many_gaps_spoil_the_slot),
        BOTH_TRANSPORTS(test_messages_that_are_no_chunks_are_dropped_and_counted),
        BOTH_TRANSPORTS(test_a_rendezvous_offer_is_dropped_without_an_operation),
        BOTH_TRANSPORTS(test_no_byte_lands_after_disarmed),
        BOTH_TRANSPORTS(test_a_stopped_sender_does_not_hold_a_slot),
        {"tcp: test_killed_senders_leave_nothing_behind", test_killed_senders_leave_nothing_behind,
         NULL, NULL, &tcp},
        BOTH_TRANSPORTS(test_a_receiver_comes_to_rest_after_its_sender_was_killed),
        BOTH_TRANSPORTS(test_a_killed_receiver_is_reported_and_its_ops_end),
        BOTH_TRANSPORTS(test_closing_ends_the_ops_to_a_stopped_receiver),
        BOTH_TRANSPORTS(test_a_new_receiver_on_the_same_port_is_reached),
        cmocka_unit_test(test_nonsense_on_the_port_costs_only_its_connection),
        cmocka_unit_test(test_a_taken_port_is_an_error_that_names_it),
        BOTH_TRANSPORTS(test_addresses_that_are_none_are_refused),
        BOTH_TRANSPORTS(test_full_tables_say_busy_and_ids_say_what_is_wrong),
        BOTH_TRANSPORTS(test_arming_says_what_is_wrong_and_changes_nothing),
        BOTH_TRANSPORTS(test_stopping_ends_everything_that_was_started),
        cmocka_unit_test(test_the_environment_does_not_change_the_transport),
    };
    const char *filter = getenv("KVLINK_TEST");
    if (filter != NULL) {
        cmocka_set_test_filter(filter);
    }
    return cmocka_run_group_tests_name("kvlink_link", tests, NULL, NULL);
}
