/// @file
/// The pure part of the benchmarks: which problems are timed, what a case is called, and what is calculated from its times.
#pragma once

#include "attention/cost.hpp"
#include "attention/problem.hpp"
#include "stage/command_line.hpp"

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace workbook::bench {

/// Which problems the command line asks for.
struct Request : ProblemOptions {  // any of these asks for a single case
    bool quick = false;            ///< the short sweep
    bool gqa = false;              ///< the grouped-query case alone
    bool decode = false;           ///< the sweep of decoding
};

/// The sweep of FlashAttention-2's paper (Dao 2023, section 4.1): B * N = 16384 tokens and 2048 / d heads, d = 64 and 128,
/// N = 512 to 16384, full and causal; in bf16 and f32. The grouped-query case comes last. Problems that differ in the mask
/// alone are neighbours, because they share their inputs.
std::vector<Problem> full_sweep();

/// N = 1024 and 4096, d = 128, bf16, full and causal, of the same sweep.
std::vector<Problem> quick_sweep();

/// B=4 Hq=32 Hkv=8 N=4096 d=128 bf16 causal.
Problem gqa_case();

/// One query a sequence, Hq=32 Hkv=8 d=128 bf16: batches of 1, 16, 64 and 128 with 512 to 131072 keys, of caches of up to 2 GiB; and eight
/// queries with B=16 and 32768 keys.
std::vector<Problem> decode_sweep();

/// What a single case takes the rest from: B=1 Hq=16 N=4096 d=128 bf16.
Problem default_case();

/// What is asked for.
/// @throws InvalidArgument when two kinds of request are mixed, or the single case does not pass check()
std::vector<Problem> cases_of(const Request& request);

/// What is timed.
enum class Direction {
    forward,
    backward,  ///< the backward pass alone
    both,      ///< a forward pass and the backward pass after it
};

/// "fwd", "bwd" or "fwdbwd".
const char* name(Direction direction);

/// FLOPs as papers count them: forward_flops(), backward_flops() or their sum.
double flops(const Problem& problem, Direction direction);

/// What a case's name says.
struct CaseName {
    std::string source;   ///< "step03", "peer"
    std::string variant;  ///< "shared_memory_tiling", "torch_flash"
    Problem problem;
    Direction direction = Direction::forward;
};

/// "step03/shared_memory_tiling/fwd/bf16/d128/causal/B4_H32_KV8_N4096". _KV stands only where Hkv is not Hq, _M (Nkv) only where
/// it is not Nq. Of a packed batch the number of sequences follows, as _S814; what their lengths are the name does not say.
std::string case_name(const CaseName& name);

/// The inverse of case_name(), but for packed batches. @throws InvalidArgument that says what was read and what is accepted
CaseName parse_case_name(std::string_view text);

/// The value below which a fraction q of the values lies, interpolated linearly between neighbours.
/// @param ascending at least one value; @param q 0 to 1
/// @throws InvalidArgument
double quantile(std::span<const double> ascending, double q);

/// How often a run that takes `seconds` is repeated: for 0.3 s, and 10 times where that takes no more than 1 s; 2 to 200 times.
int repetitions(double seconds);

/// What one case's numbers are calculated from. Times in seconds.
struct Measured {
    std::vector<double> times;             ///< of each repetition, ascending
    double flops = 0;                      ///< flops() of the case
    Movement movement;                     ///< predicted; nothing where a case has no prediction (both passes together)
    std::size_t extra_memory = 0;          ///< bytes of workspace
    std::optional<std::size_t> saved;      ///< bytes held from forward to backward beside Q, K, V and O
    double rel_rms_error = 0;              ///< of O, or the largest of dQ, dK and dV, against float64, on the rows that were checked
    std::optional<Prediction> prediction;  ///< of the GPU that ran, where the table has it
    std::optional<double> copy_bandwidth;  ///< of a copy within the GPU's memory, bytes a second, read and written
};

/// The counters of a case, by the names that results carry:
/// - TFLOPS
/// - GB_per_s and hbm_GB_per_s (predicted requested and DRAM bytes over the median time; 10^9 bytes); only where they are predicted
/// - extra_MiB, saved_MiB (of a backward pass), spread_percent ((p90 - p10) / median), repetitions, rel_rms_error
/// - predicted_ms, and roofline_percent (predicted over median time); only with a prediction
/// - copy_GB_per_s, and copy_percent (hbm_GB_per_s of it); only where a copy was measured
/// @throws InvalidArgument when there are no times, or the median is not above 0
std::vector<std::pair<std::string, double>> counters(const Measured& measured);

}  // namespace workbook::bench
