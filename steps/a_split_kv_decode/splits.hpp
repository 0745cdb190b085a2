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

/// The division with the fewest splits of those with which the GPU is done first, or hardly later, if all SMs read at the same rate. An SM
/// takes as long for each of its blocks as for one split: its tiles of Bc keys, and kStart more for what every block costs, until its first
/// tile has come, and for its part. That two blocks fit an SM makes none faster, since it is the memory that is busy. No split is empty,
/// and there are at most kMostSplits.
/// @param blocks of one split: B * Hkv * tiles of rows
inline Splits choose_splits(int Nkv, int Bc, long long blocks, int sms) {
    constexpr long long kStart = 1;
    const int tiles = (Nkv + Bc - 1) / Bc, most = std::min(tiles, kMostSplits);
    const auto tiles_each = [&](int count) { return (tiles + count - 1) / count; };
    const auto time = [&](int count) { return (blocks * count + sms - 1) / sms * (tiles_each(count) + kStart); };
    long long least = time(1);
    for (int count = 2; count <= most; ++count) least = std::min(least, time(count));
    int count = 1;
    while (20 * time(count) > 21 * least) ++count;  // 5 % are not worth more parts
    const int each = tiles_each(count);
    return {(tiles + each - 1) / each, each * Bc};
}

}  // namespace stepa
