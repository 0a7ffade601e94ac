/* The loop of copysum.c for one width of vectors; included there once per width, hence no guard.
 *
 * KERNEL(name): a name of this width. KERNEL_TARGET: the compiler's name of the instruction set.
 * KERNEL_BYTES: of a vector. KERNEL_SWAP(v): neighbouring 64-bit lanes exchanged. In place of
 * <immintrin.h> these are the compilers' own vectors: one text for both widths. */

typedef uint64_t KERNEL(lanes) __attribute__((vector_size(KERNEL_BYTES)));
typedef uint64_t KERNEL(bytes) /* anywhere in memory */
    __attribute__((vector_size(KERNEL_BYTES), aligned(1), may_alias));

/* One instruction, but not one that compilers see in the C for it. */
__attribute__((target(KERNEL_TARGET), always_inline)) static inline KERNEL(lanes)
    KERNEL(multiply_low)(KERNEL(lanes) a, KERNEL(lanes) b) {
    KERNEL(lanes) product;
    __asm__("vpmuludq %2, %1, %0" : "=v"(product) : "v"(a), "v"(b));
    return product;
}

__attribute__((target(KERNEL_TARGET), always_inline)) static inline void
KERNEL(loop)(struct copysum *sum, const struct run *run, enum copysum_to where) {
    enum { PER_STRIPE = STRIPE_BYTES / KERNEL_BYTES };
    KERNEL(lanes) lanes[PER_STRIPE];
    memcpy(lanes, sum->lanes, sizeof(lanes));
    size_t in_block = sum->stripes % STRIPES_PER_BLOCK;
    for (size_t i = 0; i < run->stripes; i++) {
        size_t at = i * STRIPE_BYTES;
        __builtin_prefetch((const void *)(run->ahead + at), 0, 2);
        for (size_t k = 0; k < PER_STRIPE; k++) {
            size_t part = k * KERNEL_BYTES;
            KERNEL(lanes) data = *(const KERNEL(bytes) *)(const void *)(run->from + at + part);
            if (where == COPYSUM_TO_CACHE) {
                *(KERNEL(bytes) *)(void *)(run->to + at + part) = data;
            } else if (where == COPYSUM_TO_MEMORY) {
                __asm__("vmovntdq %1, %0"
                        : "=m"(*(KERNEL(bytes) *)(void *)(run->to + at + part))
                        : "v"(data));
            }
            const uint8_t *secret = secret_at(in_block * SECRET_STEP + part);
            KERNEL(lanes) keyed = data ^ *(const KERNEL(bytes) *)(const void *)secret;
            lanes[k] += KERNEL_SWAP(data) + KERNEL(multiply_low)(keyed, keyed >> 32);
        }
        in_block++;
        if (in_block == STRIPES_PER_BLOCK) {
            in_block = 0;
            KERNEL(lanes) prime = (KERNEL(lanes)){0} + PRIME32_1;
            for (size_t k = 0; k < PER_STRIPE; k++) {
                const uint8_t *secret = secret_at(SECRET_SCRAMBLE + k * KERNEL_BYTES);
                KERNEL(lanes) mixed = lanes[k] ^ (lanes[k] >> 47);
                mixed ^= *(const KERNEL(bytes) *)(const void *)secret;
                lanes[k] = KERNEL(multiply_low)(mixed, prime) +
                           (KERNEL(multiply_low)(mixed >> 32, prime) << 32);
            }
        }
    }
    sum->stripes += run->stripes;
    memcpy(sum->lanes, lanes, sizeof(lanes));
}

__attribute__((target(KERNEL_TARGET))) static void
KERNEL(take)(struct copysum *sum, const struct run *run, enum copysum_to where) {
    switch (where) {
    case COPYSUM_TO_CACHE: KERNEL(loop)(sum, run, COPYSUM_TO_CACHE); break;
    case COPYSUM_TO_MEMORY: KERNEL(loop)(sum, run, COPYSUM_TO_MEMORY); break;
    case COPYSUM_TO_NOWHERE: KERNEL(loop)(sum, run, COPYSUM_TO_NOWHERE); break;
    }
}

#undef KERNEL
#undef KERNEL_TARGET
#undef KERNEL_BYTES
#undef KERNEL_SWAP
