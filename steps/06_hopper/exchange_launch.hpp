/// @file
/// How 06f is launched: for the stage, and for whoever watches it.
#pragma once

#include "06_hopper/backward_launch.hpp"
#include "06_hopper/exchange.cuh"

namespace step06 {

template <class T, class Watch>
void launch_exchange(const std::string& variant, Backward& args, const Watch& watch) {
    using S = ExchangeShape;
    const Problem& p = args.problem;
    const auto of_queries = [&](const char* name, const TensorRef& t) {
        return map_of<const T>(variant, name, t, p, p.heads, p.seq, S::Br);
    };
    const auto of_keys = [&]<class E>(const char* name, const TensorRef& t, int shares = 1) {
        return map_of<E>(variant, name, t, p, p.kv_heads, p.kv_seq, 64, shares);
    };
    constexpr int kKeys = S::kCluster * S::Bc;
    launch_around<T, S, false>(args, [&](const ptx::TensorMap& LSE_D, const Sums<S>& sums) {
        launch(exchange<T, S, Watch>,
               {.name = "exchange",
                .grid = dim3((p.kv_seq + kKeys - 1) / kKeys * S::kCluster, p.kv_heads, p.batch),
                .block = S::kThreads,
                .smem = sizeof(ExchangeShared<T, S>),
                .cluster = S::kCluster,
                .exec = &args.exec},
               of_queries("Q", args.q), of_keys.template operator()<const T>("K", args.k),
               of_keys.template operator()<const T>("K", args.k, S::D / 64), of_keys.template operator()<const T>("V", args.v),
               of_queries("dO", args.d_o), of_keys.template operator()<T>("dK", args.dk), of_keys.template operator()<T>("dV", args.dv),
               LSE_D, sums.dQ_acc, p.kv_seq, p.heads / p.kv_heads, p.scale(), watch);
    });
}

}  // namespace step06
