/* Small deterministic generators: splitmix64 as a stream, and as a counter-based hash.
 *
 * Not for secrets: slot keys and incarnations come from the operating system in programs and from
 * the seed in the simulator. */
#ifndef BASE_PRNG_H
#define BASE_PRNG_H

#include <stdint.h>

struct prng {
    uint64_t state;
};

/* A good 64-bit mix of one word: a bijection. */
static inline uint64_t mix64(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
static inline uint64_t prng_next(struct prng *prng) {
    prng->state += 0x9e3779b97f4a7c15ull;
    return mix64(prng->state);
}
/* Uniform in [0, bound); bound > 0. The bias below 2^-32 does not matter to any user. */
static inline uint32_t prng_below(struct prng *prng, uint32_t bound) {
    return (uint32_t)(((prng_next(prng) >> 32) * (uint64_t)bound) >> 32);
}
/* The counter-based generator of the sampler: same (seed, position) => same bits, anywhere. */
static inline uint64_t prng_at(uint64_t seed, uint64_t position) {
    return mix64(mix64(seed + 0x9e3779b97f4a7c15ull) ^ (position * 0xd1342543de82ef95ull + 1));
}

#endif
