/// @file
/// ex2: the base-2 exponential of the special function unit.
#pragma once

#include "simt/simt.hpp"

#include <cmath>

namespace ptx {

/// 2^x with a relative error of about 2^-22; subnormal inputs and results are zero. ex2(-infinity) = 0.
SIMT_DEVICE float ex2_approx_ftz(float x) {
#if SIMT_EMULATED
    const float y = std::exp2(x);
    return std::fpclassify(y) == FP_SUBNORMAL ? 0.0f : y;
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

}  // namespace ptx
