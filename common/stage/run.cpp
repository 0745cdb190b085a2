#include "stage/run.hpp"

#include "attention/diagnose.hpp"
#include "attention/diagnose_backward.hpp"
#include "stage/device.hpp"
#include "stage/progress.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <thread>
#include <utility>

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

/// One output of a run, all of it.
struct WholeOutput {
    const char* name;
    const std::vector<float>& values;
    const std::vector<unsigned char>& poisoned;
};

/// The reference may cover a sample of rows. That every element was written, and where inputs are finite none is NaN, is checked of all.
/// @return what is wrong, or nothing
std::string check_unsampled(bool inputs_finite, const std::vector<WholeOutput>& outputs) {
    for (const auto& [name, values, flags] : outputs) {
        const auto count = std::count(flags.begin(), flags.end(), 1);
        if (count == 0) continue;
        return std::string(name) + ": " + std::to_string(count) + " of " + std::to_string(flags.size()) +
               " elements hold the poison (never written, or calculated from memory that never was), the first at offset " +
               std::to_string(std::find(flags.begin(), flags.end(), 1) - flags.begin());
    }
    if (!inputs_finite) return "";
    for (const auto& [name, values, flags] : outputs) {
        const auto found = std::find_if(values.begin(), values.end(), [](float x) { return std::isnan(x); });
        if (found != values.end()) return std::string(name) + ": NaN at offset " + std::to_string(found - values.begin());
    }
    return "";
}

bool all_finite(const Inputs& inputs) { return all_finite(inputs.q_host) && all_finite(inputs.k_host) && all_finite(inputs.v_host); }

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

ForwardOutputs::ForwardOutputs(const Problem& problem)
    : o(problem.q_elements() * size_of(problem.dtype)), lse(problem.rows() * sizeof(float)) {}

Gradients::Gradients(const Problem& problem)
    : dq(problem.q_elements() * size_of(problem.dtype)), dk(problem.kv_elements() * size_of(problem.dtype)), dv(dk.size()) {}

void Gradients::poison() {
    for (DeviceBuffer* const buffer : {&dq, &dk, &dv}) buffer->poison();
}

Result fetch_result(const Problem& problem, const ForwardOutputs& outputs) {
    Result result;
    fetch(outputs.o, problem.dtype, problem.q_elements(), result.o, result.o_poisoned);
    fetch(outputs.lse, DType::f32, problem.rows(), result.lse, result.lse_poisoned);
    return result;
}

ReferenceRows yardstick(const Variant& variant, const Inputs& in, const ReferenceRows& plain) {
    if (variant.plain == plain_low_precision_forward) return plain;
    return variant.plain(in.problem, in.q_host, in.k_host, in.v_host, plain.rows);
}

Verdict judge_run(const Inputs& inputs, const ReferenceRows& want, const ReferenceRows& plain, const Result& result) {
    Verdict verdict = judge(inputs.problem, want, plain, result);
    if (verdict.ok) {
        verdict.why = check_unsampled(all_finite(inputs), {{"O", result.o, result.o_poisoned}, {"LSE", result.lse, result.lse_poisoned}});
        verdict.ok = verdict.why.empty();
    }
    return verdict;
}

GradientResult fetch_gradients(const Problem& problem, const Gradients& gradients) {
    GradientResult result;
    fetch(gradients.dq, problem.dtype, problem.q_elements(), result.dq, result.dq_poisoned);
    fetch(gradients.dk, problem.dtype, problem.kv_elements(), result.dk, result.dk_poisoned);
    fetch(gradients.dv, problem.dtype, problem.kv_elements(), result.dv, result.dv_poisoned);
    return result;
}

GradientVerdict judge_run(const Inputs& inputs, const OutputGradient& d_o, const ReferenceGradients& want, const ReferenceGradients& plain,
                          const GradientResult& result) {
    GradientVerdict verdict = judge_gradients(inputs.problem, want, plain, result);
    if (verdict.ok) {
        verdict.why = check_unsampled(
            all_finite(inputs) && all_finite(d_o.d_o_host),
            {{"dQ", result.dq, result.dq_poisoned}, {"dK", result.dk, result.dk_poisoned}, {"dV", result.dv, result.dv_poisoned}});
        verdict.ok = verdict.why.empty();
    }
    return verdict;
}

std::string judge_given(const Setup& setup, const Result& given) {
    const Verdict verdict = judge_run(setup.inputs, setup.want, setup.plain, given);
    return verdict.why;
}

namespace {

template <class AnyVariant>
Report named_report(const Stage& stage, const AnyVariant& variant, const Problem& problem, const Device& device) {
    Report report;
    report.stage = stage.id;
    report.id = variant.id;
    report.name = variant.name;
    report.rows = problem.rows();
    report.predicted = variant.movement(problem, device);
    report.predicted_extra_memory = variant.workspace_bytes(problem, device);
    return report;
}

}  // namespace

Report predict_variant(const Stage& stage, const Variant& variant, const Problem& problem, const Device& device, const Gpu& target) {
    Report report = named_report(stage, variant, problem, device);
    report.flops = report.calculated_flops = forward_flops(problem);
    report.naive_requested = naive_movement(problem).requested.total();
    report.prediction = predict(target, variant.unit(problem.dtype), report.calculated_flops, report.predicted);
    return report;
}

Report predict_variant(const Stage& stage, const BackwardVariant& variant, const Problem& problem, const Device& device,
                       const Gpu& target) {
    Report report = named_report(stage, variant, problem, device);
    report.backward = true;
    report.flops = backward_flops(problem);
    report.calculated_flops = product_flops(problem, variant.products);
    report.naive_requested = standard_backward_movement(problem).requested.total();
    report.predicted_saved_memory = variant.saved_bytes(problem, device);
    report.prediction = predict(target, variant.unit(problem.dtype), report.calculated_flops, report.predicted);
    return report;
}

double emulation_estimate(const Problem& problem, const Report& report) {
    static const char* const four_bytes[] = {"LSE",   "D",      "l",           "m",         "O_acc",       "O_part",
                                             "table", "dQ_acc", "query_tiles", "key_tiles", "query_blocks"};
    double accesses = 0;
    for (const TensorTraffic& t : report.predicted.requested.tensors) {
        const bool wide = std::find(std::begin(four_bytes), std::end(four_bytes), t.tensor) != std::end(four_bytes);
        accesses += static_cast<double>(t.read + t.written) / (wide ? sizeof(float) : size_of(problem.dtype));
    }
    const double cores = std::max(1u, std::thread::hardware_concurrency());
    return (seconds_per_access * accesses + seconds_per_flop * report.calculated_flops) / cores;
}

namespace {

/// How the launches of a run are carried out, with what they move counted in `ledger`.
simt::Execution execution(const Setup& setup, simt::Ledger& ledger, Progress& progress) {
    simt::Execution exec;
    exec.ledger = setup.device.emulated ? &ledger : nullptr;
    exec.schedule = setup.options.schedule;
    if (progress.visible() && !setup.options.quiet)
        exec.progress = [&progress](std::size_t done, std::size_t total) { progress.update(done, total); };
    return exec;
}

/// Lets `exec` trace the rows of tensors, where --trace asks for it.
class Tracing {
public:
    Tracing(const Setup& setup, simt::Execution& exec) : problem_(setup.inputs.problem) {
        if (setup.options.trace) exec.trace = &trace_;
    }
    using Named = std::initializer_list<std::pair<const char*, TensorRef>>;
    void queries(Named tensors) { watch(tensors, problem_.heads, problem_.seq); }
    void keys(Named tensors) { watch(tensors, problem_.kv_heads, problem_.kv_seq); }
    std::vector<simt::TracedBlock> blocks() const { return trace_.blocks(); }

private:
    void watch(Named tensors, int heads, int rows) {
        for (const auto& [name, tensor] : tensors)
            trace_.watch(name, tensor.data, static_cast<long long>(problem_.batch) * heads * rows,
                         static_cast<std::size_t>(problem_.head_dim) * size_of(problem_.dtype));
    }
    const Problem& problem_;
    simt::Trace trace_;
};

/// Seconds that the host sees a launch take, to its end.
double host_seconds(const std::function<void()>& launch, cudaStream_t stream) {
    const auto start = std::chrono::steady_clock::now();
    launch();
    synchronize(stream);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// What the first run moved in emulation; on a GPU more runs, timed. @param first seconds of the first run
void count_or_time(Report& report, const Setup& setup, const simt::Ledger& ledger, double first, const std::function<void()>& launch,
                   cudaStream_t stream) {
    if (setup.device.emulated) {
        report.counted = ledger.rows();
        report.shared = ledger.shared();
        report.emulation_seconds = first;
    } else if (setup.options.max_seconds && first > *setup.options.max_seconds) {
        report.seconds = first;  // long enough for the host's clock, too long to repeat
        report.repetitions = 1;
    } else {
        const Timing timing = measure(launch, stream, setup.options.repeats);
        report.seconds = timing.seconds;
        report.repetitions = timing.repetitions;
    }
}

/// What is wrong with O or LSE, with the mistakes behind it where they are known.
std::string explained(const Setup& setup, decltype(Variant::explain) explain, const ReferenceRows& plain, const Verdict& verdict,
                      const Result& result) {
    const Inputs& in = setup.inputs;
    const std::string mistakes = explain(in.problem, in.q_host, in.k_host, in.v_host, setup.want, plain, result);
    return verdict.why + (mistakes.empty() ? "" : "\n" + mistakes);
}

}  // namespace

Forward forward_args(const Inputs& inputs, const ForwardOutputs& outputs, const Device& device, const simt::Execution& exec,
                     Workspace& workspace) {
    const Problem& problem = inputs.problem;
    return {problem,
            {inputs.q.data(), problem.q_strides()},
            {inputs.k.data(), problem.kv_strides()},
            {inputs.v.data(), problem.kv_strides()},
            {outputs.o.data(), problem.q_strides()},
            static_cast<float*>(outputs.lse.data()),
            device,
            exec,
            workspace};
}

Backward backward_args(const Forward& forward, const OutputGradient& d_o, const Gradients& gradients) {
    const Problem& problem = forward.problem;
    return {problem,
            forward.q,
            forward.k,
            forward.v,
            forward.o,
            {d_o.d_o.data(), problem.q_strides()},
            forward.lse,
            {gradients.dq.data(), problem.q_strides()},
            {gradients.dk.data(), problem.kv_strides()},
            {gradients.dv.data(), problem.kv_strides()},
            forward.device,
            forward.exec,
            forward.workspace};
}

Run run_variant(const Stage& stage, const Variant& variant, const Setup& setup) {
    const Problem& problem = setup.inputs.problem;
    Run run;
    Report& report = run.report;
    report = predict_variant(stage, variant, problem, setup.device, setup.target);
    report.checked_rows = static_cast<long long>(setup.want.rows.size());

    const ForwardOutputs outputs(problem);
    Workspace workspace;
    simt::Ledger ledger;
    Progress progress(report.label());
    Forward args = forward_args(setup.inputs, outputs, setup.device, execution(setup, ledger, progress), workspace);
    Tracing tracing(setup, args.exec);
    tracing.queries({{"Q", args.q}, {"O", args.o}});
    tracing.keys({{"K", args.k}, {"V", args.v}});
    const double seconds = host_seconds([&] { run_forward(variant, args); }, args.exec.stream);
    progress.clear();
    report.trace = tracing.blocks();

    run.result = fetch_result(problem, outputs);
    const ReferenceRows plain = yardstick(variant, setup.inputs, setup.plain);
    report.verdict = judge_run(setup.inputs, setup.want, plain, run.result);
    if (!report.verdict.ok) {
        report.status = "wrong";
        report.reason = explained(setup, variant.explain, plain, report.verdict, run.result);
    }
    report.extra_memory = workspace.allocated();
    count_or_time(
        report, setup, ledger, seconds, [&] { variant.forward(args); }, args.exec.stream);
    return run;
}

void make_references(BackwardSetup& backward, const Inputs& in, const std::vector<long long>& rows, const Result& forward) {
    if (backward.want && backward.plain) return;
    const BackwardInputs inputs{in.q_host, in.k_host, in.v_host, backward.d_o.d_o_host};
    GradientSample sample;
    if (!backward.kv_rows.empty()) sample = {rows, backward.kv_rows, forward.o, forward.lse};
    backward.want = reference_backward(in.problem, inputs, sample);
    backward.plain = plain_low_precision_backward(in.problem, inputs, sample);
}

BackwardRun run_variant(const Stage& stage, const BackwardVariant& variant, const Setup& setup, BackwardSetup& backward) {
    const Inputs& in = setup.inputs;
    const Problem& problem = in.problem;
    if (backward.forward && !variant.any_forward) {
        throw Refused("takes O and LSE from " + backward.forward->label +
                      ", which is not enough: it reads what its own forward pass keeps beside them; leave --forward out");
    }
    BackwardRun run;
    Report& report = run.report;
    report = predict_variant(stage, variant, problem, setup.device, setup.target);
    report.checked_rows = static_cast<long long>(setup.want.rows.size());

    ForwardOutputs outputs(problem);
    const Gradients gradients(problem);
    Workspace workspace;
    simt::Ledger ledger;
    Progress progress(report.label());
    const simt::Execution exec = execution(setup, ledger, progress);
    const Forward forward = forward_args(in, outputs, setup.device, exec, workspace);
    if (backward.forward) {
        run.forward = backward.forward->result;
        const HostTensor rounded = HostTensor::from_float(problem.dtype, {problem.q_elements()}, run.forward.o);
        outputs.o.upload(rounded.bytes.data(), rounded.bytes.size());
        outputs.lse.upload(run.forward.lse.data(), outputs.lse.size());
        report.verdict = judge_run(in, setup.want, setup.plain, run.forward);
    } else {
        Forward args = forward;
        args.exec.ledger = nullptr;  // what counts is the backward pass
        run_forward(variant, args);
        synchronize(exec.stream);
        run.forward = fetch_result(problem, outputs);
        report.verdict = judge_run(in, setup.want, setup.plain, run.forward);
    }
    if (!report.verdict.ok) {
        progress.clear();
        report.status = "wrong";
        report.reason = "the forward pass: " + explained(setup, diagnose, setup.plain, report.verdict, run.forward);
        report.gradients.emplace();
        return run;
    }
    report.saved_memory = outputs.lse.size() + workspace.allocated();

    Backward args = backward_args(forward, backward.d_o, gradients);
    Tracing tracing(setup, args.exec);
    tracing.queries({{"Q", args.q}, {"O", args.o}, {"dO", args.d_o}, {"dQ", args.dq}});
    tracing.keys({{"K", args.k}, {"V", args.v}, {"dK", args.dk}, {"dV", args.dv}});
    const double seconds = host_seconds([&] { run_backward(variant, args); }, exec.stream);
    progress.clear();
    report.trace = tracing.blocks();

    run.result = fetch_gradients(problem, gradients);
    make_references(backward, in, setup.want.rows, run.forward);
    report.gradients = judge_run(in, backward.d_o, *backward.want, *backward.plain, run.result);
    if (!report.gradients->ok) {
        report.status = "wrong";
        const std::string mistakes = diagnose_gradients(problem, {in.q_host, in.k_host, in.v_host, backward.d_o.d_o_host}, run.forward.o,
                                                        run.forward.lse, *backward.want, *backward.plain, run.result);
        report.reason = report.gradients->why + (mistakes.empty() ? "" : "\n" + mistakes);
    }
    report.extra_memory = workspace.allocated();
    count_or_time(
        report, setup, ledger, seconds, [&] { variant.backward(args); }, exec.stream);
    return run;
}

}  // namespace workbook
