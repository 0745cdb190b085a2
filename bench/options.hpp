/// @file
/// The command line of the benchmark programs.
#pragma once

#include "cases.hpp"

#include <optional>
#include <string>
#include <vector>

namespace workbook::bench {

struct Options {
    Request request;
    double max_seconds = 10;           ///< a case whose run takes longer is skipped
    std::optional<double> stop_after;  ///< seconds after which no case is begun
    const Gpu* on = nullptr;           ///< GPU to predict for; bench_predict only
    std::vector<std::string> stages;   ///< ids of the stages to predict for, empty: all; bench_predict only
    std::vector<std::string> google;   ///< what is for Google Benchmark: --benchmark_... and --v=N, as they were given
    std::optional<std::string> help;   ///< the text to print, when --help was given
};

/// Who reads the command line: options that one of them has no use for are refused.
enum class Program { measure, predict };

/// @param name of the program, for the help
/// @throws InvalidArgument that names the option, the value and what is accepted
Options parse_options(Program program, const std::string& name, const std::vector<std::string>& arguments);

}  // namespace workbook::bench
