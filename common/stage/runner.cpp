#include "stage/runner.hpp"

#include "stage/device.hpp"
#include "stage/progress.hpp"
#include "stage/table.hpp"

#include <algorithm>
#include <iostream>
#include <new>

namespace workbook {
namespace {

constexpr double max_reference_products = 2147483648.0;  // a few seconds of float64 on one core
constexpr long long sampled_rows = 256;
constexpr double patience_seconds = 3600;

enum Exit { all_right = 0, wrong = 1, bad_arguments = 2, refused = 3 };

std::vector<const Variant*> select(const Stage& stage, const std::vector<std::string>& words) {
    const auto chosen = [&](const Variant& v, const std::string& word) { return word == v.id || word == v.name; };
    for (const std::string& word : words) {
        if (std::any_of(stage.variants.begin(), stage.variants.end(), [&](const Variant& v) { return chosen(v, word); })) continue;
        std::string accepted;
        for (const Variant& v : stage.variants) accepted += (accepted.empty() ? "" : ", ") + v.id + " or " + v.name;
        throw InvalidArgument("--variant=" + word + ": " + accepted + " is accepted");
    }
    std::vector<const Variant*> selected;
    for (const Variant& v : stage.variants) {
        if (words.empty() || std::any_of(words.begin(), words.end(), [&](const std::string& word) { return chosen(v, word); })) {
            selected.push_back(&v);
        }
    }
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

/// What --list prints: each variant is asked what it refuses.
std::string list_variants(const Stage& stage, const Device& device) {
    static constexpr int dims[] = {16, 32, 40, 64, 72, 80, 96, 100, 112, 128, 160, 192, 224, 256};
    std::string text = "Stage " + stage.id + ": " + stage.title + " on " + device.name + "\n";
    for (const Variant& v : stage.variants) {
        text += "\n  " + v.id + "  " + v.name + "\n";
        for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
            Problem base;
            base.dtype = type;
            std::string accepted, reason;
            bool all = true;
            int does = 0;
            for (const int d : dims) {
                Problem p = base;
                p.head_dim = d;
                if (const auto why = v.refuses(p, device)) {
                    all = false;
                    if (reason.empty() || d == Problem{}.head_dim) reason = *why;
                } else {
                    accepted += " " + std::to_string(d);
                    if (does == 0 || d == Problem{}.head_dim) does = d;
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
            gqa.heads = 4;
            cross.kv_seq = 2 * cross.seq;
            bnhd.layout = Layout::bnhd;
            ragged.seq = ragged.kv_seq = 257;
            for (const auto& [what, problem] :
                 {std::pair{"causal", causal}, {"Hq > Hkv", gqa}, {"Nq != Nkv", cross}, {"any length", ragged}, {"bnhd", bnhd}}) {
                text += std::string("; ") + (v.refuses(problem, device) ? "not " : "") + what;
            }
            text += "\n";
        }
    }
    return text;
}

DType default_dtype(const std::vector<const Variant*>& variants, const Options& options, const Device& device) {
    for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
        const Problem problem = options.problem(type);
        check(problem);
        if (std::any_of(variants.begin(), variants.end(), [&](const Variant* v) { return !v->refuses(problem, device); })) return type;
    }
    return DType::f32;
}

std::vector<long long> rows_to_check(const Problem& p, const Options& options) {
    const double products = static_cast<double>(p.rows()) * p.kv_seq * p.head_dim;
    const long long count = options.check_rows.value_or(products <= max_reference_products ? 0 : sampled_rows);
    return count == 0 || count >= p.rows() ? std::vector<long long>{} : sample_rows(p, count);
}

/// Why a variant is not run although it could be; nothing when it is run.
std::string too_long(const Report& report, const Problem& problem, const Device& device, const Options& options) {
    const double seconds = device.emulated ? emulation_estimate(problem, report.predicted) : report.prediction.seconds();
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
          variants_(select(stage, options.variants)),
          machine_(machine_of(options)) {}

    int run() {
        TensorFile file;
        if (options_.input) file = read_safetensors(*options_.input);
        problem_ = options_.input
                       ? problem_of(options_, file)
                       : options_.problem(options_.dtype ? *options_.dtype : default_dtype(variants_, options_, machine_.device));
        check(problem_);

        std::vector<const Variant*> accepted;
        for (const Variant* variant : variants_)
            if (accept(*variant)) accepted.push_back(variant);
        if (accepted.empty()) return exit_;

        Setup setup{options_,
                    machine_.device,
                    *machine_.target,
                    machine_.on_target,
                    options_.input ? file_inputs(problem_, file) : random_inputs(problem_, options_),
                    {},
                    {}};
        file = {};
        read_previous(setup.inputs);
        const std::vector<long long> rows = rows_to_check(problem_, options_);
        const Inputs& in = setup.inputs;
        setup.want = reference_forward(problem_, in.q_host, in.k_host, in.v_host, rows);
        setup.plain = plain_low_precision_forward(problem_, in.q_host, in.k_host, in.v_host, rows);

        if (table() && !options_.rows_only) {
            std::cout << heading(stage_, setup, previous_ ? previous_->label + " (" + options_.against.back().string() + ")" : "")
                      << column_heads(machine_.device.emulated) << std::flush;
        }
        for (const Variant* variant : accepted) run(*variant, setup);
        if (options_.output && last_) {
            if (last_->report.id != variants_.back()->id) {
                std::cerr << program_ << ": " << options_.output->string() << " holds the result of " << last_->report.label()
                          << ", the last variant that ran\n";
            }
            write_result(*options_.output, stage_.id, last_->report.label(), setup.inputs, last_->result, machine_.device.name,
                         last_->report.seconds);
        }
        // Where some variants of a stage ran, those that cannot do the problem do not fail it, unless they were asked for.
        return exit_ == refused && last_ && options_.variants.empty() ? all_right : exit_;
    }

private:
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

    bool accept(const Variant& variant) {
        if (const auto reason = variant.refuses(problem_, machine_.device)) {
            Report report;
            report.stage = stage_.id;
            report.id = variant.id;
            report.name = variant.name;
            report.naive_requested = naive_movement(problem_).requested.total();
            drop(report, "refused", *reason, refused);
            return false;
        }
        Report report = predict_variant(stage_, variant, problem_, machine_.device, *machine_.target);
        if (const std::string reason = too_long(report, problem_, machine_.device, options_); !reason.empty()) {
            drop(report, "skipped", reason, refused);
            return false;
        }
        const double emulation = emulation_estimate(problem_, report.predicted);
        if (machine_.device.emulated && emulation > patience_seconds && !options_.force) {
            drop(report, "refused", "would take about " + rough_duration(emulation) + " on the emulator; use a smaller problem, or --force",
                 refused);
            return false;
        }
        return true;
    }

    void read_previous(const Inputs& inputs) {
        for (const auto& path : options_.against) {
            Previous previous = read_result(path, inputs);
            if (!baseline_seconds_ && path == options_.against.front()) {
                baseline_ = previous.label;
                baseline_device_ = previous.device;
                baseline_seconds_ = previous.seconds;
            }
            previous_ = std::move(previous);
        }
    }

    void compare_with_baseline(Report& report) {
        if (!report.seconds) return;
        if (!baseline_seconds_ && options_.against.empty() && stage_.id == "01") {  // stage 01 is its own baseline
            baseline_ = report.label();
            baseline_device_ = machine_.device.name;
            baseline_seconds_ = report.seconds;
        }
        if (!baseline_seconds_) return;
        if (baseline_device_ != machine_.device.name) {
            if (!warned_) {
                std::cerr << program_ << ": no speedup: " << baseline_ << " was timed on " << baseline_device_ << ", this is "
                          << machine_.device.name << "\n";
            }
            warned_ = true;
            return;
        }
        report.baseline = baseline_;
        report.speedup = *baseline_seconds_ / *report.seconds;
    }

    void run(const Variant& variant, const Setup& setup) {
        Run run;
        try {
            run = run_variant(stage_, variant, setup);
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
        if (previous_) {
            report.previous = previous_->label;
            report.difference = compare_runs(previous_->result, run.result);
        }
        compare_with_baseline(report);
        if (report.status == "wrong") worsen(wrong);

        if (table()) {
            std::cout << row(report, problem_.dtype, machine_.device.emulated);
            if (options_.traffic) std::cout << traffic_table(report);
            std::cout << std::flush;
        } else if (report.status == "wrong") {
            std::cerr << program_ << ": " << report.label() << " is wrong: " << report.reason << "\n";
        }
        print_json(report);
        previous_ = Previous{report.label(), run.result, report.seconds, machine_.device.name};
        last_ = std::move(run);
    }

    const Stage& stage_;
    const Options& options_;
    const std::string program_;
    const std::vector<const Variant*> variants_;
    const Machine machine_;
    Problem problem_;
    int exit_ = all_right;
    std::optional<Previous> previous_;
    std::optional<Run> last_;
    std::string baseline_, baseline_device_;
    std::optional<double> baseline_seconds_;
    bool warned_ = false;
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
            const auto variants = select(stage, options.variants);
            Stage shown{stage.id, stage.title, {}};
            for (const Variant* v : variants) shown.variants.push_back(*v);
            std::cout << list_variants(shown, device_to_list(options));
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
