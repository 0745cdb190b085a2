// What the benchmarks would measure at best: the roofline model's times, where there is no GPU to measure on.
#include "cases.hpp"
#include "options.hpp"

#include "stage/table.hpp"

#include "stages.hpp"

#include <algorithm>
#include <iomanip>
#include <iostream>

namespace workbook::bench {
namespace {

std::vector<const Stage*> select(const std::vector<std::string>& ids) {
    std::vector<const Stage*> selected;
    std::string accepted;
    for (const Stage* stage : stages()) {
        accepted += (accepted.empty() ? "" : ", ") + stage->id;
        if (ids.empty() || std::find(ids.begin(), ids.end(), stage->id) != ids.end()) selected.push_back(stage);
    }
    for (const std::string& id : ids) {
        if (std::none_of(selected.begin(), selected.end(), [&](const Stage* stage) { return stage->id == id; }))
            throw InvalidArgument("--stages: \"" + id + "\" is no stage; accepted are " + accepted);
    }
    return selected;
}

/// @param counted FLOPs that the rate is of; @param calculated FLOPs that take the time
template <class AnyVariant>
void print(const Gpu& gpu, const Device& device, const AnyVariant& variant, const Problem& problem, double counted, double calculated) {
    std::cout << "  " << std::left << std::setw(28) << variant.id + " " + variant.name << std::right;
    if (const auto reason = why_refused(variant, problem, device)) {
        std::cout << "  refused: " << *reason << "\n";
        return;
    }
    const Prediction prediction = predict(gpu, variant.unit(problem.dtype), calculated, variant.movement(problem, device));
    std::cout << std::setw(11) << significant(1e3 * prediction.seconds()) << " ms" << std::setw(10)
              << significant(1e-12 * counted / prediction.seconds()) << " TFLOPS   bound by " << prediction.bound() << "\n";
}

void print(const Gpu& gpu, const std::vector<const Stage*>& selected, const std::vector<Problem>& problems) {
    const Device device = Device::current(&gpu);
    std::cout << "Predicted for " << gpu.name
              << " (roofline model; nothing here is measured): the least time that the FLOPs at peak rate,\n"
              << "the bytes through HBM or the bytes through L1 take. Real kernels are slower. Backward passes stand last; their TFLOPS\n"
              << "are 2.5 times the forward's FLOPs a second, whatever they calculate.\n";
    for (const Problem& problem : problems) {
        std::cout << "\n" << describe(problem) << "\n";
        for (const Stage* stage : selected)
            for (const Variant& variant : stage->variants)
                print(gpu, device, variant, problem, forward_flops(problem), forward_flops(problem));
        for (const Stage* stage : selected)
            for (const BackwardVariant& variant : stage->backward)
                print(gpu, device, variant, problem, backward_flops(problem), product_flops(problem, variant.products));
    }
}

int run(int argc, char** argv) {
    const Options options = parse_options(Program::predict, "bench_predict", {argv + 1, argv + argc});
    if (options.help) {
        std::cout << *options.help;
        return 0;
    }
    print(options.on ? *options.on : find_gpu("h200"), select(options.stages), cases_of(options.request));
    return 0;
}

}  // namespace
}  // namespace workbook::bench

int main(int argc, char** argv) {
    try {
        return workbook::bench::run(argc, argv);
    } catch (const workbook::InvalidArgument& error) {
        std::cerr << "bench_predict: " << error.what() << "\n";
        return 2;
    }
}
