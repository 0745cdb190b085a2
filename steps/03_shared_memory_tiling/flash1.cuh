// FlashAttention-1 as its Algorithm 1 has it (Dao et al. 2022): K/V blocks in the outer loop, Q blocks inside, one thread block
// for each (batch, head). Tiles are multiplied from shared memory; O, l and m live in global memory and are rewritten on each
// pass of the outer loop.
#pragma once

#include "attention/fp32_tile.hpp"
#include "attention/mask.hpp"
#include "simt/simt.hpp"

namespace step03 {

using simt::from_float;
using simt::TensorView;
using simt::to_float;
using workbook::load_tile;
using workbook::Mask;
using workbook::multiply;

inline constexpr int kThreads = workbook::kTileThreads;  // 16 x 16 for the products, 8 warps for the softmax
inline constexpr int kSide = workbook::kTileSide;

/// Floats of shared memory for tiles of Br query rows and Bc keys: K, V, Q, S and two numbers a row. Rows of K, Q and S are
/// one element longer than they need be: 16 threads that read one column of 16 rows of K then find them in 16 different banks,
/// and the two rows of Q or S that a warp reads in two.
constexpr long long shared_floats(int Br, int Bc, int d) {
    return 1LL * Bc * (d + 1) + 1LL * Bc * d + 1LL * Br * (d + 1) + 1LL * Br * (Bc + 1) + 2LL * Br;
}

template <class T, int D>
__global__ __launch_bounds__(kThreads) void flash1(TensorView<const T, 4> Q4,    // (B, Hq, Nq, D)
                                                   TensorView<const T, 4> K4,    // (B, Hkv, Nkv, D)
                                                   TensorView<const T, 4> V4,    // (B, Hkv, Nkv, D)
                                                   TensorView<float, 4> O_acc4,  // (B, Hq, Nq, D): O between passes
                                                   TensorView<float, 3> l3,      // (B, Hq, Nq)
                                                   TensorView<float, 3> m3,      // (B, Hq, Nq)
                                                   TensorView<T, 4> O4,          // (B, Hq, Nq, D)
                                                   TensorView<float, 3> LSE3,    // (B, Hq, Nq)
                                                   int Br, int Bc, float scale, Mask mask) {
    constexpr int kR = D >= 64 ? 4 : 2;  // rows of a thread's register block: 16 kR of them make a piece of the tile, and Br <= D
    constexpr int kC = D >= 64 ? 4 : 2;  // columns of it in P V, where a row has D of them
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, y = threadIdx.x / kSide, x = threadIdx.x % kSide;
    const int h = blockIdx.x, b = blockIdx.y, hkv = h / (Q4.extent(1) / K4.extent(1));
    const auto Q = Q4(b, h);                                  // (Nq, D)
    const auto K = K4(b, hkv), V = V4(b, hkv);                // (Nkv, D)
    const auto O_acc = O_acc4(b, h);                          // (Nq, D)
    const auto O = O4(b, h);                                  // (Nq, D)
    const auto l = l3(b, h), m = m3(b, h), LSE = LSE3(b, h);  // (Nq)
    const int Nq = Q.extent(0), Nkv = K.extent(0);

    simt::SharedArena smem;
    const auto Ks = smem.tile<float>("K", Bc, D, D + 1);
    const auto Vs = smem.tile<float>("V", Bc, D, D);
    const auto Qs = smem.tile<float>("Q", Br, D, D + 1);
    const auto Ss = smem.tile<float>("S", Br, Bc, Bc + 1);
    const auto keep = smem.vector<float>("keep", Br);  // what remains of the old O: l e^(m - m_new) / l_new
    const auto add = smem.vector<float>("add", Br);    // weight of this block's P V: e^(m~ - m_new) / l_new

    for (int j0 = 0; j0 < Nkv; j0 += Bc) {
        const bool first = j0 == 0, last = j0 + Bc >= Nkv;
        load_tile(Ks, K, j0, Bc);
        load_tile(Vs, V, j0, Bc);

        for (int i0 = 0; i0 < Nq; i0 += Br) {
            load_tile(Qs, Q, i0, Br);
            __syncthreads();  // the tiles are whole before anyone multiplies them

            // S = scale * Q K^T
            for (int r0 = 0; r0 < Br; r0 += kSide * kR)
                for (int c0 = 0; c0 < Bc; c0 += kSide * 4) {
                    float s[kR][4] = {};
                    multiply(
                        s, r0, c0, Br, Bc, D, [&](int r, int k) { return Qs(r, k); }, [&](int k, int c) { return Ks(c, k); });
#pragma unroll
                    for (int u = 0; u < kR; ++u)
#pragma unroll
                        for (int v = 0; v < 4; ++v) {
                            const int r = r0 + y + kSide * u, c = c0 + x + kSide * v;
                            // exercise 03.1 begin
                            const bool hidden = j0 + c >= Nkv || mask.hides(i0 + r, j0 + c);
                            // exercise 03.1 end
                            if (r < Br && c < Bc) Ss(r, c) = hidden ? -INFINITY : scale * s[u][v];
                        }
                }
            __syncthreads();  // a row of S is written by 16 threads and read by another warp

            // A warp takes a row: m~ = max S, P~ = exp(S - m~), l~ = sum P~, then l and m as Algorithm 1, lines 11 and 13.
            for (int r = warp; r < Br; r += kThreads / 32) {
                const int i = i0 + r;
                if (i >= Nq) continue;  // a whole warp
                float m_block = -INFINITY;
                for (int c = lane; c < Bc; c += 32) m_block = fmaxf(m_block, Ss(r, c));
                m_block = simt::warp_max(m_block);
                const float reference = m_block == -INFINITY ? 0.0f : m_block;
                float l_block = 0.0f;
                for (int c = lane; c < Bc; c += 32) {
                    const float p = __expf(Ss(r, c) - reference);
                    Ss(r, c) = p;
                    l_block += p;
                }
                l_block = simt::warp_sum(l_block);
                if (lane == 0) {
                    // exercise 03.2 begin
                    const float m_old = first ? -INFINITY : m(i), l_old = first ? 0.0f : l(i);
                    const float m_new = fmaxf(m_old, m_block);
                    const float past = m_old == -INFINITY ? 0.0f : l_old * __expf(m_old - m_new);
                    const float now = m_block == -INFINITY ? 0.0f : __expf(m_block - m_new);
                    const float l_new = past + now * l_block;
                    keep(r) = l_new > 0.0f ? past / l_new : 0.0f;
                    add(r) = l_new > 0.0f ? now / l_new : 0.0f;
                    if (last) {
                        LSE(i) = m_new + logf(l_new);
                    } else {
                        m(i) = m_new;
                        l(i) = l_new;
                    }
                    // exercise 03.2 end
                }
            }
            __syncthreads();  // P~ and the two factors are whole before they weigh V and the old O

            // O = keep * O + add * (P~ V), in global memory
            // exercise 03.3 begin
            for (int r0 = 0; r0 < Br; r0 += kSide * kR)
                for (int c0 = 0; c0 < D; c0 += kSide * kC) {
                    float o[kR][kC] = {};
                    multiply(
                        o, r0, c0, Br, D, Bc, [&](int r, int k) { return Ss(r, k); }, [&](int k, int c) { return Vs(k, c); });
#pragma unroll
                    for (int u = 0; u < kR; ++u)
#pragma unroll
                        for (int v = 0; v < kC; ++v) {
                            const int r = r0 + y + kSide * u, c = c0 + x + kSide * v, i = i0 + r;
                            if (r >= Br || i >= Nq) continue;
                            float value = add(r) * o[u][v];
                            if (!first) value += keep(r) * O_acc(i, c);
                            if (last)
                                O(i, c) = from_float<T>(value);
                            else
                                O_acc(i, c) = value;
                        }
                }
            // exercise 03.3 end
        }
        __syncthreads();  // before the next K and V overwrite the V that slower warps still read
    }
}

}  // namespace step03
