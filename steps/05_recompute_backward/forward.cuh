// The forward pass that the backward passes follow: O and LSE, nothing of size N^2. It is the online softmax of stage 02, short rather
// than fast: any forward pass would do.
#pragma once

#include "05_recompute_backward/rows.cuh"
#include "attention/mask.hpp"

namespace step05 {

using workbook::Mask;

template <class T, int kLanes>
__global__ __launch_bounds__(kThreads) void forward(TensorView<const T, 4> Q,  // (B, Hq, Nq, d)
                                                    TensorView<const T, 4> K,  // (B, Hkv, Nkv, d)
                                                    TensorView<const T, 4> V,  // (B, Hkv, Nkv, d)
                                                    TensorView<T, 4> O,        // (B, Hq, Nq, d)
                                                    TensorView<float, 3> LSE,  // (B, Hq, Nq)
                                                    float scale, Mask mask) {
    const int i = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes, h = blockIdx.y, b = blockIdx.z;
    const int Nkv = K.extent(2), hkv = h / (Q.extent(1) / K.extent(1));
    const bool live = i < Q.extent(2);  // teams past the last row stay for the shuffles of their warp
    const auto Kh = K(b, hkv), Vh = V(b, hkv);

    float q[kPerLane], k[kPerLane], v[kPerLane], o[kPerLane] = {};
    float m = -INFINITY, l = 0.0f;
    load_row<kLanes>(q, Q(b, h), i, live);
    for (int j = 0; j < Nkv; ++j) {
        load_row<kLanes>(k, Kh, j, live);
        load_row<kLanes>(v, Vh, j, live);
        const float product = dot<kLanes>(q, k);
        if (mask.hides(i, j)) continue;  // for this row and all keys that follow
        const float s = scale * product, m_new = fmaxf(m, s), alpha = __expf(m - m_new), p = __expf(s - m_new);
        m = m_new;
        l = alpha * l + p;
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) o[e] = alpha * o[e] + p * v[e];
    }
    if (!live) return;
    store_row<kLanes>(O(b, h), i, o, l > 0.0f ? 1.0f / l : 0.0f);
    if (threadIdx.x % kLanes == 0) LSE(b, h, i) = m + logf(l);  // a row that saw nothing: -inf + log 0 = -inf
}

}  // namespace step05
