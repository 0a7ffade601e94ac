/* The loop of copysum.c for one width of vectors; included there once per width, hence no guard.
 *
 * KERNEL(name): a name of this width. KERNEL_TARGET: the compiler's name of the instruction set.
 * KERNEL_BYTES: of a vector. KERNEL_SWAP(v): neighbouring 64-bit lanes exchanged. In place of
 * <immintrin.h> these are the compilers' own vectors: one text for both widths. */

typedef uint64_t KERNEL(lanes) __attribute__((vector_size(KERNEL_BYTES)));
typedef uint64_t KERNEL(bytes) /* anywhere in memory */
    __attribute__((vector_size(KERNEL_BYTES), aligned(1), may_alias));

enum { KERNEL(per_stripe) = STRIPE_BYTES / KERNEL_BYTES };

/* One instruction, but not one that compilers see in the C for it. */
__attribute__((target(KERNEL_TARGET), always_inline)) static inline KERNEL(lanes)
    KERNEL(multiply_low)(KERNEL(lanes) a, KERNEL(lanes) b) {
    KERNEL(lanes) product;
    __asm__("vpmuludq %2, %1, %0" : "=v"(product) : "v"(a), "v"(b));
    return product;
}

/* Adds the stripe at `from` to the lanes, and stores it at `to`. */
__attribute__((target(KERNEL_TARGET), always_inline)) static inline void
KERNEL(stripe)(KERNEL(lanes) * lanes, const uint8_t *from, uint8_t *to, const uint8_t *secret,
               enum where where) {
    for (size_t k = 0; k < KERNEL(per_stripe); k++) {
        size_t part = k * KERNEL_BYTES;
        KERNEL(lanes) data = *(const KERNEL(bytes) *)(const void *)(from + part);
        if (where == TO_CACHE) {
            *(KERNEL(bytes) *)(void *)(to + part) = data;
        } else if (where == TO_MEMORY) {
            __asm__("vmovntdq %1, %0" : "=m"(*(KERNEL(bytes) *)(void *)(to + part)) : "v"(data));
        }
        KERNEL(lanes) keyed = data ^ *(const KERNEL(bytes) *)(const void *)(secret + part);
        lanes[k] += KERNEL_SWAP(data) + KERNEL(multiply_low)(keyed, keyed >> 32);
    }
}

__attribute__((target(KERNEL_TARGET), always_inline)) static inline void
KERNEL(scramble)(KERNEL(lanes) * lanes) {
    KERNEL(lanes) prime = (KERNEL(lanes)){0} + PRIME32_1;
    for (size_t k = 0; k < KERNEL(per_stripe); k++) {
        const uint8_t *secret = secret_at(SECRET_SCRAMBLE + k * KERNEL_BYTES);
        KERNEL(lanes) mixed = lanes[k] ^ (lanes[k] >> 47);
        mixed ^= *(const KERNEL(bytes) *)(const void *)secret;
        lanes[k] =
            KERNEL(multiply_low)(mixed, prime) + (KERNEL(multiply_low)(mixed >> 32, prime) << 32);
    }
}

__attribute__((target(KERNEL_TARGET), always_inline)) static inline void
KERNEL(loop)(const struct run *run, enum where where) {
    size_t stripes = (run->row_bytes - 1) / STRIPE_BYTES; /* without the last */
    size_t tail = run->row_bytes - stripes * STRIPE_BYTES;
    for (size_t r = 0; r < run->rows; r++) {
        const uint8_t *from = run->from + r * run->row_bytes;
        uint8_t *to = where == TO_NOWHERE ? NULL : run->to + r * run->row_bytes;
        KERNEL(lanes) lanes[KERNEL(per_stripe)];
        memcpy(lanes, lanes_start, sizeof(lanes));
        size_t in_block = 0;
        for (size_t i = 0; i < stripes; i++) {
            size_t at = i * STRIPE_BYTES;
            if (where != TO_NOWHERE) { /* what is only summed is in the cache */
                __builtin_prefetch((const void *)((uintptr_t)from + at + AHEAD_BYTES), 0, 2);
            }
            KERNEL(stripe)
            (lanes, from + at, where == TO_NOWHERE ? NULL : to + at,
             secret_at(in_block * SECRET_STEP), where);
            in_block++;
            if (in_block == STRIPES_PER_BLOCK) {
                in_block = 0;
                KERNEL(scramble)(lanes);
            }
        }
        /* The last 64 bytes are one more stripe, of which some may have been in the one before. */
        const uint8_t *last = from + run->row_bytes - STRIPE_BYTES;
        const uint8_t *secret = secret_at(SECRET_LAST);
        if (where != TO_NOWHERE && tail == STRIPE_BYTES) {
            KERNEL(stripe)(lanes, last, to + run->row_bytes - STRIPE_BYTES, secret, where);
        } else {
            KERNEL(stripe)(lanes, last, NULL, secret, TO_NOWHERE);
            if (where != TO_NOWHERE) {
                memcpy(to + stripes * STRIPE_BYTES, from + stripes * STRIPE_BYTES, tail);
            }
        }
        uint64_t merged[8];
        memcpy(merged, lanes, sizeof(merged));
        run->sums[r] = merge(merged, run->row_bytes);
    }
}

__attribute__((target(KERNEL_TARGET))) static void KERNEL(take)(const struct run *run,
                                                                enum where where) {
    switch (where) {
    case TO_CACHE: KERNEL(loop)(run, TO_CACHE); break;
    case TO_MEMORY: KERNEL(loop)(run, TO_MEMORY); break;
    case TO_NOWHERE: KERNEL(loop)(run, TO_NOWHERE); break;
    }
}

#undef KERNEL
#undef KERNEL_TARGET
#undef KERNEL_BYTES
#undef KERNEL_SWAP
