/// @file
/// bar.sync and bar.arrive: barriers of some warps of a block.
#pragma once

#include "ptx/sm90.hpp"

namespace ptx {

/// Waits at barrier `id` (1 to 15; 0 is that of __syncthreads()) until `threads` threads, a multiple of 32, are there or have passed
/// bar_arrive(). All lanes of a warp must call.
SIMT_DEVICE void bar_sync(unsigned id, unsigned threads) {
#if SIMT_EMULATED
    simt::cpu::block().named_barrier("bar.sync", id, threads, true);
#else
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

/// Counts as being there for bar_sync(), and goes on.
SIMT_DEVICE void bar_arrive(unsigned id, unsigned threads) {
#if SIMT_EMULATED
    simt::cpu::block().named_barrier("bar.arrive", id, threads, false);
#else
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

}  // namespace ptx
