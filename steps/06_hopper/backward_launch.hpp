/// @file
/// How 06e is launched, for the stage and for whoever watches it, and what 06f and 06g are launched with as well.
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

/// LSE and D.
template <class S>
std::size_t statistics_bytes(const Problem& p) {
    return static_cast<std::size_t>(p.batch) * p.heads * query_blocks<S>(p) * 2 * S::Br * sizeof(float);
}

inline simt::LaunchConfig by_rows(const Backward& args, const char* name, int rows, int rows_of_block) {
    return {.name = name,
            .grid = dim3((rows + rows_of_block - 1) / rows_of_block, args.problem.heads, args.problem.batch),
            .block = kRowThreads,
            .exec = &args.exec};
}

/// Sums of dQ, and who has added to them.
template <class S>
struct Sums {
    simt::TensorView<float, 4> dQ_acc;           ///< (B, Hq, ceil(Nq / Br), Br D)
    simt::TensorView<std::uint32_t, 4> dQ_turn;  ///< (B, Hq, ceil(Nq / Br), 4)

    Sums(const Problem& p, float* acc, std::uint32_t* turn)
        : dQ_acc(simt::packed_view<float, 4>("dQ_acc", acc, {p.batch, p.heads, query_blocks<S>(p), S::Br * S::D})),
          dQ_turn(simt::packed_view<std::uint32_t, 4>("dQ_turn", turn, {p.batch, p.heads, query_blocks<S>(p), 4})) {}
};

/// Launches what is before a backward kernel. @return the map of LSE_D
/// @tparam kSums dQ is summed there, else `sums` is not used
template <class T, class S, bool kOrdered, bool kSums>
ptx::TensorMap launch_prepare(Backward& args, const Sums<S>& sums) {
    const Problem& p = args.problem;
    const int blocks = query_blocks<S>(p);
    float* const lse_d = args.workspace.get<float>("LSE_D", statistics_bytes<S>(p) / sizeof(float));
    launch(prepare<T, S, kOrdered, kSums>, by_rows(args, "prepare", blocks * S::Br, kRowsOfBlock<S::D>), args.O<T>(), args.dO<T>(),
           args.LSE(), simt::packed_view<float, 4>("LSE_D", lse_d, {p.batch, p.heads, blocks, 2 * S::Br}), sums.dQ_acc, sums.dQ_turn);
    return ptx::make_tensor_map<const float, 2>("LSE_D", lse_d, {2 * S::Br, static_cast<long long>(p.batch) * p.heads * blocks},
                                                {2 * S::Br}, {2 * S::Br, 1}, ptx::Swizzle::none);
}

/// Launches what is before and after a backward kernel, and calls `kernel` with the map of LSE_D and with the sums in between.
template <class T, class S, bool kOrdered, class F>
void launch_around(Backward& args, F&& kernel) {
    const Problem& p = args.problem;
    float* const acc = args.workspace.get<float>("dQ_acc", static_cast<std::size_t>(p.batch) * p.heads * query_blocks<S>(p) * S::Br * S::D);
    const Sums<S> sums(p, acc, args.workspace.get<std::uint32_t>("dQ_turn", kOrdered ? counters_of<S>(p) : 0));
    kernel(launch_prepare<T, S, kOrdered, true>(args, sums), sums);
    launch(finish<T, S>, by_rows(args, "finish", p.seq, 2 * kRowsOfBlock<S::D>),
           simt::packed_view<const float, 4>("dQ_acc", acc, {p.batch, p.heads, query_blocks<S>(p), S::Br * S::D}), args.dQ<T>(), p.scale());
}

/// Maps of what a backward kernel reads and writes in tiles, of Br queries and of 64 keys.
template <class T, class S>
struct BackwardMaps {
    ptx::TensorMap Q, K, V, dO, dK, dV;

    BackwardMaps(const std::string& variant, const Backward& args)
        : Q(of_queries(variant, "Q", args.q, args.problem)),
          K(of_keys<const T>(variant, "K", args.k, args.problem)),
          V(of_keys<const T>(variant, "V", args.v, args.problem)),
          dO(of_queries(variant, "dO", args.d_o, args.problem)),
          dK(of_keys<T>(variant, "dK", args.dk, args.problem)),
          dV(of_keys<T>(variant, "dV", args.dv, args.problem)) {}

private:
    static ptx::TensorMap of_queries(const std::string& variant, const char* name, const TensorRef& t, const Problem& p) {
        return map_of<const T>(variant, name, t, p, p.heads, p.seq, S::Br);
    }
    template <class E>
    static ptx::TensorMap of_keys(const std::string& variant, const char* name, const TensorRef& t, const Problem& p) {
        return map_of<E>(variant, name, t, p, p.kv_heads, p.kv_seq, 64);
    }
};

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
    const BackwardMaps<T, S> maps(variant, args);
    const int heads = p.batch * p.kv_heads;
    const int side = p.causal ? std::min(4, heads) : 1;  // heads side by side, so that the longest blocks come first
    launch_around<T, S, kOrdered>(args, [&](const ptx::TensorMap& LSE_D, const Sums<S>& sums) {
        launch(backward<T, S, kOrdered, Watch>,
               {.name = "backward",
                .grid = dim3(side, (p.kv_seq + S::Bc - 1) / S::Bc, (heads + side - 1) / side),
                .block = S::kThreads,
                .smem = sizeof(BackwardShared<T, S>),
                .exec = &args.exec},
               maps.Q, maps.K, maps.V, maps.dO, maps.dK, maps.dV, LSE_D, sums.dQ_acc, sums.dQ_turn, p.seq, p.kv_seq, p.kv_heads, p.scale(),
               Mask(p), watch);
    });
}

/// LSE.
inline std::size_t saved_for_backward(const Problem& p, const Device&) { return static_cast<std::size_t>(p.rows()) * sizeof(float); }

/// dQ_acc; LSE and D; dQ_turn.
template <class S>
std::size_t backward_workspace(const Problem& p, bool ordered) {
    const std::size_t rows = static_cast<std::size_t>(p.batch) * p.heads * query_blocks<S>(p) * S::Br;
    return statistics_bytes<S>(p) + (rows * S::D + ordered * counters_of<S>(p)) * 4;
}

}  // namespace step06
