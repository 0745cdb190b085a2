// dQ in a pass of its own, for runs that must give the same bits each time: a thread block owns a block of queries, as in stage 04, and
// adds up its dQ in one order. S and dP are computed once more for it.
#pragma once

#include "05_recompute_backward/recompute.cuh"

namespace step05 {

template <class T, int D>
__global__ __launch_bounds__(kTileThreads) void query_pass(TensorView<const T, 4> Q4,       // (B, Hq, Nq, D)
                                                           TensorView<const T, 4> K4,       // (B, Hkv, Nkv, D)
                                                           TensorView<const T, 4> V4,       // (B, Hkv, Nkv, D)
                                                           TensorView<const T, 4> dO4,      // (B, Hq, Nq, D)
                                                           TensorView<const float, 3> LSE,  // (B, Hq, Nq)
                                                           TensorView<const float, 3> D3,   // (B, Hq, Nq): rowsum(dO o O)
                                                           TensorView<T, 4> dQ4,            // (B, Hq, Nq, D)
                                                           float scale, Mask mask) {
    constexpr int Br = Fp32Tiles<D>::Br, Bc = Fp32Tiles<D>::Bc;
    const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
    const int i0 = blockIdx.x * Br, h = blockIdx.y, b = blockIdx.z, hkv = h / (Q4.extent(1) / K4.extent(1));
    const auto Q = Q4(b, h), dO = dO4(b, h);    // (Nq, D)
    const auto K = K4(b, hkv), V = V4(b, hkv);  // (Nkv, D)
    const auto dQ = dQ4(b, h);                  // (Nq, D)
    const int Nq = Q.extent(0), Nkv = K.extent(0);
    const int end = mask.visible(min(i0 + Br, Nq) - 1, Nkv);  // keys that the last row of the block sees

    simt::SharedArena smem;
    const auto Ks = smem.tile<float>("K", Bc, D, D + 1);
    const auto Vs = smem.tile<float>("V", Bc, D, D + 1);
    const auto Qs = smem.tile<float>("Q", Br, D, D + 1);
    const auto dOs = smem.tile<float>("dO", Br, D, D + 1);
    const auto dS = smem.tile<float>("dS", Br, Bc, Bc + 1);

    float dq[Br / kSide][D / kSide] = {}, lse[Br / kSide], d[Br / kSide];
    if (end > 0) {
        load_tile(Qs, Q, i0, Br);
        load_tile(dOs, dO, i0, Br);
        load_statistics(lse, LSE(b, h), i0);
        load_statistics(d, D3(b, h), i0);
    }
    for (int j0 = 0; j0 < end; j0 += Bc) {
        load_tile(Ks, K, j0, Bc);
        load_tile(Vs, V, j0, Bc);
        __syncthreads();  // the tiles are whole before anyone multiplies them

        float p[Br / kSide][Bc / kSide] = {}, ds[Br / kSide][Bc / kSide] = {};
        multiply(
            p, 0, 0, Br, Bc, D, [&](int r, int k) { return Qs(r, k); }, [&](int k, int c) { return Ks(c, k); });
        multiply(
            ds, 0, 0, Br, Bc, D, [&](int r, int k) { return dOs(r, k); }, [&](int k, int c) { return Vs(c, k); });
        softmax_backward(p, ds, lse, d, i0, j0, Nq, Nkv, scale, mask);
        store_tile(dS, ds);
        __syncwarp();  // a row of dS is written and read by the same 16 lanes

        multiply(
            dq, 0, 0, Br, D, Bc, [&](int r, int k) { return dS(r, k); }, [&](int k, int c) { return Ks(k, c); });
        __syncthreads();  // before the next K and V overwrite what slower warps still read
    }

#pragma unroll
    for (int u = 0; u < Br / kSide; ++u) {
        const int i = i0 + y + kSide * u;
        if (i >= Nq) continue;
#pragma unroll
        for (int c = 0; c < D / kSide; ++c) dQ(i, x + kSide * c) = from_float<T>(scale * dq[u][c]);
    }
}

}  // namespace step05
