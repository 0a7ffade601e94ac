#include "kvlink/link.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/prng.h"
#include "base/time.h"
#include "kvlink/sum.h"
#include "runtime/clock.h"
#include "runtime/log.h"

#include <ucs/debug/debug.h>
#include <ucs/debug/log_def.h>

/* ---- the address that travels: our own envelope around UCX's ---- */

#define ANSWERS_OUT_MS 30
#define ADDRESS_MAGIC  0x41564b42u /* "BKVA" */

/* In front of UCX's bytes. Between machines of one byte order only, as UCX itself. */
struct address_head {
    uint32_t magic;
    uint8_t version;
    uint8_t transports;
    uint16_t len; /* of UCX's bytes */
    uint16_t port;
    uint8_t reserved[6];
    uint64_t host;
    uint64_t sum; /* of the head before it, and of UCX's bytes */
};
_Static_assert(sizeof(struct address_head) == 32, "no padding in the address head");

static uint64_t address_sum(const struct address_head *head, const uint8_t *ucx) {
    return XXH3_64bits(head, offsetof(struct address_head, sum)) ^ XXH3_64bits(ucx, head->len);
}

/* UCX unpacks an address without checking it, so garbage must not get that far. */
enum status link_address_open(const struct kvlink *link, struct bytes address,
                              struct bytes *ucx_out, bool *is_same_host_out, uint16_t *port_out) {
    struct address_head head;
    if (address.len <= sizeof(head) || address.len > KVLINK_ADDRESS_MAX) {
        return STATUS_INVALID;
    }
    memcpy(&head, address.data, sizeof(head));
    const uint8_t *ucx = address.data + sizeof(head);
    if (head.magic != ADDRESS_MAGIC || head.version != LINK_ADDRESS_VERSION ||
        address.len != sizeof(head) + head.len || head.sum != address_sum(&head, ucx) ||
        (head.transports & link->transports) == 0) {
        return STATUS_INVALID;
    }
    *ucx_out = (struct bytes){ucx, head.len};
    *port_out = head.port;
    *is_same_host_out =
        (head.transports & link->transports & LINK_TRANSPORT_SHM) != 0 && head.host == link->host;
    return STATUS_OK;
}

/* Links with the same boot and the same /dev/shm can share memory. Only a hint for the size of
 * chunks: UCX decides for itself. */
static uint64_t read_host(void) {
    char boot[64] = "";
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file != NULL) {
        if (fgets(boot, sizeof(boot), file) == NULL) {
            boot[0] = '\0';
        }
        fclose(file);
    }
    struct stat shm;
    uint64_t device = stat("/dev/shm", &shm) == 0 ? (uint64_t)shm.st_dev : 0;
    return XXH3_64bits(boot, strlen(boot)) ^ mix64(device);
}

static enum status address_make(struct kvlink *link, struct writer *why) {
    ucp_address_t *ucx;
    size_t ucx_len;
    ucs_status_t status = ucp_worker_get_address(link->worker, &ucx, &ucx_len);
    if (status != UCS_OK) {
        writer_printf(why, "UCX gives no worker address: %s", ucs_status_string(status));
        return STATUS_INTERNAL;
    }
    enum status result = STATUS_OK;
    struct address_head head = {.magic = ADDRESS_MAGIC,
                                .version = LINK_ADDRESS_VERSION,
                                .transports = (uint8_t)link->transports,
                                .len = (uint16_t)ucx_len,
                                .port = kvlink_port(link),
                                .host = link->host};
    if (ucx_len > KVLINK_ADDRESS_MAX - sizeof(head)) {
        writer_printf(why, "the UCX worker address has %zu bytes, more than %zu", ucx_len,
                      KVLINK_ADDRESS_MAX - sizeof(head));
        result = STATUS_INTERNAL;
    } else {
        head.sum = address_sum(&head, (const uint8_t *)ucx);
        memcpy(link->address, &head, sizeof(head));
        memcpy(link->address + sizeof(head), ucx, ucx_len);
        link->address_len = (uint32_t)(sizeof(head) + ucx_len);
    }
    ucp_worker_release_address(link->worker, ucx);
    return result;
}

/* ---- device and port ---- */

static bool is_any_host(const char *host) {
    return host == NULL || host[0] == '\0' || strcmp(host, "0.0.0.0") == 0 ||
           strcmp(host, "::") == 0;
}

static bool is_inet(const struct sockaddr *address) {
    return address != NULL && (address->sa_family == AF_INET || address->sa_family == AF_INET6);
}

static bool is_same_host(const struct sockaddr *a, const struct sockaddr *b) {
    if (a->sa_family != b->sa_family) {
        return false;
    }
    if (a->sa_family == AF_INET) {
        return ((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)(const void *)b)->sin_addr.s_addr;
    }
    return memcmp(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr,
                  &((const struct sockaddr_in6 *)(const void *)b)->sin6_addr,
                  sizeof(struct in6_addr)) == 0;
}

static const struct ifaddrs *find_device(const struct ifaddrs *all, const char *device) {
    const struct ifaddrs *found = NULL;
    for (const struct ifaddrs *each = all; each != NULL; each = each->ifa_next) {
        if (is_inet(each->ifa_addr) && (each->ifa_flags & IFF_UP) != 0 &&
            strcmp(each->ifa_name, device) == 0 &&
            (found == NULL || found->ifa_addr->sa_family != AF_INET)) {
            found = each; /* UCX prefers IPv4 too */
        }
    }
    return found;
}

static const struct ifaddrs *find_first_device(const struct ifaddrs *all) {
    const struct ifaddrs *loopback = NULL;
    for (const struct ifaddrs *each = all; each != NULL; each = each->ifa_next) {
        if (each->ifa_addr == NULL || each->ifa_addr->sa_family != AF_INET ||
            (each->ifa_flags & IFF_UP) == 0) {
            continue;
        }
        if ((each->ifa_flags & IFF_LOOPBACK) == 0) {
            return each;
        }
        loopback = loopback == NULL ? each : loopback;
    }
    return loopback;
}

static const struct ifaddrs *find_host(const struct ifaddrs *all, const char *host) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct addrinfo *answers = NULL;
    if (getaddrinfo(host, NULL, &hints, &answers) != 0) {
        return NULL;
    }
    const struct ifaddrs *found = NULL;
    for (const struct addrinfo *a = answers; a != NULL && found == NULL; a = a->ai_next) {
        for (const struct ifaddrs *each = all; each != NULL; each = each->ifa_next) {
            if (is_inet(each->ifa_addr) && (each->ifa_flags & IFF_UP) != 0 &&
                is_same_host(each->ifa_addr, a->ai_addr)) {
                found = each;
                break;
            }
        }
    }
    freeaddrinfo(answers);
    return found;
}

/* Chooses the device; *address_out: what UCX will bind there. */
static enum status choose_device(struct kvlink *link, struct sockaddr_storage *address_out,
                                 struct writer *why) {
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all) != 0) {
        writer_printf(why, "cannot list network interfaces: %s", strerror(errno));
        return STATUS_IO;
    }
    const struct ifaddrs *found;
    if (link->config.device != NULL) {
        found = find_device(all, link->config.device);
    } else if (is_any_host(link->config.host)) {
        found = find_first_device(all);
    } else {
        found = find_host(all, link->config.host);
        /* the same choice among the interface's addresses as UCX makes */
        found = found != NULL ? find_device(all, found->ifa_name) : NULL;
    }
    enum status status = STATUS_OK;
    if (found == NULL && link->config.device != NULL) {
        writer_printf(why, "there is no network interface %s that is up and has an address",
                      link->config.device);
        status = STATUS_NOT_FOUND;
    } else if (found == NULL) {
        writer_printf(why,
                      "no network interface of this machine has the address of %s: name the "
                      "interface for KV traffic instead",
                      is_any_host(link->config.host) ? "any network" : link->config.host);
        status = STATUS_NOT_FOUND;
    } else {
        text_copy(link->device, sizeof(link->device), found->ifa_name);
        size_t len = found->ifa_addr->sa_family == AF_INET ? sizeof(struct sockaddr_in)
                                                           : sizeof(struct sockaddr_in6);
        memset(address_out, 0, sizeof(*address_out));
        memcpy(address_out, found->ifa_addr, len);
    }
    freeifaddrs(all);
    return status;
}

/* Binds and closes: finds a free port (port 0) or learns that one is taken. As UCX 1.13 does,
 * without SO_REUSEADDR. */
static enum status probe_port(const struct sockaddr_storage *address, uint16_t *port,
                              struct writer *why) {
    struct sockaddr_storage at = *address;
    bool is_v4 = at.ss_family == AF_INET;
    socklen_t len = is_v4 ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    if (is_v4) {
        ((struct sockaddr_in *)(void *)&at)->sin_port = htons(*port);
    } else {
        ((struct sockaddr_in6 *)(void *)&at)->sin6_port = htons(*port);
    }
    int fd = socket(at.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        writer_printf(why, "cannot make a socket: %s", strerror(errno));
        return STATUS_IO;
    }
    enum status status = STATUS_OK;
    if (bind(fd, (struct sockaddr *)&at, len) != 0 || listen(fd, 1) != 0 ||
        getsockname(fd, (struct sockaddr *)&at, &len) != 0) {
        int error = errno;
        if (error == EADDRINUSE) {
            writer_printf(why, "port %u for KV traffic is taken: choose another, or 0 for any",
                          *port);
            status = STATUS_EXISTS;
        } else {
            writer_printf(why, "port %u for KV traffic cannot be used: %s", *port, strerror(error));
            status = STATUS_IO;
        }
    } else {
        *port = ntohs(is_v4 ? ((struct sockaddr_in *)(void *)&at)->sin_port
                            : ((struct sockaddr_in6 *)(void *)&at)->sin6_port);
    }
    close(fd);
    return status;
}

static bool is_inet_socket(int fd, bool is_remote, uint16_t port) {
    struct sockaddr_storage at;
    socklen_t len = sizeof(at);
    int result = is_remote ? getpeername(fd, (struct sockaddr *)&at, &len)
                           : getsockname(fd, (struct sockaddr *)&at, &len);
    if (result != 0 || !is_inet((const struct sockaddr *)&at)) {
        return false;
    }
    uint16_t found = at.ss_family == AF_INET
                         ? ((const struct sockaddr_in *)(const void *)&at)->sin_port
                         : ((const struct sockaddr_in6 *)(const void *)&at)->sin6_port;
    return ntohs(found) == port;
}

/* Calls `each` for every open descriptor of the process. */
static void for_each_fd(void (*each)(int fd, void *arg), void *arg) {
    DIR *dir = opendir("/proc/self/fd");
    for (const struct dirent *entry; dir != NULL && (entry = readdir(dir)) != NULL;) {
        char *end;
        long fd = strtol(entry->d_name, &end, 10);
        if (end != entry->d_name && fd != dirfd(dir)) {
            each((int)fd, arg);
        }
    }
    if (dir != NULL) {
        closedir(dir);
    }
}

struct listener {
    uint16_t port;
    bool is_done;
};

static void reset_listener(int fd, void *arg) {
    struct listener *listener = arg;
    int is_listening = 0;
    socklen_t len = sizeof(is_listening);
    struct linger linger = {.l_onoff = 1, .l_linger = 0};
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &is_listening, &len) == 0 && is_listening != 0 &&
        is_inet_socket(fd, false, listener->port)) {
        listener->is_done = setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)) == 0;
    }
}

/* UCX 1.13 binds its listener without SO_REUSEADDR, so the connections of a process that ended keep
 * its port taken for a minute (TIME_WAIT), and its successor cannot start on the same port. A
 * connection that is reset instead of shut down leaves nothing behind; accepted sockets inherit the
 * listener's linger time of 0. Nothing that a receiver sends is needed by anybody then. */
static void reset_on_close(const struct kvlink *link) {
    struct listener listener = {.port = link->port};
    for_each_fd(reset_listener, &listener);
    if (!listener.is_done) {
        LOG_WARN("kv listener not found: after a restart its port may be taken for a minute",
                 LOG_U64("port", link->port));
    }
}

/* ---- the sockets of an endpoint ---- */

static void note_fd(int fd, void *arg) {
    struct kvlink *link = arg;
    if ((uint32_t)fd < LINK_FDS_MAX) {
        link->fds_before[fd / 64] |= 1ull << fd % 64;
    }
}

void link_sockets_before(struct kvlink *link) {
    memset(link->fds_before, 0, sizeof(link->fds_before));
    for_each_fd(note_fd, link);
}

static void note_socket(int fd, void *arg) {
    struct peer *peer = arg;
    struct stat about;
    if ((uint32_t)fd < LINK_FDS_MAX && (peer->link->fds_before[fd / 64] & 1ull << fd % 64) == 0 &&
        peer->socket_count < LINK_PEER_SOCKETS && fstat(fd, &about) == 0 &&
        S_ISSOCK(about.st_mode)) {
        peer->sockets[peer->socket_count].fd = fd;
        peer->sockets[peer->socket_count].inode = about.st_ino;
        peer->socket_count++;
    }
}

void link_sockets_after(struct peer *peer) {
    peer->socket_count = 0;
    for_each_fd(note_socket, peer);
}

void link_sockets_shut(const struct peer *peer) {
    for (uint32_t i = 0; i < peer->socket_count; i++) {
        struct stat about;
        int fd = peer->sockets[i].fd;
        /* the same socket still, and not one that another thread opened at that moment */
        if (fstat(fd, &about) == 0 && about.st_ino == peer->sockets[i].inode &&
            is_inet_socket(fd, true, peer->port)) {
            (void)shutdown(fd, SHUT_RDWR); /* fails only if the peer was faster */
        }
    }
}

/* ---- UCX's settings ---- */

/* UCX logs to stdout by default. Its WARN and ERROR lines become ours; the rest is not kept. */
static ucs_log_func_rc_t on_ucx_log(const char *file, unsigned line, const char *function,
                                    ucs_log_level_t level,
                                    const ucs_log_component_config_t *component, const char *format,
                                    va_list args) {
    (void)file;
    (void)line;
    (void)component;
    if (level <= UCS_LOG_LEVEL_WARN) {
        char text[512];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        int len = vsnprintf(text, sizeof(text), format, args);
#pragma GCC diagnostic pop
        LOG_WARN("ucx reports", LOG_TEXT("what", len < 0 ? format : text),
                 LOG_TEXT("where", function));
    }
    return UCS_LOG_FUNC_RC_STOP;
}

static void init_process(void) {
    /* UCX 1.13 installs crash handlers that print and hang on; a crash shall be a core dump. */
    static const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++) {
        ucs_debug_disable_signal(signals[i]);
    }
    ucs_log_push_handler(on_ucx_log);
}

struct setting {
    const char *name; /* as ucp_config_modify wants it: without the transport's prefix for TCP */
    const char *variable; /* as the environment would say it */
    uint32_t transports;  /* that have it; UCX 1.13 warns about settings nobody took */
    const char *value;    /* NULL: filled in */
};

#define BOTH (LINK_TRANSPORT_TCP | LINK_TRANSPORT_SHM)

static const struct setting settings[] = {
    {"TLS", "UCX_TLS", BOTH, NULL},
    {"NET_DEVICES", "UCX_NET_DEVICES", LINK_TRANSPORT_TCP, NULL},
    {"PORT_RANGE", "UCX_TCP_PORT_RANGE", LINK_TRANSPORT_TCP, NULL},
    /* never rendezvous: it would be an operation that the receiver cannot end alone */
    {"RNDV_THRESH", "UCX_RNDV_THRESH", BOTH, "inf"},
    /* one chunk and the headers: what is received at once is still in the L2 cache when it is
     * copied (measured, in README.md) */
    {"TX_SEG_SIZE", "UCX_TCP_TX_SEG_SIZE", LINK_TRANSPORT_TCP, "320K"},
    {"RX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE", LINK_TRANSPORT_TCP, "320K"},
    {"MAX_IOV", "UCX_TCP_MAX_IOV", LINK_TRANSPORT_TCP, "16"},
    /* the default blocks in connect(), for minutes if the peer's host is gone */
    {"CONN_NB", "UCX_TCP_CONN_NB", LINK_TRANSPORT_TCP, "y"},
    {"KEEPIDLE", "UCX_TCP_KEEPIDLE", LINK_TRANSPORT_TCP, "2s"},
    {"KEEPINTVL", "UCX_TCP_KEEPINTVL", LINK_TRANSPORT_TCP, "1s"},
    {"KEEPCNT", "UCX_TCP_KEEPCNT", LINK_TRANSPORT_TCP, "3"},
    {"KEEPALIVE_INTERVAL", "UCX_KEEPALIVE_INTERVAL", BOTH, "500ms"},
    /* nothing is registered; the cache would patch the allocator and mmap of the whole process */
    {"RCACHE_ENABLE", "UCX_RCACHE_ENABLE", BOTH, "n"},
    /* one chunk and UCX's own headers; segments are allocated whole in /dev/shm, 4 MiB in all */
    {"MM_SEG_SIZE", "UCX_POSIX_SEG_SIZE", LINK_TRANSPORT_SHM, "62K"},
    {"MM_FIFO_SIZE", "UCX_POSIX_FIFO_SIZE", LINK_TRANSPORT_SHM, "32"},
    {"MM_RX_BUFS_GROW", "UCX_POSIX_RX_BUFS_GROW", LINK_TRANSPORT_SHM, "32"},
    /* without it the death of a peer is never noticed over shared memory */
    {"MM_ERROR_HANDLING", "UCX_POSIX_ERROR_HANDLING", LINK_TRANSPORT_SHM, "y"},
};

/* What we do not set comes from the environment, if it is there: that must not go unseen. */
static void warn_about_environment(void) {
    extern char **environ;
    for (char **each = environ; *each != NULL; each++) {
        const char *equals = strchr(*each, '=');
        if (strncmp(*each, "UCX_", 4) != 0 || equals == NULL) {
            continue;
        }
        bool is_ours = false;
        size_t len = (size_t)(equals - *each);
        /* of the whole process, read when the library is loaded: nothing of the transport */
        if (strncmp(*each, "UCX_MEM_EVENTS=", 15) == 0 ||
            strncmp(*each, "UCX_HANDLE_ERRORS=", 18) == 0 || strncmp(*each, "UCX_LOG_", 8) == 0) {
            continue;
        }
        for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
            is_ours |= strlen(settings[i].variable) == len &&
                       strncmp(settings[i].variable, *each, len) == 0;
        }
        if (is_ours) {
            LOG_WARN("ucx variable ignored: the link sets this itself",
                     LOG_BYTES("variable", *each, len));
        } else {
            LOG_WARN("ucx variable in effect: remove it unless it is meant",
                     LOG_BYTES("variable", *each, len));
        }
    }
}

static enum status configure(struct kvlink *link, ucp_config_t *ucx, struct writer *why) {
    char port_range[16];
    (void)snprintf(port_range, sizeof(port_range), "%u-%u", link->port, link->port);
    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
        const struct setting *setting = &settings[i];
        if ((setting->transports & link->transports) == 0) {
            continue;
        }
        const char *value = setting->value;
        if (strcmp(setting->name, "TLS") == 0) {
            value = link->transports == BOTH                 ? "tcp,posix"
                    : link->transports == LINK_TRANSPORT_TCP ? "tcp"
                                                             : "posix";
        } else if (strcmp(setting->name, "NET_DEVICES") == 0) {
            value = link->device;
        } else if (strcmp(setting->name, "PORT_RANGE") == 0) {
            value = port_range;
        }
        ucs_status_t status = ucp_config_modify(ucx, setting->name, value);
        if (status != UCS_OK) {
            writer_printf(why, "UCX refuses %s=%s: %s", setting->name, value,
                          ucs_status_string(status));
            return STATUS_INTERNAL;
        }
    }
    return STATUS_OK;
}

static enum status open_context(struct kvlink *link, struct writer *why) {
    ucp_config_t *ucx = NULL;
    ucs_status_t status = ucp_config_read(NULL, NULL, &ucx);
    if (status != UCS_OK) {
        writer_printf(why, "UCX does not read its configuration: %s (look at UCX_ variables)",
                      ucs_status_string(status));
        return STATUS_INTERNAL;
    }
    enum status result = configure(link, ucx, why);
    if (result == STATUS_OK) {
        ucp_params_t params = {
            .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME,
            .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
            .name = "kvlink",
        };
        status = ucp_init(&params, ucx, &link->context);
        if (status != UCS_OK) {
            link->context = NULL;
            writer_printf(why, "UCX does not start: %s", ucs_status_string(status));
            result = STATUS_INTERNAL;
        }
    }
    ucp_config_release(ucx);
    return result;
}

static enum status open_worker(struct kvlink *link, struct writer *why) {
    ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        /* one thread at a time: created here, then used by the link thread only */
        .thread_mode = UCS_THREAD_MODE_SERIALIZED,
    };
    ucs_status_t status = ucp_worker_create(link->context, &params, &link->worker);
    if (status != UCS_OK) {
        link->worker = NULL;
        writer_printf(why, "UCX opens no worker on %s port %u: %s",
                      link->device[0] != '\0' ? link->device : "shared memory", link->port,
                      ucs_status_string(status));
        return status == UCS_ERR_BUSY ? STATUS_EXISTS : STATUS_INTERNAL;
    }
    status = ucp_worker_get_efd(link->worker, &link->worker_fd);
    if (status == UCS_OK) {
        ucp_am_handler_param_t handler = {
            .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                          UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
            .id = LINK_AM_ID,
            .flags = UCP_AM_FLAG_WHOLE_MSG,
            .cb = link_on_chunk,
            .arg = link,
        };
        status = ucp_worker_set_am_recv_handler(link->worker, &handler);
    }
    if (status != UCS_OK) {
        writer_printf(why, "UCX does not set up its worker: %s", ucs_status_string(status));
        return STATUS_INTERNAL;
    }
    return STATUS_OK;
}

enum status link_ucx_open(struct kvlink *link, struct writer *why) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, init_process); /* cannot fail */
    warn_about_environment();
    switch (link->config.transport) {
    case KVLINK_TRANSPORT_AUTO: link->transports = BOTH; break;
    case KVLINK_TRANSPORT_TCP: link->transports = LINK_TRANSPORT_TCP; break;
    case KVLINK_TRANSPORT_SHM: link->transports = LINK_TRANSPORT_SHM; break;
    }
    bool is_tcp = (link->transports & LINK_TRANSPORT_TCP) != 0;
    struct sockaddr_storage address = {0};
    if (is_tcp) {
        enum status status = choose_device(link, &address, why);
        if (status != STATUS_OK) {
            return status;
        }
    }
    /* With port 0 somebody else may take the port between the probe and UCX: then try again. */
    enum status status = STATUS_INTERNAL;
    for (int attempt = 0; attempt < 8; attempt++) {
        size_t why_len = why->len;
        link->port = link->config.port;
        if (is_tcp) {
            status = probe_port(&address, &link->port, why);
            if (status != STATUS_OK) {
                return status;
            }
        }
        status = open_context(link, why);
        if (status == STATUS_OK) {
            status = open_worker(link, why);
        }
        if (status == STATUS_OK || status != STATUS_EXISTS || link->config.port != 0) {
            break;
        }
        link_ucx_close(link);
        why->len = why_len;
    }
    if (status != STATUS_OK) {
        return status;
    }
    if (link_chunk_type_make(link) != UCS_OK) {
        writer_printf(why, "UCX makes no datatype for chunks: no memory");
        return STATUS_INTERNAL;
    }
    if (is_tcp) {
        reset_on_close(link);
    }
    link->host = read_host();
    status = address_make(link, why);
    if (status == STATUS_OK) {
        LOG_INFO("kv link open",
                 LOG_TEXT("transports", link->transports == BOTH ? "tcp,posix"
                                        : is_tcp                 ? "tcp"
                                                                 : "posix"),
                 LOG_TEXT("device", link->device), LOG_U64("port", link->port),
                 LOG_TEXT("rendezvous", "off"), LOG_TEXT("segments", "tcp 320K, posix 62K"),
                 LOG_U64("window_bytes", link->config.window_bytes),
                 LOG_U64("chunk_bytes", CHUNK_BYTES_MAX),
                 LOG_U64("address_bytes", link->address_len),
                 LOG_TEXT("ucx", ucp_get_version_string()));
    }
    return status;
}

/* UCX 1.13 asserts (ucp_request.c:684) when a worker is destroyed while its answer to somebody's
 * first contact waits to be sent, and says nowhere that one does: so it gets time to be sent. A
 * peer that is stopped at that very moment is not helped by it; programs do not destroy, see
 * kvlink_abandon. */
static void let_answers_out(struct kvlink *link) {
    struct instant end = instant_add(clock_now(), span_ms(ANSWERS_OUT_MS));
    while (clock_now().ns < end.ns) {
        if (ucp_worker_progress(link->worker) == 0) {
            (void)poll(NULL, 0, 1);
        }
    }
}

void link_ucx_close(struct kvlink *link) {
    if (link->worker != NULL) {
        let_answers_out(link);
        ucp_worker_destroy(link->worker);
        link->worker = NULL;
    }
    if (link->context != NULL) {
        ucp_cleanup(link->context);
        link->context = NULL;
    }
    if (link->chunk_type != 0) {
        ucp_dt_destroy(link->chunk_type);
        link->chunk_type = 0;
    }
}
