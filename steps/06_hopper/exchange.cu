// The host side of 06f.
#include "06_hopper/exchange_launch.hpp"

namespace step06 {
namespace {

using S = ExchangeShape;

std::optional<std::string> refuses(const Problem& problem, const Device& device) {
    return refuses_exchange(problem, device, sizeof(ExchangeShared<__half, S>));
}

void run_exchange(Backward& args) {
    const std::string variant = "06f exchange";
    require_16_byte_rows(variant, args, "variants 05a and 05b take any");
    with_16_bit_type(args.problem.dtype, [&]<class T>() { launch_exchange<T>(variant, args, simt::Unwatched{}); });
}

Movement moves(const Problem& p, const Device&) { return exchange_movement(p, {S::Br, S::Bc}); }

std::size_t workspace(const Problem& p, const Device&) { return backward_workspace<S>(p, false); }

}  // namespace

BackwardVariant exchange_variant(void (*forward)(Forward&)) {
    return {.id = "06f",
            .name = "exchange",
            .refuses = refuses,
            .forward = forward,
            .any_forward = true,
            .backward = run_exchange,
            .products = 5,
            .movement = moves,
            .saved_bytes = saved_for_backward,
            .workspace_bytes = workspace,
            .unit = tensor_16bit};
}

}  // namespace step06
