/// @file
/// Wrong kernels are compiled for float32 alone: a mistake shows in one type, and each type costs seconds of compile time.
#pragma once

#include "attention/dtype.hpp"

namespace workbook {

template <class F>
decltype(auto) with_float(DType, F&& f) {
    return f.template operator()<float>();
}

/// Of the head dimensions of the float32 kernels d = 64 alone, for the same reason.
template <class F>
decltype(auto) with_d64(int, F&& f) {
    return f.template operator()<64>();
}

}  // namespace workbook
