// Parts of a softmax row over different keys become one by the three formulas of the online softmax: what the warps of a block have
// found, and what the blocks have left in memory.
#pragma once

#include "ptx/ex2.hpp"
#include "ptx/griddepcontrol.hpp"
#include "ptx/mma.hpp"
#include "simt/simt.hpp"
#include "simt/vector.hpp"

namespace stepa {

using simt::TensorView;

/// Columns of O that a thread merges: 16 bytes in float32.
inline constexpr int kColumns = 4;

/// Maximum m and sum l of a row over some keys, in units of the exponent of 2, and kColumns of its O, not yet divided by l.
struct Part {
    float m = -INFINITY, l = 0.0f;
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};

    SIMT_DEVICE void merge(const Part& other) {
        const float m_new = fmaxf(m, other.m);
        const float reference = m_new == -INFINITY ? 0.0f : m_new;
        const float alpha = ptx::ex2_approx_ftz(m - reference), beta = ptx::ex2_approx_ftz(other.m - reference);
        m = m_new;
        l = alpha * l + beta * other.l;
        o.x = alpha * o.x + beta * other.o.x;
        o.y = alpha * o.y + beta * other.o.y;
        o.z = alpha * o.z + beta * other.o.z;
        o.w = alpha * o.w + beta * other.o.w;
    }

    /// Divides by l, once all keys are in it. A row that sees no key is zero.
    template <class T>
    SIMT_DEVICE uint2 output() const {
        const float inverse = l > 0.0f ? 1.0f / l : 0.0f;
        return {ptx::pack<T>(o.x * inverse, o.y * inverse), ptx::pack<T>(o.z * inverse, o.w * inverse)};
    }
    SIMT_DEVICE float lse() const {
        constexpr float kLn2 = 0.6931471805599453f;
        return l > 0.0f ? kLn2 * (m + log2f(l)) : -INFINITY;
    }
};

/// Threads of a block that merge each row: D / kColumns in x; in y they share the splits.
inline constexpr int kMergers = 8;

template <int D>
struct MergeShared {
    alignas(16) float o[kMergers][D];
    float m[kMergers], l[kMergers];
};

/// A block merges one row.
template <class T, int D>
__global__ __launch_bounds__(D / kColumns * kMergers) void merge_splits(TensorView<const float, 5> O_part,  // (splits, B, Hq, Nq, D)
                                                                        TensorView<const float, 4> m_part,  // (splits, B, Hq, Nq)
                                                                        TensorView<const float, 4> l_part,  // (splits, B, Hq, Nq)
                                                                        TensorView<T, 4> O,                 // (B, Hq, Nq, D)
                                                                        TensorView<float, 3> LSE) {         // (B, Hq, Nq)
    const int i = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    const int c = static_cast<int>(threadIdx.x) * kColumns, y = threadIdx.y;
    const int splits = O_part.extent(0);
    ptx::griddepcontrol_wait();  // for the parts

    Part row;
#pragma unroll 4
    for (int s = y; s < splits; s += kMergers) {
        Part part;
        part.m = m_part(s, b, h, i);
        part.l = l_part(s, b, h, i);
        part.o = simt::load_global_16<float4>(&O_part(s, b, h, i, c));
        row.merge(part);
    }

    auto& smem = simt::shared<MergeShared<D>>();
    simt::store_shared_16(&smem.o[y][c], row.o);
    if (c == 0) smem.m[y] = row.m, smem.l[y] = row.l;
    __syncthreads();  // all parts are there before the first threads merge them
    if (y > 0) return;
    for (int other = 1; other < kMergers; ++other) {
        Part part;
        part.m = smem.m[other];
        part.l = smem.l[other];
        part.o = simt::load_shared_16<float4>(&smem.o[other][c]);
        row.merge(part);
    }
    simt::store_global_8(&O(b, h, i, c), row.output<T>());
    if (c == 0) LSE(b, h, i) = row.lse();
}

}  // namespace stepa
