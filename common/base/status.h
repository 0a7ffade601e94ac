/* Status: the outcome of every fallible function in Baton.
 *
 * Expected failures are values of this enum; bugs are CHECK (check.h) and abort. Outputs are
 * written only on STATUS_OK. One place (rpc/status_map.h) maps these to gRPC codes. */
#ifndef BASE_STATUS_H
#define BASE_STATUS_H

enum status {
    STATUS_OK = 0,
    STATUS_INVALID,     /* the input is wrong; the caller must change it */
    STATUS_RANGE,       /* an index, length or value is outside its bounds */
    STATUS_NOT_FOUND,   /* the named thing does not exist (or no longer) */
    STATUS_EXISTS,      /* the named thing exists already */
    STATUS_BUSY,        /* a fixed capacity is full; later may succeed */
    STATUS_UNAVAILABLE, /* a peer or service cannot be reached now */
    STATUS_TIMEOUT,     /* a deadline passed */
    STATUS_CANCELLED,   /* ended by the caller's own wish */
    STATUS_CORRUPT,     /* bytes that fail their own checks */
    STATUS_UNSUPPORTED, /* understood, not served by this build */
    STATUS_IO,          /* the operating system said no; errno is in the log line */
    STATUS_INTERNAL,    /* a library misbehaved */
};

#define MUST_USE __attribute__((warn_unused_result))

/* Lower-case name without prefix ("not_found"); static storage; never NULL. */
const char *status_name(enum status status);

#endif
