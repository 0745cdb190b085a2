/// @file
/// Reductions over the lanes of a warp: butterflies of shuffles. In emulation the lanes meet once for all steps, with the same result.
#pragma once

namespace simt {

/// All 32 lanes.
inline constexpr unsigned kFullMask = 0xffffffffu;

/// Sum over each aligned group of `Width` lanes (a power of two up to 32); every lane gets it. All 32 lanes must call.
template <int Width = 32>
SIMT_DEVICE float warp_sum(float x) {
    static_assert(Width >= 1 && Width <= 32 && (Width & (Width - 1)) == 0, "a group of lanes is a power of two up to 32");
#if SIMT_EMULATED
    return cpu::warp_sum(x, Width);
#else
#pragma unroll
    for (int step = Width / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullMask, x, step);
    return x;
#endif
}

/// Maximum over each aligned group of `Width` lanes; every lane gets it. All 32 lanes must call.
template <int Width = 32>
SIMT_DEVICE float warp_max(float x) {
    static_assert(Width >= 1 && Width <= 32 && (Width & (Width - 1)) == 0, "a group of lanes is a power of two up to 32");
#if SIMT_EMULATED
    return cpu::warp_max(x, Width);
#else
#pragma unroll
    for (int step = Width / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kFullMask, x, step));
    return x;
#endif
}

}  // namespace simt
