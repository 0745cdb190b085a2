/// @file
/// How 06f is launched, for the stage and for whoever watches it, and what it shares with 06g.
#pragma once

#include "06_hopper/backward_launch.hpp"
#include "06_hopper/exchange.cuh"

namespace step06 {

/// Why a variant whose blocks exchange dS cannot do a problem. @param bytes of shared memory that the tiles take
/// @param most_keys of a head, where there is a limit
inline std::optional<std::string> refuses_exchange(const Problem& problem, const Device& device, std::size_t bytes,
                                                   std::optional<int> most_keys = std::nullopt) {
    if (problem.dtype == DType::f32) return "dtype = f32: tensor cores multiply f16 and bf16; variants 05a and 05b take f32";
    if (problem.head_dim != ExchangeShape::D)
        return "head_dim = " + std::to_string(problem.head_dim) +
               ": 128 is accepted; variant 06e takes 64 and 256, variant 05a any up to 256";
    if (most_keys && problem.kv_seq > *most_keys)
        return "kv_seq = " + std::to_string(problem.kv_seq) + ": 1 to " + std::to_string(*most_keys) +
               " are accepted, for a cluster has all keys of a head; variants 06e and 06f take any";
    if (problem.causal)
        return "causal = true: the blocks of a cluster go the same way, of which a causal mask lets the later ones skip a part; "
               "variant 06e takes it";
    return refuses_device(device, bytes, "variants of stage 05", "variant 05a needs little");
}

/// The map of K by boxes of one panel, for the columns of dQ that a block makes.
template <class T, class S>
ptx::TensorMap panel_map(const std::string& variant, const Backward& args) {
    const Problem& p = args.problem;
    return map_of<const T>(variant, "K", args.k, p, p.kv_heads, p.kv_seq, 64, S::D / 64);
}

template <class T, class Watch>
void launch_exchange(const std::string& variant, Backward& args, const Watch& watch) {
    using S = ExchangeShape;
    const Problem& p = args.problem;
    const BackwardMaps<T, S> maps(variant, args);
    constexpr int kKeys = S::kCluster * S::Bc;
    launch_around<T, S, false>(args, [&](const ptx::TensorMap& LSE_D, const Sums<S>& sums) {
        launch(exchange<T, S, Watch>,
               {.name = "exchange",
                .grid = dim3((p.kv_seq + kKeys - 1) / kKeys * S::kCluster, p.kv_heads, p.batch),
                .block = S::kThreads,
                .smem = sizeof(ExchangeShared<T, S>),
                .cluster = S::kCluster,
                .exec = &args.exec},
               maps.Q, maps.K, panel_map<T, S>(variant, args), maps.V, maps.dO, maps.dK, maps.dV, LSE_D, sums.dQ_acc, p.kv_seq,
               p.heads / p.kv_heads, p.scale(), watch);
    });
}

}  // namespace step06
