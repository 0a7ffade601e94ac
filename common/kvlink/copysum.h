/* Copies rows and takes the XXH3-64 of each in the same pass, so that memory is touched once.
 *
 * Each sum equals XXH3_64bits(row, row_bytes), for every length and alignment. With AVX2 or AVX-512
 * it is taken from the very registers that are stored; elsewhere, and up to 240 bytes, by the
 * library. Pure; any thread. */
#ifndef KVLINK_COPYSUM_H
#define KVLINK_COPYSUM_H

#include <stddef.h>
#include <stdint.h>

enum copysum_cpu {
    COPYSUM_CPU_PLAIN = 0, /* the library's sum after the copy */
    COPYSUM_CPU_AVX2,
    COPYSUM_CPU_AVX512,
};

/* The best that this processor has. */
enum copysum_cpu copysum_best(void);

/* Takes `rows` rows of row_bytes >= 1 that lie one after the other at `from`: the sum of each into
 * sums_out, and with `to` (or NULL) the rows to there. from and to do not overlap. Long aligned
 * runs are stored past the caches, and are visible to other threads only after copysum_flush. cpu:
 * at most copysum_best(). */
void copysum_rows(enum copysum_cpu cpu, void *to, const void *from, size_t row_bytes, size_t rows,
                  uint64_t *sums_out);

/* All that was stored is visible to other threads afterwards, as any other store. */
void copysum_flush(void);

#endif
