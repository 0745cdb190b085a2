/// @file
/// The tensors of a run: where Q, K and V come from, and the files that results go to.
#pragma once

#include "attention/compare.hpp"
#include "stage/options.hpp"
#include "tensor/buffer.hpp"
#include "tensor/safetensors.hpp"

#include <optional>
#include <string>
#include <vector>

namespace workbook {

/// Q, K and V, packed in the problem's layout: on the device, and widened to float on the host for the reference.
struct Inputs {
    Problem problem;
    DeviceBuffer q, k, v;
    std::vector<float> q_host, k_host, v_host;
    std::string identity;  ///< equal when the numbers are: "normal seed=0", or a hash of the file's q, k and v
};

/// The problem that a file's q, k and v pose; causal, scale and layout come from the options.
/// @throws FileError when q, k, v are missing or do not go together; InvalidArgument for an option that contradicts the file
Problem problem_of(const Options& options, const TensorFile& file);

/// Where the inputs come from, for people: "normal, seed 0", or the file.
std::string origin_of(const Options& options);

/// @param problem has passed check()
Inputs random_inputs(const Problem& problem, const Options& options);
/// @param problem what problem_of() said of the same file
Inputs file_inputs(const Problem& problem, const TensorFile& file);

/// What an earlier stage wrote with --output.
struct Previous {
    std::string label;  ///< "02 online_softmax"
    Result result;      ///< in the problem's layout
    std::optional<double> seconds;
    std::string device;
};

/// Writes o (B, Hq, Nq, d) in the problem's type, lse (B, Hq, Nq) in float32 and, as metadata, stage, variant, problem, device
/// and, from a GPU, time_ms. @throws FileError
void write_result(const std::filesystem::path& path, const std::string& stage, const std::string& variant, const Inputs& inputs,
                  const Result& result, const std::string& device, std::optional<double> seconds);

/// Reads it back. @throws FileError when the file is not such a result, or belongs to another problem (both are named)
Previous read_result(const std::filesystem::path& path, const Inputs& inputs);

}  // namespace workbook
