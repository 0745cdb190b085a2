#include "simt/execution.hpp"

#include "simt/launch_config.hpp"

#include <sstream>
#include <string>

namespace simt {
namespace {

std::string text(dim3 d) {
    std::ostringstream out;
    out << "(" << d.x << ", " << d.y << ", " << d.z << ")";
    return out.str();
}

[[noreturn]] void refuse(const LaunchConfig& config, const std::string& what) {
    throw Error("launch of " + std::string(config.name) + ": " + what);
}

}  // namespace

const char* name(Schedule schedule) {
    switch (schedule) {
        case Schedule::lowest_first: return "lowest-first";
        case Schedule::highest_first: return "highest-first";
        case Schedule::round_robin: break;
    }
    return "round-robin";
}

Schedule parse_schedule(std::string_view word) {
    for (Schedule s : {Schedule::round_robin, Schedule::lowest_first, Schedule::highest_first})
        if (word == name(s)) return s;
    throw std::invalid_argument("schedule = '" + std::string(word) + "': round-robin, lowest-first and highest-first are accepted");
}

void check(const LaunchConfig& config) {
    const dim3 g = config.grid, b = config.block, c = config.cluster;
    if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 2147483647u || g.y > 65535 || g.z > 65535)
        refuse(config, "grid = " + text(g) + ": 1 to 2147483647 blocks in x and 1 to 65535 in y and z are accepted");
    if (b.x == 0 || b.y == 0 || b.z == 0 || b.x > 1024 || b.y > 1024 || b.z > 64 || b.x * b.y * b.z > 1024)
        refuse(config, "block = " + text(b) + ": 1 to 1024 threads in all, at most 64 of them in z, are accepted");
    if (c.x == 0 || c.y == 0 || c.z == 0 || g.x % c.x || g.y % c.y || g.z % c.z)
        refuse(config, "cluster = " + text(c) + " does not divide grid = " + text(g));
    if (c.x * c.y * c.z > 8) refuse(config, "cluster = " + text(c) + ": 1 to 8 blocks are accepted");
    const std::size_t limit = (config.exec ? *config.exec : Execution{}).shared_memory_limit;
    if (config.smem > limit)
        refuse(config, "smem = " + std::to_string(config.smem) + " bytes: a block of this device has at most " + std::to_string(limit));
}

}  // namespace simt
