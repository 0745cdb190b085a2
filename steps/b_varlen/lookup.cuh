// How a thread block finds its tile in the table, and the rows of a tensor that are its sequence's.
#pragma once

#include "b_varlen/tiles.hpp"
#include "simt/simt.hpp"

namespace stepb {

using simt::TensorView;
using workbook::Mask;

/// Tile `index` of the table. Each lane reads one number, so that a warp asks for 128 bytes of one sector; then they go round.
SIMT_DEVICE Tile look_up(const TensorView<const int, 2>& tiles,  // (tiles, kTileNumbers)
                         int index) {
    const int number = tiles(index, threadIdx.x % kTileNumbers);
    const auto get = [&](int n) { return __shfl_sync(simt::kFullMask, number, n); };
    return {get(0), get(1), get(2), get(3), get(4), get(5), get(6), get(7)};
}

// The part of a tensor (1, H, rows, ...) that belongs to the tile's sequence.
template <class View>
SIMT_DEVICE View queries_of(const Tile& tile, const View& tensor) {
    return tensor.template slice<2>(tile.first_query, tile.queries);
}
template <class View>
SIMT_DEVICE View keys_of(const Tile& tile, const View& tensor) {
    return tensor.template slice<2>(tile.first_key, tile.keys);
}

SIMT_DEVICE Mask mask_of(const Tile& tile, bool causal) { return Mask(causal, tile.queries, tile.keys); }

}  // namespace stepb
