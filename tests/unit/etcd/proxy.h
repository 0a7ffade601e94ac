/* A TCP forwarder between a client and an etcd, which tests can cut, hold silent, or close. */
#ifndef ETCD_PROXY_H
#define ETCD_PROXY_H

#include <stdint.h>

struct proxy;

enum proxy_mode {
    PROXY_PASS,
    PROXY_HOLD, /* accepts, reads nothing, sends nothing: a peer that does not answer */
};

/* Forwards a free port of 127.0.0.1 to `target`. */
struct proxy *proxy_open(uint16_t target);
uint16_t proxy_port(const struct proxy *proxy);
/* Resets all connections. Returns when it is done. */
void proxy_cut(struct proxy *proxy);
void proxy_set_mode(struct proxy *proxy, enum proxy_mode mode);
void proxy_close(struct proxy *proxy);

#endif
