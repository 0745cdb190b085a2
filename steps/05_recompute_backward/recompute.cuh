// The backward pass of FlashAttention with float32 tiles: P is computed again, tile by tile, from Q, K and LSE. A thread block owns a
// block of keys of one key/value head, whose dK and dV stay in registers, and walks over the queries that see it. dQ is the sum over all
// blocks of keys: by atomics here, or by the kernel in query_pass.cuh.
#pragma once

#include "attention/fp32_tile.hpp"
#include "attention/mask.hpp"
#include "simt/simt.hpp"

namespace step05 {

using simt::from_float;
using simt::TensorView;
using workbook::load_tile;
using workbook::Mask;
using workbook::multiply;

inline constexpr int kSide = workbook::kTileSide;
inline constexpr int kTileThreads = workbook::kTileThreads;

/// Small enough that two blocks or more fit an SM of 227 KiB, and one a block's 99 KiB.
template <int D>
struct Fp32Tiles {
    static constexpr int Br = D == 128 ? 32 : 64;                                              // queries
    static constexpr int Bc = D == 128 ? 32 : 64;                                              // keys
    static constexpr int kSharedFloats = 2 * Bc * (D + 1) + 2 * Br * (D + 1) + Br * (Bc + 1);  // K, V, Q, dO, P or dS
};

// From the scores S (unscaled) and dP of one thread's elements of a tile: P = exp(scale * S - LSE) in the place of S, and
// dS = P o (dP - D) in the place of dP. What the mask hides, and what lies past the end, has P = 0.
template <int kR, int kC>
SIMT_DEVICE void softmax_backward(float (&s)[kR][kC], float (&dp)[kR][kC], const float (&lse)[kR], const float (&d)[kR], int i0, int j0,
                                  int Nq, int Nkv, float scale, const Mask& mask) {
    const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
#pragma unroll
    for (int u = 0; u < kR; ++u) {
        const int i = i0 + y + kSide * u;
#pragma unroll
        for (int v = 0; v < kC; ++v) {
            const int j = j0 + x + kSide * v;
            const float p = i >= Nq || j >= Nkv || mask.hides(i, j) ? 0.0f : __expf(scale * s[u][v] - lse[u]);
            s[u][v] = p;
            // exercise 05.1 begin
            dp[u][v] = p * (dp[u][v] - d[u]);
            // exercise 05.1 end
        }
    }
}

// The thread's rows of LSE or D; zero past the end.
template <int kR>
SIMT_DEVICE void load_statistics(float (&mine)[kR], const TensorView<const float, 1>& rows, int i0) {
#pragma unroll
    for (int u = 0; u < kR; ++u) {
        const int i = i0 + threadIdx.x / kSide + kSide * u;
        mine[u] = i < rows.extent(0) ? rows(i) : 0.0f;
    }
}

// The thread's elements into a tile of shared memory.
template <int kR, int kC>
SIMT_DEVICE void store_tile(const simt::SharedTile<float>& tile, const float (&mine)[kR][kC]) {
    const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
#pragma unroll
    for (int u = 0; u < kR; ++u)
#pragma unroll
        for (int v = 0; v < kC; ++v) tile(y + kSide * u, x + kSide * v) = mine[u][v];
}

template <class T, int D, bool kAtomics>
__global__ __launch_bounds__(kTileThreads) void recompute(TensorView<const T, 4> Q4,       // (B, Hq, Nq, D)
                                                          TensorView<const T, 4> K4,       // (B, Hkv, Nkv, D)
                                                          TensorView<const T, 4> V4,       // (B, Hkv, Nkv, D)
                                                          TensorView<const T, 4> dO4,      // (B, Hq, Nq, D)
                                                          TensorView<const float, 3> LSE,  // (B, Hq, Nq)
                                                          TensorView<const float, 3> D3,   // (B, Hq, Nq): rowsum(dO o O)
                                                          TensorView<float, 4> dQ_acc,     // (B, Hq, Nq, D), not used without kAtomics
                                                          TensorView<T, 4> dK4,            // (B, Hkv, Nkv, D)
                                                          TensorView<T, 4> dV4,            // (B, Hkv, Nkv, D)
                                                          float scale, Mask mask) {
    constexpr int Br = Fp32Tiles<D>::Br, Bc = Fp32Tiles<D>::Bc;
    const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
    const int j0 = blockIdx.x * Bc, hkv = blockIdx.y, b = blockIdx.z, group = Q4.extent(1) / K4.extent(1);
    const auto K = K4(b, hkv), V = V4(b, hkv);      // (Nkv, D)
    const auto dK = dK4(b, hkv), dV = dV4(b, hkv);  // (Nkv, D)
    const int Nq = Q4.extent(2), Nkv = K.extent(0);

    simt::SharedArena smem;
    const auto Ks = smem.tile<float>("K", Bc, D, D + 1);
    const auto Vs = smem.tile<float>("V", Bc, D, D + 1);
    const auto Qs = smem.tile<float>("Q", Br, D, D + 1);
    const auto dOs = smem.tile<float>("dO", Br, D, D + 1);
    const auto PdS = smem.tile<float>("P or dS", Br, Bc, Bc + 1);

    // Thread (y, x) has keys y, y + 16, ... of the block, for all query heads that share them.
    float dk[Bc / kSide][D / kSide] = {}, dv[Bc / kSide][D / kSide] = {};
    load_tile(Ks, K, j0, Bc);
    load_tile(Vs, V, j0, Bc);

    for (int h = hkv * group; h < (hkv + 1) * group; ++h) {
        const auto Q = Q4(b, h), dO = dO4(b, h);  // (Nq, D)
        // Blocks of queries before the first that sees key j0 see none of the block's keys.
        for (int i0 = mask.first_row(j0) / Br * Br; i0 < Nq; i0 += Br) {
            load_tile(Qs, Q, i0, Br);
            load_tile(dOs, dO, i0, Br);
            float lse[Br / kSide], d[Br / kSide];
            load_statistics(lse, LSE(b, h), i0);
            load_statistics(d, D3(b, h), i0);
            __syncthreads();  // the tiles are whole before anyone multiplies them

            float p[Br / kSide][Bc / kSide] = {}, ds[Br / kSide][Bc / kSide] = {};
            multiply(
                p, 0, 0, Br, Bc, D, [&](int r, int k) { return Qs(r, k); }, [&](int k, int c) { return Ks(c, k); });
            multiply(
                ds, 0, 0, Br, Bc, D, [&](int r, int k) { return dOs(r, k); }, [&](int k, int c) { return Vs(c, k); });
            softmax_backward(p, ds, lse, d, i0, j0, Nq, Nkv, scale, mask);

            // exercise 05.3 begin
            store_tile(PdS, p);
            __syncthreads();  // P is whole
            multiply(
                dv, 0, 0, Bc, D, Br, [&](int r, int k) { return PdS(k, r); }, [&](int k, int c) { return dOs(k, c); });
            __syncthreads();  // before dS takes the place of the P that slower warps still read
            store_tile(PdS, ds);
            __syncthreads();  // dS is whole
            multiply(
                dk, 0, 0, Bc, D, Br, [&](int r, int k) { return PdS(k, r); }, [&](int k, int c) { return Qs(k, c); });
            // exercise 05.3 end

            if constexpr (kAtomics) {
                // exercise 05.4 begin
                float dq[Br / kSide][D / kSide] = {};
                multiply(
                    dq, 0, 0, Br, D, Bc, [&](int r, int k) { return PdS(r, k); }, [&](int k, int c) { return Ks(k, c); });
                const auto sum = dQ_acc(b, h);  // (Nq, D)
#pragma unroll
                for (int u = 0; u < Br / kSide; ++u) {
                    const int i = i0 + y + kSide * u;
                    if (i >= Nq) continue;
#pragma unroll
                    for (int c = 0; c < D / kSide; ++c) atomicAdd(&sum(i, x + kSide * c), dq[u][c]);
                }
                // exercise 05.4 end
            }
            __syncthreads();  // before the next Q and dO overwrite what slower warps still read
        }
    }

#pragma unroll
    for (int u = 0; u < Bc / kSide; ++u) {
        const int j = j0 + y + kSide * u;
        if (j >= Nkv) continue;
#pragma unroll
        for (int c = 0; c < D / kSide; ++c) {
            dK(j, x + kSide * c) = from_float<T>(scale * dk[u][c]);
            dV(j, x + kSide * c) = from_float<T>(dv[u][c]);
        }
    }
}

}  // namespace step05
