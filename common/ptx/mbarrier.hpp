/// @file
/// mbarrier: barriers in shared memory that count arrivals of threads and bytes of copies.
#pragma once

#include "ptx/sm90.hpp"

namespace ptx {

/// One barrier, in shared memory. It is in phase 0 after its initialisation; a phase is complete when all arrivals have come and all
/// bytes that were announced have landed, and the next one begins.
#if SIMT_EMULATED
using Mbarrier = simt::cpu::MbarrierHandle;
#else
struct alignas(8) Mbarrier {
    std::uint64_t state;
};
#endif

/// Sets up a barrier for `arrivals` arrivals a phase, by one thread. Before others use it come fence_mbarrier_init() and a barrier of
/// the block (or cluster).
/// @param name,index what messages of the emulator call it: "full[1]"
SIMT_DEVICE void mbarrier_init(Mbarrier& barrier, unsigned arrivals, const char* name, int index = -1) {
#if SIMT_EMULATED
    simt::cpu::block().init_mbarrier(&barrier, arrivals, name, index);
#else
    (void)name, (void)index;
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
#endif
}

/// Makes this thread's initialisations known to the TMA unit and to the cluster.
SIMT_DEVICE void fence_mbarrier_init() {
#if SIMT_EMULATED
    simt::cpu::block().announce_mbarriers();
#else
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/// One arrival. What this thread did before is seen by those that wait for the phase.
SIMT_DEVICE void mbarrier_arrive(Mbarrier& barrier) {
#if SIMT_EMULATED
    simt::cpu::block().arrive_mbarrier("mbarrier.arrive", &barrier, 0);
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
#endif
}

/// The same, by the threads that say so. All of a warp call: so that the address, where it is the same for all, is computed once for the
/// warp, by the uniform datapath, which code after a branch that threads take apart cannot use.
SIMT_DEVICE void mbarrier_arrive_if(bool arrives, Mbarrier& barrier) {
#if SIMT_EMULATED
    if (arrives) mbarrier_arrive(barrier);
#else
    asm volatile(
        "{\n"
        ".reg .pred arrives;\n"
        "setp.ne.u32 arrives, %1, 0;\n"
        "@arrives mbarrier.arrive.shared::cta.b64 _, [%0];\n"
        "}" ::"r"(shared_address(&barrier)),
        "r"(static_cast<unsigned>(arrives))
        : "memory");
#endif
}

/// Announces `bytes` more that must land before the phase is complete, and arrives.
SIMT_DEVICE void mbarrier_arrive_expect_tx(Mbarrier& barrier, unsigned bytes) {
#if SIMT_EMULATED
    simt::cpu::block().arrive_mbarrier("mbarrier.arrive.expect_tx", &barrier, bytes);
#else
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes) : "memory");
#endif
}

/// One arrival at the same barrier of another block of the cluster.
///
/// Without .release.cluster, which would order all of the thread's accesses and costs a fence of its memory: what the arrival hands
/// over must be reads of shared memory that a wait has completed, or loads whose results something before it depends on. keep_in_place() of
/// them holds the compiler, but not ptxas, which may issue the arrival while the last load is under way.
SIMT_DEVICE void mbarrier_arrive_remote(Mbarrier& barrier, unsigned rank) {
#if SIMT_EMULATED
    auto& block = simt::cpu::block();
    auto* const peer = static_cast<Mbarrier*>(block.peer_address("mbarrier.arrive", &barrier, rank));
    block.arrive_mbarrier("mbarrier.arrive", peer, 0);
#else
    asm volatile(
        "{\n"
        ".reg .b32 peer;\n"
        "mapa.shared::cluster.u32 peer, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [peer];\n"
        "}" ::"r"(shared_address(&barrier)),
        "r"(rank)
        : "memory");
#endif
}

/// Waits until the phase of the given parity (0: phases 0, 2, 4 ..., 1: the others) is complete: returns at once when the current
/// phase has the other parity. So the first wait for parity 1 does not wait at all.
SIMT_DEVICE void mbarrier_wait(Mbarrier& barrier, unsigned parity) {
#if SIMT_EMULATED
    simt::cpu::block().wait_mbarrier(&barrier, parity);
#else
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
        "@complete bra done;\n"
        "bra again;\n"
        "done:\n"
        "}" ::"r"(shared_address(&barrier)),
        "r"(parity)
        : "memory");
#endif
}

}  // namespace ptx
