/* The ranks of one worker, joined by NCCL.
 *
 * libnccl is loaded when ranks are asked for: a worker of one device does not need it. The
 * communicator is non-blocking: each call starts something and returns, ranks_wait polls it against
 * a limit. So a rank that never comes, or dies in the middle, costs a limit and not the worker: the
 * caller aborts and says so. Which collectives run, and in which order, is the plan's: nothing here
 * looks at a clock or a queue to decide what to do, only when to give up. */
#include "kernels/cuda/internal.h"

#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LIBRARY  "libnccl.so.2"
#define PAUSE_NS 100000

static_assert(sizeof(ncclUniqueId) == DEVICE_RANKS_ID_BYTES, "an id travels whole");

struct api {
    void *library;
    decltype(&ncclGetErrorString) error_string;
    decltype(&ncclGetUniqueId) unique_id;
    decltype(&ncclCommInitRankConfig) init;
    decltype(&ncclCommGetAsyncError) async_error;
    decltype(&ncclAllReduce) all_reduce;
    decltype(&ncclCommFinalize) finalize;
    decltype(&ncclCommDestroy) destroy;
    decltype(&ncclCommAbort) abort;
};

struct device_ranks {
    struct device *device;
    struct api api;
    ncclComm_t comm; /* NULL once destroyed or aborted */
};

static int api_open(struct api *api, const char *name, char *why, size_t why_cap) {
    name = name != NULL ? name : LIBRARY;
    memset(api, 0, sizeof(*api));
    api->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (api->library == NULL) {
        (void)snprintf(why, why_cap, "several ranks need NCCL: %s", dlerror());
        return -1;
    }
    const struct {
        const char *name;
        void **to;
    } symbols[] = {
        {"ncclGetErrorString", (void **)&api->error_string},
        {"ncclGetUniqueId", (void **)&api->unique_id},
        {"ncclCommInitRankConfig", (void **)&api->init},
        {"ncclCommGetAsyncError", (void **)&api->async_error},
        {"ncclAllReduce", (void **)&api->all_reduce},
        {"ncclCommFinalize", (void **)&api->finalize},
        {"ncclCommDestroy", (void **)&api->destroy},
        {"ncclCommAbort", (void **)&api->abort},
    };
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        *symbols[i].to = dlsym(api->library, symbols[i].name);
        if (*symbols[i].to == NULL) {
            (void)snprintf(why, why_cap, "%s has no %s: NCCL 2.14 or later is needed", name,
                           symbols[i].name);
            (void)dlclose(api->library);
            api->library = NULL;
            return -1;
        }
    }
    return 0;
}

int ranks_id(struct device *device, const char *library, unsigned char *id_out, char *why,
             size_t why_cap) {
    (void)device;
    struct api api;
    ncclUniqueId id;
    if (api_open(&api, library, why, why_cap) != 0) {
        return -1;
    }
    ncclResult_t result = api.unique_id(&id);
    if (result == ncclSuccess) {
        memcpy(id_out, &id, sizeof(id));
    } else {
        (void)snprintf(why, why_cap, "NCCL makes no id: %s", api.error_string(result));
    }
    /* The library stays loaded: behind the id stands a thread of its own that others will ask. */
    return result == ncclSuccess ? 0 : -1;
}

/* What a call that starts something returned: anything but success and "under way" is an end. */
static enum device_ranks_result started(const struct device_ranks *ranks, const char *what,
                                        ncclResult_t result, char *why, size_t why_cap) {
    if (result == ncclSuccess) {
        return DEVICE_RANKS_OK;
    }
    if (result == ncclInProgress) {
        return DEVICE_RANKS_PENDING;
    }
    (void)snprintf(why, why_cap, "%s: %s", what, ranks->api.error_string(result));
    return DEVICE_RANKS_FAILED;
}

int ranks_create(struct device *device, const char *library, const unsigned char *id, uint32_t rank,
                 uint32_t count, struct device_ranks **ranks_out, char *why, size_t why_cap) {
    if (count == 0 || rank >= count) {
        (void)snprintf(why, why_cap, "rank %u of %u does not exist", rank, count);
        return -1;
    }
    struct device_ranks *ranks = (struct device_ranks *)calloc(1, sizeof(*ranks));
    if (ranks == NULL) {
        (void)snprintf(why, why_cap, "no memory for the ranks");
        return -1;
    }
    ranks->device = device;
    if (api_open(&ranks->api, library, why, why_cap) != 0) {
        free(ranks);
        return -1;
    }
    ncclUniqueId unique;
    memcpy(&unique, id, sizeof(unique));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclResult_t result = ranks->api.init(&ranks->comm, (int)count, unique, (int)rank, &config);
    if (started(ranks, "joining the ranks", result, why, why_cap) == DEVICE_RANKS_FAILED) {
        ranks_abort(ranks);
        ranks_destroy(ranks, 0);
        return -1;
    }
    *ranks_out = ranks;
    return 0;
}

static uint64_t now_ms(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now); /* cannot fail for this clock */
    return (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_nsec / 1000000u;
}

enum device_ranks_result ranks_wait(struct device_ranks *ranks, uint32_t limit_ms, char *why,
                                    size_t why_cap) {
    if (ranks->comm == NULL) {
        (void)snprintf(why, why_cap, "the ranks were given up");
        return DEVICE_RANKS_FAILED;
    }
    uint64_t end = now_ms() + limit_ms;
    for (;;) {
        ncclResult_t state = ncclInProgress;
        ncclResult_t asked = ranks->api.async_error(ranks->comm, &state);
        enum device_ranks_result result =
            started(ranks, "the ranks", asked != ncclSuccess ? asked : state, why, why_cap);
        if (result != DEVICE_RANKS_PENDING || now_ms() >= end) {
            return result;
        }
        struct timespec pause = {0, PAUSE_NS};
        (void)nanosleep(&pause, NULL); /* the clock is read again */
    }
}

enum device_ranks_result ranks_all_reduce(struct device_ranks *ranks, void *values,
                                          enum kernels_dtype dtype, uint64_t count, char *why,
                                          size_t why_cap) {
    if (ranks->comm == NULL || (dtype != KERNELS_F32 && dtype != KERNELS_BF16)) {
        (void)snprintf(why, why_cap,
                       ranks->comm == NULL ? "the ranks were given up"
                                           : "only F32 and BF16 are summed");
        return DEVICE_RANKS_FAILED;
    }
    ncclDataType_t type = dtype == KERNELS_F32 ? ncclFloat32 : ncclBfloat16;
    ncclResult_t result = ranks->api.all_reduce(values, values, count, type, ncclSum, ranks->comm,
                                                ranks->device->queues[DEVICE_COMPUTE]);
    return started(ranks, "all-reduce", result, why, why_cap);
}

void ranks_abort(struct device_ranks *ranks) {
    if (ranks->comm != NULL) {
        (void)ranks->api.abort(ranks->comm); /* the end of it, whatever it says */
        ranks->comm = NULL;
    }
}

void ranks_destroy(struct device_ranks *ranks, uint32_t limit_ms) {
    if (ranks == NULL) {
        return;
    }
    char why[DEVICE_TEXT];
    if (ranks->comm != NULL) {
        ncclResult_t result = ranks->api.finalize(ranks->comm);
        enum device_ranks_result state =
            started(ranks, "leaving the ranks", result, why, sizeof(why));
        if (state == DEVICE_RANKS_PENDING) {
            state = ranks_wait(ranks, limit_ms, why, sizeof(why));
        }
        if (state == DEVICE_RANKS_OK) {
            (void)ranks->api.destroy(ranks->comm); /* finalized: it only frees */
            ranks->comm = NULL;
        } else {
            ranks_abort(ranks);
        }
    }
    /* NCCL keeps threads of its own for a while after a communicator's end: never unloaded. */
    free(ranks);
}
