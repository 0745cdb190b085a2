// FlashAttention-2 on tensor cores: variant 04b with both products on mma.sync. A warp owns whole rows, so warps exchange nothing;
// S never leaves the registers it was computed in, since an accumulator has the layout that the next product wants of its A operand.
#pragma once

#include "attention/mask.hpp"
#include "attention/swizzled_tile.hpp"
#include "ptx/cp_async.hpp"
#include "ptx/ex2.hpp"
#include "ptx/ldmatrix.hpp"
#include "ptx/mma.hpp"
#include "simt/simt.hpp"
#include "simt/vector.hpp"

#include <cfloat>

namespace step04 {

using simt::TensorView;
using workbook::copy_tile;
using workbook::for_own_chunks;
using workbook::LaneOffset;
using workbook::Mask;
using workbook::swizzled;

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

/// Gives this thread's part of Q the sign of the scale, so that the scores need only be multiplied by |scale|: what counts is the
/// maximum after scaling, and a positive factor keeps it where it is. A scale of zero makes Q zero.
template <int kRows, int D, int kThreads, class T>
SIMT_DEVICE void apply_sign(T* tile, float scale) {
    const std::uint32_t keep = scale == 0.0f ? 0u : 0xffffffffu, flip = scale < 0.0f ? 0x80008000u : 0u;
    for_own_chunks<kRows, D, kThreads>([&](int r, int c) {
        uint4 x = simt::load_shared_16(tile + swizzled<D>(r, c));
        for (std::uint32_t* pair : {&x.x, &x.y, &x.z, &x.w}) *pair = (*pair & keep) ^ flip;
        simt::store_shared_16(tile + swizzled<D>(r, c), x);
    });
}

/// The work of a thread block: the query rows i0 to i0 + Br - 1 of one sequence and head. The mask is that sequence's.
template <class T, class Shape>
SIMT_DEVICE void query_tile(TensorView<const T, 2> Q,  // (Nq, D)
                            TensorView<const T, 2> K,  // (Nkv, D)
                            TensorView<const T, 2> V,  // (Nkv, D)
                            TensorView<T, 2> O,        // (Nq, D)
                            TensorView<float, 1> LSE,  // (Nq)
                            int i0, float scale_log2,  // softmax_scale * log2(e)
                            Mask mask) {
    constexpr int D = Shape::D, Bc = Shape::Bc, Br = Shape::Br, kM = Shape::kM, kThreads = Shape::kThreads;
    constexpr int kN = Bc / 8;  // 8-key columns of S
    constexpr int kC = D / 8;   // 8-element columns of O
    constexpr int kK = D / 16;  // steps of Q K^T along d
    constexpr bool kQInRegisters = Shape::kQInRegisters;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;  // row and column pair of this lane in a fragment
    const int Nq = Q.extent(0), Nkv = K.extent(0);
    const int end = mask.visible(min(i0 + Br, Nq) - 1, Nkv);  // keys that the last row of the block sees
    const int blocks = (end + Bc - 1) / Bc;
    const int whole = mask.visible(i0, Nkv) / Bc;  // blocks that need no mask: the first row sees all their keys
    const float c_log2 = scale_log2 == 0.0f ? 1.0f : fabsf(scale_log2);
    constexpr float kSlack = 8.0f;                        // of m behind the maximum, in units of the exponent
    const float slack = fminf(kSlack / c_log2, FLT_MAX);  // in units of the scores

    auto& smem = simt::shared<Shared<T, Shape>>();
    T* const own_q = smem.q + warp * 16 * kM * D;  // the warp's rows
    // What the lanes point ldmatrix.x4 at. Q: lanes 0-15 the 16 rows of the left 8 columns, lanes 16-31 of the right ones; V, read
    // transposed, likewise. K: lanes 0-7 eight keys and the left 8 columns, 8-15 the right ones, 16-31 the next eight keys.
    const LaneOffset<D> rows_first(lane % 16, lane / 16 * 8), columns_first(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);

    std::uint32_t q[kM][kQInRegisters ? kK : 1][4];
    float o[kM][kC][4] = {};
    float m[kM][2], l[kM][2];  // of rows g and g + 8; l of this lane's columns only, until the end
#pragma unroll
    for (int u = 0; u < kM; ++u)
#pragma unroll
        for (int r = 0; r < 2; ++r) m[u][r] = -INFINITY, l[u][r] = 0.0f;

    const auto load_q = [&](std::uint32_t(&fragment)[4], int u, int k) { ptx::ldmatrix_x4(fragment, own_q + rows_first(16 * u, 16 * k)); };

    // One block of keys, from the last to the first.
    const auto step = [&]<bool kMasked>(int j) {
        const T *const Kj = smem.k[j % Shape::kSlots], *const Vj = smem.v[j % Shape::kSlots];
        ptx::cp_async_wait<0>();  // K(j) and V(j) have landed
        __syncthreads();          // for all threads; and nobody reads K(j + 1) and V(j + 1), whose slots are next, any more
        if (j > 0) {
            copy_tile<true, Bc, D, kThreads>(smem.k[(j - 1) % Shape::kSlots], K, (j - 1) * Bc);
            copy_tile<true, Bc, D, kThreads>(smem.v[(j - 1) % Shape::kSlots], V, (j - 1) * Bc);
        }
        ptx::cp_async_commit();

        // S = Q K^T
        float s[kM][kN][4] = {};
        // exercise 04.2 begin
#pragma unroll
        for (int k = 0; k < kK; ++k) {
            if constexpr (!kQInRegisters) {
#pragma unroll
                for (int u = 0; u < kM; ++u) load_q(q[u][0], u, k);
            }
#pragma unroll
            for (int n = 0; n < kN; n += 2) {
                std::uint32_t keys[4];  // B operands: K^T, 16 of d by twice 8 keys
                ptx::ldmatrix_x4(keys, Kj + columns_first(8 * n, 16 * k));
#pragma unroll
                for (int u = 0; u < kM; ++u) {
                    ptx::mma_m16n8k16<T>(s[u][n], q[u][kQInRegisters ? k : 0], keys[0], keys[1]);
                    ptx::mma_m16n8k16<T>(s[u][n + 1], q[u][kQInRegisters ? k : 0], keys[2], keys[3]);
                }
            }
        }
        // exercise 04.2 end

        // The largest of this lane's scores in each row. As long as none in the warp exceeds its row's m by a factor of more than 2^8
        // in P, m stays: it need not be the maximum, only the same in O, l and P, and near enough to it.
        float top[kM][2];
        bool grows = false;
#pragma unroll
        for (int u = 0; u < kM; ++u)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if constexpr (kMasked) {
                    // exercise 04.3 begin
                    const int i = i0 + 16 * (warp * kM + u) + 8 * r + g;
#pragma unroll
                    for (int n = 0; n < kN; ++n)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int key = j * Bc + 8 * n + 2 * t + e;
                            if (key >= Nkv || mask.hides(i, key)) s[u][n][2 * r + e] = -INFINITY;
                        }
                    // exercise 04.3 end
                }
                top[u][r] = fmaxf(s[u][0][2 * r], s[u][0][2 * r + 1]);
#pragma unroll
                for (int n = 1; n < kN; ++n) top[u][r] = fmaxf(top[u][r], fmaxf(s[u][n][2 * r], s[u][n][2 * r + 1]));
                grows |= top[u][r] > m[u][r] + slack;
            }
        // exercise 04.4 begin
        if (__any_sync(simt::kFullMask, grows)) {
#pragma unroll
            for (int u = 0; u < kM; ++u)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float m_new = fmaxf(m[u][r], simt::warp_max<4>(top[u][r]));  // over the four lanes of a row
                    const float alpha = m_new == -INFINITY ? 1.0f : ptx::ex2_approx_ftz(c_log2 * (m[u][r] - m_new));
                    m[u][r] = m_new;
                    l[u][r] *= alpha;
#pragma unroll
                    for (int c = 0; c < kC; ++c) o[u][c][2 * r] *= alpha, o[u][c][2 * r + 1] *= alpha;
                }
        }
        // exercise 04.4 end

        // O += P V, with 16 keys at a time: their exponentials, packed into an A operand, then the products.
#pragma unroll
        for (int n = 0; n < kN; n += 2) {
            std::uint32_t p[kM][4];
#pragma unroll
            for (int u = 0; u < kM; ++u)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        // exp(scale (s - m)) = 2^(c s - c m) with c = scale * log2(e): one FMA and one ex2 an element.
                        const float reference = kMasked && m[u][r] == -INFINITY ? 0.0f : c_log2 * m[u][r];
                        const float left = ptx::ex2_approx_ftz(c_log2 * s[u][n + half][2 * r] - reference);
                        const float right = ptx::ex2_approx_ftz(c_log2 * s[u][n + half][2 * r + 1] - reference);
                        l[u][r] += left;
                        l[u][r] += right;
                        p[u][2 * half + r] = ptx::pack<T>(left, right);
                    }
#pragma unroll
            for (int c = 0; c < kC; c += 2) {
                std::uint32_t values[4];  // B operands: V, 16 keys by twice 8 columns
                ptx::ldmatrix_x4_trans(values, Vj + rows_first(8 * n, 8 * c));
#pragma unroll
                for (int u = 0; u < kM; ++u) {
                    ptx::mma_m16n8k16<T>(o[u][c], p[u], values[0], values[1]);
                    ptx::mma_m16n8k16<T>(o[u][c + 1], p[u], values[2], values[3]);
                }
            }
        }
    };

    if (blocks > 0) {
        const int j = blocks - 1;
        copy_tile<false, Br, D, kThreads>(smem.q, Q, i0);
        ptx::cp_async_commit();
        copy_tile<false, Bc, D, kThreads>(smem.k[j % Shape::kSlots], K, j * Bc);
        copy_tile<false, Bc, D, kThreads>(smem.v[j % Shape::kSlots], V, j * Bc);
        ptx::cp_async_commit();
        if (scale_log2 <= 0.0f) {
            ptx::cp_async_wait<1>();  // this thread's part of Q has landed
            apply_sign<Br, D, kThreads>(smem.q, scale_log2);
        }
        if constexpr (kQInRegisters) {
            ptx::cp_async_wait<1>();
            __syncthreads();  // Q has landed for all threads
#pragma unroll
            for (int u = 0; u < kM; ++u)
#pragma unroll
                for (int k = 0; k < kK; ++k) load_q(q[u][k], u, k);
        }
    }
    int j = blocks - 1;
    for (; j >= whole; --j) step.template operator()<true>(j);
    for (; j >= 0; --j) step.template operator()<false>(j);

    // O through the warp's own rows of Q's memory, so that it leaves in whole 16-byte chunks.
    __syncwarp();  // no lane still reads Q's fragments
#pragma unroll
    for (int u = 0; u < kM; ++u)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = simt::warp_sum<4>(l[u][r]);
            const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
            const int row = 16 * u + 8 * r + g, i = i0 + warp * 16 * kM + row;
#pragma unroll
            for (int c = 0; c < kC; ++c)
                simt::store_shared_4(own_q + swizzled<D>(row, 8 * c) + 2 * t,
                                     ptx::pack<T>(o[u][c][2 * r] * inverse, o[u][c][2 * r + 1] * inverse));
            constexpr float kLn2 = 0.6931471805599453f;
            if (t == 0 && i < Nq) LSE(i) = sum > 0.0f ? kLn2 * (c_log2 * m[u][r] + log2f(sum)) : -INFINITY;
        }
    __syncwarp();  // a row is written by four lanes and read by others of the warp
#pragma unroll
    for (int e = 0; e < 16 * kM * (D / 8) / 32; ++e) {
        const int chunk = lane + 32 * e, r = chunk / (D / 8), c = chunk % (D / 8) * 8, i = i0 + warp * 16 * kM + r;
        const uint4 x = simt::load_shared_16(own_q + swizzled<D>(r, c));
        if (i < Nq) simt::store_global_16(&O(i, c), x);
    }
}

template <class T, class Shape>
__global__ __launch_bounds__(Shape::kThreads) void tensor_core(TensorView<const T, 4> Q,  // (B, Hq, Nq, D)
                                                               TensorView<const T, 4> K,  // (B, Hkv, Nkv, D)
                                                               TensorView<const T, 4> V,  // (B, Hkv, Nkv, D)
                                                               TensorView<T, 4> O,        // (B, Hq, Nq, D)
                                                               TensorView<float, 3> LSE,  // (B, Hq, Nq)
                                                               float scale_log2,          // softmax_scale * log2(e)
                                                               Mask mask) {
    const int i0 = (gridDim.x - 1 - blockIdx.x) * Shape::Br, h = blockIdx.y, b = blockIdx.z, hkv = h / (Q.extent(1) / K.extent(1));
    query_tile<T, Shape>(Q(b, h), K(b, hkv), V(b, hkv), O(b, h), LSE(b, h), i0, scale_log2, mask);
}

}  // namespace step04
