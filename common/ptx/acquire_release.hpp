/// @file
/// ld.acquire and red.release: one block hands on to another what it did in global memory.
#pragma once

#include "simt/simt.hpp"

#include <cstdint>

namespace ptx {

/// Adds to a number in global memory. Who then sees the new value by wait_acquire() also sees what this thread did before, or saw.
/// In emulation it counts as a read and a write.
template <class Address>
SIMT_DEVICE void red_release_add(Address to, std::uint32_t value) {
#if SIMT_EMULATED
    to.read(1);
    std::atomic_ref<std::uint32_t>(*to.write(1)).fetch_add(value, std::memory_order_release);
#else
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
#endif
}

/// Waits until a number in global memory has this value. The blocks that it waits for must have begun by then: so they have smaller
/// indices, in the order in which blocks begin (x first, then y, then z).
/// In emulation it counts as one read; on a GPU it asks again and again.
template <class Address>
SIMT_DEVICE void wait_acquire(Address from, std::uint32_t value) {
#if SIMT_EMULATED
    simt::cpu::block().wait_for_value(from.read(1), value, from.tensor());
#else
    std::uint32_t seen;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(from) : "memory");
    } while (seen != value);
#endif
}

}  // namespace ptx
