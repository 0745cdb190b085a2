// FlashAttention-2 with Hopper's instructions: one warp has the TMA unit fetch tiles, and a warpgroup multiplies them where they lie. The
// two know of each other by barriers in shared memory alone, so that copies run as far ahead as there are slots.
#pragma once

#include "06_hopper/tile.hpp"
#include "attention/mask.hpp"
#include "ptx/barrier.hpp"
#include "ptx/cp_async_bulk.hpp"
#include "ptx/elect.hpp"
#include "ptx/ex2.hpp"
#include "ptx/fence.hpp"
#include "ptx/mbarrier.hpp"
#include "ptx/mma.hpp"
#include "ptx/stmatrix.hpp"
#include "ptx/wgmma.hpp"
#include "simt/simt.hpp"

namespace step06 {

using ptx::Major;
using ptx::Mbarrier;
using ptx::TensorMap;
using simt::TensorView;
using workbook::Mask;

/// Shape of a thread block's work: one warpgroup for 64 query rows and one warp that loads, Bc keys at a time.
template <int kD, int kBc, int kBlocksOfAnSm>
struct Shape {
    static constexpr int D = kD, Bc = kBc, kBlocks = kBlocksOfAnSm;
    static constexpr int Br = 64;
    static constexpr int kConsumers = 128;  // threads
    static constexpr int kThreads = kConsumers + 32;
    static constexpr int kSlots = 2;
};

template <class T, class Shape>
struct Shared {
    using QTile = Tile<T, Shape::Br, Shape::D>;
    using KvTile = Tile<T, Shape::Bc, Shape::D>;
    QTile q;  // also O, on its way out
    KvTile k[Shape::kSlots], v[Shape::kSlots];
    // A full barrier completes a phase when a tile has landed, an empty one when the consumers have done with it.
    Mbarrier q_full, k_full[Shape::kSlots], k_empty[Shape::kSlots], v_full[Shape::kSlots], v_empty[Shape::kSlots];
};

template <class T, class Shape>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void tma_wgmma(  // tensors as their maps see them:
    const __grid_constant__ TensorMap Q_map,                                   // (B, Hq, D / 64, Nq, 64)
    const __grid_constant__ TensorMap K_map,                                   // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap V_map,                                   // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap O_map,                                   // (B, Hq, D / 64, Nq, 64)
    TensorView<float, 3> LSE3,                                                 // (B, Hq, Nq)
    int Nkv,
    int group,         // query heads that share a key/value head
    float scale_log2,  // softmax_scale * log2(e)
    Mask mask) {
    constexpr int D = Shape::D, Bc = Shape::Bc, Br = Shape::Br, kSlots = Shape::kSlots;
    constexpr int kN = Bc / 8;  // 8-key columns of S
    constexpr int kC = D / 8;   // 8-element columns of O
    using QTile = typename Shared<T, Shape>::QTile;
    using KvTile = typename Shared<T, Shape>::KvTile;
    const int i0 = (gridDim.x - 1 - blockIdx.x) * Br, h = blockIdx.y, b = blockIdx.z;  // the longest first
    const auto LSE = LSE3(b, h);                                                       // (Nq)
    const int Nq = LSE.extent(0);
    const int end = mask.visible(min(i0 + Br, Nq) - 1, Nkv);  // keys that the last row of the block sees
    const int blocks = (end + Bc - 1) / Bc;
    const int whole = mask.visible(i0, Nkv) / Bc;  // blocks that need no mask: the first row sees all their keys

    auto& smem = simt::shared<Shared<T, Shape>>();
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(smem.q_full, 1, "q_full");
        for (int s = 0; s < kSlots; ++s) {
            ptx::mbarrier_init(smem.k_full[s], 1, "k_full", s);
            ptx::mbarrier_init(smem.v_full[s], 1, "v_full", s);
            ptx::mbarrier_init(smem.k_empty[s], 1, "k_empty", s);
            ptx::mbarrier_init(smem.v_empty[s], 1, "v_empty", s);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    // By a shuffle, so that the compiler knows that it is the same in all lanes.
    const int warp = __shfl_sync(simt::kFullMask, static_cast<int>(threadIdx.x / 32), 0);
    // Tiles are visited from the last to the first. The n-th uses slot n % kSlots for the (n / kSlots)-th time, counted from 0.
    const auto slot_of = [](int n) { return n % kSlots; };
    // exercise 06.1 begin
    const auto parity_of = [](int n) { return static_cast<unsigned>(n / kSlots % 2); };
    // exercise 06.1 end

    if (warp == Shape::kConsumers / 32) {  // the producer, of which one lane works
        if (blocks > 0 && ptx::elect_one()) {
            const auto load = [&](KvTile(&ring)[kSlots], const TensorMap& map, Mbarrier(&full)[kSlots], Mbarrier(&empty)[kSlots], int n) {
                // exercise 06.2 begin
                const int s = slot_of(n), j = blocks - 1 - n;
                ptx::mbarrier_wait(empty[s], parity_of(n) ^ 1);  // at once in the first round: no phase has begun before phase 0
                ptx::mbarrier_arrive_expect_tx(full[s], KvTile::kBytes);
                ptx::cp_async_bulk_tensor_load(ring[s].data, map, {0, j * Bc, 0, h / group, b}, full[s], ptx::CachePolicy::evict_last);
                // exercise 06.2 end
            };
            ptx::mbarrier_arrive_expect_tx(smem.q_full, QTile::kBytes);
            ptx::cp_async_bulk_tensor_load(smem.q.data, Q_map, {0, i0, 0, h, b}, smem.q_full, ptx::CachePolicy::evict_first);
            for (int n = 0; n < blocks; ++n) {
                load(smem.k, K_map, smem.k_full, smem.k_empty, n);
                load(smem.v, V_map, smem.v_full, smem.v_empty, n);
            }
        }
        return;
    }

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;  // row and column pair of this lane in a fragment
    const int row0 = 16 * warp;                                     // of the warp, in the block
    const bool speaks = threadIdx.x == 0;                           // for the warpgroup
    // The maximum is taken of S before scaling. That is the maximum after it only for a positive scale: others are applied first.
    const bool scale_first = scale_log2 <= 0.0f;
    const float c_log2 = scale_first ? 1.0f : scale_log2;

    // o[4c + 2r + e] is row g + 8r, column 8c + 2t + e of the warp's 16 rows; s below likewise.
    float o[D / 2] = {};
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {};  // l of this lane's columns only, until the end
    const ptx::MatrixDescriptor Qs = smem.q.over_columns();
    const ptx::MatrixDescriptor Ks = smem.k[0].over_columns(), Vs = smem.v[0].over_rows();

    const auto step = [&]<bool kMasked>(int n) {
        const int slot = slot_of(n), j = blocks - 1 - n;
        float s[Bc / 2];
        ptx::mbarrier_wait(smem.k_full[slot], parity_of(n));
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; ++k)
            ptx::wgmma<T, Bc>(s, Qs.advance(QTile::column_step(k)), Ks.advance(slot * KvTile::kBytes).advance(KvTile::column_step(k)),
                              k > 0);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::keep_in_place(s);
        if (speaks) ptx::mbarrier_arrive(smem.k_empty[slot]);

        if (scale_first) {
#pragma unroll
            for (float& x : s) x *= scale_log2;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if constexpr (kMasked) {
                const int i = i0 + row0 + 8 * r + g;
#pragma unroll
                for (int c = 0; c < kN; ++c)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int key = j * Bc + 8 * c + 2 * t + e;
                        if (key >= Nkv || mask.hides(i, key)) s[4 * c + 2 * r + e] = -INFINITY;
                    }
            }
            float m_new = m[r];
#pragma unroll
            for (int c = 0; c < kN; ++c) m_new = fmaxf(m_new, fmaxf(s[4 * c + 2 * r], s[4 * c + 2 * r + 1]));
            m_new = simt::warp_max<4>(m_new);  // the four lanes of a row
            // exp(scale (s - m)) = 2^(c s - c m) with c = scale * log2(e): one FMA and one ex2 an element.
            const float reference = kMasked && m_new == -INFINITY ? 0.0f : c_log2 * m_new;
            const float alpha = ptx::ex2_approx_ftz(c_log2 * m[r] - reference);
            m[r] = m_new;
            l[r] *= alpha;
#pragma unroll
            for (int c = 0; c < kN; ++c)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& p = s[4 * c + 2 * r + e];
                    p = ptx::ex2_approx_ftz(c_log2 * p - reference);
                    l[r] += p;
                }
#pragma unroll
            for (int c = 0; c < kC; ++c) o[4 * c + 2 * r] *= alpha, o[4 * c + 2 * r + 1] *= alpha;
        }
        std::uint32_t p[Bc / 16][4];  // A operand: the accumulators of two neighbouring 8-key columns
#pragma unroll
        for (int k = 0; k < Bc / 16; ++k)
#pragma unroll
            for (int e = 0; e < 4; ++e) p[k][e] = ptx::pack<T>(s[8 * k + 2 * e], s[8 * k + 2 * e + 1]);

        // exercise 06.3 begin
        ptx::mbarrier_wait(smem.v_full[slot], parity_of(n));
#pragma unroll
        for (int k = 0; k < Bc / 16; ++k) ptx::keep_in_place(p[k]);
        ptx::keep_in_place(o);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < Bc / 16; ++k)
            ptx::wgmma<T, D, Major::mn>(o, p[k], Vs.advance(slot * KvTile::kBytes).advance(KvTile::row_step(k)), true);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::keep_in_place(o);
        if (speaks) ptx::mbarrier_arrive(smem.v_empty[slot]);
        // exercise 06.3 end
    };

    if (blocks > 0) {
        ptx::mbarrier_wait(smem.q_full, 0);
        int n = 0;
        for (; n < blocks - whole; ++n) step.template operator()<true>(n);
        for (; n < blocks; ++n) step.template operator()<false>(n);
    }

    // O through Q's memory, from where TMA takes it.
    ptx::bar_sync(1, Shape::kConsumers);  // no warp still multiplies with Q
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = simt::warp_sum<4>(l[r]);
        inverse[r] = sum > 0.0f ? 1.0f / sum : 0.0f;
        const int i = i0 + row0 + 8 * r + g;
        constexpr float kLn2 = 0.6931471805599453f;
        if (t == 0 && i < Nq) LSE(i) = sum > 0.0f ? kLn2 * (c_log2 * m[r] + log2f(sum)) : -INFINITY;
    }
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        std::uint32_t tiles[4];  // 8 x 8 each: rows 0-7 and 8-15 of the left columns, then of the right ones
#pragma unroll
        for (int e = 0; e < 4; ++e) tiles[e] = ptx::pack<T>(o[8 * k + 2 * e] * inverse[e % 2], o[8 * k + 2 * e + 1] * inverse[e % 2]);
        ptx::stmatrix(tiles, smem.q.chunk(row0 + lane % 16, 16 * k + lane / 16 * 8));
    }
    ptx::fence_proxy_async();             // TMA shall see what this thread wrote
    ptx::bar_sync(1, Shape::kConsumers);  // and what the others did
    if (speaks) {
        ptx::cp_async_bulk_tensor_store(O_map, {0, i0, 0, h, b}, smem.q.data);
        ptx::cp_async_bulk_commit();
        ptx::cp_async_bulk_wait_read<0>();  // shared memory ends with the block
    }
}

}  // namespace step06
