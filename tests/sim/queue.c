#include "sim/queue.h"

#include <stdbool.h>
#include <stdlib.h>

#include "base/check.h"

static bool queue_before(const struct queue_item *a, const struct queue_item *b) {
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->sequence < b->sequence;
}

void queue_push(struct queue *queue, int64_t at_ns, void *payload) {
    if (queue->count == queue->capacity) {
        queue->capacity = queue->capacity == 0 ? 1024 : queue->capacity * 2;
        queue->items = realloc(queue->items, queue->capacity * sizeof *queue->items);
        CHECK(queue->items != NULL);
    }
    struct queue_item item = {at_ns, queue->sequence++, payload};
    uint32_t at = queue->count++;
    while (at > 0 && queue_before(&item, &queue->items[(at - 1) / 2])) {
        queue->items[at] = queue->items[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    queue->items[at] = item;
}

struct queue_item queue_pop(struct queue *queue) {
    CHECK(queue->count > 0);
    struct queue_item top = queue->items[0];
    struct queue_item last = queue->items[--queue->count];
    uint32_t at = 0;
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= queue->count) {
            break;
        }
        if (child + 1 < queue->count &&
            queue_before(&queue->items[child + 1], &queue->items[child])) {
            child++;
        }
        if (!queue_before(&queue->items[child], &last)) {
            break;
        }
        queue->items[at] = queue->items[child];
        at = child;
    }
    if (queue->count > 0) {
        queue->items[at] = last;
    }
    return top;
}

void queue_fini(struct queue *queue) {
    free(queue->items);
}
