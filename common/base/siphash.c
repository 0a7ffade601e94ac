#include "base/siphash.h"

#include <string.h>

struct sip_state {
    uint64_t v0, v1, v2, v3;
};

static inline uint64_t sip_rotate(uint64_t x, int by) {
    return x << by | x >> (64 - by);
}

static inline void sip_round(struct sip_state *s) {
    s->v0 += s->v1;
    s->v1 = sip_rotate(s->v1, 13) ^ s->v0;
    s->v0 = sip_rotate(s->v0, 32);
    s->v2 += s->v3;
    s->v3 = sip_rotate(s->v3, 16) ^ s->v2;
    s->v0 += s->v3;
    s->v3 = sip_rotate(s->v3, 21) ^ s->v0;
    s->v2 += s->v1;
    s->v1 = sip_rotate(s->v1, 17) ^ s->v2;
    s->v2 = sip_rotate(s->v2, 32);
}

static inline void sip_word(struct sip_state *s, uint64_t word) {
    s->v3 ^= word;
    sip_round(s);
    sip_round(s);
    s->v0 ^= word;
}

struct siphash128 siphash128(struct siphash_key key, const void *data, size_t len) {
    const unsigned char *at = data;
    struct sip_state s = {key.k0 ^ 0x736f6d6570736575ull, key.k1 ^ 0x646f72616e646f6dull ^ 0xee,
                          key.k0 ^ 0x6c7967656e657261ull, key.k1 ^ 0x7465646279746573ull};
    size_t left = len;
    while (left >= 8) {
        uint64_t word = 0;
        memcpy(&word, at, 8);
        sip_word(&s, word);
        at += 8;
        left -= 8;
    }
    uint64_t last = (uint64_t)len << 56;
    for (size_t i = 0; i < left; i++) {
        last |= (uint64_t)at[i] << (8 * i);
    }
    sip_word(&s, last);
    s.v2 ^= 0xee;
    for (int i = 0; i < 4; i++) {
        sip_round(&s);
    }
    struct siphash128 out = {.low = s.v0 ^ s.v1 ^ s.v2 ^ s.v3};
    s.v1 ^= 0xdd;
    for (int i = 0; i < 4; i++) {
        sip_round(&s);
    }
    out.high = s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
    return out;
}
