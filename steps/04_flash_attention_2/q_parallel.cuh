// FlashAttention-2's first change (Dao 2023, section 3.1): the loops of stage 03 swapped. A thread block owns a block of queries
// and streams over K and V; O, m and l never leave its registers, O is divided once at the end, LSE is written once.
#pragma once

#include "attention/fp32_tile.hpp"
#include "attention/mask.hpp"
#include "simt/simt.hpp"

namespace step04 {

using simt::from_float;
using simt::TensorView;
using workbook::load_tile;
using workbook::Mask;
using workbook::multiply;

inline constexpr int kThreads = workbook::kTileThreads;
inline constexpr int kSide = workbook::kTileSide;

/// Tiles of the float32 variants: few enough keys at a time that three blocks fit an SM of 227 KiB.
template <int D>
struct Fp32Tiles {
    static constexpr int Br = 64;
    static constexpr int Bc = D == 128 ? 32 : 64;
    static constexpr int kSharedFloats = Bc * (D + 1) + Bc * D + Br * (D + 1) + Br * (Bc + 1);  // K, V, Q, P
};

template <class T, int D>
__global__ __launch_bounds__(kThreads) void q_parallel(TensorView<const T, 4> Q4,  // (B, Hq, Nq, D)
                                                       TensorView<const T, 4> K4,  // (B, Hkv, Nkv, D)
                                                       TensorView<const T, 4> V4,  // (B, Hkv, Nkv, D)
                                                       TensorView<T, 4> O4,        // (B, Hq, Nq, D)
                                                       TensorView<float, 3> LSE3,  // (B, Hq, Nq)
                                                       float scale, Mask mask) {
    constexpr int Br = Fp32Tiles<D>::Br, Bc = Fp32Tiles<D>::Bc;
    const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
    const int i0 = blockIdx.x * Br, h = blockIdx.y, b = blockIdx.z, hkv = h / (Q4.extent(1) / K4.extent(1));
    const auto Q = Q4(b, h);                    // (Nq, D)
    const auto K = K4(b, hkv), V = V4(b, hkv);  // (Nkv, D)
    const auto O = O4(b, h);                    // (Nq, D)
    const auto LSE = LSE3(b, h);                // (Nq)
    const int Nq = Q.extent(0), Nkv = K.extent(0);

    simt::SharedArena smem;
    const auto Ks = smem.tile<float>("K", Bc, D, D + 1);
    const auto Vs = smem.tile<float>("V", Bc, D, D);
    const auto Qs = smem.tile<float>("Q", Br, D, D + 1);
    const auto Ps = smem.tile<float>("P", Br, Bc, Bc + 1);

    // Thread (y, x) has rows y, y + 16, y + 32, y + 48 of the block; the 16 lanes of one y share them.
    float o[Br / kSide][D / kSide] = {};
    float m[Br / kSide], l[Br / kSide];
#pragma unroll
    for (int u = 0; u < Br / kSide; ++u) m[u] = -INFINITY, l[u] = 0.0f;
    load_tile(Qs, Q, i0, Br);

    for (int j0 = 0; j0 < Nkv; j0 += Bc) {
        load_tile(Ks, K, j0, Bc);
        load_tile(Vs, V, j0, Bc);
        __syncthreads();  // the tiles are whole before anyone multiplies them

        float s[Br / kSide][Bc / kSide] = {};
        multiply(
            s, 0, 0, Br, Bc, D, [&](int r, int k) { return Qs(r, k); }, [&](int k, int c) { return Ks(c, k); });

#pragma unroll
        for (int u = 0; u < Br / kSide; ++u) {
            const int r = y + kSide * u;
            float m_new = m[u];
#pragma unroll
            for (int v = 0; v < Bc / kSide; ++v) {
                const int j = j0 + x + kSide * v;
                s[u][v] = j >= Nkv || mask.hides(i0 + r, j) ? -INFINITY : scale * s[u][v];
                m_new = fmaxf(m_new, s[u][v]);
            }
            m_new = simt::warp_max<kSide>(m_new);
            const float reference = m_new == -INFINITY ? 0.0f : m_new;  // nothing seen yet
            const float alpha = __expf(m[u] - reference);
            float sum = 0.0f;
#pragma unroll
            for (int v = 0; v < Bc / kSide; ++v) {
                const float p = __expf(s[u][v] - reference);
                Ps(r, x + kSide * v) = p;
                sum += p;
            }
            m[u] = m_new;
            l[u] = alpha * l[u] + simt::warp_sum<kSide>(sum);
#pragma unroll
            for (int c = 0; c < D / kSide; ++c) o[u][c] *= alpha;
        }
        __syncwarp();  // a row of P is written and read by the same 16 lanes

        multiply(
            o, 0, 0, Br, D, Bc, [&](int r, int k) { return Ps(r, k); }, [&](int k, int c) { return Vs(k, c); });
        __syncthreads();  // before the next K and V overwrite what slower warps still read
    }

#pragma unroll
    for (int u = 0; u < Br / kSide; ++u) {
        const int i = i0 + y + kSide * u;
        if (i >= Nq) continue;
        const float inverse = l[u] > 0.0f ? 1.0f / l[u] : 0.0f;
#pragma unroll
        for (int c = 0; c < D / kSide; ++c) O(i, x + kSide * c) = from_float<T>(o[u][c] * inverse);
        if (x == 0) LSE(i) = m[u] + logf(l[u]);
    }
}

}  // namespace step04
