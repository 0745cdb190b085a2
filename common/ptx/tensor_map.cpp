#include "ptx/tensor_map.hpp"

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#if SIMT_EMULATED
#include "simt/ledger.hpp"
#endif

namespace ptx::detail {
namespace {

[[noreturn]] void refuse(const MapRequest& r, const std::string& what) {
    throw simt::Error("tensor map of " + std::string(r.name) + ": " + what);
}

/// What the driver API's manual asks of cuTensorMapEncodeTiled(), and of swizzled boxes one thing more (see make_tensor_map).
void check(const MapRequest& r) {
    const auto number = [](const char* what, int k, long long value) {
        return std::string(what) + "[" + std::to_string(k) + "] = " + std::to_string(value);
    };
    if (reinterpret_cast<std::uintptr_t>(r.data) % 16 || r.data == nullptr) refuse(r, "its address is null or not a multiple of 16 bytes");
    for (int k = 0; k < r.rank; ++k) {
        const auto i = static_cast<std::size_t>(k);
        if (r.extent[i] < 1 || r.extent[i] > 1ll << 32) refuse(r, number("extent", k, r.extent[i]) + ": 1 to 2^32 is accepted");
        if (k > 0 && (r.stride[i] % 16 || r.stride[i] < 0 || r.stride[i] >= 1ll << 40))
            refuse(r, number("stride", k, r.stride[i]) + " bytes: multiples of 16 below 2^40 are accepted");
        if (r.box[i] < 1 || r.box[i] > 256) refuse(r, number("box", k, r.box[i]) + ": 1 to 256 is accepted");
    }
    const int row = r.box[0] * r.bytes, span = span_of(r.swizzle);
    if (row % 16) refuse(r, "rows of the box are " + std::to_string(row) + " bytes: multiples of 16 are accepted");
    if (span && row != span)
        refuse(r, "rows of the box are " + std::to_string(row) + " bytes: a swizzle over " + std::to_string(span) +
                      " bytes needs rows of as many");
}

}  // namespace

#if SIMT_EMULATED

TensorMap encode(const MapRequest& r) {
    check(r);
    TensorMap map;
    map.base = static_cast<char*>(const_cast<void*>(r.data));
    map.rank = r.rank;
    map.element = r.bytes;
    map.span = span_of(r.swizzle);
    map.tensor = simt::tensor_id(r.name);
    map.writable = r.writable;
    map.extent = r.extent;
    map.stride = r.stride;
    map.box = r.box;
    return map;
}

#else

namespace {

/// The driver's function by way of the runtime, so that nothing has to be linked with libcuda.
decltype(&cuTensorMapEncodeTiled) find_encoder() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess || function == nullptr)
        throw simt::Error("cuTensorMapEncodeTiled: the driver does not have it: 12.0 or later is needed");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

}  // namespace

TensorMap encode(const MapRequest& r) {
    check(r);
    static const auto encoder = find_encoder();
    constexpr CUtensorMapDataType kTypes[] = {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                              CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_DATA_TYPE_FLOAT32};
    constexpr CUtensorMapSwizzle kSwizzles[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_SWIZZLE_64B,
                                                CU_TENSOR_MAP_SWIZZLE_128B};
    cuuint64_t extent[5], stride[4];
    cuuint32_t box[5], every[5];
    for (std::size_t k = 0; k < static_cast<std::size_t>(r.rank); ++k) {
        extent[k] = static_cast<cuuint64_t>(r.extent[k]);
        if (k > 0) stride[k - 1] = static_cast<cuuint64_t>(r.stride[k]);
        box[k] = static_cast<cuuint32_t>(r.box[k]);
        every[k] = 1;
    }
    TensorMap map;
    const CUresult status = encoder(&map, kTypes[static_cast<int>(r.element)], static_cast<cuuint32_t>(r.rank), const_cast<void*>(r.data),
                                    extent, stride, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, kSwizzles[static_cast<int>(r.swizzle)],
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) refuse(r, "cuTensorMapEncodeTiled returned error " + std::to_string(static_cast<int>(status)));
    return map;
}

#endif

}  // namespace ptx::detail
