#include "engine/block.h"

#include "base/check.h"
#include "engine/fail.h"
#include "runtime/memory.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE      ((size_t)2 << 20)
#define SMALL_PAGE     4096u
#define POPULATE_SLICE ((size_t)16 << 20)

/* Slice by slice: while the system finds memory, threads that map or free some wait, and those
 * that must beat may not wait for long. */
static enum status populate(unsigned char *memory, size_t bytes) {
    for (size_t at = 0; at < bytes; at += POPULATE_SLICE) {
        size_t some = bytes - at < POPULATE_SLICE ? bytes - at : POPULATE_SLICE;
        if (madvise(memory + at, some, MADV_POPULATE_WRITE) == 0) {
            continue;
        }
        if (errno != EINVAL) { /* else the system is older than the call */
            return STATUS_BUSY;
        }
        for (size_t i = 0; i < some; i += SMALL_PAGE) {
            memory[at + i] = 0;
        }
    }
    return STATUS_OK;
}

/* Whole huge pages, if it is large enough to have any; NULL if there is no room. */
static unsigned char *map(size_t bytes) {
    size_t more = bytes >= HUGE_PAGE ? bytes + HUGE_PAGE - SMALL_PAGE : bytes;
    unsigned char *memory =
        mmap(NULL, more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return NULL;
    }
    if (more > bytes) {
        size_t before = (HUGE_PAGE - (uintptr_t)memory % HUGE_PAGE) % HUGE_PAGE;
        size_t behind = more - bytes - before;
        CHECK(before == 0 || munmap(memory, before) == 0);
        memory += before;
        CHECK(behind == 0 || munmap(memory + bytes, behind) == 0);
        (void)madvise(memory, bytes, MADV_HUGEPAGE); /* only speed depends on it */
    }
    return memory;
}

enum status block_take(struct arena *arena, const char *what, const char *advice,
                       struct writer *error) {
    size_t unit = arena->len >= HUGE_PAGE ? HUGE_PAGE : SMALL_PAGE;
    size_t bytes = (arena->len / unit + 1) * unit; /* never none */
    struct memory_left left = memory_left("");
    if (bytes > left.bytes) {
        return fail(error, STATUS_BUSY, "%s: %zu MiB, and %s %" PRIu64 " MiB left; %s", what,
                    bytes >> 20, left.whose, left.bytes >> 20, advice);
    }
    unsigned char *memory = map(bytes);
    if (memory != NULL && populate(memory, bytes) == STATUS_OK) {
        arena_init(arena, memory, bytes);
        return STATUS_OK;
    }
    enum status status = fail(error, STATUS_BUSY, "%s: %zu MiB cannot be had: %s; %s", what,
                              bytes >> 20, strerror(errno), advice);
    CHECK(memory == NULL || munmap(memory, bytes) == 0);
    return status;
}

void block_free(struct arena *arena) {
    if (arena->data != NULL) {
        size_t bytes = arena->cap;
        void *memory = arena_reset(arena);
        CHECK(munmap(memory, bytes) == 0);
    }
    arena_init(arena, NULL, 0);
}
