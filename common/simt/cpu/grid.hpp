/// @file
/// Runs the blocks of a launch on the host's cores.
#pragma once

#include "simt/launch_config.hpp"

#include <functional>

namespace simt::cpu {

/// Runs `body` once for each thread of each block of the grid.
/// @throws the error of the first block that failed; blocks that had not started by then are not run
void run_grid(const LaunchConfig& config, const std::function<void()>& body);

}  // namespace simt::cpu
