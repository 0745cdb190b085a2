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

/// A thread's part of row i of a head, from column c on. Rows from Nq on, up to a whole block of queries, get LSE = +infinity and D = 0, so
/// that their P is 0; and so do rows that see nothing. All threads of a warp must call.
template <class T, class Shape>
SIMT_DEVICE void prepare_row(TensorView<const T, 2> O,        // (Nq, D)
                             TensorView<const T, 2> dO,       // (Nq, D)
                             TensorView<const float, 1> LSE,  // (Nq)
                             TensorView<float, 1> LSE2,       // (Nq up to whole blocks): in units of log 2
                             TensorView<float, 1> D1,         // as LSE2: D = rowsum(dO o O)
                             TensorView<float, 2> dQ_acc,     // (ceil(Nq / Br), Br D)
                             int i, int c) {
    constexpr int D = Shape::D, Br = Shape::Br;
    const float sum = workbook::row_sum<D>(O, dO, i, c);
    if (i >= LSE2.extent(0)) return;
    for (const int e : {c / 2, c / 2 + D / 2}) simt::store_global_16(&dQ_acc(i / Br, i % Br * D + e), uint4{});
    if (c != 0) return;
    const float lse = i < O.extent(0) ? static_cast<float>(LSE(i)) : -INFINITY;
    LSE2(i) = lse == -INFINITY ? INFINITY : 1.4426950408889634f * lse;
    D1(i) = sum;
}

template <class T, class Shape>
__global__ __launch_bounds__(kRowThreads) void prepare(TensorView<const T, 4> O,        // (B, Hq, Nq, D)
                                                       TensorView<const T, 4> dO,       // (B, Hq, Nq, D)
                                                       TensorView<const float, 3> LSE,  // (B, Hq, Nq)
                                                       TensorView<float, 3> LSE2,       // (B, Hq, Nq up to whole blocks)
                                                       TensorView<float, 3> D3,         // as LSE2
                                                       TensorView<float, 4> dQ_acc) {   // (B, Hq, ceil(Nq / Br), Br D)
    constexpr int D = Shape::D, kLanes = D / 8;
    const int i = blockIdx.x * kRowsOfBlock<D> + threadIdx.x / kLanes, c = threadIdx.x % kLanes * 8, h = blockIdx.y, b = blockIdx.z;
    prepare_row<T, Shape>(O(b, h), dO(b, h), LSE(b, h), LSE2(b, h), D3(b, h), dQ_acc(b, h), i, c);
}

/// dQ = scale * dQ_acc of a thread's part of row i of a head, from column c on: from the order in which the kernel adds to that of rows. A
/// thread has 16 columns: they lie side by side, as columns 0 1 8 9, 2 3 10 11, ...
template <class T, class Shape>
SIMT_DEVICE void finish_row(TensorView<const float, 2> dQ_acc,  // (ceil(Nq / Br), Br D)
                            TensorView<T, 2> dQ,                // (Nq, D)
                            int i, int c, float scale) {
    constexpr int D = Shape::D, Br = Shape::Br, kAcross = D / Shape::kColumnsDq;
    if (i >= dQ.extent(0)) return;
    const int r = i % Br, warp = r / 32 * kAcross + c / Shape::kColumnsDq;
    const int place = ((warp * 4 + r % 32 / 8) * (Shape::kColumnsDq / 16) + c % Shape::kColumnsDq / 16) * 128 + r % 8 * 16;
    std::uint32_t left[4], right[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const float4 x = simt::load_global_16<float4>(&dQ_acc(i / Br, place + 4 * t));
        left[t] = ptx::pack<T>(scale * x.x, scale * x.y);
        right[t] = ptx::pack<T>(scale * x.z, scale * x.w);
    }
    simt::store_global_16(&dQ(i, c), uint4{left[0], left[1], left[2], left[3]});
    simt::store_global_16(&dQ(i, c + 8), uint4{right[0], right[1], right[2], right[3]});
}

template <class T, class Shape>
__global__ __launch_bounds__(kRowThreads) void finish(TensorView<const float, 4> dQ_acc,  // (B, Hq, ceil(Nq / Br), Br D)
                                                      TensorView<T, 4> dQ,                // (B, Hq, Nq, D)
                                                      float scale) {
    constexpr int kLanes = Shape::D / 16;
    const int i = blockIdx.x * (2 * kRowsOfBlock<Shape::D>)+threadIdx.x / kLanes, c = threadIdx.x % kLanes * 16;
    finish_row<T, Shape>(dQ_acc(blockIdx.z, blockIdx.y), dQ(blockIdx.z, blockIdx.y), i, c, scale);
}

}  // namespace step05
