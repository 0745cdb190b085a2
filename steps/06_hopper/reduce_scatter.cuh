// 06f for short sequences. The blocks of a cluster have all keys of a head: what they sum of dQ is all there is. No sums go through global
// memory, where they would have to be set to zero before and converted after. And a cluster stays on its SMs and goes from head to head.
#pragma once

#include "06_hopper/exchange.cuh"
#include "ptx/movmatrix.hpp"

namespace step06 {

/// @tparam kPairsOfBlocks pairs exchange dS as in 06f; two pairs add up what they have of dQ
template <int kPairsOfBlocks>
struct ReduceScatterShape {
    static constexpr int D = 128, Br = 64, Bc = 128;
    static constexpr int kPairs = kPairsOfBlocks, kCluster = 2 * kPairs, kKeys = kCluster * Bc;
    static constexpr int kShare = Br / kPairs;  // of the queries of a turn those whose dQ a pair completes
    static constexpr int kGroups = 2, kTiles = 2, kSplit = 1, kSlots = 2, kDsSlots = 2, kDqSlots = 1;
    static constexpr int kDqGroup = kGroups, kLoaderGroup = kGroups + 1, kThreads = 128 * (kGroups + 2);
    static constexpr int kMmaRegisters = 208, kDqRegisters = 72, kLoaderRegisters = 24;
    static_assert(kPairs == 1 || kPairs == 2, "shared memory has places for sums of one other pair");
    static_assert(kGroups * kMmaRegisters + kDqRegisters + kLoaderRegisters <= kThreads / 128 * (65536 / kThreads / 8 * 8),
                  "more registers than the block begins with");
};

template <class T, class Shape>
struct ReduceScatterShared : ExchangeShared<T, Shape> {
    Mbarrier k_full, k_empty, v_full[Shape::kTiles], v_empty[Shape::kTiles];
    Mbarrier sums_full, sums_empty;  // sums of the other pair have come; it has read those that went to it

    static constexpr int kSums = 16 * Shape::kShare;  // of a warp, for one pair
    /// Sums of a warp on their way to the other pair, and those that come from it.
    SIMT_DEVICE float* outgoing(int warp) { return this->dq[0][warp]; }
    SIMT_DEVICE float* incoming(int warp) { return this->dq[0][warp] + kSums; }
};

/// @tparam kMasked a block has fewer than Bc keys
template <class T, class Shape, bool kMasked, class Watch>
__global__ __launch_bounds__(Shape::kThreads, 1) void reduce_scatter(  // tensors as their maps see them:
    const __grid_constant__ TensorMap Q_map,                           // (B, Hq, D / 64, Nq, 64)
    const __grid_constant__ TensorMap K_map,                           // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap K_panel_map,                     // the same, by boxes of one panel
    const __grid_constant__ TensorMap V_map,                           // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap dO_map,                          // (B, Hq, D / 64, Nq, 64)
    const __grid_constant__ TensorMap dK_map,                          // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap dV_map,                          // (B, Hkv, D / 64, Nkv, 64)
    const __grid_constant__ TensorMap LSE_D_map,                       // (B Hq ceil(Nq / Br), 2 Br)
    TensorView<T, 4> dQ,                                               // (B, Hq, Nq, D)
    int Nkv, int kv_heads, float scale,
    float scale_log2,  // scale * log2(e)
    Watch watch) {
    constexpr int D = Shape::D, Br = Shape::Br, Bc = Shape::Bc, kTiles = Shape::kTiles, kSlots = Shape::kSlots;
    constexpr int kPairs = Shape::kPairs, kShare = Shape::kShare;
    using Smem = ReduceScatterShared<T, Shape>;
    using KvTile = typename Smem::KvTile;
    using QTile = typename Smem::QTile;
    const int rank = static_cast<int>(ptx::cluster_rank()), panel = rank % 2, pair = rank / 2;
    const int j0 = rank * Bc;  // the block's first key
    // A cluster has every clusters-th head of keys of all sequences.
    const int first_head = static_cast<int>(blockIdx.x) / Shape::kCluster, clusters = static_cast<int>(gridDim.x) / Shape::kCluster;
    const int heads = dQ.extent(0) * kv_heads, group = dQ.extent(1) / kv_heads;
    const int per_head = (dQ.extent(2) + Br - 1) / Br, turns = group * per_head;

    auto& smem = simt::shared<Smem>();
    if (threadIdx.x == 0) {
        watch.begin();
        init_exchange(smem);
        ptx::mbarrier_init(smem.k_full, 1, "k_full");
        ptx::mbarrier_init(smem.k_empty, 4 * Shape::kGroups + 1, "k_empty");  // each warp that multiplies, and the warpgroup of dQ
        for (int w = 0; w < kTiles; ++w) {
            ptx::mbarrier_init(smem.v_full[w], 1, "v_full", w);
            ptx::mbarrier_init(smem.v_empty[w], 1, "v_empty", w);
        }
        ptx::mbarrier_init(smem.sums_full, 1, "sums_full");
        ptx::mbarrier_init(smem.sums_empty, 4, "sums_empty");  // each warp that reads them
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();  // the other blocks will count at these barriers
    // By a shuffle, so that the compiler knows that they are the same in all lanes.
    const int warp_of_block = __shfl_sync(simt::kFullMask, static_cast<int>(threadIdx.x / 32), 0);
    const int wg = warp_of_block / 4, warp = warp_of_block % 4, lane = threadIdx.x % 32;
    const bool speaks = threadIdx.x % 128 == 0;  // for its warpgroup
    const Role me{wg, warp, lane, speaks, static_cast<unsigned>(rank ^ 1)};

    if (wg == Shape::kLoaderGroup) {  // of which one lane works
        ptx::setmaxnreg_dec<Shape::kLoaderRegisters>();
        if (!speaks) return;
        int turn = 0;
        for (int head = first_head, round = 0; head < heads; head += clusters, ++round) {
            const int b = head / kv_heads, hkv = head % kv_heads;
            const unsigned free = round % 2 ^ 1;
            const auto load = [&](int h, int n) {  // what a turn reads
                const int slot = turn % kSlots;
                ptx::mbarrier_wait(smem.empty[slot], parity_of(turn, kSlots) ^ 1);
                ptx::mbarrier_arrive_expect_tx(smem.q_full[slot], QTile::kBytes + sizeof smem.statistics[slot]);
                ptx::cp_async_bulk_tensor_load(smem.q[slot].data, Q_map, {0, n * Br, 0, h, b}, smem.q_full[slot],
                                               ptx::CachePolicy::evict_last);
                const int row = (b * dQ.extent(1) + h) * per_head + n;
                ptx::cp_async_bulk_tensor_load(smem.statistics[slot], LSE_D_map, {0, row}, smem.q_full[slot], ptx::CachePolicy::evict_last);
                ptx::mbarrier_arrive_expect_tx(smem.do_full[slot], QTile::kBytes);
                ptx::cp_async_bulk_tensor_load(smem.d_o[slot].data, dO_map, {0, n * Br, 0, h, b}, smem.do_full[slot],
                                               ptx::CachePolicy::evict_last);
                ++turn;
            };
            load(hkv * group, 0);  // before the keys, whose memory is free later
            ptx::mbarrier_wait(smem.k_empty, free);
            ptx::mbarrier_arrive_expect_tx(smem.k_full, sizeof smem.k + sizeof smem.peer_k);
            for (int w = 0; w < kTiles; ++w) {
                ptx::cp_async_bulk_tensor_load(smem.k[w].data, K_map, {0, j0 + 64 * w, 0, hkv, b}, smem.k_full);
                ptx::cp_async_bulk_tensor_load(smem.peer_k[w].data, K_panel_map, {0, (j0 ^ Bc) + 64 * w, panel, hkv, b}, smem.k_full);
            }
            for (int w = 0; w < kTiles; ++w) {
                ptx::mbarrier_wait(smem.v_empty[w], free);
                ptx::mbarrier_arrive_expect_tx(smem.v_full[w], KvTile::kBytes);
                ptx::cp_async_bulk_tensor_load(smem.v[w].data, V_map, {0, j0 + 64 * w, 0, hkv, b}, smem.v_full[w]);
            }
            for (int n = 1; n < per_head; ++n) load(hkv * group, n);
            for (int h = hkv * group + 1; h < (hkv + 1) * group; ++h)
                for (int n = 0; n < per_head; ++n) load(h, n);
        }
        return;
    }

    if (wg == Shape::kDqGroup) {
        ptx::setmaxnreg_dec<Shape::kDqRegisters>();
        // dQ^T of 64 columns and the queries that this pair completes: x[4c + 2r + e] is column g + 8r of the warp's 16, query 8c + 2t + e.
        const auto write = [&](const float(&x)[kShare / 2], int b, int h, int n) {
#pragma unroll
            for (int c = 0; c < kShare / 8; ++c) {
                // 8 columns by 8 queries each: turned round, a lane has two neighbouring columns of query lane / 4.
                const std::uint32_t left = ptx::movmatrix(ptx::pack<T>(scale * x[4 * c], scale * x[4 * c + 1]));
                const std::uint32_t right = ptx::movmatrix(ptx::pack<T>(scale * x[4 * c + 2], scale * x[4 * c + 3]));
                const int i = n * Br + pair * kShare + 8 * c + lane / 4, column = 64 * panel + 16 * warp + lane % 4 * 2;
                if (i < dQ.extent(2)) {
                    simt::store_global_4(&dQ(b, h, i, column), left);
                    simt::store_global_4(&dQ(b, h, i, column + 8), right);
                }
            }
        };
        float share[kShare / 2];  // of a turn, until the sums of the other pair are there
        // Sends the sums that the other pair completes, and keeps its own.
        const auto send = [&](const float(&dq)[Br / 2], int turn) {
            ptx::mbarrier_wait(smem.sums_empty, parity_of(turn, 1) ^ 1);  // those of the turn before have been read
#pragma unroll
            for (int p = 0; p < kPairs; ++p) {
                const float* const sums = dq + p * (kShare / 2);
                if (p == pair) {
#pragma unroll
                    for (int i = 0; i < kShare / 2; ++i) share[i] = sums[i];
                } else {
#pragma unroll
                    for (int i = 0; i < kShare / 2; i += 4)
                        simt::store_shared_16(smem.outgoing(warp) + 32 * i + 4 * lane,
                                              float4{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]});
                }
            }
            ptx::fence_proxy_async();  // the copy shall see what this thread wrote
            __syncwarp();              // and what the others did
            if (lane == 0) ptx::cp_async_bulk_to_peer(smem.incoming(warp), smem.outgoing(warp), Smem::kSums * 4, smem.sums_full, rank ^ 2);
        };
        // Adds what the other pair has sent.
        const auto receive = [&](int turn) {
            if (speaks) ptx::mbarrier_arrive_expect_tx(smem.sums_full, 4 * Smem::kSums * sizeof(float));
            ptx::mbarrier_wait(smem.sums_full, parity_of(turn, 1));
#pragma unroll
            for (int i = 0; i < kShare / 2; i += 4) {
                const float4 more = simt::load_shared_16<float4>(smem.incoming(warp) + 32 * i + 4 * lane);
                share[i] += more.x, share[i + 1] += more.y, share[i + 2] += more.z, share[i + 3] += more.w;
            }
            ptx::keep_in_place(share);  // they are here: those loads are over
            __syncwarp();               // of all lanes
            if (lane == 0) ptx::mbarrier_arrive_remote(smem.sums_empty, rank ^ 2);
        };
        int turn = 0, last_b = 0, last_h = 0, last_n = 0;  // of the turn before
        for (int head = first_head, round = 0; head < heads; head += clusters, ++round) {
            const int b = head / kv_heads, hkv = head % kv_heads;
            ptx::mbarrier_wait(smem.k_full, round % 2);
            for (int h = hkv * group; h < (hkv + 1) * group; ++h)
                for (int n = 0; n < per_head; ++n, ++turn) {
                    float dq[Br / 2];
                    start_dq(dq, smem, panel, turn, speaks);
                    if constexpr (kPairs > 1)
                        if (turn > 0) {  // under the products
                            receive(turn - 1);
                            write(share, last_b, last_h, last_n);
                        }
                    finish_dq(dq, smem, turn, me);
                    if constexpr (kPairs > 1)
                        send(dq, turn);
                    else
                        write(dq, b, h, n);
                    last_b = b, last_h = h, last_n = n;
                }
            if (speaks) ptx::mbarrier_arrive(smem.k_empty);
        }
        if constexpr (kPairs > 1) {
            receive(turn - 1);
            write(share, last_b, last_h, last_n);
        }
        ptx::cluster_sync();  // until then other blocks read this one's shared memory, and count at its barriers
        return;
    }

    ptx::setmaxnreg_inc<Shape::kMmaRegisters>();
    const int j1 = j0 + 64 * wg, row0 = 16 * warp;  // first key of the warpgroup, and of these the warp's first
    int turn = 0;
    for (int head = first_head, round = 0; head < heads; head += clusters, ++round) {
        float dk[D / 2] = {}, dv[D / 2] = {};
        ptx::keep_in_place(dk);
        ptx::keep_in_place(dv);
        ptx::mbarrier_wait(smem.k_full, round % 2);
        ptx::mbarrier_wait(smem.v_full[wg], round % 2);
        repeat(turns, [&] {
            multiply<kMasked>(dk, dv, smem, turn, me, scale_log2, Nkv - j1 - row0 - lane / 4);
            ++turn;
        });
        if (lane == 0) ptx::mbarrier_arrive(smem.k_empty);

        // dV and dK through the memory of V, from where TMA takes them.
        const int b = head / kv_heads, hkv = head % kv_heads;
        store_gradient(dv, dV_map, 1.0f, smem, me, j1, hkv, b, Nkv);
        store_gradient(dk, dK_map, scale, smem, me, j1, hkv, b, Nkv);
        if (speaks) ptx::mbarrier_arrive(smem.v_empty[wg]);
    }
    if (threadIdx.x == 0) watch.end();
    ptx::cluster_sync();
}

}  // namespace step06
