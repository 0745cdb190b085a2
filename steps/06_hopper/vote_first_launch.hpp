/// @file
/// How 06c is launched: for the stage, and for whoever watches it.
#pragma once

#include "06_hopper/divided_tiles.hpp"
#include "06_hopper/vote_first.cuh"

#include <algorithm>

namespace step06 {

/// Calls f with 06c's shape for a problem. As many warpgroups as O (64 D), S (64 Bc) and P (half of that) leave registers for.
/// Clusters pay where a block has few rows for the K and V that it reads, which is d = 256, and where blocks at work are in different
/// places of K and V, which is with a mask. From which length on a shape is the faster one was measured.
template <class F>
decltype(auto) with_vote_first_shape(const Problem& p, F&& f) {
    switch (p.head_dim) {
        case 64:
            if (p.kv_seq >= (p.causal ? 8192 : 4096)) return f.template operator()<VoteFirstShape<64, 128, 3, 1>>();
            return f.template operator()<VoteFirstShape<64, 64, 4, 1>>();
        case 128: return f.template operator()<VoteFirstShape<128, 80, 3, 1>>();
        default:
            if (p.causal && std::min(p.seq, p.kv_seq) >= 2048) return f.template operator()<VoteFirstShape<256, 64, 2, 2>>();
            return f.template operator()<VoteFirstShape<256, 64, 2, 1>>();
    }
}

/// The order in which blocks of a shape, or its clusters, take the tiles of a problem.
template <class S>
TileOrder vote_first_order(const Problem& p, const Device& device) {
    return tile_order(p, device, S::kCluster * S::Br, size_of(p.dtype), S::kDivides);
}

template <class W>
void launch_vote_first(Forward& args, const W& watch) {
    const std::string variant = "06c vote_first";
    const Problem& p = args.problem;
    with_tensors(variant, args, [&]<class T>() {
        with_vote_first_shape(p, [&]<class S>() {
            const TileOrder order = vote_first_order<S>(p, args.device);
            const Parts parts = step06::parts(args, order, S::Br);
            const auto of_queries = [&]<class E>(const char* name, const TensorRef& t) {
                return map_of<E>(variant, name, t, p, p.heads, p.seq, 64);
            };
            const auto of_keys = [&](const char* name, const TensorRef& t) {
                return map_of<const T>(variant, name, t, p, p.kv_heads, p.kv_seq, S::Bc, S::kCluster);
            };
            launch(vote_first<T, S, W>,
                   {.name = "vote_first",
                    .grid = grid_of(order, args.device, S::kCluster),
                    .block = S::kThreads,
                    .smem = sizeof(VoteFirstShared<T, S>),
                    .cluster = S::kCluster,
                    .exec = &args.exec},
                   of_queries.template operator()<const T>("Q", args.q), of_keys("K", args.k), of_keys("V", args.v),
                   of_queries.template operator()<T>("O", args.o), args.LSE(), claims(args), parts.O, parts.LSE, order, p.kv_seq,
                   p.heads / p.kv_heads, p.scale() * 1.4426950408889634f, Mask(p), watch);
            merge<T, S::D>(args, order, S::Br);
        });
    });
}

}  // namespace step06
