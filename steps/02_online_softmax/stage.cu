#include "02_online_softmax/stage.hpp"

#include "02_online_softmax/online_softmax.cuh"

namespace step02 {
namespace {

using namespace workbook;

std::optional<std::string> refuses(const Problem&, const Device&) { return std::nullopt; }  // check() has refused d > 256

template <class T, int kLanes>
void forward(Forward& args) {
    constexpr int kRows = kThreads / kLanes;
    const Problem& p = args.problem;
    const dim3 grid((p.seq + kRows - 1) / kRows, p.heads, p.batch);
    const bool whole = p.head_dim == kLanes * kPerLane;
    launch(whole ? online_softmax<T, kLanes, true> : online_softmax<T, kLanes, false>,
           {.name = "online_softmax", .grid = grid, .block = kThreads, .exec = &args.exec},  //
           args.Q<T>(), args.K<T>(), args.V<T>(), args.O<T>(), args.LSE(), p.scale(), Mask(p));
}

void forward(Forward& args) {
    with_type(args.problem.dtype, [&]<class T>() {
        const int d = args.problem.head_dim;
        if (d <= 2 * kPerLane) return forward<T, 2>(args);
        if (d <= 4 * kPerLane) return forward<T, 4>(args);
        if (d <= 8 * kPerLane) return forward<T, 8>(args);
        return forward<T, 16>(args);
    });
}

Movement movement(const Problem& problem, const Device&) { return online_softmax_movement(problem); }

std::size_t workspace_bytes(const Problem&, const Device&) { return 0; }

Unit unit(DType) { return Unit::fp32; }

}  // namespace

const Stage& stage() {
    static const Stage the_stage = {
        .id = "02",
        .title = "Online softmax: one kernel, no S and no P",
        .variants = {{"02", "online_softmax", refuses, forward, movement, workspace_bytes, unit}},
    };
    return the_stage;
}

}  // namespace step02
