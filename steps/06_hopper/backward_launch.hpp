/// @file
/// How 06e is launched, for the stage and for whoever watches it, and what 06f is launched with as well.
#pragma once

#include "06_hopper/around_backward.cuh"
#include "06_hopper/backward.cuh"
#include "06_hopper/host.hpp"

#include <algorithm>
#include <array>

namespace step06 {

/// Blocks of queries of a head.
template <class S>
int query_blocks(const Problem& p) {
    return (p.seq + S::Br - 1) / S::Br;
}

/// One for each warp that adds to a block of queries.
template <class S>
std::size_t counters_of(const Problem& p) {
    return static_cast<std::size_t>(p.batch) * p.heads * query_blocks<S>(p) * 4;
}

/// Launches what is before and after a backward kernel, and calls `kernel` with the map of LSE_D, with dQ_acc and dQ_turn in between.
template <class T, class S, bool kOrdered, class F>
void launch_around(Backward& args, F&& kernel) {
    const Problem& p = args.problem;
    const int blocks = query_blocks<S>(p);
    const std::array<int, 4> statistics = {p.batch, p.heads, blocks, 2 * S::Br}, sums = {p.batch, p.heads, blocks, S::Br * S::D};
    const std::size_t all_rows = static_cast<std::size_t>(p.batch) * p.heads * blocks * S::Br;
    float* const lse_d = args.workspace.get<float>("LSE_D", 2 * all_rows);
    float* const dq = args.workspace.get<float>("dQ_acc", all_rows * S::D);
    const std::array<int, 4> counters = {p.batch, p.heads, blocks, 4};
    const auto dQ_turn = simt::packed_view<std::uint32_t, 4>(
        "dQ_turn", args.workspace.get<std::uint32_t>("dQ_turn", kOrdered ? counters_of<S>(p) : 0), counters);
    const auto by_rows = [&](const char* name, int rows, int rows_of_block) -> simt::LaunchConfig {
        return {.name = name,
                .grid = dim3((rows + rows_of_block - 1) / rows_of_block, p.heads, p.batch),
                .block = kRowThreads,
                .exec = &args.exec};
    };
    launch(prepare<T, S, kOrdered>, by_rows("prepare", blocks * S::Br, kRowsOfBlock<S::D>),  //
           args.O<T>(), args.dO<T>(), args.LSE(), simt::packed_view<float, 4>("LSE_D", lse_d, statistics),
           simt::packed_view<float, 4>("dQ_acc", dq, sums), dQ_turn);
    kernel(ptx::make_tensor_map<const float, 2>("LSE_D", lse_d, {2 * S::Br, static_cast<long long>(p.batch) * p.heads * blocks},
                                                {2 * S::Br}, {2 * S::Br, 1}, ptx::Swizzle::none),
           simt::packed_view<float, 4>("dQ_acc", dq, sums), dQ_turn);
    launch(finish<T, S>, by_rows("finish", p.seq, 2 * kRowsOfBlock<S::D>),  //
           simt::packed_view<const float, 4>("dQ_acc", dq, sums), args.dQ<T>(), p.scale());
}

/// Calls f with the shape for a head dimension.
template <class F>
decltype(auto) with_backward_shape(int d, F&& f) {
    switch (d) {
        case 64: return f.template operator()<BackwardShape<64>>();
        case 128: return f.template operator()<BackwardShape<128>>();
        default: return f.template operator()<BackwardShape<256>>();
    }
}

template <class T, class S, bool kOrdered, class Watch>
void launch_backward(const std::string& variant, Backward& args, const Watch& watch) {
    const Problem& p = args.problem;
    const auto of_queries = [&]<class E>(const char* name, const TensorRef& t) {
        return map_of<E>(variant, name, t, p, p.heads, p.seq, S::Br);
    };
    const auto of_keys = [&]<class E>(const char* name, const TensorRef& t) {
        return map_of<E>(variant, name, t, p, p.kv_heads, p.kv_seq, 64);
    };
    const int heads = p.batch * p.kv_heads;
    const int side = p.causal ? std::min(4, heads) : 1;  // heads side by side, so that the longest blocks come first
    launch_around<T, S, kOrdered>(args, [&](const ptx::TensorMap& LSE_D, const auto& dQ_acc, const auto& dQ_turn) {
        launch(backward<T, S, kOrdered, Watch>,
               {.name = "backward",
                .grid = dim3(side, (p.kv_seq + S::Bc - 1) / S::Bc, (heads + side - 1) / side),
                .block = S::kThreads,
                .smem = sizeof(BackwardShared<T, S>),
                .exec = &args.exec},
               of_queries.template operator()<const T>("Q", args.q), of_keys.template operator()<const T>("K", args.k),
               of_keys.template operator()<const T>("V", args.v), of_queries.template operator()<const T>("dO", args.d_o),
               of_keys.template operator()<T>("dK", args.dk), of_keys.template operator()<T>("dV", args.dv), LSE_D, dQ_acc, dQ_turn, p.seq,
               p.kv_seq, p.kv_heads, p.scale(), Mask(p), watch);
    });
}

/// LSE.
inline std::size_t saved_for_backward(const Problem& p, const Device&) { return static_cast<std::size_t>(p.rows()) * sizeof(float); }

/// dQ_acc; LSE and D; dQ_turn.
template <class S>
std::size_t backward_workspace(const Problem& p, bool ordered) {
    return (static_cast<std::size_t>(p.batch) * p.heads * query_blocks<S>(p) * S::Br * (S::D + 2) + ordered * counters_of<S>(p)) * 4;
}

}  // namespace step06
