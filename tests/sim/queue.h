/* Binary heap of timed events, ordered by (time, sequence): deterministic. */
#ifndef SIM_QUEUE_H
#define SIM_QUEUE_H

#include <stdint.h>

struct queue_item {
    int64_t at_ns;
    uint64_t sequence;
    void *payload;
};
struct queue {
    struct queue_item *items;
    uint32_t count;
    uint32_t capacity;
    uint64_t sequence;
};

void queue_push(struct queue *queue, int64_t at_ns, void *payload);
/* The earliest item; count must be > 0. */
struct queue_item queue_pop(struct queue *queue);
void queue_fini(struct queue *queue);

#endif
