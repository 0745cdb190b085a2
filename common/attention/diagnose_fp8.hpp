/// @file
/// Names the mistake behind a wrong result of attention in e4m3.
#pragma once

#include "attention/compare.hpp"

#include <span>
#include <string>

namespace workbook {

/// As diagnose(), and before that for what can be wrong with the scales of Q, K and V. For each such mistake attention is computed with
/// exactly that mistake, by fp8_forward(), and the run is compared with it.
std::string diagnose_fp8(const Problem& problem, std::span<const float> q, std::span<const float> k, std::span<const float> v,
                         const ReferenceRows& want, const ReferenceRows& plain, const Result& got);

}  // namespace workbook
