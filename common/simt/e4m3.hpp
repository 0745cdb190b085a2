/// @file
/// e4m3, the 8-bit element type of Hopper's tensor cores: a sign, 4 bits of exponent, 3 of mantissa. Its largest number is 448, its
/// smallest 2^-9; it has NaN and no infinity. (Micikevicius et al. 2022, "FP8 formats for deep learning".)
#pragma once

#include "simt/config.hpp"

#include <cuda_fp8.h>

#include <cstdint>

namespace simt {

inline constexpr float kLargestE4m3 = 448.0f;

/// Four numbers rounded to nearest even, the first in the lowest byte. Larger ones than 448, infinities too, become 448; NaN stays NaN.
SIMT_BOTH std::uint32_t pack_e4m3(float a, float b, float c, float d) {
    const std::uint32_t low = __nv_cvt_float2_to_fp8x2(float2{a, b}, __NV_SATFINITE, __NV_E4M3),
                        high = __nv_cvt_float2_to_fp8x2(float2{c, d}, __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
}

SIMT_BOTH float to_float(__nv_fp8_e4m3 x) { return static_cast<float>(x); }

}  // namespace simt
