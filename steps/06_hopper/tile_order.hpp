/// @file
/// The order in which a persistent grid takes the tiles of Q, and how its producers hand them out.
#pragma once

#include "ptx/cp_async_bulk.hpp"
#include "ptx/mbarrier.hpp"
#include "simt/vector.hpp"

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
    /// The blocks of keys, of all that its tile visits, of a place.
    struct Range {
        int begin, end;
    };
    SIMT_BOTH Range range(const Place& place, int blocks) const {
        if (place.piece < 0) return {0, blocks};
        return {blocks * place.part / parts, blocks * (place.part + 1) / parts};
    }
};

/// What the producer tells a warpgroup of the next tile.
struct Task {
    uint4 place;  ///< its number in the head, head, sequence, and 1; or 0: there is no other tile
    uint4 keys;   ///< first of the blocks of keys, the one after the last; number of the piece and 1, or 0 and 0 where the tile is whole
};
SIMT_DEVICE Task task(const TileOrder::Place& at, const TileOrder::Range& keys) {
    const auto number = [](int x) { return static_cast<unsigned>(x); };
    return {{number(at.tile), number(at.h), number(at.b), 1},
            {number(keys.begin), number(keys.end), at.piece < 0 ? 0 : number(at.piece), at.piece < 0 ? 0u : 1u}};
}

/// Gives each warpgroup its next tile: where it is, and its 64 queries, once it has handed back those of the last one. One thread, the
/// producer's, calls. @param smem has q, q_full, q_empty and task, one for each warpgroup @param blocks of keys, of all of `keys`
/// @param round tiles before this one
template <class Smem>
SIMT_DEVICE void hand_out(Smem& smem, const ptx::TensorMap& Q_map, const TileOrder::Place& place, const TileOrder::Range& keys, int blocks,
                          unsigned round) {
    constexpr int kGroups = sizeof smem.q / sizeof smem.q[0];
    const int i0 = place.tile * (64 * kGroups);
    for (int w = 0; w < kGroups; ++w) {
        ptx::mbarrier_wait(smem.q_empty[w], round % 2 ^ 1);
        const Task next_task = task(place, keys);
        simt::store_shared_16(&smem.task[w].place, next_task.place);
        simt::store_shared_16(&smem.task[w].keys, next_task.keys);
        if (blocks == 0) {  // nothing to multiply with
            ptx::mbarrier_arrive(smem.q_full[w]);
            continue;
        }
        ptx::mbarrier_arrive_expect_tx(smem.q_full[w], sizeof smem.q[w]);
        ptx::cp_async_bulk_tensor_load(smem.q[w].data, Q_map, {0, i0 + 64 * w, 0, place.h, place.b}, smem.q_full[w],
                                       ptx::CachePolicy::evict_first);
    }
}

/// Tells each warpgroup, likewise, that there is no other tile.
template <class Smem>
SIMT_DEVICE void hand_out_nothing(Smem& smem, unsigned round) {
    constexpr int kGroups = sizeof smem.q / sizeof smem.q[0];
    for (int w = 0; w < kGroups; ++w) {
        ptx::mbarrier_wait(smem.q_empty[w], round % 2 ^ 1);
        simt::store_shared_16(&smem.task[w].place, uint4{});
        ptx::mbarrier_arrive(smem.q_full[w]);
    }
}

}  // namespace step06
