// The host side of the backward variants.
#include "06_hopper/backward.cuh"

#include "06_hopper/around_backward.cuh"
#include "06_hopper/host.hpp"

#include <algorithm>

namespace step06 {
namespace {

/// Calls f with the shape for a head dimension.
template <class F>
decltype(auto) with_backward_shape(int d, F&& f) {
    switch (d) {
        case 64: return f.template operator()<BackwardShape<64>>();
        case 128: return f.template operator()<BackwardShape<128>>();
        default: return f.template operator()<BackwardShape<256>>();
    }
}

std::optional<std::string> refuses(const Problem& problem, const Device& device) {
    if (problem.dtype == DType::f32) return "dtype = f32: tensor cores multiply f16 and bf16; variants 05a and 05b take f32";
    const int d = problem.head_dim;
    if (d != 64 && d != 128 && d != 256)
        return "head_dim = " + std::to_string(d) + ": 64, 128 and 256 are accepted; variant 05a takes any up to 256";
    return refuses_device(device, with_backward_shape(d, [&]<class S>() { return sizeof(BackwardShared<__half, S>); }),
                          "variants of stage 05", "variant 05a needs little");
}

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

template <class T, class S, bool kOrdered>
void launch_backward(const std::string& variant, Backward& args) {
    const Problem& p = args.problem;
    const int blocks = query_blocks<S>(p);
    const std::array<int, 4> statistics = {p.batch, p.heads, blocks, 2 * S::Br}, sums = {p.batch, p.heads, blocks, S::Br * S::D};
    const std::size_t all_rows = static_cast<std::size_t>(p.batch) * p.heads * blocks * S::Br;
    float* const lse_d = args.workspace.get<float>("LSE_D", 2 * all_rows);
    float* const dq = args.workspace.get<float>("dQ_acc", all_rows * S::D);
    const std::array<int, 4> counters = {p.batch, p.heads, blocks, 4};
    const auto dQ_turn = simt::packed_view<std::uint32_t, 4>(
        "dQ_turn", args.workspace.get<std::uint32_t>("dQ_turn", kOrdered ? counters_of<S>(p) : 0), counters);
    const auto by_rows = [&](const char* name, int rows, int rows_of_block) -> simt::LaunchConfig {
        return {.name = name,
                .grid = dim3((rows + rows_of_block - 1) / rows_of_block, p.heads, p.batch),
                .block = kRowThreads,
                .exec = &args.exec};
    };
    launch(prepare<T, S, kOrdered>, by_rows("prepare", blocks * S::Br, kRowsOfBlock<S::D>),  //
           args.O<T>(), args.dO<T>(), args.LSE(), simt::packed_view<float, 4>("LSE_D", lse_d, statistics),
           simt::packed_view<float, 4>("dQ_acc", dq, sums), dQ_turn);

    const auto of_queries = [&]<class E>(const char* name, const TensorRef& t) {
        return map_of<E>(variant, name, t, p, p.heads, p.seq, S::Br);
    };
    const auto of_keys = [&]<class E>(const char* name, const TensorRef& t) {
        return map_of<E>(variant, name, t, p, p.kv_heads, p.kv_seq, 64);
    };
    const int heads = p.batch * p.kv_heads;
    const int side = p.causal ? std::min(4, heads) : 1;  // heads side by side, so that the longest blocks come first
    launch(backward<T, S, kOrdered>,
           {.name = "backward",
            .grid = dim3(side, (p.kv_seq + S::Bc - 1) / S::Bc, (heads + side - 1) / side),
            .block = S::kThreads,
            .smem = sizeof(BackwardShared<T, S>),
            .exec = &args.exec},
           of_queries.template operator()<const T>("Q", args.q), of_keys.template operator()<const T>("K", args.k),
           of_keys.template operator()<const T>("V", args.v), of_queries.template operator()<const T>("dO", args.d_o),
           of_keys.template operator()<T>("dK", args.dk), of_keys.template operator()<T>("dV", args.dv),
           ptx::make_tensor_map<const float, 2>("LSE_D", lse_d, {2 * S::Br, static_cast<long long>(p.batch) * p.heads * blocks},
                                                {2 * S::Br}, {2 * S::Br, 1}, ptx::Swizzle::none),
           simt::packed_view<float, 4>("dQ_acc", dq, sums), dQ_turn, p.seq, p.kv_seq, p.kv_heads, p.scale(), Mask(p));

    launch(finish<T, S>, by_rows("finish", p.seq, 2 * kRowsOfBlock<S::D>),  //
           simt::packed_view<const float, 4>("dQ_acc", dq, sums), args.dQ<T>(), p.scale());
}

template <bool kOrdered>
void run_backward(Backward& args) {
    const std::string variant = kOrdered ? "06e-det deterministic" : "06e backward";
    const std::pair<const char*, const TensorRef&> tensors[] = {{"Q", args.q},    {"K", args.k},   {"V", args.v},   {"O", args.o},
                                                                {"dO", args.d_o}, {"dQ", args.dq}, {"dK", args.dk}, {"dV", args.dv}};
    for (const auto& [name, t] : tensors) require_16_byte_rows(variant, name, t, "variants 05a and 05b take any");
    with_backward_shape(args.problem.head_dim, [&]<class S>() {
        if (args.problem.dtype == DType::f16)
            launch_backward<__half, S, kOrdered>(variant, args);
        else
            launch_backward<__nv_bfloat16, S, kOrdered>(variant, args);
    });
}

template <bool kOrdered>
Movement moves(const Problem& p, const Device&) {
    return bulk_backward_movement(p, with_backward_shape(p.head_dim, [&]<class S>() { return Tiles{S::Br, S::Bc}; }), kOrdered);
}

std::size_t saved(const Problem& p, const Device&) { return static_cast<std::size_t>(p.rows()) * sizeof(float); }

template <bool kOrdered>
std::size_t workspace(const Problem& p, const Device&) {
    return with_backward_shape(p.head_dim, [&]<class S>() {  // dQ_acc; LSE and D; dQ_turn
        return (static_cast<std::size_t>(p.batch) * p.heads * query_blocks<S>(p) * S::Br * (S::D + 2) + kOrdered * counters_of<S>(p)) * 4;
    });
}

}  // namespace

std::vector<BackwardVariant> backward_variants(void (*forward)(Forward&)) {
    return {{.id = "06e",
             .name = "backward",
             .refuses = refuses,
             .forward = forward,
             .any_forward = true,
             .backward = run_backward<false>,
             .products = 5,
             .movement = moves<false>,
             .saved_bytes = saved,
             .workspace_bytes = workspace<false>,
             .unit = tensor_16bit},
            {.id = "06e-det",
             .name = "deterministic",
             .refuses = refuses,
             .forward = forward,
             .any_forward = true,
             .backward = run_backward<true>,
             .products = 5,
             .movement = moves<true>,
             .saved_bytes = saved,
             .workspace_bytes = workspace<true>,
             .unit = tensor_16bit}};
}

}  // namespace step06
