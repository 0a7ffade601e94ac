/* The emulated NCCL: as much of nccl.h as kernels/cuda/ranks.cu uses. The functions are those of a
 * shared object of its own (nccl.cpp), as NCCL's are. */
#ifndef TESTS_SUPPORT_CUDA_NCCL_H
#define TESTS_SUPPORT_CUDA_NCCL_H

#include <cuda_runtime.h>

using ncclComm_t = struct ncclComm *;
struct ncclUniqueId {
    char internal[128];
};
enum ncclResult_t {
    ncclSuccess = 0,
    ncclSystemError = 2,
    ncclInvalidArgument = 4,
    ncclRemoteError = 6,
    ncclInProgress = 7,
};
enum ncclDataType_t { ncclFloat32 = 7, ncclBfloat16 = 9 };
enum ncclRedOp_t { ncclSum = 0 };
struct ncclConfig_t {
    int blocking;
};
#define NCCL_CONFIG_INITIALIZER                                                                    \
    { -1 }

extern "C" {
const char *ncclGetErrorString(ncclResult_t result);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int count, ncclUniqueId id, int rank,
                                    ncclConfig_t *config);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state);
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
}

#endif
