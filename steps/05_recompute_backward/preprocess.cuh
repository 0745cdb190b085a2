// D = rowsum(dO o O), one number a row, and what surrounds the sum of dQ by atomics: zeros before it, the conversion after it. A warp has
// a row of 32 * kElements elements.
#pragma once

#include "05_recompute_backward/rows.cuh"

namespace step05 {

inline constexpr int kWarps = kThreads / 32;  // rows of a block

template <class T, int kElements>
__global__ __launch_bounds__(kThreads) void row_sums(TensorView<const T, 4> O,   // (B, Hq, Nq, d)
                                                     TensorView<const T, 4> dO,  // (B, Hq, Nq, d)
                                                     TensorView<float, 3> D) {   // (B, Hq, Nq)
    const int i = blockIdx.x * kWarps + threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    if (i >= O.extent(2)) return;  // a whole warp
    // exercise 05.2 begin
    float o[kElements], g[kElements];
    load_row<32>(o, O(b, h), i);
    load_row<32>(g, dO(b, h), i);
    const float sum = dot<32>(o, g);
    if (threadIdx.x % 32 == 0) D(b, h, i) = sum;
    // exercise 05.2 end
}

template <int kElements>
__global__ __launch_bounds__(kThreads) void zero(TensorView<float, 4> dQ_acc) {  // (B, Hq, Nq, d)
    const int i = blockIdx.x * kWarps + threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    if (i >= dQ_acc.extent(2)) return;
    const float zeros[kElements] = {};
    store_row<32>(dQ_acc(b, h), i, zeros, 1.0f);
}

template <class T, int kElements>
__global__ __launch_bounds__(kThreads) void convert(TensorView<const float, 4> dQ_acc,  // (B, Hq, Nq, d)
                                                    TensorView<T, 4> dQ,                // (B, Hq, Nq, d)
                                                    float scale) {
    const int i = blockIdx.x * kWarps + threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    if (i >= dQ.extent(2)) return;
    float sum[kElements];
    load_row<32>(sum, dQ_acc(b, h), i);
    store_row<32>(dQ(b, h), i, sum, scale);
}

}  // namespace step05
