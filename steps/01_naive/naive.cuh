// Standard attention: S = scale * Q K^T, P = softmax(S), O = P V, each a kernel of its own, S and P in global memory.
//
// In all three kernels a warp owns one query row. Lanes lie along the innermost dimension of whatever is read or written, so
// that every request of a warp is one contiguous piece of memory.
#pragma once

#include "attention/mask.hpp"
#include "simt/simt.hpp"

namespace step01 {

using simt::from_float;
using simt::TensorView;
using simt::to_float;
using workbook::Mask;

inline constexpr int kWarps = 4;  // rows of a block
inline constexpr int kThreads = 32 * kWarps;

// kPerLane * 32 >= d: elements of a row that one lane holds; lane t has elements t, t + 32, t + 64, ...
template <class T, int kPerLane>
__global__ __launch_bounds__(kThreads) void scores(TensorView<const T, 4> Q,  // (B, Hq, Nq, d)
                                                   TensorView<const T, 4> K,  // (B, Hkv, Nkv, d)
                                                   TensorView<T, 4> S,        // (B, Hq, Nq, Nkv)
                                                   float scale, Mask mask) {
    const int lane = threadIdx.x % 32;
    const int i = blockIdx.x * kWarps + threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    const int Nq = Q.extent(2), Nkv = K.extent(2), d = Q.extent(3);
    if (i >= Nq) return;  // a whole warp

    const auto has = [&](int e) { return lane + 32 * e < d; };
    const auto Kh = K(b, h / (Q.extent(1) / K.extent(1)));  // (Nkv, d)
    float q[kPerLane];
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) q[e] = has(e) ? to_float(Q(b, h, i, lane + 32 * e)) : 0.0f;

    for (int j0 = 0; j0 < Nkv; j0 += 32) {
        const int keys = min(32, Nkv - j0);
        float mine = 0.0f;  // lane t keeps the score of key j0 + t
        for (int t = 0; t < keys; ++t) {
            float k[kPerLane], dot = 0.0f;
#pragma unroll
            for (int e = 0; e < kPerLane; ++e) k[e] = has(e) ? to_float(Kh(j0 + t, lane + 32 * e)) : 0.0f;
#pragma unroll
            for (int e = 0; e < kPerLane; ++e) dot += q[e] * k[e];
            dot = simt::warp_sum(dot);
            if (lane == t) mine = dot;
        }
        const int j = j0 + lane;
        // exercise 01.1 begin
        if (j < Nkv) S(b, h, i, j) = from_float<T>(mask.hides(i, j) ? -INFINITY : scale * mine);
        // exercise 01.1 end
    }
}

// P(i, j) = exp(S(i, j) - m) / l with m = max_j S(i, j) and l = sum_j exp(S(i, j) - m): three passes over the row.
template <class T>
__global__ __launch_bounds__(kThreads) void softmax(TensorView<const T, 4> S,    // (B, Hq, Nq, Nkv)
                                                    TensorView<T, 4> P,          // (B, Hq, Nq, Nkv)
                                                    TensorView<float, 3> LSE) {  // (B, Hq, Nq)
    const int lane = threadIdx.x % 32;
    const int i = blockIdx.x * kWarps + threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    const int Nq = S.extent(2), Nkv = S.extent(3);
    if (i >= Nq) return;  // a whole warp

    // exercise 01.2 begin
    float m = -INFINITY;
    for (int j = lane; j < Nkv; j += 32) m = fmaxf(m, to_float(S(b, h, i, j)));
    m = simt::warp_max(m);
    const bool sees_nothing = m == -INFINITY;
    if (sees_nothing) m = 0.0f;  // exp(-inf - 0) = 0, where exp(-inf - -inf) would be NaN

    float l = 0.0f;
    for (int j = lane; j < Nkv; j += 32) l += __expf(to_float(S(b, h, i, j)) - m);
    l = simt::warp_sum(l);
    // exercise 01.2 end

    // exercise 01.3 begin
    const float inverse = sees_nothing ? 0.0f : 1.0f / l;
    for (int j = lane; j < Nkv; j += 32) P(b, h, i, j) = from_float<T>(__expf(to_float(S(b, h, i, j)) - m) * inverse);
    if (lane == 0) LSE(b, h, i) = sees_nothing ? -INFINITY : m + logf(l);
    // exercise 01.3 end
}

template <class T, int kPerLane>
__global__ __launch_bounds__(kThreads) void weighted_sum(TensorView<const T, 4> P,  // (B, Hq, Nq, Nkv)
                                                         TensorView<const T, 4> V,  // (B, Hkv, Nkv, d)
                                                         TensorView<T, 4> O) {      // (B, Hq, Nq, d)
    const int lane = threadIdx.x % 32;
    const int i = blockIdx.x * kWarps + threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    const int Nq = O.extent(2), Nkv = V.extent(2), d = O.extent(3);
    if (i >= Nq) return;  // a whole warp

    const auto has = [&](int e) { return lane + 32 * e < d; };
    const auto Vh = V(b, h / (O.extent(1) / V.extent(1)));  // (Nkv, d)
    float o[kPerLane] = {};
    // exercise 01.4 begin
    for (int j0 = 0; j0 < Nkv; j0 += 32) {
        const int keys = min(32, Nkv - j0);
        const float mine = lane < keys ? to_float(P(b, h, i, j0 + lane)) : 0.0f;  // lane t holds the weight of key j0 + t
        for (int t = 0; t < keys; ++t) {
            const float p = __shfl_sync(simt::kFullMask, mine, t);
            float v[kPerLane];
#pragma unroll
            for (int e = 0; e < kPerLane; ++e) v[e] = has(e) ? to_float(Vh(j0 + t, lane + 32 * e)) : 0.0f;
#pragma unroll
            for (int e = 0; e < kPerLane; ++e) o[e] += p * v[e];
        }
    }
    // exercise 01.4 end
#pragma unroll
    for (int e = 0; e < kPerLane; ++e)
        if (has(e)) O(b, h, i, lane + 32 * e) = from_float<T>(o[e]);
}

}  // namespace step01
