// O and LSE of the tiles whose keys were divided, from what the parts left. Each part is attention over some of the keys: its O is a mean
// with weights that add up to exp(LSE), and so the mean of the means with these weights is O over all keys.
#pragma once

#include "06_hopper/tile_order.hpp"
#include "ptx/ex2.hpp"
#include "ptx/griddepcontrol.hpp"
#include "ptx/mma.hpp"
#include "simt/simt.hpp"
#include "simt/vector.hpp"

namespace step06 {

using simt::TensorView;

template <int D>
struct Merging {
    static constexpr int kThreads = 256, kColumns = 4;  // of a thread
    static constexpr int kRows = kThreads / (D / kColumns);
};

/// gridDim.x divided tiles, gridDim.y blocks of rows.
template <class T, int D>
__global__ __launch_bounds__(Merging<D>::kThreads) void merge_tail(TensorView<const float, 3> O_part,    // (pieces, Br, D)
                                                                   TensorView<const float, 2> LSE_part,  // (pieces, Br)
                                                                   TensorView<T, 4> O,                   // (B, Hq, Nq, D)
                                                                   TensorView<float, 3> LSE,             // (B, Hq, Nq)
                                                                   TileOrder order) {
    constexpr int kColumns = Merging<D>::kColumns, kRows = Merging<D>::kRows;
    const int Br = O_part.extent(1), parts = order.parts, first = static_cast<int>(blockIdx.x) * parts;
    const auto [tile, h, b, part, piece] = order.at(order.split + first);
    const int r = static_cast<int>(blockIdx.y) * kRows + static_cast<int>(threadIdx.x) / (D / kColumns);
    const int c = static_cast<int>(threadIdx.x) % (D / kColumns) * kColumns, i = tile * Br + r;
    if (r >= Br || i >= O.extent(2)) return;
    ptx::griddepcontrol_wait();  // for the parts
    constexpr float kLog2e = 1.4426950408889634f;
    float most = -INFINITY;
    for (int p = 0; p < parts; ++p) most = fmaxf(most, LSE_part(first + p, r));
    const float reference = most == -INFINITY ? 0.0f : most;
    float sum = 0.0f, o[kColumns] = {};
    for (int p = 0; p < parts; ++p) {
        const float weight = ptx::ex2_approx_ftz(kLog2e * (LSE_part(first + p, r) - reference));
        const float4 own = simt::load_global_16<float4>(&O_part(first + p, r, c));
        sum += weight;
        o[0] += weight * own.x, o[1] += weight * own.y, o[2] += weight * own.z, o[3] += weight * own.w;
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    simt::store_global_8(&O(b, h, i, c), uint2{ptx::pack<T>(o[0] * inverse, o[1] * inverse), ptx::pack<T>(o[2] * inverse, o[3] * inverse)});
    if (c == 0) LSE(b, h, i) = sum == 0.0f ? -INFINITY : most + logf(sum);
}

}  // namespace step06
