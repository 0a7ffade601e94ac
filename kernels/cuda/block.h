/* How a kernel is written: in phases.
 *
 * A phase, EACH_THREAD(t), is run by all threads of the block; between phases that exchange data
 * stands BLOCK_SYNC. What is computed outside phases is the same in every thread (UNIFORM in
 * meaning: it reads only arguments and shared memory that a BLOCK_SYNC made visible). A value of
 * one thread lives across phases only in shared memory or in a THREAD_OWN variable, which phases
 * name as OWN(name, t). So the same text runs on a GPU, where a phase is the thread itself, and in
 * the tests' emulation, where it is a loop over the threads in an order drawn anew for each phase:
 * what depends on that order is found there. */
#ifndef KERNELS_CUDA_BLOCK_H
#define KERNELS_CUDA_BLOCK_H

#include <cuda_runtime.h>

#ifndef BATON_EMULATED_DEVICE
#define EACH_THREAD(t)         if (const unsigned t = threadIdx.x; true)
#define BLOCK_SYNC()           __syncthreads()
#define THREAD_OWN(type, name) type name
#define OWN(name, t)           ((void)(t), name)
#define LAUNCH(stream, grid, threads, kernel, ...)                                                 \
    kernel<<<(grid), (threads), 0, (stream)>>>(__VA_ARGS__)
#endif

#endif
