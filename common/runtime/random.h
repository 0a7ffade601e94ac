/* Random bytes of the operating system, for incarnations, keys and seeds that nobody may guess. */
#ifndef RUNTIME_RANDOM_H
#define RUNTIME_RANDOM_H

#include <stddef.h>
#include <stdint.h>

/* Fills `len` bytes from getrandom. Blocks only before the kernel's pool is ready at boot; CHECKs
 * that the kernel has the call. Any thread. */
void random_bytes(void *to, size_t len);
/* Never 0, so that 0 can mean none. */
uint64_t random_u64(void);

#endif
