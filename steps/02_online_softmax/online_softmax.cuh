// One kernel: each row streams over the keys and keeps a running maximum m, sum l and unnormalised output o. When the maximum
// grows, one factor brings all that was added before to the new scale. S and P are never stored.
#pragma once

#include "attention/mask.hpp"
#include "simt/simt.hpp"

namespace step02 {

using simt::from_float;
using simt::TensorView;
using simt::to_float;
using workbook::Mask;

inline constexpr int kThreads = 128;

// A team of kLanes lanes owns one query row; lane t holds elements t, t + kLanes, t + 2 kLanes, ... of q and o in registers.
inline constexpr int kPerLane = 16;

// kWhole: d is exactly kLanes * kPerLane, so that no element needs a bounds check.
template <class T, int kLanes, bool kWhole>
__global__ __launch_bounds__(kThreads) void online_softmax(TensorView<const T, 4> Q,  // (B, Hq, Nq, d)
                                                           TensorView<const T, 4> K,  // (B, Hkv, Nkv, d)
                                                           TensorView<const T, 4> V,  // (B, Hkv, Nkv, d)
                                                           TensorView<T, 4> O,        // (B, Hq, Nq, d)
                                                           TensorView<float, 3> LSE,  // (B, Hq, Nq)
                                                           float scale, Mask mask) {
    constexpr int kRows = kThreads / kLanes;  // of a block
    const int lane = threadIdx.x % kLanes;
    const int i = blockIdx.x * kRows + threadIdx.x / kLanes, h = blockIdx.y, b = blockIdx.z;
    const int Nq = Q.extent(2), Nkv = K.extent(2), d = Q.extent(3);
    // exercise 02.1 begin
    const int hkv = h / (Q.extent(1) / K.extent(1));
    // exercise 02.1 end
    // Teams past the last row stay for the shuffles of their warp, but touch no memory.
    const bool live = i < Nq;
    const auto has = [&](int e) { return live && (kWhole || lane + kLanes * e < d); };
    const auto Qh = Q(b, h);                    // (Nq, d)
    const auto Kh = K(b, hkv), Vh = V(b, hkv);  // (Nkv, d)
    // All loads of a row are under way before the first is used: a load under an `if` of its own would wait for the one before.
    const auto load = [&](float(&row)[kPerLane], const TensorView<const T, 2>& matrix, int r) {
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) row[e] = has(e) ? to_float(matrix(r, lane + kLanes * e)) : 0.0f;
    };

    float q[kPerLane], k[kPerLane], v[kPerLane];
    float o[kPerLane] = {};
    float m = -INFINITY, l = 0.0f;
    load(q, Qh, i);

    for (int j = 0; j < Nkv; ++j) {
        load(k, Kh, j);
        load(v, Vh, j);
        // exercise 02.2 begin
        float s = 0.0f;
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) s += q[e] * k[e];
        s = simt::warp_sum<kLanes>(s);
        s = mask.hides(i, j) ? -INFINITY : scale * s;
        // exercise 02.2 end

        // exercise 02.3 begin
        const float m_new = fmaxf(m, s);
        const float reference = m_new == -INFINITY ? 0.0f : m_new;  // nothing seen yet: exp(-inf - 0) = 0, not NaN
        const float alpha = __expf(m - reference);                  // brings the past to the new maximum
        const float p = __expf(s - reference);
        m = m_new;
        l = alpha * l + p;
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) o[e] = alpha * o[e] + p * v[e];
        // exercise 02.3 end
    }

    // exercise 02.4 begin
    const float inverse = l > 0.0f ? 1.0f / l : 0.0f;
#pragma unroll
    for (int e = 0; e < kPerLane; ++e)
        if (has(e)) O(b, h, i, lane + kLanes * e) = from_float<T>(o[e] * inverse);
    if (live && lane == 0) LSE(b, h, i) = m + logf(l);  // a row that saw nothing: -inf + log 0 = -inf
    // exercise 02.4 end
}

}  // namespace step02
