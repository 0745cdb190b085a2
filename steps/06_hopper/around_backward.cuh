// What surrounds the backward kernel: LSE, D and zeros for the sums of dQ before it, the conversion of dQ after it. 06g needs the first two
// alone.
#pragma once

#include "attention/row_sum.hpp"
#include "ptx/mma.hpp"
#include "simt/simt.hpp"
#include "simt/vector.hpp"

namespace step06 {

using simt::TensorView;

inline constexpr int kRowThreads = 256;

/// Query rows of a block of prepare() and of finish(): D / 8 lanes have a row.
template <int D>
inline constexpr int kRowsOfBlock = kRowThreads / (D / 8);

/// For each block of Br queries LSE in units of log 2, then D. Within 16 rows they lie as a lane of a warpgroup reads them, four at
/// once: 0 1 8 9, 2 3 10 11, ... Rows from Nq on, up to a whole block, get LSE = +infinity and D = 0, so that their P is 0; and so do
/// rows that see nothing.
/// @tparam kSums dQ is summed in dQ_acc
template <class T, class Shape, bool kOrdered, bool kSums>
__global__ __launch_bounds__(kRowThreads) void prepare(TensorView<const T, 4> O,                // (B, Hq, Nq, D)
                                                       TensorView<const T, 4> dO,               // (B, Hq, Nq, D)
                                                       TensorView<const float, 3> LSE,          // (B, Hq, Nq)
                                                       TensorView<float, 4> LSE_D,              // (B, Hq, ceil(Nq / Br), 2 Br)
                                                       TensorView<float, 4> dQ_acc,             // kSums: (B, Hq, ceil(Nq / Br), Br D)
                                                       TensorView<std::uint32_t, 4> dQ_turn) {  // kOrdered: (B, Hq, ceil(Nq / Br), 4)
    constexpr int D = Shape::D, Br = Shape::Br, kLanes = D / 8;
    const int i = blockIdx.x * kRowsOfBlock<D> + threadIdx.x / kLanes, c = threadIdx.x % kLanes * 8, h = blockIdx.y, b = blockIdx.z;
    const float sum = workbook::row_sum<D>(O(b, h), dO(b, h), i, c);
    const int n = i / Br, r = i % Br;
    if (n >= LSE_D.extent(2)) return;
    if constexpr (kSums)
        for (const int e : {c / 2, c / 2 + D / 2}) simt::store_global_16(&dQ_acc(b, h, n, r * D + e), uint4{});
    if (c != 0) return;
    if (kOrdered && r < 4) dQ_turn(b, h, n, r) = 0;
    const float lse = i < O.extent(2) ? static_cast<float>(LSE(b, h, i)) : -INFINITY;
    const int place = r / 16 * 16 + r % 8 / 2 * 4 + r % 16 / 8 * 2 + r % 2;
    LSE_D(b, h, n, place) = lse == -INFINITY ? INFINITY : 1.4426950408889634f * lse;
    LSE_D(b, h, n, Br + place) = sum;
}

/// dQ = scale * dQ_acc, from the order in which the kernel adds to that of rows. A thread has 16 columns of two rows.
template <class T, class Shape>
__global__ __launch_bounds__(kRowThreads) void finish(TensorView<const float, 4> dQ_acc,  // (B, Hq, ceil(Nq / Br), Br D)
                                                      TensorView<T, 4> dQ,                // (B, Hq, Nq, D)
                                                      float scale) {
    constexpr int D = Shape::D, Br = Shape::Br, kAcross = D / 16;  // threads side by side
    const int t = threadIdx.x % 4, c = threadIdx.x / 4 % kAcross, h = blockIdx.y, b = blockIdx.z;
    const int i = blockIdx.x * (2 * kRowThreads / kAcross) + threadIdx.x / (4 * kAcross) * 8 + 2 * t;
    if (i >= dQ.extent(2)) return;
    std::uint32_t rows[2][8];  // of 16 columns each
    float4 x[8];               // rows i, i + 1 of a column, and of that eight further
#pragma unroll
    for (int g = 0; g < 8; ++g)
        x[g] = simt::load_global_16<float4>(&dQ_acc(b, h, i / Br, (c * (Br / 8) + i % Br / 8) * 128 + 16 * g + 4 * t));
#pragma unroll
    for (int g = 0; g < 8; g += 2) {
        rows[0][g / 2] = ptx::pack<T>(scale * x[g].x, scale * x[g + 1].x);
        rows[1][g / 2] = ptx::pack<T>(scale * x[g].y, scale * x[g + 1].y);
        rows[0][4 + g / 2] = ptx::pack<T>(scale * x[g].z, scale * x[g + 1].z);
        rows[1][4 + g / 2] = ptx::pack<T>(scale * x[g].w, scale * x[g + 1].w);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (i + r >= dQ.extent(2)) return;
        const std::uint32_t(&y)[8] = rows[r];
        simt::store_global_16(&dQ(b, h, i + r, 16 * c), uint4{y[0], y[1], y[2], y[3]});
        simt::store_global_16(&dQ(b, h, i + r, 16 * c + 8), uint4{y[4], y[5], y[6], y[7]});
    }
}

}  // namespace step06
