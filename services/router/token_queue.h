/* Tokens on their way to a client, with their logprobs where those were asked for.
 *
 * Plain memory that grows as needed and is bounded by the request's own max_tokens, which the core
 * has counted in its token store. Zeroed is empty. The owner's thread, or its lock. */
#ifndef ROUTER_TOKEN_QUEUE_H
#define ROUTER_TOKEN_QUEUE_H

#include <stdbool.h>
#include <stdint.h>

struct token_queue {
    uint32_t *tokens; /* [count] */
    uint32_t count;
    uint32_t cap;
    uint32_t logprobs_cap; /* 0: none of them has logprobs, else all have */
    float *logprobs;       /* [count] */
    uint32_t *top_counts;  /* [count] alternatives of each token */
    uint32_t top_count;
    uint32_t top_cap;
    uint32_t *top_tokens; /* [top_count] */
    float *top_logprobs;  /* [top_count] */
};

/* One token, and what belongs to it. */
struct token_item {
    uint32_t token;
    bool has_logprobs;
    float logprob;
    uint32_t top_count;
    const uint32_t *top_tokens;
    const float *top_logprobs;
};

/* All items of a queue have logprobs, or none has. Aborts without memory. */
void token_queue_put(struct token_queue *queue, const struct token_item *item);
/* The item `at`, borrowed until the queue changes. *top_at is where its alternatives begin, 0 for
 * the first item, and is moved behind them. */
struct token_item token_queue_at(const struct token_queue *queue, uint32_t at, uint32_t *top_at);
/* Forgets the first `count` tokens and their logprobs. */
void token_queue_drop(struct token_queue *queue, uint32_t count);
/* Frees the memory; empty again. */
void token_queue_fini(struct token_queue *queue);

#endif
