/// @file
/// The command line of a stage's program.
#pragma once

#include "attention/cost.hpp"
#include "attention/inputs.hpp"
#include "attention/problem.hpp"
#include "simt/execution.hpp"
#include "stage/command_line.hpp"
#include "stage/stage.hpp"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace workbook {

/// What the command line says; an option that was not given is empty where a file or the device may decide instead.
struct Options : ProblemOptions {
    Problem defaults;  ///< where neither the options nor a file say otherwise
    std::optional<float> scale;
    Layout layout = Layout::bhnd;
    std::optional<int> page_size;

    std::optional<std::uint64_t> seed;
    std::optional<Distribution> dist;
    std::optional<std::filesystem::path> input, output, forward, trace;
    std::vector<std::filesystem::path> against;

    std::vector<std::string> variants;  ///< ids or names; empty: all
    simt::Schedule schedule = simt::Schedule::round_robin;
    const Gpu* on = nullptr;
    std::optional<std::size_t> shared_memory;
    std::optional<long long> check_rows;  ///< 0: all
    std::optional<double> max_seconds;
    std::optional<int> repeats;

    bool rows_only = false, quiet = false, traffic = false, json = false, force = false, list = false;
    std::optional<std::string> help;  ///< the text to print, when --help was given

    /// The problem that the options ask for, with `dtype` where no type was given. Not yet checked.
    Problem problem(DType default_dtype) const;
    std::uint64_t random_seed() const { return seed.value_or(0); }
    Distribution random_dist() const { return dist.value_or(Distribution::normal); }
};

/// Parses the command line of `stage`'s program.
/// @throws InvalidArgument that names the option, the value and what is accepted
Options parse_options(const Stage& stage, int argc, const char* const* argv);

/// Bytes from "49152", "48K", "48KiB" or "1M"; K is 1024. @throws InvalidArgument
std::size_t parse_bytes(const std::string& option, const std::string& word);

}  // namespace workbook
