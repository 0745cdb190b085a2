// The host side of 06f.
#include "06_hopper/exchange_launch.hpp"

namespace step06 {
namespace {

using S = ExchangeShape;

std::optional<std::string> refuses(const Problem& problem, const Device& device) {
    if (problem.dtype == DType::f32) return "dtype = f32: tensor cores multiply f16 and bf16; variants 05a and 05b take f32";
    if (problem.head_dim != S::D)
        return "head_dim = " + std::to_string(problem.head_dim) +
               ": 128 is accepted; variant 06e takes 64 and 256, variant 05a any up to 256";
    if (problem.causal)
        return "causal = true: the blocks of a cluster go the same way, of which a causal mask lets the later one skip a part; variant 06e "
               "takes it";
    return refuses_device(device, sizeof(ExchangeShared<__half, S>), "variants of stage 05", "variant 05a needs little");
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
