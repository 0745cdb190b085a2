#include "06_hopper/stage.hpp"

#include "06_hopper/host.hpp"
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

std::optional<std::string> tma_wgmma_refuses(const Problem& problem, const Device& device) {
    return refuses_16_bit(problem, device, with_shape(problem.head_dim, [&]<class S>() { return sizeof(Shared<__half, S>); }));
}
std::optional<std::string> pingpong_refuses(const Problem& problem, const Device& device) {
    return refuses_16_bit(problem, device,
                          with_pingpong_shape(problem.head_dim, [&]<class S>() { return sizeof(PingpongShared<__half, S>); }));
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

std::vector<BackwardVariant> all_backward_variants() {
    std::vector<BackwardVariant> variants = backward_variants(forward_pingpong);
    variants.push_back(exchange_variant(forward_pingpong));
    variants.push_back(reduce_scatter_variant(forward_pingpong));
    return variants;
}

std::size_t no_workspace(const Problem&, const Device&) { return 0; }

}  // namespace

const Stage& stage() {
    static const Stage the_stage = {
        .id = "06",
        .title = "Hopper: TMA, WGMMA, warps with different tasks",
        .variants = {{"06a", "tma_wgmma", tma_wgmma_refuses, forward_tma_wgmma, tma_wgmma_moves, no_workspace, tensor_16bit},
                     {"06b", "pingpong", pingpong_refuses, forward_pingpong, pingpong_moves, no_workspace, tensor_16bit},
                     vote_first_variant(),
                     fp8_variant()},
        .backward = all_backward_variants(),
    };
    return the_stage;
}

}  // namespace step06
