/// @file
/// The order in which a persistent grid takes the tiles of Q, and how its producers hand them out.
#pragma once

#include "ptx/cp_async_bulk.hpp"
#include "ptx/fence.hpp"
#include "ptx/mbarrier.hpp"
#include "simt/vector.hpp"
#include "tensor/view.hpp"

namespace step06 {

/// Heads come in bundles whose K and V the L2 cache holds, so that the blocks at work read the same keys. Within a bundle the tiles
/// that see most keys come first and those that see fewest fill what is left at the end; neighbours in the order are then tiles of
/// neighbouring heads. In bundles of one head they are neighbouring tiles of the head. Where clusters take them, a tile here is all that a
/// cluster takes at a time.
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

/// Claims the next tile for a block, or for a cluster of so many blocks. Its first tile has its own number and is not claimed.
/// @param claims (2): tiles claimed, blocks or clusters that are through; zero before the launch and after
SIMT_DEVICE int claim(const simt::TensorView<int, 1>& claims, int cluster = 1) {
    return atomicAdd(&claims(0), 1) + static_cast<int>(gridDim.x) / cluster;
}
/// Says that a block, or a cluster, is through. The last one clears both numbers.
SIMT_DEVICE void end_claims(const simt::TensorView<int, 1>& claims, int cluster = 1) {
    if (atomicAdd(&claims(1), 1) == static_cast<int>(gridDim.x) / cluster - 1) claims(0) = 0, claims(1) = 0;
}

/// How the first block of a cluster of two tells the other one which tile it has claimed for both. A thread in each calls, once a round.
struct Claimed {
    uint4 tile;  // .x; 16 bytes are the least that can be sent
    ptx::Mbarrier full, empty;

    SIMT_DEVICE void init() {
        ptx::mbarrier_init(full, 1, "claimed_full");
        ptx::mbarrier_init(empty, 1, "claimed_empty");
    }
    SIMT_DEVICE void tell(int claimed, unsigned round) {
        ptx::mbarrier_wait(empty, round % 2 ^ 1);
        simt::store_shared_16(&tile, uint4{static_cast<unsigned>(claimed), 0, 0, 0});
        ptx::fence_proxy_async();  // the copy shall see it
        ptx::cp_async_bulk_to_peer(&tile, &tile, sizeof tile, full, 1);
    }
    SIMT_DEVICE int hear(unsigned round) {
        ptx::mbarrier_arrive_expect_tx(full, sizeof tile);
        ptx::mbarrier_wait(full, round % 2);
        const int claimed = static_cast<int>(simt::load_shared_16(&tile).x);
        if (claimed >= 0) ptx::mbarrier_arrive_remote(empty, 0);  // it is; asked, so that the answer waits for what was loaded
        return claimed;
    }
};

/// The slot that holds the 64 queries of a warpgroup in a round, and the parity of its full barrier then. Slots are used in turn.
template <int kGroups, int kSlots>
struct QuerySlot {
    int slot;
    unsigned parity;
    SIMT_DEVICE QuerySlot(unsigned round, int wg) {
        if constexpr (kSlots == kGroups) {
            slot = wg, parity = round % 2;
        } else {
            const unsigned turn = round * kGroups + static_cast<unsigned>(wg);
            slot = static_cast<int>(turn % kSlots), parity = turn / kSlots % 2;
        }
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

/// Gives each warpgroup its next tile: where it is, and its 64 queries, once those that were in their slot have been handed back. One
/// thread, the producer's, calls. @param smem has q, q_full, q_empty and task, as many as slots @param blocks of keys, of all of `keys`
/// @param round tiles before this one
template <int kGroups, class Smem>
SIMT_DEVICE void hand_out(Smem& smem, const ptx::TensorMap& Q_map, const TileOrder::Place& place, const TileOrder::Range& keys, int blocks,
                          unsigned round) {
    const int i0 = place.tile * (64 * kGroups);
    for (int w = 0; w < kGroups; ++w) {
        const QuerySlot<kGroups, sizeof smem.q / sizeof smem.q[0]> at(round, w);
        ptx::mbarrier_wait(smem.q_empty[at.slot], at.parity ^ 1);
        const Task next_task = task(place, keys);
        simt::store_shared_16(&smem.task[at.slot].place, next_task.place);
        simt::store_shared_16(&smem.task[at.slot].keys, next_task.keys);
        if (blocks == 0) {  // nothing to multiply with
            ptx::mbarrier_arrive(smem.q_full[at.slot]);
            continue;
        }
        ptx::mbarrier_arrive_expect_tx(smem.q_full[at.slot], sizeof smem.q[0]);
        ptx::cp_async_bulk_tensor_load(smem.q[at.slot].data, Q_map, {0, i0 + 64 * w, 0, place.h, place.b}, smem.q_full[at.slot],
                                       ptx::CachePolicy::evict_first);
    }
}

/// Tells each warpgroup, likewise, that there is no other tile.
template <int kGroups, class Smem>
SIMT_DEVICE void hand_out_nothing(Smem& smem, unsigned round) {
    for (int w = 0; w < kGroups; ++w) {
        const QuerySlot<kGroups, sizeof smem.q / sizeof smem.q[0]> at(round, w);
        ptx::mbarrier_wait(smem.q_empty[at.slot], at.parity ^ 1);
        simt::store_shared_16(&smem.task[at.slot].place, uint4{});
        ptx::mbarrier_arrive(smem.q_full[at.slot]);
    }
}

}  // namespace step06
