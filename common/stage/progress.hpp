/// @file
/// The line that says how far an emulation is.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace workbook {

/// Writes over one line of stderr while blocks finish, a few times a second, and leaves nothing behind. Silent unless stderr is a
/// terminal.
class Progress {
public:
    explicit Progress(std::string label);
    ~Progress() { clear(); }
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    bool visible() const { return visible_; }
    /// Blocks done of the present launch's total; fewer than before, or another total, means that the next launch has begun.
    void update(std::size_t done, std::size_t total);
    void clear();

private:
    using Clock = std::chrono::steady_clock;
    std::string label_;
    bool visible_ = false, shown_ = false;
    int launch_ = 0;
    std::size_t done_ = 0, total_ = 0;
    Clock::time_point launch_start_, drawn_;
};

/// "850 ms", "12 s", "4 min", "3 h": for people, two digits at most.
std::string rough_duration(double seconds);

}  // namespace workbook
