/* What every fuzz target is: one function over bytes, and a way to read bytes as numbers.
 *
 * A target never fails for bad input: it aborts (CHECK, ASan, UBSan) when the code under test
 * breaks a promise. Under clang the main program is libFuzzer's; elsewhere replay.c runs kept
 * inputs. */
#ifndef TESTS_FUZZ_FUZZ_H
#define TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/check.h"

/* libFuzzer's entry; always returns 0. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

/* Bytes read as a program; past their end everything reads as 0. */
struct input {
    const uint8_t *data;
    size_t len;
};

static inline struct input input_of(const uint8_t *data, size_t len) {
    return (struct input){data, len};
}

static inline uint8_t input_u8(struct input *input) {
    if (input->len == 0) {
        return 0;
    }
    input->len--;
    return *input->data++;
}

static inline uint16_t input_u16(struct input *input) {
    uint16_t low = input_u8(input);
    return (uint16_t)(low | input_u8(input) << 8);
}

static inline uint64_t input_u64(struct input *input) {
    uint64_t value = 0;
    for (unsigned i = 0; i < 8; i++) {
        value |= (uint64_t)input_u8(input) << 8 * i;
    }
    return value;
}

/* In [0, bound); bound > 0. */
static inline uint32_t input_below(struct input *input, uint32_t bound) {
    return (bound <= 256 ? input_u8(input) : input_u16(input)) % bound;
}

/* The next `len` bytes, or what is left of them. */
static inline struct bytes input_bytes(struct input *input, size_t len) {
    struct bytes bytes = {input->data, len < input->len ? len : input->len};
    input->data += bytes.len;
    input->len -= bytes.len;
    return bytes;
}

/* A copy of exactly the given size on the heap, so that ASan sees a read past its end; never NULL.
 * The caller frees it. */
static inline uint8_t *input_copy(struct bytes bytes) {
    uint8_t *copy = malloc(bytes.len > 0 ? bytes.len : 1);
    CHECK(copy != NULL);
    if (bytes.len > 0) {
        memcpy(copy, bytes.data, bytes.len);
    }
    return copy;
}

/* The same with a NUL behind it; bytes that are NUL become '?'. */
static inline char *input_text(struct bytes bytes) {
    char *text = malloc(bytes.len + 1);
    CHECK(text != NULL);
    for (size_t i = 0; i < bytes.len; i++) {
        text[i] = bytes.data[i] == '\0' ? '?' : (char)bytes.data[i];
    }
    text[bytes.len] = '\0';
    return text;
}

#endif
