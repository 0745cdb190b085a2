#include "04_flash_attention_2/stage.hpp"

#include "04_flash_attention_2/causal.cuh"
#include "04_flash_attention_2/q_parallel.cuh"
#include "04_flash_attention_2/tensor_core.cuh"

#include <cmath>

namespace step04 {
namespace {

using namespace workbook;

std::string head_dim_refusal(const Problem& problem, const std::string& accepted) {
    return "head_dim = " + std::to_string(problem.head_dim) + ": " + accepted + " are accepted; stages 01 and 02 take any up to 256";
}

std::string memory_refusal(const Device& device, std::size_t bytes) {
    return "a block has " + std::to_string(device.shared_memory_per_block) + " bytes of shared memory: the tiles take " +
           std::to_string(bytes) + "; stages 01 and 02 need none";
}

dim3 grid_of(const Problem& p, int Br) { return dim3((p.seq + Br - 1) / Br, p.heads, p.batch); }

// ---- 04a and 04b: float32 tiles on the FMA units ----

std::optional<std::string> refuses_fp32(const Problem& problem, const Device& device) {
    const int d = problem.head_dim;
    if (d != 32 && d != 64 && d != 128) return head_dim_refusal(problem, "32, 64 and 128");
    const std::size_t bytes = with_fp32_head_dim(d, [&]<int D>() { return sizeof(float) * Fp32Tiles<D>::kSharedFloats; });
    if (bytes > device.shared_memory_per_block) return memory_refusal(device, bytes);
    return std::nullopt;
}

template <bool kCausal>
void forward_fp32(Forward& args) {
    const Problem& p = args.problem;
    with_type(p.dtype, [&]<class T>() {
        with_fp32_head_dim(p.head_dim, [&]<int D>() {
            launch(kCausal ? causal<T, D> : q_parallel<T, D>,
                   {.name = kCausal ? "causal" : "q_parallel",
                    .grid = grid_of(p, Fp32Tiles<D>::Br),
                    .block = kThreads,
                    .smem = sizeof(float) * Fp32Tiles<D>::kSharedFloats,
                    .exec = &args.exec},
                   args.Q<T>(), args.K<T>(), args.V<T>(), args.O<T>(), args.LSE(), p.scale(), Mask(p));
        });
    });
}

Tiles fp32_tiles(const Problem& p) {
    return with_fp32_head_dim(p.head_dim, [&]<int D>() { return Tiles{Fp32Tiles<D>::Br, Fp32Tiles<D>::Bc}; });
}

// ---- 04c: tensor cores ----

/// Calls f with the shape for a problem: the fastest of those measured on an H200 (see the chapter). Where large tiles would leave
/// SMs without work, or do not fit the device, smaller ones make twice the blocks.
template <class F>
decltype(auto) with_shape(const Problem& p, const Device& device, F&& f) {
    const bool few = static_cast<long long>(p.batch) * p.heads * ((p.seq + 127) / 128) < device.sms;
    switch (p.head_dim) {
        case 64: return few ? f.template operator()<Shape<64, 64, 4, 1>>() : f.template operator()<Shape<64, 64, 4, 2>>();
        case 128: return few ? f.template operator()<Shape<128, 64, 4, 1>>() : f.template operator()<Shape<128, 64, 4, 2>>();
        default: {
            using Large = Shape<256, 64, 8, 1>;
            const bool fits = sizeof(Shared<__half, Large>) <= device.shared_memory_per_block;
            return few || !fits ? f.template operator()<Shape<256, 32, 4, 1>>() : f.template operator()<Large>();
        }
    }
}

std::optional<std::string> refuses_tensor_core(const Problem& problem, const Device& device) {
    if (problem.dtype == DType::f32) return "dtype = f32: tensor cores multiply f16 and bf16; variants 04a and 04b take f32";
    const int d = problem.head_dim;
    if (d != 64 && d != 128 && d != 256) return head_dim_refusal(problem, "64, 128 and 256");
    const std::size_t bytes = with_shape(problem, device, [&]<class S>() { return sizeof(Shared<__half, S>); });
    if (bytes > device.shared_memory_per_block) return memory_refusal(device, bytes);
    return std::nullopt;
}

void forward_tensor_core(Forward& args) {
    const Problem& p = args.problem;
    require_16_byte_rows("04c tensor_core", args, "variants 04a and 04b take any");
    with_16_bit_type(p.dtype, [&]<class T>() {
        with_shape(p, args.device, [&]<class S>() {
            launch(
                tensor_core<T, S>,
                {.name = "tensor_core", .grid = grid_of(p, S::Br), .block = S::kThreads, .smem = sizeof(Shared<T, S>), .exec = &args.exec},
                args.Q<T>(), args.K<T>(), args.V<T>(), args.O<T>(), args.LSE(), p.scale() * 1.4426950408889634f, Mask(p));
        });
    });
}

// ---- what moves ----

Movement q_parallel_moves(const Problem& p, const Device&) { return q_parallel_movement(p, fp32_tiles(p), false); }
Movement causal_moves(const Problem& p, const Device&) { return q_parallel_movement(p, fp32_tiles(p), true); }
Movement tensor_core_moves(const Problem& p, const Device& device) {
    return q_parallel_movement(p, with_shape(p, device, [&]<class S>() { return Tiles{S::Br, S::Bc}; }), true);
}

std::size_t no_workspace(const Problem&, const Device&) { return 0; }
Unit fp32(DType) { return Unit::fp32; }
Unit tensor_16bit(DType) { return Unit::tensor_16bit; }

}  // namespace

const Stage& stage() {
    static const Stage the_stage = {
        .id = "04",
        .title = "FlashAttention-2: parallel over queries, causal scheduling, tensor cores",
        .variants = {{"04a", "q_parallel", refuses_fp32, forward_fp32<false>, q_parallel_moves, no_workspace, fp32},
                     {"04b", "causal", refuses_fp32, forward_fp32<true>, causal_moves, no_workspace, fp32},
                     {"04c", "tensor_core", refuses_tensor_core, forward_tensor_core, tensor_core_moves, no_workspace, tensor_16bit}},
    };
    return the_stage;
}

}  // namespace step04
