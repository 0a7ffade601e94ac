/* SipHash-2-4 with 128-bit output: a keyed hash for identities that a peer or client must not
 * predict.
 *
 * Source: the public specification by Aumasson and Bernstein, and its test vectors
 * (tests/unit/base). */
#ifndef BASE_SIPHASH_H
#define BASE_SIPHASH_H

#include <stddef.h>
#include <stdint.h>

struct siphash_key {
    uint64_t k0;
    uint64_t k1;
};
struct siphash128 {
    uint64_t low;
    uint64_t high;
};

/* data: len bytes, read as little-endian words. */
struct siphash128 siphash128(struct siphash_key key, const void *data, size_t len);

#endif
