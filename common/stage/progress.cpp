#include "stage/progress.hpp"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <utility>

namespace workbook {

Progress::Progress(std::string label)
    : label_(std::move(label)), visible_(isatty(STDERR_FILENO) == 1), launch_start_(Clock::now()), drawn_(launch_start_) {}

void Progress::update(std::size_t done, std::size_t total) {
    if (!visible_) return;
    const Clock::time_point now = Clock::now();
    if (launch_ == 0 || total != total_ || done < done_) {
        ++launch_;
        if (launch_ > 1) launch_start_ = drawn_ = now;
    }
    done_ = done;
    total_ = total;
    if (now - drawn_ < std::chrono::milliseconds(250) || done == 0) return;
    drawn_ = now;
    const double left = std::chrono::duration<double>(now - launch_start_).count() * static_cast<double>(total - done) / done;
    std::fprintf(stderr, "\r\033[K%s: launch %d, block %zu of %zu, about %s to its end", label_.c_str(), launch_, done, total,
                 rough_duration(left).c_str());
    std::fflush(stderr);
    shown_ = true;
}

void Progress::clear() {
    if (!shown_) return;
    std::fputs("\r\033[K", stderr);
    std::fflush(stderr);
    shown_ = false;
}

std::string rough_duration(double seconds) {
    static constexpr struct {
        double unit;
        const char* name;
    } units[] = {{86400, "days"}, {3600, "h"}, {60, "min"}, {1, "s"}, {1e-3, "ms"}, {1e-6, "us"}};
    for (const auto& u : units) {
        const double value = seconds / u.unit;
        if (value < 2 && u.unit > 3600) continue;
        if (value < 0.995) continue;
        char text[48];
        std::snprintf(text, sizeof text, value < 9.95 && value != std::floor(value) ? "%.1f %s" : "%.0f %s", value, u.name);
        return text;
    }
    return "0 s";
}

}  // namespace workbook
