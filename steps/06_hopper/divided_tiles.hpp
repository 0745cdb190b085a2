/// @file
/// The host's side of a persistent grid: the order of its tiles, who claims them, and those that are divided by their keys.
#pragma once

#include "06_hopper/host.hpp"
#include "06_hopper/merge_tail.cuh"
#include "06_hopper/tile_order.hpp"

#include <algorithm>
#include <bit>

namespace step06 {

/// Blocks of the grid: one an SM, in whole clusters.
inline int grid_of(const TileOrder& order, const Device& device, int cluster = 1) {
    return std::min(order.count(), std::max(device.sms / cluster, 1)) * cluster;
}

/// The order in which the blocks of a persistent grid, or its clusters, take tiles of Br queries. @param element bytes of one of K or V
/// @param divide whether the kernel can leave parts of a tile
inline TileOrder tile_order(const Problem& p, const Device& device, int Br, std::size_t element, bool divide) {
    const int tiles = (p.seq + Br - 1) / Br, heads = p.heads * p.batch;
    if (!p.causal) {
        TileOrder order{.tiles = tiles, .heads = p.heads, .batch = p.batch, .bundle = 1};
        if (!divide) return order;
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
/// Each tile is claimed, and each block, or cluster, says when it is through; the last one clears both numbers.
inline auto claims_moved(const TileOrder& order, const Device& device, int cluster = 1) {
    const long long adds = order.count() + grid_of(order, device, cluster) / cluster, size = sizeof(int);
    return TensorTraffic{"claims", adds * size, (adds + 2) * size};
}

/// What the parts leave in the workspace, for the kernel that writes it.
struct Parts {
    simt::TensorView<float, 3> O;    ///< (pieces, Br, d)
    simt::TensorView<float, 2> LSE;  ///< (pieces, Br)
};

inline std::size_t parts_bytes(const TileOrder& order, int Br, int d) {
    return static_cast<std::size_t>(order.pieces()) * static_cast<std::size_t>(Br) * static_cast<std::size_t>(d + 1) * sizeof(float);
}

inline Parts parts(Forward& args, const TileOrder& order, int Br) {
    const int d = args.problem.head_dim, pieces = order.pieces();
    const auto rows = static_cast<std::size_t>(pieces) * static_cast<std::size_t>(Br);
    return {simt::packed_view<float, 3>("O_part", args.workspace.get<float>("O_part", rows * static_cast<std::size_t>(d)), {pieces, Br, d}),
            simt::packed_view<float, 2>("LSE_part", args.workspace.get<float>("LSE_part", rows), {pieces, Br})};
}

/// Makes O and LSE of the parts, where there are any.
template <class T, int D>
void merge(Forward& args, const TileOrder& order, int Br) {
    const int pieces = order.pieces();
    if (pieces == 0) return;
    const auto rows = static_cast<std::size_t>(pieces) * static_cast<std::size_t>(Br);
    constexpr int kRows = Merging<D>::kRows;
    launch(merge_tail<T, D>,
           {.name = "merge_tail",
            .grid = dim3(static_cast<unsigned>(pieces / order.parts), static_cast<unsigned>((Br + kRows - 1) / kRows)),
            .block = Merging<D>::kThreads,
            .early = true,
            .exec = &args.exec},
           simt::packed_view<const float, 3>("O_part", args.workspace.get<float>("O_part", rows * D), {pieces, Br, D}),
           simt::packed_view<const float, 2>("LSE_part", args.workspace.get<float>("LSE_part", rows), {pieces, Br}), args.O<T>(),
           args.LSE(), order);
}

/// Adds what divided tiles move beside what whole ones do: each part reads its queries, and leaves O and LSE to be merged, LSE by each
/// thread, twice.
inline void add_parts(Movement& movement, const TileOrder& order, const Problem& p, int Br) {
    if (order.pieces() == 0) return;
    long long rows = 0;
    for (int n = order.split; n < order.count(); n += order.parts) rows += std::min(Br, p.seq - order.at(n).tile * Br);
    for (TensorTraffic& t : movement.requested.tensors)
        if (t.tensor == "Q") t.read += (order.parts - 1) * rows * p.head_dim * static_cast<long long>(size_of(p.dtype));
    const long long all = rows * order.parts * static_cast<long long>(sizeof(float));
    movement.requested.tensors.push_back({"O_part", all * p.head_dim, all * p.head_dim});
    movement.requested.tensors.push_back({"LSE_part", 2 * all * (p.head_dim / Merging<64>::kColumns), all});
}

}  // namespace step06
