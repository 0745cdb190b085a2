/// @file
/// The shape of a launch.
#pragma once

#include "simt/config.hpp"
#include "simt/execution.hpp"

#include <cstddef>

namespace simt {

/// launch(kernel, {.name = "scores", .grid = ..., .block = ..., .smem = ..., .exec = &exec}, arguments...)
struct LaunchConfig {
    const char* name = "kernel";      ///< for error messages
    dim3 grid{1};                     ///< blocks
    dim3 block{1};                    ///< threads of a block
    std::size_t smem = 0;             ///< dynamic shared memory of a block, bytes
    dim3 cluster{1};                  ///< blocks of a cluster
    bool early = false;               ///< may begin before the kernel before has ended: it calls ptx::griddepcontrol_wait()
    const Execution* exec = nullptr;  ///< null: the default stream; in emulation defaults, nothing counted
};

/// Refuses what CUDA refuses on every device: empty or oversized grids and blocks, and shared memory beyond exec's limit.
/// @throws Error that names the kernel, the parameter, its value and what is accepted
void check(const LaunchConfig& config);

}  // namespace simt
