/* HTTP requests to admin ports, all at once, each with a deadline.
 *
 * A program that is stopped accepts connections and says nothing, one that is gone refuses them,
 * and one that is cut off does neither: the three are told apart, because an operator acts
 * differently on them. Blocks until the last answer or `within`. Main thread. */
#ifndef BATONCTL_FETCH_H
#define BATONCTL_FETCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/time.h"

enum fetch_end {
    FETCH_ANSWERED, /* with any HTTP status */
    FETCH_REFUSED,  /* nothing listens there */
    FETCH_SILENT,   /* no answer within the time; `why` says how far it came */
    FETCH_BROKEN,   /* the address is no address, the connection broke, or it was no HTTP */
};

struct fetch {
    const char *address; /* "host:port"; borrowed */
    const char *path;    /* with query; borrowed */
    bool is_post;
    /* The outcome. */
    enum fetch_end end;
    struct instant at; /* when it ended */
    int status;        /* of HTTP; 0 unless answered */
    char *body;        /* NUL-terminated; owned by the fetch; NULL unless answered */
    size_t len;        /* of the body */
    char why[160];     /* a phrase if not answered: "no reply within 2 s" */
};

void fetch_all(struct fetch *fetches, uint32_t count, struct span within);
void fetch_fini(struct fetch *fetch);

#endif
