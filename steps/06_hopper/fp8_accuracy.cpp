// What e4m3 costs in accuracy, and what finer scales and a rotation of Q and K win back: the table of the chapter's section on FP8.
//   fp8_accuracy [N [d]]
// All rows but the last are calculated on the host as the kernel calculates: Q, K, V and P in e4m3, sums in float32.
#include "06_hopper/stage.hpp"
#include "attention/fp8.hpp"
#include "stage/device.hpp"
#include "stage/run.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>

namespace {

using namespace workbook;

struct Accuracy {
    double rmse, relative;
};

Accuracy accuracy(const ReferenceRows& want, std::span<const float> o) {
    double squares = 0;
    for (const double x : want.o) squares += x * x;
    const double relative = compare(want.o, o).rel_rms;
    return {relative * std::sqrt(squares / static_cast<double>(want.o.size())), relative};
}
Accuracy accuracy(const ReferenceRows& want, const ReferenceRows& got) {
    return accuracy(want, std::vector<float>(got.o.begin(), got.o.end()));
}

void print(const char* name, const Accuracy& normal, const Accuracy& outliers) {
    std::printf("| %-44s | %8.2e | %5.2f %% | %8.2e | %5.2f %% |\n", name, normal.rmse, 100 * normal.relative, outliers.rmse,
                100 * outliers.relative);
}

/// Inputs of one distribution, what float64 makes of them, and what the kernel does.
struct Sample {
    Options options;
    Setup setup;
    std::vector<float> kernel;

    Sample(const Problem& problem, Distribution dist) : setup{options, Device::current(), find_gpu("h200"), false, {}, {}, {}} {
        options.seed = 1;
        options.dist = dist;
        options.repeats = 1;
        setup.inputs = random_inputs(problem, options);
        const Inputs& in = setup.inputs;
        setup.want = reference_forward(problem, in.q_host, in.k_host, in.v_host);
        setup.plain = plain_low_precision_forward(problem, in.q_host, in.k_host, in.v_host);
        const Run run = run_variant(step06::stage(), step06::stage().variants.back(), setup);
        if (run.report.status != "ok") throw std::runtime_error(run.report.label() + ": " + run.report.reason);
        kernel = run.result.o;
    }
    Sample(const Sample&) = delete;

    Accuracy plain() const { return accuracy(setup.want, setup.plain); }
    Accuracy fp8(Shares shares, bool rotated) const {
        const Inputs& in = setup.inputs;
        return accuracy(setup.want, fp8_forward(in.problem, in.q_host, in.k_host, in.v_host, {}, shares, rotated));
    }
    Accuracy by_kernel() const { return accuracy(setup.want, kernel); }
};

int length(const char* name, const char* text) {
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (*end != '\0' || value < 1 || value > 1 << 20)
        throw InvalidArgument(std::string(name) + " = \"" + text + "\": a number from 1 to 2^20 is accepted");
    return static_cast<int>(value);
}

int run(int argc, char** argv) {
    if (argc > 3) throw InvalidArgument("fp8_accuracy takes at most N and d");
    const int n = argc > 1 ? length("N", argv[1]) : 1024;
    const Problem problem{
        .heads = 2, .kv_heads = 2, .seq = n, .kv_seq = n, .head_dim = argc > 2 ? length("d", argv[2]) : 128, .dtype = DType::bf16};
    check(problem);
    const Sample normal(problem, Distribution::normal), outliers(problem, Distribution::outliers);
    std::printf("%s on %s; RMS error of O against float64, and the same over RMS of O\n\n", describe(problem).c_str(),
                normal.setup.device.name.c_str());
    std::printf("| %-44s | %-18s | %-18s |\n|---|--:|--:|--:|--:|\n", "", "N(0, 1)", "with outliers");
    print("plain attention in bf16", normal.plain(), outliers.plain());
    const auto row = [&](const char* name, Shares shares, bool rotated) {
        print(name, normal.fp8(shares, rotated), outliers.fp8(shares, rotated));
    };
    row("e4m3, a scale for each tensor", Shares::tensor, false);
    row("e4m3, a scale for each head", Shares::head, false);
    row("e4m3, a scale for 64 rows", Shares::block, false);
    row("e4m3, a scale for 64 rows, Q and K rotated", Shares::block, true);
    print("06d (a scale for 64 rows)", normal.by_kernel(), outliers.by_kernel());
    return 0;
}

}  // namespace

int main(int argc, char** argv) try { return run(argc, argv); } catch (const std::exception& error) {
    std::cerr << "fp8_accuracy: " << error.what() << "\n";
    return 1;
}
