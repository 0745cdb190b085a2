#include "stage/run.hpp"

#include "attention/diagnose.hpp"
#include "stage/device.hpp"
#include "stage/progress.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

namespace workbook {
namespace {

constexpr double seconds_per_access = 20e-9;  // of one core: a global element, its checks, its entry in the ledger, shuffles around it
constexpr double seconds_per_flop = 2e-9;     // of one core: arithmetic on registers and shared memory

/// An output as the kernel left it, and which elements still hold the 0xFF bytes that it was filled with.
void fetch(const DeviceBuffer& buffer, DType type, long long elements, std::vector<float>& values, std::vector<unsigned char>& poisoned) {
    HostTensor tensor{type, {elements}, std::vector<std::byte>(elements * size_of(type))};
    buffer.download(tensor.bytes.data(), tensor.bytes.size());
    values = tensor.to_float();
    const std::size_t element = size_of(type);
    static constexpr unsigned char poison[4] = {0xFF, 0xFF, 0xFF, 0xFF};
    poisoned.resize(elements);
    for (long long i = 0; i < elements; ++i) poisoned[i] = std::memcmp(tensor.bytes.data() + i * element, poison, element) == 0;
}

bool all_finite(const std::vector<float>& values) {
    return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

/// The reference may cover a sample of rows. That every element was written, and none is NaN, is checked of all.
/// @return what is wrong, or nothing
std::string check_unsampled(const Inputs& inputs, const Result& result) {
    const auto first = [](const std::vector<unsigned char>& flags) { return std::find(flags.begin(), flags.end(), 1) - flags.begin(); };
    const auto count = [](const std::vector<unsigned char>& flags) { return std::count(flags.begin(), flags.end(), 1); };
    const auto unwritten = [&](const char* output, const std::vector<unsigned char>& flags) -> std::string {
        if (count(flags) == 0) return "";
        return std::string(output) + ": " + std::to_string(count(flags)) + " of " + std::to_string(flags.size()) +
               " elements hold the poison (never written, or calculated from memory that never was), the first at offset " +
               std::to_string(first(flags));
    };
    const auto nan = [](const char* output, const std::vector<float>& values) -> std::string {
        const auto found = std::find_if(values.begin(), values.end(), [](float x) { return std::isnan(x); });
        if (found == values.end()) return "";
        return std::string(output) + ": NaN at offset " + std::to_string(found - values.begin());
    };
    if (std::string what = unwritten("O", result.o_poisoned); !what.empty()) return what;
    if (std::string what = unwritten("LSE", result.lse_poisoned); !what.empty()) return what;
    if (!all_finite(inputs.q_host) || !all_finite(inputs.k_host) || !all_finite(inputs.v_host)) return "";
    if (std::string what = nan("O", result.o); !what.empty()) return what;
    return nan("LSE", result.lse);
}

const TensorTraffic* find(const Traffic& traffic, const std::string& tensor) {
    for (const TensorTraffic& t : traffic.tensors)
        if (t.tensor == tensor) return &t;
    return nullptr;
}

}  // namespace

long long Report::read() const {
    if (!counted) return predicted.requested.read();
    long long sum = 0;
    for (const simt::LedgerRow& row : *counted) sum += static_cast<long long>(row.read.requested);
    return sum;
}

long long Report::written() const {
    if (!counted) return predicted.requested.written();
    long long sum = 0;
    for (const simt::LedgerRow& row : *counted) sum += static_cast<long long>(row.written.requested);
    return sum;
}

std::optional<bool> Report::as_predicted() const {
    if (!counted) return std::nullopt;
    for (const simt::LedgerRow& row : *counted) {
        const TensorTraffic* expected = find(predicted.requested, row.tensor);
        const auto read = static_cast<long long>(row.read.requested), written = static_cast<long long>(row.written.requested);
        if (read != (expected ? expected->read : 0) || written != (expected ? expected->written : 0)) return false;
    }
    // A tensor that nothing touched may have no row.
    return read() == predicted.requested.read() && written() == predicted.requested.written();
}

Result fetch_result(const Problem& problem, const DeviceBuffer& o, const DeviceBuffer& lse) {
    Result result;
    fetch(o, problem.dtype, problem.q_elements(), result.o, result.o_poisoned);
    fetch(lse, DType::f32, problem.rows(), result.lse, result.lse_poisoned);
    return result;
}

Verdict judge_run(const Inputs& inputs, const ReferenceRows& want, const ReferenceRows& plain, const Result& result) {
    Verdict verdict = judge(inputs.problem, want, plain, result);
    if (verdict.ok) {
        verdict.why = check_unsampled(inputs, result);
        verdict.ok = verdict.why.empty();
    }
    return verdict;
}

Report predict_variant(const Stage& stage, const Variant& variant, const Problem& problem, const Device& device, const Gpu& target) {
    Report report;
    report.stage = stage.id;
    report.id = variant.id;
    report.name = variant.name;
    report.rows = problem.rows();
    report.flops = forward_flops(problem);
    report.predicted = variant.movement(problem, device);
    report.naive_requested = naive_movement(problem).requested.total();
    report.predicted_extra_memory = variant.workspace_bytes(problem, device);
    report.prediction = predict(target, variant.unit(problem.dtype), report.flops, report.predicted);
    return report;
}

double emulation_estimate(const Problem& problem, const Movement& movement) {
    double accesses = 0;
    for (const TensorTraffic& t : movement.requested.tensors) {
        const bool typed = t.tensor == "Q" || t.tensor == "K" || t.tensor == "V" || t.tensor == "S" || t.tensor == "P";
        accesses += static_cast<double>(t.read + t.written) / (typed ? size_of(problem.dtype) : sizeof(float));
    }
    const double cores = std::max(1u, std::thread::hardware_concurrency());
    return (seconds_per_access * accesses + seconds_per_flop * forward_flops(problem)) / cores;
}

Run run_variant(const Stage& stage, const Variant& variant, const Setup& setup) {
    const Problem& problem = setup.inputs.problem;
    Run run;
    Report& report = run.report;
    report = predict_variant(stage, variant, problem, setup.device, setup.target);
    report.checked_rows = static_cast<long long>(setup.want.rows.size());

    DeviceBuffer o(problem.q_elements() * size_of(problem.dtype));
    DeviceBuffer lse(problem.rows() * sizeof(float));
    Workspace workspace;
    simt::Ledger ledger;
    Progress progress(report.label());
    simt::Execution exec;
    exec.ledger = setup.device.emulated ? &ledger : nullptr;
    exec.schedule = setup.options.schedule;
    if (progress.visible() && !setup.options.quiet)
        exec.progress = [&](std::size_t done, std::size_t total) { progress.update(done, total); };
    Forward args{problem,
                 {setup.inputs.q.data(), problem.q_strides()},
                 {setup.inputs.k.data(), problem.kv_strides()},
                 {setup.inputs.v.data(), problem.kv_strides()},
                 {o.data(), problem.q_strides()},
                 static_cast<float*>(lse.data()),
                 setup.device,
                 exec,
                 workspace};

    o.poison();
    lse.poison();
    const auto start = std::chrono::steady_clock::now();
    run_forward(variant, args);
    synchronize(exec.stream);
    const double host_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    progress.clear();

    run.result = fetch_result(problem, o, lse);
    report.verdict = judge_run(setup.inputs, setup.want, setup.plain, run.result);
    if (!report.verdict.ok) {
        report.status = "wrong";
        report.reason = report.verdict.why;
        const Inputs& in = setup.inputs;
        const std::string mistakes = diagnose(problem, in.q_host, in.k_host, in.v_host, setup.want, setup.plain, run.result);
        if (!mistakes.empty()) report.reason += "\n" + mistakes;
    }
    report.extra_memory = workspace.allocated();

    if (setup.device.emulated) {
        report.counted = ledger.rows();
        if (const simt::SharedCount count = ledger.shared(); count.ideal > 0) report.shared = count;
        report.emulation_seconds = host_seconds;
    } else if (setup.options.max_seconds && host_seconds > *setup.options.max_seconds) {
        report.seconds = host_seconds;  // long enough for the host's clock, too long to repeat
        report.repetitions = 1;
    } else {
        const Timing timing = measure([&] { variant.forward(args); }, exec.stream, setup.options.repeats);
        report.seconds = timing.seconds;
        report.repetitions = timing.repetitions;
    }
    return run;
}

}  // namespace workbook
