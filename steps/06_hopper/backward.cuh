// The backward pass with Hopper's instructions. As in 05c a thread block owns Bc keys, walks over the queries and computes the scores
// transposed. Its warpgroups have different tasks: some multiply for 64 keys each, all but dQ; one makes dQ from the dS that the others
// leave in shared memory, and has the TMA unit add it up; and TMA loads ahead, asked by a warpgroup of its own or by that of dQ.
#pragma once

#include "06_hopper/tile.hpp"
#include "attention/mask.hpp"
#include "ptx/acquire_release.hpp"
#include "ptx/barrier.hpp"
#include "ptx/cp_async_bulk.hpp"
#include "ptx/ex2.hpp"
#include "ptx/fence.hpp"
#include "ptx/mbarrier.hpp"
#include "ptx/mma.hpp"
#include "ptx/setmaxnreg.hpp"
#include "ptx/stmatrix.hpp"
#include "ptx/wgmma.hpp"
#include "simt/simt.hpp"
#include "simt/vector.hpp"
#include "simt/watch.hpp"

#include <type_traits>

namespace step06 {

using ptx::Major;
using ptx::Mbarrier;
using ptx::TensorMap;
using simt::TensorView;
using workbook::Mask;

/// How a thread block divides its work, by head dimension.
template <int D>
struct BackwardDivision;

// dK and dV of 64 keys take D registers of a warpgroup's threads: at D = 64 those of three warpgroups fit, and that of dQ loads as well.
template <>
struct BackwardDivision<64> {
    static constexpr int kGroups = 3;       // warpgroups that multiply
    static constexpr int kSplit = 1;        // of them share 64 keys
    static constexpr int kSlots = 4;        // for Q, dO and the numbers of their rows
    static constexpr int kDsSlots = 2;      // for dS
    static constexpr int kDqSlots = 1;      // for sums of dQ on their way out
    static constexpr bool kLoader = false;  // has a warpgroup that only loads
    static constexpr int kMmaRegisters = 144, kDqRegisters = 80;
};

template <>
struct BackwardDivision<128> {
    static constexpr int kGroups = 2, kSplit = 1, kSlots = 2, kDsSlots = 2, kDqSlots = 2;
    static constexpr bool kLoader = true;
    static constexpr int kMmaRegisters = 208, kDqRegisters = 72;
};

// At D = 256 two warpgroups share 64 keys: each computes the scores of half of the queries, and has half of the columns of dK and dV.
template <>
struct BackwardDivision<256> {
    static constexpr int kGroups = 2, kSplit = 2, kSlots = 2, kDsSlots = 1, kDqSlots = 1;
    static constexpr bool kLoader = true;
    static constexpr int kMmaRegisters = 208, kDqRegisters = 72;
};

template <int kD>
struct BackwardShape : BackwardDivision<kD> {
    using BackwardDivision<kD>::kGroups, BackwardDivision<kD>::kSplit, BackwardDivision<kD>::kLoader;
    static constexpr int D = kD, Br = 64;
    static constexpr int kTiles = kGroups / kSplit, Bc = 64 * kTiles;
    static constexpr int kColumns = D / kSplit;                           // of dK and dV, a warpgroup's
    static constexpr int kQueries = Br / kSplit;                          // whose scores it computes
    static constexpr int kDqGroup = kGroups, kLoaderGroup = kGroups + 1;  // numbers of warpgroups
    static constexpr int kThreads = 128 * (kGroups + 1 + kLoader), kLoaderRegisters = 24;
    static_assert(kGroups * BackwardDivision<kD>::kMmaRegisters + BackwardDivision<kD>::kDqRegisters + kLoader * kLoaderRegisters <=
                      kThreads / 128 * (65536 / kThreads / 8 * 8),
                  "more registers than the block begins with");
};

template <class T, class Shape>
struct BackwardShared {
    using KvTile = Tile<T, 64, Shape::D>;
    using QTile = Tile<T, Shape::Br, Shape::D>;
    using ScoreTile = Tile<T, Shape::Br, 64>;  // queries by keys
    struct Nothing {};
    KvTile k[Shape::kTiles];
    KvTile v[Shape::kTiles];  // also dV and dK, on their way out. 06f and 06g rely on v behind k, and d_o behind q
    QTile q[Shape::kSlots], d_o[Shape::kSlots];
    ScoreTile ds[Shape::kDsSlots][Shape::kTiles];
    [[no_unique_address]] std::conditional_t<(Shape::kSplit > 1), ScoreTile, Nothing> p;  // for the warpgroups that share keys
    alignas(128) float dq[Shape::kDqSlots][4][16 * Shape::Br];                            // what each warp adds to dQ_acc
    alignas(128) float statistics[Shape::kSlots][2 * Shape::Br];                          // LSE and D, as prepare() leaves them
    // A full barrier completes a phase when its data are there, an empty one when the readers have done with them.
    Mbarrier q_full[Shape::kSlots], do_full[Shape::kSlots], empty[Shape::kSlots];
    Mbarrier ds_empty[Shape::kDsSlots];
};

/// A turn uses slot turn % slots of a ring, for the (turn / slots)-th time, counted from 0.
SIMT_DEVICE unsigned parity_of(int turn, int slots) { return static_cast<unsigned>(turn / slots % 2); }

/// Starts S^T = K Q^T, or dP^T = V dO^T: 64 keys by as many queries as x is for.
template <class T, class KvTile, class QTile, int kScores>
SIMT_DEVICE void start_product(float (&x)[kScores], const ptx::MatrixDescriptor& keys, const ptx::MatrixDescriptor& queries) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < KvTile::kColumns / 16; ++k)
        ptx::wgmma<T, 2 * kScores>(x, keys.advance(KvTile::column_step(k)), queries.advance(QTile::column_step(k)), k > 0);
    ptx::wgmma_commit();
}

/// Starts dV += P^T dO, or dK += dS^T Q: 64 keys by as many columns as `sum` is for, over the queries whose P or dS the warpgroup has in a.
template <class T, class QTile, int kSums, int kN>
SIMT_DEVICE void start_sum(float (&sum)[kSums], std::uint32_t (&a)[kN][4], const ptx::MatrixDescriptor& queries) {
#pragma unroll
    for (int n = 0; n < kN; ++n) ptx::keep_in_place(a[n]);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kN; ++n) ptx::wgmma<T, 2 * kSums, Major::mn>(sum, a[n], queries.advance(QTile::row_step(n)), true);
    ptx::wgmma_commit();
}

// What a warp does with its fragments. g = lane / 4 and t = lane % 4 are row and column pair of a lane; kN counts queries 16 at a time.

/// LSE or D of a lane's queries: 16n + 2t, the next one, and those eight further.
template <int kN>
SIMT_DEVICE void load_statistics(float4 (&of_rows)[kN], const float* from, int t) {
#pragma unroll
    for (int n = 0; n < kN; ++n) of_rows[n] = simt::load_shared_16<float4>(from + 16 * n + 4 * t);
}

/// P^T = 2^(c S^T - LSE): s[4i + 2r + e] is S^T of key g + 8r of the warp's, query 8i + 2t + e.
/// @param hidden kMasked: of a key and a query, counted from key g and query 2t, whether the query does not see the key
template <class T, bool kMasked, int kN, class Hidden>
SIMT_DEVICE void exponentials(std::uint32_t (&p)[kN][4], const float (&s)[8 * kN], const float4 (&of_rows)[kN], float c, Hidden&& hidden) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
        const float lse[] = {of_rows[n].x, of_rows[n].y, of_rows[n].z, of_rows[n].w};
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float y[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    y[e] = c * s[8 * n + 4 * half + 2 * r + e] - lse[2 * half + e];
                    if constexpr (kMasked)
                        if (hidden(8 * r, 16 * n + 8 * half + e)) y[e] = -INFINITY;
                }
                p[n][2 * half + r] = ptx::pack<T>(ptx::ex2_approx_ftz(y[0]), ptx::ex2_approx_ftz(y[1]));
            }
    }
}

/// dS^T = P^T o (dP^T - D), of which dp is laid out as s above.
template <class T, int kN>
SIMT_DEVICE void score_gradients(std::uint32_t (&ds)[kN][4], const std::uint32_t (&p)[kN][4], const float (&dp)[8 * kN],
                                 const float4 (&of_rows)[kN]) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
        const float row_sum[] = {of_rows[n].x, of_rows[n].y, of_rows[n].z, of_rows[n].w};
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float2 weight = ptx::unpack<T>(p[n][2 * half + r]);
                const float* const x = dp + 8 * n + 4 * half + 2 * r;
                ds[n][2 * half + r] = ptx::pack<T>(weight.x * (x[0] - row_sum[2 * half]), weight.y * (x[1] - row_sum[2 * half + 1]));
            }
    }
}

/// P^T or dS^T of the warp's keys, which begin at `key`, to a tile of queries by keys.
template <class ScoreTile, int kN>
SIMT_DEVICE void share(const std::uint32_t (&a)[kN][4], ScoreTile& to, int query, int key, int lane) {
#pragma unroll
    for (int n = 0; n < kN; ++n) ptx::stmatrix<true>(a[n], to.chunk(query + 16 * n + lane / 16 * 8 + lane % 8, key + lane / 8 % 2 * 8));
}

/// What the warp has of dQ^T, 16 columns by Br queries, to where lane 0 has TMA take it from: in the order of the registers.
/// @tparam kSlots such places that the warp uses in turn
template <int kSlots, int kSums>
SIMT_DEVICE void stage_dq(const float (&dq)[kSums], float* mine, int lane) {
    if (lane == 0) ptx::cp_async_bulk_wait_read<kSlots - 1>();  // TMA has read what lay there
    __syncwarp();                                               // for all lanes
#pragma unroll
    for (int c = 0; c < kSums / 4; ++c)
        simt::store_shared_16(mine + 128 * c + 4 * lane, float4{dq[4 * c], dq[4 * c + 1], dq[4 * c + 2], dq[4 * c + 3]});
    ptx::fence_proxy_async();  // TMA shall see what this thread wrote
    __syncwarp();              // and what the others did
}

/// `factor` times a warp's dK or dV, of 16 keys from `key` on, to a tile, from `column` on.
template <class T, class KvTile, int kSums>
SIMT_DEVICE void store_sums(const float (&sum)[kSums], float factor, KvTile& to, int key, int column, int lane) {
#pragma unroll
    for (int k = 0; k < kSums / 8; ++k) {
        std::uint32_t tiles[4];  // 8 x 8 each: keys 0-7 and 8-15 of the left columns, then of the right ones
#pragma unroll
        for (int e = 0; e < 4; ++e) tiles[e] = ptx::pack<T>(sum[8 * k + 2 * e] * factor, sum[8 * k + 2 * e + 1] * factor);
        ptx::stmatrix(tiles, to.chunk(key + lane % 16, column + 16 * k + lane / 16 * 8));
    }
}

/// @tparam kOrdered blocks of keys add to dQ in the order of their keys, the last first: so its bits are the same in each run
template <class T, class Shape, bool kOrdered, class Watch>
__global__ __launch_bounds__(Shape::kThreads, 1) void backward(  // tensors as their maps see them:
    const __grid_constant__ TensorMap Q_map,                     // (B, Hq, D / 64, Nq, 64)
    const __grid_constant__ TensorMap K_map,                     // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap V_map,                     // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap dO_map,                    // (B, Hq, D / 64, Nq, 64)
    const __grid_constant__ TensorMap dK_map,                    // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap dV_map,                    // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap LSE_D_map,                 // (B Hq ceil(Nq / Br), 2 Br)
    TensorView<float, 4> dQ_acc,                                 // (B, Hq, ceil(Nq / Br), Br D)
    TensorView<std::uint32_t, 4> dQ_turn,                        // kOrdered: (B, Hq, ceil(Nq / Br), 4), how many blocks of keys have added
    int Nq, int Nkv, int kv_heads, float scale, Mask mask, Watch watch) {
    constexpr int D = Shape::D, Br = Shape::Br, Bc = Shape::Bc, kGroups = Shape::kGroups, kTiles = Shape::kTiles, kSplit = Shape::kSplit;
    constexpr int kSlots = Shape::kSlots, kDqSlots = Shape::kDqSlots;
    // A block that is further ahead of others waits longer for them. (At D = 64 registers spill with one slot.)
    constexpr int kDsSlots = kOrdered && D == 128 ? 1 : Shape::kDsSlots;
    constexpr int kQueries = Shape::kQueries, kColumns = Shape::kColumns;
    constexpr int kN = kQueries / 16;  // of queries 16 at a time
    using Smem = BackwardShared<T, Shape>;
    using KvTile = typename Smem::KvTile;
    using QTile = typename Smem::QTile;
    using ScoreTile = typename Smem::ScoreTile;
    // gridDim.x heads side by side: their blocks of the first keys, which are the longest of a causal problem, come first. Where blocks
    // wait for those of later keys, these come first.
    const int flat_head = blockIdx.z * gridDim.x + blockIdx.x, j0 = (kOrdered ? gridDim.y - 1 - blockIdx.y : blockIdx.y) * Bc;
    const int b = flat_head / kv_heads, hkv = flat_head % kv_heads, group = dQ_acc.extent(1) / kv_heads;
    if (b >= dQ_acc.extent(0)) return;

    // The turns: for each query head that shares the keys, the blocks of queries that see any of them.
    const int first = mask.first_row(j0) / Br, per_head = (Nq + Br - 1) / Br - first, turns = group * per_head;
    struct Place {
        int h, n;  // query head and block of queries
    };
    // Counted, for integers are divided slowly.
    const auto next = [&](Place at) { return at.n + 1 < first + per_head ? Place{at.h, at.n + 1} : Place{at.h + 1, first}; };
    const Place begin = {hkv * group, first};

    auto& smem = simt::shared<Smem>();
    if (threadIdx.x == 0) {
        watch.begin();
        for (int s = 0; s < kSlots; ++s) {
            ptx::mbarrier_init(smem.q_full[s], 1, "q_full", s);
            ptx::mbarrier_init(smem.do_full[s], 1, "do_full", s);
            ptx::mbarrier_init(smem.empty[s], 4 * kGroups, "empty", s);  // each warp that multiplies
        }
        for (int s = 0; s < kDsSlots; ++s) ptx::mbarrier_init(smem.ds_empty[s], 1, "ds_empty", s);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    // By a shuffle, so that the compiler knows that they are the same in all lanes.
    const int warp_of_block = __shfl_sync(simt::kFullMask, static_cast<int>(threadIdx.x / 32), 0);
    const int wg = warp_of_block / 4, warp = warp_of_block % 4, lane = threadIdx.x % 32;
    const bool speaks = threadIdx.x % 128 == 0;  // for its warpgroup

    // What a turn reads; the first brings K and V along. One thread calls.
    const auto load = [&](int turn, Place at) {
        const int slot = turn % kSlots, h = at.h, n = at.n;
        const auto load_keys = [&](KvTile(&tiles)[kTiles], const TensorMap& map, Mbarrier& full) {
            for (int w = 0; w < kTiles; ++w)
                ptx::cp_async_bulk_tensor_load(tiles[w].data, map, {0, j0 + 64 * w, 0, hkv, b}, full, ptx::CachePolicy::evict_first);
        };
        const unsigned keys = turn == 0 ? sizeof smem.k : 0;
        ptx::mbarrier_wait(smem.empty[slot], parity_of(turn, kSlots) ^ 1);
        ptx::mbarrier_arrive_expect_tx(smem.q_full[slot], keys + QTile::kBytes + sizeof smem.statistics[slot]);
        if (turn == 0) load_keys(smem.k, K_map, smem.q_full[slot]);
        ptx::cp_async_bulk_tensor_load(smem.q[slot].data, Q_map, {0, n * Br, 0, h, b}, smem.q_full[slot], ptx::CachePolicy::evict_last);
        const int row = (b * dQ_acc.extent(1) + h) * dQ_acc.extent(2) + n;
        ptx::cp_async_bulk_tensor_load(smem.statistics[slot], LSE_D_map, {0, row}, smem.q_full[slot], ptx::CachePolicy::evict_last);
        ptx::mbarrier_arrive_expect_tx(smem.do_full[slot], keys + QTile::kBytes);
        if (turn == 0) load_keys(smem.v, V_map, smem.do_full[slot]);
        ptx::cp_async_bulk_tensor_load(smem.d_o[slot].data, dO_map, {0, n * Br, 0, h, b}, smem.do_full[slot], ptx::CachePolicy::evict_last);
    };

    if (Shape::kLoader && wg == Shape::kLoaderGroup) {  // of which one lane works
        ptx::setmaxnreg_dec<Shape::kLoaderRegisters>();
        if (speaks) {
            Place at = begin;
            for (int turn = 0; turn < turns; ++turn, at = next(at)) load(turn, at);
        }
        return;
    }

    if (wg == Shape::kDqGroup) {
        ptx::setmaxnreg_dec<Shape::kDqRegisters>();
        const ptx::MatrixDescriptor Ks = smem.k[0].over_rows(), dSs = smem.ds[0][0].over_columns();
        // Waits until all blocks of later keys that the turn's last row sees have added to dQ.
        const auto take_turn = [&](Place at) {
            const int last_row = min((at.n + 1) * Br, Nq) - 1, last = (mask.visible(last_row, Nkv) - 1) / Bc;
            ptx::wait_acquire(&dQ_turn(b, at.h, at.n, warp), last - j0 / Bc);
            ptx::fence_proxy_async_global();  // what they did is there for TMA, too
        };
        const auto pass_turn = [&](Place at) {
            ptx::cp_async_bulk_wait<0>();  // this warp's additions are in global memory
            ptx::red_release_add(&dQ_turn(b, at.h, at.n, warp), 1);
        };
        Place ahead = begin;  // what is loaded next
        const auto load_next = [&](int turn) {
            load(turn, ahead);
            ahead = next(ahead);
        };
        if (!Shape::kLoader && speaks)
            for (int turn = 0; turn < min(kSlots, turns); ++turn) load_next(turn);
        Place at = begin, before = begin;  // before: of the last turn
        for (int turn = 0; turn < turns; ++turn, before = at, at = next(at)) {
            const int slot = turn % kDsSlots;
            // All warps that multiply are through with the turn: dS is whole. They wait for S, dP and dK, and nobody for dQ: so it comes
            // last.
            ptx::mbarrier_wait(smem.empty[turn % kSlots], parity_of(turn, kSlots));
            if (!Shape::kLoader && speaks && turn + kSlots < turns) load_next(turn + kSlots);
            const auto sum = dQ_acc(b, at.h, at.n);  // (Br D)

            // dQ^T = K^T dS^T, 64 columns of dQ at a time: over the keys of all warpgroups.
#pragma unroll
            for (int panel = 0; panel < D / 64; ++panel) {
                float dq[Br / 2];
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < Bc / 16; ++k)
                    ptx::wgmma<T, Br, Major::mn>(dq, Ks.advance(panel * KvTile::kPanel + k / 4 * KvTile::kBytes + KvTile::row_step(k % 4)),
                                                 dSs.advance(slot * static_cast<int>(sizeof smem.ds[0]))
                                                     .advance(k / 4 * ScoreTile::kBytes + ScoreTile::column_step(k % 4)),
                                                 k > 0);
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                ptx::keep_in_place(dq);
                if (panel == D / 64 - 1 && speaks) ptx::mbarrier_arrive(smem.ds_empty[slot]);
                // In dQ_acc what a warp adds lies side by side, in the order of its registers; finish() puts it in order.
                float* const mine = smem.dq[(turn * (D / 64) + panel) % kDqSlots][warp];
                stage_dq<kDqSlots>(dq, mine, lane);
                if (lane == 0) {
                    if (kOrdered && panel == 0) {
                        if (turn > 0) pass_turn(before);
                        take_turn(at);
                    }
                    ptx::cp_reduce_async_bulk_add(&sum((4 * panel + warp) * 16 * Br), mine, 16 * Br);
                    ptx::cp_async_bulk_commit();
                }
            }
        }
        if (lane == 0) {
            if (kOrdered) pass_turn(before);
            ptx::cp_async_bulk_wait_read<0>();  // shared memory ends with the block
        }
        return;
    }

    ptx::setmaxnreg_inc<Shape::kMmaRegisters>();
    const int g = lane / 4, t = lane % 4;               // row and column pair of this lane in a fragment
    const int tile = wg / kSplit, j1 = j0 + 64 * tile;  // the warpgroup's keys: of the block, and the first of all
    const int row0 = 16 * warp;                         // the warp's first key of these
    const int own_query = wg % kSplit * kQueries, column = wg % kSplit * kColumns;  // the warpgroup's first
    const float scale_log2 = scale * 1.4426950408889634f;
    const ptx::MatrixDescriptor Ks = smem.k[tile].over_columns(), Vs = smem.v[tile].over_columns();
    const ptx::MatrixDescriptor Qs = smem.q[0].over_columns().advance(own_query * 128);
    const ptx::MatrixDescriptor dOs = smem.d_o[0].over_columns().advance(own_query * 128);
    const ptx::MatrixDescriptor Q_rows = smem.q[0].over_rows().advance(column / 64 * QTile::kPanel);
    const ptx::MatrixDescriptor dO_rows = smem.d_o[0].over_rows().advance(column / 64 * QTile::kPanel);
    // All warps that have the same keys.
    const auto sync_sharers = [&] { ptx::bar_sync(1 + tile, 128 * kSplit); };

    // dk[4c + 2r + e] is key g + 8r of the warp's 16, column 8c + 2t + e of the warpgroup's; dv likewise.
    float dk[kColumns / 2] = {}, dv[kColumns / 2] = {};
    ptx::keep_in_place(dk);
    ptx::keep_in_place(dv);

    // dV += P^T dO and dK += dS^T Q over all queries of the turn, where warpgroups share keys.
    const auto start_shared_sum = [&](float(&sum)[kColumns / 2], const ScoreTile& a, const ptx::MatrixDescriptor& queries) {
        ptx::wgmma_fence();
#pragma unroll
        for (int n = 0; n < Br / 16; ++n)
            ptx::wgmma<T, kColumns, Major::mn, Major::mn>(sum, a.over_rows().advance(ScoreTile::row_step(n)),
                                                          queries.advance(QTile::row_step(n)), true);
        ptx::wgmma_commit();
    };
    const auto step = [&]<bool kMasked>(int turn, int i0) {
        const int slot = turn % kSlots, ds_slot = turn % kDsSlots;
        const unsigned parity = parity_of(turn, kSlots);
        float x[Shape::kQueries / 2];       // S^T, then dP^T: x[4c + 2r + e] is key g + 8r of the warp's, query 8c + 2t + e
        std::uint32_t p[kN][4], ds[kN][4];  // A operands: P^T and dS^T
        float4 of_rows[kN];
        const auto wait_for_ds_slot = [&] { ptx::mbarrier_wait(smem.ds_empty[ds_slot], parity_of(turn, kDsSlots) ^ 1); };

        // Loads from shared memory come before products are started: behind them they would wait in one queue.
        ptx::mbarrier_wait(smem.q_full[slot], parity);
        load_statistics(of_rows, smem.statistics[slot] + own_query, t);
        start_product<T, KvTile, QTile>(x, Ks, Qs.advance(slot * QTile::kBytes));
        ptx::wgmma_wait<0>();
        ptx::keep_in_place(x);
        exponentials<T, kMasked>(p, x, of_rows, scale_log2, [&](int key, int query) {
            key += j1 + row0 + g, query += i0 + own_query + 2 * t;
            return key >= Nkv || mask.hides(query, key);
        });
        if constexpr (kSplit > 1) {
            sync_sharers();  // nobody multiplies with P and dS of the turn before any more
            share(p, smem.p, own_query, row0, lane);
        }

        load_statistics(of_rows, smem.statistics[slot] + Br + own_query, t);
        if constexpr (kDsSlots > 1) wait_for_ds_slot();
        ptx::mbarrier_wait(smem.do_full[slot], parity);
        start_product<T, KvTile, QTile>(x, Vs, dOs.advance(slot * QTile::kBytes));
        if constexpr (kSplit == 1) start_sum<T, QTile>(dv, p, dO_rows.advance(slot * QTile::kBytes));
        ptx::wgmma_wait<kSplit == 1 ? 1 : 0>();  // dP is there, dV not yet
        ptx::keep_in_place(x);
        score_gradients<T>(ds, p, x, of_rows);
        if constexpr (kSplit == 1) start_sum<T, QTile>(dk, ds, Q_rows.advance(slot * QTile::kBytes));
        // dS to the warpgroup that makes dQ, under the products of dK.
        if constexpr (kDsSlots == 1) wait_for_ds_slot();
        share(ds, smem.ds[ds_slot][tile], own_query, row0, lane);
        ptx::fence_proxy_async();  // wgmmas of others shall see what this thread wrote
        __syncwarp();              // and what the others of the warp did
        if constexpr (kSplit > 1) {
            sync_sharers();  // P and dS are whole
            start_shared_sum(dv, smem.p, dO_rows.advance(slot * QTile::kBytes));
            start_shared_sum(dk, smem.ds[ds_slot][tile], Q_rows.advance(slot * QTile::kBytes));
        }
        ptx::wgmma_wait<0>();
        ptx::keep_in_place(dv);
        ptx::keep_in_place(dk);
        if (lane == 0) ptx::mbarrier_arrive(smem.empty[slot]);
    };

    // The first so many turns of a head need a mask: from then on all rows see the warpgroup's last key, if there is such a key.
    const int masked = j1 + 64 > Nkv ? per_head : (mask.first_row(j1 + 63) + Br - 1) / Br - first;
    for (int turn = 0; turn < turns;) {
        int n = 0;
        for (; n < masked; ++n, ++turn) step.template operator()<true>(turn, (first + n) * Br);
        for (; n < per_head; ++n, ++turn) step.template operator()<false>(turn, (first + n) * Br);
    }

    // dV and dK through the memory of V, from where TMA takes them.
    const auto store = [&](const float(&sum)[kColumns / 2], const TensorMap& map, float factor) {
        sync_sharers();  // no warp still multiplies with V, and TMA has read what lay there
        store_sums<T>(sum, factor, smem.v[tile], row0, column, lane);
        ptx::fence_proxy_async();  // TMA shall see what this thread wrote
        sync_sharers();            // and what the others did
        if (speaks && wg % kSplit == 0 && j1 < Nkv) {
            ptx::cp_async_bulk_tensor_store(map, {0, j1, 0, hkv, b}, smem.v[tile].data);
            ptx::cp_async_bulk_commit();
            ptx::cp_async_bulk_wait_read<0>();
        }
    };
    store(dv, dV_map, 1.0f);
    store(dk, dK_map, scale);
    if (threadIdx.x == 0) watch.end();
}

}  // namespace step06
