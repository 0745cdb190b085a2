/// @file
/// Tiles of 16-bit elements in shared memory: how they are swizzled so that ldmatrix reads them without bank conflicts, and how
/// cp.async fills them.
#pragma once

#include "ptx/cp_async.hpp"
#include "simt/simt.hpp"

namespace workbook {

/// Rows of D elements, stored in chunks of 8 (16 bytes). ldmatrix reads one chunk from each of eight consecutive rows; D elements
/// fill all 32 banks a whole number of times, so unswizzled those eight chunks would lie in the same four banks. Chunk c of row
/// r is kept at place c ^ (r % 8) of its row: eight rows, eight different groups of four banks.
///
/// Offset of elements (r, c) .. (r, c + 7) in a tile; c is a multiple of 8.
template <int D>
SIMT_DEVICE int swizzled(int r, int c) {
    static_assert(D % 64 == 0, "a row must be a whole number of 128-byte bank rows");
    return r * D + (c ^ (r % 8 * 8));
}

/// The offsets that one lane gives to ldmatrix, all from one register: a step of 8 rows leaves r % 8 as it is, and adds a constant
/// that fits into the instruction; a step of 16 columns changes bits that the lane's own column (0 or 8) does not have.
template <int D>
class LaneOffset {
public:
    SIMT_DEVICE LaneOffset(int r, int c) : corner_(swizzled<D>(r, c)) {}

    /// swizzled(r + rows, c + columns), for multiples of 8 and of 16.
    SIMT_DEVICE int operator()(int rows, int columns) const { return rows * D + columns / 64 * 64 + (corner_ ^ columns % 64); }

private:
    int corner_;
};

/// Calls f(r, c) for the chunks (r, c .. c + 7) of a tile that are this thread's: one of every few rows.
template <int kRows, int D, int kThreads, class F>
SIMT_DEVICE void for_own_chunks(F&& f) {
    constexpr int kChunks = D / 8, kStep = kThreads / kChunks;  // rows that the threads cover at a time
    static_assert(kThreads % kChunks == 0 && kRows % kStep == 0, "every thread has one chunk of every kStep-th row");
    const int r0 = threadIdx.x / kChunks, c = threadIdx.x % kChunks * 8;
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) f(r0 + r, c);
}

/// Starts the copies of `kRows` rows from row0 on; rows past the matrix become zero. kWhole: there are none.
template <bool kWhole, int kRows, int D, int kThreads, class T>
SIMT_DEVICE void copy_tile(T* tile, const simt::TensorView<const T, 2>& matrix, int row0) {
    const int last = matrix.extent(0) - 1;
    for_own_chunks<kRows, D, kThreads>([&](int r, int c) {
        const int row = row0 + r;
        ptx::cp_async<16>(tile + swizzled<D>(r, c), &matrix(kWhole ? row : min(row, last), c), kWhole || row <= last);
    });
}

}  // namespace workbook
