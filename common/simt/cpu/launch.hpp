/// @file
/// The emulator's half of simt::launch.
#pragma once

#include "simt/cpu/grid.hpp"

namespace simt::detail {

template <class... Params>
void launch(void (*kernel)(Params...), const LaunchConfig& config, Params... args) {
    cpu::run_grid(config, [&] { kernel(args...); });
}

}  // namespace simt::detail
