// What surrounds the tensor-core kernel: D, LSE and zeros for the sums of dQ before it, the conversion of dQ after it. D / 8 lanes have a
// row, 16 bytes of each 16-bit tensor a lane.
#pragma once

#include "05_recompute_backward/tensor_core.cuh"
#include "attention/row_sum.hpp"

namespace step05 {

inline constexpr int kRowThreads = 256;

/// Rows of a block of kRowThreads.
template <int D>
inline constexpr int kRowsOfBlock = kRowThreads / (D / 8);

/// A thread's part of row i, from column c on. Rows from Nq on, up to a whole block of queries, get LSE = +infinity and D = 0, so that
/// their P is 0; and so do rows that see nothing. All lanes of a warp must call.
template <class T, class Shape>
SIMT_DEVICE void prepare_row(TensorView<const T, 4> O,        // (B, Hq, Nq, D)
                             TensorView<const T, 4> dO,       // (B, Hq, Nq, D)
                             TensorView<const float, 3> LSE,  // (B, Hq, Nq)
                             TensorView<float, 3> LSE2,       // (B, Hq, Nq up to whole blocks): in units of log 2
                             TensorView<float, 3> D3,         // as LSE2: D = rowsum(dO o O)
                             TensorView<float, 4> dQ_acc,     // (B, Hq, ceil(Nq / Br), Br D)
                             int i, int c, int h, int b) {
    constexpr int D = Shape::D, Br = Shape::Br;
    const float sum = workbook::row_sum<D>(O(b, h), dO(b, h), i, c);
    if (i >= LSE2.extent(2)) return;
    for (const int e : {c / 2, c / 2 + D / 2}) simt::store_global_16(&dQ_acc(b, h, i / Br, i % Br * D + e), uint4{});
    if (c != 0) return;
    const float lse = i < O.extent(2) ? static_cast<float>(LSE(b, h, i)) : -INFINITY;
    LSE2(b, h, i) = lse == -INFINITY ? INFINITY : 1.4426950408889634f * lse;
    D3(b, h, i) = sum;
}

template <class T, class Shape>
__global__ __launch_bounds__(kRowThreads) void prepare(TensorView<const T, 4> O, TensorView<const T, 4> dO, TensorView<const float, 3> LSE,
                                                       TensorView<float, 3> LSE2, TensorView<float, 3> D3, TensorView<float, 4> dQ_acc) {
    constexpr int D = Shape::D, kLanes = D / 8;
    const int i = blockIdx.x * kRowsOfBlock<D> + threadIdx.x / kLanes, c = threadIdx.x % kLanes * 8, h = blockIdx.y, b = blockIdx.z;
    prepare_row<T, Shape>(O, dO, LSE, LSE2, D3, dQ_acc, i, c, h, b);
}

/// dQ = scale * dQ_acc of a thread's part of row i, from column c on: from the order in which the kernel adds to that of rows. A thread has
/// 16 columns of a row: they lie side by side, as columns 0 1 8 9, 2 3 10 11, ...
template <class T, class Shape>
SIMT_DEVICE void finish_row(TensorView<const float, 4> dQ_acc,  // (B, Hq, ceil(Nq / Br), Br D)
                            TensorView<T, 4> dQ,                // (B, Hq, Nq, D)
                            int i, int c, int h, int b, float scale) {
    constexpr int D = Shape::D, Br = Shape::Br, kAcross = D / Shape::kColumnsDq;
    if (i >= dQ.extent(2)) return;
    const int r = i % Br, warp = r / 32 * kAcross + c / Shape::kColumnsDq;
    const int place = ((warp * 4 + r % 32 / 8) * (Shape::kColumnsDq / 16) + c % Shape::kColumnsDq / 16) * 128 + r % 8 * 16;
    std::uint32_t left[4], right[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const float4 x = simt::load_global_16<float4>(&dQ_acc(b, h, i / Br, place + 4 * t));
        left[t] = ptx::pack<T>(scale * x.x, scale * x.y);
        right[t] = ptx::pack<T>(scale * x.z, scale * x.w);
    }
    simt::store_global_16(&dQ(b, h, i, c), uint4{left[0], left[1], left[2], left[3]});
    simt::store_global_16(&dQ(b, h, i, c + 8), uint4{right[0], right[1], right[2], right[3]});
}

template <class T, class Shape>
__global__ __launch_bounds__(kRowThreads) void finish(TensorView<const float, 4> dQ_acc, TensorView<T, 4> dQ, float scale) {
    constexpr int D = Shape::D, kLanes = D / 16;
    const int i = blockIdx.x * (2 * kRowsOfBlock<D>)+threadIdx.x / kLanes, c = threadIdx.x % kLanes * 16, h = blockIdx.y, b = blockIdx.z;
    finish_row<T, Shape>(dQ_acc, dQ, i, c, h, b, scale);
}

}  // namespace step05
