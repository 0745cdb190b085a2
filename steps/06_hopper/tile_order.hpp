/// @file
/// The order in which a persistent grid takes the tiles of Q.
#pragma once

#include "simt/simt.hpp"

namespace step06 {

/// Heads come in bundles whose K and V the L2 cache holds, so that the blocks at work read the same keys. Within a bundle the tiles
/// that see most keys come first and those that see fewest fill what is left at the end; neighbours in the order are then tiles of
/// neighbouring heads. In bundles of one head they are neighbouring tiles of the head.
struct TileOrder {
    int tiles;   ///< of a head
    int heads;   ///< of a sequence
    int batch;   ///< sequences
    int bundle;  ///< heads

    struct Place {
        int tile, h, b;
    };
    SIMT_BOTH int count() const { return tiles * heads * batch; }
    /// @param n below count()
    SIMT_DEVICE Place at(int n) const {
        const int first = n / (tiles * bundle) * bundle;  // head of the bundle, counted over all sequences
        const int size = min(bundle, heads * batch - first);
        const int rest = n - first * tiles, head = first + rest % size;
        return {tiles - 1 - rest / size, head % heads, head / heads};
    }
};

}  // namespace step06
