/// @file
/// Tensor maps: what the TMA unit knows of a tensor in global memory, and of the boxes that it moves. Made on the host.
#pragma once

#include "ptx/swizzle.hpp"
#include "simt/config.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <array>
#include <cstddef>
#include <type_traits>

#if SIMT_EMULATED
#include "simt/cpu/async.hpp"
#else
#include <cuda.h>
#endif

namespace ptx {

/// Passed to a kernel as `const __grid_constant__ ptx::TensorMap`, so that it lies where the TMA unit can read it.
#if SIMT_EMULATED
using TensorMap = simt::cpu::TensorMap;
#else
using TensorMap = CUtensorMap;
#endif

namespace detail {

enum class Element { f16, bf16, e4m3, f32 };

template <class T>
constexpr Element element_type() {
    using Plain = std::remove_const_t<T>;
    if constexpr (std::is_same_v<Plain, __half>) return Element::f16;
    if constexpr (std::is_same_v<Plain, __nv_bfloat16>) return Element::bf16;
    if constexpr (std::is_same_v<Plain, __nv_fp8_e4m3>) return Element::e4m3;
    if constexpr (std::is_same_v<Plain, float>) return Element::f32;
}

struct MapRequest {
    const char* name;
    const void* data;
    Element element;
    int bytes;  // of an element
    bool writable;
    int rank;
    std::array<long long, 5> extent, stride;
    std::array<int, 5> box;
    Swizzle swizzle;
};
TensorMap encode(const MapRequest& request);

}  // namespace detail

/// A map of a tensor of rank 2 to 5 whose innermost dimension, number 0 here, is contiguous.
///
/// A box lies in shared memory packed, dimension 0 fastest, with the swizzle applied to each address. Elements of a box that are
/// outside of the tensor are zero when it is loaded, and left out when it is stored.
/// @param name   of the tensor, for the ledger and for messages
/// @param extent elements of each dimension
/// @param stride elements from one index to the next, of dimensions 1 to R - 1
/// @param box    elements of a box in each dimension; with a swizzle its rows must be as long as the swizzle's span
/// @throws simt::Error with the parameter, its value and what TMA accepts
template <class T, std::size_t R>
TensorMap make_tensor_map(const char* name, T* data, const std::array<long long, R>& extent, const std::array<long long, R - 1>& stride,
                          const std::array<int, R>& box, Swizzle swizzle) {
    static_assert(R >= 2 && R <= 5, "tensor maps have 2 to 5 dimensions here");
    detail::MapRequest request{name, data, detail::element_type<T>(), sizeof(T), !std::is_const_v<T>, R, {}, {}, {}, swizzle};
    for (std::size_t k = 0; k < R; ++k) {
        request.extent[k] = extent[k];
        request.stride[k] = static_cast<long long>(sizeof(T)) * (k ? stride[k - 1] : 1);
        request.box[k] = box[k];
    }
    return detail::encode(request);
}

}  // namespace ptx
