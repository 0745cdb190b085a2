// Rows of d elements over the lanes of a team, for the kernels that work on one row at a time.
#pragma once

#include "simt/simt.hpp"

namespace step05 {

using simt::from_float;
using simt::TensorView;
using simt::to_float;

inline constexpr int kThreads = 256;

// A team of kLanes lanes owns a row: lane t has elements t, t + kLanes, t + 2 kLanes, ... in registers. Kernels of N^2 dot products have
// teams of d / 16 lanes, since each product costs a shuffle for every doubling of the team.
inline constexpr int kPerLane = 16;

// Zeros where the row is not `live`.
template <int kLanes, int kElements, class T>
SIMT_DEVICE void load_row(float (&row)[kElements], const TensorView<const T, 2>& matrix, int r, bool live = true) {
    const int lane = threadIdx.x % kLanes, d = matrix.extent(1);
#pragma unroll
    for (int e = 0; e < kElements; ++e) row[e] = live && lane + kLanes * e < d ? to_float(matrix(r, lane + kLanes * e)) : 0.0f;
}

template <int kLanes, int kElements, class T>
SIMT_DEVICE void store_row(const TensorView<T, 2>& matrix, int r, const float (&row)[kElements], float factor) {
    const int lane = threadIdx.x % kLanes, d = matrix.extent(1);
#pragma unroll
    for (int e = 0; e < kElements; ++e)
        if (lane + kLanes * e < d) matrix(r, lane + kLanes * e) = from_float<T>(factor * row[e]);
}

// Every lane of the team gets it. All lanes of the warp must call.
template <int kLanes, int kElements>
SIMT_DEVICE float dot(const float (&a)[kElements], const float (&b)[kElements]) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < kElements; ++e) sum += a[e] * b[e];
    return simt::warp_sum<kLanes>(sum);
}

}  // namespace step05
