#include "runtime/memory.h"

#include "base/bytes.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH_CAP 4096

/* The first line that begins with `key`. */
static bool line_read(const char *path, const char *key, char *line, size_t cap) {
    FILE *file = fopen(path, "re");
    bool is_found = false;
    while (file != NULL && !is_found && fgets(line, (int)cap, file) != NULL) {
        is_found = strncmp(line, key, strlen(key)) == 0;
    }
    if (file != NULL) {
        (void)fclose(file); /* only read from */
    }
    return is_found;
}

/* The number behind `key` in a file of lines "KEY NUMBER"; behind "", the file's only one. */
static bool number_read(const char *path, const char *key, uint64_t *out) {
    char line[256];
    if (!line_read(path, key, line, sizeof(line))) {
        return false;
    }
    const char *from = line + strlen(key);
    char *end = NULL;
    *out = strtoull(from, &end, 10);
    return end != from; /* "max" is no limit */
}

static void bound(struct memory_left *left, uint64_t bytes, const char *whose) {
    if (bytes < left->bytes) {
        *left = (struct memory_left){bytes, whose};
    }
}

static void bound_by_machine(const char *root, struct memory_left *left) {
    char path[PATH_CAP];
    uint64_t available = 0;
    uint64_t swap = 0;
    (void)snprintf(path, sizeof(path), "%s/proc/meminfo", root);
    if (number_read(path, "MemAvailable:", &available)) {
        (void)number_read(path, "SwapFree:", &swap);
        bound(left, (available + swap) * 1024, "the machine has");
    }
}

static void bound_by_group(const char *group, struct memory_left *left) {
    char path[PATH_CAP + 32];
    uint64_t limit = 0;
    uint64_t used = 0;
    (void)snprintf(path, sizeof(path), "%s/memory.max", group);
    if (!number_read(path, "", &limit)) {
        return;
    }
    (void)snprintf(path, sizeof(path), "%s/memory.current", group);
    if (!number_read(path, "", &used)) {
        return;
    }
    uint64_t files = 0;
    (void)snprintf(path, sizeof(path), "%s/memory.stat", group);
    static const char *const droppable[] = {"inactive_file ", "active_file "};
    for (size_t i = 0; i < sizeof(droppable) / sizeof(droppable[0]); i++) {
        uint64_t bytes = 0;
        if (number_read(path, droppable[i], &bytes)) {
            files += bytes;
        }
    }
    used -= files < used ? files : used;
    bound(left, used < limit ? limit - used : 0, "the memory limit of its container leaves");
}

/* "/a/b" of the one line "0::/a/b" that version 2 has; false without it. */
static bool group_read(const char *root, char *name, size_t cap) {
    char path[PATH_CAP];
    char line[PATH_CAP / 2];
    (void)snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    if (!line_read(path, "0::/", line, sizeof(line))) {
        return false;
    }
    line[strcspn(line, "\n")] = '\0';
    text_copy(name, cap, line + 3);
    return true;
}

struct memory_left memory_left(const char *root) {
    struct memory_left left = {UINT64_MAX, "the system has"};
    bound_by_machine(root, &left);
    char name[PATH_CAP / 2];
    bool is_group = group_read(root, name, sizeof(name));
    /* Its own group and each one around it: every limit on the way counts. */
    while (is_group) {
        char path[PATH_CAP];
        (void)snprintf(path, sizeof(path), "%s/sys/fs/cgroup%s", root, name);
        bound_by_group(path, &left);
        char *cut = strrchr(name, '/');
        is_group = cut != NULL;
        if (is_group) {
            *cut = '\0';
        }
    }
    return left;
}
