#include <cublasLt.h>
#include <cuda_runtime.h>

#include "support/cuda/control.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <pthread.h>
#include <set>
#include <string.h>
#include <thread>
#include <vector>

thread_local dim3 blockIdx;
thread_local dim3 blockDim;

namespace {

struct emulation_control control = {0, 0, 0, 1, 1, 0};

/* Guards everything below; held while a kernel runs. */
std::recursive_mutex lock;
typedef std::lock_guard<std::recursive_mutex> guard;

uint64_t state = 88172645463325252ull;
unsigned draw(unsigned below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (unsigned)(state >> 33) % below;
}

/* ---- one block ---- */

thread_local int own_thread = -1; /* with real threads: which of the block this is */
unsigned phase_first;
unsigned phase_step;
pthread_barrier_t block_barrier;

void phase_begin() {
    phase_first = draw(blockDim.x);
    phase_step = draw(2) == 0 ? 1 : blockDim.x - 1;
}

void block_run(const std::function<void()> &kernel) {
    if (!control.uses_threads) {
        phase_begin();
        kernel();
        return;
    }
    std::vector<std::thread> threads;
    dim3 block = blockIdx;
    dim3 size = blockDim;
    pthread_barrier_init(&block_barrier, NULL, size.x);
    for (unsigned t = 0; t < size.x; t++) {
        threads.emplace_back([=, &kernel] {
            blockIdx = block;
            blockDim = size;
            own_thread = (int)t;
            kernel();
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    pthread_barrier_destroy(&block_barrier);
}

} // namespace

unsigned emulation_threads() {
    return own_thread >= 0 ? 1 : blockDim.x;
}
unsigned emulation_thread(unsigned i) {
    return own_thread >= 0 ? (unsigned)own_thread : (phase_first + i * phase_step) % blockDim.x;
}
void emulation_sync() {
    if (own_thread >= 0) {
        pthread_barrier_wait(&block_barrier);
    } else {
        phase_begin();
    }
}
unsigned atomicAdd(unsigned *to, unsigned value) {
    return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}
bool emulation_is_skewed() {
    return control.is_skewed != 0;
}
struct emulation_control *emulation_control(void) {
    return &control;
}

/* ---- streams: queues of work, run when somebody looks ---- */

struct emulated_stream {
    std::deque<std::function<void()>> work;
    uint64_t enqueued;
    uint64_t done;
};
struct emulated_event {
    emulated_stream *stream; /* NULL: never recorded, which counts as reached */
    uint64_t at;
    bool is_new; /* nobody has looked yet */
};

namespace {

std::set<emulated_stream *> streams;
std::map<void *, size_t> allocations;
unsigned long long allocated;
cudaError_t last_error = cudaSuccess;
bool is_lost; /* a launch failed: so does everything else, until the last stream is gone */

void run_until(emulated_stream *stream, uint64_t at) {
    while (stream->done < at) {
        std::function<void()> work = std::move(stream->work.front());
        stream->work.pop_front();
        if (!is_lost) {
            work();
        }
        stream->done++;
    }
}

void run_all() {
    for (emulated_stream *stream : streams) {
        run_until(stream, stream->enqueued);
    }
}

cudaError_t failed(cudaError_t error) {
    last_error = error;
    return error;
}

} // namespace

void emulation_enqueue(cudaStream_t stream, std::function<void()> work) {
    guard held(lock);
    stream->work.push_back(std::move(work));
    stream->enqueued++;
}

void emulation_launch(cudaStream_t stream, dim3 grid, dim3 threads, std::function<void()> kernel) {
    guard held(lock);
    if (grid.x == 0 || grid.y == 0 || grid.y > 65535 || threads.x == 0 ||
        threads.x > EMULATION_THREADS_MAX) {
        last_error = cudaErrorInvalidValue;
        return;
    }
    bool fails = control.fails_after > 0 && --control.fails_after == 0;
    emulation_enqueue(stream, [=] {
        if (fails) {
            is_lost = true;
            return;
        }
        blockDim = threads;
        uint64_t blocks = (uint64_t)grid.x * grid.y;
        uint64_t first = draw((unsigned)blocks);
        for (uint64_t i = 0; i < blocks; i++) {
            uint64_t block = (first + i) % blocks;
            blockIdx = dim3((unsigned)(block % grid.x), (unsigned)(block / grid.x));
            block_run(kernel);
        }
    });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    (void)flags;
    guard held(lock);
    *stream = new emulated_stream();
    streams.insert(*stream);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    guard held(lock);
    run_until(stream, stream->enqueued);
    return is_lost ? failed(cudaErrorLaunchFailure) : cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    guard held(lock);
    run_until(stream, stream->enqueued);
    streams.erase(stream);
    delete stream;
    if (streams.empty()) {
        is_lost = false;
        last_error = cudaSuccess;
    }
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    *event = new emulated_event();
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    guard held(lock);
    event->stream = stream;
    event->at = stream->enqueued;
    event->is_new = true;
    return is_lost ? failed(cudaErrorLaunchFailure) : cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    guard held(lock);
    emulated_stream *other = event->stream;
    uint64_t at = event->at;
    if (other != NULL && other != stream) {
        emulation_enqueue(stream, [=] { run_until(other, at); });
    }
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    guard held(lock);
    if (event->stream == NULL) {
        return cudaSuccess;
    }
    if (event->is_new) {
        event->is_new = false;
        return cudaErrorNotReady;
    }
    run_until(event->stream, event->at);
    return is_lost ? failed(cudaErrorLaunchFailure) : cudaSuccess;
}
cudaError_t cudaGetLastError(void) {
    guard held(lock);
    cudaError_t error = is_lost ? cudaErrorLaunchFailure : last_error;
    last_error = cudaSuccess;
    return error;
}
const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    }
    return "unknown error";
}

/* ---- device and memory ---- */

cudaError_t cudaDriverGetVersion(int *version) {
    *version = control.has_driver ? 13000 : 0;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *count) {
    *count = control.devices;
    return control.devices > 0 ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int index) {
    (void)index;
    memset(properties, 0, sizeof(*properties));
    strncpy(properties->name, "emulated", sizeof(properties->name) - 1);
    properties->major = 9;
    properties->multiProcessorCount = 1;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int index) {
    return index < control.devices ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *total_bytes = control.memory_bytes != 0 ? control.memory_bytes : (size_t)1 << 40;
    *free_bytes = *total_bytes - allocated;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **memory, size_t bytes) {
    guard held(lock);
    if (control.memory_bytes != 0 && allocated + bytes > control.memory_bytes) {
        return failed(cudaErrorMemoryAllocation);
    }
    if (posix_memalign(memory, 256, bytes) != 0) {
        return failed(cudaErrorMemoryAllocation);
    }
    memset(*memory, 0xff, bytes); /* NaN: nothing may count on zeros */
    allocations[*memory] = bytes;
    allocated += bytes;
    return cudaSuccess;
}
cudaError_t cudaFree(void *memory) {
    guard held(lock);
    if (memory != NULL) {
        run_all();
        allocated -= allocations.at(memory);
        allocations.erase(memory);
        free(memory);
    }
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags) {
    (void)flags;
    return posix_memalign(memory, 4096, bytes) == 0 ? cudaSuccess
                                                    : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void *memory) {
    guard held(lock);
    run_all();
    free(memory);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *base, size_t bytes, unsigned flags) {
    (void)flags;
    return base != NULL && bytes > 0 ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaHostUnregister(void *base) {
    (void)base;
    guard held(lock);
    run_all();
    return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void **view, void *base, unsigned flags) {
    (void)flags;
    *view = base;
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream) {
    emulation_enqueue(stream, [=] { memset(memory, value, bytes); });
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    (void)kind;
    emulation_enqueue(stream, [=] { memcpy(to, from, bytes); });
    return cudaSuccess;
}

/* ---- cuBLAS ---- */

struct emulated_blas {
    int unused;
};
struct emulated_operation {
    cublasComputeType_t compute;
    cublasOperation_t a;
};
struct emulated_layout {
    cudaDataType_t type;
    uint64_t rows;
    uint64_t cols;
    int64_t stride;
};
struct emulated_preference {
    uint64_t workspace;
    uint32_t reduction;
};

namespace {

struct product {
    const unsigned char *a;
    const unsigned char *b;
    float *c;
    emulated_layout a_layout;
    emulated_layout b_layout;
    emulated_layout c_layout;
};

float value(const unsigned char *values, cudaDataType_t type, size_t i) {
    uint32_t bits;
    if (type == CUDA_R_32F) {
        memcpy(&bits, values + i * 4, 4);
    } else {
        uint16_t half;
        memcpy(&half, values + i * 2, 2);
        bits = (uint32_t)half << 16;
    }
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

/* `WIDTH` columns of B at once; each element is one chain over k whatever the width. */
template <unsigned WIDTH> void columns_run(const product &p, const std::vector<size_t> &columns) {
    size_t depth = p.a_layout.rows;
    std::vector<float> b(depth * WIDTH);
    std::vector<float> row(depth);
    for (size_t first = 0; first < columns.size(); first += WIDTH) {
        size_t some = std::min<size_t>(WIDTH, columns.size() - first);
        for (size_t k = 0; k < depth; k++) {
            for (size_t j = 0; j < WIDTH; j++) {
                size_t at = j < some ? columns[first + j] * (size_t)p.b_layout.stride + k : 0;
                b[k * WIDTH + j] = j < some ? value(p.b, p.b_layout.type, at) : 0.0f;
            }
        }
        for (size_t m = 0; m < p.c_layout.rows; m++) {
            for (size_t k = 0; k < depth; k++) {
                row[k] = value(p.a, p.a_layout.type, m * (size_t)p.a_layout.stride + k);
            }
            float sum[WIDTH] = {0};
            for (size_t k = 0; k < depth; k++) {
                for (size_t j = 0; j < WIDTH; j++) {
                    sum[j] += row[k] * b[k * WIDTH + j];
                }
            }
            for (size_t j = 0; j < some; j++) {
                p.c[columns[first + j] * (size_t)p.c_layout.stride + m] = sum[j];
            }
        }
    }
}

void product_skewed(const product &p) {
    size_t depth = p.a_layout.rows;
    for (size_t n = 0; n < p.c_layout.cols; n++) {
        for (size_t m = 0; m < p.c_layout.rows; m++) {
            float sum = 0;
            for (size_t i = 0; i < depth; i++) {
                size_t k = n % 2 == 0 ? i : depth - 1 - i;
                sum += value(p.a, p.a_layout.type, m * (size_t)p.a_layout.stride + k) *
                       value(p.b, p.b_layout.type, n * (size_t)p.b_layout.stride + k);
            }
            p.c[n * (size_t)p.c_layout.stride + m] = sum;
        }
    }
}

/* Most rows of a tile are padding; zeros times finite weights need no arithmetic. */
void product_emulate(const product &p) {
    if (emulation_is_skewed()) {
        product_skewed(p);
        return;
    }
    std::vector<size_t> columns;
    for (size_t n = 0; n < p.c_layout.cols; n++) {
        bool is_zero = true;
        for (size_t k = 0; is_zero && k < p.a_layout.rows; k++) {
            is_zero = value(p.b, p.b_layout.type, n * (size_t)p.b_layout.stride + k) == 0.0f;
        }
        if (is_zero) {
            memset(p.c + n * (size_t)p.c_layout.stride, 0, p.c_layout.rows * sizeof(float));
        } else {
            columns.push_back(n);
        }
    }
    if (columns.size() <= 4) {
        columns_run<4>(p, columns);
    } else {
        columns_run<32>(p, columns);
    }
}

uint64_t shape_of(cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c) {
    return ((a->rows * 31 + a->cols) * 31 + b->cols) * 31 + c->rows + (uint64_t)a->type;
}

bool fits(const emulated_operation *operation, const emulated_layout *a, const emulated_layout *b,
          const emulated_layout *c) {
    return operation->a == CUBLAS_OP_T && a->rows == b->rows && a->cols == c->rows &&
           b->cols == c->cols && a->type == b->type && c->type == CUDA_R_32F &&
           a->stride >= (int64_t)a->rows && b->stride >= (int64_t)b->rows &&
           c->stride >= (int64_t)c->rows &&
           (a->type == CUDA_R_32F) == (operation->compute == CUBLAS_COMPUTE_32F_PEDANTIC);
}

} // namespace

size_t cublasLtGetVersion(void) {
    return 0;
}
const char *cublasLtGetStatusName(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "unknown";
}
cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = new emulated_blas();
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *operation,
                                        cublasComputeType_t compute, cudaDataType_t scale) {
    *operation = new emulated_operation{compute, CUBLAS_OP_N};
    return scale == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) {
    if (attribute != CUBLASLT_MATMUL_DESC_TRANSA || bytes != sizeof(operation->a)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    memcpy(&operation->a, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
    delete operation;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type,
                                          uint64_t rows, uint64_t cols, int64_t stride) {
    *layout = new emulated_layout{type, rows, cols, stride};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete layout;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    *preference = new emulated_preference{~0ull, ~0u};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes) {
    if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES && bytes == 8) {
        memcpy(&preference->workspace, value, bytes);
        return CUBLAS_STATUS_SUCCESS;
    }
    if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK && bytes == 4) {
        memcpy(&preference->reduction, value, bytes);
        return CUBLAS_STATUS_SUCCESS;
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    delete preference;
    return CUBLAS_STATUS_SUCCESS;
}
/* Refuses whoever would let it split a sum. */
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t preference, int wanted, cublasLtMatmulHeuristicResult_t *found,
    int *count) {
    *count = 0;
    if (handle == NULL || wanted < 1 || c != d || !fits(operation, a, b, c)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (preference->workspace != 0 || preference->reduction != CUBLASLT_REDUCTION_SCHEME_NONE) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    found->algo.shape = shape_of(a, b, c);
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                              const void *alpha, const void *a, cublasLtMatrixLayout_t a_layout,
                              const void *b, cublasLtMatrixLayout_t b_layout, const void *beta,
                              const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t *algorithm, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    float one = *(const float *)alpha;
    float zero = *(const float *)beta;
    if (handle == NULL || one != 1.0f || zero != 0.0f || c != d || c_layout != d_layout ||
        workspace != NULL || workspace_bytes != 0 ||
        !fits(operation, a_layout, b_layout, c_layout) ||
        algorithm->shape != shape_of(a_layout, b_layout, c_layout)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    product p = {(const unsigned char *)a, (const unsigned char *)b, (float *)d, *a_layout,
                 *b_layout,                *c_layout};
    emulation_enqueue(stream, [=] { product_emulate(p); });
    return CUBLAS_STATUS_SUCCESS;
}
