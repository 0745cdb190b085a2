/// @file
/// The host's side of tiles that are divided by their keys.
#pragma once

#include "06_hopper/host.hpp"
#include "06_hopper/merge_tail.cuh"

namespace step06 {

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
