/* Intrusive doubly linked list of table indices: O(1) insert and remove, no allocation.
 *
 * Links live in the caller's entries (struct link); the list names entries by index, never by
 * pointer, so tables may be moved or dumped. LIST_NONE ends the chain. */
#ifndef BASE_LIST_H
#define BASE_LIST_H

#include <stdbool.h>
#include <stdint.h>

#define LIST_NONE UINT32_MAX

struct link {
    uint32_t prev;
    uint32_t next;
    bool is_linked;
};
struct list {
    uint32_t head;
    uint32_t tail;
    uint32_t count;
};

/* Address of the link of entry `index` in a table of `stride`-byte entries. */
static inline struct link *list_link(void *links, uint32_t stride, uint32_t index) {
    return (struct link *)(void *)((unsigned char *)links + (uint64_t)stride * index);
}

void list_init(struct list *list);
/* links: address of entry 0's link; stride: size of an entry. The entry must not be linked. */
void list_push_back(struct list *list, void *links, uint32_t stride, uint32_t index);
void list_push_front(struct list *list, void *links, uint32_t stride, uint32_t index);
/* Behind entry `after`, which is linked in this list; LIST_NONE: at the front. */
void list_insert(struct list *list, void *links, uint32_t stride, uint32_t index, uint32_t after);
/* Does nothing if the entry is not linked. */
void list_remove(struct list *list, void *links, uint32_t stride, uint32_t index);

#endif
