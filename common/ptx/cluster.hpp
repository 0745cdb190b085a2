/// @file
/// Clusters: blocks that run at the same time and reach each other's shared memory.
#pragma once

#include "ptx/sm90.hpp"

namespace ptx {

/// This block's number in its cluster.
SIMT_DEVICE unsigned cluster_rank() {
#if SIMT_EMULATED
    return simt::cpu::block().rank();
#else
    unsigned rank;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
#endif
}

/// Blocks of the cluster.
SIMT_DEVICE unsigned cluster_size() {
#if SIMT_EMULATED
    return simt::cpu::block().cluster().size();
#else
    unsigned size;
    asm volatile("mov.u32 %0, %cluster_nctarank;" : "=r"(size));
    return size;
#endif
}

/// First half of a barrier of all threads of the cluster. All lanes of a warp must call.
SIMT_DEVICE void cluster_arrive() {
#if SIMT_EMULATED
    simt::cpu::block().cluster().arrive(simt::cpu::block().self());
#else
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

/// Second half: waits until all have arrived (or returned from the kernel).
SIMT_DEVICE void cluster_wait() {
#if SIMT_EMULATED
    simt::cpu::block().cluster().wait(simt::cpu::block().self());
#else
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// Waits for all threads of the cluster.
SIMT_DEVICE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

/// The address of the same object in the shared memory of block `rank` of the cluster, for ordinary loads and stores. That block
/// must not have ended by then.
template <class T>
SIMT_DEVICE T* mapa(T* mine, unsigned rank) {
#if SIMT_EMULATED
    return static_cast<T*>(simt::cpu::block().peer_address("mapa", mine, rank));
#else
    T* peer;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(peer) : "l"(mine), "r"(rank));
    return peer;
#endif
}

}  // namespace ptx
