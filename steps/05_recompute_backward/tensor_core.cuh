// The backward pass on tensor cores: 05b with all five products on mma.sync. A thread block owns Bc keys and walks over the queries. The
// scores are computed transposed, keys by queries: so P^T and dS^T are, in the registers they were computed in, the A operands of
// dV += P^T dO and dK += dS^T Q. dQ = dS K sums over the keys of all warps; dS goes through shared memory for it.
#pragma once

#include "attention/mask.hpp"
#include "attention/swizzled_tile.hpp"
#include "ptx/cp_async.hpp"
#include "ptx/ex2.hpp"
#include "ptx/ldmatrix.hpp"
#include "ptx/mma.hpp"
#include "ptx/red.hpp"
#include "simt/simt.hpp"
#include "simt/vector.hpp"

namespace step05 {

using simt::TensorView;
using workbook::copy_tile;
using workbook::for_own_chunks;
using workbook::LaneOffset;
using workbook::Mask;
using workbook::swizzled;

/// Shape of a thread block's work: Br queries at a time; kSplit warps share 16 kM keys. Each of them computes the scores of its share of
/// the queries, kQ at a time, and has its share of the columns of dK and dV: so that 32 rows of both fit into a warp's registers at
/// D = 128, and every fragment loaded is used twice.
template <int kD, int kBr, int kQueries, int kNumWarps, int kKeyTiles, int kSharing>
struct Shape {
    static constexpr int D = kD, Br = kBr, kQ = kQueries, kWarps = kNumWarps, kM = kKeyTiles, kSplit = kSharing;
    static constexpr int Bc = 16 * kM * kWarps / kSplit;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kSlots = 2;                         // of the ring for Q and dO
    static constexpr int kColumns = D / kSplit;              // of dK and dV, a warp's
    static constexpr int kColumnsDq = D * Br / 32 / kWarps;  // of dQ, a warp's, in 32 rows
    static_assert(kSplit == 1 || (kSplit == 2 && kColumns % 64 == 0), "half of a row must be whole bank rows");
    static_assert(Br % 64 == 0 && Br / kSplit % kQ == 0 && kColumnsDq % 16 == 0);
};

template <class T, class Shape>
struct Shared {
    alignas(128) T k[Shape::Bc * Shape::D];  // also dK, on its way out
    alignas(128) T v[Shape::Bc * Shape::D];  // also dV
    alignas(128) T q[Shape::kSlots][Shape::Br * Shape::D];
    alignas(128) T d_o[Shape::kSlots][Shape::Br * Shape::D];
    alignas(128) T p[Shape::kSplit > 1 ? Shape::Bc* Shape::Br : 8];  // P^T: keys by queries, for the warps that share keys
    alignas(128) T ds[Shape::Bc * Shape::Br];                        // dS^T
    alignas(16) float lse[Shape::kSlots][Shape::Br];                 // in units of log 2
    alignas(16) float row_sum[Shape::kSlots][Shape::Br];             // D = rowsum(dO o O)
};

/// The work of a thread block: the keys j0 to j0 + Bc - 1 of a key/value head of sequence b, with all query heads that share it.
template <class T, class Shape>
SIMT_DEVICE void key_tile(TensorView<const T, 4> Q4,        // (B, Hq, Nq, D)
                          TensorView<const T, 4> K4,        // (B, Hkv, Nkv, D)
                          TensorView<const T, 4> V4,        // (B, Hkv, Nkv, D)
                          TensorView<const T, 4> dO4,       // (B, Hq, Nq, D)
                          TensorView<const float, 3> LSE2,  // (B, Hq, Nq up to whole blocks)
                          TensorView<const float, 3> D3,    // as LSE2
                          TensorView<float, 4> dQ_acc,      // (B, Hq, ceil(Nq / Br), Br D)
                          TensorView<T, 4> dK4,             // (B, Hkv, Nkv, D)
                          TensorView<T, 4> dV4,             // (B, Hkv, Nkv, D)
                          int j0, int hkv, int b, float scale, Mask mask) {
    constexpr int D = Shape::D, Br = Shape::Br, Bc = Shape::Bc, kM = Shape::kM, kQ = Shape::kQ, kThreads = Shape::kThreads;
    constexpr int kSlots = Shape::kSlots, kSplit = Shape::kSplit;
    constexpr int kN = kQ / 8;               // 8-query columns of S^T
    constexpr int kC = Shape::kColumns / 8;  // 8-element columns of dK and dV
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;  // row and column pair of this lane in a fragment
    const int group = Q4.extent(1) / K4.extent(1);
    const auto K = K4(b, hkv), V = V4(b, hkv);      // (Nkv, D)
    const auto dK = dK4(b, hkv), dV = dV4(b, hkv);  // (Nkv, D)
    const int Nq = Q4.extent(2), Nkv = K.extent(0);
    const float scale_log2 = scale * 1.4426950408889634f;

    // The turns: for each query head that shares the keys, the blocks of queries that see any of them.
    const int first = mask.first_row(j0) / Br;
    const int per_head = max((Nq + Br - 1) / Br - first, 0), turns = group * per_head;
    // The first so many of a head need a mask: from then on all rows see the block's last key, if there is such a key.
    const int masked = j0 + Bc > Nkv ? per_head : (mask.first_row(j0 + Bc - 1) + Br - 1) / Br - first;
    const auto head = [&](int turn) { return hkv * group + turn / per_head; };
    const auto block = [&](int turn) { return first + turn % per_head; };

    auto& smem = simt::shared<Shared<T, Shape>>();
    const int own = warp / kSplit * 16 * kM;                                                        // the warp's first key in the block,
    const int own_query = warp % kSplit * (Br / kSplit), column = warp % kSplit * Shape::kColumns;  // query, and column of dK and dV
    // What the lanes point ldmatrix.x4 at, as in stage 04: an A operand or a transposed B operand; a B operand or a transposed A operand.
    const LaneOffset<D> rows_first(lane % 16, lane / 16 * 8), columns_first(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);

    const auto fetch = [&](int turn) {
        const int slot = turn % kSlots, h = head(turn), i0 = block(turn) * Br;
        const auto Q = Q4(b, h), dO = dO4(b, h);  // (Nq, D)
        if (i0 + Br <= Nq) {
            copy_tile<true, Br, D, kThreads>(smem.q[slot], Q, i0);
            copy_tile<true, Br, D, kThreads>(smem.d_o[slot], dO, i0);
        } else {
            copy_tile<false, Br, D, kThreads>(smem.q[slot], Q, i0);
            copy_tile<false, Br, D, kThreads>(smem.d_o[slot], dO, i0);
        }
        if (threadIdx.x < Br / 4) {
            const int i = 4 * threadIdx.x;
            ptx::cp_async<16>(smem.lse[slot] + i, &LSE2(b, h, i0 + i));
            ptx::cp_async<16>(smem.row_sum[slot] + i, &D3(b, h, i0 + i));
        }
    };

    // S^T = K Q^T and dP^T = V dO^T: the warp's keys by kQ queries.
    const auto multiply = [&](float(&product)[kM][kN][4], const T* keys, const T* queries) {
#pragma unroll
        for (int k = 0; k < D; k += 16) {
            std::uint32_t a[kM][4];
#pragma unroll
            for (int u = 0; u < kM; ++u) ptx::ldmatrix_x4(a[u], keys + rows_first(16 * u, k));
#pragma unroll
            for (int n = 0; n < kN; n += 2) {
                std::uint32_t right[4];
                ptx::ldmatrix_x4(right, queries + columns_first(8 * n, k));
#pragma unroll
                for (int u = 0; u < kM; ++u) {
                    ptx::mma_m16n8k16<T>(product[u][n], a[u], right[0], right[1]);
                    ptx::mma_m16n8k16<T>(product[u][n + 1], a[u], right[2], right[3]);
                }
            }
        }
    };
    // dV += P^T dO and dK += dS^T Q: 16 queries, the warp's columns.
    const auto accumulate = [&](float(&sum)[kM][kC][4], const std::uint32_t(&a)[kM][4], const T* queries) {
#pragma unroll
        for (int c = 0; c < kC; c += 2) {
            std::uint32_t right[4];
            ptx::ldmatrix_x4_trans(right, queries + column + rows_first(0, 8 * c));
#pragma unroll
            for (int u = 0; u < kM; ++u) {
                ptx::mma_m16n8k16<T>(sum[u][c], a[u], right[0], right[1]);
                ptx::mma_m16n8k16<T>(sum[u][c + 1], a[u], right[2], right[3]);
            }
        }
    };

    float dk[kM][kC][4] = {}, dv[kM][kC][4] = {};

    const auto step = [&]<bool kMasked>(int turn) {
        const int slot = turn % kSlots, i0 = block(turn) * Br;
        const T *const Qs = smem.q[slot], *const dOs = smem.d_o[slot];
#pragma unroll
        for (int i = 0; i < Br / kSplit; i += kQ) {
            float s[kM][kN][4] = {}, dp[kM][kN][4] = {};
            multiply(s, smem.k + own * D, Qs + (own_query + i) * D);
            multiply(dp, smem.v + own * D, dOs + (own_query + i) * D);
#pragma unroll
            for (int n = 0; n < kN; n += 2) {
                // P^T = 2^(c S^T - LSE) with c = scale * log2(e), and dS^T = P^T o (dP^T - D), of 16 queries: A operands.
                std::uint32_t p[kM][4], ds[kM][4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int query = own_query + i + 8 * (n + half) + 2 * t;  // and the next one
                    const float2 lse = simt::load_shared_8(smem.lse[slot] + query);
                    const float2 row_sum = simt::load_shared_8(smem.row_sum[slot] + query);
#pragma unroll
                    for (int u = 0; u < kM; ++u)
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            float x = ptx::ex2_approx_ftz(scale_log2 * s[u][n + half][2 * r] - lse.x);
                            float y = ptx::ex2_approx_ftz(scale_log2 * s[u][n + half][2 * r + 1] - lse.y);
                            const int key = own + 16 * u + 8 * r + g;
                            if constexpr (kMasked) {
                                if (j0 + key >= Nkv || mask.hides(i0 + query, j0 + key)) x = 0.0f;
                                if (j0 + key >= Nkv || mask.hides(i0 + query + 1, j0 + key)) y = 0.0f;
                            }
                            const int e = 2 * half + r;
                            p[u][e] = ptx::pack<T>(x, y);
                            ds[u][e] = ptx::pack<T>(x * (dp[u][n + half][2 * r] - row_sum.x), y * (dp[u][n + half][2 * r + 1] - row_sum.y));
                            const int place = swizzled<Br>(key, query - 2 * t) + 2 * t;
                            if constexpr (kSplit > 1) simt::store_shared_4(smem.p + place, p[u][e]);
                            simt::store_shared_4(smem.ds + place, ds[u][e]);
                        }
                }
                accumulate(dv, p, dOs + (own_query + i + 8 * n) * D);
                accumulate(dk, ds, Qs + (own_query + i + 8 * n) * D);
            }
        }
        __syncthreads();  // P and dS are whole
        if constexpr (kSplit > 1) {
            const int others = Br / 2 - own_query;  // the queries of the warp that shares these keys
#pragma unroll
            for (int i = others; i < others + Br / 2; i += 16) {
                std::uint32_t p[kM][4], ds[kM][4];
#pragma unroll
                for (int u = 0; u < kM; ++u) {
                    const int place = swizzled<Br>(own + 16 * u + lane % 16, i + lane / 16 * 8);
                    ptx::ldmatrix_x4(p[u], smem.p + place);
                    ptx::ldmatrix_x4(ds[u], smem.ds + place);
                }
                accumulate(dv, p, dOs + i * D);
                accumulate(dk, ds, Qs + i * D);
            }
        }
    };

    // dQ = dS K over the keys of this block: 32 queries by kColumnsDq columns a warp. In dQ_acc what a lane adds lies side by side, four
    // numbers of one row, and what a warp adds is 512 bytes without a gap; finish() puts it in order.
    const auto add_dq = [&](int turn) {
        constexpr int kAcross = D / Shape::kColumnsDq, kCq = Shape::kColumnsDq / 8;  // warps side by side; 8-element columns
        const int row = warp / kAcross * 32, first_column = warp % kAcross * Shape::kColumnsDq;
        float dq[2][kCq][4] = {};
#pragma unroll
        for (int k = 0; k < Bc; k += 16) {
            std::uint32_t a[2][4];
#pragma unroll
            for (int u = 0; u < 2; ++u)
                ptx::ldmatrix_x4_trans(a[u], smem.ds + swizzled<Br>(k + lane % 8 + lane / 16 * 8, row + 16 * u + lane / 8 % 2 * 8));
#pragma unroll
            for (int c = 0; c < kCq; c += 2) {
                std::uint32_t right[4];
                ptx::ldmatrix_x4_trans(right, smem.k + swizzled<D>(k + lane % 16, first_column + 8 * c + lane / 16 * 8));
#pragma unroll
                for (int u = 0; u < 2; ++u) {
                    ptx::mma_m16n8k16<T>(dq[u][c], a[u], right[0], right[1]);
                    ptx::mma_m16n8k16<T>(dq[u][c + 1], a[u], right[2], right[3]);
                }
            }
        }
        const auto sum = dQ_acc(b, head(turn), block(turn));  // (Br D)
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int c = 0; c < kCq; c += 2) {
                    const float x[4] = {dq[u][c][2 * r], dq[u][c][2 * r + 1], dq[u][c + 1][2 * r], dq[u][c + 1][2 * r + 1]};
                    ptx::red_add_f32x4(&sum(((warp * 4 + 2 * u + r) * (kCq / 2) + c / 2) * 128 + 4 * lane), x);
                }
    };

    if (turns > 0) {
        copy_tile<false, Bc, D, kThreads>(smem.k, K, j0);
        copy_tile<false, Bc, D, kThreads>(smem.v, V, j0);
        fetch(0);
        ptx::cp_async_commit();
    }
    for (int turn = 0; turn < turns; ++turn) {
        ptx::cp_async_wait<0>();  // Q, dO, LSE and D of this turn have landed
        __syncthreads();          // for all threads; and nobody reads those of the turn before, P and dS any more
        if (turn + 1 < turns) fetch(turn + 1);
        ptx::cp_async_commit();
        if (turn % per_head < masked)
            step.template operator()<true>(turn);
        else
            step.template operator()<false>(turn);
        add_dq(turn);
    }
    __syncthreads();  // nobody reads K and V any more

    // dK and dV through the memory of K and V, so that they leave in whole 16-byte chunks.
    const auto place = [&](T* tile, const float(&sum)[kM][kC][4], float factor) {
#pragma unroll
        for (int u = 0; u < kM; ++u)
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int c = 0; c < kC; ++c)
                    simt::store_shared_4(tile + swizzled<D>(own + 16 * u + 8 * r + g, column + 8 * c) + 2 * t,
                                         ptx::pack<T>(sum[u][c][2 * r] * factor, sum[u][c][2 * r + 1] * factor));
    };
    place(smem.k, dk, scale);
    place(smem.v, dv, 1.0f);
    __syncthreads();  // dK and dV are whole
    for_own_chunks<Bc, D, kThreads>([&](int r, int c) {
        const uint4 x = simt::load_shared_16(smem.k + swizzled<D>(r, c)), y = simt::load_shared_16(smem.v + swizzled<D>(r, c));
        if (j0 + r >= Nkv) return;
        simt::store_global_16(&dK(j0 + r, c), x);
        simt::store_global_16(&dV(j0 + r, c), y);
    });
}

template <class T, class Shape>
__global__ __launch_bounds__(Shape::kThreads) void tensor_core(TensorView<const T, 4> Q, TensorView<const T, 4> K, TensorView<const T, 4> V,
                                                               TensorView<const T, 4> dO, TensorView<const float, 3> LSE2,
                                                               TensorView<const float, 3> D3, TensorView<float, 4> dQ_acc,
                                                               TensorView<T, 4> dK, TensorView<T, 4> dV, float scale, Mask mask) {
    key_tile<T, Shape>(Q, K, V, dO, LSE2, D3, dQ_acc, dK, dV, blockIdx.x * Shape::Bc, blockIdx.y, blockIdx.z, scale, mask);
}

}  // namespace step05
