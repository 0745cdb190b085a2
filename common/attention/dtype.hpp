/// @file
/// The element types of Q, K, V and O.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <string_view>

namespace workbook {

/// Element type of Q, K, V and O. Accumulation is float32 whatever the type.
enum class DType { f32, f16, bf16 };

/// "f32", "f16" or "bf16".
const char* name(DType type);

/// The type that a name stands for. @throws InvalidArgument that names the accepted words.
DType parse_dtype(std::string_view word);

/// Bytes of one element.
std::size_t size_of(DType type);

template <class T>
inline constexpr DType dtype_of = DType::f32;
template <>
inline constexpr DType dtype_of<__half> = DType::f16;
template <>
inline constexpr DType dtype_of<__nv_bfloat16> = DType::bf16;

/// Calls `f.template operator()<T>()` with the C++ type that `type` stands for.
template <class F>
decltype(auto) with_type(DType type, F&& f) {
    switch (type) {
        case DType::f16: return f.template operator()<__half>();
        case DType::bf16: return f.template operator()<__nv_bfloat16>();
        case DType::f32: break;
    }
    return f.template operator()<float>();
}

/// The same of a type that tensor cores multiply in 16 bits: f16, or else bf16.
template <class F>
decltype(auto) with_16_bit_type(DType type, F&& f) {
    if (type == DType::f16) return f.template operator()<__half>();
    return f.template operator()<__nv_bfloat16>();
}

}  // namespace workbook
