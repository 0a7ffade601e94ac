/* Copies a payload and takes its XXH3-64 in the same pass, so that memory is touched once.
 *
 * One side of the copy is in one piece of `len` bytes (`whole`: what arrived, or what will be
 * sent), the other in any number of pieces; the pieces are taken in order. The result equals
 * XXH3_64bits(whole, len) for every length, cut and alignment. With AVX2 or AVX-512 the sum is
 * taken from the very registers that are stored; elsewhere, and up to 240 bytes, by the library
 * over `whole` at the end. Pure; one owner at a time. */
#ifndef KVLINK_COPYSUM_H
#define KVLINK_COPYSUM_H

#include <stdalign.h>
#include <stddef.h>
#include <stdint.h>

enum copysum_cpu {
    COPYSUM_CPU_PLAIN = 0, /* the library's sum after the copy */
    COPYSUM_CPU_AVX2,
    COPYSUM_CPU_AVX512,
};

/* Where the bytes go. */
enum copysum_to {
    COPYSUM_TO_CACHE = 0, /* they are read again soon */
    COPYSUM_TO_MEMORY,    /* they are not: long aligned runs go past the caches */
    COPYSUM_TO_NOWHERE,   /* only summed; `from` is in `whole` */
};

struct copysum {
    alignas(64) uint64_t lanes[8];
    const uint8_t *whole;
    size_t len;
    size_t taken;   /* bytes */
    size_t stripes; /* of 64 bytes, summed */
    enum copysum_cpu cpu;
};

/* The best that this processor has. */
enum copysum_cpu copysum_best(void);

/* whole: stays the caller's, is written only if pieces are copied into it. cpu: at most
 * copysum_best(). */
void copysum_begin(struct copysum *sum, const void *whole, size_t len, enum copysum_cpu cpu);

/* The next `len` bytes, at whole + taken: copied from `from` to `to`, one of which is there. They
 * do not overlap. Together the pieces must not be longer than `whole`. to: NULL if nowhere.
 * next: where the next piece will be read, or NULL: a hint, so that it is not waited for. */
void copysum_take(struct copysum *sum, void *to, const void *from, size_t len,
                  enum copysum_to where, const void *next);

/* Bytes taken so far. */
static inline size_t copysum_taken(const struct copysum *sum) {
    return sum->taken;
}

/* Only after all of `whole` was taken. Stores past the caches are visible to other threads after
 * it, as any other store. */
uint64_t copysum_end(struct copysum *sum);

#endif
