// Watches stage 06's fastest forward kernel from inside: how busy its blocks kept the tensor cores, and, for one block, who did what
// when.
#include "watch.hpp"

#include "06_hopper/vote_first_launch.hpp"
#include "stage/command_line.hpp"
#include "stage/data.hpp"
#include "stage/device.hpp"
#include "stage/run.hpp"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <fstream>
#include <iostream>
#include <numeric>

namespace workbook {
namespace {

constexpr int kActors = 5, kCapacity = 512;  // warpgroups at most; blocks of keys

struct Options {
    ProblemOptions problem;
    std::optional<int> block;
    std::string marks;
};

int run(int argc, char** argv) {
    CLI::App app(
        "Runs 06c under a watch. Prints the mean and the longest time of its blocks in clocks, and their utilisation: the clocks that "
        "an SM's tensor cores need for the products, without any padding, over the mean time of a block.");
    Options options;
    OptionList list(app);
    const Problem defaults{.batch = 1, .heads = 16, .kv_heads = 16, .seq = 4096, .kv_seq = 4096, .head_dim = 128, .dtype = DType::bf16};
    list.problem(options.problem, defaults, "bf16");
    list.value("--marks", "FILE", "writes what one block did when, in clocks, as JSON",
               [&](const std::string& word) { options.marks = word; });
    list.whole("--block", options.block, "the block, counted from 1 (1)");
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        return app.exit(error) == 0 ? 0 : 2;
    }
    const Problem problem = options.problem.over(defaults);
    check(problem);
    const Device device = Device::current();
    if (const auto reason = step06::vote_first_variant().refuses(problem, device)) throw Refused("06c vote_first: " + *reason);

    const Inputs in = random_inputs(problem, workbook::Options{});
    const ForwardOutputs outputs(problem);
    Workspace workspace;
    Forward args = forward_args(in, outputs, device, {}, workspace);
    const DeviceBuffer cycles = zeros(static_cast<std::size_t>(device.sms)), marks = zeros(kActors * step06::watched::kEvents * kCapacity);
    const auto watched = [&]<bool kMarks>() {
        const simt::Watch<kMarks> watch{static_cast<long long*>(cycles.data()), static_cast<long long*>(marks.data()),
                                        step06::watched::kEvents, kCapacity, static_cast<unsigned>(options.block.value_or(1) - 1)};
        for (int n = 0; n < 3; ++n) step06::launch_vote_first(args, watch);  // the last is kept
    };
    options.marks.empty() ? watched.template operator()<false>() : watched.template operator()<true>();
    synchronize(args.exec.stream);

    const std::vector<long long> all = block_times(cycles);
    const double mean = static_cast<double>(std::accumulate(all.begin(), all.end(), 0LL)) / static_cast<double>(all.size());
    std::cout << describe(problem) << ": " << all.size() << " blocks, mean " << static_cast<long long>(mean) << " clocks, longest "
              << *std::max_element(all.begin(), all.end()) << ", utilisation " << utilisation(forward_flops(problem), mean, device)
              << " %\n";
    if (!options.marks.empty()) {
        const std::vector<long long> flat = download(marks);
        nlohmann::json file = {{"problem", describe(problem)}, {"gpu", device.name}, {"actors", nlohmann::json::array()}};
        for (int actor = 0; actor < kActors; ++actor) {
            nlohmann::json events = nlohmann::json::array();
            for (int event = 0; event < step06::watched::kEvents; ++event) {
                const auto from = flat.begin() + (actor * step06::watched::kEvents + event) * kCapacity;
                events.push_back(std::vector<long long>(from, from + kCapacity));
            }
            file["actors"].push_back(events);
        }
        std::ofstream out(options.marks);
        if (!(out << file << "\n" << std::flush)) throw FileError(options.marks + " cannot be written");
    }
    return 0;
}

}  // namespace
}  // namespace workbook

int main(int argc, char** argv) { return workbook::watch_main("watch_step06", workbook::run, argc, argv); }
