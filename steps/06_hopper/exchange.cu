// The host side of 06f.
#include "06_hopper/exchange.cuh"

#include "06_hopper/backward_launch.hpp"

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

template <class T>
void launch_exchange(const std::string& variant, Backward& args) {
    const Problem& p = args.problem;
    const auto of_queries = [&](const char* name, const TensorRef& t) {
        return map_of<const T>(variant, name, t, p, p.heads, p.seq, S::Br);
    };
    const auto of_keys = [&]<class E>(const char* name, const TensorRef& t, int shares = 1) {
        return map_of<E>(variant, name, t, p, p.kv_heads, p.kv_seq, 64, shares);
    };
    constexpr int kKeys = S::kCluster * S::Bc;
    launch_around<T, S, false>(args, [&](const ptx::TensorMap& LSE_D, const TensorView<float, 4>& dQ_acc, const auto&) {
        launch(exchange<T, S>,
               {.name = "exchange",
                .grid = dim3((p.kv_seq + kKeys - 1) / kKeys * S::kCluster, p.kv_heads, p.batch),
                .block = S::kThreads,
                .smem = sizeof(ExchangeShared<T, S>),
                .cluster = S::kCluster,
                .exec = &args.exec},
               of_queries("Q", args.q), of_keys.template operator()<const T>("K", args.k),
               of_keys.template operator()<const T>("K", args.k, S::D / 64), of_keys.template operator()<const T>("V", args.v),
               of_queries("dO", args.d_o), of_keys.template operator()<T>("dK", args.dk), of_keys.template operator()<T>("dV", args.dv),
               LSE_D, dQ_acc, p.kv_seq, p.heads / p.kv_heads, p.scale());
    });
}

void run_exchange(Backward& args) {
    const std::string variant = "06f exchange";
    require_16_byte_rows(variant, args, "variants 05a and 05b take any");
    with_16_bit_type(args.problem.dtype, [&]<class T>() { launch_exchange<T>(variant, args); });
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
