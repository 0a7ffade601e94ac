/* How much memory this process may still take. Any thread.
 *
 * A system that overcommits gives whatever is asked for and kills later: only a look beforehand
 * lets a program say what it lacks. */
#ifndef RUNTIME_MEMORY_H
#define RUNTIME_MEMORY_H

#include <stdint.h>

struct memory_left {
    uint64_t bytes; /* UINT64_MAX: the system does not say */
    /* Who sets that bound: the limit of a control group (a container's) or the machine itself. */
    const char *whose;
};

/* The least of what the machine has free (with what it would free for us, and swap) and of what
 * the limits of this process's control groups (version 2) leave. Files that could be dropped from
 * memory count as free. `root` stands before each path that is read: "" but in tests. */
struct memory_left memory_left(const char *root);

#endif
