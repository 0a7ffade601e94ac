#include "base/list.h"

#include "base/check.h"

void list_init(struct list *list) {
    *list = (struct list){LIST_NONE, LIST_NONE, 0};
}

void list_push_back(struct list *list, void *links, uint32_t stride, uint32_t index) {
    struct link *link = list_link(links, stride, index);
    CHECK(!link->is_linked);
    *link = (struct link){list->tail, LIST_NONE, true};
    if (list->tail == LIST_NONE) {
        list->head = index;
    } else {
        list_link(links, stride, list->tail)->next = index;
    }
    list->tail = index;
    list->count++;
}

void list_push_front(struct list *list, void *links, uint32_t stride, uint32_t index) {
    struct link *link = list_link(links, stride, index);
    CHECK(!link->is_linked);
    *link = (struct link){LIST_NONE, list->head, true};
    if (list->head == LIST_NONE) {
        list->tail = index;
    } else {
        list_link(links, stride, list->head)->prev = index;
    }
    list->head = index;
    list->count++;
}

void list_insert(struct list *list, void *links, uint32_t stride, uint32_t index, uint32_t after) {
    if (after == LIST_NONE) {
        list_push_front(list, links, stride, index);
        return;
    }
    if (after == list->tail) {
        list_push_back(list, links, stride, index);
        return;
    }
    struct link *link = list_link(links, stride, index);
    struct link *before = list_link(links, stride, after);
    CHECK(!link->is_linked && before->is_linked);
    *link = (struct link){after, before->next, true};
    list_link(links, stride, before->next)->prev = index;
    before->next = index;
    list->count++;
}

void list_remove(struct list *list, void *links, uint32_t stride, uint32_t index) {
    struct link *link = list_link(links, stride, index);
    if (!link->is_linked) {
        return;
    }
    if (link->prev == LIST_NONE) {
        list->head = link->next;
    } else {
        list_link(links, stride, link->prev)->next = link->next;
    }
    if (link->next == LIST_NONE) {
        list->tail = link->prev;
    } else {
        list_link(links, stride, link->next)->prev = link->prev;
    }
    link->is_linked = false;
    list->count--;
}
