/// @file
/// What the programs share that watch kernels from inside.
#pragma once

#include "stage/stage.hpp"
#include "tensor/buffer.hpp"

#include <exception>
#include <iostream>
#include <vector>

namespace workbook {

/// A watch's numbers on the device, zero at first.
inline DeviceBuffer zeros(std::size_t count) {
    const std::vector<long long> all(count);
    DeviceBuffer buffer(count * sizeof(long long));
    buffer.upload(all.data(), buffer.size());
    return buffer;
}

inline std::vector<long long> download(const DeviceBuffer& buffer) {
    std::vector<long long> all(buffer.size() / sizeof(long long));
    buffer.download(all.data(), buffer.size());
    return all;
}

/// The times of the blocks that ran, in clocks. @param cycles of a watch
inline std::vector<long long> block_times(const DeviceBuffer& cycles) {
    std::vector<long long> all = download(cycles);
    std::erase(all, 0);
    return all;
}

/// In percent: the clocks that the tensor cores need for products of f16 or bf16 with float32 sums, over those that they had.
/// @param clocks of an SM
inline double utilisation(double flops, double clocks, const Device& device) {
    constexpr double kFlopsPerClock = 4096;  // of an SM: dense products
    return 100 * flops / kFlopsPerClock / device.sms / clocks;
}

/// The main() of such a program. @return what `run` returns; 2 when it throws, after the message
inline int watch_main(const char* program, int (*run)(int, char**), int argc, char** argv) {
    try {
        return run(argc, argv);
    } catch (const std::exception& error) {
        std::cerr << program << ": " << error.what() << "\n";
        return 2;
    }
}

}  // namespace workbook
