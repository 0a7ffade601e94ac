/* An emulated CUDA runtime: as much of cuda_runtime.h as kernels/cuda uses, on the CPU.
 *
 * The files of kernels/cuda compile against it as plain C++, unchanged. Memory is the heap, so the
 * address sanitizer sees each read or write past an end. Streams are lazy: what is enqueued runs
 * only when a mark behind it is looked at, so a missing order between two streams, or a host buffer
 * that is written too early, gives wrong results each time. A kernel's phases
 * (kernels/cuda/block.h) run as loops over the threads in an order drawn anew for each, or, where a
 * test asks for it, on one real thread for each thread of the block, for the thread sanitizer to
 * look at. */
#ifndef TESTS_SUPPORT_CUDA_RUNTIME_H
#define TESTS_SUPPORT_CUDA_RUNTIME_H

#include <functional>
#include <stddef.h>
#include <stdint.h>

#define BATON_EMULATED_DEVICE 1

#define __global__
#define __device__
#define __shared__ static /* one kernel runs at a time */

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned across = 1, unsigned down = 1, unsigned deep = 1) : x(across), y(down), z(deep) {
    }
};

struct alignas(16) int4 {
    int x, y, z, w;
};

#define EMULATION_THREADS_MAX 1024u /* of a block, as on the devices */

/* Where the calling thread stands in the kernel that runs. */
extern thread_local dim3 blockIdx;
extern thread_local dim3 blockDim;

unsigned emulation_threads();
unsigned emulation_thread(unsigned i);
void emulation_sync();
unsigned atomicAdd(unsigned *to, unsigned value);
/* sum + the products of the four signed bytes of each. */
static inline int __dp4a(int a, int b, int sum) {
    for (int shift = 0; shift < 32; shift += 8) {
        sum += (int8_t)((unsigned)a >> shift) * (int8_t)((unsigned)b >> shift);
    }
    return sum;
}

#define EACH_THREAD(t)                                                                             \
    for (unsigned i_##t = 0, t = emulation_thread(0); i_##t < emulation_threads();                 \
         t = emulation_thread(++i_##t))
#define BLOCK_SYNC()           emulation_sync()
#define THREAD_OWN(type, name) static type name[EMULATION_THREADS_MAX]
#define OWN(name, t)           name[t]
#define LAUNCH(stream, grid, threads, kernel, ...)                                                 \
    emulation_launch((stream), (grid), (threads), emulation_bind(kernel, __VA_ARGS__))

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNoDevice = 100,
    cudaErrorNotReady = 600,
    cudaErrorLaunchFailure = 719,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
using cudaStream_t = struct emulated_stream *;
using cudaEvent_t = struct emulated_event *;
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_16BF = 14 };

#define cudaStreamNonBlocking  1u
#define cudaEventDisableTiming 2u
#define cudaHostAllocDefault   0u
#define cudaHostRegisterMapped 2u

struct cudaDeviceProp {
    char name[256];
    int major;
    int minor;
    int multiProcessorCount;
};

void emulation_launch(cudaStream_t stream, dim3 grid, dim3 threads, std::function<void()> kernel);
/* Arguments are copied at the launch, as a real launch does. */
template <typename... Formal, typename... Actual>
std::function<void()> emulation_bind(void (*kernel)(Formal...), Actual... arguments) {
    return [=] { kernel(arguments...); };
}
/* Puts host work into a stream's order (the emulated cuBLAS). */
void emulation_enqueue(cudaStream_t stream, std::function<void()> work);
/* Tests: products whose order of adding depends on the row's place, as a bad algorithm's would. */
bool emulation_is_skewed();

extern "C" {
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int index);
cudaError_t cudaSetDevice(int index);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
cudaError_t cudaMalloc(void **memory, size_t bytes);
cudaError_t cudaFree(void *memory);
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *memory);
cudaError_t cudaHostRegister(void *base, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void *base);
cudaError_t cudaHostGetDevicePointer(void **view, void *base, unsigned flags);
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaGetLastError(void);
const char *cudaGetErrorString(cudaError_t error);
}

#endif
