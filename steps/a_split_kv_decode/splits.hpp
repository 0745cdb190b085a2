/// @file
/// Into how many splits the keys of a sequence go.
#pragma once

#include <algorithm>

namespace stepa {

/// Each split has `keys` keys, the last one the rest.
struct Splits {
    int count;
    int keys;  ///< a multiple of the tile
};

inline constexpr int kMostSplits = 256;

/// The division with the fewest splits of those with which the GPU is done first, or hardly later, if all blocks read at the same rate.
/// `resident` blocks run at a time, and each wave of them takes as long as one split: its tiles of Bc keys, and kStart more for what every
/// block costs, until its first tile has come, and for its part. No split is empty, and there are at most kMostSplits.
/// @param blocks of one split: B * Hkv * tiles of rows
inline Splits choose_splits(int Nkv, int Bc, long long blocks, long long resident) {
    constexpr long long kStart = 1;
    const int tiles = (Nkv + Bc - 1) / Bc, most = std::min(tiles, kMostSplits);
    const auto tiles_each = [&](int count) { return (tiles + count - 1) / count; };
    const auto time = [&](int count) { return (blocks * count + resident - 1) / resident * (tiles_each(count) + kStart); };
    long long least = time(1);
    for (int count = 2; count <= most; ++count) least = std::min(least, time(count));
    int count = 1;
    while (20 * time(count) > 21 * least) ++count;  // 5 % are not worth more parts
    const int each = tiles_each(count);
    return {(tiles + each - 1) / each, each * Bc};
}

}  // namespace stepa
