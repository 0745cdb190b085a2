#include "harness.hpp"

#include "cases.hpp"
#include "options.hpp"

#include "stage/data.hpp"
#include "stage/device.hpp"
#include "stage/progress.hpp"
#include "stage/run.hpp"
#include "stage/runner.hpp"

#include <benchmark/benchmark.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <new>

namespace workbook::bench {
namespace {

constexpr long long checked_rows = 256;
constexpr double cold_seconds = 0.1;  // a first run shorter than this may be mostly the loading of the kernel

enum Exit { all_right = 0, wrong = 1, bad_arguments = 2, nothing_timed = 3 };

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::string dotted(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

/// "580.159.04", from the library that nvidia-smi asks too; else the CUDA version that the driver supports.
std::string driver_version() {
    char version[96] = "";
    if (void* nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {
        const auto init = reinterpret_cast<int (*)()>(dlsym(nvml, "nvmlInit_v2"));
        const auto ask = reinterpret_cast<int (*)(char*, unsigned)>(dlsym(nvml, "nvmlSystemGetDriverVersion"));
        const auto shutdown = reinterpret_cast<int (*)()>(dlsym(nvml, "nvmlShutdown"));
        if (init && ask && shutdown && init() == 0) {
            if (ask(version, sizeof version) != 0) version[0] = '\0';
            shutdown();
        }
        dlclose(nvml);
    }
    if (version[0] != '\0') return version;
    int cuda = 0;
    return cudaDriverGetVersion(&cuda) == cudaSuccess && cuda > 0 ? "supports CUDA " + dotted(cuda) : "unknown";
}

using benchmark::BenchmarkReporter;

/// A case that is right or not begun, but not timed.
struct Skipped : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Google Benchmark appends "/iterations:1/manual_time" to each name; both are so for every case here.
std::vector<BenchmarkReporter::Run> with_plain_names(std::vector<BenchmarkReporter::Run> runs) {
    for (BenchmarkReporter::Run& run : runs) {
        benchmark::BenchmarkName plain;
        plain.function_name = run.run_name.function_name;
        run.run_name = plain;
    }
    return runs;
}

class Display : public BenchmarkReporter {
public:
    bool ReportContext(const Context& context) override { return reporter_->ReportContext(context); }
    void ReportRuns(const std::vector<Run>& runs) override { reporter_->ReportRuns(with_plain_names(runs)); }
    void Finalize() override { reporter_->Finalize(); }

private:
    BenchmarkReporter* reporter_ = benchmark::CreateDefaultDisplayReporter();  // the library keeps it
};

class JsonFile : public benchmark::JSONReporter {
public:
    void ReportRuns(const std::vector<Run>& runs) override {
        std::vector<Run> plain = with_plain_names(runs);
        for (Run& run : plain) {
            // The library has a key of this name, which counts its own repetitions; a key must not stand twice.
            const auto counter = run.counters.find("repetitions");
            if (counter == run.counters.end()) continue;
            run.repetitions = static_cast<std::int64_t>(counter->second.value);
            run.counters.erase(counter);
        }
        JSONReporter::ReportRuns(plain);
    }
};

/// Bytes a second of a copy within the GPU's memory, read and written, larger than any cache.
double copy_bandwidth() {
    constexpr std::size_t size = std::size_t{1} << 30;
    const DeviceBuffer from(size);
    DeviceBuffer to(size);
    const auto copy = [&] { cudaMemcpyAsync(to.data(), from.data(), size, cudaMemcpyDeviceToDevice, nullptr); };
    copy();
    return 2.0 * size / measure(copy, nullptr, 20).seconds;
}

/// What several cases share: those of one shape and type have the same inputs, whatever the variant and the mask.
struct Shared {
    Inputs inputs;
    std::optional<bool> reference_is_causal;
    ReferenceRows want, plain;
    std::optional<BackwardSetup> backward;
};

class Session {
public:
    Session(const Stage& stage, const Stage* before, const Options& options)
        : stage_(stage), before_(before), options_(options), start_(Clock::now()) {}

    void use_device() {
        device_ = Device::current();
        gpu_ = in_table(device_);
        if (options_.request.decode) copy_bandwidth_ = copy_bandwidth();
    }
    const Device& device() const { return device_; }
    int status() const { return wrong_ ? Exit::wrong : timed_ ? all_right : nothing_timed; }

    void register_cases() {
        for (const Problem& problem : cases_of(options_.request)) {
            for (const Variant& variant : stage_.variants) add(variant, problem, Direction::forward);
            for (const BackwardVariant& variant : stage_.backward) {
                add(variant, problem, Direction::backward);
                add(variant, problem, Direction::both);
            }
        }
    }

private:
    template <class AnyVariant>
    void add(const AnyVariant& variant, const Problem& problem, Direction direction) {
        const std::string name = case_name({"step" + stage_.id, variant.name, problem, direction});
        benchmark::RegisterBenchmark(
            name.c_str(), [this, &variant, problem, direction](benchmark::State& state) { run(state, variant, problem, direction); })
            ->UseManualTime()
            ->Iterations(1)
            ->Unit(benchmark::kMillisecond);
    }

    /// FLOPs that the matrix products of a case calculate; of both passes at least.
    static double calculated(const Variant&, const Problem& problem) { return forward_flops(problem); }
    static double calculated(const BackwardVariant& variant, const Problem& problem) { return product_flops(problem, variant.products); }

    template <class AnyVariant>
    void run(benchmark::State& state, const AnyVariant& variant, const Problem& problem, Direction direction) {
        const auto skip = [&](const std::string& what, const std::exception& reason) {
            state.SkipWithError((what + ": " + reason.what()).c_str());
        };
        try {
            if (options_.stop_after && seconds_since(start_) > *options_.stop_after) {
                throw Skipped("not begun within --stop-after (" + rough_duration(*options_.stop_after) + ")");
            }
            if (const auto reason = why_refused(variant, problem, device_)) throw Refused(*reason);
            Measured measured;
            measured.flops = flops(problem, direction);
            const Movement movement = variant.movement(problem, device_);
            std::optional<Prediction> least;  // of both passes: of the backward pass alone
            if (gpu_) least = predict(*gpu_, variant.unit(problem.dtype), calculated(variant, problem), movement);
            if (least && least->seconds() > options_.max_seconds) {
                throw Skipped("a run would take at least " + rough_duration(least->seconds()) + ", more than --max-seconds allows (" +
                              rough_duration(options_.max_seconds) + ")");
            }
            if (direction != Direction::both) {
                measured.movement = movement;
                measured.prediction = least;
                measured.copy_bandwidth = copy_bandwidth_;
            }
            if (const std::string why = check_and_time(variant, problem, direction, measured); !why.empty()) {
                wrong_ = true;
                return state.SkipWithError(("wrong: " + why).c_str());
            }
            for (const auto& [name, value] : counters(measured)) state.counters[name] = value;
            timed_ = true;
            const double median = quantile(measured.times, 0.5);
            for ([[maybe_unused]] auto _ : state) state.SetIterationTime(median);
        } catch (const Skipped& reason) {
            skip("skipped", reason);
        } catch (const Refused& reason) {
            cudaGetLastError();  // it may be an allocation that failed, which is no fault of the next launch
            skip("refused", reason);
        } catch (const std::bad_alloc& reason) {
            cudaGetLastError();
            skip("refused", reason);
        } catch (const std::exception& reason) {
            wrong_ = true;
            skip("failed", reason);
        }
    }

    /// Times a launch that has run once. @param seconds of that run, by the host's clock
    void time(const std::function<void()>& launch, cudaStream_t stream, double seconds, Measured& measured) const {
        if (seconds < cold_seconds) seconds = measure(launch, stream, 1).seconds;
        if (seconds > options_.max_seconds) {
            throw Skipped("a run takes " + rough_duration(seconds) + ", more than --max-seconds allows (" +
                          rough_duration(options_.max_seconds) + ")");
        }
        measured.times = measure(launch, stream, repetitions(seconds)).times;
    }

    /// The last forward variant of the stage before that does the problem; null if there is none.
    const Variant* forward_before(const Problem& problem) const {
        const Variant* last = nullptr;
        if (before_)
            for (const Variant& variant : before_->variants)
                if (!why_refused(variant, problem, device_)) last = &variant;
        return last;
    }

    /// Fills what is measured. @return why the outputs are wrong, which are not timed then; empty when they are right
    std::string check_and_time(const Variant& variant, const Problem& problem, Direction, Measured& measured) {
        const Shared& shared = shared_for(problem);
        const ForwardOutputs outputs(problem);
        Workspace workspace;
        Forward args = forward_args(shared.inputs, outputs, device_, {}, workspace);

        const Clock::time_point begin = Clock::now();
        run_forward(variant, args);
        synchronize(args.exec.stream);
        const double seconds = seconds_since(begin);
        const Verdict verdict =
            judge_run(shared.inputs, shared.want, yardstick(variant, shared.inputs, shared.plain), fetch_result(problem, outputs));
        if (!verdict.ok) return verdict.why;
        measured.extra_memory = workspace.allocated();
        measured.rel_rms_error = verdict.o.rel_rms;
        time([&] { variant.forward(args); }, args.exec.stream, seconds, measured);
        return "";
    }

    std::string check_and_time(const BackwardVariant& variant, const Problem& problem, Direction direction, Measured& measured) {
        Shared& shared = shared_for(problem);
        const Inputs& in = shared.inputs;
        const ForwardOutputs outputs(problem);
        const Gradients gradients(problem);
        Workspace workspace;
        Forward forward = forward_args(in, outputs, device_, {}, workspace);
        const Variant* const before = variant.any_forward ? forward_before(problem) : nullptr;
        const Clock::time_point begin_forward = Clock::now();
        before ? run_forward(*before, forward) : run_forward(variant, forward);
        synchronize(forward.exec.stream);
        double seconds = direction == Direction::both ? seconds_since(begin_forward) : 0;
        const Result result = fetch_result(problem, outputs);
        const ReferenceRows plain = before ? yardstick(*before, in, shared.plain) : shared.plain;
        if (const Verdict verdict = judge_run(in, shared.want, plain, result); !verdict.ok) return "the forward pass: " + verdict.why;
        measured.saved = workspace.allocated() + outputs.lse.size();

        if (!shared.backward) {
            shared.backward.emplace();
            shared.backward->d_o = output_gradient(problem, workbook::Options{}, nullptr);
        }
        BackwardSetup& setup = *shared.backward;
        Backward backward = backward_args(forward, setup.d_o, gradients);
        const Clock::time_point begin = Clock::now();
        run_backward(variant, backward);
        synchronize(backward.exec.stream);
        seconds += seconds_since(begin);
        setup.kv_rows = sample_kv_rows(problem, checked_rows);
        make_references(setup, in, shared.want.rows, result);
        const GradientVerdict verdict = judge_run(in, setup.d_o, *setup.want, *setup.plain, fetch_gradients(problem, gradients));
        if (!verdict.ok) return verdict.why;
        measured.extra_memory = workspace.allocated();
        measured.rel_rms_error = verdict.rel_rms();

        const auto launch = [&] {
            if (direction == Direction::both) (before ? before->forward : variant.forward)(forward);
            variant.backward(backward);
        };
        time(launch, backward.exec.stream, seconds, measured);
        return "";
    }

    Shared& shared_for(const Problem& problem) {
        const auto key = [](Problem p) {
            p.causal = false;
            return describe(p);
        };
        if (!shared_ || key(shared_->inputs.problem) != key(problem)) {
            shared_.reset();  // free first: old and new need not fit together
            shared_.emplace(Shared{random_inputs(problem, workbook::Options{}), std::nullopt, {}, {}, {}});
        }
        if (shared_->reference_is_causal != problem.causal) {
            shared_->reference_is_causal.reset();
            shared_->backward.reset();
            Inputs& in = shared_->inputs;
            in.problem = problem;
            const std::vector<long long> rows = sample_rows(problem, checked_rows);
            shared_->want = reference_forward(problem, in.q_host, in.k_host, in.v_host, rows);
            shared_->plain = plain_low_precision_forward(problem, in.q_host, in.k_host, in.v_host, rows);
            shared_->reference_is_causal = problem.causal;
        }
        return *shared_;
    }

    const Stage& stage_;
    const Stage* const before_;
    const Options& options_;
    const Clock::time_point start_;
    Device device_;
    const Gpu* gpu_ = nullptr;
    std::optional<double> copy_bandwidth_;
    std::optional<Shared> shared_;
    bool wrong_ = false, timed_ = false;
};

void add_context(const Device& device, const std::string& typed) {
    int runtime = 0;
    cudaRuntimeGetVersion(&runtime);
    const char* driver_script = std::getenv("WORKBOOK_COMMAND");
    benchmark::AddCustomContext("gpu", device.name);
    benchmark::AddCustomContext("compute_capability",
                                std::to_string(device.compute_capability / 10) + "." + std::to_string(device.compute_capability % 10));
    benchmark::AddCustomContext("driver", driver_version());
    benchmark::AddCustomContext("cuda", dotted(runtime));
    benchmark::AddCustomContext("command", driver_script ? driver_script : typed);
    if (const Gpu* gpu = in_table(device)) {  // the datasheet's ceilings, for the roofline of bench/report.py
        benchmark::AddCustomContext("bandwidth_GB_s", std::to_string(gpu->bandwidth / 1e9));
        benchmark::AddCustomContext("l1_GB_s", std::to_string(gpu->l1_bandwidth() / 1e9));
        benchmark::AddCustomContext("fp32_tflops", std::to_string(gpu->fp32 / 1e12));
        benchmark::AddCustomContext("tensor_tflops", std::to_string(gpu->tensor_16bit / 1e12));
    }
}

bool has_flag(const std::vector<std::string>& words, const std::string& flag) {
    return std::any_of(words.begin(), words.end(), [&](const std::string& word) {
        return word == flag || (word.rfind(flag + "=", 0) == 0 && word != flag + "=false");
    });
}

int run_benchmarks(const Stage& stage, const Stage* before, const std::string& program, const std::vector<std::string>& arguments) {
    const Options options = parse_options(Program::measure, program, arguments);
    if (options.help) {
        std::cout << *options.help;
        return all_right;
    }
    for (const std::string& word : options.google) {
        if (word.rfind("--benchmark_out_format=", 0) == 0 && word != "--benchmark_out_format=json")
            throw InvalidArgument(word + ": json is accepted, which is what bench/report.py reads");
    }
    const bool listing = has_flag(options.google, "--benchmark_list_tests");
    Session session(stage, before, options);
    session.register_cases();

    std::string name = program;
    std::vector<std::string> google = options.google;
    std::vector<char*> argv = {name.data()};
    for (std::string& word : google) argv.push_back(word.data());
    argv.push_back(nullptr);
    int argc = static_cast<int>(argv.size()) - 1;
    benchmark::Initialize(&argc, argv.data());
    if (benchmark::ReportUnrecognizedArguments(argc, argv.data())) return bad_arguments;

    if (!listing) {
        session.use_device();
        std::string typed = program;
        for (const std::string& word : arguments) typed += " " + word;
        add_context(session.device(), typed);
    }
    Display display;
    JsonFile file;
    const bool to_file = has_flag(options.google, "--benchmark_out") || std::getenv("BENCHMARK_OUT") != nullptr;
    const std::size_t cases = to_file ? benchmark::RunSpecifiedBenchmarks(&display, &file) : benchmark::RunSpecifiedBenchmarks(&display);
    benchmark::Shutdown();
    if (cases == 0) return bad_arguments;
    return listing ? all_right : session.status();
}

}  // namespace

int bench_main(const Stage& stage, int argc, char** argv, const Stage* before) {
    const std::string program = "bench_step" + stage.id;
    const auto fail = [&](const std::exception& error, int status) {
        std::cerr << program << ": " << error.what() << "\n";
        return status;
    };
    try {
        return run_benchmarks(stage, before, program, {argv + 1, argv + argc});
    } catch (const InvalidArgument& error) {
        return fail(error, bad_arguments);
    } catch (const Refused& error) {
        return fail(error, nothing_timed);
    } catch (const std::exception& error) {
        return fail(error, wrong);
    }
}

}  // namespace workbook::bench
