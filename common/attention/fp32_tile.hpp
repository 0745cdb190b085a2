/// @file
/// Products of float32 tiles in shared memory on the FMA units, for the stages that do not use tensor cores.
#pragma once

#include "simt/simt.hpp"

namespace workbook {

/// The thread block of these functions: 16 x 16 threads.
inline constexpr int kTileSide = 16;
inline constexpr int kTileThreads = kTileSide * kTileSide;

/// Calls f with the head dimension as its template argument: 32, 64 or 128, which the stages made of these tiles take.
template <class F>
decltype(auto) with_fp32_head_dim(int d, F&& f) {
    switch (d) {
        case 32: return f.template operator()<32>();
        case 64: return f.template operator()<64>();
        default: return f.template operator()<128>();
    }
}

/// Copies `rows` rows of a matrix in global memory, from row0 on, into a tile; rows past its end become zero.
template <class T>
SIMT_DEVICE void load_tile(const simt::SharedTile<float>& tile, const simt::TensorView<const T, 2>& matrix, int row0, int rows) {
    const int d = matrix.extent(1);
    for (int e = threadIdx.x; e < rows * d; e += kTileThreads) {
        const int r = e / d, c = e % d;
        tile(r, c) = row0 + r < matrix.extent(0) ? simt::to_float(matrix(row0 + r, c)) : 0.0f;
    }
}

/// Adds to the register block of one thread: kR x kC results out of a 16 kR x 16 kC piece of a product. Thread (y, x) has rows
/// y, y + 16, ... and columns x, x + 16, ...; a(r, k) and b(k, c) read the operands, both from shared memory.
template <int kR, int kC, class A, class B>
SIMT_DEVICE void multiply(float (&acc)[kR][kC], int r0, int c0, int rows, int cols, int depth, A a, B b) {
    const int y = threadIdx.x / kTileSide, x = threadIdx.x % kTileSide;
    // Past the edge of the tile a thread works on the last row or column again; the caller drops the result.
    int r[kR], c[kC];
#pragma unroll
    for (int u = 0; u < kR; ++u) r[u] = min(r0 + y + kTileSide * u, rows - 1);
#pragma unroll
    for (int v = 0; v < kC; ++v) c[v] = min(c0 + x + kTileSide * v, cols - 1);
    for (int k = 0; k < depth; ++k) {
        float left[kR], right[kC];
#pragma unroll
        for (int u = 0; u < kR; ++u) left[u] = a(r[u], k);
#pragma unroll
        for (int v = 0; v < kC; ++v) right[v] = b(k, c[v]);
#pragma unroll
        for (int u = 0; u < kR; ++u)
#pragma unroll
            for (int v = 0; v < kC; ++v) acc[u][v] += left[u] * right[v];
    }
}

}  // namespace workbook
