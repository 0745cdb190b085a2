// Watches stage 06's backward kernels from inside: how busy their blocks kept the tensor cores.
#include "watch.hpp"

#include "06_hopper/exchange_launch.hpp"
#include "06_hopper/reduce_scatter_launch.hpp"
#include "06_hopper/stage.hpp"
#include "stage/command_line.hpp"
#include "stage/data.hpp"
#include "stage/device.hpp"
#include "stage/run.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <iostream>
#include <numeric>

namespace workbook {
namespace {

const BackwardVariant& variant(const std::string& id) {
    for (const BackwardVariant& v : step06::stage().backward)
        if (v.id == id) return v;
    reject("--variant", id, "06e, 06e-det, 06f and 06g are accepted");
}

int run(int argc, char** argv) {
    CLI::App app(
        "Runs a backward variant of stage 06 under a watch. Prints the sum of the times of its blocks in clocks, for each SM, and their "
        "utilisation: the clocks that an SM's tensor cores need for the five products, without any padding, over that sum. What comes "
        "before and after the kernel is not in it, nor the time of SMs that have no block any more.");
    ProblemOptions problem_options;
    std::string id = "06e";
    OptionList list(app);
    const Problem defaults{.batch = 4, .heads = 16, .kv_heads = 16, .seq = 4096, .kv_seq = 4096, .head_dim = 128, .dtype = DType::bf16};
    list.problem(problem_options, defaults, "bf16");
    list.value("--variant", "ID", "06e, 06e-det, 06f or 06g (06e)", [&](const std::string& word) { id = variant(word).id; });
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        return app.exit(error) == 0 ? 0 : 2;
    }
    const Problem problem = problem_options.over(defaults);
    check(problem);
    const Device device = Device::current();
    if (const auto reason = why_refused(variant(id), problem, device)) throw Refused(id + ": " + *reason);

    const Inputs in = random_inputs(problem, workbook::Options{});
    const OutputGradient d_o = output_gradient(problem, workbook::Options{}, nullptr);
    const ForwardOutputs outputs(problem);
    const Gradients gradients(problem);
    Workspace workspace;
    Forward forward = forward_args(in, outputs, device, {}, workspace);
    variant(id).forward(forward);
    Backward args = backward_args(forward, d_o, gradients);

    // More than any grid has: a block for 64 keys of a head, and those that fill up the last heads side by side and the last cluster.
    const DeviceBuffer cycles = zeros(static_cast<std::size_t>((problem.kv_seq + 63) / 64 + 1) * (problem.batch * problem.kv_heads + 4));
    const simt::Watch<false> watch{static_cast<long long*>(cycles.data()), nullptr, 0, 0, 0};
    for (int n = 0; n < 3; ++n)  // the last is kept
        step06::with_16_bit_type(problem.dtype, [&]<class T>() {
            if (id == "06f") return step06::launch_exchange<T>(id, args, watch);
            if (id == "06g") return step06::launch_reduce_scatter<T>(id, args, watch);
            step06::with_backward_shape(problem.head_dim, [&]<class S>() {
                id == "06e" ? step06::launch_backward<T, S, false>(id, args, watch) : step06::launch_backward<T, S, true>(id, args, watch);
            });
        });
    synchronize(args.exec.stream);

    const std::vector<long long> all = block_times(cycles);
    const double each = static_cast<double>(std::accumulate(all.begin(), all.end(), 0LL)) / device.sms;
    std::cout << id << ", " << describe(problem) << ": " << all.size() << " blocks, " << static_cast<long long>(each)
              << " clocks an SM, the longest block " << *std::max_element(all.begin(), all.end()) << ", utilisation "
              << utilisation(backward_flops(problem), each, device) << " %\n";
    return 0;
}

}  // namespace
}  // namespace workbook

int main(int argc, char** argv) { return workbook::watch_main("watch_step06_backward", workbook::run, argc, argv); }
