// 06e with less of dQ to add: two neighbouring blocks of keys make a cluster and send each other their dS. Each then makes half of the
// columns of dQ, over the keys of both.
#pragma once

#include "06_hopper/backward.cuh"
#include "06_hopper/repeat.hpp"
#include "ptx/cluster.hpp"

namespace step06 {

// With 80 queries a turn shared memory is full: the warpgroup of dQ has 72 registers a thread, for 40 sums, and loads as well.
struct ExchangeShape {
    static constexpr int D = 128, Br = 80, Bc = 128;
    static constexpr int kCluster = 2;  // blocks
    static constexpr int kGroups = 2, kTiles = 2, kSplit = 1, kSlots = 2, kDsSlots = 1, kDqSlots = 1;
    static constexpr int kDqGroup = kGroups, kThreads = 128 * (kGroups + 1);
    static constexpr int kMmaRegisters = 216, kDqRegisters = 72;
    static_assert(kGroups * kMmaRegisters + kDqRegisters <= kThreads / 128 * (65536 / kThreads / 8 * 8),
                  "more registers than the block begins with");
    static_assert(D / 64 == kCluster, "each block makes one panel of dQ");
};

template <class T, class Shape>
struct ExchangeShared : BackwardShared<T, Shape> {
    Tile<T, 64, 64> peer_k[Shape::kTiles];  // of the other block's keys the columns of dQ that this block makes
    // Comes from the other block.
    typename BackwardShared<T, Shape>::ScoreTile peer_ds[Shape::kDsSlots][Shape::kTiles];
    Mbarrier ds_full[Shape::kDsSlots], peer_full[Shape::kDsSlots];
};

/// What the warps of a block know of themselves.
struct Role {
    int wg, warp, lane;  // warpgroup of the block, warp of the warpgroup, lane of the warp
    bool speaks;         // for its warpgroup
    unsigned peer;       // rank of the block that it exchanges dS with
};

/// One thread calls, before a barrier of the cluster: the other block will count at these barriers.
template <class T, class Shape>
SIMT_DEVICE void init_exchange(ExchangeShared<T, Shape>& smem) {
    for (int s = 0; s < Shape::kSlots; ++s) {
        ptx::mbarrier_init(smem.q_full[s], 1, "q_full", s);
        ptx::mbarrier_init(smem.do_full[s], 1, "do_full", s);
        ptx::mbarrier_init(smem.empty[s], 4 * Shape::kGroups, "empty", s);  // each warp that multiplies
    }
    for (int s = 0; s < Shape::kDsSlots; ++s) {
        ptx::mbarrier_init(smem.ds_full[s], Shape::kGroups, "ds_full", s);
        ptx::mbarrier_init(smem.ds_empty[s], 2, "ds_empty", s);  // the warpgroups of dQ of both blocks
        ptx::mbarrier_init(smem.peer_full[s], 1, "peer_full", s);
    }
}

/// Starts dQ^T = K^T dS^T for 64 columns of dQ: over the keys of this block, then over those of the other, whose dS comes.
/// @param panel the columns
template <class T, class Shape>
SIMT_DEVICE void start_dq(float (&dq)[Shape::Br / 2], ExchangeShared<T, Shape>& smem, int panel, int turn, bool speaks) {
    using Smem = ExchangeShared<T, Shape>;
    using KvTile = typename Smem::KvTile;
    using ScoreTile = typename Smem::ScoreTile;
    using PanelTile = Tile<T, 64, 64>;
    const int slot = turn % Shape::kDsSlots, of_slot = slot * static_cast<int>(sizeof smem.ds[0]);
    const unsigned parity = parity_of(turn, Shape::kDsSlots);
    const ptx::MatrixDescriptor Ks = smem.k[0].over_rows().advance(panel * KvTile::kPanel), peer_Ks = smem.peer_k[0].over_rows();
    const ptx::MatrixDescriptor dSs = smem.ds[0][0].over_columns().advance(of_slot);
    const ptx::MatrixDescriptor peer_dSs = smem.peer_ds[0][0].over_columns().advance(of_slot);
    ptx::mbarrier_wait(smem.ds_full[slot], parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Shape::Bc / 16; ++k)
        ptx::wgmma<T, Shape::Br, Major::mn>(dq, Ks.advance(k / 4 * KvTile::kBytes + KvTile::row_step(k % 4)),
                                            dSs.advance(k / 4 * ScoreTile::kBytes + ScoreTile::column_step(k % 4)), k > 0);
    if (speaks) ptx::mbarrier_arrive_expect_tx(smem.peer_full[slot], sizeof smem.peer_ds[0]);
    ptx::mbarrier_wait(smem.peer_full[slot], parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Shape::Bc / 16; ++k)
        ptx::wgmma<T, Shape::Br, Major::mn>(dq, peer_Ks.advance(k / 4 * PanelTile::kBytes + PanelTile::row_step(k % 4)),
                                            peer_dSs.advance(k / 4 * ScoreTile::kBytes + ScoreTile::column_step(k % 4)), true);
    ptx::wgmma_commit();
}

/// Waits for the products. Both blocks may then write dS of a later turn: theirs, and thereby what they send to each other.
template <class T, class Shape>
SIMT_DEVICE void finish_dq(float (&dq)[Shape::Br / 2], ExchangeShared<T, Shape>& smem, int turn, const Role& me) {
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(dq);
    if (me.speaks) {
        ptx::mbarrier_arrive(smem.ds_empty[turn % Shape::kDsSlots]);
        ptx::mbarrier_arrive_remote(smem.ds_empty[turn % Shape::kDsSlots], me.peer);
    }
}

/// A turn of a warpgroup that multiplies. dk[4c + 2r + e] is key g + 8r of the warp's 16, column 8c + 2t + e; dv likewise.
/// @param keys of the head from the lane's first one, g, on; 0 or less where there are none. kMasked: not all lanes have as many as they
/// ask for
template <bool kMasked, class T, class Shape>
SIMT_DEVICE void multiply(float (&dk)[Shape::D / 2], float (&dv)[Shape::D / 2], ExchangeShared<T, Shape>& smem, int turn, const Role& me,
                          float scale_log2, int keys) {
    constexpr int Br = Shape::Br, kN = Br / 16;  // of queries 16 at a time
    using Smem = ExchangeShared<T, Shape>;
    using KvTile = typename Smem::KvTile;
    using QTile = typename Smem::QTile;
    const int wg = me.wg, t = me.lane % 4;
    // V lies behind K, and dO behind Q, as BackwardShared has them: at a distance, so that fewer descriptors are held.
    const ptx::MatrixDescriptor Ks = smem.k[wg].over_columns(), Vs = Ks.advance(sizeof smem.k);
    const ptx::MatrixDescriptor Qs = smem.q[0].over_columns(), dOs = Qs.advance(sizeof smem.q);
    const ptx::MatrixDescriptor Q_rows = smem.q[0].over_rows(), dO_rows = Q_rows.advance(sizeof smem.q);
    const auto sync_warpgroup = [&] { ptx::bar_sync(1 + wg, 128); };

    const int slot = turn % Shape::kSlots, ds_slot = turn % Shape::kDsSlots;
    const unsigned parity = parity_of(turn, Shape::kSlots);
    float x[Br / 2];                    // S^T, then dP^T: x[4c + 2r + e] is key g + 8r of the warp's, query 8c + 2t + e
    std::uint32_t p[kN][4], ds[kN][4];  // A operands: P^T and dS^T
    float4 of_rows[kN];

    // As in 06e loads from shared memory come before products.
    ptx::mbarrier_wait(smem.q_full[slot], parity);
    load_statistics(of_rows, smem.statistics[slot], t);
    start_product<T, KvTile, QTile>(x, Ks, Qs.advance(slot * QTile::kBytes));
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(x);
    exponentials<T, kMasked>(p, x, of_rows, scale_log2, [&](int key, int) { return key >= keys; });

    load_statistics(of_rows, smem.statistics[slot] + Br, t);
    ptx::mbarrier_wait(smem.do_full[slot], parity);
    start_product<T, KvTile, QTile>(x, Vs, dOs.advance(slot * QTile::kBytes));
    start_sum<T, QTile>(dv, p, dO_rows.advance(slot * QTile::kBytes));
    ptx::wgmma_wait<1>();  // dP is there, dV not yet
    ptx::keep_in_place(x);
    score_gradients<T>(ds, p, x, of_rows);

    // dS to the warpgroup that makes dQ, and to that of the other block.
    ptx::mbarrier_wait(smem.ds_empty[ds_slot], parity_of(turn, Shape::kDsSlots) ^ 1);
    share(ds, smem.ds[ds_slot][wg], 0, 16 * me.warp, me.lane);
    ptx::fence_proxy_async();  // wgmmas of others and TMA shall see what this thread wrote
    sync_warpgroup();          // and what the others did
    if (me.speaks) {
        ptx::mbarrier_arrive(smem.ds_full[ds_slot]);
        ptx::cp_async_bulk_to_peer(smem.peer_ds[ds_slot][wg].data, smem.ds[ds_slot][wg].data, sizeof smem.ds[0][0], smem.peer_full[ds_slot],
                                   me.peer);
    }

    start_sum<T, QTile>(dk, ds, Q_rows.advance(slot * QTile::kBytes));
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(dv);
    ptx::keep_in_place(dk);
    if (me.lane == 0) ptx::mbarrier_arrive(smem.empty[slot]);
}

/// `factor` times a warpgroup's dK or dV through its part of V's memory, from where TMA takes it.
/// @param key the first one; keys from Nkv on are left out
template <class T, class Shape>
SIMT_DEVICE void store_gradient(const float (&sum)[Shape::D / 2], const TensorMap& map, float factor, ExchangeShared<T, Shape>& smem,
                                const Role& me, int key, int hkv, int b, int Nkv) {
    const auto sync_warpgroup = [&] { ptx::bar_sync(1 + me.wg, 128); };
    sync_warpgroup();  // no warp still multiplies with V, and TMA has read what lay there
    store_sums<T>(sum, factor, smem.v[me.wg], 16 * me.warp, 0, me.lane);
    ptx::fence_proxy_async();  // TMA shall see what this thread wrote
    sync_warpgroup();          // and what the others did
    if (me.speaks && key < Nkv) {
        ptx::cp_async_bulk_tensor_store(map, {0, key, 0, hkv, b}, smem.v[me.wg].data);
        ptx::cp_async_bulk_commit();
        ptx::cp_async_bulk_wait_read<0>();
    }
}

template <class T, class Shape, class Watch>
__global__ __launch_bounds__(Shape::kThreads, 1) void exchange(  // tensors as their maps see them:
    const __grid_constant__ TensorMap Q_map,                     // (B, Hq, D / 64, Nq, 64)
    const __grid_constant__ TensorMap K_map,                     // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap K_panel_map,               // the same, by boxes of one panel
    const __grid_constant__ TensorMap V_map,                     // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap dO_map,                    // (B, Hq, D / 64, Nq, 64)
    const __grid_constant__ TensorMap dK_map,                    // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap dV_map,                    // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap LSE_D_map,                 // (B Hq ceil(Nq / Br), 2 Br)
    TensorView<float, 4> dQ_acc,                                 // (B, Hq, ceil(Nq / Br), Br D)
    int Nkv, int group, float scale, Watch watch) {
    constexpr int D = Shape::D, Br = Shape::Br, Bc = Shape::Bc, kTiles = Shape::kTiles, kSlots = Shape::kSlots;
    using Smem = ExchangeShared<T, Shape>;
    using QTile = typename Smem::QTile;
    const int j0 = blockIdx.x * Bc, hkv = blockIdx.y, b = blockIdx.z;
    const int rank = static_cast<int>(ptx::cluster_rank());

    // The turns: for each query head that shares the keys, all blocks of queries. Both blocks of the cluster have the same ones.
    const int per_head = dQ_acc.extent(2), turns = group * per_head;
    auto& smem = simt::shared<Smem>();
    if (threadIdx.x == 0) {
        watch.begin();
        init_exchange(smem);
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();  // the other block will count at these barriers
    // By a shuffle, so that the compiler knows that they are the same in all lanes.
    const int warp_of_block = __shfl_sync(simt::kFullMask, static_cast<int>(threadIdx.x / 32), 0);
    const int wg = warp_of_block / 4, warp = warp_of_block % 4, lane = threadIdx.x % 32;
    const bool speaks = threadIdx.x % 128 == 0;  // for its warpgroup
    const Role me{wg, warp, lane, speaks, static_cast<unsigned>(rank ^ 1)};

    // What a turn reads; the first brings K and V along, and the other block's K. One thread calls.
    const auto load = [&]<bool kFirst>(int turn, int h, int n) {
        for (; n >= per_head; n -= per_head) ++h;
        const int slot = turn % kSlots;
        ptx::mbarrier_wait(smem.empty[slot], parity_of(turn, kSlots) ^ 1);
        const unsigned k_bytes = kFirst ? sizeof smem.k : 0;
        ptx::mbarrier_arrive_expect_tx(smem.q_full[slot], k_bytes + QTile::kBytes + sizeof smem.statistics[slot]);
        if (kFirst)
            for (int w = 0; w < kTiles; ++w)
                ptx::cp_async_bulk_tensor_load(smem.k[w].data, K_map, {0, j0 + 64 * w, 0, hkv, b}, smem.q_full[slot]);
        ptx::cp_async_bulk_tensor_load(smem.q[slot].data, Q_map, {0, n * Br, 0, h, b}, smem.q_full[slot], ptx::CachePolicy::evict_last);
        const int row = (b * dQ_acc.extent(1) + h) * per_head + n;
        ptx::cp_async_bulk_tensor_load(smem.statistics[slot], LSE_D_map, {0, row}, smem.q_full[slot], ptx::CachePolicy::evict_last);
        const unsigned v_bytes = kFirst ? sizeof smem.v + sizeof smem.peer_k : 0;
        ptx::mbarrier_arrive_expect_tx(smem.do_full[slot], v_bytes + QTile::kBytes);
        for (int w = 0; kFirst && w < kTiles; ++w) {
            ptx::cp_async_bulk_tensor_load(smem.v[w].data, V_map, {0, j0 + 64 * w, 0, hkv, b}, smem.do_full[slot]);
            ptx::cp_async_bulk_tensor_load(smem.peer_k[w].data, K_panel_map, {0, (j0 ^ Bc) + 64 * w, rank, hkv, b}, smem.do_full[slot]);
        }
        ptx::cp_async_bulk_tensor_load(smem.d_o[slot].data, dO_map, {0, n * Br, 0, h, b}, smem.do_full[slot], ptx::CachePolicy::evict_last);
    };

    if (wg == Shape::kDqGroup) {
        ptx::setmaxnreg_dec<Shape::kDqRegisters>();
        if (speaks) {
            load.template operator()<true>(0, hkv * group, 0);
            for (int turn = 1; turn < min(kSlots, turns); ++turn) load.template operator()<false>(turn, hkv * group, turn);
        }
        for (int turn = 0, h = hkv * group, n = 0; turn < turns; ++turn) {
            float dq[Br / 2];
            start_dq(dq, smem, rank, turn, speaks);
            // The warps that multiply release this turn's slot while these products run.
            if (speaks && turn + kSlots < turns) load.template operator()<false>(turn + kSlots, h, n + kSlots);
            finish_dq(dq, smem, turn, me);
            // In dQ_acc what a warp adds lies side by side, in the order of its registers; finish() puts it in order.
            float* const mine = smem.dq[0][warp];
            stage_dq<1>(dq, mine, lane);
            if (lane == 0) {
                const auto sum = dQ_acc(b, h, n);  // (Br D)
                ptx::cp_reduce_async_bulk_add(&sum((4 * rank + warp) * 16 * Br), mine, 16 * Br);
                ptx::cp_async_bulk_commit();
            }
            if (++n == per_head) n = 0, ++h;
        }
        if (lane == 0) ptx::cp_async_bulk_wait_read<0>();  // shared memory ends with the block
        ptx::cluster_sync();                               // until then the other block reads dS of this one, and counts at its barriers
        return;
    }

    ptx::setmaxnreg_inc<Shape::kMmaRegisters>();
    const int j1 = j0 + 64 * wg, row0 = 16 * warp;  // first key of the warpgroup, and of these the warp's first
    const float scale_log2 = scale * 1.4426950408889634f;
    // dk[4c + 2r + e] is key g + 8r of the warp's 16, column 8c + 2t + e; dv likewise.
    float dk[D / 2] = {}, dv[D / 2] = {};
    ptx::keep_in_place(dk);
    ptx::keep_in_place(dv);

    const auto walk = [&]<bool kMasked>() {
        int turn = 0;
        repeat(turns, [&] {
            multiply<kMasked>(dk, dv, smem, turn, me, scale_log2, Nkv - j1 - row0 - lane / 4);
            ++turn;
        });
    };
    if (j1 + 64 > Nkv)
        walk.template operator()<true>();
    else
        walk.template operator()<false>();

    // dV and dK through the memory of V, from where TMA takes them.
    store_gradient(dv, dV_map, 1.0f, smem, me, j1, hkv, b, Nkv);
    store_gradient(dk, dK_map, scale, smem, me, j1, hkv, b, Nkv);
    if (threadIdx.x == 0) watch.end();
    ptx::cluster_sync();
}

}  // namespace step06
