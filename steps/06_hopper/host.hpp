/// @file
/// What the host sides of the forward and of the backward variants share.
#pragma once

#include "06_hopper/tile_order.hpp"
#include "ptx/tensor_map.hpp"
#include "stage/stage.hpp"

#include <algorithm>
#include <bit>
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

/// Blocks of the grid: one an SM, in whole clusters.
inline int grid_of(const TileOrder& order, const Device& device, int cluster = 1) {
    return std::min(order.count(), std::max(device.sms / cluster, 1) * cluster);
}

/// The order in which the blocks of a persistent grid take tiles of Br queries. @param element bytes of one of K or V
/// @param cluster blocks that take neighbouring tiles together
inline TileOrder tile_order(const Problem& p, const Device& device, int Br, std::size_t element, int cluster = 1) {
    const int tiles = (p.seq + Br - 1) / Br, heads = p.heads * p.batch;
    if (!p.causal) {
        TileOrder order{.tiles = (tiles + cluster - 1) / cluster * cluster, .heads = p.heads, .batch = p.batch, .bundle = 1};
        if (cluster > 1) return order;
        // The last round, where it does not fill the GPU, is divided by keys: in as few parts as make it shortest, 4 at most, where that
        // saves more than the time of kWorthIt keys. So much take a part's beginning and end, and the kernel that merges.
        constexpr double kWorthIt = 3072;
        const int sms = std::max(device.sms, 1), left = order.count() % sms;
        const auto length = [&](int parts) { return static_cast<double>((left * parts + sms - 1) / sms) / parts; };  // of a whole tile
        for (int parts = 2; left > 0 && parts <= 4; ++parts)
            if (length(parts) < length(order.parts) && (1 - length(parts)) * p.kv_seq > kWorthIt) order.parts = parts;
        order.split = order.all_tiles() - left;
        return order;
    }
    // The power of two next to the number of heads whose K and V the L2 cache holds; but four blocks or more shall read the same K and V
    // at a time.
    const double of_a_head = 2.0 * p.kv_seq * p.head_dim * static_cast<double>(element) * p.kv_heads / p.heads;
    const double fit = std::clamp(static_cast<double>(device.l2_bytes) / of_a_head * 1.4142, 1.0, std::max(device.sms / 4.0, 1.0));
    return {.tiles = tiles,
            .heads = p.heads,
            .batch = p.batch,
            .bundle = std::min(heads, static_cast<int>(std::bit_floor(static_cast<unsigned>(fit))))};
}

/// How many tiles are claimed, and how many blocks are through.
inline constexpr std::size_t kClaimBytes = 2 * sizeof(int);
inline simt::TensorView<int, 1> claims(Forward& args) {
    return simt::packed_view<int, 1>("claims", args.workspace.zeroed<int>("claims", 2), {2});
}
/// Each tile is claimed, and each block says when it is through; the last one clears both numbers.
inline auto claims_moved(const TileOrder& order, const Device& device) {
    const long long adds = order.count() + grid_of(order, device), size = sizeof(int);
    return TensorTraffic{"claims", adds * size, (adds + 2) * size};
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
