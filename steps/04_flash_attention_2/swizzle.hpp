/// @file
/// A tile of 16-bit elements in shared memory that ldmatrix reads without bank conflicts.
#pragma once

#include "simt/simt.hpp"

namespace step04 {

/// Rows of D elements, stored in chunks of 8 (16 bytes). ldmatrix reads one chunk from each of eight consecutive rows; D elements
/// fill all 32 banks a whole number of times, so unswizzled those eight chunks would lie in the same four banks. Chunk c of row
/// r is kept at place c ^ (r % 8) of its row: eight rows, eight different groups of four banks.
template <class T, int D>
struct SwizzledTile {
    static_assert(sizeof(T) == 2 && D % 64 == 0, "a row must be a whole number of 128-byte bank rows");
    T* data;

    /// Address of elements (r, c) .. (r, c + 7); c is a multiple of 8.
    SIMT_DEVICE T* chunk(int r, int c) const { return data + r * D + (c ^ (r % 8 * 8)); }
};

}  // namespace step04
