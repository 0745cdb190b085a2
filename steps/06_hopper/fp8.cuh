// Attention on 8-bit tensor cores. Q, K and V are e4m3 with a scale for every 64 rows (quantise.cuh), V is transposed; Q and P are rounded
// to e4m3 in registers. As in 06c a thread block stays on its SM and goes from tile to tile. Its warpgroups take no turns: each has 64
// queries of a tile, held in registers, and the softmax of one runs under the products of the others.
#pragma once

#include "06_hopper/quantise.cuh"
#include "06_hopper/repeat.hpp"
#include "06_hopper/ring.hpp"
#include "06_hopper/tile.hpp"
#include "06_hopper/tile_order.hpp"
#include "attention/mask.hpp"
#include "ptx/barrier.hpp"
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

namespace step06 {

using ptx::Mbarrier;
using ptx::TensorMap;
using workbook::Mask;

/// kRows rows of kColumns bytes as TMA writes them: panels of lines as long as the swizzle permutes, 128 bytes where there are as many.
template <int kRows, int kColumns>
struct alignas(1024) ByteTile {
    static constexpr int kLine = kColumns < 128 ? kColumns : 128;
    static_assert((kLine == 64 || kLine == 128) && kColumns % kLine == 0 && kRows % 8 == 0, "whole lines, and atoms of 8 of them");
    static constexpr ptx::Swizzle kSwizzle = kLine == 64 ? ptx::Swizzle::bytes_64 : ptx::Swizzle::bytes_128;
    static constexpr int kBytes = kRows * kColumns;
    static constexpr int kPanel = kRows * kLine;

    E4m3 data[kBytes];

    /// For a product over the columns, the only one there is for bytes.
    SIMT_DEVICE ptx::MatrixDescriptor over_columns() const {
        return ptx::MatrixDescriptor::of({.start = data, .stride = 8 * kLine, .swizzle = kSwizzle});
    }
    /// Bytes from the first 32 columns to the k-th 32.
    static SIMT_DEVICE constexpr int column_step(int k) { return 32 * k / kLine * kPanel + 32 * k % kLine; }
};

/// Shape of a thread block's work: kGroups warpgroups for 64 query rows each and one of which a lane loads.
template <int kD, int kMultiplying, int kRingSlots, int kRegistersOfProducer, int kRegistersOfConsumers>
struct Fp8Shape {
    static constexpr int D = kD, Bc = kScaled;    // a block of keys has one scale
    static constexpr int kGroups = kMultiplying;  // warpgroups that multiply
    static constexpr int Br = 64 * kGroups;
    static constexpr int kConsumers = 128 * kGroups;  // threads
    static constexpr int kThreads = kConsumers + 128;
    static constexpr int kSlots = kRingSlots;
    static constexpr int kRegisters = 65536 / kThreads / 8 * 8;  // of each thread at first
    static constexpr int kProducerRegisters = kRegistersOfProducer, kConsumerRegisters = kRegistersOfConsumers;
    static_assert(128 * kProducerRegisters + kConsumers * kConsumerRegisters <= kThreads * kRegisters, "more than there are");
};

template <class T, class Shape>
struct Fp8Shared {
    using QTile = Tile<T, 64, Shape::D>;
    using KTile = ByteTile<Shape::Bc, Shape::D>;
    using VTile = ByteTile<Shape::D, Shape::Bc>;  // transposed
    struct alignas(128) Scales {                  // as TMA writes them
        float4 of_block;
    };
    QTile q[Shape::kGroups], o[Shape::kGroups];
    KTile k[Shape::kSlots];
    VTile v[Shape::kSlots];
    Scales scales[Shape::kSlots];  // they come with K
    Mbarrier q_full[Shape::kGroups], q_empty[Shape::kGroups];
    Mbarrier full[Shape::kSlots], empty[Shape::kSlots];
    Task task[Shape::kGroups];
    float4 largest[Shape::kGroups];  // of Q, in each warp
};

/// The A operand of 64 queries, and their scale, that of products Q K^T in units of log 2. The 128 threads of a warpgroup call it together.
template <class T, int D, class Sync>
SIMT_DEVICE float quantise_queries(std::uint32_t (&q)[D / 32][4], Tile<T, 64, D>& queries, float4& largest_of_warps, float factor,
                                   Sync&& sync_warpgroup) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const auto for_words = [&](auto&& f) {  // each of four neighbouring elements of a row
#pragma unroll
        for (int k = 0; k < D / 32; ++k)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = 32 * k + e / 2 * 16 + 4 * t;
                const uint2 four = simt::load_shared_8<uint2>(queries.chunk(16 * warp + e % 2 * 8 + g, column / 8 * 8) + column % 8);
                const float2 left = ptx::unpack<T>(four.x), right = ptx::unpack<T>(four.y);
                f(q[k][e], left.x, left.y, right.x, right.y);
            }
    };
    const auto over_warpgroup = [&](float largest) {
        largest = simt::warp_max(largest);
        sync_warpgroup();  // nobody reads maxima of before
        if (lane == 0) simt::store_shared_4(&largest_of_warps.x + warp, static_cast<std::uint32_t>(__float_as_int(largest)));
        sync_warpgroup();  // all maxima are there
        const float4 all = simt::load_shared_16<float4>(&largest_of_warps);
        return fmaxf(fmaxf(all.x, all.y), fmaxf(all.z, all.w));
    };
    const auto for_each = [&](auto&& f) {
        for_words([&](std::uint32_t&, float x0, float x1, float x2, float x3) { f(x0), f(x1), f(x2), f(x3); });
    };
    const Scaling scaling(largest_magnitude(for_each, over_warpgroup), factor);
    for_words([&](std::uint32_t& word, float x0, float x1, float x2, float x3) {
        word = simt::pack_e4m3(scaling(x0), scaling(x1), scaling(x2), scaling(x3));
    });
    return scaling.scale;
}

template <class T, class Shape>
__global__ __launch_bounds__(Shape::kThreads, 1) void fp8(  // tensors as their maps see them:
    const __grid_constant__ TensorMap Q_map,                // (B, Hq, D / 64, Nq, 64)
    const __grid_constant__ TensorMap K_map,                // (B, Hkv, D / L, Nkv, L) with L the bytes of a tile's line
    const __grid_constant__ TensorMap V_map,                // (B, Hkv, D, Nkv up to whole blocks)
    const __grid_constant__ TensorMap KV_scale_map,         // (B Hkv ceil(Nkv / 64), 4)
    const __grid_constant__ TensorMap O_map,                // (B, Hq, D / 64, Nq, 64)
    TensorView<float, 3> LSE3,                              // (B, Hq, Nq)
    TensorView<int, 1> claims,                              // (2): tiles claimed, blocks that are through; zero before and after
    TensorView<float, 3> O_part,                            // (pieces of divided tiles, Br, D)
    TensorView<float, 2> LSE_part,                          // (pieces, Br)
    TileOrder order, int Nkv,
    int group,         // query heads that share a key/value head
    float scale_log2,  // softmax_scale * log2(e)
    Mask mask) {
    constexpr int D = Shape::D, Bc = Shape::Bc, Br = Shape::Br, kSlots = Shape::kSlots, kGroups = Shape::kGroups;
    constexpr int kN = Bc / 8;   // 8-key columns of S
    constexpr int kK = Bc / 32;  // steps of P V along the keys
    constexpr int kQ = D / 32;   // steps of Q K^T along the columns
    // P is 2^5 times what it was, so that small weights are not lost, and the largest is a number of e4m3. The maximum that is subtracted
    // may be too small, as long as P is a number of e4m3: at most 448.
    constexpr float kShift = 5.0f;
    using Smem = Fp8Shared<T, Shape>;
    using KTile = typename Smem::KTile;
    using VTile = typename Smem::VTile;
    const int Nq = LSE3.extent(2);

    auto& smem = simt::shared<Smem>();
    if (threadIdx.x == 0) {
        for (int w = 0; w < kGroups; ++w) {
            ptx::mbarrier_init(smem.q_full[w], 1, "q_full", w);
            ptx::mbarrier_init(smem.q_empty[w], 128, "q_empty", w);
        }
        for (int s = 0; s < kSlots; ++s) {
            ptx::mbarrier_init(smem.full[s], 1, "full", s);
            ptx::mbarrier_init(smem.empty[s], kGroups, "empty", s);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    // By a shuffle, so that the compiler knows that they are the same in all lanes.
    const int warp = __shfl_sync(simt::kFullMask, static_cast<int>(threadIdx.x / 32), 0), wg = warp / 4;
    // As in 06c K of a block of keys and V of the one before come and go together.
    const auto blocks_of = [&](int i0, int rows) { return mask.blocks(i0, rows, Nq, Bc, Nkv); };  // that `rows` rows from i0 on see

    if (wg == kGroups) {  // the producer, of which one lane works
        ptx::setmaxnreg_dec<Shape::kProducerRegisters>();
        if (warp != 4 * kGroups || !ptx::elect_one()) return;
        const int kv_heads = order.heads / group, kv_blocks = (Nkv + Bc - 1) / Bc;
        ptx::griddepcontrol_wait();  // for quantise()
        Ring<kSlots> ring;           // of the next load
        unsigned round = 0;
        for (int tile = blockIdx.x, next; tile < order.count(); tile = next, ++round) {
            next = claim(claims);
            const TileOrder::Place place = order.at(tile);
            const int h = place.h, b = place.b, i0 = place.tile * Br, hkv = h / group;
            const TileOrder::Range keys = order.range(place, blocks_of(i0, Br));
            const int blocks = keys.end - keys.begin;
            const auto load_next = [&](int n) {  // the n-th of the tile
                const int slot = ring.slot, j = keys.end - 1 - n;
                const bool has_k = n < blocks;
                const bool has_v = n > 0;
                Mbarrier& full = smem.full[slot];
                ptx::mbarrier_wait(smem.empty[slot], ring.parity ^ 1);
                ptx::mbarrier_arrive_expect_tx(full, has_k * (KTile::kBytes + sizeof(float4)) + has_v * VTile::kBytes);
                if (has_k) {
                    ptx::cp_async_bulk_tensor_load(smem.k[slot].data, K_map, {0, j * Bc, 0, hkv, b}, full, ptx::CachePolicy::evict_last);
                    ptx::cp_async_bulk_tensor_load(&smem.scales[slot], KV_scale_map, {0, (b * kv_heads + hkv) * kv_blocks + j}, full,
                                                   ptx::CachePolicy::evict_last);
                }
                if (has_v)
                    ptx::cp_async_bulk_tensor_load(smem.v[slot].data, V_map, {(j + 1) * Bc, 0, hkv, b}, full, ptx::CachePolicy::evict_last);
                ring.advance();
            };
            if (blocks > 0) load_next(0);
            hand_out<kGroups>(smem, Q_map, place, keys, blocks, round);
            for (int n = 1; n <= blocks; ++n) load_next(n);
        }
        hand_out_nothing<kGroups>(smem, round);
        end_claims(claims);
        return;
    }
    ptx::setmaxnreg_inc<Shape::kConsumerRegisters>();
    ptx::griddepcontrol_launch_dependents();  // merge_tail(), where there is any

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;  // row and column pair of this lane in a fragment
    const int row0 = 16 * (warp % 4);                               // of the warp, in the warpgroup's 64
    const bool speaks = threadIdx.x % 128 == 0;                     // for the warpgroup
    const auto sync_warpgroup = [&] { ptx::bar_sync(1 + wg, 128); };
    const auto release = [&](int slot) { ptx::mbarrier_arrive_if(speaks, smem.empty[slot]); };
    const ptx::MatrixDescriptor Ks = smem.k[0].over_columns(), Vs = smem.v[0].over_columns();

    Ring<kSlots> ring;  // of the next tiles
    for (unsigned round = 0;; ++round) {
        ptx::mbarrier_wait(smem.q_full[wg], round % 2);
        const uint4 place = simt::load_shared_16(&smem.task[wg].place);
        if (place.w == 0) break;
        const int h = static_cast<int>(place.y), b = static_cast<int>(place.z);
        const int i0 = static_cast<int>(place.x) * Br + 64 * wg;
        // The blocks of keys that are visited, all that the tile's rows see or those of a part, and how many of them the warpgroup's rows
        // see.
        const uint4 keys = simt::load_shared_16(&smem.task[wg].keys);
        const int begin = static_cast<int>(keys.x), end = static_cast<int>(keys.y), blocks = end - begin;
        const int own_blocks = max(min(blocks_of(i0, 64), end) - begin, 0);
        // o[4c + 2r + e] is row g + 8r, column 8c + 2t + e of the warp's 16 rows; s below likewise.
        float o[D / 2] = {};
        float m[2] = {-INFINITY, -INFINITY}, l[2] = {};  // in units of log 2; l of this lane's columns only, until the end
        std::uint32_t q[kQ][4];                          // A operand
        float q_scale = 0.0f;
        if (own_blocks > 0) q_scale = quantise_queries(q, smem.q[wg], smem.largest[wg], scale_log2, sync_warpgroup);
        ptx::mbarrier_arrive(smem.q_empty[wg]);  // all that have read say so

        // Blocks of keys that only other warpgroups see are handed back. All threads wait for them, though one would do: where threads go
        // ways of their own the compiler takes nothing that follows for equal in all lanes.
        const auto pass_over = [&] {
            ptx::mbarrier_wait(smem.full[ring.slot], ring.parity);
            sync_warpgroup();  // no warp still waits
            release(ring.slot);
            ring.advance();
        };
        for (int n = 0; n < blocks - own_blocks; ++n) pass_over();
        if (own_blocks > 0) {
            std::uint32_t p[kK][4];  // A operand of the next P V
            const auto start_pv = [&](int slot) {
#pragma unroll
                for (int k = 0; k < kK; ++k) ptx::keep_in_place(p[k]);
                ptx::keep_in_place(o);
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < kK; ++k)
                    ptx::wgmma<E4m3, D>(o, p[k], Vs.advance(slot * VTile::kBytes).advance(VTile::column_step(k)), true);
                ptx::wgmma_commit();
            };
            const auto finish_pv = [&] {
                ptx::wgmma_wait<0>();
                ptx::keep_in_place(o);
            };
            // Blocks that need no mask: the warpgroup's first row sees all their keys.
            const int whole = mask.visible(i0, Nkv) / Bc - begin;

            // S and P of the n-th block of keys, and O of the one before.
            const auto step = [&]<bool kFirst, bool kMasked>(int n) {
                const int slot = ring.slot;
                float s[Bc / 2];
                ptx::mbarrier_wait(smem.full[slot], ring.parity);
                const auto [k_scale, v_scale, v_log, v_inverse] = simt::load_shared_16<float4>(&smem.scales[slot]);
#pragma unroll
                for (int k = 0; k < kQ; ++k) ptx::keep_in_place(q[k]);
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < kQ; ++k)
                    ptx::wgmma<E4m3, Bc>(s, q[k], Ks.advance(slot * KTile::kBytes).advance(KTile::column_step(k)), k > 0);
                ptx::wgmma_commit();
                if constexpr (!kFirst) start_pv(slot);
                ring.advance();
                // A score is c s. V's scale counts as part of P: log2 of it is added to the score.
                const float c = fmaxf(q_scale * k_scale, 0x1p-126f);  // not 0, for -infinity times c
                ptx::wgmma_wait<kFirst ? 0 : 1>();                    // S is there, O not yet
                ptx::keep_in_place(s);
                if constexpr (!kFirst) finish_pv();  // the new P will be where it reads the old one
                release(slot);

                if (kMasked && (!kFirst || blocks - n > whole)) {
                    const int j0 = (end - 1 - n) * Bc;
#pragma unroll
                    for (int r = 0; r < 2; ++r)
#pragma unroll
                        for (int x = 0; x < kN; ++x)
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const int key = j0 + 8 * x + 2 * t + e;
                                if (key >= Nkv || mask.hides(i0 + row0 + 8 * r + g, key)) s[4 * x + 2 * r + e] = -INFINITY;
                            }
                }
                // P relative to m, the sums of its rows in this lane's columns, and the largest partial sum.
                float sum[2], largest;
                const auto weigh = [&] {
                    float sums[2][2];
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const float reference = (kMasked && m[r] == -INFINITY ? 0.0f : m[r]) - (v_log + kShift);
                        // Four neighbours of the A operand are two of each of two 8-key columns: V's keys lie in this order.
#pragma unroll
                        for (int x = 0; x < kN; x += 2) {
                            float four[4];
#pragma unroll
                            for (int e = 0; e < 4; ++e) {
                                four[e] = ptx::ex2_approx_ftz(c * s[4 * (x + e / 2) + 2 * r + e % 2] - reference);
                                float& chain = sums[r][e % 2];
                                chain = x == 0 && e < 2 ? four[e] : chain + four[e];
                            }
                            p[x / 4][x / 2 % 2 * 2 + r] = simt::pack_e4m3(four[0], four[1], four[2], four[3]);
                        }
                        sum[r] = sums[r][0] + sums[r][1];
                    }
                    largest = fmaxf(fmaxf(sums[0][0], sums[0][1]), fmaxf(sums[1][0], sums[1][1]));
                };
                // Makes m the maximum, and l and O relative to it.
                const auto follow = [&] {
                    float alpha[2];
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float most[2] = {s[2 * r], s[2 * r + 1]};
#pragma unroll
                        for (int x = 1; x < kN; ++x)
#pragma unroll
                            for (int e = 0; e < 2; ++e) most[e] = fmaxf(most[e], s[4 * x + 2 * r + e]);
                        // Over the four lanes of a row.
                        const float m_new = fmaxf(m[r], c * simt::warp_max<4>(fmaxf(most[0], most[1])) + v_log);
                        alpha[r] = m_new == -INFINITY ? 1.0f : ptx::ex2_approx_ftz(m[r] - m_new);
                        m[r] = m_new;
                        l[r] *= alpha[r];
                    }
                    if constexpr (!kFirst) {  // else O is 0
#pragma unroll
                        for (int x = 0; x < D / 8; ++x)
#pragma unroll
                            for (int e = 0; e < 4; ++e) o[4 * x + e] *= alpha[e / 2];
                    }
                };
                // As in 06c m stays what it is as long as no P is too large, and none is if no partial sum is.
                if constexpr (kMasked) {
                    follow();
                    weigh();
                } else {
                    weigh();
                    if (__any_sync(simt::kFullMask, largest > simt::kLargestE4m3)) {
                        follow();
                        weigh();
                    }
                }
#pragma unroll
                for (int r = 0; r < 2; ++r) l[r] += v_inverse * sum[r];
            };

            int n = blocks - own_blocks;
            step.template operator()<true, true>(n);
            for (++n; n < blocks - whole; ++n) step.template operator()<false, true>(n);
            repeat(blocks - n, [&] {
                step.template operator()<false, false>(n);
                ++n;
            });
            ptx::mbarrier_wait(smem.full[ring.slot], ring.parity);
            start_pv(ring.slot);
            finish_pv();
            release(ring.slot);
            ring.advance();
        } else if (blocks > 0) {
            pass_over();
        }

        float inverse[2], lse[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            constexpr float kLn2 = 0.6931471805599453f;
            const float sum = simt::warp_sum<4>(l[r]);
            inverse[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
            lse[r] = sum == 0.0f ? -INFINITY : kLn2 * (m[r] - kShift + log2f(sum));
        }
        if (keys.w == 1) {  // for merge_tail()
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = row0 + 8 * r + g;
                if (i0 + row >= Nq) continue;
                if (t == 0) LSE_part(keys.z, 64 * wg + row) = lse[r];
                const auto O_row = O_part(keys.z, 64 * wg + row);
#pragma unroll
                for (int x = 0; x < D / 8; ++x)
                    simt::store_global_8(&O_row(8 * x + 2 * t), float2{o[4 * x + 2 * r] * inverse[r], o[4 * x + 2 * r + 1] * inverse[r]});
            }
            continue;
        }

        if (speaks) ptx::cp_async_bulk_wait_read<0>();  // O of the tile before has left
        sync_warpgroup();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = i0 + row0 + 8 * r + g;
            if (t == 0 && i < Nq) LSE3(b, h, i) = lse[r];
        }
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
            std::uint32_t parts[4];  // 8 x 8 each: rows 0-7 and 8-15 of the left columns, then of the right ones
#pragma unroll
            for (int e = 0; e < 4; ++e) parts[e] = ptx::pack<T>(o[8 * k + 2 * e] * inverse[e % 2], o[8 * k + 2 * e + 1] * inverse[e % 2]);
            ptx::stmatrix(parts, smem.o[wg].chunk(row0 + lane % 16, 16 * k + lane / 16 * 8));
        }
        ptx::fence_proxy_async();  // TMA shall see what this thread wrote
        sync_warpgroup();          // and what the others did
        if (speaks) {
            if (i0 < Nq) ptx::cp_async_bulk_tensor_store(O_map, {0, i0, 0, h, b}, smem.o[wg].data);
            ptx::cp_async_bulk_commit();
        }
    }
    if (speaks) ptx::cp_async_bulk_wait_read<0>();  // shared memory ends with the block
}

}  // namespace step06
