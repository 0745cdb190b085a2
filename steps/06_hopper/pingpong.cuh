// 06a with two warpgroups that multiply, in turns, so that the softmax of one runs under the products of the other. And within a
// warpgroup S of the next keys is asked for before P V of the last ones: its softmax runs under that too. This is the schedule of
// FlashAttention-3.
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
#include "ptx/setmaxnreg.hpp"
#include "ptx/stmatrix.hpp"
#include "ptx/wgmma.hpp"
#include "simt/simt.hpp"

namespace step06 {

using ptx::Major;
using ptx::Mbarrier;
using ptx::TensorMap;
using simt::TensorView;
using workbook::Mask;

/// Shape of a thread block's work: two warpgroups for 64 query rows each and one of which a lane loads, Bc keys at a time.
template <int kD, int kBc>
struct PingpongShape {
    static constexpr int D = kD, Bc = kBc;
    static constexpr int kGroups = 2;  // that multiply
    static constexpr int Br = 64 * kGroups;
    static constexpr int kConsumers = 128 * kGroups;  // threads
    static constexpr int kThreads = kConsumers + 128;
    static constexpr int kSlots = 2;
    // A thread block begins with the same for all threads: what 384 of them can have of 65,536, in steps of 8.
    static constexpr int kRegisters = 65536 / kThreads / 8 * 8, kProducerRegisters = 24, kConsumerRegisters = 240;
    static_assert(128 * kProducerRegisters + kConsumers * kConsumerRegisters <= kThreads * kRegisters, "more than there are");
};

template <class T, class Shape>
struct PingpongShared {
    using QTile = Tile<T, 64, Shape::D>;
    using KvTile = Tile<T, Shape::Bc, Shape::D>;
    QTile q[Shape::kGroups];  // also O, on its way out
    KvTile k[Shape::kSlots], v[Shape::kSlots];
    Mbarrier q_full, k_full[Shape::kSlots], k_empty[Shape::kSlots], v_full[Shape::kSlots], v_empty[Shape::kSlots];
};

template <class T, class Shape>
__global__ __launch_bounds__(Shape::kThreads, 1) void pingpong(  // tensors as their maps see them:
    const __grid_constant__ TensorMap Q_map,                     // (B, Hq, D / 64, Nq, 64)
    const __grid_constant__ TensorMap K_map,                     // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap V_map,                     // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap O_map,                     // (B, Hq, D / 64, Nq, 64)
    TensorView<float, 3> LSE3,                                   // (B, Hq, Nq)
    int Nkv,
    int group,         // query heads that share a key/value head
    float scale_log2,  // softmax_scale * log2(e)
    Mask mask) {
    constexpr int D = Shape::D, Bc = Shape::Bc, Br = Shape::Br, kSlots = Shape::kSlots, kGroups = Shape::kGroups;
    constexpr int kN = Bc / 8;   // 8-key columns of S
    constexpr int kC = D / 8;    // 8-element columns of O
    constexpr int kK = Bc / 16;  // steps of P V along the keys
    using QTile = typename PingpongShared<T, Shape>::QTile;
    using KvTile = typename PingpongShared<T, Shape>::KvTile;
    const int i0 = (gridDim.x - 1 - blockIdx.x) * Br, h = blockIdx.y, b = blockIdx.z;  // the longest first
    const auto LSE = LSE3(b, h);                                                       // (Nq)
    const int Nq = LSE.extent(0);
    const int end = mask.visible(min(i0 + Br, Nq) - 1, Nkv);  // keys that the last row of the block sees
    const int blocks = (end + Bc - 1) / Bc;

    auto& smem = simt::shared<PingpongShared<T, Shape>>();
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(smem.q_full, 1, "q_full");
        for (int s = 0; s < kSlots; ++s) {
            ptx::mbarrier_init(smem.k_full[s], 1, "k_full", s);
            ptx::mbarrier_init(smem.v_full[s], 1, "v_full", s);
            ptx::mbarrier_init(smem.k_empty[s], kGroups, "k_empty", s);
            ptx::mbarrier_init(smem.v_empty[s], kGroups, "v_empty", s);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    // By a shuffle, so that the compiler knows that they are the same in all lanes.
    const int warp = __shfl_sync(simt::kFullMask, static_cast<int>(threadIdx.x / 32), 0), wg = warp / 4;
    // Tiles are visited from the last to the first. The n-th uses slot n % kSlots for the (n / kSlots)-th time, counted from 0.
    const auto slot_of = [](int n) { return n % kSlots; };
    const auto parity_of = [](int n) { return static_cast<unsigned>(n / kSlots % 2); };

    if (wg == kGroups) {  // the producer, of which one lane works
        ptx::setmaxnreg_dec<Shape::kProducerRegisters>();
        if (warp == 4 * kGroups && blocks > 0 && ptx::elect_one()) {
            const auto load = [&](KvTile(&ring)[kSlots], const TensorMap& map, Mbarrier(&full)[kSlots], Mbarrier(&empty)[kSlots], int n) {
                const int s = slot_of(n), j = blocks - 1 - n;
                ptx::mbarrier_wait(empty[s], parity_of(n) ^ 1);
                ptx::mbarrier_arrive_expect_tx(full[s], KvTile::kBytes);
                ptx::cp_async_bulk_tensor_load(ring[s].data, map, {0, j * Bc, 0, h / group, b}, full[s], ptx::CachePolicy::evict_last);
            };
            ptx::mbarrier_arrive_expect_tx(smem.q_full, kGroups * QTile::kBytes);
            for (int w = 0; w < kGroups; ++w)
                ptx::cp_async_bulk_tensor_load(smem.q[w].data, Q_map, {0, i0 + 64 * w, 0, h, b}, smem.q_full,
                                               ptx::CachePolicy::evict_first);
            // In the order of use: K is multiplied one block ahead of V.
            load(smem.k, K_map, smem.k_full, smem.k_empty, 0);
            for (int n = 1; n < blocks; ++n) {
                load(smem.k, K_map, smem.k_full, smem.k_empty, n);
                load(smem.v, V_map, smem.v_full, smem.v_empty, n - 1);
            }
            load(smem.v, V_map, smem.v_full, smem.v_empty, blocks - 1);
        }
        return;
    }
    ptx::setmaxnreg_inc<Shape::kConsumerRegisters>();

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;  // row and column pair of this lane in a fragment
    const int row0 = 16 * warp;                                     // of the warp, in the block
    const bool speaks = threadIdx.x % 128 == 0;                     // for the warpgroup
    // The maximum is taken of S before scaling. That is the maximum after it only for a positive scale: others are applied first.
    const bool scale_first = scale_log2 <= 0.0f;
    const float c_log2 = scale_first ? 1.0f : scale_log2;

    // Barriers 1 and 2: the turns of the warpgroups. One is complete when its warpgroup has come and the one before has passed on.
    const auto take_turn = [&] { ptx::bar_sync(1 + wg, 256); };
    const auto pass_turn = [&] { ptx::bar_arrive(1 + (wg + 1) % kGroups, 256); };
    // Barriers 3 and 4: all warps of the warpgroup.
    const auto sync_warpgroup = [&] { ptx::bar_sync(1 + kGroups + wg, 128); };

    // o[4c + 2r + e] is row g + 8r, column 8c + 2t + e of the warp's 16 rows; s below likewise.
    float o[D / 2] = {};
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {};  // l of this lane's columns only, until the end
    std::uint32_t p[kK][4];                          // A operand of the next P V: the accumulators of two neighbouring 8-key columns of S
    const ptx::MatrixDescriptor Qs = smem.q[wg].over_columns();
    const ptx::MatrixDescriptor Ks = smem.k[0].over_columns(), Vs = smem.v[0].over_rows();

    // Starts O += P V of the n-th block. The turn is passed two products before the last: those of the other warpgroup take about as
    // long to begin.
    const auto start_pv = [&](int n, bool pass) {
        const int slot = slot_of(n);
        ptx::mbarrier_wait(smem.v_full[slot], parity_of(n));
#pragma unroll
        for (int k = 0; k < kK; ++k) ptx::keep_in_place(p[k]);
        ptx::keep_in_place(o);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kK; ++k) {
            if (k == kK - 2 && pass) pass_turn();
            ptx::wgmma<T, D, Major::mn>(o, p[k], Vs.advance(slot * KvTile::kBytes).advance(KvTile::row_step(k)), true);
        }
        ptx::wgmma_commit();
    };
    const auto finish_pv = [&](int n) {
        ptx::wgmma_wait<0>();
        ptx::keep_in_place(o);
        if (speaks) ptx::mbarrier_arrive(smem.v_empty[slot_of(n)]);
    };

    // S and P of the n-th block of keys, and O of the one before.
    const auto step = [&]<bool kFirst, bool kMasked>(int n) {
        const int slot = slot_of(n), j = blocks - 1 - n;
        float s[Bc / 2];
        ptx::mbarrier_wait(smem.k_full[slot], parity_of(n));
        take_turn();
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; ++k)
            ptx::wgmma<T, Bc>(s, Qs.advance(QTile::column_step(k)), Ks.advance(slot * KvTile::kBytes).advance(KvTile::column_step(k)),
                              k > 0);
        ptx::wgmma_commit();
        if constexpr (kFirst)
            pass_turn();
        else
            start_pv(n - 1, true);
        ptx::wgmma_wait<kFirst ? 0 : 1>();  // S is there, O not yet
        ptx::keep_in_place(s);
        if (speaks) ptx::mbarrier_arrive(smem.k_empty[slot]);

        if (scale_first) {
#pragma unroll
            for (float& x : s) x *= scale_log2;
        }
        float alpha[2];
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
            alpha[r] = ptx::ex2_approx_ftz(c_log2 * m[r] - reference);
            m[r] = m_new;
            l[r] *= alpha[r];
#pragma unroll
            for (int c = 0; c < kN; ++c)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = s[4 * c + 2 * r + e];
                    x = ptx::ex2_approx_ftz(c_log2 * x - reference);
                    l[r] += x;
                }
        }
        if constexpr (!kFirst) {
            // exercise 06.4 begin
            finish_pv(n - 1);
#pragma unroll
            for (int c = 0; c < kC; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[4 * c + e] *= alpha[e / 2];
            // exercise 06.4 end
        }
#pragma unroll
        for (int k = 0; k < kK; ++k)
#pragma unroll
            for (int e = 0; e < 4; ++e) p[k][e] = ptx::pack<T>(s[8 * k + 2 * e], s[8 * k + 2 * e + 1]);
    };

    if (blocks > 0) {
        const int whole = mask.visible(i0 + 64 * wg, Nkv) / Bc;  // blocks that need no mask: the warpgroup's first row sees all their keys
        if (wg == kGroups - 1) pass_turn();                      // the first warpgroup begins
        ptx::mbarrier_wait(smem.q_full, 0);
        step.template operator()<true, true>(0);
        int n = 1;
        for (; n < blocks - whole; ++n) step.template operator()<false, true>(n);
        for (; n < blocks; ++n) step.template operator()<false, false>(n);
        take_turn();
        start_pv(n - 1, wg < kGroups - 1);  // the last warpgroup has nobody to pass the last turn to
        finish_pv(n - 1);
    }

    // O through Q's memory, from where TMA takes it.
    sync_warpgroup();  // no warp still multiplies with Q
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
        ptx::stmatrix(tiles, smem.q[wg].chunk(row0 % 64 + lane % 16, 16 * k + lane / 16 * 8));
    }
    ptx::fence_proxy_async();  // TMA shall see what this thread wrote
    sync_warpgroup();          // and what the others did
    if (speaks) {
        ptx::cp_async_bulk_tensor_store(O_map, {0, i0 + 64 * wg, 0, h, b}, smem.q[wg].data);
        ptx::cp_async_bulk_commit();
        ptx::cp_async_bulk_wait_read<0>();  // shared memory ends with the block
    }
}

}  // namespace step06
