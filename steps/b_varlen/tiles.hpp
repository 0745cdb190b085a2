/// @file
/// The tiles of a packed batch: a table that the host makes and in which each thread block looks up its work.
#pragma once

#include "attention/cost.hpp"
#include "attention/mask.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace stepb {

/// A tile of queries or of keys, and where its sequence lies in the packed batch. 32 bytes: one sector of memory.
struct Tile {
    int sequence;
    int row;                   ///< the tile's first row, counted from the sequence's first
    int first_query, queries;  ///< of the sequence
    int first_key, keys;       ///< of the sequence
    int first_block;           ///< of Br queries, in tensors in which each sequence has whole blocks
    int work;                  ///< blocks that the tile goes through: of keys, or of queries
};
inline constexpr int kTileNumbers = 8;
static_assert(sizeof(Tile) == kTileNumbers * sizeof(int));

/// How many tiles of `size` rows the sequences take.
inline int count_tiles(const std::vector<int>& cu_seqlens, int size) {
    int count = 0;
    for (std::size_t s = 0; s + 1 < cu_seqlens.size(); ++s) count += (cu_seqlens[s + 1] - cu_seqlens[s] + size - 1) / size;
    return count;
}

/// Calls f with the problem of each sequence, its mask, and a tile that has all but `row` and `work`.
template <class F>
void for_each_sequence(const workbook::Problem& problem, int Br, F&& f) {
    Tile tile{};
    for (const workbook::Problem& one : problem.sequences()) {
        tile.queries = one.seq;
        tile.keys = one.kv_seq;
        f(one, workbook::Mask(one), tile);
        ++tile.sequence;
        tile.first_query += tile.queries;
        tile.first_key += tile.keys;
        tile.first_block += (tile.queries + Br - 1) / Br;
    }
}

/// The tiles of Br queries, sequence by sequence. One whose queries see nothing has to be written all the same.
inline std::vector<Tile> query_tiles(const workbook::Problem& problem, const workbook::Tiles& size) {
    std::vector<Tile> tiles;
    for_each_sequence(problem, size.Br, [&](const workbook::Problem& one, const workbook::Mask& mask, Tile tile) {
        for (tile.row = 0; tile.row < one.seq; tile.row += size.Br) {
            tile.work = mask.blocks(tile.row, size.Br, one.seq, size.Bc, one.kv_seq);
            tiles.push_back(tile);
        }
    });
    return tiles;
}

/// The tiles of Bc keys, likewise.
inline std::vector<Tile> key_tiles(const workbook::Problem& problem, const workbook::Tiles& size) {
    std::vector<Tile> tiles;
    for_each_sequence(problem, size.Br, [&](const workbook::Problem& one, const workbook::Mask& mask, Tile tile) {
        for (tile.row = 0; tile.row < one.kv_seq; tile.row += size.Bc) {
            tile.work = std::max((one.seq + size.Br - 1) / size.Br - mask.first_row(tile.row) / size.Br, 0);
            tiles.push_back(tile);
        }
    });
    return tiles;
}

/// Sorted by work, the most first, else in the order in which they were: a counting sort.
inline std::vector<Tile> longest_first(const std::vector<Tile>& tiles) {
    int most = 0;
    for (const Tile& tile : tiles) most = std::max(most, tile.work);
    std::vector<std::size_t> place(static_cast<std::size_t>(most) + 2);  // of the next tile that has most + 1 - n blocks
    for (const Tile& tile : tiles) ++place[static_cast<std::size_t>(most + 1 - tile.work)];
    for (std::size_t n = 1; n < place.size(); ++n) place[n] += place[n - 1];
    std::vector<Tile> sorted(tiles.size());
    for (const Tile& tile : tiles) sorted[place[static_cast<std::size_t>(most - tile.work)]++] = tile;
    return sorted;
}

}  // namespace stepb
