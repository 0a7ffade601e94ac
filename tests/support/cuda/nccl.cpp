/* Ranks of one process, joined by an id: enough of NCCL's non-blocking behaviour to see that the
 * caller polls, gives up in time and never uses a communicator after its end. */
#include <nccl.h>

#include <map>
#include <memory>
#include <mutex>
#include <string.h>
#include <string>
#include <vector>

struct group {
    int count;
    int joined;
    bool is_broken; /* one rank was aborted */
    uint64_t reduced; /* collectives that are complete */
    std::vector<void *> waiting; /* buffers of the collective under way, by rank */
    int deposited;
};
struct ncclComm {
    std::shared_ptr<group> of; /* its other ranks may look after this one's end */
    int rank;
    uint64_t started; /* collectives */
    bool is_finalized;
};

namespace {

std::mutex lock;
std::map<std::string, std::shared_ptr<group>> groups;
uint64_t ids;

float widen(const void *values, ncclDataType_t type, size_t i) {
    if (type == ncclFloat32) {
        return ((const float *)values)[i];
    }
    uint32_t bits = (uint32_t)((const uint16_t *)values)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

void sum(group *of, size_t count, ncclDataType_t type) {
    for (size_t i = 0; i < count; i++) {
        float total = 0;
        for (void *values : of->waiting) {
            total += widen(values, type, i);
        }
        for (void *values : of->waiting) {
            if (type == ncclFloat32) {
                ((float *)values)[i] = total;
            } else {
                uint32_t bits;
                memcpy(&bits, &total, 4);
                ((uint16_t *)values)[i] = (uint16_t)(bits >> 16);
            }
        }
    }
}

} // namespace

const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclSystemError: return "system error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "in progress";
    }
    return "unknown";
}
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    std::lock_guard<std::mutex> held(lock);
    memset(id, 0, sizeof(*id));
    ids++;
    memcpy(id->internal, &ids, sizeof(ids));
    return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int count, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    std::lock_guard<std::mutex> held(lock);
    if (config->blocking != 0 || rank >= count) {
        return ncclInvalidArgument;
    }
    std::shared_ptr<group> &of = groups[std::string(id.internal, sizeof(id.internal))];
    if (of == nullptr) {
        of = std::make_shared<group>();
        of->count = count;
        of->waiting.resize((size_t)count);
    }
    of->joined++;
    *comm = new ncclComm{of, rank, 0, false};
    return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state) {
    std::lock_guard<std::mutex> held(lock);
    const group *of = comm->of.get();
    if (of->is_broken) {
        *state = ncclRemoteError;
    } else {
        *state =
            of->joined < of->count || comm->started > of->reduced ? ncclInProgress : ncclSuccess;
    }
    return ncclSuccess;
}
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
    (void)stream; /* tests wait for the stream before they reduce */
    std::lock_guard<std::mutex> held(lock);
    group *of = comm->of.get();
    if (from != to || operation != ncclSum || of->joined < of->count ||
        comm->started > of->reduced) {
        return ncclInvalidArgument;
    }
    of->waiting[(size_t)comm->rank] = to;
    comm->started++;
    if (++of->deposited == of->count) {
        sum(of, count, type);
        of->deposited = 0;
        of->reduced++;
        return ncclSuccess;
    }
    return ncclInProgress;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    comm->is_finalized = true;
    return ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    bool was_finalized = comm->is_finalized;
    delete comm;
    return was_finalized ? ncclSuccess : ncclInvalidArgument;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    std::lock_guard<std::mutex> held(lock);
    comm->of->is_broken = true;
    delete comm;
    return ncclSuccess;
}
