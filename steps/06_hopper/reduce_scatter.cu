// The host side of 06g.
#include "06_hopper/reduce_scatter_launch.hpp"

namespace step06 {
namespace {

std::optional<std::string> refuses(const Problem& problem, const Device& device) {
    if (problem.dtype == DType::f32) return "dtype = f32: tensor cores multiply f16 and bf16; variants 05a and 05b take f32";
    if (problem.head_dim != ReduceScatterShape<1>::D)
        return "head_dim = " + std::to_string(problem.head_dim) +
               ": 128 is accepted; variant 06e takes 64 and 256, variant 05a any up to 256";
    if (problem.kv_seq > kMostKeys)
        return "kv_seq = " + std::to_string(problem.kv_seq) + ": 1 to " + std::to_string(kMostKeys) +
               " are accepted, for a cluster has all keys of a head; variants 06e and 06f take any";
    if (problem.causal)
        return "causal = true: the blocks of a cluster go the same way, of which a causal mask lets the later ones skip a part; variant "
               "06e "
               "takes it";
    return refuses_device(device, sizeof(ReduceScatterShared<__half, ReduceScatterShape<2>>), "variants of stage 05",
                          "variant 05a needs little");
}

void run_reduce_scatter(Backward& args) {
    const std::string variant = "06g reduce_scatter";
    require_16_byte_rows(variant, args, "variants 05a and 05b take any");
    with_16_bit_type(args.problem.dtype, [&]<class T>() { launch_reduce_scatter<T>(variant, args, simt::Unwatched{}); });
}

Movement moves(const Problem& p, const Device&) {
    return with_reduce_scatter_shape(p, [&]<class S>() { return reduce_scatter_movement(p, {S::Br, S::Bc}, S::kCluster); });
}

std::size_t workspace(const Problem& p, const Device&) { return statistics_bytes<ReduceScatterShape<1>>(p); }

}  // namespace

BackwardVariant reduce_scatter_variant(void (*forward)(Forward&)) {
    return {.id = "06g",
            .name = "reduce_scatter",
            .refuses = refuses,
            .forward = forward,
            .any_forward = true,
            .backward = run_reduce_scatter,
            .products = 5,
            .movement = moves,
            .saved_bytes = saved_for_backward,
            .workspace_bytes = workspace,
            .unit = tensor_16bit};
}

}  // namespace step06
