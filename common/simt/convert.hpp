/// @file
/// Element types to float32 and back, the same on both machines.
#pragma once

#include "simt/config.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if SIMT_EMULATED
#include <bit>
#include <cstdint>
#endif

namespace simt {

SIMT_BOTH float to_float(float x) { return x; }
#if SIMT_EMULATED
// CUDA's own conversions are not inlined by the host compiler, or go bit by bit.
inline float to_float(__half x) {
    const std::uint32_t bits = std::bit_cast<std::uint16_t>(x), magnitude = (bits & 0x7fffu) << 13;
    // Exponents of a half are smaller by 112; a subnormal one becomes normal by the same product. Infinity and NaN keep all ones.
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
    const std::uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | special | (bits & 0x8000u) << 16);
}
inline float to_float(__nv_bfloat16 x) { return std::bit_cast<float>(std::uint32_t{std::bit_cast<std::uint16_t>(x)} << 16); }
#else
SIMT_BOTH float to_float(__half x) { return __half2float(x); }
SIMT_BOTH float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
#endif

/// Rounds to nearest even.
template <class T>
SIMT_BOTH T from_float(float x);
template <>
SIMT_BOTH float from_float<float>(float x) {
    return x;
}
template <>
SIMT_BOTH __half from_float<__half>(float x) {
    return __float2half_rn(x);
}
template <>
SIMT_BOTH __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

}  // namespace simt
