#include "stage/runner.hpp"

#include "stage/device.hpp"
#include "stage/progress.hpp"
#include "stage/table.hpp"

#include <algorithm>
#include <fstream>
#include <iostream>
#include <new>
#include <type_traits>

namespace workbook {
namespace {

constexpr double max_reference_products = 2147483648.0;  // a few seconds of float64 on one core
constexpr long long sampled_rows = 256;
constexpr double patience_seconds = 3600;

enum Exit { all_right = 0, wrong = 1, bad_arguments = 2, refused = 3 };

/// The variants of a stage that a run is about.
struct Selection {
    std::vector<const Variant*> forward;
    std::vector<const BackwardVariant*> backward;
};

Selection select(const Stage& stage, const std::vector<std::string>& words) {
    const auto is = [](const auto& v, const std::string& word) { return word == v.id || word == v.name; };
    const auto knows = [&](const auto& variants, const std::string& word) {
        return std::any_of(variants.begin(), variants.end(), [&](const auto& v) { return is(v, word); });
    };
    std::string accepted;
    const auto list = [&](const auto& variants) {
        for (const auto& v : variants) accepted += (accepted.empty() ? "" : ", ") + v.id + " or " + v.name;
    };
    list(stage.variants);
    list(stage.backward);
    for (const std::string& word : words) {
        if (!knows(stage.variants, word) && !knows(stage.backward, word))
            throw InvalidArgument("--variant=" + word + ": " + accepted + " is accepted");
    }
    Selection selected;
    const auto pick = [&](const auto& variants, auto& into) {
        for (const auto& v : variants)
            if (words.empty() || std::any_of(words.begin(), words.end(), [&](const std::string& word) { return is(v, word); })) {
                into.push_back(&v);
            }
    };
    pick(stage.variants, selected.forward);
    pick(stage.backward, selected.backward);
    return selected;
}

/// The device that runs, and the GPU whose time is predicted.
struct Machine {
    Device device;
    const Gpu* target;
    bool on_target;
};

Machine machine_of(const Options& options) {
    const Gpu* asked = options.on ? options.on : &find_gpu("h200");
    Machine machine{Device::current(asked), asked, true};
    if (!machine.device.emulated) {
        const Gpu* present = in_table(machine.device);
        if (present && !options.on) machine.target = present;
        machine.on_target = machine.target == present;
    }
    if (options.shared_memory) {
        if (*options.shared_memory > machine.device.shared_memory_per_block) {
            throw Refused("--shared-memory=" + std::to_string(*options.shared_memory) + ": a block of " + machine.device.name +
                          " has at most " + std::to_string(machine.device.shared_memory_per_block) + " bytes");
        }
        machine.device.shared_memory_per_block = *options.shared_memory;
    }
    return machine;
}

/// For --list, which needs no GPU: the machine there is, else the GPU that would be predicted for.
Device device_to_list(const Options& options) {
    try {
        return machine_of(options).device;
    } catch (const Refused&) {
        if (emulating || options.shared_memory) throw;
        const Gpu& gpu = options.on ? *options.on : find_gpu("h200");
        return {std::string(gpu.name) + " (no GPU here)", false, gpu.compute_capability, gpu.sms, gpu.shared_memory_per_block};
    }
}

/// What --list prints of a variant, which is asked what it refuses.
template <class AnyVariant>
std::string list_variant(const AnyVariant& v, const Problem& typical, const Device& device) {
    static constexpr int dims[] = {16, 32, 40, 64, 72, 80, 96, 100, 112, 128, 160, 192, 224, 256};
    std::string text;
    for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
        Problem base = typical;
        base.dtype = type;
        std::string accepted, reason;
        bool all = true;
        int does = 0;
        for (const int d : dims) {
            Problem p = base;
            p.head_dim = d;
            if (const auto why = why_refused(v, p, device)) {
                all = false;
                if (reason.empty() || d == typical.head_dim) reason = *why;
            } else {
                accepted += " " + std::to_string(d);
                if (does == 0 || d == typical.head_dim) does = d;
            }
        }
        text += "      " + std::string(name(type)) + std::string(6 - std::string(name(type)).size(), ' ');
        if (does == 0) {
            text += "no: " + reason + "\n";
            continue;
        }
        text += all ? "every head dimension up to 256" : "head dimensions" + accepted;
        base.head_dim = does;
        Problem causal = base, gqa = base, cross = base, bnhd = base, ragged = base;
        causal.causal = true;
        gqa.heads = 4 * gqa.kv_heads;
        cross.kv_seq = 2 * cross.seq;
        bnhd.layout = Layout::bnhd;
        ragged.seq = ragged.kv_seq = 257;
        for (const auto& [what, problem] :
             {std::pair{"causal", causal}, {"Hq > Hkv", gqa}, {"Nq != Nkv", cross}, {"any length", ragged}, {"bnhd", bnhd}}) {
            text += std::string("; ") + (why_refused(v, problem, device) ? "not " : "") + what;
        }
        text += "\n";
    }
    return text;
}

std::string list_variants(const Stage& stage, const Selection& selected, const Device& device) {
    std::string text = "Stage " + stage.id + ": " + stage.title + " on " + device.name + "\n";
    for (const Variant* v : selected.forward) text += "\n  " + v->id + "  " + v->name + "\n" + list_variant(*v, stage.problem, device);
    for (const BackwardVariant* v : selected.backward) {
        text += "\n  " + v->id + "  " + v->name + " (backward)\n" + list_variant(*v, stage.problem, device);
    }
    return text;
}

DType default_dtype(const Selection& selected, const Options& options, const Device& device) {
    for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
        const Problem problem = options.problem(type);
        check(problem);
        const auto does = [&](const auto* v) { return !why_refused(*v, problem, device); };
        if (std::any_of(selected.forward.begin(), selected.forward.end(), does)) return type;
        if (std::any_of(selected.backward.begin(), selected.backward.end(), does)) return type;
    }
    return DType::f32;
}

/// How many rows of O and dQ, and of dK and dV, to compare with float64; 0: all.
/// @param work multiplications of float64 for each (row, key, column): 1 forward, about 5 backward
long long rows_to_check(const Problem& p, const Options& options, double work) {
    const double products = work * static_cast<double>(p.pairs()) * p.head_dim;
    return options.check_rows.value_or(products <= max_reference_products ? 0 : sampled_rows);
}

bool has_result(const Run&) { return true; }
/// No backward pass follows a wrong forward pass.
bool has_result(const BackwardRun& run) { return !run.result.dq.empty(); }

/// Why a variant is not run although it could be; nothing when it is run.
std::string too_long(const Report& report, const Problem& problem, const Device& device, const Options& options) {
    const double seconds = device.emulated ? emulation_estimate(problem, report) : report.prediction.seconds();
    if (options.max_seconds && seconds > *options.max_seconds) {
        return "skipped: would take about " + rough_duration(seconds) + ", more than --max-seconds allows (" +
               rough_duration(*options.max_seconds) + ")";
    }
    return "";
}

class Session {
public:
    Session(const Stage& stage, const Options& options)
        : stage_(stage),
          options_(options),
          program_("step" + stage.id),
          selected_(select(stage, options.variants)),
          machine_(machine_of(options)) {}

    int run() {
        TensorFile file;
        if (options_.input) file = read_safetensors(*options_.input);
        problem_ = options_.input
                       ? problem_of(options_, file)
                       : options_.problem(options_.dtype ? *options_.dtype : default_dtype(selected_, options_, machine_.device));
        check(problem_);

        const Selection accepted{accept(selected_.forward), accept(selected_.backward)};
        if (accepted.forward.empty() && accepted.backward.empty()) return exit_;

        Setup setup{options_,
                    machine_.device,
                    *machine_.target,
                    machine_.on_target,
                    options_.input ? file_inputs(problem_, file) : random_inputs(problem_, options_),
                    {},
                    {}};
        std::optional<BackwardSetup> backward;
        if (!accepted.backward.empty()) {
            backward.emplace();
            backward->d_o = output_gradient(problem_, options_, options_.input ? &file : nullptr);
        }
        file = {};
        const std::string d_o = backward ? backward->d_o.origin : "";
        read_previous(setup.inputs, d_o);
        const long long count = rows_to_check(problem_, options_, backward ? 5 : 1);
        const Inputs& in = setup.inputs;
        const bool sampled = count > 0 && count < problem_.rows();
        const std::vector<long long> rows = sampled ? sample_rows(problem_, count) : std::vector<long long>{};
        setup.want = reference_forward(problem_, in.q_host, in.k_host, in.v_host, rows);
        setup.plain = plain_low_precision_forward(problem_, in.q_host, in.k_host, in.v_host, rows);
        if (backward) {
            if (sampled) backward->kv_rows = sample_kv_rows(problem_, count);
            if (options_.forward) backward->forward = read_forward(setup);
        }

        if (options_.trace) {
            trace_.open(*options_.trace);
            if (!trace_) throw FileError("--trace=" + options_.trace->string() + ": cannot be written");
        }
        const auto from = [&](const auto& previous) {
            return previous ? previous->label + " (" + options_.against.back().string() + ")" : std::string();
        };
        if (table() && !options_.rows_only) std::cout << heading(stage_, setup);
        if (table() && !options_.rows_only && !accepted.forward.empty()) {
            std::cout << forward_heading(setup, from(forward_.previous)) << std::flush;
        }
        for (const Variant* variant : accepted.forward) {
            run(*variant, forward_, [&] { return run_variant(stage_, *variant, setup); });
        }
        if (table() && backward) {
            if (options_.rows_only || !accepted.forward.empty()) std::cout << "\n";
            std::cout << backward_heading(setup, *backward, from(backward_.previous)) << std::flush;
        }
        for (const BackwardVariant* variant : accepted.backward) {
            run(*variant, backward_, [&] { return run_variant(stage_, *variant, setup, *backward); });
        }

        const bool any = forward_.ran || backward_.ran;
        if (options_.output && any) {
            if (!selected_.forward.empty()) tell_what_is_written(forward_, selected_.forward.back()->id);
            if (!selected_.backward.empty()) tell_what_is_written(backward_, selected_.backward.back()->id);
            write_results(*options_.output, stage_.id, in, d_o,
                          {forward_.ran ? forward_.previous : std::nullopt, backward_.ran ? backward_.previous : std::nullopt});
        }
        // Where some variants of a stage ran, those that cannot do the problem do not fail it, unless they were asked for.
        return exit_ == refused && any && options_.variants.empty() ? all_right : exit_;
    }

private:
    /// What is known of the runs in one direction.
    template <class AnyResult>
    struct Direction {
        std::optional<Earlier<AnyResult>> previous;  ///< the last that ran; before the first, what --against gave
        bool ran = false;
        std::string last_id;
        // What speedups are over.
        std::string baseline, baseline_device;
        std::optional<double> baseline_seconds;
    };

    bool table() const { return !options_.json && !options_.quiet; }

    void worsen(int status) {
        if (exit_ != wrong) exit_ = status;
    }

    void print_json(const Report& report) {
        if (!options_.json) return;
        std::cout << json_line(report, problem_, origin_of(options_), machine_.device, options_.schedule, *machine_.target) << std::flush;
    }

    /// A variant that does not come to an end has a line on stderr and no row.
    void drop(Report& report, const std::string& status, const std::string& reason, int exit_status) {
        report.status = status;
        report.reason = reason;
        std::cerr << program_ << ": " << report.label() << ": " << reason << "\n";
        print_json(report);
        worsen(exit_status);
    }

    template <class AnyVariant>
    std::vector<const AnyVariant*> accept(const std::vector<const AnyVariant*>& variants) {
        std::vector<const AnyVariant*> accepted;
        for (const AnyVariant* variant : variants)
            if (accept(*variant)) accepted.push_back(variant);
        return accepted;
    }

    template <class AnyVariant>
    bool accept(const AnyVariant& variant) {
        if (const auto reason = why_refused(variant, problem_, machine_.device)) {
            Report report;
            report.stage = stage_.id;
            report.id = variant.id;
            report.name = variant.name;
            report.backward = std::is_same_v<AnyVariant, BackwardVariant>;
            report.naive_requested = (report.backward ? standard_backward_movement(problem_) : naive_movement(problem_)).requested.total();
            drop(report, "refused", *reason, refused);
            return false;
        }
        Report report = predict_variant(stage_, variant, problem_, machine_.device, *machine_.target);
        if (const std::string reason = too_long(report, problem_, machine_.device, options_); !reason.empty()) {
            drop(report, "skipped", reason, refused);
            return false;
        }
        const double emulation = emulation_estimate(problem_, report);
        if (machine_.device.emulated && emulation > patience_seconds && !options_.force) {
            drop(report, "refused", "would take about " + rough_duration(emulation) + " on the emulator; use a smaller problem, or --force",
                 refused);
            return false;
        }
        return true;
    }

    void read_previous(const Inputs& inputs, const std::string& d_o) {
        const auto take = [](auto& from, auto& direction) {
            if (!from) return;
            if (!direction.previous) {
                direction.baseline = from->label;
                direction.baseline_device = from->device;
                direction.baseline_seconds = from->seconds;
            }
            direction.previous = std::move(from);
        };
        for (const auto& path : options_.against) {
            Written written = read_results(path, inputs, d_o);
            take(written.forward, forward_);
            take(written.backward, backward_);
        }
    }

    /// O and LSE that --forward names, once they are known to be those of the inputs.
    Previous read_forward(const Setup& setup) const {
        const std::string path = options_.forward->string();
        Written written = read_results(*options_.forward, setup.inputs, "");
        if (!written.forward)
            throw FileError("--forward=" + path + " holds gradients and no o and lse; --output of a forward pass is accepted");
        if (const std::string why = judge_given(setup, written.forward->result); !why.empty()) {
            throw FileError("--forward=" + path + ": its o and lse are not those of these inputs: " + why);
        }
        written.forward->label += " (" + path + ")";
        return std::move(*written.forward);
    }

    template <class AnyResult>
    void compare_with_baseline(Report& report, Direction<AnyResult>& direction) {
        if (!report.seconds) return;
        // Where --against gave none, stage 01 is its own baseline, and so is standard backward.
        if (direction.baseline.empty() && (stage_.id == "01" || report.id == "05a")) {
            direction.baseline = report.label();
            direction.baseline_device = machine_.device.name;
            direction.baseline_seconds = report.seconds;
        }
        if (!direction.baseline_seconds) return;
        if (direction.baseline_device != machine_.device.name) {
            if (!warned_) {
                std::cerr << program_ << ": no speedup: " << direction.baseline << " was timed on " << direction.baseline_device
                          << ", this is " << machine_.device.name << "\n";
            }
            warned_ = true;
            return;
        }
        report.baseline = direction.baseline;
        report.speedup = *direction.baseline_seconds / *report.seconds;
    }

    template <class AnyResult>
    void tell_what_is_written(const Direction<AnyResult>& direction, const std::string& last_id) const {
        if (!direction.ran || direction.last_id == last_id) return;
        std::cerr << program_ << ": " << options_.output->string() << " holds the result of " << direction.previous->label
                  << ", the last variant that ran\n";
    }

    /// @param launch runs the variant and gives its Run or BackwardRun
    template <class AnyVariant, class AnyResult, class Launch>
    void run(const AnyVariant& variant, Direction<AnyResult>& direction, Launch launch) {
        decltype(launch()) run;
        try {
            run = launch();
        } catch (const InvalidArgument&) {
            throw;
        } catch (const std::exception& error) {
            const bool cannot = dynamic_cast<const Refused*>(&error) || dynamic_cast<const std::bad_alloc*>(&error);
            std::string reason = error.what();
            const std::string prefix = variant.id + " " + variant.name + ": ";
            if (reason.rfind(prefix, 0) == 0) reason.erase(0, prefix.size());
            Report report = predict_variant(stage_, variant, problem_, machine_.device, *machine_.target);
            drop(report, cannot ? "refused" : "failed", reason, cannot ? refused : wrong);
            return;
        }
        Report& report = run.report;
        if (direction.previous && has_result(run)) {
            report.previous = direction.previous->label;
            report.difference = compare_runs(direction.previous->result, run.result);
        }
        compare_with_baseline(report, direction);
        if (report.status == "wrong") worsen(wrong);

        if (table()) {
            std::cout << row(report, problem_.dtype, machine_.device.emulated);
            if (options_.traffic) std::cout << traffic_table(report);
            std::cout << std::flush;
        } else if (report.status == "wrong") {
            std::cerr << program_ << ": " << report.label() << " is wrong: " << report.reason << "\n";
        }
        print_json(report);
        if (options_.trace && !(trace_ << trace_line(report, problem_) << std::flush))
            throw FileError("--trace=" + options_.trace->string() + ": writing failed");
        if (!has_result(run)) return;
        direction.previous = Earlier<AnyResult>{report.label(), std::move(run.result), report.seconds, machine_.device.name};
        direction.ran = true;
        direction.last_id = report.id;
    }

    const Stage& stage_;
    const Options& options_;
    const std::string program_;
    const Selection selected_;
    const Machine machine_;
    Problem problem_;
    int exit_ = all_right;
    Direction<Result> forward_;
    Direction<GradientResult> backward_;
    bool warned_ = false;
    std::ofstream trace_;
};

}  // namespace

// "NVIDIA GeForce RTX 4090" is rtx4090. The number of SMs tells apart what is sold under one name (H100 SXM and PCIe).
const Gpu* in_table(const Device& device) {
    std::string plain;
    for (const char c : device.name)
        if (c != ' ') plain += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    for (const Gpu& gpu : gpus()) {
        if (plain.find(gpu.key) != std::string::npos && gpu.sms == device.sms && gpu.compute_capability == device.compute_capability) {
            return &gpu;
        }
    }
    return nullptr;
}

int stage_main(const Stage& stage, int argc, char** argv) {
    const auto fail = [&](const std::string& what, int status) {
        std::cerr << "step" << stage.id << ": " << what << "\n";
        return status;
    };
    try {
        const Options options = parse_options(stage, argc, argv);
        if (options.help) {
            std::cout << *options.help;
            return all_right;
        }
        if (options.list) {
            std::cout << list_variants(stage, select(stage, options.variants), device_to_list(options));
            return all_right;
        }
        return Session(stage, options).run();
    } catch (const InvalidArgument& error) {
        return fail(error.what(), bad_arguments);
    } catch (const FileError& error) {
        return fail(error.what(), bad_arguments);
    } catch (const Refused& error) {
        return fail(error.what(), refused);
    } catch (const std::bad_alloc& error) {
        return fail(std::string("out of memory (") + error.what() + "); use a shorter sequence, fewer heads or a smaller batch", refused);
    } catch (const std::exception& error) {
        return fail(error.what(), wrong);
    }
}

}  // namespace workbook
