/// @file
/// What a stage that is cut down to one type and one shape (cmake/OneShape.cmake) calls in the place of with_type(),
/// with_16_bit_type() and with_fp32_head_dim(): float32, float16 and d = 64, whatever the problem says.
#pragma once

#include "attention/dtype.hpp"

namespace workbook {

template <class F>
decltype(auto) with_float(DType, F&& f) {
    return f.template operator()<float>();
}

template <class F>
decltype(auto) with_half(DType, F&& f) {
    return f.template operator()<__half>();
}

template <class F>
decltype(auto) with_d64(int, F&& f) {
    return f.template operator()<64>();
}

}  // namespace workbook
