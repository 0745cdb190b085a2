/// @file
/// red: additions to global memory that return nothing.
#pragma once

#include "simt/simt.hpp"

namespace ptx {

/// Adds four floats to four neighbours in global memory, each addition atomic by itself. `to` is &view(...) of the first, aligned to 16
/// bytes; it and the row's remainder hold all four. One instruction from compute capability 9.0 on, else four.
/// The order of additions by different threads is not defined, so sums differ in their last bits from run to run.
///
/// In emulation it counts as a read and a write of 16 bytes.
template <class Address>
SIMT_DEVICE void red_add_f32x4(Address to, const float (&x)[4]) {
#if SIMT_EMULATED
    to.read(4);
    float* const at = to.write(4);
    for (int e = 0; e < 4; ++e) std::atomic_ref<float>(at[e]).fetch_add(x[e]);
#elif __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) atomicAdd(to + e, x[e]);
#endif
}

}  // namespace ptx
