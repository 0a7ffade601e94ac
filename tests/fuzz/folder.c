#include "fuzz/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"

#define NAMES_MAX 8u

static char path[64];
static char names[NAMES_MAX][64];

static void folder_delete(void) {
    for (unsigned i = 0; i < NAMES_MAX; i++) {
        if (names[i][0] != '\0') {
            folder_remove(names[i]);
        }
    }
    (void)rmdir(path); /* at exit: nobody left to tell */
}

const char *folder_path(void) {
    if (path[0] == '\0') {
        const char *base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
        CHECK(snprintf(path, sizeof path, "%s/baton-fuzz-XXXXXX", base) < (int)sizeof path);
        CHECK(mkdtemp(path) != NULL);
        CHECK(atexit(folder_delete) == 0);
    }
    return path;
}

static void folder_name(const char *name, char *to, size_t cap) {
    int len = snprintf(to, cap, "%s/%s", folder_path(), name);
    CHECK(len > 0 && (size_t)len < cap);
}

void folder_remove(const char *name) {
    char full[160];
    folder_name(name, full, sizeof full);
    CHECK(unlink(full) == 0 || errno == ENOENT);
}

void folder_write(const char *name, struct bytes bytes) {
    unsigned at = 0;
    while (names[at][0] != '\0' && strcmp(names[at], name) != 0) {
        at++;
        CHECK(at < NAMES_MAX);
    }
    text_copy(names[at], sizeof names[at], name);
    char full[160];
    folder_name(name, full, sizeof full);
    int fd = open(full, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    size_t done = 0;
    while (done < bytes.len) {
        ssize_t wrote = write(fd, bytes.data + done, bytes.len - done);
        CHECK(wrote > 0);
        done += (size_t)wrote;
    }
    CHECK(close(fd) == 0);
}
