/* How long encode and decode take, in nanoseconds a token: the numbers of common/wire/README.md. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/check.h"
#include "wire/session.h"

static double now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec * 1e9 + (double)at.tv_nsec;
}

static void measure(const char *name, const struct message *message, uint32_t tokens) {
    struct wire_buffer buffer = {0};
    struct wire_arena arena = {0};
    static struct message out;
    const int rounds = (int)(20000000 / (tokens + 200));
    double start = now_ns();
    for (int i = 0; i < rounds; i++) {
        CHECK(wire_session_encode(message, &buffer) == STATUS_OK);
    }
    double encoded = now_ns();
    for (int i = 0; i < rounds; i++) {
        CHECK(wire_session_decode(wire_buffer_bytes(&buffer), &arena, &out) == STATUS_OK);
        wire_arena_reset(&arena);
    }
    double decoded = now_ns();
    printf("%-24s %8zu bytes  encode %8.0f ns (%.2f a token)  decode %8.0f ns (%.2f a token)\n",
           name, buffer.len, (encoded - start) / rounds, (encoded - start) / rounds / tokens,
           (decoded - encoded) / rounds, (decoded - encoded) / rounds / tokens);
    wire_buffer_fini(&buffer);
    wire_arena_fini(&arena);
}

int main(void) {
    static uint32_t tokens[100000];
    static uint64_t attempts[100000];
    for (uint32_t i = 0; i < 100000; i++) {
        tokens[i] = i * 7 % 128256;
        attempts[i] = (uint64_t)i << 24 | 1;
    }
    static struct message message;
    for (uint32_t count = 1; count <= 4096; count *= 16) {
        char name[32];
        (void)snprintf(name, sizeof name, "tokens of %u requests", (unsigned)count);
        message = (struct message){.kind = MESSAGE_TOKENS, .u.tokens = {count, attempts, tokens}};
        measure(name, &message, count);
    }
    static float logprobs[256 * LOGPROBS_TOP_MAX];
    static uint32_t top_counts[256];
    for (uint32_t i = 0; i < 256; i++) {
        top_counts[i] = 1 + LOGPROBS_TOP_MAX;
    }
    message = (struct message){.kind = MESSAGE_TOKENS, .u.tokens = {256, attempts, tokens}};
    message.u.tokens.logprobs = logprobs;
    message.u.tokens.top_counts = top_counts;
    message.u.tokens.top_count = 256 * LOGPROBS_TOP_MAX;
    message.u.tokens.top_tokens = tokens;
    message.u.tokens.top_logprobs = logprobs;
    measure("the same, 20 alternatives", &message, 256);
    message = (struct message){.kind = MESSAGE_ADMIT};
    message.u.admit.attempt.v = 1;
    message.u.admit.token_count = 100000;
    message.u.admit.tokens = tokens;
    message.u.admit.output_first = 1;
    message.u.admit.max_new = 1;
    message.u.admit.sampling = (struct sampling){
        .temperature = 1.0f, .top_p = 1.0f, .top_k = -1, .repetition_penalty = 1.0f};
    measure("admit of 100000 tokens", &message, 100000);
    return 0;
}
