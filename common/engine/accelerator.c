#include "engine/accelerator.h"

#include "base/check.h"
#include "engine/fail.h"
#include "runtime/clock.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SPINS         200 /* looks without a pause: some ten microseconds */
#define PAUSE_NS      20000
#define LOAD_LIMIT_MS 20000
#define PATHS         2
#define PATH_CAP      (PATH_MAX + 64) /* a folder and what is added */

/* Beside the program, as in a build folder, and in ../lib/baton, as installed. */
static void paths_make(char paths[PATHS][PATH_CAP]) {
    char program[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
    program[length > 0 ? length : 0] = '\0';
    char *slash = strrchr(program, '/');
    if (slash != NULL) {
        *slash = '\0';
    }
    static const char *const places[PATHS] = {"", "/../lib/baton"};
    for (size_t i = 0; i < PATHS; i++) {
        int written =
            snprintf(paths[i], PATH_CAP, "%s%s/%s", program, places[i], ACCELERATOR_LIBRARY);
        if (slash == NULL || written < 0 || written >= PATH_CAP) {
            paths[i][0] = '\0';
        }
    }
}

static void *library_load(const char *library, struct writer *error) {
    char paths[PATHS][PATH_CAP];
    const char *chosen = library;
    if (library == NULL) {
        paths_make(paths);
        for (size_t i = 0; chosen == NULL && i < PATHS; i++) {
            chosen = paths[i][0] != '\0' && access(paths[i], R_OK) == 0 ? paths[i] : NULL;
        }
        chosen = chosen != NULL ? chosen : ACCELERATOR_LIBRARY;
    }
    void *loaded = dlopen(chosen, RTLD_NOW | RTLD_LOCAL);
    if (loaded == NULL) {
        (void)fail(error, STATUS_NOT_FOUND, "the device library cannot be loaded: %s", dlerror());
    }
    return loaded;
}

static enum status table_get(void *library, struct writer *error,
                             const struct device_table **table_out) {
    device_table_fn get = NULL;
    void *symbol = dlsym(library, DEVICE_TABLE_SYMBOL);
    memcpy(&get, &symbol, sizeof(get)); /* ISO C has no cast between the two kinds of pointer */
    if (get == NULL) {
        return fail(error, STATUS_UNSUPPORTED, "the device library has no %s", DEVICE_TABLE_SYMBOL);
    }
    const struct device_table *table = get();
    if (table->version != DEVICE_TABLE_VERSION || table->bytes != sizeof(*table)) {
        return fail(error, STATUS_UNSUPPORTED,
                    "the device library is of version %u (%u bytes), this program needs %u (%zu): "
                    "use the one that was built with it",
                    table->version, table->bytes, DEVICE_TABLE_VERSION, sizeof(*table));
    }
    *table_out = table;
    return STATUS_OK;
}

enum status accelerator_open(const char *library, uint32_t index, struct writer *error,
                             struct accelerator **accelerator_out) {
    void *loaded = library_load(library, error);
    if (loaded == NULL) {
        return STATUS_NOT_FOUND;
    }
    struct accelerator *accelerator = calloc(1, sizeof(*accelerator));
    CHECK(accelerator != NULL);
    accelerator->library = loaded;
    enum status status = table_get(loaded, error, &accelerator->table);
    if (status == STATUS_OK) {
        char why[DEVICE_TEXT] = "";
        if (accelerator->table->open(index, &accelerator->device, why, sizeof(why)) != 0) {
            status = fail(error, STATUS_NOT_FOUND, "%s", why);
        }
    }
    if (status == STATUS_OK) {
        accelerator->table->info(accelerator->device, &accelerator->info);
        accelerator->staging =
            accelerator->table->host_alloc(accelerator->device, ACCELERATOR_STAGING);
        if (accelerator->staging == NULL) {
            status = fail(error, STATUS_BUSY, "no %u bytes of pinned memory for the device",
                          ACCELERATOR_STAGING);
        }
    }
    if (status != STATUS_OK) {
        accelerator_close(accelerator);
        return status;
    }
    *accelerator_out = accelerator;
    return STATUS_OK;
}

/* The library stays loaded: the runtime inside it has hooks for the process's end. */
void accelerator_close(struct accelerator *accelerator) {
    if (accelerator == NULL) {
        return;
    }
    if (accelerator->device != NULL) {
        accelerator->table->host_release(accelerator->device, accelerator->staging);
        accelerator->table->close(accelerator->device);
    }
    free(accelerator);
}

enum status accelerator_wait(struct accelerator *accelerator, uint32_t mark, struct span limit) {
    struct instant end = instant_add(clock_now(), limit);
    for (uint32_t looks = 0;; looks++) {
        switch (accelerator->table->look(accelerator->device, mark)) {
        case DEVICE_PASSED: return STATUS_OK;
        case DEVICE_FAILED: return STATUS_IO;
        case DEVICE_PENDING: break;
        }
        if (looks < SPINS) {
            continue;
        }
        if (instant_reached(clock_now(), end)) {
            return STATUS_TIMEOUT;
        }
        struct timespec pause = {.tv_nsec = PAUSE_NS};
        (void)nanosleep(&pause, NULL); /* the mark is looked at again */
    }
}

enum status accelerator_load(struct accelerator *accelerator, void *to, const void *from,
                             uint64_t bytes) {
    const struct device_table *table = accelerator->table;
    for (uint64_t at = 0; at < bytes; at += ACCELERATOR_STAGING) {
        uint64_t some = bytes - at < ACCELERATOR_STAGING ? bytes - at : ACCELERATOR_STAGING;
        memcpy(accelerator->staging, (const unsigned char *)from + at, some);
        table->upload(accelerator->device, (unsigned char *)to + at, accelerator->staging, some);
        table->mark(accelerator->device, DEVICE_COMPUTE, ACCELERATOR_MARK);
        enum status status =
            accelerator_wait(accelerator, ACCELERATOR_MARK, span_ms(LOAD_LIMIT_MS));
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}
