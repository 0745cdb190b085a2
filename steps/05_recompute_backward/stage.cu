#include "05_recompute_backward/stage.hpp"

#include "05_recompute_backward/before_and_after.cuh"
#include "05_recompute_backward/forward.cuh"
#include "05_recompute_backward/query_pass.cuh"
#include "05_recompute_backward/preprocess.cuh"
#include "05_recompute_backward/recompute.cuh"
#include "05_recompute_backward/standard.cuh"
#include "05_recompute_backward/tensor_core.cuh"

namespace step05 {
namespace {

using namespace workbook;

/// Calls f with the type and the lanes of a team that owns a row of d elements, 16 a lane.
template <class F>
void with_team(const Problem& p, F&& f) {
    with_type(p.dtype, [&]<class T>() {
        if (p.head_dim <= 2 * kPerLane) return f.template operator()<T, 2>();
        if (p.head_dim <= 4 * kPerLane) return f.template operator()<T, 4>();
        if (p.head_dim <= 8 * kPerLane) return f.template operator()<T, 8>();
        return f.template operator()<T, 16>();
    });
}

/// Calls f with the type and how many elements of a row of d a lane of a whole warp has.
template <class F>
void with_warp(const Problem& p, F&& f) {
    with_type(p.dtype, [&]<class T>() {
        if (p.head_dim <= 32) return f.template operator()<T, 1>();
        if (p.head_dim <= 64) return f.template operator()<T, 2>();
        if (p.head_dim <= 128) return f.template operator()<T, 4>();
        return f.template operator()<T, 8>();
    });
}

/// A launch of one team of `lanes` lanes for each query row.
simt::LaunchConfig by_row(const char* name, int lanes, const Problem& p, const simt::Execution& exec) {
    const int rows = kThreads / lanes;
    return {.name = name, .grid = dim3((p.seq + rows - 1) / rows, p.heads, p.batch), .block = kThreads, .exec = &exec};
}

template <class T>
TensorView<T, 3> by_rows(const char* name, float* data, const Problem& p) {
    return simt::packed_view<T, 3>(name, data, {p.batch, p.heads, p.seq});
}

std::size_t rows(const Problem& p) { return static_cast<std::size_t>(p.rows()); }
std::size_t lse_bytes(const Problem& p, const Device&) { return rows(p) * sizeof(float); }

void forward_o_lse(Forward& args) {
    const Problem& p = args.problem;
    with_team(p, [&]<class T, int kLanes>() {
        launch(forward<T, kLanes>, by_row("forward", kLanes, p, args.exec),  //
               args.Q<T>(), args.K<T>(), args.V<T>(), args.O<T>(), args.LSE(), p.scale(), Mask(p));
    });
}

/// D = rowsum(dO o O), in the workspace.
float* launch_row_sums(Backward& args) {
    const Problem& p = args.problem;
    float* const d = args.workspace.get<float>("D", rows(p));
    with_warp(p, [&]<class T, int kElements>() {
        launch(row_sums<T, kElements>, by_row("row_sums", 32, p, args.exec), args.O<T>(), args.dO<T>(), by_rows<float>("D", d, p));
    });
    return d;
}

// ---- 05a: P from the forward pass ----

std::optional<std::string> refuses_nothing(const Problem&, const Device&) { return std::nullopt; }  // check() has refused d > 256

std::size_t square(const Problem& p) { return rows(p) * p.kv_seq; }

/// An N x N matrix of each head, in the workspace.
template <class T, class Args>
TensorView<T, 4> square_view(const char* name, Args& args) {
    const Problem& p = args.problem;
    return simt::packed_view<T, 4>(name, args.workspace.template get<std::remove_const_t<T>>(name, square(p)),
                                   {p.batch, p.heads, p.seq, p.kv_seq});
}

void forward_keeping_P(Forward& args) {
    forward_o_lse(args);
    const Problem& p = args.problem;
    with_team(p, [&]<class T, int kLanes>() {
        launch(keep_P<T, kLanes>, by_row("keep_P", kLanes, p, args.exec),  //
               args.Q<T>(), args.K<T>(), by_rows<const float>("LSE", args.lse, p), square_view<T>("P", args), p.scale(), Mask(p));
    });
}

void backward_standard(Backward& args) {
    const Problem& p = args.problem;
    float* const d = launch_row_sums(args);
    with_team(p, [&]<class T, int kLanes>() {
        const auto by_key = [&](const char* name) -> simt::LaunchConfig {
            const int keys = kBlockKeys<kLanes>;
            return {.name = name,
                    .grid = dim3((p.kv_seq + keys - 1) / keys, p.kv_heads, p.batch),
                    .block = kThreads,
                    .smem = sizeof(float) * kColumnFloats<kLanes>,
                    .exec = &args.exec};
        };
        launch(grad_KV<T, kLanes>, by_key("grad_V"), square_view<const T>("P", args), args.dO<T>(), args.dV<T>(), 1.0f);
        launch(grad_P<T, kLanes>, by_row("grad_P", kLanes, p, args.exec), args.dO<T>(), args.V<T>(), square_view<T>("dP", args));
        launch(grad_S<T>, by_row("grad_S", 32, p, args.exec),  //
               square_view<const T>("P", args), square_view<const T>("dP", args), by_rows<const float>("D", d, p),
               square_view<T>("dS", args));
        launch(grad_Q<T, kLanes>, by_row("grad_Q", kLanes, p, args.exec),  //
               square_view<const T>("dS", args), args.K<T>(), args.dQ<T>(), p.scale());
        launch(grad_KV<T, kLanes>, by_key("grad_K"), square_view<const T>("dS", args), args.Q<T>(), args.dK<T>(), p.scale());
    });
}

Movement standard_moves(const Problem& p, const Device&) { return standard_backward_movement(p); }
std::size_t standard_saved(const Problem& p, const Device& device) { return lse_bytes(p, device) + size_of(p.dtype) * square(p); }
std::size_t standard_workspace(const Problem& p, const Device&) {
    return 3 * size_of(p.dtype) * square(p) + rows(p) * sizeof(float);  // P, dP, dS; D
}

// ---- 05b: P computed again, float32 tiles on the FMA units ----

std::optional<std::string> refuses_fp32(const Problem& problem, const Device& device) {
    const int d = problem.head_dim;
    if (d != 32 && d != 64 && d != 128)
        return "head_dim = " + std::to_string(d) + ": 32, 64 and 128 are accepted; variant 05a takes any up to 256";
    const std::size_t bytes = with_fp32_head_dim(d, [&]<int D>() { return sizeof(float) * Fp32Tiles<D>::kSharedFloats; });
    if (bytes > device.shared_memory_per_block)
        return "a block has " + std::to_string(device.shared_memory_per_block) + " bytes of shared memory: the tiles take " +
               std::to_string(bytes) + "; variant 05a needs at most " + std::to_string(sizeof(float) * kColumnFloats<2>);
    return std::nullopt;
}

template <DqBy kDq>
void backward_recompute(Backward& args) {
    constexpr bool kAtomics = kDq == DqBy::atomics;
    const Problem& p = args.problem;
    float* const d = launch_row_sums(args);
    float* const sum = args.workspace.get<float>("dQ_acc", kAtomics ? rows(p) * p.head_dim : 0);
    const std::array<int, 4> shape = {p.batch, p.heads, p.seq, p.head_dim};
    const auto D3 = by_rows<const float>("D", d, p);
    if constexpr (kAtomics) {
        with_warp(p, [&]<class, int kElements>() {
            launch(zero<kElements>, by_row("zero", 32, p, args.exec), simt::packed_view<float, 4>("dQ_acc", sum, shape));
        });
    }
    with_type(p.dtype, [&]<class T>() {
        with_fp32_head_dim(p.head_dim, [&]<int D>() {
            using Tile = Fp32Tiles<D>;
            const std::size_t smem = sizeof(float) * Tile::kSharedFloats;
            launch(recompute<T, D, kAtomics>,
                   {.name = "recompute",
                    .grid = dim3((p.kv_seq + Tile::Bc - 1) / Tile::Bc, p.kv_heads, p.batch),
                    .block = kTileThreads,
                    .smem = smem,
                    .exec = &args.exec},
                   args.Q<T>(), args.K<T>(), args.V<T>(), args.dO<T>(), args.LSE(), D3, simt::packed_view<float, 4>("dQ_acc", sum, shape),
                   args.dK<T>(), args.dV<T>(), p.scale(), Mask(p));
            if constexpr (!kAtomics) {
                launch(query_pass<T, D>,
                       {.name = "query_pass",
                        .grid = dim3((p.seq + Tile::Br - 1) / Tile::Br, p.heads, p.batch),
                        .block = kTileThreads,
                        .smem = smem,
                        .exec = &args.exec},
                       args.Q<T>(), args.K<T>(), args.V<T>(), args.dO<T>(), args.LSE(), D3, args.dQ<T>(), p.scale(), Mask(p));
            }
        });
    });
    if constexpr (kAtomics) {
        with_warp(p, [&]<class T, int kElements>() {
            launch(convert<T, kElements>, by_row("convert", 32, p, args.exec),  //
                   simt::packed_view<const float, 4>("dQ_acc", sum, shape), args.dQ<T>(), p.scale());
        });
    }
}

template <DqBy kDq>
Movement recompute_moves(const Problem& p, const Device&) {
    const Tiles tiles = with_fp32_head_dim(p.head_dim, [&]<int D>() { return Tiles{Fp32Tiles<D>::Br, Fp32Tiles<D>::Bc}; });
    return recompute_backward_movement(p, tiles, kSide, kDq);
}

template <DqBy kDq>
std::size_t recompute_workspace(const Problem& p, const Device&) {
    return rows(p) * sizeof(float) * (kDq == DqBy::atomics ? p.head_dim + 1 : 1);  // D; dQ_acc
}

// ---- 05c: tensor cores ----

/// Calls f with the shape for a problem: the fastest of those measured on an H200 (see the chapter). Blocks of 64 keys at d = 128 where
/// blocks of 128 would leave SMs without work, do not fit the device, or have few turns to walk.
template <class F>
decltype(auto) with_shape(const Problem& p, const Device& device, F&& f) {
    if (p.head_dim == 64) return f.template operator()<Shape<64, 64, 32, 4, 2, 1>>();
    using Large = Shape<128, 64, 32, 8, 2, 2>;
    const bool few = static_cast<long long>(p.batch) * p.kv_heads * ((p.kv_seq + 127) / 128) < device.sms,
               fits = sizeof(Shared<__half, Large>) <= device.shared_memory_per_block, short_walk = p.causal && p.seq <= 1024;
    return few || !fits || short_walk ? f.template operator()<Shape<128, 64, 32, 4, 2, 2>>() : f.template operator()<Large>();
}

std::optional<std::string> refuses_tensor_core(const Problem& problem, const Device& device) {
    if (problem.dtype == DType::f32) return "dtype = f32: tensor cores multiply f16 and bf16; variants 05a and 05b take f32";
    if (problem.head_dim != 64 && problem.head_dim != 128)
        return "head_dim = " + std::to_string(problem.head_dim) + ": 64 and 128 are accepted" +
               (problem.head_dim == 256 ? " (the sums of dK and dV for 16 keys would take all 255 registers of a thread)" : "") +
               "; variant 05a takes any up to 256";
    const std::size_t bytes = with_shape(problem, device, [&]<class S>() { return sizeof(Shared<__half, S>); });
    if (bytes > device.shared_memory_per_block)
        return "a block has " + std::to_string(device.shared_memory_per_block) + " bytes of shared memory: the tiles take " +
               std::to_string(bytes) + "; variant 05a needs at most " + std::to_string(sizeof(float) * kColumnFloats<2>);
    return std::nullopt;
}

/// Query rows of a head up to whole blocks of Br.
template <class S>
int padded_rows(const Problem& p) {
    return (p.seq + S::Br - 1) / S::Br * S::Br;
}

void backward_tensor_core(Backward& args) {
    const Problem& p = args.problem;
    require_16_byte_rows("05c tensor_core", args, "variants 05a and 05b take any");
    with_16_bit_type(p.dtype, [&]<class T>() {
        with_shape(p, args.device, [&]<class S>() {
            const int padded = padded_rows<S>(p);
            const std::array<int, 3> statistics = {p.batch, p.heads, padded};
            const std::array<int, 4> sums = {p.batch, p.heads, padded / S::Br, S::Br * S::D};
            const std::size_t all_rows = static_cast<std::size_t>(p.batch) * p.heads * padded;
            float* const lse2 = args.workspace.get<float>("LSE2", all_rows);
            float* const d = args.workspace.get<float>("D", all_rows);
            float* const dq = args.workspace.get<float>("dQ_acc", all_rows * S::D);
            const auto by_rows = [&](const char* name, int rows, int rows_of_block) -> simt::LaunchConfig {
                return {.name = name,
                        .grid = dim3((rows + rows_of_block - 1) / rows_of_block, p.heads, p.batch),
                        .block = kRowThreads,
                        .exec = &args.exec};
            };
            launch(prepare<T, S>, by_rows("prepare", padded, kRowsOfBlock<S::D>),  //
                   args.O<T>(), args.dO<T>(), args.LSE(), simt::packed_view<float, 3>("LSE2", lse2, statistics),
                   simt::packed_view<float, 3>("D", d, statistics), simt::packed_view<float, 4>("dQ_acc", dq, sums));
            launch(tensor_core<T, S>,
                   {.name = "tensor_core",
                    .grid = dim3((p.kv_seq + S::Bc - 1) / S::Bc, p.kv_heads, p.batch),
                    .block = S::kThreads,
                    .smem = sizeof(Shared<T, S>),
                    .exec = &args.exec},
                   args.Q<T>(), args.K<T>(), args.V<T>(), args.dO<T>(), simt::packed_view<const float, 3>("LSE2", lse2, statistics),
                   simt::packed_view<const float, 3>("D", d, statistics), simt::packed_view<float, 4>("dQ_acc", dq, sums), args.dK<T>(),
                   args.dV<T>(), p.scale(), Mask(p));
            launch(finish<T, S>, by_rows("finish", p.seq, 2 * kRowsOfBlock<S::D>),  //
                   simt::packed_view<const float, 4>("dQ_acc", dq, sums), args.dQ<T>(), p.scale());
        });
    });
}

Movement tensor_core_moves(const Problem& p, const Device& device) {
    return tensor_core_backward_movement(p, with_shape(p, device, [&]<class S>() { return Tiles{S::Br, S::Bc}; }));
}

std::size_t tensor_core_workspace(const Problem& p, const Device& device) {
    const int padded = with_shape(p, device, [&]<class S>() { return padded_rows<S>(p); });
    return static_cast<std::size_t>(p.batch) * p.heads * padded * sizeof(float) * (p.head_dim + 2);  // dQ_acc; LSE2, D
}

Unit fp32(DType) { return Unit::fp32; }
Unit tensor_16bit(DType) { return Unit::tensor_16bit; }

}  // namespace

const Stage& stage() {
    static const Stage the_stage = {
        .id = "05",
        .title = "Backward: P computed again instead of remembered",
        .backward = {{.id = "05a",
                      .name = "standard",
                      .refuses = refuses_nothing,
                      .forward = forward_keeping_P,
                      .any_forward = false,
                      .backward = backward_standard,
                      .products = 4,
                      .movement = standard_moves,
                      .saved_bytes = standard_saved,
                      .workspace_bytes = standard_workspace,
                      .unit = fp32},
                     {.id = "05b",
                      .name = "recompute",
                      .refuses = refuses_fp32,
                      .forward = forward_o_lse,
                      .any_forward = true,
                      .backward = backward_recompute<DqBy::atomics>,
                      .products = 5,
                      .movement = recompute_moves<DqBy::atomics>,
                      .saved_bytes = lse_bytes,
                      .workspace_bytes = recompute_workspace<DqBy::atomics>,
                      .unit = fp32},
                     {.id = "05b-det",
                      .name = "deterministic",
                      .refuses = refuses_fp32,
                      .forward = forward_o_lse,
                      .any_forward = true,
                      .backward = backward_recompute<DqBy::own_pass>,
                      .products = 7,
                      .movement = recompute_moves<DqBy::own_pass>,
                      .saved_bytes = lse_bytes,
                      .workspace_bytes = recompute_workspace<DqBy::own_pass>,
                      .unit = fp32},
                     {.id = "05c",
                      .name = "tensor_core",
                      .refuses = refuses_tensor_core,
                      .forward = forward_o_lse,
                      .any_forward = true,
                      .backward = backward_tensor_core,
                      .products = 5,
                      .movement = tensor_core_moves,
                      .saved_bytes = lse_bytes,
                      .workspace_bytes = tensor_core_workspace,
                      .unit = tensor_16bit}},
    };
    return the_stage;
}

}  // namespace step05
