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

/// Uploads values as elements of a type, and rounds them to it.
void upload_rounded(DeviceBuffer& buffer, DType type, std::vector<float>& values);
/// The same with Q, K and V after a change of the host's.
void upload_rounded(Inputs& inputs);

/// dO, the gradient of a loss with respect to O, which a backward pass starts from: packed in the problem's layout and type.
struct OutputGradient {
    DeviceBuffer d_o;
    std::vector<float> d_o_host;
    std::string origin;  ///< "normal, seed 0", or the file
};

/// The file's tensor d_o (B, Hq, Nq, d) where there is a file that has one; else random numbers like those of random_inputs(), from a
/// stream of their own. @param file null where the inputs are random
/// @throws FileError when d_o has another shape or type than q
OutputGradient output_gradient(const Problem& problem, const Options& options, const TensorFile* file);

/// What an earlier stage wrote with --output.
template <class AnyResult>
struct Earlier {
    std::string label;  ///< "02 online_softmax"
    AnyResult result;   ///< in the problem's layout
    std::optional<double> seconds;
    std::string device;
};
using Previous = Earlier<Result>;
using PreviousGradients = Earlier<GradientResult>;

/// Results of a run on their way to a file: those of the last forward and of the last backward variant.
struct Written {
    std::optional<Previous> forward;
    std::optional<PreviousGradients> backward;
};

/// Writes, as far as they are there, o (B, Hq, Nq, d) in the problem's type and lse (B, Hq, Nq) in float32, and dq (B, Hq, Nq, d), dk and
/// dv (B, Hkv, Nkv, d) in the problem's type. As metadata: stage, problem, device; variant and, from a GPU, time_ms of the forward;
/// d_o, backward_variant and backward_time_ms of the backward. @throws FileError
void write_results(const std::filesystem::path& path, const std::string& stage, const Inputs& inputs, const std::string& d_o,
                   const Written& written);

/// Reads them back; what the file does not hold is empty. Gradients count only where `d_o` is what they were made from.
/// @param d_o the origin of dO; empty: gradients are not asked for
/// @throws FileError when the file is not such a result, or belongs to another problem or dO (both are named)
Written read_results(const std::filesystem::path& path, const Inputs& inputs, const std::string& d_o);

}  // namespace workbook
