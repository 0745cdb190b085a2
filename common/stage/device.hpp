/// @file
/// What the runner asks of the machine: to wait for it, and how long a launch takes on it.
#pragma once

#include "simt/config.hpp"

#include <cuda_runtime.h>

#include <functional>
#include <optional>
#include <vector>

namespace workbook {

/// True where kernels run on the emulator and traffic is counted; false in the gpu build, where kernels are timed.
inline constexpr bool emulating = SIMT_EMULATED;

/// Waits until everything on the stream is done; at once in the emulator, whose launches are synchronous.
/// @throws std::runtime_error with CUDA's message when a kernel failed
void synchronize(cudaStream_t stream);

/// Device time of one call.
struct Timing {
    double seconds = 0;         ///< the median
    int repetitions = 0;        ///< that it is the median of
    std::vector<double> times;  ///< of each repetition in seconds, ascending
};

/// Times `launch` with CUDA events on `stream`, after a warm-up. The repetitions are queued without waiting, so that the time
/// the host takes to launch is hidden wherever a kernel is longer than that.
/// @param launch  puts work on `stream`
/// @param repeats how often; where it is not given, for at least 0.5 s, but 3 times at least and 200 times at most
/// @throws std::runtime_error with CUDA's message; std::logic_error in the emulator's build, which has nothing to time
Timing measure(const std::function<void()>& launch, cudaStream_t stream, std::optional<int> repeats);

}  // namespace workbook
