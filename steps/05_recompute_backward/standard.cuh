// Standard backward: P comes from the forward pass, dP and dS go to global memory, each product is a kernel of its own.
//
//     dV = P^T dO,    dP = dO V^T,    dS = P o (dP - D),    dQ = scale * dS K,    dK = scale * dS^T Q
#pragma once

#include "05_recompute_backward/rows.cuh"
#include "attention/mask.hpp"

namespace step05 {

using workbook::Mask;

// The products of row i of A with all rows of B, one after the other: store(j, product) is called by one lane of the team for each j,
// by neighbouring lanes for neighbouring j.
template <int kLanes, class T, class Store>
SIMT_DEVICE void row_products(const TensorView<const T, 2>& A, const TensorView<const T, 2>& B, int i, bool live, Store store) {
    const int lane = threadIdx.x % kLanes, N = B.extent(0);
    float a[kPerLane], b[kPerLane];
    load_row<kLanes>(a, A, i, live);
    for (int j0 = 0; j0 < N; j0 += kLanes) {
        float mine = 0.0f;  // lane t keeps the product of row j0 + t
        for (int t = 0; t < min(kLanes, N - j0); ++t) {
            load_row<kLanes>(b, B, j0 + t, live);
            const float product = dot<kLanes>(a, b);
            if (lane == t) mine = product;
        }
        if (live && j0 + lane < N) store(j0 + lane, mine);
    }
}

// What a framework's forward pass keeps. There the kernel of the softmax writes P anyway; here a kernel of its own computes it from LSE,
// so that all variants share one forward pass.
template <class T, int kLanes>
__global__ __launch_bounds__(kThreads) void keep_P(TensorView<const T, 4> Q,        // (B, Hq, Nq, d)
                                                   TensorView<const T, 4> K,        // (B, Hkv, Nkv, d)
                                                   TensorView<const float, 3> LSE,  // (B, Hq, Nq)
                                                   TensorView<T, 4> P,              // (B, Hq, Nq, Nkv)
                                                   float scale, Mask mask) {
    const int i = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes, h = blockIdx.y, b = blockIdx.z;
    const int hkv = h / (Q.extent(1) / K.extent(1));
    const bool live = i < Q.extent(2);  // teams past the last row stay for the shuffles of their warp; so below
    const float lse = live ? LSE(b, h, i) : 0.0f;
    row_products<kLanes>(Q(b, h), K(b, hkv), i, live, [&](int j, float product) {
        P(b, h, i, j) = from_float<T>(mask.hides(i, j) ? 0.0f : __expf(scale * product - lse));
    });
}

// dP = dO V^T
template <class T, int kLanes>
__global__ __launch_bounds__(kThreads) void grad_P(TensorView<const T, 4> dO,  // (B, Hq, Nq, d)
                                                   TensorView<const T, 4> V,   // (B, Hkv, Nkv, d)
                                                   TensorView<T, 4> dP) {      // (B, Hq, Nq, Nkv)
    const int i = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes, h = blockIdx.y, b = blockIdx.z;
    const int hkv = h / (dO.extent(1) / V.extent(1));
    row_products<kLanes>(dO(b, h), V(b, hkv), i, i < dO.extent(2), [&](int j, float product) { dP(b, h, i, j) = from_float<T>(product); });
}

// dS = P o (dP - D), the gradient of the softmax. A warp has a row.
template <class T>
__global__ __launch_bounds__(kThreads) void grad_S(TensorView<const T, 4> P,      // (B, Hq, Nq, Nkv)
                                                   TensorView<const T, 4> dP,     // (B, Hq, Nq, Nkv)
                                                   TensorView<const float, 3> D,  // (B, Hq, Nq)
                                                   TensorView<T, 4> dS) {         // (B, Hq, Nq, Nkv)
    const int i = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    if (i >= P.extent(2)) return;
    const float d = D(b, h, i);
    for (int j = threadIdx.x % 32; j < P.extent(3); j += 32) {
        const float p = to_float(P(b, h, i, j)), dp = to_float(dP(b, h, i, j));
        dS(b, h, i, j) = from_float<T>(p * (dp - d));
    }
}

// dQ = scale * dS K
template <class T, int kLanes>
__global__ __launch_bounds__(kThreads) void grad_Q(TensorView<const T, 4> dS,  // (B, Hq, Nq, Nkv)
                                                   TensorView<const T, 4> K,   // (B, Hkv, Nkv, d)
                                                   TensorView<T, 4> dQ,        // (B, Hq, Nq, d)
                                                   float scale) {
    const int lane = threadIdx.x % kLanes;
    const int i = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes, h = blockIdx.y, b = blockIdx.z;
    const int Nkv = K.extent(2), hkv = h / (dQ.extent(1) / K.extent(1));
    const bool live = i < dQ.extent(2);
    const auto Kh = K(b, hkv);
    float k[kPerLane], dq[kPerLane] = {};
    for (int j0 = 0; j0 < Nkv; j0 += kLanes) {
        const float mine = live && j0 + lane < Nkv ? to_float(dS(b, h, i, j0 + lane)) : 0.0f;  // lane t holds dS of key j0 + t
        for (int t = 0; t < min(kLanes, Nkv - j0); ++t) {
            load_row<kLanes>(k, Kh, j0 + t, live);
            const float weight = __shfl_sync(simt::kFullMask, mine, t, kLanes);
#pragma unroll
            for (int e = 0; e < kPerLane; ++e) dq[e] += weight * k[e];
        }
    }
    if (live) store_row<kLanes>(dQ(b, h), i, dq, scale);
}

inline constexpr int kBlockRows = 32;  // rows of W in shared memory at a time

template <int kLanes>
inline constexpr int kBlockKeys = kThreads / kLanes;

template <int kLanes>
inline constexpr int kColumnFloats = kBlockRows*(kBlockKeys<kLanes> + 1);

// Y = factor * W^T X, summed over the query heads that share a key/value head: dV with W = P and X = dO, dK with W = dS and X = Q. A team
// owns a row of Y, that is a column of W. Columns pass through shared memory, so that W is read along its rows.
template <class T, int kLanes>
__global__ __launch_bounds__(kThreads) void grad_KV(TensorView<const T, 4> W,  // (B, Hq, Nq, Nkv)
                                                    TensorView<const T, 4> X,  // (B, Hq, Nq, d)
                                                    TensorView<T, 4> Y,        // (B, Hkv, Nkv, d)
                                                    float factor) {
    constexpr int kKeys = kBlockKeys<kLanes>;
    const int j0 = blockIdx.x * kKeys, key = threadIdx.x / kLanes, hkv = blockIdx.y, b = blockIdx.z;
    const int Nq = X.extent(2), Nkv = Y.extent(2), group = X.extent(1) / Y.extent(1);
    const bool live = j0 + key < Nkv;

    simt::SharedArena smem;
    const auto Ws = smem.tile<float>("W", kBlockRows, kKeys, kKeys + 1);
    float x[kPerLane], y[kPerLane] = {};
    for (int h = hkv * group; h < (hkv + 1) * group; ++h) {
        const auto Wh = W(b, h), Xh = X(b, h);
        for (int i0 = 0; i0 < Nq; i0 += kBlockRows) {
            for (int e = threadIdx.x; e < kBlockRows * kKeys; e += kThreads) {
                const int r = e / kKeys, c = e % kKeys;
                Ws(r, c) = i0 + r < Nq && j0 + c < Nkv ? to_float(Wh(i0 + r, j0 + c)) : 0.0f;
            }
            __syncthreads();  // the tile is whole before anyone multiplies it
            for (int r = 0; r < min(kBlockRows, Nq - i0); ++r) {
                load_row<kLanes>(x, Xh, i0 + r, live);
                const float weight = Ws(r, key);
#pragma unroll
                for (int e = 0; e < kPerLane; ++e) y[e] += weight * x[e];
            }
            __syncthreads();  // before the next tile overwrites what slower warps still read
        }
    }
    if (live) store_row<kLanes>(Y(b, hkv), j0 + key, y, factor);
}

}  // namespace step05
