/// @file
/// mma.sync in emulation.
#pragma once

#include <array>
#include <cstdint>

namespace simt::cpu {

/// What a lane has of the matrices of ptx::mma_m16n8k16().
struct MmaFragments {
    float* d;
    const std::uint32_t* a;
    std::uint32_t b[2];
};

/// D += A B, of the 32 lanes of a warp. T: __half or __nv_bfloat16
template <class T>
void mma_m16n8k16(const std::array<MmaFragments*, 32>& lanes);

}  // namespace simt::cpu
