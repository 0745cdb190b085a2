// Split-KV decoding: the keys of a sequence are divided among thread blocks, so that a few queries keep the whole GPU reading. Each
// block leaves O, m and l of its keys; merge_splits() makes one of them. The query heads that share a key/value head are rows of one
// tile, so that K and V are read once for all of them.
#pragma once

#include "a_split_kv_decode/cache.cuh"
#include "a_split_kv_decode/merge.cuh"
#include "attention/mask.hpp"
#include "attention/swizzled_tile.hpp"
#include "ptx/cp_async.hpp"
#include "ptx/ldmatrix.hpp"

namespace stepa {

using workbook::for_own_chunks;
using workbook::LaneOffset;
using workbook::Mask;
using workbook::swizzled;

/// Shape of a thread block's work: four warps, of which kRowWarps take different rows, and the others different keys of the same rows.
/// A warp has kM tiles of 16 rows. A slot of the ring holds 32 KiB of K and V; while one is read, the other two are on their way.
template <int kD, int kRowWarps_, int kRowTiles>
struct Shape {
    static constexpr int D = kD, kM = kRowTiles, kRowWarps = kRowWarps_;
    static constexpr int kWarps = 4, kThreads = 32 * kWarps, kKeyWarps = kWarps / kRowWarps;
    static constexpr int Br = 16 * kM * kRowWarps;
    static constexpr int Bc = 8192 / D;
    static constexpr int kSlots = 3;
    static constexpr int kPadded = D + 8;  // floats of a row of O in shared memory: rows of eight lanes lie in different banks
};

template <class T, class Shape>
struct Shared {
    struct Slot {
        alignas(128) T k[Shape::Bc * Shape::D];  // of one slot also Q, before K comes
        alignas(128) T v[Shape::Bc * Shape::D];
    };
    Slot slots[Shape::kSlots];  // also O of the warps, at the end
    float m[Shape::kKeyWarps][Shape::Br], l[Shape::kKeyWarps][Shape::Br];

    SIMT_DEVICE float* o(int key_warp, int row, int c) {
        static_assert(sizeof(float) * Shape::kKeyWarps * Shape::Br * Shape::kPadded <= sizeof slots, "O of all warps fits the ring");
        return reinterpret_cast<float*>(slots) + (key_warp * Shape::Br + row) * Shape::kPadded + c;
    }
};

template <class T, class Shape, class Cache>
__global__ __launch_bounds__(Shape::kThreads, 2) void split_kv(TensorView<const T, 4> Q,     // (B, Hq, Nq, D)
                                                               Cache cache,                  // K and V (B, Hkv, Nkv, D)
                                                               TensorView<float, 5> O_part,  // (splits, B, Hq, Nq, D)
                                                               TensorView<float, 4> m_part,  // (splits, B, Hq, Nq)
                                                               TensorView<float, 4> l_part,  // (splits, B, Hq, Nq)
                                                               TensorView<T, 4> O,           // (B, Hq, Nq, D)
                                                               TensorView<float, 3> LSE,     // (B, Hq, Nq)
                                                               float scale_log2,             // softmax_scale * log2(e)
                                                               Mask mask, int split_keys) {  // a multiple of Bc
    constexpr int D = Shape::D, Br = Shape::Br, Bc = Shape::Bc, kM = Shape::kM, kSlots = Shape::kSlots, kThreads = Shape::kThreads;
    constexpr int kC = D / 8;   // 8-element columns of O
    constexpr int kK = D / 16;  // steps of Q K^T along d
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;  // row and column pair of this lane in a fragment
    const int key_warp = warp % Shape::kKeyWarps, warp_row = warp / Shape::kKeyWarps * 16 * kM;
    const int Nq = Q.extent(2), Nkv = cache.Nkv, Hkv = cache.K.extent(1);
    const int group = Q.extent(1) / Hkv, rows = group * Nq;  // row r of a group is query r % Nq of its head r / Nq
    const int row_tiles = static_cast<int>(gridDim.y) / Hkv, row0 = static_cast<int>(blockIdx.y) % row_tiles * Br;
    const int split = blockIdx.x, hkv = static_cast<int>(blockIdx.y) / row_tiles, b = blockIdx.z;
    const auto head = cache.head(b, hkv);
    const int begin = split * split_keys, end = min(begin + split_keys, Nkv);
    const int first = begin / Bc, last = (end + Bc - 1) / Bc;  // tiles of Bc keys
    const float c_log2 = scale_log2 == 0.0f ? 1.0f : fabsf(scale_log2);
    constexpr float kSlack = 8.0f;  // of m behind the maximum, in units of the exponent

    ptx::griddepcontrol_launch_dependents();  // merge_splits(), where there are several

    auto& smem = simt::shared<Shared<T, Shape>>();
    const LaneOffset<D> rows_first(lane % 16, lane / 16 * 8), columns_first(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);

    // Tile j to its slot; keys past the end become zero.
    const auto load = [&](int j) {
        auto& slot = smem.slots[j % kSlots];
        for_own_chunks<Bc, D, kThreads>([&](int r, int c) {
            const int key = j * Bc + r;
            const auto place = head.place(min(key, end - 1));
            ptx::cp_async<16>(slot.k + swizzled<D>(r, c), head.k(place, c), key < end);
            ptx::cp_async<16>(slot.v + swizzled<D>(r, c), head.v(place, c), key < end);
        });
    };

    T* const q_tile = smem.slots[(first + kSlots - 1) % kSlots].k;
    for_own_chunks<Br, D, kThreads>([&](int r, int c) {
        const int row = min(row0 + r, rows - 1);
        ptx::cp_async<16>(q_tile + swizzled<D>(r, c), &Q(b, hkv * group + row / Nq, row % Nq, c), row0 + r < rows);
    });
    ptx::cp_async_commit();
#pragma unroll
    for (int s = 0; s < kSlots - 1; ++s) {
        if (first + s < last) load(first + s);
        ptx::cp_async_commit();
    }
    ptx::cp_async_wait<kSlots - 1>();
    __syncthreads();  // Q has landed for all threads

    // Q takes the sign of the scale, so that the scores need only be multiplied by |scale|, which leaves their maximum where it is. A
    // scale of zero makes Q zero.
    const std::uint32_t keep = scale_log2 == 0.0f ? 0u : 0xffffffffu, flip = scale_log2 < 0.0f ? 0x80008000u : 0u;
    std::uint32_t q[kM][kK][4];
#pragma unroll
    for (int u = 0; u < kM; ++u)
#pragma unroll
        for (int k = 0; k < kK; ++k) {
            ptx::ldmatrix_x4(q[u][k], q_tile + rows_first(warp_row + 16 * u, 16 * k));
#pragma unroll
            for (std::uint32_t& pair : q[u][k]) pair = (pair & keep) ^ flip;
        }

    float o[kM][kC][4] = {};
    float m[kM][2], l[kM][2];  // of rows g and g + 8; l of this lane's columns only, until the end
#pragma unroll
    for (int u = 0; u < kM; ++u)
#pragma unroll
        for (int r = 0; r < 2; ++r) m[u][r] = -INFINITY, l[u][r] = 0.0f;

    for (int j = first; j < last; ++j) {
        ptx::cp_async_wait<kSlots - 2>();  // tile j has landed
        __syncthreads();                   // for all threads; and nobody reads the tile before any more, or Q, whose slot is next
        if (j + kSlots - 1 < last) load(j + kSlots - 1);
        ptx::cp_async_commit();
        const auto& slot = smem.slots[j % kSlots];
        const bool masked = (j + 1) * Bc > end - (Nq - 1);  // past the end, or maybe past what the first query sees

        // This warp's keys of the tile, 16 at a time.
#pragma unroll 1
        for (int n0 = 0; n0 < Bc; n0 += 16 * Shape::kKeyWarps) {
            const int n = n0 + 16 * key_warp;

            // S = Q K^T
            float s[kM][2][4] = {};
#pragma unroll
            for (int k = 0; k < kK; ++k) {
                std::uint32_t keys[4];  // B operands: K^T, 16 of d by twice 8 keys
                ptx::ldmatrix_x4(keys, slot.k + columns_first(n, 16 * k));
#pragma unroll
                for (int u = 0; u < kM; ++u) {
                    ptx::mma_m16n8k16<T>(s[u][0], q[u][k], keys[0], keys[1]);
                    ptx::mma_m16n8k16<T>(s[u][1], q[u][k], keys[2], keys[3]);
                }
            }
            if (masked) {
#pragma unroll
                for (int u = 0; u < kM; ++u)
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        const int i = (row0 + warp_row + 16 * u + e / 2 % 2 * 8 + g) % Nq, key = j * Bc + n + e / 4 * 8 + 2 * t + e % 2;
                        if (key >= end || mask.hides(i, key)) s[u][e / 4][e % 4] = -INFINITY;
                    }
            }

            // m stays as long as no score of the warp exceeds its row's m by a factor of more than 2^8 in P, as in stage 04.
            float top[kM][2];
            bool grows = false;
#pragma unroll
            for (int u = 0; u < kM; ++u)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    top[u][r] = fmaxf(fmaxf(s[u][0][2 * r], s[u][0][2 * r + 1]), fmaxf(s[u][1][2 * r], s[u][1][2 * r + 1]));
                    grows |= c_log2 * (top[u][r] - m[u][r]) > kSlack;
                }
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

            // O += P V: the exponentials, packed into an A operand, then the products.
            std::uint32_t p[kM][4];
#pragma unroll
            for (int u = 0; u < kM; ++u)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const float reference = m[u][r] == -INFINITY ? 0.0f : c_log2 * m[u][r];
                        const float left = ptx::ex2_approx_ftz(c_log2 * s[u][half][2 * r] - reference);
                        const float right = ptx::ex2_approx_ftz(c_log2 * s[u][half][2 * r + 1] - reference);
                        l[u][r] += left;
                        l[u][r] += right;
                        p[u][2 * half + r] = ptx::pack<T>(left, right);
                    }
#pragma unroll
            for (int c = 0; c < kC; c += 2) {
                std::uint32_t values[4];  // B operands: V, 16 keys by twice 8 columns
                ptx::ldmatrix_x4_trans(values, slot.v + rows_first(n, 8 * c));
#pragma unroll
                for (int u = 0; u < kM; ++u) {
                    ptx::mma_m16n8k16<T>(o[u][c], p[u], values[0], values[1]);
                    ptx::mma_m16n8k16<T>(o[u][c + 1], p[u], values[2], values[3]);
                }
            }
        }
    }

    // What the warps have found of the same rows becomes one part, in shared memory.
    __syncthreads();  // nobody reads the ring any more
#pragma unroll
    for (int u = 0; u < kM; ++u)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = warp_row + 16 * u + 8 * r + g;
            const float sum = simt::warp_sum<4>(l[u][r]);
            if (t == 0) smem.m[key_warp][row] = c_log2 * m[u][r], smem.l[key_warp][row] = sum;
#pragma unroll
            for (int c = 0; c < kC; ++c) simt::store_shared_8(smem.o(key_warp, row, 8 * c + 2 * t), {o[u][c][2 * r], o[u][c][2 * r + 1]});
        }
    __syncthreads();  // all parts are there before anyone merges them
#pragma unroll
    for (int e = 0; e < Br * D / kColumns / kThreads; ++e) {
        const int chunk = static_cast<int>(threadIdx.x) + kThreads * e, r = chunk / (D / kColumns), c = chunk % (D / kColumns) * kColumns;
        const int row = row0 + r, h = hkv * group + row / Nq, i = row % Nq;
        if (row >= rows) break;
        Part whole;
#pragma unroll
        for (int w = 0; w < Shape::kKeyWarps; ++w) {
            Part part;
            part.m = smem.m[w][r];
            part.l = smem.l[w][r];
            part.o = simt::load_shared_16<float4>(smem.o(w, r, c));
            whole.merge(part);
        }
        if (gridDim.x > 1) {
            simt::store_global_16(&O_part(split, b, h, i, c), whole.o);
            if (c == 0) m_part(split, b, h, i) = whole.m, l_part(split, b, h, i) = whole.l;
        } else {  // nothing is left to merge
            simt::store_global_8(&O(b, h, i, c), whole.template output<T>());
            if (c == 0) LSE(b, h, i) = whole.lse();
        }
    }
}

}  // namespace stepa
