/// @file
/// The emulator's half of simt::launch.
#pragma once

#include "simt/cpu/grid.hpp"

namespace simt::detail {

template <class... Params>
void launch(void (*kernel)(Params...), const LaunchConfig& config, Params... args) {
    cpu::run_grid(config, [&] { kernel(args...); });
}

template <class... Params>
int resident_clusters(void (*)(Params...), const LaunchConfig& config, int sms) {
    return sms / static_cast<int>(config.cluster.x * config.cluster.y * config.cluster.z);
}

}  // namespace simt::detail
