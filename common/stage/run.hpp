/// @file
/// One run of one variant: launched, compared with the reference, its traffic counted or its time taken.
#pragma once

#include "stage/data.hpp"
#include "simt/ledger.hpp"

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

/// What is known of a variant's run.
struct Report {
    std::string stage;          ///< "03"
    std::string id, name;       ///< of the variant
    std::string status = "ok";  ///< "ok", "wrong", "failed" (the kernel threw), "refused" or "skipped"
    std::string reason;         ///< why it is not ok

    long long rows = 0, checked_rows = 0;
    Verdict verdict;
    std::string previous;              ///< "02 online_softmax"; empty when there is none
    std::optional<Errors> difference;  ///< of O from `previous`

    double flops = 0;
    Movement predicted;
    long long naive_requested = 0;                        ///< bytes that stage 01 asks for in the same problem
    std::optional<std::vector<simt::LedgerRow>> counted;  ///< in emulation
    std::optional<simt::SharedCount> shared;              ///< in emulation, where the kernel's accesses to shared memory are counted
    std::size_t extra_memory = 0, predicted_extra_memory = 0;
    Prediction prediction;

    std::optional<double> emulation_seconds;  ///< what the emulator took
    std::optional<double> seconds;            ///< a run's time on a GPU
    int repetitions = 0;
    std::string baseline;  ///< what `speedup` is over
    std::optional<double> speedup;

    std::string label() const { return id + " " + name; }
    bool ran() const { return status == "ok" || status == "wrong"; }

    /// Requested bytes, counted where they were, else predicted.
    long long read() const;
    long long written() const;
    /// Whether every tensor's counted bytes are the predicted ones; nothing where none were counted.
    std::optional<bool> as_predicted() const;
};

/// The outputs as a kernel left them on the device, and which elements still hold the poison.
Result fetch_result(const Problem& problem, const DeviceBuffer& o, const DeviceBuffer& lse);

/// judge(), and that every element was written and none is NaN, also in the rows that `want` leaves out.
Verdict judge_run(const Inputs& inputs, const ReferenceRows& want, const ReferenceRows& plain, const Result& result);

/// The fields that need no run.
Report predict_variant(const Stage& stage, const Variant& variant, const Problem& problem, const Device& device, const Gpu& target);

/// Seconds that the emulator takes, from what moves and what is calculated; good to a factor of three or so.
double emulation_estimate(const Problem& problem, const Movement& movement);

/// Outputs of a run and what is known of it.
struct Run {
    Report report;
    Result result;
};

/// Poisons the outputs, runs the variant, judges the outputs and, on a GPU, times it.
/// @throws Refused, and whatever a wrong kernel makes a launch throw
Run run_variant(const Stage& stage, const Variant& variant, const Setup& setup);

}  // namespace workbook
