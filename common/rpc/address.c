#include "rpc/address.h"

#include "base/bytes.h"
#include "rpc/rpc.h"

#include <errno.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

void rpc_error_set(struct rpc_error *error, const char *format, ...) {
    if (error == NULL) {
        return;
    }
    va_list args;
    va_start(args, format);
    (void)vsnprintf(error->text, sizeof error->text, format, args); /* cut is fine */
    va_end(args);
}

static bool port_parse(const char *text, uint16_t *port_out) {
    uint32_t port = 0;
    size_t digits = 0;
    for (; text[digits] >= '0' && text[digits] <= '9' && digits < 6; digits++) {
        port = port * 10 + (uint32_t)(text[digits] - '0');
    }
    if (digits == 0 || text[digits] != '\0' || port > UINT16_MAX) {
        return false;
    }
    *port_out = (uint16_t)port;
    return true;
}

enum status address_parse(const char *text, struct address *out, struct rpc_error *error_out) {
    if (text == NULL) {
        rpc_error_set(error_out, "the address is missing: write HOST:PORT");
        return STATUS_INVALID;
    }
    const char *rest = text;
    if (strncmp(rest, "http://", 7) == 0) {
        rest += 7;
    } else if (strstr(rest, "://") != NULL) {
        rpc_error_set(error_out, "address \"%.100s\": only http:// or no scheme is understood",
                      text);
        return STATUS_INVALID;
    }
    bool is_bracketed = rest[0] == '[';
    const char *host = is_bracketed ? rest + 1 : rest;
    const char *host_end = is_bracketed ? strchr(host, ']') : strrchr(host, ':');
    const char *colon = host_end != NULL && is_bracketed ? host_end + 1 : host_end;
    if (host_end == NULL || *colon != ':') {
        rpc_error_set(error_out, "address \"%.100s\" has no port: write HOST:PORT", text);
        return STATUS_INVALID;
    }
    size_t len = (size_t)(host_end - host);
    if (len == 0 || len >= ADDRESS_HOST_CAP) {
        rpc_error_set(
            error_out,
            "address \"%.100s\" has %s host: write HOST:PORT (0.0.0.0 for all interfaces)", text,
            len == 0 ? "no" : "too long a");
        return STATUS_INVALID;
    }
    for (size_t i = 0; i < len; i++) {
        if (!is_bracketed && host[i] == ':') {
            rpc_error_set(error_out, "address \"%.100s\": write IPv6 hosts in brackets, [::1]:8000",
                          text);
            return STATUS_INVALID;
        }
        if ((unsigned char)host[i] <= ' ' || host[i] == '/' || (unsigned char)host[i] >= 127) {
            rpc_error_set(error_out,
                          "address \"%.100s\": the host has a character at %zu that no "
                          "host name has",
                          text, (size_t)(host - text) + i);
            return STATUS_INVALID;
        }
    }
    struct address address;
    if (!port_parse(colon + 1, &address.port)) {
        rpc_error_set(error_out, "address \"%.100s\": the port is not a number from 0 to 65535",
                      text);
        return STATUS_INVALID;
    }
    memcpy(address.host, host, len);
    address.host[len] = '\0';
    struct writer writer;
    writer_init(&writer, address.text, sizeof address.text - 1);
    writer_printf(&writer, is_bracketed ? "[%s]:%u" : "%s:%u", address.host,
                  (unsigned)address.port);
    address.text[writer.len] = '\0';
    *out = address;
    return STATUS_OK;
}

/* 0, or the errno of the step that failed. */
static int bind_once(const struct addrinfo *info) {
    int fd = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return errno;
    }
    int error = 0;
    int on = 1; /* as gRPC does: a port in TIME_WAIT is free, a listening one is not */
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
        bind(fd, info->ai_addr, info->ai_addrlen) != 0) {
        error = errno;
    }
    (void)close(fd); /* nothing was written */
    return error;
}

enum status address_probe(const struct address *address, struct rpc_error *error_out) {
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *list = NULL;
    char port[8];
    (void)snprintf(port, sizeof port, "%u", (unsigned)address->port); /* five digits at most */
    int rc = getaddrinfo(address->host, port, &hints, &list);
    if (rc != 0) {
        rpc_error_set(error_out, "cannot listen on %.100s: host \"%.60s\" does not resolve (%s)",
                      address->text, address->host, gai_strerror(rc));
        return STATUS_INVALID;
    }
    int error = 0;
    bool is_bound = false;
    for (const struct addrinfo *info = list; info != NULL; info = info->ai_next) {
        int now = bind_once(info);
        if (now == EADDRINUSE || error == 0) {
            error = now != 0 ? now : error;
        }
        is_bound = is_bound || now == 0;
    }
    freeaddrinfo(list);
    if (error == EADDRINUSE) {
        rpc_error_set(error_out,
                      "cannot listen on %.100s: port %u is in use by another program; stop it or "
                      "choose another port",
                      address->text, (unsigned)address->port);
        return STATUS_EXISTS;
    }
    if (is_bound) { /* one family missing (no IPv6 here) is not an error */
        return STATUS_OK;
    }
    if (error == EADDRNOTAVAIL) {
        rpc_error_set(error_out,
                      "cannot listen on %.100s: this machine has no such address; use "
                      "0.0.0.0 for all interfaces",
                      address->text);
        return STATUS_INVALID;
    }
    rpc_error_set(error_out, "cannot listen on %.100s: %s", address->text, strerror(error));
    return error == EACCES ? STATUS_INVALID : STATUS_IO;
}
