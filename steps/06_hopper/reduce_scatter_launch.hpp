/// @file
/// How 06g is launched: for the stage, and for whoever watches it.
#pragma once

#include "06_hopper/exchange_launch.hpp"
#include "06_hopper/reduce_scatter.cuh"

namespace step06 {

/// Calls f with the shape whose cluster has all keys.
template <class F>
decltype(auto) with_reduce_scatter_shape(const Problem& p, F&& f) {
    if (p.kv_seq <= ReduceScatterShape<1>::kKeys) return f.template operator()<ReduceScatterShape<1>>();
    return f.template operator()<ReduceScatterShape<2>>();
}

template <class T, class Watch>
void launch_reduce_scatter(const std::string& variant, Backward& args, const Watch& watch) {
    const Problem& p = args.problem;
    with_reduce_scatter_shape(p, [&]<class S>() {
        const BackwardMaps<T, S> maps(variant, args);
        const auto kernel = p.kv_seq % S::kKeys == 0 ? reduce_scatter<T, S, false, Watch> : reduce_scatter<T, S, true, Watch>;
        simt::LaunchConfig config{.name = "reduce_scatter",
                                  .block = S::kThreads,
                                  .smem = sizeof(ReduceScatterShared<T, S>),
                                  .cluster = S::kCluster,
                                  .exec = &args.exec};
        const int clusters = std::min(p.batch * p.kv_heads, simt::resident_clusters(kernel, config, args.device.sms));
        config.grid = clusters * S::kCluster;
        const ptx::TensorMap LSE_D = launch_prepare<T, S, false, false>(args, Sums<S>(p, nullptr, nullptr));
        launch(kernel, config, maps.Q, maps.K, panel_map<T, S>(variant, args), maps.V, maps.dO, maps.dK, maps.dV, LSE_D, args.dQ<T>(),
               p.kv_seq, p.kv_heads, p.scale(), p.scale() * 1.4426950408889634f, watch);
    });
}

}  // namespace step06
