#include "kernels/cuda/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CLASS_LEAST 80 /* sm_80: the oldest that the object has code for */
#define PAUSE_NS    20000

/* ---- failures ---- */

void device_fail_text(struct device *device, const char *what, const char *why) {
    if (device->failure[0] == '\0') {
        (void)snprintf(device->failure, sizeof(device->failure), "%s on %s: %s", what,
                       device->info.name, why);
    }
}

void device_fail(struct device *device, const char *what, cudaError_t error) {
    device_fail_text(device, what, cudaGetErrorString(error));
}

void device_launched(struct device *device, const char *kernel) {
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
        device_fail(device, kernel, error);
    }
}

static const char *failure(const struct device *device) {
    return device->failure[0] == '\0' ? NULL : device->failure;
}

/* ---- memory ---- */

void *device_alloc(struct device *device, uint64_t bytes) {
    void *memory = NULL;
    if (cudaMalloc(&memory, bytes == 0 ? 1 : bytes) != cudaSuccess) {
        (void)cudaGetLastError(); /* no room is an answer, not a failure of the device */
        return NULL;
    }
    cudaError_t error =
        cudaMemsetAsync(memory, 0, bytes == 0 ? 1 : bytes, device->queues[DEVICE_COMPUTE]);
    if (error != cudaSuccess) {
        device_fail(device, "cudaMemsetAsync", error);
    }
    return memory;
}

void device_release(struct device *device, void *memory) {
    (void)device;
    (void)cudaFree(memory); /* a lost device has nothing left to free */
}

void *device_host_alloc(struct device *device, uint64_t bytes) {
    (void)device;
    void *memory = NULL;
    if (cudaHostAlloc(&memory, bytes == 0 ? 1 : bytes, cudaHostAllocDefault) != cudaSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    memset(memory, 0, bytes == 0 ? 1 : bytes);
    return memory;
}

void device_host_release(struct device *device, void *memory) {
    (void)device;
    if (memory != NULL) {
        (void)cudaFreeHost(memory);
    }
}

static int host_map(struct device *device, void *base, uint64_t bytes, void **view_out) {
    (void)device;
    if (cudaHostRegister(base, bytes, cudaHostRegisterMapped) != cudaSuccess) {
        (void)cudaGetLastError();
        return -1;
    }
    if (cudaHostGetDevicePointer(view_out, base, 0) != cudaSuccess) {
        (void)cudaGetLastError();
        (void)cudaHostUnregister(base);
        return -1;
    }
    return 0;
}

static void host_unmap(struct device *device, void *base) {
    (void)device;
    (void)cudaHostUnregister(base);
}

static void copy(struct device *device, void *to, const void *from, uint64_t bytes,
                 cudaMemcpyKind kind) {
    if (bytes == 0) {
        return;
    }
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, device->queues[DEVICE_COMPUTE]);
    if (error != cudaSuccess) {
        device_fail(device, "cudaMemcpyAsync", error);
    }
}

void device_upload(struct device *device, void *to, const void *from, uint64_t bytes) {
    copy(device, to, from, bytes, cudaMemcpyHostToDevice);
}

void device_download(struct device *device, void *to, const void *from, uint64_t bytes) {
    copy(device, to, from, bytes, cudaMemcpyDeviceToHost);
}

/* ---- order ---- */

static void mark(struct device *device, enum device_queue queue, uint32_t mark) {
    cudaError_t error = mark < DEVICE_MARKS
                            ? cudaEventRecord(device->marks[mark], device->queues[queue])
                            : cudaErrorInvalidValue;
    if (error != cudaSuccess) {
        device_fail(device, "cudaEventRecord", error);
    }
}

static void follow(struct device *device, enum device_queue queue, uint32_t mark) {
    cudaError_t error = mark < DEVICE_MARKS
                            ? cudaStreamWaitEvent(device->queues[queue], device->marks[mark], 0)
                            : cudaErrorInvalidValue;
    if (error != cudaSuccess) {
        device_fail(device, "cudaStreamWaitEvent", error);
    }
}

static enum device_state look(struct device *device, uint32_t mark) {
    cudaError_t error =
        mark < DEVICE_MARKS ? cudaEventQuery(device->marks[mark]) : cudaErrorInvalidValue;
    if (error == cudaErrorNotReady) {
        return device->failure[0] == '\0' ? DEVICE_PENDING : DEVICE_FAILED;
    }
    if (error != cudaSuccess) {
        device_fail(device, "a kernel or copy", error);
    }
    return device->failure[0] == '\0' ? DEVICE_PASSED : DEVICE_FAILED;
}

int device_drain(struct device *device, uint32_t limit_ms) {
    uint64_t waited_ns = 0;
    mark(device, DEVICE_COMPUTE, 0);
    for (;;) {
        enum device_state state = look(device, 0);
        if (state != DEVICE_PENDING) {
            return state == DEVICE_PASSED ? 0 : -1;
        }
        if (waited_ns > (uint64_t)limit_ms * 1000000u) {
            device_fail_text(device, "waiting", "the limit passed");
            return -1;
        }
        struct timespec pause = {0, PAUSE_NS};
        (void)nanosleep(&pause, NULL); /* shorter is fine too: the count only bounds */
        waited_ns += PAUSE_NS;
    }
}

/* ---- life ---- */

static void device_close(struct device *device) {
    if (device == NULL) {
        return;
    }
    product_close(device);
    if (device->blas != NULL) {
        (void)cublasLtDestroy(device->blas);
    }
    for (uint32_t i = 0; i < DEVICE_MARKS; i++) {
        if (device->marks[i] != NULL) {
            (void)cudaEventDestroy(device->marks[i]);
        }
    }
    for (uint32_t i = 0; i < 2; i++) {
        if (device->queues[i] != NULL) {
            (void)cudaStreamDestroy(device->queues[i]);
        }
    }
    free(device);
}

static int refuse(struct device *device, char *why, size_t why_cap, const char *what,
                  const char *reason) {
    (void)snprintf(why, why_cap, "%s: %s", what, reason);
    (void)cudaGetLastError(); /* an answer, and no failure of later calls */
    device_close(device);
    return -1;
}

static int device_open(uint32_t index, struct device **device_out, char *why, size_t why_cap) {
    int count = 0;
    int version = 0;
    (void)cudaDriverGetVersion(&version); /* 0 without a driver */
    if (version == 0) {
        return refuse(NULL, why, why_cap, "no CUDA device",
                      "this machine has no NVIDIA driver (libcuda.so.1)");
    }
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        return refuse(NULL, why, why_cap, "no CUDA device", cudaGetErrorString(error));
    }
    if (index >= (uint32_t)count) {
        char reason[64];
        (void)snprintf(reason, sizeof(reason), "device %u was asked for, there are %d", index,
                       count);
        return refuse(NULL, why, why_cap, "no such CUDA device", reason);
    }
    cudaDeviceProp properties;
    error = cudaGetDeviceProperties(&properties, (int)index);
    if (error == cudaSuccess) {
        error = cudaSetDevice((int)index);
    }
    if (error != cudaSuccess) {
        return refuse(NULL, why, why_cap, "the CUDA device cannot be used",
                      cudaGetErrorString(error));
    }
    int compute = properties.major * 10 + properties.minor;
    if (compute < CLASS_LEAST) {
        return refuse(NULL, why, why_cap, properties.name,
                      "too old: compute capability 8.0 or later is needed");
    }
    struct device *device = (struct device *)calloc(1, sizeof(*device));
    if (device == NULL) {
        return refuse(NULL, why, why_cap, properties.name, "no memory");
    }
    device->index = (int)index;
    (void)snprintf(device->info.name, sizeof(device->info.name), "%.63s", properties.name);
    for (uint32_t i = 0; error == cudaSuccess && i < 2; i++) {
        error = cudaStreamCreateWithFlags(&device->queues[i], cudaStreamNonBlocking);
    }
    for (uint32_t i = 0; error == cudaSuccess && i < DEVICE_MARKS; i++) {
        error = cudaEventCreateWithFlags(&device->marks[i], cudaEventDisableTiming);
    }
    if (error != cudaSuccess) {
        return refuse(device, why, why_cap, properties.name, cudaGetErrorString(error));
    }
    cublasStatus_t status = cublasLtCreate(&device->blas);
    if (status != CUBLAS_STATUS_SUCCESS) {
        return refuse(device, why, why_cap, "cublasLtCreate", cublasLtGetStatusName(status));
    }
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    (void)cudaMemGetInfo(&free_bytes, &total_bytes); /* only told */
    device->info.memory_bytes = total_bytes;
    device->info.free_bytes = free_bytes;
    /* cuBLAS chooses by class, by number of multiprocessors and by its own version. */
    (void)snprintf(device->info.numerics, sizeof(device->info.numerics), "cuda%d.%d.%lu", compute,
                   properties.multiProcessorCount, (unsigned long)cublasLtGetVersion());
    *device_out = device;
    return 0;
}

static void attach(struct device *device) {
    cudaError_t error = cudaSetDevice(device->index);
    if (error != cudaSuccess) {
        device_fail(device, "cudaSetDevice", error);
    }
}

static void info(const struct device *device, struct device_info *info_out) {
    *info_out = device->info;
}

extern "C" {
__attribute__((visibility("default"))) const struct device_table *baton_device_table(void);
}

const struct device_table *baton_device_table(void) {
    static struct device_table table;
    table.version = DEVICE_TABLE_VERSION;
    table.bytes = sizeof(table);
    table.kind = "cuda";
    table.open = device_open;
    table.close = device_close;
    table.attach = attach;
    table.info = info;
    table.failure = failure;
    table.alloc = device_alloc;
    table.release = device_release;
    table.host_alloc = device_host_alloc;
    table.host_release = device_host_release;
    table.host_map = host_map;
    table.host_unmap = host_unmap;
    table.upload = device_upload;
    table.download = device_download;
    table.mark = mark;
    table.follow = follow;
    table.look = look;
    table.prepare = product_prepare;
    table.embed = kernel_embed;
    table.rms_norm = kernel_rms_norm;
    table.product = product_run;
    table.add = kernel_add;
    table.rotary = kernel_rotary;
    table.store = kernel_store;
    table.mirror = kernel_mirror;
    table.attention = kernel_attention;
    table.silu_mul = kernel_silu_mul;
    table.ranks_id = ranks_id;
    table.ranks_create = ranks_create;
    table.ranks_wait = ranks_wait;
    table.all_reduce = ranks_all_reduce;
    table.ranks_abort = ranks_abort;
    table.ranks_destroy = ranks_destroy;
    return &table;
}
