#include "tools/batonctl/fetch.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/check.h"
#include "runtime/clock.h"
#include "runtime/config.h"

#define IN_FLIGHT_MAX 256u
#define BODY_MAX      (64u * 1024u * 1024u)
#define HEAD_MAX      (16u * 1024u)

enum flight_state {
    FLIGHT_WAITING, /* for its turn */
    FLIGHT_RESOLVING,
    FLIGHT_CONNECTING,
    FLIGHT_SENDING,
    FLIGHT_READING,
    FLIGHT_OVER,
};

struct flight {
    struct fetch *fetch;
    enum flight_state state;
    int fd;
    struct instant deadline;
    char host[CONFIG_HOST_CAP];
    char port[8];
    struct addrinfo hints;
    struct addrinfo *found;
    const struct addrinfo *next; /* of `found`: to be tried if this one fails */
    struct gaicb *lookup; /* glibc's resolver threads write into it: freed only once it is done */
    char *data;           /* request, then reply */
    size_t len;
    size_t cap;
    size_t sent;
};

static void flight_end(struct flight *flight, enum fetch_end end, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void flight_end(struct flight *flight, enum fetch_end end, const char *format, ...) {
    char why[512];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(why, sizeof why, format, arguments);
    va_end(arguments);
    text_copy(flight->fetch->why, sizeof flight->fetch->why, why);
    flight->fetch->end = end;
    flight->fetch->at = clock_now();
    flight->state = FLIGHT_OVER;
    if (flight->fd >= 0) {
        (void)close(flight->fd);
        flight->fd = -1;
    }
}

static void flight_fail(struct flight *flight, int error) {
    flight_end(flight, error == ECONNREFUSED ? FETCH_REFUSED : FETCH_BROKEN, "%s",
               error == ECONNREFUSED ? "nothing listens there" : strerror(error));
}

/* ---- connecting ----------------------------------------------------------------------------- */

/* Tries the next address of the host; `error` is what the one before ended with. */
static void flight_connect(struct flight *flight, int error) {
    flight->state = FLIGHT_CONNECTING;
    while (flight->next != NULL) {
        const struct addrinfo *address = flight->next;
        flight->next = address->ai_next;
        if (flight->fd >= 0) {
            (void)close(flight->fd);
        }
        flight->fd = socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (flight->fd >= 0 && (connect(flight->fd, address->ai_addr, address->ai_addrlen) == 0 ||
                                errno == EINPROGRESS)) {
            return;
        }
        error = errno;
    }
    flight_fail(flight, error);
}

/* Names are looked up by glibc's own threads, so that a resolver that hangs costs one program. */
static void flight_lookup(struct flight *flight) {
    flight->lookup = calloc(1, sizeof *flight->lookup);
    CHECK(flight->lookup != NULL);
    flight->lookup->ar_name = flight->host;
    flight->lookup->ar_service = flight->port;
    flight->lookup->ar_request = &flight->hints;
    if (getaddrinfo_a(GAI_NOWAIT, (struct gaicb *[]){flight->lookup}, 1, NULL) != 0) {
        free(flight->lookup);
        flight->lookup = NULL;
        flight_end(flight, FETCH_BROKEN, "its host name cannot be looked up now");
        return;
    }
    flight->state = FLIGHT_RESOLVING;
}

static void flight_resolved(struct flight *flight) {
    int error = gai_error(flight->lookup);
    if (error == EAI_INPROGRESS) {
        return;
    }
    flight->found = flight->lookup->ar_result;
    flight->next = flight->found;
    free(flight->lookup);
    flight->lookup = NULL;
    if (error != 0) {
        flight_end(flight, FETCH_BROKEN, "its host name '%s' is not known: %s", flight->host,
                   gai_strerror(error));
        return;
    }
    flight_connect(flight, 0);
}

static void flight_start(struct flight *flight, struct instant deadline) {
    struct config_address address;
    flight->deadline = deadline;
    if (!config_address_parse(flight->fetch->address, &address) || address.port == 0) {
        flight_end(flight, FETCH_BROKEN, "'%s' is not HOST:PORT", flight->fetch->address);
        return;
    }
    (void)snprintf(flight->host, sizeof flight->host, "%s", address.host);
    (void)snprintf(flight->port, sizeof flight->port, "%u", address.port);
    flight->cap = HEAD_MAX;
    flight->data = malloc(flight->cap);
    CHECK(flight->data != NULL);
    flight->len = (size_t)snprintf(
        flight->data, flight->cap,
        "%s %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
        flight->fetch->is_post ? "POST" : "GET", flight->fetch->path, flight->fetch->address);
    CHECK(flight->len < flight->cap);
    flight->hints =
        (struct addrinfo){.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
    if (getaddrinfo(flight->host, flight->port, &flight->hints, &flight->found) == 0) {
        flight->next = flight->found;
        flight_connect(flight, 0);
        return;
    }
    flight->found = NULL;
    flight->hints.ai_flags = AI_NUMERICSERV;
    flight_lookup(flight);
}

/* ---- the reply ------------------------------------------------------------------------------ */

static bool reply_length(const char *head, size_t *length_out) {
    for (const char *line = strstr(head, "\r\n"); line != NULL; line = strstr(line + 2, "\r\n")) {
        if (strncasecmp(line + 2, "content-length:", 15) == 0) {
            *length_out = strtoull(line + 17, NULL, 10);
            return true;
        }
    }
    return false;
}

/* The peer has closed. */
static void flight_take(struct flight *flight) {
    struct fetch *fetch = flight->fetch;
    flight->data[flight->len] = '\0';
    char *end = strstr(flight->data, "\r\n\r\n");
    int status = 0;
    if (end == NULL || sscanf(flight->data, "HTTP/1.%*c %3d", &status) != 1) {
        flight_end(flight, FETCH_BROKEN,
                   flight->len == 0 ? "it closed the connection without an answer"
                                    : "what answers there does not speak HTTP");
        return;
    }
    end[2] = '\0';
    size_t head = (size_t)(end - flight->data) + 4;
    size_t length = flight->len - head;
    size_t announced = length;
    if (reply_length(flight->data, &announced) && announced != length) {
        flight_end(flight, FETCH_BROKEN, "its answer broke off after %zu of %zu bytes", length,
                   announced);
        return;
    }
    memmove(flight->data, flight->data + head, length + 1);
    fetch->body = flight->data;
    fetch->len = length;
    fetch->status = status;
    flight->data = NULL;
    flight_end(flight, FETCH_ANSWERED, "%s", "");
}

static void flight_read(struct flight *flight) {
    while (true) {
        if (flight->cap - flight->len < 4096) {
            flight->cap *= 2;
            flight->data = realloc(flight->data, flight->cap);
            CHECK(flight->data != NULL);
        }
        ssize_t got = read(flight->fd, flight->data + flight->len, flight->cap - flight->len - 1);
        if (got < 0) {
            if (errno != EAGAIN && errno != EINTR) {
                flight_fail(flight, errno);
            }
            return;
        }
        if (got == 0) {
            flight_take(flight);
            return;
        }
        flight->len += (size_t)got;
        if (flight->len > BODY_MAX) {
            flight_end(flight, FETCH_BROKEN, "its answer is longer than %u MiB", BODY_MAX >> 20);
            return;
        }
    }
}

static void flight_write(struct flight *flight) {
    if (flight->state == FLIGHT_CONNECTING) {
        int error = 0;
        socklen_t size = sizeof error;
        if (getsockopt(flight->fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) {
            flight_connect(flight, error);
            return;
        }
        flight->state = FLIGHT_SENDING;
    }
    ssize_t sent =
        send(flight->fd, flight->data + flight->sent, flight->len - flight->sent, MSG_NOSIGNAL);
    if (sent < 0) {
        if (errno != EAGAIN && errno != EINTR) {
            flight_fail(flight, errno);
        }
        return;
    }
    flight->sent += (size_t)sent;
    if (flight->sent == flight->len) {
        flight->state = FLIGHT_READING;
        flight->len = 0;
    }
}

/* ---- all of them ---------------------------------------------------------------------------- */

static void flight_late(struct flight *flight, struct span within) {
    double seconds = span_to_seconds(within);
    switch (flight->state) {
    case FLIGHT_RESOLVING:
        flight_end(flight, FETCH_SILENT, "its host name was not resolved within %g s", seconds);
        break;
    case FLIGHT_CONNECTING:
        flight_end(flight, FETCH_SILENT, "no connection within %g s", seconds);
        break;
    case FLIGHT_WAITING:
    case FLIGHT_SENDING:
    case FLIGHT_READING:
    case FLIGHT_OVER:
        flight_end(flight, FETCH_SILENT, "connected, but no reply within %g s", seconds);
        break;
    }
}

static void flights_poll(struct flight **active, uint32_t count) {
    struct pollfd polls[IN_FLIGHT_MAX];
    struct instant next = instant_add(clock_now(), span_ms(1000));
    bool is_resolving = false;
    for (uint32_t i = 0; i < count; i++) {
        struct flight *flight = active[i];
        polls[i] = (struct pollfd){.fd = flight->fd,
                                   .events = flight->state == FLIGHT_READING ? POLLIN : POLLOUT};
        next = instant_min(next, flight->deadline);
        is_resolving = is_resolving || flight->state == FLIGHT_RESOLVING;
    }
    int64_t left = span_to_ms(instant_since(next, clock_now())) + 1;
    int wait = left < 0 ? 0 : is_resolving && left > 5 ? 5 : (int)left;
    if (poll(polls, count, wait) < 0) {
        CHECK(errno == EINTR);
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (active[i]->state == FLIGHT_RESOLVING) {
            flight_resolved(active[i]);
        } else if (polls[i].revents != 0) {
            if (active[i]->state == FLIGHT_READING) {
                flight_read(active[i]);
            } else {
                flight_write(active[i]);
            }
        }
    }
}

void fetch_all(struct fetch *fetches, uint32_t count, struct span within) {
    struct flight *flights = calloc(count + 1, sizeof *flights);
    CHECK(flights != NULL);
    struct flight *active[IN_FLIGHT_MAX];
    uint32_t active_count = 0;
    uint32_t started = 0;
    bool has_lookups = false;
    while (started < count || active_count > 0) {
        while (started < count && active_count < IN_FLIGHT_MAX) {
            struct flight *flight = &flights[started];
            *flight = (struct flight){.fetch = &fetches[started], .fd = -1};
            flight_start(flight, instant_add(clock_now(), within));
            active[active_count++] = flight;
            started++;
        }
        flights_poll(active, active_count);
        uint32_t kept = 0;
        for (uint32_t i = 0; i < active_count; i++) {
            struct flight *flight = active[i];
            if (flight->state != FLIGHT_OVER && instant_reached(clock_now(), flight->deadline)) {
                flight_late(flight, within);
            }
            if (flight->state != FLIGHT_OVER) {
                active[kept++] = flight;
                continue;
            }
            free(flight->data);
            flight->data = NULL;
            if (flight->found != NULL) {
                freeaddrinfo(flight->found);
            }
            has_lookups = has_lookups || flight->lookup != NULL;
        }
        active_count = kept;
    }
    if (!has_lookups) {
        free(flights); /* else resolver threads still write into them, until the process ends */
    }
}

void fetch_fini(struct fetch *fetch) {
    free(fetch->body);
    fetch->body = NULL;
}
