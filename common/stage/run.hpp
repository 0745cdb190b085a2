/// @file
/// One run of one variant: launched, compared with the reference, its traffic counted or its time taken.
#pragma once

#include "stage/data.hpp"
#include "simt/ledger.hpp"
#include "simt/trace.hpp"

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace workbook {

/// What all variants of one invocation share.
struct Setup {
    const Options& options;
    Device device;
    const Gpu& target;  ///< whose time is predicted
    bool on_target;     ///< the device is that GPU, or plays it
    Inputs inputs;
    ReferenceRows want;   ///< float64
    ReferenceRows plain;  ///< a plain attention in the problem's type: the yardstick of the allowed error
};

/// What backward variants share beside a Setup.
struct BackwardSetup {
    OutputGradient d_o;
    std::optional<Previous> forward;                ///< O and LSE to use instead of those of the variant's own forward pass; already judged
    std::vector<long long> kv_rows;                 ///< of dK and dV to compare with float64; empty: all, and all of dQ
    std::optional<ReferenceGradients> want, plain;  ///< made by the first run, which has O and LSE for a sample of rows
};

/// What is known of a variant's run.
struct Report {
    std::string stage;          ///< "03"
    std::string id, name;       ///< of the variant
    std::string status = "ok";  ///< "ok", "wrong", "failed" (the kernel threw), "refused" or "skipped"
    std::string reason;         ///< why it is not ok

    long long rows = 0, checked_rows = 0;
    Verdict verdict;                           ///< of O and LSE; of a backward variant on those that its gradients are made from
    std::optional<GradientVerdict> gradients;  ///< of a backward variant
    std::string previous;                      ///< "02 online_softmax"; empty when there is none
    std::optional<Errors> difference;          ///< of O, or of the gradients, from `previous`

    bool backward = false;
    double flops = 0;             ///< as papers count them; rates are made of these
    double calculated_flops = 0;  ///< what the matrix products of the kernels calculate
    Movement predicted;
    long long naive_requested = 0;                        ///< bytes that stage 01, or standard backward, asks for in the same problem
    std::optional<std::vector<simt::LedgerRow>> counted;  ///< in emulation
    std::map<std::string, simt::SharedCount> shared;      ///< in emulation: see simt::Ledger::shared()
    std::vector<simt::TracedBlock> trace;                 ///< with --trace
    std::size_t extra_memory = 0, predicted_extra_memory = 0;
    std::size_t saved_memory = 0, predicted_saved_memory = 0;  ///< held from forward to backward beside Q, K, V and O
    Prediction prediction;

    std::optional<double> emulation_seconds;  ///< what the emulator took
    std::optional<double> seconds;            ///< a run's time on a GPU
    int repetitions = 0;
    std::string baseline;  ///< what `speedup` is over
    std::optional<double> speedup;

    std::string label() const { return id + " " + name; }
    double max_abs() const { return gradients ? gradients->max_abs() : verdict.o.max_abs; }
    double rel_rms() const { return gradients ? gradients->rel_rms() : verdict.o.rel_rms; }
    bool ran() const { return status == "ok" || status == "wrong"; }

    /// Requested bytes, counted where they were, else predicted.
    long long read() const;
    long long written() const;
    /// Whether every tensor's counted bytes are the predicted ones; nothing where none were counted.
    std::optional<bool> as_predicted() const;
};

/// What a forward pass writes, on the device; poisoned at first.
struct ForwardOutputs {
    DeviceBuffer o, lse;  ///< of the shape of Q; (B, Hq, Nq)
    explicit ForwardOutputs(const Problem& problem);
};

/// What a backward pass writes, likewise.
struct Gradients {
    DeviceBuffer dq, dk, dv;  ///< of the shapes of Q, K and V
    explicit Gradients(const Problem& problem);
    void poison();
};

/// What a forward launch on these inputs gets.
Forward forward_args(const Inputs& inputs, const ForwardOutputs& outputs, const Device& device, const simt::Execution& exec,
                     Workspace& workspace);

/// What judge() compares a variant's error with, on the rows of `plain`: that itself, or where the variant rounds more the variant's own.
ReferenceRows yardstick(const Variant& variant, const Inputs& inputs, const ReferenceRows& plain);

/// What a backward launch gets after that forward launch.
Backward backward_args(const Forward& forward, const OutputGradient& d_o, const Gradients& gradients);

/// The outputs as a kernel left them on the device, and which elements still hold the poison.
Result fetch_result(const Problem& problem, const ForwardOutputs& outputs);

/// judge(), and that every element was written and none is NaN, also in the rows that `want` leaves out.
Verdict judge_run(const Inputs& inputs, const ReferenceRows& want, const ReferenceRows& plain, const Result& result);

/// The gradients as a kernel left them on the device, and which elements still hold the poison.
GradientResult fetch_gradients(const Problem& problem, const Gradients& gradients);

/// judge_gradients(), and that every element was written and none is NaN, also in the rows that `want` leaves out.
GradientVerdict judge_run(const Inputs& inputs, const OutputGradient& d_o, const ReferenceGradients& want, const ReferenceGradients& plain,
                          const GradientResult& result);

/// The fields that need no run.
Report predict_variant(const Stage& stage, const Variant& variant, const Problem& problem, const Device& device, const Gpu& target);
Report predict_variant(const Stage& stage, const BackwardVariant& variant, const Problem& problem, const Device& device, const Gpu& target);

/// Seconds that the emulator takes, from what moves and what is calculated; good to a factor of three or so.
double emulation_estimate(const Problem& problem, const Report& report);

/// Outputs of a run and what is known of it.
struct Run {
    Report report;
    Result result;
};

/// Poisons the outputs, runs the variant, judges the outputs and, on a GPU, times it.
/// @throws Refused, and whatever a wrong kernel makes a launch throw
Run run_variant(const Stage& stage, const Variant& variant, const Setup& setup);

/// Gradients of a run and what is known of it.
struct BackwardRun {
    Report report;
    Result forward;  ///< O and LSE that the gradients were made from
    GradientResult result;
};

/// Fills backward.want and backward.plain where they are not there yet; where rows are a sample, from O and LSE that are right.
/// @param rows of dQ, ignored where backward.kv_rows is empty
void make_references(BackwardSetup& backward, const Inputs& inputs, const std::vector<long long>& rows, const Result& forward);

/// Runs the variant's forward pass (or takes the O and LSE that were given), judges it, and with a right one the backward pass
/// likewise; traffic and time are those of the backward pass alone.
/// @throws Refused also when O and LSE were given and the variant needs more than those; else as run_variant()
BackwardRun run_variant(const Stage& stage, const BackwardVariant& variant, const Setup& setup, BackwardSetup& backward);

/// Whether O and LSE that were given are those of the inputs, on the rows of setup.want. @return why not; empty when they are
std::string judge_given(const Setup& setup, const Result& given);

}  // namespace workbook
