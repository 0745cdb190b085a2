#include "06_hopper/stage.hpp"

#include "06_hopper/pingpong.cuh"
#include "06_hopper/tma_wgmma.cuh"

namespace step06 {
namespace {

using namespace workbook;

/// Calls f with 06a's shape for a head dimension. Two blocks an SM, of which one multiplies while the other one takes exponentials, as
/// far as registers and shared memory allow.
template <class F>
decltype(auto) with_shape(int d, F&& f) {
    switch (d) {
        case 64: return f.template operator()<Shape<64, 128, 2>>();
        case 128: return f.template operator()<Shape<128, 96, 2>>();
        default: return f.template operator()<Shape<256, 64, 1>>();
    }
}

/// The same of 06b. As many keys as O (64 D), S (64 Bc) and P (half of that) leave registers for, and at d = 256 shared memory.
template <class F>
decltype(auto) with_pingpong_shape(int d, F&& f) {
    switch (d) {
        case 64: return f.template operator()<PingpongShape<64, 128>>();
        case 128: return f.template operator()<PingpongShape<128, 128>>();
        default: return f.template operator()<PingpongShape<256, 80>>();
    }
}

/// @param bytes of shared memory that the tiles take
std::optional<std::string> refuses(const Problem& problem, const Device& device, std::size_t bytes) {
    if (problem.dtype == DType::f32) return "dtype = f32: tensor cores multiply f16 and bf16; variants 04a and 04b take f32";
    const int d = problem.head_dim;
    if (d != 64 && d != 128 && d != 256)
        return "head_dim = " + std::to_string(d) + ": 64, 128 and 256 are accepted; stages 01 and 02 take any up to 256";
    if (device.compute_capability / 10 != 9)
        return device.name + " has compute capability " + std::to_string(device.compute_capability / 10) + "." +
               std::to_string(device.compute_capability % 10) +
               ": wgmma is an instruction of 9.0 alone (H100, H200); stages 01 to 04 run on 8.0 and later";
    if (bytes > device.shared_memory_per_block)
        return "a block has " + std::to_string(device.shared_memory_per_block) + " bytes of shared memory: the tiles take " +
               std::to_string(bytes) + "; stages 01 and 02 need none";
    return std::nullopt;
}
std::optional<std::string> tma_wgmma_refuses(const Problem& problem, const Device& device) {
    return refuses(problem, device, with_shape(problem.head_dim, [&]<class S>() { return sizeof(Shared<__half, S>); }));
}
std::optional<std::string> pingpong_refuses(const Problem& problem, const Device& device) {
    return refuses(problem, device, with_pingpong_shape(problem.head_dim, [&]<class S>() { return sizeof(PingpongShared<__half, S>); }));
}

/// A map of a tensor (B, H, N, D) in 16 bits by boxes of `rows` rows. TMA's widest swizzle takes rows of 64 elements, so that D is
/// split in two dimensions, and one box is a whole tile all the same.
template <class T>
ptx::TensorMap map_of(const std::string& variant, const char* name, const TensorRef& t, const Problem& p, int heads, int seq, int rows) {
    try {
        return ptx::make_tensor_map<T, 5>(name, static_cast<T*>(t.data), {64, seq, p.head_dim / 64, heads, p.batch},
                                          {t.strides[2], 64, t.strides[1], t.strides[0]}, {64, rows, p.head_dim / 64, 1, 1},
                                          ptx::Swizzle::bytes_128);
    } catch (const simt::Error& error) {
        throw Refused(variant + ": " + error.what());
    }
}

/// Launches a kernel with a block for each Br rows of a head. Q and O move 64 rows at a time.
template <class T, class S, class Kernel>
void launch_tiles(const std::string& variant, const char* name, Kernel kernel, std::size_t smem, Forward& args) {
    const Problem& p = args.problem;
    const auto map = [&]<class E>(const char* tensor, const TensorRef& t, int heads, int seq, int rows) {
        return map_of<E>(variant, tensor, t, p, heads, seq, rows);
    };
    launch(
        kernel,
        {.name = name, .grid = dim3((p.seq + S::Br - 1) / S::Br, p.heads, p.batch), .block = S::kThreads, .smem = smem, .exec = &args.exec},
        map.template operator()<const T>("Q", args.q, p.heads, p.seq, 64),
        map.template operator()<const T>("K", args.k, p.kv_heads, p.kv_seq, S::Bc),
        map.template operator()<const T>("V", args.v, p.kv_heads, p.kv_seq, S::Bc),
        map.template operator()<T>("O", args.o, p.heads, p.seq, 64), args.LSE(), p.kv_seq, p.heads / p.kv_heads,
        p.scale() * 1.4426950408889634f, Mask(p));
}

/// Calls f with the element type of Q, K, V and O, whose rows must be where TMA can take them.
template <class F>
void with_tensors(const std::string& variant, Forward& args, F&& run) {
    for (const auto& [name, tensor] : {std::pair{"Q", args.q}, {"K", args.k}, {"V", args.v}, {"O", args.o}})
        require_16_byte_rows(variant, name, tensor, "variants 04a and 04b take any");
    if (args.problem.dtype == DType::f16)
        run.template operator()<__half>();
    else
        run.template operator()<__nv_bfloat16>();
}

void forward_tma_wgmma(Forward& args) {
    const std::string variant = "06a tma_wgmma";
    with_tensors(variant, args, [&]<class T>() {
        with_shape(args.problem.head_dim,
                   [&]<class S>() { launch_tiles<T, S>(variant, "tma_wgmma", tma_wgmma<T, S>, sizeof(Shared<T, S>), args); });
    });
}

void forward_pingpong(Forward& args) {
    const std::string variant = "06b pingpong";
    with_tensors(variant, args, [&]<class T>() {
        with_pingpong_shape(args.problem.head_dim, [&]<class S>() {
            launch_tiles<T, S>(variant, "pingpong", pingpong<T, S>, sizeof(PingpongShared<T, S>), args);
        });
    });
}

Movement tma_wgmma_moves(const Problem& p, const Device&) {
    return q_parallel_movement(p, with_shape(p.head_dim, [&]<class S>() { return Tiles{S::Br, S::Bc}; }), true);
}
Movement pingpong_moves(const Problem& p, const Device&) {
    return q_parallel_movement(p, with_pingpong_shape(p.head_dim, [&]<class S>() { return Tiles{S::Br, S::Bc}; }), true);
}

std::size_t no_workspace(const Problem&, const Device&) { return 0; }
Unit tensor_16bit(DType) { return Unit::tensor_16bit; }

}  // namespace

const Stage& stage() {
    static const Stage the_stage = {
        .id = "06",
        .title = "Hopper: TMA, WGMMA, warps with different tasks",
        .variants = {{"06a", "tma_wgmma", tma_wgmma_refuses, forward_tma_wgmma, tma_wgmma_moves, no_workspace, tensor_16bit},
                     {"06b", "pingpong", pingpong_refuses, forward_pingpong, pingpong_moves, no_workspace, tensor_16bit}},
    };
    return the_stage;
}

}  // namespace step06
