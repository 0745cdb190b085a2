/// @file
/// Runs the blocks of a launch on the host's cores.
#pragma once

#include "simt/launch_config.hpp"

#include <atomic>
#include <cstddef>
#include <functional>
#include <mutex>
#include <set>

namespace simt::cpu {

/// Which clusters of a launch have begun and not ended. They begin in the order of their numbers.
class Running {
public:
    std::size_t begin() {
        std::lock_guard lock(mutex_);
        running_.insert(running_.end(), next_);
        return next_++;
    }
    void end(std::size_t number) {
        std::lock_guard lock(mutex_);
        running_.erase(number);
    }
    /// Whether all clusters before this one have ended.
    bool is_first(std::size_t number) {
        std::lock_guard lock(mutex_);
        return *running_.begin() == number;
    }
    std::atomic<bool> failed{false};  ///< one of them has: the others end too

private:
    std::mutex mutex_;
    std::set<std::size_t> running_;
    std::size_t next_ = 0;
};

/// Runs `body` once for each thread of each block of the grid.
/// @throws the error of the first block that failed; blocks that had not started by then are not run
void run_grid(const LaunchConfig& config, const std::function<void()>& body);

}  // namespace simt::cpu
