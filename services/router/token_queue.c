#include "services/router/token_queue.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

static void *grown(void *memory, uint32_t cap, size_t size) {
    void *moved = realloc(memory, cap * size);
    CHECK(moved != NULL);
    return moved;
}

static uint32_t cap_for(uint32_t cap, uint32_t needed) {
    uint32_t doubled = cap == 0 ? 4 : 2 * cap;
    return doubled > needed ? doubled : needed;
}

static void put_logprobs(struct token_queue *queue, const struct token_item *item) {
    if (queue->logprobs_cap < queue->cap) {
        queue->logprobs_cap = queue->cap;
        queue->logprobs = grown(queue->logprobs, queue->cap, sizeof *queue->logprobs);
        queue->top_counts = grown(queue->top_counts, queue->cap, sizeof *queue->top_counts);
    }
    uint32_t needed = queue->top_count + item->top_count;
    if (needed > queue->top_cap) {
        queue->top_cap = cap_for(queue->top_cap, needed);
        queue->top_tokens = grown(queue->top_tokens, queue->top_cap, sizeof *queue->top_tokens);
        queue->top_logprobs =
            grown(queue->top_logprobs, queue->top_cap, sizeof *queue->top_logprobs);
    }
    queue->logprobs[queue->count] = item->logprob;
    queue->top_counts[queue->count] = item->top_count;
    if (item->top_count > 0) {
        memcpy(queue->top_tokens + queue->top_count, item->top_tokens,
               item->top_count * sizeof *queue->top_tokens);
        memcpy(queue->top_logprobs + queue->top_count, item->top_logprobs,
               item->top_count * sizeof *queue->top_logprobs);
    }
    queue->top_count = needed;
}

void token_queue_put(struct token_queue *queue, const struct token_item *item) {
    CHECK(queue->count == 0 || item->has_logprobs == (queue->logprobs_cap > 0));
    if (queue->count == queue->cap) {
        queue->cap = cap_for(queue->cap, queue->count + 1);
        queue->tokens = grown(queue->tokens, queue->cap, sizeof *queue->tokens);
    }
    if (item->has_logprobs) {
        put_logprobs(queue, item);
    }
    queue->tokens[queue->count++] = item->token;
}

struct token_item token_queue_at(const struct token_queue *queue, uint32_t at, uint32_t *top_at) {
    CHECK_OP(at, <, queue->count);
    struct token_item item = {.token = queue->tokens[at]};
    if (queue->logprobs_cap > 0) {
        item.has_logprobs = true;
        item.logprob = queue->logprobs[at];
        item.top_count = queue->top_counts[at];
        if (item.top_count > 0) { /* else there may be no arrays at all */
            item.top_tokens = queue->top_tokens + *top_at;
            item.top_logprobs = queue->top_logprobs + *top_at;
            *top_at += item.top_count;
        }
    }
    return item;
}

void token_queue_drop(struct token_queue *queue, uint32_t count) {
    CHECK_OP(count, <=, queue->count);
    uint32_t left = queue->count - count;
    if (queue->logprobs_cap > 0) {
        uint32_t tops = 0;
        for (uint32_t i = 0; i < count; i++) {
            tops += queue->top_counts[i];
        }
        uint32_t tops_left = queue->top_count - tops;
        memmove(queue->logprobs, queue->logprobs + count, left * sizeof *queue->logprobs);
        memmove(queue->top_counts, queue->top_counts + count, left * sizeof *queue->top_counts);
        if (tops_left > 0) {
            memmove(queue->top_tokens, queue->top_tokens + tops,
                    tops_left * sizeof *queue->top_tokens);
            memmove(queue->top_logprobs, queue->top_logprobs + tops,
                    tops_left * sizeof *queue->top_logprobs);
        }
        queue->top_count = tops_left;
    }
    if (left > 0) {
        memmove(queue->tokens, queue->tokens + count, left * sizeof *queue->tokens);
    }
    queue->count = left;
}

void token_queue_fini(struct token_queue *queue) {
    free(queue->tokens);
    free(queue->logprobs);
    free(queue->top_counts);
    free(queue->top_tokens);
    free(queue->top_logprobs);
    *queue = (struct token_queue){0};
}
