#include "06_hopper/stage.hpp"

#include "06_hopper/tma_wgmma.cuh"

namespace step06 {
namespace {

using namespace workbook;

/// Calls f with the shape for a head dimension. Two blocks an SM, of which one multiplies while the other one takes exponentials, as far
/// as registers and shared memory allow.
template <class F>
decltype(auto) with_shape(int d, F&& f) {
    switch (d) {
        case 64: return f.template operator()<Shape<64, 128, 2>>();
        case 128: return f.template operator()<Shape<128, 96, 2>>();
        default: return f.template operator()<Shape<256, 64, 1>>();
    }
}

std::optional<std::string> refuses(const Problem& problem, const Device& device) {
    if (problem.dtype == DType::f32) return "dtype = f32: tensor cores multiply f16 and bf16; variants 04a and 04b take f32";
    const int d = problem.head_dim;
    if (d != 64 && d != 128 && d != 256)
        return "head_dim = " + std::to_string(d) + ": 64, 128 and 256 are accepted; stages 01 and 02 take any up to 256";
    if (device.compute_capability / 10 != 9)
        return device.name + " has compute capability " + std::to_string(device.compute_capability / 10) + "." +
               std::to_string(device.compute_capability % 10) +
               ": wgmma is an instruction of 9.0 alone (H100, H200); stages 01 to 04 run on 8.0 and later";
    const std::size_t bytes = with_shape(d, [&]<class S>() { return sizeof(Shared<__half, S>); });
    if (bytes > device.shared_memory_per_block)
        return "a block has " + std::to_string(device.shared_memory_per_block) + " bytes of shared memory: the tiles take " +
               std::to_string(bytes) + "; stages 01 and 02 need none";
    return std::nullopt;
}

/// A map of a tensor (B, H, N, D) in 16 bits by boxes of `rows` rows. TMA's widest swizzle takes rows of 64 elements, so that D is
/// split in two dimensions, and one box is a whole tile all the same.
template <class T>
ptx::TensorMap map_of(const char* name, const TensorRef& t, const Problem& p, int heads, int seq, int rows) {
    try {
        return ptx::make_tensor_map<T, 5>(name, static_cast<T*>(t.data), {64, seq, p.head_dim / 64, heads, p.batch},
                                          {t.strides[2], 64, t.strides[1], t.strides[0]}, {64, rows, p.head_dim / 64, 1, 1},
                                          ptx::Swizzle::bytes_128);
    } catch (const simt::Error& error) {
        throw Refused(std::string("06a tma_wgmma: ") + error.what());
    }
}

void forward_tma_wgmma(Forward& args) {
    const Problem& p = args.problem;
    for (const auto& [name, tensor] : {std::pair{"Q", args.q}, {"K", args.k}, {"V", args.v}, {"O", args.o}})
        require_16_byte_rows("06a tma_wgmma", name, tensor, "variants 04a and 04b take any");
    const auto run = [&]<class T>() {
        with_shape(p.head_dim, [&]<class S>() {
            launch(tma_wgmma<T, S>,
                   {.name = "tma_wgmma",
                    .grid = dim3((p.seq + S::Br - 1) / S::Br, p.heads, p.batch),
                    .block = S::kThreads,
                    .smem = sizeof(Shared<T, S>),
                    .exec = &args.exec},
                   map_of<const T>("Q", args.q, p, p.heads, p.seq, S::Br), map_of<const T>("K", args.k, p, p.kv_heads, p.kv_seq, S::Bc),
                   map_of<const T>("V", args.v, p, p.kv_heads, p.kv_seq, S::Bc), map_of<T>("O", args.o, p, p.heads, p.seq, S::Br),
                   args.LSE(), p.kv_seq, p.heads / p.kv_heads, p.scale() * 1.4426950408889634f, Mask(p));
        });
    };
    if (p.dtype == DType::f16)
        run.template operator()<__half>();
    else
        run.template operator()<__nv_bfloat16>();
}

Movement moves(const Problem& p, const Device&) {
    return q_parallel_movement(p, with_shape(p.head_dim, [&]<class S>() { return Tiles{S::Br, S::Bc}; }), true);
}

std::size_t no_workspace(const Problem&, const Device&) { return 0; }
Unit tensor_16bit(DType) { return Unit::tensor_16bit; }

}  // namespace

const Stage& stage() {
    static const Stage the_stage = {
        .id = "06",
        .title = "Hopper: TMA, WGMMA, warps with different tasks",
        .variants = {{"06a", "tma_wgmma", refuses, forward_tma_wgmma, moves, no_workspace, tensor_16bit}},
    };
    return the_stage;
}

}  // namespace step06
