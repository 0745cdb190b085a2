/// @file
/// How a launch is to be carried out: on which stream of the GPU, or how the emulator schedules and what it counts.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>
#include <string_view>

namespace simt {

class Ledger;
class Trace;

/// Which warp of a block the emulator lets run next. A kernel that is right is right under all three.
enum class Schedule {
    round_robin,    ///< every warp in turn, up to its next barrier or warp collective
    lowest_first,   ///< the lowest warp that can run: it gets as far ahead as barriers let it
    highest_first,  ///< the highest warp that can run
};

const char* name(Schedule schedule);
/// @throws std::invalid_argument that names the accepted words: round-robin, lowest-first, highest-first
Schedule parse_schedule(std::string_view word);

/// Travels with every launch. The GPU reads `stream` only; the emulator all the rest.
struct Execution {
    cudaStream_t stream = nullptr;
    Ledger* ledger = nullptr;  ///< where global-memory traffic is charged; null: it is not counted
    Trace* trace = nullptr;    ///< where the order of what the ledger counts is noted; null: nowhere
    Schedule schedule = Schedule::round_robin;
    std::size_t shared_memory_limit = 227 * 1024;                       ///< bytes a block of the chosen device may ask for
    unsigned workers = 0;                                               ///< host threads that run blocks; 0: one per core
    std::function<void(std::size_t done, std::size_t total)> progress;  ///< called as blocks finish, from one thread at a time
};

}  // namespace simt
