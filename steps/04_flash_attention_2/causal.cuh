// Variant 04a with the causal mask used to save work: key blocks above the diagonal are not visited, those wholly below it run
// without a mask, and the longest rows of blocks are started first.
#pragma once

#include "04_flash_attention_2/q_parallel.cuh"

namespace step04 {

template <class T, int D>
__global__ __launch_bounds__(kThreads) void causal(TensorView<const T, 4> Q4,  // (B, Hq, Nq, D)
                                                   TensorView<const T, 4> K4,  // (B, Hkv, Nkv, D)
                                                   TensorView<const T, 4> V4,  // (B, Hkv, Nkv, D)
                                                   TensorView<T, 4> O4,        // (B, Hq, Nq, D)
                                                   TensorView<float, 3> LSE3,  // (B, Hq, Nq)
                                                   float scale, Mask mask) {
    constexpr int Br = Fp32Tiles<D>::Br, Bc = Fp32Tiles<D>::Bc;
    const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
    // Blocks start in order of their index: the last block of queries sees the most keys and goes first.
    const int i0 = (gridDim.x - 1 - blockIdx.x) * Br, h = blockIdx.y, b = blockIdx.z, hkv = h / (Q4.extent(1) / K4.extent(1));
    const auto Q = Q4(b, h);                    // (Nq, D)
    const auto K = K4(b, hkv), V = V4(b, hkv);  // (Nkv, D)
    const auto O = O4(b, h);                    // (Nq, D)
    const auto LSE = LSE3(b, h);                // (Nq)
    const int Nq = Q.extent(0), Nkv = K.extent(0);
    // exercise 04.1 begin
    const int end = mask.visible(min(i0 + Br, Nq) - 1, Nkv);  // keys that the last row of the block sees
    // exercise 04.1 end

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
    if (end > 0) load_tile(Qs, Q, i0, Br);

    for (int j0 = 0; j0 < end; j0 += Bc) {
        // Only a block that the diagonal or the end of the keys cuts needs a mask.
        const bool masked = j0 + Bc > mask.visible(i0, Nkv);
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
                s[u][v] = masked && (j >= Nkv || mask.hides(i0 + r, j)) ? -INFINITY : scale * s[u][v];
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
