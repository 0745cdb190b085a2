/// @file
/// Element types to float32 and back, the same on both machines.
#pragma once

#include "simt/config.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace simt {

SIMT_BOTH float to_float(float x) { return x; }
SIMT_BOTH float to_float(__half x) { return __half2float(x); }
SIMT_BOTH float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

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
