// 06b with what kept its tensor cores waiting taken away. Three warpgroups multiply in turns instead of two. A maximum is followed only
// where it has grown so far that it matters, which a vote finds out without asking the lanes of a row. And a block stays on its SM and
// goes from tile to tile, the loads of the next one under the last products of this one.
#pragma once

#include "06_hopper/repeat.hpp"
#include "06_hopper/ring.hpp"
#include "06_hopper/tile.hpp"
#include "06_hopper/tile_order.hpp"
#include "attention/mask.hpp"
#include "ptx/barrier.hpp"
#include "ptx/cluster.hpp"
#include "ptx/cp_async_bulk.hpp"
#include "ptx/elect.hpp"
#include "ptx/ex2.hpp"
#include "ptx/fence.hpp"
#include "ptx/griddepcontrol.hpp"
#include "ptx/mbarrier.hpp"
#include "ptx/mma.hpp"
#include "ptx/setmaxnreg.hpp"
#include "ptx/stmatrix.hpp"
#include "ptx/wgmma.hpp"
#include "simt/vector.hpp"
#include "simt/watch.hpp"

#include <climits>
#include <type_traits>

namespace step06 {

using ptx::Major;
using ptx::Mbarrier;
using ptx::TensorMap;
using simt::TensorView;
using workbook::Mask;

/// Shape of a thread block's work: warpgroups for 64 query rows each and one of which a lane loads, Bc keys at a time. The blocks of a
/// cluster have neighbouring tiles of a head, and load each K and V tile together, for all of them.
template <int kD, int kBc, int kWarpgroups, int kClusterBlocks>
struct VoteFirstShape {
    static constexpr int D = kD, Bc = kBc, kCluster = kClusterBlocks;
    static constexpr int kGroups = kWarpgroups;  // that multiply
    static constexpr int Br = 64 * kGroups;
    static constexpr int kConsumers = 128 * kGroups;  // threads
    static constexpr int kThreads = kConsumers + 128;
    static constexpr int kSlots = kGroups == 4 ? 8 : D == 64 ? 4 : D == 128 ? 3 : 2;
    // Four find a rhythm of their own, and one that begins a tile holds nobody up.
    static constexpr bool kTurns = kGroups < 4;
    // At D = 64, where instructions are what is short and registers hold S beside P, P comes first, and its sums tell whether m will do.
    static constexpr bool kSumsVote = D == 64;
    // O has memory of its own, so that the next Q can be loaded while it goes out. At D = 256 there is room for one slot more, not for
    // two: O goes out through its Q's, and slots are used in turn.
    static constexpr bool kOwnO = D < 256;
    static constexpr int kQSlots = kOwnO ? kGroups : kGroups + 1;
    static constexpr bool kDivides = kOwnO && kCluster == 1;  // takes parts of a tile
    // A thread block begins with the same for all threads, in steps of 8.
    static constexpr int kRegisters = 65536 / kThreads / 8 * 8, kProducerRegisters = kGroups == 2 ? 40 : kGroups == 3 ? 32 : 24;
    static constexpr int kConsumerRegisters = kGroups == 2 ? 232 : kGroups == 3 ? 160 : 112;
    static_assert(128 * kProducerRegisters + kConsumers * kConsumerRegisters <= kThreads * kRegisters, "more than there are");
    static_assert(D / 64 % kCluster == 0, "each block of the cluster loads as many panels as the others");
    static_assert(kCluster <= 2, "one block claims, and tells one other");
};

template <class T, class Shape>
struct VoteFirstShared {
    using QTile = Tile<T, 64, Shape::D>;
    using KvTile = Tile<T, Shape::Bc, Shape::D>;
    struct Nothing {};
    QTile q[Shape::kQSlots];
    KvTile k[Shape::kSlots], v[Shape::kSlots];
    std::conditional_t<Shape::kOwnO, QTile[Shape::kGroups], Nothing> o;
    Mbarrier q_full[Shape::kQSlots], q_empty[Shape::kQSlots];
    Mbarrier full[Shape::kSlots], empty[Shape::kSlots];
    Task task[Shape::kQSlots];
    std::conditional_t<(Shape::kCluster > 1), Claimed, Nothing> claimed;

    SIMT_DEVICE QTile& output(int wg, int q_slot) {
        if constexpr (Shape::kOwnO)
            return o[wg];
        else
            return q[q_slot];
    }
};

/// What a watch notes of each block of keys: for a warpgroup that multiplies when it wants its turn, when it has it, when S is there,
/// when P is computed and when O of the block before is there, which is noted before P; for the producer when it starts to load K, and V.
namespace watched {
enum Event { waits, multiplies, has_s, has_p, has_o, stored, kEvents };
enum Load { k_tile, v_tile };
}  // namespace watched

template <class T, class Shape, class Watch>
__global__ __launch_bounds__(Shape::kThreads, 1) void vote_first(  // tensors as their maps see them:
    const __grid_constant__ TensorMap Q_map,                       // (B, Hq, D / 64, Nq, 64)
    const __grid_constant__ TensorMap K_map,                       // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap V_map,                       // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap O_map,                       // (B, Hq, D / 64, Nq, 64)
    TensorView<float, 3> LSE3,                                     // (B, Hq, Nq)
    TensorView<int, 1> claims,      // (2): tiles claimed, blocks or clusters that are through; 0 before, after
    TensorView<float, 3> O_part,    // (pieces of divided tiles, Br, D)
    TensorView<float, 2> LSE_part,  // (pieces, Br)
    TileOrder order, int Nkv,
    int group,         // query heads that share a key/value head
    float scale_log2,  // softmax_scale * log2(e)
    Mask mask, Watch watch) {
    constexpr int D = Shape::D, Bc = Shape::Bc, Br = Shape::Br, kSlots = Shape::kSlots, kGroups = Shape::kGroups;
    constexpr int kQSlots = Shape::kQSlots, kCluster = Shape::kCluster;
    constexpr int kN = Bc / 8;   // 8-key columns of S
    constexpr int kC = D / 8;    // 8-element columns of O
    constexpr int kK = Bc / 16;  // steps of P V along the keys
    using QTile = typename VoteFirstShared<T, Shape>::QTile;
    using KvTile = typename VoteFirstShared<T, Shape>::KvTile;
    const int Nq = LSE3.extent(2);
    const auto blocks_of = [&](int i0, int rows) { return mask.blocks(i0, rows, Nq, Bc, Nkv); };

    auto& smem = simt::shared<VoteFirstShared<T, Shape>>();
    if (threadIdx.x == 0) {
        for (int w = 0; w < kQSlots; ++w) {
            ptx::mbarrier_init(smem.q_full[w], 1, "q_full", w);
            ptx::mbarrier_init(smem.q_empty[w], 128, "q_empty", w);
        }
        for (int s = 0; s < kSlots; ++s) {
            ptx::mbarrier_init(smem.full[s], 1, "full", s);
            ptx::mbarrier_init(smem.empty[s], kGroups * kCluster, "empty", s);
        }
        if constexpr (kCluster > 1) smem.claimed.init();
        ptx::fence_mbarrier_init();
    }
    if constexpr (kCluster > 1)
        ptx::cluster_sync();
    else
        __syncthreads();
    if (threadIdx.x == 0) watch.begin();
    // By a shuffle, so that the compiler knows that they are the same in all lanes.
    const int warp = __shfl_sync(simt::kFullMask, static_cast<int>(threadIdx.x / 32), 0), wg = warp / 4;
    // A turn multiplies with K of a block of keys and with V of the one before, so they come and go together: a tile of Q with n blocks
    // has n + 1 loads. They use the slots in turn.
    if (wg == kGroups) {  // the producer, of which one lane works
        ptx::setmaxnreg_dec<Shape::kProducerRegisters>();
        if (warp == 4 * kGroups && ptx::elect_one()) {
            constexpr int kPanels = D / 64 / kCluster;  // of a tile that this block loads
            const int rank = kCluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0, panel = kPanels * rank;
            const auto load = [&](KvTile& tile, const TensorMap& map, Mbarrier& full, int j, int h, int b) {
                if constexpr (kCluster > 1)
                    ptx::cp_async_bulk_tensor_multicast(tile.data + panel * (Bc * 64), map, {0, j * Bc, panel, h / group, b}, full,
                                                        (1 << kCluster) - 1, ptx::CachePolicy::evict_last);
                else
                    ptx::cp_async_bulk_tensor_load(tile.data, map, {0, j * Bc, 0, h / group, b}, full, ptx::CachePolicy::evict_last);
            };
            Ring<kSlots> ring;  // of the next load
            int first = 0;      // blocks of keys of earlier tiles of Q, for the watch
            unsigned round = 0;
            for (int tile = static_cast<int>(blockIdx.x) / kCluster, next = 0; tile < order.count(); tile = next, ++round) {
                if (rank == 0) next = claim(claims, kCluster);  // for the cluster: its blocks must go on together
                TileOrder::Place place = order.at(tile);
                const int h = place.h, b = place.b;
                const TileOrder::Range keys = order.range(place, blocks_of(place.tile * (kCluster * Br), kCluster * Br));
                place.tile = kCluster * place.tile + rank;
                const int blocks = keys.end - keys.begin;
                const auto load_next = [&](int n) {  // the n-th of the tile
                    const int slot = ring.slot, j = keys.end - 1 - n;
                    const bool has_k = n < blocks;
                    const bool has_v = n > 0;
                    ptx::mbarrier_wait(smem.empty[slot], ring.parity ^ 1);
                    ptx::mbarrier_arrive_expect_tx(smem.full[slot], (has_k + has_v) * KvTile::kBytes);
                    if (has_k) {
                        watch.mark(kGroups, watched::k_tile, first + n);
                        load(smem.k[slot], K_map, smem.full[slot], j, h, b);
                    }
                    if (has_v) {
                        watch.mark(kGroups, watched::v_tile, first + n - 1);
                        load(smem.v[slot], V_map, smem.full[slot], j + 1, h, b);
                    }
                    ring.advance();
                };
                if (blocks > 0) load_next(0);
                hand_out<kGroups>(smem, Q_map, place, keys, blocks, round);
                if constexpr (kCluster > 1)
                    if (rank == 0) smem.claimed.tell(next, round);
                for (int n = 1; n <= blocks; ++n) load_next(n);
                first += blocks;
                if constexpr (kCluster > 1)
                    if (rank > 0) next = smem.claimed.hear(round);
            }
            hand_out_nothing<kGroups>(smem, round);
            if (rank == 0) end_claims(claims, kCluster);
        }
    } else {
        ptx::setmaxnreg_inc<Shape::kConsumerRegisters>();
        ptx::griddepcontrol_launch_dependents();                        // merge_tail(), where there is any
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;  // row and column pair of this lane in a fragment
        const int row0 = 16 * warp;                                     // of the warp, in the block
        const bool speaks = threadIdx.x % 128 == 0;                     // for the warpgroup
        // The maximum is taken of S before scaling. That is the maximum after it for a positive scale: the sign of others goes into Q.
        const bool negative = scale_log2 < 0.0f;
        const float c_log2 = fmaxf(fabsf(scale_log2), 0x1p-126f);  // not 0, for -infinity times c
        constexpr float kMost = 256;                               // that P may be, which any type holds
        const float slack = fminf(log2f(kMost) / c_log2, 1e38f);   // how far above m the element of S of such a P lies

        const auto take_turn = [&] {
            if constexpr (Shape::kTurns) ptx::bar_sync(1 + wg, 256);
        };
        const auto pass_turn = [&] {
            if constexpr (Shape::kTurns) ptx::bar_arrive(1 + (wg + 1) % kGroups, 256);
        };
        const auto sync_warpgroup = [&] { ptx::bar_sync(1 + kGroups + wg, 128); };
        // A slot is free when all warpgroups of all blocks that it was loaded for have said so.
        const auto release = [&](Mbarrier& empty) {
            if constexpr (kCluster > 1) {
                if (threadIdx.x % 128 < kCluster) ptx::mbarrier_arrive_remote(empty, threadIdx.x % 128);
            } else {
                ptx::mbarrier_arrive_if(speaks, empty);
            }
        };

        // o[4c + 2r + e] is row g + 8r, column 8c + 2t + e of the warp's 16 rows; s below likewise.
        float o[D / 2];
        float m[2], l[2];        // m times c_log2; l of this lane's columns only, until the end
        int limit[2];            // without kSumsVote: of elements of S, while m stays; to compare with as integers
        std::uint32_t p[kK][4];  // A operand of the next P V: the accumulators of two neighbouring 8-key columns of S
        const ptx::MatrixDescriptor Ks = smem.k[0].over_columns(), Vs = smem.v[0].over_rows();

        // Starts O += P V with the V tile in a slot. The turn is passed two products before the last.
        const auto start_pv = [&](int slot, bool pass) {
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
        const auto finish_pv = [&] {
            ptx::wgmma_wait<0>();
            ptx::keep_in_place(o);
        };
        // Tiles that the other warpgroups use.
        Ring<kSlots> ring;  // of the next tiles
        const auto pass_over = [&] {
            ptx::mbarrier_wait(smem.full[ring.slot], ring.parity);
            sync_warpgroup();  // no warp still waits for them
            release(smem.empty[ring.slot]);
            ring.advance();
        };
        if (wg == kGroups - 1) pass_turn();  // the first warpgroup begins
        int first = 0, blocks = 0;           // blocks of keys of earlier tiles of Q, for the watch, and of this one
        for (unsigned round = 0;; ++round, first += blocks) {
            const QuerySlot<kGroups, kQSlots> at(round, wg);
            const int q_slot = at.slot;
            ptx::mbarrier_wait(smem.q_full[q_slot], at.parity);
            const uint4 place = simt::load_shared_16(&smem.task[q_slot].place);
            if (place.w == 0) break;
            const int q_tile = static_cast<int>(place.x), h = static_cast<int>(place.y), b = static_cast<int>(place.z);
            const int i0 = q_tile * Br;
            const uint4 keys = simt::load_shared_16(&smem.task[q_slot].keys);
            QTile& out = smem.output(wg, q_slot);
            const ptx::MatrixDescriptor Qs = smem.q[q_slot].over_columns();
            const int begin = static_cast<int>(keys.x), end = static_cast<int>(keys.y);
            blocks = end - begin;

            const auto note = [&](watched::Event event, int n) {
                if (speaks) watch.mark(wg, event, first + n);
            };
            const int whole = mask.visible(i0 + 64 * wg, Nkv) / Bc - begin;  // blocks that need no mask
            // S and P of the n-th block of keys, from the last to the first, and O of the one before.
            const auto step = [&]<bool kFirst, bool kMasked>(int n) {
                const int slot = ring.slot;
                float s[Bc / 2];
                ptx::mbarrier_wait(smem.full[slot], ring.parity);
                note(watched::waits, n);
                if constexpr (!kFirst) take_turn();
                note(watched::multiplies, n);
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < D / 16; ++k)
                    ptx::wgmma<T, Bc>(s, Qs.advance(QTile::column_step(k)),
                                      Ks.advance(slot * KvTile::kBytes).advance(KvTile::column_step(k)), k > 0);
                ptx::wgmma_commit();
                if constexpr (!kFirst) start_pv(slot, true);
                ring.advance();
                ptx::wgmma_wait<kFirst ? 0 : 1>();  // S is there, O not yet
                ptx::keep_in_place(s);
                note(watched::has_s, n);
                if constexpr (!kFirst) {  // soon after S; between the exponentials it would hold them up
                    finish_pv();
                    note(watched::has_o, n - 1);
                }
                release(smem.empty[slot]);

                if (kMasked && (!kFirst || blocks - n > whole)) {
#pragma unroll
                    for (int r = 0; r < 2; ++r)
#pragma unroll
                        for (int c = 0; c < kN; ++c)
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const int key = (end - 1 - n) * Bc + 8 * c + 2 * t + e;
                                if (key >= Nkv || mask.hides(i0 + row0 + 8 * r + g, key)) s[4 * c + 2 * r + e] = -INFINITY;
                            }
                }
                // P relative to m, and its sum in this lane's columns.
                float sum[2];
                const auto weigh = [&] {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        // exp(scale (s - m)) = 2^(c s - c m) with c = scale * log2(e): one FMA and one ex2 an element.
                        const float reference = kMasked && m[r] == -INFINITY ? 0.0f : m[r];
                        float sums[2];
#pragma unroll
                        for (int c = 0; c < kN; ++c) {
                            float x[2];
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                x[e] = ptx::ex2_approx_ftz(c_log2 * s[4 * c + 2 * r + e] - reference);
                                sums[e] = c == 0 ? x[e] : sums[e] + x[e];
                            }
                            p[c / 2][c % 2 * 2 + r] = ptx::pack<T>(x[0], x[1]);
                        }
                        sum[r] = sums[0] + sums[1];
                    }
                };
                // Makes m the maximum, and l and O relative to it.
                const auto follow = [&] {
                    float alpha[2];
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float most[2] = {s[2 * r], s[2 * r + 1]};
#pragma unroll
                        for (int c = 1; c < kN; ++c)
#pragma unroll
                            for (int e = 0; e < 2; ++e) most[e] = fmaxf(most[e], s[4 * c + 2 * r + e]);
                        const float top = simt::warp_max<4>(fmaxf(most[0], most[1]));  // of the four lanes of a row
                        if (!Shape::kSumsVote && c_log2 * top >= m[r])
                            limit[r] = top + slack >= 0.0f ? __float_as_int(top + slack) : INT_MIN;
                        const float m_new = fmaxf(m[r], c_log2 * top);
                        alpha[r] = m_new == -INFINITY ? 1.0f : ptx::ex2_approx_ftz(m[r] - m_new);
                        l[r] *= alpha[r];
                        m[r] = m_new;
                    }
                    if constexpr (!kFirst) {  // else O is 0
#pragma unroll
                        for (int c = 0; c < kC; ++c)
#pragma unroll
                            for (int e = 0; e < 4; ++e) o[4 * c + e] *= alpha[e / 2];
                    }
                };
                // Masked blocks come first, so that nearly each row has an m when votes begin; one without says yes. Then m stays what it
                // is as long as no lane of the warp finds anything too large: O, l and P are all relative to the same m, and it cancels in
                // O / l.
                if constexpr (kMasked) {
                    follow();
                    weigh();
                } else if constexpr (Shape::kSumsVote) {
                    weigh();  // no P is too large if no sum is
                    if (__any_sync(simt::kFullMask, fmaxf(sum[0], sum[1]) > kMost)) {
                        follow();
                        weigh();
                    }
                } else {
                    // As integers floats compare as they do as floats unless both are negative, and the largest of three is one
                    // instruction. Where the limit is negative, all is above it.
                    int top[2][2];
#pragma unroll
                    for (int r = 0; r < 2; ++r)
#pragma unroll
                        for (int c = 0; c < kN; ++c) {
                            const int left = __float_as_int(s[4 * c + 2 * r]), right = __float_as_int(s[4 * c + 2 * r + 1]);
                            int& most = top[r][c % 2];
                            most = c < 2 ? max(left, right) : max(max(most, left), right);
                        }
                    if (__any_sync(simt::kFullMask, max(top[0][0], top[0][1]) > limit[0] || max(top[1][0], top[1][1]) > limit[1])) follow();
                    weigh();
                }
#pragma unroll
                for (int r = 0; r < 2; ++r) l[r] += sum[r];
                note(watched::has_p, n);
            };

#pragma unroll
            for (float& x : o) x = 0.0f;
#pragma unroll
            for (int r = 0; r < 2; ++r) m[r] = -INFINITY, l[r] = 0.0f;
            const int own_blocks = max(min(blocks_of(i0 + 64 * wg, 64), end) - begin, 0);
            if (negative && own_blocks > 0) {
                negate(smem.q[q_slot], threadIdx.x % 128);
                ptx::fence_proxy_async();  // wgmma shall see it
                sync_warpgroup();
            }
            int n = 0;
            // Above the diagonal of this warpgroup's rows, and past the last row.
            for (; n < blocks - own_blocks; ++n) {
                pass_over();
                if (n < blocks - 1) take_turn(), pass_turn();
            }
            if (own_blocks > 0) {
                step.template operator()<true, true>(n++);
                for (; n < blocks - whole; ++n) step.template operator()<false, true>(n);
                repeat(blocks - n, [&] {
                    step.template operator()<false, false>(n);
                    ++n;
                });
            }
            if (Shape::kOwnO) ptx::mbarrier_arrive(smem.q_empty[q_slot]);  // there is no further product with it
            if (own_blocks > 0) {
                ptx::mbarrier_wait(smem.full[ring.slot], ring.parity);
                start_pv(ring.slot, false);
                finish_pv();
                release(smem.empty[ring.slot]);
                ring.advance();
                note(watched::has_o, blocks - 1);
            } else if (blocks > 0) {
                pass_over();
            }

            float inverse[2], lse[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                constexpr float kLn2 = 0.6931471805599453f;
                l[r] = simt::warp_sum<4>(l[r]);
                inverse[r] = l[r] > 0.0f ? 1.0f / l[r] : 0.0f;
                lse[r] = l[r] > 0.0f ? kLn2 * (m[r] + log2f(l[r])) : -INFINITY;
            }
            if (Shape::kDivides && keys.w == 1) {  // for merge_tail()
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = row0 + 8 * r + g;
                    if (i0 + row >= Nq) continue;
                    if (t == 0) LSE_part(keys.z, row) = lse[r];
                    const auto O_row = O_part(keys.z, row);
#pragma unroll
                    for (int c = 0; c < kC; ++c)
                        simt::store_global_8(&O_row(8 * c + 2 * t),
                                             float2{o[4 * c + 2 * r] * inverse[r], o[4 * c + 2 * r + 1] * inverse[r]});
                }
                continue;
            }

            // O through shared memory, from where TMA takes it.
            if (Shape::kOwnO && speaks) ptx::cp_async_bulk_wait_read<0>();  // the last tile's has left
            sync_warpgroup();
#pragma unroll
            for (int k = 0; k < D / 16; ++k) {
                std::uint32_t tiles[4];  // 8 x 8 each: rows 0-7 and 8-15 of the left columns, then of the right ones
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    tiles[e] = ptx::pack<T>(o[8 * k + 2 * e] * inverse[e % 2], o[8 * k + 2 * e + 1] * inverse[e % 2]);
                ptx::stmatrix(tiles, out.chunk(row0 % 64 + lane % 16, 16 * k + lane / 16 * 8));
            }
            ptx::fence_proxy_async();  // TMA shall see what this thread wrote
            sync_warpgroup();          // and what the others did
            if (speaks) {
                if (i0 + 64 * wg < Nq) ptx::cp_async_bulk_tensor_store(O_map, {0, i0 + 64 * wg, 0, h, b}, out.data);
                ptx::cp_async_bulk_commit();
                note(watched::stored, blocks - 1);
                if (!Shape::kOwnO) ptx::cp_async_bulk_wait_read<0>();
            }
            if (!Shape::kOwnO) ptx::mbarrier_arrive(smem.q_empty[q_slot]);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = i0 + row0 + 8 * r + g;
                if (t == 0 && i < Nq) LSE3(b, h, i) = lse[r];
            }
        }
        if (wg == 0) take_turn();                       // the last one, which has no work
        if (speaks) ptx::cp_async_bulk_wait_read<0>();  // shared memory ends with the block
    }
    if (threadIdx.x == 0) watch.end();
    if constexpr (kCluster > 1) ptx::cluster_sync();  // until then others of the cluster may arrive at this block's barriers
}

}  // namespace step06
