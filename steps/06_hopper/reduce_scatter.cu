// The host side of 06g.
#include "06_hopper/reduce_scatter_launch.hpp"

namespace step06 {
namespace {

std::optional<std::string> refuses(const Problem& problem, const Device& device) {
    using Largest = ReduceScatterShape<2>;
    return refuses_exchange(problem, device, sizeof(ReduceScatterShared<__half, Largest>), Largest::kKeys);
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
