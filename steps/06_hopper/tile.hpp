/// @file
/// A tile of 16-bit elements in shared memory as TMA writes it and wgmma reads it.
#pragma once

#include "ptx/wgmma.hpp"
#include "simt/vector.hpp"

namespace step06 {

/// kRows rows of D elements. TMA's widest swizzle takes lines of 128 bytes, 64 elements, so a tile is D / 64 panels side by side, each
/// kRows lines, and within a line chunk c (16 bytes) of row r lies at place c ^ (r % 8).
template <class T, int kRows, int D>
struct alignas(1024) Tile {
    static_assert(sizeof(T) == 2 && D % 64 == 0 && kRows % 8 == 0, "a tile is made of atoms of 8 rows and 64 elements");
    static constexpr int kColumns = D;
    static constexpr int kBytes = kRows * D * 2;
    static constexpr int kPanel = kRows * 128;  // bytes
    static constexpr int kAtom = 1024;          // bytes of 8 lines

    T data[kRows * D];

    /// For a product over the columns, as Q K^T is for both operands.
    SIMT_DEVICE ptx::MatrixDescriptor over_columns() const { return ptx::MatrixDescriptor::of({.start = data, .stride = kAtom}); }
    /// Bytes from the first 16 columns to the k-th 16.
    static SIMT_DEVICE constexpr int column_step(int k) { return k / 4 * kPanel + k % 4 * 32; }

    /// For a product over the rows, as P V is for V.
    SIMT_DEVICE ptx::MatrixDescriptor over_rows() const {
        return ptx::MatrixDescriptor::of({.start = data, .leading = kPanel, .stride = kAtom});
    }
    /// Bytes from the first 16 rows to the k-th 16.
    static SIMT_DEVICE constexpr int row_step(int k) { return k * 2 * kAtom; }

    /// Address of elements (r, c) .. (r, c + 7); c is a multiple of 8.
    SIMT_DEVICE T* chunk(int r, int c) { return data + c / 64 * (kRows * 64) + r * 64 + (c % 64 ^ r % 8 * 8); }
};

/// Turns the sign of all elements. The 128 threads of a warpgroup do it together; @p thread is the number among them. What TMA or wgmma
/// shall see of it needs ptx::fence_proxy_async().
template <class T, int kRows, int D>
SIMT_DEVICE void negate(Tile<T, kRows, D>& tile, unsigned thread) {
    constexpr std::uint32_t kSigns = 0x80008000;
#pragma unroll 4
    for (unsigned at = 8 * thread; at < kRows * D; at += 8 * 128) {
        uint4 eight = simt::load_shared_16<uint4>(tile.data + at);
        eight.x ^= kSigns, eight.y ^= kSigns, eight.z ^= kSigns, eight.w ^= kSigns;
        simt::store_shared_16(tile.data + at, eight);
    }
}

}  // namespace step06
