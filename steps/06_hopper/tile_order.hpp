/// @file
/// The order in which a persistent grid takes the tiles of Q.
#pragma once

#include "simt/config.hpp"

namespace step06 {

/// Heads come in bundles whose K and V the L2 cache holds, so that the blocks at work read the same keys. Within a bundle the tiles
/// that see most keys come first and those that see fewest fill what is left at the end; neighbours in the order are then tiles of
/// neighbouring heads. In bundles of one head they are neighbouring tiles of the head.
///
/// The tiles from number `split` on are divided by their keys: each is `parts` numbers, one after the other, and merge_tail() makes one of
/// what they leave. So the last round of a grid is shorter than a tile.
struct TileOrder {
    int tiles;      ///< of a head
    int heads;      ///< of a sequence
    int batch;      ///< sequences
    int bundle;     ///< heads
    int split = 0;  ///< with parts > 1: tiles before the divided ones
    int parts = 1;

    struct Place {
        int tile, h, b;
        int part;   ///< of `parts`; 0 where the tile is whole
        int piece;  ///< number of this part of this tile among all pieces; -1 where the tile is whole
    };
    SIMT_BOTH int all_tiles() const { return tiles * heads * batch; }
    SIMT_BOTH int pieces() const { return parts > 1 ? (all_tiles() - split) * parts : 0; }
    SIMT_BOTH int count() const { return parts > 1 ? split + pieces() : all_tiles(); }
    /// @param n below count()
    SIMT_BOTH Place at(int n) const {
        const int piece = parts > 1 && n >= split ? n - split : -1;
        if (piece >= 0) n = split + piece / parts;
        const int first = n / (tiles * bundle) * bundle;  // head of the bundle, counted over all sequences
        const int left = heads * batch - first, size = bundle < left ? bundle : left;
        const int rest = n - first * tiles, head = first + rest % size;
        return {tiles - 1 - rest / size, head % heads, head / heads, piece < 0 ? 0 : piece % parts, piece};
    }
    /// First of the `blocks` blocks of keys of a part; that of the next part is where it ends.
    SIMT_BOTH int begin(int part, int blocks) const { return static_cast<int>(static_cast<long long>(blocks) * part / parts); }
};

}  // namespace step06
