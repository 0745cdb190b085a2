#include "01_naive/stage.hpp"

#include "01_naive/naive.cuh"

namespace step01 {
namespace {

using namespace workbook;

std::optional<std::string> refuses(const Problem&, const Device&) { return std::nullopt; }  // check() has refused d > 256

template <class T, int kPerLane>
void forward(Forward& args) {
    const Problem& p = args.problem;
    const std::size_t n2 = static_cast<std::size_t>(p.rows()) * p.kv_seq;
    const std::array<int, 4> shape = {p.batch, p.heads, p.seq, p.kv_seq};
    T* const s_memory = args.workspace.get<T>("S", n2);
    T* const p_memory = args.workspace.get<T>("P", n2);
    const Mask mask(p);

    const dim3 grid((p.seq + kWarps - 1) / kWarps, p.heads, p.batch);
    launch(scores<T, kPerLane>, {.name = "scores", .grid = grid, .block = kThreads, .exec = &args.exec},  //
           args.Q<T>(), args.K<T>(), simt::packed_view<T, 4>("S", s_memory, shape), p.scale(), mask);
    launch(softmax<T>, {.name = "softmax", .grid = grid, .block = kThreads, .exec = &args.exec},  //
           simt::packed_view<const T, 4>("S", s_memory, shape), simt::packed_view<T, 4>("P", p_memory, shape), args.LSE());
    launch(weighted_sum<T, kPerLane>, {.name = "weighted_sum", .grid = grid, .block = kThreads, .exec = &args.exec},  //
           simt::packed_view<const T, 4>("P", p_memory, shape), args.V<T>(), args.O<T>());
}

void forward(Forward& args) {
    with_type(args.problem.dtype, [&]<class T>() {
        const int d = args.problem.head_dim;
        if (d <= 32) return forward<T, 1>(args);
        if (d <= 64) return forward<T, 2>(args);
        if (d <= 128) return forward<T, 4>(args);
        return forward<T, 8>(args);
    });
}

Movement movement(const Problem& problem, const Device&) { return naive_movement(problem); }

std::size_t workspace_bytes(const Problem& problem, const Device&) {
    return 2 * size_of(problem.dtype) * static_cast<std::size_t>(problem.rows()) * problem.kv_seq;
}

Unit unit(DType) { return Unit::fp32; }

}  // namespace

const Stage& stage() {
    static const Stage the_stage = {
        .id = "01",
        .title = "Naive: three kernels, S and P in global memory",
        .variants = {{"01", "naive", refuses, forward, movement, workspace_bytes, unit}},
    };
    return the_stage;
}

}  // namespace step01
