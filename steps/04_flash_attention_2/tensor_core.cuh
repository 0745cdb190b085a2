// FlashAttention-2 on tensor cores: variant 04b with both products on mma.sync. A warp owns whole rows, so warps exchange nothing;
// S never leaves the registers it was computed in, since an accumulator has the layout that the next product wants of its A operand.
#pragma once

#include "04_flash_attention_2/swizzle.hpp"
#include "attention/mask.hpp"
#include "ptx/cp_async.hpp"
#include "ptx/ex2.hpp"
#include "ptx/ldmatrix.hpp"
#include "ptx/mma.hpp"
#include "simt/simt.hpp"
#include "simt/vector.hpp"

namespace step04 {

using simt::TensorView;
using workbook::Mask;

/// Shape of a thread block's work: kWarps warps of 16 kM query rows, Bc keys at a time, K and V each in a ring of two slots.
template <int kD, int kBc, int kNumWarps, int kRowTiles>
struct Shape {
    static constexpr int D = kD, Bc = kBc, kWarps = kNumWarps, kM = kRowTiles;
    static constexpr int Br = 16 * kM * kWarps;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kSlots = 2;
    /// Q fragments stay in registers where O, S and they fit together; else they are read again for each block of keys.
    static constexpr bool kQInRegisters = kM * D <= 128;
};

template <class T, class Shape>
struct Shared {
    alignas(128) T q[Shape::Br * Shape::D];  // also O, on its way out
    alignas(128) T k[Shape::kSlots][Shape::Bc * Shape::D];
    alignas(128) T v[Shape::kSlots][Shape::Bc * Shape::D];
};

/// Starts the copies of `kRows` rows from row0 on; rows past the matrix become zero. kWhole: there are none.
template <bool kWhole, int kRows, int kThreads, class T, int D>
SIMT_DEVICE void copy_tile(const SwizzledTile<T, D>& tile, const TensorView<const T, 2>& matrix, int row0) {
    constexpr int kChunks = D / 8, kStep = kThreads / kChunks;  // rows that the threads copy at a time
    static_assert(kThreads % kChunks == 0 && kRows % kStep == 0, "every thread copies one chunk of every kStep-th row");
    const int r0 = threadIdx.x / kChunks, c = threadIdx.x % kChunks * 8, last = matrix.extent(0) - 1;
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
        const int row = row0 + r0 + r;
        ptx::cp_async<16>(tile.chunk(r0 + r, c), &matrix(kWhole ? row : min(row, last), c), kWhole || row <= last);
    }
}

template <class T, class Shape>
__global__ __launch_bounds__(Shape::kThreads) void tensor_core(TensorView<const T, 4> Q4,  // (B, Hq, Nq, D)
                                                               TensorView<const T, 4> K4,  // (B, Hkv, Nkv, D)
                                                               TensorView<const T, 4> V4,  // (B, Hkv, Nkv, D)
                                                               TensorView<T, 4> O4,        // (B, Hq, Nq, D)
                                                               TensorView<float, 3> LSE3,  // (B, Hq, Nq)
                                                               float scale_log2,           // softmax_scale * log2(e)
                                                               Mask mask) {
    constexpr int D = Shape::D, Bc = Shape::Bc, Br = Shape::Br, kM = Shape::kM, kThreads = Shape::kThreads;
    constexpr int kN = Bc / 8;  // 8-key columns of S
    constexpr int kC = D / 8;   // 8-element columns of O
    constexpr int kK = D / 16;  // steps of Q K^T along d
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;  // row and column pair of this lane in a fragment
    const int i0 = (gridDim.x - 1 - blockIdx.x) * Br, h = blockIdx.y, b = blockIdx.z, hkv = h / (Q4.extent(1) / K4.extent(1));
    const auto Q = Q4(b, h);                    // (Nq, D)
    const auto K = K4(b, hkv), V = V4(b, hkv);  // (Nkv, D)
    const auto O = O4(b, h);                    // (Nq, D)
    const auto LSE = LSE3(b, h);                // (Nq)
    const int Nq = Q.extent(0), Nkv = K.extent(0);
    const int end = mask.visible(min(i0 + Br, Nq) - 1, Nkv);  // keys that the last row of the block sees
    const int blocks = (end + Bc - 1) / Bc;
    const int whole = mask.visible(i0, Nkv) / Bc;  // blocks that need no mask: the first row sees all their keys

    auto& smem = simt::shared<Shared<T, Shape>>();
    const SwizzledTile<T, D> Qs{smem.q};
    const auto Ks = [&](int j) { return SwizzledTile<T, D>{smem.k[j % Shape::kSlots]}; };
    const auto Vs = [&](int j) { return SwizzledTile<T, D>{smem.v[j % Shape::kSlots]}; };
    const int row0 = warp * 16 * kM;  // of the warp, in the block
    // The maximum is taken of S before scaling. That is the maximum after it only for a positive scale: others are applied first.
    const bool scale_first = scale_log2 <= 0.0f;
    const float c_log2 = scale_first ? 1.0f : scale_log2;

    std::uint32_t q[Shape::kQInRegisters ? kM : 1][Shape::kQInRegisters ? kK : 1][4];
    float o[kM][kC][4] = {};
    float m[kM][2], l[kM][2];  // of rows g and g + 8; l of this lane's columns only, until the end
#pragma unroll
    for (int u = 0; u < kM; ++u)
#pragma unroll
        for (int r = 0; r < 2; ++r) m[u][r] = -INFINITY, l[u][r] = 0.0f;

    // Lane addresses for ldmatrix.x4. A operand: lanes 0-15 the 16 rows of the left 8 columns, lanes 16-31 of the right ones.
    const auto load_q = [&](std::uint32_t(&fragment)[4], int u, int k) {
        ptx::ldmatrix_x4(fragment, Qs.chunk(row0 + 16 * u + lane % 16, 16 * k + lane / 16 * 8));
    };

    // One block of keys, from the last to the first. K and V of block j + 1 (that is, j - 1 in memory) are fetched meanwhile.
    const auto step = [&]<bool kMasked>(int j) {
        ptx::cp_async_wait<1>();  // K(j) has landed; V(j) may still be under way
        __syncthreads();          // for all threads; and nobody reads K(j + 1), whose slot is next, any more
        if (j > 0) copy_tile<true, Bc, kThreads>(Ks(j - 1), K, (j - 1) * Bc);
        ptx::cp_async_commit();

        float s[kM][kN][4] = {};
#pragma unroll
        for (int k = 0; k < kK; ++k) {
            std::uint32_t a[kM][4];
#pragma unroll
            for (int u = 0; u < kM; ++u) {
                if constexpr (!Shape::kQInRegisters) load_q(a[u], u, k);
            }
#pragma unroll
            for (int n = 0; n < kN; n += 2) {
                std::uint32_t keys[4];  // B operand: K^T, 16 of d by 16 keys
                ptx::ldmatrix_x4(keys, Ks(j).chunk(8 * n + lane % 8 + lane / 16 * 8, 16 * k + lane / 8 % 2 * 8));
#pragma unroll
                for (int u = 0; u < kM; ++u) {
                    const auto& left = Shape::kQInRegisters ? q[Shape::kQInRegisters ? u : 0][Shape::kQInRegisters ? k : 0] : a[u];
                    ptx::mma_m16n8k16<T>(s[u][n], left, keys[0], keys[1]);
                    ptx::mma_m16n8k16<T>(s[u][n + 1], left, keys[2], keys[3]);
                }
            }
        }

        if (scale_first) {
#pragma unroll
            for (int u = 0; u < kM; ++u)
#pragma unroll
                for (int n = 0; n < kN; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) s[u][n][e] *= scale_log2;
        }
#pragma unroll
        for (int u = 0; u < kM; ++u)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if constexpr (kMasked) {
                    const int i = i0 + row0 + 16 * u + 8 * r + g;
#pragma unroll
                    for (int n = 0; n < kN; ++n)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int key = j * Bc + 8 * n + 2 * t + e;
                            if (key >= Nkv || mask.hides(i, key)) s[u][n][2 * r + e] = -INFINITY;
                        }
                }
                float m_new = m[u][r];
#pragma unroll
                for (int n = 0; n < kN; ++n) m_new = fmaxf(m_new, fmaxf(s[u][n][2 * r], s[u][n][2 * r + 1]));
                m_new = simt::warp_max<4>(m_new);  // the four lanes of a row
                // exp(scale (s - m)) = 2^(c s - c m) with c = scale * log2(e): one FMA and one ex2 an element.
                const float reference = kMasked && m_new == -INFINITY ? 0.0f : c_log2 * m_new;
                const float alpha = ptx::ex2_approx_ftz(c_log2 * m[u][r] - reference);
                m[u][r] = m_new;
                l[u][r] *= alpha;
#pragma unroll
                for (int n = 0; n < kN; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& p = s[u][n][2 * r + e];
                        p = ptx::ex2_approx_ftz(c_log2 * p - reference);
                        l[u][r] += p;
                    }
#pragma unroll
                for (int c = 0; c < kC; ++c) o[u][c][2 * r] *= alpha, o[u][c][2 * r + 1] *= alpha;
            }

        ptx::cp_async_wait<1>();  // V(j) has landed; K(j - 1) may still be under way
        __syncthreads();          // for all threads; and nobody reads V(j + 1), whose slot is next, any more
        if (j > 0) copy_tile<true, Bc, kThreads>(Vs(j - 1), V, (j - 1) * Bc);
        ptx::cp_async_commit();

#pragma unroll
        for (int n = 0; n < kN; n += 2) {
            std::uint32_t p[kM][4];  // A operand: the accumulators of two neighbouring 8-key columns
#pragma unroll
            for (int u = 0; u < kM; ++u) {
                p[u][0] = ptx::pack<T>(s[u][n][0], s[u][n][1]);
                p[u][1] = ptx::pack<T>(s[u][n][2], s[u][n][3]);
                p[u][2] = ptx::pack<T>(s[u][n + 1][0], s[u][n + 1][1]);
                p[u][3] = ptx::pack<T>(s[u][n + 1][2], s[u][n + 1][3]);
            }
#pragma unroll
            for (int c = 0; c < kC; c += 2) {
                std::uint32_t values[4];  // B operand: V, 16 keys by 16 columns, transposed on the way
                ptx::ldmatrix_x4_trans(values, Vs(j).chunk(8 * n + lane % 16, 8 * c + lane / 16 * 8));
#pragma unroll
                for (int u = 0; u < kM; ++u) {
                    ptx::mma_m16n8k16<T>(o[u][c], p[u], values[0], values[1]);
                    ptx::mma_m16n8k16<T>(o[u][c + 1], p[u], values[2], values[3]);
                }
            }
        }
    };

    if (blocks > 0) {
        copy_tile<false, Br, kThreads>(Qs, Q, i0);
        copy_tile<false, Bc, kThreads>(Ks(blocks - 1), K, (blocks - 1) * Bc);
        ptx::cp_async_commit();
        copy_tile<false, Bc, kThreads>(Vs(blocks - 1), V, (blocks - 1) * Bc);
        ptx::cp_async_commit();
        if constexpr (Shape::kQInRegisters) {
            ptx::cp_async_wait<1>();
            __syncthreads();  // Q has landed for all threads
#pragma unroll
            for (int u = 0; u < kM; ++u)
#pragma unroll
                for (int k = 0; k < kK; ++k) load_q(q[u][k], u, k);
        }
        int j = blocks - 1;
        for (; j >= whole; --j) step.template operator()<true>(j);
        for (; j >= 0; --j) step.template operator()<false>(j);
        ptx::cp_async_wait<0>();
    }

    // O through the warp's own rows of Q's memory, so that it leaves in whole 16-byte chunks.
    __syncwarp();  // no lane still reads Q's fragments
#pragma unroll
    for (int u = 0; u < kM; ++u)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = simt::warp_sum<4>(l[u][r]);
            const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
            const int row = row0 + 16 * u + 8 * r + g;
#pragma unroll
            for (int c = 0; c < kC; ++c)
                simt::store_shared_4(Qs.chunk(row, 8 * c) + 2 * t, ptx::pack<T>(o[u][c][2 * r] * inverse, o[u][c][2 * r + 1] * inverse));
            constexpr float kLn2 = 0.6931471805599453f;
            if (t == 0 && i0 + row < Nq) LSE(i0 + row) = sum > 0.0f ? kLn2 * (c_log2 * m[u][r] + log2f(sum)) : -INFINITY;
        }
    __syncwarp();  // a row is written by four lanes and read by others of the warp
#pragma unroll
    for (int e = 0; e < 16 * kM * (D / 8) / 32; ++e) {
        const int at = lane + 32 * e, r = row0 + at / (D / 8), c = at % (D / 8) * 8;
        const uint4 chunk = simt::load_shared_16(Qs.chunk(r, c));
        if (i0 + r < Nq) simt::store_global_16(&O(i0 + r, c), chunk);
    }
}

}  // namespace step04
