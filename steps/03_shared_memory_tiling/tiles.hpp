/// @file
/// Tile sizes of stage 03.
#pragma once

#include "attention/cost.hpp"

#include <cstddef>
#include <optional>

namespace step03 {

/// FlashAttention-1, Algorithm 1, line 1: Bc = M / 4d and Br = min(Bc, d), where M counts the float32 elements that the
/// shared memory of a block holds. K, V, Q and S then take a quarter each, at most. Bc is rounded down to a multiple of 16,
/// the side of the thread block, and neither tile is longer than its sequence.
/// @return nothing when the memory does not hold the smallest tile, 16 keys
std::optional<workbook::Tiles> tiles(const workbook::Problem& problem, std::size_t shared_memory_bytes);

/// Bytes of shared memory that these tiles take.
std::size_t shared_bytes(const workbook::Problem& problem, const workbook::Tiles& tiles);

}  // namespace step03
