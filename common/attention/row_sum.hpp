/// @file
/// D = rowsum(dO o O), of rows of 16-bit elements: what a backward pass subtracts from dP (FlashAttention-2, Algorithm 2, line 4).
#pragma once

#include "ptx/mma.hpp"
#include "simt/simt.hpp"
#include "simt/vector.hpp"

namespace workbook {

/// The sum of row i of a head, (Nq, D) both; 0 where there is no such row. kD / 8 neighbouring lanes have a row: each calls with c the
/// first of its eight columns, and gets the sum. All lanes of the warp must call.
template <int kD, class T>
SIMT_DEVICE float row_sum(const simt::TensorView<const T, 2>& O, const simt::TensorView<const T, 2>& dO, int i, int c) {
    float sum = 0.0f;
    if (i < O.extent(0)) {
        const uint4 o = simt::load_global_16(&O(i, c)), g = simt::load_global_16(&dO(i, c));
        const std::uint32_t left[] = {o.x, o.y, o.z, o.w}, right[] = {g.x, g.y, g.z, g.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 x = ptx::unpack<T>(left[e]), y = ptx::unpack<T>(right[e]);
            sum += x.x * y.x + x.y * y.y;
        }
    }
    return simt::warp_sum<kD / 8>(sum);
}

}  // namespace workbook
