/// @file
/// What the host sides of the forward and of the backward variants share.
#pragma once

#include "ptx/tensor_map.hpp"
#include "stage/stage.hpp"

#include <optional>
#include <string>
#include <vector>

namespace step06 {

using namespace workbook;

/// A map of a tensor (B, H, N, D) in 16 bits by boxes of `rows` rows. TMA's widest swizzle takes rows of 64 elements, so that D is
/// split in two dimensions, and one box is a whole tile all the same, or one that `shares` load together.
template <class T>
ptx::TensorMap map_of(const std::string& variant, const char* name, const TensorRef& t, const Problem& p, int heads, int seq, int rows,
                      int shares = 1) {
    try {
        return ptx::make_tensor_map<T, 5>(name, static_cast<T*>(t.data), {64, seq, p.head_dim / 64, heads, p.batch},
                                          {t.strides[2], 64, t.strides[1], t.strides[0]}, {64, rows, p.head_dim / 64 / shares, 1, 1},
                                          ptx::Swizzle::bytes_128);
    } catch (const simt::Error& error) {
        throw Refused(variant + ": " + error.what());
    }
}

/// Calls f with the element type of Q, K, V and O, whose rows must be where TMA can take them.
template <class F>
void with_tensors(const std::string& variant, Forward& args, F&& run) {
    require_16_byte_rows(variant, args, "variants 04a and 04b take any");
    with_16_bit_type(args.problem.dtype, run);
}

/// Why a GPU cannot run these kernels. @param bytes of shared memory that the tiles take
/// @param others,small what can: where there is no wgmma, and where shared memory is too small
inline std::optional<std::string> refuses_device(const Device& device, std::size_t bytes, const std::string& others,
                                                 const std::string& small) {
    if (device.compute_capability / 10 != 9)
        return device.name + " has compute capability " + std::to_string(device.compute_capability / 10) + "." +
               std::to_string(device.compute_capability % 10) + ": wgmma is an instruction of 9.0 alone (H100, H200); " + others +
               " run on 8.0 and later";
    if (bytes > device.shared_memory_per_block)
        return "a block has " + std::to_string(device.shared_memory_per_block) + " bytes of shared memory: the tiles take " +
               std::to_string(bytes) + "; " + small;
    return std::nullopt;
}

/// Why a forward variant for 16-bit types cannot do a problem. @param bytes of shared memory that the tiles take
inline std::optional<std::string> refuses_16_bit(const Problem& problem, const Device& device, std::size_t bytes) {
    if (problem.dtype == DType::f32) return "dtype = f32: tensor cores multiply f16 and bf16; variants 04a and 04b take f32";
    const int d = problem.head_dim;
    if (d != 64 && d != 128 && d != 256)
        return "head_dim = " + std::to_string(d) + ": 64, 128 and 256 are accepted; stages 01 and 02 take any up to 256";
    return refuses_device(device, bytes, "stages 01 to 04", "stages 01 and 02 need none");
}

/// What multiplies in the variants for 16-bit types.
inline Unit tensor_16bit(DType) { return Unit::tensor_16bit; }

/// 06c.
Variant vote_first_variant();
/// 06d.
Variant fp8_variant();

/// 06e. @param forward what they follow, where O and LSE are not given
std::vector<BackwardVariant> backward_variants(void (*forward)(Forward&));
/// 06f, likewise.
BackwardVariant exchange_variant(void (*forward)(Forward&));
/// 06g, likewise.
BackwardVariant reduce_scatter_variant(void (*forward)(Forward&));

}  // namespace step06
