/// @file
/// Which of the two machines this build is for, and the few words of CUDA C++ that differ between them.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>

/// 1: kernels run on the emulator. 0: on a GPU. The gpu build sets SIMT_GPU for every file, also those that g++ compiles.
#if defined(__CUDACC__) || defined(SIMT_GPU)
#define SIMT_EMULATED 0
#else
#define SIMT_EMULATED 1
#endif

#if SIMT_EMULATED
// One OS thread runs one block at a time, so what is static to the thread is shared by the block. Kernels here use
// simt::shared<T>() or SharedArena instead: that memory starts poisoned and its bounds and races are checked.
#undef __shared__
#define __shared__ static thread_local
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __cluster_dims__
#define __cluster_dims__(...)
#define SIMT_DEVICE inline
#else
#define SIMT_DEVICE __device__ __forceinline__
#endif

/// Functions that both machines and the host may call.
#define SIMT_BOTH __host__ __device__ __forceinline__

namespace simt {

/// A launch or a kernel did something that it must not: the message says what, and which thread of which block.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Nothing in the block can run any more and not all threads have returned.
struct Deadlock : Error {
    using Error::Error;
};

/// Two threads touch one element of shared memory, at least one writes, and no barrier orders them.
struct Race : Error {
    using Error::Error;
};

}  // namespace simt
