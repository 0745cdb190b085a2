/// @file
/// The one header that a kernel includes: CUDA's intrinsics on either machine, shared memory, launches.
#pragma once

#include "simt/config.hpp"
#include "simt/convert.hpp"
#include "simt/execution.hpp"
#include "simt/launch_config.hpp"

#if SIMT_EMULATED
#include "simt/cpu/intrinsics.hpp"
#include "simt/cpu/launch.hpp"
#include "simt/cpu/shared.hpp"
#else
#include "simt/gpu.hpp"
#endif

#include "simt/warp.hpp"
#include "tensor/view.hpp"

namespace simt {

/// Starts `kernel` on a grid of blocks. Asynchronous on the GPU (in exec.stream); complete on return in emulation.
/// @throws Error when the configuration is one that no device accepts, asks for more shared memory than the device has,
///         or (in emulation) when the kernel does something wrong
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const LaunchConfig& config, Args&&... args) {
    static_assert(sizeof...(Params) == sizeof...(Args), "launch: the kernel takes another number of arguments");
    check(config);
    detail::launch(kernel, config, static_cast<Params>(std::forward<Args>(args))...);
}

/// How many clusters of such a launch a device runs at the same time; config.grid plays no part. Less than what fits its SMs, where
/// their groups are no multiples of a cluster. In emulation what fits.
/// @param sms of the device
template <class... Params>
int resident_clusters(void (*kernel)(Params...), const LaunchConfig& config, int sms) {
    const int clusters = detail::resident_clusters(kernel, config, sms);
    if (clusters < 1) throw Error("launch of " + std::string(config.name) + ": the device has no room for a cluster");
    return clusters;
}

}  // namespace simt
