/// @file
/// Wrong kernels are compiled for float32 alone: a mistake shows in one type, and each type costs seconds of compile time.
#pragma once

#include "attention/dtype.hpp"

namespace workbook {

template <class F>
decltype(auto) with_float(DType, F&& f) {
    return f.template operator()<float>();
}

}  // namespace workbook
